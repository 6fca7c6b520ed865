"""What one model resolves to: `ResolvedModel.decisions`, each with its reason; what it takes besides text (encoders
with their features, processors and budgets; what an encoder-decoder's decoder begins with); and what prevents opening
it.

`Findings` are facts and problems, plain data. Knows no recipe and no session.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from olive_ext.config import EngineConfig, EvaluationConfig, ReferenceConfig
from olive_ext.errors import (
    DamagedError,
    ModelError,
    NonFiniteError,
    NotComparableError,
    OliveExtError,
    ProviderError,
    TaskError,
    UnsupportedError,
    first_line,
    listed,
)
from olive_ext.model import ResolvedModel, resolve
from olive_ext.model.decisions import Decision, choose_encoder_rows
from olive_ext.model.files.content import load_graph
from olive_ext.model.files.hub import offline_if_unreachable
from olive_ext.model.files.package_config import named_ids
from olive_ext.model.runtimes import refuse_settings
from olive_ext.model.types import MediaEncoderSpec
from olive_ext.registry import hook
from olive_ext.report.numbers import predicted

if TYPE_CHECKING:
    from olive_ext.report.comparison import Status
    from olive_ext.session import Session
    from olive_ext.session.generation_bounds import StopIds
    from olive_ext.session.local import Texts
    from olive_ext.session.tokenizer import Tokenizer


_NEAR = 1.0
"""Nats, at most, by which a quantized model of sound weights differs at 8 bits: 0.2 to 0.8."""


@dataclass(frozen=True)
class Fact:
    """One line: its subject, its value, and why."""

    name: str
    value: str
    reason: str = ""


@dataclass
class Section:
    """Facts about one thing, in the order of resolution."""

    title: str
    facts: list[Fact] = field(default_factory=list)
    is_measured: bool = False
    """Whether it holds even where something is wrong: the model was run for it, or it is about tasks."""

    def add(self, name: str, value: object, reason: str = "") -> None:
        """Appends a fact."""
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
    """Everything a check found; `errors` name what is wrong, and `differences` from a checkpoint what was lost."""

    sections: list[Section] = field(default_factory=list)
    errors: list[OliveExtError] = field(default_factory=list)
    differences: list[OliveExtError] = field(default_factory=list)
    is_undecided: bool = False
    """Whether the comparison with a checkpoint decides nothing."""

    @property
    def problems(self) -> list[str]:
        """The sentences of errors and differences, each once."""
        return list(dict.fromkeys(map(str, [*self.errors, *self.differences])))

    @property
    def status(self) -> Status:
        """That of a verdict on the comparison with a checkpoint."""
        return "loss" if self.differences else "unknown" if self.is_undecided else "ok"

    def section(self, title: str, *, is_measured: bool = False) -> Section:
        """A new section at the end."""
        self.sections.append(Section(title, is_measured=is_measured))
        return self.sections[-1]

    @contextmanager
    def noting_problems(self) -> Iterator[None]:
        """Turns a user's error within it into a problem; the check goes on."""
        try:
            yield
        except OliveExtError as error:
            self.errors.append(error)

    def extend(self, other: Findings, where: str) -> None:
        """Adds what another check found, under titles that begin with `where`."""
        self.sections += [Section(f"{where}: {section.title}", section.facts) for section in other.sections]
        self.errors += [error.inside(where, where) for error in other.errors]

    def text(self) -> str:
        """The sections for a terminal: names in a column, reasons after the values."""
        return "\n".join(str(section) for section in self.sections if section.facts)

    __str__ = text


