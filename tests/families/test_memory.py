"""Text of a multimodal package takes no memory for its images and sound."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from onnx import TensorProto, helper, save_model

from tests.exports import export

VISION_MB = 400
PEAK_OF_SCORING = """
import resource, sys
import olive_ext
with olive_ext.open(sys.argv[1]) as session:
    session.loglikelihood([([2, 40, 41], [42, 43])])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


@pytest.mark.exporters
def test_vision_graph_of_400_mb_is_not_in_the_peak_memory_of_text(tmp_path: Path) -> None:
    package = tmp_path / "package"
    shutil.copytree(export("gemma4_vl-mobius").path, package)
    without = _peak_mb(package)
    _write_large_graph(package / "vision_encoder" / "model.onnx")
    assert abs(_peak_mb(package) - without) < VISION_MB / 10


def _write_large_graph(path: Path) -> None:
    """Its weights are a hole in a file: nothing is allocated here, since a child's peak counts its parent's."""
    weight = TensorProto(name="weight", data_type=TensorProto.FLOAT, dims=[VISION_MB << 18])
    weight.data_location = TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="vision.bin")
    value = helper.make_tensor_value_info("image_features", TensorProto.FLOAT, [VISION_MB << 18])
    node = helper.make_node("Identity", ["weight"], ["image_features"])
    save_model(helper.make_model(helper.make_graph([node], "vision", [], [value], [weight])), path)
    with path.with_name("vision.bin").open("wb") as data:
        data.truncate(VISION_MB << 20)


def _peak_mb(package: Path) -> int:
    command = [sys.executable, "-c", PEAK_OF_SCORING, str(package)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])
