"""The tokenizer of every tiny model, and the words it knows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

VOCAB = 1024
CONTEXT = 512
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>"]
"""Token ids 0 to 3."""

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
TEXT = " ".join(
    f"{subject} {verb} the {adjective} {noun} number {number}."
    for number, (subject, verb, adjective, noun) in enumerate(
        (subject, verb, adjective, noun)
        for subject in ("Ann", "Bob", "The old cat", "A river", "Nobody", "Everyone here")
        for verb in ("sees", "carries", "forgets", "paints", "measures", "will follow")
        for adjective in ("blue", "heavy", "second", "quiet", "broken")
        for noun in ("stone", "wheel", "letter", "garden", "engine")
    )
)
"""What the tokenizers are trained on, and what tests take words from."""


def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer that puts <bos> first, as Llama's does, with a chat template."""
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=SPECIAL, initial_alphabet=alphabet)
    bpe.train_from_iterator([TEXT], trainer)
    bpe.post_processor = processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", SPECIAL.index("<bos>"))])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT,
    )


def save_tokenizer(folder: Path) -> None:
    """Save it under the class name that transformers 4 and 5 both know (5 alone would write its own)."""
    tokenizer().save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**config, "tokenizer_class": "PreTrainedTokenizerFast"}, indent=2), encoding="utf-8")
