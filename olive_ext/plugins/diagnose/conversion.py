"""What an export lost of its checkpoint: how far an ONNX model and the transformers model that it was made of are apart
on random texts, from which length on, in which layer, and which value of the configuration was left out."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import combinations
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from olive_ext.engine.runners.hf_runner import PlainPass
from olive_ext.engine.runners.ort.ort_runner import PlainGraph
from olive_ext.errors import ModelError, UnsupportedError
from olive_ext.graph.nodes import few_bits, half_type, quantizing_operator
from olive_ext.model import ResolvedModel
from olive_ext.model.files.constants import Constants
from olive_ext.model.files.content import load_graph
from olive_ext.plugins.diagnose.reweighting import reweight
from olive_ext.report.comparison import GENERATED
from olive_ext.run.export import LARGEST_DIFFERENCE, logprobs
from olive_ext.session.opening import open_model
from olive_ext.session.tokenizer import load_tokenizer

EMBEDDED, NORMED = "embeddings", "last hidden states"
"""Names in `states_of` of the inputs of the first layer and of the head."""

_TURNED = ("q_proj", "k_proj", "q_norm", "k_norm")
"""Modules whose outputs rotary positions rotate, or that are scaled before."""

Rotated = Literal["halves", "neighbours"]
Floats = npt.NDArray[np.float32]


def layers_of(plain: PlainPass) -> str:
    """The name of the module that holds the decoder's layers; empty where there is none of their number."""
    import torch

    model = plain.model
    number = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
    modules = model.get_decoder().modules() if hasattr(model, "get_decoder") else ()
    lists = {id(part) for part in modules if isinstance(part, torch.nn.ModuleList) and len(part) == number}
    return next((name for name, part in model.named_modules() if id(part) in lists), "")


def states_of(plain: PlainPass, tokens: Sequence[int]) -> dict[str, Floats]:
    """What each module returns for S `tokens` [S, size], by its name, in the order of the computation; by the names
    `EMBEDDED` and `NORMED` what the first layer and the head are given. Modules whose output has no row for each
    token are left out."""
    import torch

    states: dict[str, Floats] = {}

    def keep(name: str, _: object, inputs: Any, output: Any = None) -> None:
        value = inputs if output is None else output
        value = value[0] if isinstance(value, tuple) and value else value
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.ndim < 2 or name in states:
            return
        rows = value[0] if value.ndim > 2 and len(value) == 1 else value
        if len(rows) == len(tokens):
            kept = rows.detach().clone()  # what comes after may write into it, as OLMo's clipping does
            states[name] = kept.reshape(len(tokens), -1).float().cpu().numpy()

    modules = dict(plain.model.named_modules())
    hooks = [part.register_forward_hook(partial(keep, name)) for name, part in modules.items() if name]
    hooked = {EMBEDDED: modules.get(f"{layers_of(plain)}.0"), NORMED: plain.model.get_output_embeddings()}
    hooks += [part.register_forward_pre_hook(partial(keep, name)) for name, part in hooked.items() if part is not None]
    try:
        plain.run(tokens)
    finally:
        for hook in hooks:
            hook.remove()
    return states


