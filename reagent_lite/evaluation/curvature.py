"""Terms that a linear function of features lacks: squares, products of two features, and steps at 19 quantiles.

The terms with the largest score statistics are kept (Rao 1948): of residuals r that a linear fit leaves, and a term z,

    sum_k (sum_n r_nk z_n)^2 / sum_n r_nk^2 z_n^2

is about chi-square with as many degrees of freedom as residuals have columns if the term is of no use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from reagent_lite.distributed.group import Group

_STEPS = torch.arange(1, 20, dtype=torch.float64) / 20
MOST_TERMS = 40
_MOST_PRODUCTS = 2**33  # for the statistics of all pairs
_MOST_SORTED = 2**16  # rows of a process whose quantiles are taken
_LEVEL = 0.95  # at which a term is of use


def quantiles(columns: Tensor, levels: Tensor, group: Group) -> Tensor:
    """Returns quantiles of columns [n, D] in a sample of all ranks' rows, [D, L]; every rank calls it."""
    stride = -(-len(columns) // _MOST_SORTED) or 1
    edges = torch.zeros(columns.shape[1], len(levels), dtype=torch.float64)
    sample = list(group.gather(columns[::stride].contiguous()))
    if sample and sum(map(len, sample)):
        ordered = torch.cat(sample).sort(0).values
        edges = ordered[(levels * (len(ordered) - 1)).long()].T.contiguous()
    return group.all_reduce(edges)


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Functions of features x: products x_i x_j, which are squares if i = j, and steps x_i > limit, standardized.

    Attributes:
        pairs: [P, 2] int64.
        steps: [Q] int64.
        limits: [Q] float64.
        mean, scale: [P + Q] float64.
    """

    pairs: Tensor
    steps: Tensor
    limits: Tensor
    mean: Tensor
    scale: Tensor

    def __len__(self) -> int:
        return len(self.mean)

    def of(self, x: Tensor) -> Tensor:
        """Returns the terms [..., P + Q] of features [..., S]."""
        return (self._raw(x) - self.mean) / self.scale

    def _raw(self, x: Tensor) -> Tensor:
        products = x[..., self.pairs[:, 0]] * x[..., self.pairs[:, 1]]
        return torch.cat((products, (x[..., self.steps] > self.limits).to(x.dtype)), -1)

    @classmethod
    def none(cls) -> Terms:
        """Returns no terms."""
        empty = torch.zeros(0, dtype=torch.float64)
        index = torch.zeros(0, dtype=torch.int64)
        return cls(pairs=index.view(0, 2), steps=index, limits=empty, mean=empty, scale=empty)

    @classmethod
    def best(cls, parts: Sequence[tuple[Tensor, Tensor]], shape: tuple[int, int], most: int, group: Group) -> Terms:
        """Returns the terms with the largest score statistics; every rank calls it.

        Args:
            parts: features [n, S] and residuals [n, K] of this rank's rows.
            shape: S and K.
            most: the largest number of terms.
            group: all ranks; each returns the same terms.
        """
        width, residuals = shape
        columns = torch.cat([x for x, _ in parts] or [torch.zeros(0, width, dtype=torch.float64)])
        edges = quantiles(columns, _STEPS, group)
        slope, information = group.all_reduce(_statistics(parts, edges, residuals))
        useful = information > 0
        score = (slope.square() / torch.where(useful, information, 1.0)).sum(1)
        kept = torch.argsort(score, descending=True, stable=True)[:most]
        kept = kept[score[kept] > _chi_square(_LEVEL, residuals)]
        products = kept[kept < width**2]
        steps = kept[kept >= width**2] - width**2
        terms = cls(
            pairs=torch.stack((products // width, products % width), 1),
            steps=steps // len(_STEPS),
            limits=edges.flatten()[steps],
            mean=torch.zeros(len(kept), dtype=torch.float64),
            scale=torch.ones(len(kept), dtype=torch.float64),
        )
        return terms._standardize([x for x, _ in parts], group)

    def _standardize(self, parts: Sequence[Tensor], group: Group) -> Terms:
        sums = torch.zeros(2, len(self), dtype=torch.float64)
        count = torch.zeros(1, dtype=torch.float64)
        for x in parts:
            raw = self._raw(x)
            sums += torch.stack((raw.sum(0), raw.square().sum(0)))
            count += len(raw)
        mean, square = group.all_reduce(sums) / group.all_reduce(count).clamp(min=1)
        scale = (square - mean.square()).clamp(min=0).sqrt()
        return Terms(
            pairs=self.pairs,
            steps=self.steps,
            limits=self.limits,
            mean=mean,
            scale=torch.where(scale > 0, scale, 1.0),
        )


def _statistics(parts: Sequence[tuple[Tensor, Tensor]], edges: Tensor, residuals: int) -> Tensor:
    """Returns sums over rows of r z and of r^2 z^2, [2, S^2 + 19 S, K], for products i <= j and steps z."""
    width = len(edges)
    sums = torch.zeros(2, width**2 + edges.numel(), residuals, dtype=torch.float64)
    rows = max(_MOST_PRODUCTS // (max(width, 1) ** 2 * residuals), 1)
    upper = torch.triu(torch.ones(width, width, dtype=torch.float64))
    for x, residual in parts:
        first = x[:rows]
        for k in range(residuals):
            for power in (1, 2):
                factor = first**power
                products = factor.T @ (factor * residual[: len(first), k : k + 1] ** power)
                sums[power - 1, : width**2, k] += (products * upper).flatten()
        step = (x.unsqueeze(2) > edges).flatten(1).to(x.dtype)
        sums[:, width**2 :] += torch.stack((step.T @ residual, step.T @ residual.square()))
        rows -= len(first)
        if rows <= 0:
            break
    return sums


def _chi_square(level: float, freedom: int) -> float:
    """Returns a quantile of the chi-square distribution, by Wilson and Hilferty (1931)."""
    variance = 2 / (9 * freedom)
    return float(freedom * (1 - variance + NormalDist().inv_cdf(level) * variance**0.5) ** 3)
