"""Special tokens as HFLM adds them, joint encoding of pairs, chat templates, and errors by name. Tokenizers that
spell alike are taken for the same, and others are refused by what differs; each is held to its files."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from lm_eval.api.model import TemplateLM
from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Core
from transformers import PreTrainedTokenizerFast

from olive_ext.errors import ConfigError, ModelError, TaskError
from olive_ext.session.tokenizer import Tokenizer, load_tokenizer
from olive_ext.session.tokenizer_fit import PromptFormat, hold_to_files, refuse_other_tokenizer, tokenizer_traits
from tests.refusals import refused, tells
from tests.session.tiny import BOS, EOS, NO_SYSTEM, TEMPLATE, byte_fallback, byte_level

WORDS = st.lists(st.sampled_from(["the", "thing", "no", " ", "\n", "s", "t", "東", "é", "<eos>"]), max_size=8)
TEXT = WORDS.map("".join)
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]


def lm_eval_pair(tokenizer: Tokenizer, context: str, target: str) -> tuple[list[int], list[int]]:
    class Stub:
        backend = "causal"
        tok_encode = staticmethod(tokenizer.encode)

    return TemplateLM._encode_pair(Stub(), context, target)


def test_encode_adds_bos_unless_the_text_begins_with_it_or_a_setting_decides() -> None:
    tokenizer, without = byte_level(), Tokenizer(byte_level().hf, "x", add_bos_token=False)
    assert tokenizer.encode("the")[0] == BOS
    assert tokenizer.encode("<bos>the") == tokenizer.encode("the")
    assert tokenizer.encode("<bos>the", add_special_tokens=True)[:2] == [BOS, BOS]
    assert BOS not in tokenizer.encode("the", add_special_tokens=False)
    assert BOS not in without.encode("the")
    assert without.encode("the", add_special_tokens=True)[0] == BOS


def test_prefix_token_id_is_the_custom_one_then_bos_then_eos_and_else_a_task_error() -> None:
    class Bare:
        bos_token = bos_token_id = eos_token_id = None
        all_special_ids: tuple[int, ...] = ()
        added_tokens_decoder: Mapping[int, object] = MappingProxyType({})

    assert Tokenizer(byte_level().hf, "x", prefix_token_id=7).prefix_token_id == 7
    assert byte_level().prefix_token_id == BOS
    assert byte_level(has_bos=False).prefix_token_id == EOS
    with refused(TaskError, "task", holds=("BOS", "EOS")):
        _ = Tokenizer(Bare(), "somewhere").prefix_token_id


@pytest.mark.parametrize("has_bos", [True, False])
@given(context=TEXT, target=TEXT)
def test_encode_pair_gives_the_joint_tokens_in_two_parts_lm_evals_where_no_token_spans_the_join(
    has_bos: bool, context: str, target: str
) -> None:
    tokenizer = byte_level(has_bos)
    assume(target)
    context_ids, target_ids = tokenizer.encode_pair(context, target)
    assert context_ids
    assert target_ids
    prefix, joint = [tokenizer.prefix_token_id], tokenizer.encode(context + target)
    assert context_ids + target_ids in (joint, prefix + joint)
    theirs = lm_eval_pair(tokenizer, context, target) if context.strip() else ([], [])
    if theirs[1] and joint == theirs[0] + theirs[1]:
        assert (context_ids, target_ids) == theirs


def test_encode_pair_scores_the_token_that_covers_the_join_and_white_space_before_it() -> None:
    tokenizer = byte_level()
    (the,) = tokenizer.encode(" the", add_special_tokens=False)
    assert lm_eval_pair(tokenizer, "on t", "he")[1] == []
    assert tokenizer.encode_pair("on t", "he") == (tokenizer.encode("on"), [the])
    assert tokenizer.encode_pair("on ", "the") == tokenizer.encode_pair("on", " the")
    assert tokenizer.encode_pair("", "<bos>") == ([BOS], [BOS]), "a prefix that is all there is"
    with refused(TaskError, "task"):
        tokenizer.encode_pair("the ", "")


@pytest.mark.parametrize(("has_bos", "prefix"), [(True, BOS), (False, EOS)])
def test_encode_pair_puts_the_prefix_before_the_target_when_the_context_is_empty(has_bos: bool, prefix: int) -> None:
    tokenizer = byte_level(has_bos)
    the = tokenizer.encode("the", add_special_tokens=False)
    assert tokenizer.encode_pair("", "the") == ([prefix], the)
    assert tokenizer.encode_pair("", tokenizer.decode([prefix], skip_special_tokens=False) + "the") == ([prefix], the)
    assert tokenizer.encode_pair(" \n", "the")[0] == [prefix]


def test_encode_rolling_leaves_out_the_bos_only_where_it_is_the_prefix() -> None:
    tokenizer = byte_level()
    the = tokenizer.encode("the", add_special_tokens=False)
    assert tokenizer.encode_rolling("the", BOS) == the
    assert tokenizer.encode_rolling("<bos>the", BOS) == the
    assert tokenizer.encode_rolling("the", EOS) == [BOS, *the]
    assert tokenizer.encode_rolling("", BOS) == []


def test_render_chat_opens_an_assistant_turn_or_continues_the_last_message_and_passes_variables() -> None:
    tokenizer = byte_level(template=TEMPLATE)
    opened = tokenizer.render_chat(CHAT)
    assert opened.startswith("<bos><|im_start|>system\nBe brief.")
    assert opened.endswith("<|im_start|>assistant\n")
    begun = [*CHAT, {"role": "assistant", "content": "Hel"}]
    assert tokenizer.render_chat(begun, add_generation_prompt=False).endswith("<|im_start|>assistant\nHel")
    thinks = byte_level(template="{% if enable_thinking %}think{% else %}answer{% endif %}")
    assert thinks.render_chat(CHAT, enable_thinking=True) == "think"
    assert thinks.render_chat(CHAT, enable_thinking=False) == "answer"


def test_render_chat_drops_the_system_message_when_the_template_refuses_it() -> None:
    tokenizer = byte_level(template=NO_SYSTEM + "[{{ m.content }}]{% endfor %}")
    assert tokenizer.render_chat(CHAT) == "[Hi]"


LOADS = """
import sys
from olive_ext.session.tokenizer import load_tokenizer
load_tokenizer(sys.argv[1]).encode("a")
heavy = {"transformers.activations", "torch._dynamo", "torch.distributed.tensor", "sympy"} & {*sys.modules}
assert not heavy, heavy
from transformers.utils.type_validators import ACT2FN
assert "silu" in ACT2FN and "silo" not in ACT2FN and len(ACT2FN) > 9
from transformers import activations
assert type(activations.ACT2FN["silu"]) is type(ACT2FN["silu"])
"""


@pytest.mark.long
def test_loading_a_tokenizer_imports_no_compilers_and_names_of_activations_are_still_validated() -> None:
    model = Path(__file__).parents[2] / "recipes" / "quickstart" / "model"
    done = subprocess.run([sys.executable, "-c", LOADS, str(model)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_load_tokenizer_gives_back_what_was_saved(tmp_path: Path) -> None:
    byte_level(template=TEMPLATE).hf.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    assert loaded.encode("the cat") == byte_level().encode("the cat")
    assert loaded.has_chat_template
    assert (loaded.bos_token_id, loaded.eos_token_id, loaded.pad_token_id) == (BOS, EOS, 0)
    assert loaded.special_ids == {0, 1, 2, 3, 4}


@pytest.mark.parametrize(
    ("tokenizer", "text", "texts"),
    [
        (byte_level(False), "the cat.", ["th", "e", " c", "at", "."]),
        (byte_fallback(), "the the", [" the", " the"]),
        (byte_fallback(), "a\n", [" ", "a", "\n"]),
    ],
)
def test_text_of_a_token_has_its_space_and_is_empty_where_there_is_no_token(
    tokenizer: Tokenizer, text: str, texts: list[str]
) -> None:
    assert [tokenizer.token_text(number) for number in tokenizer.encode(text)] == texts
    assert [tokenizer.token_text(number) for number in (10**6, -1, 1 << 40)] == ["", "", ""]


@pytest.mark.parametrize("options", [{}, {"add_bos_token": True}, {"add_bos_token": False}])
def test_many_texts_are_encoded_as_each_by_itself_whatever_the_file_cuts_and_pads(options: dict[str, bool]) -> None:
    tokenizer = Tokenizer(byte_level().hf, "here", **options)
    bos = str(tokenizer.hf.bos_token)
    texts = ["on the", " the\n\nthe", bos + "the", "on the mat on the mat", "on the", "", "the" * 50]
    expected = {text: (*tokenizer.encode(text),) for text in texts}
    assert tokenizer.encode_many(texts) == expected
    tokenizer.hf.backend_tokenizer.enable_truncation(3)
    tokenizer.hf.backend_tokenizer.enable_padding(length=9)
    assert tokenizer.encode_many(texts) == expected


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("cleans", [True, False])
@given(ids=st.lists(st.integers(0, 330), max_size=30))
def test_ids_are_decoded_as_transformers_does(skips: bool, cleans: bool, ids: list[int]) -> None:
    for tokenizer in (byte_level(), byte_fallback()):
        hf = tokenizer.hf
        before, hf.clean_up_tokenization_spaces = hf.clean_up_tokenization_spaces, cleans
        try:
            assert tokenizer.decode(ids, skips) == hf.decode(ids, skip_special_tokens=skips)
            worker = tokenizer.for_worker({"num_tokens": 1})
            assert cleans == (worker is None)
            if worker is not None:
                assert worker.decode(ids, skips) == tokenizer.decode(ids, skips)
                assert (worker.num_ids, tokenizer_traits(worker)) == (tokenizer.num_ids, {"num_tokens": 1})
        finally:
            hf.clean_up_tokenization_spaces = before
    assert tokenizer._decodes_alone


def changed(path: list[object], value: object) -> Tokenizer:
    """`byte_level` with one value of its JSON replaced."""
    content = json.loads(byte_level().hf.backend_tokenizer.to_str())
    place = content
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=Core.from_str(json.dumps(content))), "changed")


def refusal(reference: Tokenizer, own: Tokenizer) -> str:
    with pytest.raises(ConfigError) as caught:
        refuse_other_tokenizer(tokenizer_traits(reference), tokenizer_traits(own), "ref", "own")
    return str(caught.value)


def test_same_tokenizers_pass_whatever_their_template_and_begin() -> None:
    for other in (byte_level(), byte_level(template=TEMPLATE), byte_level(has_bos=False)):
        refuse_other_tokenizer(tokenizer_traits(other), tokenizer_traits(byte_level()), "ref", "own")
    assert json.loads(json.dumps(tokenizer_traits(byte_level()))) == tokenizer_traits(byte_level())


def test_another_vocabulary_other_merges_and_another_pre_tokenizer_are_refused_by_name() -> None:
    message = refusal(byte_fallback(), byte_level())
    assert tells(message, "'ref' 'own' vocabulary, merges")
    assert f"({len(byte_fallback().hf.get_vocab())} and {len(byte_level().hf.get_vocab())} tokens)" in message
    merges = json.loads(byte_level().hf.backend_tokenizer.to_str())["model"]["merges"]
    assert "merges" in refusal(changed(["model", "merges"], merges[:-3]), byte_level())
    prefixing = json.loads(pre_tokenizers.ByteLevel(add_prefix_space=True).__getstate__())
    assert "encoding:" in refusal(changed(["pre_tokenizer"], prefixing), byte_level())


def with_added(text: str, **kwargs: object) -> Tokenizer:
    more = copy.deepcopy(byte_level(**kwargs).hf)
    more.add_tokens([AddedToken(text, special=True)])
    return Tokenizer(more, "more")


def test_added_token_is_refused_where_it_is_used_or_lost() -> None:
    """One more that nothing uses makes no other tokenizer: it was refused as another model's."""
    unused, plain = with_added("<new>"), byte_level()
    refuse_other_tokenizer(tokenizer_traits(plain), tokenizer_traits(unused), "ref", "own")
    assert "added tokens (321 and 320 tokens)" in refusal(unused, plain), "lost"
    assert "added tokens" in refusal(with_added("<other>"), unused), "another in its place"
    assert "added tokens" in refusal(plain, with_added("<turn>", template="<turn>" + TEMPLATE)), "its template's"
    unused.hf.pad_token = "<new>"
    refuse_other_tokenizer(tokenizer_traits(plain), tokenizer_traits(unused), "ref", "own")
    unused.hf.sep_token = "<new>"
    assert "added tokens" in refusal(plain, unused), "a role's"
    assert "encoding" in refusal(plain, with_added("fox")), "texts have it"


