"""Stops are found at the token that completes them, wherever they begin and end, and the text is cut there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from olive_ext.session.generation_bounds import StopChecker, other_search, read_search, read_stop_ids
from olive_ext.session.tokenizer import Tokenizer
from tests.session.tiny import BOS, EOS, IM_END, byte_fallback, byte_level, model_files

TOKENIZERS = pytest.mark.parametrize("make", [byte_level, byte_fallback])
PIECES = ["the", "stop", "s", "t", "op", " ", "\n\n", "here", "é", "東", "京", "🙂", ".", "ab"]
TEXT = st.lists(st.sampled_from(PIECES), max_size=25).map("".join)
STOPS = st.lists(st.sampled_from(["stop", "\n\n", "st", "opab", "東京", "é", "🙂.", " the", "."]), max_size=3)


class Counting(Tokenizer):
    """Counts the tokens it is asked to decode."""

    num_decoded = 0

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        self.num_decoded += len(ids)
        return super().decode(ids, skip_special_tokens)


def first_stop(tokenizer: Tokenizer, tokens: list[int], stops: list[str]) -> int:
    """The number of tokens whose text first holds a stop; one more than there are where none does."""
    for count in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:count], skip_special_tokens=False).rstrip("\ufffd")
        if any(stop in text for stop in stops):
            return count
    return len(tokens) + 1


def fired(checker: StopChecker, tokens: list[int]) -> int:
    grown: list[int] = []
    for token in tokens:
        grown.append(token)
        if checker(grown):
            return len(grown)
    return len(tokens) + 1


@TOKENIZERS
@given(text=TEXT, stops=STOPS)
def test_checker_fires_at_the_token_that_completes_a_stop_and_cuts_before_it(make, text, stops) -> None:
    tokenizer = make()
    tokens = tokenizer.encode(text, add_special_tokens=False)
    checker = StopChecker(tokenizer, stops)
    count = fired(checker, tokens)
    assert count == first_stop(tokenizer, tokens, stops)
    whole = tokenizer.decode(tokens[:count])
    cuts = [whole.find(stop) for stop in stops if stop in whole]
    assert checker.text(tokens[:count]) == whole[: min(cuts, default=len(whole))]


@given(data=st.data())
@example(None)
def test_checker_equals_the_oracle_over_byte_level_tokens_of_any_kind(data) -> None:
    tokenizer = byte_level()
    # Bytes that are no text, as a model with random weights makes them, in runs longer than what is held back.
    tokens = [200] * 40 if data is None else data.draw(st.lists(st.integers(0, 319), max_size=60))
    stops = ["th", ".", "t", "東"]
    assert fired(StopChecker(tokenizer, stops), tokens) == first_stop(tokenizer, tokens, stops)


@pytest.mark.parametrize("num_broken", range(45))
def test_checker_sees_a_split_character_behind_a_run_of_broken_bytes(num_broken: int) -> None:
    tokenizer = byte_level()
    broken, *letter = tokenizer.hf.convert_tokens_to_ids([chr(byte) for byte in b"\xff" + "é".encode()])
    tokens = [*tokenizer.encode("the", add_special_tokens=False), *[broken] * num_broken, *letter]
    assert fired(StopChecker(tokenizer, ["é"]), tokens) == len(tokens)
    assert fired(StopChecker(tokenizer, ["e" + "é"]), tokens) == len(tokens) + (num_broken > 0)


def test_text_leaves_special_tokens_out_and_a_stop_may_be_one() -> None:
    tokenizer = byte_level()
    the = tokenizer.encode("the", add_special_tokens=False)
    tokens = [BOS, *the, IM_END, *the]
    assert StopChecker(tokenizer, []).text(tokens) == "thethe"
    checker = StopChecker(tokenizer, ["<|im_end|>"])
    assert fired(checker, tokens) == 1 + len(the) + 1
    assert checker.text(tokens) == "the"
    assert StopChecker(tokenizer, ["e<|im_end|>"]).text(tokens) == "th"
    assert StopChecker(tokenizer, ["im_end"]).text(tokens) == "the"


def test_checker_may_begin_again_with_another_sequence() -> None:
    tokenizer = byte_level()
    checker = StopChecker(tokenizer, ["stop"])
    assert fired(checker, tokenizer.encode("the cat sat", add_special_tokens=False))
    again = tokenizer.encode("a stop", add_special_tokens=False)
    assert fired(checker, again) == len(again)


@TOKENIZERS
@pytest.mark.parametrize("text", ["the 東京 cat ", "é"])
def test_checker_decodes_a_few_tokens_for_each_one_generated(make, text: str) -> None:
    tokenizer = Counting(make().hf, "counting")
    for tokens in (tokenizer.encode(text * 300, add_special_tokens=False)[:1500], [200] * 1500):
        tokenizer.num_decoded = 0
        assert fired(StopChecker(tokenizer, ["never there"]), tokens) == len(tokens) + 1
        assert tokenizer.num_decoded < 30 * len(tokens)


UNUSED = {EOS: "the tokenizer"}


@pytest.mark.parametrize(
    ("genai", "generation", "config", "expected", "unused"),
    [
        ({}, None, None, (EOS,), {}),
        ({}, None, {}, (EOS,), {}),
        (
            {"model": {"eos_token_id": [7, 8]}},
            {"eos_token_id": [9, 8]},
            None,
            (7, 8),
            {9: "generation_config.json", **UNUSED},
        ),
        (
            {"model": {}},
            {"eos_token_id": EOS},
            {"eos_token_id": 10},
            (),
            {EOS: "generation_config.json", 10: "config.json"},
        ),
        ({}, {"eos_token_id": None}, {"eos_token_id": [10]}, (), {10: "config.json", **UNUSED}),
        ({}, {"eos_token_id": 9}, {"eos_token_id": [10]}, (9,), {10: "config.json", **UNUSED}),
        ({}, None, {"eos_token_id": [10]}, (10,), UNUSED),
    ],
)
def test_read_stop_ids_takes_the_file_that_the_runtime_reads(
    tmp_path: Path, genai, generation, config, expected, unused
) -> None:
    """Ends that other files name beside are known, with the first file."""
    for name, content in (("generation_config.json", generation), ("config.json", config)):
        if content is not None:
            (tmp_path / name).write_text(json.dumps(content))
    stops = read_stop_ids(model_files(tmp_path, genai), EOS)
    assert (stops.ids, stops.unused) == ({*expected}, unused)


def test_a_graph_without_configurations_ends_as_its_tokenizers_folder_says(tmp_path: Path) -> None:
    """OnnxConversion saves model.onnx alone: a chat checkpoint's second stop token was "lost"."""
    checkpoint, bare = tmp_path / "checkpoint", tmp_path / "bare"
    for folder in (checkpoint, bare):
        folder.mkdir()
    written = {"eos_token_id": [1, 2], "repetition_penalty": 1.1}
    (checkpoint / "generation_config.json").write_text(json.dumps(written))
    files = replace(model_files(bare, {}), tokenizer=str(checkpoint))
    stops = read_stop_ids(files, EOS)
    assert (stops.ids, stops.file, stops.search["repetition_penalty"]) == ({1, 2}, "generation_config.json", 1.1)
    (bare / "config.json").write_text("{}")
    assert (read_stop_ids(files, EOS).ids, read_search(files)["repetition_penalty"]) == ({EOS}, 1.0)


