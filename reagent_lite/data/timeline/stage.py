"""The timeline as a stage: its folders are made unless they stand.

1 look     folders that were made of the same events in the same way are kept
2 refuse   an output in the place of the events, of the other output, or of files that are not a timeline's
3 make     by DuckDB in this process or by a Spark that is there; see reagent_lite/data/timeline/making.py
"""

import glob
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from reagent_lite.config.timeline import TimelineConfig
from reagent_lite.console import machine_logger
from reagent_lite.data.formats.files import InputFile
from reagent_lite.data.stage import StageManifest, data_files, left_out, require_own
from reagent_lite.data.timeline.duckdb_engine import DuckDBEngine
from reagent_lite.data.timeline.engine import Engine
from reagent_lite.data.timeline.making import KIND, make_timeline, output_folders, settings_of
from reagent_lite.data.timeline.spark_engine import SparkEngine
from reagent_lite.errors import ConfigError, Problem, counted
from reagent_lite.files import require_writable, room_in, sweep
from reagent_lite.memory import free_host_bytes

_MEMORY_SHARE = 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineOutcome:
    """What was made; printed as the last line of standard output.

    Attributes:
        train, eval: folders of transitions; eval is None where none was asked for.
        train_rows, eval_rows: in them.
        episodes: that were paired.
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
    """Makes the folders that the config asks for, unless they stand, and returns what is in them.

    Raises:
        ConfigError: an output in the place of the events, or that cannot be written.
        DataError: what is wrong with the events, see data/timeline/making.py.
    """
    start = time.monotonic()
    files = data_files(config.timeline.inputTableName, config.columns)
    for note in left_out(config.timeline.inputTableName):
        machine_logger.warning(note)
    folders = output_folders(config)
    _require_events(config)
    _require_apart(config, files, folders)
    found = [
        StageManifest.standing(folder, KIND, {**settings_of(config), "use": use}, files)
        for folder, use in zip(folders, ("train", "eval"), strict=False)
    ]
    manifests = tuple(manifest for manifest in found if manifest is not None)
    made = len(manifests) < len(folders)
    if made:
        manifests = _made(config, files, folders)
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


def _made(config: TimelineConfig, files: tuple[InputFile, ...], folders: tuple[Path, ...]) -> tuple[StageManifest, ...]:
    for folder, key in zip(folders, ("outputTableName", "evalTableName"), strict=False):
        require_own(folder, KIND, f"timeline.{key}")
        require_writable(folder.parent, f"timeline.{key}")
    room = room_in(folders[0].parent, "timeline.outputTableName")
    with room, _work_folder(config, folders[0]) as work, _engine(config, work) as engine:
        return make_timeline(config, engine, files)


@contextmanager
def _work_folder(config: TimelineConfig, target: Path) -> Iterator[Path]:
    """Gives a folder on a local disk for what does not fit into memory."""
    parent = Path(config.temporary_directory).expanduser() if config.temporary_directory else target.parent
    require_writable(parent, "temporary_directory")
    sweep(parent.glob(f".{glob.escape(target.name)}.*.work"))
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".work", dir=parent))
    try:
        yield folder.absolute()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _engine(config: TimelineConfig, work: Path) -> Iterator[Engine]:
    engine: Engine
    if config.engine == "spark":
        engine = SparkEngine(config.master or "", work)
    else:
        limit = config.memory_limit_mb
        engine = DuckDBEngine(work, limit * 1_000_000 if limit else int(_MEMORY_SHARE * free_host_bytes()))
    try:
        yield engine
    finally:
        engine.close()


def _require_events(config: TimelineConfig) -> None:
    """Checks that the input is no folder of transitions, which would be paired a second time."""
    above = StageManifest.read(config.timeline.inputTableName)
    if above is not None and "next_action" in above.columns:
        got = f"transitions: {config.timeline.inputTableName} was made by workflows.{above.kind}"
        raise ConfigError(Problem("timeline.inputTableName", "events", got, "Train on them as they are"))


def _require_apart(config: TimelineConfig, files: tuple[InputFile, ...], folders: tuple[Path, ...]) -> None:
    """Checks that no output takes the place of an input or of another output, wherever links lead.

    Raises:
        ConfigError: naming both.
    """
    inputs = {Path(file.path).resolve() for file in files if not file.remote}
    source = config.timeline.inputTableName
    if "://" not in source and Path(source).expanduser().is_dir():
        inputs.add(Path(source).expanduser().resolve())
    taken = {path: "the events" for path in inputs}
    for folder, key in zip(folders, ("outputTableName", "evalTableName"), strict=False):
        own = folder.resolve()
        for path, what in taken.items():
            if own == path or own in path.parents or path in own.parents:
                todo = "It is replaced as a whole, so nothing else may be in it"
                expected = f"a folder apart from {what} in {path}"
                raise ConfigError(Problem(f"timeline.{key}", expected, str(folder), todo))
        taken[own] = "outputTableName"
