"""A streaming transducer (RNN-T): its package as genai_config.json describes it, and a session on it, sounds in and
transcripts out. It generates as `Session` does, and scores none. Greedy search, several sounds side by side: chunk by
chunk as log-mel features (as NeMo's streaming models were trained on and onnxruntime-genai computes them) through the
encoder, whose caches stay on the device, and frame by frame through prediction and joint network.

Axes: B sounds, N samples of a chunk, F frames, T encoded frames, H their size, V vocabulary, K bins of a spectrum, M
mels.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from pydantic import BeforeValidator, Field

from olive_ext.config.base import not_bool
from olive_ext.engine.requests import FinishReason
from olive_ext.errors import ConfigError, MediaError, ModelError, NonFiniteError, NotFoundError, named_failures, reading
from olive_ext.media.processor import read_samples
from olive_ext.media.processors import slaney_filters
from olive_ext.model import ResolvedModel
from olive_ext.model.files.package_config import ConfigSection, PositiveSize, Vocabulary, inside, mistakes_in, read_json
from olive_ext.model.providers.ort_session import open_session
from olive_ext.session.opening import open_model
from olive_ext.session.requests import GenerationOutput, GenerationRequest
from olive_ext.session.session import Session

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
    return kind if kind == "nemotron_speech" else None


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


logger = logging.getLogger(__name__)

Array = npt.NDArray[Any]

SILENT_CHUNKS = 4
"""Chunks of silence after each sound, for the words that are still in the encoder's right context: Olive's number."""

TOGETHER = 16
"""The most sounds side by side, where the graphs leave the batch open."""

_TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int64)": np.int64}


class Graph:
    """An open graph: the names and types that it takes, and runs on bound values."""

    def __init__(self, session: ort.InferenceSession, section: Any, part: str, optional: Sequence[str]) -> None:
        """`section` is the part's in genai_config.json, which names inputs and outputs; the graph may lack the inputs
        `optional`. Raises `ModelError` where another one is missing, or an input has no name there."""
        self.session, self._part = session, part
        self.inputs = {value.name: value for value in session.get_inputs()}
        outputs = [value.name for value in session.get_outputs()]
        names, results = dict(section.inputs), dict(section.outputs)
        names = {key: name for key, name in names.items() if key not in optional or name in self.inputs}
        for kind, written, known in (("inputs", names, [*self.inputs]), ("outputs", results, outputs)):
            for key, name in written.items():
                if name not in known:
                    problem = f"'model.{part}.{kind}.{key}' = '{name}'"
                    raise ModelError(f"{problem}: the graph has the {kind} {', '.join(known)}")
        if unknown := self.inputs.keys() - set(names.values()):
            raise ModelError(
                f"the {part}'s graph has the input '{min(unknown)}', which genai_config.json does not name"
            )

    def type_of(self, name: str) -> Any:
        """numpy's type of an input. Raises `ModelError` for one of another type than a transducer has."""
        if (found := _TYPES.get(self.inputs[name].type)) is None:
            raise ModelError(f"the input '{name}' is {self.inputs[name].type}: {', '.join(_TYPES)} are accepted")
        return found

    def run(self, given: Mapping[str, Any], asked: Sequence[str], into: Mapping[str, ort.OrtValue]) -> list[Array]:
        """The outputs `asked` on the host, of arrays or values on the device; others are written `into` values. Raises
        `ModelError` where the graph does not run on these, of other sizes than genai_config.json has."""
        binding = self.session.io_binding()
        for name, value in given.items():
            if isinstance(value, ort.OrtValue):
                binding.bind_ortvalue_input(name, value)
            else:
                binding.bind_cpu_input(name, np.ascontiguousarray(value, self.type_of(name)))
        for name in asked:
            binding.bind_output(name)
        for name, value in into.items():
            binding.bind_ortvalue_output(name, value)
        doing = f"the {self._part} does not run with the sizes of genai_config.json"
        with named_failures(doing, kind=ModelError, machine=(MemoryError, OSError)):
            self.session.run_with_iobinding(binding)
        return [value.numpy() for value in binding.get_outputs()[: len(asked)]]


