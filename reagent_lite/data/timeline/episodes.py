"""Events of whole episodes in order: which are kept, which lead to a known state, and the span of each. Arrays only.

Row t is complete when it is known where it led: to the next row, to a true end, or, cut by a limit, to a state that the
row itself has. A transition spans complete rows only, and ends with the first that ends the episode.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from reagent_lite.config.timeline import TimelineSection
from reagent_lite.data.rows.matrices import Mask

Indices = NDArray[np.int64]
MAX_DUPLICATES = 3
"""Duplicates whose place the log names."""


@dataclass(slots=True)
class Counts:
    """Figures of paired episodes; those of parts add up.

    Attributes:
        figures: the figures of all rows, by name.
        outliers: "episodes" and "rows" left out since they are longer than others.
        refused: episodes by the rule that a row of theirs breaks.
        ids: {column: {feature: rows or candidates that have a value}}.
        duplicates: (file, line) of the first rows that have the mdp_id and sequence_number of another.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Episodes:
    """n events, sorted by episode and sequence_number.

    Attributes:
        section: how they are paired.
        start, stop: [n] the first row of the row's episode, and the row behind the last.
        sequence: [n] sequence_number.
        terminal, truncated: [n].
        shown: [n] whether the row has a next state of its own, which counts where it is truncated.
    """

    section: TimelineSection
    start: Indices
    stop: Indices
    sequence: Indices
    terminal: Mask
    truncated: Mask
    shown: Mask

    @classmethod
    def of(
        cls, section: TimelineSection, code: NDArray[np.int32], sequence: Indices, ends: tuple[Mask, Mask, Mask]
    ) -> Episodes:
        """Returns events by the code of each row's episode and their ends: terminal, truncated and shown."""
        first = np.append(True, code[1:] != code[:-1])[: len(code)]
        starts = np.flatnonzero(first)
        number = np.cumsum(first) - 1
        terminal, truncated, shown = ends
        return cls(
            section=section,
            start=starts[number],
            stop=np.append(starts[1:], len(code))[number],
            sequence=sequence,
            terminal=terminal,
            truncated=truncated,
            shown=shown,
        )

    def __len__(self) -> int:
        return len(self.start)

    def only(self, at: Indices) -> Episodes:
        """Returns the events of these numbers, in order."""
        ends = (self.terminal[at], self.truncated[at], self.shown[at])
        return Episodes.of(self.section, self.start[at].astype(np.int32), self.sequence[at], ends)

    def once(self, whole: Mask, counts: Counts) -> tuple[Indices, Indices]:
        """Returns the numbers of the rows of `whole` episodes (those that repeat none, those that do); counts both."""
        twice = whole & ~self.first & (self.sequence == np.roll(self.sequence, 1))
        counts.figures.update(rows=int(whole.sum()), duplicate_rows=int(twice.sum()))
        return np.flatnonzero(whole & ~twice), np.flatnonzero(twice)

    def no_longer(self, longest: float | None, at: Indices, counts: Counts) -> tuple[Indices, Episodes]:
        """Returns `at` [n] and the events without those of longer episodes, which it counts; None keeps all."""
        if longest is None:
            return at, self
        outliers = (self.stop - self.start) > longest
        counts.outliers.update(episodes=int((outliers & self.first).sum()), rows=int(outliers.sum()))
        return at[~outliers], self.only(np.flatnonzero(~outliers))

    @property
    def lengths(self) -> Counter[int]:
        """How many episodes have each number of rows."""
        return Counter((self.stop - self.start)[self.first].tolist())

    @property
    def first(self) -> Mask:
        """[n] whether an episode begins with the row."""
        return np.equal(self.start, np.arange(len(self)))

    @property
    def over(self) -> Mask:
        """[n] whether the episode ends with the row, by its own flags."""
        return self.terminal | self.truncated

    @property
    def followed(self) -> Mask:
        """[n] whether a row of the same episode follows."""
        return np.less(np.arange(1, len(self) + 1), self.stop)

    @property
    def complete(self) -> Mask:
        """[n] whether it is known where the row led."""
        goes_on = self.followed | self.section.addTerminalStateRow
        return self.terminal | (self.truncated & self.shown) | (~self.over & goes_on)

    @property
    def since_first(self) -> Indices:
        """[n] sequence numbers since the first row of the episode."""
        return self.sequence - self.sequence[self.start]

    def figures(self) -> Counter[str]:
        """Returns the figures that a timeline reports."""
        follows = ~self.first
        figures = {
            "paired_rows": np.ones(len(self), bool),
            "episodes": self.first,
            "one_row_episodes": self.stop - self.start == 1,
            "gaps": follows & (np.diff(self.sequence, prepend=self.sequence[:1]) > 1),
            "rows_after_an_end": follows & np.roll(self.over, 1),
            "terminal_rows": self.terminal,
            "truncated_rows": self.truncated,
            "last_rows_without_an_end": ~self.followed & ~self.over,
            "truncated_rows_without_next_state": self.truncated & ~self.shown,
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
        steps = np.ones(len(at), np.int64)
        going = np.ones(len(at), bool)
        over = self.over
        for k in range(1, self.section.steps):
            now = np.minimum(at + k, len(self) - 1)
            going &= ~over[now - 1] & (at + k < self.stop[at]) & complete[now]
            steps += going
        return SpannedRows(episodes=self, at=at, steps=steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpannedRows:
    """m transitions.

    Attributes:
        episodes: n events.
        at: [m] the first row of each.
        steps: [m] how many rows it spans.
    """

    episodes: Episodes
    at: Indices
    steps: Indices

    @property
    def end(self) -> Indices:
        """[m] the last row of each."""
        return self.at + self.steps - 1

    @property
    def terminal(self) -> Mask:
        """[m] whether the last row is a true end; without another word the last of an episode is one."""
        end = self.end
        rows = self.episodes
        return rows.terminal[end] | ~(rows.over[end] | rows.followed[end])

    @property
    def truncated(self) -> Mask:
        """[m] whether a limit cut the episode after the last row."""
        return self.episodes.truncated[self.end]

    @property
    def time_diff(self) -> Indices:
        """[m] sequence numbers up to what follows; one beyond the last row at a limit, whose time no log has."""
        sequence = self.episodes.sequence
        end = self.end
        following = sequence[np.minimum(end + 1, len(sequence) - 1)] if len(sequence) else sequence
        behind = np.where(self.truncated, sequence[end] + 1, following)
        return np.where(self.terminal, 0, behind - sequence[self.at])

    def summed(self, values: NDArray[np.float64], gamma: float) -> NDArray[np.float64]:
        """Returns [m, ...] Σ_k γ^k · values[k] over the rows of the span, NaN as 0; Sutton & Barto (2018), eq. 7.1."""
        total = np.nan_to_num(values[self.at])
        for k in range(1, int(self.steps.max(initial=1))):
            spanned = (self.steps > k).reshape(-1, *[1] * (values.ndim - 1))
            later = np.nan_to_num(values[np.minimum(self.at + k, len(values) - 1)])
            total = total + np.where(spanned, gamma**k * later, 0)
        return total
