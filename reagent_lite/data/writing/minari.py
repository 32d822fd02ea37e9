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
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from reagent_lite.config.columns import EVENT_COLUMNS
from reagent_lite.data.formats.blocks import Block, Position, Show
from reagent_lite.data.formats.files import InputFile
from reagent_lite.data.formats.minari import MDP_ID, OURS, require_minari
from reagent_lite.data.formats.reading import read_blocks
from reagent_lite.data.formats.schema import valid_rows
from reagent_lite.data.rows.columns import NONE, column_of, flags, sequence_numbers, texts
from reagent_lite.data.rows.contract import ActionRule, finite, require_columns, require_present
from reagent_lite.data.rows.faults import Faults
from reagent_lite.data.rows.maps import features
from reagent_lite.errors import DataError, Problem
from reagent_lite.files import appearing_folder, disk_errors

if TYPE_CHECKING:
    from minari.data_collector import EpisodeBuffer

KEPT = (*EVENT_COLUMNS, "next_state_features", "terminal", "truncated")
"""Columns that a dataset has a place for."""
_EPISODES_AT_ONCE = 256
_EPISODE_BYTES = 1 << 16
Steps = dict[str, NDArray[Any]]
"""Rows of a log by what they hold, dense."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MinariForm:
    """The name of a dataset and its columns.

    Attributes:
        dataset_id: (namespace/)name(-vN).
        env_id: id of a Gymnasium environment, which must be installed then; None for none.
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
    blocks = read_blocks(files, partial(_steps_of, form), [Position() for _ in files], progress)
    errors = disk_errors(str(target), "a folder that can be written")
    # blocks are closed here and not by the garbage collector, in whose thread their pool might wait for itself
    with errors, closing(blocks), appearing_folder(target) as folder:
        storage = _new_storage(folder / "data", form)
        buffers = (_buffer(mdp_id, steps, counts) for mdp_id, steps in _episodes(blocks))
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


def _steps_of(form: MinariForm, block: Block) -> tuple[Block, Steps]:
    """Returns the checked rows of a block."""
    require_columns(block.table.column_names, EVENT_COLUMNS, block.where(0))
    faults, column = Faults(block), partial(column_of, block)
    ids = texts(column("mdp_id"), faults)
    sequence, placed = sequence_numbers(column("sequence_number"), faults)
    state, known = features(column("state_features"), faults)
    after, is_after_known = features(column("next_state_features"), faults)
    if form.actions is None:
        of_features, taken = features(column("action"), faults)
        action: NDArray[Any] = of_features.aligned(form.action_ids)
    else:
        action = ActionRule(form.actions).codes(column("action"), faults)
        taken = action != NONE
    reward = finite(column("reward"), faults, required=True)
    terminal, truncated = (flags(column(name), faults) == 1 for name in ("terminal", "truncated"))
    given = {"mdp_id": valid_rows(ids), "sequence_number": placed, "state_features": known, "action": taken}
    for name, present in given.items():
        require_present(name, present, faults)
    faults.require_none()
    return block, {
        "mdp_id": np.array(ids.to_pylist(), object),
        "sequence": sequence,
        "state": state.aligned(form.state_ids),
        "action": action,
        "reward": reward,
        "terminal": terminal,
        "truncated": truncated,
        "after": after.aligned(form.state_ids),
        "is_after_known": is_after_known,
    }


def _episodes(blocks: Iterable[tuple[Block, Steps]]) -> Iterator[tuple[str, Steps]]:
    """Yields (mdp_id, rows) of each episode."""
    todo = "Sort the log by mdp_id and sequence_number"
    seen: set[str] = set()
    parts: list[Steps] = []
    for block, steps in blocks:
        ids, sequence = steps["mdp_id"], steps["sequence"]
        bounds = np.concatenate(([0], np.flatnonzero(ids[1:] != ids[:-1]) + 1, [len(ids)]))
        for start, stop in pairwise(bounds.tolist()):
            numbers = sequence[start:stop]
            if parts and parts[-1]["mdp_id"][-1] == ids[start]:
                numbers = np.concatenate((parts[-1]["sequence"][-1:], numbers))
            elif parts:
                yield _joined(parts)
                parts = []
            if not parts and ids[start] in seen:
                expected, got = "the rows of each episode in one piece", f"more of episode {ids[start]!r}"
                raise DataError(Problem(block.where(start), expected, got, todo))
            falling = np.flatnonzero(np.diff(numbers) <= 0)
            if len(falling):
                at = int(falling[0])
                where, got = block.where(stop - len(numbers) + at + 1), f"{numbers[at + 1]} after {numbers[at]}"
                raise DataError(Problem(where, "sequence_number that rises in an episode", got, todo))
            seen.add(ids[start])
            parts.append({name: values[start:stop] for name, values in steps.items()})
    if parts:
        yield _joined(parts)


def _joined(parts: list[Steps]) -> tuple[str, Steps]:
    return parts[0]["mdp_id"][0], {name: np.concatenate([one[name] for one in parts]) for name in parts[0]}


def _buffer(mdp_id: str, steps: Steps, counts: MinariCounts) -> tuple[str, EpisodeBuffer] | None:
    """Returns an episode as Minari has it, or None where nothing of it is left, and counts its rows."""
    from minari.data_collector import EpisodeBuffer

    observations = np.concatenate((steps["state"], steps["after"][-1:]))
    if not (steps["is_after_known"][-1] or steps["terminal"][-1]):
        counts.dropped += 1
        observations, steps = steps["state"], {name: values[:-1] for name, values in steps.items()}
    if not len(steps["reward"]):
        return None
    counts.rows += len(steps["reward"])
    truncated = steps["truncated"].copy()
    truncated[-1] |= not steps["terminal"][-1]
    return mdp_id, EpisodeBuffer(
        observations=observations,
        actions=steps["action"],
        rewards=steps["reward"],
        terminations=steps["terminal"],
        truncations=truncated,
    )


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
