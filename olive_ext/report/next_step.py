"""The next step after a verdict that decides nothing or finds a loss, in one sentence."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from olive_ext.errors import counted
from olive_ext.report.comparison import ALL, CONSTANTS, OF_GRAPHS, PACKAGE_TOKENIZER, TOKENIZER, Comparison
from olive_ext.report.numbers import joined

if TYPE_CHECKING:
    from olive_ext.report.verdict import Reason

LARGE_TASKS = {"pt": {"mmlu": 14_042, "hellaswag": 10_042}, "%": {"wikitext": 62}}
"""Well-known tasks with answers and their numbers of documents, the largest first; and tasks of whole texts."""

MOST_ACCEPTED = 10
"""No advice proposes to accept a loss of more points, or per cent."""

_AGAIN = "run it again: what has an answer is not asked twice"
_MEND = "`olive-ext mend {arguments} --within kl_mean={nats} --output DIR`"
_STEPS: Mapping[str, str] = {
    "cannot_tell": "`olive-ext check {model} --verify` runs texts and names the first layer without finite numbers",
    "damaged": f"make the model again, or have {_MEND} replace what is damaged",
    "distance_open": 'evaluate all documents (`documents: "all"`)',
    "no_values": "add a task with a value for each document",
    "no_direction": "write `higher_is_better: true` or `false` beside the metric in the task's `metric_list`",
    "none_right": "read the reference's answers (`sample_log_num: 5`): a filter may find none; or ask easier tasks",
    "nothing_compared": "add a task with a value for each document (`mmlu`)",
    "claim_open": _AGAIN,
    "unread": "read the answers (`sample_log_num: 5`), or have the task's `process_results` give each a value",
    **dict.fromkeys(
        ("loss", "claim_broken", "distant"),
        f"`olive-ext locate {{arguments}}` names the weights that lose it, {_MEND} keeps them finer",
    ),
    "far": "`olive-ext check {model} --against {checkpoint}`, then `olive-ext locate {arguments}` for the weights that "
    "lose",
    "cut_off": "read those answers among the flips: `gen_kwargs` may give them a larger limit (`max_gen_toks`)",
    "stops": "read those answers (`sample_log_num: 5`), and hold the graph against its source "
    "(`olive-ext check {model} --against {checkpoint}`)",
    "place_different": "`reference.repro` (`--repro DIR`) writes the first node that differs as a graph of its own",
}

_REPAIRS: Mapping[str, str] = {
    "genai_config.json": "write what the judged graph, or the reference's file, has into {keys} of genai_config.json",
    "tokenizer_config.json": "make `chat_template` of tokenizer_config.json the text of chat_template.jinja",
    "preprocessor_config.json": "copy the reference's into the package",
    "audio_processor_config.json": "write the numbers of preprocessor_config.json into audio_processor_config.json",
    "processor_config.json": "write the same numbers into processor_config.json and preprocessor_config.json",
    "tokenizer.json": "write these special tokens into `added_tokens` of tokenizer.json",
    PACKAGE_TOKENIZER: "copy the files of the tokenizer that was given into the package, or judge the package's own "
    "(leave `tokenizer` out)",
    TOKENIZER: "copy the reference's tokenizer into the package",
    "model_args.add_bos_token": "copy the reference's tokenizer into the package, or leave `add_bos_token` out",
    **dict.fromkeys(OF_GRAPHS, "export the model again: its graph is wrong, and `olive-ext mend` replaces weights"),
    CONSTANTS: "repair the file that cannot be read, then evaluate again",
}
"""How to repair damage that is in no constant of the graph, by file."""


def next_step(
    reasons: Sequence[Reason], comparison: Comparison, most_kl: float = math.inf, *, is_gated: bool = False
) -> str:
    """The next step with whole commands, without its full stop; empty without any. `most_kl`: what a bound allows.
    `is_gated`: whether a gate asks, which has `--within` for `matters` and nothing that decides over all tasks."""
    first = reasons[0].code
    if first == "loss" and (ends := [item for item in reasons if item.code == "stops" and not item.metric]):
        first, reasons = "stops", ends
    if first == "bound_broken":
        return _of_broken(reasons, comparison)
    is_open = first in ("cannot_tell", "too_few", "nothing_compared", "place_unknown")
    if is_open and comparison.missing and not comparison.non_finite:
        return _AGAIN if comparison.missing > sum(comparison.unread.values()) else _STEPS["unread"]
    damaged, what = next(iter(comparison.damaged.items()), ("", ""))
    if first == "damaged" and (repair := _REPAIRS.get(damaged)):
        keys = [f"`{key}`" for key in re.findall(r"\bsays ([\w.]+)", what)]
        return repair.format(keys=joined(keys or ["`model.decoder.filename`"]))
    if first in ("asked", "damaged") and comparison.asked is not None:
        files = f" ({joined(comparison.asked.files)})" if comparison.asked.files else ""
        return f"give both models the same {joined(comparison.asked.what)}{files}, then evaluate again"
    if first == "stops" and not reasons[0].metric and (stops := comparison.stops) is not None:
        same = f"write the reference's ends and search ({stops.reference_file}) into the candidate's "
        same += stops.candidate_file if stops.candidate_file.endswith(".json") else "generation_config.json"
        return same if stops.differ else "add a task that has it write answers (`gsm8k`)"
    if first == "shorter" and comparison.contexts is not None:
        return f"give the candidate's files the reference's context length, {comparison.contexts[1]:,} tokens"
    if first == "place_different" and comparison.place is not None and (where := comparison.place.first) is not None:
        if where.repro:
            return f"`python {where.repro}/repro.py` shows the difference in plain ONNX Runtime"
        return _STEPS[first] if where.node else "hold it against each setting of the other place alone"
    if first == "place_unknown":
        return "evaluate other texts, or more of them"
    if first == "too_few":
        return _of_too_few(reasons, comparison, is_gated=is_gated)
    step = _step_after(first, comparison, most_kl)
    is_open = first == "no_values" and not is_gated
    return f"{step}, or decide by a metric that has them (`fail_on_loss: 1`)" if is_open else step


def _step_after(code: str, comparison: Comparison, most_kl: float = math.inf) -> str:
    """The step of `_STEPS` with this run's models and tasks, and for `mend` half of its distance or what is allowed."""
    overall = comparison.overall_divergence()
    kl = overall.kl.mean if overall is not None else math.nan
    nats = f"{min(float(f'{kl / 2:.1g}'), most_kl):g}" if math.isfinite(kl) and kl > 0 else "NATS"
    arguments, reference = comparison.arguments, comparison.reference
    checkpoint = shlex.quote(str(reference["path"])) if reference.get("kind") == "hf" else "CHECKPOINT"
    named = {"arguments": arguments, "model": arguments.partition(" --")[0], "nats": nats, "checkpoint": checkpoint}
    return _STEPS.get(code, "").format(**named)


