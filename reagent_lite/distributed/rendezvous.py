"""From N machines and one shared file to one membership each.

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
from reagent_lite.distributed.entering import ANSWER_SECONDS, SAY_SECONDS, AgainError, Entry
from reagent_lite.distributed.link import Link, LostError, Store, connect, serve
from reagent_lite.distributed.meeting_file import EMPTY_FILE, NO_FILE, NO_RECORD, MeetingFile, Record
from reagent_lite.distributed.membership import ROUND_SECONDS, Abort, Membership
from reagent_lite.distributed.network import (
    Address,
    addresses,
    answers,
    listening,
    listening_on_interface,
    own_address,
    resolved,
)
from reagent_lite.distributed.nodes import Node
from reagent_lite.distributed.verdict import Declaration
from reagent_lite.errors import ConfigError, PeerError, Problem, RendezvousError, counted
from reagent_lite.files import FolderIdentity

_LONGEST_POLL = 2.0
_SHARE_SECONDS = 20.0
_GUARD_SECONDS = 1.0
_READ_ATTEMPTS = 5
T = TypeVar("T")
_LOOPBACK = Address("lo", "127.0.0.1")


@dataclass(frozen=True, slots=True)
class _Served:
    """Node 0's store, the record of its first attempt, and the file that has it."""

    store: Store
    record: Record
    file: MeetingFile | None


