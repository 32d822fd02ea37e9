"""The log of a worker: a journal that holds a decision before it is answered, and Parquet files that training reads.

 decision ─► journal, one write() ─► answer          reward ─► journal ─► answer
                      │  fsync once a poll
                      └─► rewarded, or waited long enough ─► Parquet, by rename ─► journal of the others

A killed process loses nothing that was answered, since what was written is the system's; a machine that loses its power
loses what came after the last fsync. The next start reads the journals again. It also reads the ids in Parquet files:
one may have been written just before a crash, and a second reward for its decisions is still refused.
"""

import asyncio
import itertools
import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic_core import to_json

from reagent_lite.config.serve import ServeConfig
from reagent_lite.console import logger, machine_logger
from reagent_lite.data.writing.decisions import among_candidates, decision_ids, write_decisions
from reagent_lite.errors import ConfigError, DataError, Problem, counted
from reagent_lite.files import alone_in, appearing_file, require_writable, room_in, sync

_STEM = 21  # characters of the time in a file's name
_TIME = "%Y%m%dT%H%M%S%f"
_DECIDED = re.compile(rb'\{"decision_id":"[^"]*","at":([0-9.]+)')

Joined = Literal["joined", "again", "unknown"]
"""What became of a reward: its decision waited for it; it has one, or was written; no such decision is known."""


@dataclass(slots=True)
class _Decision:
    """A decision that is in no Parquet file yet; `line` and `reward` are its lines in the journal."""

    at: float
    episode: str
    line: bytes
    reward: bytes = b""
    closed: bool = False

    def row(self) -> dict[str, Any]:
        row = json.loads(self.line)
        row["ds"] = datetime.fromtimestamp(row.pop("at"), UTC).date().isoformat()
        given = json.loads(self.reward) if self.reward else {"reward": 0.0}
        given.pop("reward_of", None)
        return {**row, **given, "terminal": row["terminal"] or given.get("terminal", False)}


