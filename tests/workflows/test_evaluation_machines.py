"""Evaluation over several machines: whoever holds the rows, the estimates are those of one process with all of them."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.logs import Rows, candidate_rows, episode_code, random_rows, write_lines
from helpers.ranks import call_on_ranks
from helpers.runs import ALONE, absent, checked
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from reagent_lite.config import DqnConfig, check
from reagent_lite.data.copy.prepared_copy import prepare_training_copy
from reagent_lite.data.logs import Log
from reagent_lite.distributed.group import Group
from reagent_lite.evaluation import scored_episodes as evaluated_episodes
from reagent_lite.evaluation.document import Evaluation
from reagent_lite.evaluation.evaluation_rows import held_out
from reagent_lite.evaluation.scored_episodes import TrainEvalLogs, draw_hashes, episode_digests, scored_episodes
from reagent_lite.run.evaluators import LogEvaluator
from reagent_lite.run.learner import build_learner
from reagent_lite.run.logged import prepare
from reagent_lite.run.output_folder import gate_of
from reagent_lite.run.samples import logged_facts


def named(rows: Rows, prefix: str) -> Rows:
    """Returns rows with other names of episodes, and a metric."""
    return [{**row, "mdp_id": f"{prefix}{row['mdp_id']}", "metrics": {"m": row["reward"] ** 2}} for row in rows]


def shifted(value: Any, *columns: str) -> Any:
    """Returns rows whose columns of features, alone or in lists, have every value larger by 1."""
    if isinstance(value, list):
        return [shifted(item, *columns) for item in value]
    if columns:
        return {**value, **{column: shifted(value[column]) for column in columns}}
    return {key: number + 1 for key, number in value.items()}


def episodes(rows: Rows, *numbers: int) -> Rows:
    """Returns the rows of some episodes, which have ten each."""
    return [row for number in numbers for row in rows[10 * number : 10 * number + 10]]


def settings(name: str, *, candidates: bool = False, **other: Any) -> dict[str, Any]:
    """A config of one minibatch a pass, so that the order of rows has no part in what is fitted."""
    evaluation = {
        "bootstrap_resamples": 100,
        "models": {"final_fit_passes": 5},
        "held_out_share": 0.4,
        "min_effective_episodes": 1,
    }
    return {
        "training_data_path": f"{name}/data",
        "model_output_path": f"{name}/out",
        "use_gpu": False,
        "rl": {"temperature": 2.0},
        "state_norm_data_path": "state_norm.json",
        "training": {"layers": [-1, 8, -1], "activations": ["relu", "linear"]},
        **({"action_norm_data_path": "action_norm.json"} if candidates else {"actions": ["a", "b"]}),
        **other,
        "evaluation": evaluation | other.get("evaluation", {}),
    }


LEFT, RIGHT, NEW = named(random_rows(130), "left"), named(random_rows(57, 1), "right"), named(random_rows(80, 2), "new")

NAMELESS = [[{key: value for key, value in row.items() if key != "mdp_id"} for row in rows] for rows in (NEW, RIGHT)]

FEW, MUCH = named(candidate_rows(80, most=3), "few"), named(candidate_rows(40, 1, most=6), "much")

# all else is as in LEFT
SEEN = shifted(LEFT, "state_features", "next_state_features")


def cases() -> dict[str, tuple[dict[str, Any], list[dict[str, Rows]]]]:
    """Returns config and rows of node 0, node 1 and one machine that has all, by name."""

    def of(left: Rows, right: Rows, union: Rows | None = None, eval_data: Sequence[Rows | None] = (None,) * 3,
           **options: Any) -> tuple[dict[str, Any], list[dict[str, Rows]]]:  # fmt: skip
        data = (left, right, left + right if union is None else union)
        logs = [{"data": rows} if held is None else {"data": rows, "eval": held}
                for rows, held in zip(data, eval_data, strict=True)]  # fmt: skip
        return options, logs

    # right's episode 2 is in the eval data of both, 6 of the new ones in parts; both train on episodes of the other's
    sixth = episodes(NEW, 6)
    least = {"lower_bound_above": -1e9}
    held_out = (
        episodes(NEW, 0, 1, 2) + episodes(RIGHT, 0, 1, 2) + sixth[1::2],
        episodes(NEW, 2, 3, 4, 5) + episodes(LEFT, 0, 1, 2, 3) + episodes(RIGHT, 4) + sixth[::2],
        episodes(NEW, *range(7)) + episodes(RIGHT, 0, 1, 2, 4) + episodes(LEFT, 0, 1, 2, 3),
    )
    rows = {
        "shares": of(LEFT, RIGHT, publish_if=least),
        "unknown": of(LEFT, [{**RIGHT[0], "action_probability": None}, *RIGHT[1:]], publish_if=least),
        "lists": of(FEW, MUCH, candidates=True),
        "estimated": of(FEW, MUCH, candidates=True, evaluation={"propensities": "estimate"}),
        "seen": of(LEFT, SEEN),
        "most": of(LEFT, RIGHT, evaluation={"max_episodes": 5}),
        "eval": of(LEFT + episodes(RIGHT, 4), episodes(RIGHT, 0, 1, 2), None, held_out),
        "none_here": of(LEFT, RIGHT, None, (None, NEW, NEW)),
        "nameless": of(LEFT, RIGHT, None, (NAMELESS[0], NAMELESS[1], NAMELESS[0] + NAMELESS[1])),
        "replicas": of(LEFT, LEFT[::-1], LEFT, data={"layout": "replicas"}),
    }
    return {
        name: (settings(name, **({"eval_data_path": f"{name}/eval"} if "eval" in logs[2] else {}), **options), logs)
        for name, (options, logs) in rows.items()
    }


def laid_out(folder: Path) -> list[Path]:
    """Writes all cases and returns the working folders of node 0, node 1 and the machine that has all rows."""
    machines = [folder / name for name in ("left", "right", "union")]
    plain = json.dumps({"feature_type": "CONTINUOUS", "mean": 1.0, "stddev": 2.0})
    for number, machine in enumerate(machines):
        for name, (tree, logs) in cases().items():
            for use in ("data", "eval"):
                (machine / name / use).mkdir(parents=True)
            for use, rows in logs[number].items():
                write_lines(machine / name / use / "log.jsonl", rows)
            (machine / name / "config.json").write_text(json.dumps(tree))
        for use, features in {"state": "012", "action": "05"}.items():
            (machine / f"{use}_norm.json").write_text(json.dumps(dict.fromkeys(features, plain)))
    return machines


def evaluate(name: str, group: Group) -> dict[str, Any]:
    """Evaluates an untrained policy on a folder's rows; rank 0 leaves the evaluation and the page there."""
    config = checked(json.loads(Path(name, "config.json").read_text()))
    data = prepare(config, group)
    torch.manual_seed(0)  # the weights that a policy begins with are the same in every process
    evaluator = LogEvaluator(config, data, build_learner(config, data.spec, ALONE.device), group)
    evaluation = evaluator.evaluate(final=True)
    page, _ = evaluator.policy.page(final=False)
    if page is None:
        assert evaluation == Evaluation()
    else:
        gate = gate_of(config, evaluation)
        Path(name, "gate.txt").write_text("" if gate is None or gate.passed else gate.reason)
        Path(name, "evaluation.json").write_text(json.dumps(evaluation.document["cpe"]))
        columns = {column: value.contiguous() for column, value in page.columns.items() if column != "number"}
        save_file(columns, f"{name}/page.safetensors")
    present = {key: feature.present for key, feature in logged_facts(config, data).features["state"].items()}
    return {"name": name, "rows": len(evaluator.policy.log.split.scored.numbers), "present": present}


