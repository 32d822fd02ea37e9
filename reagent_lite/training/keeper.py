"""What happens between two steps besides reports: ranks agree, compare, save, and end together when asked to."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from reagent_lite.config.checkpoint import CheckpointConfig
from reagent_lite.distributed.agreement import Agreement, patient
from reagent_lite.distributed.group import Group
from reagent_lite.errors import CheckpointError, Problem
from reagent_lite.training.checkpoint import Checkpoints
from reagent_lite.training.checksum import require_equal
from reagent_lite.training.loop import Position
from reagent_lite.training.stop import StopSignal


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds and steps of rendezvous.* that matter between steps.

    Attributes:
        step_seconds: how long ranks wait for each other in a step.
        work_seconds: the same while one of them may work alone.
        compare_steps: steps between two comparisons of the learner.
    """

    step_seconds: float
    work_seconds: float
    compare_steps: int


class Keeper:
    """Called on every rank after each step.

    Args:
        config: when to save.
        times: how long to wait, how often to compare.
        group: the ranks.
        checkpoints: where to save.
        learner: what must be the same on all ranks.
        position: of the loop.
        signal: asks the run to end.
        note: prints a line, once for all ranks.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        times: Times,
        *,
        group: Group,
        checkpoints: Checkpoints,
        learner: nn.Module,
        position: Position,
        signal: StopSignal,
        note: Callable[[str], None],
    ) -> None:
        self._times, self._group, self._checkpoints = times, group, checkpoints
        self._learner, self._position, self._signal, self._note = learner, position, signal, note
        self._every_steps = config.every_steps or 0
        self._every_seconds = float("inf") if config.every_minutes is None else 60 * config.every_minutes
        self._agreement = Agreement(group, position.step)
        self._saved_at = time.monotonic()
        self._tell()

    def __call__(self) -> None:
        """Saves and compares where it is time to.

        Raises:
            Preempted: some rank was asked to end; what can be saved is saved, and all ranks end here.
            PeerError: ranks hold different numbers.
        """
        done = self._position.step
        due = time.monotonic() - self._saved_at >= self._every_seconds
        agreed = self._agreement.after_step(done, stop=self._signal.wanted, save=due)
        if agreed.stop or agreed.save or (self._every_steps and done % self._every_steps == 0):
            failure = self._save()
            if failure:
                self._note(f"warning: no checkpoint at step {done:,}: {failure}; {self._signal.standing}")
        elif done % self._times.compare_steps == 0:
            require_equal(self._learner, self._group, done)
        if agreed.stop:
            raise self._signal.preempted()

    def at_end(self) -> None:
        """Saves what training leads to, before anything else may fail.

        Raises:
            CheckpointError: it cannot be saved.
        """
        failure = self._save()
        if failure:
            raise CheckpointError(
                Problem("checkpoint at the end of training", "room on a disk that works", failure,
                        f"Put that right and run the same command again; {self._signal.standing}")
            )  # fmt: skip

    def _save(self) -> str:
        with patient(self._group, self._times.work_seconds, then=self._times.step_seconds):
            require_equal(self._learner, self._group, self._position.step)
            failure = self._checkpoints.save()
        self._saved_at = time.monotonic()
        self._tell()
        return failure

    def _tell(self) -> None:
        if self._checkpoints.latest is not None:
            self._signal.standing = f"checkpoint {self._checkpoints.latest} stands; run the same command again to go on"
