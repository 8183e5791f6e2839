"""The generators reproduce the record: every attested form they can make, and nothing left out in silence."""

import re

import pytest

from dakota1890.corpus import load_corpus
from dakota1890.morphology import PERSONS, conjugate, numeral, possess, with_particle
from dakota1890.orthography import bare, canonical

CORPUS = load_corpus()
VERBS = {(verb.lemma, verb.klass): verb for verb in CORPUS.verbs}

# Attested forms that this version does not generate, and what they would need.
OTHER_VERB_FORMS = {
    "object markers": "mayakaška makaškapi wićawakaška maninoŋ waŋwićayaka ćićute makaġa nićaġapi "
    "ećawićuŋkićoŋpi waštewićuŋdaka atemayaŋ atewaya bakićiksa",
    "reflexives": "mihdaška waštemićidaka waštenićidaka banićiksa bamićiksa ihdaksa",
    "irregular": "maŋka naŋka yaŋkapi",
    "participles": "manihaŋ iahaŋ ksawahaŋ ksahaŋ",
    "no lemma in the lexicon": "tonitaŋhaŋ hemataŋhaŋ awakasni",
    "no attested class": "ićupi",
}
OTHER_OWNED_FORMS = "atkuku huŋku ćiŋhiŋtku ćiŋću tawiću mićiŋća uŋkićiŋćapi tinazipe"

CARDINALS = {
    "waŋžidaŋ": 1, "waŋži": 1, "noŋpa": 2, "yamni": 3, "topa": 4, "zaptaŋ": 5, "šakpe": 6, "šakowiŋ": 7,
    "šahdoġaŋ": 8, "napćiŋwaŋka": 9, "wikćemna": 10, "ake waŋžidaŋ": 11, "ake noŋpa": 12, "ake yamni": 13,
    "wikćemna saŋpa topa": 14, "akešakowiŋ": 17, "wikćemna saŋpa šahdoġaŋ": 18, "uŋma napćiŋwaŋka": 19,
    "wikćemna noŋpa": 20, "wikćemna noŋpa saŋpa waŋžidaŋ": 21, "wikćemna noŋpa ake waŋžidaŋ": 21,
    "iyamni topa": 24, "wikćemna noŋpa saŋpa napćiŋwaŋka": 29, "wikćemna yamni": 30, "itopa yamni": 33,
    "wikćemna yamni saŋpa topa": 34, "wikćemna topa": 40, "wikćemna zaptaŋ saŋpa napćiŋwaŋka": 59,
    "opawiŋġe": 100, "opawiŋġe saŋpa wikćemna šakpe saŋpa šakowiŋ": 167, "opawiŋġe noŋpa": 200,
    "kektopawiŋġe": 1_000,
    "kektopawiŋġe noŋpa saŋpa opawiŋġe zaptaŋ saŋpa wikćemna yamni saŋpa šakpe": 2_536,
}  # fmt: skip


def conjugated(verb):
    """Every form of a verb, with and without particles."""
    for person in PERSONS:
        if person != "3sg" and person not in verb.persons:
            continue
        for form in conjugate(verb, person):
            yield form
            final = "keeps" if person.endswith("pl") else verb.final
            if final != "unknown":
                yield from with_particle(form, final, "kta")
                yield from with_particle(form, final, "šni")


def recorded_words():
    spellings = [entry.form for entry in CORPUS.entries]
    spellings += [attested for group in CORPUS.variants.values() for attested, _ in group]
    spellings += [dakota for rule in CORPUS.rules.values() for dakota, _ in rule.examples]
    return {bare(word) for spelling in spellings for word in canonical(spelling).split()}


@pytest.mark.parametrize("verb", CORPUS.verbs, ids=lambda verb: f"{verb.lemma}-{verb.klass}")
def test_every_attested_verb_form_is_reproduced(verb):
    for person, form in verb.attested:
        assert form in conjugate(verb, person)


@pytest.mark.parametrize("noun", CORPUS.nouns, ids=lambda noun: noun.lemma)
def test_every_attested_owned_form_is_reproduced(noun):
    for person, form in noun.attested:
        assert form in possess(noun, person)


def test_attested_forms_are_in_the_record_and_the_rest_is_licensed_by_a_rule():
    recorded = recorded_words()
    for word in (*CORPUS.verbs, *CORPUS.nouns):
        assert all(bare(form) in recorded or "uŋštaŋpi" in form for _, form in word.attested), word.lemma
        assert word.evidence
        assert set(word.rules) <= set(CORPUS.rules), word.lemma
        assert word.attested or re.match(r"[A-Z]+-\d\d: |the object marker", word.evidence), word.lemma


def test_every_verb_form_of_the_lexicon_is_generated_or_accounted_for():
    made = {form for verb in CORPUS.verbs for form in conjugated(verb)}
    others = {form for forms in OTHER_VERB_FORMS.values() for form in forms.split()}
    recorded = {canonical(entry.form) for entry in CORPUS.entries if entry.pos == "v. form"}
    assert recorded - made == others
    assert len(recorded & made) >= 75


def test_every_owned_form_of_the_lexicon_is_generated_or_accounted_for():
    made = {form for noun in CORPUS.nouns for person in noun.persons for form in possess(noun, person)}
    owned = re.compile(r"(my|thy|his|her|our|your|their)\b")
    recorded = {e.form for e in CORPUS.entries if e.pos == "n." and owned.match(e.gloss)}
    assert recorded - made == set(OTHER_OWNED_FORMS.split())


@pytest.mark.parametrize(("form", "number"), CARDINALS.items())
def test_every_attested_cardinal_is_accepted(form, number):
    assert form in numeral(number)


def test_no_form_stands_for_two_numbers():
    seen = {}
    for number in range(1, 10_000):
        for form in numeral(number):
            assert seen.setdefault(form, number) == number
            assert canonical(form) == form


def test_unresolved_we_finish_accepts_both():
    assert set(conjugate(VERBS["yuštaŋ", "II"], "1pl")) == {"uŋštaŋpi", "uŋyuštaŋpi"}


def test_we_stands_where_the_record_puts_it():
    assert conjugate(VERBS["asni", "III"], "1pl") == ("uŋkasnipi",)
    assert conjugate(VERBS["asni", "III"], "1sg") == ("amasni",)


def test_particles_change_the_final_vowel_only_where_recorded():
    assert with_particle("mduha", "changes", "šni") == ("mduhe šni",)
    assert with_particle("mawanoŋ", "keeps", "kta") == ("mawanoŋ kta",)
    assert set(with_particle("wakaška", "either", "kta")) == {"wakaška kta", "wakaške kta"}
    with pytest.raises(ValueError, match="not recorded"):
        with_particle("wakaġa", "unknown", "kta")


@pytest.mark.parametrize("number", [0, -1, 10_000])
def test_numbers_outside_the_range_are_refused(number):
    with pytest.raises(ValueError, match="outside"):
        numeral(number)
