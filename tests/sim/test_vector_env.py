"""The contract of many environments, by transitions worked out by hand, and their policies by probabilities."""

import numpy as np
import pytest
import torch
from oracles import philox
from sim.conftest import COUNTER, MASKED_COUNTER, MakeEnv, require_buffers
from torch import Tensor

from reagent_lite.errors import SimulationError
from reagent_lite.sim import env as env_module
from reagent_lite.sim.env import VectorEnv
from reagent_lite.sim.spec import EnvSpec, Field

ONE = torch.ones(1)


def take(env: VectorEnv, *actions: int) -> None:
    env.action.copy_(torch.tensor(actions))
    env.step()


# -- Transitions --------------------------------------------------------------------------------------------------


def test_steps_and_ends_of_episodes(counter: MakeEnv) -> None:
    env = counter(num_envs=2)
    take(env, 0, 2)
    require_buffers(env, observation=[[1, -1], [3, -1]], next_observation=[[1, -1], [3, -1]], reward=[1, 3],
                    ended=[0, 0], step_count=[1, 1], episode_return=[1, 3])  # fmt: skip
    assert env.field("past").tolist() == [[0, 2], [-1, -1]]  # [2, N]: newest, older
    take(env, 2, 0)  # 1 + 3 = 4 and 3 + 1 = 4: both arrive, and start anew in the same step
    require_buffers(
        env,
        next_observation=[[4, 0], [4, 2]],  # where it led: the count, and the action before the last
        observation=[[0, -1], [0, -1]],  # what comes next
        reward=[4, 4], terminated=[True, True], truncated=[False, False], last_return=[1 + 4, 3 + 4],
        last_length=[2, 2], step_count=[0, 0], episode=[1, 1], episode_return=[0, 0],
    )  # fmt: skip
    # statistics stay until the next episode ends
    take(env, 2, 0)  # counts 3, 1
    take(env, 2, 0)  # 6: ends; 2
    require_buffers(env, last_return=[3 + 6, 7], ended=[1, 0])
    take(env, 0, 0)  # 1; 3
    require_buffers(env, last_return=[9, 7], last_length=[2, 2], ended=[0, 0])
    take(env, 0, 0)  # 2; 4: ends
    require_buffers(env, last_return=[9, 1 + 2 + 3 + 4], last_length=[2, 4], episode=[2, 2])


def test_a_last_step_shows_where_an_episode_led(counter: MakeEnv) -> None:
    env = counter(num_envs=2)
    take(env, 0, 2)
    env.action.copy_(torch.tensor([2, 1]))
    env.step(stay=True)
    require_buffers(env, next_observation=[[4, 0], [5, 2]], observation=[[4, 0], [5, 2]], terminated=[True, True])
    assert env.field("count").tolist() == [4, 5]
    env.reset()
    assert env.field("count").tolist() == [0, 0]


def test_a_time_limit_truncates(counter: MakeEnv) -> None:
    env = counter(num_envs=2, time_limit=2)
    take(env, 0, 0)
    take(env, 0, 2)  # counts 2 and 4: cut off, and arrived in its last step
    require_buffers(
        env,
        ended=[2, 1],  # one or the other: a true end wins over the limit
        terminated=[False, True], truncated=[True, False], next_observation=[[2, 0], [4, 0]],
        observation=[[0, -1], [0, -1]], last_return=[1 + 2, 1 + 4],
    )  # fmt: skip


def test_ends_are_found_wherever_they_are(counter: MakeEnv) -> None:
    num = 2500  # three blocks, the last one of no round number
    env = counter(num_envs=num, parameters={"goal": 3.0})
    ends = torch.zeros(num, dtype=torch.bool)
    ends[[0, 1, 7, 8, 63, 64, 511, 1022, 1023, 1024, 1025, 2047, 2048, 2498, 2499]] = True
    env.action.copy_(torch.where(ends, 2, 0))
    env.step()
    assert torch.equal(env.terminated, ends)
    assert torch.equal(env.observation[:, 0] == 0, ends)
    assert torch.equal(env.episode == 1, ends)
    assert torch.equal(env.step_count == 0, ends)
    assert torch.equal(env.next_observation[:, 0], torch.where(ends, 3.0, 1.0))


def test_parameters_change_the_dynamics(counter: MakeEnv) -> None:
    env = counter(num_envs=1, parameters={"goal": 2.0, "worth": -0.5})
    take(env, 0)
    assert (env.reward.item(), env.ended.item()) == (-0.5, 0)
    take(env, 0)
    assert (env.reward.item(), env.ended.item()) == (-1, 1)
    assert env.spec.parameters == {"goal": 2, "worth": -0.5}


def test_a_state_written_from_outside(counter: MakeEnv) -> None:
    env = counter(num_envs=3)
    env.field("count").copy_(torch.tensor([1, 2, 3]))
    env.field("past")[1] = 9
    assert env.observation[:, 0].tolist() == [0, 0, 0]
    env.observe()
    require_buffers(env, observation=[[1, 9], [2, 9], [3, 9]], step_count=[0, 0, 0])


