"""Of the table: mistakes in calls of Python."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import olive_ext
from olive_ext.backends.lm_eval import OrtLM
from olive_ext.backends.task_loading import load_tasks
from olive_ext.config import EvaluationConfig, EvaluationSettings, ModelSettings
from olive_ext.records import Form, Records
from olive_ext.run import evaluate
from olive_ext.run.bounds import check_names, refuse_names
from olive_ext.session.requests import GenerationRequest, RollingRequest, ScoringRequest
from tests.backends.reference import MAX_LENGTH, instances, ort_lm, session
from tests.check.tiny import put_model

UNKNOWN, NO_NAME, WRONG, MISSING, AGAINST = "unknown_key", "unknown_name", "wrong_value", "missing", "contradiction"
NOT_FOUND, DENIED, UNFIT, TASK, NO_PAIR = "not_found", "no_access", "unsupported", "task", "not_comparable"
CUT = "\ud800"  # half of a surrogate pair

REQUESTS: list[tuple[Any, ...]] = [
    ({"prompt": None}, WRONG, "prompt"),
    ({"prompt": []}, WRONG, "prompt"),
    ({"prompt": {"role": "user"}}, WRONG, "prompt", "'role': 'user'"),
    ({"prompt": [{"content": "x"}]}, WRONG, "prompt", "role"),
    ({"prompt": [{"role": "user", "content": "x"}, "y"]}, WRONG, "prompt"),
    ({"prompt": ["a", "b"]}, WRONG, "prompt"),
    ({"prompt": b"ab"}, WRONG, "prompt", "ab"),
    ({"prompt": [1, -2]}, WRONG, "prompt", "-2"),
    ({"prompt": f"ab{CUT}"}, WRONG, "prompt", "2"),
    ({"prompt": [{"role": "a", "content": "é\udfff"}]}, WRONG, "prompt[0][content]", "1"),
    ({"prompt": [{"role": "a", "content": [{"text": CUT}]}]}, WRONG, "prompt[0][content][0][text]"),
    ({"source": CUT}, WRONG, "source", "0"),
    ({"source": 3.5}, WRONG, "source"),
    ({"stop": ["a", CUT]}, WRONG, "stop", "0"),
    ({"chat_template_kwargs": {"x": [CUT]}}, WRONG, "chat_template_kwargs[x][0]"),
    ({"max_new_tokens": 0}, WRONG, "max_new_tokens", "1", 0),
    ({"max_new_tokens": True}, WRONG, "max_new_tokens", "1", True),
    ({"max_new_tokens": 2.5}, WRONG, "max_new_tokens", "1", 2.5),
    ({"stop": ["a", ""]}, WRONG, "stop"),
    ({"stop": [5]}, WRONG, "stop", "5"),
    ({"stop": None}, WRONG, "stop"),
    ({"temperature": -0.1}, WRONG, "temperature", "0", -0.1),
    ({"temperature": math.nan}, WRONG, "temperature", "0", math.nan),
    ({"temperature": math.inf}, WRONG, "temperature", "0", math.inf),
    ({"temperature": None}, WRONG, "temperature", "0", None),
    ({"top_p": 0}, WRONG, "top_p", "1", 0),
    ({"top_p": 1.1}, WRONG, "top_p", "1", 1.1),
    ({"top_k": -1}, WRONG, "top_k", "0", -1),
    ({"seed": -1}, WRONG, "seed", "0", -1),
    ({"num_beams": 0}, WRONG, "num_beams", "1", 0),
    ({"num_return_sequences": 2}, WRONG, "num_return_sequences", "num_beams 1", 2),
    ({"num_beams": 2, "length_penalty": math.nan}, WRONG, "length_penalty", "1", math.nan),
    ({"num_beams": 2, "early_stopping": 1}, WRONG, "early_stopping", "never", 1),
    ({"num_beams": 2, "temperature": 0.5}, AGAINST, "num_beams", "temperature 0.5", 2),
    *(
        ({"thinking_budget": budget, "think_end_token": "e"}, WRONG, "thinking_budget", "0")
        for budget in (-1, 2.5, "8")
    ),
]

CHAT = [{"role": "user", "content": f"ab{CUT}"}]
SESSIONS: list[tuple[Any, ...]] = [
    (lambda s: s.generate(["a", GenerationRequest("a", max_new_tokens=512)]), WRONG, "max_new_tokens", "512", 512),
    (lambda s: s.generate(["a"], max_new_token=2), UNKNOWN, "max_new_token"),
    (lambda s: s.generate([], max_new_token=2), UNKNOWN, "max_new_token"),
    (lambda s: s.generate(["a"], max_new_tokens=0), WRONG, "max_new_tokens", "", 0),
    (lambda s: s.generate([GenerationRequest("a")], stop="b"), AGAINST, "stop"),
    (lambda s: s.loglikelihood([("a", "")]), WRONG, "target", "0"),
    (lambda s: s.loglikelihood_rolling(["a", f"ab{CUT}"]), WRONG, "text", "1 2"),
    (lambda s: s.generate([f"ab{CUT}"]), WRONG, "prompt", "0 2"),
    (lambda s: s.loglikelihood([(CHAT, "a")]), WRONG, "context[0][content]", "0 2"),
    (lambda s: s.loglikelihood(["ab"]), WRONG, "", "0"),
    (lambda s: s.loglikelihood("ab"), WRONG, "", "loglikelihood list text"),
    (lambda s: s.generate({"role": "user", "content": "ab"}), WRONG, "", "generate list dict"),
    (lambda s: s.loglikelihood(ScoringRequest("a", "b")), WRONG, "", "loglikelihood list ScoringRequest"),
    (lambda s: s.generate([[{"role": "user", "content": "the"}]]), UNFIT, "", "byte_level 0"),
    (lambda s: s.generate([GenerationRequest("a", source="b")]), UNFIT, "source"),
    (lambda s: s.as_completed("score", []), WRONG, "call", "loglikelihood_rolling", "score"),
    (lambda s: list(s.as_completed("generate", ["a", "b"])), WRONG, "", "generate list text"),
    (lambda s: s.stream("the", think_end_token="x"), WRONG, "think_end_token", "", "x"),
    (lambda s: s.stream("the", num_beams=2), UNFIT, "num_beams"),
    (lambda s: s.stream("the", max_new_token=3), UNKNOWN, "max_new_token", "'max_new_tokens'"),
    (lambda s: s.stream("the", max_new_tokens=0), WRONG, "max_new_tokens", "", 0),
    (lambda s: s.stream(GenerationRequest("the"), max_new_tokens=3), AGAINST, "max_new_tokens"),
]


def generated(**settings: Any) -> object:
    asked = instances("generate_until", [("the", {"max_gen_toks": 44, **settings})])
    return ort_lm().generate_until(asked, disable_tqdm=True)


def scored(here: Path, **settings: Any) -> object:
    return ort_lm(**settings).loglikelihood(instances("loglikelihood", [("a", "b")]), disable_tqdm=True)


def named(name: str, task: str | None = None) -> object:
    return check_names([(task, name)], METRICS, (), "w")


def bounded(here: Path, name: str) -> object:
    given = {"tasks": ["a"], "reference": "r", "documents": "enough", "certain": {"within": 0.01}}
    settings = EvaluationSettings.parse({**given, "require": [{"metric": name, "max": 0.5}]})
    return refuse_names(settings, None, "passes.g")


def with_index(here: Path, text: str) -> Path:
    (here / "index.json").write_text(text, encoding="utf-8")
    return here


METRICS: dict[str, Any] = {
    "choice": {"acc", "acc,none", "acc_norm", "acc_norm,none"},
    "generate": {"exact_match", "exact_match,strict-match"},
    "size_on_disk": {"bytes", "bytes,none"},
}
TASKS = {"tasks": ["mmlu"]}
LOST = EvaluationSettings.parse({"tasks": ["size_on_disk"], "reference": "m", "fail_on_loss": 2})
CALLS: list[tuple[Any, ...]] = [
    (lambda _: ScoringRequest("x", ""), WRONG, "target"),
    (lambda _: ScoringRequest(None, "x"), WRONG, "context"),
    (lambda _: ScoringRequest("x", ["a"]), WRONG, "target"),
    (lambda _: ScoringRequest("x", f"a{CUT}"), WRONG, "target", "1"),
    (lambda _: ScoringRequest(f"a{CUT}", "x"), WRONG, "context", "1"),
    (lambda _: RollingRequest("x", prefix=-1), WRONG, "prefix", "", -1),
    (lambda _: RollingRequest(CUT), WRONG, "text", "0"),
    (lambda _: olive_ext.open(ModelSettings.of({"model": "x"}), max_length=8), AGAINST, "max_length"),
    (lambda _: olive_ext.open("x", max_length=0), WRONG, "max_length", "", 0),
    (lambda _: olive_ext.check("x", max_lenght=64), UNKNOWN, "max_lenght"),
    (
        lambda here: olive_ext.open(put_model(here), reference=put_model(here), record_to="y"),
        AGAINST,
        "reference",
        "record_to",
    ),
    (lambda here: olive_ext.open(put_model(here), reference={"kind": "hf"}), MISSING, "reference", "model"),
    (
        lambda here: olive_ext.open(put_model(here), reference={"model": "x", "knid": "hf"}),
        UNKNOWN,
        "reference.knid",
        "",
        "hf",
    ),
    (lambda _: ModelSettings.of({"model": "x", "components": {"visoin": "a"}}), WRONG, "components"),
    (lambda _: Form.choose(1000, 0), WRONG, "top", "1", 0),
    (lambda _: Form.choose(1000, 4, 1), WRONG, "drawn", "2", 1),
    (lambda here: Records.read(here), NOT_FOUND),
    *(
        (lambda here, text=text: Records.read(with_index(here, text)), "records", "", "index.json'")
        for text in ("{", "[]", '{"version": 1}', '{"version": 7, "facts": 1, "form": 1, "chunks": 1}')
    ),
    # lm-eval's door
    (lambda _: OrtLM(session=session(), max_lenght=3), UNKNOWN, "OrtLM.max_lenght", "'max_length'", 3),
    (lambda _: OrtLM(session=session(), batch_size="many"), WRONG, "OrtLM.batch_size", "", "many"),
    (lambda _: OrtLM("there", session=session()), AGAINST, "OrtLM.pretrained"),
    (lambda _: OrtLM(), AGAINST, "OrtLM.pretrained"),
    (lambda _: OrtLM(session=session(), max_length=12), AGAINST, "OrtLM.max_length"),
    (lambda _: OrtLM(session=session(), max_gen_toks=0), WRONG, "OrtLM.max_gen_toks", "", 0),
    (lambda _: ort_lm(enable_thinking=True), MISSING, "OrtLM.enable_thinking", "think_end_token"),
    (lambda here: scored(here, enable_thinking=True, think_end_token="e"), AGAINST, "enable_thinking", "task"),
    (lambda _: generated(num_beams=0), WRONG, "num_beams", "1 65536", 0),
    (lambda _: generated(num_beams=2, do_sample=True, temperature=0.7), AGAINST, "num_beams", "'do_sample'", 2),
    (lambda _: generated(num_beams=2, early_stopping="maybe"), WRONG, "early_stopping", "", "maybe"),
    (lambda _: generated(num_beams=2, num_return_sequences=2), UNFIT, "num_return_sequences", "", 2),
    (lambda _: generated(repetition_penalty=1.2), UNFIT, "repetition_penalty", "", 1.2),
    (lambda _: generated(max_gen_toks=0), WRONG, "max_gen_toks", "", 0),
    (lambda _: generated(max_gen_toks=MAX_LENGTH), TASK, "max_gen_toks", "", MAX_LENGTH),
    (lambda _: generated(until=3), WRONG, "until", "", 3),
    (lambda _: load_tasks(["tasks/nothing.yaml"], None), NOT_FOUND, "tasks", "", "tasks/nothing.yaml"),
    (lambda _: load_tasks(["arc_easy"], "no_such"), NOT_FOUND, "include_path", "", "no_such"),
    (lambda _: load_tasks([{"dataset_path": "x"}], None), MISSING, "", "dataset_path"),
    # Python's
    (lambda _: evaluate("nowhere"), MISSING, "tasks"),
    (lambda _: evaluate("nowhere", tasks="mmlu"), WRONG, "tasks", "list", "mmlu"),
    (lambda _: evaluate("nowhere", **TASKS, limt=2), UNKNOWN, "limt", "'limit'", 2),
    (lambda _: evaluate("nowhere", **TASKS, limit=-2), WRONG, "limit", "0 1", -2),
    (lambda _: evaluate(TASKS), MISSING, "model"),
    (lambda _: evaluate(None, **TASKS), MISSING, "model"),
    (lambda _: evaluate("a", model="b", **TASKS), AGAINST, "model", "'a'"),
    (lambda _: evaluate(3, **TASKS), WRONG, "", "int"),
    (lambda _: EvaluationConfig.parse({"model": {}}), MISSING, "tasks", "model.path"),
    (
        lambda _: EvaluationConfig.of({"model": "m", "reference": "m", **TASKS, "fail_on_loss": 2, "matters": 3}, {}),
        AGAINST,
        "matters",
        "fail_on_loss",
    ),
    # names of bounds
    (lambda _: named("ac"), NO_NAME, "w", "'w': 'ac' 'acc'"),
    (lambda _: named("word_perplexity", "choice"), NO_NAME, "w", "'word_perplexity' 'choice' acc, acc_norm"),
    (lambda _: named("acc", "choise"), NO_NAME, "w", "'choise' 'choice'"),
    (lambda _: named("kl_mean"), MISSING, "w", "'kl_mean' 'reference'"),
    (lambda _: named("kl_p99", "choice"), MISSING, "w", "'kl_p99' 'choice' 'reference'"),
    (lambda _: named("all/kl_mean"), MISSING, "w", "'all/kl_mean' 'reference'"),
    (
        lambda _: named("exact_match,strict", "generate"),
        NO_NAME,
        "w",
        "'exact_match,strict' 'exact_match,strict-match'",
    ),
    (lambda _: refuse_names(LOST, {}), NO_PAIR, "fail_on_loss"),
    *(
        (lambda here, name=name: bounded(here, name), NO_PAIR, "passes.g.require", "documents enough all")
        for name in ("kl_max", "all/kl_p99", "flips_right_to_wrong", "mcnemar_p,none")
    ),
]
