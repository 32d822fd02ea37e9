"""Calls of networks: the written graph gives torch's values, for any number of rows."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.onnx_sessions import onnx_session


class Called(nn.Module):
    """A call on [B, 6] as a predictor has it: its results are a tuple."""

    def __init__(self, call: Callable[..., Tensor], *layers: nn.Module) -> None:
        super().__init__()
        self.call, self.layers = call, nn.ModuleList(layers)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (self.call(x, *self.layers),)


@pytest.mark.parametrize(
    ("rows", "module"),
    [
        (5, Called(nn.ELU(0.5))),
        (5, Called(nn.Softmax(dim=-1))),
        (5, Called(lambda x: x.view((-1, 3, 2)))),
        (5, Called(lambda x, layer: layer(x.view(x.shape[0], 2, -1)), nn.Flatten())),
        (5, Called(lambda x: x.view(-1, 2, 3).flatten(0, 1))),
        (5, Called(lambda x: x[:, -1] + x[0, -2])),
        (5, Called(lambda x: x[:, 1::2] * x[:1, -3:])),
        (5, Called(lambda x: torch.cat([x, x]))),
        # an axis from the last, of no rows
        (0, Called(lambda x: (x >= 0).any(-1))),
        (0, Called(lambda x: x.argmax(dim=-1, keepdim=True))),
        (0, Called(lambda x: x.amax(-1))),
        (0, Called(lambda x: x.view(-1, 3, 2).sum((-1, -2)))),
        (0, Called(lambda x: x.view(-1, 3, 2).logsumexp(-2))),
    ],
)
def test_a_call_has_torchs_values_for_any_number_of_rows(module: Called, rows: int) -> None:
    given = torch.randn(rows, 6, generator=torch.Generator().manual_seed(0))
    [expected] = module.eval()(given)
    axes = {"y": tuple(f"axis_{axis}" for axis in range(expected.dim()))}
    session = onnx_session(module, (torch.ones(3, 6),), inputs={"x": ("batch", 6)}, outputs=axes)
    [values] = session.run(None, {"x": given.numpy()})
    torch.testing.assert_close(torch.from_numpy(values), expected, rtol=1e-5, atol=1e-6)
