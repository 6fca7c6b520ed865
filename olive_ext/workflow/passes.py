"""What the passes of this package share, whose parameters are the fields of their settings; the pass `OrtLMEvaluation`,
which measures a model and hands it on unchanged; and the reports that travel with a model through a chain of passes: a
table and bounds after each measuring pass, the files next to the output model. Also the keys of these passes in
Olive's cache: digests of what decides what they give.

Olive takes a pass that it ran before from its cache, without calling it; so tables and bounds hook the engine, not the
pass, and are made from the reports among the model's additional files. It keys its cache to the recipe and to a part of
the model's files only. What a task of one's own reads may lie anywhere, so that a pass with such a task runs anew in
each workflow. Knows no other pass and no evaluator.
"""

from __future__ import annotations

import copy
import itertools
import json
import shutil
import tempfile
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any, ClassVar

from olive.model import ONNXModelHandler
from olive.passes import Pass
from olive.passes.pass_config import PassConfigParam
from pydantic import BaseModel

from olive_ext.backends.task_files import is_file
from olive_ext.check.recipe import is_onnx_model
from olive_ext.config import (
    PASS_TYPE,
    EvaluationSettings,
    ModelSettings,
    PassSettings,
    ReferenceConfig,
    StrictModel,
    settings_of_pass,
)
from olive_ext.engine.requests import NUMBERS
from olive_ext.errors import OliveExtError
from olive_ext.model import resolve
from olive_ext.model.files.content import digest_of, read_outline
from olive_ext.package_versions import versions
from olive_ext.registry import entries, hooks
from olive_ext.report import Report, from_json, write
from olive_ext.report.page import PASSES
from olive_ext.report.plain_text import chain_steps, chain_table, print_cells
from olive_ext.report.report_files import report_number, write_chain, write_texts
from olive_ext.run.bounds import COSTS, SIZE_ON_DISK, TOKENS_PER_SECOND, broken_bounds, with_costs
from olive_ext.workflow.current_run import Run, files_of, recorded_failures, requirement_error, running, settled
from olive_ext.workflow.evaluator import measure, surfaced
from olive_ext.workflow.handlers import COMPONENTS, additional_files, tokenizer_candidates
from olive_ext.workflow.preflight import FINGERPRINT, is_our_pass, parse, reference_of

_DESCRIPTION = "Set by the pass: versions and task files, so that Olive's cache notices when they change."


class ConfiguredPass(Pass):  # type: ignore[misc]
    """A pass whose settings are a configuration model of this package."""

    settings_type: ClassVar[type[PassSettings]]
    makes_model: ClassVar[bool] = False
    """Whether the pass makes another model, as its tasks and bounds decide."""

    @classmethod
    def parameters(cls) -> dict[str, Any]:
        """Olive's parameters of the pass, one for each field of its settings, described by its docstring."""
        own = {
            name: PassConfigParam(
                type_=field.rebuild_annotation(),
                required=field.is_required(),
                default_value=None if field.is_required() else _plain(field.get_default(call_default_factory=True)),
                description=" ".join((field.description or "").split()),
            )
            for name, field in cls.settings_type.model_fields.items()
        }
        return {**own, FINGERPRINT: PassConfigParam(type_=str, default_value=None, description=_DESCRIPTION)}

    @staticmethod
    def is_accelerator_agnostic(accelerator_spec: Any) -> bool:
        """A measurement belongs to the accelerator that it was made on."""
        return False

    @classmethod
    def _default_config(cls, accelerator_spec: Any) -> dict[str, Any]:
        return cls.parameters()

    @classmethod
    def get_config_params(
        cls, accelerator_spec: Any, config: dict[str, Any] | None = None, disable_search: bool | None = False
    ) -> Any:
        """Like Olive's; refuses unknown keys first, and adds the fingerprint, part of the cache key. Where
        tasks of one's own decide the model that is made, each run has another one."""
        keys, run = dict(config or {}), running.get()
        known = environment(parse(cls.settings_type, keys))
        if run is not None and cls.makes_model and has_own_tasks(keys):
            known = f"{known} {run.begun}"
        marked = {**keys, FINGERPRINT: known}
        return super().get_config_params(accelerator_spec, marked, disable_search)

    @classmethod
    def get_config_class(cls, accelerator_spec: Any, disable_search: bool | None = False) -> Any:
        """Like Olive's, with a cache key of the settings that change a number and the content of the input model."""
        made, default = super().get_config_class(accelerator_spec, disable_search)

        class Keyed(made):  # type: ignore[misc, valid-type]
            def to_json(self, *args: Any, **kwargs: Any) -> Any:
                keys, run = super().to_json(*args, **kwargs), running.get()
                kept = deciding_settings(keys, bounds_decide=cls.makes_model)
                made = "" if run is None else content(run.lineage[-1], kept.get("tokenizer"))
                return {**kept, FINGERPRINT: digest([kept.get(FINGERPRINT), made])}

        return Keyed, default

    def settings(self, config: Any) -> Any:
        """The settings of a recipe, of `settings_type`."""
        values, known = config.model_dump(), self.parameters()
        written = {name: value for name, value in values.items() if value != known[name].default_value}
        return parse(self.settings_type, copy.deepcopy(written))


