"""What a run says on standard error: rank 0 only."""

import sys

from reagent_lite.distributed.group import Group


def say(group: Group, text: str) -> None:
    """Prints a line on standard error, once for all ranks."""
    if group.is_first:
        print(text, file=sys.stderr, flush=True)
