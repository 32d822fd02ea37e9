"""Normalization from the rows of all machines: each shard's first process sends a sample, rank 0 fits.

shard 0 ─► sample of its share ─┐
shard 1 ─► sample of its share ─┴► rank 0: fit in float64 ─► file ─► sent to all
"""

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reagent_lite.config import WorkflowConfig
from reagent_lite.data.copy.facts import Agreement, in_order
from reagent_lite.data.copy.training_copy import TrainingCopy
from reagent_lite.data.features.normalization import (
    fit_normalization,
    normalization_json,
    parse_normalization,
    sample_rows,
    write_normalization,
)
from reagent_lite.data.sampling.plan import apportion
from reagent_lite.distributed.group import Group
from reagent_lite.errors import ConfigError, Problem
from reagent_lite.files import write_whole
from reagent_lite.manifest import canonical
from reagent_lite.types import NormalizationSpec
from workflows.reporting import say
from workflows.shards import Shards


def given_or_fitted(
    config: WorkflowConfig,
    train: TrainingCopy,
    agreement: Agreement,
    shards: Shards,
    given: Mapping[str, NormalizationSpec],
) -> dict[str, NormalizationSpec]:
    """Returns the normalization of "state" and, for candidates, of "action"; the same on every rank, which all call it.

    Args:
        config: says how to fit and where the files go.
        train: this machine's rows.
        agreement: what all machines' rows are together.
        shards: who reads what.
        given: what files gave; the rest is fitted.

    Raises:
        ConfigError: on every rank, an override for a feature that no machine has.
        DataError: on rank 0, features that cannot be fitted.
    """
    ids = {"state": agreement.state_ids}
    if train.parametric:
        ids["action"] = agreement.action_ids
    _check_overrides(config, {feature for column in ids.values() for feature in column})
    specs = dict(given)
    for name in ids:
        if name in given:
            continue
        kept = _Kept.of(config, train, agreement, name)
        if before := shards.group.broadcast_text(kept.read() if shards.group.is_first else None):
            specs[name] = parse_normalization(json.loads(before), where=name)
            say(shards.group, f"normalization of {_COLUMNS[name]}: fitted to the same rows before")
            continue
        values = _of_all(shards, _SAMPLES[name](config, train, agreement, shards), ids[name])
        train.release()
        if values is not None:
            specs[name] = _fit(config, shards, name, values, ids[name])
            kept.write(specs[name])
    text = json.dumps({name: normalization_json(spec) for name, spec in specs.items()})
    tree: dict[str, Any] = json.loads(shards.group.broadcast_text(text if shards.group.is_first else None))
    return {name: parse_normalization(features, where=name) for name, features in tree.items()}


def _check_overrides(config: WorkflowConfig, known: set[int]) -> None:
    unknown = [key for key in config.norm_params.feature_overrides if int(key) not in known]
    if unknown:
        raise ConfigError(
            [Problem(f"norm_params.feature_overrides.{key}", "a feature of the training data", key) for key in unknown]
        )


def _states(config: WorkflowConfig, train: TrainingCopy, agreement: Agreement, shards: Shards) -> NDArray[np.float32]:
    """Returns this process's sample of states in the order of all machines' ids, [n, S]."""
    sample = np.asarray(train.state[_sampled_rows(config, train, agreement, shards)])
    return in_order(sample, train.state_ids, agreement.state_ids, absent=np.nan)


def _candidates(
    config: WorkflowConfig, train: TrainingCopy, agreement: Agreement, shards: Shards
) -> NDArray[np.float32]:
    """Returns features of candidates as often as rows list them, [n, F], from this process's sample of rows.

    The copy stores equal lists once, so its table of candidates says nothing about how often each is seen.
    """
    lists = np.asarray(train.actions_list)[_sampled_rows(config, train, agreement, shards)]
    starts, stops = train.list_offsets[lists], train.list_offsets[lists + 1]
    counts = stops - starts
    place = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    seen = np.repeat(starts, counts) + place
    kept = _share(config, shards.counts(len(seen)), shards)
    sample = np.asarray(train.candidates[seen[_chosen(config, len(seen), kept, shards)]])
    return in_order(sample, train.action_ids, agreement.action_ids, absent=np.nan)


