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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from reagent_lite.config import WorkflowConfig
from reagent_lite.console import logger, progress
from reagent_lite.data.copy.facts import Agreement, Facts
from reagent_lite.data.copy.training_copy import (
    TrainingCopy,
    empty_training_copy,
    give_back_memory,
    prepare_training_copy,
)
from reagent_lite.data.features.normalization import check_covers, normalization_json
from reagent_lite.data.sampling.normalized import Reordered, open_columns, prepare_columns
from reagent_lite.data.sampling.shards import Shards
from reagent_lite.data.sampling.source import LoggedRows, build_rows, no_rows
from reagent_lite.data.sampling.spans import Spans, learnable_rows, n_steps, single_steps, time_steps
from reagent_lite.distributed.group import Group
from reagent_lite.errors import DataError, NoRowsError, Problem, named_counts
from reagent_lite.models.preprocessor import Preprocessor
from reagent_lite.run.normalization import Normalization, given_normalization, given_or_fitted
from reagent_lite.types import NormalizationSpec, SourceSpec

_DEVICE_SHARE = 0.5  # of the free device memory; the rest is for the network, its gradients and batches


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """Rows to learn from and rows to evaluate on.

    Attributes:
        spec: what the network must fit.
        normalization: of both.
        shards: which process reads which rows.
        counts: rows of each shard that may be learned from.
        train, held_out: this machine's training copies; held_out is None without eval_data_path.
        found, held_out_found: what the rows of all machines are together, of each.
        train_rows, held_out_rows: what sources gather from.
    """

    spec: SourceSpec
    normalization: Normalization
    shards: Shards
    counts: tuple[int, ...]
    train: TrainingCopy
    held_out: TrainingCopy | None
    found: Agreement
    held_out_found: Agreement | None
    train_rows: LoggedRows
    held_out_rows: LoggedRows | None

    @property
    def scored(self) -> Agreement:
        """What the evaluated rows of all machines are together."""
        return self.held_out_found or self.found


def prepare(config: WorkflowConfig, group: Group) -> Data:
    """Returns the run's data on every rank; rank 0 says what was found.

    Raises:
        DataError: with file and line, see contract of the readers; what differs between machines, on every rank alike.
    """
    from reagent_lite.run.stages import staged  # needs the extra `data`

    config = staged(config, group)
    shards = Shards.of(config, group)
    given = given_normalization(config)  # first: a wrong file is found before a long reading of the data
    train, found = _copy(config, config.training_data_path, shards, "training data", given)
    held_out = held_out_found = None
    if config.eval_data_path is not None:
        held_out, held_out_found = _copy(config, config.eval_data_path, shards, "eval data", {})
    normalization = given_or_fitted(config, train, found, shards, given)
    for copy in (train, held_out):
        if copy is not None:
            _check_covers(config, copy, normalization)
    spec = normalization.spec(config.actions, found.metric_names)
    train_rows = _rows(config, train, normalization, spec, group)
    counts = shards.counts(train_rows.count)
    if not sum(counts):
        raise DataError(Problem(config.training_data_path, "rows with an action", "none"))
    if shards.several:
        each = " + ".join(f"{count:,}" for count in counts)
        logger.info(f"shards: {each} rows on {len(counts)} nodes, each minibatch takes its share of every one")
    return Data(
        spec=spec,
        normalization=normalization,
        shards=shards,
        counts=counts,
        train=train,
        held_out=held_out,
        found=found,
        held_out_found=held_out_found,
        train_rows=train_rows,
        held_out_rows=None if held_out is None else _rows(config, held_out, normalization, spec, group),
    )


def _copy(
    config: WorkflowConfig, path: str, shards: Shards, title: str, given: Mapping[str, NormalizationSpec]
) -> tuple[TrainingCopy, Agreement]:
    """Returns this machine's rows at a path, and what the rows of all machines there are together."""
    group, actions, data = shards.group, config.actions or None, config.data

    def prepared(show: Callable[[int, int], None] | None) -> TrainingCopy:
        try:
            return prepare_training_copy(
                path, actions=actions, directory=data.training_copy_dir, columns=data.columns, progress=show
            )
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
    # an episode of eval data counts once, even if several machines have it
    found = shards.agree(Facts.of(copy, group.node, given), path, disjoint=path == config.training_data_path)
    logger.info(f"{title}: {path}: {named_counts(found.counts)}")
    for note in found.notes if group.is_first else ():
        logger.warning(f"{title}: {note}")
    return copy, found


