"""Turns JSON text and `--set` overrides into a checked config; reports every error at once.

text ─► no duplicate keys ─► overrides ─► limits ─► types, unknown keys (pydantic) ─► rules (Section.problems) ─► config
                                                      └ a bad key is recorded and removed; the rest is still checked
"""

import difflib
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from reagent_lite.config.not_included import advise
from reagent_lite.config.section import RULES, Section, type_in_words, within
from reagent_lite.errors import ConfigError, Problem, suggest_nearest
from reagent_lite.strict_json import MAX_DEPTH

Config = TypeVar("Config", bound=Section)

Scalar = bool | int | float | str
Source = str | os.PathLike[str] | Mapping[str, Any] | Section
"""Input for a config."""

_DEPTH = f"at most {MAX_DEPTH} levels of objects and lists"
_SHOWN = 200  # characters of a wrong value
_TYPES = {bool: " (boolean)", int: " (integer)", float: " (number)", str: " (string)", list: " (array)",
          dict: " (object)"}  # fmt: skip
_NEAR = 0.6  # ratio of difflib at which a key is suggested
_SAME_SECTION = 0.25  # added to the ratio in the section of the unknown key


def load_config(model: type[Config], path: str | None, overrides: tuple[str, ...] = ()) -> Config:
    """Reads, overrides and checks a config file.

    Args:
        model: class of the workflow's config, such as DqnConfig.
        path: the JSON file; None means an empty object.
        overrides: `section.key=value` with a JSON value; text that is not JSON is a string.

    Raises:
        ConfigError: with all faults.
    """
    tree, problems = ({}, []) if path is None else read_tree(path)
    for override in overrides:
        problems += apply_override(tree, override)
    return check(model, tree, problems)


def check(model: type[Config], tree: dict[str, Any], problems: list[Problem] | None = None) -> Config:
    """Validates a parsed JSON object; see load_config for errors."""
    problems = list(problems or [])
    if beyond := list(_beyond_limits(tree)):
        raise ConfigError([*problems, *beyond])
    tree = json.loads(json.dumps(model.tree_of(tree)))
    problems += _use_current_names(model, tree)
    while True:  # each pass removes at least one bad key
        try:
            config = model.model_validate_json(json.dumps(tree))
            break
        except ValidationError as error:
            faults: dict[tuple[int | str, ...], list[ErrorDetails]] = {}
            for fault in error.errors():
                faults.setdefault(_existing_prefix(tree, fault["loc"]), []).append(fault)
            for location, faults_of_value in faults.items():  # a value may have a fault for each type of a union
                problems += _problems(model, location, faults_of_value, tree)
            for location in faults:
                _remove(tree, location)
    mentioned = tuple(f"{problem.where}." for problem in problems)  # rules do not report keys that were removed
    problems += [rule for rule in config.problems() if not any(key.startswith(f"{rule.where}.") for key in mentioned)]
    if problems:
        raise ConfigError(problems)
    return config


def _use_current_names(model: type[Section], tree: dict[str, Any]) -> list[Problem]:
    """Moves renamed keys to their current names, so that errors name keys as they are in the tree."""
    problems = list[Problem]()
    for path, section in _walk(model):
        node: Any = tree
        for name in path.split(".")[:-1]:
            node = node.get(name) if isinstance(node, dict) else None
        if isinstance(node, dict) and issubclass(section, Section):
            moved, twice = section.with_current_names(dict(node))
            problems += [within(path[:-1], problem) for problem in twice]
            node.clear()
            node.update(moved)
    return problems


def former_names(model: type[Section]) -> dict[str, str]:
    """Returns {path of a key: its former path} for all renamed keys of a config."""
    sections = [(path, section) for path, section in _walk(model) if issubclass(section, Section)]
    return {path + now: path + former for path, section in sections for former, now in section.renamed.items()}


def expand_config(config: Section) -> dict[str, Any]:
    """Returns the config with all defaults, as JSON types."""
    return config.model_dump(mode="json")


def changed_keys(config: Section) -> dict[str, Any]:
    """Returns the keys whose values are not the fields' own defaults, as JSON types."""
    return config.model_dump(mode="json", exclude_defaults=True)


