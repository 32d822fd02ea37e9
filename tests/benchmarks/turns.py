"""What benchmarks share: options, work that takes turns so that other programs disturb all alike, and figures."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def options_of(doc: str | None, **defaults: Any) -> argparse.Namespace:
    """Returns the options of the command line; each has the type of its default, False makes a flag."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        kind: Any = {"action": "store_true"} if default is False else {"type": type(default), "default": default}
        parser.add_argument(f"--{name}", **kind)
    return parser.parse_args()


def seconds_of(work: Callable[[], object]) -> float:
    """Returns the wall-clock time of a call."""
    return timeit.timeit(work, number=1)


def rate(work: Callable[[], object], units: float) -> float:
    """Returns units per second of calls of so many units each, made for 0.2 seconds or longer."""
    work()
    calls, seconds = timeit.Timer(work).autorange()
    return calls * units / seconds


def write_config(folder: Path, tree: Mapping[str, Any]) -> Path:
    """Writes a workflow's config to a folder, which is made, and returns the file."""
    folder.mkdir(exist_ok=True)
    file = folder / "config.json"
    file.write_text(json.dumps(tree))
    return file


@dataclass(frozen=True)
class Finished:
    """A finished process: wall-clock and processor seconds, the peak resident bytes of its largest process, and output.

    The processor's time depends less on what else the machine does.
    """

    seconds: float
    busy: float
    peak: int
    out: str

    @property
    def rows_per_second(self) -> float:
        """Of a workflow that trains."""
        return float(json.loads(self.out.splitlines()[-1])["rows_per_second"])


def run(*arguments: object, root: Path = ROOT, **environment: str) -> Finished:
    """Runs Python in the root of a tree of the project to its end; its standard error is shown if it fails."""
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, *map(str, arguments)], cwd=root, env={**os.environ, **environment}, text=True,
            stdout=subprocess.PIPE, stderr=errors,
        )  # fmt: skip
        out = process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        errors.seek(0)
        if process.returncode:
            sys.exit(errors.read()[-2000:])
    return Finished(time.perf_counter() - start, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024, out)


def in_turns(ways: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Returns the figures of each way, which are measured one after another in each repeat."""
    rounds = [{name: way() for name, way in ways.items()} for _ in range(repeats)]
    return {name: [figures[name] for figures in rounds] for name in ways}


def ratio(figures: Sequence[float], others: Sequence[float]) -> float:
    """Returns the median ratio of figures to those of the same repeats."""
    return statistics.median(figure / other for figure, other in zip(figures, others, strict=True))


def medians(figures_of: Mapping[str, Sequence[float]], digits: int) -> dict[str, float]:
    """Returns the median of each way's figures."""
    return {name: round(statistics.median(figures), digits) for name, figures in figures_of.items()}


def show(result: object) -> None:
    """Prints a result as JSON."""
    print(json.dumps(result, indent=2))


def spread(figures: Sequence[float], others: Sequence[float]) -> str:
    """Returns the median ratio of figures to those of the same repeats, with its range."""
    ratios = sorted(figure / other for figure, other in zip(figures, others, strict=True))
    return f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
