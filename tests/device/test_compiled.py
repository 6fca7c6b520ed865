"""What providers that compile really keep: OpenVINO on Intel's devices, QNN on the simulator of its x86 package."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

import olive_ext
from olive_ext.errors import ProviderError
from olive_ext.model.providers.resolution import available_providers, register_libraries
from olive_ext.session import Session
from olive_ext.session.requests import GenerationRequest, ScoringRequest
from tests.exports.genai import genai_export
from tests.exports.media import MEDIA_FAMILIES, media_export
from tests.families.pictures import picture
from tests.refusals import refused

pytestmark = pytest.mark.other_env

FAMILY = "llava_clip"
MARKER = MEDIA_FAMILIES[FAMILY].marker
ASKED = [ScoringRequest(f"Ann {verb} the {MARKER} and", " blue stone", images=[picture(0, 40, 40)]) for verb in "ab"]
TEXTS = [("Ann sees the", " blue stone"), ("Bob", " paints a letter and a garden")]


@cache
def provider(short: str) -> dict[str, Any]:
    """Settings that take the provider `short`; skips where its package or its devices are not here."""
    module, name, options = {
        "openvino": ("onnxruntime_ep_openvino", "OpenVINOExecutionProvider", {}),
        "qnn": ("onnxruntime_qnn", "QNNExecutionProvider", {"soc_model": "60"}),
    }[short]
    package = pytest.importorskip(module)
    libraries = {name: module}
    register_libraries(libraries)
    if name not in available_providers():
        pytest.skip(f"{module} finds no device of its own here")
    if short == "qnn":
        options = {**options, "backend_path": str(Path(str(package.__file__)).parent / "libQnnHtp.so")}
        return {"provider_libraries": libraries, "engine": {"encoder_provider": [[name, options]]}}
    return {"provider_libraries": libraries, "execution_provider": name}


def opened(path: Path, given: dict[str, Any], folder: Path, **engine: Any) -> Session:
    engine = {"num_slots": 2, "chunk_size": 32, "compiled_dir": str(folder), **given.get("engine", {}), **engine}
    return olive_ext.open(path, **{**given, "engine": engine})


def counts(session: Session) -> tuple[int, int]:
    found = session.describe_execution()
    assert "compiled_problem" not in found
    return found["compiled_new"], found["compiled_kept"]


@pytest.mark.parametrize(("short", "tolerance"), [("openvino", 1e-4), ("qnn", 0.05)])
def test_second_run_with_pictures_compiles_nothing(tmp_path: Path, short: str, tolerance: float) -> None:
    given = provider(short)
    package, _ = media_export(FAMILY)
    with olive_ext.open(package) as session:
        expected = [output.logprob for output in session.loglikelihood(ASKED)]
    made = []
    for _ in range(2):
        with opened(package, given, tmp_path, strict_shapes=short == "openvino") as session:
            found = [output.logprob for output in session.loglikelihood(ASKED)]
            session.generate([GenerationRequest(f"{MARKER} is", max_new_tokens=4, images=[picture(1, 60, 30)])])
            made.append(counts(session))
        assert found == pytest.approx(expected, abs=tolerance)
    (new, kept), second = made
    assert new >= 1
    assert kept == 0
    assert second == (0, new)


def test_decoder_of_which_a_provider_takes_no_product_is_refused() -> None:
    """QNN's takes the indices alone: numbers of the CPU are none of QNN's, and it says nothing itself."""
    name, options = provider("qnn")["engine"]["encoder_provider"][0]
    given = {"execution_provider": [[name, options]], "provider_libraries": {name: "onnxruntime_qnn"}}
    with refused(ProviderError, "provider", holds=("QNNExecutionProvider", "CPUExecutionProvider")):
        olive_ext.open(genai_export("llama"), **given)
    with olive_ext.open(genai_export("llama"), **given, allow_cpu_fallback=True) as session:
        assert session.loglikelihood(TEXTS)
