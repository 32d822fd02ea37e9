"""A predictor with a network of this package as an ONNX graph: one or a few nodes for every torch call.

    module ─► torch.fx: all its calls ─► run on an example, for types ─► _CALLS ─► onnx.helper

torch's own exporter writes users' networks, with any calls, and takes longer (formats.py). A missing call is added to
_CALLS. writer.py compares the written file with the module.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn
from torch.fx import Interpreter, Node, Tracer

from reagent_lite.export.predictor import Axes
from reagent_lite.models.forest import Forest

OPSET: Final = 18
_IR_VERSION: Final = 10
_TREES: Final = "ai.onnx.ml"
_TREES_OPSET: Final = 3
_END: Final = torch.iinfo(torch.int64).max
_TYPES: Final = {
    torch.float32: TensorProto.FLOAT,
    torch.float64: TensorProto.DOUBLE,
    torch.int32: TensorProto.INT32,
    torch.int64: TensorProto.INT64,
    torch.bool: TensorProto.BOOL,
}


def onnx_model(
    module: nn.Module, example: Sequence[Tensor], *, inputs: Mapping[str, Axes], outputs: Mapping[str, Axes]
) -> onnx.ModelProto:
    """Returns the ONNX model of a module, checked by onnx.

    Args:
        module: in evaluation mode, on the CPU; its forward pass does not branch on values of tensors.
        example: an input for each argument of `forward`.
        inputs: {argument of `forward`: its axes}; an axis is a size, or a name if the size varies.
        outputs: {name: axes} of the results of `forward`, in their order.

    Raises:
        NotImplementedError: _CALLS lacks a call, or does not support its arguments.
    """
    writer = _Writer(module)
    results = writer.run(*example)
    for node, name in zip(writer.returned, outputs, strict=True):
        writer.nodes.append(helper.make_node("Identity", [writer.name_of(node)], [name]))
    types = [_TYPES[value.dtype] for value in (*example, *results)]
    described = list(
        map(helper.make_tensor_value_info, [*inputs, *outputs], types, [*inputs.values(), *outputs.values()])
    )
    graph = helper.make_graph(
        writer.nodes, "model", described[: len(inputs)], described[len(inputs) :], list(writer.constants.values())
    )
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(_TREES, _TREES_OPSET)]
    used = {node.domain for node in writer.nodes}
    opsets = [opset for opset in opsets if opset.domain in {"", *used}]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=_IR_VERSION)
    onnx.checker.check_model(model)
    return model


class _FunctionTracer(Tracer):
    """Traces into torch's own modules too, so that only calls of functions and trees are left."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, Forest)


class _Writer(Interpreter):
    """Runs the calls of a module and writes each as ONNX nodes.

    Attributes:
        nodes, constants: nodes and constants of the graph so far.
        value: result of the current call.
        returned: results of the module.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, garbage_collect_values=False, graph=_FunctionTracer().trace(module))
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, onnx.TensorProto] = {}
        self.value: Any = None
        self.returned: Sequence[Node] = ()
        self._names: dict[Node, str] = {}

    def run_node(self, n: Node) -> Any:
        self.value = super().run_node(n)
        if n.op == "output":
            self.returned = n.args[0]  # type: ignore[assignment]
        elif n.op == "placeholder":
            self._names[n] = n.name
        elif n.op == "get_attr":
            self._names[n] = self.constant(self.value, name=str(n.target))
        elif isinstance(self.value, Tensor | torch.Size | int):
            arguments = n.args
            call = n.target if isinstance(n.target, str) else n.target.__name__
            if n.op == "call_module":
                module = self.fetch_attr(call)
                call = type(module).__name__
                arguments = (module, *arguments)
            advice = f"has no ONNX form here: one may be added to _CALLS of {__name__}"
            if call not in _CALLS:
                raise NotImplementedError(f"torch's {call} {advice}")
            try:
                self._names[n] = _CALLS[call](self, *arguments, **n.kwargs)
            except (AttributeError, IndexError, KeyError, TypeError) as error:
                given = ", ".join([*map(str, n.args), *(f"{name}={value}" for name, value in n.kwargs.items())])
                raise NotImplementedError(f"torch's {call} of ({given}) {advice}") from error
        return self.value

    def name_of(self, node: Node) -> str:
        """Returns the name of an argument that is a tensor."""
        return self._names[node]

    def value_of(self, argument: Any) -> Any:
        """Returns the value of an argument on the example."""
        return self.env[argument] if isinstance(argument, Node) else argument

    def add(self, operator: str, *inputs: str, **attributes: Any) -> str:
        """Adds an ONNX node of one output and returns the output's name."""
        name = f"{operator}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, inputs, [name], **attributes))
        return name

    def constant(self, value: Any, dtype: torch.dtype | None = None, name: str = "") -> str:
        """Adds a constant tensor and returns its name."""
        name = name or f"constant_{len(self.constants)}"
        array = torch.as_tensor(value, dtype=dtype).detach().numpy()
        self.constants[name] = numpy_helper.from_array(array, name)
        return name

    def ints(self, *values: int) -> str:
        """Adds a constant list of axes or indices and returns its name."""
        return self.constant(values, torch.int64)

    def operand(self, argument: Any, dtype: torch.dtype | None = None) -> str:
        """Returns the name of a tensor or number, cast to a type; by default that of the call's result."""
        dtype = dtype or self.value.dtype
        if not isinstance(argument, Node):
            return self.constant(argument, dtype)
        name = self._names[argument]
        return name if self.env[argument].dtype == dtype else self.add("Cast", name, to=_TYPES[dtype])

    def sizes(self, sizes: Sequence[Any]) -> str:
        """Returns the name of a list of sizes: numbers, sizes of tensors, or the shape of a tensor."""
        if isinstance(sizes[0], Node) and isinstance(self.env[sizes[0]], torch.Size):
            return self._names[sizes[0]]
        names = (self._names[size] if isinstance(size, Node) else self.ints(size) for size in sizes)
        return self.add("Concat", *names, axis=0)