DRAWN = {"do_sample": True, "temperature": 0.6}
FROM_CONFIG = {"do_sample": True, "repetition_penalty": 1.6, "max_time": 0.1}
TOLD_OF_CONFIG = ("repetition_penalty 1.6 for 1.0", "temperature 1.0 for 0.6", "max_time 0.1 for none")


def of_files(folder: Path, **contents: dict[str, Any]) -> dict[str, Any]:
    """The search that the configurations of a model that encodes give, or its genai_config.json."""
    folder.mkdir()
    for name in contents.keys() - {"genai"}:
        (folder / f"{name}.json").write_text(json.dumps(contents[name]))
    config = {"is_encoder_decoder": True, **contents.get("config", {})}
    return read_search(model_files(folder, contents.get("genai", {}), config))


def written(context_length: int = 512, **search: Any) -> dict[str, Any]:
    """As onnxruntime-genai's builder writes it, with other values."""
    plain = {"max_length": context_length, **DRAWN, "top_k": 50, "top_p": 1.0}
    return {"genai": {"search": {**plain, **search}, "model": {"context_length": context_length}}}


def generation(**values: Any) -> dict[str, Any]:
    return {"generation_config": values}


SHORT = {"config": {"max_position_embeddings": 64}}
BEAMS = {**DRAWN, "num_beams": 4}
TOLD_OF_BEAMS = ("length_penalty 0.0 for 1.0", "early_stopping False for True")
GROUPS = {"num_beam_groups": 2, "diversity_penalty": 0.5}
TOLD_OF_GROUPS = ("num_beam_groups 2 for 1", "diversity_penalty 0.5 for 0.0")
FORCED = {"stop_strings": ["."], "forced_eos_token_id": 0}
TOLD_OF_FORCED = ("forced_eos_token_id none for 0", "stop_strings none for ['.']")


