"""On a device whose memory the host cannot address, pictures give the CPU's numbers and features stay there."""

from __future__ import annotations

import numpy as np
import pytest

from olive_ext.config import ModelSettings
from olive_ext.engine.engine import engine_on, open_runner
from olive_ext.engine.requests import Request
from olive_ext.errors import ProviderError, RunError
from olive_ext.media.items import MediaRun
from olive_ext.media.processor import MediaProcessor
from olive_ext.model import resolve
from olive_ext.model.types import Modality
from olive_ext.session.requests import ScoringRequest
from tests.device.open import LIBRARY, open_on
from tests.exports.media import media_export, plain_items_export
from tests.families.pictures import picture
from tests.refusals import refused

pytestmark = pytest.mark.webgpu

PICTURES = [picture(0, 40, 40), picture(1, 60, 30)]


def test_encoder_that_the_device_cannot_run_goes_elsewhere_by_name_only() -> None:
    package, _ = media_export("llava", "f32", "webgpu")
    request = ScoringRequest("<image> and", " stone", images=PICTURES[:1])
    with open_on("webgpu", package) as session, refused(ProviderError, "provider", holds="engine.encoder_provider"):
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
        # 16 tokens of 4 patches, and a tail of 16 with a grid of its own
        with refused(RunError, "failed", holds=("engine.strict_shapes", "'pixel_values' [128, 384]", "[2, 3]")):
            ask(1, 64)
        assert ask(2, 32) == 4
        facts = engine.describe()
    finally:
        engine.close()
    assert facts["image_encoder_device"] == "webgpu"
    assert facts["encoder_shapes_late"] == 0
    assert facts["images_encoded"] == 2
