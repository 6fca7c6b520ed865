"""How much an index of a Scatter or Gather moves, as ONNX Runtime's profile of a session says."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import onnxruntime as ort

ITEM_BYTES = {"float": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1}


def profiled(graph: bytes, folder: Path, provider: str = "CPUExecutionProvider") -> ort.InferenceSession:
    """A session whose runs are written down, of nodes as they are in the graph."""
    options = ort.SessionOptions()
    options.enable_profiling = True
    options.profile_file_prefix = str(folder / "profile")
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(graph, options, providers=[provider])


def index_bytes(session: ort.InferenceSession) -> dict[str, float]:
    """The most bytes that one index of each operator stood for in the runs of a `profiled` session, which ends here."""
    found: dict[str, float] = {}
    for event in json.loads(Path(session.end_profiling()).read_text()):
        facts = event.get("args", {})
        operator = facts.get("op_name", "")
        if operator.startswith(("Gather", "Scatter")) and "input_type_shape" in facts:
            shapes = [next(iter(entry.items())) for entry in facts["input_type_shape"]]
            (kind, _), (_, index) = shapes[:2]
            (_, output) = next(iter(facts["output_type_shape"][0].items()))
            moved = prod(shapes[2][1] if operator.startswith("Scatter") else output)
            numbers = index[-1] if operator.endswith("ND") else 1  # that make one index
            each = moved * numbers / prod(index) * ITEM_BYTES[kind]
            found[operator] = max(each, found.get(operator, 0))
    return found
