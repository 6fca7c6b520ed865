"""Mistakes are one line each, before anything is measured; and what was measured is not measured again."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import olive_ext
from olive_ext.errors import OliveExtError
from olive_ext.plugins.diagnose.remedy.variants import Variants
from tests.exports import genai_export, hf_model, quickstart

pytestmark = pytest.mark.slow

WORK: dict[str, Any] = {"tasks": ["quickstart_choice"], "include_path": str(quickstart.TASKS), "limit": 4, "by": "kind"}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"tasks": ["quickstart_choise"]}, r"unknown task 'quickstart_choise'.*quickstart_choice"),
        ({"reference": "nowhere"}, r"'nowhere'"),
        ({"by": "nodes"}, r"'by' = 'nodes': give \"node\", \"layer\" or \"kind\""),
        ({"tops": 3}, r"unknown key 'tops': did you mean 'top'"),
        ({"reference": {"path": "x", "mode": "resident"}}, "a loss map reads the reference's records"),
        ({"workers": 2}, "a loss map is measured in its own process"),
    ],
)
def test_wrong_setting_is_one_line(changes: dict[str, Any], told: str) -> None:
    given = {"reference": str(quickstart.exported()), **WORK, **changes}
    with pytest.raises(OliveExtError, match=told) as error:
        olive_ext.locate(quickstart.quantized(4, 128), **given)
    assert "\n" not in str(error.value)


def test_model_is_not_its_own_reference() -> None:
    with pytest.raises(OliveExtError, match="is the model itself: give the float model"):
        olive_ext.locate(quickstart.quantized(4, 128), reference=quickstart.quantized(4, 128), **WORK)


def test_map_is_not_put_into_the_models_own_folder(tmp_path: Path) -> None:
    package = shutil.copytree(quickstart.quantized(4, 128), tmp_path / "package")
    names = sorted(package.iterdir())
    for place in (package, package / "map"):
        with pytest.raises(
            OliveExtError, match=r"'output_dir' = '.*': lies in the model's folder, which stays as it is"
        ):
            olive_ext.locate(package, reference=quickstart.exported(), **WORK, output_dir=place)
    assert sorted(package.iterdir()) == names


def test_quantized_model_is_no_reference() -> None:
    """Float and quantized model in the wrong order."""
    with pytest.raises(OliveExtError, match=r"is quantized itself \(MatMulNBits\): give the float model"):
        olive_ext.locate(quickstart.exported(), reference=quickstart.quantized(4, 128), **WORK)


def test_model_of_another_vocabulary_is_refused() -> None:
    with pytest.raises(OliveExtError, match="token"):
        olive_ext.locate(quickstart.quantized(4, 128), reference=genai_export("llama"), **WORK)


def test_model_of_another_architecture_is_refused_by_its_nodes() -> None:
    with pytest.raises(OliveExtError, match=r"no weight can be paired with the reference's: of .* weights '.*'"):
        olive_ext.locate(genai_export("llama", "0.14.1", "int4"), reference=genai_export("lfm2"), **WORK)


def test_hugging_face_model_has_no_quantized_graph() -> None:
    with pytest.raises(OliveExtError, match="a loss is located in a quantized ONNX model"):
        olive_ext.locate(hf_model("llama"), reference=quickstart.exported(), **WORK)


def test_measurements_of_an_interrupted_map_are_taken_from_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"reference": str(quickstart.exported()), **WORK, "output_dir": tmp_path}
    first = olive_ext.locate(quickstart.quantized(4, 128), **given)

    def refuse(*_: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(Variants, "kl", refuse)
    assert olive_ext.locate(quickstart.quantized(4, 128), **given).to_json() == first.to_json()
    with pytest.raises(AssertionError, match="measured again"):
        olive_ext.locate(quickstart.quantized(4, 128), resume=False, **given)
