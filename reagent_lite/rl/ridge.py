"""Linear regression with an L2 penalty that is chosen by cross-validation.

    w = argmin sum v (y - x w)^2 + penalty |w|^2

Rows are divided into F folds. A fit without fold f uses the rows of all others, so that its errors on fold f are errors
on rows that it has not seen.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

PENALTIES: Final = tuple(float(penalty) for penalty in torch.logspace(-1, 5, 13, dtype=torch.float64))
MANY_COLUMNS: Final = 64
SPARSE: Final = 0.1
"""Largest share of values that are not zero at which more than MANY_COLUMNS columns count as sparse."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Regression:
    """Rows of one regression.

    Attributes:
        x: [n, D] float64.
        targets: [F + 1, n] float64; row f is the target of the fit without fold f, the last that of all rows.
        fold: [n] int64, from 0 to F - 1.
        free: number of leading columns without a penalty.
        row_weights: [F + 1, n] float64, the weights v of each fit; None: 1.
    """

    x: Tensor
    targets: Tensor
    fold: Tensor
    free: int = 0
    row_weights: Tensor | None = None

    def weights(self, penalties: Sequence[float]) -> Tensor:
        """Returns [P, F + 1, D] for P penalties: the fits without each fold, and of all rows."""
        solved = [_solve(matrix, vector, penalties, self.free) for matrix, vector in self._normal_equations()]
        return torch.stack(solved, 1)

    def _normal_equations(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the matrix [D, D] and the vector [D] of each fit."""
        if self.row_weights is not None:
            for f, (weight, target) in enumerate(zip(self.row_weights, self.targets, strict=True)):
                fitted = weight.masked_fill(self.fold == f, 0)
                yield _products(self.x * fitted.sqrt().unsqueeze(1)), self.x.T @ (fitted * target)
            return
        whole = _products(self.x)
        for f, target in enumerate(self.targets):
            yield whole - _products(self.x[self.fold == f]), self.x.T @ target.masked_fill(self.fold == f, 0)


def _products(x: Tensor) -> Tensor:
    """Returns the products of all pairs of columns, [D, D]; zeros cost nothing if most of x is zero, as levels are."""
    if x.shape[1] > MANY_COLUMNS and int(x.count_nonzero()) < SPARSE * x.numel():
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
