"""What benchmarks share: options, work that takes turns so that other programs disturb all alike, and figures."""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def options_of(doc: str | None, **defaults: Any) -> argparse.Namespace:
    """Returns the options of the command line; each has the type of its default, False makes a flag."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        if default is False:
            parser.add_argument(f"--{name}", action="store_true")
        else:
            parser.add_argument(f"--{name}", type=type(default), default=default)
    return parser.parse_args()


def seconds_of(work: Callable[[], object]) -> float:
    """Returns the wall-clock time of a call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


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
