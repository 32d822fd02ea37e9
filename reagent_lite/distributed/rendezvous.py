"""How machines that share a folder, or know node 0's address, meet: each gets its Membership.

 node 0   a store on one interface ─► record in the file ─┐                    ┌─► all are there: verdict, go
                                                          ├─► declare, beat ───┤
 others   poll the file ─► who answers there? ────────────┘                    └─► deadline: who is missing, abort

init_method   file:///share/run.rdzv   tcp://host:port (node 0 listens there)   nothing, for one machine
Clocks of two machines are never compared. The existence of a file decides nothing; what counts is who answers. The
store lives as long as node 0's launcher, so another attempt needs no share: the machines return to the same store.
"""

import os
import random
import secrets
import socket
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TypeVar
from urllib.parse import urlsplit

from reagent_lite.config.rendezvous import RendezvousConfig
from reagent_lite.console import logger
from reagent_lite.distributed.meeting_file import EMPTY_FILE, NO_FILE, NO_RECORD, MeetingFile, Record
from reagent_lite.distributed.membership import ROUND_SECONDS, Failure, Heartbeats, LaunchError, Membership
from reagent_lite.distributed.network import Address, addresses, connection_error, listening, own_address, resolved
from reagent_lite.distributed.nodes import Node
from reagent_lite.distributed.store import ANSWER_SECONDS, Background, Link, LostError, Store, reach, serve
from reagent_lite.distributed.verdict import Declaration, Verdict, verdict_on
from reagent_lite.errors import ConfigError, Problem, RendezvousError, counted
from reagent_lite.files import FolderIdentity

_LOG_SECONDS = 10.0  # between two lines on what is waited for
_LONGEST_POLL = 2.0
_SHARE_SECONDS = 20.0
_CHECK_SECONDS = 1.0
_READ_ATTEMPTS = 5
_FORCE_SECONDS = 30.0
_OTHER_JOB_SECONDS = 5.0  # for a job that just ends, or is ended by --force
_LOOPBACK = Address("lo", "127.0.0.1")
T = TypeVar("T")


class _AttemptEndedError(Exception):
    """This attempt ended before all had come; the next one may do better."""


