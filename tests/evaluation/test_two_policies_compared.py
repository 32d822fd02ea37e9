"""Units of a rollout and their comparison, by hand and beside loops."""

import math
from itertools import pairwise

import numpy as np
import pytest

from reagent_lite.config.rollout_config import ComparisonConfig, RolloutGuardrailConfig
from reagent_lite.data.rollout_rows import RolloutRows
from reagent_lite.errors import DataError
from reagent_lite.evaluation.policy_comparison import Comparer, RolloutComparison, UnitCollector, Units
from reagent_lite.rl.two_policies import mixed_propensity

SECOND = 1_000_000


def rows_of(*rows: dict, timed: bool = True) -> RolloutRows:
    """Rows with defaults: unit, is_new, share, current, new, at (seconds), ends, outcomes; step in all or none."""
    table = [
        {"unit": None, "is_new": False, "share": 0.5, "current": 0.5, "new": 0.5, "at": 1.0, "ends": False,
         "outcomes": [0.0]} | row
        for row in rows
    ]  # fmt: skip
    return RolloutRows(
        where="log:1",
        rollout=[""] * len(table),
        unit=[row["unit"] for row in table],
        is_new=np.array([row["is_new"] for row in table], bool),
        share=np.array([row["share"] for row in table], float),
        current=np.array([row["current"] for row in table], float),
        new=np.array([row["new"] for row in table], float),
        step=np.array([row["step"] for row in table]) if "step" in table[0] else None,
        decided=np.array([int(row["at"] * SECOND) for row in table]) if timed else None,
        ends=np.array([row["ends"] for row in table], bool),
        outcomes=np.array([row["outcomes"] for row in table], float),
        propensity=np.array([row.get("propensity", np.nan) for row in table]),
    )


def test_units_count_in_the_order_of_their_beginning() -> None:
    collector = UnitCollector(gamma=0.5, episode_seconds=100)
    first = collector.add(
        rows_of(
            {"unit": "a", "outcomes": [1.0], "new": 0.25},
            {"unit": "b", "is_new": True, "outcomes": [4.0], "ends": True},
            {"outcomes": [8.0]},  # an independent decision
        )
    )
    assert (len(first.share), collector.waiting) == (0, 3)  # b and the decision have ended, but a began before them
    later = collector.add(rows_of({"unit": "a", "outcomes": [2.0], "current": 0.25, "ends": True}))
    assert later.outcomes[:, 0].tolist() == [1 + 0.5 * 2, 4, 8]
    assert later.is_new.tolist() == [False, True, False]
    assert later.log_ratio.tolist() == pytest.approx([0, 0, 0])  # a: 1/4 * 1/2 against 1/2 * 1/4
    collector.add(rows_of({"unit": "a", "outcomes": [9.0]}))
    assert (collector.late_rows, collector.waiting) == (1, 0)


def test_an_episode_without_an_end_counts_after_its_time() -> None:
    collector = UnitCollector(gamma=1.0, episode_seconds=60)
    rows = [{"unit": "a", "at": 10, "outcomes": [1.0]}, {"at": 69.9}]
    assert len(collector.add(rows_of(*rows)).share) == 0
    units = collector.add(rows_of({"unit": "a", "at": 70, "outcomes": [5.0]}))
    assert units.outcomes[:, 0].tolist() == [1, 0]
    assert collector.late_rows == 1
    timeless = UnitCollector(gamma=1.0, episode_seconds=1)
    assert len(timeless.add(rows_of({"unit": "a"}, {"unit": "b"}, timed=False)).share) == 0
    assert len(timeless.end_all().share) == 2


def test_names_of_ended_units_are_not_kept_if_rows_have_their_step() -> None:
    collector = UnitCollector(gamma=1.0, episode_seconds=60)
    for number in range(1000):
        name = f"u{number}"
        rows = ({"unit": name, "step": 0, "at": number}, {"unit": name, "step": 1, "at": number, "ends": True})
        assert len(collector.add(rows_of(*rows)).share) == 1
    assert len(collector.add(rows_of({"unit": "u7", "step": 2}, {"unit": "x", "step": 3})).share) == 0
    assert (collector.late_rows, collector.waiting) == (2, 0)
    assert not collector._open
    assert not collector._ended


def test_a_unit_keeps_its_policy_and_share() -> None:
    for change in ({"is_new": True}, {"share": 0.1}):
        collector = UnitCollector(gamma=1.0, episode_seconds=60)
        with pytest.raises(DataError, match="'a' with another policy or share"):
            collector.add(rows_of({"unit": "a"}, {"unit": "a", **change}))


def test_propensities_are_compared_with_the_mixture_of_units() -> None:
    first = {"unit": "a", "share": 0.25, "current": 0.1, "new": 0.8, "propensity": 0.275}
    right = mixed_propensity(0.25, math.log(8), 0.5, 0.9)
    for propensity, wrong in ((right, 0), (0.25 * 0.9 + 0.75 * 0.5, 1), (0.5, 1)):  # each step's mixture; its own
        collector = UnitCollector(gamma=1.0, episode_seconds=60)
        collector.add(
            rows_of(first, {"unit": "a", "share": 0.25, "current": 0.5, "new": 0.9, "propensity": propensity})
        )
        assert collector.wrong_propensities == wrong