def test_reset_starts_over(counter: MakeEnv) -> None:
    env = counter(num_envs=3, time_limit=2)
    before = env.state_dict()
    for _ in range(5):
        take(env, 0, 1, 9)
    env.reset()
    after = env.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_buffers_keep_their_place(counter: MakeEnv) -> None:
    env = counter(num_envs=3)
    tensors = {name: value for name, value in vars(env).items() if isinstance(value, Tensor)}
    places = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    env.act(None, epsilon=ONE)
    env.step()
    env.load_state_dict(env.state_dict())
    env.reset()
    assert places == {name: getattr(env, name).data_ptr() for name in places}


# -- Masks ----------------------------------------------------------------------------------------------------------


def test_masks_follow_the_state(counter: MakeEnv) -> None:
    env = counter(MASKED_COUNTER, num_envs=2)  # only actions above the count
    nothing = [False, False, False]
    require_buffers(env, mask=[[False, True, True]] * 2)
    take(env, 1, 2)  # counts 2, 3: nothing is left
    require_buffers(env, next_mask=[nothing] * 2, mask=[nothing] * 2)
    env.check()
    take(env, 0, 0)  # not allowed, and neither is anything else: action 0 is taken; counts 3 and 4
    assert env.next_observation[:, 0].tolist() == [3, 4]
    require_buffers(env, next_mask=[nothing] * 2, mask=[nothing, [False, True, True]])  # the second has started anew
    with pytest.raises(SimulationError, match="2 that are not"):
        env.check()


def test_a_forbidden_action_becomes_the_first_allowed(counter: MakeEnv) -> None:
    env = counter(MASKED_COUNTER, num_envs=3, first_env=100)
    take(env, 1, 0, 1)
    assert env.next_observation[:, 0].tolist() == [2, 2, 2]  # action 0 became 1
    with pytest.raises(SimulationError, match=r"allowed actions, got 1 .* is 101"):
        env.check()


def test_features_of_fixed_actions(counter: MakeEnv) -> None:
    require_buffers(counter(num_envs=2, parametric=True), features=[np.eye(3).tolist()] * 2)
    own = "#define ACTION_FEATURE_SIZE 2\n" + COUNTER
    own += "DEVICE void action_features(int action, float *f) { f[0] = float(action); f[1] = f[0] * f[0]; }\n"
    require_buffers(counter(own, num_envs=2, parametric=True), features=[[[0, 0], [1, 1], [2, 4]]] * 2)


CANDIDATES = "#define CANDIDATES\n#define ACTION_FEATURE_SIZE 2\n" + COUNTER.replace(
    "DEVICE float step",
    """DEVICE bool candidate(const State &s, int k, Random &random, float *features) {
  features[0] = uniform(random);
  features[1] = float(10 * s.count + k);
  return k <= s.count;
}
DEVICE float step""",
).replace("s.past[1] = s.past[0];", "float f[2]; candidate_of(s, action, random, f); s.past[1] = f[0];")


def test_candidates_are_drawn_by_step_and_slot(counter: MakeEnv) -> None:
    env = counter(CANDIDATES, num_envs=2, first_env=5, seed=3, parametric=True)

    def drawn(env_id: int, episode: int, step: int, k: int) -> float:
        word = philox.draws(1, env_id, episode, philox.CANDIDATES, (step * 3 + k) << 4, (3, 0))
        return float(philox.uniform(word)[0])

    first = [[drawn(5 + i, 0, 0, 0), 0] for i in (0, 1)]
    closed = [0, 0]
    require_buffers(env, mask=[[True, False, False]] * 2, features=[[row, closed, closed] for row in first])
    take(env, 0, 0)
    second = [[[drawn(5 + i, 0, 1, k), 10 + k] for k in (0, 1)] for i in (0, 1)]
    require_buffers(env, mask=[[True, True, False]] * 2, features=[[*rows, closed] for rows in second])
    assert env.field("past")[1].tolist() == [row[0] for row in first]  # step() saw what was offered
    take(env, 1, 0)  # counts 3, 2
    assert env.field("past")[1].tolist() == [second[0][1][0], second[1][0][0]]
    take(env, 0, 0)  # counts 4, 3: the first one ends
    assert env.ended.tolist() == [1, 0]
    assert env.next_features[0, 2].tolist() == [drawn(5, 0, 3, 2), 42]
    assert env.features[0].tolist() == [[drawn(5, 1, 0, 0), 0], closed, closed]
    assert torch.equal(env.features[1], env.next_features[1])
    env.check()


# -- State and faults -------------------------------------------------------------------------------------------------


def test_state_goes_round(counter: MakeEnv) -> None:
    env = counter(num_envs=7, seed=1, time_limit=5)
    for _ in range(8):
        env.act(None, epsilon=ONE)
        env.step()
    saved = env.state_dict()
    other = counter(num_envs=7, seed=1, time_limit=5)
    other.load_state_dict(saved)
    for _ in range(20):
        for playing in (env, other):
            playing.act(None, epsilon=ONE)
            playing.step()
        assert torch.equal(env.observation, other.observation)
        assert torch.equal(env.action, other.action)
    assert not torch.equal(saved["episode"], env.episode)  # copies, not views


