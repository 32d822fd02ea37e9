"""Modules as ONNX graphs: torch's exporter writes a trace of them, and trees become one node of ONNX's own kind.

torch deprecates this exporter (`dynamo=False`); its successor needs a further package and takes 7 to 25 s for a file.
writer.py compares the written file with the module.
"""

import copy
import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import onnx
import onnx.shape_inference
import torch
from onnx import helper, numpy_helper
from torch import Tensor, nn

from reagent_lite.errors import BundleError, Problem
from reagent_lite.export.predictor import Axes
from reagent_lite.models.embeddings import GatheredVectors, Pooled
from reagent_lite.models.forest import Forest

OPSET: Final = 18
_TREES: Final = "ai.onnx.ml"
_TREES_OPSET: Final = 3


def write_onnx(
    module: nn.Module, example: Sequence[Tensor], path: Path, *, inputs: Mapping[str, Axes], outputs: Mapping[str, Axes]
) -> None:
    """Writes a module as an ONNX file.

    Args:
        module: in evaluation mode, on the CPU; its forward pass does not branch on values of tensors.
        example: an input for each argument of `forward`.
        path: where to write.
        inputs: {argument of `forward`: its axes}; an axis is a size, or a name if the size varies.
        outputs: {name: axes} of the results of `forward`, in their order.

    Raises:
        BundleError: code outside of torch and this package branches on values of tensors.
    """
    with_nodes = _with_onnx_operations(module)
    axes = {
        name: {dimension: axis for dimension, axis in enumerate(all_axes) if isinstance(axis, str)}
        for name, all_axes in {**inputs, **outputs}.items()
    }
    with _strictly_traced():
        torch.onnx.export(
            with_nodes,
            tuple(example),
            str(path),
            input_names=list(inputs),
            output_names=list(outputs),
            dynamic_axes=axes,
            opset_version=OPSET,
            custom_opsets={_TREES: _TREES_OPSET} if _has(module, Forest) else {},
            dynamo=False,
        )
    model = onnx.shape_inference.infer_shapes(onnx.load(path))
    _count_axes_from_the_first(model.graph)
    onnx.checker.check_model(model)
    path.write_bytes(model.SerializeToString())


def _count_axes_from_the_first(graph: onnx.GraphProto) -> None:
    """Replaces negative axes of reductions of known rank, which onnxruntime ignores if there are no rows."""
    types = {value.name: value.type.tensor_type for value in (*graph.value_info, *graph.input)}
    ranks = {name: len(kind.shape.dim) for name, kind in types.items() if kind.HasField("shape")}
    constants = {node.output[0]: node for node in graph.node if node.op_type == "Constant"}
    for index, node in enumerate(list(graph.node)):
        rank = ranks.get(node.input[0]) if node.input else None
        if rank is None:
            continue
        if node.op_type in ("ArgMax", "ArgMin"):
            [axis] = [attribute for attribute in node.attribute if attribute.name == "axis"]
            axis.i %= rank
        elif node.op_type.startswith("Reduce") and len(node.input) > 1 and node.input[1] in constants:
            axes = numpy_helper.to_array(constants[node.input[1]].attribute[0].t) % rank
            node.input[1] = f"axes_{index}"
            value = numpy_helper.from_array(axes)
            constants[node.input[1]] = helper.make_node("Constant", [], [node.input[1]], value=value)
    used = {name for node in graph.node for name in node.input}
    others = [node for node in graph.node if node.op_type != "Constant"]
    del graph.node[:]
    graph.node.extend([node for name, node in constants.items() if name in used] + others)


@contextmanager
def _strictly_traced() -> Iterator[None]:
    """Refuses branches on values of tensors outside torch and this package: a trace keeps only one side of them."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # attention as operations that ONNX has
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    trusted = tuple(f"{folder}{os.sep}" for folder in (Path(str(torch.__file__)).parent, Path(__file__).parents[1]))
    for warning in caught:
        if warning.category.__name__ == "TracerWarning" and not warning.filename.startswith(trusted):
            where = f"{Path(warning.filename).name}:{warning.lineno}"
            expected = "no branches on values of tensors"
            raise BundleError(Problem(where, expected, str(warning.message).partition(". ")[0]))


def _has(module: nn.Module, kind: type[nn.Module]) -> bool:
    return any(isinstance(part, kind) for part in module.modules())


def _with_onnx_operations(module: nn.Module) -> nn.Module:
    """Returns a copy with forests as one node each and vectors as operations of ONNX, or the module if it has none."""
    if not _has(module, Forest) and not _has(module, Pooled):
        return module
    copied = copy.deepcopy(module)
    for parent in list(copied.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Forest):
                node = _TreeNode(child.feature, child.threshold, child.value, outputs=child.outputs)
                setattr(parent, name, node)
            elif isinstance(child, Pooled):
                setattr(parent, name, GatheredVectors(child.embedding))
    return copied


class _TreeNode(Forest):
    """A forest that the exporter writes as TreeEnsembleRegressor, five times as fast as the calls of its trace."""

    def forward(self, x: Tensor) -> Tensor:
        values: Tensor = _TreeCall.apply(x, self)  # type: ignore[no-untyped-call]
        return values


class _TreeCall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forest: Forest) -> Tensor:
        return x.new_zeros(x.shape[0], forest.outputs)

    @staticmethod
    def symbolic(g: Any, x: Any, forest: Forest) -> Any:
        """Returns the node of the graph `g` that stands for a call."""
        return g.op(f"{_TREES}::TreeEnsembleRegressor", x, n_targets_i=forest.outputs, **_tree_attributes(forest))


def _tree_attributes(forest: Forest) -> dict[str, list[int | float | str]]:
    """Returns the attributes of the node of a forest; tests that always hold are left out."""
    tests = forest.feature.shape[1]
    trees_of_output = len(forest.value) // forest.outputs
    nodes: list[tuple[int | float | str, ...]] = []
    leaves: list[tuple[int | float, ...]] = []
    for tree in range(len(forest.value)):
        feature, threshold, value = (table[tree].tolist() for table in (forest.feature, forest.threshold, forest.value))

        def held(node: int, threshold: list[float] = threshold) -> int:
            """Returns the first node on the way down from a node whose test may fail, or a leaf."""
            while node < tests and threshold[node] == math.inf:
                node = 2 * node + 1
            return node

        # ids of nodes have to be sequential, so they are numbered as they are met
        waiting = [held(0)]
        for number, node in enumerate(waiting):
            if node >= tests:
                nodes.append((tree, number, 0, 0.0, "LEAF", 0, 0))
                leaves.append((tree, number, tree // trees_of_output, value[node - tests]))
                continue
            nodes.append((tree, number, feature[node], threshold[node], "BRANCH_LEQ", len(waiting), len(waiting) + 1))
            waiting += (held(2 * node + 1), held(2 * node + 2))
    node_names = ("treeids_i", "nodeids_i", "featureids_i", "values_f", "modes_s", "truenodeids_i", "falsenodeids_i")
    leaf_names = ("treeids_i", "nodeids_i", "ids_i", "weights_f")
    named_nodes = zip(node_names, zip(*nodes, strict=True), strict=True)
    named_leaves = zip(leaf_names, zip(*leaves, strict=True), strict=True)
    return {f"nodes_{name}": list(column) for name, column in named_nodes} | {
        f"target_{name}": list(column) for name, column in named_leaves
    }
