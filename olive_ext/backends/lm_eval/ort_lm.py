"""`OrtLM`: lm-eval's language model interface over the public session. Turns texts into token ids by HFLM's rules, and
passes every answer to lm-eval's cache as soon as it is complete. Follows lm-eval's hf-multimodal in the meaning of
"<image>" and of its arguments. Knows no engine and no provider."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import replace_placeholders, resize_image
from typing_extensions import Self

from olive_ext.backends.evaluated_task import GeneratedText, as_list
from olive_ext.backends.lm_eval.arguments import GenerationSettings, OrtLMArguments
from olive_ext.backends.lm_eval.instances import (
    KnownAnswers,
    LostRequests,
    Observer,
    PendingRequest,
    encoded_slices,
    known_answers_first,
    run_requests,
)
from olive_ext.backends.progress import is_shown, progress_bar, shown
from olive_ext.backends.workload import Workload, forecast, workload_of
from olive_ext.errors import MediaError, OliveExtError, SessionError, TaskError, UnfitTaskError, counted
from olive_ext.media.pictures import read_picture
from olive_ext.model import ResolvedModel
from olive_ext.model.types import Modality
from olive_ext.package_versions import versions
from olive_ext.session import Session
from olive_ext.session.opening import open_model
from olive_ext.session.placeholders import decoder_tokens
from olive_ext.session.requests import GenerationOutput, RollingRequest, ScoringRequest
from olive_ext.session.tokenizer import Tokenizer

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

Score = tuple[float, bool]
"""A log-probability in nats, and whether the continuation is the most probable one."""

PLACEHOLDERS = {Modality.IMAGE: "<image>", Modality.AUDIO: "<audio>"}
"""The markers of a picture and a sound in a task's text."""

_ARGUMENTS = {"visual": Modality.IMAGE, "audio": Modality.AUDIO}
"""Names under which a request of lm-eval gives them."""


