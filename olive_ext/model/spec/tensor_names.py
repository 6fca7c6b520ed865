"""A graph's inputs and outputs by name, and the names that exporters give to those of a decoder. Reads no graph.

Names in genai_config.json come before these. A pair is the name of an input and of its output; %d is the layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from olive_ext.model.types import Role, TensorSpec

Names = tuple[str, str]


@dataclass(frozen=True)
class Outline:
    """What finding a decoder needs to know of a graph: its interface, and the fewest bytes of its external files."""

    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]
    locations: Mapping[str, int]

    @property
    def has_logits(self) -> bool:
        """Whether it returns logits."""
        return any(name.startswith("logits") for name in self.outputs)


def pairs(past: str, present: str, parts: Iterable[str] = ("key", "value")) -> list[Names]:
    """A pair of names for each of `parts`, from a pair with {} in its place."""
    return [(past.format(part), present.format(part)) for part in parts]


def configured_names(names: Iterable[Names], inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> list[Names]:
    """The pairs that genai_config.json gives under the keys `names` of its sections `inputs` and `outputs`."""
    return [(inputs[past], outputs[present]) for past, present in names if past in inputs and present in outputs]


def by_layer(inputs: Iterable[str], names: Iterable[Names]) -> Iterator[tuple[str, int, str]]:
    """(input, layer, name of its output) of each of `inputs` that a pair of `names` fits, in the order of `names`."""
    for past, present in names:
        pattern = re.compile(re.escape(past).replace("%d", r"(\d+)"))
        for name in inputs:
            match = pattern.fullmatch(name)
            if match and match.groups():
                yield name, int(match.group(1)), present.replace("%d", match.group(1))


KV_NAMES = (
    *pairs("past_key_values.%d.{}", "present.%d.{}"),
    *pairs("past_{}_%d", "present_{}_%d"),
    *pairs("past_key_values.%d.decoder.{}", "present.%d.decoder.{}"),
    *pairs("past_key_values.%d.self.{}", "present.%d.self.{}"),
    *pairs("past_{}_self_%d", "present_{}_self_%d"),
    *pairs("{}_cache.%d", "updated_{}_cache.%d"),
)
"""Names of a KV input and its output, by exporter."""

STATE_NAMES = (
    *pairs("past.%d.{}", "present.%d.{}", ("conv", "recurrent")),
    ("past_conv.%d", "present_conv.%d"),
    *pairs("past_key_values.%d.{}_state", "present.%d.{}_state", ("conv", "recurrent", "ssm")),
    *pairs("past_states.%d.{}_state", "present_states.%d.{}_state", ("conv", "ssm")),
    *pairs("past_states.%d.{}_state", "present.%d.{}_state", ("conv", "ssm")),
)
"""Names of a state of fixed size and its output."""

CROSS_KV_NAMES = (
    *pairs("past_key_values.%d.encoder.{}", "present.%d.encoder.{}"),
    *pairs("past_key_values.%d.cross.{}", "present.%d.cross.{}"),
    *pairs("past_{}_cross_%d", "present_{}_cross_%d"),
)
"""Names of a decoder's KV input for the attention to the encoder, and of the output that carries it: the encoder's, or
a decoder's first step's."""

STATES_INPUTS = frozenset({"encoder_hidden_states", "encoder_outputs"})
"""Inputs of a decoder that take the encoder's hidden states."""

STATES_OUTPUTS = ("last_hidden_state", "encoder_hidden_states", "hidden_states")
"""The encoder's output of hidden states."""

CROSS_MASKS = frozenset({"encoder_attention_mask"})

SOURCE_INPUTS = ("audio_features", "input_features", "input_ids", "encoder_input_ids")
"""The encoder's input: features of sound, or token ids."""

SOURCE_MASKS = ("attention_mask", "encoder_attention_mask")

EMBEDDING_NAMES = frozenset({"inputs_embeds", "per_layer_inputs"})
"""Inputs of a decoder that an embedding graph computes."""

GATES = frozenset({"vision_gate", "speech_gate"})
"""Switches of a decoder's own adapters, which such a graph sets by the placeholders it finds (Phi-4-multimodal)."""

ROLE_NAMES = {role: (role.value,) for role in Role} | {
    Role.INPUT_IDS: ("input_ids", "decoder_input_ids"),
    Role.ATTENTION_MASK: ("attention_mask", "decoder_attention_mask"),
}

ROLE_RANKS: dict[Role, tuple[int, ...]] = dict.fromkeys(Role, (1,)) | {
    Role.INPUT_IDS: (2,),
    Role.ATTENTION_MASK: (2,),
    Role.POSITION_IDS: (2, 3),
    Role.LAST_POSITIONS: (1, 2),
    Role.TOTAL_LENGTH: (0, 1),
    Role.BLOCK_TABLE: (2,),
    Role.WHOLE_LENGTH: (0,),
}
"""The ranks that an input of the role may have."""

PACKED_RANKS = {**ROLE_RANKS, Role.INPUT_IDS: (1,), Role.POSITION_IDS: (1,)}
"""`ROLE_RANKS` of a graph with a block table, where the tokens of all rows are concatenated."""
