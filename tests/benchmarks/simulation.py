"""CartPole steps per second against Gymnasium's vectorised CartPole, EnvPool, and a memory copy; Tag against NumPy.

Rounds alternate; figures are medians. EnvPool lives in an environment of its own, made under outputs/ if absent.

    python -m tests.benchmarks.simulation
"""

from collections.abc import Callable

import gymnasium
import numpy as np
import torch

from reagent_lite.config.environment import EnvironmentConfig
from reagent_lite.sim.backend import open_backend
from reagent_lite.sim.env import VectorEnv
from tests.benchmarks.peers import interpreter, printed_number
from tests.benchmarks.turns import in_turns, medians, rate, ratio, show
from tests.oracles.tag import Continuous, Gridworld

ROUNDS, SECONDS = 5, 0.5
LARGE, SMALL = 262_144, 1024
COPIED = 1 << 29  # bytes read and written by a copy from memory to memory

# full: what an agent sees grows with their number
TAG = [(name, agents, full) for name in ("tag_gridworld", "tag_continuous") for agents in (5, 20, 100)
       for full in (True, False)]  # fmt: skip

ENVPOOL = f"""
import time, warnings, numpy
warnings.simplefilter("ignore")
import envpool
env = envpool.make("CartPole-v1", env_type="gymnasium", num_envs={SMALL}, num_threads={torch.get_num_threads()})
env.reset()
action = numpy.random.default_rng(0).integers(0, 2, {SMALL}).astype(numpy.int32)
env.step(action)
start, count = time.perf_counter(), 0
while time.perf_counter() - start < {SECONDS}:
    env.step(action)
    count += {SMALL}
print(count / (time.perf_counter() - start))
"""


def opened(name: str, num: int, parameters: dict[str, float] | None = None) -> VectorEnv:
    env = VectorEnv(
        open_backend(EnvironmentConfig(env=name, backend="cpu", env_parameters=parameters or {}), torch.device("cpu")),
        num_envs=num,
    )
    env.reset()
    env.act(None, epsilon=torch.ones(1))
    return env


def theirs(num: int) -> Callable[[], object]:
    env = gymnasium.make_vec("CartPole-v1", num_envs=num, vectorization_mode="vector_entry_point")
    env.reset(seed=0)
    action = np.random.default_rng(0).integers(0, 2, num)
    return lambda: env.step(action)


def tag(name: str, agents: int, full: bool) -> dict[str, object]:
    """Steps per second of random play, drawing included; the oracle is loops and NumPy for one game."""
    games = max(1280 // agents, 32) if full else 256  # what 100 agents see of all others takes 9 MB then
    taggers = agents - 1 if name == "tag_gridworld" else max(agents // 20, 1)
    constants = {"num_taggers": taggers, "use_full_observation": full}
    constants |= {"num_runners": agents - taggers} if name == "tag_continuous" else {}
    env = opened(name, games, constants)
    oracle = Gridworld(**constants) if name == "tag_gridworld" else Continuous(**constants)
    uniform, random = torch.ones(1), np.random.default_rng(0)

    def play() -> None:
        oracle.step(random.integers(0, env.spec.num_actions, agents).tolist())
        if name == "tag_gridworld":  # a step on a square observes
            oracle.observe()

    def step() -> None:
        env.act(None, epsilon=uniform)
        env.step()

    rates = in_turns({"kernel": lambda: rate(step, games), "oracle": lambda: rate(play, 1)}, ROUNDS)
    return {
        "env": name,
        "agents": agents,
        "full": full,
        **medians(rates, 1),
        "kernel_to_oracle": round(ratio(rates["kernel"], rates["oracle"]), 1),
    }


if __name__ == "__main__":
    large, small = opened("cartpole_v1", LARGE), opened("cartpole_v1", SMALL)
    gym, python = theirs(LARGE), interpreter("envpool", "envpool", "gymnasium")
    source = torch.ones(COPIED // 2, dtype=torch.uint8)
    target = torch.zeros_like(source)
    ways: dict[str, Callable[[], float]] = {
        "dynamics": lambda: rate(lambda: large.advance(observe=False), LARGE),
        "observed": lambda: rate(large.advance, LARGE),
        "both_observations": lambda: rate(large.step, LARGE),
        "copy": lambda: rate(lambda: target.copy_(source), COPIED // large.spec.step_bytes),
        "gymnasium": lambda: rate(gym, LARGE),
        "small_observed": lambda: rate(small.advance, SMALL),
    }
    if python:
        ways["envpool"] = lambda: printed_number(python, ENVPOOL)
    rates = in_turns(ways, ROUNDS)
    pairs = (("observed", "gymnasium"), ("dynamics", "copy"), ("small_observed", "envpool"))
    million = {name: [rate_of / 1e6 for rate_of in rates_of] for name, rates_of in rates.items()}
    show({
        "threads": torch.get_num_threads(),
        "million_steps_per_second": medians(million, 2),
        **{f"{name}_to_{other}": round(ratio(rates[name], rates[other]), 3) for name, other in pairs if other in rates},
        "tag": [tag(*case) for case in TAG],
    })  # fmt: skip
