"""Frames of sentences, each with the orders of its parts that the rules license."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import factorial

from dakota1890.corpus import SentenceWord
from dakota1890.draws import Draws
from dakota1890.families.conjugate import PERSON_NAMES
from dakota1890.families.sentences.bank import ANIMATE, WordBank, bank
from dakota1890.families.sentences.english import clause, quality_clause, sentence
from dakota1890.families.sentences.parts import (
    DEMONSTRATIVES,
    PLURAL_DETERMINERS,
    NounPhrase,
    Part,
    english_noun,
    join_parts,
    noun_phrase,
    particle,
    single,
    with_a,
)
from dakota1890.families.sentences.predicates import STATEMENTS, Predicate

FEWEST_ORDERS = 60
"""Minimum number of different sequences of a sentence's words."""

_ATTEMPTS = 1_000
_MODES = tuple(STATEMENTS)
_ONE = ("the", "this", "that")
_NOUN_PHRASE = "noun, adjective, article, demonstrative"
_EITHER_FIRST = ((0, 1, 2), (1, 0, 2))


@dataclass(frozen=True, kw_only=True, slots=True)
class Sentence:
    """Sentence of one `frame`. `orders` are the licensed orders of its parts, the preferred one first.

    rule: the order as text; inflected: how the verb is inflected.
    """

    frame: str
    mode: str
    english: str
    parts: tuple[Part, ...]
    orders: tuple[tuple[int, ...], ...] = ()
    rule_ids: tuple[str, ...]
    rule: str
    inflected: str

    def texts(self, *, all_spellings: bool = True) -> tuple[str, ...]:
        """Return the text of every licensed order, the preferred one first, in all spellings if requested."""
        spellings = [part.forms if all_spellings else part.forms[:1] for part in self.parts]
        texts = (
            " ".join(word for i in order for word in forms[i])
            for forms in product(*spellings)
            for order in self.orders or (tuple(range(len(self.parts))),)
        )
        return tuple(dict.fromkeys(texts))


SentenceDrawer = Callable[[Draws, WordBank], Sentence | None]
"""Function that draws a sentence of one frame, or returns None if nothing fits."""

