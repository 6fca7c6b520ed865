"""Resident memory of a process around `Session.release_memory`, which is `gc()` of the Evalution engine.

python docs/benchmarks/released_memory.py MODEL
"""

from __future__ import annotations

import gc
import random
import sys

import psutil

import olive_ext
from olive_ext.session import Session
from olive_ext.text.requests import GenerationRequest, ScoringRequest

NUM_TEXTS = 32
FIRST_ID, LAST_ID = 4, 900
"""Token ids that even the smallest vocabularies of the tests have."""


def use(session: Session) -> None:
    """Fills every slot and the shared prefix to the context's length, once by scoring and once by generating."""
    rng = random.Random(1)
    length = session.max_length
    texts = [[rng.randint(FIRST_ID, LAST_ID) for _ in range(length)] for _ in range(NUM_TEXTS)]
    session.loglikelihood([ScoringRequest(text[: length // 2], text[length // 2 :]) for text in texts])
    session.generate([GenerationRequest(text[: length - 16], max_new_tokens=16) for text in texts])


def report(when: str) -> None:
    gc.collect()
    print(f"{when:<28}{psutil.Process().memory_info().rss / 2**20:9.1f} MiB")


def main(model: str) -> None:
    with olive_ext.open(model) as session:
        report("opened")
        for turn in (1, 2, 3):
            use(session)
            report(f"used, turn {turn}")
            session.release_memory()
            report("released")


if __name__ == "__main__":
    main(sys.argv[1])
