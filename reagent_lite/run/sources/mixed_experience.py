"""Logged rows and environments together as the source of a run."""

from pathlib import Path

from reagent_lite.algorithms.learners import Learner
from reagent_lite.config import WorkflowConfig
from reagent_lite.data.sampling.mixture import MixedSource
from reagent_lite.distributed.group import Group
from reagent_lite.run.environments import ObservationEncoder, Simulation
from reagent_lite.run.episode_picture import draw_pictures
from reagent_lite.run.evaluators import PLAY, Evaluators, SimulationEvaluator
from reagent_lite.run.logged import Data
from reagent_lite.run.simulated import SimulatedPlan, open_rollouts
from reagent_lite.run.sources.logged_experience import LoggedExperience, logged_plan
from reagent_lite.run.sources.simulated_experience import best_by_return
from reagent_lite.run.sources.stream import Stream, log_plan, order_of, warn_of_few_steps


class MixedExperience(LoggedExperience):
    """Logged rows and environments with the same features; simulation.share of each minibatch is simulated."""

    def __init__(self, config: WorkflowConfig, group: Group, data: Data, simulation: Simulation) -> None:
        super().__init__(config, group, data)
        self.encoder = ObservationEncoder(self.config, simulation, self.normalization, group.device)
        self.identity = self.identity | {"env": simulation.identity()}

    def stream(self, learner: Learner) -> Stream:
        """Returns batches of both; if all rows are simulated, as many steps as the logged rows would take."""
        config = self.config
        group = self.group
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
        log_plan(config, plan, group, simulated)
        order = order_of(plan, logged, simulated=simulated * plan.minibatches_per_step, only_simulated=only_simulated)
        rollouts = open_rollouts(self.encoder, learner, plan, group)
        part = simulated / minibatch
        source = rollouts if only_simulated else MixedSource(((self._source(logged), 1 - part), (rollouts, part)))
        warning = warn_of_few_steps(config, plan, order.rows, group)
        return Stream(source=source, plan=plan, order=order, group=group, rollouts=rollouts, warning=warning)

    def evaluators(self, learner: Learner) -> Evaluators:
        """Returns the evaluator that plays episodes and the evaluator on logged rows."""
        play = SimulationEvaluator(self.encoder, learner, self.group)
        on_logs = super().evaluators(learner)
        best = best_by_return(self.config, learner, self.types) if self.config.simulated_share else on_logs.best
        return Evaluators({PLAY: play, **on_logs.parts}, best)

    def draw(self, folder: Path, learner: Learner) -> None:
        """Draws one episode."""
        draw_pictures(folder, self.encoder, learner)
