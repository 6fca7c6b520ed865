"""`type: OrtEngine` in Evalution's YAML, in its Python emitter and on our command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import evalution
import pytest

from olive_ext.cli import main
from olive_ext.plugins.suites.evalution import register, run_spec
from tests.exports import genai_export
from tests.exports.cache import ROOT
from tests.plugins.suites.evalution.suites import hellaswag_rows

pytestmark = [pytest.mark.slow, pytest.mark.other_env]


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
    ],
)
def test_wrong_specification_is_a_users_error(
    tmp_path: Path, text: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(text, encoding="utf-8")
    assert main(["evalution", str(path)]) == 2
    out, err = capsys.readouterr()
    assert words in err
    assert out == ""


def test_missing_file_is_a_users_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nothing\.yaml"):
        run_spec(tmp_path / "nothing.yaml")
