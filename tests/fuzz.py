"""Damage at random to what an evaluation is given, and how it may end.

The JSON files of a package, the bytes of a graph, task files, journals and records of a reference are damaged,
journals and reports forged (values replaced under right checksums), and folders poisoned (files that are links, pipes
and sockets, options that name libraries). Inputs that would hardly end are rows of `tests/mistakes/table.py`. A
case is right where it ends with status 2 and one line on stderr, or with status 0, or a verdict's 1 or 3, and finite
numbers, those of the undamaged run where a cache was damaged: damage elsewhere may be a lawful change, and a task
without metrics has no numbers. A folder that is poisoned must end with status 2.
"""

from __future__ import annotations

import copy
import json
import math
import os
import random
import shutil
import stat
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.backends.local_tasks import NAMES, write_tasks
from tests.check.tiny import put_model
from tests.refusals import last_lines

DECODER = {
    "filename": "model.onnx",
    "head_size": 4,
    "num_key_value_heads": 2,
    "inputs": {"input_ids": "input_ids", "past_key_names": "past_key_values.%d.key"},
    "outputs": {"logits": "logits"},
    "session_options": {"provider_options": [{"cpu": {}}]},
}
GENAI = {"model": {"type": "llama", "context_length": 64, "vocab_size": 320, "eos_token_id": [1], "decoder": DECODER}}
HF = {"max_position_embeddings": 64, "vocab_size": 320, "eos_token_id": 1, "text_config": {"n_positions": 64}}
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 3, 2**31, -(2**63), 2**64, 0.5, -0.0, 1e308, "", "x", "0", "-1", "auto", "none"),
    *("../..", "/", "/dev/null", "\x1b[31m", "a" * 5000, "é\ud7ff", "{{x}}", [], {}, [[]], {"a": 1}, ["x", 1], [None]),
    *("<digits>", "<nested>", "<NaN>", "<1e999>", "<twice>"),
)
"""Values that stand where others were; those in brackets stand for what no value becomes as it is written."""

RAW = {
    "<digits>": "9" * 5000,  # Python makes no number of so many
    "<nested>": "[" * 100_000 + "]" * 100_000,
    "<NaN>": "NaN",
    "<1e999>": "1e999",
    "<twice>": '{"a": 1, "a": 2}',
}


@dataclass(frozen=True)
class Case:
    """One damaged input: what was done, the command's arguments, whether its numbers must be the undamaged ones,
    whether it has any, and whether it may not succeed."""

    what: str
    argv: list[str]
    is_cache: bool = False
    has_metrics: bool = True
    must_end: bool = False


class Root:
    """An undamaged model, its tasks and the caches of its evaluation, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.whole = folder / "whole"
        put_model(self.whole / "model")
        (self.whole / "model" / "genai_config.json").write_text(json.dumps(GENAI))
        (self.whole / "model" / "config.json").write_text(json.dumps(HF))
        shutil.copytree(self.whole / "model", self.whole / "reference")
        write_tasks(self.whole / "tasks")
        self.expected: dict[str, Any] = {}

    def argv(self, *more: str, tasks: Sequence[str] = NAMES) -> list[str]:
        common = ["--include-path", "tasks", "--output", "out", "--set", "isolation=none"]
        quick = ["--set", "engine.num_threads=1", "--set", "bootstrap_iters=10"]
        return ["evaluate", "model", "--tasks", ",".join(tasks), *common, *quick, *more]

    def with_reference(self) -> list[str]:
        how = ("--set", "reference.mode=recorded", "--set", "reference.records_dir=records", "--sample-log-num", "3")
        return self.argv("--reference", "reference", *how, tasks=NAMES[:2])


def package(rng: random.Random, root: Root, here: Path) -> Case:
    """A random value anywhere in one of the package's JSON files, or random bytes."""
    name = rng.choice(["genai_config.json", "config.json", "tokenizer.json", "tokenizer_config.json"])
    return Case(_damage_file(rng, here / "model" / name), root.argv(tasks=NAMES[:1]))


def checked(rng: random.Random, root: Root, here: Path) -> Case:
    """The same, and random bytes in the graph, where the package is checked, not evaluated."""
    case = package(rng, root, here)
    if rng.random() < 0.4:
        case = Case(_damage_bytes(rng, here / "model" / "model.onnx"), [])
    return Case(case.what, ["check", "model"], has_metrics=False)


def tasks(rng: random.Random, root: Root, here: Path) -> Case:
    """A random value anywhere in a task file, or random bytes."""
    name = rng.choice([*NAMES, "tiny_group"])
    return Case(_damage_file(rng, here / "tasks" / f"{name}.yaml"), root.argv(tasks=[name]))


