"""Judging in simulation: the policy's episodes, spread over ranks, with intervals.

What plays is the live network, on all ranks and their GPUs, before a gate may hold the export back. What is exported
decides alike: the export's check compares every format with the network on observations of this very environment, and
a test plays an exported model through the same episodes. To play an exported model: workflows.evaluate.
"""

import torch

from reagent_lite.algorithms.dqn import DQN
from reagent_lite.config import WorkflowConfig
from reagent_lite.distributed.group import Group
from reagent_lite.errors import counted
from reagent_lite.evaluation.interval import Interval
from reagent_lite.evaluation.returns import estimate, play
from reagent_lite.run.environments import EPOCH, FINAL, Reader
from reagent_lite.run.evaluators import Judgement
from reagent_lite.run.learner import target_policy
from reagent_lite.sim.env import Policy
from reagent_lite.training.checkpoint import Tree


class SimulationJudge:
    """Plays the run's policy of the learner as it stands; every rank plays its part of the episodes.

    Args:
        config: the run's config.
        reader: the environment, and its features to the network's.
        learner: what is judged.
        group: ranks share the episodes.
    """

    def __init__(self, config: WorkflowConfig, reader: Reader, learner: DQN, group: Group) -> None:
        self._config, self._simulation, self._group = config, reader.simulation, group
        self._policy = reader.policy(learner, reader.simulation.backend.device)
        self._target = target_policy(config.rl)
        self._random: Interval | None = None
        self.latest = float("nan")

    def state_dict(self) -> Tree:
        """Returns the last mean return, which may end the run."""
        return {"latest": self.latest}

    def load_state_dict(self, state: Tree) -> None:
        """Goes on from there."""
        self.latest = float(state["latest"])

    def after_epoch(self, *, final: bool) -> dict[str, float]:
        """Returns the policy's return by TensorBoard tag, on the episodes of an epoch; every rank calls it."""
        return self.evaluate(final=False).scalars

    def satisfied(self) -> bool:
        """Whether the last evaluation reached simulation.stop_at_return."""
        enough = self._simulation.config.stop_at_return
        return enough is not None and self.latest >= enough

    def evaluate(self, *, final: bool) -> Judgement:
        """Returns the policy's return with its interval; the same on every rank.

        Args:
            final: on episodes that no earlier evaluation has used, and beside uniformly random actions.
        """
        learned, discounted, length = self._play(self._policy, FINAL if final else EPOCH)
        self.latest = learned.value
        scalars = learned.tags("simulation/return") | {"simulation/length/mean": length.value}
        if not final:
            return Judgement(scalars=scalars, document={}, lines=())
        random, _, _ = self._play(None, FINAL)
        scalars |= random.tags("simulation/random_return") | discounted.tags("simulation/discounted_return")
        level = f"{self._config.evaluation.confidence_level:.0%}"
        name, episodes = self._simulation.backend.spec.name, self._simulation.config.evaluation_episodes
        line = (
            f"simulation: {name}: {self._target}: return {learned} over {counted(episodes, 'episode')}, "
            f"{level} interval; "
            f"uniformly random actions {random}"
        )
        return Judgement(scalars=scalars, document={"episodes": episodes, **scalars}, lines=(line,))

    def _play(self, policy: Policy | None, stream: int) -> tuple[Interval, Interval, Interval]:
        count = self._simulation.config.evaluation_episodes
        first, stop = self._simulation.part(count, self._group)
        table = torch.zeros(3, count, dtype=torch.float64)
        if stop > first:
            env = self._simulation.envs(first, stop, stream=stream)
            result = play(env, policy, gamma=self._config.rl.gamma, epsilon=self._target.epsilon,
                          temperature=self._target.temperature)  # fmt: skip
            for row, values in zip(table, (result.total, result.discounted, result.length), strict=True):
                row[first:stop] = values.cpu()
        settings = self._config.evaluation
        total, discounted, length = (
            estimate(row, level=settings.confidence_level, resamples=settings.bootstrap_resamples,
                     seed=self._config.seed)
            for row in self._group.sum(table)
        )  # fmt: skip
        return total, discounted, length
