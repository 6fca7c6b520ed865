"""What crosses to the host is a few numbers for each scored row: never a tensor along the text or the vocabulary.

Sizes that mean something are unmistakable: steps of 29, 23 and 19 tokens, slots of 192 positions, 1024 words. What is
small (rows, targets, and a row more as padding) is at most 8.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import onnxruntime as ort
import pytest

from docs.benchmarks.ort_profile import Node, Tensor, profiling, read_runs
from olive_ext.config import EngineConfig, ModelSettings
from olive_ext.engine.engine import open_engine
from olive_ext.engine.requests import Beams, Generation, Request, Sampling
from olive_ext.model import resolve
from tests.device.open import LIBRARY, STEP
from tests.device.watch import watching
from tests.exports import VOCAB, genai_export

pytestmark = pytest.mark.skipif(
    not hasattr(ort.InferenceSession, "get_provider_graph_assignment_info"),
    reason="ONNX Runtime 1.23 does not say which provider runs a node",
)

CAPACITY = 192
NUM_SLOTS = 5
STEPS = {STEP, 23, 19}
SMALL = 8

DEVICES = ["cpu", pytest.param("webgpu", marks=pytest.mark.webgpu)]
GRAPHS = ["scoring_head", "untouched"]


@dataclass(frozen=True)
class Seen:
    """What one run of an engine showed."""

    nodes: list[Node]
    host: list[Tensor]
    """Outputs that lie in the host's memory, and device values that were read there."""

    host_operators: list[tuple[str, list[str]]]
    """Of each session, its first output and its operators on the CPU."""

    outputs: set[str]
    """Names of the decoder's outputs, its KV left out."""

    host_bytes: int

    counters: dict[str, int]

    @property
    def crossed(self) -> set[Tensor]:
        """Every tensor that reached the host, by a node or as an output; empty ones hold nothing."""
        copied = [tensor for node in self.nodes if node.is_to_host for tensor in node.outputs]
        return {tensor for tensor in (*copied, *self.host) if 0 not in tensor.shape}


def is_large(tensor: Tensor) -> bool:
    """Whether an axis is as long as the text, a step, a slot or the vocabulary: anything above `SMALL`."""
    return any(size > SMALL for size in tensor.shape)


def _draw(seed: int, length: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(4, VOCAB) for _ in range(length))


SCORED = [Request(_draw(seed, length + 1), 7) for seed, length in ((1, 4 * STEP + 23), (2, STEP + 19), (3, STEP + 23))]
PROMPTS = [_draw(seed, length) for seed, length in ((4, 5 * STEP + 23), (5, STEP + 19), (6, 2 * STEP + 23))]
PROBES = 3 * 11 * 4
"""Bytes of a log-probability with each greedy token of three texts, which shows that the output is finite."""

GREEDY = [Request(prompt, 0, Generation(11)) for prompt in PROMPTS]
BEAMS = [Request(prompt, 0, Generation(7, beams=Beams(2))) for prompt in PROMPTS]
SAMPLED = [Request(prompt, 0, Generation(11, sampling=Sampling(1.0, seed=1))) for prompt in PROMPTS]


def observe(
    device: str, graph: str, requests: list[Request], folder: Path, overlaps_steps: bool | Literal["auto"] = "auto"
) -> Seen:
    """Runs the requests on a fresh engine."""
    config = EngineConfig(
        num_slots=NUM_SLOTS,
        chunk_size=STEP,
        graph=graph,
        scoring="rows",
        overlaps_steps=overlaps_steps,
        session_options={"session.record_ep_graph_assignment_info": "1"},
    )
    settings = ModelSettings(
        model=str(genai_export("llama")),
        execution_provider=device,
        provider_libraries=LIBRARY if device == "webgpu" else {},
        engine=config,
    )
    with watching() as watch:
        with profiling(folder / "profile"):
            engine = open_engine(resolve(settings))
        # Room for what comes, and rows in several slots: a copy out of a busy slot and back takes the same road.
        engine.run([Request(_draw(9, CAPACITY - 10), 1)])
        watch.tensors.clear()
        begun = [session for session, _ in watch.runs]  # trials while it opened, whose texts have rows of their own
        before = engine.describe()["counters"]
        engine.run(requests)
        facts = engine.describe()
        assert facts["capacity"] == CAPACITY
        decoder = engine.runner._feed.session  # type: ignore[attr-defined]
        nodes = _nodes(decoder, sum(session is decoder for session in begun))
        names = {output.name for output in decoder.get_outputs() if not output.name.startswith("present")}
        counted = {name: count - before[name] for name, count in facts["counters"].items()}
        seen = Seen(nodes, list(watch.tensors), watch.host_nodes, names, counted["host_bytes"], counted)
        engine.close()
    assert {shape[1] for shape in _inputs_of_embedding(nodes)} >= STEPS
    return seen


def _nodes(session: ort.InferenceSession, num_begun: int) -> list[Node]:
    """All that ran after the first runs; ends the profile."""
    return [node for run in read_runs(Path(session.end_profiling()))[num_begun:] for node in run]


