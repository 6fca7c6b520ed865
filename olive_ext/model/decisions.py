"""What is decided about a model before a session is open: pure functions, each of which gives the reason for its
answer.

Knows settings, a decoder's spec and providers; reads no file and runs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from olive_ext.config import EngineConfig, ModelSettings
from olive_ext.errors import ConfigError
from olive_ext.model.providers.devices import Device, Memory, Provider, UnmeasuredError, memory_of
from olive_ext.model.types import DecoderSpec

State = Literal["decided", "predicted", "tried"]

MOST_SLOTS = 64
"""The most rows that are decoded together. A step reads all weights once for all its rows, so more rows cost little
until the arithmetic takes as long. On a CPU, 64 answers of 32 tokens to prompts of 16 with SmolLM2-135M's shape take
392, 441, 481 and 551 tokens a second of one thread with 16, 31, 32 and 64 rows (fp32; int4: 659, -, 692 and 714; after
prompts of 200 positions fp32 710 with 32 and 759 with 64). On a GPU it would be one or two hundred rows (its operations
for each byte of memory), but the rows' own KV limits sooner: 64 slots of a thousand positions are as much to read as
the weights of a 1B model."""

MOST_ROWS = 512
"""The same over a paged cache, of which sequences take blocks as they grow. A row with few tokens reads few, and where
rows are long, blocks run out before rows do."""

MEMORY_SHARE = {"cpu": 0.25, "cuda": 0.5}
"""The part of the free memory that slots may take. A device's memory serves nothing but the model. Of workers on one
machine each takes a CPU's share, as a single one does, until all together had more than half of its memory."""

DEFAULT_SLOTS = 8
"""The number of slots where free memory is not known."""

BLOCK_SIZE = 256
"""Positions of a block of a paged cache. FlashAttention's tiles on CUDA are made for multiples of 256."""

PLANNED_POSITIONS = 4096
"""Positions of a slot that "auto" plans for, where the context is longer. Slots are allocated as requests need them."""

DEFAULT_CHUNK = 256
"""Tokens of a prompt in one step, where the user names no number."""

DEVICE_CHUNK = 1024
"""The same on a device other than the CPU. Longer steps over a paged cache are reported to fail near a full context."""

BUCKET_FORMS = {"none": "any", "decoding": "bucketed where rows decode", "all": "bucketed"}


@dataclass(frozen=True)
class Decision:
    """One choice between settings and an open model, under its name in `describe_execution`."""

    name: str
    value: Any
    reason: str = ""
    state: State = "decided"
    """"predicted": the free memory is read again once the weights are loaded. "tried": a trial on the open session may
    change it; `describe_execution` then has the reason."""


_ONE_ROW = "the graph has a batch of one row"


