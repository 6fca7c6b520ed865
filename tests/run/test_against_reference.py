"""`evaluate` with a reference on real tiny models: an export, its source, a changed and a quantized export."""

from __future__ import annotations

import json
import logging
import math
import re
import shlex
import shutil
from collections import Counter
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from lm_eval.models.huggingface import HFLM
from onnx import helper, numpy_helper
from transformers import AutoModelForCausalLM, AutoTokenizer

from olive_ext.backends.lm_eval import OrtLM
from olive_ext.check.model_check import check_model
from olive_ext.cli import main
from olive_ext.config import EvaluationConfig
from olive_ext.errors import ConfigError
from olive_ext.report import Report, from_json
from olive_ext.report.comparison import ALL, GENERATED, GRAPH, KV_CACHE, SHARED, Comparison, Divergence, PromptDiff
from olive_ext.report.verdict import verdict
from olive_ext.run import evaluate
from olive_ext.run.model_facts import UNJUDGED as UNJUDGED_FACT
from olive_ext.run.model_facts import damage_of
from olive_ext.run.models import Models
from olive_ext.run.reference.observer import Observer
from olive_ext.session.tokenizer import load_tokenizer
from tests.backends.local_tasks import NAMES, write_tasks
from tests.check.tiny import put_model
from tests.exports import edited, genai_export, hf_model
from tests.exports.pipeline import pipeline_package
from tests.exports.step_wide import step_wide_export
from tests.refusals import refused, tells

NOISE = 0.05
HEAD = "lm_head.MatMul.weight"
WORDS = "the cat sat on the mat and the dog ran off with the hat"
"""Of which the tasks' texts are made."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("records"))


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The float export with noise on its LM head, float32 throughout."""
    path = tmp_path_factory.mktemp("changed") / "model"
    return edited.changed(genai_export("llama"), path, HEAD, lambda values: values + noise())


def noise() -> np.ndarray:
    """[hidden, vocabulary]."""
    return (NOISE * np.random.default_rng(3).normal(size=(64, 1024))).astype(np.float32)


def run(model: Path, reference: Path, mode: str, folder: Path, records: str, lm: Any = None, **settings: Any) -> Report:
    given = {"tasks": NAMES, "include_path": str(folder), "bootstrap_iters": 0, **settings}
    how = {"path": str(reference), "mode": mode, "records_dir": records}
    return evaluate(EvaluationConfig.parse({"model": {"path": str(model)}, "reference": how, **given}), lm=lm)


def compared(report: Report) -> Comparison:
    assert report.comparison is not None
    return report.comparison


def by_task(report: Report) -> dict[str, Divergence]:
    return {item.task: item for item in compared(report).divergences}


@cache
def nets() -> tuple[Any, Any, Any]:
    """The source in float32, the same with the noise, and the tokenizer."""
    path = hf_model("llama")
    source, other = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for _ in range(2))
    head = other.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach() + torch.tensor(noise().T))
    return source, other, AutoTokenizer.from_pretrained(path)


def whole_distributions(text: str) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Log-probabilities [T, V] of both models at the text's tokens, behind BOS, and those tokens."""
    source, other, tokenizer = nets()
    tokens = tokenizer.encode(text)
    with torch.inference_mode():
        p, q = (net(torch.tensor([tokens])).logits[0].double().log_softmax(-1).numpy() for net in (source, other))
    return p[:-1], q[:-1], tokens[1:]


