"""Reads what a decoder takes, returns and can do from its graph and genai_config.json.

What the graph states wins over genai_config.json, which has one number for all layers and is at times wrong; the
config gives names and fills in what the graph leaves symbolic. Knows no session, no provider and no files.

Axes: B batch, S positions, T positions in the KV cache, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import onnx
from onnx import TensorProto

from olive_ext.errors import ModelError
from olive_ext.model.types import DecoderSpec, KvTensor, TensorSpec

KV_NAMES = (
    ("past_key_values.%d.key", "present.%d.key"),
    ("past_key_values.%d.value", "present.%d.value"),
    ("past_key_%d", "present_key_%d"),
    ("past_value_%d", "present_value_%d"),
)
"""Names of a KV input and its output by exporter, %d being the layer; those of genai_config.json come before them."""

UNSUPPORTED = (
    (r"cross|encoder", "it belongs to an encoder-decoder, and only decoder-only models can be evaluated"),
    (r"inputs_embeds|per_layer_inputs", "the decoder takes the embeddings of another model instead of token ids"),
    (r"conv|recurrent|ssm|past_states", "a conv or recurrent state cannot be cut at a position"),
    (r"block_table|cumulative_sequence|attention_metadata|logits_indices", "a paged KV cache"),
    (r"key_cache|value_cache|write_indices|nonpad_kv_seqlen|cache_indirection", "a static KV cache"),
    (r"past_seq|total_seq|current_seq|seqlens", "lengths in place of an attention mask"),
    (r"use_cache_branch", "a merged decoder with a branch for the first step"),
    (r"key_scale|value_scale", "scales of a KV cache quantized for each token"),
    (r"num_logits_to_keep|logits_to_keep", "the graph cuts its logits itself"),
    (r"token_type_ids|_gate$", "token types or modality gates"),
)
"""Inputs that are recognised but not supported yet: a part of the name, and why. The first row that fits is told."""

_TOKEN_TYPES = frozenset({TensorProto.INT64, TensorProto.INT32})
_INTEGER_KV = frozenset({TensorProto.INT8, TensorProto.UINT8})
_ROLES = {"input_ids": (2,), "attention_mask": (2,), "position_ids": (2, 3)}
"""Inputs that carry tokens, and the ranks they may have."""


def read_spec(
    model: onnx.ModelProto,
    genai_config: Mapping[str, Any],
    max_length: int | None = None,
    hf_config: Mapping[str, Any] | None = None,
) -> DecoderSpec:
    """The decoder's interface. `genai_config` may be empty; `hf_config` is the config.json beside it, if any.

    Raises ModelError, naming the input or output, for a graph that is not understood or not supported yet.
    """
    return _Reader(model, genai_config, hf_config or {}).read(max_length)


class _Reader:
    def __init__(self, model: onnx.ModelProto, genai_config: Mapping[str, Any], hf_config: Mapping[str, Any]) -> None:
        self._graph = model.graph
        self._model_config: Mapping[str, Any] = genai_config.get("model", {})
        self._decoder_config: Mapping[str, Any] = self._model_config.get("decoder", {})
        self._search_config: Mapping[str, Any] = genai_config.get("search", {})
        self._hf_config = hf_config
        weights = {tensor.name for tensor in model.graph.initializer}
        self._inputs = {value.name: _tensor(value) for value in model.graph.input if value.name not in weights}
        self._outputs = {value.name: _tensor(value) for value in model.graph.output}
        self._attention = _AttentionNodes(model.graph)
        self._notes: list[str] = []

    def read(self, max_length: int | None) -> DecoderSpec:
        pairs = self._kv_names()
        roles = {role: self._role(role) for role in _ROLES}
        self._refuse_others({tensor.name for tensor in roles.values() if tensor is not None} | set(pairs))
        input_ids = roles["input_ids"]
        if input_ids is None:
            raise ModelError(f"the decoder has no input 'input_ids'; it has {_listed(self._inputs)}")
        if not pairs:
            raise ModelError(
                "the decoder has no KV cache inputs such as 'past_key_values.0.key'; export it with a KV cache"
            )
        kv = tuple(self._kv_tensor(past, present) for past, present in pairs.items())
        logits = self._logits()
        obstacle = self._in_place_obstacle(kv)
        self._notes.append(
            "past and present KV share one buffer" if obstacle is None else f"KV is returned grown: {obstacle}"
        )
        return DecoderSpec(
            input_ids=input_ids,
            attention_mask=roles["attention_mask"],
            position_ids=roles["position_ids"],
            kv=kv,
            logits=logits,
            vocab_size=self._vocab_size(logits),
            context_length=self._context_length(max_length),
            is_kv_in_place=obstacle is None,
            notes=tuple(self._notes),
        )

    def _role(self, role: str) -> TensorSpec | None:
        name = self._decoder_config.get("inputs", {}).get(role, role)
        tensor = self._inputs.get(name) or self._inputs.get(role)
        if tensor is None:
            return None
        if tensor.elem_type not in _TOKEN_TYPES:
            kind = TensorProto.DataType.Name(tensor.elem_type)
            raise ModelError(f"input '{tensor.name}' is of type {kind}; INT64 and INT32 are supported")
        if len(tensor.shape) not in _ROLES[role]:
            ranks = " or ".join(map(str, _ROLES[role]))
            raise ModelError(f"input '{tensor.name}' has rank {len(tensor.shape)}; rank {ranks} is supported")
        return tensor

    def _refuse_others(self, known: set[str]) -> None:
        others = [name for name in self._inputs if name not in known]
        for pattern, reason in UNSUPPORTED:
            for name in others:
                if re.search(pattern, name):
                    raise ModelError(f"input '{name}' is not supported yet: {reason}")
        if others:
            raise ModelError(f"input '{others[0]}' is not understood; the decoder takes {_listed(self._inputs)}")

    def _kv_names(self) -> dict[str, str]:
        """Past to present, by layer, each layer's key before its value."""
        inputs, outputs = self._decoder_config.get("inputs", {}), self._decoder_config.get("outputs", {})
        configured = [
            (inputs[f"past_{part}_names"], outputs[f"present_{part}_names"])
            for part in ("key", "value")
            if f"past_{part}_names" in inputs and f"present_{part}_names" in outputs
        ]
        found: dict[str, tuple[int, int, str]] = {}
        for rank, (past, present) in enumerate((*configured, *KV_NAMES)):
            pattern = re.compile(re.escape(past).replace("%d", r"(\d+)"))
            for name in self._inputs:
                match = pattern.fullmatch(name)
                if match and match.groups() and name not in found:
                    found[name] = (int(match.group(1)), rank, present.replace("%d", match.group(1)))
        for name, (_, _, present) in found.items():
            if present not in self._outputs:
                raise ModelError(f"input '{name}' has no output '{present}'; there are {_listed(self._outputs)}")
        return {name: found[name][2] for name in sorted(found, key=lambda name: found[name][:2])}

    def _kv_tensor(self, past: str, present: str) -> KvTensor:
        tensor = self._inputs[past]
        if len(tensor.shape) != 4:
            raise ModelError(f"input '{past}' has rank {len(tensor.shape)}; [batch, heads, positions, size] is needed")
        if (node := self._attention.node(past)) is not None and _attribute(node, "sliding_window_cache", 0):
            raise ModelError(
                f"input '{past}' is not supported yet: a windowed KV cache (sliding_window_cache=1) drops old "
                "positions and cannot be rewound; export with windowed_kv_cache=false"
            )
        heads = self._static(tensor, 1, "num_key_value_heads", self._attention.kv_heads(past))
        head_size = self._static(tensor, 3, "head_size", self._attention.head_size(past))
        return KvTensor(past, present, tensor.elem_type, heads, head_size)

    def _static(self, tensor: TensorSpec, axis: int, key: str, from_graph: int | None) -> int:
        """A dimension of a KV input: as declared, else from genai_config.json, else from the attention node."""
        size = tensor.shape[axis]
        if isinstance(size, int):
            return size
        if key in self._decoder_config:
            self._note(f"{key} {self._decoder_config[key]} is genai_config.json's: the graph has '{size}'")
            configured = int(self._decoder_config[key])
            return (configured + 1) // 2 if key == "head_size" and self._attention.is_4bit(tensor.name) else configured
        if from_graph is None:
            raise ModelError(f"input '{tensor.name}' has the symbolic {key} '{size}'; no genai_config.json states it")
        self._note(f"{key} {from_graph} is that of the attention node: the graph's inputs have '{size}'")
        return from_graph

    def _note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.append(text)

    def _logits(self) -> TensorSpec:
        name = self._decoder_config.get("outputs", {}).get("logits", "logits")
        if name in self._outputs:
            return self._outputs[name]
        candidates = [output for output in self._outputs if output.startswith("logits")]
        if len(candidates) != 1:
            found = f"several could be meant: {_listed(candidates)}" if candidates else _listed(self._outputs)
            raise ModelError(f"the decoder has no output '{name}'; {'' if candidates else 'it returns '}{found}")
        self._note(f"the logits are '{candidates[0]}', the only output whose name starts with 'logits'")
        return self._outputs[candidates[0]]

    def _vocab_size(self, logits: TensorSpec) -> int:
        configured = self._model_config.get("vocab_size", self._hf_config.get("vocab_size"))
        declared = logits.shape[-1] if logits.shape else "unknown"
        if not isinstance(declared, int):
            if configured is None:
                raise ModelError(f"output '{logits.name}' does not declare its vocabulary size, nor does a config")
            return int(configured)
        if configured is not None and configured != declared:
            self._note(f"the vocabulary has {declared} entries, as in '{logits.name}'; the config says {configured}")
        return declared

    def _context_length(self, max_length: int | None) -> int:
        text_config = self._hf_config.get("text_config", self._hf_config)
        limits = {
            "genai_config.json": self._model_config.get("context_length"),
            "config.json": text_config.get("max_position_embeddings"),
            "the rows of the rotary cache": _rotary_rows(self._graph),
            "max_length": max_length,
        }
        known = {origin: int(limit) for origin, limit in limits.items() if limit}
        if not known:
            raise ModelError("the context length is unknown: neither a config nor the graph states it; set max_length")
        winner = min(known, key=lambda origin: known[origin])
        others = ", ".join(f"{origin} {limit}" for origin, limit in known.items() if limit != known[winner])
        self._note(f"the context length {known[winner]} is that of {winner}" + (f" (not {others})" if others else ""))
        return known[winner]

    def _in_place_obstacle(self, kv: Iterable[KvTensor]) -> str | None:
        """Why past and present cannot be one buffer; None where they can."""
        for tensor in kv:
            node = self._attention.node(tensor.past)
            if node is None or node.op_type != "GroupQueryAttention":
                return f"'{tensor.past}' is not read by one GroupQueryAttention alone"
            if self._attention.present(tensor.past) != tensor.present:
                return f"'{tensor.present}' does not come from the GroupQueryAttention that reads '{tensor.past}'"
            if tensor.elem_type in _INTEGER_KV and self._search_config.get("past_present_share_buffer") is False:
                return f"'{tensor.past}' is quantized, and genai_config.json has past_present_share_buffer false"
        return None


