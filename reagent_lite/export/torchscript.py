"""The TorchScript file: the call contract of 2019, for programs that load it with torch.jit.load.

    discrete    module((values [N, F], presence [N, F])) -> (action names, q [N, A])
    parametric  module((state values, presence), (action values, presence)) -> (["Q"], q [N, 1]), one row per pair

With BCQ a choice that the log hardly takes has q - 1e10, as in 2019, so that the largest q of the file is what the
policy takes; which those are depends on all choices of the state.

The scorer is traced, so it may be any Python; the preprocessor and what the contract asks for beyond tensors (tuples,
names, the refusal of infinity, lists of candidates) are scripted.
"""

import io
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn

from reagent_lite.errors import BundleError, Problem
from reagent_lite.export.predictor import Inputs, Pair, Predictor, Replay
from reagent_lite.export.tolerance import compare_choices

_EXAMPLE_ROWS: Final = 3
_EXCLUDED: Final = 1e10
"""The q of an excluded choice is lowered by this; float32 keeps nothing of q itself then."""


def write_torchscript(predictor: Predictor, path: Path) -> None:
    """Writes the module with the call contract of 2019."""
    archive = io.BytesIO()
    with _without_deprecation():
        module = (ParametricModule if predictor.parametric else DiscreteModule)(predictor)
        torch.jit.save(torch.jit.script(module.eval()), archive)
    # the .debug_pkl records hold source lines and paths of the writing machine; nothing needs them
    with zipfile.ZipFile(archive) as whole, zipfile.ZipFile(path, "w") as kept:
        for record in whole.infolist():
            if not record.filename.endswith(".debug_pkl"):
                kept.writestr(zipfile.ZipInfo(record.filename), whole.read(record))


def replay_torchscript(predictor: Predictor, path: Path) -> Replay:
    """Reads the file with torch.jit.load; discrete with all actions allowed, parametric the allowed pairs."""
    with _without_deprecation():
        module = torch.jit.load(path)  # type: ignore[no-untyped-call]

    def discrete(inputs: Inputs) -> Pair:
        values, presence, mask = inputs
        names, q = module((values, presence))
        if tuple(names) != predictor.action_names:
            raise BundleError(Problem(path.name, f"action names {predictor.action_names}", f"{names}"))
        live, _, _, choices = predictor(values, presence, torch.ones_like(mask))
        return _kept(path.name, live, choices, q)

    def parametric(inputs: Inputs) -> Pair:
        values, presence, candidates, candidate_presence, mask = inputs
        q = torch.zeros(mask.shape)
        for part in _rounds(predictor, values, presence):
            row, slot = mask[part].nonzero(as_tuple=True)
            row = part[row]
            pairs = (candidates[row, slot], candidate_presence[row, slot])
            q[row, slot] = module((values[row], presence[row]), pairs)[1].squeeze(1)
        live, _, _, choices = predictor(*inputs)
        return _kept(path.name, live[mask], choices[mask], q[mask])

    return parametric if predictor.parametric else discrete


class _CallContract(nn.Module):
    """Shared part of both call contracts: the state's preprocessor and the ids of columns."""

    state_ids: list[int]
    action_ids: list[int]

    def __init__(self, predictor: Predictor) -> None:
        super().__init__()
        self.state_ids = list(predictor.state_feature_ids)
        self.action_ids = list(predictor.action_feature_ids)
        self.state_preprocessor = predictor.state_preprocessor

    @torch.jit.export
    def state_sorted_features(self) -> list[int]:
        """Returns the ids of the state's columns."""
        return self.state_ids

    @torch.jit.export
    def action_sorted_features(self) -> list[int]:
        """Returns the ids of a candidate's columns; none where actions are fixed."""
        return self.action_ids


class DiscreteModule(_CallContract):
    """Discrete call contract around a predictor's parts."""

    action_names: list[str]
    action_ids: list[int]  # repeated, as an empty list has no type and scripting does not look at the base

    def __init__(self, predictor: Predictor) -> None:
        super().__init__(predictor)
        self.action_names = list(predictor.action_names)
        state = _normalized(self.state_preprocessor, len(self.state_ids))
        self.scorer = _traced(predictor, state, torch.ones(len(state), len(self.action_names), dtype=torch.bool))

    def forward(self, state_with_presence: tuple[Tensor, Tensor]) -> tuple[list[str], Tensor]:
        """Returns the action names and q [N, A] with every action open."""
        values, presence = state_with_presence
        state = self.state_preprocessor(values, _present(values, presence))
        mask = torch.ones((values.shape[0], len(self.action_names)), dtype=torch.bool, device=values.device)
        return self.action_names, self.scorer(state, mask)


