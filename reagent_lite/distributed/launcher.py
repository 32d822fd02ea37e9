"""One machine's launcher: it outlives its workers, so that every end has a reason and another attempt can follow.

join ─► workers ─► watch ─┬─► all done ─► finish
  ▲                       └─► failure here or abort from elsewhere ─► all workers ended ─► leave ─┐
  └───────────────────────────────── restarts left, and a restart can help ◄──────────────────────┘
"""

import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

import torch

from reagent_lite.console import logger
from reagent_lite.distributed.connections import CONNECT_SECONDS, Talk, find_unreached, worker_address
from reagent_lite.distributed.link import Link, LostError
from reagent_lite.distributed.membership import Abort, Membership
from reagent_lite.distributed.rendezvous import Rendezvous
from reagent_lite.distributed.signals import heeded
from reagent_lite.distributed.workers import Failure, Workers
from reagent_lite.errors import ConfigError, PeerError, Preempted, Problem, RendezvousError, counted
from reagent_lite.files import FolderIdentity

_WATCH_SECONDS = 0.1
_CONSEQUENCE_SECONDS = 2.0
_STANDING = "the last checkpoint stands: run the same command again to continue"


@dataclass(frozen=True, slots=True)
class Processes:
    """How many processes this machine runs, and on what.

    Attributes:
        count: one per GPU, or as many CPU processes as asked for.
        device_type: "cuda" or "cpu".
        note: what the user should know about the choice, or "".
    """

    count: int
    device_type: str
    note: str = ""

    def device(self, local_rank: int) -> torch.device:
        """Returns the device of one local rank."""
        return torch.device("cuda", local_rank) if self.device_type == "cuda" else torch.device("cpu")


def choose_processes(*, use_gpu: bool, use_all: bool, explicit: int | None, gpus: int) -> Processes:
    """Returns the processes of this machine.

    Args:
        use_gpu: the config's use_gpu.
        use_all: the config's use_all_avail_gpus.
        explicit: num_processes_per_node, or None.
        gpus: GPUs found.

    Raises:
        ConfigError: where more GPU processes are asked for than there are GPUs.
    """
    if not use_gpu or not gpus:
        note = "use_gpu is true, but no GPU was found: training on the CPU" if use_gpu else ""
        return Processes(explicit or 1, "cpu", note)
    count = explicit or (gpus if use_all else 1)
    if count > gpus:
        raise ConfigError(
            Problem("num_processes_per_node", f"at most the {counted(gpus, 'GPU')} of this machine", str(count),
                    "Lower it, or set use_gpu to false for CPU processes")
        )  # fmt: skip
    return Processes(count, "cuda")


