"""`columns`: a log's own names for the columns of the contract."""

from collections.abc import Iterator, Mapping

from reagent_lite.errors import Problem

MAPS = ("state_features", "next_state_features", "action", "next_action", "metrics")
FIELDS = (
    *("mdp_id", "sequence_number", "ds", "reward", "action_probability", "terminal", "truncated", "time_diff"),
    *("possible_actions", "possible_next_actions", *MAPS),
)
"""What a user's columns may stand for."""

Columns = dict[str, str | list[str]]
"""{field of the contract: name of the log's column; of features and metrics also the columns of the single ones}."""


def column_problems(path: str, columns: Mapping[str, str | list[str]]) -> Iterator[Problem]:
    """Yields fields that no log has, lists where one column is meant, and columns that are named twice."""
    for field, source in columns.items():
        where = f"{path}.{field}"
        if field not in FIELDS:
            yield Problem(where, f"one of {', '.join(FIELDS)}", repr(field))
        elif isinstance(source, list) and field not in MAPS:
            yield Problem(where, "the name of one column", repr(source))
        elif not source or not all(source):
            yield Problem(where, "names of columns", repr(source))
        elif isinstance(source, list) and len(set(source)) < len(source):
            twice = next(name for name in source if source.count(name) > 1)
            yield Problem(where, "each column once", f"{twice!r} twice")