@register_model("olive_ext", "olive-ext")
class OrtLM(TemplateLM, AbstractContextManager["OrtLM"]):  # type: ignore[misc]
    """A model for `lm_eval.simple_evaluate(model=lm, ...)`, or by the name "olive_ext" once this module is imported.

    `pretrained` is a model's path, or the model resolved. An open `session` may be given instead; it stays the caller's
    to close. The other arguments are those of `OrtLMArguments`; an unknown one is a `ConfigError`.

    `observer` is called once for every request of lm-eval that is not certain by itself, in any order.
    """

    def __init__(
        self,
        pretrained: str | ResolvedModel | None = None,
        *,
        session: Session | None = None,
        observer: Observer | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__()
        self.observer: Observer = observer or (lambda instance, request, output: None)
        self.known_answers: KnownAnswers | None = None
        self.note_prompt: Callable[[Sequence[Mapping[str, Any]], bool, str], None] = lambda *_: None
        """Called with each conversation that tasks ask in, whether an answer is opened after it, and its prompt."""

        self.lost = LostRequests()  # what lm-eval is given as their answers means nothing
        self._encoded: Mapping[str, Sequence[int]] = {}
        self._begins = True
        self.says_work = True
        """Whether a line before each call says what is asked."""

        self.role = ""
        """In a comparison "the reference" or "the evaluated model", for lines of progress."""

        self._arguments = given = OrtLMArguments.of(pretrained, arguments, has_session=session is not None)
        self._owns_session = session is None
        self._session: Session | None = session or open_model(*given.to_open(pretrained))
        self._encoding = self._session.encoding
        if self._encoding is not None:
            self.backend = "seq2seq"  # TemplateLM then encodes context and continuation each alone
        self.resolved = self._session.model  # None around an engine that a caller made, which counts as "onnx"
        self.kind = "onnx" if self.resolved is None else self.resolved.kind
        self.max_gen_toks = given.max_gen_toks
        self.batch_size = given.batch_size  # as given; `get_model_info()` has the number in use
        self._media = TaskMedia(given, self._session)
        self.MULTIMODAL = self._media.is_taken
        tokenizer, bos, prefix = self._session.tokenizer, given.add_bos_token, given.prefix_token_id
        made = partial(Tokenizer, tokenizer.hf, tokenizer.where, add_bos_token=bos, prefix_token_id=prefix)
        self._text, self._prompts = made(), made()
        if prefix is not None:  # as in HFLM, where scored texts begin; prompts of generations begin with BOS
            self._text.opening = self._text.decode([prefix], skip_special_tokens=False)
        self.tokenizer = tokenizer.hf

    @property
    def session(self) -> Session:
        """The open session; `SessionError` once the model is closed."""
        if self._session is None:
            raise SessionError("the model is closed: open it again")
        return self._session

    def with_session(self, session: Session, observer: Observer | None = None) -> Self:
        """An `OrtLM` over the open `session`, with the tokenizer and the request arguments of this one."""
        session.tokenizer = self.session.tokenizer
        made = type(self)(session=session, observer=observer, **self._arguments.asking())
        made.note_prompt, made._begins = self.note_prompt, False
        return made

    def close(self) -> None:
        """Releases the session, and closes it where this model opened it. May be called again."""
        session, self._session = self._session, None
        if session is not None and self._owns_session:
            session.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def thinks(self) -> bool:
        """Whether answers are separated from their reasoning."""
        return self._arguments.think_end_token is not None

    @property
    def max_length(self) -> int:
        """The most tokens the model sees at once."""
        return self.session.max_length

    @property
    def eot_token_id(self) -> int | None:
        """The tokenizer's EOS."""
        return self._text.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """Stands for an empty context: the argument, else BOS, else EOS."""
        return self._text.prefix_token_id

    @property
    def tokenizer_name(self) -> str:
        """Names the tokenizer in lm-eval's cache of built requests, as HFLM does."""
        return self._text.where.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: object) -> Sequence[int]:
        """Token ids by HFLM's BOS rule: see `Tokenizer.encode`."""
        known = self._encoded.get(string) if add_special_tokens is None else None
        return self._text.encode(string, add_special_tokens) if known is None else known

    def tok_decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `tokens`."""
        return self._text.decode(tokens, skip_special_tokens)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The conversation as a prompt; without `add_generation_prompt` its last message is left open."""
        if self._arguments.enable_thinking and not add_generation_prompt:
            begun = f"'gen_prefix' = {str(chat_history[-1].get('content'))[:80]!r} of a task"
            raise TaskError(f"{begun} begins the answer before any thought", "enable_thinking", code="contradiction")
        options = self._arguments.template_variables()
        messages = [self._media.message(one) for one in chat_history]
        text = self._text.render_chat(messages, add_generation_prompt, **options)
        self.note_prompt(messages, add_generation_prompt, text)
        self._media.note_markers(text, chat_history)
        return text

    @known_answers_first
    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[Score]:
        """(log-probability in nats, is greedy) of each continuation; an empty one is certain: (0.0, True)."""
        if self._arguments.enable_thinking:
            names = sorted({str(request.task_name) for request in requests})
            problem = f"needs tasks that generate; these do not: {names}"
            raise TaskError(problem, "enable_thinking", code="contradiction")
        answers: list[Score] = [(0.0, True)] * len(requests)
        items = list(enumerate(requests))
        slices = partial(encoded_slices, items, lambda item: "".join(item[1].args[:2]), self.scoring_requests)
        for one, output in self._outputs("Scoring", requests, "loglikelihood", slices, disable_tqdm):
            ((place, request),) = one.owners.items()
            answers[place] = output.logprob, output.is_greedy
            self.cache_hook.add_partial("loglikelihood", request.args, answers[place])
        return answers

    def scoring_requests(self, requests: Iterable[tuple[int, Instance]]) -> list[PendingRequest]:
        """The session's requests for the prompts at these places, by TemplateLM's rule. TemplateLM encodes them one by
        one, this method all at once. Nothing is asked for a continuation without tokens."""
        prompts = [(at, one, self._media.prompt(one.args)) for at, one in requests if one.args[1]]
        if self._encoding is None:
            contexts = [prompt.rstrip() for *_, prompt in prompts]  # read once, whatever the number of its answers
            self._encoded = self._text.encode_many([*contexts, *(prompt + one.args[1] for _, one, prompt in prompts)])
        try:
            made = [(self._scoring_request(one.args, prompt), {at: one}) for at, one, prompt in prompts]
        finally:
            self._encoded = {}
        return [PendingRequest(request, owners) for request, owners in made if request is not None]

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """HFLM's cut; where that leaves one side without tokens, a cut before the token that spans the join."""
        if context:
            pair: tuple[list[int], list[int]] = super()._encode_pair(context, continuation)
            if all(pair):
                return pair
        return self._text.encode_pair(context, continuation)

    def _loglikelihood_tokens(self, requests: Sequence[tuple[Any, ...]], **_: object) -> list[Score]:
        """lm-eval's own `loglikelihood`, which is replaced here, passes tokens to it."""
        raise NotImplementedError

    def _scoring_request(self, args: Sequence[Any], prompt: str) -> ScoringRequest | None:
        """The request for one pair. As in HFLM, an encoder-decoder encodes the context and decodes the target alone."""
        media = self._media.fields(args)
        if self._media.is_speech:
            target = self._text.encode_target(args[1])
            return ScoringRequest(self._prompt(prompt), target, **media) if target else None
        context, target = self._encode_pair(prompt, args[1])
        if self._encoding is not None:
            return ScoringRequest("", target, source=context)
        return ScoringRequest(context, target, **media)

    @known_answers_first
    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-probability in nats of each whole text, of which every token is scored once."""
        prefix, text, is_hflm = self.prefix_token_id, self._text, self._arguments.hflm_rolling_bos
        encode = text.encode if is_hflm else partial(text.encode_rolling, prefix=prefix)
        texts = [RollingRequest(encode(request.args[0]), prefix) for request in requests]
        asked = [PendingRequest(text, {place: requests[place]}) for place, text in enumerate(texts)]
        answers = [0.0] * len(requests)
        call = "loglikelihood_rolling"
        for one, output in self._outputs("Scoring texts", requests, call, lambda: [asked], disable_tqdm):
            ((place, request),) = one.owners.items()
            answers[place] = output.logprob
            self.cache_hook.add_partial(call, request.args, output.logprob)
        return answers

    @known_answers_first
    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The continuation of each context. Greedy requests with equal arguments are generated once."""
        answers = [""] * len(requests)
        wanted = self.pending_generations(requests)
        for one, output in self._outputs("Generating", requests, "generate", lambda: [wanted], disable_tqdm):
            assert one.settings is not None
            text = one.settings.answer(output, self.tok_decode)
            for place in one.owners:
                answers[place] = GeneratedText.of(text, output)
            if not one.settings.is_sampled:
                self.cache_hook.add_partial("generate_until", one.first.args, text)
        return answers

    def pending_generations(self, requests: list[Instance]) -> list[PendingRequest]:
        """The generations, each with the requests that it answers: greedy requests with equal arguments share one."""
        eot = self.eot_token_id  # as a text it stops where the model's own files have it stop
        eos = self.tok_decode([eot], skip_special_tokens=False) if eot in self.session.stop_ids else None
        wanted: dict[tuple[str, int], PendingRequest] = {}
        repeats: Counter[str] = Counter()
        for index, request in enumerate(requests):
            context, gen_kwargs = request.args[:2]
            settings = GenerationSettings.read(gen_kwargs, self.max_gen_toks, eos, self._arguments.seed)
            media = self._media.fields(request.args)
            pictures = [id(item) for items in media.values() for item in items]
            key = json.dumps([context, gen_kwargs, pictures], default=str)
            repeat = repeats[key] if settings.is_sampled else 0
            repeats[key] += 1
            if (key, repeat) not in wanted:
                prompt = self._prompt(self._media.prompt(request.args))
                fields = {**self._arguments.written({"think_end_token", "thinking_budget"}), **media}
                if self._encoding is not None and not self._media.is_speech:
                    fields |= {"prompt": "", "source": prompt}
                asked = settings.request(prompt, self.max_length, repeat, fields, str(request.task_name))
                wanted[key, repeat] = PendingRequest(asked, {}, settings)
            wanted[key, repeat].owners[index] = request
        return list(wanted.values())

    def _prompt(self, context: str) -> Sequence[int]:
        """The tokens of a context; for a model of speech, those with which its decoder begins."""
        if self._encoding is not None and self._media.is_speech:
            return decoder_tokens(self._text, context, self._encoding)
        return self._prompts.encode(context) or [self.prefix_token_id]

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval puts into its results' `config`: the model's digest, versions, and how the session runs it."""
        return {
            "pretrained": self._arguments.pretrained,
            "model_sha": self.content_hash,
            "versions": versions(),
            "execution": self.session.describe_execution(),
        }

    @property
    def content_hash(self) -> str | None:
        """Digest of the model's files; None where only a session was given, or a name on the hub."""
        return self.resolved.digest if self.resolved is not None and self._owns_session else None

    def _outputs(
        self,
        doing: str,
        requests: Sequence[Instance],
        call: str,
        slices: Callable[[], Iterable[Sequence[PendingRequest]]],
        is_disabled: bool,
    ) -> Iterator[tuple[PendingRequest, Any]]:
        """What is asked for `requests` in the session's `call`, with the output, as each completes. Each is observed,
        and counts as done when the next is read."""
        executor = self.session.executor
        fed, at_work = lambda: int(self.session.counters.tokens_fed), lambda: executor.at_work
        is_seen = not is_disabled and is_shown(shown.get())
        left = [*range(len(requests))]
        if is_seen and (is_kept := self.session.kept(call)) is not None:
            with suppress(OliveExtError):  # which the call itself raises, with its document
                left = [at for each in slices() for one in each if not is_kept(one.request) for at in one.owners]
        work = workload_of([requests[at] for at in left], self.tok_encode) if is_seen else Workload()
        tokens, doing = dict(zip(left, work.tokens, strict=False)), " by ".join(filter(None, (doing, self.role)))
        expected, about = sum(work.tokens), ""
        if is_seen and shown.get() and self.says_work:  # not beside the bars of who drives the model themselves
            time = "" if self.resolved is None else f": {forecast(self.resolved, work, begins=self._begins)}"
            todo = f"{work}{time}" if left else "nothing is left to compute"
            answered = len({(str(one.task_name), one.doc_id) for one in requests} - work.documents)
            about, self._begins = f"{todo}{self._kept(answered) if self._begins else ''}", False
        bar = progress_bar(doing, len(requests), fed, is_disabled, expected=expected, about=about, at_work=at_work)
        with bar as advance:
            for pending, output in run_requests(self.session, call, slices(), self.lost):
                for instance in pending.owners.values():
                    self.observer(instance, pending.request, output)
                yield pending, output
                answered = len(output.tokens) if isinstance(output, GenerationOutput) else 0
                advance(len(pending.owners), sum(tokens.get(place, 0.0) for place in pending.owners), answered)

    def _kept(self, answered: int) -> str:
        """Where answers are kept, and of how many documents an earlier run has left all there."""
        if (journal := self.session.journal) is None:
            return "; answers are kept only with an output folder"
        known = f", those to {counted(answered, 'document')} by an earlier run" if answered else ""
        return f"; answers are kept in '{journal.path.parent}'{known}"


