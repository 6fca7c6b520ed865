"""The results of a comparison with a reference model: plain data. Knows no model and no statistics."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from olive_ext.errors import counted, listed
from olive_ext.report.diagnosis import PlaceFinding, Stage
from olive_ext.report.numbers import Bin, Number, Spread, joined

Status = Literal["ok", "small_loss", "loss", "unknown"]
"""What every verdict comes to."""

ALL = "all"
"""The task's name in a `Divergence` over the positions of all tasks."""

PERPLEXITY = "perplexity"
"""lm-eval's metric of the targets of a task that scores one for each document (lambada): of the mean log-likelihood."""

ACCURACY = "accuracy"
"""The metric's name in an `Outcome` over the answers of all tasks."""

LEAST_TEXTS = 5
"""Fewer documents give no interval of a mean over their positions: 95 % intervals of two hold in 50 to 92 % of cases,
of five texts in 97 to 99 (docs/design/comparison.md)."""

LEAST_ANSWERS = 20
"""The same of the more skewed mean KL of answers: intervals of five questions hold in 73 to 88 %, of 20 in 95 to 99."""

_UNSEEN_TAIL = 2.0
"""The factor of few documents' skewness: most of the tail is unseen (20 of a lognormal law of skewness 6 average 2)."""

TOKENIZER, PACKAGE_TOKENIZER = "the tokenizer", "the package's own tokenizer"
OF_GRAPHS = KV_CACHE, ENCODER, GRAPH = "the KV cache", "the encoder", "the graph"
CONSTANTS = "the files' constants"
"""Names in `Comparison.damaged` that are neither constants nor files."""

TRIALS = {"parts_failure": KV_CACHE, "encoder_failure": ENCODER}
"""What is damaged, by the fact of an execution that says what a trial at its opening has found."""

NAME = "name"
"""Key of a model's facts: the name that people use. Without it the path is the name."""

VARIANT = "variant"
"""Key of a model's facts: the variant of a model package, which stands after its path's name."""


class _OverDocuments:
    """A mean over positions of documents, whose standard error has `degrees` of freedom.

    Its interval ends where Student's t does, or where Hall's cubic transformation of t does ("On the Removal of
    Skewness by Transformation", 1992) if that is farther: on the side of the documents' longer tail.
    """

    task: str
    num_documents: int
    degrees: float | None

    def interval(self, mean: float, stderr: float | None, skewness: float | None) -> tuple[float, float]:
        """95 % interval of a mean with `stderr` of documents with `skewness`; infinite of fewer than five documents."""
        if stderr is None or self.num_documents < LEAST_TEXTS:
            return -math.inf, math.inf
        low, high = (self._reach(sign * (skewness or 0.0)) for sign in (1, -1))
        return mean - low * stderr, mean + high * stderr

    def p(self, estimate: float, stderr: float | None, skewness: float | None) -> float:
        """Two-sided p-value of a mean of zero where `estimate` was measured; 1 of fewer than five documents."""
        from scipy.special import stdtr

        if stderr is None or self.num_documents < LEAST_TEXTS or not estimate:
            return 1.0
        if not stderr:  # all moved alike: as likely as that their signs agree by chance
            return 2.0 ** (1 - self.num_documents)
        size, a = abs(estimate) / stderr, self._cubic(math.copysign(1.0, estimate) * (skewness or 0.0))
        size = min(size, size + a * size**2 / 3 + a**2 * size**3 / 27 + a / 6)
        return min(1.0, 2 * float(stdtr(self._degrees, -size)))

    def _reach(self, skewness: float) -> float:
        """Standard errors down to the interval's lower end; to the upper one with the other sign."""
        from scipy.special import stdtrit

        size, a = float(stdtrit(self._degrees, 0.975)), self._cubic(skewness)
        cube = 1 + a * (size - a / 6)
        return max(size, 3 / a * (math.copysign(abs(cube) ** (1 / 3), cube) - 1)) if a else size

    def _cubic(self, skewness: float) -> float:
        """The weight of t's square and cube."""
        return _UNSEEN_TAIL * skewness / math.sqrt(self.num_documents)

    @property
    def _degrees(self) -> float:
        return max(1.0, self.num_documents - 1.0 if self.degrees is None else self.degrees)


