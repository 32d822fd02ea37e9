"""The page of the Python API, from the docstrings: python docs/write_api.py > docs/api.md."""

import inspect
import re
from collections.abc import Iterator
from typing import Any

import reagent_lite
from reagent_lite.config.section import Section

_HEAD = """\
# The Python API

Written by `python docs/write_api.py > docs/api.md` from the docstrings. Everything here is an attribute of
`reagent_lite`; a name is imported when it is first used. Frames of pandas, polars and Arrow are taken in place of
paths.
"""
_SECTION = re.compile(r"^(Args|Returns|Raises|Attributes):$")


def api() -> str:
    """Returns the page in Markdown: functions, then classes, then configs."""
    named = {name: getattr(reagent_lite, name) for name in sorted(reagent_lite.__all__)}
    classes = {name: value for name, value in named.items() if inspect.isclass(value)}
    configs = [name for name, value in classes.items() if issubclass(value, Section)]
    lines = [_HEAD, "## Functions\n"]
    for name in sorted(named.keys() - classes.keys()):
        lines += _described(f"### {name}", name, named[name])
    lines.append("## Classes\n")
    for name in sorted(classes.keys() - configs):
        lines += _described_class(name, classes[name])
    lines.append("## Configs\n")
    lines.append(
        f"{', '.join(f'`{name}`' for name in configs)}: the keys of a command as a checked object. A dict of the"
    )
    lines.append("same keys will do in every function. [All keys](reference.md).\n")
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines))


def _described(heading: str, name: str, function: Any) -> Iterator[str]:
    yield f"{heading}\n"
    yield f"```python\n{name}{_signature(function)}\n```\n"
    yield from _markdown(inspect.getdoc(function) or "")


def _described_class(name: str, kind: type) -> Iterator[str]:
    yield f"### {name}\n"
    yield from _markdown(inspect.getdoc(kind) or "")
    members = {member: value for base in reversed(kind.__mro__) for member, value in vars(base).items()
               if base.__module__.startswith("reagent_lite") and not member.startswith("_")}  # fmt: skip
    for member, value in members.items():
        if isinstance(value, property) and value.__doc__:
            yield f"* `{member}`: {_line(value.__doc__)}"
    yield ""
    for member, value in members.items():
        if inspect.isfunction(value) and value.__doc__:
            yield from _described(f"#### {name}.{member}", member, value)


def _signature(function: Any) -> str:
    """Returns the parameters and their defaults, without types, which the text has."""
    parameters = inspect.signature(function).parameters.values()
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in parameters if each.name != "self"]
    return str(inspect.Signature(bare)).replace("'", '"')  # as the formatter has it


def _markdown(text: str) -> Iterator[str]:
    """Yields a docstring of Google's form as Markdown: its sections become lists."""
    section = ""
    entry = ""
    for line in [*text.splitlines(), "end"]:
        if heading := _SECTION.match(line):
            section = heading[1]
            yield f"**{section}**\n"
        elif section and line.startswith("    "):
            is_continued = line.startswith("        ") or (section == "Returns" and entry)
            if entry and not is_continued:
                yield entry
            entry = f"{entry} {line.strip()}" if is_continued else _entry(section, line.strip())
        else:
            if entry:
                yield f"{entry}\n"
            entry = ""
            section = "" if line else section
            if not section and line != "end":
                yield line
    yield ""


def _entry(section: str, text: str) -> str:
    name, colon, meaning = text.partition(":")
    return f"* `{name}`:{meaning}" if colon and section != "Returns" else f"* {text}"


def _line(text: str) -> str:
    return " ".join(text.partition("\n\n")[0].split())


if __name__ == "__main__":
    print(api(), end="")
