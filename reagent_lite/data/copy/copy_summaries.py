"""Compares and merges the data of several machines: each sends a summary, and all reach the same result.

node 0: training copy ─► CopySummary ─┐
node 1: training copy ─► CopySummary ─┴► agree ─► Agreement: rows by node; ids and names of all; one hash
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from reagent_lite.data.copy.location import CopyManifest
from reagent_lite.data.copy.training_copy import TrainingCopy
from reagent_lite.data.features.normalization_files import normalization_json
from reagent_lite.data.formats.blocks import InputFile
from reagent_lite.data.rows.levels import ONE_KIND
from reagent_lite.data.rows.matrices import FeatureIds
from reagent_lite.errors import Problem, join_names, pluralize, raise_any
from reagent_lite.types import NormalizationSpec

ORIGIN = ("origin_file.npy", "origin_line.npy")
"""Arrays with the origin of each row in the input; they differ if the same rows are in other files or shuffled."""

_FROM_COPY = ("action_names", "state_ids", "action_ids", "metric_names", "without_value", "counts", "notes")
_ABSENCES = (
    ("state_ids", "feature", "missing"),
    ("action_ids", "candidates' feature", "missing"),
    ("metric_names", "metric", "0"),
)


def content_of(copy: TrainingCopy) -> str:
    """Returns a sha256 of the rows in the copy's order, the same if the copy is built again; "" without rows."""
    manifest = CopyManifest.read(str(copy.folder)) if len(copy) else None
    if manifest is None:
        return ""
    arrays = {name: file["sha256"] for name, file in manifest.files.items() if name not in ORIGIN}
    return _sha256([arrays, manifest.action_names, copy.state_ids, copy.action_ids, copy.metric_names])


@dataclass(frozen=True, slots=True, kw_only=True)
class CopySummary:
    """A description of one machine's data.

    Attributes:
        node: number of the machine.
        rows: number of transitions.
        action_names: names of discrete actions; empty for candidates.
        state_ids, action_ids, metric_names, counts, notes: as in TrainingCopy.
        texts: ids of features whose values are texts, by "state" and "action".
        without_value: as in TrainingCopy.
        content: see `content_of`.
        listing: sha256 of the names and sizes of all files at the path, if data.layout is split.
        inputs: sha256 of the content of these files; "" without rows.
        normalization: sha256 of each given normalization, by column.
    """

    node: int
    rows: int
    action_names: tuple[str, ...]
    state_ids: FeatureIds
    action_ids: FeatureIds
    metric_names: tuple[str, ...]
    texts: dict[str, FeatureIds]
    without_value: dict[str, FeatureIds]
    content: str
    listing: str
    inputs: str
    counts: dict[str, int]
    notes: tuple[str, ...]
    normalization: dict[str, str]

    @classmethod
    def of(
        cls, copy: TrainingCopy, node: int, given: Mapping[str, NormalizationSpec], files: Sequence[InputFile] = ()
    ) -> "CopySummary":
        """Returns the summary of a training copy and of the normalization that files give.

        `files` are those at the path if data.layout is split: the same ones on all machines.
        """
        manifest = CopyManifest.read(str(copy.folder)) if len(copy) else None
        return cls(
            node=node,
            rows=len(copy),
            **{name: getattr(copy, name) for name in _FROM_COPY},
            texts={side: tuple(sorted(levels)) for side, levels in copy.levels.items()},
            content=content_of(copy),
            listing=_sha256([(file.label, file.size) for file in files]),
            inputs="" if manifest is None else _sha256([state.sha256 for state in manifest.inputs]),
            normalization={name: _sha256(normalization_json(spec)) for name, spec in given.items()},
        )


