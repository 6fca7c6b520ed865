"""What one model resolves to, with the reason for each decision: exactly what opening it would take.

`Findings` are facts and problems, plain data. On request the model's two forms of the graph are compared on real
tokens. Knows no recipe.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from olive_ext.config import EvaluationConfig
from olive_ext.errors import ModelError, NonFiniteError, OliveExtError
from olive_ext.model import ResolvedModel, resolve

if TYPE_CHECKING:
    from olive_ext.model import DecoderSpec, KvTensor
    from olive_ext.session import Session
    from olive_ext.text.tokenizer import Tokenizer

# ONNX's numbers of element types that caches and logits come in (onnx.TensorProto.DataType).
_ELEM_TYPES = {1: "float32", 2: "uint8", 3: "int8", 10: "float16", 16: "bfloat16", 17: "float8e4m3fn"}

_ELSEWHERE = {"kind", "model", "tokenizer", "runtime", "providers", "context_length", "kv_cache", "graph"}
"""Decisions that stand in the sections on files, providers and the graph, and not in the engine's."""

_NOTHING_TO_VERIFY = {
    "transformers": "there is nothing to verify: a Hugging Face model has no ONNX graph",
    "genai": "there is nothing to verify: onnxruntime-genai runs the graphs as they are",
}

PAIRS = (
    ("The capital of France is", " Paris, and the capital of Italy is Rome."),
    ("The capital of France is", " a word that this sentence does not give away."),
    ("Water boils at a temperature of", " one hundred degrees at sea level."),
    ("def add(a, b):\n    return", " a + b\n"),
    ("1, 2, 3, 4,", " 5, 6, 7, 8, 9, 10"),
    ("In the beginning there was nothing, and then", " there was a long list of numbers: 3.14159, 2.71828."),
)
"""Contexts and targets; two share a context."""

LARGEST_DIFFERENCE = 1e-2
"""Nats per token. Half-precision graphs may differ by rounding, as rows are multiplied in other groups; a wrong head
differs by far more."""


@dataclass(frozen=True)
class Fact:
    """One line: what it is about, what it came to, and why."""

    name: str
    value: str
    reason: str = ""


@dataclass
class Section:
    """Facts about one thing, in the order of resolution."""

    title: str
    facts: list[Fact] = field(default_factory=list)

    def add(self, name: str, value: object, reason: str = "") -> None:
        self.facts.append(Fact(name, str(value), reason))

    def __str__(self) -> str:
        width = max((len(fact.name) for fact in self.facts), default=0)
        lines = [
            f"  {fact.name:<{width}}  {fact.value}{f'  ({fact.reason})' if fact.reason else ''}\n"
            for fact in self.facts
        ]
        return "".join([f"{self.title}\n", *lines])


@dataclass
class Findings:
    """Everything a check found; `problems` are sentences that name what is wrong."""

    sections: list[Section] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def section(self, title: str) -> Section:
        """A new section at the end."""
        self.sections.append(Section(title))
        return self.sections[-1]

    @contextmanager
    def noting_problems(self) -> Iterator[None]:
        """A user's error in the block becomes a problem, and the check goes on behind it."""
        try:
            yield
        except OliveExtError as error:
            self.problems += [] if str(error) in self.problems else [str(error)]

    def extend(self, other: Findings, where: str) -> None:
        """Takes over what another check found, under titles that begin with `where`."""
        self.sections += [Section(f"{where}: {section.title}", section.facts) for section in other.sections]
        self.problems += [f"{where}: {problem}" for problem in other.problems]

    def text(self) -> str:
        """The sections for a terminal: names in a column, reasons behind the values."""
        return "\n".join(str(section) for section in self.sections if section.facts)