def check_model(
    config: EvaluationConfig, *, verify: bool = False, against: str | None = None, work: bool = False
) -> Findings:
    """The decisions that opening the model of `config` takes, and what its encoders take; what goes wrong is a problem.
    With `verify` the model is also run (`verify_graphs`, `verify_steps`); with `against` it is compared with that
    checkpoint (`_hold_against`). Only with `work` are the tasks loaded, to say how much they ask and about how long
    that takes."""
    from olive_ext.session.tokenizer import each_loaded_once

    findings = Findings()
    with findings.noting_problems(), each_loaded_once():
        with offline_if_unreachable([config.model.path]):
            model = replace(_given(config), is_compared=config.reference is not None)
        _check(model, config, findings)
        if work:
            _add_work(model, config, findings.section("Work", is_measured=True), verify=verify)
        if verify and not model.runtime.runs_graph:
            findings.errors.append(UnsupportedError(model.runtime.nothing_to_verify))
        elif verify and not findings.errors:
            section = findings.section("Verification", is_measured=True)
            verify_graphs(model, section.add)
            verify_steps(model, section.add)
        if against is not None and not findings.errors:
            _hold_against(model, config, against, findings)
    return findings


def _add_work(model: ResolvedModel, config: EvaluationConfig, section: Section, *, verify: bool) -> None:
    """Adds documents, requests, tokens, time and memory of the tasks. With `verify` a step is timed."""
    from olive_ext.backends.lm_eval_run import run_tasks
    from olive_ext.backends.task_loading import load_tasks
    from olive_ext.backends.workload import CountingLM, forecast
    from olive_ext.run.bounds import requested_tasks
    from olive_ext.run.task_fit import refuse_misfits
    from olive_ext.session.local import open_tokenizer

    lm = CountingLM(open_tokenizer(model).encode)
    more: dict[str, Any] = {"runs_code": config.confirm_run_unsafe_code, "repeats": config.repeats}
    tasks = load_tasks(requested_tasks(config), config.include_path, config.seed, config.metadata, **more)
    refuse_misfits(model, tasks.configs)
    plain = {"bootstrap_iters": 0, "apply_chat_template": False, "confirm_run_unsafe_code": False}
    with suppress(TaskError):  # a task's own code may refuse answers of nothing
        run_tasks(lm, tasks, config.model_copy(update=plain))
    section.add("asked", lm.work)
    section.add("takes", forecast(model, lm.work), "a reference beside it takes as long again; --verify times a step")
    if verify:
        rate = _timed(model)
        prompts = f"{predicted(sum(lm.work.tokens) / rate)} for the prompts"
        section.add("a step was timed", prompts, f"{rate:,.0f} tokens/s")


def _timed(model: ResolvedModel) -> float:
    """Tokens of a text that this machine scores in a second, the best of three runs."""
    from olive_ext.run.task_fit import DEFAULT_LENGTH
    from olive_ext.session.opening import open_model
    from olive_ext.session.requests import ScoringRequest

    length = min(model.chunk_size[0], model.context_length or DEFAULT_LENGTH) - 1
    with open_model(model) as session:
        rng, seconds = random.Random(0), []
        for _ in range(3):
            text = [rng.randrange(model.spec.vocab_size) for _ in range(length)]
            begin = time.perf_counter()
            session.loglikelihood([ScoringRequest(text[:1], text[1:])])
            seconds.append(time.perf_counter() - begin)
    return length / min(seconds)


def _given(config: EvaluationConfig) -> ResolvedModel:
    """The model as an evaluation opens it. What opens models there takes a while to import."""
    if not config.model_args:
        return resolve(config.opening())
    from olive_ext.run.models import Models

    return Models(config).given_candidate


