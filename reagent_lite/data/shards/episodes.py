"""Episodes of rows: which rows belong together, whether they stand in one piece, and an order that a seed draws."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from numpy.typing import NDArray

from reagent_lite.data.copy.spool import chunks
from reagent_lite.data.formats.blocks import Block
from reagent_lite.data.formats.files import InputFile
from reagent_lite.data.formats.schema import filled, is_text, to_numpy
from reagent_lite.data.rows.columns import column_of, strings
from reagent_lite.data.rows.faults import Faults
from reagent_lite.data.shards.parquet_groups import damaged

_ID = "mdp_id"
_CHUNK_NAMES = 1 << 16


@dataclass(frozen=True, slots=True)
class Episodes:
    """The episodes of R rows; a row without mdp_id is an episode of its own.

    Attributes:
        codes: [R] int32 number of the mdp_id, -1 where there is none.
        names: the mdp_ids.
    """

    codes: NDArray[np.int32]
    names: pa.Array

    @classmethod
    def of(cls, chunks: list[pa.Array]) -> Episodes:
        """Returns the episodes of rows whose mdp_ids are given as dictionaries of strings."""
        if not chunks:
            return cls(np.zeros(0, np.int32), pa.array([], pa.string()))
        names = pa.concat_arrays([chunk.dictionary for chunk in chunks]).dictionary_encode()
        number = np.append(to_numpy(names.indices), -1)
        codes, row, first = np.empty(sum(map(len, chunks)), np.int32), 0, 0
        for chunk in chunks:  # one at a time: all of them at once take the memory of their codes again
            own = filled(chunk.indices, -1)
            codes[row : row + len(own)] = number[np.where(own < 0, -1, first + own)]
            row, first = row + len(own), first + len(chunk.dictionary)
        return cls(codes, names.dictionary)

    def starts(self) -> NDArray[np.int64] | None:
        """Returns the first row of each episode, or None where some episode does not stand in one piece."""
        codes = self.codes
        begins = np.ones(len(codes), bool)
        begins[1:] = (codes[1:] != codes[:-1]) | (codes[1:] < 0)
        starts = np.flatnonzero(begins)
        named = codes[starts]
        named = np.sort(named[named >= 0])
        return None if (named[1:] == named[:-1]).any() else starts

    def key(self, row: int, seed: int) -> int:
        """Returns what orders the row's episode among all."""
        code = int(self.codes[row])
        return order_key(f"row {row}" if code < 0 else f"id {self.names[code].as_py()}", seed)

    def ranked(self, *seed: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Returns ([R] rank of the row's episode in the order of its key, [E] rows of the episode of each rank)."""
        alone = np.flatnonzero(self.codes < 0)
        num_named, num_all = len(self.names), len(self.names) + len(alone)
        keys = np.empty(num_all, np.uint64)
        for start, stop in chunks(num_named, _CHUNK_NAMES):
            keys[start:stop] = [order_key(f"id {name}", *seed) for name in self.names[start:stop].to_pylist()]
        for start, stop in chunks(len(alone), _CHUNK_NAMES):
            named = [order_key(f"row {row}", *seed) for row in alone[start:stop].tolist()]
            keys[num_named + start : num_named + stop] = named
        order = np.argsort(keys, kind="stable")
        rank = np.empty(num_all, np.int32)
        rank[order] = np.arange(num_all, dtype=np.int32)
        own = self.codes.copy()
        own[alone] = num_named + np.arange(len(alone))
        sizes = np.bincount(own, minlength=num_all)[order]
        np.take(rank, own, out=own)
        return own, sizes


def order_key(name: str, *seed: int) -> int:
    """Returns a number that puts a name at a place among others that the seed draws."""
    return int.from_bytes(hashlib.md5(f"{seed} {name}".encode(), usedforsecurity=False).digest()[:8])


def parquet_ids(file: InputFile) -> list[pa.Array]:
    """Returns the mdp_ids of a Parquet file's rows as dictionaries of strings.

    Raises:
        DataError: a file that cannot be read.
    """
    try:
        with file.open() as stream:
            parquet = pa.parquet.ParquetFile(stream, read_dictionary=[_ID])
            if _ID not in parquet.schema_arrow.names:
                return [pa.nulls(parquet.metadata.num_rows, pa.string()).dictionary_encode()]
            table = parquet.read(columns=[_ID])
    except (pa.ArrowException, OSError) as error:
        raise damaged(file, error) from error
    kind = pa.dictionary(pa.int32(), pa.string())
    if table.schema.field(_ID).type == kind and not is_text(table.schema.field(_ID)):
        return list(table.column(_ID).chunks)
    found, row = [], 0
    for batch in table.to_batches():
        lines = np.arange(row + 1, row + 1 + batch.num_rows)
        found.append(ids_of(Block(file=file, file_number=0, table=pa.Table.from_batches([batch]), lines=lines)))
        row += batch.num_rows
    return found


def ids_of(block: Block) -> pa.Array:
    """Returns the mdp_ids of a block's rows as a dictionary of strings.

    Raises:
        DataError: values that are neither strings nor integers, with file and line.
    """
    faults = Faults(block)
    codes, names = strings(column_of(block, _ID), faults)
    faults.require_none()
    distinct = names.dictionary_encode()  # texts may name one id in two ways
    if len(distinct.dictionary) != len(names):
        codes = np.where(codes < 0, -1, filled(distinct.indices, -1)[codes])
        names = distinct.dictionary
    return pa.DictionaryArray.from_arrays(
        pa.array(codes.astype(np.int32), mask=codes < 0, type=pa.int32()), names.cast(pa.string())
    )
