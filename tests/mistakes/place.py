"""A model and tasks for one mistake each, and the edits that make it."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
from onnx import numpy_helper

from tests.backends.local_tasks import CHOICE, HEAD, write_tasks
from tests.check.tiny import put_model


def put_root(folder: Path) -> Path:
    """What each place has a copy of."""
    put_model(folder / "model")
    (folder / "model" / "config.json").write_text('{"max_position_embeddings": 64}')
    write_tasks(folder / "tasks")
    return folder


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

    def unopened(self) -> Place:
        """The graph parses, and ONNX Runtime does not open it."""
        return self.graph(lambda graph: setattr(graph.opset_import[0], "version", 999))

    def checkpoint(self) -> Place:
        """Weights in the place of the graph."""
        (self.model / "model.onnx").rename(self.model / "model.safetensors")
        return self.put("config.json", '{"architectures": ["LlamaForCausalLM"]}')

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


def self_scored(place: Place) -> Place:
    """Nothing but the log of samples asks for the targets."""
    place.coded("doc_to_target", "return {0: 0, 1: 1}[values[0]['answer']]", more="process_results: !function mine.g\n")
    code = place.here / "tasks" / "mine.py"
    code.write_text(f"{code.read_text()}def g(*_): return {{'acc': 1.0}}\n")
    return place.also("--set", "sample_log_num=9", "--output", place.here / "out")
