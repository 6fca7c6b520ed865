"""Evaluations in Olive's cache: digests of everything that decides their numbers, and the hooks that apply them.

Olive keys its caches to the recipe and to a part of the model's files only. Knows no recipe file.
"""

from __future__ import annotations

import ast
import glob
import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from olive_ext.backends.task_files import TaskFiles
from olive_ext.config import (
    EVALUATOR_TYPE,
    PASS_TYPE,
    EvaluationSettings,
    ModelSettings,
    PassSettings,
    ReferenceConfig,
    evaluator_settings,
)
from olive_ext.engine.requests import NUMBERS
from olive_ext.errors import ModelError, OliveExtError, RequirementError
from olive_ext.model import resolve
from olive_ext.model.files.content import digest_of, unchanged_facts
from olive_ext.model.files.model_package import is_package
from olive_ext.model.files.package_config import GENAI_CONFIG, read_json
from olive_ext.package_versions import versions
from olive_ext.registry import hooks
from olive_ext.report import Report, from_json, to_json, write, write_texts
from olive_ext.run.bounds import kept_bounds
from olive_ext.run.task_fit import is_onnx_model
from olive_ext.workflow.current_run import logger, recorded_failures, requirement_error, running, settled
from olive_ext.workflow.evaluator import surfaced
from olive_ext.workflow.handlers import COMPONENTS, label, tokenizer_candidates
from olive_ext.workflow.metric_results import broken_in, names_kept_for
from olive_ext.workflow.preflight import is_ours

_TASK_FILES = (".yaml", ".yml")
_DIGEST_BYTES = 8


def environment(settings: PassSettings, day: date | None = None) -> str:
    """Digest (16 hex digits) of the versions in use, and of the task files, adapters and models in the settings.

    Task files count by `unchanged_facts`, since data sets lie among them; a reference by `model_digest`. Where chat
    templates are used, the `day` counts, by default today.
    """
    paths = {*_task_files(settings), *map(Path, settings.engine.adapters)}
    files = [[str(path), *unchanged_facts(path)] for path in sorted(paths) if path.is_file()]
    own = None if settings.reference is None else settled(settings.reference)
    reference = [] if own is None else [_reference(own)]
    if own is not None and own.float_model is not None:
        reference.append(_reference(ReferenceConfig(path=own.float_model)))
    if (named := getattr(settings, "like", None)) is not None:  # a mended model's
        like = Path(named)  # of which the size counts, whatever it is
        sizes = [(path.name, path.stat().st_size) for path in sorted(like.rglob("*")) if path.is_file()]
        reference.append([named, sizes or (like.stat().st_size if like.is_file() else None)])
    # Chat templates may print it; answers to prompts without it are in the journal anyway.
    printed = str(day or date.today()) if settings.apply_chat_template else ""
    facts = {"versions": versions(), "numbers": NUMBERS, "date": printed}
    return digest({**facts, "files": files, "reference": reference})


def content(model: Any, tokenizer: str | None = None) -> str:
    """Digest of all files that opening the model of Olive's configuration reads: its model id says what made a model,
    not what lies in its cache now. Empty where the files cannot be found: the evaluation then raises the error.
    """
    path, attributes = model.config.get("model_path"), model.config.get("model_attributes")
    if not isinstance(path, str) or not Path(path).exists():
        return ""
    kind: Any = "onnx" if is_onnx_model(model.type) else "hf"
    where = {"onnx_file_name": model.config.get("onnx_file_name"), "components": (attributes or {}).get(COMPONENTS, {})}
    return _content(tokenizer_candidates(attributes), model=path, kind=kind, tokenizer=tokenizer, **where)


