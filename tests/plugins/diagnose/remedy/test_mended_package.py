"""Mended packages on disk: their files, the numbers they give on each runtime, the memory that writing them takes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
import pytest

import olive_ext
from olive_ext.config import ModelSettings
from olive_ext.errors import ConfigError, RunError
from olive_ext.model import resolve
from olive_ext.model.files.content import load_graph, size_on_disk
from olive_ext.model.files.locate import locate
from olive_ext.plugins.diagnose.remedy.mended_package import (
    INLINE_BYTES,
    SMALL,
    Package,
    copy_of,
    mended,
    refuse_inside,
)
from olive_ext.plugins.diagnose.remedy.pairing import Sources, Target, pair
from olive_ext.plugins.diagnose.remedy.weights import FLOAT, GraphWeights, Precision
from olive_ext.session.requests import ScoringRequest
from tests.exports import quickstart
from tests.exports.cache import ROOT
from tests.exports.catalog import Export
from tests.exports.plain import plain_logits
from tests.refusals import refused

TOKENS = [3, 200, 17, 511, 90, 44, 7, 1000, 250]


class Models(NamedTuple):
    float: Path
    quantized: Path
    targets: tuple[Target, ...]


def models(quantized: Path | None = None) -> Models:
    own, other = quickstart.exported(), quantized or quickstart.quantized(4, 128)
    weights = [GraphWeights(load_graph(folder / "model.onnx"), folder / "model.onnx") for folder in (own, other)]
    return Models(own, other, tuple(pair(*weights).targets))


def package(choices: Mapping[Target, Precision], of: Models) -> Package:
    sources = {"": Sources.of(of.float / "model.onnx", of.quantized / "model.onnx")}
    return mended(resolve(ModelSettings.of({"model": str(of.quantized)})), sources, choices)


def logits(folder: Path) -> np.ndarray:
    export = Export("mended", folder, quickstart.MODEL, "llama", "genai", "int4", "", "", "", one_token=False)
    return plain_logits(export, TOKENS)


def assert_scored_alike(folder: Path, tokens: list[int], logits_SV: np.ndarray) -> None:
    """The engine and onnxruntime-genai score the tokens from the fifth on as these logits do."""
    logprobs_SV = logits_SV - np.logaddexp.reduce(logits_SV, -1, keepdims=True)
    wanted = [float(logprobs_SV[n - 1, tokens[n]]) for n in range(4, len(tokens))]
    for runtime in ("onnxruntime", "genai"):
        with olive_ext.open(folder, engine={"runtime": runtime}) as session:
            (output,) = session.loglikelihood([ScoringRequest(tokens[:4], tokens[4:])])
        np.testing.assert_allclose(output.token_logprobs, wanted, atol=1e-4)


@pytest.fixture(scope="module")
def plain_models() -> Models:
    return models()


def test_everything_float_is_the_float_model_to_the_bit_and_its_size_is_predicted(
    plain_models: Models, tmp_path: Path
) -> None:
    made = package(dict.fromkeys(plain_models.targets, FLOAT), plain_models)
    made.write(tmp_path / "all")
    np.testing.assert_array_equal(logits(tmp_path / "all"), logits(quickstart.exported()))
    written = sum(path.stat().st_size for path in (tmp_path / "all").iterdir())
    inside = sum(new.num_bytes <= SMALL for new in made.graphs[0].new.values())
    assert written <= made.num_bytes <= written + INLINE_BYTES * inside
    assert written - size_on_disk(locate(tmp_path / "all")) == made.num_bytes - made.graph_bytes


@pytest.mark.parametrize("level", [None, 4])
def test_zero_points_and_accuracy_levels_are_kept(level: int | None, tmp_path: Path) -> None:
    of = models(quickstart.quantized(4, 32, symmetric=False, accuracy_level=level))
    package({of.targets[0]: Precision(8, 32), of.targets[1]: Precision(4, 16)}, of).write(tmp_path / "mended")
    nodes = {node.name: node for node in load_graph(tmp_path / "mended" / "model.onnx").graph.node}
    names = [f"{target.name}_Q{bits}" for target, bits in zip(of.targets, (8, 4, 4), strict=False)]
    attributes = [{entry.name: entry.i for entry in nodes[name].attribute} for name in names]
    assert [one["block_size"] for one in attributes] == [32, 16, 32]
    assert [len(nodes[name].input) for name in names] == [3, 4, 4]
    assert {one.get("accuracy_level") for one in attributes} == {level}
    origin = logits(quickstart.exported())
    assert np.abs(logits(tmp_path / "mended") - origin).mean() < 1.2 * np.abs(logits(of.quantized) - origin).mean()


@pytest.mark.parametrize("place", ["", "model.onnx"])
def test_model_may_be_named_from_the_working_directory(
    place: str, plain_models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = quickstart.quantized(4, 128)
    monkeypatch.chdir(original.parent)
    sources = {"": Sources.of(plain_models.float / "model.onnx", original / "model.onnx")}
    model = resolve(ModelSettings.of({"model": str(Path(original.name, place))}))
    mended(model, sources, {}).write(tmp_path / "mended")
    assert sorted(path.name for path in (tmp_path / "mended").iterdir()) == sorted(
        path.name for path in original.iterdir()
    )


def test_named_file_is_copied_without_the_models_beside_it_and_found_again(
    plain_models: Models, tmp_path: Path
) -> None:
    folder = shutil.copytree(plain_models.float, tmp_path / "both")
    (folder / "genai_config.json").unlink()
    (folder / "notes").mkdir()
    (folder / "metrics.json").touch()
    (folder / "notes" / "large.bin").write_bytes(b"mine")
    small = onnx.load(plain_models.quantized / "model.onnx")
    onnx.save(small, folder / "model_q4.onnx", save_as_external_data=True, location="model_q4.onnx.data")
    model = resolve(ModelSettings.of({"model": str(folder / "model_q4.onnx")}))
    sources = {"": Sources.of(folder / "model.onnx", folder / "model_q4.onnx")}
    mended(model, sources, {plain_models.targets[0]: FLOAT}).write(tmp_path / "mended")
    copied = {path.name for path in (tmp_path / "mended").iterdir()}
    assert copied == {path.name for path in folder.iterdir()} - {
        "model.onnx",
        "model.onnx.data",
        "notes",
        "metrics.json",
    }
    found = copy_of(model, tmp_path / "mended").files
    assert found.decoder == tmp_path / "mended" / "model_q4.onnx"
    shutil.copy(folder / "model.onnx", tmp_path / "mended")
    shutil.copy(folder / "model.onnx.data", tmp_path / "mended")
    assert copy_of(model, tmp_path / "mended").files.decoder.name == "model_q4.onnx"


def test_empty_folder_is_taken_and_the_models_own_is_refused(plain_models: Models, tmp_path: Path) -> None:
    """Where nothing is changed it gets the quantized model, to the bit."""
    (tmp_path / "mended").mkdir()
    package({}, plain_models).write(tmp_path / "mended")
    np.testing.assert_array_equal(logits(tmp_path / "mended"), logits(quickstart.quantized(4, 128)))
    model = resolve(ModelSettings.of({"model": str(tmp_path / "mended")}))
    with refused(ConfigError, "wrong_value", "output_dir"):
        refuse_inside(model, tmp_path / "mended" / "again")
    refuse_inside(model, tmp_path / "again")


def test_disk_without_room_is_told_before_anything_is_written(
    plain_models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: left)
    with refused(RunError, "failed", holds=("1.16", "1.00")):
        package({}, plain_models).write(tmp_path / "mended")
    assert not list(tmp_path.iterdir())


def test_failure_leaves_nothing_behind(plain_models: Models, tmp_path: Path) -> None:
    broken = shutil.copytree(quickstart.quantized(4, 128), tmp_path / "broken")
    made = package({plain_models.targets[0]: FLOAT}, plain_models._replace(quantized=broken))
    (broken / "model.onnx.data").write_bytes(b"")
    with refused(RunError, "failed", holds=("model.onnx.data'", "embed_tokens.weight'")):
        made.write(tmp_path / "mended")
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]


MEASURE = """
import json, resource, sys
from pathlib import Path
import numpy as np, onnx
from onnx import TensorProto, helper
from olive_ext.model.files.constants import Constants
from olive_ext.plugins.diagnose.remedy.mended_package import GraphFile
from olive_ext.plugins.diagnose.remedy.weights import PackedWeight, Precision
from olive_ext.plugins.diagnose.remedy.mended_package import NewTensor, as_new
import onnxruntime.quantization.matmul_nbits_quantizer
folder, K, N = Path(sys.argv[1]), 4096, 24576
model = helper.make_model(helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"], "n")], "g", [], [],
    [TensorProto(name="w", dims=[K, N], data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL)]))
