"""The frames of sentences, each with the orders of its parts that the rules license."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from math import factorial

from dakota1890.corpus import SentenceWord
from dakota1890.draws import Draws
from dakota1890.families.conjugate import PERSON_NAMES
from dakota1890.families.sentences.bank import ANIMATE, Bank, bank
from dakota1890.families.sentences.english import being, clause, sentence
from dakota1890.families.sentences.parts import (
    DEMONSTRATIVES,
    PLURAL_DETERMINERS,
    NounPhrase,
    Part,
    english_noun,
    noun_phrase,
    particle,
    single,
    together,
    with_a,
)
from dakota1890.families.sentences.predicates import COMMANDS, STATEMENTS, Predicate

FEWEST_ORDERS = 60
"""The least number of different sequences of the words of a sentence."""

_ATTEMPTS = 1_000
_MODES = tuple(STATEMENTS)
_ONE = ("the", "this", "that")
_SUBJECT_OBJECT_VERB = "subject, object, verb, then what follows the verb"
_NOUN_PHRASE = "noun, adjective, article, demonstrative"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sentence:
    """A sentence of one `frame`. orders: the licensed orders of its parts, the preferred one first.

    rule: the order in words; inflected: how the verb is inflected.
    """

    frame: str
    mode: str
    english: str
    parts: tuple[Part, ...]
    orders: tuple[tuple[int, ...], ...]
    rule_ids: tuple[str, ...]
    rule: str
    inflected: str
    facts: tuple[str, ...] = ()
    cells: tuple[str, ...] = ()

    def texts(self, *, all_spellings: bool = True) -> tuple[str, ...]:
        """Every licensed order, the preferred one first, in every licensed spelling if so asked."""
        spellings = [part.forms if all_spellings else part.forms[:1] for part in self.parts]
        found = (
            " ".join(word for i in order for word in forms[i])
            for forms in product(*spellings)
            for order in self.orders
        )
        return tuple(dict.fromkeys(found))


def draw_sentence(draws: Draws) -> Sentence:
    """A sentence whose words have at least `FEWEST_ORDERS` sequences: three in four times one of words that
    training may see.
    """
    train = draws.below(4) > 0
    words, frames = bank(train=train), _TRAIN_FRAMES if train else _FRAMES
    for _ in range(_ATTEMPTS):
        drawn = draws.pick(frames)(draws, words)
        if drawn is not None and _says_each_once(drawn.parts) and _sequences(drawn.parts) >= FEWEST_ORDERS:
            return drawn
    raise AssertionError(f"no sentence in {_ATTEMPTS} draws")


def _says_each_once(parts: Sequence[Part]) -> bool:
    """Whether no content word is there twice."""
    lemmas = [lemma for part in parts for lemma in part.lemma_ids]
    return len(set(lemmas)) == len(lemmas)


def _sequences(parts: Sequence[Part]) -> int:
    words = [word for part in parts for word in part.forms[0]]
    count = factorial(len(words))
    for word in set(words):
        count //= factorial(words.count(word))
    return count


def _object(draws: Draws, words: Bank) -> Sentence | None:
    predicate = _pick(draws, words.predicates("act on", draws.pick(_MODES), third=True))
    if predicate is None:
        return None
    subject = _subject(draws, words, predicate)
    noun = draws.pick(words.nouns(predicate.word.object_kinds))
    obj = _phrase(draws, words, noun, draws.pick(_ONE if "mass" in noun.kinds else (*_ONE, "a")))
    return _statement("object", predicate, subject.english, obj.english, (subject.part, obj.part))


def _them(draws: Draws, words: Bank) -> Sentence | None:
    """Several animate objects are marked on the verb too (VERB-18)."""
    predicate = _pick(draws, words.predicates("act on them", draws.pick(_MODES), third=True))
    if predicate is None:
        return None
    subject = _subject(draws, words, predicate)
    noun = draws.pick(words.nouns(predicate.word.object_kinds & ANIMATE))
    obj = _phrase(draws, words, noun, draws.pick(PLURAL_DETERMINERS))
    return _statement(
        "them", predicate, subject.english, obj.english, (subject.part, obj.part), rule_ids=("VERB-18",)
    )


def _acting(draws: Draws, words: Bank) -> Sentence | None:
    predicate = _pick(draws, words.predicates("act", draws.pick(_MODES), third=True))
    if predicate is None:
        return None
    subject = _subject(draws, words, predicate)
    return _statement("subject", predicate, subject.english, "", (subject.part,), rule=_NOUN_PHRASE)


def _place(draws: Draws, words: Bank) -> Sentence | None:
    """The demonstrative shows which noun the article belongs to."""
    predicate = _pick(draws, words.predicates("act somewhere", draws.pick(_MODES), third=True))
    if predicate is None:
        return None
    subject = _subject(draws, words, predicate, pointed=True)
    where = draws.pick(words.role("postposition"))
    # Some go only with verbs of motion.
    if not where.object_kinds <= predicate.word.kinds:
        return None
    noun = draws.pick(words.nouns(where.kinds))
    spoken = noun.english[0] if "mass" in noun.kinds else with_a(noun.english[0])
    return _statement(
        "place",
        predicate,
        subject.english,
        f"{where.english[0]} {spoken}",
        (subject.part, together(single(noun), single(where))),
        orders=((0, 1, 2), (1, 0, 2)),
        rule_ids=("POST-01",),
        rule="a word like on or in follows its noun, and both precede the verb",
    )


def _adverb(draws: Draws, words: Bank) -> Sentence | None:
    predicate = _pick(draws, words.predicates("act", draws.pick(_MODES), third=True))
    if predicate is None:
        return None
    subject, adverb = _subject(draws, words, predicate), draws.pick(words.role("adverb"))
    return _statement(
        "adverb",
        predicate,
        subject.english,
        adverb.english[0],
        (subject.part, single(adverb)),
        orders=((0, 1, 2), (1, 0, 2)),
        rule_ids=("SYN-08",),
        rule=f"{_NOUN_PHRASE}; an adverb precedes the verb",
    )


def _company(draws: Draws, words: Bank) -> Sentence | None:
    """With one is kići, with several om (POST-02)."""
    predicate = _of_pronoun(draws, words.predicates("act", draws.pick(_MODES)))
    if predicate is None:
        return None
    several = draws.below(2) == 1
    noun = draws.pick(words.nouns(predicate.word.kinds))
    phrase = _phrase(draws, words, noun, draws.pick(("these", "those") if several else ("this", "that")))
    company = next((w for w in words.role("company") if (w.word == "om") == several), None)
    if company is None:
        return None
    return _statement(
        "company",
        predicate,
        PERSON_NAMES[predicate.person],
        f"with {phrase.english}",
        (phrase.part, single(company)),
        rule_ids=("POST-01", "POST-02"),
        rule="kići is with one, om with several; it follows its noun, and both precede the verb",
    )


def _owner(draws: Draws, words: Bank) -> Sentence | None:
    predicate = _of_pronoun(draws, words.predicates("act on", draws.pick(_MODES)))
    if predicate is None:
        return None
    owner = draws.pick(words.nouns(frozenset({"person"})))
    thing = draws.pick(words.nouns(predicate.word.object_kinds))
    if "person" in thing.kinds:
        return None
    return _statement(
        "owner",
        predicate,
        PERSON_NAMES[predicate.person],
        f"the {owner.english[0]}'s {thing.english[0]}",
        (together(single(owner), single(thing), particle("tawa")),),
        rule_ids=("POSS-09",),
        rule="the owner stands before the thing, and tawa after it; then the verb",
        facts=(f"{thing.word}/of {owner.word}/tawa",),
        cells=("tawa|person",),
    )


def _joined(draws: Draws, words: Bank) -> Sentence | None:
    predicate = _of_pronoun(draws, words.predicates("act on things", draws.pick(_MODES)))
    if predicate is None:
        return None
    things = words.nouns(predicate.word.object_kinds - ANIMATE)
    one, other = draws.pick(things), draws.pick(things)
    return _statement(
        "joined",
        predicate,
        PERSON_NAMES[predicate.person],
        " and ".join(english_noun(noun, plural=True) for noun in (one, other)),
        (single(one), single(other), particle("ko")),
        orders=((0, 1, 2, 3), (1, 0, 2, 3)),
        rule_ids=("SYN-02", "NOUN-10"),
        rule="ko follows the two words that it joins; then the verb",
    )


def _command(draws: Draws, words: Bank) -> Sentence | None:
    said = draws.pick(tuple(COMMANDS))
    predicate = _pick(draws, words.predicates("act on", said))
    if predicate is None:
        return None
    noun = draws.pick(words.nouns(predicate.word.object_kinds))
    obj = _phrase(draws, words, noun, draws.pick(_ONE))
    verb = predicate.word.english[0]
    return Sentence(
        frame="command",
        mode=said,
        english=f"{verb[0].upper()}{verb[1:]} {obj.english}! ({COMMANDS[said]})",
        parts=(obj.part, predicate.part),
        orders=((0, 1),),
        rule_ids=("SYN-01", *obj.part.rule_ids, *predicate.part.rule_ids),
        rule=f"{_NOUN_PHRASE}; then the verb, and last the word of command",
        inflected=predicate.part.rule,
    )


def _if(draws: Draws, words: Bank) -> Sentence | None:
    """The condition comes first and ends in kiŋhaŋ (SYN-03), which is ćiŋhaŋ after e."""
    condition = _pick(draws, words.predicates("act", "plain", third=True))
    predicate = _of_pronoun(draws, words.predicates("act on", "future"))
    if condition is None or predicate is None or condition.part.forms[0][0].endswith(("a", "aŋ", "e")):
        return None
    subject = _subject(draws, words, condition)
    noun = draws.pick(words.nouns(predicate.word.object_kinds))
    obj = _phrase(draws, words, noun, "the")
    first = clause(subject.english, condition.person, condition.word.english, "plain", "")
    then = clause(
        PERSON_NAMES[predicate.person], predicate.person, predicate.word.english, "future", obj.english
    )
    parts = (subject.part, condition.part, particle("kiŋhaŋ"), obj.part, predicate.part)
    return Sentence(
        frame="if",
        mode="future",
        english=sentence(f"if {first}, {then}", "future"),
        parts=parts,
        orders=(tuple(range(len(parts))),),
        rule_ids=("SYN-01", "SYN-03", *(rule for part in parts for rule in part.rule_ids)),
        rule="the condition comes first and ends in kiŋhaŋ; in each clause the verb is last",
        inflected="; ".join(dict.fromkeys((condition.part.rule, predicate.part.rule))),
    )


def _quality(draws: Draws, words: Bank) -> Sentence | None:
    """An adjective after the article says something of the noun (ADJ-02), with -pi where it is several
    animate ones (ADJ-04).
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
    return Sentence(
        frame="quality",
        mode=predicate.mode,
        english=sentence(
            being(subject.english, plural=several, quality=quality, mode=predicate.mode), predicate.mode
        ),
        parts=parts,
        orders=(tuple(range(len(parts))),),
        rule_ids=(
            "ADJ-02",
            *(("ADJ-03",) if degree else ()),
            *(("ADJ-04",) if marked else ()),
            *(rule for part in parts for rule in part.rule_ids),
        ),
        rule="what is said of a noun follows its article and demonstrative; very and most precede it",
        inflected="it takes -pi where it is said of several animate ones",
    )


