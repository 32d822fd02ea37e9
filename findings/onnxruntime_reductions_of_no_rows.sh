#!/usr/bin/env bash
# ONNX Runtime before 1.32 ignores negative axes of a reduction if the input has no rows, and says nothing
#
# Expected  ReduceSum over axis -1 of a tensor [0, 2, 4] gives [0, 2], as numpy, torch and onnx's own reference
#           evaluator do: ONNX allows negative axes, and "an empty batch" is an ordinary value of a dynamic axis.
# True      In 1.31.1 on the CPU nothing is reduced: the output is [0, 2, 4]. So it is for ReduceMean, ReduceMax,
#           ReduceProd, ReduceL2, ReduceLogSumExp, ArgMax and ArgMin. The same axis written as 2 gives [0, 2], and with
#           one row or more all is right. 1.32.0 gives [0, 2].
# Matters   torch's exporter writes x.sum(-1) with the axis -1. A network with such a sum serves every batch but the
#           empty one, whose output has a wrong shape, or which ends in a broadcasting error of a later node. Axes
#           counted from the first are read correctly by both, so a file for machines not yet updated has those.
# Versions  onnxruntime 1.31.1 and 1.32.0, onnx 1.23.2, numpy 2.4.6, Python 3.11, x86-64
# Date      2026-11-28
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
cat > "$folder/reductions.py" <<'P'
import sys

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

print("onnxruntime", onnxruntime.__version__, "onnx", onnx.__version__, "numpy", np.__version__)


def model(kind, axis):
    """Returns a checked model of one node that reduces an axis of [rows, 2, 4]."""
    if kind.startswith("Arg"):
        node, constants = helper.make_node(kind, ["x"], ["y"], axis=axis, keepdims=0), []
    else:
        node = helper.make_node(kind, ["x", "axes"], ["y"], keepdims=0)
        constants = [numpy_helper.from_array(np.array([axis], np.int64), "axes")]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", 2, 4])
    y = helper.make_tensor_value_info("y", TensorProto.INT64 if kind.startswith("Arg") else TensorProto.FLOAT, ["rows", "kept"])
    graph = helper.make_graph([node], "one", [x], [y], constants)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.checker.check_model(made, full_check=False)
    return made


def shape(kind, axis, rows):
    """Returns the shape that onnxruntime gives."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    content = model(kind, axis).SerializeToString()
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    return session.run(None, {"x": np.ones((rows, 2, 4), np.float32)})[0].shape


kinds = ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceProd", "ReduceL2", "ReduceLogSumExp", "ArgMax", "ArgMin")
for kind in kinds:
    shapes = {(axis, rows): shape(kind, axis, rows) for axis in (-1, 2, -2, 1) for rows in (0, 1, 3)}
    print(f"{kind}: [0, 2, 4] over -1 {shapes[-1, 0]}, over 2 {shapes[2, 0]}; [3, 2, 4] over -1 {shapes[-1, 3]}")
    for rows in (1, 3):
        assert shapes[-1, rows] == shapes[2, rows] == (rows, 2)
        assert shapes[-2, rows] == shapes[1, rows] == (rows, 4)
    assert shapes[2, 0] == (0, 2) and shapes[1, 0] == (0, 4), "axes counted from the first are right"
    right = shapes[-1, 0] == (0, 2), shapes[-2, 0] == (0, 4)
    assert right == ((True, True) if sys.argv[1] == "1.32.0" else (False, False)), right
reference = ReferenceEvaluator(model("ReduceSum", -1)).run(None, {"x": np.ones((0, 2, 4), np.float32)})[0].shape
print("onnx's reference evaluator: ReduceSum of [0, 2, 4] over -1", reference)
assert reference == (0, 2)
P
for version in 1.31.1 1.32.0; do
    "$folder/venv/bin/pip" install --quiet --disable-pip-version-check onnxruntime==$version onnx==1.23.2 numpy==2.4.6 2>/dev/null
    "$folder/venv/bin/python" "$folder/reductions.py" $version
done
echo "as described: 1.31.1 ignores negative axes without rows, 1.32.0 does not"