def _of_broken(reasons: Sequence[Reason], comparison: Comparison) -> str:
    """More documents, where the fall may be chance, or what the worst other finding needs; else a finer model, which
    keeps the bound."""
    others = [item for item in reasons if item.code != "bound_broken"]
    broken = reasons[: len(reasons) - len(others)]
    bounds = [(item.bound, item.size or 0.0) for item in broken if item.metric == "kl_mean" and item.bound is not None]
    most = [bound for bound, kl in bounds if kl > bound]
    most_kl = min(most, default=math.inf)
    is_small = others[0].code in ("too_few", "distant") and not comparison.missing
    few = next((item for item in others if item.code == "too_few" and is_small), None)
    documents = "" if most or few is None else _documents(few, comparison, "")  # the fall may be chance
    other_step = "" if few is others[0] else next_step(others, comparison, most_kl)
    step = ", or ".join(filter(None, (documents, other_step)))
    keys = sorted({f"`{item.field}`" for item in broken})
    return f"{step or _step_after('loss', comparison, most_kl)}, or allow more ({', '.join(keys)})"


def _of_too_few(reasons: Sequence[Reason], comparison: Comparison, *, is_gated: bool) -> str:
    """More documents where there are some; else other tasks, a larger loss that matters, or other measures."""
    open_ones, matters = [item for item in reasons if item.code == "too_few"], comparison.matters
    together = (
        "" if comparison.over_all or is_gated else f"decide over all tasks together (`fail_on_loss: {matters:g}`)"
    )
    if any(item.code == "pooled" for item in reasons) and all(item.unit == "pt" for item in open_ones):
        ways = [together]
    elif comparison.certainty is not None:
        ways = [_STEPS["distance_open"]]
    else:
        ways = [_documents(open_ones[0], comparison, together), _measures(comparison)]
    key, deciding = "matters", open_ones
    if comparison.over_all:  # which decides where all is in points
        is_whole = open_ones[0].task == ALL or len({item.task for item in comparison.outcomes}) == 1
        is_alone = is_whole and all(item.unit == "pt" for item in open_ones)
        key, deciding = "fail_on_loss", open_ones[:1] if is_alone else open_ones
    largest = max(math.inf if item.size is None else item.size for item in deciding)
    least = "" if largest > MOST_ACCEPTED else f"{math.ceil(10 * largest) / 10:g}"
    unit = " or ".join(dict.fromkeys(item.unit for item in deciding))
    how = f"--within {least}" if is_gated else f"{key}: {least}"
    accepted = f"accept a loss of {least} {unit} (`{how}`)" if least else ""
    steps = filter(None, [*ways[:1], accepted, *ways[1:]])
    return ", or ".join(steps) or "evaluate other tasks, of more documents"


