"""Processor time against the size of a log: reading, an epoch and an evaluation, with charts for docs/scaling.md.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.scaling [--rows 100000] [--largest 1000000] [--only rows,features]
                                                         [--write]

A Parquet log of events with 8 features, 4 actions, episodes of 10 rows; one of rows, features, actions and episodes
varies (`rows` up to `--largest`, the others at `--rows` rows). Seconds are those of the processor, user and system with
child processes, as other programs share the machine. Steps:

reading     from the log to the finished training copy
epoch       double DQN, 128-64, minibatch 1024: the difference of a run of one epoch and of one that sees a million rows
            more, per epoch, after a run that has normalized the copy
evaluation  workflows.evaluate of probabilities in a column, all rows scored; the copy stands already

An exponent is the slope of log seconds against log size, by least squares over all sizes and between the last two.
`--write` replaces docs/scaling/*.svg. Processes against each other: `tests.benchmarks.cluster --only scaling`.
"""

import contextlib
import io
import logging
import math
import os
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from reagent_lite.config import DqnConfig, check
from reagent_lite.config.evaluate_config import EvaluateConfig
from reagent_lite.data.copy.prepared_copy import prepare_training_copy
from reagent_lite.distributed.group import Group, ProcessRanks
from reagent_lite.run.runner import train
from reagent_lite.run.stages import log_of
from reagent_lite.tasks.evaluate import evaluate
from tests.benchmarks.turns import ROOT, options_of, show

Seconds = dict[str, list[float]]
SHAPE = {"features": 8, "actions": 4}
STEPS_OF_EPISODE = 10
COLORS = {"reading": "#0072b2", "epoch": "#d55e00", "evaluation": "#009e73"}


def write_log(file: Path, rows: int, features: int, actions: int, episodes: int) -> list[str]:
    """Writes events of a random logger, and returns the names of the features."""
    rng = np.random.default_rng(0)
    fields = [f"f{number}" for number in range(features)]
    episode = np.arange(rows) * episodes // rows
    first = np.searchsorted(episode, np.arange(episodes))
    probability = rng.uniform(0.5, 1.5, rows) / actions
    table = {field: rng.normal(size=rows).astype(np.float32) for field in fields} | {
        "mdp_id": pa.array(episode.astype(str)),
        "sequence_number": np.arange(rows) - first[episode],
        "action": pa.array(rng.integers(0, actions, rows).astype(str)),
        "reward": rng.normal(size=rows).astype(np.float32),
        "action_probability": np.full(rows, 1 / actions),
        "wanted": probability,
        "terminal": np.append(episode[1:] != episode[:-1], True),
    }
    pq.write_table(pa.table(table), file)
    return fields


def processor_seconds(work: Callable[[], object]) -> float:
    """Returns the processor seconds of a call in this process and in its ended children."""
    start = sum(os.times()[:4])
    with contextlib.redirect_stderr(io.StringIO()):
        work()
    return sum(os.times()[:4]) - start


