"""Sums over groups of episodes of unequal length: the same as over one padded table, and by hand."""

import itertools
from dataclasses import fields

import pytest
import torch
from torch import Tensor

from reagent_lite.rl import sums
from reagent_lite.rl.bootstrap import Resamples
from reagent_lite.rl.estimators import ESTIMATORS, LOGGED
from reagent_lite.rl.sums import Episodes, Log

NAMES = tuple(field.name for field in fields(Episodes))
EVERY = (*ESTIMATORS.values(), *LOGGED)


def random_table(lengths: list[int], seed: int, *, spread: float = 0.3, zeros: float = 0.0) -> Episodes:
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths))
    running = (torch.arange(shape[1]) < torch.tensor(lengths).unsqueeze(1)).double()

    def draw() -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64) * running

    weight = torch.where(draw() > 3 * (1 - zeros), 0.0, (spread * draw()).exp()) if zeros else (spread * draw()).exp()
    return Episodes(
        running=running, weight=torch.where(running > 0, weight, 1.0),
        discount=0.95 ** torch.arange(shape[1], dtype=torch.float64) * running,
        reward=draw() + running, reward_taken=draw(), reward_expected=draw(),
        value_taken=draw() + 5 * running, value_expected=draw() + 5 * running,
        tail=draw() * (running - running.roll(-1, 1)).clamp(min=0),
    )  # fmt: skip


def part_of(e: Episodes, rows: slice) -> Episodes:
    """Some episodes, laid out no longer than they are."""
    length = int(e.running[rows].sum(1).max())
    return Episodes(**{name: getattr(e, name)[rows, :length] for name in NAMES})


def estimates(groups: list[Episodes], blocks: list[Tensor]) -> dict[str, Tensor]:
    return Log.of(([group] for group in groups), EVERY).estimates(blocks)[0]


LENGTHS = [1, 1, 1, 2, 3, 3, 8, 9, 15, 40]


@pytest.mark.parametrize("spread", [0.3, 8.0])
@pytest.mark.parametrize("zeros", [0.0, 0.5])
@pytest.mark.parametrize("cuts", [(4,), (1, 2, 6, 9), (3, 5)])
def test_groups_of_episodes_change_nothing(cuts: tuple[int, ...], zeros: float, spread: float):
    # spread 8 over 40 steps: weights from e^-100 to e^100 beside each other, and in other groups than the largest
    e = random_table(LENGTHS, seed=len(cuts), spread=spread, zeros=zeros)
    bounds = (0, *cuts, len(LENGTHS))
    groups = [part_of(e, slice(a, b)) for a, b in itertools.pairwise(bounds)]
    counts = list(Resamples(num_episodes=len(LENGTHS), num_resamples=50, seed=1).blocks())
    one, several = estimates([e], counts), estimates(groups, counts)
    for name, values in one.items():
        torch.testing.assert_close(several[name], values, rtol=1e-9, atol=1e-9, equal_nan=True, msg=name)


def test_samples_that_are_worked_on_one_by_one_change_nothing(monkeypatch: pytest.MonkeyPatch):
    e = random_table(LENGTHS, seed=0)
    counts = list(Resamples(num_episodes=len(LENGTHS), num_resamples=50, seed=1).blocks())
    together = estimates([e], counts)
    monkeypatch.setattr(sums, "_NUMBERS_AT_ONCE", 1)
    for name, values in estimates([e], counts).items():
        torch.testing.assert_close(values, together[name], rtol=1e-12, atol=1e-12, equal_nan=True, msg=name)


def test_blocks_of_samples_change_nothing():
    e = random_table(LENGTHS, seed=0)
    counts = torch.cat(list(Resamples(num_episodes=len(LENGTHS), num_resamples=50, seed=1).blocks()))
    one, several = estimates([e], [counts]), estimates([e], list(counts.split(7)))
    for name, values in one.items():
        torch.testing.assert_close(several[name], values, rtol=1e-12, atol=1e-12, equal_nan=True, msg=name)


# episode A: two steps with w 2, .5; episode B: one step with w 3; gamma .5; each a group of its own
SHORT = Episodes(**{name: torch.tensor([[value]], dtype=torch.float64) for name, value in (
    ("running", 1), ("weight", 3), ("discount", 1), ("reward", 2), ("reward_taken", 0), ("reward_expected", 0),
    ("value_taken", 1), ("value_expected", 6), ("tail", 0))})  # fmt: skip
