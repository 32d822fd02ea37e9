"""The evaluator of a policy on a log, for a learner in training and for exported models.

fitted rows ─► reward and value models of the policy ─┐
scored rows ──────────────────────────────────────────┴─► page, joined on rank 0 ─► estimates

A policy is a function of states and choices. All processes of a group work together. Each process reads its part of
the rows; rank 0 holds the rows of all scored episodes (evaluation.max_episodes).
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from reagent_lite.algorithms.reward_and_q_models import PolicyProbabilities, RewardAndQModels
from reagent_lite.config.evaluation import EvaluationConfig
from reagent_lite.console import progress, with_progress
from reagent_lite.data.sampling.plan import ReadPlan
from reagent_lite.data.sampling.source import LoggedRows, LoggedSource, rows_in_order
from reagent_lite.distributed.group import Group
from reagent_lite.evaluation.behavior import Behavior
from reagent_lite.evaluation.candidates import candidate_choices
from reagent_lite.evaluation.cpe import (
    CPEResult,
    PageSettings,
    estimates_of_page,
    evaluate_page,
    missing_estimates,
)
from reagent_lite.evaluation.evaluation_rows import EvaluationRows, build_evaluation_rows, gather_page
from reagent_lite.evaluation.explanation import Explanation, Reader, explain
from reagent_lite.evaluation.interval import number
from reagent_lite.evaluation.page_sums import effective_episodes
from reagent_lite.evaluation.policy_models import (
    LEVEL_ROWS,
    Learning,
    Level,
    PolicyModels,
    RowsOfPolicy,
    Split,
    fit_passes,
    fit_plan,
    fit_steps,
    num_steps,
    steps_between_levels,
)
from reagent_lite.evaluation.scored_episodes import ScoredEpisodes, TrainEvalLogs, spread
from reagent_lite.evaluation.segment import StateFeatures
from reagent_lite.evaluation.segment_effects import EffectSettings
from reagent_lite.evaluation.shared_draws import SharedDraws
from reagent_lite.item_table import ItemTable
from reagent_lite.memory import give_back_memory
from reagent_lite.types import Actions, FeatureSpec, TransitionBatch

_EPOCH_EPISODES = 10_000


@dataclass(frozen=True, kw_only=True)
class EpisodeColumns:
    """Columns of the scored data that have a value for each episode.

    Attributes:
        units: [episodes] code of the unit of each episode; None if episodes are drawn.
        weights: [episodes] how many decisions the rows of each episode stand for; None: one.
    """

    units: NDArray[np.int64] | None = None
    weights: NDArray[np.float64] | None = None

    def weigh_rows(self, rows: LoggedRows, episode: NDArray[np.int32]) -> LoggedRows:
        """Returns rows whose share in losses is that of their episodes [R]."""
        if self.weights is None:
            return rows
        weight = self.weights[episode]
        return rows.with_sample_weight(weight / weight.mean())


def describe_weights(rows: int, total: float, squares: float) -> str:
    """Returns the effective number of rows in words, given the sums of their weights and of these weights' squares."""
    return f"rows are weighted: {rows:,} rows tell as much as {number(total**2 / squares)} with equal weights"


NO_COLUMNS: Final = EpisodeColumns()
"""Every episode is drawn by itself and stands for one."""