def _hold_against(model: ResolvedModel, config: EvaluationConfig, checkpoint: str, findings: Findings) -> None:
    """Adds how far the model is from its checkpoint, and what it lost: numbers, end tokens, prompts, sound files."""
    from olive_ext.model.spec.checkpoint import read_rotary_lengths
    from olive_ext.run.model_facts import contexts_of, damage_of, ends_of, stops_of
    from olive_ext.run.models import Models

    other, lost = resolve(model.settings.of_reference(checkpoint)), findings.differences
    if (stops := stops_of(ends_of(other), ends_of(model))) is not None and stops.differ:
        lost.append(NotComparableError(stops.sentence()))
    agreement = hook("hold_against", "--against")(model, other)
    section = findings.section(f"Against {checkpoint}", is_measured=True)
    chats = {
        "reference": ReferenceConfig(path=checkpoint, export="never"),
        "apply_chat_template": config.apply_chat_template or True,
    }
    models = Models(config.model_copy(update=chats))
    with findings.noting_problems(), suppress(ModelError):  # a checkpoint without a tokenizer
        if (asked := models.prompt_diff) is not None:
            lost.append(NotComparableError(asked.sentence()))
        if models.other_template and not models.prompt_format(model).template:
            lost.append(NotComparableError("the model has no chat template, and the checkpoint has one"))
        elif models.other_template:
            section.add("chat template", "another text than the checkpoint's", "held against nothing without tasks")
    by_length = ", ".join(f"{text.num_tokens}: {text.nats:.2g}" for text in agreement.texts)
    why = f"of random tokens the largest difference; at most {agreement.bound:.2g} is {agreement.bound_reason}"
    section.add("nats by length", by_length, why)
    if contexts := contexts_of(model.context_length, other.context_length):
        section.add("context length", "{} of {}".format(*contexts), "longer texts are cut, and held against nothing")
    for name, number in agreement.unseen.items():
        section.add("not reached", f"'{name}' of {number}", "no text is that long: 'max_length' sets the longest text")
    own_parts = "its positions go by length" * (read_rotary_lengths(other.processor_files.hf_config) is not None)
    damaged = damage_of({"parts_failure": own_parts}, {"parts_failure": agreement.parts})
    is_near = agreement.is_equal or (agreement.is_undecided and agreement.nats < _NEAR)
    files = models.damage(0.0 if is_near else None)
    damaged |= files.findings
    if files.judged:
        section.add("other constants", listed(files.judged, 3), "not the checkpoint's: tasks show what that costs")
    if files.uncompared:
        why = "of other names, shapes or scales than the checkpoint's"
        section.add("constants not compared", files.uncompared, why)
    lost += [DamagedError(f"damaged: '{name}' {how}") for name, how in damaged.items()]
    findings.is_undecided = agreement.is_undecided
    if agreement.is_equal or agreement.is_undecided:
        section.add("result", agreement.sentence())
    else:
        lost.append(NotComparableError(agreement.sentence()))
    for difference in lost:
        section.add("result", difference)


def _check(model: ResolvedModel, config: EvaluationConfig, findings: Findings) -> None:
    from olive_ext.run.models import Models
    from olive_ext.session.local import open_tokenizer, read_texts
    from olive_ext.session.tokenizer_fit import refuse_template

    section, is_ours = findings.section("Decisions"), model.runtime.runs_graph
    with findings.noting_problems():
        for decision in (_as_graph_allows(model, decision) for decision in model.decisions):
            state = "" if decision.state == "decided" else f"{decision.state}: "
            section.add(decision.name, decision.value, f"{state}{decision.reason}")
        reasons = [fact.reason for fact in section.facts]
        for note in model.spec.notes if is_ours else ():
            if note not in reasons:
                section.add("note", note)
        for name, what in Models(config).unjudged.items():
            section.add("not judged", f"{name} {what}", "the model's own runtime reads it")
    with findings.noting_problems():
        for sentence in refuse_settings(model):
            section.add("note", sentence)
    if model.kind == "hf":
        section.add("export", *_export(model, config))
    if model.kind == "hf" and not model.files.directory.is_dir():
        return
    tokenizer = texts = None
    with findings.noting_problems():
        tokenizer = open_tokenizer(model)
        if tokenizer.note:
            section.add("note", tokenizer.note)
        texts = read_texts(model, tokenizer)
        if isinstance(tokenizer.hf.chat_template, str) and tokenizer.has_chat_template:
            refuse_template(tokenizer)
        if not findings.errors:
            _add_ends(texts.stops, tokenizer, findings.section("Answers"))
    if not is_ours:
        return
    with findings.noting_problems():
        _add_placement(model, section)
    with findings.noting_problems():
        _add_media(model, tokenizer, findings.section("Pictures and sound").add)
    if texts is not None:
        with findings.noting_problems():
            _add_source(texts, findings.section("Encoder and decoder").add)


