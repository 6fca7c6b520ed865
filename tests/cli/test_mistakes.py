"""One table of mistakes: what a user did, and the one line that is said of it. Each ends with exit status 2, a line
that names the mistake, no traceback, and nothing of other libraries on the terminal."""

from __future__ import annotations

import json
import os
import re
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import numpy_helper

from olive_ext.cli import main
from olive_ext.cli.parser import commands
from olive_ext.errors import OliveExtError
from olive_ext.registry import load
from tests.backends.local_tasks import CHOICE, GENERATE, HEAD, ROLLING, write_tasks
from tests.check.tiny import put_model
from tests.refusals import assert_says

DEEP = "[" * 100_000


class Place:
    """A model, tasks, and a folder for one mistake."""

    def __init__(self, root: Path, here: Path) -> None:
        self.whole, self.tasks, self.here = root / "model", root / "tasks", here
        self.model = Path(shutil.copytree(self.whole, here / "model"))
        self.argv: list[object] = ["evaluate", self.model, "--tasks", "tiny_choice", "--include-path", self.tasks]

    def put(self, name: str, text: str) -> Place:
        """A file of the model."""
        (self.model / name).write_text(text)
        return self

    def genai(self, **values: Any) -> Place:
        """The package with these keys in genai_config.json's `model`; None for the decoder's file."""
        decoder = {"filename": "model.onnx", **values.pop("decoder", {})}
        content = {"model": {"type": "llama", "context_length": 64, "decoder": decoder, **values}}
        (self.model / "genai_config.json").write_text(json.dumps(content))
        return self

    def task(self, text: str) -> Place:
        folder = self.here / "tasks"
        shutil.copytree(self.tasks, folder)
        (folder / "mine.yaml").write_text(re.sub("task: tiny_(choice|generate)", "task: mine", text))
        self.argv[3], self.argv[5] = "mine", folder
        return self

    def beside(self, name: str, text: str, task: str = "") -> Place:
        """Another file beside the task of `task`, with the text of `task` named by the file."""
        (self.here / "tasks" / name).write_text(text.replace(task or name, Path(name).stem))
        return self

    def data(self, *lines: str, kind: str = "json", split: str = "test", encoding: str = "utf-8") -> Place:
        """A task with `lines` as its data, in a file of its own."""
        source = f"dataset_path: {kind}\ndataset_kwargs: {{data_files: {{test: {self.here}/tasks/data.{kind}}}}}\n"
        self.task(CHOICE.replace(HEAD, f"{source}test_split: {split}\n"))
        (self.here / "tasks" / f"data.{kind}").write_text("\n".join(lines), encoding=encoding)
        return self

    def tasks_are(self, name: str) -> Place:
        self.argv[3] = name
        return self

    def also(self, *more: object) -> Place:
        self.argv += more
        return self


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mistakes")
    put_model(folder / "model")
    (folder / "model" / "config.json").write_text('{"max_position_embeddings": 64}')
    write_tasks(folder / "tasks")
    return folder


def edit_graph(place: Place, edit: Callable[[onnx.ModelProto], None]) -> Place:
    graph = onnx.load(place.model / "model.onnx")
    edit(graph)
    onnx.save(graph, place.model / "model.onnx")
    return place


def external(place: Place, edit: Callable[[Path], object]) -> Place:
    """The weights in a file of their own, which `edit` changes."""
    graph = onnx.load(place.model / "model.onnx")
    onnx.save(graph, place.model / "model.onnx", save_as_external_data=True, location="w.data", size_threshold=0)
    edit(place.model / "w.data")
    return place


def smaller(graph: onnx.ModelProto) -> None:
    """A vocabulary of 100 tokens; the tokenizer has 320."""
    for tensor in graph.graph.initializer:
        values = numpy_helper.to_array(tensor)
        if tensor.name == "embedding":
            tensor.CopyFrom(numpy_helper.from_array(values[:100].copy(), tensor.name))
        if tensor.name == "head":
            tensor.CopyFrom(numpy_helper.from_array(values[:, :100].copy(), tensor.name))
    graph.graph.output[0].type.tensor_type.shape.dim[2].dim_value = 100


def written(place: Place, name: str, text: str) -> Path:
    path = place.here / name
    path.write_text(text)
    return path


def linked(place: Place, name: str, target: str) -> Path:
    path = place.here / name
    path.symlink_to(target)
    return path


def piped(place: Place, name: str) -> Place:
    """A named pipe, which no reading of ends."""
    (place.here / name).unlink(missing_ok=True)
    os.mkfifo(place.here / name)
    return place


def ringed(place: Place, name: str) -> Place:
    """A link to itself."""
    (place.here / name).unlink()
    (place.here / name).symlink_to(place.here / name)
    return place


def included(place: Place) -> Place:
    """A task file whose includes include others."""
    for number in range(200):
        place.beside(f"part{number}", f"include: part{number + 1}\n", "none")
    return place


