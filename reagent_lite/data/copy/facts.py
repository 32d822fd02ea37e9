"""What several machines hold, compared and merged: each tells its facts, all of them reach the same result.

node 0: training copy ─► Facts ─┐
node 1: training copy ─► Facts ─┴► agree ─► Agreement: rows by node; ids and names of all; one hash
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reagent_lite.data.copy.place import CopyManifest
from reagent_lite.data.copy.training_copy import TrainingCopy
from reagent_lite.data.features.normalization import normalization_json
from reagent_lite.errors import DataError, Problem, counted
from reagent_lite.types import NormalizationSpec

ORIGIN = ("origin_file.npy", "origin_line.npy")
"""Arrays that say where a row stood in the input: copies that were split or shuffled differently differ in them."""

_MOST_NAMES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a machine's data is.

    Attributes:
        node: number of the machine.
        rows: transitions.
        action_names: of discrete actions; empty for candidates.
        state_ids, action_ids, metric_names: as in TrainingCopy.
        content: sha256 over the rows in the copy's order; "" where there are none.
        manifest: digest of the copy's manifest; of nothing where there are no rows.
        counts, notes: as in TrainingCopy.
        normalization: sha256 of each given normalization, by column.
    """

    node: int
    rows: int
    action_names: tuple[str, ...]
    state_ids: tuple[int, ...]
    action_ids: tuple[int, ...]
    metric_names: tuple[str, ...]
    content: str
    manifest: str
    counts: dict[str, int]
    notes: tuple[str, ...]
    normalization: dict[str, str]

    @classmethod
    def of(cls, copy: TrainingCopy, node: int, given: Mapping[str, NormalizationSpec]) -> "Facts":
        """Returns the facts of a training copy and of the normalization that files give."""
        return cls(
            node=node,
            rows=len(copy),
            action_names=copy.action_names,
            state_ids=copy.state_ids,
            action_ids=copy.action_ids,
            metric_names=copy.metric_names,
            content=_content(copy) if len(copy) else "",
            manifest=copy.digest if len(copy) else _sha256(b""),
            counts=copy.counts,
            notes=copy.notes,
            normalization={name: _sha256(_encoded(normalization_json(spec))) for name, spec in given.items()},
        )

    @classmethod
    def read(cls, text: str) -> "Facts":
        """Returns the facts that `json` wrote."""
        tree: dict[str, Any] = json.loads(text)
        tree |= {name: tuple(value) for name, value in tree.items() if isinstance(value, list)}
        return cls(**tree)

    def json(self) -> str:
        """Returns the facts as text."""
        return json.dumps(asdict(self))

    @property
    def _kind(self) -> str:
        return f"the actions {', '.join(self.action_names)}" if self.action_names else "candidates with features"


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """The data of all machines together.

    Attributes:
        rows: of each shard; one number where every machine has all rows.
        state_ids, action_ids: seen by any machine, ascending.
        metric_names: seen by any machine, sorted.
        hash: sha256 of the one machine's manifest, or over those of all in their order.
        content: sha256 over the rows alone, the same for a copy that was built again; of all shards in their order.
        counts: as in TrainingCopy, over all shards.
        notes: as in TrainingCopy, with the machine's number where there are several.
    """

    rows: tuple[int, ...]
    state_ids: tuple[int, ...]
    action_ids: tuple[int, ...]
    metric_names: tuple[str, ...]
    hash: str
    content: str
    counts: dict[str, int]
    notes: tuple[str, ...]


def agree(facts: Sequence[Facts], *, path: str, replicas: bool, disjoint: bool = False) -> Agreement:
    """Returns what the data of several machines is together; a pure function, so every process reaches the same.

    Args:
        facts: of every machine, in their order.
        path: the data's path, the same on all of them, for errors.
        replicas: whether each machine must have the same rows.
        disjoint: whether no two machines may have the same rows.

    Raises:
        DataError: what cannot be merged, with the numbers of the machines; no rows on any.
    """
    first = facts[0]
    problems = [problem for other in facts[1:] for problem in _differences(first, other, path, replicas)]
    if disjoint:
        problems += _repetitions(facts, path)
    if problems:
        raise DataError(problems)
    if not any(one.rows for one in facts):
        raise DataError(Problem(path, "rows of data on at least one node", f"none on any of {len(facts)}"))
    shards = facts[:1] if replicas else facts
    notes = [(f"node {one.node}: " if len(facts) > 1 else "") + note for one in shards for note in one.notes]
    notes += _absences(shards)
    return Agreement(
        rows=tuple(one.rows for one in shards),
        state_ids=tuple(sorted({i for one in facts for i in one.state_ids})),
        action_ids=tuple(sorted({i for one in facts for i in one.action_ids})),
        metric_names=tuple(sorted({name for one in facts for name in one.metric_names})),
        hash=_joined([one.manifest for one in facts]),
        content=_joined([one.content for one in shards]),
        counts=dict(sum((Counter(one.counts) for one in shards), Counter[str]())),
        notes=tuple(notes),
    )