@dataclass(frozen=True, kw_only=True)
class EvaluationInput:
    """This process's rows of a log, the same for every policy that is evaluated on them.

    Attributes:
        sides: training and eval data.
        split: which rows are scored, and which rows models are fitted to.
        rows: source of the scored rows.
        train_rows: source of the other rows.
        metric_names: outcomes besides the reward.
        num_rows: number of rows of the log, on all machines.
        without_propensity: number of these rows with neither a propensity nor an estimate of it.
        gamma: discount per step.
        settings: settings of the evaluation.
        seed: seed of initial models, of the order of rows, and of resamples.
        learning: how much the policy learns in this run; None for a policy that was learned before.
        unknown: reasons why estimators lack probabilities of the policy, by the estimator's name.
        behavior: estimated behavior policy, the source of the propensities of `rows`; None if these were logged.
        items: the item table; None without one.
        by_episode: units and weights of the scored data's episodes.
    """

    sides: TrainEvalLogs
    split: Split
    rows: LoggedRows
    train_rows: LoggedRows
    metric_names: tuple[str, ...]
    num_rows: int
    without_propensity: int
    gamma: float
    settings: EvaluationConfig
    seed: int
    learning: Learning | None = None
    unknown: dict[str, str] = field(default_factory=dict)
    behavior: Behavior | None = None
    items: ItemTable | None = None
    by_episode: EpisodeColumns = NO_COLUMNS

    @cached_property
    def fit_rows(self) -> LoggedRows:
        """The rows that models are fitted to."""
        return self.train_rows.only(self.split.fitted)

    @cached_property
    def fit_counts(self) -> tuple[int, ...]:
        """Number of fitted rows in each shard; every rank calls it."""
        return self.sides.shards.counts(self.fit_rows.count)

    @cached_property
    def continues(self) -> bool:
        """Whether later rewards count for a fitted row on any machine; every rank calls it."""
        return bool(self.gamma) and any(self.group.all_gather(self.fit_rows.continues))

    @cached_property
    def checked(self) -> tuple[TransitionBatch, ...]:
        """Batches whose loss decides whether a fit ends early."""
        return tuple(rows_in_order(self.train_rows, self.split.checked, self.group.device))

    @cached_property
    def level_numbers(self) -> NDArray[np.integer[Any]]:
        """Row numbers of this process's rows by which predictions are shifted."""
        return self.sides.shards.part(spread(self.split.fitted, LEVEL_ROWS))

    @property
    def may_skip_fit(self) -> bool:
        """Whether the final fit is left out if nothing could check the models."""
        return self.learning is not None and self.settings.models.final_fit_passes is None

    @property
    def group(self) -> Group:
        """The processes that evaluate together."""
        return self.sides.shards.group

    def plan(self, passes: int) -> ReadPlan:
        """Returns the order in which models are fitted to the rows."""
        return fit_plan(self.sides.shards, self.fit_counts, self.settings, passes, self.seed + 1)

    def steps(self, *, final: bool) -> int:
        """Returns the largest number of optimizer steps of the final fit, or of a fit after an epoch."""
        return fit_steps(self.sides.shards, self.fit_counts, self.settings, self.learning, final=final)

    def source(self, first_pass: int, steps: int) -> LoggedSource:
        """Returns the fitted rows as batches, starting with a given pass."""
        plan = self.plan(first_pass + steps)  # no pass is shorter than a step
        source = LoggedSource(self.fit_rows, plan, self.group.rank, self.group.device)
        source.load_state_dict({"step": first_pass * plan.steps_per_epoch})
        return source


