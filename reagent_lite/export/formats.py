"""Export formats: one entry each, with how it is written and how it is read back for the check.

    predictor ─► write ─► file ─► replay ─► (q of the live predictor, q of the file) ─► check.py

TorchScript takes 0.1 s, PT2 1.0 to 1.7 s, ONNX and safetensors less.
"""

import copy
import io
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save
from torch import Tensor

from reagent_lite.errors import BundleError, Problem
from reagent_lite.export.onnx_graph import Axes, onnx_model
from reagent_lite.export.predictor import DiscretePredictor, ParametricPredictor, Predictor
from reagent_lite.export.tolerance import compare_choices
from reagent_lite.export.torchscript import EXCLUDED, DiscreteModule, ParametricModule, needs_candidate_list
from reagent_lite.rl.policies import TargetPolicy

Inputs = tuple[Tensor, ...]
Pair = tuple[NDArray[np.float32], NDArray[np.float32]]
Replay = Callable[[Inputs], Pair]

_NOISE: Final = {
    # torch's own use of a pytree function that torch deprecates
    r"`isinstance\(treespec, LeafSpec\)` is deprecated": FutureWarning,
    # TorchScript is kept for users of 2019; ONNX is the primary format
    r"`torch\.jit\.": DeprecationWarning,
}


@dataclass(frozen=True, slots=True)
class ExportFormat:
    """A file format of the exported model.

    Attributes:
        file: name in the bundle.
        write: writes the predictor to a path.
        replay: reads the file; returns a function from graph inputs to (q of the live predictor, q of the file), two
            arrays of one shape. It raises BundleError where the file contradicts itself.
    """

    file: str
    write: Callable[[Predictor, Path], None]
    replay: Callable[[Predictor, Path], Replay]


def example_inputs(predictor: Predictor) -> Inputs:
    """Returns inputs of 3 rows (and 2 candidates) with all features absent, to export with."""
    state = _absent(3, len(predictor.state_feature_ids))
    if not predictor.parametric:
        return (*state, torch.ones(3, len(predictor.action_names), dtype=torch.bool))
    return (*state, *_absent(3, 2, len(predictor.action_feature_ids)), torch.ones(3, 2, dtype=torch.bool))


def write_onnx(predictor: Predictor, path: Path) -> None:
    """Writes the whole predictor as one ONNX file with dynamic batch (and candidate) axes."""
    rows = "rows"
    states = (rows, len(predictor.state_feature_ids))
    if predictor.parametric:
        choices: Axes = (rows, "candidates")
        axes: list[Axes] = [states, states, *[(*choices, len(predictor.action_feature_ids))] * 2, choices]
    else:
        choices = (rows, len(predictor.action_names))
        axes = [states, states, choices]
    model = onnx_model(
        predictor,
        example_inputs(predictor),
        inputs=dict(zip(predictor.input_names, axes, strict=True)),
        outputs=dict(zip(predictor.output_names, (choices, (rows,), choices, choices), strict=True)),
    )
    path.write_bytes(model.SerializeToString())


def replay_onnx(predictor: Predictor, path: Path) -> Replay:
    """Reads the file with onnxruntime; its choice and propensities must follow from its own q."""
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])

    def replay(inputs: Inputs) -> Pair:
        feed = {name: tensor.numpy() for name, tensor in zip(predictor.input_names, inputs, strict=True)}
        q, greedy, propensities, choices = session.run(list(predictor.output_names), feed)
        _check_decision(path.name, q, greedy, propensities, choices, predictor.policy)
        live = predictor(*inputs)
        compare_choices(path.name, live[3].numpy(), choices)
        return live[0].numpy(), q

    return replay


def write_torchscript(predictor: Predictor, path: Path) -> None:
    """Writes the module with the call contract of 2019; see torchscript.py."""
    with _quiet():
        if isinstance(predictor, ParametricPredictor):
            module: torch.nn.Module = ParametricModule(predictor)
        else:
            assert isinstance(predictor, DiscretePredictor)
            module = DiscreteModule(predictor)
        archive = io.BytesIO()
        torch.jit.save(torch.jit.script(module.eval()), archive)
    # the .debug_pkl records hold source lines and paths of the writing machine; nothing needs them
    with zipfile.ZipFile(archive) as whole, zipfile.ZipFile(path, "w") as kept:
        for record in whole.infolist():
            if not record.filename.endswith(".debug_pkl"):
                kept.writestr(zipfile.ZipInfo(record.filename), whole.read(record))


def replay_torchscript(predictor: Predictor, path: Path) -> Replay:
    """Reads the file with torch.jit.load; discrete with all actions allowed, parametric the allowed pairs."""
    with _quiet():
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
            row, place = mask[part].nonzero(as_tuple=True)
            row = part[row]
            pairs = (candidates[row, place], candidate_presence[row, place])
            q[row, place] = module((values[row], presence[row]), pairs)[1].squeeze(1)
        live, _, _, choices = predictor(*inputs)
        return _kept(path.name, live[mask], choices[mask], q[mask])

    return parametric if predictor.parametric else discrete


def write_safetensors(predictor: Predictor, path: Path) -> None:
    """Writes parameters and buffers of scorer and restriction: `network.*`, `head.*` and with BCQ `imitator.*`."""
    weights = {name: tensor.clone().contiguous() for name, tensor in _weights(predictor).items()}
    path.write_bytes(save(weights))  # safetensors' own save_file makes a file that only its owner can read


