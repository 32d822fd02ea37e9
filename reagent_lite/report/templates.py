"""Templates of this folder, and how they write names and numbers; without torch, so that a server may use them."""

import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from reagent_lite.errors import pluralize, printable
from reagent_lite.evaluation.interval import Interval
from reagent_lite.report.content import Cell, format_cell

_LONGEST_WORD = 15


def fill_template(template: str, **figures: Any) -> str:
    """Returns a rendered template; all text is escaped, and control characters are visible, as in `printable`."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"breakable": breakable, "written": format_cell, "full": full, "long": long}
    environment.globals |= {"counted": pluralize}
    return printable(environment.get_template(template).render(**figures))


def breakable(text: str) -> Markup:
    """Returns text as HTML in which lines may break after underscores in names and after separators in paths."""
    return Markup(" ").join(map(_breakable_word, text.split(" ")))


def _breakable_word(word: str) -> Markup:
    marks = r"[/\\_.\-]+" if "/" in word or "\\" in word else "_+"
    parts = re.split(f"(?<=[^/_.-])({marks})(?=.)", word)  # word, mark, word, mark, ... word
    return Markup("").join(escape(part) + Markup("<wbr>" if n % 2 else "") for n, part in enumerate(parts))


def long(text: str) -> str:
    """Returns the CSS class of a cell with a word that is too long for a narrow column, else ""."""
    return " long" if max(map(len, re.split(r"[\s/\\_.-]+", text))) > _LONGEST_WORD else ""


def full(cell: Cell) -> str:
    """Returns a number with all its digits, or "" if the written cell already has them."""
    if isinstance(cell, Interval):
        return f"{cell.value} ({cell.low} to {cell.high})"
    return str(cell) if isinstance(cell, float) else ""
