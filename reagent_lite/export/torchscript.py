"""The TorchScript file: the interface of ReAgent 2019, for programs that use torch.jit.load.

    discrete    module((values [N, F], presence [N, F])) -> (action names, q [N, A])
    images      module(image [N, *shape] uint8) -> (action names, q [N, A])
    parametric  module((state values, presence), (action values, presence)) -> (["Q"], q [N, 1]), one row per pair

With BCQ the file lowers q by 1e10 for choices that are too rare in the log, as in ReAgent 2019, so that the largest q
is the policy's choice. Whether q of a choice is lowered depends on all choices of the state.

The scorer is traced, so it may be any Python code. The preprocessor and the parts of the contract that are not tensors
(tuples, names, the refusal of infinity, lists of candidates) are scripted.
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
"""Subtracted from q of an excluded choice; float32 keeps no digit of q itself."""


def write_torchscript(predictor: Predictor, path: Path) -> None:
    """Writes the module with the interface of ReAgent 2019."""
    archive = io.BytesIO()
    with _without_deprecation():
        kind = ParametricModule if predictor.parametric else DiscreteModule if predictor.image is None else ImageModule
        module = kind(predictor)
        torch.jit.save(torch.jit.script(module.eval()), archive)
    # the .debug_pkl records contain source lines and paths of the writing machine; they are not needed
    with zipfile.ZipFile(archive) as whole, zipfile.ZipFile(path, "w") as kept:
        for record in whole.infolist():
            if not record.filename.endswith(".debug_pkl"):
                kept.writestr(zipfile.ZipInfo(record.filename), whole.read(record))


def replay_torchscript(predictor: Predictor, path: Path) -> Replay:
    """Reads the file with torch.jit.load; compares all actions, or all allowed pairs of state and candidate."""
    with _without_deprecation():
        module = torch.jit.load(path)  # type: ignore[no-untyped-call]

    def discrete(inputs: Inputs) -> Pair:
        *state, mask = inputs
        names, q = module(tuple(state)) if predictor.image is None else module(*state)
        if tuple(names) != predictor.action_names:
            raise BundleError(Problem(path.name, f"action names {predictor.action_names}", f"{names}"))
        live, _, _, choices = predictor(*state, torch.ones_like(mask))
        return _comparable(path.name, live, choices, q)

    def parametric(inputs: Inputs) -> Pair:
        values, presence, candidates, candidate_presence, mask = inputs
        q = torch.zeros(mask.shape)
        for part in _separate_calls(predictor, values, presence):
            row, slot = mask[part].nonzero(as_tuple=True)
            row = part[row]
            pairs = (candidates[row, slot], candidate_presence[row, slot])
            q[row, slot] = module((values[row], presence[row]), pairs)[1].squeeze(1)
        live, _, _, choices = predictor(*inputs)
        return _comparable(path.name, live[mask], choices[mask], q[mask])

    return parametric if predictor.parametric else discrete


class _CallContract(nn.Module):
    """Base of both modules: the state's preprocessor and the ids of columns."""

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
        """Returns the ids of a candidate's columns; none with named actions."""
        return self.action_ids


class DiscreteModule(_CallContract):
    """Calls of ReAgent 2019 for named actions."""

    action_names: list[str]
    action_ids: list[int]  # declared again: an empty list has no type, and scripting does not look at the base class

    def __init__(self, predictor: Predictor) -> None:
        super().__init__(predictor)
        self.action_names = list(predictor.action_names)
        state = _normalize_example(self.state_preprocessor, len(self.state_ids))
        self.scorer = _trace(predictor, state, torch.ones(len(state), len(self.action_names), dtype=torch.bool))

    def forward(self, state_with_presence: tuple[Tensor, Tensor]) -> tuple[list[str], Tensor]:
        """Returns the action names and q [N, A] with all actions allowed."""
        values, presence = state_with_presence
        state = self.state_preprocessor(values, _present(values, presence))
        mask = torch.ones((values.shape[0], len(self.action_names)), dtype=torch.bool, device=values.device)
        return self.action_names, self.scorer(state, mask)


class ImageModule(nn.Module):
    """Values of named actions from an image."""

    action_names: list[str]

    def __init__(self, predictor: Predictor) -> None:
        super().__init__()
        assert predictor.image is not None
        self.action_names = list(predictor.action_names)
        state = torch.zeros(_EXAMPLE_ROWS, predictor.image.size, dtype=torch.uint8)
        self.scorer = _trace(predictor, state, torch.ones(len(state), len(self.action_names), dtype=torch.bool))

    def forward(self, image: Tensor) -> tuple[list[str], Tensor]:
        """Returns the action names and q [N, A] with all actions allowed, for image [N, *shape] uint8."""
        mask = torch.ones((image.shape[0], len(self.action_names)), dtype=torch.bool, device=image.device)
        return self.action_names, self.scorer(image.flatten(1), mask)


