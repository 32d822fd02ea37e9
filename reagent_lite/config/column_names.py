"""The columns of a log, each described once; `columns`: a log's own names for them."""

import codecs
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from reagent_lite.config.loader import check
from reagent_lite.config.section import Names, NoEffect, Section, checked_by, within
from reagent_lite.errors import ConfigError, Problem
from reagent_lite.feature_ids import id_of
from reagent_lite.raw_values import RawColumn, RawKind

ColumnKind = Literal[
    "text", "date", "order", "integer", "number", "value", "flag", "features", "metrics", "action", "actions", "any"
]
"""Kind of a column's values. order: integers or times; value: numbers, or strings of a category; features: {id: value};
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
    "weight": ContractColumn("number", event=False, training=False, decision=True),
}
"""Every column that a log may have; columns that training does not read are added to transitions by a timeline."""

UNIT = "unit"
"""Column of the unit that is drawn and resampled as one, such as a user or an hour."""
WEIGHT = "weight"
"""Column of how many decisions a row stands for, in a log from which rows were dropped by their outcome."""
ONLY_IF_NAMED = (UNIT, WEIGHT)
"""Columns that are only used if a config names them."""
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


def kind_of_column(name: str) -> ColumnKind:
    """Returns the kind of a column's values."""
    return COLUMNS[name].kind if name in COLUMNS else "any"


CSV = "csv"
"""Key of `columns` that says how CSV files are written."""
ONE_VALUE = ("", "currency", "percent")
"""Kinds of raw columns that are one value."""
Delimiter = Literal[",", ";", "\t", "|"]
Decimal = Literal[".", ","]


class CsvFormat(Section):
    """How the CSV files of a log are written."""

    delimiter: Delimiter | None = None
    """Sign between cells; absent: the one that gives the header the most cells."""
    decimal: Decimal | None = None
    """Decimal mark of numbers; the other mark may be between groups of three digits. Absent: a point, and next to
    another delimiter than the comma also a comma, without marks between groups."""
    null: Names = ()
    """Further strings of cells without a value, such as - or n/a."""
    encoding: str = "utf-8"
    """Encoding of the text, such as cp1252 or utf-16."""

    def rules(self) -> Iterator[Problem]:
        """Yields Problems for an unknown encoding, and for one sign with two purposes."""
        try:
            codecs.lookup(self.encoding).incrementaldecoder().decode(b"", True)
            "".encode(self.encoding)
        except (LookupError, TypeError, ValueError, AttributeError):
            yield self.wrong("encoding", "an encoding of text that Python knows, such as cp1252")
        if self.delimiter is not None and self.delimiter == self.decimal:
            yield self.wrong("decimal", "another sign than delimiter")


PLAIN_CSV = CsvFormat()


class RawColumnConfig(Section):
    """A column of a log whose values are not read as they are; see `raw_values.RawColumn`."""

    column: str = ""
    """Name of the column."""
    kind: RawKind = ""
    """date: its weekday; time: its weekday and hour; list: 0 or 1 for each of levels; currency, percent: a number."""
    format: str = ""
    """Format of dates and times as of Python's strptime, such as %d.%m.%Y; empty: ISO 8601."""
    unit: str = ""
    """Sign or code of the currency."""
    decimal: Decimal = "."
    """Decimal mark of amounts and per cent."""
    levels: Names = ()
    """Elements of lists that get a feature each; other elements are left out."""
    separator: Annotated[str, Field(min_length=1)] = "|"
    """Sign between elements of a list that is a text; a text that begins with [ is a list of JSON or of Python."""
    map: dict[str, str | float | None] = {}
    """Values that stand for others, {"Mail": "mail", "-": null}."""

    required = {"column": ("the name of a column",)}
    no_effect = (
        NoEffect(lambda config: config.kind not in ("date", "time"), ("format",), "absent unless kind is date or time"),
        NoEffect(lambda config: config.kind != "currency", ("unit",), "absent unless kind is currency"),
        NoEffect(
            lambda config: config.kind not in ("currency", "percent"),
            ("decimal",),
            "absent unless kind is currency or percent",
        ),
        NoEffect(lambda config: config.kind != "list", ("levels", "separator"), "absent unless kind is list"),
    )

    def rules(self) -> Iterator[Problem]:
        """Yields Problems for a column without a kind or map, a list without levels, and a map of maps."""
        if not self.kind and not self.map:
            yield self.wrong("kind", "a kind, or a map of values")
        if self.kind == "list" and not self.levels:
            yield self.wrong("levels", "the elements that get a feature each")
        for name in sorted(value for value in self.map.values() if isinstance(value, str) and value in self.map):
            if self.map[name] != name:
                yield self.wrong("map", f"{name!r} as a value or as another value's stand-in, not both")


