"""The trial of attention over a paged cache finds any one position that a kernel loses, doubles, exchanges with its
neighbour or mistakes for it, on a kernel in numpy that rounds as a flash kernel does.

Axes: B rows and N tokens of a step, L positions, H heads of keys, G heads of queries to each, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from olive_ext.engine.forms import attention_trial
from olive_ext.engine.forms.attention_trial import (
    LENGTH,
    AttentionTrial,
    attends_otherwise,
    input_name,
    score_scale,
    visible,
)
from olive_ext.engine.forms.paged_attention import PASTS, STARTS, TABLE
from olive_ext.graph.nodes import attribute
from olive_ext.model.providers.devices import Device
from tests.engine.test_attention_trial import FLOAT, FLOAT16, _Binding, trial_of

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

VARIANTS: dict[str, dict[str, Any]] = {
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


@pytest.mark.parametrize("how", [VARIANTS["1 head"], VARIANTS["4 heads, rotated"]], ids=["1 head", "4 heads"])
def test_a_fault_at_the_boundary_of_a_block_is_found(how: dict[str, Any]) -> None:
    """Whichever rows have it, and however few the heads; the kernel without it passes."""
    kernel = Planted(_trial(how))
    assert verdict(kernel) is None
    passed, count = unfound(kernel, BOUNDARIES[3:5])
    assert (passed, count) == ([], 2 * 4 * 4)


@pytest.mark.long
@pytest.mark.parametrize("how", VARIANTS.values(), ids=VARIANTS)
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
