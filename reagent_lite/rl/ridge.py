"""Linear regression with an L2 penalty that is chosen by cross-validation.

    w = argmin sum (y - x w)^2 + penalty |w|^2

Rows are divided into F folds. A fit without fold f uses the rows of all others, so that its errors on fold f are errors
on rows that it has not seen.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

PENALTIES: Final = tuple(float(penalty) for penalty in torch.logspace(-1, 5, 13, dtype=torch.float64))


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

    def weights(self, penalties: Sequence[float]) -> Tensor:
        """Returns [P, F + 1, D] for P penalties: without each fold, and of all rows."""
        folds = len(self.targets) - 1
        products = torch.stack([self.x[self.fold == f].T @ self.x[self.fold == f] for f in range(folds)])
        whole = products.sum(0)
        fits = []
        for f, target in enumerate(self.targets):
            fitted = self.fold != f
            matrix = whole - products[f] if f < folds else whole
            vector = self.x[fitted].T @ target[fitted]
            fits.append(_solve(matrix, vector, penalties, self.free))
        return torch.stack(fits, 1)

    def errors(self, penalties: Sequence[float]) -> Tensor:
        """Returns the sum of squared errors on rows that a fit has not seen, [P] for P penalties."""
        weights = self.weights(penalties)
        total = torch.zeros(len(penalties), dtype=torch.float64)
        for f, target in enumerate(self.targets[:-1]):
            rows = self.fold == f
            total += (self.x[rows] @ weights[:, f].T - target[rows].unsqueeze(1)).square().sum(0)
        return total

    def unseen(self, weights: Tensor) -> Tensor:
        """Returns predictions [n] for weights [F + 1, D], each row's by the fit without its fold."""
        return (self.x * weights[self.fold]).sum(1)


def best_penalty(regressions: Iterable[Regression], penalties: Sequence[float] = PENALTIES) -> float:
    """Returns the penalty with the smallest sum of errors over regressions that share it."""
    total = torch.zeros(len(penalties), dtype=torch.float64)
    for regression in regressions:
        total += regression.errors(penalties)
    return penalties[int(total.argmin())]


def _solve(matrix: Tensor, vector: Tensor, penalties: Sequence[float], free: int) -> Tensor:
    """Returns [P, D]: the solutions for P penalties of the columns after the first `free`."""
    size = len(vector)
    # free columns have a penalty that only keeps the matrix regular, as without rows
    diagonal = torch.tensor(penalties, dtype=matrix.dtype).unsqueeze(1).repeat(1, size)
    diagonal[:, :free] = 1e-9
    return torch.linalg.solve(matrix + torch.diag_embed(diagonal), vector.expand(len(penalties), size))
