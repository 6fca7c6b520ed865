"""The trial of attention over a paged cache: numpy's numbers are those of ONNX Runtime's GroupQueryAttention, and the
trial finds any one position that a kernel loses, doubles, exchanges with its neighbour or mistakes for it, on a kernel
in numpy that rounds as a flash kernel does.

Axes: B rows and N tokens of a step, L positions, H heads of keys, G heads of queries to each, D head size.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
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
    COUNTED,
    K_NORM,
    LENGTH,
    OUTPUT,
    Q_NORM,
    SHARP,
    SINK,
    TOLERANCE,
    AttentionTrial,
    attended,
    attends_otherwise,
    attention_trials,
    input_name,
    rotated,
    score_scale,
    visible,
)
from olive_ext.engine.forms.paged_attention import (
    KERNELS,
    PASTS,
    STARTS,
    TABLE,
    PagedKernel,
    gathered_bytes,
    with_paged_attention,
)
from olive_ext.graph.nodes import attribute, model_of
from olive_ext.model.providers.devices import Device
from olive_ext.model.types import KvTensor
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
    caches = {name: KvTensor(name, "", elem_type, heads, size) for name in ("past_k", "past_v")}
    (trial,) = attention_trials(with_paged_attention(model, caches, (), LENGTHS, kernel), caches)
    return trial


GROUPED = {8: 7, 9: 8, 11: 11, 12: 14, 13: 15, 14: 12, 15: 13}
"""Place of PagedAttention's input -> of GroupQueryAttention's that means the same."""


def grouped(trial: AttentionTrial) -> ort.InferenceSession:
    """ONNX Runtime's GroupQueryAttention on the inputs of a trial, without a past."""
    paged, node = trial.node, onnx.NodeProto()
    named = {place: name for place, name in enumerate(paged.input) if place < 5} | dict(enumerate(LENGTHS, 5))
    named |= {GROUPED[place]: name for place, name in enumerate(paged.input) if place in GROUPED}
    node.CopyFrom(paged)
    node.op_type = "GroupQueryAttention"
    node.input[:] = [named.get(place, "") for place in range(max(named) + 1)]
    value, size = helper.make_tensor_value_info, [1, trial.cache.heads, None, trial.cache.head_size]
    shapes = {input_name(place): (1, *shape) if place < 3 else shape for place, (shape, _) in trial.inputs.items()}
    inputs = [value(name, FLOAT, [one or None for one in shape]) for name, shape in shapes.items()]
    inputs += [value(name, trial.cache.elem_type, size) for name in ("past_key", "past_value")]
    inputs += [value(LENGTHS[0], INT32, [1]), value(LENGTHS[1], INT32, [])]
    casts = [
        helper.make_node("Cast", [name], [f"{name}_narrow"], to=trial.inputs[place][1])
        for place, name in zip(trial.inputs, shapes, strict=True)
    ]
    last = helper.make_node("Cast", ["narrow"], [OUTPUT], to=FLOAT)
    graph = helper.make_graph([*casts, node, last], "gqa", inputs, [value(OUTPUT, FLOAT, None)])
    return ort.InferenceSession(model_of(graph, 21, "com.microsoft").SerializeToString())


def attended_by(session: ort.InferenceSession, trial: AttentionTrial, text: Mapping[int, Any]) -> Any:
    """What it returns [S, W] for a text, whose tokens are [S, width]."""
    dtype, length = helper.tensor_dtype_to_np_dtype(trial.cache.elem_type), len(text[0])
    feeds = {input_name(place): value[None] if place < 3 else value for place, value in text.items()}
    past = np.zeros((1, trial.cache.heads, 0, trial.cache.head_size), dtype)
    feeds |= dict.fromkeys(("past_key", "past_value"), past)
    feeds |= {LENGTHS[0]: np.array([length - 1], np.int32), LENGTHS[1]: np.array(length, np.int32)}
    return session.run([OUTPUT], feeds)[0][0]


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
def test_numpy_s_attention_is_onnxruntime_s_and_a_right_kernel_passes_in_six_runs(how: dict[str, Any]) -> None:
    """Whatever the attention has."""
    trial = trial_of(**how)
    session, seen_S = grouped(trial), visible(LENGTH, int(attribute(trial.node, "local_window_size", -1))).sum(axis=1)
    for number, text in enumerate(attention_trial._texts(trial)):
        weights_S = np.maximum(1, seen_S / COUNTED)[: len(text[0])] if number != SHARP else 1
        found = attended_by(session, trial, text)
        expected = attended(trial.node, text, trial.cache)
        assert (np.abs(found - expected).max(axis=1) * weights_S).max() <= TOLERANCE
    assert tried(trial) == (None, 6)


@pytest.mark.long
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