COPY_SUMMARY = TypeAdapter(CopySummary)
"""Reads and writes summaries as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """The data of all machines together.

    Attributes:
        rows: number of rows of each shard; a single number if every machine has all rows.
        state_ids, action_ids, metric_names: those of any machine, ascending.
        content: sha256 of the one shard's content, or over those of all shards in their order.
        counts: as in TrainingCopy, over all shards.
        notes: as in TrainingCopy, with the number of the machine if there are several.
    """

    rows: tuple[int, ...]
    state_ids: tuple[int, ...]
    action_ids: tuple[int, ...]
    metric_names: tuple[str, ...]
    content: str
    counts: dict[str, int]
    notes: tuple[str, ...]


def agree(summaries: Sequence[CopySummary], *, path: str, layout: str, repeats: bool = False) -> Agreement:
    """Returns the data of several machines together; a pure function, so every process reaches the same result.

    Args:
        summaries: the summaries of all machines, in their order.
        path: the data's path, the same on all of them, for errors.
        layout: data.layout, "shards", "replicas" or "split".
        repeats: whether two machines may have the same rows although each has its own part, as in eval data.

    Raises:
        DataError: the data cannot be merged (names the machines), or no machine has rows.
    """
    replicas = layout == "replicas"
    problems = [problem for other in summaries[1:] for problem in _differences(summaries[0], other, path, replicas)]
    if layout == "shards" and not repeats:
        problems += _find_equal(summaries, path)
    if layout == "split":
        problems += _find_other_inputs(summaries, path)
    problems += _find_mixed(summaries, path)
    if not problems and not any(shard.rows for shard in summaries):
        problems.append(Problem(path, "rows of data on at least one node", f"none on any of {len(summaries)}"))
    raise_any(problems)
    shards = summaries[:1] if replicas else summaries
    contents = [shard.content for shard in shards]
    notes = [(f"node {shard.node}: " if len(summaries) > 1 else "") + note for shard in shards for note in shard.notes]
    return Agreement(
        rows=tuple(shard.rows for shard in shards),
        state_ids=_union(summaries, "state_ids"),
        action_ids=_union(summaries, "action_ids"),
        metric_names=_union(summaries, "metric_names"),
        content=contents[0] if len(shards) == 1 else hashlib.sha256("\n".join(contents).encode()).hexdigest(),
        counts=dict(sum((Counter(shard.counts) for shard in shards), Counter[str]())),
        notes=(*notes, *_absences(shards)),
    )


def _union(summaries: Sequence[CopySummary], column: str) -> tuple[Any, ...]:
    return tuple(sorted({name for machine in summaries for name in getattr(machine, column)}))


def _differences(first: CopySummary, other: CopySummary, path: str, replicas: bool) -> Iterator[Problem]:
    where = f"{path} on node {other.node}"
    of_first = f"of node {first.node}"
    if other.action_names != first.action_names:
        yield Problem(where, f"{_actions(first)}, as on node {first.node}", _actions(other))
    for column in sorted({*first.normalization, *other.normalization}):
        got_hash, wanted_hash = (machine.normalization.get(column, "no file") for machine in (other, first))
        if got_hash != wanted_hash:
            where_file = f"{column}_norm_data_path on node {other.node}"
            expected = f"the parameters {of_first}"
            got = f"others ({got_hash[:12]})"
            todo = "Copy one file to every node"
            yield Problem(where_file, f"{expected} (sha256 {wanted_hash[:12]})", got, todo)
    if replicas and other.content != first.content:
        expected = f"the {pluralize(first.rows, 'row')} {of_first}, as data.layout is replicas"
        got = pluralize(other.rows, "row") + (", others" if other.rows == first.rows else "")
        yield Problem(where, expected, got, "Copy the same data to every node, or set data.layout to shards")


def _find_equal(summaries: Sequence[CopySummary], path: str) -> Iterator[Problem]:
    """Yields machines with the rows of an earlier one, which would count twice."""
    first_with: dict[str, CopySummary] = {}
    for machine in summaries:
        other = first_with.setdefault(machine.content, machine)
        if machine.rows and other is not machine:
            yield Problem(
                f"{path} on node {machine.node}",
                "rows of its own, as data.layout is shards",
                f"the {pluralize(machine.rows, 'row')} of node {other.node}",
                "Set data.layout to split, so that each node keeps its own episodes of these rows, or to replicas; or "
                "give every node its own part (workflows.shard)",
            )


def _find_other_inputs(summaries: Sequence[CopySummary], path: str) -> Iterator[Problem]:
    """Yields machines that have read other files than an earlier one, and so lack episodes that nobody has."""
    readers = [machine for machine in summaries if machine.inputs]
    for machine in summaries:
        for reader in readers[:1]:
            if machine.listing != reader.listing or machine.inputs not in ("", reader.inputs):
                yield Problem(
                    f"{path} on node {machine.node}",
                    f"the files of node {reader.node}, as data.layout is split",
                    "none, or files with other names or content",
                    "Mount or copy the same data on every node, or set data.layout to shards if each has its own part",
                )


def _find_mixed(summaries: Sequence[CopySummary], path: str) -> Iterator[Problem]:
    """Yields features that are strings on one machine and numbers on another."""
    for side, ids in (("state", "state_ids"), ("action", "action_ids")):
        texts = {feature: machine.node for machine in reversed(summaries) for feature in machine.texts.get(side, ())}
        for machine in summaries:
            empty = machine.without_value.get(side, ())
            for feature in getattr(machine, ids):
                if feature in texts and feature not in machine.texts[side] and feature not in empty:
                    where = f"{path} on node {machine.node}: feature {feature}"
                    yield Problem(where, f"strings, as on node {texts[feature]}", "numbers", ONE_KIND)


def _actions(summary: CopySummary) -> str:
    return f"the actions {', '.join(summary.action_names)}" if summary.action_names else "candidates with features"


def _absences(shards: Sequence[CopySummary]) -> Iterator[str]:
    """Yields a sentence about the features or metrics that a shard lacks and another one has."""
    for column, what, counts_as in _ABSENCES:
        for shard in shards:
            absent = [name for name in _union(shards, column) if name not in getattr(shard, column)]
            if absent and shard.rows:
                having = f"none of its {pluralize(shard.rows, 'row')} has {what} {join_names(absent)}"
                yield f"node {shard.node}: {having}, which other nodes have; it counts as {counts_as} there"


def _sha256(tree: object) -> str:
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()
