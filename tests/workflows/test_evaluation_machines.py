"""Evaluation over several machines: whoever holds the rows, the estimates are those of one process with all of them."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracles.logs import candidate_rows, episode_code, random_rows, write_lines
from oracles.ranks import call_on_ranks
from oracles.runs import ALONE
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from reagent_lite.config import DqnConfig, ParametricDqnConfig, check, load_config
from reagent_lite.data.copy.training_copy import prepare_training_copy
from reagent_lite.distributed.group import Group
from reagent_lite.evaluation import episodes as evaluated_episodes
from reagent_lite.evaluation.document import Evaluation
from reagent_lite.evaluation.episodes import TrainEvalLogs, drawn, episode_digests, scored_episodes
from reagent_lite.evaluation.page import held_out
from reagent_lite.run.evaluators import LogEvaluator
from reagent_lite.run.learner import build_learner
from reagent_lite.run.logged import prepare
from reagent_lite.run.publish import gate_of
from reagent_lite.run.samples import logged_facts

Rows = list[dict[str, Any]]


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


def settings(name: str, **other: Any) -> dict[str, Any]:
    """A config of one minibatch a pass, so that the order of rows has no part in what is fitted."""
    evaluation = {"bootstrap_resamples": 100, "final_fit_passes": 5, "held_out_share": 0.4, "min_effective_episodes": 1}
    return {
        "training_data_path": f"{name}/data",
        "model_output_path": f"{name}/out",
        "use_gpu": False,
        "actions": ["a", "b"],
        "rl": {"temperature": 2.0},
        "state_norm_data_path": "state_norm.json",
        "training": {"layers": [-1, 8, -1], "activations": ["relu", "linear"]},
        **other,
        "evaluation": evaluation | other.get("evaluation", {}),
    }


LEFT, RIGHT, NEW = named(random_rows(130), "left"), named(random_rows(57, 1), "right"), named(random_rows(80, 2), "new")
NAMELESS = [[{key: value for key, value in row.items() if key != "mdp_id"} for row in rows] for rows in (NEW, RIGHT)]
FEW, MUCH = named(candidate_rows(80, most=3), "few"), named(candidate_rows(40, 1, most=6), "much")
# all else is as in LEFT, and as in FEW
SEEN = shifted(LEFT, "state_features", "next_state_features")
OFFERED = shifted(FEW, "action", "next_action", "possible_actions", "possible_next_actions")


def cases() -> dict[str, tuple[dict[str, Any], list[dict[str, Rows]]]]:
    """Returns config and rows of node 0, node 1 and one machine that has all, by name."""

    def of(name: str, left: dict[str, Rows], right: dict[str, Rows], union: dict[str, Rows], **other: Any) -> Any:
        return settings(name, **({"eval_data_path": f"{name}/eval"} if "eval" in union else {}), **other), [
            left, right, union,
        ]  # fmt: skip

    shares = ({"data": LEFT}, {"data": RIGHT}, {"data": LEFT + RIGHT})
    lists = of("lists", {"data": FEW}, {"data": MUCH}, {"data": FEW + MUCH})
    offered = of("offered", {"data": FEW}, {"data": OFFERED}, {"data": FEW + OFFERED})
    few = ({"data": FEW}, {"data": MUCH}, {"data": FEW + MUCH})
    estimated_lists = of("estimated_lists", *few, evaluation={"propensities": "estimate"})
    for parametric, _ in (lists, offered, estimated_lists):
        del parametric["actions"]
        parametric["action_norm_data_path"] = "action_norm.json"
    # right's episode 2 is in the eval data of both, 3 in parts; both train on episodes of the other's eval data
    trained = {"left": LEFT + episodes(RIGHT, 4), "right": episodes(RIGHT, 0, 1, 2)}
    odd = [row for number, row in enumerate(episodes(NEW, 6)) if number % 2]
    even = [row for number, row in enumerate(episodes(NEW, 6)) if not number % 2]
    eval_left = episodes(NEW, 0, 1, 2) + episodes(RIGHT, 0, 1, 2) + odd
    eval_right = episodes(NEW, 2, 3, 4, 5) + episodes(LEFT, 0, 1, 2, 3) + episodes(RIGHT, 4) + even
    eval_all = episodes(NEW, *range(7)) + episodes(RIGHT, 0, 1, 2, 4) + episodes(LEFT, 0, 1, 2, 3)
    unknown = [{**RIGHT[0], "action_probability": None}, *RIGHT[1:]]
    return {
        "shares": of("shares", *shares, publish_if={"lower_bound_above": -1e9}),
        "unknown": of("unknown", {"data": LEFT}, {"data": unknown}, {"data": LEFT + unknown},
                      publish_if={"lower_bound_above": -1e9}),
        "lists": lists,
        "estimated": of("estimated", *shares, evaluation={"propensities": "estimate"}),
        "estimated_lists": estimated_lists,
        "seen": of("seen", {"data": LEFT}, {"data": SEEN}, {"data": LEFT + SEEN}),
        "offered": offered,
        "most": of("most", *shares, evaluation={"max_episodes": 5}),
        "eval": of("eval", {"data": trained["left"], "eval": eval_left}, {"data": trained["right"], "eval": eval_right},
                   {"data": trained["left"] + trained["right"], "eval": eval_all}),
        "none_here": of("none_here", {"data": LEFT}, {"data": RIGHT, "eval": NEW}, {"data": LEFT + RIGHT, "eval": NEW}),
        "nameless": of("nameless", {"data": LEFT, "eval": NAMELESS[0]}, {"data": RIGHT, "eval": NAMELESS[1]},
                       {"data": LEFT + RIGHT, "eval": NAMELESS[0] + NAMELESS[1]}),
        "replicas": of("replicas", {"data": LEFT}, {"data": LEFT[::-1]}, {"data": LEFT}, data={"layout": "replicas"}),
    }  # fmt: skip


def laid_out(folder: Path) -> list[Path]:
    """Writes all cases and returns the working folders of node 0, node 1 and the machine that has all rows."""
    places = [folder / name for name in ("left", "right", "union")]
    for folder_of_machine in places:
        folder_of_machine.mkdir()
        plain = json.dumps({"feature_type": "CONTINUOUS", "mean": 1.0, "stddev": 2.0})
        for use, features in {"state": "012", "action": "05"}.items():
            (folder_of_machine / f"{use}_norm.json").write_text(json.dumps(dict.fromkeys(features, plain)))
    for name, (tree, logs) in cases().items():
        for folder_of_machine, log in zip(places, logs, strict=True):
            for use in ("data", "eval"):
                (folder_of_machine / name / use).mkdir(parents=True)
            for use, rows in log.items():
                write_lines(folder_of_machine / name / use / "log.jsonl", rows)
            (folder_of_machine / name / "config.json").write_text(json.dumps(tree))
    return places


def evaluate(name: str, group: Group) -> dict[str, Any]:
    """Evaluates an untrained policy on a folder's rows; rank 0 leaves the evaluation and the page there."""
    tree = json.loads(Path(name, "config.json").read_text())
    config = load_config(DqnConfig if "actions" in tree else ParametricDqnConfig, f"{name}/config.json")
    data = prepare(config, group)
    torch.manual_seed(0)  # the weights that a policy begins with are the same in every process
    evaluator = LogEvaluator(config, data, build_learner(config, data.spec, ALONE.device), group)
    evaluation = evaluator.evaluate(final=True)
    page, _ = evaluator.policy.page(final=False)
    facts = logged_facts(config, data)
    report = {
        "name": name,
        "rows": len(evaluator.policy.log.split.scored.numbers),
        "present": {
            name: {key: feature.present for key, feature in column.items()} for name, column in facts.features.items()
        },
        "found": str(facts.sources[0].rows),
    }
    if page is None:
        assert evaluation == Evaluation()
        return report
    gate = gate_of(config, evaluation)
    Path(name, "gate.txt").write_text("" if gate is None or gate.passed else gate.reason)
    Path(name, "evaluation.json").write_text(json.dumps(evaluation.document["cpe"]))
    save_file({column: value.contiguous() for column, value in page.columns.items()}, Path(name, "page.safetensors"))
    return report