def seconds_of(rows: int, episodes: int, *, features: int, actions: int) -> dict[str, float]:
    """Returns the seconds of each step on a log of this shape."""
    with tempfile.TemporaryDirectory() as name:
        file = Path(name, "log.parquet")
        fields = write_log(file, rows, features, actions, episodes)
        names = [str(number) for number in range(actions)]
        tree: dict[str, Any] = {
            "training_data_path": str(file), "model_output_path": f"{name}/out", "use_gpu": False, "actions": names,
            "data": {"training_copy_dir": f"{name}/copy", "columns": {"state_features": fields}},
            "training": {"layers": [-1, 128, 64, -1], "minibatch_size": 1024},
            "rainbow": {"dueling_architecture": False},
            "evaluation": {"calc_cpe_in_training": False, "bootstrap_resamples": 100, "max_episodes": 100,
                           "models": {"final_fit_passes": 1}},
        }  # fmt: skip
        policy = check(EvaluateConfig, {
            "model": "column:wanted", "data_path": str(file), "actions": names, "gamma": 0.99,
            "output_path": f"{name}/evaluation.json", "columns": {"state_features": fields},
            "training_copy_dir": f"{name}/evaluated", "evaluation": {"max_episodes": 2**31},
        })  # fmt: skip

        def run(epochs: int) -> float:
            config = check(DqnConfig, {**tree, "epochs": epochs})
            return processor_seconds(lambda: train(config, Group(ProcessRanks(), torch.device("cpu"))))

        config = check(DqnConfig, tree)
        reading = processor_seconds(lambda: prepare_training_copy(log_of(config, str(file), None, 0, 1)))
        more = max(2, 1_000_000 // rows)
        run(1)  # normalizes the copy
        with_one = run(1)
        epoch = (run(1 + more) - with_one) / more
        evaluate(policy)  # makes its copy
        return {"reading": reading, "epoch": epoch, "evaluation": processor_seconds(lambda: evaluate(policy))}


def slope(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """Returns the exponent of seconds as a power of sizes, by least squares of logarithms."""
    return statistics.linear_regression([math.log(size) for size in sizes], [math.log(s) for s in seconds]).slope


def exponents(sizes: Sequence[int], seconds: Seconds) -> dict[str, str]:
    """Returns each step's exponent over all sizes, and between the last two."""
    return {
        step: f"{slope(sizes, values):.2f}, at the end {slope(sizes[-2:], values[-2:]):.2f}"
        for step, values in seconds.items()
    }


def draw(file: Path, axis: str, sizes: Sequence[int], seconds: Seconds) -> None:
    """Writes a chart with two logarithmic axes; a dashed line is in proportion to the size."""
    every = [value for values in seconds.values() for value in values]
    low = math.floor(math.log10(min(every)))
    high = math.ceil(math.log10(max(every)))
    width = math.log10(sizes[-1] / sizes[0])

    def x(size: float) -> float:
        return 52 + 280 * math.log10(size / sizes[0]) / width

    def y(value: float) -> float:
        return 210 - 180 * (math.log10(value) - low) / (high - low)

    svg = ElementTree.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "viewBox": "0 0 440 250", "width": "440",
                                      "font-family": "sans-serif", "font-size": "11"})  # fmt: skip

    def add(tag: str, text: str = "", **attributes: object) -> None:
        shown = {name.replace("_", "-"): f"{value:.1f}" if isinstance(value, float) else str(value)
                 for name, value in attributes.items()}  # fmt: skip
        ElementTree.SubElement(svg, tag, shown).text = text or None

    def line(points: Sequence[tuple[float, float]], **attributes: object) -> None:
        add("polyline", points=" ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in points), fill="none", **attributes)

    add("rect", width="100%", height="100%", fill="white")
    add("text", f"processor seconds against {axis}", x=52, y=18, font_weight="bold")
    for power in range(low, high + 1):
        add("line", x1=52, x2=332, y1=y(10**power), y2=y(10**power), stroke="#ddd")
        add("text", f"{10**power:g}", x=46, y=y(10**power) + 4, text_anchor="end")
    for size in sizes:
        add("text", f"{size:,}", x=x(size), y=228, text_anchor="middle")
    top = max(values[-1] for values in seconds.values())
    begin = max(sizes[0], sizes[-1] * 10**low / top)
    line([(begin, top * begin / sizes[-1]), (sizes[-1], top)], stroke="#888", stroke_dasharray="4 4")
    for step, values in seconds.items():
        line(list(zip(sizes, values, strict=True)), stroke=COLORS[step], stroke_width=2)
        for size, value in zip(sizes, values, strict=True):
            add("circle", cx=x(size), cy=y(value), r=3, fill=COLORS[step])
        add("text", step, x=340, y=y(values[-1]) + 4, fill=COLORS[step])
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"{ElementTree.tostring(svg, encoding='unicode')}\n")


def cases(rows: int, largest: int) -> Mapping[str, Mapping[int, dict[str, int]]]:
    """Returns the shape of each log by axis and size."""
    episodes = rows // STEPS_OF_EPISODE
    base = {"rows": rows, "episodes": episodes, **SHAPE}
    return {
        "rows": {
            size: {**base, "rows": size, "episodes": size // STEPS_OF_EPISODE}
            for size in (largest // 10, largest * 3 // 10, largest)
        },
        "features": {size: {**base, "features": size} for size in (8, 32, 128)},
        "actions": {size: {**base, "actions": size} for size in (4, 16, 64)},
        "episodes": {size: {**base, "episodes": size} for size in (rows // 100, episodes, rows)},
    }


if __name__ == "__main__":
    options = options_of(__doc__, rows=100_000, largest=1_000_000, only="rows,features,actions,episodes",
                         write=False)  # fmt: skip
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    seconds_of(2_000, 200, **SHAPE)  # imports and first calls
    for axis, shapes in cases(options.rows, options.largest).items():
        if axis not in options.only.split(","):
            continue
        figures = [seconds_of(**shape) for shape in shapes.values()]
        seconds = {step: [each[step] for each in figures] for step in COLORS}
        show({axis: {
            "sizes": list(shapes),
            "seconds": {step: [round(value, 3) for value in values] for step, values in seconds.items()},
            "exponents": exponents(list(shapes), seconds),
        }})  # fmt: skip
        if options.write:
            draw(ROOT / f"docs/scaling/{axis}.svg", axis, list(shapes), seconds)
