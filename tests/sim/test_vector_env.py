"""The contract of many environments, by transitions worked out by hand."""

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from oracles.team import TEAM
from sim.conftest import COUNTER, MASKED_COUNTER, MakeEnv, play_at_random, require_buffers, take
from torch import Tensor
from torch.testing import assert_close

from reagent_lite.errors import SimulationError
from reagent_lite.sim import env as env_module
from reagent_lite.sim.env import VectorEnv
from reagent_lite.sim.spec import EnvSpec, Field


def tensors_of(env: VectorEnv) -> dict[str, Tensor]:
    return {name: value for name, value in vars(env).items() if isinstance(value, Tensor)}


# -- Transitions --------------------------------------------------------------------------------------------------


NOTHING = [False, False, False]
OVER = [i in {0, 1, 7, 8, 63, 64, 511, 1022, 1023, 1024, 1025, 2047, 2048, 2498, 2499} for i in range(2500)]
SHOWN_TEAM = TEAM.replace("observation[2] = s.luck[agent]", "observation[2] = 0.0f")


@pytest.mark.parametrize(("source", "settings", "steps", "fault"), [
    pytest.param(COUNTER, {"num_envs": 2}, [
        ((0, 2), {"observation": [[1, -1], [3, -1]], "next_observation": [[1, -1], [3, -1]], "reward": [1, 3],
                  "ended": [0, 0], "step_count": [1, 1], "episode_return": [1, 3],
                  "past": [[0, 2], [-1, -1]]}),  # [2, N]: newest, older
        # 1 + 3 = 4 and 3 + 1 = 4: both arrive, and start anew in the same step
        ((2, 0), {"next_observation": [[4, 0], [4, 2]],  # where it led: the count, and the action before the last
                  "observation": [[0, -1], [0, -1]],  # what comes next
                  "reward": [4, 4], "terminated": [True, True], "truncated": [False, False],
                  "last_return": [1 + 4, 3 + 4], "last_length": [2, 2], "step_count": [0, 0], "episode": [1, 1],
                  "episode_return": [0, 0]}),
        # statistics stay until the next episode ends
        ((2, 0), {}),  # counts 3, 1
        ((2, 0), {"last_return": [3 + 6, 7], "ended": [1, 0]}),  # 6: ends; 2
        ((0, 0), {"last_return": [9, 7], "last_length": [2, 2], "ended": [0, 0]}),  # 1; 3
        ((0, 0), {"last_return": [9, 1 + 2 + 3 + 4], "last_length": [2, 4], "episode": [2, 2]}),  # 2; 4: ends
    ], "", id="steps and ends"),
    pytest.param(COUNTER, {"num_envs": 2}, [
        ((0, 2), {}),
        ((2, 1), {"stay": True, "next_observation": [[4, 0], [5, 2]], "observation": [[4, 0], [5, 2]],
                  "terminated": [True, True], "count": [4, 5]}),
    ], "", id="a last step shows where an episode led"),
    pytest.param(COUNTER, {"num_envs": 2, "time_limit": 2}, [
        ((0, 0), {}),
        ((0, 2), {"ended": [2, 1],  # counts 2 and 4: cut off, and arrived in its last step, which wins over the limit
                  "terminated": [False, True], "truncated": [True, False], "next_observation": [[2, 0], [4, 0]],
                  "observation": [[0, -1], [0, -1]], "last_return": [1 + 2, 1 + 4]}),
    ], "", id="a time limit truncates"),
    pytest.param(MASKED_COUNTER, {"num_envs": 2}, [  # only actions above the count
        ((1, 2), {"next_mask": [NOTHING] * 2, "mask": [NOTHING] * 2}),  # counts 2, 3: nothing is left
        # not allowed, and neither is anything else: action 0 is taken; counts 3 and 4, the second starts anew
        ((0, 0), {"next_observation": [[3, 1], [4, 2]], "next_mask": [NOTHING] * 2,
                  "mask": [NOTHING, [False, True, True]]}),
    ], "2 that are not", id="masks follow the state"),
    pytest.param(MASKED_COUNTER, {"num_envs": 3, "first_env": 100}, [
        ((1, 0, 1), {"next_observation": [[2, -1]] * 3}),
    ], r"allowed actions, got 1 .* is 101", id="a forbidden action becomes the first allowed"),
    pytest.param(COUNTER, {"num_envs": 2000, "first_env": 50}, [
        ([3 * (i in (7, 1500, 1999)) for i in range(2000)], {"next_observation": [[1, -1]] * 2000}),  # action 0
    ], "from 0 to 2, got 3 that are not, the first environment with one is 57", id="an action out of range"),
    pytest.param(COUNTER, {"num_envs": 2500, "parameters": {"goal": 3.0}}, [  # three blocks, the last one short
        ([2 * end for end in OVER], {
            "terminated": OVER, "episode": OVER, "step_count": [not end for end in OVER],
            "observation": [[not end, -1] for end in OVER], "next_observation": [[1 + 2 * end, -1] for end in OVER]}),
    ], "", id="ends are found wherever they are"),
    # rows of (leader, follower): one takes (2, 0), then (0, 0), then the leader has left; the other (2, 2) twice
    pytest.param(SHOWN_TEAM, {"num_envs": 2}, [
        ((2, 0, 2, 2), {"reward": [33, 31, 33, 33], "in_game": [True] * 4,
                        "observation": [[3, 0, 0], [1, 0, 0], [3, 0, 0], [3, 0, 0]]}),
        ((0, 0, 2, 2), {"reward": [44, 42, 66, 66], "terminated": [False, True],
                        "next_in_game": [False, True, False, False],
                        "in_game": [False, True, True, True],  # the second environment starts anew
                        "row_terminated": [True, False, True, True], "last_return": [0, 0, 99, 99], "episode": [0, 1],
                        "step_count": [2, 0], "last_length": [0, 2],
                        "next_observation": [[4, 1, 0], [2, 1, 0], [6, 2, 0], [6, 2, 0]],
                        "observation": [[4, 1, 0], [2, 1, 0], [0, 0, 0], [0, 0, 0]]}),
        ((2, 0, 0, 0), {"reward": [0, 43, 11, 11], "episode_return": [77, 116, 11, 11]}),  # who left gets nothing
    ], "", id="agents that leave"),
    pytest.param(SHOWN_TEAM, {"num_envs": 1, "time_limit": 2, "parameters": {"size": 3.0}}, [
        ((2, 0, 1), {}),
        ((2, 0, 1), {"truncated": [True], "row_terminated": [True, False, True],
                     "row_truncated": [True] * 3}),
    ], "", id="a time limit truncates agents in the game; some leave at it"),
])  # fmt: skip
def test_hand_computed_steps(
    counter: MakeEnv, source: str, settings: dict[str, Any], steps: list[tuple[Any, dict[str, Any]]], fault: str
) -> None:
    env = counter(source, **settings)
    for actions, expected in steps:
        take(env, *actions, **expected)
    with pytest.raises(SimulationError, match=fault) if fault else nullcontext():
        env.check()
    env.check()  # a fault is counted once


