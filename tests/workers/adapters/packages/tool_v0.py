"""Classic environment of verifiers with a tool."""

import verifiers as vf
from datasets import Dataset


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


def exact(completion, answer):
    return float(str(completion[-1].content or "").strip() == answer)


def load_environment(num_tasks: int = 4):
    rows = [{"question": f"{n} times 7?", "answer": str(n * 7)} for n in range(2, 2 + num_tasks)]
    return vf.ToolEnv(
        tools=[multiply], max_turns=4, dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[exact])
    )
