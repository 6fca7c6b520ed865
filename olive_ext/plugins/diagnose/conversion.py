"""What an export lost of its checkpoint: how far an ONNX model and the transformers model that it was made of are apart
on random texts, from which length on, in which layer, and which value of the configuration was left out."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from olive_ext.engine.runners.hf_runner import PlainPass
from olive_ext.engine.runners.ort.plain_graph import PlainGraph
from olive_ext.errors import ModelError, UnsupportedError
from olive_ext.graph.nodes import few_bits, half_type, quantizing_operator
from olive_ext.model import ResolvedModel
from olive_ext.model.files.constants import Constants
from olive_ext.model.files.content import load_graph
from olive_ext.plugins.diagnose.module_states import EMBEDDED, NORMED, Rotated, layers_of, regroup, reweight, states_of
from olive_ext.run.export import LARGEST_DIFFERENCE, logprobs
from olive_ext.session.opening import open_model
from olive_ext.session.tokenizer import load_tokenizer

Text = tuple[int, ...]
Logprobs = npt.NDArray[np.float64]

ROUNDING_FACTOR = 4.0
"""How much farther from transformers in fp32 a graph may be than transformers in the graph's own precision, or in fp64
where that is fp32."""

EXPLAINED = 100.0
"""How much nearer transformers must come to the graph by what explains the difference."""

SHARP = 10.0
"""How much larger the largest difference must be than all before it, for texts to part at a length."""

SHORTEST, LONGEST = 4, 1024
"""Tokens of the shortest text, and of the longest where `max_length` does not say."""


@dataclass(frozen=True)
class _Scored:
    """The same texts by both."""

    checkpoint: ResolvedModel
    plain: PlainPass
    texts: list[Text]
    expected: list[Logprobs]
    given: list[Logprobs]
    num_ids: int
    """Those that are tokens."""

    parts: str = ""
    """As `Agreement.parts`."""

    @classmethod
    def by(cls, model: ResolvedModel, checkpoint: ResolvedModel) -> _Scored:
        """Raises `ModelError` for other vocabularies."""
        plain = PlainPass(checkpoint)
        num_tokens = load_tokenizer(model.files.tokenizer, trust_remote_code=model.settings.trust_remote_code).num_ids
        sizes = {plain.vocab_size, model.spec.vocab_size or plain.vocab_size}
        if len(sizes) > 1 and num_tokens > min(sizes):
            problem = f"'{model.name}' has {model.spec.vocab_size} tokens, '{checkpoint.name}' {plain.vocab_size}"
            raise ModelError(problem, code="not_comparable")
        num_ids = min(num_tokens, *sizes)
        texts = _texts(model, plain, num_ids)
        with open_model(model) as session:
            rows_left, parts = logprobs(session, texts), session.describe_execution().get("parts_failure", "")
        expected = [plain.logprobs(text) for text in texts]
        if num_tokens < plain.vocab_size:
            rows = zip(texts, rows_left, expected, strict=True)
            rows_left = [_without_taken(plain, num_tokens, *row) for row in rows]
        return cls(checkpoint, plain, texts, expected, rows_left, num_ids, parts)

    def with_weights_of(self, model: ResolvedModel) -> _Scored:
        """By transformers with the weights of `model`, and its graph without rounded activations. Raises `ModelError`
        where these need not be alike."""
        graph = PlainGraph(model, ())
        constants = Constants(load_graph(model.files.decoder), model.files.decoder)
        is_cache_rounded = few_bits(one.elem_type for one in model.spec.kv)
        if is_cache_rounded or not reweight(self.plain, constants):
            raise ModelError("they do not pair with the checkpoint's, or are far off, or more than weights is rounded")
        measured = [graph.logprobs(text, self.num_ids) for text in self.texts]
        expected = [self.plain.logprobs(text, self.num_ids) for text in self.texts]
        return replace(self, expected=expected, given=measured)

    def changed(self, dtype: str | None = None, changes: Mapping[str, Any] | None = None) -> PlainPass:
        """The checkpoint once more, as `PlainPass` takes it, with the same weights."""
        plain = PlainPass(self.checkpoint, dtype, changes)
        plain.take_weights(self.plain)
        return plain

    @cached_property
    def apart(self) -> list[Logprobs]:
        """Nats of each text's tokens."""
        return [_apart(one, other) for one, other in zip(self.given, self.expected, strict=True)]

    @property
    def differences(self) -> tuple[Difference, ...]:
        """The largest of each text."""
        return tuple(Difference(len(row) + 1, float(row.max())) for row in self.apart)

    def farthest_from(self, other: PlainPass, rows: Sequence[Logprobs], limit: float = np.inf) -> float:
        """The largest difference between `rows` and `other`; the first above `limit` ends it."""
        largest = 0.0
        for text, row in zip(self.texts, rows, strict=True):
            largest = max(largest, float(_apart(other.logprobs(text), row).max()))
            if not largest <= limit:
                break
        return largest