def replay_safetensors(predictor: Predictor, path: Path) -> Replay:
    """Puts the file's weights in the place of a copy's own, all of them."""
    restored = copy.deepcopy(predictor)
    saved, own = load_file(path), _weights(restored)
    if saved.keys() != own.keys():
        raise BundleError(Problem(path.name, f"tensors {sorted(own)}", f"{sorted(saved)}"))
    for name, tensor in own.items():
        tensor.copy_(saved[name])

    def replay(inputs: Inputs) -> Pair:
        q, _, _, choices = predictor(*inputs)
        back, _, _, left = restored(*inputs)
        compare_choices(path.name, choices.numpy(), left.numpy())
        return q.numpy(), back.numpy()

    return replay


def write_pt2(predictor: Predictor, path: Path) -> None:
    """Writes a torch.export archive. On request only: torch.export.load may execute pickles, so trust the sender."""
    with _quiet():
        program = torch.export.export(
            predictor, example_inputs(predictor), dynamic_shapes=_dynamic_shapes(predictor), strict=False
        )
        for module in program.graph_module.modules():
            for node in getattr(module, "graph", program.graph).nodes:
                node.meta.pop("stack_trace", None)  # paths of the writing machine
        torch.export.save(program, path)


def replay_pt2(predictor: Predictor, path: Path) -> Replay:
    """Reads the file with torch.export.load."""
    with _quiet():
        module = torch.export.load(path).module()

    def replay(inputs: Inputs) -> Pair:
        q, greedy, propensities, choices = (tensor.numpy() for tensor in module(*inputs))
        _check_decision(path.name, q, greedy, propensities, choices, predictor.policy)
        live = predictor(*inputs)
        compare_choices(path.name, live[3].numpy(), choices)
        return live[0].numpy(), q

    return replay


def _weights(predictor: Predictor) -> dict[str, Tensor]:
    return {**predictor.scorer.state_dict(), **predictor.restriction.state_dict()}


def _kept(file: str, live: Tensor, choices: Tensor, served: Tensor) -> Pair:
    """Returns q of the live predictor and q of the file, both 0 where one of them excludes the choice.

    The file's is lowered by EXCLUDED there.
    """
    left = ~(served < live - EXCLUDED / 2)  # NaN is left, and found
    compare_choices(file, choices.numpy(), left.numpy())
    both = left & choices
    return live.where(both, 0.0).numpy(), served.where(both, 0.0).numpy()


def _absent(*shape: int) -> Inputs:
    return torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)


def _dynamic_shapes(predictor: Predictor) -> tuple[dict[int, Any], ...]:
    rows = torch.export.Dim("rows")
    if not predictor.parametric:
        return ({0: rows},) * 3
    candidates = torch.export.Dim("candidates")
    return ({0: rows},) * 2 + ({0: rows, 1: candidates},) * 3


def _rounds(predictor: Predictor, values: Tensor, presence: Tensor) -> Iterator[Tensor]:
    """Yields row indices such that no two rows of a call have equal states: equal states would share one list."""
    if not needs_candidate_list(predictor):
        yield torch.arange(values.shape[0])
        return
    state = predictor.state_preprocessor(values, presence)
    group = torch.unique(state, dim=0, return_inverse=True)[1]
    order = group.argsort(stable=True)
    first = torch.searchsorted(group[order], group[order])
    occurrence = torch.empty_like(group)
    occurrence[order] = torch.arange(group.shape[0]) - first
    for number in range(int(occurrence.max()) + 1):
        yield (occurrence == number).nonzero().squeeze(1)


def _check_decision(
    file: str,
    q: NDArray[np.float32],
    greedy: NDArray[np.int64],
    propensities: NDArray[np.float32],
    mask: NDArray[np.bool_],
    policy: TargetPolicy,
) -> None:
    """Raises BundleError unless choice and propensities follow from q, both computed again in float64."""
    allowed = np.where(mask, q.astype(np.float64), -np.inf)
    some = mask.any(1)
    choice = np.where(some, allowed.argmax(1), -1)
    wrong = np.flatnonzero(choice != greedy)
    if wrong.size:
        row = wrong[0]
        raise BundleError(Problem(f"{file}, greedy of row {row}", str(choice[row]), str(greedy[row])))
    expected = policy.propensities(torch.from_numpy(q).double(), torch.from_numpy(mask)).numpy()
    # float32 against float64: 2e-7 over temperatures from 1e-4 to 100 and q from 1e-3 to 1e6
    difference = float(np.abs(expected - propensities).max(initial=0))
    if not difference <= 1e-5:
        raise BundleError(Problem(f"{file}, propensities", f"those of {policy}", f"{difference:.3g} away"))


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences what torch says about its own exporters, and nothing else."""
    with warnings.catch_warnings():
        for message, category in _NOISE.items():
            warnings.filterwarnings("ignore", message, category)
        yield


FORMATS: dict[str, ExportFormat] = {
    "onnx": ExportFormat("model.onnx", write_onnx, replay_onnx),
    "torchscript": ExportFormat("model.torchscript", write_torchscript, replay_torchscript),
    "safetensors": ExportFormat("weights.safetensors", write_safetensors, replay_safetensors),
    "pt2": ExportFormat("model.pt2", write_pt2, replay_pt2),
}