class ReadOnlyPass(ConfiguredPass):
    """Looks at a model, also at a composite one, which Olive gives to no evaluator. The files that it writes travel
    with the model as additional files."""

    _accepts_composite_model = True

    @abstractmethod
    def write_findings(self, model: Any, settings: Any, folder: Path) -> Sequence[Path]:
        """Writes files to be kept with the model into `folder`. Earlier files' numbers may be put into their names."""

    def run(self, model: Any, output_model_path: str) -> Any:
        """Like Olive's, but copies no files that travel with the model into its own folder, which is not ours."""
        return self._run_for_config(model, self.config, output_model_path)

    def _run_for_config(self, model: Any, config: Any, output_model_path: str) -> Any:
        """A copy of `model` whose `additional_files` also name what was written, which lies in `output_model_path`."""
        folder = folder_of(output_model_path)
        written = self.write_findings(model, self.settings(config), folder)
        output = _kept_whole(copy.deepcopy(model))
        attributes = output.model_attributes or {}
        carried = additional_files(attributes)
        with surfaced(f"{written[0].stem.replace('_', ' ')} cannot be kept with the model"):
            files = _under_free_names(written, carried)
        output.model_attributes = {**attributes, "additional_files": sorted({str(file) for file in (*carried, *files)})}
        return output


def folder_of(output_model_path: str) -> Path:
    """The folder of a pass's output: Olive may name a file in it."""
    path = Path(output_model_path)
    return path.parent if path.suffix == ".onnx" else path


def _kept_whole(model: Any) -> Any:
    """The model, named by its folder where it is a file with external data: Olive would save the file without that."""
    if isinstance(model, ONNXModelHandler) and Path(model.get_resource("model_path")).is_file():
        path = Path(model.model_path)
        if any((path.parent / location).exists() for location in read_outline(path).locations):
            model.change_model_path_to_dir()
    return model


def _under_free_names(paths: Sequence[Path], carried: Sequence[Path]) -> list[Path]:
    """The files, under names that no file carried along has: a model may be looked at more than once."""
    taken = {file.name for file in carried}
    number = next(n for n in itertools.count(1) if taken.isdisjoint(_numbered(path, n).name for path in paths))
    return [path.replace(_numbered(path, number)) for path in paths]


def _numbered(path: Path, number: int) -> Path:
    return path if number == 1 else path.with_name(f"{path.stem}-{number}{path.suffix}")


def _plain(value: Any) -> Any:
    return value.model_dump(mode="json", exclude_unset=True) if isinstance(value, StrictModel) else value


