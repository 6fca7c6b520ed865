"""The documents of tasks as requests; and the float model whose weights are bound, not constant: how far it is on these
documents from itself with other numbers.

Prompts, templates, windows and examples are those of an evaluation. Generated answers of the model that is asked become
targets. Measurements are kept in a journal, by the content of documents and the weights that were quantized, so that an
interrupted map goes on. One session serves all variants: a variant is a binding.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx

from olive_ext.config import EvaluationConfig
from olive_ext.engine.reference import DivergenceKernels, ReadingTap, WritingTap
from olive_ext.engine.requests import Ids
from olive_ext.engine.runners.ort.inputs import BoundWeights
from olive_ext.engine.runners.ort.opening import open_ort_runner
from olive_ext.errors import TaskError
from olive_ext.graph.nodes import attribute
from olive_ext.media.pictures import media_digest
from olive_ext.model import ResolvedModel
from olive_ext.model.files.constants import plain_name
from olive_ext.plugins.diagnose.remedy.pairing import Sources, Target
from olive_ext.plugins.diagnose.remedy.weights import GraphWeights, Matrix
from olive_ext.records.journal import Journal
from olive_ext.run.model_facts import damage_of
from olive_ext.run.reference.observer import Observer, Scoring, score_generated
from olive_ext.session import Session
from olive_ext.session.answer_journal import deciding_facts
from olive_ext.session.local import LocalModel, RecordTo, new_records, read_texts
from olive_ext.session.opening import open_model
from olive_ext.session.requests import RollingOutput, RollingRequest, ScoringOutput, ScoringRequest

if TYPE_CHECKING:
    from olive_ext.backends.task_loading import LoadedTasks


def rounded_inside(floats: GraphWeights, quantized: GraphWeights) -> dict[str, str]:
    """The quantized graph's nodes that round activations, and the attention that keeps its KV cache in integers where
    the float graph's does not, with why they are no entries."""
    whole = {plain_name(node.name) for node in floats.model.graph.node if _has_quantized_cache(node)}
    named = {}
    for node in quantized.model.graph.node:
        if node.op_type == "QuantizeLinear" and node.input[0] not in quantized.initializers:
            named[node.name] = "it rounds activations: their loss is in what other kernels add"
        elif _has_quantized_cache(node) and plain_name(node.name) not in whole:
            named[node.name] = "its KV cache is quantized: its loss is in what other kernels add"
    return named


def _has_quantized_cache(node: onnx.NodeProto) -> bool:
    return node.op_type == "GroupQueryAttention" and attribute(node, "k_quant_type", b"NONE") != b"NONE"


Document: TypeAlias = Sequence[Scoring]
"""The requests of one document: what is scored of it."""


def document_key(document: Document) -> bytes:
    """Digest of all that is asked of a document, pictures, sounds and features by their content."""
    parts = [[type(one).__name__, *(getattr(one, part.name) for part in fields(one))] for one in document]
    asked = [[(*value,) if isinstance(value, Ids) else value for value in request] for request in parts]
    if all(_is_text(value) for request in asked for value in request):
        return hashlib.blake2b(repr(document).encode(), digest_size=8).digest()
    return media_digest(asked).encode()


def _is_text(value: object) -> bool:
    """Whether `repr` distinguishes it from all others."""
    is_ids = isinstance(value, tuple) and all(isinstance(one, int) for one in value)
    return is_ids or value is None or isinstance(value, str | int)


class _Collector(Observer):
    """Keeps the scoring requests by document."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: dict[tuple[str, int], list[tuple[int, Scoring]]] = {}

    def __call__(self, instance: Any, request: Any, output: Any) -> None:
        super().__call__(instance, request, output)
        if hasattr(output, "token_logprobs"):
            document = str(instance.task_name), int(instance.doc_id)
            self.requests.setdefault(document, []).append((instance.idx, request))


def answered(
    session: Session, config: EvaluationConfig, tasks: LoadedTasks, *, progress: bool
) -> Mapping[tuple[str, int], Document]:
    """The documents of `tasks`, by task and number, which the session's model answers and scores: the requests in
    lm-eval's order, then the generated answers as targets. Raises `TaskError` without any."""
    from olive_ext.backends.lm_eval import OrtLM
    from olive_ext.backends.lm_eval_run import run_tasks

    collector = _Collector()
    lm = OrtLM(session=session, observer=collector, seed=config.seed or 0)
    quick = config.model_copy(update={"bootstrap_iters": 0})
    run_tasks(lm, tasks, quick, progress=progress)
    score_generated(lm, collector.generated)
    ordered = {key: sorted(asked, key=itemgetter(0)) for key, asked in collector.requests.items()}
    documents = {key: [request for _, request in asked] for key, asked in ordered.items()}
    for item in sorted(collector.generated, key=lambda item: tuple(item.target.target)):
        documents.setdefault((item.task_name, item.doc_id), []).append(item.target)
    if not documents:
        raise TaskError(f"tasks {list(tasks.tasks)} ask nothing of a model")
    return dict(sorted(documents.items()))


