"""Which tokens of a picture see which, by a decoder's own masks: the nodes that make these are run on a few token ids.

Knows no session, and no configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import onnx

Array = npt.NDArray[Any]

_MASK_AT = {"Attention": 3, "MultiHeadAttention": 5, "GroupQueryAttention": 10}
"""The input of an attention's operator that hides tokens: false, or a very negative number."""

_HIDDEN = -1e4

LARGEST_WINDOW = 4096
"""The window behind which is looked at most: a mask of many more tokens than it has takes any memory."""


@dataclass(frozen=True)
class ItemMasks:
    """Layers of a decoder that takes token ids beside embeddings, counted by their attention."""

    joined: tuple[int, ...] = ()
    """Those in which an item's tokens see those behind them."""

    beyond_window: tuple[int, ...] = ()
    """Those of them in which its tokens see further back than a token of text does."""


def read_item_masks(
    model: onnx.ModelProto, tokens: str, past: Collection[str], placeholders: Collection[int], num_tokens: int
) -> ItemMasks:
    """Of `placeholders`, with which the graph compares its input `tokens`; `past` are its KV inputs. The masks are made
    for `num_tokens` tokens, which are more than a window has, all of text and all of one item."""
    attentions = [node for node in model.graph.node if node.op_type in _MASK_AT]
    inputs = [[*node.input[_MASK_AT[node.op_type] :], ""][0] for node in attentions]
    nodes = {name: _nodes_behind(model.graph.node, name) for name in {*inputs} - {""}}
    made = [name for name, found in nodes.items() if tokens in {value for node in found for value in node.input}]
    layers = [(layer, name) for layer, name in enumerate(inputs) if name in made]
    seen: list[dict[str, Array]] = []
    for number in (max(placeholders) + 1, *sorted(placeholders)):
        given = {tokens: np.full((1, num_tokens), number)}
        seen.append({name: _visible(model, nodes[name], name, _given(given, past, num_tokens)) for name in made})
    text, *items = seen
    joined = [(layer, name) for layer, name in layers if any(item[name][0, 1] for item in items)]
    further = [layer for layer, name in joined if not text[name][-1, 0] and any(item[name][-1, 0] for item in items)]
    return ItemMasks(tuple(layer for layer, _ in joined), tuple(further))


def _nodes_behind(nodes: Iterable[onnx.NodeProto], name: str) -> list[onnx.NodeProto]:
    """Those that `name` is computed by, in their order."""
    wanted, found = {name}, []
    for node in reversed(list(nodes)):
        if wanted.intersection(node.output):
            wanted.update(node.input)
            found.append(node)
    return found[::-1]


def _given(arrays: dict[str, Array], past: Collection[str], num_tokens: int) -> Callable[[onnx.ValueInfoProto], Array]:
    """What an input is given: one row of so many tokens behind nothing, `arrays` by name."""

    def of(value: onnx.ValueInfoProto) -> Array:
        from onnx.helper import tensor_dtype_to_np_dtype

        tensor = value.type.tensor_type
        dtype = tensor_dtype_to_np_dtype(tensor.elem_type)
        if value.name in arrays:
            return arrays[value.name].astype(dtype)
        length = 0 if value.name in past else num_tokens
        first, *sizes = (dim.dim_value if dim.HasField("dim_value") else length for dim in tensor.shape.dim)
        return np.ones((1 if first == length else first, *sizes), dtype)

    return of


def _visible(
    model: onnx.ModelProto,
    nodes: list[onnx.NodeProto],
    name: str,
    given: Callable[[onnx.ValueInfoProto], Array],
) -> Array:
    """[S, S]: which token sees which by the mask `name`, which `nodes` make."""
    from onnx import TensorProto, helper
    from onnx.reference import ReferenceEvaluator

    read = {value for node in nodes for value in node.input}
    weights = [tensor for tensor in model.graph.initializer if tensor.name in read]
    known = {tensor.name for tensor in weights}
    inputs = [value for value in model.graph.input if value.name in read - known]
    output = helper.make_tensor_value_info(name, TensorProto.UNDEFINED, None)
    graph = helper.make_graph(nodes, "mask", inputs, [output], weights)
    part = helper.make_model(graph, opset_imports=model.opset_import, functions=model.functions)
    (found,) = ReferenceEvaluator(part).run(None, {value.name: given(value) for value in inputs})
    mask: Array = np.asarray(found)
    flat: Array = mask.reshape(-1, *mask.shape[-2:])[0]
    return flat if flat.dtype == np.bool_ else flat > _HIDDEN
