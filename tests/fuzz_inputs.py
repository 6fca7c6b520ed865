"""Inputs for `tests.fuzz` that are made at random: task files that stand for more than they hold, groups, templates and
data sets with faults, tokenizers and configurations whose numbers have no bound. Knows no command."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from tests.backends.local_tasks import CHOICE, GENERATE, HEAD, ROLLING

Input = Callable[[random.Random, Path], tuple[str, str, list[str]]]
"""Makes an input in a folder: what was made, the task to evaluate, and more of the command's arguments."""

NUMBERS = (0, 1, -1, 7, 319, 320, 321, 10**4, 10**6, 2**22, 10**8, 2**31 - 1, 2**31, 4 * 10**9, 2**63, 10**20, 10**400)
WORDS = (
    "mine",
    "other",
    "tiny_choice",
    "part",
    "../tasks/other.yaml",
    "nosuch",
    "/dev/zero",
    "/dev/null",
    "pipe",
    "",
    5,
)


def expansions(rng: random.Random, here: Path) -> tuple[str, str, list[str]]:
    """Anchors, merges and depth in a task file, in what it includes or in one beside it."""
    width, depth, merges = rng.choice([1, 2, 10, 50]), rng.choice([1, 3, 12, 40, 70]), rng.random() < 0.5
    lines = ["a0: &a0 {x: 1}" if merges else "a0: &a0 [x, y]"]
    for level in range(1, depth):
        names = ", ".join([f"*a{max(0, level - rng.choice([1, 1, 1, 2, 0]))}"] * width)
        lines += [f"a{level}: &a{level}", f"  <<: [{names}]"] if merges else [f"a{level}: &a{level} [{names}]"]
    opened = rng.choice(["[", "{a: ", "- "])
    nested = opened * rng.choice([5, 60, 70, 1000, 100_000])
    text = "\n".join(lines) if rng.random() < 0.6 else f"b: {nested if opened != '- ' else chr(10) + nested}x"
    place = rng.choice(["mine", "beside", "included"])
    if place == "mine":
        _task(here, f"{CHOICE}{text}\n")
    else:
        _task(here, CHOICE + ("include: other.yaml\n" if place == "included" else ""))
        (here / "tasks" / "other.yaml").write_text(text)
    return f"{place}: {width} x {depth}, merges {merges}, {len(text)} {text[-20:]!r}", "mine", []


def files(rng: random.Random, here: Path) -> tuple[str, str, list[str]]:
    """Pipes, links, folders and large files where one or two files of a task are looked for."""
    names = ["other.yaml", "included", "code.py", "data.json", "mine.yaml"]
    chosen = sorted(rng.sample(names, rng.choice([1, 2])))
    text = CHOICE + ("include: included\n" if "included" in chosen else "")
    if "data.json" in chosen:
        text = text.replace(HEAD, _source(here / "tasks" / "data.json", "json"))
    if "code.py" in chosen:
        text = text.replace("local.load", "code.load") + "process_results: !function code.process\n"
    _task(here, text)
    ways = [rng.choice(["pipe", "zero", "null", "folder", "large", "loop", "gone"]) for _ in chosen]
    for name, how in zip(chosen, ways, strict=True):
        file = here / "tasks" / name
        file.unlink(missing_ok=True)
        if how == "pipe":
            os.mkfifo(file)
        elif how in ("zero", "null", "loop"):
            file.symlink_to(file if how == "loop" else f"/dev/{how}")
        elif how == "folder":
            file.mkdir()
        elif how == "large":
            with file.open("wb") as opened:
                opened.truncate(rng.choice([5 << 20, 1 << 30]))
    return f"{chosen} {ways}", "mine", []


def counts(rng: random.Random, here: Path) -> tuple[str, str, list[str]]:
    """Numbers without a bound in tasks and settings, and templates that give much."""
    number = rng.choice(NUMBERS)
    key = rng.choice(["repeats", "num_fewshot", "max_gen_toks", "num_beams", "top_k", "max_length", "template", "data"])
    if key in ("repeats", "num_fewshot"):
        _task(here, f"{rng.choice([GENERATE, CHOICE, ROLLING])}{key}: {number}\n")
    elif key == "template":
        shown = min(number, 10**20)
        text = rng.choice(
            ["{{ 'x' * %d }}", "{{ 7 ** %d }}", "{%% for i in range(%d) %%}x{%% endfor %%}", "{{ [1] * %d }}"]
        )
        kind = rng.choice([GENERATE, CHOICE])
        _task(here, kind.replace("{{question}}", text % shown))
        return f"template {text} {shown}", "mine", []
    elif key == "data":
        row = {"question": "x" * min(max(number, 0), 2 * 10**7), "choices": [" a", " b"], "answer": 0}
        (here / "tasks" / "data.json").write_text(json.dumps(row))
        _task(here, CHOICE.replace(HEAD, _source(here / "tasks" / "data.json", "json")))
    else:
        _task(here, GENERATE.replace("max_gen_toks: 6", f"max_gen_toks: 6\n  {key}: {number}"))
    return f"{key} {str(number)[:30]} {rng.random():.3f}", "mine", []