def _documents(item: Reason, comparison: Comparison, together: str) -> str:
    """Where the documents that would decide a reason are."""
    counts, samples = comparison.documents(), comparison.metrics.get("n-samples", {})
    names = [name for name in counts if item.task in (ALL, name)]
    asked = sum(counts[name] for name in names)
    there = sum(samples.get(name, {}).get("original", counts[name]) for name in names)
    those = "these tasks have" if len(names) != 1 else f"{names[0]} has"
    needed = item.documents or 0
    if asked < needed <= there:
        return f"evaluate {needed:,} of the {there:,} documents that {those} (`limit`)"
    if asked < there >= needed:
        return f"evaluate all {there:,} documents that {those} (leave `limit` out)"
    overall = comparison.overall_outcome()
    adds = item.unit == "pt" and overall is not None and overall.is_binary
    missing, known = needed - there if adds else needed, LARGE_TASKS.get(item.unit, {})
    other = next(
        (f"`{name}` has {size:,}" for name, size in known.items() if name not in counts and size >= missing), ""
    )
    if not other or not names:
        return ""
    added = " and ".join(filter(None, [f"add tasks ({other})", together]))
    how = added if adds else f"ask another task in its place ({other})"
    too_few = f", and {needed:,} are needed" if needed > there else ""
    return f"{counted(there, 'document is', 'documents are')} all that {those}{too_few}: {how}"


def _measures(comparison: Comparison) -> str:
    """A claim about the distance, if it is near; not if there are bounds, beside which it would be one of several."""
    from olive_ext.report.verdict import band_of

    overall = comparison.overall_divergence()
    if overall is None or comparison.over_all or comparison.kept_bounds or not math.isfinite(overall.kl.mean):
        return ""
    band = band_of(overall, 1)
    alone = " without `limit`" if " --limit " in comparison.arguments else ""
    claim = f'(`documents: "enough"`{alone} and `require: ["kl_mean<={band.most_kl:g}"]`)'
    return "" if band.code else f"judge by the mean KL {claim}"
