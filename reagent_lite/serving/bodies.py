"""Bodies of requests and answers; `with_model_schema` adds the model's features and actions to the OpenAPI."""

import copy
from collections.abc import Container, Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError
from typing_extensions import TypeAliasType

from reagent_lite.categories import MOST_CHARACTERS
from reagent_lite.config.column_names import names_of
from reagent_lite.errors import BundleError, Problem
from reagent_lite.export import Bundle
from reagent_lite.export.bundle import ColumnNames
from reagent_lite.feature_values import value_of
from reagent_lite.id_values import IdFeature
from reagent_lite.item_table import id_text, whole_id
from reagent_lite.raw_values import read_map
from reagent_lite.serving.refusals import RefusedError

_LARGEST = 3.4e38  # of float32
HAS_IDS = "has_ids"
"""Key of the context of a body's validation: whether the model has features of ids."""
MOST_NAMED = 200
"""Largest item table whose ids are listed in the OpenAPI and counted one by one."""
_ROW_KEYS = ("state_features", "possible_actions", "mdp_id", "sequence_number")
_OF_LIST = (int, float, bool, type(None))
_ORDER = 2**53  # largest sequence number; JSON parsers may read larger integers as floats


def _value(value: Any, info: ValidationInfo) -> Any:
    """Returns `feature_values.value_of`; the bundle checks whether a feature takes numbers or texts.

    Lists are those of features of ids, which `read_body` has made.
    """
    if isinstance(value, list) and info.context and info.context.get(HAS_IDS):
        return value
    try:
        return value_of(value)
    except ValueError as error:
        raise PydanticCustomError("value", str(error)) from None


Number = Annotated[float, Field(ge=-_LARGEST, le=_LARGEST)]
Value = Annotated[Number | None, PlainValidator(_value, json_schema_input_type=Number | None)]
"""A number, true or false, the text of a category, or null."""
Name = Annotated[str, Field(min_length=1, max_length=200)]


def _require_feature(features: dict[str, float | None]) -> dict[str, float | None]:
    """Refuses features without any value, as training does."""
    if all(value is None for value in features.values()):
        raise PydanticCustomError("no_features", "at least one feature that is not null")
    return features


StateFeatures = TypeAliasType("StateFeatures", Annotated[dict[str, Value], AfterValidator(_require_feature)])
CandidateFeatures = TypeAliasType("CandidateFeatures", dict[str, Value])
ActionName = TypeAliasType("ActionName", str)


def _whole(value: Any) -> Any:
    """Returns 3 for 3.0, which is an integer in JSON Schema."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _id(value: Any) -> Any:
    """Returns an id, which may be an integer, as text."""
    text = id_text(_whole(value))
    return value if text is None else text


def _episode(value: Any) -> Any:
    """Returns the id of an episode as training reads it."""
    text = id_text(_whole(value))
    return value if text is None else whole_id(text)


_EPISODE = {"anyOf": [{"type": ["string", "integer"], "minLength": 1, "maxLength": 200}, {"type": "null"}]}
ItemName = TypeAliasType(
    "ItemName", Annotated[str, BeforeValidator(_id), WithJsonSchema({"type": ["string", "integer"]})]
)


class Body(BaseModel):
    """A JSON object with known keys, strict types and finite numbers."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)


