"""One table of mistakes in what an evaluation is given: a model's files, tasks, their data and their code. Each ends
with exit status 2 and one line, without a traceback and without anything of other libraries on the terminal.

`tests/config/test_mistakes.py` has wrong settings, `tests/check/test_recipe.py` recipes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import onnx
import pytest
from onnx import numpy_helper

from olive_ext.cli import main
from olive_ext.cli.parser import commands
from olive_ext.errors import OliveExtError
from olive_ext.registry import load
from tests.backends.local_tasks import CHOICE, GENERATE, HEAD, ROLLING, write_tasks
from tests.check.tiny import put_model
from tests.refusals import assert_says, last_lines


class Place:
    """A model, tasks, and a folder for one mistake."""

    def __init__(self, root: Path, here: Path) -> None:
        self.whole, self.tasks, self.here = root / "model", root / "tasks", here
        self.model = Path(shutil.copytree(self.whole, here / "model"))
        self.argv: list[object] = ["evaluate", self.model, "--tasks", "tiny_choice", "--include-path", self.tasks]

    def also(self, *words: object) -> Place:
        """More of the command line."""
        self.argv += words
        return self

    def option(self, line: str) -> Place:
        """The words of a line, with paths in place of what stands for one."""
        for name, make in STANDS_FOR.items():
            line = line.replace(name, str(make(self))) if name in line else line
        return self.also(*line.split())

    def given(self, model: object) -> Place:
        self.argv[1] = model
        return self

    def put(self, name: str, text: str) -> Place:
        """A file of the model."""
        (self.model / name).write_text(text)
        return self

    def genai(self, **values: Any) -> Place:
        """The package with these keys in genai_config.json's `model`, and a decoder's file where they have none."""
        decoder = {"filename": "model.onnx", **values.pop("decoder", {})}
        content = {"model": {"type": "llama", "context_length": 64, "decoder": decoder, **values}}
        return self.put("genai_config.json", json.dumps(content))

    def graph(self, edit: Callable[[onnx.ModelProto], object]) -> Place:
        graph = onnx.load(self.model / "model.onnx")
        edit(graph)
        onnx.save(graph, self.model / "model.onnx")
        return self

    def graph_is(self, content: bytes) -> Place:
        (self.model / "model.onnx").write_bytes(content)
        return self

    def external(self, edit: Callable[[Path], object]) -> Place:
        """The weights in a file of their own, which `edit` changes."""
        graph = onnx.load(self.model / "model.onnx")
        onnx.save(graph, self.model / "model.onnx", save_as_external_data=True, location="w.data", size_threshold=0)
        edit(self.model / "w.data")
        return self

    def tokenizer(self, edit: Callable[[dict[str, Any]], object]) -> Place:
        content = json.loads((self.model / "tokenizer.json").read_text())
        edit(content)
        return self.put("tokenizer.json", json.dumps(content))

    def tasks_are(self, name: str) -> Place:
        self.argv[3] = name
        return self

    def task(self, text: str, **beside: str) -> Place:
        """A task `mine`, and other files beside it, by their names with "_" for the dot."""
        self.argv[3], self.argv[5] = "mine", shutil.copytree(self.tasks, self.here / "tasks")
        texts = {"mine_yaml": re.sub("task: tiny_(choice|generate)", "task: mine", text), **beside}
        for name, content in texts.items():
            (self.here / "tasks" / name.replace("_", ".")).write_text(content)
        return self

    def data(self, *lines: str, kind: str = "json", split: str = "test", encoding: str = "utf-8") -> Place:
        """A task with `lines` as its data, in a file of its own."""
        source = f"dataset_path: {kind}\ndataset_kwargs: {{data_files: {{test: {self.here}/tasks/data.{kind}}}}}\n"
        self.task(CHOICE.replace(HEAD, f"{source}test_split: {split}\n"))
        (self.here / "tasks" / f"data.{kind}").write_text("\n".join(lines), encoding=encoding)
        return self

    def coded(self, field: str, code: str, value: str = "!function mine.f", more: str = "") -> Place:
        """A task with a function of its own for `field`."""
        lines = re.sub(rf"^{field}:.*\n(?:  .*\n)*", "", CHOICE, flags=re.MULTILINE)
        return self.task(f"{lines}{field}: {value}\n{more}", mine_py=f"\ndef f(*values):\n    {code}\n")

    def pipe(self, name: str) -> Place:
        """A named pipe, which no reading of ends, in the place of a file."""
        (self.here / name).unlink(missing_ok=True)
        os.mkfifo(self.here / name)
        return self

    def link(self, name: str, target: object) -> Place:
        (self.here / name).unlink(missing_ok=True)
        (self.here / name).symlink_to(str(target))
        return self


def a_file(place: Place) -> Path:
    (place.here / "f").touch()
    return place.here / "f"


STANDS_FOR: dict[str, Callable[[Place], Path]] = {
    "FILE": a_file,
    "LINK": lambda p: p.link("l", "/no/x").here / "l",
    "PIPE": lambda p: p.pipe("x.onnx_adapter").here / "x.onnx_adapter",
    "WHOLE": lambda p: p.whole,
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mistakes")
    put_model(folder / "model")
    (folder / "model" / "config.json").write_text('{"max_position_embeddings": 64}')
    write_tasks(folder / "tasks")
    return folder


def smaller(graph: onnx.ModelProto) -> None:
    """A vocabulary of 100 tokens; the tokenizer has 320."""
    for tensor in graph.graph.initializer:
        values = numpy_helper.to_array(tensor)
        if tensor.name == "embedding":
            tensor.CopyFrom(numpy_helper.from_array(values[:100].copy(), tensor.name))
        if tensor.name == "head":
            tensor.CopyFrom(numpy_helper.from_array(values[:, :100].copy(), tensor.name))
    graph.graph.output[0].type.tensor_type.shape.dim[2].dim_value = 100


def with_token(place: Place, number: int) -> Place:
    """A token for what tasks' texts hold."""
    flags = dict.fromkeys(("normalized", "special", "single_word", "lstrip", "rstrip"), False)
    return place.tokenizer(lambda c: c["added_tokens"].append({"id": number, "content": "cat", **flags}))


