"""Evaluation rows: scored rows of a log with the evaluated policy's probabilities and its models' predictions.

batches ─► build_evaluation_rows ─► EvaluationRows [N, K] ─► episode_groups ─► tables_of
  ─► rl.sums.EpisodeTable [n, L] per outcome
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from reagent_lite.algorithms.reward_and_q_models import PolicyProbabilities, RewardAndQModels, outcomes_of
from reagent_lite.data.rows.hashes import mix
from reagent_lite.distributed.group import Group
from reagent_lite.rl.sums import EpisodeTable
from reagent_lite.rl.td import expected_value, select_choice
from reagent_lite.types import TransitionBatch

REWARD_NAME = "Reward"
BY_CHOICE = frozenset({"mask", "model_propensities", "reward_model", "q_values"})
"""Columns of a page that are [N, K] or [N, K, T]."""
BY_OUTCOME = frozenset({"outcomes", "reward_model", "q_values", "next_value"})
"""Columns whose last axis is T."""
_KNOWN_BEFORE = ("number", "unit", "sample_weight", "predicted_reward")  # in the log, not by the policy
_ROUNDING = 1e-6  # of probabilities, which are float32 in logs and exported models
_DTYPES = {"action": torch.int64, "mask": torch.bool}  # the others are float64


@dataclass(frozen=True, kw_only=True)
class EvaluationRows:
    """N logged rows, episode by episode and in order of time; K is the largest number of choices of a row.

    Attributes:
        names: "Reward", then the metrics: T names.
        episode: [N] int64, a code per episode, non-decreasing.
        action: [N] int64, index of the logged choice.
        mask: [N, K] bool, choices of the row; false for padding.
        steps: [N] float64, time steps the row spans.
        bootstrap: [N] float64, 0 after a true end.
        propensity: [N] float64, logging policy's probability of `action`.
        model_propensities: [N, K] float64, evaluated policy's probabilities.
        outcomes: [N, T] float64, reward and metrics.
        reward_model: [N, K, T] float64, expected outcomes.
        q_values: [N, K, T] float64, values of the evaluated policy.
        next_value: [N, T] float64, value of the next state under the evaluated policy; 0 after a true end.
        number: [N] int64, number of the row in the training copy of the first process, -1 for rows of other machines;
            None if unknown.
        unit: [N] int64, a code per unit, which holds whole episodes; None if episodes are drawn.
        sample_weight: [N] float64, how many decisions the row stands for, the same for all rows of an episode; None if
            every row stands for one.
        predicted_reward: [N] float64, reward predicted from features of the state; None unless propensities are
            estimated.
    """

    names: tuple[str, ...]
    episode: Tensor
    action: Tensor
    mask: Tensor
    steps: Tensor
    bootstrap: Tensor
    propensity: Tensor
    model_propensities: Tensor
    outcomes: Tensor
    reward_model: Tensor
    q_values: Tensor
    next_value: Tensor
    number: Tensor | None = None
    unit: Tensor | None = None
    sample_weight: Tensor | None = None
    predicted_reward: Tensor | None = None

    def __len__(self) -> int:
        return len(self.action)

    def rows(self, index: Tensor) -> EvaluationRows:
        """Returns the page of some rows by their indices, [n]; adjacent rows are not copied."""
        adjacent = len(index) > 0 and bool((index[1:] - index[:-1] == 1).all())
        start = int(index[0]) if adjacent else 0

        def at_index(values: Tensor) -> Tensor:
            if adjacent or _are_zeros(values):
                return values.narrow(0, start, len(index))
            return values.index_select(0, index)  # half the time of values[index]

        return EvaluationRows(names=self.names, **{name: at_index(values) for name, values in self.columns.items()})

    def only(self, first: int, stop: int) -> EvaluationRows:
        """Returns the page of the outcomes first to stop, without copying them; itself if these are all."""
        if first <= 0 and stop >= len(self.names):
            return self
        parts = {name: getattr(self, name)[..., first:stop] for name in BY_OUTCOME}
        return replace(self, names=self.names[first:stop], **parts)

    @property
    def columns(self) -> dict[str, Tensor]:
        """The columns by name."""
        columns = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "names"}
        return {name: column for name, column in columns.items() if column is not None}

    @property
    def row_bytes(self) -> int:
        """Bytes of a row over all columns."""
        return sum(column[:1].nbytes for column in self.columns.values())

    @cached_property
    def lengths(self) -> Tensor:
        """[n] number of rows of each episode."""
        starts = (self.episode[1:] != self.episode[:-1]).nonzero().squeeze(1) + 1
        ends = torch.cat((starts, starts.new_tensor([len(self)] * (len(self) > 0))))
        return torch.cat((ends[:1], ends[1:] - ends[:-1]))

    @property
    def rank(self) -> Tensor:
        """[N] index of the row's episode, 0 ... n - 1."""
        return torch.arange(len(self.lengths)).repeat_interleave(self.lengths)

    @property
    def position(self) -> Tensor:
        """[N] rows since the episode's start."""
        starts = (self.lengths.cumsum(0) - self.lengths).repeat_interleave(self.lengths)
        return torch.arange(len(self)) - starts

    @cached_property
    def weight(self) -> Tensor:
        """[N] probability of the logged choice under the evaluated policy divided by that under the logging policy.

        It is 1 if they differ by rounding only, as errors would grow in products over hundreds of steps.
        """
        ratio = self.at_logged(self.model_propensities) / self.propensity
        return torch.where((ratio - 1).abs() < _ROUNDING, 1.0, ratio)

    @property
    def relative_sample_weight(self) -> Tensor:
        """[N] sample weights divided by their mean."""
        if self.sample_weight is None:
            return torch.ones((), dtype=torch.float64).expand(len(self))
        return self.sample_weight / self.sample_weight.mean()

    def at_logged(self, values: Tensor) -> Tensor:
        """Returns values [N, K] at the logged choice, [N]."""
        return select_choice(values, self.action)