_COLUMNS = {"state": "state_features", "action": "action"}
_SAMPLES = {"state": _states, "action": _candidates}


def _sampled_rows(
    config: WorkflowConfig, train: TrainingCopy, agreement: Agreement, shards: Shards
) -> NDArray[np.int64]:
    return _chosen(config, len(train), _share(config, agreement.rows, shards), shards)


def _share(config: WorkflowConfig, counts: tuple[int, ...], shards: Shards) -> int:
    """Returns how many of num_samples this process takes: its shard's share, none where another speaks for it."""
    if not shards.is_first:
        return 0
    return apportion(counts, min(config.norm_params.num_samples, sum(counts)))[shards.own]


def _chosen(config: WorkflowConfig, count: int, kept: int, shards: Shards) -> NDArray[np.int64]:
    # shards of one size would all give the same row numbers by the same seed
    return sample_rows(count, kept, config.seed + shards.own) if kept else np.zeros(0, np.int64)


def _of_all(shards: Shards, sample: NDArray[np.float32], ids: tuple[int, ...]) -> NDArray[np.float32] | None:
    """Returns the samples of all shards in their order on rank 0, and None on the others."""
    parts = [np.frombuffer(part, np.float32) for part in shards.group.gather_bytes(sample.tobytes())]
    matrices = [part.reshape(-1 if ids else 0, len(ids)) for part in parts]
    if not shards.group.is_first:
        return None
    return matrices[0] if len(matrices) == 1 else np.concatenate(matrices)


def _fit(
    config: WorkflowConfig, shards: Shards, name: str, values: NDArray[np.float32], ids: tuple[int, ...]
) -> NormalizationSpec:
    column = _COLUMNS[name]
    own = {key: kind for key, kind in config.norm_params.feature_overrides.items() if int(key) in ids}
    spec, notes = fit_normalization(
        values, ids, config.norm_params.model_copy(update={"feature_overrides": own}),
        seed=config.seed, where=config.training_data_path,
    )  # fmt: skip
    say(shards.group, f"normalization of {column}: fitted")
    for note in notes:
        say(shards.group, f"warning: normalization of {column}: {note}")
    return spec


def write_fitted(config: WorkflowConfig, specs: Mapping[str, NormalizationSpec | None], group: Group) -> None:
    """Writes what no file gave, of "state" and "action", beside the model or where the config wants it; on rank 0."""
    given = {"state": config.state_norm_data_path, "action": config.action_norm_data_path}
    folder = Path(config.norm_params.output_dir or config.model_output_path).expanduser()
    for name, spec in specs.items():
        if spec is not None and given[name] is None:
            file = folder / f"{_COLUMNS[name]}_norm.json"
            write_normalization(str(file), spec)
            say(group, f"normalization of {_COLUMNS[name]}: written to {file}")


@dataclass(frozen=True, slots=True)
class _Kept:
    """What was fitted before to the same rows in the same way, beside rank 0's training copy."""

    file: Path | None

    @classmethod
    def of(cls, config: WorkflowConfig, train: TrainingCopy, agreement: Agreement, name: str) -> "_Kept":
        if not len(train):
            return cls(None)
        settings = config.norm_params.model_dump(mode="json", exclude={"output_dir", "cols_to_norm"})
        key = json.dumps([agreement.content, name, config.seed, settings], sort_keys=True)
        return cls(train.folder / f"fitted_{name}_{hashlib.sha256(key.encode()).hexdigest()[:16]}.json")

    def read(self) -> str:
        """Returns the file's text, "" where there is none."""
        try:
            return "" if self.file is None else self.file.read_text(encoding="utf-8")
        except OSError:
            return ""

    def write(self, spec: NormalizationSpec) -> None:
        """Keeps what was fitted, where that can be written."""
        if self.file is not None:
            with suppress(OSError):
                write_whole(self.file, canonical(normalization_json(spec)))
