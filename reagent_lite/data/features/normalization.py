"""Normalization files: read, write, and fit from a matrix of raw features.

file (2019 JSON) ─► read_normalization ─► NormalizationSpec ─► write_normalization ─► file
matrix [N, F] ─► sample_rows ─► statistics, one feature at a time ─► NormalizationSpec
"""

import difflib
import itertools
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import numpy.typing as npt

from reagent_lite.config.norm_params import NormParams
from reagent_lite.data.features.statistics import SMALLEST_STDDEV, UNFITTED, Floats, fit_feature, identify, is_constant
from reagent_lite.data.formats.files import local_path
from reagent_lite.errors import DataError, Problem
from reagent_lite.files import write_whole
from reagent_lite.strict_json import unique_keys
from reagent_lite.types import MISSING_VALUE, FeatureSpec, FeatureType, NormalizationSpec

PARAMETERS = (
    "feature_type",
    "boxcox_lambda",
    "boxcox_shift",
    "mean",
    "stddev",
    "possible_values",
    "quantiles",
    "min_value",
    "max_value",
)
"""Keys of one feature in the order they are written."""

LISTS = ("possible_values", "quantiles")
DEFAULTS = {field.name: field.default for field in fields(FeatureSpec)}

NEEDED: dict[FeatureType, tuple[str, ...]] = {
    FeatureType.CONTINUOUS: ("mean", "stddev"),
    FeatureType.BOXCOX: ("boxcox_lambda", "boxcox_shift", "mean", "stddev"),
    FeatureType.ENUM: ("possible_values",),
    FeatureType.QUANTILE: ("quantiles",),
    FeatureType.CONTINUOUS_ACTION: ("min_value", "max_value"),
}
"""Parameters a type cannot do without."""

MISSING = np.float32(MISSING_VALUE)
"""The preprocessor reads it as missing, so statistics do too."""

MIN_PRESENT_VALUES = 20
MAX_PROBLEMS = 20
SAMPLE_BLOCK_ROWS = 1 << 20


def read_normalization(path: str) -> NormalizationSpec:
    """Reads a normalization file: `{"<feature id>": parameters}`, each a JSON string (2019) or a plain object.

    Args:
        path: local path (`~` is expanded) or URL of an allowed protocol.

    Returns:
        The features in column order.

    Raises:
        DataError: the file is missing, empty or no JSON object, or features are wrong (the first 20 problems).
    """
    return parse_normalization(_document(path), where=path)


def parse_normalization(document: Mapping[str, object], *, where: str) -> NormalizationSpec:
    """Returns the spec of a normalization file's content; `where` names it in errors. See read_normalization."""
    features: dict[int, FeatureSpec] = {}
    problems: list[Problem] = []
    for key, entry in document.items():
        place = f"{where}: feature {key}"
        try:
            feature = _feature(key, entry, place)
        except DataError as error:
            problems.extend(error.problems)
            continue
        if feature.feature_id in features:
            problems.append(Problem(place, "one entry per feature id", f"{feature.feature_id} a second time"))
        features[feature.feature_id] = feature
    raise_any(problems)
    return NormalizationSpec.ordered(features)


def raise_any(problems: Sequence[Problem]) -> None:
    """Raises the first problems, if any, and says how many more there are."""
    if len(problems) > MAX_PROBLEMS:
        more = Problem(problems[0].where, "no further problem", f"{len(problems) - MAX_PROBLEMS} more")
        raise DataError([*problems[:MAX_PROBLEMS], more])
    if problems:
        raise DataError(problems)


