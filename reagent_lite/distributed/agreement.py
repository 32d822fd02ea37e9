"""What ranks agree on between two steps, without a collective at each of them.

A check is one all-reduce of three numbers on the CPU: does any rank want to stop, does rank 0's clock want a
checkpoint, and in how many steps is the next check. The last comes from rank 0's measurements, so that all ranks check
at the same step.
"""

import time
from dataclasses import dataclass

import torch

from reagent_lite.distributed.group import Group

# Share of the time that checks are planned to take. Measured: gloo needs 0.6 to 1.7 ms on one machine, a step may take
# 1 ms. They take up to half as much again, as the cost of one is estimated from that of the one before.
_SHARE = 0.003
_SECONDS = 1.0  # between two checks, roughly, where the share allows less


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """What all ranks know after a check; between checks everything is false."""

    stop: bool = False
    save: bool = False


_NOTHING = Agreed()


class Agreement:
    """Decides with all ranks whether to stop or to save, promptly and at almost no cost.

    Args:
        group: the ranks.
        step: optimizer steps done so far; the first check follows the next one.
    """

    def __init__(self, group: Group, step: int = 0) -> None:
        self._group = group
        self._last = step
        self._next = step + 1
        self._interval = 1
        self._since = time.perf_counter()

    def after_step(self, done: int, *, stop: bool, save: bool) -> Agreed:
        """Returns what was agreed on after so many steps; every rank calls it after every step.

        Args:
            done: optimizer steps.
            stop: whether this process was asked to end.
            save: whether rank 0's clock asks for a checkpoint; other ranks' clocks do not count.
        """
        if self._group.world_size == 1:  # a check costs nothing
            return Agreed(stop=stop, save=save) if stop or save else _NOTHING
        if done < self._next:
            return _NOTHING
        start = time.perf_counter()
        step_seconds = (start - self._since) / max(done - self._last, 1)
        first = self._group.is_first
        votes = torch.tensor([stop, save and first, self._interval if first else 0], dtype=torch.int64)
        stops, saves, interval = self._group.sum(votes).tolist()
        self._last = done
        self._next = done + interval
        self._since = time.perf_counter()
        self._interval = steps_between(step_seconds, self._since - start)
        return Agreed(stop=stops > 0, save=saves > 0)


def steps_between(step_seconds: float, check_seconds: float) -> int:
    """Returns the steps from one check to the next: few enough for a second, many enough for the checks' share."""
    cheap = check_seconds / (_SHARE * max(step_seconds, 1e-9))
    prompt = _SECONDS / max(step_seconds, 1e-9)
    return max(round(min(cheap, prompt)), 1)
