"""Packages by name: exports of the catalog, of pictures and sounds, and what was made of them by hand."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

from tests.exports import Export, export, genai_export, hf_model, quickstart
from tests.exports.cache import once
from tests.exports.catalog import CATALOG, GENAI_18
from tests.exports.genai import whisper_export
from tests.exports.mobius import mobius_export
from tests.exports.optimum import optimum_export

ROUNDED = {
    "int4-b32": {"bits": 4, "block_size": 32},
    "int4-b128": {"bits": 4, "block_size": 128},
    "int4-b64-zero-points": {"bits": 4, "block_size": 64, "symmetric": False},
    "int8-b32": {"bits": 8, "block_size": 32},
    "int8-b128": {"bits": 8, "block_size": 128},
}
"""The quickstart's model in weights whose activations are rounded to 8 bits (MatMulNBits of accuracy_level 4)."""

FEATURES = ("image_features", "image_features_of_layer_1")


@cache
def package(name: str) -> Export:
    """The package; FAMILY-installed is the builder's installed release, FAMILY@PROVIDER takes pictures or sounds, and
    what is after a slash is its decoder's file."""
    name = name.partition("/")[0]
    if name in CATALOG:
        return export(name)
    kind, _, rest = name.partition(" ")
    if rest:
        return MADE[kind](rest)
    family, _, provider = name.partition("@")
    if name.endswith("-installed"):
        family = name.removesuffix("-installed")
        return Export(name, genai_export(family), hf_model(family), family)
    from tests.exports.media import media_export

    path, hf = media_export(family, "f16" if provider == "cuda" else "f32", provider or "default")
    return Export(name, path, hf, family)


def _rounded(name: str) -> Export:
    return Export(name, quickstart.quantized(**ROUNDED[name], accuracy_level=4), quickstart.MODEL, name)  # type: ignore[arg-type]


def _step_wide(name: str) -> Export:
    """FORM EXPORTER."""
    from tests.exports.step_wide import step_wide_export

    form, exporter = name.split()
    family = "llama_dynamic" if form == "dynamic" else "llama"
    return Export(name, step_wide_export(form, exporter), hf_model(family), family)


def _genai(name: str) -> Export:
    """FAMILY PRECISION PROVIDER OPTION ..., by the installed builder."""
    family, precision, provider, *options = name.split()
    path = genai_export(family, None, precision, provider, tuple(options))
    return Export(name, path, hf_model(family), family, "genai", precision)


def _cuda(name: str) -> Export:
    """FAMILY PRECISION: for CUDA, by the builder that `.[gpu]` installs; "f16" by mobius."""
    family, precision = name.split()
    is_built = precision != "f16"
    path = genai_export(family, GENAI_18, precision, "cuda") if is_built else mobius_export(family, "f16", 0, "cuda")
    return Export(name, path, hf_model(family), family, "", precision)


def _media(name: str, path: Path, family: str) -> Export:
    from tests.exports.media import media_export

    return Export(name, path, media_export(family)[1], family)


def _checkpoint(name: str) -> Export:
    """On transformers."""
    from tests.exports.media import MEDIA_FAMILIES, SOUND_FAMILIES, media_export

    path = media_export(name)[1] if name in MEDIA_FAMILIES | SOUND_FAMILIES else hf_model(name)
    return Export(name, path, path, name)


def _plain(name: str) -> Export:
    """FAMILY PROVIDER: with an encoder of products alone."""
    from tests.exports.media import plain_encoder_export, plain_items_export

    family, provider = name.split()
    make = plain_encoder_export if family == "llava" else partial(plain_items_export, family)
    return _media(name, make("f32", provider), family)


def _padded(name: str) -> Export:
    """FORM COUNT: features with rows of padding."""
    from tests.exports.step_wide import padded_features

    form, count = name.split()
    names = FEATURES[: int(count)]
    return _media(name, padded_features(form, names, names), "llava_clip")


