"""The timeline as a stage: from logged decisions to folders of transitions; folders that are there are kept.

1 look     folders that were made of the same events in the same way are kept
2 refuse   an output in the place of the events, of the other output, or of files that are not a timeline's
3 check    files ─► checked events, with what is wrong with them: an error, or their episodes are left out     events.py
4 sort     by episode and sequence_number, here or in an existing Spark                                   *_engine.py
5 pair     each row with what follows it, up to `steps` rows                                                 pairing.py
6 write    folders of Parquet that appear whole, each with the report in its manifest
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow.parquet

from reagent_lite.config.timeline import TimelineConfig
from reagent_lite.console import machine_logger, progress
from reagent_lite.data.formats.blocks import Show
from reagent_lite.data.formats.files import InputFile
from reagent_lite.data.formats.frames import place
from reagent_lite.data.rows.columns import require_one_order
from reagent_lite.data.stage import (
    StageManifest,
    data_files,
    left_out,
    require_apart,
    require_own,
    require_unchanged,
    states_of,
)
from reagent_lite.data.timeline.events import Checked
from reagent_lite.data.timeline.local_engine import LocalEngine
from reagent_lite.data.timeline.pairing import MAX_DUPLICATES, OUTPUTS, Counts, Pairing
from reagent_lite.data.timeline.spark_engine import SparkEngine
from reagent_lite.data.writing.part_files import part_name
from reagent_lite.errors import ConfigError, DataError, NoRowsError, Problem, counted
from reagent_lite.files import appearing_folder, require_writable, room_in, work_folder
from reagent_lite.memory import free_host_bytes

KIND = "timeline"
VERSION = 3
"""Version of the transformation; folders of another version are made again."""
_ROWS_PER_FILE = 300_000
_MEMORY_SHARE = 0.6
_SHARE_OF_TIMES = 0.9
"""Sequence numbers are times where more than this share of them is not the number before plus one."""


class Engine(Protocol):
    """Checks and sorts events, here or on other machines."""

    def load(self, config: TimelineConfig, files: Sequence[InputFile], show: Show) -> Checked:
        """Reads the events of the files, and keeps them with the columns of events.event_columns.

        Raises:
            DataError: a file that cannot be read or lacks a column, with file and line; no rows in any file.
        """
        ...

    def lengths(self) -> dict[int, int]:
        """Returns how many episodes without a refused row have each number of rows of different sequence_number."""
        ...

    def write(self, pairing: Pairing, folders: Sequence[Path], show: Show) -> tuple[list[dict[int, int]], Counts]:
        """Sorts the events by events.ORDER, and writes their transitions.

        Returns:
            (rows of each file that has some, by folder; what was counted).
        """
        ...

    def close(self) -> None:
        """Frees what the engine holds."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineOutcome:
    """What was made; printed as the last line of standard output.

    Attributes:
        train, eval: folders of transitions; eval is None where none was asked for.
        train_rows, eval_rows: in them.
        episodes: how many were paired.
        refused_rows: rows that broke a rule; their episodes were left out.
        made: false where the folders stood already, made of the same events in the same way.
        seconds: total wall-clock time of the run.
    """

    train: str
    eval: str | None
    train_rows: int
    eval_rows: int
    episodes: int
    refused_rows: int
    made: bool
    seconds: float


