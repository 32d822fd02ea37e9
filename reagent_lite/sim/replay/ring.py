"""Simulated experience as a ring on the device: written a time slot at a time, drawn as n-step rows.

 slots ─► 0 1 2 … T−1   each with a row of every environment; row number = slot · N + environment
          ▲ head: next to be written; the newest n − 1 slots wait until their windows are complete

Observation columns have 2 T slots: slot t has a row's observation, slot T + t its next observation.

Nothing here waits for the device: the count of slots is a tensor there, so a CUDA graph can record writes and draws.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from reagent_lite.errors import Problem, SimulationError
from reagent_lite.memory import free_bytes
from reagent_lite.sim.replay.sampling import Priorities, importance_weights, n_step_sum
from reagent_lite.types import Actions, EnvStep, TransitionBatch

_KEY = "simulation.replay.capacity"
_TERMINATED = 1
_TRUNCATED = 2
_ABSENT = 4
_SMALLEST_ERROR = 1e-6

RingColumns = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape of a row and dtype of each column, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """Size of a ring, its columns, and the settings of its draws.

    Attributes:
        num_envs: N, rows written at once.
        observation_size: S.
        observation_dtype: type of observations; bytes if they are images.
        num_actions: K.
        slots: T, number of writes that are kept, with T * N rows.
        gamma: discount per step inside a window.
        n_step: largest number of rows of an episode that a drawn row spans.
        masked: whether some choices are forbidden in some rows.
        candidates: whether every row has its own candidates and their mask.
        action_feature_size: F of stored candidates; 0 if the learner does not read them.
        action_features: [K, F] features of fixed actions if the learner reads them, else None.
        prioritized: whether rows are drawn by priority.
        alpha: exponent of priorities.
        absences: whether some rows are of agents that have left; they have weight 0.
        needs_next_action: SARSA; a window ends before the step at a time limit, after which no action is known, and a
            row at the limit has weight 0. Both hold for every end of that step: leaving out only those that the limit
            cuts would favor true ends. Otherwise next_action is 0.
        boost: [K] reward added by action, to all rows of a window but the first: the learner adds that one itself.
        seed: seed of the ring's own generator, which must be registered with a CUDA graph. None draws from the device's
            default generator, which a CUDA graph captures by itself.
    """

    num_envs: int
    observation_size: int
    num_actions: int
    slots: int
    gamma: float
    observation_dtype: torch.dtype = torch.float32
    n_step: int = 1
    masked: bool = False
    candidates: bool = False
    action_feature_size: int = 0
    action_features: Tensor | None = None
    prioritized: bool = False
    alpha: float = 0.6
    absences: bool = False
    needs_next_action: bool = False
    boost: Tensor | None = None
    seed: int | None = None

    @property
    def lag(self) -> int:
        """Number of the newest slots that are not drawn yet, because their windows are incomplete."""
        return self.n_step - 1 + self.needs_next_action

    @property
    def observation_columns(self) -> RingColumns:
        """Columns of an observation and the choices at it."""
        S, K, F = self.observation_size, self.num_actions, self.action_feature_size
        columns: RingColumns = {"observation": ((S,), self.observation_dtype)}
        if self.masked or self.candidates:
            columns["mask"] = ((K,), torch.bool)
        if self.candidates and F:
            columns["features"] = ((K, F), torch.float32)
        return columns

    @property
    def step_columns(self) -> RingColumns:
        """Columns of the step: reward, propensity, and `marks`, which hold the action and the kind of end."""
        return {
            "scalars": ((2,), torch.float32),
            "marks": ((2,), torch.uint8 if self.num_actions <= 256 else torch.int32),
        }

    @property
    def row_bytes(self) -> int:
        """Bytes per row, rounded up."""
        return 2 * _bytes(self.observation_columns) + _bytes(self.step_columns) + 5 * self.prioritized


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Drawn rows.

    Attributes:
        batch: rows as observed, not normalized; weights are importance weights over the number of rows.
        index: [B] int64, row numbers, for `update_priorities`.
    """

    batch: TransitionBatch
    index: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Windows:
    """Windows of drawn rows: n-step sums, and the last row of each window."""

    reward: Tensor
    steps: Tensor
    action: Tensor
    propensity: Tensor
    last: Tensor
    ended: Tensor


