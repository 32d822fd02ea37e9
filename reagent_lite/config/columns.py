"""The columns of a log, each described once; `columns`: a log's own names for them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from reagent_lite.config.section import checked_by
from reagent_lite.errors import Problem

ColumnKind = Literal[
    "text", "date", "order", "integer", "number", "value", "flag", "features", "metrics", "action", "actions", "any"
]
"""Kind of a column's values. order: integers or times; value: numbers, or texts of a category; features: {id: value};
metrics: {name: number}; action: a name, an index or features; actions: a list of them, or 0 and 1 per action."""


@dataclass(frozen=True, slots=True)
class ContractColumn:
    """One column of a log.

    Attributes:
        kind: the kind of its values.
        needed: "rows": every log has it; "events": every log of events has it; "ends": transitions have at least one
            such column; "": optional.
        late: the first rows of a JSON lines file may lack it, even if a config names it.
        event: whether events have it; transitions have every column.
        training: whether training reads it.
        decision: whether it describes a single decision; other columns tell which rows form an episode, or what
            follows a row.
        alias_of: name of the same column in events.
        renamable: whether a config may rename it.
    """

    kind: ColumnKind
    needed: str = ""
    late: bool = False
    event: bool = True
    training: bool = True
    decision: bool = False
    alias_of: str = ""
    renamable: bool = True


COLUMNS = {
    "mdp_id": ContractColumn("text", needed="events"),
    "sequence_number": ContractColumn("order", needed="events"),
    "sequence_number_ordinal": ContractColumn("any", event=False, training=False, renamable=False),
    "time_since_first": ContractColumn("any", event=False, training=False, renamable=False),
    "ds": ContractColumn("date", late=True, training=False, decision=True),
    "state_features": ContractColumn("features", needed="rows", decision=True),
    "next_state_features": ContractColumn("features", late=True),
    "action": ContractColumn("action", needed="rows", decision=True),
    "reward": ContractColumn("number", needed="rows", decision=True),
    "time_diff": ContractColumn("number", event=False),
    "step": ContractColumn("integer", event=False, renamable=False),
    "possible_actions": ContractColumn("actions", decision=True),
    "propensity": ContractColumn("number", event=False, decision=True, alias_of="action_probability", renamable=False),
    "action_probability": ContractColumn("number", decision=True),
    "metrics": ContractColumn("metrics", late=True, decision=True),
    "terminal": ContractColumn("flag", late=True, needed="ends"),
    "truncated": ContractColumn("flag", late=True),
    "possible_next_actions": ContractColumn("actions", late=True, needed="ends"),
    "next_action": ContractColumn("action", event=False, needed="ends"),
    "unit": ContractColumn("any", event=False, training=False, decision=True),
}
"""Every column that a log may have; columns that training does not read are added to transitions by a timeline."""

UNIT = "unit"
"""Column of what is drawn and resampled as one, such as a user or an hour; only used if a config names it."""
SERVED_COLUMNS = ("decision_id", "model", "items")
"""Further columns of the log of workflows.serve."""
TRAINING_COLUMNS = tuple(name for name, column in COLUMNS.items() if column.training)
TRANSITION_COLUMNS = tuple(name for name, column in COLUMNS.items() if column.needed == "rows")
EVENT_COLUMNS = tuple(name for name, column in COLUMNS.items() if column.needed in ("events", "rows"))
"""Columns of every log of transitions, and of every log of events."""
LATE_COLUMNS = tuple(name for name, column in COLUMNS.items() if column.late)
EPISODE_COLUMNS = tuple(name for name, column in COLUMNS.items() if not column.decision)
"""Columns that tell which rows form an episode, or what follows a row. In a log without any of them each row is an
independent decision."""
MAPS = tuple(name for name, column in COLUMNS.items() if column.kind in ("features", "metrics", "action"))
"""Columns that a log may spread over several columns, one for each feature or metric."""
FIELDS = tuple(name for name, column in COLUMNS.items() if column.renamable)
"""Columns that a config may rename."""


def kind_of(name: str) -> ColumnKind:
    """Returns the kind of a column's values."""
    return COLUMNS[name].kind if name in COLUMNS else "any"


def _problems(columns: Mapping[str, str | list[str]]) -> Iterator[Problem]:
    """Yields unknown fields, lists for a field with a single column, and duplicate columns."""
    for field, source in columns.items():
        if field not in FIELDS:
            yield Problem(field, f"one of {', '.join(FIELDS)}", repr(field))
        elif isinstance(source, list) and field not in MAPS:
            yield Problem(field, "the name of one column", repr(source))
        elif not source or not all(source):
            yield Problem(field, "names of columns", repr(source))
        elif isinstance(source, list) and len(set(source)) < len(source):
            twice = next(name for name in source if source.count(name) > 1)
            yield Problem(field, "each column once", f"{twice!r} twice")


Columns = Annotated[dict[str, str | list[str]], checked_by(_problems)]
"""{field of the contract: name of the log's column, or for features and metrics a list of columns}."""
LogColumns = Annotated[
    Columns, Field(description="The log's own names for columns of the contract, as data.columns in training.")
]
