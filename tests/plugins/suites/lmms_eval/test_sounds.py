"""Sounds in the forms that lmms-eval's tasks give them: scores and answers are those of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("lmms_eval")

from lmms_eval.api.instance import Instance
from lmms_eval.api.task import ConfigurableMessagesTask

from olive_ext.errors import LostRequestsError
from olive_ext.plugins.suites.lmms_eval.ort_lmms import OrtChat, OrtSimple
from tests.exports.media import SOUND_FAMILIES, media_export
from tests.families.sounds import RATE, SoundReference, sound

pytestmark = [pytest.mark.slow, pytest.mark.other_env]

FAMILY = "qwen3_asr"
SOUNDS = [sound(0, 9000), sound(1, 24321)]


@pytest.fixture(scope="module")
def model() -> Iterator[OrtChat]:
    model = OrtChat(str(media_export(FAMILY)[0]), engine={"num_slots": 2})
    yield model
    model.clean()


def mapping(given: Any) -> Any:
    return {"path": None, "array": given[0], "sampling_rate": given[1]}


def decoder(given: Any) -> Any:
    """Has what datasets' AudioDecoder has: samples [channels, N] as a tensor."""
    samples = SimpleNamespace(data=torch.from_numpy(given[0])[None], sample_rate=given[1])
    return SimpleNamespace(get_all_samples=lambda: samples)


def instance(kind: str, *arguments: Any) -> Instance:
    return Instance(kind, arguments, 0, {"task": "heard", "doc_id": 0, "repeats": 1})


@pytest.mark.parametrize("form", [mapping, decoder])
def test_choices_behind_sounds_have_transformers_log_probabilities(model: OrtChat, form: Any) -> None:
    """Of two sounds, each behind a text of its own, as mappings and as what datasets decodes."""
    simple = OrtSimple(session=model.session)
    simple.task_dict = {"heard": {"test": SOUNDS}}
    rest = (lambda given: [form(given)], "heard", "test")
    asked = [instance("loglikelihood", "What?", " blue stone", rest[0], at, *rest[1:]) for at in range(len(SOUNDS))]
    reference = SoundReference(FAMILY, media_export(FAMILY)[1])
    prompt = f"<user>{SOUND_FAMILIES[FAMILY].marker}What?<assistant>"
    for (found, _), given in zip(simple.loglikelihood(asked), SOUNDS, strict=True):
        assert found == pytest.approx(sum(reference.score(prompt, " blue stone", [given])), abs=2e-4)


def test_a_sound_in_messages_is_answered_as_one_by_the_simple_class(model: OrtChat) -> None:
    """lmms-eval's own messages call samples a video; files that are no WAV are refused as sounds, not as pictures."""
    settings = {"max_new_tokens": 5, "temperature": 0}
    simple = OrtSimple(session=model.session)
    model.task_dict = simple.task_dict = {"heard": {"test": [{}]}}
    visuals = [mapping(SOUNDS[1])]
    turn = ConfigurableMessagesTask._build_user_turn(visuals, "What?")
    place = (0, "heard", "test")
    (chat,) = model.generate_until([instance("generate_until", "", lambda _: turn, settings, *place)])
    (one,) = simple.generate_until([instance("generate_until", "What?", settings, lambda _: visuals, *place)])
    assert chat.text == one.text
    assert chat.token_counts.output_tokens > 0
    for wrong, why in (("a.mp3", "sound 'a.mp3'"), ({"array": SOUNDS[0][0], "sampling_rate": RATE * 3}, "resample it")):
        given = [wrong]
        with pytest.raises(LostRequestsError, match=why):
            simple.generate_until([instance("generate_until", "What?", settings, lambda _, given=given: given, *place)])
