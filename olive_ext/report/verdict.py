"""The verdict on a comparison: one sentence to act on, and its evidence. It never says that two models are the same.

Only what is certain is called a loss. Where none is certain, "no loss found" needs a loss that matters to be excluded,
and the distributions to be near. A claim about drawn documents settles its own sentence: no finding is dropped for it.

**Bands.** How far apart two models' distributions are, in words: by what is published of real quantizations
(llama.cpp, tools/perplexity/README.md, Llama 3 8B on WikiText-2, tables "LLaMA 3 8b Scoreboard" and "LLaMA 2 vs. LLaMA
3", revision f364eb6f), each against FP16. Mean KL in nats: q8_0 0.0014, q6_K 0.0055; q5_K_M 0.011, q4_K_M 0.031, q4_0
0.072; q3_K_M 0.102, q3_K_S 0.228; iq2_M 0.326, q2_K 0.445, iq1_S 2.2. The limits lie between these. The share of equal
top tokens is a figure and sets no band: of a weak model, whose tokens nearly tie, 0.75 % were equal at 0.0033 nats.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from olive_ext.errors import counted, listed
from olive_ext.report import numbers
from olive_ext.report.changes import Change, Figure, changes_of, deciding_changes, difference_texts, name_of
from olive_ext.report.comparison import ALL, CONSTANTS, PERPLEXITY, Comparison, Divergence, Status
from olive_ext.report.diagnosis import PlaceFinding, stage_sentences
from olive_ext.report.metrics import CUT_OFF, LENGTHS, STOPPED, read_metrics
from olive_ext.report.next_step import next_step
from olive_ext.report.numbers import SAME_NATS, joined

EXIT_STATUS: Mapping[Status, int] = {"ok": 0, "small_loss": 0, "loss": 1, "unknown": 3}
"""The exit status of a command that ends with a verdict; 2 is a mistake."""

_ORDER: tuple[tuple[str, Status], ...] = (
    ("bound_broken", "loss"),
    ("cannot_tell asked place_unknown", "unknown"),
    ("loss place_different cut_off far claim_broken", "loss"),
    ("distant damaged stops shorter no_direction too_few distance_open no_values none_right claim_open", "unknown"),
    ("small_loss", "small_loss"),
    ("place_kernels place_same claim_kept no_loss_found no_difference gain", "ok"),
    ("nothing_compared", "unknown"),
    ("pooled", "ok"),
)
STATUSES: Mapping[str, Status] = {code: status for codes, status in _ORDER for code in codes.split()}
"""Codes of reasons, the worst first, and the status of a verdict whose first reason has it. Other codes are evidence.
"""

_CLAIM_CODES: Mapping[Status, str] = {"ok": "claim_kept", "loss": "claim_broken", "unknown": "claim_open"}
_MOST_NAMED = 3
_SAME_GRADE = 1e-5
"""A graded metric that changes by less, while distributions are equal but for rounding, has changed by rounding."""

_MANY = 0.25
"""The share of answers that certainly no longer end by themselves, from which a model may have lost its end. With sound
weights of 4 bits the quickstart's model moves by 31 points, 21 of them certain; without its end token by 58, 46."""

SENTENCES = "sentence_accuracy"
"""The share of transcripts in which no word is wrong: a second metric on the documents of a word error rate."""

_OTHER_AGREEMENT = 0.05
"""Distributions far apart with fewer equal top tokens are no quantization of one model: at 2 bits 71 % are equal."""


LOST_TOO = frozenset({"stops", *(code for code, status in STATUSES.items() if status == "loss")})
"""What is said beside a loss: what is lost, and that answers end or are searched otherwise."""


@dataclass(frozen=True)
class Band:
    """Distances up to `most_kl` nats."""

    words: str
    most_kl: float
    code: str = ""
    """The verdict of the distance alone: none, a doubt ("distant"), or a loss ("far")."""


