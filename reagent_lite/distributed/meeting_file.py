"""The file on the share with the address of node 0's store.

node 0   temporary file in the same folder ─► fsync ─► rename to the path          its record is removed at the end
others   list the folder ─► open ─► the record is a hint: only the answer at its address counts

Measured on NFS: a failed look-up hides a new file for 30 s; after a listing of the folder it appears within 0.07 s.
"""

import os
import socket
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlsplit

from pydantic import BaseModel, ConfigDict, ValidationError

from reagent_lite.errors import ConfigError, Problem, RendezvousError
from reagent_lite.folder_identity import FolderIdentity
from reagent_lite.whole_files import sync, write_synced

NO_FILE = "no file"
EMPTY_FILE = "an empty file"
NO_RECORD = "a file without a record of reagent-lite"
"""Texts with which a result of `read` begins if the path is free to use; any other text is an error of the share."""

_MOST_BYTES = 1 << 16


class Record(BaseModel):
    """Address and owner of node 0's store.

    Attributes:
        nonce: identifies the store, which contains it as well.
        token: secret of the store, written only to this file; "" without a file.
        run: identifies a launcher of node 0.
        job: name of the job, which machines of another job do not join; "" if it has none.
        attempt: number of restarts so far; the store has the current number, the file keeps the first.
        address, interface: numeric address and its interface.
        others: further addresses of that interface on which the store listens.
        started: start time in UTC, used only in messages.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    schema_version: Literal[1] = 1
    nonce: str
    token: str = ""
    run: str
    job: str = ""
    attempt: int
    address: str
    interface: str
    others: tuple[str, ...] = ()
    port: int
    num_nodes: int
    host: str
    pid: int
    started: str

    def __str__(self) -> str:
        return f"run {self.run} of host {self.host}, pid {self.pid}, at {self.address}:{self.port} since {self.started}"


@dataclass(frozen=True, slots=True)
class MeetingFile:
    """The file in init_method; nothing is cached, so every method accesses the share."""

    path: Path

    @classmethod
    def of(cls, init_method: str) -> "MeetingFile":
        """Returns the file of a URL such as `file:///share/run.rdzv`.

        Raises:
            ConfigError: the URL has a host, or its path is not absolute.
        """
        parts = urlsplit(init_method)
        path = Path(unquote(parts.path))
        if parts.netloc or not path.is_absolute() or path.name == "" or parts.query or parts.fragment:
            advice = "Three slashes: file:// and an absolute path"
            raise ConfigError(Problem("init_method", "file:///absolute/path/of/a/file", repr(init_method), advice))
        return cls(path)

    def read(self) -> Record | str:
        """Returns the record, or the reason for its absence."""
        try:
            if self.path.name not in os.listdir(self.path.parent):
                return NO_FILE
            with self.path.open("rb") as stream:
                data = stream.read(_MOST_BYTES)
        except OSError as error:  # such as ESTALE, if the file was replaced meanwhile
            return error.strerror or str(error)
        if not data.strip():
            return EMPTY_FILE
        try:
            return Record.model_validate_json(data)
        except ValidationError:
            return f"{NO_RECORD} ({len(data)} bytes)"

    def publish(self, record: Record, folder: FolderIdentity | None = None) -> None:
        """Writes the record and replaces an existing file, whatever it contains.

        Args:
            record: record of this run.
            folder: identity of the file's folder at the start of the run, if known.

        Raises:
            RendezvousError: the share cannot be written, or is not mounted any more.
        """
        temporary = self._temporary()
        try:
            if folder is not None:
                folder.require()
            temporary.touch(mode=0o600, exist_ok=False)
            write_synced(temporary, record.model_dump_json(indent=2).encode() + b"\n")
            temporary.rename(self.path)
            with suppress(OSError):  # some network filesystems refuse to sync a folder; the rename is on the server
                sync(self.path.parent)
        except OSError as error:
            raise self._unusable(error) from error
        finally:
            _remove(temporary)

    def require_usable(self, *, writable: bool) -> None:
        """Checks that the folder exists and, on node 0, that files can be written and renamed in it.

        Raises:
            RendezvousError: the folder cannot be used; the error has the system's reason.
        """
        temporary = self._temporary()
        renamed = self._temporary()
        try:
            if self.path.name in os.listdir(self.path.parent) and self.path.is_dir():
                raise RendezvousError(Problem(f"init_method {self.path}", "a file, or none yet", "a folder"))
            if writable:
                temporary.write_bytes(b"probe")
                temporary.rename(renamed)
        except OSError as error:
            raise self._unusable(error) from error
        finally:
            _remove(temporary)
            _remove(renamed)

    def remove(self, nonce: str) -> None:
        """Removes the file if it still has the record with this nonce; another run's file is kept."""
        record = self.read()
        if isinstance(record, Record) and record.nonce == nonce:
            _remove(self.path)

    def _temporary(self) -> Path:
        return self.path.with_name(f".{self.path.name}.{socket.gethostname()}.{os.getpid()}.{uuid.uuid4().hex[:8]}")

    def _unusable(self, error: OSError) -> RendezvousError:
        problem = Problem(
            f"share {self.path.parent}",
            "a folder that every machine reaches and node 0 can write",
            f"{type(error).__name__}: {error.strerror or error}",
            "Mount the share, free space on it, or point init_method at another folder",
        )
        return RendezvousError(problem)


def _remove(file: Path) -> None:
    with suppress(OSError):  # the share is gone: the next run replaces the file
        file.unlink(missing_ok=True)
