"""Normalization files in the encoding of ReAgent 2019: read, checked and written.

file ─► read_normalization ─► NormalizationSpec ─► write_normalization ─► file
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from reagent_lite.categories import MOST_CHARACTERS, code_of
from reagent_lite.config.embedding_config import LARGEST_TABLE
from reagent_lite.config.image_config import ImageConfig
from reagent_lite.config.loader import check
from reagent_lite.config.section import Section
from reagent_lite.data.features.feature_types import FEATURE_TYPES
from reagent_lite.data.formats.input_files import local_path, read_bytes
from reagent_lite.disk_room import disk_errors, room_in
from reagent_lite.errors import ConfigError, DataError, Problem, join_names, pluralize, raise_any, suggest_nearest
from reagent_lite.feature_ids import id_of
from reagent_lite.strict_json import unique_keys
from reagent_lite.types import FIRST_ROW, Embedding, FeatureSpec, FeatureType, NormalizationSpec
from reagent_lite.whole_files import write_whole


class _Table(Section):
    """The table and form of an EMBEDDING."""

    table: str = ""
    rows: Annotated[int, Field(ge=FIRST_ROW + 1, le=LARGEST_TABLE)] = FIRST_ROW + 1
    dim: Annotated[int, Field(ge=1, le=1024)] = 1
    length: Annotated[int, Field(ge=1, le=1000)] = 1
    pooling: Literal["mean", "sum"] = "mean"
    scores: bool = False

    required: ClassVar = {"table": ("the name of the table",)}


class _Parameters(Section):
    """Parameters of one feature of a file, in the order in which keys are written; the type comes before them."""

    boxcox_lambda: float = 1.0
    boxcox_shift: float = 0.0
    mean: float = 0.0
    stddev: float = 1.0
    possible_values: tuple[float, ...] = ()
    levels: tuple[str, ...] = ()
    quantiles: tuple[float, ...] = ()
    min_value: float = 0.0
    max_value: float = 1.0
    embedding: _Table | None = None
    image: ImageConfig | None = None


def read_normalization(path: str) -> NormalizationSpec:
    """Reads a normalization file: `{"<feature id>": parameters}`, each a JSON string (ReAgent 2019) or a plain object.

    Args:
        path: local path (`~` is expanded) or URL of an allowed protocol.

    Returns:
        The features in column order.

    Raises:
        DataError: the file is missing, empty or not a JSON object, or features are wrong (the first 20 problems).
    """
    return parse_normalization(_document(path), where=path)


def parse_normalization(document: Mapping[str, object], *, where: str) -> NormalizationSpec:
    """Returns the spec of a normalization file's content; `where` names it in errors. See read_normalization."""
    features: dict[int, FeatureSpec] = {}
    problems: list[Problem] = []
    for key, entry in document.items():
        where_feature = f"{where}: feature {key}"
        try:
            feature = _feature(key, entry, where_feature)
        except DataError as error:
            problems.extend(error.problems)
            continue
        if feature.feature_id in features:
            problems.append(Problem(where_feature, "one entry per feature id", f"{feature.feature_id} a second time"))
        features[feature.feature_id] = feature
    raise_any(problems)
    return NormalizationSpec.from_features(features)


def _document(path: str) -> dict[str, object]:
    try:
        text = read_bytes(local_path(path)).decode("utf-8-sig")
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
    """Returns one entry of the file as a feature; raises DataError with all problems of the entry."""
    try:
        identity = id_of(key)
    except ValueError as error:
        raise DataError(Problem(where, f"{error} as key", repr(key))) from None
    given = _parse(entry, where) if isinstance(entry, str) else entry
    if not isinstance(given, dict):
        raise DataError(Problem(where, "an object of parameters, or a JSON string of one", repr(given)[:80]))
    given = {name: value for name, value in given.items() if value is not None}
    name = given.pop("feature_type", None)
    problems = []
    if name not in list(FeatureType):
        got = "nothing" if name is None else repr(name)[:80]
        todo = suggest_nearest(
            str(name).upper(), list(FeatureType), "Did you mean {}?", f"Known: {', '.join(FeatureType)}"
        )
        problems.append(Problem(f"{where}: feature_type", "a feature type", got, todo))
    try:
        parameters = check(_Parameters, given)
    except ConfigError as error:
        problems += [replace(problem, where=f"{where}: {problem.where}") for problem in error.problems]
    if problems:
        raise DataError(problems)
    if parameters.levels:
        raise_any(list(_level_faults(name, parameters, where)))
        given["possible_values"] = tuple(code_of(level) for level in parameters.levels)
        parameters = parameters.model_copy(update={"possible_values": given["possible_values"]})
    if (parameters.embedding is not None) != (name == FeatureType.EMBEDDING):
        got = "nothing" if parameters.embedding is None else f"one of {name}"
        raise DataError(Problem(f"{where}: embedding", f"a table of {FeatureType.EMBEDDING}", got))
    table = None if parameters.embedding is None else Embedding(**parameters.embedding.model_dump())
    if (parameters.image is not None) != (name == FeatureType.IMAGE):
        got = "nothing" if parameters.image is None else f"one of {name}"
        raise DataError(Problem(f"{where}: image", f"the shape of an {FeatureType.IMAGE}", got))
    image = None if parameters.image is None else parameters.image.image
    numbers = {**parameters.model_dump(exclude={"embedding", "image"}), "embedding": table, "image": image}
    feature = FeatureSpec(feature_id=identity, feature_type=FeatureType(name), **numbers)
    rule = FEATURE_TYPES[feature.feature_type]
    expected = f"a value, which {feature.feature_type} needs"
    faults = [(key, expected, "nothing", "") for key in rule.needs if given.get(key) in (None, [])]
    if not faults and (fault := rule.fault(feature)):
        faults = [fault]
    raise_any([Problem(f"{where}: {keys}", *words) for keys, *words in faults])
    return feature


