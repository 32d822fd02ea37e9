"""The faults of the rows of a block, each with the rule, the expected and the actual value, and advice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from reagent_lite.data.faults_by_kind import MAX_EXAMPLES, FaultKind, FaultsByKind
from reagent_lite.data.formats.blocks import Block
from reagent_lite.data.rows.matrices import Mask
from reagent_lite.errors import MAX_PROBLEMS

UNREADABLE = "unreadable"
"""The rule that is broken by a value of another type than its column's."""
NO_RULE = -1


@dataclass(slots=True)
class Faults:
    """The faulty rows of a block, and other facts that are collected in the same pass over it.

    A row has one fault, the first that was found, since others often follow from it.

    Attributes:
        block: the block.
        kinds: (rule, expected, todo) of each kind of fault.
        kind: [n] index of the row's fault in `kinds`; NO_RULE without a fault.
        got: {row: its actual value as text}, for the first MAX_PROBLEMS rows of each kind.
        features: ids of features that have a name.
        levels: {column: {id: {text: number of its values}}} of the features whose values are texts.
        unlisted: [n] whether the row has an action and an empty list of candidates.
        orders: {kind of sequence numbers: location of the first one}; see columns.require_one_order.
        ids_left_out: number of ids beyond the length of their feature.
    """

    block: Block
    kinds: list[tuple[str, str, str]] = field(default_factory=list)
    kind: NDArray[np.int32] = field(init=False)
    got: dict[int, str] = field(default_factory=dict)
    features: set[int] = field(default_factory=set)
    levels: dict[str, dict[int, dict[str, int]]] = field(default_factory=dict)
    unlisted: Mask = field(init=False)
    orders: dict[str, str] = field(default_factory=dict)
    ids_left_out: int = 0

    def __post_init__(self) -> None:
        self.kind = np.full(self.block.table.num_rows, NO_RULE, np.int32)
        self.unlisted = np.zeros(len(self.kind), bool)

    @property
    def rows(self) -> Mask:
        """[n] whether the row has a fault."""
        return np.not_equal(self.kind, NO_RULE)

    @property
    def count(self) -> int:
        """Number of rows with a fault."""
        return int(self.rows.sum())

    def add(
        self, rows: Mask, expected: str, got: Callable[[int], object], todo: str = "", rule: str = UNREADABLE
    ) -> None:
        """Records a fault of each row that is true in `rows` [n] and has none yet; `got` returns a row's value."""
        if not rows.any():
            return
        new = np.flatnonzero(rows & ~self.rows)
        self.kind[new] = len(self.kinds)
        self.kinds.append((rule, expected, todo))
        self.got |= {row: str(got(row)) for row in new[:MAX_PROBLEMS].tolist()}

    def by_kind(self) -> FaultsByKind:
        """Returns the faults by kind, in the order of the first row of each kind, with some rows as examples."""
        faults = FaultsByKind()
        rows = self.rows
        kinds, first, counts = np.unique(self.kind[rows], return_index=True, return_counts=True)
        for number in np.argsort(first).tolist():
            rule, expected, todo = self.kinds[kinds[number]]
            at = np.flatnonzero(self.kind == kinds[number])[:MAX_EXAMPLES].tolist()
            examples = [(self.block.where(row), self.got.get(row, "something else")) for row in at]
            count = int(counts[number])
            faults.add(FaultKind(rule=rule, expected=expected, todo=todo, count=count, examples=examples))
        return faults

    def rules(self) -> pa.Array:
        """Returns [n] the rule that each row breaks, null without a fault."""
        names = pa.array([rule for rule, _, _ in self.kinds], pa.string())
        return names.take(pa.array(self.kind, mask=~self.rows))

    def by_rule(self, names: pa.Array) -> dict[str, set[str]]:
        """Returns {rule: names of the rows that break it}, given the names [n] of all rows, null if a row has none."""
        names_by_rule: dict[str, set[str]] = {}
        for number, (rule, _, _) in enumerate(self.kinds):
            broken = names.filter(pa.array(self.kind == number)).drop_null()
            names_by_rule.setdefault(rule, set()).update(broken.to_pylist())
        return names_by_rule

    def require_none(self) -> None:
        """Raises DataError if a row has a fault."""
        if self.kinds:
            self.by_kind().require_none()