def without_text(data: Path) -> None:
    """The file of the weights has a name of as many bytes that is no UTF-8."""
    graph = data.with_name("model.onnx")
    graph.write_bytes(graph.read_bytes().replace(b"w.data", b"w\xed\xa0\x80ta"))


class Row(NamedTuple):
    """A mistake; the error's code, what else its sentence holds word by word, and field and value where it has them."""

    make: Callable[[Place], Place]
    code: str
    words: str = ""
    field: str = ""
    value: str | None = None


WRONG, DENIED, ALIEN, UNFIT, DAMAGED = "wrong_value", "no_access", "untrusted", "unsupported", "damaged"
OPTIONS: list[tuple[str, ...]] = [
    ("--output FILE", DENIED, "", "output_dir"),
    ("--output FILE/x", DENIED, "", "output_dir"),
    ("--output LINK", WRONG, "/no/x", "output_dir"),
    ("--output /proc/x", DENIED, "", "output_dir", "/proc/x"),
    ("--output /dev/null", DENIED, "", "output_dir", "/dev/null"),
    ("--sample-log-num 1 --set sample_log_dir=FILE", DENIED, "", "sample_log_dir"),
    ("--use-cache FILE/x", DENIED, "", "use_cache"),
    ("--reference WHOLE --set reference.records_dir=FILE/x", DENIED, "", "reference.records_dir"),
    ("--reference WHOLE --set reference.records_dir=/proc/x", DENIED, "", "reference.records_dir", "/proc/x"),
    ("--set engine.num_threads=100000", WRONG, "", "engine.num_threads", "100000"),
    ('--set engine.adapters=["PIPE"]', DENIED, "onnx_adapter"),
    ('--set engine.session_options={"session.set_denormal_as_zer":"1"}', "unknown_name", "ONNX set_denormal_as_zero"),
    ("--provider cpu --provider-option bogus=1", "provider", "bogus"),
    ("--provider cuda", "provider", "CUDAExecutionProvider"),
    ("--against provider=cuda", "provider", "CUDAExecutionProvider reference.execution_provider"),
    ("--gen-kwargs top_k=abc,do_sample=true", WRONG, "", "top_k", "abc"),
    ("--gen-kwargs temperature=x", WRONG, "", "temperature", "x"),
    ("--gen-kwargs temprature=1", "unsupported", "temperature", "temprature", "1"),  # of a task that only scores
    ("--gen-kwargs temperature=-1", WRONG, "0", "temperature", "-1"),
    ("--gen-kwargs max_gen_toks=abc", WRONG, "", "max_gen_toks", "abc"),
    ("--num-fewshot 1000", WRONG, "tiny_choice 6", "num_fewshot", "1000"),
    ("--apply-chat-template", UNFIT, "", "apply_chat_template"),
]