def _document(path: str) -> dict[str, object]:
    """Returns the file's JSON object."""
    source = local_path(path)
    try:
        if os.path.exists(source) and not os.path.isfile(source):
            raise OSError("no file, but a folder, a FIFO, a socket or a device")
        with fsspec.open(source, "rb") as stream:
            text = stream.read().decode("utf-8-sig")
    except (OSError, ImportError, UnicodeDecodeError) as error:
        got = f"{type(error).__name__}: {error}"
        todo = "Without a path in the config the parameters are computed from the training data"
        raise DataError(Problem(path, "a readable normalization file", got, todo)) from error
    if not text.strip():
        raise DataError(Problem(path, "a JSON object with at least one feature", "an empty file"))
    document = _parse(text, path)
    if not isinstance(document, dict) or not document:
        got = "an empty object" if document == {} else f"a {type(document).__name__}"
        raise DataError(Problem(path, "a JSON object with at least one feature", got))
    return document


def _parse(text: str, where: str) -> object:
    try:
        document: object = json.loads(text, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise DataError(Problem(where, "JSON", str(error))) from error
    return document


def _feature(key: str, entry: object, where: str) -> FeatureSpec:
    """Returns one entry of the file as a feature, or raises all that is wrong with it."""
    if not re.fullmatch(r"-?[0-9]{1,18}", key):
        raise DataError(Problem(where, "an integer feature id as key", repr(key)))
    parameters = _parse(entry, where) if isinstance(entry, str) else entry
    if not isinstance(parameters, dict):
        got = repr(parameters)[:80]
        raise DataError(Problem(where, "an object of parameters, or a JSON string of one", got))
    given = {name: value for name, value in parameters.items() if value is not None}
    problems = [
        Problem(where, "a known parameter", repr(name), _nearest(name, PARAMETERS))
        for name in given
        if name not in PARAMETERS
    ]
    problems.extend(_wrong_kinds(given, where))
    if problems:
        raise DataError(problems)
    known: dict[str, Any] = {
        name: tuple(map(float, value)) if name in LISTS else float(value)
        for name, value in given.items()
        if name != "feature_type"
    }
    feature = FeatureSpec(feature_id=int(key), feature_type=FeatureType(str(given["feature_type"])), **known)
    raise_any([*_absent(feature, given, where), *_wrong_values(feature, given, where)])
    return feature


def _nearest(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"Did you mean {near[0]}?" if near else f"Known: {', '.join(known)}"


def _wrong_kinds(given: dict[str, Any], where: str) -> Iterator[Problem]:
    """Yields parameters that are not the kind of JSON value they should be."""
    name = given.get("feature_type")
    if name not in list(FeatureType):
        got = "nothing" if name is None else repr(name)[:80]
        yield Problem(f"{where}: feature_type", "a feature type", got, _nearest(str(name).upper(), list(FeatureType)))
    for key in PARAMETERS[1:]:
        value = given.get(key, DEFAULTS[key])
        if key in LISTS and not isinstance(value, list | tuple):
            yield Problem(f"{where}: {key}", "a list of finite numbers", repr(value)[:80])
            continue
        for number in value if key in LISTS else [value]:
            if not _is_finite_number(number):
                yield Problem(f"{where}: {key}", "a finite number", repr(number)[:80])
                break


def _is_finite_number(value: object) -> bool:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer beyond float64
        return False


def _absent(feature: FeatureSpec, given: dict[str, Any], where: str) -> Iterator[Problem]:
    """Yields parameters that the feature's type needs and the file does not give."""
    for key in NEEDED.get(feature.feature_type, ()):
        if given.get(key) in (None, []):
            yield Problem(f"{where}: {key}", f"a value, which {feature.feature_type} needs", "nothing")


def _wrong_values(feature: FeatureSpec, given: dict[str, Any], where: str) -> Iterator[Problem]:
    """Yields parameters that the feature's type cannot work with."""
    match feature.feature_type:
        case FeatureType.CONTINUOUS | FeatureType.BOXCOX if feature.stddev < SMALLEST_STDDEV:
            todo = "A constant feature has stddev 1"
            yield Problem(f"{where}: stddev", "a positive number of float32", repr(feature.stddev), todo)
        case FeatureType.ENUM:
            # The preprocessor compares in float32, where integers above 2^24 begin to coincide.
            with np.errstate(over="ignore"):
                distinct = len(np.unique(np.array(feature.possible_values, np.float32)))
            repeated = len(feature.possible_values) - distinct
            if repeated:
                got = f"{repeated} of them repeated"
                yield Problem(f"{where}: possible_values", "values that differ in float32", got, "List each once")
        case FeatureType.QUANTILE if feature.quantiles:
            rising = all(low < high for low, high in itertools.pairwise(feature.quantiles))
            if len(feature.quantiles) < 2 or not rising:
                got = repr(list(feature.quantiles))[:80]
                todo = "Sort them and list each once; a feature with one value is CONTINUOUS with stddev 1"
                yield Problem(f"{where}: quantiles", "at least 2 strictly increasing numbers", got, todo)
        case FeatureType.CONTINUOUS_ACTION if "min_value" in given and "max_value" in given:
            if not feature.min_value < feature.max_value:
                got = f"{feature.min_value!r}, {feature.max_value!r}"
                yield Problem(f"{where}: min_value, max_value", "min_value below max_value", got)
        case _:
            pass


def normalization_json(spec: NormalizationSpec) -> dict[str, str]:
    """Returns the 2019 file's content: feature id → JSON string of its parameters, null where there is none."""
    return {str(f.feature_id): json.dumps(_written(f), allow_nan=False) for f in spec.features}


def _written(feature: FeatureSpec) -> dict[str, object]:
    written: dict[str, object] = {}
    for key in PARAMETERS:
        value = getattr(feature, key)
        used = key not in ("boxcox_lambda", "boxcox_shift", *LISTS) or key in NEEDED.get(feature.feature_type, ())
        written[key] = value if used or value != DEFAULTS[key] else None
    return written


def write_normalization(path: str, spec: NormalizationSpec) -> None:
    """Writes a normalization file in the encoding of 2019; reading it gives the same spec.

    A local file appears complete or not at all. Folders that do not exist are made.

    Raises:
        DataError: the path cannot be written.
    """
    resolved = local_path(path)
    content = (json.dumps(normalization_json(spec), indent=1) + "\n").encode()
    try:
        if "://" in resolved:
            filesystem, inside = fsspec.core.url_to_fs(resolved)
            filesystem.pipe_file(inside, content)  # an object store shows the object when it is complete
        else:
            write_whole(Path(resolved), content)
    except (OSError, ImportError) as error:
        raise DataError(Problem(path, "a path that can be written", f"{type(error).__name__}: {error}")) from error


def check_covers(spec: NormalizationSpec, ids: Sequence[int], *, where: str) -> None:
    """Checks that the data's features `ids` are all in the normalization file `where`.

    Features of the file that the data lacks are no error: they are missing in every row.

    Raises:
        DataError: naming the data features that have no parameters.
    """
    lacking = sorted(set(ids) - set(spec.feature_ids))
    if lacking:
        shown = ", ".join(map(str, lacking[:MAX_PROBLEMS])) + (", …" if len(lacking) > MAX_PROBLEMS else "")
        got = f"none for {len(lacking)} of {len(set(ids))}: {shown}"
        todo = "Compute the file again from this data, or leave these features out of the data"
        raise DataError(Problem(where, "parameters of every feature in the data", got, todo))


def sample_rows(num_rows: int, num_samples: int, seed: int) -> npt.NDArray[np.int64]:
    """Returns the `num_samples` rows of least hash, increasing; all of them where there are no more.

    Whether a row is taken depends on its number, the seed and `num_rows` only. The hash is SplitMix64 (Steele, Lea and
    Flood 2014), a bijection: no two rows tie. Holds one block of hashes besides the sample.
    """
    if num_rows <= num_samples:
        return np.arange(num_rows, dtype=np.int64)
    offset = np.uint64(seed * 0xD1342543DE82EF95 % 2**64)
    kept, hashes = np.empty(0, np.int64), np.empty(0, np.uint64)
    for start in range(0, num_rows, SAMPLE_BLOCK_ROWS):
        rows = np.arange(start, min(start + SAMPLE_BLOCK_ROWS, num_rows), dtype=np.int64)
        kept, hashes = np.concatenate([kept, rows]), np.concatenate([hashes, mix(rows.astype(np.uint64) + offset)])
        if len(kept) > num_samples:
            least = np.argpartition(hashes, num_samples - 1)[:num_samples]
            kept, hashes = kept[least], hashes[least]
    return np.sort(kept)


def mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Returns SplitMix64 of 64-bit numbers: different numbers have different hashes."""
    z = (z + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def fit_normalization(
    values: npt.NDArray[np.float32], ids: Sequence[int], settings: NormParams, *, seed: int = 0, where: str
) -> tuple[NormalizationSpec, tuple[str, ...]]:
    """Identifies the type of every feature and fits its parameters on a sample of the rows.

    Only the sample (`settings.num_samples` rows) is in memory; statistics are float64, one feature at a time.

    Args:
        values: [N, F] raw features, NaN where absent; may be memory-mapped.
        ids: feature id of each column.
        settings: how to identify; `feature_overrides` fixes types.
        seed: of the sample.
        where: what errors and notes name, such as the data's path.

    Returns:
        The spec in column order, and sentences on what a user should know.

    Raises:
        DataError: an override for a feature that is not in `ids`; a feature with fewer than 20 present values, an
            infinite one, or values its override's type cannot be fitted to.
    """
    check_overrides(settings, ids, where)
    rows = len(values)
    sample = np.asarray(
        values if rows <= settings.num_samples else values[sample_rows(rows, settings.num_samples, seed)]
    )
    features: dict[int, FeatureSpec] = {}
    notes: list[str] = []
    problems: list[Problem] = []
    for column, feature_id in enumerate(ids):
        place = f"{where}: feature {feature_id}"
        try:
            feature, note = _fitted(feature_id, sample[:, column], settings, place)
        except DataError as error:
            problems.extend(error.problems)
            continue
        features[feature_id] = feature
        notes.extend(note)
    raise_any(problems)
    return NormalizationSpec.ordered(features), tuple(notes)


def check_overrides(settings: NormParams, ids: Sequence[int], where: str) -> None:
    """Raises DataError for overrides of features that are not in `ids`, with the nearest that is."""
    known = [str(feature_id) for feature_id in ids]
    raise_any(
        [
            Problem(f"norm_params.feature_overrides.{key}", f"a feature of {where}", key, _nearest(key, known))
            for key in settings.feature_overrides
            if int(key) not in ids
        ]
    )


def _fitted(
    feature_id: int, column: npt.NDArray[np.float32], settings: NormParams, place: str
) -> tuple[FeatureSpec, list[str]]:
    """Returns the parameters of one feature from a column [N] of raw values, and notes on it."""
    values: Floats = column[~np.isnan(column) & (column != MISSING)].astype(np.float64)
    if not np.isfinite(values).all():
        raise DataError(Problem(place, "finite values", "infinity", "Clip it, or leave the value out of the row"))
    override = {int(key): FeatureType(name) for key, name in settings.feature_overrides.items()}.get(feature_id)
    if len(values) < MIN_PRESENT_VALUES and override not in UNFITTED:
        got = f"{len(values)} in {len(column)} sampled rows"
        todo = "Leave the feature out, raise norm_params.num_samples, or override it with DO_NOT_PREPROCESS"
        raise DataError(Problem(place, f"at least {MIN_PRESENT_VALUES} present values", got, todo))
    feature_type = override or identify(values, settings)
    try:
        feature = fit_feature(feature_id, feature_type, values, settings)
    except ValueError as error:
        todo = "Override it with another type in norm_params.feature_overrides"
        raise DataError(Problem(place, f"values that {feature_type} can be fitted to", str(error), todo)) from error
    if not len(values) or not is_constant(values):
        return feature, []
    stddev = " with stddev 1" if feature_type is FeatureType.CONTINUOUS else ""
    return feature, [f"{place}: every value is {values[0]:.9g}; a constant is {feature_type}{stddev}"]
