"""Records on disk: what was put is found, by later runs too; interruptions lose little; damage is named."""

from __future__ import annotations

import hashlib
import json
import struct
import subprocess
import sys
import zlib
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from olive_ext.errors import RecordsError, RunError
from olive_ext.records import Form, Records, request_key, scored_targets
from olive_ext.records import store as store_module
from tests.refusals import refused

FORM = Form(100, 3, 2)
FACTS = {"model": "abc"}


def some_records(count: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    records = np.zeros(count, FORM.dtype)
    records["ids"] = rng.integers(0, 100, (count, 5))
    records["logprobs"] = rng.normal(size=(count, 5))
    records["tail"] = rng.random(count)
    return records


def said(numbers: np.ndarray) -> np.ndarray:
    return scored_targets(numbers, -numbers.astype(np.float32) / 7, numbers % 2 == 0)


def fill(records: Records, requests: range, per_request: int = 4) -> None:
    for number in requests:
        numbers = records.append(some_records(per_request, number))
        records.put(request_key([number, 1, 2], per_request), said(numbers))


def assert_holds(records: Records, requests: range, per_request: int = 4) -> None:
    for number in requests:
        found = records.find(request_key([number, 1, 2], per_request))
        assert found is not None, number
        np.testing.assert_array_equal(found["logprob"], -found["record"].astype(np.float32) / 7)
        np.testing.assert_array_equal(found["is_greedy"], found["record"] % 2 == 0)
        np.testing.assert_array_equal(records.get(found["record"]), some_records(per_request, number))


def test_later_runs_find_what_was_put_and_add_to_it(tmp_path: Path) -> None:
    for start in (0, 20, 40):
        with closing(Records.write(tmp_path, FORM, FACTS)) as records:
            assert records.num_requests == start
            fill(records, range(start, start + 20))
            folder = records.folder
    assert_holds(Records.read(folder), range(60))
    assert Records.read(folder).find(request_key([60, 1, 2], 4)) is None
    assert Records.read(folder).describe()["positions"] == 240


def test_files_of_version_1_are_read(tmp_path: Path) -> None:
    """Written here byte by byte, as every release so far has: names, order and types of what is on disk are fixed."""
    records = [
        struct.pack("<5i5ff", *range(5), *(-0.5 * place for place in range(5)), 0.25 + place) for place in (0, 1)
    ]
    targets = [struct.pack("<qf?", place, -1.5 * place, place == 1) for place in (0, 1)]
    digest = hashlib.blake2b(b"2 \n" + struct.pack("<3q", 7, 8, 9), digest_size=16).digest()
    request = struct.pack("<QQqi", *(int.from_bytes(half, "little") for half in (digest[:8], digest[8:])), 0, 2)
    content = {"records": b"".join(records), "targets": b"".join(targets), "requests": request}
    for name, written in content.items():
        (tmp_path / f"{name}.bin").write_bytes(written)
    chunk = {
        "counts": {"records": 2, "targets": 2, "requests": 1},
        "checksums": {name: zlib.crc32(written) for name, written in content.items()},
    }
    form = {"vocab_size": 100, "top": 3, "drawn": 2, "seed": 0}
    index = {"version": 1, "facts": FACTS, "form": form, "chunks": [chunk]}
    (tmp_path / "index.json").write_text(json.dumps(index))
    found = Records.read(tmp_path)
    said = found.find(request_key([7, 8, 9], 2))
    assert said is not None
    assert tuple(said[name].tolist() for name in said.dtype.names) == (
        [0, 1],
        [0, -1.5],
        [False, True],
    )
    kept = found.get(said["record"])
    assert kept["ids"].tolist() == [[0, 1, 2, 3, 4]] * 2
    assert kept["logprobs"].tolist() == [[0, -0.5, -1, -1.5, -2]] * 2
    assert kept["tail"].tolist() == [0.25, 1.25]


def test_requests_are_kept_once_by_tokens_targets_and_source_and_references_apart(tmp_path: Path) -> None:
    keys = {request_key(*asked) for asked in [((1, 2), 1, ""), ((1, 2), 2, ""), ((1, 3), 1, ""), ((1, 2), 1, "x")]}
    assert len(keys) == 4
    assert request_key([1, 2], 1) == request_key((1, 2), 1, "")
    folders = set()
    for form, facts in [(FORM, FACTS), (FORM, {"model": "other"}), (Form(100, 3, 2, seed=1), FACTS)]:
        with closing(Records.write(tmp_path, form, facts)) as records:
            folders.add(records.folder)
            if facts is FACTS and form is FORM:
                for again in range(3):
                    fill(records, range(1))
                    assert records.num_requests == 1
                    records.flush() if again else None
    assert len(folders) == 3


def test_what_an_interruption_cut_off_is_dropped_and_written_again(tmp_path: Path) -> None:
    with closing(Records.write(tmp_path, FORM, FACTS)) as records:
        fill(records, range(5))
        folder = records.folder
    for name in ("records", "targets", "requests"):
        with (folder / f"{name}.bin").open("ab") as file:
            file.write(b"half a chunk")
    (folder / "index.json.new").write_text("{", encoding="utf-8")
    assert_holds(Records.read(folder), range(5))
    with closing(Records.write(tmp_path, FORM, FACTS)) as records:
        fill(records, range(5, 9))
    assert_holds(Records.read(folder), range(9))


def test_what_a_killed_process_had_flushed_is_there(tmp_path: Path) -> None:
    code = (
        "import sys, os\n"
        "from tests.records.test_records import *\n"
        "records = Records.write(sys.argv[1], FORM, FACTS)\n"
        "fill(records, range(6)); records.flush(); fill(records, range(6, 9)); os._exit(9)\n"
    )
    root = Path(__file__).resolve().parents[2]
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=root).returncode == 9
    with closing(Records.write(tmp_path, FORM, FACTS)) as records:
        assert records.num_requests == 6
        assert_holds(records, range(6))


