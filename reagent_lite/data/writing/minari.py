"""Events as a Minari dataset, which `minari.MinariDataset("<folder>/data")` opens.

`minari.load_dataset` opens it by name once the folder lies under Minari's own with that name. Observation column j is
the j-th feature id of the log, NaN where it is absent; Discrete action i is the i-th name. The dataset's description
says which, so that reading it back gives the log's own ids, names and episodes. What Minari has no place for
(propensities, choices, metrics, partitions) is left out.

Minari keeps T + 1 observations: the last one is the next_state_features of the last row. Where a log has none, an
episode that came to its true end gets NaN, which nothing reads; one that merely stops loses its last row, whose state
becomes the last observation: what came after is not known.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from reagent_lite.config.columns import EVENT_COLUMNS
from reagent_lite.data.formats.blocks import Block, Position, Show
from reagent_lite.data.formats.files import InputFile
from reagent_lite.data.formats.minari import MDP_ID, OURS, require_minari
from reagent_lite.data.formats.reading import ALL_COLUMNS, read_blocks
from reagent_lite.data.rows.columns import WRONG
from reagent_lite.data.rows.contract import ActionRule
from reagent_lite.data.rows.table import FEATURES, typed_table
from reagent_lite.errors import DataError, Problem
from reagent_lite.feature_ids import id_of
from reagent_lite.files import appearing_folder, disk_errors

if TYPE_CHECKING:
    from minari.data_collector import EpisodeBuffer

KEPT = (*EVENT_COLUMNS, "next_state_features", "terminal", "truncated")
"""Columns that a dataset has a place for."""
_EPISODES_AT_ONCE = 256
_EPISODE_BYTES = 1 << 16
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class MinariForm:
    """The name of a dataset and its columns.

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


@dataclass(slots=True)
class MinariCounts:
    """Rows and episodes written, and last rows dropped of episodes that merely stop."""

    rows: int = 0
    episodes: int = 0
    dropped: int = 0


def copy_to_minari(files: tuple[InputFile, ...], target: Path, form: MinariForm, progress: Show | None) -> MinariCounts:
    """Writes a log, each episode in one piece and in the order of its steps, as a dataset that appears whole.

    Raises:
        DataError: rows without episode or place in it, out of order, or with an unknown action; no episode to write; a
            target that cannot be written.
    """
    counts = MinariCounts()
    blocks = read_blocks(
        files, lambda block: (typed_table(block), block), [Position() for _ in files], progress, ALL_COLUMNS
    )
    errors = disk_errors(str(target), "a folder that can be written")
    # blocks are closed here and not by the garbage collector, in whose thread their pool might wait for itself
    with errors, closing(blocks), appearing_folder(target) as folder:
        storage = _new_storage(folder / "data", form)
        buffers = (_buffer(mdp_id, rows, form, counts) for mdp_id, rows in _episodes(blocks, form))
        written = (one for one in buffers if one is not None)
        while part := list(islice(written, _EPISODES_AT_ONCE)):
            _require_space(folder, sum(_bytes_of(buffer) for _, buffer in part))
            storage.update_episodes([buffer for _, buffer in part])
            numbers = range(counts.episodes, counts.episodes + len(part))
            storage.update_episode_metadata([{MDP_ID: mdp_id} for mdp_id, _ in part], numbers)
            counts.episodes += len(part)
    if not counts.episodes:
        raise DataError(Problem(files[0].path, "an episode that ends, or that has two rows", "none"))
    return counts


def _new_storage(folder: Path, form: MinariForm) -> Any:
    minari = require_minari()
    from gymnasium import spaces
    from minari.dataset.minari_storage import MinariStorage

    observation = spaces.Box(-np.inf, np.inf, (len(form.state_ids),), np.float32)
    action: spaces.Space[Any] = spaces.Box(-np.inf, np.inf, (len(form.action_ids),), np.float32)
    if form.actions is not None:
        action = spaces.Discrete(len(form.actions))
    storage = MinariStorage.new(folder, observation, action, _env_spec(form.env_id))
    names = {"state_ids": form.state_ids, "action_ids": form.action_ids, "action_names": form.actions}
    storage.update_metadata({"dataset_id": form.dataset_id, "minari_version": minari.__version__, OURS: names})
    return storage


def _env_spec(env_id: str | None) -> Any:
    if env_id is None:
        return None
    import gymnasium

    try:
        return gymnasium.spec(env_id)
    except gymnasium.error.Error as error:
        todo = "Leave env_id out: the dataset then has spaces alone"
        raise DataError(Problem("env_id", "an environment that is installed", f"{env_id!r}: {error}", todo)) from error


