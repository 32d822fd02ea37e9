"""From logged decisions to transitions: what is read, what is refused, how rows pair up, and what is written.

1 load      files ─► checked rows with their faults ─► relation events      rows/table.py, engine.py
2 take      date partitions, sample of episodes                             pairs.py
3 refuse    rows with a fault: an error, or their episodes are left out
4 single    one row per (mdp_id, sequence_number), no outlier episodes
5 pair      each row with what follows it, up to `steps` rows
6 write     folders of Parquet that appear whole, each with the report in its manifest
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet

from reagent_lite.config.timeline import TimelineConfig
from reagent_lite.console import machine_logger, progress
from reagent_lite.data.formats.files import InputFile
from reagent_lite.data.rows.contract import Contract
from reagent_lite.data.stage import InputState, StageManifest, states_of
from reagent_lite.data.timeline.engine import CheckedEvents, Engine
from reagent_lite.data.timeline.pairs import FIGURES, Pairing, further_columns, reward_columns
from reagent_lite.data.writing.part_files import part_name
from reagent_lite.errors import MAX_PROBLEMS, DataError, NoRowsError, Problem, counted
from reagent_lite.files import appearing_folder

KIND = "timeline"
ROWS_PER_FILE = 300_000
VERSION = 2
"""Of the transformation: folders made by another version are made again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """Keys of the maps in the events.

    Attributes:
        state: feature ids of states, {id: rows that have a value}.
        action_ids, metric_names: of candidates and of metrics, ascending.
    """

    state: dict[int, int]
    action_ids: tuple[int, ...]
    metric_names: tuple[str, ...]


def settings_of(config: TimelineConfig) -> dict[str, Any]:
    """Returns what a timeline's rows depend on beside the events: not who makes them, and not where they go."""
    timeline = config.timeline.model_dump(mode="json")
    for key in ("inputTableName", "outputTableName"):
        del timeline[key]
    timeline["evalTableName"] = config.timeline.evalTableName is not None
    columns = {"columns": config.columns} if config.columns else {}
    return {"version": VERSION, "timeline": timeline, "query": config.query.model_dump(mode="json"), **columns}


def output_folders(config: TimelineConfig) -> tuple[Path, ...]:
    """Returns the folders a timeline makes: to train on, and to be judged on where that is asked for."""
    paths = (config.timeline.outputTableName, config.timeline.evalTableName)
    return tuple(Path(path).expanduser().absolute() for path in paths if path is not None)


