"""From the clinicians' log of ICU-Sepsis to a better policy, whose exact value is known; see oracles/icu_sepsis.py."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.runs import ROOT, Runner
from oracles import icu_sepsis
from oracles.icu_sepsis import NUM_EPISODES, NUM_LIVING, exact_value, sepsis

from reagent_lite.export import load_bundle


def test_values_and_lengths_are_the_published_ones() -> None:
    """learning.md's three values; the package's README: 9.45, 9.22 and 10.99 rows an episode, averages of its runs."""
    policies = (icu_sepsis.uniform_policy(), sepsis().clinicians, icu_sepsis.optimal_policy())
    assert [exact_value(policy) for policy in policies] == pytest.approx([0.78007, 0.78184, 0.87514], abs=5e-6)
    assert [icu_sepsis.mean_length(policy) for policy in policies] == pytest.approx([9.45, 9.22, 10.99], abs=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_bcq_finds_a_policy_better_than_the_clinicians(seed: int, run: Runner, tmp_path: Path) -> None:
    """learning.md's bar: at least 0.81, where the log's own policy has 0.782 and the constraint makes the difference.

    The value is that of the policy that the exported model would follow, in all 713 states and with every action open.
    """
    value, unrestricted = worth(learned(run, tmp_path, seed))
    assert value >= 0.81
    assert value > unrestricted  # the largest q of all actions, likely in the log or not


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm": "crr", "crr": {"weights": "binary"}},
        {
            "algorithm": "iql",
            "iql": {"expectile": 0.9, "beta": 30.0},
        },  # returns are 0 or 1, advantages a hundredth of it
    ],
    ids=["crr", "iql"],
)
def test_actors_find_one_too(changes: dict[str, Any], run: Runner, tmp_path: Path) -> None:
    """The greedy choice of the actor; tests/benchmarks/RESULTS.md has more seeds beside BCQ and CQL."""
    assert worth(learned(run, tmp_path, 0, rainbow={"dueling_architecture": False}, **changes))[0] >= 0.81


def learned(run: Runner, folder: Path, seed: int, **changes: Any) -> Path:
    """Draws a log where configs/icu_sepsis/timeline.json reads it, and returns the model of its configs."""
    timeline, shard, dqn = (
        json.loads((ROOT / "configs/icu_sepsis" / f"{name}.json").read_text()) for name in ("timeline", "shard", "dqn")
    )
    log = icu_sepsis.draw_log(sepsis().clinicians, NUM_EPISODES, np.random.default_rng(seed))
    icu_sepsis.write_events(folder / timeline["timeline"]["inputTableName"], log)
    paired = run("timeline", timeline).ok
    fetched = run("shard", shard, "--num_nodes", "1", "--node_index", "0")
    assert (fetched.code, fetched.outcome["rows"]) == (0, [paired.outcome["train_rows"]]), fetched.err
    return folder / run("dqn", dqn | {"seed": seed} | changes, timeout=500).ok.outcome["model"]


def worth(model: Path) -> list[float]:
    """Returns the exact value of the exported model's greedy choice, and of the largest q without its restriction."""
    prediction = load_bundle(model).predict(np.arange(NUM_LIVING, dtype=np.float32)[:, None])
    return [exact_value(icu_sepsis.greedy_policy(actions)) for actions in (prediction.greedy, prediction.q.argmax(1))]
