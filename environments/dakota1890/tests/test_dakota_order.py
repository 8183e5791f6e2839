"""Sentences compared with hand-written ones, and properties of every sentence."""

from collections import Counter
from functools import cache
from math import factorial

import pytest

from dakota1890.corpus import load_corpus
from dakota1890.draws import Draws
from dakota1890.families.order import ORDER
from dakota1890.families.particles import PARTICLES
from dakota1890.families.sentences.bank import ANIMATE
from dakota1890.families.sentences.english import clause
from dakota1890.families.sentences.frames import FEWEST_ORDERS
from dakota1890.families.sentences.parts import DEMONSTRATIVES, noun_phrase
from dakota1890.families.sentences.predicates import predicates
from dakota1890.splits import HELD_OUT_CELLS, side_of


@cache
def drawn():
    return [ORDER.draw(Draws(1890, index)) for index in range(20_000)]


WORDS = {word.word: word for word in load_corpus().sentence_words}


def frame_of(question):
    return question.cells[-1].partition("|")[2]


def test_articles_adjectives_and_demonstratives_follow_as_in_the_record():
    wićašta, wašte = WORDS["wićašta"], WORDS["wašte"]
    these_good_men = noun_phrase(wićašta, wašte, "these")
    assert these_good_men.part.forms == (("wićašta", "wašte", "kiŋ", "dena"),)
    assert (these_good_men.english, these_good_men.plural) == ("these good men", True)
    assert noun_phrase(wićašta, wašte, "the").part.forms == (("wićašta", "wašte", "kiŋ"),)
    assert noun_phrase(WORDS["wowapi"], None, "a").part.forms == (("wowapi", "waŋ"),)
    assert noun_phrase(WORDS["tataŋka"], None, "a").english == "an ox"
    assert noun_phrase(wićašta, None, "the several").english == "the men"


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (("I", "1sg", "plain", "the dog"), "I steal the dog"),
        (("thou", "2sg", "plain", "the dog"), "thou stealest the dog"),
        (("the man", "3sg", "plain", "the dog"), "the man steals the dog"),
        (("thou", "2sg", "future", ""), "thou wilt steal"),
        (("thou", "2sg", "question", ""), "dost thou steal"),
        (("we two", "12", "negative", ""), "we two do not steal"),
        (("that man", "3sg", "negative question", "it"), "does that man not steal it"),
    ],
)
def test_english_tells_the_persons_apart(said, expected):
    subject, person, mode, rest = said
    assert clause(subject, person, ("steal", "steals", "stealest"), mode, rest) == expected


def words_of(lemma, **wanted):
    """Return the forms of the one predicate of `lemma` that has all of `wanted`."""
    (found,) = [p for p in predicates(WORDS[lemma]) if all(getattr(p, k) == v for k, v in wanted.items())]
    return {" ".join(form) for form in found.part.forms}


@pytest.mark.parametrize(
    ("lemma", "person", "mode", "expected"),
    [
        ("manoŋ", "1sg", "future", {"mawanoŋ kta"}),  # printed: I will steal
        ("yuha", "1sg", "negative", {"mduhe šni"}),  # printed: takudaŋ mduhe šni
        ("yuha", "2sg", "plain", {"duha"}),  # printed: wowapi waŋ duha
        ("hi", "3pl", "plain", {"hipi"}),  # printed: wićašta kiŋ hipi
        ("waš'aka", "3pl", "plain", {"waš'akapi"}),  # printed: tataŋka kiŋ waš'akapi
        ("kute", "3sg", "negative question", {"kute šni he"}),  # SYN-04, as "dawa šni he"
        ("kaška", "1pl", "future", {"uŋkaškapi kta"}),  # printed: we will bind
    ],
)
def test_predicates_are_those_of_the_record(lemma, person, mode, expected):
    assert words_of(lemma, person=person, mode=mode) == expected


def test_unrecorded_sentence_forms_are_not_generated():
    modes = {(p.person, p.mode) for p in predicates(WORDS["waŋyaka"])}
    assert {("3pl", "future"), ("3pl", "question")} <= modes
    assert not {("3sg", "future"), ("3sg", "question")} & modes  # the next word may change a final a
    before_the = {q.accept[0].split()[i - 1] for q in drawn() for i in places(q, "kiŋ")}
    assert not {word for word in before_the if WORDS[word].role == "adjective" and word.endswith("a")}


def places(question, word):
    return [i for i, token in enumerate(question.accept[0].split()) if token == word]