class ReplayRing:
    """The newest T slots of N rows each.

    Rows drawn before `settings.lag` + 1 slots are written have weight 0.

    Args:
        settings: size, columns and settings of the draws.
        device: device of the rows, which are allocated once.
        over_ranks: returns the maximum of a scalar tensor over all ranks, which draw together.

    Attributes:
        capacity: T * N.
        generator: the generator of the draws; part of the state.

    Raises:
        SimulationError: the rows do not fit into free memory, or are too few for one window.
    """

    def __init__(
        self,
        settings: ReplaySettings,
        device: torch.device,
        over_ranks: Callable[[Tensor], Tensor] = lambda largest: largest,
    ) -> None:
        _check_capacity(settings, device)
        s = settings
        T = settings.slots
        N = settings.num_envs
        self._settings = settings
        self.capacity = T * N
        self._columns = {
            name: torch.zeros(slots, N, *shape, dtype=kind, device=device)
            for slots, columns in ((2 * T, s.observation_columns), (T, s.step_columns))
            for name, (shape, kind) in columns.items()
        }
        self._flat = {name: column.flatten(0, 1) for name, column in self._columns.items()}
        self._over_ranks = over_ranks
        self._priorities = Priorities(self.capacity, device) if s.prioritized else None
        self._written = torch.zeros(1, dtype=torch.int64, device=device)
        self.generator = _generator(s.seed, device)
        # factors and offsets of sampling, [n, 1] or [N]: a captured graph cannot copy from the host
        window = torch.arange(s.n_step, device=device).unsqueeze(1)
        self._offsets = window * N
        self._powers = (s.gamma ** window.double()).float()
        self._boost = None if s.boost is None else s.boost.to(device)
        self._after_first = (window > 0).float()
        self._envs = torch.arange(N, device=device)
        self._all_allowed = torch.ones(1, 1, dtype=torch.bool, device=device)
        self._store: Callable[[EnvStep, int], None] = self._eager_store
        self._select: Callable[[Tensor, float | Tensor], Sample] = self._eager_select
        self._fixed = None if s.action_features is None else s.action_features.to(device)

    @property
    def rows(self) -> int:
        """Number of rows in the ring; waits for the device."""
        return min(int(self._written), self._settings.slots) * self._settings.num_envs

    @property
    def most_rounds(self) -> int:
        """Largest number of slots of one write."""
        return self._settings.slots - self._settings.lag

    def compile(self) -> None:
        """Compiles writes and draws to a few kernels instead of about sixty."""
        self._store = torch.compile(self._eager_store, dynamic=False)
        self._select = torch.compile(self._eager_select, dynamic=False)

    def write(self, step: EnvStep, rounds: int = 1) -> None:
        """Writes slots; they replace the oldest ones when the ring is full.

        Args:
            step: rows of `rounds` slots one after the other, each a row of every environment.
            rounds: at most `most_rounds`.
        """
        self._store(step, rounds)

    def _eager_store(self, step: EnvStep, rounds: int) -> None:
        s = self._settings
        N = self._settings.num_envs
        kind = self._columns["marks"].dtype
        slots = (self._written + torch.arange(rounds, device=self._written.device)).remainder(s.slots)
        for name in s.observation_columns:
            shape = rounds, N, *self._flat[name].shape[1:]
            self._columns[name].index_copy_(0, slots, getattr(step, name).view(shape))
            self._columns[name].index_copy_(0, slots + s.slots, getattr(step, f"next_{name}").view(shape))
        ended = torch.add(step.terminated.to(kind), step.truncated, alpha=_TRUNCATED)
        if step.present is not None:
            ended = ended.add(~step.present, alpha=_ABSENT)
        scalars = torch.stack((step.reward, step.propensity), 1)
        marks = torch.stack((step.action.to(kind), ended), 1)
        self._columns["scalars"].index_copy_(0, slots, scalars.view(rounds, N, 2))
        self._columns["marks"].index_copy_(0, slots, marks.view(rounds, N, 2))
        self._written.add_(rounds)
        if self._priorities is not None:
            self._admit(self._priorities, slots, self._written - torch.arange(rounds, device=slots.device).flip(0))

    def end_episodes(self) -> None:
        """Truncates the episodes of the newest rows; the rows written next belong to other episodes."""
        newest = (self._written - 1).remainder(self._settings.slots)
        marks = self._columns["marks"]
        ended = marks[newest, :, 1]
        marks[newest, :, 1] = ended.masked_fill(ended == 0, _TRUNCATED)

    def sample(self, rows: int, *, beta: float | Tensor = 0.0) -> Sample:
        """Draws rows with replacement.

        Args:
            rows: B.
            beta: exponent of importance weights, a number or [1]; 1 corrects fully for priorities, and for ranks whose
                rows are drawn more often than those of others.
        """
        # float64: with the 2^24 values of float32, rows of a large ring would not be equally likely
        share = torch.rand(rows, dtype=torch.float64, device=self._written.device, generator=self.generator)
        return self._select(share, beta)

    def _eager_select(self, share: Tensor, beta: float | Tensor) -> Sample:
        row, rarity = self._draw(share)
        windows = self._windows(row)
        following = windows.last + self.capacity
        batch = TransitionBatch(
            state=self._flat["observation"].index_select(0, row),
            actions=self._choices(row),
            action=windows.action,
            reward=windows.reward,
            steps=windows.steps,
            bootstrap=torch.rsub(windows.ended.bitwise_and(_TERMINATED), 1).float(),
            next_state=self._flat["observation"].index_select(0, following),
            next_actions=self._choices(following),
            next_action=self._next_action(windows),
            propensity=windows.propensity,
            metrics=windows.reward.new_empty(len(row), 0),
            weight=self._weights(row, windows, rarity, beta),
        )
        return Sample(batch=batch, index=row)

    def update_priorities(self, index: Tensor, error: Tensor) -> None:
        """Sets priorities of drawn rows, [B], from their errors, [B] and not negative; Schaul et al. (2016), 3.3.

        Rows that have been overwritten are left out. Does nothing if rows are drawn uniformly.
        """
        if self._priorities is not None:
            self._priorities.put(index, (error + _SMALLEST_ERROR) ** self._settings.alpha)

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the filled part of the ring's tensors, without copies; waits for the device."""
        s = self._settings
        filled = self.rows // self._settings.num_envs
        state = {name: column[:filled] for name, column in self._columns.items()}
        state |= {f"next_{name}": self._columns[name][s.slots : s.slots + filled] for name in s.observation_columns}
        if self._priorities is not None:
            state["priority"] = self._by_slot(self._priorities)[:filled]
            state["largest_priority"] = self._priorities.largest
        shape = torch.tensor([s.slots, s.num_envs])
        return state | {
            "shape": shape,
            "written": self._written,
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restores a saved ring: the same rows and, if the generator was saved, the same draws.

        Raises:
            SimulationError: the saved ring has another shape or other columns.
        """
        present = self.state_dict()
        if _shapes(present) != _shapes(state):
            expected = f"a saved replay like this run's ({_shape_text(present)})"
            got = _shape_text(state)
            if "written" not in state or "follows" in state:
                got = f"{got}, in the layout of an earlier release"
            todo = "Continue with the same release, capacity, num_envs and environment, or start with an empty replay"
            raise SimulationError(Problem(_KEY, expected, got, todo))
        filled = len(state["marks"])
        for name, column in self._columns.items():
            column[:filled].copy_(state[name])
        for name in self._settings.observation_columns:
            self._columns[name][self._settings.slots :][:filled].copy_(state[f"next_{name}"])
        if self._priorities is not None:
            self._priorities.value.zero_()
            self._by_slot(self._priorities)[:filled].copy_(state["priority"])
            self._priorities.largest.copy_(state["largest_priority"])
            self._priorities.refresh()
        self._written.copy_(state["written"])
        # the state of a generator fits only the same type of device, not a run that moved to a GPU
        if "generator" in state and len(state["generator"]) == len(self.generator.get_state()):
            self.generator.set_state(state["generator"].cpu())

    def _by_slot(self, priorities: Priorities) -> Tensor:
        return priorities.value.view(self._settings.slots, self._settings.num_envs)

    def _admit(self, priorities: Priorities, slots: Tensor, filled: Tensor) -> None:
        """Sets the largest priority for the slots that became complete, and none for those just written.

        Args:
            priorities: the priorities of all rows.
            slots: [R] slots that were just written.
            filled: [R] number of slots written so far, up to and including each of them.
        """
        s = self._settings
        N = self._settings.num_envs
        ready = (slots - s.lag).remainder(s.slots)
        value = (priorities.largest * (filled > s.lag)).unsqueeze(1).expand(-1, N)
        if s.needs_next_action:
            rows = (ready.unsqueeze(1) * N + self._envs).view(-1)
            value = value * (self._windows(rows).ended.bitwise_and(_TRUNCATED) == 0).view(-1, N)
        if s.absences:
            value = value * (self._columns["marks"][ready, :, 1] < _ABSENT)
        self._by_slot(priorities).index_fill_(0, slots, 0).index_copy_(0, ready, value)
        priorities.refresh(priorities.blocks_of(torch.cat((slots, ready)) * N, N))

    def _draw(self, share: Tensor) -> tuple[Tensor, Tensor]:
        """Returns row numbers of complete windows and their rarity (1 if rows are drawn uniformly), [B] each.

        Args:
            share: [B] uniform draws from [0, 1).
        """
        if self._priorities is not None:
            row = self._priorities.draw(share)
            return row, self._priorities.rarity(row, len(share))
        N = self._settings.num_envs
        filled = self._written.clamp(max=self._settings.slots)
        usable = (filled - self._settings.lag) * N
        row = ((share * usable).long() + (self._written - filled) * N).remainder(self.capacity)
        return row, (usable > 0).float().expand(len(share))

    def _windows(self, row: Tensor) -> _Windows:
        """Returns the windows that start at rows [B], up to the end of their episodes (SARSA: to a limit) or n rows."""
        index = (row + self._offsets).remainder(self.capacity)
        reward, propensity = self._flat["scalars"].index_select(0, index.view(-1)).view(*index.shape, 2).unbind(2)
        action, ended = self._flat["marks"].index_select(0, index.view(-1)).view(*index.shape, 2).unbind(2)
        if self._boost is not None:
            reward = reward + self._boost[action.long()] * self._after_first
        stops = ended
        if self._settings.needs_next_action:
            stops = ended.clone()
            stops[:-1] += ended[1:].bitwise_and(_TRUNCATED)
        total, steps = n_step_sum(reward, stops, self._powers)
        at_last = (steps - 1).unsqueeze(0)
        return _Windows(
            reward=total,
            steps=steps.float(),
            action=action[0].long(),
            propensity=propensity[0],
            last=index.gather(0, at_last).squeeze(0),
            ended=ended.gather(0, at_last).squeeze(0),
        )

    def _weights(self, row: Tensor, windows: _Windows, rarity: Tensor, beta: float | Tensor) -> Tensor:
        """Returns each row's share in the mean, [B]; 0 for rows that cannot be learned from."""
        s = self._settings
        if s.needs_next_action:
            rarity = rarity * (windows.ended.bitwise_and(_TRUNCATED) == 0)
        if s.absences:
            rarity = rarity * (self._flat["marks"][row, 1] < _ABSENT)
        if s.prioritized:
            return importance_weights(rarity, self._over_ranks(rarity.amax()), beta)
        return rarity / rarity.sum().clamp(min=1)  # 0 or 1 each

    def _next_action(self, windows: _Windows) -> Tensor:
        if not self._settings.needs_next_action:
            return torch.zeros_like(windows.action)
        following = (windows.last + self._settings.num_envs).remainder(self.capacity)
        return self._flat["marks"].index_select(0, following)[:, 0].long() * (windows.ended == 0)

    def _choices(self, row: Tensor) -> Actions:
        count = len(row)
        K = self._settings.num_actions
        flat = self._flat
        fixed = None if self._fixed is None else self._fixed.expand(count, *self._fixed.shape)
        return Actions(
            mask=flat["mask"].index_select(0, row) if "mask" in flat else self._all_allowed.expand(count, K),
            features=flat["features"].index_select(0, row) if "features" in flat else fixed,
        )


def _bytes(columns: RingColumns) -> int:
    return sum(prod(shape) * kind.itemsize for shape, kind in columns.values())


def _check_capacity(settings: ReplaySettings, device: torch.device) -> None:
    s = settings
    rows = settings.slots * settings.num_envs
    if s.slots <= s.lag:
        expected = f"at least {(s.lag + 1) * s.num_envs}, {s.lag + 1} rows of each environment"
        todo = "Raise it, or lower simulation.num_envs or rl.multi_steps"
        raise SimulationError(Problem(_KEY, expected, str(rows), todo))
    free = free_bytes(device)
    if rows * s.row_bytes > free:
        limit = f"for which there is memory on {device} ({free / 2**30:.1f} GiB free)"
        got = f"{rows:,} rows of {s.row_bytes:,} bytes ({rows * s.row_bytes / 2**30:.1f} GiB)"
        raise SimulationError(Problem(_KEY, f"at most {free // s.row_bytes:,} rows, {limit}", got, "Lower it"))


def _generator(seed: int | None, device: torch.device) -> torch.Generator:
    if seed is not None:
        return torch.Generator(device).manual_seed(seed)
    if device.type == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    return torch.default_generator


def _shapes(state: dict[str, Tensor]) -> dict[str, list[int]]:
    """Returns the shapes that a saved ring must share with this one, for any number of filled slots."""
    shapes = {name: list(value.shape[1:]) for name, value in state.items() if name != "generator"}
    return shapes | {"shape": state["shape"].tolist() if "shape" in state else []}


def _shape_text(state: dict[str, Tensor]) -> str:
    slots, envs = state["shape"].tolist() if "shape" in state else (0, 0)
    widths = ", ".join(f"{name} {list(value.shape[2:])}" for name, value in state.items() if value.dim() > 2)
    return f"{slots} slots of {envs}: {widths}"