@dataclass(frozen=True)
class TextChange(_OverDocuments):
    """The perplexity of a task's whole texts, of both models, by their log-likelihoods alone."""

    task: str
    metric: str
    """The task's metric: "word_perplexity"."""

    num_documents: int
    perplexity_ratio: Number
    """Candidate's over reference's, per word or byte."""

    perplexity_ratio_stderr: float | None
    perplexity_ratio_skewness: float | None = None
    degrees: float | None = None


@dataclass(frozen=True)
class Divergence(_OverDocuments):
    """How far the candidate's next-token distributions are from the reference's, on the same tokens of one task."""

    task: str
    num_documents: int
    num_positions: int
    kl: Spread
    """KL(reference || candidate) in nats."""

    kl_lower: Number
    """A lower bound of the mean that sampling error does not touch; the mean itself where it is exact."""

    kl_sampling_error: Number
    """Standard error of the mean KL that comes from keeping a part of the reference's distributions; 0 where exact."""

    top1_agreement: Number
    """Share of positions where both models' most likely token is the same."""

    top1_agreement_stderr: float | None
    top_probability_difference: Number
    """Mean of candidate's minus reference's probability of the reference's most likely token."""

    top_probability_rms: Number
    """Root of the mean square of that difference."""

    perplexity_reference: Number
    perplexity_candidate: Number
    perplexity_ratio: Number
    """Candidate's over reference's, per token."""

    perplexity_ratio_stderr: float | None
    histogram: tuple[Bin, ...] = ()
    """KL by its size; labels are the bins' lower edges in nats."""

    by_position: tuple[Bin, ...] = ()
    along_answer: tuple[Bin, ...] = ()
    """KL by the number of tokens in front that are the answer's, where the targets are generated ones."""

    by_class: tuple[Bin, ...] = ()
    """KL by what kind of token comes next: word start, inside of a word, number, punctuation, white space, special."""

    target_probability_difference: float | None = None
    """Mean of candidate's minus reference's probability of the target token (llama.cpp's mean delta p)."""

    target_probability_rms: float | None = None
    is_text: bool = False
    """Whether all requests of the task score whole texts (rolling ones), so that its perplexity is one of these."""

    num_population: int | None = None
    """Documents that the means are estimated for, where `num_documents` of them were drawn; quantiles, bins and the
    largest value are of the drawn ones alone."""

    degrees: float | None = None
    """Degrees of freedom of the errors (`stats.distances.degrees_of_freedom`); None in reports that lack them."""

    kl_skewness: float | None = None
    """Skewness of the documents' deviations from the mean KL (`stats.distances.clustered_mean`)."""

    perplexity_ratio_skewness: float | None = None
    """The same of the perplexities' ratio; None in reports that lack it."""

    kl_reverse: float | None = None
    """Mean of KL(candidate || reference) in nats; None of short records, and where the reference excludes a token."""

    kl_reverse_stderr: float | None = None

    @property
    def kl_interval(self) -> tuple[float, float]:
        """95 % interval of the mean KL; infinite of too few documents."""
        is_few = not self.is_text and self.num_documents < LEAST_ANSWERS
        return self.interval(self.kl.mean, None if is_few else self.kl.stderr, self.kl_skewness)


