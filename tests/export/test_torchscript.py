"""The call contract of 2019, through files read with torch.jit.load."""

from math import inf as INF
from math import nan as NAN
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.filterwarnings(r"ignore:`torch\.jit\.:DeprecationWarning")
ACTIONS = ["left", "right", "stay"]
ABSENT = torch.tensor([[True, False]])


def load(folder: Path) -> Any:
    return torch.jit.load(folder / "model.torchscript")  # type: ignore[no-untyped-call]


def features(rows: list[list[float]]) -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.tensor(rows)
    return values, ~values.isnan()


@pytest.mark.parametrize(
    ("folder", "given", "names", "q"),
    [
        ("discrete_folder", [features([[1, 5], [NAN, 1]])], ACTIONS, [[3, 4, 0], [0, 0, 1]]),
        # presence, or bytes as in 2019; infinity that is not there is not read
        ("discrete_folder", [(torch.tensor([[1.0, 5.0]]), ABSENT.to(torch.uint8))], ACTIONS, [[1, 0, 0]]),
        ("discrete_folder", [(torch.tensor([[1.0, INF]]), ABSENT)], ACTIONS, [[1, 0, 0]]),
        # pairs with equal states are one list: state 5 has candidates 1, 2, 6 (mean 3); state 0 has 4; a missing state
        # reads as 0, so it joins: 4 and 8, mean 6
        ("parametric_folder", [features([[5], [0], [5], [NAN], [5]]), features([[1], [4], [2], [8], [6]])], ["Q"],
         [[3], [-2], [4], [2], [8]]),
        ("parametric_folder", [(torch.zeros(0, 1), torch.zeros(0, 1, dtype=torch.bool))] * 2, ["Q"], []),
        # 0.04 / 0.5 is below 0.1: action 1, of q 4 and 0, is lowered by 1e10, to float32's nearest
        ("restricted_folder", [features([[1, 5], [NAN, 1]])], ACTIONS, [[3, -1e10, 0], [0, -1e10, 1]]),
        # state 5 has 1, 2, 6: e^-4 and e^-5 are below 0.1; state 0 has 4 and 5: e^-1 is not; one alone is likeliest
        ("restricted_parametric_folder",
         [features([[5], [0], [5], [0], [5], [9]]), features([[1], [4], [2], [5], [6], [-8]])], ["Q"],
         [[-1e10], [-0.5], [-1e10], [0.5], [8], [9]]),
    ],
)  # fmt: skip
def test_names_and_values_of_the_call_of_2019(
    folder: str, given: list[Any], names: list[str], q: list[list[float]], request: pytest.FixtureRequest
) -> None:
    called = load(request.getfixturevalue(folder))(*given)
    assert (called[0], called[1].tolist()) == (names, q)


@pytest.mark.parametrize(
    ("folder", "given", "state", "action"),
    [
        ("discrete_folder", [features([[1, INF]])], [7, 4], []),
        ("parametric_folder", [features([[1]]), features([[-INF]])], [3], [9]),
    ],
)
def test_features_are_named_in_order_and_infinity_is_refused(
    folder: str, given: list[Any], state: list[int], action: list[int], request: pytest.FixtureRequest
) -> None:
    module = load(request.getfixturevalue(folder))
    assert (module.state_sorted_features(), module.action_sorted_features()) == (state, action)
    with pytest.raises(torch.jit.Error, match="got infinity"):
        module(*given)
