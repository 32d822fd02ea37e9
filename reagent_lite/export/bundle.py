"""Loading an exported model and deciding with it; needs onnxruntime and numpy only.

folder ─► every byte verified ─► model.onnx in onnxruntime ─► predict: q, greedy, propensities ─► act: a draw

bundle = load_bundle("model")
bundle.predict(bundle.states([{"0": 1.5, "3": 0.2}])).greedy
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from reagent_lite.categories import code_of, is_other
from reagent_lite.errors import BundleError, Problem, counted, listed, raise_any
from reagent_lite.export.tolerance import Tolerance, compare_choices
from reagent_lite.feature_ids import read
from reagent_lite.item_table import ITEMS_FILE, UNKNOWN, ItemTable, are_ids
from reagent_lite.manifest import BUNDLE, FILE_NAME, verified

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

MODEL_FILE: Final = "model.onnx"
GOLDEN_FILE: Final = "golden.json"
CONFIG_FILE: Final = "config.json"
NORMALIZATION_FILE: Final = "normalization.json"
_OUTPUTS: Final = {"q", "greedy", "propensities", "choices"}
_EXPORT_AGAIN: Final = "Export the model again with this release"

FeatureMap = Mapping[str, float | str | None] | Mapping[int, float | str | None]
ItemId = str | int
ChoiceKind = Literal["named actions", "candidates", "items"]
"""What a model chooses among: items are candidates that are named by ids, whose features a table has."""
ColumnNames = dict[str, str | list[str]]
"""{field of the contract: name of the log's column, or the names of one column for each feature}."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Values and decision of N rows with K choices each.

    Attributes:
        q: [N, K] float32 of every choice, allowed or not; NaN where a row has fewer than K candidates.
        greedy: [N] int64, the lowest index of the largest allowed q; -1 where none is allowed.
        propensities: [N, K] float32, probabilities of the bundle's policy, which `act` draws from; zeros where no
            choice is allowed.
        mask: [N, K] bool, the choices that exist, are allowed and, with BCQ, likely enough in the log.
    """

    q: NDArray[np.float32]
    greedy: NDArray[np.int64]
    propensities: NDArray[np.float32]
    mask: NDArray[np.bool_]

    def draw(self, rng: np.random.Generator | int | None = None) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Draws an action per row by inverting the cumulative propensities; see `Bundle.act`."""
        rng = np.random.default_rng(rng)
        cumulative = self.propensities.cumsum(1, dtype=np.float64)
        total = cumulative[:, -1]
        some = total > 0
        # u < 1, but u * total can round up to total
        target = np.minimum(rng.random(len(total)) * total, np.nextafter(total, 0))
        actions: NDArray[np.int64] = np.where(some, (cumulative > target[:, None]).argmax(1), -1)
        drawn = self.propensities[np.arange(len(total)), actions]
        return actions, np.where(some, drawn / np.where(some, total, 1.0), 0.0)


class Bundle:
    """An exported model, verified and ready; `load_bundle` makes it.

    Attributes:
        manifest: the document of manifest.json.
        workflow: "dqn" or "parametric_dqn".
        state_feature_ids: ids of the state's columns.
        action_feature_ids: ids of a candidate's columns; empty where actions are fixed.
        action_names: names of the fixed actions; empty where choices are candidates.
        policy: what propensities are computed for, in the exported graph: {"kind": "softmax", "temperature": ...} or
            {"kind": "epsilon_greedy", "epsilon": ...}, where epsilon 0 is greedy.
        columns: the names that its training log had for columns of the contract, data.columns of its config.
        levels: {"state" or "action": {feature id: its levels}} of the features whose values are texts.
        items: the items that candidates may be named by, or None.
        item_id: name of the ids' column in item tables, data.item_id of its config.
    """

    def __init__(
        self,
        manifest: dict[str, Any],
        session: "InferenceSession",
        golden: bytes,
        columns: ColumnNames | None = None,
        normalization: Mapping[str, Mapping[str, Any]] | None = None,
        items: ItemTable | None = None,
        item_id: str = "",
    ) -> None:
        self.manifest = manifest
        self.workflow: str = manifest["workflow"]
        self.state_feature_ids = read(manifest["state_feature_ids"])
        self.action_feature_ids = read(manifest["action_feature_ids"])
        self.action_names = tuple(manifest["action_names"])
        self.policy: dict[str, Any] = manifest["policy"]
        self.columns = columns or {}
        self.items = items
        self.item_id = item_id
        self._item_values = None if items is None else items.aligned(self.action_feature_ids)
        self._session = session
        self._inputs = [entry.name for entry in session.get_inputs()]
        self._golden = golden
        self._normalization = normalization or {}
        self._sides = [
            _Side.of(ids, self._normalization.get(name, {}))
            for name, ids in (("state", self.state_feature_ids), ("action", self.action_feature_ids))
        ]
        self.levels: dict[str, dict[str, tuple[str, ...]]] = {
            name: side.levels for name, side in zip(("state", "action"), self._sides, strict=True)
        }

    def __repr__(self) -> str:
        states, candidates = (listed(side.columns) for side in self._sides)
        choices = f"candidates of {candidates}" if self.parametric else f"actions {', '.join(self.action_names)}"
        if self.items is not None:
            choices = f"{counted(len(self.items), 'item')} of {candidates}"
        return f"<Bundle {self.workflow}: state features {states}; {choices}; policy {self.policy}>"

    @property
    def parametric(self) -> bool:
        """Whether choices are candidates with features."""
        return not self.action_names

    @property
    def choices(self) -> ChoiceKind:
        """Kind of the choices."""
        if self.action_names:
            return "named actions"
        return "candidates" if self.items is None else "items"

    def with_items(self, items: ItemTable, where: str) -> "Bundle":
        """Returns the model with another item table, such as a newer one.

        Args:
            items: the table.
            where: names it in errors.

        Raises:
            BundleError: the model reads a feature that the table lacks.
        """
        raise_any(items.lacking(self.action_feature_ids, where), BundleError)
        return Bundle(
            self.manifest, self._session, self._golden, self.columns, self._normalization, items, self.item_id
        )

    def items_of(self, ids: Sequence[object], where: str = "items") -> NDArray[np.float32]:
        """Returns [K, F] features of items in the order of `action_feature_ids`.

        Raises:
            BundleError: an id that the item table lacks, or a model without items.
        """
        if self.items is None or self._item_values is None:
            expected = "features of each candidate, as the model has no item table"
            raise BundleError(Problem(where, expected, f"the id {ids[0]!r}"))
        rows = self.items.rows(ids)
        unknown = dict.fromkeys(repr(item) for item, row in zip(ids, rows.tolist(), strict=True) if row == UNKNOWN)
        expected = f"ids of the {counted(len(self.items), 'item')} in the item table {self.items.sha256[:12]}"
        raise_any([Problem(where, expected, item) for item in unknown], BundleError)
        return self._item_values[rows]

    def states(self, maps: Sequence[FeatureMap]) -> NDArray[np.float32]:
        """Returns [N, F] of sparse maps {feature id: value}, NaN where absent or null.

        A feature with levels takes texts, which become their codes (`categories.code_of`); others take numbers. A text
        that is no level is other.

        Raises:
            BundleError: for an unknown feature id, a number in place of a text, and any other value that is no number.
        """
        return _from_maps("states", maps, self._sides[0])

    def candidates(self, lists: Sequence[Sequence[FeatureMap] | Sequence[ItemId]]) -> list[NDArray[np.float32]]:
        """Returns one [K_i, F] per row of its candidates' sparse maps or ids; errors as of `states` and `items_of`."""
        return [self._candidates(f"candidates[{row}]", choices) for row, choices in enumerate(lists)]

    def _candidates(self, where: str, choices: Any) -> NDArray[np.float32]:
        return self.items_of(choices, where) if are_ids(choices) else _from_maps(where, choices, self._sides[1])

    def others(self, values: NDArray[np.float32], *, candidates: bool = False) -> dict[int, int]:
        """Returns {feature id: rows whose value is other} of the one-hot features, those that have such rows.

        A value is other if it has no column of its own in the model: a text that is no level, or an integer that the
        normalization does not have.

        Args:
            values: [N, F] raw features, as of `states` or `candidates`.
            candidates: whether they are of candidates.
        """
        side = self._sides[candidates]
        ids = self.action_feature_ids if candidates else self.state_feature_ids
        counts = {ids[at]: int(is_other(values[:, at], possible).sum()) for at, possible in side.possible.items()}
        return {feature: count for feature, count in counts.items() if count}

    def predict(
        self,
        values: ArrayLike,
        presence: ArrayLike | None = None,
        mask: ArrayLike | None = None,
        candidates: Sequence[ArrayLike | Sequence[ItemId]] | None = None,
    ) -> Prediction:
        """Scores every choice of every row and chooses.

        Args:
            values: [N, F] raw state features in the order of `state_feature_ids`, NaN where missing, codes for texts;
                or a frame of pandas, polars or Arrow, of which the columns of these names are read.
            presence: [N, F] bool, false where missing; absent: where values are not NaN.
            mask: [N, K] bool, allowed choices; absent: all.
            candidates: parametric only, of each row [K_i, F'] raw candidates in the order of `action_feature_ids`, NaN
                where missing, or a frame, or a list of ids of items; K is the longest list. Absent, of a model with
                items: all of them, in the order of `items.ids`.

        Raises:
            BundleError: for wrong shapes or types and for infinity.
        """
        state = _dense("values", values, self._sides[0])
        num_rows = len(state)
        feed: list[NDArray[Any]] = self._features("values", state, presence)
        exists = np.ones((num_rows, len(self.action_names)), dtype=np.bool_)
        if self.parametric:
            choices, exists = self._padded(candidates, num_rows)
            feed += self._features("candidates", choices, None)
        elif candidates is not None:
            raise BundleError(Problem("candidates", "none: this model's actions are fixed", type(candidates).__name__))
        allowed = exists if mask is None else exists & _flags("mask", mask, exists.shape)
        q, greedy, propensities, choices = self._session.run(
            ["q", "greedy", "propensities", "choices"], dict(zip(self._inputs, [*feed, allowed], strict=True))
        )
        q = np.where(exists, q, np.float32(np.nan))
        return Prediction(q=q, greedy=greedy, propensities=propensities, mask=choices)

    def predict_rows(
        self,
        states: Sequence[FeatureMap],
        candidates: Sequence[Sequence[FeatureMap] | Sequence[ItemId]] | None = None,
        mask: ArrayLike | None = None,
    ) -> Prediction:
        """Returns `predict` of sparse maps as in the log; see `states`, `candidates` and `predict`."""
        choices: Any = candidates
        if self.parametric and candidates is not None:
            choices = self.candidates(candidates)
        return self.predict(self.states(states), mask=mask, candidates=choices)

    def act(
        self,
        values: ArrayLike,
        presence: ArrayLike | None = None,
        mask: ArrayLike | None = None,
        candidates: Sequence[ArrayLike | Sequence[ItemId]] | None = None,
        *,
        rng: np.random.Generator | int | None = None,
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Draws an action per row from the propensities; log its propensity with it.

        A log knows a candidate by its features: where some of a row are equal, log the sum of their propensities.

        Args:
            values: and presence, mask, candidates: as of `predict`.
            presence: see values.
            mask: see values.
            candidates: see values.
            rng: source of the draws, or a seed of one; None: a new one, seeded by the system.

        Returns:
            Action [N], -1 where none is allowed, and the probability [N] it was drawn with, 0 where none is allowed.

        Raises:
            BundleError: as `predict`.
        """
        return self.predict(values, presence, mask, candidates).draw(rng)

    def check_golden(self) -> float:
        """Repeats the recorded predictions on this machine; returns the largest difference of a q.

        Raises:
            BundleError: when q differ by more than the tolerance recorded with them, or other choices are left; when
            nothing was recorded.
        """
        where = f"{MODEL_FILE} on {GOLDEN_FILE}"
        try:
            golden = json.loads(self._golden)
            feed = {name: _recorded(golden["inputs"][name]) for name in self._inputs}
            live = {name: _recorded(golden["outputs"][name]) for name in ("q", "choices")}
            tolerance = Tolerance(**{name: _bound(value) for name, value in golden["tolerance"].items()})
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

    def _padded(
        self, candidates: Sequence[ArrayLike | Sequence[ItemId]] | None, num_rows: int
    ) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Returns candidates [N, K, F], K the longest list and at least 1, and where they exist, [N, K]."""
        if candidates is None and self._item_values is not None:
            every = np.repeat(self._item_values[None], num_rows, axis=0)
            return every, np.ones(every.shape[:2], np.bool_)
        if candidates is None or len(candidates) != num_rows:
            expected = f"{counted(num_rows, 'list')} of candidates, one per row of values"
            raise BundleError(
                Problem("candidates", expected, "nothing" if candidates is None else f"{len(candidates)}")
            )
        width = len(self.action_feature_ids)
        arrays = [self._options(f"candidates[{row}]", options) for row, options in enumerate(candidates)]
        longest = max([1, *(len(array) for array in arrays)])
        values = np.full((num_rows, longest, width), np.nan, dtype=np.float32)
        exists = np.zeros((num_rows, longest), dtype=np.bool_)
        for row, array in enumerate(arrays):
            values[row, : len(array)] = array
            exists[row, : len(array)] = True
        return values, exists

    def _options(self, where: str, given: Any) -> NDArray[np.float32]:
        """Returns the candidates [K, F] of a row, given as ids, an array or a frame."""
        if are_ids(given):
            return self.items_of(given, where)
        return _dense(where, given if len(given) else np.empty((0, len(self.action_feature_ids))), self._sides[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Side:
    """The features of states, or of candidates.

    Attributes:
        columns: {feature id as text: column}.
        levels: {feature id as text: levels} of those whose values are texts.
        possible: {column: possible values} of the one-hot ones.
    """

    columns: dict[str, int]
    levels: dict[str, tuple[str, ...]]
    possible: dict[int, NDArray[np.float32]]

    @classmethod
    def of(cls, ids: Sequence[int], normalization: Mapping[str, Any]) -> "_Side":
        """Returns the features of these ids, with what normalization.json has of them."""
        columns = {str(feature): column for column, feature in enumerate(ids)}
        levels = {}
        possible = {}
        for name, column in columns.items():
            text = normalization.get(name, "{}")
            parameters = json.loads(text) if isinstance(text, str) else text
            if parameters.get("feature_type") == "ENUM":
                possible[column] = np.array(parameters.get("possible_values") or (), np.float32)
                if parameters.get("levels"):
                    levels[name] = tuple(parameters["levels"])
        return cls(columns=columns, levels=levels, possible=possible)


def parts(widths: Iterable[int], most: int) -> Iterator[slice]:
    """Yields slices of consecutive rows that together, each as wide as the widest of them, have at most `most` values.

    A row that is wider than that is a part of its own.
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
    """Loads the exported model of a folder after comparing every byte of it with its manifest.

    Args:
        path: the folder that holds manifest.json.
        threads: how many compute one prediction; 0: as many as onnxruntime takes, one for each core.

    Raises:
        BundleError: naming every file that is missing, unlisted or altered; a manifest that describes no model; or when
            onnxruntime cannot read the model.
    """
    import onnxruntime  # it starts threads

    folder = Path(path)
    manifest, files = _verified(folder)
    _require_model(folder, manifest)
    try:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        session = onnxruntime.InferenceSession(files[MODEL_FILE], options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's own exceptions share no base but Exception
        advice = "Install the release of onnxruntime that manifest.json names under versions, or a later one"
        where = str(folder / MODEL_FILE)
        raise BundleError(Problem(where, "a model that onnxruntime loads", str(error), advice)) from error
    widths = [entry.shape[-1] if entry.shape else None for entry in session.get_inputs()]
    if missing := _OUTPUTS - {entry.name for entry in session.get_outputs()}:
        expected_outputs = f"the outputs {listed(sorted(_OUTPUTS))}"
        got = f"no {listed(sorted(missing))}"
        raise BundleError(Problem(str(folder / MODEL_FILE), expected_outputs, got, _EXPORT_AGAIN))
    states = len(manifest["state_feature_ids"])
    candidates = len(manifest["action_feature_ids"])
    names = len(manifest["action_names"])
    expected = [states, states, names] if names else [states, states, candidates, candidates, *widths[4:]]
    if widths != expected:
        wanted = f"features and actions of {MODEL_FILE}: {widths}"
        raise BundleError(Problem(str(folder / FILE_NAME), wanted, str(expected), _EXPORT_AGAIN))
    data = json.loads(files[CONFIG_FILE]).get("data", {})
    items = None
    if ITEMS_FILE in files:
        where = str(folder / ITEMS_FILE)
        try:
            items = ItemTable.of_json(files[ITEMS_FILE])
        except (ValueError, TypeError) as error:
            raise BundleError(Problem(where, "an item table", str(error), _EXPORT_AGAIN)) from error
        raise_any(items.lacking(read(manifest["action_feature_ids"]), where), BundleError)
    normalization = json.loads(files[NORMALIZATION_FILE])
    item_id = data.get("item_id", "")
    return Bundle(manifest, session, files[GOLDEN_FILE], data.get("columns"), normalization, items, item_id)


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


_KEYS: Final[dict[str, tuple[str, Callable[[Any], bool]]]] = {
    "workflow": ("dqn or parametric_dqn", lambda value: value in ("dqn", "parametric_dqn")),
    "state_feature_ids": ("a list of feature ids and names, each once", _are_ids),
    "action_feature_ids": ("a list of feature ids and names, each once", _are_ids),
    "action_names": ("a list of names, each once", _are_names),
    "policy": ("softmax with a temperature above 0, or epsilon_greedy with an epsilon from 0 to 1", _is_policy),
    "steps": ("a number of optimizer steps", lambda value: type(value) is int),
    "data_hash": ("a hash", lambda value: isinstance(value, str)),
    "config_hash": ("a hash", lambda value: isinstance(value, str)),
}


def _verified(folder: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Returns manifest and files of one bundle, even if the folder is replaced by another one meanwhile."""
    while True:
        before = _identity(folder)
        try:
            keep = (MODEL_FILE, GOLDEN_FILE, CONFIG_FILE, NORMALIZATION_FILE)
            return verified(folder, BUNDLE, keep, if_present=(ITEMS_FILE,))
        except BundleError:
            if _identity(folder) == before:
                raise


def _identity(folder: Path) -> tuple[int, int, int] | None:
    try:
        status = folder.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns


def _bound(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < float("inf"):
        raise ValueError(f"a bound of {value!r}")
    return float(value)


def _recorded(lists: Any) -> NDArray[Any]:
    """Returns the array of nested JSON lists: bool as it is, numbers as float32 with null for NaN."""
    array = np.array(lists)
    return array if array.dtype == np.bool_ else np.array(lists, dtype=np.float32)


def _dense(where: str, given: Any, side: _Side) -> NDArray[np.float32]:
    """Returns [N, F] float32 of an array, or of a frame's columns by name, NaN for missing; errors as of `_array`."""
    columns = side.columns
    names = getattr(given, "column_names", getattr(given, "columns", None))  # of Arrow; of pandas and polars
    if names is not None and columns:
        by_text = {str(name): name for name in names}
        if lacking := [name for name in columns if name not in by_text]:
            advice = "A feature that no row has is a column of NaN"
            raise BundleError(Problem(where, f"the columns {listed(columns)}", f"no {listed(lacking)}", advice))
        given = np.stack(
            [
                (_texts if name in side.levels else _column)(f"{where}, column {name}", given[by_text[name]])
                for name in columns
            ],
            axis=1,
        )
    with np.errstate(over="ignore"):
        shape = (None, len(columns))
        expected = "real numbers, NaN where missing"
        if side.levels:
            expected += f", with {listed(side.levels)} as codes: `states`, `candidates` and frames take the texts"
        return _array(where, given, shape, "fiu", expected).astype(np.float32)


def _column(where: str, given: Any) -> NDArray[np.float64]:
    values = np.asarray(given)
    if values.dtype == np.object_:  # as None makes it
        values = np.array([np.nan if value is None else value for value in values.flat])
    return _array(where, values, (None,), "bfiu", "real numbers, NaN or None where missing").astype(np.float64)


def _texts(where: str, given: Any) -> NDArray[np.float64]:
    """Returns the codes of a column of texts, NaN where there is none."""
    values = np.asarray(given).tolist()
    codes = np.full(len(values), np.nan)
    for row, value in enumerate(values):
        if isinstance(value, str):
            codes[row] = code_of(value)
        elif value is not None and value == value:
            raise BundleError(Problem(where, "texts, NaN or None where missing", repr(value)))
    return codes


def _flags(where: str, given: Any, shape: tuple[int | None, ...]) -> NDArray[np.bool_]:
    """Returns a bool array; arguments and errors as of `_array`."""
    return _array(where, given, shape, "b", "an array of bool")


def _array(where: str, given: Any, shape: tuple[int | None, ...], kinds: str, expected: str) -> NDArray[Any]:
    """Returns the array of an argument.

    Args:
        where: name of the argument, for the message.
        given: anything numpy makes an array of.
        shape: expected sizes, None where any is right.
        kinds: the accepted kinds of dtypes, as numpy's letters.
        expected: the same in words.

    Raises:
        BundleError: for another shape or type.
    """
    try:
        array = np.asarray(given)
    except ValueError as error:
        raise BundleError(Problem(where, "rows of equal length", str(error))) from error
    if array.dtype.kind not in kinds:
        raise BundleError(Problem(where, expected, f"an array of {array.dtype}"))
    if array.ndim != len(shape) or any(s not in (None, n) for s, n in zip(shape, array.shape, strict=True)):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise BundleError(Problem(where, f"shape [{wanted}]", f"{list(array.shape)}"))
    return array


def _from_maps(where: str, maps: Sequence[FeatureMap], side: _Side) -> NDArray[np.float32]:
    """Returns [N, F] of N sparse maps {feature id: value} with columns by id; absent and null are NaN.

    Raises:
        BundleError: for an id the model does not read, a value of a feature with levels that is no text, and one of
            another feature that is no finite number; up to 20 at once.
    """
    columns = side.columns
    if isinstance(maps, Mapping):
        raise BundleError(Problem(where, "a list of maps {feature id: number}", "one map"))
    dense = np.full((len(maps), len(columns)), np.nan)
    problems: list[Problem] = []
    for row, sparse in enumerate(maps):
        if not isinstance(sparse, Mapping):
            problems.append(Problem(f"{where}[{row}]", "a map {feature id: number}", repr(sparse)))
            continue
        for key, value in sparse.items():
            column = columns.get(str(key))
            if column is None:
                advice = "A model cannot use a feature it was not trained on: leave it out, or train with it"
                problems.append(Problem(f"{where}[{row}]", f"feature ids among {listed(columns)}", repr(key), advice))
            elif str(key) in side.levels:
                if isinstance(value, str):
                    dense[row, column] = code_of(value)
                elif value is not None:
                    cell = f"{where}[{row}], feature {key}"
                    problems.append(Problem(cell, "a text or null, as it is a category", repr(value)))
            elif isinstance(value, bool) or not isinstance(value, (int, float, np.number, NoneType)):
                problems.append(Problem(f"{where}[{row}], feature {key}", "a number or null", repr(value)))
            elif value is not None:
                dense[row, column] = value
    with np.errstate(over="ignore"):
        values = dense.astype(np.float32)
    names = list(columns)
    for row, column in zip(*np.nonzero(np.isinf(values)), strict=True):
        cell = f"{where}[{row}], feature {names[column]}"
        problems.append(Problem(cell, "a finite float32, or null", f"{dense[row, column]:g}"))
    raise_any(problems, BundleError)
    return values
