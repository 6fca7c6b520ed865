"""The parts of gpu.py that need no model: versions and a product, attention against numpy, new lengths.

Run by gpu.py: `python gpu_parts.py FUNCTION FILE MODELS DEVICE` writes what the function finds to FILE, as it finds it.
Axes: H heads, K of these with keys and values of their own, S new tokens, T positions, D head size.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

Results = dict[str, Any]
HEADS, KV_HEADS, CAPACITY = 8, 2, 1024
LENGTHS = (131, 137, 139, 149, 151, 157, 163, 167)
REPEATS = 10


class Device:
    """Where sessions run: a device, and the type that attention computes in there."""

    def __init__(self, name: str) -> None:
        import onnxruntime as ort

        if name == "cuda":
            import torch  # noqa: F401 - brings the CUDA libraries

        self.ort = ort
        self.name = name
        self.dtype = np.float16 if name == "cuda" else np.float32
        self.providers = {"cuda": ["CUDAExecutionProvider"], "cpu": []}[name]

    def session(self, model: bytes) -> Any:
        options = self.ort.SessionOptions()
        options.enable_mem_pattern = False
        providers = [*self.providers, "CPUExecutionProvider"]
        return self.ort.InferenceSession(model, options, providers=providers, enable_fallback=0)

    def value(self, array: Any) -> Any:
        return self.ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array), self.name, 0)


def load(device: Device, _: Path) -> Iterator[Results]:
    """Versions, providers, and a product in half precision."""
    from onnx import TensorProto, helper

    yield {"onnxruntime": device.ort.__version__, "available": device.ort.get_available_providers()}
    try:
        import torch

        yield {"torch": torch.__version__, "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""}
    except Exception as error:  # noqa: BLE001 - what fails is a finding
        yield {"torch": repr(error)}
    half, value = TensorProto.FLOAT16, helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["a", "b"], ["c"])],
        "product",
        [value("a", half, [256, 256]), value("b", half, [256, 256])],
        [value("c", half, [256, 256])],
    )
    session = device.session(_serialized(graph))
    a, b = np.random.default_rng(0).standard_normal((2, 256, 256)).astype(np.float16)
    (c,) = session.run(None, {"a": a, "b": b})
    wanted = a.astype(np.float32) @ b.astype(np.float32)
    yield {
        "providers": session.get_providers(),
        "product_error": float(np.abs(c - wanted).max() / np.abs(wanted).max()),
    }


def attention(device: Device, _: Path) -> Iterator[Results]:
    """GroupQueryAttention against numpy, for head sizes, windows, and several tokens after none and after 700."""
    rows: list[Results] = []
    for size in (64, 128, 256):
        for window in (-1, 512):
            session = device.session(attention_model(device, size, window))
            for past in (0, 700):
                for tokens in (1, 5, 150):
                    rows.append({"head_size": size, "window": window, "past": past, "tokens": tokens})
                    try:
                        rows[-1] |= _attend(device, session, size, window, past, tokens)
                    except Exception as error:  # noqa: BLE001 - what fails is a finding
                        rows[-1]["error"] = str(error)[:300]
                    yield {"rows": rows, "largest_error": max(row.get("largest_error", 0.0) for row in rows)}


def new_lengths(device: Device, _: Path) -> Iterator[Results]:
    """Milliseconds of the first and the second call of lengths that were not met before, of a decoder's attention and
    an encoder's."""
    session = device.session(attention_model(device, 128, -1))
    _attend(device, session, 128, -1, 0, 128)
    yield _twice(lambda tokens: _bound(device, session, 128, 700, tokens)[0])
    encoder = device.session(encoder_model(device, 64))
    draw = np.random.default_rng(0)

    def bidirectional(tokens: int) -> Callable[[], Any]:
        arrays = draw.standard_normal((3, 1, tokens, HEADS * 64)).astype(device.dtype)
        return lambda: encoder.run(None, dict(zip("qkv", arrays, strict=True)))

    bidirectional(128)()
    yield {"encoder": _twice(bidirectional)}


def _twice(bound: Callable[[int], Callable[[], Any]]) -> Results:
    rows = []
    for tokens in LENGTHS:
        run = bound(tokens)
        first, second = _milliseconds(run), _milliseconds(run)
        rows.append({"tokens": tokens, "first_ms": first, "second_ms": second})
    firsts, seconds = ([row[key] for row in rows] for key in ("first_ms", "second_ms"))
    return {"rows": rows, "first_ms": float(np.median(firsts)), "second_ms": float(np.median(seconds))}


def encoder_model(device: Device, size: int) -> bytes:
    """One MultiHeadAttention of `HEADS` heads in the device's type."""
    from onnx import helper

    kind, shape = helper.np_dtype_to_tensor_dtype(np.dtype(device.dtype)), [1, "S", HEADS * size]
    inputs, output = ([helper.make_tensor_value_info(name, kind, shape) for name in names] for names in ("qkv", "o"))
    node = helper.make_node("MultiHeadAttention", ["q", "k", "v"], ["o"], domain="com.microsoft", num_heads=HEADS)
    return _serialized(helper.make_graph([node], "attention", inputs, output))