def _reference(reference: ReferenceConfig) -> list[Any]:
    """The reference's settings and its content; of a model on the hub, the revision in the local cache."""
    settings = reference.model_dump(mode="json", exclude={"path", "records_dir"})
    path = Path(reference.path)
    if not path.exists():
        return [settings, reference.path, _snapshot(reference.path)]
    if reference.is_records or (reference.variant is None and is_package(path)):  # one for any provider's variant
        files = [file for file in sorted({path, *path.rglob("*")}) if file.is_file()]
        return [settings, digest_of((str(file.relative_to(path)), file) for file in files)]
    which = reference.model_dump(include={"kind", "onnx_file_name", "variant", "components", "tokenizer"})
    return [settings, _content((), model=reference.path, **which)]


def _content(candidates: Sequence[str], **which: Any) -> str:
    try:
        return str(resolve(ModelSettings(**which), tokenizer_candidates=candidates).digest)
    except OliveExtError:  # opening it will say so
        return ""


def _snapshot(name: str) -> str:
    """The path of the model's config.json in the hub's cache, which contains the revision; empty where it has none."""
    from huggingface_hub import try_to_load_from_cache

    file = try_to_load_from_cache(name, "config.json")
    return file if isinstance(file, str) else ""


def deciding_settings(
    values: Mapping[str, Any], without: Collection[str] = (), *, bounds_decide: bool = False
) -> dict[str, Any]:
    """Settings as written, without those that change no number: `require` (which decides the documents where these are
    "enough", and with `bounds_decide` the model that is made), the folder of the records, and `without`.

    Olive makes folders absolute once they exist, which would also make a second run differ from the first.
    """
    is_free = not bounds_decide and values.get("documents") != "enough"
    free = {*without, "require"} if is_free else {*without}
    kept = {name: value for name, value in values.items() if name not in free}
    if isinstance(kept.get("reference"), Mapping):
        kept["reference"] = {name: value for name, value in kept["reference"].items() if name != "records_dir"}
    return kept


def digest(value: Any) -> str:
    """16 hex digits of any value that JSON can represent."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()


def _task_files(settings: PassSettings) -> Iterator[Path]:
    """What lies in the folders of tasks, and what tasks name: includes, Python, data, and what a text in their Python
    says that it reads."""
    written = settings.include_path or []
    folders = [written] if isinstance(written, str) else written
    files = TaskFiles(settings.tasks, folders)
    named = files.all_files()
    yield from named
    inline = (task for task in settings.tasks if isinstance(task, Mapping))
    texts = [(Path(), text) for config in (*files.contents.values(), *inline) for text in _texts_of_data(config)]
    for file in (file for file in named if file.suffix == ".py"):
        places = {Path(), file.parent, file.parent.parent}
        texts += [(place, text) for text in _texts_of_code(file) for place in places]
    read = {path for place, text in texts for path in _meant(place, text)}
    yield from read
    around = {*map(Path, folders), *(path.parent for path in named if path.suffix in _TASK_FILES)}
    output = Path(getattr(settings, "output_dir", None) or os.devnull).resolve()
    for folder in around | {path for path in read if not _is_above_work(path) and path.resolve() != output}:
        yield from _files_below(folder, output)


def _meant(place: Path, text: str) -> Iterator[Path]:
    """The file or folder that a text names from a place; else the folder in which it is a name's beginning, or a
    pattern of names."""
    with suppress(OSError, ValueError):  # no file can have such a name
        beginning = re.split(r"[*?[]", text)[0].rpartition("/")[0]
        if (path := place / text).exists():
            yield path
        elif beginning.strip("./") and (place / beginning).exists():
            yield place / beginning


def _texts_of_data(value: Any, keys: Collection[str] = ("dataset_path", "dataset_kwargs")) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        items = value if isinstance(value, list) else [value.get(key) for key in keys or value]
        for item in items:
            yield from _texts_of_data(item, ())


def _texts_of_code(file: Path) -> Iterator[str]:
    """The texts in a file of Python, which is not run. An absolute path counts as the files that it names: "/usr" is no
    task's."""
    with suppress(OSError, SyntaxError, ValueError, RecursionError):
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Constant) and isinstance(text := node.value, str):
                is_absolute = text.startswith("/")
                named = glob.glob(text) if is_absolute else [text]  # noqa: PTH207 - here "**" is one folder, not all
                yield from (one for one in named if not (is_absolute and Path(one).is_dir()))