def hold_against(model: ResolvedModel, checkpoint: ResolvedModel) -> Agreement:
    """How far `model`, an ONNX one, is from `checkpoint`, a Hugging Face one.

    Raises `ConfigError` for models that are not such, `ModelError` for those that do not take text alone or have other
    vocabularies.
    """
    _refuse(model, checkpoint)
    graph, scored = load_graph(model.files.decoder), _Scored.by(model, checkpoint)
    agreement = Agreement(
        checkpoint=checkpoint.name,
        texts=scored.differences,
        bound=LARGEST_DIFFERENCE,
        bound_reason="rounding in fp32",
        quantized_by=quantizing_operator(graph) or few_bits(one.elem_type for one in model.spec.kv),
        unseen={name: number for name, number in scored.plain.lengths.items() if number + 2 > len(scored.texts[-1])},
        parts=scored.parts,
    )
    if agreement.quantized_by:
        try:
            scored = scored.with_weights_of(model)
        except ModelError as reason:
            return replace(agreement, states_note=f"the graph is not compared with its own weights: {reason}")
        agreement = replace(agreement, texts=scored.differences, is_decoded=True)
    states_bound = LARGEST_ERROR
    if not agreement.is_equal:
        other = half_type(graph) or "float64"
        nats, error = _rounding(other, scored)
        if ROUNDING_FACTOR * nats > agreement.bound:
            why = f"{ROUNDING_FACTOR:g} times the distance of transformers in {other}"
            agreement = replace(agreement, bound=ROUNDING_FACTOR * nats, bound_reason=why)
        states_bound += ROUNDING_FACTOR * error
    first = next((place for place, text in enumerate(agreement.texts) if not text.nats <= agreement.bound), None)
    if first is None:
        return agreement
    agreement = _placed(agreement, scored, first)
    agreement = replace(agreement, omission=_omission(scored, agreement))
    shown = next((text for text in reversed(scored.texts[first:]) if len(text) <= MOST_TOKENS), scored.texts[first])
    try:
        state_difference = first_state_difference(scored.plain, model, shown, states_bound)
    except ModelError as error:
        return replace(agreement, states_note=str(error))
    note = "hidden states are equal: the LM head, its weights, scale or cap, is not"
    return replace(agreement, state_difference=state_difference, states_note="" if state_difference else note)


def _rounding(dtype: str, scored: _Scored) -> tuple[float, float]:
    """How far transformers in that precision are: in nats, and in states of any module that both have. Empty where they
    cannot compute in it, as for experts in fp64, and for large states in fp16, which overflow."""
    other, text = scored.changed(dtype), scored.texts[0]
    try:
        exact, rounded = states_of(scored.plain, text), states_of(other, text)
        states = max(float(_errors(rounded[name], exact[name]).max()) for name in exact.keys() & rounded.keys())
        nats = scored.farthest_from(other, scored.expected)
    except RuntimeError:
        return 0.0, 0.0
    return (nats, states) if np.isfinite(nats) else (0.0, 0.0)


def _placed(agreement: Agreement, scored: _Scored, first: int) -> Agreement:
    """Adds the number of tokens that are equal; `first` is the first text that differs. Where the texts before it come
    near the bound, there is a small difference everywhere, and no length causes it."""
    wrong = int(np.argmax(~(scored.apart[first] <= agreement.bound))) + 1
    before = len(scored.texts[first - 1]) if first else 0
    equal = [*scored.apart[:first], scored.apart[first][: wrong - 1]]
    if max((float(row.max()) for row in equal if len(row)), default=0.0) > agreement.nats / SHARP:
        return replace(agreement, equal_up_to=0)
    if wrong < before:
        return replace(agreement, equal_up_to=before, is_by_text=True)
    return replace(agreement, equal_up_to=wrong if wrong >= SHORTEST else 0)


