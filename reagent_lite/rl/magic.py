"""MAGIC's blend: the least estimated squared error over the simplex. Thomas & Brunskill (2016)."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from reagent_lite.rl.bootstrap import percentile_interval
from reagent_lite.rl.sums import EpisodeSums, safe_divide

# A bias up to the interval's half width is not detected, so the interval is narrow. Measured on the gridworld: MAGIC's
# squared error, relative to that of the better of DM and WDR, is 0.93 (geometric mean of 90 cases) and 1.25 (worst
# case) at level 0.1, 0.92 and 1.28 at 0.3, and 1.27 and 2.6 at 0.9.
_INTERVAL_LEVEL = 0.1
_RIDGE = 1e-9
_MOST_LENGTHS = 32  # j-step returns that are blended, DM (j = -1) and WDR (all steps) among them
# 2 MB of 32 x 32 matrices: memory stays small, and intermediate results stay in the processor's cache.
_PROBLEMS_AT_ONCE = 256


def step_returns(first: Tensor, correction: Tensor) -> Tensor:
    """Returns g_j of each sample for m lengths j, [R, m]: the first is DM, mean(v_0) [R], the last is WDR.

    Each step adds its correction [R, H].
    """
    return _from(first, correction)[:, _lengths(correction.shape[1])]


def step_contributions(sums: EpisodeSums, outcome: int) -> Iterator[Tensor]:
    """Yields each episode's contribution to the g_j of row 0, [n_k, m] for each group; their sum over n is g_j.

    With c_i the count of episode i, x_t^i its correction and omega_t^i = c_i rho_t^i / sum_k c_k rho_t^k,

        g_j       = sum_i c_i v_0^i / sum_k c_k + sum_{t<j} m_t,    m_t = sum_i omega_t^i x_t^i
        dg_j/dc_i = (v_0^i - mean v_0) / n      + sum_{t<j} omega_t^i (x_t^i - m_t)               at c = 1
        yielded   =  v_0^i / n                  + sum_{t<j} [omega_t^i (x_t^i - m_t) + m_t / n] = dg_j/dc_i + g_j / n

    An episode that stands for s_i ones counts s_i c_i. Then v_0^i is s_i (v_0^i - mean v_0) + mean v_0; mean s_i is 1.
    After an episode ends, x_t^i is 0 but omega_t^i is not: each later step still adds m_t / n - omega_t^i m_t.
    """
    # measured: if m_t is not subtracted from x_t, MAGIC's squared error is up to 6 times as large
    n = sums.num_episodes
    weighted_corrections = sums.by_step("corrections", outcome)
    lengths = _lengths(len(sums.weights))
    total = torch.zeros_like(sums.weights)
    for group, weighted in zip(sums.groups, weighted_corrections, strict=True):
        length = weighted.shape[1]
        total[:length] += weighted.sum(0) * group.scale(sums.log_largest)[:length]
    means = safe_divide(total, sums.weights)
    start = means.new_zeros(1)
    shares = torch.cat((start, (means / n).cumsum(0)))
    values = sums.per_episode("first_value", outcome)
    values = (values - (sums.per_episode("episodes", outcome) - 1) * values.mean()) / n  # dg_j / dc_i + g_j / n
    first_values = torch.split(values, [len(group.sums) for group in sums.groups])
    for group, weighted, first_value in zip(sums.groups, weighted_corrections, first_values, strict=True):
        length = weighted.shape[1]
        omega_factor = safe_divide(group.scale(sums.log_largest), sums.weights)  # omega = group.weights * omega_factor
        within = _from(first_value, (weighted - group.weights * means[:length]) * omega_factor[:length])
        lengths_within = lengths.clamp(max=length)
        mean_after = torch.cat((start, (omega_factor * means).cumsum(0)))
        after = group.weights[:, -1:] * (mean_after[lengths] - mean_after[lengths_within])
        yield within[:, lengths_within] + shares[lengths] - after


def covariance(contributions: Iterable[Tensor], mean: Tensor) -> Tensor:
    """Returns Omega = n Cov of per-episode contributions, [m, m]; Thomas & Brunskill (2016).

    The contributions come in groups, [n_k, m] each, with their mean [m] over all groups.
    """
    n = 0
    scatter = mean.new_zeros(len(mean), len(mean))
    for part in contributions:
        centered = part - mean
        scatter += centered.T @ centered
        n += len(part)
    return n * scatter / max(n - 1, 1)


def blend_returns(returns: Tensor, sums: EpisodeSums, outcome: int) -> Tensor:
    """Returns the blend in each sample, [R], of its j-step returns [R, m]; row 0 is the log itself."""
    contributions = step_contributions(sums, outcome)
    if sums.unit is not None:
        of_episodes = torch.cat([*contributions])
        contributions = iter(
            [of_episodes.new_zeros(sums.num_units, returns.shape[1]).index_add_(0, sums.unit, of_episodes)]
        )
    return blend(returns, covariance(contributions, returns[0] / sums.num_units))


def blend(returns: Tensor, omega: Tensor) -> Tensor:
    """Returns x' g in each sample, [R], for j-step returns [R, m], the last of them WDR, and Omega [m, m].

    Row 0 is the sample itself, the others are its resamples.
    """
    bias = interval_distance(returns, _INTERVAL_LEVEL)
    shares = [_least_error(omega, block) for block in torch.split(bias, _PROBLEMS_AT_ONCE)]
    return (torch.cat(shares) * returns).sum(1)


def _least_error(omega: Tensor, bias: Tensor) -> Tensor:
    error = omega + bias.unsqueeze(2) * bias.unsqueeze(1)
    scale = error.diagonal(dim1=1, dim2=2).mean(1).clamp(min=torch.finfo(error.dtype).tiny)
    ridge = _RIDGE * torch.eye(len(omega), dtype=error.dtype)
    return minimize_on_simplex(error / scale.view(-1, 1, 1) + ridge)


def interval_distance(returns: Tensor, level: float) -> Tensor:
    """Returns b, [R, m]: distance of each return from the bootstrap interval of the last one, 0 inside.

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
    """Returns the optimum of each problem, [R, m], starting at x [R, m] on the simplex.

    All problems advance together until each is done. A step solves for the active components, and either adds the
    component that violates optimality most or moves back to the first bound.
    """
    optimum = x.clone()
    remaining = torch.arange(len(x))
    active = x > 0
    for _ in range(10 * matrix.shape[1] + 10):
        if not len(remaining):
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
        optimum[remaining] = x
        more = (grow | ~inside).squeeze(1)
        remaining = remaining[more]
        matrix = matrix[more]
        x = x[more]
        active = active[more]
    return optimum / optimum.sum(1, keepdim=True)


