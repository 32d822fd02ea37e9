"""Logged rows as a BatchSource: one gather fills many batches, the batches are views of it.

 training copy ─► normalized columns (once, memory-mapped next to it) ─► LoggedRows ─┐
                                                          read plan ─► row numbers ─┴► gather ─► TransitionBatch, …

Measured: gathering batch by batch takes about as long as a small network's forward pass; in blocks, next to nothing.
"""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from reagent_lite.data.copy.spool import parts_of
from reagent_lite.data.copy.training_copy import TrainingCopy, release
from reagent_lite.data.rows.matrices import in_order
from reagent_lite.data.sampling.plan import ReadPlan
from reagent_lite.data.sampling.spans import Spans
from reagent_lite.types import Actions, SourceSpec, TransitionBatch

_BLOCK_ROWS = 1 << 15
_BLOCK_VALUES = 1 << 23  # 32 MiB of float32 a block, for rows of any width and lists of any length


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureColumns:
    """A matrix of raw or normalized features, row-major.

    Attributes:
        values: [N, W] float32; uint8 of images.
        width: columns after normalization.
        transform: applied to gathered rows; None if the matrix is normalized already.
        mapped: the memory-mapped array of `values`; None if they are in memory.
    """

    values: Tensor
    width: int
    transform: nn.Module | None = None
    mapped: np.ndarray[Any, Any] | None = None

    @property
    def widest(self) -> int:
        """Number of columns before or after normalization, whichever is larger; at least 1."""
        return max(self.values.shape[1], self.width, 1)

    def take(self, index: Tensor) -> Tensor:
        """Returns normalized rows for index [n]."""
        rows = self.values.index_select(0, index)
        if self.transform is None:
            return rows
        with torch.no_grad():
            return self.transform(rows, ~rows.isnan())  # type: ignore[no-any-return]

    def release(self) -> None:
        """Lets the system take back the pages that were read, which count as this process's memory until then."""
        release(self.mapped)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Ragged candidate lists: list i holds rows offsets[i] to offsets[i + 1] of the features.

    Attributes:
        features: columns of all candidates.
        offsets: [L + 1] int64.
        now, after: [R] int32, list of each row's choices and of its next choices.
        longest: length of the longest list.
    """

    features: FeatureColumns
    offsets: Tensor
    now: Tensor
    after: Tensor
    longest: int

    def take(self, lists: Tensor) -> Actions:
        """Returns the lists padded to the longest, [n, K, F]; padding is zeros and not allowed."""
        start = self.offsets.index_select(0, lists)
        count = self.offsets.index_select(0, lists + 1) - start
        position = torch.arange(max(int(count.max()), 1), device=lists.device)
        mask = position < count.unsqueeze(1)
        index = torch.where(mask, start.unsqueeze(1) + position, 0)
        features = self.features.take(index.flatten()).view(*index.shape, self.features.width)
        return Actions(mask=mask, features=features * mask.unsqueeze(2))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRows:
    """R rows in the form they are gathered from, on one device.

    On a CPU, columns that are the training copy's own are memory-mapped, so that they take no memory of the process.

    Attributes:
        state: columns of states, the side block of next states included.
        next_index: [R] int32 or int64, row of `state` that holds the next state.
        reward, bootstrap, propensity: [R] float32.
        steps: [R] uint8 or float32.
        action, next_action: [R] int32, -1 if unknown.
        masks: [R, 2, K] bool of fixed actions, now and next; None if all are allowed or choices are candidates.
        candidates: lists of candidates, or None for fixed actions.
        num_choices: K of fixed actions.
        metrics: [R, M].
        usable: [n] rows that may be learned from; None if all may.
        sample_weight: [R] float32 factor of each row's share in the loss, 1 on average; None: 1.
    """

    state: FeatureColumns
    next_index: Tensor
    reward: Tensor
    steps: Tensor
    bootstrap: Tensor
    propensity: Tensor
    action: Tensor
    next_action: Tensor
    masks: Tensor | None
    candidates: Candidates | None
    num_choices: int
    metrics: Tensor
    usable: Tensor | None
    sample_weight: Tensor | None = None

    def __len__(self) -> int:
        return len(self.reward)

    @property
    def device(self) -> torch.device:
        """Device of the columns."""
        return self.reward.device

    @property
    def count(self) -> int:
        """Number of rows that may be learned from."""
        return len(self) if self.usable is None else len(self.usable)

    @property
    def continues(self) -> bool:
        """Whether a row that may be learned from is followed by another state."""
        bootstrap = self.bootstrap if self.usable is None else self.bootstrap.index_select(0, self.usable)
        return bool(bootstrap.any())

    def numbers(self, index: Tensor) -> Tensor:
        """Returns the row numbers at [n] indices of the rows that may be learned from; 0 if there are no such rows."""
        if not self.count:
            return torch.zeros_like(index)
        return index if self.usable is None else self.usable.index_select(0, index)

    def only(self, usable: np.ndarray[Any, Any]) -> "LoggedRows":
        """Returns the same rows, of which only some, [n] row numbers, may be learned from."""
        kind = np.int32 if len(self) < 2**31 else np.int64
        return replace(self, usable=torch.from_numpy(usable.astype(kind, copy=False)).to(self.device))

    def with_propensity(self, propensity: NDArray[np.float32]) -> "LoggedRows":
        """Returns the same rows with other propensities, [R]."""
        column = self.propensity.clone()
        column[: len(propensity)] = torch.from_numpy(propensity).to(column.device)
        return replace(self, propensity=column)

    def with_sample_weight(self, weight: NDArray[np.float64]) -> "LoggedRows":
        """Returns the same rows with shares in the loss times weights, [R], which are 1 on average."""
        factor = torch.ones(len(self))
        factor[: len(weight)] = torch.from_numpy(weight).float()
        return replace(self, sample_weight=factor.to(self.device))

    @property
    def learnable_numbers(self) -> NDArray[np.integer[Any]]:
        """[n] row numbers of the rows that may be learned from."""
        kind = np.int32 if len(self) < 2**31 else np.int64
        return np.arange(len(self), dtype=kind) if self.usable is None else self.usable.cpu().numpy()

    @property
    def block_rows(self) -> int:
        """Rows to gather at once."""
        widest = self.state.widest
        if self.candidates is not None:
            widest = max(widest, self.candidates.longest * self.candidates.features.widest)
        return min(_BLOCK_ROWS, max(_BLOCK_VALUES // widest, 1))

    def release(self) -> None:
        """Lets the system take back mapped pages; reading rows later maps them again."""
        self.state.release()
        if self.candidates is not None:
            self.candidates.features.release()

    def take(self, index: Tensor, weight: Tensor) -> TransitionBatch:
        """Returns rows by number, [n] int64, with their shares in the loss before `sample_weight`."""
        actions, next_actions = self._choices(index)
        return TransitionBatch(
            state=self.state.take(index),
            actions=actions,
            action=self.action.index_select(0, index).long().clamp_(min=0),
            reward=self.reward.index_select(0, index),
            steps=self.steps.index_select(0, index).float(),
            bootstrap=self.bootstrap.index_select(0, index),
            next_state=self.state.take(self.next_index.index_select(0, index)),
            next_actions=next_actions,
            next_action=self.next_action.index_select(0, index).long().clamp_(min=0),
            propensity=self.propensity.index_select(0, index),
            metrics=self.metrics.index_select(0, index),
            weight=weight if self.sample_weight is None else weight * self.sample_weight.index_select(0, index),
        )

    def _choices(self, index: Tensor) -> tuple[Actions, Actions]:
        if self.candidates is not None:
            lists = self.candidates
            return lists.take(lists.now.index_select(0, index)), lists.take(lists.after.index_select(0, index))
        if self.masks is None:
            every = Actions(
                mask=torch.ones(1, 1, dtype=torch.bool, device=index.device).expand(len(index), self.num_choices)
            )
            return every, every
        now, after = self.masks.index_select(0, index).unbind(1)
        return Actions(mask=now), Actions(mask=after)


def tensor_of(array: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    """Returns an array on a device; on a CPU without a copy of it, so that a memory-mapped one stays mapped."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the map is read-only, and nothing is written
        return torch.from_numpy(array).to(device)


