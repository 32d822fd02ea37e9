"""Effects by segment on logs whose effects are known; coverage: tests.benchmarks.coverage --only effects."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from oracles.regimes import drawn
from oracles.segment_effects import LOSERS, SegmentRegime, draw, effects_of_cells, outcome_of

from reagent_lite.config.evaluation import EvaluationConfig, GuardrailConfig
from reagent_lite.evaluation.evaluation_rows import EvaluationRows
from reagent_lite.evaluation.segment import StateFeatures
from reagent_lite.evaluation.segment_effects import (
    EffectSettings,
    SegmentChange,
    Segments,
    choosing_rows,
    effects_by_segment,
)
from reagent_lite.evaluation.verdict import Verdict

CONFIG = EvaluationConfig()
LOSER = SegmentRegime(effect="loser", size=1.0)


def effects(page: EvaluationRows, features: StateFeatures, gamma: float = 1.0, **keys: object) -> Segments:
    settings = EffectSettings(gamma=gamma, **{"config": CONFIG} | keys)  # type: ignore[arg-type]
    segments = effects_by_segment(page, features, settings)
    assert segments is not None
    return segments


@pytest.fixture(scope="module")
def log() -> tuple[EvaluationRows, StateFeatures, np.ndarray]:
    return draw(LOSER, 3)


def test_losers_are_found_and_the_sum_is_weighted(log: tuple[EvaluationRows, StateFeatures, np.ndarray]) -> None:
    page, features, cell = log
    segments = effects(page, features)
    assert segments.unit == "row"
    losing = [index for index, effect in enumerate(segments.effects) if effect.standing is SegmentChange.LOSES]
    assert losing
    assert LOSERS[cell[np.isin(segments.segment, losing)]].mean() > 0.9
    assert "country c3" in " ".join(segments.effects[index].words for index in losing)
    assert {effect.standing for effect in segments.effects} >= {SegmentChange.GAINS}
    # rows that chose give no interval; the sum is that of the segments
    choosing = choosing_rows(page)
    assert (segments.segment[choosing] == -1).all()
    assert (segments.segment[~choosing] >= 0).all()
    assert segments.choosing == choosing.sum()
    assert sum(effect.share for effect in segments.effects) == pytest.approx(1)
    total = sum(effect.share * effect.difference.value for effect in segments.effects)
    assert segments.total.value == pytest.approx(total)
    below = sum((e.share * (e.difference.value - e.difference.low)) ** 2 for e in segments.effects) ** 0.5
    assert segments.total.low == pytest.approx(total - below)
    # each is the self-normalized estimate of its own rows
    rows = torch.from_numpy(segments.segment == 0)
    weight, reward = page.weight[rows], page.outcomes[rows, 0]
    expected = float((weight * reward).sum() / weight.sum() - reward.mean())
    assert segments.effects[0].difference.value == pytest.approx(expected)
    assert segments.effects[0].effective == pytest.approx(float(weight.sum() ** 2 / weight.square().sum()))


def test_guardrails_and_segments_divide_the_level(log: tuple[EvaluationRows, StateFeatures, np.ndarray]) -> None:
    page, features, _ = log
    rail = {"clicks": GuardrailConfig(at_most_worse_by=0.1)}
    guarded = effects(page, features, config=EvaluationConfig(guardrails=rail))
    alone = effects(page, features)
    assert (guarded.level, alone.level) == (0.975, 0.95)
    for narrow, wide in zip(alone.effects, guarded.effects, strict=True):
        assert wide.difference.low < narrow.difference.low


def test_a_policy_that_has_seen_the_rows_is_not_said_to_gain(
    log: tuple[EvaluationRows, StateFeatures, np.ndarray],
) -> None:
    page, features, _ = log
    seen = effects(page, features, seen=True)
    assert {effect.standing for effect in seen.effects} == {SegmentChange.UNDECIDED}
    assert {effect.verdict for effect in seen.effects} == {Verdict.SUPPORT}


def test_a_segment_with_wrong_propensities_is_not_used(log: tuple[EvaluationRows, StateFeatures, np.ndarray]) -> None:
    page, features, cell = log
    wrong = torch.from_numpy(LOSERS[cell])
    halved = replace(page, propensity=torch.where(wrong, page.propensity / 2, page.propensity))
    segments = effects(halved, features)
    for index, effect in enumerate(segments.effects):
        if LOSERS[cell[segments.segment == index]].mean() > 0.9:
            assert (effect.verdict, effect.standing) == (Verdict.DO_NOT_USE, SegmentChange.UNDECIDED)
            assert "propensities are too small" in effect.reason


def test_whole_units_choose_or_estimate() -> None:
    page, features, _ = draw(replace(LOSER, rows=3000, horizon=3, policy="near"), 1)
    episodes = effects(page, features)
    assert episodes.unit == "episode"
    by_episode = episodes.segment.reshape(-1, 3)
    assert (by_episode == by_episode[:, :1]).all()
    assert sum(effect.count for effect in episodes.effects) + episodes.choosing == 1000
    unit = torch.arange(3000) // 30
    units = effects(replace(page, unit=unit), features)
    estimated = (units.segment >= 0).reshape(-1, 30)
    assert (estimated == estimated[:, :1]).all()
    # without discount rewards of rows are compared, and rows of an episode choose together all the same
    rows = effects(page, features, gamma=0.0)
    assert rows.unit == "row"
    estimated = (rows.segment >= 0).reshape(-1, 3)
    assert (estimated == estimated[:, :1]).all()


def test_equal_policies_have_one_segment_and_no_effect(log: tuple[EvaluationRows, StateFeatures, np.ndarray]) -> None:
    page, features, _ = log
    equal = page.model_propensities.clone()
    equal[torch.arange(len(page)), page.action] = page.propensity
    (effect,) = effects(replace(page, model_propensities=equal), features).effects
    assert effect.words == "all rows"
    assert (effect.difference.low, effect.difference.value, effect.difference.high) == (0, 0, 0)
    assert effect.standing is SegmentChange.UNDECIDED


@pytest.mark.parametrize("rows", [1, 2, 5, 40])
def test_few_rows_have_a_reason_or_none(rows: int) -> None:
    page, features, _ = draw(replace(LOSER, rows=rows), 2)
    segments = effects_by_segment(page, features, EffectSettings(gamma=1.0, config=CONFIG))
    if segments is not None:
        assert all(effect.reason for effect in segments.effects)
        assert all(effect.standing is SegmentChange.UNDECIDED for effect in segments.effects)


def test_the_oracle_draws_as_it_says() -> None:
    """Its truth is the mean of drawn rewards under the policy minus that under the logger."""
    for regime in (LOSER, replace(LOSER, choices="candidates", actions=4)):
        rng = np.random.default_rng(0)
        cell = rng.integers(480, size=60_000)
        logger, policy, mean = regime.tables(cell, rng.normal(size=(60_000, regime.actions)))
        rows = np.arange(60_000)
        difference = mean[rows, drawn(policy, rng)] - mean[rows, drawn(logger, rng)]
        assert difference[LOSERS[cell]].mean() == pytest.approx(effects_of_cells(regime)[LOSERS].mean(), abs=0.02)


@pytest.mark.slow
def test_intervals_hold_together() -> None:
    outcomes = [outcome_of(replace(LOSER, size=0.5), seed) for seed in range(120)]
    assert np.mean([outcome["all hold"] for outcome in outcomes]) > 0.91
    assert np.mean([outcome["false gain"] + outcome["false loss"] for outcome in outcomes]) < 0.06
    assert np.nanmean([outcome["losers found"] for outcome in outcomes]) > 0.5
