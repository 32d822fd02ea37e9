"""Files that only rank 0 has on its disk, read there and sent to all."""

import json
from collections.abc import Callable

from reagent_lite import errors
from reagent_lite.distributed.group import Group
from reagent_lite.errors import Problem, ReagentLiteError

Files = dict[str, bytes]


def first_reads(group: Group, read: Callable[[], Files]) -> Files:
    """Returns what `read` returns on rank 0, on every rank; every rank calls it.

    Raises:
        ReagentLiteError: what `read` raised on rank 0, on every rank alike.
    """
    files: Files = {}
    head = ""
    if group.is_first:
        try:
            files = read()
            head = json.dumps({"names": list(files)})
        except ReagentLiteError as error:
            problems = [[p.where, p.expected, p.got, p.todo] for p in error.problems]
            head = json.dumps({"error": type(error).__name__, "problems": problems})
    said = json.loads(group.broadcast_text(head))
    if "error" in said:
        kind: type[ReagentLiteError] = getattr(errors, said["error"])
        raise kind(Problem(*problem) for problem in said["problems"])
    return {name: group.broadcast_bytes(files.get(name)) for name in said["names"]}