def grouped(place: Place, depth: int) -> Place:
    """Groups of ten groups each."""
    place.task("group: mine\ntask: [g0]\n")
    for number in range(depth):
        place.beside(f"g{number}.yaml", f"group: g{number}\ntask: [{', '.join([f'g{number + 1}'] * 10)}]\n")
    return place.beside(f"g{depth}.yaml", f"group: g{depth}\ntask: [tiny_choice]\n")


def edit_tokenizer(place: Place, number: int) -> Place:
    """A token for what tasks' texts hold."""
    file = place.model / "tokenizer.json"
    content = json.loads(file.read_text())
    added = {"id": number, "content": "cat", "normalized": False, "special": False}
    content["added_tokens"].append({**added, "single_word": False, "lstrip": False, "rstrip": False})
    file.write_text(json.dumps(content))
    return place


def linked_in(place: Place, name: str, target: str) -> Place:
    (place.model / name).unlink(missing_ok=True)
    (place.model / name).symlink_to(target)
    return place


def pipe(place: Place, name: str) -> Path:
    os.mkfifo(place.here / name)
    return place.here / name


def given(place: Place, model: object) -> Place:
    place.argv[1] = model
    return place


def coded(place: Place, field: str, code: str, value: str = "!function mine.f") -> Place:
    """A task with a function of its own for `field`."""
    lines = re.sub(rf"^{field}:.*\n(?:  .*\n)*", "", CHOICE, flags=re.MULTILINE)
    place.task(f"{lines}{field}: {value}\n")
    (place.here / "tasks" / "mine.py").write_text(f"\ndef f(*values):\n    {code}\n")
    return place


def self_scored(place: Place) -> Place:
    """Nothing but the log of samples asks for the targets."""
    for name, text in (
        ("mine.yaml", "process_results: !function mine.g"),
        ("mine.py", "def g(*_): return {'acc': 1.0}"),
    ):
        file = place.here / "tasks" / name
        file.write_text(f"{file.read_text()}{text}\n")
    return place.also("--set", "sample_log_num=9", "--output", place.here / "out")


def renamed(graph: Path) -> None:
    """The file of the weights has a name of as many bytes that is no UTF-8."""
    graph.write_bytes(graph.read_bytes().replace(b"w.data", b"w\xed\xa0\x80ta"))


def without_tokens(file: Path) -> str:
    content = json.loads(file.read_text())
    content["model"] |= {"vocab": {}, "merges": []}
    return json.dumps(content)


