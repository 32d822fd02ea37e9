"""The doctor's checks of all machines together: they meet as in a run, through a file next to the run's.

 meet ─► facts of all ─► connect to each ─► files: new, replaced ─► clocks ─► end
         fit together?   pairs without       seconds until others
                         connection          see them

In every step each machine sends a value to all others and waits for theirs.
"""

import os
import time
import uuid
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from reagent_lite.config import WorkflowConfig
from reagent_lite.distributed.connections import Connections, peers
from reagent_lite.distributed.declarations import Declaration, compare_declarations
from reagent_lite.distributed.key_value_store import LostError
from reagent_lite.distributed.launcher import Processes
from reagent_lite.distributed.meeting_file import MeetingFile
from reagent_lite.distributed.membership import Membership
from reagent_lite.distributed.nodes import Node
from reagent_lite.doctor.checks import CheckResult, fail, of_error, ok, warning
from reagent_lite.errors import ReagentLiteError
from reagent_lite.run.declaring import prepare_rendezvous
from reagent_lite.whole_files import write_synced

_ROUND_SECONDS = 0.005
_CONNECT_SECONDS = 5.0
_SLOW_SECONDS = 5.0  # until others see a file; a longer delay only makes joining slower, as it polls
_CLOCK_SECONDS = 60.0


def meet(
    config: WorkflowConfig, node: Node, processes: Processes, failures: tuple[str, ...], seconds: float
) -> list[CheckResult]:
    """Returns the rows of the checks of all machines together; every machine calls it.

    Args:
        config: config of the run.
        node: number of this machine and count of machines.
        processes: processes that this machine would start.
        failures: names of this machine's own checks that failed.
        seconds: seconds to wait for the others, and for their files to appear.
    """
    rows: list[CheckResult] = []
    folder: Path | None = None
    try:
        if config.init_method is not None and config.init_method.startswith("file:"):
            folder = MeetingFile.of(config.init_method).path.parent
            config = config.model_copy(update={"init_method": f"{config.init_method}.doctor"})
        membership, declaration = _join(config, node, processes, seconds)
    except ReagentLiteError as error:
        advice = "" if folder is None else f" {folder} must be the same share everywhere, and node 0's port reachable."
        row = of_error("machines meet", error)
        return [fail(row.name, row.found, f"{row.todo}.{advice} Run the doctor on all machines at once")]
    try:
        for rows_of_step in _examine(membership, declaration, failures, folder, seconds):
            rows += rows_of_step
    except LostError as error:
        rows.append(fail("machines stay together", str(error), "Look at the doctor's report there"))
    finally:
        membership.finish()
    return rows


def _join(config: WorkflowConfig, node: Node, processes: Processes, seconds: float) -> tuple[Membership, Declaration]:
    """Joins the others; returns the membership, and this machine's declaration to a run.

    The declarations are compared afterwards, as a difference would end the rendezvous.
    """
    rendezvous = prepare_rendezvous(config, node, processes, force=False)
    declaration = rendezvous.declaration
    rendezvous.settings = config.rendezvous.model_copy(update={"join_timeout_seconds": seconds})
    rendezvous.declaration = Declaration(
        node=node.index, host=declaration.host, pid=declaration.pid, processes=1, device="any"
    )
    return rendezvous.join(), declaration


def _examine(
    membership: Membership, declaration: Declaration, failures: tuple[str, ...], folder: Path | None, seconds: float
) -> Iterator[list[CheckResult]]:
    record = membership.record
    names = ", ".join(f"node {declared.node} is {declared.host}" for declared in membership.declarations)
    yield [ok("machines meet", f"all {len(membership.declarations)}, at {record.address}:{record.port}: {names}")]
    mine = {"failed": failures, "declaration": declaration.model_dump(mode="json")}
    facts = membership.exchange("facts", mine, seconds)
    yield _fit(facts)
    yield reach_others(membership, seconds)
    if folder is not None:
        yield watch_share(membership, seconds, folder)
    yield [_clocks(membership, seconds)]
    yield [_other_machines(membership.node, facts)]
    membership.exchange("end", True, seconds)


def _fit(facts: list[Any]) -> list[CheckResult]:
    problems, notes = compare_declarations([Declaration.model_validate(fact["declaration"]) for fact in facts])
    name = "machines fit together"
    rows = [fail(name, problem.fault, problem.todo or "Use the same config file") for problem in problems]
    rows += [warning(name, note, "Install the same release on every machine") for note in notes]
    return rows or [ok(name, "the same config, versions and kind of device; no GPU is used twice")]


def reach_others(membership: Membership, seconds: float) -> list[CheckResult]:
    """Connects to other machines; every machine gets the result of all pairs."""
    name = "machines reach each other"
    with closing(Connections(membership)) as connections:
        problems = connections.find_unreached(_CONNECT_SECONDS, seconds)
    rows = [fail(name, problem.fault, problem.todo) for problem in problems]
    count = len(membership.declarations)
    per_machine = len(peers(0, count))
    return rows or [ok(name, f"{count * per_machine} connections, each machine to {per_machine} others")]


