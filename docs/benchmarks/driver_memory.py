"""How much memory this process takes for many requests of lm-eval, whatever runs them.

    python -m docs.benchmarks.driver_memory --requests 500000 --workers 1000

The engine is a fake that knows no model, so that what is measured is what lm-eval's requests, their tokens, the chunks,
the journal and the answers take, with as many chunks under way as so many workers would have. Prints the resident size
as requests are answered, by the engine and from the journal, and the driver's processor time for each of their tokens.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace

import psutil
from lm_eval.api.instance import Instance

from olive_ext.backends.lm_eval import OrtLM
from olive_ext.engine.requests import Request, Result
from olive_ext.session import Session
from olive_ext.session.workers.feed import Feed
from olive_ext.text.requests import ScoringRequest
from olive_ext.text.tokenizer import Tokenizer
from tests.exports import TEXT, tokenizer
from tests.session.fake_engine import FakeEngine

WORDS = TEXT.split()


def instances(count: int) -> list[Instance]:
    """Four choices of a token or two behind each question of some 60 words."""
    made = []
    for number in range(count):
        at = number // 4 * 5 % (len(WORDS) - 80)
        context = f"{number // 4} {' '.join(WORDS[at : at + 60])}"
        arguments = (context, f" {WORDS[at + 60 + number % 4]}")
        made.append(Instance("loglikelihood", {}, arguments, number % 4, ("task", number // 4, 1)))
    return made


class WorkersEngine(FakeEngine):
    """Holds as many requests as a crew of `num_workers` does while all its workers are busy."""

    needs_chunks = True

    def __init__(self, num_workers: int) -> None:
        super().__init__(4096, slots=16)
        self.num_workers = num_workers

    def run_chunks(self, chunks: Iterable[Sequence[Request]], done: Callable[[int, Sequence[Result]], None]) -> None:
        feed = Feed(chunks, self.num_workers)
        while feed.has_work:
            if not feed.read() and feed.num_waiting:
                found = feed.take()
                assert found is not None
                piece, requests = found
                results = self.run(requests)
                feed.complete(piece, results)
                done(piece.chunk, results)


def resident_mib() -> float:
    return psutil.Process().memory_info().rss / 2**20


def main() -> None:
    """Prints a line for each tenth of the requests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=500_000)
    parser.add_argument("--workers", type=int, default=1)
    given = parser.parse_args()
    count = given.requests
    sys.stdout.write(f"imported: {resident_mib():.0f} MiB\n")
    asked, began = instances(count), time.process_time()
    sys.stdout.write(f"{count} requests of lm-eval: {resident_mib():.0f} MiB\n")
    with tempfile.TemporaryDirectory() as folder:
        for what in ("answered", "answered from the journal"):
            told = SimpleNamespace(number=0, tokens=0)

            def observe(
                _: object, request: ScoringRequest, __: object, told: SimpleNamespace = told, what: str = what
            ) -> None:
                told.number += 1
                told.tokens += len(request.context) + len(request.target)
                if told.number % (count // 10) == 0:
                    sys.stdout.write(f"{told.number} {what}: {resident_mib():.0f} MiB\n")
                    sys.stdout.flush()

            session = Session(WorkersEngine(given.workers), Tokenizer(tokenizer(), "tiny"))
            session.keep_answers(Path(folder, "answers"))
            lm = OrtLM(session=session, observer=observe)
            lm.loglikelihood(asked, disable_tqdm=True)
            session.close()
            seconds, began = time.process_time() - began, time.process_time()
            sys.stdout.write(f"{what}: {seconds / told.tokens * 1e6:.2f} us of the processor a token\n")


if __name__ == "__main__":
    main()