def _refuse(model: ResolvedModel, checkpoint: ResolvedModel) -> None:
    if checkpoint.kind != "hf":
        raise UnsupportedError(
            f"'{checkpoint.settings.model}' is no checkpoint: give a Hugging Face model, in a folder or by name"
        )
    if model.kind != "onnx" or not model.runtime.runs_graph:
        problem = f"the runtime '{model.runtime.name}' runs it; only a graph that ONNX Runtime runs can be compared"
        raise UnsupportedError(f"'{model.settings.model}' cannot be held against a checkpoint: {problem}")
    if model.source is not None or checkpoint.source is not None:
        raise ModelError(f"'{model.name}' has an encoder: only models of text alone are held against a checkpoint")


def _texts(model: ResolvedModel, plain: PlainPass, num_tokens: int) -> list[Text]:
    """Random texts of growing length, among them one beyond each number of tokens in the checkpoint's configuration.
    Tokens that stand for pictures and sounds are left out, even if a checkpoint has no tower for them."""
    context = min(plain.context_length, model.spec.context_length)
    longest = min(context, model.settings.max_length or LONGEST)
    doubled = [SHORTEST << power for power in range(longest.bit_length())]
    lengths = sorted({min(number, longest) for number in (*doubled, *plain.lengths_beyond)})
    random, ids = np.random.default_rng(0), [token for token in range(num_tokens) if token not in plain.media_tokens]
    return [tuple(random.choice(ids, length).tolist()) for length in lengths]


def _apart(one: Logprobs, other: Logprobs) -> Logprobs:
    """Nats of each token; infinite where one is no number."""
    return np.nan_to_num(np.abs(one - other), nan=np.inf)


def _without_taken(plain: PlainPass, num_tokens: int, text: Text, given: Logprobs, expected: Logprobs) -> Logprobs:
    """`given` with the share of ids that belong to no token as it was: what a graph takes from them, as by a mask of
    -inf, costs nothing, as in a verdict on distributions."""
    if _apart(given, expected).max() <= LARGEST_DIFFERENCE:
        return given
    return given - np.clip(given - expected, 0, plain.logprobs(text, num_tokens) - expected)


def _omission(scored: _Scored, agreement: Agreement) -> Omission | None:
    """The first hypothesis by which transformers equal the graph on all texts; else the best by which they come
    `EXPLAINED` times as near. Their warnings of weights that a shorter configuration leaves over are not shown."""
    best, limit = None, agreement.nats / EXPLAINED
    disabled = logging.root.manager.disable
    for hypothesis in hypotheses(scored.plain.config):
        logging.disable(max(disabled, logging.WARNING))
        try:
            changed = scored.changed(changes=hypothesis.changes)
            if hypothesis.rotated is not None:
                regroup(changed, hypothesis.rotated)
            nats = scored.farthest_from(changed, scored.given, limit)
        except Exception:  # noqa: BLE001 - whatever transformers raise for what nobody has configured
            continue
        finally:
            logging.disable(disabled)
        if nats <= limit:
            best, limit = Omission(hypothesis.text, nats), nats
        if limit <= agreement.bound and best is not None:
            break
    return best


LARGEST_ERROR = 3e-4
"""The largest error of a token's state, relative to its length, that is rounding in fp32."""

MOST_ERROR = 1e9
"""The largest error that counts; an error that is not a number counts as this."""

LEAST_LENGTH = 1e-3
"""The least length of a state, as a part of the mean length."""

MOST_TOKENS = 128
"""Up to so many tokens, every value of the graph is kept for a text; for a longer one the states of its beginning."""

Floats = npt.NDArray[np.float32]


class _Nearest(NamedTuple):
    name: str
    errors_S: Floats


