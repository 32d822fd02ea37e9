"""Calls of this package's networks: the written graph gives torch's values, for any number of rows."""

import re
from collections.abc import Callable

import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from reagent_lite.export.onnx_graph import onnx_model


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
        # an axis from the last
        (0, Called(lambda x: (x >= 0).any(-1))),
        (0, Called(lambda x: x.argmax(dim=-1, keepdim=True))),
        (0, Called(lambda x: x.amax(-1))),
    ],
)
def test_a_call_has_torchs_values_for_any_number_of_rows(module: Called, rows: int) -> None:
    given = torch.randn(rows, 6, generator=torch.Generator().manual_seed(0))
    [expected] = module.eval()(given)
    axes = {"y": tuple(f"axis_{axis}" for axis in range(expected.dim()))}
    model = onnx_model(module, (torch.ones(3, 6),), inputs={"x": ("batch", 6)}, outputs=axes)
    [values] = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": given.numpy()})
    torch.testing.assert_close(torch.from_numpy(values), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda x: torch.add(x, x, alpha=2), "add of (x, x, alpha=2)"),
        (lambda x: x @ x.T, "getattr of (x, T)"),
        (lambda x: x.flatten(), "flatten of (x)"),
        (lambda x: x[:, None], "getitem of (x, (slice(None, None, None), None))"),
    ],
)
def test_arguments_without_an_onnx_form_are_named(call: Callable[..., Tensor], named: str) -> None:
    with pytest.raises(NotImplementedError, match=re.escape(f"torch's {named} has no ONNX form here")):
        onnx_model(Called(call), (torch.zeros(3, 6),), inputs={"x": ("batch", 6)}, outputs={"y": ()})
