"""An export beside the checkpoint that it was made of, run on transformers: resident and recorded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import olive_ext
from olive_ext.session.requests import ScoringRequest


def recorded(package: Path, checkpoint: Path, requests: Sequence[ScoringRequest], folder: Path) -> list[Any]:
    """What `package` compares with the checkpoint's records, which are made in `folder`."""
    with olive_ext.open(checkpoint, kind="hf", record_to=folder) as session:
        session.loglikelihood(requests)
        records = session.records
    with olive_ext.open(package, reference=records) as session:
        return [output.compared for output in session.loglikelihood(requests)]


def assert_as_far_as_rounding(resident: Sequence[Any], recorded: Sequence[Any]) -> None:
    """Both kinds of reference say that the export in fp32 is the checkpoint."""
    for one, other in zip(resident, recorded, strict=True):
        assert one is not None
        assert other is not None
        assert max(one.kl.max(), other.kl.max()) < 1e-5
        assert one.reference_logprobs == pytest.approx(other.reference_logprobs, abs=1e-4)
