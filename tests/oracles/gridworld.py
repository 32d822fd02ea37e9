"""Truth on the 5 x 5 gridworld: NumPy and SciPy, nothing of the package, so that it can judge the package.

States s = 5 * y + x, start 0, goal 24, walls at column 2 of rows 1 to 3. Actions L, R, U, D; a move into a wall or off
the grid is not allowed. A move goes as intended with 0.98 and with 0.01 to each side; a slip into a wall or off the
grid stays. Entering the goal pays 10 and ends the episode. Discount 0.9.

Policies are arrays [25, 4] of probabilities; rows of walls and of the goal are zero.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

SIZE = 5
NUM_STATES = SIZE * SIZE
START = 0
GOAL = 24
WALLS = (7, 12, 17)
ACTIONS = ("L", "R", "U", "D")
MOVES = ((-1, 0), (1, 0), (0, -1), (0, 1))
SIDES = ((2, 3), (2, 3), (0, 1), (0, 1))
INTENDED = 0.98
SLIP = 0.01
REWARD = 10.0
GAMMA = 0.9

# Shortest path where nothing slips, D before R where both are shortest. It is not exactly optimal under slips:
# its value at the start is 4.711349, the optimum 4.724988.
FIXED_POLICY = (
    "DDRDD"
    "DD.DD"
    "DD.DD"
    "DD.DD"
    "RRRR."
)  # fmt: skip


Log = np.recarray
"""Logged rows in order of (episode, step): their fields are those of `simulate`'s result."""


def destination(state: int, action: int) -> int:
    """State that an unslipped move leads to: the same one where it is not allowed."""
    x, y = state % SIZE + MOVES[action][0], state // SIZE + MOVES[action][1]
    return SIZE * y + x if 0 <= x < SIZE and 0 <= y < SIZE and SIZE * y + x not in WALLS else state


@cache
def allowed() -> NDArray[np.bool_]:
    """[25, 4] whether an action may be chosen; false everywhere in walls and at the goal."""
    return np.array([
        [s not in (*WALLS, GOAL) and destination(s, a) != s for a in range(4)] for s in range(NUM_STATES)
    ])  # fmt: skip


@cache
def transition_matrix() -> Array:
    """[25, 4, 25] probability of the next state; rows of actions that are not allowed are zero."""
    table = np.zeros((NUM_STATES, 4, NUM_STATES))
    for s, a in np.argwhere(allowed()).tolist():
        for way, probability in ((a, INTENDED), (SIDES[a][0], SLIP), (SIDES[a][1], SLIP)):
            table[s, a, destination(s, way)] += probability
    return table


def rewards() -> Array:
    """[25, 4] expected reward of an action."""
    return REWARD * transition_matrix()[:, :, GOAL]


def optimal_q(gamma: float = GAMMA) -> Array:
    """[25, 4] by value iteration; 0 where an action is not allowed, which is less than any other, as rewards are not
    negative.
    """
    q = np.zeros((NUM_STATES, 4))
    for _ in range(2000):
        q = np.where(allowed(), rewards() + gamma * transition_matrix() @ q.max(1), 0.0)
    return q


def chain(policy: Array) -> Array:
    """[25, 25] probabilities of the next state under a policy."""
    return np.einsum("sa,sat->st", policy, transition_matrix())


def policy_values(policy: Array, gamma: float = GAMMA) -> Array:
    """[25] values of a policy, by solving (I - gamma P) v = r."""
    return np.linalg.solve(np.eye(NUM_STATES) - gamma * chain(policy), (policy * rewards()).sum(1))


def policy_q(policy: Array, gamma: float = GAMMA) -> Array:
    """[25, 4] action values of a policy; 0 where an action is not allowed."""
    return np.where(allowed(), rewards() + gamma * transition_matrix() @ policy_values(policy, gamma), 0.0)


def random_policy() -> Array:
    """[25, 4] uniform over the allowed actions."""
    return weighted_policy(np.ones((NUM_STATES, 4)))


