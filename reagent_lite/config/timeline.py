"""`timeline` and `query`: from logged decisions to transitions; the whole JSON of `workflows.timeline`."""

from collections.abc import Iterator
from contextlib import suppress
from datetime import date
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from reagent_lite.config.columns import COLUMNS, LogColumns
from reagent_lite.config.items import ITEM_ID, ItemId, Items
from reagent_lite.config.paths import DataPath
from reagent_lite.config.section import Fraction, LocalPath, Names, NoEffect, Number, Section, Share, checked_by
from reagent_lite.errors import Problem

RESERVED_COLUMNS = frozenset(
    {
        *(name for name, column in COLUMNS.items() if name not in ("reward", "metrics") and not column.alias_of),
        *("folder", "place", "part", "_folder", "_place", "_rule", "_file", "_line"),
    }
)
"""Columns a timeline makes itself, some of them on the way; they are no reward and no extra columns."""


def _date(text: str) -> Iterator[Problem]:
    with suppress(ValueError):
        if date.fromisoformat(text).isoformat() == text:  # not 20260131, which no partition is called
            return
    yield Problem("", "a date such as 2026-01-31", repr(text))


Date = Annotated[str, checked_by(_date)]


class TimelineSection(Section):
    """Timeline: how events become transitions. Keys in camelCase are those of 2019."""

    inputTableName: DataPath = ""
    """Events: a file or a folder of files, local or a URL, or a list of several logs."""
    outputTableName: LocalPath = ""
    """Folder the transitions to train on go to; it appears whole."""
    evalTableName: LocalPath | None = None
    """Folder of the transitions to evaluate on, from other episodes; absent: all episodes are trained on."""
    eval_percent: Annotated[float, Field(gt=0, lt=100)] = 10.0
    """Percent of the episodes, by hash of mdp_id, that go to evalTableName."""
    startDs: Date | None = None
    """First date partition `ds` that is read; absent: from the first on."""
    endDs: Date | None = None
    """Last date partition `ds` that is read; absent: up to the last."""
    actionDiscrete: bool = True
    """Actions are names; false: maps of features, for parametric DQN."""
    addTerminalStateRow: bool = False
    """Keep the last row of an episode that does not say how it ended, as a true end; false: leave it out."""
    numOutputShards: Annotated[int, Field(ge=1, le=10_000)] | None = None
    """Files of each output, an episode in one of them; absent: one for each 300,000 rows, so that machines can share
    them whole."""
    outlierEpisodeLengthPercentile: Fraction | None = None
    """Leave out episodes with more rows than this share of the episodes has at most."""
    percentileFunction: Literal["percentile", "percentile_approx"] = "percentile_approx"
    """percentile interpolates between lengths; percentile_approx takes a length that occurs. Both are exact here."""
    timeWindowLimit: Number | None = None
    """Leave out rows that are more than so much time after their episode's first; what follows a row stays."""
    includePossibleActions: bool = True
    """Write possible_actions and possible_next_actions."""
    rewardColumns: tuple[str, ...] = ("reward", "metrics")
    """Columns that a span of several steps sums up with its discount; reward is always among them."""
    extraFeatureColumns: tuple[str, ...] = ()
    """Further columns c that are carried along, each with next_c of the row that follows."""
    steps: Annotated[int, Field(ge=1, le=100)] = 1
    """Rows that a transition spans at most; what is left of the episode where that is less."""
    gamma: Share | None = None
    """Discount per row inside a span of several steps; required when steps is more than 1."""
    on_refused: Literal["error", "drop_episode"] = "error"
    """Rows that break a rule: end with an error that names them, or leave out their episodes and count."""

    no_effect: ClassVar[tuple[NoEffect, ...]] = (
        NoEffect(
            lambda section: section.evalTableName is None,
            ("eval_percent",),
            "absent without evalTableName",
            "Give evalTableName, the folder of the episodes set apart",
        ),
        NoEffect(
            lambda section: section.outlierEpisodeLengthPercentile is None,
            ("percentileFunction",),
            "absent without outlierEpisodeLengthPercentile",
        ),
        NoEffect(
            lambda section: section.steps == 1,
            ("gamma",),
            "absent while steps is 1",
            "Nothing is summed up: rl.gamma is the discount in training",
        ),
    )

    def rules(self) -> Iterator[Problem]:
        """Yields what is wrong beyond single keys; paths and gamma may come from elsewhere, as in a training config."""
        if self.evalTableName is not None and self.evalTableName.rstrip("/") == self.outputTableName.rstrip("/"):
            yield self.wrong("evalTableName", "another folder than outputTableName")
        if self.startDs is not None and self.endDs is not None and self.startDs > self.endDs:
            yield Problem("endDs", f"a date not before startDs ({self.startDs})", repr(self.endDs))
        yield from self._column_problems()

    def _column_problems(self) -> Iterator[Problem]:
        if "reward" not in self.rewardColumns:
            yield Problem("rewardColumns", "reward among them", str(list(self.rewardColumns)))
        for key, reserved in (("rewardColumns", set()), ("extraFeatureColumns", {"reward", "metrics"})):
            columns = getattr(self, key)
            names = [column.lower() for column in columns]  # as engines compare them
            for column, name in zip(columns, names, strict=True):
                if (name in RESERVED_COLUMNS | reserved) or (name != column and name in ("reward", "metrics")):
                    yield Problem(key, "columns that a timeline does not make itself", repr(column))
                if names.count(name) > 1 or not name:
                    yield Problem(key, "every name once, upper and lower case alike", repr(column))
        made = {f"next_{name.lower()}" for name in self.extraFeatureColumns}
        for name in sorted(made & {name.lower() for name in (*self.rewardColumns, *self.extraFeatureColumns)}):
            yield Problem("extraFeatureColumns", "no column that another one's next_ column is called", name)
        both = sorted(
            {name.lower() for name in self.rewardColumns} & {name.lower() for name in self.extraFeatureColumns}
        )
        if both:
            yield Problem("extraFeatureColumns", "no column of rewardColumns", ", ".join(map(repr, both)))