@pytest.mark.parametrize("settings", [{"num_envs": 6}, {"num_envs": 7, "seed": 2}, {"num_envs": 7, "first_env": 1}])
def test_state_of_other_environments_is_refused(counter: MakeEnv, settings: dict[str, int]) -> None:
    saved = counter(num_envs=7).state_dict()
    with pytest.raises(SimulationError, match="Resume with the settings"):
        counter(**settings).load_state_dict(saved)


def test_an_action_out_of_range_is_counted(counter: MakeEnv) -> None:
    env = counter(num_envs=2000, first_env=50)
    env.action[[7, 1500, 1999]] = 3
    env.step()
    assert env.next_observation[:, 0].tolist() == [1.0] * 2000  # action 0 was taken
    with pytest.raises(SimulationError) as caught:
        env.check()
    assert "from 0 to 2, got 3 that are not, the first environment with one is 57" in str(caught.value)
    env.check()  # counted once


def test_returns_and_observations_have_to_be_finite(counter: MakeEnv) -> None:
    env = counter(num_envs=2000, first_env=50, parameters={"worth": 3e38})
    env.check()
    env.action[1500] = 1
    env.step()
    with pytest.raises(SimulationError, match=r"rewards of .* inf in environment 1550"):
        env.check()
    env.reset()
    env.field("past")[1, 7] = torch.nan
    env.observe()
    with pytest.raises(SimulationError, match=r"observations of .* nan in environment 57"):
        env.check()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"num_envs": 0}, "num_envs: expected at least 1"),
        ({"time_limit": 0}, "time_limit: expected at least 1"),
        ({"first_env": 2**32 - 1}, "global ids"),  # 32 bits
    ],
)
def test_settings_out_of_range(counter: MakeEnv, settings: dict[str, int], says: str) -> None:
    counter(num_envs=2, first_env=2**32 - 2).step()
    with pytest.raises(SimulationError, match=says):
        counter(**{"num_envs": 2, **settings})


def test_time_limits_end_where_random_numbers_would_repeat(counter: MakeEnv) -> None:
    counter(num_envs=1, time_limit=2**24)
    with pytest.raises(SimulationError, match=r"at most 16777216 steps, .* got 167"):
        counter(num_envs=1, time_limit=2**24 + 1)
    # candidates have 28 bits: 100 of each step from 0 to the limit, where the last next observation has some too
    hundred = CANDIDATES.replace("NUM_ACTIONS 3", "NUM_ACTIONS 100")
    most = 2_684_353
    assert (most + 1) * 100 <= 2**28 < (most + 2) * 100
    counter(hundred, num_envs=1, parametric=True, time_limit=most)
    with pytest.raises(SimulationError, match=f"at most {most} steps"):
        counter(hundred, num_envs=1, parametric=True, time_limit=most + 1)


def test_more_environments_than_memory(counter: MakeEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    # 4 words of state, 2 + 2 of observations, 7 more (step count, episode, return, last return and length, propensity,
    # reward), action and ended: 4 * 15 + 2 = 62 bytes.
    monkeypatch.setattr(env_module, "free_bytes", lambda device: 3 * 2**30)
    with pytest.raises(SimulationError) as caught:
        counter(num_envs=100_000_000)
    # 6.2e9 / 2^30
    for words in ("3.0 GiB free on cpu", "100000000, which need 5.8 GiB", f"At most {3 * 2**30 // 62} fit"):
        assert words in str(caught.value)


def test_bytes_are_estimated_as_allocated(counter: MakeEnv) -> None:
    for source, parametric in ((COUNTER, False), (MASKED_COUNTER, False), (CANDIDATES, True)):
        env = counter(source, num_envs=1000, parametric=parametric)
        tensors = {id(value): value for value in vars(env).values() if isinstance(value, Tensor)}
        held = sum(value.numel() * value.element_size() for value in tensors.values()) - 8  # the error word
        assert held == 1000 * env.bytes_per_env


def test_spec_is_what_the_file_says(counter: MakeEnv) -> None:
    env = counter(MASKED_COUNTER, num_envs=2)
    require_buffers(env, observation=[[0, -1], [0, -1]], step_count=[0, 0], episode=[0, 0])
    assert env.features is None
    assert env.spec == EnvSpec(
        name="counter", num_actions=3, observation_size=2, time_limit=100, action_feature_size=3, candidates=False,
        agents=1, threads_per_env=1, masked=True, action_bytes=1, action_names=("0", "1", "2"),
        agent_type_names=("agent",), agent_types=(0,), parameters={"goal": 4.0, "worth": 1.0},
        parameter_lists={},
        fields=(Field("count", "int", 1), Field("past", "float", 2), Field("lot", "unsigned", 1)),
        action_features=((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    )  # fmt: skip
    with pytest.raises(SimulationError, match="one of count, past, lot, got 'speed'"):
        env.field("speed")
