"""What `OrtLM` defines beyond HFLM: edge cases, reasoning, sampling, caching, the constructor. `OrtLM` against lm-
eval's HFLM on the same weights: the numbers and texts are HFLM's."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
from collections.abc import Sequence
from configparser import ConfigParser
from contextlib import nullcontext
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from lm_eval.api.model import CachingLM

import olive_ext.backends.lm_eval.instances as instances_module
from olive_ext.backends.lm_eval import OrtLM
from olive_ext.engine.requests import Beams, Request
from olive_ext.errors import SessionError, TaskError
from tests.backends.local_tasks import write_tasks
from tests.backends.reference import EOS, IM_END, MAX_LENGTH, ForwardEngine, hflm, instances, ort_lm
from tests.exports import genai_export
from tests.refusals import refused
from tests.session.tiny import CORPUS, TEMPLATE, byte_level


def score(lm: OrtLM, *pairs: tuple[str, str]) -> list[tuple[float, bool]]:
    return lm.loglikelihood(instances("loglikelihood", pairs), disable_tqdm=True)


def generate(lm: OrtLM, kwargs: dict[str, Any], *contexts: str, repeats: int = 1) -> list[str]:
    asked = instances("generate_until", [(context, {"max_gen_toks": 44, **kwargs}) for context in contexts], repeats)
    return lm.generate_until(asked, disable_tqdm=True)


def says(*texts: str | int) -> ForwardEngine:
    """An engine whose answer to everything is these texts and token ids."""
    engine, tokenizer = ForwardEngine(), byte_level(True)
    ids = [part for text in texts for part in ([text] if isinstance(text, int) else tokenizer.encode(text, False))]
    engine.script = lambda request: ids
    return engine


def test_token_spanning_the_join_is_scored_where_hflm_fails_and_spaces_count_as_empty() -> None:
    lm = ort_lm(has_bos=False)
    tokenizer = byte_level(False)
    whole = tokenizer.encode("next")
    assert len(whole) == 1
    assert lm._encode_pair("ne", "xt") == ([lm.prefix_token_id], whole)
    assert score(lm, ("ne", "xt")) == score(lm, ("", "next"))
    assert score(lm, (" ", "the cat")) == score(lm, ("", " the cat"))


THOUGHT = ("what is it?\n\na thing</think>\n\nthe cat\n\nthe dog",)


def test_stops_count_behind_the_reasoning_only() -> None:
    lm = ort_lm(engine=says(*THOUGHT), think_end_token="</think>")
    assert generate(lm, {"until": ["\n\n"]}, "the") == ["the cat"]
    assert generate(ort_lm(engine=says(*THOUGHT)), {"until": ["\n\n"]}, "the") == ["what is it?"]


@pytest.mark.parametrize(
    ("end", "said", "until"),
    [
        *((end, ("what\n\n", IM_END, "is", IM_END, "\n\n the cat\n\nthe dog"), "\n\n")
          for end in (IM_END, str(IM_END), "<|im_end|>")),
        ("</think>", ("what</think>the cat", IM_END, "the dog"), "<|im_end|>"),
    ],
)  # fmt: skip
def test_end_of_reasoning_and_the_stop_behind_it_may_be_special_tokens(
    end: int | str, said: tuple[str | int, ...], until: str
) -> None:
    lm = ort_lm(engine=says(*said), think_end_token=end)
    assert generate(lm, {"until": [until]}, "the") == ["the cat"]


@pytest.mark.parametrize("thinks", [True, False])
def test_enable_thinking_refuses_an_answer_that_is_begun(thinks: bool) -> None:
    """A task's `gen_prefix` would stand where the thoughts begin; without thoughts it begins the answer."""
    lm = ort_lm(enable_thinking=thinks, think_end_token="</think>")
    before, lm.tokenizer.chat_template = lm.tokenizer.chat_template, TEMPLATE
    try:
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "The answer:"}]
        refusal = refused(TaskError, "contradiction", "enable_thinking", holds="gen_prefix")
        with refusal if thinks else nullcontext():
            assert lm.apply_chat_template(turns, add_generation_prompt=False).endswith("The answer:")
    finally:
        lm.tokenizer.chat_template = before


def test_settings_of_a_beam_search_reach_the_engine_and_are_left_as_they_were() -> None:
    """They are not read without one."""
    engine = ForwardEngine()
    lm = ort_lm(engine=engine)
    rest = {"length_penalty": "0.5", "early_stopping": "never", "max_gen_toks": 3, "until": ["\n"]}
    for given in ({"num_beams": "4", **rest}, {"num_beams": 1, **rest}):
        before = {**given}
        generate(lm, given, "the")
        assert given == before
    searches = [request.generation.beams for request in engine.requests if request.generation]
    assert searches == [Beams(4, 0.5, "never"), None]


