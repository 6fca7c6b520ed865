"""Opens a runner on ONNX Runtime: reads the graph, puts the head in, opens the session, allocates the slots.

Takes the decisions of the resolved model; tries out what shows on an open session only. Knows no text.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnxruntime as ort

from olive_ext.engine.runners.ort.capture import Capture
from olive_ext.engine.runners.ort.companion_inputs import Adapters
from olive_ext.engine.runners.ort.head import Head
from olive_ext.engine.runners.ort.kv.in_place import ViewKv
from olive_ext.engine.runners.ort.kv.kv_store import Device, KvPlace, KvStore
from olive_ext.engine.runners.ort.kv.paged import PagedKv
from olive_ext.engine.runners.ort.kv.returned import ReturnedKv
from olive_ext.engine.runners.ort.kv.staged import StagedKv
from olive_ext.engine.runners.ort.opener import Opener
from olive_ext.engine.runners.ort.ort_parts import OrtParts, SharedPrefixKv
from olive_ext.engine.runners.ort.ort_runner import OrtRunner
from olive_ext.engine.runners.ort.packing import against_packed_steps, packed
from olive_ext.engine.runners.ort.placement import MisplacedError
from olive_ext.engine.runners.row_trials import find_row_mix, group_rows
from olive_ext.engine.runners.runner import OpenedRunner, Runner
from olive_ext.engine.runners.step_trial import affordable, check_steps
from olive_ext.engine.runners.trials import (
    check_answer_steps,
    check_tree_batches,
    fitting_attention,
    fitting_chunk_size,
    with_buckets,
)
from olive_ext.engine.step import Batching, RowMix
from olive_ext.errors import ModelError, ProviderError, understood
from olive_ext.graph.attention_rewrites import with_full_length_kv, with_total_of_all_rows
from olive_ext.graph.attention_trial import AttentionTrial
from olive_ext.graph.onnx_file import ModelProto, load_graph
from olive_ext.graph.paged_attention import NotPagedError
from olive_ext.graph.scoring_head import check_scoring
from olive_ext.graph.tree_attention import TreeAttentionGraph
from olive_ext.graph.whole_length import WHOLE_LENGTH, with_whole_length
from olive_ext.model import ResolvedModel
from olive_ext.model.compiled import Compiled
from olive_ext.model.decisions import ONE_BY_ONE, choose_num_slots, suggest_genai
from olive_ext.model.types import DecoderSpec, InputSpec, Role, TensorSpec

logger = logging.getLogger(__name__)


def open_ort_runner(model: ResolvedModel, profile_prefix: Path | None = None) -> OpenedRunner:
    """A runner of the model's graphs in sessions of ONNX Runtime.

    Raises `ModelError` for a graph that cannot be scored or run, and `ProviderError` for a provider that does not come
    up or has no kernel for nodes with large values. `profile_prefix` makes ONNX Runtime write a profile.
    """
    compiled = Compiled(model.settings.engine)
    try:
        with understood(model.files.decoder):
            return _open(Opener(model, profile_prefix, compiled))
    except MisplacedError as error:
        host = model.providers[-1:]
        if not model.settings.allow_cpu_fallback or host[0].device != "cpu":
            raise ProviderError(f"{error}; 'allow_cpu_fallback' would run the whole model on the CPU") from error
        logger.warning("%s; running the whole model on the CPU", error)
        return _open(Opener(replace(model, came_up=host), profile_prefix, compiled))


def _open(opener: Opener) -> OpenedRunner:
    model = opener.model
    adapters = Adapters(model.settings.engine.adapters)
    spec = replace(model.spec, notes=opener.notes)
    proto = load_graph(model.files.decoder)
    try:
        check_scoring(proto, spec.logits.name)
    except ModelError as error:
        raise suggest_genai(error, model.files) from error
    proto, spec = of_any_step(model, proto, spec)
    try:
        return _open_decoder(opener, proto, spec, adapters)
    except NotPagedError as error:
        return _open(opener.by_rows(str(error)))
    except PartsDifferError as error:
        return _open(opener.fed_whole(str(error)))


def of_any_step(model: ResolvedModel, proto: ModelProto, spec: DecoderSpec) -> tuple[ModelProto, DecoderSpec]:
    """The decoder with caches that keep all positions, and with lengths that are those of its rows and of whole texts,
    whatever else the step holds."""
    proto = with_total_of_all_rows(with_full_length_kv(proto))
    if not spec.choices or not spec.choices.by_length or model.settings.engine.graph == "untouched":
        return proto, spec
    length = InputSpec(Role.WHOLE_LENGTH, TensorSpec(WHOLE_LENGTH, 7, ()))
    return with_whole_length(proto, spec.choices.by_length), replace(spec, inputs=(*spec.inputs, length))


class PartsDifferError(Exception):
    """How far texts that are fed in parts, or in company, are from those fed whole and alone."""


def _open_decoder(opener: Opener, proto: ModelProto, spec: DecoderSpec, adapters: Adapters) -> OpenedRunner:
    """Raises `NotPagedError` where the decoder was to make packed steps and does not."""
    model, tree, trials = opener.model, None, None
    if opener.form == "packed" and not spec.is_paged:
        proto, spec, trials = packed(model, proto, spec)
    elif opener.form == "branches":
        proto, spec, tree = opener.tree_attention(proto, spec)
    session, head = opener.decoder(proto, spec)
    if opener.device(session).kind != model.device.kind:  # it fell back to the CPU: all is chosen anew
        return _open(replace(opener, model=replace(model, came_up=model.providers[-1:])))
    del proto  # inline weights would stay in memory twice
    adapters.attach(session, opener.device(session))
    return _runner(opener, session, head, spec, adapters, tree, trials)


def _runner(
    opener: Opener,
    session: ort.InferenceSession,
    head: Head,
    spec: DecoderSpec,
    adapters: Adapters,
    tree: TreeAttentionGraph | None,
    trials: Sequence[AttentionTrial] | None,
) -> OpenedRunner:
    """The runner of an opened decoder, and the longest step that trials leave it. `trials` are made of attention over a
    paged cache that has taken the place of another one."""
    model, device = opener.model, opener.device(session)
    num_slots, origin = choose_num_slots(model.settings, spec, device)
    place = KvPlace(session, spec, num_slots, device, opener.helper)
    kv = _kv_form(spec, device)(place)
    chunk_size, notes = _trusted_steps(opener, spec, device)
    notes = [*spec.notes, *notes]
    facts = {**_facts(model), "num_slots_origin": origin, "notes": notes, **adapters.describe()}
    parts = OrtParts(
        compiled=opener.compiled,
        embedding=opener.embedding(spec, device) if spec.embeddings else None,
        encoder=opener.encoder(spec, device, num_slots) if spec.cross else None,
        adapters=adapters,
        shared_prefix=SharedPrefixKv(ViewKv(replace(place, num_slots=1)), tree.biases) if tree else None,
        capture=Capture(session, device) if model.buckets.is_captured else None,
    )
    runner = OrtRunner(place, kv, head, facts, parts)
    if isinstance(kv, ReturnedKv) and parts.encoder is None:
        chunk_size = fitting_chunk_size(chunk_size, runner, notes)
    if isinstance(kv, ReturnedKv) and spec.is_splittable and num_slots > 1:
        _batch_rows(runner, kv, spec, chunk_size)
    if trials is not None and (problem := against_packed_steps(runner, trials)):
        runner.close()
        raise NotPagedError(problem)
    if tree and (problem := check_tree_batches(runner, spec.vocab_size)):
        runner.traits = replace(runner.traits, tree_batches=False)
        notes.append(f"{ONE_BY_ONE}: {problem}")
    group_rows(runner, spec, device, chunk_size, notes)
    opened = with_buckets(runner, spec.vocab_size, chunk_size, model.buckets, notes)
    if opener.form == "answers" and num_slots > 1:
        _share_answer_steps(opened, spec, notes)
    _refuse_parts(opened, spec, chunk_size, model)
    return OpenedRunner(opened, chunk_size)


def _trusted_steps(opener: Opener, spec: DecoderSpec, device: Device) -> tuple[int, list[str]]:
    """The most tokens of a step that the device attends to rightly, and a note where these are few. Raises
    `ProviderError` for a model that takes its input whole."""
    size = opener.model.chunk_size[0]
    longest = size if spec.is_splittable else spec.context_length
    fitting, notes = fitting_attention(longest, device, spec, opener.helper)
    if notes and (spec.cross or not spec.is_splittable):
        raise ProviderError(f"{notes[0]}, and this model takes its input whole: use another provider")
    return min(size, fitting), notes


def _refuse_parts(runner: Runner, spec: DecoderSpec, chunk_size: int, model: ResolvedModel) -> None:
    """Raises `PartsDifferError` where texts must be fed whole and alone, and closes the runner."""
    is_open = model.device.kind == "cpu" and model.settings.engine.chunk_size == "auto"
    is_limited = not is_open or chunk_size < model.chunk_size[0] or model.buckets.steps != "none"
    longest = chunk_size if is_limited else spec.context_length
    numbers = spec.choices.numbers if spec.choices is not None else ()
    if problem := check_steps(runner, spec.vocab_size, longest, numbers, affordable(model.size)):
        runner.close()
        raise PartsDifferError(problem)


def _share_answer_steps(runner: Runner, spec: DecoderSpec, notes: list[str]) -> None:
    """Lets short answers share steps, if these agree."""
    problem = check_answer_steps(runner, spec.vocab_size)
    runner.traits = replace(runner.traits, answer_steps=problem is None)
    if problem is not None:
        notes.append(f"short answers share no steps: {problem}")


def _batch_rows(runner: OrtRunner, kv: ReturnedKv, spec: DecoderSpec, chunk_size: int) -> None:
    """Lets steps have several rows, as far as these must be alike. An encoder-decoder is not tried, because its encoder
    would have to run: its rows are behind equally many positions, and masks hide what fills up a source."""
    if spec.cross:
        mix: RowMix | None = RowMix(prompts=True, continued=True, sources=bool(spec.cross.masks))
    else:
        mix = find_row_mix(runner, spec.vocab_size, chunk_size, kv.pad_in_front)
    if mix is not None:
        runner.traits = replace(runner.traits, batching=Batching.ALIKE, row_mix=mix)


def _facts(model: ResolvedModel) -> dict[str, Any]:
    """What is known before the sessions are open."""
    return {
        "model": str(model.files.decoder),
        **dict(zip(("runtime", "runtime_origin"), model.runtime, strict=True)),
        **dict(zip(("decode_ahead", "decode_ahead_reason"), model.overlap, strict=True)),
    }


def _kv_form(spec: DecoderSpec, device: Device) -> Callable[[KvPlace], KvStore]:
    if spec.is_paged:
        return PagedKv
    if not spec.is_kv_in_place:
        return ReturnedKv
    return ViewKv if device.has_pointers else StagedKv