def first_state_difference(
    plain: PlainPass, model: ResolvedModel, tokens: Sequence[int], bound: float
) -> StateDifference | None:
    """Where states part first on `tokens`; None where all that were found are equal. `bound` is the error that is
    rounding. A module's output is looked for among all values of the graph by its numbers, whatever exporters call
    them: what an exporter fuses is in no value, so a module agrees, too, where a later one does. Raises `ModelError`
    where the graph cannot be run alone, or has no hidden states."""
    values = None
    if len(tokens) > MOST_TOKENS:
        begin = tokens[:MOST_TOKENS]
        values = [best.name for best in _nearest(states_of(plain, begin), PlainGraph(model).run(begin), bound).values()]
    states = states_of(plain, tokens)
    nearest = _nearest(states, PlainGraph(model, values).run(tokens), bound)
    if not nearest:
        raise ModelError("which layer it is cannot be found: no value of the graph has the size of a hidden state")
    wrong = {name: best for name, best in nearest.items() if best.errors_S.max() > bound}
    layers = layers_of(plain)
    layers_outputs = [
        name for name in states if layers and name.startswith(f"{layers}.") and name[len(layers) + 1 :].isdecimal()
    ]
    borders = [EMBEDDED, *layers_outputs, NORMED]
    borders = [name for name in borders if name in nearest]

    def parts(layer: str) -> list[str]:
        return [name for name in nearest if name.startswith(f"{layer}.") and "." not in name[len(layer) + 1 :]]

    if borders[-1] == NORMED and len(borders) > 1 and (last := parts(borders[-2])) and not wrong.keys() & set(last):
        wrong.pop(borders[-2], None)  # a fused norm adds its parts up and returns no sum
    first = _after_last_equal(borders, wrong)
    if first is None:
        return None
    inside = parts(first)
    side_by_side = next((name for name in inside if name in wrong), None)  # as attention and MLP are in some models
    part = _after_last_equal(inside, wrong) or side_by_side
    equal = [name for name in states if name in nearest and name not in wrong]
    best = nearest[part or first]
    return StateDifference(
        place=_place(first, layers),
        part="" if part is None else part.removeprefix(f"{first}."),
        behind=equal[-1] if equal else "",
        token=int(np.argmax(best.errors_S > bound)) + 1,
        error=float(best.errors_S.max()),
    )


def _after_last_equal(names: Sequence[str], wrong: Mapping[str, object]) -> str | None:
    """The first of `names` after the last that is not in `wrong`; None where the last of all is not."""
    last = max((place for place, name in enumerate(names) if name not in wrong), default=-1)
    return names[last + 1] if last + 1 < len(names) else None


def _place(name: str, layers: str) -> str:
    if name == NORMED:
        return "the last norm"
    return "the embeddings" if name == EMBEDDED else f"layer {name[len(layers) + 1 :]}"


def _nearest(states: Mapping[str, Floats], values: Mapping[str, npt.NDArray[Any]], bound: float) -> dict[str, _Nearest]:
    """For each state, the value of the graph with the most equal tokens, and of these the smallest error."""
    by_size: dict[int, list[tuple[str, Floats]]] = defaultdict(list)
    for name, value in values.items():
        if value.dtype.kind == "f":
            by_size[value.size].append((name, value.astype(np.float32)))

    def candidates(state: Floats) -> Iterator[_Nearest]:
        for name, value in by_size[state.size]:
            yield _Nearest(name, _errors(value.reshape(state.shape), state))

    def rank(one: _Nearest) -> tuple[int, float]:
        return int((one.errors_S > bound).sum()), float(one.errors_S.mean())

    return {name: min(candidates(state), key=rank) for name, state in states.items() if by_size[state.size]}


def _errors(value: Floats, state: Floats) -> Floats:
    """The error of each token [S], relative to its state's length; of one that is nearly zero, as a pad token's
    embedding is, to the others'."""
    length_S = np.linalg.norm(state, axis=1)
    length_S = np.maximum(length_S, LEAST_LENGTH * length_S.mean())
    with np.errstate(all="ignore"):
        errors_S: Floats = np.nan_to_num(np.linalg.norm(value - state, axis=1) / length_S, nan=MOST_ERROR)
    return np.minimum(errors_S, MOST_ERROR)


FAR = 1 << 30
"""A window that no text leaves."""

WINDOWED, FULL = "sliding_attention", "full_attention"
"""Types of layers."""

_OFF: Mapping[str, Any] = {
    "sliding_window": FAR,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "clip_qkv": None,
    "alibi": False,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "routed_scaling_factor": 1.0,
    "partial_rotary_factor": 1.0,
}
"""Values without effect, by key."""


_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "layernorm_epsilon")
_SWITCHES = ("norm_topk_prob", "attention_bias", "mlp_bias", "use_qk_norm")


class Hypothesis(NamedTuple):
    """What an export may have done."""

    text: str
    """ "a sliding window of 16 is missing"."""

    changes: Mapping[str, Any]
    """The changes of the decoder's configuration with which transformers does the same."""

    rotated: Rotated | None = None
    """What rotary positions turn together; None for what transformers do."""


