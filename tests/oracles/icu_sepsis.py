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
from dataclasses import dataclass
from functools import cache
from importlib.metadata import distribution
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from reagent_lite.data.writing.episodes import EpisodeBlock, LogSchema, episode_rows
from reagent_lite.data.writing.files import table_writer

Array = NDArray[np.float64]
Ints = NDArray[np.int64]

DEATH, SURVIVAL, OVER = 713, 714, 715
NUM_LIVING = 713
"""States 0 to 712 are patients under treatment; the others end an episode."""
ACTIONS = tuple(f"{first}-{second}" for first in range(5) for second in range(5))
"""The two levels of treatment of each action, in the package's order."""
NUM_EPISODES = 21_650
"""Of 9.238 rows each under the clinicians: 200 000 rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sepsis:
    """The MDP and the policy that treated its patients.

    Attributes:
        transition: [716, 25, 716] probability of the next state; an action that is not admissible has the mean of those
            that are.
        reward: [716, 25] expected reward: the probability of SURVIVAL.
        initial: [716].
        clinicians: [716, 25], zeros where an episode is over.
    """

    transition: Array
    reward: Array
    initial: Array
    clinicians: Array


@cache
def sepsis() -> Sepsis:
    """Returns what the package ships."""
    folder = Path(str(distribution("icu-sepsis").locate_file("icu_sepsis/envs/assets")))
    with np.load(folder / "dynamics.npz", allow_pickle=False) as arrays:
        transition, paid = arrays["tx_mat"], arrays["r_mat"]
        initial, clinicians = arrays["d_0"], arrays["expert_policy"]
    reward = np.einsum("sat,sat->sa", transition, paid)
    return Sepsis(transition=transition, reward=reward, initial=initial, clinicians=clinicians)


def uniform_policy() -> Array:
    """[716, 25] every action alike."""
    return np.full((OVER + 1, len(ACTIONS)), 1 / len(ACTIONS))


def greedy_policy(actions: Ints) -> Array:
    """[716, 25] one-hot of the action of each state, [716] or [713]."""
    policy = np.zeros((OVER + 1, len(ACTIONS)))
    policy[np.arange(len(actions)), actions] = 1.0
    return policy


def optimal_policy() -> Array:
    """[716, 25] one-hot, by policy iteration from the clinicians' policy."""
    mdp, policy = sepsis(), sepsis().clinicians
    while True:
        value = np.zeros(OVER + 1)
        value[:NUM_LIVING] = _solved(policy, (policy * mdp.reward).sum(1))
        q = mdp.reward + mdp.transition @ value
        better = q.max(1) > (policy * q).sum(1) + 1e-12  # rounding must not make two equal actions take turns
        better[NUM_LIVING:] = False
        if not better.any():
            return policy
        policy = np.where(better[:, None], greedy_policy(q.argmax(1)), policy)


def exact_value(policy: Array) -> float:
    """Probability that a patient survives under a policy: solves (I - P) v = r over the living states."""
    return float(sepsis().initial[:NUM_LIVING] @ _solved(policy, (policy * sepsis().reward).sum(1)))


def mean_length(policy: Array) -> float:
    """Expected rows of an episode under a policy."""
    return float(sepsis().initial[:NUM_LIVING] @ _solved(policy, np.ones(OVER + 1)))


def _solved(policy: Array, gain: Array) -> Array:
    living = slice(NUM_LIVING)
    chances = np.einsum("sa,sat->st", policy[living], sepsis().transition[living])[:, living]
    return np.linalg.solve(np.eye(NUM_LIVING) - chances, gain[living])


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """Whole episodes, one after the other; every field but `lengths` has [N] entries.

    Attributes:
        lengths: [E] rows of each episode.
        propensity: the policy's probability of the action.
    """

    lengths: Ints
    state: Ints
    action: Ints
    next_state: Ints
    propensity: Array

    @property
    def reward(self) -> Array:
        """1 on rows that enter SURVIVAL."""
        return (self.next_state == SURVIVAL).astype(np.float64)


def draw_log(policy: Array, num_episodes: int, rng: np.random.Generator) -> Log:
    """Episodes under a policy to their true ends; all advance together."""
    mdp = sepsis()
    next_state, choice = _Drawer(mdp.transition.reshape(-1, OVER + 1)), _Drawer(policy[:NUM_LIVING])
    alive = np.arange(num_episodes)
    state = _Drawer(mdp.initial[None]).draw(np.zeros(num_episodes, np.int64), rng)
    columns = []
    while len(alive):
        action = choice.draw(state, rng)
        following = next_state.draw(state * len(ACTIONS) + action, rng)
        columns.append((alive, state, action, following))
        going_on = following < NUM_LIVING
        alive, state = alive[going_on], following[going_on]
    episode, state, action, following = (np.concatenate(column) for column in zip(*columns, strict=True))
    order = np.argsort(episode, kind="stable")  # steps of an episode stand in order already
    state, action, following = state[order], action[order], following[order]
    return Log(
        lengths=np.bincount(episode, minlength=num_episodes),
        state=state,
        action=action,
        next_state=following,
        propensity=policy[state, action],
    )


class _Drawer:
    """Draws from rows of probabilities [R, C]: one search in all their cumulative sums, those of row r above r."""

    def __init__(self, probabilities: Array) -> None:
        sums = probabilities.cumsum(1)
        self._width = sums.shape[1]
        self._bounds = (sums / sums[:, -1:] + np.arange(len(sums))[:, None]).ravel()

    def draw(self, rows: Ints, rng: np.random.Generator) -> Ints:
        """One index for each row number; of probability 0 never."""
        uniform = rng.integers(2**32, size=len(rows)) / 2**32  # few enough digits that row + uniform is exact
        return np.asarray(np.searchsorted(self._bounds, rows + uniform, "right") - rows * self._width)


def write_events(file: Path, log: Log) -> Path:
    """Writes one row a decision, JSON lines or Parquet by the file's name: state {0: index}, actions as names."""
    last = log.lengths.cumsum() - 1
    block = EpisodeBlock(
        mdp_ids=[f"stay-{number}" for number in range(len(log.lengths))],
        lengths=log.lengths,
        terminal=np.ones(len(log.lengths), bool),
        state=log.state[:, None].astype(np.float32),
        action=log.action,
        reward=log.reward.astype(np.float32),
        propensity=log.propensity.astype(np.float32),
        mask=None,
        features=None,
        last_state=log.next_state[last, None].astype(np.float32),
        last_mask=None,
        last_features=None,
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    with table_writer(file) as writer:
        writer.write(episode_rows(block, LogSchema(transitions=False, action_names=ACTIONS, ds="2024-01-01")))
    return file


if __name__ == "__main__":
    clinicians = draw_log(sepsis().clinicians, NUM_EPISODES, np.random.default_rng(0))
    print(write_events(Path(sys.argv[1]) / "events.parquet", clinicians))
