"""A journal gives back what was added to it, whatever happened to the file."""

from __future__ import annotations

import re
import resource
import zlib
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from olive_ext.errors import RecordsError
from olive_ext.records.journal import Journal
from tests.refusals import refused

ANSWERS = [{bytes([line, place]): {"logprobs": [-0.1 * place, line]} for place in range(5)} for line in range(6)]
FACTS = {"model": "abc"}


def write(path: Path) -> bytes:
    with closing(Journal(path, FACTS)) as journal:
        for answers in ANSWERS:
            journal.add(answers)
    return path.read_bytes()


def found(path: Path) -> dict[bytes, Any]:
    """What a journal on `path` knows; every answer is the one that was added."""
    everything = {key: answer for answers in ANSWERS for key, answer in answers.items()}
    with closing(Journal(path, FACTS)) as journal:
        known = {key: journal[key] for key in everything if key in journal}
        assert journal.num_known == len(known)
    assert known == {key: everything[key] for key in known}
    return known


def test_answers_come_back_bit_by_bit_to_their_owner_and_one_writer_unless_it_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write(path)
    assert path.stat().st_mode & 0o077 == 0
    assert len(found(path)) == 30
    with closing(Journal(path, FACTS, resume=False)) as journal:
        assert journal.num_known == 0
        with refused(RecordsError, "records", holds=str(path)):
            Journal(path, FACTS)
    assert found(path) == {}


@given(part=st.floats(0, 1))
def test_a_torn_line_is_cut_off_and_what_follows_is_kept(tmp_path_factory: pytest.TempPathFactory, part: float) -> None:
    path = tmp_path_factory.mktemp("torn") / "a.jsonl"
    whole = write(path)
    path.write_bytes(torn := whole[: int(len(whole) * part)])
    num_lines = torn.count(b"\n")
    assert len(found(path)) == 5 * max(0, num_lines - 1)
    write(path)
    assert len(found(path)) == 30


@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_costs_the_lines_that_it_is_in(
    tmp_path_factory: pytest.TempPathFactory, place: float, bit: int
) -> None:
    path = tmp_path_factory.mktemp("flipped") / "a.jsonl"
    content = bytearray(write(path))
    content[int(len(content) * place)] ^= 1 << bit
    path.write_bytes(content)
    assert len(found(path)) >= 20
    write(path)
    assert len(found(path)) == 30


def test_damage_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = write(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").write_bytes(whole.replace(b"logprobs", b"logprobz", 1)[:-7])
    assert len(found(tmp_path / "a.jsonl")) == 20
    assert re.search(r"\b1 damaged .*\b20 ", caplog.text)


def test_a_full_disk_ends_the_writing_and_not_the_evaluation(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "a.jsonl"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400, limits[1]))  # no file of this process may be larger
    try:
        write(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caplog.text.count("[Errno 27]") == 1
    assert path.read_bytes().endswith(b"\n")
    assert 0 < len(found(path)) < 30


def test_a_link_and_a_folder_in_the_way_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("precious")
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "other")
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "link.jsonl", tmp_path / "file" / "a.jsonl", tmp_path / "folder"):
        with refused(RecordsError, "records", holds=(f"{path}",)):
            Journal(path, FACTS, resume=False)
    assert (tmp_path / "other").read_text() == "precious"


def forged(body: str) -> bytes:
    raw = body.encode()
    return b"%08x %s\n" % (zlib.crc32(raw), raw)


@pytest.mark.parametrize(
    "body",
    [
        *("[]", "5", "null", "{}", "not JSON", "[" * 100_000, "9" * 5000, '{"answers": []}', '{"answers": null}'),
        *('{"answers": {"xyz": {}}}', '{"answers": {"5": {}}}', '{"facts": [1]}', '{"facts": {"model": "other"}}'),
    ],
    ids=lambda body: body[:20],
)
def test_a_line_that_was_not_written_here_is_refused_by_its_number(tmp_path: Path, body: str) -> None:
    path = tmp_path / "a.jsonl"
    whole = write(path)
    path.write_bytes(whole + forged(body))
    for _ in range(2):  # the first leaves nothing locked
        with refused(RecordsError, "records", holds=("a.jsonl", "8")):
            Journal(path, FACTS)
    assert path.read_bytes() == whole + forged(body)
    path.write_bytes(whole)
    assert len(found(path)) == 30


def test_answers_of_earlier_runs_are_counted_as_they_are_used(tmp_path: Path) -> None:
    """Those of other requests in the file, and those of this run, are none."""
    path = tmp_path / "journal.jsonl"
    with closing(Journal(path, {})) as journal:
        journal.add({b"a": 1, b"b": 2, b"c": 3})
        assert (journal[b"a"], journal.describe()["answers_used"]) == (1, 0)
    with closing(Journal(path, {})) as journal:
        journal.add({b"d": 4})
        assert [journal[key] for key in (b"a", b"a", b"d")] == [1, 1, 4]
        assert {name: journal.describe()[f"answers_{name}"] for name in ("known", "used", "written")} == {
            "known": 3,
            "used": 1,
            "written": 1,
        }
