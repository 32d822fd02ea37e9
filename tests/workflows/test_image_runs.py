"""Images from an environment or a log to a policy: learned, judged, scored, resumed, stored as bytes, and refused."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from helpers.commands import evaluated, scored
from helpers.resuming import Laboratory, different
from helpers.roles import Roles
from helpers.runs import ALONE, ROOT, Tree, checked, merged, trained
from oracles import catch

from reagent_lite.config import check
from reagent_lite.config.simulate_config import SimulateConfig
from reagent_lite.data.copy.prepared_copy import prepare_training_copy
from reagent_lite.data.logs import Log
from reagent_lite.distributed.launcher import Processes
from reagent_lite.errors import ConfigError, DataError, ReagentLiteError
from reagent_lite.export import load_bundle
from reagent_lite.run.dry_run import dry_run
from reagent_lite.tasks.simulate import simulate
from reagent_lite.types import Image

ACTIONS = ("0", "1", "2")
SMALL = {"cells": 5, "pixels": 1}
SAMPLES = ("online", "simulate", "dqn")
pytestmark = pytest.mark.filterwarnings(r"ignore:`torch\.jit\.:DeprecationWarning")


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def online(out: Path, **sections: Any) -> Tree:
    """A short run in Catch on a board of 5 x 5 pixels."""
    tree: Tree = {
        "model_output_path": str(out), "use_gpu": False,
        "rl": {"gamma": 0.9, "epsilon": 0.05, "softmax_policy": 0, "target_update_rate": 0.1},
        "training": {"minibatch_size": 32, "layers": [-1, 16, 1], "activations": ["relu", "linear"], "l2_decay": 0.0},
        "simulation": {
            "env": "gymnasium:oracles.catch:Catch-v0", "env_parameters": SMALL, "num_envs": 4, "total_steps": 400,
            "num_evaluations": 2, "evaluation_episodes": 8, "warmup_steps": 100, "replay": {"capacity": 400},
        },
    }  # fmt: skip
    return merged(tree, sections)


def log_at(file: Path, *, rows: int = 800, **keys: Any) -> Path:
    tree = {"env": "gymnasium:oracles.catch:Catch-v0", "env_parameters": SMALL, "rows": rows, "use_gpu": False, **keys}
    simulate(check(SimulateConfig, {"output_path": str(file), **tree}))
    return file


def logged(log: Path, out: Path, **sections: Any) -> Tree:
    tree: Tree = {
        "defaults": "2026", "training_data_path": str(log), "model_output_path": str(out), "use_gpu": False,
        "actions": list(ACTIONS), "epochs": 2, "rl": {"gamma": 0.9, "epsilon": 0.05, "softmax_policy": 0},
        "training": {"layers": [-1, 16, 1], "activations": ["relu", "linear"]},
        "data": {"image": {"shape": [5, 5, 1]}},
    }  # fmt: skip
    return merged(tree, sections)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("online")
    trained(online(folder, simulation={"total_steps": 200}))
    return folder / "model"


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return log_at(tmp_path_factory.mktemp("log") / "log.parquet", rows=400)


@pytest.mark.parametrize(("layout", "shape"), [("chw", (1, 5, 5)), slow("hwc", (5, 5, 1)), slow("hw", (5, 5))])
def test_an_environment_s_images_are_found_learned_from_and_exported(
    tmp_path: Path, layout: str, shape: tuple[int, ...]
) -> None:
    trained(online(tmp_path, simulation={"env_parameters": {**SMALL, "layout": layout}}))
    model = load_bundle(tmp_path / "model")
    assert model.image_shape == shape
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["data"]["image"]["shape"] == list(shape)
    # torch's file of 2019's rules, onnxruntime and both forms of a batch agree on all positions
    env = catch.Catch(**SMALL, layout=layout)  # type: ignore[arg-type]
    images = np.stack(
        [_picture(env, row, ball, paddle) for row in range(4) for ball in range(5) for paddle in range(5)]
    )
    q = model.predict(images).q
    names, restored = torch.jit.load(tmp_path / "model" / "model.torchscript")(torch.from_numpy(images))  # type: ignore[no-untyped-call]
    assert tuple(names) == ACTIONS
    np.testing.assert_allclose(restored.detach().numpy(), q, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(model.predict_rows(images.tolist()).q, q)


def _picture(env: catch.Catch, row: int, ball: int, paddle: int) -> np.ndarray:
    env.row = row
    env.ball = ball
    env.paddle = paddle
    return env.picture()


def test_resumed_runs_are_equal(tmp_path: Path) -> None:
    laboratory = Laboratory(online(tmp_path, simulation={"total_steps": 200}), ALONE, tmp_path)
    ends = laboratory.resume_twice(9)
    assert different(*ends) == []


@pytest.mark.slow
def test_resumed_runs_on_a_log_are_equal(tmp_path: Path, log: Path) -> None:
    laboratory = Laboratory(logged(log, tmp_path), ALONE, tmp_path)
    whole = laboratory.run("of_log", every_steps=1, keep=1000)
    laboratory.copy("of_log", "later", 3)
    assert different(whole, laboratory.run("later")) == []


@pytest.mark.parametrize(("form", "rows_of"), [("jsonl.gz", "events"), ("arrow", "transitions")])
def test_a_simulated_log_is_bytes_in_every_format(tmp_path: Path, form: str, rows_of: str) -> None:
    file = log_at(tmp_path / f"log.{form}", rows=50, format=rows_of)
    copy = prepare_training_copy(Log(str(file), actions=ACTIONS, image=Image(shape=(5, 5, 1))))
    states = np.asarray(copy.state)
    assert states.dtype == np.uint8
    assert (np.sort(states, axis=1)[:, :-2] == 0).all()  # a ball and a paddle
    assert set(np.unique(states)) == {0, catch.PADDLE, catch.BALL}
    assert len(states) == len(copy)  # every next state is the next row's, or the episode has ended
    assert copy.state.nbytes == 25 * len(copy)


def test_a_log_trains_a_model_that_is_evaluated_and_scores(tmp_path: Path, log: Path) -> None:
    outcome = trained(logged(log, tmp_path / "out"))
    assert "CPE/Reward/Fitted_Q_Evaluation" in outcome.scores
    model = tmp_path / "out" / "model"
    assert "An image of shape [5, 5, 1]" in (model / "MODEL_CARD.md").read_text()
    assert "states are images" in (tmp_path / "out" / "report.html").read_text()
    later = log_at(tmp_path / "later.parquet", rows=200, seed=3)
    _, report = evaluated(model, str(later), tmp_path / "report" / "e.json", gamma=0.9, against="uniform")
    assert {"model", "against"} <= report.keys()
    _, table = scored(model, later, tmp_path / "scores.parquet", policy="greedy")
    rows = pa.parquet.read_table(later)
    expected = load_bundle(model).predict_rows(rows["state_features"].to_pylist())
    assert table["index"].to_pylist() == expected.greedy.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["crr", "iql"])
def test_other_learners_read_images(tmp_path: Path, log: Path, algorithm: str) -> None:
    changed = logged(log, tmp_path / "out", algorithm=algorithm, rl={"softmax_policy": 1}, epochs=1)
    trained(changed)
    assert load_bundle(tmp_path / "out" / "model").image_shape == (5, 5, 1)


@pytest.mark.slow
def test_logged_and_simulated_rows_together(tmp_path: Path, log: Path) -> None:
    simulation = merged(online(tmp_path)["simulation"], {"share": 0.5})
    del simulation["total_steps"], simulation["num_evaluations"]
    trained(logged(log, tmp_path / "out", simulation=simulation, epochs=1, defaults="2019"))
    assert load_bundle(tmp_path / "out" / "model").image_shape == (5, 5, 1)


@pytest.mark.slow
def test_a_learner_reads_the_images_of_collectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'tests'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    roles = Roles(tmp_path)
    env = {"env": "gymnasium:oracles.catch:Catch-v0", "env_parameters": SMALL}
    changes = {"simulation": {**env, "num_envs": 4, "total_steps": 2000, "warmup_steps": 400}}
    try:
        learner = roles.start("learn", changes)
        roles.start("collect", changes)
        roles.end(learner)
    finally:
        roles.stop()
    assert load_bundle(tmp_path / "out" / "model").image_shape == (5, 5, 1)


def test_a_dry_run_counts_the_parameters_of_convolutions(tmp_path: Path, log: Path) -> None:
    """Twice 16 filters of 3 x 3 and a bias, 16 units of 3 x 3 x 16 and three values: of the network and its target."""
    config = checked(logged(log, tmp_path / "out", defaults="2019", rainbow={"dueling_architecture": False}))
    prepare_training_copy(Log(str(log), actions=ACTIONS, image=Image(shape=(5, 5, 1))))
    needs = {need.name: need for need in dry_run(config, Processes(1, "cpu")).needs}
    parameters = 16 * 10 + 16 * 145 + 3 * 17
    assert f"({2 * parameters:,} parameters" in needs["networks"].formula


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"data": {"image": {"shape": [25]}}}, r"data\.image\.shape: expected 2 to 4 sizes"),
        ({"data": {"image": {"shape": [2000, 2000]}}}, r"data\.image\.shape: expected at most 1,048,576 bytes"),
        ({"training": {"conv_layers": [[8, 3, 1], [8, 4, 1]]}}, r"conv_layers: expected layers that fit 5 x 5 pixels"),
        ({"rainbow": {"bcq": True}}, r"rainbow\.bcq: expected false with images.*rl\.cql_alpha"),
        ({"algorithm": "boosting", "rl": {"gamma": 0.0}}, r"algorithm: expected dqn, crr or iql with images"),
        ({"evaluation": {"propensities": "estimate"}}, r"evaluation\.propensities: expected \"logged\" with images"),
        ({"state_norm_data_path": "norm.json"}, r"state_norm_data_path: expected absent with images"),
        ({"data": {"embeddings": {"user": {}}}}, r"data\.embeddings: expected absent with images"),
        ({"data": {"columns": {"state_features": ["a", "b"]}}}, r"data\.columns\.state_features: expected one column"),
        ({"timeline": {"outputTableName": "t"}}, r"timeline: expected absent with images"),
    ],
)
def test_what_does_not_go_with_images_is_refused(tmp_path: Path, sections: Tree, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        checked(logged(tmp_path / "log.jsonl", tmp_path / "out", **sections))


def test_candidates_and_other_images_than_the_environment_s_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.image: expected absent for candidates"):
        trained(online(tmp_path), "parametric_dqn")
    with pytest.raises(ConfigError, match=r"data\.image\.shape: expected \[5, 5, 1\], got \[5, 5\]"):
        trained(online(tmp_path, data={"image": {"shape": [5, 5]}}))
    numbers = {"simulation": {"env": "gymnasium:CartPole-v1", "env_parameters": {}}}
    with pytest.raises(ConfigError, match=r"data\.image\.shape: expected absent, as observations of CartPole-v1"):
        trained(merged(online(tmp_path, data={"image": {"shape": [2, 2]}}), numbers))
    with pytest.raises(ConfigError, match=r"training\.conv_layers: expected absent.*are numbers"):
        trained(merged(online(tmp_path, training={"conv_layers": [[4, 2, 1]]}), numbers))


def test_models_of_images_play_and_read_only_these(tmp_path: Path, model: Path) -> None:
    policy = {"kind": "epsilon_greedy", "epsilon": 0.1, "model": str(model)}
    with pytest.raises(ReagentLiteError, match=r"expected a model of numbers.*got one of images \[5, 5, 1\]"):
        log_at(tmp_path / "log.parquet", env="gymnasium:CartPole-v1", env_parameters={}, policy=policy)
    log_at(tmp_path / "log.parquet", rows=30, policy=policy)
    other = log_at(tmp_path / "other.parquet", rows=30, env_parameters={"cells": 6, "pixels": 1})
    with pytest.raises(DataError, match=r"expected an image of 5 x 5 x 1 integers"):
        scored(model, other, tmp_path / "scores.parquet")


@pytest.mark.slow
def test_the_sample_configs_learn_catch_in_simulation_and_from_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20 x 20 pixels: greedy, every ball is caught; with epsilon 0.05 the best policy has 0.916, discounted 0.394."""
    monkeypatch.chdir(tmp_path)
    samples = {name: json.loads((ROOT / "configs" / "images" / f"{name}.json").read_text()) for name in SAMPLES}
    env = {"env": "gymnasium:oracles.catch:Catch-v0"}
    run = trained(merged(samples["online"], {"use_gpu": False, "simulation": env}))
    assert catch.value(10, epsilon=0.0) == 1.0
    assert catch.value(10, epsilon=1.0) == pytest.approx(-0.8)
    assert run.scores["simulation/return/mean"] > 0.97
    assert run.scores["simulation/random_return/mean"] == pytest.approx(-0.8, abs=0.15)
    simulate(check(SimulateConfig, samples["simulate"] | env | {"use_gpu": False}))
    trained(samples["dqn"] | {"use_gpu": False})
    models = {"minibatch_size": 256, "final_fit_passes": 5}
    result, report = evaluated(
        Path("outputs/images/model"), samples["simulate"]["output_path"], tmp_path / "report" / "e.json", gamma=0.9,
        simulation={**env, "evaluation_episodes": 2000},
        evaluation={"min_effective_episodes": 1, "models": models},
    )  # fmt: skip
    best = catch.value(10, epsilon=0.05)
    assert best - 0.06 < report["model"]["simulated"]["return"]["value"] < best + 0.04
    fitted_q = result.scores["CPE/Reward/Fitted_Q_Evaluation"]
    assert fitted_q == pytest.approx(report["model"]["simulated"]["discounted_return"]["value"], abs=0.05)