def choose_num_slots(
    settings: ModelSettings,
    spec: DecoderSpec,
    device: Device,
    read: Callable[[str, int], Memory] = memory_of,
    *,
    is_paged: bool | None = None,
) -> tuple[int, str]:
    """The number of KV slots and the rule that gave it: the user's number, or as many as fit in memory. That is the
    free memory or, where runs must repeat, half of all memory, which other processes do not change. `is_paged`: slots
    take blocks as they grow, by default where the graph has a paged cache. On a CPU, slots that no sequence takes use
    no memory, so this is the most of any call: long requests get fewer (`shared_positions`).

    Final once the weights are on the device. `read` gives the memory of a device, by kind and number, or raises
    `UnmeasuredError`. Raises `ConfigError` for more slots than the rows that the graph takes.
    """
    is_paged = spec.is_paged if is_paged is None else is_paged
    if spec.takes_one_row and not is_paged:
        if settings.engine.num_slots not in ("auto", 1):
            raise ConfigError(f"{_ONE_ROW}; give 1", "engine.num_slots", settings.engine.num_slots)
        return 1, _ONE_ROW
    if settings.engine.num_slots != "auto":
        return settings.engine.num_slots, "engine.num_slots"
    if isinstance(settings.batch_size, int):
        return settings.batch_size, "batch_size"
    cap = settings.max_batch_size
    limited = "" if cap is None else f", {cap} by max_batch_size"
    try:
        memory = read(device.kind, device.index)
    except UnmeasuredError as error:
        number = min(DEFAULT_SLOTS, cap or DEFAULT_SLOTS)
        return number, f"auto: {number}, {error}{limited if number < DEFAULT_SLOTS else ''}"
    free, kind = _free(settings, memory), "(half of the memory)" if settings.deterministic is True else "free"
    slot_bytes = (spec.bytes_per_position + spec.gathered_bytes) * planned_positions(spec) + spec.bytes_of_source
    unit, most = "each", MOST_SLOTS
    if is_paged and not spec.gathered_bytes:
        slot_bytes, unit, most = spec.bytes_per_position * BLOCK_SIZE, f"a block of {BLOCK_SIZE} positions", MOST_ROWS
    elif _takes_slots_by_need(settings, spec, device):
        slot_bytes, unit = spec.bytes_per_position * BLOCK_SIZE, f"{BLOCK_SIZE} positions of each"
    share = _share(settings, device)
    fitting = max(1, int(free * share / max(1, slot_bytes)))
    divided = "" if share == MEMORY_SHARE[device.kind] else f", of which each worker may take {share:.2g}"
    size, room = f"{slot_bytes / 2**20:.1f} MiB for {unit}", f"{free / 2**20:.0f} MiB {kind}{divided}"
    why = f"auto: as many sequences as fit into {room}, {size}, and at most {most}"
    return min(most, fitting, cap or most), why + limited


def _takes_slots_by_need(settings: ModelSettings, spec: DecoderSpec, device: Device) -> bool:
    """Whether a call has as many slots as its longest request leaves room for."""
    is_auto = settings.engine.num_slots == "auto" and not isinstance(settings.batch_size, int)
    return device.kind == "cpu" and is_auto and not spec.bytes_of_source


def _free(settings: ModelSettings, memory: Memory) -> int:
    return memory.total // 2 if settings.deterministic is True else memory.free


def _share(settings: ModelSettings, device: Device) -> float:
    """The share of that memory that slots may take. Ray keeps a cluster's workers apart, as it does GPUs."""
    share, workers = MEMORY_SHARE[device.kind], settings.workers
    if device.kind != "cpu" or workers is None or workers.address is not None:
        return share
    return min(share, (1 if settings.deterministic is True else 0.5) / workers.count)


def shared_positions(
    settings: ModelSettings, spec: DecoderSpec, device: Device, read: Callable[[str, int], Memory] = memory_of
) -> int | None:
    """Positions of all slots together that fit in memory, for a paged cache, or for slots that a call takes by need.
    Rounded to four bits, so that equal machines, whose memory differs by kilobytes, have equally many. None where
    memory is not known, and for other slots."""
    try:
        free = _free(settings, read(device.kind, device.index))
    except UnmeasuredError:
        return None
    per_position = spec.bytes_per_position + spec.gathered_bytes
    fitting = int(free * _share(settings, device) / max(1, per_position))
    if spec.is_paged:
        return fitting
    is_shared = _takes_slots_by_need(settings, spec, device)
    return fitting - fitting % (1 << max(0, fitting.bit_length() - 4)) if is_shared else None


def planned_positions(spec: DecoderSpec) -> int:
    """Positions of a slot that memory is planned for."""
    return min(spec.context_length, PLANNED_POSITIONS)


def choose_chunk_size(config: EngineConfig, device: str = "cpu", has_any_shape: bool = True) -> tuple[int, str]:
    """The most tokens of a prompt in one step, before the device and the graph are tried."""
    if config.chunk_size != "auto":
        return config.chunk_size, "engine.chunk_size"
    if device != "cpu" and has_any_shape:  # else every length up to there is run beforehand
        return DEVICE_CHUNK, f"auto: on the {device} device few tokens cost as much as the launches of their step"
    return DEFAULT_CHUNK, "auto: a prompt's tokens in a step; texts that are scored share steps by a rule of their own"