@pytest.mark.parametrize(
    ("reference", "candidate", "told"),
    [
        # What says a default is no difference.
        (generation(**DRAWN), written(), ()),
        (generation(**DRAWN), written(temperature=0.6000000238418579), ()),
        (generation(repetition_penalty=None, min_length=None), {"genai": {"search": {"repetition_penalty": 1.0}}}, ()),
        (generation(temperature=0.6), generation(cache_implementation="hybrid"), ()),
        # mobius writes "do_sample" with "top_k" 1, which is greedy.
        ({}, written(top_k=1), ()),
        ({}, written(temperature=0), ()),
        ({}, written(), ("do_sample True for False",)),
        (generation(**DRAWN), {"config": FROM_CONFIG}, TOLD_OF_CONFIG),
        (generation(**DRAWN), written(min_length=60), ("min_length 60 for 0",)),
        (generation(**DRAWN), written(repetition_penalty=1.8), ("repetition_penalty 1.8 for 1.0",)),
        (generation(**DRAWN), written(max_length=24), ("max_length 24 for none",)),
        (generation(**DRAWN), written(max_length=1024), ("max_length 1024 for none",)),
        (generation(**DRAWN), written(num_beams=4), ("num_beams 4 for 1",)),
        (generation(**DRAWN), written(temperature=3.0), ("temperature 3.0 for 0.6",)),
        (generation(**DRAWN), written(top_k=40), ("top_k 40 for 50",)),
        (generation(**DRAWN), written(top_p=0.9), ("top_p 0.9 for 1.0",)),
        (generation(**DRAWN, top_k=0), written(), ("top_k 50 for 0",)),
        (generation(**DRAWN, min_p=0.15), generation(**DRAWN), ("min_p 0.0 for 0.15",)),
        (generation(**DRAWN), generation(**DRAWN, epsilon_cutoff=1e-3), ("epsilon_cutoff 0.001 for 0.0",)),
        (generation(temperature=0.6), generation(suppress_tokens=[5]), ("suppress_tokens [5] for none",)),
        (generation(temperature=0.6), generation(bad_words_ids=[[7]]), ("bad_words_ids [[7]] for none",)),
        (generation(), generation(sequence_bias=[[[7], -9.0]]), ("sequence_bias [[[7], -9.0]] for none",)),
        (generation(temperature=0.6), generation(max_new_tokens=2), ("max_new_tokens 2 for none",)),
        (generation(), generation(cache_implementation="quantized"), ("cache_implementation quantized for none",)),
        (written(), written() | generation(suppress_tokens=[5]), ("suppress_tokens [5] for none",)),
        # A limit is no difference where it allows as much as the reference; a shorter context is another finding.
        (written(), written(max_length=24), ("max_length 24 for 512",)),
        (written(), written(max_length=1024), ("max_length 1024 for 512",)),
        (written(), written(max_length=0), ()),
        (written(), written(4096, max_length=512), ()),
        (written(), written(8192, max_length=4096), ()),
        (written(), written(64), ()),
        (written(4096, max_length=512), written(4096, max_length=256), ("max_length 256 for 512",)),
        (written(), generation(max_length=45), ("max_length 45 for 512",)),
        (written(), generation(max_length=64) | SHORT, ()),
        (written(), generation(max_length=600), ()),
        (SHORT, generation(max_length=45) | SHORT, ("max_length 45 for 64",)),
        (SHORT, {"config": {"max_length": 45}}, ("max_length 45 for 64",)),
        (generation(**DRAWN, max_length=45), written(), ()),
        (generation(**DRAWN, max_new_tokens=8, max_time=0.1), written(), ()),
        (generation(max_new_tokens=8, max_length=20), generation(max_new_tokens=9, max_length=10), ()),
        (generation(max_new_tokens=8), generation(max_new_tokens=7), ("max_new_tokens 7 for 8",)),
        # Only beams have a rank.
        (written(**BEAMS), written(**BEAMS, length_penalty=0.0, early_stopping=False), TOLD_OF_BEAMS),
        (written(**BEAMS, early_stopping=False), generation(**BEAMS, **GROUPS), TOLD_OF_GROUPS),
        (generation(**BEAMS, early_stopping=True), written(**BEAMS), ()),
        (generation(**BEAMS, length_penalty=2.0), generation(), ("num_beams 1 for 4",)),
        (generation(), generation(length_penalty=2.0, **GROUPS), ()),
        # What the candidate lost.
        (generation(min_length=60), generation(), ("min_length 0 for 60",)),
        (generation(suppress_tokens=[5, 7]), generation(suppress_tokens=[7, 5]), ()),
        (generation(do_sample=True, top_h=0.4), generation(do_sample=True), ("top_h 1.0 for 0.4",)),
        (generation(suppress_tokens=[5]), generation(), ("suppress_tokens none for [5]",)),
        (generation(**DRAWN, **FORCED), written(), TOLD_OF_FORCED),
    ],
)
def test_search_that_makes_other_answers_is_named(
    reference: dict[str, Any], candidate: dict[str, Any], told: tuple[str, ...], tmp_path: Path
) -> None:
    searches = [of_files(tmp_path / "one", **reference), of_files(tmp_path / "two", **candidate)]
    assert other_search(*searches) == told
    assert other_search(searches[1], searches[1]) == ()


