"""What a user may say about the engine: slots, chunks, threads and the form of the graph."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator
from typing_extensions import Self

from olive_ext.config.base import Auto, PositiveInt, Strict, word


class EngineConfig(Strict):
    """Settings of the in-package decoder runner. They change speed and memory, never the numbers."""

    runtime: Annotated[Literal["auto", "onnxruntime", "genai"], BeforeValidator(word)] = "auto"
    """Which library runs the model. "onnxruntime" opens its graph in a session, with the KV cache, the batches and the
    scoring on the device. "genai" drives onnxruntime-genai, one sequence at a time, for packages that nothing else can
    run. "auto" takes "genai" where genai_config.json splits the decoder into a pipeline or has inputs of a fixed
    length, and says so in the execution's `runtime_origin`."""

    num_slots: PositiveInt | Auto = "auto"
    """Sequences whose KV cache is resident at once, and so the most that are decoded together. "auto" takes
    `batch_size` where that is a number, else as many as fit in a quarter of the host's free memory, at most 16, or in
    half of a CUDA device's, at most 64; 8 where free memory is not known. Where an allocation fails after all, half as
    many are taken, with a warning."""

    chunk_size: PositiveInt | Auto = "auto"
    """Most tokens fed in one step; a longer prompt is fed in several. "auto" takes 256 for a prompt, and for texts that
    are scored what has been measured to cost least on the opened model."""

    scoring: Annotated[Literal["auto", "branches", "rows"], BeforeValidator(word)] = "auto"
    """How texts that are scored share a step. "branches" puts many of them behind their common prefix in one step;
    "rows" computes one after the other. "auto" takes what has been measured to be faster on the opened model, and
    "rows" where branches cannot be had (on any device but the CPU, in few `shapes`) and where activations are rounded
    to few bits (the numbers would differ by that rounding); the execution's `scoring` says which."""

    shapes: Annotated[Literal["auto", "any", "bucketed"], BeforeValidator(word)] = "auto"
    """Which shapes the steps have. "any" gives the model just the tokens that are to be computed. "bucketed" fills
    steps up to one of a few dozen shapes and runs each of these once when the KV slots are made, for providers that
    plan or compile for every new shape; texts are then scored one after the other. "auto" is "bucketed" on such
    providers, or with `strict_shapes`, and "any" elsewhere. Beside a reference, and for models whose KV cache is not
    written in place, it is "any"."""

    strict_shapes: bool = False
    """Makes a step an error whose shape was not run beforehand, instead of counting it as `shapes_late`."""

    graph_capture: bool = False
    """Has steps in which all slots decode captured once and replayed (CUDA graphs; WebGPU's graph capture, which needs
    a graph that was exported for it). Such steps then have few shapes, and a replay is compared with a plain step when
    the model is opened. Not yet run on CUDA."""

    decode_ahead: bool | Auto = "auto"
    """Whether the next step of a greedy generation begins before this one has been read: its tokens stay on the device,
    and stops are looked for meanwhile. A sequence that has ended costs one row more then. "auto" does so elsewhere than
    on the CPU, whose cores have enough to do; the execution's `decode_ahead` says what was chosen. Models that
    onnxruntime-genai or transformers run never do, nor do steps of few shapes (`shapes`, `graph_capture`)."""

    graph: Annotated[Literal["scoring_head", "untouched"], BeforeValidator(word)] = "scoring_head"
    """"scoring_head" opens the graph with the scored rows gathered behind the last attention, or else before the LM
    head, and the log-probabilities computed on the device. "untouched" opens the file as it is and computes them in a
    second graph on the device; only KV caches that drop old positions (sliding_window_cache) are given their full
    length in both."""

    adapters: list[str] = Field(default_factory=list)
    """LoRA adapters (.onnx_adapter files) for a graph that takes their weights as inputs, all of them active on every
    run. The one setting here that changes the numbers."""

    num_threads: PositiveInt | Auto = "auto"
    """Threads inside one operator (ONNX Runtime's intra_op_num_threads). "auto" leaves ONNX Runtime its default."""

    session_options: dict[str, str] = Field(default_factory=dict)
    """ONNX Runtime session configuration entries, name to value, for instance
    {"session.intra_op.allow_spinning": "0"}."""

    @model_validator(mode="after")
    def _check_steps(self) -> Self:
        """Settings that need few shapes, against those that need any."""
        asked = [f"'{name}' = true" for name in ("strict_shapes", "graph_capture") if getattr(self, name)]
        asked += ["'shapes' = \"bucketed\""] if self.shapes == "bucketed" else []
        if asked and self.scoring == "branches":
            raise ValueError(f"{asked[0]} excludes 'scoring' = \"branches\", whose steps have any shape")
        if asked and self.decode_ahead is True:
            raise ValueError(f"{asked[0]} excludes 'decode_ahead' = true: such steps take their tokens from the host")
        if self.strict_shapes and self.shapes == "any":
            raise ValueError("'strict_shapes' = true excludes 'shapes' = \"any\"")
        if self.graph_capture and self.graph == "untouched":
            raise ValueError("'graph_capture' = true excludes 'graph' = \"untouched\"")
        return self
