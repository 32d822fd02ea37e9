"""The central types of sources, learners, evaluation and export.

Letters in shapes: B rows, S state features, K choices per row, F features per choice, M metrics, H outputs per choice.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import StrEnum
from math import prod
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

from reagent_lite.feature_ids import list_columns

if TYPE_CHECKING:  # a process that only reads configs and data does not wait for torch
    from collections.abc import Callable, Iterator

    import torch
    from torch import Tensor

MISSING_VALUE = -1337.1337
"""Marked an absent feature in dense data of ReAgent 2019; here an absent feature is NaN."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Actions:
    """The choices of each row: a fixed set of actions, or a list of candidates with features.

    Attributes:
        mask: [B, K] bool, true if the choice exists and is allowed.
        features: [B, K, F] float32 of the candidates (parametric), or None (discrete).
    """

    mask: Tensor
    features: Tensor | None = None

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Actions:
        """Returns the same choices on another device."""
        features = None if self.features is None else self.features.to(device, non_blocking=non_blocking)
        return Actions(mask=self.mask.to(device, non_blocking=non_blocking), features=features)

    def split(self, counts: list[int]) -> Iterator[Actions]:
        """Yields views of consecutive rows; the counts sum to B."""
        if self.features is None:
            return (Actions(mask=mask) for mask in self.mask.split_with_sizes(counts))
        pairs = zip(self.mask.split_with_sizes(counts), self.features.split_with_sizes(counts), strict=True)
        return (Actions(mask=mask, features=features) for mask, features in pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransitionBatch:
    """Rows of experience, logged or simulated.

    Attributes:
        state: [B, S] float32, normalized by the source; uint8 if states are images.
        actions: choices at `state`.
        action: [B] int64, index of the choice taken.
        reward: [B] float32; the discounted sum over `steps` if a row spans several.
        steps: [B] float32, time steps from `state` to `next_state`.
        bootstrap: [B] float32, 0 after a terminal row, 1 otherwise (also after a time limit).
        next_state: [B, S], like `state`; meaningful if bootstrap is 1, like next_actions.
        next_actions: choices at `next_state`.
        next_action: [B] int64, 0 if the log has none; meaningful if bootstrap is 1.
        propensity: [B] float32 in (0, 1], behavior policy's probability of `action`.
        metrics: [B, M] float32, M may be 0.
        weight: [B] float32, the row's share in the loss of one optimizer step; 0 for padding. Over all rows of a step
            and all ranks the shares sum to the world size, so that DistributedDataParallel's mean of gradients is the
            gradient of the mean over the global batch, however unevenly rows are spread. Prioritized replay multiplies
            the shares by importance weights, which are at most 1; a log whose rows stand for several decisions each by
            their number over its mean.
    """

    state: Tensor
    actions: Actions
    action: Tensor
    reward: Tensor
    steps: Tensor
    bootstrap: Tensor
    next_state: Tensor
    next_actions: Actions
    next_action: Tensor
    propensity: Tensor
    metrics: Tensor
    weight: Tensor

    def __len__(self) -> int:
        return self.action.shape[0]

    def to(self, device: torch.device, *, non_blocking: bool = False) -> TransitionBatch:
        """Returns the same rows on another device."""
        moved = {name: getattr(self, name).to(device, non_blocking=non_blocking) for name in _COLUMNS}
        return TransitionBatch(**moved)

    def split(self, counts: list[int]) -> Iterator[TransitionBatch]:
        """Yields views of consecutive rows; the counts sum to B."""
        # split by columns: half the time of slicing every column of every part
        columns = [getattr(self, name).split(counts) for name in _COLUMNS]
        return (TransitionBatch(**dict(zip(_COLUMNS, part, strict=True))) for part in zip(*columns, strict=True))


_COLUMNS: Final = tuple(column.name for column in fields(TransitionBatch))


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvStep:
    """One step of N environments, as a replay stores it.

    Attributes:
        observation: [N, S] float32, before the action; uint8 if it is an image.
        action: [N], any integer type.
        reward: [N] float32.
        terminated: [N] bool.
        truncated: [N] bool, at a limit; terminated wins if both are true.
        next_observation: [N, S], after the action, also at the end of an episode.
        propensity: [N] float32.
        mask, next_mask: [N, K] bool, with masked choices or candidates.
        features, next_features: [N, K, F] float32 of candidates.
        present: [N] bool, false for an agent that has left; None if all rows count.
    """

    observation: Tensor
    action: Tensor
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    next_observation: Tensor
    propensity: Tensor
    mask: Tensor | None = None
    next_mask: Tensor | None = None
    features: Tensor | None = None
    next_features: Tensor | None = None
    present: Tensor | None = None

    def to(self, device: torch.device) -> EnvStep:
        """Returns the same step on another device."""
        return self._each(lambda value: value.to(device))

    def rows(self, index: Tensor | slice) -> EnvStep:
        """Returns the step of some rows, [R] or a slice."""
        return self._each(lambda value: value[index])

    def _each(self, change: Callable[[Tensor], Tensor]) -> EnvStep:
        values: dict[str, Any] = {column.name: getattr(self, column.name) for column in fields(self)}
        changed: dict[str, Any] = {name: None if value is None else change(value) for name, value in values.items()}
        return EnvStep(**changed)


class FeatureType(StrEnum):
    """Normalization of a feature; declared in the order of columns in the dense vector."""

    BINARY = "BINARY"
    PROBABILITY = "PROBABILITY"
    CONTINUOUS = "CONTINUOUS"
    BOXCOX = "BOXCOX"
    ENUM = "ENUM"
    QUANTILE = "QUANTILE"
    CONTINUOUS_ACTION = "CONTINUOUS_ACTION"
    DISCRETE_ACTION = "DISCRETE_ACTION"
    DO_NOT_PREPROCESS = "DO_NOT_PREPROCESS"
    CLIP_LOG = "CLIP_LOG"
    EMBEDDING = "EMBEDDING"
    IMAGE = "IMAGE"


ConvLayers = tuple[tuple[int, int, int], ...]
"""Channels, kernel size and stride of convolutional layers."""


NO_ID = 0
OTHER_ID = 1
FIRST_ROW = 2
"""Rows of a table of vectors: for no id, for an id that the table does not have, and from which ids have rows."""


def parameter_of(table: str) -> str:
    """Returns the name of a table's parameter, which has no points and is no attribute of ParameterDict."""
    return f"table_{table.replace('.', '_')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedding:
    """A feature whose values are ids, each of which has a vector that is learned.

    Attributes:
        table: name of the table of vectors; features may share one.
        rows: rows of the table, NO_ID and OTHER_ID among them.
        dim: numbers of a vector.
        length: most ids of a value; 1 unless values are lists.
        pooling: "mean" or "sum" of the vectors of a value.
        scores: whether each id has a score, which its vector is multiplied by; pooling is "sum" then.
    """

    table: str
    rows: int
    dim: int
    length: int = 1
    pooling: str = "mean"
    scores: bool = False

    @property
    def columns(self) -> int:
        """Number of columns, raw and in the network's input: one for each id, then one for each score."""
        return self.length * (2 if self.scores else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """A state that is an image: bytes from 0 to 255, one for each pixel and channel, in the order of the shape.

    Attributes:
        shape: height and width; with channels a third axis, and before these the axis of stacked frames.
        channels_first: whether channels come before height and width.
    """

    shape: tuple[int, ...]
    channels_first: bool = False

    @property
    def size(self) -> int:
        """Bytes of a state."""
        return prod(self.shape)

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes of a batch in the order rows, frames, channels, height, width, as far as there are any."""
        axes = range(len(self.shape) + 1)
        if len(self.shape) == 2 or self.channels_first:
            return tuple(axes)
        *others, height, width, channels = axes
        return (*others, channels, height, width)

    @property
    def pixels(self) -> tuple[int, int, int]:
        """Channels of all frames together, height and width."""
        *_, height, width = (self.shape[axis - 1] for axis in self.axes)
        return self.size // (height * width), height, width

    def after(self, layers: ConvLayers) -> tuple[int, int, int]:
        """Returns channels, height and width after convolutional layers without padding; 0 where a kernel is larger."""
        channels, height, width = self.pixels
        for filters, kernel, stride in layers:
            channels = filters
            height, width = (max((size - kernel) // stride + 1, 0) for size in (height, width))
        return channels, height, width


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureSpec:
    """Parameters of one feature's normalization; a type's unused ones keep their defaults.

    Attributes:
        feature_id: the id in the log.
        mean, stddev: mean and standard deviation of the values (for BOXCOX: after the transform).
        boxcox_lambda, boxcox_shift: x -> ((x + shift)^lambda - 1) / lambda.
        possible_values: the possible values of ENUM, in the order of its one-hot columns.
        levels: the strings of these values, for a category (categories.py); empty for numbers.
        quantiles: the quantiles of QUANTILE, increasing.
        min_value, max_value: smallest and largest value; CONTINUOUS_ACTION scales by them.
        embedding: table and form of EMBEDDING. Its possible_values are the codes of the ids that have a row of their
            own, ascending; without them ids are hashed to rows.
        image: shape of IMAGE, which is all of a state.
    """

    feature_id: int
    feature_type: FeatureType
    mean: float = 0.0
    stddev: float = 1.0
    boxcox_lambda: float = 1.0
    boxcox_shift: float = 0.0
    possible_values: tuple[float, ...] = ()
    levels: tuple[str, ...] = ()
    quantiles: tuple[float, ...] = ()
    min_value: float = 0.0
    max_value: float = 1.0
    embedding: Embedding | None = None
    image: Image | None = None

    @property
    def width(self) -> int:
        """Number of columns in the network's input."""
        if self.image is not None:
            return self.image.size
        if self.embedding is not None:
            return self.embedding.columns
        return len(self.possible_values) if self.feature_type is FeatureType.ENUM else 1

    @property
    def has_possible_values(self) -> bool:
        """Whether values that are not possible values count as other."""
        return self.feature_type is FeatureType.ENUM or bool(self.embedding and self.possible_values)

    @property
    def value_ids(self) -> tuple[int, ...]:
        """Ids of the raw columns without those of scores."""
        return self.raw_ids if self.embedding is None else self.raw_ids[: self.embedding.length]

    @property
    def raw_ids(self) -> tuple[int, ...]:
        """Ids of the raw columns: the feature's own id, or one for each id and score of a list, or byte of an image."""
        if self.image is not None:
            return tuple(range(self.image.size))
        if self.embedding is None:
            return (self.feature_id,)
        return list_columns(self.feature_id, self.embedding.length, scores=self.embedding.scores)


@dataclass(frozen=True, slots=True)
class NormalizationSpec:
    """Features in column order: by type in FeatureType's order, by id inside a type."""

    features: tuple[FeatureSpec, ...]

    @classmethod
    def from_features(cls, features: dict[int, FeatureSpec]) -> Self:
        """Returns the spec with the features in column order."""
        order = list(FeatureType)
        return cls(tuple(sorted(features.values(), key=lambda f: (order.index(f.feature_type), f.feature_id))))

    @property
    def feature_ids(self) -> tuple[int, ...]:
        """Ids in column order of the raw input."""
        return tuple(raw_id for feature in self.features for raw_id in feature.raw_ids)

    @property
    def embeddings(self) -> tuple[Embedding, ...]:
        """The embeddings, whose columns are the last ones of the normalized output, in this order."""
        return tuple(feature.embedding for feature in self.features if feature.embedding is not None)

    @property
    def image(self) -> Image | None:
        """The image that states are, or None if they have features."""
        return next((feature.image for feature in self.features), None)

    @property
    def width(self) -> int:
        """Number of columns of the normalized output."""
        return sum(feature.width for feature in self.features)

    @property
    def column_names(self) -> tuple[str, ...]:
        """Names of the columns of the normalized output; those of a category have its value."""
        return tuple(name for feature in self.features for name in _column_names(feature))


def _column_names(feature: FeatureSpec) -> tuple[str, ...]:
    if feature.embedding is not None or feature.image is not None:
        return tuple(map(str, feature.raw_ids))
    values = (feature.levels or feature.possible_values) if feature.width != 1 else ("",)
    return tuple(f"{feature.feature_id} {value}".strip() for value in values)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSpec:
    """Feature and action counts after normalization, which shape a network.

    Attributes:
        num_state_features: S.
        num_action_features: F of candidates; 0 for named actions.
        action_names: names of actions in output order; empty for candidates.
        metric_names: names of the M columns of `metrics`.
        state_embeddings: embeddings whose row numbers and scores are the last columns of a state.
        action_embeddings: the same of a candidate.
        image: the image that a state is; its S columns are bytes, uint8.
    """

    num_state_features: int
    num_action_features: int = 0
    action_names: tuple[str, ...] = ()
    metric_names: tuple[str, ...] = ()
    state_embeddings: tuple[Embedding, ...] = ()
    action_embeddings: tuple[Embedding, ...] = ()
    image: Image | None = None

    @property
    def parametric(self) -> bool:
        """Whether choices are candidates with features."""
        return not self.action_names

    @property
    def has_embeddings(self) -> bool:
        """Whether states or candidates have embeddings."""
        return bool(self.state_embeddings or self.action_embeddings)

    @property
    def is_dense(self) -> bool:
        """Whether all columns are numbers that a linear model can read."""
        return not self.has_embeddings and self.image is None

    @property
    def dense(self) -> SourceSpec:
        """The counts without the columns of embeddings and images, for models that are no networks."""
        numbers = self.num_state_features if self.image is None else 0
        return replace(
            self,
            num_state_features=numbers - sum(part.columns for part in self.state_embeddings),
            num_action_features=self.num_action_features - sum(part.columns for part in self.action_embeddings),
            state_embeddings=(),
            action_embeddings=(),
            image=None,
        )

    def dense_columns(self, state: Tensor, actions: Actions) -> tuple[Tensor, Actions]:
        """Returns states and choices without the columns of embeddings and images."""
        if self.is_dense:
            return state, actions
        dense = self.dense
        features = actions.features
        if features is not None:
            features = features[..., : dense.num_action_features]
        return state[..., : dense.num_state_features].float(), Actions(mask=actions.mask, features=features)


class BatchSource(Protocol):
    """Batches of logged rows, simulated rows or a mixture."""

    def __next__(self) -> TransitionBatch: ...

    def record_errors(self, row_errors: Tensor) -> None:
        """Records the errors [B] of the last batch's rows, the priorities of prioritized replay."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Returns the position: a step number, so that nothing has to be replayed."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a saved position."""
        ...
