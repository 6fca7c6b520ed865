"""What an export may have left out of a checkpoint's configuration, as configurations of transformers that do the same.

Knows no graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any, NamedTuple

from olive_ext.engine.runners.hf.plain_pass import Rotated

FAR = 1 << 30
"""A window that no text reaches."""

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
"""By key the value that has no effect."""


_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "layernorm_epsilon")
_SWITCHES = ("norm_topk_prob", "attention_bias", "mlp_bias", "use_qk_norm")


class Hypothesis(NamedTuple):
    """What an export may have done."""

    text: str
    """ "a sliding window of 16 is missing"."""

    changes: Mapping[str, Any]
    """Of the decoder's configuration, for transformers to do the same."""

    rotated: Rotated | None = None
    """What rotary positions turn together; None for what transformers do."""


def hypotheses(config: Mapping[str, Any]) -> list[Hypothesis]:
    """What can be tried of the decoder's configuration: each alone, then two left out together that change other
    values."""
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
    """Values that an export may have another one of: an exporter's own, or one too few."""
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
    """Of the rotary positions, which are one mapping or one for each type of layers."""
    if not isinstance(ropes, Mapping):
        return
    inner = [key for key, rope in ropes.items() if isinstance(rope, Mapping)]
    entries = [ropes[key] for key in inner] or [ropes]
    values = [entry[name] for entry in entries if entry.get(name) not in (None, off)]
    if values:
        changed: Mapping[str, Any] = {key: {**ropes[key], name: off} for key in inner} or {**ropes, name: off}
        yield Hypothesis(f"'{name}' = {values[0]} is missing", {"rope_parameters": changed})


def near(lengths: Mapping[str, int], equal_up_to: int) -> str:
    """Which of `lengths` begins to count where texts begin to differ: the end of a sentence, empty where none does."""
    for name, number in lengths.items():
        if number <= equal_up_to <= number + 1 + number // 4:
            return f", where the checkpoint's '{name}' of {number} begins to count"
    return ""
