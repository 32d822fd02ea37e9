"""The sources that a run can learn from, and the stream of batches that the training loop reads from each.

LoggedExperience     rows of all machines ──────────────────────┐
SimulatedExperience  environments ─► replay ────────────────────┼► Stream: this rank's batches, number of steps, order
MixedExperience      logged and simulated rows in each minibatch┤          of its rows
CollectedExperience  files of collectors ─► replay ─────────────┘
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from reagent_lite.algorithms.bcq import LoggingPolicy
from reagent_lite.algorithms.boosting import Boosting
from reagent_lite.algorithms.learners import Learner, learners_of
from reagent_lite.config import WorkflowConfig
from reagent_lite.console import logger
from reagent_lite.data.sampling.mixture import MixedSource
from reagent_lite.data.sampling.plan import ReadPlan
from reagent_lite.data.sampling.source import LoggedSource
from reagent_lite.distributed.group import Group
from reagent_lite.errors import pluralize
from reagent_lite.evaluation.behavior import fit_logging_policy
from reagent_lite.export.bundle_content import SampleRows
from reagent_lite.item_table import ItemTable
from reagent_lite.report.run import DataFacts
from reagent_lite.run.environments import ObservationEncoder, Simulation, given_or_unchanged
from reagent_lite.run.episode_picture import draw_pictures
from reagent_lite.run.evaluators import LOGS, PLAY, VALIDATION_LOSS, Evaluators, LogEvaluator, SimulationEvaluator
from reagent_lite.run.learner import captures
from reagent_lite.run.logged import Data, prepare
from reagent_lite.run.normalization import Normalization, with_missing_fitted, write_fitted
from reagent_lite.run.reward_model import fit_reward_model
from reagent_lite.run.roles.collected import CollectedReplay, CollectedSource
from reagent_lite.run.samples import logged_facts, logged_sample, simulated_sample
from reagent_lite.run.simulated import (
    RETURN,
    SimulatedPlan,
    as_source,
    open_rollouts,
    simulated_plan,
    tag_of,
    training_scalars,
)
from reagent_lite.run.value_bounds import ReturnBounds, return_bounds
from reagent_lite.run.value_scale import value_scale
from reagent_lite.sim.experience import ONLY, RolloutSource
from reagent_lite.training.best import BestState
from reagent_lite.training.capture import FixedBatches
from reagent_lite.training.checkpoint_folder import Tree
from reagent_lite.training.loop import StepPlan
from reagent_lite.training.resume import ReadOrder
from reagent_lite.training.stop import StopSignal
from reagent_lite.training.warm_start import value_scale_of
from reagent_lite.types import BatchSource, SourceSpec

_FEWEST_STEPS = 100  # with Adam, each step changes a weight by about the learning rate
_SMALLEST_MINIBATCH = 16  # that a warning proposes
_NOT_ORDER = ("epochs", "reads")
"""Entries of a read plan that do not affect the rows of a step: the run's length, and how ranks divide the rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """Batches for the training loop; every rank has one and calls its methods.

    Attributes:
        source: yields this rank's batches.
        plan: number of steps, and of rows in each.
        order: order in which rows are read; a checkpoint's step number refers to it.
        group: the ranks.
        rollouts: `source` or its simulated part; None for logged rows alone.
        warning: a warning if the steps are too few, or None.
    """

    source: BatchSource
    plan: StepPlan
    order: ReadOrder
    group: Group
    rollouts: RolloutSource | None = None
    warning: str | None = None

    @property
    def rows(self) -> int:
        """Number of rows that all ranks read in the whole run."""
        passes = self.plan.num_steps / self.plan.steps_per_epoch or 1  # a fit without steps reads every row once
        return round(self.order.rows * passes)

    @property
    def env_steps(self) -> int:
        """Environment steps of all ranks so far, warm-up included; 0 without environments."""
        return 0 if self.rollouts is None else self.rollouts.env_steps

    def before_step(self, step: int) -> None:
        """Collects experience if it is due, and gathers logged rows for a graph."""
        if self.rollouts is not None:
            self.rollouts.collect(step)
        if isinstance(self.source, FixedBatches):
            self.source.fill()

    def at_end(self, step: int) -> None:
        """Called after the last optimizer step; tells collectors that the run has ended."""
        if self.rollouts is not None:
            self.rollouts.at_end(step)

    def figures(self) -> dict[str, float]:
        """Returns figures of the episodes that ended since the last call."""
        return {} if self.rollouts is None else training_scalars(self.rollouts, self.group)

    def partition(self, states: Sequence[Tree], rank: int, step: int) -> Tree:
        """Returns the state of a rank's source after the number of ranks has changed.

        Args:
            states: states of all ranks that saved.
            rank: current rank.
            step: optimizer steps done.
        """
        if self.rollouts is None:
            return {"step": step}
        if self.source is self.rollouts:
            return self.rollouts.partition(states, rank, self.group.world_size)
        simulated = [state["1"] for state in states]  # the parts of a MixedSource
        return {"0": {"step": step}, "1": self.rollouts.partition(simulated, rank, self.group.world_size)}


class Source(Protocol):
    """Data or environments that a run learns from; every rank has one and calls its methods.

    Attributes:
        config: the run's config; training.minibatch_size has a value if the config left it to the number of rows.
        spec: numbers of features and choices that the network is built for.
        normalization: normalization of states and candidates.
        identity: sha256 of data and environment, which a resumed run must share; see History.require_same.
        types: names of the types of agents that learn; ("",) if all agents are of one type.
    """

    config: WorkflowConfig
    spec: SourceSpec
    normalization: Normalization
    identity: dict[str, str]
    types: tuple[str, ...] = (ONLY,)

    @property
    def items(self) -> ItemTable | None:
        """The item table with whose ids candidates may be named, or None."""
        return None

    @property
    def hash(self) -> str:
        """sha256 of the data, or without data of the environment; stored in the exported model."""
        return self.identity["data"] or self.identity["env"]

    def stream(self, learner: Learner) -> Stream:
        """Returns batches for the learner; a simulation acts by the learner's current policy."""
        ...

    def evaluators(self, learner: Learner) -> Evaluators:
        """Returns the evaluators of the learner."""
        ...

    def fit(self, learner: Learner) -> None:
        """Fits what is not learned by optimizer steps: BCQ's estimated logging policy, a model of the reward."""
        return

    def sample(self, count: int, kind: str = ONLY) -> SampleRows:
        """Returns at most `count` raw rows in the model's column order, on which the export is checked.

        Args:
            count: largest number of rows.
            kind: type of agents of the rows.
        """
        ...

    def return_bounds(self) -> ReturnBounds | None:
        """Returns the range of values that the rewards allow, or None if it is not known."""
        return None

    def write_fitted(self) -> None:
        """Writes the normalization that was fitted, if one was; rank 0 calls it."""
        return

    def facts(self) -> DataFacts:
        """Returns facts about the source for the report."""
        return DataFacts()

    def draw(self, folder: Path, learner: Learner) -> None:
        """Writes the pictures that simulation.pictures asks for into the run's folder."""
        return


