"""Export formats: each entry writes a file, and reads it back for the check.

predictor ─► write ─► file ─► replay ─► (q of the live predictor, q of the file) ─► writer.py
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save
from torch import Tensor

from reagent_lite.errors import BundleError, Problem
from reagent_lite.export.onnx_graph import write_onnx
from reagent_lite.export.predictor import Inputs, Outputs, Pair, Predictor, Replay
from reagent_lite.export.tolerance import compare_choices
from reagent_lite.export.torchscript import replay_torchscript, write_torchscript
from reagent_lite.rl.policies import TargetPolicy

_KNOWN_PACKAGES: Final = ("reagent_lite", "torch")
"""Packages of all modules of a predictor, unless it has a user's network."""
_EXAMPLE: Final = {"rows": 3, "candidates": 2}


@dataclass(frozen=True, slots=True)
class ExportFormat:
    """A file format of the exported model.

    Attributes:
        file: name in the bundle.
        write: writes the predictor to a path.
        replay: reads the file. Both raise BundleError if the file contradicts itself or is incomplete.
    """

    file: str
    write: Callable[[Predictor, Path], None]
    replay: Callable[[Predictor, Path], Replay]


def has_own_network(predictor: Predictor) -> bool:
    """Whether modules of a user's own are in the predictor."""
    return any(type(module).__module__.partition(".")[0] not in _KNOWN_PACKAGES for module in predictor.modules())


def _write_onnx(predictor: Predictor, path: Path) -> None:
    """Writes the whole predictor as one ONNX file; the numbers of rows and candidates may vary."""
    write_onnx(predictor, _example(predictor), path, inputs=predictor.inputs, outputs=predictor.outputs)


def _replay_onnx(predictor: Predictor, path: Path) -> Replay:
    import onnxruntime  # not before it is needed, as it starts threads

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])

    def run(inputs: Inputs) -> Outputs:
        feed = {name: tensor.numpy() for name, tensor in zip(predictor.inputs, inputs, strict=True)}
        q, greedy, propensities, choices = map(torch.from_numpy, session.run(list(predictor.outputs), feed))
        return q, greedy, propensities, choices

    return _replay(predictor, path.name, run)


def _write_safetensors(predictor: Predictor, path: Path) -> None:
    """Writes the tensors of scorer and restriction: `network.*`, `head.*`, with BCQ `behavior_cloning.*`."""
    weights = {name: tensor.clone().contiguous() for name, tensor in _weights(predictor).items()}
    path.write_bytes(save(weights))  # safetensors.torch.save_file makes a file that only its owner can read


def _replay_safetensors(predictor: Predictor, path: Path) -> Replay:
    """Loads the file's weights into a copy of the predictor; none may be missing."""
    restored = copy.deepcopy(predictor)
    saved = load_file(path)
    restored_weights = _weights(restored)
    if saved.keys() != restored_weights.keys():
        raise BundleError(Problem(path.name, f"tensors {sorted(restored_weights)}", f"{sorted(saved)}"))
    for name, tensor in restored_weights.items():
        tensor.copy_(saved[name])
    return _replay(predictor, path.name, lambda inputs: restored(*inputs))


FORMATS: Final = {
    "onnx": ExportFormat("model.onnx", _write_onnx, _replay_onnx),
    "torchscript": ExportFormat("model.torchscript", write_torchscript, replay_torchscript),
    "safetensors": ExportFormat("weights.safetensors", _write_safetensors, _replay_safetensors),
}


def _example(predictor: Predictor) -> Inputs:
    """Returns inputs of 3 rows (and 2 candidates) in which every feature is missing."""
    shapes = {
        name: [_EXAMPLE[axis] if isinstance(axis, str) else axis for axis in axes]
        for name, axes in predictor.inputs.items()
    }
    kinds = {"image": torch.uint8, "presence": torch.bool, "mask": torch.bool}
    return tuple(
        torch.full(shape, name == "action_mask", dtype=kinds.get(name.rpartition("_")[2], torch.float32))
        for name, shape in shapes.items()
    )


def _weights(predictor: Predictor) -> dict[str, Tensor]:
    return {**predictor.scorer.state_dict(), **predictor.restriction.state_dict()}


def _replay(predictor: Predictor, file: str, run: Callable[[Inputs], Outputs]) -> Replay:
    """Returns the replay of a file that has all outputs of the predictor; its decisions must follow from its q."""

    def replay(inputs: Inputs) -> Pair:
        q, greedy, propensities, choices = (output.numpy() for output in run(inputs))
        live = predictor(*inputs)
        if np.isfinite(q).all() and live[0].isfinite().all():
            _check_decision(file, q, greedy, propensities, choices, predictor.policy)
            compare_choices(file, live[3].numpy(), choices)
        return live[0].numpy(), q

    return replay


def _check_decision(
    file: str,
    q: NDArray[np.float32],
    greedy: NDArray[np.int64],
    propensities: NDArray[np.float32],
    mask: NDArray[np.bool_],
    policy: TargetPolicy,
) -> None:
    """Raises BundleError if choice or propensities are not those that follow from q, computed in float64."""
    allowed = np.where(mask, q.astype(np.float64), -np.inf)
    choice = np.where(mask.any(1), allowed.argmax(1), -1)
    wrong = np.flatnonzero(choice != greedy)
    if wrong.size:
        row = wrong[0]
        raise BundleError(Problem(f"{file}, greedy of row {row}", str(choice[row]), str(greedy[row])))
    expected = policy.propensities(torch.from_numpy(q).double(), torch.from_numpy(mask)).numpy()
    # float32 against float64: 2e-7 over temperatures from 1e-4 to 100 and q from 1e-3 to 1e6
    difference = float(np.abs(expected - propensities).max(initial=0))
    if not difference <= 1e-5:
        raise BundleError(Problem(f"{file}, propensities", f"those of {policy}", f"{difference:.3g} away"))
