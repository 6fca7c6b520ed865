"""Tiny models with random weights, exported by real exporters, kept in a folder between test runs.

The folder is `.cache/exports` beside the tests, or $OLIVE_EXT_TEST_CACHE. What is in it depends on nothing but this
file and the exporter's version, so it can be deleted at any time.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedTokenizerFast, Qwen3Config

VOCAB = 1024
CONTEXT = 512
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>"]
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

_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, type[PretrainedConfig]] = {"llama": LlamaConfig, "qwen3": Qwen3Config}


def cache_folder() -> Path:
    """Where exports are kept; a new one when this file changes."""
    root = os.environ.get("OLIVE_EXT_TEST_CACHE")
    base = Path(root) if root else Path(__file__).resolve().parents[1] / ".cache" / "exports"
    return base / hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]


def hf_model(family: str) -> Path:
    """A Hugging Face folder with a random model of the family ("llama", "qwen3"), fp32, and its tokenizer."""
    return _once(f"hf-{family}", lambda folder: _make_hf(family, folder))


def genai_export(family: str, release: str | None = None, precision: str = "fp32") -> Path:
    """`hf_model(family)` exported for the CPU by onnxruntime-genai's builder, the one installed or another release."""
    name = f"genai-{release or version('onnxruntime-genai')}-{family}-{precision}"
    return _once(name, lambda folder: _build(hf_model(family), folder, release, precision))


def _make_hf(family: str, folder: Path) -> None:
    import torch

    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(CONFIGS[family](**_SHAPE)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer that puts <bos> first, as Llama's does, with a chat template."""
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


def _build(hf: Path, folder: Path, release: str | None, precision: str) -> None:
    environment = dict(os.environ, HF_HUB_OFFLINE="1")
    if release is not None and release != version("onnxruntime-genai"):
        environment["PYTHONPATH"] = str(_once(f"onnxruntime-genai-{release}", lambda place: _install(release, place)))
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-m", str(hf), "-o", str(folder)]
    command += ["-p", precision, "-e", "cpu", "-c", str(folder / "builder-cache")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (folder / "model.onnx").is_file(), done.stderr[-2000:]


def _install(release: str, folder: Path) -> None:
    """Another release beside the installed one; needs the package index, and skips the test where there is none."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder)]
    done = subprocess.run([*command, f"onnxruntime-genai=={release}"], capture_output=True, text=True, check=False)
    if done.returncode:
        shutil.rmtree(folder)
        pytest.skip(f"onnxruntime-genai {release} cannot be installed here: {done.stderr.strip().splitlines()[-1]}")


def _once(name: str, make: object) -> Path:
    """The folder `name`, made by `make(folder)` on first use; an interrupted make leaves nothing."""
    assert callable(make)
    folder = cache_folder() / name
    if not folder.is_dir():
        work = folder.with_name(f"{name}.{os.getpid()}")
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        make(work)
        work.rename(folder)
    return folder
