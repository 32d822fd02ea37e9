"""Tag on a grid and on a square, written from their rules with plain loops: the truth for the kernels, and their pace.

Source: the rules of WarpDrive's tag_gridworld and tag_continuous (Lan et al., 2021). Numbers are float32, as there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
F = np.float32
MOVES = ((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1))


@dataclass
class Gridworld:
    """One game; the last of the agents is the runner."""

    num_taggers: int = 10
    grid_length: int = 10
    episode_length: int = 100
    wall_hit_penalty: float = 0.1
    tag_reward_for_tagger: float = 10.0
    tag_penalty_for_runner: float = 2.0
    step_cost_for_tagger: float = 0.01
    use_full_observation: bool = True
    x: list[int] = field(default_factory=list)
    y: list[int] = field(default_factory=list)
    steps: int = 0

    def reset(self) -> None:
        middle = self.grid_length // 2
        self.x, self.y = ([middle] * self.num_taggers + [0] for _ in "xy")
        self.steps = 0

    def step(self, actions: Sequence[int]) -> tuple[Floats, bool]:
        """Returns rewards and whether the runner is tagged."""
        self.steps += 1
        agents = range(self.num_taggers + 1)
        hit = [False for _ in agents]
        for agent in agents:
            for axis, move in zip((self.x, self.y), MOVES[actions[agent]], strict=True):
                wanted = axis[agent] + move
                axis[agent] = min(max(wanted, 0), self.grid_length)
                hit[agent] |= axis[agent] != wanted
        at = list(zip(self.x, self.y, strict=True))
        tagged = at[-1] in at[:-1]
        rewards = np.zeros(len(agents), F)
        for agent in agents:
            is_runner = agent == self.num_taggers
            if tagged:
                rewards[agent] = -F(self.tag_penalty_for_runner) if is_runner else F(self.tag_reward_for_tagger)
            else:
                rewards[agent] = F(self.step_cost_for_tagger) if is_runner else -F(self.step_cost_for_tagger)
            if hit[agent]:
                rewards[agent] -= F(self.wall_hit_penalty)
        return rewards, tagged

    def observe(self) -> Floats:
        """Returns [N, S]."""
        N = self.num_taggers + 1
        x, y = (np.array(axis, F) / F(self.grid_length) for axis in (self.x, self.y))
        time = F(self.steps) / F(self.episode_length)
        kinds = np.array([0] * (N - 1) + [1], F)
        rows = []
        for agent in range(N):
            if self.use_full_observation:
                rows.append(np.concatenate((x, y, kinds, np.eye(N, dtype=F)[agent], [time])))
                continue
            other = N - 1
            if agent == N - 1:
                squares = [(self.x[k] - self.x[-1]) ** 2 + (self.y[k] - self.y[-1]) ** 2 for k in range(N - 1)]
                other = squares.index(min(squares)) if squares else 0
            rows.append(np.array([x[agent], y[agent], x[other], y[other], kinds[agent], time]))
        return np.array(rows, F)


@dataclass
class Continuous:
    """One game; taggers first."""

    num_taggers: int = 1
    num_runners: int = 10
    grid_length: float = 10.0
    episode_length: int = 100
    max_speed: float = 1.0
    skill_level_runner: float = 1.0
    skill_level_tagger: float = 1.0
    max_acceleration: float = 1.0
    min_acceleration: float = -1.0
    max_turn: float = np.pi / 2
    min_turn: float = -np.pi / 2
    num_acceleration_levels: int = 10
    num_turn_levels: int = 10
    edge_hit_penalty: float = 0.0
    use_full_observation: bool = True
    num_other_agents_observed: int = 2
    tagging_distance: float = 0.01
    tag_reward_for_tagger: float = 1.0
    step_penalty_for_tagger: float = 0.0
    tag_penalty_for_runner: float = -1.0
    step_reward_for_runner: float = 0.0
    end_of_game_reward_for_runner: float = 1.0
    runner_exits_game_after_tagged: bool = True
    steps: int = 0

    def __post_init__(self) -> None:
        N = self.num_agents
        self.x, self.y, self.v, self.theta, self.a = (np.zeros(N, F) for _ in range(5))
        self.playing = np.ones(N, bool)
        self.is_tagger = np.arange(N) < self.num_taggers
        self.near_threshold = False

    @property
    def num_agents(self) -> int:
        return self.num_taggers + self.num_runners

    def step(self, actions: Sequence[int], moved: dict[str, Floats] | None = None) -> tuple[Floats, Floats, bool]:
        """Returns observations, made before this step's tags, rewards, and whether no runner is left.

        Args:
            actions: [N].
            moved: x, y, v, theta and a after the move, taken if within 1e-6 of the own: which of two agents is nearer
                must not hang on the last digit of their places.
        """
        self.steps += 1
        edge = self._move(actions)
        for name, values in (moved or {}).items():
            gaps = np.abs(values - getattr(self, name))
            assert (np.minimum(gaps, np.abs(2 * np.pi - gaps)) if name == "theta" else gaps).max() < 1e-6, name
            setattr(self, name, values)
        seen = self.observe()
        return seen, self._tag(edge), not self.playing[~self.is_tagger].any()

    def _move(self, actions: Sequence[int]) -> list[bool]:
        pushes = [0.0, *np.linspace(self.min_acceleration, self.max_acceleration, self.num_acceleration_levels)]
        turns = [0.0, *np.linspace(self.min_turn, self.max_turn, self.num_turn_levels)]
        edge = []
        for k in range(self.num_agents):
            push, turn = divmod(int(actions[k]), len(turns))
            limit = self.max_speed * (self.skill_level_tagger if self.is_tagger[k] else self.skill_level_runner)
            playing = float(self.playing[k])
            theta = ((float(self.theta[k]) + turns[turn]) % (2 * np.pi)) * playing
            # in float32: these add up to exactly 0 or the limit, or just miss it
            a = F(self.a[k] + F(pushes[push]))
            v = min(max(float(F(self.v[k] + a)), 0.0), float(F(limit))) * playing
            if v <= 0 or v >= F(limit):
                a = 0.0
            x, y = float(self.x[k]) + v * np.cos(theta), float(self.y[k]) + v * np.sin(theta)
            edge.append(not (0 <= x <= self.grid_length and 0 <= y <= self.grid_length))
            # a place at the edge may round to either side
            beyond = (x, y, x - self.grid_length, y - self.grid_length)
            self.near_threshold |= self.edge_hit_penalty != 0 and any(0 < abs(gap) < 1e-5 for gap in beyond)
            x, y = (min(max(axis, 0.0), self.grid_length) for axis in (x, y))
            self.x[k], self.y[k], self.v[k], self.theta[k], self.a[k] = x, y, v, theta, a
        return edge

    def observe(self) -> Floats:
        """Returns [N, S]."""
        diagonal = np.sqrt(2) * self.grid_length
        speed = self.max_speed + 1e-10
        own = np.array(
            [self.x / diagonal, self.y / diagonal, self.v / speed, self.a / speed, self.theta / (2 * np.pi)], F
        )
        time = self.steps / self.episode_length
        rows = []
        for k in range(self.num_agents):
            others = [j for j in range(self.num_agents) if j != k]
            if not self.use_full_observation:
                others = self._nearest(k)
            differences = (own[:, others] - own[:, [k]]) * self.playing[k]
            features = np.array([*differences, self.is_tagger[others], self.playing[others]], F)
            if not self.use_full_observation:
                if not self.playing[k]:
                    features = features[:, :0]
                missing = self.num_other_agents_observed - features.shape[1]
                features = np.pad(features, ((0, 0), (0, missing)))
            rows.append(np.append(features.reshape(-1), time * self.playing[k]))
        return np.array(rows, F)

    def _nearest(self, k: int) -> list[int]:
        near = np.argsort(self._squared(k), kind="stable").tolist()  # of equally near ones the first
        return [j for j in near if self.playing[j] and j != k][: self.num_other_agents_observed]

    def _squared(self, k: int) -> Floats:
        """[N] in float32: which of two is nearer must not depend on more digits than the game has."""
        across, along = self.x - self.x[k], self.y - self.y[k]
        return across * across + along * along

    def _tag(self, edge: list[bool]) -> Floats:
        rewards = np.zeros(self.num_agents)
        begun = self.playing.copy()
        reach = self.tagging_distance * self.grid_length
        for k in range(self.num_agents):
            if begun[k]:
                rewards[k] += self.edge_hit_penalty * edge[k]
                rewards[k] += self.step_penalty_for_tagger if self.is_tagger[k] else self.step_reward_for_runner
        for k in range(self.num_taggers, self.num_agents):
            if not begun[k] or self.num_taggers == 0:
                continue
            distances = np.sqrt(self._squared(k)[: self.num_taggers])
            nearest = int(np.argmin(distances))
            self.near_threshold |= abs(distances[nearest] - reach) < 1e-5
            if distances[nearest] < reach:
                rewards[k] += self.tag_penalty_for_runner
                rewards[nearest] += self.tag_reward_for_tagger
                self.playing[k] &= not self.runner_exits_game_after_tagged
        if self.steps == self.episode_length:
            rewards[~self.is_tagger & self.playing] += self.end_of_game_reward_for_runner
        return rewards.astype(F)
