"""From the config's paths to normalized rows: training copies, normalization, spans, columns.

0 stages          events become transitions, rows are divided among machines, where that is asked for
1 training copies   the node's first process writes them, the others wait and map them
  agreement         what all machines have together: ids, names, rows of each shard
2 normalization     read, or fitted by rank 0 to samples of all shards and sent to all
3 columns           normalized once by the node's first process, mapped by all
4 rows              what the source gathers from
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from reagent_lite.config import WorkflowConfig
from reagent_lite.data.copy.facts import Agreement, Facts
from reagent_lite.data.copy.training_copy import (
    TrainingCopy,
    empty_training_copy,
    give_back_memory,
    prepare_training_copy,
)
from reagent_lite.data.features.normalization import check_covers, normalization_json, read_normalization
from reagent_lite.data.sampling.normalized import Reordered, open_columns, prepare_columns
from reagent_lite.data.sampling.source import LoggedRows, build_rows, no_rows
from reagent_lite.data.sampling.spans import Spans, learnable_rows, n_steps, single_steps, time_steps
from reagent_lite.distributed.group import Group
from reagent_lite.errors import DataError, NoRowsError, Problem
from reagent_lite.models.preprocessor import Preprocessor
from reagent_lite.progress import progress
from reagent_lite.types import NormalizationSpec, SourceSpec
from workflows.fitting import given_or_fitted
from workflows.reporting import named_counts, say
from workflows.shards import Shards
from workflows.stages import staged

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
        shards: which process reads which rows.
        counts: rows of each shard that may be learned from.
        hash: sha256 that says what was learned from, on all machines: inputs, and the copies made of them.
        content: sha256 of the rows alone.
        train, held_out: this machine's training copies; held_out is None without eval_data_path.
        found, held_out_found: what the rows of all machines are together, of each.
        train_rows, held_out_rows: what sources gather from.
    """

    spec: SourceSpec
    normalization: Normalization
    shards: Shards
    counts: tuple[int, ...]
    hash: str
    content: str
    train: TrainingCopy
    held_out: TrainingCopy | None
    found: Agreement
    held_out_found: Agreement | None
    train_rows: LoggedRows
    held_out_rows: LoggedRows | None


def prepare(config: WorkflowConfig, group: Group) -> Data:
    """Returns the run's data on every rank; rank 0 says what was found.

    Raises:
        DataError: with file and line, see contract of the readers; what differs between machines, on every rank alike.
    """
    config = staged(config, group)
    shards = Shards.of(config, group)
    given = _given_normalization(config)
    train, agreement = _copy(config, config.training_data_path, shards, "training data", given)
    held_out = held_out_found = None
    if config.eval_data_path is not None:
        held_out, held_out_found = _copy(config, config.eval_data_path, shards, "eval data", {})
    specs = given_or_fitted(config, train, agreement, shards, given)
    normalization = Normalization(state=specs["state"], action=specs.get("action"))
    for copy in (train, held_out):
        if copy is not None:
            _check_covers(config, copy, normalization)
    spec = SourceSpec(
        num_state_features=normalization.state.width,
        num_action_features=normalization.action.width if normalization.action else 0,
        action_names=config.actions,
        metric_names=agreement.metric_names,
    )
    train_rows = _rows(config, train, normalization, spec, group, partial(_spans, config))
    counts = shards.counts(train_rows.count)
    if not sum(counts):
        raise DataError(Problem(config.training_data_path, "rows with an action", "none"))
    if shards.several:
        say(group, f"shards: {' + '.join(f'{count:,}' for count in counts)} rows on {len(counts)} nodes, "
                   "each minibatch takes its share of every one")  # fmt: skip
    held_out_rows = (
        None if held_out is None else _rows(config, held_out, normalization, spec, group, partial(_spans, config))
    )
    return Data(spec=spec, normalization=normalization, shards=shards, counts=counts, hash=agreement.hash,
                content=agreement.content, train=train, held_out=held_out, found=agreement,
                held_out_found=held_out_found, train_rows=train_rows, held_out_rows=held_out_rows)  # fmt: skip


def _copy(
    config: WorkflowConfig, path: str, shards: Shards, title: str, given: Mapping[str, NormalizationSpec]
) -> tuple[TrainingCopy, Agreement]:
    """Returns this machine's rows at a path, and what the rows of all machines there are together."""
    group, actions = shards.group, config.actions or None

    def prepared(show: Callable[[int, int], None] | None) -> TrainingCopy:
        try:
            return prepare_training_copy(path, actions=actions, directory=config.data.training_copy_dir, progress=show)
        except NoRowsError:
            if not shards.several:
                raise
            return empty_training_copy(actions)

    if group.is_first_on_node:
        with progress(f"reading {title}", "bytes", enabled=group.is_first) as show:
            copy = prepared(lambda done, total: show(done, total))
    group.barrier()
    if not group.is_first_on_node:
        copy = prepared(None)
    # rows to be judged on may be on several machines: an episode counts once there
    agreement = shards.agree(Facts.of(copy, group.node, given), path, disjoint=path == config.training_data_path)
    say(group, f"{title}: {path}: {named_counts(agreement.counts)}")
    for note in agreement.notes:
        say(group, f"warning: {title}: {note}")
    return copy, agreement