def test_every_frame_and_mode_is_drawn_and_the_verb_phrase_is_last():
    frames = Counter(map(frame_of, drawn()))
    assert set(frames) == {
        *("object", "place", "adverb", "company", "joined", "if", "quality"),
    }
    endings = {"future": "kta", "negative": "šni", "question": "he", "negative question": "šni he"}
    for question in drawn():
        ending = endings.get(question.cells[-1].partition("|")[0], "")
        assert all(answer.endswith(ending) for answer in question.accept), question


def of_frame(frame):
    found = [question for question in drawn() if frame_of(question) == frame]
    assert len(found) > 200
    return found


@pytest.mark.parametrize("frame", ["place", "adverb"])
def test_a_place_or_an_adverb_stands_before_or_after_the_subject(frame):
    roles = ("postposition",) if frame == "place" else ("adverb",)
    for question in of_frame(frame):
        assert len({answer.split()[0] for answer in question.accept}) == 2
        for answer in question.accept:
            words = answer.split()
            (at,) = [i for i, word in enumerate(words) if word in WORDS and WORDS[word].role in roles]
            before, after = words[at - 1 : at], words[at + 1]
            assert frame == "adverb" or WORDS[before[0]].role == "noun"
            assert after not in DEMONSTRATIVES.values()


def test_ko_follows_two_nouns_in_either_order():
    for question in of_frame("joined"):
        starts = {tuple(answer.split()[:3]) for answer in question.accept}
        ((one, other, ko), *_) = starts
        assert starts == {(one, other, "ko"), (other, one, "ko")}
        assert ko == "ko"


def test_a_condition_comes_first_and_ends_in_kiŋhaŋ():
    for question in of_frame("if"):
        condition, kiŋhaŋ, main = question.accept[0].partition(" kiŋhaŋ ")
        assert kiŋhaŋ
        assert not condition.endswith(("a", "aŋ", "e"))  # the form of kiŋhaŋ is not recorded then
        assert main.endswith(" kta")
        assert " kta" not in condition


def test_kići_is_with_one_and_om_with_several():
    for question in of_frame("company"):
        words = question.accept[0].split()
        pointing, after = words[words.index("kiŋ") + 1 :][:2]
        assert after == {"de": "kići", "he": "kići", "dena": "om", "hena": "om"}[pointing]


def test_predicate_of_several_animate_nouns_has_pi():
    endings = Counter()
    for question in of_frame("quality"):
        words = question.accept[0].split()
        animate = bool(WORDS[words[0]].kinds & ANIMATE)
        several = bool({"dena", "hena"} & set(words))
        said = words[-1] if question.cells[-1].startswith("plain") else words[len(words) - 2]
        if question.cells[-1].startswith("negative question"):
            said = words[-3]
        if several:
            assert said.endswith("pi") == animate, question
        endings[animate, several] += 1
    assert len(endings) == 4


def test_word_bags_do_not_show_the_right_order():
    for question in drawn():
        words = question.accept[0].split()
        count = factorial(len(words))
        for times in Counter(words).values():
            count //= factorial(times)
        assert count >= FEWEST_ORDERS
        assert not set(question.prompt_forms) & set(question.accept)
        if question.ask.startswith("Put"):
            assert all(sorted(answer.split()) == sorted(words) for answer in question.accept)
            assert all(sorted(shown.split()) == sorted(words) for shown in question.prompt_forms)


def test_order_questions_share_facts_cells_and_rules():
    rules = load_corpus().rules
    asked = {fact: q.cells for q in PARTICLES.recorded() for fact in q.facts[-1:]}
    shared = 0
    for question in drawn():
        assert set(question.rule_ids) <= set(rules)
        assert question.depth == 4
        assert question.facts[-1] == f"sentence/{question.accept[0]}"
        for fact in question.facts:
            if fact in asked and "/gloss" not in fact:
                shared += 1
                assert set(asked[fact]) <= set(question.cells), (fact, question)
    assert shared > 5_000


def test_every_side_is_drawn_and_few_draws_are_rejected():
    sides = Counter(map(side_of, drawn()))
    assert set(sides) == {"train", "random", "lemma", "cell", "rule"}
    assert sides["train"] > 0.4 * len(drawn())
    assert min(sides.values()) > 500
    held_out = {frame_of(q) for q in drawn() if side_of(q) == "rule"}
    assert {"if", "company"} <= held_out
    trained = {q.cells[-1] for q in drawn() if side_of(q) == "train"}
    assert {"plain|place", "question|object", "future|object"} & trained
    assert not HELD_OUT_CELLS & trained
