"""Images of 84 x 84 x 4 bytes: rows a second and bytes a row of simulation, replay, log, training copy and learning.

PYTHONPATH=tests python -m tests.benchmarks.images
"""

import json
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch

from reagent_lite.config import check
from reagent_lite.config.environment import EnvironmentConfig
from reagent_lite.config.simulate_config import SimulateConfig
from reagent_lite.data.copy.prepared_copy import prepare_training_copy
from reagent_lite.data.logs import Log
from reagent_lite.models.q_networks import NetworkSettings, build_q_network
from reagent_lite.sim.backend import open_backend
from reagent_lite.sim.gymnasium_env import open_envs
from reagent_lite.sim.replay.ring import ReplayRing, ReplaySettings
from reagent_lite.tasks.simulate import simulate
from reagent_lite.types import EnvStep, Image, SourceSpec

SHAPE = (84, 84, 4)
ROWS = 4_000
BATCH = 32


class Frames(gymnasium.Env[Any, int]):
    """Frames in which a few pixels change from step to step, as those of games."""

    observation_space = gymnasium.spaces.Box(0, 255, SHAPE, np.uint8)
    action_space = gymnasium.spaces.Discrete(6)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.frame = np.zeros(SHAPE, np.uint8)
        return self.frame.copy(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.frame.reshape(-1)[self.np_random.integers(self.frame.size, size=200)] = self.np_random.integers(256)
        return self.frame.copy(), 1.0, bool(self.np_random.random() < 0.01), False, {}


gymnasium.register("Frames-v0", Frames, max_episode_steps=1000)


def main() -> None:
    figures: dict[str, float] = {}
    backend = open_backend(EnvironmentConfig(env="gymnasium:Frames-v0"), torch.device("cpu"))
    env = open_envs(backend, num_envs=8)
    env.reset()
    size = env.spec.observation_size
    common: dict[str, Any] = {"num_envs": 8, "observation_size": size, "num_actions": 6, "slots": 250, "gamma": 0.99}
    for dtype in (torch.uint8, torch.float32):
        ring = ReplayRing(ReplaySettings(**common, observation_dtype=dtype), torch.device("cpu"))
        figures[f"replay_bytes_per_row_{dtype}"] = sum(c.nbytes for c in ring._columns.values()) / ring.capacity
    ring = ReplayRing(ReplaySettings(**common, observation_dtype=torch.uint8), torch.device("cpu"))
    begin = time.perf_counter()
    for _ in range(250):
        before = env.observation.clone()
        env.act(None, epsilon=torch.ones(1))
        env.step()
        ended = {"terminated": env.row_terminated, "truncated": env.row_truncated}
        step = {"observation": before, "next_observation": env.next_observation, "action": env.action}
        ring.write(EnvStep(**step, **ended, reward=env.reward, propensity=env.propensity))
    figures["simulated_rows_per_second"] = 2000 / (time.perf_counter() - begin)
    begin = time.perf_counter()
    for _ in range(50):
        batch = ring.sample(BATCH).batch
    figures["sampled_rows_per_second"] = 50 * BATCH / (time.perf_counter() - begin)
    image = Image(shape=SHAPE)
    spec = SourceSpec(num_state_features=size, action_names=tuple("abcdef"), image=image)
    network = build_q_network(spec, NetworkSettings(hidden=(512,), activations=("relu",)))
    optimizer = torch.optim.Adam(network.parameters())
    begin = time.perf_counter()
    for _ in range(10):
        loss = network(batch.state, batch.actions.mask).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    figures["learned_rows_per_second"] = 10 * BATCH / (time.perf_counter() - begin)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "log.parquet"
        begin = time.perf_counter()
        tree = {"env": "gymnasium:Frames-v0", "rows": ROWS, "output_path": str(file), "use_gpu": False, "num_envs": 8}
        written = simulate(check(SimulateConfig, tree))
        figures["written_rows_per_second"] = written.rows / (time.perf_counter() - begin)
        figures["log_bytes_per_row"] = file.stat().st_size / written.rows
        begin = time.perf_counter()
        copy = prepare_training_copy(Log(str(file), actions=tuple("012345"), image=image))
        figures["read_rows_per_second"] = len(copy) / (time.perf_counter() - begin)
        figures["copy_bytes_per_row"] = copy.num_bytes / len(copy)
    figures["peak_memory_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({name: round(value, 1) for name, value in figures.items()}, indent=1))


if __name__ == "__main__":
    main()
