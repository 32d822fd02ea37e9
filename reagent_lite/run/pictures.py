"""Pictures beside the model: how learning went, and one episode of what was learned."""

from pathlib import Path

import numpy as np
import torch

from reagent_lite.algorithms.dqn import DQN
from reagent_lite.report.curves import read_series
from reagent_lite.report.pictures import Trace, write_learning_curve, write_rollout
from reagent_lite.rl.policies import TargetPolicy
from reagent_lite.run.environments import PICTURE, Reader

PICTURES = ("learning_curve.png", "rollout.gif")


def draw_pictures(folder: Path, reader: Reader, learner: DQN, target: TargetPolicy) -> list[Path]:
    """Writes learning_curve.png and rollout.gif into the run's folder and returns their paths.

    Args:
        folder: of the run; holds its metrics.
        reader: the environment, and its features to the network's.
        learner: gives the values.
        target: plays by them.
    """
    name = reader.simulation.backend.spec.name
    curve, rollout = (folder / name for name in PICTURES)
    write_learning_curve(curve, read_series(folder / "metrics.jsonl"), title=name)
    write_rollout(rollout, record(reader, learner, target))
    return [curve, rollout]


@torch.no_grad()
def record(reader: Reader, learner: DQN, target: TargetPolicy) -> Trace:
    """Returns one episode of the learner's policy."""
    env = reader.simulation.envs(0, 1, stream=PICTURE)
    spec = env.spec
    policy = reader.policy(learner, env.device)
    env.reset()
    epsilon = torch.tensor([target.epsilon], device=env.device)
    seen, actions, rewards, values = [_row(env.observation)], [], [], []
    for _ in range(env.time_limit):
        q = policy(env.observation, env.mask, env.features)
        env.act(q, epsilon=epsilon, temperature=target.temperature)
        action = int(env.action[0])
        closed = torch.zeros_like(q, dtype=torch.bool) if env.mask is None else ~env.mask
        values.append(_row(q.masked_fill(closed, torch.nan)))
        env.step()
        actions.append(action)
        rewards.append(float(env.reward[0]))
        seen.append(_row(env.next_observation))
        if int(env.ended[0]):
            break
    return Trace(
        env=spec.name,
        observation=np.stack(seen),
        action=np.array(actions),
        reward=np.array(rewards),
        terminated=bool(env.terminated[0]),
        truncated=bool(env.truncated[0]),
        action_names=() if spec.candidates else spec.action_names,
        q=np.stack(values),
        parameters=spec.parameters,
    )


def _row(tensor: torch.Tensor) -> np.ndarray:
    return tensor[0].cpu().numpy().copy()