REPLACE = {"type": "Replace", "pattern": {"String": "8"}, "content": "3"}
QUOTE = {"type": "Replace", "pattern": {"String": "\u2019"}, "content": "'"}
CHARACTERS = "tokens of single characters"
DECODER = json.loads(byte_level().hf.backend_tokenizer.to_str())["decoder"]


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (lambda: changed(["decoder"], DECODER), ()),
        (lambda: with_added("<new>"), ()),
        (
            lambda: changed(["decoder"], {"type": "Sequence", "decoders": [DECODER, REPLACE]}),
            ("texts of all tokens", "tokens of these texts"),
        ),
        (lambda: changed(["normalizer"], REPLACE), ("tokens of these texts", CHARACTERS)),
        (lambda: changed(["normalizer"], QUOTE), (CHARACTERS,)),
    ],
    ids=["same", "one more", "decoder", "normalizer", "normalizer of what is no token"],
)
def test_what_reads_a_token_otherwise_is_named_though_no_probe_holds_it(other, what: tuple[str, ...]) -> None:
    asked = [PromptFormat.of(one, None, reads_all=True) for one in (byte_level(), other())]
    quick = [PromptFormat.of(one, None) for one in (byte_level(), other())]
    assert not {"texts of all tokens", "tokens of these texts"} & {*quick[0].differing(quick[1])[0]}
    assert quick[0].steps != quick[1].steps or not what, "else nobody reads them all"
    assert (
        tuple(name for name in asked[0].differing(asked[1])[0] if "around" not in name and "empty" not in name) == what
    )
    older = PromptFormat(asked[1].ids, {name: asked[1].asks[name] for name in [*asked[1].asks][:3]}, {})
    assert not {"texts of all tokens", "tokens of these texts"} & {*asked[0].differing(older)[0]}