_TRAIN_FRAMES: tuple[Callable[[Draws, Bank], Sentence | None], ...] = (
    *[_object] * 5,
    *[_them] * 2,
    *[_acting] * 2,
    *[_place] * 3,
    *[_adverb] * 2,
    *[_owner] * 2,
    *[_joined] * 2,
    *[_command] * 2,
    *[_quality] * 4,
)
_FRAMES = (*_TRAIN_FRAMES, *[_company] * 3, *[_if] * 3)


def _pick(draws: Draws, candidates: Sequence[Predicate]) -> Predicate | None:
    return draws.pick(candidates) if candidates else None


def _of_pronoun(draws: Draws, candidates: Sequence[Predicate]) -> Predicate | None:
    """One that a person does, so that the subject can be a pronoun, which is not said."""
    predicate = _pick(draws, candidates)
    return predicate if predicate is not None and "person" in predicate.word.kinds else None


def _subject(draws: Draws, words: Bank, predicate: Predicate, *, pointed: bool = False) -> NounPhrase:
    """One or several, as the predicate says; `pointed`: with a demonstrative."""
    noun = draws.pick(words.nouns(predicate.word.kinds))
    determiners: tuple[str, ...] = PLURAL_DETERMINERS if predicate.person == "3pl" else (*_ONE, "a")
    if pointed:
        determiners = tuple(word for word in determiners if word in DEMONSTRATIVES)
    return _phrase(draws, words, noun, draws.pick(determiners))