@dataclass(slots=True)
class Rendezvous:
    """Meets the other machines, as often as there are attempts.

    Attributes:
        node: this machine.
        init_method: see above.
        settings: times and places.
        declaration: of this machine.
        force: end a live run that holds the file.
        interrupted: asked while waiting; raises to leave.
        attempt: of the next membership, on node 0.
    """

    node: Node
    init_method: str | None
    settings: RendezvousConfig
    declaration: Declaration
    force: bool = False
    interrupted: Callable[[], None] = lambda: None
    attempt: int = 0
    _run: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    _over: set[tuple[str, int]] = field(default_factory=set)
    _served: "_Served | None" = None
    _known: Record | None = None
    _silent: dict[str, Link] = field(default_factory=dict)
    _folder: FolderIdentity | None = None
    _share: Link = field(default_factory=lambda: Link(_nothing))

    def preflight(self) -> None:
        """Finds what is wrong with the meeting place before anyone waits for it.

        Raises:
            ConfigError: several machines and no init_method, or one that is none.
            RendezvousError: a share that cannot be used, an interface or host name that does not exist.
        """
        if self.node.count == 1:
            return
        if self.settings.interface is not None or (self.node.index == 0 and self._file is not None):
            own_address(self.settings.interface)
        if self._file is not None:
            file, writes = self._file, self.node.index == 0
            self._on_share(lambda: file.require_usable(writable=writes))
            self._folder = self._on_share(lambda: FolderIdentity.of(file.path.parent))
        else:
            self._meeting_point()

    def join(self) -> Membership:
        """Waits until all machines have come and returns this machine's part.

        Raises:
            RendezvousError: not all came within settings.join_timeout_seconds, another run holds the place, this number
                is taken, or the machines do not fit together.
        """
        begun = time.monotonic()
        deadline = begun + self.settings.join_timeout_seconds
        while True:
            link, record = self._open() if self.node.index == 0 else self._find(deadline)
            self.attempt = record.attempt
            try:
                membership = self._enter(link, record, deadline)
            except (LostError, AgainError) as error:
                logger.info(f"rendezvous: {record}: {error}; looking again")
                link.close()
                if isinstance(error, AgainError):  # one that was only out of reach may be entered after all
                    self._end(record)
                time.sleep(ROUND_SECONDS)
                continue
            except BaseException:
                link.close()
                self.close()
                raise
            if self.node.count > 1:
                logger.info(f"rendezvous: {self.node.count} machines met after {time.monotonic() - begun:.1f} s: "
                         f"{counted(membership.world_size, 'process')}, attempt {record.attempt}")  # fmt: skip
            return membership

    def again(self, ended: Membership) -> None:
        """Makes ready for another attempt after one ended."""
        self._end(ended.record)

    def close(self) -> None:
        """Ends node 0's store and removes its record; nothing on other machines."""
        served, self._served = self._served, None
        if served is not None and served.file is not None:
            file, nonce = served.file, served.record.nonce
            with suppress(RendezvousError):  # a share that hangs: the next run replaces what is left
                self._on_share(lambda: file.remove(nonce))

    def _end(self, record: Record) -> None:
        self._over.add((record.nonce, record.attempt))
        self._known = record
        self.attempt += 1

    @property
    def _file(self) -> MeetingFile | None:
        if self.init_method is None:
            raise ConfigError(
                Problem("init_method", f"file:///share/name.rdzv where {self.node.count} machines meet", "nothing",
                        "Name a file on a folder that all machines share; it need not exist")
            )  # fmt: skip
        if self.init_method.startswith("file:"):
            return MeetingFile.of(self.init_method)
        return None

    def _on_share(self, work: Callable[[], T]) -> T:
        """Does something on the share, on a thread of its own: a server that is gone would hold this one for ever."""
        try:
            return self._share.ask(lambda _: work(), _SHARE_SECONDS)
        except LostError as error:
            if isinstance(error.__cause__, Exception) and not isinstance(error.__cause__, TimeoutError):
                raise error.__cause__ from None
            raise RendezvousError(
                Problem(f"share of {self.init_method}", f"a file server that answers within {_SHARE_SECONDS:g} s",
                        f"{error} (the share hangs)", "Look at the file server and at the mount on this machine")
            ) from error  # fmt: skip

    def _meeting_point(self) -> tuple[str, int]:
        """Returns address and port of tcp://host:port."""
        assert self.init_method is not None
        if self.settings.port:
            raise ConfigError(
                Problem("rendezvous.port", "0 beside tcp://host:port", str(self.settings.port),
                        "init_method says the port")
            )  # fmt: skip
        parts = urlsplit(self.init_method)
        try:
            port = parts.port
        except ValueError:
            port = None
        if parts.scheme != "tcp" or not parts.hostname or not port:
            advice = "env:// is for torchrun and accelerate launch, which need no init_method"
            raise ConfigError(Problem("init_method", "file:///share/name.rdzv or tcp://host:port",
                                      repr(self.init_method), advice))  # fmt: skip
        address = resolved(parts.hostname, port)
        if self.node.index == 0 and address not in [one.address for one in addresses()]:
            own = ", ".join(one.address for one in addresses())
            raise RendezvousError(
                Problem(f"init_method {self.init_method}", f"an address of node 0, which has {own}", address,
                        "Name the machine that runs with --node_index=0")
            )  # fmt: skip
        return address, port

    def _open(self) -> tuple[Link, Record]:
        """Begins an attempt in node 0's store, which the first one opens and makes known."""
        served = self._served or self._serve()
        record = served.record.model_copy(update={"attempt": self.attempt})
        public = record.model_dump_json(exclude={"token"})
        store = served.store.begin(self.attempt, {"record": public, "nonce": record.nonce})
        file = served.file
        if self._served is None and file is not None:
            self._on_share(lambda: file.publish(record, self._folder))
        self._served, link = served, Link(lambda: store)
        if self.node.count > 1:
            where = self.init_method if served.file is None else str(served.file.path)
            logger.info(f"rendezvous: node 0 of {self.node.count} listens at {record.address}:{record.port} "
                     f"({record.interface}), found through {where}, attempt {record.attempt}")  # fmt: skip
        return link, record

    def _serve(self) -> "_Served":
        several = self.node.count > 1
        file = self._file if several else None
        own, port = _LOOPBACK, 0
        if file is not None:
            self._require_free(file)
            own, port = own_address(self.settings.interface), self.settings.port
        elif several:
            address, port = self._meeting_point()
            own = own_address(address)
        one_address = file is None or self.settings.interface == own.address
        server, others = (listening(own.address, port), ()) if one_address else listening_on_interface(own, port)
        record = Record(
            nonce=uuid.uuid4().hex,
            token="" if file is None else secrets.token_hex(32),
            run=self._run,
            attempt=self.attempt,
            address=own.address,
            interface=own.interface,
            others=others,
            port=server.getsockname()[1],
            num_nodes=self.node.count,
            host=socket.gethostname(),
            pid=os.getpid(),
            started=datetime.now(UTC).isoformat(timespec="seconds"),
            versions=self.declaration.versions,
        )
        return _Served(serve(server, own.address, record.token), record, file)

    def _require_free(self, file: MeetingFile) -> None:
        """Makes sure that no live run holds the file; a stale record is simply replaced."""
        found = self._on_share(file.read)
        for _ in range(_READ_ATTEMPTS):
            if isinstance(found, Record) or found.startswith((NO_FILE, EMPTY_FILE, NO_RECORD)):
                break
            time.sleep(1.0)  # such as a stale handle, while somebody replaces the file
            found = self._on_share(file.read)
        else:
            raise RendezvousError(
                Problem(str(file.path), "a file that can be read, or none", str(found),
                        "A live run may hold it; look at the share, or choose another file")
            )  # fmt: skip
        if not isinstance(found, Record) or found.run == self._run:
            return
        reached = self._reach(found)
        if reached is None and found.nonce in self._silent:
            # a store that opens slowly because no name server answers looks silent: this look-up takes as long
            with suppress(OSError):
                socket.getnameinfo((found.address, found.port), socket.NI_NUMERICSERV)
            reached = self._reach(found)
        if reached is None:
            logger.info(f"rendezvous: {file.path} is left from {found}, which does not answer: replaced")
            return
        link, _ = reached
        if not self.force:
            link.close()
            raise RendezvousError(
                Problem(str(file.path), "a file that no live run uses", str(found),
                        "Give each job a file of its own; or end that run with --force")
            )  # fmt: skip
        reason = f"ended by --force from host {socket.gethostname()}, pid {os.getpid()}"
        text = Abort(reason=reason, exit_code=PeerError.exit_code, restart=False).model_dump_json()
        with suppress(LostError):
            link.ask(lambda store: store.set_once("abort", text), ANSWER_SECONDS)
        link.close()
        self.force = False  # once: a run that comes between two attempts is not meant
        logger.info(f"rendezvous: --force: ended {found}")
        deadline = time.monotonic() + 30.0
        while time.monotonic() < deadline and not answers(found.address, found.port, 1.0):
            time.sleep(ROUND_SECONDS)

    def _find(self, deadline: float) -> tuple[Link, Record]:
        """Polls until node 0 answers."""
        delay, said = 0.2, time.monotonic()
        while True:
            self.interrupted()
            record: Record | str | None = self._known  # who was in an attempt needs no share for the next one
            reached = self._reach(self._known) if self._known is not None else None
            if reached is None:
                record = self._hint()
                reached = self._reach(record) if isinstance(record, Record) else None
            now = time.monotonic()
            if reached is not None:
                link, record = reached
                ended = (record.nonce, record.attempt) in self._over
                if not ended and now <= deadline:
                    self._require_same_count(record)
                    return link, record
                link.close()
                state = (
                    f"{record}, whose attempt {record.attempt} has ended" if ended else f"{record}, which answers late"
                )
            else:
                state = f"{record}, which does not answer" if isinstance(record, Record) else str(record)
            if now > deadline:
                raise RendezvousError(
                    Problem(f"node {self.node.index} (host {socket.gethostname()}): {self.init_method}",
                            f"node 0 within {self.settings.join_timeout_seconds:g} s", state,
                            "Start the same command with --node_index=0; check that its address and port are reachable "
                            "(workflows.doctor)")
                )  # fmt: skip
            if now - said > SAY_SECONDS:
                said = now
                logger.info(f"rendezvous: node {self.node.index} waits for node 0 at {self.init_method}: {state}; "
                         f"{deadline - now:.0f} s left")  # fmt: skip
            time.sleep(delay * random.uniform(0.5, 1.0))
            delay = min(delay * 1.5, _LONGEST_POLL)

    def _hint(self) -> Record | str:
        """Returns who might be node 0, or why nobody is."""
        file = self._file
        if file is not None:
            try:
                found = self._on_share(file.read)
            except RendezvousError as error:
                return error.problems[0].got
            return found
        address, port = self._meeting_point()
        why = answers(address, port, _LONGEST_POLL)
        if why:
            return f"{address}:{port}: {why}"
        link = Link(lambda: connect(address, port, ""))
        try:
            return Record.model_validate_json(link.ask(lambda store: store.peek("record") or "", ANSWER_SECONDS))
        except (LostError, ValueError) as error:
            return f"{address}:{port} is no run of ours: {error}"
        finally:
            link.close()

    def _reach(self, record: Record) -> tuple[Link, Record] | None:
        """Returns a link to the store that a record names if that very store answers there, and its present attempt."""
        tried = (record.address, *record.others)
        address = next((one for one in tried if not answers(one, record.port, _LONGEST_POLL)), None)
        if address is None:
            return None
        link = self._silent.pop(record.nonce, None) or Link(lambda: connect(address, record.port, record.token))
        try:
            nonce, attempt = link.ask(lambda store: (store.peek("nonce"), store.attempt), ANSWER_SECONDS)
        except LostError as error:
            if isinstance(error.__cause__, TimeoutError):
                self._silent[record.nonce] = link  # asked again later: another thread would hang as well
            else:
                link.close()
            return None
        if nonce != record.nonce:
            link.close()
            return None
        return link, record.model_copy(update={"attempt": attempt, "address": address})

    def _require_same_count(self, record: Record) -> None:
        if record.num_nodes != self.node.count:
            raise RendezvousError(
                Problem("num_nodes", f"{record.num_nodes} as on node 0 (host {record.host}, pid {record.pid})",
                        f"{self.node.count} on node {self.node.index} (host {socket.gethostname()})")
            )  # fmt: skip

    def _enter(self, link: Link, record: Record, deadline: float) -> Membership:
        """Claims this machine's number, declares it, and waits for the verdict."""
        entry = Entry(link, self.node, self.declaration, self._run, self.settings,
                      interrupted=self._guarding(record))  # fmt: skip
        entry.claim()
        entry.declare()
        verdict = entry.wait(deadline)
        for warning in verdict["warnings"]:
            logger.info(f"rendezvous: warning: {warning}")
        if verdict["problems"]:
            entry.linger()
            error = RendezvousError([Problem(**problem) for problem in verdict["problems"]])
            error.exit_code = max(verdict["exit_code"], 1)
            raise error
        declarations = tuple(Declaration.model_validate(one) for one in verdict["declarations"])
        return Membership(link, record, self.node.index, declarations, self.settings, self.close)

    def _guarding(self, record: Record) -> Callable[[], None]:
        """Returns what is asked while node 0 waits: whether the file is still its own; on other machines less."""
        file = self._file if self.node.index == 0 and self.node.count > 1 else None
        if file is None:
            return self.interrupted
        looked = time.monotonic()

        def look() -> None:
            nonlocal looked
            self.interrupted()
            if time.monotonic() - looked > _GUARD_SECONDS:
                self._keep(file, record)
                looked = time.monotonic()

        return look

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
        reached = self._reach(found)
        if reached is not None:
            reached[0].close()
            raise RendezvousError(
                Problem(str(file.path), "a file that no other job uses", f"{found}, which took it meanwhile",
                        "Give each job a file of its own")
            )  # fmt: skip


def _nothing() -> None:
    """Stands where there is nothing to close or to open."""
