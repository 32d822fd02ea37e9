"""Linear regression with an L2 penalty that is chosen by cross-validation.

    w = argmin sum v (y - x w)^2 + penalty |w|^2

Rows are divided into F folds. A fit without fold f uses the rows of all others, so that its errors on fold f are errors
on rows that it has not seen.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor

PENALTIES: Final = tuple(float(penalty) for penalty in torch.logspace(-1, 5, 13, dtype=torch.float64))
MANY_COLUMNS: Final = 64
SPARSE: Final = 0.1
"""Largest share of values that are not zero at which more than MANY_COLUMNS columns count as sparse."""
MOST_COLUMNS: Final = 2048
"""Most columns whose products are computed: 10 000 columns have 800 MB of them for each penalty and fold."""
_TOLERANCE = 1e-9
_MOST_ITERATIONS = 1_000
_REGULAR = 1e-9  # penalty of free columns, which only keeps the matrix regular, as without rows


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
        if self.x.shape[1] > MOST_COLUMNS:
            return self._iterate(penalties)
        solved = [_solve(matrix, vector, penalties, self.free) for matrix, vector in self._normal_equations()]
        return torch.stack(solved, 1)

    def _iterate(self, penalties: Sequence[float]) -> Tensor:
        """Returns `weights` by conjugate gradients, whose memory is that of x; zeros cost nothing."""
        x = self.x.to_sparse() if _is_sparse(self.x) else self.x
        transposed = x.t().coalesce() if x.is_sparse else x.T
        squares = (x * x).t()
        diagonal = _diagonal(penalties, x.shape[1], self.free)
        solved = []
        for f, target in enumerate(self.targets):
            row_weight = torch.ones_like(target) if self.row_weights is None else self.row_weights[f]
            row_weight = row_weight.masked_fill(self.fold == f, 0).unsqueeze(1)
            multiply = partial(_multiply, x, transposed, row_weight)
            vector = (transposed @ (row_weight * target.unsqueeze(1))).squeeze(1)
            solved.append(_conjugate_gradients(multiply, vector, diagonal, (squares @ row_weight).squeeze(1)))
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
    if _is_sparse(x):
        products: Tensor = torch.sparse.mm(x.to_sparse().t(), x)
        return products
    return x.T @ x


def _solve(matrix: Tensor, vector: Tensor, penalties: Sequence[float], free: int) -> Tensor:
    """Returns [P, D]: the solutions for P penalties of the columns after the first `free`."""
    size = len(vector)
    factor = torch.linalg.cholesky(matrix + torch.diag_embed(_diagonal(penalties, size, free)))
    return torch.cholesky_solve(vector.expand(len(penalties), size).unsqueeze(2), factor).squeeze(2)


def _is_sparse(x: Tensor) -> bool:
    return x.shape[1] > MANY_COLUMNS and int(x.count_nonzero()) < SPARSE * x.numel()


def _diagonal(penalties: Sequence[float], size: int, free: int) -> Tensor:
    """Returns the penalty of each column, [P, D]."""
    diagonal = torch.tensor(penalties, dtype=torch.float64).unsqueeze(1).repeat(1, size)
    diagonal[:, :free] = _REGULAR
    return diagonal


def _multiply(x: Tensor, transposed: Tensor, row_weight: Tensor, vectors: Tensor) -> Tensor:
    """Returns x^T v x times each of the vectors [P, D]."""
    return (transposed @ (row_weight * (x @ vectors.T))).T


def _conjugate_gradients(
    multiply: Callable[[Tensor], Tensor], vector: Tensor, diagonal: Tensor, squares: Tensor
) -> Tensor:
    """Solves (M + diag(d)) w = vector for each row d of `diagonal`, [P, D]; Hestenes and Stiefel (1952).

    Args:
        multiply: returns M times each of the vectors [P, D].
        vector: [D].
        diagonal: [P, D], above 0.
        squares: [D], the diagonal of M, by which the equations are scaled.
    """
    scale = diagonal + squares
    residual = vector.repeat(len(diagonal), 1)
    solution = torch.zeros_like(residual)
    direction = residual / scale
    size = (residual * direction).sum(1, keepdim=True)
    enough = _TOLERANCE**2 * size
    for _ in range(_MOST_ITERATIONS):
        if bool((size <= enough).all()):
            break
        moved = multiply(direction) + diagonal * direction
        step = torch.where(size > enough, size / (direction * moved).sum(1, keepdim=True), 0.0)
        solution += step * direction
        residual -= step * moved
        scaled = residual / scale
        following = (residual * scaled).sum(1, keepdim=True)
        direction = scaled + direction * (following / size)
        size = torch.where(size > enough, following, size)
    return solution
