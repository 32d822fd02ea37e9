"""A machine's launcher: starts the workers, reports why they failed, and restarts them.

join ─► connections ─► workers ─► watch ─┬─► all done ─► finish
  ▲                                      └─► failure on any machine ─► all workers ended ─► leave ─────┐
  └────────────────────────── restarts left, and a restart can help ◄──────────────────────────────────┘
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

import psutil
import torch

from reagent_lite.config import WorkflowConfig
from reagent_lite.console import logger
from reagent_lite.distributed.connections import Connections
from reagent_lite.distributed.group import ATTEMPT_VARIABLE
from reagent_lite.distributed.key_value_store import Background, LostError
from reagent_lite.distributed.meeting import Rendezvous
from reagent_lite.distributed.membership import GLOO_VARIABLE, Failure, LaunchError, Membership, poll
from reagent_lite.distributed.worker import Reports, stop_signals
from reagent_lite.errors import (
    ConfigError,
    PeerError,
    Preempted,
    Problem,
    RendezvousError,
    UnavailableError,
    pluralize,
)
from reagent_lite.folder_identity import FolderIdentity, wait_for
from reagent_lite.memory import oom_kills
from reagent_lite.whole_files import scratch_folder

_WATCH_SECONDS = 0.1
_END_SECONDS = 15.0
_PEER_SECONDS = 1.0  # for other workers of this machine to report why they failed
_MACHINE_SECONDS = 2.0  # for another machine's failure to become known, in addition to lost_after_seconds
_CONNECT_SECONDS = 60.0
_CONTINUE = "run the same command again: it continues from the last checkpoint, or starts over if there is none"
_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


@dataclass(frozen=True, slots=True)
class Processes:
    """Number and device of this machine's processes.

    Attributes:
        count: one per GPU, or the configured number of CPU processes.
        device_type: "cuda" or "cpu".
        note: message to the user about the choice, or "".
        gpus: number of GPUs of each process.
    """

    count: int
    device_type: str
    note: str = ""
    gpus: int = 1

    def device(self, local_rank: int) -> torch.device:
        """Returns the device of a local rank; a launcher may have made only this rank's GPU visible to it."""
        if self.device_type == "cpu":
            return torch.device("cpu")
        return torch.device("cuda", 0 if torch.cuda.device_count() == 1 else local_rank)


def choose_processes(config: WorkflowConfig) -> Processes:
    """Returns the processes that a run starts on this machine.

    Raises:
        ConfigError: more GPU processes than GPUs, parallel "dp" without a GPU, or see `require_batch_norm`.
    """
    explicit = config.num_processes_per_node
    gpus = torch.cuda.device_count() if config.use_gpu else 0
    if config.parallel == "dp":
        if gpus:
            return Processes(1, "cuda", gpus=gpus)
        todo = "torch's DataParallel divides a minibatch over the GPUs of one machine; on a CPU use several processes"
        raise ConfigError(Problem("parallel", '"ddp" or "none" on a CPU', '"dp"', todo))
    if not gpus:
        note = "use_gpu is true, but no GPU was found: training on the CPU" if config.use_gpu else ""
        processes = Processes(explicit or 1, "cpu", note)
        require_batch_norm(config, processes.count * config.num_nodes, processes.device_type)
        return processes
    count = explicit or (gpus if config.use_all_avail_gpus else 1)
    if count > gpus:
        expected = f"at most the {pluralize(gpus, 'GPU')} of this machine"
        todo = "Lower it, or set use_gpu to false for CPU processes"
        raise ConfigError(Problem("num_processes_per_node", expected, str(count), todo))
    return Processes(count, "cuda")


def require_batch_norm(config: WorkflowConfig, world_size: int, device_type: str) -> None:
    """Checks that the processes of a run can compute batch normalization if the config asks for it.

    Raises:
        ConfigError: it would be over several CPU processes.
    """
    if config.training.use_batch_norm and world_size > 1 and device_type == "cpu":
        todo = "Statistics over all processes need GPUs; train with one process, or without batch normalization"
        raise ConfigError(Problem("training.use_batch_norm", "false with several CPU processes", "true", todo))


