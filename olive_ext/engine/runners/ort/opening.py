"""Opens a runner on ONNX Runtime: chooses the form of its steps, rewrites the graph, opens the session, allocates the
slots, and tries what shows on an open session only. Knows no text.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path

import onnxruntime as ort

from olive_ext.engine.forms.graph_form import (
    ONE_BY_ONE,
    GraphForm,
    NotCapturedError,
    NotFittingError,
    OpenedDecoder,
    decoder_graph,
)
from olive_ext.engine.forms.kv_store import KvPlace
from olive_ext.engine.forms.packed.capture import PackedCapture
from olive_ext.engine.forms.registry import choose
from olive_ext.engine.forms.rows.capture import Capture
from olive_ext.engine.runners.ort.bound_weights import BoundWeights, StepStates
from olive_ext.engine.runners.ort.head import ScoringHead
from olive_ext.engine.runners.ort.inputs import Adapters
from olive_ext.engine.runners.ort.ort_runner import OrtParts, OrtRunner
from olive_ext.engine.runners.ort.placement import MisplacedError
from olive_ext.engine.runners.ort.sessions import Sessions
from olive_ext.engine.runners.runner import OpenedRunner
from olive_ext.engine.runners.trials import affordable, check_steps, fitting_attention, group_rows
from olive_ext.errors import ModelError, ProviderError, understood
from olive_ext.graph.onnx_file import ModelProto
from olive_ext.model import ResolvedModel
from olive_ext.model.decisions import choose_num_slots, shared_positions
from olive_ext.model.providers.compiled import Compiled
from olive_ext.model.types import DecoderSpec

logger = logging.getLogger(__name__)


class PartsDifferError(Exception):
    """How far texts that are fed in parts, or in company, are from those fed whole and alone."""


class FellBackError(Exception):
    """The session runs on the CPU, which the model was not resolved for."""


def open_ort_runner(
    model: ResolvedModel, profile_prefix: Path | None = None, weights: Mapping[Path, BoundWeights] | None = None
) -> OpenedRunner:
    """A runner of the model's graphs in sessions of ONNX Runtime.

    Raises `ModelError` for a graph that cannot be scored or run, and `ProviderError` where a provider does not come up
    or has no kernel for nodes with large values. `profile_prefix` makes ONNX Runtime write a profile;
    `weights` are bound to the runs of the graphs in these files.
    """
    if weights:  # a captured step reads the same ones ever after
        model = _plain(model)
    sessions = Sessions(model, profile_prefix, Compiled(model.settings.engine), weights or {})
    try:
        with understood(model.files.decoder):
            return _open(sessions)
    except MisplacedError as error:
        host = model.providers[-1:]
        if not model.settings.allow_cpu_fallback or host[0].device != "cpu":
            raise ProviderError(f"{error}; 'allow_cpu_fallback' would run the whole model on the CPU") from error
        logger.warning("%s; running the whole model on the CPU", error)
        return _open(replace(sessions, model=replace(model, session_providers=host)))


def _open(sessions: Sessions) -> OpenedRunner:
    """Opens the decoder in one form after the other, until one holds what it promises."""
    problems: dict[str, str] = {}
    not_captured: tuple[str, ...] = ()
    while True:
        model = sessions.model
        form, decision = choose(model, problems)
        notes = [f"{ONE_BY_ONE}: {problem}" for problem in problems.values()]
        if not notes and decision.reason.startswith(ONE_BY_ONE):
            notes = [decision.reason]
        try:
            return _open_in(form, sessions, (*notes, *not_captured))
        except NotFittingError as error:
            logger.warning("%s: %s", ONE_BY_ONE, error)
            problems[form.name] = str(error)
            not_captured = tuple(note for note in not_captured if note.split(": ", 1)[1] not in str(error))
        except PartsDifferError as error:
            logger.warning("each request is fed whole and alone: %s", error)
            sessions = replace(sessions, model=replace(model, parts_failure=str(error)))
        except NotCapturedError as error:
            logger.warning("steps are not captured: %s", error)
            sessions, not_captured = replace(sessions, model=_plain(model)), (f"steps are not captured: {error}",)
        except FellBackError:
            sessions = replace(sessions, model=replace(model, session_providers=model.providers[-1:]))


def _plain(model: ResolvedModel) -> ResolvedModel:
    """The model without captured steps, where nobody demands these."""
    engine = model.settings.engine
    is_tried = engine.graph_capture == "auto"
    return model.patched({"engine": engine.model_copy(update={"graph_capture": False})}) if is_tried else model


def _open_in(form: GraphForm, sessions: Sessions, notes: tuple[str, ...]) -> OpenedRunner:
    """The decoder in this form. Raises what `_open` goes on from: another form, or another opening."""
    model = sessions.model
    adapters = Adapters(model.settings.engine.adapters)
    given, spec = decoder_graph(model, notes)
    proto, spec = form.rewrite(given, spec)
    is_rewritten = proto is not given
    del given  # inline weights would stay in memory twice
    try:
        session, head = sessions.decoder(proto, spec)
    except (ModelError, ProviderError) as error:
        if model.capture(spec).is_tried:
            raise NotCapturedError(str(error)) from error
        if is_rewritten:  # a release may lack what the form's operators take; what else is wrong, the next form meets
            raise NotFittingError(f"ONNX Runtime {ort.__version__} refuses the rewritten graph: {error}") from error
        raise
    del proto
    if sessions.device(session).kind != model.device.kind:
        if model.capture(spec).is_tried:
            raise NotCapturedError("ONNX Runtime falls back to the CPU")
        raise FellBackError
    adapters.attach(session, sessions.device(session))
    decoder = _decoder(form, sessions, (session, head, spec), adapters)
    try:
        form.trial(decoder)
        group_rows(decoder.runner, spec, model.device, decoder.chunk_size, decoder.notes)
        form.finish(decoder)
        _refuse_parts(decoder)
    except (NotFittingError, NotCapturedError, PartsDifferError, ProviderError):
        decoder.runner.close()
        raise
    weights = sessions.weights.get(model.files.decoder)
    if weights is not None and isinstance(decoder.runner, OrtRunner):
        weights.opened(partial(_open_above, sessions, form, decoder, head))
    return OpenedRunner(decoder.runner, decoder.chunk_size)


def _open_above(
    sessions: Sessions,
    form: GraphForm,
    decoder: OpenedDecoder,
    head: ScoringHead,
    proto: ModelProto,
    states: StepStates,
) -> OpenedRunner:
    """A part of an open decoder's graph, with caches of its own: steps are those of the whole, untried."""
    whole, taken = decoder.runner, {value.name for value in proto.graph.input}
    assert isinstance(whole, OrtRunner)
    kv = tuple(tensor for tensor in decoder.spec.kv if tensor.past in taken)
    own = tuple(tensor for tensor in decoder.spec.states if tensor.past in taken)
    spec = replace(decoder.spec, kv=kv, states=own)
    session = sessions.part(proto)
    device = sessions.device(session)
    place = replace(whole.place, session=session, spec=spec, device=device, num_slots=whole.capacity.num_slots)
    runner = whole.above(place, form.allocate(place), copy(head), states)
    return OpenedRunner(runner, decoder.chunk_size)


