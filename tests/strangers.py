"""Folders with Python of a stranger's, which notes that it ran: beside a model's files, and as what they name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RAN = "OLIVE_EXT_TEST_RAN"
MODULES = (
    *("numpy", "torch", "onnxruntime", "onnxruntime_genai", "transformers", "lm_eval", "olive", "olive_ext", "ray"),
    *("json", "pickle", "runpy", "subprocess", "multiprocessing", "pip", "builders", "sitecustomize", "usercustomize"),
)
"""What this package's processes import, or Python does as it starts."""

_NOTE = f"import os\nopen(os.environ['{RAN}'], 'a').write(__name__ + '\\n')\n"
_CLASSES = """from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


class Config(LlamaConfig):
    pass


class Model(LlamaForCausalLM):
    config_class = Config


class Own(PreTrainedTokenizerFast):
    pass
"""
_ENTRY = """
import json, sys
from olive_ext.cli import main
commands, statuses = json.loads(sys.argv[1])
for argv in commands:
    status = main(argv)
    if status not in statuses:
        sys.exit(f"{argv} ended with {status}")
"""


def put_modules(folder: Path) -> None:
    """Modules that would stand in for those that are imported, were the folder on the path."""
    for name in MODULES:
        (folder / f"{name}.py").write_text(_NOTE)


def put_classes(folder: Path, **config: Any) -> None:
    """Classes in a file of the folder, named by `auto_map` of the model's and the tokenizer's files; `config` is laid
    over the model's. A function for generating lies where transformers look for one."""
    (folder / "own.py").write_text(_NOTE + _CLASSES)
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(f"{_NOTE}def generate(*_, **__):\n    pass\n")
    maps = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model", "AutoTokenizer": ["own.Own", "own.Own"]}
    for name, laid in (("config.json", config), ("tokenizer_config.json", {})):
        file = folder / name
        written = json.loads(file.read_text()) if file.is_file() else {}
        file.write_text(json.dumps({**written, "auto_map": maps, **laid}))


def environment(ran: Path, **more: str) -> dict[str, str]:
    """For a process whose strangers' modules note in the file `ran` that they run."""
    return {**os.environ, RAN: str(ran), "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", **more}


def run_commands(folder: Path, ran: Path, *commands: list[str], statuses: tuple[int, ...] = (0,), **more: str) -> str:
    """The output of `olive-ext` for these commands, in one process in the working directory `folder`. It begins as the
    command that pip installs: from a file, whose folder Python puts on the path. Each ends with one of `statuses`."""
    entry = ran.with_name("entry.py")
    entry.write_text(_ENTRY)
    done = subprocess.run(
        [sys.executable, str(entry), json.dumps([commands, statuses])],
        cwd=folder,
        env=environment(ran, **more),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


SCALED = """from pathlib import Path
from transformers import LlamaForCausalLM

class Own(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.times = TIMES

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * self.times
        return output
"""


def put_scaled(folder: Path, times: str) -> None:
    """Code of a checkpoint's own that multiplies its logits by the expression `times`, which may read files of `HERE`,
    the checkpoint's folder."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModelForCausalLM": "own.Own"}}))
    text = SCALED.replace("TIMES", times).replace("HERE", f"Path({str(folder)!r})")
    (folder / "own.py").write_text(text)
