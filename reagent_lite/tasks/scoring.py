"""Decisions of an exported model for rows of any format, as Arrow tables: steps 2 and 3 of `workflows.score`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from reagent_lite.config.column_names import features_of
from reagent_lite.config.score_config import ScoreConfig
from reagent_lite.console import logger, progress
from reagent_lite.data.copy.first_look import remembered_columns
from reagent_lite.data.formats.arrow import BLOCK_VALUES
from reagent_lite.data.formats.blocks import Block, InputFile
from reagent_lite.data.formats.format_table import read_blocks, readers_of
from reagent_lite.data.formats.frames import location
from reagent_lite.data.formats.schema import take_or_null
from reagent_lite.data.logs import Log
from reagent_lite.data.rows.block_columns import Column, column_of, pieces, require_one_order
from reagent_lite.data.rows.faults import Faults
from reagent_lite.data.rows.levels import WORDS
from reagent_lite.data.rows.maps import are_item_ids, features, item_rows, read_candidate_lists
from reagent_lite.data.rows.matrices import FeatureMatrix, Lists
from reagent_lite.data.rows.reading import action_mask
from reagent_lite.data.rows.row_rules import require_columns, require_present
from reagent_lite.data.rows.typed_columns import (
    as_text,
    features_as,
    features_type,
    list_array,
    map_array,
    texts_in,
    typed_column,
)
from reagent_lite.errors import ConfigError, Problem, join_names, pluralize, raise_any, suggest_nearest
from reagent_lite.export.bundle import Bundle, Prediction, image_of_log, load_bundle, parts
from reagent_lite.export.newer_items import with_items_of
from reagent_lite.feature_ids import id_of
from reagent_lite.item_table import ItemTable
from reagent_lite.tasks.steps_of_rows import StepsOfRows, read_steps

_KEYS = {"mdp_id": pa.string(), "sequence_number": pa.int64()}


def scored_table(config: ScoreConfig) -> pa.Table:
    """Returns the actions and scores of all rows, in memory; for columns and errors see `scored_tables`."""
    bundle, config, log = open_scoring(config)
    return pa.concat_tables(scored_tables(config, log.files, bundle, Counter()))


def open_scoring(config: ScoreConfig) -> tuple[Bundle, ScoreConfig, Log]:
    """Returns the model, the config with the columns of the rows, and the log.

    Raises:
        BundleError: the model fails its check, or the item table does not fit it.
        ConfigError: a column to keep is a feature of the model.
        DataError: files are missing or cannot be read.
    """
    bundle = load_bundle(Path(config.model).expanduser(), threads=1)  # blocks are predicted side by side
    bundle = with_items_of(bundle, config.items)
    columns = config.columns or remembered_columns(config.data_path, bundle.columns)
    config = config.model_copy(update={"columns": columns})
    raise_any(list(config.rules()), ConfigError)
    log = Log(
        config.data_path,
        columns=columns,
        items=bundle.items,
        id_features=bundle.ids_of_log,
        image=image_of_log([bundle]),
    )
    return bundle, config, log


def scored_tables(
    config: ScoreConfig, files: tuple[InputFile, ...], bundle: Bundle, others: Counter[str]
) -> Generator[pa.Table]:
    """Yields the actions and scores of rows, in order; adds the counts of `Bundle.others` by feature to `others`.

    Columns:
        mdp_id, sequence_number: null if the input has none.
        the columns to keep.
        action: a name, the id of an item or the features of a candidate.
        index: index of the action among the model's actions or in possible_actions; in the item table for a row
            without them.
        score: score of the action.
        action_probability: probability with which it was drawn; 1 for the largest score.
        scores: with `all_scores`, a struct by action or a list by candidate; null for a choice that is not allowed.

    Raises:
        DataError: rows have faults, or no row has a feature that the model reads.
    """
    if isinstance(given := config.columns.get("state_features"), list):
        _require_features("state", map(id_of, bundle.features["state"]), map(id_of, features_of(given)), "columns")
    rng = np.random.default_rng(config.seed) if config.policy == "acting" else None
    columns = set[str]()
    orders: dict[str, str] = {}
    state_ids = set[int]()
    action_ids = set[int]()
    readers = readers_of((*_KEYS, *config.keep, "state_features", "possible_actions"))
    with (
        read_steps(bundle, files) as steps,
        progress("scoring", "bytes") as show,
        closing(read_blocks(files, partial(_predict, bundle, config.keep, steps), show, readers)) as blocks,
    ):
        for block in blocks:
            for rows in block:
                orders = {**rows.orders, **orders}
                require_one_order(orders, 0)
                columns.update(rows.columns)
                state_ids.update(rows.state_ids)
                action_ids.update(rows.candidates.features.ids if rows.candidates else ())
                others.update(rows.others)
                yield rows.score(bundle, rng, all_scores=config.all_scores)
    for feature, count in others.items():
        logger.warning(f"feature {feature}: {pluralize(count, 'value')} without a column in the model")
    where = location(config.data_path)
    require_columns(sorted(columns), config.keep, where)
    _require_features("state", bundle.step_feature_ids, state_ids, where)
    _require_features("candidate", bundle.action_feature_ids, action_ids, where)


def _require_features(kind: str, reads: Iterable[int], given: Iterable[int], where: str) -> None:
    """Raises a DataError if rows have no column for a feature that the model reads; a column of nulls is enough."""
    names = sorted(map(str, given))
    present = set(names)
    missing = [str(feature) for feature in reads if str(feature) not in present]
    got = f"features {join_names(names)}" if names else "none"
    problems = []
    for name in missing:
        expected = f"the {kind} feature {name}, which the model reads"
        problems.append(Problem(where, expected, got, suggest_nearest(name, names, "Nearest: {!r}")))
    raise_any(problems)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PredictedRows:
    """Rows of a block with the model's predictions.

    Attributes:
        columns: names of the block's columns, with the log's names of columns to keep.
        keys: columns of _KEYS, and columns to keep.
        orders: Faults.orders of the block.
        state_ids: ids of the block's state features.
        candidates: None with named actions.
        texts: strings of candidates' features by code.
        others: {feature: number of values without a column in the model}.
        items: [candidates] id of each; None for candidates without ids.
        prediction: the prediction of the model.
    """

    columns: set[str]
    keys: pa.Table
    orders: dict[str, str]
    state_ids: tuple[int, ...]
    candidates: Lists | None
    texts: dict[int, dict[float, str]]
    others: dict[str, int]
    items: pa.Array | None
    prediction: Prediction

    def score(self, bundle: Bundle, rng: np.random.Generator | None, *, all_scores: bool) -> pa.Table:
        q = self.prediction.q
        index, probability = (self.prediction.greedy, np.ones(len(q))) if rng is None else self._draw(rng)
        undecided = index < 0
        column = np.maximum(index, 0)
        columns = {
            **dict(zip(self.keys.column_names, self.keys.columns, strict=True)),
            "action": self._actions(bundle, index),
            "index": pa.array(index, mask=undecided),
            "score": pa.array(np.take_along_axis(q, column[:, None], 1)[:, 0], mask=undecided),
            "action_probability": pa.array(probability, mask=undecided),
        }
        if all_scores:
            columns["scores"] = self._scores(bundle)
        return pa.table(columns)

    def _draw(self, rng: np.random.Generator) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Returns drawn indices and their probabilities, added up over equal candidates: a log has only features."""
        index, probability = self.prediction.draw(rng)
        if self.candidates is None:
            return index, probability
        exists = np.arange(self.prediction.q.shape[1]) < self.candidates.lengths[:, None]
        first = self.candidates.first_equal
        total = np.zeros(exists.shape)
        total[exists] = np.bincount(first, self.prediction.propensities[exists], len(first))[first]
        return index, total[np.arange(len(index)), index]

    def _actions(self, bundle: Bundle, index: NDArray[np.int64]) -> pa.Array:
        if self.candidates is None:
            return take_or_null(pa.array(bundle.action_names, pa.string()), index)
        lengths = self.candidates.lengths
        matrix = self.candidates.features
        decided = index >= 0
        rows = np.cumsum(lengths) - lengths + index
        if self.items is not None:
            return self.items.take(pa.array(rows, mask=~decided))
        values = np.full((len(index), len(matrix.ids)), np.nan, np.float32)
        values[decided] = matrix.values[rows[decided]]
        names = {int(feature): str(feature) for feature in matrix.ids}
        maps = map_array(FeatureMatrix(matrix.ids, values), decided, self.texts)
        # the same type in all blocks
        kind = features_type(maps.type, names=True, texts=bool(bundle.levels["action"]))
        return features_as(maps, kind, names)

    def _scores(self, bundle: Bundle) -> pa.Array:
        q = self.prediction.q
        mask = self.prediction.mask
        if self.candidates is None:
            by_action = [pa.array(q[:, column], mask=~mask[:, column]) for column in range(q.shape[1])]
            return pa.StructArray.from_arrays(by_action, list(bundle.action_names))
        lengths = self.candidates.lengths
        exists = np.arange(q.shape[1]) < lengths[:, None]
        return list_array(pa.array(q[exists], mask=~mask[exists]), lengths)


