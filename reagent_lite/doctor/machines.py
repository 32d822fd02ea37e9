"""What machines find out about each other: they meet as for a run, through a file beside the run's.

 meet ─► facts of all ─► connect to each ─► files: new, replaced ─► clocks ─► goodbye
          verdict         who cannot reach    when others' show

In every step each machine gives a value to all others and waits for theirs.
"""

import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reagent_lite.config import WorkflowConfig
from reagent_lite.distributed.connections import unreached_machines
from reagent_lite.distributed.launcher import Processes
from reagent_lite.distributed.meeting_file import MeetingFile
from reagent_lite.distributed.membership import Membership
from reagent_lite.distributed.nodes import Node
from reagent_lite.distributed.store import LostError
from reagent_lite.distributed.verdict import Declaration, compare
from reagent_lite.doctor.checks import Row, failed, of_error, ok, warning
from reagent_lite.errors import ReagentLiteError
from reagent_lite.run.launch import prepare_rendezvous

_ROUND_SECONDS = 0.02
_CONNECT_SECONDS = 5.0
_SLOW_SECONDS = 5.0  # for a file to show elsewhere: joining polls, so it only takes longer
_CLOCK_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """This machine, after the checks of it alone.

    Attributes:
        config: of the run.
        node: number and count.
        processes: it would start.
        failed: names of the checks that failed here.
    """

    config: WorkflowConfig
    node: Node
    processes: Processes
    failed: tuple[str, ...]


def meet(own: Machine, seconds: float) -> list[Row]:
    """Returns what all machines find together; every machine calls it.

    Args:
        own: this machine.
        seconds: how long it waits for the others, and for a file of theirs to show.
    """
    rows: list[Row] = []
    folder: Path | None = None
    init_method = own.config.init_method
    try:
        if init_method is not None and init_method.startswith("file:"):
            folder = MeetingFile.of(init_method).path.parent
            init_method = f"{init_method}.doctor"
        membership, declaration = _joined(own, init_method, seconds)
    except ReagentLiteError as error:
        advice = "" if folder is None else f" {folder} must be the same share everywhere, and node 0's port reachable."
        row = of_error("machines meet", error)
        return [failed(row.name, row.found, f"{row.todo}.{advice} Run the doctor on all machines at once")]
    try:
        for rows_of_step in _examine(own, membership, declaration, folder, seconds):
            rows += rows_of_step
    except LostError as error:
        rows.append(failed("machines stay together", str(error), "Look at the doctor's report there"))
    finally:
        membership.finish()
    return rows


def _joined(own: Machine, init_method: str | None, seconds: float) -> tuple[Membership, Declaration]:
    """Meets the others; returns the meeting, and what this machine would declare to a run.

    What may not fit is compared afterwards: here it would end the meeting.
    """
    config = own.config.model_copy(update={"init_method": init_method})
    rendezvous = prepare_rendezvous(config, own.node, own.processes, force=False)
    declaration = rendezvous.declaration
    rendezvous.settings = config.rendezvous.model_copy(update={"join_timeout_seconds": seconds})
    rendezvous.declaration = Declaration(
        node=own.node.index, host=declaration.host, pid=declaration.pid, processes=1, device="any"
    )
    return rendezvous.join(), declaration


def _examine(
    own: Machine, membership: Membership, declaration: Declaration, folder: Path | None, seconds: float
) -> Iterator[list[Row]]:
    record = membership.record
    names = ", ".join(f"node {one.node} is {one.host}" for one in membership.declarations)
    yield [ok("machines meet", f"all {own.node.count}, at {record.address}:{record.port}: {names}")]
    mine = {"failed": own.failed, "declaration": declaration.model_dump(mode="json")}
    facts = membership.exchange("facts", mine, seconds)
    yield _fit(facts)
    yield reach_others(membership, seconds)
    if folder is not None:
        yield watch_share(membership, seconds, folder)
    yield [_clocks(membership, seconds)]
    yield [_elsewhere(membership.node, facts)]
    membership.exchange("end", True, seconds)


def _fit(facts: list[Any]) -> list[Row]:
    problems, notes = compare([Declaration.model_validate(one["declaration"]) for one in facts])
    name = "machines fit together"
    rows = [failed(name, f"{one.where}: expected {one.expected}, got {one.got}", one.todo or "Use the same config file")
            for one in problems]  # fmt: skip
    rows += [warning(name, note, "Install the same release on every machine") for note in notes]
    return rows or [ok(name, "the same config, versions and kind of device; no GPU twice")]


def reach_others(membership: Membership, seconds: float) -> list[Row]:
    """Connects to every other machine; all learn of all pairs."""
    name = "machines reach each other"
    problems = unreached_machines(membership, _CONNECT_SECONDS, seconds)
    rows = [failed(name, f"{one.where}: expected {one.expected}, got {one.got}", one.todo) for one in problems]
    count = len(membership.declarations)
    pairs = count * (count - 1)
    return rows or [ok(name, f"{pairs} connections, each machine to each other")]


