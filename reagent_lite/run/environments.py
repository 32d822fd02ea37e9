"""Opens the environments of a run, and converts their observations to the network's input.

The first process of a machine compiles an environment; the others find the result in the cache.
"""

import os
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from reagent_lite.algorithms.learners import Learner, learners_of
from reagent_lite.algorithms.policy_learner import PolicyLearner
from reagent_lite.config import WorkflowConfig
from reagent_lite.config.image_config import ImageConfig
from reagent_lite.config.simulation import SimulationConfig
from reagent_lite.console import logger
from reagent_lite.data.features.normalization_files import check_covers
from reagent_lite.data.sampling.normalized import Reordered
from reagent_lite.distributed.group import Group
from reagent_lite.errors import ConfigError, Problem, pluralize, raise_any
from reagent_lite.models.preprocessor import Preprocessor
from reagent_lite.run.agents import AgentType, agent_types
from reagent_lite.run.normalization import Normalization, given_normalizations, normalization_files
from reagent_lite.sim.backend import Backend, open_backend
from reagent_lite.sim.env import ObservationPolicy, VectorEnv
from reagent_lite.sim.experience import Actor
from reagent_lite.sim.gymnasium_env import open_envs
from reagent_lite.sim.kernel_sources import identity
from reagent_lite.types import Actions, FeatureSpec, FeatureType, NormalizationSpec, TransitionBatch