_Call = Callable[..., str]
"""Writes a torch call with its arguments as ONNX nodes and returns the name of the result."""


def _elementwise(operator: str) -> _Call:
    """Writes an operator on tensors and numbers, each cast to the type of the result."""
    return lambda w, *x: w.add(operator, *map(w.operand, x))


def _unary(operator: str) -> _Call:
    """Writes an operator on one tensor, without a cast; torch's further arguments have ONNX's default values."""
    return lambda w, x, *_, **__: w.add(operator, w.name_of(x))


def _write_comparison(operator: str) -> _Call:
    """Writes a comparison of tensors and numbers, each cast to their common type."""

    def write(w: _Writer, *x: Any) -> str:
        dtype = torch.result_type(*map(w.value_of, x))
        return w.add(operator, *(w.operand(operand, dtype) for operand in x))

    return write


def _write_reduction(operator: str) -> _Call:
    """Writes a reduction; its axes count from the first, as onnxruntime confuses negative axes if there are no rows."""

    def write(w: _Writer, x: Node, dim: int | Sequence[int], keepdim: bool = False) -> str:
        axes = [axis % w.value_of(x).dim() for axis in (dim if isinstance(dim, Sequence) else (dim,))]
        return w.add(operator, w.operand(x), w.ints(*axes), keepdims=int(keepdim))

    return write


def _any(w: _Writer, x: Node, dim: int) -> str:
    largest = w.add("ReduceMax", w.operand(x, torch.int32), w.ints(dim % w.value_of(x).dim()), keepdims=0)
    return w.add("Cast", largest, to=TensorProto.BOOL)


def _argmax(w: _Writer, x: Node, dim: int, keepdim: bool = False) -> str:
    return w.add("ArgMax", w.name_of(x), axis=dim % w.value_of(x).dim(), keepdims=int(keepdim))


def _write_reshape(w: _Writer, x: Node, *sizes: Any) -> str:
    return w.add("Reshape", w.name_of(x), w.sizes(sizes[0] if isinstance(sizes[0], Sequence) else sizes))


def _write_flatten(w: _Writer, x: Node, start_dim: int = 0, end_dim: int = -1) -> str:
    """Flattens to two axes, as ONNX does."""
    axes = w.value_of(x).dim()
    if w.value.dim() != 2:
        raise TypeError
    return w.add("Flatten", w.name_of(x), axis=start_dim if end_dim % axes == axes - 1 else end_dim + 1)


def _shape(w: _Writer, x: Node, attribute: str) -> str:
    if attribute != "shape":
        raise TypeError
    return w.add("Shape", w.name_of(x))


def _clamp(w: _Writer, x: Node, min: float | None = None, max: float | None = None) -> str:
    return w.add("Clip", w.operand(x), *("" if bound is None else w.operand(bound) for bound in (min, max)))


def _item(w: _Writer, x: Node, index: Any) -> str:
    """Slices axes, and drops axes with an integer index; of a shape, returns a list with one size."""
    whole = w.value_of(x)
    name = w.name_of(x)
    dropped = []
    if isinstance(whole, torch.Size):
        return w.add("Slice", name, w.ints(index), w.ints(index + 1 or _END))
    index = index if isinstance(index, tuple) else (index,)
    ellipsis = index.index(...) if ... in index else len(index)
    index = (*index[:ellipsis], *[slice(None)] * (whole.dim() - len(index) + 1), *index[ellipsis + 1 :])
    for axis, part in enumerate(index[: whole.dim()]):
        if isinstance(part, int):
            dropped.append(axis)
            part = slice(part, part + 1 or None)
        if part != slice(None):
            stop = _END if part.stop is None else part.stop
            name = w.add("Slice", name, *map(w.ints, (part.start or 0, stop, axis, part.step or 1)))
    return w.add("Squeeze", name, w.ints(*dropped)) if dropped else name


