"""Tables, facts and paragraphs of the report page as HTML; every word is escaped.

A table of more than three columns, or with hashes, becomes a list of rows on a narrow screen: each figure behind its
column's name.
"""

import re
from collections.abc import Sequence
from html import escape

from reagent_lite.errors import counted

_MOST_ROWS = 30  # of a table that is open
_OPEN_ROWS = 20  # of a longer one; the others unfold
_STACKED_FROM = 4  # columns
_HASH = re.compile(r"[0-9a-f]{40,}")
_RANGE, _APART = re.compile(r" (\([^()]*\))$"), r" <span>\1</span>"  # of a figure, which may stand below it
_SMALL = re.compile(r"^\W?-?[\d.]+e-\d+\W*$")  # 1.2e-05, which a browser would break behind its e-
_BREAKS = re.compile(r"[\s/\\_.-]+")
_LONGEST_WORD = 15  # letters that may not be broken
_LONG_FACT = 24  # letters, from where a value takes two places


def facts(items: Sequence[tuple[str, str]]) -> str:
    """Returns names and values side by side."""
    long = {True: ' class="long"', False: ""}
    shown = "".join(
        f"<div{long[len(value) > _LONG_FACT]}><dt>{escape(name)}</dt><dd>{breakable(value)}</dd></div>"
        for name, value in items
    )
    return f'<dl class="facts">{shown}</dl>' if shown else ""


def paragraphs(sentences: Sequence[str]) -> str:
    """Returns a paragraph for each sentence."""
    return "".join(f"<p>{breakable(sentence)}</p>" for sentence in sentences)


def more(count: int, what: str, beside: str) -> str:
    """Returns a sentence on what is left out, none where nothing is."""
    return f"<p>{count:,} more {escape(what)} in {escape(beside)}.</p>" if count > 0 else ""


def breakable(text: str) -> str:
    """Returns text as HTML in which names break behind underscores, and paths behind every mark."""
    return " ".join(map(_breakable_word, text.split(" ")))


def _breakable_word(word: str) -> str:
    if _SMALL.search(word):
        return f'<span class="whole">{escape(word)}</span>'
    marks = r"[/\\_.\-]+" if "/" in word or "\\" in word else "_+"
    parts = re.split(f"(?<=[^/_.-])({marks})(?=.)", word)  # word, mark, word, mark, ... word
    return "".join(escape(part) + ("<wbr>" if place % 2 else "") for place, part in enumerate(parts))


def table(
    caption: str,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    figures: tuple[int, ...] = (),
    words: tuple[int, ...] = (),
    short: tuple[int, ...] = (),
) -> str:
    """Returns a table, of a long one the first rows and the others folded; the first cell of a row is its heading.

    `figures` are columns of numbers, `words` columns of sentences, `short` columns that do not break.
    """
    classes = {"figure": figures, "words": words, "short": short}
    kinds = {column: f' class="{name}"' for name, columns in classes.items() for column in columns}
    if len(rows) <= _MOST_ROWS:
        return _table(caption, head, rows, kinds)
    shown, folded = _table(caption, head, rows[:_OPEN_ROWS], kinds), rows[_OPEN_ROWS:]
    more = f"<details><summary>{counted(len(folded), 'more row')}</summary>"
    return f"{shown}{more}{_table(f'{caption}, the other rows', head, folded, kinds)}</details>"


def _table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]], kinds: dict[int, str]) -> str:
    heads = "".join(f'<th scope="col"{kinds.get(i, "")}>{escape(name)}</th>' for i, name in enumerate(head))
    body = "".join(
        "<tr>" + "".join(_cell(i, value, kinds.get(i, "")) for i, value in enumerate(row)) + "</tr>" for row in rows
    )
    wide = len(head) >= _STACKED_FROM or any(_HASH.fullmatch(cell) for row in rows for cell in row)
    stacked = f' class="stacked" style="{_labels(head)}"' if wide else ""
    # a box that may scroll must be reachable by keyboard, and then needs a name
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table{stacked}>'
        f"<caption>{breakable(caption)}</caption><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _labels(head: Sequence[str]) -> str:
    """Returns the names of columns as CSS variables h1, h2, ..., once for the table in place of once a cell."""
    return escape(";".join(f"--h{place}:{_css_text(f'{name}: ')}" for place, name in enumerate(head) if place))


def _css_text(text: str) -> str:
    """Returns a CSS string, https://www.w3.org/TR/css-syntax-3/#consume-string-token."""
    return '"' + re.sub(r'["\\\n\r\f;{}<>]', lambda found: f"\\{ord(found[0]):x} ", text) + '"'


def _cell(column: int, value: str, kind: str) -> str:
    if not value:
        return '<td class="none"></td>'
    if max(map(len, _BREAKS.split(value))) > _LONGEST_WORD:
        kind = ' class="long"'
    text = breakable(value)
    if column == 0:
        return f'<th scope="row"{kind}>{text}</th>'
    return f"<td{kind}>{_RANGE.sub(_APART, text)}</td>"
