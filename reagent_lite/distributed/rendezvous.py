"""From N machines and one shared folder to one membership each.

 node 0   a store on one interface ─► record in the file ─┐                     ┌─► all declared: verdict, go
                                                          ├─► claim ─► declare ─┤
 others   poll the file ─► who answers there? ────────────┘                     └─► deadline: who is missing, abort

init_method   file:///share/run.rdzv   tcp://host:port (node 0 listens there)   nothing, for one machine
Clocks of two machines are never compared, and that a file exists never decides anything: who answers does. The store
lives as long as node 0's launcher: another attempt needs no share, those who were there go back to the same store.
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
from reagent_lite.distributed.joining import LOG_SECONDS, AttemptEndedError, Joining
from reagent_lite.distributed.meeting_file import EMPTY_FILE, NO_FILE, NO_RECORD, MeetingFile, Record
from reagent_lite.distributed.membership import ROUND_SECONDS, Failure, Membership, set_failure
from reagent_lite.distributed.network import Address, addresses, connection_error, listening, own_address, resolved
from reagent_lite.distributed.nodes import Node
from reagent_lite.distributed.store import Background, Link, LostError, Store, connect, reach, serve
from reagent_lite.distributed.verdict import Declaration
from reagent_lite.errors import ConfigError, Problem, RendezvousError, counted
from reagent_lite.files import FolderIdentity

_LONGEST_POLL = 2.0
_SHARE_SECONDS = 20.0
_CHECK_SECONDS = 1.0
_READ_ATTEMPTS = 5
_FORCE_SECONDS = 30.0
_LOOPBACK = Address("lo", "127.0.0.1")
T = TypeVar("T")


@dataclass(slots=True)
class Rendezvous:
    """Meets the other machines, as often as there are attempts.

    Attributes:
        node: this machine.
        init_method: see above.
        settings: times and places.
        declaration: of this machine.
        force: end a live run that holds the file.
        interrupted: called while waiting; raises to leave.
    """

    node: Node
    init_method: str | None
    settings: RendezvousConfig
    declaration: Declaration
    force: bool = False
    interrupted: Callable[[], None] = lambda: None
    _run: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    _served: tuple[Store, Record] | None = None  # node 0's store, and the record of the present attempt
    _ended: Record | None = None  # of the latest attempt that is over
    _folder: FolderIdentity | None = None
    _share: Background = field(default_factory=Background)

    def preflight(self) -> None:
        """Finds what is wrong with the meeting place before anyone waits for it.

        Raises:
            ConfigError: several machines and no init_method, or one that is none.
            RendezvousError: a share that cannot be used, an interface or host name that does not exist.
        """
        if self.node.count == 1:
            return
        file, serves = self._file, self.node.index == 0
        if self.settings.interface is not None or (serves and file is not None):
            own_address(self.settings.interface)
        if file is None:
            self._meeting_point()
        else:
            self._on_share(lambda: file.require_usable(writable=serves))
            self._folder = self._on_share(lambda: FolderIdentity.of(file.path.parent))

    def join(self) -> Membership:
        """Waits until all machines have come and returns this machine's part; called again, that in another attempt.

        Raises:
            RendezvousError: not all came within settings.join_timeout_seconds, another run holds the place, this number
                is taken, or the machines do not fit together.
        """
        begun = time.monotonic()
        deadline = begun + self.settings.join_timeout_seconds
        while True:
            link, record = self._begin() if self.node.index == 0 else self._find(deadline)
            joining = Joining(
                link=link,
                node=self.node,
                declaration=self.declaration,
                run=self._run,
                settings=self.settings,
                interrupted=self._checking_file(record),
            )
            try:
                joining.claim()
                joining.declare()
                declarations = joining.wait(deadline)
            except (LostError, AttemptEndedError) as error:
                logger.info(f"rendezvous: {record}: {error}; looking again")
                link.close()
                if isinstance(error, AttemptEndedError):  # one that was only out of reach may be joined after all
                    self._ended = record
                time.sleep(ROUND_SECONDS)
                continue
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
        served, self._served = self._served, None
        if served is not None and self.node.count > 1 and (file := self._file) is not None:
            nonce = served[1].nonce
            with suppress(RendezvousError):  # a share that hangs: the next run replaces what is left
                self._on_share(lambda: file.remove(nonce))

    @property
    def _file(self) -> MeetingFile | None:
        if self.init_method is None:
            expected = f"file:///share/name.rdzv where {self.node.count} machines meet"
            todo = "Name a file on a folder that all machines share; it need not exist"
            raise ConfigError(Problem("init_method", expected, "nothing", todo))
        return MeetingFile.of(self.init_method) if self.init_method.startswith("file:") else None

    def _on_share(self, work: Callable[[], T]) -> T:
        """Does something on the share in the background: a server that is gone would hold this thread for ever."""
        try:
            return self._share.call(work, _SHARE_SECONDS)
        except LostError as error:
            expected = f"a file server that answers within {_SHARE_SECONDS:g} s"
            todo = "Look at the file server and at the mount on this machine"
            problem = Problem(f"share of {self.init_method}", expected, f"{error} (the share hangs)", todo)
            raise RendezvousError(problem) from error

    def _meeting_point(self) -> tuple[str, int]:
        """Returns address and port of tcp://host:port."""
        assert self.init_method is not None
        if self.settings.port:
            where, got = "rendezvous.port", str(self.settings.port)
            raise ConfigError(Problem(where, "0 beside tcp://host:port", got, "init_method says the port"))
        parts = urlsplit(self.init_method)
        try:
            port = parts.port
        except ValueError:
            port = None
        if parts.scheme != "tcp" or not parts.hostname or not port:
            expected, todo = (
                "file:///share/name.rdzv or tcp://host:port",
                "env:// is for torchrun and accelerate launch",
            )
            problem = Problem("init_method", expected, repr(self.init_method), f"{todo}, which need no init_method")
            raise ConfigError(problem)
        address, own = resolved(parts.hostname, port), [one.address for one in addresses()]
        if self.node.index == 0 and address not in own:
            expected, todo = f"an address of node 0, which has {', '.join(own)}", "Name the machine of --node_index=0"
            raise RendezvousError(Problem(f"init_method {self.init_method}", expected, address, todo))
        return address, port

    def _begin(self) -> tuple[Link, Record]:
        """Begins an attempt in node 0's store, which the first one opens and makes known."""
        first = self._served is None
        store, record = self._served or self._serve()
        if self._ended is not None:
            record = record.model_copy(update={"attempt": self._ended.attempt + 1})
        public = record.model_dump_json(exclude={"token"})
        begun = store.begin(record.attempt, {"record": public, "nonce": record.nonce})
        if self.node.count > 1:
            file, folder = self._file, self._folder
            if file is not None and first:
                self._on_share(lambda: file.publish(record, folder))
            where = self.init_method if file is None else file.path
            listens = f"listens at {record.address}:{record.port} ({record.interface}), found through {where}"
            logger.info(f"rendezvous: node 0 of {self.node.count} {listens}, attempt {record.attempt}")
        self._served = begun, record
        return Link(lambda: begun), record

    def _serve(self) -> tuple[Store, Record]:
        own, port, token, others = _LOOPBACK, 0, "", list[Address]()
        if self.node.count > 1 and (file := self._file) is not None:
            self._require_free(file)
            own, port, token = own_address(self.settings.interface), self.settings.port, secrets.token_hex(32)
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
            run=self._run,
            attempt=0,
            address=own.address,
            interface=own.interface,
            others=tuple(one.address for one in others),
            port=server.getsockname()[1],
            num_nodes=self.node.count,
            host=socket.gethostname(),
            pid=os.getpid(),
            started=datetime.now(UTC).isoformat(timespec="seconds"),
            versions=self.declaration.versions,
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
            expected, todo = "a file that can be read, or none", "A live run may hold it; look at the share, or choose"
            raise RendezvousError(Problem(str(file.path), expected, str(found), f"{todo} another file"))
        if not isinstance(found, Record) or found.run == self._run:
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
            link.call(lambda store: set_failure(store, ended))
        link.close()
        self.force = False  # a run that comes between two attempts is not meant
        logger.info(f"rendezvous: --force: ended {found}")
        deadline = time.monotonic() + _FORCE_SECONDS
        while time.monotonic() < deadline and not connection_error(found.address, found.port, 1.0):
            time.sleep(ROUND_SECONDS)

    def _find(self, deadline: float) -> tuple[Link, Record]:
        """Polls until node 0 answers."""
        delay, logged = 0.2, time.monotonic()
        while True:
            self.interrupted()
            reached = reach(self._ended) if self._ended is not None else None  # for which no share is needed
            if reached is None:
                found = self._hint()
                state = f"{found}, which does not answer" if isinstance(found, Record) else found
                reached = reach(found) if isinstance(found, Record) else None
            now = time.monotonic()
            if reached is not None:
                link, record = reached
                if not self._is_over(record) and now <= deadline:
                    self._require_same_count(record)
                    return link, record
                link.close()
                over = f"whose attempt {record.attempt} has ended" if now <= deadline else "which answers late"
                state = f"{record}, {over}"
            if now > deadline:
                where = f"node {self.node.index} (host {socket.gethostname()}): {self.init_method}"
                expected = f"node 0 within {self.settings.join_timeout_seconds:g} s"
                todo = "Start the same command with --node_index=0; check that its address and port are reachable"
                raise RendezvousError(Problem(where, expected, state, f"{todo} (workflows.doctor)"))
            if now - logged > LOG_SECONDS:
                logged = now
                waits = f"node {self.node.index} waits for node 0 at {self.init_method}"
                logger.info(f"rendezvous: {waits}: {state}; {deadline - now:.0f} s left")
            time.sleep(delay * random.uniform(0.5, 1.0))
            delay = min(delay * 1.5, _LONGEST_POLL)

    def _is_over(self, record: Record) -> bool:
        ended = self._ended
        return ended is not None and record.nonce == ended.nonce and record.attempt <= ended.attempt

    def _hint(self) -> Record | str:
        """Returns who might be node 0, or why nobody is."""
        file = self._file
        if file is not None:
            try:
                return self._on_share(file.read)
            except RendezvousError as error:
                return error.problems[0].got
        address, port = self._meeting_point()
        why = connection_error(address, port, _LONGEST_POLL)
        if why:
            return f"{address}:{port}: {why}"
        link = Link(lambda: connect(address, port, ""))
        try:
            return Record.model_validate_json(link.call(lambda store: store.get("record") or ""))
        except (LostError, ValueError) as error:
            return f"{address}:{port} is no run of ours: {error}"
        finally:
            link.close()

    def _require_same_count(self, record: Record) -> None:
        if record.num_nodes != self.node.count:
            expected = f"{record.num_nodes} as on node 0 (host {record.host}, pid {record.pid})"
            got = f"{self.node.count} on node {self.node.index} (host {socket.gethostname()})"
            raise RendezvousError(Problem("num_nodes", expected, got))

    def _checking_file(self, record: Record) -> Callable[[], None]:
        """Returns what is called while machines meet; on node 0 it also looks whether the file is still its own."""
        file = self._file if self.node.index == 0 and self.node.count > 1 else None
        if file is None:
            return self.interrupted
        checked = time.monotonic()

        def check() -> None:
            nonlocal checked
            self.interrupted()
            if time.monotonic() - checked > _CHECK_SECONDS:
                self._keep(file, record)
                checked = time.monotonic()

        return check

    def _keep(self, file: MeetingFile, record: Record) -> None:
        """Makes sure that the others find this run: two jobs may have begun in one instant, or the file was removed."""
        try:
            found = self._on_share(file.read)
            if isinstance(found, str) and found.startswith((NO_FILE, EMPTY_FILE)):
                logger.info(f"rendezvous: {file.path} is gone while machines meet: written again")
                self._on_share(lambda: file.publish(record, self._folder))
        except RendezvousError:
            return  # a share that is gone for the moment: who looks at it sees no file either
        if not isinstance(found, Record) or found.nonce == record.nonce:
            return
        reached = reach(found)
        if reached is not None:
            reached[0].close()
            got = f"{found}, which took it meanwhile"
            todo = "Give each job a file of its own"
            raise RendezvousError(Problem(str(file.path), "a file that no other job uses", got, todo))
