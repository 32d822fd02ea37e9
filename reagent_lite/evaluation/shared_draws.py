"""Detects rows that share one draw of the action, from weights and actions in the order of the file.

With right propensities w - 1 has expectation 0 given all that came before, for any policy whose choice in a row depends
on nothing later: for the evaluated policy, whose w - 1 may be multiplied by that of an earlier row, and for the policy
that repeats the action of an earlier row, for which w - 1 is [a = a'] / p - 1. That holds whatever the logging policy
learns meanwhile. If rows share a draw of the action, both are positive in the mean; the second also if the evaluated
policy follows features that differ within a draw, the first also if rows share the draw of a policy:

* neighbors in the file: a switchback's hour, a user's rows one after another, a retry that is logged twice;
* a row and the last one before it with equal state features: an arm by hash of a user, rows of users in any order.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from reagent_lite.rl.likelihood import Contributions, intervals

_LEVEL = 0.9995  # of the interval of a mean; on the upper side 1 of 4 000 honest logs lies outside it
_LEAST_PAIRS = 30
_FIRST_ROWS = 1_000  # nearly always enough to see that a column is not sorted
_LEAST_Z = 2.0  # normal deviate below which the likelihood, which is more cautious, is not asked


Repeats = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedDraws:
    """Whether rows share draws of the action.

    Attributes:
        between: rows of different units do.
        within: rows of one episode do.
    """

    between: bool = False
    within: bool = False


def shared_draws(
    excess: Tensor,
    episode: Tensor,
    unit: Tensor,
    context: Tensor | None,
    *,
    repeats: Repeats | None = None,
    is_sorted: bool = False,
) -> SharedDraws:
    """Returns which rows share draws of the action.

    Args:
        excess: [n] importance weights minus 1, in the order of the file.
        episode: [n] code of each row's episode.
        unit: [n] code of the unit that is drawn as one; that of the episode if the log does not name units.
        context: [n] code of equal state features; None if they are unknown.
        repeats: returns w - 1 of the policy that repeats an action, given the numbers of the rows with that action
            and those of later rows, [m] each; None if propensities are unknown.
        is_sorted: whether the file is sorted by a column that depends on the action; its order then says nothing.
    """
    if is_sorted:
        return SharedDraws()
    later = torch.arange(1, len(excess))
    pairs = [(later - 1, later)]
    if context is not None and _has_equal(context):
        order = torch.argsort(context, stable=True)
        equal = context[order[1:]] == context[order[:-1]]
        pairs.append((order[:-1][equal], order[1:][equal]))
    between = within = False
    for earlier, later in pairs:
        differences = [excess[earlier] * excess[later]]
        if repeats is not None:
            differences.append(repeats(earlier, later))
        other_unit = unit[earlier] != unit[later]
        same_episode = episode[earlier] == episode[later]
        between = between or any(_is_positive(difference[other_unit]) for difference in differences)
        within = within or any(_is_positive(difference[same_episode]) for difference in differences)
    return SharedDraws(between=between, within=within)


def is_sorted(column: Tensor, index: Tensor) -> bool:
    """Returns whether a column [N] has several values and is sorted, so that neighbors are alike.

    Args:
        column: the column.
        index: [n] numbers of rows in the order of the file.
    """

    def are_ordered(rows: Tensor) -> bool:
        step = column[rows[1:]] - column[rows[:-1]]
        return bool((step >= 0).all() or (step <= 0).all())

    return are_ordered(index[:_FIRST_ROWS]) and are_ordered(index) and bool((column != column[0]).any())


def _has_equal(codes: Tensor) -> bool:
    ascending = np.sort(codes.numpy())
    return bool((ascending[1:] == ascending[:-1]).any())


def _is_positive(product: Tensor) -> bool:
    """Returns whether a mean is positive, by its likelihood: means of heavy products are not normal."""
    if len(product) < _LEAST_PAIRS or not float(product.sum()) > _LEAST_Z * float(product.square().sum()) ** 0.5:
        return False
    ones = torch.ones_like(product)
    largest = float(product.abs().max())
    products = Contributions(total=product, size=ones, weight=ones, outcome=product, bounds=(-largest, largest))
    ((low, _),) = intervals([(products, None)], _LEVEL)
    return low > 0