def check_model(config: EvaluationConfig, *, verify: bool = False, handed_over: Any = None) -> Findings:
    """Files, providers, KV layout, tokenizer, scoring head and all decisions; what goes wrong is a problem.

    `handed_over` is the provider that Olive's accelerator names. With `verify` the model is also run, see
    `verify_graphs` and `verify_steps`. The tasks are not looked at.
    """
    from olive_ext.check.graph_check import verify_steps

    findings = Findings()
    with findings.noting_problems():
        model = replace(resolve(config.opening(), handed_over=handed_over), is_compared=config.reference is not None)
        _check(model, findings)
        if verify and (problem := _NOTHING_TO_VERIFY.get(model.runtime[0])):
            findings.problems.append(problem)
        elif verify and not findings.problems:
            section = findings.section("Verification")
            verify_graphs(model, section)
            verify_steps(model, section.add)
    return findings


def _check(model: ResolvedModel, findings: Findings) -> None:
    from olive_ext.check.media_check import add_media
    from olive_ext.check.speech_check import add_source, refuse_texts

    _add_files(model, findings.section("Model"))
    with findings.noting_problems():
        _add_providers(model, findings.section("Providers"))
    if model.kind == "hf":
        return
    findings.section("Runtime").add("runtime", *model.runtime)
    if model.runtime[0] == "onnxruntime":
        with findings.noting_problems():
            _add_decoder(model, findings)
        media, source = findings.section("Pictures and sound"), findings.section("Encoder and decoder")
    tokenizer = None
    with findings.noting_problems():
        tokenizer = _add_tokenizer(model, findings.section("Tokenizer"))
        refuse_texts(model, tokenizer)
    if model.runtime[0] == "onnxruntime":
        with findings.noting_problems():
            add_media(model, tokenizer, media.add)
        if tokenizer is not None:
            with findings.noting_problems():
                add_source(model, tokenizer, source.add)
    with findings.noting_problems():
        _add_decisions(model, findings.section("Engine"))


def _add_files(model: ResolvedModel, section: Section) -> None:
    section.add("kind", model.kind, model.kind_reason)
    if model.kind == "hf":
        section.add("path", model.settings.model, "runs on transformers")
        return
    files = model.files
    section.add("decoder", files.decoder, files.origins.get("decoder", ""))
    section.add("directory", files.directory)
    section.add("genai_config", "found" if files.genai_config else "none", files.origins.get("genai_config", ""))
    section.add("size on disk", f"{(model.size or 0) / 2**20:.1f} MiB")


def _add_providers(model: ResolvedModel, section: Section) -> None:
    for provider in model.providers:
        options = ", ".join(f"{key}={value}" for key, value in provider.options.items())
        section.add(provider.name, f"memory: {provider.device}{f'; {options}' if options else ''}", provider.origin)


def _add_decoder(model: ResolvedModel, findings: Findings) -> None:
    from olive_ext.engine.runners.ort.head import with_head
    from olive_ext.graph.onnx_file import load_graph

    spec, config = model.spec, model.settings.engine
    _add_interface(spec, findings.section("Decoder"), "max_length" if model.settings.max_length else "")
    head = with_head(load_graph(model.files.decoder), spec)
    section = findings.section("Scoring head")
    section.add("graph", config.graph, "engine.graph")
    section.add("kind", head.kind, f"not in use; {head.reason}" if config.graph == "untouched" else head.reason)


def _add_interface(spec: DecoderSpec, section: Section, length_reason: str) -> None:
    section.add("context length", spec.context_length, length_reason)
    section.add("vocabulary", spec.vocab_size)
    section.add("logits", f"{spec.logits.name}, {_elem_type(spec.logits.elem_type)}")
    for name, layout in kv_layout(spec.kv):
        section.add(name, layout)
    section.add("KV cache", "updated in place" if spec.is_kv_in_place else "returned grown at every step")
    for note in spec.notes:
        section.add("note", note)


def kv_layout(kv: Sequence[KvTensor]) -> Iterator[tuple[str, str]]:
    """(which layers, their layout), one entry for neighbouring layers that are alike. Keys and values alternate."""
    texts = [f"{tensor.heads} heads x {tensor.head_size}, {_elem_type(tensor.elem_type)}" for tensor in kv]
    per_layer = [" / ".join(dict.fromkeys(texts[index : index + 2])) for index in range(0, len(texts), 2)]
    for layout, run in groupby(enumerate(per_layer), key=lambda item: item[1]):
        numbers = [layer for layer, _ in run]
        name = f"layer {numbers[0]}" if len(numbers) == 1 else f"layers {numbers[0]}-{numbers[-1]}"
        yield name, layout


