"""`simulation`: environments for learning and evaluation."""

from collections.abc import Iterator
from typing import ClassVar, Literal

from reagent_lite.config.dataset import DatasetConfig
from reagent_lite.config.environment import EnvironmentConfig
from reagent_lite.config.section import Count, Episodes, NoEffect, Section, Share
from reagent_lite.errors import Problem

ALSO_WITHOUT_LEARNING = (*EnvironmentConfig.model_fields, "share", "evaluation_episodes", "stop_at_return", "pictures")
"""Keys that also have an effect if the environment is only used for evaluation."""
LEARN = "learn"
RANDOM = "random"


class ReplayConfig(Section):
    """Replay of simulated transitions."""

    capacity: Count = 1_000_000
    """Number of transitions of each learning agent type, over all processes; new ones overwrite the oldest."""
    prioritized: bool = False
    """Sample rows by TD error, with importance weights (Schaul et al., 2016)."""
    alpha: Share = 0.6
    """Exponent of the priorities; 0 samples uniformly."""
    beta: Share = 0.4
    """Exponent of the importance weights at the start; rises to 1 over the run."""


class SimulationConfig(EnvironmentConfig):
    """Environments on the GPU or the CPU, for training, evaluation or both."""

    mode: Literal["both", "collect", "learn"] = "both"
    """both: this run plays and learns; collect: this process only plays, and writes episodes to `dataset`; learn: this
    run only learns, from the episodes of any number of collectors."""
    dataset: DatasetConfig | None = None
    """The folder between collectors and learners."""
    num_envs: Count = 64
    """Number of environments side by side, over all processes."""
    auto_scale: bool = False
    """Measure at the start which number of environments and which minibatch are fastest on this machine.

    The search begins at num_envs and training.minibatch_size. It keeps the number of rows learned per environment step
    that num_envs, minibatch_size and updates_per_rollout give, in at least 10,000 optimizer steps, or in as many as
    configured.
    """
    share: Share | None = None
    """Share of simulated rows in each minibatch with training_data_path; 0: only evaluate in simulation."""
    total_steps: Count = 500_000
    """Environment steps over all processes of a run without training_data_path."""
    warmup_steps: Count = 10_000
    """Environment steps by uniformly random actions before learning starts, over all processes."""
    steps_per_rollout: Count = 1
    """Steps of every environment between two rounds of learning."""
    updates_per_rollout: Count = 1
    """Optimizer steps after each rollout."""
    exploration: Literal["epsilon_greedy", "softmax"] = "epsilon_greedy"
    """Exploration while learning; softmax uses rl.temperature."""
    epsilon_start: Share = 1.0
    """Share of uniformly random actions when learning starts."""
    epsilon_end: Share | None = None
    """The share at the end of the decay; absent: rl.epsilon."""
    epsilon_decay_steps: Count | None = None
    """Environment steps over which epsilon falls linearly; absent: a tenth of all steps."""
    policies: dict[str, str] = {}
    """The policy of each agent type, by the names of the environment's types: "learn", "random" (uniformly random
    actions), or the folder of an exported model, whose own policy plays.

    An absent type learns. Each learning type has its own policy, replay and exported model.
    """
    replay: ReplayConfig = ReplayConfig()
    num_evaluations: Count = 10
    """Number of evaluations of a run that only simulates; with data there is one per epoch."""
    evaluation_episodes: Episodes = 100
    """Episodes of the policy in each evaluation."""
    stop_at_return: float | None = None
    """End the run once the mean return of an evaluation reaches this value."""
    pictures: bool = False
    """Write rollout.gif, an episode of the learned policy, next to the model; needs the extra `pictures`."""

    no_effect: ClassVar[tuple[NoEffect, ...]] = (
        *EnvironmentConfig.no_effect,
        NoEffect(
            lambda config: config.mode == "both",
            ("dataset",),
            "absent with mode both",
            "It is only used between processes that collect or learn",
        ),
        NoEffect(
            lambda config: config.mode != "both",
            ("auto_scale",),
            "false with mode {0.mode}",
            "It measures playing and learning in one process",
        ),
        NoEffect(
            lambda config: config.in_python,
            ("auto_scale",),
            "false with {0.env}",
            "Its steps per second hardly depend on num_envs",
        ),
        NoEffect(
            lambda config: config.exploration == "softmax",
            ("epsilon_start", "epsilon_end", "epsilon_decay_steps"),
            "its default while exploration is softmax",
        ),
        NoEffect(
            lambda config: not config.replay.prioritized,
            ("replay.alpha", "replay.beta"),
            "its default while replay.prioritized is false",
        ),
    )

    def rules(self) -> Iterator[Problem]:
        """Yields a Problem for each contradiction between keys."""
        yield from super().rules()
        if self.mode != "both" and self.dataset is None:
            yield self.wrong("dataset", f"a section with mode {self.mode}", "Name the shared folder in dataset.path")
        if self.epsilon_end is not None and self.epsilon_end > self.epsilon_start:
            yield self.wrong("epsilon_end", f"at most epsilon_start ({self.epsilon_start:g})")

    @property
    def shared(self) -> DatasetConfig:
        """The dataset section of modes collect and learn."""
        assert self.dataset is not None
        return self.dataset
