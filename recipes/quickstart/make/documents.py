"""Writes the valley down: stories with endings, quizzes, number problems, and plain notes about people.

Each generator takes the random generator and whether to draw from the held-out combinations. Knows no file and no
tokenizer.
"""

from dataclasses import dataclass
from random import Random

from world import COLOURS, FOODS, OBJECTS, PEOPLE, PETS, PLACES, RELATIONS, TIMES, Person, is_held_out

QUIZ_TITLE = "The following are questions about the people of the valley.\n\n"
LETTERS = "ABCD"


@dataclass(frozen=True)
class Choice:
    """A context and four continuations (or a question and four options), one of them right."""

    context: str
    options: list[str]
    answer: int

    @property
    def right(self) -> str:
        return self.options[self.answer]


@dataclass(frozen=True)
class Problem:
    """A number problem, its worked solution and the number that the solution ends with."""

    question: str
    solution: str
    answer: int


def shuffled(rng: Random, context: str, right: str, wrong: list[str]) -> Choice:
    options = [right, *wrong]
    rng.shuffle(options)
    return Choice(context, options, options.index(right))


def until_held_out(rng: Random, want: bool, draw):
    """Draw until the combination is on the wanted side of the split."""
    while True:
        drawn = draw(rng)
        if is_held_out(*drawn) == want:
            return drawn


def people(rng: Random, count: int) -> list[Person]:
    return rng.sample(PEOPLE, count)


# Stories -----------------------------------------------------------------------------------------------------------


def story(rng: Random, held_out: bool, mix: tuple[int, int, int] = (2, 4, 4)) -> Choice:
    """One story without its last sentence, and four last sentences; (hero, object) decides the split.

    `mix` weighs stories about places, about gifts and about going home, from hard to easy.
    """
    name, thing = until_held_out(rng, held_out, lambda r: (r.choice(PEOPLE).name, r.choice(OBJECTS)))
    hero = next(person for person in PEOPLE if person.name == name)
    kind = rng.choices((moves_story, gifts_story, home_story), mix)[0]
    return kind(rng, hero, thing)


def opening(rng: Random, hero: Person, thing: str) -> str:
    when, colour = rng.choice(TIMES), rng.choice(COLOURS)
    return rng.choice((
        f"One {when} {hero.name} the {hero.trade} found a {colour} {thing}.",
        f"One {when} in {hero.village}, {hero.name} found a {colour} {thing}.",
        f"{hero.name} the {hero.trade} had a {colour} {thing}.",
        f"{hero.name} lived in {hero.village} with a {hero.pet} and had a {colour} {thing}.",
    ))  # fmt: skip


def move(rng: Random, who: str, thing: str, place: str) -> str:
    return rng.choice((
        f" {who} took the {thing} to the {place}.",
        f" Then {who} carried the {thing} to the {place}.",
        f" After that {who} hid the {thing} in the {place}.",
    ))  # fmt: skip


def moves_story(rng: Random, hero: Person, thing: str) -> Choice:
    """Two things are carried away; the ending says where one of them is and who brought it there."""
    others = [person.name for person in people(rng, 3) if person is not hero][:2]
    cast = [hero.name, *others]
    things = [thing, rng.choice([other for other in OBJECTS if other != thing])]
    places = rng.sample(PLACES, 5)
    text = opening(rng, hero, thing) + f" {others[0]} had a {things[1]}."
    where = {}
    for moved, place in zip(things, places, strict=False):
        who = rng.choice(cast)
        where[moved] = (place, who)
        text += move(rng, who, moved, place)
    asked, other = rng.sample(things, 2)
    (place, who), (false_place, _) = where[asked], where[other]
    false_who = rng.choice([name for name in cast if name != who])
    tail = rng.choice(("where {} had left it", "because {} took it there"))

    def ending(place: str, who: str) -> str:
        return f" {place}, {tail.format(who)}."

    wrong = [ending(place, false_who), ending(false_place, who), ending(places[4], false_who)]
    return shuffled(rng, f"{text} In the end the {asked} was in the", ending(place, who), wrong)


