"""Opens an evaluation's model and its reference, which may be a file of records. Knows no results."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from olive_ext.backends.progress import is_shown, say
from olive_ext.config import EXPORT, EvaluationConfig
from olive_ext.errors import (
    ConfigError,
    ContradictionError,
    ModelError,
    NotComparableError,
    OliveExtError,
    RecordsError,
    first_line,
)
from olive_ext.model import ResolvedModel, resolve
from olive_ext.model.files.package_config import GENAI_CONFIG, is_same_path, read_json
from olive_ext.model.providers.resolution import known_providers, resolve_providers
from olive_ext.records import Records
from olive_ext.records.files import cache_folder
from olive_ext.records.journal import facts_key
from olive_ext.records.travelling import unpack
from olive_ext.report.comparison import CONSTANTS, PACKAGE_TOKENIZER, PromptDiff, StopTokens
from olive_ext.run.bounds import timed_costs
from olive_ext.run.machine import Clock
from olive_ext.run.model_facts import UNJUDGED, contexts_of, ends_of, stops_of
from olive_ext.run.reference.observer import Observer
from olive_ext.run.task_fit import with_length
from olive_ext.session.tokenizer_fit import TEMPLATE, PromptFormat, excerpts, unwritten_specials

if TYPE_CHECKING:
    from olive_ext.backends.lm_eval.arguments import OrtLMArguments
    from olive_ext.backends.lm_eval_run import LM
    from olive_ext.model.files.damage import Damage
    from olive_ext.session.tokenizer import Tokenizer

logger = logging.getLogger("olive.olive_ext")
_ANSWERING = ("think_end_token", "enable_thinking", "chat_template_args", "add_bos_token", "prefix_token_id")
"""Arguments of `OrtLM` about requests and about the answer in a generation: other kinds of models have them, too."""


class OtherPromptsError(OliveExtError):
    """Both models' own files make different prompts of a task's conversation: each model must be asked by itself."""

    def __init__(self, diff: PromptDiff) -> None:
        super().__init__(diff.sentence())
        self.diff = diff


class Models:
    """Opens both models of `config`; the caller closes them, except `open_resident`, which closes with the candidate.

    Opening raises `ModelError`, `ProviderError` or `ConfigError`.
    """

    def __init__(self, config: EvaluationConfig, progress: bool | None = None, clock: Clock | None = None) -> None:
        self.config = config
        self.progress = is_shown(progress)
        self.clock = clock or Clock()
        self.recorder: Callable[..., list[Any]] | None = None
        """Where the model is recorded for comparisons elsewhere, and so its own reference: `known_answers` for it."""

        self._exports: dict[str, str] = {}
        self._records: Path | None = None
        self._length: int | None = None

    @cached_property
    def given_candidate(self) -> ResolvedModel:
        """The evaluated model as it was given, with the settings of opening it in `model_args`."""
        model = resolve(self.config.opening())
        return model.patched(self._arguments.opening()) if self.config.model_args else model

    @cached_property
    def _arguments(self) -> OrtLMArguments:
        from olive_ext.backends.lm_eval.arguments import OrtLMArguments

        return OrtLMArguments.parse(self.config.model_args, where="model_args")

    @cached_property
    def candidate(self) -> ResolvedModel:
        """The evaluated model as it is run: a Hugging Face model as its export, where there is one."""
        return self._as_run(self.given_candidate)

    @cached_property
    def reference(self) -> ResolvedModel:
        """The reference as it is run; see `ModelSettings.of_reference`."""
        return self._as_run(self.given_reference)

    @cached_property
    def given_reference(self) -> ResolvedModel:
        """The reference as it was given, which is not a file of records."""
        patch, reference = self.config.reference_patch(), self.config.reference
        if reference is not None and reference.is_same:
            other = resolve(self.given_candidate.settings.in_other_place(patch), key="reference")
            if other.place == self.given_candidate.place:
                what = "name what is another there (execution_provider, provider_options, variant, engine, dtype)"
                raise ContradictionError(f"both places are the same one: {what}", "reference", reference.path)
            return other
        return resolve(self.given_candidate.settings.of_reference(patch), key="reference")

    @property
    def given_models(self) -> tuple[ResolvedModel, ...]:
        """The models to open, as they were given."""
        has_other = self.config.reference is not None and self.records_file is None and self.recorder is None
        return (self.given_candidate, self.given_reference) if has_other else (self.given_candidate,)

    def refuse_providers(self) -> None:
        """Raises `ProviderError` for a provider that this machine lacks, or that a Hugging Face model is given and
        nobody knows."""
        for model in self.given_models:
            given = model.settings
            if model.kind == "onnx":
                _ = model.providers
            elif given.execution_provider is not None and not given.provider_libraries:
                resolve_providers(given.execution_provider, given.provider_options, available=known_providers())

    @cached_property
    def records_file(self) -> RecordsFile | None:
        """The file of records that the reference is; None where it is a model."""
        reference = self.config.reference
        return RecordsFile(reference.path) if reference is not None and reference.is_records else None

    @property
    def is_same_model(self) -> bool:
        """Whether the reference should give the evaluated model's numbers but for rounding."""
        reference = self.config.reference
        if reference is None or self.recorder is not None:
            return False
        if reference.is_same_model is not None:
            return reference.is_same_model
        file = self.records_file
        return reference.is_same if file is None else file.manifest["facts"].get("model") == self.candidate.digest

    @cached_property
    def float_path(self) -> str | None:
        """Path of the float ONNX model between the reference and the evaluated model; None where there is none. Raises
        `ConfigError` where it stands for a model that is not known, or cannot be made."""
        reference = self.config.reference
        if reference is None or reference.float_model != EXPORT:
            return None if reference is None else reference.float_model
        from olive_ext.run.export import float_export

        try:
            with self.clock.phase("export"):
                return str(float_export(self.given_reference, tell=self.tell))
        except OliveExtError as error:
            raise ConfigError(first_line(error), "reference.float_model", EXPORT) from error

    @property
    def contexts(self) -> tuple[int, int] | None:
        """`Comparison.contexts`, of records made elsewhere by the length that they have. There is a reference."""
        records = self.records_file
        other = self.given_reference.context_length if records is None else records.max_length
        return contexts_of(self.candidate.context_length, other)

    def damage(self, nats: float | None, unreached: Collection[str] = (), *, continues: bool = True) -> Damage:
        """Constants of the evaluated model that are not the reference's where they should be, or no numbers: how. Those
        of records that were made elsewhere are not at hand. The arguments are those of `Texts`, and whether any answer
        was generated token by token."""
        from olive_ext.model.files.damage import Damage, Texts, damage, token_stages
        from olive_ext.session.tokenizer import Rows

        other = None if self.config.reference is None or self.records_file is not None else self.reference.files
        try:
            other = None if other is None or other.decoder == self.candidate.files.decoder else other
            models = [self.candidate, *([] if other is None else [self.reference])]
            num_tokens = None
            with suppress(ModelError):  # a checkpoint may have no tokenizer
                num_tokens = min(self._tokenizer(one).num_ids for one in models)  # others are read on one side alone
            sizes = {size for one in models for size in Rows.of(with_length(one))}
            whole = self.candidate.patched({"max_length": None}).context_length  # others use it without the setting
            parts = {*unreached, *(() if continues else token_stages(self.candidate.files))}
            texts = Texts(nats, whole or self.candidate.context_length, num_tokens, sizes, parts)
            damaged = damage(self.candidate.files, other, texts)
            return damaged._replace(uncompared=0) if other is None and self.records_file is None else damaged
        except Exception as error:  # noqa: BLE001 - a finding must not cost the report, which is not written yet
            return Damage({CONSTANTS: f"are not compared: {first_line(error)}"}, (), 0)

    @cached_property
    def unjudged(self) -> dict[str, str]:
        """What the evaluated package holds for its own runtime and this evaluation does not judge, by file: numbers
        that its graph contradicts, another decoder, and a tokenizer that asks otherwise than the given one."""
        from olive_ext.engine.runners.genai_runner import refusal_of
        from olive_ext.media.processor import SoundProcessor, are_other_features
        from olive_ext.media.processors import HF_FILES, other_feature_extractor, other_image_processor, other_pictures
        from olive_ext.model.types import SourceKind

        candidate = self.given_candidate
        if candidate.kind != "onnx" or not candidate.runtime.runs_graph:
            return {}
        says, tokenizer = list[str](), ""
        with suppress(ModelError):  # no file need state a length, where the evaluation itself names one
            says += [f"says {text}" for text in candidate.spec.contradicted]
        types = [str(one.files.genai_config.get("model", {}).get("type", "")) for one in self.given_models]
        runs_alike = types[0] in ("", types[-1]) or not types[-1]
        if not runs_alike and refusal_of(types[0]) not in map(refusal_of, (types[-1], "llama")):  # which is one graph
            says.append(f"says model.type '{types[0]}', the reference's file '{types[-1]}'")
        named = candidate.files.genai_config.get("model", {}).get("decoder", {}).get("filename")
        if named and candidate.files.directory / named not in (candidate.files.decoder, *candidate.files.weights):
            judged = f"{candidate.files.origins['decoder']} chose '{candidate.files.decoder.name}'"
            says.append(f"names '{named}', which is not judged: {judged}")
        free: dict[str, Any] = {"tokenizer": None, "onnx_file_name": None, "components": {}}
        with suppress(OliveExtError):  # there is nothing but what was given, or it cannot be opened
            shipped = candidate.patched({**free, "model": str(candidate.files.directory)})
            if shipped.files.tokenizer != candidate.files.tokenizer:
                tokenizer = self._unlike_shipped(shipped)
        differing = {GENAI_CONFIG: "; ".join(says), PACKAGE_TOKENIZER: tokenizer}
        jinja, other = (candidate.files.directory / name for name in ("chat_template.jinja", "tokenizer_config.json"))
        if candidate.files.genai_config and self.config.apply_chat_template and jinja.is_file() and other.is_file():
            template = read_json(other).get("chat_template")  # onnxruntime-genai 0.14 reads this one
            shown = jinja.read_text(encoding="utf-8", errors="replace")
            if isinstance(template, str) and template.split() != shown.split():
                differing[other.name] = f"has another chat template than {jinja.name}, and is not judged"
        if candidate.files.genai_config and self.config.apply_chat_template:
            split = ", ".join(unwritten_specials(self._tokenizer(candidate)))
            differing["tokenizer.json"] = split and f"lacks {split}: onnxruntime-genai splits what chats may have"
        if vision := candidate.files.genai_config.get("model", {}).get("vision"):
            differing |= other_image_processor([candidate.files.directory], vision.get("config_filename"))
        compared = [self.reference] if len(self.given_models) > 1 else []
        if (known := compared[0] if compared else self.records_file) is not None:
            pictures, file = pictures_of(candidate)
            what = other_pictures(pictures_of(known)[0], pictures)
            differing |= {file: f"prepares pictures with {what} of the reference's"} if what else {}
        with suppress(OliveExtError):  # there is no extractor, or it cannot be loaded
            sounds = [
                SoundProcessor(one.processor_files, one.source[1])
                for one in (*compared, candidate)
                if one.source is not None and one.source[0] is SourceKind.FEATURES
            ]
            if candidate.source is not None and sounds:
                differing |= other_feature_extractor(candidate.files.directory, candidate.source[1])
            if len(sounds) == 2 and are_other_features(*sounds):
                differing[HF_FILES[0]] = "prepares sound otherwise than the reference's: scores are of one way for both"
        free = {name: value for name, value in self.config.model_args.items() if name != "add_bos_token"}
        if free != self.config.model_args and self.config.reference is not None and self.records_file is None:
            asked = Models(self.config.model_copy(update={"model_args": free})).prompt_diff
            what = "" if asked is None else f"hides that the models' own files differ: {asked.what[0]}"
            differing["model_args.add_bos_token"] = what
        return {name: what for name, what in differing.items() if what}

    @property
    def unjudged_of_reference(self) -> dict[str, str]:
        """`unjudged` of the reference by itself. Of files that are not judged at all, only those of one folder are
        known to be alike."""
        records, alone = self.records_file, Models(self.config.model_copy(update={"reference": None}))
        if records is None:
            alone.given_candidate = self.given_reference
            if is_same_path(*(str(model.files.directory) for model in self.given_models)):
                return alone.unjudged
        known = alone.unjudged if records is None else records.manifest.get(UNJUDGED, {})
        return {name: what for name, what in known.items() if "not judged" not in what}

    def _unlike_shipped(self, shipped: ResolvedModel) -> str:
        try:
            asked = self._prompt_diff_of(shipped, self.given_candidate)
        except NotComparableError:
            return "makes other tokens than the one that was given, and is not judged"
        is_other = self.prompt_format(shipped).template != self.prompt_format(self.given_candidate).template
        what = TEMPLATE if asked is None and is_other else "" if asked is None else asked.what[0]
        return what and f"is another than the one that was given, and is not judged: {what}"

    def names(self) -> Iterator[str]:
        """The models and tokenizers as written: paths, or names on the hub."""
        for model in self.given_models:
            yield from (model.settings.model, str(model.files.tokenizer))

    def _as_run(self, model: ResolvedModel) -> ResolvedModel:
        reference = self.config.reference
        if model.kind != "hf" or (reference is not None and reference.export == "never"):
            return model
        from olive_ext.run.export import exported

        with self.clock.phase("export"):
            made, note = exported(model, tell=self.tell)
        logger.info("%s %s", model.settings.model, self._exports.setdefault(model.settings.model, note))
        return made

    def tell(self, line: str) -> None:
        """Says a line of progress, which goes to Olive's log where none is shown."""
        (say if self.progress else logger.info)(line)

    def export_note(self, path: str) -> dict[str, str]:
        """The report's note on the export of the model at `path`; empty where there was nothing to export."""
        return {"export": self._exports[path]} if path in self._exports else {}

    def known_size(self, lm: LM | None) -> int | None:
        """Bytes of the files of the model that `lm` runs, which a caller may have opened, or of the evaluated model;
        None where no files are here, as for some models that a caller has opened."""
        with suppress(ModelError):
            return self._measured(lm).size
        return None

    def _measured(self, lm: LM | None) -> ResolvedModel:
        if lm is None or self.given_candidate.kind != "onnx":
            return self.given_candidate
        kind = {"kind": "hf"} if hasattr(lm, "model") else {}
        return getattr(lm, "resolved", None) or resolve(self.config.opening().model_copy(update=kind))

    def size(self, lm: LM | None) -> int:
        """`known_size`; of the parameters in memory where a Hugging Face model has no folder here."""
        model = self._measured(lm)
        if model.size is not None:
            return model.size
        from olive_ext.engine.runners.hf_runner import load_model

        settings = model.settings
        opened = getattr(lm, "model", None)
        if opened is None:
            opened, _ = load_model(settings.model, "auto", "cpu", trust_remote_code=settings.trust_remote_code)
        return sum(tensor.numel() * tensor.element_size() for tensor in opened.parameters())

    def open_reference(self, observer: Observer | None) -> LM:
        """The reference alone, with the evaluated model's engine settings but none of its adapters. With an observer
        its distributions are recorded, and its generations kept.

        It then gets windows that fit both models.
        """
        if self.recorder is not None and observer is not None:
            lm = self._recording(self.candidate, observer)
            lm.known_answers = partial(self.recorder, lm)
            return lm
        alone = self.reference
        if self.config.reference is not None and not self.config.reference.is_same:
            alone = alone.patched({"engine": self.candidate.settings.engine.model_copy(update={"adapters": []})})
        if observer is None:
            given, is_alike = self.config.model_args, alone.kind == self.candidate.kind
            return self._open_ours(alone, {name: given[name] for name in given if is_alike or name in _ANSWERING})
        return self._recording(alone, observer)

    def open_candidate(self, observer: Observer | None = None) -> LM:
        """The evaluated model. With an observer its targets are compared with the reference: with its records where it
        ran alone, else with the model itself, resident with the candidate."""
        if observer is None:
            return self._open_ours(self.candidate, self.config.model_args)
        if self.records_file is not None:
            self._records, longest = self.records_file.folder, self.records_file.max_length
            own = self.candidate.context_length
            self._length = longest if own is None or longest < own else None
        reference = self.reference if self._records is None else Records.read(self._records)
        length = {} if self._length is None else {"max_length": self._length}
        arguments = {**self.config.model_args, "observer": observer, "reference": reference, **length}
        return self._open_ours(self.candidate, arguments)

    def open_resident(self, candidate: Any, observer: Observer) -> Any:
        """An `OrtLM` of the reference, resident with `candidate` or of its records, with the candidate's tokenizer."""
        if self.records_file is not None:
            return self.records_file.answering(candidate, observer)
        reference = candidate.with_session(candidate.session.reference, observer)
        if self.config.documents == "enough":  # all candidates draw by what it answers to all documents
            reference.session.keep_answers(self._records_dir / "answers")
        else:
            self.keep_answers(reference)
        return reference

    @property
    def _records_dir(self) -> Path:
        assert self.config.reference is not None
        folder = Path(self.config.reference.records_dir or cache_folder("records"))
        return folder / facts_key(self._places) if self.is_same_model else folder

    @property
    def _places(self) -> dict[str, Any]:
        """All settings of one model in two places: the other keys leave out settings that change only rounding."""
        return {"places": [model.settings.model_dump(mode="json", exclude_unset=True) for model in self.given_models]}

    def keep_answers(self, lm: LM) -> None:
        """Makes the session of `lm`, which lm-eval's own models lack, keep its answers where the settings say; a
        session that records keeps them beside its records."""
        session = getattr(lm, "session", None)
        if session is None or session.records is not None:
            return
        resume = not timed_costs(self.config) if self.config.resume is None else self.config.resume
        session.keep_answers(self.config.journal, resume=resume, facts=self._places if self.is_same_model else None)

    def _open_ours(self, model: ResolvedModel, arguments: Mapping[str, Any]) -> LM:
        """A model that this package runs, a Hugging Face one, too."""
        from olive_ext.backends.lm_eval import OrtLM
        from olive_ext.backends.lm_eval_patches import quiet_bars

        with self.clock.phase("load"), quiet_bars(self.progress):
            lm = OrtLM(model, **{"seed": self.config.seed or 0, **arguments})
        if self.config.reference is not None:
            lm.role = "the evaluated model" if model is self.candidate else "the reference"
        others = [model for model in self.given_models if str(model.files.tokenizer) != lm.session.tokenizer.where]
        if self.config.apply_chat_template and others and self.prompt_diff is None:
            lm.note_prompt = partial(self._refuse_other_prompt, [(other, self._tokenizer(other)) for other in others])
        return lm

    def _refuse_other_prompt(
        self, others: Sequence[tuple[ResolvedModel, Tokenizer]], messages: Any, opens: bool, prompt: str
    ) -> None:
        for model, tokenizer in others:
            other = ""
            with suppress(ConfigError):  # it says so when it is asked itself
                other = tokenizer.render_chat(messages, opens, **self._template_variables)
            if other != prompt:
                shown = excerpts(*((prompt, other) if model is self.given_candidate else (other, prompt)))
                theirs, own = map(self.prompt_format, (self.given_reference, self.given_candidate))
                files = theirs.changed_files(own, [TEMPLATE])
                raise OtherPromptsError(PromptDiff((TEMPLATE,), files, *shown))

    def _recording(self, model: ResolvedModel, observer: Observer) -> LM:
        reference = self.config.reference
        assert reference is not None
        form = {"top": reference.top, "drawn": reference.drawn, "seed": self.config.seed or 0}
        arguments = {**self.config.model_args, "record_to": {"folder": str(self._records_dir), **form}}
        own = self.candidate.context_length
        lm: Any = self._open_ours(model, arguments)
        if own is not None and own < lm.max_length:
            lm.close()
            lm = self._open_ours(model.patched({"max_length": own}), arguments)
        if own is None or lm.max_length < own:
            self._length = lm.max_length
        self._records = lm.session.records.folder
        lm.session.keep_answers(self._records / "answers")
        lm.observer = observer
        return lm

    @cached_property
    def prompt_diff(self) -> PromptDiff | None:
        """How both models' own files ask them otherwise; None where they ask them alike, or records do not say. Raises
        `ConfigError` where the tokenizers give other ids to a text."""
        return self._prompt_diff_of(self.given_candidate, self.records_file or self.given_reference)

    @cached_property
    def other_template(self) -> bool:
        """Whether the texts of both models' chat templates differ, where one is used and both are known."""
        if not self.config.apply_chat_template:
            return False
        records = self.records_file
        theirs = self.prompt_format(self.given_reference) if records is None else records.prompt_format
        return theirs is not None and theirs.template not in ("", self.prompt_format(self.given_candidate).template)

    def _prompt_diff_of(self, model: ResolvedModel, reference: ResolvedModel | RecordsFile) -> PromptDiff | None:
        from olive_ext.session.tokenizer_fit import refuse_other_tokenizer

        if isinstance(reference, RecordsFile):
            name, theirs = reference.path, reference.prompt_format
        elif model.files.tokenizer == reference.files.tokenizer:
            return None
        else:
            name, theirs = reference.settings.model, self.prompt_format(reference)
        if theirs is None:
            return None
        asked_by_files = self.prompt_format(model)
        refuse_other_tokenizer(theirs.ids, asked_by_files.ids, name, model.settings.model)
        if theirs.steps != asked_by_files.steps:
            asked_by_files = self.prompt_format(model, reads_all=True)
            theirs = theirs if isinstance(reference, RecordsFile) else self.prompt_format(reference, reads_all=True)
        what, files, texts = theirs.differing(asked_by_files)
        return PromptDiff(what, files, *texts) if what else None

    @property
    def tokenizers(self) -> tuple[Tokenizer, Tokenizer]:
        """Those of the reference and of the evaluated model, by their own files."""
        return self._tokenizer(self.given_reference), self._tokenizer(self.given_candidate)

    def other_text(self, answers: Iterable[Any]) -> str:
        """How the evaluated model's tokenizer writes one of the `answers` (token ids) otherwise than the reference's,
        for which it stands; empty where it does not, or where the reference's is not at hand."""
        if self.config.reference is None or self.records_file is not None:
            return ""
        with suppress(OliveExtError):  # a model that a caller has opened
            one, two = self.tokenizers
            for tokens in answers if one.where != two.where else ():
                texts = one.decode(tokens), two.decode(tokens)
                if texts[0] != texts[1]:
                    theirs, own = excerpts(*texts)
                    return f"writes tokens of an answer as {own!r} that the reference's writes as {theirs!r}"
        return ""

    def prompt_format(self, model: ResolvedModel, *, reads_all: bool = False) -> PromptFormat:
        """How the files of `model` and this evaluation's settings have a model asked; see `PromptFormat.of`."""
        variables = self._template_variables if self.config.apply_chat_template else None
        return PromptFormat.of(self._tokenizer(model), variables, reads_all=reads_all)

    @property
    def _template_variables(self) -> dict[str, Any]:
        template = self.config.apply_chat_template
        return {**self._arguments.template_variables(), **({} if template is True else {"chat_template": template})}

    def _tokenizer(self, model: ResolvedModel) -> Tokenizer:
        from olive_ext.session.tokenizer import load_tokenizer

        return load_tokenizer(
            model.files.tokenizer,
            add_bos_token=self._arguments.add_bos_token,
            prefix_token_id=self._arguments.prefix_token_id,
            trust_remote_code=model.settings.trust_remote_code,
        )

    def stops(self, lm: LM) -> StopTokens | None:
        """Where both models end their answers. `lm` is the evaluated model; None for a model of lm-eval's own, and
        where the reference's records do not say it."""
        if (session := getattr(lm, "session", None)) is None:
            return None
        known = ends_of(self.reference) if self.records_file is None else self.records_file.manifest
        return stops_of(known, session.describe_execution())