def build_rows(
    copy: TrainingCopy,
    spans: Spans,
    usable: NDArray[np.int64] | None,
    state: FeatureColumns,
    candidate_features: FeatureColumns | None = None,
    *,
    metric_names: Sequence[str] | None = None,
) -> LoggedRows:
    """Returns the rows of a training copy and its spans in the form that they are gathered from.

    Args:
        copy: the memory-mapped rows.
        spans: rewards and steps, see spans.py.
        usable: rows that may be learned from, see spans.learnable_rows.
        state: columns over copy.state; the other columns go to the same device.
        candidate_features: columns over copy.candidates for parametric rows.
        metric_names: names of the columns of metrics, 0 if the copy has none of that name; None for the copy's own.
    """
    names = copy.metric_names if metric_names is None else metric_names
    metrics = np.array(in_order(copy.metrics, copy.metric_names, names, absent=0.0), np.float32)
    bootstrap = spans.at_end(copy.bootstrap)
    device = state.values.device
    return LoggedRows(
        state=state,
        next_index=tensor_of(spans.at_end(copy.next_index), device),
        reward=tensor_of(spans.reward, device),
        steps=tensor_of(spans.steps, device),
        bootstrap=tensor_of(bootstrap, device),
        propensity=tensor_of(copy.propensity, device),
        action=tensor_of(copy.action, device),
        next_action=tensor_of(spans.at_end(copy.next_action), device),
        masks=_masks(copy, spans, bootstrap, device) if candidate_features is None else None,
        candidates=None if candidate_features is None else _lists(copy, candidate_features, spans, device),
        num_choices=0 if candidate_features is not None else copy.mask.shape[1],
        metrics=torch.from_numpy(metrics).to(device),
        usable=None if usable is None else torch.from_numpy(usable).to(device),
    )


