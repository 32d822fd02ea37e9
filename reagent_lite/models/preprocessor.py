"""From raw features to the input of the network: one module for training and for the exported model.

    raw [..., F] ─► present? ─► one slice of columns per feature type ─► its transform ─► 0 where missing ─► [..., W]

Features of one type are adjacent (column order), so that each type is a slice and a few tensor operations for any
number of features. The module gives the same numbers eagerly, under `torch.jit.script` and in ONNX. Numbers are
subtracted from raw values in float64: a mean of 10^6 in float32 is off by up to 0.03.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Final

import torch
from torch import Tensor, nn

from reagent_lite.categories import SMALLEST_CODE
from reagent_lite.types import (
    FIRST_ROW,
    MISSING_VALUE,
    NO_ID,
    OTHER_ID,
    FeatureSpec,
    FeatureType,
    NormalizationSpec,
)

FLOAT32 = torch.finfo(torch.float32)


def _float32(numbers: Iterable[float]) -> Tensor:
    """Returns numbers as float32; numbers out of range become the largest float32 instead of infinity."""
    return _float64(numbers).clamp(FLOAT32.min, FLOAT32.max).to(torch.float32)


def _float64(numbers: Iterable[float]) -> Tensor:
    return torch.tensor(list(numbers), dtype=torch.float64)


class Binary(nn.Module):
    """0 if x = 0 else 1."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns [..., F] for raw x [..., F]."""
        return (x != 0).to(x.dtype)


class Logit(nn.Module):
    """Logit of a probability clamped to [1e-5, 1 − 1e-5]."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns [..., F] for raw x [..., F]."""
        # 1 - x is clamped by itself: 1 - float32(1 - 1e-5) is 0.1 % away from 1e-5, which would shift the logit of 1.
        low = 1e-5
        high = 1 - 1e-5
        return torch.log(x.clamp(low, high)) - torch.log((1 - x).clamp(low, high))


class Standardize(nn.Module):
    """(x − mean) / stddev, clamped to ±11.513 (the logit of 1 − 1e-5, so that all types have the same range)."""

    def __init__(self, features: Sequence[FeatureSpec]) -> None:
        super().__init__()
        self.mean = nn.Buffer(_float64(f.mean for f in features))
        self.stddev = nn.Buffer(_float32(f.stddev for f in features).clamp(min=FLOAT32.tiny))

    def forward(self, x: Tensor) -> Tensor:
        """Returns [..., F] for x [..., F]."""
        return ((x.double() - self.mean) / self.stddev).clamp(-11.513, 11.513).to(x.dtype)


class BoxCox(nn.Module):
    """(max(x + shift, 1e-6)^λ − 1) / λ, or log if λ ≈ 0 (Box and Cox 1964, equation 2), then standardized."""

    def __init__(self, features: Sequence[FeatureSpec]) -> None:
        super().__init__()
        exponent = _float32(f.boxcox_lambda for f in features)
        is_log = exponent.abs() < 1e-6
        self.shift = nn.Buffer(_float64(f.boxcox_shift for f in features))
        self.is_log = nn.Buffer(is_log)
        self.exponent = nn.Buffer(torch.where(is_log, 1.0, exponent))
        self.standardize = Standardize(features)

    def forward(self, x: Tensor) -> Tensor:
        """Returns [..., F] for raw x [..., F]."""
        log_x = torch.log((x.double() + self.shift).clamp(min=1e-6).to(x.dtype))
        # x^λ - 1 = tanh(z/2) (e^z + 1) with z = λ log x: no cancellation for small λ, and relative errors below 5e-7
        # both in torch and in onnxruntime, which has no expm1.
        z = self.exponent * log_x
        power = torch.tanh(z / 2) * (torch.exp(z) + 1) / self.exponent
        transformed: Tensor = self.standardize(torch.where(self.is_log, log_x, power))
        return transformed


class OneHot(nn.Module):
    """One column per possible value, in the spec's order; NaN and any other value give zeros."""

    def __init__(self, features: Sequence[FeatureSpec]) -> None:
        super().__init__()
        columns = [column for column, feature in enumerate(features) for _ in feature.possible_values]
        self.column = nn.Buffer(torch.tensor(columns, dtype=torch.int64))
        self.possible_value = nn.Buffer(_float32(v for f in features for v in f.possible_values))

    def forward(self, x: Tensor) -> Tensor:
        """Returns [..., W] for raw x [..., F]; W is the number of possible values of all features."""
        return (x.index_select(-1, self.column) == self.possible_value).to(x.dtype)