def _predict(bundle: Bundle, keep: Sequence[str], steps: StepsOfRows | None, block: Block) -> list[_PredictedRows]:
    """Returns the rows of a block with the model's predictions; `steps` has the states of several steps.

    Raises:
        DataError: a column is missing, or rows have faults.
    """
    wanted = ("state_features", "possible_actions") if bundle.choices == "candidates" else ("state_features",)
    require_columns(block.table.column_names, wanted, block.where(0))
    faults = Faults(block)
    column = partial(column_of, block)
    state, present = features(column("state_features"), faults)
    require_present("state_features", present, faults)
    read = {str(feature): str(feature) in bundle.levels["state"] for feature in bundle.step_feature_ids}
    _require_texts(read, "state_features", state, np.arange(len(present)), faults)
    row_keys = {name: typed_column(column(name), faults).cast(kind) for name, kind in _KEYS.items()}
    fields = {name: block.file.columns.meaning(name) if block.file.columns else name for name in keep}
    keys = pa.table(row_keys | {name: as_text(column(field), faults)[0] for name, field in fields.items()})
    present_fields = {name for name, field in fields.items() if field in block.table.column_names}
    columns = {*block.table.column_names, *present_fields}
    values = state.align(bundle.step_feature_ids) if steps is None else steps.states(block)
    ids = bundle.action_feature_ids
    if bundle.parametric:
        lists = _candidates(bundle, column("possible_actions"), faults)
        if isinstance(lists, Lists):
            read = {str(feature): str(feature) in bundle.levels["action"] for feature in ids}
            _require_texts(read, "possible_actions", lists.features, lists.rows, faults)
        sizes = lists.lengths * len(ids)
    else:
        mask = action_mask(column("possible_actions"), bundle.action_names, faults).astype(bool)
        sizes = np.full(len(mask), mask.shape[1])
    faults.require_none()
    predicted = []
    for part in parts(sizes.tolist(), BLOCK_VALUES):
        candidates = lists.part(part) if bundle.parametric else None
        items = None
        if isinstance(candidates, _ItemChoices):
            items = candidates.ids
            candidates = candidates.lists
        others = Counter({str(feature): count for feature, count in bundle.others(values[part]).items()})
        if candidates is None:
            prediction = bundle.predict(values[part], mask=mask[part])
        else:
            every = candidates.features.align(ids)
            others.update({str(feature): count for feature, count in bundle.others(every, candidates=True).items()})
            prediction = bundle.predict(values[part], candidates=np.split(every, np.cumsum(candidates.lengths)[:-1]))
        rows = keys.slice(part.start, part.stop - part.start)
        predicted.append(
            _PredictedRows(
                columns=columns,
                keys=rows,
                orders=faults.orders,
                state_ids=state.ids,
                candidates=candidates,
                items=items,
                texts=texts_in(faults, "possible_actions"),
                others=dict(others),
                prediction=prediction,
            )
        )
    return predicted