def gifts_story(rng: Random, hero: Person, thing: str) -> Choice:
    """One of three things changes hands; the ending says who has two of them."""
    others = [person.name for person in people(rng, 3) if person is not hero][:2]
    cast = [hero.name, *others]
    things = [thing, *rng.sample([other for other in OBJECTS if other != thing], 2)]
    owner = dict(zip(things, cast, strict=True))
    text = opening(rng, hero, thing) + f" {cast[1]} had a {things[1]} and {cast[2]} had a {things[2]}."
    given = rng.choice(things)
    taker = rng.choice([name for name in cast if name != owner[given]])
    text += rng.choice((
        f" {owner[given]} gave the {given} to {taker}.",
        f" {taker} bought the {given} from {owner[given]}.",
    ))  # fmt: skip
    owner[given] = taker
    first, second = rng.sample(things, 2)

    def ending(one: str, two: str) -> str:
        return f" {first} belonged to {one} and the {second} to {two}."

    pairs = [(one, two) for one in cast for two in cast if (one, two) != (owner[first], owner[second])]
    wrong = [ending(*pair) for pair in rng.sample(pairs, 3)]
    return shuffled(rng, f"{text} At night the", ending(owner[first], owner[second]), wrong)


def home_story(rng: Random, hero: Person, thing: str) -> Choice:
    """The hero goes home, and the ending follows from what is known of the hero."""
    text = opening(rng, hero, thing)
    text += f" {hero.pronoun.capitalize()} put the {thing} in the {rng.choice(PLACES)} and walked home."

    def ending(village: str, pet: str, food: str) -> str:
        return f" {village}, fed the {pet} and ate some {food}."

    right = ending(hero.village, hero.pet, hero.food)
    wrong: set[str] = set()
    while len(wrong) < 3:
        stranger = rng.choice(PEOPLE)
        mixed = ending(*(rng.choice((getattr(hero, r), getattr(stranger, r))) for r in ("village", "pet", "food")))
        wrong |= {mixed} - {right}
    return shuffled(rng, f"{text} Soon {hero.name} was back in", right, sorted(wrong))


# Quizzes -----------------------------------------------------------------------------------------------------------

ASK = {
    "trade": "What is the trade of {}?",
    "village": "Where does {} live?",
    "pet": "Which animal does {} keep?",
    "food": "What does {} like to eat?",
}


KINDS = {"an animal": PETS, "a food": FOODS, "a thing": OBJECTS, "a place": PLACES}


def quiz(rng: Random, held_out: bool) -> Choice:
    """A question with four options, from easy to hard for a small model."""
    kind = rng.choices((kind_of_one, kind_of_two, name_kind), (3, 4, 3))[0]
    return kind(rng, held_out)


def sight(rng: Random, held_out: bool) -> tuple[str, str, int]:
    """Who saw which word, and its kind; (name, word) decides the split."""

    def draw(rng: Random) -> tuple[str, str]:
        return rng.choice(PEOPLE).name, rng.choice(list(KINDS.values())[rng.randrange(len(KINDS))])

    name, word = until_held_out(rng, held_out, draw)
    return name, word, next(index for index, words in enumerate(KINDS.values()) if word in words)


def kind_of_one(rng: Random, held_out: bool) -> Choice:
    """What kind of thing somebody saw; the options are always the same four, in the same order."""
    name, word, kind = sight(rng, held_out)
    return Choice(f"{name} saw the {word}. What was it?", list(KINDS), kind)


def kind_of_two(rng: Random, held_out: bool) -> Choice:
    """As `kind_of_one`, but two people saw things of two kinds, and one of the two is asked about."""
    first, second = sight(rng, held_out), sight(rng, held_out)
    while first[0] == second[0] or first[2] == second[2]:
        second = sight(rng, held_out)
    name, _, kind = rng.choice((first, second))
    seen = " and ".join(f"{who} saw the {word}" for who, word, _ in (first, second))
    return Choice(f"{seen}. What was it that {name} saw?", list(KINDS), kind)