class Quantile(nn.Module):
    """0 at or below q_0, 1 at or above q_last, else (i + (x − q_i) / (q_{i+1} − q_i)) / (n − 1).

    Computed as the sum of one clamped ramp per interval, which needs no search: intervals below x count 1, intervals
    above x count 0. Features with fewer quantiles are padded with ramps that x, clamped to q_last, never reaches.
    Temporarily needs 8·N·F·(n − 1) bytes.
    """

    def __init__(self, features: Sequence[FeatureSpec]) -> None:
        super().__init__()
        quantiles = [_float64(f.quantiles) for f in features]
        longest = max(len(q) for q in quantiles)
        low = torch.stack([q[0] for q in quantiles])
        high = torch.stack([q[-1] for q in quantiles])
        start = high.unsqueeze(1).repeat(1, longest - 1)
        length = torch.ones_like(start)
        for row, q in enumerate(quantiles):
            start[row, : len(q) - 1] = q[:-1]
            length[row, : len(q) - 1] = q.diff().clamp(FLOAT32.tiny, FLOAT32.max)
        self.low = nn.Buffer(low)
        self.high = nn.Buffer(high)
        self.start = nn.Buffer(start)
        self.length = nn.Buffer(length)
        self.num_intervals = nn.Buffer(_float32(len(q) - 1 for q in quantiles))

    def forward(self, x: Tensor) -> Tensor:
        """Returns [..., F] for raw x [..., F]."""
        inside = torch.minimum(torch.maximum(x.double(), self.low), self.high)
        ramps = ((inside.unsqueeze(-1) - self.start) / self.length).clamp(0.0, 1.0)
        return (ramps.sum(-1) / self.num_intervals).to(x.dtype)


class ScaleAction(nn.Module):
    """From [min_value, max_value] to [−1 + 1e-6, 1 − 1e-6], clamped."""

    def __init__(self, features: Sequence[FeatureSpec]) -> None:
        super().__init__()
        self.min_value = nn.Buffer(_float64(f.min_value for f in features))
        self.scale = nn.Buffer(_float32((2 - 2e-6) / (f.max_value - f.min_value) for f in features))

    def forward(self, x: Tensor) -> Tensor:
        """Returns [..., F] for raw x [..., F]."""
        bound = 1 - 1e-6
        return ((x.double() - self.min_value) * self.scale - bound).clamp(-bound, bound).to(x.dtype)


class Unchanged(nn.Module):
    """The raw value."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns x."""
        return x


class ClipLog(nn.Module):
    """log(max(x, 1e-6))."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns [..., F] for raw x [..., F]."""
        return torch.log(x.clamp(min=1e-6))


class TableRows(nn.Module):
    """Row numbers of ids in a table of vectors, from their codes; see `types.Embedding` for the rows.

    Listed ids are found by bisection of their ascending codes. Hashed ids: a code is 30 bits of a hash, taken as the
    bits of a float32 (categories.py), which comparisons with powers of two restore; the row is their remainder. Both
    need no operation that ONNX lacks.
    """

    no_id: Final[int] = NO_ID
    other_id: Final[int] = OTHER_ID
    first_row: Final[int] = FIRST_ROW
    scale: Final[float] = 1 / SMALLEST_CODE
    mantissas: Final[int] = 1 << 23

    def __init__(self, feature: FeatureSpec) -> None:
        super().__init__()
        assert feature.embedding is not None
        self.length = feature.embedding.length
        self.scores = feature.embedding.scores
        self.buckets = 0 if feature.possible_values else feature.embedding.rows - FIRST_ROW
        self.codes = nn.Buffer(_float32(feature.possible_values or (1.0,)))
        self.bisections = math.ceil(math.log2(len(self.codes)))

    def forward(self, x: Tensor) -> Tensor:
        """Returns [..., L] row numbers, then [..., L] scores if there are any, for raw x; NaN is absent."""
        codes = x[..., : self.length]
        present = ~torch.isnan(codes)
        codes = torch.where(present, codes, 1.0)
        row = self.find_hashed(codes) if self.buckets > 0 else self.find_listed(codes)
        rows = torch.where(present, row, self.no_id).to(x.dtype)
        if not self.scores:
            return rows
        scores = x[..., self.length :]
        return torch.cat((rows, torch.where(torch.isnan(scores), 0.0, scores)), dim=-1)

    def find_listed(self, codes: Tensor) -> Tensor:
        """Returns the rows of listed ids, `other_id` for others."""
        low = torch.zeros_like(codes, dtype=torch.int64)
        high = low + (self.codes.shape[0] - 1)
        for _ in range(self.bisections):
            middle = torch.div(low + high, 2, rounding_mode="floor")
            above = self.codes[middle] < codes
            low = torch.where(above, middle + 1, low)
            high = torch.where(above, high, middle)
        return torch.where(self.codes[high] == codes, high + self.first_row, self.other_id)

    def find_hashed(self, codes: Tensor) -> Tensor:
        """Returns the rows of hashed ids."""
        mantissa = codes * self.scale
        exponent = torch.zeros_like(codes, dtype=torch.int64)
        for power in (64, 32, 16, 8, 4, 2, 1):
            is_larger = mantissa >= 2.0**power
            mantissa = torch.where(is_larger, mantissa * 2.0**-power, mantissa)
            exponent = exponent + power * is_larger.to(torch.int64)
        bits = exponent * self.mantissas + ((mantissa - 1.0) * self.mantissas).to(torch.int64)
        return torch.remainder(bits, self.buckets) + self.first_row