def _for_data(config: WorkflowConfig, data: Data, group: Group) -> WorkflowConfig:
    """Returns the config with numbers for the keys that depend on the data; every rank calls it."""
    rows = sum(data.train.agreement.rows)
    config = config.with_length_for(rows, sum(data.counts), group.world_size, continues=data.continues)
    if config.rl.value_scale == "returns":
        earlier = config.training.warm_start_model_path
        scale = (
            value_scale(data.train.copy, config.rl.gamma, data.shards)
            if earlier is None
            else value_scale_of(earlier, group)
        )
        config = config.with_rl(value_scale=scale)
    if config.defaults == "2026" and group.is_first:
        logger.info(f"defaults of 2026: {config.defaults_in_words}")
    return config


def open_source(
    config: WorkflowConfig, group: Group, simulation: Simulation | None, signal: StopSignal | None = None
) -> Source:
    """Returns the source that the config describes.

    Args:
        config: the run's config, with the environment's action names.
        group: the ranks.
        simulation: the opened environment, or None without a simulation section.
        signal: ends the wait for collectors; with None the wait has no end.

    Raises:
        DataError, ConfigError: see logged.prepare and environments.ObservationEncoder.
    """
    if simulation is None:
        return LoggedExperience(config, group)
    if config.training_data_path:
        return MixedExperience(config, group, simulation)
    if simulation.config.mode == "learn":
        return CollectedExperience(config, group, simulation, signal or StopSignal())
    return SimulatedExperience(config, group, simulation)


