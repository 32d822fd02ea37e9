"""Modules as onnxruntime runs them."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import onnxruntime
from torch import Tensor, nn

from reagent_lite.export.onnx_graph import write_onnx
from reagent_lite.export.predictor import Axes


def onnx_session(
    module: nn.Module, example: Sequence[Tensor], *, inputs: Mapping[str, Axes], outputs: Mapping[str, Axes]
) -> onnxruntime.InferenceSession:
    """Returns a session of the file that `write_onnx` writes; see there for the arguments."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        write_onnx(module, example, path, inputs=inputs, outputs=outputs)
        return onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