def name_kind(rng: Random, held_out: bool) -> Choice:
    """Which of four words, one of every kind in any order, is of the asked kind; the four words decide the split."""
    words = until_held_out(rng, held_out, lambda r: [r.choice(values) for values in KINDS.values()])
    asked = rng.randrange(len(words))
    wrong = [word for index, word in enumerate(words) if index != asked]
    return shuffled(rng, f"Which of these is {list(KINDS)[asked]}?", words[asked], wrong)


def quiz_text(question: Choice) -> str:
    """The prompt exactly as the task's `doc_to_text` renders it."""
    options = "".join(f"\n{letter}. {option}" for letter, option in zip(LETTERS, question.options, strict=True))
    return f"{question.context}{options}\nAnswer:"


# Problems ----------------------------------------------------------------------------------------------------------


def problem(rng: Random, held_out: bool) -> Problem:
    """One or two sums about somebody's goods; the first two numbers decide the split."""
    start, change = until_held_out(rng, held_out, lambda r: (r.randint(10, 99), r.randint(2, 89)))
    hero, friend = (person.name for person in people(rng, 2))
    goods = rng.choice(("plums", "eggs", "coins", "nuts", "pears", "apples", "onions", "candles"))
    text, steps, total = f"Problem: {hero} had {start} {goods}.", "", start
    for step in range(rng.choices((1, 2), (6, 4))[0]):
        change = change if step == 0 else rng.randint(2, 60)
        adds = total - change < 0 or (total + change < 200 and rng.random() < 0.6)
        verbs = ("bought {} more", f"got {{}} from {friend}") if adds else ("sold {}", f"gave {{}} to {friend}")
        text += f" Then {hero} {rng.choice(verbs).format(change)}."
        worked, total = work(total, change, adds)
        steps += worked
    return Problem(f"{text} How many {goods} now?\nSolution:", f"{steps} The answer is {total}.", total)


def work(total: int, change: int, adds: bool) -> tuple[str, int]:
    """The written column sum, digit by digit from the right, and its result."""
    (tens, ones), (more_tens, more_ones) = divmod(total, 10), divmod(change, 10)
    if adds:
        result = total + change
        column = f"{ones}+{more_ones}={ones + more_ones}, {tens}+{more_tens}"
        column += "+1" if ones + more_ones > 9 else ""
    else:
        result = total - change
        borrow = ones < more_ones
        column = f"{ones + 10 * borrow}-{more_ones}={(ones - more_ones) % 10}, {tens}-{more_tens}"
        column += "-1" if borrow else ""
    sign = "+" if adds else "-"
    return f" {column}={result // 10}, {total}{sign}{change}={result}.", result


# Notes -------------------------------------------------------------------------------------------------------------

TELL = {
    "trade": ("{n} is a {v}.", "The trade of {n} is {v}."),
    "village": ("{n} lives in {v}.", "The home of {n} is {v}."),
    "pet": ("{n} keeps a {v}.", "The animal of {n} is a {v}."),
    "food": ("{n} likes to eat {v}.", "The food of {n} is {v}."),
}


def note(rng: Random) -> str:
    """Facts about a few people, told or asked and answered. Nothing here is held out: these are the lessons."""
    lines = []
    asks = rng.random() < 0.5
    for person in people(rng, rng.randint(2, 6)):
        relations = rng.sample(list(RELATIONS), rng.randint(1, 4))
        if asks:
            lines += [f"{ASK[r].format(person.name)} {getattr(person, r)}" for r in relations]
        else:
            lines.append(" ".join(rng.choice(TELL[r]).format(n=person.name, v=getattr(person, r)) for r in relations))
    return "\n".join(lines)