def _differences(first: Facts, other: Facts, path: str, replicas: bool) -> list[Problem]:
    where, problems = f"{path} on node {other.node}", []
    if other.action_names != first.action_names:
        problems.append(Problem(where, f"{first._kind}, as on node {first.node}", other._kind))
    for column in sorted({*first.normalization, *other.normalization}):
        here, there = (one.normalization.get(column, "no file") for one in (other, first))
        if here != there:
            problems.append(
                Problem(f"{column}_norm_data_path on node {other.node}",
                        f"the parameters of node {first.node} (sha256 {there[:12]})", f"others ({here[:12]})",
                        "Copy one file to every node")
            )  # fmt: skip
    if replicas and other.content != first.content:
        got = counted(other.rows, "row") + (", others" if other.rows == first.rows else "")
        problems.append(
            Problem(where, f"the {counted(first.rows, 'row')} of node {first.node}, as data.layout is replicas", got,
                    "Copy the same data to every node, or set data.layout to shards")
        )  # fmt: skip
    return problems


def _repetitions(facts: Sequence[Facts], path: str) -> list[Problem]:
    problems, owners = [], dict[str, Facts]()
    for one in facts:
        owner = owners.setdefault(one.content, one)
        if one.rows and owner is not one:
            problems.append(
                Problem(f"{path} on node {one.node}", "rows of its own, as data.layout is shards",
                        f"the {counted(one.rows, 'row')} of node {owner.node}",
                        "Give every node its own part (workflows.shard), or set data.layout to replicas")
            )  # fmt: skip
    return problems


def _absences(shards: Sequence[Facts]) -> list[str]:
    """Returns sentences on what no row of a shard has and rows of others do."""
    notes = []
    columns = (("state_ids", "feature", "missing"), ("action_ids", "candidates' feature", "missing"),
               ("metric_names", "metric", "0"))  # fmt: skip
    for column, what, counts_as in columns:
        every = sorted({name for one in shards for name in getattr(one, column)})
        for one in shards:
            absent = [str(name) for name in every if name not in getattr(one, column)]
            if absent and one.rows:
                named = ", ".join(absent[:_MOST_NAMES]) + (", …" if len(absent) > _MOST_NAMES else "")
                notes.append(f"node {one.node}: none of its {counted(one.rows, 'row')} has {what} {named}, which other "
                             f"nodes have; it counts as {counts_as} there")  # fmt: skip
    return notes


def in_order(
    values: NDArray[np.float32], names: Sequence[object], order: Sequence[object], *, absent: float
) -> NDArray[np.float32]:
    """Returns columns [N, len(names)] in another order, [N, len(order)]; names that are not there are `absent`."""
    if tuple(names) == tuple(order):
        return values
    place = {name: column for column, name in enumerate(names)}
    result = np.full((len(values), len(order)), absent, np.float32)
    for column, name in enumerate(order):
        if name in place:
            result[:, column] = values[:, place[name]]
    return result


def _content(copy: TrainingCopy) -> str:
    manifest = CopyManifest.read(str(copy.folder))
    assert manifest is not None
    arrays = {name: file["sha256"] for name, file in manifest.files.items() if name not in ORIGIN}
    return _sha256(_encoded([arrays, manifest.action_names, copy.state_ids, copy.action_ids, copy.metric_names]))


def _joined(hashes: list[str]) -> str:
    return hashes[0] if len(hashes) == 1 else _sha256("\n".join(hashes).encode())


def _encoded(tree: object) -> bytes:
    return json.dumps(tree, sort_keys=True).encode()


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
