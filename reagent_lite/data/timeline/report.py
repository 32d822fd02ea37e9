"""The figures of a timeline, rows read, refused, left out and made, as errors, log lines, and its report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from reagent_lite.config.paths import show_paths
from reagent_lite.config.timeline_config import TimelineConfig
from reagent_lite.console import machine_logger
from reagent_lite.data.formats.blocks import InputFile
from reagent_lite.data.formats.frames import locations
from reagent_lite.data.log_shares import shares_in_words, shares_of
from reagent_lite.data.rows.row_rules import ALONE
from reagent_lite.data.timeline.event_spans import MAX_DUPLICATES, Counts
from reagent_lite.data.timeline.events import EventFacts
from reagent_lite.errors import DataError, NoRowsError, Problem, pluralize

_SHARE_OF_TIMES = 0.9
"""Sequence numbers are taken for times if more than this share of them is not one more than the previous number."""


def require_selected(config: TimelineConfig, facts: EventFacts) -> None:
    """Checks the events that were read.

    Raises:
        DataError: some rows are of episodes and others are single decisions, there is no column ds to select by, or
            rows break a rule, unless their episodes are left out.
        NoRowsError: no event has the selected dates.
    """
    timeline = config.timeline
    if 0 < facts.alone < facts.rows and not facts.served_alone:
        got = f"none, in {pluralize(facts.alone, 'row')}"
        raise DataError(Problem(facts.first_alone, "columns mdp_id and sequence_number, as other rows have", got))
    if timeline.startDs or timeline.endDs:
        if not facts.days:
            expected = "a column 'ds', as timeline.startDs or endDs is given"
            raise DataError(Problem(locations(timeline.inputTableName), expected, "none"))
        if not facts.selected:
            expected = f"events with ds from {timeline.startDs or 'the first'} to {timeline.endDs or 'the last'}"
            got = f"events from {facts.days[0]} to {facts.days[-1]}"
            raise NoRowsError(Problem(locations(timeline.inputTableName), expected, got, _small_sample(config)))
    if facts.faults.kinds and timeline.on_refused == "error":
        todo = 'Correct the log, or set timeline.on_refused to "drop_episode" to leave their episodes out'
        got = f"{facts.faults.count:,} that do not: {_by_rule(facts)}"
        total = Problem(locations(timeline.inputTableName), "rows that keep the rules", got, todo)
        raise DataError([*facts.faults.problems(), total])


def require_rows(config: TimelineConfig, facts: EventFacts, counts: Counts) -> None:
    """Checks that there is an episode without a refused row.

    Raises:
        NoRowsError: there is none.
    """
    if not counts.figures["rows"]:
        got = f"none of {pluralize(facts.rows, 'row')}" + (f": {_by_rule(facts)}" if facts.faults.kinds else "")
        total = Problem(locations(config.timeline.inputTableName), "events to pair", got, _small_sample(config))
        raise NoRowsError([*facts.faults.problems(), total])


def _small_sample(config: TimelineConfig) -> str:
    return "query.tableSample may be too small" if config.query.tableSample < 100 else ""


def _by_rule(facts: EventFacts) -> str:
    return ", ".join(f"{rows:,} {rule}" for rule, rows in facts.faults.by_rule())


def longest_rows(config: TimelineConfig, lengths: Callable[[], Mapping[int, int]]) -> float | None:
    """Returns the largest number of rows that an episode may have, None for any; logs how many are left out.

    Args:
        config: the config of the timeline.
        lengths: returns {number of rows: number of episodes without a refused row that have so many}.
    """
    share = config.timeline.outlierEpisodeLengthPercentile
    if share is None or not (pairs := sorted(lengths().items())):
        return None
    length, count = np.array(pairs, np.int64).T
    cumulative = np.cumsum(count)
    total = int(count.sum())
    if config.timeline.percentileFunction == "percentile":
        position = share * (total - 1)
        low, high = (length[np.searchsorted(cumulative, int(at), "right")] for at in (position, np.ceil(position)))
        longest = float(low + (high - low) * (position % 1))
    else:
        longest = float(length[np.searchsorted(cumulative / total, share)])
    longer = length > longest
    episodes = int(count[longer].sum())
    rows = int((count * length)[longer].sum())
    machine_logger.info(
        f"episodes of more than {longest:g} rows: {episodes:,} of {total:,}, left out with {pluralize(rows, 'row')}"
    )
    if abs(episodes / total - (1 - share)) > 0.1:
        text = f"outlierEpisodeLengthPercentile {share:g} leaves out {episodes / total:.1%} of the episodes"
        machine_logger.warning(f"{text}, not {1 - share:.1%}: many have the same length")
    return longest


def log_figures(config: TimelineConfig, facts: EventFacts, counts: Counts, files: Sequence[InputFile]) -> None:
    """Logs how many rows were refused, paired and left out."""
    figures = counts.figures
    first = _first_problems(facts)
    info = machine_logger.info
    warning = machine_logger.warning
    for rule, number in facts.faults.by_rule():
        text = f"{pluralize(number, 'row')} of {pluralize(counts.refused[rule], 'episode')} refused ({rule})"
        warning(f"{text}, their episodes are left out; {first.get(rule, '')}")
    if facts.alone == facts.rows:
        info(ALONE)
    if shares := shares_of(config.timeline.inputTableName, facts.logs):
        info(f"events by log: {shares_in_words(shares)}")
    rows = f"{pluralize(figures['paired_rows'], 'row')} in {pluralize(figures['episodes'], 'episode')}"
    ended = f"{pluralize(figures['terminal_rows'], 'true end')}, {figures['truncated_rows']:,} cut by a limit"
    gaps = pluralize(figures["gaps"], "gap")
    if figures["gaps"] > _SHARE_OF_TIMES * (figures["paired_rows"] - figures["episodes"]):
        gaps = "gaps not counted, as sequence_number is a time"
    info(f"{rows}, {ended}, {gaps}")

    def log(level: Callable[[str], None], figure: str, singular: str, plural: str, rest: str) -> None:
        if figures[figure]:
            level(f"{pluralize(figures[figure], singular, plural)} {rest}")

    lines = ", ".join(files[file].location(line) for file, line in counts.duplicates)
    lines += ", ..." if figures["duplicate_rows"] > MAX_DUPLICATES else ""
    rest = f"the mdp_id and sequence_number of another; the first of each is kept. Left out: {lines}"
    log(warning, "duplicate_rows", "row has", "rows have", rest)
    if facts.unlisted:
        text = pluralize(facts.unlisted, "row has", "rows have")
        info(f"{text} an empty possible_actions; the action taken is the only candidate there")
    ends = "last row has neither terminal nor truncated:", "last rows have neither terminal nor truncated:"
    if config.timeline.addTerminalStateRow:
        log(info, "last_rows_without_an_end", *ends, "addTerminalStateRow makes that a true end")
    else:
        rest = "left out, as it is not known what followed. Log one of them, or set addTerminalStateRow"
        log(warning, "last_rows_without_an_end", *ends, rest)
    rest = "no next_state_features, left out, as the state at the limit is not known. Log what was seen there"
    log(warning, "truncated_rows_without_next_state", "truncated row has", "truncated rows have", rest)
    rest = "no action and none that is possible: states after an end, with which the rows before them end"
    log(info, "states_after_an_end", "last row has", "last rows have", rest)
    rest = "a reward that no transition has. Log it in the row before, with the action that earned it"
    log(warning, "rewards_after_an_end", "state after an end has", "states after an end have", rest)
    rest = "an end inside an mdp_id; nothing is paired across it. Give each episode an mdp_id of its own"
    log(warning, "rows_after_an_end", "row follows", "rows follow", rest)


def _first_problems(facts: EventFacts) -> dict[str, str]:
    return {kind.rule: str(kind.first) for kind in reversed(facts.faults.kinds.values())}


def _reasons(config: TimelineConfig, facts: EventFacts, counts: Counts) -> str:
    """Returns how many rows were left out for each reason, as text."""
    figures = counts.figures
    missing = {
        "with the mdp_id and sequence_number of another": figures["duplicate_rows"],
        "last of an episode with neither terminal nor truncated": _without_an_end(config, counts),
        "last of an episode without a possible action, after its end": figures["states_after_an_end"],
        "truncated without next_state_features": figures["truncated_rows_without_next_state"],
        "in episodes of unusual length": counts.outliers["rows"],
        "refused or in a refused row's episode": facts.rows - figures["rows"] if facts.faults.kinds else 0,
    }
    return ", ".join(f"{number:,} {reason}" for reason, number in missing.items() if number)


def _without_an_end(config: TimelineConfig, counts: Counts) -> int:
    return 0 if config.timeline.addTerminalStateRow else counts.figures["last_rows_without_an_end"]


def none_complete(config: TimelineConfig, facts: EventFacts, counts: Counts) -> NoRowsError:
    """Returns the error of a log in which no event leads to a known state, with the reasons and advice."""
    todo = []
    if _without_an_end(config, counts):
        todo.append(
            "In the last row of an episode log terminal: true, or truncated: true with the next_state_features seen "
            "there; or set timeline.addTerminalStateRow. If each row is an independent decision, leave out the columns "
            "mdp_id and sequence_number"
        )
    if counts.figures["truncated_rows_without_next_state"]:
        todo.append("Log in next_state_features what was seen at the limit")
    got = f"none of {pluralize(facts.rows, 'event')}: {_reasons(config, facts, counts)}"
    expected = "events that lead to a known state or end"
    return NoRowsError(Problem(locations(config.timeline.inputTableName), expected, got, ". ".join(todo)))


def report_of(
    config: TimelineConfig, facts: EventFacts, longest: float | None, counts: Counts, rows: Sequence[int]
) -> dict[str, Any]:
    """Returns the report for manifests: rows read, refused, left out and made.

    Args:
        config: the config of the timeline.
        facts: facts about the events.
        longest: the result of `longest_rows`.
        counts: figures of the episodes.
        rows: number of rows of each output.
    """
    figures = counts.figures
    timeline = config.timeline
    reasons = _reasons(config, facts, counts)
    shares = shares_of(timeline.inputTableName, facts.logs)
    total = pluralize(facts.rows, "event")
    named = {int(feature): feature for feature in facts.features}
    state = {**dict.fromkeys(counts.ids.get("next_state_features", ()), 0), **counts.ids.get("state_features", {})}
    first = _first_problems(facts)
    return {
        "rows_in_files": facts.rows,
        **({"logs": {log: number for log, number, _ in shares}} if shares else {}),
        "refused": [
            {"rule": rule, "rows": number, "episodes": counts.refused[rule], "first": first.get(rule, "")}
            for rule, number in facts.faults.by_rule()
        ],
        **figures,
        "candidates_unknown_rows": facts.unlisted,
        "outliers": {} if longest is None else {"longest_rows": longest, **counts.outliers},
        "left_out": [f"{show_paths(timeline.inputTableName)}: of {total} left out by the timeline: {reasons}"]
        if reasons
        else [],
        "rows_beyond_time_window": figures["complete_rows"] - sum(rows),
        "train_rows": rows[0],
        "eval_rows": sum(rows[1:]),
        "state_features": {str(named.get(feature, feature)): number for feature, number in sorted(state.items())},
    }
