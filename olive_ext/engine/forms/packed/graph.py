"""Packed steps on ONNX Runtime: GroupQueryAttention is rewritten as PagedAttention where the device has a kernel for it
that can be trusted. Knows no text.
"""

from __future__ import annotations

from dataclasses import replace

from typing_extensions import override

from olive_ext.engine.forms.agreement import STEM, SUFFIX, Text, targets_of, two_ends_problem
from olive_ext.engine.forms.graph_form import (
    ONE_BY_ONE,
    GraphForm,
    NotCapturedError,
    NotFittingError,
    OpenedDecoder,
    decoder_graph,
)
from olive_ext.engine.forms.kv_store import KvPlace, KvStore
from olive_ext.engine.forms.packed.attention_trial import AttentionTrial, attends_otherwise, attention_trials
from olive_ext.engine.forms.packed.capture import check_captured_steps
from olive_ext.engine.forms.packed.kv import PagedKv, longest_step
from olive_ext.engine.forms.packed.rewrite import (
    KERNELS,
    PackedInputs,
    gathered_bytes,
    with_packed_inputs,
    with_paged_attention,
)
from olive_ext.engine.runners.runner import Runner
from olive_ext.engine.step import Copy, FloatArray, LogitsRow, Row, Step
from olive_ext.errors import ConfigError, ProviderError
from olive_ext.graph.edits import WHOLE_LENGTH
from olive_ext.graph.onnx_file import ModelProto
from olive_ext.model import ResolvedModel
from olive_ext.model.decisions import Decision, against_buckets, against_capture
from olive_ext.model.spec.media_types import EmbeddingSpec
from olive_ext.model.types import DecoderSpec, Role


class PackedOnGraph(GraphForm):
    """Attention over a paged cache, of the graph or in the place of its own."""

    name = "packed"

    def __init__(self, model: ResolvedModel) -> None:
        super().__init__(model)
        self._trials: list[AttentionTrial] = []

    @classmethod
    @override
    def against(cls, model: ResolvedModel) -> str | None:
        engine, spec, device = model.settings.engine, model.spec, model.device.kind
        if spec.is_paged:
            _check_step(engine.chunk_size, device)
            _check_whole(spec, device)
            return None
        if engine.scoring not in ("auto", "packed") or (engine.scoring == "auto" and device not in KERNELS):
            return ""
        if device not in KERNELS:
            return f"CUDA and WebGPU have paged attention, {device} has not"
        if engine.graph == "untouched":
            return "the graph is to run as it is, and packed steps need another attention"
        if model.buckets.steps == "all":
            return "packed steps have any shape, and steps are to have few"
        if reason := against_buckets(spec):
            return reason
        if any(one.role is Role.POSITION_IDS and len(one.tensor.shape) == 3 for one in spec.inputs):
            return "positions are on three axes"
        if device == "webgpu" and spec.rounds_rows:
            return "packed steps add up in another order, which the rounding of activations would show"
        if others := {tensor.elem_type for tensor in spec.kv} - KERNELS[device].caches:
            return f"the {device} device has no paged attention over caches of ONNX's element type {min(others)}"
        _check_step(engine.chunk_size, device, " or 'engine.scoring' = \"rows\"")
        return None

    @classmethod
    @override
    def refused(cls, model: ResolvedModel, reason: str) -> str:
        if model.settings.engine.scoring == "packed":
            raise ConfigError(f"'engine.scoring' = \"packed\": {reason}", "engine.scoring")
        return f"{ONE_BY_ONE}: {reason}"

    @classmethod
    @override
    def decision(cls, model: ResolvedModel, reason: str) -> Decision:
        if model.spec.is_paged:
            return Decision("scoring", "packed", "the graph has a paged cache")
        asked = model.settings.engine.scoring
        return Decision("scoring", "packed", f"{asked}: if attention over a paged cache agrees", "tried")

    @override
    def rewrite(self, proto: ModelProto, spec: DecoderSpec) -> tuple[ModelProto, DecoderSpec]:
        if spec.is_paged:
            return proto, self._counted(proto, spec)
        tokens = [one.tensor.name for one in spec.inputs if one.role in (Role.INPUT_IDS, Role.POSITION_IDS)]
        kept = {*tokens, WHOLE_LENGTH}
        lengths = [one.tensor.name for one in spec.inputs if one.tensor.name not in kept]
        caches = {tensor.past: (tensor.heads, tensor.head_size) for tensor in spec.kv}
        inputs, kernel = PackedInputs(caches, tokens, lengths), KERNELS[self.model.device.kind]
        paged = with_paged_attention(proto, inputs, kernel)
        paged_spec = replace(self.model.spec_of(paged), notes=spec.notes, choices=spec.choices)
        return paged, self._counted(paged, paged_spec)

    def _counted(self, paged: ModelProto, spec: DecoderSpec) -> DecoderSpec:
        """With what the attention gathers beside its caches; which is to be tried."""
        self._trials = attention_trials(paged, {tensor.past: (tensor.heads, tensor.head_size) for tensor in spec.kv})
        kernel, sizes = KERNELS.get(self.model.device.kind), {tensor.past: tensor.head_size for tensor in spec.kv}
        if kernel is not None:
            spec = replace(spec, gathered_bytes=gathered_bytes(paged, sizes, kernel))
        if self.model.buckets.is_captured and (problem := against_capture(spec)):
            self.model.buckets.without(problem)
        return spec

    @override
    def refusal_of_graph(self) -> str | None:
        try:
            self.rewrite(*decoder_graph(self.model))
        except NotFittingError as error:
            return str(error)
        return None

    @override
    def allocate(self, place: KvPlace) -> KvStore:
        return PagedKv(place, has_idle_rows=self.model.capture(place.spec).is_captured)

    @override
    def trial(self, decoder: OpenedDecoder) -> None:
        """Compares attention by itself, then a small tree through the model; then captured steps with plain ones.
        Raises `ProviderError` for a graph that has no other attention."""
        runner = decoder.runner
        problem = attends_otherwise(runner, self._trials, decoder.chunk_size)
        if problem is None and runner.capacity.num_slots > 1:
            problem = check_packed_steps(runner, decoder.spec.vocab_size)
        if problem is not None and self.model.spec.is_paged:
            raise ProviderError(f"{problem}; the graph has no other attention: use another provider or device")
        if problem is not None:
            raise NotFittingError(problem)
        plan = self.model.capture(decoder.spec)
        if plan.is_captured:
            problem = check_captured_steps(runner, decoder.spec.vocab_size, decoder.chunk_size)
        if problem is not None and plan.is_tried:
            raise NotCapturedError(problem)
        if problem is not None:
            self.model.buckets.without(problem)


