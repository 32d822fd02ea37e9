"""Events as a Minari dataset, which `minari.MinariDataset("<folder>/data")` opens.

`minari.load_dataset` opens it by its name, once the folder lies under Minari's own with that name. Observation column j
is the j-th feature id of the log, NaN where it is absent; Discrete action i is the i-th name. The dataset's description
says which, so that reading it back gives the log's own ids, names and episodes. What Minari has no place for
(propensities, choices, metrics, partitions) is left out.

Minari keeps T + 1 observations: behind the last row stands its next_state_features. Where a log has none, an episode at
its true end gets NaN, which nothing reads; one that merely stops loses its last row, whose state is then the last
observation: what came after is not known, and is not made up.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from reagent_lite.data.formats.minari import MDP_ID, OURS, require_minari
from reagent_lite.data.formats.schema import filled, to_numpy, valid_rows
from reagent_lite.data.writing.tables import column_of_table
from reagent_lite.errors import DataError, Problem

if TYPE_CHECKING:
    from minari.data_collector import EpisodeBuffer

_KEPT = ("mdp_id", "sequence_number", "state_features", "next_state_features", "action", "reward", "terminal",
         "truncated")  # fmt: skip
_NEEDED = ("mdp_id", "sequence_number", "state_features", "action", "reward")
_EPISODES_AT_ONCE = 256
_EPISODE_BYTES = 1 << 16
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class MinariForm:
    """What a dataset is called and what its columns are.

    Attributes:
        dataset_id: (namespace/)name(-vN).
        env_id: of a Gymnasium environment, which must be installed then; None for none.
        state_ids: features of observations, ascending.
        actions: names in the order of the Discrete space; None where actions are maps.
        action_ids: features of actions, ascending; empty where they are names.
    """

    dataset_id: str
    env_id: str | None
    state_ids: tuple[int, ...]
    actions: tuple[str, ...] | None
    action_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Steps:
    """Rows of one episode: state and after [n, S], action [n] or [n, A], known: whether `after` is."""

    state: Floats
    after: Floats
    known: NDArray[np.bool_]
    action: NDArray[Any]
    reward: NDArray[np.float64]
    terminal: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    sequence: NDArray[np.int64]

    def part(self, rows: slice) -> _Steps:
        return _Steps(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))


def left_out(names: list[str]) -> list[str]:
    """Returns the columns of a log that a Minari dataset has no place for."""
    return [name for name in names if name not in _KEPT]


@dataclass(slots=True)
class MinariWriter:
    """Takes settled tables whose episodes are in one piece, in the order of their steps.

    Attributes:
        folder: of the dataset, which is there and empty.
        form: of its columns.
        rows, episodes: written.
        dropped: last rows of episodes that merely stop.
    """

    folder: Path
    form: MinariForm
    rows: int = 0
    episodes: int = 0
    dropped: int = 0
    _storage: Any = None
    _open: list[_Steps] = field(default_factory=list)
    _open_id: str | None = None
    _where: str = ""
    _seen: set[str] = field(default_factory=set)
    _ended: list[tuple[str, EpisodeBuffer]] = field(default_factory=list)

    def __post_init__(self) -> None:
        minari = require_minari()
        from gymnasium import spaces
        from minari.dataset.minari_storage import MinariStorage

        form = self.form
        observation = spaces.Box(-np.inf, np.inf, (len(form.state_ids),), np.float32)
        action: spaces.Space[Any] = spaces.Box(-np.inf, np.inf, (len(form.action_ids),), np.float32)
        if form.actions is not None:
            action = spaces.Discrete(len(form.actions))
        self._storage = MinariStorage.new(self.folder / "data", observation, action, _env_spec(form.env_id))
        self._storage.update_metadata({
            "dataset_id": form.dataset_id,
            "minari_version": minari.__version__,
            OURS: {"state_ids": list(form.state_ids), "action_ids": list(form.action_ids),
                   "action_names": None if form.actions is None else list(form.actions)},
        })  # fmt: skip

    def write(self, table: pa.Table, where: list[str]) -> None:
        """Adds rows; an episode may go on in the next table.

        Args:
            table: as log_tables.settled gives it.
            where: [n] "file:line" of each row.

        Raises:
            DataError: rows without episode or place in it, out of order, or with an action that is unknown.
        """
        for name in _NEEDED:
            index = table.schema.get_field_index(name)
            present = np.zeros(table.num_rows, bool) if index < 0 else valid_rows(column_of_table(table, index))
            if not present.all():
                raise DataError(Problem(where[int((~present).argmax())], f"a value in {name}, for Minari", "none"))
        ids = column_of_table(table, table.schema.get_field_index("mdp_id")).to_pylist()
        steps = self._steps(table, where)
        starts = [0, *(row for row in range(1, len(ids)) if ids[row] != ids[row - 1])]
        for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
            if ids[start] != self._open_id:
                self._end_episode()
                self._begin(ids[start], where[start])
            self._open.append(steps.part(slice(start, end)))
            self._require_order(where[start:end])
        self._flush()

    def close(self) -> None:
        """Ends the last episode.

        Raises:
            DataError: nothing was left to write.
        """
        self._end_episode()
        self._flush()
        if not self.episodes:
            raise DataError(Problem(self._where, "an episode that ends, or that has two rows", "none"))

    def _begin(self, mdp_id: str, where: str) -> None:
        if mdp_id in self._seen:
            raise DataError(Problem(where, "the rows of each episode in one piece", f"more of episode {mdp_id!r}",
                                    "Sort the log by mdp_id and sequence_number"))  # fmt: skip
        self._seen.add(mdp_id)
        self._open_id, self._where = mdp_id, where

    def _require_order(self, where: list[str]) -> None:
        before = self._open[-2].sequence[-1:] if len(self._open) > 1 else np.empty(0, np.int64)
        sequence = np.concatenate((before, self._open[-1].sequence))
        if (wrong := np.diff(sequence) <= 0).any():
            at = int(wrong.argmax())
            got = f"{sequence[at + 1]} after {sequence[at]}"
            raise DataError(Problem(where[at + 1 - len(before)], "sequence_number that rises in an episode", got,
                                    "Sort the log by mdp_id and sequence_number"))  # fmt: skip

    def _end_episode(self) -> None:
        from minari.data_collector import EpisodeBuffer

        if self._open_id is None:
            return
        steps = _Steps(*(np.concatenate([getattr(one, name) for one in self._open])
                         for name in _Steps.__dataclass_fields__))  # fmt: skip
        last = steps.after[-1]
        if not steps.known[-1] and not steps.terminal[-1]:
            last, steps = steps.state[-1], steps.part(slice(0, -1))
            self.dropped += 1
        num = len(steps.reward)
        truncated = steps.truncated.copy()
        if num:
            truncated[-1] |= not steps.terminal[-1]
            buffer = EpisodeBuffer(
                observations=np.concatenate((steps.state, last[None])), actions=steps.action,
                rewards=steps.reward, terminations=steps.terminal, truncations=truncated,
            )  # fmt: skip
            self._ended.append((self._open_id, buffer))
            self.rows += num
        self._open, self._open_id = [], None

    def _flush(self) -> None:
        for start in range(0, len(self._ended), _EPISODES_AT_ONCE):
            part = self._ended[start : start + _EPISODES_AT_ONCE]
            _require_room(self.folder, sum(_bytes_of(buffer) for _, buffer in part))
            self._storage.update_episodes([buffer for _, buffer in part])
            numbers = range(self.episodes, self.episodes + len(part))
            self._storage.update_episode_metadata([{MDP_ID: mdp_id} for mdp_id, _ in part], numbers)
            self.episodes += len(part)
        self._ended = []

    def _steps(self, table: pa.Table, where: list[str]) -> _Steps:
        def column(name: str) -> pa.Array:
            index = table.schema.get_field_index(name)
            return pa.nulls(table.num_rows) if index < 0 else column_of_table(table, index)

        def flag(name: str) -> NDArray[np.bool_]:
            array = column(name)
            return np.zeros(len(array), bool) if pa.types.is_null(array.type) else filled(array, 0).astype(bool)

        after = column("next_state_features")
        return _Steps(
            state=_dense(column("state_features"), self.form.state_ids),
            after=_dense(after, self.form.state_ids),
            known=valid_rows(after) if not pa.types.is_null(after.type) else np.zeros(len(after), bool),
            action=self._action(column("action"), where),
            reward=np.asarray(to_numpy(column("reward")), np.float64),
            terminal=flag("terminal"),
            truncated=flag("truncated"),
            sequence=to_numpy(column("sequence_number")),
        )

    def _action(self, array: pa.Array, where: list[str]) -> NDArray[Any]:
        if self.form.actions is None:
            return _dense(array, self.form.action_ids)
        names = {name: index for index, name in enumerate(self.form.actions)}
        encoded = array.dictionary_encode()
        codes = [_index(value, names) for value in encoded.dictionary.to_pylist()]
        actions: NDArray[np.int64] = np.array(codes, np.int64)[to_numpy(encoded.indices)]
        if (actions < 0).any():
            at = int((actions < 0).argmax())
            raise DataError(Problem(where[at], f"one of the actions {', '.join(names)}, or an index below {len(names)}",
                                    repr(array[at].as_py())))  # fmt: skip
        return actions


def _bytes_of(episode: EpisodeBuffer) -> int:
    """Returns more than an episode takes in the file: [m] 50 steps of 4 features take 15 KB."""
    arrays = (episode.observations, episode.actions, episode.rewards)
    return _EPISODE_BYTES + 4 * sum(np.asarray(one).nbytes for one in arrays)


def _require_room(folder: Path, size: int) -> None:
    """Raises OSError where the disk has no room left: HDF5 ends the process when it finds that out by itself."""
    room = folder / ".room"
    try:
        with room.open("wb") as stream:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(stream.fileno(), 0, size)
    finally:
        room.unlink(missing_ok=True)


def _index(value: object, names: dict[str, int]) -> int:
    """The rule of training files: integers are indices, or names where out of range; strings the other way round."""
    if isinstance(value, str):
        return names.get(value, int(value) if value.isdecimal() and int(value) < len(names) else -1)
    assert isinstance(value, int)
    return value if 0 <= value < len(names) else names.get(str(value), -1)


def _dense(maps: pa.Array, ids: tuple[int, ...]) -> Floats:
    """Returns [n, ids] of maps, NaN where absent."""
    values = np.full((len(maps), len(ids)), np.nan, np.float32)
    if not pa.types.is_null(maps.type):
        offsets = to_numpy(maps.offsets)
        row = np.repeat(np.arange(len(maps)), np.diff(offsets))
        span = slice(int(offsets[0]), int(offsets[-1]))
        values[row, np.searchsorted(np.array(ids), to_numpy(maps.keys[span]))] = to_numpy(maps.items[span])
    return values


def ids_in(maps: pa.Array) -> Iterator[int]:
    """Yields the distinct feature ids of maps, or of lists of maps."""
    if pa.types.is_map(maps.type):
        yield from pc.unique(maps.keys).to_pylist()


def _env_spec(env_id: str | None) -> Any:
    if env_id is None:
        return None
    import gymnasium

    try:
        return gymnasium.spec(env_id)
    except gymnasium.error.Error as error:
        todo = "Leave env_id out: the dataset then has spaces alone"
        raise DataError(Problem("env_id", "an environment that is installed", f"{env_id!r}: {error}", todo)) from error
