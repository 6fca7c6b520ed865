"""Trials of an opened model that no form decides: how many tokens the device attends to rightly, where a text may be
cut so that no bit changes, and whether a text's numbers are its own: fed whole and alone, in parts, after what another
text has left, and beside another text. What no reading of a graph shows, a few random texts do. Knows runners by their
steps, and no files.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from olive_ext.engine.forms.graph_form import TARGETS, Text, disagreement, targets_of
from olive_ext.engine.runners.runner import Runner, Traits
from olive_ext.engine.step import Copy, FloatArray, LogitsRow, Row, Step
from olive_ext.errors import RunError
from olive_ext.graph.standalone_graphs import INPUTS, OUTPUT, attention_graph
from olive_ext.media.items import Source
from olive_ext.model.decisions import SHORT_STEP, is_attention_at_risk
from olive_ext.model.providers.devices import Device
from olive_ext.model.types import DecoderSpec, SourceKind

logger = logging.getLogger(__name__)

ATTENDED_TOLERANCE = 0.05
"""Largest accepted error of attended values around 1: the wrong shader is off by 0.1 and more."""

NUM_HEADS = 1
HEAD_SIZE = 16
"""Small, because a software device compiles the shader of size 64 for minutes. The fault shows at every size."""

OpenGraph = Callable[[bytes], Any]
_FLOAT = 1
"""ONNX's element type."""

GROUPS = (2, 4, 8, 16)
"""Groups of rows that are tried. A single token is not: it has kernels of its own, for attention at least, and rounding
hides that in one short text of five (4 layers, int8 in blocks of 128)."""

GROUP_TEXTS = (2 * GROUPS[-1], 4 * GROUPS[-1])
"""Tokens of the texts that are cut into groups: of two, because one may hide a difference, and the second so long that
kernels show that take more rows than any group has. Of SmolLM2-135M's shape in int4 that takes 0.6 s of one thread."""

EXAMPLE = 8


def fitting_attention(
    chunk_size: int, device: Device, spec: DecoderSpec, open_graph: OpenGraph
) -> tuple[int, list[str]]:
    """The most tokens of a step on this device, and a note where that is less than `chunk_size`.

    WebGPU's provider attends to 32 tokens and more with a shader of its own, which exchanges keys between the lanes of
    a subgroup. On Mesa's software Vulkan all keys but the first few come out wrong, without an error
    (onnxruntime-ep-webgpu 0.4.0, Mesa 25). Shorter steps take another shader, which is right there.
    """
    if not is_attention_at_risk(chunk_size, device, spec) or attends_to_long_steps(open_graph):
        return chunk_size, []
    note = f"steps are cut to {SHORT_STEP} tokens: this {device.kind} device attends to longer ones wrongly"
    logger.warning("%s", note)
    return SHORT_STEP, [note]


def attends_to_long_steps(open_graph: OpenGraph) -> bool:
    """Whether the first tokens of a long step see what they see in a short one, as causal attention must."""
    session = open_graph(attention_graph(_FLOAT, NUM_HEADS, HEAD_SIZE))
    tokens = np.random.default_rng(0).standard_normal((3, 1, 2 * SHORT_STEP, NUM_HEADS * HEAD_SIZE), np.float32)
    long = _attend(session, tokens)
    short = _attend(session, tokens[:, :, :SHORT_STEP])
    return bool(np.ptp(short)) and bool(np.abs(long[:, :SHORT_STEP] - short).max() < ATTENDED_TOLERANCE)


def _attend(session: Any, tokens: FloatArray) -> FloatArray:
    length = tokens.shape[2]
    past = np.zeros((1, NUM_HEADS, 0, HEAD_SIZE), np.float32)
    arrays = (*tokens, past, past, np.array([length - 1], np.int32), np.array(length, np.int32))
    binding = session.io_binding()
    for name, array in zip(INPUTS, arrays, strict=True):
        binding.bind_cpu_input(name, np.ascontiguousarray(array))
    binding.bind_output(OUTPUT)
    session.run_with_iobinding(binding)
    (attended,) = binding.get_outputs()
    result: FloatArray = attended.numpy()
    return result