@pytest.mark.parametrize(
    "fault", [*FAULTS[::2], *(pytest.param(fault, marks=pytest.mark.long) for fault in FAULTS[1::2])]
)
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
    expected = attended_by(grouped(plain), plain, before)
    found = attended(normed.node, {**values, **weights}, normed.cache)
    assert np.abs(found - expected).max() < 1e-5


def test_keys_that_a_kernel_gathers_are_counted() -> None:
    """64 rows, one of 16,384 positions, 8 heads of 512 in 16 bits: 8.6 GB of keys and as many of values."""
    caches = {name: KvTensor(name, "", FLOAT16, 1, 512) for name in ("past_key", "past_value")}
    graph = onnx.load_model_from_string(trial_of(heads=1, groups=8, size=512, elem_type=FLOAT16).graph)
    assert 64 * 16_384 * gathered_bytes(graph, caches, KERNELS["cuda"]) == 2 * 8_589_934_592
    small = onnx.load_model_from_string(trial_of(size=256, elem_type=FLOAT16).graph)
    smaller = {name: replace(cache, head_size=256) for name, cache in caches.items()}
    assert gathered_bytes(small, smaller, KERNELS["cuda"]) == 0


@pytest.mark.long
def test_a_paged_export_is_tried_by_its_own_node() -> None:
    """One kind in two layers; with its attributes, packed queries, tables and bounds, and blocks of its caches."""
    proto = onnx.load(export("llama-genai-0.18-paged-cuda").path / "model.onnx", load_external_data=False)
    names = (f"past_key_values.{i}.{part}" for i in range(2) for part in ("key", "value"))
    caches = {name: KvTensor(name, "", FLOAT16, 2, 16) for name in names}
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


