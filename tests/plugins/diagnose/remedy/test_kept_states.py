"""States of steps at borders: found again by what was run, and no more of them than there is room for."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest

from olive_ext.plugins.diagnose.remedy.kept_states import KeptStates, MissingStatesError

LOW, MIDDLE, HIGH = ("low",), ("middle", "shared"), ("high", "shared")


def values(*names: str) -> dict[str, ort.OrtValue]:
    return {name: ort.OrtValue.ortvalue_from_numpy(np.zeros(25, np.float32)) for name in names}


def recorded(kept: KeptStates, run: str, steps: int) -> None:
    kept.begin(run, [LOW, MIDDLE, HIGH])
    for step in range(steps):
        kept.put(run, bytes([step]), values(*kept.names(run)))


def test_states_are_those_of_their_run_and_step() -> None:
    kept = KeptStates(10_000)
    recorded(kept, "float", 2)
    assert set(kept.get("float", b"\1")) == {"low", "middle", "high", "shared"}
    assert kept.type_of("float", "low") == (1, [None])
    for run, step in (("other", b"\1"), ("float", b"\2")):
        with pytest.raises(MissingStatesError):
            kept.get(run, step)


def test_older_runs_go_first_then_every_second_border() -> None:
    kept = KeptStates(1_000)
    recorded(kept, "older", 1)
    recorded(kept, "newer", 4)
    assert (kept.borders("older"), kept.borders("newer")) == ((), [MIDDLE])
    assert all(set(kept.get("newer", bytes([step]))) == {"middle", "shared"} for step in range(4))
    recorded(kept, "newer", 2)
    assert kept.borders("newer") == [LOW, MIDDLE, HIGH]  # what was kept before is forgotten, bytes and all


def test_no_border_is_kept_where_none_has_room() -> None:
    kept = KeptStates(50)
    recorded(kept, "float", 3)
    assert kept.borders("float") == []
