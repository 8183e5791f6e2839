"""What stands around the verb: time, negation, commands, habit, and what one goes to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from dakota1890.corpus import Verb, load_corpus
from dakota1890.draws import Draws
from dakota1890.families import conjugate as verbs
from dakota1890.invented import GLOSS, invented_verb
from dakota1890.morphology import conjugate, contracted, contracts, with_particle
from dakota1890.questions import FORM, Family, Question, unique
from dakota1890.splits import side_of


@dataclass(frozen=True, slots=True)
class Frame:
    """Words around a conjugated verb: `words` with {} for it. `rule` says where they stand."""

    name: str
    meaning: str
    words: str
    rule_id: str
    rule: str

    def around(self, form: str) -> str:
        return self.words.replace("{}", form)


_ANY_PERSON = (
    Frame("waŋna", "perfect", "waŋna {}", "VERB-22", "waŋna before the verb makes the perfect"),
    Frame("nuŋ", "doubtful future", "{} nuŋ", "VERB-21", "nuŋ after the verb makes the doubtful future"),
    Frame("s'a", "habitual", "{} s'a", "VERB-32", "s'a after the verb says that it is a habit"),
)
_COMMANDS = (
    Frame(
        "wo", "command, a man speaking to one person", "{} wo", "VERB-24", "a man commands one person with wo"
    ),
    Frame(
        "ye",
        "command, a woman speaking to one person",
        "{} ye",
        "VERB-24",
        "a woman commands one person with ye",
    ),
    Frame("po", "command, a man speaking to several", "{} po", "VERB-24", "a man commands several with po"),
    Frame(
        "pe", "command, a woman speaking to several", "{} pe", "VERB-24", "a woman commands several with pe"
    ),
)
PROHIBITION = Frame(
    "ihnuhaŋ",
    "prohibition (do not)",
    "ihnuhaŋ {} kiŋ",
    "VERB-25",
    "a prohibition puts ihnuhaŋ before the verb and kiŋ after it",
)
_PARTICIPLE = Frame("haŋ", "participle", "{}haŋ", "VERB-26", "the participle adds haŋ to the verb")
_WITHOUT_PERSON = (*_COMMANDS, _PARTICIPLE)
_MOTION_VERBS = ("ya", "hi")


@lru_cache(maxsize=1)
def _recorded() -> Sequence[Question]:
    return [question for verb in load_corpus().verbs for question in _questions(verb)]


def _questions(verb: Verb) -> list[Question]:
    found = [question(verb, *cell) for cell in _cells_of(verb)]
    found += [_framed(verb, *cell) for cell in _framed_cells(verb)]
    if contracts(verb.lemma) and verb.klass != "III":
        found += [_purpose(verb, *going) for going in _goings()]
    return found


def _invent(draws: Draws) -> Question:
    verb = invented_verb(draws)
    kind = draws.below(8)
    if kind < 3:
        return question(verb, *draws.pick(_cells_of(verb)))
    if kind < 6 and contracts(verb.lemma) and verb.klass != "III":
        return _purpose(verb, *draws.pick(_train_goings()))
    return _framed(verb, *draws.pick(_framed_cells(verb)))


PARTICLES = Family(name="particles", recorded=_recorded, invent=_invent)


def _cells_of(verb: Verb) -> list[tuple[str, str]]:
    """The (person, particle) pairs whose form the record licenses."""
    persons = [p for p in ("3sg", *verb.persons) if p.endswith("pl") or verb.final != "unknown"]
    return [(person, particle) for person in persons for particle in verbs.PARTICLE_WORDS]


def _framed_cells(verb: Verb) -> list[tuple[str, Frame]]:
    """The (person, frame) pairs whose form the record licenses. What nuŋ and s'a do to a final a is not
    recorded, nor what kiŋ is after a final e.
    """
    state = verb.klass == "III"
    cells = [] if state else [("3sg", frame) for frame in _WITHOUT_PERSON]
    for person in ("3sg", *verb.persons):
        in_a = not person.endswith("pl") and verb.lemma.endswith(("a", "aŋ"))
        cells += [(person, frame) for frame in _ANY_PERSON if frame.name == "waŋna" or not in_a]
        in_e = not person.endswith("pl") and verb.lemma.endswith("e")
        if person[0] == "2" and not state and not in_e:
            cells.append((person, PROHIBITION))
    return cells


def question(verb: Verb, person: str, particle: str) -> Question:
    """Ask for `verb` in `person` followed by `particle`."""
    meaning, rule_id = verbs.PARTICLE_WORDS[particle]
    final = "keeps" if person.endswith("pl") else verb.final
    changes = f", final a becomes e before {particle}" if final == "changes" else ""
    return Question(
        family="particles",
        facts=(verbs.fact(verb, person), f"{verbs.fact(verb, person)}/{particle}"),
        cells=(verbs.cell(verb, person), f"{particle}|{verb.klass}, final a {final}"),
        lemma_ids=(verb.lemma,),
        rule_ids=(*verb.rules, *verbs.number_rules(person), rule_id),
        depth=2,
        ask=(f"{verbs.introduce(verb)}{changes}. Form: {verbs.PERSON_NAMES[person]}, {meaning}."),
        rule=f"{verbs.person_rule(verb, person)}; {particle} follows for the {meaning}",
        answer=FORM,
        accept=unique([f for bare in conjugate(verb, person) for f in with_particle(bare, final, particle)]),
        prompt_forms=(verb.lemma,),
        floor_forms=(verb.lemma, f"{verb.lemma} {particle}"),
        invented=verb.gloss == GLOSS,
    )


def _framed(verb: Verb, person: str, frame: Frame) -> Question:
    """Ask for `verb` in `person` within `frame`; commands and participles have no person."""
    bare = frame in _WITHOUT_PERSON
    return Question(
        family="particles",
        facts=(verbs.fact(verb, person), f"{verbs.fact(verb, person)}/{frame.name}"),
        cells=(verbs.cell(verb, person), f"{frame.name}|{verbs.class_name(verb)}"),
        lemma_ids=(verb.lemma,),
        rule_ids=(frame.rule_id,) if bare else (*verb.rules, *verbs.number_rules(person), frame.rule_id),
        depth=1 if bare else 2,
        ask=(
            f"{verbs.name(verb)}. Form: {frame.meaning}."
            if bare
            else f"{verbs.introduce(verb)}. Form: {verbs.PERSON_NAMES[person]}, {frame.meaning}."
        ),
        rule=frame.rule if bare else f"{verbs.person_rule(verb, person)}; {frame.rule}",
        answer=FORM,
        accept=tuple(frame.around(form) for form in conjugate(verb, person)),
        prompt_forms=(verb.lemma,),
        floor_forms=(verb.lemma, frame.around(verb.lemma)),
        invented=verb.gloss == GLOSS,
    )


@lru_cache(maxsize=1)
def _goings() -> list[tuple[Verb, str, str]]:
    """The motion verbs, persons and particles with which one says what one goes to do."""
    motions = [verb for verb in load_corpus().verbs if verb.lemma in _MOTION_VERBS]
    return [(verb, person, p) for verb in motions for person in ("1sg", "2sg") for p in verbs.PARTICLE_WORDS]


@lru_cache(maxsize=1)
def _train_goings() -> list[tuple[Verb, str, str]]:
    """Those that may stand beside an invented verb, which no held-out fact may."""
    return [going for going in _goings() if side_of(question(*going)) == "train"]


def _purpose(verb: Verb, motion: Verb, person: str, particle: str) -> Question:
    """Ask for `motion` in order to do `verb`, which is contracted (PHON-04, SYN-05): `waŋyag mde kta`."""
    going = question(motion, person, particle)
    first, ending = contracted(verb.lemma), verb.lemma[-2:]
    meaning = verbs.PARTICLE_WORDS[particle][0]
    return replace(
        going,
        facts=(*going.facts, f"{verb.lemma}/contracted"),
        cells=(*going.cells, f"contracted|ends in {ending}"),
        lemma_ids=(verb.lemma, *going.lemma_ids),
        rule_ids=(*going.rule_ids, "PHON-04", "SYN-05"),
        depth=3,
        ask=(
            f"{verbs.name(verb)}. {going.ask.partition('. Form:')[0]}. "
            f'Form: {verbs.PERSON_NAMES[person]}, "{motion.lemma}" in order to do "{verb.lemma}", {meaning}.'
        ),
        rule=(
            f"the verb of purpose comes first, without its last vowel, and {ending[0]} before it "
            f"becomes {first[-1]}; {going.rule}"
        ),
        accept=tuple(f"{first} {form}" for form in going.accept),
        prompt_forms=(verb.lemma, motion.lemma),
        floor_forms=(verb.lemma, f"{verb.lemma} {motion.lemma} {particle}"),
        invented=verb.gloss == GLOSS,
    )
