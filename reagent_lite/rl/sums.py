"""Sums over the episodes of a sample: all that estimators need of it.

Episodes [n_k, L_k], k = 1 ... ─► Additions [n_k, C] each ─► counts [R, n] @ columns, block after block ─► Sums [R]

What an episode adds to each sum is computed once; the sums of a block of samples are one matrix product per k. Groups
of episodes of about the same length hardly hold padding. Notation as in rl.estimators.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from reagent_lite.rl.episodes import Episodes
from reagent_lite.rl.magic import covariance
from reagent_lite.rl.weights import finite_or_zero, log_cumulative_weights, relative_weights, safe_divide

_NUMBERS_AT_ONCE = 2**19  # sums by step of the samples that are worked on together: 4 MB, held a few times


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Numbers inside estimators.

    Attributes:
        switch_threshold: tau of switch DR.
        shrinkage: lambda of DRos; 0 gives DM, infinity DR.
        max_lengths: j-step returns that MAGIC blends, DM (j = -1) and WDR (all steps) among them.
    """

    switch_threshold: float = 10.0
    shrinkage: float = 100.0
    max_lengths: int = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """Sums over the episodes i of each of R samples, and over their rows t; [R] float64 unless said otherwise.

    Attributes:
        episodes: of 1.
        rows: of the number of rows.
        weight: of w_t.
        reward: of r_t.
        reward_expected: of sum_a pi(a) r_hat(a).
        weighted_reward: of w_t r_t.
        residual: of w_t (r_t - r_hat_t).
        switched_residual: of w_t (r_t - r_hat_t) [w_t <= tau].
        shrunk_residual: of s_t (r_t - r_hat_t), s = lambda w / (w^2 + lambda).
        discounted_reward: of D_t r_t.
        first_value: of v_0.
        tail: of D_{t+1} v_{t+1} at the last rows of episodes that were cut.
        per_decision: of D_t rho_t r_t.
        doubly_robust: of D_t [rho_t (r_t - q_t) + rho_{t-1} v_t], and of rho_t D_{t+1} v_{t+1} where the record is cut.
        weighted_per_decision: of omega_t D_t r_t.
        step_returns: [R, m] j-step returns g_j of m lengths, the first DM and the last WDR.
        first_weight: of w_0, up to a factor.
        omega: [m, m] n times the covariance of what episodes add to the g_j of row 0.
    """

    episodes: Tensor
    rows: Tensor
    weight: Tensor
    reward: Tensor
    reward_expected: Tensor
    weighted_reward: Tensor
    residual: Tensor
    switched_residual: Tensor
    shrunk_residual: Tensor
    discounted_reward: Tensor
    first_value: Tensor
    tail: Tensor
    per_decision: Tensor
    doubly_robust: Tensor
    weighted_per_decision: Tensor
    step_returns: Tensor
    first_weight: Tensor
    omega: Tensor


