"""One machine in one attempt of a run: heartbeats, and the one reason why a run ends early.

keys of an attempt in node 0's store
nonce, record      which store this is               node/i           what machine i declares; it has that number
go                 all declarations, and problems    beat/i           a number that grows while machine i lives
missing            who has not come
abort              the first failure, no other       progress/i       how far the workers of machine i are
next               after an abort: restart or end    left/i           machine i needs the store no longer
exchange/key/i     what machine i gives the others   exchange/key     the same of all machines, from node 0
"""

import json
import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter

from reagent_lite.config.rendezvous import RendezvousConfig
from reagent_lite.distributed.meeting_file import Record
from reagent_lite.distributed.network import Address, addresses, own_address, route_to
from reagent_lite.distributed.store import Link, LostError, Store
from reagent_lite.distributed.verdict import Declaration
from reagent_lite.distributed.worker import Progress, awaited_ranks
from reagent_lite.errors import PeerError, Problem

_PROGRESS = TypeAdapter(list[Progress | None])

GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"
ROUND_SECONDS = 0.2
"""Time between two polls of the store."""

_EXCHANGE_SECONDS = 0.02
_EXCHANGE_REQUESTS = 5000  # a second, of all machines together
_PAUSE_SECONDS = 2.0
_LEAVE_SECONDS = 5.0
_FINISH_SECONDS = 60.0


class Failure(BaseModel):
    """Why a run ends early.

    Attributes:
        reason: for people, with machine or rank and the first traceback.
        exit_code: the exit code of every launcher.
        restart: whether beginning again can help; a wrong config stays wrong.
        first_hand: false where it may only follow from a peer's end, such as a closed connection.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    reason: str
    exit_code: int = PeerError.exit_code
    restart: bool = True
    first_hand: bool = True

    @classmethod
    def of(cls, store: Store) -> "Failure | None":
        """Returns why the attempt of a store is over, or None."""
        text = store.get("abort")
        return None if text is None else cls.model_validate_json(text)

    def set(self, store: Store) -> "Failure":
        """Ends the attempt of a store unless it has ended; returns the first failure."""
        return Failure.model_validate_json(store.set_once("abort", self.model_dump_json()))


class LaunchError(PeerError):
    """A run ended early; message and exit code are those of the failure."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(())
        self.args = (failure.reason,)
        self.exit_code = failure.exit_code


class Heartbeats:
    """When each machine's beat last changed, by this machine's clock.

    Args:
        nodes: the machines to watch.
        lost_after: seconds of silence that count as a loss.
        polled_every: usual seconds between two calls of `note`.
    """

    def __init__(self, nodes: list[int], lost_after: float, *, polled_every: float) -> None:
        now = time.monotonic()
        self._seen: dict[int, tuple[str | None, float]] = {node: (None, now) for node in nodes}
        self._lost_after = lost_after
        self._pause = polled_every + _PAUSE_SECONDS
        self._last = now

    def note(self, beats: dict[int, str | None]) -> None:
        """Records the present beats; machines that are not among them are no longer watched."""
        now = time.monotonic()
        paused = now - self._last > self._pause  # this launcher slept: the others' silence is its own fault
        self._last = now
        self._seen = {
            node: (beat, now) if paused or beat != self._seen[node][0] else self._seen[node]
            for node, beat in beats.items()
        }

    def lost(self) -> list[int]:
        """Returns the machines that have been silent for too long."""
        now = time.monotonic()
        return [node for node, (_, since) in self._seen.items() if now - since > self._lost_after]


