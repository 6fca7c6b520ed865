"""What keys and values cost on their way from one token to the next: one decode loop in five forms.

    python docs/benchmarks/kv_cache.py MODEL --device cpu            MODEL: a package of onnxruntime-genai's builder

- numpy: `session.run`; keys and values go through the host's memory twice a token.
- returned: bound outputs stay on the device and are the next past; the graph still copies them when it appends.
- in place: past and present are one buffer of the greatest length.
- genai: onnxruntime-genai's generator, whose buffers are in place, too.
- olive_ext: this package's engine, which reads token ids, or the best of each beam, instead of logits; its beams are a
  beam search, with forks where the search makes them.

Each with 1 row, 4 rows and 4 beams: rows that are reordered at every token, as beam search does. Prints milliseconds
(on the CPU those of the processor, with one thread, which other work does not take away; elsewhere the clock's) and
bytes over the bus a token (medians): on a device with memory of its own those that the loop hands over as host arrays;
over the CUDA stub those that the stub counts; on the CPU those that would cross. docs/kv_cache.md has results.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from olive_ext.graph.standalone_graphs import StackedTensor, stack_graph

PERMUTATION = np.array([1, 0, 3, 2])
ROWS = {"1 row": (1, False), "4 rows": (4, False), "4 beams": (4, True)}


class Loop(ABC):
    """A decode loop of `rows` rows; `bytes_crossed` counts what goes to ONNX Runtime and back as host arrays."""

    def __init__(self, session: ort.InferenceSession, device: str, rows: int, past: int, capacity: int) -> None:
        self.session, self.device, self.rows, self.past, self.capacity = session, device, rows, past, capacity
        self.inputs = {value.name: value for value in session.get_inputs()}
        self.kv = [name for name in self.inputs if name.startswith("past_key_values")]
        self.presents = [name.replace("past_key_values", "present") for name in self.kv]
        self.bytes_crossed = 0
        self.tokens = np.full((rows, 1), 7, np.int64)

    def feeds(self, width: int) -> dict[str, Any]:
        """The inputs but keys and values."""
        found = {"input_ids": self.tokens, "attention_mask": np.ones((self.rows, width), np.int64)}
        found["position_ids"] = np.full((self.rows, 1), self.past, np.int64)
        found = {name: array for name, array in found.items() if name in self.inputs}
        self.bytes_crossed += sum(array.nbytes for array in found.values())
        return found

    def zeros(self, length: int) -> list[Any]:
        """Keys and values of `length` positions."""
        made = []
        for name in self.kv:
            shape = self.inputs[name].shape
            dtype = np.float16 if "float16" in self.inputs[name].type else np.float32
            made.append(np.zeros((self.rows, shape[1], length, HEAD_SIZE[0]), dtype))
        return made

    def take(self, logits: Any) -> None:
        """The greedy tokens of [rows, 1, V]."""
        self.bytes_crossed += logits.nbytes
        self.tokens = logits[:, -1:].argmax(-1).astype(np.int64)
        self.past += 1

    @abstractmethod
    def step(self, reorders: bool) -> None:
        """One token of each row."""


class NumpyLoop(Loop):
    """Keys and values as numpy arrays."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.values = self.zeros(self.past)

    def step(self, reorders: bool) -> None:
        values = [array[PERMUTATION] for array in self.values] if reorders else self.values
        feeds = {**self.feeds(self.past + 1), **dict(zip(self.kv, values, strict=True))}
        logits, *self.values = self.session.run(["logits", *self.presents], feeds)
        self.bytes_crossed += sum(array.nbytes for array in (*values, *self.values))
        self.take(logits)