class _Group:
    """Sounds that are searched side by side, each with its own place in the chunk's frames."""

    def __init__(
        self, model: TransducerSession, sounds: Sequence[npt.NDArray[np.float32]], most: Sequence[int]
    ) -> None:
        config, batch = model.config, len(sounds)
        self._model, self._most = model, np.array(most)
        self._chunks_B = np.array([-(-len(sound) // config.chunk_samples) + SILENT_CHUNKS for sound in sounds])
        self._samples = np.zeros((batch, self._chunks_B.max() * config.chunk_samples), np.float32)
        for row, sound in zip(self._samples, sounds, strict=True):
            row[: len(sound)] = sound
        encoder, names = config.encoder, config.encoder.inputs
        layers, size = encoder.num_hidden_layers, encoder.hidden_size
        shapes: dict[str, Sequence[int]] = {
            names.cache_last_channel: (batch, layers, config.left_context, size),
            names.cache_last_time: (batch, layers, size, config.conv_context),
            names.cache_last_channel_len: (batch,),
        }
        device, graph = model.model.device, model.encoder
        self._caches, self._spare = (
            {
                name: ort.OrtValue.ortvalue_from_numpy(np.zeros(shape, graph.type_of(name)), device.kind, device.index)
                for name, shape in shapes.items()
            }
            for _ in range(2)
        )
        self._mel = LogMel(config, model.filters_KM, batch)
        self._tokens: list[list[int]] = [[] for _ in sounds]
        self._last_B = np.full(batch, config.blank_id)
        state = np.zeros((config.decoder.num_hidden_layers, batch, config.decoder.hidden_size), np.float32)
        self._state: tuple[Array, Array] = state, state
        self._predict()

    def tokens(self) -> list[list[int]]:
        """The tokens of each sound."""
        size = self._model.config.chunk_samples
        for chunk in range(self._chunks_B.max()):
            live_B = (chunk < self._chunks_B) & (self._counts() < self._most)
            if live_B.any():
                encoded, ends_B = self._encode(self._samples[:, chunk * size : (chunk + 1) * size])
                self._search(encoded, np.where(live_B, np.minimum(ends_B, encoded.shape[1]), 0))
        return self._tokens

    def _counts(self) -> Array:
        return np.array([len(tokens) for tokens in self._tokens])

    def _encode(self, samples_BN: npt.NDArray[np.float32]) -> tuple[Array, Array]:
        """The chunk's frames [B, T, H] and their numbers [B]; the caches are read here and written there in turns."""
        section, graph = self._model.config.encoder, self._model.encoder
        names, results = section.inputs, section.outputs
        mel_BFM = self._mel.frames(samples_BN)
        batch, frames = mel_BFM.shape[:2]
        feed: dict[str, Any] = {names.audio_features: mel_BFM, **self._caches}
        optional = {names.input_lengths: np.full(batch, frames), names.lang_id: np.zeros(batch)}
        feed |= {name: value for name, value in optional.items() if name in graph.inputs}
        into = {
            results.cache_last_channel_next: self._spare[names.cache_last_channel],
            results.cache_last_time_next: self._spare[names.cache_last_time],
            results.cache_last_channel_len_next: self._spare[names.cache_last_channel_len],
        }
        encoded, ends_B = graph.run(feed, [results.encoder_outputs, results.output_lengths], into)
        self._caches, self._spare = self._spare, self._caches
        return encoded, ends_B

    def _predict(self) -> None:
        """Runs the prediction network after each sound's last token; keeps its output, and the states to go on from."""
        section, (hidden, cell) = self._model.config.decoder, self._state
        names, results = section.inputs, section.outputs
        feed = {names.targets: self._last_B[:, None], names.lstm_hidden_state: hidden, names.lstm_cell_state: cell}
        asked = [results.outputs, results.lstm_hidden_state, results.lstm_cell_state]
        self._predicted, *self._next = self._model.decoder.run(feed, asked, {})

    def _search(self, encoded: Array, ends_B: Array) -> None:
        """A token advances a sound's state, and a blank its frame; so do as many tokens as a frame may have."""
        config, rows_B = self._model.config, np.arange(len(encoded))
        frame_B, symbols_B = np.zeros_like(rows_B), np.zeros_like(rows_B)
        while (live_B := frame_B < ends_B).any():
            frames = encoded[rows_B, np.minimum(frame_B, encoded.shape[1] - 1)][:, None]
            names, batch = config.joiner, len(frames)
            predicted = self._predicted.reshape(batch, 1, -1)
            feed = {names.inputs.encoder_outputs: frames, names.inputs.decoder_outputs: predicted}
            logits = self._model.joiner.run(feed, [names.outputs.logits], {})[0]
            logits_BV = logits.reshape(batch, -1).astype(np.float32)
            if logits_BV.shape[1] != config.vocab_size:
                problem = f"'model.vocab_size' = {config.vocab_size} in genai_config.json"
                raise ModelError(f"{problem}: the joint network gives {logits_BV.shape[1]} logits")
            if not np.isfinite(logits_BV).all():
                raise NonFiniteError("the joint network's logits are NaN or infinite")
            logits_BV[:, config.blank_id] -= self._model.penalty
            best_B = logits_BV.argmax(-1)
            said_B = live_B & (best_B != config.blank_id)
            symbols_B = np.where(said_B, symbols_B + 1, 0)
            is_full_B = symbols_B >= config.max_symbols_per_step
            frame_B += (live_B & ~said_B) | is_full_B
            symbols_B[is_full_B] = 0
            if said_B.any():
                for row in np.flatnonzero(said_B):
                    self._tokens[row].append(int(best_B[row]))
                ends_B = np.where(self._counts() < self._most, ends_B, 0)
                moved = said_B[None, :, None]
                hidden, cell = (np.where(moved, new, old) for new, old in zip(self._next, self._state, strict=True))
                self._state, self._last_B = (hidden, cell), np.where(said_B, best_B, self._last_B)
                self._predict()


class LogMel:
    """The features of sounds side by side, chunk by chunk. Half a window of the last chunk is kept, and so are the last
    frames, which the encoder sees again."""

    def __init__(self, config: TransducerConfig, filters_KM: npt.NDArray[np.float64], batch: int) -> None:
        """`batch` sounds begin in silence."""
        self._config = config
        self._filters_KM = filters_KM
        self._window = np.hanning(config.win_length)
        self._overlap = np.zeros((batch, config.fft_size // 2))
        self._last = np.zeros((batch, 1))
        self._before = np.zeros((batch, config.pre_encode_cache_size, config.num_mels), np.float32)

    def frames(self, samples_BN: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """The next chunk's frames after the last ones before it [B, F, M]."""
        config = self._config
        chunk = samples_BN.astype(np.float64)
        emphasized = chunk - config.preemph * np.concatenate([self._last, chunk[:, :-1]], 1)
        self._last = chunk[:, -1:]
        offset = (config.fft_size - config.win_length) // 2
        padded = np.pad(np.concatenate([self._overlap, emphasized], 1), ((0, 0), (0, offset)))
        self._overlap = emphasized[:, -(config.fft_size // 2) :]
        windows = np.lib.stride_tricks.sliding_window_view(padded[:, offset:], config.win_length, axis=1)
        spectrum = np.fft.rfft(windows[:, :: config.hop_length] * self._window, config.fft_size)
        power = spectrum.real**2 + spectrum.imag**2
        mel_BFM = np.log(power @ self._filters_KM + config.log_eps).astype(np.float32)
        shown = np.concatenate([self._before, mel_BFM], 1)
        self._before = shown[:, -config.pre_encode_cache_size :]
        return shown


_SPACE = "\u2581"
"""SentencePiece's mark of a word's beginning."""


def is_transducer(model: ResolvedModel) -> bool:
    """Whether the model is a package of a transducer."""
    return model.kind == "onnx" and transducer_type(model.files.genai_config) is not None


def opened(model: ResolvedModel) -> Session:
    """A session on the model of any kind; a transducer's has what generations need of a session."""
    return cast(Session, TransducerSession(model)) if is_transducer(model) else open_model(model)


@dataclass
class Counters:
    """Counts since the session was opened."""

    tokens_generated: int = 0
    requests: int = 0


class TransducerSession(AbstractContextManager["TransducerSession"]):
    """One open package. The search is greedy: sampling, prompts and stops of requests have no effect. Sounds of a call
    share runs as far as the graphs' batch allows it."""

    encoding = None
    journal = None
    max_length = 2**31 - 1
    """No context has an end."""

    def __init__(self, model: ResolvedModel) -> None:
        """Raises `ModelError` for a package of another form, and `ProviderError`."""
        files, settings = model.files, model.settings
        if settings.language is not None or settings.speech_task is not None:
            raise ConfigError("'language' and 'speech_task': a transducer writes down what it hears; leave them out")
        self.model, self.counters = model, Counters()
        self.config = config = read_transducer(files.genai_config, files.directory)
        if config.vad:
            logger.warning("genai_config.json names a detector of speech ('model.vad'): no chunk is dropped here")
        self._pieces = read_pieces(Path(files.tokenizer))
        with mistakes_in(files.directory / "genai_config.json"):
            if not isinstance(search := files.genai_config.get("search", {}), Mapping):
                raise ConfigError("give a mapping", "search", search)
            self.penalty = _Search.parse(search, "search").blank_penalty
        self.filters_KM = slaney_filters(config.fft_size // 2 + 1, config.num_mels, config.sample_rate)
        with reading(files.directory):
            self.encoder = self._opened("encoder", ("input_lengths", "lang_id"))
            self.decoder, self.joiner = self._opened("decoder"), self._opened("joiner")
        states = {config.decoder.inputs.lstm_hidden_state, config.decoder.inputs.lstm_cell_state}
        fixed = {
            value.shape[1 if name in states else 0]
            for graph in (self.encoder, self.decoder, self.joiner)
            for name, value in graph.inputs.items()
        }
        sizes = {size for size in fixed if isinstance(size, int)}
        if sizes - {1}:
            raise ModelError(f"the graphs take {max(sizes)} sounds at once: a batch of 1 or an open one is accepted")
        self._together = 1 if sizes else TOGETHER

    def _opened(self, part: str, optional: Sequence[str] = ()) -> Graph:
        """The graph of a part, which may lack the inputs `optional`. Raises `ModelError` for one of another form."""
        section, model = getattr(self.config, part), self.model
        file = graph_file(model.files.directory, section.filename, part)
        return Graph(open_session(file, model.providers, model.settings), section, part, optional)

    def __exit__(self, *_: object) -> None:
        """The graphs are closed with the session's last reference."""

    def keep_answers(self, path: Path | None, **_: Any) -> None:
        """Nothing: transcripts are computed anew in every run, and no journal has them."""

    def generate(self, requests: Sequence[GenerationRequest]) -> list[GenerationOutput]:
        """A transcript of each request's sound. Raises `MediaError` for one that has none, or cannot be read, and
        `NonFiniteError`."""
        if any(len(request.audio) != 1 for request in requests):
            raise MediaError("a transducer takes one sound in each request ('audio'), and nothing else")
        sounds = [read_samples(request.audio[0], self.config.sample_rate) for request in requests]
        most = [request.max_new_tokens for request in requests]
        order = sorted(range(len(sounds)), key=lambda number: len(sounds[number]))
        heard: dict[int, list[int]] = {}
        for start in range(0, len(order), self._together):
            numbers = order[start : start + self._together]
            group = _Group(self, [sounds[number] for number in numbers], [most[number] for number in numbers])
            heard |= zip(numbers, group.tokens(), strict=True)
        self.counters.requests += len(sounds)
        self.counters.tokens_generated += sum(map(len, heard.values()))
        outputs = []
        for number, limit in enumerate(most):
            text = "".join(self._pieces.get(token, "") for token in heard[number]).replace(_SPACE, " ")
            end = FinishReason.LENGTH if len(heard[number]) == limit else FinishReason.STOPPED
            outputs.append(GenerationOutput(text.removeprefix(" "), tuple(heard[number]), end))
        return outputs

    def describe_execution(self) -> dict[str, Any]:
        """Facts of the execution, for a report."""
        return {
            "runtime": "onnxruntime",
            "providers": [provider.name for provider in self.model.providers],
            "sounds_together": self._together,
            "counters": vars(self.counters).copy(),
        }