def run_timeline(config: TimelineConfig) -> TimelineOutcome:
    """Makes the folders that the config asks for, unless they are there, and returns what is in them.

    Raises:
        ConfigError: an output in the place of the events, or that cannot be written.
        DataError: see `make_timeline`.
    """
    start = time.monotonic()
    files = data_files(config.timeline.inputTableName, config.columns)
    for note in left_out(config.timeline.inputTableName):
        machine_logger.warning(note)
    folders = output_folders(config)
    outputs = dict(zip(OUTPUTS, folders, strict=False))
    _require_events(config)
    require_apart(config.timeline.inputTableName, files, outputs)
    found = [
        StageManifest.standing(folder, KIND, {**settings_of(config), "use": use}, files)
        for folder, use in zip(folders, ("train", "eval"), strict=False)
    ]
    manifests = [manifest for manifest in found if manifest is not None]
    made = len(manifests) < len(folders)
    if made:
        for key, folder in outputs.items():
            require_own(folder, KIND, key)
            require_writable(folder.parent, key)
        room = room_in(folders[0].parent, OUTPUTS[0])
        with room, _work_folder(config, folders[0]) as work, closing(_engine(config, work)) as engine:
            manifests = make_timeline(config, engine, files)
    else:
        machine_logger.info(f"{', '.join(map(str, folders))}: made of these events before, nothing to do")
    report = manifests[0].report
    for folder, manifest in zip(folders, manifests, strict=True):
        machine_logger.info(
            f"{folder}: {counted(manifest.rows, 'transition')} in {counted(len(manifest.files), 'file')}"
        )
        if not manifest.rows:
            machine_logger.warning(
                f"{folder} has no transitions: there are too few episodes for eval_percent, or none is whole"
            )
    return TimelineOutcome(
        train=str(folders[0]),
        eval=str(folders[1]) if len(folders) > 1 else None,
        train_rows=report["train_rows"],
        eval_rows=report["eval_rows"],
        episodes=report["episodes"],
        refused_rows=sum(one["rows"] for one in report["refused"]),
        made=made,
        seconds=round(time.monotonic() - start, 3),
    )


