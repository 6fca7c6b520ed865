"""A row of the table of agreement, and the one way in which it is tried: a package is opened and asked, and its answers
are held against a reference, or against those of another session on the same package."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import olive_ext
from olive_ext.engine.runners.trials import GROUPS
from olive_ext.errors import OliveExtError
from olive_ext.session import Session
from olive_ext.session.requests import GeneratedSequence, GenerationRequest, RollingRequest, ScoringRequest
from tests.agreement import asked as requests
from tests.agreement.packages import package, suppressed
from tests.agreement.references import (
    EOS,
    STOPS,
    Alone,
    Causal,
    EncoderDecoder,
    Plain,
    Reference,
    causal,
    encoder_decoder,
)
from tests.device.open import LIBRARY
from tests.device.watch import late_on_the_way, watching
from tests.exports import CONTEXT
from tests.exports.media import MEDIA_FAMILIES, SOUND_FAMILIES
from tests.families.pictures import MediaReference

Facts = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """A family as an exporter wrote it, in a precision, a form and on a provider; what it is held against; a bound."""

    package: str
    """Its name for `packages.package`: family, exporter, release, precision."""

    asked: str
    """Functions of `asked` with their arguments: "windows 25 100 + searches"."""

    nats: float
    """A log-probability may be as far off. Answers are equal; in half precision (see `is_exact`) each token is within
    twice as much of the most likely one, and the best beam's score within such a part."""

    against: str | Mapping[str, Any] = "transformers"
    """"transformers"; "itself": a checkpoint, which lacks nothing; "generate": answers are those of its `generate`;
    "plain", "groups": the export's own graph on the same provider, there over whole groups of rows; "alone": over each
    text and each beginning of an answer by itself; or the engine of another session, on the CPU."""

    engine: Mapping[str, Any] = field(default_factory=dict)
    """The form, and settings beside it. A chunk of "item" tokens is one of the largest item's."""

    facts: Mapping[str, Any] = field(default_factory=dict)
    """Of `describe_execution`: values, or what they must fit."""

    provider: str = ""
    same: Sequence[str] = ()
    """Counters that are those of the other session."""

    flags: bool = False
    """Whether each target is the greedy one is compared, too."""

    order: int = 0
    """A seed of the order in which requests come, and of the calls; 0 is their own."""

    may_be_refused: bool = False
    """Whether the package may be refused when it is opened."""

    is_observed: bool = False
    """Whether no session on the way of an item may meet a shape that it was not run with while it was opened."""

    @property
    def is_exact(self) -> bool:
        return self.nats < 1e-3

    def __str__(self) -> str:
        against = self.against if isinstance(self.against, str) else "another"
        engine = ",".join(f"{key}={value}" for key, value in self.engine.items())
        return f"{self.package} {against} {self.provider} {engine}"


@cache
def calls(asked: str, name: str) -> tuple[Sequence[requests.Request], ...]:
    """What a package is asked."""
    found = list[Sequence[requests.Request]]()
    for part in asked.split(" + "):
        function, *arguments = part.split()
        found += getattr(requests, function)(package(name), *map(int, arguments))
    return tuple(found)


def reference(against: str, name: str, provider: str = "") -> Any:
    """What a package is held against; one for all packages that were made from the same weights."""
    made = package(name)
    if against in ("plain", "groups", "alone"):
        return _plain(against, name, provider)
    return _reference(against, made.hf, made.family)


@cache
def _plain(against: str, name: str, provider: str) -> Plain:
    made = package(name)
    if provider == "cuda":
        made = replace(made, providers=("CUDAExecutionProvider", *made.providers))
    return Alone(made) if against == "alone" else Plain(made, GROUPS[-1] if against == "groups" else 1)


