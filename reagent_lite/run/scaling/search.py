"""Finds the smallest size that is nearly as fast as any larger one.

doubling ─┬─► two doublings gain less than 3 %, or the limit ──────────┬─► smallest size within 3 % of the best rate
          └─► a size fails ─► bisection between success and failure ───┘
"""

from collections.abc import Callable, Mapping
from typing import TypeVar

Size = TypeVar("Size", bound=int | tuple[int, ...])

GAIN = 1.03
"""The smallest ratio of two rates that counts as a gain; less is noise, or not worth a larger size."""
_BISECTED_TO = 8  # bisection ends when the sizes differ by less than an eighth of the smaller one


def search(rate: Callable[[int], float], first: int, limit: int) -> dict[int, float]:
    """Returns the measured rate of each size that was tried, in the order of the measurements.

    The search ends after two doublings without a gain: rates are noisy, and may drop before more threads are used.

    Args:
        rate: measures steps per second at a size; 0 if it does not run.
        first: smallest size.
        limit: largest size, at least `first`.
    """
    size = first
    rates = {first: rate(first)}
    while rates[size] and size < limit and not _flat([*rates.values()]):
        size = min(2 * size, limit)
        rates[size] = rate(size)
    if rates[size] or size == first:
        return rates
    fits, fails = [*rates][-2:]
    while fails - fits > max(fits // _BISECTED_TO, 1):
        size = (fits + fails) // 2
        best = max(rates.values())
        rates[size] = rate(size)
        if not rates[size]:
            fails = size
        elif rates[size] < GAIN * best:
            break
        else:
            fits = size
    return rates


def smallest(rates: Mapping[Size, float]) -> Size | None:
    """Returns the smallest size whose rate is within 3 % of the best, or None if no size ran."""
    near = [size for size, rate in rates.items() if rate and rate * GAIN >= max(rates.values())]
    return min(near, default=None)


def _flat(rates: list[float]) -> bool:
    return len(rates) > 2 and max(rates[-2:]) < GAIN * max(rates[:-2])