class Kernel:
    """PagedAttention in numpy over the trial's own tables and caches, in tiles of `tile` positions, with each product
    and weight rounded to the cache's type, and with one of `FAULTS`. What it finds is computed once; `lost` changes
    that."""

    io_binding = staticmethod(_Binding)

    def __init__(self, trial: AttentionTrial, tile: int = 64, *, is_backwards: bool = False, fault: str = "") -> None:
        self.trial = trial
        self.order = slice(None, None, -1 if is_backwards else 1)
        self.tile = tile
        self.fault = fault
        self.paged = onnx.load_model_from_string(trial.graph)
        dtype = helper.tensor_dtype_to_np_dtype(trial.cache.elem_type)
        self.narrow = lambda array: np.asarray(array, np.float32).astype(dtype).astype(np.float32)
        self.steps: list[tuple[Any, ...]] = []
        self.at = 0
        self.lost: Lost | None = None
        self.rows = "all rows"
        self.is_changed = False

    def get_inputs(self) -> Any:
        return self.paged.graph.input

    def run_with_iobinding(self, binding: _Binding) -> None:
        if self.at == len(self.steps):
            self.steps.append(self._computed(binding.given))
        out, weights, values, counts, totals = self.steps[self.at]
        self.at += 1
        if self.lost is not None:
            is_hit = ROWS[self.rows](counts, totals)
            right, out = out, np.where(is_hit[:, None, None, None], self.lost(out, weights, values), out)
            self.is_changed |= not np.array_equal(right, out)
        binding.found = self.narrow(out).reshape(len(out), -1)

    def _computed(self, given: Mapping[str, Any]) -> tuple[Any, ...]:
        """Of a step: output, weights, values by position, and of each token's row how many it has, and positions."""
        trial, node, fault = self.trial, self.trial.node, self.fault
        counts, caches = np.diff(given[STARTS]), [given["past_key"], given["past_value"]]
        row_N = np.repeat(np.arange(len(counts)), counts)
        at_N = np.concatenate([past + np.arange(count) for past, count in zip(given[PASTS], counts, strict=True)])
        q_NHGD, k_NHD, v_NHD = self._tokens(given, at_N)
        table = given[TABLE][:1].repeat(len(counts), 0) if fault == "every row has the first table" else given[TABLE]
        table = np.sort(table) if fault == "order of blocks ignored" else table
        block, cells = caches[0].shape[1], np.arange(LENGTH)
        place, before = (table[row_N, at_N // block], at_N % block), [cache.copy() for cache in caches]
        for cache, new in zip(caches, (k_NHD, v_NHD), strict=True):
            cache[place] = new
        read = table[:, [0, 0, 2]] if fault == "second block ignored" else table
        k_BLHD, v_BLHD = (cache[read[:, cells // block], cells % block].astype(np.float32) for cache in caches)
        for row in np.flatnonzero(counts == 1):
            if fault == "split past 512 dropped":
                k_BLHD[row, 512 : given[PASTS][row]] = v_BLHD[row, 512 : given[PASTS][row]] = 0
        if fault == "token of an answer not written":
            for cache, old in zip(caches, before, strict=True):
                is_single_N = counts[row_N] == 1
                single = tuple(axis[is_single_N] for axis in place)
                cache[single] = old[single]
        scores = np.concatenate(
            [np.einsum("nhgd,lhd->nhgl", q_NHGD[row_N == row], keys, optimize=True) for row, keys in enumerate(k_BLHD)]
        ) * score_scale(node, trial.cache.head_size)
        if cap := float(attribute(node, "softcap", 0.0)):
            scores = cap * np.tanh(scores / cap)
        window = int(attribute(node, "local_window_size", -1)) + (fault == "window off by one")
        scores = np.where(visible(LENGTH, window)[at_N][:, None, None], scores, -np.inf)
        top = scores.max(axis=-1, keepdims=True)
        weights = np.exp(scores - top)
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
        if (sink := given.get(input_name(SINK))) is not None:
            total = total + np.exp(sink.reshape(*q_NHGD.shape[1:3], 1) - top)
        out = parts / total * (fault != "nothing is computed")
        if fault == "rows from 64 on wrong":
            out[row_N >= 64] = out[row_N >= 64][..., ::-1]
        if fault == "no number":
            out[-1] = np.nan
        at = lambda position: v_BLHD[row_N, position][:, :, None]  # noqa: E731
        return out, weights / total, at, counts[row_N], at_N + 1

    def _tokens(self, given: Mapping[str, Any], at_N: Any) -> tuple[Any, Any, Any]:
        """Queries, keys and values of the tokens, rotated."""
        trial, node = self.trial, self.trial.node
        heads, size = trial.cache.heads, trial.cache.head_size
        num_queries = int(attribute(node, "num_heads", 0))
        parts = [given[input_name(place)] for place in range(3) if place in trial.inputs]
        flat = np.concatenate(parts, axis=1).reshape(len(at_N), -1, size)
        q_NQD, k_NHD, v_NHD = np.split(flat, [num_queries, num_queries + heads], axis=1)
        if attribute(node, "do_rotary", 0):
            turn = *(given[input_name(place)][at_N] for place in (8, 9)), bool(attribute(node, "rotary_interleaved", 0))
            q_NQD, k_NHD = (self.narrow(rotated(part.swapaxes(0, 1), *turn).swapaxes(0, 1)) for part in (q_NQD, k_NHD))
        return q_NQD.reshape(len(at_N), heads, -1, size), k_NHD, v_NHD


def tried(trial: AttentionTrial, fault: str = "", most: int = 1024) -> tuple[str | None, int]:
    """What the trial says of the kernel, and its runs."""
    kernel = Kernel(trial, fault=fault)
    runner: Any = SimpleNamespace(open_graph=lambda graph: kernel, device=Device("cpu"))
    return attends_otherwise(runner, [trial], most), kernel.at


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


def verdict(kernel: Kernel, fault: Lost | None = None, rows: str = "all rows") -> str | None:
    kernel.lost, kernel.rows, kernel.at, kernel.is_changed = fault, rows, 0, False
    runner: Any = SimpleNamespace(open_graph=lambda graph: kernel, device=Device("cpu"))
    return attends_otherwise(runner, [kernel.trial], 1024)


def unfound(kernel: Kernel, positions: Iterable[int]) -> tuple[list[str], int]:
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


@pytest.mark.parametrize(
    "how", [HEADS["1 head"], pytest.param(HEADS["4 heads, rotated"], marks=pytest.mark.long)], ids=["1 head", "4 heads"]
)
def test_a_fault_at_the_boundary_of_a_block_is_found(how: dict[str, Any]) -> None:
    """Whichever rows have it, and however few the heads; the kernel without it passes."""
    kernel = Kernel(_trial(how))
    assert verdict(kernel) is None
    passed, count = unfound(kernel, BOUNDARIES[3:5])
    assert (passed, count) == ([], 2 * 4 * 4)


@pytest.mark.long
@pytest.mark.parametrize("how", HEADS.values(), ids=HEADS)
def test_faults_at_positions_of_all_blocks_are_found(how: dict[str, Any]) -> None:
    """Of all rows, of those that decode, behind 512 positions or not, and of prompts."""
    passed, count = unfound(Kernel(_trial(how)), (*BOUNDARIES, *range(30, LENGTH, 97)))
    assert count > 100
    assert passed == []


TILES = ((16, False), (64, True), (128, False), (LENGTH, False))
ORDERS = [
    *((1, one, TILES) for one in (FLOAT, FLOAT16, BFLOAT16)),
    *((8, one, TILES[1::2]) for one in (FLOAT16, BFLOAT16)),
]


@pytest.mark.long
@pytest.mark.parametrize(("heads", "elem_type", "tiles"), ORDERS)
def test_a_right_kernel_passes_in_any_order_of_sums(
    heads: int, elem_type: int, tiles: tuple[tuple[int, bool], ...]
) -> None:
    """Weights are rounded to the type before they meet values, in tiles of any size, from either end."""
    trial = trial_of(heads, 4, 64, elem_type, rotated=64)
    for tile, is_backwards in tiles:
        assert verdict(Kernel(trial, tile, is_backwards=is_backwards)) is None
