"""The TorchScript file: the call contract of 2019, for programs that load it with torch.jit.load.

    discrete    module((values [N, F], presence [N, F])) -> (action names, q [N, A])
    parametric  module((state values, presence), (action values, presence)) -> (["Q"], q [N, 1]), one row per pair

With BCQ a choice that the log hardly takes has q - 1e10, as in 2019, so that the largest q of the file is what the
policy takes; which those are depends on all choices of the state.

The scorer is traced, so it may be any Python; the preprocessor and what the contract asks for beyond tensors (tuples,
names, the refusal of infinity, lists of candidates) are scripted.
"""

from typing import Final

import torch
from torch import Tensor, nn

from reagent_lite.export.predictor import DiscretePredictor, ParametricPredictor, Predictor

FeaturesWithPresence = tuple[Tensor, Tensor]
_EXAMPLE_ROWS: Final = 3
_EXAMPLE_CANDIDATES: Final = 2
EXCLUDED: Final = 1e10
"""What q of an excluded choice is lowered by; float32 keeps nothing of q itself then."""


class DiscreteModule(nn.Module):
    """Discrete call contract around a predictor's parts."""

    action_names: list[str]
    state_ids: list[int]

    def __init__(self, predictor: DiscretePredictor) -> None:
        super().__init__()
        self.action_names = list(predictor.action_names)
        self.state_ids = list(predictor.state_feature_ids)
        self.state_preprocessor = predictor.state_preprocessor
        state = _normalized(predictor.state_preprocessor, len(self.state_ids))
        mask = torch.ones(_EXAMPLE_ROWS, len(self.action_names), dtype=torch.bool)
        self.scorer = _traced(_StateScorer(_served(predictor)), (state, mask))

    def forward(self, state_with_presence: tuple[Tensor, Tensor]) -> tuple[list[str], Tensor]:
        """Returns the action names and q [N, A] with every action open."""
        values, presence = state_with_presence
        state = self.state_preprocessor(values, _present(values, presence))
        mask = torch.ones((values.shape[0], len(self.action_names)), dtype=torch.bool, device=values.device)
        return self.action_names, self.scorer(state, mask)

    @torch.jit.export
    def state_sorted_features(self) -> list[int]:
        """Returns the ids of the state's columns."""
        return self.state_ids

    @torch.jit.export
    def action_sorted_features(self) -> list[int]:
        """Returns the ids of a candidate's columns: none, actions are fixed."""
        none: list[int] = []
        return none


class ParametricModule(nn.Module):
    """Parametric call contract around a predictor's parts.

    Rows whose preprocessed states are equal are the candidates of one state, as far as their q asks for lists.
    """

    state_ids: list[int]
    action_ids: list[int]
    lists: Final[bool]

    def __init__(self, predictor: ParametricPredictor) -> None:
        super().__init__()
        self.state_ids = list(predictor.state_feature_ids)
        self.action_ids = list(predictor.action_feature_ids)
        self.lists = needs_candidate_list(predictor)
        self.state_preprocessor = predictor.state_preprocessor
        state = _normalized(predictor.state_preprocessor, len(self.state_ids))
        self.action_preprocessor = predictor.action_preprocessor
        action = _normalized(predictor.action_preprocessor, len(self.action_ids))
        features = action.unsqueeze(1).expand(-1, _EXAMPLE_CANDIDATES, -1).contiguous()
        example = (state, torch.ones(features.shape[:2], dtype=torch.bool), features)
        self.scorer = _traced(_served(predictor), example)

    def forward(
        self, state_with_presence: tuple[Tensor, Tensor], action_with_presence: tuple[Tensor, Tensor]
    ) -> tuple[list[str], Tensor]:
        """Returns ["Q"] and q [N, 1] of N pairs."""
        state_values, state_presence = state_with_presence
        action_values, action_presence = action_with_presence
        state = self.state_preprocessor(state_values, _present(state_values, state_presence))
        action = self.action_preprocessor(action_values, _present(action_values, action_presence))
        if self.lists and state.shape[0] > 0:
            states, features, mask, group, place = candidate_lists(state, action)
            q = self.scorer(states, mask, features)[group, place].unsqueeze(1)
        else:
            alone = torch.ones((state.shape[0], 1), dtype=torch.bool, device=state.device)
            q = self.scorer(state, alone, action.unsqueeze(1))
        return ["Q"], q

    @torch.jit.export
    def state_sorted_features(self) -> list[int]:
        """Returns the ids of the state's columns."""
        return self.state_ids

    @torch.jit.export
    def action_sorted_features(self) -> list[int]:
        """Returns the ids of a candidate's columns."""
        return self.action_ids


def needs_candidate_list(predictor: Predictor) -> bool:
    """Returns whether the q of a candidate depends on the other candidates of its state."""
    return predictor.threshold is not None or bool(getattr(predictor.scorer, "needs_candidate_list", False))


def candidate_lists(state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gathers pairs with equal states into one list of candidates per state; memory is G * K * W.

    Args:
        state: [N, S], N at least 1.
        action: [N, W].

    Returns:
        states [G, S], features [G, K, W], mask [G, K]; and of each pair its state [N] and its place in the list [N].
    """
    states, group, counts = torch.unique(state, dim=0, return_inverse=True, return_counts=True)
    order = torch.argsort(group, stable=True)
    starts = torch.cumsum(counts, 0) - counts
    place = torch.empty_like(group)
    place[order] = torch.arange(state.shape[0], device=state.device) - starts[group[order]]
    longest = int(counts.max())
    features = torch.zeros((states.shape[0], longest, action.shape[1]), dtype=action.dtype, device=action.device)
    features[group, place] = action
    mask = torch.arange(longest, device=state.device).unsqueeze(0) < counts.unsqueeze(1)
    return states, features, mask, group, place


class _Restricted(nn.Module):
    """A scorer whose q says what the restriction excludes."""

    def __init__(self, scorer: nn.Module, restriction: nn.Module) -> None:
        super().__init__()
        self.scorer = scorer
        self.restriction = restriction

    def forward(self, state: Tensor, mask: Tensor, features: Tensor | None) -> Tensor:
        q: Tensor = self.scorer(state, mask, features)
        return torch.where(self.restriction(state, mask, features), q, q - EXCLUDED)


class _StateScorer(nn.Module):
    """A trace has no None: this binds it."""

    def __init__(self, scorer: nn.Module) -> None:
        super().__init__()
        self.scorer = scorer

    def forward(self, state: Tensor, mask: Tensor) -> Tensor:
        return self.scorer(state, mask, None)  # type: ignore[no-any-return]


def _served(predictor: Predictor) -> nn.Module:
    if predictor.threshold is None:
        return predictor.scorer
    return _Restricted(predictor.scorer, predictor.restriction)


def _normalized(preprocessor: nn.Module, num_features: int) -> Tensor:
    """Returns [3, W], the preprocessor's output to trace the scorer with."""
    shape = (_EXAMPLE_ROWS, num_features)
    return preprocessor(torch.zeros(shape), torch.ones(shape, dtype=torch.bool))  # type: ignore[no-any-return]


def _traced(module: nn.Module, example: tuple[Tensor, ...]) -> nn.Module:
    # torch's own check would compare on the example; the file's check compares on many rows
    traced: nn.Module = torch.jit.trace(module, example, check_trace=False)  # type: ignore[no-untyped-call]
    return traced


def _present(values: Tensor, presence: Tensor) -> Tensor:
    present = presence.to(torch.bool)
    if bool((torch.isinf(values) & present).any()):
        raise ValueError("expected finite features or NaN for missing ones, got infinity")
    return present
