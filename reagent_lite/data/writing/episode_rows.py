"""Episodes in numpy as rows of a log in Arrow: logged decisions or transitions.

events       one row per decision, as a service logs it: state, possible actions, action and its probability
transitions  the same rows with next state, next action and its choices, as training reads them
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from reagent_lite.data.rows.typed_columns import list_array
from reagent_lite.errors import DataError, Problem

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSchema:
    """The columns of a log's rows.

    Attributes:
        transitions: whether each row has next state, next action and next choices; else rows are events, in which only
            the last row of an episode that a limit cut has next state and next choices.
        action_names: names of fixed actions that are written as names; empty for parametric logs.
        action_features: [K, F] features of fixed actions that are written as feature maps; None if candidates differ
            from row to row, and for names.
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
        mdp_ids: [E] names of the episodes.
        lengths: [E] number of rows of each episode.
        terminal: [E] whether the episode came to its true end; else a time limit cut it.
        state: [R, S]; uint8 of images.
        action: [R] index of the choice taken.
        reward, propensity: [R].
        mask: [R, K] the possible choices; None if all are.
        features: [R, K, F] features of candidates that differ from row to row; None if choices are fixed.
        last_state: [E, S] state after the last row.
        last_mask, last_features: [E, K] and [E, K, F], the choices in that state; not read for true ends.
    """

    mdp_ids: Sequence[str]
    lengths: Ints
    terminal: Mask
    state: Floats | Bytes
    action: Ints
    reward: Floats
    propensity: Floats
    mask: Mask | None
    features: Floats | None
    last_state: Floats | Bytes
    last_mask: Mask | None
    last_features: Floats | None


def episode_rows(block: EpisodeBlock, schema: LogSchema) -> pa.Table:
    """Returns the rows of a block: features as map<int64, float>, names as strings, choices as lists of either.

    Images are values of as many bytes as they have.

    Raises:
        DataError: a number that would be written is NaN or infinite.
    """
    _require_finite(block)
    num_rows = len(block.state)
    num_episodes = len(block.lengths)
    ends = block.lengths.cumsum()
    episode = np.repeat(np.arange(num_episodes), block.lengths)
    last = np.zeros(num_rows, bool)
    last[ends - 1] = True
    num_choices = block.features.shape[1] if block.features is not None else len(_fixed_actions(schema))
    mask = np.ones((num_rows, num_choices), bool) if block.mask is None else block.mask
    last_mask = np.ones((num_episodes, num_choices), bool) if block.last_mask is None else block.last_mask
    state = _states(block.state)
    last_state = _states(block.last_state)
    if block.features is None:
        action = _fixed_actions(schema).take(pa.array(block.action))
    else:
        action = _maps(block.features[np.arange(num_rows), block.action])
    possible = _choices(mask, block.features, schema)
    last_possible = _choices(last_mask & ~block.terminal[:, None], block.last_features, schema)
    columns = {} if schema.ds is None else {"ds": pa.repeat(schema.ds, num_rows)}
    columns |= {
        "mdp_id": pa.array(block.mdp_ids, pa.string()).take(pa.array(episode)),
        "sequence_number": pa.array(np.arange(num_rows) - np.repeat(ends - block.lengths, block.lengths)),
        "state_features": state,
        "action": action,
        "reward": pa.array(block.reward),
        "possible_actions": possible,
        "action_probability": pa.array(block.propensity),
    }
    if schema.transitions:
        # the following row or, after the last row of an episode, its last state, which is appended to the rows
        after = pa.array(np.where(last, num_rows + episode, np.arange(num_rows) + 1))
        columns |= {
            "next_state_features": pa.concat_arrays([state, last_state]).take(after),
            "next_action": action.take(pa.array(np.arange(num_rows) + 1, mask=last)),
            "possible_next_actions": pa.concat_arrays([possible, last_possible]).take(after),
            "time_diff": pa.array(np.ones(num_rows, np.int64)),
        }
    else:
        # only if a limit cut the episode: no row follows from which the next state could be taken
        cut = pa.array(episode, mask=~last | block.terminal[episode])
        columns |= {"next_state_features": last_state.take(cut), "possible_next_actions": last_possible.take(cut)}
    terminal = block.terminal[episode]
    columns |= {"terminal": pa.array(last & terminal), "truncated": pa.array(last & ~terminal)}
    return pa.table(columns)


def _require_finite(block: EpisodeBlock) -> None:
    episodes = np.arange(len(block.lengths))
    of_rows = np.repeat(episodes, block.lengths)
    written: list[tuple[str, NDArray[Any], Ints]] = [
        ("state_features", block.state, of_rows),
        ("reward", block.reward, of_rows),
        ("action_probability", block.propensity, of_rows),
        ("next_state_features", block.last_state, episodes),
    ]
    if block.features is not None and block.mask is not None:
        written.append(("possible_actions", np.where(block.mask[:, :, None], block.features, 0), of_rows))
    if block.last_features is not None and block.last_mask is not None:
        present = block.last_mask & ~block.terminal[:, None]
        last = np.where(present[:, :, None], block.last_features, 0)
        written.append(("possible_next_actions", last, episodes))
    for name, values, episode_of in written:
        wrong = np.argwhere(~np.isfinite(values)) if values.dtype != np.uint8 else np.zeros((0, 2), np.int64)
        if len(wrong):
            row, *indices = wrong[0].tolist()
            where = f"{name} of episode {block.mdp_ids[episode_of[row]]}" + "".join(f", {index}" for index in indices)
            got = str(values[(row, *indices)])
            raise DataError(Problem(where, "finite numbers", got, "The environment computed it: look at its step"))


def _fixed_actions(schema: LogSchema) -> pa.Array:
    if schema.action_features is None:
        return pa.array(schema.action_names, pa.string())
    return _maps(schema.action_features)


def _choices(mask: Mask, features: Floats | None, schema: LogSchema) -> pa.Array:
    """Returns lists of the possible choices, by mask [n, K]."""
    every = _fixed_actions(schema).take(pa.array(np.nonzero(mask)[1])) if features is None else _maps(features[mask])
    return list_array(every, mask.sum(1))


def _states(values: Floats | Bytes) -> pa.Array:
    if values.dtype != np.uint8:
        return _maps(values)
    rows, size = values.shape
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(size), rows, [None, pa.py_buffer(values.tobytes())])


def _maps(values: Floats | Bytes) -> pa.MapArray:
    """Returns the features of [n, F] with ids 0 to F - 1."""
    rows, size = values.shape
    ids = pa.array(np.tile(np.arange(size), rows))
    offsets = pa.array(np.arange(rows + 1, dtype=np.int32) * size)
    return pa.MapArray.from_arrays(offsets, ids, pa.array(values.reshape(-1)))
