"""Task sets with little, no or too much content, and a grader that compares texts."""

from buckeye.envs.base import Outcome, Task


def _task(number, content, **data):
    messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
    return Task(id=f"t{number}", messages=messages, data=data)


LONG = "word " * 200_000
SMALL = {
    "no words": lambda: [_task(n, f"{n}+{n}=?", answer=str(2 * n)) for n in range(12)],
    "signs only": lambda: [_task(n, "?" * (n + 1), answer="!") for n in range(4)],
    "one task": lambda: [_task(0, "3+3=?", answer="6")],
    "equal prompts": lambda: [_task(n, "Say it.", answer=str(n)) for n in range(6)],
    "equal tasks": lambda: [_task(0, "Say it.", answer="a") for _ in range(6)],
    "empty prompts": lambda: [_task(n, "", answer="a") for n in range(4)],
    "spaces only": lambda: [_task(n, " \n\t", answer=" ") for n in range(4)],
    "empty answers": lambda: [_task(n, f"Say nothing {n}.", answer="") for n in range(4)],
    "no answers": lambda: [_task(n, f"Go {n}.") for n in range(4)],
    "null answers": lambda: [_task(n, f"Go {n}.", answer=None, accept=[]) for n in range(4)],
    "answers of all kinds": lambda: [
        _task(n, f"Go {n}.", answer=answer)
        for n, answer in enumerate(
            [0, 1.5, True, [], [1], {}, {"a": 1}, float("nan"), b"x", object, ["a", ""]]
        )
    ],
    "no messages": lambda: [_task(n, [], answer="a") for n in range(4)],
    "only a system message": lambda: [
        _task(n, [{"role": "system", "content": "3"}], answer="3") for n in range(4)
    ],
    "null content": lambda: [_task(n, [{"role": "user", "content": None}], answer="a") for n in range(4)],
    "parts": lambda: [
        _task(
            n,
            [{"role": "user", "content": [{"type": "text", "text": f"{n}"}, {"type": "image_url"}]}],
            answer="a",
        )
        for n in range(4)
    ],
    "the sign of a format": lambda: [_task(n, f"<a>\ufffc</a> {n}", answer="\ufffc") for n in range(2)],
    "many answers": lambda: [_task(n, "Go.", accept=[str(k) for k in range(2_000)]) for n in range(2)],
    "half a character": lambda: [_task(n, f"\ud83d {n}", answer="\ud83d") for n in range(4)],
    "control signs": lambda: [_task(n, f"\x00\x1b[31m{n}", answer="\x00") for n in range(4)],
    "families without a name": lambda: [
        _task(n, "3", answer="3", family=f) for n, f in enumerate(["", None, 1, "\n"])
    ],
    "empty ids": lambda: [Task(id="", messages=[{"role": "user", "content": "3"}], data={"answer": "3"})] * 3,
}
LONG_SETS = {
    "long prompts": lambda: [_task(n, f"{n} {LONG}", answer=f"a{n}") for n in range(3)],
    "long lines of digits": lambda: [_task(n, f"{n}," + "123," * 250_000, answer=f"{n}") for n in range(2)],
    "long quotations": lambda: [_task(n, f'"{LONG}" {n} "', answer="a") for n in range(2)],
    "long tags": lambda: [_task(n, "<a>" * 300_000 + str(n), answer="a") for n in range(2)],
    "long answers": lambda: [_task(n, f"Go {n}.", answer=LONG + str(n)) for n in range(2)],
    "a long number": lambda: [_task(n, f"{n}" + "9" * 1_100_000, answer="9" * 5_000) for n in range(2)],
    "a long word": lambda: [_task(n, f"{n}" + "a" * 1_000_000, answer="a") for n in range(2)],
    "long lists": lambda: [_task(n, f"{n}: " + "a, b or c " * 100_000, answer="b") for n in range(2)],
    "many lines": lambda: [_task(n, "- a\n" * 200_000 + f"{n}", answer="a") for n in range(2)],
}
SETS = SMALL | LONG_SETS


class Degenerate:
    name = "degenerate"
    splits = ("train",)

    def __init__(self, kind):
        self._tasks = SETS[kind]()

    def tasks(self, split):
        return self._tasks

    async def rollout(self, task, policy):
        reply = await policy.chat(task.messages)
        right = reply.text.strip() == str(task.data.get("answer", "")).strip()
        return Outcome(reward=float(right), stop_reason="done")


def load_environment(kind="no words"):
    return Degenerate(kind)