class LaunchError(PeerError):
    """A run ended early; carries the exit code of the reason, which is printed as it stands."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(())
        self.args = (message,)
        self.exit_code = exit_code


def launch(
    command: list[str], count: int, rendezvous: Rendezvous, *, restarts: int, folder: FolderIdentity | None = None
) -> None:
    """Runs this machine's workers of a command until the run is done, beginning again where that can help.

    Args:
        command: of every worker.
        count: how many this machine starts.
        rendezvous: where it meets the others.
        restarts: how often the run may begin again.
        folder: that workers write into, which must stay the same one; None where they write nothing.

    Raises:
        LaunchError: the run failed, on whichever machine; every launcher raises the same reason.
        RendezvousError: see Rendezvous.join.
        Preempted: a signal came before training began, or while it was to begin again.
    """
    with _told() as told, closing(rendezvous):
        rendezvous.interrupted = told.leave
        used = 0
        while True:
            membership = rendezvous.join()
            abort = _attempt(command, count, membership, rendezvous.settings.lost_after_seconds, told, folder)
            if abort is None:
                membership.finish()
                return
            restart = abort.restart and used < restarts and not told.number
            restart = membership.leave(restart=restart) and not told.number
            if told.number and abort.restart:
                raise Preempted(signal.Signals(told.number).name, f"{abort.reason}\n{_STANDING}")
            if not restart:
                tried = f"\nThe run had begun again {counted(used, 'time')}" if used else ""
                raise LaunchError(abort.reason + tried, abort.exit_code)
            used += 1
            told.standing = _STANDING
            rendezvous.again(membership)
            logger.info(
                f"{abort.reason}\nbeginning again from the last checkpoint: restart {used} of at most {restarts}"
            )


def _attempt(
    command: list[str],
    count: int,
    membership: Membership,
    lost_after: float,
    told: "_Told",
    output: FolderIdentity | None,
) -> Abort | None:
    """Runs the workers once; returns why the attempt ended early, or None."""
    try:
        abort = _prepare(membership, told, output)
        if abort is not None:
            return abort
        with tempfile.TemporaryDirectory(prefix="reagent_lite_") as folder:
            workers = Workers(command, count, membership, Path(folder), lost_after=lost_after)
            try:
                abort = _watch(workers, membership, lost_after, told)
            finally:
                workers.end()
            if abort is None or not workers.model_stands:
                return abort
    except OSError as error:
        problem = Problem(f"node {membership.node}", "a machine that can start its workers", str(error))
        return membership.abort(Abort(reason=str(problem), exit_code=PeerError.exit_code, restart=True))
    reason = f"{abort.reason}\nThe model had been saved before: it stands, and nothing begins again"
    return abort.model_copy(update={"reason": reason, "exit_code": PeerError.exit_code, "restart": False})


def _prepare(membership: Membership, told: "_Told", output: FolderIdentity | None) -> Abort | None:
    """Looks at what workers need, on a thread, so that this machine goes on showing signs of life.

    Returns why the attempt is over, or None.
    """

    def look() -> list[Problem]:
        if output is not None:
            output.require()
        count, own = len(membership.declarations), worker_address(membership)
        if count == 1 or own is None:
            return []
        talk = Talk(membership, count, CONNECT_SECONDS)
        return find_unreached(talk, own, CONNECT_SECONDS)

    looking = Link(lambda: None).send(lambda _: look())
    while not looking.done():
        abort = membership.poll()
        if abort is None and told.number:
            reason = "told to end before training began; run the same command again"
            abort = membership.abort(Abort(reason=reason, exit_code=Preempted.exit_code, restart=False))
        if abort is not None:
            return abort
        time.sleep(_WATCH_SECONDS / 2)
    try:
        problems = looking.result()
    except LostError as error:
        return membership.abort(Abort(reason=str(error), exit_code=PeerError.exit_code, restart=True))
    if not problems:
        return None
    unreached = RendezvousError(problems)
    return membership.abort(Abort(reason=str(unreached), exit_code=unreached.exit_code, restart=False))


def _watch(workers: Workers, membership: Membership, lost_after: float, told: "_Told") -> Abort | None:
    passed_on = 0
    while True:
        membership.signs = workers.signs
        abort = membership.poll()
        if abort is not None:
            return abort
        if told.number and not passed_on:
            passed_on = told.number
            workers.tell(signal.SIGTERM)
        done = workers.done  # asked first: a worker that fails between the two questions is not done well
        failure = workers.failure()
        if failure is not None and failure.restart and told.number:  # others would wait for this machine
            failure = replace(failure, message=f"{failure.message}\ntold to end; {_STANDING}",
                              exit_code=Preempted.exit_code, restart=False)  # fmt: skip
        if failure is not None:
            return _agreed(failure, membership, lost_after + _CONSEQUENCE_SECONDS)
        if done:
            if workers.preempted:
                reason = f"told to end; {_STANDING}"
                return membership.abort(Abort(reason=reason, exit_code=Preempted.exit_code, restart=False))
            return None
        time.sleep(_WATCH_SECONDS)


def _agreed(failure: Failure, membership: Membership, seconds: float) -> Abort:
    """Returns the run's reason: another machine's, if it comes out while this one's failure may only follow from it."""
    deadline = time.monotonic() + (0.0 if failure.first_hand else seconds)
    while time.monotonic() < deadline and len(membership.declarations) > 1:
        abort = membership.poll()
        if abort is not None:
            return abort
        time.sleep(_WATCH_SECONDS)
    reason = failure.message if failure.first_hand else membership.awaited() + failure.message
    return membership.abort(Abort(reason=reason, exit_code=failure.exit_code, restart=failure.restart))


class _Told:
    """Whether a signal has told this launcher to end.

    Attributes:
        number: of the signal; 0 before one came.
        standing: what the same command would continue from while nothing runs.
    """

    def __init__(self) -> None:
        self.number = 0
        self.standing = "training had not begun; run the same command again"

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.number and number == signal.SIGINT:
            raise KeyboardInterrupt  # asked twice: workers are killed
        self.number = number

    def leave(self) -> None:
        """Raises where nothing runs yet that could save."""
        if self.number:
            raise Preempted(signal.Signals(self.number).name, self.standing)


@contextmanager
def _told() -> Iterator[_Told]:
    told = _Told()
    before = {number: signal.signal(number, told) for number in heeded()}
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
