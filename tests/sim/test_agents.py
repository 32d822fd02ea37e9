"""Environments of several agents: rows, ends of agents and of episodes, draws, and the same bits however they run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from oracles.pretended_gpu import pretended_gpu
from oracles.same_bits import backends, play, require_same, step
from oracles.team import TEAM

from reagent_lite.errors import KernelBuildError, SimulationError
from reagent_lite.sim import episodes
from reagent_lite.sim.cpu import CpuBackend
from reagent_lite.sim.cuda_build import find_nvcc
from reagent_lite.sim.env import VectorEnv
from reagent_lite.sim.rollout import Actor


@pytest.fixture
def team(tmp_path: Path) -> Path:
    file = tmp_path / "team.cuh"
    file.write_text(TEAM)
    return file


def make(file: Path, size: int, num_envs: int, **settings: int) -> VectorEnv:
    env = VectorEnv(CpuBackend(file, {"size": size}, "exact", threads=1), num_envs=num_envs, **settings)
    env.reset()
    return env


def test_rows_of_a_hand_computed_episode(team: Path) -> None:
    """Two environments: (leader, follower) take (2, 0), then (0, 0), then the leader has left; and (2, 2) twice."""
    env = make(team, 2, 2)
    spec = env.spec
    assert (spec.agents, spec.agent_types, spec.agent_type_names) == (2, (0, 1), ("leader", "follower"))
    assert spec.agents_of(1) == (1,)
    assert env.num_rows == 4
    assert env.in_game is not None
    assert env.next_in_game is not None
    assert env.in_game.tolist() == [True] * 4

    def take(*actions: int) -> None:
        env.action.copy_(torch.tensor(actions))
        env.step()

    take(2, 0, 2, 2)
    assert env.reward.tolist() == [33, 31, 33, 33]
    assert env.observation[:, :2].tolist() == [[3, 0], [1, 0], [3, 0], [3, 0]]
    take(0, 0, 2, 2)
    assert env.reward.tolist() == [44, 42, 66, 66]
    assert env.terminated.tolist() == [False, True]
    assert env.next_in_game.tolist() == [False, True, False, False]
    assert env.in_game.tolist() == [False, True, True, True]  # the second environment starts anew
    assert env.row_terminated.tolist() == [True, False, True, True]
    assert env.next_observation[:, :2].tolist() == [[4, 1], [2, 1], [6, 2], [6, 2]]
    assert env.observation[:, :2].tolist() == [[4, 1], [2, 1], [0, 0], [0, 0]]
    assert env.last_return.tolist() == [0, 0, 99, 99]
    assert (env.episode.tolist(), env.step_count.tolist(), env.last_length.tolist()) == ([0, 1], [2, 0], [0, 2])
    take(2, 0, 0, 0)
    assert env.reward.tolist() == [0, 43, 11, 11]  # who left gets nothing
    assert env.episode_return.tolist() == [77, 116, 11, 11]


def test_a_time_limit_truncates_those_in_the_game(team: Path) -> None:
    env = make(team, 3, 1, time_limit=2)
    for _ in range(2):
        env.action.copy_(torch.tensor([2, 0, 1]))
        env.step()
    assert env.truncated.tolist() == [True]
    assert env.row_terminated.tolist() == [True, False, True]
    assert env.row_truncated.tolist() == [False, True, False]


@pytest.mark.parametrize("size", [1, 2, 16, 17, 40])
def test_actions_of_agents_are_drawn_apart_and_do_not_depend_on_the_division(team: Path, size: int) -> None:
    whole = make(team, size, 300, seed=5)
    parts = [make(team, size, num, seed=5, first_env=first) for first, num in ((0, 77), (77, 223))]
    for number in range(12):
        q = torch.randn(300 * size, 3, generator=torch.Generator().manual_seed(number))
        for env in (whole, *parts):
            begin = env.first_env * size
            step(env, number, q[begin : begin + env.num_rows])
        for name in ("observation", "next_observation", "action", "propensity", "reward", "episode_return", "ended"):
            assert torch.equal(torch.cat([getattr(env, name) for env in parts]), getattr(whole, name)), name
        if size > 1:
            drawn = whole.action.view(300, size).float()
            assert (drawn[:, 0] == drawn[:, 1]).float().mean() < 0.6  # independent: about 1/3, 0.44 at the most
    assert whole.episode.sum() > 300
    luck = whole.field("luck").view(size, 300)
    assert len(luck.unique()) > 0.99 * 300 * size


def test_an_environment_of_one_agent_draws_as_one_without_the_word(team: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain.cuh"
    plain.write_text(
        TEAM.replace("#define AGENTS int(size)\n#define AGENT_TYPES", "#define MEMBERS 1 //")
        .replace("AGENTS", "MEMBERS")
        .replace("FOR_MEMBERS(a)", "for (int a = 0; a < 1; ++a)")
        .replace("ONCE ", "")
        .replace("observe(const State &s, int agent, float *observation) {",
                 "observe(const State &s, float *observation) { int agent = 0;")
        .replace("void step(State &s, const int *action, float *reward, Random &random, bool &terminated) {",
                 "float step(State &s, int a, Random &random, bool &terminated) { int action[]{a}; float reward[1];")
        .replace("terminated = s.left == MEMBERS;", "terminated = s.left == MEMBERS; return reward[0];")
    )  # fmt: skip
    envs = [make(team, 1, 200, seed=3), make(plain, 1, 200, seed=3)]
    play(envs, 60)


@pytest.mark.parametrize(("block_rows", "most_rounds"), [(1 << 15, 256), (40, 3)])
def test_episodes_are_those_of_each_agent(
    team: Path, monkeypatch: pytest.MonkeyPatch, block_rows: int, most_rounds: int
) -> None:
    """Against a plain loop: an agent's episode ends where it leaves, or with its environment's."""
    monkeypatch.setattr(episodes, "BLOCK_ROWS", block_rows)
    monkeypatch.setattr(episodes, "_MOST_ROUNDS", most_rounds)
    A, num = 3, 4
    truth: dict[tuple[int, int, int], list[tuple[list[float], int, float, list[float], bool]]] = {}
    env = make(team, A, num, time_limit=3, seed=2, first_env=10)
    for _ in range(40):
        seen, playing, number = env.observation.tolist(), env.in_game.clone(), env.episode.tolist()
        env.act(None, epsilon=torch.ones(1))
        env.step()
        for row in range(num * A):
            if playing[row]:
                n, agent = divmod(row, A)
                truth.setdefault((10 + n, number[n], agent), []).append(
                    (seen[row], int(env.action[row]), float(env.reward[row]), env.next_observation[row].tolist(),
                     bool(env.row_terminated[row]))
                )  # fmt: skip
    for amount in (episodes.Amount(9, "episodes"), episodes.Amount(60, "rows")):
        env = make(team, A, num, time_limit=3, seed=2, first_env=10)
        blocks = list(episodes.whole_episodes(env, [Actor(policy=None, epsilon=torch.ones(1))], amount))
        games = [(env, number) for one in blocks for env, number in zip(one.env, one.number, strict=True)]
        assert len(games) == A * len(set(games))
        found = 0
        for one in blocks:
            ends = one.lengths.cumsum()
            for k, key in enumerate(zip(one.env, one.number, one.agent, strict=True)):
                rows = truth[key]
                found += len(rows)
                mine = slice(ends[k] - one.lengths[k], ends[k])
                assert one.state[mine].tolist() == [row[0] for row in rows]
                assert one.action[mine].tolist() == [row[1] for row in rows]
                assert one.reward[mine].tolist() == [row[2] for row in rows]
                assert (one.last_state[k].tolist(), one.terminal[k]) == rows[-1][3:]
        if amount.unit == "episodes":
            assert len(set(games)) == amount.number
        else:
            last = sum(len(truth[(*games[-1], agent)]) for agent in range(A))
            assert found - last < 60 <= found
        assert {int(length) for one in blocks for length in one.lengths} == {2, 3}
        assert {bool(end) for one in blocks for end in one.terminal} == {True, False}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('#define AGENT_TYPES {"leader", "follower"}\n', "", "must define AGENT_TYPES"),
        ("int agent_type(int agent)", "int agent_kind(int agent)", r"DEVICE int agent_type\(int agent\)"),
        (
            "observe(const State &s, int agent,",
            "observe(const State &s, long agent,",
            "int agent, float \\*observation",
        ),
        (
            "step(State &s, const int *action",
            "step(State &s, const char *action",
            "const int \\*action, float \\*reward",
        ),
        ("#define NUM", "#define MASKED\n#define NUM", "neither CANDIDATES nor MASKED"),
    ],
)
def test_a_missing_definition_is_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    file = tmp_path / "team.cuh"
    file.write_text(TEAM.replace(old, new))
    with pytest.raises(KernelBuildError, match=message):
        CpuBackend(file, {}, "exact")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("agent == 0 ? 0 : 1", "agent", r"agent_type\(2\) of team: .*0 to 1 \(leader, follower\).*got 2"),
        ('"follower"', '"../follower"', r"AGENT_TYPES of team: expected names of letters, .*'\.\./follower'"),
    ],
)
def test_types_without_a_usable_name_are_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    file = tmp_path / "team.cuh"
    file.write_text(TEAM.replace(old, new))
    with pytest.raises(SimulationError, match=message):
        CpuBackend(file, {"size": 3}, "exact")


def test_a_reward_that_step_leaves_out_is_0(tmp_path: Path) -> None:
    file = tmp_path / "team.cuh"
    file.write_text(TEAM.replace("reward[a] = in_game(s, a) ? 1.0f : 0.0f;", "if (a == 0) reward[a] = 1.0f;"))
    env = VectorEnv(CpuBackend(file, {}, "exact"), num_envs=50)
    env.reset()
    env.reward.fill_(9.0)
    env.step()
    assert env.reward.tolist() == [11.0, 0.0] * 50  # action 0: both counts become 1


@pytest.mark.skipif(find_nvcc() is None, reason="no nvcc on this machine")
@pytest.mark.parametrize("size", [2, 17, 40])
def test_a_gpu_gives_the_same_bits(team: Path, size: int) -> None:
    """One thread per environment, and above 16 agents one block: the PTX, run on the CPU."""
    with pretended_gpu() as gpu:
        envs = [VectorEnv(backend, num_envs=70, time_limit=7) for backend in backends(team, parameters={"size": size})]
        play(envs, 40)
        for env in envs:
            env.action[:3] = 200
            env.advance()
            env.observe()
        require_same(envs, "advance")
        for env in envs:
            with pytest.raises(SimulationError, match="3 that are not"):
                env.check()
        expected = ("env_step", 70, 64 if size > 32 else 32) if size > 16 else ("env_step", 3, 32)
        assert expected in {note[1:] for note in gpu.notes}
