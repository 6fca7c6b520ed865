"""A model of lm-eval's own with its answers in our journal: lm-eval's cache over a file that holds no pickles."""

from __future__ import annotations

from contextlib import AbstractContextManager, closing, nullcontext
from typing import Any

from lm_eval.api.model import LM, CacheHook, CachingLM

from olive_ext.records.journal import Journal

_LINE = 64
"""Answers of one line of the journal."""


class JournaledLM(CachingLM):  # type: ignore[misc]
    """`lm` behind `journal`, which holds answers by lm-eval's own digests of its requests."""

    def __init__(self, lm: LM, journal: Journal) -> None:
        self.lm = lm
        self.cache_db = str(journal.path)
        self.dbdict = _Answers(journal)
        lm.set_cache_hook(self.get_cache_hook())

    def close(self) -> None:
        """Writes what is held in memory; the model itself stays open."""
        self.dbdict.commit()
        self.dbdict.journal.close()
        self.lm.set_cache_hook(CacheHook(None))


def journaled(lm: LM, journal: Journal | None) -> AbstractContextManager[LM]:
    """`lm` with its answers in `journal` until the end of the block; without a journal `lm` itself."""
    return nullcontext(lm) if journal is None else closing(JournaledLM(lm, journal))


LM.register(JournaledLM)  # lm-eval asks what it is given whether it is an LM; its own cache it adds only behind that


class _Answers:
    """The journal as the mapping that lm-eval's cache keeps its answers in."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self._fresh: dict[bytes, Any] = {}

    def __contains__(self, digest: str) -> bool:
        return bytes.fromhex(digest) in self._fresh or bytes.fromhex(digest) in self.journal

    def __getitem__(self, digest: str) -> Any:
        key = bytes.fromhex(digest)
        answer = self._fresh[key] if key in self._fresh else self.journal[key]
        return tuple(answer) if isinstance(answer, list) else answer

    def __setitem__(self, digest: str, answer: Any) -> None:
        if digest not in self:
            self._fresh[bytes.fromhex(digest)] = answer
        if len(self._fresh) >= _LINE:
            self.commit()

    def commit(self) -> None:
        """Writes what is held in memory."""
        self.journal.add(self._fresh)
        self._fresh = {}
