"""What the report page says of data: features, their drift, and where rows came from."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from reagent_lite.config import WorkflowConfig
from reagent_lite.data.copy.facts import in_order
from reagent_lite.data.copy.place import read_manifest as read_copy_manifest
from reagent_lite.data.copy.training_copy import TrainingCopy
from reagent_lite.data.formats.stage import StageManifest, read_manifest
from reagent_lite.data.sampling.plan import apportion
from reagent_lite.evaluation.webpage_content import Feature, FeatureShift, Table
from workflows.preparation import Data
from workflows.reporting import named_counts
from workflows.shards import Shards

SAMPLE = 4096  # rows that say how often a feature is present: to 0.8 % at worst, whatever the size of the log
_MOST_FILES = 50
_MOST_LETTERS = 400

Shares = dict[int, float]


def present_shares(data: Data) -> dict[str, Shares]:
    """Returns in which share of the training rows each feature is, by column and id; of candidates, of all listed.

    Each shard gives its part of a sample of at most SAMPLE rows. Every rank calls it, and has the result.
    """
    train, found = data.train, data.found
    shares = {
        "state": _present(data.shards, train.state[: len(train)], train.state_ids, found.state_ids),
        "action": _present(data.shards, train.candidates, train.action_ids, found.action_ids),
    }
    train.release()
    return shares


def _present(shards: Shards, values: NDArray[np.float32], ids: tuple[int, ...], wanted: tuple[int, ...]) -> Shares:
    if not wanted:
        return {}
    counts = shards.counts(len(values))
    own = apportion(counts, min(SAMPLE, sum(counts)))[shards.own] if shards.is_first else 0
    numbers = np.unique(np.linspace(0, len(values) - 1, own).astype(np.int64)) if own else np.zeros(0, np.int64)
    sample = in_order(np.asarray(values[numbers]), ids, wanted, absent=np.nan)
    present = torch.from_numpy((~np.isnan(sample)).sum(0).astype(np.float64))
    rows = max(sum(shards.group.each(len(numbers))), 1)
    return dict(zip(wanted, (shards.group.sum(present) / rows).tolist(), strict=True))


def features_of(normalization: Mapping[str, Mapping[str, str]], present: Mapping[str, Shares]) -> tuple[Feature, ...]:
    """Returns type and statistics of every feature of states, then of candidates; `present` is of present_shares."""
    found = []
    for column, parameters in normalization.items():
        for name, text in parameters.items():
            one = json.loads(text) if isinstance(text, str) else text
            share = present.get(column, {}).get(int(name))
            found.append(Feature(name=name, column=column, type=one["feature_type"], present=share,
                                 mean=one.get("mean"), stddev=one.get("stddev")))  # fmt: skip
    return tuple(found)


def shifts_of(config: WorkflowConfig) -> tuple[FeatureShift, ...]:
    """Returns the drift that workflows.normalize left beside the normalization that the run was given."""
    found: dict[Path, None] = {}
    for path in (config.state_norm_data_path, config.action_norm_data_path):
        if path is not None and "://" not in path:
            found[Path(path).expanduser().parent / "drift.json"] = None
    return tuple(shift for file in found if file.is_file() for shift in _shifts(json.loads(file.read_bytes())))


def _shifts(document: Mapping[str, Any]) -> Iterator[FeatureShift]:
    for column, drift in document.items():
        for one in drift["features"]:
            yield FeatureShift(
                name=str(one["feature_id"]), column=column, verdict=one["verdict"], psi=one["psi"], ks=one["ks"],
                present=(one["reference_present"], one["present"]), mean=(one["reference_mean"], one["mean"]),
            )  # fmt: skip


def lineage_of(config: WorkflowConfig, data: Data | None) -> tuple[Table, ...]:
    """Returns what was read on all machines, and files, hashes and stages of rank 0's machine."""
    if data is None:
        return ()
    copies = {"training data": data.train} | ({} if data.held_out is None else {"eval data": data.held_out})
    found = {"training data": data.found, "eval data": data.held_out_found}
    asked = {"training data": config.training_data_path, "eval data": config.eval_data_path}
    counts = tuple(
        (use, asked[use] or "by the timeline", f"{sum(one.rows):,}", named_counts(one.counts))
        for use, one in found.items()
        if one is not None
    )
    tables = [
        Table(title="Data that was asked for, and what was found", head=("Use", "Path", "Rows", "Counts"), rows=counts)
    ]
    for use, copy in copies.items():
        use = f"{use} on node 0" if data.shards.several else use
        tables.append(_files(use, copy))
        for folder in dict.fromkeys(str(Path(file).parent) for file in copy.files if "://" not in file):
            manifest = read_manifest(folder)
            if manifest is not None:
                tables += _stage(use, folder, manifest)
    return tuple(tables)


def _files(use: str, copy: TrainingCopy) -> Table:
    manifest = read_copy_manifest(copy.folder)
    states = manifest.inputs if manifest is not None and len(manifest.inputs) == len(copy.files) else ()
    rows = [(path, f"{state.size:,}", state.sha256) for path, state in zip(copy.files, states, strict=False)]
    return Table(title=f"Files of the {use}", head=("File", "Bytes", "SHA-256"), rows=_first(rows, 3))


def _stage(use: str, folder: str, manifest: StageManifest) -> list[Table]:
    """Returns what a stage's manifest says: its report, and what it was made from."""
    facts = [("folder", folder), ("rows in it", f"{manifest.rows:,}"), ("digest", manifest.digest)]
    facts += [("made from the stage with digest", manifest.parent)] if manifest.parent else []
    facts += list(_flat(manifest.report))
    inputs = [(one.name, f"{one.size:,}", one.sha256) for one in manifest.inputs]
    return [
        Table(title=f"Stage {manifest.kind} ({use}): read, kept, refused", head=("What", "How many"),
              rows=tuple(facts)),
        Table(title=f"Inputs of stage {manifest.kind} ({use})", head=("File", "Bytes", "SHA-256"),
              rows=_first(inputs, 3)),
    ]  # fmt: skip


def _flat(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields a report's entries in words; empty ones are left out."""
    for key, value in report.items():
        name = key.replace("_", " ")
        if isinstance(value, bool | int | float):
            yield name, f"{value:,}"
        elif isinstance(value, list) and value:
            yield from ((name, _cut(one)) for one in value[:_MOST_FILES])
        elif value:
            yield name, _cut(value)


def _cut(value: Any) -> str:
    if isinstance(value, Mapping):
        said = (f"{key}: {one:,}" if isinstance(one, int) else f"{key}: {one}" for key, one in value.items())
        text = ", ".join(sorted(said, key=len))  # counts before sentences
    else:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MOST_LETTERS else f"{text[: _MOST_LETTERS - 1]}…"


def _first(rows: Sequence[tuple[str, ...]], width: int) -> tuple[tuple[str, ...], ...]:
    more = len(rows) - _MOST_FILES
    return (*rows[:_MOST_FILES], *([(f"and {more:,} more", *[""] * (width - 1))] if more > 0 else []))