def asked_of_every_kind(lm: Any) -> None:
    lm.loglikelihood(instances("l", [("the", f" {word}") for word in ("cat", "dog", "hat")] + [("a", "")]))
    lm.loglikelihood_rolling(instances("r", [("the cat",), ("the dog",), ("",)]))
    lm.generate_until(instances("g", [("the", {"until": ["\n"], "max_gen_toks": 4}), ("a", {"max_gen_toks": 4})], 2))


@pytest.mark.parametrize("num_done", range(1, 7))
def test_interrupted_run_computes_nothing_twice(tmp_path: Path, num_done: int) -> None:
    first = ForwardEngine()
    first.fails_after = num_done
    lm = ort_lm(engine=first)
    with pytest.raises(KeyboardInterrupt):
        asked_of_every_kind(CachingLM(lm, str(tmp_path / "answers.db")))
    lm.cache_hook.dbdict.close()
    second = ForwardEngine()
    asked_of_every_kind(CachingLM(ort_lm(engine=second), str(tmp_path / "answers.db")))
    whole = ForwardEngine()
    asked_of_every_kind(ort_lm(engine=whole))
    done = [_identity(request) for request in first.requests + second.requests]
    assert sorted(done) == sorted(_identity(request) for request in whole.requests)


def _identity(request: Request) -> tuple[Sequence[int], int, bool]:
    return (*request.tokens,), request.num_targets, request.generation is not None


@pytest.mark.parametrize("batch_size", [4, "8", "auto", "auto:4"])
def test_batch_size_is_taken_as_lm_eval_writes_it(batch_size: int | str) -> None:
    lm = ort_lm(batch_size=batch_size, max_batch_size=16, device="cpu")
    assert str(lm.batch_size) == str(batch_size)


def test_close_leaves_a_given_session_open_and_may_be_repeated() -> None:
    engine = ForwardEngine()
    with ort_lm(engine=engine) as lm:
        lm.close()
    lm.close()
    assert engine.num_closed == 0
    with pytest.raises(SessionError):
        score(lm, ("a", "b"))


def test_entry_points_for_lm_eval_name_the_class_as_its_registry_does() -> None:
    declared = ConfigParser()
    declared.read(Path(__file__).parents[2] / "setup.cfg")
    lines = declared["options.entry_points"]["lm_eval.models"].split("\n")[1:]
    points = [EntryPoint(*(part.strip() for part in line.split("=")), group="lm_eval.models") for line in lines]
    assert {point.name for point in points} == {"olive_ext", "olive-ext"}
    for point in points:
        assert point.load() is OrtLM
        assert point.value == f"{OrtLM.__module__}:{OrtLM.__name__}"  # else the class collides with its placeholder


@pytest.mark.long  # lm-eval reads all of its 14,000 task files
def test_lm_evals_command_line_runs_the_model_without_an_import(tmp_path: Path) -> None:
    write_tasks(tmp_path / "tasks")
    command = [sys.executable, "-m", "olive_ext.backends.lm_eval", "--model", "olive_ext", "--tasks", "tiny_choice"]
    given = f"pretrained={genai_export('llama')}"
    command += ["--model_args", given, "--include_path", str(tmp_path / "tasks"), "--limit", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert "tiny_choice" in done.stdout, done.stderr[-2000:]
    assert f"olive_ext ({{'pretrained': '{genai_export('llama')}'}})" in done.stdout


WORDS = " ".join(CORPUS[:3]).split(" ")


def text(rng: random.Random, least: int, most: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(least, most)))


@pytest.mark.parametrize("has_bos", [True, False])
def test_loglikelihood_of_mixed_requests_is_hflms(has_bos: bool) -> None:
    rng = random.Random(1)
    pairs = [
        (text(rng, 1, 30) + rng.choice(["", " ", "\n\n"]), rng.choice(["", " "]) + text(rng, 1, 6)) for _ in range(150)
    ]
    pairs += [("", text(rng, 1, 5)) for _ in range(10)]
    pairs += [(shared := text(rng, 4, 9), f" {word}") for _ in range(5) for word in "abcd"]
    assert shared
    ours = ort_lm(has_bos).loglikelihood(instances("loglikelihood", pairs), disable_tqdm=True)
    theirs = hflm(has_bos).loglikelihood(instances("loglikelihood", pairs), disable_tqdm=True)
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]
    assert [value for value, _ in ours] == pytest.approx([value for value, _ in theirs], abs=1e-4)


@pytest.mark.parametrize("has_bos", [True, False])
def test_rolling_with_the_hflm_option_is_hflms(has_bos: bool) -> None:
    rng = random.Random(2)
    texts = [("",), ("a",), *((text(rng, 1, 120),) for _ in range(20))]
    ours = ort_lm(has_bos, hflm_rolling_bos=True).loglikelihood_rolling(instances("r", texts), disable_tqdm=True)
    theirs = hflm(has_bos).loglikelihood_rolling(instances("r", texts), disable_tqdm=True)
    assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-4)


