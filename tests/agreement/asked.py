"""What models are asked: named lists of calls, each of which is a list of requests of one kind. They cross windows and
chunks, share prefixes, and end on both sides of what a graph decides by."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from olive_ext.session.requests import GenerationRequest, RollingRequest, ScoringRequest
from tests.agreement.references import RATE, causal, features, noise
from tests.emulated import IS_EMULATED
from tests.exports import CONTEXT, TEXT, VOCAB, Export
from tests.exports.catalog import CATALOG
from tests.exports.differing import WINDOW
from tests.exports.media import MEDIA_FAMILIES, SOUND_FAMILIES
from tests.exports.plain import FEATURES
from tests.exports.ropes import FIRST_MAXIMUM, ORIGINAL
from tests.exports.step_wide import RARE
from tests.families.pictures import picture, sound

Request = ScoringRequest | GenerationRequest | RollingRequest
Calls = Sequence[Sequence[Request]]
WORDS = TEXT.split()


class Drawn:
    """Tokens that follow from a seed."""

    def __init__(self, seed: int | str) -> None:
        self.rng = random.Random(seed)

    def words(self, low: int, high: int | None = None) -> list[int]:
        """From `low` to `high` tokens, or exactly `low`."""
        count = low if high is None else self.rng.randint(low, high)
        return [self.rng.randrange(4, VOCAB) for _ in range(count)]


def _answered(prompts: Sequence[Any], most: int, **more: Any) -> list[GenerationRequest]:
    return [GenerationRequest(prompt, max_new_tokens=most, **more) for prompt in prompts]


def _mixed(count: int = 170) -> list[ScoringRequest]:
    """Shared stems, one-token and long targets, one-token and long contexts; three times `count`."""
    drawn = Drawn(5)
    stems, found = [drawn.words(1, 120) for _ in range(20)], []
    for _ in range(count):
        context = drawn.rng.choice(stems) + drawn.words(0, 25)
        found += [ScoringRequest(context, drawn.words(1)), ScoringRequest(context, drawn.words(1, 20))]
        found.append(ScoringRequest(drawn.words(1, 2), drawn.words(1, 40)))
    return found


def mixed(made: Export) -> Calls:
    """510 requests; texts and ids to roll over, one longer than the context; a chat."""
    texts = [" ".join(WORDS[:60]), " ".join(WORDS[200:1400]), "one", "", list(range(10, 40))]
    chat = [{"role": "user", "content": "Ann sees the blue stone"}]
    return _mixed(), [RollingRequest(text) for text in texts], _answered([chat], 20)


def first_tokens(made: Export) -> Calls:
    """The greedy ones of 30 contexts, scored."""
    reference, contexts = causal(made.hf), [one.context for one in _mixed()[:30]]
    return ([ScoringRequest(one, [int(reference.logprobs(one)[-1].argmax())]) for one in contexts],)


def mixed_scores(made: Export, count: int) -> Calls:
    """The first of the 510."""
    return (_mixed()[:count],)


def answers_of_64(made: Export) -> Calls:
    """Twelve prompts that share a stem."""
    drawn = Drawn(3)
    stem = drawn.words(40)
    return (_answered([stem[: drawn.rng.randint(1, 40)] + drawn.words(0, 60) for _ in range(12)], 64),)


def many_lengths(made: Export) -> Calls:
    """Ten prompts and answers: what ends early leaves no idle row."""
    drawn = Drawn(9)
    lengths = [drawn.rng.randint(2, 24) for _ in range(10)]
    return ([GenerationRequest(drawn.words(1, 20), max_new_tokens=most) for most in lengths],)


def windows(made: Export, count: int = 40, longest: int = 150, most: int = 24) -> Calls:
    """Shared and lonely contexts of 1 to `longest` + 20 tokens, with targets of 1 to 20; prompts shorter and longer
    than a window of 16 tokens, one of which crosses it, with answers of up to `most`."""
    drawn, prompts = Drawn(5), Drawn(3)
    stems = [drawn.words(1, longest) for _ in range(5)]
    scored = [ScoringRequest(drawn.rng.choice(stems) + drawn.words(0, 20), drawn.words(1, 20)) for _ in range(count)]
    scored += [ScoringRequest(drawn.words(1, 2), drawn.words(1, 20)) for _ in range(5)]
    answered = _answered([prompts.words(length) for length in (1, 5, 15, 17, 60)], most) if most else []
    return [call for call in (scored, answered) if call]


def _questions(num_questions: int, endings: Sequence[int]) -> list[ScoringRequest]:
    """Questions after shared examples, each with endings of these numbers of tokens; some fill the context to its last
    position."""
    drawn = Drawn(3)
    found = []
    for examples in (drawn.words(200), drawn.words(30), drawn.words(CONTEXT - 40), []):
        for _ in range(num_questions):
            question = examples + drawn.words(5, 30)
            room = CONTEXT + 1 - len(question)
            found += [ScoringRequest(question, drawn.words(min(room, count))) for count in endings]
    return found


def endings(made: Export) -> Calls:
    """Questions, answers of many lengths, and answers that are drawn."""
    drawn = Drawn(5)
    texts = [drawn.words(1, 60) for _ in range(11)]
    drawn_ones = [GenerationRequest([5, 6, 7 + at], max_new_tokens=6, temperature=1.0, seed=at) for at in range(6)]
    answered = [GenerationRequest(text, max_new_tokens=drawn.rng.randint(1, 12)) for text in texts]
    return _questions(4, (1, 6, 90)), answered, drawn_ones


def long_endings(made: Export, longest: int) -> Calls:
    """Up to the context's end."""
    return (_questions(8, (1, 1, 6, longest)),)


