"""The fixtures of helpers/runs.py, caches and a working directory of a test's own."""

from pathlib import Path

import pytest
from helpers.runs import run, small

__all__ = ["caches", "run", "small"]


@pytest.fixture
def caches(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory is the test's own."""
    monkeypatch.chdir(tmp_path)