def _level_faults(name: object, parameters: _Parameters, where: str) -> Iterator[Problem]:
    """Yields the problems of a category's levels."""
    codes = tuple(code_of(level) for level in parameters.levels)
    if name != FeatureType.ENUM:
        yield Problem(f"{where}: levels", f"levels of {FeatureType.ENUM} alone", f"levels of {name}")
    if long := next((level for level in parameters.levels if len(level) > MOST_CHARACTERS), None):
        yield Problem(f"{where}: levels", f"strings of at most {MOST_CHARACTERS} characters", f"{len(long)} characters")
    if len(set(codes)) < len(codes):
        repeated = next(level for level, code in zip(parameters.levels, codes, strict=True) if codes.count(code) > 1)
        yield Problem(f"{where}: levels", "strings of different codes", f"{repeated!r} and another of its code")
    if parameters.possible_values and parameters.possible_values != codes:
        todo = "Leave possible_values out: they follow from levels"
        yield Problem(f"{where}: possible_values", "the codes of levels, in their order", "others", todo)


def normalization_json(spec: NormalizationSpec) -> dict[str, str]:
    """Returns the content of the file: feature id → JSON string of its parameters, null where there is none."""
    return {str(feature.feature_id): json.dumps(_encode_feature(feature), allow_nan=False) for feature in spec.features}


def _encode_feature(feature: FeatureSpec) -> dict[str, object]:
    written: dict[str, object] = {"feature_type": feature.feature_type}
    for key, default in _Parameters().model_dump().items():
        value = getattr(feature, key)
        if key in ("levels", "embedding", "image") and not value:  # a file of numbers stays as it was in ReAgent 2019
            continue
        if key == "image":
            value = ImageConfig.of(value).model_dump(exclude_none=True)
        if key == "embedding":
            value = asdict(value)
        used = key in (*FEATURE_TYPES[feature.feature_type].needs, "mean", "stddev", "min_value", "max_value")
        written[key] = value if used or value != default else None
    return written


def write_normalization(file: Path, spec: NormalizationSpec, key: str = "norm_params.output_dir") -> None:
    """Writes a normalization file in the encoding of ReAgent 2019, whole or not at all; reading it gives the same spec.

    Args:
        file: the file.
        spec: the normalization.
        key: the config key that names the file's folder.

    Raises:
        ConfigError: the disk is full.
        DataError: the file cannot be written.
    """
    with disk_errors(str(file), "a path that can be written"), room_in(file.parent, key):
        write_whole(file, (json.dumps(normalization_json(spec), indent=1) + "\n").encode())


def check_covers(spec: NormalizationSpec, ids: Sequence[int], *, where: str) -> None:
    """Checks that the features `ids` are all in the normalization `where`, as an environment's have to be.

    Raises:
        DataError: features have no parameters; names them.
    """
    lacking = sorted(set(ids) - set(spec.feature_ids))
    if lacking:
        got = f"none for {len(lacking)} of {len(set(ids))}: {join_names(lacking)}"
        todo = "Compute the file again from this data"
        raise DataError(Problem(where, "parameters of every feature in the data", got, todo))


def left_out_features(spec: NormalizationSpec, ids: Sequence[int], *, where: str, fewest: int | None = None) -> str:
    """Returns a sentence on a log's features `ids` that the normalization `where` leaves out; "" if there are none.

    Features that only the normalization has are missing in every row. If it was fitted to the log, `fewest` is the
    number of values that features need.

    Raises:
        DataError: it leaves out all of them.
    """
    lacking = sorted(set(ids) - set(spec.feature_ids))
    if len(lacking) == len(set(ids)):
        check_covers(spec, ids, where=where)
    total = pluralize(len(set(ids)), "feature")
    if not lacking:
        return ""
    if fewest is None:
        return f"{where}: no parameters for {len(lacking)} of {total}, left out: {join_names(lacking)}"
    reason = f"fewer than {fewest} values (norm_params.min_present_values)"
    return f"{where}: {len(lacking)} of {total} left out, which have {reason}: {join_names(lacking)}"
