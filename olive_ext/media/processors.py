"""Loads transformers' image processors and feature extractors from a package's own files. They run on PIL and numpy. No
code of the package runs, with `trust_remote_code` either.

A package has these files in transformers' form (preprocessor_config.json, processor_config.json), or in the form of
onnxruntime-extensions, which mobius and onnxruntime-genai write and this module reads.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from olive_ext.errors import DamagedError, ModelError, NotFoundError, first_line
from olive_ext.model.files.package_config import inside, is_same, read_json, refuse_strangers
from olive_ext.model.types import ModelFiles, TensorSpec

HF_FILES = ("preprocessor_config.json", "processor_config.json")
EXTENSIONS_FILES = ("processor_config.json", "image_processor.json", "vision_processor.json")

LARGEST_SIZES: Mapping[str, int] = {
    **dict.fromkeys(("height", "width", "image_size"), 2**13),
    **dict.fromkeys(("shortest_edge", "longest_edge", "min_pixels", "max_pixels"), 2**28),
    **dict.fromkeys(("patch_size", "merge_size", "temporal_patch_size", "pooling_kernel_size"), 2**12),
    **dict.fromkeys(("feature_size", "num_mel_bins", "num_mel_filters"), 2**12),
    **dict.fromkeys(("n_fft", "fft_length", "frame_length", "hop_length", "win_length"), 2**16),
    **dict.fromkeys(("chunk_length", "max_length_s"), 3600),
    "sampling_rate": 2**20,
    **dict.fromkeys(("n_samples", "nb_max_frames"), 2**28),
    **dict.fromkeys(("image_seq_length", "audio_seq_length", "max_soft_tokens", "max_num_tiles", "num_crops"), 2**20),
}
"""Upper bounds: an edge in pixels, an area (which Qwen's processors call edges), mels, samples of a frame, seconds,
samples a second or a window, tokens. Published models are far below."""


def folders_of(files: ModelFiles) -> tuple[Path, ...]:
    """Where a model's processors may have their files, in order of preference."""
    return files.directory, files.decoder.parent, Path(files.tokenizer)


def image_processor_of(files: ModelFiles) -> tuple[Any, Path]:
    """As `load_image_processor`, by a model's files."""
    named = files.genai_config.get("model", {}).get("vision", {}).get("config_filename")
    return load_image_processor(folders_of(files), named)


def load_image_processor(folders: Iterable[Path], named: str | None) -> tuple[Any, Path]:
    """The image processor of the first of `folders` that has one, and its file; `named` is the file that
    genai_config.json names. Raises `ModelError` where there is none, or its file is not understood."""
    for found in _image_processors(folders, named):
        return found
    looked, names = ", ".join(f"'{folder}'" for folder in dict.fromkeys(folders)), {*HF_FILES, *EXTENSIONS_FILES}
    raise NotFoundError(f"no image processor found: none of {', '.join(names)} is in {looked}")


def _image_processors(folders: Iterable[Path], named: str | None) -> Iterator[tuple[Any, Path]]:
    """The loaders of files: transformers' form first, then that of onnxruntime-extensions."""
    for file in (folder / name for folder in dict.fromkeys(folders) for name in HF_FILES):
        content = read_json(file) if file.is_file() else {}
        if "image_processor_type" in {*content, *content.get("image_processor", {})}:
            yield _loaded("AutoImageProcessor", file.parent, backend="pil"), file
    for folder in dict.fromkeys(folders):
        first = [inside(folder, named, "model.vision.config_filename")] if named else []
        for file in (*first, *(folder / name for name in EXTENSIONS_FILES)):
            if file.is_file() and "processor" in (content := read_json(file)):
                yield _of_extensions(content, file), file


def other_image_processor(folders: Iterable[Path], named: str | None) -> dict[str, str]:
    """How the file that onnxruntime-genai reads prepares pictures otherwise than `load_image_processor` does. Empty
    where it does not, where that is the only file, or where it is not understood."""
    loaded: list[tuple[Any, Path]] = []
    with suppress(ModelError):
        loaded.extend(_image_processors(folders, named))
    if len(loaded) < 2:
        return {}
    (one, read), *_, (other, own) = loaded
    what = other_pictures(numbers_of(one), numbers_of(other))
    return {own.name: f"prepares pictures with {what} of {read.name}"} if what else {}


def numbers_of(processor: Any) -> dict[str, Any]:
    """The numbers and switches of a processor, JSON-ready."""
    known, kinds = processor.to_dict().items(), (int, float, list, tuple, dict)
    return {key: json.loads(json.dumps(value)) for key, value in known if isinstance(value, kinds)}


def other_pictures(known: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """By `numbers_of` two processors, how the other one prepares pictures otherwise than the known one: "resample 0 for
    3"."""
    shared = [key for key in other if known.get(key) is not None]
    return ", ".join(f"{key} {other[key]} for {known[key]}" for key in shared if not is_same(other[key], known[key]))


_GENAI_SOUND = "audio_processor_config.json"
_SOUND_KEYS = {
    "hop_length": "hop_length",
    "n_fft": "n_fft",
    "frame_length": "n_fft",
    "n_mel": "feature_size",
    "chunk_size": "chunk_length",
    "target_sample_rate": "sampling_rate",
    "target_sample_rates": "sampling_rate",
}
"""Keys of onnxruntime-genai's steps for sound, and transformers' names for them."""


def other_feature_extractor(folder: Path, source: TensorSpec) -> dict[str, str]:
    """How the file that onnxruntime-genai reads in `folder` prepares sound otherwise than `load_feature_extractor`'s
    for an encoder that takes `source`; empty where it does not. Raises `ModelError` as that does."""
    file, known = folder / _GENAI_SOUND, load_feature_extractor([folder], source).to_dict()
    steps = read_json(file).get("feature_extraction", {}).get("sequence", ()) if file.is_file() else ()
    written = [pair for step in steps for pair in step.get("operation", {}).get("attrs", {}).items()]
    shared = [(key, value, known[_SOUND_KEYS[key]]) for key, value in written if _SOUND_KEYS.get(key) in known]
    what = dict.fromkeys(f"{key} {value} for {own}" for key, value, own in shared if value not in (own, [own]))
    return {file.name: f"prepares sound with {', '.join(what)} of transformers'"} if what else {}


def load_feature_extractor(folders: Iterable[Path], source: TensorSpec) -> Any:
    """The feature extractor of the first of `folders` that has one; else Whisper's, for an encoder that takes `source`
    [B, mels, frames]. Raises `ModelError` where its features would not fit."""
    from transformers import WhisperFeatureExtractor

    _, mels, frames = source.shape
    for folder in dict.fromkeys(folders):
        file = folder / HF_FILES[0]
        if file.is_file() and "feature_extractor_type" in read_json(file):
            extractor = _loaded("AutoFeatureExtractor", folder)
            if isinstance(mels, int) and extractor.feature_size != mels:
                taken = f"the encoder takes '{source.name}' {list(source.shape)}"
                raise ModelError(f"'{file}' makes {extractor.feature_size} mels; {taken}")
            return extractor
    if not isinstance(mels, int) or not isinstance(frames, int):
        raise ModelError(f"no {HF_FILES[0]} is in the package, and the encoder does not declare its features' shape")
    whisper: Any = WhisperFeatureExtractor
    return whisper(feature_size=mels, chunk_length=frames * 160 // 16000)


def slaney_filters(num_bins: int, num_mels: int, rate: int) -> Any:
    """The mel filter bank [bins, mels] in Slaney's scale and norm, from 0 to half the sampling rate, as float64."""
    from transformers.audio_utils import mel_filter_bank

    return mel_filter_bank(num_bins, num_mels, 0.0, rate / 2, rate, norm="slaney", mel_scale="slaney")


@contextmanager
def torch_threads(number: int | None) -> Iterator[None]:
    """Within it, torch's operators, which feature extractors use, have `number` threads; None changes nothing."""
    if number is None:
        yield
        return
    import torch

    kept = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(kept)


def load_sound_processor(folders: Iterable[Path]) -> tuple[Any, Path]:
    """transformers' processor of a model that takes sound among its tokens, which knows how many a sound takes, and its
    file. Raises `ModelError` where no folder has one with a feature extractor."""
    folders = list(dict.fromkeys(folders))
    for file in (folder / name for folder in folders for name in HF_FILES):
        content = read_json(file) if file.is_file() else {}
        if "processor_class" in content and {"feature_extractor", "feature_extractor_type"} & content.keys():
            try:
                return _without_pictures(content, file.parent), file
            except Exception as error:
                raise ModelError(f"no processor can be made of '{file}': {first_line(error)}") from error
    looked = ", ".join(f"'{folder}'" for folder in folders)
    raise ModelError(
        f"no processor of sound found: no {' or '.join(HF_FILES)} with a 'processor_class' and a feature extractor is "
        f"in {looked}: put the original model's there"
    )


def _without_pictures(content: Mapping[str, Any], folder: Path) -> Any:
    """The processor of a class that transformers has, with its tokenizer and feature extractor alone: its processors of
    pictures and videos, which sound does not need and which need torchvision, stay None."""
    import transformers

    made = getattr(transformers, content["processor_class"], None)
    if not isinstance(made, type) or not issubclass(made, transformers.ProcessorMixin):
        raise ModelError(f"transformers have no processor '{content['processor_class']}'")
    lenient = type(made.__name__, (made,), {"check_argument_for_proper_class": lambda self, name, given: type(given)})
    asked = set(inspect.signature(made).parameters)
    parts = dict.fromkeys(asked & {"image_processor", "video_processor"})
    numbers = {name: content[name] for name in asked & content.keys() if isinstance(content[name], (int, float))}
    extractor, tokenizer = (_loaded(name, folder) for name in ("AutoFeatureExtractor", "AutoTokenizer"))
    return lenient(feature_extractor=extractor, tokenizer=tokenizer, **parts, **numbers)


def _loaded(name: str, folder: Path, **options: Any) -> Any:
    """What transformers' class `name` loads from `folder`. Python in the folder does not run. Raises `ModelError`."""
    import transformers

    refuse_strangers(folder)
    for file in (folder / written for written in HF_FILES):
        refuse_sizes(read_json(file) if file.is_file() else {}, file)
    try:
        return getattr(transformers, name).from_pretrained(str(folder), trust_remote_code=False, **options)
    except Exception as error:
        has_code = "trust_remote_code" in str(error)
        why = "it brings Python code of its own ('auto_map'), which is never run" if has_code else first_line(error)
        raise ModelError(f"no {name.removeprefix('Auto')} can be loaded from '{folder}': {why}") from error


def _of_extensions(content: Mapping[str, Any], file: Path) -> Any:
    """transformers' processor for a file of onnxruntime-extensions."""
    import transformers

    refuse_sizes(content, file)
    steps = [step["operation"] for step in content["processor"].get("transforms", ())]
    by_type = {step["type"]: step.get("attrs", {}) for step in steps}
    resize, normalize = by_type.get("Resize", {}), by_type.get("Normalize", {})
    scales = {"image_mean": normalize.get("mean"), "image_std": normalize.get("std")}
    if (gemma := by_type.get("Gemma4ImageTransform")) is not None:
        return transformers.Gemma4ImageProcessorPil(**gemma)
    if resize.get("smart_resize"):
        sizes = {name: value for name, value in resize.items() if name not in ("height", "width", "smart_resize")}
        return transformers.Qwen2VLImageProcessorPil(**sizes, **scales)
    if by_type.keys() <= {"DecodeImage", "ConvertRGB", "Resize", "CenterCrop", "Rescale", "Normalize", "Permute3D"}:
        return _plain(by_type, resize, scales)
    raise ModelError(f"'{file}' has unknown steps ({', '.join(by_type)}): give the original preprocessor_config.json")


def _plain(by_type: Mapping[str, Any], resize: Mapping[str, Any], scales: Mapping[str, Any]) -> Any:
    """An image processor that resizes, may crop, scales and normalizes pictures to one size (CLIP's and SigLIP's)."""
    from transformers import CLIPImageProcessorPil

    crop = by_type.get("CenterCrop")
    size = {"height": resize.get("height"), "width": resize.get("width")}
    if resize.get("keep_aspect", 1) and crop is not None:
        size = {"shortest_edge": min(value for value in size.values() if value)}
    resample = {"LINEAR": 2, "BILINEAR": 2, "NEAREST": 0, "LANCZOS": 1}.get(resize.get("interpolation", "CUBIC"), 3)
    return CLIPImageProcessorPil(
        do_resize=bool(resize),
        size=size if resize else None,
        resample=resample,
        do_center_crop=crop is not None,
        crop_size=crop,
        do_normalize="Normalize" in by_type,
        **scales,
    )


def refuse_sizes(content: Any, file: Path, name: str = "") -> None:
    """Raises `ModelError` for a number anywhere in a processor's `file` that is below 1 or above its bound."""
    inner = content.items() if isinstance(content, Mapping) else enumerate(content) if isinstance(content, list) else ()
    for key, value in inner:
        path = f"{name}.{key}" if name else str(key)
        refuse_sizes(value, file, path)
        most = LARGEST_SIZES.get(str(key))
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if most is not None and is_number and not 1 <= value <= most:
            raise DamagedError(f"'{file}': give a number from 1 to {most} (LARGEST_SIZES)", path, value)
