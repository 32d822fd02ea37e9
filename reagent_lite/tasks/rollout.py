"""Compare two served policies by the files of their log.

1 read     rows of a rollout, and its events if a server wrote them
2 compare  unit by unit, as the server did
3 audit    the figures of each event, and those of the same number of units; the propensities of the rows
"""

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from reagent_lite.config.loader import check
from reagent_lite.config.rollout_config import ComparisonConfig, RolloutConfig
from reagent_lite.console import logger
from reagent_lite.errors import DataError, Problem, join_names, needing, pluralize
from reagent_lite.evaluation.policy_comparison import Comparer, RolloutComparison, UnitCollector, Units, find_unmeasured

if TYPE_CHECKING:
    from reagent_lite.data.result_frames import DataFrame
    from reagent_lite.data.rollout_rows import RolloutRows


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedPolicies:
    """The comparison; printed as the last line of standard output.

    Attributes:
        rollout: id of the rollout; "" if the log names none.
        comparison: decision, sentence and all figures.
        rows: number of rows of the rollout.
        waiting_units: number of units that do not count yet, as they or earlier ones have not ended.
        late_rows: number of rows of units that had ended.
        wrong_propensities: number of rows whose propensity is not that of a unit that stays with its policy.
        events: number of events of the rollout in the log.
        different_events: number of events whose figures are not those of the files; None if the policies are compared
            with other settings than the server's.
        seconds: total wall-clock time of the run.
    """

    rollout: str
    comparison: RolloutComparison
    rows: int
    waiting_units: int
    late_rows: int
    wrong_propensities: int
    events: int
    different_events: int | None
    seconds: float

    @property
    def history(self) -> "DataFrame":
        """The intervals as a frame of pandas, with a row for each outcome after some numbers of units."""
        from reagent_lite.data.result_frames import frame_of

        return frame_of([asdict(point) for point in self.comparison.history])


def compare(config: RolloutConfig) -> ComparedPolicies:
    """Compares the policies of a rollout.

    Raises:
        ConfigError: the settings in the log's events are not valid.
        DataError: the log has no rows of the rollout, or some with faults.
    """
    with needing("data", "log"):
        from reagent_lite.data.logs import Log
        from reagent_lite.data.rollout_rows import rollout_rows
        from reagent_lite.data.served_log import rollout_events
    start = time.monotonic()
    events = rollout_events(config.log) if isinstance(config.log, str) else []
    rollout = config.rollout or next((event["rollout"] for event in reversed(events) if "rollout" in event), "")
    events = [event for event in events if event.get("rollout") == rollout]
    recorded = _read_recorded(events)
    settings = config.comparison or recorded or ComparisonConfig()
    is_audit = recorded is None or settings == recorded
    comparer = Comparer(settings)
    collector = UnitCollector(settings.gamma, settings.episode_seconds)
    figures = {event["figures"]["units"]: event for event in events if "figures" in event} if is_audit else {}
    different = 0
    log = Log(config.log, same_episodes=True)  # servers of one rollout share its units
    with closing(rollout_rows(log.files, list(settings.guardrails))) as blocks:
        has_times = True
        for rows in _only(blocks, rollout):
            has_times = has_times and rows.decided is not None
            different += _add(comparer, collector.add(rows), figures)
    if not has_times:
        different += _add(comparer, collector.end_all(), figures)
    for number, what in (
        (collector.wrong_propensities, "propensity that is not that of a unit that stays with its policy"),
        (collector.late_rows, "unit that had ended"),
    ):
        if number:
            logger.warning(f"{pluralize(number, 'row')} with a {what}")
    for name in find_unmeasured(list(settings.guardrails), collector):
        logger.warning(f"no row has the metric {name}: its limit cannot be exceeded; check its name")
    if different:
        logger.warning(f"{pluralize(different, 'event')} with other figures than the files of the log")
    comparison = comparer.comparison()
    logger.info(comparison.sentence)
    return ComparedPolicies(
        rollout=rollout,
        comparison=comparison,
        rows=collector.rows,
        waiting_units=collector.waiting,
        late_rows=collector.late_rows,
        wrong_propensities=collector.wrong_propensities,
        events=len(events),
        different_events=different if is_audit else None,
        seconds=round(time.monotonic() - start, 3),
    )


def _read_recorded(events: list[dict[str, Any]]) -> ComparisonConfig | None:
    """Returns the settings of the server that wrote the log; None if no event has them."""
    recorded = (event["comparison"] for event in events if isinstance(event.get("comparison"), dict))
    settings = next(recorded, None)
    return None if settings is None else check(ComparisonConfig, settings)


def _only(blocks: "Iterator[RolloutRows]", rollout: str) -> "Iterator[RolloutRows]":
    """Yields the rows of one rollout.

    Raises:
        DataError: there are none, or rows of several if none is named.
    """
    names = dict[str, None]()
    for rows in blocks:
        names |= dict.fromkeys(rows.rollout)
        if not rollout and len(names) > 1:
            raise DataError(Problem("rollout", "the id of one rollout", join_names(names), "Give one of them"))
        if rollout and set(rows.rollout) - {rollout}:
            rows = rows.of(rollout)
        if rows.unit:
            yield rows
    if rollout and rollout not in names:
        raise DataError(Problem("rollout", f"one of {join_names(names)}", repr(rollout)))


def _add(comparer: Comparer, units: Units, events: dict[int, dict[str, Any]]) -> int:
    """Adds units; returns the number of events on the way whose figures differ."""
    start = different = 0
    before = comparer.units
    for count in sorted(number for number in events if before < number <= before + len(units.share)):
        comparer.add(units.part(start, count - before))
        start = count - before
        different += events[count]["figures"] != comparer.comparison().figures()
    comparer.add(units.part(start, len(units.share)))
    return different