def _words(count: int, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(4, 1000) for _ in range(count)]


PROMPTS = [_words(count, seed=count) for count in (5, ORIGINAL - 8, ORIGINAL - 1, ORIGINAL, ORIGINAL + 1, 100)]
SEARCHED = 12
"""Tokens of these answers."""


def both_sides(made: Export) -> Calls:
    """Around the first maximum of positions: texts after one stem that feed from 20 tokens to 110, most of each prefix
    is shared by both sides; texts one by one, so that a slot kept from one is no prefix of a longer one; windows to
    roll over; answers that cross, together and one by one."""
    stem, scored = _words(100), list[ScoringRequest]()
    for kept in (20, 50, 57, ORIGINAL - 2, ORIGINAL - 1, ORIGINAL, ORIGINAL + 1, 75, 100):
        for own in (0, 2):
            context = stem[:kept] + _words(own, seed=kept)
            scored += [ScoringRequest(context, _words(count, seed=count)) for count in (1, 2, 3, 8)]
    random.Random(2).shuffle(scored)
    text, counts = _words(ORIGINAL + 20), (ORIGINAL - 10, ORIGINAL + 10, ORIGINAL - 5, ORIGINAL + 19, 9)
    kept_ones = [[ScoringRequest(text[:count], text[count : count + 1])] for count in counts]
    rolled = [RollingRequest(_words(count, seed=7)) for count in (ORIGINAL - 1, ORIGINAL, ORIGINAL + 1, 110)]
    answered = _answered(PROMPTS, SEARCHED)
    return [scored, *kept_ones, rolled, answered, *([one] for one in answered)]


def one_stem_on_both_sides(made: Export) -> Calls:
    """Six questions of each side."""
    stem = Drawn(1).words(ORIGINAL - 12)
    scored = [ScoringRequest(stem + Drawn(at).words(own), Drawn(at + 9).words(2)) for own in (4, 20) for at in range(6)]
    return (scored,)


def beams_on_one_side(made: Export) -> Calls:
    """Beams of the prompts whose answers do not cross."""
    stay = [prompt for prompt in PROMPTS if not len(prompt) <= ORIGINAL < len(prompt) + SEARCHED - 1]
    assert len(stay) == 3
    return (_answered(stay, SEARCHED, num_beams=3),)


def several_chunks(made: Export) -> Calls:
    """Each alone, and after texts that end in its first chunk."""
    text = _words(500)
    return [
        [ScoringRequest(text[:count], text[count : count + 3]) for count in counts]
        for counts in ([453], [40, 299, 300, 301, 420], [302, 200])
    ]