def watch_share(membership: Membership, seconds: float, folder: Path) -> list[Row]:
    """Measures how soon others' files show here: new ones, and ones put in the place of older ones."""
    file = folder / f".doctor.{uuid.uuid4().hex}"

    def put() -> str:
        word = uuid.uuid4().hex
        temporary = file.with_name(f"{file.name}.tmp")
        with temporary.open("w") as stream:
            stream.write(word)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.rename(file)
        return word

    with suppress(OSError):
        os.listdir(folder)  # fills the caches that could hide what comes
    rows: list[Row] = []
    try:
        new = _watch(membership, seconds, folder, "new", file.name, put)
        replaced = _watch(membership, seconds, folder, "replaced", file.name, put)
    finally:
        for left in (file, file.with_name(f"{file.name}.tmp")):
            with suppress(OSError):
                left.unlink(missing_ok=True)
    for what, table in (("new files", new), ("replaced files", replaced)):
        rows += _shown(folder, what, table, seconds)
    return rows


def _watch(
    membership: Membership, seconds: float, folder: Path, phase: str, name: str, put: Callable[[], str]
) -> list[Any]:
    """Puts a file and waits for those of the others; returns each machine's delays in seconds by writer.

    A delay runs from hearing of the file to seeing it, both by the clock of the machine that looks. None: it never
    showed; the text "" stands for a writer that could not write.
    """
    try:
        announced = {"name": name, "word": put()}
    except OSError as error:
        announced = {"name": "", "word": f"{type(error).__name__}: {error.strerror or error}"}
    membership.give(phase, announced)
    count, node = len(membership.declarations), membership.node
    since: dict[int, float] = {}
    delays: dict[str, float | str | None] = {}
    deadline = time.monotonic() + seconds
    while len(delays) < count - 1 and time.monotonic() < deadline:
        words = membership.given(phase)
        for i, word in enumerate(words):
            if word is None or i == node or str(i) in delays:
                continue
            since.setdefault(i, time.monotonic())
            if not word["name"]:
                delays[str(i)] = word["word"]
            elif _shows(folder, word["name"], word["word"]):
                delays[str(i)] = time.monotonic() - since[i]
        time.sleep(_ROUND_SECONDS / 4)
    missing = {str(i): None for i in range(count) if i != node and str(i) not in delays}
    return membership.exchange(f"{phase}_seen", delays | missing, 2 * seconds)


def _shows(folder: Path, name: str, word: str) -> bool:
    try:
        return name in os.listdir(folder) and (folder / name).read_text() == word
    except OSError:  # ESTALE among them: the file was replaced under our hands
        return False


def _shown(folder: Path, what: str, table: list[Any], seconds: float) -> list[Row]:
    name = f"share: {what}"
    refused = {writer: delay for seen in table for writer, delay in seen.items() if isinstance(delay, str)}
    rows = [
        (failed if writer == "0" else warning)(name, f"node {writer} cannot write in {folder}: {why}",
                                               "Only node 0 must" if writer != "0" else "Mount it writable there")
        for writer, why in sorted(refused.items())
    ]  # fmt: skip
    hidden = [(i, writer) for i, seen in enumerate(table) for writer, delay in seen.items() if delay is None]
    rows += [
        failed(name, f"node {i} does not see the file that node {writer} wrote in {folder} within {seconds:g} s",
               f"Mount the same share at {folder} on every machine; or its caches are long: raise --wait to find out")
        for i, writer in hidden
    ]  # fmt: skip
    delays = [(delay, i, w) for i, seen in enumerate(table) for w, delay in seen.items() if isinstance(delay, float)]
    if not delays:
        return rows
    longest, reader, writer = max(delays)
    found = f"shown elsewhere within {longest:.2f} s (longest: of node {writer} on node {reader})"
    slow = warning(name, found, "Joining takes this much longer; lower the attribute cache times of the mount")
    return [*rows, slow if longest > _SLOW_SECONDS else ok(name, found)]


def _clocks(membership: Membership, seconds: float) -> Row:
    """Compares each clock with node 0's, which answers each machine with its time: its question's and answer's mean."""
    membership.exchange("ready", True, seconds)
    difference, within = 0.0, 0.0
    deadline = time.monotonic() + seconds
    if membership.node == 0:
        open_questions = {one.node for one in membership.declarations if one.node}
        while open_questions and time.monotonic() < deadline:
            asks = membership.given("asks")
            for i in [i for i in open_questions if asks[i] is not None]:
                membership.give(f"clock_for_{i}", time.time())
                open_questions.remove(i)
            time.sleep(_ROUND_SECONDS / 10)
    else:
        asked = time.time()
        membership.give("asks", True)
        answer = f"clock_for_{membership.node}"
        while (clock := membership.given(answer)[0]) is None and time.monotonic() < deadline:
            time.sleep(_ROUND_SECONDS / 10)
        answered = time.time()
        if clock is not None:
            difference, within = (asked + answered) / 2 - clock, (answered - asked) / 2
    all_of_them = membership.exchange("difference", (difference, within), seconds)
    node = max(range(len(all_of_them)), key=lambda i: abs(all_of_them[i][0]))
    furthest, within = all_of_them[node]
    found = f"at most {abs(furthest):.2f} s from node 0's (node {node}, to within {within:.2f} s)"
    if abs(furthest) <= _CLOCK_SECONDS:
        return ok("clocks", found)
    return warning("clocks", found, "Nothing here depends on it, but times in logs and of files will mislead; run NTP")


def _elsewhere(node: int, facts: list[Any]) -> Row:
    """Tells of what the other machines found wrong with themselves."""
    bad = {i: one["failed"] for i, one in enumerate(facts) if i != node and one["failed"]}
    if not bad:
        return ok("the other machines", "found nothing that keeps them from training")
    found = "\n".join(f"node {i} ({facts[i]['declaration']['host']}): {', '.join(names)}" for i, names in bad.items())
    return failed("the other machines", found, "Look at the doctor's report there")