IN_OPTIONS = "model.decoder.session_options"
GENAI: list[tuple[Any, ...]] = [
    ({"context_length": 2**40}, DAMAGED, "model context_length 1099511627776 2147483647"),
    ({"context_length": "many"}, DAMAGED, "genai_config model many context_length 2147483647"),
    ({"context_length": -5}, DAMAGED, "model context_length -5 2147483647"),
    ({"vocab_size": 10**12}, DAMAGED, "model vocab_size 1000000000000 16777216"),
    ({"decoder": {"num_key_value_heads": 10**9}}, DAMAGED, "model num_key_value_heads 1000000000 -1048576"),
    ({"eos_token_id": 2**70}, DAMAGED, "model eos_token_id 1180591620717411303424 32"),
    ({"eos_token_id": {"a": 1}}, DAMAGED, "model eos_token_id"),
    ({"decoder": {"filename": 3}}, DAMAGED, "model 3"),
    ({"decoder": {"filename": "\ud800.onnx"}}, DAMAGED, "genai_config JSON"),
    ({"decoder": {"inputs": ["a"]}}, DAMAGED, "model"),
    ({"decoder": {"session_options": [1]}}, DAMAGED, "model session_options"),
    ({"decoder": {"sliding_window": {"window_size": "q"}}}, DAMAGED, "model sliding_window window_size"),
    ({"decoder": {"pipeline": "x"}}, DAMAGED, "model"),
    ({"decoder": {"filename": "../x.onnx"}}, ALIEN, "../x.onnx"),
    ({"decoder": {"filename": "/etc/passwd"}}, ALIEN, "/etc/passwd"),
    ({"vision": {"filename": "../x.onnx"}}, ALIEN, "model"),
    ({"tokenizer_dir": "../.."}, ALIEN, "model tokenizer_dir"),
    (
        {"decoder": {"session_options": {"custom_ops_library": "evil.so"}}},
        *(ALIEN, "trust_remote_code", f"{IN_OPTIONS}.custom_ops_library", "evil.so"),
    ),
    (
        {"decoder": {"session_options": {"provider_options": [{"qnn": {"backend_path": "evil.so"}}]}}},
        *(ALIEN, "trust_remote_code", f"{IN_OPTIONS}.provider_options.qnn.backend_path", "evil.so"),
    ),
    (
        {"decoder": {"session_options": {"provider_options": [{"cpu": {"arena": "1"}}]}}},
        *("provider", "arena genai_config"),
    ),
]