def _solve_active(matrix: Tensor, active: Tensor) -> Tensor:
    """Minimizes over the affine hull of the active components: A_SS y = 1, scaled to sum 1."""
    # the few active components first, so that small systems are solved
    order = active.byte().argsort(dim=1, descending=True, stable=True)[:, : int(active.sum(1).max())]
    chosen = active.gather(1, order)
    ordered = matrix[torch.arange(len(matrix)).view(-1, 1, 1), order.unsqueeze(2), order.unsqueeze(1)]
    identity = torch.eye(order.shape[1], dtype=matrix.dtype)
    both = chosen.unsqueeze(1) & chosen.unsqueeze(2)
    y = torch.linalg.solve(torch.where(both, ordered, identity), chosen.to(matrix.dtype))
    return torch.zeros_like(matrix[:, 0]).scatter_(1, order, y / y.sum(1, keepdim=True))


def _from(first: Tensor, steps: Tensor) -> Tensor:
    """Returns the running sums of steps [R, L], starting with a first value [R], as [R, L + 1]."""
    return torch.cat((first.unsqueeze(1), steps), 1).cumsum(1)


def _lengths(steps: int) -> Tensor:
    """Returns at most _MOST_LENGTHS evenly spaced lengths from 0 to all steps."""
    return torch.linspace(0, steps, min(_MOST_LENGTHS, steps + 1), dtype=torch.float64).round().long()