def test_a_recorded_comparison_looks_for_the_candidate_once(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    candidate = genai_export("llama")
    with caplog.at_level(logging.DEBUG, "olive_ext.model.files.locate"):
        run(candidate, hf_model("llama"), "recorded", folder, str(tmp_path), tasks=["tiny_choice", "size_on_disk"])
    assert sum(f"'{candidate}'" in line and "looking" in line for line in caplog.messages) == 1


def test_each_tokenizer_is_loaded_once(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, load = Counter[str](), AutoTokenizer.from_pretrained

    def counted(where: str, **how: Any) -> Any:
        loaded.update([where])
        return load(where, **how)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", counted)
    models = genai_export("llama"), hf_model("llama")
    for isolation in ("process", "none"):
        loaded.clear()
        run(*models, "resident", folder, str(tmp_path), tasks=["tiny_choice"], isolation=isolation)
        assert loaded == dict.fromkeys(map(str, models), 1)


def test_a_hugging_face_model_that_this_package_runs_is_reported_as_one(folder: Path) -> None:
    path = str(hf_model("llama"))
    given = {"model": {"path": path}, "tasks": ["tiny_choice", "size_on_disk"], "include_path": str(folder), "limit": 2}
    with OrtLM(path, kind="hf", device="cpu") as lm:
        report = evaluate(EvaluationConfig.parse({**given, "bootstrap_iters": 0}), lm=lm)
    assert report.model["kind"] == "hf"
    assert report.model["runtime"] == "transformers"
    (size,) = (metric.value for metric in report.metrics if metric.task == "size_on_disk")
    assert size == (hf_model("llama") / "model.safetensors").stat().st_size


def test_broken_bound_ends_with_one_after_the_report_and_the_table(
    changed: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("--tasks", NAMES[0], "--include-path", str(folder), "--reference", str(genai_export("llama")))
    bounds = ("--require", "kl_mean<=1e-9", "size_on_disk>=1", "--fail-on-loss", "99")
    more = ("--seed", "3", "--max-length", "64", "--system-instruction", "Be brief")
    assert main(["evaluate", str(changed), *asked, *bounds, *more, "--output", str(tmp_path)]) == 1
    told = capsys.readouterr()
    report = from_json((tmp_path / "report.json").read_text(encoding="utf-8"))
    (line,) = (item.words for item in report.broken)
    assert line.startswith("all/kl_mean = ")
    assert (told.out.count(line), told.err.count(line)) == (2, 0), "first and last, as of every verdict"
    assert f"bound broken: {line}\n" in told.out
    assert line in (tmp_path / "report.md").read_text(encoding="utf-8").replace("\\", "")
    assert compared(report).matters == 99
    given = f"--reference {genai_export('llama')} --tasks {NAMES[0]} --include-path {folder}"
    whole = f"{changed} {given} {shlex.join(more)}".replace(f"{Path.cwd()}/", "")
    assert compared(report).arguments == whole, "commands of the next step are whole"


def test_first_lines_name_the_model_and_where_answers_are_kept(
    changed: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("evaluate", str(changed), "--tasks", ",".join(NAMES), "--include-path", str(folder), "--limit", "2")
    asked = (*asked, "--reference", str(genai_export("llama")), "--isolation", "none")
    told = []
    for more in ((), ("--output", str(tmp_path)), ("--output", str(tmp_path)), ("--output", str(tmp_path))):
        main([*asked, *more, *(("--limit", "3") if len(told) == 3 else ())])
        told.append([line for line in capsys.readouterr().err.splitlines() if " to compute" in line])
    assert [line.partition(":")[2].partition(":")[0].strip() for line in told[0]] == [
        "Scoring by the evaluated model",
        "Scoring texts by the evaluated model",
        "Generating by the evaluated model",
        "Generating by the reference",
    ]
    first, kept, resumed, _ = (lines[0].rpartition("; ")[2] for lines in told)
    assert "output folder" in first
    assert kept.endswith(f" '{tmp_path / 'journal'}'")
    assert resumed.startswith(f"{kept}, ")
    assert " 2 " in resumed
    assert all(": nothing is left" in line for line in told[2]), "what is kept is not computed again"
    assert [": 1 document, " in line for line in told[3]] == [True] * len(told[0]), "of three documents two are kept"


@pytest.mark.parametrize("mode", ["resident", "recorded"])
@pytest.mark.parametrize("kind", ["onnx", "hf"])
def test_known_change_gives_the_divergence_of_the_whole_logits(
    folder: Path, records: str, changed: Path, kind: str, mode: str
) -> None:
    reference = genai_export("llama") if kind == "onnx" else hf_model("llama")
    report = run(changed, reference, mode, folder, records, tasks=["tiny_rolling"])
    found = by_task(report)["tiny_rolling"]
    words = WORDS.split()
    texts = [" ".join(words[start:]) for start in range(1, 7)]
    kl, ratio, top, agreement = [], [], [], []
    for text in texts:
        p, q, targets = whole_distributions(text)
        rows = np.arange(len(targets))
        kl += (np.exp(p) * (p - q)).sum(1).tolist()
        ratio += (p - q)[rows, targets].tolist()
        best = p.argmax(1)
        top += (np.exp(q[rows, best]) - np.exp(p[rows, best])).tolist()
        agreement += (best == q.argmax(1)).tolist()
    assert (found.num_documents, found.num_positions) == (len(texts), len(kl))
    assert found.kl.mean == pytest.approx(np.mean(kl), rel=1e-4)
    assert found.kl.maximum == pytest.approx(max(kl), rel=1e-4)
    assert found.kl.p90 == pytest.approx(np.percentile(kl, 90), rel=1e-4)
    assert found.perplexity_ratio == pytest.approx(math.exp(np.mean(ratio)), rel=1e-5)
    assert found.top_probability_rms == pytest.approx(math.sqrt(np.mean(np.square(top))), rel=1e-3)
    assert found.top1_agreement == pytest.approx(np.mean(agreement))
    assert found.kl.mean > 1e-3


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("out")


@pytest.fixture(scope="module")
def quantized(folder: Path, out: Path) -> dict[str, Report]:
    """An int4 export against the float one, resident, recorded, recorded once more, and alone."""
    records = str(out / "records")
    int4, reference = genai_export("llama", precision="int4"), genai_export("llama")
    found = {mode: run(int4, reference, mode, folder, records) for mode in ("resident", "recorded")}
    found["again"] = run(int4, reference, "recorded", folder, records, sample_log_num=6, output_dir=str(out))
    given = {"tasks": NAMES, "include_path": str(folder), "bootstrap_iters": 0}
    found["alone"] = evaluate(EvaluationConfig.parse({"model": {"path": str(int4)}, **given}))
    return found


def test_both_modes_find_the_same_beside_own_metrics_which_are_those_without_a_reference(
    quantized: dict[str, Report],
) -> None:
    resident, recorded = (by_task(quantized[mode]) for mode in ("resident", "recorded"))
    assert list(resident) == [*NAMES, ALL]
    for task, found in resident.items():
        assert recorded[task].num_positions == found.num_positions
        assert recorded[task].kl.mean == pytest.approx(found.kl.mean, rel=1e-4)
        assert recorded[task].perplexity_ratio == pytest.approx(found.perplexity_ratio, rel=1e-5)
    assert compared(quantized["recorded"]).outcomes == compared(quantized["resident"]).outcomes
    assert compared(quantized["recorded"]).flips == compared(quantized["resident"]).flips
    alone = {(metric.task, metric.metric, metric.filter): metric.value for metric in quantized["alone"].metrics}
    for mode in ("resident", "recorded"):
        own = {(metric.task, metric.metric, metric.filter): metric.value for metric in quantized[mode].metrics}
        assert {key: own[key] for key in alone} == pytest.approx(alone, rel=1e-5)


def test_later_runs_ask_the_reference_nothing_and_report_and_logs_hold_the_comparison(
    quantized: dict[str, Report], out: Path
) -> None:
    first, again = (compared(quantized[mode]).reference for mode in ("recorded", "again"))
    assert first["tokens_fed"] > 0
    assert again["tokens_fed"] == 0
    assert by_task(quantized["again"]) == by_task(quantized["recorded"])
    assert from_json((out / "report.json").read_text()).comparison == compared(quantized["again"])
    lines = [json.loads(line) for line in (out / "samples_tiny_rolling.jsonl").read_text().splitlines()]
    assert all(line["olive_ext"]["kl_mean"] > 0 for line in lines)


def test_other_tokenizers_are_refused_by_name_before_anything_runs(folder: Path, records: str, tmp_path: Path) -> None:
    def swapped(content: Any) -> None:
        vocab = content["model"]["vocab"]
        first, second = list(vocab)[300:302]
        vocab[first], vocab[second] = vocab[second], vocab[first]

    other = copied(tmp_path, "other", tokenizer=swapped)
    for mode in ("recorded", "resident"):
        with refused(ConfigError, "not_comparable", holds="other"):
            run(genai_export("llama"), other, mode, folder, records)


def test_reference_of_lm_evals_own_model_is_asked_and_read_as_that_is(tmp_path: Path) -> None:
    """Else the reference's thoughts were its answer, and the two models' values differ by that alone."""
    (tmp_path / "toy.py").write_text(
        "import datasets\n\n\ndef load(**_):\n    return {'test': datasets.Dataset.from_list([{'q': 'the cat'}] * 2)}\n"
        "\n\ndef size(doc, results):\n    return {'size': float(len(results[0]))}\n",
        encoding="utf-8",
    )
    (tmp_path / "sizes.yaml").write_text(
        "task: sizes\ncustom_dataset: !function toy.load\ntest_split: test\noutput_type: generate_until\n"
        "doc_to_text: '{{q}}'\ndoc_to_target: ''\ngeneration_kwargs: {until: [], max_gen_toks: 12}\n"
        "process_results: !function toy.size\n"
        "metric_list: [{metric: size, aggregation: mean, higher_is_better: true}]\nmetadata: {version: 1}\n",
        encoding="utf-8",
    )
    pair = {"model": {"path": str(hf_model("llama"))}, "reference": {"path": str(genai_export("llama"))}}
    how = {**pair, "tasks": ["sizes"], "include_path": str(tmp_path), "device": "cpu"}
    means = []
    for more in ({}, {"model_args": {"think_end_token": "e"}}):
        lm = HFLM(str(hf_model("llama")), device="cpu", dtype="float32", **more.get("model_args", {}))
        found = compared(evaluate(EvaluationConfig.parse({**how, **more}), lm=lm))
        (outcome,) = found.outcomes
        assert (found.reference["mode"], found.divergences, outcome.difference) == ("answers", (), 0)
        means.append(outcome.reference)
    assert means[1] < means[0]


@pytest.mark.parametrize("is_short", ["model", "reference"])
def test_texts_longer_than_one_models_context_are_cut_alike(
    folder: Path, records: str, tmp_path: Path, is_short: str
) -> None:
    short = copied(tmp_path, "short", lambda content: content["model"].update(context_length=16))
    long = genai_export("llama")
    pair = (short, long) if is_short == "model" else (long, short)
    found = [by_task(run(*pair, mode, folder, records)) for mode in ("resident", "recorded")]
    for task in ("tiny_choice", "tiny_rolling"):
        assert found[0][task].num_positions == found[1][task].num_positions
        assert max(abs(each[task].kl.maximum) for each in found) < 1e-6


def copied(folder: Path, name: str, config: Any = None, tokenizer: Any = None, template: str | None = None) -> Path:
    """The float export with parts of its files as given."""
    path = folder / name
    shutil.copytree(genai_export("llama"), path)
    for file, change in (("genai_config.json", config), ("tokenizer.json", tokenizer)):
        if change is not None:
            content = json.loads((path / file).read_text())
            change(content)
            (path / file).write_text(json.dumps(content))
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    return path


def answered(model: Path, reference: Path, folder: Path, tmp_path: Path, name: str, **more: Any) -> Report:
    settings = {"output_dir": str(tmp_path / name), "sample_log_num": 1000, **more}
    return run(model, reference, "auto", folder, str(tmp_path / "records"), **settings)


def with_ends(tmp_path: Path) -> tuple[int, dict[str, Path]]:
    """A token that ends some answers, and packages that stop at it and at 1 in either order, and at 1 alone."""
    plain = genai_export("llama")
    with OrtLM(str(plain)) as lm:
        answers = lm.session.generate([WORDS[:size] for size in range(3, 50)], max_new_tokens=6)
    end, _ = Counter(token for answer in answers for token in {*answer.tokens}).most_common(1)[0]

    def ends(ids: list[int]) -> Any:
        return lambda content: content["model"].update(eos_token_id=ids)

    named = {"whole": [1, end], "same": [end, 1], "lost": [1]}
    return end, {name: copied(tmp_path, name, ends(ids)) for name, ids in named.items()}


def test_a_lost_end_token_is_never_green(folder: Path, tmp_path: Path) -> None:
    """Each side stops by its own genai_config.json, and the page sees the other."""
    end, packages = with_ends(tmp_path)
    whole, lost = packages["whole"], packages["lost"]
    tasks = {"tasks": ["tiny_generate"]}
    report = answered(lost, whole, folder, tmp_path, "out", **tasks)
    stops, found = compared(report).stops, verdict(compared(report))
    assert (stops.missing, stops.candidate_file, stops.reference_file) == ((end,), *["genai_config.json"] * 2)
    assert compared(report).changed_answers > 0
    assert found.status not in ("ok", "small_loss")
    assert f"token {end}" in found.finding
    healthy = compared(answered(packages["same"], whole, folder, tmp_path, "same_out", **tasks))
    assert (healthy.changed_answers, verdict(healthy).code) == (0, "no_difference")
    (lost / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, end]}))
    findings = check_model(EvaluationConfig.parse({"model": {"path": str(lost)}, "tasks": ["size_on_disk"]}))
    assert tells(findings.text(), "generation_config.json genai_config.json")
    ends = [fact.reason for section in findings.sections for fact in section.facts if fact.name == "end at"]
    assert ends == ["genai_config.json"]


def test_a_lost_begin_of_text_is_named_and_leaves_the_reference_as_it_is(folder: Path, tmp_path: Path) -> None:
    plain, tasks = genai_export("llama"), {"tasks": ["tiny_choice"]}
    lost = copied(tmp_path, "lost", tokenizer=lambda content: content.update(post_processor=None))
    alone = compared(answered(copied(tmp_path, "same"), plain, folder, tmp_path, "same_out", **tasks))
    report = answered(lost, plain, folder, tmp_path, "out", **tasks)
    asked, found = compared(report).asked, verdict(compared(report))
    assert (len(asked.what), asked.files) == (1, ("tokenizer.json",))
    assert asked.reference_prompt.endswith(asked.candidate_prompt)
    assert asked.reference_prompt != asked.candidate_prompt
    assert (found.code, compared(report).divergences) == ("asked", ())
    assert compared(report).metrics["results"] == alone.metrics["results"]
    assert alone.asked is None


@pytest.mark.parametrize(("limit", "code"), [(2, "damaged"), (3, "asked")])
def test_a_tokenizer_that_other_texts_would_show_asks_as_its_tokens_of_all_documents_say(
    limit: int, code: str, folder: Path, tmp_path: Path
) -> None:
    """The third document has the word in one of its choices alone. Digests were shown as the prompts."""

    def damage(content: Any) -> None:
        changed = [{"type": "Replace", "pattern": {"String": one}, "content": to} for one, to in ("83", ("mat", "hat"))]
        content["normalizer"] = {"type": "Sequence", "normalizers": changed}

    other, plain = copied(tmp_path, "other", tokenizer=damage), genai_export("llama")
    made = compared(answered(other, plain, folder, tmp_path, "out", tasks=["tiny_choice"], limit=limit))
    shown = made.asked.reference_prompt, made.asked.candidate_prompt
    prompt = "<bos>the cat sat "
    assert (made.asked.are_alike, shown) == (
        (True, ("", "")) if limit == 2 else (False, (f"{prompt}mat", f"{prompt}hat"))
    )
    found = verdict(made)
    assert (found.status, found.code, made.divergences) == ("unknown", code, ())
    assert "tokenizer.json" in found.headline
    assert "tokenizer.json" in found.next_step
    alone = asked(other, plain)
    assert (alone.candidate_prompt, alone.are_alike) == ("", False)


TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"


@pytest.mark.parametrize(
    ("damage", "mode", "named", "is_found"),
    [
        (("m['content']", "m.content"), "resident", False, None),
        (("m['content']", "m.content"), "recorded", False, None),
        (("{{", "Say: {{"), "resident", False, True),
        (("m['content']", "(m.content if m.content | length < 5 else 'no')"), "resident", False, True),
        (("m['content']", "(m.content if 'cat' not in m.content else 'no')"), "recorded", False, True),
        (("", ""), "recorded", True, True),
    ],
    ids=["written otherwise", "recorded", "all", "long", "a word of the second document", "the one that is named"],
)
def test_a_chat_template_counts_by_what_it_makes_of_the_tasks(
    damage: tuple[str, str], mode: str, named: bool, is_found: bool | None, folder: Path, tmp_path: Path
) -> None:
    paths = {}
    for name, text in (("whole", TEMPLATE), ("other", TEMPLATE.replace(*damage))):
        paths[name] = copied(tmp_path, name, template=text)
        (paths[name] / "additional_chat_templates").mkdir()
        (paths[name] / "additional_chat_templates" / "rag.jinja").write_text(f"{name}: {text}" if named else text)
    more: dict[str, Any] = {"tasks": ["tiny_generate"], "limit": 2, "output_dir": str(tmp_path / "out")}
    where = mode, folder, str(tmp_path / "records")
    made = run(paths["other"], paths["whole"], *where, **more, apply_chat_template="rag" if named else True)
    asked, found = compared(made).asked, verdict(compared(made))
    assert compared(made).other_template is (is_found is None)
    assert (found.code == "asked", "template" in [reason.code for reason in found.reasons]) == (
        bool(is_found),
        not is_found,
    )
    if is_found:
        file = "additional_chat_templates/rag.jinja" if named else "chat_template.jinja"
        assert (asked.what, asked.files[-1], compared(made).divergences) == (("chat template",), file, ())
        assert asked.reference_prompt != asked.candidate_prompt
        assert len(asked.candidate_prompt) < 200


@pytest.mark.parametrize(("uses_chat", "code"), [(True, "asked"), (False, "no_difference")])
def test_special_tokens_that_take_white_space_are_named_where_chats_are_asked(
    uses_chat: bool, code: str, folder: Path, tmp_path: Path
) -> None:
    """The reference was asked with the candidate's tokens, which lack the template's line ends: it was green."""

    def strips(content: Any) -> None:
        content["added_tokens"] = [{**token, "rstrip": True} for token in content["added_tokens"]]

    template = "{% for m in messages %}{{ bos_token }}\n{{ m['content'] }}{% endfor %}"
    edits = {"plain": None, "other": strips}
    plain, other = (copied(tmp_path, name, tokenizer=edit, template=template) for name, edit in edits.items())
    report = run(other, plain, "resident", folder, str(tmp_path), tasks=["tiny_choice"], apply_chat_template=uses_chat)
    asked = compared(report).asked
    assert verdict(compared(report)).code == code
    assert (asked is None) is not uses_chat
    assert asked is None or (asked.what, asked.files) == (("tokens of a chat",), ("tokenizer.json",))


def test_a_tokenizer_that_writes_two_tokens_of_an_answer_otherwise_is_damage(tmp_path: Path) -> None:
    """Each token alone has the same text. The reference's answers were written by it, too: both scored 0."""
    plain, tokens = genai_export("llama"), (70, 71, 72)
    two = load_tokenizer(str(plain)).decode(tokens[:2])
    other = {"type": "Replace", "pattern": {"String": two}, "content": "!"}

    def edit(content: Any) -> None:
        content["decoder"] = {"type": "Sequence", "decoders": [content["decoder"], {"type": "Fuse"}, other]}

    for name, change, is_told in (("other", edit, True), ("same", None, False)):
        given = {"model": {"path": str(copied(tmp_path, name, tokenizer=change))}, "tasks": ["t"]}
        found = Models(EvaluationConfig.parse({**given, "reference": {"path": str(plain)}})).other_text([(9,), tokens])
        assert ("'!" in found) is bool(found) is is_told


def test_chat_templates_that_no_chat_uses_are_not_compared(folder: Path, tmp_path: Path) -> None:
    other = copied(tmp_path, "other", template=f"Say: {TEMPLATE}")
    report = answered(other, genai_export("llama"), folder, tmp_path, "out", tasks=["tiny_generate"], limit=2)
    assert (compared(report).asked, compared(report).other_template) == (None, False)


def test_files_are_compared_beyond_max_length_of_opened_and_of_float_models_too(folder: Path, tmp_path: Path) -> None:
    """Users give it for speed, and the model ships without it."""

    def damage(model: onnx.ModelProto) -> None:
        edited.change(
            edited.weight(model, "cos_cache"), lambda rows: np.where(np.arange(len(rows))[:, None] < 128, rows, 0)
        )

    other, plain = edited.edited(genai_export("llama"), tmp_path / "other", damage), genai_export("llama")
    with OrtLM(str(other), max_length=64) as lm:
        for given in (None, lm):
            settings = {"tasks": ["tiny_choice"], "limit": 2, "lm": given, "max_length": 64}
            assert [*compared(answered(other, plain, folder, tmp_path, str(given), **settings)).damaged] == [
                "cos_cache"
            ]
    assert main(["check", str(other), "--against", str(hf_model("llama")), "--max-length", "64"]) == 1


def test_a_pipeline_s_graph_of_single_tokens_is_compared_where_no_answer_runs_it(folder: Path, tmp_path: Path) -> None:
    """Scored answers are read by the graph of prompts alone: scales of the other one's attentions were not named."""
    source = pipeline_package("llama")
    shutil.copytree(source, tmp_path / "own")
    stage = onnx.load(source / "iterator_0.onnx")
    for entry in (entry for node in stage.graph.node for entry in node.attribute if entry.name == "scale"):
        entry.f = 0.3
    onnx.save(stage, tmp_path / "own" / "iterator_0.onnx")
    found = compared(
        answered(tmp_path / "own", source, folder, tmp_path, "out", tasks=["tiny_choice"], limit=2)
    ).damaged
    assert [name for name in found if name.endswith("/attn/GroupQueryAttention, iterator_0.onnx")], found


def test_a_package_of_a_shorter_context_is_named(folder: Path, tmp_path: Path, capsys: Any) -> None:
    """The context of both is the shorter one's, so that nothing beyond is compared."""

    def shorten(content: Any) -> None:
        content["model"].update(context_length=64)
        content["search"].update(max_length=64)

    cut, hf = copied(tmp_path, "cut", shorten), hf_model("llama")
    report = answered(cut, genai_export("llama"), folder, tmp_path, "out", tasks=["tiny_choice"], limit=2)
    assert compared(report).contexts == (64, 512)
    assert "allow 64 tokens, the reference's 512" in verdict(compared(report)).finding

    def contexts(model: Path, **more: Any) -> tuple[int, int] | None:
        config = {"model": {"path": str(model)}, "reference": str(hf), "tasks": ["t"], **more}
        return Models(EvaluationConfig.parse(config)).contexts

    assert [contexts(cut), contexts(genai_export("llama")), contexts(cut, max_length=64)] == [(64, 512), None, None]
    assert main(["check", str(cut), "--against", str(hf)]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert re.search(r"genai_config.json .*\b512\b", told)
    assert "context length 64 of 512" in told


def asked(model: Path, reference: Path, **settings: Any) -> PromptDiff | None:
    config = {"model": {"path": str(model)}, "reference": str(reference), "tasks": ["t"], **settings}
    return Models(EvaluationConfig.parse(config)).prompt_diff


def test_an_evaluations_own_bos_is_both_models(tmp_path: Path) -> None:
    lost = copied(tmp_path, "lost", tokenizer=lambda content: content.update(post_processor=None))
    assert asked(lost, genai_export("llama")) is not None
    given = {"reference": str(genai_export("llama")), "tasks": ["t"], "model_args": {"add_bos_token": True}}
    assert asked(lost, genai_export("llama"), model_args=given["model_args"]) is None
    found = [
        Models(EvaluationConfig.parse({"model": {"path": str(path)}, **given})).unjudged
        for path in (lost, copied(tmp_path, "kept"))
    ]
    assert [[*one] for one in found] == [["model_args.add_bos_token"], []]


def test_files_that_name_no_token_for_an_empty_context_ask_nothing_else(tmp_path: Path) -> None:
    """Without tokenizer_config.json distributions were not compared, also where no task has an empty context."""
    bare, whole = copied(tmp_path, "bare"), genai_export("llama")
    (bare / "tokenizer_config.json").unlink()
    assert [asked(bare, whole), asked(whole, bare)] == [None, None]


@pytest.mark.parametrize("how", ["in the cache alone", "in steps of one token"])
def test_a_model_that_only_continues_texts_wrongly_is_named_where_none_is_continued(
    how: str, folder: Path, tmp_path: Path
) -> None:
    """Whole texts have the reference's numbers: the verdict was "no difference found"."""

    path = edited.edited(genai_export("llama"), tmp_path / "model", partial(edited.continue_wrongly, how=how))
    report = answered(path, genai_export("llama"), folder, tmp_path, "out", tasks=["tiny_choice"])
    found, divergence = verdict(compared(report)), compared(report).overall_divergence()
    assert divergence.kl.maximum < 1e-4
    assert (found.status, found.code, [*compared(report).damaged]) == ("unknown", "damaged", ["the KV cache"])


@pytest.mark.parametrize(("bounds", "status"), [((), 0), (("--require", "acc>=0"), 3), (("--require", "acc>=1"), 1)])
def test_damage_is_told_without_a_reference_and_a_kept_bound_does_not_pass_it(
    bounds: tuple[str, ...], status: int, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = edited.edited(genai_export("llama"), tmp_path / "model", edited.continue_wrongly)
    asked = ("--tasks", "tiny_choice", "--include-path", str(folder), "--limit", "4", "--output", str(tmp_path / "out"))
    assert main(["evaluate", str(path), *asked, *bounds]) == status
    page = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert [text.count(f"damaged: '{KV_CACHE}'") for text in (capsys.readouterr().out, page)] == [1, 1]


MORE = {"an adapter": ((8, 4), ["lora_A"]), "a bias a layer": ((8,), ["0.bias", "1.bias"]), "a mask": ((8,), ["mask"])}


@pytest.mark.parametrize(
    "beside", ["nothing", *MORE, "other weights", "products in bfloat16", "a reference in bfloat16"]
)
def test_a_graph_that_computes_otherwise_with_the_references_weights_is_damaged(
    beside: str, folder: Path, tmp_path: Path
) -> None:
    """An export in fp32 without one of its heads was "as with weights of 4 to 5 bits", and no loss was found. What was
    changed on purpose, or rounds, may be as far."""

    def rounded(model: onnx.ModelProto) -> None:
        model.graph.node.append(helper.make_node("Cast", ["logits"], ["unread"], to=onnx.TensorProto.BFLOAT16))

    def flattened(model: onnx.ModelProto) -> None:
        next(node for node in model.graph.node if node.output[0] == "logits").output[0] = "right"
        model.graph.initializer.append(numpy_helper.from_array(np.float32(0.5), "least"))
        model.graph.node.append(helper.make_node("Max", ["right", "least"], ["logits"]))
        shape, names = MORE.get(beside, ((), ()))
        for name in names:
            model.graph.initializer.append(numpy_helper.from_array(np.ones(shape, np.float32), name))
            model.graph.node.append(helper.make_node("Identity", [name], [f"{name}_read"]))
        if beside == "products in bfloat16":
            rounded(model)
        for tensor in model.graph.initializer if beside == "other weights" else ():
            if len(tensor.dims) == 2:
                tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * 1.001, tensor.name))

    path = edited.edited(genai_export("llama"), tmp_path / "model", flattened)
    reference = genai_export("llama")
    if beside == "a reference in bfloat16":
        reference = edited.edited(reference, tmp_path / "reference", rounded)
    found = compared(answered(path, reference, folder, tmp_path, "out", tasks=["tiny_choice"]))
    assert (GRAPH in found.damaged) is (beside in ("nothing", "a mask"))


@pytest.mark.parametrize(("tokens", "is_named"), [(1, True), (4, False)])
def test_answers_of_one_token_continue_nothing(tokens: int, is_named: bool, folder: Path, tmp_path: Path) -> None:
    """The first token comes from the prompt's step: no step of one token was seen, and the sentence did not say it."""
    same = edited.edited(genai_export("llama", None), tmp_path / "model", lambda model: None)
    settings = {"tasks": ["tiny_generate"], "gen_kwargs": {"max_gen_toks": tokens}, "limit": 2}
    found = compared(answered(same, genai_export("llama", None), folder, tmp_path, "out", **settings))
    assert (GENERATED in found.reach.unseen) is is_named


@pytest.mark.parametrize("mode", ["resident", "recorded"])
def test_a_graph_whose_texts_cannot_share_a_step_is_damaged_unless_the_references_is_so(
    mode: str, folder: Path, tmp_path: Path
) -> None:
    """A server that batches requests gets other numbers. Alone each is right: "no difference found" said no more."""
    alone, plain = step_wide_export("batch_size", "genai"), genai_export("llama", None)
    same = edited.edited(plain, tmp_path / "model", lambda model: None)
    for model, reference, damaged in ((alone, plain, [KV_CACHE]), (same, plain, []), (alone, alone, [])):
        comparison = compared(run(model, reference, mode, folder, str(tmp_path / "records"), tasks=["tiny_choice"]))
        assert ([*comparison.damaged], SHARED in comparison.reach.unseen) == (damaged, model is alone)


@pytest.mark.parametrize(
    ("kinds", "problem"),
    [("tokens after a past", "texts fed in parts"), ("rows of a token", "texts beside others"), ("", "")],
)
def test_a_graph_that_its_steps_decide_is_damaged_where_a_trial_shows_it(
    kinds: str, problem: str, folder: Path, tmp_path: Path
) -> None:
    """Where several tokens follow a past, as a conversation's next turn does, or several rows have one token each. What
    a step decides without a number that changes is no finding, and neither is what the reference's own graph does."""

    def decided(model: onnx.ModelProto) -> None:
        next(node for node in model.graph.node if node.output[0] == "logits").output[0] = "right"
        values = {"first": [0], "second": [1], "ones": [1, 1]}
        model.graph.initializer.extend(numpy_helper.from_array(np.array(value), name) for name, value in values.items())
        make = helper.make_node
        model.graph.node.extend([
            make("Shape", ["input_ids"], ["sizes"]),
            make("Shape", ["attention_mask"], ["all_sizes"]),
            make("Gather", ["sizes", "first"], ["rows"]),
            make("Gather", ["sizes", "second"], ["tokens"]),
            make("Gather", ["all_sizes", "second"], ["positions"]),
            *{
                "tokens after a past": [
                    make("Less", ["tokens", "positions"], ["continues"]),
                    make("Greater", ["tokens", "second"], ["several"]),
                ],
                "rows of a token": [
                    make("Equal", ["tokens", "second"], ["continues"]),
                    make("Greater", ["rows", "second"], ["several"]),
                ],
            }.get(kinds, [make("Equal", ["tokens", "second"], [name]) for name in ("continues", "several")]),
            make("And", ["continues", "several"], ["is_wrong"]),
            make("Neg" if kinds else "Identity", ["right"], ["other"]),
            make("Where", ["is_wrong", "other", "right"], ["logits"]),
        ])  # fmt: skip

    path = edited.edited(genai_export("llama"), tmp_path / "model", decided)
    report = answered(path, genai_export("llama"), folder, tmp_path, "out", tasks=["tiny_choice"])
    divergence, damaged = compared(report).overall_divergence(), compared(report).damaged
    assert divergence.kl.maximum < 1e-4
    assert problem in damaged.get(KV_CACHE, "")
    assert (verdict(compared(report)).code == "damaged") == bool(problem) == (KV_CACHE in damaged)


@pytest.mark.parametrize("suppressed", [[], [5]])
def test_answers_that_contradict_the_models_own_scores_are_damage_unless_tokens_are_suppressed(
    suppressed: list[int], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Observer, "contradicted", lambda *_: "writes other answers than it scores")
    path = copied(tmp_path, "model")
    (path / "genai_config.json").unlink()
    (path / "generation_config.json").write_text(json.dumps({"suppress_tokens": suppressed}))
    found = compared(answered(path, genai_export("llama"), folder, tmp_path, "out", tasks=["tiny_generate"]))
    assert [*found.damaged] == ([] if suppressed else [KV_CACHE])


@pytest.mark.parametrize("mode", ["resident", "recorded"])
@pytest.mark.parametrize(("value", "codes"), [(-1e4, {"no_difference"}), (30.0, {"far", "loss"})])
def test_a_padded_vocabulary_is_compared_by_its_tokens(
    value: float, codes: set[str], mode: str, folder: Path, records: str, tmp_path: Path
) -> None:
    """Ids that no token has are left out, unless the candidate takes to them."""

    def padded(model: onnx.ModelProto) -> None:
        next(node for node in model.graph.node if node.output[0] == "logits").output[0] = "right"
        edited.change(edited.weight(model, HEAD), lambda values: np.pad(values, ((0, 0), (0, 96))))
        bias = np.pad(np.zeros(1024, np.float32), (0, 96), constant_values=value)
        model.graph.initializer.append(numpy_helper.from_array(bias, "bias"))
        model.graph.node.append(helper.make_node("Add", ["right", "bias"], ["logits"]))
        (logits,) = (one for one in model.graph.output if one.name == "logits")
        logits.type.tensor_type.shape.dim[2].dim_value = 1120

    path = edited.edited(genai_export("llama"), tmp_path / "model", padded)
    config = json.loads((path / "genai_config.json").read_text())
    config["model"]["vocab_size"] = 1120
    (path / "genai_config.json").write_text(json.dumps(config))
    report = run(path, genai_export("llama"), mode, folder, records, tasks=["tiny_choice", "tiny_rolling"])
    assert verdict(compared(report)).code in codes


SLIDING = {"window_size": 16, "slide_key_value_cache": True, "slide_inputs": False}
OTHER = "genai_config.json 'other.onnx' 'onnx_file_name' 'model.onnx'"
UNJUDGED: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]] = [
    # model's keys and decoder's keys of genai_config.json, settings, what is not judged
    ({"vocab_size": 100}, {}, {}, "genai_config.json model.vocab_size 100 1024"),
    ({"type": "nosuch"}, {}, {}, "genai_config.json model.type 'nosuch' 'llama'"),
    ({"type": "whisper"}, {}, {}, "genai_config.json model.type 'whisper' 'llama'"),
    ({"type": "gpt2"}, {}, {}, "genai_config.json model.type 'gpt2' 'llama'"),
    ({"type": "decoder"}, {}, {}, ""),
    ({}, {"num_key_value_heads": 1}, {}, "genai_config.json model.decoder.num_key_value_heads 1 2"),
    ({}, {"head_size": 64}, {}, "genai_config.json model.decoder.head_size 64 16"),
    ({"context_length": 4096}, {}, {}, "genai_config.json model.context_length 4096 rotary"),
    ({}, {"sliding_window": SLIDING}, {}, "genai_config.json model.decoder.sliding_window.slide_key_value_cache"),
    ({}, {"sliding_window": {**SLIDING, "slide_key_value_cache": False}}, {}, ""),
    ({}, {"filename": "other.onnx"}, {"onnx_file_name": "model.onnx"}, OTHER),
    ({}, {"filename": "absent.onnx"}, {"onnx_file_name": "model.onnx"}, "genai_config.json 'absent.onnx'"),
    ({}, {"inputs": {"past_key_names": "past.%d.k"}}, {}, "model.decoder.inputs.past_key_names 'past.%d.k'"),
    ({}, {"inputs": {"input_ids": "ids"}}, {}, "model.decoder.inputs.input_ids 'ids'"),
    ({}, {}, {"onnx_file_name": "model.onnx", "tokenizer": hf_model("llama")}, ""),
    ({"lower": True}, {}, {"tokenizer": hf_model("llama")}, "tokenizer tokens"),
]