def groups(rng: random.Random, here: Path) -> tuple[str, str, list[str]]:
    """Groups of each other, of nothing, and of what is no task."""
    number = rng.choice([1, 2, 5, 12, 40])
    shape = rng.choice(["tree", "random", "odd"])
    (here / "tasks" / "mine.yaml").write_text("group: mine\ntask: [g0]\n")
    for place in range(number):
        below = [f"g{place + 1}"] * rng.choice([1, 2, 10])
        if shape == "random":
            below = [f"g{rng.randrange(number + 1)}" for _ in range(rng.randrange(4))]
        elif shape == "odd":
            below = [rng.choice([*WORDS, None, {}, {"task": "tiny_choice"}, {"group": "g0"}, ["x"], f"g{place + 1}"])]
        content = json.dumps(
            {"group": f"g{place}", "task": below if rng.random() < 0.9 else rng.choice([None, "x", 3, {}])}
        )
        (here / "tasks" / f"g{place}.yaml").write_text(content)
    (here / "tasks" / f"g{number}.yaml").write_text(f"group: g{number}\ntask: [tiny_choice]\n")
    return f"{shape} of {number}, {rng.random():.4f}", "mine", []


def data(rng: random.Random, here: Path) -> tuple[str, str, list[str]]:
    """Data sets of each kind, with faults in their documents and in their bytes."""
    rows: list[Any] = [{"question": f"the cat {n}", "choices": [" a", " b"], "answer": n % 2} for n in range(6)]
    odd = rng.choice([None, 3, -1, "x", 0.5, [], {}, [" a"], "\ud800", "é", True, 10**30])
    fault = rng.choice(["none", "field", "gone", "more", "row", "all"])
    row = rows[rng.randrange(6)]
    key = rng.choice(sorted(row))
    if fault == "field":
        row[key] = odd
    elif fault == "gone":
        del row[key]
    elif fault == "more":
        row["another"] = odd
    elif fault == "row":
        rows[rng.randrange(6)] = odd
    elif fault == "all":
        rows = [{name: value for name, value in item.items() if name != key} for item in rows]
    kind = rng.choice(["json", "json", "csv", "parquet"])
    file = here / "tasks" / f"data.{kind}"
    try:
        content = _encoded(rng, rows, kind, file)
    except (pyarrow.ArrowException, OverflowError, UnicodeError, AttributeError, TypeError):
        content = b"PAR1"
    at = rng.randrange(max(1, len(content)))
    how = rng.choice(["whole", "whole", "cut", "byte", "line"])
    damaged = {"cut": content[:at], "byte": content[:at] + rng.randbytes(1) + content[at + 1 :]}
    damaged["line"] = content[:at] + b"\n" + content[at:]
    file.write_bytes(damaged.get(how, content))
    _task(here, CHOICE.replace(HEAD, _source(file, kind)))
    return f"{kind} {fault} {key} {odd!r} {how} at {at}", "mine", []


def _encoded(rng: random.Random, rows: list[Any], kind: str, file: Path) -> bytes:
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
        return file.read_bytes()
    if kind == "csv":
        lines = ["question,choices,answer", *(",".join(str(value) for value in row.values()) for row in rows)]
        return "\n".join(lines).encode(rng.choice(["utf-8", "utf-16", "latin-1"]))
    text = json.dumps(rows) if rng.random() < 0.2 else "\n".join(map(json.dumps, rows))
    return text.encode(rng.choice(["utf-8", "utf-8", "utf-8-sig", "utf-16"]))


def tokens(rng: random.Random, here: Path) -> tuple[str, str, list[str]]:
    """Ids without a bound in a tokenizer's files, and in a package's configurations."""
    number = rng.choice(NUMBERS)
    name = rng.choice(["added", "vocabulary", "second", "processor", "generation", "generation", "template"])
    word = rng.choice(["cat", "zzz", "the"])
    file = here / "model" / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    key = rng.choice(["eos_token_id", "suppress_tokens", "begin_suppress_tokens", "decoder_start_token_id"])
    if name == "added":
        content["added_tokens"].append({"id": number, "content": word, **flags})
    elif name == "vocabulary":
        content["model"]["vocab"][word] = number
    elif name == "processor":
        special = {"a": {"id": "a", "ids": [number], "tokens": ["a"]}}
        sequence = [{"SpecialToken": {"id": "a", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
        pair = [*sequence, {"Sequence": {"id": "B", "type_id": 1}}]
        made = {"type": "TemplateProcessing", "single": sequence, "pair": pair, "special_tokens": special}
        content["post_processor"] = made
    elif name == "second":
        second = {"added_tokens_decoder": {str(number)[:4000]: {"content": word, **flags}}}
        (here / "model" / "tokenizer_config.json").write_text(json.dumps(second))
    elif name == "generation":
        given = rng.choice([number, [number], [[number, 1]], {"a": number}, "x"])
        (here / "model" / "generation_config.json").write_text(json.dumps({key: given}))
        word = f"{key} {str(given)[:40]}"
    else:
        texts = [
            "{%% for m in messages %%}{{ m.content }}{{ 'x' * %d }}{%% endfor %%}",
            "{{ %d ** 9999 }}",
            "{%% if %d %%}",
        ]
        word = rng.choice(texts) % min(number, 10**20)
        (here / "model" / "chat_template.jinja").write_text(word)
        return f"{name} {word}", "tiny_choice", ["--apply-chat-template"]
    file.write_text(json.dumps(content), encoding="utf-8")
    return f"{name} {word} {str(number)[:40]}", rng.choice(["tiny_choice", "tiny_rolling", "tiny_generate"]), []


def _task(here: Path, text: str) -> None:
    for name in ("tiny_choice", "tiny_generate", "tiny_rolling"):
        text = text.replace(f"task: {name}\n", "task: mine\n")
    (here / "tasks" / "mine.yaml").write_text(text)


def _source(file: Path, kind: str) -> str:
    return f"dataset_path: {kind}\ndataset_kwargs:\n  data_files:\n    test: {file}\ntest_split: test\n"


INPUTS: dict[str, Input] = {
    "expansions": expansions,
    "files": files,
    "counts": counts,
    "groups": groups,
    "data": data,
    "tokens": tokens,
}
