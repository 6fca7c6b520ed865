"""One table of mistakes: what a user did, and the one line that is said of it. Each ends with exit status 2, a line
that names the mistake, no traceback, and nothing of other libraries on the terminal."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import numpy_helper

from olive_ext.cli import main
from tests.backends.local_tasks import CHOICE, GENERATE, HEAD, ROLLING, write_tasks
from tests.check.tiny import put_model

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
MISTAKES: dict[str, tuple[Callable[[Place], Place], str]] = {
    # folders, before the model is opened
    "output is a file": (lambda p: p.also("--output", written(p, "f", "")), "'output_dir' = .*f' is not a folder"),
    "output below a file": (lambda p: p.also("--output", written(p, "f", "") / "x"), "f' is not a folder"),
    "output is a dangling link": (
        lambda p: p.also("--output", linked(p, "l", "/no/x")),
        "symbolic link to '/no/x', which does not exist",
    ),
    "output cannot be written": (
        lambda p: p.also("--output", "/proc/x"),
        "'output_dir' = '/proc/x': cannot write in '/proc'",
    ),
    "log folder is a file": (
        lambda p: p.also("--sample-log-num", 1, "--set", f"sample_log_dir={written(p, 'f', '')}"),
        "'sample_log_dir' = .*not a folder",
    ),
    "journal below a file": (
        lambda p: p.also("--use-cache", written(p, "f", "") / "x"),
        "'use_cache' = .*f' is not a folder",
    ),
    "records below a file": (
        lambda p: p.also("--reference", p.whole, "--set", f"reference.records_dir={written(p, 'f', '') / 'x'}"),
        "'reference.records_dir' = .*f' is not a folder",
    ),
    "records cannot be written": (
        lambda p: p.also("--reference", p.whole, "--set", "reference.records_dir=/proc/x"),
        "'reference.records_dir' = '/proc/x': cannot write in '/proc'",
    ),
    "output that no folder can be": (
        lambda p: p.also("--output", "a" * 300),
        "'output_dir' = 'a+.*: no file can have this name",
    ),
    "reference that no file can be": (
        lambda p: p.also("--set", f"reference.path={'a/' * 2500}"),
        "'reference.path' = '[a/]+.*: no file can have this name",
    ),
    "tokenizer that no file can be": (
        lambda p: p.also("--set", r'tokenizer="a\u0000"'),
        "'tokenizer' = 'a.*: no file can have this name",
    ),
    # settings
    "seed below 0": (lambda p: p.also("--seed", -1), "'seed' = '-1': give an integer from 0 to 4294967295"),
    "seed beyond 32 bits": (lambda p: p.also("--seed", 2**40), "'seed' = '1099511627776': give an integer from 0 to"),
    "more threads than processors": (
        lambda p: p.also("--set", "engine.num_threads=100000"),
        "'engine.num_threads' = 100000: this machine has",
    ),
    "slots beyond reason": (lambda p: p.also("--set", "engine.num_slots=100000000"), "give an integer from 1 to 65536"),
    "options of the CPU": (
        lambda p: p.also("--provider", "cpu", "--provider-option", "bogus=1"),
        "takes no options, and was given 'bogus'",
    ),
    "options of the CPU in the package": (
        lambda p: p.genai(decoder={"session_options": {"provider_options": [{"cpu": {"arena": "1"}}]}}),
        "takes no options, and was given 'arena' in genai_config.json",
    ),
    "misspelt session option": (
        lambda p: p.also("--set", 'engine.session_options={"session.set_denormal_as_zer": "1"}'),
        "'session.set_denormal_as_zer', which ONNX Runtime ignores: did you mean 'session.set_denormal_as_zero'",
    ),
    "misspelt task": (lambda p: p.tasks_are("tiny_choise"), "unknown task 'tiny_choise': did you mean 'tiny_choice'"),
    "provider that is not here": (
        lambda p: p.also("--provider", "cuda"),
        "CUDAExecutionProvider .* is not in this build",
    ),
    "top_k is a word": (
        lambda p: p.also("--gen-kwargs", "top_k=abc,do_sample=true"),
        "'top_k' = 'abc': give a whole number",
    ),
    "temperature is a word": (lambda p: p.also("--gen-kwargs", "temperature=x"), "'temperature' = 'x': give a number"),
    "temperature below 0": (
        lambda p: p.also("--gen-kwargs", "temperature=-1"),
        "'temperature' = -1: give a number of at least 0",
    ),
    "no tokens to generate": (
        lambda p: p.also("--gen-kwargs", "max_gen_toks=abc"),
        "'max_gen_toks' = 'abc': give a positive integer",
    ),
    "more examples than documents": (
        lambda p: p.also("--num-fewshot", 1000),
        "'num_fewshot' = 1000: task 'tiny_choice' has 6 documents",
    ),
    "chat template that is not there": (
        lambda p: p.also("--apply-chat-template"),
        "'apply_chat_template' = true: the tokenizer in .* has no chat template",
    ),
    "chat template that is broken": (
        lambda p: p.put("chat_template.jinja", "{% for x in %}").also("--apply-chat-template"),
        "the chat template of '.*model' refuses the messages: Expected an expression",
    ),
    "chat template with a giant number": (
        lambda p: p.put("chat_template.jinja", "{{ 9 ** 999999999 }}").also("--apply-chat-template"),
        r"a number of more than 65,536 bits \(LARGEST_NUMBER\)",
    ),
    "chat template with a giant text": (
        lambda p: p.put("chat_template.jinja", "{{ 'x' * 10000000000 }}").also("--apply-chat-template"),
        "a product of 10,000,000,000 letters or items: at most 16,777,216",
    ),
    # tokens
    "token with a giant id": (
        lambda p: edit_tokenizer(p, 4 * 10**9),
        r"tokenizer.json': the added token 'cat' has the id 4000000000: give one from 0 to 4194303 \(LARGEST_ID\)",
    ),
    "token with a giant id in the second file": (
        lambda p: p.put("tokenizer_config.json", ADDED % 4000000000),
        r"tokenizer_config.json': the added token 'cat' has the id 4000000000: give one from 0 to 4194303",
    ),
    "tokenizer that is a pipe": (
        lambda p: piped(p, "model/added_tokens.json"),
        "added_tokens.json' is a pipe",
    ),
    "token beyond the embedding": (
        lambda p: edit_tokenizer(p, 320),
        r"task 'tiny_choice', document 0: token 320 \('cat'\) is beyond the model's embedding of 320 tokens",
    ),
    "token beyond the embedding in a text": (
        lambda p: edit_tokenizer(p.tasks_are("tiny_rolling"), 320),
        r"task 'tiny_rolling', document 0: token 320 \('cat'\) is beyond the model's embedding of 320 tokens",
    ),
    "token beyond the embedding in a prompt": (
        lambda p: edit_tokenizer(p.tasks_are("tiny_generate"), 320),
        r"task 'tiny_generate', document 1: token 320 \('cat'\) is beyond the model's embedding of 320 tokens",
    ),
    # genai_config.json
    "context beyond 32 bits": (
        lambda p: p.genai(context_length=2**40),
        "'model.context_length' = 1099511627776: give an integer from 1 to 2147483647",
    ),
    "vocabulary beyond reason": (
        lambda p: p.genai(vocab_size=10**12),
        "'model.vocab_size' = 1000000000000: give an integer from 1 to 16777216",
    ),
    "heads beyond reason": (
        lambda p: p.genai(decoder={"num_key_value_heads": 10**9}),
        "'model.decoder.num_key_value_heads' = 1000000000: give an integer from -1048576 to 1048576",
    ),
    "eos beyond 32 bits": (
        lambda p: p.genai(eos_token_id=2**70),
        "'model.eos_token_id' = 1180591620717411303424: give an integer or a list of integers, of 32 bits each",
    ),
    "context is a word": (
        lambda p: p.genai(context_length="many"),
        "genai_config.json': 'model.context_length' = 'many': give an integer from 1 to 2147483647",
    ),
    "context below 0": (
        lambda p: p.genai(context_length=-5),
        "'model.context_length' = -5: give an integer from 1 to 2147483647",
    ),
    "eos is a mapping": (
        lambda p: p.genai(eos_token_id={"a": 1}),
        "'model.eos_token_id' = .*: give an integer or a list",
    ),
    "file name is a number": (
        lambda p: p.genai(decoder={"filename": 3}),
        "'model.decoder.filename' = 3: give a string",
    ),
    "inputs are a list": (lambda p: p.genai(decoder={"inputs": ["a"]}), "'model.decoder.inputs' = "),
    "options are a list": (
        lambda p: p.genai(decoder={"session_options": [1]}),
        "'model.decoder.session_options' = .*: give a mapping",
    ),
    "window is a word": (
        lambda p: p.genai(decoder={"sliding_window": {"window_size": "q"}}),
        "'model.decoder.sliding_window.window_size' = 'q'",
    ),
    "pipeline is a word": (lambda p: p.genai(decoder={"pipeline": "x"}), "'model.decoder.pipeline' = 'x'"),
    "file outside": (lambda p: p.genai(decoder={"filename": "../x.onnx"}), "not inside of the folder"),
    "encoder outside": (
        lambda p: p.genai(vision={"filename": "../x.onnx"}),
        "for model.vision.filename, which is not inside of the folder",
    ),
    "file absolute": (lambda p: p.genai(decoder={"filename": "/etc/passwd"}), "not inside of the folder"),
    "device as a model": (
        lambda p: given(p, "/dev/null"),
        "model path '/dev/null' is a device: give a file or a folder",
    ),
    "pipe as a model": (lambda p: given(p, pipe(p, "x.onnx")), "x.onnx' is a pipe: give a file or a folder"),
    "pipe in a model": (
        lambda p: piped(p, "model/chat_template.jinja"),
        "chat_template.jinja' is a pipe: a model consists of",
    ),
    "pipe as an adapter": (
        lambda p: p.also("--set", f'engine.adapters=["{pipe(p, "x.onnx_adapter")}"]'),
        "x.onnx_adapter' in engine.adapters is a pipe",
    ),
    "device as a folder for reports": (lambda p: p.also("--output", "/dev/null"), "'/dev/null' is not a folder"),
    "link in a model": (
        lambda p: linked_in(p, "chat_template.jinja", "/etc/hostname"),
        "chat_template.jinja' leads out of the model's folder, to '/etc/hostname'",
    ),
    "digits": (lambda p: p.also("--set", "limit=" + "9" * 5000), "'limit' = '999.* ...: give"),
    "digits of an argument": (lambda p: p.also("--limit", "9" * 5000), "'limit' = '999.* ...: give"),
    "digits in arguments": (
        lambda p: p.also("--gen-kwargs", f'{{"max_gen_toks": {"9" * 5000}}}'),
        "'--gen-kwargs' = .*: not valid JSON .Exceeds the limit",
    ),
    "digits in a configuration": (
        lambda p: p.put("config.json", f'{{"vocab_size": {"9" * 5000}}}'),
        "config.json' is not readable JSON: Exceeds the limit",
    ),
    "option of a provider": (
        lambda p: p.genai(decoder={"session_options": {"provider_options": [{"qnn": {"backend_path": "evil.so"}}]}}),
        "session_options.provider_options.qnn.backend_path' = 'evil.so', .* unless 'trust_remote_code' = true",
    ),
    "tokenizer outside": (lambda p: p.genai(tokenizer_dir="../.."), "model.tokenizer_dir, which is not inside"),
    "native code": (
        lambda p: p.genai(decoder={"session_options": {"custom_ops_library": "evil.so"}}),
        "nothing of a model's folder is run unless 'trust_remote_code' = true",
    ),
    "decoder through a link": (
        lambda p: p.genai(decoder={"filename": linked(p, "model/out.onnx", str(p.whole / "model.onnx")).name}),
        "names 'out.onnx' for model.decoder.filename, a link that leads out of the folder",
    ),
    "folder through a link": (
        lambda p: p.genai(decoder={"filename": f"{linked(p, 'model/out', str(p.whole)).name}/model.onnx"}),
        "'out/model.onnx' for model.decoder.filename, a link that leads out of the folder",
    ),
    "tokenizer with code": (
        lambda p: p.put("tokenizer_config.json", OWN_TOKENIZER).put("own.py", "raise SystemExit('it ran')"),
        "no tokenizer can be loaded from .*'auto_map'.* unless 'trust_remote_code' = true",
    ),
    "length of texts is a list": (
        lambda p: p.put("tokenizer_config.json", LISTED_LENGTH),
        "no tokenizer can be loaded from .*model': .*'int' and 'list'",
    ),
    # graphs and weights
    "node without an input": (
        lambda p: edit_graph(p, lambda g: g.graph.node[3].ClearField("input")),
        "model.onnx' is a broken graph",
    ),
    "weights missing": (lambda p: external(p, Path.unlink), "w.data' does not exist"),
    "weights cut off": (
        lambda p: external(p, lambda f: f.write_bytes(f.read_bytes()[:999])),
        r"w.data' has 999 bytes, and .* reads [\d,]+ of it",
    ),
    "weights not pulled": (
        lambda p: external(p, lambda f: f.write_text(LFS)),
        "w.data' is a pointer of Git LFS .* in place of a file of 12345 bytes",
    ),
    "graph not pulled": (lambda p: p.put("model.onnx", LFS), "model.onnx' is a pointer of Git LFS"),
    "smaller vocabulary": (lambda p: edit_graph(p, smaller), "has tokens up to 319, and .* a vocabulary of 100"),
    "unknown opset": (
        lambda p: edit_graph(p, lambda g: setattr(g.opset_import[0], "version", 999)),
        "cannot open .*: ONNX Runtime only .guarantees. support",
    ),
    "unknown version": (
        lambda p: edit_graph(p, lambda g: setattr(g, "ir_version", 999)),
        "cannot open .*: Unsupported model IR version: 999",
    ),
    # JSON
    "deep JSON": (
        lambda p: p.put("genai_config.json", DEEP),
        "genai_config.json' is not readable JSON: it is nested too deeply",
    ),
    "huge JSON": (
        lambda p: p.put("config.json", " " * (17 << 20)),
        "config.json' has 17,825,792 bytes: no configuration has more",
    ),
    "config.json with words": (
        lambda p: p.put("config.json", '{"n_positions": "x"}'),
        "config.json': 'n_positions' = 'x': give an integer from 1 to 2147483647",
    ),
    # tasks
    "task that cannot be parsed": (lambda p: p.task(CHOICE + "\nfoo: [1,2"), r"mine.yaml', line \d+ cannot be parsed"),
    "task that is a list": (lambda p: p.task("- a\n"), "mine.yaml' holds no mapping"),
    "task that runs generated code": (
        lambda p: p.task(CHOICE + "unsafe_code: true\n"),
        "task 'mine' runs code that the model writes: 'confirm_run_unsafe_code' = true allows it, in a sandbox",
    ),
    "metric that is unknown": (
        lambda p: p.task(CHOICE.replace("acc_norm", "nosuch")),
        "task 'mine' has the unknown metric 'nosuch'; there are acc",
    ),
    "metric that is a path": (
        lambda p: p.task(CHOICE.replace("acc_norm", "../..")),
        "task 'mine' has the unknown metric '../..'; there are acc",
    ),
    "metric that is a number": (
        lambda p: p.task(CHOICE.replace("acc_norm", "-1")),
        "task 'mine' has the metric -1 in 'metric_list': give a name or a function",
    ),
    "aggregation that is unknown": (
        lambda p: p.task(CHOICE.replace("metric: acc\n", "metric: acc\n    aggregation: nosuch\n")),
        "unknown aggregation 'nosuch'; there are",
    ),
    "task that merges itself many times": (
        lambda p: p.task(CHOICE + MERGES),
        r"mine.yaml' is not read: line \d+: with aliases written out more than 200,000 values \(MOST_NODES\)",
    ),
    "task beside one that merges itself many times": (
        lambda p: p.task(CHOICE).beside("other.yaml", MERGES),
        r"other.yaml' is not read: line \d+: with aliases written out more than 200,000 values \(MOST_NODES\)",
    ),
    "task that names itself": (
        lambda p: p.task(CHOICE + "metadata: &a {a: *a}\n"),
        r"mine.yaml' is not read: line 14: '\*a' stands inside of what it names",
    ),
    "task that nests deeply": (
        lambda p: p.task(CHOICE + "a: " + "[" * 50_000 + "]" * 50_000),
        r"mine.yaml' is not read: line 14: more than 64 collections inside of each other \(DEEPEST\)",
    ),
    "task that is too large": (
        lambda p: p.task(CHOICE + "#" * (5 << 20)),
        r"mine.yaml' is not read: it has [\d,]+ bytes, more than 4,194,304 \(LARGEST_FILE\)",
    ),
    "task that is a pipe": (
        lambda p: piped(p.task(CHOICE), "tasks/other.yaml"),
        "other.yaml' is not read: it is a pipe",
    ),
    "task that is a ring of links": (
        lambda p: ringed(p.task(CHOICE), "tasks/mine.yaml"),
        "mine.yaml' cannot be parsed: .*symbolic links",
    ),
    "task that includes a pipe": (
        lambda p: piped(p.task(CHOICE + "include: pipe\n"), "tasks/pipe"),
        "pipe' is not read: it is a pipe",
    ),
    "task whose code is a pipe": (
        lambda p: piped(p.task(CHOICE.replace("local.load", "pipe.load")), "tasks/pipe.py"),
        "mine.yaml' names '.*pipe.py', which is a pipe",
    ),
    "task whose data are a pipe": (
        lambda p: piped(p.data(""), "tasks/data.json"),
        "mine.yaml' names '.*data.json', which is a pipe",
    ),
    "task that includes itself": (
        lambda p: p.task(CHOICE + "include: mine.yaml\n"),
        "mine.yaml': 'include' = 'mine.yaml', which is being read already",
    ),
    "task that includes nothing": (
        lambda p: p.task(CHOICE + "include: nosuch.yaml\n"),
        "mine.yaml': 'include' = 'nosuch.yaml': no such file",
    ),
    "task that includes without end": (
        lambda p: included(p.task(CHOICE + "include: part0\n")),
        r"mine.yaml' includes more than 100 files \(MOST_INCLUDED\)",
    ),
    "answers without number": (
        lambda p: p.task(GENERATE + "repeats: 100000000\n"),
        "task 'mine' has 'repeats' = 100000000: give an integer from 1 to 10000",
    ),
    "answers without number in a group": (
        lambda p: p.task("group: mine\ntask: [two]\n").beside("two.yaml", f"{ROLLING}repeats: 0\n", "tiny_rolling"),
        "task 'two' has 'repeats' = 0: give an integer from 1 to 10000",
    ),
    "examples below 0": (
        lambda p: p.task(CHOICE + "num_fewshot: -3\n"),
        "task 'mine' has 'num_fewshot' = -3: give an integer from 0",
    ),
    "examples without number": (
        lambda p: p.task(CHOICE + "num_fewshot: 100000000\n"),
        "'num_fewshot' = 100000000: task 'mine' has 6 documents",
    ),
    "prompt of a gigabyte": (
        lambda p: p.task(CHOICE.replace("{{question}}", "{{ 'x' * 2000000000 }}")),
        "task 'mine', document 0: .*a product of 2,000,000,000 letters or items: at most 16,777,216",
    ),
    "prompt of a gigabyte behind the first": (
        lambda p: p.task(CHOICE.replace("{{question}}", "{{ 'x' * 2000000000 if answer == 2 else 'x' }}")),
        "task 'mine', document 1: .*a product of 2,000,000,000 letters or items: at most 16,777,216",
    ),
    "group without tasks": (
        lambda p: p.task("group: mine\ntask: []\n"),
        r"group 'mine' has no tasks: 'task' = \[\]; give a list of names",
    ),
    "group with a group without tasks": (
        lambda p: p.task("group: mine\ntask: [other, tiny_choice]\n").beside(
            "other.yaml", "group: other\ntask: null\n"
        ),
        "group 'other' has no tasks: 'task' = None; give a list of names",
    ),
    "group in itself": (
        lambda p: p.task("group: mine\ntask: [other]\n").beside("other.yaml", "group: other\ntask: [mine]\n"),
        "group 'mine' is a member of itself: mine > other > mine",
    ),
    "group without end": (
        lambda p: grouped(p, 12),
        r"group 'g7' stands for 100,000 tasks: at most 10,000 \(MOST_TASKS\)",
    ),
    "generation that no model follows": (
        lambda p: p.task(GENERATE.replace("max_gen_toks: 6", "bogus: 6")),
        "task 'mine': generation setting 'bogus' = 6 is not supported",
    ),
    "generation longer than the context": (
        lambda p: p.task(GENERATE.replace("max_gen_toks: 6", "max_gen_toks: 1000000000000")),
        "task 'mine': 'max_gen_toks' = 1000000000000 leaves no room for a prompt: it must be below the model's",
    ),
    # data
    "line that is no JSON": (
        lambda p: p.data(ROW, '{"question": ', ROW),
        "task 'mine', '.*data.json', line 2: Expecting value",
    ),
    "line in another encoding": (
        lambda p: p.data(ROW, ROW.replace("cat", "c\xe4t"), encoding="latin-1"),
        "task 'mine', '.*data.json', line 2: byte 0xe4 is no UTF-8",
    ),
    "line that is a number": (
        lambda p: p.data("1", ROW),
        "task 'mine', '.*data.json', line 1: a int, where a document is a mapping of fields",
    ),
    "field that is there twice": (
        lambda p: p.data(ROW, ROW.replace('"answer"', '"question"')),
        "task 'mine', '.*data.json', line 2: the key 'question' is there twice",
    ),
    "data without documents": (
        lambda p: p.data(""),
        "task 'mine', '.*data.json': it has no documents",
    ),
    "data without the split": (
        lambda p: p.data(ROW, split="validation"),
        "task 'mine': its data have no split 'validation', there are 'test'",
    ),
    "field that no document has": (
        lambda p: p.data('{"other": 1}'),
        "task 'mine', document 0: .*'question' is undefined",
    ),
    "answer that one document lacks": (
        lambda p: p.data(ROW, '{"question": "a", "choices": [" a", " b"]}'),
        "task 'mine', document 1: its target is None",
    ),
    "answer that is none of the choices": (
        lambda p: p.data(ROW, ROW.replace("0", "7")),
        "task 'mine', document 1: its target is 7, which is none of its 2 choices",
    ),
    "choices that are a text": (
        lambda p: p.data("question,choices,answer", "a,b,0", kind="csv"),
        "task 'mine', document 0: ValueError: its choices are the text 'b': a list is expected",
    ),
    "row of other length": (
        lambda p: p.data("question,choices,answer", "a,b,0", "a,b,0,5", kind="csv"),
        "task 'mine', '.*data.csv', line 3: 4 values under 3 names",
    ),
    "table that is cut off": (
        lambda p: p.data("PAR1", kind="parquet"),
        "task 'mine', '.*data.parquet': .*Parquet file size is 4 bytes",
    ),
    "document without choices": (
        lambda p: p.task(
            CHOICE.replace("doc_to_choice: choices", 'doc_to_choice: "{{ [] if answer == 2 else choices }}"')
        ),
        "task 'mine', document 1: it has no choices",
    ),
    "document without a target": (
        lambda p: p.task(CHOICE.replace("answer", "'{{ none }}'")),
        "task 'mine', document 0: its target is 'None'",
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
            ("calls itself", "return f(*values)", "RecursionError: .*"),
        )
    },
    "aggregation that ends the process": (
        lambda p: coded(p, "metric_list", "exit()", "[{metric: acc, aggregation: !function mine.f}]"),
        r"task 'mine', its metrics: SystemExit: None \(.*mine.py, line 3\)",
    ),
    "metric without an aggregation": (
        lambda p: coded(p, "metric_list", "pass", "[{metric: !function mine.f}]"),
        "task 'mine': the metric '.*f' has no 'aggregation', which only metrics of lm-eval have",
    ),
    "metric that raises": (
        lambda p: p.task(GENERATE.replace("metric: exact_match", f"{{metric: !function mine.f, {OF_OWN}}}")).beside(
            "mine.py", "\ndef f(*_, **__):\n    return {}['x']\n"
        ),
        r"task 'mine', document 0: KeyError: 'x' \(.*mine.py, line 3\)",
    ),
    "target that raises where scores are made by the task": (
        lambda p: self_scored(coded(p, "doc_to_target", "return {0: 0, 1: 1}[values[0]['answer']]")),
        r"task 'mine', document 1: KeyError: 2 \(.*mine.py, line 3\)",
    ),
    "values that no mean can be of": (
        lambda p: coded(p, "process_results", "return {'acc': 'right'}"),
        "task 'mine', its metrics: TypeError: ",
    ),
    "task whose module ends the process": (
        lambda p: coded(p, "doc_to_text", "pass").beside("mine.py", "exit(0)\n"),
        r"tasks 'mine' cannot be loaded: SystemExit: 0 \(.*mine.py, line 1\)",
    ),
    "task that raises what is no Exception": (
        lambda p: coded(p, "doc_to_text", "raise type('Stop', (BaseException,), {})('so')"),
        "tasks 'mine' cannot be loaded: Stop: so",
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
        "task 'mine': 'higher_is_better' = 'maybe': give true or false",
    ),
    "filter without a name": (
        lambda p: p.task(GENERATE.replace("  - name: strict\n    filter:", "  - filter:")),
        "task 'mine' has .* in 'filter_list': a 'name' and a 'filter' are expected",
    ),
    "filter that is no expression": (
        lambda p: p.task(GENERATE.replace('"([a-z]+)"', '"("')),
        "task 'mine', 'filter_list': .*unterminated subpattern",
    ),
    "examples that raise what a missing split does": (
        lambda p: coded(p, "fewshot_config", "raise KeyError('s')", "{sampler: first_n, samples: !function mine.f}"),
        r"task 'mine'.*: KeyError: 's' \(.*mine.py, line 3\)",
    ),
    "prefix that is a function": (
        lambda p: coded(p, "gen_prefix", "pass"),
        "task 'mine': TypeError: ",
    ),
    "end that is a text": (
        lambda p: p.put("generation_config.json", '{"eos_token_id": "2"}'),
        "generation_config.json': 'eos_token_id' = '2': give an integer or a list of integers",
    ),
    "search that is no number": (
        lambda p: p.genai(vocab_size=320).put(
            "genai_config.json",
            (p.model / "genai_config.json").read_text().replace('{"model"', '{"search": {"max_length": "x"}, "model"'),
        ),
        "genai_config.json': 'search.max_length' = 'x': give an integer",
    ),
    # halves of characters, and what is empty or there twice
    "file name that is no text": (
        lambda p: p.genai(decoder={"filename": "\ud800.onnx"}),
        "genai_config.json' is not readable JSON: .*surrogates not allowed",
    ),
    "weights' name that is no text": (
        lambda p: external(p, lambda f: renamed(p.model / "model.onnx")),
        r"model.onnx' is a broken graph: the external data of '.*' are \{'location': b'",
    ),
    "adapter that no file can be": (
        lambda p: p.also("--set", r'engine.adapters=["\ud800"]'),
        "'engine.adapters' = .*: no file can have this name",
    ),
    "tokenizer without a vocabulary": (
        lambda p: p.put("tokenizer.json", without_tokens(p.model / "tokenizer.json")),
        "no tokenizer can be loaded from '.*model': its vocabulary is empty",
    ),
    "key of a task that is there twice": (
        lambda p: p.task(CHOICE + "num_fewshot: 1\nnum_fewshot: 0\n"),
        r"task file '.*mine.yaml', line 15: the key 'num_fewshot' is there twice",
    ),
    "template that leaves its sandbox": (
        lambda p: p.task(CHOICE.replace("{{question}}", "{{ question.__class__.__mro__ }}")),
        "SecurityError|unsafe",
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
    place = make(Place(root, tmp_path))
    assert main([str(word) for word in place.argv]) == 2
    _, err = capfd.readouterr()
    lines = [line for line in err.splitlines() if not line.startswith("olive-ext: WARNING")]
    assert len(lines) == 1, err
    assert lines[0].startswith("olive-ext: error: ")
    assert "onnxruntime_src" not in lines[0]
    assert re.search(expected, lines[0]), lines[0]
