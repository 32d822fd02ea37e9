"""From the config's paths to normalized rows: training copies, normalization, spans, columns.

1 training copies   the node's first process writes them, the others wait and map them
2 normalization     read, or fitted by rank 0 and sent to all
3 columns           normalized once by the node's first process, mapped by all
4 rows              what the source gathers from
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from reagent_lite.config import WorkflowConfig
from reagent_lite.data.normalization import (
    check_covers,
    fit_normalization,
    normalization_json,
    parse_normalization,
    read_normalization,
    sample_rows,
    write_normalization,
)
from reagent_lite.data.normalized import Reordered, open_columns, prepare_columns
from reagent_lite.data.source import Columns, LoggedRows, build_rows
from reagent_lite.data.spans import Spans, learnable_rows, n_steps, single_steps, time_steps
from reagent_lite.data.training_copy import TrainingCopy, give_back_memory, prepare_training_copy
from reagent_lite.distributed.group import Group
from reagent_lite.errors import ConfigError, DataError, Problem
from reagent_lite.models.preprocessor import Preprocessor
from reagent_lite.training.progress import progress
from reagent_lite.types import NormalizationSpec, SourceSpec
from workflows.reporting import say

_DEVICE_SHARE = 0.5  # of the free device memory; the rest is for the network, its gradients and batches


@dataclass(frozen=True, slots=True, kw_only=True)
class Normalization:
    """Normalization of states and, for candidates, of their features."""

    state: NormalizationSpec
    action: NormalizationSpec | None

    def json(self) -> dict[str, dict[str, str]]:
        """Returns both in the 2019 encoding, by column."""
        tree = {"state": normalization_json(self.state)}
        return tree if self.action is None else {**tree, "action": normalization_json(self.action)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """Rows to learn from and rows to be judged on.

    Attributes:
        spec: what the network must fit.
        normalization: of both.
        train, held_out: training copies; held_out is None without eval_data_path.
        train_rows, held_out_rows: what sources gather from.
    """

    spec: SourceSpec
    normalization: Normalization
    train: TrainingCopy
    held_out: TrainingCopy | None
    train_rows: LoggedRows
    held_out_rows: LoggedRows | None


def prepare(config: WorkflowConfig, group: Group) -> Data:
    """Returns the run's data on every rank; rank 0 says what was found.

    Raises:
        DataError: with file and line, see contract of the readers.
    """
    given = _given_normalization(config)
    train = _copy(config, config.training_data_path, group, "training data")
    held_out = None if config.eval_data_path is None else _copy(config, config.eval_data_path, group, "eval data")
    normalization = _normalization(config, train, group, given)
    for copy in (train, held_out):
        if copy is not None:
            where = config.state_norm_data_path or config.training_data_path
            check_covers(normalization.state, copy.state_ids, where=f"{where}, for {copy.files[0]}")
            if normalization.action is not None:
                where = config.action_norm_data_path or config.training_data_path
                check_covers(normalization.action, copy.action_ids, where=f"{where}, for {copy.files[0]}")
    spec = SourceSpec(
        num_state_features=normalization.state.width,
        num_action_features=normalization.action.width if normalization.action else 0,
        action_names=config.actions,
        metric_names=train.metric_names,
    )
    train_rows = _rows(config, train, normalization, group, _spans(config, train))
    if not train_rows.count:
        raise DataError(Problem(config.training_data_path, "rows with an action", "none"))
    held_out_rows = (
        None if held_out is None else _rows(config, held_out, normalization, group, _spans(config, held_out))
    )
    return Data(spec=spec, normalization=normalization, train=train, held_out=held_out, train_rows=train_rows,
                held_out_rows=held_out_rows)  # fmt: skip


def data_hash(copy: TrainingCopy) -> str:
    """Returns the sha256 of the training copy's manifest, which holds the hashes of its inputs and arrays."""
    return hashlib.sha256((copy.folder / "manifest.json").read_bytes()).hexdigest()


def _copy(config: WorkflowConfig, path: str, group: Group, title: str) -> TrainingCopy:
    def prepared(show: Callable[[int, int], None] | None) -> TrainingCopy:
        return prepare_training_copy(
            path, actions=config.actions or None, directory=config.data.training_copy_dir, progress=show
        )

    if group.is_first_on_node:
        with progress(f"reading {title}", "bytes", enabled=group.is_first) as show:
            copy = prepared(lambda done, total: show(done, total))
    group.barrier()
    if not group.is_first_on_node:
        copy = prepared(None)
    counts = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in copy.counts.items() if count)
    say(group, f"{title}: {path}: {counts}")
    for note in copy.notes:
        say(group, f"warning: {title}: {note}")
    return copy


def _given_normalization(config: WorkflowConfig) -> dict[str, NormalizationSpec]:
    """Reads what is given first: a wrong file is found before a long reading of the data."""
    paths = {"state": config.state_norm_data_path, "action": config.action_norm_data_path}
    return {column: read_normalization(path) for column, path in paths.items() if path is not None}


