"""Tag on a grid and on a square, written from their rules in NumPy, a game at a time: the truth for the kernels.

Source: the rules of WarpDrive's tag_gridworld and tag_continuous (Lan et al., 2021). Numbers are float32, as there.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
F = np.float32
MOVES = np.array(((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1)))
GRIDWORLD = {
    "num_taggers": 10, "grid_length": 10, "episode_length": 100, "wall_hit_penalty": 0.1, "tag_reward_for_tagger": 10.0,
    "tag_penalty_for_runner": 2.0, "step_cost_for_tagger": 0.01, "use_full_observation": True,
}  # fmt: skip
CONTINUOUS = {
    "num_taggers": 1, "num_runners": 10, "grid_length": 10.0, "episode_length": 100, "max_speed": 1.0,
    "skill_level_runner": 1.0, "skill_level_tagger": 1.0, "max_acceleration": 1.0, "min_acceleration": -1.0,
    "max_turn": np.pi / 2, "min_turn": -np.pi / 2, "num_acceleration_levels": 10, "num_turn_levels": 10,
    "edge_hit_penalty": 0.0, "use_full_observation": True, "num_other_agents_observed": 2, "tagging_distance": 0.01,
    "tag_reward_for_tagger": 1.0, "step_penalty_for_tagger": 0.0, "tag_penalty_for_runner": -1.0,
    "step_reward_for_runner": 0.0, "end_of_game_reward_for_runner": 1.0, "runner_exits_game_after_tagged": True,
}  # fmt: skip


class Gridworld(SimpleNamespace):
    """One game; the last of the agents is the runner. Parameters are attributes."""

    def __init__(self, **parameters: float) -> None:
        super().__init__(**GRIDWORLD | parameters)
        self.reset()

    def reset(self) -> None:
        self.places = np.array([[self.grid_length // 2] * 2] * self.num_taggers + [[0, 0]])
        self.steps = 0

    def step(self, actions: Sequence[int]) -> tuple[Floats, bool]:
        """Returns rewards and whether the runner is tagged."""
        self.steps += 1
        wanted = self.places + MOVES[actions]
        self.places = wanted.clip(0, self.grid_length)
        tagged = bool((self.places[:-1] == self.places[-1]).all(1).any())
        rewards = np.full(len(actions), self.tag_reward_for_tagger if tagged else -self.step_cost_for_tagger, F)
        rewards[-1] = -self.tag_penalty_for_runner if tagged else self.step_cost_for_tagger
        return rewards - F(self.wall_hit_penalty) * (self.places != wanted).any(1), tagged

    def observe(self) -> Floats:
        """Returns [N, S]."""
        N = self.num_taggers + 1
        places, is_runner = self.places.astype(F) / F(self.grid_length), np.arange(N) == N - 1
        time = np.full(N, F(self.steps) / F(self.episode_length))
        if self.use_full_observation:
            return np.column_stack((np.tile(np.append(places.T, is_runner), (N, 1)), np.eye(N), time)).astype(F)
        other = np.full(N, N - 1)
        other[-1] = ((self.places[:-1] - self.places[-1]) ** 2).sum(1).argmin() if self.num_taggers else 0
        return np.column_stack((places, places[other], is_runner, time)).astype(F)


class Continuous(SimpleNamespace):
    """One game; taggers first. Parameters are attributes."""

    def __init__(self, **parameters: float) -> None:
        super().__init__(**CONTINUOUS | parameters)
        self.num_agents = N = self.num_taggers + self.num_runners
        self.x, self.y, self.v, self.theta, self.a = np.zeros((5, N), F)
        self.playing = np.ones(N, bool)
        self.is_tagger = np.arange(N) < self.num_taggers
        self.near_threshold = False
        self.steps = 0

    def step(self, actions: Sequence[int], moved: dict[str, Floats] | None = None) -> tuple[Floats, Floats, bool]:
        """Returns observations, made before this step's tags, rewards, and whether no runner is left.

        Args:
            actions: [N].
            moved: x, y, v, theta and a after the move, taken if within 1e-6 of the own: which of two agents is nearer
                must not hang on the last digit of their places.
        """
        self.steps += 1
        edge = self._move(np.array(actions))
        for name, values in (moved or {}).items():
            gaps = np.abs(values - getattr(self, name))
            assert (np.minimum(gaps, np.abs(2 * np.pi - gaps)) if name == "theta" else gaps).max() < 1e-6, name
            setattr(self, name, values)
        return self.observe(), self._tag(edge), not self.playing[~self.is_tagger].any()

    def _move(self, actions: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Returns who hits the edge."""
        pushes = np.append(0.0, np.linspace(self.min_acceleration, self.max_acceleration, self.num_acceleration_levels))
        turns = np.append(0.0, np.linspace(self.min_turn, self.max_turn, self.num_turn_levels))
        push, turn = np.divmod(actions, len(turns))
        limit = F(self.max_speed * np.where(self.is_tagger, self.skill_level_tagger, self.skill_level_runner))
        theta = (self.theta.astype(float) + turns[turn]) % (2 * np.pi) * self.playing
        # in float32: these add up to exactly 0 or the limit, or just miss it
        a = self.a + pushes.astype(F)[push]
        v = np.clip(self.v + a, F(0), limit) * self.playing
        wanted = np.array((self.x, self.y), float) + v.astype(float) * np.array((np.cos(theta), np.sin(theta)))
        places = wanted.clip(0, self.grid_length)
        gaps = np.abs((wanted, wanted - self.grid_length))
        # a place at the edge may round to either side
        self.near_threshold |= self.edge_hit_penalty != 0 and bool(((gaps > 0) & (gaps < 1e-5)).any())
        a = np.where((v <= 0) | (v >= limit), 0, a)
        self.x, self.y, self.v, self.theta, self.a = np.array((*places, v, theta, a), F)
        return (places != wanted).any(0)

    def observe(self) -> Floats:
        """Returns [N, S]."""
        diagonal, speed = np.sqrt(2) * self.grid_length, self.max_speed + 1e-10
        own = np.array(
            [self.x / diagonal, self.y / diagonal, self.v / speed, self.a / speed, self.theta / (2 * np.pi)], F
        )
        rows = []
        for k in range(self.num_agents):
            others = np.delete(np.arange(self.num_agents), k) if self.use_full_observation else self._nearest(k)
            features = np.array(
                [*((own[:, others] - own[:, [k]]) * self.playing[k]), self.is_tagger[others], self.playing[others]], F
            )
            if not self.use_full_observation:
                features *= self.playing[k]
                features = np.pad(features, ((0, 0), (0, self.num_other_agents_observed - len(others))))
            rows.append(np.append(features, self.steps / self.episode_length * self.playing[k]))
        return np.array(rows, F)

    def _nearest(self, k: int) -> list[int]:
        near = np.argsort(self._squared(k), kind="stable").tolist()  # of equally near ones the first
        return [j for j in near if self.playing[j] and j != k][: self.num_other_agents_observed]

    def _squared(self, k: int) -> Floats:
        """[N] in float32: which of two is nearer must not depend on more digits than the game has."""
        return (self.x - self.x[k]) ** 2 + (self.y - self.y[k]) ** 2

    def _tag(self, edge: NDArray[np.bool_]) -> Floats:
        each = np.where(self.is_tagger, self.step_penalty_for_tagger, self.step_reward_for_runner)
        rewards = (each + self.edge_hit_penalty * edge) * self.playing
        reach = self.tagging_distance * self.grid_length
        for k in np.flatnonzero(~self.is_tagger & self.playing & (self.num_taggers > 0)):
            distances = np.sqrt(self._squared(k)[: self.num_taggers])
            nearest = int(np.argmin(distances))
            self.near_threshold |= bool(abs(distances[nearest] - reach) < 1e-5)
            if distances[nearest] < reach:
                rewards[k] += self.tag_penalty_for_runner
                rewards[nearest] += self.tag_reward_for_tagger
                self.playing[k] &= not self.runner_exits_game_after_tagged
        if self.steps == self.episode_length:
            rewards[~self.is_tagger & self.playing] += self.end_of_game_reward_for_runner
        return rewards.astype(F)
