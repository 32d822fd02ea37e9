"""The evaluation page: scored rows of a log beside what the evaluated policy and its models say of them.

batches ─► build_page ─► EvaluationPage [N, K] ─► episode_groups ─► tables_of ─► rl.sums.Episodes [n, L] per outcome
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from reagent_lite.algorithms.cpe_heads import CPEHeads, Policy
from reagent_lite.data.rows.hashes import mix
from reagent_lite.distributed.group import Group
from reagent_lite.rl.sums import Episodes
from reagent_lite.rl.td import chosen, expected_value
from reagent_lite.types import TransitionBatch

REWARD_NAME = "Reward"
BY_CHOICE = frozenset({"mask", "model_propensities", "reward_model", "q_values"})
"""Columns of a page that are [N, K] or [N, K, T]."""
BY_OUTCOME = frozenset({"outcomes", "reward_model", "q_values", "next_value"})
"""Columns whose last axis is T."""
_ROUNDING = 1e-6  # of probabilities, which logs and exported models have as float32
_DTYPES = {"episode": torch.int64, "action": torch.int64, "mask": torch.bool}  # the others are float64


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationPage:
    """N logged rows, episode after episode and in order inside each; K is the most choices of any row.

    Attributes:
        names: "Reward", then the metrics: T names.
        episode: [N] int64, a code per episode, non-decreasing.
        action: [N] int64, index of the logged choice.
        mask: [N, K] bool, choices of the row; false where it is padded.
        steps: [N] float64, time steps the row spans.
        bootstrap: [N] float64, 0 after a true end.
        propensity: [N] float64, logged policy's probability of `action`.
        model_propensities: [N, K] float64, evaluated policy's.
        outcomes: [N, T] float64, reward and metrics.
        reward_model: [N, K, T] float64, expected outcomes.
        q_values: [N, K, T] float64, values of the evaluated policy.
        next_value: [N, T] float64, value of the next state under the evaluated policy; 0 after a true end.
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

    def __len__(self) -> int:
        return len(self.action)

    def rows(self, index: Tensor) -> EvaluationPage:
        """Returns the page of some rows, given as a bool mask [N] or as indices."""
        places = index.nonzero().squeeze(1) if index.dtype == torch.bool else index
        # half the time of values[places]
        columns = {name: values.index_select(0, places) for name, values in self.columns.items()}
        return EvaluationPage(names=self.names, **columns)

    def only(self, first: int, stop: int) -> EvaluationPage:
        """Returns the page of some outcomes, by number, without copying them."""
        parts = {name: getattr(self, name)[..., first:stop] for name in BY_OUTCOME}
        return replace(self, names=self.names[first:stop], **parts)

    @property
    def columns(self) -> dict[str, Tensor]:
        """The columns by name."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "names"}

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, all columns together."""
        return sum(column[:1].nbytes for column in self.columns.values())

    @property
    def rank(self) -> Tensor:
        """[N] number of the row's episode, 0 ... n - 1."""
        return _runs(self.episode)[0]

    @property
    def position(self) -> Tensor:
        """[N] rows since the episode's start."""
        lengths = _runs(self.episode)[1]
        starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
        return torch.arange(len(self)) - starts

    @property
    def weight(self) -> Tensor:
        """[N] probability of the logged choice under the evaluated policy over that under the logged one.

        It is 1 where they differ by rounding only, which products over hundreds of steps would show.
        """
        ratio = self.of_taken(self.model_propensities) / self.propensity
        return torch.where((ratio - 1).abs() < _ROUNDING, 1.0, ratio)

    def of_taken(self, values: Tensor) -> Tensor:
        """Returns values [N, K] at the logged choice, [N]."""
        return chosen(values, self.action)