LONG = Episodes(**{name: torch.tensor([values], dtype=torch.float64) for name, values in (
    ("running", (1, 1)), ("weight", (2, 0.5)), ("discount", (1, 0.5)), ("reward", (1, 4)), ("reward_taken", (0, 0)),
    ("reward_expected", (0, 0)), ("value_taken", (2, 3)), ("value_expected", (4, 5)), ("tail", (0, 0)))})  # fmt: skip


def test_two_groups_by_hand():
    log = Log.of([[SHORT], [LONG]], EVERY)
    found = {name: float(values[0]) for name, values in log.estimates([torch.ones(1, 2)])[0].items()}
    # rho A: 2, 1; rho B: 3, then held at 3: omega_0 of A is 2/5, omega_1 1/4
    assert found["Weighted_Per_Decision_Importance_Sampling"] == pytest.approx(2 / 5 + 3 / 5 * 2 + 1 / 4 * 0.5 * 4)
    wdr = (4 + 6) / 2 + 2 / 5 * (1 - 2) + 3 / 5 * (2 - 1) + 0.5 * (2 / 5 * 5 + 1 / 4 * (4 - 3))
    assert found["Weighted_Sequential_Doubly_Robust"] == pytest.approx(wdr)
    assert found["Per_Decision_Importance_Sampling"] == pytest.approx((2 * 1 + 0.5 * 1 * 4 + 3 * 2) / 2)
    assert found["mean_reward"] == pytest.approx((1 + 4 + 2) / 3)
    # B first, as the groups are: rho over the largest; and (2 + 3)^2 / (4 + 9), (1 + 3)^2 / (1 + 9)
    assert log.relative_weights(0).tolist() == pytest.approx([1, 2 / 3])
    assert log.relative_weights(1).tolist() == pytest.approx([1, 1 / 3])
    assert log.effective_episodes().tolist() == pytest.approx([25 / 13, 16 / 10])
    assert log.per_episode("discounted_reward", 0).tolist() == pytest.approx([2, 1 + 0.5 * 4])


def test_outcomes_share_weights_and_nothing_else():
    first, second = random_table(LENGTHS, seed=3), random_table(LENGTHS, seed=4)
    shared = {name: getattr(first, name) for name in ("running", "weight", "discount")}
    second = Episodes(**{name: shared.get(name, getattr(second, name)) for name in NAMES})
    counts = list(Resamples(num_episodes=len(LENGTHS), num_resamples=20, seed=1).blocks())
    groups = [[part_of(e, rows) for e in (first, second)] for rows in (slice(5), slice(5, 10))]
    for own, e in zip(Log.of(groups, EVERY).estimates(counts), (first, second), strict=True):
        for name, values in estimates([e], counts).items():
            torch.testing.assert_close(own[name], values, rtol=1e-9, atol=1e-9, msg=name)


def test_weights_beyond_float64_keep_their_ratios_across_groups():
    # rho 4^2000 in one group, 2 4^2000 in the other, and a short episode of weight 4 that no longer counts
    def constant(steps: int, first: float) -> Episodes:
        ones = torch.ones(1, steps, dtype=torch.float64)
        weight = torch.full_like(ones, 4.0)
        weight[0, 0] = first
        return Episodes(running=ones, weight=weight, discount=ones, reward=ones * first, reward_taken=ones * 0,
                        reward_expected=ones * 0, value_taken=ones * 0, value_expected=ones * 0,
                        tail=ones * 0)  # fmt: skip

    log = Log.of([[constant(1, 4.0)], [constant(2000, 4.0)], [constant(2000, 8.0)]], EVERY)
    assert log.relative_weights(1999).tolist() == pytest.approx([0, 0.5, 1])
    cwpdis = log.estimates([torch.ones(1, 3)])[0]["Weighted_Per_Decision_Importance_Sampling"]
    # step t: (4^{t+1} 4 + 2 4^{t+1} 8) / (4 + 4^{t+1} + 2 4^{t+1}), and at t = 0 the short one's reward of 4 too
    steps = [(4 * 4.0 + 2 * 4 * 8.0 + 4 * 4.0) / 16] + [20 / (3 + 4.0**-t) for t in range(1, 2000)]
    assert float(cwpdis[0]) == pytest.approx(sum(steps))
