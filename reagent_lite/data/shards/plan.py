"""Which row groups of Parquet files go to which shard.

groups      0 | 1 | 2 | 3 | 4 ...        groups that share an episode are tied
chains      [0] [1 2] [3] [4]            laid out in an order that the seed draws
laid out    [3] [0] | [1 2] [4]          cut at the episode's end nearest to each N-th of the rows

Files of a timeline never share an episode: each is a chain, and only those that a cut falls into are looked into.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reagent_lite.data.formats.files import InputFile
from reagent_lite.data.formats.reading import num_threads
from reagent_lite.data.shards.episodes import Episodes, order_key, parquet_ids
from reagent_lite.data.shards.parquet_groups import GroupedFile, open_groups
from reagent_lite.data.shards.rows import no_rows


@dataclass(frozen=True, slots=True)
class Slice:
    """Rows [start, stop) of a row group of a file."""

    file: int
    group: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """What goes where.

    Attributes:
        files: the input.
        shards: slices of each shard, in the order of its rows.
        rows: of the input.
        episodes: of the input; None where they were not counted.
    """

    files: tuple[GroupedFile, ...]
    shards: tuple[tuple[Slice, ...], ...]
    rows: int
    episodes: int | None


_Range = tuple[int, int]
"""Rows [first, end) of the input, file after file."""


def in_groups(files: Sequence[InputFile]) -> bool:
    """Whether all files have row groups."""
    return all(file.extension == ".parquet" and not file.compression for file in files)


def group_plan(files: Sequence[InputFile], num_shards: int, seed: int) -> GroupPlan | None:
    """Returns how row groups of Parquet files make shards, or None where some episode does not stand in one piece.

    Raises:
        DataError: a file that cannot be read.
        NoRowsError: files without rows.
    """
    with ThreadPoolExecutor(num_threads()) as pool:
        opened = tuple(pool.map(open_groups, files))
        episodes = Episodes.of([chunk for chunks in pool.map(parquet_ids, files) for chunk in chunks])
    if not len(episodes.codes):
        raise no_rows(files)
    starts = episodes.starts()
    if starts is None:
        return None
    chains = _chains(_file_bounds(opened) if len(files) >= num_shards else _group_bounds(opened), starts)
    laid = sorted(chains, key=lambda chain: episodes.key(chain[0], seed))
    shards = _cut(laid, num_shards, lambda chain: starts[np.searchsorted(starts, chain[0]) :])
    return _plan(opened, shards, len(starts))


def file_plan(files: Sequence[InputFile], num_shards: int, seed: int) -> GroupPlan | None:
    """Returns how files that never share an episode make shards, or None where an episode is not in one piece.

    Args:
        files: a timeline's, with the sha256 that its manifest says: they draw the order.
        num_shards: how many.
        seed: of the order.

    Raises:
        DataError: a file that cannot be read.
        NoRowsError: files without rows.
    """
    with ThreadPoolExecutor(num_threads()) as pool:
        opened = tuple(pool.map(open_groups, files))
    bounds = _file_bounds(opened)
    if not bounds[-1]:
        raise no_rows(files)
    number_of = {
        (start, stop): number
        for number, (start, stop) in enumerate(itertools.pairwise(bounds.tolist()))
        if start < stop
    }
    laid = sorted(number_of, key=lambda chain: order_key(f"file {files[number_of[chain]].sha256}", seed))
    starts_of: dict[_Range, NDArray[np.int64]] = {}
    for chain in _chains_to_cut(laid, num_shards):
        starts = Episodes.of(parquet_ids(files[number_of[chain]])).starts()
        if starts is None:
            return None
        starts_of[chain] = chain[0] + starts
    return _plan(opened, _cut(laid, num_shards, starts_of.__getitem__), None)


def _plan(opened: tuple[GroupedFile, ...], shards: Sequence[Sequence[_Range]], episodes: int | None) -> GroupPlan:
    bounds = _group_bounds(opened)
    places = [(file, number) for file, one in enumerate(opened) for number in range(len(one.rows))]
    slices = tuple(
        tuple(
            Slice(*places[group], start - int(bounds[group]), stop - int(bounds[group]))
            for group, start, stop in _by_group(rows, bounds)
        )
        for rows in shards
    )
    return GroupPlan(files=opened, shards=slices, rows=int(bounds[-1]), episodes=episodes)


def _group_bounds(opened: Sequence[GroupedFile]) -> NDArray[np.int64]:
    """Returns the first row of each group, and the end of the last."""
    return np.cumsum([0, *(rows for one in opened for rows in one.rows)])


def _file_bounds(opened: Sequence[GroupedFile]) -> NDArray[np.int64]:
    """Returns the first row of each file, and the end of the last."""
    return np.cumsum([0, *(sum(one.rows) for one in opened)])


def _chains(bounds: NDArray[np.int64], starts: NDArray[np.int64]) -> list[_Range]:
    """Returns the ranges of rows between bounds of groups or files at which an episode starts."""
    inner = np.unique(bounds[bounds < bounds[-1]])
    free = inner[starts[np.searchsorted(starts, inner, "right") - 1] == inner]
    return list(zip(free.tolist(), [*free[1:].tolist(), int(bounds[-1])], strict=True))


def _wanted(laid: Sequence[_Range], num_shards: int) -> list[tuple[int, float]]:
    """Returns for each cut the number of the chain it falls into, and how far into it, in rows."""
    ends = np.cumsum([stop - start for start, stop in laid])
    found = []
    for number in range(1, num_shards):
        wanted = int(ends[-1]) * number / num_shards
        chain = min(int(np.searchsorted(ends, wanted, "right")), len(laid) - 1)
        first, last = laid[chain]
        found.append((chain, wanted - (int(ends[chain]) - (last - first))))
    return found


def _chains_to_cut(laid: Sequence[_Range], num_shards: int) -> list[_Range]:
    return [laid[chain] for chain in sorted({chain for chain, into in _wanted(laid, num_shards) if into > 0})]


def _cut(
    laid: Sequence[_Range], num_shards: int, starts_of: Callable[[_Range], NDArray[np.int64]]
) -> list[list[_Range]]:
    """Returns the ranges of rows of each shard.

    Args:
        laid: chains, in their order.
        num_shards: how many.
        starts_of: returns the first row of each episode of a chain, ascending, and maybe of later ones; asked only
            about chains that a cut falls into.
    """
    ends = np.cumsum([stop - start for start, stop in laid])
    cuts = [0]
    for chain, into in _wanted(laid, num_shards):
        first, last = laid[chain]
        offset, near = int(ends[chain]) - (last - first), [first]
        if into > 0:
            starts = starts_of(laid[chain])
            after = int(np.searchsorted(starts, first + into, "right"))
            near = [int(starts[after - 1]), min(last, int(starts[after])) if after < len(starts) else last]
        cuts.append(offset + min(near, key=lambda one: abs(one - first - into)) - first)
    cuts.append(int(ends[-1]))
    shards = []
    for begin, end in itertools.pairwise(cuts):
        ranges = []
        for (first, last), stop in zip(laid, ends.tolist(), strict=True):
            offset = stop - (last - first)
            low, high = max(begin, offset), min(end, stop)
            if low < high:
                ranges.append((first + low - offset, first + high - offset))
        shards.append(ranges)
    return shards


def _by_group(ranges: Sequence[_Range], bounds: NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """Returns (group, first row, end) of ranges of rows."""
    found = []
    for start, stop in ranges:
        group = int(np.searchsorted(bounds, start, "right")) - 1
        while start < stop:
            end = min(stop, int(bounds[group + 1]))
            if end > start:
                found.append((group, start, end))
            start, group = end, group + 1
    return found