def _decoder(
    form: GraphForm,
    sessions: Sessions,
    opened: tuple[ort.InferenceSession, ScoringHead, DecoderSpec],
    adapters: Adapters,
) -> OpenedDecoder:
    """The runner of an open session, before it is tried."""
    (session, head, spec), model = opened, sessions.model
    device = sessions.device(session)
    num_slots, origin = choose_num_slots(model.settings, spec, device)
    place = KvPlace(session, spec, num_slots, device, sessions.helper, shared_positions(model.settings, spec, device))
    store = form.allocate(place)
    chunk_size, notes = _trusted_steps(sessions, spec)
    notes = [*spec.notes, *notes]
    if reason := model.capture(spec).reason:
        notes.append(f"steps are not captured: {reason}")
    captured_by = PackedCapture if spec.is_paged else Capture
    weights = sessions.weights.get(model.files.decoder)
    facts = {
        "model": str(model.files.decoder),
        "runtime": model.runtime.name,
        "runtime_origin": model.runtime_reason,
        **dict(zip(("decode_ahead", "decode_ahead_reason"), model.overlapped_steps, strict=True)),
        "num_slots_origin": origin,
        "notes": notes,
        **adapters.describe(),
    }
    parts = OrtParts(
        compiled=sessions.compiled,
        embedding=sessions.embedding(spec, device) if spec.embeddings else None,
        encoder=sessions.encoder(spec, device, num_slots) if spec.cross else None,
        adapters=adapters,
        weights=weights,
        states=weights.states if weights is not None else None,
        capture=captured_by(session, device) if model.capture(spec).is_captured else None,
    )
    return OpenedDecoder(model, spec, OrtRunner(place, store, head, facts, parts), chunk_size, notes)


def _trusted_steps(sessions: Sessions, spec: DecoderSpec) -> tuple[int, list[str]]:
    """The most tokens of a step that the device attends to rightly, and a note where these are few. Raises
    `ProviderError` for a model that takes its input whole."""
    model = sessions.model
    size = model.chunk_size[0]
    longest = size if spec.is_splittable else spec.context_length
    fitting, notes = fitting_attention(longest, model.device, spec, sessions.helper)
    if notes and (spec.cross or not spec.is_splittable):
        raise ProviderError(f"{notes[0]}, and this model takes its input whole: use another provider")
    return min(size, fitting), notes


def _refuse_parts(decoder: OpenedDecoder) -> None:
    model, spec, chunk_size = decoder.model, decoder.spec, decoder.chunk_size
    is_open = model.device.kind == "cpu" and model.settings.engine.chunk_size == "auto"
    is_limited = not is_open or chunk_size < model.chunk_size[0] or model.buckets.steps != "none"
    longest = chunk_size if is_limited else spec.context_length
    numbers = spec.choices.numbers if spec.choices is not None else ()
    if problem := check_steps(decoder.runner, spec.vocab_size, longest, numbers, affordable(model.size)):
        raise PartsDifferError(problem)
