"""The files of a bug report: the graph of the nodes that differ with its weights, their inputs, and a script that shows
it in plain ONNX Runtime. Knows no search.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx.external_data_helper import load_external_data_for_model

from olive_ext.model.providers.resolution import plugin_devices
from olive_ext.places.place import Place

_NAMES = ("model", "reference")
"""Of the candidate's files and the other's."""

INLINE_BYTES = 1 << 30
"""Weights beyond this size lie beside their graph: a protobuf holds 2 GB."""

_SCRIPT = """# {what}
# Two results on the same inputs; exits with 1 where they are further apart than rounding brings them.
import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort

HERE = Path(__file__).resolve().parent
{libraries}{first}
{second}
is_equal = (one == other) | (np.isnan(one) & np.isnan(other))
error = np.nan_to_num(np.abs(one[~is_equal] - other[~is_equal]), nan=np.inf).max(initial=0)
print(f"ONNX Runtime {{ort.__version__}}: {{error:.3g}} apart, {tolerance:.3g} is rounding")
sys.exit(bool(error > {tolerance!r}))
"""


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
        for name, place in zip(_NAMES, places, strict=True):
            _write_part(work, name, place, given, value)
        graphs = _shared(work, ".onnx", lambda path: path.read_bytes())
        inputs = _shared(work, ".npz", lambda path: {name: (one.dtype, one.tobytes()) for name, one in _arrays(path)})
        results = [
            _result(*names, place)
            for names, place in zip(zip(("one", "other"), graphs, inputs, strict=True), places, strict=True)
        ]
        script = _SCRIPT.format(
            what=what.replace("\n", " "),
            libraries=_libraries(places),
            tolerance=tolerance,
            first=results[0],
            second=results[1],
        )
        (work / "repro.py").write_text(script, encoding="utf-8")
        work.chmod(0o755)
        if folder.exists():
            folder.rmdir()
        work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _write_part(folder: Path, name: str, place: Place, given: Mapping[str, npt.NDArray[Any]], value: str) -> None:
    part, arrays = place.part(given, [value])
    model = place.graph.model_of(part)
    load_external_data_for_model(model, str(place.folder))
    size = sum(len(tensor.raw_data) for tensor in model.graph.initializer)
    onnx.save_model(
        model, folder / f"{name}.onnx", save_as_external_data=size > INLINE_BYTES, location=f"{name}.onnx.data"
    )
    taken = {one.name: place.inputs[one.name].numpy() for one in model.graph.input if one.name in place.inputs}
    np.savez(folder / f"{name}.npz", **(taken | arrays))


def _shared(folder: Path, suffix: str, content: Callable[[Path], Any]) -> list[str]:
    """The names of both places' files, of which one goes where they hold the same."""
    first, second = (folder / f"{name}{suffix}" for name in _NAMES)
    if content(first) != content(second):
        return [first.name, second.name]
    for file in folder.glob(f"{second.name}*"):
        file.unlink()
    return [first.name, first.name]


def _arrays(path: Path) -> list[tuple[str, npt.NDArray[Any]]]:
    with np.load(path) as file:
        return sorted(file.items())


def _result(name: str, graph: str, inputs: str, place: Place) -> str:
    """The lines that compute it."""
    engine, provider = place.model.settings.engine, place.model.providers[0]
    lines = ["options = ort.SessionOptions()"]
    lines += [f"options.add_session_config_entry({key!r}, {entry!r})" for key, entry in engine.session_options.items()]
    if engine.threads is not None:
        lines.append(f"options.intra_op_num_threads = {engine.threads}")
    how = f", providers=[({provider.name!r}, {dict(provider.options)!r})]"
    if provider.name in plugin_devices():
        devices = f"[device for device in ort.get_ep_devices() if device.ep_name == {provider.name!r}][:1]"
        lines.append(f"options.add_provider_for_devices({devices}, {dict(provider.options)!r})")
        how = ""
    lines.append(f"session = ort.InferenceSession(HERE / {graph!r}, options{how})")
    lines.append(f"{name} = session.run(None, dict(np.load(HERE / {inputs!r})))[0].astype(float)")
    return "\n".join(lines)


def _libraries(places: Sequence[Place]) -> str:
    """The lines that register plugin providers."""
    found = {name: written for place in places for name, written in place.model.settings.provider_libraries.items()}
    paths = {
        name: repr(written) if Path(written).exists() else f"__import__({written!r}).get_library_path()"
        for name, written in found.items()
    }
    return "".join(f"ort.register_execution_provider_library({name!r}, {path})\n" for name, path in paths.items())