def _phrase(draws: Draws, words: Bank, noun: SentenceWord, determiner: str) -> NounPhrase:
    adjectives = words.adjectives(noun, before_the=determiner != "a")
    adjective = draws.pick(adjectives) if adjectives and draws.below(3) == 0 else None
    return noun_phrase(noun, adjective, determiner)


def _statement(
    frame: str,
    predicate: Predicate,
    subject: str,
    rest: str,
    parts: tuple[Part, ...],
    *,
    orders: tuple[tuple[int, ...], ...] = (),
    rule_ids: tuple[str, ...] = (),
    rule: str = _SUBJECT_OBJECT_VERB,
    facts: tuple[str, ...] = (),
    cells: tuple[str, ...] = (),
) -> Sentence:
    """The parts, and last the predicate."""
    every = (*parts, predicate.part)
    return Sentence(
        frame=frame,
        mode=predicate.mode,
        english=sentence(
            clause(subject, predicate.person, predicate.word.english, predicate.mode, rest), predicate.mode
        ),
        parts=every,
        orders=orders or (tuple(range(len(every))),),
        rule_ids=("SYN-01", *rule_ids, *(rule_id for part in every for rule_id in part.rule_ids)),
        rule=rule,
        inflected=predicate.part.rule,
        facts=facts,
        cells=cells,
    )