@settings(max_examples=30)
@given(name=st.sampled_from(["records", "targets", "requests"]), place=st.floats(0, 0.999), how=st.sampled_from("xtg"))
def test_parts_that_are_damaged_are_recorded_again_and_the_others_are_used(name: str, place: float, how: str) -> None:
    with TemporaryDirectory() as root:
        for numbers in (range(4), range(4, 7), range(7, 9)):
            with closing(Records.write(root, FORM, FACTS)) as records:
                fill(records, numbers)
                path = records.folder / f"{name}.bin"
        content = bytearray(path.read_bytes())
        at = int(place * len(content))
        content[at] ^= 1
        path.write_bytes(content[:at] if how == "t" else content)
        if how == "g":
            path.unlink()
        with refused(RecordsError, "records", holds=("part ", f"{name}.bin")):
            assert_holds(Records.read(path.parent), range(9))
        with closing(Records.write(root, FORM, FACTS)) as records:
            kept = records.num_requests
            assert kept in ({0} if how == "g" else {5, 6, 7} if how == "x" else {0, 4, 7})
            fill(records, range(9))
        assert_holds(Records.read(path.parent), range(9))
        with closing(Records.write(root, FORM, FACTS)) as records:
            assert records.num_requests == 9


@given(place=st.floats(0, 0.999), bit=st.integers(0, 6))
def test_an_index_with_a_changed_bit_is_refused_or_says_the_same(place: float, bit: int) -> None:
    with TemporaryDirectory() as root:
        with closing(Records.write(root, FORM, FACTS)) as records:
            fill(records, range(3))
            path = records.folder / "index.json"
        content = bytearray(path.read_bytes())
        content[int(place * len(content))] ^= 1 << bit
        path.write_bytes(content)
        try:
            assert_holds(Records.read(path.parent), range(3))
        except RecordsError as error:
            assert "index.json' " in str(error)  # noqa: PT017


@pytest.mark.parametrize("name", ["records.bin", "targets.bin", "index.json", "index.json.new"])
def test_no_file_is_opened_through_a_link_and_new_ones_are_their_owners(tmp_path: Path, name: str) -> None:
    with closing(Records.write(tmp_path / "root", FORM, FACTS)) as records:
        fill(records, range(3))
    folder, other = records.folder, tmp_path / "other"
    assert folder.stat().st_mode & 0o077 == 0
    assert all(path.stat().st_mode & 0o077 == 0 for path in folder.glob("*.*"))
    if (folder / name).exists():
        (folder / name).rename(other)
    else:
        other.write_text("theirs")
    before = other.read_bytes()
    (folder / name).symlink_to(other)

    def add() -> None:
        with closing(Records.write(tmp_path / "root", FORM, FACTS)) as records:
            fill(records, range(3, 6))

    with pytest.raises((RecordsError, RunError), match=f"{name}' .*link"):
        add()
    assert other.read_bytes() == before
    if name != "index.json":
        (folder / name).unlink()
        other.rename(folder / name)
        add()  # the lock was let go
        assert_holds(Records.read(folder), range(6))


def test_a_folder_that_cannot_be_made_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with refused(RecordsError, "no_access", holds="file/"):
        Records.write(tmp_path / "file", FORM, FACTS)


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    with closing(Records.write(tmp_path, FORM, FACTS)) as records:
        code = (
            "import sys\n"
            "from tests.records.test_records import *\n"
            "try: Records.write(sys.argv[1], FORM, FACTS)\n"
            "except RecordsError as error: print(error.code, error)\n"
        )
        root = Path(__file__).resolve().parents[2]
        done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=root, capture_output=True, text=True)
        assert done.stdout.startswith("records ")
        assert f"'{records.folder}'" in done.stdout


def test_memory_stays_bounded_while_records_grow(tmp_path: Path) -> None:
    with closing(Records.write(tmp_path, FORM, FACTS)) as records:
        most = 0
        for number in range(300):
            numbers = records.append(np.zeros(10_000, FORM.dtype))
            records.put(request_key([number], 1), said(numbers[:1]))
            most = max(most, sum(array.nbytes for array in records._records))
        assert most <= store_module.CHUNK_BYTES + 10_000 * FORM.dtype.itemsize
        chunks = json.loads((records.folder / "index.json").read_text())["chunks"]
        assert len(chunks) >= 300 * 10_000 * FORM.dtype.itemsize // store_module.CHUNK_BYTES - 1


@pytest.mark.parametrize(
    ("vocab_size", "kept"),
    [(2048, (0, 0)), (2049, (16, 16)), (6000, (39, 19)), (10_000, (64, 32)), (49152, (64, 32)), (262144, (64, 32))],
)
def test_chosen_form_is_whole_for_small_vocabularies_and_under_two_percent_for_others(
    vocab_size: int, kept: tuple[int, int]
) -> None:
    form = Form.choose(vocab_size)
    assert (form.top, form.drawn) == kept
    assert form.is_whole == (kept == (0, 0))
    share = form.dtype.itemsize / (4 * vocab_size)
    assert share <= (1 if form.is_whole else 0.02 if form.top > 16 else 0.035)
    assert form.describe()["share_of_logits"] == pytest.approx(share, abs=1e-5)


def test_given_form_is_kept() -> None:
    assert Form.choose(50_000, 10, 200) == Form(50_000, 10, 200)
    assert Form.choose(3000, 1600).is_whole
