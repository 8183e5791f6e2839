"""Write prompts to train on and chats of a beginner to `outputs/`; `reward` is the reward of a reply."""

import json
import random
from pathlib import Path

LETTERS, LENGTH = "abcdefgh", 5
KNOWN = 0.6  # share of letters that the beginner reverses; the others are random


def reward(prompt, completion, answer, **row):
    """Return the share of letters in the right place."""
    text = completion.removeprefix("<answer>").removesuffix("</answer>")
    return sum(a == b for a, b in zip(text, answer)) / max(len(text), len(answer))


def main():
    """Write the files."""
    draw, out = random.Random(0), Path("outputs")
    out.mkdir(exist_ok=True)
    texts = ["".join(draw.choices(LETTERS, k=LENGTH)) for _ in range(4_000)]
    with open(out / "prompts.jsonl", "w") as prompts, open(out / "chats.jsonl", "w") as chats:
        for text in texts:
            prompt, answer = f'Reverse "{text}"', text[::-1]
            attempt = "".join(a if draw.random() < KNOWN else draw.choice(LETTERS) for a in answer)
            chat = [{"role": "user", "content": prompt}]
            chat.append({"role": "assistant", "content": f"<answer>{attempt}</answer>"})
            prompts.write(json.dumps({"prompt": prompt, "answer": answer}) + "\n")
            chats.write(json.dumps({"messages": chat}) + "\n")


if __name__ == "__main__":
    main()
