"""Output of a command on a terminal and in a log file, and commands that outlive either."""

import io
import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from unittest.mock import patch

import pytest

from reagent_lite.console import log_as, logger, logging_to_stderr, machine_logger, outliving_terminal, progress
from reagent_lite.errors import Problem
from reagent_lite.export.model_card import escape_text
from reagent_lite.report.content import format_cell


@pytest.fixture(autouse=True)
def log() -> Iterator[None]:
    with logging_to_stderr():
        yield
    log_as(0)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(params=[Terminal, io.StringIO])
def stream(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.setenv("TERM", "xterm")
    return request.param()


def test_progress_has_a_speed_unless_it_is_nothing(stream: io.StringIO) -> None:
    with redirect_stderr(stream), progress("reading", "bytes"):
        pass
    assert "reading" not in stream.getvalue()
    with redirect_stderr(stream), progress("simulating", "rows", begin=100) as show:
        show(30_100, 30_100)
    *_, speed = re.findall(r"([\d,]+) rows/s", stream.getvalue())
    assert int(speed.replace(",", "")) > 30_000


@pytest.mark.parametrize("stream", [io.StringIO], indirect=True)
def test_work_that_is_over_at_once_leaves_no_line(stream: io.StringIO) -> None:
    for brief in (True, False):
        with redirect_stderr(stream), progress(f"scoring {brief}", "rows", brief=brief) as show:
            show(5, 5)
    assert re.findall(r"scoring \w+: 5 of 5 rows", stream.getvalue()) == ["scoring False: 5 of 5 rows"]


def test_work_inside_of_work_with_a_bar_is_logged(stream: io.StringIO) -> None:
    with redirect_stderr(stream), progress("training", "rows") as outer, progress("scoring", "rows") as inner:
        outer(10, 100)
        inner(5, 5)
        assert "scoring: 5 of 5 rows" in stream.getvalue()


def test_ranks_in_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 3):
        log_as(rank)
        logger.info("once")
        machine_logger.info("of a machine")
        logger.warning("of this rank")
        logging.getLogger("reagent_lite").error("config error:\nx")
    first = ["once", "of a machine", "warning: of this rank", "config error:", "x"]
    others = ["rank 3: of a machine", "rank 3: warning: of this rank", "rank 3: config error:", "x"]
    assert capsys.readouterr().err.splitlines() == first + others


def test_control_characters_of_names_never_reach_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """They move the cursor, set titles, and turn the direction of writing; tabs and line ends stay."""
    logger.warning("two\n\tlines: \x1b]0;title\x07 \u202eabc \x9b2J \r \u00e9")
    problem = Problem("a.csv:1", "a name", repr("x") + "\x1b[31m")
    logger.error(problem)
    assert capsys.readouterr().err == (
        "warning: two\n\tlines: \\x1b]0;title\\x07 \\u202eabc \\x9b2J \\r \u00e9\n"
        "a.csv:1: expected a name, got 'x'\\x1b[31m\n"
    )
    assert "\x1b" not in escape_text("\x1b[31m") + format_cell("\x1b[31m")


@contextmanager
def standard(number: int, descriptor: int) -> Iterator[None]:
    """Makes standard output (1) or error (2) lead to a descriptor, as a process has it."""
    kept = os.dup(number)
    os.dup2(descriptor, number)
    stream = open(number, "w", closefd=False)  # noqa: SIM115 # of the number, not of a path
    try:
        with patch.object(sys, {1: "stdout", 2: "stderr"}[number], stream):
            yield
    finally:
        os.dup2(kept, number)
        os.close(kept)


def test_what_nobody_reads_is_lost_and_no_more() -> None:
    """Standard error is a pipe whose reader goes, as is a terminal that is closed."""
    reader, writer = os.pipe()
    with standard(2, writer):
        os.close(writer)
        with outliving_terminal(), logging_to_stderr():
            logger.info("heard")
            assert os.read(reader, 100) == b"heard\n"
            os.close(reader)
            for _ in range(2):
                logger.info("not heard")


def test_a_file_that_cannot_be_written_is_an_error_still(tmp_path: Path) -> None:
    with (tmp_path / "outcome.json").open("w") as file, standard(1, file.fileno()):
        before = sys.stdout
        with outliving_terminal():
            assert sys.stdout is before