def make_timeline(config: TimelineConfig, engine: Engine, files: tuple[InputFile, ...]) -> tuple[StageManifest, ...]:
    """Makes the folders of a timeline, and returns their manifests.

    Args:
        config: what to make.
        engine: that does it.
        files: the events.

    Raises:
        DataError: files that cannot be read, rows that break a rule (up to 20 of them, and how many there are), no
            rows, a disk without room; no folder has changed then.
    """
    with progress("reading events", "bytes", enabled=True) as show:
        events = engine.load(files, contract_of(config), show)
    work = _Work(config, engine, events)
    relation, report = work.checked()
    features = work.features(relation)
    count = config.timeline.numOutputShards or -(-report["complete_rows"] // ROWS_PER_FILE) or 1
    query, names = work.pairing(features.metric_names).result(relation, count)
    with ExitStack() as stack:
        folders = [stack.enter_context(appearing_folder(target)) for target in output_folders(config)]
        with progress("pairing and writing transitions", engine.unit, enabled=True) as show:
            written = engine.write(query, names, folders, count, report["complete_rows"], show)
        report = _finished(config, report, written, features)
        _require_unchanged(files)
        inputs = states_of(files, events.hashes)
        manifests = tuple(
            _describe(config, folder, rows, use, inputs, features, report)
            for folder, rows, use in zip(folders, written, ("train", "eval"), strict=False)
        )
    return manifests


def contract_of(config: TimelineConfig) -> Contract:
    """Returns what the rows of the events must be."""
    return Contract(
        actions=config.query.actions if config.timeline.actionDiscrete else None,
        events=True,
        extra=further_columns(config),
        rewards=reward_columns(config),
        dated=bool(config.timeline.startDs or config.timeline.endDs),
    )


@dataclass(frozen=True, slots=True)
class _Work:
    """The relations of one timeline, made one after the other."""

    config: TimelineConfig
    engine: Engine
    events: CheckedEvents

    def pairing(self, metric_names: tuple[str, ...] = ()) -> Pairing:
        return Pairing(config=self.config, array=self.engine.array, events=self.events, metric_names=metric_names)

    def checked(self) -> tuple[str, dict[str, Any]]:
        """Returns the relation whose rows are paired, and the report so far."""
        pairing, report = self.pairing(), dict[str, Any]()
        self._require_dates()
        self.engine.name("taken", pairing.taken("events"))
        ((report["rows_in_files"],),) = self.engine.rows("SELECT COUNT(*) FROM events")
        report["refused"] = self._refused()
        unbroken = "SELECT * FROM taken"
        if report["refused"]:
            broken = "SELECT mdp_id FROM taken WHERE fault IS NOT NULL AND mdp_id IS NOT NULL"
            unbroken += f" WHERE mdp_id IS NOT NULL AND mdp_id NOT IN ({broken})"
        self.engine.name("unbroken", unbroken)
        figures, relation = self._figures("unbroken"), "unbroken"
        self._require_rows(figures, report)
        report["rows"], report["duplicate_rows"] = figures["rows"], figures["duplicate_rows"]
        if figures["duplicate_rows"]:
            relation = self._without_duplicates(figures["duplicate_rows"])
        relation, report["outliers"] = self._without_outliers(relation)
        if relation != "unbroken":
            figures = self._figures(relation)
        report |= {name: figures[name] for name in FIGURES if name not in ("rows", "duplicate_rows")}
        report["paired_rows"] = figures["rows"]
        incomplete = 0 if self.config.timeline.addTerminalStateRow else figures["last_rows_without_an_end"]
        report["complete_rows"] = figures["rows"] - incomplete - figures["truncated_rows_without_next_state"]
        self._log_figures(figures)
        return relation, report

    def features(self, relation: str) -> Features:
        """Returns the keys of all maps."""
        after, actions = self._keys("next_state_features", relation), set[Any]()
        if not self.config.timeline.actionDiscrete:
            candidates = f"(SELECT EXPLODE(possible_actions) AS c FROM {relation}) candidates"
            actions = {*self._keys("action", relation), *self._keys("c", candidates)}
        return Features(
            state=dict.fromkeys(after, 0) | self._keys("state_features", relation),
            action_ids=tuple(sorted(actions)),
            metric_names=tuple(sorted(self._keys("metrics", relation))),
        )

    def _keys(self, column: str, relation: str) -> dict[Any, int]:
        """Returns how many of the maps in a column have each key."""
        if column not in {*self.events.seen, "c"}:
            return {}
        entries = f"SELECT EXPLODE(MAP_ENTRIES({column})) AS e FROM {relation}"
        counts = self.engine.rows(f"SELECT e.key, COUNT(*) FROM ({entries}) entries GROUP BY e.key")
        named = {int(one): one for one in self.events.features}
        return {named.get(key, key): count for key, count in counts}

    def _require_dates(self) -> None:
        timeline = self.config.timeline
        if "ds" not in self.events.seen and (timeline.startDs or timeline.endDs):
            raise DataError(
                Problem(timeline.inputTableName, "a column 'ds', as timeline.startDs or endDs is given", "none")
            )

    def _require_rows(self, figures: dict[str, int], report: dict[str, Any]) -> None:
        if figures["rows"]:
            return
        timeline = self.config.timeline
        if timeline.startDs or timeline.endDs:
            ((first, last),) = self.engine.rows("SELECT MIN(ds), MAX(ds) FROM events")
            expected = f"events with ds from {timeline.startDs or 'the first'} to {timeline.endDs or 'the last'}"
            raise NoRowsError(Problem(timeline.inputTableName, expected, f"events from {first} to {last}"))
        got = f"none of {counted(report['rows_in_files'], 'row')}"
        raise NoRowsError(Problem(timeline.inputTableName, "events to pair", got, "query.tableSample may be too small"))

    def _refused(self) -> list[dict[str, Any]]:
        """Returns what was refused by rule, or raises it."""
        counts = self.engine.rows(
            "SELECT fault.rule, COUNT(*), COUNT(DISTINCT mdp_id) FROM taken WHERE fault IS NOT NULL "
            "GROUP BY fault.rule ORDER BY COUNT(*) DESC, fault.rule"
        )
        if not counts:
            return []
        first = self.engine.rows(
            "SELECT source_file, source_line, fault.rule, fault.expected, COALESCE(fault.got, 'something else'), "
            "fault.todo FROM taken WHERE fault IS NOT NULL "
            f"ORDER BY source_file, source_line LIMIT {MAX_PROBLEMS}"
        )
        problems = [Problem(f"{file}:{line}", *words) for file, line, _, *words in first]
        if self.config.timeline.on_refused == "error":
            total = sum(rows for _, rows, _ in counts)
            by_rule = ", ".join(f"{rows:,} {rule}" for rule, rows, _ in counts)
            todo = 'Correct the log, or set timeline.on_refused to "drop_episode" to leave their episodes out'
            where, got = self.config.timeline.inputTableName, f"{total:,} that do not: {by_rule}"
            raise DataError([*problems, Problem(where, "rows that keep the rules", got, todo)])
        places: dict[str, str] = {}
        for (_, _, rule, *_), problem in zip(first, problems, strict=True):
            places.setdefault(rule, str(problem))
        for rule, rows, episodes in counts:
            said = f"{counted(rows, 'row')} of {counted(episodes, 'episode')} refused ({rule})"
            machine_logger.warning(f"{said}, their episodes are left out; {places.get(rule, '')}")
        return [
            {"rule": rule, "rows": rows, "episodes": episodes, "first": places.get(rule, "")}
            for rule, rows, episodes in counts
        ]

    def _figures(self, relation: str) -> dict[str, int]:
        return dict(zip(FIGURES, self.engine.sums(self.pairing().figures(relation)), strict=True))

    def _without_duplicates(self, count: int) -> str:
        """Names the relation of the first row of each (mdp_id, sequence_number) by file and line."""
        number = "ROW_NUMBER() OVER (PARTITION BY mdp_id, sequence_number ORDER BY source_file, source_line)"
        self.engine.name("numbered", f"SELECT *, {number} AS seen FROM unbroken")
        first = self.engine.rows(
            "SELECT source_file, source_line FROM numbered WHERE seen > 1 ORDER BY source_file, source_line LIMIT 3"
        )
        places = ", ".join(f"{file}:{line}" for file, line in first)
        more = ", ..." if count > len(first) else ""
        said = f"{counted(count, 'row has', 'rows have')} the mdp_id and sequence_number of another"
        machine_logger.warning(f"{said}; the first of each is kept. Left out: {places}{more}")
        self.engine.name("single", "SELECT * FROM numbered WHERE seen = 1")
        return "single"

    def _without_outliers(self, relation: str) -> tuple[str, dict[str, Any]]:
        share = self.config.timeline.outlierEpisodeLengthPercentile
        if share is None:
            return relation, {}
        exact = self.config.timeline.percentileFunction == "percentile"
        self.engine.name("lengths", f"SELECT mdp_id, COUNT(*) AS length FROM {relation} GROUP BY mdp_id")
        percentile = f"{'PERCENTILE_CONT' if exact else 'PERCENTILE_DISC'}({share!r}) WITHIN GROUP (ORDER BY length)"
        ((total, longest),) = self.engine.rows(f"SELECT COUNT(*), {percentile} FROM lengths")
        ((episodes, rows),) = self.engine.rows(
            f"SELECT COUNT(*), COALESCE(SUM(length), 0) FROM lengths WHERE length > {float(longest)!r}"
        )
        machine_logger.info(
            f"episodes of more than {longest:g} rows: {episodes:,} of {total:,}, left out with {counted(rows, 'row')}"
        )
        if abs(episodes / total - (1 - share)) > 0.1:
            said = f"outlierEpisodeLengthPercentile {share:g} leaves out {episodes / total:.1%} of the episodes"
            machine_logger.warning(f"{said}, not {1 - share:.1%}: many have the same length")
        usual = f"SELECT mdp_id FROM lengths WHERE length <= {float(longest)!r}"
        self.engine.name("usual", f"SELECT * FROM {relation} WHERE mdp_id IN ({usual})")
        return "usual", {"longest_rows": float(longest), "episodes": int(episodes), "rows": int(rows)}

    def _log_figures(self, figures: dict[str, int]) -> None:
        rows = f"{counted(figures['rows'], 'row')} in {counted(figures['episodes'], 'episode')}"
        ends = f"{counted(figures['terminal_rows'], 'true end')}, {figures['truncated_rows']:,} cut by a limit"
        machine_logger.info(f"{rows}, {ends}, {counted(figures['gaps'], 'gap')}")
        if unlisted := figures["candidates_unknown_rows"]:
            said = counted(unlisted, "row has", "rows have")
            machine_logger.info(f"{said} an empty possible_actions; the action taken is the only candidate there")
        last = figures["last_rows_without_an_end"]
        said = counted(last, "last row does not say how it ends", "last rows do not say how they end")
        if last and self.config.timeline.addTerminalStateRow:
            machine_logger.info(f"{said}: true ends, as addTerminalStateRow says")
        elif last:
            todo = "Log terminal or truncated, or set addTerminalStateRow"
            machine_logger.warning(f"{said}: left out, for nobody knows where they led. {todo}")
        if cut := figures["truncated_rows_without_next_state"]:
            said = counted(cut, "truncated row has", "truncated rows have")
            why = "a value behind the limit cannot be counted on. Log what was seen there"
            machine_logger.warning(f"{said} no next_state_features: left out: {why}")
        if after := figures["rows_after_an_end"]:
            said = counted(after, "row follows", "rows follow")
            todo = "Give each episode an mdp_id of its own"
            machine_logger.warning(f"{said} an end inside an mdp_id; nothing is paired across it. {todo}")


def _require_unchanged(files: Sequence[InputFile]) -> None:
    """Checks that the events are still those that were read and hashed."""
    for file in files:
        if file.remote:
            continue
        try:
            now = os.stat(file.path)
            same = (now.st_size, now.st_mtime_ns) == (file.size, file.modified_ns)
        except OSError:
            same = False
        if not same:
            raise DataError(
                Problem(file.path, "a file that stays as it is while it is read", "one that changed", "Run again")
            )


def _finished(
    config: TimelineConfig, report: dict[str, Any], written: Sequence[Sequence[int]], features: Features
) -> dict[str, Any]:
    """Returns the report with what was written.

    Raises:
        DataError: rows are missing that nothing has left out.
    """
    rows = [sum(folder) for folder in written]
    beyond = report["complete_rows"] - sum(rows)
    if beyond < 0 or (beyond and config.timeline.timeWindowLimit is None):
        expected, got = counted(report["complete_rows"], "transition"), f"{sum(rows):,} written"
        todo = "The events may have changed while they were read; if not, please report this"
        raise DataError(Problem(config.timeline.inputTableName, expected, got, todo))
    return {
        **report,
        "left_out": _left_out(config, report),
        "rows_beyond_time_window": beyond,
        "train_rows": rows[0],
        "eval_rows": sum(rows[1:]),
        "state_features": {str(key): count for key, count in sorted(features.state.items())},
    }


def _left_out(config: TimelineConfig, report: dict[str, Any]) -> list[str]:
    """Returns a sentence on the events of which no transition was made, for all who train on the others."""
    ends = 0 if config.timeline.addTerminalStateRow else report["last_rows_without_an_end"]
    found = [
        (report["duplicate_rows"], "with the mdp_id and sequence_number of another"),
        (ends, "last of an episode without a word on how it ends"),
        (report["truncated_rows_without_next_state"], "truncated without next_state_features"),
        (report["outliers"].get("rows", 0), "in episodes of unusual length"),
        (report["rows_in_files"] - report["rows"] if report["refused"] else 0, "refused or in a refused row's episode"),
    ]
    reasons = ", ".join(f"{rows:,} {reason}" for rows, reason in found if rows)
    source = config.timeline.inputTableName
    total = counted(report["rows_in_files"], "event")
    return [f"{source}: of {total} left out by the timeline: {reasons}"] if reasons else []


def _describe(
    config: TimelineConfig,
    folder: Path,
    rows: Sequence[int],
    use: str,
    inputs: tuple[InputState, ...],
    features: Features,
    report: dict[str, Any],
) -> StageManifest:
    """Writes the manifest of a folder, which makes it whole."""
    above = StageManifest.read(config.timeline.inputTableName)
    parts = [folder / part_name(number) for number in range(len(rows))]
    manifest = StageManifest(
        kind=KIND,
        rows=sum(rows),
        columns={one.name: str(one.type) for one in pyarrow.parquet.read_schema(parts[0])},
        state_ids=tuple(sorted(features.state)),
        action_ids=features.action_ids,
        metric_names=features.metric_names,
        settings={**settings_of(config), "use": use},
        inputs=inputs,
        parent=above.digest if above else "",
        report=report,
        files={part.name: {"rows": count} for part, count in zip(parts, rows, strict=True)},
    )
    return manifest.write(folder)
