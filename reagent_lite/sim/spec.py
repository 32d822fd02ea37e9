"""The description of a compiled environment."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import torch
from torch import Tensor

from reagent_lite.errors import Problem, SimulationError, pluralize, raise_any
from reagent_lite.types import Image

_TYPE_NAME = re.compile(r"\w[\w .-]*")  # names folders of a run as well


@dataclass(frozen=True, slots=True)
class Field:
    """A variable of an environment's state.

    Attributes:
        name: as in the kernel's STATE list.
        kind: type of its 4-byte words.
        size: number of words; above 1 for an array.
    """

    name: str
    kind: Literal["float", "int", "unsigned"]
    size: int

    @property
    def dtype(self) -> torch.dtype:
        """The torch type of the words; unsigned words are read as signed."""
        return torch.float32 if self.kind == "float" else torch.int32


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvSpec:
    """Shapes and names of an environment.

    Attributes:
        name: the name of the environment, the stem of its file.
        num_actions: K, or the largest number of candidates of a step.
        observation_size: S.
        time_limit: steps until truncation unless the config sets a limit; 0 if the config has to set it.
        action_feature_size: F, number of features of a choice for parametric learning.
        agents: A, number of agents of an environment, which act at the same time.
        threads_per_env: number of GPU threads of an environment; if more than 1, with many agents, they form a block.
        candidates: whether choices and their features differ from step to step.
        masked: whether fixed actions may be forbidden in some states.
        action_bytes: width of an action id, 1 or 4.
        action_names: names of fixed actions, in order.
        agent_type_names: names of the types of agents, in order of their numbers.
        agent_types: [A] number of each agent's type.
        parameters: constants of the dynamics in use, lists as name[0], name[1] and so on; for Gymnasium, the
            arguments of gymnasium.make.
        parameter_lists: sizes of the constants that are lists, by name.
        fields: the state's variables in memory order.
        feature_bytes: [K, F] float32, features of fixed actions in the kernel; empty if they are one-hot, and with
            candidates.
        image: the image that an observation is, in S bytes; None if it has S numbers.
    """

    name: str
    num_actions: int
    observation_size: int
    time_limit: int
    action_feature_size: int
    agents: int
    threads_per_env: int
    candidates: bool
    masked: bool
    action_bytes: int
    action_names: tuple[str, ...]
    agent_type_names: tuple[str, ...]
    agent_types: tuple[int, ...]
    parameters: dict[str, Any]
    parameter_lists: dict[str, int]
    fields: tuple[Field, ...]
    feature_bytes: bytes
    image: Image | None = None

    @classmethod
    def parse(cls, name: str, description: str) -> Self:
        """Returns the spec in a compiled environment's JSON; `measured` adds the numbers that the kernel computes."""
        tree: dict[str, Any] = json.loads(description, strict=False)  # a name may have a line break
        fields = tuple(Field(*field) for field in tree.pop("state"))
        tree["action_names"] = tuple(tree["action_names"]) or tuple(map(str, range(tree["num_actions"])))
        tree["agent_type_names"] = tuple(tree["agent_type_names"])
        elements = [f"{name}[{k}]" for name, size in tree["parameter_lists"].items() for k in range(size)]
        tree["parameters"] = dict.fromkeys(tree["parameters"] + elements, 0.0)
        return cls(name=name, fields=fields, agent_types=(), feature_bytes=b"", **tree)

    @property
    def action_features(self) -> Tensor:
        """[K, F] float32, features of fixed actions."""
        if not self.feature_bytes:
            return torch.eye(self.num_actions, self.action_feature_size)
        return torch.frombuffer(bytearray(self.feature_bytes), dtype=torch.float32).view(self.num_actions, -1)

    def with_measurements(
        self, parameters: list[float], action_features: Tensor, agent_types: list[int], observed: int
    ) -> Self:
        """Returns the spec with the numbers that the kernel computed.

        Args:
            parameters: constants of the dynamics in use, in order.
            action_features: [K, F] float32, features of fixed actions.
            agent_types: [A], number of each agent's type.
            observed: number of floats that the environment wrote as an observation.

        Raises:
            SimulationError: names of actions or types are not unique, an agent's type has no name, or an observation
                has another size.
        """
        raise_any(list(self._problems(agent_types, observed)), SimulationError)
        named = dict(zip(self.parameters, parameters, strict=True))
        spec = replace(self, parameters=named, agent_types=tuple(agent_types))
        if self.candidates or torch.equal(action_features, spec.action_features):
            return spec
        return replace(spec, feature_bytes=action_features.numpy().tobytes())

    def _problems(self, agent_types: list[int], observed: int) -> Iterator[Problem]:
        for what, names in (("ACTION_NAMES", self.action_names), ("AGENT_TYPES", self.agent_type_names)):
            if len(set(names)) < len(names) or not all(names):
                yield Problem(f"{what} of {self.name}", "a unique name for each", ", ".join(map(repr, names)))
        if not all(map(_TYPE_NAME.fullmatch, self.agent_type_names)):
            expected = "names of letters, digits, spaces, '.', '-' and '_'"
            yield Problem(f"AGENT_TYPES of {self.name}", expected, ", ".join(map(repr, self.agent_type_names)))
        kinds = range(len(self.agent_type_names))
        for agent, kind in enumerate(agent_types):
            if kind not in kinds:
                expected = f"a type from 0 to {len(kinds) - 1} ({', '.join(self.agent_type_names)})"
                yield Problem(f"agent_type({agent}) of {self.name}", expected, str(kind))
        if observed != self.observation_size:
            expected = f"all {self.observation_size} floats of OBSERVATION_SIZE written, and no more"
            got = f"the first {observed}"
            yield Problem(f"observe() of {self.name}", expected, got, "Correct observe() or OBSERVATION_SIZE")

    def agents_of(self, kind: int) -> tuple[int, ...]:
        """Returns the numbers of the agents of a type."""
        return tuple(agent for agent, agent_kind in enumerate(self.agent_types) if agent_kind == kind)

    @property
    def state_words(self) -> int:
        """Number of 4-byte words of one environment's state."""
        return sum(field.size for field in self.fields)

    @property
    def step_bytes(self) -> int:
        """Bytes that a step of one environment reads and writes, without observations, masks and features."""
        state = 8 * self.state_words
        episode = 4
        step_count = 8
        ended = 1
        action = self.action_bytes
        reward = 4
        episode_return = 8
        return state + episode + step_count + ended + self.agents * (action + reward + episode_return)

    @property
    def observation_in_words(self) -> str:
        """What an observation is."""
        if self.image is None:
            return pluralize(self.observation_size, "feature")
        return f"images of {' x '.join(map(str, self.image.shape))} bytes"

    @property
    def observation_dtype(self) -> torch.dtype:
        """The torch type of observations."""
        return torch.float32 if self.image is None else torch.uint8

    @property
    def action_dtype(self) -> torch.dtype:
        """The torch type of action ids."""
        return torch.uint8 if self.action_bytes == 1 else torch.int32

    @property
    def has_mask(self) -> bool:
        """Whether some choices may be forbidden at some steps."""
        return self.candidates or self.masked
