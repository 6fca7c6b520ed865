from __future__ import annotations

import inspect
import json
import multiprocessing
import os
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lm_eval.evaluator
import lm_eval.utils
import pytest
import tqdm
from lm_eval.tasks import TaskManager

from olive_ext.backends.lm_eval_patches import no_code_of_the_working_directory, quiet_bars, sandboxed_templates
from olive_ext.backends.lm_eval_run import helpers_digest
from olive_ext.backends.task_files import refuse_unknown
from olive_ext.backends.task_loading import SEEDS, load_tasks
from olive_ext.errors import TaskError
from olive_ext.model.files import hub
from olive_ext.model.files.hub import offline_if_unreachable
from tests.backends.local_tasks import NAMES, write_tasks
from tests.refusals import refused


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tasks(tmp_path / "tasks")


def test_local_tasks_load_without_reading_lm_evals_own(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nor does lm-eval name an option of its own command line."""
    begin = time.process_time()
    loaded = load_tasks(NAMES, str(folder))
    assert list(loaded.tasks) == NAMES
    assert len(loaded.task_index) < 10
    assert time.process_time() - begin < 10
    assert "--metadata" not in caplog.text


def test_data_of_a_folder_with_brackets_in_its_name_are_read(tmp_path: Path) -> None:
    """datasets takes the brackets for a pattern: StopIteration."""
    folder = write_tasks(tmp_path / "tasks [1]")
    assert set(load_tasks([*NAMES], [str(folder)]).tasks) == set(NAMES)


def test_paths_names_and_inline_tasks_mix(folder: Path) -> None:
    import datasets

    rows = datasets.Dataset.from_list([{"text": "a b"}])
    inline: dict[str, Any] = {
        "task": "inline",
        "custom_dataset": lambda **_: {"test": rows},
        "test_split": "test",
        "output_type": "loglikelihood_rolling",
        "doc_to_target": "{{text}}",
        "doc_to_text": "",
        "metric_list": [{"metric": "word_perplexity"}],
    }
    loaded = load_tasks([str(folder / "tiny_choice.yaml"), "tiny_rolling", inline], [str(folder)])
    assert list(loaded.tasks) == ["tiny_choice", "tiny_rolling", "inline"]
    assert "task" in inline


def test_group_of_local_tasks_loads_its_members(folder: Path) -> None:
    loaded = load_tasks(["tiny_group"], str(folder))
    assert list(loaded.tasks) == ["tiny_choice", "tiny_rolling"]
    assert list(loaded.load(None)["groups"]) == ["tiny_group"]


def test_unknown_task_is_refused_with_near_names_and_one_without_its_data_by_name(folder: Path) -> None:
    with refused(
        TaskError, "unknown_name", "tasks", ["hellaswagg", "tiny_choise"], holds=("'tiny_choice'", "'hellaswag'")
    ) as caught:
        load_tasks(["tiny_choise", "hellaswagg"], str(folder))
    assert "\n" not in str(caught.value)
    (folder / "local.py").write_text("def load(**_):\n    raise OSError('no data here')\n")
    with refused(TaskError, "task", holds="tiny_choice"):
        load_tasks(["tiny_choice"], str(folder))


def test_edited_data_are_read_whatever_their_size_and_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    file, times = tmp_path / "data.json", (1_700_000_000, 1_700_000_000)
    inline = {
        "task": "inline",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file)}},
        "test_split": "test",
        "output_type": "loglikelihood_rolling",
        "doc_to_target": "{{text}}",
        "doc_to_text": "",
        "metric_list": [{"metric": "word_perplexity"}],
    }
    for text in ("old", "new", "old"):
        file.write_text(json.dumps([{"text": text}]))
        os.utime(file, times)
        (task,) = load_tasks([inline]).tasks.values()
        assert [doc["text"] for doc in task.eval_docs] == [text]


def test_random_numbers_go_on_as_if_lm_eval_had_loaded_the_tasks(folder: Path) -> None:
    random.seed(SEEDS["random_seed"])
    TaskManager(include_path=str(folder), include_defaults=False).load(["tiny_choice"])
    expected = random.random()
    loaded = load_tasks(["tiny_choice"], str(folder))
    random.seed(99)
    loaded.load(None)
    assert random.random() == expected
    defaults = inspect.signature(lm_eval.simple_evaluate).parameters
    assert loaded.seeds == {name: defaults[name].default for name in SEEDS}
    assert load_tasks(["tiny_choice"], str(folder), 3).seeds == dict.fromkeys(SEEDS, 3)


def test_templates_are_compiled_once_and_lm_eval_is_put_back() -> None:
    env = lm_eval.utils.env
    with sandboxed_templates(), sandboxed_templates():
        inside = lm_eval.utils.env
        assert inside.from_string("{{a}}") is inside.from_string("{{a}}")
        assert lm_eval.utils.apply_template("{{a}}", {"a": 3}) == "3"
    assert lm_eval.utils.env is env
    assert "from_string" not in vars(env)
    assert env.from_string("{{a}}") is not env.from_string("{{a}}")


def test_lm_eval_describes_neither_machine_nor_working_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would run `python -m pip` and git in the working directory, which may be a stranger's."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pip.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    evaluator = lm_eval.evaluator
    before, found = evaluator.add_env_info, {}
    with no_code_of_the_working_directory():
        evaluator.add_env_info(found)
        assert (found, evaluator.get_git_commit_hash()) == ({}, None)
    assert evaluator.add_env_info is before
    assert not (tmp_path / "ran").exists()
    evaluator.add_env_info(found)
    assert (tmp_path / "ran").exists()


def test_pool_that_is_started_anew_imports_nothing_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sys.version_info < (3, 11):
        pytest.skip("Python 3.10 has no switch")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "multiprocessing.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with no_code_of_the_working_directory(), multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(abs, [-3]) == [3]
    assert not (tmp_path / "ran").exists()


def test_first_evaluation_of_a_process_is_quiet_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lm_eval, "evaluator", lm_eval.evaluator)  # which importing anew replaces
    monkeypatch.delitem(sys.modules, "lm_eval.evaluator")
    with no_code_of_the_working_directory():
        from lm_eval.evaluator import get_git_commit_hash

        assert get_git_commit_hash.__module__.startswith("olive_ext.")


@pytest.mark.parametrize("progress", [True, False])
def test_bars_stay_out_of_pipes(progress: bool, capfd: pytest.CaptureFixture[str]) -> None:
    before = tqdm.tqdm
    with quiet_bars(progress):
        assert list(tqdm.tqdm(range(3), desc="loud")) == [0, 1, 2]
    assert tqdm.tqdm is before
    assert "loud" not in capfd.readouterr().err


def test_what_a_tasks_code_imports_from_beside_it_counts(tmp_path: Path) -> None:
    """A helper of `process_results` was loosened: a broken model had the baseline's score."""
    folder = write_tasks(tmp_path / "tasks")
    code = (folder / "local.py").read_text()
    files = {"rules.py": "from deep import inner\nimport json", "deep/inner.py": "WORDS = 1", "other.py": ""}
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)

    def digest() -> str:
        return helpers_digest(vars(load_tasks(["tiny_broken"], str(folder)).tasks["tiny_broken"].config))

    found = [digest()]
    (folder / "local.py").write_text(f"def late():\n    import rules\n{code}")
    found.append(digest())
    (folder / "other.py").write_text("# not imported")
    assert digest() == found[1]
    for name in ("rules.py", "deep/inner.py"):
        (folder / name).write_text(files[name] + "  # edited")
        found.append(digest())
    assert (found[0], len({*found})) == ("", 4)


