"""Times of a step by operator, and copies between host and device: an ONNX Runtime profile of a few questions.

    python docs/benchmarks/host_device_copies.py MODEL OUT --contexts FILE --provider cuda

FILE holds a JSON list of texts. Behind each, ten one-token answers are scored, and then a few tokens are generated,
greedily. OUT/host_device_copies.json has for each form of step the time by operator and the copies between host
and device, and OUT/profile the profiles themselves. Ends with 1 where something large crosses, or KV is not written in
place. Kernels of CUDA run later than they are launched; for their times set CUDA_LAUNCH_BLOCKING=1.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from pathlib import Path
from typing import Any

from ort_profile import large_copies, profiling, read_runs, summarize

from olive_ext.config import EngineConfig, ModelSettings
from olive_ext.engine.engine import Engine, open_engine
from olive_ext.engine.requests import Generation, Request
from olive_ext.model import resolve
from olive_ext.model.providers.resolution import register_libraries
from olive_ext.session.tokenizer import load_tokenizer

LETTERS = "ABCDEFGHIJ"
NEW_TOKENS = 16
BYTES_OF_TARGET, BYTES_OF_TOKEN = 12, 8
"""Bytes read of a target, a log-probability and a greedy token, and of a row that decodes, its greedy token."""


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("model", metavar="MODEL", type=Path)
    parser.add_argument("out", metavar="OUT", type=Path)
    parser.add_argument("--contexts", metavar="FILE", type=Path, required=True)
    parser.add_argument("--provider", metavar="NAME", default="cuda")
    parser.add_argument("--provider-library", metavar="NAME=PATH", action="append", default=[])
    given = parser.parse_args()
    register_libraries(dict(pair.split("=", 1) for pair in given.provider_library))
    results = observe(given.model, given.provider, json.loads(given.contexts.read_text(encoding="utf-8")), given.out)
    (given.out / "host_device_copies.json").write_text(json.dumps(results, indent=2), encoding="utf-8")
    for problem in results["problems"]:
        print(f"{given.model}: {problem}", file=sys.stderr)
    return 1 if results["problems"] else 0


def observe(model: Path, provider: str, contexts: list[str], out: Path) -> dict[str, Any]:
    """The content of host_device_copies.json."""
    engine_config = EngineConfig(shapes="any")
    resolved = resolve(ModelSettings(model=str(model), execution_provider=provider, engine=engine_config))
    tokenizer = load_tokenizer(resolved.files.tokenizer)
    prompts = [tuple(tokenizer.encode(text)) for text in contexts]
    answers = [tokenizer.encode(letter)[-1] for letter in LETTERS]
    scored = [Request((*prompt, answer), 1) for prompt in prompts for answer in answers]
    generated = [Request(prompt, 0, Generation(NEW_TOKENS)) for prompt in prompts]
    folder = out / "profile"
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.json"):
        old.unlink()
    with profiling(folder / "onnxruntime"):
        engine = open_engine(resolved)
    phases = {name: _run(engine, requests) for name, requests in (("scoring", scored), ("generation", generated))}
    facts = engine.describe()
    runner: Any = engine.runner
    profile = Path(runner._feed.session.end_profiling())
    engine.close()
    del engine, runner
    gc.collect()  # a session writes its profile to the end when it goes
    for of_helper in set(folder.glob("*.json")) - {profile}:
        of_helper.unlink()
    num_steps = phases["generation"]["end"] - phases["generation"]["begin"]
    num_decoded = num_steps * facts["num_slots"]  # idle rows are read, too
    allowed = BYTES_OF_TARGET * len(scored) + BYTES_OF_TOKEN * num_decoded
    return _summary(folder, phases, facts, allowed)


def _run(engine: Engine, requests: list[Request]) -> dict[str, int]:
    """The range of the engine's steps that computed the requests, and the bytes read on the host meanwhile. The
    requests run twice, and the first run, which loads and chooses kernels, is not counted."""
    engine.reset()
    engine.run(requests)
    engine.reset()
    begin, crossed = engine.counters.steps, engine.runner.host_bytes
    engine.run(requests)
    return {"begin": begin, "end": engine.counters.steps, "host_bytes": engine.runner.host_bytes - crossed}


def _summary(folder: Path, phases: dict[str, dict[str, int]], facts: dict[str, Any], allowed: int) -> dict[str, Any]:
    profiles: dict[str, Any] = {}
    problems = []
    for file in sorted(folder.glob("*.json")):
        runs = read_runs(file)
        first = len(runs) - facts["counters"]["steps"]  # trials made while the model was opened come before
        problems += [f"{file.name}: {copy} crosses between host and device" for copy in large_copies(runs)]
        profiles[file.name] = {
            name: summarize(runs[first + phase["begin"] : first + phase["end"]]) for name, phase in phases.items()
        }
    if facts["kv_cache"] != "in_place":
        problems.append(f"the KV cache is not written in place but {facts['kv_cache']}")
    host_bytes = sum(phase["host_bytes"] for phase in phases.values())
    if host_bytes > allowed:
        problems.append(f"{host_bytes} bytes are read on the host, where {allowed} are wanted")
    return {"problems": problems, "phases": phases, "host_bytes_wanted": allowed, "profiles": profiles, "engine": facts}


if __name__ == "__main__":
    sys.exit(main())