def _add_ends(stops: StopIds, tokenizer: Tokenizer, section: Section) -> None:
    section.add("end at", stops.described(tokenizer), stops.file)
    for token, file in stops.unused.items():
        text = stops.described(tokenizer, frozenset((token,)))
        section.add("note", f"they do not end at {text}, which {file} has for an end: {stops.file} does not name it")


def _export(model: ResolvedModel, config: EvaluationConfig) -> tuple[str, str]:
    """Whether an evaluation exports the Hugging Face model to ONNX before it runs it, and why not."""
    from olive_ext.run.export import obstacle

    if config.reference is not None and config.reference.export == "never":
        return "no", "'reference.export' = \"never\""
    reason = obstacle(model)
    return ("no", reason) if reason else ("yes", "made before the first evaluation, and kept; else transformers run it")


def _as_graph_allows(model: ResolvedModel, decision: Decision) -> Decision:
    """`decision`, with what the graph adds: where rows are picked for the head, what prevents the form of steps."""
    if decision.name == "graph":
        from olive_ext.engine.runners.ort.ort_runner import with_head

        _, head = with_head(load_graph(model.files.decoder), model.spec)
        return replace(decision, reason=f"{decision.reason}; {head.kind}: {head.reason}")
    if decision.name != "scoring":
        return decision
    from olive_ext.engine.forms.registry import choose

    form, _ = choose(model)
    problem = form.refusal_of_graph()
    return decision if problem is None else choose(model, {form.name: problem})[1]


def _add_placement(model: ResolvedModel, section: Section) -> None:
    """On a device other than the CPU, adds where nodes with large values would run. Raises `ProviderError` where
    opening would be refused."""
    from olive_ext.engine.runners.ort.opening import predict_misplaced

    device = model.device.kind
    if device == "cpu":
        return
    problem = predict_misplaced(load_graph(model.files.decoder), device)
    if problem is None:
        section.add("placement", device, "predicted: by the types of attention; ONNX Runtime's record decides")
    elif model.settings.allow_cpu_fallback:
        section.add("placement", "cpu", f"predicted: allow_cpu_fallback, since {problem}")
    else:
        raise ProviderError(f"'{model.files.decoder}' cannot run on the {device} device alone: {problem}")


def _add_media(model: ResolvedModel, tokenizer: Tokenizer | None, add: Callable[..., None]) -> None:
    """Adds what is known, and what the export computes otherwise than its original. Without a `tokenizer`, where it
    cannot be loaded, the texts of placeholders are left out. Raises `ModelError` for an encoder
    without a processor, and `ConfigError` for settings that allow no item."""
    media = model.media
    if media is None:
        return
    from olive_ext.engine.engine import item_limit
    from olive_ext.media.encoder import FEATURE_BYTES
    from olive_ext.media.processor import MediaProcessor

    if media.problem:
        add("refused", media.problem, "text runs without encoders")
    processors = MediaProcessor(media, model.files)
    for encoder in media.encoders:
        name, provider, real = encoder.modality.value, model.providers_of(encoder)[0], encoder.real_rows
        add(f"{name} encoder", encoder.files.graph, model.files.origins.get(encoder.part, ""))
        add(f"{name} provider", provider.name, provider.origin)
        inputs = ", ".join(f"{tensor.name} {list(tensor.shape)}" for tensor in encoder.inputs)
        add(f"{name} inputs", inputs)
        add(f"{name}s in a run", *_in_a_run(model, encoder))
        shown = ", ".join(f"{output.name} {list(output.shape)}" for output in encoder.outputs)
        add(f"{name} features", shown, f"their rows are cut by '{real.name}'" if real is not None else "")
        text = "" if tokenizer is None else f" {tokenizer.token_text(encoder.placeholder)!r}"
        add(f"{name} placeholder", f"{encoder.placeholder}{text}")
        processor, file = processors.processor_of(encoder.modality)
        add(f"{name} processor", type(processor).__name__, str(file))
    limit = item_limit(model, model.chunk_size[0])
    if problem := processors.problem_of(limit):
        add("refused", problem, "text needs no such step")
    processors.check_fixed(limit)
    add("tokens of an item", limit.tokens or "any number", limit.reason)
    if media.encoders:
        add("positions", "time, height, width" if media.has_rotary_grid else "one number for each token")
        add("per-layer inputs", "yes" if "per_layer_inputs" in model.spec.embeddings else "no")
        add("features kept", f"{FEATURE_BYTES >> 20} MiB on the device")
    for note in media.notes:
        add("note", note)


