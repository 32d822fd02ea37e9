"""The story of a converted log.

1 open     the input's files; a target that would overwrite or join them is refused
2 survey   columns, their types, feature ids: what a target must know before its first row; JSON lines need none
3 copy     rows in the order of the input ─► target, under a temporary name, which then gets its own
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path

from reagent_lite.config.convert import MINARI_SUFFIX, ConvertConfig
from reagent_lite.data.formats.files import MINARI_DESCRIPTION, InputFile
from reagent_lite.data.formats.stage import data_files, left_out
from reagent_lite.data.writing.log_copy import Survey, copy_log, copy_to_minari, survey
from reagent_lite.data.writing.minari import MinariForm
from reagent_lite.data.writing.minari import left_out as without_place
from reagent_lite.errors import ConfigError, Problem, counted
from reagent_lite.files import require_writable
from reagent_lite.progress import progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """What is left; printed as the last line of standard output.

    Attributes:
        log: path of the file or folder.
        rows: in it.
        episodes: of a Minari dataset; None for files, whose episodes are not counted.
        dropped_rows: last rows of episodes that merely stop, whose state became the last observation; Minari only.
        columns: that have values.
        left_out: columns that the target has no place for.
        rows_per_second: of the whole.
        seconds: in all.
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
    start = time.monotonic()
    target = Path(config.output_path).expanduser().absolute()
    files = data_files(config.input_path)
    for note in left_out(config.input_path):
        print(f"warning: {note}", file=sys.stderr, flush=True)
    _require_apart(config.input_path, files, target)
    require_writable(target.parent, "output_path")
    found = None
    if not target.name.endswith((".jsonl", ".jsonl.gz", ".jsonl.zst")):
        with progress("looking", "bytes", enabled=True) as show:
            found = survey(files, show)
    episodes, dropped, without = None, 0, []
    with progress("converting", "bytes", enabled=True) as show:
        if config.to_minari and found is not None:
            form = _form(config, found)
            without = without_place(found.names)
            writer = copy_to_minari(files, target, form, show)
            rows, episodes, dropped = writer.rows, writer.episodes, writer.dropped
        else:
            rows = copy_log(files, target, None if found is None else found.fields, show)
    seconds = time.monotonic() - start
    _report(target, rows, found, without, dropped)
    return Converted(
        log=str(target),
        rows=rows,
        episodes=episodes,
        dropped_rows=dropped,
        columns=[] if found is None else [name for name in found.names if name not in without],
        left_out=without,
        rows_per_second=round(rows / seconds, 1),
        seconds=round(seconds, 3),
    )


def _require_apart(source: str, files: tuple[InputFile, ...], target: Path) -> None:
    """Refuses a target that is part of the input, would become part of it, or is another kind of thing."""
    own = target.resolve()
    local = [Path(file.path).resolve() for file in files if not file.remote]
    folder = Path(source).expanduser().resolve()
    joins = folder.is_dir() and folder in own.parents
    if joins or own in local or any(own in file.parents for file in local):
        raise ConfigError(Problem("output_path", "a path outside the input", str(target), "Choose another folder"))
    is_dataset = (target / "data" / MINARI_DESCRIPTION).is_file()
    if target.is_dir() and not (target.name.endswith(MINARI_SUFFIX) and (is_dataset or not any(target.iterdir()))):
        kind = "a folder that is new or a Minari dataset" if target.name.endswith(MINARI_SUFFIX) else "a file"
        raise ConfigError(Problem("output_path", kind, f"the folder {target}", "Choose another name"))
    if target.is_file() and target.name.endswith(MINARI_SUFFIX):
        raise ConfigError(Problem("output_path", "a folder", f"the file {target}", "Choose another name"))


def _form(config: ConvertConfig, found: Survey) -> MinariForm:
    if not found.parametric and not config.actions:
        raise ConfigError(Problem("actions", "the names of all actions, for a Minari dataset", "none"))
    if found.parametric and config.actions:
        raise ConfigError(Problem("actions", "none, where actions are feature maps", repr(config.actions)))
    return MinariForm(
        dataset_id=config.minari_id,
        env_id=config.env_id or None,
        state_ids=tuple(sorted(found.state_ids)),
        actions=None if found.parametric else tuple(config.actions),
        action_ids=tuple(sorted(found.action_ids)) if found.parametric else (),
    )


def _report(target: Path, rows: int, found: Survey | None, without: list[str], dropped: int) -> None:
    lines = [f"{target}: {counted(rows, 'row')}"]
    if without:
        lines.append(f"left out, since Minari has no place for it: {', '.join(without)}")
    if dropped:
        stops = counted(dropped, "episode merely stops", "episodes merely stop")
        lines.append(f"{stops}: the state of the last row is the last observation")
    if found is not None and found.indexed and target.name.endswith(".csv"):
        lines.append("actions are indices; CSV has them as text, which is read as a name first where `actions` has it")
    for line in lines:
        print(line, file=sys.stderr, flush=True)
