"""Episodes that collectors write to a shared folder as the source of a run."""

from reagent_lite.algorithms.learners import Learner
from reagent_lite.config import WorkflowConfig
from reagent_lite.distributed.group import Group
from reagent_lite.run.environments import Simulation
from reagent_lite.run.roles.collected import CollectedReplay, CollectedSource
from reagent_lite.run.simulated import SimulatedPlan, as_source
from reagent_lite.run.sources.simulated_experience import SimulatedExperience
from reagent_lite.sim.experience import RolloutSource
from reagent_lite.training.stop import StopSignal


class CollectedExperience(SimulatedExperience):
    """Episodes that collectors write to a shared folder."""

    def __init__(self, config: WorkflowConfig, group: Group, simulation: Simulation, signal: StopSignal) -> None:
        super().__init__(config, group, simulation)
        self._signal = signal

    def _open(self, learner: Learner, plan: SimulatedPlan) -> RolloutSource:
        files = CollectedReplay(self.encoder, learner, self.group, self._signal)
        return as_source(files, self.encoder, plan, self.group, CollectedSource)
