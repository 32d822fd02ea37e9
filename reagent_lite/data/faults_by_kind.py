"""Faults of many rows, one problem for each kind of fault."""

import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from reagent_lite.errors import MAX_PROBLEMS, Problem, counted, raise_any

MAX_EXAMPLES = 3
"""Rows with the same fault that an error names; the rest is counted."""


@dataclass(slots=True, kw_only=True)
class FaultKind:
    """Rows with the same fault.

    Attributes:
        rule: the name of the rule they break; "" for rows that cannot be read.
        expected, todo: as in Problem.
        count: how many rows.
        examples: place and value of the first MAX_EXAMPLES of them.
    """

    rule: str = ""
    expected: str
    todo: str
    count: int
    examples: list[tuple[str, str]]

    @property
    def first(self) -> Problem:
        """The problem of the first row alone."""
        where, got = self.examples[0]
        return Problem(where, self.expected, got, self.todo)

    def problem(self, *, at_least: bool = False) -> Problem:
        """Returns the problem of the first row, with the number and some examples of the others.

        Args:
            at_least: whether there may be more than `count`.
        """
        (where, got), *others = self.examples
        if not others:
            return self.first
        before = where.rstrip(string.digits)  # the file is named once
        shown = ", ".join(f"{place_of_row.removeprefix(before)} ({instead})" for place_of_row, instead in others)
        more = f"{'at least ' if at_least else ''}{counted(self.count - 1, 'more row')} like it: {shown}"
        return replace(self.first, got=f"{got}; {more}{' and others' if self.count > len(self.examples) else ''}")


@dataclass(slots=True)
class FaultsByKind:
    """The faults of rows in the order in which their kinds appear; parts of a log are merged."""

    kinds: dict[str, FaultKind] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Rows with a fault."""
        return sum(kind.count for kind in self.kinds.values())

    def add(self, kind: FaultKind) -> None:
        """Adds rows with the same fault, which follow those added before."""
        so_far = self.kinds.setdefault(
            f"{kind.rule}: {kind.expected}. {kind.todo}", replace(kind, count=0, examples=[])
        )
        so_far.count += kind.count
        so_far.examples = (so_far.examples + kind.examples)[:MAX_EXAMPLES]

    def by_rule(self) -> list[tuple[str, int]]:
        """Returns how many rows break each rule, the most broken first."""
        counts = Counter[str]()
        for kind in self.kinds.values():
            counts[kind.rule] += kind.count
        return sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))

    def merge(self, later: "FaultsByKind") -> None:
        """Adds the faults of later rows."""
        for kind in later.kinds.values():
            self.add(kind)

    def problems(self, *, at_least: bool = False) -> list[Problem]:
        """Returns one problem per kind; see FaultKind.problem."""
        return [kind.problem(at_least=at_least) for kind in self.kinds.values()]

    def require_none(self) -> None:
        """Raises DataError, with one problem per kind, where a row has a fault."""
        raise_any(self.problems())


def raise_unread(problems: Sequence[Problem]) -> None:
    """Raises DataError for rows that cannot be read, one problem per kind; MAX_PROBLEMS of them ended the reading."""
    faults = FaultsByKind()
    for problem in problems[:MAX_PROBLEMS]:
        faults.add(
            FaultKind(expected=problem.expected, todo=problem.todo, count=1, examples=[(problem.where, problem.got)])
        )
    raise_any(faults.problems(at_least=len(problems) >= MAX_PROBLEMS))
