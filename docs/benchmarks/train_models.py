"""Trains two models of some 8 million parameters on the quickstart's generated text, and exports them.

    python -m docs.benchmarks train_models OUT [--only llama|qwen3] [--steps N]

A Llama with a head of its own and a Qwen 3 with tied embeddings, for `mended_models`: trained just enough that their
distributions are peaked and int4 loses something. OUT/NAME/hf is the checkpoint; OUT/NAME/fp32 and OUT/NAME/int4 are
the packages of onnxruntime-genai's builder. What is there already is kept.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: on a busy machine, waiting threads must not spin

from harness import ROOT, parser_of
from make_models import BUILDER

sys.path.insert(0, str(ROOT / "recipes" / "quickstart" / "make"))

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "initializer_range": 0.04,
    "dtype": "float32",
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 9, "tie_word_embeddings": False},
    "qwen3": {"num_hidden_layers": 10, "tie_word_embeddings": True},
}
CLASSES = {"llama": "Llama", "qwen3": "Qwen3"}
TOKENS_PER_STEP, WARMUP_STEPS, DOCUMENTS = 1024, 50, 8_000
PRECISIONS = ("fp32", "int4")


def main() -> None:
    """Trains and exports the models that are asked for."""
    parser = parser_of(__doc__, "out")
    parser.add_argument("--only", choices=MODELS)
    parser.add_argument("--steps", metavar="N", type=int, default=400)
    given = parser.parse_args()
    for name in [given.only] if given.only else list(MODELS):
        folder: Path = given.out / name
        if not (folder / "hf" / "model.safetensors").exists():
            trained(name, given.steps, folder / "hf")
        for precision in PRECISIONS:
            exported(folder / "hf", folder / precision, precision)


def trained(name: str, steps: int, folder: Path) -> None:
    """Writes the checkpoint, with the tokenizer of the same text."""
    import torch
    import train
    import transformers

    train.TOKENS_PER_STEP, train.WARMUP_STEPS = TOKENS_PER_STEP, WARMUP_STEPS
    text = list(train.training_text(DOCUMENTS))
    tokenizer = train.train_tokenizer(text)
    ends = {end: getattr(tokenizer, end) for end in ("bos_token_id", "eos_token_id", "pad_token_id")}
    sizes = {**SIZES, **MODELS[name], "vocab_size": train.VOCAB_SIZE, "max_position_embeddings": train.CONTEXT}
    config = getattr(transformers, f"{CLASSES[name]}Config")(**sizes, **ends)
    torch.manual_seed(0)
    model = getattr(transformers, f"{CLASSES[name]}ForCausalLM")(config)
    print(f"{name}: {model.num_parameters():,} parameters", flush=True)
    train.train(model, train.all_tokens(text, tokenizer), tokenizer, steps)
    train.save(model, tokenizer, folder)


def exported(checkpoint: Path, folder: Path, precision: str, **options: object) -> None:
    """Runs onnxruntime-genai's builder, in a process of its own; `options` are its extra options."""
    if any(folder.glob("*.onnx")):
        return
    extra = [f"{key}={value}" for key, value in options.items()]
    words = ["-i", checkpoint, "-o", folder, "-p", precision, "-e", "cpu", "-c", folder.parent / "builder-cache"]
    words += ["--extra_options", *extra] if extra else []
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    subprocess.run([sys.executable, "-c", BUILDER, *map(str, words)], check=True, env=environment)


if __name__ == "__main__":
    main()
