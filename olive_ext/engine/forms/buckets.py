"""Gives steps one of a few shapes, each of which is run once beforehand: for providers that plan, compile or tune for
every new shape. Such steps can be captured and replayed (CUDA graphs, WebGPU's graph capture).

Rows are padded to one of `sizes` with tokens that nobody reads, decoding rows to all slots, and what is read of a step
to one of `READS`; masks are as wide as the slots. The padding is cut off again, so numbers do not change.

A replay launches all kernels at once. A captured step always reads and writes the same addresses. So it has a binding
of its own, which is filled once: inputs are written into values that are kept, and outputs stay on the device.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, takewhile
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from typing_extensions import override

from olive_ext.engine.runners.runner import Runner
from olive_ext.engine.runners.trials import TARGETS, Text, disagreement, read_end, targets_of, two_ends_problem
from olive_ext.engine.step import FEW_READS, Candidates, Capacity, FloatArray, LogitsRow, Row, Step, StepOutput
from olive_ext.errors import MemoryShortageError, RunError
from olive_ext.media.items import border, chunk_end, growing_sizes
from olive_ext.model.decisions import BUCKET_FORMS, BucketPlan
from olive_ext.model.providers.bindings import InputFeed
from olive_ext.model.providers.devices import Device

logger = logging.getLogger(__name__)

READS = (1, 4, 16, 64, 256, 1024, 4096)
"""The numbers of logits rows and of targets, which are equal in a padded step."""

DECODING = (1,)
"""The sizes where only steps that decode have few shapes."""

PADDING = 0
"""A token id that every vocabulary has."""

Item = TypeVar("Item")


class Shape(NamedTuple):
    """The sizes in which two steps of one model can differ."""

    rows: int
    tokens: int
    """Tokens of each row."""

    reads: int
    """Logits rows, and as many targets."""

    whole: int
    """Rows to sample from, and rows of beams: at least 1, even where there are none."""

    width: int
    """Positions of a slot, which are the width of masks and caches."""


def step_sizes(most: int) -> tuple[int, ...]:
    """Tokens of a row, up to `most`: 1, then `growing_sizes`."""
    return (*takewhile(lambda size: size < most, chain((1,), growing_sizes())), most)


class BucketedRunner(Runner):
    """Pads every step to a shape bucket: one of the shapes that were run when the slots were allocated. If `sizes`
    holds only 1, only the steps that decode are padded, and the others have any shape. Takes no tree batches.

    With `is_strict` a step of another shape raises `RunError`.
    """

    def __init__(self, inner: Runner, sizes: tuple[int, ...], *, is_strict: bool = False) -> None:
        # A step has all slots or one: two numbers of rows. Padding has no next token, so no tokens stay on the device.
        form = inner.traits.form.padded
        super().__init__(replace(inner.traits, form=form, tree_batches=False, overlaps_steps=False))
        self._has_pool = self.traits.form.mixes_pasts
        self.inner = inner
        self.encoder, self.embedding = inner.encoder, inner.embedding  # these have shapes of their own
        self._sizes = sizes
        self._is_strict = is_strict
        self._warmed: set[Shape] = set()
        self._late: set[Shape] = set()
        self._warmed_capacity = 0
        self._seconds = 0.0

    @property
    @override
    def capacity(self) -> Capacity:
        return self.inner.capacity

    @property
    @override
    def host_bytes(self) -> int:
        return self.inner.host_bytes

    @override
    def close(self) -> None:
        self.inner.close()
        self.encoder = self.embedding = None

    def reserve(self, positions: int, cells: int = 0) -> None:
        """Makes every slot hold `positions`, and runs all shapes of such slots."""
        self.inner.reserve(positions)
        if self.capacity.positions != self._warmed_capacity:
            self._warm_up()
            self._warmed_capacity = self.capacity.positions

    def run(self, step: Step) -> StepOutput:
        """Runs `step`, padded to its bucket; in several steps where the slot has no room for the padding."""
        padded = self.padded(step)
        if padded is None:
            first, rest = map(self.run, _halves(step))
            greedy_R = np.concatenate([first.greedy_ids, rest.greedy_ids])
            is_first_T = np.array([number < len(first.greedy_ids) for number, _ in step.targets], np.bool_)
            logprobs_T = np.empty(len(step.targets), np.float32)
            logprobs_T[is_first_T], logprobs_T[~is_first_T] = first.target_logprobs, rest.target_logprobs
            return replace(rest, target_logprobs=logprobs_T, greedy_ids=greedy_R)
        if self._is_shaped(step):
            shape = shape_of(padded)
            if self._is_strict and shape not in self._warmed:
                shown = f"{shape.rows} x {shape.tokens} tokens with {shape.reads} reads were not run beforehand"
                raise RunError(
                    f"'engine.strict_shapes' = true: {shown}; rows have up to {self._sizes[-1]} tokens, and as many "
                    f"targets or {FEW_READS}"
                )
            self._late |= {shape} - self._warmed
        output = self.inner.run(padded)
        logprobs_NC, ids_NC = output.candidates
        return replace(
            output,
            target_logprobs=output.target_logprobs[: len(step.targets)],
            greedy_ids=output.greedy_ids[: len(step.logits_rows)],
            sample_logits_KV=output.sample_logits_KV[: len(step.samples)],
            candidates=Candidates(logprobs_NC[: len(step.beams)], ids_NC[: len(step.beams)]),
        )

    def padded(self, step: Step) -> Step | None:
        """The step in one of the shapes; in a shape of its own where it cannot be split; None without room for it."""
        if not self._is_shaped(step):
            return replace(step, logits_rows=step.logits_rows or (LogitsRow(0, 0),))
        tokens = _next(self._sizes, len(step.rows[0].tokens))
        if any(row.past + tokens > self.capacity.positions for row in step.rows):
            if _halves(step):
                return None
            tokens = len(step.rows[0].tokens)
        reads = _next(READS, max(len(step.logits_rows), len(step.targets)))
        whole = len(step.whole_rows)
        more = self.capacity.num_slots - whole if whole > 1 else 0
        return replace(
            step,
            rows=tuple(_padded_row(row, tokens) for row in step.rows),
            logits_rows=filled(step.logits_rows, reads, LogitsRow(0, 0)),
            targets=filled(step.targets, reads, (0, PADDING)),
            samples=filled(step.samples, len(step.samples) + (0 if step.beams else more), 0),
            beams=filled(step.beams, len(step.beams) + (more if step.beams else 0), 0),
            width=self.capacity.positions,
        )

    def release_memory(self) -> None:
        """Forgets captured steps: new slots run all shapes again."""
        self.inner.release_memory()
        self._warmed.clear()
        self._warmed_capacity = 0

    def describe(self) -> Mapping[str, Any]:
        """How many shapes were run beforehand in how many seconds, and how many came later."""
        facts = {
            "shapes": BUCKET_FORMS["decoding" if self._sizes == DECODING else "all"],
            "shape_sizes": list(self._sizes),
            "strict_shapes": self._is_strict,
            "shapes_warmed": len(self._warmed),
            "shapes_late": len(self._late),
            "warm_up_s": self._seconds,
            "overlaps_steps": False,
            "overlaps_steps_reason": "steps of few shapes take their tokens from the host",
        }
        return {**self.inner.describe(), "batching": self.traits.form.name, **facts}

    def _is_shaped(self, step: Step) -> bool:
        return self._sizes != DECODING or len(step.rows[0].tokens) == 1

    def _warm_up(self) -> None:
        begin = time.perf_counter()
        for step in self._every():
            padded = self.padded(step)
            assert padded is not None
            if (shape := shape_of(padded)) not in self._warmed:
                try:
                    self.inner.run(padded)
                    self._warmed.add(shape)
                except MemoryShortageError as error:
                    logger.warning("%s; steps of this shape are not run beforehand", error)
        self._seconds += time.perf_counter() - begin

    def _every(self) -> Iterator[Step]:
        for size in (size for size in self._sizes if size <= self.capacity.positions):
            for reads in _up_to(max(size, FEW_READS)):
                yield _step(1, size, reads, 0)
        num_slots = self.capacity.num_slots
        if self._has_pool and num_slots > 1:
            for reads in _up_to(max(num_slots, FEW_READS)):
                yield _step(num_slots, 1, reads, 0)
                yield _step(num_slots, 1, reads, 2)


def shape_of(step: Step) -> Shape:
    """The shape of a step whose rows have as many tokens each."""
    assert step.width is not None
    whole = max(1, len(step.whole_rows))
    return Shape(len(step.rows), len(step.rows[0].tokens), len(step.logits_rows), whole, step.width)


def _halves(step: Step) -> tuple[Step, ...]:
    """A step of one row in two parts, cut between items; none where there is no such cut."""
    row = step.rows[0]
    begin, stop = row.past, row.past + len(row.tokens)
    middle = border(row.media, (begin + stop) // 2)
    middle = middle if middle > begin else chunk_end(row.media, begin, begin + 1)
    if len(step.rows) > 1 or not begin < middle < stop:
        return ()
    first, rest = (_tokens_of(step, start, end) for start, end in ((begin, middle), (middle, stop)))
    return first, replace(rest, copies=())


def _tokens_of(step: Step, begin: int, stop: int) -> Step:
    """A step of one row for its tokens at these positions, and what is read of them."""
    row = step.rows[0]
    offsets = range(begin - row.past, stop - row.past)
    reads = {number: read for number, read in enumerate(step.logits_rows) if read.offset in offsets}
    numbers = {old: new for new, old in enumerate(reads)}
    return replace(
        step,
        rows=(row._replace(past=begin, tokens=row.tokens[offsets.start : offsets.stop]),),
        logits_rows=tuple(read._replace(offset=read.offset - offsets.start) for read in reads.values()),
        targets=tuple((numbers[number], token) for number, token in step.targets if number in numbers),
        samples=tuple(numbers[number] for number in step.samples if number in numbers),
        beams=tuple(numbers[number] for number in step.beams if number in numbers),
    )


def _padded_row(row: Row, num_tokens: int) -> Row:
    media = tuple(run for run in row.media if run.start < row.past + len(row.tokens))
    return row._replace(tokens=filled(row.tokens, num_tokens, PADDING), media=media)


def _step(rows: int, tokens: int, reads: int, samples: int) -> Step:
    """A step that is padded to that shape, at the beginning of the first slots."""
    fed = tuple(Row(slot, 0, (PADDING,) * tokens) for slot in range(rows))
    return Step(fed, targets=((0, PADDING),) * reads, samples=(0,) * samples)


def _up_to(number: int) -> tuple[int, ...]:
    return READS[: bisect_left(READS, number) + 1]


def _next(ladder: Sequence[int], number: int) -> int:
    """The first of the sizes that is not less than `number`; beyond the last size, a multiple of it."""
    place = bisect_left(ladder, number)
    return ladder[place] if place < len(ladder) else -(-number // ladder[-1]) * ladder[-1]


def filled(values: Sequence[Item], length: int, more: Item) -> tuple[Item, ...]:
    """The values, padded with `more` to `length`."""
    return (*values, *[more] * (length - len(values)))


RUN_OPTION = "gpu_graph_id"
"""ONNX Runtime's name for the number under which a run is captured or replayed; -1 does neither."""