class OrtLMEvaluation(ReadOnlyPass):
    """Scores a model with lm-eval tasks between or after other passes. report.json, report.md and report.html travel
    with the model as additional files."""

    settings_type = EvaluationSettings
    measure: ClassVar[Callable[..., Report]] = staticmethod(measure)
    """The function from a handler to a report, which a subclass may replace."""

    def write_findings(self, model: Any, settings: Any, folder: Path) -> Sequence[Path]:
        """Raises `RequirementError` for broken bounds where no engine runs; else the hook of the engine raises it."""
        run = running.get()
        report = type(self).measure(
            model,
            with_costs(settings, _costs(settings)),
            device=self.accelerator_spec.accelerator_type,
            execution_providers=self.accelerator_spec.execution_provider,
        )
        if run is not None:
            report = replace(report, model={**report.model, PASSES: list(run.current)})
        with surfaced("the report cannot be kept with the model"):
            paths = write(report, folder)
        if run is None and (broken := broken_bounds(settings.bounds, report.metrics, report.comparison)):
            raise requirement_error(PASS_TYPE, broken)
        return paths


def _costs(settings: EvaluationSettings) -> list[str]:
    """The costs in each row of a chain's table; no speed where nothing runs, or where a resident reference slows it."""
    is_resident = settings.reference is not None and settings.reference.mode == "resident"
    has_run = any(task not in COSTS for task in settings.tasks)
    return [SIZE_ON_DISK, TOKENS_PER_SECOND] if has_run and not is_resident else [SIZE_ON_DISK]


def run_pass(engine: Any, arguments: dict[str, Any], original: Callable[..., Any]) -> Any:
    """The hook of `Engine._run_pass`: after a pass of ours come the table and the bounds."""
    run = running.get()
    if run is None:
        return original()
    name, run.model_id = arguments["pass_name"], arguments["input_model_id"]
    run.current, lineage = run.made_by.get(run.model_id, ()), run.lineage
    config = engine.computed_passes_configs[name]
    described = engine.olive_config.get_pass_module_config(config.type)  # which reads types without regard to case
    run.types[name] = described.module_path.rpartition(".")[2]
    changing = {name.lower() for name, one in entries("passes").items() if one.changes_model}
    is_unchanged = is_our_pass(config.type) and config.type.rpartition(".")[2].lower() not in changing
    values = config.config.model_dump() if isinstance(config.config, BaseModel) else config.config or {}
    run.is_anew = is_unchanged and has_own_tasks(values)
    with recorded_failures(), run.unchanged(reference_of(values) if is_our_pass(config.type) else None):
        model_config, model_id = original()
        if not isinstance(model_config, str) and not all(path.exists() for path in _files_of(model_config.to_json())):
            engine.cache.get_model_json_path(model_id).unlink(missing_ok=True)  # of a cache that lay elsewhere
            model_config, model_id = original()
        if not isinstance(model_config, str):
            # An earlier run may have made those in the output.
            refresh_reports(lineage[-1].config, _report_files(model_config.config))
        run.made_by[model_id] = run.current if is_unchanged else (*run.current, name)
        run.num_earlier = run.num_earlier if is_unchanged else len(run.reports)
        run.lineages[model_id] = lineage if isinstance(model_config, str) else (*lineage, model_config)
        makes_report = settings_of_pass(config.type) is EvaluationSettings
        if makes_report and not isinstance(model_config, str):  # a text is the reason why the pass was left out
            keys = {key: value for key, value in values.items() if value is not None and key != "matters"}  # a default
            _finish(engine, run, f"passes.{name}", parse(EvaluationSettings, keys).bounds, (model_config, model_id))
    return model_config, model_id


def _files_of(model: Mapping[str, Any]) -> Iterator[Path]:
    """The files, as absolute paths, that Olive's configuration of a model names."""
    config = model["config"]
    named = [config.get("model_path"), *additional_files(config.get("model_attributes"))]
    yield from (Path(path) for path in named if isinstance(path, str | Path) and Path(path).is_absolute())
    for part in config.get("model_components") or ():
        yield from _files_of(part)