def group_rows(runner: Runner, spec: DecoderSpec, device: Device, chunk_size: int, notes: list[str]) -> None:
    """Lets texts be cut only where a trial finds the same bits, if the model's roundings would show others."""
    if not spec.rounds_rows or device.kind != "cpu" or not spec.is_splittable or chunk_size == 1:
        return
    if spec.states:  # they stand for what fills a group up, too
        notes.append("with states no groups of rows are made: what shares steps with a text may move its roundings")
        return
    group = find_row_group(runner, spec.num_ids)
    if group is not None:
        runner.traits = replace(runner.traits, row_group=group)
        return
    notes.append("requests are fed whole and alone: this processor's kernels round no groups of rows as a whole text's")
    runner.traits = runner.traits.one_by_one()


def find_row_group(runner: Runner, vocab_size: int) -> int | None:
    """The fewest tokens by which a text may be cut without changing a bit; None where no such number is found."""
    rng, lengths = np.random.default_rng(0), [min(length, runner.traits.context_length) for length in GROUP_TEXTS]
    texts = [rng.integers(0, vocab_size, length).tolist() for length in lengths]
    runner.reserve(max(lengths))
    try:
        for group in GROUPS:
            if all(_is_cut_by(runner, text, group) for text in texts):
                return group
    except RunError as error:
        logger.warning("no group of rows could be tried: %s", error)
    return None


def _is_cut_by(runner: Runner, text: list[int], group: int) -> bool:
    """Whether the end of `text` has the same bits after steps of groups as in one step; False where it has no end."""
    length = len(text) - len(text) % group
    if length <= group:
        return False
    stops = sorted({*range(group, min(GROUPS[-1], length) + 1, group), length - group, length})
    return _last_rows(runner, text, stops, group) == _last_rows(runner, text, [length], group)


def _example_source(traits: Traits) -> Source | None:
    if traits.source is None:
        return None
    shape = [size if isinstance(size, int) else EXAMPLE for size in traits.source.shape[1:]]
    return Source(np.zeros(shape, np.float32 if traits.source_kind is SourceKind.FEATURES else np.int64))


def _last_rows(runner: Runner, text: list[int], stops: Sequence[int], num_rows: int) -> bytes:
    """The bits of what follows each of the last `num_rows` tokens of `text`, fed in steps up to each of `stops`. Only
    equal numbers of rows can be compared, because the scoring head's last bits depend on how many it takes."""
    source = _example_source(runner.traits)
    starts = [0, *stops[:-1]]
    rows = [Row(0, start, tuple(text[start:stop]), source=source) for start, stop in zip(starts, stops, strict=True)]
    for row in rows[:-1]:
        runner.run(Step((row,)))
    first = len(rows[-1].tokens) - num_rows
    logits_rows = tuple(LogitsRow(0, first + place) for place in range(num_rows))
    return runner.run(Step((rows[-1],), logits_rows, samples=tuple(range(num_rows)))).sample_logits_KV.tobytes()


LENGTH = 32
"""Tokens of the texts where nothing in the graph asks for more; the whole trial takes five times as many."""

WORK = 5 * 10**10
"""Bytes of weights times tokens of a text that the trial may take where the graph has numbers of positions that could
decide something: 92 tokens of SmolLM2-135M's shape in fp32 (1 s), 4,096 of a model of 12 MB. Longer texts are fed by
`olive-ext check --verify`."""

SHORT = 9
"""Tokens of the text that another one is fed beside, and by how many texts pass a number of positions."""