@dataclass(frozen=True)
class Outcome:
    """One per-document metric of one task, for both models on the same documents.

    Where several tasks have answers that are right or wrong there is one more, with the task `ALL` and the metric
    "accuracy", over all their documents by each task's first such metric.
    """

    task: str
    metric: str
    filter: str
    num_documents: int
    reference: Number
    candidate: Number
    difference: Number
    """Candidate minus reference."""

    low: Number
    high: Number
    """95 % interval of the difference, over documents (`stats.paired_answers.difference_interval`)."""

    right_to_wrong: int
    wrong_to_right: int
    mcnemar_p: Number
    """Two-sided p of no change, below 5 % where the interval excludes zero: of 0/1 values by McNemar's exact test."""

    documents_needed: Mapping[str, int | None]
    """Difference to be resolved (for instance "0.01") to documents needed for it at 5 % error and 80 % power."""

    higher_is_better: bool | None = True
    """None where neither the task nor lm-eval says it."""

    is_binary: bool = True
    """Whether a document's value is 0 or 1, and its answer so right or wrong."""

    num_population: int | None = None
    """Documents that the numbers are estimated for, where `num_documents` of them were drawn: `mcnemar_p` is then not
    computed (1), because the flips decided when to stop."""

    @property
    def key(self) -> tuple[str, str, str]:
        """Task, metric and filter."""
        return self.task, self.metric, self.filter

    @property
    def is_silent(self) -> bool:
        """Whether the reference answers no document rightly, so that nothing can be lost."""
        return self.is_binary and self.reference == 1 - bool(self.higher_is_better)

    @property
    def is_share(self) -> bool:
        """Whether differences are in percentage points. The reference alone says it: a candidate that makes more errors
        than there are words is not judged by another unit."""
        return abs(self.reference) <= 1

    @property
    def unit(self) -> float:
        """The factor from a difference to points, else to per cent of the reference: ratings from 1 to 5, or sums of
        grades, have no points."""
        return 100.0 if self.is_share else 100.0 / abs(self.reference)

    @property
    def unit_name(self) -> str:
        """The unit of differences that `unit` is multiplied with."""
        return "pt" if self.is_share else "%"


def primary_outcomes(outcomes: Iterable[Outcome]) -> dict[str, Outcome]:
    """The primary outcome of each task: its first one that is right or wrong and by which the reference is ever
    right, else its first one that is right or wrong. Tasks without one are left out."""
    primary: dict[str, Outcome] = {}
    for item in outcomes:
        if item.is_binary and (item.task not in primary or (primary[item.task].is_silent and not item.is_silent)):
            primary[item.task] = item
    return primary


@dataclass(frozen=True)
class Flip:
    """A document that one model answers rightly and the other wrongly."""

    task: str
    doc_id: int
    direction: Literal["right_to_wrong", "wrong_to_right"]
    question: str
    target: str
    reference_answer: str
    candidate_answer: str
    metric: str = ""
    """The metric by which the answers are right or wrong: the first of the task's metrics with such values."""

    filter: str = ""
    pictures: tuple[str, ...] = ()
    """Thumbnails of what the question shows, as data URLs."""


