"""A machine in an attempt of a run: heartbeats, and the single reason why a run ends early.

keys of an attempt in node 0's store
nonce, record      identity of the store             node/i           declaration of machine i, which has that number
go                 all declarations, and problems    beat/i           a number that grows while machine i lives
missing            machines that have not arrived
abort              the first failure, no other       progress/i       progress of the workers of machine i
next               after an abort: restart or end    left/i           machine i no longer needs the store
exchange/key/i     value of machine i for the others exchange/key     values of all machines, from node 0
"""

import json
import os
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter

from reagent_lite.config.rendezvous import RendezvousConfig
from reagent_lite.distributed.declarations import Declaration
from reagent_lite.distributed.key_value_store import Link, LostError, SignedStore
from reagent_lite.distributed.meeting_file import Record
from reagent_lite.distributed.network import Address, addresses, local_address, route_to
from reagent_lite.distributed.worker import WorkerProgress, awaited_ranks
from reagent_lite.errors import PeerError, Problem

T = TypeVar("T")
Watched = TypeVar("Watched", bound=Hashable)
_PROGRESS = TypeAdapter(list[WorkerProgress | None])

GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"
ROUND_SECONDS = 0.2
"""Time between two polls of the store."""

_EXCHANGE_SECONDS = 0.02
_EXCHANGE_REQUESTS = 5000  # largest number of requests per second from all machines together
_PAUSE_SECONDS = 2.0  # a longer gap between two polls means that this launcher was suspended
_LEAVE_SECONDS = 5.0
_FINISH_SECONDS = 60.0


class Failure(BaseModel):
    """The reason why a run ends early.

    Attributes:
        reason: message with machine or rank and the first traceback.
        exit_code: exit code of every launcher.
        restart: whether a restart can help; a wrong config stays wrong.
        first_hand: false if a peer's failure may have caused it, as with a closed connection.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    reason: str
    exit_code: int = PeerError.exit_code
    restart: bool = True
    first_hand: bool = True

    @classmethod
    def of(cls, store: SignedStore) -> "Failure | None":
        """Returns why the store's attempt is over, or None."""
        text = store.get("abort")
        return None if text is None else cls.model_validate_json(text)

    def set(self, store: SignedStore) -> "Failure":
        """Ends the store's attempt with this failure unless it has ended already; returns the failure that ended it."""
        return Failure.model_validate_json(store.set_once("abort", self.model_dump_json()))


