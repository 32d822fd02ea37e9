"""Worlds of episodes: their logs, and the true value of a policy, exact where states are few and by playing elsewhere.

Texts are categories, numbers are numbers, as in `decisions`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from tests.benchmarks.worlds.decisions import Array, Columns, Generator, Ints, drawn, names
from tests.benchmarks.worlds.playing import play
from tests.oracles import gridworld as grid
from tests.oracles import icu_sepsis as icu

EPISODES_PLAYED = 100


@dataclass(frozen=True, kw_only=True)
class Episodes:
    """Logged rows in the order of (episode, step); all but `columns` and `allowed` [N].

    Attributes:
        columns: {feature: [N]}.
        allowed: [N, A] actions that were possible.
        terminal: whether the row ended its episode; an episode may also be cut after a row.
        propensity: probability of the action.
    """

    columns: Columns
    allowed: NDArray[np.bool_]
    episode: Ints
    step: Ints
    action: Ints
    reward: Array
    terminal: NDArray[np.bool_]
    propensity: Array

    @property
    def last(self) -> NDArray[np.bool_]:
        """[N] whether a row is the last one of its episode."""
        return np.append(self.episode[1:] != self.episode[:-1], True)


@dataclass(frozen=True, kw_only=True)
class Finite:
    """A world of S states and A actions, of which every policy has an exact value.

    Attributes:
        columns: {feature: [S]}.
        allowed: [S, A].
        transition: [S, A, S]; zeros where an action is not allowed or an episode is over.
        reward: [S, A] expected rewards.
        earn: returns rewards of states, actions and next states, all [N].
        initial: [S] probabilities of the first state.
        horizon: rows after which an episode is cut.
        discount: of a policy's value.
        logger: [S, A] probabilities of the logging policy.
        episodes: of a log.
    """

    columns: Columns
    allowed: NDArray[np.bool_]
    transition: Array
    reward: Array
    earn: Callable[[Ints, Ints, Ints], Array]
    initial: Array
    horizon: int
    discount: float = 1.0
    logger: Array
    episodes: int

    def log(self, rng: Generator) -> Episodes:
        over = ~self.transition.any((1, 2))
        alive = np.arange(self.episodes)
        state = drawn(np.tile(self.initial, (self.episodes, 1)), rng)
        rows = []
        for step in range(self.horizon):
            action = drawn(self.logger[state], rng)
            following = drawn(self.transition[state, action], rng)
            rows.append(np.stack((alive, np.full(len(alive), step), state, action, following)))
            alive, state = alive[~over[following]], following[~over[following]]
            if not len(alive):
                break
        table = np.concatenate(rows, 1)
        episode, step, state, action, following = table[:, np.lexsort(table[1::-1])]
        return Episodes(
            columns={name: values[state] for name, values in self.columns.items()},
            allowed=self.allowed[state],
            episode=episode,
            step=step,
            action=action,
            reward=self.earn(state, action, following),
            terminal=over[following],
            propensity=self.logger[state, action],
        )

    def value(self, action: Ints) -> float:
        """Returns the value of the policy that takes these actions [S]."""
        return self._value(np.eye(self.reward.shape[1])[action])

    @property
    def logged(self) -> float:
        return self._value(self.logger)

    @property
    def best(self) -> float:
        """The value of the best policy, which may depend on the step."""
        value = np.zeros(len(self.initial))
        for _ in range(self.horizon):
            q = np.where(self.allowed, self.reward + self.discount * self.transition @ value, -np.inf)
            before, value = value, np.where(self.allowed.any(1), q.max(1), 0)
            if np.abs(value - before).max() < 1e-9:
                break
        return float(self.initial @ value)

    def _value(self, policy: Array) -> float:
        chain = np.einsum("sa,sat->st", policy, self.transition)
        gain = (policy * self.reward).sum(1)
        share, total = self.initial, 0.0
        for step in range(self.horizon):
            total += self.discount**step * float(share @ gain)
            share = share @ chain
        return total


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """An environment of Gymnasium with a named number for each entry of its observation.

    Attributes:
        names: of the entries.
        logger: returns probabilities [A] for an observation.
        rows: of a log; its last episode is cut there.
        best: the value of the best policy known.
    """

    env: str
    names: tuple[str, ...]
    logger: Callable[[Array], Array]
    rows: int
    best: float | None

    def log(self, rng: Generator) -> Episodes:
        env = gymnasium.make(self.env)
        rows = []
        episode, step = 0, 0
        observation, _ = env.reset(seed=int(rng.integers(2**31)))
        while len(rows) < self.rows:
            probabilities = self.logger(observation)
            action = int(drawn(probabilities[None], rng)[0])
            following, reward, terminated, truncated, _ = env.step(action)
            rows.append((observation, episode, step, action, float(reward), terminated, probabilities[action]))
            observation, step = following, step + 1
            if terminated or truncated:
                episode, step = episode + 1, 0
                observation, _ = env.reset()
        observations, *others = zip(*rows, strict=True)
        episodes, steps, actions, rewards, terminal, propensity = map(np.array, others)
        return Episodes(
            columns=dict(zip(self.names, np.array(observations, dtype=np.float64).T, strict=True)),
            allowed=np.ones((self.rows, len(self.logger(observation))), dtype=np.bool_),
            episode=episodes,
            step=steps,
            action=actions,
            reward=rewards,
            terminal=terminal,
            propensity=propensity,
        )

    def value(self, decide: Callable[[Array], Ints]) -> float:
        """Returns the mean return of played episodes."""
        return play(self.env, decide, EPISODES_PLAYED)

    @property
    def logged(self) -> float:
        """The mean return of episodes by the logging policy."""
        rng = np.random.default_rng(0)
        return self.value(lambda observations: drawn(np.stack([self.logger(row) for row in observations]), rng))


def mixed(favorite: int, actions: int, explored: float) -> Array:
    """[A] probabilities: a favorite, and all alike in a share of the rows."""
    return np.asarray((1 - explored) * np.eye(actions)[favorite] + explored / actions)


CART = ("position", "speed", "angle", "turn")
ARM = ("cos_1", "sin_1", "cos_2", "sin_2", "speed_1", "speed_2")


def cartpole_random() -> Simulated:
    """CartPole-v1: 20 000 rows of random actions, some 22 an episode; the best return is 500."""
    return Simulated(env="CartPole-v1", names=CART, logger=lambda _: np.full(2, 0.5), rows=20_000, best=500)


def cartpole_expert() -> Simulated:
    """CartPole-v1: 10 000 rows of a controller that balances, with random actions in half of the rows."""

    def controller(observation: Array) -> Array:
        position, speed, angle, turn = observation
        return mixed(int(angle + 0.3 * turn + 0.02 * position + 0.05 * speed > 0), 2, 0.5)

    return Simulated(env="CartPole-v1", names=CART, logger=controller, rows=10_000, best=500)


def acrobot_mixed() -> Simulated:
    """Acrobot-v1: 20 000 rows that pump energy into the second joint, with random actions in half of the rows."""
    return Simulated(
        env="Acrobot-v1", names=ARM, logger=lambda row: mixed(2 if row[4] < 0 else 0, 3, 0.5), rows=20_000, best=None
    )


def gridworld_random() -> Finite:
    """The 5 x 5 gridworld, discount 0.9: 300 episodes of random moves among those allowed; a state is a category."""
    state = np.arange(grid.NUM_STATES)
    return Finite(
        columns={"cell": names("s", state)},
        allowed=grid.allowed(),
        transition=grid.transition_matrix(),
        reward=grid.rewards(),
        earn=lambda _, action, following: grid.REWARD * (following == grid.GOAL),
        initial=grid.fixed_start(),
        horizon=200,
        discount=grid.GAMMA,
        logger=grid.random_policy(),
        episodes=300,
    )


def icu_sepsis() -> Finite:
    """ICU-Sepsis, 716 states and 25 treatments: 5 000 episodes of the clinicians; a state is a category."""
    truth = icu.sepsis()
    living = np.arange(icu.OVER + 1) < icu.NUM_LIVING
    return Finite(
        columns={"condition": names("s", np.arange(icu.OVER + 1))},
        allowed=np.tile(living[:, None], (1, len(icu.ACTIONS))),
        transition=truth.transition * living[:, None, None],
        reward=truth.reward * living[:, None],
        earn=lambda _, action, following: (following == icu.SURVIVAL).astype(np.float64),
        initial=truth.initial,
        horizon=500,
        logger=truth.clinicians,
        episodes=5_000,
    )


def inventory_rule() -> Finite:
    """A shop of 28 days: 500 episodes of a rule that orders 12 below a stock of 6, at random in 40 % of the rows.

    Orders of 0, 4, 8 or 12 arrive at once, up to a stock of 20, and cost 2 apiece and 5 an order. Demand is Poisson, 3
    on five days of the week and 7 on two; what is sold earns 4, what is left costs 0.2 a day and nothing is paid for it
    in the end.
    """
    capacity, days, orders = 20, 28, np.array([0, 4, 8, 12])
    levels = capacity + 1
    over = days * levels
    day, stock = np.divmod(np.arange(over + 1), levels)
    filled = np.minimum(stock[:, None] + orders, capacity)
    price = 2 * (filled - stock[:, None]) + 5 * (orders > 0)
    left = np.stack([_left_of(filled[:, order], np.where(day % 7 < 5, 3.0, 7.0)) for order in range(4)], 1)
    transition = np.zeros((over + 1, 4, over + 1))
    for number in range(days):
        now = day == number
        if number < days - 1:
            transition[now, :, (number + 1) * levels : (number + 2) * levels] = left[now]
        else:
            transition[now, :, over] = 1

    # what is left on the last day is part of no state: its reward is the expected one
    mean = 4 * filled - price - 4.2 * left @ np.arange(levels)
    mean[over] = 0

    def earn(state: Ints, action: Ints, following: Ints) -> Array:
        sold = filled[state, action] - following % levels
        earned = 4 * sold - price[state, action] - 0.2 * (following % levels)
        return np.where(following == over, mean[state, action], earned)

    rule = np.where(stock < 6, 3, 0)
    weekdays = np.array(["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"])
    return Finite(
        columns={"stock": stock, "day": day, "weekday": weekdays[day % 7]},
        allowed=np.tile((day < days)[:, None], (1, 4)),
        transition=transition,
        reward=mean,
        earn=earn,
        initial=np.eye(over + 1)[10],
        horizon=days,
        logger=np.stack([mixed(favorite, 4, 0.4) for favorite in rule]),
        episodes=500,
    )


def taxi_mixed() -> Finite:
    """Taxi-v4: 1 000 episodes of at most 200 rows by the best policy, with random actions in half of the rows."""
    env = gymnasium.make("Taxi-v4").unwrapped
    transition, reward = _table_of(env)
    row, column, passenger, goal = np.array([list(env.decode(state)) for state in range(len(reward))]).T
    stands = np.array(["red", "green", "yellow", "blue", "taxi"])
    return Finite(
        columns={"row": row, "column": column, "passenger": stands[passenger], "goal": stands[goal]},
        allowed=transition.any(2),
        transition=transition,
        reward=reward,
        earn=lambda state, action, _: reward[state, action],
        initial=env.initial_state_distrib,
        horizon=200,
        logger=np.stack([mixed(favorite, 6, 0.5) for favorite in _best_actions(transition, reward, 0.99)]),
        episodes=1_000,
    )


def lake_random() -> Finite:
    """FrozenLake-v1, slippery: 5 000 episodes of random moves, 1.4 % of which arrive; a state is a category."""
    transition, reward = _table_of(gymnasium.make("FrozenLake-v1").unwrapped)
    return Finite(
        columns={"cell": names("s", np.arange(16))},
        allowed=transition.any(2),
        transition=transition,
        reward=reward,
        earn=lambda _, action, following: (following == 15).astype(np.float64),
        initial=np.eye(16)[0],
        horizon=100,
        logger=np.full((16, 4), 0.25),
        episodes=5_000,
    )


def _table_of(env: Any) -> tuple[Array, Array]:
    """Returns the transitions [S, A, S] and expected rewards [S, A] of a toy environment; zeros where it is over."""
    states, actions = len(env.P), len(env.P[0])
    transition, reward = np.zeros((states, actions, states)), np.zeros((states, actions))
    over = set()
    for state, action in np.ndindex(states, actions):
        for probability, following, earned, terminated in env.P[state][action]:
            transition[state, action, following] += probability
            reward[state, action] += probability * earned
            over |= {following} if terminated else set()
    transition[list(over)] = reward[list(over)] = 0
    return transition, reward


def _best_actions(transition: Array, reward: Array, discount: float) -> Ints:
    value = np.zeros(len(reward))
    for _ in range(1_000):
        value = (reward + discount * transition @ value).max(1)
    return np.asarray((reward + discount * transition @ value).argmax(1))


def _left_of(stock: Ints, demand: Array) -> Array:
    """Returns [S, stock + 1] probabilities of what is left of a stock [S] after a Poisson demand of these means."""
    units = np.arange(stock.max() + 1)
    factorial = np.append(1, np.cumprod(units[1:], dtype=np.float64))
    chance = np.exp(-demand[:, None]) * demand[:, None] ** units / factorial
    left = np.zeros((len(stock), len(units)))
    for sold in units[:-1]:
        rows = np.flatnonzero(stock > sold)
        left[rows, stock[rows] - sold] = chance[rows, sold]
    left[:, 0] = 1 - left.sum(1)
    return left


_WORLDS = (
    cartpole_random,
    cartpole_expert,
    acrobot_mixed,
    gridworld_random,
    lake_random,
    taxi_mixed,
    inventory_rule,
    icu_sepsis,
)
WORLDS: dict[str, Callable[[], Finite | Simulated]] = {make.__name__: cache(make) for make in _WORLDS}
