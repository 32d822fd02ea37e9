"""`simulation`: environments to learn from and to be evaluated in."""

from collections.abc import Iterator
from typing import ClassVar, Literal

from reagent_lite.config.dataset import DatasetConfig
from reagent_lite.config.environment import EnvironmentConfig
from reagent_lite.config.section import Count, Episodes, NoEffect, Section, Share
from reagent_lite.errors import Problem

ALSO_WITHOUT_LEARNING = (*EnvironmentConfig.model_fields, "share", "evaluation_episodes", "stop_at_return", "pictures")
"""Keys that have an effect where the environment is only played in."""
LEARN = "learn"
RANDOM = "random"


class ReplayConfig(Section):
    """Simulated transitions kept for learning."""

    capacity: Count = 1_000_000
    """Transitions kept, over all processes, of each type of agents that learns; the oldest are overwritten."""
    prioritized: bool = False
    """Draw rows by how wrong they were, with importance weights (Schaul et al., 2016)."""
    alpha: Share = 0.6
    """How much priorities count; 0 draws uniformly."""
    beta: Share = 0.4
    """Exponent of the importance weights at the start; rises to 1 over the run."""


class SimulationConfig(EnvironmentConfig):
    """Environments on the GPU or the CPU: training in them, evaluation in them, or both."""

    mode: Literal["both", "collect", "learn"] = "both"
    """both: this run plays and learns; collect: this process only plays, and writes episodes to `dataset`; learn: this
    run only learns, from the episodes of any number of collectors."""
    dataset: DatasetConfig | None = None
    """The folder between collectors and learners."""
    num_envs: Count = 64
    """Environments side by side, over all processes."""
    auto_scale: bool = False
    """Measure at the start how many environments and which minibatch are fastest on this machine.

    The search begins at num_envs and training.minibatch_size. As many rows are learned for each environment step as
    num_envs, minibatch_size and updates_per_rollout have it, in at least 10,000 optimizer steps, or as many as
    configured.
    """
    share: Share | None = None
    """Share of each minibatch that is simulated, beside training_data_path; 0: only evaluate in simulation."""
    total_steps: Count = 500_000
    """Environment steps over all processes, where the simulation alone is trained on."""
    warmup_steps: Count = 10_000
    """Environment steps by uniformly random actions before learning starts, over all processes."""
    steps_per_rollout: Count = 1
    """Steps of every environment between two rounds of learning."""
    updates_per_rollout: Count = 1
    """Optimizer steps after each rollout."""
    exploration: Literal["epsilon_greedy", "softmax"] = "epsilon_greedy"
    """How actions are drawn while learning; softmax uses rl.temperature."""
    epsilon_start: Share = 1.0
    """Share of uniformly random actions when learning starts."""
    epsilon_end: Share | None = None
    """The same at the end of its decay; absent: rl.epsilon."""
    epsilon_decay_steps: Count | None = None
    """Environment steps over which epsilon falls linearly; absent: a tenth of all."""
    policies: dict[str, str] = {}
    """The policy of each agent type, by the names of the environment's types: "learn", "random" (uniformly random
    actions), or the folder of an exported model, which plays as it is.

    A type that is absent learns. Each type that learns has a policy, a replay and an exported model of its own.
    """
    replay: ReplayConfig = ReplayConfig()
    num_evaluations: Count = 10
    """Evaluations spread over a run that only simulates; with data there is one an epoch."""
    evaluation_episodes: Episodes = 100
    """Episodes of the policy in each evaluation."""
    stop_at_return: float | None = None
    """End the run when an evaluation's mean return reaches this."""
    cuda_graph: bool = True
    """Replay rollouts and evaluations as CUDA graphs where environments run on a GPU, and updates on simulated rows.

    Not replayed are updates of several processes, beside data, of candidates with batch normalization, and by
    optimizers without `capturable`; nor what waits for the GPU, with a warning that names the call. Runs of 50,000
    optimizer steps and more join the kernels of replayed updates by torch.compile, but for a network of one's own.
    """
    pictures: bool = False
    """Write rollout.gif, an episode of the learned policy, beside the model; needs the extra `pictures`."""

    no_effect: ClassVar[tuple[NoEffect, ...]] = (
        *EnvironmentConfig.no_effect,
        NoEffect(
            lambda config: config.mode == "both",
            ("dataset",),
            "absent with mode both",
            "Its folder is between processes that collect or learn",
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
        """Yields contradictions between keys."""
        yield from super().rules()
        if self.mode != "both" and self.dataset is None:
            yield self.wrong("dataset", f"a section with mode {self.mode}", "Name the shared folder in dataset.path")
        if self.epsilon_end is not None and self.epsilon_end > self.epsilon_start:
            yield self.wrong("epsilon_end", f"at most epsilon_start ({self.epsilon_start:g})")

    @property
    def shared(self) -> DatasetConfig:
        """The dataset section, which modes collect and learn have."""
        assert self.dataset is not None
        return self.dataset