BANDS = (
    Band("as with weights of 6 to 8 bits", 0.01),
    Band("as with weights of 4 to 5 bits", 0.09),
    Band("as with weights of 3 bits", 0.3, "distant"),
    Band("as with weights of 2 bits or fewer", float("inf"), "far"),
)


@dataclass(frozen=True)
class Reason:
    """A finding by its code; `sentence` says it."""

    code: str
    task: str = ""
    metric: str = ""
    size: float | None = None
    """The size of the loss, certain or possible, in `unit`; the metric's value where a bound is broken."""

    unit: str = ""
    words: str = ""
    """Words for the sentence that no field has: advice, a band, another part's finding."""

    documents: int | None = None
    """Documents that would decide, by an estimate; None where that is not known."""

    figure: str = ""
    """The measured change with its 95 % interval."""

    grade: Literal["", "cannot tell", "not decided"] = ""
    """How the headline begins if this is the first reason: one verdict has one grade."""

    field: str = ""
    """The key of a bound that is broken: `require` or `fail_on_loss`."""

    bound: float | None = None
    """The bound that the value breaks."""

    @property
    def name(self) -> str:
        """The name of the task and its metric."""
        return name_of(self.task, self.metric)


@dataclass(frozen=True)
class Verdict:
    """A sentence to act on, and its reasons, the headline's first."""

    status: Status
    headline: str
    reasons: tuple[Reason, ...]
    evidence: tuple[str, ...] = ()
    """Further findings, a sentence each."""

    figures: tuple[Figure, ...] = ()
    num_documents: int = 0
    next_step: str = ""
    """What to do where nothing is decided or something was lost, in one sentence."""

    @property
    def code(self) -> str:
        """The headline's."""
        return self.reasons[0].code

    @property
    def finding(self) -> str:
        """Headline and evidence."""
        return "; ".join((self.headline, *self.evidence))

    @property
    def lines(self) -> tuple[str, ...]:
        """Headline, evidence, the figures with the number of documents, and the next step, a line each."""
        is_counted = any(item.code in _CLAIM_CODES.values() for item in self.reasons)  # a claim's sentence says it
        number = "" if is_counted else f" ({counted(self.num_documents, 'document')})"
        figures = f"{', '.join(map(str, self.figures))}{number}"
        next_step = f"next: {self.next_step}" if self.next_step else ""
        return (self.headline, *filter(None, (*self.evidence, figures if self.figures else "", next_step)))

    def _str__(self) -> str:
        return "\n".join(self.lines)


def sentence(reasons: Sequence[Reason], matters: float, *, is_headline: bool) -> str:
    """The sentence for reasons of one code. Below the headline it has no grade."""
    first, names = reasons[0], _few([f"{item.name} ({item.figure})" for item in reasons])
    otherwise = "" if is_headline else "otherwise "
    words = first.words
    match first.code:
        case "bound_broken":
            return f"bound broken: {words}"
        case "nothing_compared":
            return f"nothing was compared: {words}"
        case "loss":
            return f"loss found in {names}"
        case "cut_off":
            tasks = _few([f"{item.task} ({item.figure})" for item in reasons])
            return f"loss found: more answers of {tasks} run to their limit"
        case "far" | "distant":
            of_task = f" of {first.task}" if first.task else ""
            words = f"the distributions{of_task} are far apart, {words} (KL {numbers.nats(first.size or 0.0)} nats)"
        case "small_loss":
            grade = "small loss found" if is_headline else "a small loss"
            return f"{grade} in {names}, of less than {matters:g} {first.unit}{words * is_headline}"
        case "no_direction":
            words = f"{names} changed, and nothing says whether more is better (`higher_is_better`)"
        case "too_few":
            words = _few([possible_loss(item, is_short=item is not first) for item in reasons])
        case "no_loss_found":
            return f"{otherwise}no loss found{f': {first.figure}' * bool(first.figure)}{words}"
        case "no_difference":
            return f"{otherwise}no difference found{words}"
        case "gain":
            return f"{otherwise}no loss found{words}, gain in {names}"
        case "pooled":
            where = "over all tasks together" if first.task == ALL else f"in {first.name}"
            return f"{where} a loss of {matters:g} pt is excluded: {first.figure}{words * is_headline}"
        case "two_models":
            return f"as two models: {words}"
    return f"{first.grade}: {words}" if first.grade and is_headline else words


