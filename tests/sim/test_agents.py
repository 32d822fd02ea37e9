"""Environments of several agents: rows, ends of agents and of episodes, draws, and the same bits however they run."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from helpers.pretended_gpu import pretended_gpu
from helpers.same_bits import backends, play, require_same
from oracles.team import TEAM
from sim.conftest import environments, play_divided, require_buffers, written

from reagent_lite.errors import KernelBuildError, SimulationError
from reagent_lite.sim.cpu import CpuBackend
from reagent_lite.sim.cuda_build import find_nvcc
from reagent_lite.sim.env import VectorEnv


def make(file: Path, size: int, num_envs: int, **settings: int) -> VectorEnv:
    return environments(file, num_envs, parameters={"size": float(size)}, **settings)


def test_types_of_agents(team: Path) -> None:
    spec = make(team, 2, 2).spec
    types = (spec.agents, spec.agent_types, spec.agent_type_names, spec.agents_of(1))
    assert types == (2, (0, 1), ("leader", "follower"), (1,))


@pytest.mark.parametrize("size", [1, 2, 16, 17, 40])
def test_actions_of_agents_are_drawn_apart_and_do_not_depend_on_the_division(team: Path, size: int) -> None:
    whole = play_divided(partial(make, team, size, seed=5), 300, 12)
    drawn = whole.action.view(300, size)  # independent: first and last agree in about 1/3, 0.44 at the most
    assert size == 1 or (drawn[:, 0] == drawn[:, -1]).float().mean() < 0.6
    assert whole.episode.sum() > 300
    assert len(whole.field("luck").unique()) > 0.99 * 300 * size


def test_an_environment_of_one_agent_draws_as_one_without_the_word(team: Path, tmp_path: Path) -> None:
    text = (
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
    play([make(file, 1, 200, seed=3) for file in (team, written(tmp_path, text, "plain.cuh"))], 60)


@pytest.mark.parametrize(
    ("old", "new", "error", "message"),
    [
        ('#define AGENT_TYPES {"leader", "follower"}\n', "", KernelBuildError, "must define AGENT_TYPES"),
        ("int agent_type(int agent)", "int agent_kind(int agent)", KernelBuildError, "DEVICE int agent_type"),
        ("observe(const State &s, int agent,", "observe(const State &s, long agent,", KernelBuildError,
         "float \\*observation"),
        ("step(State &s, const int *action", "step(State &s, const char *action", KernelBuildError,
         "const int \\*action, float"),
        ("#define NUM", "#define MASKED\n#define NUM", KernelBuildError, "neither CANDIDATES nor MASKED"),
        ("agent == 0 ? 0 : 1", "agent", SimulationError, r"agent_type\(2\) of team: .*got 2"),
        ('"follower"', '"../follower"', SimulationError, r"AGENT_TYPES of team: .*'\.\./follower'"),
    ],
)  # fmt: skip
def test_definitions_that_are_missing_or_wrong_are_named(
    team: Path, old: str, new: str, error: type[Exception], message: str
) -> None:
    team.write_text(TEAM.replace(old, new))
    with pytest.raises(error, match=message):
        CpuBackend(team, {"size": 3}, "exact")


def test_a_reward_that_step_leaves_out_is_0(team: Path) -> None:
    team.write_text(TEAM.replace("reward[a] = in_game(s, a) ? 1.0f : 0.0f;", "if (a == 0) reward[a] = 1.0f;"))
    env = make(team, 2, 50)
    env.reward.fill_(9.0)
    env.step()
    require_buffers(env, reward=[11.0, 0.0] * 50)  # action 0: both counts become 1


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
        assert ("env_step", *{2: (3, 32), 17: (70, 32), 40: (70, 64)}[size]) in {note[1:] for note in gpu.notes}
