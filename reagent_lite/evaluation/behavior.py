"""The behavior policy of a log without propensities, and the probabilities that it gives to logged choices.

rows ─► folds by hash of the episode ─► a policy for each fold, fitted to the other folds ─► probability of each row
                                                                                         └► calibration.py

The policy is (1 - e) softmax(utility) + e / number of choices. The utility of action k in state s is w_k s + u_k, that
of a candidate with features f is f (W s + u); states and features are normalized. Squares, products and steps of
features (curvature.py) are added to s and to f if that lowers the loss on held-out rows. The penalty on W and u is the
one with the least loss on held-out rows. No random numbers are used: the same rows give the same policy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reagent_lite.algorithms.bcq import LoggingPolicy
from reagent_lite.algorithms.reward_and_q_models import Read, pass_through
from reagent_lite.data.copy.training_copy import TrainingCopy
from reagent_lite.data.rows.hashes import Hashes, mix
from reagent_lite.data.sampling.shards import Shards
from reagent_lite.data.sampling.source import LoggedRows, rows_in_order
from reagent_lite.distributed.group import Group
from reagent_lite.errors import pluralize
from reagent_lite.evaluation.calibration import QUANTILES, Calibration, Tally
from reagent_lite.evaluation.curvature import MOST_TERMS, Terms, quantiles
from reagent_lite.evaluation.scored_episodes import TrainEvalLogs, spread
from reagent_lite.types import SourceSpec, TransitionBatch

FOLDS = 5
_PENALTIES = (1_000.0, 100.0, 10.0, 1.0, 0.1, 0.01, 0.001, 0.0001)
_WEAKER = 0.1
_ITERATIONS = 40
_FREE = 1e-9  # penalty of a constant
_FIRST_EXPLORED = -4.0  # log odds of e
_MOST_VALUES = 2**24  # in the fitted rows of a process: 128 MiB
_MOST_PRODUCTS = 2**30  # for one evaluation of the loss: some tenths of a second, and a fit needs some hundred
_BLOCK_VALUES = 2**20
_RARE = 10.0  # a choice expected less often than this in all rows counts as impossible: its probability is not known


@dataclass(frozen=True, slots=True, kw_only=True)
class Behavior:
    """Estimated behavior policy of a log.

    Attributes:
        propensity: [R] float32, probability of the logged choice of each row of this shard; 1 if a row has no action.
        reward: [R] float64, reward predicted from features of the state by models of other episodes; 0 without action.
        calibration: calibration on the rows of all shards; None if nothing could be estimated.
        problem: why nothing could be estimated; empty if it could.
    """

    propensity: NDArray[np.float32]
    reward: NDArray[np.float64]
    calibration: Calibration | None
    problem: str = ""


def estimated_behavior(
    sides: TrainEvalLogs, rows: LoggedRows, spec: SourceSpec, read: Read = pass_through, features: tuple[str, ...] = ()
) -> Behavior:
    """Returns the probability of each logged choice by a policy fitted to other episodes; every rank calls it.

    Args:
        sides: training and eval data.
        rows: this shard's rows of `sides.scored`.
        spec: feature and action counts.
        read: normalizes the rows.
        features: names of the columns of normalized states, of candidates for a log of these; numbers if empty.

    Columns of embeddings are left out: the policy is a softmax of a linear model.
    """
    read, features = _without_embeddings(spec, read, features)
    spec = spec.dense
    copy = sides.scored
    shards = sides.shards
    group = shards.group
    folds = fold_of(sides.hashes(copy))[copy.episode]
    numbers = np.flatnonzero(np.asarray(copy.action) >= 0)
    fitted_rows = shards.part(numbers)
    propensity = np.ones(len(copy.action), np.float32)
    reward = np.zeros(len(copy.action))
    if problem := _problem(copy, folds[numbers], np.asarray(copy.action)[numbers], group):
        return Behavior(propensity=propensity, reward=reward, calibration=None, problem=problem)
    width = _width(rows, spec)
    parts = list(_choices(rows, spread(fitted_rows, _most_rows(rows, _with_terms(spec))), folds, read, width))
    model = _LoggingModel.fit(parts, spec, group)
    certain = 1 - _RARE / sum(shards.counts(len(numbers)))
    tally = Tally(spec.action_names, model.list_checked(features))
    for reader, part in zip(shards.readers, np.array_split(numbers, len(shards.readers)), strict=True):
        start = 0
        for choices in _choices(rows, part, folds, read, width):
            choices = model.expand(choices)
            probability = model.policy.probabilities(choices)
            if reader == group.rank:
                tally.add(probability, choices.mask, choices.action, model.between(choices), choices.weight)
            logged = probability.gather(1, choices.action.unsqueeze(1)).squeeze(1)
            stop = start + len(logged)
            reward[part[start:stop]] = model.reward.of(choices).numpy()
            propensity[part[start:stop]] = torch.where(logged >= certain, 1.0, logged).float().numpy()
            start = stop
    rows.release()
    return Behavior(propensity=propensity, reward=reward, calibration=tally.calibration(group))


def _without_embeddings(spec: SourceSpec, read: Read, features: tuple[str, ...]) -> tuple[Read, tuple[str, ...]]:
    """Returns a function that reads rows without the columns of embeddings, and the names of the other columns."""
    if spec.is_dense:
        return read, features
    dense = spec.dense
    count = dense.num_action_features if spec.parametric else dense.num_state_features
    return lambda state, actions: spec.dense_columns(*read(state, actions)), features[:count]


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
    read = spec.dense_columns
    spec = spec.dense
    width = _width(rows, spec)
    fitted_rows = spread(shards.part(numbers), _most_rows(rows, spec))
    parts = list(_choices(rows, fitted_rows, folds, read, width))
    policies, *_ = fitted_policy(parts, FoldedSoftmax.uniform(spec), shards.group)
    parameters = policies.parameters.mean(0)
    weight = parameters[:-1].view(-1, spec.num_state_features + 1)
    policy.weight.copy_(weight[:, :-1])
    policy.bias.copy_(weight[:, -1])
    policy.share.copy_(parameters[-1].sigmoid())


def _width(rows: LoggedRows, spec: SourceSpec) -> int:
    """Returns how many numbers a row has."""
    longest = 1 if rows.candidates is None else rows.candidates.longest
    choices = longest * spec.num_action_features if spec.parametric else len(spec.action_names)
    return spec.num_state_features + choices + 1


def _with_terms(spec: SourceSpec, of_state: int = MOST_TERMS, of_action: int | None = None) -> SourceSpec:
    """Returns the counts with terms of states and of candidates; these are at most as many as their features."""
    further = spec.num_action_features if of_action is None else of_action
    return replace(
        spec,
        num_state_features=spec.num_state_features + of_state,
        num_action_features=spec.num_action_features + further,
    )


def _most_rows(rows: LoggedRows, spec: SourceSpec) -> int:
    """Returns the largest number of rows that a process fits to."""
    products = FoldedSoftmax.uniform(spec).parameters.numel()
    return max(min(_MOST_VALUES // _width(rows, spec), _MOST_PRODUCTS // products), 1)


def without_propensity(behavior: Behavior | None, counts: Mapping[str, int], rows: int) -> int:
    """Returns how many rows of a log have neither a propensity nor an estimate of it.

    Args:
        behavior: estimated behavior policy, or None if the log's propensities are used.
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
    return (f"{logged:,} of {pluralize(rows, 'row has', 'rows have')} a propensity, which is not used: {advice}",)


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
        return "there is no other episode to fit the behavior policy to"
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
        reward: [n] float64.
        fold: [n] int64.
        weight: [n] float64, share of the row in all sums, 1 on average.
    """

    state: Tensor
    mask: Tensor
    features: Tensor | None
    action: Tensor
    reward: Tensor
    fold: Tensor
    weight: Tensor

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
            reward=batch.reward.cpu().double(),
            fold=fold,
            weight=batch.weight.cpu().double(),
        )

    def with_terms(self, of_state: Terms, of_action: Terms) -> LoggedChoices:
        """Returns the rows with further columns of states and candidates."""
        state = torch.cat((self.state[:, :-1], of_state.of(self.state[:, :-1]), self.state[:, -1:]), 1)
        features = self.features
        if features is not None:
            features = torch.cat((features, of_action.of(features) * self.mask.unsqueeze(2)), 2)
        return replace(self, state=state, features=features)

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
        utility = utility.masked_fill(~rows.mask, torch.finfo(utility.dtype).min)
        # half the time of torch's softmax over few choices
        chosen = (utility - utility.amax(2, keepdim=True)).exp()
        return chosen / chosen.sum(2, keepdim=True) * rows.mask

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
        fitted = (torch.arange(FOLDS).unsqueeze(1) != rows.fold) * rows.weight
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


def fitted_policy(
    parts: Sequence[LoggedChoices], first: FoldedSoftmax, group: Group
) -> tuple[FoldedSoftmax, float, float]:
    """Returns the policies that predict the choices of the left-out folds best, their loss there, and their penalty.

    Args:
        parts: this rank's rows.
        first: uniform policies, returned if no fit is better.
        group: all ranks, which all call it; each returns the same policies.
    """
    best = first
    chosen = math.inf
    parameters = best.parameters
    least = _held_out_loss(best, parts, group)
    for penalty in _PENALTIES:
        parameters = _minimize(parameters, penalty, parts, group)
        policy = FoldedSoftmax(parameters)
        loss = _held_out_loss(policy, parts, group)
        if loss >= least:
            break
        best = policy
        least = loss
        chosen = penalty
    return best, least, chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class _LoggingModel:
    """The policy fitted to a log, and the columns by which its calibration is checked.

    Attributes:
        policy: the policies of all folds.
        spec: feature and action counts of the log.
        of_state, of_action: terms that the policies read in addition to features of states and of candidates.
        reward: prediction of the reward from the features of states.
        edges: [C, 20] quantiles of the checked columns: features of states and the predicted reward, or features of
            candidates.
    """

    policy: FoldedSoftmax
    spec: SourceSpec
    of_state: Terms
    of_action: Terms
    reward: _RewardPrediction
    edges: Tensor

    @classmethod
    def fit(cls, parts: Sequence[LoggedChoices], spec: SourceSpec, group: Group) -> _LoggingModel:
        """Returns the model with the least loss on held-out rows; every rank calls it."""
        policy, loss, _ = fitted_policy(parts, FoldedSoftmax.uniform(spec), group)
        of_state, of_action = _missing_terms(parts, policy, spec, group)
        wider = _with_terms(spec, len(of_state), len(of_action))
        if wider != spec:
            curved_parts = [rows.with_terms(of_state, of_action) for rows in parts]
            curved, curved_loss, penalty = fitted_policy(curved_parts, FoldedSoftmax.uniform(wider), group)
            if curved_loss < loss:
                # weaker than predicts best: curvature that shrunken terms leave biases estimates
                policy = FoldedSoftmax(_minimize(curved.parameters, penalty * _WEAKER, curved_parts, group))
                parts = curved_parts
            else:
                of_state = of_action = Terms.none()
        model = cls(
            policy=policy,
            spec=spec,
            of_state=of_state,
            of_action=of_action,
            reward=_RewardPrediction.fit(parts, spec, group),
            edges=torch.zeros(0),
        )
        count = spec.num_action_features if spec.parametric else spec.num_state_features + 1
        columns = [model._columns(rows)[rows.mask if spec.parametric else ...] for rows in parts]
        empty = torch.zeros(0, count, dtype=torch.float64)
        return replace(model, edges=quantiles(torch.cat((empty, *columns)), QUANTILES, group))

    def expand(self, rows: LoggedChoices) -> LoggedChoices:
        """Returns the rows with the columns that the policies read."""
        return rows.with_terms(self.of_state, self.of_action)

    def list_checked(self, features: tuple[str, ...]) -> tuple[str, ...]:
        """Returns the names of the checked columns, given those of features or none."""
        count = self.spec.num_action_features if self.spec.parametric else self.spec.num_state_features
        names = features or tuple(map(str, range(count)))
        return (*(f"feature {name}" for name in names), *(() if self.spec.parametric else ("the predicted reward",)))

    def between(self, rows: LoggedChoices) -> Tensor:
        """Returns between which quantiles the checked columns are, [n, 1, C] or [n, K, C], for expanded rows."""
        columns = self._columns(rows)
        if not self.spec.parametric:
            columns = columns.unsqueeze(1)
        return torch.searchsorted(self.edges, columns.flatten(0, 1).T.contiguous()).T.view(columns.shape)

    def _columns(self, rows: LoggedChoices) -> Tensor:
        if rows.features is not None:
            return rows.features[..., : self.spec.num_action_features]
        return torch.cat((rows.state[:, : self.spec.num_state_features], self.reward.of(rows).unsqueeze(1)), 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _RewardPrediction:
    """Ridge regressions of the reward on features of states and on terms that a linear regression lacks.

    Attributes:
        features: S.
        terms: the terms.
        weights: [FOLDS, S + P + 1] weights, each fitted to the rows of other folds.
    """

    features: int
    terms: Terms
    weights: Tensor

    @classmethod
    def fit(cls, parts: Sequence[LoggedChoices], spec: SourceSpec, group: Group) -> _RewardPrediction:
        """Returns the prediction of rows, whose further columns of states are not used."""
        width = spec.num_state_features
        linear = cls(features=width, terms=Terms.none(), weights=_reward_weights(parts, width, Terms.none(), group))
        residuals = [
            (rows.state[:, :width], (rows.weight * (rows.reward - linear.of(rows))).unsqueeze(1)) for rows in parts
        ]
        terms = Terms.best(residuals, (width, 1), MOST_TERMS, group)
        return cls(features=width, terms=terms, weights=_reward_weights(parts, width, terms, group))

    def of(self, rows: LoggedChoices) -> Tensor:
        """Returns the predicted rewards of rows, [n], each by the regression that was not fitted to its fold."""
        return (_reward_columns(rows, self.features, self.terms) * self.weights[rows.fold]).sum(1)


def _missing_terms(
    parts: Sequence[LoggedChoices], policy: FoldedSoftmax, spec: SourceSpec, group: Group
) -> tuple[Terms, Terms]:
    """Returns the terms of states and of candidates that the residuals of linear policies depend on."""
    of_states = []
    of_candidates = []
    for rows in parts:
        residual = -policy.probabilities(rows)
        residual.scatter_add_(1, rows.action.unsqueeze(1), torch.ones_like(residual[:, :1]))
        residual *= rows.weight.unsqueeze(1)
        if rows.features is not None:
            of_candidates.append((rows.features[rows.mask], residual[rows.mask].unsqueeze(1)))
            residual = torch.einsum("nk,nka->na", residual, rows.features)
        of_states.append((rows.state[:, :-1], residual))
    width = spec.num_action_features if spec.parametric else len(spec.action_names)
    of_state = Terms.best(of_states, (spec.num_state_features, width), MOST_TERMS, group)
    if not spec.parametric:
        return of_state, Terms.none()
    return of_state, Terms.best(of_candidates, (width, 1), min(width, MOST_TERMS), group)


def _reward_columns(rows: LoggedChoices, features: int, terms: Terms) -> Tensor:
    """Returns features of states, terms of them and ones, [n, S + P + 1]."""
    state = rows.state[:, :features]
    return torch.cat((state, terms.of(state), rows.state[:, -1:]), 1)


def _reward_weights(parts: Sequence[LoggedChoices], features: int, terms: Terms, group: Group) -> Tensor:
    """Returns [FOLDS, S + P + 1] ridge regressions of the reward, each on the rows of other folds."""
    width = features + len(terms) + 1
    products = torch.zeros(FOLDS, width, width + 1, dtype=torch.float64)
    for rows in parts:
        for fold in range(FOLDS):
            of_fold = rows.fold == fold
            state = _reward_columns(rows, features, terms)[of_fold]
            weighted = state.T * rows.weight[of_fold]
            products[fold, :, :-1] += weighted @ state
            products[fold, :, -1] += weighted @ rows.reward[of_fold]
    products = group.all_reduce(products)
    products = products.sum(0) - products
    penalty = width * torch.eye(width, dtype=torch.float64)
    penalty[-1, -1] = _FREE
    weights: Tensor = torch.linalg.solve(products[:, :, :-1] + penalty, products[:, :, -1:]).squeeze(2)
    return weights


def _held_out_loss(policy: FoldedSoftmax, parts: Sequence[LoggedChoices], group: Group) -> float:
    """Returns the loss of all ranks' rows, each under the policy that was not fitted to it."""
    total = torch.zeros(1, dtype=torch.float64)
    for rows in parts:
        total -= (policy.probabilities(rows).gather(1, rows.action.unsqueeze(1)).log().squeeze(1) * rows.weight).sum()
    return float(group.all_reduce(total))


def _minimize(first: Tensor, penalty: float, parts: Sequence[LoggedChoices], group: Group) -> Tensor:
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
