"""Joint decisions of ranks between steps, without a collective at every step.

A check is an all-reduce of three numbers on the CPU: whether any rank wants to stop, whether rank 0's clock asks for a
checkpoint, and the number of steps until the next check. The last number comes from rank 0's measurements, so that all
ranks check at the same step.
"""

import time
from dataclasses import dataclass

import torch

from reagent_lite.distributed.group import Group

# Largest share of the run's time that checks are planned to take. gloo needs 0.6 to 1.7 ms on one machine (measured); a
# step may take 1 ms. Checks may take half as much again, as the cost of each is estimated from the previous one.
_SHARE = 0.003
_SECONDS = 1.0  # approximate time between checks, if the share allows it


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """Agreed decision; between checks everything is false."""

    stop: bool = False
    save: bool = False


class StepAgreement:
    """Lets all ranks decide whether to stop or to save, within about a second and at little cost.

    Args:
        group: the ranks.
        step: number of optimizer steps so far; the first check follows the next step.
    """

    def __init__(self, group: Group, step: int = 0) -> None:
        self._group = group
        self._last = step
        self._next = step + 1
        self._interval = 1
        self._since = time.perf_counter()

    def after_step(self, done: int, *, stop: bool, save: bool) -> Agreed:
        """Returns the agreed decision; every rank calls it after every step.

        Args:
            done: number of optimizer steps.
            stop: whether this process was asked to end.
            save: whether the clock asks for a checkpoint; only rank 0's clock counts.
        """
        if self._group.world_size == 1:  # a check costs nothing
            return Agreed(stop=stop, save=save)
        if done < self._next:
            return Agreed()
        start = time.perf_counter()
        step_seconds = (start - self._since) / max(done - self._last, 1)
        first = self._group.is_first
        votes = torch.tensor([stop, save and first, self._interval if first else 0], dtype=torch.int64)
        stops, saves, interval = self._group.all_reduce(votes).tolist()
        self._last = done
        self._next = done + interval
        self._since = time.perf_counter()
        self._interval = steps_between(step_seconds, self._since - start)
        return Agreed(stop=stops > 0, save=saves > 0)


def steps_between(step_seconds: float, check_seconds: float) -> int:
    """Returns the number of steps between checks: about a second, or more if checks would exceed their share."""
    cheap = check_seconds / (_SHARE * max(step_seconds, 1e-9))
    prompt = _SECONDS / max(step_seconds, 1e-9)
    return max(round(min(cheap, prompt)), 1)
