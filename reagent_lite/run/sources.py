"""What a run learns from: four sources, and the stream of batches that each gives to the loop.

Logged     rows of all machines ───┐
Followed   files ─► replay ────────┤
Simulated  environments ─► replay ─┼► Stream: batches of this rank, how many steps, where a later start goes on
Mixed      both in each minibatch ─┘
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from reagent_lite.algorithms.learners import Learner, learners_of
from reagent_lite.config import WorkflowConfig
from reagent_lite.console import logger
from reagent_lite.data.sampling.mixture import MixedSource
from reagent_lite.data.sampling.plan import ReadPlan
from reagent_lite.data.sampling.source import LoggedSource
from reagent_lite.distributed.group import Group
from reagent_lite.errors import counted
from reagent_lite.export.content import SampleRows
from reagent_lite.report.run import Source as LoggedFacts
from reagent_lite.run.environments import Reader, Simulation, given_or_unchanged, part_of
from reagent_lite.run.evaluators import Evaluators, LogEvaluator, SimulationEvaluator
from reagent_lite.run.figures import Presence, present_shares, sources_of
from reagent_lite.run.logged import Data, prepare
from reagent_lite.run.normalization import Normalization, write_fitted
from reagent_lite.run.pictures import draw_pictures
from reagent_lite.run.roles.following import FollowedEpisodes, FollowedSource
from reagent_lite.run.samples import logged_sample, simulated_sample
from reagent_lite.run.simulated import SimulatedPlan, as_source, open_rollouts, simulated_plan, training_scalars
from reagent_lite.run.value_bounds import Payable, payable_values
from reagent_lite.sim.rollout import ONLY, RolloutSource, regrouped
from reagent_lite.training.checkpoint import Tree
from reagent_lite.training.loop import StepPlan
from reagent_lite.training.resume import ReadOrder
from reagent_lite.training.stop import StopSignal
from reagent_lite.types import BatchSource, SourceSpec

_SHARING = ("epochs", "reads")
"""Parts of a read plan that say how long a run is, and which process reads what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """Batches of logged rows, and what belongs to them.

    Attributes:
        source: of this rank.
        plan: how many steps.
        order: what a step number counts in.
    """

    source: BatchSource
    plan: StepPlan
    order: ReadOrder

    @property
    def rows(self) -> int:
        """Rows over all ranks in the whole run."""
        return self.order.rows * self.plan.num_steps // self.plan.steps_per_epoch

    def before_step(self, step: int) -> None:
        """Lets environments step; logged rows need nothing."""

    @property
    def frames(self) -> int:
        """Environment steps of all ranks so far."""
        return 0

    def at_end(self, step: int) -> None:
        """Called after the last step; collectors learn from it that the run has ended."""

    def figures(self) -> dict[str, float]:
        """Returns figures of episodes that ended while learning; every rank calls it."""
        return {}

    def deal(self, states: Sequence[Tree], rank: int, step: int) -> Tree:
        """Returns the source's state for a rank at a step, from the states of other ranks than there are now."""
        return {"step": step}


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStream(Stream):
    """Batches of simulated rows only.

    Attributes:
        rollouts: environments and replay of this rank.
        simulation: whose environments.
        group: ranks share them.
    """

    rollouts: RolloutSource
    simulation: Simulation
    group: Group

    def before_step(self, step: int) -> None:
        """Collects experience."""
        self.rollouts.collect(step)

    @property
    def frames(self) -> int:
        """Environment steps of all ranks so far, warm-up included."""
        return self.rollouts.env_steps

    def figures(self) -> dict[str, float]:
        """Returns environment steps, episodes, and their mean return."""
        return training_scalars(self.rollouts, self.frames, self.group)

    def deal(self, states: Sequence[Tree], rank: int, step: int) -> Tree:
        """Deals environments out anew by their global number."""
        return regrouped(states, rank, *part_of(self.simulation.config.num_envs, rank, self.group.world_size))


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowedStream(SimulatedStream):
    """Batches of collectors' rows.

    Attributes:
        files: of the collectors.
    """

    files: FollowedEpisodes

    def before_step(self, step: int) -> None:
        """Publishes the policy if one is due, and takes rows."""
        self.files.publish(step)
        self.rollouts.collect(step)

    def at_end(self, step: int) -> None:
        """Publishes the last policy, with which collectors end."""
        self.files.publish(step, finished=True)

    @property
    def frames(self) -> int:
        """Environment steps of all collectors that were taken."""
        return self.files.frames

    def deal(self, states: Sequence[Tree], rank: int, step: int) -> Tree:
        """Returns how far the files are read: each rank fills its replay from its share of them."""
        return states[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedStream(SimulatedStream):
    """Batches of logged and simulated rows."""

    def deal(self, states: Sequence[Tree], rank: int, step: int) -> Tree:
        """Deals logged rows out by step, environments by their global number."""
        # without super(): a dataclass with slots is another class than the one its body closes over
        return {"0": {"step": step}, "1": SimulatedStream.deal(self, [state["1"] for state in states], rank, step)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The report's facts about a source.

    Attributes:
        present: share of sampled rows that have each feature, by column.
        used: data that was learned from and evaluated on.
    """

    present: Presence = field(default_factory=dict)
    used: tuple[LoggedFacts, ...] = ()


class Source(Protocol):
    """What a run learns from; every rank has one and calls its methods.

    Attributes:
        spec: what the network must fit.
        normalization: of states and choices.
        identity: sha256 of what is learned from, see History.require_same.
        hash: sha256 that an exported model carries.
        types: names of the types of agents that learn; "" alone where there is one type.
    """

    spec: SourceSpec
    normalization: Normalization
    identity: dict[str, str]
    hash: str
    types: tuple[str, ...] = (ONLY,)

    def stream(self, learner: Learner) -> Stream:
        """Returns the batches that the learner learns from."""
        ...

    def evaluators(self, learner: Learner) -> Evaluators:
        """Returns what evaluates the learner."""
        ...

    def sample(self, count: int, kind: str = ONLY) -> SampleRows:
        """Returns raw rows of a type of agents in the model's column order, for the export's check."""
        ...

    def payable(self) -> Payable | None:
        """Returns the values that rewards can pay, or None where they are not known."""
        return None

    def write_fitted(self) -> None:
        """Writes the normalization that was fitted, where one was; on rank 0."""
        return

    def facts(self) -> Facts:
        """Returns the report's facts about the source."""
        return Facts()

    def draw(self, folder: Path, learner: Learner) -> list[Path]:
        """Writes pictures of the run into its folder, where simulation.pictures asks for them; returns the files."""
        return []


def open_source(
    config: WorkflowConfig, group: Group, simulation: Simulation | None, signal: StopSignal | None = None
) -> Source:
    """Returns the source that the config describes.

    Args:
        config: with the environment's actions.
        group: the ranks.
        simulation: opened, or None without a simulation section.
        signal: ends the wait for collectors; None waits for ever.

    Raises:
        DataError, ConfigError: see logged.prepare and environments.Reader.
    """
    if simulation is None:
        return Logged(config, group)
    if config.training_data_path:
        return Mixed(config, group, simulation)
    if simulation.config.mode == "learn":
        return Followed(config, group, simulation, signal or StopSignal())
    return Simulated(config, group, simulation)


class Logged(Source):
    """Rows of logs, also those of other machines. Attributes as in Source, and the data.

    Raises:
        DataError: see logged.prepare.
    """

    def __init__(self, config: WorkflowConfig, group: Group) -> None:
        self._config, self._group = config, group
        self.data = data = prepare(config, group)
        self.spec, self.normalization, self.hash = data.spec, data.normalization, data.found.hash
        self.identity = {"data": data.found.content, "env": ""}

    def stream(self, learner: Learner) -> Stream:
        """Returns batches by a read plan over all machines."""
        plan = logged_plan(self._config, self.data, self._config.minibatch_over(self._group.world_size))
        _log_plan(self._config, plan, self._group)
        return Stream(source=self._source(plan), plan=plan, order=_order(plan, plan, simulated=0, alone=False))

    def _source(self, plan: ReadPlan) -> LoggedSource:
        return LoggedSource(self.data.train_rows, plan, self._group.rank, self._group.device)

    def evaluators(self, learner: Learner) -> Evaluators:
        """Returns counterfactual evaluation."""
        return Evaluators({"cpe": self._on_logs(learner)})

    def _on_logs(self, learner: Learner) -> LogEvaluator:
        return LogEvaluator(self._config, self.data, learners_of(learner)[ONLY], self._group)

    def payable(self) -> Payable | None:
        """Returns the values that rewards of all machines can pay."""
        return payable_values(self._config, self.data.train_rows, self._group)

    def write_fitted(self) -> None:
        """Writes what was fitted to the training data."""
        write_fitted(self._config, self.normalization)

    def sample(self, count: int, kind: str = ONLY) -> SampleRows:
        """Returns rows spread over the evaluated data."""
        return logged_sample(self.data, count)

    def facts(self) -> Facts:
        """Returns presence of features, and the files."""
        return Facts(present=present_shares(self.data), used=sources_of(self._config, self.data))


class Simulated(Source):
    """Environments. Attributes as in Source, and the reader of what they show.

    Raises:
        ConfigError, DataError: see environments.Reader.
    """

    def __init__(self, config: WorkflowConfig, group: Group, simulation: Simulation) -> None:
        self._config, self._group = config, group
        self.normalization = given_or_unchanged(config, simulation)
        self.spec = self.normalization.spec(config.actions)
        self.reader = Reader(config, simulation, self.normalization, group.device)
        self.hash = simulation.identity()
        self.identity = {"data": "", "env": self.hash}
        self.types = simulation.learning

    def stream(self, learner: Learner) -> Stream:
        """Returns batches of replay."""
        config, group = self._config, self._group
        plan = simulated_plan(config, config.minibatch_over(group.world_size), len(self.types))
        _log_plan(config, plan, group, plan.minibatch)
        steps = plan.steps_per_epoch
        return self._open(learner, plan, ReadOrder(order={}, steps=steps, rows=steps * plan.rows_of_step(0)))

    def _open(self, learner: Learner, plan: SimulatedPlan, order: ReadOrder) -> Stream:
        return _simulated_stream(self.reader, learner, plan, order, self._group)

    def evaluators(self, learner: Learner) -> Evaluators:
        """Returns episodes in the environments."""
        return Evaluators({"simulation": SimulationEvaluator(self.reader, learner, self._group)})

    def sample(self, count: int, kind: str = ONLY) -> SampleRows:
        """Returns observations of random play."""
        return simulated_sample(self.reader.simulation, self.normalization, count, kind)

    def draw(self, folder: Path, learner: Learner) -> list[Path]:
        """Draws how learning went, and an episode."""
        return draw_pictures(folder, self.reader, learner)


class Followed(Simulated):
    """Episodes of collectors. Attributes as in Simulated.

    Raises:
        ConfigError, DataError: see environments.Reader.
    """

    def __init__(self, config: WorkflowConfig, group: Group, simulation: Simulation, signal: StopSignal) -> None:
        super().__init__(config, group, simulation)
        self._signal = signal

    def _open(self, learner: Learner, plan: SimulatedPlan, order: ReadOrder) -> Stream:
        group, reader = self._group, self.reader
        files = FollowedEpisodes(reader, learner, group, self._signal)
        rollouts = as_source(files, reader, plan, group, FollowedSource)
        return FollowedStream(
            source=rollouts, plan=plan, order=order, rollouts=rollouts, simulation=reader.simulation, group=group,
            files=files,
        )  # fmt: skip


class Mixed(Logged):
    """Logged rows, and environments with their features, of which simulation.share are learned from.

    Raises:
        DataError, ConfigError: see Logged and environments.Reader.
    """

    def __init__(self, config: WorkflowConfig, group: Group, simulation: Simulation) -> None:
        super().__init__(config, group)
        self.reader = Reader(config, simulation, self.normalization, group.device)
        self.identity = self.identity | {"env": simulation.identity()}

    def stream(self, learner: Learner) -> Stream:
        """Returns batches of both; as many rows a step as the log alone gives where all of them are simulated."""
        config, group, share = self._config, self._group, self._config.simulated_share
        minibatch = config.minibatch_over(group.world_size)
        simulated = round(minibatch * share)
        if 0 < share < 1:
            simulated = min(max(simulated, 1), minibatch - 1)
        if not simulated:
            return super().stream(learner)
        alone = simulated == minibatch
        logged = logged_plan(config, self.data, minibatch if alone else minibatch - simulated)
        plan = SimulatedPlan(
            num_steps=logged.num_steps, steps_per_epoch=logged.steps_per_epoch, minibatch=simulated,
            minibatches_per_step=logged.minibatches_per_step, logged=None if alone else logged,
        )  # fmt: skip
        _log_plan(config, plan, group, simulated)
        order = _order(plan, logged, simulated=simulated * plan.minibatches_per_step, alone=alone)
        stream = _simulated_stream(self.reader, learner, plan, order, group)
        if alone:
            return stream
        part = simulated / minibatch
        source = MixedSource(((self._source(logged), 1 - part), (stream.rollouts, part)))
        return MixedStream(
            source=source, plan=plan, order=order, rollouts=stream.rollouts, simulation=stream.simulation,
            group=group,
        )  # fmt: skip

    def evaluators(self, learner: Learner) -> Evaluators:
        """Returns counterfactual evaluation and episodes."""
        play = SimulationEvaluator(self.reader, learner, self._group)
        return Evaluators({"simulation": play, "cpe": self._on_logs(learner)})

    def draw(self, folder: Path, learner: Learner) -> list[Path]:
        """Draws how learning went, and an episode."""
        return draw_pictures(folder, self.reader, learner)


def logged_plan(config: WorkflowConfig, data: Data, minibatch: int) -> ReadPlan:
    """Returns the plan by which all processes read the training rows, `minibatch` of them at a time."""
    return data.shards.plan(
        data.counts,
        minibatch=minibatch,
        epochs=config.epochs,
        seed=config.seed,
        minibatches_per_step=config.training.minibatches_per_step,
    )


def _order(plan: StepPlan, logged: ReadPlan, *, simulated: int, alone: bool) -> ReadOrder:
    """Returns what decides which rows a step reads; how processes share them is no part of it."""
    kept = {name: value for name, value in logged.as_json().items() if name not in _SHARING}
    rows = sum(plan.rows_of_step(step) for step in range(plan.steps_per_epoch))
    order = {**kept, "simulated": simulated, "alone": alone}
    return ReadOrder(order=order, steps=plan.steps_per_epoch, rows=rows)


def _simulated_stream(
    reader: Reader, learner: Learner, plan: SimulatedPlan, order: ReadOrder, group: Group
) -> SimulatedStream:
    """Returns a stream of simulated rows only."""
    rollouts = open_rollouts(reader, learner, plan, group)
    return SimulatedStream(source=rollouts, plan=plan, order=order, rollouts=rollouts,
                           simulation=reader.simulation, group=group)  # fmt: skip


def _log_plan(config: WorkflowConfig, plan: StepPlan, group: Group, simulated: int = 0) -> None:
    world, mps = group.world_size, plan.minibatches_per_step
    minibatch = config.minibatch_over(world)
    accumulated = f", {mps} a step" if mps > 1 else ""
    mixed = f", {simulated} of them simulated" if 0 < simulated < minibatch else ""
    parts = -(-plan.num_steps // plan.steps_per_epoch)
    unit = "epoch" if config.training_data_path else "evaluation"
    logger.info(
        f"global minibatch {minibatch} rows = {counted(world, 'process')} x {minibatch / world:g}{mixed}{accumulated}, "
        f"{counted(plan.steps_per_epoch, 'step')}/{unit}, {counted(parts, unit)}, learning rate "
        f"{config.training.learning_rate:g} (not scaled), on {group.device}"
    )
