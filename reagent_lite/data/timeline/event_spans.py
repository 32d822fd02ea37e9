"""Sorted events of whole episodes: which are kept, which lead to a known state, and the span of each. Arrays only.

A last row without an action and without possible actions is the state after an end: the row before it ends the episode,
and it is no decision itself.

A row is complete if it is known where it led: to the next row, to a true end, or, if a limit cut the episode, to a next
state of its own. A transition spans complete rows only, and at most up to the first row that ends the episode.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from reagent_lite.config.timeline_config import TimelineSection
from reagent_lite.data.rows.matrices import Mask

Indices = NDArray[np.int64]
MAX_DUPLICATES = 3
"""Largest number of duplicate rows whose locations are logged."""


@dataclass(slots=True)
class Counts:
    """Figures of paired episodes, which are added up over parts of a log.

    Attributes:
        figures: figures of all rows, by name.
        outliers: numbers of "episodes" that were left out as too long, and of their "rows".
        refused: {rule: number of episodes with a row that breaks it}.
        ids: {column: {feature: number of rows or candidates that have a value}}.
        duplicates: (file, line) of the first rows with the mdp_id and sequence_number of another row.
    """

    figures: Counter[str] = field(default_factory=Counter)
    outliers: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    ids: dict[str, Counter[int]] = field(default_factory=dict)
    duplicates: list[tuple[int, int]] = field(default_factory=list)

    def add(self, other: Counts) -> None:
        """Adds the counts of other episodes."""
        self.figures.update(other.figures)
        self.outliers.update(other.outliers)
        self.refused.update(other.refused)
        for column, ids in other.ids.items():
            self.ids.setdefault(column, Counter()).update(ids)
        self.duplicates = heapq.nsmallest(MAX_DUPLICATES, self.duplicates + other.duplicates)


class Ends(NamedTuple):
    """Flags of n rows.

    Attributes:
        terminal, truncated: [n] the row's own flags.
        has_next_state: [n] whether the row has a next state of its own, which is used if the row is truncated.
        without_choice: [n] whether no action was taken and none was possible.
    """

    terminal: Mask
    truncated: Mask
    has_next_state: Mask
    without_choice: Mask


@dataclass(frozen=True, slots=True, kw_only=True)
class Episodes:
    """n events, sorted by episode and sequence_number.

    Attributes:
        section: settings of the pairing.
        start, stop: [n] first row of the row's episode, and the row after its last.
        sequence: [n] sequence_number.
        ends: flags of the rows.
    """

    section: TimelineSection
    start: Indices
    stop: Indices
    sequence: Indices
    ends: Ends

    @classmethod
    def of(cls, section: TimelineSection, code: NDArray[np.int32], sequence: Indices, ends: Ends) -> Episodes:
        """Returns events, given the code of each row's episode, and the flags of rows."""
        first = np.append(True, code[1:] != code[:-1])[: len(code)]
        starts = np.flatnonzero(first)
        number = np.cumsum(first) - 1
        return cls(
            section=section,
            start=starts[number],
            stop=np.append(starts[1:], len(code))[number],
            sequence=sequence,
            ends=ends,
        )

    def __len__(self) -> int:
        return len(self.start)

    def only(self, at: Indices) -> Episodes:
        """Returns the events with these indices, in this order."""
        ends = Ends(*(flag[at] for flag in self.ends))
        return Episodes.of(self.section, self.start[at].astype(np.int32), self.sequence[at], ends)

    def without_duplicates(self, kept: Mask, counts: Counts) -> tuple[Indices, Indices]:
        """Returns the indices of (`kept` rows without duplicates, duplicates among them); counts both.

        A duplicate has the mdp_id and sequence_number of an earlier row.
        """
        duplicate = kept & ~self.first & (self.sequence == np.roll(self.sequence, 1))
        counts.figures.update(rows=int(kept.sum()), duplicate_rows=int(duplicate.sum()))
        return np.flatnonzero(kept & ~duplicate), np.flatnonzero(duplicate)

    def pair(self, longest: float | None, reward: NDArray[np.float64], counts: Counts) -> tuple[Indices, SpannedRows]:
        """Pairs the events of episodes of at most `longest` rows, or of all for None; counts these and the others.

        Args:
            longest: largest number of rows of an episode that is kept.
            reward: [n] rewards; they may be NaN.
            counts: the counts to which those of these episodes are added.

        Returns:
            (indices [k] of the events that are kept, the transitions of these k events).
        """
        outliers = np.zeros(len(self), bool)
        if longest is not None:
            outliers = (self.stop - self.start) > longest
            counts.outliers.update(episodes=int((outliers & self.first).sum()), rows=int(outliers.sum()))
        at = np.flatnonzero(~outliers)
        kept = self.only(at) if outliers.any() else self
        counts.figures.update(kept.figures(reward[at]))
        return at, kept.spans()

    @property
    def lengths(self) -> Counter[int]:
        """{number of rows: number of episodes with so many rows}."""
        return Counter((self.stop - self.start)[self.first].tolist())

    @property
    def first(self) -> Mask:
        """[n] whether the row is the first of its episode."""
        return np.equal(self.start, np.arange(len(self)))

    @property
    def truncated(self) -> Mask:
        """[n] whether a limit cut the episode after the row."""
        return self.ends.truncated

    @property
    def after_end(self) -> Mask:
        """[n] whether the row is the state after an end."""
        return self.ends.without_choice & ~self.truncated & ~self.followed

    @property
    def terminal(self) -> Mask:
        """[n] whether the episode ends with the row, by its own flag or as the state after an end follows."""
        after_end = self.after_end
        ends = self.followed & np.roll(after_end, -1) & ~self.truncated
        return (self.ends.terminal & ~after_end) | ends

    @property
    def over(self) -> Mask:
        """[n] whether the episode ends with the row."""
        return self.terminal | self.truncated

    @property
    def followed(self) -> Mask:
        """[n] whether a row of the same episode follows."""
        return np.less(np.arange(1, len(self) + 1), self.stop)

    @property
    def complete(self) -> Mask:
        """[n] whether it is known where the row led."""
        goes_on = self.followed | self.section.addTerminalStateRow
        complete = self.terminal | (self.truncated & self.ends.has_next_state) | (~self.over & goes_on)
        return complete & ~self.after_end

    @property
    def since_first(self) -> Indices:
        """[n] sequence_number minus that of the first row of the episode."""
        return self.sequence - self.sequence[self.start]

    def figures(self, reward: NDArray[np.float64]) -> Counter[str]:
        """Returns the figures that a timeline reports; `reward` [n] may be NaN."""
        follows = ~self.first
        figures = {
            "paired_rows": np.ones(len(self), bool),
            "episodes": self.first,
            "one_row_episodes": self.stop - self.start == 1,
            "gaps": follows & (np.diff(self.sequence, prepend=self.sequence[:1]) > 1),
            "rows_after_an_end": follows & np.roll(self.over, 1) & ~self.after_end,
            "states_after_an_end": self.after_end,
            "rewards_after_an_end": self.after_end & (np.nan_to_num(reward) != 0),
            "terminal_rows": self.terminal,
            "truncated_rows": self.truncated,
            "last_rows_without_an_end": ~self.followed & ~self.over & ~self.after_end,
            "truncated_rows_without_next_state": self.truncated & ~self.ends.has_next_state,
            "complete_rows": self.complete,
        }
        return Counter({name: int(mask.sum()) for name, mask in figures.items()})

    def spans(self) -> SpannedRows:
        """Returns the transitions that begin with a complete row inside the time window."""
        complete = self.complete
        at = np.flatnonzero(complete)
        limit = self.section.timeWindowLimit
        if limit is not None:
            at = at[self.since_first[at] <= limit]
        goes_on = ~self.over & self.followed & np.append(complete, False)[1:]
        return SpannedRows(episodes=self, at=at, steps=span_steps(at, self.section.steps, goes_on))