for key, value in (("location", "m.data"), ("offset", "0"), ("length", str(K * N * 4))):
    model.graph.initializer[0].external_data.add(key=key, value=value)
with (folder / "m.data").open("wb") as file:
    file.truncate(K * N * 4)
(folder / "m.onnx").write_bytes(model.SerializeToString())
constants = Constants(model, folder / "m.onnx")
packed = PackedWeight(lambda: constants.view("w"), np.dtype(np.float32), Precision(8, 32), is_symmetric=True)
new = {
    "a": NewTensor("a", packed.packed_shape, TensorProto.UINT8, packed.packed),
    "b": NewTensor("b", packed.scales_shape, TensorProto.FLOAT, packed.scales),
    "c": as_new(constants, "w", "c", TensorProto.FLOAT16),
}
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
(folder / "out").mkdir()
GraphFile(model, constants, new, folder / "m.onnx", Path("m.data")).write(folder / "out" / "m.onnx")
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.long
def test_writing_takes_a_fraction_of_the_weights_in_memory(tmp_path: Path) -> None:
    """A weight of 403 MB is copied, cast and quantized: 705 MB are written."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path)], capture_output=True, text=True, check=True, cwd=ROOT
    )
    written = (tmp_path / "out" / "m.data").stat().st_size
    assert written > 700e6
    assert json.loads(done.stdout.splitlines()[-1]) < 300e6