def _or_image(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """Returns the bytes of an image, which JSON does not have and `read_body` has made, as they are."""
    return value if isinstance(value, bytes) else validate(value)


class _StateRow(Body):
    state_features: Annotated[StateFeatures, WrapValidator(_or_image)]
    """Raw features by id or name, as in the model's training log; absent or null is missing. Categories are texts,
    and true and false are 1 and 0;
    strings that the model does not know count as other. A list of numbers has features 0, 1, ... If states are images:
    pixels, integers from 0 to 255, as lists in the shape of the image.

    At least one feature has a value: nothing can be learned from an empty state.
    """


class _EpisodeRow(_StateRow):
    mdp_id: Annotated[Name | None, BeforeValidator(_episode), WithJsonSchema(_EPISODE)] = None
    """The episode, a string or an integer; 7, "7" and "7.0" are one, as in training, and "007" is another one. Absent:
    the decision is an episode of its own and ends it."""
    sequence_number: Annotated[int, Field(ge=-_ORDER, le=_ORDER), BeforeValidator(_whole)] | None = None
    """Position of the decision in its episode; gaps are allowed. Absent: microseconds since 1970."""


class NamedRow(_EpisodeRow):
    """One decision among the model's actions."""

    possible_actions: (
        Annotated[list[ActionName], Field(min_length=1, json_schema_extra={"uniqueItems": True})] | None
    ) = None
    """Allowed actions, by name or as 0 or 1 for each of the model's; absent: all."""


class CandidateList(_StateRow):
    """Candidates to rank."""

    possible_actions: Annotated[list[CandidateFeatures], Field(min_length=1)]
    """Features of each candidate; the first of several equal candidates stands for all of them."""


class CandidateRow(_EpisodeRow, CandidateList):
    """One decision among candidates."""


class ItemList(_StateRow):
    """Items to rank."""

    possible_actions: Annotated[list[ItemName], Field(min_length=1)] | None = None
    """Ids of items; absent: all items of the table, in its order. The first of several items with equal features stands
    for all of them."""


class ItemRow(_EpisodeRow, ItemList):
    """Request body: one decision among catalog items."""


class _Rows(Body):
    ignore_unknown: bool = False
    """Whether keys that the model does not know are left out, in rows, states and candidates, instead of refused."""


class NamedRows(_Rows):
    """Decisions to make."""

    rows: Annotated[list[NamedRow], Field(min_length=1)]


class CandidateRows(_Rows):
    """Decisions to make."""

    rows: Annotated[list[CandidateRow], Field(min_length=1)]


class CandidateLists(_Rows):
    """Lists to rank."""

    rows: Annotated[list[CandidateList], Field(min_length=1)]


class ItemRows(_Rows):
    """Decisions to make."""

    rows: Annotated[list[ItemRow], Field(min_length=1)]


class ItemLists(_Rows):
    """Lists to rank."""

    rows: Annotated[list[ItemList], Field(min_length=1)]


class Decision(BaseModel):
    """A decision that is in the log."""

    model_config = ConfigDict(use_attribute_docstrings=True)
    decision_id: str
    """The id to send with the reward."""
    action: str | dict[str, Value]
    """Name of the action, id of the item, or features of the candidate."""
    index: int
    """Index of the action among the model's actions, or of the candidate in its list; without a list, in the table."""
    propensity: float
    """The probability of the draw."""


class Decisions(BaseModel):
    """One decision per row."""

    decisions: list[Decision]
    model: str
    """Version of the model: the hash of its manifest."""
    items: str | None = None
    """Hash of the item table, if the model has one."""


class Ranked(BaseModel):
    """A candidate and its value."""

    action: str | None = None
    """Id of the item, if the model has an item table."""
    index: int
    score: float


class Rankings(BaseModel):
    """Candidates of each row, the largest value first."""

    rankings: list[list[Ranked]]
    model: str
    items: str | None = None
    """Hash of the item table, if the model has one."""


class Reward(Body):
    """The reward of a decision."""

    decision_id: Name
    reward: Number
    terminal: bool = False
    """Whether the episode ends with this decision."""
    metrics: Annotated[dict[Name, Number], Field(max_length=100)] | None = None
    """Further figures of the decision by name."""


class RolloutChange(Body):
    """Action on a rollout: one of three."""

    share: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of the units that begin from now on to give to the new model."""
    stop: bool = False
    """Whether the current model decides alone from now on, after restarts as well."""
    promote: bool = False
    """Whether the new model decides alone from now on, after restarts as well."""

    @model_validator(mode="after")
    def _require_one(self) -> "RolloutChange":
        if (self.share is not None) + self.stop + self.promote != 1:
            raise PydanticCustomError("rollout", "one of share, stop true and promote true")
        return self


class Health(BaseModel):
    """State of a worker."""

    model: str
    items: str | None = None
    """Hash of the item table, if the model has one."""
    waiting: int
    """Decisions of the log that are in no Parquet file yet."""
    refused_model: str | None = None
    """Why the newest model or item table is not served, if it was refused."""


def read_body(tree: Any, bundle: Bundle) -> Any:
    """Returns the JSON of a body with the standard names and features, without unknown keys if it asks for that.

    Raises:
        RefusedError: a value of a raw column that is not of its kind.
    """
    tree = _with_contract_names(tree, bundle.columns)
    if bundle.image_shape is not None and isinstance(tree, dict) and isinstance(tree.get("rows"), list):
        tree = {**tree, "rows": _read_images(tree["rows"], bundle)}
    if isinstance(tree, dict) and isinstance(tree.get("rows"), list):
        tree = {**tree, "rows": [_read_lists(row, bundle) for row in tree["rows"]]}
    if isinstance(tree, dict) and isinstance(tree.get("rows"), list) and _reads_features(bundle):
        tree = {**tree, "rows": _read_features(tree["rows"], bundle)}
    if not isinstance(tree, dict) or tree.get("ignore_unknown") is not True or not isinstance(tree.get("rows"), list):
        return tree
    return {**tree, "rows": [_keep_known(row, bundle) for row in tree["rows"]]}


def _read_lists(row: Any, bundle: Bundle) -> Any:
    """Returns a row with a map in place of a list of numbers, and names in place of a 0 or 1 for each action."""
    if not isinstance(row, dict):
        return row
    state = row.get("state_features")
    if isinstance(state, list) and _takes_lists(bundle) and all(type(value) in _OF_LIST for value in state):
        row = {**row, "state_features": {str(index): value for index, value in enumerate(state)}}
    choices = row.get("possible_actions")
    names = bundle.action_names
    if isinstance(choices, list) and len(choices) == len(names) and all(_is_flag(value) for value in choices):
        row = {**row, "possible_actions": [name for name, flag in zip(names, choices, strict=True) if flag]}
    return row


def _takes_lists(bundle: Bundle) -> bool:
    """Whether the features of states are 0, 1, ..., as those of lists of numbers in a log."""
    names = set(bundle.features["state"])
    return bundle.image_shape is None and not _reads_features(bundle) and names == set(map(str, range(len(names))))


def _is_flag(value: Any) -> bool:
    return type(value) in (int, float) and value in (0, 1)


def _read_images(rows: list[Any], bundle: Bundle) -> list[Any]:
    """Returns rows with the bytes of their images; raises RefusedError for other images than the model's."""
    problems: list[Problem] = []
    result = []
    for number, row in enumerate(rows):
        if isinstance(row, dict) and "state_features" in row:
            try:
                (image,) = bundle.states([row["state_features"]])
                row = {**row, "state_features": image.tobytes()}
            except BundleError as error:
                where = f"body.rows.{number}.state_features"
                problems += [replace(problem, where=where) for problem in error.problems]
        result.append(row)
    if problems:
        raise RefusedError(422, *problems)
    return result


def _reads_features(bundle: Bundle) -> bool:
    """Whether a model has raw columns, or features of ids."""
    return any(bundle.raw.values()) or has_ids(bundle)


def has_ids(bundle: Bundle) -> bool:
    """Whether a model has features of ids."""
    return any(bundle.id_features.values())


def _read_features(rows: list[Any], bundle: Bundle) -> list[Any]:
    """Returns rows as the log has them: features in place of raw columns, and ids as texts."""
    problems: list[Problem] = []

    def read(side: str, features: Any, where: str) -> Any:
        if not isinstance(features, dict):
            return features
        features, wrong = read_map(bundle.raw[side], features, where)
        problems.extend(wrong)
        features = dict(features)
        for name in features.keys() & bundle.id_features[side].keys():
            try:
                features[name] = bundle.id_features[side][name].canonical(features[name])
            except ValueError as error:
                of_side = "state_features." if side == "state" else ""
                problems.append(Problem(f"{where}.{of_side}{name}", str(error), f"{features[name]!r:.60}"))
        return features

    result = []
    for number, row in enumerate(rows):
        where = f"body.rows.{number}"
        if isinstance(row, dict):
            row = (
                {**row, "state_features": read("state", row["state_features"], where)}
                if "state_features" in row
                else row
            )
            if isinstance(choices := row.get("possible_actions"), list):
                where = f"{where}.possible_actions"
                row = {**row, "possible_actions": [read("action", choice, where) for choice in choices]}
        result.append(row)
    if problems:
        raise RefusedError(422, *problems)
    return result


def _keep_known(row: Any, bundle: Bundle) -> Any:
    """Returns a row without keys that the model does not know."""
    if not isinstance(row, dict):
        return row
    kept = {name: value for name, value in row.items() if name in _ROW_KEYS}
    if isinstance(state := kept.get("state_features"), dict):
        kept["state_features"] = _only(state, bundle.features["state"])
    if isinstance(choices := kept.get("possible_actions"), list):
        kept["possible_actions"] = [
            _only(choice, bundle.features["action"]) if isinstance(choice, dict) else choice for choice in choices
        ]
    return kept


def _only(features: dict[str, Any], names: Container[str]) -> dict[str, Any]:
    return {name: value for name, value in features.items() if name in names}


def _with_contract_names(tree: Any, columns: ColumnNames) -> Any:
    """Returns a body with the standard names in place of those of the model's training log.

    Args:
        tree: the JSON of a body; its rows, or the body itself, may have names of the log.
        columns: names of the log's columns by standard name, `Bundle.columns`.
    """
    if not isinstance(tree, dict):
        return tree
    rows = tree.get("rows")
    if isinstance(rows, list):
        return {**tree, "rows": [_with_contract_names(row, columns) for row in rows]}
    renamed = dict(tree)
    for name, source in columns.items():
        if name in tree:
            continue
        values = {column: renamed.pop(column) for column in names_of(source) if column in renamed}
        if values:
            renamed[name] = values if isinstance(source, list) else next(iter(values.values()))
    return renamed


_RAW_SCHEMA: dict[str, Any] = {"description": "A value as in the model's training log; see data.columns of its config."}


def with_model_schema(document: dict[str, Any], bundle: Bundle) -> dict[str, Any]:
    """Returns a copy of an OpenAPI document with the features and actions of a model."""
    document = copy.deepcopy(document)
    schemas = document["components"]["schemas"]
    for name, column in (("StateFeatures", "state"), ("CandidateFeatures", "action")):
        if name in schemas:
            number = {"anyOf": [*schemas[name]["additionalProperties"]["anyOf"], {"type": "boolean"}]}
            properties = dict.fromkeys(bundle.features[column], number)
            properties |= dict.fromkeys((raw.column for raw in bundle.raw[column]), _RAW_SCHEMA)
            properties |= {feature: _text_schema(texts) for feature, texts in bundle.levels[column].items()}
            properties |= {feature: _ids_schema(of_ids) for feature, of_ids in bundle.id_features[column].items()}
            schemas[name] |= {"properties": properties, "additionalProperties": False}
    if bundle.image_shape is not None:
        schemas["StateFeatures"] = _image_schema(bundle.image_shape)
        schemas["ActionName"]["enum"] = list(bundle.action_names)
        return document
    # at least one feature has a value, as `_require_feature` checks
    schemas["StateFeatures"]["anyOf"] = [
        {
            "required": [feature],
            "properties": {feature: _present_schema(bundle, feature)},
        }
        for feature in bundle.features["state"]
    ]
    schemas["StateFeatures"]["anyOf"] += [{"required": [raw.column]} for raw in bundle.raw["state"]]
    if _takes_lists(bundle):
        schemas["StateFeatures"] = {"anyOf": [schemas["StateFeatures"], _list_schema(bundle)]}
    if "NamedRow" in schemas:
        flags = {"type": "array", "items": {"type": "number", "enum": [0, 1]}, "contains": {"const": 1}}
        size = len(bundle.action_names)
        schemas["NamedRow"]["properties"]["possible_actions"]["anyOf"].append(
            {**flags, "minItems": size, "maxItems": size}
        )
    if "ActionName" in schemas:
        schemas["ActionName"]["enum"] = list(bundle.action_names)
    if "ItemName" in schemas and bundle.items is not None and len(bundle.items) <= MOST_NAMED:
        schemas["ItemName"]["enum"] = list(bundle.items.ids)
    return document


def _list_schema(bundle: Bundle) -> dict[str, Any]:
    """Returns the schema of a state as a list of numbers, of which one is not null."""
    value = {"anyOf": [{"type": "number", "minimum": -_LARGEST, "maximum": _LARGEST}, {"type": ["boolean", "null"]}]}
    present = {"type": ["number", "boolean"]}
    return {"type": "array", "items": value, "contains": present, "maxItems": len(bundle.features["state"])}


def _image_schema(shape: tuple[int, ...]) -> dict[str, Any]:
    """Returns the schema of an image as nested lists."""
    schema: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": 255}
    for size in reversed(shape):
        schema = {"type": "array", "items": schema, "minItems": size, "maxItems": size}
    return schema


def _present_schema(bundle: Bundle, feature: str) -> dict[str, Any]:
    """Returns the schema of a value of the state's feature that is not missing."""
    if feature in bundle.id_features["state"]:
        return _one_or_more_ids(bundle.id_features["state"][feature], 1)
    return {"type": "string" if feature in bundle.levels["state"] else ["number", "boolean"]}


def _ids_schema(feature: IdFeature) -> dict[str, Any]:
    return {"anyOf": [_one_or_more_ids(feature, 0), {"type": "null"}]}


def _one_or_more_ids(feature: IdFeature, fewest: int) -> dict[str, Any]:
    """Returns the schema of ids, lists of at least `fewest` ids, or ids with scores."""
    single: dict[str, Any] = {"type": ["string", "integer"], "maxLength": MOST_CHARACTERS}
    if not feature.scores:
        return {"anyOf": [single, {"type": "array", "items": single, "minItems": fewest}]}
    score = {"type": "number", "minimum": -_LARGEST, "maximum": _LARGEST}
    pair: dict[str, Any] = {
        "type": "object",
        "properties": {"key": single, "value": score},
        "required": ["key", "value"],
    }
    pair["additionalProperties"] = False
    names = {"maxLength": MOST_CHARACTERS}
    by_id = {"type": "object", "additionalProperties": score, "propertyNames": names, "minProperties": fewest}
    return {"anyOf": [by_id, {"type": "array", "items": pair, "minItems": fewest}]}


def _text_schema(levels: Sequence[str]) -> dict[str, Any]:
    """Returns the schema of a category, which allows other strings than the levels as well."""
    return {"anyOf": [{"type": "string", "maxLength": MOST_CHARACTERS}, {"type": "null"}], "examples": list(levels)}
