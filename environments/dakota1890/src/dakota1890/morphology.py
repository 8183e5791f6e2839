"""How a Dakota verb, a possessed noun and a number are written.

Each function returns every form the record licenses, the preferred one first. The rule identifiers in the
docstrings are those of `data/rules.json`.
"""

from __future__ import annotations

from dakota1890.corpus import Noun, Verb

PERSONS = ("3sg", "2sg", "1sg", "12", "3pl", "2pl", "1pl")
"""he, thou, I, we two (thou and I), they, you, we."""

_VOWELS = "aeiou"
_MARKERS = {"I": ("wa", "ya"), "III": ("ma", "ni")}
_ALIENABLE = {"1": "mita", "2": "nita", "3": "ta", "12": "uŋkita"}


def conjugate(verb: Verb, person: str) -> tuple[str, ...]:
    """The forms of `verb` for `person` (VERB-01 to VERB-08; plural -pi: VERB-12, VERB-13; uŋk-: PHON-06)."""
    stem, plural = verb.lemma, "pi" if person.endswith("pl") else ""
    if person.startswith("3"):
        return (stem + plural,)
    if person in ("12", "1pl"):
        return tuple(form + plural for form in _with_we(verb))
    return (_with_i_or_thou(verb, thou=person.startswith("2")) + plural,)


def _with_i_or_thou(verb: Verb, *, thou: bool) -> str:
    before, after = verb.lemma[: verb.at], verb.lemma[verb.at :]
    if verb.klass == "II":  # VERB-04, VERB-06: y becomes md (I) or d (thou)
        return before + ("d" if thou else "md") + after.removeprefix("y")
    if verb.klass == "ki":  # VERB-03: wa + ki is we, ya + ki is ye
        return before + ("ye" if thou else "we") + after.removeprefix("ki")
    return before + _MARKERS[verb.klass][thou] + after


def _with_we(verb: Verb) -> tuple[str, ...]:
    before, after = verb.lemma[: verb.dual_at], verb.lemma[verb.dual_at :]
    full = before + ("uŋk" if after[0] in _VOWELS else "uŋ") + after
    if verb.klass == "II" and after.startswith("yu"):  # VERB-05; uŋyuštaŋpi and uŋhapi are both attested
        return before + "uŋ" + after.removeprefix("yu"), full
    return (full,)


def with_particle(form: str, final: str, particle: str) -> tuple[str, ...]:
    """`form` before kta (future, VERB-20) or šni (negation, VERB-23); `final` is the verb's, see PHON-02.

    Raises ValueError where the record does not say what happens to the final a.
    """
    changed = final_e(form)
    if changed == form or final == "keeps":
        return (f"{form} {particle}",)
    if final == "unknown":
        raise ValueError(f"what {particle} does to the end of {form!r} is not recorded")
    forms = (f"{changed} {particle}", f"{form} {particle}")
    if final == "changes" and particle == "šni":
        return forms[:1]
    return forms if final == "changes" else forms[::-1]


def final_e(form: str) -> str:
    """`form` with its final a or aŋ as e (PHON-02)."""
    if form.endswith("aŋ"):
        return form[:-2] + "e"
    return form[:-1] + "e" if form.endswith("a") else form


def possess(noun: Noun, person: str) -> tuple[str, ...]:
    """The forms of `noun` with the owner `person` (POSS-01 to POSS-08); a plural owner adds -pi."""
    plural = "pi" if person.endswith("pl") else ""
    owner = "12" if person in ("12", "1pl") else person[0]
    if noun.klass == "kinship":
        return (_kin(noun.lemma, owner),)
    if noun.klass == "inalienable":
        prefix = {"1": "mi", "2": "ni", "12": "uŋk" if noun.lemma[0] in _VOWELS else "uŋ"}[owner]
        return (prefix + noun.lemma + plural,)
    return tuple(form + plural for form in _alienable(noun, _ALIENABLE[owner]))


def _alienable(noun: Noun, prefix: str) -> tuple[str, ...]:
    lemma = noun.lemma
    if noun.klass == "alienable, abstract":  # POSS-05: the a of the prefix and the w of wo- both go
        prefix, lemma = prefix[:-1], lemma.removeprefix("w")
    elif noun.klass == "alienable" and lemma[0] in "oi":  # POSS-03
        prefix = prefix[:-1]
    kept, changed = prefix + lemma, prefix + final_e(lemma)
    if not lemma.endswith("a") or any(form.endswith("a") for _, form in noun.attested):
        return (kept,)
    return (changed, kept) if noun.attested else (kept, changed)  # PHON-08: a may become e


def _kin(lemma: str, owner: str) -> str:
    if owner == "2":  # POSS-08
        return "ni" + lemma
    return lemma + ("tku" if lemma.endswith("i") else "ku")  # POSS-06, POSS-07


UNITS = (
    "waŋžidaŋ",
    "noŋpa",
    "yamni",
    "topa",
    "zaptaŋ",
    "šakpe",
    "šakowiŋ",
    "šahdoġaŋ",
    "napćiŋwaŋka",
)
_SHORT_ONE = "waŋži"
# NUM-04 has a second way of counting, "four of the third ten"; only these two are attested.
_OF_THE_NEXT_TEN = {24: "iyamni topa", 33: "itopa yamni"}


def numeral(number: int) -> tuple[str, ...]:
    """Every licensed way to write 1 to 9,999 (NUM-01 to NUM-05), the preferred one first."""
    if not 1 <= number <= 9_999:
        raise ValueError(f"{number} is outside 1 to 9,999")
    forms = list(_cardinal(number))
    forms += [_OF_THE_NEXT_TEN[number]] if number in _OF_THE_NEXT_TEN else []
    return tuple(dict.fromkeys(forms))


def _cardinal(number: int) -> list[str]:
    if number < 10:
        return [UNITS[number - 1]] + ([_SHORT_ONE] if number == 1 else [])
    if number < 100:
        return _below_hundred(number)
    word, size = ("opawiŋġe", 100) if number < 1_000 else ("kektopawiŋġe", 1_000)
    count, rest = divmod(number, size)
    head = word if count == 1 else f"{word} {UNITS[count - 1]}"
    return [head] if rest == 0 else [f"{head} saŋpa {tail}" for tail in _cardinal(rest)]


def _below_hundred(number: int) -> list[str]:
    tens, unit = divmod(number, 10)
    head = "wikćemna" if tens == 1 else f"wikćemna {UNITS[tens - 1]}"
    if unit == 0:
        return [head]
    if number == 19:  # NUM-02: the other nine
        return ["uŋma napćiŋwaŋka"]
    units = _cardinal(unit)
    if tens == 1:
        forms = [f"ake {word}" for word in units] + [f"wikćemna saŋpa {word}" for word in units]
        return forms + [f"ake{word}" for word in units]
    return [f"{head} {link} {word}" for link in ("saŋpa", "ake") for word in units]