def _is_above_work(folder: Path) -> bool:
    """Whether a folder contains the place where the workflow runs and writes, and whatever else lies there."""
    return Path.cwd().is_relative_to(os.path.realpath(folder))


def _files_below(folder: Path, output: Path) -> Iterator[Path]:
    """The files of a folder and, if the workflow does not run there, of the folders in it."""
    is_working = _is_above_work(folder)
    for root, names, files in os.walk(folder):
        inner = [] if is_working else [Path(root, name) for name in names if not name.startswith((".", "__pycache__"))]
        names[:] = [path.name for path in inner if path.resolve() != output]
        yield from (Path(root, name) for name in files)


@dataclass(frozen=True)
class _Evaluation:
    """The evaluation in progress, while it is one of ours."""

    suffix: str = ""
    """Added to Olive's cache key; empty where nothing is kept, because times are measured."""

    folder: Path | None = None
    """Where the evaluation writes its report."""

    known: int = 0
    """The number of reports that the run had before."""


_evaluation: ContextVar[_Evaluation | None] = ContextVar("evaluation", default=None)


def evaluate_model(engine: Any, arguments: dict[str, Any], original: Callable[..., Any]) -> Any:
    """The hook of `Engine._evaluate_model`: our evaluations get their own cache key, and are checked against bounds."""
    model, evaluator = arguments["model_config"], arguments["evaluator_config"]
    if not is_ours(evaluator):
        return original()
    if (run := running.get()) is not None:
        run.model_id = arguments["model_id"]
    known = 0 if run is None else len(run.reports)
    with recorded_failures():
        with surfaced("the evaluation stopped"):
            signal = _evaluated(model, evaluator, original, known)
        is_input = run is not None and engine.input_passes_configs and model is run.input_model
        try:
            _judge(evaluator, signal if not is_input else None, known)
        except RequirementError:
            engine.footprint.nodes[arguments["model_id"]].metrics = None  # a search chooses among all that have metrics
            raise
    return signal


def _evaluated(model: Any, evaluator: Any, original: Callable[..., Any], known: int) -> Any:
    is_anew = evaluator.type != EVALUATOR_TYPE
    if model.type.lower() == "compositemodel":
        other = f"measure this one with the pass {PASS_TYPE}"
        how = "name the folder that it is saved in as ONNXModel" if is_anew else other
        raise ModelError(f"Olive cannot run an evaluator on a composite model: {how}")
    token = _evaluation.set(_Evaluation(known=known) if is_anew else _keyed(model, evaluator, known))
    try:
        return original(model_config=_with_file_name(model)) if is_anew else original()
    finally:
        _evaluation.reset(token)


def _with_file_name(model: Any) -> Any:
    """Olive's configuration of a model, with the decoder's file that genai_config.json names where a folder has several
    graphs: Olive 0.13 refuses it without."""
    path, name = model.config.get("model_path"), model.config.get("onnx_file_name")
    if (
        model.type.lower() != "onnxmodel"
        or name
        or not isinstance(path, str)
        or len(list(Path(path).glob("*.onnx"))) == 1
    ):
        return model
    file = Path(path, GENAI_CONFIG)
    decoder = read_json(file).get("model", {}).get("decoder", {}).get("filename") if file.is_file() else None
    if not isinstance(decoder, str) or not Path(path, decoder).is_file():
        return model
    return model.model_copy(update={"config": {**model.config, "onnx_file_name": decoder}})


def _keyed(model: Any, evaluator: Any, known: int) -> _Evaluation:
    """The evaluation, with all that decides its numbers."""
    settings, written = EvaluationSettings.parse(evaluator.type_args), evaluator.to_json()
    # Without output_dir: `load_evaluation` puts the report there.
    keyed = {**written, "type_args": deciding_settings(written.get("type_args") or {}, {"output_dir"})}
    more = [names_kept_for(settings.bounds), content(model, settings.tokenizer)]
    suffix = digest([keyed, environment(settings), *more])
    path, is_written = model.config.get("model_path"), settings.output_dir is not None
    folder = Path(str(settings.output_dir), label(path)) if is_written and isinstance(path, str) else None
    return _Evaluation(f"-{suffix}", folder, known)


