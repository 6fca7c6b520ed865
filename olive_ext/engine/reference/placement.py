"""What stands beside a runner that is compared: where its rows of logits are compared, and how wide they are."""

from __future__ import annotations

from functools import partial

import numpy as np

from olive_ext.engine.engine import Engine
from olive_ext.engine.reference.kernels import Divergence, shape_of
from olive_ext.engine.requests import Source
from olive_ext.engine.runners.ort.kv.base import Device
from olive_ext.engine.runners.ort.ort_runner import OrtRunner
from olive_ext.engine.step import LogitsRow, Row, Runner, Step
from olive_ext.model import open_session, resolve_providers
from olive_ext.model.types import SourceKind


def divergence_of(runner: Runner) -> Divergence:
    """On the device where the runner leaves its rows; on the CPU for a runner that hands them to the host."""
    if isinstance(runner, OrtRunner):
        return Divergence(runner.open_graph, runner.device)
    providers = resolve_providers("cpu", None)
    return Divergence(partial(open_session, providers=providers, label="divergence"), Device("cpu"))


def vocab_size_of(engine: Engine) -> int:
    """Tokens that the model has logits for, found by a step of one token; behind an encoder of features, of which there
    are none to try, what the graph or its configuration says."""
    runner = engine.runner
    if isinstance(runner, OrtRunner) and runner.source_kind is SourceKind.FEATURES:
        return runner.vocab_size
    source = Source(np.zeros(1, np.int64)) if runner.source_kind is not None else None
    runner.reserve(1)
    output = runner.run(Step((Row(0, 0, (0,), source=source),), (LogitsRow(0, 0),)))
    engine.reset()
    return shape_of(output.logits_RV)[1]