@dataclass(frozen=True)
class ClaimResult:
    """The claim about all documents that the drawn ones decide, and why the evaluation stopped."""

    metric: str
    """The metric of the comparison that the claim is about, over all tasks."""

    side: Literal["above", "below"]
    """The side of `bound` on which the metric was to be."""

    bound: float
    confidence: float
    verdict: Status
    """"ok" where the claim is kept; "unknown" where what is not known of the documents, all evaluated, would decide."""

    estimate: Number
    low: Number
    high: Number
    """An interval that holds at every stopping time; it ends at the bound where it lies on one side of it."""

    num_evaluated: int
    num_documents: int
    sample: str
    """Digest of the numbers of the drawn documents: reports of other samples are not compared."""

    outcome: tuple[str, str, str] | None = None
    """Task, metric and filter of the outcome that the claim is about; None of a mean over positions."""

    num_unknown: int = 0
    """Documents among those evaluated that have no value: the claim is decided whatever these are, or open."""

    cut: float | None = None
    """The most of a position's KL that counts in the claim, in nats; None where all does."""

    beyond_cut: Number = 0.0
    """The part of the mean KL of the drawn documents that lies beyond the cut."""

    @property
    def is_above(self) -> bool:
        """On which side of the bound the metric is, or was to be where that is open."""
        return (self.side == "above") == (self.verdict != "loss")

    def sentence(self) -> str:
        """ "342 of 10,042 documents, stopped: loss below 1 point is certain (95 % for this model)"."""
        level, unknown = f"{100 * self.confidence:g} % for this model", ""
        if self.num_unknown:
            unknown = f", {self.num_unknown:,} without an answer"
        everything = f"{'all ' * (self.num_documents != 1)}{counted(self.num_documents, 'document')}{unknown}"
        if self.verdict == "unknown":
            return f"{everything}: {self.statement()} is not certain{self._cut()}"
        if self.num_evaluated == self.num_documents:
            return f"{everything}: {self.statement()}{self._cut()}"
        drawn = f"{self.num_evaluated:,} of {self.num_documents:,} documents{unknown}"
        return f"{drawn}, stopped: {self.statement()} is certain ({level}){self._cut()}"

    def statement(self) -> str:
        """ "loss below 1 point"."""
        if self.metric == "kl_mean":
            return f"KL {'above' if self.is_above else 'below'} {self.bound:g} nats"
        if self.metric == "top1_agreement":
            return f"top-1 agreement {'above' if self.is_above else 'below'} {100 * self.bound:g} %"
        is_loss, size = self.bound <= 0, 100 * abs(self.bound)
        word = "below" if self.is_above == is_loss else "above"
        return f"{'loss' if is_loss else 'gain'} {word} {size:g} point{'s' * (size != 1)}"

    def _cut(self) -> str:
        if self.cut is None or self.is_above:
            return ""
        beyond = f": {self.beyond_cut:.2g} nats lie beyond" if self.beyond_cut > 0 else ""
        return f", of positions cut at {self.cut:g} nat{'s' * (self.cut != 1)}{beyond}"


@dataclass(frozen=True)
class PromptDiff:
    """How the prompts of the two models differ, each made by the model's own files. Distributions are not compared."""

    what: tuple[str, ...]
    """"chat template", "special tokens around a text"."""

    files: tuple[str, ...]
    """The files that differ and may decide it."""

    reference_prompt: str = ""
    """A document's prompt with its special tokens, in short; empty where no prompt is known."""

    candidate_prompt: str = ""
    are_alike: bool = False
    """Whether all prompts of the tasks were compared, and none differs."""

    def sentence(self) -> str:
        """ "the two models get different prompts: chat template (chat_template.jinja): '<s>Hi' and 'Hi'"."""
        what = f"{', '.join(self.what)}{f' ({joined})' if (joined := ', '.join(self.files)) else ''}"
        if self.are_alike:
            return f"the tokenizers differ: {what}; the prompts of these tasks do not"
        if not self.candidate_prompt:
            return f"the two models may get different prompts: {what}"
        return f"the two models get different prompts: {what}: {self.reference_prompt!r} and {self.candidate_prompt!r}"


@dataclass(frozen=True)
class StopTokens:
    """The token ids at which each model ends an answer, by the file that its own runtime reads."""

    reference: tuple[int, ...]
    reference_file: str
    candidate: tuple[int, ...]
    candidate_file: str
    search: tuple[str, ...] = ()
    """How the candidate's file searches answers otherwise: "min_length 60 for 0"."""

    unused: tuple[int, ...] = ()
    """Ends that files of the reference name and its runtime does not read: exports stop there, too."""

    @property
    def differ(self) -> bool:
        """Whether the candidate's own runtime would give other answers than the reference's, by these files alone."""
        return bool(self.missing or self.search)

    @property
    def missing(self) -> tuple[int, ...]:
        """The stop tokens of the reference at which the candidate goes on."""
        return tuple(sorted({*self.reference} - {*self.candidate}))

    @property
    def more(self) -> tuple[int, ...]:
        """The stop tokens of the candidate at which the reference goes on."""
        return tuple(sorted({*self.candidate} - {*self.reference}))

    @property
    def more_sentence(self) -> str:
        """Says which ids end the candidate's answers and not the reference's; empty without any."""
        ids = ", ".join(map(str, self.more))
        return f"the candidate also stops at {ids} ({self.candidate_file})" if ids else ""

    def sentence(self) -> str:
        """ "the candidate does not stop at token 2, as the reference does (genai_config.json has none, ...)"."""
        if not self.missing:
            return (
                f"{self.candidate_file} has other search settings than the reference's {self.reference_file}: "
                + ", ".join(self.search)
            )
        one, two = ([*map(str, ids)] or ["none"] for ids in (self.candidate, self.reference))
        tokens = f"token{'s' * (len(self.missing) > 1)} {', '.join(map(str, self.missing))}"
        sources = f"{self.candidate_file} has {', '.join(one)}; {self.reference_file} of the reference {', '.join(two)}"
        return f"the candidate does not stop at {tokens}, as the reference does ({sources})"


