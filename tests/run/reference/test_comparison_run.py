"""Comparisons end to end on two tiny torch models, against numbers computed from their whole distributions. How a
reference is run is decided before anything is opened."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from olive_ext.backends.task_loading import LoadedTasks, load_tasks
from olive_ext.config import EvaluationConfig
from olive_ext.errors import ConfigError, ProviderError
from olive_ext.report.comparison import Comparison
from olive_ext.report.verdict import verdict
from olive_ext.run.models import Models
from olive_ext.run.reference.comparison_run import Mode, TaskRun, mode_of
from tests.backends.local_tasks import CHOICE, NAMES, write_tasks
from tests.backends.reference import model
from tests.exports.catalog import export
from tests.refusals import refused, tells
from tests.run.duo import TwoModels, logprobs, perturbed
from tests.session.tiny import byte_level

NOISE = 0.6
MODES: tuple[Mode, ...] = ("recorded", "resident", "answers")
Found = dict[str, tuple[Comparison, Any, TwoModels]]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> LoadedTasks:
    return load_tasks(NAMES, str(write_tasks(tmp_path_factory.mktemp("tasks"))))


def compare(
    tasks: LoadedTasks, mode: Mode, candidate: Any, change: Callable[[list[Any]], object] = id, **settings: Any
) -> tuple[Comparison, Any, TwoModels]:
    """`change` edits the candidate's answers."""
    given = {"model": {"path": "m"}, "reference": {"path": "r", "kind": "onnx"}, "tasks": NAMES, "bootstrap_iters": 0}
    config = EvaluationConfig.parse({**given, **settings})
    models = TwoModels(candidate, config)
    task_run = models.task_run = TaskRun(models, mode, tasks)
    task_run.run_reference_alone()
    lm = task_run.open_candidate()
    results = task_run.run(lm)
    task_run.read(results["samples"])
    change(task_run.answers)
    comparison = task_run.finish(lm)
    assert comparison is not None
    models.fields = task_run.fields()
    return comparison, results, models


@pytest.fixture(scope="module")
def found(tasks: LoadedTasks) -> Found:
    return {mode: compare(tasks, mode, perturbed(NOISE)) for mode in MODES}


def test_modes_find_the_same_and_answers_alone_no_distributions(found: Found) -> None:
    recorded, resident = found["recorded"][0], found["resident"][0]
    assert recorded.divergences == resident.divergences
    assert recorded.outcomes == resident.outcomes
    assert recorded.flips == resident.flips
    assert recorded.metrics["results"] == resident.metrics["results"]
    alone = found["answers"][0]
    assert (alone.divergences, alone.outcomes, alone.reference["mode"]) == ((), recorded.outcomes, "answers")
    assert {mode: models.opened for mode, (_, _, models) in found.items()} == {
        "recorded": ["reference", "candidate"],
        "resident": ["candidate", "resident"],
        "answers": ["reference", "candidate"],
    }


@pytest.mark.parametrize("mode", MODES)
def test_a_task_of_mcc_alone_is_named_and_not_found_without_loss(tmp_path: Path, mode: Mode) -> None:
    """lm-eval's own aggregation, which is no mean over documents (CoLA); the same model, so nothing else is against.
    The score is judged where each document adds the same to it: as so many equal values."""
    folder = write_tasks(tmp_path / "tasks")
    (folder / "tiny_mcc.yaml").write_text(
        CHOICE.replace("tiny_choice", "tiny_mcc").replace("metric: acc\n  - metric: acc_norm", "metric: mcc")
    )
    both = load_tasks(["tiny_choice", "tiny_mcc"], str(folder))
    alike, *_ = compare(both, mode, perturbed(1e-3))
    (score,) = [item for item in alike.outcomes if item.metric == "mcc"]
    assert (score.difference, score.low) == (0, pytest.approx(0.025 ** (1 / 6) - 1))

    def moved(answers: list[Any]) -> None:
        (own,) = [item for item in answers if item.task == "tiny_mcc"]
        own.by_document[0].values["items of mcc"] += 1

    comparison, results, _ = compare(both, mode, perturbed(1e-3), moved)
    assert "mcc,none" in results["results"]["tiny_mcc"]
    assert {item.task for item in comparison.outcomes} == {"tiny_choice"}
    told = verdict(comparison)
    assert told.status != "ok"
    assert "tiny_mcc (mcc)" in told.finding
    assert "perplexity" not in told.finding


