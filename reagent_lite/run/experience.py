"""Both rivers: logged rows, environments, or a mixture, as what the learner fits, reads and is judged by.

training_data_path ─► Data ───────┐                     ┌─► Stream: batches, plan, what happens before a step
                                  ├─► Experience ───────┤
simulation ─► Simulation, Reader ─┘  (spec, columns)    └─► Judges: CPE on logs, returns in simulation
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from reagent_lite.algorithms.dqn import DQN
from reagent_lite.config import WorkflowConfig
from reagent_lite.console import logger
from reagent_lite.data.rows.maps import in_order
from reagent_lite.data.sampling.mixture import MixedSource
from reagent_lite.data.sampling.plan import ReadPlan
from reagent_lite.data.sampling.source import LoggedSource
from reagent_lite.distributed.group import Group
from reagent_lite.errors import counted
from reagent_lite.export.content import SampleRows
from reagent_lite.run.environments import (
    Reader,
    Simulation,
    check_features,
    given_normalization,
    sample_rows,
    source_spec,
)
from reagent_lite.run.evaluators import Judge, Judgement
from reagent_lite.run.learner import captures
from reagent_lite.run.logged import Data, Normalization, prepare
from reagent_lite.run.returns import SimulationJudge
from reagent_lite.run.simulated import build_source, simulated_plan, training_scalars
from reagent_lite.sim.rollout import RolloutSource, regrouped
from reagent_lite.training.capture import Captured, eager
from reagent_lite.training.checkpoint import Tree
from reagent_lite.training.loop import StepPlan, Update
from reagent_lite.training.resume import ReadOrder
from reagent_lite.types import BatchSource, SourceSpec

_SHARING = ("epochs", "shares", "reads")
"""Parts of a read plan that say how long a run is, and which process reads what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experience:
    """What a run learns from and is judged on.

    Attributes:
        spec: what the network must fit.
        normalization: of states and choices.
        data: logged rows, or None.
        simulation, reader: environments and their features as the network reads them, or None.
    """

    spec: SourceSpec
    normalization: Normalization
    data: Data | None
    simulation: Simulation | None
    reader: Reader | None

    def identity(self) -> str:
        """Returns the sha256 that says what was learned from: the data, else the environment."""
        if self.data is not None:
            return self.data.found.hash
        assert self.simulation is not None
        return self.simulation.identity()

    def sample(self, count: int) -> SampleRows:
        """Returns raw rows in the model's column order, for the export's check."""
        if self.data is not None:
            return logged_sample(self.data, count)
        assert self.simulation is not None
        return sample_rows(self.simulation, self.normalization, count)


def gather_experience(config: WorkflowConfig, group: Group, simulation: Simulation | None) -> Experience:
    """Reads the data, where there is some, and fits environments to its features.

    Raises:
        DataError, ConfigError: see preparation.prepare and simulation.check_features.
    """
    data = prepare(config, group) if config.training_data_path else None
    if data is not None:
        normalization, spec = data.normalization, data.spec
    else:
        assert simulation is not None
        normalization = given_normalization(config, simulation)
        spec = source_spec(config, normalization)
    reader = None
    if simulation is not None:
        check_features(simulation, normalization)
        reader = Reader(
            simulation, normalization, missing_as_zero=config.rl.set_missing_value_to_zero, device=group.device
        )
    return Experience(spec=spec, normalization=normalization, data=data, simulation=simulation, reader=reader)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """Batches of a run and what belongs to them.

    Attributes:
        source: of this rank.
        plan: how many steps.
        rows: over all ranks in the whole run.
        before_step: lets environments step.
        figures: of episodes that ended while learning; every rank calls it.
        capture: turns updates into CUDA graphs where buffers are fixed.
        order: what a step number counts in.
        regrouped: the source's state for a rank at a step, from the states of other ranks than there are now.
    """

    source: BatchSource
    plan: StepPlan
    rows: int
    before_step: Callable[[int], None]
    figures: Callable[[], dict[str, float]]
    capture: Callable[[Update], Update]
    order: ReadOrder
    regrouped: Callable[[Sequence[Tree], int, int], Tree]