class DecisionLog:
    """The log of one worker, which `open_log` opens; it is not thread-safe.

    Attributes:
        written: rows in Parquet files so far.
    """

    def __init__(self, config: ServeConfig, worker: int, folders: Sequence[Path], epoch: int) -> None:
        self.written = 0
        self._epoch, self._latest = epoch, 0
        self._config, self._worker, self._folder = config, worker, folders[0]
        self._waiting: dict[str, _Decision] = {}
        self._closed: dict[str, float] = {}  # ids in Parquet files, until no reward could come any more
        self._older = [file for folder in folders for file in sorted(folder.glob("*.jsonl"))]
        self._recover()
        self._number = itertools.count()
        self._begin()
        self._start = self._journal.stem
        self._rotated, self._since, self._unsynced = time.monotonic(), 0, False
        self._rotating = asyncio.Lock()
        self.failure = ""

    @property
    def waiting(self) -> int:
        """Decisions that are in no Parquet file."""
        return len(self._waiting)

    def append(self, events: Iterable[dict[str, Any]]) -> list[str]:
        """Writes decisions into the journal and returns their ids; events without an episode get one of their own.

        Args:
            events: columns of the contract but reward, with the model's version; `mdp_id` and `sequence_number` may be
                None.

        Raises:
            OSError: they could not be written; none is in the journal.
        """
        now, found = self._microseconds() / 1e6, {}
        for event in events:
            one, place = f"{self._worker}-{self._start}-{next(self._number)}", event["sequence_number"]
            alone = event["mdp_id"] is None
            filled: dict[str, Any] = {
                "mdp_id": one if alone else event["mdp_id"],
                "sequence_number": self._microseconds() if place is None else place,
                "terminal": alone,
            }
            line = to_json({"decision_id": one, "at": now, **event, **filled}) + b"\n"
            found[one] = _Decision(now, filled["mdp_id"], line)
        self._write(b"".join(one.line for one in found.values()))
        self._waiting |= found
        return list(found)

    def join(self, decision_id: str, given: dict[str, Any]) -> Joined:
        """Writes the reward of a decision, with `terminal` and `metrics` if given, into the journal.

        Raises:
            OSError: it could not be written.
        """
        decision = self._waiting.get(decision_id)
        if decision is None:
            return "again" if decision_id in self._closed else "unknown"
        if decision.reward or decision.closed:
            return "again"
        line = to_json({"reward_of": decision_id, **given}) + b"\n"
        self._write(line)
        decision.reward = line
        return "joined"

    async def poll(self) -> None:
        """Writes a Parquet file when one is due, and syncs the journal; what fails is tried again."""
        due = time.monotonic() - self._rotated > self._config.rotate_seconds or self.failure
        if due or self._since > self._config.rotate_mb * 1e6 or self.waiting > self._config.waiting_decisions:
            await self.rotate()
        if self._unsynced:
            self._unsynced = False
            try:
                await asyncio.to_thread(os.fsync, self._descriptor)
            except OSError as error:
                self._fail(error)

    async def rotate(self) -> None:
        """Writes the decisions that are complete into a Parquet file and starts a journal with the others."""
        async with self._rotating:
            ready = self._ready()
            self._rotated, self._since = time.monotonic(), 0
            if not ready and not self.failure:
                return
            stem = self._journal.stem
            try:
                self._switch()
                for one in ready:
                    self._waiting[one].closed = True
                decisions = [self._waiting[one] for one in ready]
                others = [line for one in self._waiting.values() if not one.closed for line in (one.line, one.reward)]
                await asyncio.to_thread(self._write_out, stem, decisions)
            except (OSError, DataError) as error:
                for one in ready:
                    self._waiting[one].closed = False
                self._fail(error)
                return
            self.written += len(ready)
            for one in ready:
                del self._waiting[one]
                self._closed[one] = time.time() + self._config.reward_seconds
            self._forget()
            try:  # apart: where it fails, the decisions are in the Parquet file nevertheless
                await asyncio.to_thread(self._keep, others)
                self.failure = ""
            except OSError as error:
                self._fail(error)

    def _ready(self) -> list[str]:
        """Returns the ids of complete decisions before which none of their episode still waits."""
        late = self._microseconds() / 1e6 - self._config.reward_seconds
        above, blocked, ready = self.waiting - self._config.waiting_decisions, set(), []
        for place, (one, decision) in enumerate(self._waiting.items()):
            complete = decision.reward or decision.at <= late or place < above
            if complete and decision.episode not in blocked:
                ready.append(one)
            else:
                blocked.add(decision.episode)
        return ready

    def _begin(self) -> None:
        """Starts a journal."""
        moment = datetime.fromtimestamp(self._microseconds() / 1e6, UTC)
        journal = self._folder / f"{moment:{_TIME}}.jsonl"
        self._descriptor = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        self._journal, self._size, self._unsynced = journal, 0, False

    def _switch(self) -> None:
        journal, descriptor, size = self._journal, self._descriptor, self._size
        self._begin()
        os.close(descriptor)
        if size:
            self._older.append(journal)
        else:
            journal.unlink(missing_ok=True)

    def _write_out(self, stem: str, decisions: list[_Decision]) -> None:
        for file in self._older:  # their last lines, as what follows may fail
            sync(file)
        if decisions:
            target = self._folder.parent / f"{stem}-{self._worker}.parquet"
            write_decisions(target, [one.row() for one in decisions])
            machine_logger.info(f"{target}: {counted(len(decisions), 'decision')}")

    def _keep(self, others: list[bytes]) -> None:
        """Writes lines that are still needed into one file in the place of the journals before the current one."""
        kept = self._journal.with_suffix(".kept.jsonl")
        with appearing_file(kept) as stream:
            stream.writelines(others)
        for file in self._older:
            file.unlink(missing_ok=True)
        self._older = [kept]

    def _forget(self) -> None:
        now = time.time()
        while self._closed:
            oldest = next(iter(self._closed))
            if self._closed[oldest] > now and len(self._closed) <= self._config.waiting_decisions:
                return
            del self._closed[oldest]

    def _fail(self, error: OSError | DataError) -> None:
        if self.failure != str(error):
            machine_logger.warning(f"the log cannot be written and is tried again: {error}")
        self.failure = str(error)

    def _microseconds(self) -> int:
        """Returns the log's time since 1970, later at each call, whatever the system's clock is set to meanwhile."""
        self._latest = max((self._epoch + time.monotonic_ns()) // 1000, self._latest + 1)
        return self._latest

    def _write(self, data: bytes) -> None:
        """Appends to the journal, or leaves it as it was."""
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(self._descriptor, left) :]
        except OSError as error:
            self._fail(error)
            os.ftruncate(self._descriptor, self._size)
            raise
        self._size += len(data)
        self._since += len(data)
        self._unsynced = True

    def _recover(self) -> None:
        """Reads the journals that an earlier server left."""
        rewards, damaged = {}, 0
        for file in self._older:
            for line in file.read_bytes().splitlines(keepends=True):
                try:
                    found = json.loads(line) if line.endswith(b"\n") else {}
                    if "reward_of" in found:
                        rewards[found["reward_of"]] = line
                    else:
                        self._waiting[found["decision_id"]] = _Decision(found["at"], found["mdp_id"], line)
                except (ValueError, KeyError, TypeError):
                    damaged += 1
        oldest = min((file.name for file in self._older), default="a")[:_STEM]
        for file in _files(self._folder.parent):
            until = file.stat().st_mtime + self._config.reward_seconds
            if until > time.time() or file.name[:_STEM] >= oldest:
                own = [one for one in decision_ids(file) if worker_of(one, self._config) == self._worker]
                self._closed |= dict.fromkeys(own, until)
                for one in own:
                    self._waiting.pop(one, None)
        self._forget()
        for one, line in rewards.items():
            if one in self._waiting:
                self._waiting[one].reward = line
        self._waiting = dict(sorted(self._waiting.items(), key=lambda item: item[1].at))
        if damaged:
            machine_logger.warning(f"{self._folder}: {counted(damaged, 'line')} of the journal cannot be read")
        if self._waiting:
            machine_logger.info(f"{self._folder}: {counted(self.waiting, 'decision')} of an earlier server")

    async def close(self) -> None:
        """Writes what is complete; decisions that wait for their reward stay in the journal for the next start."""
        await self.rotate()
        with suppress(OSError):
            os.fsync(self._descriptor)
        os.close(self._descriptor)


