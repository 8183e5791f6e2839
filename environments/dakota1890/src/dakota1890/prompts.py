"""The one wording of each family: a short question, and the rule it tests in one sentence.

A prompt never holds its answer. Dakota words stand in double quotes; person markers are cited bare.
"""

from __future__ import annotations

from dakota1890.corpus import Noun, Verb

PERSON_NAMES = {
    "1sg": "I",
    "2sg": "thou",
    "3sg": "he",
    "12": "we two",
    "1pl": "we",
    "2pl": "you all",
    "3pl": "they",
}
OWNER_NAMES = {
    "1sg": "my",
    "2sg": "thy",
    "3sg": "his or her",
    "12": "our (two owners)",
    "1pl": "our",
    "2pl": "your (plural)",
    "3pl": "their",
}
PARTICLES = {"kta": "future", "šni": "negative"}
_FINAL_PI = " plus final -pi"
_MARKERS = {"I": {"1": "wa", "2": "ya"}, "III": {"1": "ma", "2": "ni"}}
_PREFIXES = {"1": "mita", "2": "nita", "3": "ta", "12": "uŋkita"}


def conjugate_prompt(verb: Verb, person: str, particle: str | None, *, hint: bool) -> str:
    """Ask for `verb` in `person`, followed by `particle` if there is one."""
    form = PERSON_NAMES[person] + (f", {PARTICLES[particle]}" if particle else "")
    changes = particle and verb.final == "changes" and not person.endswith("pl")
    place = _place(verb) + (f", final a becomes e before {particle}" if changes else "")
    question = f'Dakota verb "{verb.lemma}" ({verb.gloss}), class {verb.klass}, {place}. Form: {form}.'
    rule = _person_rule(verb, person) + (
        f"; {particle} follows for the {PARTICLES[particle]}" if particle else ""
    )
    return _ask(question, rule if hint else "", "form")


def possess_prompt(noun: Noun, person: str, *, hint: bool) -> str:
    """Ask for `noun` as owned by `person`."""
    question = f'Dakota noun "{noun.lemma}" ({noun.gloss}), {noun.klass}. Form: {OWNER_NAMES[person]}.'
    return _ask(question, _owner_rule(noun, person) if hint else "", "form")


def numeral_prompt(number: int, *, hint: bool) -> str:
    """Ask for `number` in words."""
    rule = "thousands, hundreds, tens, units in this order, each with its count after it, joined by saŋpa"
    return _ask(f"Write the number {number} in Dakota words.", rule if hint else "", "words")


def dictionary_prompt(gloss: str, part_of_speech: str) -> str:
    """Ask for the Dakota word with this gloss."""
    return _ask(f'Give the Dakota word for "{gloss}" ({part_of_speech}).', "", "word")


def _ask(question: str, rule: str, kind: str) -> str:
    stated = f" Rule: {rule}." if rule else ""
    return f"{question}{stated} Put only the {kind} in <answer></answer>."


def _place(verb: Verb) -> str:
    before, marker = verb.lemma[: verb.at], {"II": "y", "ki": "ki"}.get(verb.klass, "marker")
    place = f'{marker} after "{before}"' if before else f"{marker} at the start"
    return place if verb.dual_at == verb.at else f'{place}, "we" at the start'


def _person_rule(verb: Verb, person: str) -> str:
    name, plural = PERSON_NAMES[person], _FINAL_PI if person.endswith("pl") else ""
    if person == "3sg":
        return f'"{name}" has no marker'
    if person == "3pl":
        return f'"{name}" is only a final -pi'
    if person in ("12", "1pl"):
        if verb.klass == "II" and verb.lemma[verb.at :].startswith("yu"):
            return f'"{name}" is uŋ in place of yu{plural}'
        return f'"{name}" is uŋ (uŋk before a vowel){plural}'
    if verb.klass == "II":
        return f'"{name}" turns y into {"md" if person[0] == "1" else "d"}{plural}'
    if verb.klass == "ki":
        return f'"{name}" turns ki into {"we" if person[0] == "1" else "ye"}{plural}'
    return f'"{name}" is {_MARKERS[verb.klass][person[0]]}{plural}'


def _owner_rule(noun: Noun, person: str) -> str:
    owner = "12" if person in ("12", "1pl") else person[0]
    name, plural = OWNER_NAMES[person], _FINAL_PI if person.endswith("pl") else ""
    if noun.klass == "kinship":
        return (
            f'"{name}" is ni before the noun'
            if owner == "2"
            else f'"{name}" is ku after the noun (tku after i)'
        )
    if noun.klass == "inalienable":
        prefix = {"1": "mi", "2": "ni", "12": "uŋ (uŋk before a vowel)"}[owner]
        return f'"{name}" is {prefix} before the noun{plural}'
    prefix = _PREFIXES[owner]
    if noun.klass == "alienable, abstract":
        return f'"{name}" is {prefix[:-1]} before the noun, whose w goes{plural}'
    elided = f" ({prefix[:-1]} before o or i)" if noun.klass == "alienable" else ""
    return f'"{name}" is {prefix}{elided} before the noun{plural}'