# separate streams of random numbers, so that no episode is both trained on and evaluated
TRAINING, EPOCH, FINAL, PICTURE, SAMPLE = range(5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """An environment compiled for this process.

    Attributes:
        config: the run's simulation section.
        backend: runs the kernels of the environment.
        parametric: whether choices have features.
        seed: seed of all random numbers.
        types: types of agents, in the order of their numbers.
    """

    config: SimulationConfig
    backend: Backend
    parametric: bool
    seed: int
    types: tuple[AgentType, ...]

    @property
    def learning(self) -> tuple[str, ...]:
        """Names of the types of agents that learn."""
        return tuple(agent_type.name for agent_type in self.types if agent_type.learns)

    def envs(self, first: int, stop: int, *, stream: int) -> VectorEnv:
        """Returns the environments with numbers `first` to `stop` - 1 over all ranks."""
        return open_envs(
            self.backend,
            num_envs=stop - first,
            first_env=first,
            seed=self.seed,
            stream=stream,
            time_limit=self.config.time_limit,
            parametric=self.parametric,
        )

    def identity(self) -> str:
        """Returns the sha256 of the environment's sources and constants, and of the exported models that play."""
        return identity(self.config, *(agent_type.digest for agent_type in self.types if agent_type.digest))


def part_of(count: int, group: Group) -> tuple[int, int]:
    """Returns [first, stop) of this rank's part of `count`."""
    return count * group.rank // group.world_size, count * (group.rank + 1) // group.world_size


def open_simulation(config: WorkflowConfig, group: Group) -> Simulation:
    """Returns the config's environment on this process's device.

    Raises:
        SimulationError, KernelBuildError: see `compile_environment`.
        ConfigError: fewer environments than processes, an environment of the other workflow, or types of agents that
            the config does not fit; see agents.agent_types.
        BundleError: an exported model of simulation.policies does not fit.
    """
    settings = config.environments
    parametric = config.parametric
    if config.simulated_share and settings.num_envs < group.world_size:
        raise ConfigError(
            Problem(
                "simulation.num_envs",
                f"at least one for each of {pluralize(group.world_size, 'process')}",
                str(settings.num_envs),
            )
        )

    backend = compile_environment(settings, group)
    spec = backend.spec
    if spec.candidates and not parametric:
        raise ConfigError(
            Problem(
                "simulation.env",
                "an environment with fixed actions",
                f"{spec.name}, whose candidates differ from step to step",
                "Use workflows.parametric_dqn",
            )
        )
    logger.info(
        f"simulation: {spec.name}, {pluralize(settings.num_envs, 'environment')} on {backend.device.type}, "
        f"{spec.observation_in_words}, {pluralize(spec.num_actions, 'choice')}"
    )
    if group.device.type == "cuda":
        if settings.math == "fast":
            logger.info("matrix products of networks use TF32, as simulation.math is fast")
        torch.set_float32_matmul_precision("high" if settings.math == "fast" else "highest")
    types = agent_types(config, spec)
    if len(types) > 1:
        logger.info(f"policies: {', '.join(map(str, types))}")
    return Simulation(config=settings, backend=backend, parametric=parametric, seed=config.seed, types=types)


def compile_environment(settings: SimulationConfig, group: Group) -> Backend:
    """Returns the environment, which the first process of each machine compiles while the others wait.

    Raises:
        SimulationError: unknown environment or parameter, or a Gymnasium environment that raises an error.
        KernelBuildError: it does not compile, or there is no compiler.
    """
    if "OMP_NUM_THREADS" not in os.environ:  # environments take as many threads as torch has when they are opened
        torch.set_num_threads(group.cores)

    def open_here() -> Backend:
        return open_backend(settings, group.device)

    backend = open_here() if group.is_first_on_node else None
    group.barrier()
    return backend or open_here()


def with_image(config: WorkflowConfig, simulation: Simulation) -> WorkflowConfig:
    """Returns the config with data.image of an environment whose observations are images.

    Raises:
        ConfigError: data.image is that of other images, or the config cannot learn from images.
    """
    image = simulation.backend.spec.image
    given = config.data.image
    name = simulation.backend.spec.name
    if given is not None and (image is None or given.image.shape != image.shape):
        expected = f"absent, as observations of {name} are numbers" if image is None else f"{list(image.shape)}"
        todo = "" if image is None else f"That is the shape of observations of {name}"
        raise ConfigError(Problem("data.image.shape", expected, str(list(given.shape)), todo))
    if image is None and config.training.conv_layers is not None:
        todo = "Convolutions read images, Box spaces of bytes from 0 to 255 with height and width"
        raise ConfigError(
            Problem("training.conv_layers", "absent", f"given, and observations of {name} are numbers", todo)
        )
    if given is not None or image is None:
        return config
    section = config.data.model_copy(update={"image": ImageConfig.of(image)})
    config = config.model_copy(update={"data": section})
    raise_any(list(config.image_rules(f"observations of {name}, which are images")), ConfigError)
    return config


def with_actions(config: WorkflowConfig, simulation: Simulation) -> WorkflowConfig:
    """Returns the config with the environment's action names if it has none.

    Raises:
        ConfigError: the number of actions differs from that of the environment.
    """
    names = simulation.backend.spec.action_names
    if simulation.parametric:
        return config
    if not config.actions:
        unknown = sorted(set(config.rl.reward_boost or {}) - set(names))
        raise_any([Problem(f"rl.reward_boost.{name}", f"one of {list(names)}", name) for name in unknown], ConfigError)
        return config.model_copy(update={"actions": names})
    if config.actions != names and set(config.actions) == set(names):
        raise ConfigError(
            Problem(
                "actions",
                f"{list(names)}, the order of {simulation.backend.spec.name}",
                str(list(config.actions)),
                "In another order a name would stand for another action",
            )
        )
    if len(config.actions) != len(names):
        raise ConfigError(
            Problem(
                "actions",
                f"{pluralize(len(names), 'name')}, for {', '.join(names)} of {simulation.backend.spec.name}",
                str(list(config.actions)),
            )
        )
    return config


def given_or_unchanged(config: WorkflowConfig, simulation: Simulation) -> Normalization:
    """Returns the normalization of a run without data: that of the given files, or none."""
    spec = simulation.backend.spec
    given = given_normalizations(config, normalization_files(config))
    kind = FeatureType.DO_NOT_PREPROCESS

    def keep_values(size: int) -> NormalizationSpec:
        return NormalizationSpec.from_features({i: FeatureSpec(feature_id=i, feature_type=kind) for i in range(size)})

    state, action = (given.get(name) for name in ("state", "action"))
    if simulation.parametric:
        action = action or keep_values(spec.action_feature_size)
    return Normalization(state=state or keep_values(spec.observation_size), action=action)


def check_features(simulation: Simulation, normalization: Normalization) -> None:
    """Checks that a normalization has the features of the environment and no others.

    Raises:
        ConfigError, DataError: features are missing or unknown; the error names them.
    """
    spec = simulation.backend.spec
    sizes = {"state": spec.observation_size, "action": spec.action_feature_size}
    for side, columns in normalization.sides.items():
        size = sizes[side]
        check_covers(columns, range(size), where=f"normalization of {side} features, for simulation.env {spec.name}")
        others = sorted(set(columns.feature_ids) - set(range(size)))
        if others:
            raise ConfigError(
                Problem(
                    "simulation.env",
                    f"an environment with the {side} features of the data",
                    f"{spec.name}, which has 0 to {size - 1} but not {others[:10]}",
                )
            )


class ObservationEncoder:
    """Converts observations of environments to the network's input.

    Args:
        config: the run's config.
        simulation: the environment.
        normalization: normalization of its features.
        device: device of the network.

    Attributes:
        config, simulation, normalization: as given.

    Raises:
        ConfigError, DataError: the normalization lacks features of the environment, or has others.
    """

    def __init__(
        self, config: WorkflowConfig, simulation: Simulation, normalization: Normalization, device: torch.device
    ) -> None:
        check_features(simulation, normalization)
        self.config = config
        self.simulation = simulation
        self.normalization = normalization
        spec = simulation.backend.spec
        missing_as_zero = config.rl.set_missing_value_to_zero

        def transform(columns: NormalizationSpec, size: int) -> nn.Module | None:
            ids = tuple(range(size))
            kinds = {feature.feature_type for feature in columns.features}
            if columns.image is not None:
                return None
            if columns.feature_ids == ids and kinds == {FeatureType.DO_NOT_PREPROCESS}:
                return None
            return Reordered(ids, columns, Preprocessor(columns, missing_as_zero=missing_as_zero)).to(device)

        self._state = transform(normalization.state, spec.observation_size)
        self._action = (
            None if normalization.action is None else transform(normalization.action, spec.action_feature_size)
        )
        self._num_actions = spec.num_actions
        self._device = device

    def state(self, raw: Tensor) -> Tensor:
        """Returns [N, W] for observations [N, S]."""
        raw = raw.to(self._device)
        return raw if self._state is None else self._state(raw, torch.ones_like(raw, dtype=torch.bool))

    def features(self, raw: Tensor | None) -> Tensor | None:
        """Returns [N, K, W] for features of choices [N, K, F]."""
        if raw is None:
            return None
        raw = raw.to(self._device)
        if self._action is None:
            return raw
        flat = raw.flatten(0, 1)
        return self._action(flat, torch.ones_like(flat, dtype=torch.bool)).view(*raw.shape[:2], -1)  # type: ignore[no-any-return]

    def actions(self, choices: Actions) -> Actions:
        """Returns the choices with features as the network reads them."""
        return replace(choices, features=self.features(choices.features))

    @torch.no_grad()
    def batch(self, raw: TransitionBatch, scale: float) -> TransitionBatch:
        """Returns a batch for the learner, its weights multiplied by `scale`."""
        return replace(
            raw,
            state=self.state(raw.state),
            next_state=self.state(raw.next_state),
            actions=self.actions(raw.actions),
            next_actions=self.actions(raw.next_actions),
            weight=raw.weight * scale,
        )

    def actors(
        self, env: VectorEnv, learner: Learner, *, epsilon: Tensor, temperature: float, random: str | None = None
    ) -> dict[str, Actor]:
        """Returns an actor for each type of agents, by its name: its learned policy, or that of the config.

        Args:
            env: the environments.
            learner: learner whose values the policies use.
            epsilon: [1] share of uniform draws of the types that learn.
            temperature: temperature of these types; 0 for the largest value.
            random: a type that plays uniformly random actions instead, or None.
        """
        learners = learners_of(learner)
        actors = {}
        for agent_type in self.simulation.types:
            if agent_type.learns:
                policy = None if agent_type.name == random else self.policy(learners[agent_type.name], env.device)
                actors[agent_type.name] = Actor(
                    policy=policy, epsilon=epsilon, temperature=temperature, rows=agent_type.rows(env)
                )
            else:
                actors[agent_type.name] = agent_type.fixed_actor(env)
        return actors

    def policy(self, learner: PolicyLearner, env_device: torch.device) -> ObservationPolicy:
        """Returns a function from observations to the learner's scores, both on the environments' device.

        A choice that the learner's restriction excludes has the score -inf.
        """
        scorer = learner.scorer
        restriction = learner.restriction
        all_allowed = torch.ones(1, 1, dtype=torch.bool, device=self._device)

        @torch.no_grad()
        def values(observation: Tensor, mask: Tensor | None, features: Tensor | None) -> Tensor:
            was_training = learner.training
            learner.eval()
            allowed = all_allowed.expand(len(observation), self._num_actions) if mask is None else mask.to(self._device)
            state = self.state(observation)
            encoded = self.features(features)
            choosable = restriction(state, allowed, encoded)
            q: Tensor = scorer(state, allowed, encoded).masked_fill(~choosable, -torch.inf).to(env_device)
            learner.train(was_training)
            return q

        return values