def caches(rng: random.Random, root: Root, here: Path) -> Case:
    """A journal, or records of a reference, damaged: bytes, its end, or the file is gone or is something else."""
    files = sorted(file for folder in ("out", "records") for file in (here / folder).rglob("*") if file.is_file())
    file = rng.choice([file for file in files if file.name != "report.json" and file.stat().st_size])
    return Case(_damage_bytes(rng, file, and_more=True), root.with_reference(), is_cache=True)


def journals(rng: random.Random, root: Root, here: Path) -> Case:
    """A random value anywhere in a line of a journal, under a right checksum."""
    files = sorted(here.rglob("*.jsonl"))
    file = rng.choice([file for file in files if not file.name.startswith("samples_")])
    lines = file.read_bytes().splitlines()
    number = rng.randrange(len(lines))
    content = json.loads(lines[number][9:])
    way, value = rng.choice(places(content)), rng.choice(ODD)
    body = json_text(replaced(content, way, value)).encode(errors="surrogatepass")
    lines[number] = b"%08x %s" % (zlib.crc32(body), body)
    file.write_bytes(b"".join(line + b"\n" for line in lines))
    return Case(f"line {number} {'.'.join(map(str, way))}={json.dumps(value)[:60]}", root.with_reference())


def reports(rng: random.Random, root: Root, here: Path) -> Case:
    """A random value anywhere in one of two reports that are compared, or in a line of its sample logs."""
    shutil.copytree(here / "out", here / "other")
    logs = sorted((here / "other").rglob("samples_*.jsonl"))
    file = rng.choice([here / "other" / "report.json"] * 3 + logs)
    lines = [file.read_text(encoding="utf-8")] if file.suffix == ".json" else file.read_text("utf-8").splitlines()
    number = rng.randrange(len(lines))
    content = json.loads(lines[number])
    way, value = rng.choice(places(content)), rng.choice(ODD)
    lines[number] = json_text(replaced(content, way, value))
    file.write_text("\n".join(lines) + "\n", encoding="utf-8", errors="surrogatepass")
    order = ["out", "other"] if rng.random() < 0.5 else ["other", "out"]
    what = f"{order[0]} {file.name} {number} {'.'.join(map(str, way))}={json.dumps(value)[:60]}"
    return Case(what, ["compare", *order, "--output", "page"], has_metrics=False)


def folders(rng: random.Random, root: Root, here: Path) -> Case:
    """A file of the model or of the reference that is a link out of its folder, a pipe or a socket; a name of a file
    elsewhere; an option that names a library, a file or an address."""
    folder = here / rng.choice(["model", "reference"])
    how = rng.choice(["link", "link", "folder", "pipe", "socket", "name", "option"])
    if how in ("name", "option"):
        config = json.loads((folder / "genai_config.json").read_text(encoding="utf-8"))
        section = config["model"].setdefault(rng.choice(["decoder", "vision", "joiner", "draft"]), {})
        if how == "name":
            key, value = (
                rng.choice(["filename", "config_filename", "adapter_filename", "data_file"]),
                rng.choice(OUTSIDE),
            )
            section[key] = value
        else:
            (name, key), value = rng.choice(NATIVE), rng.choice(["evil.so", "1", "/home", "x.json"])
            is_entry = name in ("session_options", "run_options")
            section |= (
                {name: {key: value}} if is_entry else {"session_options": {"provider_options": [{name: {key: value}}]}}
            )
        (folder / "genai_config.json").write_text(json.dumps(config), encoding="utf-8")
        what = f"{folder.name} {how} {key}={value}"
    else:
        name = rng.choice(sorted(file.name for file in folder.iterdir() if file.is_file()))
        if how in ("pipe", "socket") and not name.startswith(("token", "special", "chat", "merges")):
            how = "link"  # what has to be a file is missing where it is none
        poison(folder / name, how)
        what = f"{folder.name} {how} {name}"
    return Case(what, root.with_reference(), must_end=True)


OUTSIDE = ("../x.onnx", "/etc/passwd", "a/../../x", "..\\x")
NATIVE = (
    *(("cuda", "gpu_external_alloc"), ("tensorrt", "trt_extra_plugin_lib_paths"), ("qnn", "backend_path")),
    *(("openvino", "load_config"), ("VitisAI", "config_file"), ("NvTensorRtRtx", "nv_onnx_bytestream")),
    *(("webgpu", "dawnProcTable"), ("coreml", "ModelCacheDirectory"), ("nobody", "x"), ("run_options", "x")),
    *(("session_options", "session.optimized_model_filepath"), ("session_options", "ep.context_file_path")),
)