def test_an_earlier_versions_search_is_not_compared_with_what_it_did_not_note(tmp_path: Path) -> None:
    assert other_search({"do_sample": True}, of_files(tmp_path / "package", **written())) == ()
    assert other_search({"do_sample": False}, read_stop_ids(model_files(tmp_path), EOS, (2, 50)).search) == ()
    earlier = {"num_beams": 4, "max_length": None}
    candidate = of_files(tmp_path / "beams", **written(num_beams=4, max_length=24, length_penalty=2.0))
    assert other_search(earlier | {"do_sample": True}, candidate) == ("max_length 24 for none",)


def test_tokens_that_an_encoder_decoder_no_longer_suppresses_show_in_its_answers(tmp_path: Path) -> None:
    search = read_stop_ids(model_files(tmp_path), EOS, (2, 50)).search
    assert other_search({**search, "suppress_tokens": [5]}, search) == ()


def test_a_search_of_transformers_that_adds_no_processor_is_the_default(tmp_path: Path) -> None:
    import torch
    from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=4, vocab_size=8))
    plain = read_search(model_files(tmp_path, {}))
    for name in ("guidance_scale", "encoder_repetition_penalty"):
        for value in (1, 1.0, 1.5):
            written = GenerationConfig(**{name: value})
            inputs = {"input_ids_seq_length": 1, "encoder_input_ids": torch.ones(1, 1, dtype=torch.long)}
            acts = bool(model._get_logits_processor(written, **inputs))
            (tmp_path / "generation_config.json").write_text(json.dumps({name: value}))
            assert bool(other_search(plain, read_search(model_files(tmp_path, {})))) == acts == (value != 1)
