"""Runs steps on one generator of onnxruntime-genai, one sequence at a time. Trials find what generators can do: what
they refuse depends on the model, the device and the release, and some give wrong logits instead of refusing. Knows no
scheduler, and no graph but its rotary cache.

Axes: S tokens of a row, R logits rows, T targets, K sampled rows, V vocabulary.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from olive_ext.config import EngineConfig
from olive_ext.engine.runners.runner import OpenedRunner, Runner, Traits
from olive_ext.engine.step import Capacity, FloatArray, Step, StepOutput
from olive_ext.errors import ModelError, NonFiniteError, OliveExtError, ProviderError, RunError, joined_lines
from olive_ext.model import ResolvedModel
from olive_ext.model.decisions import choose_chunk_size
from olive_ext.model.files.content import load_graph
from olive_ext.model.files.model_package import ASSET
from olive_ext.model.files.package_config import GENAI_CONFIG, MEDIA_SECTIONS, input_window
from olive_ext.model.providers.devices import Provider
from olive_ext.model.spec.attention import rotary_rows
from olive_ext.model.spec.checkpoint import context_limit
from olive_ext.model.types import DecoderSpec, GraphFiles, ModelFiles

MAX_DEVIATION = 0.05
"""The most by which logits may differ between two ways to feed the same tokens, as a part of their spread. Kernels for
one and several tokens round differently (1 % with int4 weights); a cache with wrong content differs by about 1."""

NUM_TOKENS = 4
"""The number of tokens that a trial feeds."""

Logits = npt.NDArray[np.float64]


GenaiGenerator: TypeAlias = Any
"""An `onnxruntime_genai.Generator`. It draws no token: its stop ids and search settings do not matter."""


class Continues(str, Enum):
    """How tokens may follow those that a generator holds."""

    BY_MANY = "several tokens at once"
    BY_ONE = "one token at a time"
    NOT = "not at all"


@dataclass(frozen=True)
class GeneratorTraits:
    """The abilities of every generator of one model."""

    continues: Continues
    returns_all_rows: bool
    """Whether the logits after every token fed can be read, not only those after the last."""

    rewinds: bool
    """Whether a generator can be cut back to fewer tokens."""


def feed(generator: GenaiGenerator, tokens: Sequence[int], one_by_one: bool = False) -> None:
    """Appends `tokens`, which may be empty."""
    size = 1 if one_by_one else max(1, len(tokens))
    for start in range(0, len(tokens), size):
        generator.append_tokens(np.array(tokens[start : start + size], np.int32))


def find_traits(
    new_generator: Callable[[], GenaiGenerator],
    tokens: Sequence[int],
    logits_name: str,
    *,
    may_rewind: bool = True,
    window_size: int = 0,
) -> GeneratorTraits:
    """Feeds the first `NUM_TOKENS` of `tokens` in several ways and compares the logits after the last.

    `may_rewind` is False where a rewind is known to go wrong only later (a cache that drops old positions).
    `window_size` belongs to a model whose inputs have a fixed length, and `tokens` are at least that many. Generators
    of such a model count the padding of their last window as tokens: nothing can follow, and trying may end the process
    (0.14.1 and 0.18.0). Raises `ModelError` where different ways to feed give different logits and none is known to be
    right, and `NonFiniteError` for logits that are NaN or +inf.
    """
    trial = _GeneratorTrial(new_generator, list(tokens[:NUM_TOKENS]), logits_name)
    continues = Continues.NOT if window_size else trial.continues()
    if continues is Continues.NOT:
        trial.check_padding(tokens[:window_size])
        return GeneratorTraits(continues, returns_all_rows=False, rewinds=False)
    return GeneratorTraits(continues, trial.returns_all_rows, may_rewind and trial.rewinds(continues))


class _GeneratorTrial:
    def __init__(self, new_generator: Callable[[], GenaiGenerator], tokens: list[int], logits_name: str) -> None:
        self._new_generator = new_generator
        self._tokens = tokens
        self._logits_name = logits_name
        self._is_refused = False
        generator = self._fed(tokens)
        self._expected_V: Logits = generator.get_logits().reshape(-1).astype(np.float64)
        if not (self._expected_V < np.inf).all():  # no comparison of such logits shows anything
            raise NonFiniteError(f"the model's output after {len(tokens)} tokens, tried as it opens, is not finite")
        self.returns_all_rows = len(self._rows(generator)) == len(tokens)

    def continues(self) -> Continues:
        for way in (Continues.BY_MANY, Continues.BY_ONE):
            if self._agrees(self._fed(self._tokens[:1]), 1, way):
                return way
        return Continues.NOT

    def rewinds(self, continues: Continues) -> bool:
        generator = self._fed(self._tokens)
        for length in (1, 0):
            try:
                generator.rewind_to(length)
            except RuntimeError:
                return False
            if not self._agrees(generator, length, continues):
                return False
        return True

    def check_padding(self, window: Sequence[int]) -> None:
        """Raises `ModelError` where tokens that are fed at once get other logits with padding than without.

        A full `window` needs no padding: its rows are compared with those of its beginnings. Without a window, a
        generator that refuses to continue from a past passes, and one that continues with wrong logits does not.
        """
        if not window and self._is_refused:
            return
        rows_SV = self._rows(self._fed(window)) if window else np.empty((0, 0))
        place = min(len(self._tokens), len(window)) - 1
        if len(rows_SV) != len(window) or place < 0 or not self._is_close(rows_SV[place]):
            raise ModelError(
                "onnxruntime-genai gives different logits for the same tokens: the package fits another release"
            )

    def _fed(self, tokens: Sequence[int]) -> GenaiGenerator:
        generator = self._new_generator()
        feed(generator, tokens)
        return generator

    def _rows(self, generator: GenaiGenerator) -> Logits:
        try:
            rows_SV: Logits = generator.get_output(self._logits_name)[0].astype(np.float64)
        except RuntimeError:
            return np.empty((0, 0))
        return rows_SV

    def _agrees(self, generator: GenaiGenerator, length: int, way: Continues) -> bool:
        """Whether the generator, which holds `length` tokens, ends with the expected logits after the other tokens."""
        try:
            feed(generator, self._tokens[length:], one_by_one=way is Continues.BY_ONE and length > 0)
        except RuntimeError:
            self._is_refused = True
            return False
        return self._is_close(generator.get_logits().reshape(-1).astype(np.float64))

    def _is_close(self, logits_V: Logits) -> bool:
        spread = np.linalg.norm(self._expected_V - self._expected_V.mean())
        return bool(np.linalg.norm(logits_V - self._expected_V) <= MAX_DEVIATION * spread and spread > 0)


CAPACITY_STEP = 64
"""Generators are made for multiples of this many positions."""


def open_genai_runner(model: ResolvedModel) -> OpenedRunner:
    """A model that runs on onnxruntime-genai. Raises `ProviderError` where it is not installed or the provider does not
    come up, `ModelError` for a package that it does not open or that gives different logits for the same tokens."""
    settings, config = model.settings, model.settings.engine
    with tempfile.TemporaryDirectory(prefix="olive-ext-") as made:
        files = _in_one_folder(model.files, Path(made).resolve())
        overlay = overlay_of(files, config)
        opened = GenaiModel(files, model.providers, overlay, settings.max_length)
    if not settings.allow_cpu_fallback and model.providers[0].device != "cpu" and opened.device.upper() == "CPU":
        name, origin = model.providers[0].name, model.providers[0].origin
        raise ProviderError(f"onnxruntime-genai has the CPU only, not {name} ({origin}); see 'allow_cpu_fallback'")
    facts = {
        "model": str(model.files.decoder),
        "num_slots": 1,
        "num_slots_origin": "onnxruntime-genai runs one sequence at a time",
        "runtime": "genai",
        "runtime_origin": model.runtime_reason,
    }
    spec = None
    with suppress(ModelError):  # a pipeline's cannot be read
        spec = model.spec
    runner = GenaiRunner(opened, facts, spec)
    if not (runner.traits.chunked_prefill or opened.traits.returns_all_rows):
        opened.close()
        raise ModelError(
            "onnxruntime-genai gives logits of the last token only: set 'engine.runtime' to \"onnxruntime\""
        )
    return OpenedRunner(runner, choose_chunk_size(config)[0])


def _in_one_folder(files: ModelFiles, folder: Path) -> ModelFiles:
    """The files of a variant with a genai_config.json of their own in `folder`, since what it names may lie in several
    folders: by links, since 0.18 takes no path that leaves its folder; without the names of components and assets,
    which 0.14 does not know. Others as they are.
    """
    model = files.genai_config.get("model") or {}
    has_asset = str(model.get("tokenizer_dir")).startswith(ASSET)
    if not model or ((files.directory / GENAI_CONFIG).is_file() and not has_asset):
        return files

    def moved(keys: dict[str, Any]) -> dict[str, Any]:
        paths = {key: f"{section}/{keys[key]}" for key in ("filename", "custom_ops_library") if keys.get(key)}
        return {key: item for key, item in (keys | paths).items() if key not in ("component", "tokenizer_dir")}

    whole = dict(model)
    for section, written in model.items():
        graph = files.companions.get(MEDIA_SECTIONS.get(section, section), GraphFiles(files.decoder)).graph
        (folder / section).symlink_to(graph.parent.resolve(), target_is_directory=True)
        whole[section] = json.loads(json.dumps(written), object_hook=moved)
    config = {**files.genai_config, "model": moved(whole)}
    (folder / GENAI_CONFIG).write_text(json.dumps(config, ensure_ascii=False), encoding="utf-8")
    return replace(files, directory=folder, genai_config=config)


class GenaiRunner(Runner):
    """Runs steps on onnxruntime-genai, with one slot, which is one generator. Where the generator cannot continue from
    the row's past, a new one is fed the past again: the tokens of a slot are kept on the host."""

    capacity = Capacity(num_slots=1)
    host_bytes = 0

    def __init__(self, model: GenaiModel, facts: Mapping[str, Any], spec: DecoderSpec | None = None) -> None:
        """`spec`: the decoder's, where it is a single graph."""
        lengths = () if spec is None else spec.choices.lengths
        is_splittable = spec is None or not (spec.alone or lengths)
        traits = Traits(model.context_length, can_rewind=model.traits.rewinds, lengths=lengths)
        super().__init__(replace(traits, chunked_prefill=is_splittable))
        self.tokens_replayed = 0
        self._model = model
        self._generators = model.traits
        self._facts = facts
        self._generator: GenaiGenerator | None = None
        self._tokens: list[int] = []

    def reserve(self, positions: int, cells: int = 0) -> None:
        """Makes room for `positions` (rounded up), at least twice the present room; never shrinks it."""
        if positions <= self.capacity.positions:
            return
        wanted = max(positions, 2 * self.capacity.positions)
        self.capacity = Capacity(1, min(-(-wanted // CAPACITY_STEP) * CAPACITY_STEP, self.traits.context_length))
        self._forget()

    def run(self, step: Step) -> StepOutput:
        """Raises `RunError` with the step and onnxruntime-genai's reason when the device fails."""
        (row,) = step.rows
        offsets = [logits_row.offset for logits_row in step.logits_rows]
        try:
            if not self.traits.chunked_prefill:
                logits_RV = self._feed_whole(self._at(row.past), row.tokens, offsets)
            elif self._generators.continues is Continues.NOT:
                logits_RV = self._feed_afresh(row.past, row.tokens, offsets)
            else:
                logits_RV = self._feed(self._at(row.past), row.tokens, offsets)
        except (RuntimeError, MemoryError) as error:
            self._forget()
            shape = f"{len(row.tokens)} tokens after {row.past} positions"
            raise RunError(f"onnxruntime-genai failed on a step of {shape}: {joined_lines(error)}") from error
        return replace(score(logits_RV, step), logits_RV=logits_RV)

    def release_memory(self) -> None:
        """Drops the generator, which owns the KV cache."""
        self._forget()
        self.capacity = Capacity(num_slots=1)

    @override
    def describe(self) -> Mapping[str, Any]:
        rewinds = "yes" if self._generators.rewinds else "no"
        return {
            **self._facts,
            **self._model.describe(),
            **super().describe(),
            "kv_cache": "onnxruntime-genai's generator",
            "kv_binding": f"continues: {self._generators.continues.value}; rewinds: {rewinds}",
            "tokens_replayed": self.tokens_replayed,
            "scoring_head": "host",
            "scoring_head_reason": "onnxruntime-genai hands whole rows of logits to the host",
        }

    @override
    def close(self) -> None:
        self._forget()
        self._model.close()

    def _forget(self) -> None:
        self._generator, self._tokens = None, []

    def _at(self, past: int) -> GenaiGenerator:
        """A generator that holds exactly the first `past` tokens of the slot."""
        if self._generator is not None and past == len(self._tokens):
            return self._generator
        if self._generator is not None and self._generators.rewinds:
            self._generator.rewind_to(past)
            del self._tokens[past:]
            return self._generator
        kept = self._tokens[:past]
        self._forget()  # before another is made: two would take twice the memory
        self._generator = self._model.new_generator(self.capacity.positions)
        self._append(self._generator, kept)
        self.tokens_replayed += past
        return self._generator

    def _feed(self, generator: GenaiGenerator, tokens: Sequence[int], offsets: list[int]) -> FloatArray:
        """Feeds `tokens`; returns the logits [R, V] after those at `offsets` (ascending), in fp32.

        A generator returns the rows of all tokens that it was fed at once: 943 MB after 900 tokens of a vocabulary of
        262,144. So tokens that nobody scores are fed before those that are scored, and their rows are never read.
        """
        rows: list[FloatArray] = []
        start = 0
        for _, run in groupby(enumerate(offsets), lambda pair: pair[1] - pair[0]):
            successive = [offset for _, offset in run]
            first, stop = successive[0], successive[-1] + 1
            takes_many = self._generators.continues is Continues.BY_MANY or not (self._tokens or start < first)
            if takes_many and self._generators.returns_all_rows and stop - first > 1:
                self._append(generator, tokens[start:first])
                self._append(generator, tokens[first:stop])
                rows.extend(self._read(generator.get_output(self._model.logits_name)[0]))
            else:
                for begin, end in pairwise([start, *(offset + 1 for offset in successive)]):
                    self._append(generator, tokens[begin:end])
                    rows.extend(self._read(generator.get_logits().reshape(1, -1)))
            start = stop
        self._append(generator, tokens[start:])
        return _stack(rows)

    def _feed_whole(self, generator: GenaiGenerator, tokens: Sequence[int], offsets: list[int]) -> FloatArray:
        """As `_feed`, with all tokens at once: parts of them would be computed otherwise."""
        self._append(generator, tokens)
        if offsets == [len(tokens) - 1]:
            return self._read(generator.get_logits().reshape(1, -1))
        return self._read(generator.get_output(self._model.logits_name)[0])[offsets]

    def _feed_afresh(self, past: int, tokens: Sequence[int], offsets: list[int]) -> FloatArray:
        """As `_feed`, with a new generator for each of `offsets`, which is fed past and tokens at once."""
        self._tokens[past:] = tokens
        rows: list[FloatArray] = []
        for offset in offsets:
            self._generator = None
            self._generator = self._model.new_generator(self.capacity.positions)
            feed(self._generator, self._tokens[: past + offset + 1])
            self.tokens_replayed += past + offset
            rows.extend(self._read(self._generator.get_logits().reshape(1, -1)))
        return _stack(rows)

    def _append(self, generator: GenaiGenerator, tokens: Sequence[int]) -> None:
        one_by_one = bool(self._tokens) and self._generators.continues is Continues.BY_ONE
        self._tokens += tokens  # first: an interrupted generator must not count as one that holds what it held before
        feed(generator, tokens, one_by_one=one_by_one)

    def _read(self, logits_SV: FloatArray) -> FloatArray:
        self.host_bytes += logits_SV.nbytes
        return np.asarray(logits_SV, np.float32)


def score(logits_RV: FloatArray, step: Step) -> StepOutput:
    """The log-softmax in fp32 with its sum in fp64, the argmax, and the rows to sample from."""
    num_rows, vocab_size = logits_RV.shape
    greedy_R = logits_RV.argmax(-1) if num_rows else np.empty(0, np.int64)
    log_sums: dict[int, float] = {}
    logprobs_T = np.empty(len(step.targets), np.float32)
    for place, (row, token) in enumerate(step.targets):
        logits_V = logits_RV[row]
        if row not in log_sums:
            top = logits_V.max()
            log_sums[row] = float(top) + float(np.log(np.exp(logits_V - top).sum(dtype=np.float64)))
        logprobs_T[place] = float(logits_V[token]) - log_sums[row]
    samples_KV = logits_RV[list(step.samples)] if step.samples else np.empty((0, vocab_size), np.float32)
    return StepOutput(logprobs_T, greedy_R.astype(np.int64), samples_KV)


def _stack(rows: list[FloatArray]) -> FloatArray:
    return np.stack(rows) if rows else np.empty((0, 0), np.float32)


_OF_THEIR_OWN = ("gpt2", "lfm2")
"""Types whose graphs have other inputs (one cache a layer, states of convolutions), though a missing one is refused as
llama's is. Of 29 types tried, all others that are refused so answered as llama does (onnxruntime-genai 0.14)."""


def refusal_of(model_type: str) -> str:
    """How onnxruntime-genai refuses a package of that `model.type` whose graph is missing: alike for all types that it
    runs in one way. Empty where it does not, or is not installed."""
    sizes = {"context_length": 1, "vocab_size": 1}
    content = {"model": {"type": model_type, **sizes, "decoder": {"filename": "none"}}, "search": {"max_length": 1}}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, GENAI_CONFIG).write_text(json.dumps(content), encoding="utf-8")
        try:
            import onnxruntime_genai

            onnxruntime_genai.Model(folder)
        except ImportError:
            return ""
        except RuntimeError as error:
            return joined_lines(error).replace(folder, "") + model_type * (model_type in _OF_THEIR_OWN)
    return ""


_SEARCH = {"batch_size": 1, "num_beams": 1, "num_return_sequences": 1, "do_sample": False}
"""Search options that make a generator run one sequence, whatever genai_config.json has for `search`."""

_NO_TOKEN = -1
"""Replaces the pad token where onnxruntime-genai pads. The library takes every pad id at the end of a prompt for
padding, and returns the logits before it. A lookup of row -1 is valid in ONNX, and padding is masked."""


class GenaiModel:
    """An open `onnxruntime_genai.Model`, and what its generators can do."""

    def __init__(
        self, files: ModelFiles, providers: tuple[Provider, ...], overlay: Mapping[str, Any], max_length: int | None
    ) -> None:
        try:
            import onnxruntime_genai
        except ImportError as error:
            raise ProviderError(
                f"this model needs onnxruntime-genai, which cannot be imported ({joined_lines(error)}): install "
                f"the extra 'cpu' or 'gpu' ('.[cpu]' in a clone), or set 'engine.runtime' to \"onnxruntime\""
            ) from error
        self._og: Any = onnxruntime_genai
        decoder = _decoder_config(files)
        held = (decoder.get("sliding_window") or {}).get("window_size", 0)
        self._least_capacity = int(held) + 1  # a smaller cache than the window is refused
        self.logits_name = str(decoder.get("outputs", {}).get("logits", "logits"))
        graphs = map(load_graph, (files.decoder, *files.stages))
        rows = min(filter(None, (rotary_rows(model.graph) for model in graphs)), default=None)
        written = files.genai_config["model"], files.hf_config
        self.context_length, self._note = context_limit(*written, rows, max_length)
        try:
            config = self._og.Config(str(files.directory))
            config.overlay(json.dumps(overlay, ensure_ascii=False))  # it reads no \u escapes
            self._used = set_providers(config, providers)
            self._model: Any = self._og.Model(config)
            window, vocab_size = input_window(files), files.genai_config["model"].get("vocab_size")
            size = max(NUM_TOKENS, window)
            spread = int(vocab_size or size + 1) - 1
            tokens = [1 + number * 7919 % spread for number in range(size)]  # 0 is often the pad
            new_generator = partial(self.new_generator, size + 1)
            slides = bool(decoder.get("sliding_window"))
            self.traits = find_traits(
                new_generator, tokens, self.logits_name, may_rewind=not slides, window_size=window
            )
        except (RuntimeError, MemoryError) as error:
            raise _refusal(error, files, providers) from error

    def new_generator(self, capacity: int) -> GenaiGenerator:
        """An empty generator with memory for `capacity` positions; without max_length, for the whole context."""
        params = self._og.GeneratorParams(self._model)
        size = min(max(capacity, self._least_capacity), self.context_length)
        params.set_search_options(max_length=size, **_SEARCH)
        generator: GenaiGenerator = self._og.Generator(self._model, params)
        return generator

    @property
    def device(self) -> str:
        """The device type, as the library names it."""
        return str(self._model.device_type) if self._model is not None else "closed"

    def describe(self) -> Mapping[str, Any]:
        """Facts of the open model."""
        return {
            "runtime_version": self._og.__version__,
            "providers": self._used,
            "device": self.device,
            "notes": [self._note],
        }

    def close(self) -> None:
        """Releases the model's memory."""
        self._model = None


def _decoder_config(files: ModelFiles) -> Mapping[str, Any]:
    decoder = (files.genai_config.get("model") or {}).get("decoder")
    if not isinstance(decoder, Mapping):
        raise ModelError(
            f"'{files.directory}' has no genai_config.json with a decoder; set 'engine.runtime' to \"onnxruntime\""
        )
    return decoder


def overlay_of(files: ModelFiles, config: EngineConfig) -> Mapping[str, Any]:
    """The changes to genai_config.json: the user's session options, and the file name where another file was chosen."""
    options: dict[str, Any] = dict(config.session_options)
    if config.num_threads != "auto":
        options["intra_op_num_threads"] = config.num_threads
    decoder: dict[str, Any] = {"session_options": options} if options else {}
    named = files.directory / str(_decoder_config(files).get("filename") or "")
    if not files.pipeline and not (named.is_file() and named.samefile(files.decoder)):
        if _decoder_config(files).get("pipeline"):
            raise ModelError(f"'{files.decoder}' is none of the graphs of the pipeline in genai_config.json")
        decoder["filename"] = os.path.relpath(files.decoder, files.directory)
    overlay: dict[str, Any] = {"decoder": decoder}
    if input_window(files):
        overlay["pad_token_id"] = _NO_TOKEN
    return {"model": overlay}


def set_providers(config: Any, providers: tuple[Provider, ...]) -> list[str]:
    """Replaces the providers of genai_config.json by those that the user chose; returns their names. Without a choice
    the package's own providers stay, with the options that only onnxruntime-genai reads."""
    chosen = [provider for provider in providers if provider.origin not in ("genai_config.json", "default")]
    if any(provider.origin != "always last" for provider in chosen):
        config.clear_providers()
        for provider in chosen:
            name = provider.name.removesuffix("ExecutionProvider").lower()
            if name == "cpu":
                continue  # what remains without any
            config.append_provider(name)
            for key, value in provider.options.items():
                config.set_provider_option(name, key, value)
    return [provider.name for provider in providers]


def _refusal(error: Exception, files: ModelFiles, providers: tuple[Provider, ...]) -> OliveExtError:
    reason = joined_lines(error)
    weights = [*files.weights, *(file for part in files.companions.values() for file in part.weights)]
    left = [file for file in weights if not file.resolve().is_relative_to(file.parent.resolve())]
    if left and "escapes model directory" in reason:
        reason = f"'{left[0]}' links to '{left[0].resolve()}', out of the graph's folder: put the file there"
    names = [provider.name for provider in providers if provider.device != "cpu"]
    if names and "provider" in reason.replace(str(files.directory), "").lower():
        return ProviderError(f"{', '.join(names)} did not come up in onnxruntime-genai for '{files.decoder}': {reason}")
    return ModelError(f"onnxruntime-genai cannot run '{files.decoder}': {reason}", "engine.runtime", code="unsupported")