class ParametricModule(_CallContract):
    """Calls of ReAgent 2019 for candidates.

    If q depends on the other candidates of a state, the rows with equal preprocessed states are scored as one list.
    """

    lists: Final[bool]

    def __init__(self, predictor: Predictor) -> None:
        super().__init__(predictor)
        self.lists = _needs_candidate_list(predictor)
        self.action_preprocessor = predictor.get_submodule("action_preprocessor")
        state = _normalize_example(self.state_preprocessor, len(self.state_ids))
        action = _normalize_example(self.action_preprocessor, len(self.action_ids))
        features = torch.stack((action, action), 1)
        self.scorer = _trace(predictor, state, torch.ones(features.shape[:2], dtype=torch.bool), features)

    def forward(
        self, state_with_presence: tuple[Tensor, Tensor], action_with_presence: tuple[Tensor, Tensor]
    ) -> tuple[list[str], Tensor]:
        """Returns ["Q"] and q [N, 1] of N pairs."""
        state_values, state_presence = state_with_presence
        action_values, action_presence = action_with_presence
        state = self.state_preprocessor(state_values, _present(state_values, state_presence))
        action = self.action_preprocessor(action_values, _present(action_values, action_presence))
        if self.lists and state.shape[0] > 0:
            states, features, mask, group, slot = group_candidates(state, action)
            q = self.scorer(states, mask, features)[group, slot].unsqueeze(1)
        else:
            alone = torch.ones((state.shape[0], 1), dtype=torch.bool, device=state.device)
            q = self.scorer(state, alone, action.unsqueeze(1))
        return ["Q"], q


def group_candidates(state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gathers pairs with equal states into one list of candidates per state; memory is G * K * W.

    Args:
        state: [N, S], N at least 1.
        action: [N, W].

    Returns:
        states [G, S], features [G, K, W], mask [G, K]; and for each pair its state [N] and its index in the list [N].
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
    """A scorer that lowers q of choices that the restriction excludes."""

    def __init__(self, predictor: Predictor) -> None:
        super().__init__()
        self.scorer = predictor.scorer
        self.restriction = predictor.restriction

    def forward(self, state: Tensor, mask: Tensor, features: Tensor | None = None) -> Tensor:
        q: Tensor = self.scorer(state, mask, features)
        return torch.where(self.restriction(state, mask, features), q, q - _EXCLUDED)


def _trace(predictor: Predictor, *example: Tensor) -> nn.Module:
    # check_trace compares the example only; the check of the written file compares many rows
    traced: nn.Module = torch.jit.trace(_RestrictedScorer(predictor), example, check_trace=False)  # type: ignore[no-untyped-call]
    return traced


def _normalize_example(preprocessor: nn.Module, num_features: int) -> Tensor:
    """Returns [3, W], an output of the preprocessor as an example for tracing the scorer."""
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


def _separate_calls(predictor: Predictor, values: Tensor, presence: Tensor) -> Iterator[Tensor]:
    """Yields the row indices of separate calls: in a single call, rows with equal states would share a list."""
    if not _needs_candidate_list(predictor):
        yield torch.arange(values.shape[0])
        return
    state = predictor.state_preprocessor(values, presence)
    slot = group_candidates(state, state)[4]
    for number in range(int(slot.max()) + 1):
        yield (slot == number).nonzero().squeeze(1)


def _comparable(file: str, live: Tensor, choices: Tensor, restored: Tensor) -> Pair:
    """Returns q of the live predictor and q of the file, both 0 if one of them excludes the choice."""
    restored_choices = ~(restored < live - _EXCLUDED / 2)  # NaN stays, so that the comparison of q reports it
    compare_choices(file, choices.numpy(), restored_choices.numpy())
    both = restored_choices & choices
    return live.where(both, 0.0).numpy(), restored.where(both, 0.0).numpy()


@contextmanager
def _without_deprecation() -> Iterator[None]:
    """Silences torch's deprecation of TorchScript, which is kept for users of ReAgent 2019; ONNX is the primary format.

    Warnings of the tracer are silenced as well: it warns about torch's own layers, and formats.py refuses a network
    that branches on values.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)  # type: ignore[attr-defined]
        warnings.filterwarnings("ignore", r"`torch\.jit\.")  # a FutureWarning from torch 2.14 on
        yield
