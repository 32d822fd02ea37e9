"""Lists of candidates that differ in length: what is not there is not computed, and nothing else changes."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from reagent_lite.models.q_networks import BatchNorm, NetworkSettings, allowed_values, build_q_network
from reagent_lite.types import Actions, SourceSpec


def network(*, dueling: bool, batch_norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    settings = NetworkSettings(
        hidden=(16, 8), activations=("relu", "relu"), outputs=2, dueling=dueling, batch_norm=batch_norm
    )
    return build_q_network(SourceSpec(num_state_features=3, num_action_features=2), settings)


def lists(lengths: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """States, masks and features; padding is no zeros, to be seen where it counts."""
    generator = torch.Generator().manual_seed(len(lengths))
    mask = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)
    return torch.randn(len(lengths), 3, generator=generator), mask, torch.randn(*mask.shape, 2, generator=generator)


def rows_of(made: nn.Module) -> list[int]:
    """Rows that the layers over candidates are given, from now on."""
    rows: list[int] = []
    part = made.advantage if hasattr(made, "advantage") else made.layers
    part.register_forward_hook(lambda module, given, result: rows.append(given[0].shape[:-1].numel()))  # type: ignore[union-attr]
    return rows


@pytest.mark.parametrize("dueling", [False, True], ids=["plain", "dueling"])
def test_padding_is_not_computed(dueling: bool) -> None:
    made = network(dueling=dueling)
    state, mask, features = lists([1, 7, 2, 0, 3, 1, 4, 2])
    rows = rows_of(made)
    results = []
    for outputs in (allowed_values(made, state, Actions(mask=mask, features=features)), made(state, mask, features)):
        allowed = outputs[mask]
        gradients = torch.autograd.grad(allowed, list(made.parameters()), torch.arange(40.0).view_as(allowed) + 1)
        results.append((allowed.detach(), *gradients))
    assert rows == [20, 56]  # a network by itself, as it is exported, values what is not allowed too
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


def test_no_candidate_at_all() -> None:
    made = network(dueling=True)
    state, _, features = lists([2, 2])
    allowed_values(made, state, Actions(mask=torch.zeros(2, 2, dtype=torch.bool), features=features)).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in made.value.parameters())  # type: ignore[union-attr, operator]


def test_batch_statistics_never_see_padding() -> None:
    made = network(dueling=False, batch_norm=True)
    seen = rows_of(made)
    for mode in (True, False):
        made.train(mode)(*lists([5, 4, 5, 5]))
    assert seen == [19, 20]


@pytest.mark.parametrize(("ranks", "over_ranks"), [(1, 0), (2, 1)])
def test_a_rank_with_a_single_row_takes_part_in_the_statistics_of_all(
    ranks: int, over_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it, ranks with more rows would wait for this one."""
    calls: list[Tensor] = []
    monkeypatch.setattr(nn.SyncBatchNorm, "forward", lambda self, rows: calls.append(rows) or rows)
    monkeypatch.setattr(dist, "is_initialized", lambda: ranks > 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: ranks)
    norm = BatchNorm(3)
    for rows, total in ((1, over_ranks), (2, over_ranks + 1)):
        assert norm(torch.ones(rows, 1, 3)).shape == (rows, 1, 3)
        assert len(calls) == total
    norm.eval()(torch.ones(2, 1, 3))
    assert len(calls) == over_ranks + 1
