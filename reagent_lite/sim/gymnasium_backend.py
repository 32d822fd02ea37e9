"""Environments of Gymnasium, which step in Python: `"env": "gymnasium:CartPole-v1"`.

`gymnasium:` precedes a name that Gymnasium has registered, or module:name if importing the module registers it. Actions
are Discrete. Observations are images if their space is a Box of bytes from 0 to 255 with height and width; observations
of any other space that Gymnasium flattens are flattened to float32. If the info of `reset`
has an `action_mask` [K], as in Taxi, the mask in the info of every step gives the actions that are allowed next.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from reagent_lite.config.environment import GYMNASIUM
from reagent_lite.config.image_config import ImageConfig, conv_layers_for
from reagent_lite.errors import Problem, SimulationError, needing, raise_any, suggest_nearest
from reagent_lite.sim.calls import ActCall, Call, Kernel
from reagent_lite.sim.compiler import KERNELS
from reagent_lite.sim.cpu import CpuBackend
from reagent_lite.types import Image

if TYPE_CHECKING:
    from gymnasium import Env
    from gymnasium.spaces import Space
    from gymnasium.vector import SyncVectorEnv

MASK = "action_mask"
_WHERE = "simulation.env"
_STEP_VALUES = 5
_OWN = "module:name imports a module that registers an environment of your own, from the working folder or PYTHONPATH"


class GymnasiumBackend:
    """Makes environments of one name; a compiled kernel draws their actions, as in compiled environments.

    Attributes:
        spec: description of the environment; time_limit is 0 if the environment has no limit.
        device: the CPU.
        first_action: number of the environment's first action.
    """

    def __init__(self, env: str, parameters: dict[str, Any], **compilation: Any) -> None:
        """Makes one environment and steps it once.

        Args:
            env: `gymnasium:` and a name.
            parameters: keyword arguments of gymnasium.make.
            compilation: further arguments of CpuBackend, which compiles the kernel that draws actions.

        Raises:
            SimulationError: the environment does not exist, has other spaces, or raises.
            KernelBuildError: there is no compiler.
        """
        self.name = env.removeprefix(GYMNASIUM)
        self._parameters = parameters
        with closing(self._new_env()) as opened:
            from gymnasium import spaces

            self.first_action, count, size = self._read_spaces(opened)
            image = image_of(opened.observation_space)
            with self.name_errors("reset and step"):
                _, info = opened.reset(seed=0)
                allowed = np.asarray(info.get(MASK, np.ones(count)))
                self._require_five_values(opened.unwrapped)
                observation, *_ = opened.step(self.first_action + int(allowed.argmax()))
                stepped_size = np.asarray(spaces.flatten(opened.observation_space, observation)).size
        if stepped_size != size:
            expected = f"{size} numbers, as its observation_space has"
            raise SimulationError(Problem(f"observations of {self.name}", expected, f"{stepped_size} from its step"))
        if image is not None and (got := np.asarray(observation).dtype) != np.uint8:
            expected = "uint8, as its observation_space says"
            raise SimulationError(Problem(f"observations of {self.name}", expected, f"{got} from its step"))
        if allowed.shape != (count,):
            raise SimulationError(Problem(f"{MASK} of {self.name}", f"{count} values", f"shape {list(allowed.shape)}"))
        self._drawing = CpuBackend(
            KERNELS / "core" / "choices.cuh", {"number_of_actions": count}, "exact", threads=1, **compilation
        )
        self.device = self._drawing.device
        self.spec = replace(
            self._drawing.spec,
            name=self.name,
            observation_size=size,
            time_limit=(opened.spec and opened.spec.max_episode_steps) or 0,
            masked=MASK in info,
            action_names=tuple(str(self.first_action + k) for k in range(count)),
            parameters=parameters,
            fields=(),
            image=image,
        )

    def launch(self, kernel: Kernel, call: Call | ActCall) -> None:
        """Draws actions; the only kernel that these environments need."""
        assert kernel == "env_act"
        self._drawing.launch(kernel, call)

    def make(self, num: int, time_limit: int) -> SyncVectorEnv:
        """Returns environments in which the step that ends an episode starts the next one.

        Raises:
            SimulationError: an environment cannot be made; those already made are closed.
        """
        import gymnasium

        class FlatEnv(gymnasium.wrappers.FlattenObservation[Any, Any, Any]):
            """Flat observations, and an info with only the mask: arrays of changing shapes cannot be stacked."""

            def reset(self, **settings: Any) -> tuple[Any, dict[str, Any]]:
                observation, info = super().reset(**settings)
                return observation, _only_mask(info)

            def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
                *results, info = super().step(action)
                return (*results, _only_mask(info))

        def opened_env() -> Env[Any, Any]:
            settings = {**self._parameters, "max_episode_steps": time_limit, "disable_env_checker": True}
            return opened.enter_context(closing(FlatEnv(gymnasium.make(self.name, **settings))))

        with self.name_errors("environments"), ExitStack() as opened:
            same_step = gymnasium.vector.AutoresetMode.SAME_STEP
            envs = gymnasium.vector.SyncVectorEnv([opened_env] * num, autoreset_mode=same_step)
            opened.pop_all()  # leaves them open
            return envs

    @contextmanager
    def name_errors(self, what: str) -> Iterator[None]:
        """Turns an error in the environment's code into a SimulationError with the environment's name and location."""
        try:
            yield
        except SimulationError:
            raise
        except Exception as error:
            raise SimulationError(Problem(f"{what} of {self.name}", "no exception", _last_line(error))) from error

    def _require_five_values(self, env: Env[Any, Any]) -> None:
        """Makes the next step of an environment raise SimulationError if it returns other than five values."""
        step = env.step

        def check_action(action: Any) -> Any:
            values = step(action)
            if len(values) != _STEP_VALUES:
                expected = "observation, reward, terminated, truncated and info"
                todo = "That of old gym has a single flag, done: return terminated and truncated in its place"
                raise SimulationError(Problem(f"step of {self.name}", expected, f"{len(values)} values", todo))
            return values

        env.step = check_action  # type: ignore[method-assign]

    def _new_env(self) -> Env[Any, Any]:
        with needing("gymnasium", _WHERE, error=SimulationError):
            import gymnasium
        try:
            return gymnasium.make(self.name, **self._parameters)
        except Exception as error:
            where = f"{_WHERE} with env_parameters" if self._parameters else _WHERE
            is_known = self.name.rpartition(":")[2] in gymnasium.registry
            elsewhere = (ModuleNotFoundError, gymnasium.error.NamespaceNotFound)
            names = () if isinstance(error, elsewhere) else tuple(gymnasium.registry)
            todo = "" if is_known else suggest_nearest(self.name, names, otherwise=_OWN)
            got = f"{self.name!r}: {_last_line(error)}"
            raise SimulationError(Problem(where, "an environment that gymnasium.make makes", got, todo)) from error

    def _read_spaces(self, env: Env[Any, Any]) -> tuple[int, int, int]:
        """Returns the first action's number, the number of actions and the size of an observation.

        Raises:
            SimulationError: a space is not supported.
        """
        from gymnasium.spaces import Box, Discrete, flatdim

        actions = env.action_space
        observations = env.observation_space
        problems = []
        if not isinstance(actions, Discrete):
            wrapper = "DiscretizeAction" if isinstance(actions, Box) else "TransformAction"
            todo = f"Register it wrapped in gymnasium.wrappers.{wrapper}"
            problems.append(Problem(f"actions of {self.name}", "a Discrete space", str(actions), todo))
        if not observations.is_np_flattenable:
            todo = "Wrap it in a gymnasium.ObservationWrapper that returns a Box"
            expected = "a Box, or a space that gymnasium.spaces.flatten turns into a Box"
            problems.append(Problem(f"observations of {self.name}", expected, str(observations), todo))
        raise_any(problems, SimulationError)
        assert isinstance(actions, Discrete)
        return int(actions.start), int(actions.n), flatdim(observations)


def image_of(space: Space[Any]) -> Image | None:
    """Returns the image that an observation of a space is: bytes from 0 to 255 with height and width; or None."""
    from gymnasium.spaces import Box

    if not isinstance(space, Box) or space.dtype != np.uint8 or not 2 <= len(space.shape) <= 4:
        return None
    image = ImageConfig(shape=space.shape).image
    covers_all_bytes = (space.low == 0).all() and (space.high == 255).all()
    return image if covers_all_bytes and conv_layers_for(image, None) else None


def _only_mask(info: dict[str, Any]) -> dict[str, Any]:
    return {MASK: info[MASK]} if MASK in info else {}


def _last_line(error: Exception) -> str:
    """Returns an exception's message, and where it was raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{traceback.format_exception_only(error)[-1].strip()} ({frame.filename}:{frame.lineno})"