@cache
def _reference(against: str, hf: Path, family: str) -> Any:
    has_processor = any(hf.glob("*processor_config.json"))  # exports of text alone have none
    if has_processor and (family in MEDIA_FAMILIES or family in SOUND_FAMILIES):
        return MediaReference(family, hf, is_as_exported=against != "itself")
    if family in ("whisper", "t5", "marian"):
        return EncoderDecoder(hf, suppressed()) if against == "generate" else encoder_decoder(hf)
    if against == "generate":
        return Causal(hf, answers_by_generate=True, is_forgetful=family == "llama_dynamic")
    return causal(hf)


def opened(row: Row, engine: Mapping[str, Any], provider: str) -> Session:
    """The row's package with this engine, which may name components, too."""
    settings: dict[str, Any] = {"execution_provider": provider} if provider else {}
    if provider == "webgpu":
        settings["provider_libraries"] = LIBRARY
    if file := row.package.partition("/")[2]:
        settings["onnx_file_name"] = file
    settings |= {name: engine[name] for name in ("components", "deterministic") if name in engine}
    engine = {name: value for name, value in engine.items() if name not in settings}
    if engine.get("chunk_size") == "item":
        against = row.against if row.against == "itself" else "transformers"
        sizes = map(reference(against, row.package).num_tokens, requests.items(package(row.package)))
        engine["chunk_size"] = max(sizes)
    session = olive_ext.open(package(row.package).path, engine=engine, **settings)
    if "searches" in row.asked:
        session.stop_ids = frozenset(STOPS)
    return session


def ask(session: Session, asked: Sequence[Sequence[requests.Request]]) -> list[Any]:
    """The outputs of all calls, one after the other."""
    by_kind: dict[type, Callable[[Any], list[Any]]] = {
        ScoringRequest: session.loglikelihood,
        GenerationRequest: session.generate,
        RollingRequest: session.loglikelihood_rolling,
    }
    return [output for call in asked for output in by_kind[type(call[0])](list(call))]


def in_any_order(session: Session, asked: Mapping[Any, requests.Request], rng: random.Random) -> dict[Any, Any]:
    """Outputs by the requests' keys: in a random order, in one call of each kind or several, which alternate."""
    keys, found = list(asked), dict[Any, Any]()
    rng.shuffle(keys)
    cuts = sorted({0, len(keys), *rng.sample(range(len(keys) + 1), rng.choice((0, 1, 2, 3)))})
    for begin, end in pairwise(cuts):
        for kind in (ScoringRequest, GenerationRequest, RollingRequest):
            own = [key for key in keys[begin:end] if isinstance(asked[key], kind)]
            if kind is GenerationRequest and rng.random() < 0.5:
                found |= dict(session.generate_continuous([(key, asked[key]) for key in own]))
            elif own:
                found |= zip(own, ask(session, [[asked[key] for key in own]]), strict=True)
    return found


def check(row: Row) -> None:
    """Opens, asks and compares."""
    asked = calls(row.asked, row.package)
    flat = [request for call in asked for request in call]
    with watching() if row.is_observed else nullcontext() as observed, ExitStack() as stack:
        try:
            session = stack.enter_context(opened(row, row.engine, row.provider))
        except OliveExtError:
            assert row.may_be_refused
            return
        begin = len(observed.runs) if observed else 0
        if row.order:
            found = in_any_order(session, dict(enumerate(flat)), random.Random(row.order))
            outputs = [found[at] for at in range(len(flat))]
        else:
            outputs = ask(session, asked)
        facts, tokenizer = session.describe_execution(), session.tokenizer
        if observed:
            assert late_on_the_way(session, observed, begin) == []
            assert len(observed.runs) - begin > len(asked[0])
    assert outputs, "nothing was asked"
    if isinstance(row.against, str):
        theirs = reference(row.against, row.package, row.provider)
        for number, (request, output) in enumerate(zip(flat, outputs, strict=True)):
            _assert_fits(row, theirs, number, request, output, tokenizer)
    else:
        expected, others = _other(row, json.dumps(row.against))
        for request, output, other in zip(flat, outputs, expected, strict=True):
            _assert_same(row, request, output, other)
        assert [facts["counters"][name] for name in row.same] == [others["counters"][name] for name in row.same]
    for name, wanted in row.facts.items():
        found = facts.get(name)
        assert wanted(found) if callable(wanted) else found == wanted, (name, found)