def leaves(tree: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Returns the values of a resolved config by keys such as "rl.gamma"."""
    values: dict[str, Any] = {}
    for name, value in tree.items():
        values |= leaves(value, f"{path}{name}.") if isinstance(value, Mapping) else {f"{path}{name}": value}
    return values


def parameters(config: Section) -> dict[str, Scalar]:
    """Returns the hyperparameters for trackers: all keys that are not null, lists as JSON text."""
    return {
        key: json.dumps(value) if isinstance(value, list) else value
        for key, value in leaves(expand_config(config)).items()
        if value is not None
    }


def fingerprint(config: Section) -> str:
    """Returns the sha256 of the resolved config without node_index."""
    tree = expand_config(config)
    tree.pop("node_index", None)
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


def read_tree(source: Source) -> tuple[dict[str, Any], list[Problem]]:
    """Returns a config as a new JSON object, and the faults of its text.

    Args:
        source: path of a JSON file, a config, or a mapping, whose values may be paths, tuples and configs too.

    Raises:
        ConfigError: there is no such file, or JSON does not have such a value.
    """
    if isinstance(source, str | os.PathLike):
        return _read(os.fspath(source))
    tree = expand_config(source) if isinstance(source, Section) else source
    if not isinstance(tree, Mapping):
        raise ConfigError(Problem("config", "a config, a dict, or the path of a JSON file", type(source).__name__))
    try:
        return json.loads(json.dumps(dict(tree), default=_plain)), []
    except (TypeError, ValueError) as error:
        raise ConfigError(Problem("config", "values that JSON has", str(error))) from error


def _plain(value: object) -> Any:
    """Returns the JSON value of a Python object that JSON does not have; raises TypeError if there is none."""
    return value.model_dump(mode="json") if isinstance(value, Section) else os.fspath(value)  # type: ignore[call-overload]


def _read(path: str) -> tuple[dict[str, Any], list[Problem]]:
    file = Path(path).expanduser()
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a path with NUL
        reason = getattr(error, "strerror", None) or str(error)
        near = ""
        if isinstance(error, FileNotFoundError) and file.parent.is_dir():
            near = suggest_nearest(
                path, [str(candidate) for candidate in file.parent.glob("*.json")], "Did you mean {}?"
            )
        if isinstance(error, FileNotFoundError):
            raise ConfigError(Problem.stating(path, "no such file", near)) from error
        raise ConfigError(Problem(path, "a readable JSON file", reason)) from error
    problems: list[Problem] = []

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        for key in sorted({key for key in keys if keys.count(key) > 1}):
            problems.append(Problem(f"{path}: {key}", "every key once", f"{keys.count(key)} times"))
        return dict(pairs)

    try:
        tree = _loads(text, path, object_pairs_hook=once)
    except json.JSONDecodeError as error:
        raise ConfigError(Problem(f"{path}:{error.lineno}", "JSON", f"{error.msg} at column {error.colno}")) from error
    if not isinstance(tree, dict):
        raise ConfigError(Problem(path, "a JSON object", type(tree).__name__))
    return tree, problems


def _loads(text: str, where: str, **hooks: Any) -> Any:
    try:
        return json.loads(text, **hooks)
    except json.JSONDecodeError:
        raise
    except RecursionError as error:
        raise ConfigError(Problem(where, _DEPTH, "more")) from error
    except ValueError as error:
        digits = f"integers of at most {sys.get_int_max_str_digits():,} digits"
        raise ConfigError(Problem(where, digits, "a longer one")) from error


def _beyond_limits(tree: Any) -> Iterator[Problem]:
    """Yields values that JSON can have but no key accepts."""
    level: list[tuple[str, Any]] = [("", tree)]
    for _ in range(MAX_DEPTH):
        below: list[tuple[str, Any]] = []
        for where, value in level:
            if isinstance(value, dict):
                below += [(where, key) for key in value]
                below += [(f"{where}.{key}" if where else key, child) for key, child in value.items()]
            elif isinstance(value, list):
                below += [(f"{where}.{index}", child) for index, child in enumerate(value)]
            elif isinstance(value, str) and re.search("[\0\ud800-\udfff]", value):
                yield Problem(where, "text without NUL and lone surrogates", _show_value(value))
            elif isinstance(value, int) and not -(2**63) <= value < 2**63:
                yield Problem(where, "an integer of 64 bits", f"one of {value.bit_length() + 1} bits")
        level = below
    if level:
        yield Problem(level[0][0][:_SHOWN], _DEPTH, "more")


def apply_override(tree: dict[str, Any], override: str) -> list[Problem]:
    """Sets the key of `section.key=value` in a tree, as `load_config` does; returns the problems."""
    path, equals, text = override.partition("=")
    if not equals or not path:
        return [Problem(f"--set {override}", "key=value, such as training.learning_rate=0.01", repr(override))]
    try:
        value = _loads(text, f"--set {path}")
    except json.JSONDecodeError as error:
        if text[:1] in ("[", "{"):
            todo = 'Protect its quotes from the shell: --set \'key=["a", "b"]\''
            return [Problem(f"--set {path}", "a JSON value", f"{text} ({error.msg})", todo)]
        value = text
    *parents, last = path.split(".")
    node = tree
    for name in parents:
        child = {} if node.get(name) is None else node[name]  # a null section may get keys
        if not isinstance(child, dict):
            return [Problem(f"--set {override}", f"an object at {name}", json.dumps(child))]
        node[name] = child
        node = child
    node[last] = value
    return []


def _existing_prefix(tree: Any, location: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Returns the part of pydantic's location that is in the JSON: pydantic appends names of union members."""
    prefix: list[int | str] = []
    for part in location:
        if isinstance(tree, dict) and part in tree:
            tree = tree[str(part)]
        elif isinstance(tree, list) and isinstance(part, int) and part < len(tree):
            tree = tree[part]
        else:
            break
        prefix.append(part)
    return tuple(prefix)


def _remove(tree: Any, location: tuple[int | str, ...]) -> None:
    # a bad element removes its whole list: the rest would not be the list that the user wrote
    for depth, part in enumerate(location):
        if part not in tree:
            return  # another element has removed it
        if depth == len(location) - 1 or isinstance(tree[part], list):
            del tree[part]
            return
        tree = tree[part]


def _problems(
    model: type[BaseModel], location: tuple[int | str, ...], faults: list[ErrorDetails], tree: dict[str, Any]
) -> list[Problem]:
    where = ".".join(map(str, location))
    fault = faults[0]
    if fault["type"] == RULES:
        return [within(where, problem) for problem in fault["ctx"]["problems"]]
    value: Any = tree
    for part in location:
        value = value[part]
    if fault["type"] == "extra_forbidden":
        return [Problem(where, "a known key", f"unknown key {str(location[-1])!r}", _advice(model, location))]
    todo = advise(value) if fault["type"] == "literal_error" and isinstance(value, str) else ""
    expected = fault["msg"].removeprefix("Input should be ") if len(faults) == 1 else _type_of(model, location)
    return [Problem(where, expected, _show_value(value) + _TYPES.get(type(value), ""), todo)]


def _type_of(model: type[BaseModel], location: tuple[int | str, ...]) -> str:
    """Returns the type of a value in the words of docs/reference.md."""
    schema = model.model_json_schema()
    value = schema
    for part in location:
        for option in (value, *value.get("anyOf", ())):
            section = schema["$defs"][option["$ref"].rpartition("/")[2]] if "$ref" in option else option
            if below := section.get("properties", {}).get(part) or section.get("additionalProperties"):
                value = below
                break
    return type_in_words(value).replace("`", "")


def _show_value(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _advice(model: type[BaseModel], location: tuple[int | str, ...]) -> str:
    """Returns the known key nearest to an unknown one: its name in the same section, its full path in another.

    For a key that asks for something that is not included, returns the page that says what to use instead.
    """
    if advice := advise(str(location[-1])):
        return advice
    sections = dict(_walk(model))
    siblings = sections.get("".join(f"{part}." for part in location[:-1]), model)
    key = str(location[-1])
    near = list[tuple[float, str]]()
    for path, section in [("", siblings), *sections.items()]:
        for name in section.model_fields:
            ratio = difflib.SequenceMatcher(None, key, name).ratio()
            is_part = section is siblings and len(key) > 3 and key in name  # such as episodes in evaluation_episodes
            if ratio >= _NEAR or is_part:
                named = repr(path + name) if path or section is siblings else f"{name!r} at the top level"
                near.append((ratio + (_SAME_SECTION if section is siblings else 0), named))
    if not near:
        return f"Known keys: {', '.join(siblings.model_fields)}"
    _, named = max(near, key=lambda scored: scored[0])  # the first of several: this section, then the outer ones
    return f"Did you mean {named}?"


def _walk(model: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    """Yields ("a.b.", section) for a config and all sections in it, outer sections first."""
    sections = [("", model)]
    for path, section in sections:  # grows in the loop
        yield path, section
        for name, field in section.model_fields.items():
            kinds = (field.annotation, *get_args(field.annotation))  # the latter if a section may be null
            inner = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
            sections += [(f"{path}{name}.", kind) for kind in inner]