_SHARED = ("episodes", "rows", "weight")
_OWN = (
    "reward", "reward_expected", "weighted_reward", "residual", "switched_residual", "shrunk_residual",
    "discounted_reward", "first_value", "tail", "per_decision", "doubly_robust",
)  # fmt: skip
_BY_STEP = ("weighted_per_decision", "first_weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class Additions:
    """What each of n episodes of at most L steps adds to every sum, for T outcomes.

    Attributes:
        columns: [n, C] float64: _SHARED, then _OWN of each outcome, then steps.
        steps: [n, 1 + 2 T, L], a view of the last columns: rho_t divided by the largest of these episodes, and that
            times D_t r_t and times D_t (r_t - q_t) + D_{t+1} v_{t+1} of each outcome; v_{t+1} is 0 after a true end.
        log_largest: [L] log of that largest rho_t; rho and it are held constant after L.
        discount: [L] sum of D_t over these episodes.
    """

    columns: Tensor
    steps: Tensor
    log_largest: Tensor
    discount: Tensor

    def scale(self, log_reference: Tensor) -> Tensor:
        """Returns the largest rho_t of these episodes over a reference, [H] for [H], at all steps of longer ones."""
        return (_held(self.log_largest, len(log_reference)) - finite_or_zero(log_reference)).exp()


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """What every episode of a log adds.

    Attributes:
        parts: groups of episodes, in the order of the columns of counts.
        log_largest: [H] log of the largest rho_t of any episode; H the steps of the longest.
        weights: [H] sum of rho_t over all episodes, divided by the largest.
    """

    parts: tuple[Additions, ...]
    log_largest: Tensor
    weights: Tensor

    @property
    def num_episodes(self) -> int:
        """In all groups."""
        return sum(len(part.columns) for part in self.parts)

    @property
    def num_outcomes(self) -> int:
        """T."""
        return (self.parts[0].steps.shape[1] - 1) // 2


def table_of(groups: Iterable[Sequence[Episodes]], settings: Settings | None = None) -> Table:
    """Returns what episodes add, read group by group: for each group its episodes with every outcome in turn.

    A group's tables differ in rewards and models only. Groups cost least where their episodes are about as long.
    """
    parts = tuple(additions(tables, settings or Settings()) for tables in groups)
    steps = max(len(part.log_largest) for part in parts)
    log_largest = torch.stack([_held(part.log_largest, steps) for part in parts]).amax(0)
    weights = torch.stack([_held(part.steps[:, 0].sum(0), steps) * part.scale(log_largest) for part in parts]).sum(0)
    return Table(parts=parts, log_largest=log_largest, weights=weights)


def additions(tables: Sequence[Episodes], settings: Settings) -> Additions:
    """Returns what episodes add, for tables of the same episodes, one per outcome."""
    e = tables[0]
    log_rho = log_cumulative_weights(e.weight)
    log_largest = log_rho.amax(0)
    relative = relative_weights(log_rho, log_largest)
    rho = log_rho.clamp_(max=600).exp_()  # so that sums stay finite
    shared = (torch.ones_like(rho[:, 0]), e.running.sum(1), (e.weight * e.running).sum(1))
    own = [column for table in tables for column in _own(table, rho, settings)]
    by_step = [values for table in tables for values in _by_step(table, relative)]
    columns = torch.cat((torch.stack((*shared, *own), 1), relative, *by_step), 1)
    steps = torch.unflatten(columns[:, len(shared) + len(own) :], 1, (-1, len(log_largest)))
    return Additions(columns=columns, steps=steps, log_largest=log_largest, discount=e.discount.sum(0))


def _own(e: Episodes, rho: Tensor, settings: Settings) -> tuple[Tensor, ...]:
    """Returns the columns _OWN, [n] each."""
    w, difference = e.weight, e.reward - e.reward_taken
    switched = torch.where(w <= settings.switch_threshold, w, 0)
    shrunk = settings.shrinkage * w / (w.square() + settings.shrinkage)
    previous = torch.cat((torch.ones_like(rho[:, :1]), rho[:, :-1]), 1)
    doubly_robust = e.discount * (rho * (e.reward - e.value_taken) + previous * e.value_expected) + rho * e.tail
    by_row = (
        e.reward, e.reward_expected, w * e.reward, w * difference, switched * difference, shrunk * difference,
        e.discount * e.reward, e.value_expected[:, :1], e.tail, e.discount * rho * e.reward,
        doubly_robust,
    )  # fmt: skip
    return tuple(values.sum(1) for values in by_row)


def _by_step(e: Episodes, relative: Tensor) -> tuple[Tensor, Tensor]:
    values = e.discount * e.value_expected
    following = torch.cat((values[:, 1:], torch.zeros_like(values[:, :1])), 1) + e.tail
    return relative * e.discount * e.reward, relative * (e.discount * (e.reward - e.value_taken) + following)


def sample_sums(table: Table, blocks: Iterable[Tensor], settings: Settings | None = None) -> tuple[Sums, ...]:
    """Returns the sums of each outcome in every sample.

    Of a block so many samples are worked on together that memory does not grow with steps or outcomes.

    Args:
        table: of the log.
        blocks: counts [r, n] of any type, block after block: how often each episode is in each sample.
        settings: as given to table_of.
    """
    lengths = _lengths(len(table.log_largest), (settings or Settings()).max_lengths)
    outcomes = range(table.num_outcomes)
    found: list[list[Tensor]] = [[] for _ in outcomes]
    together = max(1, _NUMBERS_AT_ONCE // ((1 + 2 * len(outcomes)) * len(table.weights)))
    for counts in itertools.chain.from_iterable(torch.split(block, together) for block in blocks):
        once, steps = _totals(table, counts)
        for outcome in outcomes:
            found[outcome].append(_figures(once, steps, outcome, lengths))
    return tuple(_sums(torch.cat(found[outcome]), _omega(table, outcome, lengths)) for outcome in outcomes)


def _totals(table: Table, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Returns sums of the columns but steps, [R, S], and of steps, divided by the largest rho_t, [R, 1 + 2 T, H]."""
    once = len(_SHARED) + table.num_outcomes * len(_OWN)
    total = table.weights.new_zeros(len(counts), once)
    steps = table.weights.new_zeros(len(counts), 1 + 2 * table.num_outcomes, len(table.weights))
    episodes = torch.split(counts, [len(part.columns) for part in table.parts], 1)
    for part, own in zip(table.parts, episodes, strict=True):
        length, scale = len(part.log_largest), part.scale(table.log_largest)
        sums = own.to(total.dtype) @ part.columns
        total += sums[:, :once]
        by_step = torch.unflatten(sums[:, once:], 1, (-1, length))
        steps[:, :, :length].addcmul_(by_step, scale[:length])
        steps[:, 0, length:].addcmul_(by_step[:, 0, -1:], scale[length:])
    return total, steps


def _figures(once: Tensor, steps: Tensor, outcome: int, lengths: Tensor) -> Tensor:
    """Returns the attributes of Sums but omega, step_returns last, beside each other, [R, F + m]."""
    shared, own = once[:, : len(_SHARED)], once[:, len(_SHARED) + outcome * len(_OWN) :][:, : len(_OWN)]
    weights, rewards, corrections = steps[:, 0], steps[:, 1 + 2 * outcome], steps[:, 2 + 2 * outcome]
    weighted = safe_divide(rewards, weights).sum(1)
    first = own[:, _OWN.index("first_value")] / shared[:, 0]
    returns = _from(first, safe_divide(corrections, weights))[:, lengths]
    return torch.cat((shared, own, weighted.unsqueeze(1), weights[:, :1], returns), 1)


def _sums(figures: Tensor, omega: Tensor) -> Sums:
    names = (*_SHARED, *_OWN, *_BY_STEP)
    once = dict(zip(names, figures[:, : len(names)].unbind(1), strict=True))
    return Sums(**once, step_returns=figures[:, len(names) :], omega=omega)


def _omega(table: Table, outcome: int, lengths: Tensor) -> Tensor:
    first, means = _whole(table, outcome)
    mean = _from(first.view(1), means.unsqueeze(0))[0, lengths] / table.num_episodes
    return covariance(step_contributions(table, outcome, lengths), mean)


def step_contributions(table: Table, outcome: int, lengths: Tensor) -> Iterator[Tensor]:
    """Yields what each episode adds to the g_j of m lengths, [n_k, m] for each group; their sum over n is g_j.

    To first order, as the weights of all episodes depend on each: omega_t (x_t - x) + x / n summed over t, where
    x_t = D_t (r_t - q_t) + D_{t+1} v_{t+1} is 0 after the end, omega_t is not, and x = sum_i omega_t x_t.
    Length 0 is g_{-1}, H is WDR.
    """
    # [m] omega x alone makes MAGIC's squared error up to 6 times as large: a weight too many is no error where x_t = x
    n = table.num_episodes
    _, means = _whole(table, outcome)
    start = means.new_zeros(1)
    shares = torch.cat((start, (means / n).cumsum(0)))
    for part in table.parts:
        length = len(part.log_largest)
        inside = lengths.clamp(max=length)
        factor = safe_divide(part.scale(table.log_largest), table.weights)
        relative, values = part.steps[:, 0], part.steps[:, 2 + 2 * outcome]
        first = part.columns[:, _column(outcome, "first_value")] / n
        own = _from(first, (values - relative * means[:length]) * factor[:length])[:, inside]
        after = torch.cat((start, (factor * means).cumsum(0)))
        yield own + shares[lengths] - relative[:, -1:] * (after[lengths] - after[inside])


def episode_returns(table: Table, outcome: int) -> Tensor:
    """Returns sum_t D_t r_t of every episode, [n]; the episodes' order is the table's."""
    return torch.cat([part.columns[:, _column(outcome, "discounted_reward")] for part in table.parts])


def relative_at(table: Table, step: int) -> Tensor:
    """Returns rho_t of every episode divided by the largest, [n]; the episodes' order is the table's."""
    return torch.cat(
        [
            part.steps[:, 0, min(step, len(part.log_largest) - 1)] * part.scale(table.log_largest)[step]
            for part in table.parts
        ]
    )


def effective_by_step(table: Table) -> Tensor:
    """Returns (sum rho_t)^2 / sum rho_t^2 at each step, [H]; 0 where all weights are 0. Kong (1992)."""
    steps = len(table.weights)
    squares = [
        _held(part.steps[:, 0].square().sum(0), steps) * part.scale(table.log_largest).square() for part in table.parts
    ]
    return safe_divide(table.weights.square(), torch.stack(squares).sum(0))


def _whole(table: Table, outcome: int) -> tuple[Tensor, Tensor]:
    """Returns the mean of v_0, and of x_t under omega_t, [H], in the sample itself."""
    first = torch.stack([part.columns[:, _column(outcome, "first_value")].sum() for part in table.parts]).sum()
    total = torch.zeros_like(table.weights)
    for part in table.parts:
        length = len(part.log_largest)
        total[:length] += part.steps[:, 2 + 2 * outcome].sum(0) * part.scale(table.log_largest)[:length]
    return first / table.num_episodes, safe_divide(total, table.weights)


def _column(outcome: int, name: str) -> int:
    return len(_SHARED) + outcome * len(_OWN) + _OWN.index(name)


def _from(first: Tensor, steps: Tensor) -> Tensor:
    """Returns the running sums of steps [R, L] from a first value [R] on, [R, L + 1]."""
    return torch.cat((first.unsqueeze(1), steps), 1).cumsum(1)


def _held(values: Tensor, steps: int) -> Tensor:
    """Returns values by step, [L, ...], at so many steps; the last is held."""
    return values[torch.arange(steps).clamp(max=len(values) - 1)]


def _lengths(steps: int, most: int) -> Tensor:
    """Returns at most so many lengths from 0 to all steps, evenly."""
    return torch.linspace(0, steps, min(most, steps + 1), dtype=torch.float64).round().long()
