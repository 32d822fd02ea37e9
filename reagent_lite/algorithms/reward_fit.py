"""Fits a reward model to decisions: a linear model shrunk towards what actions share, then boosted trees.

1 shared   reward ~ 1 + state (+ candidate)                                        ridge
2 own      what is left ~ 1 + state, for each action; or state x candidate         ridge, one penalty for all actions
3 trees    what is left ~ state, for each action; or state and candidate           LightGBM

A penalty, the number of trees and whether there are trees at all are chosen by errors on rows that a fit has not seen:
rows are divided into three folds by episode. On logs of few events the linear model alone remains; on logs with
thresholds and products the trees take over. tests/benchmarks/RESULTS.md compares it with others on logs whose truth is
known.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reagent_lite.console import logger
from reagent_lite.models.forest import Forest, tree_values
from reagent_lite.models.reward_models import CandidateRewards, RewardModel
from reagent_lite.rl.ridge import Regression, best_penalty

FOLDS: Final = 3
MOST_VALUES: Final = 1 << 27
"""Largest number of feature values that a model is fitted to; of more rows a sample is used."""
_MOST_PAIRS = 1 << 11
_PENALTY_ACTIONS = 16
_MOST_TREES = 1 << 12
_FEWEST_ROWS = 50
_CERTAIN = 2.0
"""Standard errors by which trees must lower the squared error on unseen rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """Rows to fit a reward model to.

    Attributes:
        state: [n, S] float32.
        chosen: [n, F] float32, features of the chosen candidate; None for named actions.
        action: [n] int64; 0 for candidates.
        reward: [n] float64.
        fold: [n] int64, from 0 to FOLDS - 1.
    """

    state: Tensor
    chosen: Tensor | None
    action: Tensor
    reward: Tensor
    fold: Tensor

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
        trees: number of trees of all actions; 0 if they do not predict better.
    """

    trees: int

    def __str__(self) -> str:
        on_unseen = f"on rows that it has not seen it explains {explained(self.model, self.constant)} of the variance"
        if not self.trees:
            return f"reward model: linear, as trees would not predict better; {on_unseen} of rewards"
        linear = explained(self.linear, self.constant)
        return f"reward model: linear, and {self.trees:,} trees; {on_unseen} of rewards (linear alone {linear})"

    def json(self) -> dict[str, float | int]:
        """Returns the entries of evaluation.json."""
        return {**RewardErrors.json(self), "trees": self.trees}


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

    def parameters(self) -> dict[str, Any]:
        """Returns LightGBM's parameters."""
        return {
            "objective": "regression",
            "learning_rate": self.shrinkage,
            "num_leaves": self.leaves,
            "max_depth": self.depth,
            "min_data_in_leaf": 20,
            "lambda_l2": 5.0,
            "max_bin": 63,
            "boost_from_average": False,
            "deterministic": True,
            "force_row_wise": True,
            "num_threads": self.threads,
            "seed": self.seed,
            "verbosity": -1,
        }


def fit_rewards(model: RewardModel, rows: Decisions, settings: TreeSettings) -> RewardFit:
    """Sets the weights and trees of a model; the same rows and settings give the same model."""
    linear = fit_linear(model, rows)
    left = rows.reward - linear
    errors = left.square()
    fitted = [rows.fold != f for f in range(FOLDS)]
    means = torch.stack([rows.reward[some].mean() for some in fitted])
    constant = float((rows.reward - means[rows.fold]).square().mean())
    rounding = max(1e-9 * constant, 1e-26 * float(rows.reward.square().mean()))
    forest, gain = _fit_trees(replace(rows, reward=left), model.outputs, settings, rounding)
    if forest is not None:
        model.trees = forest
    fit = RewardFit(
        rows=len(left),
        constant=constant,
        linear=float(errors.mean()),
        model=float(errors.mean()) - gain,
        trees=0 if forest is None else len(forest.value),
    )
    logger.info(str(fit))
    return fit


def fit_linear(model: RewardModel, rows: Decisions) -> Tensor:
    """Sets the weights of the linear part, and returns its predictions [n] of unseen rows."""
    inputs = rows.inputs.double()
    ones = torch.ones(len(inputs), 1, dtype=torch.float64)
    shared = Regression(
        x=torch.cat((ones, inputs), 1), targets=rows.reward.expand(FOLDS + 1, -1), fold=rows.fold, free=1
    )
    shared_weights = shared.weights(best_penalty([shared]))
    left = rows.reward - shared_weights @ shared.x.T
    predicted = shared.unseen(shared_weights)
    weights = shared_weights[-1].float()
    with torch.no_grad():
        if isinstance(model, CandidateRewards):
            width = rows.state.shape[1]
            model.bias.copy_(weights[:1])
            model.state_weight.copy_(weights[1 : 1 + width].unsqueeze(0))
            model.item_weight.copy_(weights[1 + width :])
            if num_pairs(*model.pair_weight.shape):
                regression = Regression(x=_pairs(rows), targets=left, fold=rows.fold)
                pair_weights = regression.weights(best_penalty([regression]))
                model.pair_weight.copy_(pair_weights[-1].view(width, -1).T)
                predicted = predicted + regression.unseen(pair_weights)
            return predicted
        model.bias.copy_(weights[0].expand(len(model.bias)))
        model.weight.copy_(weights[1:].expand_as(model.weight))
        most = torch.bincount(rows.action, minlength=len(model.bias)).argsort(descending=True).tolist()
        penalty = best_penalty(of for _, _, of in _by_action(shared.x, left, rows, most[:_PENALTY_ACTIONS]))
        for action, numbers, regression in _by_action(shared.x, left, rows, most):
            added = regression.weights(penalty)
            model.bias[action] += added[-1, 0].float()
            model.weight[action] += added[-1, 1:].float()
            predicted[numbers] += regression.unseen(added)
    return predicted