def _few(texts: Sequence[str]) -> str:
    return listed(texts, _MOST_NAMED) if len(texts) > _MOST_NAMED else joined(texts)


def possible_loss(item: Reason, *, is_short: bool = False) -> str:
    """The largest loss within the limits; in short without its verb, figure and advice."""
    if item.size is None:
        return f"{item.name} is known of too few texts ({item.words})"
    figure, advice = (f" ({text})" if text else "" for text in (item.figure, item.words))
    most = f"up to {f'{item.size:.0f}' if item.size > 99.5 else f'{item.size:.2g}'} {item.unit}"
    return f"{item.name} {most}" if is_short else f"{item.name}{figure} may have lost {most}{advice}"


def verdict(comparison: Comparison, broken: Sequence[Reason] = ()) -> Verdict:
    """The verdict on a comparison, whose worst findings are `broken` bounds (`run.bounds`)."""
    findings, figures = _findings(comparison)
    kept = (Reason("bound_kept", words=f"bound kept: {line}") for line in comparison.kept_bounds)
    reasons = (*broken, *findings, *kept)
    together: dict[tuple[str, str], list[Reason]] = {}
    for item in reasons:
        is_listed = item.code in ("loss", "cut_off", "small_loss", "no_direction", "too_few", "gain")
        together.setdefault((item.code, "" if is_listed else repr(item)), []).append(item)
    first, *others = together.values()
    headline = sentence(first, comparison.matters, is_headline=True)
    evidence = dict.fromkeys(sentence(own, comparison.matters, is_headline=False) for own in others)
    if not comparison.over_all and comparison.matters != Comparison.matters:
        evidence[f"a loss of {comparison.matters:g} pt or % matters (`matters`)"] = None
    known = figures, num_documents(comparison), next_step(reasons, comparison)
    return Verdict(STATUSES[reasons[0].code], headline, reasons, tuple(evidence), *known)