def build_page(
    batches: Iterable[TransitionBatch],
    episodes: NDArray[np.int64],
    *,
    policy: Policy,
    models: CPEHeads | None,
    metric_names: tuple[str, ...] = (),
) -> EvaluationPage:
    """Evaluates policy and models on logged rows.

    Args:
        batches: rows in order of time inside each episode; each row spans its own steps only, so an n-step source
            must be read with n = 1 here. Rows of weight 0 are padding and left out.
        episodes: [N] a code per row that is not padding; rows of an episode need not lie together.
        policy: the evaluated policy; NaN for a probability that is not known, which counts as 0.
        models: those of the policy, fitted to other episodes (held_out); None: what they say is 0.
        metric_names: names of the M columns of `metrics`.

    Raises:
        ValueError: if `episodes` has not one entry per row.
    """
    names = (REWARD_NAME, *metric_names)
    with torch.no_grad():
        parts = [_page_of(batch, policy, models, names) for batch in batches] or [_empty_page(names)]
    num_choices = max(part.mask.shape[1] for part in parts)
    columns = {
        name: torch.cat([padded(name, part.columns[name], num_choices) for part in parts]) for name in parts[0].columns
    }
    if len(columns["action"]) != len(episodes):
        raise ValueError(f"{len(episodes)} episode codes for {len(columns['action'])} rows")
    columns["episode"] = torch.from_numpy(np.ascontiguousarray(episodes, dtype=np.int64))
    page = EvaluationPage(names=names, **columns)
    return page.rows(torch.argsort(page.episode, stable=True))


def gather_page(part: EvaluationPage, sequence: Tensor, group: Group) -> EvaluationPage | None:
    """Returns the page of all ranks' rows on rank 0, ordered by (episode, sequence), and None on the others.

    The result does not depend on how the rows were divided. Rank 0 holds the whole page beside its own part and, for a
    moment, one column of another rank's; the others hold their part.

    Args:
        part: this rank's rows; an episode has the same code on every rank.
        sequence: [N] int64, the place of each row of the part in its episode.
        group: all ranks; every one calls it.
    """
    if group.world_size == 1:
        return part
    sizes = group.each(len(part))
    num_choices = max(group.each(part.mask.shape[1]))
    keys = [list(group.gather(key)) for key in (sequence, part.episode)]
    places = torch.split(_places(*map(torch.cat, keys)), list(sizes)) if group.is_first else ()
    columns = {}
    for name, column in part.columns.items():
        whole = _joined(group.gather(padded(name, column, num_choices)), places, sum(sizes))
        if whole is not None:
            columns[name] = whole
    return EvaluationPage(names=part.names, **columns) if group.is_first else None


def padded(name: str, column: Tensor, num_choices: int) -> Tensor:
    """Returns a column of a page with more choices, of zeros, if it has an axis of choices."""
    missing = num_choices - column.shape[1] if name in BY_CHOICE else 0
    return F.pad(column, (*(0, 0) * (column.dim() - 2), 0, missing)) if missing else column  # else a copy


def tables_of(page: EvaluationPage, gamma: float) -> tuple[Episodes, ...]:
    """Lays the rows of a page out by episode, for every outcome; what outcomes share is one tensor.

    A row is discounted by gamma to the power of the steps that rows before it in the episode span.
    """
    rank = page.rank
    position = page.position
    shape = (int(rank[-1]) + 1, int(position.max()) + 1)

    def table(values: Tensor, fill: float = 0.0) -> Tensor:
        return torch.full(shape, fill, dtype=torch.float64).index_put_((rank, position), values)

    steps = table(page.steps)
    running = table(torch.ones(len(page), dtype=torch.float64))
    weight = table(page.weight, 1.0)
    discount = torch.pow(gamma, steps.cumsum(1) - steps) * running
    last = torch.cat((rank[1:] != rank[:-1], torch.ones(1, dtype=torch.bool)))
    tail_discount = torch.pow(gamma, steps.cumsum(1)) * table(last.double())

    def of(target: int) -> Episodes:
        reward_model = page.reward_model[:, :, target]
        q = page.q_values[:, :, target]
        pi = page.model_propensities
        return Episodes(
            running=running,
            weight=weight,
            discount=discount,
            reward=table(page.outcomes[:, target]),
            reward_taken=table(page.of_taken(reward_model)),
            reward_expected=table(expected_value(reward_model, pi)),
            value_taken=table(page.of_taken(q)),
            value_expected=table(expected_value(q, pi)),
            tail=tail_discount * table(page.next_value[:, target]),
        )

    return tuple(map(of, range(len(page.names))))


def episode_groups(episode: Tensor, max_cells: int = 2**17, max_episodes: int = 4096) -> list[Tensor]:
    """Returns rows of whole episodes, group by group, so that those of one group are about as long.

    Laid out beside each other a group is at most `max_cells` large, padding included, or one episode.

    Args:
        episode: [N] a code per row; an episode's rows lie together.
        max_cells: episodes of the group times rows of its longest.
        max_episodes: the most episodes of a group.
    """
    lengths = _runs(episode)[1]
    order = lengths.argsort(stable=True)
    starts = (lengths.cumsum(0) - lengths)[order]
    lengths = lengths[order]
    groups = []
    start = 0
    while start < len(lengths):
        ahead = lengths[start : start + max_episodes]
        cells = torch.arange(1, len(ahead) + 1) * ahead
        stop = start + max(1, int((cells <= max_cells).sum()))
        own = lengths[start:stop]
        first = (own.cumsum(0) - own).repeat_interleave(own)
        groups.append(starts[start:stop].repeat_interleave(own) + torch.arange(len(first)) - first)
        start = stop
    return groups