def _elem_type(number: int) -> str:
    return _ELEM_TYPES.get(number, f"ONNX element type {number}")


def _add_tokenizer(model: ResolvedModel, section: Section) -> Tokenizer:
    from olive_ext.session.opening import open_tokenizer

    section.add("place", model.files.tokenizer, model.files.origins.get("tokenizer", ""))
    tokenizer = open_tokenizer(model)
    section.add("class", type(tokenizer.hf).__name__)
    section.add("tokens", len(tokenizer.hf))
    section.add("BOS, EOS", f"{tokenizer.bos_token_id}, {tokenizer.eos_token_id}")
    section.add("chat template", "yes" if getattr(tokenizer.hf, "chat_template", None) else "no")
    return tokenizer


def _add_decisions(model: ResolvedModel, section: Section) -> None:
    """What the engine takes; "predicted" and "tried" ones may change when the model is opened."""
    from olive_ext.check.graph_check import add_placement, on_graph

    for decision in (on_graph(model, decision) for decision in model.decisions):
        if decision.name not in _ELSEWHERE:
            state = "" if decision.state == "decided" else f"{decision.state}: "
            section.add(decision.name, decision.value, f"{state}{decision.reason}")
    add_placement(model, section.add)


def verify_graphs(model: ResolvedModel, section: Section, open_session: Callable[..., Session] | None = None) -> None:
    """Scores `PAIRS` on both forms of the graph and notes the largest difference of a token's log-probability.

    `open_session` stands in for `session.opening.open_model`. Raises `ModelError` when the difference is above
    `LARGEST_DIFFERENCE`, and for outputs that are not finite, with the layer where they begin.
    """
    from olive_ext.session.opening import open_model

    opener = open_session or open_model
    try:
        edited, untouched = (_token_logprobs(model, graph, opener) for graph in ("scoring_head", "untouched"))
    except NonFiniteError as error:
        raise ModelError(f"{error.found}; {_first_layer(model)}") from error
    pairs = zip(edited, untouched, strict=True)
    largest = max((_difference(one, other) for one, other in pairs), default=0.0)
    section.add("tokens compared", len(edited), "scoring head against the untouched graph")
    section.add("largest difference", f"{largest:.3g} nats", f"at most {LARGEST_DIFFERENCE:g} is rounding")
    if largest > LARGEST_DIFFERENCE:
        raise ModelError(
            f"the scoring head's log-probabilities differ from the untouched graph's by up to {largest:.3g} nats; "
            "set engine.graph to 'untouched' and report this model"
        )


def _first_layer(model: ResolvedModel) -> str:
    """Where the model's output stops to be finite, or why that cannot be told."""
    from olive_ext.engine.runners.ort.first_non_finite import first_non_finite
    from olive_ext.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(model.files.tokenizer, trust_remote_code=model.settings.trust_remote_code)
    try:
        found = first_non_finite(model, tokenizer.encode("".join(PAIRS[0])))
        return found or "no node's output shows it"
    except OliveExtError as error:
        return str(error)


def _difference(one: float, other: float) -> float:
    """NaN is no agreement, and two infinities of one sign are."""
    difference = abs(one - other) if one != other else 0.0
    return math.inf if math.isnan(difference) else difference


def _token_logprobs(model: ResolvedModel, graph: str, open_session: Callable[..., Session]) -> list[float]:
    """Log-probabilities of all target tokens of `PAIRS` in order, in nats."""
    from olive_ext.text.requests import ScoringRequest

    engine = model.settings.engine.model_copy(update={"graph": graph})
    with open_session(model.patched({"engine": engine})) as session:
        encoding = session.encoding
        if encoding is not None and encoding.takes_features:
            raise ModelError(
                "the model's encoder takes features of sound, of which there are none here to compare with"
            )
        outputs = session.loglikelihood(
            PAIRS if encoding is None else [ScoringRequest("", target, context) for context, target in PAIRS]
        )
    return [logprob for output in outputs for logprob in output.token_logprobs]
