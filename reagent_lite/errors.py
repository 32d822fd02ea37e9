"""Errors that say where, what was expected, what came instead, and what to do."""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec

MAX_PROBLEMS = 20
"""Faults that an error spells out; the rest is counted."""
MAX_NAMES = 10
"""Names that an error lists."""
EXTRAS = {
    "compiler": ("ziglang",),
    "cuda": ("pycuda",),
    "data": ("pyarrow", "scipy"),
    "gymnasium": ("gymnasium",),
    "minari": ("minari", "h5py"),
    "pictures": ("PIL",),
    "report": ("tensorboard",),
    "serve": ("fastapi", "uvicorn", "prometheus_client", "pyarrow"),
    "spark": ("pyspark",),
    "tracking": ("mlflow", "wandb"),
}
"""What each extra of the distribution lets one import."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault at a boundary: a JSON key, a line of a file, a peer, a file of a bundle."""

    where: str
    expected: str
    got: str
    todo: str = ""

    @property
    def fault(self) -> str:
        """The problem without what to do."""
        return f"{self.where}: expected {self.expected}, got {self.got}"

    def __str__(self) -> str:
        return f"{self.fault}. {self.todo}" if self.todo else self.fault


def counted(number: int, one: str, many: str = "") -> str:
    """Returns a number and what it counts, as in "1 row" and "3,470 rows".

    Args:
        number: how many there are.
        one: the noun after 1.
        many: the noun after all other numbers; absent: `one` with s or es.
    """
    if number == 1:
        return f"1 {one}"
    return f"{number:,} {many or one + ('es' if one.endswith('s') else 's')}"


def listed(names: Iterable[object]) -> str:
    """Returns names as text, "a, b"; where there are more than MAX_NAMES of them, the first, "and 714 more"."""
    found = [str(name) for name in names]
    more = f" and {len(found) - MAX_NAMES:,} more" if len(found) > MAX_NAMES else ""
    return f"{', '.join(found[:MAX_NAMES])}{more}"


def named_counts(counts: Mapping[str, int]) -> str:
    """Returns counts other than 0 as text: "3,470 rows, 1 terminal row" of {"rows": 3470, "terminal_rows": 1}."""

    def named(key: str, count: int) -> str:
        name = key.replace("_", " ")
        return counted(count, re.sub("(row|episode|value)s", r"\1", name), name)

    return ", ".join(named(key, count) for key, count in counts.items() if count)


def nearest(name: str, known: Sequence[str], advice: str = "Did you mean {!r}?", otherwise: str = "") -> str:
    """Returns `advice` with the known name most like `name`, or `otherwise` where none is like it."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return advice.format(near[0]) if near else otherwise


def first_line(error: Exception) -> str:
    """Returns the first line of a library error's message."""
    return str(error).strip().split("\n")[0]


class ReagentLiteError(Exception):
    """Base of all errors a user can cause or meet.

    Attributes:
        title: first line of the message.
        exit_code: the command's exit code.
    """

    title = "error"
    exit_code = 1

    def __init__(self, problems: Problem | Iterable[Problem]) -> None:
        self.problems = (problems,) if isinstance(problems, Problem) else tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class ConfigError(ReagentLiteError):
    """The JSON, a `--set` or the command line is wrong; holds every fault found, not only the first."""

    title = "config error"
    exit_code = 2


class FolderInUseError(ConfigError):
    """Another live run writes into the folder; the same command may work once that one has ended."""

    title = "folder in use"
    exit_code = 5


class DataError(ReagentLiteError):
    """A data or normalization file is wrong; `where` names the file and, where there is one, the line."""

    title = "data error"
    exit_code = 2


def raise_any(problems: Sequence[Problem], error: type[ReagentLiteError] = DataError) -> None:
    """Raises the first MAX_PROBLEMS problems, if there are any, and the number of the others."""
    if len(problems) > MAX_PROBLEMS:
        more = Problem(problems[0].where, "no further problem", f"{len(problems) - MAX_PROBLEMS} more")
        problems = [*problems[:MAX_PROBLEMS], more]
    if problems:
        raise error(problems)


def lacking(extra: str) -> str:
    """Returns which packages of an extra are not installed, as text; "" where all are."""
    return ", ".join(name for name in EXTRAS[extra] if not installed(name))


def installed(package: str) -> bool:
    """Returns whether a package can be imported; a mere folder of its name, such as ./wandb of W&B's runs, cannot."""
    found = find_spec(package)
    return found is not None and found.origin is not None


def install(extra: str) -> str:
    """Returns the command that installs an extra."""
    return f"pip install 'reagent-lite[{extra}]'"


@contextmanager
def needing(extra: str, where: str, otherwise: str = "", error: type[ReagentLiteError] = ConfigError) -> Iterator[None]:
    """Raises `error`, with how an extra is installed, where one of its packages is missing or the block cannot import.

    Args:
        extra: the extra's name.
        where: what needs it, such as a key of the config.
        otherwise: what can be done instead of installing it.
        error: the error's class.
    """

    def problem(got: str) -> Problem:
        return Problem(where, f"the packages of the extra {extra}", got, f"Run: {install(extra)}{otherwise}")

    if missing := lacking(extra):
        raise error(problem(f"no {missing}"))
    try:
        yield
    except ImportError as reason:
        raise error(problem(first_line(reason))) from reason


class NoRowsError(DataError):
    """The data can be read and has no rows, which is legal on one of several machines."""


class BundleError(ReagentLiteError):
    """An exported model or checkpoint is altered, incomplete, or fails its check."""

    title = "bundle error"
    exit_code = 2


class KernelBuildError(ReagentLiteError):
    """An environment does not compile; `got` has the compiler's message."""

    title = "environment cannot be compiled"
    exit_code = 2


class NoCompilerError(KernelBuildError):
    """This machine has no compiler for environments; another machine may have one."""


class SimulationError(ReagentLiteError):
    """An environment is unknown, does not fit into memory, or was given an action it does not have."""

    title = "simulation error"
    exit_code = 2


class DivergenceError(ReagentLiteError):
    """The loss is no longer a number; no model is written."""

    title = "training diverged"
    exit_code = 1


class RendezvousError(ReagentLiteError):
    """The processes of a run did not find each other."""

    title = "rendezvous failed"
    exit_code = 3


class PeerError(ReagentLiteError):
    """Another process of this run failed; `got` has its reason."""

    title = "a peer failed"
    exit_code = 4


class UnavailableError(PeerError):
    """A folder that the run has used is away, read-only or full; the same command may work once it is back."""

    title = "folder not available"


class CheckpointError(ReagentLiteError):
    """The state at the end of training cannot be saved; the previous checkpoint is still there."""

    title = "checkpoint error"
    exit_code = 1


class Preempted(BaseException):
    """A signal ended the run early; `kept` is what the same command continues from.

    A signal handler may raise it anywhere. Like KeyboardInterrupt it is not an Exception, so that no code handles it.
    """

    title = "stopped by a signal"
    exit_code = 75  # EX_TEMPFAIL of sysexits.h: try again later

    def __init__(self, signal: str, kept: str) -> None:
        super().__init__(f"{signal or 'a signal to another process'}: {kept}")
