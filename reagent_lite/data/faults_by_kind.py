"""The faults of many rows, with one problem for each kind of fault."""

import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from reagent_lite.errors import MAX_PROBLEMS, Problem, pluralize, raise_any

MAX_EXAMPLES = 3
"""Largest number of rows with the same fault that an error names; further rows are counted."""


@dataclass(slots=True, kw_only=True)
class FaultKind:
    """Rows with the same fault.

    Attributes:
        rule: name of the rule that they break; "" for rows that cannot be read.
        expected, todo: as in Problem.
        count: number of rows.
        examples: (where, got) as in Problem, for the first MAX_EXAMPLES rows.
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
        """Returns the problem of the first row, with the number of the others and some of them as examples.

        Args:
            at_least: whether there may be more than `count`.
        """
        (where, got), *others = self.examples
        if not others:
            return self.first
        file = where.rstrip(string.digits)  # named once
        examples = ", ".join(f"{other.removeprefix(file)} ({other_got})" for other, other_got in others)
        more = f"{'at least ' if at_least else ''}{pluralize(self.count - 1, 'more row')} like it: {examples}"
        return replace(self.first, got=f"{got}; {more}{' and others' if self.count > len(self.examples) else ''}")


@dataclass(slots=True)
class FaultsByKind:
    """The faults of a log's rows, by kind, in the order in which the kinds appear."""

    kinds: dict[str, FaultKind] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Number of rows with a fault."""
        return sum(kind.count for kind in self.kinds.values())

    def add(self, kind: FaultKind) -> None:
        """Adds rows with the same fault, which come after the rows added before."""
        so_far = self.kinds.setdefault(
            f"{kind.rule}: {kind.expected}. {kind.todo}", replace(kind, count=0, examples=[])
        )
        so_far.count += kind.count
        so_far.examples = (so_far.examples + kind.examples)[:MAX_EXAMPLES]

    def by_rule(self) -> list[tuple[str, int]]:
        """Returns (rule, number of rows that break it), the largest numbers first."""
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
        """Raises DataError, with one problem per kind, if a row has a fault."""
        raise_any(self.problems())


def raise_unread(problems: Sequence[Problem]) -> None:
    """Raises DataError if rows cannot be read, with one problem per kind.

    Readers stop at MAX_PROBLEMS, so that as many problems mean at least as many rows.
    """
    faults = FaultsByKind()
    for problem in problems[:MAX_PROBLEMS]:
        faults.add(
            FaultKind(expected=problem.expected, todo=problem.todo, count=1, examples=[(problem.where, problem.got)])
        )
    raise_any(faults.problems(at_least=len(problems) >= MAX_PROBLEMS))