def units_of(
    rng: np.random.Generator, count: int, *, share: float = 0.5, lift: float = 0.0, harm: float = 0.0
) -> Units:
    """The new policy prefers the second of two actions, which adds `lift` clicks and `harm` complaints."""
    is_new = rng.random(count) < share
    second = rng.random(count) < np.where(is_new, 0.9, 0.1)
    clicks = rng.random(count) < 0.3 + lift * second
    complaints = rng.random(count) < 0.05 + harm * second
    return Units(
        is_new=is_new,
        share=np.full(count, share),
        log_ratio=np.where(second, math.log(9), -math.log(9)),
        outcomes=np.stack([clicks, complaints], 1).astype(float),
    )


CONFIG = ComparisonConfig(
    reward_range=(0, 1), guardrails={"complaints": RolloutGuardrailConfig(at_most_worse_by=0.01, range=(0, 1))}
)


def compared(units: Units, config: ComparisonConfig = CONFIG) -> RolloutComparison:
    comparer = Comparer(config)
    comparer.add(units)
    return comparer.comparison()


def test_figures_by_hand() -> None:
    units = Units(
        is_new=np.array([True, False]),
        share=np.array([0.5, 0.25]),
        log_ratio=np.array([math.log(3), -math.log(3)]),
        outcomes=np.array([[1.0], [0.0]]),
    )
    comparison = compared(units, ComparisonConfig(reward_range=(0, 1)))
    # centers: 0, then 1. Z: (3 - 1) / (1.5 + 0.5) * 1 and (1 - 3) / (0.25 + 0.75 * 3) * (0 - 1)
    assert comparison.differences[0].value == pytest.approx((1 + 2 / 2.5) / 2)
    assert (comparison.differences[0].new, comparison.differences[0].current) == (1.0, 0.0)
    assert (comparison.units, comparison.units_new, comparison.expected_new) == (2, 1, 0.75)
    assert comparison.decision == "not told apart"
    assert (comparison.differences[0].low, comparison.differences[0].high) == (-1, 1)


@pytest.mark.parametrize(
    ("lift", "harm", "decision", "word"),
    [
        (0.2, 0.0, "better", "reward differs by"),
        (0.2, 0.01, "better", "per unit; not known yet: whether complaints is within its limit"),
        (-0.2, 0.0, "worse", "reward differs by"),
        (0.2, 0.2, "worse", "complaints differs by"),
        (0.0, 0.0, "not told apart", "Too early to say"),
    ],
)
@pytest.mark.parametrize("ranges", [True, False])
def test_decisions(lift: float, harm: float, decision: str, word: str, ranges: bool) -> None:
    config = (
        CONFIG if ranges else ComparisonConfig(guardrails={"complaints": RolloutGuardrailConfig(at_most_worse_by=0.01)})
    )
    comparison = compared(units_of(np.random.default_rng(0), 6000, share=0.2, lift=lift, harm=harm), config)
    assert comparison.decision == decision
    assert word in comparison.sentence
    assert comparison.differences[0].method == ("betting" if ranges else "asymptotic")
    assert comparison.differences[0].level == 0.025  # divided by reward and one guardrail
    for difference, truth in zip(comparison.differences, (0.8 * lift, 0.8 * harm), strict=True):
        assert difference.low < truth < difference.high
        assert difference.low <= difference.value <= difference.high


def test_more_units_are_foreseen() -> None:
    comparison = compared(units_of(np.random.default_rng(0), 800, lift=0.06))
    to_go = comparison.differences[0].units_to_go
    assert comparison.decision == "not told apart"
    assert to_go is not None
    assert 300 < to_go < 30_000
    assert f"about {round(to_go, -2):,} more units to go" in comparison.sentence


def test_a_wrong_sample_ratio_or_range_makes_everything_invalid() -> None:
    units = units_of(np.random.default_rng(1), 5000, lift=0.3)
    lost = Units(**{name: getattr(units, name)[~units.is_new | (np.arange(5000) % 3 > 0)] for name in Units.__slots__})
    assert compared(units).decision == "better"
    assert compared(lost).decision == "invalid"
    assert "find where units are lost" in compared(lost).sentence
    narrow = ComparisonConfig(reward_range=(0, 0.5))
    assert "outside 0 to 0.5" in compared(units, narrow).sentence


def test_portions_give_the_same_figures() -> None:
    units = units_of(np.random.default_rng(2), 1000, lift=0.05)
    parts = Comparer(CONFIG)
    for start, end in pairwise([0, 1, 9, 10, 11, 500, 500, 1000]):
        parts.add(units.part(start, end))
    assert parts.comparison() == compared(units)
    marks = [point.units for point in compared(units).history if point.name == "reward"]
    assert marks[:3] == [10, 20, 30]
    assert marks[-1] == 1000


def test_a_guardrail_that_should_be_high() -> None:
    units = units_of(np.random.default_rng(3), 6000, lift=-0.2)
    clicks = {"outcomes": units.outcomes[:, ::-1]}
    swapped = Units(**{name: getattr(units, name) for name in Units.__slots__} | clicks)
    guardrail = RolloutGuardrailConfig(better="higher", at_most_worse_by=0.05, range=(0, 1))
    comparison = compared(swapped, ComparisonConfig(reward_range=(0, 1), guardrails={"clicks": guardrail}))
    assert comparison.decision == "worse"
    assert comparison.differences[1].limit == -0.05