def _given_normalization(config: WorkflowConfig) -> dict[str, NormalizationSpec]:
    """Reads what is given first: a wrong file is found before a long reading of the data."""
    paths = {"state": config.state_norm_data_path, "action": config.action_norm_data_path}
    return {column: read_normalization(path) for column, path in paths.items() if path is not None}


def _check_covers(config: WorkflowConfig, copy: TrainingCopy, normalization: Normalization) -> None:
    """Checks that every feature of a copy has parameters."""
    of = f", for {copy.files[0]}" if copy.files else ""
    where = config.state_norm_data_path or config.training_data_path
    check_covers(normalization.state, copy.state_ids, where=f"{where}{of}")
    if normalization.action is not None:
        where = config.action_norm_data_path or config.training_data_path
        check_covers(normalization.action, copy.action_ids, where=f"{where}{of}")


def single_step_rows(config: WorkflowConfig, copy: TrainingCopy, data: Data, group: Group) -> LoggedRows:
    """Returns the rows of a copy with one logged step each, as evaluation wants them, whatever the learner spans."""
    if config.rl.multi_steps is None:
        return data.train_rows if copy is data.train or data.held_out_rows is None else data.held_out_rows
    return _rows(config, copy, data.normalization, data.spec, group, single_steps)


def _rows(
    config: WorkflowConfig,
    copy: TrainingCopy,
    normalization: Normalization,
    spec: SourceSpec,
    group: Group,
    spans: Callable[[TrainingCopy], Spans],
) -> LoggedRows:
    """Returns what sources gather from a copy; every rank calls it, those without rows too."""
    columns = [("state", copy.state, copy.state_ids, normalization.state)]
    if normalization.action is not None:
        columns.append(("candidates", copy.candidates, copy.action_ids, normalization.action))
    matrices = [_Matrix.of(config, copy, *column) for column in columns]
    place = _place(config, group, sum(len(matrix.raw) * matrix.width * 4 for matrix in matrices))
    if not len(copy):
        group.barrier()  # where the others wait for their columns
        return no_rows(spec, place)
    spanned = spans(copy)
    usable, notes = learnable_rows(
        copy, spanned, maxq=config.rl.maxq_learning, unit_reward=config.rl.q_network_loss == "bce_with_logits"
    )
    for note in notes:
        say(group, f"warning: {note}")
    if group.is_first_on_node:
        for matrix in matrices:
            try:
                prepare_columns(matrix.raw, matrix.transform, matrix.width, matrix.file)
            except OSError as error:
                say(group, f"{matrix.file.parent}: {error.strerror or error}: rows are normalized as they are read, "
                           "which takes longer")  # fmt: skip
    group.barrier()
    opened = [open_columns(matrix.raw, matrix.transform, matrix.width, matrix.file, place) for matrix in matrices]
    rows = build_rows(copy, spanned, usable, *opened, metric_names=spec.metric_names)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Matrix:
    """Raw features of a copy and the way to their normalized columns, in the file that holds them."""

    raw: NDArray[np.float32]
    transform: Reordered
    width: int
    file: Path

    @classmethod
    def of(
        cls,
        config: WorkflowConfig,
        copy: TrainingCopy,
        name: str,
        raw: NDArray[np.float32],
        ids: tuple[int, ...],
        spec: NormalizationSpec,
    ) -> "_Matrix":
        as_zero = config.rl.set_missing_value_to_zero
        key = hashlib.sha256(json.dumps([normalization_json(spec), as_zero], sort_keys=True).encode()).hexdigest()[:16]
        return cls(
            raw=raw,
            transform=Reordered(ids, spec, Preprocessor(spec, missing_as_zero=as_zero)),
            width=spec.width,
            file=copy.folder / f"normalized_{name}_{key}.npy",
        )


def _place(config: WorkflowConfig, group: Group, num_bytes: int) -> torch.device:
    """Returns where rows live. On a CPU the memory map serves all processes of the machine from one page cache."""
    if group.device.type == "cpu" or config.data.residency == "host":
        return torch.device("cpu")
    free, _ = torch.cuda.mem_get_info(group.device)
    if config.data.residency == "device" or num_bytes <= _DEVICE_SHARE * free:
        return group.device
    return torch.device("cpu")
