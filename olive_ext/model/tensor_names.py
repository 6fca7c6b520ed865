"""The names that exporters give to a decoder's inputs and outputs. Data only.

genai_config.json's own names come before these.
"""

from __future__ import annotations

from olive_ext.model.types import Role

KV_NAMES = (
    ("past_key_values.%d.key", "present.%d.key"),
    ("past_key_values.%d.value", "present.%d.value"),
    ("past_key_%d", "present_key_%d"),
    ("past_value_%d", "present_value_%d"),
    ("past_key_values.%d.decoder.key", "present.%d.decoder.key"),
    ("past_key_values.%d.decoder.value", "present.%d.decoder.value"),
    ("past_key_values.%d.self.key", "present.%d.self.key"),
    ("past_key_values.%d.self.value", "present.%d.self.value"),
    ("past_key_self_%d", "present_key_self_%d"),
    ("past_value_self_%d", "present_value_self_%d"),
    ("key_cache.%d", "updated_key_cache.%d"),
    ("value_cache.%d", "updated_value_cache.%d"),
)
"""Names of a KV input and its output by exporter, %d being the layer."""

STATE_NAMES = (
    ("past.%d.conv", "present.%d.conv"),
    ("past.%d.recurrent", "present.%d.recurrent"),
    ("past_conv.%d", "present_conv.%d"),
    ("past_key_values.%d.conv_state", "present.%d.conv_state"),
    ("past_key_values.%d.recurrent_state", "present.%d.recurrent_state"),
    ("past_key_values.%d.ssm_state", "present.%d.ssm_state"),
    ("past_states.%d.conv_state", "present_states.%d.conv_state"),
    ("past_states.%d.ssm_state", "present_states.%d.ssm_state"),
    ("past_states.%d.conv_state", "present.%d.conv_state"),
    ("past_states.%d.ssm_state", "present.%d.ssm_state"),
)
"""Names of a state of fixed size and its output."""

CROSS_KV_NAMES = (
    ("past_key_values.%d.encoder.key", "present.%d.encoder.key"),
    ("past_key_values.%d.encoder.value", "present.%d.encoder.value"),
    ("past_key_values.%d.cross.key", "present.%d.cross.key"),
    ("past_key_values.%d.cross.value", "present.%d.cross.value"),
    ("past_key_cross_%d", "present_key_cross_%d"),
    ("past_value_cross_%d", "present_value_cross_%d"),
)
"""Names of a decoder's KV input for the attention to the encoder, and of the output that carries it: the encoder's,
or that of a decoder's first step."""

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

ROLE_NAMES = {
    Role.INPUT_IDS: ("input_ids", "decoder_input_ids"),
    Role.ATTENTION_MASK: ("attention_mask", "decoder_attention_mask"),
    Role.POSITION_IDS: ("position_ids",),
    Role.CACHE_POSITION: ("cache_position",),
    Role.LAST_POSITIONS: ("past_seq_len",),
    Role.TOTAL_LENGTH: ("total_seq_len",),
    Role.WRITE_INDICES: ("write_indices",),
    Role.VALID_LENGTHS: ("nonpad_kv_seqlen",),
    Role.BLOCK_TABLE: ("block_table",),
    Role.CUMULATIVE_LENGTHS: ("cumulative_sequence_lengths",),
    Role.PAST_LENGTHS: ("past_sequence_lengths",),
    Role.ATTENTION_BOUNDS: ("attention_metadata",),
    Role.USE_CACHE_BRANCH: ("use_cache_branch",),
}

ROLE_RANKS = {
    Role.INPUT_IDS: (2,),
    Role.ATTENTION_MASK: (2,),
    Role.POSITION_IDS: (2, 3),
    Role.CACHE_POSITION: (1,),
    Role.LAST_POSITIONS: (1, 2),
    Role.TOTAL_LENGTH: (0, 1),
    Role.WRITE_INDICES: (1,),
    Role.VALID_LENGTHS: (1,),
    Role.BLOCK_TABLE: (2,),
    Role.CUMULATIVE_LENGTHS: (1,),
    Role.PAST_LENGTHS: (1,),
    Role.ATTENTION_BOUNDS: (1,),
    Role.USE_CACHE_BRANCH: (1,),
}
"""The ranks that an input of the role may have."""

PACKED_RANKS = {**ROLE_RANKS, Role.INPUT_IDS: (1,), Role.POSITION_IDS: (1,)}
"""The same beside a block table, where the tokens of all rows stand one behind the other."""

UNSUPPORTED = (
    (r"cross|encoder", "it belongs to an encoder-decoder, and is none of the inputs known of those"),
    (r"block_table_windowed|logits_indices", "a paged KV cache with windows or with logits picked by the graph"),
    (r"cache_indirection", "beam search inside the graph"),
    (r"total_sequence|current_sequence", "lengths in place of an attention mask"),
    (r"key_scale|value_scale", "scales of a KV cache quantized for each token"),
    (r"num_logits_to_keep|logits_to_keep", "the graph cuts its logits itself"),
    (r"(?i)lora", "weights of a LoRA adapter; name its .onnx_adapter file in engine.adapters"),
    (r"token_type_ids|_gate$", "token types or modality gates"),
    (r"conv|recurrent|ssm|past_states|state", "a state whose output is not known"),
)
"""Inputs that are recognised but not supported yet: a part of the name, and why. The first row that fits is told."""