class LoggedExperience(Source):
    """Logged rows of all machines.

    Attributes:
        data: the rows; the other attributes are those of Source.
    """

    def __init__(self, config: WorkflowConfig, group: Group) -> None:
        self._group = group
        self.data = data = prepare(config, group)
        self.config = _for_data(config, data, group)
        self.spec = data.spec
        self.normalization = data.normalization
        self.identity = {"data": data.train.agreement.content, "env": ""}

    @property
    def items(self) -> ItemTable | None:
        """The table of data.items, or None."""
        return self.data.items

    def stream(self, learner: Learner) -> Stream:
        """Returns batches in the order of a read plan over all machines."""
        plan = logged_plan(self.config, self.data, self.config.minibatch_over(self._group.world_size))
        order = _order(plan, plan, simulated=0, only_simulated=False)
        warning = None
        if self.config.takes_steps:
            _log_plan(self.config, plan, self._group, continues=self.data.continues)
            warning = _few_steps(self.config, plan, order.rows, self._group)
        source: BatchSource = self._source(plan)
        if captures(self.config, self._group):
            source = FixedBatches(source, plan.rows_of_step(0))
        return Stream(source=source, plan=plan, order=order, group=self._group, warning=warning)

    def fit(self, learner: Learner) -> None:
        """Fits a model of the reward, or BCQ's logging policy, to the rows that the learner learns from."""
        learner = learners_of(learner)[ONLY]
        if isinstance(learner, Boosting):
            fit_reward_model(learner, self.config, self.data, self._group)
        logging_policy = getattr(learner, "behavior_cloning", None)
        if isinstance(logging_policy, LoggingPolicy):
            fit_logging_policy(logging_policy, self.data.train.copy, self.data.learned, self.spec, self.data.shards)

    def _source(self, plan: ReadPlan) -> LoggedSource:
        return LoggedSource(self.data.learned, plan, self._group.rank, self._group.device)

    def evaluators(self, learner: Learner) -> Evaluators:
        """Returns the evaluator on logged rows, by whose validation rows the best state is chosen."""
        logs = LogEvaluator(self.config, self.data, learners_of(learner)[ONLY], self._group)
        if self.data.validation is None:
            return Evaluators({LOGS: logs})
        rows = sum(self.data.shards.counts(self.data.validation.count))
        best = BestState(
            learner,
            tags=(VALIDATION_LOSS,),
            lowest=True,
            patience=self.config.checkpoint.patience,
            unit="epoch",
            described=f"lowest TD loss on {rows:,} validation rows",
        )
        return Evaluators({LOGS: logs}, best)

    def return_bounds(self) -> ReturnBounds | None:
        """Returns the range of values that the rewards of all machines allow."""
        return return_bounds(self.config, self.data.train.rows, self._group)

    def write_fitted(self) -> None:
        """Writes the normalization that was fitted to the training data."""
        write_fitted(with_missing_fitted(self.config), self.normalization)

    def sample(self, count: int, kind: str = ONLY) -> SampleRows:
        """Returns rows spread over the evaluated data."""
        return logged_sample(self.data, count)

    def facts(self) -> DataFacts:
        """Returns how often each feature is present, and the files."""
        return logged_facts(self.config, self.data)