def test_logged_margins_are_those_of_lm_evals_log_probabilities(found: Found) -> None:
    """Of the reference's choice in both models' logged answers; answers without choices have none."""
    _, results, models = found["recorded"]
    for line in results["samples"]["tiny_choice"][:6]:
        prompt, choices = line["arguments"][0][0], [arguments[1] for arguments in line["arguments"]]
        pairs = []
        for net in (model(), perturbed(NOISE)):
            scores = []
            for choice in choices:
                tokens, start = byte_level(True).encode(prompt + choice), len(byte_level(True).encode(prompt))
                rows = logprobs(net, tokens[:-1])[start - 1 :]
                scores.append(rows[np.arange(len(rows)), tokens[start:]].sum())
            pairs.append(scores)
        best = int(np.argmax(pairs[0]))
        expected = [own[best] - max(own[:best] + own[best + 1 :]) for own in pairs]
        assert list(models.fields("tiny_choice", line)["margins"].values()) == pytest.approx(expected, rel=1e-4)
    assert "margins" not in models.fields("tiny_generate", results["samples"]["tiny_generate"][0])


def test_answers_part_at_the_first_other_token(found: Found) -> None:
    """Each document's, with the least lead there that both models' probabilities prove, by their own greedy steps."""
    _, results, models = found["recorded"]
    tokenizer, nets, expected = byte_level(True), (model(), perturbed(NOISE)), {}
    for line in results["samples"]["tiny_generate"][:6]:
        prompt = tokenizer.encode(line["arguments"][0][0])
        made = [[*prompt] for _ in nets]
        for net, tokens in zip(nets, made, strict=True):
            for _ in range(6):
                tokens.append(int(logprobs(net, tokens)[-1].argmax()))
        index = next((place for place, (one, two) in enumerate(zip(*made, strict=True)) if one != two), None)
        if index is not None:
            rows = [logprobs(net, made[0][:index])[-1] for net in nets]
            share = np.exp(min(row[made[0][index]] for row in rows))
            expected[line["doc_id"]] = (np.log(share / (1 - share)), index - len(prompt))
    task_run = models.task_run
    parted = task_run.observer.parted(task_run.reference.observer)
    assert expected
    assert {asked[1]: (least, index) for least, asked, index in parted} == {
        number: (pytest.approx(least, rel=1e-4), index) for number, (least, index) in expected.items()
    }