OWN_TOKENIZER = '{"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}}'
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12345\n"
FILES: list[tuple[str, ...]] = [
    ("tokenizer_config.json", OWN_TOKENIZER, UNFIT, "auto_map trust_remote_code"),
    (
        "tokenizer_config.json",
        '{"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": [64]}',
        UNFIT,
        "list",
    ),
    ("model.onnx", LFS, DAMAGED, "model LFS"),
    ("genai_config.json", "[" * 100_000, DAMAGED, "genai_config JSON"),
    ("config.json", " " * (17 << 20), "too_large", "17 825 792"),
    ("config.json", '{"n_positions": "x"}', DAMAGED, "n_positions 2147483647"),
    ("config.json", f'{{"vocab_size": {"9" * 5000}}}', DAMAGED, "JSON"),
    ("generation_config.json", '{"eos_token_id": "2"}', DAMAGED, "generation_config eos_token_id 2"),
    (
        *("genai_config.json", '{"search": {"max_length": "x"}, "model": {"decoder": {"filename": "model.onnx"}}}'),
        *(DAMAGED, "genai_config max_length"),
    ),
]
TEMPLATES: list[tuple[str, str]] = [
    ("{% for x in %}", "model"),
    ("{{ 'x' * 20000000 }}", "20,000,000 16,777,216 LONGEST_TEXT"),
    ("{{ 1 // 0 }}", "model ZeroDivisionError"),
    ("a{{ '\\ud800' }}", "model surrogate character 1"),
    ("{{ 1 + 'x' }}", "model TypeError"),
    ("{% include 'x' %}", "model TypeError loader"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "model RecursionError"),
]
MODELS: dict[str, Row] = {
    "device": Row(lambda p: p.given("/dev/null"), DENIED, "/dev/null"),
    "pipe": Row(lambda p: p.pipe("x.onnx").given(p.here / "x.onnx"), DENIED, "x.onnx"),
    "no UTF-8 in its name": Row(lambda p: p.given(p.model.rename(p.here / "a\udcff")), UNFIT, "a UTF-8 rename"),
    "pipe in it": Row(lambda p: p.pipe("model/chat_template.jinja"), DENIED, "chat_template model"),
    "pipe of tokens": Row(lambda p: p.pipe("model/added_tokens.json"), DENIED, "added_tokens"),
    "link out": Row(
        lambda p: p.link("model/chat_template.jinja", "/etc/hostname"), UNFIT, "chat_template /etc/hostname"
    ),
    "decoder through a link": Row(
        lambda p: p.link("model/out.onnx", p.whole / "model.onnx").genai(decoder={"filename": "out.onnx"}),
        ALIEN,
        "model",
    ),
    "folder through a link": Row(
        lambda p: p.link("model/out", p.whole).genai(decoder={"filename": "out/model.onnx"}), ALIEN, "out/model"
    ),
    "token with a giant id": Row(
        lambda p: p.tokenizer(lambda c: c["model"]["vocab"].update(cat=4 * 10**9)),
        UNFIT,
        "cat 4000000000 4194303 LARGEST_ID",
    ),
    "no vocabulary": Row(lambda p: p.tokenizer(lambda c: c["model"].update(vocab={}, merges=[])), UNFIT, "model"),
    **{
        f"token beyond the embedding, {kind}": Row(
            lambda p, kind=kind: with_token(p.tasks_are(kind), 320), "contradiction", f"{kind} cat 320"
        )
        for kind in ("tiny_choice", "tiny_rolling", "tiny_generate")
    },
    "node without input": Row(lambda p: p.graph(lambda g: g.graph.node[3].ClearField("input")), UNFIT, "model"),
    "weights missing": Row(lambda p: p.external(Path.unlink), "not_found"),
    "weights cut off": Row(lambda p: p.external(lambda f: f.write_bytes(f.read_bytes()[:999])), DAMAGED, "999"),
    "weights not pulled": Row(lambda p: p.external(lambda f: f.write_text(LFS)), DAMAGED, "LFS 12345"),
    "weights' name no text": Row(lambda p: p.external(without_text), DAMAGED, "model location"),
    "graph cut off": Row(lambda p: p.graph_is((p.whole / "model.onnx").read_bytes()[:999]), DAMAGED, "model.onnx"),
    "smaller vocabulary": Row(lambda p: p.graph(smaller), "contradiction", "319 100"),
    "opset": Row(lambda p: p.graph(lambda g: setattr(g.opset_import[0], "version", 999)), UNFIT, "ONNX"),
    "version": Row(lambda p: p.graph(lambda g: setattr(g, "ir_version", 999)), UNFIT, "model 999"),
}

