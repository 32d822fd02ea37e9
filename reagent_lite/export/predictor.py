"""The exported module: from raw features to q, choice and propensities.

    values, presence ─► preprocessor ─► scorer ──────► q ───────► greedy, propensities         DiscretePredictor
    image ──────────────────────────────┘                                                      ImagePredictor
    candidates       ─► preprocessor ─► restriction ─► choices ─┘                              ParametricPredictor

NaN is a missing feature; infinity in a present feature is refused. A graph cannot raise an error, so q of such a row is
NaN, its choice -1 and its propensities 0. Readers of the exported files raise an error instead.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from reagent_lite.feature_ids import id_of
from reagent_lite.models.restrictions import Unrestricted
from reagent_lite.rl.policies import LOWEST, TargetPolicy
from reagent_lite.types import Image

Inputs = tuple[Tensor, ...]
Outputs = tuple[Tensor, Tensor, Tensor, Tensor]
Axes = tuple[str | int, ...]
Pair = tuple[NDArray[np.float32], NDArray[np.float32]]
Replay = Callable[[Inputs], Pair]
"""Returns q of the live predictor and q of a file for some inputs; both have the same shape."""


class Predictor(nn.Module):
    """Base of the predictors: their parts, and the inputs and outputs of the exported graph.

    Attributes:
        state_preprocessor: forward(values [..., F] float32, presence [..., F] bool) -> [..., W].
        scorer: forward(state [N, W], mask [N, K] bool, features [N, K, W'] or None) -> q [N, K].
        state_feature_ids: ids of the raw state's columns.
        action_feature_ids: ids of a raw candidate's columns; empty with named actions.
        action_names: names of the actions in output order; empty with candidates.
        policy: computes the propensities.
        restriction: forward(state, mask, features) -> choices [N, K] bool, those of the mask that the policy may take.
        image: the image that a raw state is; None if it has features.
    """

    image: Image | None = None

    def __init__(
        self,
        state_preprocessor: nn.Module,
        scorer: nn.Module,
        state_feature_ids: Sequence[int],
        policy: TargetPolicy,
        restriction: nn.Module | None,
    ) -> None:
        super().__init__()
        self.state_preprocessor = state_preprocessor
        self.scorer = scorer
        self.state_feature_ids = tuple(state_feature_ids)
        self.action_feature_ids: tuple[int, ...] = ()
        self.action_names: tuple[str, ...] = ()
        self.policy = policy
        self.restriction = restriction or Unrestricted()

    @property
    def inputs(self) -> dict[str, Axes]:
        """Axes of each argument of `forward`; an axis is a size, or a name if the size varies."""
        raise NotImplementedError

    @property
    def outputs(self) -> dict[str, Axes]:
        """Axes of each result of `forward`."""
        choices = self.inputs["action_mask"]
        return {"q": choices, "greedy": choices[:1], "propensities": choices, "choices": choices}

    @property
    def threshold(self) -> float | None:
        """Smallest probability in the log, relative to the likeliest choice; None without a restriction."""
        return getattr(self.restriction, "threshold", None)

    @property
    def parametric(self) -> bool:
        """Whether choices are candidates with features."""
        return not self.action_names


class DiscretePredictor(Predictor):
    """Values of all A actions from a raw state."""

    def __init__(
        self,
        state_preprocessor: nn.Module,
        scorer: nn.Module,
        *,
        state_feature_ids: Sequence[int],
        action_names: Sequence[str],
        policy: TargetPolicy,
        restriction: nn.Module | None = None,
    ) -> None:
        super().__init__(state_preprocessor, scorer, state_feature_ids, policy, restriction)
        self.action_names = tuple(action_names)

    @property
    def inputs(self) -> dict[str, Axes]:
        """Axes of each argument of `forward`."""
        state = ("rows", len(self.state_feature_ids))
        return {"values": state, "presence": state, "action_mask": ("rows", len(self.action_names))}

    def forward(self, values: Tensor, presence: Tensor, action_mask: Tensor) -> Outputs:
        """Scores the actions of each row and chooses among those allowed.

        Args:
            values: [N, F] float32 raw features, columns as in `state_feature_ids`.
            presence: [N, F] bool.
            action_mask: [N, A] bool, true where the action is allowed.

        Returns:
            q [N, A] of all actions, allowed or not; greedy [N] int64, the lowest index of the largest q among the
            choices, -1 if there is none; propensities [N, A] of the policy over the choices; choices [N, A] bool, the
            allowed actions that the restriction leaves, none in a refused row.
        """
        state = self.state_preprocessor(values, presence)
        q = self.scorer(state, action_mask, None)
        refused = infinite(values, presence).any(1)
        return choose_actions(q, self.restriction(state, action_mask, None), refused, self.policy)


class ImagePredictor(Predictor):
    """Values of all A actions from an image."""

    def __init__(
        self,
        scorer: nn.Module,
        *,
        image: Image,
        action_names: Sequence[str],
        policy: TargetPolicy,
        restriction: nn.Module | None = None,
    ) -> None:
        super().__init__(nn.Identity(), scorer, [id_of("image")], policy, restriction)
        self.image = image
        self.action_names = tuple(action_names)

    @property
    def inputs(self) -> dict[str, Axes]:
        """Axes of each argument of `forward`."""
        assert self.image is not None
        return {"image": ("rows", *self.image.shape), "action_mask": ("rows", len(self.action_names))}

    def forward(self, image: Tensor, action_mask: Tensor) -> Outputs:
        """Scores the actions of each row and chooses among those allowed.

        Args:
            image: [N, *shape] uint8.
            action_mask: [N, A] bool, true where the action is allowed.

        Returns:
            q [N, A], greedy [N], propensities [N, A] and choices [N, A] as in `DiscretePredictor`.
        """
        state = image.flatten(1)
        q = self.scorer(state, action_mask, None)
        none = torch.zeros_like(action_mask[:, 0])
        return choose_actions(q, self.restriction(state, action_mask, None), none, self.policy)


class ParametricPredictor(Predictor):
    """Values of each row's K candidates from a raw state and raw candidates."""

    def __init__(
        self,
        state_preprocessor: nn.Module,
        action_preprocessor: nn.Module,
        scorer: nn.Module,
        *,
        state_feature_ids: Sequence[int],
        action_feature_ids: Sequence[int],
        policy: TargetPolicy,
        restriction: nn.Module | None = None,
    ) -> None:
        super().__init__(state_preprocessor, scorer, state_feature_ids, policy, restriction)
        self.action_preprocessor = action_preprocessor
        self.action_feature_ids = tuple(action_feature_ids)

    @property
    def inputs(self) -> dict[str, Axes]:
        """Axes of each argument of `forward`."""
        state = ("rows", len(self.state_feature_ids))
        action = ("rows", "candidates", len(self.action_feature_ids))
        return {
            "state_values": state,
            "state_presence": state,
            "action_values": action,
            "action_presence": action,
            "action_mask": ("rows", "candidates"),
        }

    def forward(
        self,
        state_values: Tensor,
        state_presence: Tensor,
        action_values: Tensor,
        action_presence: Tensor,
        action_mask: Tensor,
    ) -> Outputs:
        """Scores the candidates of each row and chooses among those allowed.

        Args:
            state_values: [N, S] float32 raw features, columns as in `state_feature_ids`.
            state_presence: [N, S] bool.
            action_values: [N, K, F] float32 raw features, columns as in `action_feature_ids`.
            action_presence: [N, K, F] bool.
            action_mask: [N, K] bool, false for forbidden candidates and for padding.

        Returns:
            q [N, K], greedy [N], propensities [N, K] and choices [N, K] as in `DiscretePredictor`; q is undefined for
            padding.
        """
        infinite_features = infinite(action_values, action_presence)
        in_candidates = (infinite_features & action_mask.unsqueeze(2)).any(2).any(1)
        # infinity in padding must not reach sums over candidates: infinity * 0 is NaN
        usable = action_presence & ~infinite_features
        in_state = infinite(state_values, state_presence).any(1)
        state = self.state_preprocessor(state_values, state_presence)
        features = self.action_preprocessor(action_values, usable)
        q = self.scorer(state, action_mask, features)
        choices = self.restriction(state, action_mask, features)
        return choose_actions(q, choices, in_state | in_candidates, self.policy)


def infinite(values: Tensor, presence: Tensor) -> Tensor:
    """Returns whether each value is present and infinite."""
    return torch.isinf(values) & presence


def choose_actions(q: Tensor, mask: Tensor, refused: Tensor, policy: TargetPolicy) -> Outputs:
    """Returns q, the greedy choice, the policy's propensities and choices; see `DiscretePredictor.forward`.

    Args:
        q: [N, K].
        mask: [N, K] bool, the choices that may be taken.
        refused: [N] bool, rows whose features are not finite.
        policy: computes the propensities.
    """
    usable = mask & ~refused.unsqueeze(1)
    allowed = q.masked_fill(~usable, LOWEST)
    greedy = torch.where(usable.any(1), allowed.argmax(1), -1)
    return q.masked_fill(refused.unsqueeze(1), torch.nan), greedy, policy.propensities(q, usable), usable
