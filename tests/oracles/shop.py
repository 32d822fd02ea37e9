"""A shop's loop with known truth: a CSV, a model, what it serves, the next model; what each promises, and earns."""

import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

import reagent_lite
from reagent_lite.config.serve_config import ServeConfig
from reagent_lite.serving.app import create_app
from reagent_lite.serving.decision_log import open_log
from reagent_lite.serving.served_model import ServedModel

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it would have httpx2, see serving/conftest.py
    from starlette.testclient import TestClient

OFFERS = ("call", "mail", "none")
_LOGGED = np.array([0.3, 0.5, 0.2])
_ROWS_OF_A_REQUEST = 250


@dataclass(frozen=True, slots=True, kw_only=True)
class Lap:
    """A model, and what became of it.

    Attributes:
        low, high: the 95 % interval that the run gives for the policy's reward: of its trustworthy estimates the
            narrowest; NaN if there is none.
        truth: expected reward of a decision of the exported policy.
        served: mean reward of the decisions that were served.
        choice: decision of the run.
    """

    low: float
    high: float
    truth: float
    served: float
    choice: str


def chances(people: pd.DataFrame) -> NDArray[np.float64]:
    """Probability [n, 3] that a person buys after each offer."""
    member = people["member"].to_numpy(float)
    age = people["age"].to_numpy()
    return np.stack((0.1 + 0.3 * (age > 50), 0.05 + 0.35 * member, np.full(len(age), 0.15)), axis=1)


def people(count: int, rng: np.random.Generator) -> pd.DataFrame:
    return pd.DataFrame({"age": rng.integers(18, 81, count), "member": rng.random(count) < 0.5})


def sold(folder: Path, count: int, rng: np.random.Generator) -> Path:
    """Writes shop.csv: offers with their propensities, and whether something was bought."""
    frame = people(count, rng)
    offer = rng.choice(3, count, p=_LOGGED)
    bought = rng.random(count) < chances(frame)[np.arange(count), offer]
    frame = frame.assign(offer=np.array(OFFERS)[offer], p=_LOGGED[offer], bought=bought.astype(int))
    frame.to_csv(folder / "shop.csv", index=False)
    return folder / "shop.csv"


def loop(folder: Path, rng: np.random.Generator, *, sold_rows: int, served_rows: int, laps: int = 3) -> Iterator[Lap]:
    """Goes from a CSV to the last model as README says, with a server in this process; yields every lap."""
    shop = sold(folder, sold_rows, rng)
    config = reagent_lite.inspect(shop).config
    assert config is not None
    logs = [str(shop)]
    for lap in range(laps):
        own = {"model_output_path": str(folder / f"{lap}"), "use_gpu": False, "seed": int(rng.integers(2**31))}
        run = reagent_lite.train(config | own, logs)
        low, high = _promised(run)
        population = people(20_000, rng)
        bundle = reagent_lite.load_bundle(run.model)
        propensities = bundle.predict_rows(population.to_dict("records")).propensities
        truth = float((propensities * chances(population)).sum(1).mean())
        served = _served(run.model, folder / "served", people(served_rows, rng), rng)
        yield Lap(low=low, high=high, truth=truth, served=served, choice=run.decision["choice"])
        logs = [str(shop), str(folder / "served")]


def _promised(run: Any) -> tuple[float, float]:
    estimates = run.estimates
    trusted = estimates[(estimates["outcome"] == "Reward") & (estimates["verdict"] == "trustworthy")]
    if not len(trusted):
        return np.nan, np.nan
    narrowest = trusted.loc[(trusted["high"] - trusted["low"]).idxmin()]
    return float(narrowest["low"]), float(narrowest["high"])


def _served(model: str, log_folder: Path, visitors: pd.DataFrame, rng: np.random.Generator) -> float:
    """Serves a decision to each visitor and reports what they buy; returns the mean reward."""
    config = ServeConfig(model=model, log=str(log_folder), seed=int(rng.integers(2**31)))
    served = ServedModel(config.model)
    earned = 0
    with ExitStack() as closing:
        log = closing.enter_context(open_log(config, choices=served.bundle.choices))
        client = closing.enter_context(TestClient(create_app(config, 0, served, log), "http://localhost"))
        for start in range(0, len(visitors), _ROWS_OF_A_REQUEST):
            some = visitors.iloc[start : start + _ROWS_OF_A_REQUEST]
            rows = [{"state_features": row} for row in some.to_dict("records")]
            decisions = client.post("/decide", json={"rows": rows}).raise_for_status().json()["decisions"]
            offers = np.array([decision["index"] for decision in decisions])
            bought = rng.random(len(some)) < chances(some)[np.arange(len(some)), offers]
            earned += int(bought.sum())
            for decision in (decision for decision, buys in zip(decisions, bought, strict=True) if buys):
                body = {"decision_id": decision["decision_id"], "reward": 1.0}
                client.post("/reward", json=body).raise_for_status()
        log.epoch += int(config.reward_seconds * 1e9)  # the time that decisions wait for rewards
        log.rotate()
    return earned / len(visitors)
