"""Training several types of agents: what each learns and leaves, who else may play, and what is refused."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.bundles import linear_bundle
from helpers.played import played
from helpers.runs import ALONE, Tree, checked, merged, trained
from helpers.simulated import made
from oracles.team import TEAM

from reagent_lite.config import check
from reagent_lite.config.simulate_config import SimulateConfig
from reagent_lite.distributed.launcher import choose_processes
from reagent_lite.doctor import machine
from reagent_lite.errors import ReagentLiteError
from reagent_lite.export import load_bundle
from reagent_lite.rl.policies import EpsilonGreedy
from reagent_lite.run.environments import open_simulation
from reagent_lite.run.episode_picture import record
from reagent_lite.run.learner import build_learners
from reagent_lite.run.resolved import resolve
from reagent_lite.tasks.simulate import simulate


@pytest.fixture
def team(tmp_path: Path) -> Tree:
    """A leader and two followers; with gamma 0.5 the leader's best is two steps of 3, worth 33 + 66 / 2."""
    (tmp_path / "team.cuh").write_text(TEAM)
    return {
        "model_output_path": str(tmp_path / "out"),
        "use_gpu": False,
        "rl": {"gamma": 0.5, "target_update_rate": 0.1, "epsilon": 0.0, "softmax_policy": False},
        "training": {"layers": [-1, 32, -1], "activations": ["relu", "linear"], "minibatch_size": 128,
                     "learning_rate": 0.02, "l2_decay": 0.0},
        "simulation": {"env": str(tmp_path / "team.cuh"), "env_parameters": {"size": 3}, "num_envs": 16,
                       "total_steps": 6000, "warmup_steps": 2000, "epsilon_end": 0.5, "num_evaluations": 2,
                       "evaluation_episodes": 20},
    }  # fmt: skip


def read(folder: Path) -> Any:
    return json.loads((folder / "evaluation.json").read_text())


def test_each_type_has_a_policy_a_model_and_figures(team: Tree, tmp_path: Path) -> None:
    outcome, out, names = trained(team), tmp_path / "out", ("leader", "follower")
    assert (outcome.model, outcome.rows) == ({name: str(out / name) for name in names}, 250 * 128 * 2)
    # the last step is worth its reward: own count and ten times the leader's, here 4, 5 or 6 of both
    leader = load_bundle(out / "leader").predict(np.array([[3, 0, 0.5], [0, 0, 0.5]], np.float32))
    np.testing.assert_allclose(leader.q[0], [44, 55, 66], rtol=0.1)
    assert outcome.scores["simulation/leader/return/mean"] == 99  # 33 + 66
    page = (out / "report.html").read_text()
    for name, other in (names, names[::-1]):
        document = read(out / name)
        value = outcome.scores[f"simulation/{name}/return/mean"]
        assert document["simulated"]["return"]["value"] == document["agents"]["returns"][name] == value
        assert "simulation.policies" in document["decision"]["next"]  # workflows.evaluate plays no several types
        assert f"in all of them {other} plays its learned policy" in page


def test_the_recorded_episode_ends_with_the_catch(team: Tree) -> None:
    tag = {"env": "tag_gridworld", "env_parameters": {"num_taggers": 4, "grid_length": 3}}
    config = checked(merged(team, {"simulation": tag}))
    source = resolve(config, ALONE).open_source()
    trace = record(source.encoder, build_learners(config, source.spec, source.types, ALONE.device), EpsilonGreedy(1.0))
    assert trace.ending == "terminated"
    x, y = (places * 3 for places in (trace.agents.x, trace.agents.y))
    assert ((x[:, :4] == x[:, 4:]) & (y[:, :4] == y[:, 4:])).any(1).tolist() == [False] * len(trace.action) + [True]


def test_agents_of_one_type_share_one_policy(team: Tree, tmp_path: Path) -> None:
    (tmp_path / "team.cuh").write_text(
        TEAM.replace('{"leader", "follower"}', '{"member"}').replace("agent == 0 ? 0 : 1", "0")
    )
    outcome = trained(merged(team, {"simulation": {"total_steps": 2500, "num_evaluations": 1}}))
    assert outcome.model == str(tmp_path / "out/model")
    # the mean of three agents with 1 to 6 and ten times the first one's count, in two to four steps
    assert 31 < (outcome.scores["simulation/return/mean"] or 0) < 4 * 66


def test_a_type_may_play_at_random_or_by_an_exported_model(team: Tree, tmp_path: Path) -> None:
    first = trained(merged(team, {"simulation": {"policies": {"follower": "random"}}}))
    leader = {"leader": str(tmp_path / "out/leader")}
    assert first.model == leader
    assert read(tmp_path / "out/leader")["agents"]["others"] == "follower plays uniformly random actions"
    beside = merged(team, {"simulation": {"policies": leader}})
    second = trained(beside | {"model_output_path": str(tmp_path / "second")})
    assert second.scores["simulation/leader/return/mean"] == 99  # the exported leader's two steps of 3
    assert second.model == {"follower": str(tmp_path / "second/follower")}
    # a follower that stays two steps with such a leader gets 3 + 30 and 6 + 60, in small steps 1 + 30, 2 + 60, …
    assert second.scores["simulation/follower/return/mean"] > second.scores["simulation/follower/random_return/mean"]
    # a learner of leaders is none of followers, though their networks are alike, and one type's model is no learner
    for path, words in (("out", "learners.type_follower"), ("out/leader", "is an exported model, which has one")):
        warm = {"model_output_path": "third", "training": {"warm_start_model_path": str(tmp_path / path)}}
        with pytest.raises(ReagentLiteError, match=re.escape(words)):
            trained(merged(beside, warm))


