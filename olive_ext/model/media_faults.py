"""What exporters are known to make of a multimodal model that the original does not compute: told, not mended.

Knows no session, and no picture.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from olive_ext.model.item_masks import ItemMasks
from olive_ext.model.types import TensorSpec

if TYPE_CHECKING:
    import onnx

Configs = tuple[Mapping[str, Any], Mapping[str, Any]]
"""genai_config.json's `model` and config.json; each may be empty."""

Encoders = Mapping[str, "tuple[onnx.ModelProto, Sequence[TensorSpec]]"]
"""Graphs by their part, and those of their outputs that the embedding graph takes."""

_BUILT_IN = {
    "num_attention_heads": 8,
    "conv_kernel_size": 5,
    "attention_context_left": 13,
    "attention_context_right": 0,
    "attention_logit_cap": 50.0,
    "residual_weight": 0.5,
}
"""Numbers of Gemma 4's audio encoder in mobius 0.1.0, whatever config.json's `audio_config` has."""


def known_faults(encoders: Encoders, configs: Configs, masks: ItemMasks | None = None) -> tuple[str, ...]:
    """One sentence on each fault; `encoders` by their part ("vision", "audio"), `masks` the decoder's."""
    genai, config = configs
    kind = str(genai.get("type") or config.get("model_type") or "")
    found = [*_other_masks(kind, config, masks or ItemMasks())]
    if "vision" in encoders:
        graph, taken = encoders["vision"]
        found += [*_last_norm(graph, config), *_deepstack(taken, config)]
    if "audio" in encoders:
        found += _built_in(encoders["audio"][0], kind, config)
    return tuple(found)


def _other_masks(kind: str, config: Mapping[str, Any], masks: ItemMasks) -> Iterator[str]:
    """Gemma 3 and Gemma 4. Of the latter mobius 0.1.0 has the masks of transformers 5.10, which are those of Gemma 3;
    transformers 5.23 have others."""
    text = config.get("text_config", {})
    is_seen = text.get("use_bidirectional_attention") in ("vision", True, "all")
    if not masks.joined and (is_seen or kind.startswith("gemma3")):
        yield (
            "a picture's tokens see each other in the original model; this decoder takes no token types, so that each "
            "sees those before it: its numbers behind pictures are not the original's"
        )
    kinds = dict(enumerate(text.get("layer_types") or ()))
    full = [layer for layer in masks.joined if kinds.get(layer) == "full_attention"]
    more = [f"in {len(full)} layers of full attention"] if full else []
    if masks.beyond_window:
        more.append(f"in {len(masks.beyond_window)} sliding layers beyond the window of {text.get('sliding_window')}")
    if is_seen and more:
        yield (
            "a picture's tokens see each other in the sliding layers of the original model, within the window "
            f"(transformers 5.23); in this decoder they do so {' and '.join(more)}, too (as in transformers 5.10): its "
            "numbers behind pictures are not the original's"
        )


def _last_norm(encoder: onnx.ModelProto, config: Mapping[str, Any]) -> Iterator[str]:
    weights = (tensor.name for tensor in encoder.graph.initializer)
    norm = min((name for name in weights if "post_layernorm" in name), default=None)
    if norm is not None and isinstance(layer := config.get("vision_feature_layer"), int):
        yield (
            f"the original model takes the features of the vision tower's layer {layer}, before its last norm; this "
            f"encoder ends with '{norm}': its features are not the original's"
        )


def _deepstack(taken: Sequence[TensorSpec], config: Mapping[str, Any]) -> Iterator[str]:
    """Qwen3-VL adds features of inner layers of its tower to the decoder's first layers."""
    layers = config.get("vision_config", {}).get("deepstack_visual_indexes")
    if layers and len(taken) == 1:
        yield (
            f"the original model adds the features of the vision tower's layers {layers} to its first layers "
            f"(deepstack); of this encoder '{taken[0].name}' alone is taken: numbers behind pictures are not the "
            "original's"
        )


def _built_in(encoder: onnx.ModelProto, kind: str, config: Mapping[str, Any]) -> Iterator[str]:
    audio = config.get("audio_config") or {}
    if encoder.producer_name != "mobius" or not kind.startswith("gemma4"):
        return
    for name, number in _BUILT_IN.items():
        if audio.get(name, number) != number:
            yield (
                f"the original model's audio_config has {name} {audio[name]}; mobius builds in {number}: the features "
                "of sound are not the original's"
            )