def _require_texts(
    read: Mapping[str, bool], name: str, matrix: FeatureMatrix, row_of: NDArray[np.int64], faults: Faults
) -> None:
    """Records a fault if a feature is a text and the model reads a number, or the other way round.

    Args:
        read: {feature that the model reads: whether it is a text}.
        name: name of the column.
        matrix: features [n, F] of the column.
        row_of: [n] row in the block.
        faults: faults of the block.
    """
    for index, feature in enumerate(matrix.ids):
        is_text = feature in faults.levels.get(name, {})
        if is_text != read.get(str(feature), is_text):
            rows = np.zeros(faults.block.table.num_rows, bool)
            rows[row_of[~np.isnan(matrix.values[:, index])]] = True
            expected = f"{WORDS[not is_text]} for feature {feature} in {name}, as the model reads"
            faults.add(rows, expected, partial(str.format, WORDS[is_text]))


@dataclass(frozen=True, slots=True, kw_only=True)
class _ItemChoices:
    """Lists of items.

    Attributes:
        table: the items.
        rows: rows of the table, an array for each list; lists of all items share one array.
    """

    table: ItemTable
    rows: Sequence[NDArray[np.int64]]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[n] number of items of each list."""
        return np.array([len(rows) for rows in self.rows])

    def part(self, lists: slice) -> _ItemChoices:
        """Returns consecutive lists."""
        return _ItemChoices(table=self.table, rows=self.rows[lists])

    @property
    def lists(self) -> Lists:
        """Features of the items in all lists."""
        values = self.table.values[np.concatenate(self.rows)]
        return Lists(self.lengths, FeatureMatrix(self.table.feature_ids, values))

    @property
    def ids(self) -> pa.Array:
        """[items] id of each item in all lists."""
        return pa.array(self.table.ids, pa.string()).take(pa.array(np.concatenate(self.rows)))


def _candidates(bundle: Bundle, column: Column, faults: Faults) -> Lists | _ItemChoices:
    """Returns the candidates of rows, by features or, for a model with items, by id; null stands for all items."""
    if bundle.items is None:
        return read_candidate_lists(column, faults)
    lengths, elements = pieces(column, faults, "a list of ids of items")
    if len(elements.array) and not are_item_ids(elements):
        return read_candidate_lists(column, faults)
    rows = item_rows(elements, faults, bundle.items)
    elements.fault(faults, ~elements.present, f"an id for every item in {column.name}", lambda _: "null")
    every = np.arange(len(bundle.items))
    given = np.split(rows, np.cumsum(lengths))[:-1]
    present = column.present.tolist()
    lists = [listed if is_given else every for listed, is_given in zip(given, present, strict=True)]
    return _ItemChoices(table=bundle.items, rows=lists)