_others: dict[tuple[str, str, str], tuple[list[Any], Facts]] = {}


def _other(row: Row, engine: str) -> tuple[list[Any], Facts]:
    """The outputs and facts of the session that rows are held against, which is opened once."""
    key = row.package, row.asked, engine
    if key not in _others:
        with opened(row, json.loads(engine), "cpu" if row.provider else "") as session:
            _others[key] = ask(session, calls(row.asked, row.package)), session.describe_execution()
    return _others[key]


def largest(found: Sequence[float], expected: Sequence[float]) -> float:
    """The largest difference."""
    return max(abs(one - other) for one, other in zip(found, expected, strict=True))


def _assert_same(row: Row, request: requests.Request, output: Any, expected: Any) -> None:
    if isinstance(request, ScoringRequest):
        assert largest(output.token_logprobs, expected.token_logprobs) < row.nats, request
        assert not row.flags or output.is_greedy == expected.is_greedy, request
    elif isinstance(request, RollingRequest):
        assert output.token_count == expected.token_count
        assert output.logprob == pytest.approx(expected.logprob, rel=1e-4)
    elif row.provider in ("", "cpu"):
        assert output == expected, request
    else:
        assert output.tokens == expected.tokens, request


_known: dict[tuple[Any, ...], Any] = {}
"""What references said, by what they were asked."""


def _once(key: tuple[Any, ...], compute: Callable[[], Any]) -> Any:
    if key not in _known:
        _known[key] = compute()
    return _known[key]


def _assert_fits(
    row: Row, theirs: Reference, number: int, request: requests.Request, output: Any, tokenizer: Any
) -> None:
    key = id(theirs), row.asked, number
    if isinstance(request, ScoringRequest):
        scores, is_greedy = _once(key, lambda: theirs.scored(request.context, request.target, theirs.given(request)))
        assert largest(output.token_logprobs, scores) < row.nats, request
        assert not row.flags or output.is_greedy == is_greedy, request
    elif isinstance(request, RollingRequest):
        text = request.text
        tokens = tokenizer.encode(text, add_special_tokens=False) if isinstance(text, str) else list(text)
        expected = _once(key, lambda: _rolled(theirs, tokens, tokenizer.prefix_token_id))
        assert output.token_count == len(tokens)
        assert output.logprob == pytest.approx(expected, rel=1e-4, abs=row.nats * len(tokens))
    elif request.num_beams > 1 or theirs.answers_by_generate:
        stops = STOPS if "searches" in row.asked else (EOS,)
        sequences, scores = _once(key, lambda: theirs.searched(request, stops))
        if not row.is_exact:
            assert output.sequences[0].score == pytest.approx(scores[0], rel=row.nats), request
            return
        assert output.tokens == sequences[0], request
        if scores:
            first = (output.text, output.tokens, output.sequences[0].score, output.finish_reason, output.stop_id)
            assert output.sequences[0] == GeneratedSequence(*first)
            assert [one.tokens for one in output.sequences] == sequences, request
            assert [one.score for one in output.sequences] == pytest.approx(scores, rel=1e-5)  # of fp32 recurrences
    else:
        given = theirs.given(request)
        ids = theirs.ids(request.prompt, given)
        most = request.max_new_tokens
        if not row.is_exact or row.against == "alone":
            assert theirs.below_the_best(ids, given, output) <= 2 * row.nats, request
            return
        assert _once((*key, output.tokens), lambda: theirs.continues(ids, given, output.tokens, most)), request


def _rolled(theirs: Reference, tokens: list[int], prefix: int) -> float:
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    windows = get_rolling_token_windows(tokens, prefix, CONTEXT, 1)
    return sum(sum(theirs.score(*pair)) for pair in map(make_disjoint_window, windows))