def poison(path: Path, how: str) -> None:
    """Puts something else in the place of `path`, of its content where that is a link."""
    elsewhere = path.parent.parent / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    shutil.move(path, elsewhere / path.name)
    if how == "pipe":
        os.mkfifo(path)
    elif how == "socket":
        os.mknod(path, stat.S_IFSOCK | 0o600)
    elif how == "folder":
        (path.parent / "below").symlink_to(elsewhere, target_is_directory=True)
        path.symlink_to(Path("below", path.name))
    else:
        path.symlink_to(elsewhere / path.name)


def json_text(content: Any) -> str:
    """JSON, with what stands for more than a value can say in its place."""
    text = json.dumps(content)
    for name, raw in RAW.items():
        text = text.replace(json.dumps(name), raw)
    return text


Damage = Callable[[random.Random, Root, Path], Case]


KINDS: dict[str, Damage] = {one.__name__: one for one in (tasks, caches, journals, reports, folders, checked)}
MORE_KINDS: dict[str, Damage] = {"package": package}


def places(value: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [way, *(found for key, item in inner for found in places(item, (*way, key)))]


def replaced(value: Any, way: tuple[Any, ...], new: Any) -> Any:
    if not way:
        return new
    changed = copy.deepcopy(value)
    place = changed
    for key in way[:-1]:
        place = place[key]
    place[way[-1]] = new
    return changed


def _damage_file(rng: random.Random, file: Path) -> str:
    if rng.random() < 0.2:
        return _damage_bytes(rng, file)
    text = file.read_text(encoding="utf-8")
    is_yaml = file.suffix == ".yaml"
    content = yaml.load(text.replace("!function ", "FUNCTION:"), yaml.BaseLoader) if is_yaml else json.loads(text)
    way, value = rng.choice(_shallow(content)), rng.choice(ODD)
    changed = replaced(content, way, value)
    written = yaml.safe_dump(changed).replace("FUNCTION:", "!function ") if is_yaml else None
    file.write_text(json_text(changed) if written is None else written, encoding="utf-8")
    return f"{file.name} {'.'.join(map(str, way))}={json.dumps(value)[:60]}"


def _shallow(content: Any) -> list[tuple[Any, ...]]:
    """Every place but those of a vocabulary's single tokens."""
    return [way for way in places(content) if len(way) < 3 or way[:2] != ("model", "vocab")]


def _damage_bytes(rng: random.Random, file: Path, *, and_more: bool = False) -> str:
    content = bytearray(file.read_bytes())
    ways = ["flip", "flip", "cut", "insert", "zero"]
    how = rng.choice([*ways, "gone", "folder", "empty", "link"] if and_more else ways)
    at = rng.randrange(len(content))
    if how == "flip":
        content[at] ^= 1 << rng.randrange(8)
    elif how == "cut":
        del content[at:]
    elif how == "insert":
        content[at:at] = rng.randbytes(rng.randint(1, 20))
    elif how == "zero":
        content[at : at + 64] = bytes(len(content[at : at + 64]))
    file.unlink()
    if how == "folder":
        file.mkdir()
    elif how == "link":
        file.symlink_to("/dev/zero")
    elif how != "gone":
        file.write_bytes(b"" if how == "empty" else content)
    return f"{file.name} {how} at {at}"


def judged(case: Case, here: Path, root: Root, status: int, err: str) -> str:
    """What is wrong with how the case ended in the folder `here`, with `err` on stderr; "" where nothing is."""
    lines = last_lines(err)
    if "Traceback" in err:
        return f"a traceback: {lines[-1]}"
    if status == 2:
        return "" if len(lines) == 1 and lines[0].startswith("olive-ext: error: ") else f"other lines: {lines}"
    if status not in (0, 1, 3) or (status and lines) or case.must_end:  # 1 and 3 are verdicts, without a line
        return f"status {status}: {lines[-3:]}"
    if not case.has_metrics:
        return ""
    found = numbers(here)
    if case.is_cache and found != root.expected:
        return f"other numbers: {found}"
    odd = [name for name, value in found.items() if not _is_finite(name, value)]
    return f"status 0, and not finite: {odd}" if odd else ""


def _is_finite(name: str, value: Any) -> bool:
    """A forged log-probability may be any number, -2**63 for one, and the perplexity of more than 709 nats a token is
    beyond a float: it is written as "Infinity"."""
    if "perplexity" in name.split()[1] and value == "Infinity":
        return True
    return isinstance(value, (int, float)) and math.isfinite(value)


def numbers(here: Path) -> dict[str, float]:
    """The metrics of the report."""
    report = json.loads((here / "out" / "report.json").read_text(encoding="utf-8"))
    return {f"{item['task']} {item['metric']} {item['filter']}": item["value"] for item in report["metrics"]}
