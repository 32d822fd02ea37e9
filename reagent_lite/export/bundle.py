"""An exported model: loading, verification and decisions; needs onnxruntime and numpy only.

folder ─► every byte verified ─► model.onnx in onnxruntime ─► predict: q, greedy, propensities ─► act: a draw

bundle = load_bundle("model")
bundle.predict(bundle.states([{"0": 1.5, "3": 0.2}])).greedy
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from reagent_lite.errors import BundleError, Problem, join_names, pluralize, raise_any
from reagent_lite.export.exploration import certain_share
from reagent_lite.export.feature_set import FeatureMap, FeatureSet, checked_array, stack_steps
from reagent_lite.export.image_set import IMAGE, ImageSet, shape_of_image
from reagent_lite.export.tolerance import Tolerance, compare_choices
from reagent_lite.feature_ids import MOST_STEPS, name_of_step, read, stack_columns, stacked_width
from reagent_lite.id_values import IdFeature
from reagent_lite.item_table import ITEMS_FILE, UNKNOWN, ItemTable, are_ids
from reagent_lite.manifest import BUNDLE, FILE_NAME, verify_folder
from reagent_lite.raw_values import raw_columns
from reagent_lite.types import Image

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

MODEL_FILE: Final = "model.onnx"
GOLDEN_FILE: Final = "golden.json"
CONFIG_FILE: Final = "config.json"
NORMALIZATION_FILE: Final = "normalization.json"
EVALUATION_FILE: Final = "evaluation.json"
_OUTPUTS: Final = {"q", "greedy", "propensities", "choices"}
_EXPORT_AGAIN: Final = "Export the model again with this release"

ItemId = str | int
ChoiceKind = Literal["named actions", "candidates", "items"]
"""Kind of a model's choices; items are candidates with ids, and a table has their features."""
ColumnNames = dict[str, Any]
"""{standard column: name of the log's column, or of one column per feature}, as data.columns of the config."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Values and decisions of N rows with K choices each.

    Attributes:
        q: [N, K] float32 of every choice, allowed or not; NaN where a row has fewer than K candidates.
        greedy: [N] int64, the lowest index of the largest allowed q; -1 where no choice is allowed.
        propensities: [N, K] float32, probabilities of the model's policy, which `act` draws from; zeros where no
            choice is allowed.
        mask: [N, K] bool, the choices that exist, are allowed and, with BCQ, are likely enough in the log.
    """

    q: NDArray[np.float32]
    greedy: NDArray[np.int64]
    propensities: NDArray[np.float32]
    mask: NDArray[np.bool_]

    def draw(self, rng: np.random.Generator | int | None = None) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Draws an action per row by inverting the cumulative propensities; returns what `Bundle.act` returns."""
        rng = np.random.default_rng(rng)
        cumulative = self.propensities.cumsum(1, dtype=np.float64)
        total = cumulative[:, -1]
        has_choice = total > 0
        # u < 1, but u * total can round up to total
        target = np.minimum(rng.random(len(total)) * total, np.nextafter(total, 0))
        actions: NDArray[np.int64] = np.where(has_choice, (cumulative > target[:, None]).argmax(1), -1)
        drawn = self.propensities[np.arange(len(total)), actions]
        return actions, np.where(has_choice, drawn / np.where(has_choice, total, 1.0), 0.0)


class Bundle:
    """An exported model, verified and ready; returned by `load_bundle`.

    Attributes:
        manifest: the document of manifest.json.
        workflow: "dqn" or "parametric_dqn".
        history: number of steps of a state, see `states`.
        step_feature_ids: ids of the columns of one step.
        state_feature_ids: ids of the state's columns, of all its steps, the oldest first.
            Of an image the numbers of its bytes.
        action_feature_ids: ids of a candidate's columns; empty with named actions.
        action_names: names of the actions; empty with candidates.
        policy: the policy behind the propensities: {"kind": "softmax", "temperature": ...} or
            {"kind": "epsilon_greedy", "epsilon": ...}; epsilon 0 is greedy.
        columns: names of standard columns in its training log, data.columns of its config.
        raw: {"state" or "action": columns of its training log whose values are read from their text}; `states`,
            `candidates` and frames take them in place of the features that they have.
        levels: {"state" or "action": {feature id: its levels}} of the features whose values are texts.
        id_features: {"state" or "action": {feature id: the feature}} of the features whose values are ids, lists of ids
            or ids with scores; each has a column for every id.
        features: {"state" or "action": {feature id: its first column}} of all features, as `states` and `candidates`
            take them.
        items: the items that candidates may be named by, or None.
        item_id: name of the ids' column in item tables, data.item_id of its config.
        possible_items: "all" if rows of its training log without a list offered every item, else None.
        image_shape: shape of its states if they are images, else None.
    """

    def __init__(
        self,
        manifest: dict[str, Any],
        session: "InferenceSession",
        files: Mapping[str, bytes],
        items: ItemTable | None = None,
    ) -> None:
        data = json.loads(files[CONFIG_FILE]).get("data", {})
        normalization = json.loads(files[NORMALIZATION_FILE])
        self.manifest = manifest
        self.workflow: str = manifest["workflow"]
        self.history: int = manifest.get("history", 1)
        self.step_feature_ids = read(manifest["state_feature_ids"])
        self.state_feature_ids = stack_columns(self.step_feature_ids, self.history)
        self.action_feature_ids = read(manifest["action_feature_ids"])
        self.action_names = tuple(manifest["action_names"])
        self.policy: dict[str, Any] = manifest["policy"]
        self.columns: ColumnNames = data.get("columns") or {}
        self.raw = {
            side: raw_columns(source) if isinstance(source := self.columns.get(field), list) else ()
            for side, field in (("state", "state_features"), ("action", "action"))
        }
        self.items = items
        self.item_id: str = data.get("item_id", "")
        self.possible_items: str | None = data.get("possible_items")
        self._item_values = None if items is None else items.align(self.action_feature_ids)
        self._session = session
        self._inputs = [entry.name for entry in session.get_inputs()]
        self._files = files
        state = normalization.get("state", {})
        self.image_shape = shape_of_image(state)
        self._state: FeatureSet | ImageSet = FeatureSet.of(self.step_feature_ids, state, self.raw["state"])
        if self.image_shape is not None:
            self.step_feature_ids = self.state_feature_ids = tuple(range(math.prod(self.image_shape)))
            self._state = ImageSet(shape=self.image_shape, ids=self.state_feature_ids)
        self._stacked = self._state
        if self.history > 1:
            steps = {name_of_step(name, lag): state[name] for name in state for lag in range(self.history)}
            self._stacked = FeatureSet.of(self.state_feature_ids, steps, ())
        self._action = FeatureSet.of(self.action_feature_ids, normalization.get("action", {}), self.raw["action"])
        self.levels = {"state": self._state.levels, "action": self._action.levels}
        self.id_features = {"state": self._state.id_features, "action": self._action.id_features}
        self.features = {"state": self._state.first_columns, "action": self._action.first_columns}

    def __repr__(self) -> str:
        candidates = join_names(self._action.names)
        choices = f"candidates of {candidates}" if self.parametric else f"actions {', '.join(self.action_names)}"
        if self.items is not None:
            choices = f"{pluralize(len(self.items), 'item')} of {candidates}"
        state = join_names(self._state.names)
        if self.history > 1:
            state = f"{state} of the last {self.history} steps"
        return f"<Bundle {self.workflow}: state features {state}; {choices}; policy {self.policy}>"

    @property
    def parametric(self) -> bool:
        """Whether choices are candidates with features."""
        return not self.action_names

    @property
    def ids_of_log(self) -> tuple[IdFeature, ...]:
        """The features whose values are ids, as a log is read for the model."""
        return tuple({**self.id_features["state"], **self.id_features["action"]}.values())

    @property
    def choices(self) -> ChoiceKind:
        """Kind of the choices."""
        if self.action_names:
            return "named actions"
        return "candidates" if self.items is None else "items"

    @property
    def certain_share(self) -> float:
        """Share of the recorded decisions of golden.json that the policy takes with certainty, see `exploration`."""
        outputs = json.loads(self._files[GOLDEN_FILE])["outputs"]
        return certain_share(_read_recorded(outputs["propensities"]), _read_recorded(outputs["choices"]))

    def with_items(self, items: ItemTable, where: str) -> "Bundle":
        """Returns the model with another item table, such as a newer one.

        Args:
            items: the table.
            where: name of the table in errors.

        Raises:
            BundleError: the table lacks a feature that the model reads.
        """
        raise_any(items.lacking(self.action_feature_ids, where), BundleError)
        return Bundle(self.manifest, self._session, self._files, items)

    def items_of(self, ids: Sequence[object], where: str = "items") -> NDArray[np.float32]:
        """Returns [K, F] features of items, in the order of `action_feature_ids`.

        Raises:
            BundleError: an id that the item table lacks, or a model without items.
        """
        if self.items is None or self._item_values is None:
            expected = "features of each candidate, as the model has no item table"
            raise BundleError(Problem(where, expected, f"the id {ids[0]!r}"))
        rows = self.items.rows(ids)
        unknown = dict.fromkeys(repr(item) for item, row in zip(ids, rows.tolist(), strict=True) if row == UNKNOWN)
        expected = f"ids of the {pluralize(len(self.items), 'item')} in the item table {self.items.sha256[:12]}"
        raise_any([Problem(where, expected, item) for item in unknown], BundleError)
        return self._item_values[rows]

    def states(self, maps: Sequence[Any], *, ignore_unknown: bool = False) -> NDArray[Any]:
        """Returns the features [N, F] in sparse maps {feature id: value}; NaN where a feature is absent or null.

        If states are images, `maps` are their pixels as nested lists or arrays in the shape of the images, and the
        result is [N, bytes] uint8.

        With a `history` above 1 a row is a list of maps, one for each step of its episode so far, the oldest first; of
        more than `history`, the last count. A map in place of a list is the first step of an episode.

        A feature with levels takes strings and gets their codes (`categories.code_of`); other features take numbers,
        true and false. A text that is not a level counts as other. None, NaN and pandas.NA are missing.

        Args:
            maps: a map for each row.
            ignore_unknown: whether to skip keys that are no features of the model.

        Raises:
            BundleError: an unknown feature id, a number in place of a text, or any other value that is not a number.
        """
        if self.history == 1:
            return self.steps(maps, ignore_unknown=ignore_unknown)
        steps: list[NDArray[Any]] = []
        for row, given in enumerate(maps):
            listed = [given] if isinstance(given, Mapping) else list(given)[-self.history :]
            if not listed:
                raise BundleError(Problem(f"states[{row}]", "a map for each step, the present one last", "no step"))
            steps.append(self._state.of_maps(f"states[{row}]", listed, ignore_unknown=ignore_unknown))
        return stack_steps(steps, len(self.step_feature_ids), self.history)

    def steps(self, maps: Sequence[Any], *, ignore_unknown: bool = False) -> NDArray[Any]:
        """Returns the features [N, F] of single steps, in the order of `step_feature_ids`; see `states`."""
        return self._state.of_maps("states", maps, ignore_unknown=ignore_unknown)

    def candidates(
        self,
        lists: Sequence[Sequence[FeatureMap] | Sequence[ItemId]],
        *,
        first: int = 0,
        ignore_unknown: bool = False,
    ) -> list[NDArray[np.float32]]:
        """Returns the features [K_i, F] of each row's candidates, given by sparse maps or by ids of items.

        Args:
            lists: the candidates of each row.
            first: number of the first row in errors.
            ignore_unknown: whether to skip keys that are no features of the model.

        Raises:
            BundleError: as in `states` and `items_of`.
        """
        return [
            self._candidates(f"candidates[{row}]", choices, ignore_unknown=ignore_unknown)
            for row, choices in enumerate(lists, first)
        ]

    def _candidates(self, where: str, choices: Any, *, ignore_unknown: bool) -> NDArray[np.float32]:
        if are_ids(choices):
            return self.items_of(choices, where)
        return self._action.of_maps(where, choices, ignore_unknown=ignore_unknown)

    def others(self, values: NDArray[np.float32], *, candidates: bool = False) -> dict[int, int]:
        """Returns {feature id: number of rows whose value is other} of the one-hot features with such rows.

        A value is other if it has no column of its own in the model: a text that is not a level, or an integer that the
        normalization does not list.

        Args:
            values: [N, F] raw features as returned by `states` or `candidates`; of several steps, the present counts.
            candidates: whether these are features of candidates.
        """
        if candidates:
            return self._action.others(values)
        return self._state.others(values[:, values.shape[1] - len(self.step_feature_ids) :])

    def predict(
        self,
        values: ArrayLike,
        presence: ArrayLike | None = None,
        mask: ArrayLike | None = None,
        candidates: Sequence[ArrayLike | Sequence[ItemId]] | None = None,
    ) -> Prediction:
        """Scores every choice of every row and chooses.

        Args:
            values: [N, F] raw state features in the order of `state_feature_ids`: NaN where missing, codes for strings;
                or a frame of pandas, polars or Arrow with columns of these names. Images: [N, *image_shape] integers
                from 0 to 255.
            presence: [N, F] bool, false where missing; absent: NaN is missing.
            mask: [N, K] bool, allowed choices; absent: all.
            candidates: parametric only. For each row [K_i, F'] raw candidates in the order of `action_feature_ids` with
                NaN where missing, a frame, or a list of ids of items; K is the longest list. Absent: all items, in the
                order of `items.ids`.

        Returns:
            values, propensities and the greedy choice of each row.

        Raises:
            BundleError: a wrong shape or type, or infinity.
        """
        state: NDArray[Any] = self._stacked.of_arrays("values", values)
        num_rows = len(state)
        feed: list[NDArray[Any]]
        if self.image_shape is None:
            feed = self._features("values", state, presence)
        elif presence is not None:
            raise BundleError(Problem("presence", "none: no byte of an image is missing", type(presence).__name__))
        else:
            feed = [state.reshape(num_rows, *self.image_shape)]
        exists = np.ones((num_rows, len(self.action_names)), dtype=np.bool_)
        if self.parametric:
            choices, exists = self._pad(candidates, num_rows)
            feed += self._features("candidates", choices, None)
        elif candidates is not None:
            raise BundleError(Problem("candidates", "none: this model's actions are fixed", type(candidates).__name__))
        allowed = exists if mask is None else exists & _flags("mask", mask, exists.shape)
        if not num_rows:  # not all operators of onnxruntime can work without rows
            scores = np.zeros(exists.shape, np.float32)
            return Prediction(q=scores, greedy=np.zeros(0, np.int64), propensities=scores, mask=allowed)
        q, greedy, propensities, choices = self._session.run(
            ["q", "greedy", "propensities", "choices"], dict(zip(self._inputs, [*feed, allowed], strict=True))
        )
        q = np.where(exists, q, np.float32(np.nan))
        return Prediction(q=q, greedy=greedy, propensities=propensities, mask=choices)

    def predict_rows(
        self,
        states: Sequence[Any],
        candidates: Sequence[Sequence[FeatureMap] | Sequence[ItemId]] | None = None,
        mask: ArrayLike | None = None,
        *,
        ignore_unknown: bool = False,
    ) -> Prediction:
        """Returns the prediction for sparse maps as in a log, the arguments of `states` and `candidates`."""
        choices: Any = candidates
        if self.parametric and candidates is not None:
            choices = self.candidates(candidates, ignore_unknown=ignore_unknown)
        return self.predict(self.states(states, ignore_unknown=ignore_unknown), mask=mask, candidates=choices)

    def act(
        self,
        values: ArrayLike,
        presence: ArrayLike | None = None,
        mask: ArrayLike | None = None,
        candidates: Sequence[ArrayLike | Sequence[ItemId]] | None = None,
        *,
        rng: np.random.Generator | int | None = None,
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Draws an action per row from the propensities; log the returned probability with it.

        A log knows a candidate by its features alone. If candidates of a row are equal, log the sum of their
        propensities.

        Args:
            values: raw state features, as in `predict`.
            presence: false where a feature is missing, as in `predict`.
            mask: allowed choices, as in `predict`.
            candidates: candidates of each row, as in `predict`.
            rng: source of the draws, or its seed; None: a new generator, seeded by the system.

        Returns:
            Actions [N], -1 where no choice is allowed, and the probability [N] of each draw, 0 where no choice is
            allowed.

        Raises:
            BundleError: a wrong shape or type, or infinity.
        """
        return self.predict(values, presence, mask, candidates).draw(rng)

    def check_golden(self) -> float:
        """Repeats the recorded predictions on this machine; returns the largest difference of a q.

        Raises:
            BundleError: q differ by more than the recorded tolerance, other choices are left, or nothing was recorded.
        """
        where = f"{MODEL_FILE} on {GOLDEN_FILE}"
        try:
            golden = json.loads(self._files[GOLDEN_FILE])
            feed = {name: _read_recorded(golden["inputs"][name]) for name in self._inputs}
            if self.image_shape is not None:
                feed[IMAGE] = feed[IMAGE].astype(np.uint8)
            live = {name: _read_recorded(golden["outputs"][name]) for name in ("q", "choices")}
            tolerance = Tolerance(**{name: _read_bound(value) for name, value in golden["tolerance"].items()})
            q, choices = self._session.run(["q", "choices"], feed)
            for name, array in (("q", q), ("choices", choices)):
                if (live[name].shape, live[name].dtype) != (array.shape, array.dtype):
                    raise ValueError(f"{name} of shape {list(live[name].shape)} for {list(array.shape)}")
        except Exception as error:  # onnxruntime's own exceptions share no base but Exception
            expected = "inputs, outputs and tolerance of the model"
            raise BundleError(Problem(GOLDEN_FILE, expected, f"{error!r:.200}", _EXPORT_AGAIN)) from error
        compare_choices(where, live["choices"], choices)
        return tolerance.compare(where, live["q"], q, "Try another release of onnxruntime")

    def _features(self, where: str, values: NDArray[np.float32], presence: ArrayLike | None) -> list[NDArray[Any]]:
        present = ~np.isnan(values) if presence is None else _flags("presence", presence, values.shape)
        infinite = np.isinf(values) & present
        if infinite.any():
            bad = np.argwhere(infinite)
            cell = f"{where}{[int(i) for i in bad[0]]}"
            raise BundleError(Problem(cell, "a finite float32, or NaN where missing", f"{values[tuple(bad[0])]}"))
        return [values, present]

    def _pad(
        self, candidates: Sequence[ArrayLike | Sequence[ItemId]] | None, num_rows: int
    ) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Returns candidates [N, K, F], K the longest list and at least 1, and which of them exist, [N, K]."""
        if candidates is None and self._item_values is not None:
            every = np.repeat(self._item_values[None], num_rows, axis=0)
            return every, np.ones(every.shape[:2], np.bool_)
        if candidates is None or len(candidates) != num_rows:
            expected = f"{pluralize(num_rows, 'list')} of candidates, one per row of values"
            raise BundleError(
                Problem("candidates", expected, "nothing" if candidates is None else f"{len(candidates)}")
            )
        width = len(self.action_feature_ids)
        arrays = [self._read_given(f"candidates[{row}]", options) for row, options in enumerate(candidates)]
        longest = max([1, *(len(array) for array in arrays)])
        values = np.full((num_rows, longest, width), np.nan, dtype=np.float32)
        exists = np.zeros((num_rows, longest), dtype=np.bool_)
        for row, array in enumerate(arrays):
            values[row, : len(array)] = array
            exists[row, : len(array)] = True
        return values, exists

    def _read_given(self, where: str, options: Any) -> NDArray[np.float32]:
        """Returns the candidates [K, F] of a row that are given as ids, as an array or as a frame."""
        if are_ids(options):
            return self.items_of(options, where)
        return self._action.of_arrays(where, options if len(options) else np.empty((0, len(self._action.ids))))


def image_of_log(bundles: Iterable[Bundle]) -> Image | None:
    """Returns the shape of the images that models read in a log; None if they read features.

    Raises:
        BundleError: the models read states of different kinds.
    """
    shapes = list(dict.fromkeys(bundle.image_shape for bundle in bundles))
    if len(shapes) > 1:
        kinds = ["features" if shape is None else f"images {list(shape)}" for shape in shapes]
        todo = "Evaluate them one after the other, each on its log"
        raise BundleError(Problem("models", f"states of one kind, {kinds[0]}", f"{kinds[1]} for another model", todo))
    return Image(shape=shapes[0]) if shapes and shapes[0] is not None else None


def parts(widths: Iterable[int], most: int) -> Iterator[slice]:
    """Yields slices of consecutive rows that have at most `most` values once padded to the widest row of the slice.

    A row with more values than that is a slice by itself.
    """
    start = stop = widest = 0
    for stop, width in enumerate(widths):
        if start < stop and max(widest, width) * (stop + 1 - start) > most:
            yield slice(start, stop)
            start = stop
            widest = 0
        widest = max(widest, width)
    yield slice(start, stop + 1)


def load_bundle(path: str | os.PathLike[str], *, threads: int = 0) -> Bundle:
    """Loads an exported model; every byte of its folder is compared with the manifest first.

    Args:
        path: the folder that contains manifest.json.
        threads: number of threads of one prediction; 0: one per core.

    Returns:
        the model, which predicts and acts.

    Raises:
        BundleError: a file is missing, unlisted or altered, the manifest describes no model, or onnxruntime cannot read
            the model; names all such files.
    """
    import onnxruntime  # not before it is needed, as it starts threads

    folder = Path(path)
    manifest, files = _verify_bundle(folder)
    _require_model(folder, manifest)
    where = str(folder / MODEL_FILE)
    try:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        session = onnxruntime.InferenceSession(files.pop(MODEL_FILE), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's own exceptions share no base but Exception
        advice = "Install the release of onnxruntime that manifest.json names under versions, or a later one"
        raise BundleError(Problem(where, "a model that onnxruntime loads", str(error), advice)) from error
    if missing := _OUTPUTS - {entry.name for entry in session.get_outputs()}:
        expected = f"the outputs {join_names(sorted(_OUTPUTS))}"
        raise BundleError(Problem(where, expected, f"no {join_names(sorted(missing))}", _EXPORT_AGAIN))
    widths = [entry.shape[-1] if entry.shape else None for entry in session.get_inputs()]
    states = stacked_width(len(manifest["state_feature_ids"]), manifest.get("history", 1))
    candidates = len(manifest["action_feature_ids"])
    names = len(manifest["action_names"])
    described = [states, states, names] if names else [states, states, candidates, candidates, *widths[4:]]
    if shape := shape_of_image(json.loads(files[NORMALIZATION_FILE]).get("state", {})):
        described = [shape[-1], names]
    if widths != described:
        expected = f"features and actions of {MODEL_FILE}: {widths}"
        raise BundleError(Problem(str(folder / FILE_NAME), expected, str(described), _EXPORT_AGAIN))
    items = None
    if ITEMS_FILE in files:
        where = str(folder / ITEMS_FILE)
        try:
            items = ItemTable.of_json(files.pop(ITEMS_FILE))
        except (ValueError, TypeError) as error:
            raise BundleError(Problem(where, "an item table", str(error), _EXPORT_AGAIN)) from error
        raise_any(items.lacking(read(manifest["action_feature_ids"]), where), BundleError)
    return Bundle(manifest, session, files, items)


def _require_model(folder: Path, manifest: dict[str, Any]) -> None:
    problems = [
        Problem(f"{folder / FILE_NAME}, {name}", expected, f"{manifest.get(name)!r:.200}", _EXPORT_AGAIN)
        for name, (expected, fits) in _KEYS.items()
        if not fits(manifest.get(name))
    ]
    raise_any(problems, BundleError)
    if (manifest["workflow"] == "dqn") != bool(manifest["action_names"]):
        expected = "dqn with action_names, or parametric_dqn without"
        got = f"{manifest['workflow']!r}"
        raise BundleError(Problem(f"{folder / FILE_NAME}, workflow", expected, got, _EXPORT_AGAIN))


def _are_names(value: Any) -> bool:
    names = isinstance(value, list) and all(isinstance(name, str) and name for name in value)
    return names and len(set(value)) == len(value)


def _is_policy(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    number = {"softmax": "temperature", "epsilon_greedy": "epsilon"}.get(str(value.get("kind")), "")
    if value.keys() != {"kind", number} or type(value[number]) not in (int, float):
        return False
    return bool(value[number] > 0 if number == "temperature" else 0 <= value[number] <= 1)


def _are_ids(value: Any) -> bool:
    try:
        ids = read(value)
    except ValueError:
        return False
    return len(set(ids)) == len(ids)


def _are_steps(value: Any) -> bool:
    return type(value) is int and 2 <= value <= MOST_STEPS


_KEYS: Final[dict[str, tuple[str, Callable[[Any], bool]]]] = {
    "workflow": ("dqn or parametric_dqn", lambda value: value in ("dqn", "parametric_dqn")),
    "state_feature_ids": ("a list of feature ids and names, each once", _are_ids),
    "action_feature_ids": ("a list of feature ids and names, each once", _are_ids),
    "history": (
        f"a number of steps from 2 to {MOST_STEPS}, or absent",
        lambda value: value is None or _are_steps(value),
    ),
    "action_names": ("a list of names, each once", _are_names),
    "policy": ("softmax with a temperature above 0, or epsilon_greedy with an epsilon from 0 to 1", _is_policy),
    "steps": ("a number of optimizer steps", lambda value: type(value) is int),
    "data_hash": ("a hash", lambda value: isinstance(value, str)),
    "config_hash": ("a hash", lambda value: isinstance(value, str)),
}


def _verify_bundle(folder: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Returns manifest and files of a single bundle, even if the folder is replaced while it is read."""
    while True:
        before = _identity(folder)
        try:
            keep = (MODEL_FILE, GOLDEN_FILE, CONFIG_FILE, NORMALIZATION_FILE)
            return verify_folder(folder, BUNDLE, keep, if_present=(ITEMS_FILE,))
        except BundleError:
            if _identity(folder) == before:
                raise


def _identity(folder: Path) -> tuple[int, int, int] | None:
    try:
        status = folder.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns


def _read_bound(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < float("inf"):
        raise ValueError(f"a bound of {value!r}")
    return float(value)


def _read_recorded(lists: Any) -> NDArray[Any]:
    """Returns the array of nested JSON lists: bool as it is, numbers as float32 with null for NaN."""
    array = np.array(lists)
    return array if array.dtype == np.bool_ else np.array(lists, dtype=np.float32)


def _flags(where: str, given: Any, shape: tuple[int | None, ...]) -> NDArray[np.bool_]:
    """Returns an argument as a bool array, checked by `checked_array`."""
    return checked_array(where, given, shape, "b", "an array of bool")