def hypotheses(config: Mapping[str, Any]) -> list[Hypothesis]:
    """The changes to try in the decoder's configuration: each alone, then pairs that leave out different values."""
    missing, altered = list(_missing(config)), list(_altered(config))
    pairs = [(one, other) for one, other in combinations(missing, 2) if not one.changes.keys() & other.changes.keys()]
    together = [Hypothesis(f"{one.text} and {other.text}", {**one.changes, **other.changes}) for one, other in pairs]
    return missing + altered + together


def _missing(config: Mapping[str, Any]) -> Iterator[Hypothesis]:
    for name, off in _OFF.items():
        value = config.get(name)
        if value is not None and value != off:
            what = f"a sliding window of {value}" if name == "sliding_window" else f"'{name}' = {value}"
            yield Hypothesis(f"{what} is missing", {name: off})
    if (size := config.get("head_dim")) and config.get("query_pre_attn_scalar", size) != size:
        yield Hypothesis(
            f"'query_pre_attn_scalar' = {config['query_pre_attn_scalar']} is missing", {"query_pre_attn_scalar": size}
        )
    for name, off in (
        ("rope_type", "default"),
        ("partial_rotary_factor", 1.0),
        ("rope_theta", 10000.0),
        ("attention_factor", None),
    ):
        yield from _rotary(config.get("rope_parameters"), name, off)
    types = config.get("layer_types") or ()
    if set(types) == {WINDOWED, FULL}:
        exchanged = [FULL if kind == WINDOWED else WINDOWED for kind in types]
        yield Hypothesis("windowed and full layers are exchanged", {"layer_types": exchanged})
        yield Hypothesis("full layers are computed as windowed ones", {"layer_types": [WINDOWED] * len(types)})


def _altered(config: Mapping[str, Any]) -> Iterator[Hypothesis]:
    """Values that an export may have otherwise: an exporter's own value, or one fewer."""
    for name in (name for name in _EPSILONS if config.get(name) is not None):
        for own in (1e-5, 1e-6, 1e-12):
            if own != config[name]:
                yield Hypothesis(f"'{name}' is {own:g} instead of {config[name]:g}", {name: own})
    if (window := config.get("sliding_window")) is not None:
        for own in (window - 1, window + 1):
            yield Hypothesis(f"a sliding window is {own} instead of {window}", {"sliding_window": own})
    if (size := config.get("head_dim")) and config.get("attention_multiplier", size**-0.5) != size**-0.5:
        text = f"'attention_multiplier' = {config['attention_multiplier']} is missing"
        yield Hypothesis(text, {"attention_multiplier": size**-0.5})
    for name in (name for name in _SWITCHES if isinstance(config.get(name), bool)):
        yield Hypothesis(f"'{name}' is {not config[name]} instead of {config[name]}", {name: not config[name]})
    if 0 in (config.get("no_rope_layers") or ()):
        rotated = [1] * len(config["no_rope_layers"])
        yield Hypothesis("layers without rotary positions have them", {"no_rope_layers": rotated})
    if isinstance(config.get("rope_parameters"), Mapping):
        yield Hypothesis("rotary positions turn halves of a head instead of neighbours", {}, "halves")
        yield Hypothesis("rotary positions turn neighbours instead of halves of a head", {}, "neighbours")
    number, types = config.get("num_hidden_layers") or 0, config.get("layer_types")
    for left in range(number - 1, max(number - 3, 0), -1):
        what = "layer is" if number - left == 1 else f"{number - left} layers are"
        shorter = {"num_hidden_layers": left, **({"layer_types": types[:left]} if types else {})}
        yield Hypothesis(f"the last {what} missing", shorter)


def _rotary(ropes: Any, name: str, off: Any) -> Iterator[Hypothesis]:
    """Hypotheses about the rotary positions, which are one mapping or one for each type of layers."""
    if not isinstance(ropes, Mapping):
        return
    inner = [key for key, rope in ropes.items() if isinstance(rope, Mapping)]
    entries = [ropes[key] for key in inner] or [ropes]
    values = [entry[name] for entry in entries if entry.get(name) not in (None, off)]
    if values:
        changed: Mapping[str, Any] = {key: {**ropes[key], name: off} for key in inner} or {**ropes, name: off}
        yield Hypothesis(f"'{name}' = {values[0]} is missing", {"rope_parameters": changed})


