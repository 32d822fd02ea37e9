"""Which standard columns the columns of a log may be, and why."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from reagent_lite.config.column_names import COLUMNS, Columns, names_of
from reagent_lite.data.inspection.log_columns import LogColumn

NAMES: dict[str, tuple[str, ...]] = {
    field: tuple(names.split())
    for field, names in {
        "mdp_id": "episode episode_id session session_id trajectory trajectory_id visit visit_id stay stay_id "
        "icustay_id user user_id customer customer_id patient patient_id",
        "sequence_number": "step t timestep seq sequence timestamp time at ts created_at date datetime",
        "state_features": "state features context observation obs",
        "next_state_features": "next_state next_features next_context next_observation next_obs",
        "action": "action_id action_name a arm chosen choice shown decision treatment variant offer offered sent "
        "item item_id product banner ad creative message campaign coupon promotion recommendation headline",
        "reward": "r click clicked clicks conversion converted response outcome revenue profit label y purchase "
        "purchased bought sold sale sales ordered subscribed success won opened retained renewed survived target gmv",
        "action_probability": "propensity propensity_score pscore prob probability action_prob p logging_probability "
        "logged_probability behavior_probability",
        "possible_actions": "candidates available_actions allowed_actions legal_actions choices actions",
        "next_action": "",
        "possible_next_actions": "",
        # those of true ends first: done often says the end of a record as well
        "terminal": "terminals terminated terminateds termination terminations is_terminal episode_terminals absorbing "
        "is_absorbing done dones is_done game_over end ends is_end end_of_episode episode_end last is_last final",
        "truncated": "truncateds truncation truncations is_truncated timeout timeouts time_limit time_limits timed_out",
        "metrics": "",
        "time_diff": "",
    }.items()
}
"""Names that logs use for the standard columns, the likeliest first."""
_KINDS: dict[str, tuple[str, ...]] = {
    "text": ("text", "integer"), "order": ("integer", "time"), "number": ("flag", "integer", "number"),
    "features": ("map", "list"), "metrics": ("map",), "action": ("text", "integer", "flag", "map"),
    "actions": ("list",),
}  # fmt: skip
_FLAGS_OF_ENDS = ("terminal", "truncated", *NAMES["terminal"], *NAMES["truncated"])
_NEGATIONS = ("not", "non", "no")
_FLAG = re.compile(r"(_|(?<=[a-z]))flags?$")
_PARTS_OF_EPISODES = ("step_type", "next_step_type", "is_first", "episode_start", "episode_starts")
_GIVEN = 4
_SAME = 3
_NAMED = 2
_LAST_WORD = 1


@dataclass(frozen=True, slots=True)
class Guess:
    """A field that a column may be.

    Attributes:
        field: standard column.
        column: column of the log.
        why: the reason.
        strength: strength of the reason; larger is stronger.
    """

    field: str
    column: str
    why: str
    strength: tuple[int, int]


def guesses_of(columns: Sequence[LogColumn], given: Columns) -> list[Guess]:
    """Returns the fields that each column may be, the strongest reasons first.

    Args:
        columns: columns of the log.
        given: {field: column} that the user gave.
    """
    guesses = []
    for column in columns:
        for field in NAMES:
            if field in given and not isinstance(given[field], list) and names_of(given[field]) == (column.name,):
                guesses.append(Guess(field, column.name, "columns says so", (_GIVEN, 0)))
            elif field in given or any(column.name in names_of(source) for source in given.values()):
                continue
            elif field in (column.name, COLUMNS[column.name].alias_of if column.name in COLUMNS else ""):
                guesses.append(Guess(field, column.name, "its name is the standard one", (_SAME, 0)))
            elif (column.name not in COLUMNS or column.name == "step") and fits(field, column):
                guesses += _by_name(field, column)
    return sorted(guesses, key=lambda guess: guess.strength, reverse=True)


def words_of(column: str) -> str:
    """Returns the words of a column's name in lower case, with _ between them: is_done for isDone."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])|[^0-9A-Za-z]+", "_", column).lower().strip("_")


def names_part_of_episode(column: str) -> bool:
    """Whether a column's name says where in an episode a row is otherwise than by ends: not_done, step_type."""
    words = words_of(column)
    return words in _PARTS_OF_EPISODES or _without_negation(words) in _FLAGS_OF_ENDS


def _without_negation(words: str) -> str:
    """Returns done for not_done, terminal for nonterminal, and "" for words without a negation."""
    split = words.removeprefix("non").split("_") if words.startswith("non") else words.split("_")
    rest = "_".join(word for word in split if word and word not in _NEGATIONS)
    return "" if rest == words else rest


def _by_name(field: str, column: LogColumn) -> list[Guess]:
    words = words_of(column.name)
    if COLUMNS[field].kind == "flag":
        if _without_negation(words):
            return []
        words = _FLAG.sub("", words)
    names = (field, *NAMES[field])
    values = f"its values are {_VALUES.get(column.kind, column.kind)}"
    if words in names:
        why = f"its name is {column.name!r} and {values}"
        return [Guess(field, column.name, why, (_NAMED, -names.index(words)))]
    last = words.rpartition("_")[2]
    if last in names and len(last) > 1 and not words.startswith("next_"):
        why = f"its name ends in {last!r} and {values}"
        return [Guess(field, column.name, why, (_LAST_WORD, -names.index(last)))]
    return []


_VALUES = {"flag": "true and false", "integer": "integers", "number": "numbers", "time": "times", "text": "strings",
           "map": "objects", "list": "lists"}  # fmt: skip


def fits(field: str, column: LogColumn) -> bool:
    """Whether the values of a column are of a field's kind; flags may also be 1 and 0, or yes and no."""
    kind = COLUMNS[field].kind
    if kind == "flag":
        return column.is_answers or (column.is_number and set(column.present) <= {0, 1})
    if field == "reward" and column.is_answers:
        return True
    return column.kind in _KINDS.get(kind, ())


def choose_fields(guesses: Sequence[Guess]) -> dict[str, str]:
    """Returns {field: column} by the strongest reasons; a column is used for at most one field."""
    fields: dict[str, str] = {}
    for guess in guesses:
        if guess.field not in fields and guess.column not in fields.values():
            fields[guess.field] = guess.column
    return fields
