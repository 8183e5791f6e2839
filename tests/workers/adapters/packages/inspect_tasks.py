"""Tasks of Inspect: sums with two scorers, products with a tool, letters, and tasks that cannot be run."""

from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.scorer import Score, accuracy, includes, match, model_graded_qa, scorer
from inspect_ai.solver import generate, multiple_choice, system_message, use_tools
from inspect_ai.tool import tool


@tool
def multiply():
    async def execute(a: int, b: int) -> str:
        """Multiply two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        if a > 100:
            raise OSError("too large")
        return str(a * b)

    return execute


@scorer(metrics=[accuracy()])
def letters():
    async def score(state, target):
        return Score(value=sum(character.islower() for character in state.output.completion.strip()[:3]) / 3)

    return score


def samples(text, answer, numbers):
    return MemoryDataset([Sample(input=text.format(n), target=str(answer(n)), id=n) for n in numbers])


@task
def sums(first=0, count=10):
    data = samples("{0} and {0}?", lambda n: 2 * n, range(first, first + count))
    return Task(data, solver=[system_message("Be brief."), generate()], scorer=[match(), includes()])


@task
def products():
    data = samples("{} times 7?", lambda n: 7 * n, range(2, 12))
    return Task(data, solver=[use_tools(multiply()), generate()], scorer=match(), message_limit=8)


@task
def choices():
    data = [Sample(input=f"{n} and 1?", choices=[str(n), str(n + 1)], target="B") for n in range(10)]
    return Task(MemoryDataset(data), solver=multiple_choice(), scorer=match(location="any"))


@task
def spoken():
    return Task(samples("say {}", str, range(20)), solver=generate(), scorer=letters())


@task
def graded():
    return Task(samples("{}", str, range(2)), solver=generate(), scorer=model_graded_qa())


@task
def boxed():
    return Task(samples("{}", str, range(2)), solver=generate(), scorer=match(), sandbox="docker")
