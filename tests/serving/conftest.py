"""A worker in this process, its model and its log."""

import asyncio
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from fastapi import FastAPI
from helpers.bundles import bilinear_bundle, linear_bundle

from reagent_lite.config.serve_config import ServeConfig
from reagent_lite.export import Bundle
from reagent_lite.export.bundle import ChoiceKind
from reagent_lite.feature_ids import FeatureId
from reagent_lite.item_table import ItemTable
from reagent_lite.serving.app import create_app
from reagent_lite.serving.decision_log import DecisionLog, open_log
from reagent_lite.serving.served_model import ServedModel

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it would have httpx2, which schemathesis does not use
    from starlette.testclient import TestClient

NAMES = ("mail", "call", "wait")
IDS = (3, FeatureId("age"))
ITEMS = ItemTable(ids=("tea", "milk", "12", "tea too"), feature_ids=(5, 7, 8),
                  values=np.array([[9, 1, 0], [9, 3, 0], [9, 2, -1], [9, 1, 0]], np.float32))  # fmt: skip


@dataclass(frozen=True)
class Worker:
    """A worker without a process."""

    app: FastAPI
    client: TestClient
    model: ServedModel
    log: DecisionLog
    folder: Path

    def post(self, path: str, **body: Any) -> Any:
        answer = self.client.post(path, json=body)
        assert answer.status_code in (200, 204), answer.text
        return answer.json() if answer.content else None

    def written(self) -> list[dict[str, Any]]:
        """Returns all rows of the log's files, after the time that decisions wait."""
        pass_time(self.log)
        self.log.rotate()
        return rows_of(self.folder)

    def poll(self) -> None:
        """Loads a new model, after two polls with the same files."""
        for _ in range(2):
            asyncio.run(self.model.poll())

    def refusal(self, path: str, **body: Any) -> tuple[int, dict[str, str]]:
        """Status and first problem of a request that is refused."""
        answer = self.client.post(path, json=body)
        return answer.status_code, answer.json()["problems"][0]

    def waiting_rows(self) -> list[dict[str, Any]]:
        """Decisions of the database, as a file would have them without their rewards."""
        waiting = self.log._db.execute("SELECT id, at, event, '{}' FROM decisions ORDER BY id")
        return [self.log._row(*row) for row in waiting]


Open = Callable[..., Worker]


def pass_time(log: DecisionLog, seconds: float = 3600) -> None:
    """Advances the time of a log; 3600 s are the default of reward_seconds."""
    log.epoch += int(seconds * 1e9)


def flush(folder: Path, choices: ChoiceKind = "named actions") -> None:
    """Writes all decisions of a log, those without a reward with reward 0."""
    config = ServeConfig(model="m", log=str(folder), reward_seconds=1e-6)
    with open_log(config, choices=choices) as log:
        log.rotate()


def drawn(answer: dict[str, Any]) -> list[tuple[int, float]]:
    """Index and propensity of each decision."""
    return [(decision["index"], decision["propensity"]) for decision in answer["decisions"]]


def acted(
    bundle: Bundle, rows: list[dict[str, Any]], rng: np.random.Generator, **choices: Any
) -> list[tuple[int, float]]:
    """What a bundle draws itself."""
    index, propensity = bundle.act(bundle.states([row["state_features"] for row in rows]), rng=rng, **choices)
    return list(zip(index.tolist(), propensity.tolist(), strict=True))


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [row for file in sorted(folder.glob("*.parquet")) for row in pq.read_table(file).to_pylist()]


@pytest.fixture
def named(tmp_path: Path) -> Path:
    """Model of q = (x3, age, 0), with a softmax at temperature 1."""
    return linear_bundle(tmp_path / "model", np.array([[1.0, 0], [0, 1], [0, 0]]), NAMES, IDS)


@pytest.fixture
def candidates(tmp_path: Path) -> Path:
    """Model of q_k = f7 * x3 + f8 * age."""
    return bilinear_bundle(tmp_path / "candidates", np.eye(2), IDS, (7, 8))


@pytest.fixture
def items(tmp_path: Path) -> Path:
    """The model of `candidates` with items; the last has the features of the first."""
    return bilinear_bundle(tmp_path / "items", np.eye(2), IDS, (7, 8), ITEMS)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """Opens a worker on a model; its log is tmp_path/log."""
    with ExitStack() as closing:

        def start(model: Path, **keys: Any) -> Worker:
            config = ServeConfig(**{"model": str(model), "log": str(tmp_path / "log"), "seed": 5, **keys})
            served = ServedModel(config.model, config.items)
            log = closing.enter_context(open_log(config, choices=served.bundle.choices))
            app = create_app(config, 0, served, log)
            client = closing.enter_context(TestClient(app, "http://localhost", raise_server_exceptions=False))
            return Worker(app, client, served, log, Path(config.log))

        yield start


@pytest.fixture
def worker(named: Path, opened: Open) -> Worker:
    """A worker on the model `named`."""
    return opened(named)