def _findings(comparison: Comparison) -> tuple[Sequence[Reason], tuple[Figure, ...]]:
    """The reasons without bounds, the worst first, and the figures, as docs/comparison.md has it.

    "No loss found" needs three things: every metric of every task excludes a loss that matters, even if all requests
    without an answer are lost; the distributions are as near as with weights of 4 bits; and every task is judged. So at
    most 2.5 % of models that lost that much in some metric get it, whatever the number of tasks.

    Where a claim is certainly kept, or all tasks together decide (`over_all`) and exclude a loss that matters, what is
    undecided follows as a reason; no finding is removed. So a larger bound never gives a worse status.
    """
    if comparison.place is not None:
        return _of_places(comparison.place, comparison)
    changes = changes_of(comparison)
    divergence, certainty = comparison.overall_divergence(), comparison.certainty
    figures = tuple(_figures(comparison, changes, divergence))
    if wrong := _non_finite(comparison):
        return [Reason("cannot_tell", words=f"non-finite {joined(wrong)}", grade="cannot tell")], figures
    if not figures:
        missing = Reason("cannot_tell", words=f"nothing was compared: {comparison.unanswered}")
        why = _incomparable(comparison) or "the tasks gave neither scores nor answers"
        nothing = missing if comparison.missing else Reason("nothing_compared", words=why)
        lost = (item for item in _against(comparison, changes, divergence) if item.code in LOST_TOO)
        return sorted([nothing, *_damaged(comparison), *lost], key=lambda item: [*STATUSES].index(item.code)), ()
    is_same = _is_same(comparison, divergence)
    against = [] if is_same and not comparison.missing else _against(comparison, changes, divergence)
    damaged = [*_damaged(comparison)]
    shorter, is_cut = _shorter(comparison)
    claims = [] if certainty is None else [Reason(_CLAIM_CODES[certainty.verdict], words=certainty.sentence())]
    claimed = [item for item in claims if item.code == "claim_kept"]
    findings = [*(claims if not claimed else ()), *damaged, *against, *(shorter if is_cut else ())]
    reach = "" if comparison.reach is None else f", {comparison.reach}"
    if not findings:
        if is_same and comparison.is_same_content:
            reach = ": the models' files and answers are the same"
        gained = [item for item in changes if item.is_gained and item.metric != CUT_OFF]
        findings = [reason_of("gain", item, item.estimate, reach) for item in gained]
        if is_same or not findings:
            judged = next((str(item.figure) for item in deciding_changes(changes) if item.is_shown), "")
            findings = [Reason("no_difference" if is_same else "no_loss_found", words=reach, figure=judged)]
    few = [item for item in findings if item.code == "too_few" and not item.figure]
    texts = {(item.task, item.metric) for item in changes if item.outcome is None}
    undecided = [item for item in few if claimed or (item.task, item.metric) not in texts]
    whole = [item for item in changes if item.is_whole and not item.may_lose(comparison.matters)]
    pooled = [Reason("pooled", item.task, item.metric, words=reach, figure=str(item.figure)) for item in whole]
    deciding = claimed or (pooled if comparison.over_all else [])
    if deciding and undecided and not comparison.missing:
        findings = [*(item for item in findings if item not in undecided), *deciding]
    worst = min((item.code for item in findings), key=[*STATUSES].index)
    is_lost = STATUSES[worst] == "loss" and worst != "claim_broken"
    is_open = not (is_lost or is_same)
    most_kl = BANDS[0].most_kl  # that a stage alone may have without being noticed
    if certainty is not None and (certainty.metric, certainty.side) == ("kl_mean", "below"):
        most_kl = min(most_kl, certainty.bound)
    others = [
        *claims,
        *(Reason("stages", words=words) for words in stage_sentences(comparison.stages, most_kl)),
        *damaged,
        *(item for item in [*findings, *undecided] if item.code in LOST_TOO or not is_lost),
    ]
    if worst == "too_few" or (comparison.over_all and is_open):
        others += [item for item in pooled if item.task == ALL]
    if comparison.stops is not None and comparison.stops.more and worst != "stops":
        others.append(Reason("more_stops", words=comparison.stops.more_sentence))
    others += [] if is_cut else shorter
    if comparison.other_template:
        words = "the chat templates' texts differ; all prompts of these tasks are alike"
        others.append(Reason("template", words=words))
    others += _silent(changes)[0] if is_open else []
    if (comparison.over_all or certainty is not None) and is_open and (names := _uncompared(comparison)):
        others.append(Reason("uncompared", words=f"not compared, as one score of a whole task: {_few(names)}"))
    if comparison.missing:
        isnt = "and is" if comparison.missing == 1 else "and are"
        others.append(Reason("missing", words=f"{comparison.unanswered} {isnt} not in this"))
    first = [item for item in findings if item.code == worst]
    return [*first, *dict.fromkeys(item for item in others if item.code != worst)], figures


def worst_status(verdicts: Iterable[Verdict | None]) -> int:
    """The exit status of a command that compared: the status of a loss, else of an unknown verdict, else 0."""
    statuses = {EXIT_STATUS[verdict.status] for verdict in verdicts if verdict is not None}
    return next((status for status in (EXIT_STATUS["loss"], EXIT_STATUS["unknown"]) if status in statuses), 0)


def _of_places(place: PlaceFinding, comparison: Comparison) -> tuple[Sequence[Reason], tuple[Figure, ...]]:
    """One model in two places; the verdict on its answers is evidence, unless they cannot be compared. What is lost as
    of two models, or has no answer, is never green."""
    answers = verdict(replace(comparison, place=None, kept_bounds=()))
    if answers.code in ("cannot_tell", "nothing_compared"):
        return answers.reasons, answers.figures
    first = Reason("place_unknown" if place.kind == "cannot_tell" else f"place_{place.kind}", words=place.headline)
    is_incomplete = bool(comparison.missing or comparison.damaged)
    is_other = is_incomplete or answers.status == "loss" or answers.code in ("distant", "stops")
    if STATUSES[first.code] == "ok" and is_other:
        words = f"{first.words} where both were scored, but not all is the same"
        first = Reason("place_unknown", words=words, grade="cannot tell")
    evidence = (Reason("place", words=words) for words in place.evidence())
    other = answers.finding if is_incomplete else answers.headline
    return [first, *evidence, Reason("two_models", words=other)], answers.figures


