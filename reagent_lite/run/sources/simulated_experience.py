"""Environments, in which the learner's policy acts, as the source of a run."""

from collections.abc import Sequence
from pathlib import Path

from reagent_lite.algorithms.learners import Learner
from reagent_lite.config import WorkflowConfig
from reagent_lite.distributed.group import Group
from reagent_lite.export.bundle_content import SampleRows
from reagent_lite.run.environments import ObservationEncoder, Simulation, given_or_unchanged
from reagent_lite.run.episode_picture import draw_pictures
from reagent_lite.run.evaluators import PLAY, Evaluators, SimulationEvaluator
from reagent_lite.run.samples import simulated_sample
from reagent_lite.run.simulated import RETURN, SimulatedPlan, open_rollouts, simulated_plan, tag_of
from reagent_lite.run.sources.experience_source import Source
from reagent_lite.run.sources.stream import Stream, log_plan
from reagent_lite.sim.experience import ONLY, RolloutSource
from reagent_lite.training.best import BestState
from reagent_lite.training.resume import ReadOrder


class SimulatedExperience(Source):
    """Environments in which the learner's policy acts.

    Attributes:
        encoder: converts observations to the network's input; the other attributes are those of Source.
    """

    def __init__(self, config: WorkflowConfig, group: Group, simulation: Simulation) -> None:
        self.config = config
        self.group = group
        self.normalization = given_or_unchanged(config, simulation)
        self.spec = self.normalization.spec(config.actions)
        self.encoder = ObservationEncoder(config, simulation, self.normalization, group.device)
        self.identity = {"data": "", "env": simulation.identity()}
        self.types = simulation.learning

    def stream(self, learner: Learner) -> Stream:
        """Returns batches drawn from replay."""
        config = self.config
        group = self.group
        plan = simulated_plan(config, config.minibatch_over(group.world_size), len(self.types))
        log_plan(config, plan, group, plan.minibatch)
        steps = plan.steps_per_epoch
        order = ReadOrder(order={}, steps=steps, rows=steps * plan.rows_of_step(0))
        rollouts = self._open(learner, plan)
        return Stream(source=rollouts, plan=plan, order=order, group=group, rollouts=rollouts)

    def _open(self, learner: Learner, plan: SimulatedPlan) -> RolloutSource:
        return open_rollouts(self.encoder, learner, plan, self.group)

    def evaluators(self, learner: Learner) -> Evaluators:
        """Returns the evaluator that plays episodes, by whose returns the best state is chosen."""
        play = SimulationEvaluator(self.encoder, learner, self.group)
        return Evaluators({PLAY: play}, best_by_return(self.config, learner, self.types))

    def sample(self, count: int, kind: str = ONLY) -> SampleRows:
        """Returns observations of random play."""
        return simulated_sample(self.encoder.simulation, self.normalization, count, kind)

    def draw(self, folder: Path, learner: Learner) -> None:
        """Draws one episode."""
        draw_pictures(folder, self.encoder, learner)


def best_by_return(config: WorkflowConfig, learner: Learner, types: Sequence[str]) -> BestState | None:
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