def _finish(engine: Any, run: Run, where: str, bounds: Any, model: tuple[Any, str]) -> None:
    model_config, model_id = model
    with surfaced("the chain cannot be written"):
        reports = carried_reports(model_config.config)
        for log_cached in hooks("log_cached").values():
            log_cached(lambda: reports[-1])
        places = (place for place, item in enumerate(run.reports) if _key(item) == _key(reports[-1]))
        place = max(places, default=len(run.reports))  # none of a cache, or of another process
        run.reports[place : place + 1] = reports[-1:]
        steps = chain_steps(reports)
        if not run.is_search:
            write_chain(steps, run.artifacts)
        print_cells(chain_table(steps))
    if broken := tuple(broken_bounds(bounds, reports[-1].metrics, reports[-1].comparison)):
        if not run.is_search:
            engine.cache.save_model(model_id=model_id, output_dir=run.output_dir, overwrite=True)
            refresh_reports(model_config.config, _beside(model_config.config, run))
            # in the cache it has no bounds, which may change
            _put_last(replace(reports[-1], broken=broken), run, model_config.config)
        raise requirement_error(where, broken, reports[-1])


def _put_last(report: Report, run: Run, model_config: Mapping[str, Any]) -> None:
    """Writes the output model's last report as this run has it: in the cache, its commands have the cache's paths."""
    report = replace(report, comparison=report.comparison and run.as_saved(report.comparison))
    run.reports = [report if _key(item) == _key(report) else item for item in run.reports]
    with tempfile.TemporaryDirectory() as folder:
        for path in write(report, folder):
            shutil.copy2(path, _numbered(run.artifacts / path.name, max(_report_files(model_config).values())))


def _key(report: Report) -> tuple[Any, ...]:
    """What tells reports of a run apart: two may be made in a second."""
    return report.created, report.comparison is None, *(metric.key for metric in report.metrics)


def publish(engine: Any, run: Run, output: Any) -> None:
    """Puts the output model's reports and its chain next to it, in place of an earlier run's: Olive never overwrites a
    file with one that travels with a model."""
    best = output.get_best_candidate()
    saved = engine.cache.load_model(best.model_id) if best is not None else None
    if not saved:
        return
    with surfaced("the reports cannot be put beside the output model"):
        reports = carried_reports(saved["config"])
        if reports:
            refresh_reports(saved["config"], _beside(saved["config"], run))
            write_chain(chain_steps(reports), run.artifacts)
            for report in reports:
                if any(metric.task not in COSTS for metric in report.metrics):
                    run.measured = tuple(report.model.get(PASSES, ()))
            run.model_id = best.model_id
            if len(run.made_by.get(best.model_id, ())) == len(reports[-1].model.get(PASSES, ())):
                _put_last(reports[-1], run, saved["config"])


def carried_reports(model_config: Mapping[str, Any]) -> list[Report]:
    """The reports that travel with a model, in the order in which they were made."""
    numbers = _report_files(model_config)
    files = sorted((path for path in numbers if path.suffix == ".json"), key=numbers.__getitem__)
    return [from_json(path.read_text(encoding="utf-8")) for path in files]


def refresh_reports(model_config: Mapping[str, Any], places: Iterable[Path]) -> None:
    """Copies the reports that travel with a model to the `places` of their names, over those of an earlier run. A place
    may be the file itself, or a link that shares what another model carries: Olive's passes make such links."""
    reports = {path.name: path for path in _report_files(model_config)}
    for place in places:
        path = reports.get(place.name)
        if path is not None and not (place.exists() and place.samefile(path)):
            write_texts({place: path.read_bytes().decode("utf-8")}, place.parent)


def _beside(model_config: Mapping[str, Any], run: Run) -> list[Path]:
    return [run.artifacts / path.name for path in _report_files(model_config)]


