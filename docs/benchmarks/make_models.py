"""Makes the benchmark models: random weights, a fixed seed, real shapes.

python docs/benchmarks/make_models.py OUT --shape smollm2-135m --precision fp32,int4
    OUT/hf: configuration, weights (safetensors) and tokenizer; OUT/fp32, OUT/int4: ONNX packages.

Timings, memory and agreement do not depend on the weights' values; accuracies do, and mean nothing here.

Without --tokenizer, a byte-level BPE tokenizer of the shape's vocabulary is trained on English text that every machine
with lm-eval and Python has, and on the files of --text, which bring it close to published ones in tokens per word. A
published one itself (--tokenizer DIR or a hub name) gives the prompts their published lengths.

Llama and Qwen are exported by onnxruntime-genai's builder, Gemma 4 by mobius, whose last release needs an older
transformers than ours. Both go into a folder of their own, which --packages names:

    pip install --no-deps --target DIR mobius-onnx==0.1.0 onnx-shape-inference==0.4.0 transformers==5.10.4 \
        tokenizers==0.22.2 huggingface_hub==1.5.0 httpx==0.28.1 httpcore==1.0.9
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SEED = 7
BUILDER = (
    "import sys; sys.path[:] = filter(None, sys.path); "  # nothing from the working directory
    "import runpy; runpy.run_module('onnxruntime_genai.models.builder', run_name='__main__', alter_sys=True)"
)


@dataclass(frozen=True)
class Shape:
    """What `transformers` makes the model from, and which exporter makes ONNX graphs of it."""

    config: str
    values: dict[str, Any] = field(default_factory=dict)
    exporter: str = "genai"


def _llama3(factor: float) -> dict[str, Any]:
    scaling = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    return {"rope_type": "llama3", "rope_theta": 500000.0, "factor": factor, **scaling}


def _gemma4(full: int, **values: Any) -> dict[str, Any]:
    """Four windowed layers and one full one by turns, `full` full ones."""
    sliding = {"rope_type": "default", "rope_theta": 10000.0}
    wide = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    layers = (["sliding_attention"] * 4 + ["full_attention"]) * full
    return {
        "num_hidden_layers": len(layers),
        "layer_types": layers,
        "rope_parameters": {"sliding_attention": sliding, "full_attention": wide},
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
        **values,
    }


def _tiny_llama(num_layers: int) -> Shape:
    values = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 2048,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    }
    return Shape("LlamaConfig", values)


SHAPES = {
    "smollm2-135m": Shape(
        "LlamaConfig",
        {
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "vocab_size": 49152,
            "max_position_embeddings": 8192,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
            "tie_word_embeddings": True,
        },
    ),
    "qwen2.5-0.5b": Shape(
        "Qwen2Config",
        {
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "vocab_size": 151936,
            "max_position_embeddings": 32768,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
        },
    ),
    "llama-3.2-1b": Shape(
        "LlamaConfig",
        {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "vocab_size": 128256,
            "max_position_embeddings": 131072,
            "rope_parameters": _llama3(32.0),
            "tie_word_embeddings": True,
        },
    ),
    "long-llama": Shape(
        "LlamaConfig",
        {
            "hidden_size": 256,
            "intermediate_size": 768,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 2048,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
        },
    ),
    "gemma-4-e2b": Shape(
        "Gemma4TextConfig",
        _gemma4(
            7,
            hidden_size=1536,
            intermediate_size=6144,
            use_double_wide_mlp=True,
            num_attention_heads=8,
            num_key_value_heads=1,
            head_dim=256,
            global_head_dim=512,
            num_kv_shared_layers=20,
            sliding_window=512,
            hidden_size_per_layer_input=256,
            vocab_size=262144,
            vocab_size_per_layer_input=262144,
            max_position_embeddings=131072,
        ),
        exporter="mobius",
    ),
    # For trying this script and the benchmarks out: seconds, not minutes.
    "tiny": _tiny_llama(num_layers=2),
    # As many layers as Llama-3.2-1B, which is what a step costs the host.
    # As many as SmolLM2-135M, for counts that do not depend on widths.
    "tiny-30-layers": _tiny_llama(num_layers=30),
    "tiny-gemma-4": Shape(
        "Gemma4TextConfig",
        _gemma4(
            2,
            hidden_size=64,
            intermediate_size=128,
            use_double_wide_mlp=True,
            num_attention_heads=4,
            num_key_value_heads=1,
            head_dim=16,
            global_head_dim=32,
            num_kv_shared_layers=5,
            sliding_window=64,
            hidden_size_per_layer_input=8,
            vocab_size=2048,
            vocab_size_per_layer_input=2048,
            max_position_embeddings=8192,
        ),
        exporter="mobius",
    ),
}


def make(given: argparse.Namespace) -> None:
    """Makes what is missing under OUT, each step in a process of its own; a folder that is there is kept."""
    if not (given.out / "hf" / "tokenizer.json").exists():
        _step(given, "hf")
    for precision in given.precision.split(","):
        folder = given.out / precision
        if not any(folder.rglob("*.onnx")):
            folder.mkdir(parents=True, exist_ok=True)
            if SHAPES[given.shape].exporter == "mobius":
                _step(given, precision)
                _step(given, f"{precision}-weights")
            else:
                _run(["-c", BUILDER, *_builder_options(given, precision)])
        print(f"{folder} {sum(file.stat().st_size for file in folder.rglob('*') if file.is_file()) / 1e6:.0f} MB")


def _builder_options(given: argparse.Namespace, precision: str) -> list[object]:
    cache = given.out / "builder-cache"
    words = ["-i", given.out / "hf", "-o", given.out / precision, "-p", precision, "-e", given.device, "-c", cache]
    return [*words, "--extra_options", *given.extra] if given.extra else words


def _step(given: argparse.Namespace, name: str) -> None:
    """This script again, for one step of it; with --packages where the exporter needs them."""
    needs_packages = SHAPES[given.shape].exporter == "mobius" and not name.endswith("-weights")
    _run([*sys.argv, "--step", name], given.packages if needs_packages else None)


def _run(arguments: Sequence[object], packages: Path | None = None) -> None:
    environment = dict(os.environ, HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
    if packages is not None:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(packages), environment.get("PYTHONPATH")]))
    subprocess.run([sys.executable, *map(str, arguments)], check=True, env=environment)


def do_step(given: argparse.Namespace) -> None:
    """One step: `hf`; a precision, for mobius; `<precision>-weights`, which brings weights to 4 bits for int4."""
    precision, _, is_weights = given.step.partition("-")
    if given.step == "hf":
        make_hf(given)
    elif not is_weights:
        export_with_mobius(given, precision)
    elif precision == "int4":
        quantize(given.out / precision)


def make_hf(given: argparse.Namespace) -> None:
    """The Hugging Face folder. Weights are normal with the deviation 1/sqrt(hidden size), so that no layer fades."""
    import torch
    import transformers

    wanted, folder = SHAPES[given.shape], given.out / "hf"
    made = published(given.tokenizer) if given.tokenizer else trained(wanted.values["vocab_size"], given.text)
    end = made.eos_token_id
    config = getattr(transformers, wanted.config)(
        **wanted.values,
        initializer_range=wanted.values["hidden_size"] ** -0.5,
        bos_token_id=end if made.bos_token_id is None else made.bos_token_id,
        eos_token_id=end,
        pad_token_id=end if made.pad_token_id is None else made.pad_token_id,
    )
    torch.manual_seed(SEED)
    dtype = torch.float16 if given.device == "cuda" else torch.float32
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    if given.spread:
        with torch.no_grad():
            for product in model.model.layers.modules():
                if isinstance(product, torch.nn.Linear):
                    product.weight *= (given.spread * torch.randn(())).exp()
    model.save_pretrained(folder)
    made.save_pretrained(folder)
    file = folder / "tokenizer_config.json"  # the class name that every release of transformers knows
    known = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**known, "tokenizer_class": "PreTrainedTokenizerFast"}, indent=2), encoding="utf-8")


def published(name: str) -> Any:
    """The tokenizer of a folder or of the hub."""
    import transformers

    return transformers.AutoTokenizer.from_pretrained(name)


def trained(vocabulary: int, texts: Sequence[Path] = ()) -> Any:
    """A byte-level BPE tokenizer of exactly `vocabulary` tokens, digits on their own as SmolLM2's has them.

    Tokens that the text does not yield are filled up with names that encode nothing, so that whatever a random model
    generates can be decoded.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    end = "<|endoftext|>"
    bpe = Tokenizer(models.BPE())
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), by_bytes])
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[end], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(corpus(texts), trainer)
    written = json.loads(bpe.to_str())
    known = written["model"]["vocab"]
    for number in range(len(known), vocabulary):
        known[f"unused{number}"] = number
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(written)),
        bos_token=end,
        eos_token=end,
        pad_token=end,
        unk_token=end,
    )