def test_reset_starts_over_and_buffers_keep_their_addresses(counter: MakeEnv) -> None:
    env = counter(num_envs=3, time_limit=2)
    start = env.state_dict()
    addresses = {name: tensor.data_ptr() for name, tensor in tensors_of(env).items()}
    play_at_random(env, 5)
    env.load_state_dict(env.state_dict())
    take(env, 0, 1, 9)
    env.reset()
    assert_close(env.state_dict(), start, rtol=0, atol=0)
    assert {name: getattr(env, name).data_ptr() for name in addresses} == addresses


# -- Choices --------------------------------------------------------------------------------------------------------


def test_features_of_fixed_actions(counter: MakeEnv) -> None:
    require_buffers(counter(num_envs=2, parametric=True), features=[np.eye(3).tolist()] * 2)
    squares = "void action_features(int action, float *f) { f[0] = float(action); f[1] = f[0] * f[0]; }\n"
    env = counter(f"#define ACTION_FEATURE_SIZE 2\n{COUNTER}DEVICE {squares}", num_envs=2, parametric=True)
    require_buffers(env, features=[[[0, 0], [1, 1], [2, 4]]] * 2)


CANDIDATES = "#define CANDIDATES\n#define ACTION_FEATURE_SIZE 2\n" + COUNTER.replace(
    "DEVICE float step",
    """DEVICE bool candidate(const State &s, int k, Random &random, float *features) {
  features[0] = uniform(random);
  features[1] = float(10 * s.count + k);
  return k <= s.count;
}
DEVICE float step""",
).replace("s.past[1] = s.past[0];", "float f[2]; candidate_of(s, action, random, f); s.past[1] = f[0];")


def test_equal_candidates_of_a_log_are_one_choice(counter: MakeEnv) -> None:
    two = CANDIDATES.replace("uniform(random)", "k == 0 ? -0.0f : 0.0f").replace("10 * s.count + k", "k / 2")
    env = counter(two.replace("k <= s.count", "true"), num_envs=500, parametric=True)
    env.close_equal_candidates()
    env.act(torch.tensor([[2.0, 2.0, 1.0]]).expand(500, 3), epsilon=torch.tensor([0.5]))
    require_buffers(env, mask=[[True, False, True]] * 500)
    assert set(zip(env.action.tolist(), env.propensity.tolist(), strict=True)) == {(0, 0.75), (2, 0.25)}


# -- State and faults -------------------------------------------------------------------------------------------------