def shipped(tmp_path: Path, of_model: Any, of_decoder: Any, settings: Any) -> dict[str, Any]:
    """The settings of a package whose genai_config.json has other values."""

    def config(content: Any) -> None:
        content["model"].update({name: value for name, value in of_model.items() if name != "lower"})
        content["model"]["decoder"].update(of_decoder)

    def tokenizer(content: Any) -> None:
        content.update({"normalizer": {"type": "Lowercase"}} if "lower" in of_model else {})

    path = copied(tmp_path, "model", config, tokenizer)
    shutil.copy(path / "model.onnx", path / "other.onnx")
    rest = {name: str(value) for name, value in settings.items()}
    own = {"path": str(path), **{name: rest.pop(name) for name in ("onnx_file_name",) if name in rest}}
    return {"model": own, "reference": str(genai_export("llama")), "tasks": ["tiny_choice"], **rest}


@pytest.mark.parametrize(("of_model", "of_decoder", "settings", "what"), UNJUDGED)
def test_what_ships_and_is_not_judged_is_named(
    of_model: Any, of_decoder: Any, settings: Any, what: str, tmp_path: Path
) -> None:
    """onnxruntime-genai runs by genai_config.json and the package's own tokenizer."""
    given = shipped(tmp_path, of_model, of_decoder, settings)
    found = " ".join(f"{name} {how}" for name, how in Models(EvaluationConfig.parse(given)).unjudged.items())
    assert tells(found, what)
    assert bool(found) == bool(what)
    own = {name: given[name] for name in ("tokenizer",) if name in given} | given["model"]
    copy = shutil.copytree(own["path"], tmp_path / "copy")
    for folder, is_known in ((own["path"], True), (copy, "not judged" not in found)):
        itself = Models(EvaluationConfig.parse({**given, "reference": {**own, "path": str(folder)}}))
        reference = {UNJUDGED_FACT: itself.unjudged_of_reference}
        assert bool(damage_of(reference, {UNJUDGED_FACT: itself.unjudged})) != is_known


