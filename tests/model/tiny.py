"""Graphs of a few bytes, with and without external data, and folders around them."""

from __future__ import annotations

import inspect
import json
import shutil
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from onnx import ModelProto, TensorProto, helper

SIZE = 64
DIGEST = "ab" * 32


def graph(output: str = "logits", locations: Sequence[str] = ()) -> ModelProto:
    """`output` = `x` plus one weight (0, 1, 2, ...) for each external-data location."""
    weights, nodes, last = [], [], "x"
    for index, location in enumerate(locations):
        weight = TensorProto(name=f"w{index}", data_type=TensorProto.FLOAT, dims=[SIZE])
        weight.data_location = TensorProto.EXTERNAL
        for key, value in (("location", location), ("offset", "0"), ("length", str(SIZE * 4))):
            weight.external_data.add(key=key, value=value)
        weights.append(weight)
        nodes.append(helper.make_node("Add", [last, f"w{index}"], [f"y{index}"]))
        last = f"y{index}"
    nodes.append(helper.make_node("Identity", [last], [output]))
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [SIZE]) for name in ("x", output))
    return helper.make_model(
        helper.make_graph(nodes, "tiny", [x], [y], weights), opset_imports=[helper.make_opsetid("", 17)], ir_version=10
    )


def put_graph(path: Path, output: str = "logits", locations: Sequence[str] = ()) -> Path:
    """Writes such a graph, and its external data beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(graph(output, locations).SerializeToString())
    for location in locations:
        put_weight(path.parent / location)
    return path


def put_weight(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.arange(SIZE, dtype=np.float32).tofile(path)
    return path


def put_json(path: Path, value: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


def put_tokenizer(folder: Path) -> Path:
    put_json(folder / "tokenizer.json", {})
    return folder


def put_genai(folder: Path, filename: str = "model.onnx", **model: object) -> Path:
    return put_json(folder / "genai_config.json", {"model": {"decoder": {"filename": filename}, **model}})


def in_hf_cache(cache: Path, files: dict[str, bytes]) -> Path:
    """A snapshot folder as huggingface_hub lays it out: each file a relative link into blobs/."""
    snapshot = cache / "snapshots" / "rev"
    for index, (name, content) in enumerate(files.items()):
        blob = cache / "blobs" / f"blob{index}"
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        link = snapshot / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(Path(*[".."] * (2 + name.count("/")), "blobs", blob.name))
    return snapshot


def olive_packed(root: Path, *sources: Path) -> Path:
    """Genai packages as variants of a model package by `olive generate-model-package` of the installed Olive."""
    from olive.cli.model_package import ModelPackageCommand

    command = object.__new__(ModelPackageCommand)
    written = [str(source) for source in sources]
    command.args = Namespace(source=written, output_path=str(root / "m"), model_name="m", model_version="1.0")
    inspect.unwrap(ModelPackageCommand.run)(command)
    return root / "m.ortpackage"


def packed(root: Path, **sources: Path) -> Path:
    """Genai packages as variants of one model package for the CPU; their tokenizer is an asset that they share."""
    assets = root / "shared_assets" / f"sha256-{DIGEST}"
    assets.mkdir(parents=True)
    for name, source in sources.items():
        folder = shutil.copytree(source, root / name)
        for file in [*folder.glob("tokenizer*"), *folder.glob("chat_template*")]:
            file.replace(assets / file.name)
        config = json.loads((folder / "genai_config.json").read_text(encoding="utf-8"))
        config["model"]["tokenizer_dir"] = f"sha256:{DIGEST}"
        put_json(folder / "genai_config.json", config)
    variants = {name: {"ep": "CPUExecutionProvider"} for name in sources}
    put_json(root / "manifest.json", {"schema_version": "1.0", "components": {"model": {"variants": variants}}})
    return root
