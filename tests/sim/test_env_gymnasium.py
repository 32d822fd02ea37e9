"""Our control problems are Gymnasium's: one step from the same state, starts and limits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import pi
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from numpy.typing import ArrayLike, NDArray
from scipy import stats
from sim.conftest import environments, take

from reagent_lite.errors import KernelBuildError

NUM = 2_000


@dataclass(frozen=True, kw_only=True)
class Twin:
    """One of our environments and its Gymnasium original.

    Attributes:
        gymnasium: id of the original.
        state: smallest and greatest value of each variable that a state is drawn from.
        starts: the same of a start.
        forces: what each of our actions does: force or torque.
    """

    gymnasium: str
    state: dict[str, tuple[float, float]]
    starts: dict[str, tuple[float, float]]
    forces: tuple[float, ...]

    def steps(self, states: NDArray[np.float32], action: int, **changes: float) -> list[NDArray[Any]]:
        """Observations [N, S], rewards and ends of Gymnasium's own steps in float64, with changed attributes."""
        original: Any = gymnasium.make(self.gymnasium, disable_env_checker=True).unwrapped
        original.reset(seed=0)
        vars(original).update(changes)
        is_discrete = isinstance(original.action_space, gymnasium.spaces.Discrete)
        rows = []
        for state in states.astype(np.float64):
            original.state, original.steps_beyond_terminated = state, None  # the latter of CartPole
            rows.append(original.step(action if is_discrete else np.array([self.forces[action]]))[:3])
        return [np.array(column) for column in zip(*rows, strict=True)]


CAR = Twin(
    gymnasium="MountainCar-v0",
    state={"x": (-1.2, 0.6), "v": (-0.07, 0.07)},
    starts={"x": (-0.6, -0.4), "v": (0.0, 0.0)},
    forces=(-1.0, 0.0, 1.0),
)
TWINS = {
    "cartpole_v1": Twin(
        gymnasium="CartPole-v1",
        # a little beyond the limits, at speeds that players reach
        state={"x": (-2.5, 2.5), "v": (-5.0, 5.0), "theta": (-0.25, 0.25), "omega": (-5.0, 5.0)},
        starts=dict.fromkeys(("x", "v", "theta", "omega"), (-0.05, 0.05)),
        forces=(-10.0, 10.0),
    ),
    "mountain_car": CAR,
    "mountain_car_continuous": replace(CAR, gymnasium="MountainCarContinuous-v0", forces=(-1.0, -0.5, 0.0, 0.5, 1.0)),
    "pendulum": Twin(
        gymnasium="Pendulum-v1",
        state={"theta": (-pi, pi), "omega": (-8.0, 8.0)},
        starts={"theta": (-pi, pi), "omega": (-1.0, 1.0)},
        forces=(-2.0, -1.0, 0.0, 1.0, 2.0),
    ),
    "acrobot": Twin(
        gymnasium="Acrobot-v1",
        state={"theta_1": (-pi, pi), "theta_2": (-pi, pi), "omega_1": (-4 * pi, 4 * pi), "omega_2": (-9 * pi, 9 * pi)},
        starts=dict.fromkeys(("theta_1", "theta_2", "omega_1", "omega_2"), (-0.1, 0.1)),
        forces=(-1.0, 0.0, 1.0),
    ),
}
every_twin = pytest.mark.parametrize("name", sorted(TWINS))