@pytest.mark.parametrize("kind", ["nosuch", "decoder-pipeline"])
def test_a_type_that_runs_as_one_graph_is_judged_beside_a_reference_of_any(kind: str, tmp_path: Path) -> None:
    other = copied(tmp_path, "reference", lambda content: content["model"].update(type=kind))
    given = {"model": {"path": str(genai_export("llama"))}, "reference": str(other), "tasks": ["tiny_choice"]}
    assert not Models(EvaluationConfig.parse(given)).unjudged


USER = "<|user|>"


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"chat_template": "{{ x }}"}, ["tokenizer_config.json"]),
        ({"chat_template": "{{  y }}"}, []),
        ({"extra_special_tokens": [USER]}, ["tokenizer.json"]),
        ({"extra_special_tokens": {"user_token": USER}}, ["tokenizer.json"]),
        ({"extra_special_tokens": ["<eos>"]}, []),
        ({"extra_special_tokens": [USER], "added_tokens_decoder": {"1019": {"content": USER}}}, []),
    ],
)
def test_a_second_template_and_transformers_own_special_tokens_are_named_where_chats_are_asked(
    config: dict[str, Any], named: list[str], tmp_path: Path
) -> None:
    """onnxruntime-genai splits such tokens."""
    settings = shipped(tmp_path, {}, {}, {})
    folder = Path(settings["model"]["path"])
    if "chat_template" in config:
        (folder / "chat_template.jinja").write_text("{{ y }}\n")
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    for is_asked in (True, False):
        asked = EvaluationConfig.parse({**settings, "apply_chat_template": is_asked})
        assert [*Models(asked).unjudged] == named * is_asked