def open_stream(config: WorkflowConfig, experience: Experience, learner: DQN, group: Group) -> Stream:
    """Returns batches of logged rows, of simulated ones, or of both."""
    world, data, share = group.world_size, experience.data, config.simulated_share
    minibatch = config.data.global_minibatch_size or config.training.minibatch_size * world
    simulated = round(minibatch * share)
    if data is not None and 0 < share < 1:
        simulated = min(max(simulated, 1), minibatch - 1)
    plan: StepPlan
    if data is None:
        plan = simulated_plan(config, minibatch)
        rows = plan.num_steps * plan.rows_of_step(0)
    else:
        logged = logged_plan(config, data, minibatch if simulated == minibatch else minibatch - simulated)
        plan = _Joint(logged, simulated * logged.minibatches_per_step, alone=simulated == minibatch)
        rows = sum(plan.rows_of_step(step) for step in range(plan.steps_per_epoch)) * config.epochs
    _announce(config, plan, minibatch, simulated, group)
    capture = Captured if captures(config, group) else eager
    rollouts = None
    if simulated:
        assert experience.simulation is not None
        assert experience.reader is not None
        rollouts = build_source(
            config, experience.simulation, experience.reader, learner, group,
            minibatch=simulated, num_steps=plan.num_steps, capture=capture,
        )  # fmt: skip
    source: BatchSource
    if data is None or simulated == minibatch:
        assert rollouts is not None
        source = rollouts
    else:
        source = LoggedSource({data.shards.own: data.train_rows}, logged, group.rank, group.device)
        if rollouts is not None:
            part = simulated / minibatch
            source = MixedSource(((source, 1 - part), (rollouts, part)))
    return Stream(
        source=source,
        plan=plan,
        rows=rows,
        before_step=_nothing if rollouts is None else rollouts.collect,
        figures=_figures(rollouts, group),
        capture=capture,
        order=_read_order(plan),
        regrouped=_regrouped(experience.simulation, group, logs=source is not rollouts, simulated=rollouts is not None),
    )


def _read_order(plan: StepPlan) -> ReadOrder:
    """Returns what decides which rows a step reads; how processes share them is no part of it."""
    order: dict[str, Any] = {}
    if isinstance(plan, _Joint):
        kept = {name: value for name, value in plan.logged.as_json().items() if name not in _SHARING}
        order = {**kept, "simulated": plan.simulated, "alone": plan.alone}
    rows = sum(plan.rows_of_step(step) for step in range(plan.steps_per_epoch))
    return ReadOrder(order=order, steps=plan.steps_per_epoch, rows=rows)


def _regrouped(
    simulation: Simulation | None, group: Group, *, logs: bool, simulated: bool
) -> Callable[[Sequence[Tree], int, int], Tree]:
    """Returns how states of the source are dealt out anew: logged rows by step, environments by global number."""

    def environments(states: Sequence[Tree], rank: int) -> Tree:
        assert simulation is not None
        of_rank = Group(replace(group.place, rank=rank), group.device)
        return regrouped(states, rank, *simulation.part(simulation.config.num_envs, of_rank))

    def deal(states: Sequence[Tree], rank: int, step: int) -> Tree:
        if not simulated:
            return {"step": step}
        if not logs:
            return environments(states, rank)
        return {"0": {"step": step}, "1": environments([state["1"] for state in states], rank)}

    return deal


def logged_plan(config: WorkflowConfig, data: Data, minibatch: int) -> ReadPlan:
    """Returns the plan by which all processes read the training rows, `minibatch` of them at a time."""
    return data.shards.plan(
        data.counts,
        minibatch=minibatch,
        epochs=config.epochs,
        seed=config.seed,
        minibatches_per_step=config.training.minibatches_per_step,
    )


@dataclass(frozen=True, slots=True)
class _Joint:
    """A read plan with simulated rows beside, or in place of, the logged ones."""

    logged: ReadPlan
    simulated: int
    alone: bool

    @property
    def num_steps(self) -> int:
        return self.logged.num_steps

    @property
    def steps_per_epoch(self) -> int:
        return self.logged.steps_per_epoch

    @property
    def minibatches_per_step(self) -> int:
        return self.logged.minibatches_per_step

    def rows_of_step(self, step: int) -> int:
        return self.simulated + (0 if self.alone else self.logged.rows_of_step(step))


def _nothing(step: int) -> None:
    """Logged rows need nothing before a step."""


def _figures(rollouts: RolloutSource | None, group: Group) -> Callable[[], dict[str, float]]:
    return dict if rollouts is None else lambda: training_scalars(rollouts, group)


