"""What the doctor found: a row for each check, a table for people, one JSON line for programs."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Literal

from reagent_lite.errors import ReagentLiteError

State = Literal["ok", "warning", "FAILED", "skipped"]
_COLOURS: dict[State, str] = {"ok": "green", "warning": "yellow", "FAILED": "bold red", "skipped": "dim"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One check.

    Attributes:
        name: what was looked at.
        state: FAILED keeps a run from training; a warning does not.
        found: what is there.
        todo: what to do about it; "" where nothing need be done.
    """

    name: str
    state: State
    found: str
    todo: str = ""


def ok(name: str, found: str) -> Row:
    """Returns a row that nothing need be done about."""
    return Row(name=name, state="ok", found=found)


def warning(name: str, found: str, todo: str) -> Row:
    """Returns a row that does not keep a run from training."""
    return Row(name=name, state="warning", found=found, todo=todo)


def failed(name: str, found: str, todo: str) -> Row:
    """Returns a row that keeps a run from training."""
    return Row(name=name, state="FAILED", found=found, todo=todo)


def skipped(name: str, why: str) -> Row:
    """Returns a row of what was not looked at."""
    return Row(name=name, state="skipped", found=why)


def of_error(name: str, error: ReagentLiteError) -> Row:
    """Returns the row of a check that ended with an error of ours."""
    if not error.problems:
        return failed(name, str(error), "")
    found = "\n".join(one.fault for one in error.problems)
    advice = "\n".join(dict.fromkeys(one.todo for one in error.problems if one.todo))
    return failed(name, found, advice or "Set it to what is expected")


def checked(name: str, check: Callable[[], Row | Iterable[Row]]) -> Iterator[Row]:
    """Yields the rows of a check; what it raises becomes the last of them, so that the others still run."""
    try:
        rows = check()
        yield from (rows,) if isinstance(rows, Row) else rows
    except ReagentLiteError as error:
        yield of_error(name, error)
    except OSError as error:
        yield failed(name, f"{type(error).__name__}: {error}", "Give this user access to it, or name another path")
    except Exception as error:  # a check that cannot be made must not hide what the others find
        yield failed(name, f"the check itself ended with {type(error).__name__}: {error}", "Report it")


def show(title: str, rows: list[Row]) -> None:
    """Writes the table on standard error, with colours where it is a terminal."""
    if not sys.stderr.isatty():
        print(title, *map(_lines, rows), sep="\n", file=sys.stderr, flush=True)
        return
    # imported here: a run without a terminal does not pay for it
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", show_lines=True)
    for column in ("check", "state", "found", "what to do"):
        table.add_column(column, overflow="fold")
    for row in rows:
        cells = (row.name, Text(row.state, style=_COLOURS[row.state]), Text(row.found), Text(row.todo))
        table.add_row(*cells)
    Console(stderr=True).print(table)


def summary(rows: list[Row], **other: object) -> str:
    """Returns the JSON line: rows, counts by state, and whether nothing failed."""
    counts = {state: sum(row.state == state for row in rows) for state in _COLOURS}
    return json.dumps({"ok": not counts["FAILED"], "counts": counts, **other, "rows": [asdict(row) for row in rows]})


def _lines(row: Row) -> str:
    indent = "\n" + " " * 36
    found = row.found.replace("\n", indent)
    advice = f"{indent}-> {row.todo.replace(chr(10), indent + '   ')}" if row.todo else ""
    return f"{row.state:<8} {row.name:<26} {found}{advice}"