class _AttentionNodes:
    """The nodes that read the KV inputs directly."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self._graph = graph
        self._readers: dict[str, list[tuple[onnx.NodeProto, int]]] = {}
        for node in graph.node:
            for index, name in enumerate(node.input):
                self._readers.setdefault(name, []).append((node, index))

    def node(self, past: str) -> onnx.NodeProto | None:
        """The only reader of `past`."""
        readers = self._readers.get(past, [])
        return readers[0][0] if len(readers) == 1 else None

    def present(self, past: str) -> str | None:
        """The value in which GroupQueryAttention returns what it read from `past`: input 3 as output 1, 4 as 2."""
        node, index = self._readers[past][0]
        return node.output[index - 2] if index in (3, 4) and len(node.output) > index - 2 else None

    def kv_heads(self, past: str) -> int | None:
        node = self.node(past)
        return None if node is None else _attribute(node, "kv_num_heads", 0) or None

    def is_4bit(self, past: str) -> bool:
        node = self.node(past)
        return node is not None and _attribute(node, "kv_cache_bit_width", 0) == 4

    def head_size(self, past: str) -> int | None:
        """Last axis of the cache: that of the attention's output, by head; 4-bit caches hold two numbers a byte."""
        node = self.node(past)
        if node is None or not (num_heads := _attribute(node, "num_heads", 0)):
            return None
        for value in self._graph.value_info:
            if value.name == node.output[0] and isinstance(width := _tensor(value).shape[-1], int):
                return (width // num_heads + 1) // 2 if self.is_4bit(past) else width // num_heads
        return None


def _rotary_rows(graph: onnx.GraphProto) -> int | None:
    """Positions that the rotary embedding's largest cos_cache holds."""
    rows = [tensor.dims[0] for tensor in graph.initializer if "cos_cache" in tensor.name and len(tensor.dims) == 2]
    return max(rows, default=None)


def _tensor(value: onnx.ValueInfoProto) -> TensorSpec:
    tensor = value.type.tensor_type
    dims = (dim.dim_value if dim.HasField("dim_value") else dim.dim_param or "?" for dim in tensor.shape.dim)
    return TensorSpec(value.name, tensor.elem_type, tuple(dims))


def _attribute(node: onnx.NodeProto, name: str, default: int) -> int:
    return next((int(entry.i) for entry in node.attribute if entry.name == name), default)


def _listed(names: Iterable[str]) -> str:
    """At most eight names, for an error message."""
    names = list(names)
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