def _announce(config: WorkflowConfig, plan: StepPlan, minibatch: int, simulated: int, group: Group) -> None:
    world, mps = group.world_size, plan.minibatches_per_step
    accumulated = f", {mps} a step" if mps > 1 else ""
    mixed = f", {simulated} of them simulated" if 0 < simulated < minibatch else ""
    parts = -(-plan.num_steps // plan.steps_per_epoch)
    unit = "epoch" if config.training_data_path else "evaluation"
    logger.info(f"global minibatch {minibatch} rows = {counted(world, 'process')} x {minibatch / world:g}{mixed}"
               f"{accumulated}, {counted(plan.steps_per_epoch, 'step')}/{unit}, {counted(parts, unit)}, "
               f"learning rate {config.training.learning_rate:g} (not scaled), on {group.device}")  # fmt: skip


class Judges:
    """Everything that judges the learner: counterfactual evaluation on logs, play in simulation.

    Args:
        config: the run's config.
        logs: judge on logged rows, or None.
        play: judge in simulation, or None.
    """

    def __init__(self, config: WorkflowConfig, logs: Judge | None, play: SimulationJudge | None) -> None:
        self._config, self._logs, self._play = config, logs, play

    def state_dict(self) -> Tree:
        """Returns what was fitted and seen so far."""
        parts = {"logs": self._logs, "play": self._play}
        return {name: part.state_dict() for name, part in parts.items() if part is not None}

    def load_state_dict(self, state: Tree) -> None:
        """Goes on from there."""
        if self._logs is not None:
            self._logs.load_state_dict(state.get("logs", {}))
        if self._play is not None:
            self._play.load_state_dict(state["play"])

    def figures(self, *, final: bool) -> dict[str, float]:
        """Returns what is known after an epoch; every rank calls it.

        Args:
            final: whether the run ends here; it also does where the simulation is satisfied.
        """
        scalars: dict[str, float] = {}
        if self._play is not None:
            scalars |= self._play.evaluate(final=False).scalars
            final |= self.satisfied()
        if self._logs is not None:
            scalars |= self._logs.figures(final=final)
            if self._config.evaluation.calc_cpe_in_training and not final:
                scalars |= self._logs.evaluate(final=False).scalars
        return scalars

    def satisfied(self) -> bool:
        """Whether the last evaluation reached simulation.stop_at_return."""
        simulation = self._config.simulation
        if self._play is None or simulation is None or simulation.stop_at_return is None:
            return False
        return self._play.latest >= simulation.stop_at_return

    def at_end(self) -> Judgement:
        """Returns the run's evaluation; the document has a part for each judge."""
        parts = {}
        if self._logs is not None:
            parts["cpe"] = self._logs.evaluate(final=True)
        if self._play is not None:
            parts["simulation"] = self._play.evaluate(final=True)
        return Judgement(
            scalars={name: value for part in parts.values() for name, value in part.scalars.items()},
            document={name: part.document for name, part in parts.items()},
            lines=tuple(line for part in parts.values() for line in part.lines),
        )


def build_judges(config: WorkflowConfig, experience: Experience, learner: DQN, group: Group) -> Judges:
    """Returns the judges that the run's experience allows."""
    play = None
    if experience.simulation is not None:
        assert experience.reader is not None
        play = SimulationJudge(config, experience.simulation, experience.reader, learner, group)
    logs = None if experience.data is None else Judge(config, experience.data, learner, group)
    return Judges(config, logs, play)


def logged_sample(data: Data, count: int) -> SampleRows:
    """Takes rows spread over the judged data, raw, in the model's column order; where there are none, an absent one."""
    copy = data.held_out or data.train  # one that is empty counts as none
    if not len(copy):
        return _absent_row(data)
    numbers = np.unique(np.linspace(0, len(copy) - 1, min(count, len(copy))).astype(int))
    values = _raw(copy.state[numbers], copy.state_ids, data.normalization.state.feature_ids)
    if data.normalization.action is None:
        mask = np.array(copy.mask[numbers], bool)
        copy.release()
        return SampleRows(values=values, mask=mask)
    ids = data.normalization.action.feature_ids
    lists = np.asarray(copy.actions_list[numbers])
    starts, stops = copy.list_offsets[lists], copy.list_offsets[lists + 1]
    longest = max(int((stops - starts).max()), 1)
    candidates = np.full((len(numbers), longest, len(ids)), np.nan, np.float32)
    mask = np.arange(longest) < (stops - starts)[:, None]
    for row, (begin, end) in enumerate(zip(starts, stops, strict=True)):
        candidates[row, : end - begin] = _raw(copy.candidates[begin:end], copy.action_ids, ids)
    copy.release()
    return SampleRows(values=values, candidates=candidates, mask=mask)


def _raw(values: np.ndarray, ids: Sequence[int], order: Sequence[int]) -> np.ndarray:
    return np.array(in_order(values, ids, order, absent=np.nan), np.float32)


def _absent_row(data: Data) -> SampleRows:
    """Returns one row without any feature, every choice of which is allowed."""
    state, action = data.normalization.state.feature_ids, data.normalization.action
    values = np.full((1, len(state)), np.nan, np.float32)
    if action is None:
        return SampleRows(values=values, mask=np.ones((1, len(data.spec.action_names)), np.bool_))
    candidates = np.full((1, 1, len(action.feature_ids)), np.nan, np.float32)
    return SampleRows(values=values, candidates=candidates, mask=np.ones((1, 1), np.bool_))
