"""Whole suites of Evalution give the numbers of its transformers engine: through its own `run`, `type: OrtEngine` in
its YAML and on our command line, and its OpenAI-compatible server. How requests are gathered from its queue, without a
model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import evalution
import pytest
from evalution import Model
from evalution.engines import OpenAICompatible, TransformersCompat, build_openai_compatible_server
from evalution.engines.base import BaseInferenceSession, LoglikelihoodRequest

from olive_ext.cli import main
from olive_ext.plugins.suites.evalution import Arrivals, Item, OrtEngine, register, stream
from tests.exports import genai_export, hf_model
from tests.exports.cache import ROOT
from tests.plugins.suites.evalution.local import Draw, all_suites, hellaswag_rows, mmlu_rows, onnx_model, open_ours

pytestmark = pytest.mark.other_env

SCRIPT = Path(__file__).resolve().parents[4] / "docs" / "benchmarks" / "evalution_engines.py"


def run(engine: Any, path: object) -> Any:
    return evalution.run(model={"path": str(path)}, engine=engine, tests=all_suites())


def test_metrics_and_predictions_are_those_of_its_transformers_engine_and_say_how_the_model_ran() -> None:
    ours = run(OrtEngine(), genai_export("llama"))
    theirs = run(TransformersCompat(dtype="float32", device="cpu", batch_size=1), hf_model("llama"))
    assert [test.name for test in ours.tests] == [test.name for test in theirs.tests]
    assert [test.metrics for test in ours.tests] == [test.metrics for test in theirs.tests]
    predictions = [[[sample.prediction for sample in test.samples] for test in one.tests] for one in (ours, theirs)]
    assert [*map(len, predictions[0])] == [24, 24, 16]
    assert predictions[0] == predictions[1]
    written = json.loads(json.dumps(ours.to_dict()))["engine"]
    assert (written["resolved_engine"], written["execution"]["providers"]) == ("OrtEngine", ["CPUExecutionProvider"])


def test_benchmark_finds_equal_answers_on_files_of_rows(tmp_path: Path) -> None:
    (tmp_path / "hf").symlink_to(hf_model("llama"), target_is_directory=True)
    (tmp_path / "fp32").symlink_to(genai_export("llama"), target_is_directory=True)
    for name, rows in {"mmlu-dev": mmlu_rows, "mmlu-test": mmlu_rows, "hellaswag-validation": hellaswag_rows}.items():
        lines = [json.dumps(row) for row in rows(name.partition("-")[2])]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    words = [str(tmp_path), "--data", str(tmp_path), "--suites", "mmlu,hellaswag", "--rows", "4", "--batch-sizes", "1"]
    command = [sys.executable, str(SCRIPT), *words, "--output", str(tmp_path / "out.json")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    table = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["table"]
    assert [(row["suite"], row["agree"]) for row in table] == [("mmlu", True), ("hellaswag", True)]
    assert all(row["ratio_processor"] > 0 for row in table)
    assert done.stdout.count("| equal |") == 2


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    """HellaSwag on a local data set that `datasets` loads from a folder."""
    data = tmp_path / "data"
    data.mkdir()
    rows = "\n".join(json.dumps(row) for row in hellaswag_rows("validation"))
    (data / "validation.jsonl").write_text(rows, encoding="utf-8")
    path = tmp_path / "spec.yaml"
    path.write_text(
        f"engine: {{type: OrtEngine, execution_provider: cpu, engine: {{num_slots: 2}}}}\n"
        f"model: {{path: '{genai_export('llama')}'}}\n"
        f"tests: [{{type: hellaswag, dataset_path: '{data}', max_rows: 6, stream: false}}]\n",
        encoding="utf-8",
    )
    return path


def test_python_emitter_names_the_engine(spec: Path) -> None:
    register()
    text = evalution.python_from_yaml(spec)
    assert "engines.OrtEngine(" in text
    assert evalution.engines.OrtEngine.__name__ == "OrtEngine"


def test_command_writes_json_and_nothing_else_to_stdout(spec: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from olive_ext.cli import main; sys.exit(main())", "evalution", str(spec)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout)
    assert result["tests"][0]["name"].startswith("hellaswag")
    assert len(result["tests"][0]["samples"]) == 6
    assert result["engine"]["execution"]["generation_backend"] == "olive_ext"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("engine: {type: OrtEngine, nope: 1}\nmodel: {path: m}\ntests: [{type: hellaswag}]", "nope"),
        ("engine: {type: Unheard}\nmodel: {path: m}\ntests: [{type: hellaswag}]", "unheard"),
        ("engine: {type: OrtEngine}\nmodel: {path: m}\ntests: []", "tests"),
        ("model: {path: m}", "engine"),
        (None, "spec.yaml"),
    ],
)
def test_wrong_specification_is_a_users_error(
    tmp_path: Path, text: str | None, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "spec.yaml"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    assert main(["evalution", str(path)]) == 2
    out, err = capsys.readouterr()
    assert words in err
    assert out == ""


@pytest.fixture(scope="module")
def client() -> Iterator[BaseInferenceSession]:
    with build_openai_compatible_server(engine=OrtEngine(), model=onnx_model(), model_name="tiny") as server:
        yield OpenAICompatible(base_url=server.base_url, model_name="tiny", batch_size=8).build(Model(path="tiny"))


def test_scores_texts_and_streams_are_those_without_a_server(client: BaseInferenceSession) -> None:
    draw = Draw(11)
    generation = [draw.generation(number) for number in range(40) if number % 4 != 1]  # it takes no ids
    scoring = [draw.scoring(number) for number in range(30)]
    rolling = [draw.rolling(number) for number in range(12)]
    direct = open_ours()
    texts = [output.text for output in direct.generate(generation)]
    assert [output.text for output in client.generate(generation)] == texts
    streamed = dict(client.generate_continuous(enumerate(generation)))
    assert [streamed[place].text for place in range(len(generation))] == texts
    for found, expected in (
        (client.loglikelihood(scoring), direct.loglikelihood(scoring)),
        (client.loglikelihood_rolling(rolling), direct.loglikelihood_rolling(rolling)),
    ):
        assert [output.token_count for output in found] == [output.token_count for output in expected]
        assert [output.logprob for output in found] == pytest.approx([o.logprob for o in expected], abs=1e-4)
    direct.close()


def test_users_error_is_the_clients(client: BaseInferenceSession) -> None:
    with pytest.raises(Exception, match=r"400|empty"):
        client.loglikelihood([LoglikelihoodRequest("a", "")])


def test_closed_stream_ends_inside_and_outside() -> None:
    seen: list[object] = []

    def process(arrivals: Arrivals) -> Iterator[Item]:
        for key, _ in filter(None, arrivals.one_by_one([None])):
            seen.append(key)
            yield key, "output"

    def endless() -> Iterator[Item]:
        number = 0
        while True:
            yield number, None
            number += 1

    results = stream("test", endless(), process)
    assert next(results) == (0, "output")
    results.close()
    assert list(results) == []
    assert not [thread for thread in threading.enumerate() if thread.name == "olive_ext test"]
