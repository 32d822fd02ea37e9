"""A picture of a run: an animation of one episode of the learned policy."""

from functools import partial
from pathlib import Path

import numpy as np
import torch

from reagent_lite.algorithms.learners import Learner
from reagent_lite.console import logger
from reagent_lite.report.pictures import Agents, Episode, write_animation
from reagent_lite.rl.policies import TargetPolicy
from reagent_lite.run.environments import PICTURE, ObservationEncoder
from reagent_lite.run.learner import target_policy
from reagent_lite.sim.env import VectorEnv
from reagent_lite.sim.experience import Observer, play_step

PICTURE_FILE = "rollout.gif"


def draw_pictures(folder: Path, encoder: ObservationEncoder, learner: Learner) -> None:
    """Writes rollout.gif into the run's folder if simulation.pictures is true.

    Args:
        folder: the run's folder.
        encoder: converts observations of the environment to the network's input.
        learner: the learner, or the learners of several types of agents.
    """
    if encoder.simulation.config.pictures:
        write_animation(folder / PICTURE_FILE, record(encoder, learner, target_policy(encoder.config)))
        logger.info(f"picture: {folder / PICTURE_FILE}")


@torch.no_grad()
def record(encoder: ObservationEncoder, learner: Learner, target: TargetPolicy) -> Episode:
    """Plays one episode with the learner's policy and returns it."""
    env = encoder.simulation.envs(0, 1, stream=PICTURE)
    epsilon = torch.tensor([target.epsilon], device=env.device)
    actors = encoder.actors(env, learner, epsilon=epsilon, temperature=target.temperature)
    env.reset()
    observations = [_row(env.observation)]
    positions = [_positions(env)]
    actions = []
    rewards = []
    for _ in range(env.time_limit):
        play_step(env, actors.values(), Observer(), step=partial(env.step, stay=True))
        actions.append(int(env.action[0]))
        rewards.append(float(env.reward[0]))
        observations.append(_row(env.next_observation))
        positions.append(_positions(env))
        if int(env.ended[0]):
            break
    truncated = "truncated by the time limit" if env.truncated[0] else ""
    return Episode(
        env=env.spec.name,
        observation=np.stack(observations),
        action=np.array(actions),
        reward=np.array(rewards),
        ending="terminated" if env.terminated[0] else truncated,
        action_names=() if env.spec.candidates else env.spec.action_names,
        parameters=env.spec.parameters,
        agents=_agents(env, positions),
    )


def _positions(env: VectorEnv) -> tuple[np.ndarray, ...]:
    """Returns x, y and in_game of every agent, [A] each, or nothing if agents have no positions."""
    if env.in_game is None or not {"x", "y"} <= {field.name for field in env.spec.fields}:
        return ()
    size = env.spec.parameters.get("grid_length", 1.0)
    x, y = (env.field(name).reshape(-1).cpu().numpy() / size for name in ("x", "y"))
    return x, y, env.in_game.cpu().numpy().copy()


def _agents(env: VectorEnv, positions: list[tuple[np.ndarray, ...]]) -> Agents | None:
    if not positions[0]:
        return None
    x, y, in_game = (np.stack(each) for each in zip(*positions, strict=True))
    kind = np.array(env.spec.agent_types)
    return Agents(x=x, y=y, in_game=in_game, kind=kind, kinds=env.spec.agent_type_names)


def _row(tensor: torch.Tensor) -> np.ndarray:
    return tensor[0].cpu().numpy().copy()