DEEP = "a: " + "[" * 50_000 + "]" * 50_000
NONE_LEFT = 'doc_to_choice: "{{ [] if answer == 2 else choices }}"'
TASK, UNKNOWN = "task", "unknown_name"
TASKS: list[tuple[str, ...]] = [
    (CHOICE + "\nfoo: [1,2", DAMAGED, "mine.yaml line"),
    ("- a\n", DAMAGED, "mine.yaml"),
    (CHOICE.replace("doc_to_text", "doc_to_txt"), "unknown_key", "mine.yaml 'doc_to_txt' 'doc_to_text'?"),
    (CHOICE + "num_fewshot: 1\nnum_fewshot: 0\n", DAMAGED, "num_fewshot 15"),
    (CHOICE + "unsafe_code: true\n", TASK, "mine confirm_run_unsafe_code"),
    (CHOICE.replace("acc_norm", "nosuch"), UNKNOWN, "mine nosuch"),
    (CHOICE.replace("acc_norm", "../.."), UNKNOWN, "mine"),
    (CHOICE.replace("acc_norm", "-1"), TASK, "mine metric_list -1"),
    (CHOICE.replace("metric: acc\n", "metric: acc\n    aggregation: nosuch\n"), UNKNOWN, "nosuch"),
    (CHOICE + "metadata: &a {a: *a}\n", TASK, "*a 14"),
    (CHOICE + f"metadata: {{a: 1{':1' * 999}.5}}\n", DAMAGED, "mine.yaml float"),
    (CHOICE + DEEP, TASK, "14 64 DEEPEST"),
    (CHOICE + "include: mine.yaml\n", DAMAGED, "", "include"),
    (CHOICE + "include: nosuch.yaml\n", "not_found", "", "include", "nosuch.yaml"),
    (GENERATE + "repeats: 100000000\n", WRONG, "mine", "repeats", "100000000"),
    (CHOICE + "num_fewshot: -3\n", WRONG, "mine 0", "num_fewshot", "-3"),
    (CHOICE + "num_fewshot: 100000000\n", WRONG, "mine 6", "num_fewshot", "100000000"),
    (CHOICE.replace("{{question}}", "{{ 'x' * 20000000 }}"), TASK, "mine 20,000,000 16,777,216"),
    (CHOICE.replace("{{question}}", "{{ 'x' * 20000000 if answer == 2 else 'x' }}"), TASK, "mine 16,777,216"),
    (CHOICE.replace("{{question}}", "{{ question.__class__.__mro__ }}"), TASK, "SecurityError"),
    ("group: mine\ntask: []\n", WRONG, "mine", "task", "[]"),
    (GENERATE.replace("max_gen_toks: 6", "bogus: 6"), UNFIT, "mine", "bogus", "6"),
    (GENERATE.replace("max_gen_toks: 6", "max_gen_toks: 1000000000000"), TASK, "mine max_gen_toks 1000000000000"),
    (GENERATE.replace("  - name: strict\n    filter:", "  - filter:"), TASK, "mine filter_list name"),
    (GENERATE.replace('"([a-z]+)"', '"("'), TASK, "mine filter_list"),
    (CHOICE.replace("doc_to_choice: choices", NONE_LEFT), TASK, "mine document 1 has no"),
    (CHOICE.replace("answer", "'{{ none }}'"), TASK, "mine None 0"),
]


def self_scored(place: Place) -> Place:
    """Nothing but the log of samples asks for the targets."""
    place.coded("doc_to_target", "return {0: 0, 1: 1}[values[0]['answer']]", more="process_results: !function mine.g\n")
    code = place.here / "tasks" / "mine.py"
    code.write_text(f"{code.read_text()}def g(*_): return {{'acc': 1.0}}\n")
    return place.also("--set", "sample_log_num=9", "--output", place.here / "out")


