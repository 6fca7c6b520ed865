"""What we add to lm-eval's lines in the sample logs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from olive_ext.run.reference.positions_by_task import Observed
from olive_ext.run.samples import Fields

if TYPE_CHECKING:
    from olive_ext.backends.answers import Answers


def sample_fields(
    tasks: Mapping[str, Any], reference: Sequence[Answers] = (), observed: Observed | None = None
) -> Fields:
    """`question` without examples; beside a reference its `reference_answer` and `reference_values` by metric; where
    distributions were compared `kl_mean` in nats over the document's `positions`.

    `tasks` are lm-eval's objects by name.
    """
    from olive_ext.backends.answers import question_of

    answers = {(item.task, item.filter): item.by_document for item in reference}
    distances = {task: observed.by_document(task) for task in tasks} if observed is not None else {}

    def fields(task: str, sample: Mapping[str, Any]) -> dict[str, Any]:
        number = int(sample["doc_id"])
        added: dict[str, Any] = {"question": question_of(tasks[task], sample)}
        answer = answers.get((task, str(sample["filter"])), {}).get(number)
        if answer is not None:
            added |= {"reference_answer": answer.text, "reference_values": dict(answer.values)}
        if (distance := distances.get(task, {}).get(number)) is not None:
            added |= {"kl_mean": distance[0], "positions": distance[1]}
        return added

    return fields