def evaluate_all(group: Group, *names: str) -> list[dict[str, Any]]:
    return [evaluate(name, group) for name in names]


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


def names(rows: Rows) -> set[str]:
    return {row["mdp_id"] for row in rows}


def expected(name: str) -> set[int]:
    """Returns the codes of the episodes that a case scores, from its rows: new ones, and of the others those chosen."""
    log = cases()[name][1][2]
    trained = names(log["data"])
    codes = {episode: episode_code(episode) for episode in names(log.get("eval", log["data"]))}
    chosen = held_out(np.array(list(codes.values()), np.uint64), 0.4)
    return {
        number
        for (episode, number), by_share in zip(codes.items(), chosen, strict=True)
        if by_share or episode not in trained
    }


def same(mine: Any, theirs: Any) -> None:
    """Holds two documents equal: numbers to 1e-6, words but for the numbers in them."""
    if isinstance(mine, dict):
        assert mine.keys() == theirs.keys()
        for key in mine:
            same(mine[key], theirs[key])
    elif isinstance(mine, list):
        assert len(mine) == len(theirs)
        for first, other in zip(mine, theirs, strict=True):
            same(first, other)
    elif isinstance(mine, str):
        assert re.sub(r"[0-9.e-]+", "0", mine) == re.sub(r"[0-9.e-]+", "0", theirs)
    else:
        assert mine == (theirs if theirs is None else pytest.approx(theirs, rel=1e-5, abs=1e-6))


