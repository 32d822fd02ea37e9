"""The fixtures of oracles/runs.py, and caches of a test's own."""

import pytest
from oracles.runs import run, small

__all__ = ["caches", "run", "small"]


@pytest.fixture
def caches(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
