"""The call contract of 2019, through files read with torch.jit.load."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

NAN, INF = float("nan"), float("inf")


def load(folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.", DeprecationWarning)
        return torch.jit.load(folder / "model.torchscript")  # type: ignore[no-untyped-call]


def features(rows: list[list[float]]) -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.tensor(rows)
    return values, ~values.isnan()


def test_discrete_contract(discrete_folder: Path) -> None:
    module = load(discrete_folder)
    names, q = module(features([[1, 5], [NAN, 1]]))
    assert (names, q.tolist()) == (["left", "right", "stay"], [[3, 4, 0], [0, 0, 1]])
    assert (module.state_sorted_features(), module.action_sorted_features()) == ([7, 4], [])
    absent = torch.tensor([[True, False]])  # or bytes, as in 2019
    assert module((torch.tensor([[1.0, 5.0]]), absent.to(torch.uint8)))[1].tolist() == [[1, 0, 0]]
    assert module((torch.tensor([[1.0, INF]]), absent))[1].tolist() == [[1, 0, 0]]


def test_infinity_is_refused(discrete_folder: Path, parametric_folder: Path) -> None:
    with pytest.raises(torch.jit.Error, match="got infinity"):
        load(discrete_folder)(features([[1, INF]]))
    with pytest.raises(torch.jit.Error, match="got infinity"):
        load(parametric_folder)(features([[1]]), features([[-INF]]))


def test_pairs_with_equal_states_are_one_list(parametric_folder: Path) -> None:
    module = load(parametric_folder)
    # state 5 has candidates 1, 2, 6 (mean 3); state 0 has 4; a missing state reads as 0, so it joins: 4 and 8, mean 6
    names, q = module(features([[5], [0], [5], [NAN], [5]]), features([[1], [4], [2], [8], [6]]))
    assert (names, q.tolist()) == (["Q"], [[3], [-2], [4], [2], [8]])
    assert (module.state_sorted_features(), module.action_sorted_features()) == ([3], [9])
    empty = (torch.zeros(0, 1), torch.zeros(0, 1, dtype=torch.bool))
    assert module(empty, empty)[1].shape == (0, 1)


def test_what_the_log_hardly_takes_is_served_as_in_2019(
    restricted_folder: Path, restricted_parametric_folder: Path
) -> None:
    """0.04 / 0.5 is below 0.1: action 1, of q 4 and 0, is lowered by 1e10, to float32's nearest.

    State 5 has 1, 2, 6: e^-4 and e^-5 are below 0.1; state 0 has 4 and 5: e^-1 is not; one alone is likeliest.
    """
    assert load(restricted_folder)(features([[1, 5], [NAN, 1]]))[1].tolist() == [[3, -1e10, 0], [0, -1e10, 1]]
    pairs = features([[5], [0], [5], [0], [5], [9]]), features([[1], [4], [2], [5], [6], [-8]])
    q = load(restricted_parametric_folder)(*pairs)[1]
    assert q.tolist() == [[-1e10], [-0.5], [-1e10], [0.5], [8], [9]]