def test_the_return_of_the_only_type_that_learns_ends_a_run(team: Tree) -> None:
    """The leader's last step alone is worth 44; 31 updates are in two parts of 16 at most."""
    change = {"policies": {"follower": "random"}, "total_steps": 2500, "stop_at_return": 40}
    assert trained(merged(team, {"simulation": change})).steps == 16


@pytest.mark.parametrize(
    ("workflow", "change"),
    [
        ("dqn", {"rainbow": {"bcq": True}}),
        ("dqn", {"algorithm": "crr"}),
        ("dqn", {"rl": {"maxq_learning": False, "multi_steps": 2}, "simulation": {"replay": {"prioritized": True}}}),
        ("parametric_dqn", {"simulation": {"exploration": "softmax"}, "training": {"minibatches_per_step": 2}}),
    ],
    ids=str,
)
def test_options_of_learners_hold_for_each_type(team: Tree, workflow: str, change: Tree) -> None:
    # softmax knows no end of epsilon
    short = merged(
        team, {"simulation": {"total_steps": 1000, "warmup_steps": 300, "num_evaluations": 1, "epsilon_end": None}}
    )
    assert trained(merged(short, change), workflow).scores["simulation/follower/return/mean"] is not None


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"policies": {"captain": "random"}}, "policies.captain: expected one of leader"),
        ({"policies": {"leader": "randm"}}, "Did you mean 'random'?"),
        ({"env_parameters": {"size": 1}}, "an agent of each type, got no follower"),
        ({"policies": {"leader": "random", "follower": "random"}}, "at least one of leader"),
        ({"policies": {"leader": "no such folder"}}, "no such folder"),
        ({"policies": {"leader": "of_two_actions"}}, "actions 0, 1, 2 of team"),
        ({"stop_at_return": 5.0}, "simulation.stop_at_return"),
        ({"env": "cartpole_v0", "env_parameters": {}, "policies": {"agent": "learn"}}, "are of one type, which learns"),
        ({"env": "folders.cuh"}, "leader.."),
        ({"env": "folders.cuh"}, "'checkpoints'"),
        ({"share": 0.5, "total_steps": None, "num_evaluations": None}, "one type of agents"),
    ],
)
def test_policies_that_do_not_fit_end_with_a_sentence(team: Tree, tmp_path: Path, change: Tree, says: str) -> None:
    """Names of types are those of folders; several types do not learn beside a log."""
    Path("folders.cuh").write_text(TEAM.replace('"leader"', '"leader.."').replace('"follower"', '"checkpoints"'))
    linear_bundle(Path("of_two_actions"), np.zeros((2, 3)), ("0", "1"), (0, 1, 2))
    simulation = {key: value for key, value in {**team["simulation"], **change}.items() if value is not None}
    log = {"training_data_path": "log.jsonl", "actions": ["0", "1", "2"]} if "share" in change else {}
    with pytest.raises(ReagentLiteError, match=re.escape(says)):
        open_simulation(checked({**team, "simulation": simulation, **log}, "dqn"), ALONE)


def test_the_doctor_says_who_plays(team: Tree) -> None:
    config = checked(merged(team, {"simulation": {"policies": {"follower": "random"}}}))
    _, policies = machine.simulation(config, choose_processes(config))
    assert policies.found == "leader (1 agent) learns, follower (2 agents) plays uniformly random actions"


def test_one_model_does_not_play_all_types(team: Tree, tmp_path: Path) -> None:
    env: Tree = {"env": str(tmp_path / "team.cuh"), "output_path": str(tmp_path / "log.jsonl"), "use_gpu": False}
    with pytest.raises(ReagentLiteError, match=r"env, with value_of: .* one type"):
        simulate(check(SimulateConfig, env | {"value_of": {"kind": "random", "gamma": 0.9}}))
    model = linear_bundle(tmp_path / "model", np.zeros((3, 3)), ("0", "1", "2"), (0, 1, 2))
    with pytest.raises(ReagentLiteError, match=r"simulation\.env: .* one type"):
        played(tmp_path, model, env["env"], 2)


def test_a_log_may_have_a_model_for_each_type(team: Tree, tmp_path: Path) -> None:
    weights = {"leader": np.array([[0.0, 0, 1], [0, 0, -1], [0, 0, 3]]),
               "follower": np.array([[1.0, 0, 0], [1, 0, 0], [1, 0, 2]])}  # fmt: skip
    models = {name: str(linear_bundle(tmp_path / name, w, ("0", "1", "2"), (0, 1, 2))) for name, w in weights.items()}
    tree = {"env": str(tmp_path / "team.cuh"), "env_parameters": {"size": 3}, "episodes": 50,
            "policy": {"kind": "epsilon_greedy", "model": models["leader"], "epsilon": 0.3},
            "policies": {"follower": models["follower"]}}  # fmt: skip
    _, log = made(tmp_path, **tree)
    leads = np.array([row["mdp_id"].endswith("-0") for row in log.rows])
    q = np.where(leads[:, None], log.state @ weights["leader"].T, log.state @ weights["follower"].T)
    softmax = np.exp(q) / np.exp(q).sum(1, keepdims=True)  # which the follower was exported with
    greedy = np.where(q == q.max(1, keepdims=True), 0.7 + 0.1, 0.1)
    propensity = np.where(leads[:, None], greedy, softmax)[np.arange(len(q)), log.action.astype(int)]
    np.testing.assert_allclose(log.propensity, propensity, rtol=1e-5)
    with pytest.raises(ReagentLiteError, match=r"policy\.model: expected a model for one type"):
        made(tmp_path, **tree | {"policies": {}})
