"""What a run says on standard error: rank 0 only."""

from reagent_lite.distributed.group import Group
from reagent_lite.progress import log


def say(group: Group, text: str) -> None:
    """Prints a line on standard error, once for all ranks."""
    if group.is_first:
        log(text)