Filling = tuple[str, tuple[Part, ...]]
"""English and parts between the subject and the predicate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Statement:
    """Frame whose last part is the predicate.

    use: that of the predicate, as in `WordBank`. fill: draws the parts before it, or returns None if nothing
    fits. subject: noun, pointed (a noun with a demonstrative) or pronoun (not expressed in Dakota).
    """

    frame: str
    use: str
    fill: Callable[[Draws, WordBank, Predicate], Filling | None]
    subject: str = "noun"
    orders: tuple[tuple[int, ...], ...] = ()
    rule_ids: tuple[str, ...] = ()
    rule: str = "subject, object, verb, then what follows the verb"


def draw_sentence(draws: Draws) -> Sentence:
    """Return a sentence whose words have at least `FEWEST_ORDERS` sequences.

    Three in four times its words are ones that training may use.
    """
    train = draws.below(4) > 0
    words, frames = bank(train=train), _TRAIN_FRAMES if train else _FRAMES
    for _ in range(_ATTEMPTS):
        drawn = draws.pick(frames)(draws, words)
        if drawn is not None and _says_each_once(drawn.parts) and _sequences(drawn.parts) >= FEWEST_ORDERS:
            return drawn
    raise AssertionError(f"no sentence in {_ATTEMPTS} draws")


def _says_each_once(parts: Sequence[Part]) -> bool:
    """Return True if no content word occurs twice."""
    lemmas = [lemma for part in parts for lemma in part.lemma_ids]
    return len(set(lemmas)) == len(lemmas)


def _sequences(parts: Sequence[Part]) -> int:
    words = [word for part in parts for word in part.forms[0]]
    count = factorial(len(words))
    for word in set(words):
        count //= factorial(words.count(word))
    return count


def _state(frame: Statement, draws: Draws, words: WordBank) -> Sentence | None:
    """Draw a sentence of a frame whose last part is the predicate."""
    mode, third = draws.pick(_MODES), frame.subject != "pronoun"
    predicate = _pick(draws, words.predicates(frame.use, mode, third=third))
    if predicate is None or (not third and "person" not in predicate.word.kinds):
        return None
    subject = _subject(draws, words, predicate, pointed=frame.subject == "pointed") if third else None
    filling = frame.fill(draws, words, predicate)
    if filling is None:
        return None
    rest, parts = filling
    english = clause(
        subject.english if subject else PERSON_NAMES[predicate.person],
        predicate.person,
        predicate.word.english,
        mode,
        rest,
    )
    every = (*([subject.part] if subject else []), *parts, predicate.part)
    return Sentence(
        frame=frame.frame,
        mode=mode,
        english=sentence(english, mode),
        parts=every,
        orders=frame.orders,
        rule_ids=("SYN-01", *frame.rule_ids, *_rule_ids(every)),
        rule=frame.rule,
        inflected=predicate.part.rule,
    )


def _object(draws: Draws, words: WordBank, predicate: Predicate) -> Filling:
    noun = draws.pick(words.nouns(predicate.word.object_kinds))
    obj = _phrase(draws, words, noun, draws.pick(_ONE if "mass" in noun.kinds else (*_ONE, "a")))
    return obj.english, (obj.part,)


def _place(draws: Draws, words: WordBank, predicate: Predicate) -> Filling | None:
    """Draw a noun and its postposition; some postpositions combine only with verbs of motion."""
    where = draws.pick(words.role("postposition"))
    if not where.object_kinds <= predicate.word.kinds:
        return None
    noun = draws.pick(words.nouns(where.kinds))
    spoken = noun.english[0] if "mass" in noun.kinds else with_a(noun.english[0])
    return f"{where.english[0]} {spoken}", (join_parts(single(noun), single(where)),)


def _adverb(draws: Draws, words: WordBank, predicate: Predicate) -> Filling:
    adverb = draws.pick(words.role("adverb"))
    return adverb.english[0], (single(adverb),)


def _company(draws: Draws, words: WordBank, predicate: Predicate) -> Filling | None:
    several = draws.below(2) == 1
    noun = draws.pick(words.nouns(predicate.word.kinds))
    phrase = _phrase(draws, words, noun, draws.pick(("these", "those") if several else ("this", "that")))
    company = next((w for w in words.role("company") if (w.word == "om") == several), None)
    return None if company is None else (f"with {phrase.english}", (phrase.part, single(company)))


def _joined(draws: Draws, words: WordBank, predicate: Predicate) -> Filling:
    things = words.nouns(predicate.word.object_kinds - ANIMATE)
    # Sorted, because the same sentence in reverse is the same fact.
    one, other = sorted((draws.pick(things), draws.pick(things)), key=lambda thing: thing.word)
    english = " and ".join(english_noun(noun, plural=True) for noun in (one, other))
    return english, (single(one), single(other), particle("ko"))


def _if(draws: Draws, words: WordBank) -> Sentence | None:
    """Draw a condition, which comes first and ends in kiŋhaŋ (SYN-03), which is ćiŋhaŋ after e."""
    condition = _pick(draws, words.predicates("act", "plain", third=True))
    predicate = _pick(draws, words.predicates("act on", "future"))
    if predicate is None or "person" not in predicate.word.kinds:
        return None
    if condition is None or condition.part.forms[0][0].endswith(("a", "aŋ", "e")):
        return None
    subject = _subject(draws, words, condition)
    noun = draws.pick(words.nouns(predicate.word.object_kinds))
    obj, person = _phrase(draws, words, noun, "the"), predicate.person
    first = clause(subject.english, condition.person, condition.word.english, "plain", "")
    then = clause(PERSON_NAMES[person], person, predicate.word.english, "future", obj.english)
    parts = (subject.part, condition.part, particle("kiŋhaŋ"), obj.part, predicate.part)
    return Sentence(
        frame="if",
        mode="future",
        english=sentence(f"if {first}, {then}", "future"),
        parts=parts,
        rule_ids=("SYN-01", "SYN-03", *_rule_ids(parts)),
        rule="the condition comes first and ends in kiŋhaŋ; in each clause the verb is last",
        inflected="; ".join(dict.fromkeys((condition.part.rule, predicate.part.rule))),
    )


def _quality(draws: Draws, words: WordBank) -> Sentence | None:
    """Draw an adjective after the article as the predicate of a noun (ADJ-02).

    The adjective has -pi for several animate nouns (ADJ-04).
    """
    predicate = _pick(draws, words.predicates("be", draws.pick(_MODES), third=True))
    if predicate is None:
        return None
    noun = draws.pick(words.nouns(predicate.word.kinds))
    animate, marked = bool(noun.kinds & ANIMATE), predicate.person == "3pl"
    if marked and not animate:
        return None
    several = marked if animate else draws.below(2) == 1 and "mass" not in noun.kinds
    subject = _phrase(draws, words, noun, draws.pick(PLURAL_DETERMINERS if several else _ONE))
    degrees = words.role("degree") if predicate.mode == "plain" else ()
    degree = draws.pick(degrees) if degrees and draws.below(2) else None
    parts = (subject.part, *([single(degree)] if degree else []), predicate.part)
    quality = " ".join(word.english[0] for word in (degree, predicate.word) if word)
    english = quality_clause(subject.english, plural=several, quality=quality, mode=predicate.mode)
    more = (*(("ADJ-03",) if degree else ()), *(("ADJ-04",) if marked else ()))
    return Sentence(
        frame="quality",
        mode=predicate.mode,
        english=sentence(english, predicate.mode),
        parts=parts,
        rule_ids=("ADJ-02", *more, *_rule_ids(parts)),
        rule="what is said of a noun follows its article and demonstrative; very and most precede it",
        inflected="it takes -pi where it is said of several animate ones",
    )


_OBJECT = Statement(frame="object", use="act on", fill=_object)
_PLACE = Statement(
    frame="place",
    use="act somewhere",
    fill=_place,
    subject="pointed",  # the demonstrative shows which noun the article belongs to
    orders=_EITHER_FIRST,
    rule_ids=("POST-01",),
    rule="a word like on or in follows its noun, and both precede the verb",
)
_ADVERB = Statement(
    frame="adverb",
    use="act",
    fill=_adverb,
    orders=_EITHER_FIRST,
    rule_ids=("SYN-08",),
    rule=f"{_NOUN_PHRASE}; an adverb precedes the verb",
)
_COMPANY = Statement(
    frame="company",
    use="act",
    fill=_company,
    subject="pronoun",
    rule_ids=("POST-01", "POST-02"),
    rule="kići is with one, om with several; it follows its noun, and both precede the verb",
)
_JOINED = Statement(
    frame="joined",
    use="act on things",
    fill=_joined,
    subject="pronoun",
    orders=((0, 1, 2, 3), (1, 0, 2, 3)),
    rule_ids=("SYN-02", "NOUN-10"),
    rule="ko follows the two words that it joins; then the verb",
)

_STATEMENTS = ((_OBJECT, 5), (_PLACE, 3), (_ADVERB, 2), (_JOINED, 2))
_TRAIN_FRAMES: tuple[SentenceDrawer, ...] = (
    *(partial(_state, frame) for frame, share in _STATEMENTS for _ in range(share)),
    *[_quality] * 4,
)
_FRAMES: tuple[SentenceDrawer, ...] = (*_TRAIN_FRAMES, *[partial(_state, _COMPANY)] * 3, *[_if] * 3)


def _pick(draws: Draws, candidates: Sequence[Predicate]) -> Predicate | None:
    return draws.pick(candidates) if candidates else None


def _subject(draws: Draws, words: WordBank, predicate: Predicate, *, pointed: bool = False) -> NounPhrase:
    """Draw one noun or several, as the predicate requires; if `pointed`, with a demonstrative."""
    noun = draws.pick(words.nouns(predicate.word.kinds))
    determiners: tuple[str, ...] = PLURAL_DETERMINERS if predicate.person == "3pl" else (*_ONE, "a")
    if pointed:
        determiners = tuple(word for word in determiners if word in DEMONSTRATIVES)
    return _phrase(draws, words, noun, draws.pick(determiners))


def _phrase(draws: Draws, words: WordBank, noun: SentenceWord, determiner: str) -> NounPhrase:
    adjectives = words.adjectives(noun, before_the=determiner != "a")
    adjective = draws.pick(adjectives) if adjectives and draws.below(3) == 0 else None
    return noun_phrase(noun, adjective, determiner)


def _rule_ids(parts: Sequence[Part]) -> tuple[str, ...]:
    return tuple(rule_id for part in parts for rule_id in part.rule_ids)