OF_OWN = "aggregation: mean, higher_is_better: true"
ADDED = '{"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": {"%d": {"content": "cat"}}}'
MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n}\n  <<: [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12))
ROW = '{"question": "the cat", "choices": [" a", " b"], "answer": 0}'
OWN_TOKENIZER = json.dumps({"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}})
LISTED_LENGTH = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": [64]})
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12345\n"
MISTAKES: dict[str, tuple[Callable[[Place], Place], str | dict[str, Any]]] = {
    # folders, before the model is opened
    "output is a file": (
        lambda p: p.also("--output", written(p, "f", "")),
        {"code": "no_access", "field": "output_dir"},
    ),
    "output below a file": (
        lambda p: p.also("--output", written(p, "f", "") / "x"),
        {"code": "no_access", "field": "output_dir"},
    ),
    "output is a dangling link": (
        lambda p: p.also("--output", linked(p, "l", "/no/x")),
        {"code": "wrong_value", "field": "output_dir", "holds": "/no/x"},
    ),
    "output cannot be written": (
        lambda p: p.also("--output", "/proc/x"),
        {"code": "no_access", "field": "output_dir", "value": "/proc/x"},
    ),
    "log folder is a file": (
        lambda p: p.also("--sample-log-num", 1, "--set", f"sample_log_dir={written(p, 'f', '')}"),
        {"code": "no_access", "field": "sample_log_dir"},
    ),
    "journal below a file": (
        lambda p: p.also("--use-cache", written(p, "f", "") / "x"),
        {"code": "no_access", "field": "use_cache"},
    ),
    "records below a file": (
        lambda p: p.also("--reference", p.whole, "--set", f"reference.records_dir={written(p, 'f', '') / 'x'}"),
        {"code": "no_access", "field": "reference.records_dir"},
    ),
    "records cannot be written": (
        lambda p: p.also("--reference", p.whole, "--set", "reference.records_dir=/proc/x"),
        {"code": "no_access", "field": "reference.records_dir", "value": "/proc/x"},
    ),
    "output that no folder can be": (
        lambda p: p.also("--output", "a" * 300),
        {"code": "wrong_value", "field": "output_dir"},
    ),
    "reference that no file can be": (
        lambda p: p.also("--set", f"reference.path={'a/' * 2500}"),
        {"code": "wrong_value", "field": "reference.path"},
    ),
    "tokenizer that no file can be": (
        lambda p: p.also("--set", r'tokenizer="a\u0000"'),
        {"code": "wrong_value", "field": "tokenizer", "value": "a\x00"},
    ),
    # settings
    "seed below 0": (
        lambda p: p.also("--seed", -1),
        {"code": "wrong_value", "field": "seed", "value": "-1", "holds": ("0", "4294967295")},
    ),
    "seed beyond 32 bits": (
        lambda p: p.also("--seed", 2**40),
        {"code": "wrong_value", "field": "seed", "value": "1099511627776"},
    ),
    "more threads than processors": (
        lambda p: p.also("--set", "engine.num_threads=100000"),
        {"code": "wrong_value", "field": "engine.num_threads", "value": 100000},
    ),
    "slots beyond reason": (
        lambda p: p.also("--set", "engine.num_slots=100000000"),
        {"code": "wrong_value", "field": "engine.num_slots", "value": 100000000, "holds": "65536"},
    ),
    "options of the CPU": (
        lambda p: p.also("--provider", "cpu", "--provider-option", "bogus=1"),
        {"code": "provider", "holds": "bogus"},
    ),
    "options of the CPU in the package": (
        lambda p: p.genai(decoder={"session_options": {"provider_options": [{"cpu": {"arena": "1"}}]}}),
        {"code": "provider", "holds": ("arena", "genai_config")},
    ),
    "misspelt session option": (
        lambda p: p.also("--set", 'engine.session_options={"session.set_denormal_as_zer": "1"}'),
        {"code": "unknown_name", "holds": ("ONNX", "set_denormal_as_zero")},
    ),
    "misspelt task": (
        lambda p: p.tasks_are("tiny_choise"),
        {"code": "unknown_name", "field": "tasks", "value": ["tiny_choise"], "holds": "tiny_choice"},
    ),
    "provider that is not here": (
        lambda p: p.also("--provider", "cuda"),
        {"code": "provider", "holds": "CUDAExecutionProvider"},
    ),
    "top_k is a word": (
        lambda p: p.also("--gen-kwargs", "top_k=abc,do_sample=true"),
        {"code": "wrong_value", "field": "top_k", "value": "abc"},
    ),
    "temperature is a word": (
        lambda p: p.also("--gen-kwargs", "temperature=x"),
        {"code": "wrong_value", "field": "temperature", "value": "x"},
    ),
    "temperature below 0": (
        lambda p: p.also("--gen-kwargs", "temperature=-1"),
        {"code": "wrong_value", "field": "temperature", "value": -1, "holds": "0"},
    ),
    "no tokens to generate": (
        lambda p: p.also("--gen-kwargs", "max_gen_toks=abc"),
        {"code": "wrong_value", "field": "max_gen_toks", "value": "abc"},
    ),
    "more examples than documents": (
        lambda p: p.also("--num-fewshot", 1000),
        {"code": "wrong_value", "field": "num_fewshot", "value": 1000, "holds": ("tiny_choice", "6")},
    ),
    "chat template that is not there": (
        lambda p: p.also("--apply-chat-template"),
        {"code": "unsupported", "field": "apply_chat_template"},
    ),
    "chat template that is broken": (
        lambda p: p.put("chat_template.jinja", "{% for x in %}").also("--apply-chat-template"),
        {"code": "wrong_value", "holds": "model"},
    ),
    "chat template with a giant number": (
        lambda p: p.put("chat_template.jinja", "{{ 9 ** 999999999 }}").also("--apply-chat-template"),
        {"code": "wrong_value", "holds": ("65", "536", "LARGEST_NUMBER")},
    ),
    "chat template with a giant text": (
        lambda p: p.put("chat_template.jinja", "{{ 'x' * 10000000000 }}").also("--apply-chat-template"),
        {"code": "wrong_value", "holds": ("10", "000", "777", "216")},
    ),
    # tokens
    "token with a giant id": (
        lambda p: edit_tokenizer(p, 4 * 10**9),
        {"code": "unsupported", "holds": ("cat", "4000000000", "4194303", "LARGEST_ID")},
    ),
    "token with a giant id in the second file": (
        lambda p: p.put("tokenizer_config.json", ADDED % 4000000000),
        {"code": "unsupported", "holds": ("tokenizer_config", "cat", "4000000000", "4194303")},
    ),
    "tokenizer that is a pipe": (
        lambda p: piped(p, "model/added_tokens.json"),
        {"code": "no_access", "holds": "added_tokens"},
    ),
    "token beyond the embedding": (
        lambda p: edit_tokenizer(p, 320),
        {"code": "contradiction", "holds": ("tiny_choice", "cat", "320")},
    ),
    "token beyond the embedding in a text": (
        lambda p: edit_tokenizer(p.tasks_are("tiny_rolling"), 320),
        {"code": "contradiction", "holds": ("tiny_rolling", "cat", "320")},
    ),
    "token beyond the embedding in a prompt": (
        lambda p: edit_tokenizer(p.tasks_are("tiny_generate"), 320),
        {"code": "contradiction", "holds": ("tiny_generate", "cat", "1", "320")},
    ),
    # genai_config.json
    "context beyond 32 bits": (
        lambda p: p.genai(context_length=2**40),
        {"code": "damaged", "holds": ("model", "context_length", "1099511627776", "2147483647")},
    ),
    "vocabulary beyond reason": (
        lambda p: p.genai(vocab_size=10**12),
        {"code": "damaged", "holds": ("model", "vocab_size", "1000000000000", "16777216")},
    ),
    "heads beyond reason": (
        lambda p: p.genai(decoder={"num_key_value_heads": 10**9}),
        {"code": "damaged", "holds": ("model", "num_key_value_heads", "1000000000", "-1048576")},
    ),
    "eos beyond 32 bits": (
        lambda p: p.genai(eos_token_id=2**70),
        {"code": "damaged", "holds": ("model", "eos_token_id", "1180591620717411303424", "32")},
    ),
    "context is a word": (
        lambda p: p.genai(context_length="many"),
        {"code": "damaged", "holds": ("genai_config", "model", "many", "context_length", "2147483647")},
    ),
    "context below 0": (
        lambda p: p.genai(context_length=-5),
        {"code": "damaged", "holds": ("model", "context_length", "-5", "2147483647")},
    ),
    "eos is a mapping": (
        lambda p: p.genai(eos_token_id={"a": 1}),
        {"code": "damaged", "holds": ("model", "eos_token_id")},
    ),
    "file name is a number": (
        lambda p: p.genai(decoder={"filename": 3}),
        {"code": "damaged", "holds": ("model", "3")},
    ),
    "inputs are a list": (lambda p: p.genai(decoder={"inputs": ["a"]}), {"code": "damaged", "holds": "model"}),
    "options are a list": (
        lambda p: p.genai(decoder={"session_options": [1]}),
        {"code": "damaged", "holds": ("model", "session_options")},
    ),
    "window is a word": (
        lambda p: p.genai(decoder={"sliding_window": {"window_size": "q"}}),
        {"code": "damaged", "holds": ("model", "sliding_window", "window_size")},
    ),
    "pipeline is a word": (lambda p: p.genai(decoder={"pipeline": "x"}), {"code": "damaged", "holds": "model"}),
    "file outside": (lambda p: p.genai(decoder={"filename": "../x.onnx"}), {"code": "untrusted", "holds": "../x.onnx"}),
    "encoder outside": (
        lambda p: p.genai(vision={"filename": "../x.onnx"}),
        {"code": "untrusted", "holds": "model"},
    ),
    "file absolute": (
        lambda p: p.genai(decoder={"filename": "/etc/passwd"}),
        {"code": "untrusted", "holds": "/etc/passwd"},
    ),
    "device as a model": (
        lambda p: given(p, "/dev/null"),
        {"code": "no_access", "holds": "/dev/null"},
    ),
    "pipe as a model": (lambda p: given(p, pipe(p, "x.onnx")), {"code": "no_access", "holds": "x.onnx"}),
    "pipe in a model": (
        lambda p: piped(p, "model/chat_template.jinja"),
        {"code": "no_access", "holds": ("chat_template", "model")},
    ),
    "pipe as an adapter": (
        lambda p: p.also("--set", f'engine.adapters=["{pipe(p, "x.onnx_adapter")}"]'),
        {"code": "no_access", "holds": "onnx_adapter"},
    ),
    "device as a folder for reports": (
        lambda p: p.also("--output", "/dev/null"),
        {"code": "no_access", "field": "output_dir", "value": "/dev/null"},
    ),
    "link in a model": (
        lambda p: linked_in(p, "chat_template.jinja", "/etc/hostname"),
        {"code": "unsupported", "holds": ("chat_template", "/etc/hostname")},
    ),
    "digits": (lambda p: p.also("--set", "limit=" + "9" * 5000), {"code": "wrong_value", "field": "limit"}),
    "digits of an argument": (lambda p: p.also("--limit", "9" * 5000), {"code": "wrong_value", "field": "limit"}),
    "digits in arguments": (
        lambda p: p.also("--gen-kwargs", f'{{"max_gen_toks": {"9" * 5000}}}'),
        {"code": "damaged", "field": "--gen-kwargs", "holds": "JSON"},
    ),
    "digits in a configuration": (
        lambda p: p.put("config.json", f'{{"vocab_size": {"9" * 5000}}}'),
        {"code": "damaged", "holds": "JSON"},
    ),
    "option of a provider": (
        lambda p: p.genai(decoder={"session_options": {"provider_options": [{"qnn": {"backend_path": "evil.so"}}]}}),
        {
            "code": "untrusted",
            "field": "model.decoder.session_options.provider_options.qnn.backend_path",
            "value": "evil.so",
            "holds": "trust_remote_code",
        },
    ),
    "tokenizer outside": (
        lambda p: p.genai(tokenizer_dir="../.."),
        {"code": "untrusted", "holds": ("model", "tokenizer_dir")},
    ),
    "native code": (
        lambda p: p.genai(decoder={"session_options": {"custom_ops_library": "evil.so"}}),
        {
            "code": "untrusted",
            "field": "model.decoder.session_options.custom_ops_library",
            "value": "evil.so",
            "holds": "trust_remote_code",
        },
    ),
    "decoder through a link": (
        lambda p: p.genai(decoder={"filename": linked(p, "model/out.onnx", str(p.whole / "model.onnx")).name}),
        {"code": "untrusted", "holds": "model"},
    ),
    "folder through a link": (
        lambda p: p.genai(decoder={"filename": f"{linked(p, 'model/out', str(p.whole)).name}/model.onnx"}),
        {"code": "untrusted", "holds": "out/model"},
    ),
    "tokenizer with code": (
        lambda p: p.put("tokenizer_config.json", OWN_TOKENIZER).put("own.py", "raise SystemExit('it ran')"),
        {"code": "unsupported", "holds": ("auto_map", "trust_remote_code")},
    ),
    "length of texts is a list": (
        lambda p: p.put("tokenizer_config.json", LISTED_LENGTH),
        {"code": "unsupported", "holds": ("model", "int", "list")},
    ),
    # graphs and weights
    "node without an input": (
        lambda p: edit_graph(p, lambda g: g.graph.node[3].ClearField("input")),
        {"code": "unsupported", "holds": "model"},
    ),
    "weights missing": (lambda p: external(p, Path.unlink), {"code": "not_found"}),
    "weights cut off": (
        lambda p: external(p, lambda f: f.write_bytes(f.read_bytes()[:999])),
        {"code": "damaged", "holds": "999"},
    ),
    "weights not pulled": (
        lambda p: external(p, lambda f: f.write_text(LFS)),
        {"code": "damaged", "holds": ("LFS", "12345")},
    ),
    "graph not pulled": (lambda p: p.put("model.onnx", LFS), {"code": "damaged", "holds": ("model", "LFS")}),
    "smaller vocabulary": (lambda p: edit_graph(p, smaller), {"code": "contradiction", "holds": ("319", "100")}),
    "unknown opset": (
        lambda p: edit_graph(p, lambda g: setattr(g.opset_import[0], "version", 999)),
        {"code": "unsupported", "holds": "ONNX"},
    ),
    "unknown version": (
        lambda p: edit_graph(p, lambda g: setattr(g, "ir_version", 999)),
        {"code": "unsupported", "holds": ("model", "999")},
    ),
    # JSON
    "deep JSON": (
        lambda p: p.put("genai_config.json", DEEP),
        {"code": "damaged", "holds": ("genai_config", "JSON")},
    ),
    "huge JSON": (
        lambda p: p.put("config.json", " " * (17 << 20)),
        {"code": "too_large", "holds": ("17", "825", "792")},
    ),
    "config.json with words": (
        lambda p: p.put("config.json", '{"n_positions": "x"}'),
        {"code": "damaged", "holds": ("n_positions", "2147483647")},
    ),
    # tasks
    "task that cannot be parsed": (
        lambda p: p.task(CHOICE + "\nfoo: [1,2"),
        {"code": "damaged", "holds": ("mine.yaml", "line ")},
    ),
    "task that is a list": (lambda p: p.task("- a\n"), {"code": "damaged", "holds": "mine.yaml"}),
    "task that runs generated code": (
        lambda p: p.task(CHOICE + "unsafe_code: true\n"),
        {"code": "task", "holds": ("mine", "confirm_run_unsafe_code")},
    ),
    "metric that is unknown": (
        lambda p: p.task(CHOICE.replace("acc_norm", "nosuch")),
        {"code": "unknown_name", "holds": ("mine", "nosuch")},
    ),
    "metric that is a path": (
        lambda p: p.task(CHOICE.replace("acc_norm", "../..")),
        {"code": "unknown_name", "holds": "mine"},
    ),
    "metric that is a number": (
        lambda p: p.task(CHOICE.replace("acc_norm", "-1")),
        {"code": "task", "holds": ("mine", "metric_list", "-1")},
    ),
    "aggregation that is unknown": (
        lambda p: p.task(CHOICE.replace("metric: acc\n", "metric: acc\n    aggregation: nosuch\n")),
        {"code": "unknown_name", "holds": "nosuch"},
    ),
    "task that merges itself many times": (
        lambda p: p.task(CHOICE + MERGES),
        {"code": "task", "holds": ("200", "000", "MOST_NODES")},
    ),
    "task beside one that merges itself many times": (
        lambda p: p.task(CHOICE).beside("other.yaml", MERGES),
        {"code": "task", "holds": ("200", "000", "MOST_NODES")},
    ),
    "task that names itself": (
        lambda p: p.task(CHOICE + "metadata: &a {a: *a}\n"),
        {"code": "task", "holds": ("*a", "14")},
    ),
    "task that nests deeply": (
        lambda p: p.task(CHOICE + "a: " + "[" * 50_000 + "]" * 50_000),
        {"code": "task", "holds": ("14", "64", "DEEPEST")},
    ),
    "task that is too large": (
        lambda p: p.task(CHOICE + "#" * (5 << 20)),
        {"code": "task", "holds": ("194", "304", "LARGEST_FILE")},
    ),
    "task that is a pipe": (
        lambda p: piped(p.task(CHOICE), "tasks/other.yaml"),
        {"code": "task", "holds": "other.yaml"},
    ),
    "task that is a ring of links": (
        lambda p: ringed(p.task(CHOICE), "tasks/mine.yaml"),
        {"code": "damaged"},
    ),
    "task that includes a pipe": (
        lambda p: piped(p.task(CHOICE + "include: pipe\n"), "tasks/pipe"),
        {"code": "task", "holds": "pipe"},
    ),
    "task whose code is a pipe": (
        lambda p: piped(p.task(CHOICE.replace("local.load", "pipe.load")), "tasks/pipe.py"),
        {"code": "task", "holds": "pipe.py"},
    ),
    "task whose data are a pipe": (
        lambda p: piped(p.data(""), "tasks/data.json"),
        {"code": "task", "holds": "data.json"},
    ),
    "task that includes itself": (
        lambda p: p.task(CHOICE + "include: mine.yaml\n"),
        {"code": "damaged", "field": "include"},
    ),
    "task that includes nothing": (
        lambda p: p.task(CHOICE + "include: nosuch.yaml\n"),
        {"code": "not_found", "field": "include", "value": "nosuch.yaml"},
    ),
    "task that includes without end": (
        lambda p: included(p.task(CHOICE + "include: part0\n")),
        {"code": "too_large", "holds": ("100", "MOST_INCLUDED")},
    ),
    "answers without number": (
        lambda p: p.task(GENERATE + "repeats: 100000000\n"),
        {"code": "wrong_value", "field": "repeats", "value": 100000000, "holds": "mine"},
    ),
    "answers without number in a group": (
        lambda p: p.task("group: mine\ntask: [two]\n").beside("two.yaml", f"{ROLLING}repeats: 0\n", "tiny_rolling"),
        {"code": "wrong_value", "field": "repeats", "value": 0, "holds": ("two", "10000")},
    ),
    "examples below 0": (
        lambda p: p.task(CHOICE + "num_fewshot: -3\n"),
        {"code": "wrong_value", "field": "num_fewshot", "value": -3, "holds": ("mine", "0")},
    ),
    "examples without number": (
        lambda p: p.task(CHOICE + "num_fewshot: 100000000\n"),
        {"code": "wrong_value", "field": "num_fewshot", "value": 100000000, "holds": ("mine", "6")},
    ),
    "prompt of a gigabyte": (
        lambda p: p.task(CHOICE.replace("{{question}}", "{{ 'x' * 2000000000 }}")),
        {"code": "task", "holds": ("mine", "000", "777", "216")},
    ),
    "prompt of a gigabyte behind the first": (
        lambda p: p.task(CHOICE.replace("{{question}}", "{{ 'x' * 2000000000 if answer == 2 else 'x' }}")),
        {"code": "task", "holds": ("mine", "000", "777", "216")},
    ),
    "group without tasks": (
        lambda p: p.task("group: mine\ntask: []\n"),
        {"code": "wrong_value", "field": "task", "value": [], "holds": "mine"},
    ),
    "group with a group without tasks": (
        lambda p: p.task("group: mine\ntask: [other, tiny_choice]\n").beside(
            "other.yaml", "group: other\ntask: null\n"
        ),
        {"code": "wrong_value", "field": "task", "holds": "other"},
    ),
    "group in itself": (
        lambda p: p.task("group: mine\ntask: [other]\n").beside("other.yaml", "group: other\ntask: [mine]\n"),
        {"code": "task", "holds": "mine"},
    ),
    "group without end": (
        lambda p: grouped(p, 12),
        {"code": "too_large", "holds": ("g7", "100", "000", "MOST_TASKS")},
    ),
    "generation that no model follows": (
        lambda p: p.task(GENERATE.replace("max_gen_toks: 6", "bogus: 6")),
        {"code": "unsupported", "field": "bogus", "value": 6, "holds": "mine"},
    ),
    "generation longer than the context": (
        lambda p: p.task(GENERATE.replace("max_gen_toks: 6", "max_gen_toks: 1000000000000")),
        {"code": "task", "holds": ("mine", "max_gen_toks", "1000000000000")},
    ),
    # data
    "line that is no JSON": (
        lambda p: p.data(ROW, '{"question": ', ROW),
        {"code": "task", "holds": ("mine", "2")},
    ),
    "line in another encoding": (
        lambda p: p.data(ROW, ROW.replace("cat", "c\xe4t"), encoding="latin-1"),
        {"code": "task", "holds": ("mine", "2", "0xe4", "UTF-8")},
    ),
    "line that is a number": (
        lambda p: p.data("1", ROW),
        {"code": "task", "holds": ("mine", "1")},
    ),
    "field that is there twice": (
        lambda p: p.data(ROW, ROW.replace('"answer"', '"question"')),
        {"code": "task", "holds": ("mine", "question", "2")},
    ),
    "data without documents": (
        lambda p: p.data(""),
        {"code": "task", "holds": "mine"},
    ),
    "data without the split": (
        lambda p: p.data(ROW, split="validation"),
        {"code": "task", "holds": ("mine", "validation", "test")},
    ),
    "field that no document has": (
        lambda p: p.data('{"other": 1}'),
        {"code": "task", "holds": ("mine", "0", "question")},
    ),
    "answer that one document lacks": (
        lambda p: p.data(ROW, '{"question": "a", "choices": [" a", " b"]}'),
        {"code": "task", "holds": ("mine", "1")},
    ),
    "answer that is none of the choices": (
        lambda p: p.data(ROW, ROW.replace("0", "7")),
        {"code": "task", "holds": ("mine", "1", "7", "2")},
    ),
    "choices that are a text": (
        lambda p: p.data("question,choices,answer", "a,b,0", kind="csv"),
        {"code": "task", "holds": ("mine", "0")},
    ),
    "row of other length": (
        lambda p: p.data("question,choices,answer", "a,b,0", "a,b,0,5", kind="csv"),
        {"code": "task", "holds": ("mine", "3", "4")},
    ),
    "table that is cut off": (
        lambda p: p.data("PAR1", kind="parquet"),
        {"code": "task", "holds": ("mine", "4")},
    ),
    "document without choices": (
        lambda p: p.task(
            CHOICE.replace("doc_to_choice: choices", 'doc_to_choice: "{{ [] if answer == 2 else choices }}"')
        ),
        {"code": "task", "holds": ("mine", "1")},
    ),
    "document without a target": (
        lambda p: p.task(CHOICE.replace("answer", "'{{ none }}'")),
        {"code": "task", "holds": ("mine", "None", "0")},
    ),
    # code of others, which may raise anything
    **{
        f"chat template with {fault}": (
            lambda p, text=text: p.put("chat_template.jinja", text).also("--apply-chat-template"),
            f"the chat template of '.*/model' cannot render the messages: {error}",
        )
        for fault, text, error in (
            ("a division by zero", "{{ 1 // 0 }}", "ZeroDivisionError"),
            ("a sum of two kinds", "{{ 1 + 'x' }}", "TypeError"),
            ("another template", "{% include 'x' %}", "TypeError: no loader"),
            ("a macro without end", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        )
    },
    **{
        f"{field} that {fault}": (
            lambda p, field=field, code=code: coded(p, field, code),
            rf"{where}: {error} \(.*mine.py, line 3\)",
        )
        for field, where in (
            ("doc_to_text", "task 'mine', document 0"),
            ("doc_to_target", "task 'mine', document 0"),
            ("process_docs", "task 'mine'"),
            ("process_results", "task 'mine', document 0"),
        )
        for fault, code, error in (
            ("ends the process", "raise SystemExit(0)", "SystemExit: 0"),
            ("ends it at once", "__import__('os')._exit(0)", "SystemExit: 0"),
            ("calls itself", "return f(*values)", "RecursionError: .*"),
        )
    },
    "aggregation that ends the process": (
        lambda p: coded(p, "metric_list", "exit()", "[{metric: acc, aggregation: !function mine.f}]"),
        {"code": "task", "holds": ("mine", "3")},
    ),
    "metric without an aggregation": (
        lambda p: coded(p, "metric_list", "pass", "[{metric: !function mine.f}]"),
        {"code": "task", "holds": ("mine", "aggregation")},
    ),
    "metric that raises": (
        lambda p: p.task(GENERATE.replace("metric: exact_match", f"{{metric: !function mine.f, {OF_OWN}}}")).beside(
            "mine.py", "\ndef f(*_, **__):\n    return {}['x']\n"
        ),
        {"code": "task", "holds": ("mine", "0", "3")},
    ),
    "target that raises where scores are made by the task": (
        lambda p: self_scored(coded(p, "doc_to_target", "return {0: 0, 1: 1}[values[0]['answer']]")),
        {"code": "task", "holds": ("mine", "1", "2", "3")},
    ),
    "values that no mean can be of": (
        lambda p: coded(p, "process_results", "return {'acc': 'right'}"),
        {"code": "task", "holds": "mine"},
    ),
    "task whose module ends the process": (
        lambda p: coded(p, "doc_to_text", "pass").beside("mine.py", "exit(0)\n"),
        {"code": "task", "holds": ("mine", "tasks", "0", "1")},
    ),
    "task that raises what is no Exception": (
        lambda p: coded(p, "doc_to_text", "raise type('Stop', (BaseException,), {})('so')"),
        {"code": "task", "holds": ("mine", "tasks")},
    ),
    **{
        f"results that are {what}": (
            lambda p, code=code: coded(p, "process_results", f"return {code}"),
            f"task 'mine', document 0: 'process_results' gives {code}: names of metrics with values are expected",
        )
        for what, code in (("none", "None"), ("a number", "1.5"), ("under a number", "{5: 1.0}"))
    },
    "direction that is a word": (
        lambda p: coded(p, "metric_list", "pass", "[{metric: acc, higher_is_better: maybe}]"),
        {"code": "wrong_value", "holds": ("mine", "higher_is_better", "maybe")},
    ),
    "filter without a name": (
        lambda p: p.task(GENERATE.replace("  - name: strict\n    filter:", "  - filter:")),
        {"code": "task", "holds": ("mine", "filter_list", "name")},
    ),
    "filter that is no expression": (
        lambda p: p.task(GENERATE.replace('"([a-z]+)"', '"("')),
        {"code": "task", "holds": ("mine", "filter_list")},
    ),
    "examples that raise what a missing split does": (
        lambda p: coded(p, "fewshot_config", "raise KeyError('s')", "{sampler: first_n, samples: !function mine.f}"),
        {"code": "task", "holds": ("mine", "3")},
    ),
    "prefix that is a function": (
        lambda p: coded(p, "gen_prefix", "pass"),
        {"code": "task", "holds": "mine"},
    ),
    "end that is a text": (
        lambda p: p.put("generation_config.json", '{"eos_token_id": "2"}'),
        {"code": "damaged", "holds": ("generation_config", "eos_token_id", "2")},
    ),
    "search that is no number": (
        lambda p: p.genai(vocab_size=320).put(
            "genai_config.json",
            (p.model / "genai_config.json").read_text().replace('{"model"', '{"search": {"max_length": "x"}, "model"'),
        ),
        {"code": "damaged", "holds": ("genai_config", "max_length")},
    ),
    # halves of characters, and what is empty or there twice
    "file name that is no text": (
        lambda p: p.genai(decoder={"filename": "\ud800.onnx"}),
        {"code": "damaged", "holds": ("genai_config", "JSON")},
    ),
    "weights' name that is no text": (
        lambda p: external(p, lambda f: renamed(p.model / "model.onnx")),
        {"code": "damaged", "holds": ("model", "location")},
    ),
    "adapter that no file can be": (
        lambda p: p.also("--set", r'engine.adapters=["\ud800"]'),
        {"code": "wrong_value", "field": "engine.adapters", "value": ["\ud800"]},
    ),
    "tokenizer without a vocabulary": (
        lambda p: p.put("tokenizer.json", without_tokens(p.model / "tokenizer.json")),
        {"code": "unsupported", "holds": "model"},
    ),
    "key of a task that is there twice": (
        lambda p: p.task(CHOICE + "num_fewshot: 1\nnum_fewshot: 0\n"),
        {"code": "damaged", "holds": ("num_fewshot", "15")},
    ),
    "template that leaves its sandbox": (
        lambda p: p.task(CHOICE.replace("{{question}}", "{{ question.__class__.__mro__ }}")),
        {"code": "task", "holds": "SecurityError"},
    ),
}


def test_a_metric_that_is_no_number_is_named(root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The others stand: they may have taken hours."""
    place = coded(
        Place(root, tmp_path), "metric_list", "return 'good'", "[{metric: acc, aggregation: !function mine.f}]"
    )
    assert main([str(word) for word in place.argv]) == 0
    assert "task 'mine': acc,none is 'good', no number: it is no metric" in capfd.readouterr().err


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_named_in_one_line(
    mistake: str, root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OLIVE_EXT_ISOLATION", "none")
    make, expected = MISTAKES[mistake]
    place, errors = make(Place(root, tmp_path)), list[OliveExtError]()
    functions = {name: noting(command.function, errors) for name, command in commands().items()}
    assert main([str(word) for word in place.argv], functions) == 2
    _, err = capfd.readouterr()
    lines = [line for line in err.splitlines() if not line.startswith("olive-ext: WARNING")]
    assert len(lines) == 1, err
    assert lines[0].startswith("olive-ext: error: ")
    assert "onnxruntime_src" not in lines[0]
    if isinstance(expected, str):
        assert re.search(expected, lines[0]), lines[0]
    else:
        assert_says(errors[0], **expected)


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