def names_of(source: str | Mapping[str, Any] | Sequence[Any]) -> tuple[str, ...]:
    """Returns the columns that hold a field, or its features; none for CSV."""
    if isinstance(source, str):
        return (source,)
    if isinstance(source, Mapping):
        return (source["column"],) if "column" in source else ()
    return tuple(name for part in source for name in names_of(part))


def features_of(source: Sequence[Any]) -> tuple[str, ...]:
    """Returns the names of the features of a field with a list of columns."""
    return tuple(
        name for part in source for name in ((part,) if isinstance(part, str) else RawColumn.of(part).features)
    )


def _problems(columns: Mapping[str, Any]) -> Iterator[Problem]:
    """Yields unknown fields, lists for a field with a single column, duplicate columns, and faults of objects."""
    for field, source in columns.items():
        if field == CSV:
            yield from _object_problems(CsvFormat, source, field)
        elif field not in FIELDS:
            yield Problem(field, f"one of {', '.join(FIELDS)}", repr(field))
        elif isinstance(source, list) and field not in MAPS:
            yield Problem(field, "the name of one column", repr(source))
        elif not source:
            yield Problem(field, "names of columns", repr(source))
        elif problems := list(_source_problems(field, source)):
            yield from problems


def _source_problems(field: str, source: Any) -> Iterator[Problem]:
    parts = source if isinstance(source, list) else [source]
    problems = [
        problem
        for number, part in enumerate(parts)
        if isinstance(part, dict)
        for problem in _object_problems(RawColumnConfig, part, f"{field}.{number}" if parts is source else field)
    ]
    if problems:
        yield from problems
        return
    names = names_of(source)
    if not all(names):
        yield Problem(field, "names of columns", repr(source))
    elif len(set(names)) < len(names):
        yield Problem(field, "each column once", f"{next(name for name in names if names.count(name) > 1)!r} twice")
    elif isinstance(source, dict) and source.get("kind", "") not in ONE_VALUE:
        yield Problem(field, "a kind with one value: currency, percent or a map", repr(source["kind"]))
    elif isinstance(source, list):
        features = features_of(source)
        for name in features_of([part for part in source if isinstance(part, dict)]):
            try:
                id_of(name)
            except ValueError as error:
                yield Problem(field, str(error), repr(name))
        if len(set(features)) < len(features):
            twice = next(name for name in features if features.count(name) > 1)
            yield Problem(field, "each feature once", f"{twice!r} twice")


def _object_problems(model: type[Section], described: Any, where: str) -> Iterator[Problem]:
    if not isinstance(described, dict):
        yield Problem(where, "an object", repr(described))
        return
    try:
        check(model, described)
    except ConfigError as error:
        yield from (within(where, problem) for problem in error.problems)


Columns = Annotated[dict[str, str | list[str | dict[str, Any]] | dict[str, Any]], checked_by(_problems)]
"""{standard column: name of the log's column, or for features and metrics a list of columns}; a column whose
values are not read as they are is an object, see RawColumnConfig; `csv` is the format of CSV files, see CsvFormat."""
LogColumns = Annotated[
    Columns, Field(description="The log's own names for standard columns, as data.columns in training.")
]