def affordable(num_bytes: int | None) -> int:
    """The most tokens of a text, of a model of so many bytes."""
    return max(LENGTH, WORK // max(1, num_bytes or WORK))


def check_steps(runner: Runner, vocab_size: int, longest: int, numbers: Sequence[int], most: int) -> str | None:
    """Why texts of this model must be fed whole and alone; None where that makes no difference, or cannot be tried:
    where a step takes less than a text, or an encoder would have to run. Where texts are fed so anyway, answers still
    continue token by token, and that alone is tried.

    Texts pass those of `numbers`, positions that the graph may compare with, that leave them below `most` tokens; a
    step has up to `longest`.
    """
    wanted = [4 * (number + SHORT) // 3 for number in numbers]  # the last of four parts begins after the number
    length = max([LENGTH, *(tokens for tokens in wanted if tokens <= most)])
    length = min(length, longest, runner.traits.context_length - 1)
    length -= length % (4 * runner.traits.row_group)
    traits = runner.traits
    if length <= 2 * SHORT or traits.source_kind is not None:
        return None
    trial = _PartsTrial(runner, vocab_size, length)
    try:
        expected = [trial.whole(text) for text in trial.texts]
        again = np.concatenate([expected[1][: -len(TARGETS)], trial.last_alone()])
        alone = "the last token, fed alone,", [expected[0], again]
        for what, found in chain(trial.other_ways(expected) if traits.chunked_prefill else (), [alone]):
            if problem := disagreement(what, expected, found, again):
                return problem
    except RunError as error:
        return f"steps of parts of a text fail: {error}"
    return None


class _PartsTrial:
    """Two texts with a common first half, and the log-probabilities of `TARGETS` at two places of their second."""

    def __init__(self, runner: Runner, vocab_size: int, length: int) -> None:
        self._runner = runner
        rng = np.random.default_rng(0)
        first, second = rng.integers(0, vocab_size, (2, length)).tolist()
        self._part = length // 4
        self.texts: tuple[Text, Text] = (tuple(first), (*first[: 2 * self._part], *second[2 * self._part :]))
        self._places = (3 * self._part - 1, length - 1)
        self._short: Text = tuple(second[:SHORT])
        self._side = runner.traits.side(length).first
        runner.reserve(length)

    def whole(self, text: Text) -> FloatArray:
        return self._fed(text, 0, len(text))

    def last_alone(self) -> FloatArray:
        """The result of the second text's last token, which was fed last, in a step of its own."""
        text = self.texts[1]
        if not self._runner.traits.can_rewind:
            self._fed(text, 0, len(text) - 1)
        return self._fed(text, len(text) - 1, len(text))

    def other_ways(self, expected: list[FloatArray]) -> Iterator[tuple[str, list[FloatArray]]]:
        """Ways of feeding one of the texts, by name: its results, and the expected ones of the other."""
        traits, num_slots = self._runner.traits, self._runner.capacity.num_slots
        (first, second), half, length = self.texts, 2 * self._part, len(self.texts[0])
        begins = range(0, length, self._part)
        parts = np.concatenate([self._fed(first, begin, begin + self._part) for begin in begins])
        yield "texts fed in parts", [parts, expected[1]]
        if traits.can_rewind:
            yield "texts after the beginning of another", [expected[0], self._fed(second, half, length)]
        if traits.can_rewind and num_slots > 1:
            copied = self._fed(second, half, length, slot=1, copies=(Copy(0, 1, half),))
            yield "texts after a copy of another's beginning", [expected[0], copied]
        if num_slots > 1 and traits.form.in_slots.mixes_pasts:
            self._fed(first, half if traits.can_rewind else 0, length - 1)
            beside = np.concatenate([expected[0][: -len(TARGETS)], self._last_in_company()])
            yield "texts beside another", [beside, expected[1]]

    def _last_in_company(self) -> FloatArray:
        """The result of the first text's last token, resident up to there, in a step with the short text's."""
        text, short, last = self.texts[0], self._short, len(self.texts[0]) - 1
        self._fed(short, 0, SHORT - 1, slot=1)
        slots = self._runner.traits.form.in_slots.slots_of([0, 1], self._runner.capacity.num_slots)
        idle = [Row(slot, 0, (0,)) for slot in slots[2:]]
        rows = (Row(0, last, text[last:]), Row(1, SHORT - 1, short[-1:]), *idle)
        return self._run(Step(rows, (LogitsRow(0, 0),), targets_of(1)))

    def _fed(self, text: Text, start: int, stop: int, *, slot: int = 0, copies: tuple[Copy, ...] = ()) -> FloatArray:
        offsets = [place - start for place in self._places if start <= place < stop]
        logits_rows = tuple(LogitsRow(0, offset) for offset in offsets)
        rows, targets = (Row(slot, start, text[start:stop]),), targets_of(len(offsets))
        return self._run(Step(rows, logits_rows, targets, copies=copies))

    def _run(self, step: Step) -> FloatArray:
        found = self._runner.run(replace(step, whole_length=self._side)).target_logprobs
        return found[: len(step.targets)]
