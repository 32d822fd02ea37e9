"""The report as one HTML document that needs nothing but itself: no script, no request, every word escaped."""

import re
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from reagent_lite.errors import counted
from reagent_lite.report.content import Headline, Report, Table

_STACKED_FROM = 4  # columns
_HASH = re.compile(r"[0-9a-f]{40,}")
_SMALL = re.compile(r"^\W?-?[\d.]+e-\d+\W*$")  # 1.2e-05, which a browser would break behind its e-
_BREAKS = re.compile(r"[\s/\\_.-]+")
_LONGEST_WORD = 15  # letters that may not be broken
_NOTHING = Headline(source="Evaluation", state="unclear", sentence="Nothing was evaluated.")


def render(report: Report) -> str:
    """Returns the page as one HTML document."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"breakable": breakable, "cell": cell, "stacked": stacked}
    environment.globals["counted"] = counted
    sections = [section for section in report.sections if section]
    page = environment.get_template("page.html.j2")
    return page.render(report=report, headlines=report.headlines or (_NOTHING,), sections=sections)


def breakable(text: str) -> Markup:
    """Returns text as HTML in which names break behind underscores, and paths behind every mark."""
    return Markup(" ").join(map(_breakable_word, text.split(" ")))


def _breakable_word(word: str) -> Markup:
    if _SMALL.search(word):
        return Markup('<span class="whole">{}</span>').format(word)
    marks = r"[/\\_.\-]+" if "/" in word or "\\" in word else "_+"
    parts = re.split(f"(?<=[^/_.-])({marks})(?=.)", word)  # word, mark, word, mark, ... word
    return Markup("").join(
        escape(part) + Markup("<wbr>") if place % 2 else escape(part) for place, part in enumerate(parts)
    )


def cell(value: str, scope: str, kind: str) -> Markup:
    """Returns a cell of a table.

    Args:
        value: its words.
        scope: "col" or "row" for a heading, empty for others.
        kind: the class of its column.
    """
    if scope == "col":
        return Markup('<th scope="col"{}>{}</th>').format(_class(kind), value)
    if not value:
        return Markup('<td class="none"></td>')
    shown = _class("long" if max(map(len, _BREAKS.split(value))) > _LONGEST_WORD else kind)
    if scope:
        return Markup('<th scope="row"{}>{}</th>').format(shown, breakable(value))
    figure, interval = re.fullmatch(r"(.*?)( \([^()]*\))?", value, re.DOTALL).groups()  # type: ignore[union-attr]
    if interval is None:
        bar = Markup(' style="--w:{}"').format(value) if kind == "bar" and value.endswith("%") else ""
        return Markup("<td{}{}>{}</td>").format(shown, bar, breakable(value))
    return Markup("<td{}>{} <span>{}</span></td>").format(shown, breakable(figure), breakable(interval[1:]))


def _class(kind: str) -> Markup:
    return Markup(' class="{}"').format(kind) if kind else Markup("")


def stacked(table: Table) -> Markup:
    """Returns the attributes of a table that becomes a list of rows on a narrow screen, column names as --h1, ..."""
    wide = len(table.head) >= _STACKED_FROM or any(_HASH.fullmatch(value) for row in table.rows for value in row)
    names = ";".join(f"--h{place}:{_css_text(f'{name}: ')}" for place, name in enumerate(table.head) if place)
    return Markup(' class="stacked" style="{}"').format(names) if wide else Markup("")


def _css_text(text: str) -> str:
    """Returns a CSS string, https://www.w3.org/TR/css-syntax-3/#consume-string-token."""
    return '"' + re.sub(r'["\\\n\r\f;{}<>]', lambda found: f"\\{ord(found[0]):x} ", text) + '"'
