"""`simulation`: environments to learn from and to be judged in."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from reagent_lite.config.environment import EnvironmentConfig, Share
from reagent_lite.config.section import Section
from reagent_lite.errors import Problem


class ReplayConfig(Section):
    """Simulated transitions kept for learning."""

    capacity: Annotated[int, Field(ge=1)] = 1_000_000
    """Transitions kept, over all processes; the oldest make room."""
    prioritized: bool = False
    """Draw rows by how wrong they were, with importance weights (Schaul et al., 2016)."""
    alpha: Share = 0.6
    """How much priorities count; 0 draws uniformly."""
    beta: Share = 0.4
    """Exponent of the importance weights at the start; rises to 1 over the run."""


class SimulationConfig(EnvironmentConfig):
    """Environments on the GPU or the CPU: training in them, evaluation in them, or both."""

    num_envs: Annotated[int, Field(ge=1)] = 64
    """Environments side by side, over all processes."""
    share: Share | None = None
    """Share of each minibatch that is simulated, beside training_data_path; 0: only evaluate in simulation."""
    total_steps: Annotated[int, Field(ge=1)] = 500_000
    """Environment steps over all processes, where the simulation alone is trained on."""
    warmup_steps: Annotated[int, Field(ge=1)] = 10_000
    """Environment steps by uniformly random actions before learning starts, over all processes."""
    steps_per_rollout: Annotated[int, Field(ge=1)] = 1
    """Steps of every environment between two rounds of learning."""
    updates_per_rollout: Annotated[int, Field(ge=1)] = 1
    """Optimizer steps after each rollout."""
    exploration: Literal["epsilon_greedy", "softmax"] = "epsilon_greedy"
    """How actions are drawn while learning; softmax uses rl.temperature."""
    epsilon_start: Share = 1.0
    """Share of uniformly random actions when learning starts."""
    epsilon_end: Share | None = None
    """The same at the end of its decay; absent: rl.epsilon."""
    epsilon_decay_steps: Annotated[int, Field(ge=1)] | None = None
    """Environment steps over which epsilon falls linearly; absent: a tenth of all."""
    replay: ReplayConfig = ReplayConfig()
    num_evaluations: Annotated[int, Field(ge=1)] = 10
    """Evaluations spread over a run that only simulates; with data there is one an epoch."""
    evaluation_episodes: Annotated[int, Field(ge=2, le=10_000)] = 100
    """Episodes of the policy in each evaluation."""
    stop_at_return: float | None = None
    """End the run when an evaluation's mean return reaches this."""
    cuda_graph: bool = True
    """Replay rollouts and updates as CUDA graphs where all rows are simulated on one GPU.

    Several processes, data beside the simulation, and optimizers without `capturable` run without graphs.
    """
    pictures: bool = False
    """Write learning_curve.png and rollout.gif beside the model; needs the extra `pictures`."""

    def problems(self, path: str) -> Iterator[Problem]:
        """Yields what single keys cannot say."""
        yield from super().problems(path)
        if self.epsilon_end is not None and self.epsilon_end > self.epsilon_start:
            yield Problem(f"{path}.epsilon_end", f"at most epsilon_start ({self.epsilon_start:g})",
                          f"{self.epsilon_end:g}")  # fmt: skip
        if self.exploration == "softmax":
            for key in sorted({"epsilon_start", "epsilon_end", "epsilon_decay_steps"} & set(self.changed)):
                yield _useless(f"{path}.{key}", getattr(self, key), "exploration is softmax")
        if not self.replay.prioritized:
            for key in sorted({"alpha", "beta"} & set(self.replay.changed)):
                yield _useless(f"{path}.replay.{key}", getattr(self.replay, key), "replay.prioritized is false")

    @property
    def learning_only(self) -> tuple[str, ...]:
        """Keys that say how to learn in simulation and are not at their default."""
        judging = {
            "env", "env_parameters", "time_limit", "backend", "math", "share", "evaluation_episodes", "stop_at_return",
            "pictures",
        }  # fmt: skip
        return tuple(key for key in self.changed if key not in judging)


def _useless(where: str, value: object, reason: str) -> Problem:
    return Problem(where, f"its default while {reason}", repr(value), "It would have no effect")