def launch(
    command: list[str], count: int, rendezvous: Rendezvous, *, restarts: int, folder: FolderIdentity | None = None
) -> None:
    """Runs this machine's workers until the run is done, and restarts them if that can help.

    Args:
        command: command of every worker.
        count: number of workers of this machine.
        rendezvous: rendezvous with the other machines.
        restarts: largest number of restarts of the run.
        folder: folder that workers write into, which must stay the same; None if they write nothing.

    Raises:
        LaunchError: the run failed on any machine; every launcher raises the same reason.
        RendezvousError: see Rendezvous.join.
        Preempted: a signal arrived while no worker ran, or the run failed after a signal.
    """
    with StopRequest() as stop, closing(rendezvous):
        rendezvous.interrupted = stop.require_none
        restarted = 0
        while True:
            membership = rendezvous.join()
            attempt = Attempt(command, count, membership, rendezvous.settings.lost_after_seconds, stop)
            failure = attempt.run(folder)
            if failure is None:
                membership.finish()
                return
            restart = failure.restart and restarted < restarts and not stop.number
            restart = membership.leave(restart=restart) and not stop.number
            if stop.number and failure.restart:
                raise Preempted(signal.Signals(stop.number).name, f"{failure.reason}\n{_CONTINUE}")
            if not restart:
                tried = f"\nThe run had been restarted {pluralize(restarted, 'time')}" if restarted else ""
                raise LaunchError(failure.model_copy(update={"reason": failure.reason + tried}))
            restarted += 1
            stop.advice = _CONTINUE
            again = f"restarting from the last checkpoint: restart {restarted} of at most {restarts}"
            logger.info(f"{failure.reason}\n{again}")


class StopRequest:
    """Records signals that ask this launcher to end, inside its `with` block.

    Attributes:
        number: number of the signal; 0 without a signal.
        advice: how to continue the run, for the message about a signal that arrives while no worker runs.
    """

    def __init__(self) -> None:
        self.number = 0
        self.advice = "training had not begun; run the same command again"
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopRequest":
        self._before.update({number: signal.signal(number, self._note) for number in stop_signals()})
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.number and number == signal.SIGINT:
            raise KeyboardInterrupt  # second request: workers are killed
        self.number = number

    def require_none(self) -> None:
        """Raises Preempted after a signal; called while no worker runs."""
        if self.number:
            raise Preempted(signal.Signals(self.number).name, self.advice)