def _check_step(chunk_size: int | str, device: str, otherwise: str = "") -> None:
    """Raises `ConfigError` for steps of more tokens than the device's kernel is known to survive."""
    most = longest_step(device)
    if isinstance(chunk_size, int) and chunk_size > most:
        raise ConfigError(f"{_too_long(device, most)}; give {most}{otherwise}", "engine.chunk_size", chunk_size)


def _check_whole(spec: DecoderSpec, device: str) -> None:
    """Raises `ConfigError` for texts that are fed in one step, of more tokens than that."""
    if not spec.is_splittable and spec.context_length > (most := longest_step(device)):
        why = next((note for note in spec.notes if "fed whole" in note), "each request is fed whole")
        shown = f"'max_length': texts may have {spec.context_length} tokens, and {why}; {_too_long(device, most)}"
        raise ConfigError(f"{shown}; give {most} at most, or another 'execution_provider'")


def _too_long(device: str, most: int) -> str:
    why = f"steps over a paged cache on the {device} device have at most {most} tokens"
    return f"{why}, because longer ones crash near a full context"


def packed_embedding(proto: ModelProto, spec: EmbeddingSpec) -> tuple[ModelProto, EmbeddingSpec]:
    """The graph that embeds tokens, for those of all rows of a step one behind the other."""
    inputs = tuple(replace(one, tensor=replace(one.tensor, shape=("N",))) for one in spec.inputs)
    return with_packed_inputs(proto, [one.tensor.name for one in inputs]), replace(spec, inputs=inputs)


def check_packed_steps(runner: Runner, vocab_size: int) -> str | None:
    """Why packed steps must not be used on this model and device; None where they score what single rows score."""

    def together(stem: Text, left: Text, right: Text) -> FloatArray:
        runner.run(Step((Row(0, 0, stem + left[:2]),)))
        rows = Row(0, STEM + 2, left[2:]), Row(1, STEM, right)
        read = LogitsRow(0, SUFFIX - 3), LogitsRow(1, SUFFIX - 1)
        return runner.run(Step(rows, read, targets_of(2), copies=(Copy(0, 1, STEM),))).target_logprobs

    return two_ends_problem(runner, vocab_size, "a packed step", "packed steps", together)