def _damaged(comparison: Comparison) -> Iterator[Reason]:
    if comparison.asked is not None and comparison.asked.are_alike:
        words = f"{comparison.asked.sentence()}; distributions are not compared"
        yield Reason("damaged", words=words, grade="not decided")
    for name, what in [*comparison.damaged.items()][:1]:
        more = f", and {counted(len(comparison.damaged) - 1, 'other')}" if len(comparison.damaged) > 1 else ""
        is_known = name != CONSTANTS
        finding = f"damaged: '{name}' {what}" if is_known else f"{name} {what}"
        yield Reason("damaged", words=f"{finding}{more}", grade="" if is_known else "not decided")


def _shorter(comparison: Comparison) -> tuple[list[Reason], bool]:
    if comparison.contexts is None:
        return [], False
    candidate, other = comparison.contexts
    is_cut = comparison.reach is not None and comparison.reach.longest >= candidate
    words = (
        f"the candidate's files allow {candidate:,} tokens, the reference's {other:,}: no longer texts were compared"
    )
    return [Reason("shorter", "", "", other - candidate, "tokens", words, grade="not decided")], is_cut


def _against(comparison: Comparison, changes: Sequence[Change], overall: Divergence | None) -> Iterator[Reason]:
    matters = comparison.matters
    if comparison.asked is not None and not comparison.asked.are_alike:
        words = f"{comparison.asked.sentence()}; distributions are not compared"
        yield Reason("asked", words=words, grade="cannot tell")
    if words := _other_ends(comparison):
        yield Reason("stops", words=words, grade="not decided")
    for ends in comparison.lengths:
        if ends.metric == STOPPED and ends.low > _MANY:
            change, interval = difference_texts(ends)
            words = f"more answers of {ends.task} ({change} pt, {interval}) only end at a stop string of the task"
            yield Reason("stops", ends.task, STOPPED, 100 * ends.difference, "pt", words, grade="not decided")
    least = matters if comparison.over_all else 0.0  # a bound is broken by what was measured
    lost = [item for item in changes if item.is_lost and (-item.estimate > least or not item.may_lose(matters))]
    unclear = [item for item in changes if item.is_unclear and -item.estimate > least]
    yield from (replace(reason_of("no_direction", item, -item.estimate), grade="not decided") for item in unclear)
    for item in lost:
        if item.metric != CUT_OFF:
            reach = "" if comparison.reach is None else f", {comparison.reach}"
            known = ("loss", "") if item.may_lose(matters) else ("small_loss", reach)
            yield reason_of(known[0], item, -item.estimate, known[1])
        elif item.may_lose(matters):
            yield reason_of("cut_off", item, -item.estimate)
    yield from _distant(comparison, overall)
    possible = [item for item in deciding_changes(changes) if item not in [*lost, *unclear] and item.may_lose(matters)]
    for item in sorted(possible, key=lambda item: (not item.is_whole, item.low)):
        open_loss = reason_of("too_few", item, -item.low, item.advice)
        yield replace(open_loss, documents=item.documents, grade="not decided")
    if other := _incomparable(comparison):
        yield Reason("no_values", words=other, grade="not decided")
    silent, is_all = _silent(changes)
    yield from silent if is_all else ()


