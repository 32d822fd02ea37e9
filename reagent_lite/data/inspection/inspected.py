"""The description of a log, as an object, as a table, and as lines of text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reagent_lite.config.column_names import names_of
from reagent_lite.data.formats.frames import location
from reagent_lite.data.inspection.fields import Guess
from reagent_lite.data.inspection.log_columns import LogColumn
from reagent_lite.data.result_frames import frame_of
from reagent_lite.errors import join_names, pluralize

if TYPE_CHECKING:
    from reagent_lite.data.result_frames import DataFrame

_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Inspected:
    """A log, described from its first rows.

    Attributes:
        path: the log.
        whole: whether all rows were read.
        columns: columns of the log.
        guesses: fields that columns may be and why, the strongest reasons first.
        fields: {standard column: the column that the config reads as it}; features are in the config.
        propensities: sentences about the plausibility of action probabilities.
        episodes: a sentence about the lengths of episodes; "" if they are unknown.
        config: a training config for the log; None if there is none, and `problems` say why.
        problems: reasons why there is no config.
        decide: choices left to the user.
    """

    path: str
    whole: bool
    columns: tuple[LogColumn, ...]
    guesses: tuple[Guess, ...]
    fields: dict[str, str]
    propensities: tuple[str, ...]
    episodes: str
    config: dict[str, Any] | None
    problems: tuple[str, ...]
    decide: tuple[str, ...]

    def __repr__(self) -> str:
        return "\n".join(self.lines())

    @property
    def rows(self) -> int:
        """Number of rows read."""
        return len(self.columns[0].values) if self.columns else 0

    @property
    def workflow(self) -> str:
        """Name of the workflow that the config is for."""
        return "dqn" if self.config and "actions" in self.config else "parametric_dqn"

    def facts(self) -> dict[str, dict[str, str | float | int | None]]:
        """Returns {column: its kind, share present, distinct values, and the field that the config reads it as}."""
        features = (
            [] if self.config is None else self.config.get("data", {}).get("columns", {}).get("state_features", [])
        )
        read_as = {column: field for field, column in self.fields.items()}
        if isinstance(features, list):
            read_as |= dict.fromkeys(names_of(features), "state_features")
        return {
            column.name: {
                "kind": column.kind,
                "present": round(column.share_present, 4),
                "distinct": column.distinct,
                "read_as": read_as.get(column.name),
            }
            for column in self.columns
        }

    @property
    def table(self) -> DataFrame:
        """The columns of the log, a row for each, as a frame of pandas."""
        may_be = {
            column.name: "; ".join(
                f"{guess.field}: {guess.why}" for guess in self.guesses if guess.column == column.name
            )
            for column in self.columns
        }
        notes = {column.name: column.note for column in self.columns}
        return frame_of(
            [
                {"column": name, **facts, "may_be": may_be[name], "note": notes[name]}
                for name, facts in self.facts().items()
            ]
        )

    def lines(self) -> Iterator[str]:
        """Yields the description as text, one line for each column and sentence."""
        part = "all of them" if self.whole else "the first ones"
        columns = pluralize(len(self.columns), "column")
        yield f"{location(self.path)}: {pluralize(self.rows, 'row')} read, {part}; {columns}"
        for column in self.columns:
            facts = f"{column.kind}, present in {column.share_present:.1%}, {column.distinct:,} distinct"
            shown = [value if len(value) <= 40 else f"{value[:37]}..." for value in list(column.counts)[:_SHOWN]]
            yield f"{column.name}: {facts}" + (f": {join_names(shown)}" if shown else "")
            for guess in self.guesses:
                if guess.column == column.name:
                    is_used = self.fields.get(guess.field) == column.name
                    yield f"  {'used as' if is_used else 'may be'} {guess.field}: {guess.why}"
            if column.note and column.name not in self.fields.values():
                yield f"  {column.note}"
        yield from self.propensities
        if self.episodes:
            yield self.episodes
        yield from (f"to decide: {choice}" for choice in self.decide)
        yield from (f"no config: {problem}" for problem in self.problems)
