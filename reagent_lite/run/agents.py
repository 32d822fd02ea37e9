"""Types of agents in a run's environments: which of them learn, and which policies the others play.

simulation.policies: "learn"   the type has its own learner, replay ring and exported model
                     "random"  uniformly random actions
                     a folder  an exported model, which does not change
"""

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from reagent_lite.config import WorkflowConfig
from reagent_lite.config.simulation import LEARN, RANDOM
from reagent_lite.errors import BundleError, ConfigError, Problem, pluralize, raise_any, suggest_nearest
from reagent_lite.export.bundle import load_bundle
from reagent_lite.export.choices import Choices, compare_with_environment, kind_of_model
from reagent_lite.manifest import FILE_NAME
from reagent_lite.sim.env import ObservationPolicy, VectorEnv
from reagent_lite.sim.experience import ONLY, Actor
from reagent_lite.sim.spec import EnvSpec

_KEY = "simulation.policies"
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
_RESERVED = ("model", "checkpoints", "tensorboard")
"""Names of the run's other folders; a type's model is next to them, in a folder of the type's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentType:
    """A type of agents, which share a policy.

    Attributes:
        name: name of the type; "" if all agents are of one type.
        agents: numbers of its agents in each environment.
        plays: the type's entry of simulation.policies.
        model: policy of the type's exported model, or None.
        digest: sha256 of that model's manifest, or "".
    """

    name: str
    agents: tuple[int, ...]
    plays: str = LEARN
    model: ObservationPolicy | None = None
    digest: str = ""

    @property
    def learns(self) -> bool:
        """Whether the type learns."""
        return self.plays == LEARN

    def rows(self, env: VectorEnv) -> Tensor | None:
        """Returns the indices of this type's rows among those of all agents; None for all rows."""
        if self.name == ONLY:
            return None
        first = torch.arange(env.num_envs, device=env.device) * env.spec.agents
        return (first.unsqueeze(1) + torch.tensor(self.agents, device=env.device)).flatten()

    def fixed_actor(self, env: VectorEnv) -> Actor:
        """Returns the actor of a type that does not learn: its exported model, or uniformly random actions."""
        # at temperature 1, the softmax of the logarithms of probabilities is the probabilities
        epsilon = torch.zeros(1, device=env.device)
        return Actor(policy=self.model, epsilon=epsilon, temperature=1.0, rows=self.rows(env))

    @property
    def played(self) -> str:
        """Description of the type's policy in an evaluation."""
        words = {LEARN: "its learned policy", RANDOM: "uniformly random actions"}
        return f"{self.name} plays {words.get(self.plays, self.plays)}"

    def __str__(self) -> str:
        does = {LEARN: "learns", RANDOM: "plays uniformly random actions"}.get(self.plays, f"plays {self.plays}")
        return f"{self.name} ({pluralize(len(self.agents), 'agent')}) {does}"


def agent_types(config: WorkflowConfig, spec: EnvSpec) -> tuple[AgentType, ...]:
    """Returns the types of agents of an environment in the order of their numbers.

    Raises:
        ConfigError: a policy for an unknown type, a type without agents, no type that learns, or keys that are not
            allowed with several types.
        BundleError: a folder has no model, or a model that has been changed or has other features or actions.
    """
    settings = config.environments
    names = spec.agent_type_names
    if len(names) == 1:
        if settings.policies:
            expected = f"absent, as the agents of {spec.name} are of one type, which learns"
            raise ConfigError(Problem(_KEY, expected, str(dict(settings.policies))))
        return (AgentType(name=ONLY, agents=tuple(range(spec.agents))),)
    raise_any(list(_problems(config, spec)), ConfigError)
    return tuple(
        agent_type(
            name,
            settings.policies.get(name, LEARN),
            spec,
            key=_KEY,
            words=(LEARN, RANDOM),
            parametric=config.parametric,
        )
        for name in names
    )


def _problems(config: WorkflowConfig, spec: EnvSpec) -> Iterator[Problem]:
    """Yields the problems of a config for an environment with several types of agents."""
    settings = config.environments
    names = spec.agent_type_names
    learning = [name for name in names if settings.policies.get(name, LEARN) == LEARN]
    yield from unknown_types(settings.policies, spec, _KEY)
    for number, name in enumerate(names):
        if not spec.agents_of(number):
            expected = f"values that give {spec.name} an agent of each type"
            todo = "The number of agents is computed from them (AGENTS in the environment's file)"
            yield Problem("simulation.env_parameters", expected, f"no {name}", todo)
    if not learning:
        expected = f'"{LEARN}" for at least one of {", ".join(names)}'
        yield Problem(_KEY, expected, str(dict(settings.policies)), "Remove the entry of the type that should learn")
    if config.training_data_path:
        expected = "an environment with one type of agents if there is a training_data_path"
        todo = "Rows of a log do not name a type of agents: remove training_data_path"
        yield Problem("simulation.env", expected, f"{spec.name} with {' and '.join(names)}", todo)
    if settings.stop_at_return is not None and len(learning) > 1:
        got = f"{settings.stop_at_return:g} with {' and '.join(learning)}"
        todo = "Remove it: the return of one type depends on the policies of the others"
        yield Problem("simulation.stop_at_return", "absent if several types of agents learn", got, todo)
    for name in learning:
        if not _NAME.fullmatch(name) or name in _RESERVED:
            others = ", ".join(_RESERVED)
            expected = f"a name of letters, digits, - and _ other than {others}: its model is a folder of that name"
            yield Problem(f"type of agents of {spec.name}", expected, repr(name))


def unknown_types(policies: Mapping[str, str], spec: EnvSpec, key: str) -> list[Problem]:
    """Returns a problem for each policy under a config key whose type of agents the environment does not have."""
    names = spec.agent_type_names
    return [
        Problem(
            f"{key}.{name}",
            f"one of {', '.join(names)}, the types of agents of {spec.name}",
            repr(name),
            suggest_nearest(name, names),
        )
        for name in policies
        if name not in names
    ]


def agent_type(
    name: str, plays: str, spec: EnvSpec, *, key: str, words: tuple[str, ...], parametric: bool
) -> AgentType:
    """Returns a type of agents of an environment.

    Args:
        name: name of the type.
        plays: one of `words`, or the folder of an exported model.
        spec: the environment.
        key: key of the config that has the policies.
        words: words that the config allows instead of a folder.
        parametric: whether candidates have features.

    Raises:
        ConfigError, BundleError: see agent_types.
    """
    agents = spec.agents_of(spec.agent_type_names.index(name))
    if plays in words:
        return AgentType(name=name, agents=agents, plays=plays)
    folder = Path(plays).expanduser()
    where = f"{key}.{name} {folder}"
    if not folder.is_dir():
        quoted = ", ".join(f'"{word}"' for word in words)
        expected = f"{quoted} or the folder of an exported model"
        raise ConfigError(Problem(f"{key}.{name}", expected, repr(plays), suggest_nearest(plays, words)))
    bundle = load_bundle(folder)
    problems = compare_with_environment(bundle, spec, where)
    if bundle.parametric and not parametric:
        problems = [Problem(where, kind_of_model(parametric=False), kind_of_model(parametric=True))]
    raise_any(problems, BundleError)
    digest = hashlib.sha256((folder / FILE_NAME).read_bytes()).hexdigest()
    policy = Choices.in_simulation(bundle, spec).logarithms
    return AgentType(name=name, agents=agents, plays=plays, model=policy, digest=digest)
