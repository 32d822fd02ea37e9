"""One step of Gymnasium's control problems in float64 over many states at once; held to Gymnasium's own step by a test.

Every function takes states [N, D] in the order of Gymnasium's `unwrapped.state` and the physical action [N] (force,
torque), and returns (next state [N, D], reward [N], margin [N]): the episode terminates where margin >= 0 (> 0 for the
acrobot), so that |margin| tells how near a step came to the threshold. Angles are not wrapped.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Outcome = tuple[Array, Array, Array]


def mountain_car(state: Array, action: Array, *, engine: float, goal: float) -> Outcome:
    """Position and velocity; `engine` is the velocity a full push adds. The reward is left 0: it is the caller's."""
    position, velocity = state.T
    velocity = np.clip(velocity + action * engine - 0.0025 * np.cos(3 * position), -0.07, 0.07)
    position = np.clip(position + velocity, -1.2, 0.6)
    velocity = np.where((position == -1.2) & (velocity < 0), 0.0, velocity)
    margin = np.minimum(position - goal, velocity)
    return np.stack([position, velocity], 1), np.zeros(len(state)), margin


def pendulum(state: Array, torque: Array) -> Outcome:
    """Angle from upright and its speed; never terminates."""
    angle, speed = state.T
    centered = (angle + np.pi) % (2 * np.pi) - np.pi
    cost = centered**2 + 0.1 * speed**2 + 0.001 * torque**2
    speed = np.clip(speed + (15 * np.sin(angle) + 3 * torque) * 0.05, -8, 8)
    return np.stack([angle + speed * 0.05, speed], 1), -cost, np.full(len(state), -np.inf)


def acrobot(state: Array, torque: Array) -> Outcome:
    """Both angles and speeds; Runge-Kutta of order 4 over 0.2 s."""

    def rate(s: Array) -> Array:
        first, second, speed, speed_2 = s.T
        d1 = 0.25 + 1 + 0.25 + np.cos(second) + 2  # masses, lengths and inertias 1, centers at 0.5
        d2 = 0.25 + 0.5 * np.cos(second) + 1
        phi2 = 0.5 * 9.8 * np.cos(first + second - np.pi / 2)
        phi1 = -0.5 * speed_2**2 * np.sin(second) - speed_2 * speed * np.sin(second)
        phi1 = phi1 + 1.5 * 9.8 * np.cos(first - np.pi / 2) + phi2
        rate_2 = torque + d2 / d1 * phi1 - 0.5 * speed**2 * np.sin(second) - phi2
        rate_2 = rate_2 / (0.25 + 1 - d2**2 / d1)
        return np.stack([speed, speed_2, -(d2 * rate_2 + phi1) / d1, rate_2], 1)

    k1 = rate(state)
    k2 = rate(state + 0.1 * k1)
    k3 = rate(state + 0.1 * k2)
    k4 = rate(state + 0.2 * k3)
    after = state + 0.2 / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    limit = np.array([4 * np.pi, 9 * np.pi])
    after[:, 2:] = np.clip(after[:, 2:], -limit, limit)
    margin = -np.cos(after[:, 0]) - np.cos(after[:, 0] + after[:, 1]) - 1
    return after, np.where(margin > 0, 0.0, -1.0), margin