def watch_share(membership: Membership, seconds: float, folder: Path) -> list[CheckResult]:
    """Measures how soon this machine sees files of the others: new files, and files that replace older ones."""
    file = folder / f".doctor.{uuid.uuid4().hex}"
    temporary = file.with_name(f"{file.name}.tmp")
    with suppress(OSError):
        os.listdir(folder)  # fills the caches that could hide later files
    rows: list[CheckResult] = []
    try:
        for what in ("new files", "replaced files"):
            word = uuid.uuid4().hex
            error = ""
            try:
                write_synced(temporary, word.encode())
                temporary.rename(file)
            except OSError as caught:
                error = f"{type(caught).__name__}: {caught.strerror or caught}"
            writes = membership.exchange(what, {"name": file.name, "word": word, "error": error}, 2 * seconds)
            delays = _watch(folder, {node: write for node, write in enumerate(writes) if not write["error"]}, seconds)
            refused = {node: write["error"] for node, write in enumerate(writes) if write["error"]}
            tables = membership.exchange(f"{what} seen", delays, 2 * seconds)
            rows += _rows_of_share(folder, what, refused, tables, seconds)
    finally:
        for left in (file, temporary):
            with suppress(OSError):
                left.unlink(missing_ok=True)
    return rows


def _watch(folder: Path, writes: dict[int, dict[str, str]], seconds: float) -> list[tuple[int, float | None]]:
    """Returns each writer's number with the seconds until its file is seen here; None if it did not appear."""
    delays: dict[int, float | None] = dict.fromkeys(writes)
    begun = time.monotonic()
    while None in delays.values() and (passed := time.monotonic() - begun) < seconds:
        for writer, write in writes.items():
            if delays[writer] is None and _shows(folder, write["name"], write["word"]):
                delays[writer] = passed
        time.sleep(_ROUND_SECONDS)
    return list(delays.items())


def _shows(folder: Path, name: str, word: str) -> bool:
    try:
        return name in os.listdir(folder) and (folder / name).read_text() == word
    except OSError:  # such as ESTALE: the file was replaced while it was read
        return False


def _rows_of_share(
    folder: Path, what: str, refused: dict[int, str], tables: list[list[tuple[int, float | None]]], seconds: float
) -> list[CheckResult]:
    name = f"share: {what}"
    rows = [
        (warning if writer else fail)(
            name,
            f"node {writer} cannot write in {folder}: {why}",
            "Only node 0 has to write there" if writer else "Mount it writable there",
        )
        for writer, why in refused.items()
    ]
    seen = [(delay, reader, writer) for reader, table in enumerate(tables) for writer, delay in table]
    rows += [
        fail(
            name,
            f"node {reader} does not see the file that node {writer} wrote in {folder} within {seconds:g} s",
            f"Mount the same share at {folder} on every machine; if its caches are slow, raise --wait",
        )
        for delay, reader, writer in seen
        if delay is None
    ]
    delays = [(delay, reader, writer) for delay, reader, writer in seen if delay is not None and reader != writer]
    if not delays:
        return rows
    longest, reader, writer = max(delays)
    text = f"seen by others within {longest:.2f} s (longest: of node {writer} on node {reader})"
    slow = warning(name, text, "Joining takes this much longer; lower the attribute cache times of the mount")
    return [*rows, slow if longest > _SLOW_SECONDS else ok(name, text)]


def _clocks(membership: Membership, seconds: float) -> CheckResult:
    """Compares the clocks at the moment at which the last machine announces itself.

    On each machine this moment lies between its last poll with a machine missing and its first poll with all machines.
    """
    membership.exchange("ready", True, seconds)
    deadline = time.monotonic() + seconds
    before = time.time()
    membership.give("here", True)
    while True:
        asked = time.time()
        if None not in membership.read_values("here") or time.monotonic() > deadline:
            break
        before = asked
        time.sleep(_ROUND_SECONDS)
    after = time.time()
    moments = membership.exchange("moment", ((before + after) / 2, (after - before) / 2), seconds)
    node = max(range(len(moments)), key=lambda i: abs(moments[i][0] - moments[0][0]))
    difference = abs(moments[node][0] - moments[0][0])
    within = moments[node][1] + moments[0][1]
    text = f"at most {difference:.2f} s from node 0's (node {node}, to within {within:.2f} s)"
    if difference <= _CLOCK_SECONDS:
        return ok("clocks", text)
    todo = "Training does not depend on clocks, but times in logs and of files will be misleading; run NTP"
    return warning("clocks", text, todo)


def _other_machines(node: int, facts: list[Any]) -> CheckResult:
    """Reports failed checks of the other machines."""
    failures = {i: fact["failed"] for i, fact in enumerate(facts) if i != node and fact["failed"]}
    if not failures:
        return ok("the other machines", "no check failed that prevents training")
    lines = (f"node {i} ({facts[i]['declaration']['host']}): {', '.join(names)}" for i, names in failures.items())
    return fail("the other machines", "\n".join(lines), "Look at the doctor's report there")
