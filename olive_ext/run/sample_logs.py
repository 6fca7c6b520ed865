"""Sample logs: a file of lm-eval's JSON lines for each task, written with our own fields, and read back as texts.

Knows no task's code. A file is replaced as a whole or not at all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from olive_ext.errors import ConfigError, NotComparableError, one_line
from olive_ext.report import write_texts
from olive_ext.run.reference.answers import Answers, Sample, is_value, lead_of, question_of, shares_of_ends, target_of

OWN = "olive_ext"
"""The key of a logged sample under which our own fields stand; everything else is lm-eval's."""

Fields: TypeAlias = Callable[[str, Sample], Mapping[str, Any]]
"""Our own fields of a line, from the task's name and the sample."""


def sample_fields(
    tasks: Mapping[str, Any],
    candidate: Sequence[Answers],
    reference: Sequence[Answers] = (),
    by_document: Callable[[str], Mapping[int, tuple[float, int]]] | None = None,
) -> Fields:
    """`question` without examples, `target`, and the `candidate`'s `answer`; the `reasoning` in front of each response
    of `resps`; of generated answers the share that was `cut_off` by their limit; with a reference its
    `reference_answer` and `reference_values` by metric; where distributions were compared `kl_mean` in nats over the
    document's `positions`, which `by_document` gives of a task; of choices both models' `margins`, the score of the
    reference's answer less the best other one's.

    `tasks` are lm-eval's objects by name.
    """
    answers, mine = ({(item.task, item.filter): item.by_document for item in own} for own in (reference, candidate))
    distances = {task: by_document(task) for task in tasks} if by_document is not None else {}

    def fields(task: str, sample: Sample) -> dict[str, Any]:
        number = int(sample["doc_id"])
        added: dict[str, Any] = {"question": question_of(tasks[task], sample), "target": target_of(tasks[task], sample)}
        if (own := mine.get((task, str(sample["filter"])), {}).get(number)) is not None:
            added["answer"] = own.text
        thoughts = [[getattr(item, "reasoning", None) for item in items] for items in sample["resps"]]
        if any(text is not None for items in thoughts for text in items):
            added["reasoning"] = thoughts
        added |= shares_of_ends(sample)
        answer = answers.get((task, str(sample["filter"])), {}).get(number)
        if answer is not None:
            added |= {"reference_answer": answer.text, "reference_values": dict(answer.values)}
        if (distance := distances.get(task, {}).get(number)) is not None:
            added |= {"kl_mean": distance[0], "positions": distance[1]}
        if answer is not None and own is not None and 1 < len(answer.scores) == len(own.scores):
            best = answer.scores.index(max(answer.scores))
            added["margins"] = {"reference": lead_of(answer.scores, best), "candidate": lead_of(own.scores, best)}
        return added

    return fields


def write_samples(
    samples: Mapping[str, Sequence[Sample]], num_documents: int, folder: Path, fields: Fields | None = None
) -> list[Path]:
    """Writes `samples_<task>.jsonl` with the first `num_documents` documents of each task; returns the paths.

    A document has a line for each of the task's filters, in lm-eval's own sample format; where `fields` has something
    to add, it stands under the key `OWN`. Raises `RunError` where the disk refuses.
    """
    from olive_ext.backends.lm_eval_run import sample_line

    texts = {}
    for task, lines in samples.items():
        documents = set(sorted({line["doc_id"] for line in lines})[:num_documents])
        chosen = [line for line in lines if line["doc_id"] in documents]
        our_fields = [fields(task, line) if fields is not None else {} for line in chosen]
        added = [{**line, OWN: more} if more else line for line, more in zip(chosen, our_fields, strict=True)]
        texts[log_path(folder, task)] = "".join(map(sample_line, added))
    write_texts(texts, folder, "the sample logs")
    return list(texts)


def log_path(folder: Path, task: str) -> Path:
    """The path of a task's log."""
    name = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in task)
    return folder / f"samples_{name}.jsonl"


def read_logs(folder: Path, answers: Sequence[Answers]) -> tuple[list[Answers], dict[str, list[Sample]]]:
    """A report's `answers` with the texts of those logged in its `folder`, and the logged samples by task, as far as
    flips need them. Raises `ConfigError` for a broken file, and for one with other values than the report's."""
    samples: dict[str, list[Sample]] = {}
    for task in dict.fromkeys(item.task for item in answers):
        if (file := log_path(folder, task)).is_file():
            lines = file.read_text(encoding="utf-8").split("\n")  # JSON holds other separators as they are
            samples[task] = [_line(file, number, text) for number, text in enumerate(filter(None, lines), 1)]
    logged = [_with_texts(item, samples.get(item.task, ()), log_path(folder, item.task)) for item in answers]
    return logged, samples


def _with_texts(answers: Answers, lines: Sequence[Sample], file: Path) -> Answers:
    known, texts = answers.by_document, {}
    for line in (line for line in lines if line["filter"] == answers.filter):
        number = line["doc_id"]
        values = {} if number not in known else known[number].values
        if number not in known or any(is_value(line.get(name)) and line[name] != values.get(name) for name in values):
            raise NotComparableError(f"'{file}' is of another run than the report beside it (document {number})")
        texts[number] = replace(known[number], text=line[OWN].get("answer", ""))
    return replace(answers, by_document={**known, **texts})


def _line(file: Path, number: int, text: str) -> Sample:
    try:
        line = json.loads(text)
        ours = line.get(OWN, {})
        read = {**line, OWN: ours, "doc_id": int(line["doc_id"]), "filter": line["filter"]}
        return {**read, "arguments": ((ours.get("question", ""),),), "target": ours.get("target", line["target"])}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"'{file}', line {number}: not lm-eval's sample ({one_line(error)})", code="damaged"
        ) from error
