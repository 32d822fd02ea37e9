"""Fits a reward model to decisions: a linear model shrunk towards what actions share, products of features, and trees.

1 shared     score ~ 1 + state (+ candidate)
2 own        what is missing ~ 1 + state, for each action; or state x candidate; for actions also without 1
3 products   what is missing ~ pairs of features of the state, shared and for each action; or of the candidate
4 trees      what 1 and 2 leave ~ state, for each action; or state and candidate

    score = linear model + share of the products + share of the trees

1 to 3 are ridge regressions, 2 with one penalty on the distance of each action's weights from the mean of all actions';
4 is LightGBM. The score is the expected reward, or its log-odds if rewards have two values, as events have: then 1 to 3
are logistic regressions, and all losses are log losses.

Penalties, the number of trees, both shares, and whether there are products and trees at all are chosen by losses of
rows that a fit has not seen: rows are divided into three folds by episode. On logs of few events the linear model alone
remains; products take over where two categories or numbers count together, and trees where there are thresholds.
tests/benchmarks/RESULTS.md compares it with others on logs whose truth is known.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reagent_lite.console import logger
from reagent_lite.errors import pluralize
from reagent_lite.models.forest import Forest, tree_values
from reagent_lite.models.reward_models import ActionRewards, CandidateRewards, Products, RewardModel, TwoValues
from reagent_lite.rl.reward_losses import LogLoss, RewardLoss, SquaredLoss
from reagent_lite.rl.ridge import MANY_COLUMNS, PENALTIES, SPARSE, Regression

FOLDS: Final = 3
MOST_VALUES: Final = 1 << 27
"""Largest number of feature values that a model is fitted to; of more rows a sample is used."""
_MOST_PAIRS = 1 << 11
_FEWEST_LEADING = 16
_MOST_LEADING_COLUMNS = 1 << 14
"""Largest number of actions that choose a common penalty, times columns."""
_MOST_STEPS = 8
"""Steps in which actions' weights and their mean approach each other."""
_MOST_TREES = 1 << 12
_FEWEST_ROWS = 50
_CERTAIN = 2.0
"""Standard errors by which trees must lower the loss on unseen rows."""
_LEAST_FALL = 1e-6
"""Share of the loss on unseen rows by which a further step must lower it."""
_SQUARED = SquaredLoss()
_MOST_MULTIPLICATIONS = 1 << 35
"""Of one Newton step of the products of features."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardRows:
    """Rows to fit a reward model to.

    Attributes:
        state: [n, S] float32.
        chosen: [n, F] float32, features of the chosen candidate; None for named actions.
        action: [n] int64; 0 for candidates.
        reward: [n] float64.
        fold: [n] int64, from 0 to FOLDS - 1.
        weight: [n] float64, how many rows each row counts as; None: one.
    """

    state: Tensor
    chosen: Tensor | None
    action: Tensor
    reward: Tensor
    fold: Tensor
    weight: Tensor | None = None

    @property
    def inputs(self) -> Tensor:
        """[n, S + F]: state and chosen candidate."""
        return self.state if self.chosen is None else torch.cat((self.state, self.chosen), 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardErrors:
    """Mean squared errors of predicted rewards on rows from which the predictions have not learned.

    Attributes:
        rows: number of rows.
        constant: error of the mean reward.
        linear: error of the linear model.
        model: error of the whole model, or of a policy's values.
    """

    rows: int
    constant: float
    linear: float
    model: float

    def json(self) -> dict[str, float | int]:
        """Returns the entries of evaluation.json."""
        return {
            "rows": self.rows,
            "constant_error": self.constant,
            "linear_error": self.linear,
            "error": self.model,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFit(RewardErrors):
    """Errors of a fitted model.

    Attributes:
        products: number of products of two features; 0 if they do not predict better.
        trees: number of trees of all actions; 0 if they do not predict better.
    """

    products: int
    trees: int

    def __str__(self) -> str:
        on_unseen = (
            f"on rows that it has not seen it explains {describe_explained(self.model, self.constant)} of the variance"
        )
        parts = described_parts(self.json())
        if not self.products and not self.trees:
            return f"reward model: {parts}, as nothing else would predict better; {on_unseen} of rewards"
        linear = describe_explained(self.linear, self.constant)
        return f"reward model: {parts}; {on_unseen} of rewards (linear alone {linear})"

    def json(self) -> dict[str, float | int]:
        """Returns the entries of evaluation.json."""
        return {**RewardErrors.json(self), "products": self.products, "trees": self.trees}


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeSettings:
    """Parameters of boosting; see config.algorithm.BoostingConfig.

    Attributes:
        most: largest number of trees for each action.
        depth: largest depth of a tree.
        leaves: largest number of leaves of a tree.
        shrinkage: factor of each tree.
        threads: threads of LightGBM.
        seed: seed of LightGBM.
    """

    most: int
    depth: int
    leaves: int
    shrinkage: float
    threads: int
    seed: int

    def parameters(self, loss: RewardLoss) -> dict[str, Any]:
        """Returns LightGBM's parameters; the penalty counts rows, whatever the curvature of the loss."""
        return {
            "objective": loss.objective,
            "learning_rate": self.shrinkage,
            "num_leaves": self.leaves,
            "max_depth": self.depth,
            "min_data_in_leaf": 20,
            "lambda_l2": 5.0 * loss.curvature,
            "max_bin": 63,
            "boost_from_average": False,
            "deterministic": True,
            "force_row_wise": True,
            "num_threads": self.threads,
            "seed": self.seed,
            "verbosity": -1,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Targets of the scores.

    Attributes:
        loss: the loss of a score.
        value: [n] float64: rewards, or 0 and 1 in place of two values.
        fold: [n] int64.
        weight: [n] float64, as in RewardRows.
        low, span: a value v stands for the reward low + span v.
    """

    loss: RewardLoss
    value: Tensor
    fold: Tensor
    weight: Tensor | None = None
    low: float = 0.0
    span: float = 1.0

    @classmethod
    def of(cls, rows: RewardRows) -> "Target":
        """Returns log-odds for rewards of two values, and rewards themselves otherwise."""
        reward = rows.reward
        low, high = reward.aminmax()
        if not high > low or not ((reward == low) | (reward == high)).all():
            return cls(loss=SquaredLoss(), value=reward, fold=rows.fold, weight=rows.weight)
        value = (reward == high).double()
        share = _weighted_mean(value, rows.weight)
        loss = LogLoss(share * (1 - share))
        return cls(loss=loss, value=value, fold=rows.fold, weight=rows.weight, low=float(low), span=float(high - low))

    def constants(self) -> Tensor:
        """Returns the scores [FOLDS + 1] of constant predictions: without each fold, and of all rows."""
        fitted = torch.stack([self.weigh((self.fold != f).double()) for f in range(FOLDS + 1)])
        return self.loss.constant(fitted @ self.value, fitted.sum(1))

    def predict_unseen(self, scores: Tensor) -> Tensor:
        """Returns the scores [n] of each row by the fit without its fold, of scores [FOLDS + 1, n]."""
        return scores.gather(0, self.fold.unsqueeze(0)).squeeze(0)

    def weigh(self, values: Tensor, numbers: Tensor | None = None) -> Tensor:
        """Returns values [..., n] of the rows `numbers`, or of all rows, times their weights."""
        if self.weight is None:
            return values
        return values * (self.weight if numbers is None else self.weight[numbers])

    def losses(self, scores: Tensor) -> Tensor:
        """Returns the weighted loss [n] of scores [n]."""
        return self.weigh(self.loss.rows(scores, self.value))

    def losses_of(self, scores: Tensor, numbers: Tensor) -> Tensor:
        """Returns the weighted losses [..., m] of scores [..., m] of the rows `numbers`, [m]."""
        return self.weigh(self.loss.rows(scores, self.value[numbers]), numbers)

    def linearize(self, scores: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the residuals of a Newton step, and weights, of the rows `numbers`, [..., m]; see `RewardLoss`."""
        residual, curvature = self.loss.linearize(scores, self.value[numbers])
        if self.weight is None:
            return residual, curvature
        return residual, self.weigh(torch.ones_like(residual) if curvature is None else curvature, numbers)

    def total_unseen(self, scores: Tensor) -> float:
        """Returns the sum of the losses of all rows by fits that have not seen them, for scores [FOLDS + 1, n]."""
        return float(self.losses(self.predict_unseen(scores)).sum())

    def error(self, scores: Tensor) -> float:
        """Returns the mean squared error of scores [n], in units of rewards."""
        return self.span**2 * _weighted_mean((self.value - self.loss.predict(scores)).square(), self.weight)


def _weighted_mean(values: Tensor, weight: Tensor | None) -> float:
    return float(values.mean() if weight is None else weight @ values / weight.sum())


def fit_rewards(model: RewardModel, rows: RewardRows, settings: TreeSettings) -> RewardFit:
    """Sets the weights, products and trees of a model; the same rows and settings give the same model."""
    target = Target.of(rows)
    scores = _fit_linear(model, rows, target)
    linear = target.predict_unseen(scores)
    products = _fit_products(model, rows, target, scores)
    trees = _try_trees(rows, target, linear, model.outputs, settings)
    parts: list[_FittedProducts | _TriedTrees] = []
    shares = torch.zeros(0, dtype=torch.float64)
    predicted = linear
    for part in (products, trees):
        if part is None:
            continue
        columns = torch.stack([part.unseen for part in (*parts, part)], 1)
        more_shares = _mix(target, linear, columns)
        better = linear + columns @ more_shares
        gain = target.losses(predicted) - target.losses(better)
        if gain.mean() > _CERTAIN * gain.std() / math.sqrt(len(gain)):
            parts.append(part)
            shares, predicted = more_shares, better
    for part, share in zip(parts, shares.tolist(), strict=True):
        if share:
            part.add_to(model, share)
    fit = RewardFit(
        rows=len(linear),
        constant=target.error(target.constants()[rows.fold]),
        linear=target.error(linear),
        model=target.error(predicted),
        products=len(model.products.first) if isinstance(model.products, Products) else 0,
        trees=len(model.trees.value) if isinstance(model.trees, Forest) else 0,
    )
    logger.info(str(fit))
    return fit


def fit_linear(model: RewardModel, rows: RewardRows) -> None:
    """Sets the weights of the linear part, and how scores become expected rewards."""
    _fit_linear(model, rows, Target.of(rows))


@torch.no_grad()
def _fit_linear(model: RewardModel, rows: RewardRows, target: Target) -> Tensor:
    """Fits the linear part, and returns its scores [FOLDS + 1, n]: without each fold, and of all rows."""
    if isinstance(target.loss, LogLoss):
        low = torch.full((model.outputs,), target.low)
        model.link = TwoValues(low, torch.tensor(target.span))
    inputs = rows.inputs.double()
    x = torch.cat((torch.ones(len(inputs), 1, dtype=torch.float64), inputs), 1)
    constants = target.constants()
    start = constants.unsqueeze(1).expand(-1, len(inputs))
    every = [torch.arange(len(inputs))]
    (shared,), scores = _fit_terms(x, every, target, start, free=1)
    shared[0] += constants[-1]
    if isinstance(model, CandidateRewards):
        width = rows.state.shape[1]
        model.bias.copy_(shared[:1])
        model.state_weight.copy_(shared[1 : 1 + width].unsqueeze(0))
        model.item_weight.copy_(shared[1 + width :])
        if num_pairs(*model.pair_weight.shape):
            (pair_weights,), scores = _fit_terms(_pairs(rows), every, target, scores)
            model.pair_weight.copy_(pair_weights.view(width, -1).T)
        return scores
    assert isinstance(model, ActionRewards)
    by_action = _by_action(rows, model.outputs)
    of_action, with_both = _fit_terms(x, by_action, target, scores)
    alone, with_own = _fit_terms(x, by_action, target, start)
    if target.total_unseen(with_own) < target.total_unseen(with_both):
        model.bias.copy_(constants[-1] + alone[:, 0])
        model.weight.copy_(alone[:, 1:])
        return with_own
    model.bias.copy_(shared[0] + of_action[:, 0])
    model.weight.copy_(shared[1:] + of_action[:, 1:])
    return with_both


def num_pairs(candidate_features: int, state_features: int) -> int:
    """Returns the number of products of the features of candidate and state in the linear model; 0 if too many."""
    pairs = candidate_features * state_features
    return pairs if pairs <= _MOST_PAIRS else 0


def _pairs(rows: RewardRows) -> Tensor:
    """Returns the products of the features of state and candidate, [n, S F] float64."""
    assert rows.chosen is not None
    return (rows.state.double().unsqueeze(2) * rows.chosen.double().unsqueeze(1)).flatten(1)


def _by_action(rows: RewardRows, outputs: int) -> list[Tensor]:
    """Returns the row numbers of each action."""
    return [(rows.action == action).nonzero().squeeze(1) for action in range(outputs)]


def _largest(groups: list[Tensor], fewest: int = 1) -> list[int]:
    """Returns the groups with at least `fewest` rows, the largest first."""
    enough = [group for group, numbers in enumerate(groups) if len(numbers) >= fewest]
    return sorted(enough, key=lambda group: len(groups[group]), reverse=True)


def _fit_terms(
    x: Tensor, groups: list[Tensor], target: Target, scores: Tensor, *, free: int = 0
) -> tuple[Tensor, Tensor]:
    """Fits further terms x w of the scores, with weights of their own for each group of rows and one penalty for all.

    The penalty holds each group's weights near the mean of all groups', or those of a single group near 0. Steps are
    taken until the loss of unseen rows stops falling; in each, these rows choose the penalty. Weights stay 0 if no
    penalty lowers it.

    Args:
        x: [n, D] float64.
        groups: row numbers of each group, in ascending order.
        target: the target.
        scores: [FOLDS + 1, n], scores of other terms without each fold, and of all rows.
        free: number of leading columns without a penalty.

    Returns:
        Weights [G, D] of all rows, and the scores with these terms.
    """
    order = _largest(groups)
    of_group = {group: x if len(groups[group]) == len(x) else x[groups[group]] for group in order}
    weights = x.new_zeros(len(groups), FOLDS + 1, x.shape[1])
    center = x.new_zeros(FOLDS + 1, x.shape[1])

    def fit_step(group: int, penalties: Sequence[float]) -> Tensor:
        """Returns the weights of the next step, [P, FOLDS + 1, D]."""
        numbers = groups[group]
        columns = of_group[group]
        residual, row_weights = target.linearize(scores[:, numbers] + weights[group] @ columns.T, numbers)
        regression = Regression(
            x=columns,
            targets=(weights[group] - center) @ columns.T + residual,
            fold=target.fold[numbers],
            free=free,
            row_weights=row_weights,
        )
        return center + regression.weights([target.loss.curvature * penalty for penalty in penalties])

    def losses(group: int, solutions: Tensor) -> Tensor:
        """Returns the sums of unseen rows' losses [P] for weights [P, FOLDS + 1, D]."""
        total = torch.zeros(len(solutions), dtype=torch.float64)
        fold = target.fold[groups[group]]
        for f in range(FOLDS):
            numbers = groups[group][fold == f]
            terms = solutions[:, f] @ of_group[group][fold == f].T
            total += target.losses_of(scores[f, numbers] + terms, numbers).sum(1)
        return total

    leading = order[: max(_FEWEST_LEADING, _MOST_LEADING_COLUMNS // x.shape[1])]
    smallest = sum(float(losses(group, weights[group : group + 1])) for group in leading)
    tried = range(len(PENALTIES))
    for _ in range(_MOST_STEPS if len(groups) > 1 else target.loss.steps):
        penalties = [PENALTIES[index] for index in tried]
        solutions = {group: fit_step(group, penalties) for group in leading}
        total = torch.stack([losses(group, solutions[group]) for group in leading]).sum(0)
        best = int(total.argmin())
        if not total[best] < smallest * (1 - _LEAST_FALL):
            break
        others = {group: fit_step(group, penalties[best : best + 1])[0] for group in order[len(leading) :]}
        for group in order:
            weights[group] = solutions[group][best] if group in solutions else others[group]
        if len(groups) > 1:
            center = weights[order].mean(0)
        smallest = float(total[best])
        index = tried[best]
        tried = range(max(index - 1, 0), min(index + 2, len(PENALTIES)))
    weights[[group for group in range(len(groups)) if group not in of_group]] = center
    scores = scores.clone()
    for group in order:
        scores[:, groups[group]] += weights[group] @ of_group[group].T
    return weights[:, -1], scores


@dataclass(frozen=True, slots=True, kw_only=True)
class _FittedProducts:
    """Weights [G, P] of products of the columns `first` and `second`, and their scores [n] of unseen rows."""

    first: Tensor
    second: Tensor
    weight: Tensor
    unseen: Tensor

    def add_to(self, model: RewardModel, share: float) -> None:
        """Adds the products, multiplied by their share of the score, to a model."""
        model.products = Products(self.first, self.second, (share * self.weight).float())


def _fit_products(model: RewardModel, rows: RewardRows, target: Target, scores: Tensor) -> _FittedProducts | None:
    """Fits products of two features of the state, or of the candidate; None if they are too many or of no use."""
    inputs = (rows.state if rows.chosen is None else rows.chosen).double()
    first, second = _product_columns(inputs, min(model.outputs, _FEWEST_LEADING) + 1)
    if not len(first):
        return None
    x = inputs[:, first] * inputs[:, second]
    every = [torch.arange(len(x))]
    weight, with_products = _fit_terms(x, every, target, scores)
    if rows.chosen is None:
        of_action, with_products = _fit_terms(x, _by_action(rows, model.outputs), target, with_products)
        weight = weight + of_action
    if not weight.any():
        return None
    unseen = target.predict_unseen(with_products - scores)
    return _FittedProducts(first=first, second=second, weight=weight, unseen=unseen)


def _product_columns(x: Tensor, fits: int) -> tuple[Tensor, Tensor]:
    """Returns the pairs of columns whose product is another column; none if `fits` fits of them take too long.

    Products of two levels of a category are 0, and the square of a column with the values 0 and c is that column.
    """
    not_zero = (x != 0).double()
    rows = not_zero.T @ not_zero
    once = ((x == 0) | (x == x.abs().amax(0))).all(0)
    rows.diagonal()[once] = 0
    first, second = rows.triu().nonzero(as_tuple=True)
    count = len(first)
    values = float(rows[first, second].sum())
    multiplications = (FOLDS + 1) * (
        count * (values if count > MANY_COLUMNS and values < SPARSE * count * len(x) else count * len(x))
        + len(PENALTIES) / 3 * fits * count**2 * count
    )
    most = 0 if multiplications > _MOST_MULTIPLICATIONS else count
    return first[:most], second[:most]


def _mix(target: Target, base: Tensor, parts: Tensor) -> Tensor:
    """Returns the shares of parts [n, M], each from 0 to 1, that added to the base [n] predict unseen rows best."""
    shares = torch.zeros(parts.shape[1], dtype=torch.float64)
    every = torch.arange(len(base))
    kept = list(range(len(shares)))
    while kept:
        x = parts[:, kept]
        shares.zero_()
        for _ in range(target.loss.steps):
            terms = x @ shares[kept]
            residual, weight = target.linearize(base + terms, every)
            weighted = x if weight is None else x * weight.unsqueeze(1)
            vector = weighted.T @ (terms + residual)
            shares[kept] = torch.linalg.lstsq(weighted.T @ x, vector.unsqueeze(1)).solution.squeeze(1)
        if (shares[kept] > 0).all():
            return shares.clamp(max=1)
        kept = [part for part in kept if shares[part] > 0]
    return torch.zeros_like(shares)


@dataclass(frozen=True, slots=True, kw_only=True)
class _TriedTrees:
    """A number of trees for each output, and their scores [n] of unseen rows; other attributes as in `_try_trees`."""

    count: int
    unseen: Tensor
    rows: RewardRows
    target: Target
    base: Tensor
    settings: TreeSettings

    def add_to(self, model: RewardModel, share: float) -> None:
        """Adds trees of all rows, multiplied by their share of the score, to a model."""
        forests = [
            _grow(self.rows.inputs[numbers], self.target, self.base, numbers, self.count, self.settings)
            if len(numbers) >= _FEWEST_ROWS
            else _zero_trees(self.count, self.settings.depth)
            for numbers in _by_action(self.rows, model.outputs)
        ]
        feature, threshold, value = (torch.cat(tables) for tables in zip(*forests, strict=True))
        model.trees = Forest(feature, threshold, share * value, outputs=model.outputs)


def _try_trees(
    rows: RewardRows, target: Target, base: Tensor, outputs: int, settings: TreeSettings
) -> _TriedTrees | None:
    """Returns the number of trees that predict unseen rows best; None if none do.

    Args:
        rows: the rows.
        target: the target.
        base: [n], scores of unseen rows, to which trees are added.
        outputs: number of named actions; 1 for candidates.
        settings: parameters of the trees.
    """
    most = max(min(settings.most, _MOST_TREES // outputs), 1)
    inputs = rows.inputs
    by_output = _by_action(rows, outputs)
    enough = _largest(by_output, _FEWEST_ROWS)
    if not inputs.shape[1] or not enough:
        return None
    grown = []

    def gain(output: int, count: int) -> Tensor:
        """Returns by how much 1, 2, ... trees lower the losses of an output's unseen rows, [count]."""
        numbers = by_output[output]
        total = torch.zeros(count, dtype=torch.float64)
        for f in range(FOLDS):
            fitted = numbers[rows.fold[numbers] != f]
            unseen = numbers[rows.fold[numbers] == f]
            if len(unseen) and len(fitted):
                trees = _grow(inputs[fitted], target, base, fitted, count, settings)
                grown.append((unseen, trees))
                scores = base[unseen] + tree_values(inputs[unseen], *trees).double().cumsum(1).T
                total += (target.losses_of(base[unseen], unseen) - target.losses_of(scores, unseen)).sum(1)
        return total

    gains = torch.stack([gain(output, most) for output in enough[:_FEWEST_LEADING]]).sum(0)
    best = int(gains.argmax())
    squares = target.weigh(target.value.square())
    rounding = max(1e-9 * float(target.losses(base).sum()), 1e-26 * float(squares.sum()))
    if not gains[best] > rounding:
        return None
    for output in enough[_FEWEST_LEADING:]:
        gain(output, best + 1)
    unseen = torch.zeros_like(base)
    for numbers, trees in grown:
        unseen[numbers] = tree_values(inputs[numbers], *(table[: best + 1] for table in trees)).double().sum(1)
    return _TriedTrees(count=best + 1, unseen=unseen, rows=rows, target=target, base=base, settings=settings)


def _grow(inputs: Tensor, target: Target, base: Tensor, numbers: Tensor, count: int, settings: TreeSettings) -> "Trees":
    """Returns trees of the rows `numbers`, whose inputs are given, that start from their base scores."""
    label, start = target.loss.for_trees(base[numbers], target.value[numbers])
    return grow_trees(
        inputs.numpy(),
        label.numpy(),
        count,
        settings,
        loss=target.loss,
        start=None if start is None else start.numpy(),
        weight=None if target.weight is None else target.weight[numbers].numpy(),
    )


Trees = tuple[Tensor, Tensor, Tensor]
"""Features, thresholds and values of trees; see `Forest`."""


def grow_trees(
    inputs: NDArray[np.float32],
    target: NDArray[np.float64],
    count: int,
    settings: TreeSettings,
    *,
    loss: RewardLoss = _SQUARED,
    start: NDArray[np.float64] | None = None,
    weight: NDArray[np.float64] | None = None,
) -> Trees:
    """Returns `count` trees, each fitted to the residuals of those before.

    Args:
        inputs: [n, W].
        target: [n].
        count: number of trees.
        settings: parameters of the trees.
        loss: the loss that they lower.
        start: [n], scores to which the trees are added; None: 0.
        weight: [n], how many rows each row counts as; None: one.
    """
    import lightgbm  # an extra: `needing` has found it

    parameters = settings.parameters(loss)
    data = lightgbm.Dataset(inputs, target, weight=weight, init_score=start, params=parameters)
    booster = lightgbm.train(parameters, data, num_boost_round=count)
    trees = _zero_trees(count, settings.depth)
    for number, tree in enumerate(booster.dump_model()["tree_info"]):
        _fill(tree["tree_structure"], [table[number] for table in trees], 0, settings.depth)
    return trees


def _zero_trees(count: int, depth: int) -> Trees:
    """Returns trees whose values are 0."""
    tests = 2**depth - 1
    feature = torch.zeros(count, tests, dtype=torch.int64)
    return feature, torch.full((count, tests), torch.inf), torch.zeros(count, tests + 1)


def _fill(node: dict[str, Any], tree: list[Tensor], test: int, depth: int) -> None:
    """Writes a node of LightGBM and those below it as test number `test`, with `depth` levels of tests left."""
    feature, threshold, value = tree
    if "leaf_value" in node:
        first = test
        for _ in range(depth):
            first = 2 * first + 1
        leaf = first - len(feature)
        value[leaf : leaf + 2**depth] = node["leaf_value"]
        return
    feature[test] = node["split_feature"]
    threshold[test] = _float32_below(node["threshold"])
    _fill(node["left_child"], tree, 2 * test + 1, depth - 1)
    _fill(node["right_child"], tree, 2 * test + 2, depth - 1)


def _float32_below(threshold: float) -> float:
    """Returns the largest float32 that is not above a threshold: the same float32 inputs are at most as large."""
    nearest = np.float32(threshold)
    return float(nearest if nearest <= threshold else np.nextafter(nearest, np.float32(-np.inf)))


def described_parts(entries: Mapping[str, float | int]) -> str:
    """Returns the parts of a model in words, from its entries of evaluation.json."""
    products = entries["products"] and pluralize(
        int(entries["products"]), "product of two features", "products of two features"
    )
    trees = entries["trees"] and pluralize(int(entries["trees"]), "tree")
    more = " and ".join(part for part in (products, trees) if part)
    return f"linear with {more}" if more else "linear"


def describe_explained(error: float, constant: float) -> str:
    """Returns the share of a variance that a model explains, in words."""
    return f"{1 - error / constant:.2%}" if constant > 0 else "nothing"
