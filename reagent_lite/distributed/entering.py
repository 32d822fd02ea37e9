"""Into a run whose store has been found: take a number, declare oneself, wait for the verdict on all."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from reagent_lite.config.rendezvous import RendezvousConfig
from reagent_lite.console import logger
from reagent_lite.distributed.link import Link, Store
from reagent_lite.distributed.membership import ROUND_SECONDS, Abort, Pulse
from reagent_lite.distributed.nodes import Node
from reagent_lite.distributed.verdict import Declaration, compare
from reagent_lite.errors import Problem, RendezvousError

SAY_SECONDS = 10.0
"""Time between two lines on what is waited for."""

ANSWER_SECONDS = 5.0
"""How long node 0's store may take for one answer before a machine is part of the run."""


class AgainError(Exception):
    """This attempt ended before all had come; the next one may do better."""


class Entry:
    """One machine on its way into one attempt.

    Args:
        link: to node 0's store.
        node: this machine.
        declaration: what it says of itself.
        run: tells two starts on one machine apart.
        settings: times.
        interrupted: asked while waiting; raises to leave.
    """

    def __init__(
        self,
        link: Link,
        node: Node,
        declaration: Declaration,
        run: str,
        settings: RendezvousConfig,
        *,
        interrupted: Callable[[], None],
    ) -> None:
        self._link, self._node, self._declaration, self._run = link, node, declaration, run
        self._settings, self._interrupted = settings, interrupted

    def declare(self) -> None:
        """Puts this machine's declaration down."""
        text = self._declaration.model_dump_json()
        self._link.ask(lambda store: store.set(f"info/{self._node.index}", text), ANSWER_SECONDS)

    def claim(self) -> None:
        """Takes this machine's number.

        Raises:
            RendezvousError: another living machine has it; both are named.
            AgainError: who has it is gone, and so is the attempt.
        """
        mine = json.dumps({"host": self._declaration.host, "pid": self._declaration.pid, "run": self._run})
        key, beat = f"node/{self._node.index}", f"beat/{self._node.index}"
        known, since = None, time.monotonic()
        while True:
            self._interrupted()
            holder = self._link.ask(lambda store: store.set_once(key, mine), ANSWER_SECONDS)
            if holder == mine:
                return
            seen = self._link.ask(lambda store: store.peek(beat), ANSWER_SECONDS)
            if known is not None and seen != known:
                other = json.loads(holder)
                raise RendezvousError(
                    Problem(f"node_index {self._node.index}", "a number that no other machine of the run has",
                            f"taken by host {other['host']}, pid {other['pid']}; this is host "
                            f"{self._declaration.host}, pid {self._declaration.pid}",
                            "Give each machine its own --node_index")
                )  # fmt: skip
            known = seen if known is None else known
            if self._link.ask(lambda store: store.peek("abort"), ANSWER_SECONDS):
                raise AgainError("its attempt has ended")
            if time.monotonic() - since > 3 * self._settings.lost_after_seconds:
                raise AgainError(f"node_index {self._node.index} is held by one who shows no sign of life")
            time.sleep(ROUND_SECONDS)

    def wait(self, deadline: float) -> dict[str, Any]:
        """Shows signs of life until node 0 has put down the verdict; on node 0, makes it."""
        council = _Council(self._node.count, self._settings)
        said, beat = time.monotonic(), 0
        while True:
            try:
                self._interrupted()
            except RendezvousError as error:
                self._give_up(error)
                raise
            beat += 1
            text = f"join.{self._run}.{beat}"

            def look(store: Store, text: str = text) -> tuple[str | None, str | None, list[int]]:
                store.set(f"beat/{self._node.index}", text)
                if self._node.index == 0:
                    council.sit(store)
                missing = [i for i in range(self._node.count) if store.peek(f"info/{i}") is None]
                return store.peek("abort"), store.peek("go"), missing

            abort, go, missing = self._link.ask(look, self._settings.lost_after_seconds)
            if go is not None:
                verdict: dict[str, Any] = json.loads(go)
                return verdict
            if abort is not None:
                raise _ended(Abort.model_validate_json(abort))
            if self._node.index in missing:  # node 0 gave the place up while this machine was silent
                self.claim()
                self.declare()
            now = time.monotonic()
            names = ", ".join(map(str, missing))
            if now > deadline:
                late = RendezvousError(
                    Problem(f"rendezvous of {self._node.count} machines",
                            f"all of them within {self._settings.join_timeout_seconds:g} s",
                            f"no sign of node {names}",
                            "Start the same command there with its --node_index; workflows.doctor shows what is in the "
                            "way")
                )  # fmt: skip
                self._give_up(late)
                raise late
            if now - said > SAY_SECONDS:
                said = now
                logger.info(f"rendezvous: waiting for node {names} of {self._node.count}; {deadline - now:.0f} s left")
            time.sleep(ROUND_SECONDS / 2)

    def _give_up(self, error: RendezvousError) -> None:
        reason = Abort(reason=str(error), exit_code=error.exit_code, restart=False).model_dump_json()
        self._link.ask(lambda store: store.set_once("abort", reason), ANSWER_SECONDS)
        self.linger()

    def linger(self) -> None:
        """Keeps node 0's store for as long as others need to read the reason."""
        if self._node.index == 0:
            time.sleep(5 * ROUND_SECONDS)


class _Council:
    """Node 0's view of who has come: clears the places of those who went away, and makes the verdict."""

    def __init__(self, count: int, settings: RendezvousConfig) -> None:
        self._count = count
        self._pulse = Pulse(list(range(count)), settings.lost_after_seconds, looked_at_every=ROUND_SECONDS)

    def sit(self, store: Store) -> None:
        """Runs on the link's thread."""
        holders = [store.peek(f"node/{i}") for i in range(self._count)]
        # to take a number is a sign of life: whoever came late has not had the time for another one
        self._pulse.note({i: f"{holder} {store.peek(f'beat/{i}')}" for i, holder in enumerate(holders)})
        for i in self._pulse.lost():
            holder = holders[i]
            if i and holder is not None:
                other = json.loads(holder)
                logger.info(f"rendezvous: node {i} (host {other['host']}, pid {other['pid']}) went away before all had "
                          "come; its place is free again")  # fmt: skip
                for key in ("node", "info"):
                    store.delete(f"{key}/{i}")
        texts = [store.peek(f"info/{i}") for i in range(self._count)]
        came = [Declaration.model_validate_json(text) for text in texts if text is not None]
        unfit = [one for one in came if one.problem]
        if len(came) == self._count or unfit:
            store.set("go", _verdict(came, unfit))


def _verdict(came: list[Declaration], unfit: list[Declaration]) -> str:
    problems = [Problem(one.name, "a machine that can take part", one.problem) for one in unfit]
    warnings: list[str] = []
    if not unfit:
        problems, warnings = compare(came)
    return json.dumps({
        "problems": [asdict(problem) for problem in problems],
        "exit_code": unfit[0].exit_code if unfit else RendezvousError.exit_code,
        "warnings": warnings,
        "declarations": [one.model_dump(mode="json") for one in came],
    })  # fmt: skip


def _ended(abort: Abort) -> Exception:
    if abort.restart:
        return AgainError(abort.reason)
    error = RendezvousError(())
    error.args, error.exit_code = (abort.reason,), abort.exit_code
    return error