LOGGED = ("episode", "action", "mask", "steps", "bootstrap", "propensity", "outcomes")


@pytest.mark.parametrize(
    "processes", [[2, 1], *(pytest.param(counts, marks=pytest.mark.slow) for counts in ([1, 1], [2, 2]))], ids=str
)
def test_machines_score_what_one_process_with_all_rows_scores(
    tmp_path: Path, union: Path, processes: list[int]
) -> None:
    """Uneven shards, lists of other lengths, a cap, eval data that overlap, none on one machine, replicas, no names.

    Names that two machines use for rows with other states, or other candidates, though all else is the same.

    One propensity that node 1's log lacks holds the model back on node 0.
    """
    folders = laid_out(tmp_path)[:2]
    runs = call_on_ranks(evaluate_all, [*cases()], folders, processes)
    assert [run.code for run in runs] == [0] * len(runs), "\n".join(run.err for run in runs)
    for name in cases():
        mine, theirs = (load_file(machine / name / "page.safetensors") for machine in (folders[0], union))
        parts = [part for run in runs for part in run.outcome if part["name"] == name]
        assert sum(part["rows"] for part in parts) == len(theirs["action"])  # no row twice
        assert name == "none_here" or min(part["rows"] for part in parts) > 0
        document, of_one = (json.loads((at / name / "evaluation.json").read_text()) for at in (folders[0], union))
        assert not (folders[1] / name / "evaluation.json").exists()
        assert document["overlap"]["num_rows"] == len(theirs["action"])
        for part in parts:
            assert part["present"]["state"] == pytest.approx(present(name), abs=1e-12)
            assert part["found"] == str(len(cases()[name][1][2]["data"]))
        if name == "nameless":  # known by their numbers, which the union counts on: the same rows in another order
            assert document["overlap"]["num_episodes"] == 80 + 57
            same(logged_values(document), logged_values(of_one))
            continue
        scored = set(theirs["episode"].numpy().view(np.uint64).tolist())
        assert (len(scored) == 5 and scored < expected("shares")) if name == "most" else scored == expected(name)
        for column, values in theirs.items():
            tolerance = 0 if column in LOGGED else 1e-6
            if column == "propensity" and name.startswith("estimated"):
                assert values.unique().numel() > 2
                tolerance = 1e-4  # the optimum of sums in another order
            assert_close(mine[column], values, atol=tolerance, rtol=tolerance)
        assert document["overlap"]["num_episodes"] == len(scored)
        if not name.startswith("estimated"):
            same(document, of_one)
        else:
            assert document["overlap"]["calibration"]["rows"] == of_one["overlap"]["calibration"]["rows"]
    passed, blocked = ((folders[0] / name / "gate.txt").read_text() for name in ("shares", "unknown"))
    assert (passed, "1 of 187 rows" in blocked) == ("", True)
    assert "evaluation: 5 of 9 episodes are scored" in runs[0].err
    assert "evaluation: 8 episodes of 2 machines are scored" in runs[0].err
    # episodes 2 and 6 of the new ones, in case eval
    assert "evaluation: 2 times a machine has rows" in runs[0].err
    assert not any("evaluation:" in run.err for run in runs[1:])