class Attempt:
    """A start of this machine's workers.

    Args:
        command: command of every worker.
        count: number of workers of this machine.
        membership: membership of this machine, with ranks and the address of the store.
        lost_after: seconds after which a suspended worker counts as lost.
        stop: signals that ask this launcher to end.
    """

    def __init__(
        self, command: list[str], count: int, membership: Membership, lost_after: float, stop: StopRequest
    ) -> None:
        self._command = command
        self._count = count
        self._membership = membership
        self._lost_after = lost_after
        self._stop = stop
        self._running: list[subprocess.Popen[bytes]] = []
        self._suspended_since: dict[int, float] = {}
        self._oom_kills = oom_kills()
        self._connections = Connections(membership)

    def run(self, folder: FolderIdentity | None) -> Failure | None:
        """Runs the workers; returns why the attempt ended early, or None."""
        try:
            failure = self._prepare(folder)
            if failure is not None:
                return failure
            with scratch_folder() as reports:
                self._reports = Reports(reports, self._count)
                try:
                    self._start()
                    failure = self._watch()
                finally:
                    self._end()
                if failure is None or failure.exit_code == Preempted.exit_code or not self._reports.model_saved:
                    return failure
        except OSError as error:
            problem = Problem(f"node {self._membership.node}", "a machine that can start its workers", str(error))
            return self._membership.abort(Failure(reason=str(problem)))
        finally:
            self._connections.close()
        reason = f"{failure.reason}\nThe model was already saved and is kept; the run is not restarted"
        return Failure(reason=reason, restart=False)

    def _prepare(self, folder: FolderIdentity | None) -> Failure | None:
        """Checks connections and the folder in the background while this machine's heartbeats continue.

        The folder is checked last, while the other machines already wait for this machine's workers.
        """

        def check() -> list[Problem]:
            problems = self._connections.find_unreached(_CONNECT_SECONDS, _CONNECT_SECONDS)
            if folder is not None and not problems:
                wait_for(folder.require, folder.folder, "model_output_path")
            return problems

        background = Background()
        checked = background.submit(check)
        background.close()
        while not checked.done():
            failure = self._membership.poll()
            if failure is None and self._stop.number:
                failure = self._describe_preemption(
                    "stopped by a signal before training began; run the same command again"
                )
            if failure is not None:
                return failure
            time.sleep(_WATCH_SECONDS / 2)
        try:
            if problems := checked.result():
                raise RendezvousError(problems)
        except (LostError, UnavailableError) as error:
            return self._membership.abort(Failure(reason=str(error)))
        except RendezvousError as error:
            return self._membership.abort(Failure(reason=str(error), exit_code=error.exit_code, restart=False))
        return None

    def _start(self) -> None:
        shared = {**os.environ, **self._reports.variables, **_variables(self._membership, self._count)}
        for local in range(self._count):
            rank = self._membership.first_rank + local
            variables = shared | {"RANK": str(rank), "LOCAL_RANK": str(local)}
            output = None if rank == 0 else sys.stderr.fileno()  # only rank 0 keeps standard output
            self._running.append(subprocess.Popen(self._command, env=variables, stdout=output))

    def _watch(self) -> Failure | None:
        has_forwarded = False
        while True:
            self._membership.progress = self._reports.progress
            failure = self._membership.poll()
            if failure is not None:
                return failure
            if self._stop.number and not has_forwarded:
                has_forwarded = True
                for worker in self._running:
                    worker.send_signal(signal.SIGTERM)
            done = self._done  # before the check for failures: a worker that fails in between must not count as done
            failure = self._find_failure()
            if failure is not None:
                return self._agree_on(failure)
            if done:
                saved = any(worker.poll() == Preempted.exit_code for worker in self._running)
                return self._describe_preemption(f"stopped by a signal; {_CONTINUE}") if saved else None
            time.sleep(_WATCH_SECONDS)

    def _describe_preemption(self, reason: str) -> Failure:
        return self._membership.abort(Failure(reason=reason, exit_code=Preempted.exit_code, restart=False))

    def _agree_on(self, failure: Failure) -> Failure:
        """Returns the run's failure, the same on every machine.

        stopped by a signal    ─► no restart: the others would wait for this machine
        first-hand failure     ─► this one, unless another machine reported one before
        second-hand failure    ─► the one that another machine reports within lost_after; if there is none, this one,
        (a lost connection)       preceded by the machines that lost connections or the ranks that the others wait for
        Whether the run restarts is agreed on later, by `Membership.leave`.
        """
        if failure.restart and self._stop.number:
            reason = f"{failure.reason}\nstopped by a signal; {_CONTINUE}"
            failure = failure.model_copy(update={"reason": reason, "exit_code": Preempted.exit_code, "restart": False})
        if failure.first_hand:
            return self._membership.abort(failure)
        connecting = Background()
        connecting.submit(self._connections.try_again)
        connecting.close()
        if len(self._membership.declarations) > 1:
            first = poll(self._membership.poll, self._lost_after + _MACHINE_SECONDS, _WATCH_SECONDS)
            if first is not None:
                return first
        disconnected = "".join(f"{problem}\n" for problem in self._connections.find_disconnected())
        reason = (disconnected or self._membership.describe_awaited()) + failure.reason
        return self._membership.abort(failure.model_copy(update={"reason": reason}))

    @property
    def _done(self) -> bool:
        return all(worker.poll() is not None for worker in self._running)

    def _end(self) -> None:
        """Kills all workers; checkpoints are already on disk."""
        for worker in self._running:
            worker.kill()
        for worker in self._running:
            with suppress(subprocess.TimeoutExpired):  # blocked by a disk or driver that does not answer
                worker.wait(_END_SECONDS)

    def _find_failure(self) -> Failure | None:
        """Returns the first cause once a worker has failed; preemption is not a failure."""
        codes = [worker.poll() for worker in self._running]
        # a worker that has reported a failure may hang in a GPU library while it exits
        if self._reports.failures or any(code not in (None, 0, Preempted.exit_code) for code in codes):
            if Preempted.exit_code in codes:  # its peers lost their connection to it
                return self._describe_preemption(f"a process was stopped by a signal; {_CONTINUE}")
            return self._cause()
        return self._find_suspended()

    def _name(self, local: int) -> str:
        return self._membership.name_of(self._membership.first_rank + local)

    def _cause(self) -> Failure:
        """Returns the first cause of this machine's failure.

        a worker failed without a report   ─► it was killed, which made its peers fail
        all failed workers have reported   ─► the earliest report, once all are done or had time to report
        """
        deadline = time.monotonic() + _PEER_SECONDS  # peers notice the failure by themselves and report it
        while True:
            codes = [worker.poll() for worker in self._running]
            reports = self._reports.failures
            for local, code in enumerate(codes):
                if code not in (None, 0, Preempted.exit_code) and local not in reports:
                    return self._describe_kill(local)
            if self._done or time.monotonic() > deadline:
                break
            time.sleep(0.02)
        local, first = min(reports.items(), key=lambda item: float(item[1]["at"]))
        return Failure(
            reason=f"{self._name(local)}: {first['message']}",
            exit_code=first["exit_code"],
            restart=first["exit_code"] == PeerError.exit_code,
            first_hand=not first["peer"],
        )

    def _describe_kill(self, local: int) -> Failure:
        code = self._running[local].returncode
        how = f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"
        todo = ""
        if code == -signal.SIGKILL and oom_kills() > self._oom_kills:
            how += " by the system, because the memory limit of its control group was reached"
            todo = "Give the job more memory, or start fewer processes (num_processes_per_node)"
        problem = Problem(self._name(local), "a worker that trains to the end", f"ended by {how}", todo)
        return Failure(reason=str(problem))

    def _find_suspended(self) -> Failure | None:
        """Returns the failure of a worker that is suspended for too long while its peers wait for it."""
        now = time.monotonic()
        for local, worker in enumerate(self._running):
            if worker.poll() is not None or psutil.Process(worker.pid).status() not in _STOPPED:
                self._suspended_since.pop(local, None)
                continue
            seconds = now - self._suspended_since.setdefault(local, now)
            if seconds > self._lost_after:
                got = f"stopped (SIGSTOP or a debugger) for {seconds:.0f} s"
                return Failure(reason=str(Problem(self._name(local), "a running worker", got)))
        return None


def _variables(membership: Membership, count: int) -> dict[str, str]:
    """Returns torchrun's variables that all workers of this machine share."""
    record = membership.record
    variables = {
        "WORLD_SIZE": str(membership.world_size),
        "LOCAL_WORLD_SIZE": str(count),
        "GROUP_RANK": str(membership.node),
        "GROUP_WORLD_SIZE": str(len(membership.declarations)),
        "MASTER_ADDR": record.address,
        "MASTER_PORT": str(record.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # node 0's launcher has the store: no worker opens one
        ATTEMPT_VARIABLE: str(record.attempt),
    }
    address = membership.worker_address
    if address is not None and address.interface:
        for name in (GLOO_VARIABLE, "NCCL_SOCKET_IFNAME"):
            variables[name] = os.environ.get(name, address.interface)
    return variables
