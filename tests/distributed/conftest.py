"""A fixture that starts launchers."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from machines import Start, machines


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """start(index, count=2, **options) starts a launcher on this machine's loopback."""
    with machines(tmp_path) as starter:
        yield starter
