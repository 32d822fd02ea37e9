"""Write one machine's episodes of a log to its disk."""

import time
from dataclasses import dataclass
from pathlib import Path

from reagent_lite.config.shard_config import ShardConfig
from reagent_lite.console import machine_logger, progress
from reagent_lite.disk_room import disk_errors
from reagent_lite.errors import ConfigError, needing, pluralize, raise_any
from reagent_lite.whole_files import appearing_folder

_TODO = "Make room or give another place, and run again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharded:
    """One machine's rows; printed as the last line of standard output.

    Attributes:
        path: the folder of the rows.
        rows: number of rows.
        made: whether this run wrote the folder; false if it was up to date.
        seconds: total wall-clock time of the run.
    """

    path: str
    rows: int
    made: bool
    seconds: float


def shard(config: ShardConfig) -> Sharded:
    """Writes the rows of this machine to output_path, unless they are up to date.

    Raises:
        ConfigError: paths that overlap, or a output_path with other files.
        DataError: the input or output_path cannot be used.
    """
    with needing("data", "data_path"):
        from reagent_lite.data.shard_files import KIND, log_of_shard, shard_settings, write_shard
        from reagent_lite.data.stage_folder import StageManifest, require_own
    raise_any(list(config.problems()), ConfigError)
    start = time.monotonic()
    folder = Path(config.output_path).expanduser().absolute()
    log = log_of_shard(config)
    log.require_apart({"output_path": folder})
    manifest = StageManifest.up_to_date(folder, KIND, shard_settings(config, log), log.files)
    made = manifest is None
    if manifest is None:
        require_own(folder, KIND, "output_path")
        for note in log.notes():
            machine_logger.warning(note)
        with (
            disk_errors(str(folder), "a folder that can be written", _TODO),
            appearing_folder(folder) as temporary,
            progress("reading", "bytes") as show,
        ):
            manifest = write_shard(config, log, temporary, show)
    state = "written" if made else "up to date"
    machine_logger.info(
        f"{folder}: {pluralize(manifest.rows, 'row')} in {pluralize(len(manifest.files), 'file')}, {state}"
    )
    return Sharded(path=str(folder), rows=manifest.rows, made=made, seconds=round(time.monotonic() - start, 3))
