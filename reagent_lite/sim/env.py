"""Many environments at once: buffers that are overwritten in place, stepped by a backend."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from reagent_lite.config.environment import MOST_STEPS, too_long
from reagent_lite.errors import Problem, SimulationError
from reagent_lite.memory import free_bytes
from reagent_lite.sim.backend import Backend
from reagent_lite.sim.calls import ActCall, Call

_ONE = torch.Size((1,))
# observation [R, S], mask [R, K] or None, features [R, K, F] or None -> q [R, K]
ObservationPolicy = Callable[[Tensor, Tensor | None, Tensor | None], Tensor]


class VectorEnv:
    """N environments whose buffers keep their addresses, so that a CUDA graph can use them.

    Observations, actions and rewards have R = N * A rows, environment * A + agent, with A agents per environment.

    Attributes:
        spec: description of the environment.
        device: the device of all buffers.
        num_envs: N.
        num_rows: R.
        first_env: global id of the first environment; an environment's random numbers depend only on its global id.
        time_limit: steps until truncation.
        observation: [R, S], the current observation, from which the policy acts next; uint8 if it is an image.
        next_observation: [R, S], the observation at the end of the last transition.
        action: [R], taken by `step`.
        propensity: [R], probability of `action`, written by `act`.
        reward: [R], reward of the last transition.
        ended: [N] uint8, bit 0 terminated, bit 1 truncated.
        last_return: [R], return of the last finished episode.
        last_length: [N] int32, steps of the last finished episode.
        step_count: [N] int32, steps done in the running episode.
        episode: [N] int32, episodes finished.
        episode_return: [R], sum of rewards so far in the running episode.
        in_game: [R] bool, whether the agent plays at `observation`; None with one agent. Rows of an agent that has left
            are arbitrary and are ignored everywhere.
        next_in_game: [R] bool, whether it still plays at `next_observation`.
        mask: [R, K] bool, choices at `observation`; None if all are always allowed.
        next_mask: [R, K] bool, choices at `next_observation`.
        features: [R, K, F], features of the choices at `observation`; None unless parametric.
        next_features: [R, K, F], features of the choices at `next_observation`.
        restarts: whether `load_state_dict` starts new episodes because the saved state is incomplete.
    """

    restarts = False

    def __init__(
        self,
        backend: Backend,
        *,
        num_envs: int,
        first_env: int = 0,
        seed: int = 0,
        stream: int = 0,
        time_limit: int | None = None,
        parametric: bool = False,
    ) -> None:
        """Allocates the buffers; `reset` starts the environments.

        Args:
            backend: runs the kernels.
            num_envs: N.
            first_env: global id of the first environment, for environments split over processes.
            seed: the seed of all random numbers.
            stream: number of the stream of random numbers; each use of a seed, such as evaluation, has its own.
            time_limit: steps until truncation; None means the environment's limit.
            parametric: whether to keep the features of choices.

        Raises:
            SimulationError: no environments, too many for the memory, or a time limit that is out of range.
        """
        self.spec = backend.spec
        self.device = backend.device
        self.num_envs = num_envs
        self.num_rows = num_envs * self.spec.agents
        self.first_env = first_env
        self.time_limit = self.spec.time_limit if time_limit is None else time_limit
        self._backend = backend
        self._parametric = parametric
        self._require_sizes()
        self._allocate()
        key = {"seed": seed & 0xFFFFFFFF, "stream": stream & 0xFFFFFFFF, "first_env": first_env}
        self._call = Call(**key, num=num_envs, time_limit=self.time_limit)
        self._act_call = ActCall(**key, num=num_envs)
        self._bind()

    @property
    def terminated(self) -> Tensor:
        """[N] bool: the episode ended by itself, not by the time limit."""
        return (self.ended & 1).bool()

    @property
    def truncated(self) -> Tensor:
        """[N] bool: the time limit cut the episode."""
        return (self.ended & 2).bool()

    @property
    def row_terminated(self) -> Tensor:
        """[R] bool: the episode ended by itself, or the agent has left the game."""
        ended = self._by_row(self.terminated)
        return ended if self.next_in_game is None else ended | ~self.next_in_game

    @property
    def row_truncated(self) -> Tensor:
        """[R] bool: the episode ended at the time limit; also true with a true end in the same step."""
        return self._by_row(self.truncated | (self.ended > 0) & (self.last_length == self.time_limit))

    def _by_row(self, values: Tensor) -> Tensor:
        """Repeats values of environments, [N], for each agent, [R]."""
        return values.unsqueeze(1).expand(-1, self.spec.agents).reshape(-1)

    def reset(self) -> None:
        """Starts episode 0 of every environment."""
        for tensor in (self.episode, self.next_observation, self.action, self.propensity, self.reward, self.ended):
            tensor.zero_()
        for tensor in (self.last_return, self.last_length, self._fault):
            tensor.zero_()
        self._begin()

    def close_equal_candidates(self) -> None:
        """Leaves the first of equal candidates in `mask`, as a log identifies a candidate by its features."""
        if self._own_features and self.mask is not None and self.features is not None:
            self.mask.logical_and_(_is_first_of_equal(self.mask, self.features))

    def act(self, q: Tensor | None, *, epsilon: Tensor, temperature: float = 0.0) -> None:
        """Draws `action` and its `propensity`.

        Args:
            q: [R, K] float32 on the device; None draws uniformly among the allowed choices.
            epsilon: [1] float32 on the device, probability of a uniform draw if temperature is 0.
            temperature: if positive, draws are from softmax(q / temperature) instead.

        Raises:
            SimulationError: q or epsilon has another shape or is on another device.
        """
        call = self._act_call
        if q is None:
            call.q = None
        else:
            self._require_tensor("q", q, self._q_shape)
            self._q = q.float().contiguous()  # an attribute, as the kernel may read it after this method returns
            call.q = self._q.data_ptr()
        self._require_tensor("epsilon", epsilon, _ONE)
        self._epsilon = epsilon.float()
        call.epsilon = self._epsilon.data_ptr()
        call.temperature = temperature
        self._backend.launch("env_act", call)

    def step(self, *, stay: bool = False) -> None:
        """Takes `action`; if an episode ends, the next one starts in the same step.

        Args:
            stay: if an episode ends, the next one does not start, so that `field` returns the last state. Only for a
                last step before `reset`.
        """
        self._call.stay = stay
        self._backend.launch("env_step", self._call)

    def advance(self, *, observe: bool = True) -> None:
        """Takes `action` as `step` does, without writing `next_observation`, `next_mask` and `next_features`.

        Args:
            observe: whether to refresh observation, mask and features; false runs only the dynamics.
        """
        self._backend.launch("env_step", self._advance_call if observe else self._dynamics_call)

    def observe(self) -> None:
        """Refreshes `observation`, `mask` and `features` after the state was written from outside."""
        self._backend.launch("env_observe", self._call)

    def field(self, name: str) -> Tensor:
        """Returns a view of one variable of the state, [N], or [n, N] of an array.

        Raises:
            SimulationError: the environment has no such variable.
        """
        row = 0
        for field in self.spec.fields:
            if field.name == name:
                rows = self._state[row : row + field.size].view(field.dtype)
                return rows[0] if field.size == 1 else rows
            row += field.size
        names = ", ".join(field.name for field in self.spec.fields)
        raise SimulationError(Problem(f"state of {self.spec.name}", f"one of {names}", repr(name)))

    def check(self) -> None:
        """Checks that actions were valid, and that current returns and observations are finite; waits for the device.

        Raises:
            SimulationError: actions were not valid (the environment took allowed ones instead), or a return or
                observation is not finite.
        """
        self._require_finite()
        count, complement = (word & 0xFFFFFFFF for word in self._fault.tolist())
        if count == 0:
            return
        self._fault.zero_()
        expected = "allowed actions" if self.spec.has_mask else f"actions from 0 to {self.spec.num_actions - 1}"
        got = f"{count} that are not, the first environment with one is {~complement & 0xFFFFFFFF}"
        todo = "Check the policy, the mask it is given, and that every state allows an action"
        raise SimulationError(Problem(f"actions of {self.spec.name}", expected, got, todo))

    def _require_finite(self) -> None:
        present = True if self.in_game is None else self.in_game
        earned = (self.last_return + self.episode_return).unsqueeze(1)
        for what, numbers in (("rewards", earned), ("observations", self.observation)):
            if not numbers.is_floating_point():
                continue
            rows = (~numbers.isfinite().all(1) & present).nonzero()
            if len(rows):
                row = int(rows[0])
                value = next(value for value in numbers[row].tolist() if not math.isfinite(value))
                got = f"{value} in environment {self.first_env + row // self.spec.agents}"
                todo = "The environment computes it: check its functions step and observe"
                raise SimulationError(Problem(f"{what} of {self.spec.name}", "finite numbers", got, todo))

    def state_dict(self) -> dict[str, Tensor]:
        """Returns copies of all buffers, and the seed, stream and ids that determine the random numbers."""
        return {name: tensor.clone() for name, tensor in self._tensors().items()} | {"identity": self._identity()}

    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        """Continues from a `state_dict`.

        Raises:
            SimulationError: the state is from other environments.
        """
        identity = self._identity()
        if not torch.equal(tensors["identity"], identity):
            expected = f"num_envs, first_env, seed, stream {identity.tolist()}"
            got = str(tensors["identity"].tolist())
            todo = "Resume with the settings that the state was saved with"
            raise SimulationError(Problem(f"state of {self.spec.name}", expected, got, todo))
        for name, tensor in self._tensors().items():
            tensor.copy_(tensors[name])

    def _begin(self) -> None:
        """Restarts every environment's current episode."""
        self._backend.launch("env_reset", self._call)

    def _identity(self) -> Tensor:
        call = self._call
        return torch.tensor([self.num_envs, self.first_env, call.seed, call.stream])

    def _tensors(self) -> dict[str, Tensor]:
        names = ["step_count", "episode", "episode_return", "observation", "next_observation", "action", "propensity"]
        names += ["reward", "ended", "last_return", "last_length"]
        names += ["in_game", "next_in_game"] if self.spec.agents > 1 else []
        names += ["mask", "next_mask"] if self.spec.has_mask else []
        names += ["features", "next_features"] if self._own_features else []
        return {name: getattr(self, name) for name in names} | {"state": self._state, "fault": self._fault}

    @property
    def _own_features(self) -> bool:
        return self._parametric and self.spec.candidates

    def _require_tensor(self, name: str, tensor: Tensor, shape: torch.Size) -> None:
        if tensor.shape != shape or tensor.device != self.device:
            expected = f"a tensor of {list(shape)} on {self.device}"
            got = f"{list(tensor.shape)} on {tensor.device}"
            raise SimulationError(Problem(f"{name} of {self.spec.name}", expected, got))

    def _require_sizes(self) -> None:
        # a candidate's counter is step * num_actions + k, in 28 bits; candidates are drawn at the last step too
        most = min(MOST_STEPS, 2**28 // self.spec.num_actions - 1) if self.spec.candidates else MOST_STEPS
        if self.time_limit > most:
            raise SimulationError(too_long(f"simulation.time_limit of {self.spec.name}", most, self.time_limit))
        num = self.num_envs
        first = self.first_env
        agents = self.spec.agents
        for is_valid, where, expected, value in (
            (num >= 1, "simulation.num_envs", "at least 1 environment", num),
            (num * agents < 2**31, "simulation.num_envs", f"fewer than 2^31 environments times {agents} agents", num),
            (self.time_limit >= 1, "simulation.time_limit", "at least 1 step", self.time_limit),
            (0 <= first <= 2**32 - num, "first_env", "global ids from 0 to 2^32 - 1", first),
        ):
            if not is_valid:
                raise SimulationError(Problem(where, expected, str(value)))
        need = num * self.bytes_per_env
        free = free_bytes(self.device)
        if need > free:
            expected = f"environments that fit into the {free / 2**30:.1f} GiB free on {self.device}"
            got = f"{num}, which need {need / 2**30:.1f} GiB"
            todo = f"At most {free // self.bytes_per_env} fit"
            raise SimulationError(Problem("simulation.num_envs", expected, got, todo))

    @property
    def bytes_per_env(self) -> int:
        """Size of the buffers of one environment, in bytes."""
        spec = self.spec
        words = spec.state_words + spec.agents * 4 + 3
        observations = 2 * spec.agents * spec.observation_size * spec.observation_dtype.itemsize
        masks = 2 * spec.num_actions if spec.has_mask else 0
        features = 8 * spec.num_actions * spec.action_feature_size if self._own_features else 0
        small = spec.agents * (spec.action_bytes + 2 * (spec.agents > 1)) + 1
        return 4 * words + observations + small + masks + features

    def _allocate(self) -> None:
        spec = self.spec
        num = self.num_envs
        rows = self.num_rows

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        self._q_shape = torch.Size((rows, spec.num_actions))
        if spec.threads_per_env > 1:  # an environment's words are adjacent
            self._state = zeros(num, spec.state_words, dtype=torch.int32).T
        else:
            self._state = zeros(spec.state_words, num, dtype=torch.int32)
        self._fault = zeros(2, dtype=torch.int32)
        self.step_count = zeros(num, dtype=torch.int32)
        self.episode = zeros(num, dtype=torch.int32)
        self.episode_return = zeros(rows)
        self.observation = zeros(rows, spec.observation_size, dtype=spec.observation_dtype)
        self.next_observation = zeros(rows, spec.observation_size, dtype=spec.observation_dtype)
        self.action = zeros(rows, dtype=spec.action_dtype)
        self.propensity = zeros(rows)
        self.reward = zeros(rows)
        self.ended = zeros(num, dtype=torch.uint8)
        self.last_return = zeros(rows)
        self.last_length = zeros(num, dtype=torch.int32)
        self.mask: Tensor | None = None
        self.next_mask: Tensor | None = None
        self.in_game: Tensor | None = None
        self.next_in_game: Tensor | None = None
        self.features: Tensor | None = None
        self.next_features: Tensor | None = None
        if spec.agents > 1:
            self.in_game = zeros(rows, dtype=torch.bool)
            self.next_in_game = zeros(rows, dtype=torch.bool)
        if spec.has_mask:
            self.mask = zeros(num, spec.num_actions, dtype=torch.bool)
            self.next_mask = zeros(num, spec.num_actions, dtype=torch.bool)
        if self._own_features:
            self.features = zeros(num, spec.num_actions, spec.action_feature_size)
            self.next_features = torch.zeros_like(self.features)
        elif self._parametric:
            fixed = spec.action_features.to(self.device)
            self.features = self.next_features = fixed.expand(rows, -1, -1)

    def _bind(self) -> None:
        """Writes the buffers' addresses into the calls."""
        outputs = self._tensors()
        for call in (self._call, self._act_call):
            for name, *_ in call._fields_:
                if name in outputs:
                    setattr(call, name, outputs[name].data_ptr())
        self._advance_call = _without(self._call, "next_observation", "next_mask", "next_features", "next_in_game")
        self._dynamics_call = _without(self._advance_call, "observation", "mask", "features", "in_game")


def require_finite_returns(returns: Tensor, environment: str) -> None:
    """Checks that returns are finite; `VectorEnv.check` covers only current episodes.

    Raises:
        SimulationError: some are not finite.
    """
    if not returns.isfinite().all():
        where = f"rewards of {environment}"
        todo = "The environment computes them: check its function step"
        raise SimulationError(Problem(where, "finite numbers", "some that are not", todo))


def _is_first_of_equal(mask: Tensor, features: Tensor) -> Tensor:
    """Returns whether no earlier allowed choice of the row has the same features, [R, K]; compares 64-bit hashes."""
    key = torch.zeros_like(mask, dtype=torch.int64)
    for bits in (features + 0).view(torch.int32).unbind(2):  # + 0: -0 equals 0
        key = key * 0x5DEECE66D1CE4E5B + bits
    ascending, order = key.masked_fill(~mask, torch.iinfo(torch.int64).max).sort(dim=1, stable=True)
    first = torch.ones_like(mask)
    first[:, 1:] = ascending[:, 1:] != ascending[:, :-1]
    return first.gather(1, order.argsort(1))


def _without(call: Call, *outputs: str) -> Call:
    """Returns a copy of a call that does not write some outputs."""
    other = Call.from_buffer_copy(call)
    for name in outputs:
        setattr(other, name, None)
    return other
