"""Tables of cases, each of which has a name that says what it shows."""

from collections.abc import Mapping
from typing import Any

import pytest


def cases(arguments: str, table: Mapping[str, Any]) -> pytest.MarkDecorator:
    """Runs a test with these arguments, "first, second", once for each row of the table."""
    return pytest.mark.parametrize(arguments, table.values(), ids=table)