class PolicyEvaluator:
    """Estimates the value of one policy; every rank calls each method.

    Args:
        log: the rows.
        policy: maps states and choices to probabilities [B, K].
        heads: models of the policy, not fitted yet.
        title: name of the policy in progress bars.
        candidate_features: features that describe the chosen candidates; empty for named actions.
        cached: evaluates the policy once per fitted row and keeps the probabilities in memory, instead of evaluating
            it in every pass. Used for exported models: the threads of onnxruntime and of torch slow each other down.

    Attributes:
        log: the rows.
        policy: the policy.
        models: its models, as far as they are fitted.
    """

    def __init__(
        self,
        log: EvaluationInput,
        policy: PolicyProbabilities,
        heads: RewardAndQModels,
        *,
        title: str = "the policy",
        candidate_features: tuple[FeatureSpec, ...] = (),
        cached: bool = False,
    ) -> None:
        self.policy = policy
        self.log = log
        self._title = title
        self._candidate_features = candidate_features
        self._cached = cached
        self.models = PolicyModels(heads, log.settings, log.group)
        if sum(log.fit_counts):
            steps = num_steps(log.plan(1), log.settings)
            self.models.measure(self._show_progress("measuring outcomes for", _first(log.source(0, steps), steps)))
            batch = next(log.source(0, 1))
            self.models.rehearse((batch, batch.next_actions.mask.float()))  # does not depend on the policy

    def fit(self, *, final: bool) -> dict[str, float]:
        """Fits the models further and returns the mean losses; empty without rows.

        Args:
            final: fits for as long as the config sets for the end of a run, not for an epoch.
        """
        log = self.log
        if not sum(log.fit_counts) or (final and log.may_skip_fit and not self._can_be_checked()):
            return {}
        passes = fit_passes(log.settings, final=final)
        steps = log.steps(final=final)
        source = log.source(self.models.passes, steps)
        policy = self.policy
        if not log.continues:
            policy = _any_choice  # no later reward counts
        elif self._cached:
            policy = self._cached_policy(source)
        checked = [
            (batch, self.policy(batch.next_state, batch.next_actions)) for batch in (log.checked if final else ())
        ]
        level = self._level(steps, self.policy if log.continues else _any_choice) if final else None
        rows = min(steps * log.settings.models.minibatch_size, passes * log.fit_rows.count)
        batches = self._show_progress("fitting models of", _first(source, steps), rows)
        self.models.passes += passes
        losses = self.models.fit(batches, policy, level=level, checked=checked)
        log.fit_rows.release()
        return losses

    def page(self, *, final: bool) -> tuple[EvaluationRows | None, dict[str, Any]]:
        """Returns the page of all ranks' scored rows (None on ranks other than 0), and the chosen candidates as JSON.

        Args:
            final: whether to describe the candidates; otherwise the JSON is empty.
        """
        log = self.log
        scored = log.split.scored if final else log.split.choosing.sample(_EPOCH_EPISODES, log.seed)
        part = self._part_of_page("scoring rows by", scored, self.models.heads if self.models.passes else None)
        choices = {}
        if final and self._candidate_features:
            choices["candidates"] = candidate_choices(
                part,
                log.sides.scored,
                scored.numbers[scored.page_order],
                self._candidate_features,
                log.group,
                propensities_known=not log.without_propensity,
                items=log.items,
            )
        return self._gather(part, scored), choices

    def values(self, page: EvaluationRows) -> dict[str, float]:
        """Returns the cheap estimates by TensorBoard tag, without intervals."""
        log = self.log
        return estimates_of_page(page, PageSettings(gamma=log.gamma, config=log.settings, missing=self.missing))

    def result(self, page: EvaluationRows) -> CPEResult:
        """Returns all estimates with intervals and verdicts."""
        log = self.log
        with progress(f"estimating {self._title}", "outcomes", brief=True) as show:
            return evaluate_page(
                page,
                PageSettings(
                    gamma=log.gamma,
                    config=log.settings,
                    missing=self.missing,
                    calibration=None if log.behavior is None else log.behavior.calibration,
                    features=StateFeatures.of(log.sides.scored),
                ),
                generator=torch.Generator().manual_seed(log.seed),
                left_out=log.split.scored.left_out,
                show=show,
            )

    def explanation(
        self,
        page: EvaluationRows,
        result: CPEResult,
        *,
        seen: bool,
        columns: tuple[Sequence[Sequence[int]], Sequence[Sequence[int]]],
        complete: bool = True,
        reads_features: bool = True,
    ) -> Explanation:
        """Returns who gets what, who gains and who loses; only called where the page is.

        Args:
            page: the scored rows.
            result: result of the page.
            seen: whether the policy has learned from scored episodes.
            columns: columns of `rows` that each state feature, and each feature of candidates, of the copy fills.
            complete: whether the policy's probabilities of all choices are known.
            reads_features: whether the policy is a function of features.
        """
        log = self.log

        def take(numbers: Tensor) -> tuple[Tensor, Actions]:
            index = numbers.to(log.group.device)
            batch = log.rows.take(index, torch.ones(len(index), device=index.device))
            return batch.state, batch.actions

        with progress(f"explaining {self._title}", "parts", brief=True):
            explanation = explain(
                page,
                log.sides.scored,
                Reader(
                    probabilities=self.policy if reads_features else None,
                    complete=complete,
                    take=take,
                    state=columns[0],
                    candidate=columns[1],
                ),
                EffectSettings(
                    gamma=log.gamma,
                    config=log.settings,
                    missing=self.missing,
                    calibration=result.calibration,
                    shared_draws=SharedDraws() if result.overlap is None else result.overlap.shared_draws,
                    seen=seen,
                    seed=log.seed,
                ),
            )
        log.rows.release()
        log.sides.scored.release()
        return explanation

    @property
    def missing(self) -> dict[str, str]:
        """Reasons why an estimator has no estimate, by its name."""
        log = self.log
        unfitted = ""
        if not sum(log.fit_counts):
            unfitted = "there is no other episode to fit its model to"
        elif not self.models.passes:
            unfitted = (
                f"its model was not fitted: weights leave fewer than {log.settings.min_effective_episodes:g} effective "
                "episodes, so that nothing could check it; evaluation.models.final_fit_passes fits it all the same"
            )
        reasons = missing_estimates(
            rows=log.num_rows,
            without_propensity=log.without_propensity,
            unfitted=unfitted,
            unestimated="" if log.behavior is None else log.behavior.problem,
        )
        return reasons | log.unknown

    def _can_be_checked(self) -> bool:
        """Returns whether enough effective episodes are left to check models; also true without propensities."""
        log = self.log
        if log.without_propensity:
            return True
        scored = log.split.scored
        page = self._gather(self._part_of_page("weighting rows by", scored, None), scored)
        enough = torch.zeros((), dtype=torch.float64)
        if page is not None:
            episodes = effective_episodes(page, gamma=log.gamma, config=log.settings)
            enough += episodes >= log.settings.min_effective_episodes
        return bool(log.group.all_reduce(enough))

    def _part_of_page(self, title: str, scored: ScoredEpisodes, models: RewardAndQModels | None) -> EvaluationRows:
        log = self.log
        rows = rows_in_order(log.rows, scored.numbers, log.group.device)
        episode = log.sides.scored.episode[scored.numbers]
        units = log.by_episode.units
        weights = log.by_episode.weights
        return build_evaluation_rows(
            self._show_progress(title, rows, len(scored.numbers)),
            scored.episode,
            policy=self.policy,
            models=models,
            metric_names=log.metric_names,
            further={
                "unit": None if units is None else units[episode],
                "sample_weight": None if weights is None else weights[episode],
                "predicted_reward": None if log.behavior is None else log.behavior.reward[scored.numbers],
                "number": scored.numbers if log.group.is_first else np.full(len(scored.numbers), -1, np.int64),
            },
        )

    def _gather(self, part: EvaluationRows, scored: ScoredEpisodes) -> EvaluationRows | None:
        page: EvaluationRows | None = part
        if self.log.group.world_size > 1:
            page = gather_page(part, torch.from_numpy(scored.sequence[scored.page_order]), self.log.group)
        self.log.rows.release()
        self.log.sides.scored.release()
        give_back_memory()  # what reading took
        return page

    def _level(self, steps: int, policy: PolicyProbabilities) -> Level:
        """Returns the rows by which predictions are shifted in a fit; the policy is evaluated on them once."""
        log = self.log

        def batches() -> Iterator[TransitionBatch]:
            return rows_in_order(log.train_rows, log.level_numbers, log.group.device)

        propensities = [policy(batch.next_state, batch.next_actions) for batch in batches()]

        def rows() -> Iterator[RowsOfPolicy]:
            return zip(batches(), propensities, strict=True)

        return Level(rows=rows, every=steps_between_levels(steps))

    def _cached_policy(self, source: LoggedSource) -> PolicyProbabilities:
        """Returns a policy that looks up the probabilities at the next states of the source's last batch."""
        numbers = self.log.fit_rows.usable
        assert numbers is not None
        rows = rows_in_order(self.log.fit_rows, numbers.cpu().numpy(), self.log.group.device)
        parts = [self.policy(batch.next_state, batch.next_actions) for batch in self._show_progress("asking", rows)]
        longest = max(part.shape[1] for part in parts)
        propensities = torch.cat([pad(part, (0, longest - part.shape[1])) for part in parts])

        def policy(state: Tensor, actions: Actions) -> Tensor:
            return propensities[torch.searchsorted(numbers, source.numbers), : actions.mask.shape[1]]

        return policy

    def _show_progress(
        self, title: str, batches: Iterable[TransitionBatch], rows: int | None = None
    ) -> Iterator[TransitionBatch]:
        count = self.log.fit_rows.count if rows is None else rows
        return with_progress(f"{title} {self._title}", batches, count, enabled=self.log.group.is_first)


def _any_choice(state: Tensor, actions: Actions) -> Tensor:
    """Returns a probability of 1 for every allowed choice, in place of a policy whose choices do not matter."""
    return actions.mask.to(state.dtype)


def _first(source: LoggedSource, steps: int) -> Iterator[TransitionBatch]:
    for _ in range(steps):
        yield next(source)


@contextmanager
def own_seed(seed: int, device: torch.device) -> Iterator[None]:
    """Seeds torch's generators inside the block and restores them, so that a learner's dropout is not affected."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
