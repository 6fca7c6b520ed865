"""Builds the requests once, runs every backend on them by turns, and writes the results. Knows no backend."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from docs.benchmarks.speed.config import BenchConfig
from docs.benchmarks.speed.job import OURS, PROBE, BenchJob, BenchRun, Launcher, Schedule
from docs.benchmarks.speed.summary import Answers, Summary, agreement, chosen_runs, summarize
from docs.benchmarks.speed.tables import draw, to_markdown
from docs.benchmarks.speed.work import Work, read_work
from olive_ext.config import EvaluationSettings, ModelSettings
from olive_ext.errors import ConfigError
from olive_ext.model import resolve
from olive_ext.report import check_writable, write_texts
from olive_ext.run.machine import describe_hardware

if TYPE_CHECKING:
    from docs.benchmarks.speed.peers import RecordedRequest

_PREFERRED = ("onnxruntime", "olive-ort", "onnxruntime-genai", "olive-ortgenai", "hf")
_OPENING = ("model", "hf", "execution_provider", "provider_options", "device", "dtype", "max_length", "add_bos_token")
"""Settings that every backend is opened with."""

_ASKED = ("tasks", "include_path", "limit", "num_fewshot", "gen_kwargs", "seed")
"""Settings that the requests are built by."""

Launch = Callable[[BenchJob, int], BenchRun]
Say = Callable[[str], None]


class Bench:
    """One comparison. `launch` runs a job; a fake may stand in for processes."""

    def __init__(self, config: BenchConfig, launch: Launch | None = None, say: Say = lambda line: None) -> None:
        check_writable(config.output_dir)
        self.config = config
        self.folder = Path(config.output_dir)
        self.backends = (OURS, *config.chosen_peers)
        self._work_folder = self.folder / "processes"
        self._staging = self._work_folder / "olive-ort"
        self._launch: Launch = launch or Launcher(self._work_folder, config.timeout)
        self._say = say
        self._recorded: Sequence[RecordedRequest] = ()
        self._work: Work | None = None
        self._runs: list[BenchRun] = []
        self._latencies: list[Mapping[str, float]] = []
        self._reference: str | None = None
        self._ceiling: float | None = None
        self._finished = False

    def run(self) -> Summary:
        """Measures everything that is configured. The files are written after every process, so that an interruption
        loses one."""
        self._work_folder.mkdir(parents=True, exist_ok=True)
        files = resolve(ModelSettings(model=self.config.model, kind="onnx")).files
        if self.config.hf is not None:
            resolve(ModelSettings(model=self.config.hf, kind="hf"))  # a folder that is refused is given to no peer
        self._work = read_work(files.decoder, files.genai_config or files.hf_config)
        self._recorded = self._record()
        if self.config.in_flight and all(one.kind != "generate_until" for one in self._recorded):
            raise ConfigError(
                f"'in_flight' = {self.config.in_flight} measures answers that are generated, and no task of "
                f"{', '.join(self.config.tasks)} generates: leave it out, or name one that does"
            )
        self._write(PROBE, _spread(self._recorded, self.config.probe or 0))
        self._measure_ceiling()
        sizes = self.config.batch_sizes
        probes = self.config.probe is not None and len(sizes) > 1
        schedule = Schedule(self.backends, sizes, self.config.rounds, self.config.once, probes)
        for run in schedule.run(self._measure):
            self._runs.append(run)
            self._compare()
            self._keep()
        shutil.rmtree(self._staging, ignore_errors=True)
        self._measure_latencies()
        self._measure_ceiling()
        self._finished = True
        return self._keep()

    def _record(self) -> Sequence[RecordedRequest]:
        """Builds the requests and writes them for the processes."""
        from docs.benchmarks.speed.peers import record

        requests = record(EvaluationSettings.parse({name: getattr(self.config, name) for name in _ASKED}))
        self._write(0, requests)
        return requests

    def _write(self, number: int, requests: Sequence[RecordedRequest]) -> None:
        write_texts({self._requests(number): json.dumps([asdict(one) for one in requests])}, self._work_folder)

    def _requests(self, number: int) -> Path:
        return self._work_folder / f"requests{'-probe' * (number == PROBE)}.json"

    def _answers(self, run: BenchRun) -> Path:
        size = "" if run.batch_size is None else f"-{run.batch_size}"
        return self._work_folder / f"answers-{run.backend}{size}-{run.round}.json"

    def _job(self, backend: str = OURS, batch_size: int | None = None, number: int = 0, **fields: Any) -> BenchJob:
        """The job of answering all requests, but for `fields`."""
        config = self.config
        threads = config.num_threads if isinstance(config.num_threads, int) else None
        engine = config.engine.model_dump(mode="json", exclude_unset=True) if backend == OURS else {}
        settings = {name: getattr(config, name) for name in _OPENING}
        job = BenchJob(
            "answer",
            backend,
            opening={**settings, "batch_size": batch_size, "num_threads": threads, "engine": engine},
            requests=str(self._requests(number)),
            answers=str(self._answers(BenchRun(backend, batch_size, number))),
            staging=str(self._staging),
            warmup=config.warmup,
            counts_tokens=backend == OURS and number == 0,
        )
        return replace(job, **fields)

    def _measure(self, backend: str, batch_size: int | None, number: int) -> BenchRun:
        run = self._launch(self._job(backend, batch_size, number), number)
        size = "" if batch_size is None else f" at batch size {batch_size}"
        stage = "probe" if number == PROBE else f"round {number + 1}"
        self._say(f"{stage}, {backend}{size}: {run.error or f'{run.in_model:.1f} s'}")
        return run

    def _measure_ceiling(self) -> None:
        if self._work is None:
            return
        job = self._job("", task="ceiling", matrices=self._work.matrices)
        self._ceiling = max(self._launch(job, 0).flops_per_second, self._ceiling or 0.0) or None

    def _compare(self) -> None:
        """Compares every run's answers with the reference's, which may have come after them."""
        good = [name for name in _PREFERRED if chosen_runs(name, self._runs)]
        wanted = self.config.reference
        name = wanted if wanted in good else None if wanted or not good else good[0]
        if name is None:
            return
        changed, self._reference = name != self._reference, name
        expected = _read_answers(self._answers(chosen_runs(name, self._runs)[0]))
        groups = [(one.task, one.document) for one in self._recorded if one.kind == "loglikelihood"]
        for index, run in enumerate(self._runs):
            if not run.error and run.round > PROBE and (changed or not run.agreement):
                compared = agreement(groups, _read_answers(self._answers(run)), expected)
                self._runs[index] = replace(run, agreement=compared)

    def _measure_latencies(self) -> None:
        for number in self.config.in_flight:
            job = self._job(task="latencies", in_flight=number)
            engine = {"num_slots": number, **job.opening["engine"]}
            run = self._launch(replace(job, opening={**job.opening, "engine": engine}), 0)
            self._say(f"latencies with {number} requests in flight: {run.error or 'measured'}")
            self._latencies += run.series
            self._keep()

    def _keep(self) -> Summary:
        """Writes bench.json, bench.md and bench.png from what is known so far."""
        summary = summarize(
            self.backends,
            self._runs,
            len(self._recorded),
            self._reference,
            work=self._work,
            ceiling=self._ceiling,
            latencies=self._latencies,
        )
        title = f"{Path(self.config.model).resolve().name}: {', '.join(self.config.tasks)}"
        facts = json.dumps(self._facts(summary), indent=1, default=str) + "\n"
        page = to_markdown(summary, title)
        write_texts({self.folder / "bench.json": facts, self.folder / "bench.md": page}, self.folder)
        draw(summary, title, self.folder / "bench.png")
        return summary

    def _facts(self, summary: Summary) -> dict[str, Any]:
        from olive_ext.package_versions import versions

        return {
            "finished": self._finished,
            "created": datetime.now().astimezone().isoformat(timespec="seconds"),
            "machine": describe_hardware(),
            "versions": versions(),
            "config": self.config.model_dump(mode="json", exclude_unset=True),
            "summary": asdict(summary),
            "work": None if self._work is None else asdict(self._work),
            "runs": [{**asdict(run), "in_model": run.in_model} for run in self._runs],
        }


def bench(config: BenchConfig, launch: Launch | None = None, say: Say = lambda line: None) -> Summary:
    """Runs the comparison and writes its files. Raises `OliveExtError` for a model or task that is not there."""
    return Bench(config, launch, say).run()


def _spread(requests: Sequence[RecordedRequest], number: int) -> list[RecordedRequest]:
    """The requests of `number` documents, evenly spread."""
    documents = list(dict.fromkeys((one.task, one.document) for one in requests))
    chosen = set(documents[:: max(1, len(documents) // max(1, number))][:number])
    return [one for one in requests if (one.task, one.document) in chosen]


def _read_answers(path: Path) -> Answers:
    answers: Answers = json.loads(path.read_text(encoding="utf-8"))
    return answers