class BoundLoop(Loop):
    """Keys and values as values of the device."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.values = [ort.OrtValue.ortvalue_from_numpy(array, self.device, 0) for array in self.zeros(self.length)]
        kinds = [StackedTensor(value.element_type(), 4, None) for value in self.values]
        options = self.session.get_session_options()
        self.reorder = ort.InferenceSession(stack_graph(kinds, 1), options, providers=self.session.get_providers())

    @property
    def length(self) -> int:
        return self.past

    def step(self, reorders: bool) -> None:
        if reorders:
            self.gather_rows()
        binding = self.session.io_binding()
        for name, array in self.feeds(self.past + 1).items():
            binding.bind_cpu_input(name, array)
        for name, value in zip(self.kv, self.values, strict=True):
            binding.bind_ortvalue_input(name, value)
        binding.bind_output("logits")
        self.bind_presents(binding)
        self.session.run_with_iobinding(binding)
        logits, *presents = binding.get_outputs()
        self.keep(presents)
        self.take(logits.numpy())

    def keep(self, presents: list[Any]) -> None:
        """What the graph has returned is the next past."""
        self.values = presents

    def bind_presents(self, binding: Any) -> None:
        for name in self.presents:
            binding.bind_output(name, self.device, 0)

    def gather_rows(self) -> None:
        """Puts the rows in another order, on the device."""
        binding = self.reorder.io_binding()
        for number, value in enumerate(self.values):
            binding.bind_ortvalue_input(f"x{number}_0", value)
            self.bind_reordered(binding, number)
        binding.bind_cpu_input("rows_0", PERMUTATION)
        self.reorder.run_with_iobinding(binding)
        self.bytes_crossed += PERMUTATION.nbytes
        self.keep(binding.get_outputs())

    def bind_reordered(self, binding: Any, number: int) -> None:
        binding.bind_output(f"y{number}", self.device, 0)


class InPlaceLoop(BoundLoop):
    """Past and present are one buffer; beams are gathered into a second one."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.spare = [ort.OrtValue.ortvalue_from_numpy(array, self.device, 0) for array in self.zeros(self.length)]

    @property
    def length(self) -> int:
        return self.capacity

    def keep(self, presents: list[Any]) -> None:
        """Nothing: the buffers are this object's own."""

    def bind_presents(self, binding: Any) -> None:
        for name, value in zip(self.presents, self.values, strict=True):
            binding.bind_ortvalue_output(name, value)

    def bind_reordered(self, binding: Any, number: int) -> None:
        binding.bind_ortvalue_output(f"y{number}", self.spare[number])

    def gather_rows(self) -> None:
        super().gather_rows()
        self.values, self.spare = self.spare, self.values


HEAD_SIZE = [0]


def clock(device: str) -> float:
    """Seconds that steps on this device take."""
    return time.process_time() if device == "cpu" else time.perf_counter()


LOOPS = {"numpy": NumpyLoop, "returned": BoundLoop, "in place": InPlaceLoop}


def measured(loop: Loop, tokens: int, reorders: bool) -> dict[str, float]:
    """Medians of milliseconds and bytes a token, behind a first one that is not counted."""
    loop.step(reorders)
    spent, crossed = [], []
    for _ in range(tokens):
        loop.bytes_crossed = 0
        stub_bytes()
        begin = clock(loop.device)
        loop.step(reorders)
        spent.append(1e3 * (clock(loop.device) - begin))
        crossed.append(loop.bytes_crossed if (counted := stub_bytes()) is None else counted)
    return {"ms": statistics.median(spent), "bytes": statistics.median(crossed)}


def stub_bytes() -> int | None:
    """Bytes between host and device since the last call, as the CUDA stub counts; None without it."""
    if "OLIVE_EXT_CUDA_STUB" not in os.environ:
        return None
    found = (ctypes.c_longlong * 7)()
    ctypes.CDLL(os.environ["OLIVE_EXT_CUDA_STUB"]).cuda_stub_counts(found)
    return int(found[3] + found[5])


def genai(model: Path, device: str, past: int, tokens: int, rows: int, reorders: bool) -> dict[str, Any]:
    """The generator's milliseconds a token; what it copies inside cannot be seen from here."""
    import onnxruntime_genai as og

    try:
        config = og.Config(str(model))
        config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": 1}}}}))
        opened = og.Model(config)
    except Exception as error:  # noqa: BLE001 - a build without this device is a finding
        return {"not run": str(error).splitlines()[0][:80]}
    parameters = og.GeneratorParams(opened)
    beams = {"num_beams": rows, "batch_size": 1} if reorders else {"batch_size": rows}
    length = past + tokens + 2
    parameters.set_search_options(max_length=length, min_length=length, do_sample=False, **beams)
    generator = og.Generator(opened, parameters)
    generator.append_tokens(np.full((1 if reorders else rows, past), 7, np.int32))
    generator.generate_next_token()
    spent = []
    for _ in range(tokens):
        begin = clock(device)
        generator.generate_next_token()
        spent.append(1e3 * (clock(device) - begin))
    return {"ms": statistics.median(spent)}