GENERATED, SHARED = "answer generated token by token", "text in parts or in a step with others"
"""Without the first, steps of one token were tried at opening alone, at few lengths. Without the second, the graph lets
the rest of a step change a text's numbers: in a batch, or continued after a past, they may be others."""


@dataclass(frozen=True)
class Coverage:
    """The parts of a model that the compared positions reached."""

    longest: int
    """Tokens of the longest text."""

    context: int | None
    vocabulary: float | None
    """Share of the vocabulary's tokens that were read or scored; None where they are not known."""

    unseen: tuple[str, ...] = ()
    """ "picture", "sound": what the model takes besides texts, and no task had; `GENERATED`, `SHARED`, or
    "two pictures encoded together"."""

    uncompared: int = 0
    """How many constants of the model's files have no other in the reference's."""

    first: int = 1
    """The first position of a text that is compared, counted from 1: the tokens of a prompt are read and not scored."""

    seconds: float = 0.0
    """Of the longest sound; 0 without any."""

    judged: tuple[str, ...] = ()
    """Constants and weights that are not the reference's beyond rounding: what that costs, the texts show."""

    def __str__(self) -> str:
        """ "in positions 17 to 450 of 512, 12 % of the vocabulary and no picture, with 'norm' and 2 more not the
        reference's, with 3 constants not compared"."""
        where = f"{self.longest:,}{'' if self.context is None else f' of {self.context:,}'}"
        parts = [f"positions {self.first:,} to {where}"]
        parts += [] if self.vocabulary is None else [f"{100 * self.vocabulary:.2g} % of the vocabulary"]
        parts += [f"sounds of up to {self.seconds:.3g} s"] if self.seconds else []
        parts += [f"no {name}" for name in self.unseen]
        rest = [f"with {listed(map(repr, self.judged), 1)} not the reference's"] if self.judged else []
        rest += [f"with {counted(self.uncompared, 'constant')} not compared"] if self.uncompared else []
        return ", ".join((f"in {joined(parts)}", *rest))