def _in_a_run(model: ResolvedModel, encoder: MediaEncoderSpec) -> tuple[str, str]:
    """How many items the encoder is given together, and why."""
    rows = choose_encoder_rows(model.settings, model.providers_of(encoder)[0].location)
    if encoder.one_by_one or rows == 1:
        return "one", encoder.one_by_one or "on the CPU, or 'deterministic': 'engine.encoder_batch_rows' asks for more"
    return f"up to {rows} rows of features", "where several, tried when the second comes, are what each is alone"


def _add_source(texts: Texts, add: Callable[..., None]) -> None:
    """Adds what an encoder-decoder's decoder begins with, and of a model of speech windows of sound, languages and what
    is never said. Raises `ModelError` for an extractor that does not fit, and `ConfigError` for a language or a
    task that the model does not have, and where no configuration says what its decoder begins with."""
    encoding = texts.encoding
    if encoding is None:
        return
    if (sound := encoding.sound) is not None:
        files = texts.model.processor_files
        add("sound", f"{sound.rate:,} samples a second", "WAV files, or samples at that rate")
        add("windows", f"{sound.seconds:g} s", "longer sound is answered in windows, and not scored")
        add("languages", listed(named_ids("lang_to_id", files)) or "none named", "'language'")
        add("tasks", listed(named_ids("task_to_id", files)) or "none named", "'speech_task'")
        suppressed = encoding.suppressed
        never = f"{len(suppressed.everywhere)} tokens, {len(suppressed.at_first)} more as the first"
        add("never generated", never, "suppress_tokens, begin_suppress_tokens")
    begins = texts.tokenizer.decode(encoding.begin(), skip_special_tokens=False)
    add("decoder begins with", begins, "then comes a task's text")


Add = Callable[[str, object, str], None]
"""Takes a fact: its name, its value and the reason."""

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
"""Nats per token. Half-precision graphs may differ by rounding, because rows are multiplied in other groups; a wrong
head differs by far more."""

FAR = 0.1
"""Nats per token, on average, from a device to the CPU. Where one of them rounds activations single tokens are up to
0.24 apart; those of kernels that compute nothing are whole nats apart."""


def verify_graphs(model: ResolvedModel, add: Add, open_session: Callable[..., Session] | None = None) -> None:
    """Scores `PAIRS` on both forms of the graph and adds the largest difference of a token's log-probability.

    `open_session` stands in for `session.opening.open_model`. Raises `ModelError` when the difference is above
    `LARGEST_DIFFERENCE`, and for outputs that are not finite, with the layer where they begin; `ProviderError` for a
    device that computes something else than the CPU.
    """
    from olive_ext.session.opening import open_model

    opener = open_session or open_model
    try:
        edited, untouched = (_token_logprobs(model, graph, opener) for graph in ("scoring_head", "untouched"))
    except NonFiniteError as error:
        raise ModelError(f"{error.finding}; {_first_layer(model)}") from error
    largest = max(map(_difference, edited, untouched), default=0.0)
    add("tokens compared", len(edited), "scoring head against the untouched graph")
    add("largest difference", f"{largest:.3g} nats", f"at most {LARGEST_DIFFERENCE:g} is rounding")
    if largest > LARGEST_DIFFERENCE:
        problem = f"the scoring head is up to {largest:.3g} nats off"
        raise ModelError(f"{problem}: set engine.graph to 'untouched', and report this model")
    if model.device.kind != "cpu":
        _hold_to_cpu(model, untouched, add, opener)