def test_a_saved_state_goes_on_as_it_would_have(counter: MakeEnv) -> None:
    env, other = (counter(num_envs=7, seed=1, time_limit=5) for _ in range(2))
    play_at_random(env, 8)
    saved = env.state_dict()
    other.load_state_dict(saved)
    for each in (env, other):
        play_at_random(each, 20)
    assert_close(other.state_dict(), env.state_dict(), rtol=0, atol=0)
    assert not torch.equal(saved["episode"], env.episode)  # copies, not views


@pytest.mark.parametrize("settings", [{"num_envs": 6}, {"num_envs": 7, "seed": 2}, {"num_envs": 7, "first_env": 1}])
def test_state_of_other_environments_is_refused(counter: MakeEnv, settings: dict[str, int]) -> None:
    with pytest.raises(SimulationError, match="Resume with the settings"):
        counter(**settings).load_state_dict(counter(num_envs=7).state_dict())


def test_returns_and_observations_have_to_be_finite(counter: MakeEnv) -> None:
    env = counter(num_envs=2000, first_env=50, parameters={"worth": 3e38})
    env.action[1500] = 1
    env.step()
    with pytest.raises(SimulationError, match=r"rewards of .* inf in environment 1550"):
        env.check()
    env.reset()
    env.check()
    env.field("past")[1, 7] = torch.nan
    env.observe()
    with pytest.raises(SimulationError, match=r"observations of .* nan in environment 57"):
        env.check()


# candidates have 28 bits: 100 of each step from 0 to the limit, where the last next observation has some too
HUNDRED = CANDIDATES.replace("NUM_ACTIONS 3", "NUM_ACTIONS 100")
MOST = 2**28 // 100 - 1


@pytest.mark.parametrize(
    ("source", "last", "settings", "says"),
    [
        (COUNTER, {}, {"num_envs": 0}, "num_envs: expected at least 1"),
        (COUNTER, {}, {"time_limit": 0}, "time_limit: expected at least 1"),
        (COUNTER, {"first_env": 2**32 - 2}, {"first_env": 2**32 - 1}, "global ids"),  # 32 bits
        (COUNTER, {"time_limit": 2**24}, {"time_limit": 2**24 + 1}, r"at most 16777216 steps, .* got 167"),
        (HUNDRED, {"time_limit": MOST}, {"time_limit": MOST + 1}, f"at most {MOST} steps"),
    ],
)
def test_settings_out_of_range(
    counter: MakeEnv, source: str, last: dict[str, int], settings: dict[str, int], says: str
) -> None:
    counter(source, **{"num_envs": 2, "parametric": True, **last}).step()
    with pytest.raises(SimulationError, match=says):
        counter(source, **{"num_envs": 2, "parametric": True, **settings})


def test_more_environments_than_memory(counter: MakeEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    # 4 words of state, 2 + 2 of observations, 7 more (step count, episode, return, last return and length, propensity,
    # reward), action and ended: 4 * 15 + 2 = 62 bytes; 6.2e9 / 2^30
    monkeypatch.setattr(env_module, "free_bytes", lambda device: 3 * 2**30)
    with pytest.raises(
        SimulationError, match=f"3.0 GiB free on cpu.*100000000, which need 5.8 GiB.*At most {3 * 2**30 // 62} fit"
    ):
        counter(num_envs=100_000_000)


def test_bytes_are_estimated_as_allocated(counter: MakeEnv) -> None:
    for source, parametric in ((COUNTER, False), (MASKED_COUNTER, False), (CANDIDATES, True)):
        env = counter(source, num_envs=1000, parametric=parametric)
        tensors = {id(tensor): tensor for tensor in tensors_of(env).values()}
        # less the error word
        assert sum(tensor.nbytes for tensor in tensors.values()) - 8 == 1000 * env.bytes_per_env


def test_spec_is_what_the_file_says(counter: MakeEnv) -> None:
    env = counter(MASKED_COUNTER, num_envs=2)
    require_buffers(env, observation=[[0, -1], [0, -1]], step_count=[0, 0], episode=[0, 0])
    assert env.spec == EnvSpec(
        name="counter", num_actions=3, observation_size=2, time_limit=100, action_feature_size=3, candidates=False,
        agents=1, threads_per_env=1, masked=True, action_bytes=1, action_names=("0", "1", "2"),
        agent_type_names=("agent",), agent_types=(0,), parameters={"goal": 4.0, "worth": 1.0},
        parameter_lists={},
        fields=(Field("count", "int", 1), Field("past", "float", 2), Field("lot", "unsigned", 1)),
        feature_bytes=b"",
    )  # fmt: skip
    assert env.spec.action_features.tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    with pytest.raises(SimulationError, match="one of count, past, lot, got 'speed'"):
        env.field("speed")