@dataclass(slots=True)
class Rendezvous:
    """Meets the other machines, once for each attempt.

    Attributes:
        node: this machine.
        init_method: see above.
        settings: the section `rendezvous` of the config.
        declaration: the declaration of this machine.
        force: whether to end a live run that holds the file.
        interrupted: called while waiting; raises to leave.
    """

    node: Node
    init_method: str | None
    settings: RendezvousConfig
    declaration: Declaration
    force: bool = False
    interrupted: Callable[[], None] = lambda: None
    _served: tuple[Store, Record] | None = None  # node 0's store, and the record of the present attempt
    _ended: Record | None = None  # of the latest attempt that is over
    _folder: FolderIdentity | None = None
    _share: Background = field(default_factory=Background)

    def preflight(self) -> None:
        """Checks the meeting place before any machine waits there.

        Raises:
            ConfigError: see `meeting_place`.
            RendezvousError: the share cannot be used, or an interface or host name does not exist.
        """
        if self.node.count == 1:
            return
        file = self._file
        serves = self.node.index == 0
        if self.settings.interface is not None or (serves and file is not None):
            own_address(self.settings.interface)
        if file is None:
            self._meeting_point()
        else:
            self._on_share(lambda: file.require_usable(writable=serves))
            self._folder = self._on_share(lambda: FolderIdentity.of(file.path.parent))

    def join(self) -> Membership:
        """Waits until all machines have come, and returns this machine's membership; a further call is another attempt.

        Raises:
            RendezvousError: not all came within settings.join_timeout_seconds, another run holds the place, this number
                is taken, or the machines do not fit together.
            LaunchError: another machine reported such an error.
        """
        begun = time.monotonic()
        deadline = begun + self.settings.join_timeout_seconds
        while True:
            link, record = self._begin() if self.node.index == 0 else self._find(deadline)
            try:
                declarations = self._meet(link, record, deadline)
                break
            except (LostError, _AttemptEndedError) as error:
                logger.info(f"rendezvous: {record}: {error}; polling again")
                link.close()
                if isinstance(error, _AttemptEndedError):  # one that was only out of reach may be joined after all
                    self._ended = record
                time.sleep(ROUND_SECONDS)
            except BaseException:
                link.close()
                self.close()
                raise
        self._ended = record  # when this is called again
        membership = Membership(link, record, self.node.index, declarations, self.settings, self.close)
        if self.node.count > 1:
            met = f"{self.node.count} machines met after {time.monotonic() - begun:.1f} s"
            processes = counted(membership.world_size, "process")
            logger.info(f"rendezvous: {met}: {processes}, attempt {record.attempt}")
        return membership

    def close(self) -> None:
        """Ends node 0's store and removes its record; nothing on other machines."""
        served = self._served
        self._served = None
        if served is not None and (file := self._file) is not None:
            with suppress(RendezvousError):  # a share that hangs: the next run replaces what is left
                self._on_share(lambda: file.remove(served[1].nonce))

    # ---- node 0

    def _begin(self) -> tuple[Link, Record]:
        """Begins an attempt in node 0's store, which the first one opens and makes known."""
        first = self._served is None
        store, record = self._served or self._serve()
        if self._ended is not None:
            record = record.model_copy(update={"attempt": self._ended.attempt + 1})
        public = record.model_dump_json(exclude={"token"})
        begun = store.begin(record.attempt, {"record": public, "nonce": record.nonce})
        if self.node.count > 1:
            file = self._file
            if file is not None and first:
                self._on_share(lambda: file.publish(record, self._folder))
            where = self.init_method if file is None else file.path
            listens = f"listens at {record.address}:{record.port} ({record.interface}), found through {where}"
            logger.info(f"rendezvous: node 0 of {self.node.count} {listens}, attempt {record.attempt}")
        self._served = begun, record
        return Link(lambda: begun), record

    def _serve(self) -> tuple[Store, Record]:
        own = _LOOPBACK
        port = 0
        token = ""
        others = list[Address]()
        if self.node.count > 1 and (file := self._file) is not None:
            self._require_free(file)
            own = own_address(self.settings.interface)
            port = self.settings.port
            token = secrets.token_hex(32)
            if not own.is_loopback and self.settings.interface != own.address:
                others = [a for a in addresses() if a.interface == own.interface and a != own and a.is_routable]
        elif self.node.count > 1:
            address, port = self._meeting_point()
            own = own_address(address)
        server = listening(own.address, port, own.interface if others else None)
        if server.getsockname()[0] == own.address:  # not bound to the interface
            others = []
        record = Record(
            nonce=uuid.uuid4().hex,
            token=token,
            run=self.declaration.run,
            job=self.declaration.job,
            attempt=0,
            address=own.address,
            interface=own.interface,
            others=tuple(one.address for one in others),
            port=server.getsockname()[1],
            num_nodes=self.node.count,
            host=socket.gethostname(),
            pid=os.getpid(),
            started=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        return serve(server, own.address, token), record

    def _require_free(self, file: MeetingFile) -> None:
        """Makes sure that no live run holds the file; a stale record is simply replaced."""
        for _ in range(_READ_ATTEMPTS):
            found = self._on_share(file.read)
            if isinstance(found, Record) or found.startswith((NO_FILE, EMPTY_FILE, NO_RECORD)):
                break
            time.sleep(1.0)  # such as a stale handle, while somebody replaces the file
        else:
            expected = "a file that can be read, or none"
            todo = "A live run may hold it; look at the share, or choose"
            raise RendezvousError(Problem(str(file.path), expected, str(found), f"{todo} another file"))
        if not isinstance(found, Record) or found.run == self.declaration.run:
            return
        reached = reach(found)
        if reached is None:
            logger.info(f"rendezvous: {file.path} is left from {found}, which does not answer: replaced")
            return
        link, _ = reached
        if not self.force:
            link.close()
            todo = "Give each job a file of its own; or end that run with --force"
            raise RendezvousError(Problem(str(file.path), "a file that no live run uses", str(found), todo))
        ended = Failure(reason=f"ended by --force from host {socket.gethostname()}, pid {os.getpid()}", restart=False)
        with suppress(LostError):
            link.call(ended.set)
        link.close()
        self.force = False  # a run that comes between two attempts is not meant
        logger.info(f"rendezvous: --force: ended {found}")
        deadline = time.monotonic() + _FORCE_SECONDS
        while time.monotonic() < deadline and not connection_error(found.address, found.port, 1.0):
            time.sleep(ROUND_SECONDS)

    def _keep(self, file: MeetingFile, record: Record) -> None:
        """Checks that the file still leads here: it may have been removed, or another job began in the same instant."""
        try:
            found = self._on_share(file.read)
            if isinstance(found, str) and found.startswith((NO_FILE, EMPTY_FILE)):
                logger.info(f"rendezvous: {file.path} is gone while machines meet: written again")
                self._on_share(lambda: file.publish(record, self._folder))
        except RendezvousError:
            return  # a share that is gone for the moment: the others see no file either
        if isinstance(found, Record) and found.nonce != record.nonce and (reached := reach(found)) is not None:
            reached[0].close()
            got = f"{found}, which took it meanwhile"
            todo = "Give each job a file of its own"
            raise RendezvousError(Problem(str(file.path), "a file that no other job uses", got, todo))

    # ---- the other machines

    def _find(self, deadline: float) -> tuple[Link, Record]:
        """Polls until node 0 answers."""
        delay = 0.2
        logged = time.monotonic()
        other_job_since: float | None = None
        while True:
            self.interrupted()
            reached = reach(self._ended) if self._ended is not None else None  # needs no share
            if reached is None:
                found = self._hint()
                state = f"{found}, which does not answer" if isinstance(found, Record) else found
                reached = reach(found) if isinstance(found, Record) else None
            now = time.monotonic()
            if reached is not None:
                link, record = reached
                other_job = self._other_job(record)
                if not self._is_over(record) and now <= deadline and other_job is None:
                    return reached
                link.close()
                over = f"whose attempt {record.attempt} has ended" if now <= deadline else "which answers late"
                state = f"{record}, {over}"
                if other_job is not None:
                    other_job_since = other_job_since or now
                    if now - other_job_since > _OTHER_JOB_SECONDS:
                        raise other_job
                    state = f"{record}, of job {record.job!r}"
            if now > deadline:
                where = f"node {self.node.index} (host {socket.gethostname()}): {self.init_method}"
                expected = f"node 0 within {self.settings.join_timeout_seconds:g} s"
                todo = "Start the same command with --node_index=0; check that its address and port are reachable"
                raise RendezvousError(Problem(where, expected, state, f"{todo} (workflows.doctor)"))
            if now - logged > _LOG_SECONDS:
                logged = now
                waits = f"node {self.node.index} waits for node 0 at {self.init_method}"
                logger.info(f"rendezvous: {waits}: {state}; {deadline - now:.0f} s left")
            time.sleep(delay * random.uniform(0.5, 1.0))
            delay = min(delay * 1.5, _LONGEST_POLL)

    def _other_job(self, record: Record) -> RendezvousError | None:
        job = self.declaration.job
        if record.job == job or not (record.job and job):
            return None
        where = f"node {self.node.index} (host {socket.gethostname()}): {self.init_method}"
        todo = "Give each job a file or port of its own; machines of one job need the same rendezvous.job"
        return RendezvousError(Problem(where, f"machines of job {job!r}", f"job {record.job!r} ({record})", todo))

    def _is_over(self, record: Record) -> bool:
        ended = self._ended
        return ended is not None and record.nonce == ended.nonce and record.attempt <= ended.attempt

    def _hint(self) -> Record | str:
        """Returns the record at the meeting place, or why there is none."""
        if (file := self._file) is not None:
            try:
                return self._on_share(file.read)
            except RendezvousError as error:
                return error.problems[0].got
        address, port = self._meeting_point()
        if why := connection_error(address, port, _LONGEST_POLL):
            return f"{address}:{port}: {why}"
        link = Link.to(address, port, "", ANSWER_SECONDS)
        try:
            return Record.model_validate_json(link.call(lambda store: store.get("record") or "", ANSWER_SECONDS))
        except (LostError, ValueError) as error:
            return f"{address}:{port} is no run of ours: {error}"
        finally:
            link.close()

    # ---- all machines

    def _meet(self, link: Link, record: Record, deadline: float) -> tuple[Declaration, ...]:
        """Waits for all machines, and returns their declarations if they fit together, which node 0 decides."""
        number = self.node.index
        lost_after = self.settings.lost_after_seconds
        declaration = self.declaration
        other_count = self._other_count(record)
        if other_count is not None:
            if number >= record.num_nodes:  # node 0 does not look for this machine
                raise other_count
            declaration = declaration.model_copy(
                update={"problem": str(other_count), "exit_code": other_count.exit_code}
            )
        mine = declaration.model_dump_json()
        places = _Places(self.node.count, self.settings)
        file = self._file if number == 0 else None
        begun = checked = logged = time.monotonic()
        held: str | None = None  # the first beat of another machine that has this number

        def poll(store: Store) -> tuple[str, str | None, Failure | None, str | None, str]:
            holder = store.set_once(f"node/{number}", mine)  # again where node 0 took this machine for gone
            if holder == mine:
                store.set(f"beat/{number}", f"join.{self.declaration.run}.{time.monotonic()}")
            if number == 0:
                places.update(store)
            missing = store.get("missing") or "0"
            return holder, store.get(f"beat/{number}"), Failure.of(store), store.get("go"), missing

        while True:
            self.interrupted()
            holder, beat, failure, go, missing = link.call(poll, lost_after)
            now = time.monotonic()
            if holder != mine:
                if other_count is not None:
                    raise other_count
                if held is not None and beat != held:
                    raise RendezvousError(self._taken(holder))
                held = held or beat
                if failure is not None:
                    raise _AttemptEndedError("its attempt has ended")
                if now - begun > 3 * lost_after:
                    raise _AttemptEndedError(f"node_index {number} is held by a machine without a heartbeat")
            elif go is not None:
                return self._fitting(Verdict.model_validate_json(go))
            elif failure is not None:
                raise _AttemptEndedError(failure.reason) if failure.restart else LaunchError(failure)
            elif now > deadline:
                raise self._ended_for_all(link, self._absent(missing))
            elif now - logged > _LOG_SECONDS:
                logged = now
                logger.info(f"rendezvous: waiting for node {missing} of {self.node.count}; {deadline - now:.0f} s left")
            if file is not None and now - checked > _CHECK_SECONDS:
                checked = now
                try:
                    self._keep(file, record)
                except RendezvousError as error:
                    raise self._ended_for_all(link, error) from None
            time.sleep(ROUND_SECONDS / 2)

    def _other_count(self, record: Record) -> RendezvousError | None:
        if record.num_nodes == self.node.count:
            return None
        expected = f"{record.num_nodes} as on node 0 (host {record.host}, pid {record.pid})"
        got = f"{self.node.count} on node {self.node.index} (host {self.declaration.host})"
        return RendezvousError(Problem("num_nodes", expected, got))

    def _taken(self, holder: str) -> Problem:
        own = self.declaration
        other = Declaration.model_validate_json(holder)
        got = f"taken by host {other.host}, pid {other.pid}; this is host {own.host}, pid {own.pid}"
        expected = "a number that no other machine of the run has"
        todo = "Give each machine its own --node_index"
        return Problem(f"node_index {self.node.index}", expected, got, todo)

    def _absent(self, missing: str) -> RendezvousError:
        where = f"rendezvous of {self.node.count} machines"
        expected = f"all of them within {self.settings.join_timeout_seconds:g} s"
        todo = "Start the same command there with its --node_index; workflows.doctor shows what is in the way"
        return RendezvousError(Problem(where, expected, f"no sign of node {missing}", todo))

    def _ended_for_all(self, link: Link, error: RendezvousError) -> RendezvousError:
        failure = Failure(reason=str(error), exit_code=error.exit_code, restart=False)
        link.call(failure.set)
        self._linger()
        return error

    def _fitting(self, verdict: Verdict) -> tuple[Declaration, ...]:
        for warning in verdict.warnings:
            logger.warning(f"rendezvous: {warning}")
        if verdict.problems:
            self._linger()
        verdict.require_fit()
        return verdict.declarations

    def _linger(self) -> None:
        if self.node.index == 0:  # the others read the reason in its store
            time.sleep(5 * ROUND_SECONDS)

    # ---- the meeting place

    @property
    def _file(self) -> MeetingFile | None:
        if self.node.count == 1:
            return None
        place = meeting_place(self.init_method, self.settings, self.node.count)
        return place if isinstance(place, MeetingFile) else None

    def _on_share(self, work: Callable[[], T]) -> T:
        """Calls `work` in the background, as a file server that is gone would block this thread forever."""
        try:
            return self._share.call(work, _SHARE_SECONDS)
        except LostError as error:
            expected = f"a file server that answers within {_SHARE_SECONDS:g} s"
            todo = "Look at the file server and at the mount on this machine"
            problem = Problem(f"share of {self.init_method}", expected, f"{error} (the share hangs)", todo)
            raise RendezvousError(problem) from error

    def _meeting_point(self) -> tuple[str, int]:
        """Returns numeric address and port of tcp://host:port."""
        assert self.init_method is not None
        host, port = host_and_port(self.init_method)
        address = resolved(host, port)
        own = [one.address for one in addresses()]
        if self.node.index == 0 and address not in own:
            expected = f"an address of node 0, which has {', '.join(own)}"
            todo = "Name the machine of --node_index=0"
            raise RendezvousError(Problem(f"init_method {self.init_method}", expected, address, todo))
        return address, port


def meeting_place(init_method: str | None, settings: RendezvousConfig, count: int) -> MeetingFile | tuple[str, int]:
    """Returns where `count` machines meet: a file, or host and port of node 0.

    Raises:
        ConfigError: init_method is absent or neither of these, or two keys name a port.
    """
    if init_method is None:
        expected = f"file:///share/name.rdzv where {count} machines meet"
        todo = "Name a file on a folder that all machines share; it need not exist"
        raise ConfigError(Problem("init_method", expected, "nothing", todo))
    if init_method.startswith("file:"):
        return MeetingFile.of(init_method)
    if settings.port:
        where = "rendezvous.port"
        got = str(settings.port)
        raise ConfigError(Problem(where, "0 beside tcp://host:port", got, "init_method has the port"))
    return host_and_port(init_method)


def host_and_port(init_method: str) -> tuple[str, int]:
    """Returns host and port of tcp://host:port.

    Raises:
        ConfigError: it is something else.
    """
    parts = urlsplit(init_method)
    with suppress(ValueError):  # of a port that is no number
        if parts.scheme == "tcp" and parts.hostname and parts.port:
            return parts.hostname, parts.port
    expected = "file:///share/name.rdzv or tcp://host:port"
    todo = "env:// is for torchrun and accelerate launch, which need no init_method"
    raise ConfigError(Problem("init_method", expected, repr(init_method), todo))


class _Places:
    """Node 0's list of who has come: frees the numbers of machines that went away, and gives the verdict."""

    def __init__(self, count: int, settings: RendezvousConfig) -> None:
        self._beats = Heartbeats(list(range(count)), settings.lost_after_seconds, polled_every=ROUND_SECONDS)
        self._count = count

    def update(self, store: Store) -> None:
        texts = {i: text for i in range(self._count) if (text := store.get(f"node/{i}")) is not None}
        # a claim is a sign of life: a machine that came late has not had the time for another one
        self._beats.note({i: f"{texts.get(i)} {store.get(f'beat/{i}')}" for i in range(self._count)})
        declared = {i: Declaration.model_validate_json(text) for i, text in texts.items()}
        for i in declared.keys() & set(self._beats.lost()) - {0}:
            one = declared.pop(i)
            logger.info(f"rendezvous: {one.name} went away before all had come; its place is free again")
            store.delete(f"node/{i}")
        store.set("missing", ", ".join(str(i) for i in range(self._count) if i not in declared))
        if len(declared) == self._count or any(one.problem for one in declared.values()):
            store.set("go", verdict_on(list(declared.values())).model_dump_json())