class SimulatedExperience(Source):
    """Environments in which the learner's policy acts.

    Attributes:
        encoder: converts observations to the network's input; the other attributes are those of Source.
    """

    def __init__(self, config: WorkflowConfig, group: Group, simulation: Simulation) -> None:
        self.config = config
        self._group = group
        self.normalization = given_or_unchanged(config, simulation)
        self.spec = self.normalization.spec(config.actions)
        self.encoder = ObservationEncoder(config, simulation, self.normalization, group.device)
        self.identity = {"data": "", "env": simulation.identity()}
        self.types = simulation.learning

    def stream(self, learner: Learner) -> Stream:
        """Returns batches drawn from replay."""
        config = self.config
        group = self._group
        plan = simulated_plan(config, config.minibatch_over(group.world_size), len(self.types))
        _log_plan(config, plan, group, plan.minibatch)
        steps = plan.steps_per_epoch
        order = ReadOrder(order={}, steps=steps, rows=steps * plan.rows_of_step(0))
        rollouts = self._open(learner, plan)
        return Stream(source=rollouts, plan=plan, order=order, group=group, rollouts=rollouts)

    def _open(self, learner: Learner, plan: SimulatedPlan) -> RolloutSource:
        return open_rollouts(self.encoder, learner, plan, self._group)

    def evaluators(self, learner: Learner) -> Evaluators:
        """Returns the evaluator that plays episodes, by whose returns the best state is chosen."""
        play = SimulationEvaluator(self.encoder, learner, self._group)
        return Evaluators({PLAY: play}, _best_by_return(self.config, learner, self.types))

    def sample(self, count: int, kind: str = ONLY) -> SampleRows:
        """Returns observations of random play."""
        return simulated_sample(self.encoder.simulation, self.normalization, count, kind)

    def draw(self, folder: Path, learner: Learner) -> None:
        """Draws one episode."""
        draw_pictures(folder, self.encoder, learner)


class CollectedExperience(SimulatedExperience):
    """Episodes that collectors write to a shared folder."""

    def __init__(self, config: WorkflowConfig, group: Group, simulation: Simulation, signal: StopSignal) -> None:
        super().__init__(config, group, simulation)
        self._signal = signal

    def _open(self, learner: Learner, plan: SimulatedPlan) -> RolloutSource:
        files = CollectedReplay(self.encoder, learner, self._group, self._signal)
        return as_source(files, self.encoder, plan, self._group, CollectedSource)


class MixedExperience(LoggedExperience):
    """Logged rows and environments with the same features; simulation.share of each minibatch is simulated."""

    def __init__(self, config: WorkflowConfig, group: Group, simulation: Simulation) -> None:
        super().__init__(config, group)
        self.encoder = ObservationEncoder(self.config, simulation, self.normalization, group.device)
        self.identity = self.identity | {"env": simulation.identity()}

    def stream(self, learner: Learner) -> Stream:
        """Returns batches of both; if all rows are simulated, as many steps as the logged rows would take."""
        config = self.config
        group = self._group
        share = self.config.simulated_share
        minibatch = config.minibatch_over(group.world_size)
        simulated = round(minibatch * share)
        if 0 < share < 1:
            simulated = min(max(simulated, 1), minibatch - 1)
        if not simulated:
            return super().stream(learner)
        only_simulated = simulated == minibatch
        logged = logged_plan(config, self.data, minibatch if only_simulated else minibatch - simulated)
        plan = SimulatedPlan(
            num_steps=logged.num_steps,
            steps_per_epoch=logged.steps_per_epoch,
            minibatch=simulated,
            minibatches_per_step=logged.minibatches_per_step,
            logged=None if only_simulated else logged,
        )
        _log_plan(config, plan, group, simulated)
        order = _order(plan, logged, simulated=simulated * plan.minibatches_per_step, only_simulated=only_simulated)
        rollouts = open_rollouts(self.encoder, learner, plan, group)
        part = simulated / minibatch
        source = rollouts if only_simulated else MixedSource(((self._source(logged), 1 - part), (rollouts, part)))
        warning = _few_steps(config, plan, order.rows, group)
        return Stream(source=source, plan=plan, order=order, group=group, rollouts=rollouts, warning=warning)

    def evaluators(self, learner: Learner) -> Evaluators:
        """Returns the evaluator that plays episodes and the evaluator on logged rows."""
        play = SimulationEvaluator(self.encoder, learner, self._group)
        on_logs = super().evaluators(learner)
        best = _best_by_return(self.config, learner, self.types) if self.config.simulated_share else on_logs.best
        return Evaluators({PLAY: play, **on_logs.parts}, best)

    def draw(self, folder: Path, learner: Learner) -> None:
        """Draws one episode."""
        draw_pictures(folder, self.encoder, learner)


