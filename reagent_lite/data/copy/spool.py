"""Arrays that grow in files while a log is read, and are read in another order afterwards, chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

if TYPE_CHECKING:  # a simulation needs no pyarrow
    import pyarrow as pa

CHUNK_BYTES = 4 << 20
_AT_ONCE = 1 << 16
_FEWEST_AT_ONCE = 1 << 10
Indices = NDArray[np.integer[Any]]
"""Numbers of rows; int32 if they fit."""

K = TypeVar("K", int, str)


class Spool(Generic[K]):
    """The rows of a vector, or of a matrix that gets columns while it grows; only a chunk of it is in memory.

    Args:
        file: the file for the rows; `remove` removes it.
        dtype: type of the values.
        keys: {key: column} of a matrix, shared by spools that have the same columns; None for a vector. Missing values
            are NaN, or 0 for integers.

    Attributes:
        dtype: type of the values.
        num_rows: number of rows appended so far.
    """

    def __init__(self, file: Path, dtype: DTypeLike, keys: dict[K, int] | None = None) -> None:
        self._file = file
        self.dtype = np.dtype(dtype)
        self._keys: dict[K, int] | None = keys
        self._parts: list[tuple[int, ...]] = []  # shapes of runs of rows with the same width: (rows,) or (rows, width)
        self.num_rows = 0
        file.touch()

    def append(self, values: NDArray[Any], keys: tuple[K, ...] = ()) -> None:
        """Adds the rows of a block; the columns of a matrix are those of `keys`."""
        shape: tuple[int, ...] = ()
        if self._keys is not None:
            columns = [self._keys.setdefault(key, len(self._keys)) for key in keys]
            shape = (len(self._keys),)
            if columns != list(range(len(self._keys))):
                wide = np.full((len(values), len(self._keys)), self._absent, self.dtype)
                wide[:, columns] = values
                values = wide
        with self._file.open("ab") as stream:
            stream.write(_bytes(values, self.dtype))
        before = self._parts.pop()[0] if self._parts and self._parts[-1][1:] == shape else 0
        self._parts.append((before + len(values), *shape))
        self.num_rows += len(values)

    @property
    def width(self) -> int:
        """Number of columns of a matrix so far."""
        return len(self._keys or ())

    @property
    def _absent(self) -> float:
        return np.nan if self.dtype.kind == "f" else 0

    def gather_rows(self, rows: Indices) -> Iterator[NDArray[Any]]:
        """Yields chunks of the given rows, in their order; columns are in ascending order of their keys."""
        ascending: list[int] | None = None if self._keys is None else [self._keys[key] for key in sorted(self._keys)]
        widths = (0, *(part[1] for part in self._parts if len(part) > 1), *(column + 1 for column in ascending or ()))
        shape: tuple[int, ...] = () if ascending is None else (max(widths),)
        in_order = ascending is None or ascending == list(range(*shape))
        starts = np.cumsum([0, *(part[0] for part in self._parts)])
        offsets = np.cumsum([0, *(int(np.prod(part)) * self.dtype.itemsize for part in self._parts)])
        size = max(1, CHUNK_BYTES // max(1, self.dtype.itemsize * int(np.prod(shape))))
        for start in range(0, len(rows), size):
            chunk = rows[start : start + size]
            if [part[1:] for part in self._parts] == [shape]:
                values_of_chunk = np.take(self._map_part(0, 0), chunk, axis=0)
            else:
                values_of_chunk = np.full((len(chunk), *shape), self._absent, self.dtype)
                part_of = np.searchsorted(starts, chunk, side="right") - 1
                for part in np.unique(part_of):
                    inside = part_of == part
                    values = self._map_part(part, offsets[part])
                    values_of_chunk[inside, : values.shape[1]] = values[chunk[inside] - starts[part]]
            yield values_of_chunk if in_order else values_of_chunk[:, ascending]

    def whole(self, rows: Indices) -> NDArray[Any]:
        """Returns the given rows in memory."""
        none = np.empty((0,) if self._keys is None else (0, self.width), self.dtype)
        return np.concatenate([none, *self.gather_rows(rows)])

    def map_rows(self) -> NDArray[Any]:
        """Returns all rows of a vector, or of a matrix of one width, as a memory map that outlasts `remove`."""
        if not self._parts:
            return np.empty((0,) if self._keys is None else (0, self.width), self.dtype)
        assert len(self._parts) == 1
        return self._map_part(0, 0)

    def _map_part(self, part: int, offset: int) -> NDArray[Any]:
        """Returns a part as a memory map; its pages count as this process's memory while they are mapped."""
        shape = self._parts[part]
        if not np.prod(shape):
            return np.empty(shape, self.dtype)
        return np.asarray(np.memmap(self._file, self.dtype, "r", int(offset), shape))

    def remove(self) -> None:
        """Removes the file, if it exists."""
        self._file.unlink(missing_ok=True)


class TextSpool:
    """Strings that are appended to files.

    Args:
        file: the file for the strings; the positions of their ends are in a second one next to it.
    """

    def __init__(self, file: Path) -> None:
        self._text: Spool[int] = Spool(file, np.uint8)
        self._ends: Spool[int] = Spool(file.with_suffix(".ends"), np.int64)
        self._ends.append(np.zeros(1, np.int64))

    def __len__(self) -> int:
        return self._ends.num_rows - 1

    def append(self, texts: pa.Array) -> None:
        """Adds strings, none of which is null."""
        import pyarrow as pa

        large = texts.cast(pa.large_string())
        _, ends, text = large.buffers()
        if not len(large):
            return
        offsets = np.frombuffer(ends, np.int64)[large.offset : large.offset + len(large) + 1]
        if text is not None:
            self._text.append(np.frombuffer(text, np.uint8)[offsets[0] : offsets[-1]])
        self._ends.append(offsets[1:] - offsets[0] + self._text.num_rows - (offsets[-1] - offsets[0]))

    def map_texts(self) -> pa.Array:
        """Returns all strings as a memory-mapped array, which stays valid after `remove`."""
        import pyarrow as pa

        ends, text = (pa.py_buffer(spool.map_rows()) for spool in (self._ends, self._text))
        return pa.LargeStringArray.from_buffers(len(self), ends, text)

    def remove(self) -> None:
        """Removes the files, if they exist."""
        self._text.remove()
        self._ends.remove()


def write_npy(stream: IO[bytes], dtype: DTypeLike, shape: tuple[int, ...], chunks: Iterable[NDArray[Any]]) -> None:
    """Writes the content of a .npy file from chunks of its rows.

    Raises:
        OSError: the file cannot be written. Unlike numpy's own error, it has an errno.
    """
    dtype = np.dtype(dtype)
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(stream, header)
    for chunk in chunks:
        stream.write(_bytes(chunk, dtype))


def _bytes(values: NDArray[Any], dtype: np.dtype[Any]) -> memoryview | bytes:
    return np.ascontiguousarray(values, dtype).data.cast("B") if values.size else b""


def parts_of(count: int, width: int = 1) -> Iterator[slice]:
    """Yields consecutive slices of `count` rows, such that matrices [rows, width] of one of them are small."""
    rows = max(_AT_ONCE // max(width, 1), _FEWEST_AT_ONCE)
    for start in range(0, count, rows):
        yield slice(start, min(start + rows, count))
