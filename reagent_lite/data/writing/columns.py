"""Episodes as columns of a log: one order of columns, two forms of values, JSON texts or Arrow's own.

In both forms a column is an Arrow array, so that what follows a row is taken from the row after it, and formatted once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from reagent_lite.data.formats.schema import from_indices
from reagent_lite.errors import DataError, Problem

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSchema:
    """What the rows of a log hold.

    Attributes:
        transitions: next state, next action and its choices in each row, as training reads them; else events, with the
            next state and its choices in the last row of an episode that was cut.
        action_names: of fixed actions that are written as names; empty for parametric logs.
        action_features: [K, F] of fixed actions that are written as feature maps; None where candidates differ from row
            to row, and for names.
        ds: date partition of events; None for no such column.
    """

    transitions: bool
    action_names: tuple[str, ...] = ()
    action_features: Floats | None = None
    ds: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeBlock:
    """E whole episodes one after the other, R rows.

    Attributes:
        mdp_ids: [E].
        lengths: [E] rows of each.
        terminal: [E] whether the episode came to its true end; else a time limit cut it.
        state: [R, S].
        action: [R] index of the choice taken.
        reward, propensity: [R].
        mask: [R, K] the choices that were there; None for all.
        features: [R, K, F] of candidates that differ from row to row; None where choices are fixed.
        last_state: [E, S] where the last row led.
        last_mask, last_features: [E, K] and [E, K, F], the choices there; what they say of true ends is not read.
    """

    mdp_ids: Sequence[str]
    lengths: Ints
    terminal: Mask
    state: Floats
    action: Ints
    reward: Floats
    propensity: Floats
    mask: Mask | None
    features: Floats | None
    last_state: Floats
    last_mask: Mask | None
    last_features: Floats | None


def require_finite(block: EpisodeBlock) -> None:
    """Checks that every number that would be written is one.

    Raises:
        DataError: naming the column, and the episode and place of the first that is not.
    """
    by_row = {"state_features": block.state, "reward": block.reward, "action_probability": block.propensity}
    by_episode = {"next_state_features": block.last_state}
    if block.features is not None and block.mask is not None:
        by_row["possible_actions"] = np.where(block.mask[:, :, None], block.features, np.float32(0))
    if block.last_features is not None and block.last_mask is not None:
        there = block.last_mask & ~block.terminal[:, None]
        by_episode["possible_next_actions"] = np.where(there[:, :, None], block.last_features, np.float32(0))
    for name, values in (by_row | by_episode).items():
        if np.isfinite(values).all():
            continue
        row, *place = (int(index) for index in np.argwhere(~np.isfinite(values))[0])
        episode = row if name in by_episode else int(np.searchsorted(block.lengths.cumsum(), row, "right"))
        where = f"{name} of episode {block.mdp_ids[episode]}" + "".join(f", {index}" for index in place)
        raise DataError(
            Problem(
                where, "finite numbers", str(values[(row, *place)]), "The environment computed it: look at its step"
            )
        )


def json_lines(block: EpisodeBlock, schema: LogSchema) -> memoryview:
    """Returns the rows as JSON objects, a line each; float32 numbers read back as themselves."""
    columns = _columns(block, schema, _TextForm())
    pieces: list[Any] = []
    for name, column in columns.items():
        pieces += [("," if pieces else "{") + json.dumps(name) + ":", column]
    lines = pc.binary_join_element_wise(*pieces, "}\n", "")
    _, offsets, text = lines.buffers()
    first, last = np.frombuffer(offsets, np.int32)[[lines.offset, lines.offset + len(lines)]]
    return memoryview(text)[int(first) : int(last)]


def table(block: EpisodeBlock, schema: LogSchema) -> pa.Table:
    """Returns the rows as an Arrow table: maps int -> float, names as strings, lists of them."""
    return pa.table(_columns(block, schema, _ArrowForm()))


class _Form(Protocol):
    """How values stand in a column."""

    def strings(self, values: Sequence[str | None]) -> pa.Array: ...

    def integers(self, values: Ints) -> pa.Array: ...

    def numbers(self, values: Floats) -> pa.Array: ...

    def flags(self, values: Mask) -> pa.Array: ...

    def maps(self, values: Floats) -> pa.Array:
        """Of features [n, F] with ids 0 to F - 1."""
        ...

    def lists(self, elements: pa.Array, counts: Ints) -> pa.Array:
        """Of counts [n] elements each."""
        ...

    def none(self, like: pa.Array) -> pa.Array:
        """One null of the type of another column."""
        ...


def _columns(block: EpisodeBlock, schema: LogSchema, form: _Form) -> dict[str, pa.Array]:
    num_rows, num_episodes = len(block.state), len(block.lengths)
    episode = np.repeat(np.arange(num_episodes), block.lengths)
    last = np.zeros(num_rows, bool)
    last[block.lengths.cumsum() - 1] = True
    every_row = np.zeros(num_rows, np.int64)
    mask = np.ones((num_rows, _num_choices(block, schema)), bool) if block.mask is None else block.mask
    state = form.maps(block.state)
    action, possible = _choices(block.action, mask, block.features, schema, form)
    columns = {} if schema.ds is None else {"ds": _take(form.strings([schema.ds]), every_row)}
    columns |= {
        "mdp_id": _take(form.strings(block.mdp_ids), episode),
        "sequence_number": form.integers(np.arange(num_rows) - np.repeat(block.lengths.cumsum() - block.lengths,
                                                                        block.lengths)),
        "state_features": state,
        "action": action,
        "reward": form.numbers(block.reward),
        "possible_actions": possible,
        "action_probability": form.numbers(block.propensity),
    }  # fmt: skip
    last_mask = np.ones((num_episodes, mask.shape[1]), bool) if block.last_mask is None else block.last_mask
    _, last_possible = _choices(None, last_mask & ~block.terminal[:, None], block.last_features, schema, form)
    last_state = form.maps(block.last_state)
    if schema.transitions:
        # the row after, and behind all rows the ends of the episodes
        after = np.where(last, num_rows + episode, np.arange(num_rows) + 1)
        columns |= {
            "next_state_features": _take(pa.concat_arrays([state, last_state]), after),
            "next_action": _take(pa.concat_arrays([action, form.none(action)]), np.where(last, num_rows, after)),
            "possible_next_actions": _take(pa.concat_arrays([possible, last_possible]), after),
            "time_diff": _take(form.integers(np.ones(1, np.int64)), every_row),
        }
    else:
        # only where a limit cut the episode: no row follows that would say where it led
        cut = np.where(last & ~block.terminal[episode], episode, num_episodes)
        columns |= {
            "next_state_features": _take(pa.concat_arrays([last_state, form.none(last_state)]), cut),
            "possible_next_actions": _take(pa.concat_arrays([last_possible, form.none(last_possible)]), cut),
        }
    terminal = last & block.terminal[episode]
    return columns | {"terminal": form.flags(terminal), "truncated": form.flags(last & ~terminal)}


def _num_choices(block: EpisodeBlock, schema: LogSchema) -> int:
    if block.features is not None:
        return int(block.features.shape[1])
    return len(schema.action_names) if schema.action_features is None else len(schema.action_features)


def _choices(
    action: Ints | None, mask: Mask, features: Floats | None, schema: LogSchema, form: _Form
) -> tuple[pa.Array, pa.Array]:
    """Returns (actions taken, or nothing; lists of possible ones) of rows with choices `mask` [n, K]."""
    if features is not None:
        elements = form.maps(features[mask])
        counts = mask.sum(1)
        if action is None:
            return None, form.lists(elements, counts)
        rank = mask.cumsum(1)[np.arange(len(mask)), action] - 1
        return _take(elements, counts.cumsum() - counts + rank), form.lists(elements, counts)
    fixed = form.strings(schema.action_names) if schema.action_features is None else form.maps(schema.action_features)
    # few patterns of what is open, many rows
    bits = np.packbits(mask, axis=1)
    _, first, pattern = np.unique(bits, axis=0, return_index=True, return_inverse=True)
    shown = mask[first]
    lists = form.lists(_take(fixed, np.nonzero(shown)[1]), shown.sum(1))
    return None if action is None else _take(fixed, action), _take(lists, pattern.reshape(-1))


class _TextForm:
    """JSON texts."""

    def strings(self, values: Sequence[str | None]) -> pa.Array:
        return pa.array([json.dumps(value) for value in values], pa.string())

    def integers(self, values: Ints) -> pa.Array:
        return from_indices(values).cast(pa.string())

    def numbers(self, values: Floats) -> pa.Array:
        texts = _floats(values).cast(pa.string())  # the shortest text that reads back as the same float32
        negative_zero = np.signbit(values) & (values == 0)
        # "-0" would be read as an integer, without its sign
        return pc.if_else(pa.array(negative_zero), "-0.0", texts) if negative_zero.any() else texts

    def flags(self, values: Mask) -> pa.Array:
        return _take(pa.array(["false", "true"]), values.astype(np.int64))

    def maps(self, values: Floats) -> pa.Array:
        if not values.shape[1]:
            return _take(pa.array(["{}"]), np.zeros(len(values), np.int64))
        pieces: list[Any] = []
        for index, column in enumerate(values.T):
            pieces += [("," if index else "{") + f'"{index}":', self.numbers(column)]
        return pc.binary_join_element_wise(*pieces, "}", "")

    def lists(self, elements: pa.Array, counts: Ints) -> pa.Array:
        return pc.binary_join_element_wise("[", pc.binary_join(_listed(elements, counts), ","), "]", "")

    def none(self, like: pa.Array) -> pa.Array:
        return pa.array(["null"], like.type)


class _ArrowForm:
    """Values of Arrow's types."""

    def strings(self, values: Sequence[str | None]) -> pa.Array:
        return pa.array(values, pa.string())

    def integers(self, values: Ints) -> pa.Array:
        return from_indices(values)

    def numbers(self, values: Floats) -> pa.Array:
        return _floats(values)

    def flags(self, values: Mask) -> pa.Array:
        return pa.array(values)

    def maps(self, values: Floats) -> pa.Array:
        rows, size = values.shape
        offsets = np.arange(rows + 1, dtype=np.int32) * size
        ids = pa.Array.from_buffers(
            pa.int32(), rows * size, [None, pa.py_buffer(np.tile(np.arange(size, dtype=np.int32), rows))]
        )
        return pa.MapArray.from_arrays(
            pa.Array.from_buffers(pa.int32(), len(offsets), [None, pa.py_buffer(offsets)]),
            ids,
            _floats(values.reshape(-1)),
        )

    def lists(self, elements: pa.Array, counts: Ints) -> pa.Array:
        return _listed(elements, counts)

    def none(self, like: pa.Array) -> pa.Array:
        return pa.nulls(1, like.type)


def _floats(values: Floats) -> pa.Array:
    return pa.Array.from_buffers(pa.float32(), len(values), [None, pa.py_buffer(np.ascontiguousarray(values))])


def _listed(elements: pa.Array, counts: Ints) -> pa.Array:
    offsets = np.concatenate(([0], counts.cumsum())).astype(np.int32)
    return pa.ListArray.from_arrays(
        pa.Array.from_buffers(pa.int32(), len(offsets), [None, pa.py_buffer(offsets)]), elements
    )


def _take(array: pa.Array, index: Ints) -> pa.Array:
    return array.take(from_indices(index.astype(np.int64, copy=False)))
