"""Rendezvous of machines that share a folder or know node 0's address; each machine gets its Membership.

 node 0   a store on one interface ─► record in the file ─┐                    ┌─► all are there: check, go
                                                          ├─► declare, beat ───┤
 others   poll the file ─► store at that address ─────────┘                    └─► deadline: list of missing, abort

init_method   file:///share/run.rdzv   tcp://host:port (node 0 listens there)   nothing, for one machine
Clocks of two machines are never compared. The existence of a file decides nothing; only a store that answers counts.
The store lives as long as node 0's launcher, so another attempt does not need the share: the machines use the same
store again.
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
from reagent_lite.distributed.declarations import Compatibility, Declaration, check_compatibility
from reagent_lite.distributed.key_value_store import (
    ANSWER_SECONDS,
    Background,
    Link,
    LostError,
    SignedStore,
    reach,
    serve_store,
)
from reagent_lite.distributed.meeting_file import EMPTY_FILE, NO_FILE, NO_RECORD, MeetingFile, Record
from reagent_lite.distributed.membership import ROUND_SECONDS, Failure, Heartbeats, LaunchError, Membership, poll
from reagent_lite.distributed.network import (
    Address,
    addresses,
    connection_error,
    listening,
    local_address,
    resolve_host,
)
from reagent_lite.distributed.nodes import Node
from reagent_lite.errors import ConfigError, Problem, RendezvousError, pluralize
from reagent_lite.folder_identity import FolderIdentity

_LOG_SECONDS = 10.0  # between two log lines while waiting
_LONGEST_POLL = 2.0  # largest number of seconds between two polls
_SHARE_SECONDS = 20.0
_CHECK_SECONDS = 1.0  # between two checks of the published file
_READ_ATTEMPTS = 5
_FORCE_SECONDS = 30.0
_OTHER_JOB_SECONDS = 5.0  # for another job that is just ending, or is ended by --force
_LOOPBACK = Address("lo", "127.0.0.1")
T = TypeVar("T")


class _AttemptEndedError(Exception):
    """This attempt ended before all machines had arrived; another attempt may succeed."""


@dataclass(slots=True)
class Rendezvous:
    """Rendezvous with the other machines, once per attempt.

    Attributes:
        node: this machine.
        init_method: URL of the file or address of the rendezvous; see the top of this file.
        settings: section `rendezvous` of the config.
        declaration: declaration of this machine.
        force: whether to end a live run that uses the file.
        interrupted: called while waiting; may raise an error to stop waiting.
    """

    node: Node
    init_method: str | None
    settings: RendezvousConfig
    declaration: Declaration
    force: bool = False
    interrupted: Callable[[], None] = lambda: None
    _served: tuple[SignedStore, Record] | None = None  # node 0's store, and the record of the current attempt
    _ended: Record | None = None  # record of the latest attempt that is over
    _folder: FolderIdentity | None = None
    _share: Background = field(default_factory=Background)

    def preflight(self) -> None:
        """Checks the file or address of the rendezvous before any machine waits for it.

        Raises:
            ConfigError: see `meeting_place`.
            RendezvousError: the share cannot be used, or an interface or host name does not exist.
        """
        if self.node.count == 1:
            return
        file = self._file
        serves = self.node.index == 0
        if self.settings.interface is not None or (serves and file is not None):
            local_address(self.settings.interface)
        if file is None:
            self._meeting_point()
        else:
            self._on_share(lambda: file.require_usable(writable=serves))
            self._folder = self._on_share(lambda: FolderIdentity.of(file.path.parent))

    def join(self) -> Membership:
        """Waits for all machines and returns this machine's membership; every call is another attempt.

        Raises:
            RendezvousError: not all machines arrived within settings.join_timeout_seconds, another run uses the file,
                another machine has the same number, or the machines do not fit together.
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
                if isinstance(error, _AttemptEndedError):  # a store that was only unreachable may still be joined
                    self._ended = record
                time.sleep(ROUND_SECONDS)
            except BaseException:
                link.close()
                self.close()
                raise
        self._ended = record  # for the next call
        membership = Membership(link, record, self.node.index, declarations, self.settings, self.close)
        if self.node.count > 1:
            seconds = f"{time.monotonic() - begun:.1f} s"
            processes = pluralize(membership.world_size, "process")
            logger.info(
                f"rendezvous: {self.node.count} machines met after {seconds}: {processes}, attempt {record.attempt}"
            )
        return membership

    def close(self) -> None:
        """Ends node 0's store and removes its record; does nothing on other machines."""
        served = self._served
        self._served = None
        if served is not None and (file := self._file) is not None:
            with suppress(RendezvousError):  # the share hangs: the next run replaces the file
                self._on_share(lambda: file.remove(served[1].nonce))

    # ---- node 0

    def _begin(self) -> tuple[Link, Record]:
        """Begins an attempt in node 0's store; the first attempt opens and publishes the store."""
        first = self._served is None
        store, record = self._served or self._serve()
        if self._ended is not None:
            record = record.model_copy(update={"attempt": self._ended.attempt + 1})
        public = record.model_dump_json(exclude={"token"})
        attempt_store = store.begin(record.attempt, {"record": public, "nonce": record.nonce})
        if self.node.count > 1:
            file = self._file
            if file is not None and first:
                self._on_share(lambda: file.publish(record, self._folder))
            where = self.init_method if file is None else file.path
            listens = f"listens at {record.address}:{record.port} ({record.interface}), found through {where}"
            logger.info(f"rendezvous: node 0 of {self.node.count} {listens}, attempt {record.attempt}")
        self._served = attempt_store, record
        return Link(lambda: attempt_store), record

    def _serve(self) -> tuple[SignedStore, Record]:
        address = _LOOPBACK
        port = 0
        token = ""
        others = list[Address]()
        if self.node.count > 1 and (file := self._file) is not None:
            self._require_free(file)
            address = local_address(self.settings.interface)
            port = self.settings.port
            token = secrets.token_hex(32)
            if not address.is_loopback and self.settings.interface != address.address:
                others = [a for a in addresses() if a.interface == address.interface and a != address and a.is_routable]
        elif self.node.count > 1:
            numeric, port = self._meeting_point()
            address = local_address(numeric)
        server = listening(address.address, port, address.interface if others else None)
        if server.getsockname()[0] == address.address:  # not bound to the interface
            others = []
        record = Record(
            nonce=uuid.uuid4().hex,
            token=token,
            run=self.declaration.run,
            job=self.declaration.job,
            attempt=0,
            address=address.address,
            interface=address.interface,
            others=tuple(other.address for other in others),
            port=server.getsockname()[1],
            num_nodes=self.node.count,
            host=socket.gethostname(),
            pid=os.getpid(),
            started=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        return serve_store(server, address.address, token), record

    def _require_free(self, file: MeetingFile) -> None:
        """Checks that no live run uses the file; a stale record will be replaced."""
        for _ in range(_READ_ATTEMPTS):
            content = self._on_share(file.read)
            if isinstance(content, Record) or content.startswith((NO_FILE, EMPTY_FILE, NO_RECORD)):
                break
            time.sleep(1.0)  # an error such as a stale handle while another process replaces the file
        else:
            expected = "a file that can be read, or none"
            todo = "A live run may use it; check the share, or choose another file"
            raise RendezvousError(Problem(str(file.path), expected, str(content), todo))
        if not isinstance(content, Record) or content.run == self.declaration.run:
            return
        reached = reach(content)
        if reached is None:
            logger.info(f"rendezvous: {file.path} is stale and is replaced: {content} does not answer")
            return
        link, _ = reached
        if not self.force:
            link.close()
            todo = "Give each job its own file, or end that run with --force"
            raise RendezvousError(Problem(str(file.path), "a file that no live run uses", str(content), todo))
        ended = Failure(reason=f"ended by --force from host {socket.gethostname()}, pid {os.getpid()}", restart=False)
        with suppress(LostError):
            link.call(ended.set)
        link.close()
        self.force = False  # --force does not apply to a run that starts between two attempts
        logger.info(f"rendezvous: --force: ended {content}")
        poll(lambda: connection_error(content.address, content.port, 1.0), _FORCE_SECONDS, ROUND_SECONDS)

    def _keep_published(self, file: MeetingFile, record: Record) -> None:
        """Writes the file again if it was removed.

        Raises:
            RendezvousError: a live run of another job has replaced the file.
        """
        try:
            content = self._on_share(file.read)
            if isinstance(content, str) and content.startswith((NO_FILE, EMPTY_FILE)):
                logger.info(f"rendezvous: {file.path} was removed while machines meet: written again")
                self._on_share(lambda: file.publish(record, self._folder))
        except RendezvousError:
            return  # the share does not answer at present: the others do not see the file either
        if isinstance(content, Record) and content.nonce != record.nonce and (reached := reach(content)) is not None:
            reached[0].close()
            got = f"{content}, which has replaced it meanwhile"
            todo = "Give each job its own file"
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
                hint = self._hint()
                state = f"{hint}, which does not answer" if isinstance(hint, Record) else hint
                reached = reach(hint) if isinstance(hint, Record) else None
            now = time.monotonic()
            if reached is not None:
                link, record = reached
                other_job = self._other_job(record)
                if not self._is_over(record) and now <= deadline and other_job is None:
                    return reached
                link.close()
                over = f"whose attempt {record.attempt} has ended" if now <= deadline else "which answered too late"
                state = f"{record}, {over}"
                if other_job is not None:
                    other_job_since = other_job_since or now
                    if now - other_job_since > _OTHER_JOB_SECONDS:
                        raise other_job
                    state = f"{record}, of job {record.job!r}"
            if now > deadline:
                where = f"node {self.node.index} (host {socket.gethostname()}): {self.init_method}"
                expected = f"node 0 within {self.settings.join_timeout_seconds:g} s"
                reachable = "check that its address and port are reachable (workflows.doctor)"
                todo = f"Start the same command with --node_index=0; {reachable}"
                raise RendezvousError(Problem(where, expected, state, todo))
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
        todo = "Give each job its own file or port; machines of one job need the same rendezvous.job"
        return RendezvousError(Problem(where, f"machines of job {job!r}", f"job {record.job!r} ({record})", todo))

    def _is_over(self, record: Record) -> bool:
        ended = self._ended
        return ended is not None and record.nonce == ended.nonce and record.attempt <= ended.attempt

    def _hint(self) -> Record | str:
        """Returns the record in the file or at the address of init_method, or why there is none."""
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
            return f"{address}:{port} is not a run of reagent-lite: {error}"
        finally:
            link.close()

    # ---- all machines

    def _meet(self, link: Link, record: Record, deadline: float) -> tuple[Declaration, ...]:
        """Waits for all machines and returns their declarations if node 0 finds that they fit together.

        poll ─┬─► another machine has this number ─► it beats: refused; silent: wait until node 0 frees the number
              ├─► result of node 0                ─► declarations, or refused
              ├─► failure                         ─► another attempt if it may help, else refused
              └─► deadline                        ─► refused on all machines
        """
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
        arrivals = _Arrivals(self.node.count, self.settings)
        file = self._file if number == 0 else None
        begun = checked = logged = time.monotonic()
        first_beat: str | None = None  # of another machine that has this number

        def poll(store: SignedStore) -> _MeetingState:
            holder = store.set_once(f"node/{number}", mine)  # repeated, as node 0 may have freed the number
            if holder == mine:
                store.set(f"beat/{number}", f"join.{self.declaration.run}.{time.monotonic()}")
            if number == 0:
                arrivals.update(store)
            return _MeetingState(
                holder=holder,
                missing=store.get("missing") or "0",
                beat=store.get(f"beat/{number}"),
                failure=Failure.of(store),
                go=store.get("go"),
            )

        while True:
            self.interrupted()
            state = link.call(poll, lost_after)
            now = time.monotonic()
            if state.holder != mine:
                if other_count is not None:
                    raise other_count
                if first_beat is not None and state.beat != first_beat:
                    raise RendezvousError(self._duplicate(state.holder))
                first_beat = first_beat or state.beat
                if state.failure is not None:
                    raise _AttemptEndedError("its attempt has ended")
                if now - begun > 3 * lost_after:
                    raise _AttemptEndedError(f"node_index {number} is held by a machine without a heartbeat")
            elif state.go is not None:
                return self._fitting(Compatibility.model_validate_json(state.go))
            elif state.failure is not None:
                raise _AttemptEndedError(state.failure.reason) if state.failure.restart else LaunchError(state.failure)
            elif now > deadline:
                raise self._ended_for_all(link, self._absent(state.missing))
            elif now - logged > _LOG_SECONDS:
                logged = now
                waits = f"waiting for node {state.missing} of {self.node.count}"
                logger.info(f"rendezvous: {waits}; {deadline - now:.0f} s left")
            if file is not None and now - checked > _CHECK_SECONDS:
                checked = now
                try:
                    self._keep_published(file, record)
                except RendezvousError as error:
                    raise self._ended_for_all(link, error) from None
            time.sleep(ROUND_SECONDS / 2)

    def _other_count(self, record: Record) -> RendezvousError | None:
        if record.num_nodes == self.node.count:
            return None
        expected = f"{record.num_nodes} as on node 0 (host {record.host}, pid {record.pid})"
        got = f"{self.node.count} on node {self.node.index} (host {self.declaration.host})"
        return RendezvousError(Problem("num_nodes", expected, got))

    def _duplicate(self, holder: str) -> Problem:
        this = self.declaration
        other = Declaration.model_validate_json(holder)
        got = f"taken by host {other.host}, pid {other.pid}; this is host {this.host}, pid {this.pid}"
        expected = "a number that no other machine of the run has"
        todo = "Give each machine its own --node_index"
        return Problem(f"node_index {self.node.index}", expected, got, todo)

    def _absent(self, missing: str) -> RendezvousError:
        where = f"rendezvous of {self.node.count} machines"
        expected = f"all of them within {self.settings.join_timeout_seconds:g} s"
        todo = "Start the same command there with its --node_index; workflows.doctor shows what prevents it"
        return RendezvousError(Problem(where, expected, f"no sign of node {missing}", todo))

    def _ended_for_all(self, link: Link, error: RendezvousError) -> RendezvousError:
        failure = Failure(reason=str(error), exit_code=error.exit_code, restart=False)
        link.call(failure.set)
        self._wait_for_readers()
        return error

    def _fitting(self, compatibility: Compatibility) -> tuple[Declaration, ...]:
        for warning in compatibility.warnings:
            logger.warning(f"rendezvous: {warning}")
        if compatibility.problems:
            self._wait_for_readers()
        compatibility.require_fit()
        return compatibility.declarations

    def _wait_for_readers(self) -> None:
        if self.node.index == 0:  # the others have to read the reason in its store before it ends
            time.sleep(5 * ROUND_SECONDS)

    # ---- file or address of the rendezvous

    @property
    def _file(self) -> MeetingFile | None:
        if self.node.count == 1:
            return None
        meeting = meeting_place(self.init_method, self.settings, self.node.count)
        return meeting if isinstance(meeting, MeetingFile) else None

    def _on_share(self, work: Callable[[], T]) -> T:
        """Calls `work` in the background, as a missing file server would block this thread forever."""
        try:
            return self._share.call(work, _SHARE_SECONDS)
        except LostError as error:
            expected = f"a file server that answers within {_SHARE_SECONDS:g} s"
            todo = "Check the file server and the mount on this machine"
            problem = Problem(f"share of {self.init_method}", expected, f"{error} (the share hangs)", todo)
            raise RendezvousError(problem) from error

    def _meeting_point(self) -> tuple[str, int]:
        """Returns numeric address and port of tcp://host:port."""
        assert self.init_method is not None
        host, port = host_and_port(self.init_method)
        address = resolve_host(host, port)
        local = [candidate.address for candidate in addresses()]
        if self.node.index == 0 and address not in local:
            expected = f"an address of node 0, which has {', '.join(local)}"
            todo = "Name the machine of --node_index=0"
            raise RendezvousError(Problem(f"init_method {self.init_method}", expected, address, todo))
        return address, port


def meeting_place(init_method: str | None, settings: RendezvousConfig, count: int) -> MeetingFile | tuple[str, int]:
    """Returns the file through which `count` machines meet, or host and port of node 0.

    Raises:
        ConfigError: init_method is missing or has another form, or two keys give a port.
    """
    if init_method is None:
        expected = f"file:///share/name.rdzv for {count} machines"
        todo = "Name a file in a folder that all machines share; it need not exist"
        raise ConfigError(Problem("init_method", expected, "nothing", todo))
    if init_method.startswith("file:"):
        return MeetingFile.of(init_method)
    if settings.port:
        where = "rendezvous.port"
        got = str(settings.port)
        raise ConfigError(Problem(where, "0 with tcp://host:port", got, "Remove it: init_method has the port"))
    return host_and_port(init_method)


def host_and_port(init_method: str) -> tuple[str, int]:
    """Returns host and port of tcp://host:port.

    Raises:
        ConfigError: init_method has another form.
    """
    parts = urlsplit(init_method)
    with suppress(ValueError):  # a port that is not a number
        if parts.scheme == "tcp" and parts.hostname and parts.port:
            return parts.hostname, parts.port
    expected = "file:///share/name.rdzv or tcp://host:port"
    todo = "env:// is for torchrun and accelerate launch, which need no init_method"
    raise ConfigError(Problem("init_method", expected, repr(init_method), todo))


@dataclass(frozen=True, slots=True, kw_only=True)
class _MeetingState:
    """State of a rendezvous in node 0's store, as seen by one machine.

    Attributes:
        holder: declaration, as JSON, of the machine that has its number: itself, or another one.
        beat: latest beat of that machine.
        failure: why the attempt is over, or None.
        go: node 0's Compatibility, as JSON; None while it waits for machines.
        missing: numbers of the machines that have not arrived.
    """

    holder: str
    beat: str | None
    failure: Failure | None
    go: str | None
    missing: str


class _Arrivals:
    """Node 0's list of arrived machines. Frees the numbers of those that went silent, and checks the others."""

    def __init__(self, count: int, settings: RendezvousConfig) -> None:
        self._beats = Heartbeats(list(range(count)), settings.lost_after_seconds, polled_every=ROUND_SECONDS)
        self._count = count

    def update(self, store: SignedStore) -> None:
        texts = {i: text for i in range(self._count) if (text := store.get(f"node/{i}")) is not None}
        # a declaration counts as a beat: a machine that arrived late has had no time for one
        self._beats.note({i: f"{texts.get(i)} {store.get(f'beat/{i}')}" for i in range(self._count)})
        declared = {i: Declaration.model_validate_json(text) for i, text in texts.items()}
        for i in declared.keys() & set(self._beats.find_lost()) - {0}:
            gone = declared.pop(i)
            logger.info(f"rendezvous: {gone.name} went silent before all machines arrived; its number is free again")
            store.delete(f"node/{i}")
        store.set("missing", ", ".join(str(i) for i in range(self._count) if i not in declared))
        if len(declared) == self._count or any(declaration.problem for declaration in declared.values()):
            store.set("go", check_compatibility(list(declared.values())).model_dump_json())