def _episodes(blocks: Iterable[tuple[pa.Table, Block]], form: MinariForm) -> Iterator[tuple[str, pa.Table]]:
    """Yields (mdp_id, rows) of each episode."""
    todo = "Sort the log by mdp_id and sequence_number"
    seen: set[str] = set()
    open_id: str | None = None
    parts: list[pa.Table] = []
    before = 0
    for table, block in blocks:
        rows = _checked(table, block, form)
        ids, sequence = rows["mdp_id"].to_pylist(), rows["sequence_number"].to_pylist()
        for mdp_id, group in groupby(range(len(ids)), ids.__getitem__):
            numbers = list(group)
            if mdp_id != open_id:
                if open_id is not None:
                    yield open_id, pa.concat_tables(parts)
                if mdp_id in seen:
                    expected, got = "the rows of each episode in one piece", f"more of episode {mdp_id!r}"
                    raise DataError(Problem(block.where(numbers[0]), expected, got, todo))
                seen.add(mdp_id)
                open_id, parts, before = mdp_id, [], sequence[numbers[0]] - 1
            for row in numbers:
                if sequence[row] <= before:
                    got = f"{sequence[row]} after {before}"
                    raise DataError(Problem(block.where(row), "sequence_number that rises in an episode", got, todo))
                before = sequence[row]
            parts.append(rows.slice(numbers[0], len(numbers)))
    if open_id is not None:
        yield open_id, pa.concat_tables(parts)


def _checked(table: pa.Table, block: Block, form: MinariForm) -> pa.Table:
    """Returns the columns in KEPT, each of one type in all blocks; names of actions as their index."""
    for name in EVENT_COLUMNS:
        values = table[name].to_pylist() if name in table.column_names else [None]
        if None in values:
            raise DataError(Problem(block.where(values.index(None)), f"a value in {name}, for Minari", "none"))
    action = table["action"]
    if form.actions is not None:
        rule = ActionRule(form.actions)
        codes = [rule.action(value) for value in action.to_pylist()]
        if WRONG in codes:
            row = codes.index(WRONG)
            raise DataError(Problem(block.where(row), rule.expected, repr(action[row].as_py())))
        action = pa.array(codes, pa.int64())

    def column(name: str, kind: pa.DataType) -> pa.ChunkedArray:
        return table[name].cast(kind) if name in table.column_names else pa.nulls(table.num_rows, kind)

    return pa.table(
        {
            "mdp_id": table["mdp_id"],
            "sequence_number": table["sequence_number"],
            "state_features": column("state_features", FEATURES),
            "next_state_features": column("next_state_features", FEATURES),
            "action": action,
            "reward": column("reward", pa.float64()),
            "terminal": column("terminal", pa.bool_()).fill_null(False),
            "truncated": column("truncated", pa.bool_()).fill_null(False),
        }
    )


def _buffer(mdp_id: str, rows: pa.Table, form: MinariForm, counts: MinariCounts) -> tuple[str, EpisodeBuffer] | None:
    """Returns an episode as Minari has it, or None where nothing of it is left, and counts its rows."""
    from minari.data_collector import EpisodeBuffer

    after = rows["next_state_features"].slice(len(rows) - 1)
    terminal = rows["terminal"].to_numpy()
    observations = _dense(rows["state_features"], form.state_ids)
    if after.null_count and not terminal[-1]:
        counts.dropped += 1
        rows, terminal = rows.slice(0, len(rows) - 1), terminal[:-1]
    else:
        observations = np.concatenate((observations, _dense(after, form.state_ids)))
    if not len(rows):
        return None
    counts.rows += len(rows)
    truncated = rows["truncated"].to_numpy().copy()
    truncated[-1] |= not terminal[-1]
    action = rows["action"].to_numpy() if form.actions is not None else _dense(rows["action"], form.action_ids)
    return mdp_id, EpisodeBuffer(
        observations=observations,
        actions=action,
        rewards=rows["reward"].to_numpy(),
        terminations=terminal,
        truncations=truncated,
    )


def _dense(maps: pa.ChunkedArray, ids: tuple[int, ...]) -> Floats:
    """Returns [n, ids] of maps, NaN where absent."""
    values = np.full((len(maps), len(ids)), np.nan, np.float32)
    array = maps.combine_chunks()
    offsets = np.asarray(array.offsets)
    part = slice(offsets[0], offsets[-1])
    row = np.repeat(np.arange(len(array)), np.diff(offsets))
    keys = array.keys[part].dictionary_encode()
    column = np.array([ids.index(id_of(key)) for key in keys.dictionary.to_pylist()], np.int64)
    values[row, column[np.asarray(keys.indices)]] = array.items[part]
    return values


def _bytes_of(episode: EpisodeBuffer) -> int:
    """Returns more than an episode takes in the file: 50 steps of 4 features take 15 KB."""
    arrays = (episode.observations, episode.actions, episode.rewards)
    return _EPISODE_BYTES + 4 * sum(np.asarray(one).nbytes for one in arrays)


def _require_space(folder: Path, size: int) -> None:
    """Raises OSError where the disk has no space left: HDF5 ends the process when it finds that out by itself."""
    space = folder / ".space"
    try:
        with space.open("wb") as stream:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(stream.fileno(), 0, size)
    finally:
        space.unlink(missing_ok=True)
