"""Errors with location, expectation, actual value and advice."""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec

MAX_PROBLEMS = 20
"""Largest number of faults in a message; further faults are counted."""
MAX_NAMES = 10
"""Largest number of names in a message."""
EXTRAS = {
    "compiler": ("ziglang",),
    "cuda": ("pycuda",),
    "data": ("pandas", "pyarrow", "scipy", "lightgbm"),
    "gymnasium": ("gymnasium",),
    "minari": ("minari", "h5py", "PIL"),
    "pictures": ("PIL",),
    "report": ("tensorboard",),
    "serve": ("fastapi", "uvicorn", "prometheus_client", "pyarrow"),
    "spark": ("pyspark",),
    "tracking": ("mlflow", "wandb"),
}
"""Packages of each extra of the distribution."""


_CONTROL = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    r"""Returns text with control characters, but tabs and line ends, as escapes such as \x1b, for terminals and tables.

    Those that turn the direction of writing are among them.
    """
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


@dataclass(frozen=True, slots=True)
class Problem:
    """An error at a boundary: a JSON key, a line of a file, a peer, a file of a bundle.

    Attributes:
        where: the place.
        expected: the expected value; "" if `got` is a sentence that compares nothing.
        got: the value found.
        todo: advice.
    """

    where: str
    expected: str
    got: str
    todo: str = ""

    @classmethod
    def stating(cls, where: str, sentence: str, todo: str = "") -> "Problem":
        """Returns a problem that is said in a sentence, such as "no such file"."""
        return cls(where, "", sentence, todo)

    @property
    def fault(self) -> str:
        """The problem without its advice."""
        stated = f"expected {self.expected}, got {self.got}" if self.expected else self.got
        return printable(f"{self.where}: {stated}")

    def __str__(self) -> str:
        return f"{self.fault}. {self.todo}" if self.todo else self.fault


def pluralize(number: int, singular: str, plural: str = "") -> str:
    """Returns a number with its noun, as in "1 row" and "3,470 rows".

    Args:
        number: the number.
        singular: noun after 1.
        plural: noun after all other numbers; by default `singular` with s or es.
    """
    if number == 1:
        return f"1 {singular}"
    return f"{number:,} {plural or singular + ('es' if singular.endswith('s') else 's')}"


def join_names(names: Iterable[object]) -> str:
    """Returns names as text, "a, b"; after MAX_NAMES names the number of further ones, as in "and 714 more"."""
    texts = [str(name) for name in names]
    more = f" and {len(texts) - MAX_NAMES:,} more" if len(texts) > MAX_NAMES else ""
    return f"{', '.join(texts[:MAX_NAMES])}{more}"


def named_counts(counts: Mapping[str, int]) -> str:
    """Returns nonzero counts as text: "3,470 rows, 1 terminal row" for {"rows": 3470, "terminal_rows": 1}."""

    def name_count(key: str, count: int) -> str:
        name = key.replace("_", " ")
        return pluralize(count, re.sub("(row|episode|value|state)s", r"\1", name), name)

    return ", ".join(name_count(key, count) for key, count in counts.items() if count)


def suggest_nearest(name: str, names: Sequence[str], advice: str = "Did you mean {!r}?", otherwise: str = "") -> str:
    """Returns `advice` with the name most similar to `name`, or `otherwise` if no name is similar."""
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return advice.format(near[0]) if near else otherwise


def first_line(error: Exception) -> str:
    """Returns the first line of a library error's message."""
    return str(error).strip().split("\n")[0]


class ReagentLiteError(Exception):
    """Base of all errors that a user can cause or see.

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
    """The JSON, a `--set` or the command line is wrong; lists all faults, not only the first."""

    title = "config error"
    exit_code = 2


class FolderInUseError(ConfigError):
    """Another live run writes into the folder; the same command may work once that run has ended."""

    title = "folder in use"
    exit_code = 5


class DataError(ReagentLiteError):
    """A data or normalization file is wrong; `where` has the file and, if known, the line."""

    title = "data error"
    exit_code = 2


def raise_any(problems: Sequence[Problem], error: type[ReagentLiteError] = DataError) -> None:
    """Raises an error if there are problems, with the first MAX_PROBLEMS and the number of further ones."""
    if len(problems) > MAX_PROBLEMS:
        more = Problem.stating(problems[0].where, f"{len(problems) - MAX_PROBLEMS} more problems")
        problems = [*problems[:MAX_PROBLEMS], more]
    if problems:
        raise error(problems)


def lacking(extra: str) -> str:
    """Returns the missing packages of an extra as text; "" if all are installed."""
    return ", ".join(name for name in EXTRAS[extra] if not is_installed(name))


def is_installed(package: str) -> bool:
    """Returns whether a package can be imported; false for a folder of that name, such as W&B's ./wandb."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def install(extra: str) -> str:
    """Returns the command that installs an extra."""
    return f"pip install 'reagent-lite[{extra}]'"


@contextmanager
def needing(extra: str, where: str, otherwise: str = "", error: type[ReagentLiteError] = ConfigError) -> Iterator[None]:
    """Raises `error`, with the command that installs an extra, if the extra or an import in the block is missing.

    Args:
        extra: name of the extra.
        where: user of the extra, such as a key of the config.
        otherwise: alternative to installing it.
        error: class of the error.
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
    """The data can be read but has no rows, which is allowed on one of several machines."""


class BundleError(ReagentLiteError):
    """An exported model or checkpoint was altered, is incomplete, or fails its check."""

    title = "bundle error"
    exit_code = 2


class KernelBuildError(ReagentLiteError):
    """An environment does not compile; `got` has the compiler's message."""

    title = "environment cannot be compiled"
    exit_code = 2


class NoCompilerError(KernelBuildError):
    """This machine has no compiler for environments; another machine may have one."""


class SimulationError(ReagentLiteError):
    """An environment is unknown, does not fit into memory, or got an action it does not have."""

    title = "simulation error"
    exit_code = 2


class DivergenceError(ReagentLiteError):
    """The loss is no longer a number; no model is written."""

    title = "training diverged"


class RendezvousError(ReagentLiteError):
    """The processes of a run did not find each other."""

    title = "rendezvous failed"
    exit_code = 3


class PeerError(ReagentLiteError):
    """Another process of this run failed; `got` has its reason."""

    title = "a peer failed"
    exit_code = 4


class UnavailableError(PeerError):
    """A folder of the run is missing, read-only or full; the same command may work once it is available again."""

    title = "folder not available"


class Preempted(BaseException):
    """A signal ended the run early; `kept` says which results were kept and how the same command goes on.

    A signal handler may raise it anywhere. Like KeyboardInterrupt it is not an Exception, so that `except Exception`
    does not catch it.
    """

    title = "stopped by a signal"
    exit_code = 75  # EX_TEMPFAIL of sysexits.h: try again later

    def __init__(self, signal: str, kept: str) -> None:
        super().__init__(f"{signal or 'a signal to another process'}: {kept}")
