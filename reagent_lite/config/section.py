"""The base of every section: strict types, no unknown keys, and rules that report problems instead of raising."""

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import attrgetter
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from reagent_lite.errors import Problem

RULES = "rules"
"""Type of the pydantic error for a value that breaks a rule; `problems` in its context lists the problems."""

_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")
_DECIMAL = re.compile(r"[+-]?[0-9]{1,18}(\.[0-9]*)?([eE][+-]?[0-9]{1,3})?")
_ABSENT = object()
_BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}

Share = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]
Fraction = Annotated[float, Field(gt=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Number = Annotated[int, Field(ge=0)]
Episodes = Annotated[int, Field(ge=2, le=10_000)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]


@dataclass(frozen=True, slots=True)
class NoEffect:
    """Keys without a sensible effect while a condition holds; only their default is accepted then.

    Attributes:
        when: the condition on the section.
        keys: keys of the section, or of an inner section, as in "replay.alpha".
        expected: expected value of the keys; {0.env} in it stands for the value of a key.
        todo: advice, or the reason why the keys have no effect.
    """

    when: Callable[[Any], object]
    keys: tuple[str, ...]
    expected: str
    todo: str = ""

    def problems(self, section: "Section") -> Iterator[Problem]:
        """Yields a problem for each key that differs from its default."""
        for key in self.keys if self.when(section) else ():
            parents, _, name = key.rpartition(".")
            if name in (attrgetter(parents)(section) if parents else section).changed:
                yield section.wrong(key, self.expected.format(section), self.todo)


def _complete(schema: dict[str, Any], section: type["Section"]) -> None:
    """Adds descriptions to a schema, and removes the keys without an effect, which files of ReAgent 2019 may have."""
    properties = schema["properties"]
    for parent in reversed(section.__mro__):
        if issubclass(parent, Section) and parent is not Section:
            for key, description in _attribute_docstrings(parent).items():
                properties[key]["description"] = description
    for key in section.unsupported:
        properties.pop(key, None)


def _attribute_docstrings(section: type["Section"]) -> dict[str, str]:
    """Returns the docstring of each key; pydantic would parse all sections when they are imported."""
    statements = ast.parse(textwrap.dedent(inspect.getsource(section))).body[0].body  # type: ignore[attr-defined]
    return {
        key.target.id: inspect.cleandoc(text.value.value)
        for key, text in pairwise(statements)
        if isinstance(key, ast.AnnAssign)
        and isinstance(key.target, ast.Name)
        and key.target.id in section.model_fields
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


class Section(BaseModel):
    """One JSON object of the config. Field docstrings are the schema's descriptions."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        defer_build=True,
        allow_inf_nan=False,
        json_schema_extra=_complete,
    )
    required: ClassVar[dict[str, tuple[str, ...]]] = {}
    """Keys of the section, or of an inner section, that must not be empty; for each the expected value, and advice."""
    unsupported: ClassVar[dict[str, str]] = {}
    """Keys of ReAgent 2019 that have no effect here, each with advice; only their default is accepted."""
    no_effect: ClassVar[tuple[NoEffect, ...]] = ()
    """Rules for keys that have no effect with some values of other keys."""
    renamed: ClassVar[dict[str, str]] = {}
    """{former path of a key: its path now}, both within the section; files with the former one are still read."""

    @model_validator(mode="before")
    @classmethod
    def _read_values(cls, tree: Any) -> Any:
        """Reads 0 and 1 as false and true and strings of digits as numbers, as ReAgent 2019 did; lists become tuples.

        Strict types alone would require tuples from Python code.
        """
        if not isinstance(tree, dict):
            return tree
        tree, problems = cls.with_current_names(tree)
        if problems:
            raise PydanticCustomError(RULES, "every key under one name", {"problems": problems})
        fields = cls.model_fields
        return {
            key: _read_value(value, _types_in(fields[key].annotation)) if key in fields else value
            for key, value in tree.items()
        }

    @classmethod
    def with_current_names(cls, tree: dict[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
        """Returns the section's JSON object with renamed keys under their current names.

        Also returns a Problem for each key that has two different values under its two names.
        """
        problems = list[Problem]()
        for former, current in cls.renamed.items():
            sections, value = _take(tree, former.split("."))
            if value is _ABSENT:
                continue
            _, other = _take(sections, current.split("."))
            tree = _put(sections, current.split("."), value) if other is _ABSENT else sections
            if other not in (_ABSENT, value) and value not in (None, "", [], {}):  # empty: as if it were absent
                both = f"is {_text(value)}, but {current}, its name now, is {_text(other)}"
                problems.append(Problem.stating(former, both, "Give one of them"))
        return tree, problems

    @classmethod
    def tree_of(cls, tree: dict[str, Any]) -> dict[str, Any]:
        """Returns the JSON object of this section, given one that may be the config of another workflow."""
        return tree

    @property
    def changed(self) -> tuple[str, ...]:
        """Keys whose value differs from the default.

        A key that is set to its default is not among them, so that a resolved config can be read again.
        """
        return tuple(
            name for name, field in type(self).model_fields.items() if getattr(self, name) != field.get_default()
        )

    def rules(self) -> Iterator[Problem]:
        """Yields Problems of this section that involve several keys, or rules beyond a key's type."""
        yield from ()

    def problems(self, path: str = "") -> Iterator[Problem]:
        """Yields the faults by all rules of this section and of inner sections; `path` is the section's path."""
        at_this_level = [
            *(self.wrong(key, *texts) for key, texts in self.required.items() if not attrgetter(key)(self)),
            *self.rules(),
            *(self.wrong(key, "its default", todo) for key, todo in self.unsupported.items() if key in self.changed),
            *(problem for rule in self.no_effect for problem in rule.problems(self)),
        ]
        yield from (within(path, problem) for problem in at_this_level)
        for name in type(self).model_fields:
            if isinstance(section := getattr(self, name), Section):
                yield from section.problems(f"{path}.{name}" if path else name)

    def wrong(self, key: str, expected: str, todo: str = "", *, got: str = "") -> Problem:
        """Returns the problem of a key of this or an inner section; `got` is by default the key's value."""
        return Problem(key, expected, got or _text(attrgetter(key)(self)), todo)


def keys_of(name: str, section: type[Section], *, but: Iterable[str] = ()) -> tuple[str, ...]:
    """Returns the keys of a section by their paths, except those in `but`."""
    return tuple(f"{name}.{key}" for key in section.model_fields if key not in but)


def within(path: str, problem: Problem) -> Problem:
    """Returns a problem of a section as a problem of the config that has the section at `path`."""
    return replace(problem, where=".".join(filter(None, (path, problem.where))))


def _take(tree: dict[str, Any], path: Sequence[str]) -> tuple[dict[str, Any], Any]:
    """Returns an object without the key at a path, and the key's value, _ABSENT if there is no such key.

    A section that has no other key is left out as well.
    """
    name, *inner = path
    if name not in tree:
        return tree, _ABSENT
    rest = {key: value for key, value in tree.items() if key != name}
    if not inner:
        return rest, tree[name]
    if not isinstance(tree[name], dict):
        return tree, _ABSENT
    section, value = _take(tree[name], inner)
    if value is _ABSENT or section:
        rest = {key: section if key == name else old for key, old in tree.items()}
    return rest, value


def _put(tree: dict[str, Any], path: Sequence[str], value: Any) -> dict[str, Any]:
    """Returns an object with a value at a path; absent sections are made, and a value in place of one stays."""
    name, *inner = path
    section = tree.get(name)
    if not inner:
        return {**tree, name: value}
    if isinstance(section, dict | None):
        return {**tree, name: _put(section or {}, inner, value)}
    return tree


def _types_in(annotation: Any) -> set[Any]:
    """Returns the types of a key's values, lists and objects by their elements; for words of a Literal the words."""
    inner = get_args(annotation)
    if get_origin(annotation) is Annotated:
        return _types_in(inner[0])
    if get_origin(annotation) is Literal:
        return {*inner}
    if get_origin(annotation) in (Union, UnionType, tuple, dict):
        options = inner[1:] if get_origin(annotation) is dict else inner
        return {kind for option in options for kind in _types_in(option)}
    return {annotation}


def _read_value(value: Any, types: set[Any]) -> Any:
    scalars = not types.isdisjoint((bool, int, float))
    if isinstance(value, list | tuple):
        return tuple(_read_value(element, types) if scalars else element for element in value)
    if isinstance(value, dict) and scalars:
        return {key: _read_value(element, types) for key, element in value.items()}
    if not isinstance(value, str | int | float) or value in types:
        return value
    if isinstance(value, str) and str not in types:
        if int in types and _INTEGER.fullmatch(value):
            return int(value)
        if float in types and _DECIMAL.fullmatch(value):
            return float(value)
    if type(value) in (int, float) and value in (0, 1) and bool in types and types.isdisjoint((int, float)):
        return bool(value)
    return value


def _text(value: Any) -> str:
    if value is None or value == "":
        return "nothing"
    return json.dumps(value, default=lambda section: section.model_dump(mode="json", exclude_defaults=True))


def checked_by(check: Callable[[Any], Iterable[Problem]]) -> AfterValidator:
    """Returns a validator that refuses values with problems; `where` of a problem is relative to the value."""

    def validate(value: Any) -> Any:
        if problems := list(check(value)):
            raise PydanticCustomError(RULES, "a valid value", {"problems": problems})
        return value

    return AfterValidator(validate)


def type_in_words(field: dict[str, Any]) -> str:
    """Returns the type of a key by its JSON Schema, as in: integer >= 1 or null."""
    if "anyOf" in field:
        return " or ".join(type_in_words(option) for option in field["anyOf"])
    if "const" in field or "enum" in field:
        return ", ".join(f"`{json.dumps(value)}`" for value in field.get("enum", [field.get("const")]))
    if "prefixItems" in field:
        return f"[{', '.join(map(type_in_words, field['prefixItems']))}]"
    if field["type"] == "array":
        items = type_in_words(field["items"])
        return f"list of {items}" if "`" in items else f"list of {items.replace(' or ', 's or ')}s"
    if isinstance(field.get("additionalProperties"), dict):
        return f"{{name: {type_in_words(field['additionalProperties'])}}}"
    bounds = (f"{sign} {field[bound]:,}" for bound, sign in _BOUNDS.items() if bound in field)
    return f"{field['type']} {', '.join(bounds)}".rstrip()


def _local(path: str) -> Iterator[Problem]:
    if "://" in path:
        yield Problem("", "a local path", repr(path), "Name a folder of this machine, or of a mounted share")


def _names(names: Sequence[str]) -> Iterator[Problem]:
    if "" in names:
        yield Problem("", "names that are not empty", json.dumps(names))
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield Problem("", "every name once", f"{name!r} {names.count(name)} times")


LocalPath = Annotated[str, checked_by(_local)]
"""A path that is written to."""
Names = Annotated[tuple[str, ...], checked_by(_names)]