def evaluate_all(group: Group, *names: str) -> list[dict[str, Any]]:
    return [evaluate(name, group) for name in names]


def expected_episodes(log: dict[str, Rows]) -> set[int]:
    """Returns the codes of the episodes that are scored of rows: new ones, and of the others those chosen."""
    trained, held = ({episode_code(row["mdp_id"]) for row in log.get(use, log["data"])} for use in ("data", "eval"))
    codes = np.array([*held], np.uint64)
    return (held - trained) | set(codes[held_out(codes, 0.4)].tolist())


def leaves(document: Any, path: str = "") -> dict[str, float]:
    """Returns the numbers of a document by their paths; words, without the numbers in them, are parts of paths."""
    if isinstance(document, dict | list):
        items = document.items() if isinstance(document, dict) else enumerate(document)
        return {at: leaf for key, value in items for at, leaf in leaves(value, f"{path}/{key}").items()}
    words = re.sub("[0-9.e-]+", "", str(document))
    return {path: document} if isinstance(document, float | int) else {f"{path}: {words}": 0}


@pytest.fixture(scope="module")
def union(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working folder of one process that has evaluated all rows of every case."""
    whole = laid_out(tmp_path_factory.mktemp("union"))[2]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(whole)
        patch.setenv("XDG_CACHE_HOME", str(whole / "cache"))
        for name in cases():
            evaluate(name, ALONE)
    return whole


LOGGED = ("episode", "action", "mask", "steps", "bootstrap", "propensity", "outcomes")


@pytest.mark.parametrize(
    "processes", [[2, 1], *(pytest.param(counts, marks=pytest.mark.slow) for counts in ([1, 1], [2, 2]))], ids=str
)
def test_machines_score_what_one_process_with_all_rows_scores(
    tmp_path: Path, union: Path, processes: list[int]
) -> None:
    """Uneven shards, lists of other lengths, a cap, eval data that overlap, none on one machine, replicas, no names.

    Names that two machines use for rows with other states, though all else is the same.

    One propensity that node 1's log lacks holds the model back on node 0.
    """
    first, second, _ = laid_out(tmp_path)
    runs = [run.ok for run in call_on_ranks(evaluate_all, [*cases()], [first, second], processes)]
    for name, (_, logs) in cases().items():
        mine, theirs = (load_file(machine / name / "page.safetensors") for machine in (first, union))
        document, of_one = (json.loads((at / name / "evaluation.json").read_text()) for at in (first, union))
        assert not (second / name / "evaluation.json").exists()
        parts, rows = [part for run in runs for part in run.outcome if part["name"] == name], logs[2]["data"]
        assert sum(part["rows"] for part in parts) == len(theirs["action"]) == document["overlap"]["num_rows"]
        assert name == "none_here" or min(part["rows"] for part in parts) > 0
        present = {key: float(np.mean([key in row["state_features"] for row in rows])) for key in "012"}
        assert [part["present"] for part in parts] == [pytest.approx(present, abs=1e-12)] * len(parts)
        scored = set(theirs["episode"].numpy().view(np.uint64).tolist())
        if name == "nameless":  # known by their numbers, which the union counts on: the same rows in another order
            assert document["overlap"]["num_episodes"] == 80 + 57
        else:
            expected = expected_episodes(logs[2])
            assert (len(scored) == 5 and scored < expected) if name == "most" else scored == expected
            assert document["overlap"]["num_episodes"] == len(scored)
            for column, values in theirs.items():
                tolerance = 0 if column in LOGGED else 1e-6
                if column == "propensity" and name == "estimated":
                    assert values.unique().numel() > 2
                    tolerance = 1e-4  # the optimum of sums in another order
                assert_close(mine[column], values, atol=tolerance, rtol=tolerance)
        compared = {"nameless": "/logged/value", "estimated": "/calibration/rows"}.get(name, "")
        figures, of_all = ({path: value for path, value in leaves(part).items() if path.endswith(compared)}
                           for part in (document, of_one))  # fmt: skip
        assert figures
        assert figures == pytest.approx(of_all, rel=1e-5, abs=1e-6)
    passed, blocked = ((first / name / "gate.txt").read_text() for name in ("shares", "unknown"))
    assert (passed, "1 of 187 rows" in blocked) == ("", True)
    assert not absent(
        runs[0].err,
        "evaluation: 5 of 9 episodes are scored",
        "evaluation: 6 episodes of 2 machines are scored",
        "evaluation: 2 times a machine has rows",  # episodes 2 and 6 of the new ones, in case eval
    )


def digests(folder: Path, rows: Rows, actions: tuple[str, ...] | None) -> dict[int, int]:
    """Returns the digest of each episode of a log, by the code of its name."""
    copy = prepare_training_copy(Log(str(write_lines(folder / "log.jsonl", rows)), actions=actions))
    numbers = episode_digests(copy, np.ones(len(copy.episode_hash), np.bool_))
    return dict(zip(copy.episode_hash.tolist(), numbers.tolist(), strict=True))


@pytest.mark.parametrize("actions", [("a", "b"), None], ids=["named", "candidates"])
def test_equal_rows_have_equal_digests_wherever_they_stand(
    tmp_path: Path, actions: tuple[str, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another order, beside rows with other features, in blocks of 7 rows; what one row has otherwise changes it."""
    log, column = (LEFT, "state_features") if actions else (FEW, "possible_actions")
    whole = digests(tmp_path / "whole", log, actions)
    other = [{**row, "mdp_id": "new", "state_features": {"-3": 1.0, "1": 2.0}} for row in episodes(log, 0)]
    monkeypatch.setattr(evaluated_episodes, "_DIGEST_ROWS", 7)
    assert digests(tmp_path / "mixed", other + log[::-1], actions).items() >= whole.items()
    altered = [*log[:34], shifted(log[34], column, *(() if actions else ("action",))), *log[35:]]
    changed = digests(tmp_path / "altered", altered, actions)
    assert {number for number in whole if changed[number] != whole[number]} == {episode_code(log[34]["mdp_id"])}


def test_the_draw_of_episodes_gives_each_the_same_chance() -> None:
    """5 of 20 over 400 seeds: each is drawn 100 times on average, standard deviation sqrt(400 * 0.25 * 0.75) = 8.7."""
    hashes = np.array([episode_code(str(number)) for number in range(20)], np.uint64)
    assert [len(draw_hashes(hashes[:count], 5, 0)) for count in (4, 5, 6)] == [4, 5, 5]
    episodes, times = np.unique(
        np.concatenate([draw_hashes(hashes, 5, seed) for seed in range(400)]), return_counts=True
    )
    assert set(episodes.tolist()) == set(hashes.tolist())
    assert np.abs(times - 100).max() < 4 * 8.7


@pytest.mark.parametrize("same", [False, True])
def test_rows_without_names_are_new_unless_eval_data_is_the_training_data(tmp_path: Path, same: bool) -> None:
    """Row 7 of eval data is not row 7 of the training data: all 57 are scored, and nothing is kept from fitting."""
    train, other = ([{**row, "terminal": True} for row in rows] for rows in NAMELESS)
    for use, rows in (("data", train), ("eval", train if same else other)):
        write_lines(tmp_path / use / "log.jsonl", rows)
    config = check(DqnConfig, settings(str(tmp_path), eval_data_path=str(tmp_path / "eval"), state_norm_data_path=None))
    data = prepare(config, ALONE)
    sides = TrainEvalLogs(train=data.train.copy, held_out=data.held_out.copy, same=same, shards=data.shards)
    scored, trained = scored_episodes(sides, config.evaluation, 0).hashes, sides.hashes(data.train.copy)
    # if each has been trained on, the share by hash decides, and takes it from fitting
    assert 0 < len(scored) < 80 if same else len(scored) == 57
    assert np.isin(scored, trained).tolist() == [same] * len(scored)
