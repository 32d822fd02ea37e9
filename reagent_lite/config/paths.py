"""The path of a log, or the paths of several logs that are read as one."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import AfterValidator, Field

from reagent_lite.config.section import checked_by
from reagent_lite.errors import Problem


def _paths(path: str | tuple[str, ...]) -> Iterator[Problem]:
    """Yields the faults of a list of paths."""
    if isinstance(path, str):
        return
    if not path or "" in path:
        yield Problem("", "a path, or a list of paths", "an empty path" if path else "an empty list")
    for log in sorted({log for log in path if path.count(log) > 1}):
        yield Problem("", "every log once", f"{log!r} {path.count(log)} times")


def _single_path(path: str | tuple[str, ...]) -> str | tuple[str, ...]:
    return path[0] if isinstance(path, tuple) and len(path) == 1 else path


DataPath = Annotated[str | tuple[str, ...], checked_by(_paths), AfterValidator(_single_path)]
"""Path or URL of a log, or a list of paths or URLs of several logs; a list with one path becomes the path."""


SameEpisodes = Annotated[
    bool | None,
    Field(
        description="Whether the logs of a list have the same episodes. true: an mdp_id is one episode in all of them, "
        "and decisions with equal mdp_id and sequence_number count once, as of a log and its copy. false: each log has "
        "episodes of its own, whose mdp_ids begin with the number of the log from the second one on. Absent: as false; "
        "training and evaluation warn of the number of pairs of mdp_id and sequence_number that several logs have."
    ),
]


FOR_SEVERAL_LOGS = ("absent for a single log", "Give a list of logs, or drop it")
"""Expected value and advice in errors about `same_episodes` if there is one log."""


def logs_of(path: DataPath) -> tuple[str, ...]:
    """Returns the paths of the logs."""
    return (path,) if isinstance(path, str) else path


def show_paths(path: DataPath) -> str:
    """Returns the paths as text."""
    return ", ".join(logs_of(path))
