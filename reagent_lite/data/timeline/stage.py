"""The timeline as a stage: from logged decisions to folders of transitions, unless these are up to date.

1 compare  folders made from the same events with the same settings are kept
2 refuse   outputs that overlap the events or each other, or that hold files which are not a timeline's
3 check    files ─► checked events; faults are an error, or their episodes are left out                     events.py
4 sort     by episode and sequence_number, here or in an existing Spark                                  *_engine.py
5 pair     each row with what follows it, up to `steps` rows                                               pairing.py
6 write    folders of Parquet that appear whole, each with the report in its manifest
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pyarrow.parquet

from reagent_lite.config.embedding_config import id_features
from reagent_lite.config.timeline_config import TimelineConfig
from reagent_lite.console import machine_logger, progress
from reagent_lite.data.formats.blocks import InputFile, Show
from reagent_lite.data.logs import Log
from reagent_lite.data.rows.block_columns import require_one_order
from reagent_lite.data.rows.item_files import given_items
from reagent_lite.data.stage_folder import (
    StageManifest,
    require_own,
    states_of,
)
from reagent_lite.data.timeline.event_spans import Counts
from reagent_lite.data.timeline.events import EventFacts
from reagent_lite.data.timeline.local_engine import LocalEngine
from reagent_lite.data.timeline.pairing import OUTPUTS, Pairing
from reagent_lite.data.timeline.report import (
    log_figures,
    longest_rows,
    report_of,
    require_rows,
    require_selected,
)
from reagent_lite.data.timeline.settings import items_setting, pairing_settings
from reagent_lite.data.timeline.spark_engine import SparkEngine
from reagent_lite.data.writing.part_files import part_name
from reagent_lite.disk_room import require_writable, room_in
from reagent_lite.errors import ConfigError, Problem, pluralize
from reagent_lite.memory import free_host_bytes
from reagent_lite.whole_files import appearing_folder, work_folder

KIND = "timeline"
_ROWS_PER_FILE = 300_000
_MEMORY_SHARE = 0.6


class Engine(Protocol):
    """Checks and sorts events, here or on other machines."""

    def load(self, config: TimelineConfig, files: Sequence[InputFile], show: Show, *, texts: bool) -> EventFacts:
        """Reads the events of the files, and keeps them with the columns of events.event_columns.

        Without `texts`, reading may end at the first feature that is a text, and `EventFacts.texts` is true.

        Raises:
            DataError: a file that cannot be read or lacks a column, with file and line; no rows in any file.
        """
        ...

    def lengths(self) -> dict[int, int]:
        """Returns {number of rows: number of episodes}, without duplicate rows and episodes with a refused row."""
        ...

    def write(self, pairing: Pairing, folders: Sequence[Path], show: Show) -> tuple[list[dict[int, int]], Counts]:
        """Sorts the events by events.ORDER, and writes the rows that `pairing` makes from them.

        Returns:
            (rows of each file that has some, by folder; figures).
        """
        ...

    def close(self) -> None:
        """Frees the engine's resources."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineOutcome:
    """Outcome of a run; printed as the last line of standard output.

    Attributes:
        train, eval: folders of the rows; eval is None if the config has no evalTableName.
        train_rows, eval_rows: number of rows in each.
        episodes: number of episodes that were paired.
        refused_rows: number of rows that broke a rule; their episodes were left out.
        made: whether this run made the folders; false if they were up to date.
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


def run_timeline(config: TimelineConfig, log: Log | None = None) -> TimelineOutcome:
    """Makes the folders that the config asks for, unless they are up to date, and describes them.

    Args:
        config: the config of the timeline.
        log: the events; None: those that the config describes.

    Raises:
        ConfigError: an output overlaps the events, or cannot be written.
        DataError: see `make_timeline`.
    """
    start = time.monotonic()
    log = _log_of(config) if log is None else log
    for note in log.notes():
        machine_logger.warning(note)
    folders = output_folders(config)
    outputs = dict(zip(OUTPUTS, folders, strict=False))
    _require_events(log)
    log.require_apart(outputs)
    existing = [
        StageManifest.up_to_date(folder, KIND, _settings(config, log, use), log.files)
        for folder, use in zip(folders, ("train", "eval"), strict=False)
    ]
    manifests = [manifest for manifest in existing if manifest is not None]
    made = len(manifests) < len(folders)
    if made:
        for key, folder in outputs.items():
            require_own(folder, KIND, key)
            require_writable(folder.parent, key)
        room = room_in(folders[0].parent, OUTPUTS[0])
        with room, _work_folder(config, folders[0]) as work, closing(_engine(config, work)) as engine:
            log.require_one_kind()
            manifests = make_timeline(config, engine, log)
    else:
        machine_logger.info(f"{', '.join(map(str, folders))}: up to date")
    report = manifests[0].report
    for folder, manifest in zip(folders, manifests, strict=True):
        rows = pluralize(manifest.rows, "transition")
        machine_logger.info(f"{folder}: {rows} in {pluralize(len(manifest.files), 'file')}")
        if not manifest.rows:
            machine_logger.warning(
                f"{folder} has no transitions: there are too few episodes for eval_percent, or all are left out"
            )
    return TimelineOutcome(
        train=str(folders[0]),
        eval=str(folders[1]) if len(folders) > 1 else None,
        train_rows=report["train_rows"],
        eval_rows=report["eval_rows"],
        episodes=report["episodes"],
        refused_rows=sum(refused["rows"] for refused in report["refused"]),
        made=made,
        seconds=round(time.monotonic() - start, 3),
    )


def _log_of(config: TimelineConfig) -> Log:
    ids = id_features(config.embeddings)
    return Log(
        config.timeline.inputTableName,
        columns=config.columns,
        items=given_items(config.items, config.item_id, config.possible_items, ids),
        id_features=ids,
        same_episodes=config.same_episodes,
    )


def _settings(config: TimelineConfig, log: Log, use: str) -> dict[str, Any]:
    """Returns the settings that the rows of a folder depend on; `use` is "train" or "eval"."""
    of_log = {name: value for name, value in log.settings.items() if name != "columns"}
    return {**pairing_settings(config), **of_log, **items_setting(log.items), "use": use}


def make_timeline(config: TimelineConfig, engine: Engine, log: Log) -> list[StageManifest]:
    """Makes the folders of a timeline, and returns their manifests.

    Args:
        config: the config of the timeline.
        engine: the engine.
        log: the events.

    Raises:
        DataError: files that cannot be read, rows that break a rule (a few of each kind, and how many there are), no
            rows, or a full disk; no folder has changed in this case.
    """
    timeline = config.timeline
    files = log.files
    with progress("reading events", "bytes") as show:
        facts = engine.load(config, files, show, texts=False)
        if facts.texts:
            facts = engine.load(config, files, show, texts=True)
    require_selected(config, facts)
    pairing = Pairing(
        config=config,
        facts=facts,
        files=timeline.numOutputShards or -(-facts.selected // _ROWS_PER_FILE) or 1,
        longest=longest_rows(config, engine.lengths),
    )
    with ExitStack() as stack:
        folders = [stack.enter_context(appearing_folder(target)) for target in output_folders(config)]
        with progress("writing transitions", "rows") as show:
            written, counts = engine.write(pairing, folders, show)
        require_one_order(facts.orders, counts.figures["duplicate_rows"])
        require_rows(config, facts, counts)
        log_figures(config, facts, counts, files)
        report = report_of(config, facts, pairing.longest, counts, [sum(rows.values()) for rows in written])
        log.require_unchanged()
        parent = log.manifest
        named = {int(feature): feature for feature in facts.features}
        ids = {name: {named.get(feature, feature) for feature in features} for name, features in counts.ids.items()}
        manifests = []
        for folder, key, rows, use in zip(folders, OUTPUTS, written, ("train", "eval"), strict=False):
            with pairing.output(folder, key) as rest:
                rest.write_empty(sorted(set(range(pairing.files)) - set(rows)))
            columns = pyarrow.parquet.read_schema(folder / part_name(0))
            manifest = StageManifest(
                kind=KIND,
                rows=sum(rows.values()),
                columns={field.name: str(field.type) for field in columns},
                state_ids=tuple(sorted(ids["state_features"] | ids["next_state_features"])),
                action_ids=tuple(sorted(ids.get("action", set()) | ids.get("possible_actions", set()))),
                metric_names=tuple(sorted(facts.metrics)),
                settings=_settings(config, log, use),
                inputs=states_of(files, facts.hashes),
                parent=parent.digest if parent else "",
                report=report,
                files={part_name(number): {"rows": rows.get(number, 0)} for number in range(pairing.files)},
            )
            manifests.append(manifest.write(folder))
    return manifests


def output_folders(config: TimelineConfig) -> tuple[Path, ...]:
    """Returns the folders that a timeline makes: one to train on and, with evalTableName, one to evaluate on."""
    paths = (config.timeline.outputTableName, config.timeline.evalTableName)
    return tuple(Path(path).expanduser().absolute() for path in paths if path is not None)


def _work_folder(config: TimelineConfig, target: Path) -> AbstractContextManager[Path]:
    """Returns a temporary folder for data that does not fit into memory; by default it is next to the output."""
    parent = Path(config.temporary_directory).expanduser().absolute() if config.temporary_directory else target.parent
    require_writable(parent, "temporary_directory")
    return work_folder(parent, target.name)


def _engine(config: TimelineConfig, work: Path) -> Engine:
    if config.engine == "spark":
        return SparkEngine(config.master or "", work)
    limit = config.memory_limit_mb
    return LocalEngine(work, limit * 1_000_000 if limit else int(_MEMORY_SHARE * free_host_bytes()))


def _require_events(log: Log) -> None:
    """Checks that no input is a folder of transitions, which would be paired a second time."""
    for path in log.paths:
        manifest = StageManifest.read(path)
        if manifest is not None and "next_action" in manifest.columns:
            got = f"transitions: {path} was made by workflows.{manifest.kind}"
            raise ConfigError(Problem("timeline.inputTableName", "events", got, "Train on them as they are"))
