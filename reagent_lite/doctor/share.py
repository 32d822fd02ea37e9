"""The doctor's checks, on a single machine, of the folder of init_method."""

import os
import pwd
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import disk_usage

from reagent_lite.config import WorkflowConfig
from reagent_lite.distributed.key_value_store import reach
from reagent_lite.distributed.meeting_file import MeetingFile, Record
from reagent_lite.distributed.nodes import Node
from reagent_lite.doctor.checks import CheckResult, fail, ok, skip, warning
from reagent_lite.memory import size_text
from reagent_lite.mounts import find_mount
from reagent_lite.whole_files import write_synced

_SLOW_SECONDS = 1.0
_LITTLE_BYTES = 1 << 20  # far more than a record, which has 1 kB
_PROBE = b"probe of the doctor\n" * 200


def check_share(config: WorkflowConfig, node: Node) -> Iterator[CheckResult]:
    """Checks the folder of init_method; only node 0 has to write it."""
    method = config.init_method
    if node.count == 1 or (method is not None and not method.startswith("file:")):
        yield skip("share", "not needed by one machine" if node.count == 1 else f"{method} needs no file")
        return
    if method is None:
        todo = "Name a file in a folder that all machines share, such as file:///share/run.rdzv; it need not exist"
        yield fail("share", f"{node.count} machines and no init_method", todo)
        return
    file = MeetingFile.of(method)
    folder = file.path.parent
    if not folder.is_dir():
        state = "a file" if folder.exists() else "not there"
        yield fail("share", f"{folder} is {state}", "Mount the share there, or point init_method at a folder of it")
        return
    yield from _mount(folder)
    yield from _speed(folder, node)
    yield _room(folder)
    yield _record(file)


def _mount(folder: Path) -> Iterator[CheckResult]:
    mount = find_mount(folder)
    if mount is None:
        yield skip("share: mount", "this system does not list its mounts")
        return
    if mount.is_network:
        yield ok("share: mount", str(mount))
    else:
        yield warning(
            "share: mount",
            f"this folder is on a local disk: {mount}",
            "Run the doctor on all machines at once to find out whether they share it",
        )
    yield from (warning("share: mount", option, todo) for option, todo in mount.warnings())


def _speed(folder: Path, node: Node) -> Iterator[CheckResult]:
    name = "share: write and read"
    try:
        seconds = _probe(folder)
    except OSError as error:
        reason = f"{folder}: {type(error).__name__}: {error.strerror or error}"
        if node.index:
            todo = "Only node 0 has to write here; the doctor cannot measure how soon others see its files"
            yield warning(name, reason, todo)
        else:
            yield fail(name, reason, "Mount it writable for this user, or free some space")
        return
    times = ", ".join(f"{step} {1000 * duration:.1f} ms" for step, duration in seconds.items())
    slow = warning(name, times, "Joining takes longer; check the load of the share's server")
    yield slow if sum(seconds.values()) > _SLOW_SECONDS else ok(name, times)


def _probe(folder: Path) -> dict[str, float]:
    """Writes, renames, lists and reads back a temporary file; returns the seconds of each step.

    Raises:
        OSError: a step failed, or the file does not contain what was written.
    """
    name = f".doctor.{socket.gethostname()}.{os.getpid()}.{uuid.uuid4().hex[:8]}"
    temporary = folder / f"{name}.tmp"
    final = folder / name
    steps: dict[str, Callable[[], object]] = {
        "write and fsync": lambda: write_synced(temporary, _PROBE),
        "rename": lambda: temporary.rename(final),
        "list": lambda: name in os.listdir(folder),
        "read back": lambda: final.read_bytes() == _PROBE,
    }
    seconds: dict[str, float] = {}
    try:
        for step, work in steps.items():
            begun = time.perf_counter()
            fits = work() is not False
            seconds[step] = time.perf_counter() - begun
            if not fits:
                raise OSError(f"{final}: the content differs from the text that was just written")
    finally:
        temporary.unlink(missing_ok=True)
        final.unlink(missing_ok=True)
    return seconds


def _room(folder: Path) -> CheckResult:
    free = disk_usage(folder).free
    status = folder.stat()
    text = f"{size_text(free)} free; {folder} belongs to {_user(status.st_uid)}, mode {status.st_mode & 0o7777:o}"
    if free < _LITTLE_BYTES:
        return fail("share: room", text, "Free some space on the share")
    return ok("share: room", f"{text}; this is {_user(os.getuid())}")


def _record(file: MeetingFile) -> CheckResult:
    """Reports the run whose record is in the file."""
    name = "share: file"
    record = file.read()
    if not isinstance(record, Record):
        return ok(name, f"{file.path}: {record}")
    reached = reach(record)
    if reached is not None:
        reached[0].close()
        return warning(
            name,
            f"{file.path} is used by a live {record}",
            "Give each job its own file, or end that run with --force",
        )
    return ok(name, f"{file.path} is stale: {record} does not answer; node 0 replaces it")


def _user(number: int) -> str:
    try:
        return f"{pwd.getpwuid(number).pw_name} ({number})"
    except KeyError:
        return str(number)
