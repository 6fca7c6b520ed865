"""A streaming transducer's package as genai_config.json describes it: an encoder with caches between chunks of sound, a
prediction network, a joint network, and the features of a chunk. Opens no graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from olive_ext.config.base import not_bool
from olive_ext.errors import ConfigError, ModelError, NotFoundError
from olive_ext.model.files.package_config import ConfigSection, PositiveSize, Vocabulary, inside, mistakes_in, read_json

TYPES = ("nemotron_speech",)
"""Types of model in genai_config.json."""

Count = Annotated[int, Field(ge=0, le=2**24), BeforeValidator(not_bool)]


class _EncoderInputs(ConfigSection):
    audio_features: str
    input_lengths: str = "length"
    cache_last_channel: str = "cache_last_channel"
    cache_last_time: str = "cache_last_time"
    cache_last_channel_len: str = "cache_last_channel_len"
    lang_id: str = "lang_id"


class _EncoderOutputs(ConfigSection):
    encoder_outputs: str = "encoder_outputs"
    output_lengths: str = "encoded_lengths"
    cache_last_channel_next: str = "cache_last_channel_next"
    cache_last_time_next: str = "cache_last_time_next"
    cache_last_channel_len_next: str = "cache_last_channel_len_next"


class _Encoder(ConfigSection):
    filename: str = "encoder.onnx"
    hidden_size: PositiveSize
    num_hidden_layers: PositiveSize
    inputs: _EncoderInputs
    outputs: _EncoderOutputs


class _DecoderInputs(ConfigSection):
    targets: str
    lstm_hidden_state: str
    lstm_cell_state: str


class _DecoderOutputs(ConfigSection):
    outputs: str
    lstm_hidden_state: str
    lstm_cell_state: str


class _Decoder(ConfigSection):
    filename: str = "decoder.onnx"
    hidden_size: PositiveSize
    num_hidden_layers: PositiveSize
    inputs: _DecoderInputs
    outputs: _DecoderOutputs


class _JoinerInputs(ConfigSection):
    encoder_outputs: str = "encoder_outputs"
    decoder_outputs: str = "decoder_outputs"


class _JoinerOutputs(ConfigSection):
    logits: str = "outputs"


class _Joiner(ConfigSection):
    filename: str = "joiner.onnx"
    inputs: _JoinerInputs
    outputs: _JoinerOutputs


class TransducerConfig(ConfigSection):
    """The section `model` of genai_config.json; lengths in samples are at `sample_rate`."""

    type: str
    vocab_size: Vocabulary
    num_mels: PositiveSize
    fft_size: PositiveSize
    hop_length: PositiveSize
    win_length: PositiveSize
    preemph: Annotated[float, Field(allow_inf_nan=False)]
    log_eps: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    left_context: PositiveSize
    conv_context: PositiveSize
    pre_encode_cache_size: PositiveSize
    sample_rate: PositiveSize
    chunk_samples: Annotated[int, Field(ge=1, le=2**24), BeforeValidator(not_bool)]
    blank_id: Count
    max_symbols_per_step: PositiveSize
    encoder: _Encoder
    decoder: _Decoder
    joiner: _Joiner
    vad: Mapping[str, Any] | None = None


class _Search(ConfigSection):
    blank_penalty: Annotated[float, Field(allow_inf_nan=False), BeforeValidator(not_bool)] = 0.0


def transducer_type(config: Mapping[str, Any]) -> str | None:
    """The model's type in the parsed genai_config.json, where that is a transducer's; else None."""
    section = config.get("model")
    kind = section.get("type") if isinstance(section, Mapping) else None
    return kind if kind in TYPES else None


def refuse_transducer(config: Mapping[str, Any], folder: Path) -> None:
    """Raises `ModelError` for a transducer's package where a model with a KV cache is wanted."""
    if (kind := transducer_type(config)) is not None:
        raise ModelError(
            f"'{folder / 'genai_config.json'}' is of the type '{kind}', a transducer, which writes down what it hears "
            "and does no task: measure wer and rtfx, by an evaluator of the type 'OrtEvaluator'"
        )


def transducer_in(path: Path, tasks: Iterable[Any]) -> str:
    """What `olive-ext check` says of a transducer's package, or of a graph in one; empty for others. Raises
    `ModelError` where it cannot be run, and where there are `tasks`, which it cannot do."""
    folder = path if path.is_dir() else path.parent
    file = folder / "genai_config.json"
    config = read_json(file) if file.is_file() else {}
    if transducer_type(config) is None:
        return ""
    if any(True for _ in tasks):
        refuse_transducer(config, folder)
    read_transducer(config, folder)
    return "a transducer: sounds are transcribed, chunk by chunk"


def read_transducer(config: Mapping[str, Any], folder: Path) -> TransducerConfig:
    """The package in `folder`. Raises `ModelError` for a key that is missing, of a wrong value, or contradicts another,
    and for a graph that is not there."""
    file = folder / "genai_config.json"
    with mistakes_in(file):
        read = TransducerConfig.parse(dict(config.get("model", {})), "model")
    most = f"at most 'model.fft_size', which is {read.fft_size}"
    for name, is_right, accepted in (
        ("win_length", read.win_length <= read.fft_size, most),
        ("blank_id", read.blank_id < read.vocab_size, f"below 'model.vocab_size', which is {read.vocab_size}"),
        ("chunk_samples", read.chunk_samples >= read.fft_size, most.replace("most", "least")),
    ):
        if not is_right:
            raise ModelError(f"'{file}': 'model.{name}' = {getattr(read, name)}: {accepted}")
    for part in ("encoder", "decoder", "joiner"):
        graph_file(folder, getattr(read, part).filename, part)
    return read


def blank_penalty(config: Mapping[str, Any], folder: Path) -> float:
    """What is subtracted from the blank's logit. Raises `ModelError` where the section `search` has no number there."""
    with mistakes_in(folder / "genai_config.json"):
        if not isinstance(section := config.get("search", {}), Mapping):
            raise ConfigError("give a mapping", "search", section)
        return _Search.parse(section, "search").blank_penalty


def graph_file(folder: Path, name: str, part: str) -> Path:
    """The graph of a part. Raises `ModelError` where it is not in the folder."""
    graph = inside(folder, name, f"model.{part}.filename")
    if not graph.is_file():
        raise NotFoundError(f"'model.{part}.filename' = '{name}' in genai_config.json: no such file in '{folder}'")
    return graph


def read_pieces(folder: Path) -> Mapping[int, str]:
    """The vocabulary's pieces by id, of tokenizer.json; special tokens, which are no text, are left out."""
    path = folder / "tokenizer.json"
    tokenizer = read_json(path)
    try:
        written = tokenizer["model"]["vocab"]
        pairs = {name: number for number, (name, _) in enumerate(written)} if isinstance(written, list) else written
        pieces = {int(number): str(name) for name, number in pairs.items()}
        special = {int(token["id"]) for token in tokenizer.get("added_tokens", ()) if token.get("special")}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        problem = f"'{path}': 'model.vocab' is no list of [piece, score], and no mapping of pieces to ids"
        raise ModelError(problem) from error
    return {number: piece for number, piece in pieces.items() if number not in special}