class Preprocessor(nn.Module):
    """Normalizes raw features by a `NormalizationSpec`; it has no trained weights.

    Ids become row numbers of the tables of models/embeddings.py.

    A value is missing if `presence` is false, if it is NaN, or if it is −1337.1337 (absent in dense input of
    ReAgent 2019). A missing value gives 0 in every output column of its feature; with `missing_as_zero`
    (`rl.set_missing_value_to_zero`) it is read as the raw value 0 and transformed like any other.

    Raises:
        ValueError: the spec's features are not in column order.
    """

    missing_value: Final[float] = MISSING_VALUE

    starts: list[int]
    stops: list[int]
    one_hot: list[bool]

    def __init__(self, spec: NormalizationSpec, *, missing_as_zero: bool = False) -> None:
        super().__init__()
        if spec != NormalizationSpec.from_features({f.feature_id: f for f in spec.features}):
            raise ValueError("features must be in column order, as returned by NormalizationSpec.from_features")
        self.missing_as_zero = missing_as_zero
        self.starts = []
        self.stops = []
        self.one_hot = []
        self.transforms = nn.ModuleList()
        stop = 0
        for (feature_type, _), group in groupby(spec.features, key=_transformed_together):
            features = tuple(group)
            start = stop
            stop = stop + sum(len(feature.raw_ids) for feature in features)
            if any(feature.width for feature in features):
                self.starts.append(start)
                self.stops.append(stop)
                self.one_hot.append(feature_type in (FeatureType.ENUM, FeatureType.EMBEDDING))
                self.transforms.append(TRANSFORMS[feature_type](features))
        # NaN is never a possible value, so that one-hot columns are 0 without further work; no id is not an id of 0
        nan = {FeatureType.EMBEDDING} if missing_as_zero else {FeatureType.EMBEDDING, FeatureType.ENUM}
        absent = [math.nan if f.feature_type in nan else 0.0 for f in spec.features for _ in f.raw_ids]
        self.absent = nn.Buffer(torch.tensor(absent))

    def forward(self, values: Tensor, presence: Tensor) -> Tensor:
        """Returns [..., W] float32.

        Args:
            values: [..., F] float32 raw values in the order of the spec's `feature_ids`.
            presence: [..., F] bool, false for an absent value.
        """
        usable = presence & ~torch.isnan(values) & (values != self.missing_value)
        x = torch.where(usable, values, self.absent)
        outputs: list[Tensor] = []
        for i, transform in enumerate(self.transforms):
            start = self.starts[i]
            stop = self.stops[i]
            normalized = transform(x[..., start:stop])
            if not (self.missing_as_zero or self.one_hot[i]):
                normalized = torch.where(usable[..., start:stop], normalized, 0.0)
            outputs.append(normalized)
        if len(outputs) == 0:
            return x[..., :0]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)

    @torch.jit.export
    def dense(self, values: Tensor) -> Tensor:
        """Returns [..., W] float32 for raw values [..., F] float32; NaN is absent."""
        return self.forward(values, ~torch.isnan(values))


def _transformed_together(feature: FeatureSpec) -> tuple[FeatureType, int | None]:
    """Returns what adjacent features of one transform have in common."""
    return feature.feature_type, feature.feature_id if feature.embedding is not None else None


TRANSFORMS: dict[FeatureType, Callable[[Sequence[FeatureSpec]], nn.Module]] = {
    FeatureType.BINARY: lambda _: Binary(),
    FeatureType.PROBABILITY: lambda _: Logit(),
    FeatureType.CONTINUOUS: Standardize,
    FeatureType.BOXCOX: BoxCox,
    FeatureType.ENUM: OneHot,
    FeatureType.QUANTILE: Quantile,
    FeatureType.CONTINUOUS_ACTION: ScaleAction,
    FeatureType.DISCRETE_ACTION: lambda _: Unchanged(),
    FeatureType.DO_NOT_PREPROCESS: lambda _: Unchanged(),
    FeatureType.CLIP_LOG: lambda _: ClipLog(),
    FeatureType.EMBEDDING: lambda features: TableRows(features[0]),
}