NOT_CAPTURED = -1


@dataclass
class Captured:
    """Stands in for a binding: what is bound once stays bound."""

    number: int
    binding: ort.IOBinding
    feed: InputFeed
    outputs: Sequence[ort.OrtValue]
    """The values of all outputs but the caches, which are bound."""

    options: ort.RunOptions
    _bound: dict[str, Any] = field(default_factory=dict)

    def bind_ortvalue_input(self, name: str, value: ort.OrtValue) -> None:
        """Binds a value that must never change."""
        if name not in self._bound:
            self.binding.bind_ortvalue_input(name, value)
        elif self._bound[name] is not value:
            raise RunError(f"a captured step got another value for '{name}'")
        self._bound[name] = value

    def bind_cpu_input(self, name: str, array: npt.NDArray[Any]) -> None:
        """Binds an input in host memory. It was read when the step was captured, and must stay the same."""
        if name not in self._bound:
            self.binding._iobinding.bind_input(name, array)  # on WebGPU the wrapper takes values on the device only
        elif not np.array_equal(self._bound[name], array):
            raise RunError(f"a captured step got '{name}' = {array.tolist()} instead of {self._bound[name].tolist()}")
        self._bound[name] = array

    def bind_output(self, name: str, *_: Any) -> None:
        """Binds nothing: every output of a captured step has its value on the device already."""


