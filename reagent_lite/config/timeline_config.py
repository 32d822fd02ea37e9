"""`timeline` and `query`: pairing of logged decisions to transitions; the whole JSON of `workflows.timeline`."""

from collections.abc import Iterator
from contextlib import suppress
from datetime import date
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from reagent_lite.config.column_names import COLUMNS, ONLY_IF_NAMED, LogColumns
from reagent_lite.config.embedding_config import Embeddings
from reagent_lite.config.items import ITEM_ID, WITHOUT_ITEMS, ItemId, Items, PossibleItems
from reagent_lite.config.paths import FOR_SEVERAL_LOGS, DataPath, SameEpisodes
from reagent_lite.config.section import Fraction, LocalPath, Names, NoEffect, Number, Section, Share, checked_by
from reagent_lite.errors import Problem

RESERVED_COLUMNS = frozenset(
    {
        *(
            name
            for name, column in COLUMNS.items()
            if name not in ("reward", "metrics", *ONLY_IF_NAMED) and not column.alias_of
        ),
        *("folder", "place", "part", "_folder", "_place", "_rule", "_file", "_line"),
    }
)
"""Columns that a timeline computes, some of them temporary; they cannot be reward or extra columns."""


def _date(text: str) -> Iterator[Problem]:
    with suppress(ValueError):
        if date.fromisoformat(text).isoformat() == text:  # not 20260131: partitions are not named like that
            return
    yield Problem("", "a date such as 2026-01-31", repr(text))


Date = Annotated[str, checked_by(_date)]


class TimelineSection(Section):
    """Pairing of events to transitions. Keys in camelCase are those of ReAgent 2019."""

    inputTableName: DataPath = ""
    """Events: a file or a folder of files, local or a URL, or a list of several logs."""
    outputTableName: LocalPath = ""
    """Folder for the transitions to train on; it appears once it is complete."""
    evalTableName: LocalPath | None = None
    """Folder for the transitions to evaluate on, from other episodes; absent: all episodes are trained on."""
    eval_percent: Annotated[float, Field(gt=0, lt=100)] = 10.0
    """Percentage of the episodes, chosen by a hash of mdp_id, for evalTableName."""
    startDs: Date | None = None
    """First date partition `ds` to read; absent: the first one."""
    endDs: Date | None = None
    """Last date partition `ds` to read; absent: the last one."""
    actionDiscrete: bool = True
    """true: actions are names; false: actions are maps of features, for parametric DQN."""
    addTerminalStateRow: bool = False
    """If the last row of an episode has neither terminal nor truncated: true: keep it, as a terminal row; false: leave
    it out."""
    numOutputShards: Annotated[int, Field(ge=1, le=10_000)] | None = None
    """Number of files of each output; an episode is in one file. Absent: one for each 300,000 rows, so that machines
    can share whole files."""
    outlierEpisodeLengthPercentile: Fraction | None = None
    """Leave out episodes longer than this percentile of episode lengths, as a share: 0.99 for the 99th."""
    percentileFunction: Literal["percentile", "percentile_approx"] = "percentile_approx"
    """percentile: interpolates between lengths; percentile_approx: a length that occurs. Both are exact here."""
    timeWindowLimit: Number | None = None
    """Leave out rows later than this after the first row of their episode; they remain as next states of earlier
    rows."""
    includePossibleActions: bool = True
    """Write possible_actions and possible_next_actions."""
    rewardColumns: tuple[str, ...] = ("reward", "metrics")
    """Columns that a transition of several steps sums with the discount; reward must be among them."""
    extraFeatureColumns: tuple[str, ...] = ()
    """Further columns c to copy, each with next_c from the following row."""
    steps: Annotated[int, Field(ge=1, le=100)] = 1
    """Largest number of rows that a transition spans; near the end of an episode it spans fewer."""
    gamma: Share | None = None
    """Discount per row inside a transition of several steps; required if steps is more than 1."""
    on_refused: Literal["error", "drop_episode"] = "error"
    """Treatment of rows that break a rule. error: end with an error that names them; drop_episode: leave out their
    episodes and count them. Of a log of single decisions, each of which is an episode, training leaves out the rows."""

    no_effect: ClassVar[tuple[NoEffect, ...]] = (
        NoEffect(
            lambda section: section.evalTableName is None,
            ("eval_percent",),
            "absent without evalTableName",
            "Give evalTableName, the folder for these episodes",
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
            "Only used with several steps; the discount in training is rl.gamma",
        ),
    )

    def rules(self) -> Iterator[Problem]:
        """Yields Problems beyond single keys; paths and gamma may have defaults, as in a training config."""
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
                    yield Problem(key, "columns that a timeline does not compute", repr(column))
                if names.count(name) > 1 or not name:
                    yield Problem(key, "every name once, upper and lower case alike", repr(column))
        rewards = {name.lower() for name in self.rewardColumns}
        extras = {name.lower() for name in self.extraFeatureColumns}
        for name in sorted({f"next_{extra}" for extra in extras} & (rewards | extras)):
            yield Problem("extraFeatureColumns", "no column with the name of another column's next_ column", name)
        if both := sorted(rewards & extras):
            yield Problem("extraFeatureColumns", "no column of rewardColumns", ", ".join(map(repr, both)))