# The acrobot near its top speed turns by several radians within a step, which magnifies the rounding of float32 states
# beyond 1e-6: in 4 of 100 states.
@pytest.mark.parametrize(
    ("name", "part", "largest", "settings", "changes"),
    [
        *((name, 1.0, 1e-6, {}, {}) for name in sorted(TWINS) if name != "acrobot"),
        ("acrobot", (1, 1, 0.5, 0.5), 1e-6, {}, {}),
        ("acrobot", 1.0, 1e-4, {}, {}),
        ("cartpole_v1", 1.0, 1e-6, {"math": "fast"}, {}),
        ("cartpole_v1", 1.0, 1e-6, {"parameters": {"pole_mass": 0.05, "gravity": 1.62}},
         {"gravity": 1.62, "masspole": 0.05, "total_mass": 1.05, "polemass_length": 0.05 * 0.5}),
    ],
)  # fmt: skip
def test_one_step_from_any_state(
    name: str, part: ArrayLike, largest: float, settings: dict[str, Any], changes: dict[str, float]
) -> None:
    twin = TWINS[name]
    low, high = np.array(list(twin.state.values())).T * part
    states = np.random.default_rng(2).uniform(low, high, (NUM, len(low))).astype(np.float32)
    if name.startswith("mountain"):
        states[: NUM // 4, 0] = np.linspace(0.4, 0.5, NUM // 4)  # around the goal
    env = environments(name, NUM, **settings)
    for action in range(len(twin.forces)):
        env.reset()
        for variable, column in zip(twin.state, states.T.copy(), strict=True):
            env.field(variable).copy_(torch.from_numpy(column))
        env.action.fill_(action)
        env.step()
        observation, reward, terminated = twin.steps(states, action, **changes)
        error = np.abs(env.next_observation.numpy() - observation) / np.abs(observation).max(0)
        assert error.max() <= largest
        assert (error <= 1e-6).all(1).mean() > 0.95
        assert env.terminated.tolist() == terminated.tolist()
        np.testing.assert_allclose(env.reward.numpy(), reward, rtol=0, atol=1e-6 * max(1.0, np.abs(reward).max()))
        assert not env.truncated.any()
    env.check()


@every_twin
def test_choices_are_forces(name: str) -> None:
    forces = TWINS[name].forces
    one_hot = name in ("cartpole_v1", "mountain_car")  # the actions of the discrete originals have no magnitude
    assert environments(name, 2).spec.action_features.tolist() == (
        np.eye(len(forces)).tolist() if one_hot else [[force] for force in forces]
    )


@pytest.mark.parametrize(
    ("name", "largest", "position", "speed", "gain"),
    [
        ("pendulum", 2.0, {"theta": 0.0}, "omega", 3 * 0.05),
        ("mountain_car_continuous", 1.0, {"x": -pi / 6}, "v", 0.0015),
    ],
)
def test_number_of_levels_is_a_parameter(
    name: str, largest: float, position: dict[str, float], speed: str, gain: float
) -> None:
    env = environments(name, 3, parameters={"num_levels": 9})
    assert env.spec.action_features.tolist() == [[largest * k / 4] for k in range(-4, 5)]  # exact in binary
    for variable, value in (*position.items(), (speed, 0.0)):  # where there is no gravity
        env.field(variable).fill_(value)
    take(env, 0, 4, 8)
    assert env.field(speed).tolist() == pytest.approx([-largest * gain, 0.0, largest * gain], rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(("name", "levels"), [("pendulum", 4.0), ("mountain_car_continuous", 5.5)])
def test_levels_that_leave_out_zero_are_refused(name: str, levels: float) -> None:
    with pytest.raises(KernelBuildError, match="num_levels must be odd, at least 3"):
        environments(name, 1, parameters={"num_levels": levels})


@every_twin
@pytest.mark.parametrize("again", [False, True], ids=["reset", "autoreset"])
def test_starts_are_uniform(name: str, again: bool) -> None:
    env = environments(name, 50_000, seed=11, time_limit=1)
    if again:
        env.step()
        assert (env.episode == 1).all()
    values = np.stack([env.field(variable).double().numpy() for variable in TWINS[name].starts])
    low, high = np.array(list(TWINS[name].starts.values()), np.float32)[..., None].swapaxes(0, 1)
    assert ((low <= values) & (values <= high)).all()
    drawn = (low < high)[:, 0]
    shares = (values - low)[drawn] / (high - low)[drawn]
    assert min(stats.kstest(share, "uniform").pvalue for share in shares) > 1e-3
    assert (
        np.abs(np.atleast_2d(np.corrcoef(shares)) - np.eye(len(shares))).max() < 4 / 50_000**0.5
    )  # four standard errors of no correlation


@pytest.mark.parametrize(
    ("name", "original"), [("cartpole_v0", "CartPole-v0"), *((name, twin.gymnasium) for name, twin in TWINS.items())]
)
def test_time_limits_are_gymnasiums(name: str, original: str) -> None:
    assert environments(name, 1).time_limit == gymnasium.spec(original).max_episode_steps