def padding_rows(spec: SourceSpec, device: torch.device) -> LoggedRows:
    """Returns the rows of a shard that has none: one row of zeros to gather as padding, and nothing to learn from."""
    first = torch.zeros(1, dtype=torch.int32, device=device)
    dtype = torch.float32 if spec.image is None else torch.uint8
    candidates = Candidates(
        features=FeatureColumns(
            values=torch.zeros(1, spec.num_action_features, device=device), width=spec.num_action_features
        ),
        offsets=torch.tensor([0, 1], device=device),
        now=first,
        after=first,
        longest=1,
    )
    return LoggedRows(
        state=FeatureColumns(
            values=torch.zeros(1, spec.num_state_features, dtype=dtype, device=device), width=spec.num_state_features
        ),
        next_index=first,
        reward=first.float(),
        steps=torch.ones(1, device=device),
        bootstrap=first.float(),
        propensity=torch.ones(1, device=device),
        action=first,
        next_action=first,
        masks=None,
        candidates=candidates if spec.parametric else None,
        num_choices=len(spec.action_names),
        metrics=torch.zeros(1, len(spec.metric_names), device=device),
        usable=first[:0],
    )


class LoggedSource:
    """Batches of a rank, step by step; the position is the number of the next optimizer step.

    Args:
        rows: the rows of the shard that the plan gives the rank.
        plan: the read plan.
        rank: rank whose part is read.
        device: device of the batches.

    Attributes:
        numbers: [B] row numbers of the latest batch, on the device of the rows.
    """

    def __init__(self, rows: LoggedRows, plan: ReadPlan, rank: int, device: torch.device) -> None:
        self._rows = rows
        self._plan = plan
        self._rank = rank
        self._device = device
        self._step = 0
        self.numbers = torch.zeros(0, dtype=torch.int64)
        self._batches = self._read()

    def __next__(self) -> TransitionBatch:
        return next(self._batches)

    def record_errors(self, row_errors: Tensor) -> None:
        """Does nothing: errors of logged rows do not change the order in which the plan reads them."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the number of the next optimizer step; call it between steps."""
        return {"step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues at a step."""
        self._step = int(state["step"])
        self._batches = self._read()

    def _read(self) -> Iterator[TransitionBatch]:
        plan = self._plan
        block_steps = max(self._rows.block_rows // plan.rows_per_step, 1)
        step = self._step
        order: NDArray[np.int32 | np.int64] | None = None
        while step < plan.num_steps:
            epoch = step // plan.steps_per_epoch
            order = None  # frees that of the epoch before
            order = plan.permutation(epoch, plan.reads[self._rank])
            end_of_epoch = (epoch + 1) * plan.steps_per_epoch
            while step < end_of_epoch:
                steps = range(step, min(step + block_steps, end_of_epoch))
                yield from self._block(order, steps)
                step = steps.stop

    def _block(self, order: NDArray[np.int32 | np.int64], steps: range) -> Iterator[TransitionBatch]:
        """Gathers the rank's rows of several steps of an epoch at once and yields them minibatch by minibatch.

        Rows are weighted by their share in the loss. An empty part is replaced by one row of weight 0, so that the rank
        takes part in the collectives of the step.
        """
        plan = self._plan
        rows = self._rows
        none = np.zeros(1, order.dtype)
        parts = [(step, start, stop) for step in steps for start, stop in plan.parts(step, self._rank)]
        index = np.concatenate([order[start:stop] if stop > start else none for _, start, stop in parts])
        counts = [max(stop - start, 1) for _, start, stop in parts]
        weights = [len(plan.reads) / plan.rows_of_step(step) if stop > start else 0.0 for step, start, stop in parts]
        device = rows.device
        weight = torch.from_numpy(np.repeat(np.array(weights, np.float32), counts)).to(device)
        numbers = rows.numbers(torch.from_numpy(index.astype(np.int64)).to(device))
        batches = rows.take(numbers, weight).to(self._device).split(counts)
        for (step, _, _), batch, self.numbers in zip(parts, batches, torch.split(numbers, counts), strict=True):
            # set before the last minibatch of a step is yielded, so that between steps it is the next step
            self._step = step + 1
            yield batch


def rows_in_order(rows: LoggedRows, numbers: np.ndarray[Any, Any], device: torch.device) -> Iterator[TransitionBatch]:
    """Yields given rows in their order, in large batches of weight 1, for evaluation.

    Args:
        rows: the rows to read from.
        numbers: [n] row numbers.
        device: device of the batches.
    """
    rows_device = rows.device
    for start in range(0, len(numbers), rows.block_rows):
        index = torch.from_numpy(numbers[start : start + rows.block_rows].astype(np.int64)).to(rows_device)
        yield rows.take(index, torch.ones(len(index), device=rows_device)).to(device)


def _masks(copy: TrainingCopy, spans: Spans, bootstrap: NDArray[np.float32], device: torch.device) -> Tensor | None:
    def of_part(part: slice) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        return copy.mask[part] > 0, copy.next_mask[part if spans.last is None else spans.last[part]] > 0

    def allows_all(part: slice) -> bool:
        now, after = of_part(part)
        return bool(now.all() and after[bootstrap[part] > 0].all())

    rows = len(copy)
    width = copy.mask.shape[1]
    if all(map(allows_all, parts_of(rows, width))):
        return None  # masks after an end do not matter: nothing is bootstrapped there
    masks = np.empty((rows, 2, width), bool)
    for part in parts_of(rows, width):
        masks[part, 0], masks[part, 1] = of_part(part)
    return torch.from_numpy(masks).to(device)


def _lists(copy: TrainingCopy, features: FeatureColumns, spans: Spans, device: torch.device) -> Candidates:
    return Candidates(
        features=features,
        longest=int(np.diff(copy.list_offsets).max(initial=1)),
        offsets=tensor_of(copy.list_offsets, device),
        now=tensor_of(copy.actions_list, device),
        after=tensor_of(spans.at_end(copy.next_list), device),
    )
