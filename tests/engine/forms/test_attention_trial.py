"""The trial of attention over a paged cache, on a kernel of which it is known what it does: ONNX Runtime's
GroupQueryAttention on the CPU, behind a cache in blocks, right and with planted faults.

The trial of attention over a paged cache finds any one position that a kernel loses, doubles, exchanges with its
neighbour or mistakes for it, on a kernel in numpy that rounds as a flash kernel does.

Axes: B rows and N tokens of a step, L positions, H heads of keys, G heads of queries to each, D head size.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import helper

from olive_ext.engine.forms import attention_trial
from olive_ext.engine.forms.attention_trial import (
    K_NORM,
    LENGTH,
    OUTPUT,
    Q_NORM,
    TOLERANCE,
    AttentionTrial,
    attended,
    attends_otherwise,
    attention_trials,
    input_name,
    score_scale,
    visible,
)
from olive_ext.engine.forms.paged_attention import (
    KERNELS,
    PASTS,
    STARTS,
    TABLE,
    PackedInputs,
    PagedKernel,
    gathered_bytes,
    with_paged_attention,
)
from olive_ext.graph.nodes import attribute, model_of
from olive_ext.model.providers.devices import Device
from tests.exports import export

FLOAT, FLOAT16 = 1, 10
INT32 = onnx.TensorProto.INT32
LENGTHS = ("last", "total")


def gqa_node(heads: int, groups: int, size: int, extra: Mapping[int, str], packed: bool, **how: Any) -> onnx.NodeProto:
    """A GroupQueryAttention whose inputs have the names of a decoder."""
    named = {0: "q", **({} if packed else {1: "k", 2: "v"}), 3: "past_k", 4: "past_v", 5: LENGTHS[0], 6: LENGTHS[1]}
    places = {**named, **extra}
    return helper.make_node(
        "GroupQueryAttention",
        [places.get(place, "") for place in range(max(places) + 1)],
        ["out", "present_k", "present_v"],
        domain="com.microsoft",
        num_heads=heads * groups,
        kv_num_heads=heads,
        **how,
    )


def trial_of(
    heads: int = 2,
    groups: int = 2,
    size: int = 16,
    elem_type: int = FLOAT,
    *,
    rotated: int = 0,
    sinks: bool = False,
    norms: bool = False,
    packed: bool = False,
    kernel: PagedKernel = KERNELS["cuda"],
    **how: Any,
) -> AttentionTrial:
    """The trial of a graph with one attention, which rotates `rotated` numbers of a head."""
    dtype = helper.tensor_dtype_to_np_dtype(elem_type)
    weights = {}
    if rotated:
        weights |= {7: np.ones((8, rotated // 2)), 8: np.zeros((8, rotated // 2))}
        how["do_rotary"] = 1
    if sinks:
        weights[11] = np.ones(heads * groups)
    if norms:
        weights |= {Q_NORM: np.ones(size), K_NORM: np.ones(size)}
    node = gqa_node(heads, groups, size, {place: f"weight_{place}" for place in weights}, packed, **how)
    pasts = [helper.make_tensor_value_info(name, elem_type, ["B", heads, "P", size]) for name in ("past_k", "past_v")]
    tensors = [onnx.numpy_helper.from_array(value.astype(dtype), f"weight_{place}") for place, value in weights.items()]
    model = model_of(helper.make_graph([node], "decoder", pasts, [], tensors), 21, "com.microsoft")
    caches = dict.fromkeys(("past_k", "past_v"), (heads, size))
    (trial,) = attention_trials(with_paged_attention(model, PackedInputs(caches, (), LENGTHS), kernel), caches)
    return trial


GROUPED = {8: 7, 9: 8, 11: 11, 12: 14, 13: 15, 14: 12, 15: 13}
"""Place of PagedAttention's input -> of GroupQueryAttention's that means the same."""


def grouped_node(paged: onnx.NodeProto) -> onnx.NodeProto:
    """GroupQueryAttention that computes what PagedAttention does, on the same inputs and the lengths of a row."""
    named = {place: name for place, name in enumerate(paged.input) if place < 5}
    named |= {GROUPED[place]: name for place, name in enumerate(paged.input) if place in GROUPED}
    named |= dict(enumerate(LENGTHS, 5))
    node = onnx.NodeProto()
    node.CopyFrom(paged)
    node.op_type = "GroupQueryAttention"
    node.input[:] = [named.get(place, "") for place in range(max(named) + 1)]
    return node


class _Binding:
    def __init__(self) -> None:
        self.given: dict[str, Any] = {}
        self.found: Any = None

    def bind_cpu_input(self, name: str, array: Any) -> None:
        self.given[name] = array

    def bind_input(self, name: str, kind: str, index: int, elem_type: int, shape: list[int], address: int) -> None:
        dtype = helper.tensor_dtype_to_np_dtype(elem_type)
        room = (ctypes.c_char * (int(np.prod(shape)) * dtype.itemsize)).from_address(address)
        self.given[name] = np.frombuffer(room, dtype).reshape(shape)

    def bind_output(self, *place: Any) -> None:
        assert place[0] in (OUTPUT, "present_key", "present_value")

    def get_outputs(self) -> list[Any]:
        return [SimpleNamespace(numpy=lambda: self.found)]


class StandIn:
    """PagedAttention by ONNX Runtime's GroupQueryAttention on the CPU, one row after the other, with one fault."""

    io_binding = staticmethod(_Binding)

    def __init__(self, trial: AttentionTrial, fault: str = "") -> None:
        self.fault = fault
        self.num_runs = 0
        node = grouped_node(trial.node)
        for entry in node.attribute:
            if entry.name == "local_window_size" and fault == "window off by one":
                entry.i += 1
        value, size = helper.make_tensor_value_info, [1, trial.heads, None, trial.head_size]
        shapes = {input_name(place): (1, *shape) if place < 3 else shape for place, (shape, _) in trial.inputs.items()}
        inputs = [value(name, FLOAT, [one or None for one in shape]) for name, shape in shapes.items()]
        inputs += [value(name, trial.elem_type, size) for name in ("past_key", "past_value")]
        inputs += [value(LENGTHS[0], INT32, [1]), value(LENGTHS[1], INT32, [])]
        casts = [
            helper.make_node("Cast", [name], [f"{name}_narrow"], to=trial.inputs[place][1])
            for place, name in zip(trial.inputs, shapes, strict=True)
        ]
        last = helper.make_node("Cast", ["narrow"], [OUTPUT], to=FLOAT)
        outputs = [value(OUTPUT, FLOAT, None)]
        outputs += [value(name, trial.elem_type, size) for name in ("present_key", "present_value")]
        model = model_of(helper.make_graph([*casts, node, last], "gqa", inputs, outputs), 21, "com.microsoft")
        options = ort.SessionOptions()
        options.log_severity_level = 4
        self.session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        self.paged = onnx.load_model_from_string(trial.graph)

    def get_inputs(self) -> Any:
        return self.paged.graph.input

    def run_with_iobinding(self, binding: _Binding) -> None:
        self.num_runs += 1
        given = binding.given
        starts, tables = given[STARTS], given[TABLE]
        parts = []
        for row, past in enumerate(given[PASTS]):
            blocks = tables[0 if self.fault == "every row has the first table" else row]
            if self.fault == "order of blocks ignored":
                blocks = np.sort(blocks)
            parts.append(self._row(given, slice(starts[row], starts[row + 1]), int(past), blocks))
            if self.fault == "rows from 64 on wrong" and row >= 64:
                parts[-1] = parts[-1][..., ::-1]
        binding.found = np.concatenate(parts, axis=1)[0]
        if self.fault == "nothing is computed":
            binding.found *= 0
        if self.fault == "no number":
            binding.found[-1] = np.nan

    def _row(self, given: Mapping[str, Any], tokens: slice, past: int, blocks: Any) -> Any:
        caches = {name: given[name] for name in ("past_key", "past_value")}
        count, size = tokens.stop - tokens.start, caches["past_key"].shape[1]
        read = np.array(blocks)
        if self.fault == "second block ignored":
            read[1] = read[0]
        cells = np.arange(past)
        feeds = {
            name: np.ascontiguousarray(cache[read[cells // size], cells % size].swapaxes(0, 1)[None])
            for name, cache in caches.items()
        }
        if self.fault == "split past 512 dropped" and count == 1:
            for cache in feeds.values():
                cache[:, :, 512:] = 0
        for name in (input_name(place) for place in range(3) if input_name(place) in given):
            feeds[name] = given[name][None, tokens]
        feeds |= {name: array for name, array in given.items() if name.startswith("input_") and name not in feeds}
        feeds |= {LENGTHS[0]: np.array([past + count - 1], np.int32), LENGTHS[1]: np.array(past + count, np.int32)}
        found, *presents = self.session.run([OUTPUT, "present_key", "present_value"], feeds)
        new = np.arange(past, past + count)
        if self.fault == "token of an answer not written" and count == 1:
            return found
        for cache, present in zip(caches.values(), presents, strict=True):
            cache[blocks[new // size], new % size] = present[0, :, past:].swapaxes(0, 1)
        return found


def tried(trial: AttentionTrial, fault: str = "", most: int = 1024) -> tuple[str | None, int]:
    """What the trial says of the stand-in, and its runs."""
    kernel = StandIn(trial, fault)
    runner: Any = SimpleNamespace(open_graph=lambda graph: kernel, device=Device("cpu"))
    return attends_otherwise(runner, [trial], most), kernel.num_runs


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one head a group": {"groups": 1},
    "window that 640 positions show": {"local_window_size": 128},
    "window that they do not": {"local_window_size": 4096},
    "rotary": {"rotated": 16},
    "rotary of pairs": {"rotated": 16, "rotary_interleaved": 1},
    "rotary of a part": {"size": 32, "rotated": 16},
    "soft cap": {"softcap": 20.0},
    "sinks": {"sinks": True, "local_window_size": 64},
    "scale": {"scale": 1.0},
    "packed": {"packed": True, "rotated": 16},
    "fp16": {"elem_type": FLOAT16, "size": 64, "rotated": 64},
}


@pytest.mark.long
@pytest.mark.parametrize("how", VARIANTS.values(), ids=VARIANTS)
def test_a_right_kernel_passes_in_six_runs(how: dict[str, Any]) -> None:
    """numpy's numbers are those of ONNX Runtime's CPU kernel, whatever the attention has."""
    problem, runs = tried(trial_of(**how))
    assert problem is None
    assert runs == 6


def test_rows_that_decode_are_tried_together_in_steps_of_few_tokens() -> None:
    """A chunk size of 31 bounds a prompt's tokens, not the rows of a step."""
    problem, runs = tried(trial_of(), most=31)
    assert problem is None
    assert runs > 20
    assert tried(trial_of(), "rows from 64 on wrong", most=31)[0] is not None


FAULTS = [
    "nothing is computed",
    "no number",
    "second block ignored",
    "order of blocks ignored",
    "every row has the first table",
    "split past 512 dropped",
    "rows from 64 on wrong",
    "token of an answer not written",
]


def _off(problem: str | None) -> float:
    assert problem is not None
    return float(problem.split(" off ")[0].split()[-1])


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_kernel_is_refused(fault: str) -> None:
    """Each fault shows beyond three times the tolerance of fp16."""
    problem, _ = tried(trial_of(rotated=16, elem_type=FLOAT16), fault)
    assert not _off(problem) < 3 * TOLERANCE


@pytest.mark.parametrize("window", [128, *(pytest.param(one, marks=pytest.mark.long) for one in (2, 4096))])
def test_a_window_off_by_one_is_refused(window: int) -> None:
    """Short windows are tried as they are, and long ones are cut to what the trial's texts show."""
    problem, _ = tried(trial_of(local_window_size=window), "window off by one")
    assert _off(problem) >= 3 * TOLERANCE
    assert tried(trial_of(local_window_size=window))[0] is None


def test_norms_of_heads_are_those_of_torch() -> None:
    """ONNX Runtime's CPU kernel has no norms, so that they are applied in front of it."""
    normed, plain = trial_of(norms=True), trial_of()
    rng = np.random.default_rng(0)
    values = {place: rng.standard_normal((40, shape[1]), np.float32) for place, (shape, _) in plain.inputs.items()}
    weights = {place: rng.standard_normal(16, np.float32) for place in (Q_NORM, K_NORM)}
    before = dict(values)
    for place, norm in ((0, Q_NORM), (1, K_NORM)):
        heads = torch.tensor(values[place]).reshape(40, -1, 16)
        before[place] = (
            torch.nn.functional.rms_norm(heads, (16,), torch.tensor(weights[norm]), 1e-6).reshape(40, -1).numpy()
        )
    given = {input_name(place): value[None] for place, value in before.items()}
    past = np.zeros((1, 2, 0, 16), np.float32)
    lengths = {LENGTHS[0]: np.array([39], np.int32), LENGTHS[1]: np.array(40, np.int32)}
    (expected,) = StandIn(plain).session.run([OUTPUT], {**given, **lengths, "past_key": past, "past_value": past})
    found = attended(normed.node, {**values, **weights}, 2, 16)
    assert np.abs(found - expected[0]).max() < 1e-5


def test_keys_that_a_kernel_gathers_are_counted() -> None:
    """64 rows, one of 16,384 positions, 8 heads of 512 in 16 bits: 8.6 GB of keys and as many of values."""
    caches = dict.fromkeys(("past_key", "past_value"), 512)
    graph = onnx.load_model_from_string(trial_of(heads=1, groups=8, size=512, elem_type=FLOAT16).graph)
    assert 64 * 16_384 * gathered_bytes(graph, caches, KERNELS["cuda"]) == 2 * 8_589_934_592
    small = onnx.load_model_from_string(trial_of(size=256, elem_type=FLOAT16).graph)
    assert gathered_bytes(small, dict.fromkeys(caches, 256), KERNELS["cuda"]) == 0


def test_a_paged_export_is_tried_by_its_own_node() -> None:
    """One kind in two layers; with its attributes, packed queries, tables and bounds, and blocks of its caches."""
    proto = onnx.load(export("llama-genai-0.18-paged-cuda").path / "model.onnx", load_external_data=False)
    caches = {f"past_key_values.{i}.{part}": (2, 16) for i in range(2) for part in ("key", "value")}
    (trial,) = attention_trials(proto, caches)
    (own, _) = (node for node in proto.graph.node if node.op_type == "PagedAttention")
    (node,) = (node for node in onnx.load_model_from_string(trial.graph).graph.node if node.op_type == own.op_type)
    assert node.attribute == own.attribute
    assert [bool(name) for name in node.input] == [bool(name) for name in own.input]
    assert list(trial.inputs) == [0, 8, 9]
    assert trial.inputs[0] == ((0, (4 + 2 * 2) * 16), FLOAT16)
    assert tried(trial)[0] is None
    assert _off(tried(trial, "split past 512 dropped")[0]) > TOLERANCE


@pytest.mark.parametrize("how", [{"is_causal": 0}, {"rotary_offset": 8}, {"kv_cache_layout": "LATENT"}])
def test_what_no_trial_computes_is_refused_by_name(how: dict[str, Any]) -> None:
    """Attributes of an exporter's node that the reference does not know, unless they do nothing."""
    trial, neutral = trial_of(), {"is_causal": 1, "k_cache_dtype": "float16", "rotary_offset": 0}
    trial.node.attribute.extend(helper.make_attribute(name, value) for name, value in {**neutral, **how}.items())
    runner: Any = SimpleNamespace(open_graph=print, device=Device("cpu"))
    (name,) = how
    assert f"has {name} " in str(attends_otherwise(runner, [trial], 1024))


BFLOAT16 = onnx.TensorProto.BFLOAT16

Lost = Callable[[Any, Any, Any], Any]
"""What becomes of outputs [N, H, G, D], with weights [N, H, G, L] and values [N, H, 1, D] of a position."""


def faults(at: int) -> dict[str, Lost]:
    """At one position: what a kernel makes of rightly computed rows that see it, and the next one where that counts."""

    def mixed(out: Any, weights: Any, values: Any, *changes: tuple[int, int, float]) -> Any:
        """With `factor` times the weight of `source` for the values of `target` added."""
        total = 1.0
        for source, target, factor in changes:
            part = factor * weights[..., source, None]
            out = out + part * values(target)
            total = total + (part if source == target else 0)
        return out / np.where(total == 0, 1, total)

    after = at + 1
    found: dict[str, Lost] = {
        "lost": lambda *row: mixed(*row, (at, at, -1.0)),
        "doubled": lambda *row: mixed(*row, (at, at, 1.0)),
    }
    if after < LENGTH:
        exchanged = ((at, at, -1.0), (at, after, 1.0), (after, after, -1.0), (after, at, 1.0))

        def swapped(out: Any, weights: Any, values: Any) -> Any:
            moved = out.copy()
            for source, target, factor in exchanged:
                moved += factor * weights[..., source, None] * values(target)
            return np.where(weights[..., after, None] > 0, moved, out)

        found["values swapped with the next"] = swapped
        found["the next one's instead"] = lambda out, weights, values: np.where(
            weights[..., after, None] > 0, mixed(out, weights, values, (at, at, -1.0), (after, after, 1.0)), out
        )
    return found


ROWS: dict[str, Callable[[Any, Any], Any]] = {
    "all rows": lambda counts, totals: counts > 0,
    "rows that decode": lambda counts, totals: counts == 1,
    "rows that decode behind 512": lambda counts, totals: (counts == 1) & (totals > 512),
    "prompts": lambda counts, totals: counts > 1,
}


class Planted:
    """PagedAttention in numpy over the trial's own tables and caches, in tiles of `tile` positions, with each product
    and weight rounded to the cache's type. What a right kernel finds is computed once; faults change that."""

    io_binding = staticmethod(_Binding)

    def __init__(self, trial: AttentionTrial, tile: int = 64, *, is_backwards: bool = False) -> None:
        self.trial = trial
        self.order = slice(None, None, -1 if is_backwards else 1)
        self.tile = tile
        self.paged = onnx.load_model_from_string(trial.graph)
        dtype = helper.tensor_dtype_to_np_dtype(trial.elem_type)
        self.narrow = lambda array: np.asarray(array, np.float32).astype(dtype).astype(np.float32)
        self.steps: list[tuple[Any, ...]] = []
        self.at = 0
        self.fault: Lost | None = None
        self.rows = "all rows"
        self.is_changed = False

    def get_inputs(self) -> Any:
        return self.paged.graph.input

    def run_with_iobinding(self, binding: _Binding) -> None:
        if self.at == len(self.steps):
            self.steps.append(self._computed(binding.given))
        out, weights, values, counts, totals = self.steps[self.at]
        self.at += 1
        if self.fault is not None:
            is_hit = ROWS[self.rows](counts, totals)
            right, out = out, np.where(is_hit[:, None, None, None], self.fault(out, weights, values), out)
            self.is_changed |= not np.array_equal(right, out)
        binding.found = self.narrow(out).reshape(len(out), -1)

    def _computed(self, given: Mapping[str, Any]) -> tuple[Any, ...]:
        """Of a step: output, weights, values by position, and of each token's row how many it has, and positions."""
        trial, node = self.trial, self.trial.node
        groups = int(attribute(node, "num_heads", 0)) // trial.heads
        q_NGD, k_NHD, v_NHD = (
            given[input_name(place)].reshape(len(given[input_name(0)]), -1, trial.head_size) for place in range(3)
        )
        counts, caches = np.diff(given[STARTS]), [given["past_key"], given["past_value"]]
        row_N = np.repeat(np.arange(len(counts)), counts)
        at_N = np.concatenate([past + np.arange(count) for past, count in zip(given[PASTS], counts, strict=True)])
        if attribute(node, "do_rotary", 0):
            q_NGD, k_NHD = (self._turned(part, given, at_N) for part in (q_NGD, k_NHD))
        block, cells = caches[0].shape[1], np.arange(LENGTH)
        for cache, new in zip(caches, (k_NHD, v_NHD), strict=True):
            cache[given[TABLE][row_N, at_N // block], at_N % block] = new
        k_BLHD, v_BLHD = (cache[given[TABLE][:, cells // block], cells % block].astype(np.float32) for cache in caches)
        q_NHGD = q_NGD.reshape(len(q_NGD), trial.heads, groups, -1)
        scores = np.concatenate(
            [np.einsum("nhgd,lhd->nhgl", q_NHGD[row_N == row], keys, optimize=True) for row, keys in enumerate(k_BLHD)]
        ) * score_scale(node, trial.head_size)
        if cap := float(attribute(node, "softcap", 0.0)):
            scores = cap * np.tanh(scores / cap)
        seen_NL = visible(LENGTH, int(attribute(node, "local_window_size", -1)))[at_N]
        scores = np.where(seen_NL[:, None, None], scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        parts = np.zeros_like(q_NHGD)
        for start in np.arange(0, LENGTH, self.tile)[self.order]:
            tile = slice(start, start + self.tile)
            parts += np.concatenate(
                [
                    np.einsum(
                        "nhgl,lhd->nhgd", self.narrow(weights[row_N == row][..., tile]), values[tile], optimize=True
                    )
                    for row, values in enumerate(v_BLHD)
                ]
            )
        total = weights.sum(axis=-1, keepdims=True)
        at = lambda position: v_BLHD[row_N, position][:, :, None]  # noqa: E731
        return parts / total, weights / total, at, counts[row_N], at_N + 1

    def _turned(self, part: Any, given: Mapping[str, Any], at_N: Any) -> Any:
        cos, sin = (given[input_name(place)][at_N][:, None] for place in (8, 9))
        half = cos.shape[-1]
        first, second, rest = part[..., :half], part[..., half : 2 * half], part[..., 2 * half :]
        return self.narrow(np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1))


@pytest.fixture(autouse=True)
def once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What numpy computes of a trial is the same for each of its faults."""
    for name in ("_texts", "attended"):
        found = getattr(attention_trial, name)
        known: dict[Any, Any] = {}

        def kept(first: Any, *given: Any, found: Any = found, known: dict[Any, Any] = known) -> Any:
            key = (id(first), *(id(one) for one in given))
            if key not in known:
                known[key] = (found(first, *given), first, given)
            return known[key][0]

        monkeypatch.setattr(attention_trial, name, kept)


def verdict(kernel: Planted, fault: Lost | None = None, rows: str = "all rows") -> str | None:
    kernel.fault, kernel.rows, kernel.at, kernel.is_changed = fault, rows, 0, False
    runner: Any = SimpleNamespace(open_graph=lambda graph: kernel, device=Device("cpu"))
    return attends_otherwise(runner, [kernel.trial], 1024)


def unfound(kernel: Planted, positions: Iterable[int]) -> tuple[list[str], int]:
    """Faults that pass though they change a number, and how many were planted that do."""
    passed, count = [], 0
    for at in positions:
        for name, fault in faults(at).items():
            for rows in ROWS:
                is_refused = verdict(kernel, fault, rows) is not None
                count += kernel.is_changed
                if kernel.is_changed and not is_refused:
                    passed.append(f"{at} {name} in {rows}")
    return passed, count


BOUNDARIES = (0, 255, 256, 511, 512, 638, 639)
"""First and last positions of a text and of its blocks, and where a decoding kernel splits keys."""

HEADS: dict[str, dict[str, Any]] = {
    "1 head": {"groups": 1},
    "1 head in fp32": {"groups": 1, "elem_type": FLOAT},
    "1 head in bf16": {"groups": 1, "elem_type": BFLOAT16, "size": 64},
    "2 heads, window and soft cap": {"local_window_size": 4096, "softcap": 20.0},
    "4 heads, rotated": {"groups": 4, "rotated": 16},
    "8 heads, rotated in part": {"groups": 8, "size": 32, "rotated": 16},
    "8 heads in fp32, a window of 128": {"groups": 8, "elem_type": FLOAT, "local_window_size": 128},
    "32 heads, own scale": {"heads": 2, "groups": 16, "scale": 1.0},
}


def _trial(how: Mapping[str, Any]) -> AttentionTrial:
    return trial_of(**{"heads": 1, "elem_type": FLOAT16, **how})


@pytest.mark.parametrize("how", [HEADS["1 head"], HEADS["4 heads, rotated"]], ids=["1 head", "4 heads"])
def test_a_fault_at_the_boundary_of_a_block_is_found(how: dict[str, Any]) -> None:
    """Whichever rows have it, and however few the heads; the kernel without it passes."""
    kernel = Planted(_trial(how))
    assert verdict(kernel) is None
    passed, count = unfound(kernel, BOUNDARIES[3:5])
    assert (passed, count) == ([], 2 * 4 * 4)


@pytest.mark.long
@pytest.mark.parametrize("how", HEADS.values(), ids=HEADS)
def test_faults_at_positions_of_all_blocks_are_found(how: dict[str, Any]) -> None:
    """Of all rows, of those that decode, behind 512 positions or not, and of prompts."""
    passed, count = unfound(Planted(_trial(how)), (*BOUNDARIES, *range(30, LENGTH, 97)))
    assert count > 100
    assert passed == []


@pytest.mark.long
@pytest.mark.parametrize("elem_type", [FLOAT, FLOAT16, BFLOAT16])
@pytest.mark.parametrize("heads", [1, 8])
def test_a_right_kernel_passes_in_any_order_of_sums(elem_type: int, heads: int) -> None:
    """Weights are rounded to the type before they meet values, in tiles of any size, from either end."""
    trial = trial_of(heads, 4, 64, elem_type, rotated=64)
    for tile, is_backwards in ((16, False), (64, True), (128, False), (LENGTH, False)):
        assert verdict(Planted(trial, tile, is_backwards=is_backwards)) is None