def attention_model(device: Device, size: int, window: int) -> bytes:
    """One GroupQueryAttention of `HEADS` heads in the device's type, without rotary embedding."""
    from onnx import TensorProto, helper

    from olive_ext.graph.standalone_graphs import INPUTS, OUTPUT

    kind, value = helper.np_dtype_to_tensor_dtype(np.dtype(device.dtype)), helper.make_tensor_value_info
    shapes = [[1, "S", heads * size] for heads in (HEADS, KV_HEADS, KV_HEADS)] + [[1, KV_HEADS, "P", size]] * 2
    inputs = [value(name, kind, shape) for name, shape in zip(INPUTS, shapes, strict=False)]
    inputs += [value(INPUTS[5], TensorProto.INT32, [1]), value(INPUTS[6], TensorProto.INT32, [])]
    outputs = [value(OUTPUT, kind, [1, "S", HEADS * size])]
    outputs += [value(name, kind, [1, KV_HEADS, "T", size]) for name in ("present_key", "present_value")]
    numbers = {"num_heads": HEADS, "kv_num_heads": KV_HEADS, "local_window_size": window}
    node = helper.make_node(
        "GroupQueryAttention", INPUTS, [output.name for output in outputs], domain="com.microsoft", **numbers
    )
    return _serialized(helper.make_graph([node], "attention", inputs, outputs))


def _attend(device: Device, session: Any, size: int, window: int, past: int, tokens: int) -> Results:
    run, (query, key, value) = _bound(device, session, size, past, tokens)
    results = run()
    wanted = attended(query, key, value, past, window)
    return {
        "largest_error": float(np.abs(results.astype(np.float32)[0] - wanted).max()),
        "ms": float(np.median([_milliseconds(run) for _ in range(REPEATS)])),
    }


def attended(query: Any, key: Any, value: Any, past: int, window: int) -> Any:
    """[S, H * D] in fp32: query [S, H, D], key and value [T, K, D]."""
    tokens, heads, size = query.shape
    group = heads // key.shape[1]
    key_THD, value_THD = (np.repeat(array.astype(np.float32), group, 1) for array in (key, value))
    scores_HST = np.einsum("shd,thd->hst", query.astype(np.float32), key_THD) / np.sqrt(size)
    distance_ST = past + np.arange(tokens)[:, None] - np.arange(past + tokens)
    is_hidden_ST = (distance_ST < 0) | ((distance_ST >= window) if window > 0 else False)
    scores_HST[:, is_hidden_ST] = -np.inf
    weights_HST = np.exp(scores_HST - scores_HST.max(-1, keepdims=True))
    weights_HST /= weights_HST.sum(-1, keepdims=True)
    return np.einsum("hst,thd->shd", weights_HST, value_THD).reshape(tokens, -1)


def _bound(
    device: Device, session: Any, size: int, past: int, tokens: int
) -> tuple[Callable[[], Any], tuple[Any, ...]]:
    """A function that attends with past and present in one buffer, and query, keys and values of all positions."""
    from olive_ext.graph.standalone_graphs import INPUTS, OUTPUT

    draw = np.random.default_rng(past + tokens)
    query = draw.standard_normal((tokens, HEADS, size)).astype(device.dtype)
    key, value = draw.standard_normal((2, past + tokens, KV_HEADS, size)).astype(device.dtype)
    binding = session.io_binding()
    for name, array in zip(INPUTS, (query, key[past:], value[past:]), strict=False):
        binding.bind_ortvalue_input(name, device.value(array.reshape(1, tokens, -1)))
    for name, present, array in zip(INPUTS[3:5], ("present_key", "present_value"), (key, value), strict=True):
        buffer = np.zeros((1, KV_HEADS, CAPACITY, size), device.dtype)
        buffer[0, :, :past] = array[:past].swapaxes(0, 1)
        held = device.value(buffer)
        binding.bind_ortvalue_input(name, held)
        binding.bind_ortvalue_output(present, held)
    binding.bind_cpu_input(INPUTS[5], np.array([past + tokens - 1], np.int32))
    binding.bind_cpu_input(INPUTS[6], np.array(past + tokens, np.int32))
    binding.bind_output(OUTPUT)

    def run() -> Any:
        session.run_with_iobinding(binding)
        return binding.get_outputs()[-1].numpy()  # in the order in which they were bound

    return run, (query, key, value)


def _milliseconds(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - begin)


def _serialized(graph: Any) -> bytes:
    from olive_ext.graph.nodes import model_of

    return bytes(model_of(graph, 18, "com.microsoft").SerializeToString())


def main() -> None:
    function, file, models, name = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    import gpu_engine_parts

    device = Device(name)
    results: Results = {}
    for more in (globals().get(function) or getattr(gpu_engine_parts, function))(device, models):
        results |= more
        file.write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main()