def held_out(episode_hash: NDArray[np.uint64], share: float) -> NDArray[np.bool_]:
    """Returns which rows are scored, [N], so that an episode lies wholly on one side.

    About `share` of the episodes are true; all others are for fitting. The choice depends on the hash alone, and the
    hash is mixed first, so that it is independent of any other split by the same hash, and equal on every process.
    """
    return np.asarray((mix(episode_hash.astype(np.uint64)) >> np.uint64(11)).astype(np.float64) < share * 2.0**53)


def _page_of(batch: TransitionBatch, policy: Policy, models: CPEHeads | None, names: tuple[str, ...]) -> EvaluationPage:
    outcomes = torch.cat((batch.reward.unsqueeze(1), batch.metrics), 1)
    if models is None:
        reward_model = q_values = outcomes.new_zeros(*batch.actions.mask.shape, len(names))
        next_value = torch.zeros_like(outcomes, dtype=torch.float64)
    else:
        reward_model, q_values = models.predict(batch.state, batch.actions)
        next_q = _allowed_only(models.predict(batch.next_state, batch.next_actions)[1], batch.next_actions.mask)
        next_propensities = _normalized(policy(batch.next_state, batch.next_actions).double())
        next_value = batch.bootstrap.unsqueeze(1) * (next_propensities.unsqueeze(2) * next_q).sum(1)
    columns = {
        "episode": torch.zeros_like(batch.action),
        "action": batch.action,
        "mask": batch.actions.mask,
        "steps": batch.steps.double(),
        "bootstrap": batch.bootstrap.double(),
        "propensity": batch.propensity.double(),
        "model_propensities": _normalized(policy(batch.state, batch.actions).double()),
        "outcomes": outcomes.double(),
        "reward_model": _allowed_only(reward_model, batch.actions.mask),
        "q_values": _allowed_only(q_values, batch.actions.mask),
        "next_value": next_value,
    }
    real = (batch.weight > 0).cpu()
    return EvaluationPage(names=names, **{name: value.cpu()[real] for name, value in columns.items()})


def _empty_page(names: tuple[str, ...]) -> EvaluationPage:
    columns = {}
    for field in fields(EvaluationPage)[1:]:
        choices = (1,) * (field.name in BY_CHOICE)
        outcomes = (len(names),) * (field.name in BY_OUTCOME)
        dtype = _DTYPES.get(field.name, torch.float64)
        columns[field.name] = torch.zeros(0, *choices, *outcomes, dtype=dtype)
    return EvaluationPage(names=names, **columns)


def _runs(episode: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the number of each row's run of equal codes, [N], and the runs' lengths, [n]."""
    _, rank, lengths = torch.unique_consecutive(episode, return_inverse=True, return_counts=True)
    return rank, lengths


def _normalized(propensities: Tensor) -> Tensor:
    # float32 probabilities sum to 1 only to 1e-7, which products over hundreds of steps would show
    total = propensities.sum(1, keepdim=True).nan_to_num(1.0)  # NaN where the policy is known in part
    return propensities.nan_to_num(0.0) / total.clamp(min=torch.finfo(torch.float64).tiny)


def _allowed_only(values: Tensor, mask: Tensor) -> Tensor:
    # networks give finite but meaningless numbers elsewhere
    return values.double().masked_fill(~mask.unsqueeze(2), 0.0)


def _places(sequence: Tensor, episode: Tensor) -> Tensor:
    """Returns the number of each row, [N], in the order of (episode, sequence)."""
    order = torch.from_numpy(np.lexsort((sequence.numpy(), episode.numpy())))
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))


def _joined(parts: Iterator[Tensor], places: Sequence[Tensor], num_rows: int) -> Tensor | None:
    """Returns a column of so many rows, whose parts go to their places; None where there are no parts."""
    whole = None
    for values, place in zip(parts, places, strict=True):  # the parts first: elsewhere than on rank 0 it only sends
        if whole is None:
            whole = values.new_empty(num_rows, *values.shape[1:])
        whole[place] = values
    return whole
