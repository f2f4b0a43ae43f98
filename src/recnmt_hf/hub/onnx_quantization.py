"""Dynamic quantization of ONNX graphs to int8."""

from __future__ import annotations

from typing import Any

import numpy as np


# Largest absolute integer of a matrix. Processors without VNNI add two products of 8 bits in 16, which 7 bits never
# exceed; embeddings are only looked up.
MOST_OF_MATRIX, MOST_OF_EMBEDDING = 63, 127


def quantize_graph(model: Any, vocabularies: set[int]) -> None:
    """
    Quantize the linear layers and embeddings of an `onnx_ir.Model` in place. A linear layer converts its input to uint8
    by the range of the whole tensor, multiplies integers, and scales the result by one factor for each output channel.
    An embedding, a matrix with as many rows as one of the `vocabularies`, has one factor for each row. Everything else
    stays in float32: attention, norms, biases, and recurrences in loops.
    """
    from onnx_ir.passes.common import RemoveUnusedNodesPass

    graph = model.graph
    inputs: dict[Any, Any] = {}
    for node in list(graph):
        if node.op_type == "MatMul" and (found := matrix_of(node.inputs[1])) is not None:
            replace_matmul(graph, node, inputs, *found)
        elif node.op_type == "Gather" and is_embedding(node, vocabularies):
            replace_embedding(graph, node)
    RemoveUnusedNodesPass()(model)  # the matrices, and transpositions of them


def matrix_of(value: Any) -> tuple[Any, bool] | None:
    """Return the initializer of a matrix, and whether it is read transposed; `None` for a computed value."""
    producer = value.producer()
    is_transposed = producer is not None and producer.op_type == "Transpose"
    source = producer.inputs[0] if is_transposed else value
    if not source.is_initializer() or len(source.const_value.shape) != 2:
        return None
    return source, is_transposed


def is_embedding(node: Any, vocabularies: set[int]) -> bool:
    """Return whether a node looks up rows of an embedding."""
    table, axis = node.inputs[0], node.attributes.get("axis")
    if not table.is_initializer() or (axis is not None and axis.as_int() != 0):
        return False
    shape = tuple(table.const_value.shape)
    return len(shape) == 2 and shape[0] in vocabularies


def quantized(matrix: np.ndarray, axis: int, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a matrix in int8, with at most `most`, and its scales: one for each index of the other axis."""
    scales = np.abs(matrix).max(axis=axis, keepdims=True) / most
    scales = np.where(scales > 0, scales, 1.0).astype(np.float32)
    return np.rint(matrix / scales).astype(np.int8), scales


def add_initializer(graph: Any, name: str, array: np.ndarray) -> Any:
    """Return an initializer of a graph, added unless it has one of this name."""
    import onnx_ir

    if name not in graph.initializers:
        graph.register_initializer(onnx_ir.Value(name=name, const_value=onnx_ir.tensor(array, name=name)))
    return graph.initializers[name]


def insert(graph: Any, node: Any, new: list[Any], name: str) -> None:
    """Insert nodes before another one, named after `name`: a graph chooses names that its inner graphs may have."""
    for number, added in enumerate(new):
        added.name = f"{name}.int8.{number}"
        for place, output in enumerate(added.outputs):
            output.name = f"{added.name}.{place}"
    graph.insert_before(node, new)


def replace(graph: Any, node: Any, new: list[Any]) -> None:
    """Replace a node with new ones, whose last output takes the place of its output."""
    old, value = node.outputs[0], new[-1].outputs[0]
    value.type, value.shape = old.type, old.shape
    insert(graph, node, new, old.name)
    for use in list(old.uses()):
        use.node.replace_input_with(use.idx, value)
    for index, output in enumerate(graph.outputs):
        if output is old:
            graph.outputs[index] = value
    graph.remove(node, safe=True)
    value.name = old.name


def replace_matmul(graph: Any, node: Any, inputs: dict[Any, Any], matrix: Any, is_transposed: bool) -> None:
    """Replace the product of a tensor and a matrix; `inputs` are the nodes that convert tensors, which it shares."""
    import onnx_ir

    name = f"{matrix.name}.{'transposed.' * is_transposed}"
    array = matrix.const_value.numpy()
    integers, scales = quantized(array.T if is_transposed else array, 0, MOST_OF_MATRIX)
    integers, scales = np.ascontiguousarray(integers), scales[0]
    weight = add_initializer(graph, f"{name}int8", integers)
    scale = add_initializer(graph, f"{name}scale", scales)
    tensor = node.inputs[0]
    if tensor not in inputs:
        inputs[tensor] = onnx_ir.node("DynamicQuantizeLinear", [tensor], num_outputs=3)
        insert(graph, node, [inputs[tensor]], f"{tensor.name}.input")
    as_integers, input_scale, zero = inputs[tensor].outputs
    product = onnx_ir.node("MatMulInteger", [as_integers, weight, zero])
    wide = onnx_ir.node("Cast", product.outputs, {"to": onnx_ir.DataType.FLOAT})
    factor = onnx_ir.node("Mul", [input_scale, scale])
    result = onnx_ir.node("Mul", [wide.outputs[0], factor.outputs[0]])
    replace(graph, node, [product, wide, factor, result])


def replace_embedding(graph: Any, node: Any) -> None:
    """Replace the lookup of rows of a matrix."""
    import onnx_ir

    matrix, ids = node.inputs
    integers, scales = quantized(matrix.const_value.numpy(), 1, MOST_OF_EMBEDDING)
    weight = add_initializer(graph, f"{matrix.name}.rows.int8", integers)
    scale = add_initializer(graph, f"{matrix.name}.rows.scale", scales)
    rows = onnx_ir.node("Gather", [weight, ids])
    wide = onnx_ir.node("Cast", rows.outputs, {"to": onnx_ir.DataType.FLOAT})
    factors = onnx_ir.node("Gather", [scale, ids])
    result = onnx_ir.node("Mul", [wide.outputs[0], factors.outputs[0]])
    replace(graph, node, [rows, wide, factors, result])