class QuerySection(Section):
    """Episodes to read, and the actions they may hold."""

    tableSample: Annotated[float, Field(gt=0, le=100)] = 100.0
    """Percent of the episodes, by hash of mdp_id."""
    actions: Names = ()
    """Names of the actions, in the order of the network's outputs; absent: whatever the events name."""


class EngineKeys(Section):
    """The engine: this machine, or an existing Spark."""

    engine: Literal["local", "duckdb", "spark"] = "local"
    """local works on this machine's cores and disk, and duckdb is its former name; spark needs reagent-lite[spark],
    Java 17 or newer, and executors whose Python, named by PYSPARK_PYTHON, has reagent-lite."""
    master: str | None = None
    """Address of Spark: spark://host:7077, local[4], yarn, k8s://..., or sc://host:15002 for Spark Connect."""
    memory_limit_mb: Annotated[int, Field(ge=100)] | None = None
    """Memory that events may take here before they go to the disk; absent: 60 % of what is free."""
    temporary_directory: str | None = None
    """Disk for what does not fit into memory, of this machine, or one that all machines of Spark see; absent: beside
    the output."""

    no_effect: ClassVar[tuple[NoEffect, ...]] = (
        NoEffect(
            lambda keys: keys.engine != "spark", ("master",), "absent without engine spark", 'Set engine to "spark"'
        ),
        NoEffect(
            lambda keys: keys.engine == "spark",
            ("memory_limit_mb",),
            "absent with engine spark",
            "Spark's own settings say what it may take",
        ),
    )

    def rules(self) -> Iterator[Problem]:
        """Yields a missing address of Spark."""
        if self.engine == "spark" and self.master is None:
            yield self.wrong("master", "a Spark master such as local[4], or sc://host of Spark Connect")


class TimelineConfig(EngineKeys):
    """`python -m workflows.timeline`: makes transitions of logged decisions, which it pairs by episode."""

    timeline: TimelineSection = TimelineSection()
    query: QuerySection = QuerySection()
    columns: LogColumns = {}
    items: Items = None
    item_id: ItemId = ITEM_ID

    no_effect: ClassVar[tuple[NoEffect, ...]] = (
        *EngineKeys.no_effect,
        NoEffect(
            lambda config: not config.timeline.actionDiscrete,
            ("query.actions",),
            "absent with actionDiscrete false",
            "Candidates have features, not names",
        ),
        NoEffect(
            lambda config: config.timeline.actionDiscrete,
            ("items",),
            "absent with actionDiscrete true",
            "Items have features; actions that are names have none",
        ),
        NoEffect(lambda config: config.items is None, ("item_id",), "absent without items"),
    )

    def rules(self) -> Iterator[Problem]:
        """Yields everything wrong beyond single keys."""
        yield from super().rules()
        timeline = self.timeline
        for key in ("inputTableName", "outputTableName"):
            if not getattr(timeline, key):
                yield self.wrong(f"timeline.{key}", "a path")
        if timeline.steps > 1 and timeline.gamma is None:
            yield self.wrong("timeline.gamma", f"the discount per row, as steps is {timeline.steps}")
