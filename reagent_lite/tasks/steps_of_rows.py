"""The last steps of each row's episode in files of any order, for a model that reads several steps.

1 read     features, episode and order of every row ─► a temporary file and a few numbers a row
2 order    rows by episode and sequence_number ─► the row before each
3 states   of a block: the rows before its rows, from the temporary file
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from reagent_lite.console import logger, progress
from reagent_lite.data.formats.blocks import Block, InputFile
from reagent_lite.data.formats.format_table import read_blocks, readers_of
from reagent_lite.data.rows.block_columns import column_of, flags
from reagent_lite.data.rows.faults import Faults
from reagent_lite.data.rows.hashes import hashes_of_codes
from reagent_lite.data.rows.maps import features
from reagent_lite.data.rows.row_rules import require_columns
from reagent_lite.data.rows.typed_columns import typed_column
from reagent_lite.export.bundle import Bundle
from reagent_lite.export.feature_set import stack_steps
from reagent_lite.whole_files import scratch_folder

_COLUMNS = ("mdp_id", "sequence_number", "terminal", "state_features")


@dataclass(frozen=True, slots=True)
class _BlockRows:
    """What is read of a block's n rows: features [n, F], codes of episodes, -1 without one, order, and ends."""

    location: tuple[int, int]
    values: NDArray[np.float32]
    episode: NDArray[np.uint64]
    has_episode: NDArray[np.bool_]
    sequence: NDArray[np.int64]
    ends: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsOfRows:
    """The steps before each of R rows.

    Attributes:
        values: [R, F] features of the rows, in a temporary file.
        previous: [R] number of the row before, -1 without one.
        first: {(number of a file, line of a block's first row): number of that row}.
        history: number of steps of a state.
    """

    values: NDArray[np.float32]
    previous: NDArray[np.int64]
    first: dict[tuple[int, int], int]
    history: int

    def states(self, block: Block) -> NDArray[np.float32]:
        """Returns the states [n, history * (1 + F)] of a block's rows."""
        start = self.first[_locate(block)]
        chain = [np.arange(start, start + block.table.num_rows)]
        for _ in range(self.history - 1):
            chain.append(np.where(chain[-1] < 0, -1, self.previous[chain[-1]]))
        rows = np.stack(chain[::-1], 1)
        steps = [self.values[row[row >= 0]] for row in rows]
        return stack_steps(steps, self.values.shape[1], self.history)


@contextmanager
def read_steps(bundle: Bundle, files: tuple[InputFile, ...]) -> Iterator[StepsOfRows | None]:
    """Yields the steps of the rows in files; None for a model that reads one step.

    Raises:
        DataError: rows have faults.
    """
    if bundle.history == 1:
        yield None
        return
    parts: list[_BlockRows] = []
    width = len(bundle.step_feature_ids)
    with scratch_folder() as folder:
        file = folder / "steps"
        first = {}
        count = 0
        with (
            file.open("wb") as spool,
            progress("reading steps", "bytes") as show,
            closing(read_blocks(files, partial(_read, bundle), show, readers_of(_COLUMNS))) as blocks,
        ):
            for block in blocks:
                first[block.location] = count
                count += len(block.values)
                spool.write(block.values.tobytes())
                parts.append(_without_values(block))
        values = np.zeros((count, 0), np.float32)
        if count * width:
            values = np.memmap(file, np.float32, "r", shape=(count, width))
        previous = _previous(parts)
        if (previous < 0).all():
            logger.warning(
                f"no row has a step before it in its episode, of which the model reads {bundle.history}: rows need "
                "mdp_id and sequence_number"
            )
        yield StepsOfRows(values=values, previous=previous, first=first, history=bundle.history)


def _locate(block: Block) -> tuple[int, int]:
    return block.file_number, int(block.lines[0])


def _read(bundle: Bundle, block: Block) -> _BlockRows:
    require_columns(block.table.column_names, ("state_features",), block.where(0))
    faults = Faults(block)
    column = partial(column_of, block)
    state, _ = features(column("state_features"), faults)
    names = typed_column(column("mdp_id"), faults).cast(pa.string()).dictionary_encode()
    codes = names.indices.fill_null(-1).to_numpy()
    sequence = typed_column(column("sequence_number"), faults).cast(pa.int64()).fill_null(0)
    ends = flags(column("terminal"), faults) == 1
    faults.require_none()
    return _BlockRows(
        location=_locate(block),
        values=np.ascontiguousarray(state.align(bundle.step_feature_ids), np.float32),
        episode=hashes_of_codes(codes, names.dictionary.to_pylist()),
        has_episode=codes >= 0,
        sequence=sequence.to_numpy(),
        ends=ends,
    )


def _without_values(block: _BlockRows) -> _BlockRows:
    return _BlockRows(block.location, block.values[:0], block.episode, block.has_episode, block.sequence, block.ends)


def _previous(parts: list[_BlockRows]) -> NDArray[np.int64]:
    """Returns the row before each in its episode, -1 at a start, after an end, and without mdp_id."""
    episode, has_episode, sequence, ends = (
        np.concatenate([getattr(part, name) for part in parts])
        for name in ("episode", "has_episode", "sequence", "ends")
    )
    order = np.lexsort((np.arange(len(sequence)), sequence, episode))
    before, after = order[:-1], order[1:]
    goes_on = has_episode[after] & has_episode[before] & (episode[before] == episode[after]) & ~ends[before]
    previous = np.full(len(order), -1)
    previous[after[goes_on]] = before[goes_on]
    return previous
