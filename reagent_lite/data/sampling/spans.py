"""The span of each row: one step, a time difference, or n rows of its episode.

one step     r_t                              steps 1            next state of row t
time         r_t                              steps Δt / unit    next state of row t
n-step       Σ γ^k r_{t+k}, k < m             steps m            next state of row t + m − 1,  m = n or up to the end
"""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from reagent_lite.data.copy.training_copy import TrainingCopy
from reagent_lite.data.timeline.event_spans import span_steps, sum_spans
from reagent_lite.errors import pluralize

T = TypeVar("T", bound=np.generic)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """The spans of R rows.

    Attributes:
        reward: [R] float32, summed and discounted over the span.
        steps: [R] uint8 or float32, length of the span in time steps.
        last: [R] row whose next state, next actions and bootstrap end the span; None if every span is one row.
    """

    reward: NDArray[np.float32]
    steps: NDArray[np.float32] | NDArray[np.uint8]
    last: NDArray[np.int64] | None = None

    def at_end(self, values: NDArray[T]) -> NDArray[T]:
        """Returns values [R, ...] at the row that ends each span; the values themselves if every span is one row."""
        return values if self.last is None else np.asarray(values)[self.last]


def single_steps(copy: TrainingCopy) -> Spans:
    """Returns rows as they are: of one step each, or of the steps that a timeline has summed."""
    return Spans(reward=copy.reward, steps=copy.step)


def time_steps(copy: TrainingCopy, unit_length: float) -> Spans:
    """Returns rows that span time_diff / unit_length steps each.

    Raises:
        DataError: a row that is not terminal has no positive time_diff, or spans several rows already.
    """
    refuse_summed(copy, "rl.use_seq_num_diff_as_time_diff is true", "set use_seq_num_diff_as_time_diff to false")
    wrong = (copy.time_diff <= 0) & (copy.bootstrap > 0)
    expected = "a time_diff above 0, as rl.use_seq_num_diff_as_time_diff is true"
    todo = "Correct the log, or set use_seq_num_diff_as_time_diff to false"
    copy.refuse(wrong, expected, lambda row: f"{copy.time_diff[row]:g}" if copy.time_diff[row] else "none, or 0", todo)
    # a terminal row's time_diff discounts nothing, and with 0 steps and γ 0 there would be 0 ** 0
    steps = np.where(copy.bootstrap > 0, copy.time_diff / unit_length, 1)
    return Spans(reward=copy.reward, steps=steps.astype(np.float32))


def n_steps(
    copy: TrainingCopy, count: int, gamma: float, boost: NDArray[np.float64] | None = None, *, maxq: bool = True
) -> Spans:
    """Returns rows that span up to `count` rows of their episode.

    Args:
        copy: rows sorted by episode.
        count: n.
        gamma: discount per row.
        boost: [K] reward added by action to all rows of the span except the first, to which the learner adds it.
        maxq: false if the target needs the logged next action (SARSA): a span ends before a row at a limit that has
            none.

    Raises:
        DataError: a row spans several rows already.
    """
    refuse_summed(copy, f"rl.multi_steps is {count}", "leave rl.multi_steps out")
    rows = np.arange(len(copy.reward))
    reward = copy.reward.astype(np.float64)
    later = reward if boost is None else reward + np.where(copy.action >= 0, boost[np.maximum(copy.action, 0)], 0)
    stops = (copy.truncated > 0) & (copy.next_action < 0) & (not maxq)
    goes_on = copy.follows.astype(bool) & (copy.bootstrap > 0) & ~np.append(stops, True)[1:]
    steps = span_steps(rows, count, goes_on)
    summed = sum_spans(reward, later, rows, steps, gamma)
    return Spans(reward=summed.astype(np.float32), steps=steps.astype(np.float32), last=rows + steps - 1)


def learnable_rows(
    copy: TrainingCopy, spans: Spans, *, maxq: bool, unit_reward: bool
) -> tuple[NDArray[np.int64] | None, tuple[str, ...]]:
    """Returns the rows that a learner may use, [n] int64 or None for all, and sentences about the others.

    Args:
        copy: the training copy.
        spans: its spans.
        maxq: false if the target needs the logged next action (SARSA).
        unit_reward: whether rewards must lie in [0, 1] (cross-entropy).

    Raises:
        DataError: a row that is not terminal has no next action for SARSA, or a reward is out of range.
    """
    notes = []
    usable = np.asarray(copy.action) >= 0
    if not usable.all():
        notes.append(f"{pluralize(int((~usable).sum()), 'row has', 'rows have')} no action and no part in the loss")
    if not maxq:
        missing = (spans.at_end(copy.next_action) < 0) & (spans.at_end(copy.bootstrap) > 0)
        cut = missing & (spans.at_end(copy.truncated) > 0)
        todo = "Add next_action to rows that go on, or set rl.maxq_learning to true"
        copy.refuse(missing & ~cut, "a next_action, as rl.maxq_learning is false", lambda _: "none", todo)
        if cut.any():
            ends = pluralize(int(cut.sum()), "row ends", "rows end")
            notes.append(f"{ends} at a time limit without a next action; SARSA leaves that out")
        usable &= ~cut
    if unit_reward:
        wrong = (np.asarray(copy.reward) < 0) | (np.asarray(copy.reward) > 1)
        expected = "a reward in [0, 1], as rl.q_network_loss is bce_with_logits"
        copy.refuse(wrong, expected, lambda row: f"{copy.reward[row]:g}", "Rescale the reward, or choose another loss")
    return None if usable.all() else np.flatnonzero(usable), tuple(notes)


def refuse_summed(copy: TrainingCopy, reason: str, todo: str) -> None:
    """Raises DataError if a row of a copy spans several steps, for a reason in words."""
    several = np.asarray(copy.step) > 1
    todo = f"Make the timeline with steps 1, or {todo}"
    copy.refuse(several, f"rows of one step, as {reason}", lambda row: f"step {copy.step[row]}", todo)