def lengths_of_frequencies(made: Export) -> Calls:
    """Around the length from which frequencies grow."""
    text, counts = _words(200), (30, ORIGINAL - 1, ORIGINAL, ORIGINAL + 1, 90, 150, 91)
    return [ScoringRequest(text[:count], text[count : count + 4]) for count in counts], _answered(PROMPTS, SEARCHED)


class _Near(Drawn):
    """Draws lengths near those that decide in a graph."""

    def __init__(self, made: Export, seed: int) -> None:
        super().__init__(f"{made.name} {seed}")
        self._limits = FIRST_MAXIMUM.get(made.family, ORIGINAL), WINDOW if made.name in CATALOG else 20
        longest = {"static": 128, "graph": ORIGINAL}  # a provider that is not used would take the second table
        self._longest = longest.get(made.name.rpartition("-")[2], CONTEXT) - 30
        self._stems = [self._tokens(self._length()) for _ in range(4)]

    def _length(self) -> int:
        """Often just before or behind a length that decides."""
        limit = self.rng.choice(self._limits)
        near = [limit + self.rng.randint(-4, 4), limit * 2 // 3, limit + self.rng.randint(1, 80)]
        length = self.rng.choice([*near, self.rng.randint(1, 30), self.rng.randint(1, self._longest)])
        return min(max(length, 1), self._longest)

    def _tokens(self, count: int) -> list[int]:
        tokens = [self.rng.randrange(RARE + 1, 1000) for _ in range(count)]
        if tokens and self.rng.random() < 0.1:
            tokens[self.rng.randrange(count)] = RARE
        return tokens

    def request(self) -> Request:
        """After a part of a stem and something of its own, so that prefixes are shared and end on either side."""
        stem, kind = self.rng.choice(self._stems), self.rng.random()
        kept = self.rng.choice([len(stem), len(stem), min(len(stem), self._length())])
        more = self.rng.choice([0, 1, 2, self.rng.randint(0, 25)])
        context = (stem[:kept] + self._tokens(more))[: self._longest]
        if kind < 0.25:
            return GenerationRequest(context, max_new_tokens=self.rng.choice([1, 3, 8]))
        if kind < 0.3:
            return RollingRequest(context)
        return ScoringRequest(context, self._tokens(self.rng.choice([1, 1, 2, 4, self.rng.randint(1, 28)])))


def near_lengths(made: Export, seed: int) -> Calls:
    """Random texts on both sides of every length that decides in a graph."""
    near = _Near(made, seed)
    return [[near.request()] for _ in range(24)]


def after_stems(made: Export) -> Calls:
    """Stems of odd and even lengths, with ends that leave one token, two, three or many after what is shared; some of
    them once more after what is resident."""
    drawn, found = Drawn(7), list[ScoringRequest]()
    for length in (17,) if IS_EMULATED else (1, 2, 16, 17, 40, 63):
        stem = drawn.words(length)
        found += [
            ScoringRequest(stem + drawn.words(more), drawn.words(ahead)) for more in (0, 1, 2, 3) for ahead in (1, 2, 5)
        ]
        found += [
            ScoringRequest(stem[: length // 2 + 1], drawn.words(1)),
            ScoringRequest(stem, stem[:3] + drawn.words(9)),
        ]
    return found, found[::-3]


SEARCHES: list[dict[str, Any]] = [
    {"num_beams": 2},
    {"num_beams": 4, "early_stopping": True, "length_penalty": 0.0},
    {"num_beams": 4, "early_stopping": "never", "length_penalty": 2.0, "num_return_sequences": 3},
    {"num_beams": 3, "length_penalty": -0.5, "num_return_sequences": 3},
]


def searches(made: Export) -> Calls:
    """Beams over prompts of several lengths."""
    drawn = Drawn(3)
    prompts: list[dict[str, Any]] = [{"prompt": drawn.words(length)} for length in (5, 17, 3, 30)]
    if made.family == "marian":
        prompts = [{"prompt": [0], "source": one["prompt"]} for one in prompts]
    return ([GenerationRequest(**one, max_new_tokens=12, **search) for search in SEARCHES for one in prompts],)


@cache
def sources(takes_features: bool) -> list[Any]:
    """Three of an encoder-decoder: features, or token ids."""
    rng = np.random.default_rng(1)
    if takes_features:
        return [rng.normal(size=FEATURES[1:]).astype(np.float32) for _ in range(3)]
    return [rng.integers(4, VOCAB, length).tolist() for length in (5, 9, 40)]


def _start(made: Export) -> int:
    return 2 if made.family == "whisper" else 0


def scored_sources(made: Export) -> Calls:
    """Contexts that begin alike after sources that alternate: 30 targets, three sources."""
    rng = random.Random(2)
    draw = lambda count: [rng.randrange(4, VOCAB) for _ in range(count)]  # noqa: E731
    stem, three = [_start(made), *draw(12)], sources(made.family == "whisper")
    found = [
        ScoringRequest(stem[: rng.randint(1, 13)] + draw(rng.randint(0, 4)), draw(rng.randint(1, 9)), three[i % 3])
        for i in range(30)
    ]
    return (found,)


def one_source_twice(made: Export) -> Calls:
    """In two calls."""
    first = scored_sources(made)[0][:1]
    return first, first


def answered_sources(made: Export) -> Calls:
    """Three prompts for each of the sources."""
    start = _start(made)
    pairs = [(p, s) for p in ([start], [start, 30], [start, 30, 40, 50]) for s in sources(made.family == "whisper")]
    return ([GenerationRequest(prompt, max_new_tokens=20, source=source) for prompt, source in pairs],)


def translated(made: Export) -> Calls:
    """Texts for the encoder and the decoder."""
    source = "Ann sees the blue stone"
    return [ScoringRequest("", "the old cat", source)], [GenerationRequest(source=source, max_new_tokens=8)]


def heard(made: Export) -> Calls:
    """A short sound and one of nearly a window."""
    sounds = [(noise(0, 3), RATE), (noise(1, 29), RATE)]
    answered = [GenerationRequest(audio=[one], max_new_tokens=20) for one in sounds]
    return answered, [ScoringRequest("", "old cat", audio=[one]) for one in sounds]


def heard_at_random(made: Export, seed: int) -> Calls:
    """Sounds of any length, each asked about several times."""
    rng, words = random.Random(seed), ["old cat", "a", "river number 3", "stone", "the blue"]
    three = [sound(seed * 10 + at, rng.randint(1, 30 * RATE)) for at in range(3)]
    scored = [ScoringRequest("", rng.choice(words), audio=[rng.choice(three)]) for _ in range(8)]
    asked = [GenerationRequest(audio=[rng.choice(three)], max_new_tokens=rng.randint(1, 8)) for _ in range(4)]
    return scored, asked


def heard_beside_others(made: Export) -> Calls:
    """Sounds of many lengths, each answered after one of two prompts, and scored."""
    start, own = list(range(4, 8)), [sound(seed, length) for seed, length in enumerate(LENGTHS)]
    answered = [
        GenerationRequest(start[: 1 + n % 2], max_new_tokens=3 + n % 3, audio=[one]) for n, one in enumerate(own)
    ]
    return answered, [ScoringRequest(start, [20 + n, 30, 40][: 1 + n % 3], audio=[one]) for n, one in enumerate(own)]


def suppressed_scores(made: Export) -> Calls:
    """Of suppressed tokens, too, which may be the most probable ones."""
    from tests.agreement.packages import suppressed

    first, others = suppressed()["begin_suppress_tokens"], suppressed()["suppress_tokens"]
    targets = [[token, *others[:2]] for token in first]
    asked = [ScoringRequest([_start(made)], target, source=source) for source in noises() for target in targets]
    return asked, [ScoringRequest([_start(made)], [token], source=noises()[0]) for token in first]


def suppressed_searches(made: Export, most: int = 4) -> Calls:
    """Greedy answers and beams, shuffled and alone."""
    searches: list[dict[str, Any]] = [
        {},
        {"num_beams": 4},
        {"num_beams": 4, "early_stopping": True, "length_penalty": 0.0, "num_return_sequences": 3},
        {"num_beams": 2, "early_stopping": "never", "length_penalty": 2.0},
    ]
    asked = [GenerationRequest(source=one, max_new_tokens=12, **how) for one in noises() for how in searches[:most]]
    random.Random(len(asked)).shuffle(asked)
    return [asked, *([one] for one in asked[:4])]


@cache
def noises() -> list[Any]:
    """Features of five sounds."""
    return [features(noise(seed, 3)) for seed in range(5)]


@cache
def pictures() -> list[Any]:
    """Of three sizes."""
    return [picture(0, 40, 40), picture(1, 60, 30), picture(2, 24, 70)]


@cache
def sounds() -> list[Any]:
    """Of three lengths."""
    return [sound(0, 9000), sound(1, 24321), sound(2, 50000)]


def items(made: Export) -> list[Any]:
    """Three pictures or sounds, whichever a family takes."""
    return sounds() if made.family in SOUND_FAMILIES else pictures()


def marker(made: Export) -> str:
    """What a prompt holds for one."""
    return {**MEDIA_FAMILIES, **SOUND_FAMILIES}[made.family].marker


def with_items(made: Export, given: Sequence[Any]) -> dict[str, Any]:
    """The fields of a request."""
    return {"audio" if made.family in SOUND_FAMILIES else "images": list(given)}


def scored_items(made: Export) -> Calls:
    """Targets after three items, some of which share an item, a text before it, or both; after two items; and texts."""
    word, own, (first, second, _) = marker(made), items(made), items(made)
    targets, hears = (" blue stone", " of the garden number"), made.family in SOUND_FAMILIES
    asked: list[tuple[str, str, list[Any]]] = [
        (f"Ann {verb} the {word} and", target, [one])
        for one in own
        for verb in ("hears" if hears else "sees", "paints")
        for target in targets
    ]
    if not hears:
        asked += [(word, target, [second]) for target in targets]
        pairs = [[first, second], [first, first]]
        asked += [(f"Ann sees the {word} and {word} here", " a letter", pair) for pair in pairs]
        asked.append(("Ann sees the", " quiet engine", []))
    asked.append(("Bob carries the heavy", " wheel", []))
    return ([ScoringRequest(text, target, **with_items(made, given)) for text, target, given in asked],)


def scored_sounds(made: Export) -> Calls:
    """Those items, two sounds of one length, and one twice."""
    word, (_, second, _) = marker(made), sounds()
    pairs = [[second, sound(3, len(second[0]))], [second, second]]
    both = [ScoringRequest(f"Ann hears the {word} and {word} here", " a letter", audio=pair) for pair in pairs]
    return ([*scored_items(made)[0], *both],)


def answered_items(made: Export) -> Calls:
    """Some prompts end with the item, and are asked twice; and a text."""
    word, hears = marker(made), made.family in SOUND_FAMILIES
    texts = [
        f"Ann {'hears' if hears else 'sees'} the {word} and",
        *([] if hears else [word, word, f"Ann sees the {word}"]),
    ]
    asked = [
        GenerationRequest(text, max_new_tokens=12, **with_items(made, [one])) for text in texts for one in items(made)
    ]
    return ([*asked, GenerationRequest("Ann sees the", max_new_tokens=12)],)


def picture_and_sound(made: Export) -> Calls:
    """In one prompt, and the sound without the picture."""
    text, seen, given = "Ann sees <|image|> and hears <|audio|> here", pictures()[:1], sounds()[:1]
    both = ScoringRequest(text, " blue stone", images=seen, audio=given)
    return ([both, ScoringRequest(text.replace("<|image|>", ""), " blue stone", audio=given)],)


def texts_without_items(made: Export) -> Calls:
    """Questions after two stems."""
    stems = ("Ann sees the quiet engine and ", "Bob carries the heavy " * 3)
    return ([ScoringRequest(a + b, c) for a in stems for b in ("a", "the") for c in (" wheel", " stone")],)


SIZES = [(40, 40), (60, 30), (24, 70), (64, 64), (30, 30), (50, 20), (20, 60), (64, 40), (33, 33), (48, 48)]
"""Of pictures of 4 to 16 tokens."""

LENGTHS = [9000, 16000, 20000, 31000, 5000, 12345, 40000]


def items_of_many_sizes(made: Export) -> Calls:
    """After texts of many lengths: one in a prompt, three, none; scored and answered."""
    word, hears = marker(made), made.family in SOUND_FAMILIES
    given = [sound(at, length) for at, length in enumerate(LENGTHS)] if hears else []
    given = given or [picture(at, *size) for at, size in enumerate(SIZES)]
    text = "and the heavy blue wheel of a garden number "
    asked = [
        ScoringRequest(f"{text[: 5 * n]}{word} and", " stone", **with_items(made, [one])) for n, one in enumerate(given)
    ]
    asked.append(ScoringRequest(f"{word}, {word} and {word} are", " letters", **with_items(made, given[:3])))
    asked += [ScoringRequest(text[:n], " stone") for n in (3, 17, 40)]
    answered = [GenerationRequest(one.context, max_new_tokens=4, images=one.images, audio=one.audio) for one in asked]
    return asked, answered


def pictures_of_many_sizes(made: Export, count: int = len(SIZES)) -> Calls:
    """One in each prompt."""
    own = [picture(at, *size) for at, size in enumerate(SIZES[:count])]
    return ([ScoringRequest(f"{marker(made)} and", " stone", images=[one]) for one in own],)


def pictures_there_and_back(made: Export) -> Calls:
    """Prompts of many lengths, each asked after longer and after shorter ones."""
    texts, targets = ("<image>", "Ann sees the <image> and a heavy wheel of"), (" stone", " of the garden number")
    asked = [
        ScoringRequest(text, target, images=[one]) for one in pictures()[:2] for text in texts for target in targets
    ]
    return ([*asked, *reversed(asked)],)


def pictures_of_one_size(made: Export, count: int) -> Calls:
    """One in each prompt."""
    return ([ScoringRequest("<image> and", " stone", images=[picture(at, 32, 32)]) for at in range(count)],)


def sounds_that_grow(made: Export, by: int = 4000) -> Calls:
    """Seven, each longer by so many samples than the one before, one in each prompt."""
    own = [sound(at, 9000 + by * at) for at in range(7)]
    return ([ScoringRequest(f"{marker(made)} and", " stone", audio=[one]) for one in own],)


def steps_ahead(made: Export) -> Calls:
    """More answers than there are slots, of many lengths; some end by a stop string that any text of theirs has."""
    drawn = Drawn(8)
    asked = [
        GenerationRequest(drawn.words(3 + 5 * i), max_new_tokens=4 + 6 * i, stop=["e", "th"] if i % 3 == 2 else [])
        for i in range(8)
    ]
    return asked, asked[:2]


def short_answers(made: Export) -> Calls:
    """Five questions after one stem, each with seven answers of four tokens."""
    drawn = Drawn(3)
    stem = drawn.words(40)
    contexts = [stem + drawn.words(drawn.rng.randrange(8, 24)) for _ in range(5)]
    return ([ScoringRequest(one, [4 + number, *drawn.words(3)]) for one in contexts for number in range(7)],)


def scored_forks(made: Export) -> Calls:
    """Prefixes of one stem."""
    return forks(made)[:1]


def forks(made: Export) -> Calls:
    """Prefixes of one stem, scored and answered."""
    drawn = Drawn(7)
    stem, *tails = (drawn.words(length) for length in (60, 3, 8, 1, 20))
    scored = [ScoringRequest(stem[: 20 + 13 * i], tail) for i, tail in enumerate(tails)]
    return scored, _answered([stem + tail for tail in tails], 9)


def many_tails(made: Export) -> Calls:
    """Tails of 1 to 12 tokens and single ones after parts of one stem; texts to roll over, one longer than the context;
    some are answered."""
    drawn = Drawn(9)
    stem, *tails = (drawn.words(length) for length in (70, *range(1, 13)))
    scored = [ScoringRequest(stem[: 10 * (i % 7) + 1], tail) for i, tail in enumerate(tails)]
    scored += [ScoringRequest(stem, [token]) for token in range(4, 10)]
    rolled = [RollingRequest(text) for text in (" ".join(WORDS[:50]), " ".join(WORDS[300:900]), "one", "")]
    return scored, rolled, _answered(tails[:7], 7)