@dataclass(frozen=True, slots=True, kw_only=True)
class SpannedRows:
    """m transitions, each of which spans consecutive rows of an episode.

    Attributes:
        episodes: n events.
        at: [m] the first row of each transition.
        steps: [m] number of rows that it spans.
    """

    episodes: Episodes
    at: Indices
    steps: Indices

    @property
    def end(self) -> Indices:
        """[m] the last row of each transition."""
        return self.at + self.steps - 1

    @property
    def terminal(self) -> Mask:
        """[m] whether the last row is a true end, which the last row of an episode is if it has no flag of its own."""
        end = self.end
        rows = self.episodes
        return rows.terminal[end] | ~(rows.over[end] | rows.followed[end])

    @property
    def truncated(self) -> Mask:
        """[m] whether a limit cut the episode after the last row."""
        return self.episodes.truncated[self.end]

    @property
    def time_diff(self) -> Indices:
        """[m] difference to the sequence_number of the following row; 0 at a true end.

        At a limit no row follows: its sequence_number is taken to be one more than that of the last row.
        """
        sequence = self.episodes.sequence
        end = self.end
        following = sequence[np.minimum(end + 1, len(sequence) - 1)] if len(sequence) else sequence
        after = np.where(self.truncated, sequence[end] + 1, following)
        return np.where(self.terminal, 0, after - sequence[self.at])

    def sum_values(self, values: NDArray[np.float64], gamma: float) -> NDArray[np.float64]:
        """Returns [m, ...] Σ_k γ^k · values[k] over the rows of the span, NaN as 0."""
        values = np.nan_to_num(values)
        return sum_spans(values[self.at], values, self.at, self.steps, gamma)


def span_steps(at: Indices, count: int, goes_on: Mask) -> Indices:
    """Returns [m] the number of rows, at most `count`, that each span has.

    Args:
        at: [m] the first row of each span among n rows.
        count: largest number of rows of a span.
        goes_on: [n] whether a span that has the row may have the following one, too.
    """
    steps = np.ones(len(at), np.int64)
    going = np.ones(len(at), bool)
    for k in range(count - 1):
        going &= goes_on[np.minimum(at + k, len(goes_on) - 1)]
        steps += going
    return steps


def sum_spans(
    first: NDArray[np.float64], values: NDArray[np.float64], at: Indices, steps: Indices, gamma: float
) -> NDArray[np.float64]:
    """Returns [m, ...] first + Σ_{k > 0} γ^k · values[at + k] over the rows of each span.

    Args:
        first: [m, ...] the values of the first rows.
        values: [n, ...] the values of all rows.
        at: [m] the first row of each span.
        steps: [m] number of rows that it has.
        gamma: discount per row.

    Source: Sutton & Barto (2018), eq. 7.1.
    """
    total = first
    for k in range(1, int(steps.max(initial=1))):
        spanned = (steps > k).reshape(-1, *[1] * (values.ndim - 1))
        total = total + np.where(spanned, gamma**k * values[np.minimum(at + k, len(values) - 1)], 0)
    return total
