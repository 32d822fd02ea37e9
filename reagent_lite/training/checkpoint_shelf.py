"""The folder of checkpoints on rank 0's disk: what stands there whole, what is set aside, what may go.

checkpoints/  step_000100/  step_000120/ (manifest.json: sizes and hashes)   LATEST: a hint for people
              quarantine_step_000110/ damaged, kept to be looked at   .step_000130.77.tmp/ of a dead run, removed
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reagent_lite.errors import BundleError, Problem
from reagent_lite.files import appearing_folder, sync, write_whole
from reagent_lite.manifest import CHECKPOINT, FILE_NAME, read_document, seal_folder, verified

STATE, LEARNER, OPTIMIZER, JUDGES = "state.json", "learner.safetensors", "optimizer.safetensors", "judge.safetensors"
LATEST = "LATEST"
_TEMPORARY = (".step_*.tmp", ".step_*.old")


def rank_file(rank: int) -> str:
    """Returns the name of the file that holds what one rank had for itself."""
    return f"rank_{rank:04d}.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A whole checkpoint.

    Attributes:
        folder: where it is.
        state: its state.json.
    """

    folder: Path
    state: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.folder.parent.name}/{self.folder.name}"


class Shelf:
    """Checkpoints of a run, oldest to newest by the order in which they were written, not by their step.

    Args:
        folder: the run's checkpoints folder; it need not exist.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def tidy(self) -> None:
        """Removes what dead runs left half written, and puts back what one had moved aside."""
        for pattern in _TEMPORARY:
            for path in self.folder.glob(pattern):
                target = self.folder / path.name.split(".")[1]
                if path.suffix == ".old" and not target.exists():
                    path.rename(target)
                else:
                    shutil.rmtree(path, ignore_errors=True)

    def names(self) -> list[str]:
        """Returns the names of all checkpoints, the newest first; damaged ones may be among them."""
        written = filter(_is_checkpoint, self.folder.glob("step_*"))  # what others put there is not ours to remove
        return [path.name for path in sorted(written, key=_order, reverse=True)]

    def unfinished(self, note: Callable[[str], None]) -> Found | None:
        """Returns the newest whole checkpoint of a run that has not ended; damaged ones are set aside on the way.

        Args:
            note: is told what was damaged and where it went.

        Raises:
            BundleError: there are checkpoints, and none that can be read is whole; all stay where they are.
        """
        ended, damaged = set(), []
        found = None
        for name in self.names():
            folder = self.folder / name
            try:
                _, kept = verified(folder, CHECKPOINT, keep={STATE})
            except (BundleError, OSError) as error:
                damaged.append((name, str(error).splitlines()[0]))
                continue
            state = json.loads(kept[STATE])
            if state.get("finished", True):
                ended.add(state.get("run"))
            elif state["run"] not in ended:
                found = Found(folder=folder, state=state)
                break
        if damaged and not found and not ended:  # to begin anew would throw away what a person may still put right
            raise BundleError([
                Problem(str(self.folder / name), "a whole checkpoint of the unfinished run", reason,
                        "Look at the disk, put a copy back, or begin anew with --set checkpoint.resume=false")
                for name, reason in damaged
            ])  # fmt: skip
        instead = f"continuing from {found.folder.name}" if found else "no other of an unfinished run stands"
        for name, reason in damaged:
            aside = self._set_aside(self.folder / name)
            note(f"warning: checkpoint {name} is damaged ({reason}): set aside as {aside}; {instead}")
        return found

    def clear(self) -> None:
        """Removes all checkpoints."""
        for name in self.names():
            shutil.rmtree(self.folder / name)
        (self.folder / LATEST).unlink(missing_ok=True)

    @contextmanager
    def adding(self, name: str, document: dict[str, Any]) -> Iterator[Path]:
        """Gives an empty folder that becomes the checkpoint `name` once it is written, hashed and on the disk.

        Args:
            name: of the checkpoint; an older one of that name makes way.
            document: what its manifest says beside files.

        Raises:
            OSError: no space, or a disk that fails; nothing has changed then.
            BundleError: what was read back is not what was written; it has been set aside.
        """
        target = self.folder / name
        with appearing_folder(target) as temporary:
            yield temporary
            seal_folder(temporary, {"kind": "checkpoint", **document})
        try:
            verified(target, CHECKPOINT)
        except BundleError:
            self._set_aside(target)
            raise
        with suppress(OSError):  # the checkpoint stands; nothing but people's eyes reads the hint
            write_whole(self.folder / LATEST, name.encode() + b"\n")

    def keep_only(self, names: list[str]) -> None:
        """Removes all checkpoints but these."""
        for name in self.names():
            if name not in names:
                shutil.rmtree(self.folder / name, ignore_errors=True)

    def finish(self, name: str) -> None:
        """Marks a checkpoint as the end of its run; its other files stay the same bytes."""
        folder = self.folder / name
        manifest = read_document(folder, CHECKPOINT)
        state = json.loads((folder / STATE).read_bytes())
        with self.adding(name, manifest) as temporary:
            for file in folder.iterdir():
                if file.name not in (STATE, FILE_NAME):
                    _same(file, temporary / file.name)
            (temporary / STATE).write_text(json.dumps({**state, "finished": True}, indent=2))

    def _set_aside(self, folder: Path) -> str:
        names = [f"quarantine_{folder.name}", *(f"quarantine_{folder.name}.{n}" for n in range(1, 1000))]
        name = next(name for name in names if not (folder.parent / name).exists())
        folder.rename(folder.parent / name)
        sync(folder.parent)
        return name


def _is_checkpoint(folder: Path) -> bool:
    """Whether this program wrote the folder: it has files that others do not write, or lost all it had."""
    if folder.is_symlink() or not folder.is_dir() or not re.fullmatch(r"step_\d+", folder.name):
        return False
    files = {path.name for path in folder.iterdir()}
    return not files or bool(files & {LEARNER, JUDGES, rank_file(0)})


def _order(folder: Path) -> tuple[int, int]:
    """Returns the number a checkpoint was written as, and its step, which stands for it where that cannot be read."""
    step = folder.name.removeprefix("step_")
    try:
        serial = read_document(folder, CHECKPOINT).get("serial", 0)
    except (BundleError, OSError):
        serial = 1 << 62  # to be looked at first, and set aside
    return serial, int(step) if step.isdigit() else 0


def _same(file: Path, link: Path) -> None:
    """Gives a file a second name; a copy where the file system has no such thing."""
    try:
        os.link(file, link)
    except OSError:
        shutil.copyfile(file, link)