def corpus(texts: Sequence[Path]) -> Iterator[str]:
    """English text of the installation: lm-eval's task descriptions and the documentation in Python's own modules."""
    import lm_eval

    tasks = Path(lm_eval.__file__).parent
    shipped = [
        *sorted(tasks.rglob("*.md")),
        *sorted(tasks.rglob("*.yaml")),
        *sorted(Path(os.__file__).parent.glob("*.py")),
    ]
    for path in [*shipped, *texts]:
        yield path.read_text(encoding="utf-8", errors="ignore")


def export_with_mobius(given: argparse.Namespace, precision: str) -> None:
    """The graph with its weights as they are stored: float16 for a GPU, else float32."""
    from mobius import build
    from mobius.integrations.ort_genai.auto_export import export_package

    hf = given.out / "hf"
    dtype = "f16" if precision == "fp16" or (precision == "int4" and given.device == "cuda") else "f32"
    package = build(str(hf), dtype=dtype, execution_provider="default" if given.device == "cpu" else given.device)
    length = SHAPES[given.shape].values["max_position_embeddings"]
    options = {"context_length": length, "local_config_dir": str(hf), "progress_bar": False}
    export_package(package, str(given.out / precision), ep=given.device, **options)


def quantize(folder: Path) -> None:
    """Every product with a weight to 4 bits, as the builder's int4 has them."""
    import onnx
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    graph = next(folder.rglob("*.onnx"))
    model = onnx.load(graph)
    for file in graph.parent.glob("*.onnx*"):
        file.unlink()
    quantizer = MatMulNBitsQuantizer(model, bits=4, block_size=32, is_symmetric=True, accuracy_level=4)
    quantizer.process()
    quantizer.model.save_model_to_file(str(graph), use_external_data_format=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("out", metavar="OUT", type=Path)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--precision", metavar="A,B", default="fp32,int4", help="default: %(default)s")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--tokenizer", metavar="DIR|NAME", help="a published tokenizer instead of a trained one")
    parser.add_argument("--text", metavar="FILE", type=Path, nargs="*", default=[], help="more to train one on")
    parser.add_argument("--packages", metavar="DIR", type=Path, help="put before the installed packages for mobius")
    parser.add_argument("--spread", metavar="S", type=float, help="deviation of the logarithm of each product's scale")
    parser.add_argument("--extra", metavar="KEY=VALUE", nargs="*", default=[], help="extra options of the builder")
    parser.add_argument("--step", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    arguments = _parser().parse_args()
    (do_step if arguments.step else make)(arguments)