def regroup(plain: PlainPass, rotated: Rotated) -> None:
    """Makes rotary positions rotate `rotated` where the model rotates the other: the first r numbers of each head in
    halves (i with i + r / 2), or neighbours (2 i with 2 i + 1). The weights of queries and keys are reordered."""
    config = plain.config
    share = {**config, **(config.get("rope_parameters") or {})}.get("partial_rotary_factor") or 1.0
    size = int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    turned = np.arange(int(size * share))
    halves = turned.reshape(2, -1).T if rotated == "halves" else turned.reshape(-1, 2).T
    order = [*halves.reshape(-1).tolist(), *range(len(turned), size)]
    for name, part in plain.model.named_modules():
        for tensor in part.parameters(recurse=False) if name.rpartition(".")[2] in _TURNED else ():
            tensor.data = tensor.data.view(-1, size, *tensor.shape[1:])[:, order].reshape(tensor.shape)


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
    checkpoint: ResolvedModel
    plain: PlainPass
    texts: list[Text]
    expected: list[Logprobs]
    given: list[Logprobs]
    num_ids: int
    parts: str = ""

    @classmethod
    def by(cls, model: ResolvedModel, checkpoint: ResolvedModel) -> _Scored:
        """On random texts of growing length, among them one beyond each number of tokens in the checkpoint's
        configuration. Raises `ModelError` for other vocabularies."""
        plain = PlainPass(checkpoint)
        num_tokens = load_tokenizer(model.files.tokenizer, trust_remote_code=model.settings.trust_remote_code).num_ids
        sizes = {plain.vocab_size, model.spec.vocab_size or plain.vocab_size}
        if len(sizes) > 1 and num_tokens > min(sizes):
            problem = f"'{model.name}' has {model.spec.vocab_size} tokens, '{checkpoint.name}' {plain.vocab_size}"
            raise ModelError(problem, code="not_comparable")
        num_ids = min(num_tokens, *sizes)
        longest = min(plain.context_length, model.spec.context_length, model.settings.max_length or LONGEST)
        doubled = [SHORTEST << power for power in range(longest.bit_length())]
        lengths = sorted({min(number, longest) for number in (*doubled, *plain.lengths_beyond)})
        random, ids = np.random.default_rng(0), [token for token in range(num_ids) if token not in plain.media_tokens]
        texts: list[Text] = [tuple(random.choice(ids, length).tolist()) for length in lengths]
        with open_model(model) as session:
            rows_left, parts = logprobs(session, texts), session.describe_execution().get("parts_failure", "")
        expected = [plain.logprobs(text) for text in texts]
        for number, text in enumerate(texts if num_tokens < plain.vocab_size else ()):
            left, exact = rows_left[number], expected[number]
            if not _apart(left, exact).max() <= LARGEST_DIFFERENCE:
                # What a graph takes from ids that belong to no token, as by a mask of -inf, costs nothing.
                rows_left[number] = left - np.clip(left - exact, 0, plain.logprobs(text, num_tokens) - exact)
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
    if checkpoint.kind != "hf":
        problem = "is no checkpoint: give a Hugging Face model, in a folder or by name"
        raise UnsupportedError(f"'{checkpoint.settings.model}' {problem}")
    if model.kind != "onnx" or not model.runtime.runs_graph:
        problem = f"the runtime '{model.runtime.name}' runs it; only a graph that ONNX Runtime runs can be compared"
        raise UnsupportedError(f"'{model.settings.model}' cannot be held against a checkpoint: {problem}")
    if model.source is not None or checkpoint.source is not None:
        raise ModelError(f"'{model.name}' has an encoder: only models of text alone are held against a checkpoint")
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
    wrong = int(np.argmax(~(scored.apart[first] <= agreement.bound))) + 1
    before = len(scored.texts[first - 1]) if first else 0
    equal = [*scored.apart[:first], scored.apart[first][: wrong - 1]]
    is_everywhere = max((float(row.max()) for row in equal if len(row)), default=0.0) > agreement.nats / SHARP
    is_by_text = wrong < before and not is_everywhere
    equal_up_to = 0 if is_everywhere or wrong < SHORTEST else wrong
    agreement = replace(agreement, equal_up_to=before if is_by_text else equal_up_to, is_by_text=is_by_text)
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


def _apart(one: Logprobs, other: Logprobs) -> Logprobs:
    """Nats of each token; infinite where one is no number."""
    return np.nan_to_num(np.abs(one - other), nan=np.inf)


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
        values = [value for _, value in _nearest(states_of(plain, begin), PlainGraph(model).run(begin), bound).values()]
    states = states_of(plain, tokens)
    nearest = _nearest(states, PlainGraph(model, values).run(tokens), bound)
    if not nearest:
        raise ModelError("which layer it is cannot be found: no value of the graph has the size of a hidden state")
    wrong = {name for name, (errors_S, _) in nearest.items() if errors_S.max() > bound}
    layers = layers_of(plain)
    outputs = [name for name in states if layers and name.removeprefix(f"{layers}.").isdecimal()]
    borders = [name for name in (EMBEDDED, *outputs, NORMED) if name in nearest]

    def parts(layer: str) -> list[str]:
        return [name for name in nearest if name.startswith(f"{layer}.") and "." not in name[len(layer) + 1 :]]

    if borders[-1] == NORMED and len(borders) > 1 and (last := parts(borders[-2])) and not wrong & set(last):
        wrong.discard(borders[-2])  # a fused norm adds its parts up and returns no sum
    first = _after_last_equal(borders, wrong)
    if first is None:
        return None
    inside = parts(first)
    side_by_side = next((name for name in inside if name in wrong), None)  # as attention and MLP are in some models
    part = _after_last_equal(inside, wrong) or side_by_side
    equal = [name for name in states if name in nearest and name not in wrong]
    errors_S = nearest[part or first][0]
    places = {NORMED: "the last norm", EMBEDDED: "the embeddings"}
    return StateDifference(
        place=places.get(first, f"layer {first[len(layers) + 1 :]}"),
        part="" if part is None else part.removeprefix(f"{first}."),
        behind=equal[-1] if equal else "",
        token=int(np.argmax(errors_S > bound)) + 1,
        error=float(errors_S.max()),
    )


def _after_last_equal(names: Sequence[str], wrong: Collection[str]) -> str | None:
    """The first of `names` after the last that is not in `wrong`; None where the last of all is not."""
    last = max((place for place, name in enumerate(names) if name not in wrong), default=-1)
    return names[last + 1] if last + 1 < len(names) else None