GEN_KWARGS: list[dict[str, Any]] = [
    {"until": ["\n\n"], "max_gen_toks": 12},
    {"until": " ", "max_new_tokens": 9},
    {"until": ["e", "the"], "max_tokens": 16, "do_sample": False, "temperature": 0.7},
    {"until": [], "max_gen_toks": 20, "temperature": 0.0},
    {"until": ["<|im_end|>"], "max_completion_tokens": 6, "num_beams": 1},
]


@pytest.mark.parametrize("has_bos", [True, pytest.param(False, marks=pytest.mark.long)])
def test_greedy_generations_are_hflms(has_bos: bool) -> None:
    rng = random.Random(3)
    asked = [(text(rng, 1, 40), kwargs) for kwargs in GEN_KWARGS for _ in range(8)]
    ours = ort_lm(has_bos).generate_until(instances("generate_until", asked), disable_tqdm=True)
    theirs = hflm(has_bos, batch_size=1).generate_until(instances("generate_until", asked), disable_tqdm=True)
    assert ours == theirs
    assert len(set(ours)) > 10


@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_chat_template_is_hflms(add_generation_prompt: bool) -> None:
    chat = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "A:"},
    ]
    ours, theirs = ort_lm(), hflm()
    assert ours.apply_chat_template(chat, add_generation_prompt) == theirs.apply_chat_template(
        chat, add_generation_prompt
    )
    assert ours.chat_template(True) == theirs.chat_template(True)
    assert ours.tok_encode(ours.apply_chat_template(chat)) == theirs.tok_encode(theirs.apply_chat_template(chat))


@pytest.mark.parametrize("add_bos_token", [True, False])
def test_add_bos_token_is_hflms(add_bos_token: bool) -> None:
    pairs = [("the cat", " sat"), ("<bos>the cat", " sat"), ("", "the")]
    ours = ort_lm(add_bos_token=add_bos_token).loglikelihood(instances("l", pairs), disable_tqdm=True)
    theirs = hflm(add_bos_token=add_bos_token).loglikelihood(instances("l", pairs), disable_tqdm=True)
    assert [value for value, _ in ours] == pytest.approx([value for value, _ in theirs], abs=1e-4)


@pytest.mark.parametrize("prefix", [9, EOS])
def test_prefix_token_id_replaces_bos_for_empty_contexts_and_as_what_texts_begin_with(prefix: int) -> None:
    """HFLM puts a second BOS in front of one that is in a scored text, and none before the prefix's text; prompts of
    generations get none either way."""
    pairs = [("", "the cat"), ("<bos>the cat", " sat"), ("<eos>the cat", " sat"), ("the cat", " sat")]
    models = ort_lm(prefix_token_id=prefix), hflm(prefix_token_id=prefix)
    ours, theirs = (lm.loglikelihood(instances("l", pairs), disable_tqdm=True) for lm in models)
    assert [value for value, _ in ours] == pytest.approx([value for value, _ in theirs], abs=1e-4)
    asked = instances("generate_until", [("<bos>the cat", {"until": ["."], "max_gen_toks": 5})])
    ours, theirs = (lm.generate_until(asked, disable_tqdm=True) for lm in models)
    assert ours == theirs


def test_token_requests_at_the_context_limit_are_hflms() -> None:
    rng = random.Random(4)
    ids = [rng.randrange(5, 300) for _ in range(200)]
    asked = [
        (None, ids[:length], ids[100 : 100 + targets])
        for length in (1, MAX_LENGTH - 1, MAX_LENGTH, MAX_LENGTH + 1, 90)
        for targets in (1, 2, MAX_LENGTH - 1, MAX_LENGTH)
    ]
    ours = ort_lm().session.loglikelihood([pair for _, *pair in asked])
    theirs = hflm()._loglikelihood_tokens(asked, disable_tqdm=True)
    assert [one.logprob for one in ours] == pytest.approx([value for value, _ in theirs], abs=2e-4)
    assert [one.is_greedy for one in ours] == [greedy for _, greedy in theirs]


def test_garbage_collector_leaves_many_requests_alone_while_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instances_module, "MANY", 3)
    lm, counts, before = ort_lm(), list[int](), gc.get_freeze_count()
    lm.observer = lambda *_: counts.append(gc.get_freeze_count())
    try:
        score(lm, ("the", " cat"), ("a", " cat"))
        assert max(counts) <= before, "frozen objects may die"
        score(lm, ("the", " cat"), ("a", " cat"), ("the", " mat"))
        assert counts[-1] > before
        assert gc.get_freeze_count() == 0
    finally:
        gc.freeze()  # as the suite does