def _judge(evaluator: Any, signal: Any, known: int) -> None:
    """Checks a model against the evaluator's bounds; None in place of its `signal` for an input model, which has to
    keep none. Its report, which comes after `known` others of the run, names the broken and the kept bounds.

    In a search the candidate is rejected at once; else Olive first saves the model and its metrics.
    """
    run, settings = running.get(), evaluator_settings()[evaluator.type].parse(evaluator.type_args)
    broken = broken_in(signal, settings.bounds) if settings.bounds and signal is not None else []
    report: Report | None = None
    if run is not None and len(run.reports) > known:
        old = run.reports[-1]
        kept = broken_in(signal, settings.bounds, kept_bounds) if settings.bounds and signal is not None else []
        comparison = old.comparison and replace(run.as_saved(old.comparison), kept_bounds=tuple(kept))
        run.reports[-1] = report = replace(old, broken=tuple(broken), comparison=comparison)
        if report != old and (folder := old.config.get("output_dir")):
            write(report, folder)
        has_claim = comparison is not None and comparison.certainty is not None
        found = report.verdict if has_claim and run.is_search and signal is not None else None
        if found is not None and found.status == "loss" and not broken:  # a claim is no bound of the numbers
            broken = [replace(found.reasons[0], words=found.headline)]
    if not broken:
        return
    error = requirement_error(f"evaluators.{evaluator.name or 'evaluator'}", broken, report)
    if run is None or run.is_search:
        raise error
    run.broken = error


def load_evaluation(engine: Any, arguments: dict[str, Any], original: Callable[..., Any]) -> Any:
    """The hook of `Engine._load_evaluation`: under our key, and in a workflow only with the report that was kept under
    it, which is put into the folder of reports: what lies there may be that of other settings."""
    evaluation, model_id, run = _evaluation.get(), arguments["model_id"], running.get()
    if evaluation is None:
        return original()
    if not evaluation.suffix:
        return None
    key, report = f"{model_id}{evaluation.suffix}", None
    if run is not None and (report := _kept_report(engine, key, evaluation.folder)) is None:
        return None  # the numbers may be known, but what is to be said of them is not
    signal = original(model_id=key)
    if signal is None or run is None or report is None:
        return signal
    logger.info("evaluation of model %s taken from Olive's cache: nothing that decides it has changed", model_id)
    if evaluation.folder is not None:
        write(report, evaluation.folder)
    run.reports.append(report)
    for log_cached in hooks("log_cached").values():
        log_cached(lambda: report)
    return signal


def cache_evaluation(engine: Any, arguments: dict[str, Any], original: Callable[..., Any]) -> Any:
    """The hook of `Engine._cache_evaluation`: under our key, the report beside it."""
    evaluation, run = _evaluation.get(), running.get()
    if evaluation is None:
        return original()
    if not evaluation.suffix:
        return None
    key = f"{arguments['model_id']}{evaluation.suffix}"
    if run is not None and len(run.reports) > evaluation.known:
        write_texts({(file := _beside(engine, key)): to_json(run.reports[-1])}, file.parent)
    return original(model_id=key)


def _beside(engine: Any, key: str) -> Path:
    return Path(engine.cache.get_evaluation_json_path(key)).with_name(f"{key}.report.json")


def _kept_report(engine: Any, key: str, folder: Path | None) -> Report | None:
    """The report that was kept under `key`, for `folder`; None without one that can be read."""
    with suppress(OSError, ValueError):
        report = from_json(_beside(engine, key).read_text(encoding="utf-8"))
        config = {name: value for name, value in report.config.items() if name != "output_dir"}
        return replace(report, config=config if folder is None else {**config, "output_dir": str(folder)})
    return None
