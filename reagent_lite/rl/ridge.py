"""Linear regression with an L2 penalty that is chosen by cross-validation.

    w = argmin sum (y - x w)^2 + penalty |w|^2

Rows are divided into F folds. A fit without fold f uses the rows of all others, so that its errors on fold f are errors
on rows that it has not seen.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

PENALTIES: Final = tuple(float(penalty) for penalty in torch.logspace(-1, 5, 13, dtype=torch.float64))
_MANY_COLUMNS = 256
_SPARSE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Regression:
    """Rows of one regression.

    Attributes:
        x: [n, D] float64.
        targets: [F + 1, n] float64; row f is the target of the fit without fold f, the last that of all rows.
        fold: [n] int64, from 0 to F - 1.
        free: number of leading columns without a penalty.
    """

    x: Tensor
    targets: Tensor
    fold: Tensor
    free: int = 0

    def weights(self, penalty: float) -> Tensor:
        """Returns [F + 1, D]: the fits without each fold, and of all rows."""
        return torch.stack([weights for (weights,) in self._fits([penalty], len(self.targets))])

    def errors(self, penalties: Sequence[float]) -> Tensor:
        """Returns the sum of squared errors on rows that a fit has not seen, [P] for P penalties."""
        total = torch.zeros(len(penalties), dtype=torch.float64)
        for f, weights in enumerate(self._fits(penalties, len(self.targets) - 1)):
            rows = self.fold == f
            total += (self.x[rows] @ weights.T - self.targets[f, rows].unsqueeze(1)).square().sum(0)
        return total

    def _fits(self, penalties: Sequence[float], count: int) -> Iterator[Tensor]:
        """Yields [P, D] of the first `count` fits."""
        whole = _products(self.x)
        for f, target in enumerate(self.targets[:count]):
            left_out = self.x[self.fold == f]
            fitted = self.fold != f
            matrix = whole - _products(left_out)
            yield _solve(matrix, self.x[fitted].T @ target[fitted], penalties, self.free)

    def unseen(self, weights: Tensor) -> Tensor:
        """Returns predictions [n] for weights [F + 1, D], each row's by the fit without its fold."""
        return (self.x * weights[self.fold]).sum(1)


def best_penalty(regressions: Iterable[Regression]) -> float:
    """Returns the penalty with the smallest sum of errors over regressions of equally many columns that share it."""
    total = torch.zeros(len(PENALTIES), dtype=torch.float64)
    for regression in regressions:
        total += regression.errors(PENALTIES)
    return PENALTIES[int(total.argmin())]


def _products(x: Tensor) -> Tensor:
    """Returns the products of all pairs of columns, [D, D]; zeros cost nothing if most of x is zero, as levels are."""
    if x.shape[1] > _MANY_COLUMNS and int(x.count_nonzero()) < _SPARSE * x.numel():
        products: Tensor = torch.sparse.mm(x.to_sparse().t(), x)
        return products
    return x.T @ x


def _solve(matrix: Tensor, vector: Tensor, penalties: Sequence[float], free: int) -> Tensor:
    """Returns [P, D]: the solutions for P penalties of the columns after the first `free`."""
    size = len(vector)
    # free columns have a penalty that only keeps the matrix regular, as without rows
    diagonal = torch.tensor(penalties, dtype=matrix.dtype).unsqueeze(1).repeat(1, size)
    diagonal[:, :free] = 1e-9
    factor = torch.linalg.cholesky(matrix + torch.diag_embed(diagonal))
    return torch.cholesky_solve(vector.expand(len(penalties), size).unsqueeze(2), factor).squeeze(2)