def _silent(changes: Sequence[Change]) -> tuple[list[Reason], bool]:
    """The reason that the reference is right in no document of some tasks, and whether these are all."""
    known = [item for item in deciding_changes(changes) if item.metric != CUT_OFF]
    heard = {item.task for item in known if item.outcome is None or not item.outcome.is_silent or item.is_gained}
    names = [item.name for item in known if item.task not in heard]
    if not names:
        return [], False
    words = f"the reference is right in no document of {_few(names)}: nothing could be lost there"
    return [Reason("none_right", words=words, grade="not decided")], not heard


def reason_of(code: str, item: Change, size: float, words: str = "") -> Reason:
    """A change as a reason, whose `size` is None where it is not finite."""
    is_shown = code != "too_few" or item.is_lost
    figure = ", ".join(filter(None, (item.figure.value, item.figure.note))) if is_shown else ""
    return Reason(code, item.task, item.metric, size if math.isfinite(size) else None, item.unit, words, figure=figure)


def _distant(comparison: Comparison, overall: Divergence | None) -> Iterator[Reason]:
    """Distributions that are far apart: of all positions as they are measured, or may be where enough documents for an
    interval were drawn; of a single task's certainly farther."""
    if overall is None:
        return
    whole, is_known = band_of(overall), math.isfinite(overall.kl_interval[1])
    is_drawn = overall.num_population not in (None, overall.num_documents)
    if whole.code:
        yield _far(whole.code, overall, distance_words(overall))
    elif overall.kl.maximum < SAME_NATS:
        return
    elif is_drawn and is_known and (far := band_of(overall, 1)).code:
        words = f"the distributions may be far apart, {far.words}"
        yield Reason("distance_open", words=words, grade="not decided")
    for item in comparison.divergences:
        band = band_of(item, -1)
        if band.code and band.most_kl > whole.most_kl:
            yield _far(band.code, item, band.words, item.task)


def _far(code: str, item: Divergence, words: str, task: str = "") -> Reason:
    grade: Literal["", "not decided"] = "not decided" if code == "distant" else ""
    return Reason(code, task, size=item.kl.mean, unit="nats", words=words, grade=grade)


def _incomparable(comparison: Comparison) -> str:
    """The sentence on tasks that cannot be judged; empty without any."""
    names = [*_unjudged_tasks(comparison).values()]
    if not comparison.over_all and comparison.certainty is None:  # else others are evidence
        names += _uncompared(comparison)
    return f"{joined(names)} {'has' if len(names) == 1 else 'have'} no values by document to compare" if names else ""


def _unjudged_tasks(comparison: Comparison) -> dict[str, str]:
    """Names of the evaluated tasks that nothing judges, with their metrics: no texts, and no metric is a mean over
    documents (MCC, F1 over a corpus, BLEU, chrF), or no document has a value in both runs. Documents that are
    drawn for a claim need not be of every task."""
    judged = {ALL, *(item.task for item in comparison.outcomes), *comparison.whole_texts()}
    evaluated = [] if comparison.certainty is not None else [*comparison.metrics.get("configs", {})]
    evaluated += [item.task for item in comparison.divergences]
    metrics, named = read_metrics(comparison.metrics), {}
    for task in (task for task in evaluated if task not in judged):
        names = dict.fromkeys(item.metric for item in metrics if item.task == task)
        named[task] = f"{task} ({', '.join(names)})" if names else task
    return named


def _uncompared(comparison: Comparison) -> list[str]:
    """Names of metrics beside compared ones that are one score of a whole task (F1 beside accuracy), or no number."""
    judged = {item.key for item in (*comparison.outcomes, *comparison.lengths)}
    judged |= {(task, PERPLEXITY, "none") for task in comparison.perplexities()}
    results, tasks = comparison.metrics.get("results", {}), dict.fromkeys(item.task for item in comparison.outcomes)
    keys = ((task, *key.split(",", 1)) for task in tasks for key in results.get(task, ()) if "," in key)
    metrics = (key for key in keys if key[1] not in LENGTHS and not key[1].endswith("_stderr"))
    return [name_of(*key[:2]) for key in metrics if key not in judged]


