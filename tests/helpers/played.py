"""Exported models that play an environment through workflows.evaluate, and models whose policy is known exactly."""

from pathlib import Path
from typing import Any

import numpy as np
from helpers.bundles import linear_bundle
from helpers.commands import evaluated
from oracles import gridworld

from reagent_lite.tasks.evaluate import Evaluated


def played(folder: Path, model: Path, env: str, episodes: int = 1000, **keys: Any) -> tuple[Evaluated, dict[str, Any]]:
    """What workflows.evaluate says of a model that plays an environment: the last line, and the report file."""
    simulation = {"env": env, "evaluation_episodes": episodes, **keys.pop("simulation", {})}
    tree = {"gamma": 0.9, "simulation": simulation, **keys}
    return evaluated(model, tree.pop("data_path", ""), folder / "report" / "e.json", **tree)


def logits(policy: gridworld.Array) -> gridworld.Array:
    """Weights [4, 25] of a model whose softmax at temperature 1 is a policy [25, 4]."""
    return np.asarray(np.log(np.maximum(policy, 1e-30)).T)


def world(folder: Path, epsilon: float, order: tuple[str, ...] = gridworld.ACTIONS) -> Path:
    """A model whose softmax is epsilon-greedy around the gridworld's fixed policy, made once in a folder."""
    model = folder / f"{epsilon}{''.join(order)}"
    weight = logits(gridworld.epsilon_greedy(epsilon))[[gridworld.ACTIONS.index(name) for name in order]]
    return model if model.exists() else linear_bundle(model, weight, order, tuple(range(25)))


def around(figure: dict[str, float], truth: float, widest: float) -> bool:
    """Whether an interval holds the truth and is no wider than that."""
    return figure["low"] <= truth <= figure["high"] and figure["high"] - figure["low"] <= widest


def gridworld_log(log: gridworld.Log) -> list[dict[str, Any]]:
    """Rows of a simulated log in the training-file schema, one binary feature a cell."""
    mask = gridworld.allowed().astype(int).tolist()
    return [
        {
            "mdp_id": str(log.episode[i]), "sequence_number": int(log.step[i]),
            "state_features": {str(log.state[i]): 1}, "action": gridworld.ACTIONS[log.action[i]],
            "reward": float(log.reward[i]), "action_probability": float(log.propensity[i]),
            "possible_actions": mask[log.state[i]], "next_action": "", "terminal": bool(log.terminal[i]),
            "next_state_features": {} if log.terminal[i] else {str(log.next_state[i]): 1},
            "possible_next_actions": [0] * 4 if log.terminal[i] else mask[log.next_state[i]],
        }
        for i in range(len(log.state))
    ]  # fmt: skip