class ParametricModule(_CallContract):
    """Parametric call contract around a predictor's parts.

    Where q depends on the other candidates, rows whose preprocessed states are equal are one list.
    """

    lists: Final[bool]

    def __init__(self, predictor: Predictor) -> None:
        super().__init__(predictor)
        self.lists = _needs_candidate_list(predictor)
        self.action_preprocessor = predictor.get_submodule("action_preprocessor")
        state = _normalized(self.state_preprocessor, len(self.state_ids))
        action = _normalized(self.action_preprocessor, len(self.action_ids))
        features = torch.stack((action, action), 1)
        self.scorer = _traced(predictor, state, torch.ones(features.shape[:2], dtype=torch.bool), features)

    def forward(
        self, state_with_presence: tuple[Tensor, Tensor], action_with_presence: tuple[Tensor, Tensor]
    ) -> tuple[list[str], Tensor]:
        """Returns ["Q"] and q [N, 1] of N pairs."""
        state_values, state_presence = state_with_presence
        action_values, action_presence = action_with_presence
        state = self.state_preprocessor(state_values, _present(state_values, state_presence))
        action = self.action_preprocessor(action_values, _present(action_values, action_presence))
        if self.lists and state.shape[0] > 0:
            states, features, mask, group, slot = candidate_lists(state, action)
            q = self.scorer(states, mask, features)[group, slot].unsqueeze(1)
        else:
            alone = torch.ones((state.shape[0], 1), dtype=torch.bool, device=state.device)
            q = self.scorer(state, alone, action.unsqueeze(1))
        return ["Q"], q


def candidate_lists(state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gathers pairs with equal states into one list of candidates per state; memory is G * K * W.

    Args:
        state: [N, S], N at least 1.
        action: [N, W].

    Returns:
        states [G, S], features [G, K, W], mask [G, K]; and of each pair its state [N] and its slot in the list [N].
    """
    states, group, counts = torch.unique(state, dim=0, return_inverse=True, return_counts=True)
    order = torch.argsort(group, stable=True)
    starts = torch.cumsum(counts, 0) - counts
    slot = torch.empty_like(group)
    slot[order] = torch.arange(state.shape[0], device=state.device) - starts[group[order]]
    longest = int(counts.max())
    features = torch.zeros((states.shape[0], longest, action.shape[1]), dtype=action.dtype, device=action.device)
    features[group, slot] = action
    mask = torch.arange(longest, device=state.device).unsqueeze(0) < counts.unsqueeze(1)
    return states, features, mask, group, slot


class _RestrictedScorer(nn.Module):
    """A scorer that lowers q of what the restriction excludes."""

    def __init__(self, predictor: Predictor) -> None:
        super().__init__()
        self.scorer = predictor.scorer
        self.restriction = predictor.restriction

    def forward(self, state: Tensor, mask: Tensor, features: Tensor | None = None) -> Tensor:
        q: Tensor = self.scorer(state, mask, features)
        return torch.where(self.restriction(state, mask, features), q, q - _EXCLUDED)


def _traced(predictor: Predictor, *example: Tensor) -> nn.Module:
    # torch's own check would compare on the example; the file's check compares on many rows
    traced: nn.Module = torch.jit.trace(_RestrictedScorer(predictor), example, check_trace=False)  # type: ignore[no-untyped-call]
    return traced


def _normalized(preprocessor: nn.Module, num_features: int) -> Tensor:
    """Returns [3, W], the preprocessor's output to trace the scorer with."""
    shape = (_EXAMPLE_ROWS, num_features)
    return preprocessor(torch.zeros(shape), torch.ones(shape, dtype=torch.bool))  # type: ignore[no-any-return]


def _present(values: Tensor, presence: Tensor) -> Tensor:
    present = presence.to(torch.bool)
    if bool((torch.isinf(values) & present).any()):
        raise ValueError("expected finite features or NaN for missing ones, got infinity")
    return present


def _needs_candidate_list(predictor: Predictor) -> bool:
    """Returns whether the q of a candidate depends on the other candidates of its state."""
    return predictor.threshold is not None or bool(getattr(predictor.scorer, "needs_candidate_list", False))


def _rounds(predictor: Predictor, values: Tensor, presence: Tensor) -> Iterator[Tensor]:
    """Yields row indices such that no two rows of a call have equal states: equal states would share one list."""
    if not _needs_candidate_list(predictor):
        yield torch.arange(values.shape[0])
        return
    state = predictor.state_preprocessor(values, presence)
    slot = candidate_lists(state, state)[4]
    for number in range(int(slot.max()) + 1):
        yield (slot == number).nonzero().squeeze(1)


def _kept(file: str, live: Tensor, choices: Tensor, served: Tensor) -> Pair:
    """Returns q of the live predictor and q of the file, both 0 where one of them excludes the choice."""
    left = ~(served < live - _EXCLUDED / 2)  # NaN is left, and found
    compare_choices(file, choices.numpy(), left.numpy())
    both = left & choices
    return live.where(both, 0.0).numpy(), served.where(both, 0.0).numpy()


@contextmanager
def _without_deprecation() -> Iterator[None]:
    """Torch deprecates TorchScript, which is kept for users of 2019; ONNX is the primary format.

    Tracing warns of torch's own layers as well; formats.py refuses a network that branches on values.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)  # type: ignore[attr-defined]
        warnings.filterwarnings("ignore", r"`torch\.jit\.", DeprecationWarning)
        yield