def weighted_policy(weights: Array) -> Array:
    """[25, 4] what imitation of the random policy's actions leads to, each with its weight [25, 4]."""
    chances = allowed() * weights
    return np.asarray(chances / np.maximum(chances.sum(1, keepdims=True), 1e-300))


def epsilon_greedy(epsilon: float) -> Array:
    """[25, 4] FIXED_POLICY, and uniform over the allowed actions with probability epsilon."""
    return epsilon * random_policy() + (1 - epsilon) * np.array(
        [[float(a == name) for a in ACTIONS] for name in FIXED_POLICY]
    )


def fixed_start() -> Array:
    """[25] one-hot of START."""
    return np.asarray(np.arange(NUM_STATES) == START, dtype=np.float64)


def any_start() -> Array:
    """[25] uniform over the states where an action is allowed."""
    free = allowed().any(1)
    return free / free.sum()


def row_shares(policy: Array, start: Array) -> Array:
    """[25] share of a policy's rows in each state: expected visits, by solving (I - P') d = start, over their sum."""
    visits = np.linalg.solve(np.eye(NUM_STATES) - chain(policy).T, start) * allowed().any(1)
    return np.asarray(visits / visits.sum())


def simulate(
    policy: Array, num_episodes: int, rng: np.random.Generator, *, start: Array | None = None, max_steps: int = 200
) -> Log:
    """Episodes under a policy, from START or drawn from `start`; all advance together, one draw per row.

    `terminal` is true on the row that enters the goal; an episode cut at `max_steps` ends without one.
    """
    action_cdf, next_cdf = policy.cumsum(1), transition_matrix().cumsum(2)
    alive = np.arange(num_episodes)
    state = alive * 0 + START if start is None else draw(np.tile(start.cumsum(), (num_episodes, 1)), rng)
    rows = []
    for step in range(max_steps):
        action = draw(action_cdf[state], rng)
        following = draw(next_cdf[state, action], rng)
        rows.append(np.stack((alive, np.full(len(alive), step), state, action, following)))
        going_on = following != GOAL
        alive, state = alive[going_on], following[going_on]
    columns = np.concatenate(rows, 1)
    episode, position, state, action, following = columns[:, np.lexsort(columns[1::-1])]
    entered = following == GOAL
    fields = (episode, position, state, action, REWARD * entered, following, entered, policy[state, action])
    return np.rec.fromarrays(
        fields, names="episode, step, state, action, reward, next_state, terminal, propensity", aligned=True
    )


def draw(cdf: Array, rng: np.random.Generator) -> NDArray[np.int64]:
    """One index per row of cumulative probabilities [N, C]; entries of probability 0 are never drawn."""
    return np.asarray(((rng.random(len(cdf))[:, None] * cdf[:, -1:]) >= cdf).sum(1), dtype=np.int64)


def crr_solution(beta: float, most: float) -> tuple[Array, Array]:
    """[25, 4] policy and its values where pi is proportional to mu * min(exp(A / beta), most)."""
    policy = random_policy()
    for _ in range(200):
        q = policy_q(policy)
        following = weighted_policy(np.minimum(np.exp((q - (policy * q).sum(1, keepdims=True)) / beta), most))
        change = np.abs(following - policy).max()
        policy = 0.5 * policy + 0.5 * following
    assert change < 1e-12, "no fixed point"
    return policy, q


def iql_solution(share: float, beta: float, most: float) -> tuple[Array, Array]:
    """[25, 4] policy and values: V the expectile of Q over random actions, Q = r + gamma P V."""
    from scipy.stats import expectile  # half a second, which processes of a group are spared

    value = np.zeros(NUM_STATES)
    for _ in range(100):
        q = np.where(allowed(), rewards() + GAMMA * transition_matrix() @ value, 0.0)
        value = np.array(
            [expectile(row[mask], share) if mask.any() else 0.0 for row, mask in zip(q, allowed(), strict=True)]
        )
    return weighted_policy(np.minimum(np.exp(beta * (q - value[:, None])), most)), q
