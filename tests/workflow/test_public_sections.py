"""The 17 kinds of evaluator sections of Olive's public recipes (July 2026) that are of generative models: each, ported
by its type, passes the check, and runs on a tiny model. docs/porting.md says how."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lm_eval.tasks import TaskManager
from olive.model import ONNXModelHandler

from olive_ext.backends import task_loading
from olive_ext.check import check_recipe
from olive_ext.config import EVALUATOR_TYPE, evaluator_settings
from olive_ext.workflow import OrtLMEvaluator
from tests.check.tiny import put_model
from tests.exports.quickstart import TASKS, exported
from tests.workflow.recipes import saved

HERE = Path(__file__).parent
SECTIONS: dict[str, dict[str, Any]] = {
    one["name"]: one for one in json.loads((HERE / "public_sections.json").read_text(encoding="utf-8"))
}
"""By name: in how many recipes, the type that was changed (None: there was none), and the keys; of a section of metrics
its metric, the pre-processing of its data, and whether the metric is named in a list of the recipe's own."""

OF_TASKS = [name for name, one in SECTIONS.items() if one["type"] == "LMEvaluator"]
METRICS_TYPE = "OrtEvaluator"
OF_METRICS = [name for name, one in SECTIONS.items() if one["type"] is None and METRICS_TYPE in evaluator_settings()]


def ported(section: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A recipe with the section, its type changed, of a tiny model in `folder`."""
    place = put_model(folder / "model")
    (place / "config.json").write_text(json.dumps({"max_position_embeddings": 8192}), encoding="utf-8")
    (place / "chat_template.jinja").write_text("{{ messages[0].content }}", encoding="utf-8")
    model = {"type": "ONNXModel", "model_path": str(place)}
    if section["type"] == "LMEvaluator":
        block = {"type": EVALUATOR_TYPE, **section["keys"]}
        return {"input_model": model, "evaluators": {"e": block}, "evaluator": "e"}
    metric = {"name": "accuracy", "type": "accuracy", "data_config": "data", **section["metric"]}
    metrics = ["accuracy"] if section["is_named"] else [metric]
    return {
        "input_model": model,
        "data_configs": [
            {"name": "data", "type": "HuggingfaceContainer", "pre_process_data_config": section["pre_process"]}
        ],
        **({"metrics": [metric]} if section["is_named"] else {}),
        "evaluators": {"e": {"type": METRICS_TYPE, "metrics": metrics}},
    }


def test_list_has_all_sections() -> None:
    assert len(SECTIONS) == 17
    assert sum(one["sections"] for one in SECTIONS.values()) == 101


managers: dict[str, TaskManager] = {}


def manager(**given: Any) -> TaskManager:
    """lm-eval's, which reads its thousands of files once."""
    return managers.get(repr(given)) or managers.setdefault(repr(given), TaskManager(**given))


@pytest.fixture(autouse=True)
def _one_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_loading, "TaskManager", manager)


@pytest.mark.parametrize("name", [*(pytest.param(name, marks=pytest.mark.long) for name in OF_TASKS), *OF_METRICS])
def test_ported_section_passes_the_check(name: str, tmp_path: Path) -> None:
    findings = check_recipe(saved(tmp_path, ported(SECTIONS[name], tmp_path)))
    assert findings.problems == []


@pytest.mark.long
@pytest.mark.parametrize("name", OF_TASKS)
def test_ported_section_of_tasks_runs(name: str) -> None:
    """All keys but the tasks, which need a network, the number of examples, and what makes a chat of them."""
    keys = SECTIONS[name]["keys"]
    task = "quickstart_choice" if isinstance(keys["tasks"][0], str) else "quickstart_generate"
    small = {"tasks": [task], "include_path": str(TASKS), "limit": 2, "num_fewshot": 0, "max_length": 256}
    chat = {"fewshot_as_multiturn": False, "apply_chat_template": False, "sample_log_num": 0}
    evaluator = OrtLMEvaluator(**{**keys, **small, **chat, "engine": {"num_threads": 1}})
    found = evaluator.evaluate(ONNXModelHandler(str(exported()), onnx_file_name="model.onnx"))
    assert any(key.startswith(f"{task}-") for key in found.root)


def test_section_of_embeddings_passes_the_check(tmp_path: Path) -> None:
    recipe = ported({**SECTIONS["embeddings"], "type": "LMEvaluator"}, tmp_path)
    recipe["evaluators"]["e"]["type"] = METRICS_TYPE
    assert check_recipe(saved(tmp_path, recipe)).problems == []