def _normalization(
    config: WorkflowConfig, train: TrainingCopy, group: Group, given: dict[str, NormalizationSpec]
) -> Normalization:
    text = None
    if group.is_first:
        specs = dict(given)
        columns = {"state": ("state_features", train.state[: len(train)], train.state_ids)}
        if train.parametric:
            columns["action"] = ("action", _seen_candidates(train, config), train.action_ids)
        overrides = config.norm_params.feature_overrides
        known = {feature for _, _, ids in columns.values() for feature in ids}
        unknown = [key for key in overrides if int(key) not in known]
        if unknown:
            raise ConfigError(
                [
                    Problem(f"norm_params.feature_overrides.{key}", "a feature of the training data", key)
                    for key in unknown
                ]
            )
        folder = config.norm_params.output_dir or config.model_output_path
        for name, (column, values, ids) in columns.items():
            if name in specs:
                continue
            own = {key: kind for key, kind in overrides.items() if int(key) in ids}
            specs[name], notes = fit_normalization(
                values, ids, config.norm_params.model_copy(update={"feature_overrides": own}),
                seed=config.seed, where=config.training_data_path,
            )  # fmt: skip
            file = Path(folder).expanduser() / f"{column}_norm.json"
            write_normalization(str(file), specs[name])
            say(group, f"normalization of {column}: fitted, written to {file}")
            train.release()
            for note in notes:
                say(group, f"warning: normalization of {column}: {note}")
        text = json.dumps({name: normalization_json(spec) for name, spec in specs.items()})
    tree: dict[str, Any] = json.loads(group.broadcast_text(text))
    specs = {name: parse_normalization(features, where=name) for name, features in tree.items()}
    return Normalization(state=specs["state"], action=specs.get("action"))


def single_step_rows(config: WorkflowConfig, copy: TrainingCopy, data: Data, group: Group) -> LoggedRows:
    """Returns the rows of a copy with one logged step each, as evaluation wants them, whatever the learner spans."""
    if config.rl.multi_steps is None:
        return data.train_rows if copy is data.train or data.held_out_rows is None else data.held_out_rows
    return _rows(config, copy, data.normalization, group, single_steps(copy))


def _seen_candidates(copy: TrainingCopy, config: WorkflowConfig) -> np.ndarray[Any, Any]:
    """Returns features of candidates as often as rows list them, [n, F], from a sample of rows.

    The copy stores equal lists once, so its table of candidates says nothing about how often each is seen.
    """
    rows = sample_rows(len(copy), config.norm_params.num_samples, config.seed)
    lists = np.asarray(copy.actions_list)[rows]
    starts, stops = copy.list_offsets[lists], copy.list_offsets[lists + 1]
    counts = stops - starts
    place = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    seen = np.repeat(starts, counts) + place
    return np.asarray(copy.candidates[seen[sample_rows(len(seen), config.norm_params.num_samples, config.seed)]])


def _rows(
    config: WorkflowConfig, copy: TrainingCopy, normalization: Normalization, group: Group, spans: Spans
) -> LoggedRows:
    usable, notes = learnable_rows(
        copy, spans, maxq=config.rl.maxq_learning, unit_reward=config.rl.q_network_loss == "bce_with_logits"
    )
    for note in notes:
        say(group, f"warning: {note}")
    matrices = [("state", copy.state, copy.state_ids, normalization.state)]
    if normalization.action is not None:
        matrices.append(("candidates", copy.candidates, copy.action_ids, normalization.action))
    place = _place(config, group, sum(len(m) * spec.width * 4 for _, m, _, spec in matrices))
    columns = [_columns(config, copy, *matrix, group, place) for matrix in matrices]
    rows = build_rows(copy, spans, usable, *columns)
    copy.release()
    give_back_memory()
    return rows


def _spans(config: WorkflowConfig, copy: TrainingCopy) -> Spans:
    rl = config.rl
    if rl.use_seq_num_diff_as_time_diff:
        return time_steps(copy, rl.time_diff_unit_length)
    if rl.multi_steps is not None and rl.multi_steps > 1:
        boost = [(rl.reward_boost or {}).get(name, 0.0) for name in config.actions]
        return n_steps(copy, rl.multi_steps, rl.gamma, np.array(boost) if rl.reward_boost else None)
    return single_steps(copy)


def _columns(
    config: WorkflowConfig,
    copy: TrainingCopy,
    name: str,
    matrix: np.ndarray[Any, Any],
    ids: tuple[int, ...],
    spec: NormalizationSpec,
    group: Group,
    place: torch.device,
) -> Columns:
    as_zero = config.rl.set_missing_value_to_zero
    transform = Reordered(ids, spec, Preprocessor(spec, missing_as_zero=as_zero))
    key = hashlib.sha256(json.dumps([normalization_json(spec), as_zero], sort_keys=True).encode()).hexdigest()[:16]
    file = copy.folder / f"normalized_{name}_{key}.npy"
    if group.is_first_on_node:
        prepare_columns(matrix, transform, spec.width, file)
    group.barrier()
    return open_columns(matrix, transform, spec.width, file, place)


def _place(config: WorkflowConfig, group: Group, num_bytes: int) -> torch.device:
    """Returns where rows live. On a CPU the memory map serves all processes of the machine from one page cache."""
    if group.device.type == "cpu" or config.data.residency == "host":
        return torch.device("cpu")
    free, _ = torch.cuda.mem_get_info(group.device)
    if config.data.residency == "device" or num_bytes <= _DEVICE_SHARE * free:
        return group.device
    return torch.device("cpu")
