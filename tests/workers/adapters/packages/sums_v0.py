"""Classic environment of verifiers with one turn, which asks for the number of letters of a word."""

import verifiers as vf
from datasets import Dataset

WORDS = ["a", "to", "sun", "tree", "house", "winter"]


def exact(completion, answer):
    return float(completion[-1].content.strip() == answer)


def length(completion):
    return float(len(completion[-1].content))


def letters(completion):
    """Reward lowercase letters, which a tiny model can learn."""
    return sum(character.islower() for character in completion[-1].content.strip()[:3]) / 3


def breaks(completion):
    raise ValueError("the grader broke")


def relative(completions):
    """Reward the longest reply of a group."""
    lengths = [len(completion[-1].content) for completion in completions]
    return [float(length == max(lengths)) for length in lengths]


def load_environment(
    broken: bool = False, for_letters: bool = False, in_groups: bool = False, num_eval: int = 0
):
    rows = [{"question": f"letters of {word}?", "answer": str(len(word)), "info": {}} for word in WORDS]
    rubric = vf.Rubric(funcs=[exact, length], weights=[1.0, 0.0])
    if for_letters:
        rubric.add_reward_func(letters)
    if broken:
        rubric.add_reward_func(breaks)
    if in_groups:
        rubric.add_reward_func(relative, weight=0.5)
    return vf.SingleTurnEnv(
        dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(rows[:num_eval]) if num_eval else None,
        system_prompt="Answer with a number.",
        rubric=rubric,
    )