def _linear(w: _Writer, x: Node, weight: Node, bias: Node | None = None) -> str:
    product = w.add("MatMul", w.name_of(x), w.add("Transpose", w.name_of(weight)))
    return product if bias is None else w.add("Add", product, w.name_of(bias))


def _batch_norm(w: _Writer, x: Node, mean: Node, var: Node, *, weight: Node, bias: Node, eps: float, **_: Any) -> str:
    return w.add("BatchNormalization", *map(w.name_of, (x, weight, bias, mean, var)), epsilon=eps)


def _gelu(w: _Writer, x: Node, **_: Any) -> str:
    twice = w.add("Add", w.add("Erf", w.add("Mul", w.name_of(x), w.constant(0.5**0.5))), w.constant(1.0))
    return w.add("Mul", w.add("Mul", w.name_of(x), twice), w.constant(0.5))


def _forest(w: _Writer, forest: Forest, x: Node) -> str:
    """Writes trees as one node of ONNX's operators for machine learning; tests that always hold are left out."""
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
    names = ("treeids", "nodeids", "featureids", "values", "modes", "truenodeids", "falsenodeids")
    attributes = {f"nodes_{name}": column for name, column in zip(names, zip(*nodes, strict=True), strict=True)}
    targets = zip(("treeids", "nodeids", "ids", "weights"), zip(*leaves, strict=True), strict=True)
    attributes |= {f"target_{name}": column for name, column in targets}
    return w.add("TreeEnsembleRegressor", w.name_of(x), domain=_TREES, n_targets=forest.outputs, **attributes)


_CALLS: Final[dict[str, _Call]] = {
    "Forest": _forest,
    "add": _elementwise("Add"),
    "and_": _elementwise("And"),
    "cat": lambda w, tensors, dim=0: w.add("Concat", *map(w.operand, tensors), axis=dim),
    "clamp": _clamp,
    "eq": _write_comparison("Equal"),
    "exp": _elementwise("Exp"),
    "ge": _write_comparison("GreaterOrEqual"),
    "invert": _elementwise("Not"),
    "isinf": _unary("IsInf"),
    "isnan": _unary("IsNaN"),
    "log": _elementwise("Log"),
    "masked_fill": lambda w, x, mask, value: w.add("Where", w.name_of(mask), w.operand(value), w.operand(x)),
    "maximum": _elementwise("Max"),
    "minimum": _elementwise("Min"),
    "mul": _elementwise("Mul"),
    "ne": lambda w, *x: w.add("Not", _write_comparison("Equal")(w, *x)),
    "or_": _elementwise("Or"),
    "sub": _elementwise("Sub"),
    "truediv": _elementwise("Div"),
    "where": lambda w, mask, x, y: w.add("Where", w.name_of(mask), w.operand(x), w.operand(y)),
    # types and shapes
    "arange": lambda w, end, **_: w.add("Range", w.constant(0), w.add("Squeeze", w.name_of(end)), w.constant(1)),
    "double": lambda w, x: w.operand(x),
    "expand": lambda w, x, *sizes: w.add("Expand", w.name_of(x), w.sizes([1 if s == -1 else s for s in sizes])),
    "flatten": _write_flatten,
    "getattr": _shape,
    "getitem": _item,
    "index_select": lambda w, x, dim, index: w.add("Gather", w.name_of(x), w.name_of(index), axis=dim),
    "squeeze": lambda w, x, dim: w.add("Squeeze", w.name_of(x), w.ints(dim)),
    "to": lambda w, x, _: w.operand(x),
    "unsqueeze": lambda w, x, dim: w.add("Unsqueeze", w.name_of(x), w.ints(dim)),
    "view": _write_reshape,
    "view_as": lambda w, x, other: w.add("Reshape", w.name_of(x), w.add("Shape", w.name_of(other))),
    # over an axis
    "amax": _write_reduction("ReduceMax"),
    "any": _any,
    "argmax": _argmax,
    "mean": _write_reduction("ReduceMean"),
    "softmax": lambda w, x, dim, **_: w.add("Softmax", w.name_of(x), axis=dim),
    "sum": _write_reduction("ReduceSum"),
    # layers
    "batch_norm": _batch_norm,
    "dropout": lambda w, x, **_: w.name_of(x),
    "elu": lambda w, x, alpha=1.0, **_: w.add("Elu", w.name_of(x), alpha=alpha),
    "gelu": _gelu,
    "leaky_relu": lambda w, x, negative_slope, **_: w.add("LeakyRelu", w.name_of(x), alpha=negative_slope),
    "linear": _linear,
    "relu": _unary("Relu"),
    "selu": _unary("Selu"),
    "sigmoid": _unary("Sigmoid"),
    "silu": lambda w, x, **_: w.add("Mul", w.name_of(x), w.add("Sigmoid", w.name_of(x))),
    "tanh": _unary("Tanh"),
}
