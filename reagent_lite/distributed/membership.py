"""One machine in one attempt of a run: signs of life, and the one reason why a run ends early.

keys of the store
nonce, record      who listens here                    node/i, info/i   machine i: who it is, what it declares
go                 all declarations and the verdict    beat/i           a number that grows while machine i lives
signs/i            how far the workers of machine i are
abort              the first reason, and no other      heard/i, done/i  machine i knows the reason; has finished
after              what node 0 does after an abort: restart or end
"""

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from reagent_lite.config.rendezvous import RendezvousConfig
from reagent_lite.distributed.link import Link, LostError, Store, answer
from reagent_lite.distributed.meeting_file import Record
from reagent_lite.distributed.signs import Sign, awaited
from reagent_lite.distributed.verdict import Declaration
from reagent_lite.errors import PeerError, Problem

T = TypeVar("T")
_SIGNS = TypeAdapter(list[Sign | None])

ROUND_SECONDS = 0.2
"""Time between two looks at the store."""

_PAUSE_SECONDS = 2.0
_LINGER_SECONDS = 5.0
_FINISH_SECONDS = 60.0


class Abort(BaseModel):
    """Why a run ended early.

    Attributes:
        reason: for people, with the first traceback.
        exit_code: of every launcher.
        restart: whether beginning again can help.
        lost: whether this machine concluded it alone, without a word from node 0.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    reason: str
    exit_code: Annotated[int, Field(ge=1)]
    restart: bool
    lost: bool = False


class Pulse:
    """When each machine's number last grew, by this machine's clock.

    Args:
        nodes: whose.
        lost_after: seconds of silence that count as a loss.
        looked_at_every: seconds between two looks, when all is well here.
    """

    def __init__(self, nodes: list[int], lost_after: float, *, looked_at_every: float) -> None:
        now = time.monotonic()
        self._seen: dict[int, tuple[str | None, float]] = {node: (None, now) for node in nodes}
        self._lost_after, self._pause, self._last = lost_after, looked_at_every + _PAUSE_SECONDS, now

    def note(self, beats: dict[int, str | None]) -> None:
        """Takes the numbers as they are now."""
        now = time.monotonic()
        paused = now - self._last > self._pause  # this launcher slept: the others' silence is its own fault
        self._last = now
        for node, beat in beats.items():
            if paused or beat != self._seen[node][0]:
                self._seen[node] = (beat, now)

    def forget(self, node: int) -> None:
        """Leaves out a machine that has finished."""
        self._seen.pop(node, None)

    @property
    def watched(self) -> list[int]:
        """Machines whose numbers should grow."""
        return list(self._seen)

    def lost(self) -> list[int]:
        """Returns the machines that are silent for too long."""
        now = time.monotonic()
        return [node for node, (_, since) in self._seen.items() if now - since > self._lost_after]


class Membership:
    """This machine's part in a run that all machines have joined.

    Args:
        link: to node 0's store.
        record: of this attempt.
        node: this machine's number.
        declarations: of all machines, in order.
        settings: of heartbeats.
        close: called at the end of the run; releases what node 0 holds open.

    Attributes:
        signs: latest ones of this machine's workers, kept up to date by the launcher.
    """

    def __init__(
        self,
        link: Link,
        record: Record,
        node: int,
        declarations: tuple[Declaration, ...],
        settings: RendezvousConfig,
        close: Callable[[], None],
    ) -> None:
        self.record, self.node, self.declarations = record, node, declarations
        self._link, self._settings, self._close = link, settings, close
        self._others = [one.node for one in declarations if one.node != node]
        self._pulse = Pulse(self._others if node == 0 else [], settings.lost_after_seconds,
                            looked_at_every=settings.heartbeat_seconds)  # fmt: skip
        self._round: Future[Abort | None] | None = None
        self._contact = self._polled = time.monotonic()
        self._beat, self._beaten = 0, 0.0
        self._abort: Abort | None = None
        self.signs: list[Sign | None] = []

    @property
    def first_rank(self) -> int:
        """Rank of this machine's first worker."""
        return sum(one.processes for one in self.declarations[: self.node])

    @property
    def world_size(self) -> int:
        """Workers of all machines."""
        return sum(one.processes for one in self.declarations)

    @property
    def own_interface(self) -> str | None:
        """Interface, or numeric address, that the config names for this machine; None leaves it to the routes."""
        return self._settings.interface if self._others else None

    def ask(self, work: Callable[[Store], T], seconds: float) -> T:
        """Returns the result of a call to node 0's store; see Link.ask."""
        return self._link.ask(work, seconds)

    def poll(self) -> Abort | None:
        """Gives and takes signs of life; returns why the run is over, or None. Never waits."""
        now = time.monotonic()
        if self._abort is not None:
            return self._abort
        if now - self._polled > _PAUSE_SECONDS:
            self._contact = now
        self._polled = now
        if self._round is None and now - self._contact >= ROUND_SECONDS:
            self._round = self._link.send(self._look)
        if self._round is not None and self._round.done():
            try:
                self._abort, self._contact = answer(self._round, 0), now
            except LostError as error:
                self._abort = self._lost(str(error))
            self._round = None
        if now - self._contact > self._settings.lost_after_seconds:
            self._abort = self._lost(f"no answer for {now - self._contact:.0f} s")
        return self._abort

    def abort(self, reason: Abort) -> Abort:
        """Says why this machine ends the run; returns the first reason anyone gave."""
        if self._abort is None:
            try:
                self._abort = self._link.ask(lambda store: _first(store, reason), self._settings.lost_after_seconds)
            except LostError:
                self._abort = reason
        return self._abort

    def name_of(self, rank: int) -> str:
        """Returns how messages call a rank."""
        name, first = f"rank {rank} of {self.world_size}", 0
        for one in self.declarations:
            if len(self.declarations) > 1 and first <= rank < first + one.processes:
                name += f" (node {one.node}, local rank {rank - first})"
            first += one.processes
        return name

    def awaited(self) -> str:
        """Returns which ranks the others have waited for in vain, as a line for people; "" where that is not known."""
        try:
            texts = self.ask(lambda store: [store.peek(f"signs/{one.node}") for one in self.declarations],
                             self._settings.lost_after_seconds)  # fmt: skip
        except LostError:
            return ""
        by_node = [[] if text is None else _SIGNS.validate_json(text) for text in texts]
        by_node[self.node] = self.signs
        signs = [sign for signs in by_node for sign in signs]
        if len(signs) < self.world_size:
            return ""
        return "".join(
            str(Problem(self.name_of(rank), f"a process that goes on within {sign.limit:g} s",
                        f"no sign for {sign.silent:.0f} s, after step {sign.step}; the others wait for it")) + "\n"
            for rank in awaited(signs) if (sign := signs[rank]) is not None
        )  # fmt: skip

    def leave(self, *, restart: bool) -> bool:
        """Ends this attempt after an abort and returns whether there will be another one.

        Args:
            restart: what this machine would do; node 0's word counts for all who hear it.
        """
        assert self._abort is not None
        try:
            if self.node == 0:
                self._link.ask(lambda store: store.set("after", "restart" if restart else "end"), _LINGER_SECONDS)
                self._linger(lambda store: [store.peek(f"heard/{i}") for i in self._others], _LINGER_SECONDS)
            elif not self._abort.lost:
                restart = self._wait_for_word(restart)
        except LostError:
            pass  # node 0 is gone as well: its next start, or its absence, decides
        self._link.close(ROUND_SECONDS)
        if not restart:
            self._close()
        return restart

    def finish(self) -> None:
        """Says that this machine's workers are done; node 0 waits a moment for the others' word."""
        try:
            if self.node == 0:  # the model stands: whoever fails from here on has nothing to begin again for
                self._link.ask(lambda store: store.set("after", "end"), self._settings.lost_after_seconds)
            self._link.ask(lambda store: store.set(f"done/{self.node}", "1"), self._settings.lost_after_seconds)
            if self.node == 0:
                self._linger(lambda store: [store.peek(f"done/{i}") for i in self._others], _FINISH_SECONDS)
        except LostError:
            pass  # the model stands: whoever cannot hear it ends by itself
        self._link.close(ROUND_SECONDS)
        self._close()

    def _linger(self, words: Callable[[Store], list[str | None]], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not all(self._link.ask(words, seconds)):
            time.sleep(ROUND_SECONDS / 4)

    def _wait_for_word(self, restart: bool) -> bool:
        deadline, word = time.monotonic() + _LINGER_SECONDS, None
        while word is None and time.monotonic() < deadline:
            word = self._link.ask(lambda store: store.peek("after"), _LINGER_SECONDS)
            time.sleep(0 if word else ROUND_SECONDS / 4)
        self._link.ask(lambda store: store.set(f"heard/{self.node}", "1"), _LINGER_SECONDS)
        return restart if word is None else word == "restart"

    def _look(self, store: Store) -> Abort | None:
        now = time.monotonic()
        if now - self._beaten >= self._settings.heartbeat_seconds:
            self._beat, self._beaten = self._beat + 1, now
            store.set(f"beat/{self.node}", f"{self.record.nonce}.{self._beat}")
            store.set(f"signs/{self.node}", _SIGNS.dump_json(self.signs).decode())
            if self._others and self.node == 0:
                self._listen(store)
        text = store.peek("abort")
        return None if text is None else Abort.model_validate_json(text)

    def _listen(self, store: Store) -> None:
        for node in self._pulse.watched:
            if store.peek(f"done/{node}") is not None:
                self._pulse.forget(node)
        self._pulse.note({node: store.peek(f"beat/{node}") for node in self._pulse.watched})
        lost = self._pulse.lost()
        if lost:
            names = ", ".join(self.declarations[node].name for node in lost)
            silence = self._settings.lost_after_seconds
            reason = f"{names}: no sign of life for {silence:g} s"
            _first(store, Abort(reason=reason, exit_code=PeerError.exit_code, restart=True))

    def _lost(self, why: str) -> Abort:
        reason = f"lost node 0: {self.record}: {why}"
        return Abort(reason=reason, exit_code=PeerError.exit_code, restart=True, lost=True)


def _first(store: Store, reason: Abort) -> Abort:
    """Puts the reason down unless there is one already; returns the one that stands."""
    return Abort.model_validate_json(store.set_once("abort", reason.model_dump_json()))