@pytest.mark.parametrize(
    ("lead", "apart", "changed", "turned", "is_told"),
    [
        (2.1, 1.0, 1, 0, True),
        (1.9, 1.0, 6, 0, False),
        (-0.1, 0.0, 2, 0, False),
        (-0.1, 0.0, 3, 0, True),
        (-0.1, 0.0, 3, 1, False),
        (-0.1, 0.01, 3, 0, False),
        (0.2, 0.01, 3, 0, True),
        (0.2, 0.03, 3, 0, False),
        (0.2, math.nan, 3, 0, False),
    ],
)
def test_other_tokens_than_those_that_whole_texts_are_sure_of_are_a_contradiction(
    lead: float,
    apart: float,
    changed: int,
    turned: int,
    is_told: bool,
    tasks: LoadedTasks,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Answers changed beside distributions that were bit-equal, and the verdict was "no loss found". Near ties turn by
    rounding: fewer of models that are near on whole texts, and as many as the reference itself has turned."""
    task_run = compare(tasks, "recorded", model())[2].task_run
    observer, reference = task_run.observer, task_run.reference.observer
    assert observer.contradicted(reference) == ""
    rows = {task: np.copy(observer.rows(task)) for task in observer.tasks}
    written = rows["tiny_generate"]
    for name in ("logprobs", "reference_logprobs", "reference_top_logprobs"):
        written[name] = -np.log1p(np.exp(-lead))
    written["reference_top_logprobs"][:turned] += 0.01
    rows["tiny_choice"]["logprobs"][0] += apart
    monkeypatch.setattr(observer, "rows", rows.__getitem__)
    for asked, tokens in [*reference.greedy.items()][:changed]:
        observer.greedy[asked] = tokens[:-1]
    assert observer.contradicted(reference) == ""
    for asked, tokens in [*reference.greedy.items()][:changed]:
        observer.greedy[asked] = (*tokens[:-1], tokens[-1] + 1)
    assert bool(observer.contradicted(reference)) == is_told


def test_flips_are_the_documents_whose_value_changed_and_the_references_own_results_are_kept(
    tasks: LoadedTasks, found: Found
) -> None:
    comparison, results, _ = found["recorded"]
    alone = compare(tasks, "answers", model())[1]
    expected = set()
    for name, metric in (("tiny_choice", "acc"), ("tiny_generate", "exact_match")):
        pairs = zip(alone["samples"][name], results["samples"][name], strict=True)
        first = results["samples"][name][0]["filter"]
        expected |= {
            (name, own["doc_id"], "right_to_wrong" if before[metric] > own[metric] else "wrong_to_right")
            for before, own in pairs
            if own["filter"] == first and before[metric] != own[metric]
        }
    assert {(flip.task, flip.doc_id, flip.direction) for flip in comparison.flips} == expected
    assert expected
    for flip in comparison.flips:
        assert flip.reference_answer != flip.candidate_answer
        right = flip.reference_answer if flip.direction == "right_to_wrong" else flip.candidate_answer
        assert right == flip.target
    for mode in MODES:
        kept = found[mode][0].metrics["results"]
        for task in NAMES:
            values = {key: value for key, value in alone["results"][task].items() if isinstance(value, float)}
            assert {key: kept[task][key] for key in values} == pytest.approx(values, rel=1e-9)
    assert "samples" not in found["resident"][0].metrics


def test_answer_that_a_task_cannot_read_is_one_that_may_be_lost(tasks: LoadedTasks) -> None:
    """A task's code gives NaN to an unreadable answer: the model's are then left out of its mean."""
    comparison, _, _ = compare(tasks, "answers", model(), lambda own: own[0].by_document[0].values.clear())
    assert comparison.missing == 1
    found = verdict(comparison)
    assert tells(found.finding, "1 tiny_choice acc")
    assert "no answer" not in found.finding
    assert "asked twice" not in found.next_step, "another run would read no more"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    value = helper.make_tensor_value_info("logits", TensorProto.FLOAT, [1])
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["logits"])], "g", [given], [value])
    onnx.save(helper.make_model(graph), folder / "model.onnx")
    byte_level(False).hf.save_pretrained(folder)
    return str(folder)


def config(path: str, reference: Any, **settings: Any) -> EvaluationConfig:
    given = {"tasks": ["tiny_choice"], **settings}
    return EvaluationConfig.parse({"model": {"path": path}, "reference": reference, **given})


def test_nothing_is_compared_without_a_reference_nor_before_a_workflow(path: str) -> None:
    assert mode(config(path, None)) == "alone"
    with refused(ConfigError, "contradiction", "reference", "input_model"):
        mode(config(path, "input_model"))


def test_lm_evals_own_model_is_not_compared_with_itself(tmp_path: Path, path: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    byte_level(False).hf.save_pretrained(tmp_path)
    hf = str(tmp_path)
    given = {"model": {"path": hf, "kind": "hf"}, "tasks": ["tiny_choice"]}
    assert mode(EvaluationConfig.parse({**given, "reference": f"{hf}/."})) == "alone"
    assert mode(EvaluationConfig.parse({**given, "reference": path})) == "recorded"


def mode(config: EvaluationConfig) -> str:
    return mode_of(Models(config))


@pytest.mark.exporters
def test_a_graph_with_states_and_its_checkpoint_take_turns() -> None:
    """Transformers take its texts whole, which a graph that takes a token a step failed on."""
    package = export("mamba-mobius")
    assert mode(config(str(package.path), str(package.hf))) == "recorded"


def test_models_that_do_not_fit_take_turns(path: str, tmp_path: Path) -> None:
    large = tmp_path / "large"
    shutil.copytree(path, large)
    with (large / "weights.safetensors").open("wb") as file:
        file.truncate(1 << 42)  # sparse
    (large / "model.onnx").unlink()
    (large / "config.json").write_text("{}")
    assert mode(config(path, str(large), device="cpu")) == "recorded"


def test_missing_provider_and_speed_of_two_resident_models_are_refused(path: str) -> None:
    with pytest.raises(ProviderError, match="TensorrtExecutionProvider"):
        mode(config(path, path, execution_provider="tensorrt"))
    with refused(ConfigError, "contradiction", "tokens_per_second", holds=("reference.mode", "recorded")):
        mode(config(path, {"path": path, "mode": "resident"}, tasks=["tiny_choice", "tokens_per_second"]))


def test_reference_takes_the_models_settings_and_its_own_provider(path: str) -> None:
    given = config(path, path, execution_provider="cuda", provider_options={"device_id": 1}, limit=3)
    other = Models(given).reference.settings
    assert (other.model, other.execution_provider, other.provider_options) == (path, "cuda", {"device_id": 1})
    named = {"path": path, "execution_provider": "cpu"}
    own = Models(config(path, named, provider_options={"device_id": 1})).reference.settings
    assert (own.execution_provider, own.provider_options) == ("cpu", None)
