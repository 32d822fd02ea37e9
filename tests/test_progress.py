"""What a terminal and a log file show of long work."""

import io
import re
import sys

import pytest

from reagent_lite.progress import progress


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
    with progress("simulating", "rows", enabled=True, begin=100) as show:
        show(30_100, 30_100)
    speeds = re.findall(r"([\d,]+) rows/s", stream.getvalue())
    assert int(speeds[-1].replace(",", "")) > 30_000


def test_work_that_was_done_before_shows_nothing(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    with progress("reading", "bytes", enabled=True):
        pass
    assert "reading" not in stream.getvalue()


def test_percent_have_no_speed(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    with progress("pairing", "percent", enabled=True) as show:
        show(50, 100)
        show(100, 100)
    assert "100" in stream.getvalue()
    assert "/s" not in stream.getvalue()


def test_work_that_is_over_at_once_leaves_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    for brief in (True, False):
        with progress(f"scoring {brief}", "rows", enabled=True, brief=brief) as show:
            show(5, 5)
    assert "scoring False: 5 of 5 rows" in stream.getvalue()
    assert "scoring True" not in stream.getvalue()


def test_work_inside_of_work_with_a_bar_is_told_in_lines(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    with progress("training", "rows", enabled=True) as outer, progress("scoring", "rows", enabled=True) as inner:
        outer(10, 100)
        inner(5, 5)
        assert "scoring: 5 of 5 rows" in stream.getvalue()
