"""The policy of the best epoch is evaluated and exported, and a run ends early."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.logs import random_rows, write_lines
from helpers.resuming import agents, decisions, simulated
from helpers.runs import ALONE, Tree, checked, merged, metrics, trained
from safetensors.torch import load_file

from reagent_lite.evaluation.scored_episodes import validation_episodes
from reagent_lite.export import load_bundle
from reagent_lite.run.logged import prepare
from reagent_lite.run.resolved import resolve
from reagent_lite.run.runner import Run
from reagent_lite.training.stop import StopSignal


@pytest.fixture
def overfitted(tmp_path: Path) -> Tree:
    """A log of pure noise, of which a wide network learns every row by heart."""
    tree = decisions(tmp_path, training={"layers": [-1, 64, -1], "learning_rate": 0.01, "l2_decay": 0.0})
    return {
        **tree,
        "epochs": 8,
        "model_output_path": str(tmp_path / "out"),
        "evaluation": {"models": {"final_fit_passes": 1}},
    }


def losses(folder: Path) -> list[float]:
    return [line["validation/td_loss/mean"] for line in metrics(folder) if "epoch" in line]


def document(model: Path) -> Any:
    return json.loads((model / "evaluation.json").read_text())


def weights(folder: Path, model: str = "model") -> bytes:
    return (folder / model / "weights.safetensors").read_bytes()


def test_the_epoch_of_the_lowest_loss_on_rows_apart_is_exported(
    overfitted: Tree, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    outcome = trained(overfitted)
    out = tmp_path / "out"
    curve = losses(out)
    best = int(np.argmin(curve)) + 1
    assert 1 < len(curve) == 8 > best

    data = prepare(checked(overfitted), ALONE)
    assert data.validation is not None
    parts = [data.learned.usable.numpy(), data.validation.usable.numpy(), data.scored.numbers]
    assert sorted(np.concatenate(parts)) == [*range(800)]
    rows = parts[1]
    copy = data.train.copy
    q = load_bundle(out / "model").predict(copy.state[rows]).q
    loss = float(np.mean((q[np.arange(len(rows)), copy.action[rows]] - copy.reward[rows]) ** 2))
    assert loss == pytest.approx(min(curve), rel=1e-4)

    kept = document(out / "model")["kept"]
    assert (kept["number"], kept["of"], kept["value"]) == (best, 8, min(curve))
    said = f"that of epoch {best} of 8, by the lowest TD loss on {len(rows)} validation rows: "
    assert f"Policy kept: {said}" in caplog.text
    for page in ("report.html", "model/MODEL_CARD.md"):
        assert said in (out / page).read_text().replace("\\", "")

    # a run that ends there learns the same, and all its figures are of that policy
    shorter = trained({**overfitted, "epochs": best, "model_output_path": f"{out}2"})
    assert weights(tmp_path / "out2") == weights(out)
    assert shorter.scores["td_loss/mean"] == outcome.scores["td_loss/mean"]
    # as does patience, which ends it later
    patient = {**overfitted, "checkpoint": {"keep_best": True, "patience": 1}, "model_output_path": f"{out}3"}
    first = next(number for number, loss in enumerate(curve[1:]) if loss >= curve[number]) + 1
    assert trained(patient).steps == outcome.steps // 8 * (first + 1)
    assert document(tmp_path / "out3/model")["kept"]["number"] == first


def test_a_warm_start_begins_with_the_kept_policy(overfitted: Tree, tmp_path: Path) -> None:
    trained(overfitted)
    warm = merged(overfitted, {"training": {"warm_start_model_path": str(tmp_path / "out" / "checkpoints")}})
    config = checked({**warm, "model_output_path": str(tmp_path / "warm")})
    learner = Run(resolve(config, ALONE), StopSignal()).learner
    assert tensors(load_file(tmp_path / "out/model/weights.safetensors")) <= tensors(learner.state_dict())


@pytest.mark.parametrize(
    ("changes", "rows", "reason"),
    [
        ({"rl": {"gamma": 0.5}}, 800, "with rl.gamma > 0 and next states, losses of two epochs"),
        ({"algorithm": "crr"}, 800, "the policy of crr does not follow from the values"),
        ({}, 400, "it needs at least 50 episodes besides the scored ones"),
    ],
    ids=str,
)
def test_a_log_that_cannot_tell_keeps_the_last_epoch(
    overfitted: Tree, tmp_path: Path, caplog: pytest.LogCaptureFixture, changes: Tree, rows: int, reason: str
) -> None:
    data = str(write_lines(tmp_path / "log.jsonl", random_rows(rows)))
    tree = merged(overfitted, {**changes, "training_data_path": data, "epochs": 2})
    trained(tree)
    assert f"checkpoint.keep_best has no effect, the last epoch is exported: {reason}" in caplog.text
    assert "kept" not in document(tmp_path / "out/model")
    trained({**tree, "checkpoint": {}, "model_output_path": str(tmp_path / "without")})
    assert weights(tmp_path / "out") == weights(tmp_path / "without")


def test_rows_without_next_states_have_comparable_losses_with_a_discount(overfitted: Tree, tmp_path: Path) -> None:
    rows = [row for row in random_rows(2000) if row["sequence_number"] == 9]  # the ends of 200 episodes
    tree = merged(overfitted, {"training_data_path": str(write_lines(tmp_path / "log.jsonl", rows))})
    data = prepare(checked(merged(tree, {"rl": {"gamma": 0.9}})), ALONE)
    assert data.validation is not None
    assert 5 < data.validation.count < 35  # a tenth of those that are not scored
    assert not set(data.validation.usable.tolist()) & {*data.learned.usable.tolist(), *data.scored.numbers.tolist()}
    other, same = (validation_episodes(data.sides, data.scored, seed) for seed in (1, 0))
    assert np.flatnonzero(same).tolist() == data.train.copy.episode[data.validation.usable.numpy()].tolist()
    assert not np.array_equal(other, same)


def test_the_evaluation_of_the_highest_return_is_exported_and_plays_other_episodes(tmp_path: Path) -> None:
    tree = simulated(tmp_path, simulation={"num_evaluations": 6}, training={"learning_rate": 0.05})
    out = tmp_path / "out"
    trained({**tree, "model_output_path": str(out), "checkpoint": {"keep_best": True, "every_steps": 1, "keep": 1000}})
    *evaluations, final = metrics(out)
    returns = [line["simulation/return/mean"] for line in evaluations]
    best = evaluations[int(np.argmax(returns))]
    kept = document(out / "model")["kept"]
    assert (kept["unit"], kept["number"], kept["value"]) == (
        "evaluation",
        returns.index(max(returns)) + 1,
        max(returns),
    )
    assert best["step"] < final["step"]
    assert final["simulation/return/mean"] != max(returns)
    assert_exported(out, "model", best["step"])


def test_agents_keep_the_evaluation_of_the_highest_sum(tmp_path: Path) -> None:
    tree = agents(tmp_path, simulation={"num_evaluations": 4}, training={"learning_rate": 0.05})
    out = tmp_path / "out"
    trained({**tree, "model_output_path": str(out), "checkpoint": {"keep_best": True, "every_steps": 1, "keep": 1000}})
    *evaluations, _ = metrics(out)
    tags = [f"simulation/{kind}/return/mean" for kind in ("leader", "follower")]
    sums = [sum(line[tag] for tag in tags) for line in evaluations]
    for kind in ("leader", "follower"):
        assert document(out / kind)["kept"]["value"] == pytest.approx(max(sums))
        assert_exported(out, kind, evaluations[int(np.argmax(sums))]["step"])


def tensors(state: Mapping[str, torch.Tensor]) -> set[bytes]:
    """Returns the bytes of the weights, without features' means and other small tensors."""
    return {value.numpy().tobytes() for value in state.values() if value.numel() > 4}


def assert_exported(out: Path, model: str, step: int) -> None:
    """The weights of an exported model are in the checkpoint of a step, and not in the last one, which is another."""
    checkpoints = sorted((out / "checkpoints").glob("step_*"))
    exported = tensors(load_file(out / model / "weights.safetensors"))
    assert exported <= tensors(load_file(out / "checkpoints" / f"step_{step:06d}" / "learner.safetensors"))
    assert checkpoints[-1].name != f"step_{step:06d}"
    assert not exported <= tensors(load_file(checkpoints[-1] / "learner.safetensors"))
