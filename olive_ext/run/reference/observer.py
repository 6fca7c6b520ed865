"""Listens to models while lm-eval asks them, and scores what a reference generated. Knows no lm-eval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from olive_ext.run.reference.positions_by_task import Observed, score_under_reference
from olive_ext.stats.token_classes import TokenClasses
from olive_ext.text.requests import GenerationOutput, GenerationRequest, RollingRequest, ScoringRequest, Text

if TYPE_CHECKING:
    from olive_ext.backends.replay import Heard


@dataclass(frozen=True)
class Generated:
    """An answer of the reference as a target behind its prompt, and the document it was given to."""

    task_name: str
    doc_id: int
    target: ScoringRequest


class Listener:
    """`observer` of a model: told of every request of lm-eval, what the session was asked for it, and the answer.

    Of a compared model `observed` has the positions of both models, and `heard`, where it is given, gets what the
    reference answers by itself; of a reference alone `generated` has its answers.
    """

    def __init__(self, heard: Heard | None = None) -> None:
        self.observed = Observed()
        self.heard = heard
        self._generated: dict[tuple[Any, ...], Generated] = {}

    @property
    def generated(self) -> list[Generated]:
        """Each different answer to a document once; empty ones have nothing to compare."""
        return list(self._generated.values())

    def learn_tokens(self, lm: Any) -> None:
        """From now on targets are told apart by what kind of token they are."""
        tokenizer = lm.session.tokenizer
        self.observed.classes = TokenClasses(tokenizer.token_text, tokenizer.special_ids)

    def __call__(self, asked: Any, request: Any, output: Any) -> None:
        if isinstance(output, GenerationOutput):
            self._take_answer(asked, request, output)
        elif isinstance(request, RollingRequest):
            self._take_text(asked, request, output)
        elif output.compared is not None:
            compared = self.observed.take(asked, request.context, request.target, output)
            if self.heard is not None:
                self.heard.scored[asked.args[0], asked.args[1]] = score_under_reference(compared)

    def _take_text(self, asked: Any, request: RollingRequest, output: Any) -> None:
        if output.compared is not None:
            prefix = () if request.prefix is None else (request.prefix,)
            compared = self.observed.take(asked, prefix, request.text, output)
            if self.heard is not None:
                self.heard.rolled[asked.args[0]] = score_under_reference(compared)[0]

    def _take_answer(self, asked: Any, request: GenerationRequest, output: GenerationOutput) -> None:
        if output.tokens:
            key = (str(asked.task_name), int(asked.doc_id), request.prompt, output.tokens)
            target = ScoringRequest(cast(Text, request.prompt), output.tokens, source=request.source)
            self._generated[key] = Generated(key[0], key[1], target)


def score_answers(lm: Any, generated: Sequence[Generated], observed: Observed | None = None) -> None:
    """Lets the model score generated answers as targets; `observed` takes what both models say of them."""

    def keep(place: int, output: Any) -> None:
        if observed is not None:
            item = generated[place]
            observed.take(item, item.target.context, item.target.target, output)

    if generated:
        lm.session.loglikelihood([item.target for item in generated], on_result=keep)