class QuerySection(Section):
    """Episodes to read, and their actions."""

    tableSample: Annotated[float, Field(gt=0, le=100)] = 100.0
    """Percentage of the episodes to read, chosen by a hash of mdp_id."""
    actions: Names = ()
    """Names of the actions, in the order of the network's outputs; absent: the names in the events."""


class TimelineConfig(Section):
    """`python -m workflows.timeline`: turns logged decisions into transitions."""

    engine: Literal["local", "duckdb", "spark"] = "local"
    """local: this machine's cores and disk; duckdb: former name of local. spark: an existing Spark; needs
    reagent-lite[spark], Java 17 or newer, and executors with reagent-lite in the Python that PYSPARK_PYTHON names."""
    master: str | None = None
    """Address of Spark: spark://host:7077, local[4], yarn, k8s://..., or sc://host:15002 for Spark Connect."""
    memory_limit_mb: Annotated[int, Field(ge=100)] | None = None
    """Memory for events on this machine, above which they go to the disk; absent: 60 % of the free memory."""
    temporary_directory: str | None = None
    """Folder for data that does not fit into memory, on this machine or on a disk that all machines of Spark see;
    absent: next to the output."""
    timeline: TimelineSection = TimelineSection()
    query: QuerySection = QuerySection()
    columns: LogColumns = {}
    same_episodes: SameEpisodes = None
    items: Items = None
    item_id: ItemId = ITEM_ID
    possible_items: PossibleItems = None
    embeddings: Embeddings = {}

    required: ClassVar = {"timeline.inputTableName": ("a path",), "timeline.outputTableName": ("a path",)}
    no_effect: ClassVar[tuple[NoEffect, ...]] = (
        NoEffect(
            lambda config: config.engine != "spark", ("master",), "absent without engine spark", 'Set engine to "spark"'
        ),
        NoEffect(
            lambda config: config.engine == "spark",
            ("memory_limit_mb",),
            "absent with engine spark",
            "Spark has its own settings for memory",
        ),
        NoEffect(lambda config: isinstance(config.timeline.inputTableName, str), ("same_episodes",), *FOR_SEVERAL_LOGS),
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
            "Items have features; named actions have none",
        ),
        WITHOUT_ITEMS,
    )

    def rules(self) -> Iterator[Problem]:
        """Yields Problems if the address of Spark or the discount is missing."""
        if self.engine == "spark" and self.master is None:
            yield self.wrong("master", "a Spark master such as local[4], or sc://host of Spark Connect")
        timeline = self.timeline
        if timeline.steps > 1 and timeline.gamma is None:
            yield self.wrong("timeline.gamma", f"the discount per row, as steps is {timeline.steps}")