def build_evaluation_rows(
    batches: Iterable[TransitionBatch],
    episodes: NDArray[np.int64],
    *,
    policy: PolicyProbabilities,
    models: RewardAndQModels | None,
    metric_names: tuple[str, ...] = (),
    further: Mapping[str, NDArray[Any] | None] | None = None,
) -> EvaluationRows:
    """Evaluates policy and models on logged rows.

    Args:
        batches: rows in order of time within each episode. Each row spans its own steps only, so an n-step source must
            be read with n = 1. Rows with weight 0 are padding and are left out.
        episodes: [N] code of each row that is not padding; rows of an episode need not be adjacent.
        policy: the evaluated policy; unknown probabilities are NaN and count as 0.
        models: models of the policy, fitted to other episodes; None for predictions of 0.
        metric_names: names of the M columns of `metrics`.
        further: [N] number, unit, sample_weight and predicted_reward of these rows, as far as they are known.
    """
    names = (REWARD_NAME, *metric_names)
    with torch.no_grad():
        parts = [_columns_of(batch, policy, models) for batch in batches] or [_empty_columns(names)]
    num_choices = max(part["mask"].shape[1] for part in parts)
    codes = torch.from_numpy(np.ascontiguousarray(episodes, dtype=np.int64))
    order = torch.argsort(codes, stable=True)
    columns = {"episode": codes[order]}
    for name, values in (further or {}).items():
        if values is not None:
            columns[name] = torch.from_numpy(np.ascontiguousarray(values))[order]
    for name in [*parts[0]]:  # parts are emptied meanwhile, so that memory holds the page once
        whole = torch.cat([pad_column(name, part.pop(name), num_choices) for part in parts])
        columns[name] = whole.index_select(0, order)
    if models is None:
        zero = torch.zeros(1, 1, 1, dtype=torch.float64)
        predicted = zero.expand(len(order), num_choices, len(names))
        columns |= {"reward_model": predicted, "q_values": predicted, "next_value": predicted[:, 0]}
    return EvaluationRows(names=names, **columns)