def _hold_to_cpu(model: ResolvedModel, found: list[float], add: Add, opener: Callable[..., Session]) -> None:
    """Two graphs on a device that computes wrongly may be wrong alike."""
    device = model.device.kind
    if len(found) > 1 and len(set(found)) == 1:
        raise ProviderError(f"all tokens have the log-probability {found[0]:.4g}: the {device} device computes nothing")
    on_cpu = {"execution_provider": "cpu", "provider_options": None, "engine": EngineConfig()}
    try:
        expected = _token_logprobs(model.patched(on_cpu), "untouched", opener)
    except OliveExtError as error:
        add("from the CPU", "unknown", f"it cannot run this model: {first_line(error)}")
        return
    mean = math.fsum(map(_difference, found, expected)) / len(found)
    add("from the CPU", f"{mean:.3g} nats on average", f"at most {FAR:g} is rounding")
    if mean > FAR:
        raise ProviderError(f"scores on the {device} device are {mean:.3g} nats a token off the CPU's: use another one")


def verify_steps(model: ResolvedModel, add: Add) -> None:
    """Compares texts beyond every number of positions in the graph, fed in parts and together with others, with texts
    fed whole.

    Raises `ModelError` where that changes a text's numbers and opening the model did not detect it.
    """
    from olive_ext.engine.engine import open_runner
    from olive_ext.engine.runners.trials import check_steps, tried_lengths

    engine = model.settings.engine.model_copy(update={"num_slots": 1 if model.spec.takes_one_row else 2})
    opened = open_runner(model.patched({"engine": engine}))
    numbers = model.spec.choices.numbers
    longest = model.spec.context_length if model.buckets.steps == "none" else opened.chunk_size
    with closing(opened.runner) as runner:
        is_whole = not runner.traits.chunked_prefill
        problem = None if is_whole else check_steps(runner, model.spec.vocab_size, longest, numbers, longest)
    if problem is not None:
        raise ModelError(f"{problem}: scores depend on this graph's steps, which opening it does not see; report it")
    lengths = ", ".join(map(str, tried_lengths(runner.traits, longest, numbers, longest)))
    tried = f"texts of {lengths} tokens, cut after 1 to 8, powers of two and a number between two of them"
    add("texts in parts and in company", "each is fed whole and alone" if is_whole else "as whole and alone", tried)


def _first_layer(model: ResolvedModel) -> str:
    """Where the model's output stops being finite, or why that cannot be found."""
    from olive_ext.engine.runners.ort.ort_runner import first_non_finite
    from olive_ext.session.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(model.files.tokenizer, trust_remote_code=model.settings.trust_remote_code)
    try:
        return first_non_finite(model, tokenizer.encode("".join(PAIRS[0]))) or "no node's output shows it"
    except OliveExtError as error:
        return str(error)


def _difference(one: float, other: float) -> float:
    """NaN is no agreement, and two infinities of one sign are."""
    difference = abs(one - other) if one != other else 0.0
    return math.inf if math.isnan(difference) else difference


def _token_logprobs(model: ResolvedModel, graph: str, open_session: Callable[..., Session]) -> list[float]:
    """Log-probabilities of all target tokens of `PAIRS` in order, in nats."""
    from olive_ext.session.requests import ScoringRequest

    engine = model.settings.engine.model_copy(update={"graph": graph})
    with open_session(model.patched({"engine": engine})) as session:
        encoding = session.encoding
        if encoding is not None and encoding.sound is not None:
            raise ModelError("the model's encoder takes features of sound, of which there are none here to compare")
        with_source = [ScoringRequest("", target, context) for context, target in PAIRS]
        outputs = session.loglikelihood(PAIRS if encoding is None else with_source)
    return [logprob for output in outputs for logprob in output.token_logprobs]