def _inputs_of_embedding(nodes: list[Node]) -> Iterator[tuple[int, ...]]:
    """Shapes [rows, tokens] of the token ids that were looked up."""
    for node in nodes:
        if node.op == "Gather" and node.inputs[0].shape == (VOCAB, 64) and len(node.inputs[-1].shape) == 2:
            yield node.inputs[-1].shape


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("device", DEVICES)
def test_scoring_reads_4_bytes_a_target_and_8_a_row(device: str, graph: str, tmp_path: Path) -> None:
    shared = Request((*SCORED[0].tokens[:-1], 5), 1)  # another target behind a row that is scored anyway
    seen = observe(device, graph, [*SCORED, shared], tmp_path)
    assert seen.host_bytes == 4 * (3 * 7 + 1) + 8 * (3 * 7)


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("overlaps_steps", "read", "num_overlapped"),
    [(False, 8 * 3 * 11, 0), (True, 8 * (3 + 10 * 3), 6 + 2 + 3 - 1 + 10)],
    ids=["after each step", "ahead"],
)
def test_greedy_decoding_reads_8_bytes_a_token_and_a_probe(
    device: str, graph: str, overlaps_steps: bool, read: int, num_overlapped: int, tmp_path: Path
) -> None:
    """Three prompts of 6, 2 and 3 steps; ahead, 10 steps then decode all three."""
    seen = observe(device, graph, GREEDY, tmp_path, overlaps_steps=overlaps_steps)
    assert seen.host_bytes == read + PROBES
    assert seen.counters["steps_overlapped"] == num_overlapped


@pytest.mark.parametrize("device", DEVICES)
def test_sampling_reads_the_logits_of_the_rows_it_draws_from(device: str, tmp_path: Path) -> None:
    seen = observe(device, "scoring_head", SAMPLED, tmp_path)
    assert seen.host_bytes == 3 * 11 * (8 + 4 * VOCAB)
    if device != "cpu":
        assert {tensor.kind for tensor in seen.crossed if is_large(tensor)} == {"float"}
        assert all(tensor.shape[-1] == VOCAB and tensor.shape[0] <= 3 for tensor in seen.crossed if is_large(tensor))


@pytest.mark.webgpu
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("requests", [SCORED, GREEDY, BEAMS], ids=["scoring", "greedy", "beams"])
def test_nothing_along_the_text_or_the_vocabulary_leaves_the_device(
    requests: list[Request], graph: str, tmp_path: Path
) -> None:
    seen = observe("webgpu", graph, requests, tmp_path)
    print("\ncrosses:", sorted(f"{tensor.kind}{list(tensor.shape)}" for tensor in seen.crossed))
    assert not [tensor for tensor in seen.crossed if is_large(tensor)]
    allowed = {("float", 1), ("int64", 1), ("int64", 2)}  # target_logprobs[T], greedy_ids[R], ArgMax's [R, 1]
    allowed |= {("float", 2)} if requests is BEAMS else set()  # of candidates [N, C]
    assert {(tensor.kind, len(tensor.shape)) for tensor in seen.crossed} <= allowed
    for node in seen.nodes:  # what runs on the CPU beside the device are sums over the mask and row indices
        if node.provider == "CPUExecutionProvider":
            assert not any(is_large(tensor) for tensor in node.outputs), node
            assert {tensor.kind for tensor in (*node.inputs, *node.outputs)} <= {"int64", "int32"}, node


@pytest.mark.webgpu
def test_rows_of_kv_move_on_the_device_alone(tmp_path: Path) -> None:
    """The graph that takes a row out of the pool, puts it back and copies rows has one operator on the CPU: the Concat
    of a shape of four numbers, which Expand reads there."""
    stem = _draw(7, STEP + 19)
    requests = [Request((*stem, *tail), 0, Generation(9)) for tail in (_draw(8, STEP), _draw(9, 19), _draw(10, 23))]
    seen = observe("webgpu", "scoring_head", [*requests, *SCORED], tmp_path)
    assert [operators for output, operators in seen.host_operators if output == "y0"] == [["Concat"]]
    assert not [tensor for tensor in seen.crossed if is_large(tensor)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("requests", [SCORED, GREEDY], ids=["scoring", "greedy"])
def test_logits_exist_for_scored_rows_only(requests: list[Request], device: str, tmp_path: Path) -> None:
    """On the CPU nothing crosses: there it shows that what is read is all there is to read."""
    seen = observe(device, "scoring_head", requests, tmp_path)
    assert seen.outputs == {"target_logprobs", "greedy_ids", "sample_logits"}
    rows = {_rows(tensor) for node in seen.nodes for tensor in node.outputs if tensor.shape[-1:] == (VOCAB,)}
    assert rows
    assert max(rows) <= SMALL


def _rows(tensor: Tensor) -> int:
    return int(np.prod(tensor.shape[:-1]))


@pytest.mark.parametrize("device", DEVICES)
def test_the_checks_fire_on_a_graph_that_computes_all_logits(device: str, tmp_path: Path) -> None:
    seen = observe(device, "untouched", SCORED, tmp_path)
    assert seen.outputs == {"logits"}
    rows = {_rows(tensor) for node in seen.nodes for tensor in node.outputs if tensor.shape[-1:] == (VOCAB,)}
    assert rows >= STEPS