OF_OWN = "metric: !function mine.f, aggregation: mean, higher_is_better: true"
TWO = ROLLING.replace("tiny_rolling", "two")
MORE_TASKS: dict[str, Row] = {
    "misspelt": Row(lambda p: p.tasks_are("tiny_choise"), UNKNOWN, "tiny_choice", "tasks", "['tiny_choise']"),
    "brackets beside it": Row(lambda p: p.task(CHOICE, other_yaml=DEEP), TASK, "64 DEEPEST"),
    "pipe beside it": Row(lambda p: p.task(CHOICE).pipe("tasks/other.yaml"), TASK, "other.yaml"),
    "ring": Row(lambda p: p.task(CHOICE).link("tasks/mine.yaml", p.here / "tasks/mine.yaml"), DAMAGED),
    "includes a pipe": Row(lambda p: p.task(CHOICE + "include: pipe\n").pipe("tasks/pipe"), TASK, "pipe"),
    "code is a pipe": Row(
        lambda p: p.task(CHOICE.replace("local.load", "pipe.load")).pipe("tasks/pipe.py"), TASK, "pipe.py"
    ),
    "data are a pipe": Row(lambda p: p.data("").pipe("tasks/data.json"), TASK, "data.json"),
    "answers in a group": Row(
        lambda p: p.task("group: mine\ntask: [two]\n", two_yaml=f"{TWO}repeats: 0\n"),
        WRONG,
        "two 10000",
        "repeats",
        "0",
    ),
    "group with an empty group": Row(
        lambda p: p.task("group: mine\ntask: [other, tiny_choice]\n", other_yaml="group: other\ntask: null\n"),
        *(WRONG, "other", "task"),
    ),
    "group in itself": Row(
        lambda p: p.task("group: mine\ntask: [other]\n", other_yaml="group: other\ntask: [mine]\n"), TASK, "mine"
    ),
    "metric that raises": Row(
        lambda p: p.task(
            GENERATE.replace("metric: exact_match", f"{{{OF_OWN}}}"), mine_py="\ndef f(*_, **__):\n    return {}['x']\n"
        ),
        *(TASK, "mine 0 3"),
    ),
    "target that raises where scores are the task's": Row(self_scored, TASK, "mine 1 2 3"),
}

ROW = '{"question": "the cat", "choices": [" a", " b"], "answer": 0}'
NAMES = "question,choices,answer"
DATA: list[tuple[tuple[str, ...], dict[str, str], str]] = [
    ((ROW, '{"question": ', ROW), {}, "mine 2"),
    ((ROW, ROW.replace("cat", "c\xe4t")), {"encoding": "latin-1"}, "mine 2 0xe4 utf-8"),
    (("1", ROW), {}, "mine 1"),
    ((ROW, ROW.replace('"answer"', '"question"')), {}, "mine question 2"),
    (("",), {}, "mine"),
    ((ROW,), {"split": "validation"}, "mine validation test"),
    (('{"other": 1}',), {}, "mine 0 question columns 'other'"),
    ((ROW, '{"question": "a", "choices": [" a", " b"]}'), {}, "mine 1"),
    ((ROW, ROW.replace("0", "7")), {}, "mine 1 7 2"),
    ((NAMES, "a,b,0"), {"kind": "csv"}, "mine 0"),
    ((NAMES, "a,b,0", "a,b,0,5"), {"kind": "csv"}, "mine 3 4"),
    (("PAR1",), {"kind": "parquet"}, "mine 4"),
]

