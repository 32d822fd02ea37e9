"""Write a log in another format: python -m workflows.convert --config x.json.

1 open     the input's files; a target that would overwrite or join them is refused
2 survey   columns, their types, feature ids: what a target must know before its first row; JSON lines need none
3 copy     rows in the order of the input ─► target, under a temporary name until it is whole
"""

import sys
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from reagent_lite.cli import Command, main_alone
from reagent_lite.config.convert import ConvertConfig
from reagent_lite.console import logger, progress
from reagent_lite.data.formats.files import MINARI_DESCRIPTION
from reagent_lite.data.stage import data_files, left_out, require_apart
from reagent_lite.errors import ConfigError, Problem, counted, needing
from reagent_lite.files import require_writable

if TYPE_CHECKING:
    from reagent_lite.data.tables import Survey
    from reagent_lite.data.writing.minari import MinariForm


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """The written log; printed as the last line of standard output.

    Attributes:
        log: path of the file or folder.
        rows: in it.
        episodes: the episodes of a Minari dataset; None for files, whose episodes are not counted.
        dropped_rows: last rows of episodes that merely stop, whose state became the last observation; Minari only.
        columns: those that have values.
        left_out: columns that the target has no place for.
        rows_per_second: speed of the whole run.
        seconds: total wall-clock time of the run.
    """

    log: str
    rows: int
    episodes: int | None
    dropped_rows: int
    columns: list[str]
    left_out: list[str]
    rows_per_second: float
    seconds: float


def convert(config: ConvertConfig) -> Converted:
    """Writes the log in its new format and returns what is in it."""
    with needing("data", "input_path"):
        from reagent_lite.data.tables import Survey, survey, typed_tables, with_types
        from reagent_lite.data.writing.files import table_writer
        from reagent_lite.data.writing.minari import KEPT, copy_to_minari
    start = time.monotonic()
    target = Path(config.output_path).expanduser().absolute()
    files = data_files(config.input_path, config.columns)
    for note in left_out(config.input_path):
        logger.warning(note)
    require_apart(config.input_path, files, {"output_path": target})
    if config.to_minari:
        _require_replaceable(target)
    require_writable(target.parent, "output_path")
    jsonl = target.name.endswith((".jsonl", ".jsonl.gz", ".jsonl.zst"))
    found = Survey() if jsonl else survey(files)
    episodes, dropped, without, names = None, 0, list[str](), dict.fromkeys(found.names)
    if config.to_minari:
        form = _form(config, found)
        without = [name for name in found.names if name not in KEPT]
        with progress("converting", "bytes") as show:
            counts = copy_to_minari(files, target, form, show)
        rows, episodes, dropped = counts.rows, counts.episodes, counts.dropped
    else:
        rows = 0
        with closing(typed_tables(files, "converting")) as tables, table_writer(target) as writer:
            for table, _ in tables:
                # each row of JSON lines may have columns of its own
                writer.write(table if jsonl else with_types(table, found.fields))
                rows += table.num_rows
                names |= dict.fromkeys(Survey(fields={one.name: one for one in table.schema}).names)
    _report(target, rows, found, without, dropped)
    seconds = time.monotonic() - start
    return Converted(
        log=str(target),
        rows=rows,
        episodes=episodes,
        dropped_rows=dropped,
        columns=[name for name in names if name not in without],
        left_out=without,
        rows_per_second=round(rows / seconds, 1),
        seconds=round(seconds, 3),
    )


def _require_replaceable(target: Path) -> None:
    is_dataset = (target / "data" / MINARI_DESCRIPTION).is_file()
    if target.is_dir() and any(target.iterdir()) and not is_dataset:
        kind = "a folder that is new or a Minari dataset"
        raise ConfigError(Problem("output_path", kind, f"the folder {target}", "Choose another name"))
    if target.is_file():
        raise ConfigError(Problem("output_path", "a folder", f"the file {target}", "Choose another name"))


def _form(config: ConvertConfig, found: "Survey") -> "MinariForm":
    from reagent_lite.data.writing.minari import MinariForm

    parametric = found.parametric
    if not parametric and not config.actions:
        raise ConfigError(Problem("actions", "the names of all actions, for a Minari dataset", "none"))
    if parametric and config.actions:
        raise ConfigError(Problem("actions", "none, where actions are feature maps", repr(config.actions)))
    return MinariForm(
        dataset_id=config.minari_id,
        env_id=config.env_id or None,
        state_ids=tuple(sorted(found.state_ids)),
        actions=None if parametric else tuple(config.actions),
        action_ids=tuple(sorted(found.action_ids)),
    )


def _report(target: Path, rows: int, found: "Survey", without: list[str], dropped: int) -> None:
    logger.info(f"{target}: {counted(rows, 'row')}")
    if without:
        logger.info(f"left out, since Minari has no place for it: {', '.join(without)}")
    if dropped:
        stops = counted(dropped, "episode merely stops", "episodes merely stop")
        logger.info(f"{stops}: the state of the last row is the last observation")
    if found.indices and target.name.endswith(".csv"):
        logger.info("actions are indices; CSV has them as text, which is read as a name first where `actions` has it")


COMMAND = Command(
    module="workflows.convert",
    model=ConvertConfig,
    example="configs/gymnasium/convert.json",
    settings="--set input_path=log.csv --set output_path=log.parquet",
    outcome="log, rows, episodes, dropped_rows, columns, left_out, rows_per_second, seconds",
)

if __name__ == "__main__":
    sys.exit(main_alone(COMMAND, convert))
