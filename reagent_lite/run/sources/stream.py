"""The stream of batches that the training loop reads from a source, and how many steps it is planned to take."""

from collections.abc import Sequence
from dataclasses import dataclass

from reagent_lite.config import WorkflowConfig
from reagent_lite.console import logger
from reagent_lite.data.sampling.plan import ReadPlan
from reagent_lite.distributed.group import Group
from reagent_lite.errors import pluralize
from reagent_lite.run.simulated import training_scalars
from reagent_lite.sim.experience import RolloutSource
from reagent_lite.training.capture import FixedBatches
from reagent_lite.training.checkpoint_folder import Tree
from reagent_lite.training.loop import StepPlan
from reagent_lite.training.resume import ReadOrder
from reagent_lite.types import BatchSource

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


def order_of(plan: StepPlan, logged: ReadPlan, *, simulated: int, only_simulated: bool) -> ReadOrder:
    """Returns the order in which rows are read, which does not depend on how processes divide them."""
    kept = {name: value for name, value in logged.as_json().items() if name not in _NOT_ORDER}
    rows = sum(plan.rows_of_step(step) for step in range(plan.steps_per_epoch))
    order = {**kept, "simulated": simulated, "alone": only_simulated}
    return ReadOrder(order=order, steps=plan.steps_per_epoch, rows=rows)


def warn_of_few_steps(config: WorkflowConfig, plan: StepPlan, rows: int, group: Group) -> str | None:
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


def log_plan(
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