def asked(session: Session, documents: Sequence[Document]) -> list[list[ScoringOutput | RollingOutput]]:
    """The outputs of each document's requests."""
    requests = [request for document in documents for request in document]
    scoring = [request for request in requests if isinstance(request, ScoringRequest)]
    rolling = [request for request in requests if isinstance(request, RollingRequest)]
    scored = iter(session.loglikelihood(scoring) if scoring else ())
    rolled = iter(session.loglikelihood_rolling(rolling) if rolling else ())
    return [
        [next(scored) if isinstance(request, ScoringRequest) else next(rolled) for request in document]
        for document in documents
    ]


Floats = npt.NDArray[np.float64]

SMALL = 1 << 21
"""The most weights of a graph that one thread runs: several threads would wait for each other. The quickstart's model
of 0.5 M took 13.8 s of processor time on one thread and 29 s on two, whose first one alone took 14.7 s."""

NO_NUMBER = 100.0
"""Nats of a position whose distribution is NaN or infinite, as with a damaged weight: float32 has no larger one."""


def as_numbers(kl: npt.NDArray[np.float32]) -> Floats:
    """KL in nats, of positions without numbers `NO_NUMBER`."""
    return np.nan_to_num(kl.astype(np.float64), nan=NO_NUMBER, posinf=NO_NUMBER)


