"""What a training copy has to hold of logged transitions, in plain Python: the rules of a row once more."""

from __future__ import annotations

import datetime
import decimal
import hashlib
import json
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
from helpers.logs import Row

from reagent_lite.data.copy.training_copy import TrainingCopy

Actions = tuple[str, ...]
Features = dict[str, np.float32]


ANSWERS = {"true": True, "false": False}  # as rewards


def number_of(value: Any) -> np.float32:
    """True and false count as 1 and 0."""
    assert isinstance(value, bool | int | float | np.number | np.bool_ | decimal.Decimal), value
    return np.float32(float(value))


def code_of_text(text: str) -> np.float32:
    """The bits of a float32 from 2^-63 on, by 30 bits of a hash: 6 of the exponent's bits are 64 to 191, 23 any."""
    exponent, fraction = divmod(
        int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") // 4, 2**23
    )
    return np.float32((1 + fraction / 2**23) * 2.0 ** (exponent - 63))


def features_of(value: Row | list[Any] | None) -> Features:
    """Null and NaN count as absent; texts are categories. A list of numbers is a map of their places."""
    if isinstance(value, list | np.ndarray):
        value = dict(enumerate(value))
        assert not any(isinstance(cell, str) for cell in value.values())
    numbers = {
        str(name): code_of_text(cell) if isinstance(cell, str) else number_of(cell)
        for name, cell in (value or {}).items()
        if cell is not None
    }
    return {name: number for name, number in numbers.items() if not np.isnan(number)}


def action_of(value: Any, actions: Actions) -> int:
    """An integer is an index, a string a name or else an index; a next action of "" or beyond the actions is none."""
    if value is None or value == "":
        return -1
    assert isinstance(value, int | float | str | np.integer), value
    index = actions.index(value) if value in actions else value if isinstance(value, int) else int(float(value))
    return index if index < len(actions) else -1


def mask_of(listed: list[Any] | str | None, actions: Actions) -> list[int]:
    """0 or 1 per action, or names, also as JSON in a string; without a list every action is possible."""
    listed = json.loads(listed) if isinstance(listed, str) else listed
    if listed is None:
        return [1] * len(actions)
    names = all(isinstance(entry, str) for entry in listed)
    return [int(name in listed) for name in actions] if names else [int(entry) for entry in listed]


def is_true(flag: object) -> bool:
    """Strings that say yes or no are flags, as they are rewards."""
    return flag.lower() in ("true", "t", "yes", "y", "on") if isinstance(flag, str) else bool(flag)


def is_terminal(row: Row, actions: Actions | None) -> bool:
    """By terminal; else, if no limit cut the episode, by what is possible next; else by the next action."""
    if row.get("terminal") is not None:
        return is_true(row["terminal"])
    if is_true(row.get("truncated")):
        return False
    listed, after = row.get("possible_next_actions"), row.get("next_action")
    if listed is not None:
        return not any(mask_of(listed, actions)) if actions else not listed
    return action_of(after, actions) == -1 if actions else not after or not features_of(after)


def text_of(value: Any) -> str:
    """An mdp_id that is a number counts by its digits."""
    return value if isinstance(value, str) else str(int(value))


def sequence_of(value: Any) -> int:
    """Dates and times count as microseconds since 1970."""
    if not isinstance(value, str | datetime.date):
        return int(value)
    time = pd.Timestamp(value)
    return int((time.tz_localize("UTC") if time.tzinfo is None else time).as_unit("us").asm8.view("i8"))


def first_known(*values: Any) -> Any:
    return next(value for value in values if value is not None)


def order_of(rows: list[Row]) -> list[int]:
    """By (mdp_id, sequence_number) where the log has both; behind them rows without mdp_id, episodes of their own."""
    ids, numbers = ([row.get(name) for row in rows] for name in ("mdp_id", "sequence_number"))
    places = range(len(rows))
    if all(value in (None, "") for value in ids) or all(value is None for value in numbers):
        return list(places)
    keys = [
        (True, "", place) if ids[place] in (None, "") else (False, text_of(ids[place]), sequence_of(numbers[place]))
        for place in places
    ]
    return sorted(places, key=keys.__getitem__)