def _leaking(name: str) -> Export:
    from tests.exports.media import plain_encoder_export
    from tests.exports.step_wide import LEAKS, edited_encoder

    return _media(name, edited_encoder(name, plain_encoder_export("f32", "default"), LEAKS[name]), "llava")


def _beside(name: str) -> Export:
    """With an encoder whose rows depend on what else it is given."""
    from tests.exports.step_wide import ENCODER_FORMS, step_wide_encoder

    return _media(name, step_wide_encoder(name), ENCODER_FORMS[name][0])


def _by_the_mean(name: str) -> Export:
    """Features less their mean over all patches of a run, padding too."""
    from tests.exports.media import plain_items_export
    from tests.exports.step_wide import edited_encoder

    source = plain_items_export("qwen2_5_vl", "f32", "webgpu")
    path = edited_encoder(
        "mean", source, lambda edit, own: edit.add("Sub", own, edit.add("ReduceMean", own, keepdims=0))
    )
    return _media(name, path, "qwen2_5_vl")


def _by_hand(name: str) -> Export:
    """LLaVA 1.5 as a folder of graphs that nothing names."""
    from tests.exports.media import media_export

    source, _ = media_export("llava_clip")
    renamed = {"vision.onnx": "eyes.onnx", "embedding.onnx": "words.onnx"}

    def made(folder: Path) -> None:
        for file in source.iterdir():
            if file.name != "genai_config.json":
                shutil.copy(file, folder / renamed.get(file.name, file.name))

    return _media(name, once("by-hand", [source.parent.name], made), "llava_clip")


def _whisper(name: str) -> Export:
    """The "export" with its generation_config.json; "suppressing", with lists of tokens in that; or "checkpoint", the
    same for transformers."""
    source = hf_model("whisper") if name == "checkpoint" else whisper_export()

    def made(folder: Path) -> None:
        shutil.copytree(source, folder, dirs_exist_ok=True)
        file = folder / "generation_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), **suppressed()}), encoding="utf-8")

    is_plain = name == "export"
    path = source if is_plain else once(f"whisper-{name}", [source.name, suppressed()], made)
    return Export(name, path, hf_model("whisper"), "whisper")


def _heard(name: str) -> Export:
    """Whisper by an EXPORTER with the extractor's file that none of them writes."""
    import transformers

    others = {"mobius": mobius_export, "optimum": optimum_export}
    source = others[name]("whisper") if name in others else whisper_export()

    def made(folder: Path) -> None:
        shutil.copytree(source, folder, dirs_exist_ok=True)
        transformers.WhisperFeatureExtractor(feature_size=80).save_pretrained(folder)

    return Export(name, once(f"heard-{name}", [source.name], made), hf_model("whisper"), "whisper")


@cache
def suppressed() -> dict[str, list[int]]:
    """Tokens that the model would say without them: its first ones, and what it says most often later."""
    from olive_ext.session.requests import GenerationRequest
    from tests.agreement.asked import noises
    from tests.agreement.references import EOS, STOPS, encoder_decoder

    whisper = encoder_decoder(hf_model("whisper"))
    asked = [GenerationRequest(source=one, max_new_tokens=12) for one in noises()]
    said = [whisper.searched(one, (EOS,))[0][0] for one in asked]
    later = [token for answer in said for token in answer[1:]]
    return {
        "suppress_tokens": sorted({max(set(later), key=later.count), *STOPS[2:6], 900}),
        "begin_suppress_tokens": sorted({answer[0] for answer in said}),
    }


MADE: dict[str, Callable[[str], Export]] = {
    "rounded": _rounded,
    "step-wide": _step_wide,
    "genai": _genai,
    "cuda": _cuda,
    "plain": _plain,
    "padded": _padded,
    "leak": _leaking,
    "beside": _beside,
    "mean": _by_the_mean,
    "by-hand": _by_hand,
    "checkpoint": _checkpoint,
    "whisper": _whisper,
    "heard": _heard,
}