def test_library_that_was_set_offline_says_why_the_hub_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "why_unreachable", lambda: "no route to host")
    with refused(TaskError, "needs_network", holds="no route to host"), offline_if_unreachable(has_data=True):
        raise TaskError("task 't': ConnectionError: Couldn't reach 'a/b' on the Hub (OfflineModeIsEnabled)")


def test_stem_of_a_file_that_is_no_task_is_not_suggested(tmp_path: Path) -> None:
    (tmp_path / "homes.yaml").write_text("task: prices\ndataset_path: csv\n", encoding="utf-8")
    with refused(TaskError, "unknown_name", "tasks") as caught:
        refuse_unknown(["home"], [str(tmp_path)])
    assert "'homes'" not in str(caught.value)


def test_task_of_ones_own_in_the_documentation_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(__file__).parents[2] / "docs" / "start" / "shell.md"
    (tmp_path / "tasks").mkdir()
    file, data = tmp_path / "tasks" / "homes.yaml", tmp_path / "tasks" / "homes.csv"
    block = page.read_text(encoding="utf-8").split("```yaml\n")[1].split("```")[0]
    file.write_text(block, encoding="utf-8")
    rows = [line.partition(": ")[2] for line in block.splitlines() if line.startswith("# ")]
    data.write_text("\n".join(rows), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    task = load_tasks(["tasks/homes.yaml"], None).tasks["homes"]
    (doc,) = task.test_docs()
    assert (task.doc_to_text(doc), task.doc_to_choice(doc), task.doc_to_target(doc)) == ("Is 1 even?", ["yes", "no"], 1)


def test_two_threads_load_tasks_side_by_side(tmp_path: Path) -> None:
    """The second replaced what the first had replaced, under another name."""
    write_tasks(tmp_path)
    with ThreadPoolExecutor(4) as pool:
        loaded = [*pool.map(lambda _: load_tasks(["tiny_choice"], str(tmp_path)), range(8))]
    assert {one.tasks["tiny_choice"].config.task for one in loaded} == {"tiny_choice"}