def _is_same(comparison: Comparison, divergence: Divergence | None) -> bool:
    unjudged = _unjudged_tasks(comparison).keys() - {item.task for item in comparison.divergences}
    if unjudged or comparison.changed_answers or comparison.asked or _other_ends(comparison):
        return False
    answers = (*comparison.outcomes, *comparison.lengths)
    if any(item.right_to_wrong + item.wrong_to_right or abs(item.difference) > _SAME_GRADE for item in answers):
        return False
    if comparison.is_same_content:
        ratios = [item.perplexity_ratio for item in comparison.texts]
        return not _uncompared(comparison) and all(abs(ratio - 1) <= _SAME_GRADE for ratio in ratios)
    return divergence is not None and divergence.kl.maximum < SAME_NATS


def _other_ends(comparison: Comparison) -> str:
    """How the candidate's files differ in where answers end; empty where they do not, or where it stops at
    more tokens and answers show what that costs, or the reference's files know them for ends."""
    stops = comparison.stops
    if stops is None or stops.differ:
        return "" if stops is None else stops.sentence()
    is_known = comparison.is_generated or {*stops.more} <= {*stops.unused}
    return "" if is_known else f"{stops.more_sentence}, and no task has it write answers"


def _non_finite(comparison: Comparison) -> list[str]:
    """Names of the numbers that are NaN or infinite and must be neither."""
    distances = [f"KL of {item.task}" for item in comparison.divergences if not math.isfinite(item.kl.mean)]
    texts = [item.name for item in changes_of(comparison) if not (item.outcome or math.isfinite(item.estimate))]
    ends = [(item, (item.difference, item.low, item.high)) for item in comparison.outcomes]
    scores = [f"{item.metric} of {item.task}" for item, values in ends if not all(map(math.isfinite, values))]
    outputs = [f"output of {counted(comparison.non_finite, 'request')}"] if comparison.non_finite else []
    return outputs + distances + texts + scores


def _figures(comparison: Comparison, changes: Sequence[Change], divergence: Divergence | None) -> Iterator[Figure]:
    known = deciding_changes(changes)
    shown = [item for item in changes if (item.is_shown and item in known) or item.is_certain]
    yield from (item.figure for item in shown if item.outcome is not None and item.metric != CUT_OFF)
    overall = comparison.overall_outcome()
    if overall is not None and overall.is_binary:
        name = "flips lost / won" if overall.task == ALL else f"{overall.task} flips lost / won"
        yield Figure(name, f"{overall.right_to_wrong} / {overall.wrong_to_right}")
    if divergence is not None:
        words, ends = distance_words(divergence), divergence.kl_interval
        interval = " to ".join(map(numbers.nats, ends)) if all(map(math.isfinite, ends)) else ""
        note = ", ".join(filter(None, (interval, f"distance {words}" if words.startswith("as") else words)))
        yield Figure("mean KL", f"{numbers.nats(divergence.kl.mean)} nats", note)
        yield Figure("same top token", numbers.percent(divergence.top1_agreement, divergence.top1_agreement_stderr))
    yield from (item.figure for item in changes if item.outcome is None)


def band_of(item: Divergence, sign: int = 0) -> Band:
    """The band of the mean KL, which is finite; by `sign` -1 or 1 of the lower or upper end of its 95 % interval."""
    low, high = item.kl_interval
    kl = low if sign < 0 else high if sign else item.kl.mean
    return next(band for band in BANDS if kl <= band.most_kl)


def distance_words(item: Divergence) -> str:
    """The band, for people; nothing where the distributions are equal but for rounding or not finite."""
    if not math.isfinite(item.kl.mean) or item.kl.maximum < SAME_NATS:
        return ""
    band = band_of(item)
    is_other = band is BANDS[-1] and item.top1_agreement < _OTHER_AGREEMENT
    return "this looks like another model" if is_other else band.words


def num_documents(comparison: Comparison) -> int:
    """The documents of all tasks; those judged by words and by sentences count once."""
    beside = {item.task for item in comparison.outcomes if item.metric == SENTENCES}
    return sum(number for task, number in comparison.documents().items() if task not in beside)