class Variants:
    """The float model in one session, with some of the quantized numbers in place of its own."""

    def __init__(
        self,
        model: ResolvedModel,
        sources: Mapping[str, Sources],
        targets: Sequence[Target],
        record_to: RecordTo,
    ) -> None:
        """`sources`: by part of the package, of the decoder those of ""; `record_to`: where the float model's
        distributions are recorded. Raises what opening `model` raises."""
        self._sources = sources
        matrices: dict[str, dict[str, Matrix]] = {"": {}}
        for target in targets:
            floats, arrays = sources[target.part].floats, matrices.setdefault(target.part, {})
            roots = frozenset().union(*(use.roots for use in target.floats))
            uses = [use for use in (*floats.uses.values(), *target.floats) if use.roots & roots]
            arrays |= {use.value: floats.matrix(use) for use in uses}
        files = {"": model.files.decoder}
        files |= {part: companion.graph for part, companion in model.files.companions.items()}
        engine, num_weights = model.settings.engine, sum(array.size for array in matrices[""].values())
        if engine.num_threads == "auto" and model.device.kind == "cpu" and num_weights <= SMALL:
            model = model.patched({"engine": engine.model_copy(update={"num_threads": 1})})
        model = replace(model, is_compared=True)
        self._weights = {part: BoundWeights(arrays) for part, arrays in matrices.items()}
        texts = read_texts(model)
        opened = open_ort_runner(model, weights={files[part]: bound for part, bound in self._weights.items()})
        local = LocalModel(texts, opened, texts.media(opened.runner.traits.item_limit))
        kernels = DivergenceKernels.at(opened.runner, texts.tokenizer.num_ids)
        self._records = new_records(local, record_to)
        self.recorder = local.session(WritingTap(self._records, kernels))
        self.recorder.records = self._records
        self._session = local.session(ReadingTap(self._records, kernels))
        self.facts = deciding_facts(self._session)
        """All that decides what `kl` gives besides targets and documents, JSON-ready."""

        self.cache_damage: dict[str, str] = {}
        """How the model that `compared` had last continues texts otherwise than whole ones, where the float one does
        not: by `KV_CACHE`."""

        self._bound: frozenset[Target] = frozenset()

    def record(self, documents: Sequence[Document]) -> npt.NDArray[np.int64]:
        """Keeps the float model's distributions at all targets; the number of positions of each document [N]."""
        outputs = asked(self.recorder, documents)
        return np.array([sum(len(output.token_logprobs) for output in document) for document in outputs])

    def kl(
        self, targets: Collection[Target], documents: Sequence[Document], weights: GraphWeights | None = None
    ) -> Floats:
        """KL(float || variant) in nats, summed over the positions of each of N documents [N]; the variant has the
        numbers of `targets` in `weights`, by default the quantized model's. The documents have been recorded."""
        wanted = frozenset(targets)
        for target in self._bound - wanted:
            self._weights[target.part].put_back(target.values)
        for target in wanted - self._bound:
            sources = self._sources[target.part]
            numbers = target.numbers(sources.floats, weights or sources.quantized)
            self._weights[target.part].put(numbers)
        if any(target.part for target in self._bound ^ wanted):
            self._session.release_memory()  # what encoders have made of items, too
        self._bound = wanted
        self._session.gc()
        return np.array(
            [
                sum(float(as_numbers(output.compared.kl).sum()) for output in document if output.compared is not None)
                for document in asked(self._session, documents)
            ]
        )

    def compared(self, model: ResolvedModel, documents: Sequence[Document]) -> Floats:
        """As `kl`, of another model, which is opened for it: the quantized one itself."""
        with open_model(model, self._records) as session:
            self.cache_damage = damage_of(self.recorder.describe_execution(), session.describe_execution())
            outputs = [
                (number, as_numbers(output.compared.kl))
                for number, document in enumerate(asked(session, documents))
                for output in document
                if output.compared is not None  # an empty text has no positions
            ]
        numbers = np.repeat([number for number, _ in outputs], [len(nats) for _, nats in outputs])
        sums = np.bincount(numbers, np.concatenate([nats for _, nats in outputs]), len(documents))
        return sums.astype(np.float64)

    @property
    def tokens_fed(self) -> int:
        """Tokens that were computed so far, recorded ones, too."""
        return sum(int(session.counters.tokens_fed) for session in (self.recorder, self._session))

    def __enter__(self) -> Variants:
        return self

    def __exit__(self, *error: object) -> None:
        self._session.close()
        self.recorder.close()


@dataclass(frozen=True)
class Material:
    """What a loss is measured with: variants of the float model, and documents whose distributions it has recorded."""

    variants: Variants
    documents: Sequence[Document]
    tasks: Sequence[str]
    """The task of each document."""

    positions: npt.NDArray[np.int64]
    """The positions of each document [N]."""

    journal: Journal
    """Of the facts of `variants` and of the quantized model."""

    @cached_property
    def _keys(self) -> list[bytes]:
        return [document_key(document) for document in self.documents]

    def part(self, numbers: Sequence[int]) -> Material:
        """Some of the documents."""
        documents, tasks = [self.documents[n] for n in numbers], [self.tasks[n] for n in numbers]
        return replace(self, documents=documents, tasks=tasks, positions=self.positions[list(numbers)])

    def kl(self, targets: Collection[Target], numbers: Sequence[int]) -> Floats:
        """KL(float || variant) in nats, summed over the positions of each of N documents, by their numbers [N]; the
        variant has the quantized numbers of `targets`."""
        names = repr(sorted((target.what, node) for target in targets for node in target.nodes))
        return self.kept(names, numbers, lambda documents: self.variants.kl(targets, documents))

    def kept(self, name: str, numbers: Sequence[int], measure: Callable[[Sequence[Document]], Floats]) -> Floats:
        """As `kl`, of a variant that has this name in the journal and is measured by `measure`."""
        keys = [hashlib.blake2b(name.encode() + self._keys[number], digest_size=16).digest() for number in numbers]
        known = {key: self.journal[key] for key in keys if key in self.journal}
        missing = [(key, number) for key, number in zip(keys, numbers, strict=True) if key not in known]
        if missing:
            measured = measure([self.documents[number] for _, number in missing])
            made = dict(zip((key for key, _ in missing), measured.tolist(), strict=True))
            self.journal.add(made)
            known |= made
        return np.array([known[key] for key in keys], np.float64)
