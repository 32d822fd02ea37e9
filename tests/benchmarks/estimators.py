"""Every estimator on a page with 2000 resamples, against one pass of the direct method (DM) over the same page.

    python -m tests.benchmarks.estimators [--rows 1000000] [--repeats 5] [--threads 1]
                                          [--peak_of rows,longest,outcomes: memory alone, in this process]

Pages of so many rows and ten choices, of a log drawn at random: one outcome or three, episodes of 1 to 39 rows (mean
20), no cap on episodes; the config's own limit, 10 000 episodes; and episodes of 1 to 1000 rows, or of one. A pass of
DM is what the product computes for it and nothing else: mean(sum_a pi(a) r_hat(a)) in float64 from the page's columns
`model_propensities` and `reward_model`, one outcome after the other, by rl.td.expected_value. `dot` is the same sum as
one dot product of the two columns, the least that a program can do (with several outcomes it copies). These and
`evaluate_page` (estimates with intervals, overlap and verdicts) take turns on the same number of threads; medians of
wall-clock time, and of the process's processor time, which other work on the machine disturbs less. Peak memory is that
of `evaluate_page` alone in a process of its own: the rise of the resident set's high-water mark (VmHWM, reset
beforehand) over the resident set with the page, as a share of the bytes of the page's columns.
"""

import json
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import fields
from operator import truediv
from pathlib import Path

import torch

from reagent_lite.config.evaluation import EvaluationConfig
from reagent_lite.evaluation.cpe import PageSettings, evaluate_page
from reagent_lite.evaluation.evaluation_rows import EvaluationRows
from reagent_lite.rl.td import expected_value
from tests.benchmarks.turns import options_of, run, show

CHOICES = 10
CONFIG = EvaluationConfig(max_episodes=2**40)


def make_page(rows: int, longest: int, outcomes: int) -> EvaluationRows:
    """Episodes of 1 to `longest` rows, uniformly; logged uniformly, evaluated policy within a factor of it."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    lengths = torch.randint(1, longest + 1, (rows,), generator=generator)
    policy = (0.3 * normal(rows, CHOICES)).softmax(1)
    return EvaluationRows(
        names=("Reward", *(f"metric_{number}" for number in range(1, outcomes))),
        episode=torch.arange(rows).repeat_interleave(lengths)[:rows].clone(),
        action=torch.randint(CHOICES, (rows,), generator=generator),
        mask=torch.ones(rows, CHOICES, dtype=torch.bool),
        steps=torch.ones(rows, dtype=torch.float64),
        bootstrap=torch.zeros(rows, dtype=torch.float64),
        propensity=torch.full((rows,), 1 / CHOICES, dtype=torch.float64),
        model_propensities=policy,
        outcomes=normal(rows, outcomes) + 1,
        reward_model=normal(rows, CHOICES, outcomes) + 1,
        q_values=normal(rows, CHOICES, outcomes) + 10,
        next_value=torch.zeros(rows, outcomes, dtype=torch.float64),
    )


def direct_pass(page: EvaluationRows) -> None:
    for target in range(len(page.names)):
        expected_value(page.reward_model[:, :, target], page.model_propensities).mean()


def dot_pass(page: EvaluationRows) -> None:
    for target in range(len(page.names)):
        torch.dot(page.reward_model[:, :, target].flatten(), page.model_propensities.flatten()) / len(page)


def everything(page: EvaluationRows) -> None:
    evaluate_page(page, PageSettings(gamma=0.99, config=CONFIG), generator=torch.Generator().manual_seed(0))


def seconds(work: Callable[[EvaluationRows], None], page: EvaluationRows) -> tuple[float, float]:
    """Returns wall-clock and processor time."""
    start, busy = time.perf_counter(), time.process_time()
    work(page)
    return time.perf_counter() - start, time.process_time() - busy


def measured(page: EvaluationRows, repeats: int) -> dict[str, object]:
    everything(make_page(1000, 3, len(page.names)))
    direct_pass(page)
    times = [[seconds(work, page) for work in (direct_pass, everything, dot_pass)] for _ in range(repeats)]
    direct, whole, dot = ([row[index][0] for row in times] for index in range(3))
    return {
        "rows": len(page),
        "episodes": int(page.rank[-1]) + 1,
        "direct_method_seconds": round(statistics.median(direct), 4),
        "all_estimators_seconds": round(statistics.median(whole), 3),
        "passes_of_direct_method": round(statistics.median(map(truediv, whole, direct)), 1),
        "passes_in_each_repeat": [round(a / b, 1) for a, b in zip(whole, direct, strict=True)],
        "passes_by_processor_time": round(statistics.median(row[1][1] / row[0][1] for row in times), 1),
        "passes_of_dot": round(statistics.median(map(truediv, whole, dot))),
    }


def resident(field: str) -> int:
    """Returns VmRSS or VmHWM in bytes."""
    return int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


def peak(page: EvaluationRows) -> dict[str, object]:
    """Peak memory of `evaluate_page` beyond the page; for a process that does nothing else."""
    everything(make_page(1000, 3, len(page.names)))  # libraries and thread pools
    size = sum(getattr(page, f.name).nbytes for f in fields(page) if f.name != "names")
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    everything(page)
    beyond = resident("VmHWM") - before
    return {
        "page_megabytes": round(size / 1e6),
        "megabytes_beyond_page": round(beyond / 1e6),
        "times_page": round(1 + beyond / size, 2),
    }


def peak_of(rows: int, longest: int, outcomes: int, threads: int) -> dict[str, object]:
    return json.loads(
        run("-m", "tests.benchmarks.estimators", "--peak_of", f"{rows},{longest},{outcomes}", "--threads", threads).out
    )


if __name__ == "__main__":
    options = options_of(__doc__, rows=1_000_000, repeats=5, threads=torch.get_num_threads(), peak_of="")
    torch.set_num_threads(options.threads)
    rows = options.rows
    shapes = {
        "one_outcome": (rows, 39, 1),
        "three_outcomes": (rows, 39, 3),
        "default_limit": (rows // 5, 39, 1),
        "long_episodes": (rows, 1000, 1),
        "one_row_episodes": (rows // 10, 1, 1),
    }
    if options.peak_of:
        show(peak(make_page(*map(int, options.peak_of.split(",")))))
    else:
        show({
            name: measured(make_page(*shape), options.repeats) | peak_of(*shape, options.threads)
            for name, shape in shapes.items()
        })  # fmt: skip
