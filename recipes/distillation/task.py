"""Letters in capitals: prompts, chats of a teacher, and chats of a student with many errors."""

import json
import random
from pathlib import Path

LETTERS, LENGTH = "abcdefgh", 5
KNOWN = {"teacher": 1.0, "student": 0.5}  # share of right letters


def reward(prompt, completion, answer, **row):
    """Return the share of right letters. It is only shown: `reward_weight` is 0."""
    text = completion.removeprefix("<answer>").removesuffix("</answer>")
    return sum(a == b for a, b in zip(text, answer)) / max(len(text), len(answer))


def main():
    """Write the files to `outputs/`."""
    draw, out = random.Random(0), Path("outputs")
    out.mkdir(exist_ok=True)
    texts = ["".join(draw.choices(LETTERS, k=LENGTH)) for _ in range(4_000)]
    with open(out / "prompts.jsonl", "w") as prompts:
        for text in texts:
            prompts.write(json.dumps({"prompt": question(text), "answer": text.upper()}) + "\n")
    for name, known in KNOWN.items():
        with open(out / f"{name}.jsonl", "w") as chats:
            for text in texts:
                attempt = "".join(
                    a if draw.random() < known else draw.choice(LETTERS.upper()) for a in text.upper()
                )
                chat = [{"role": "user", "content": question(text)}]
                chat.append({"role": "assistant", "content": f"<answer>{attempt}</answer>"})
                chats.write(json.dumps({"messages": chat}) + "\n")


def question(text):
    """Return the prompt."""
    return f'Write "{text}" in capitals'


if __name__ == "__main__":
    main()
