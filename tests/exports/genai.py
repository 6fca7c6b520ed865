"""Exports by onnxruntime-genai's builder: the release installed, or another one from the package index.

Run as `python -m tests.exports.genai ARGUMENTS` it is the builder's command with one addition, see `_flat_rope`.
"""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path
from typing import Any

from olive_ext.package_versions import installed
from tests.exports.cache import once, packages, run_python, source_of
from tests.exports.hf import FAMILIES, hf_model
from tests.exports.text import TEXT

BUILDER = "onnxruntime_genai.models.builder"
CALIBRATION = "onnxruntime_genai.models.quantization.kv_cache_calibration"
_FLAT_ROPE = ("gemma3_text",)


def whisper_export() -> Path:
    """The export of Whisper with the file that names the decoder's first token, which it leaves out."""
    export, original = genai_export("whisper", "0.18.0"), hf_model("whisper")

    def made(folder: Path) -> None:
        shutil.copytree(export, folder, dirs_exist_ok=True)
        shutil.copy(original / "generation_config.json", folder)

    return once("whisper-genai", [export.name, original.name], made)


def speech_export() -> Path:
    """The export of the speech recipe's model, a Whisper that has learned to hear tones."""
    source = Path(__file__).resolve().parents[2] / "recipes" / "speech" / "model"
    wanted, path = _release("0.18.0", "whisper")

    def build(folder: Path) -> None:
        arguments = ["-m", BUILDER, "-i", source, "-o", folder, "-p", "fp32", "-e", "cpu"]
        run_python([*arguments, "-c", folder / "builder-cache"], path=path)
        assert list(folder.glob("*.onnx")), "the builder wrote no graph"

    sizes = [file.stat().st_size for file in sorted(source.iterdir())]
    return once("speech-genai", [wanted, sizes], build)


def genai_export(
    family: str,
    release: str | None = None,
    precision: str = "fp32",
    provider: str = "cpu",
    options: tuple[str, ...] = (),
) -> Path:
    """`hf_model(family)` as the builder's release (None: the one installed) exports it for a provider.

    `options` are the builder's extra options, KEY=VALUE. With kv_cache_quant_scheme the scales are calibrated first, by
    the exporter's own tool on the same model with fp32 KV.
    """
    hf, wanted, path = hf_model(family), *_release(release, family)
    patched = family in _FLAT_ROPE
    scheme = next((option.partition("=")[2] for option in options if option.startswith("kv_cache_quant_scheme=")), None)
    scales = [f"kv_cache_scale_file={_kv_scales(family, release, scheme)}"] if scheme else []

    def build(folder: Path) -> None:
        arguments = ["-m", __name__ if patched else BUILDER, "-i", hf, "-o", folder, "-p", precision, "-e", provider]
        arguments += ["-c", folder / "builder-cache"]
        if options:
            arguments += ["--extra_options", *options, *scales]
        run_python(arguments, path=path)
        assert list(folder.glob("*.onnx")), "the builder wrote no graph"

    recipe = [hf.name, wanted, options, source_of("genai.py") if patched or scheme else ""]
    return once(f"genai-{wanted}-{family}-{precision}-{provider}", recipe, build)


def _release(release: str | None, family: str) -> tuple[str, list[Path]]:
    """The release to use, and what to put before the installed packages."""
    own = installed("onnxruntime-genai")
    wanted = release or own
    path = [] if wanted == own else [packages(f"onnxruntime-genai=={wanted}")]
    needs = FAMILIES[family].needs
    return wanted, path + ([packages(*needs)] if needs else [])


def _kv_scales(family: str, release: str | None, scheme: str) -> Path:
    hf, wanted, path = hf_model(family), *_release(release, family)
    plain = genai_export(family, release)

    def calibrate(folder: Path) -> None:
        sentences = TEXT.split(". ")
        corpus = folder / "corpus.txt"
        corpus.write_text("\n\n".join(". ".join(sentences[at : at + 9]) for at in range(0, 90, 9)), encoding="utf-8")
        arguments = ["-m", CALIBRATION, "--model", plain, "--tokenizer", hf, "--out", folder / "scales.json"]
        arguments += ["--quant-type", scheme, "--method", "minmax", "--corpus-file", corpus]
        run_python([*arguments, "--target-seq", "64", "--num-seqs", "8"], path=path)

    recipe = [plain.name, wanted, scheme, source_of("genai.py", "text.py")]
    return once(f"kv-scales-{wanted}-{family}-{scheme}", recipe, calibrate) / "scales.json"


def _flat_rope(config: Any) -> Any:
    """Give Gemma 3's configuration the names that the builder reads.

    transformers 5 keeps the rotary parameters of full and windowed layers apart; the builder looks for one set and for
    `rope_local_base_freq`, which are transformers 4's, and no release of it runs with transformers 4.
    """
    if getattr(config, "model_type", None) in _FLAT_ROPE:  # a model loading itself asks for more than the configuration
        config.rope_local_base_freq = config.rope_parameters["sliding_attention"]["rope_theta"]
        config.rope_theta = config.rope_parameters["full_attention"]["rope_theta"]
        config.rope_parameters = {**config.rope_parameters["full_attention"], **config.rope_parameters}
    return config


def _run_patched_builder() -> None:
    import transformers

    load = transformers.AutoConfig.from_pretrained
    transformers.AutoConfig.from_pretrained = lambda *args, **kwargs: _flat_rope(load(*args, **kwargs))
    runpy.run_module(BUILDER, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _run_patched_builder()