def gather_page(part: EvaluationRows, sequence: Tensor, group: Group) -> EvaluationRows | None:
    """Returns the page of all ranks' rows on rank 0, ordered by (episode, sequence), and None on the other ranks.

    The result does not depend on how rows are divided among ranks. Rank 0 holds the whole page, its own part and, for
    a moment, a column of another rank; the other ranks hold only their part.

    Args:
        part: this rank's rows; an episode has the same code on every rank.
        sequence: [N] int64, position of each row of the part in its episode.
        group: all ranks; every rank calls it.
    """
    sizes = group.all_gather(len(part))
    num_choices = max(group.all_gather(part.mask.shape[1]))
    keys = [list(group.gather(key)) for key in (sequence, part.episode)]
    indices = torch.split(_order(*map(torch.cat, keys)), list(sizes)) if group.is_first else ()
    columns = {}
    for name, column in part.columns.items():
        whole = _join_parts(group.gather(pad_column(name, column, num_choices)), indices, sum(sizes))
        if whole is not None:
            columns[name] = whole
    return EvaluationRows(names=part.names, **columns) if group.is_first else None


def pad_column(name: str, column: Tensor, num_choices: int) -> Tensor:
    """Pads a page's column with zeros to a number of choices, if it has an axis of choices."""
    missing = num_choices - column.shape[1] if name in BY_CHOICE else 0
    if not missing:
        return column  # F.pad would copy it
    return F.pad(column, (*(0, 0) * (column.dim() - 2), 0, missing))


def tables_of(page: EvaluationRows, gamma: float) -> tuple[EpisodeTable, ...]:
    """Returns the rows of a page by episode, a table per outcome; the tables share tensors without outcomes.

    A row is discounted by gamma to the power of the steps that the earlier rows of its episode span.
    """
    shape = (len(page.lengths), int(page.lengths.max()))
    is_full = shape[0] * shape[1] == len(page)
    index = () if is_full else (page.rank, page.position)

    def table(values: Tensor, fill: float = 0.0) -> Tensor:
        if is_full:
            return values.reshape(shape)
        return torch.full(shape, fill, dtype=torch.float64).index_put_(index, values)

    steps = table(page.steps)
    running = table(torch.ones(len(page), dtype=torch.float64))
    weight = table(page.weight, 1.0)
    discount = torch.pow(gamma, steps.cumsum(1) - steps) * running
    nothing = torch.zeros((), dtype=torch.float64).expand(shape)
    if _are_zeros(page.q_values):  # no models
        tail_discount = nothing
    else:
        last = torch.zeros(len(page), dtype=torch.float64)
        last[page.lengths.cumsum(0) - 1] = 1.0
        tail_discount = torch.pow(gamma, steps.cumsum(1)) * table(last)

    def at_logged(values: Tensor) -> Tensor:
        return nothing if _are_zeros(values) else table(page.at_logged(values))

    def average(values: Tensor) -> Tensor:
        return nothing if _are_zeros(values) else table(expected_value(values, page.model_propensities))

    def table_of(outcome: int) -> EpisodeTable:
        reward_model = page.reward_model[:, :, outcome]
        q = page.q_values[:, :, outcome]
        return EpisodeTable(
            running=running,
            weight=weight,
            discount=discount,
            reward=table(page.outcomes[:, outcome]),
            reward_taken=at_logged(reward_model),
            reward_expected=average(reward_model),
            value_taken=at_logged(q),
            value_expected=average(q),
            tail=tail_discount * table(page.next_value[:, outcome]),
        )

    return tuple(map(table_of, range(len(page.names))))


def episode_groups(lengths: Tensor, max_cells: int = 2**17) -> list[Tensor]:
    """Returns the row numbers of groups of whole episodes; the episodes of a group have about the same length.

    A group is a single episode or has at most `max_cells` cells, padding included.

    Args:
        lengths: [n] number of rows of each episode, one after another.
        max_cells: largest product of a group's episodes and the rows of its longest episode.
    """
    order = lengths.argsort(stable=True)
    starts = (lengths.cumsum(0) - lengths)[order]
    lengths = lengths[order]
    groups = []
    start = 0
    while start < len(lengths):
        ahead = lengths[start : start + max_cells]
        cells = torch.arange(1, len(ahead) + 1) * ahead
        stop = start + max(1, int((cells <= max_cells).sum()))
        group_lengths = lengths[start:stop]
        first = (group_lengths.cumsum(0) - group_lengths).repeat_interleave(group_lengths)
        groups.append(starts[start:stop].repeat_interleave(group_lengths) + torch.arange(len(first)) - first)
        start = stop
    return groups