def _check_covers(config: WorkflowConfig, copy: TrainingCopy, normalization: Normalization) -> None:
    """Checks that every feature of a copy has parameters."""
    of = f", for {copy.files[0]}" if copy.files else ""
    for path, spec, ids in (
        (config.state_norm_data_path, normalization.state, copy.state_ids),
        (config.action_norm_data_path, normalization.action, copy.action_ids),
    ):
        if spec is not None:
            check_covers(spec, ids, where=f"{path or config.training_data_path}{of}")


def single_step_rows(config: WorkflowConfig, copy: TrainingCopy, data: Data, group: Group) -> LoggedRows:
    """Returns the rows of a copy with one logged step each, as evaluation wants them, whatever the learner spans."""
    if config.rl.multi_steps is None:
        return data.train_rows if copy is data.train or data.held_out_rows is None else data.held_out_rows
    return _rows(config, copy, data.normalization, data.spec, group, single_step=True)


def _rows(
    config: WorkflowConfig,
    copy: TrainingCopy,
    normalization: Normalization,
    spec: SourceSpec,
    group: Group,
    *,
    single_step: bool = False,
) -> LoggedRows:
    """Returns what sources gather from a copy; every rank calls it, those without rows too."""
    matrices = tuple(_matrices(config, copy, normalization))
    place = _place(config, group, sum(len(raw) * width * 4 for raw, _, width, _ in matrices))
    if not len(copy):
        group.barrier()  # where the others wait for their columns
        return no_rows(spec, place)
    spans = single_steps(copy) if single_step else _spans(config, copy)
    usable, notes = learnable_rows(
        copy, spans, maxq=config.rl.maxq_learning, unit_reward=config.rl.q_network_loss == "bce_with_logits"
    )
    for note in notes if group.is_first else ():
        logger.warning(note)
    if group.is_first_on_node:
        for matrix in matrices:
            try:
                prepare_columns(*matrix)
            except OSError as error:
                why = f"{copy.folder}: {error.strerror or error}"
                logger.info(f"{why}: rows are normalized as they are read, which takes longer")
    group.barrier()
    columns = [open_columns(*matrix, place) for matrix in matrices]
    rows = build_rows(copy, spans, usable, *columns, metric_names=spec.metric_names)
    copy.release()
    give_back_memory()
    return rows


def _matrices(
    config: WorkflowConfig, copy: TrainingCopy, normalization: Normalization
) -> Iterator[tuple[NDArray[np.float32], Reordered, int, Path]]:
    """Yields raw features, how they are normalized, how wide they are then, and the file for it, as columns need."""
    as_zero = config.rl.set_missing_value_to_zero
    for name, raw, ids, spec in (
        ("state", copy.state, copy.state_ids, normalization.state),
        ("candidates", copy.candidates, copy.action_ids, normalization.action),
    ):
        if spec is not None:
            known = json.dumps([normalization_json(spec), as_zero], sort_keys=True)
            file = copy.folder / f"normalized_{name}_{hashlib.sha256(known.encode()).hexdigest()[:16]}.npy"
            yield raw, Reordered(ids, spec, Preprocessor(spec, missing_as_zero=as_zero)), spec.width, file


def _spans(config: WorkflowConfig, copy: TrainingCopy) -> Spans:
    rl = config.rl
    if rl.use_seq_num_diff_as_time_diff:
        return time_steps(copy, rl.time_diff_unit_length)
    if rl.multi_steps is not None and rl.multi_steps > 1:
        boost = [(rl.reward_boost or {}).get(name, 0.0) for name in config.actions]
        return n_steps(copy, rl.multi_steps, rl.gamma, np.array(boost) if rl.reward_boost else None)
    return single_steps(copy)


def _place(config: WorkflowConfig, group: Group, num_bytes: int) -> torch.device:
    """Returns where rows live. On a CPU the memory map serves all processes of the machine from one page cache."""
    if group.device.type == "cpu" or config.data.residency == "host":
        return torch.device("cpu")
    free, _ = torch.cuda.mem_get_info(group.device)
    if config.data.residency == "device" or num_bytes <= _DEVICE_SHARE * free:
        return group.device
    return torch.device("cpu")
