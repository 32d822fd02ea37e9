"""The size that is large enough, found by measuring.

doubling ─┬─► two doublings gain less than 3 %, or the limit ──────────┬─► smallest size within 3 % of the best rate
          └─► a size fails ─► bisection between success and failure ───┘
"""

from collections.abc import Callable, Mapping
from typing import TypeVar

Size = TypeVar("Size", bound=int | tuple[int, ...])

GAIN = 1.03
"""A rate so many times another one is a gain; less is noise, or not worth a larger size."""
_BISECTED_TO = 8  # sizes that differ by this part of the smaller one are the same


def search(rate: Callable[[int], float], first: int, limit: int) -> dict[int, float]:
    """Returns the rate of each size that was tried, in order.

    One doubling without a gain does not end the search: a rate may dip before more threads join in, and is noisy.

    Args:
        rate: steps per second at a size; 0 where it does not run.
        first: smallest size.
        limit: largest size, at least `first`.
    """
    size, rates = first, {first: rate(first)}
    while rates[size] and size < limit and not _flat([*rates.values()]):
        size = min(2 * size, limit)
        rates[size] = rate(size)
    if rates[size] or size == first:
        return rates
    fits, fails = [*rates][-2:]
    while fails - fits > max(fits // _BISECTED_TO, 1):
        size, best = (fits + fails) // 2, max(rates.values())
        rates[size] = rate(size)
        if not rates[size]:
            fails = size
        elif rates[size] < GAIN * best:
            break
        else:
            fits = size
    return rates


def smallest(rates: Mapping[Size, float]) -> Size | None:
    """Returns the smallest size whose rate is within 3 % of the best, or None where none ran."""
    near = [size for size, rate in rates.items() if rate and rate * GAIN >= max(rates.values())]
    return min(near, default=None)


def _flat(rates: list[float]) -> bool:
    return len(rates) > 2 and max(rates[-2:]) < GAIN * max(rates[:-2])