@dataclass(frozen=True)
class Comparison:
    """All results against one reference."""

    reference: Mapping[str, Any]
    """Path, kind, mode ("resident" or "recorded"), and the record's form and size."""

    divergences: tuple[Divergence, ...] = ()
    outcomes: tuple[Outcome, ...] = ()
    flips: tuple[Flip, ...] = ()
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """The reference's own lm-eval results, as `Report.results`."""

    missing: int = 0
    """Requests of either model without an answer, and documents where the candidate alone has no value."""

    non_finite: int = 0
    """Requests for which either model's output was NaN or infinite."""

    certainty: ClaimResult | None = None
    """The claim that drawn documents decide; None where all documents were evaluated."""

    damaged: Mapping[str, str] = field(default_factory=dict)
    """Constants that should be the reference's and are not, or no numbers, reached or not, each with the difference."""

    reach: Coverage | None = None
    """None without distributions."""

    contexts: tuple[int, int] | None = None
    """Tokens of the longest text by the candidate's files and by the reference's, where the candidate's allow fewer and
    neither model was asked a longer one."""

    stages: tuple[Stage, ...] = ()
    """Conversion, quantization and provider apart, in this order, where the models between are known."""

    place: PlaceFinding | None = None
    """The finding on two places, where the reference is the same model."""

    is_same_content: bool = False
    """Whether both models are one by the content of all that opening them reads."""

    matters: float = 1.0
    """The loss that matters: in points of an answers' metric, in per cent of a perplexity."""

    over_all: bool = False
    """Whether all tasks together decide (`fail_on_loss`), and single ones may be undecided."""

    unread: Mapping[str, int] = field(default_factory=dict)
    """Of `missing`, documents to whose answers a task's own code gives no value, by task and metric."""

    kept_bounds: tuple[str, ...] = ()
    """A sentence for each bound of `require` that is kept."""

    arguments: str = "MODEL --reference REFERENCE --tasks TASKS"
    """The candidate, the reference and the tasks as a shell takes them."""

    asked: PromptDiff | None = None
    """The differences where each model's own files ask it otherwise; None where both are asked alike."""

    other_template: bool = False
    """Whether the chat templates' texts differ, though all prompts of the tasks are alike."""

    stops: StopTokens | None = None
    """Where both models end their answers; None where that is not known of both."""

    changed_answers: int = 0
    """Number of documents whose generated texts differ, or where a limit ends one model's answer alone."""

    texts: tuple[TextChange, ...] = ()
    """The changes of tasks of whole texts, where no distributions were compared."""

    lengths: tuple[Outcome, ...] = ()
    """Outcomes of how long answers are (`report.metrics.LENGTHS`): of these the verdict judges those cut off."""

    @property
    def is_generated(self) -> bool:
        """Whether a task has the models write answers."""
        configs = self.metrics.get("configs", {}).values()
        return any((config or {}).get("output_type") == "generate_until" for config in configs)

    @property
    def unanswered(self) -> str:
        """The sentence on what is `missing`; a baseline's facts say it where a limit left out its documents."""
        lost = self.missing - sum(self.unread.values())
        kinds = {f"value of {name}": ("document", number) for name, number in self.unread.items()}
        kinds |= {"answer": ("request", lost)} if lost else {}
        said = [f"{counted(n, f'{one} has', f'{one}s have')} no {what}" for what, (one, n) in kinds.items()]
        return self.reference.get("not_asked") or " and ".join(said)

    def documents(self) -> dict[str, int]:
        """The number of documents of each task."""
        scored: list[Divergence | TextChange] = [*self.divergences, *self.texts]
        numbers = {item.task: item.num_documents for item in scored if item.task != ALL}
        answered = sorted(self.outcomes, key=lambda item: item.num_documents)  # a metric may lack some of them
        return numbers | {item.task: item.num_documents for item in answered if item.task != ALL}

    def whole_texts(self) -> dict[str, Divergence | TextChange]:
        """By task the change of whole texts' perplexity: per token where distributions were compared."""
        texts: list[Divergence | TextChange] = [*(item for item in self.divergences if item.is_text), *self.texts]
        answered = {ALL, *(item.task for item in self.outcomes)}
        return {item.task: item for item in texts if item.task not in answered}

    def perplexities(self) -> dict[str, Divergence | TextChange]:
        """The changes of `whole_texts`, and of targets' perplexity beside answers."""
        return self.whole_texts() | {item.task: item for item in self.texts if item.metric == PERPLEXITY}

    def overall_outcome(self) -> Outcome | None:
        """The outcome of all tasks, else of the first with right and wrong answers, else the first; None if none."""
        items = [*primary_outcomes(self.outcomes).values(), *self.outcomes]
        return next(iter(sorted(items, key=lambda item: item.task != ALL)), None)

    def overall_divergence(self) -> Divergence | None:
        """The divergence over all tasks' positions; of a single task its own; None where no position was scored."""
        return next(iter(sorted(self.divergences, key=lambda item: item.task != ALL)), None)
