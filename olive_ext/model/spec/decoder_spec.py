"""Reads what a decoder takes, returns and can do, from its graph and genai_config.json.

The graph wins over genai_config.json, which has one number for all layers and is sometimes wrong. The config gives
names, and fills in what the graph leaves symbolic. Knows no session, no provider and no files.

Axes: B batch, S positions, T positions in the KV cache, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import onnx
from onnx import TensorProto

from olive_ext.errors import MismatchError, ModelError, listed
from olive_ext.graph.nodes import attribute
from olive_ext.model.spec import attention, tensor_names
from olive_ext.model.spec.attention import refuse_rotary, rotary_rows, sole_readers
from olive_ext.model.spec.checkpoint import context_limit
from olive_ext.model.spec.encoder_spec import TOKEN_TYPES, read_cross_inputs
from olive_ext.model.spec.media_spec import compared_ids, read_item_masks
from olive_ext.model.spec.step_choices import PositionalNodes, choice_notes, read_step_choices
from olive_ext.model.spec.tensor_names import Names
from olive_ext.model.types import (
    DecoderSpec,
    EmbeddingSpec,
    InputSpec,
    ItemMasks,
    KvTensor,
    Role,
    StateTensor,
    TensorSpec,
)

logger = logging.getLogger(__name__)

Config = Mapping[str, Any]

NO_CACHE = "the decoder has no KV cache inputs such as 'past_key_values.0.key'; export it with a KV cache"


def read_spec(
    model: onnx.ModelProto,
    genai_config: Config,
    max_length: int | None = None,
    hf_config: Config | None = None,
    provided: Container[str] = (),
) -> DecoderSpec:
    """The decoder's interface. `genai_config` may be empty; `hf_config` is the config.json beside it, if any; inputs in
    `provided` are filled by others (adapters) and left out. Raises ModelError, naming the input or output."""
    return _Reader(model, genai_config, hf_config or {}, provided).read(max_length)


def read_embedding(model: onnx.ModelProto, wanted: Iterable[str]) -> EmbeddingSpec:
    """The interface of an embedding graph that returns the decoder's inputs `wanted`. Raises ModelError where it does
    not return them, or takes something that text does not have."""
    return _Reader(model, {}, {}).read_embedding(tuple(wanted))


class _Reader:
    def __init__(
        self, model: onnx.ModelProto, genai_config: Config, hf_config: Config, provided: Container[str] = ()
    ) -> None:
        self._model = model
        self._graph = model.graph
        self._model_config: Mapping[str, Any] = genai_config.get("model", {})
        self._decoder_config: Mapping[str, Any] = self._model_config.get("decoder", {})
        self._shares_buffer = genai_config.get("search", {}).get("past_present_share_buffer") is True
        self._hf_config = hf_config
        inputs = attention.graph_inputs(model.graph)
        self._inputs = {name: tensor for name, tensor in inputs.items() if name not in provided}
        self._outputs = {value.name: attention.tensor_spec(value) for value in model.graph.output}
        self._readers = sole_readers(model.graph)
        self._is_packed = any(name in self._inputs for name in tensor_names.ROLE_NAMES[Role.BLOCK_TABLE])
        self._notes: list[str] = []

    def read(self, max_length: int | None) -> DecoderSpec:
        inputs, outputs = self._decoder_config.get("inputs", {}), self._decoder_config.get("outputs", {})
        names = tensor_names.configured_names(tensor_names.pairs("past_{}_names", "present_{}_names"), inputs, outputs)
        kv_names, state_names = self._pairs((*names, *tensor_names.KV_NAMES)), self._pairs(tensor_names.STATE_NAMES)
        roles = tuple(entry for role in Role if (entry := self._input(role)) is not None)
        embeddings = tuple(name for name in self._inputs if name in tensor_names.EMBEDDING_NAMES)
        embeddings += tuple(name for name in self._inputs if embeddings and name in tensor_names.GATES)
        cross = read_cross_inputs(self._inputs, self._model_config)
        known = {one.tensor.name for one in roles} | {*kv_names, *state_names, *embeddings, *cross.names}
        if others := [name for name in self._inputs if name not in known]:
            is_adapter = "lora" in others[0].lower()
            hint = " (name the .onnx_adapter file of its weights in engine.adapters)" if is_adapter else ""
            raise ModelError(f"input '{others[0]}' is not understood{hint}; the decoder takes {listed(self._inputs)}")
        tokens = next((entry.tensor.name for entry in roles if entry.role is Role.INPUT_IDS), None)
        if not embeddings and tokens is None:
            raise ModelError(f"the decoder has no input 'input_ids'; it has {listed(self._inputs)}")
        if not kv_names and not state_names:
            raise ModelError(NO_CACHE)
        kv = tuple(self._kv_tensor(past, present) for past, present in kv_names.items())
        states = tuple(
            StateTensor(past, present, state.elem_type, _fixed(state, state.shape[1:], "a state's size is"))
            for past, present, state in ((*names, self._inputs[names[0]]) for names in state_names.items())
        )
        refuse_rotary(self._graph, {tensor.past: self._head_size(tensor) for tensor in kv})
        logits = self._logits()
        if windows := [tensor.window for tensor in kv if tensor.window is not None]:
            sizes = " and ".join(map(str, sorted(set(windows))))
            self._note(
                f"{len(windows)} of {len(kv)} KV tensors keep {sizes} positions in the file (sliding_window_cache); "
                "here they keep all, so that slots can be rewound and shared: more memory, the same results"
            )
        obstacle = self._in_place_obstacle(kv, states)
        self._notes.append(
            "past and present KV share one buffer" if obstacle is None else f"KV is returned grown: {obstacle}"
        )
        context_length = self._context_length(max_length, kv)
        choices = read_step_choices(self._model, roles, (*kv, *states), context_length)
        alone = attention.step_scale(self._graph.node) or choices.leak
        self._notes.extend(choice_notes(choices, alone))
        return DecoderSpec(
            inputs=roles,
            kv=kv,
            logits=logits,
            vocab_size=self._vocab_size(logits),
            context_length=context_length,
            is_kv_in_place=obstacle is None,
            takes_one_row=self._takes_one_row((*kv_names, *state_names, *embeddings[:1], *filter(None, (tokens,)))),
            states=states,
            embeddings=embeddings,
            embedding_rows=None if tokens is None else attention.embedding_rows(self._graph, tokens),
            cross=cross,
            alone=alone,
            choices=choices,
            item_masks=self._item_masks(tokens if embeddings else None, roles, kv),
            rounds_rows=attention.num_row_roundings(self._graph.node) > 0,
            contradicted=tuple(self._contradicted(roles, kv, logits, has_cross=bool(cross))),
            notes=(*self._notes, *attention.rounding_notes(self._graph.node)),
        )

    def _takes_one_row(self, names: Iterable[str]) -> bool:
        """Whether one of the inputs `names` has a fixed batch, which packed inputs lack. Raises `ModelError` where it
        is not of one row: steps have as many rows as there are texts."""
        for name in names if not self._is_packed else ():
            size = self._inputs[name].shape[0]
            if isinstance(size, int) and size != 1:
                raise ModelError(f"input '{name}' has a batch of {size} rows; one row or a free number is supported")
            if size == 1:
                return True
        return False

    def _item_masks(self, tokens: str | None, roles: Sequence[InputSpec], kv: Sequence[KvTensor]) -> ItemMasks:
        """In which layers an item's tokens see each other: those whose masks look for its placeholder (Gemma 4)."""
        if tokens is None or not (placeholders := compared_ids(self._graph, tokens)):
            return ItemMasks()
        window = self._hf_config.get("text_config", self._hf_config).get("sliding_window", 0)
        return read_item_masks(PositionalNodes(self._model, roles, kv), placeholders, max(window, 0) + 2)

    def _number(self, past: str, name: str) -> int:
        """The attribute `name` of the only reader of `past`; 0 where it has none."""
        return int(attribute(self._readers[past], name, 0)) if past in self._readers else 0

    def _per_item(self, past: str) -> int:
        """How many of the attention's numbers one number of the cache holds: with 4 bits, a byte holds two."""
        return 2 if self._number(past, "kv_cache_bit_width") == 4 else 1

    def _head_size(self, tensor: KvTensor) -> int:
        return tensor.head_size * self._per_item(tensor.past)

    def read_embedding(self, wanted: tuple[str, ...]) -> EmbeddingSpec:
        missing = [name for name in wanted if name not in self._outputs]
        if missing:
            raise ModelError(f"the embedding graph returns {listed(self._outputs)}; the decoder takes '{missing[0]}'")
        tokens = self._input(Role.INPUT_IDS)
        if tokens is None:
            raise ModelError(f"the embedding graph has no input 'input_ids'; it has {listed(self._inputs)}")
        features = tuple(tensor for tensor in self._inputs.values() if tensor != tokens.tensor)
        for tensor in features:
            if len(tensor.shape) != 2 or not isinstance(tensor.shape[1], int):
                raise ModelError(f"the embedding graph's input '{tensor.name}' {list(tensor.shape)} is not understood")
        return EmbeddingSpec((tokens,), features, wanted)

    def _input(self, role: Role) -> InputSpec | None:
        configured = self._decoder_config.get("inputs", {}).get(role.value)
        tensor = next(
            (self._inputs[name] for name in (configured, *tensor_names.ROLE_NAMES[role]) if name in self._inputs), None
        )
        if tensor is None:
            return None
        accepted = {TensorProto.BOOL} if role is Role.USE_CACHE_BRANCH else TOKEN_TYPES
        if tensor.elem_type not in accepted:
            kind = TensorProto.DataType.Name(tensor.elem_type)
            names = " and ".join(sorted(TensorProto.DataType.Name(entry) for entry in accepted))
            raise ModelError(f"input '{tensor.name}' is of type {kind}; {names} are supported")
        accepted_ranks = (tensor_names.PACKED_RANKS if self._is_packed else tensor_names.ROLE_RANKS)[role]
        if len(tensor.shape) not in accepted_ranks:
            ranks = " or ".join(map(str, accepted_ranks))
            raise ModelError(f"input '{tensor.name}' has rank {len(tensor.shape)}; rank {ranks} is supported")
        return InputSpec(role, tensor)

    def _pairs(self, names: Iterable[Names]) -> dict[str, str]:
        pairs: dict[str, tuple[int, str]] = {}
        for past, layer, present in tensor_names.by_layer(self._inputs, names):
            if past not in pairs or (pairs[past][1] not in self._outputs and present in self._outputs):
                pairs[past] = layer, present
        for past, (_, present) in pairs.items():
            if present not in self._outputs:
                raise ModelError(f"input '{past}' has no output '{present}'; there are {listed(self._outputs)}")
        return {past: pairs[past][1] for past in sorted(pairs, key=lambda past: pairs[past][0])}

    def _kv_tensor(self, past: str, present: str) -> KvTensor:
        tensor = self._inputs[past]
        if len(tensor.shape) == 3 and any(name in self._inputs for name in tensor_names.ROLE_NAMES[Role.WRITE_INDICES]):
            # A static cache [batch, positions, width]: the graph writes at indices that it is given.
            capacity, width = _fixed(tensor, tensor.shape[1:], "a static cache is")
            return KvTensor(past, present, tensor.elem_type, 1, width, position_axis=1, capacity=capacity)
        if len(tensor.shape) != 4:
            raise ModelError(f"input '{past}' has rank {len(tensor.shape)}; [batch, heads, positions, size] is needed")
        if self._is_packed:  # blocks [blocks, positions, heads, size]
            heads, head_size = _fixed(tensor, tensor.shape[2:], "heads and size are")
            return KvTensor(past, present, tensor.elem_type, heads, head_size, position_axis=1)
        heads = self._static(tensor, 1, "num_key_value_heads", self._number(past, "kv_num_heads") or None)
        head_size = self._static(tensor, 3, "head_size", self._stored_size(past))
        window = self._number(past, "local_window_size") if self._number(past, "sliding_window_cache") else None
        return KvTensor(past, present, tensor.elem_type, heads, head_size, window=window)

    def _stored_size(self, past: str) -> int | None:
        """Size of the cache's last axis, derived from the attention's output; None where the graph does not give it."""
        num_heads = self._number(past, "num_heads")
        output = self._readers[past].output[0] if num_heads else ""
        widths = (attention.tensor_spec(value).shape[-1] for value in self._graph.value_info if value.name == output)
        width = next(widths, None)
        return -(-(width // num_heads) // self._per_item(past)) if isinstance(width, int) else None

    def _static(self, tensor: TensorSpec, axis: int, key: str, from_graph: int | None) -> int:
        """A dimension of a KV input: as declared, else from genai_config.json, else from the attention node."""
        size = tensor.shape[axis]
        if isinstance(size, int):
            return size
        if self._decoder_config.get(key, 0) > 0:
            self._note(f"{key} {self._decoder_config[key]} is genai_config.json's: the graph has '{size}'")
            configured = int(self._decoder_config[key])
            stored = -(-configured // self._per_item(tensor.name)) if key == "head_size" else configured
            if from_graph is not None and from_graph != stored:
                raise MismatchError(f"genai_config.json says {key} {configured}, the graph's attention {from_graph}")
            return stored
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
            listing = f"several could be meant: {listed(candidates)}" if candidates else listed(self._outputs)
            raise MismatchError(f"the decoder has no output '{name}'; {'' if candidates else 'it returns '}{listing}")
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

    def _contradicted(
        self, roles: Iterable[InputSpec], kv: Iterable[KvTensor], logits: TensorSpec, *, has_cross: bool
    ) -> Iterator[str]:
        """What genai_config.json states and the graph contradicts, each beginning with the whole key."""
        caches, decoder = [tensor for tensor in kv if tensor.capacity is None], self._decoder_config
        names = {entry.role.value: entry.tensor.name for entry in roles} | {"logits": logits.name}
        for part, key, name in ((one, *item) for one in ("inputs", "outputs") for item in decoder.get(one, {}).items()):
            is_cache = bool(caches) and key.startswith(("past_", "present_")) and "%d" in name
            is_there = any(tensor_names.by_layer([*self._inputs, *self._outputs], [(name, "")]))
            if names.get(key, name) != name or (is_cache and not is_there):
                yield f"model.decoder.{part}.{key} '{name}', the graph has {names.get(key, 'no such tensor')}"
        sizes = {size for size in logits.shape[-1:] if isinstance(size, int)}
        heads, widths = {tensor.heads for tensor in caches}, {self._head_size(tensor) for tensor in caches}
        known = {"vocab_size": sizes, "num_key_value_heads": heads, "head_size": widths}
        for key, values in known.items():
            stated = {**self._model_config, **decoder}.get(key, 0)
            where = "model.decoder" if key in decoder else "model"
            if stated > 0 and values and stated not in values:
                yield f"{where}.{key} {stated}, the graph has {listed(map(str, sorted(values)))}"
        readers = {self._readers[tensor.past].op_type for tensor in caches if tensor.past in self._readers}
        if self._shares_buffer and not (has_cross or self._is_packed) and readers - {"GroupQueryAttention"}:
            yield f"search.past_present_share_buffer true, the graph's caches grow: {listed(sorted(readers))}"
        length, rows = self._model_config.get("context_length") or 0, rotary_rows(self._graph)
        if rows and length > rows:
            yield f"model.context_length {length}, the graph's rotary tables have {rows} positions"
        slides = {"slide_key_value_cache": True, "slide_inputs": True, **decoder.get("sliding_window", {})}
        takes_any = not all(isinstance(size, int) for size in next(iter(self._inputs.values())).shape[1:2])
        for key in ("slide_key_value_cache", "slide_inputs") if "window_size" in slides and takes_any else ():
            if slides[key] and all(tensor.window is None for tensor in caches):
                yield f"model.decoder.sliding_window.{key} true, the graph's inputs and caches have any length"

    def _context_length(self, max_length: int | None, kv: Iterable[KvTensor]) -> int:
        num_cells = min((tensor.capacity for tensor in kv if tensor.capacity), default=None)
        written = self._model_config, self._hf_config
        length, note = context_limit(*written, rotary_rows(self._graph), max_length, num_cells)
        if max_length is not None and max_length > length:
            logger.warning(
                "'max_length' = %d is beyond the model's context length, which is used: %d", max_length, length
            )
        self._note(note)
        return length

    def _in_place_obstacle(self, kv: Iterable[KvTensor], states: tuple[StateTensor, ...]) -> str | None:
        """Why past and present cannot share one buffer; None where they can."""
        if states:
            return f"'{states[0].past}' is a state, which must be kept as it was at every fork"
        for tensor in kv:
            if tensor.capacity is not None or self._is_packed:
                continue
            node = self._readers.get(tensor.past)
            if node is None or node.op_type != "GroupQueryAttention":
                return f"'{tensor.past}' is not read by one GroupQueryAttention alone"
            if (tensor.past, tensor.present) not in zip(node.input[3:5], node.output[1:3], strict=False):
                return f"'{tensor.present}' does not come from the GroupQueryAttention that reads '{tensor.past}'"
        return None


def _fixed(tensor: TensorSpec, sizes: Sequence[int | str], subject: str) -> tuple[int, ...]:
    """`sizes` of an input's shape as numbers. `subject` begins the error's sentence where one is a symbol."""
    numbers = tuple(size for size in sizes if isinstance(size, int))
    if len(numbers) < len(sizes):
        raise ModelError(f"input '{tensor.name}' has the symbolic shape {list(tensor.shape)}; {subject} fixed")
    return numbers