def _files(folder: Path) -> list[Path]:
    """Returns the Parquet files of a log, in the order of time."""
    return [file for file in sorted(folder.glob("*.parquet")) if re.fullmatch(r"\d{8}T\d{12}-\d+", file.stem)]


def worker_of(decision_id: str, config: ServeConfig) -> int:
    """Returns the worker that has a decision, or would have one of this id."""
    number = decision_id.partition("-")[0]
    return int(number) % config.workers if number.isdecimal() and len(number) < 9 else 0


def epoch_of_clock(folder: Path) -> int:
    """Returns the nanoseconds from 1970 to the zero of the monotonic clock, which all processes of a machine share.

    The time since 1970 is the system's, or that of the newest decision in the journals of the log's folder if that is
    later: decisions of a server are numbered after those of earlier servers.
    """
    now = time.time_ns()
    latest = max((_last_in(file) for file in folder.glob(".worker-*/*.jsonl")), default=0)
    if latest > now:
        behind = f"{(latest - now) / 1e9:,.0f} s behind the newest decision in {folder}"
        logger.warning(f"the system's clock is {behind}: decisions are numbered and dated from that one on")
    return max(now, latest) - time.monotonic_ns()


def _last_in(journal: Path) -> int:
    """Returns when a journal was begun, or its last decision made, in nanoseconds since 1970."""
    begun = datetime.strptime(journal.name[:_STEM], _TIME).replace(tzinfo=UTC)
    with journal.open("rb") as lines:
        decided = (float(found[1]) for found in map(_DECIDED.match, lines) if found)
        return round(max(decided, default=begun.timestamp()) * 1e9)


@contextmanager
def open_log(config: ServeConfig, worker: int, *, parametric: bool, epoch: int | None = None) -> Iterator[DecisionLog]:
    """Yields the log of a worker, with the decisions of earlier servers; those of former workers are divided.

    Args:
        config: the server's.
        worker: number of the worker.
        parametric: whether decisions are among candidates.
        epoch: `epoch_of_clock` when the server started, so that workers agree on the order of an episode; None: now's.

    Raises:
        FolderInUseError: another process uses it.
        ConfigError: it cannot be written, or has decisions of another kind.
    """
    own = Path(config.log).expanduser() / f".worker-{worker}"  # hidden, so that training ignores it
    require_writable(own, "log", keep=True)
    others = [
        folder
        for folder in sorted(own.parent.glob(".worker-*"))
        if folder != own and folder.name[8:].isdecimal() and int(folder.name[8:]) % config.workers == worker
    ]
    with ExitStack() as locks:
        for folder in (own, *others):
            locks.enter_context(alone_in(folder, "log"))
        with room_in(own, "log"):
            log = DecisionLog(config, worker, [own, *others], epoch_of_clock(own.parent) if epoch is None else epoch)
        kinds = {isinstance(one.row()["action"], dict) for one in log._waiting.values()}
        kinds.update(map(among_candidates, _files(own.parent)[-1:]))
        if kinds - {parametric}:
            kind = "candidates" if parametric else "named actions"
            raise ConfigError(Problem("log", f"a folder for decisions among {kind}", "others", "Give another folder"))
        yield log