def load_run(cache: Any, arguments: dict[str, Any], original: Callable[..., Any]) -> Any:
    """The hook of `OliveCache.load_run_from_model_id`: a measurement by tasks of one's own is that of this run, in
    which candidates of a search share it."""
    run = running.get()
    is_known = run is None or not run.is_anew or arguments["model_id"] in run.made_by
    return original() if is_known else {}


def _report_files(model_config: Mapping[str, Any]) -> dict[Path, int]:
    files = additional_files(model_config.get("model_attributes"))
    return {path: number for path in files if (number := report_number(path)) is not None}


def has_own_tasks(keys: Mapping[str, Any]) -> bool:
    """Whether a task among the keys of a pass may be the user's: what it reads lies anywhere."""
    tasks = keys.get("tasks") or ()
    return keys.get("include_path") is not None or any(not isinstance(task, str) or is_file(task) for task in tasks)


def environment(settings: PassSettings, day: date | None = None) -> str:
    """Digest (16 hex digits) of the versions in use, and of the adapters and models in the settings. Where chat
    templates are used, the `day` counts, by default today."""
    own = None if settings.reference is None else settled(settings.reference)
    references = [] if own is None else [_reference(own)]
    if own is not None and own.float_model is not None:
        references.append(_reference(ReferenceConfig(path=own.float_model)))
    adapters = [path for path in map(Path, settings.engine.adapters) if path.is_file()]
    # Chat templates may print it; answers to prompts without it are in the journal anyway.
    printed = str(day or date.today()) if settings.apply_chat_template else ""
    facts = {"versions": versions(), "numbers": NUMBERS, "date": printed, "references": references}
    return digest({**facts, "adapters": digest_of((str(path), path) for path in adapters)})


def content(model: Any, tokenizer: str | None = None) -> str:
    """Digest of all files that opening the model of Olive's configuration reads: its model id says what made a model,
    not what lies in its cache now. Empty where the files cannot be found: the pass then raises the error.
    """
    path, attributes = model.config.get("model_path"), model.config.get("model_attributes")
    if not isinstance(path, str) or not Path(path).exists():
        return ""
    kind: Any = "onnx" if is_onnx_model(model.type) else "hf"
    where = {"onnx_file_name": model.config.get("onnx_file_name"), "components": (attributes or {}).get(COMPONENTS, {})}
    which = ModelSettings(model=path, kind=kind, tokenizer=tokenizer, **where)
    try:
        return str(resolve(which, tokenizer_candidates=tokenizer_candidates(attributes)).digest)
    except OliveExtError:  # opening it will say so
        return ""


def _reference(reference: ReferenceConfig) -> list[Any]:
    """The reference's settings and its content; of a model on the hub the path of its config.json in the local cache,
    which contains the revision, and None where it is not there."""
    settings = reference.model_dump(mode="json", exclude={"records_dir"})
    if Path(reference.path).exists():
        return [settings, digest_of((str(file), file) for file in files_of(reference))]
    from huggingface_hub import try_to_load_from_cache

    known = try_to_load_from_cache(reference.path, "config.json")
    return [settings, known if isinstance(known, str) else None]


def deciding_settings(values: Mapping[str, Any], *, bounds_decide: bool = False) -> dict[str, Any]:
    """Settings as written, without those that change no number: `require` (which decides the documents where these are
    "enough", and with `bounds_decide` the model that is made) and the folder of the records.

    Olive makes folders absolute once they exist, which would also make a second run differ from the first.
    """
    is_free = not bounds_decide and values.get("documents") != "enough"
    kept = {name: value for name, value in values.items() if not (is_free and name == "require")}
    if isinstance(kept.get("reference"), Mapping):
        kept["reference"] = {name: value for name, value in kept["reference"].items() if name != "records_dir"}
    return kept


def digest(value: Any) -> str:
    """16 hex digits of any value that JSON can represent."""
    text = json.dumps(value, sort_keys=True, default=str)
    return digest_of([("", text.encode())])[:16]