class Membership:
    """This machine's part in a run that all machines have joined.

    Args:
        link: to node 0's store.
        record: the record of this attempt.
        node: this machine's number.
        declarations: the declarations of all machines, in order.
        settings: the settings of heartbeats.
        close: called at the end of the run; releases what node 0 holds open.

    Attributes:
        progress: the progress of this machine's workers, kept up to date by the launcher.
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
        self._others = [one.node for one in declarations if one.node != node]
        self._beats = Heartbeats(
            self._others if node == 0 else [], settings.lost_after_seconds, polled_every=settings.heartbeat_seconds
        )
        self._round: Future[Failure | None] | None = None
        self._contact = self._polled = time.monotonic()
        self._beat = 0
        self._beaten = 0.0
        self._failure: Failure | None = None
        self.progress: list[Progress | None] = []

    @property
    def first_rank(self) -> int:
        """Rank of this machine's first worker."""
        return sum(one.processes for one in self.declarations[: self.node])

    @property
    def world_size(self) -> int:
        """Workers of all machines."""
        return sum(one.processes for one in self.declarations)

    @property
    def worker_address(self) -> Address | None:
        """Address of this machine that its workers give the others; None where there is no route.

        gloo takes the first address of an interface, IPv4 before IPv6.
        """
        wanted = self._settings.interface if self._others else None
        own = own_address(wanted) if wanted else route_to(self.record.address, self.record.port)
        name = os.environ.get(GLOO_VARIABLE, "" if own is None else own.interface)
        return next((one for one in addresses() if one.interface == name), own)

    def name_of(self, rank: int) -> str:
        """Returns how messages call a rank."""
        name = f"rank {rank} of {self.world_size}"
        first = 0
        for one in self.declarations:
            if len(self.declarations) > 1 and first <= rank < first + one.processes:
                name += f" (node {one.node}, local rank {rank - first})"
            first += one.processes
        return name

    def poll(self) -> Failure | None:
        """Exchanges heartbeats; returns why the run is over, or None. Never waits."""
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
        """Ends the run for all machines; returns the first failure that any of them gave."""
        if self._failure is None:
            try:
                self._failure = self._link.call(failure.set, self._settings.lost_after_seconds)
            except LostError:
                self._failure = failure
        return self._failure

    def exchange(self, key: str, value: object, seconds: float) -> list[Any]:
        """Sends a JSON value to all machines and returns those of all.

        Args:
            key: the key of the exchange; each is used once.
            value: this machine's value.
            seconds: how long the others may take.

        Raises:
            LostError: some did not send theirs in time; they are named.
        """
        self.give(key, value)
        gathered = f"exchange/{key}"
        deadline = time.monotonic() + seconds
        while True:
            late = time.monotonic() > deadline
            text = None if self.node == 0 else self._link.call(lambda store: store.get(gathered))
            if text is not None:
                return list(json.loads(text))
            if self.node == 0 or late:  # node 0 alone, as requests of each for each grow with the square of machines
                values = self.given(key)
                absent = [str(i) for i, one in enumerate(values) if one is None]
                if not absent:
                    self._put(gathered, values)
                    return values
                if late:
                    raise LostError(f"node {', '.join(absent)} sent nothing for {seconds:g} s")
            time.sleep(max(_EXCHANGE_SECONDS, len(self.declarations) / _EXCHANGE_REQUESTS))

    def give(self, key: str, value: object) -> None:
        """Sends a JSON value to all machines."""
        self._put(f"exchange/{key}/{self.node}", value)

    def given(self, key: str) -> list[Any]:
        """Returns each machine's value, None for one that is not there yet."""
        keys = [f"exchange/{key}/{one.node}" for one in self.declarations]
        texts = self._link.call(lambda store: [store.get(one) for one in keys])
        return [None if text is None else json.loads(text) for text in texts]

    def _put(self, key: str, value: object) -> None:
        text = json.dumps(value)
        self._link.call(lambda store: store.set(key, text))

    def awaited(self) -> str:
        """Returns which ranks the others have waited for too long, a line each; "" where that is not known."""
        keys = [f"progress/{one.node}" for one in self.declarations]
        try:
            texts = self._link.call(lambda store: [store.get(key) for key in keys], self._settings.lost_after_seconds)
        except LostError:
            return ""
        by_node = [[] if text is None else _PROGRESS.validate_json(text) for text in texts]
        by_node[self.node] = self.progress
        ranks = [one for several in by_node for one in several]
        if len(ranks) < self.world_size:
            return ""
        lines = ""
        for rank, one in awaited_ranks(ranks):
            expected = f"a process that goes on within {one.limit:g} s"
            got = f"no sign for {one.silent:.0f} s, after step {one.step}; the others wait for it"
            lines += f"{Problem(self.name_of(rank), expected, got)}\n"
        return lines

    def leave(self, *, restart: bool, done: bool = False) -> bool:
        """Ends this attempt and returns whether there will be another one.

        Args:
            restart: what this machine would do after a failure; node 0 decides for all that reach it.
            done: whether the workers of this machine are done; node 0 then waits longer, until the others have left.
        """
        with suppress(LostError):  # node 0 is gone as well: its next start, or its absence, decides
            if self.node == 0:
                self._link.call(lambda store: store.set("next", "restart" if restart else "end"))
            elif not done:
                restart = self._decision_of_node_0(restart)
            self._link.call(lambda store: store.set(f"left/{self.node}", "1"))
            deadline = time.monotonic() + (_FINISH_SECONDS if done else _LEAVE_SECONDS)
            while self.node == 0 and time.monotonic() < deadline:
                if all(self._link.call(lambda store: [store.get(f"left/{i}") for i in self._others])):
                    break
                time.sleep(ROUND_SECONDS / 4)
        self._link.close()
        if not restart:
            self._close()
        return restart

    def finish(self) -> None:
        """Ends the run: the model is saved, so no failure from here on begins it again."""
        self.leave(restart=False, done=True)

    def _decision_of_node_0(self, otherwise: bool) -> bool:
        deadline = time.monotonic() + _LEAVE_SECONDS
        while time.monotonic() < deadline:
            decided = self._link.call(lambda store: store.get("next"))
            if decided is not None:
                return decided == "restart"
            time.sleep(ROUND_SECONDS / 4)
        return otherwise

    def _heartbeat(self, store: Store) -> Failure | None:
        now = time.monotonic()
        if now - self._beaten >= self._settings.heartbeat_seconds:
            self._beat = self._beat + 1
            self._beaten = now
            store.set(f"beat/{self.node}", f"{self.record.nonce}.{self._beat}")
            store.set(f"progress/{self.node}", _PROGRESS.dump_json(self.progress).decode())
            if self.node == 0:
                self._watch(store)
        return Failure.of(store)

    def _watch(self, store: Store) -> None:
        left = {node for node in self._others if store.get(f"left/{node}") is not None}
        self._beats.note({node: store.get(f"beat/{node}") for node in self._others if node not in left})
        if silent := self._beats.lost():
            names = ", ".join(self.declarations[node].name for node in silent)
            Failure(reason=f"{names}: no sign of life for {self._settings.lost_after_seconds:g} s").set(store)

    def _lost_node_0(self, why: str) -> Failure:
        return Failure(reason=f"lost node 0: {self.record}: {why}")