class TaskMedia:
    """The pictures and sounds of requests for the model of one session."""

    def __init__(self, arguments: OrtLMArguments, session: Session) -> None:
        self._arguments = arguments
        self._media = session.media
        self._markers = {} if self._media is None else self._media.markers
        self._marked: dict[str, int] = {}
        """The pictures in the conversation of a prompt, where there are more than the model is given."""

        self.is_speech = session.encoding is not None and session.encoding.sound is not None
        """Whether every request has a sound, and its context is what the decoder begins with."""

        self.is_taken = bool(self._markers) or self.is_speech
        """Whether the model takes anything besides text."""

    def fields(self, args: Sequence[Any]) -> dict[str, Any]:
        """The pictures and sounds of a request, by the session's field for them. Raises `TaskError` for
        what the model does not take, and where it takes sound and the task has none."""
        media = args[2] if len(args) > 2 else {}
        taken = {name for name, modality in _ARGUMENTS.items() if modality in self._markers}
        if unknown := media.keys() - (taken | {"audio"} if self.is_speech else taken):
            problem = f"the task gives {', '.join(sorted(unknown))}, which this model does not take"
            raise TaskError(problem, code="unknown_name")
        if self.is_speech and "audio" not in media:
            raise UnfitTaskError("the task gives text only; the encoder of this model takes sound ('doc_to_audio')")
        images = as_list(media.get("visual"))
        sizes = self._arguments.image_width, self._arguments.image_height, self._arguments.image_max_side
        if any(sizes):
            images = [_resized(image, sizes) for image in images]
        fields = {"images": images[: self._arguments.max_images], "audio": as_list(media.get("audio"))}
        return {name: tuple(items) for name, items in fields.items() if items}

    def prompt(self, args: Sequence[Any]) -> str:
        """The context of a request, with the model's marker for each picture and sound that the model is given. (A chat
        template that has been applied has written them already.)"""
        context = str(args[0])
        if len(args) < 3 or self._media is None:
            return context
        self._refuse_others(context, len(as_list(args[2].get("visual"))))
        for modality in self._markers:
            given = self._arguments.image_string if modality is Modality.IMAGE else None
            marker = given or self._media.marker_text(modality)
            context = str(replace_placeholders(context, PLACEHOLDERS[modality], marker, self._most(modality)))
        return context

    def _refuse_others(self, context: str, num_images: int) -> None:
        """Raises `TaskError` for places in the text without a picture: `max_images` would put others there."""
        mark = PLACEHOLDERS[Modality.IMAGE]
        marks = self._marked.get(context, context.count(mark))
        if marks > max(num_images, self._arguments.max_images):
            raise TaskError(
                f"the task's text has {marks} of '{mark}', and its request gives {counted(num_images, 'picture')}: "
                "those of examples are given by 'olive-ext evaluate' and Olive workflows, not by lm-eval itself"
            )

    def note_markers(self, text: str, history: Sequence[Mapping[str, Any]]) -> None:
        """Remembers how many pictures the conversation of the prompt `text` has a place for."""
        marks = sum(str(message["content"]).count(PLACEHOLDERS[Modality.IMAGE]) for message in history)
        if marks > self._arguments.max_images:
            self._marked[text] = marks

    def message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message of a conversation with a part for each "<image>" and "<audio>" in it: all in front of its text, or
        in their places with `interleave`."""
        text = message["content"]
        kinds = {PLACEHOLDERS[modality]: modality for modality in self._markers}
        if not isinstance(text, str) or not any(mark in text for mark in kinds):
            return dict(message)
        seen: Counter[Modality] = Counter()
        parts: list[dict[str, Any]] = []
        for piece in filter(None, re.split(f"({'|'.join(kinds)})", text)):
            modality = kinds.get(piece)
            if modality is None:
                parts.append({"type": "text", "text": piece})
            elif seen[modality] < self._most(modality):
                seen[modality] += 1
                parts.append({"type": modality.value})
        if not self._arguments.interleave:
            whole = "".join(part.get("text", "") for part in parts)
            parts = [*(part for part in parts if part["type"] != "text"), {"type": "text", "text": whole}]
        return {**message, "content": parts}

    def _most(self, modality: Modality) -> int:
        """Items of a request that the model is given."""
        return self._arguments.max_images if modality is Modality.IMAGE else sys.maxsize


def _resized(image: Any, sizes: tuple[int | None, ...]) -> Any:
    """The picture, resized to `sizes` (width, height, larger side). One that cannot be read stays as it is: the session
    names the request that it costs."""
    try:
        return resize_image(read_picture(image), *sizes)
    except MediaError:
        return image
