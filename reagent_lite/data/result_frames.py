"""Results as frames of pandas."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reagent_lite.errors import needing

if TYPE_CHECKING:
    from pandas import DataFrame as DataFrame


def frame_of(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] | None = None) -> DataFrame:
    """Returns a frame with a row for each mapping; without rows it has the given `columns`.

    Raises:
        ConfigError: pandas is not installed.
    """
    with needing("data", "a frame of results"):
        import pandas as pd
    return pd.DataFrame(list(rows), columns=None if rows or columns is None else list(columns))


def frame_of_lines(file: Path) -> DataFrame:
    """Returns a JSON lines file of a run as a frame, which has no rows if there is no file."""
    lines = file.read_text().splitlines() if file.is_file() else []
    return frame_of([json.loads(line) for line in lines])