class NotCapturedError(Exception):
    """Why decoding steps cannot be captured: the form must be opened without capture."""


class Capture:
    """The captured steps of one session: those in which all slots decode, one for each of their shapes."""

    def __init__(self, session: ort.InferenceSession, device: Device) -> None:
        self._session = session
        self._device = device
        self._types = {output.name: output for output in session.get_outputs()}
        self._steps: dict[Shape, Captured] = {}
        self._next_number = 1
        self._num_replayed = 0

    def prepared(self, step: Step, num_slots: int) -> tuple[Step, bool]:
        """The step as it must run, and whether it is captured or replayed."""
        return step, step.width is not None and len(step.rows) == num_slots and len(step.rows[0].tokens) == 1

    def captured(self, step: Step, bind_caches: Callable[[], ort.IOBinding], outputs: Mapping[str, int]) -> Captured:
        """The binding of the step. A new binding gets the caches, and values for outputs with these numbers of rows."""
        shape = shape_of(step)
        if shape not in self._steps:
            binding = bind_caches()
            values = {name: self._zeros(name, size) for name, size in outputs.items()}
            for name, value in values.items():
                binding.bind_ortvalue_output(name, value)
            feed, options = InputFeed(self._session, self._device, kept=None), run_options(self._next_number)
            self._steps[shape] = Captured(self._next_number, binding, feed, [*values.values()], options)
            self._next_number += 1
        return self._steps[shape]

    def run(self, captured: Captured) -> Sequence[ort.OrtValue]:
        """The outputs, which stay where they are: the first run captures, others replay."""
        self._session.run_with_iobinding(captured.binding, captured.options)
        self._num_replayed += 1
        return captured.outputs

    def forget(self) -> None:
        """Forgets captured steps: the slots are about to move."""
        release = getattr(self._session, "release_captured_graph", None)  # from ONNX Runtime 1.31 on
        for captured in self._steps.values():
            if release is not None:
                release(captured.number)
        self._steps.clear()

    def describe(self) -> dict[str, int]:
        """How many steps are captured, and how many runs were captured or replayed."""
        return {"steps_captured": len(self._steps), "steps_replayed": self._num_replayed}

    def _zeros(self, name: str, size: int) -> ort.OrtValue:
        declared = self._types[name]
        dtype = {"tensor(float)": np.float32, "tensor(int64)": np.int64}[declared.type]
        zeros = np.zeros([size, *declared.shape[1:]], dtype)
        return ort.OrtValue.ortvalue_from_numpy(zeros, self._device.kind, self._device.index)