def make_timeline(config: TimelineConfig, engine: Engine, files: tuple[InputFile, ...]) -> list[StageManifest]:
    """Makes the folders of a timeline, and returns their manifests.

    Args:
        config: what to make.
        engine: the engine that does it.
        files: the events.

    Raises:
        DataError: files that cannot be read, rows that break a rule (a few of each kind, and how many there are), no
            rows, a full disk; no folder has changed then.
    """
    timeline = config.timeline
    with progress("reading events", "bytes") as show:
        found = engine.load(config, files, show)
    _require_taken(config, found)
    pairing = Pairing(
        config=config,
        found=found,
        files=timeline.numOutputShards or -(-found.taken // _ROWS_PER_FILE) or 1,
        longest=_longest(config, engine),
    )
    with ExitStack() as stack:
        folders = [stack.enter_context(appearing_folder(target)) for target in output_folders(config)]
        with progress("pairing and writing transitions", "rows") as show:
            written, counts = engine.write(pairing, folders, show)
        require_one_order(found.orders, counts.figures["duplicate_rows"])
        if not counts.figures["rows"]:
            got = f"none of {counted(found.rows, 'row')}" + (f": {_by_rule(found)}" if found.faults.kinds else "")
            total = Problem(place(timeline.inputTableName), "events to pair", got, _small_sample(config))
            raise NoRowsError([*found.faults.problems(), total])
        _log_figures(config, found, counts, files)
        report = _report(config, pairing, counts, [sum(rows.values()) for rows in written])
        require_unchanged(files, timeline.inputTableName, config.columns)
        above = StageManifest.read(timeline.inputTableName)
        named = {int(one): one for one in found.features}
        ids = {name: {named.get(one, one) for one in some} for name, some in counts.ids.items()}
        manifests = []
        for folder, key, rows, use in zip(folders, OUTPUTS, written, ("train", "eval"), strict=False):
            with pairing.output(folder, key) as rest:
                rest.write_empty(sorted(set(range(pairing.files)) - set(rows)))
            columns = pyarrow.parquet.read_schema(folder / part_name(0))
            manifest = StageManifest(
                kind=KIND,
                rows=sum(rows.values()),
                columns={one.name: str(one.type) for one in columns},
                state_ids=tuple(sorted(ids["state_features"] | ids["next_state_features"])),
                action_ids=tuple(sorted(ids.get("action", set()) | ids.get("possible_actions", set()))),
                metric_names=tuple(sorted(found.metrics)),
                settings={**settings_of(config), "use": use},
                inputs=states_of(files, found.hashes),
                parent=above.digest if above else "",
                report=report,
                files={part_name(number): {"rows": rows.get(number, 0)} for number in range(pairing.files)},
            )
            manifests.append(manifest.write(folder))
    return manifests


def settings_of(config: TimelineConfig) -> dict[str, Any]:
    """Returns what a timeline's rows depend on in addition to the events: neither the engine nor the folders."""
    timeline = config.timeline.model_dump(mode="json")
    for key in ("inputTableName", "outputTableName"):
        del timeline[key]
    timeline["evalTableName"] = config.timeline.evalTableName is not None
    columns = {"columns": config.columns} if config.columns else {}
    return {"version": VERSION, "timeline": timeline, "query": config.query.model_dump(mode="json"), **columns}


def output_folders(config: TimelineConfig) -> tuple[Path, ...]:
    """Returns the folders a timeline makes: to train on, and to be evaluated on where that is asked for."""
    paths = (config.timeline.outputTableName, config.timeline.evalTableName)
    return tuple(Path(path).expanduser().absolute() for path in paths if path is not None)


def _require_taken(config: TimelineConfig, found: Checked) -> None:
    """Checks that there are events of the dates that are asked for, and none that breaks a rule, where none may."""
    timeline = config.timeline
    if timeline.startDs or timeline.endDs:
        if "ds" not in found.seen:
            expected = "a column 'ds', as timeline.startDs or endDs is given"
            raise DataError(Problem(place(timeline.inputTableName), expected, "none"))
        if not found.taken:
            expected = f"events with ds from {timeline.startDs or 'the first'} to {timeline.endDs or 'the last'}"
            got = f"events from {found.days[0]} to {found.days[-1]}"
            raise NoRowsError(Problem(place(timeline.inputTableName), expected, got, _small_sample(config)))
    if found.faults.kinds and timeline.on_refused == "error":
        todo = 'Correct the log, or set timeline.on_refused to "drop_episode" to leave their episodes out'
        got = f"{found.faults.count:,} that do not: {_by_rule(found)}"
        total = Problem(place(timeline.inputTableName), "rows that keep the rules", got, todo)
        raise DataError([*found.faults.problems(), total])


def _small_sample(config: TimelineConfig) -> str:
    return "query.tableSample may be too small" if config.query.tableSample < 100 else ""


def _by_rule(found: Checked) -> str:
    return ", ".join(f"{rows:,} {rule}" for rule, rows in _by_rows(found))


def _by_rows(found: Checked) -> list[tuple[str, int]]:
    return sorted(found.faults.by_rule().items(), key=lambda one: (-one[1], one[0]))


def _longest(config: TimelineConfig, engine: Engine) -> float | None:
    """Returns how many rows an episode may have; logs what that leaves out."""
    share = config.timeline.outlierEpisodeLengthPercentile
    if share is None or not (found := sorted(engine.lengths().items())):
        return None
    lengths, numbers = np.array(found, np.int64).T
    behind, total = np.cumsum(numbers), int(numbers.sum())
    if config.timeline.percentileFunction == "percentile":
        position = share * (total - 1)
        low, high = (lengths[np.searchsorted(behind, int(at), "right")] for at in (position, np.ceil(position)))
        longest = float(low + (high - low) * (position % 1))
    else:
        longest = float(lengths[np.searchsorted(behind / total, share)])
    longer = lengths > longest
    episodes, rows = int(numbers[longer].sum()), int((numbers * lengths)[longer].sum())
    machine_logger.info(
        f"episodes of more than {longest:g} rows: {episodes:,} of {total:,}, left out with {counted(rows, 'row')}"
    )
    if abs(episodes / total - (1 - share)) > 0.1:
        text = f"outlierEpisodeLengthPercentile {share:g} leaves out {episodes / total:.1%} of the episodes"
        machine_logger.warning(f"{text}, not {1 - share:.1%}: many have the same length")
    return longest


def _log_figures(config: TimelineConfig, found: Checked, counts: Counts, files: Sequence[InputFile]) -> None:
    figures, first = counts.figures, _first_places(found)
    info, warning = machine_logger.info, machine_logger.warning
    for rule, number in _by_rows(found):
        text = f"{counted(number, 'row')} of {counted(counts.refused[rule], 'episode')} refused ({rule})"
        warning(f"{text}, their episodes are left out; {first.get(rule, '')}")
    rows = f"{counted(figures['paired_rows'], 'row')} in {counted(figures['episodes'], 'episode')}"
    ended = f"{counted(figures['terminal_rows'], 'true end')}, {figures['truncated_rows']:,} cut by a limit"
    gaps = counted(figures["gaps"], "gap")
    if figures["gaps"] > _SHARE_OF_TIMES * (figures["paired_rows"] - figures["episodes"]):
        gaps = "gaps not counted, as sequence_number is a time"
    info(f"{rows}, {ended}, {gaps}")

    def log(level: Callable[[str], None], figure: str, one: str, several: str, rest: str) -> None:
        if figures[figure]:
            level(f"{counted(figures[figure], one, several)} {rest}")

    places = ", ".join(files[file].place(line) for file, line in counts.duplicates)
    places += ", ..." if figures["duplicate_rows"] > MAX_DUPLICATES else ""
    rest = f"the mdp_id and sequence_number of another; the first of each is kept. Left out: {places}"
    log(warning, "duplicate_rows", "row has", "rows have", rest)
    if found.unlisted:
        text = counted(found.unlisted, "row has", "rows have")
        info(f"{text} an empty possible_actions; the action taken is the only candidate there")
    ends = "last row does not say how it ends:", "last rows do not say how they end:"
    if config.timeline.addTerminalStateRow:
        log(info, "last_rows_without_an_end", *ends, "addTerminalStateRow makes that a true end")
    else:
        rest = "left out, as it is not known what followed. Log terminal or truncated, or set addTerminalStateRow"
        log(warning, "last_rows_without_an_end", *ends, rest)
    rest = "no next_state_features, left out, as the state at the limit is not known. Log what was seen there"
    log(warning, "truncated_rows_without_next_state", "truncated row has", "truncated rows have", rest)
    rest = "an end inside an mdp_id; nothing is paired across it. Give each episode an mdp_id of its own"
    log(warning, "rows_after_an_end", "row follows", "rows follow", rest)


def _first_places(found: Checked) -> dict[str, str]:
    return {kind.rule: str(kind.first) for kind in reversed(found.faults.kinds.values())}


def _report(config: TimelineConfig, pairing: Pairing, counts: Counts, rows: Sequence[int]) -> dict[str, Any]:
    """Returns what was read, refused, left out and written, as the manifests have it."""
    found, figures, timeline = pairing.found, counts.figures, config.timeline
    unfinished = 0 if timeline.addTerminalStateRow else figures["last_rows_without_an_end"]
    missing = {
        "with the mdp_id and sequence_number of another": figures["duplicate_rows"],
        "last of an episode that does not say how it ends": unfinished,
        "truncated without next_state_features": figures["truncated_rows_without_next_state"],
        "in episodes of unusual length": counts.outliers["rows"],
        "refused or in a refused row's episode": found.rows - figures["rows"] if found.faults.kinds else 0,
    }
    reasons = ", ".join(f"{number:,} {reason}" for reason, number in missing.items() if number)
    total = counted(found.rows, "event")
    named = {int(one): one for one in found.features}
    state = {**dict.fromkeys(counts.ids["next_state_features"], 0), **counts.ids["state_features"]}
    first = _first_places(found)
    return {
        "rows_in_files": found.rows,
        "refused": [
            {"rule": rule, "rows": number, "episodes": counts.refused[rule], "first": first.get(rule, "")}
            for rule, number in _by_rows(found)
        ],
        **figures,
        "candidates_unknown_rows": found.unlisted,
        "outliers": {} if pairing.longest is None else {"longest_rows": pairing.longest, **counts.outliers},
        "left_out": [f"{timeline.inputTableName}: of {total} left out by the timeline: {reasons}"] if reasons else [],
        "rows_beyond_time_window": figures["complete_rows"] - sum(rows),
        "train_rows": rows[0],
        "eval_rows": sum(rows[1:]),
        "state_features": {str(named.get(one, one)): number for one, number in sorted(state.items())},
    }


def _work_folder(config: TimelineConfig, target: Path) -> AbstractContextManager[Path]:
    """Returns a folder on a local disk for what does not fit into memory."""
    parent = Path(config.temporary_directory).expanduser().absolute() if config.temporary_directory else target.parent
    require_writable(parent, "temporary_directory")
    return work_folder(parent, target.name)


def _engine(config: TimelineConfig, work: Path) -> Engine:
    if config.engine == "spark":
        return SparkEngine(config.master or "", work)
    limit = config.memory_limit_mb
    return LocalEngine(work, limit * 1_000_000 if limit else int(_MEMORY_SHARE * free_host_bytes()))


def _require_events(config: TimelineConfig) -> None:
    """Checks that the input is no folder of transitions, which would be paired a second time."""
    above = StageManifest.read(config.timeline.inputTableName)
    if above is not None and "next_action" in above.columns:
        got = f"transitions: {config.timeline.inputTableName} was made by workflows.{above.kind}"
        raise ConfigError(Problem("timeline.inputTableName", "events", got, "Train on them as they are"))
