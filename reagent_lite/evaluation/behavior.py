"""The behaviour policy of a log without propensities, and the probabilities that it gives to logged choices.

rows ─► folds by hash of the episode ─► a policy for each fold, fitted to the other folds ─► probability of each row
                                                                                         └► calibration.py

The policy is (1 - e) softmax(utility) + e / number of choices. The utility of action k in state s is w_k s + u_k, that
of a candidate with features f is f (W s + u); states and features are normalized. The penalty on W and u is the one
with the least loss on held-out rows. No random numbers are used: the same rows give the same policy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reagent_lite.algorithms.bcq import LoggingPolicy
from reagent_lite.algorithms.cpe_heads import Read, unchanged
from reagent_lite.data.copy.training_copy import TrainingCopy
from reagent_lite.data.rows.hashes import Hashes, mix
from reagent_lite.data.sampling.shards import Shards
from reagent_lite.data.sampling.source import LoggedRows, rows_in_order
from reagent_lite.distributed.group import Group
from reagent_lite.errors import counted
from reagent_lite.evaluation.calibration import Calibration, Tally
from reagent_lite.evaluation.episodes import TrainEvalLogs, spread
from reagent_lite.types import SourceSpec, TransitionBatch

FOLDS = 5
_PENALTIES = (1_000.0, 100.0, 10.0, 1.0, 0.1, 0.01, 0.001, 0.0001)
_ITERATIONS = 40
_FIRST_EXPLORED = -4.0  # log odds of e
_MOST_VALUES = 2**23  # in the fitted rows of a process: 64 MiB
_MOST_PRODUCTS = 2**30  # for one evaluation of the loss: some tenths of a second, and a fit needs some hundred
_BLOCK_VALUES = 2**20
_RARE = 10.0  # a choice expected less often than this in all rows counts as impossible: its probability is not known


@dataclass(frozen=True, slots=True, kw_only=True)
class Behavior:
    """Estimated behaviour policy of a log.

    Attributes:
        propensity: [R] float32, probability of the logged choice of each row of this shard; 1 if a row has no action.
        calibration: calibration on the rows of all shards; None if nothing could be estimated.
        problem: why nothing could be estimated; empty if it could.
    """

    propensity: NDArray[np.float32]
    calibration: Calibration | None
    problem: str = ""


def estimated_behavior(sides: TrainEvalLogs, rows: LoggedRows, spec: SourceSpec, read: Read = unchanged) -> Behavior:
    """Returns the probability of each logged choice by a policy fitted to other episodes; every rank calls it.

    Args:
        sides: training and eval data.
        rows: this shard's rows of `sides.scored`.
        spec: feature and action counts.
        read: normalizes the rows.
    """
    copy = sides.scored
    shards = sides.shards
    group = shards.group
    folds = fold_of(sides.hashes(copy))[copy.episode]
    numbers = np.flatnonzero(np.asarray(copy.action) >= 0)
    fitted_rows = shards.part(numbers)
    propensity = np.ones(len(copy.action), np.float32)
    if problem := _problem(copy, folds[numbers], np.asarray(copy.action)[numbers], group):
        return Behavior(propensity=propensity, calibration=None, problem=problem)
    width = _width(rows, spec)
    parts = list(_choices(rows, spread(fitted_rows, _most_rows(width, spec)), folds, read, width))
    policy = fitted_policy(parts, spec, group)
    certain = 1 - _RARE / sum(shards.counts(len(numbers)))
    tally = Tally(spec.action_names)
    for reader, part in zip(shards.readers, np.array_split(numbers, len(shards.readers)), strict=True):
        start = 0
        for choices in _choices(rows, part, folds, read, width):
            probability = policy.probabilities(choices)
            if reader == group.rank:
                tally.add(probability, choices.mask, choices.action)
            logged = probability.gather(1, choices.action.unsqueeze(1)).squeeze(1)
            stop = start + len(logged)
            propensity[part[start:stop]] = torch.where(logged >= certain, 1.0, logged).float().numpy()
            start = stop
    rows.release()
    return Behavior(propensity=propensity, calibration=tally.calibration(group))


def fit_logging_policy(
    policy: LoggingPolicy, copy: TrainingCopy, rows: LoggedRows, spec: SourceSpec, shards: Shards
) -> None:
    """Sets a policy's parameters to the mean of the policies that each leave out one fold; every rank calls it.

    Args:
        policy: receives the parameters.
        copy: this shard's training data.
        rows: its rows; the policies are fitted to the usable ones.
        spec: feature and action counts.
        shards: assignment of rows to processes.
    """
    folds = fold_of(np.asarray(copy.episode_hash))[copy.episode]
    numbers = np.arange(len(copy)) if rows.usable is None else rows.usable.cpu().numpy()
    width = _width(rows, spec)
    fitted_rows = spread(shards.part(numbers), _most_rows(width, spec))
    parameters = fitted_policy(
        list(_choices(rows, fitted_rows, folds, unchanged, width)), spec, shards.group
    ).parameters.mean(0)
    weight = parameters[:-1].view(-1, spec.num_state_features + 1)
    policy.weight.copy_(weight[:, :-1])
    policy.bias.copy_(weight[:, -1])
    policy.share.copy_(parameters[-1].sigmoid())


def _width(rows: LoggedRows, spec: SourceSpec) -> int:
    """Returns how many numbers a row has."""
    longest = 1 if rows.candidates is None else rows.candidates.longest
    choices = longest * spec.num_action_features if spec.parametric else len(spec.action_names)
    return spec.num_state_features + choices + 1


def _most_rows(width: int, spec: SourceSpec) -> int:
    """Returns the largest number of rows of this width that a process fits to."""
    products = FoldedSoftmax.uniform(spec).parameters.numel()
    return max(min(_MOST_VALUES // width, _MOST_PRODUCTS // products), 1)


def without_propensity(behavior: Behavior | None, counts: Mapping[str, int], rows: int) -> int:
    """Returns how many rows of a log have neither a propensity nor an estimate of it.

    Args:
        behavior: estimated behaviour policy, or None if the log's propensities are used.
        counts: counts of the log's training copy.
        rows: number of rows of the log.
    """
    if behavior is None:
        return counts.get("propensity_absent_rows", 0)
    return rows if behavior.problem else 0


def replaced_propensities(behavior: Behavior | None, counts: Mapping[str, int], rows: int) -> tuple[str, ...]:
    """Returns a warning if rows have a propensity that is not used; the arguments are those of without_propensity."""
    logged = rows - counts.get("propensity_absent_rows", 0)
    if behavior is None or not logged:
        return ()
    advice = 'evaluation.propensities "logged" uses it' if logged == rows else "log it in every row to use it"
    return (f"{logged:,} of {counted(rows, 'row has', 'rows have')} a propensity, which is not used: {advice}",)


def _choices(
    rows: LoggedRows, numbers: NDArray[np.int64], folds: NDArray[np.int64], read: Read, width: int
) -> Iterator[LoggedChoices]:
    """Yields rows by number, in blocks."""
    size = max(_BLOCK_VALUES // width, 1)
    for start in range(0, len(numbers), size):
        block = numbers[start : start + size]
        first = 0
        for batch in rows_in_order(rows, block, torch.device("cpu")):
            count = len(batch.action)
            yield LoggedChoices.of(batch, torch.from_numpy(folds[block[first : first + count]]), read)
            first += count


def _problem(copy: TrainingCopy, folds: NDArray[np.int64], actions: NDArray[np.int32], group: Group) -> str:
    """Returns why no policy can be fitted, the same on every rank; empty if one can.

    Args:
        copy: this shard's rows.
        folds: [n] folds of its rows with a known action.
        actions: [n] actions of the same rows.
        group: all ranks.
    """
    present = group.all_reduce(torch.from_numpy(np.bincount(folds, minlength=FOLDS).astype(np.float64)))
    if int((present > 0).sum()) < 2:
        return "there is no other episode to fit the behaviour policy to"
    if copy.action_names:
        counts = group.all_reduce(
            torch.from_numpy(np.bincount(actions, minlength=len(copy.action_names)).astype(np.float64))
        )
        if int((counts > 0).sum()) < 2:
            return f"every row of the log has the action {copy.action_names[int(counts.argmax())]!r}"
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedChoices:
    """Rows with known actions, in memory.

    Attributes:
        state: [n, S + 1] float64; the last column is 1.
        mask: [n, K] bool.
        features: [n, K, F] float64 of candidates, or None.
        action: [n] int64.
        fold: [n] int64.
    """

    state: Tensor
    mask: Tensor
    features: Tensor | None
    action: Tensor
    fold: Tensor

    @classmethod
    def of(cls, batch: TransitionBatch, fold: Tensor, read: Read) -> LoggedChoices:
        """Returns the rows of a batch on the CPU."""
        state, actions = read(batch.state, batch.actions)
        features = None if actions.features is None else actions.features.cpu().double()
        state = torch.cat((state, torch.ones_like(state[:, :1])), 1)
        return cls(
            state=state.cpu().double(),
            mask=actions.mask.cpu(),
            features=features,
            action=batch.action.cpu(),
            fold=fold,
        )

    @property
    def uniform(self) -> Tensor:
        """[n] probability of each choice under uniform choices."""
        return 1 / self.mask.sum(1).clamp(min=1).double()


@dataclass(frozen=True, slots=True)
class FoldedSoftmax:
    """A softmax policy for each fold, mixed with uniform choices.

    Attributes:
        parameters: [FOLDS, A (S + 1) + 1] weights and biases of A actions or features of a candidate, and the log odds
            of the share of uniform choices.
    """

    parameters: Tensor

    @classmethod
    def uniform(cls, spec: SourceSpec) -> FoldedSoftmax:
        """Returns policies that take every choice with the same probability."""
        width = spec.num_action_features if spec.parametric else len(spec.action_names)
        parameters = torch.zeros(FOLDS, width * (spec.num_state_features + 1) + 1, dtype=torch.float64)
        parameters[:, -1] = _FIRST_EXPLORED
        return cls(parameters)

    @property
    def explored(self) -> Tensor:
        """[FOLDS, 1] share of uniform choices."""
        return self.parameters[:, -1:].sigmoid()

    def softmax(self, rows: LoggedChoices) -> Tensor:
        """Returns [FOLDS, n, K], without uniform choices; 0 where not allowed."""
        weight = self.parameters[:, :-1].view(FOLDS, -1, rows.state.shape[1])
        utility = rows.state @ weight.transpose(1, 2)
        if rows.features is not None:
            utility = torch.einsum("fna,nka->fnk", utility, rows.features)
        return utility.masked_fill(~rows.mask, torch.finfo(utility.dtype).min).softmax(2) * rows.mask

    def probabilities(self, rows: LoggedChoices) -> Tensor:
        """Returns [n, K] by the policy that was not fitted to the row's fold."""
        chosen = self.softmax(rows)[rows.fold, torch.arange(len(rows.fold))]
        share = self.explored[rows.fold]
        return (1 - share) * chosen + share * rows.uniform.unsqueeze(1) * rows.mask

    def loss(self, rows: LoggedChoices) -> tuple[Tensor, Tensor]:
        """Returns the summed negative log likelihood of the logged choices, and its gradient.

        The policy of a fold counts the rows of all other folds.
        """
        chosen = self.softmax(rows)
        index = rows.action.view(1, -1, 1).expand(FOLDS, -1, 1)
        logged = chosen.gather(2, index).squeeze(2)
        share = self.explored
        mixed = (1 - share) * logged + share * rows.uniform
        fitted = torch.arange(FOLDS).unsqueeze(1) != rows.fold
        # the derivative by a utility is responsibility * (softmax - logged choice)
        responsibility = fitted * (1 - share) * logged / mixed
        slope = chosen.scatter_add(2, index, torch.full_like(logged, -1.0).unsqueeze(2)) * responsibility.unsqueeze(2)
        if rows.features is not None:
            slope = torch.einsum("fnk,nka->fna", slope, rows.features)
        by_weight = slope.transpose(1, 2) @ rows.state
        by_share = (fitted * share * (1 - share) * (logged - rows.uniform) / mixed).sum(1, keepdim=True)
        return -(fitted * mixed.log()).sum(), torch.cat((by_weight.flatten(1), by_share), 1)