class LaunchError(PeerError):
    """A run ended early; message and exit code are those of the failure."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(())
        self.args = (failure.reason,)
        self.exit_code = failure.exit_code


def poll(check: Callable[[], T], seconds: float, pause: float = ROUND_SECONDS / 4) -> T:
    """Returns the first true result of `check`, or its result after some seconds."""
    deadline = time.monotonic() + seconds
    while not (result := check()) and time.monotonic() < deadline:
        time.sleep(pause)
    return result


class Heartbeats(Generic[Watched]):
    """Time at which each beat last changed, by this machine's clock.

    Args:
        watched: machines, or others with a beat, to watch from the start; `note` may add some.
        lost_after: seconds of silence after which one of them is lost.
        polled_every: usual seconds between two calls of `note`.
    """

    def __init__(self, watched: Iterable[Watched], lost_after: float, *, polled_every: float) -> None:
        now = time.monotonic()
        self._seen: dict[Watched, tuple[str | None, float]] = {each: (None, now) for each in watched}
        self._lost_after = lost_after
        self._pause = polled_every + _PAUSE_SECONDS
        self._last = now

    def note(self, beats: Mapping[Watched, str | None]) -> None:
        """Records the current beats; those without an entry are no longer watched."""
        now = time.monotonic()
        paused = now - self._last > self._pause  # this launcher was suspended: the others may not have been silent
        self._last = now
        seen = {each: self._seen.get(each, (None, now)) for each in beats}
        self._seen = {
            each: (beat, now) if paused or beat != seen[each][0] else seen[each] for each, beat in beats.items()
        }

    def find_lost(self) -> list[Watched]:
        """Returns those that have been silent for more than lost_after."""
        now = time.monotonic()
        return [each for each, (_, since) in self._seen.items() if now - since > self._lost_after]


class Membership:
    """This machine's membership in a run that all machines have joined.

    Args:
        link: link to node 0's store.
        record: record of this attempt.
        node: number of this machine.
        declarations: declarations of all machines, in order.
        settings: settings of heartbeats.
        close: called at the end of the run; on node 0 it closes the store.

    Attributes:
        progress: progress of this machine's workers, updated by the launcher.
    """

    def __init__(
        self,
        link: Link,
        record: Record,
        node: int,
        declarations: tuple[Declaration, ...],
        settings: RendezvousConfig,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self.record = record
        self.node = node
        self.declarations = declarations
        self._link = link
        self._settings = settings
        self._close = close
        self._others = [declaration.node for declaration in declarations if declaration.node != node]
        self._beats = Heartbeats(
            self._others if node == 0 else [], settings.lost_after_seconds, polled_every=settings.heartbeat_seconds
        )
        self._round: Future[Failure | None] | None = None
        self._polled = time.monotonic()  # last call of `poll`
        self._contact = self._polled  # last answer of node 0
        self._beat = 0
        self._beat_at = 0.0
        self._failure: Failure | None = None
        self.progress: list[WorkerProgress | None] = []

    @property
    def first_rank(self) -> int:
        """Rank of this machine's first worker."""
        return sum(declaration.processes for declaration in self.declarations[: self.node])

    @property
    def world_size(self) -> int:
        """Number of workers of all machines."""
        return sum(declaration.processes for declaration in self.declarations)

    @property
    def worker_address(self) -> Address | None:
        """Address that this machine's workers give to the others; None without a route.

        gloo takes the first address of an interface, IPv4 before IPv6.
        """
        wanted = self._settings.interface if self._others else None
        default = local_address(wanted) if wanted else route_to(self.record.address, self.record.port)
        name = os.environ.get(GLOO_VARIABLE, "" if default is None else default.interface)
        return next((address for address in addresses() if address.interface == name), default)

    def name_of(self, rank: int) -> str:
        """Returns the name of a rank in messages."""
        name = f"rank {rank} of {self.world_size}"
        first = 0
        for declaration in self.declarations:
            if len(self.declarations) > 1 and first <= rank < first + declaration.processes:
                name += f" (node {declaration.node}, local rank {rank - first})"
            first += declaration.processes
        return name

    def poll(self) -> Failure | None:
        """Exchanges heartbeats without waiting; returns why the run is over, or None."""
        now = time.monotonic()
        if self._failure is not None:
            return self._failure
        if now - self._polled > _PAUSE_SECONDS:
            self._contact = now
        self._polled = now
        if self._round is None and now - self._contact >= ROUND_SECONDS:
            self._round = self._link.submit(self._heartbeat)
        if self._round is not None and self._round.done():
            if (error := self._round.exception()) is not None:
                self._failure = self._lost_node_0(str(error))
            else:
                self._failure = self._round.result()
                self._contact = now
            self._round = None
        if now - self._contact > self._settings.lost_after_seconds:
            self._failure = self._lost_node_0(f"no answer for {now - self._contact:.0f} s")
        return self._failure

    def abort(self, failure: Failure) -> Failure:
        """Ends the run for all machines; returns the first failure of any machine."""
        if self._failure is None:
            try:
                self._failure = self._link.call(failure.set, self._settings.lost_after_seconds)
            except LostError:
                self._failure = failure
        return self._failure

    def exchange(self, key: str, value: object, seconds: float) -> list[Any]:
        """Sends a JSON value to all machines and returns the values of all machines.

        Args:
            key: key of the exchange, which is used only once.
            value: this machine's value.
            seconds: seconds to wait for the others.

        Raises:
            LostError: some machines sent nothing in time; the error names them.
        """
        self.give(key, value)
        gathered = f"exchange/{key}"
        deadline = time.monotonic() + seconds
        while True:
            late = time.monotonic() > deadline
            text = None if self.node == 0 else self._link.call(lambda store: store.get(gathered))
            if text is not None:
                return list(json.loads(text))
            if self.node == 0 or late:  # only node 0 collects: otherwise requests grow with the square of machines
                values = self.read_values(key)
                absent = [str(node) for node, sent in enumerate(values) if sent is None]
                if not absent:
                    self._put(gathered, values)
                    return values
                if late:
                    raise LostError(f"node {', '.join(absent)} sent nothing for {seconds:g} s")
            time.sleep(max(_EXCHANGE_SECONDS, len(self.declarations) / _EXCHANGE_REQUESTS))

    def give(self, key: str, value: object) -> None:
        """Sends a JSON value to all machines."""
        self._put(f"exchange/{key}/{self.node}", value)

    def read_values(self, key: str) -> list[Any]:
        """Returns the value of each machine, None if it has not sent it yet."""
        keys = [f"exchange/{key}/{declaration.node}" for declaration in self.declarations]
        texts = self._link.call(lambda store: [store.get(machine_key) for machine_key in keys])
        return [None if text is None else json.loads(text) for text in texts]

    def _put(self, key: str, value: object) -> None:
        text = json.dumps(value)
        self._link.call(lambda store: store.set(key, text))

    def describe_awaited(self) -> str:
        """Returns a line for each rank that the others have waited for too long; "" if a rank's progress is unknown."""
        keys = [f"progress/{declaration.node}" for declaration in self.declarations]
        try:
            texts = self._link.call(lambda store: [store.get(key) for key in keys], self._settings.lost_after_seconds)
        except LostError:
            return ""
        by_node = [[] if text is None else _PROGRESS.validate_json(text) for text in texts]
        by_node[self.node] = self.progress
        ranks = [progress for node_progress in by_node for progress in node_progress]
        if len(ranks) < self.world_size:
            return ""
        lines = ""
        for rank, progress in awaited_ranks(ranks):
            expected = f"progress within {progress.limit:g} s"
            got = f"none for {progress.silent:.0f} s after step {progress.step}; the others wait for it"
            lines += f"{Problem(self.name_of(rank), expected, got)}\n"
        return lines

    def leave(self, *, restart: bool, done: bool = False) -> bool:
        """Ends this attempt and returns whether there will be another one.

        node 0   sets "next" to its decision ─► waits until all others have left, as the store ends with it
        others   wait for "next", unless they are done ─► set "left/i"
        A machine that cannot reach node 0 follows its own proposal.

        Args:
            restart: this machine's proposal after a failure; node 0's proposal is the decision.
            done: whether the workers of this machine are done; node 0 then waits longer for the others.
        """
        with suppress(LostError):
            if self.node == 0:
                self._link.call(lambda store: store.set("next", "restart" if restart else "end"))
            elif not done:
                decision = poll(lambda: self._link.call(lambda store: store.get("next")), _LEAVE_SECONDS)
                restart = restart if decision is None else decision == "restart"
            self._link.call(lambda store: store.set(f"left/{self.node}", "1"))
            if self.node == 0:
                poll(self._others_left, _FINISH_SECONDS if done else _LEAVE_SECONDS)
        self._link.close()
        if not restart:
            self._close()
        return restart

    def finish(self) -> None:
        """Ends the run: the model is saved, so no later failure restarts it."""
        self.leave(restart=False, done=True)

    def _others_left(self) -> bool:
        return all(self._link.call(lambda store: [store.get(f"left/{i}") for i in self._others]))

    def _heartbeat(self, store: SignedStore) -> Failure | None:
        now = time.monotonic()
        if now - self._beat_at >= self._settings.heartbeat_seconds:
            self._beat += 1
            self._beat_at = now
            store.set(f"beat/{self.node}", f"{self.record.nonce}.{self._beat}")
            store.set(f"progress/{self.node}", _PROGRESS.dump_json(self.progress).decode())
            if self.node == 0:
                self._watch(store)
        return Failure.of(store)

    def _watch(self, store: SignedStore) -> None:
        left = {node for node in self._others if store.get(f"left/{node}") is not None}
        self._beats.note({node: store.get(f"beat/{node}") for node in self._others if node not in left})
        if silent := self._beats.find_lost():
            names = ", ".join(self.declarations[node].name for node in silent)
            Failure(reason=f"{names}: no heartbeat for {self._settings.lost_after_seconds:g} s").set(store)

    def _lost_node_0(self, why: str) -> Failure:
        return Failure(reason=f"lost node 0: {self.record}: {why}")
