"""Who gets what under a policy, who gains and who loses, and which features its decisions depend on.

scored rows ─┬─► a tree on the policy's choices, tested on rows that did not grow it ──┐
             ├─► segments with the policy's effect and the shares of choices ──────────┼─► Explanation
             └─► choices once a feature's values are shuffled among rows ──────────────┘

Everything is about raw features, as they are in the log. Candidates have features instead of names: the tree predicts
the probability that a candidate is chosen, and its leaves are the kinds of candidates whose shares are shown.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reagent_lite.algorithms.reward_and_q_models import PolicyProbabilities
from reagent_lite.data.copy.training_copy import TrainingCopy
from reagent_lite.evaluation.candidates import gather_candidate_features
from reagent_lite.evaluation.cpe import WEIGHTED, limit
from reagent_lite.evaluation.evaluation_rows import EvaluationRows
from reagent_lite.evaluation.scored_episodes import spread
from reagent_lite.evaluation.segment import StateFeatures, categories_of
from reagent_lite.evaluation.segment_effects import EffectSettings, Segments, choosing_rows, effects_by_segment
from reagent_lite.evaluation.small_tree import WITHOUT_SPLITS, SmallTree, grow_tree
from reagent_lite.types import Actions

_MOST_LEAVES = 7
_LEAST_GAIN = 0.01  # of the deviations of the policy's probabilities, for a further leaf
_FEWEST = 20  # rows, or candidates, in a leaf
_MOST_ROWS = 20_000  # that grow the tree, and that test it
_MOST_VALUES = 1 << 23  # features of these rows, 32 MB
_MOST_TARGETS = 15  # actions that the tree tells apart; the others count as one
_NAMED_CHOICES = 10  # of a leaf or a segment
_SHUFFLED_ROWS = 2_000
_FEWEST_SHUFFLED = 100
_SHUFFLED_VALUES = 4_000_000  # rows times features times candidates that a policy is asked for
_CANDIDATE = "candidate "
_NO_LOG = "there is no log: who gains is known only where decisions were logged"
_NO_ROWS = "no rows of the log were scored on this machine"
_UNKNOWN = "only the probability of the logged action is known, not what the policy does otherwise"
_IMAGES = "states are images, which have no features to name groups of rows by"
_TOO_FEW = "too few rows: some choose the segments, others give the intervals"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyGroup:
    """Rows with similar choices of the policy: a leaf of the tree, or a segment.

    Attributes:
        words: which rows, or candidates, are in the group.
        share: the group's share of rows; for a kind of candidates, its share of the policy's choices.
        choices: {choice: (share in the log, mean probability under the policy)} of the rows in the group, the most
            frequent ones first; choices are names of actions, or kinds of candidates in words.
        probability: mean probability that the policy chooses a candidate of this kind; None for rows.
    """

    words: str
    share: float
    choices: Mapping[str, tuple[float, float]]
    probability: float | None = None

    def json(self) -> dict[str, Any]:
        """Returns the group as JSON types."""
        shares = {name: {"logged": logged, "policy": policy} for name, (logged, policy) in self.choices.items()}
        return {"rows_with": self.words, "share": self.share, "choices": shares} | (
            {} if self.probability is None else {"probability": self.probability}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTree:
    """A policy as a small tree over raw features.

    Attributes:
        leaves: the leaves, in the order of the tree.
        fidelity: mean probability under the policy of the choice that the tree predicts, on rows that did not grow it.
        best: the same for the policy's likeliest choice: no tree can reach more.
        constant: the same for a tree without splits.
        rows: number of these rows.
    """

    leaves: tuple[PolicyGroup, ...]
    fidelity: float
    best: float
    constant: float
    rows: int

    def json(self) -> dict[str, Any]:
        """Returns the tree as JSON types."""
        return {
            "fidelity": self.fidelity,
            "best_possible_fidelity": self.best,
            "fidelity_without_splits": self.constant,
            "tested_on_rows": self.rows,
            "leaves": [leaf.json() for leaf in self.leaves],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Importance:
    """How much a policy's decisions depend on each feature.

    Attributes:
        changes: {feature: share of decisions that change if its values are shuffled among rows}, the largest first.
            Of probabilities, a change is half the sum of their absolute differences.
        rows: number of rows that were asked.
        of_tree: whether the small tree was asked, as the policy is a column of probabilities.
    """

    changes: Mapping[str, float]
    rows: int
    of_tree: bool

    def json(self) -> dict[str, Any]:
        """Returns the importance as JSON types."""
        return {"rows": self.rows, "of_the_tree": self.of_tree, "changes": dict(self.changes)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Who gets what, who gains and who loses.

    Attributes:
        tree: the policy as a tree; None if unknown.
        segments: effects by segment; None if unknown.
        choices: choices in each segment, in the order of the segments; empty if unknown.
        importance: dependence on features; None if unknown.
        absent: {part: why it is missing}.
    """

    tree: PolicyTree | None = None
    segments: Segments | None = None
    choices: tuple[PolicyGroup, ...] = ()
    importance: Importance | None = None
    absent: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def without_log(cls) -> "Explanation":
        """Returns the explanation of a policy that was only played."""
        return cls(absent=dict.fromkeys(("tree", "segments", "importance"), _NO_LOG))

    def json(self) -> dict[str, Any]:
        """Returns all parts as JSON types."""
        segments = None if self.segments is None else self.segments.json()
        if segments is not None:
            for segment, group in zip(segments["segments"], self.choices, strict=False):
                segment["choices"] = group.json()["choices"]
        return {
            "tree": None if self.tree is None else self.tree.json(),
            "effects": segments,
            "importance": None if self.importance is None else self.importance.json(),
            "absent": dict(self.absent),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """How a policy reads features.

    Attributes:
        probabilities: maps states and choices to probabilities [B, K]; None if it is not a function of features.
        complete: whether the page has the policy's probabilities of all choices.
        take: returns states [n, S] and choices of rows [n], as `probabilities` takes them.
        state: columns of the state that each state feature of the log fills.
        candidate: columns of a candidate that each of its features fills.
    """

    probabilities: PolicyProbabilities | None
    complete: bool
    take: Callable[[Tensor], tuple[Tensor, Actions]]
    state: Sequence[Sequence[int]]
    candidate: Sequence[Sequence[int]] = ()


def explain(page: EvaluationRows, copy: TrainingCopy, reader: Reader, settings: EffectSettings) -> Explanation:
    """Explains a policy on the scored rows of the first process's training copy.

    Args:
        page: the scored rows.
        copy: the training copy that `page.number` refers to.
        reader: how the policy reads features.
        settings: settings of the evaluation.
    """
    if page.number is None or not bool((page.number >= 0).any()):
        return Explanation(absent=dict.fromkeys(("tree", "segments", "importance"), _NO_ROWS))
    page, _ = limit(page, settings.config)
    assert page.number is not None
    numbered = page.number >= 0
    page = page if bool(numbered.all()) else page.rows(numbered.nonzero().squeeze(1))
    if copy.has_images:
        return Explanation(absent=dict.fromkeys(("tree", "segments", "importance"), _IMAGES))
    features = StateFeatures.of(copy)
    absent = {}
    segments = None
    if set(WEIGHTED) <= set(settings.missing):
        absent["segments"] = settings.missing[WEIGHTED[0]]
    else:
        segments = effects_by_segment(page, features, settings)
        if segments is None:
            absent["segments"] = _TOO_FEW
    if not reader.complete:
        return Explanation(segments=segments, absent=absent | {"tree": _UNKNOWN, "importance": _UNKNOWN})
    choices = _LoggedChoices(page, copy, features)
    tree = choices.tree()
    return Explanation(
        tree=choices.policy_tree(tree),
        segments=segments,
        choices=() if segments is None else choices.choices_of(segments, tree),
        importance=_importance(choices, tree, reader, np.random.default_rng(settings.seed)),
        absent=absent,
    )


class _LoggedChoices:
    """Raw features and choices of rows, which are read only as far as they are needed.

    Args:
        page: rows of the copy.
        copy: their training copy.
        features: its state features.
    """

    def __init__(self, page: EvaluationRows, copy: TrainingCopy, features: StateFeatures) -> None:
        self.page = page
        self.copy = copy
        self.features = features
        self.parametric = copy.parametric
        if self.parametric:
            self.features = _with_candidates(features, copy)
        width = len(self.features.names) * (page.mask.shape[1] if self.parametric else 1)
        self._most = max(min(_MOST_ROWS, _MOST_VALUES // max(width, 1)), 1)
        choosing = choosing_rows(page)
        self.grown = spread(np.flatnonzero(choosing), self._most)
        self.tested = spread(np.flatnonzero(~choosing), self._most)

    def numbers(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the numbers in the copy of rows of the page, [n]."""
        assert self.page.number is not None
        return self.page.number.numpy()[rows]

    def probabilities(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Returns the policy's probabilities, [n, K]."""
        return self.page.model_propensities[torch.from_numpy(rows)].numpy()

    def mark_logged(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Returns 1 for the logged choice and 0 for others, [n, K]."""
        ones = np.zeros((len(rows), self.page.mask.shape[1]))
        ones[np.arange(len(rows)), self.page.action.numpy()[rows]] = 1.0
        return ones

    def values(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Returns raw features, [n, F]; for candidates [n, K, F], with those of the state first."""
        numbers = self.numbers(rows)
        return self.join_features(self.features_of_state(numbers), self.candidates_of(numbers))

    def features_of_state(self, numbers: NDArray[np.int64]) -> NDArray[np.float32]:
        """Returns raw state features [n, S]."""
        return np.asarray(self.copy.state[numbers], np.float32)

    def candidates_of(self, numbers: NDArray[np.int64]) -> NDArray[np.float32] | None:
        """Returns raw features of candidates [n, K, C]; None for named actions."""
        if not self.parametric:
            return None
        return gather_candidate_features(self.copy, numbers, self.copy.action_ids, self.page.mask.shape[1])

    @staticmethod
    def join_features(state: NDArray[np.float32], candidates: NDArray[np.float32] | None) -> NDArray[np.float32]:
        """Returns features of states [n, S], or [n, K, S + C] with those of candidates [n, K, C]."""
        if candidates is None:
            return state
        repeated = np.broadcast_to(state[:, None], (*candidates.shape[:2], state.shape[1]))
        return np.concatenate((repeated, candidates), 2)

    def tree(self) -> SmallTree:
        """Returns a tree on the policy's choices in a third of the rows."""
        values = self.values(self.grown)
        targets = self.probabilities(self.grown)
        if self.parametric:
            allowed = self.page.mask.numpy()[self.grown]
            values = values[allowed]
            targets = targets[allowed][:, None]
        elif targets.shape[1] > _MOST_TARGETS:
            order = np.argsort(-targets.sum(0), kind="stable")
            rest = targets[:, order[_MOST_TARGETS:]].sum(1, keepdims=True)
            targets = np.concatenate((targets[:, order[:_MOST_TARGETS]], rest), 1)
        return grow_tree(
            self.features,
            values,
            targets,
            leaves=_MOST_LEAVES,
            fewest=max(_FEWEST, len(values) // 100),
            least_gain=_LEAST_GAIN,
        )

    def leaves(self, tree: SmallTree, values: NDArray[np.float32]) -> NDArray[np.int64]:
        """Returns the leaf of each row [n], or of each candidate [n, K], given `values`."""
        return tree.leaf_of(values.reshape(-1, values.shape[-1])).reshape(values.shape[:-1])

    def predict(self, tree: SmallTree) -> NDArray[np.float64]:
        """Returns the mean probabilities in each leaf, [leaves, K], or [leaves] for candidates, of growing rows."""
        leaf = self.leaves(tree, self.values(self.grown))
        probabilities = self.probabilities(self.grown)
        if self.parametric:
            allowed = self.page.mask.numpy()[self.grown]
            leaf = leaf[allowed]
            probabilities = probabilities[allowed]
        count = len(tree.leaves)
        sums = np.zeros((count, *probabilities.shape[1:]))
        np.add.at(sums, leaf, probabilities)
        sizes = np.bincount(leaf, minlength=count).clip(min=1)
        return np.asarray(sums / (sizes if self.parametric else sizes[:, None]))

    def choose(
        self, predicted: NDArray[np.float64], leaf: NDArray[np.int64], mask: NDArray[np.bool_]
    ) -> NDArray[np.float64]:
        """Returns the tree's choice as probabilities [n, K], equal ones for choices that it does not tell apart.

        Args:
            predicted: result of `predicted`.
            leaf: result of `leaves`.
            mask: [n, K] allowed choices.
        """
        scores = np.where(mask, predicted[leaf], -1.0)
        likeliest = (scores >= scores.max(1, keepdims=True)) & mask
        return np.asarray(likeliest / likeliest.sum(1, keepdims=True).clip(min=1))

    def policy_tree(self, tree: SmallTree) -> PolicyTree:
        """Returns the tree with its fidelity on rows that did not grow it."""
        rows = self.tested if len(self.tested) else self.grown
        leaf = self.leaves(tree, self.values(rows))
        return PolicyTree(
            leaves=tuple(self._leaf(tree, index, rows, leaf == index) for index in range(len(tree.leaves))),
            fidelity=self._fidelity(tree, rows, leaf),
            best=float(self.probabilities(rows).max(1).mean()),
            constant=self._fidelity(WITHOUT_SPLITS, rows, np.zeros_like(leaf)),
            rows=len(rows),
        )

    def policy_of(self, tree: SmallTree) -> PolicyProbabilities:
        """Returns the tree as a policy that reads raw features."""
        predicted = self.predict(tree)

        def policy(state: Tensor, actions: Actions) -> Tensor:
            candidates = None if actions.features is None else actions.features.numpy()
            leaf = self.leaves(tree, self.join_features(state.numpy(), candidates))
            return torch.from_numpy(self.choose(predicted, leaf, actions.mask.numpy()))

        return policy

    def _fidelity(self, tree: SmallTree, rows: NDArray[np.int64], leaf: NDArray[np.int64]) -> float:
        chosen = self.choose(self.predict(tree), leaf, self.page.mask.numpy()[rows])
        return float((self.probabilities(rows) * chosen).sum(1).mean())

    def _leaf(self, tree: SmallTree, index: int, rows: NDArray[np.int64], inside: NDArray[np.bool_]) -> PolicyGroup:
        if not self.parametric:
            return self._group(tree.words[index], rows[inside], float(inside.mean()))
        inside &= self.page.mask.numpy()[rows]
        policy = self.probabilities(rows)
        logged = float((self.mark_logged(rows) * inside).sum(1).mean())
        share = float((policy * inside).sum(1).mean())
        probability = float(policy[inside].mean()) if inside.any() else 0.0
        words = tree.words[index]
        return PolicyGroup(words=words, share=share, choices={words: (logged, share)}, probability=probability)

    def _group(self, words: str, rows: NDArray[np.int64], share: float) -> PolicyGroup:
        """Returns named actions of the rows of a group."""
        names = self.copy.action_names
        count = max(len(rows), 1)
        logged = np.bincount(self.page.action.numpy()[rows], minlength=len(names)) / count
        policy = self.probabilities(rows).sum(0) / count
        most = np.argsort(-np.maximum(logged, policy), kind="stable")[:_NAMED_CHOICES]
        choices = {names[k]: (float(logged[k]), float(policy[k])) for k in most if logged[k] + policy[k] > 0}
        return PolicyGroup(words=words, share=share, choices=choices)

    def choices_of(self, segments: Segments, tree: SmallTree) -> tuple[PolicyGroup, ...]:
        """Returns the choices in each segment: of named actions, or of kinds of candidates, which the tree has."""
        groups = []
        for index, effect in enumerate(segments.effects):
            rows = np.flatnonzero(segments.segment == index)
            if not self.parametric:
                groups.append(self._group(effect.words, rows, effect.share))
                continue
            rows = spread(rows, max(self._most // len(segments.effects), 1))
            leaf = self.leaves(tree, self.values(rows))
            logged = self.mark_logged(rows)
            policy = self.probabilities(rows)
            shares = {
                words: (float((logged * (leaf == kind)).sum(1).mean()), float((policy * (leaf == kind)).sum(1).mean()))
                for kind, words in enumerate(tree.words)
            }
            groups.append(PolicyGroup(words=effect.words, share=effect.share, choices=shares))
        return tuple(groups)


def _with_candidates(features: StateFeatures, copy: TrainingCopy) -> StateFeatures:
    """Returns the names and strings of state features, followed by those of candidates; without values."""
    of_candidates = categories_of(copy, "action", copy.action_ids)
    first = len(features.names)
    return StateFeatures(
        names=(*features.names, *(f"{_CANDIDATE}{feature}" for feature in copy.action_ids)),
        values=np.zeros((0, 0), np.float32),
        texts=features.texts | {first + column: texts for column, texts in of_candidates.items()},
        of_ids=features.of_ids
        | {first + column for column, name in enumerate(copy.action_ids) if name in copy.feature_of_column},
    )


def _importance(choices: _LoggedChoices, tree: SmallTree, reader: Reader, generator: np.random.Generator) -> Importance:
    """Returns how many decisions change if a feature's values are shuffled among rows."""
    names = choices.features.names
    width = len(names) * (choices.page.mask.shape[1] if choices.parametric else 1)
    most = min(max(_SHUFFLED_VALUES // max(width * len(names), 1), _FEWEST_SHUFFLED), _SHUFFLED_ROWS)
    rows = spread(np.arange(len(choices.page)), most)
    numbers = choices.numbers(rows)
    if reader.probabilities is None:
        candidates = choices.candidates_of(numbers)
        features = None if candidates is None else torch.from_numpy(candidates)
        state = torch.from_numpy(choices.features_of_state(numbers))
        actions = Actions(mask=choices.page.mask[torch.from_numpy(rows)], features=features)
        policy = choices.policy_of(tree)
        of_state = state.shape[1]
        columns: list[Sequence[int]] = [
            [index if index < of_state else index - of_state] for index in range(len(names))
        ]
    else:
        state, actions = reader.take(torch.from_numpy(numbers))
        policy = reader.probabilities
        columns = [*reader.state, *reader.candidate]
    before = policy(state, actions)
    changes = {}
    for name, (index, filled) in _by_feature(choices, columns, len(reader.state)).items():
        shuffled = _shuffle(state, actions, filled, generator, of_candidates=index >= len(reader.state))
        change = 0.0 if shuffled is None else float((policy(*shuffled) - before).abs().sum(1).mean()) / 2
        changes[name] = change
    ordered = sorted(changes.items(), key=lambda change: -change[1])
    return Importance(changes=dict(ordered), rows=len(rows), of_tree=reader.probabilities is None)


def _by_feature(
    choices: _LoggedChoices, columns: Sequence[Sequence[int]], of_state: int
) -> dict[str, tuple[int, list[int]]]:
    """Returns {feature: (its first column in the log, all columns that it fills)}.

    Args:
        choices: the choices, whose features have a column in the log each, or several if their values are ids.
        columns: columns that each column of the log fills.
        of_state: number of columns of the state.
    """
    copy = choices.copy
    ids = [*copy.state_ids, *(copy.action_ids if choices.parametric else ())]
    result: dict[str, tuple[int, list[int]]] = {}
    for index, (name, column, filled) in enumerate(zip(choices.features.names, ids, columns, strict=True)):
        feature = copy.feature_of_column.get(column)
        if feature is not None:
            name = f"{'' if index < of_state else _CANDIDATE}{feature}"
        result.setdefault(name, (index, []))[1].extend(filled)
    return result


def _shuffle(
    state: Tensor, actions: Actions, columns: list[int], generator: np.random.Generator, *, of_candidates: bool
) -> tuple[Tensor, Actions] | None:
    """Returns states and choices with shuffled columns; None if all values are equal."""
    features = actions.features
    values = features[actions.mask] if of_candidates and features is not None else state
    part = values[:, columns]
    if not len(part) or bool(((part == part[0]) | (part.isnan() & part[0].isnan())).all()):
        return None
    order = torch.from_numpy(generator.permutation(len(part))).to(part.device)
    values = values.clone()
    values[:, columns] = part[order]
    if not of_candidates or features is None:
        return values, actions
    whole = features.clone()
    whole[actions.mask] = values
    return state, Actions(mask=actions.mask, features=whole)
