"""Detects rows that share one draw of the action, from weights in the order of the file.

With right propensities w - 1 has expectation 0 given all that came before: products of w - 1 of a row and of an earlier
one have expectation 0 as well, whatever the logging policy learns meanwhile. If rows share a draw, they are positive:

* neighbours in the file: a switchback's hour, a user's rows one after another, a retry that is logged twice;
* a row and the last one before it with equal state features: an arm by hash of a user, rows of users in any order.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from reagent_lite.rl.likelihood import Contributions, intervals

_LEVEL = 0.9995  # of the interval of the mean product; on the upper side 1 of 4 000 honest logs lies outside it
_LEAST_PAIRS = 30
_LEAST_Z = 2.0  # normal deviate below which the likelihood, which is more cautious, is not asked


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
    weight: Tensor, episode: Tensor, unit: Tensor, context: Tensor | None, sorted_by: tuple[Tensor, ...]
) -> SharedDraws:
    """Returns which rows share draws of the action.

    Args:
        weight: [n] importance weights in the order of the file.
        episode: [n] code of each row's episode.
        unit: [n] code of what is drawn as one; that of the episode if the log does not name units.
        context: [n] code of equal state features; None if they are unknown.
        sorted_by: columns [n] by which a file may be sorted; neighbours are not compared if it is sorted by one.
    """
    pairs = []
    if not any(_is_sorted(column) for column in sorted_by):
        later = torch.arange(1, len(weight))
        pairs.append((later - 1, later))
    if context is not None:
        order = torch.argsort(context, stable=True)
        equal = context[order[1:]] == context[order[:-1]]
        pairs.append((order[:-1][equal], order[1:][equal]))
    between = within = False
    for earlier, later in pairs:
        product = (weight[earlier] - 1) * (weight[later] - 1)
        same_unit = unit[earlier] == unit[later]
        between = between or _is_positive(product[~same_unit])
        within = within or _is_positive(product[episode[earlier] == episode[later]])
    return SharedDraws(between=between, within=within)


def _is_sorted(column: Tensor) -> bool:
    """Returns whether a column is sorted and has several values, so that its neighbours are alike."""
    step = column[1:] - column[:-1]
    return bool((step >= 0).all() or (step <= 0).all()) and bool((step != 0).any())


def _is_positive(product: Tensor) -> bool:
    """Returns whether the mean of products is positive, by their likelihood: heavy products have no normal mean."""
    if len(product) < _LEAST_PAIRS or not float(product.sum()) > _LEAST_Z * float(product.square().sum()) ** 0.5:
        return False
    ones = torch.ones_like(product)
    largest = float(product.abs().max())
    products = Contributions(total=product, size=ones, weight=ones, outcome=product, bounds=(-largest, largest))
    ((low, _),) = intervals([(products, None)], _LEVEL)
    return low > 0
