"""Questions about sentences: put the words in order, or inflect them too."""

from __future__ import annotations

from dakota1890.draws import Draws
from dakota1890.families.sentences.frames import Sentence, draw_sentence
from dakota1890.questions import WORDS, Family, Question, unique


def _draw(draws: Draws) -> Question:
    sentence = draw_sentence(draws)
    return in_order(sentence, draws) if draws.below(2) else assembled(sentence, draws)


ORDER = Family(name="order", draw=_draw)


def in_order(sentence: Sentence, draws: Draws) -> Question:
    """Ask for the sentence; all its words are given in their forms."""
    accept = sentence.texts(all_spellings=False)
    words = [word for part in sentence.parts for word in part.forms[0]]
    shown = [word for part in sentence.parts for word in part.shown]
    order = _shuffled(words, accept, draws)
    return _question(
        sentence,
        ask=f'Put the Dakota words in order. Meaning: "{sentence.english}" '
        f"Words: {', '.join(shown[i] for i in order)}.",
        rule=sentence.rule,
        accept=accept,
        words=[words[i] for i in order],
    )


def assembled(sentence: Sentence, draws: Draws) -> Question:
    """Ask for the sentence; its words are given uninflected."""
    accept = sentence.texts()
    words = [word for part in sentence.parts for word in part.plain]
    given = [word for part in sentence.parts for word in part.given]
    order = _shuffled(words, accept, draws)
    return _question(
        sentence,
        ask=f'Say in Dakota: "{sentence.english}" Use each word once and inflect only verbs'
        f"{' and predicates' if sentence.frame == 'quality' else ''}: {', '.join(given[i] for i in order)}.",
        rule=f"{sentence.rule}; {sentence.inflected}" if sentence.inflected else sentence.rule,
        accept=accept,
        words=[words[i] for i in order],
    )


def _question(
    sentence: Sentence, *, ask: str, rule: str, accept: tuple[str, ...], words: list[str]
) -> Question:
    parts = sentence.parts
    lazy = " ".join(words), " ".join(reversed(words))
    return Question(
        family="order",
        facts=unique([*(fact for part in parts for fact in part.facts), f"sentence/{accept[0]}"]),
        cells=unique([*(cell for part in parts for cell in part.cells), f"{sentence.mode}|{sentence.frame}"]),
        lemma_ids=unique([lemma for part in parts for lemma in part.lemma_ids]),
        rule_ids=unique(sentence.rule_ids),
        depth=4,
        ask=ask,
        rule=rule,
        answer=WORDS,
        accept=accept,
        prompt_forms=lazy,
        floor_forms=lazy,
    )


def _shuffled(words: list[str], accept: tuple[str, ...], draws: Draws) -> list[int]:
    """Return a random order of the words that is not accepted, neither forward nor backward."""
    order = list(range(len(words)))
    while True:
        for i in range(len(order) - 1, 0, -1):
            j = draws.below(i + 1)
            order[i], order[j] = order[j], order[i]
        shown = [words[i] for i in order]
        if " ".join(shown) not in accept and " ".join(reversed(shown)) not in accept:
            return order