def test_constants_that_cannot_be_compared_are_a_finding(tmp_path: Path) -> None:
    hf = shutil.copytree(hf_model("llama"), tmp_path / "other")
    (hf / "model.safetensors").write_bytes(b"\x08" + bytes(15))
    model, reference = str(genai_export("llama")), {"path": str(hf), "export": "never"}
    config = EvaluationConfig.parse({"tasks": ["a"], "model": {"path": model}, "reference": reference})
    ((name, how),) = Models(config).damage(1e-5).findings.items()
    assert f"{name} {how}".startswith("the files' constants ")


def test_constants_of_a_graph_without_a_context_length_are_compared(tmp_path: Path) -> None:
    """As of what Olive's OnnxConversion writes: a lossless one was not decided."""
    one, two = (str(put_model(tmp_path / name)) for name in ("one", "two"))
    models = Models(EvaluationConfig.parse({"tasks": ["a"], "model": {"path": one}, "reference": two}))
    assert models.given_candidate.context_length is None
    assert models.damage(5e-3) == ({}, (), 0, 1e-3)


def test_what_is_not_judged_is_never_green(folder: Path, tmp_path: Path, capsys: Any) -> None:
    config = shipped(tmp_path, *UNJUDGED[0][:3])
    report = evaluate(config, include_path=str(folder))
    assert verdict(compared(report)).code == "damaged"
    assert [*compared(report).damaged] == ["genai_config.json"]
    model = config["model"]["path"]
    settings = ["--tasks", "tiny_choice", "--include-path", str(folder)]
    assert main(["record", model, "--output", str(tmp_path / "own.records"), *settings]) == 0
    for reference in (model, str(tmp_path / "own.records")):  # which have it, too
        itself = evaluate({**config, "reference": reference}, include_path=str(folder))
        assert (verdict(compared(itself)).status, compared(itself).damaged) == ("ok", {})
    assert main(["check", model]) == 0
    assert "not judged" in capsys.readouterr().out
