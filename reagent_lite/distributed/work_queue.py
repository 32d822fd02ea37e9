"""A queue of work in a folder that several machines see: every change of state is the rename of one file.

waiting/NAME ─► held/NAME@WORKER ─┬─► done/NAME, failed/NAME
      ▲                           │
      └── stopped, or silent ─────┘

Two workers may try the same rename; the file is there for one of them only. A held file contains a number that its
worker changes, as machines of a run do in node 0's store; a worker whose number does not change is lost.
"""

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from reagent_lite.distributed.membership import Heartbeats
from reagent_lite.whole_files import process_mark, write_whole

_STATES = ("waiting", "held", "done", "failed")
_RECORDS = "records"


def fill_queue(folder: Path, names: Iterable[str]) -> None:
    """Writes the files of a new queue, in which all of `names` wait, into an empty folder."""
    for state in (*_STATES, _RECORDS):
        (folder / state).mkdir()
    for name in names:
        (folder / "waiting" / name).touch()


class WorkQueue:
    """One worker's view of a queue.

    Args:
        folder: the folder, which `fill_queue` has filled.
        lost_after: seconds of silence after which a worker is lost.
        polled_every: usual seconds between two calls of `take_over`.
    """

    def __init__(self, folder: Path, lost_after: float, *, polled_every: float) -> None:
        self._folder = folder
        self._worker = process_mark()
        self._beat = 0
        self._heartbeats: Heartbeats[str] = Heartbeats((), lost_after, polled_every=polled_every)

    def names(self, state: str) -> list[str]:
        """Returns the names in a state, sorted; those held are `NAME@WORKER`."""
        return sorted(os.listdir(self._folder / state))

    def claim(self) -> str | None:
        """Returns the name of work that now is this worker's, or None if none waits."""
        for name in self.names("waiting"):
            if self._move(self._folder / "waiting" / name, self._held(name)):
                self.beat(name)
                return name
        return None

    def beat(self, name: str) -> bool:
        """Gives a sign of life for claimed work; returns whether it still is this worker's.

        If the folder is not available there is no sign, and the work is this worker's until another one takes it.
        """
        self._beat += 1
        try:
            with self._held(name).open("r+b", buffering=0) as file:  # does not create it
                file.write(f"{self._beat:020}".encode())
        except FileNotFoundError:
            return False
        except OSError:
            pass
        return True

    def finish(self, name: str, record: Mapping[str, Any], *, failed: bool = False) -> bool:
        """Writes the record of claimed work and ends it; returns whether it still was this worker's."""
        if not self._held(name).exists():
            return False
        write_whole(self._folder / _RECORDS / f"{name}.json", json.dumps(record).encode())
        return self._move(self._held(name), self._folder / ("failed" if failed else "done") / name)

    def release(self, name: str) -> None:
        """Lets claimed work wait for another worker."""
        self._move(self._held(name), self._folder / "waiting" / name)

    def retry_failed(self) -> None:
        """Lets failed work wait again."""
        for name in self.names("failed"):
            self._move(self._folder / "failed" / name, self._folder / "waiting" / name)

    def take_over(self) -> list[str]:
        """Lets the work of lost workers wait again; returns its names."""
        beats = {}
        for held in self.names("held"):
            if not held.endswith(f"@{self._worker}"):
                with suppress(FileNotFoundError):
                    beats[held] = (self._folder / "held" / held).read_text()
        self._heartbeats.note(beats)
        lost = {held: held.rpartition("@")[0] for held in self._heartbeats.find_lost()}
        return [
            name
            for held, name in lost.items()
            if self._move(self._folder / "held" / held, self._folder / "waiting" / name)
        ]

    def record(self, name: str) -> dict[str, Any]:
        """Returns the record of ended work."""
        record: dict[str, Any] = json.loads((self._folder / _RECORDS / f"{name}.json").read_text())
        return record

    def _held(self, name: str) -> Path:
        return self._folder / "held" / f"{name}@{self._worker}"

    @staticmethod
    def _move(source: Path, target: Path) -> bool:
        """Renames a file; returns false if another worker has moved it elsewhere."""
        try:
            source.rename(target)
        except FileNotFoundError:  # also the answer to a request that NFS has repeated
            return target.exists()
        return True
