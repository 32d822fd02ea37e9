"""Opens environments with the buffers of a VectorEnv, stepped by kernels or by Gymnasium in Python."""

import weakref
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reagent_lite.errors import Problem, SimulationError
from reagent_lite.sim.backend import Backend
from reagent_lite.sim.env import VectorEnv
from reagent_lite.sim.gymnasium_backend import MASK, GymnasiumBackend


def open_envs(backend: Backend, **settings: Any) -> VectorEnv:
    """Returns the environments of a backend; see VectorEnv for arguments and errors."""
    return (GymnasiumEnv if isinstance(backend, GymnasiumBackend) else VectorEnv)(backend, **settings)


class GymnasiumEnv(VectorEnv):
    """N environments of Gymnasium, stepped one after the other.

    The first episode of an environment is seeded by (seed, stream, global id, episode); later ones continue with its
    random numbers. The state that Python holds cannot be saved: `load_state_dict` starts new episodes everywhere.
    """

    restarts = True

    def __init__(self, backend: Backend, *, time_limit: int | None = None, **settings: Any) -> None:
        """Allocates the buffers and makes the environments; see VectorEnv for arguments and errors."""
        assert isinstance(backend, GymnasiumBackend)
        if not (time_limit or backend.spec.time_limit):
            expected = f"a number, as {backend.name} registers no max_episode_steps"
            raise SimulationError(Problem("simulation.time_limit", expected, "none"))
        super().__init__(backend, time_limit=time_limit, **settings)
        self._gymnasium = backend
        self._envs = backend.make(self.num_envs, self.time_limit)
        self._dtype = self.observation.numpy().dtype
        weakref.finalize(self, self._envs.close)

    def step(self, *, stay: bool = False) -> None:
        """Takes `action`; if an episode ends, the next one starts in the same step, even with `stay`.

        Raises:
            SimulationError: an environment raises, or gives no mask although its first reset did.
        """
        action = self.action.numpy().astype(np.int64) + self._gymnasium.first_action
        with self._gymnasium.name_errors("step"):
            observation, reward, terminated, truncated, info = self._envs.step(action)
        ended = terminated | truncated
        self._write_observation(observation, info)
        self.next_observation.copy_(self.observation)
        if self.mask is not None and self.next_mask is not None:
            self.next_mask.copy_(self.mask)
        if ended.any():
            envs = torch.from_numpy(ended.nonzero()[0])
            final = np.stack(info["final_obs"][ended]).astype(self._dtype)
            self._require_numbers(final, envs.numpy())
            self.next_observation[envs] = torch.from_numpy(final)
            if self.next_mask is not None:
                self.next_mask[envs] = self._masks(info["final_info"], ended)
        self._write_rewards(reward, terminated, ended)

    def advance(self, *, observe: bool = True) -> None:
        """Takes `action` as `step` does."""
        self.step()

    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        """Continues from a `state_dict` with a new episode in every environment.

        Raises:
            SimulationError: the state is from other environments.
        """
        super().load_state_dict(tensors)
        self.episode += 1
        self._begin()

    def _begin(self) -> None:
        call = self._call
        keys = [(call.seed, call.stream, self.first_env + i, int(k)) for i, k in enumerate(self.episode)]
        seeds: list[int | None] = [int(np.random.SeedSequence(key).generate_state(1)[0]) for key in keys]
        with self._gymnasium.name_errors("reset"):
            observation, info = self._envs.reset(seed=seeds)
        self.step_count.zero_()
        self.episode_return.zero_()
        self._write_observation(observation, info)

    def _write_observation(self, observation: NDArray[Any], info: dict[str, Any]) -> None:
        self.observation.copy_(torch.from_numpy(observation.astype(self._dtype, copy=False)))
        self._require_numbers(observation, np.arange(self.num_envs))
        if self.mask is not None:
            self.mask.copy_(self._masks(info, np.ones(self.num_envs, np.bool_)))

    def _require_numbers(self, observations: NDArray[Any], envs: NDArray[np.int64]) -> None:
        """Raises SimulationError if observations of some environments are not finite; names the step."""
        wrong = ~np.isfinite(observations) if observations.dtype.kind == "f" else np.zeros((1, 1), np.bool_)
        if wrong.any():
            row = int(wrong.any(axis=1).argmax())
            env = int(envs[row])
            where = f"environment {self.first_env + env}, at step {int(self.step_count[env]) + 1} of an episode"
            got = f"{observations[row][wrong[row]][0]} in {where}"
            raise SimulationError(Problem(f"observations of {self.spec.name}", "finite numbers", got))

    def _masks(self, info: dict[str, Any], rows: NDArray[np.bool_]) -> Tensor:
        """Returns the masks that the info has for some environments.

        Raises:
            SimulationError: it lacks the mask of one of them.
        """
        if MASK not in info or not info[f"_{MASK}"][rows].all():
            where = f"info of {self.spec.name}"
            todo = "Give it in every reset and step, or in none"
            raise SimulationError(Problem(where, f"{MASK}, as in the first reset", "none", todo))
        return torch.from_numpy(info[MASK][rows].astype(np.bool_))

    def _write_rewards(
        self, reward: NDArray[np.float64], terminated: NDArray[np.bool_], ended: NDArray[np.bool_]
    ) -> None:
        """Writes rewards, ends and the statistics of episodes."""
        over = torch.from_numpy(ended)
        self.reward.copy_(torch.from_numpy(reward))
        self.ended.copy_(torch.from_numpy(np.where(terminated, 1, 2 * ended)))
        self.episode_return += self.reward
        self.step_count += 1
        torch.where(over, self.episode_return, self.last_return, out=self.last_return)
        torch.where(over, self.step_count, self.last_length, out=self.last_length)
        self.episode += over
        self.episode_return[over] = 0
        self.step_count[over] = 0
