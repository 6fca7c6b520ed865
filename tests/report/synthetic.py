"""Reports like the stored one of a quantized model, with as many flips as are wanted, whose texts include what breaks
pages: markup, quotes, control characters, text that runs to the left.
"""

from __future__ import annotations

from dataclasses import replace

from olive_ext.report import Report
from olive_ext.report.comparison import ALL, Comparison, Flip
from olive_ext.report.page import Column, ComparedModels, Page
from tests.report.golden import stored

HOSTILE = (
    "</script><script>document.title = 'broken'</script>",
    "<!-- <script> <b>bold?</b> &amp; &lt; \" ' ` ${x} {{ y }}",
    "null \x00 bell \x07 escape \x1b[31m delete \x7f line\u2028separator",
    "\u05e9\u05dc\u05d5\u05dd \u05e2\u05d5\u05dc\u05dd \u202e turned \u202c \u0645\u0631\u062d\u0628\u0627",
    "half a surrogate \ud83d, emoji \U0001f680, combining e\u0301, wide \u4e2d\u6587",
    "a_very_long_word_" * 40,
)
_QUESTIONS = (
    "Which statement best explains why photosynthesis is the foundation of most food webs?",
    "A baker fills 12 trays with 24 rolls each and sells 173 rolls before noon. How many rolls are left?",
    "The person is seen kneeling on the floor with a bucket beside her. She",
    "Which of the following structures passes through the foramen magnum?",
)
_ANSWERS = (
    "Sunlight is the source of energy for nearly all ecosystems.",
    "The producers in all ecosystems are plants.",
    "12 x 24 = 288 rolls are baked. 288 - 173 = 115 rolls are left.\n#### 115",
    "12 x 24 = 288 rolls are baked. 288 - 173 = 125 rolls are left.\n#### 125",
    "wrings the cloth out and wipes the tiles in small circles.",
    "puts the bucket on her head and dances around the kitchen.",
)


def comparison(num_flips: int = 40) -> Comparison:
    """That of the stored report."""
    found = stored("int4").comparison
    judged = [(item.task, item.metric, item.filter) for item in found.outcomes if item.task != ALL]
    return replace(found, flips=tuple(_flip(number, *judged[number % len(judged)]) for number in range(num_flips)))


def report(path: str = "models/int4", found: Comparison | None = None) -> Report:
    """The stored report, of a model at `path`, with the comparison `found`."""
    made = stored("int4")
    return replace(made, model={**made.model, "path": path}, comparison=found)


def pair_of(*names: str) -> Page:
    """The page of several candidates against one float model."""
    reports = [report(f"models/{name}", comparison()) for name in names]
    columns = [
        Column("float", report().metrics, report()),
        *map(Column, names, (item.metrics for item in reports), reports),
    ]
    compared = [ComparedModels(name, "float", item.comparison) for name, item in zip(names, reports, strict=True)]
    return Page("several against one", tuple(columns), tuple(compared))


def _flip(number: int, task: str, metric: str, filter_name: str) -> Flip:
    is_lost = number % 3 > 0
    hostile = HOSTILE[number // 7 % len(HOSTILE)] if number % 7 == 0 else ""
    pair = number % 3
    answers = (_ANSWERS[2 * pair], _ANSWERS[2 * pair + 1])
    long = "\n\n".join(_QUESTIONS) * 3 if number % 11 == 0 else ""
    return Flip(
        task=task,
        doc_id=number,
        direction="right_to_wrong" if is_lost else "wrong_to_right",
        question=f"{_QUESTIONS[number % 4]} {hostile}{long}".strip(),
        target=answers[0],
        reference_answer=answers[0 if is_lost else 1] + hostile,
        candidate_answer=answers[1 if is_lost else 0] + hostile,
        metric=metric,
        filter=filter_name,
    )
