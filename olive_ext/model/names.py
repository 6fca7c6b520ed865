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
)
"""Names of a state of fixed size and its output."""

EMBEDDING_NAMES = frozenset({"inputs_embeds", "per_layer_inputs"})
"""Inputs of a decoder that an embedding graph computes."""

ROLE_NAMES = {
    Role.INPUT_IDS: ("input_ids", "decoder_input_ids"),
    Role.ATTENTION_MASK: ("attention_mask",),
    Role.POSITION_IDS: ("position_ids",),
    Role.CACHE_POSITION: ("cache_position",),
    Role.LAST_POSITIONS: ("past_seq_len",),
    Role.TOTAL_LENGTH: ("total_seq_len",),
    Role.WRITE_INDICES: ("write_indices",),
    Role.VALID_LENGTHS: ("nonpad_kv_seqlen",),
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
    Role.USE_CACHE_BRANCH: (1,),
}
"""The ranks that an input of the role may have."""

UNSUPPORTED = (
    (r"cross|encoder", "it belongs to an encoder-decoder, and only decoder-only models can be evaluated"),
    (r"block_table|cumulative_sequence|attention_metadata|logits_indices", "a paged KV cache"),
    (r"cache_indirection", "beam search inside the graph"),
    (r"past_sequence|total_sequence|current_sequence", "lengths in place of an attention mask"),
    (r"key_scale|value_scale", "scales of a KV cache quantized for each token"),
    (r"num_logits_to_keep|logits_to_keep", "the graph cuts its logits itself"),
    (r"token_type_ids|_gate$", "token types or modality gates"),
    (r"conv|recurrent|ssm|past_states|state", "a state whose output is not known"),
)
"""Inputs that are recognised but not supported yet: a part of the name, and why. The first row that fits is told."""
