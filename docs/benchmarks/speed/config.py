"""The settings of a comparison of speed: the work, the backends, and how they are measured."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, model_validator
from typing_extensions import Self

from olive_ext.cli.options import Option, add_options, written_values
from olive_ext.config.base import Auto, NonNegativeInt, PathText, PositiveInt, StrictModel, Word
from olive_ext.config.model import EngineConfig, ProviderOptions
from olive_ext.config.work import Limit

Peer = Literal["hf", "onnxruntime", "onnxruntime-genai", "olive-ort", "olive-ortgenai"]


class BenchConfig(StrictModel):
    """Settings of one comparison."""

    model: str
    """An .onnx file, or a folder with one or with genai_config.json."""

    hf: str | None = None
    """Hugging Face folder of the same model: what the peer hf runs, and where olive-ort reads a configuration."""

    tasks: Annotated[list[Word], Field(min_length=1)]
    """lm-eval tasks: registered names, or paths of task YAML files."""

    include_path: PathText | list[PathText] | None = None
    """Folders with your own task YAML files."""

    limit: Limit | None = None
    """Documents per task: a count, or a fraction below 1. None takes all."""

    num_fewshot: NonNegativeInt | None = None
    """Examples in the prompt. None takes each task's own number."""

    gen_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Generation settings laid over those of every generation task. Random weights never stop: give max_gen_toks."""

    seed: NonNegativeInt | None = None
    """Seed of few-shot sampling. None takes lm-eval's own."""

    peers: list[Peer] | None = None
    """Backends to compare with: lm-eval's hf, onnxruntime, onnxruntime-genai, Olive's ort and ortgenai. None takes all,
    and hf where `hf` is given."""

    once: list[Peer] = Field(default_factory=list)
    """Peers, slow ones, that are measured in the first round only."""

    batch_sizes: Annotated[list[PositiveInt], Field(min_length=1)] = Field(default_factory=lambda: [1, 4, 8, 16])
    """Batch sizes tried in the first round with peers that have them; later rounds take the fastest."""

    probe: PositiveInt | None = None
    """Documents, spread over all, on which batch sizes are tried before the first round instead, for slow peers."""

    rounds: PositiveInt = 3
    """How often all backends run by turns."""

    warmup: NonNegativeInt = 8
    """Requests of each kind that a process answers before the clock."""

    num_threads: PositiveInt | Auto = "auto"
    """Threads of every backend, and processors that its process may use. "auto" leaves each its own default."""

    timeout: PositiveInt | None = None
    """Seconds after which a process is stopped and counted as failed."""

    execution_provider: Word | None = None
    """Execution provider of all backends on ONNX Runtime. None takes genai_config.json's, then the CPU."""

    provider_options: ProviderOptions = Field(default_factory=dict)
    """Options of that provider."""

    device: Word = "cpu"
    """Torch device of the peer hf, and of the measured matrix products."""

    dtype: Word = "auto"
    """Torch data type of the peer hf; "auto" takes that of its weights."""

    max_length: PositiveInt | None = None
    """Longest context in tokens, of every backend. None takes the model's own."""

    add_bos_token: bool | None = None
    """Whether texts get a BOS token in front. None leaves it to the tokenizer. All backends are given the same tokens,
    also those that would leave BOS out by themselves (lm-eval's ONNX backends, olive-ort)."""

    reference: Peer | None = None
    """Backend whose answers are compared with. None takes the first that answered of onnxruntime, olive-ort,
    onnxruntime-genai, olive-ortgenai (the same ONNX file) and hf."""

    in_flight: list[PositiveInt] = Field(default_factory=list)
    """Numbers of requests: our backend alone also answers the work's generations with so many at a time, the next one
    when one has ended, and reports time to first token, time per output token, inter-token latency and requests a
    second: cold (the first requests of a process) and warmed. It has as many slots, unless you give
    `engine.num_slots`."""

    engine: EngineConfig = Field(default_factory=EngineConfig)
    """Settings of our backend."""

    output_dir: PathText
    """Folder for bench.json, bench.md, bench.png and the processes' logs."""

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.hf is None and self.peers is not None and "hf" in self.peers:
            raise ValueError("the peer 'hf' needs 'hf', the folder of the same model")
        return self

    @property
    def chosen_peers(self) -> tuple[Peer, ...]:
        """The peers to run, in the order given."""
        if self.peers is not None:
            return tuple(self.peers)
        return tuple(peer for peer in get_args(Peer) if peer != "hf" or self.hf is not None)


_option = partial(Option, owner=BenchConfig)
BENCH_OPTIONS: tuple[Option, ...] = (
    _option("--hf", "hf", "DIR"),
    _option("--tasks", "tasks", "A,B", "commas"),
    _option("--include-path", "include_path", "DIR", "names"),
    _option("--limit", "limit", "N"),
    _option("--num-fewshot", "num_fewshot", "K"),
    _option("--gen-kwargs", "gen_kwargs", "K=V,...", "arguments"),
    _option("--peers", "peers", "A,B", "commas"),
    _option("--once", "once", "A,B", "commas"),
    _option("--batch-sizes", "batch_sizes", "1,4,...", "commas"),
    _option("--probe", "probe", "N"),
    _option("--rounds", "rounds", "N"),
    _option("--warmup", "warmup", "N"),
    _option("--num-threads", "num_threads", "N"),
    _option("--timeout", "timeout", "SECONDS"),
    _option("--provider", "execution_provider", "NAME"),
    _option("--provider-option", "provider_options", "K=V", "pairs"),
    _option("--device", "device", "NAME"),
    _option("--dtype", "dtype", "NAME"),
    _option("--max-length", "max_length", "N"),
    _option("--reference", "reference", "PEER"),
    _option("--in-flight", "in_flight", "1,8,...", "commas"),
    _option("--seed", "seed", "N"),
    _option("--output", "output_dir", "DIR"),
)


def parsed(words: Sequence[str], parser: argparse.ArgumentParser | None = None) -> BenchConfig:
    """The settings that a command line gives. Raises `ConfigError`."""
    parser = parser or argparse.ArgumentParser()
    parser.add_argument("model", metavar="MODEL")
    add_options(parser, BENCH_OPTIONS)
    arguments = parser.parse_args(words)
    return BenchConfig.parse({"model": arguments.model, **written_values(arguments, options=BENCH_OPTIONS)})
