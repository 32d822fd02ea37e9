"""What a terminal and a log file show of a command, and what a command survives of theirs."""

import io
import logging
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from reagent_lite.console import log_as, logger, logging_to_stderr, machine_logger, outliving_terminal, progress


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
    made: io.StringIO = request.param()
    return made


def test_work_that_is_done_in_one_piece_has_a_speed(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    with progress("simulating", "rows", begin=100) as show:
        show(30_100, 30_100)
    speeds = re.findall(r"([\d,]+) rows/s", stream.getvalue())
    assert int(speeds[-1].replace(",", "")) > 30_000


def test_work_that_was_done_before_shows_nothing(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    with progress("reading", "bytes"):
        pass
    assert "reading" not in stream.getvalue()


def test_percent_have_no_speed(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    with progress("pairing", "percent") as show:
        show(50, 100)
        show(100, 100)
    assert "100" in stream.getvalue()
    assert "/s" not in stream.getvalue()


def test_work_that_is_over_at_once_leaves_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    for brief in (True, False):
        with progress(f"scoring {brief}", "rows", brief=brief) as show:
            show(5, 5)
    assert "scoring False: 5 of 5 rows" in stream.getvalue()
    assert "scoring True" not in stream.getvalue()


def test_work_inside_of_work_with_a_bar_is_told_in_lines(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    with progress("training", "rows") as outer, progress("scoring", "rows") as inner:
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


def test_what_is_said_to_nobody_is_lost_and_no_more() -> None:
    """Standard error is a pipe whose reader goes, which a terminal that is closed comes down to."""
    reader, writer = os.pipe()
    kept = os.dup(2)
    os.dup2(writer, 2)
    os.close(writer)
    stream, sys.stderr = sys.stderr, open(2, "w", closefd=False)  # noqa: SIM115 # of descriptor 2, as a process has it
    try:
        with outliving_terminal(), logging_to_stderr():
            logger.info("heard")
            assert os.read(reader, 100) == b"heard\n"
            os.close(reader)
            for _ in range(2):
                logger.info("not heard")
    finally:
        sys.stderr = stream
        os.dup2(kept, 2)
        os.close(kept)


def test_a_file_that_cannot_be_written_is_an_error_still(tmp_path: Path) -> None:
    kept = os.dup(1)
    stream = sys.stdout
    with (tmp_path / "outcome.json").open("w") as file:
        os.dup2(file.fileno(), 1)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 # of descriptor 1, as a process has it
        try:
            before = sys.stdout
            with outliving_terminal():
                assert sys.stdout is before
        finally:
            sys.stdout = stream
            os.dup2(kept, 1)
            os.close(kept)
