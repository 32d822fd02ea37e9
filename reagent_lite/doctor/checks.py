"""The doctor's results: a row for each check, a table for people, a JSON line for programs."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Literal

from reagent_lite.errors import ReagentLiteError

State = Literal["ok", "warning", "FAILED", "skipped"]
_COLORS: dict[State, str] = {"ok": "green", "warning": "yellow", "FAILED": "bold red", "skipped": "dim"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """Result of a check.

    Attributes:
        name: name of the check.
        state: FAILED prevents training; a warning does not.
        found: result, in words.
        todo: what to do about it; "" if nothing has to be done.
    """

    name: str
    state: State
    found: str
    todo: str = ""


def ok(name: str, detail: str) -> CheckResult:
    """Returns the row of a check without problems."""
    return CheckResult(name=name, state="ok", found=detail)


def warning(name: str, detail: str, todo: str) -> CheckResult:
    """Returns the row of a problem that does not prevent training."""
    return CheckResult(name=name, state="warning", found=detail, todo=todo)


def fail(name: str, detail: str, todo: str) -> CheckResult:
    """Returns the row of a problem that prevents training."""
    return CheckResult(name=name, state="FAILED", found=detail, todo=todo)


def skip(name: str, why: str) -> CheckResult:
    """Returns the row of a check that did not run."""
    return CheckResult(name=name, state="skipped", found=why)


def of_error(name: str, error: ReagentLiteError) -> CheckResult:
    """Returns the row of a check that ended with an error."""
    if not error.problems:
        return fail(name, str(error), "")
    faults = "\n".join(problem.fault for problem in error.problems)
    advice = "\n".join(dict.fromkeys(problem.todo for problem in error.problems if problem.todo))
    return fail(name, faults, advice or "Set it to the expected value")


def run_check(name: str, check: Callable[[], CheckResult | Iterable[CheckResult]]) -> Iterator[CheckResult]:
    """Yields the rows of a check; an error becomes its last row, so that later checks still run."""
    try:
        rows = check()
        yield from (rows,) if isinstance(rows, CheckResult) else rows
    except ReagentLiteError as error:
        yield of_error(name, error)
    except OSError as error:
        yield fail(name, f"{type(error).__name__}: {error}", "Give this user access, or choose another path")
    except Exception as error:  # a check that fails must not hide the results of the others
        yield fail(name, f"the check itself ended with {type(error).__name__}: {error}", "Report it")


def show(title: str, rows: list[CheckResult]) -> None:
    """Writes the table to standard error, with colors if it is a terminal."""
    if not sys.stderr.isatty():
        print(title, *map(_lines, rows), sep="\n", file=sys.stderr, flush=True)
        return
    # imported here: only needed with a terminal
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", show_lines=True)
    for column in ("check", "state", "found", "what to do"):
        table.add_column(column, overflow="fold")
    for row in rows:
        cells = (row.name, Text(row.state, style=_COLORS[row.state]), Text(row.found), Text(row.todo))
        table.add_row(*cells)
    Console(stderr=True).print(table)


def summary(rows: list[CheckResult], **other: object) -> str:
    """Returns the JSON line: rows, counts by state, and whether no check failed."""
    counts = {state: sum(row.state == state for row in rows) for state in _COLORS}
    return json.dumps({"ok": not counts["FAILED"], "counts": counts, **other, "rows": [asdict(row) for row in rows]})


def _lines(row: CheckResult) -> str:
    indent = "\n" + " " * 36
    text = row.found.replace("\n", indent)
    advice = f"{indent}-> {row.todo.replace(chr(10), indent + '   ')}" if row.todo else ""
    return f"{row.state:<8} {row.name:<26} {text}{advice}"
