"""The files of a bug report: the graph of the nodes that differ with its weights, their inputs, and a script that shows
it in plain ONNX Runtime. Knows no search.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx.external_data_helper import load_external_data_for_model

from olive_ext.places.place import Place

INLINE_BYTES = 1 << 30
"""Weights beyond this size lie beside their graph: a protobuf holds 2 GB."""

_SCRIPT = '''"""{what}

Two results of one graph on the same inputs. Exits with 1 where they are further apart than rounding makes them.
"""
import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort
{libraries}
HERE, TOLERANCE = Path(__file__).resolve().parent, {tolerance!r}

def run(graph, inputs, provider, options, entries):
    settings = ort.SessionOptions()
    for entry in entries.items():
        settings.add_session_config_entry(*entry)
    devices = [device for device in ort.get_ep_devices() if device.ep_name == provider]
    if devices and devices[0].ep_metadata.get("library_path"):
        settings.add_provider_for_devices(devices[:1], options)
        session = ort.InferenceSession(HERE / graph, settings)
    else:
        session = ort.InferenceSession(HERE / graph, settings, providers=[(provider, options)])
    return session.run(None, dict(np.load(HERE / inputs)))[0].astype(np.float64)

one, other = (
    run(*{first!r}),
    run(*{second!r}),
)
with np.errstate(invalid="ignore"):
    apart = np.abs(one - other)[~((one == other) | (np.isnan(one) & np.isnan(other)))]
error = np.nan_to_num(apart, nan=np.inf).max(initial=0)
print(f"ONNX Runtime {{ort.__version__}}: {{error:.3g}} apart, {{TOLERANCE:.3g}} is rounding")
sys.exit(bool(error > TOLERANCE))
'''


def write_repro(
    folder: Path,
    places: Sequence[Place],
    given: Mapping[str, npt.NDArray[Any]],
    value: str,
    tolerance: float,
    what: str,
) -> None:
    """Fills `folder`, all or nothing: the part of the graph behind `given` values that makes `value`, in both places.
    Raises `OSError`."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        runs = [
            (*_write_part(work, name, place, given, value), *_how(place))
            for name, place in zip(("model", "reference"), places, strict=True)
        ]
        if runs[0][0] != runs[1][0] and _same(work / "model.onnx", work / "reference.onnx"):
            _drop(work, "reference.onnx")
            runs[1] = (runs[0][0], *runs[1][1:])
        if _same_arrays(work / "inputs.npz", work / "reference.npz"):
            _drop(work, "reference.npz")
            runs[1] = (runs[1][0], runs[0][1], *runs[1][2:])
        script = _SCRIPT.format(
            what=what.replace("\\", "/").replace('"""', "'''"),
            libraries=_libraries(places),
            tolerance=tolerance,
            first=runs[0],
            second=runs[1],
        )
        (work / "repro.py").write_text(script, encoding="utf-8")
        work.chmod(0o755)
        if folder.exists():
            folder.rmdir()
        work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _write_part(
    folder: Path, name: str, place: Place, given: Mapping[str, npt.NDArray[Any]], value: str
) -> tuple[str, str]:
    part, arrays = place.part(given, [value])
    model = place.graph.model_of(part)
    load_external_data_for_model(model, str(place.folder))
    graph, inputs = f"{name}.onnx", "inputs.npz" if name == "model" else f"{name}.npz"
    size = sum(len(tensor.raw_data) for tensor in model.graph.initializer)
    data = f"{graph}.data" if size > INLINE_BYTES else None
    onnx.save_model(model, str(folder / graph), save_as_external_data=data is not None, location=data)
    taken = {one.name: place.inputs[one.name].numpy() for one in model.graph.input if one.name in place.inputs}
    np.savez(folder / inputs, **(taken | arrays))
    return graph, inputs


def _how(place: Place) -> tuple[str, dict[str, str], dict[str, str]]:
    engine, provider = place.model.settings.engine, place.model.providers[0]
    threads = {} if engine.threads is None else {"session.intra_op_num_threads": str(engine.threads)}
    return provider.name, dict(provider.options), {**engine.session_options, **threads}


def _libraries(places: Sequence[Place]) -> str:
    found = {name: written for place in places for name, written in place.model.settings.provider_libraries.items()}
    lines = []
    for name, written in found.items():
        path = f"{written!r}" if Path(written).suffix else f"__import__({written!r}).get_library_path()"
        lines.append(f"ort.register_execution_provider_library({name!r}, {path})\n")
    return "".join(lines)


def _same(one: Path, other: Path) -> bool:
    return one.read_bytes() == other.read_bytes()


def _same_arrays(one: Path, other: Path) -> bool:
    first, second = np.load(one), np.load(other)
    return sorted(first) == sorted(second) and all(
        first[name].dtype == second[name].dtype and first[name].tobytes() == second[name].tobytes() for name in first
    )


def _drop(folder: Path, name: str) -> None:
    for file in folder.glob(f"{name}*"):
        file.unlink()
