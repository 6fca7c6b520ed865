"""What a step costs by its number of tokens: the slope that says how many it should hold (`engine.chunk_size`).

    python docs/benchmarks/step_size.py MODEL [--device cpu] [--sizes 128,256,512,1024,2048,4096]

A step holds texts of 128 tokens where the device packs them, else one row of that many. Ten log-probabilities are read.
Each size runs in a process of its own, three times with one thread; the least counts. Prints the milliseconds of a step
(on the CPU the processor's, elsewhere the clock's), of each token, those of the host outside of ONNX Runtime (the
processor's), and by how much the process's memory has grown at its peak, which on a device is not the device's.
Over the stub of CUDA libraries only the host's milliseconds mean something.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

TEXT, TARGETS, REPEATS = 128, 10, 3
PLUGINS = {"webgpu": "onnxruntime_ep_webgpu"}


def measured(model: str, device: str, size: int) -> dict[str, Any]:
    """Milliseconds and mebibytes of steps of `size` tokens."""
    import onnxruntime as ort

    from olive_ext.config import EngineConfig, ModelSettings
    from olive_ext.engine.opening import open_runner
    from olive_ext.engine.step import Batching, LogitsRow, Row, Step
    from olive_ext.model import resolve

    texts = max(1, size // TEXT) if device != "cpu" else 1
    engine = EngineConfig(chunk_size=size, num_threads=1, num_slots=texts, scoring="auto" if texts > 1 else "rows")
    where: dict[str, Any] = {"model": model, "execution_provider": device, "engine": engine}
    plugins = {device: PLUGINS[device]} if device in PLUGINS else {}
    runner, _ = open_runner(resolve(ModelSettings(**where, provider_libraries=plugins)))
    count = texts if runner.traits.batching is Batching.PACKED else 1
    rows = tuple(Row(slot, 0, tuple(4 + at % 900 for at in range(size // count))) for slot in range(count))
    logits_rows = tuple(LogitsRow(slot, size // count - 1) for slot in range(count))
    step = Step(rows, logits_rows, tuple((at % count, at) for at in range(TARGETS)))
    runner.reserve(size // count)
    clock = time.process_time if device == "cpu" else time.perf_counter
    run, inside = ort.InferenceSession.run_with_iobinding, 0.0

    def timed(session: Any, *arguments: Any) -> None:
        nonlocal inside
        begin = time.process_time()
        run(session, *arguments)
        inside += time.process_time() - begin

    ort.InferenceSession.run_with_iobinding = timed
    before, spent, host = _peak(starts=True), [], []
    for _ in range(REPEATS):
        inside, begin, processor = 0.0, clock(), time.process_time()
        runner.run(step)
        spent.append(clock() - begin)
        host.append(time.process_time() - processor - inside)
    facts = {"rows": count, "step_ms": 1e3 * min(spent), "token_us": 1e6 * min(spent) / size}
    return {"tokens": size, **facts, "host_ms": 1e3 * min(host), "grown_mib": _peak() - before}


def _peak(*, starts: bool = False) -> float:
    """Mebibytes of memory that the process has had at most since this was last called with `starts` (Linux)."""
    if starts:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda", "webgpu"))
    parser.add_argument("--sizes", metavar="N,N", default="128,256,512,1024,2048,4096")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    sizes = [int(size) for size in given.sizes.split(",")]
    if given.one:
        print(json.dumps(measured(given.model, given.device, sizes[0])))
        return
    print("| tokens | rows | step, ms | token, us | host, ms | grown, MiB |\n|--:|--:|--:|--:|--:|--:|")
    for size in sizes:
        command = [sys.executable, __file__, given.model, "--device", given.device, "--sizes", str(size), "--one"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path.cwd())
        if done.returncode:
            print(f"| {size} | not run: {(done.stderr.strip().splitlines() or ['?'])[-1][:160]} |", flush=True)
            continue
        row = json.loads(done.stdout.splitlines()[-1])
        numbers = f"{row['step_ms']:.2f} | {row['token_us']:.1f} | {row['host_ms']:.2f} | {row['grown_mib']:.0f}"
        print(f"| {size} | {row['rows']} | {numbers} |", flush=True)


if __name__ == "__main__":
    main()
