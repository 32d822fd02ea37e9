"""The blend of MAGIC: least estimated squared error over the simplex. Thomas & Brunskill (2016)."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from reagent_lite.rl.bootstrap import percentile_interval
from reagent_lite.rl.sums import Log, safe_divide

# A bias up to the interval's half width goes unseen, so the interval is narrow. Measured on the gridworld, squared
# error over that of the better of DM and WDR, geometric mean of 90 cases and the worst of them: 0.93 and 1.25 with
# level 0.1, 0.92 and 1.28 with 0.3, 1.27 and 2.6 with 0.9.
_INTERVAL_LEVEL = 0.1
_RIDGE = 1e-9
_MOST_LENGTHS = 32  # j-step returns that are blended, DM (j = -1) and WDR (all steps) among them
# 2 MB of 32 x 32 matrices: memory stays small, and what is computed of them in the processor's cache.
_PROBLEMS_AT_ONCE = 256


def step_returns(first: Tensor, correction: Tensor) -> Tensor:
    """Returns g_j of each sample for m lengths j, [R, m]: the first is DM, mean(v_0) [R], the last is WDR.

    Each step adds its correction [R, H].
    """
    return _from(first, correction)[:, _lengths(correction.shape[1])]


def step_contributions(log: Log, outcome: int) -> Iterator[Tensor]:
    """Yields what each episode adds to the g_j of row 0, [n_k, m] for each group; their sum over n is g_j.

    To first order, as the weights of all episodes depend on each: omega_t (x_t - x) + x / n summed over t, where x_t,
    the `corrections`, is 0 after the end, omega_t is not, and x = sum_i omega_t x_t.
    """
    # omega x alone makes MAGIC's squared error up to 6 times as large: a weight too many is no error where x_t = x
    n = log.num_episodes
    steps = log.by_step("corrections", outcome)
    lengths = _lengths(len(log.weights))
    total = torch.zeros_like(log.weights)
    for group, values in zip(log.groups, steps, strict=True):
        total[: values.shape[1]] += values.sum(0) * group.scale(log.log_largest)[: values.shape[1]]
    means = safe_divide(total, log.weights)
    start = means.new_zeros(1)
    shares = torch.cat((start, (means / n).cumsum(0)))
    firsts = torch.split(log.per_episode("first_value", outcome) / n, [len(group.sums) for group in log.groups])
    for group, values, own_first in zip(log.groups, steps, firsts, strict=True):
        length = values.shape[1]
        relative = group.weights
        inside = lengths.clamp(max=length)
        factor = safe_divide(group.scale(log.log_largest), log.weights)
        own = _from(own_first, (values - relative * means[:length]) * factor[:length])[:, inside]
        after = torch.cat((start, (factor * means).cumsum(0)))
        yield own + shares[lengths] - relative[:, -1:] * (after[lengths] - after[inside])


def covariance(contributions: Iterable[Tensor], mean: Tensor) -> Tensor:
    """Returns Omega = n Cov of per-episode contributions, [m, m]; Thomas & Brunskill (2016).

    The contributions come in groups, [n_k, m] each, with their mean [m] over all groups.
    """
    n = 0
    scatter = mean.new_zeros(len(mean), len(mean))
    for part in contributions:
        centred = part - mean
        scatter += centred.T @ centred
        n += len(part)
    return n * scatter / max(n - 1, 1)


def blended(returns: Tensor, log: Log, outcome: int) -> Tensor:
    """Returns the blend in each sample, [R], of its j-step returns [R, m]; row 0 is the log itself."""
    return blend(returns, covariance(step_contributions(log, outcome), returns[0] / log.num_episodes))


def blend(returns: Tensor, omega: Tensor) -> Tensor:
    """Returns x' g in each sample, [R], for j-step returns [R, m], the last of them WDR, and Omega [m, m].

    Row 0 is the sample itself, the others are its resamples.
    """
    bias = interval_distance(returns, _INTERVAL_LEVEL)
    shares = [_least_error(omega, some) for some in torch.split(bias, _PROBLEMS_AT_ONCE)]
    return (torch.cat(shares) * returns).sum(1)


def _least_error(omega: Tensor, bias: Tensor) -> Tensor:
    error = omega + bias.unsqueeze(2) * bias.unsqueeze(1)
    scale = error.diagonal(dim1=1, dim2=2).mean(1).clamp(min=torch.finfo(error.dtype).tiny)
    ridge = _RIDGE * torch.eye(len(omega), dtype=error.dtype)
    return minimize_on_simplex(error / scale.view(-1, 1, 1) + ridge)


def interval_distance(returns: Tensor, level: float) -> Tensor:
    """Returns b, [R, m]: how far each return lies outside the bootstrap interval of the last one.

    The interval is taken once from rows 1 onwards, stretched to contain row 0's value, and shifted to each row's.
    """
    full = returns[:, -1]
    low, high = percentile_interval(full[1:], level) if len(full) > 1 else (float(full[0]), float(full[0]))
    below = (full[0] - low).clamp(min=0).nan_to_num(0)
    above = (high - full[0]).clamp(min=0).nan_to_num(0)
    difference = returns - full.unsqueeze(1)
    return (difference - above).clamp(min=0) + (-difference - below).clamp(min=0)


def minimize_on_simplex(matrix: Tensor) -> Tensor:
    """Returns argmin of x' A x over x >= 0, sum x = 1, [R, m], for positive definite A [R, m, m].

    Wolfe (1976), Finding the nearest point in a polytope: an active set that ends at the exact optimum after finitely
    many steps. The first problem is solved alone and all others start from its solution: resamples are alike.
    """
    start = matrix[:1].diagonal(dim1=1, dim2=2).argmin(1, keepdim=True)
    x = _descend(matrix[:1], matrix.new_zeros(1, matrix.shape[1]).scatter_(1, start, 1.0))
    return torch.cat((x, _descend(matrix[1:], x.expand(len(matrix) - 1, -1))))


def _descend(matrix: Tensor, x: Tensor) -> Tensor:
    """Returns the optimum of each problem, [R, m], from a point x [R, m] of the simplex.

    All problems advance together until each is done. A step solves for the current set, and either adds the choice that
    violates optimality most or walks back to the first bound.
    """
    found = x.clone()
    left = torch.arange(len(x))
    active = x > 0
    for _ in range(10 * matrix.shape[1] + 10):
        if not len(left):
            break
        y = _solve_active(matrix, active)
        blocked = active & (y < 0)
        inside = ~blocked.any(1, keepdim=True)
        ratio = torch.where(blocked, x / (x - y), torch.inf)
        step = ratio.amin(1, keepdim=True).clamp(max=1)
        x = torch.where(inside, y, x + step * (y - x))
        active = active & (inside | ~(blocked & (ratio <= step)))
        x = torch.where(active, x, 0)
        gradient = (matrix @ x.unsqueeze(2)).squeeze(2)
        violation = torch.where(active, 0, (x * gradient).sum(1, keepdim=True) - gradient)
        worst = violation.amax(1, keepdim=True)
        grow = inside & (worst > 1e-10 * gradient.abs().amax(1, keepdim=True))
        newest = violation.argmax(1, keepdim=True)
        active = active.scatter(1, newest, grow | active.gather(1, newest))
        found[left] = x
        more = (grow | ~inside).squeeze(1)
        left = left[more]
        matrix = matrix[more]
        x = x[more]
        active = active[more]
    return found / found.sum(1, keepdim=True)


def _solve_active(matrix: Tensor, active: Tensor) -> Tensor:
    """Minimizes over the affine hull of the active choices: A_SS y = 1, scaled to sum 1."""
    # the active choices first: few of many, so that small systems are solved
    order = active.byte().argsort(dim=1, descending=True, stable=True)[:, : int(active.sum(1).max())]
    chosen = active.gather(1, order)
    own = matrix[torch.arange(len(matrix)).view(-1, 1, 1), order.unsqueeze(2), order.unsqueeze(1)]
    identity = torch.eye(order.shape[1], dtype=matrix.dtype)
    both = chosen.unsqueeze(1) & chosen.unsqueeze(2)
    y = torch.linalg.solve(torch.where(both, own, identity), chosen.to(matrix.dtype))
    return torch.zeros_like(matrix[:, 0]).scatter_(1, order, y / y.sum(1, keepdim=True))


def _from(first: Tensor, steps: Tensor) -> Tensor:
    """Returns the running sums of steps [R, L] from a first value [R] on, [R, L + 1]."""
    return torch.cat((first.unsqueeze(1), steps), 1).cumsum(1)


def _lengths(steps: int) -> Tensor:
    """Returns at most _MOST_LENGTHS lengths from 0 to all steps, evenly."""
    return torch.linspace(0, steps, min(_MOST_LENGTHS, steps + 1), dtype=torch.float64).round().long()