def _nearest(
    states: Mapping[str, Floats], values: Mapping[str, npt.NDArray[Any]], bound: float
) -> dict[str, tuple[Floats, str]]:
    """For each state the errors [S] and name of the graph's value with the most equal tokens, and the least error."""
    by_size: dict[int, list[tuple[str, Floats]]] = defaultdict(list)
    for name, value in values.items():
        if value.dtype.kind == "f":
            by_size[value.size].append((name, value.astype(np.float32)))

    nearest = {}
    for name, state in states.items():
        if found := [(_errors(value.reshape(state.shape), state), other) for other, value in by_size[state.size]]:
            nearest[name] = min(found, key=lambda one: (int((one[0] > bound).sum()), float(one[0].mean())))
    return nearest


def _errors(value: Floats, state: Floats) -> Floats:
    """The error of each token [S], relative to its state's length; of one that is nearly zero, as a pad token's
    embedding is, to the others'."""
    length_S = np.linalg.norm(state, axis=1)
    length_S = np.maximum(length_S, LEAST_LENGTH * length_S.mean())
    with np.errstate(all="ignore"):
        errors_S: Floats = np.nan_to_num(np.linalg.norm(value - state, axis=1) / length_S, nan=MOST_ERROR)
    return np.minimum(errors_S, MOST_ERROR)


WINDOWED, FULL = "sliding_attention", "full_attention"
_OFF: Mapping[str, Any] = {
    "sliding_window": 1 << 30,  # which no text leaves
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "clip_qkv")),
    "alibi": False,
    **dict.fromkeys(("logit_scale", "logits_scaling", "embedding_multiplier", "residual_multiplier"), 1.0),
    **dict.fromkeys(("routed_scaling_factor", "partial_rotary_factor"), 1.0),
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
    missing = list(_missing(config))
    pairs = [(one, other) for one, other in combinations(missing, 2) if not one.changes.keys() & other.changes.keys()]
    together = [Hypothesis(f"{one.text} and {other.text}", {**one.changes, **other.changes}) for one, other in pairs]
    return [*missing, *_altered(config), *together]


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
    ropes = config.get("rope_parameters")  # one mapping, or one for each type of layers
    ropes = ropes if isinstance(ropes, Mapping) else {}
    inner = [key for key, rope in ropes.items() if isinstance(rope, Mapping)]
    defaults: Mapping[str, Any] = {
        "rope_type": "default",
        "partial_rotary_factor": 1.0,
        "rope_theta": 10000.0,
        "attention_factor": None,
    }
    for name, off in defaults.items():
        values = [rope[name] for rope in [ropes[key] for key in inner] or [ropes] if rope.get(name) not in (None, off)]
        if values:
            changed: Mapping[str, Any] = {key: {**ropes[key], name: off} for key in inner} or {**ropes, name: off}
            yield Hypothesis(f"'{name}' = {values[0]} is missing", {"rope_parameters": changed})
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


class Difference(NamedTuple):
    """The difference on one text."""

    num_tokens: int
    nats: float
    """The largest difference of a token's log-probability."""


class Omission(NamedTuple):
    """A change of transformers with which they compute the same as the graph, and how far they are from it then."""

    text: str
    """ "a sliding window of 16 is missing"."""

    nats: float


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


USUAL = "of the quickstart's model 0.2 to 0.8 nats at 8 bits, 6 to 8 at 4 bits, whose mean KL on tasks is 0.004"


@dataclass(frozen=True)
class Agreement:
    """How far an ONNX model and its checkpoint are apart, and where that begins."""

    checkpoint: str
    texts: tuple[Difference, ...]
    """From short to long."""

    bound: float
    """Nats that are rounding."""

    bound_reason: str
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
            return "; ".join([f"equal to the checkpoint{weights}: {apart}", *short, f"no {GENERATED} was compared"])
        if self.is_undecided:
            usual = f"which says little of a quantized model ({self.quantized_by}; {USUAL})"
            measured = "`olive-ext evaluate --reference` measures what it lost"
            return f"not decided: {apart}, {usual}; {self.states_note}; {measured}"
        where = f"equal up to {self.equal_up_to} tokens, not beyond"
        if not self.equal_up_to:
            where = "at every length"
        elif self.is_by_text:
            equal = f"texts of up to {self.equal_up_to} tokens are equal"
            where = f"{equal}, longer ones differ from their first tokens on"
        if (omission := self.omission) is not None:
            where += f": {omission.text} (so changed, transformers are within {omission.nats:.2g} nats)"
        layer = self.states_note
        if (state := self.state_difference) is not None:
            part, behind = f" ({state.part})" * bool(state.part), f"; '{state.behind}' is still equal"
            error = f"by {state.error:.2g} of their size{behind * bool(state.behind)}"
            layer = f"hidden states part in {state.place}{part}, from token {state.token} on, {error}"
        return "; ".join(filter(None, (f"differs from '{self.checkpoint}'{weights}, {apart}", where, layer)))