def check_copy(copy: TrainingCopy, rows: list[Row], actions: Actions | None, *, in_file_order: bool = True) -> None:
    """Holds every array of a copy to the rows of a log; `actions`: None of parametric rows."""
    order = order_of(rows)
    assert len(copy) == len(rows)
    assert not in_file_order or np.argsort(np.argsort(copy.origin_line)).tolist() == order
    lists = [_named(copy.action_ids, copy.candidates[begin:end]) for begin, end in pairwise(copy.list_offsets.tolist())]
    assert len({json.dumps([sorted(map(str, features.items())) for features in each]) for each in lists}) == len(lists)
    states = _named(copy.state_ids, copy.state)
    for at, number in enumerate(order):
        row = rows[number]
        terminal = is_terminal(row, actions)
        unlisted = actions is None and row.get("possible_actions") == []  # the action is the only choice that is known
        measured = features_of(row.get("metrics"))
        expected = {
            "sequence": sequence_of(first_known(row.get("sequence_number"), number)),
            "reward": number_of(ANSWERS.get(row["reward"], row["reward"])),
            "time_diff": number_of(first_known(row.get("time_diff"), 0)),
            "propensity": number_of(
                1 if unlisted else first_known(row.get("propensity"), row.get("action_probability"), 1)
            ),
            "bootstrap": not terminal,
            "truncated": is_true(row.get("truncated")),
            "metrics": [measured.get(name, 0) for name in copy.metric_names],
        }
        if actions is None:
            _check_candidates(copy, at, row, lists, terminal=terminal)
        else:
            expected |= {
                "action": action_of(row.get("action"), actions),
                "mask": mask_of(row.get("possible_actions"), actions),
                "next_action": -1 if terminal else action_of(row.get("next_action"), actions),
                "next_mask": [0] * len(actions) if terminal else mask_of(row.get("possible_next_actions"), actions),
            }
        assert {name: getattr(copy, name)[at].tolist() for name in expected} == expected
        assert measured.keys() <= set(copy.metric_names)
        assert states[at] == features_of(row["state_features"])
        if terminal:
            assert (copy.next_index[at], copy.follows[at]) == (at, False)
            continue
        after = features_of(row["next_state_features"])
        later = rows[order[at + 1]] if at + 1 < len(rows) else {}
        same = (
            not {None, ""} & {row.get("mdp_id"), later.get("mdp_id")}
            and text_of(row["mdp_id"]) == text_of(later["mdp_id"])
            and _texts(after) == _texts(features_of(later["state_features"]))
        )
        assert copy.next_index[at] == at + 1 if same else copy.next_index[at] >= len(rows)
        assert states[copy.next_index[at]] == after
        assert copy.follows[at] == (same and copy.sequence[at + 1] > expected["sequence"])


def check_arrays(copy: TrainingCopy, rows: Any = slice(None), **expected: list[Any]) -> None:
    """Holds arrays of a copy, or some of their rows, to lists."""
    np.testing.assert_equal({name: getattr(copy, name)[rows].tolist() for name in expected}, expected)


def check_same(copy: TrainingCopy, other: TrainingCopy) -> None:
    """Two copies of the same rows, whatever files they were read from."""
    for name, value in vars(copy).items():
        if isinstance(value, np.ndarray) and name not in ("origin_file", "origin_line"):
            np.testing.assert_array_equal(value, getattr(other, name), err_msg=name)
    assert (copy.state_ids, copy.action_ids, copy.metric_names) == (
        other.state_ids,
        other.action_ids,
        other.metric_names,
    )


def _check_candidates(copy: TrainingCopy, at: int, row: Row, lists: list[list[Features]], *, terminal: bool) -> None:
    now = _distinct(row.get("possible_actions") or [row["action"]])
    assert lists[copy.actions_list[at]] == now
    assert copy.action[at] == now.index(features_of(row["action"]))
    after = [] if terminal else _distinct(first_known(row.get("possible_next_actions"), [row.get("next_action")]))
    assert lists[copy.next_list[at]] == after
    unknown = terminal or row["next_action"] is None
    assert copy.next_action[at] == (-1 if unknown else after.index(features_of(row["next_action"])))


def _distinct(candidates: list[Row | None]) -> list[Features]:
    features = [features_of(candidate) for candidate in candidates]
    return [candidate for number, candidate in enumerate(features) if candidate not in features[:number]]


def _named(ids: tuple[int, ...], rows: Any) -> list[Features]:
    return [
        {str(feature_id): value for feature_id, value in zip(ids, row, strict=True) if not np.isnan(value)}
        for row in rows
    ]


def _texts(features: Features) -> dict[str, str]:
    """Minus zero is another state than zero."""
    return {name: str(value) for name, value in features.items()}
