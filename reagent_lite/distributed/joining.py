"""From a run whose store has been found to a membership: claim a number, declare this machine, wait for the verdict."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from reagent_lite.config.rendezvous import RendezvousConfig
from reagent_lite.console import logger
from reagent_lite.distributed.membership import ROUND_SECONDS, Failure, Heartbeats, failure_of, set_failure
from reagent_lite.distributed.nodes import Node
from reagent_lite.distributed.store import Link, Store
from reagent_lite.distributed.verdict import Declaration, compare
from reagent_lite.errors import Problem, RendezvousError

LOG_SECONDS = 10.0
"""Time between two lines on what is waited for."""


class AttemptEndedError(Exception):
    """This attempt ended before all had come; the next one may do better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joining:
    """One machine that joins one attempt.

    Attributes:
        link: to node 0's store.
        node: this machine.
        declaration: of this machine.
        run: distinguishes two starts on one machine.
        settings: times.
        interrupted: called while waiting; raises to leave.
    """

    link: Link
    node: Node
    declaration: Declaration
    run: str
    settings: RendezvousConfig
    interrupted: Callable[[], None]

    def claim(self) -> None:
        """Takes this machine's number.

        Raises:
            RendezvousError: another living machine has it; both are named.
            AttemptEndedError: who has it is gone, and so is the attempt.
        """
        own, number = self.declaration, self.node.index
        mine = json.dumps({"host": own.host, "pid": own.pid, "run": self.run})
        known, since = None, time.monotonic()

        def attempt(store: Store) -> tuple[str, str | None, Failure | None]:
            return store.set_once(f"node/{number}", mine), store.get(f"beat/{number}"), failure_of(store)

        while True:
            self.interrupted()
            holder, beat, failure = self.link.call(attempt)
            if holder == mine:
                return
            if known is not None and beat != known:
                other = json.loads(holder)
                got = f"taken by host {other['host']}, pid {other['pid']}; this is host {own.host}, pid {own.pid}"
                expected, todo = (
                    "a number that no other machine of the run has",
                    "Give each machine its own --node_index",
                )
                raise RendezvousError(Problem(f"node_index {number}", expected, got, todo))
            known = beat if known is None else known
            if failure is not None:
                raise AttemptEndedError("its attempt has ended")
            if time.monotonic() - since > 3 * self.settings.lost_after_seconds:
                raise AttemptEndedError(f"node_index {number} is held by a machine without a heartbeat")
            time.sleep(ROUND_SECONDS)

    def declare(self) -> None:
        """Makes this machine's declaration known."""
        text = self.declaration.model_dump_json()
        self.link.call(lambda store: store.set(f"info/{self.node.index}", text))

    def wait(self, deadline: float) -> tuple[Declaration, ...]:
        """Returns the declarations of all machines once they have come and fit together; node 0 finds out whether.

        Raises:
            RendezvousError: they do not fit together, or not all came.
            AttemptEndedError: it ended, and can begin again.
        """
        places = _Places(self.node.count, self.settings)
        logged, beat = time.monotonic(), 0
        while True:
            try:
                self.interrupted()
            except RendezvousError as error:
                raise self._ended_for_all(error) from None
            beat += 1
            text = f"join.{self.run}.{beat}"

            def poll(store: Store, text: str = text) -> tuple[Failure | None, str | None, list[int]]:
                store.set(f"beat/{self.node.index}", text)
                if self.node.index == 0:
                    places.update(store)
                missing = [i for i in range(self.node.count) if store.get(f"info/{i}") is None]
                return failure_of(store), store.get("go"), missing

            failure, go, missing = self.link.call(poll, self.settings.lost_after_seconds)
            if go is not None:
                return self._fitting(json.loads(go))
            if failure is not None and failure.restart:
                raise AttemptEndedError(failure.reason)
            if failure is not None:
                ended = RendezvousError(())
                ended.args, ended.exit_code = (failure.reason,), failure.exit_code
                raise ended
            if self.node.index in missing:  # node 0 gave the number up while this machine was silent
                self.claim()
                self.declare()
            now, names = time.monotonic(), ", ".join(map(str, missing))
            if now > deadline:
                problem = Problem(
                    f"rendezvous of {self.node.count} machines",
                    f"all of them within {self.settings.join_timeout_seconds:g} s",
                    f"no sign of node {names}",
                    "Start the same command there with its --node_index; workflows.doctor shows what is in the way",
                )
                raise self._ended_for_all(RendezvousError(problem))
            if now - logged > LOG_SECONDS:
                logged = now
                logger.info(f"rendezvous: waiting for node {names} of {self.node.count}; {deadline - now:.0f} s left")
            time.sleep(ROUND_SECONDS / 2)

    def _ended_for_all(self, error: RendezvousError) -> RendezvousError:
        failure = Failure(reason=str(error), exit_code=error.exit_code, restart=False)
        self.link.call(lambda store: set_failure(store, failure))
        self._linger()
        return error

    def _fitting(self, verdict: dict[str, Any]) -> tuple[Declaration, ...]:
        for warning in verdict["warnings"]:
            logger.warning(f"rendezvous: {warning}")
        if verdict["problems"]:
            self._linger()
            error = RendezvousError([Problem(**problem) for problem in verdict["problems"]])
            error.exit_code = max(verdict["exit_code"], 1)
            raise error
        return tuple(Declaration.model_validate(one) for one in verdict["declarations"])

    def _linger(self) -> None:
        if self.node.index == 0:  # the others read the reason in its store
            time.sleep(5 * ROUND_SECONDS)


class _Places:
    """Node 0's view of who has come: frees the numbers of machines that went away, and gives the verdict."""

    def __init__(self, count: int, settings: RendezvousConfig) -> None:
        self._count = count
        self._beats = Heartbeats(list(range(count)), settings.lost_after_seconds, polled_every=ROUND_SECONDS)

    def update(self, store: Store) -> None:
        holders = [store.get(f"node/{i}") for i in range(self._count)]
        # a claim is a sign of life: a machine that came late has not had the time for another one
        self._beats.note({i: f"{holder} {store.get(f'beat/{i}')}" for i, holder in enumerate(holders)})
        for i in self._beats.lost():
            holder = holders[i]
            if i and holder is not None:
                other = json.loads(holder)
                name = f"node {i} (host {other['host']}, pid {other['pid']})"
                logger.info(f"rendezvous: {name} went away before all had come; its place is free again")
                store.delete(f"node/{i}")
                store.delete(f"info/{i}")
        texts = [store.get(f"info/{i}") for i in range(self._count)]
        declared = [Declaration.model_validate_json(text) for text in texts if text is not None]
        if len(declared) == self._count or any(one.problem for one in declared):
            store.set("go", _verdict(declared))


def _verdict(declared: list[Declaration]) -> str:
    unfit = [one for one in declared if one.problem]
    problems, warnings = compare(declared)
    if unfit:
        problems, warnings = [Problem(one.name, "a machine that can take part", one.problem) for one in unfit], []
    verdict = {
        "problems": [asdict(problem) for problem in problems],
        "exit_code": unfit[0].exit_code if unfit else RendezvousError.exit_code,
        "warnings": warnings,
        "declarations": [one.model_dump(mode="json") for one in declared],
    }
    return json.dumps(verdict)