def fold_of(episode_hash: Hashes, folds: int = FOLDS) -> NDArray[np.int64]:
    """Returns the fold of each episode, the same on every machine and independent of which episodes are scored."""
    return (mix(mix(episode_hash ^ np.uint64(0xF01D))) % np.uint64(folds)).astype(np.int64)


def fitted_policy(parts: Sequence[LoggedChoices], spec: SourceSpec, group: Group) -> FoldedSoftmax:
    """Returns the policies with the penalty that predicts the choices of the left-out folds best; every rank calls it.

    Args:
        parts: this rank's rows.
        spec: feature and action counts.
        group: all ranks; each returns the same policies.
    """
    best = FoldedSoftmax.uniform(spec)
    parameters = best.parameters
    least = _held_out_loss(best, parts, group)
    for penalty in _PENALTIES:
        parameters = _minimized(parameters, penalty, parts, group)
        policy = FoldedSoftmax(parameters)
        loss = _held_out_loss(policy, parts, group)
        if loss >= least:
            break
        best = policy
        least = loss
    return best


def _held_out_loss(policy: FoldedSoftmax, parts: Sequence[LoggedChoices], group: Group) -> float:
    """Returns the loss of all ranks' rows, each under the policy that was not fitted to it."""
    total = torch.zeros(1, dtype=torch.float64)
    for rows in parts:
        total -= policy.probabilities(rows).gather(1, rows.action.unsqueeze(1)).log().sum()
    return float(group.all_reduce(total))


def _minimized(first: Tensor, penalty: float, parts: Sequence[LoggedChoices], group: Group) -> Tensor:
    """Returns the parameters with the least penalized loss over the rows of all ranks, starting at `first`."""
    parameters = first.clone().requires_grad_()
    count = float(group.all_reduce(torch.tensor(float(sum(len(rows.action) for rows in parts)))))
    center = torch.zeros_like(first)
    center[:, -1] = _FIRST_EXPLORED
    strength = torch.full_like(first, penalty)
    strength[:, -1] = 1.0
    optimizer = torch.optim.LBFGS(
        [parameters], max_iter=_ITERATIONS, tolerance_grad=1e-5, tolerance_change=1e-8, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        present = parameters.detach()
        sums = torch.zeros(1 + present.numel(), dtype=torch.float64)
        for rows in parts:
            loss, gradient = FoldedSoftmax(present).loss(rows)
            sums += torch.cat((loss.view(1), gradient.flatten()))
        sums = group.all_reduce(sums)
        deviation = present - center
        parameters.grad = (sums[1:].view_as(present) + strength * deviation) / count
        return (sums[0] + (strength * deviation.square()).sum() / 2) / count

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    return parameters.detach()
