"""The log of decisions: a SQLite database that all workers share, and the Parquet files that training reads.

 waiting decisions ─► one transaction ─► answers          reward ─► a transaction ─► answer
                           │  write-ahead log, moved into the database and synced once a poll
                           └─► reward_seconds old ─► assigned to a file ─► Parquet, by rename ─► deleted

Files hold all decisions up to a time, in the order of their ids. A decision is written when it is `reward_seconds` old,
with its reward or with reward 0, and not when its reward arrives: files must not depend on outcomes.

A killed process loses no answered decision, as committed data are with the operating system; a machine that loses power
loses what came after the last sync. The file NEWEST has the last number that was given, so that lost decisions are
counted at the next start. An id is LOG-NUMBER-CODE: the code is an HMAC of the number with a key that each start of a
server draws, so that ids cannot be guessed and none is given twice, even if a number is.

A decision that is assigned to a file is in that file or will be: after a crash the next server writes the file if it
does not exist, and deletes the decision.
"""

import errno
import hmac
import json
import math
import os
import re
import secrets
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeVar

from pydantic_core import to_json

from reagent_lite.config.column_names import EPISODE_COLUMNS
from reagent_lite.config.serve_config import ServeConfig
from reagent_lite.console import logger, machine_logger
from reagent_lite.data.served_log import WAITING, WaitingDecisions, newest_in
from reagent_lite.data.writing.decisions import choices_of, write_decisions
from reagent_lite.disk_room import disk_errors, require_writable, room_in
from reagent_lite.errors import ConfigError, DataError, Problem, pluralize
from reagent_lite.export.bundle import ChoiceKind
from reagent_lite.folder_lock import alone_in
from reagent_lite.mounts import find_mount
from reagent_lite.whole_files import sync, write_whole

T = TypeVar("T")
_TABLES = (
    "CREATE TABLE log (name TEXT, candidates INTEGER, decided INTEGER, latest INTEGER, written INTEGER)",
    "CREATE TABLE decisions (id INTEGER PRIMARY KEY, at INTEGER NOT NULL, episode TEXT, event BLOB NOT NULL)",
    "CREATE TABLE rewards (decision INTEGER PRIMARY KEY REFERENCES decisions ON DELETE CASCADE, event BLOB NOT NULL, "
    "file TEXT)",
)
# The sequence numbers that clients sent, unique in their episodes; a database of an earlier version gets them as well.
_NUMBERS = (
    "ALTER TABLE decisions ADD COLUMN number INTEGER",
    "CREATE UNIQUE INDEX numbers ON decisions (episode, number)",
)
# Whether a decision of the log had an mdp_id; logs of earlier versions are always of episodes.
_EPISODES = "ALTER TABLE log ADD COLUMN episodes INTEGER NOT NULL DEFAULT 1"
# Periods in which a server was running, in microseconds of the log's time; only these count as waiting for a reward.
_SERVED = "CREATE TABLE IF NOT EXISTS served (start INTEGER PRIMARY KEY, until INTEGER NOT NULL)"
# Keys of ids: each is that of the numbers from `first` on; numbers before the first one have ids of an earlier version.
_KEYS = "CREATE TABLE IF NOT EXISTS keys (first INTEGER PRIMARY KEY, key BLOB NOT NULL)"
# Id and time in microseconds of the newest decision; after its deletion, table `log` has them.
_LAST = """
    SELECT max(decided, ifnull(id, 0)), max(latest, ifnull(at, 0))
    FROM log LEFT JOIN (SELECT id, at FROM decisions ORDER BY id DESC LIMIT 1)
"""
_READY = "SELECT id FROM decisions JOIN rewards ON decision = id WHERE id <= ? ORDER BY id LIMIT ?"
_TIME = "%Y%m%dT%H%M%S%f"
_FILES = f"{'[0-9]' * 8}T{'[0-9]' * 12}-*.parquet"
_FILE_ROWS = 100_000  # largest number of decisions in a file; they are in memory while it is written
_FILE_BYTES = 32_000_000  # largest part of the database for a file; as Python's objects it is ten times as large
_BATCH_ROWS = 500  # changes in one transaction while files are written; new decisions wait for its end
_ROOM = 500_000  # bytes that must be free after a full disk before the log counts as healthy again
_NOTE_SECONDS = 10.0  # between two updates of the number of waiting decisions
BUSY_SECONDS = 0.7
"""Seconds in which a worker tries to log decisions or a reward while another process has the database."""
RETRY_SECONDS = 0.002
"""Seconds between two such tries."""
_WAIT_SECONDS = 5.0  # the same for the process of the files, which answers no requests
_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_CODE_BYTES = 8  # of an id
_NOTE = re.compile(rb"([0-9a-f]{8}) ([0-9]{18})\n")
_FEW_FRAMES = 8  # pages in the write-ahead log of a server that is hardly used
_WAL_BYTES = 32_000_000  # size above which the file of the write-ahead log is cut: to let it grow again takes time
NEWEST: Final = "decisions.newest"
"""File next to the database with the log's name and the newest number that was given to a decision."""
_NO_REWARD = to_json({"reward": 0.0})

