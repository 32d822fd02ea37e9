"""Describe a log and write a config for it.

1 read     the first rows, in any format, with the log's own names
2 guess    standard columns for the columns, actions, features
3 check    the loader accepts the config, and training reads the rows with it
4 write    the config, under a temporary name until it is complete
"""

import json
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from reagent_lite.config.inspect_config import InspectConfig
from reagent_lite.console import logger
from reagent_lite.disk_room import require_writable
from reagent_lite.errors import DataError, Problem, needing
from reagent_lite.whole_files import write_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """The description of a log; printed as the last line of standard output.

    Attributes:
        config: path of the written config, or null.
        workflow: the workflow of the config.
        rows: number of rows read.
        columns: {column: kind, share present, distinct values, and its standard column or null}.
        decide: choices left to the user.
        seconds: total wall-clock time of the run.
    """

    config: str | None
    workflow: str
    rows: int
    columns: dict[str, dict[str, str | float | int | None]]
    decide: tuple[str, ...]
    seconds: float


def inspect(config: InspectConfig) -> Described:
    """Logs the description of a log and writes a config for it.

    Raises:
        DataError: the log cannot be read, or no config fits it, with the reasons.
    """
    with needing("data", "data_path"):
        from reagent_lite.data.inspection.proposal import inspect_log
        from reagent_lite.data.logs import Log
    start = time.monotonic()
    target = Path(config.output_path).expanduser().absolute() if config.output_path else None
    log = Log(config.data_path)
    if target is not None:
        log.require_apart({"output_path": target})
        require_writable(target.parent, "output_path")
    for note in log.notes():
        logger.warning(note)
    inspected = inspect_log(config)
    for line in inspected.lines():
        logger.info(line)
    if target is not None:
        if inspected.config is None:
            raise DataError([Problem.stating(config.data_path, reason) for reason in inspected.problems])
        document = json.dumps(inspected.config, indent=2, ensure_ascii=False).encode() + b"\n"
        if (kept := _keep_edited(target, document)) is not None:
            logger.warning(f"{target} was another config, which is kept as {kept}")
        write_whole(target, document)
        logger.info(f"written to {target}: reagent-lite train --config {config.output_path}")
    return Described(
        config=None if target is None else str(target),
        workflow=inspected.workflow,
        rows=inspected.rows,
        columns=inspected.facts(),
        decide=inspected.decide,
        seconds=round(time.monotonic() - start, 3),
    )


def _keep_edited(target: Path, document: bytes) -> Path | None:
    """Renames a file in the place of the config, which may have been edited; None if it has the same content."""
    if not target.exists() or target.read_bytes() == document:
        return None
    names = (target.with_name(f"{target.stem}.before{number or ''}.json") for number in count())
    kept = next(name for name in names if not name.exists())
    target.rename(kept)
    return kept