@pytest.mark.parametrize(("score", "what"), [(-2.0, ()), (-30.0, ("tokens of these texts",))])
def test_lost_scores_of_a_unigram_tokenizer_are_named_though_no_probe_shows_them(
    score: float, what: tuple[str, ...]
) -> None:
    def asked(of_last: float) -> PromptFormat:
        pieces = [("<unk>", 0.0), ("o", -9.0), ("w", -9.0), ("l", -9.0), ("owl", of_last)]
        core = Core(models.Unigram(pieces, 0, byte_fallback=False))
        hf = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")
        return PromptFormat.of(Tokenizer(hf, "unigram"), None, reads_all=True)

    one, other = asked(-2.0), asked(score)
    assert (one.differing(other)[0], one.ids == other.ids, one.steps == other.steps) == (what, True, not what)


def put(folder: Path, tokenizer_class: str, **config: object) -> Tokenizer:
    """The byte-level tokenizer without a post-processor, saved as a checkpoint of that class and loaded again."""
    byte_level(has_bos=False).hf.backend_tokenizer.save(str(folder / "tokenizer.json"))
    written = {"tokenizer_class": tokenizer_class, "bos_token": "<bos>", "eos_token": "<eos>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(written), encoding="utf-8")
    return load_tokenizer(str(folder))


def test_tokenizer_that_cuts_other_tokens_than_its_files_say_is_named_and_unreadable_files_are(tmp_path: Path) -> None:
    told = hold_to_files(put(tmp_path, "Qwen2Tokenizer"))  # a class with a normalizer of its own
    assert re.search(r"^transformers [\d.]+ \(Qwen2Tokenizer\) makes \d+ tokens of '.*json' alone \d+$", told)
    tokenizer = put(tmp_path, "LlamaTokenizer")
    assert hold_to_files(tokenizer) == ""  # releases of transformers until 5.21 drop the spaces here
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    with refused(ModelError, "damaged", holds="tokenizer.json'"):
        hold_to_files(tokenizer)


def test_tokenizer_that_drops_spaces_is_refused_and_one_that_does_at_the_ends_is_named(tmp_path: Path) -> None:
    """At the ends transformers' class drops them with tokenizer.json of Llama 2, Phi-3 and Mistral: the words are the
    same."""
    tokenizer = put(tmp_path, "PreTrainedTokenizerFast")
    core = Core.from_file(str(tmp_path / "tokenizer.json"))
    core.normalizer = normalizers.Strip()
    tokenizer.hf = PreTrainedTokenizerFast(tokenizer_object=core)
    assert "tokens of '  leading" in hold_to_files(tokenizer)
    core.pre_tokenizer = pre_tokenizers.Sequence(  # what LlamaTokenizer of transformers 5.10 comes to
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.hf = PreTrainedTokenizerFast(tokenizer_object=core)
    with refused(ModelError, "unsupported", holds="tokenizer_class"):
        hold_to_files(tokenizer)


def test_bos_that_the_configuration_asks_for_and_that_is_not_added_is_refused_unless_the_setting_decides(
    tmp_path: Path,
) -> None:
    tokenizer = put(tmp_path, "PreTrainedTokenizerFast", add_bos_token=True)
    with refused(ModelError, "contradiction", holds=("add_bos_token", "BOS")):
        hold_to_files(tokenizer)
    assert hold_to_files(tokenizer, False) == ""
