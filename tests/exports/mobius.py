"""Exports by mobius: portable graphs (opset 24 Attention, KV returned grown), with a static cache, or for a GPU.

Run as `python -m tests.exports.mobius HF FOLDER OPTIONS` it makes one, OPTIONS being JSON: `dtype`, and perhaps
`static_cache` (slots) and `execution_provider`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.exports.cache import once, packages, run_python, source_of
from tests.exports.hf import FAMILIES, hf_model
from tests.exports.text import CONTEXT

RELEASE = ("mobius-onnx==0.1.0", "onnx-shape-inference==0.4.0")

RENAMED = {"mamba": ("backbone.", "model.")}
"""Weights that transformers writes under another name than mobius 0.1.0 looks for."""


def mobius_export(family: str, dtype: str = "f32", static_cache: int = 0, provider: str = "default") -> Path:
    """`hf_model(family)` as mobius exports it: one graph, or `decoder/`, `embedding/`, `vision_encoder/`, `encoder/`.

    With `static_cache` tokens the cache's inputs have that many places and are written at `write_indices`.
    """
    hf = hf_model(family)
    needs = FAMILIES[family].needs
    path = [packages(*RELEASE), *([packages(*needs)] if needs else [])]
    options = {"dtype": dtype, "static_cache": static_cache, "execution_provider": provider}
    recipe = [hf.name, RELEASE, options, source_of("mobius.py")]
    name = f"mobius-{family}-{dtype}-{provider}{'-static' if static_cache else ''}"
    return once(name, recipe, lambda folder: run_python(["-m", __name__, hf, folder, json.dumps(options)], path=path))


def _make(hf: str, folder: str, options: dict[str, object]) -> None:
    """Build from a local folder as `mobius build --config FOLDER` does.

    `mobius.build(folder)` finds weights there, but the export by model name asks the Hub for the tokenizer.
    """
    from mobius import _weight_loading, build
    from mobius.integrations.ort_genai.auto_export import export_package
    from mobius.tasks import CausalLMTask

    model_type = json.loads((Path(hf) / "config.json").read_text(encoding="utf-8"))["model_type"]
    if model_type in RENAMED:
        load, (theirs, ours) = _weight_loading.safetensors.torch.load_file, RENAMED[model_type]
        _weight_loading.safetensors.torch.load_file = lambda path: {
            key.replace(theirs, ours, 1): value for key, value in load(path).items()
        }
    static = options.pop("static_cache")
    task = CausalLMTask(static_cache=True, max_seq_len=static) if static else None
    package = build(hf, task=task, **options)
    provider = options["execution_provider"]
    export_package(
        package,
        folder,
        ep="cpu" if provider == "default" else provider,
        context_length=CONTEXT,
        local_config_dir=hf,
        progress_bar=False,
    )


if __name__ == "__main__":
    _make(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