IN_FIRST = ", document 0"
FIELDS = {"doc_to_text": IN_FIRST, "doc_to_target": IN_FIRST, "process_docs": "", "process_results": IN_FIRST}
ENDINGS = {
    "raise SystemExit(0)": "SystemExit:",
    "__import__('os')._exit(0)": "SystemExit:",
    "return f(*values)": "RecursionError:",
}
CODED: list[tuple[str, ...]] = [  # field, code, value, and the expected code and words
    *(
        (field, code, "!function mine.f", TASK, f"'mine'{document}: {error} mine.py, 3)")
        for field, document in FIELDS.items()
        for code, error in ENDINGS.items()
    ),
    ("doc_to_text", "pass\nexit(0)", "!function mine.f", TASK, "tasks 'mine' SystemExit: 0 mine.py, 4)"),
    ("doc_to_text", "raise type('Stop', (BaseException,), {})('so')", "!function mine.f", TASK, "mine tasks"),
    *(
        ("process_results", f"return {value}", "!function mine.f", TASK, f"'mine', 0: 'process_results' {value}:")
        for value in ("None", "1.5", "{5: 1.0}")
    ),
    ("process_results", "return {'acc': 'right'}", "!function mine.f", TASK, "mine"),
    ("metric_list", "exit()", "[{metric: acc, aggregation: !function mine.f}]", TASK, "mine 3"),
    ("metric_list", "pass", "[{metric: !function mine.f}]", TASK, "mine aggregation"),
    ("metric_list", "pass", "[{metric: acc, higher_is_better: maybe}]", WRONG, "mine higher_is_better maybe"),
    ("fewshot_config", "raise KeyError('s')", "{sampler: first_n, samples: !function mine.f}", TASK, "mine 3"),
    ("gen_prefix", "pass", "!function mine.f", TASK, "mine"),
    ("doc_to_text", "return 'a' + chr(0xD800)", "!function mine.f", TASK, "mine surrogate character 1"),
]


MISTAKES = {
    **{line: Row(lambda p, line=line: p.option(line), *rest) for line, *rest in OPTIONS},
    **{f"genai {values}": Row(lambda p, values=values: p.genai(**values), *rest) for values, *rest in GENAI},
    **{
        f"{name} {text[:60]}": Row(lambda p, name=name, text=text: p.put(name, text), *rest)
        for name, text, *rest in FILES
    },
    **{
        f"template {text}": Row(
            lambda p, text=text: p.put("chat_template.jinja", text).also("--apply-chat-template"), WRONG, words
        )
        for text, words in TEMPLATES
    },
    **{f"model: {name}": row for name, row in MODELS.items()},
    **{f"task {n}": Row(lambda p, text=text: p.task(text), *rest) for n, (text, *rest) in enumerate(TASKS)},
    **{f"task: {name}": row for name, row in MORE_TASKS.items()},
    **{
        f"data {lines} {how}": Row(lambda p, lines=lines, how=how: p.data(*lines, **how), TASK, words)
        for lines, how, words in DATA
    },
    **{
        f"{field}: {code}, {value}": Row(lambda p, given=(field, code, value): p.coded(*given), *rest)
        for field, code, value, *rest in CODED
    },
}


def test_a_metric_that_is_no_number_is_named(root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The others stand: they may have taken hours."""
    place = Place(root, tmp_path)
    place.coded("metric_list", "return 'good'", "[{metric: acc, aggregation: !function mine.f}]")
    assert main([str(word) for word in place.argv]) == 0
    assert "task 'mine': acc,none is 'good', no number: it is no metric" in capfd.readouterr().err


@pytest.mark.parametrize(
    "row", MISTAKES.values(), ids=(name[:70].encode("ascii", "replace").decode() for name in MISTAKES)
)
def test_mistake_is_named_in_one_line(
    row: Row, root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OLIVE_EXT_ISOLATION", "none")
    place, errors = row.make(Place(root, tmp_path)), list[OliveExtError]()
    functions = {name: noting(command.function, errors) for name, command in commands().items()}
    assert main([str(word) for word in place.argv], functions) == 2
    _, err = capfd.readouterr()
    lines = last_lines(err)
    assert len(lines) == 1, err
    assert lines[0].startswith("olive-ext: error: ")
    assert "onnxruntime_src" not in lines[0]
    assert_says(errors[0], row.code, row.field, holds=tuple(row.words.split()))
    assert row.value is None or str(errors[0].value) == row.value


def noting(function: str, errors: list[OliveExtError]) -> Callable[[Namespace], int]:
    """A command whose errors are noted as they pass."""

    def run(arguments: Namespace) -> int:
        try:
            status: int = load(function)(arguments)
            return status
        except OliveExtError as error:
            errors.append(error)
            raise

    return run