def run_options(number: int) -> ort.RunOptions:
    """Options of a run that is captured or replayed under this number."""
    options = ort.RunOptions()
    options.add_run_config_entry(RUN_OPTION, str(number))
    return options


def with_buckets(runner: Runner, vocab_size: int, chunk_size: int, plan: BucketPlan, notes: list[str]) -> Runner:
    """`runner`, or a runner around it that gives its steps few shapes. Where `plan` has buckets that cannot be used,
    adds the reason to `notes`. Raises `ConfigError` where the model must have them."""
    if plan.steps == "none":
        return runner
    sizes = DECODING if plan.steps == "decoding" else step_sizes(chunk_size)
    bucketed = BucketedRunner(runner, sizes, is_strict=plan.is_strict)
    problem = _check_buckets(runner, bucketed, vocab_size)
    if problem is None and plan.is_captured:
        problem = _check_replays(runner, bucketed, vocab_size)
    if problem is None:
        return bucketed
    notes.append(plan.without(problem).note)
    return runner


def _run_padded(bucketed: BucketedRunner, step: Step) -> StepOutput:
    padded = bucketed.padded(step)
    assert padded is not None
    return bucketed.inner.run(padded)


def _check_buckets(runner: Runner, bucketed: BucketedRunner, vocab_size: int) -> str | None:
    """Why padded steps must not be used on this model and device; None where they score as other steps do."""

    def padded(stem: Text, *ends: Text) -> FloatArray:
        logprobs = []
        for text in (stem + end for end in ends):
            _run_padded(bucketed, Step((Row(0, 0, text[:-2]),)))
            logprobs.append(_run_padded(bucketed, read_end(text, len(text) - 2)).target_logprobs[: len(TARGETS)])
        return np.concatenate(logprobs)

    what = "a step that was filled up", "steps that were filled up"
    return two_ends_problem(runner, vocab_size, *what, padded)


def _check_replays(runner: Runner, bucketed: BucketedRunner, vocab_size: int) -> str | None:
    """Why captured steps must not be used; None where a replay with other tokens finds what a plain step finds."""
    slots = range(runner.capacity.num_slots)
    logits_rows = tuple(LogitsRow(slot, 0) for slot in slots)
    targets = targets_of(len(slots))
    expected, replayed = [], []
    try:
        for slot in slots:
            runner.run(Step((Row(slot, 0, (slot % vocab_size,)),), logits_rows[:1]))
        for first in (0, vocab_size // 2):
            rows = tuple(Row(slot, 1, ((first + slot) % vocab_size,)) for slot in slots)
            step = Step(rows, logits_rows, targets)
            expected.append(runner.run(step))
            replayed.append(_run_padded(bucketed, step))
    except RunError as error:
        return f"a captured step fails: {error}"
    if any((a.greedy_ids != b.greedy_ids[: len(slots)]).any() for a, b in zip(expected, replayed, strict=True)):
        return "replays of a captured step find other tokens"
    plain, again = ([output.target_logprobs[: len(targets)] for output in outputs] for outputs in (expected, replayed))
    return disagreement("replays of a captured step", plain, again, plain[1])
