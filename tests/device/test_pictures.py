"""On a device whose memory the host cannot address, pictures give the CPU's numbers and features stay there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from olive_ext.config import ModelSettings
from olive_ext.engine.opening import engine_on, open_runner
from olive_ext.engine.requests import Request
from olive_ext.errors import ProviderError, RunError
from olive_ext.media.items import MediaRun
from olive_ext.media.processor import MediaProcessor
from olive_ext.model import resolve
from olive_ext.model.spec.media_types import Modality
from olive_ext.session.requests import GenerationRequest, ScoringRequest
from tests.device.open import LIBRARY, open_on
from tests.exports.media import MEDIA_FAMILIES, media_export, plain_encoder_export, plain_items_export
from tests.families.observed import late_on_the_way, observing
from tests.families.pictures import picture

pytestmark = [pytest.mark.webgpu, pytest.mark.slow]

PICTURES = [picture(0, 40, 40), picture(1, 60, 30)]


def test_encoder_on_the_device_gives_the_cpus_numbers() -> None:
    asked = [
        ScoringRequest(f"Ann sees the <image> and {word}", " blue stone", images=[one])
        for one in PICTURES
        for word in ("the", "a")
    ]
    asked.append(ScoringRequest("<image> and <image>", " stone", images=PICTURES))
    prompts = [GenerationRequest("Ann sees the <image> and", images=[one], max_new_tokens=6) for one in PICTURES]
    found = []
    for device in ("webgpu", "cpu"):
        # Chunks of as many tokens as a picture has: text is what is left around it.
        with open_on(device, plain_encoder_export("f32", "webgpu"), num_slots=2, chunk_size=16) as session:
            at_first = session.describe_execution()["counters"]["host_bytes"]  # of the trials while it opened
            scores = session.loglikelihood(asked)
            tokens = [output.tokens for output in session.generate(prompts)]
            facts = session.describe_execution()
            found.append((scores, tokens, facts, facts["counters"]["host_bytes"] - at_first))
    (scores, tokens, facts, num_bytes), (expected, expected_tokens, on_cpu, num_bytes_on_cpu) = found
    for score, other in zip(scores, expected, strict=True):
        np.testing.assert_allclose(score.token_logprobs, other.token_logprobs, atol=1e-4)
    assert tokens == expected_tokens
    assert facts["image_encoder_device"] == "webgpu"
    assert facts["images_encoded"] == on_cpu["images_encoded"] == len(PICTURES)
    assert num_bytes <= num_bytes_on_cpu


def test_strict_encoder_on_the_device_meets_no_shape_that_was_not_run_beforehand() -> None:
    asked = [ScoringRequest("Ann sees the <image> and", " blue stone", images=[one]) for one in PICTURES]
    engine: dict[str, Any] = {"num_slots": 2, "chunk_size": 16, "strict_shapes": True}
    with observing() as observed, open_on("webgpu", plain_encoder_export("f32", "webgpu"), **engine) as session:
        begin = len(observed.runs)
        assert all(output.token_count == 2 for output in session.loglikelihood(asked))
        facts, late = session.describe_execution(), late_on_the_way(session, observed, begin)
    assert late == []
    # 1, 2, ... 128 pictures and what is picked of them, and three graphs for steps of 8, 16 and 32 tokens.
    assert (facts["encoder_shapes_warmed"], facts["encoder_shapes_late"]) == (8 + 8 + 3 * 3, 0)
    assert (facts["image_encoder_device"], facts["images_encoded"]) == ("webgpu", len(PICTURES))


def test_padded_tails_of_steps_that_are_cut_to_31_tokens_leave_nothing_behind() -> None:
    """Buckets of steps end in padding, whose positions later steps write anew: prompts of many lengths, each asked
    behind longer and behind shorter ones, give what each gives alone on the CPU."""
    package, texts = plain_encoder_export("f32", "webgpu"), ("<image>", "Ann sees the <image> and a heavy wheel of")
    asked = [
        ScoringRequest(text, target, images=[one])
        for one in PICTURES
        for text in texts
        for target in (" stone", " of the garden number")
    ]
    engine: dict[str, Any] = {"num_slots": 2, "chunk_size": 31, "strict_shapes": True}
    with open_on("webgpu", package, **engine) as session:
        found = session.loglikelihood([*asked, *reversed(asked)])
        facts = session.describe_execution()
    with open_on("cpu", package, num_slots=1) as session:
        expected = [session.loglikelihood([one])[0].token_logprobs for one in asked]
    assert (facts["chunk_size"], facts["shapes_late"], facts["encoder_shapes_late"]) == (31, 0, 0)
    for one, logprobs in zip(found, [*expected, *reversed(expected)], strict=True):
        np.testing.assert_allclose(one.token_logprobs, logprobs, atol=1e-4)


def test_encoder_that_the_device_cannot_run_goes_elsewhere_by_name_only() -> None:
    package, _ = media_export("llava", "f32", "webgpu")
    request = ScoringRequest("<image> and", " stone", images=PICTURES[:1])
    with (
        open_on("webgpu", package) as session,
        pytest.raises(ProviderError, match=r"'engine\.encoder_provider' = 'cpu' would run the encoder there"),
    ):
        session.loglikelihood([request])
    with open_on("webgpu", package, encoder_provider="cpu") as session, open_on("cpu", package) as on_cpu:
        found, expected = (one.loglikelihood([request])[0].logprob for one in (session, on_cpu))
        assert session.describe_execution()["image_encoder_device"] == "cpu"
    assert found == pytest.approx(expected, abs=1e-4)


def test_picture_larger_than_those_that_were_run_beforehand_is_an_error_that_names_its_shape() -> None:
    """The encoder is run beforehand on pictures of up to 7 tokens. A larger one is refused by the names and sizes of
    what the encoder would have been given; smaller ones are answered, before it and behind it."""
    settings = ModelSettings.model_validate(
        {
            "model": str(plain_items_export("qwen2_5_vl", "f32", "webgpu")),
            "execution_provider": "webgpu",
            "provider_libraries": LIBRARY,
            "engine": {"num_slots": 2, "chunk_size": 16, "strict_shapes": True},
        }
    )
    model = resolve(settings)
    assert model.media is not None
    processor, opened = MediaProcessor(model.media, model.files), open_runner(model)
    opened.runner.warm_up(processor.dummies(7), 16)
    engine = engine_on(opened, model)

    def ask(seed: int, side: int) -> int:
        item = processor.item(Modality.IMAGE, picture(seed, side, side))
        tokens = (2, *(item.placeholder,) * item.num_tokens, 50, 60)
        (result,) = engine.run([Request(tokens, 2, media=(MediaRun(1, item),))])
        assert np.isfinite(result.logprobs).all()
        return item.num_tokens

    try:
        assert ask(0, 32) == 4
        with pytest.raises(RunError) as caught:
            ask(1, 64)
        assert ask(2, 32) == 4
        facts = engine.describe()
    finally:
        engine.close()
    # 16 tokens of 4 patches, and a tail of 16 with a grid of its own
    for words in ("'engine.strict_shapes' = true: the image encoder", "'pixel_values' [128, 384]", "[2, 3]"):
        assert words in str(caught.value)
    assert facts["image_encoder_device"] == "webgpu"
    assert facts["encoder_shapes_late"] == 0
    assert facts["images_encoded"] == 2


def test_pictures_of_any_size_are_encoded_together_on_the_device() -> None:
    package, marker = plain_items_export("qwen2_5_vl", "f32", "webgpu"), MEDIA_FAMILIES["qwen2_5_vl"].marker
    sizes = [(40, 40), (60, 30), (64, 64), (20, 60), (33, 33), (64, 40)]
    asked = [
        ScoringRequest(f"{marker} and", " stone", images=[picture(seed, *size)]) for seed, size in enumerate(sizes)
    ]
    found = {}
    for device, more in (("webgpu", {"encoder_batch_rows": 64}), ("cpu", {"encoder_batch_rows": 1})):
        engine: dict[str, Any] = {"chunk_size": 16, "strict_shapes": True, **more}
        with observing() as observed, open_on(device, package, **engine) as session:
            begin = len(observed.runs)
            found[device] = [output.logprob for output in session.loglikelihood(asked)]
            facts = session.describe_execution()
            assert late_on_the_way(session, observed, begin) == []
        assert (facts["images_encoded"], facts["encoder_shapes_late"]) == (len(sizes), 0)
        assert facts["image_encoder_runs"] == {"webgpu": 1, "cpu": len(sizes)}[device], facts
    np.testing.assert_allclose(found["webgpu"], found["cpu"], atol=1e-4)