def choose_encoder_rows(settings: ModelSettings, device: Device) -> int:
    """The most rows of features that an encoder on `device` makes in one run; 1 encodes items one by one. On the CPU a
    single item keeps all threads busy, and its numbers do not depend on other items."""
    wanted = settings.engine.encoder_batch_rows
    if wanted != "auto":
        return wanted
    return 1 if device.kind == "cpu" or settings.deterministic is True else ENCODER_ROWS


ENCODER_ROWS = 2048
"""The most rows of features that an encoder on a device makes: eight pictures of Gemma 3, three of LLaVA 1.5."""

SHORT_STEP = 31
"""The most tokens to which a WebGPU device attends without the shader that is tried when a model is opened."""


def wants_few_shapes(config: EngineConfig, providers: Iterable[Provider]) -> bool:
    """Whether encoders on `providers` are to be run in shape buckets."""
    return config.strict_shapes or config.shapes == "bucketed" or any(provider.plans_shapes for provider in providers)


def is_attention_at_risk(chunk_size: int, device: Device, spec: DecoderSpec) -> bool:
    """Whether the device's attention must be tried before steps of `chunk_size` tokens run on it."""
    return device.kind == "webgpu" and bool(spec.kv) and chunk_size > SHORT_STEP


@dataclass(frozen=True)
class BucketPlan:
    """Which steps are padded to shape buckets, whether the buckets are mandatory, and whether decoding is captured."""

    steps: Literal["none", "decoding", "all"]
    is_strict: bool = False
    is_captured: bool = False
    note: str = ""
    """Why steps have any shape although the settings or the provider asked for shape buckets."""

    @classmethod
    def of(
        cls, config: EngineConfig, provider: Provider, spec: DecoderSpec, is_compared: bool, has_encoders: bool = False
    ) -> BucketPlan:
        """Raises `ConfigError` where the provider or the model cannot do what the settings demand. If only the graph's
        steps cannot be padded, mandatory buckets are those of its encoders, if it has any."""
        is_pinned = config.shapes == "bucketed" or config.strict_shapes
        is_auto = config.shapes == "auto" and provider.plans_shapes and config.scoring != "tree"
        is_captured = config.graph_capture is True
        if not (is_pinned or is_auto or is_captured):
            return cls("none")
        wanted = cls("all" if is_pinned or is_auto else "decoding", config.strict_shapes, is_captured)
        if is_captured and provider.capture_option is None:
            raise ConfigError(f"'engine.graph_capture' = true: {provider.name} captures no steps; CUDA and WebGPU do")
        problem = None if spec.is_paged and wanted.steps == "decoding" else against_buckets(spec)
        if problem and has_encoders and not is_captured:
            return cls("none", note=f"steps have any shape, encoders few: {problem}")
        problem = "beside a reference, steps have any shape" if is_compared else problem
        problem = (is_captured and against_capture(spec)) or problem
        return wanted if problem is None else wanted.without(problem)

    def without(self, problem: str) -> BucketPlan:
        """The plan of steps of any shape, because of `problem`; raises `ConfigError` where buckets are mandatory."""
        if self.is_strict or self.is_captured:
            name = "strict_shapes" if self.is_strict else "graph_capture"
            raise ConfigError(f"'engine.{name}' = true: {problem}", f"engine.{name}")
        return BucketPlan("none", note=f"steps have any shape: {problem}")


class CapturePlan(NamedTuple):
    """Whether steps are captured, whether they run plainly where that fails, and why not although it was asked for."""

    is_captured: bool
    is_tried: bool = False
    reason: str = ""


def against_capture(spec: DecoderSpec) -> str | None:
    """Why a graph's steps cannot be captured; None where they may."""
    if spec.embeddings:
        return "the embeddings that the decoder takes lie elsewhere in each step"
    if spec.gathered_bytes:
        return "keys and values of large heads are gathered anew for each step"
    return None


def against_buckets(spec: DecoderSpec) -> str | None:
    """Why a graph's steps cannot be padded with tokens whose outputs are not read; None where they can."""
    if spec.alone:
        return "a token's numbers depend on all tokens of its step"
    if not spec.is_kv_in_place or spec.states or spec.is_paged or spec.cross:
        return "only caches that are written in place can forget what a step was filled up with"
    return None
