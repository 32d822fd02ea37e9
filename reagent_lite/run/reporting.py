"""What a run says on standard error: rank 0 only."""

import re
from collections.abc import Mapping

from reagent_lite.distributed.group import Group
from reagent_lite.errors import counted
from reagent_lite.progress import log


def named_counts(counts: Mapping[str, int]) -> str:
    """Returns counts other than 0 as text: "3,470 rows, 1 terminal row" of {"rows": 3470, "terminal_rows": 1}."""

    def named(key: str, count: int) -> str:
        name = key.replace("_", " ")
        return counted(count, re.sub("(row|episode|value)s", r"\1", name), name)

    return ", ".join(named(key, count) for key, count in counts.items() if count)


def say(group: Group, text: str) -> None:
    """Prints a line on standard error, once for all ranks."""
    if group.is_first:
        log(text)
