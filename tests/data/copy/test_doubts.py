"""Warnings of features that reveal the reward, and of rewards that belong to another row."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from reagent_lite.data.copy.doubts import doubts
from reagent_lite.data.copy.prepared_copy import prepare_training_copy
from reagent_lite.data.copy.training_copy import TrainingCopy
from reagent_lite.data.logs import Log

ROWS = 2_000


def log(seed: int = 0) -> pd.DataFrame:
    """Returns single decisions; action b earns more."""
    rng = np.random.default_rng(seed)
    age = rng.normal(size=ROWS)
    second = rng.random(ROWS) < 0.3
    return pd.DataFrame({
        "age": age,
        "noise": rng.normal(size=ROWS),
        "action": np.where(second, "b", "a"),
        "action_probability": np.where(second, 0.3, 0.7),
        "reward": 0.5 * age + second + rng.lognormal(size=ROWS),
    })  # fmt: skip


def copy_of(frame: pd.DataFrame, folder: Path) -> TrainingCopy:
    features = [name for name in frame if name not in ("action", "action_probability", "reward")]
    return prepare_training_copy(
        Log(frame, actions=("a", "b"), directory=str(folder), columns={"state_features": features})
    )


def test_an_honest_log_is_not_doubted(tmp_path: Path) -> None:
    assert all(doubts(copy_of(log(seed), tmp_path)) == () for seed in range(3))


@pytest.mark.parametrize("kind", ["outcome", "flag", "weight", "text"])
def test_a_feature_that_reveals_the_reward(kind: str, tmp_path: Path) -> None:
    frame = log()
    rng = np.random.default_rng(1)
    if kind != "outcome":
        frame["reward"] = (frame["reward"] > 3).astype(float)
    frame["revealing"] = {
        "outcome": 1.2 * frame["reward"] + 0.05 * rng.normal(size=ROWS),
        "flag": frame["reward"],
        "weight": np.where(frame["reward"] > 0, 1.0, 10.0),
        "text": np.where(frame["reward"] > 0, "paid", "open"),
    }[kind]
    (sentence,) = doubts(copy_of(frame, tmp_path))
    assert "explain nearly all differences of rewards: revealing (" in sentence
    assert "age" not in sentence


@pytest.mark.parametrize(("shift", "where"), [(1, "after"), (-1, "before")])
def test_rewards_that_shift_by_a_row(shift: int, where: str, tmp_path: Path) -> None:
    frame = log()
    frame["reward"] = np.roll(frame["reward"], shift)
    (sentence,) = doubts(copy_of(frame, tmp_path))
    assert f"on that of the row {where} it" in sentence


def test_notes_of_a_copy_have_its_doubts(tmp_path: Path) -> None:
    frame = log()
    frame["revealing"] = frame["reward"]
    assert "revealing" in " ".join(copy_of(frame, tmp_path).notes)
