"""Whole episodes of a policy, in the order of their starts.

 environments ─► rounds on the device ─► rounds held on the host ─► episodes that are over, in order ─► blocks

Environments play one episode after the other. Episodes are ordered by (round in which they start, number of their
environment), and the first ones in this order are taken: a number of episodes, or as few as cover a number of rows.
Taking the episodes that end first would favor short ones. An episode does not depend on earlier episodes, so the first
n in this order are n independent episodes. With a number of rows, the last episode is the one that crosses this number,
and is more likely a long one: the bias of means is of the order of one episode in all.

With several agents in an environment, each has its own episode, which ends when the agent leaves.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reagent_lite.errors import Problem, SimulationError
from reagent_lite.memory import free_bytes
from reagent_lite.sim.env import VectorEnv
from reagent_lite.sim.experience import Actor, Observer, play_step

BLOCK_ROWS = 1 << 15
_MOST_ROUNDS = 256

Array = NDArray[Any]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedEpisodes:
    """E whole episodes, one after the other, with R rows in all.

    Attributes:
        env: [E] global number of the environment.
        number: [E] number of the episode in its environment, from 0.
        agent: [E] number of the agent; 0 with one agent.
        lengths: [E] number of rows.
        terminal: [E] whether it ended by itself or the agent left; otherwise the time limit truncated it.
        state: [R, S].
        action: [R] index of the choice taken.
        reward, propensity: [R].
        mask: [R, K] the allowed choices; None if all are always allowed.
        features: [R, K, F] of candidates that differ from step to step; else None.
        last_state: [E, S] state after the last row.
        last_mask, last_features: [E, K] and [E, K, F], the choices in that state.
    """

    env: Ints
    number: Ints
    agent: Ints
    lengths: Ints
    terminal: Flags
    state: NDArray[np.float32]
    action: Ints
    reward: NDArray[np.float32]
    propensity: NDArray[np.float32]
    mask: Flags | None
    features: NDArray[np.float32] | None
    last_state: NDArray[np.float32]
    last_mask: Flags | None
    last_features: NDArray[np.float32] | None

    @property
    def returns(self) -> NDArray[np.float64]:
        """[E] sums of rewards."""
        sums: NDArray[np.float64] = np.add.reduceat(
            self.reward.astype(np.float64), self.lengths.cumsum() - self.lengths
        )
        return sums


@dataclass(frozen=True, slots=True)
class Amount:
    """A number of episodes, or a number of rows that whole episodes cover.

    Attributes:
        number: the number, which is also the largest number of environments that can contribute an episode.
        unit: whether rows or episodes are counted.
    """

    number: int
    unit: Literal["rows", "episodes"]

    def sizes(self, lengths: Ints) -> Ints:
        """Returns how much each episode [E] contributes, given its rows."""
        return lengths if self.unit == "rows" else np.ones_like(lengths)

    def covered_by(self, lengths: Ints) -> tuple[int, bool]:
        """Returns how many of the first episodes are needed, and whether there are enough of them."""
        count = int(np.searchsorted(self.sizes(lengths).cumsum(), self.number)) + 1
        return min(count, len(lengths)), count <= len(lengths)

    def less(self, lengths: Ints) -> "Amount":
        """Returns the amount that remains after some episodes."""
        return Amount(self.number - int(self.sizes(lengths).sum()), self.unit)


def play_episodes(env: VectorEnv, actors: Sequence[Actor], amount: Amount) -> Iterator[PlayedEpisodes]:
    """Yields episodes played from a reset, in the order of their starts, in blocks of about BLOCK_ROWS rows.

    Memory holds the rounds since the start of the oldest unfinished episode.

    Args:
        env: the environments, which are reset.
        actors: a single actor, or the actors of all types of agents.
        amount: number of episodes or rows.

    Raises:
        SimulationError: an action was invalid, or memory does not suffice.
    """
    recorder = EpisodeRecorder(env)
    while True:
        recorder.play(actors)
        lengths = recorder.lengths
        count, enough = amount.covered_by(lengths)
        stop = 0
        for begin, stop in _blocks(lengths[:count], last=enough):
            yield recorder.episodes(np.arange(begin, stop))
        if enough:
            return
        amount = amount.less(lengths[:stop])
        recorder.drop(np.arange(stop))


def _blocks(lengths: Ints, *, last: bool) -> Iterator[tuple[int, int]]:
    """Yields ranges [begin, stop) of episodes with at most BLOCK_ROWS rows, or of a single longer episode.

    Args:
        lengths: number of rows of each episode.
        last: whether no episodes follow; otherwise an incomplete last block is not yielded.
    """
    cumulative = lengths.cumsum()
    begin = 0
    rows = 0
    while begin < len(lengths):
        stop = max(begin + 1, int(np.searchsorted(cumulative, rows + BLOCK_ROWS, "right")))
        if stop == len(lengths) and not last and cumulative[-1] - rows < BLOCK_ROWS:
            return
        yield begin, stop
        begin = stop
        rows = int(cumulative[stop - 1])


class _Chunk(Observer):
    """A chunk of recorded rounds: tensors [rounds, R, ...] on the device, R = N * A rows of A agents."""

    def __init__(self, env: VectorEnv, rounds: int) -> None:
        self.rounds = rounds
        self._env = env
        self._round = 0
        self._shape = (rounds, env.num_envs, env.spec.agents)
        self._before = {"state": env.observation}
        self._after = {"action": env.action, "propensity": env.propensity, "reward": env.reward}
        self._ends = {"ended": env.ended, "last_state": env.next_observation}
        if env.mask is not None and env.next_mask is not None:
            self._before["mask"] = env.mask
            self._ends["last_mask"] = env.next_mask
        if env.in_game is not None and env.next_in_game is not None:
            self._before["in_game"] = env.in_game
            self._ends["last_in_game"] = env.next_in_game
        if env.spec.candidates and env.features is not None and env.next_features is not None:
            self._before["features"] = env.features
            self._ends["last_features"] = env.next_features
        every = self._before | self._after | self._ends
        self._kept = {name: tensor.new_empty(self.rounds, *tensor.shape) for name, tensor in every.items()}

    def before(self) -> None:
        """Records the observation columns; of equal candidates, only the first can be drawn."""
        self._env.close_equal_candidates()
        self._record(self._before)

    def after(self) -> None:
        """Records action, reward and next state; the round after the last overwrites the first."""
        self._record(self._after | self._ends)
        self._round = (self._round + 1) % self.rounds

    def _record(self, tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self._kept[name][self._round].copy_(tensor)

    def on_host(self) -> tuple[dict[str, Array], dict[str, Array]]:
        """Returns the columns of rows, {name: [rounds, R, ...]}, and those of ends, {name: [rounds, N, A, ...]}.

        Among the ends, `ended` and `playing`, the number of agents in the game, are [rounds, N].
        """
        kept = {name: tensor.cpu().numpy() for name, tensor in self._kept.items()}
        ends = {name: kept[name].reshape(*self._shape, *kept[name].shape[2:]) for name in self._ends if name != "ended"}
        in_game = kept["in_game"] if "in_game" in kept else np.ones(self._shape, np.bool_)
        ends |= {"ended": kept["ended"], "playing": in_game.reshape(self._shape).sum(2)}
        return {name: kept[name] for name in self._before | self._after}, ends


class _HeldRounds:
    """Recorded rounds on the host: arrays [rounds, R, ...] that grow at the end and shrink at the beginning.

    Attributes:
        stop: number of the round after the last.
    """

    def __init__(self, env: VectorEnv) -> None:
        self._num_envs = env.num_envs
        self._num_rows = env.num_rows
        self._rows: dict[str, Array] = {}
        self._begin = self._end = 0  # range of the arrays that is in use
        self.stop = 0

    def add(self, rows: dict[str, Array]) -> None:
        """Appends rounds."""
        rounds = len(rows["action"])
        self._reserve(rows, rounds)
        for name, values in rows.items():
            self._rows[name][self._end : self._end + rounds] = values
        self._end += rounds
        self.stop += rounds

    def drop(self, first: int) -> None:
        """Drops the rounds before `first`."""
        self._begin = self._end - (self.stop - first)

    def take(self, rounds: Ints, rows: Ints) -> dict[str, Array]:
        """Returns the records at pairs of round and row, {name: [n, ...]}."""
        index = (rounds - self.stop + self._end) * self._num_rows + rows
        return {name: values.reshape(-1, *values.shape[2:])[index] for name, values in self._rows.items()}

    def _reserve(self, rows: dict[str, Array], rounds: int) -> None:
        held = self._end - self._begin
        capacity = len(self._rows["action"]) if self._rows else 0
        if self._end + rounds <= capacity:
            return
        if 2 * (held + rounds) <= capacity:  # moves the held rounds, at most once per that many rounds
            for values in self._rows.values():
                values[:held] = values[self._begin : self._end]
        else:
            capacity = 2 * (held + rounds)
            self._require_memory(sum(values[0].nbytes for values in rows.values()) * capacity)
            for name, values in rows.items():
                grown = np.empty((capacity, *values.shape[1:]), values.dtype)
                if held:
                    grown[:held] = self._rows[name][self._begin : self._end]
                self._rows[name] = grown
        self._begin, self._end = 0, held

    def _require_memory(self, need: int) -> None:
        free = free_bytes(torch.device("cpu"))
        if need > free:
            expected = f"episodes that fit into the {free / 2**30:.1f} GiB free while they are played"
            got = f"{self._num_envs} environments, which need {need / 2**30:.1f} GiB"
            raise SimulationError(Problem("num_envs", expected, got, "Lower num_envs, or time_limit"))


class EpisodeRecorder:
    """Plays environments from a reset, a chunk of rounds at a time, and keeps episodes until they are dropped.

    Episodes [L] that have started and are not dropped are ordered by start: (round, environment).

    Args:
        env: the environments, which are reset.
        rounds: steps of every environment in a chunk; None means about BLOCK_ROWS rows.
    """

    def __init__(self, env: VectorEnv, rounds: int | None = None) -> None:
        env.reset()
        num_envs = env.num_envs
        self._env = env
        self._chunk = _Chunk(env, min(rounds or max(BLOCK_ROWS // env.num_rows, 1), _MOST_ROUNDS))
        self._held = _HeldRounds(env)
        self._env_of = np.arange(num_envs)  # [L] environment, from 0
        self._number = np.zeros(num_envs, np.int64)  # number of the episode in its environment
        self._start = np.zeros(num_envs, np.int64)  # first round
        self._stop = np.full(num_envs, -1)  # round after the last; -1 while it is played
        self._size = np.zeros(num_envs, np.int64)  # rows of all agents so far
        self._ends: dict[str, Array] = {}  # [L, ...] columns of ends
        self._playing = np.arange(num_envs)  # [N] index of the episode that each environment plays

    @torch.no_grad()
    def play(self, actors: Sequence[Actor]) -> None:
        """Plays a chunk of rounds.

        Args:
            actors: a single actor, or the actors of all types of agents.

        Raises:
            SimulationError: an action was invalid, or memory does not suffice.
        """
        for _ in range(self._chunk.rounds):
            play_step(self._env, actors, self._chunk)
        self._env.check()
        rows, ends = self._chunk.on_host()
        self._add(self._held.stop, ends)
        self._held.add(rows)

    @property
    def lengths(self) -> Ints:
        """Number of rows of each finished episode, in the order of their starts, up to the first unfinished one."""
        over = self._stop >= 0
        return self._size[: len(over) if over.all() else int(over.argmin())]

    @property
    def over(self) -> Ints:
        """Indices of all finished episodes, in the order of their starts; the first of them are those in `lengths`."""
        return np.flatnonzero(self._stop >= 0)

    @property
    def steps_over(self) -> int:
        """Total environment steps of all finished episodes."""
        return int((self._stop - self._start)[self.over].sum())

    def episodes(self, indices: Ints) -> PlayedEpisodes:
        """Returns finished episodes, at least one; each agent of an environment has its own."""
        agents = self._env.spec.agents

        def each(values: Array) -> Array:
            return np.repeat(values[indices], agents)

        env = each(self._env_of)
        first = each(self._start)
        lengths = each(self._stop - self._start)
        agent = np.tile(np.arange(agents), len(indices))
        starts = lengths.cumsum() - lengths
        within = np.arange(lengths.sum()) - np.repeat(starts, lengths)
        rows = self._held.take(np.repeat(first, lengths) + within, np.repeat(env * agents + agent, lengths))
        ends = {name: values[indices] for name, values in self._ends.items()}
        terminal = np.repeat(ends.pop("ended") == 1, agents)
        ends = {name: values.reshape(-1, *values.shape[2:]) for name, values in ends.items()}
        if "in_game" in rows:  # an agent that left has no more rows: its last state is the next observation
            in_game = rows.pop("in_game")
            rows_in_game = np.add.reduceat(in_game, starts, dtype=np.int64)
            left = rows_in_game < lengths
            ends["last_state"][left] = rows["state"][(starts + rows_in_game)[left]]
            terminal |= left | ~ends["last_in_game"]
            rows = {name: values[in_game] for name, values in rows.items()}
            lengths = rows_in_game
        return PlayedEpisodes(
            env=self._env.first_env + env,
            number=each(self._number),
            agent=agent,
            lengths=lengths,
            terminal=terminal,
            state=rows["state"],
            action=rows["action"].astype(np.int64),
            reward=rows["reward"],
            propensity=rows["propensity"],
            mask=rows.get("mask"),
            features=rows.get("features"),
            last_state=ends["last_state"],
            last_mask=ends.get("last_mask"),
            last_features=ends.get("last_features"),
        )

    def drop(self, indices: Ints) -> None:
        """Drops some finished episodes."""
        kept = np.ones(len(self._env_of), bool)
        kept[indices] = False
        self._env_of = self._env_of[kept]
        self._number = self._number[kept]
        self._start = self._start[kept]
        self._stop = self._stop[kept]
        self._size = self._size[kept]
        self._ends = {name: values[kept] for name, values in self._ends.items()}
        self._playing = (kept.cumsum() - 1)[self._playing]
        self._held.drop(int(self._start[0]))

    def _add(self, first_round: int, ends: dict[str, Array]) -> None:
        """Ends episodes and starts the next ones.

        Args:
            first_round: the first round of the chunk.
            ends: the columns of ends of `_Chunk.on_host`.
        """
        rounds, envs = np.nonzero(ends["ended"])
        before = len(self._env_of)
        count = len(envs)
        ended, earlier = self._ended_by(envs)
        number = self._number[self._playing[envs]] + 1 + earlier
        self._playing[envs] = before + np.arange(count)  # if an environment is repeated, the last assignment counts
        self._env_of = np.concatenate((self._env_of, envs))
        self._number = np.concatenate((self._number, number))
        self._start = np.concatenate((self._start, first_round + rounds + 1))
        self._stop = np.concatenate((self._stop, np.full(count, -1)))
        self._size = np.concatenate((self._size, np.zeros(count, np.int64)))
        in_chunk = np.flatnonzero(self._stop < 0)
        self._stop[ended] = first_round + rounds + 1
        self._size[in_chunk] += self._rows_in_chunk(in_chunk, first_round, ends.pop("playing"))
        for name, values in ends.items():
            grown = np.zeros((len(self._env_of), *values.shape[2:]), values.dtype)
            grown[:before] = self._ends.get(name, 0)
            grown[ended] = values[rounds, envs]
            self._ends[name] = grown

    def _ended_by(self, envs: Ints) -> tuple[Ints, Ints]:
        """Returns for each of n ends the episode that it ends, and the number of earlier ends in its environment.

        The i-th end starts the episode L + i. Two environments play episodes 0 and 1, so that L = 2:

            envs     1  0  1  1
            ended    1  0  2  4    the third end ends the episode that started at the first end
            earlier  0  0  1  2
        """
        order = np.argsort(envs, kind="stable")  # the ends of an environment side by side
        repeated = np.diff(envs[order], prepend=-1) == 0
        started = len(self._env_of) + np.roll(order, 1)  # the episode that started at the previous end
        position = np.arange(len(envs))
        first_of_env = np.maximum.accumulate(np.where(repeated, 0, position))
        ended = np.empty(len(envs), np.int64)
        earlier = np.empty(len(envs), np.int64)
        ended[order] = np.where(repeated, started, self._playing[envs[order]])
        earlier[order] = position - first_of_env
        return ended, earlier

    def _rows_in_chunk(self, index: Ints, first_round: int, playing: Array) -> Ints:
        """Returns the rows that episodes have in a chunk, from the number of agents in the game, [rounds, N]."""
        rows_before = np.cumsum(np.pad(playing, ((1, 0), (0, 0))), axis=0)  # number of rows before each round
        env = self._env_of[index]
        begin = np.maximum(self._start[index] - first_round, 0)
        stop = np.where(self._stop[index] < 0, len(playing), self._stop[index] - first_round)
        rows: Ints = rows_before[stop, env] - rows_before[begin, env]
        return rows