def _best_by_return(config: WorkflowConfig, learner: Learner, types: Sequence[str]) -> BestState | None:
    """Returns the state of the highest return in simulation, or None without checkpoint.keep_best."""
    if not config.checkpoint.keep_best:
        return None
    each = "highest mean return" if len(types) == 1 else f"highest sum of the mean returns of {' and '.join(types)}"
    return BestState(
        learner,
        tags=[tag_of(kind, RETURN) for kind in types],
        lowest=False,
        patience=config.checkpoint.patience,
        unit="evaluation" if config.only_simulates else "epoch",
        described=f"{each} in {config.environments.evaluation_episodes:,} simulated episodes",
    )


def logged_plan(config: WorkflowConfig, data: Data, minibatch: int) -> ReadPlan:
    """Returns the plan by which all processes together read `minibatch` training rows at a time."""
    return ReadPlan(
        shards=data.counts,
        minibatch=minibatch,
        epochs=config.num_epochs if config.takes_steps else 0,
        seed=config.seed,
        reads=data.shards.of_rank,
        minibatches_per_step=config.training.minibatches_per_step,
    )


def _order(plan: StepPlan, logged: ReadPlan, *, simulated: int, only_simulated: bool) -> ReadOrder:
    """Returns the order in which rows are read, which does not depend on how processes divide them."""
    kept = {name: value for name, value in logged.as_json().items() if name not in _NOT_ORDER}
    rows = sum(plan.rows_of_step(step) for step in range(plan.steps_per_epoch))
    order = {**kept, "simulated": simulated, "alone": only_simulated}
    return ReadOrder(order=order, steps=plan.steps_per_epoch, rows=rows)


def _few_steps(config: WorkflowConfig, plan: StepPlan, rows: int, group: Group) -> str | None:
    """Returns a warning if a run on logged rows takes too few optimizer steps to learn from them, and logs it.

    None with a warm start, whose weights are already trained.

    Args:
        config: the run's config.
        plan: the plan of the run.
        rows: rows of an epoch.
        group: the ranks.
    """
    if plan.num_steps >= _FEWEST_STEPS or config.training.warm_start_model_path is not None:
        return None
    key = "data.global_minibatch_size"
    parts = plan.minibatches_per_step
    if config.data.global_minibatch_size is None:
        key = "training.minibatch_size"
        parts = parts * group.world_size
    longer = f"epochs to at least {-(-_FEWEST_STEPS // plan.steps_per_epoch):,}"
    smaller = rows * config.num_epochs // (_FEWEST_STEPS * parts)
    either = f", or {key} to at most {smaller:,}" if smaller >= _SMALLEST_MINIBATCH else ""
    warning = (
        f"too few optimizer steps to learn from: {plan.num_steps:,} in all, {plan.steps_per_epoch:,} for each pass "
        f"over {pluralize(rows, 'row')}. For {_FEWEST_STEPS} set {longer}{either}"
    )
    if group.is_first:
        logger.warning(warning)
    return warning


def _log_plan(
    config: WorkflowConfig, plan: StepPlan, group: Group, simulated: int = 0, *, continues: bool = True
) -> None:
    """Logs how many rows each step reads, and warns if the target network hardly moves but rows have next states."""
    world = group.world_size
    minibatches = plan.minibatches_per_step
    minibatch = config.minibatch_over(world)
    accumulated = f", {minibatches} per step" if minibatches > 1 else ""
    mixed = f", {simulated} of them simulated" if 0 < simulated < minibatch else ""
    epochs = -(-plan.num_steps // plan.steps_per_epoch)
    unit = "epoch" if config.training_data_path else "evaluation"
    logger.info(
        f"global minibatch {minibatch} rows = {pluralize(world, 'process')} x {minibatch / world:g}{mixed}{accumulated}"
        f", {pluralize(plan.steps_per_epoch, 'step')}/{unit}, {pluralize(epochs, unit)}, learning rate "
        f"{config.training.learning_rate:g} (not scaled), on {group.device}"
    )
    rate = config.rl.target_update_rate
    warm = config.training.warm_start_model_path is not None
    moved = 1 - (1 - rate) ** plan.num_steps
    if moved < 0.5 and config.rl.gamma and continues and not warm and group.is_first:
        logger.warning(
            f"{pluralize(plan.num_steps, 'step')} at rl.target_update_rate {rate:g} move the target network "
            f"{moved:.1%} of the way to the learned network, so that values hardly include rewards after the next one. "
            "Raise it, or take more steps: more epochs, or a smaller training.minibatch_size"
        )