def held_out(episode_hash: NDArray[np.uint64], share: float) -> NDArray[np.bool_]:
    """Returns which episodes are held out, given the hash of each: about `share` of them.

    The choice depends on the hash alone and is the same on every process. The hash is mixed first, so that the choice
    is independent of any other split by the same hash.
    """
    return np.asarray((mix(episode_hash.astype(np.uint64)) >> np.uint64(11)).astype(np.float64) < share * 2.0**53)


def _columns_of(
    batch: TransitionBatch, policy: PolicyProbabilities, models: RewardAndQModels | None
) -> dict[str, Tensor]:
    predictions = {}
    if models is not None:
        reward_model, q_values = models.predict(batch.state, batch.actions)
        next_q = _allowed_only(models.predict(batch.next_state, batch.next_actions)[1], batch.next_actions.mask)
        next_propensities = _normalize(policy(batch.next_state, batch.next_actions).double())
        predictions = {
            "reward_model": _allowed_only(reward_model, batch.actions.mask),
            "q_values": _allowed_only(q_values, batch.actions.mask),
            "next_value": batch.bootstrap.unsqueeze(1) * (next_propensities.unsqueeze(2) * next_q).sum(1),
        }
    columns = {
        "action": batch.action,
        "mask": batch.actions.mask,
        "steps": batch.steps.double(),
        "bootstrap": batch.bootstrap.double(),
        "propensity": batch.propensity.double(),
        "model_propensities": _normalize(policy(batch.state, batch.actions).double()),
        "outcomes": outcomes_of(batch).double(),
        **predictions,
    }
    real = (batch.weight > 0).cpu()
    return {name: value.cpu()[real] for name, value in columns.items()}


def _empty_columns(names: tuple[str, ...]) -> dict[str, Tensor]:
    columns = {}
    for field in fields(EvaluationRows)[1:]:
        if field.name in ("episode", *_KNOWN_BEFORE):
            continue
        choices = (1,) * (field.name in BY_CHOICE)
        outcomes = (len(names),) * (field.name in BY_OUTCOME)
        dtype = _DTYPES.get(field.name, torch.float64)
        columns[field.name] = torch.zeros(0, *choices, *outcomes, dtype=dtype)
    return columns


def _are_zeros(values: Tensor) -> bool:
    """Returns whether a column is a single 0 repeated for all rows, as predictions are without models."""
    repeated = all(step == 0 or size == 1 for step, size in zip(values.stride(), values.shape, strict=True))
    return len(values) > 0 and repeated and not bool(values[(0,) * values.dim()])


def _normalize(propensities: Tensor) -> Tensor:
    # float32 probabilities sum to 1 up to 1e-7, an error that grows in products over hundreds of steps
    total = propensities.sum(1, keepdim=True).nan_to_num(1.0)  # NaN if some probabilities are unknown
    return propensities.nan_to_num(0.0) / total.clamp(min=torch.finfo(torch.float64).tiny)


def _allowed_only(values: Tensor, mask: Tensor) -> Tensor:
    # networks return finite but meaningless numbers for other choices
    return values.double().masked_fill(~mask.unsqueeze(2), 0.0)


def _order(sequence: Tensor, episode: Tensor) -> Tensor:
    """Returns the index of each row, [N], once rows are sorted by (episode, sequence)."""
    order = torch.from_numpy(np.lexsort((sequence.numpy(), episode.numpy())))
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))


def _join_parts(parts: Iterator[Tensor], indices: Sequence[Tensor], num_rows: int) -> Tensor | None:
    """Returns a column of num_rows rows with each part at its indices; None if there are no parts."""
    whole = None
    # `parts` is the first argument of zip, which advances it on every rank: on ranks other than 0 it sends and ends
    for values, index in zip(parts, indices, strict=True):
        if whole is None:
            whole = values.new_empty(num_rows, *values.shape[1:])
        whole[index] = values
    return whole
