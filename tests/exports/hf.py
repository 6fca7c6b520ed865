"""Random Hugging Face models of every family that the exporters know, small enough for seconds on a CPU.

Run as `python -m tests.exports.hf FAMILY FOLDER` it makes one; the tests call `hf_model`, which does that in a process
of its own and keeps the result.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.exports.cache import once, packages, run_python, source_of
from tests.exports.text import CONTEXT, VOCAB, save_tokenizer


@dataclass(frozen=True)
class Family:
    """What `transformers` makes the model from: names of its config class and auto class, and the config's values."""

    config: str
    values: dict[str, Any] = field(default_factory=dict)
    auto: str = "AutoModelForCausalLM"
    needs: tuple[str, ...] = ()
    """Releases to make it with, where the installed ones cannot."""


_IDS = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
_SHAPE = {
    **_IDS,
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}

FAMILIES = {
    "llama": Family("LlamaConfig", _SHAPE),
    "qwen3": Family("Qwen3Config", _SHAPE),
}


def hf_model(family: str) -> Path:
    """A Hugging Face folder with a random model of the family, fp32, and its tokenizer."""
    made = FAMILIES[family]
    path = [packages(*made.needs)] if made.needs else []
    recipe = [made.config, made.values, made.auto, made.needs, source_of("text.py")]
    return once(f"hf-{family}", recipe, lambda folder: run_python(["-m", __name__, family, folder], path=path))


def make(family: Family, folder: Path) -> None:
    """Write the model, the same for the same family on every machine."""
    import torch
    import transformers

    torch.manual_seed(7)
    config = getattr(transformers, family.config)(**family.values)
    getattr(transformers, family.auto).from_config(config).save_pretrained(folder)
    save_tokenizer(folder)


if __name__ == "__main__":
    make(FAMILIES[sys.argv[1]], Path(sys.argv[2]))