PICTURES = "pictures"
"""The fact of a recording that holds `pictures_of` its model."""


def pictures_of(model: ResolvedModel | RecordsFile) -> tuple[Mapping[str, Any], str]:
    """The numbers with which a model's pictures are prepared, and the file that has them; of records made elsewhere
    without its name. Empty for a model that takes no pictures, or whose processor cannot be loaded."""
    from olive_ext.media.processors import image_processor_of, numbers_of
    from olive_ext.model.types import Modality

    if isinstance(model, RecordsFile):
        return model.manifest.get(PICTURES, {}), ""
    with suppress(OliveExtError):
        if model.media is not None and Modality.IMAGE in model.media.modalities:
            processor, file = image_processor_of(model.processor_files)
            return numbers_of(processor), file.name
    return {}, ""


class RecordsFile:
    """The records in the file at `path`, unpacked when they are first needed, until the end of `in_use`."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._stack = ExitStack()

    @cached_property
    def _unpacked(self) -> tuple[Path, Mapping[str, Any]]:
        root = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="olive-ext-"))
        return unpack(Path(self.path), Path(root))

    @property
    def folder(self) -> Path:
        """The folder of the records."""
        return self._unpacked[0]

    @property
    def manifest(self) -> Mapping[str, Any]:
        """The recorded model, the versions that recorded it, and the machine."""
        return self._unpacked[1]

    @property
    def max_length(self) -> int:
        """Tokens that the recorded model saw at once at most."""
        return int(self.manifest["max_length"])

    @property
    def prompt_format(self) -> PromptFormat | None:
        """How the recorded model was asked; None of older files."""
        known: Any = self.manifest.get("asking")
        return None if known is None else PromptFormat(**known)

    def refuse_other_tasks(self, tasks: Collection[str]) -> None:
        """Raises `RecordsError` where a task is none of those recorded."""
        recorded = self.manifest["tasks"]
        if missing := sorted(set(tasks) - set(recorded)):
            known = ", ".join(sorted(recorded))
            raise RecordsError(f"the records '{self.path}' hold nothing of task '{missing[0]}': they are of {known}")

    def answering(self, candidate: Any, observer: Observer) -> Any:
        """An `OrtLM` that answers as the recorded model did, with the tokenizer of the open `candidate`."""
        from olive_ext.session.local import replay_session

        stop_ids = self.manifest.get("stop_ids", candidate.session.stop_ids)  # older files name none
        records = Records.read(self.folder), self.max_length, self.manifest["answers"]
        session = replay_session(candidate.session, *records, stop_ids)
        if session.journal is not None:
            self._stack.callback(session.journal.close)
        return candidate.with_session(session, observer)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Removes the unpacked files at the end. An error that names their folder names the file instead."""
        try:
            yield
        except (RecordsError, ConfigError) as error:
            raise error.saying(str(error).replace(str(self.folder), self.path)) from error
        finally:
            self._stack.close()
