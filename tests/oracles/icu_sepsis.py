"""Truth on ICU-Sepsis: an MDP of 716 states and 25 actions estimated from MIMIC-III, with the clinicians' policy.

The arrays are files of the package icu-sepsis (Choudhary et al. 2024, https://github.com/icu-sepsis/icu-sepsis); its
code is not imported. An episode pays 1 on survival and 0 on death; gamma is 1.

The log of configs/icu_sepsis, written to a folder: python tests/oracles/icu_sepsis.py outputs/icu_sepsis

dynamics.npz ─► Sepsis: exact value of any policy by a linear solve
                  └─► draw_log: episodes by a policy ─► write_events

Policies are arrays [716, 25] of probabilities; rows of the three states that end an episode are not read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from importlib.metadata import distribution
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from numpy.typing import NDArray

from reagent_lite.data.writing.episode_rows import EpisodeBlock, LogSchema, episode_rows
from reagent_lite.data.writing.table_writers import table_writer

Array = NDArray[np.float64]
Ints = NDArray[np.int64]

DEATH, SURVIVAL, OVER = 713, 714, 715
NUM_LIVING = 713
"""States 0 to 712 are patients under treatment; the others end an episode."""
ACTIONS = tuple(f"{first}-{second}" for first in range(5) for second in range(5))
"""The two levels of treatment of each action, in the package's order."""
NUM_EPISODES = 21_650
"""Of 9.238 rows each under the clinicians: 200 000 rows."""


@cache
def sepsis() -> SimpleNamespace:
    """Returns the MDP and the policy that treated its patients, as the package ships them.

    `transition` [716, 25, 716] probability of the next state; an action that is not admissible has the mean of those
    that are. `reward` [716, 25] expected reward: the probability of SURVIVAL. `initial` [716]. `clinicians` [716, 25],
    zeros where an episode is over.
    """
    folder = Path(str(distribution("icu-sepsis").locate_file("icu_sepsis/envs/assets")))
    with np.load(folder / "dynamics.npz", allow_pickle=False) as arrays:
        transition = arrays["tx_mat"]
        return SimpleNamespace(
            transition=transition,
            reward=np.einsum("sat,sat->sa", transition, arrays["r_mat"]),
            initial=arrays["d_0"],
            clinicians=arrays["expert_policy"],
        )


def uniform_policy() -> Array:
    """[716, 25] every action alike."""
    return np.full((OVER + 1, len(ACTIONS)), 1 / len(ACTIONS))


def greedy_policy(actions: Ints) -> Array:
    """[716, 25] one-hot of the action of each state, [716] or [713]."""
    return np.eye(len(ACTIONS))[np.resize(actions, OVER + 1)]


def optimal_policy() -> Array:
    """[716, 25] one-hot, by policy iteration from the clinicians' policy."""
    policy = sepsis().clinicians
    while True:
        value = np.append(_solved(policy, (policy * sepsis().reward).sum(1)), np.zeros(OVER + 1 - NUM_LIVING))
        q = sepsis().reward + sepsis().transition @ value
        better = q.max(1) > (policy * q).sum(1) + 1e-12  # rounding must not make two equal actions take turns
        if not better[:NUM_LIVING].any():
            return policy
        policy = np.where(better[:, None], greedy_policy(q.argmax(1)), policy)


def exact_value(policy: Array) -> float:
    """Probability that a patient survives under a policy: solves (I - P) v = r over the living states."""
    return float(sepsis().initial[:NUM_LIVING] @ _solved(policy, (policy * sepsis().reward).sum(1)))


def mean_length(policy: Array) -> float:
    """Expected rows of an episode under a policy."""
    return float(sepsis().initial[:NUM_LIVING] @ _solved(policy, np.ones(OVER + 1)))


def _solved(policy: Array, gain: Array) -> Array:
    chances = np.einsum("sa,sat->st", policy, sepsis().transition)[:NUM_LIVING, :NUM_LIVING]
    return np.linalg.solve(np.eye(NUM_LIVING) - chances, gain[:NUM_LIVING])


def draw_log(policy: Array, num_episodes: int, rng: np.random.Generator) -> EpisodeBlock:
    """Episodes under a policy to their true ends; all advance together. A state is one feature, its index."""
    next_state, choice = _drawer(sepsis().transition.reshape(-1, OVER + 1)), _drawer(policy[:NUM_LIVING])
    alive = np.arange(num_episodes)
    state = _drawer(sepsis().initial[None])(np.zeros(num_episodes, np.int64), rng)
    columns = []
    while len(alive):
        action = choice(state, rng)
        following = next_state(state * len(ACTIONS) + action, rng)
        columns.append(np.stack((alive, state, action, following)))
        going_on = following < NUM_LIVING
        alive, state = alive[going_on], following[going_on]
    rows = np.concatenate(columns, 1)
    episode, state, action, following = rows[:, np.argsort(rows[0], kind="stable")]  # steps stand in order already
    lengths = np.bincount(episode)
    return EpisodeBlock(
        mdp_ids=[f"stay-{number}" for number in range(num_episodes)],
        lengths=lengths,
        terminal=np.ones(num_episodes, bool),
        state=state[:, None].astype(np.float32),
        action=action,
        reward=(following == SURVIVAL).astype(np.float32),
        propensity=policy[state, action].astype(np.float32),
        mask=None,
        features=None,
        last_state=following[lengths.cumsum() - 1, None].astype(np.float32),
        last_mask=None,
        last_features=None,
    )


def _drawer(probabilities: Array) -> Callable[[Ints, np.random.Generator], Ints]:
    """Draws an index for each row number, of probability 0 never: one search in all cumulative sums, those of row r
    above r.
    """
    sums = probabilities.cumsum(1)
    bounds = (sums / sums[:, -1:] + np.arange(len(sums))[:, None]).ravel()

    def draw(rows: Ints, rng: np.random.Generator) -> Ints:
        uniform = rng.integers(2**32, size=len(rows)) / 2**32  # few enough digits that row + uniform is exact
        return np.asarray(np.searchsorted(bounds, rows + uniform, "right") - rows * sums.shape[1])

    return draw


def write_events(file: Path, log: EpisodeBlock) -> Path:
    """Writes one row a decision, JSON lines or Parquet by the file's name: state {0: index}, actions as names."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with table_writer(file) as writer:
        writer.write(episode_rows(log, LogSchema(transitions=False, action_names=ACTIONS, ds="2024-01-01")))
    return file


if __name__ == "__main__":
    log = draw_log(sepsis().clinicians, NUM_EPISODES, np.random.default_rng(0))
    print(write_events(Path(sys.argv[1]) / "events.parquet", log))
