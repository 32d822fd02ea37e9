"""Prepares logged data for a run: from the config's paths to normalized rows.

1 stages            events become files of transitions, if the config asks for it
2 training copies   written by the first process of each node and memory-mapped by the others; with data.layout split
                    of the machine's own episodes
3 agreement         features, names and rows of each shard, exchanged between machines
4 normalization     read from files, or fitted by rank 0 to samples of all shards and sent to all ranks
5 columns           normalized once by the first process of each node and memory-mapped by the others
6 rows              read by the source that builds batches
7 scored episodes   chosen by all machines together; evaluation.learn_from_scored keeps them out of learning
8 validation        with checkpoint.keep_best, episodes that are neither learned from nor scored
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from reagent_lite.algorithms.registry import ALGORITHMS
from reagent_lite.config import WorkflowConfig
from reagent_lite.config.column_names import WEIGHT
from reagent_lite.console import logger, progress
from reagent_lite.data.copy.copy_summaries import Agreement, CopySummary
from reagent_lite.data.copy.prepared_copy import prepare_training_copy
from reagent_lite.data.copy.texts import count_others, require_texts
from reagent_lite.data.copy.training_copy import TrainingCopy, empty_training_copy
from reagent_lite.data.features.normalization_files import left_out_features, normalization_json
from reagent_lite.data.formats.blocks import InputFile
from reagent_lite.data.log_shares import counts_in_words, shares_in_words, shares_of_counts
from reagent_lite.data.logs import Log
from reagent_lite.data.rows.matrices import FeatureMatrix, Lists
from reagent_lite.data.sampling.discounts import TimeDiscounts, require_discounts, time_discounts
from reagent_lite.data.sampling.normalized import Reordered, open_columns, open_raw_columns, prepare_columns
from reagent_lite.data.sampling.shards import Shards
from reagent_lite.data.sampling.source import LoggedRows, build_rows, padding_rows
from reagent_lite.data.sampling.spans import Spans, learnable_rows, n_steps, single_steps, time_steps
from reagent_lite.distributed.group import Group
from reagent_lite.errors import DataError, NoRowsError, Problem, join_names, pluralize, raise_any
from reagent_lite.evaluation.evaluator import describe_weights
from reagent_lite.evaluation.scored_episodes import (
    FEWEST_TO_VALIDATE,
    ScoredEpisodes,
    TrainEvalLogs,
    scored_episodes,
    validation_episodes,
)
from reagent_lite.feature_ids import id_of
from reagent_lite.item_table import ItemTable
from reagent_lite.manifest import canonical
from reagent_lite.memory import give_back_memory
from reagent_lite.models.preprocessor import Preprocessor
from reagent_lite.run.normalization import (
    Normalization,
    NormalizationFiles,
    file_beside,
    given_normalizations,
    given_or_fitted,
    normalization_files,
)
from reagent_lite.types import NormalizationSpec, SourceSpec
from reagent_lite.whole_files import write_whole

_TRAINING = "training data"
_EVAL = "eval data"
_DEVICE_SHARE = 0.5  # of the free device memory; the rest is left for the network, its gradients and batches


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedData:
    """Logged rows, to learn from or to evaluate on.

    Attributes:
        log: the log as this machine reads it.
        copy: training copy of this machine's data.
        agreement: features, names and counts of the data of all machines.
        others: {"state" or "action": {id: number of values without a column of their own}} of one-hot features, on all
            machines.
        rows: this machine's rows as sources read them.
        discounts: this machine's discounts by time_diff; None if discounts are by rows.
        weights: [episodes] how many decisions this machine's rows stand for, divided by the mean of all machines' rows;
            None: all alike.
    """

    log: Log
    copy: TrainingCopy
    agreement: Agreement
    others: dict[str, dict[int, int]]
    rows: LoggedRows
    discounts: TimeDiscounts | None
    weights: NDArray[np.float64] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """The logged data of a run.

    Attributes:
        spec: numbers of features and choices that the network is built for.
        normalization: normalization of training and eval data.
        shards: assigns rows to processes.
        train: training data.
        held_out: eval data, or None without eval_data_path.
        learned: the training rows that the policy learns from.
        validation: the training rows whose TD loss chooses the best epoch, or None.
        counts: number of the rows learned from in each shard.
        continues: whether any row learned from, on any machine, has a next state; false for logs of single steps.
        sides: training and eval data as the evaluation sees them.
        scored: the episodes on which the policy is scored.
        seen: whether the policy learns from some of the scored episodes, also if they have another mdp_id there.
        items: the item table, or None without data.items.
        given: the files that give the normalization.
    """

    spec: SourceSpec
    normalization: Normalization
    shards: Shards
    train: LoggedData
    held_out: LoggedData | None
    learned: LoggedRows
    validation: LoggedRows | None
    counts: tuple[int, ...]
    continues: bool
    sides: TrainEvalLogs
    scored: ScoredEpisodes
    seen: bool
    items: ItemTable | None
    given: NormalizationFiles

    @property
    def evaluated(self) -> LoggedData:
        """The eval data if there is any, otherwise the training data, of which a part is evaluated."""
        return self.held_out or self.train


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    """A log that was read: its training copy, and the figures of all machines; `title` names it in messages."""

    title: str
    log: Log
    copy: TrainingCopy
    agreement: Agreement


def prepare(config: WorkflowConfig, group: Group) -> Data:
    """Returns the run's data; every rank calls it.

    Raises:
        DataError: a file cannot be read, with file and line; or the data of two machines do not fit together, on every
            rank.
    """
    from reagent_lite.run.stages import logs_of_run  # needs the extra `data`

    shards = Shards.of(config.data, group)
    files = normalization_files(config, group)
    given = given_normalizations(config, files)  # first, so that a bad file is reported before the data is read
    items = _items(config, group)
    training, eval_log = logs_of_run(config, group, items)
    train = _read(training, _TRAINING, shards, given)
    held_out = None
    if eval_log is not None:
        held_out = _read(eval_log, _EVAL, shards, {}, repeats=eval_log.path != training.path)
    normalization = given_or_fitted(config, train.copy, train.agreement, shards, given)
    fitted_to = training.name
    _check_features(train, normalization, files, fitted_to, group, fewest=config.norm_params.min_present_values)
    if held_out is not None:
        _check_features(held_out, normalization, files, fitted_to, group)
    if items is not None and normalization.action is not None:
        raise_any(items.lacking(normalization.action.feature_ids, f"{config.data.items}"))
    spec = normalization.spec(config.actions, train.agreement.metric_names)

    def assemble(read: _Read) -> LoggedData:
        others = _others(read, normalization, shards)
        weights = _weights(read, shards)
        return LoggedData(
            log=read.log,
            copy=read.copy,
            agreement=read.agreement,
            others=others,
            rows=_rows(config, read.copy, normalization, spec, group, weights),
            discounts=_discounts(config, read, group),
            weights=weights,
        )

    train_log = assemble(train)
    scored_log = train_log if held_out is None else assemble(held_out)
    sides = TrainEvalLogs(
        train=train_log.copy,
        held_out=None if held_out is None else scored_log.copy,
        same=scored_log.agreement.content == train_log.agreement.content,
        shards=shards,
    )
    scored = scored_episodes(sides, config.evaluation, config.seed)
    validated = _choose_validation(config, train_log, sides, scored)
    learned, seen = _to_learn(config, train_log, sides, scored, validated)
    seen |= scored.repeats and config.simulated_share < 1
    counts = shards.counts(learned.count)
    if not sum(counts):
        raise DataError(_nothing_to_learn(training.name, scored_too=config.learns_from_scored))
    if not len(scored.hashes) and group.is_first:
        logger.warning(
            "no episode is scored, so there are no estimates and no decision: give eval_data_path, more "
            f"episodes, or a larger evaluation.held_out_share (now {config.evaluation.held_out_share:g})"
        )
    if shards.several:
        each = " + ".join(f"{count:,}" for count in counts)
        logger.info(f"shards: {each} rows on {len(counts)} nodes; each minibatch has its share of every shard")
    return Data(
        spec=spec,
        normalization=normalization,
        shards=shards,
        train=train_log,
        held_out=None if held_out is None else scored_log,
        learned=learned,
        validation=None if validated is None else train_log.rows.only(_rows_of(train_log, validated)),
        counts=counts,
        continues=any(group.all_gather(int(learned.continues))),
        sides=sides,
        scored=scored,
        seen=seen,
        items=items,
        given=files,
    )


def _items(config: WorkflowConfig, group: Group) -> ItemTable | None:
    """Returns the item table; every rank calls it.

    Raises:
        DataError: see `read_items`; tables of two machines that differ.
    """
    from reagent_lite.run.stages import items_of  # needs the extra `data`

    items = items_of(config)
    if items is None:
        return None
    hashes = set(group.gather_text(items.sha256))
    if len(hashes) > 1:
        got = f"{len(hashes)} different ones: {join_names(digest[:12] for digest in sorted(hashes))}"
        todo = "Copy the same file to all machines"
        raise DataError(Problem(f"{config.data.items}", "the same item table on every machine", got, todo))
    logger.info(f"items: {config.data.items}: {pluralize(len(items), 'item')}, hash {items.sha256[:12]}")
    if items.all_possible:
        logger.info(f"items: a row without possible_actions offers all {pluralize(len(items), 'item')}")
    first = Lists(np.array([len(items)]), FeatureMatrix(items.feature_ids, items.values)).first_equal
    if same := int((first < np.arange(len(items))).sum()):
        equal = pluralize(same, "item has", "items have")
        logger.warning(f"items: {equal} the features of another one, and a model cannot distinguish them")
    return items


def _choose_validation(
    config: WorkflowConfig, log: LoggedData, sides: TrainEvalLogs, scored: ScoredEpisodes
) -> NDArray[np.bool_] | None:
    """Returns the training episodes for validation, [episodes]; None if there are none. Every rank calls it.

    Warns if the log cannot tell which epoch is the best; docs/training.md has the reasons.
    """
    if not config.checkpoint.keep_best or config.simulated_share:
        return None
    group = sides.shards.group
    continues = any(group.all_gather(int(log.rows.continues)))
    validated = validation_episodes(sides, scored, config.seed)
    reason = ""
    if ALGORITHMS[config.algorithm].score != "value":
        reason = f"the policy of {config.algorithm} does not follow from the values whose loss could be compared"
    elif config.rl.gamma and continues:
        reason = "with rl.gamma > 0 and next states, losses of two epochs have different targets"
    elif not any(sides.shards.counts(len(_rows_of(log, validated)))):
        reason = f"it needs at least {FEWEST_TO_VALIDATE} episodes besides the scored ones"
    if not reason:
        return validated
    if group.is_first:
        logger.warning(f"checkpoint.keep_best has no effect, the last epoch is exported: {reason}")
    return None


def _rows_of(log: LoggedData, episodes: NDArray[np.bool_]) -> NDArray[np.integer[Any]]:
    """Returns the usable rows of the episodes for which `episodes` [episodes] is true."""
    if log.rows.usable is None:
        return log.copy.rows_of(episodes)
    usable: NDArray[np.integer[Any]] = log.rows.usable.cpu().numpy()
    chosen: NDArray[np.integer[Any]] = usable[episodes[log.copy.episode[usable]]]
    return chosen


def _to_learn(
    config: WorkflowConfig,
    log: LoggedData,
    sides: TrainEvalLogs,
    scored: ScoredEpisodes,
    validated: NDArray[np.bool_] | None,
) -> tuple[LoggedRows, bool]:
    """Returns the training rows that the policy learns from, and whether some of them are of scored episodes."""
    is_scored = np.isin(sides.hashes(log.copy), scored.hashes)  # by episode
    if config.learns_from_scored:
        seen = any(sides.shards.group.all_gather(int(is_scored.any())))
        learned = log.rows if validated is None else log.rows.only(_rows_of(log, ~validated))
        return learned, seen and config.simulated_share < 1  # at 1, logged rows are only evaluated
    left_out = is_scored if validated is None else is_scored | validated
    return log.rows.only(_rows_of(log, ~left_out)), False


def _nothing_to_learn(name: str, *, scored_too: bool) -> Problem:
    """Returns the problem of training data without a row that the policy may learn from."""
    if scored_too:
        return Problem(name, "rows with an action", "none")
    return Problem(
        name,
        "rows with an action, in episodes that are not scored",
        "none",
        "Give more episodes, eval_data_path of other episodes, a smaller evaluation.held_out_share, or set "
        "evaluation.learn_from_scored to true",
    )


def _read(
    log: Log, title: str, shards: Shards, given: Mapping[str, NormalizationSpec], *, repeats: bool = False
) -> _Read:
    """Returns this machine's training copy of a log, and features, names and counts over all machines.

    Args:
        log: the log.
        title: name of the log in messages.
        shards: the machines and their shares.
        given: normalization that files give.
        repeats: whether the same episodes may be in the data of several machines, as eval data.
    """
    group = shards.group

    def prepare_copy(show: Callable[[int, int], None] | None) -> TrainingCopy:
        try:
            return prepare_training_copy(log, show)
        except NoRowsError:
            if not shards.several:
                raise
            return empty_training_copy(log.actions)

    if group.is_first_on_node:
        with progress(f"reading {title}", "bytes", enabled=group.is_first) as show:
            copy = prepare_copy(show)
    group.barrier()
    if not group.is_first_on_node:
        copy = prepare_copy(None)
    files: tuple[InputFile, ...] = ()
    with suppress(NoRowsError):  # an empty folder, which other machines have files in
        files = log.files if log.partition is not None else ()
    agreement = shards.agree(CopySummary.of(copy, group.node, given, files), log.name, repeats=repeats)
    logger.info(f"{title}: {log.name}: {counts_in_words(agreement.counts)}")
    if shares := shares_of_counts(log.path, agreement.counts):
        logger.info(f"{title} by log: {shares_in_words(shares)}")
    for note in agreement.notes if group.is_first else ():
        logger.warning(f"{title}: {note}")
    return _Read(title=title, log=log, copy=copy, agreement=agreement)


def _check_features(
    read: _Read,
    normalization: Normalization,
    given: NormalizationFiles,
    fitted_to: str,
    group: Group,
    *,
    fewest: int | None = None,
) -> None:
    """Warns of features that the normalization leaves out, and checks that it has strings where a copy has strings.

    Args:
        read: the log.
        normalization: the run's normalization.
        given: the files that give it.
        fitted_to: name of the data that it is fitted to without a file.
        group: the ranks.
        fewest: number of values that features need in these data; None for other data.
    """
    example = f", for {read.copy.files[0]}" if read.copy.files else ""
    ids = {"state": read.agreement.state_ids, "action": read.agreement.action_ids}
    for side, spec in normalization.sides.items():
        path = given[side]
        where = f"{path or fitted_to}{example}"
        sentence = left_out_features(spec, ids[side], where=where, fewest=fewest if path is None else None)
        if sentence and group.is_first:
            logger.warning(sentence)
        require_texts(read.copy, side, spec, where)


def _others(read: _Read, normalization: Normalization, shards: Shards) -> dict[str, dict[int, int]]:
    """Returns the numbers of values without a column, as in `LoggedData.others`; every rank calls it."""
    totals: dict[str, dict[int, int]] = {"state": {}, "action": {}}
    for side, spec in normalization.sides.items():
        one_hot = [feature.feature_id for feature in spec.features if feature.has_possible_values]
        if not one_hot:
            continue
        with_vectors = {feature.feature_id for feature in spec.features if feature.embedding is not None}
        other = _cached_others(read.copy, side, spec) if shards.is_first and len(read.copy) else {}
        counts = shards.group.all_reduce(torch.tensor([other.get(feature, 0) for feature in one_hot]))
        totals[side] = {feature: count for feature, count in zip(one_hot, counts.tolist(), strict=True) if count}
        for feature, count in totals[side].items() if shards.group.is_first else ():
            what = "value is" if count == 1 else "values are"
            of_their_own = "vector" if feature in with_vectors else "column"
            logger.warning(
                f"{read.title}: {side} feature {feature}: {count:,} {what} other, with no {of_their_own} of their own"
            )
    return totals


def _cached_others(copy: TrainingCopy, side: str, spec: NormalizationSpec) -> dict[int, int]:
    """Returns the result of `count_others`, which is stored next to the copy for later runs."""
    file = file_beside(copy, "others", [side, normalization_json(spec)], ".json")
    with suppress(OSError, ValueError):
        return {id_of(feature): int(count) for feature, count in json.loads(file.read_bytes()).items()}
    counts = count_others(copy, side, spec)
    with suppress(OSError):
        write_whole(file, canonical({str(feature): count for feature, count in counts.items()}))
    return counts


def single_step_rows(config: WorkflowConfig, log: LoggedData, data: Data, group: Group) -> LoggedRows:
    """Returns the rows of a log as single logged steps, which evaluation needs also with rl.multi_steps."""
    if config.rl.multi_steps is None:
        return log.rows
    return _rows(config, log.copy, data.normalization, data.spec, group, log.weights, single_step=True)


def _rows(
    config: WorkflowConfig,
    copy: TrainingCopy,
    normalization: Normalization,
    spec: SourceSpec,
    group: Group,
    weights: NDArray[np.float64] | None,
    *,
    single_step: bool = False,
) -> LoggedRows:
    """Returns the rows of a copy as sources read them; every rank calls it, even without rows."""
    matrices = tuple(_matrices(config, copy, normalization))
    num_bytes = sum(len(raw) * width * 4 for raw, _, width, _ in matrices)
    if spec.image is not None:
        num_bytes += copy.state.nbytes
    device = _device_of_rows(config, group, num_bytes)
    if not len(copy):
        group.barrier()  # the others wait here for their columns
        return padding_rows(spec, device)
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
                logger.info(f"{why}: rows are normalized each time they are read, which takes longer")
    group.barrier()
    columns = [open_columns(*matrix, device) for matrix in matrices]
    if spec.image is not None:
        columns.insert(0, open_raw_columns(copy.state, device))
    rows = build_rows(copy, spans, usable, *columns, metric_names=spec.metric_names)
    if weights is not None:
        rows = rows.with_sample_weight(weights[copy.episode])
    copy.release()
    give_back_memory()
    return rows


def _matrices(
    config: WorkflowConfig, copy: TrainingCopy, normalization: Normalization
) -> Iterator[tuple[NDArray[np.float32], Reordered, int, Path]]:
    """Yields for states and candidates the arguments of `prepare_columns`: raw values, transform, width and file.

    Images are not normalized.
    """
    as_zero = config.rl.set_missing_value_to_zero
    for name, raw, ids, spec in (
        ("state", copy.state, copy.state_ids, normalization.state),
        ("candidates", copy.candidates, copy.action_ids, normalization.action),
    ):
        if spec is not None and spec.image is None:
            file = file_beside(copy, f"normalized_{name}", [normalization_json(spec), as_zero], ".npy")
            yield raw, Reordered(ids, spec, Preprocessor(spec, missing_as_zero=as_zero)), spec.width, file


def _spans(config: WorkflowConfig, copy: TrainingCopy) -> Spans:
    rl = config.rl
    if rl.use_seq_num_diff_as_time_diff:
        return time_steps(copy, rl.time_diff_unit_length)
    if rl.multi_steps is not None and rl.multi_steps > 1:
        boost = [(rl.reward_boost or {}).get(name, 0.0) for name in config.actions]
        boosts = np.array(boost) if rl.reward_boost else None
        return n_steps(copy, rl.multi_steps, rl.gamma, boosts, maxq=rl.maxq_learning)
    return single_steps(copy)


def _discounts(config: WorkflowConfig, read: _Read, group: Group) -> TimeDiscounts | None:
    """Returns this machine's discounts by time_diff, and logs their median.

    Raises:
        DataError: nearly all discounts of a log are 0, or all are 1.
    """
    if not config.rl.use_seq_num_diff_as_time_diff:
        return None
    unit_length = config.rl.time_diff_unit_length
    require_discounts(read.copy, read.log.path, unit_length=unit_length, gamma=config.rl.gamma)
    discounts = time_discounts(read.copy, unit_length=unit_length, gamma=config.rl.gamma)
    if discounts is not None and group.is_first:
        logger.info(f"{read.title}: {discounts}")
        if warning := discounts.warning():
            logger.warning(f"{read.title}: {warning}")
    return discounts


def _weights(read: _Read, shards: Shards) -> NDArray[np.float64] | None:
    """Returns `LoggedData.weights`, and logs the effective number of rows; every rank calls it.

    Raises:
        DataError: see `read_weight_column`.
    """
    if WEIGHT not in read.log.columns:
        return None
    from reagent_lite.data.copy.policy_column import read_weight_column  # needs the extra `data`

    copy = read.copy
    weights = read_weight_column(read.log, copy) if len(copy) else np.ones(0)
    of_rows = weights[copy.episode] if len(copy) else weights
    sums = torch.tensor([len(of_rows), of_rows.sum(), np.square(of_rows).sum()], dtype=torch.float64)
    count, total, squares = shards.group.all_reduce(sums * shards.is_first).tolist()
    if shards.group.is_first:
        logger.info(f"{read.title}: {describe_weights(int(count), total, squares)}")
    relative: NDArray[np.float64] = weights * (count / total)
    return relative


def _device_of_rows(config: WorkflowConfig, group: Group, num_bytes: int) -> torch.device:
    """Returns the device that holds the rows: the GPU if they fit, else the CPU, where processes share memory maps."""
    if group.device.type == "cpu" or config.data.residency == "host":
        return torch.device("cpu")
    free, _ = torch.cuda.mem_get_info(group.device)
    if config.data.residency == "device" or num_bytes <= _DEVICE_SHARE * free:
        return group.device
    return torch.device("cpu")