_KINDS: tuple[ChoiceKind, ...] = ("named actions", "candidates", "items")
"""Kinds of decisions, indexed by column `candidates` of table `log`."""

Joined = Literal["joined", "again", "unknown"]
"""Outcome of a reward. joined: the reward was added to its decision; again: the decision has a reward already, or was
written; unknown: there is no such decision."""


class BusyError(OSError):
    """Another process has the database; nothing was written."""


class LogRow(NamedTuple):
    """A decision as the database stores it: its episode and number, and its JSON."""

    mdp_id: str | None
    json: bytes
    sequence_number: int | None

    @classmethod
    def of(cls, event: dict[str, Any]) -> "LogRow":
        """Returns the row of an event in the standard columns."""
        return cls(event["mdp_id"], to_json(event), event["sequence_number"])


class RepeatedError(Exception):
    """A decision of the database has the same mdp_id and sequence_number."""


class EpisodeChangedError(Exception):
    """Another process has decided about an episode of these decisions meanwhile."""


class DecisionLog:
    """A process's access to the log; it is not thread-safe.

    Args:
        config: the server's config.
        choices: kind of the decisions of a new log.
        epoch: nanoseconds from 1970 to the zero of the monotonic clock; the same in all processes of a server, so that
            they agree on the order of an episode. None: computed from the current time, or from the log's newest time
            if that is later.
        failure: the shared buffer of the property `failure`; None: a new one.

    Attributes:
        name: name of the log; all ids begin with it.
        choices: kind of the decisions.
        epoch, shared_failure: arguments for the other processes of the server.

    Raises:
        OSError: the database cannot be read.
    """

    def __init__(
        self, config: ServeConfig, *, choices: ChoiceKind, epoch: int | None = None, failure: Any = None
    ) -> None:
        self._config = config
        self._folder = Path(config.log).expanduser()
        path = _database(config)
        self._wal = path.with_name(f"{path.name}-wal")
        self._db = sqlite3.connect(path, _WAIT_SECONDS, isolation_level=None, check_same_thread=False)
        self.shared_failure = RawArray("c", 200) if failure is None else failure
        with self._errors():
            for setting in ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON", "wal_autocheckpoint=0"):
                self._db.execute(f"PRAGMA {setting}")
            if not self._all("SELECT name FROM sqlite_master"):
                self._create(choices)
            if not self._all("SELECT 1 FROM sqlite_master WHERE name = 'numbers'"):
                with self._transaction(_WAIT_SECONDS):
                    for statement in _NUMBERS:
                        self._db.execute(statement)
            self._db.execute(_SERVED)
            self._db.execute(_KEYS)
            if "episodes" not in (column[1] for column in self._all("PRAGMA table_info(log)")):
                self._db.execute(_EPISODES)
            ((self.name, kind),) = self._all("SELECT name, candidates FROM log")
            ((_, latest),) = self._all(_LAST)
            ((until,),) = self._all("SELECT ifnull(max(until), 0) FROM served")
            self._keys = self._all("SELECT first, key FROM keys ORDER BY first DESC")
            self._db.execute("PRAGMA busy_timeout = 0")  # waiting would stop the worker's other requests
        self._newest = os.open(path.with_name(NEWEST), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        self.choices = _KINDS[kind]
        self.epoch = self._epoch_after(1000 * max(latest, until)) if epoch is None else epoch
        self._start = self.microseconds()
        self._rotated = time.monotonic()
        self._noted = -math.inf
        self._note: WaitingDecisions | None = None
        self._size = self._bytes()

    @property
    def failure(self) -> str:
        """Why the log cannot be written; "" if it can be. All processes of the server share it."""
        return str(self.shared_failure.value, errors="replace")

    @property
    def waiting(self) -> int:
        """Decisions that are in no Parquet file.

        Raises:
            OSError: the database cannot be read.
        """
        with self._errors():
            ((decided, _),) = self._all(_LAST)
            return int(decided) - self.written

    @property
    def written(self) -> int:
        """Decisions that are in Parquet files."""
        ((written,),) = self._all("SELECT written FROM log")
        return int(written)

    def append(
        self, events: Iterable[LogRow | dict[str, Any]], also: Callable[[sqlite3.Connection], None] | None = None
    ) -> list[str]:
        """Commits decisions and returns their ids; an event without an episode gets one of its own.

        Args:
            events: standard columns except the reward, with the model's version, or the rows of such events;
                `mdp_id` and `sequence_number` may be None.
            also: further changes of the same transaction; if it raises, the log has none of the decisions.

        Raises:
            BusyError: another process has the database; a later call may succeed.
            OSError: the decisions could not be written; the log has none of them.
            RepeatedError: an episode would have a sequence number twice; the log has none of the decisions.
        """
        rows = [LogRow.of(event) if isinstance(event, dict) else event for event in events]
        if not rows:
            return []
        try:
            with self._transaction():
                ((last, latest),) = self._all(_LAST)
                start = max(self.microseconds(), latest + 1)
                self._db.executemany(
                    "INSERT INTO decisions VALUES (?, ?, ?, ?, ?)",
                    [(last + 1 + offset, start + offset, *row) for offset, row in enumerate(rows)],
                )
                if also is not None:
                    also(self._db)
                if any(row.mdp_id is not None for row in rows):
                    self._db.execute("UPDATE log SET episodes = 1 WHERE episodes = 0")
        except sqlite3.IntegrityError as error:
            raise RepeatedError from error
        self._note_newest(last + len(rows))
        return [self._id(last + 1 + offset) for offset in range(len(rows))]

    def find_decision(self, mdp_id: str | None, sequence_number: int | None) -> tuple[str, dict[str, Any]] | None:
        """Returns the id and the event of a decision that is in no Parquet file yet; None if there is none.

        Raises:
            OSError: the database cannot be read.
        """
        with self._errors():
            rows = self._all(
                "SELECT id, event FROM decisions WHERE episode = ? AND number = ?", mdp_id, sequence_number
            )
        return (self._id(rows[0][0]), json.loads(rows[0][1])) if rows else None

    def join(
        self,
        decision_id: str,
        given: dict[str, Any],
        also: Callable[[sqlite3.Connection, int], None] | None = None,
    ) -> Joined:
        """Commits the reward of a decision, with `terminal` and `metrics` if given.

        Args:
            decision_id: id of the decision.
            given: the reward.
            also: further changes of the same transaction, given the decision's number.

        Raises:
            BusyError: another process has the database; a later call may succeed.
            OSError: the reward could not be written.
        """
        digits = decision_id.split("-")[1] if "-" in decision_id else ""
        is_number = digits.isascii() and digits.isdecimal() and len(digits) <= 18
        if not is_number or not hmac.compare_digest(self._id(int(digits)).encode(), decision_id.encode()):
            return "unknown"
        try:
            with self._transaction():
                self._db.execute("INSERT INTO rewards VALUES (?, ?, NULL)", (int(digits), to_json(given)))
                if also is not None:
                    also(self._db, int(digits))
        except sqlite3.IntegrityError:  # a second reward, or no such decision
            with self._errors():
                ((last, _),) = self._all(_LAST)
            return "again" if 0 < int(digits) <= last else "unknown"
        return "joined"

    def read(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        """Returns the rows of a query of the database.

        Raises:
            OSError: the database cannot be read.
        """
        try:  # a context manager would take as long as the query
            return self._all(sql, *values)
        except sqlite3.Error:
            with self._errors():
                raise

    def write(self, change: Callable[[sqlite3.Connection], T]) -> T:
        """Commits a change of the database; returns its result.

        Raises:
            BusyError: another process has the database for long; a later call may succeed.
            OSError: the change could not be written.
        """
        with self._transaction(_WAIT_SECONDS):
            return change(self._db)

    def start_ids(self) -> None:
        """Draws the key of the ids of this server's decisions, and waits until it is on the disk."""
        with self._transaction(_WAIT_SECONDS):
            ((last, _),) = self._all(_LAST)
            self._db.execute("INSERT OR REPLACE INTO keys VALUES (?, ?)", (last + 1, secrets.token_bytes(16)))
        self._keys = self._all("SELECT first, key FROM keys ORDER BY first DESC")
        self._db.execute(
            "PRAGMA wal_checkpoint(PASSIVE)"
        )  # so that without the write-ahead log its decisions are known
        sync(self._wal)

    def _id(self, number: int) -> str:
        """Returns the id of a decision."""
        for first, key in self._keys:
            if number >= first:
                code = hmac.digest(key, b"%d" % number, "sha256")[:_CODE_BYTES].hex()
                return f"{self.name}-{number}-{code}"
        return f"{self.name}-{number}"

    def _note_newest(self, number: int) -> None:
        """Writes the newest number of a decision, unless another process has written a newer one."""
        with suppress(OSError):  # a full disk
            if self._noted_newest() < number:
                os.pwrite(self._newest, f"{self.name} {number:018d}\n".encode(), 0)

    def _noted_newest(self) -> int:
        match = _NOTE.fullmatch(os.pread(self._newest, 100, 0))
        return int(match[2]) if match and match[1] == self.name.encode() else 0

    def find_missing(self) -> str:
        """Returns which decisions were given after the newest of the database and of the files; "": none.

        They came after the last sync, and the write-ahead log that had them was damaged or removed, or the machine
        stopped; or the database was removed, and this one has another name.

        Raises:
            OSError: the file NEWEST is not one of a server.
        """
        content = os.pread(self._newest, 100, 0)
        match = _NOTE.fullmatch(content)
        if content and not match:
            raise OSError(errno.EEXIST, "a file that no server wrote", str(self._wal.with_name(NEWEST)))
        ((last, _),) = self._all(_LAST)
        os.ftruncate(self._newest, 0)
        self._note_newest(last)
        if not match:
            return ""
        name, newest = match[1].decode(), int(match[2])
        first = 1 + (int(last) if name == self.name else newest_in(self._folder, name))
        missing = pluralize(newest - first + 1, "decision")
        return f"{missing} missing, numbers {first} to {newest} of log {name}" if newest >= first else ""

    def forget_written(self) -> None:
        """Deletes decisions that the files have, whose deletion was lost with a write-ahead log.

        A file has all decisions from its first to its last, and those before are in earlier files.
        """
        newest = newest_in(self._folder, self.name)
        with self._transaction(_WAIT_SECONDS):
            self._db.execute("DELETE FROM decisions WHERE id <= ?", (newest,))
            self._db.execute("UPDATE log SET decided = max(decided, ?)", (newest,))
            ((last, _),) = self._all(_LAST)
            self._db.execute("UPDATE log SET written = ? - (SELECT count(*) FROM decisions)", (last,))

    def poll(self) -> None:
        """Writes a Parquet file if one is due, and syncs the database; after a failure the next poll tries again."""
        with self._errors(raising=False):
            due = time.monotonic() - self._rotated > self._config.rotate_seconds
            grown = self._bytes() - self._size > self._config.rotate_mb * 1e6
            if due or grown or self.failure or self.waiting > self._config.waiting_decisions:
                self.rotate()
            elif time.monotonic() - self._noted > _NOTE_SECONDS:
                self._note_waiting()
            ((_, frames, _),) = self._all("PRAGMA wal_checkpoint(PASSIVE)")  # while decisions go on
            if frames > _FEW_FRAMES:
                self._note_time()  # begins the log again, which syncs its header: else a worker would wait for that
            if self._wal.stat().st_size > _WAL_BYTES:
                self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            sync(self._wal)

    def rotate(self) -> None:
        """Moves the decisions that are `reward_seconds` old into Parquet files."""
        self._rotated = time.monotonic()
        with self._errors(raising=False):
            last = self._expire()
            is_full = True
            while True:
                for (file,) in self._all("SELECT DISTINCT file FROM rewards WHERE file IS NOT NULL ORDER BY file"):
                    self._hand_over(file)
                if not is_full:
                    break
                most = min(_FILE_ROWS, 1 + _FILE_BYTES * self.waiting // self._bytes())
                ready = [number for (number,) in self._all(_READY, last, most)]
                is_full = len(ready) == most
                file = self._file_of(ready) if ready else ""
                for batch in _batches([(file, number) for number in ready]):
                    with self._transaction(_WAIT_SECONDS):
                        self._db.executemany("UPDATE rewards SET file = ? WHERE decision = ?", batch)
            if shutil.disk_usage(self._wal.parent).free > _ROOM:  # with less, small writes succeed and others fail
                self.shared_failure.value = b""
            self._size = self._bytes()
            self._note_waiting()

    def _create(self, choices: ChoiceKind) -> None:
        with self._transaction(_WAIT_SECONDS):
            for table in (*_TABLES, _EPISODES):
                self._db.execute(table)
            self._db.execute("INSERT INTO log VALUES (?, ?, 0, 0, 0, 0)", (secrets.token_hex(4), _KINDS.index(choices)))

    def _expire(self) -> int:
        """Gives reward 0 to decisions whose time is up; returns the id of the newest of them.

        A decision's time is up after `reward_seconds`, or if too many decisions came after it.
        """
        self._note_time()  # a write, which notices a full disk in any case
        deadline = self._reward_deadline()
        with self._transaction(_WAIT_SECONDS):
            self._db.execute("DELETE FROM served WHERE until < ? AND start <> ?", (deadline, self._start))
        ((last,),) = self._all("SELECT ifnull(max(id), 0) FROM decisions WHERE at <= ?", deadline)
        excess = self.waiting - self._config.waiting_decisions
        if excess > 0:
            ((last_excess,),) = self._all("SELECT id FROM decisions ORDER BY id LIMIT 1 OFFSET ?", excess - 1)
            last = max(last, last_excess)
        late = self._all(
            "SELECT id, ? FROM decisions LEFT JOIN rewards ON decision = id WHERE decision IS NULL AND id <= ?",
            _NO_REWARD,
            last,
        )
        for batch in _batches(late):
            with self._transaction(_WAIT_SECONDS):
                self._db.executemany("INSERT OR IGNORE INTO rewards VALUES (?, ?, NULL)", batch)
        return int(last)

    def _note_time(self) -> None:
        """Notes that the server is running."""
        with self._transaction(_WAIT_SECONDS):
            self._db.execute("INSERT OR REPLACE INTO served VALUES (?, ?)", (self._start, self.microseconds()))

    def _reward_deadline(self) -> int:
        """Returns the time of the newest decisions that have waited `reward_seconds` while a server was running.

        Time without a server does not count: no reward could arrive then, and the clock may have been changed.
        """
        left = int(self._config.reward_seconds * 1e6)
        for start, until in self._all("SELECT start, until FROM served ORDER BY start DESC"):
            if until - start >= left:
                return int(until - left)
            left -= until - start
        return -1

    def _file_of(self, ready: Sequence[int]) -> str:
        """Returns the name of a file for decisions; it has the first and the last id if these are all between them."""
        moment = _date(self.microseconds())
        first, last = ready[0], ready[-1]
        ids = f"-{first}-{last}" if last - first + 1 == len(ready) else ""
        return f"{moment:{_TIME}}-{self.name}{ids}.parquet"

    def _note_waiting(self) -> None:
        """Writes the number of waiting decisions into the log's folder, for those who read its files."""
        self._noted = time.monotonic()
        oldest = self._all("SELECT at FROM decisions ORDER BY id LIMIT 1")
        note = WaitingDecisions(
            decisions=self.waiting,
            since=_date(oldest[0][0]).isoformat(timespec="seconds") if oldest else "",
            reward_seconds=self._config.reward_seconds,
        )
        if note != self._note:
            write_whole(self._folder / WAITING, note.json())
            self._note = note

    def _hand_over(self, file: str) -> None:
        """Writes the decisions that are assigned to a file, unless it exists, and deletes them from the database."""
        target = self._folder / file
        rows = self._all(
            "SELECT id, at, d.event, r.event FROM rewards r JOIN decisions d ON decision = id WHERE file = ? "
            "ORDER BY id",
            file,
        )
        if not target.exists():
            sync(self._wal)  # otherwise a loss of power could undo the assignment of decisions to the file
            ((episodes,),) = self._all("SELECT episodes FROM log")
            write_decisions(target, [self._row(*row, episodes=bool(episodes)) for row in rows])
            machine_logger.info(f"{target}: {pluralize(len(rows), 'decision')}")
        for batch in _batches(rows):
            with self._transaction(_WAIT_SECONDS):
                self._db.executemany("DELETE FROM decisions WHERE id = ?", [row[:1] for row in batch])
                self._db.execute(
                    "UPDATE log SET written = written + ?, decided = max(decided, ?), latest = max(latest, ?)",
                    (len(batch), *batch[-1][:2]),
                )

    def _row(self, number: int, at: int, event: bytes, reward: bytes, *, episodes: bool = True) -> dict[str, Any]:
        """Returns a decision in the standard columns; without those of `episodes` if the log has none."""
        row = json.loads(event)
        given = json.loads(reward)
        decision_id = self._id(number)
        date = _date(at).date().isoformat()
        if "policy" in row:
            row["decided"] = _date(at)
        if not episodes:
            every = {**row, **given, "decision_id": decision_id, "ds": date}
            return {name: value for name, value in every.items() if name not in EPISODE_COLUMNS}
        single = row["mdp_id"] is None  # an episode of one decision
        if single:
            row["mdp_id"] = decision_id
        if row["sequence_number"] is None:
            row["sequence_number"] = at
        return {
            **row,
            **given,
            "decision_id": decision_id,
            "ds": date,
            "terminal": single or given.get("terminal", False),
        }

    @contextmanager
    def _transaction(self, seconds: float = 0.0) -> Iterator[None]:
        """Commits the changes of the block; waits for at most `seconds` while another process has the database."""
        with self._errors(), self._db:
            end = time.monotonic() + seconds
            while not self._begin(raising=time.monotonic() >= end):
                time.sleep(RETRY_SECONDS)
            yield

    def _begin(self, *, raising: bool) -> bool:
        """Begins a transaction; returns false if another process has the database, or raises its error."""
        try:
            self._db.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            if raising or not _is_busy(error):
                raise
            return False
        return True

    @contextmanager
    def _errors(self, *, raising: bool = True) -> Iterator[None]:
        """Turns errors of the database into OSErrors and records them as the failure.

        That another process has the database is no failure if it raises: the caller may try again.
        """
        try:
            yield
        except (sqlite3.IntegrityError, BusyError):
            if raising:
                raise
            self.shared_failure.value = b"another process has the database"
        except (sqlite3.Error, OSError, DataError) as error:
            if raising and _is_busy(error):
                raise BusyError(errno.EBUSY, "another process has the database") from None
            if isinstance(error, sqlite3.Error):
                full = getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_FULL
                text = os.strerror(errno.ENOSPC) if full else str(error)
                error = OSError(errno.ENOSPC if full else errno.EIO, text)
            if not self.failure:
                machine_logger.warning(f"the log cannot be written: {error}; trying again")
            self.shared_failure.value = str(error).encode()[:199]
            if raising:
                raise error from None

    def _all(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        return self._db.execute(sql, values).fetchall()

    def _bytes(self) -> int:
        """Returns the size of the database without free pages."""
        pages, free, size = (
            self._all(f"PRAGMA {name}")[0][0] for name in ("page_count", "freelist_count", "page_size")
        )
        return int((pages - free) * size)

    def microseconds(self) -> int:
        """Returns the log's time since 1970, even if the clock is changed."""
        return (self.epoch + time.monotonic_ns()) // 1000

    def _epoch_after(self, latest: int) -> int:
        """Returns an epoch for which the log's time continues from now or from `latest`, whichever is later."""
        now = time.time_ns()
        if latest > now:
            behind = f"{(latest - now) / 1e9:,.0f} s behind the log in {self._folder}"
            logger.warning(f"the system's clock is {behind}: timestamps continue from the newest decision")
        return max(now, latest) - time.monotonic_ns()

    def close(self) -> None:
        """Closes the database."""
        self._db.close()
        os.close(self._newest)


def _is_busy(error: Exception) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in _BUSY


def _date(microseconds: int) -> datetime:
    return datetime.fromtimestamp(microseconds / 1e6, UTC)


def _batches(rows: Sequence[tuple[Any, ...]]) -> Iterator[Sequence[tuple[Any, ...]]]:
    for start in range(0, len(rows), _BATCH_ROWS):
        yield rows[start : start + _BATCH_ROWS]


def _database(config: ServeConfig) -> Path:
    folder = config.database or f"{config.log}/.decisions"  # hidden, so that training ignores it
    return Path(folder).expanduser() / "decisions.sqlite"


def require_usable(config: ServeConfig) -> None:
    """Checks the folders of the log before anything is created.

    Raises:
        ConfigError: the database would be on a network filesystem or is a link, or the log has a journal of an earlier
            version.
    """
    path = _database(config)
    mount = find_mount(path)
    if mount is not None and mount.is_network:
        got = f"{path.parent} on {mount.kind}, which SQLite's processes cannot share"
        raise ConfigError(Problem("database", "a folder on a local disk", got, "Name a folder of this machine"))
    if path.is_symlink():
        todo = "Name the folder of the file itself as database"
        raise ConfigError(Problem("database", f"{path} to be no link", f"one to {path.readlink()}", todo))
    for journal in sorted(Path(config.log).expanduser().glob(".worker-*/*.jsonl")):
        if journal.stat().st_size:
            todo = "Name another folder; or serve once with that version and reward_seconds 1e-6, then send SIGTERM"
            raise ConfigError(Problem("log", "no journal of an earlier version", str(journal), todo))


@contextmanager
def open_log(config: ServeConfig, *, choices: ChoiceKind) -> Iterator[DecisionLog]:
    """Opens the log in the process that writes its files, with the decisions of earlier servers.

    Args:
        config: the server's config.
        choices: kind of the decisions.

    Raises:
        FolderInUseError: another process uses the log.
        ConfigError: the log cannot be written, or has decisions of another kind.
        DataError: the database is damaged.
    """
    require_usable(config)
    path = _database(config)
    require_writable(path.parent, "database", keep=True)
    files = sorted(Path(config.log).expanduser().glob(_FILES))
    logged_choices: ChoiceKind = choices_of(files[-1]) if files else choices
    with alone_in(path.parent, "database"):
        with disk_errors(str(path), "a database of decisions"), room_in(path.parent, "database"):
            log = DecisionLog(config, choices=logged_choices)
        with closing(log):
            if log.choices != choices:
                expected = f"a folder for decisions among {choices}"
                raise ConfigError(Problem("log", expected, f"one for {log.choices}", "Name another folder"))
            with disk_errors(str(path), "a database of decisions"), room_in(path.parent, "database"):
                log.forget_written()
                missing = log.find_missing()
                log.start_ids()
            if missing:
                machine_logger.warning(
                    f"{path}: {missing}: it or {path.name}-wal was damaged or removed, or the machine stopped before "
                    "they were synced. Rewards for them are refused"
                )
            if log.waiting:
                machine_logger.info(f"{path}: {pluralize(log.waiting, 'decision')} of an earlier server")
            yield log