def num_pairs(candidate_features: int, state_features: int) -> int:
    """Returns the number of products of the features of candidate and state in the linear model; 0 if too many."""
    pairs = candidate_features * state_features
    return pairs if pairs <= _MOST_PAIRS else 0


def _pairs(rows: Decisions) -> Tensor:
    """Returns the products of the features of state and candidate, [n, S F] float64."""
    assert rows.chosen is not None
    return (rows.state.double().unsqueeze(2) * rows.chosen.double().unsqueeze(1)).flatten(1)


def _by_action(
    x: Tensor, targets: Tensor, rows: Decisions, actions: list[int]
) -> Iterator[tuple[int, Tensor, Regression]]:
    """Yields (action, its row numbers, regression of these rows); actions without rows are left out."""
    for action in actions:
        numbers = (rows.action == action).nonzero().squeeze(1)
        if len(numbers):
            regression = Regression(x=x[numbers], targets=targets[:, numbers], fold=rows.fold[numbers])
            yield action, numbers, regression


def _fit_trees(rows: Decisions, outputs: int, settings: TreeSettings, rounding: float) -> tuple[Forest | None, float]:
    """Returns trees that predict `rows.reward`, and by how much they lower the mean squared error of unseen rows.

    None and 0 if they do not lower it for certain.

    Args:
        rows: the rows, with what the linear model leaves as the reward.
        outputs: number of named actions; 1 for candidates.
        settings: parameters of the trees.
        rounding: a gain that may be one of rounding.
    """
    most = max(min(settings.most, _MOST_TREES // outputs), 1)
    inputs = rows.inputs.numpy()
    target = rows.reward.numpy()
    fold = rows.fold.numpy()
    by_output = [(rows.action == action).nonzero().squeeze(1).numpy() for action in range(outputs)]
    enough = sorted((numbers for numbers in by_output if len(numbers) >= _FEWEST_ROWS), key=len, reverse=True)
    if not inputs.shape[1] or not enough:
        return None, 0.0

    def gains(numbers: NDArray[np.int64], count: int) -> Iterator[NDArray[np.float64]]:
        """Yields [count, n]: by how much 1, 2, ... trees lower the squared errors of an action's rows, fold by fold."""
        for f in range(FOLDS):
            fitted = numbers[fold[numbers] != f]
            unseen = numbers[fold[numbers] == f]
            if len(unseen) and len(fitted):
                predicted = _cumulated(grow_trees(inputs[fitted], target[fitted], count, settings), inputs[unseen])
                yield target[unseen] ** 2 - (target[unseen] - predicted) ** 2

    sums = np.zeros((2, most))
    tried = 0
    for numbers in enough[:_PENALTY_ACTIONS]:
        for gain in gains(numbers, most):
            sums += gain.sum(1), np.square(gain).sum(1)
            tried += gain.shape[1]
    mean, square = sums / max(tried, 1)
    best = int(mean.argmax())
    error = math.sqrt(max(square[best] - mean[best] ** 2, 0.0) / max(tried, 1))
    if not mean[best] > max(_CERTAIN * error, rounding):
        return None, 0.0
    others = sum(gain[-1].sum() for numbers in enough[_PENALTY_ACTIONS:] for gain in gains(numbers, best + 1))
    forests = [
        grow_trees(inputs[numbers], target[numbers], best + 1, settings)
        if len(numbers) >= _FEWEST_ROWS
        else _zero_trees(best + 1, settings.depth)
        for numbers in by_output
    ]
    feature, threshold, value = (torch.cat(parts) for parts in zip(*forests, strict=True))
    return Forest(feature, threshold, value, outputs=outputs), float((sums[0, best] + others) / len(target))


Trees = tuple[Tensor, Tensor, Tensor]
"""Features, thresholds and values of trees; see `Forest`."""


def grow_trees(inputs: NDArray[np.float32], target: NDArray[np.float64], count: int, settings: TreeSettings) -> Trees:
    """Returns `count` trees, each fitted to what those before leave."""
    import lightgbm  # an extra: `needing` has found it

    parameters = settings.parameters()
    data = lightgbm.Dataset(inputs, target, params=parameters)
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


def _cumulated(trees: Trees, inputs: NDArray[np.float32]) -> NDArray[np.float64]:
    """Returns [count, n]: the sums of the first 1, 2, ... trees."""
    return tree_values(torch.from_numpy(inputs), *trees).double().cumsum(1).T.numpy()


def explained(error: float, constant: float) -> str:
    """Returns the share of a variance that a model explains, in words."""
    return f"{1 - error / constant:.2%}" if constant > 0 else "nothing"
