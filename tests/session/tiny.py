"""What texts need of a model, without one, and small tokenizers made on the spot: byte-level BPE with and without BOS,
and SentencePiece-like with byte fallback."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

from tokenizers import Tokenizer as Core
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from olive_ext.model.types import ModelFiles
from olive_ext.session.tokenizer import Tokenizer

CORPUS = [
    "the cat sat on the mat and the dog ran off with the hat",
    "Question: what is it? Answer: a thing, nothing, anything",
    "end of the text\n\nnext text begins here. stop here stopped stopping",
    "naïve café 東京 は 日本 の 首都 です 🙂🙃",
]
SPECIALS = ["<pad>", "<eos>", "<bos>", "<|im_start|>", "<|im_end|>"]
PAD, EOS, BOS, IM_START, IM_END = range(5)
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_SYSTEM = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"


def model_files(
    folder: Path, genai: Mapping[str, object] | None = None, config: Mapping[str, object] | None = None
) -> ModelFiles:
    """Of a package in `folder`, where nothing need be, with its two configurations."""
    return ModelFiles(folder / "model.onnx", folder, genai or {}, config or {}, str(folder))


@functools.cache
def byte_level(has_bos: bool = True, template: str | None = None) -> Tokenizer:
    """GPT-2's kind; spaces belong to the word behind them, and characters may be split over tokens."""
    core = Core(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=320, special_tokens=SPECIALS, initial_alphabet=alphabet)
    )
    special = {"eos_token": "<eos>", "pad_token": "<pad>", "additional_special_tokens": SPECIALS[3:]}
    if has_bos:
        special["bos_token"] = "<bos>"
        core.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    hf = PreTrainedTokenizerFast(tokenizer_object=core, **special)
    hf.chat_template = template
    return Tokenizer(hf, "byte_level")


@functools.cache
def byte_fallback() -> Tokenizer:
    """Llama 2's kind: the decoder drops the first space, and characters it does not know are runs of byte tokens."""
    core = Core(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    letters = sorted(set("▁abcdefghijklmnopqrstuvwxyz.?,:\n"))
    vocab = ["<unk>", "<eos>", "<bos>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, "▁t", "▁th", "▁the"]
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e")]
    numbers = {piece: number for number, piece in enumerate(vocab)}
    core.model = models.BPE(vocab=numbers, merges=merges, unk_token="<unk>", byte_fallback=True)
    hf = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<bos>", eos_token="<eos>", unk_token="<unk>")
    return Tokenizer(hf, "byte_fallback")