def present(name: str) -> dict[str, float]:
    """Returns the share of the training rows of all machines that have each state feature."""
    rows = cases()[name][1][2]["data"]
    return {key: float(np.mean([key in row["state_features"] for row in rows])) for key in ("0", "1", "2")}


def logged_values(document: dict[str, Any]) -> list[float]:
    """Returns the logged means of every outcome."""
    return [outcome[family]["logged"]["value"] for outcome in document["outcomes"]
            for family in ("one_step", "sequential")]  # fmt: skip


def digests(folder: Path, rows: Rows, actions: tuple[str, ...] | None) -> dict[int, int]:
    """Returns the digest of each episode of a log, by the code of its name."""
    copy = prepare_training_copy(str(write_lines(folder / "log.jsonl", rows)), actions=actions)
    numbers = episode_digests(copy, np.ones(len(copy.episode_hash), np.bool_))
    return dict(zip(copy.episode_hash.tolist(), numbers.tolist(), strict=True))


@pytest.mark.parametrize("actions", [("a", "b"), None], ids=["named", "candidates"])
def test_equal_rows_have_equal_digests_wherever_they_stand(
    tmp_path: Path, actions: tuple[str, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another order, beside rows with other features, in blocks of 7 rows; what one row has otherwise changes it."""
    log, column = (LEFT, "state_features") if actions else (FEW, "possible_actions")
    whole = digests(tmp_path / "whole", log, actions)
    assert len(set(whole.values())) == len(names(log))
    other = [{**row, "mdp_id": "new", "state_features": {"-3": 1.0, "1": 2.0}} for row in episodes(log, 0)]
    monkeypatch.setattr(evaluated_episodes, "_DIGEST_ROWS", 7)
    mixed = digests(tmp_path / "mixed", other + log[::-1], actions)
    assert {number: mixed[number] for number in whole} == whole
    altered = [*log[:34], shifted(log[34], column, *(() if actions else ("action",))), *log[35:]]
    changed = digests(tmp_path / "altered", altered, actions)
    assert {number for number in whole if changed[number] != whole[number]} == {episode_code(log[34]["mdp_id"])}


def test_the_draw_of_episodes_gives_each_the_same_chance() -> None:
    """5 of 20 over 400 seeds: each is drawn 100 times on average, standard deviation sqrt(400 * 0.25 * 0.75) = 8.7."""
    hashes = np.array([episode_code(str(number)) for number in range(20)], np.uint64)
    chosen = np.concatenate([drawn(hashes, 5, seed) for seed in range(400)])
    times = [int((chosen == episode).sum()) for episode in hashes]
    assert sum(times) == 400 * 5
    assert [len(drawn(hashes[:count], 5, 0)) for count in (4, 5, 6)] == [4, 5, 5]
    assert all(abs(number - 100) < 4 * 8.7 for number in times)


@pytest.mark.parametrize("same", [False, True])
def test_rows_without_names_are_new_unless_eval_data_is_the_training_data(tmp_path: Path, same: bool) -> None:
    """Row 7 of eval data is not row 7 of the training data: all 57 are scored, and nothing is kept from fitting."""
    train, other = ([{**row, "terminal": True} for row in rows] for rows in NAMELESS)
    for use, rows in (("data", train), ("eval", train if same else other)):
        write_lines(tmp_path / use / "log.jsonl", rows)
    tree = settings(str(tmp_path), eval_data_path=str(tmp_path / "eval"), state_norm_data_path=None)
    config = check(DqnConfig, tree)
    data = prepare(config, ALONE)
    assert data.held_out is not None
    sides = TrainEvalLogs(train=data.train.copy, held_out=data.held_out.copy, same=same, shards=data.shards)
    scored, trained = scored_episodes(sides, config.evaluation, 0).hashes, sides.hashes(data.train.copy)
    assert len(np.unique(trained)) == 80
    if same:  # each has been trained on, so that the share by hash decides, and takes it from fitting
        assert 0 < len(scored) < 80
        assert np.isin(scored, trained).all()
    else:
        assert len(scored) == 57
        assert not np.isin(scored, trained).any()