@dataclass(frozen=True)
class Difference:
    """The difference on one text."""

    num_tokens: int
    nats: float
    """The largest difference of a token's log-probability."""


@dataclass(frozen=True)
class Omission:
    """A change of transformers with which they compute the same as the graph."""

    text: str
    """ "a sliding window of 16 is missing"."""

    nats: float
    """How far transformers are from the graph with that change."""

    def sentence(self) -> str:
        """The text and its proof."""
        return f"{self.text} (so changed, transformers are within {self.nats:.2g} nats)"


@dataclass(frozen=True)
class StateDifference:
    """Where hidden states part: the first value of transformers that the graph has nowhere."""

    place: str
    """ "layer 3", "the embeddings", "the last norm" or "the LM head"."""

    part: str
    """The layer's module whose output is the first that differs; empty where none is found."""

    behind: str
    """The last module whose output is still in the graph; empty where there is none."""

    token: int
    """The first token whose state differs, counted from 1."""

    error: float
    """The largest error of a token's state, relative to its length."""

    def sentence(self) -> str:
        """ "hidden states part in layer 0 (self_attn), from token 17 on"."""
        part = f" ({self.part})" if self.part else ""
        behind = f"; '{self.behind}' is still equal" if self.behind else ""
        error = f"by {self.error:.2g} of their size"
        return f"hidden states part in {self.place}{part}, from token {self.token} on, {error}{behind}"


USUAL = "of the quickstart's model 0.2 to 0.8 nats at 8 bits, 6 to 8 at 4 bits, whose mean KL on tasks is 0.004"
"""What is known of healthy models."""


@dataclass(frozen=True)
class Agreement:
    """How far an ONNX model and its checkpoint are apart, and where that begins."""

    checkpoint: str
    texts: tuple[Difference, ...]
    """From short to long."""

    bound: float
    """Nats that are rounding."""

    bound_reason: str
    """Why `bound` is not smaller."""

    equal_up_to: int | None = None
    """Tokens of a text that are equal, counted from its first; None where all texts are."""

    is_by_text: bool = False
    """Whether a text differs from its first tokens on as soon as it is longer than `equal_up_to`."""

    quantized_by: str = ""
    """An operator by which the model is quantized, or the type of weights or a cache; empty of a float model."""

    unseen: Mapping[str, int] = field(default_factory=dict)
    """Numbers of tokens in the checkpoint's configuration that no text reached."""

    parts: str = ""
    """How texts that are fed in parts differ from whole ones; empty where they do not."""

    state_difference: StateDifference | None = None
    states_note: str = ""
    """Why no layer is named."""

    omission: Omission | None = None

    is_decoded: bool = False
    """Whether transformers have a quantized model's weights, and its graph does not round activations."""

    @property
    def is_equal(self) -> bool:
        """Whether all texts are."""
        return self.nats <= self.bound

    @property
    def is_undecided(self) -> bool:
        """Whether texts differ, and only quantization may cause it."""
        return bool(self.quantized_by) and not (self.is_decoded or self.is_equal)

    @property
    def nats(self) -> float:
        """The largest difference of all texts."""
        return max(text.nats for text in self.texts)

    def sentence(self) -> str:
        """The result in one sentence."""
        apart = f"up to {self.nats:.2g} nats apart on texts of up to {self.texts[-1].num_tokens} random tokens"
        weights = " with the model's weights" * self.is_decoded
        if self.is_equal:
            short = [f"no text reached '{name}' of {number}" for name, number in self.unseen.items()]
            return "; ".join([f"equal to the checkpoint{weights}: {apart}", *short])
        if self.is_undecided:
            usual = f"which says little of a quantized model ({self.quantized_by}; {USUAL})"
            measured = "`olive-ext evaluate --reference` measures what it lost"
            return f"not decided: {apart}, {usual}; {self.states_note}; {measured}"
        where = self._where() + (f": {self.omission.sentence()}" if self.omission is not None else "")
        layer = self.state_difference.sentence() if self.state_difference is not None else self.states_note
        return "; ".join(filter(None, (f"differs from '{self.checkpoint}'{weights}, {apart}", where, layer)))

    def _where(self) -> str:
        if not self.equal_up_to:
            return "at every length"
        if self.is_by_text:
            return f"texts of up to {self.equal_up_to} tokens are equal, longer ones differ from their first tokens on"
        return f"equal up to {self.equal_up_to} tokens, not beyond"