class Engine:
    """This package's engine: marks of time and bytes behind each of its decoding steps."""

    def __init__(self, model: Path, device: str, past: int, tokens: int) -> None:
        from olive_ext.config import EngineConfig, ModelSettings
        from olive_ext.engine.runners.ort.ort_runner import OrtRunner

        self.marks: list[tuple[float, int]] = []
        self._kind, self._run, self._sent = OrtRunner, OrtRunner.run, 0
        self._device, self._past, self._tokens = device, past, tokens
        where = {"model": str(model), "execution_provider": device, "non_finite": "report"}
        self._settings = ModelSettings(**where, engine=EngineConfig(num_slots=4, num_threads=1, scoring="rows"))

    def measured(self, rows: int, reorders: bool) -> dict[str, float]:
        """Medians of milliseconds between two steps, and of bytes, with so many rows or beams."""
        from olive_ext.engine.opening import open_engine
        from olive_ext.engine.requests import Beams, Generation, Request
        from olive_ext.model import resolve

        draw = np.random.default_rng(3)
        generation = Generation(self._tokens + 3, beams=Beams(rows) if reorders else None)
        prompts = draw.integers(4, 1000, (1 if reorders else rows, self._past)).tolist()
        with self._marking(rows):
            opened = open_engine(resolve(self._settings))
            opened.run([Request(tuple(prompt), 0, generation) for prompt in prompts])
            opened.close()
        times, crossed = zip(*self.marks[-self._tokens - 1 :], strict=True)
        spent = [1e3 * (after - before) for before, after in pairwise(times)]
        return {"ms": statistics.median(spent), "bytes": statistics.median(crossed[1:])}

    @contextmanager
    def _marking(self, rows: int) -> Iterator[None]:
        """Counts what steps of `rows` rows with one token each hand to ONNX Runtime and read from it."""
        self.marks.clear()
        bind, update = ort.IOBinding.bind_cpu_input, ort.OrtValue.update_inplace

        def bound(binding: Any, name: str, array: Any) -> None:
            self._sent += array.nbytes
            bind(binding, name, array)

        def updated(value: Any, array: Any) -> None:
            self._sent += array.nbytes
            update(value, array)

        def run(runner: Any, step: Any) -> Any:
            self._sent, read = 0, runner.host_bytes
            stub_bytes()
            output = self._run(runner, step)
            counted = stub_bytes()
            crossed = self._sent + runner.host_bytes - read if counted is None else counted
            if len(step.rows) == step.num_tokens == rows:
                self.marks.append((clock(self._device), crossed))
            return output

        ort.IOBinding.bind_cpu_input, ort.OrtValue.update_inplace, self._kind.run = bound, updated, run
        try:
            yield
        finally:
            ort.IOBinding.bind_cpu_input, ort.OrtValue.update_inplace, self._kind.run = bind, update, self._run


def results(model: Path, device: str, past: int, tokens: int) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(form, rows, what was measured or why not)."""
    provider = {"cuda": "CUDAExecutionProvider", "cpu": "CPUExecutionProvider"}[device]
    config = json.loads((model / "genai_config.json").read_text(encoding="utf-8"))["model"]["decoder"]
    HEAD_SIZE[0] = int(config["head_size"])
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(str(model / config["filename"]), options, providers=[provider])
    for form, kind in LOOPS.items():
        for name, (rows, reorders) in ROWS.items():
            loop = kind(session, device, rows, past, past + tokens + 8)
            yield form, name, measured(loop, tokens, reorders)
    for name, (rows, reorders) in ROWS.items():
        yield "genai", name, genai(model, device, past, tokens, rows, reorders)
    engine = Engine(model, device, past, tokens)
    for name, (rows, reorders) in ROWS.items():
        yield "olive_ext", name, engine.measured(rows, reorders)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("model", metavar="MODEL", type=Path)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--past", metavar="N", type=int, default=512, help="positions before the first token")
    parser.add_argument("--tokens", metavar="N", type=int, default=32)
    given = parser.parse_args()
    print("| form | rows | ms a token | bytes over the bus a token |\n|---|---|--:|--:|")
    for form, name, found in results(given.model, given.device, given.past, given.tokens):
        cells = found.get("not run") or f"{found['ms']:.2f}"
        crossed = f"{found['bytes']:,.0f}" if "bytes" in found else ""
        print(f"| {form} | {name} | {cells} | {crossed} |", flush=True)


if __name__ == "__main__":
    main()
