"""Auto-scaling: a size that is large enough, found by measuring.

doubling ─┬─► two doublings gain less than 3 %, or the limit ──────────┬─► smallest size within 3 % of the best rate
          └─► a probe fails ─► bisection between success and failure ──┘
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

GAIN = 1.03
"""A rate so many times another one is a gain; less is noise, or not worth a larger size."""
_BISECTED_TO = 8  # sizes that differ by this part of the smaller one are the same


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What was measured at one size.

    Attributes:
        size: what was tried.
        rate: environment steps per second; 0 where the probe failed.
        failure: why it failed, or "".
    """

    size: int
    rate: float
    failure: str = ""


def search(measure: Callable[[int], Probe], first: int, limit: int) -> list[Probe]:
    """Returns the probes made, in order.

    One doubling without a gain does not end the search: a rate may dip before more threads join in, and is noisy.

    Args:
        measure: tries a size; never raises for one that does not fit.
        first: smallest size.
        limit: largest size, at least `first`.
    """
    probes = [measure(first)]
    while not probes[-1].failure and probes[-1].size < limit and not _flat(probes):
        probes.append(measure(min(2 * probes[-1].size, limit)))
    if not probes[-1].failure or len(probes) == 1:
        return probes
    fits, fails = probes[-2].size, probes[-1].size
    while fails - fits > max(fits // _BISECTED_TO, 1):
        best = _best(probes)
        probes.append(measure((fits + fails) // 2))
        if probes[-1].failure:
            fails = probes[-1].size
        elif probes[-1].rate < GAIN * best:
            break
        else:
            fits = probes[-1].size
    return probes


def chosen(probes: Sequence[Probe]) -> Probe | None:
    """Returns the smallest size whose rate is within 3 % of the best, or None where all probes failed."""
    near = [probe for probe in probes if not probe.failure and probe.rate * GAIN >= _best(probes)]
    return min(near, key=lambda probe: probe.size, default=None)


def _flat(probes: Sequence[Probe]) -> bool:
    return len(probes) > 2 and _best(probes[-2:]) < GAIN * _best(probes[:-2])


def _best(probes: Sequence[Probe]) -> float:
    return max(probe.rate for probe in probes)
