"""Taskset of verifiers v1 without tools."""

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str
    for_letters: bool


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def exact(self, trace: vf.Trace) -> float:
        if trace.last_reply.strip() == "raise":
            raise ValueError("the grader broke")
        return float(trace.last_reply.strip() == self.data.answer)

    @vf.reward
    async def letters(self, trace: vf.Trace) -> float:
        """Reward lowercase letters, which a tiny model can learn."""
        said = trace.last_reply.strip()[:3] if self.data.for_letters else ""
        return sum(character.islower() for character in said) / 3

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class SumConfig(vf.TasksetConfig):
    split: str = "train"
    num_tasks: int = 4
    for_letters: bool = False


class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    def load(self):
        first = 1 if self.config.split == "train" else 100
        for n in range(first, first + self.config.num_tasks):
            data = SumData(
                prompt=f"{n} and {n}?",
                system_prompt="Add.",
                answer=str(2 * n),
                for_letters=self.config.for_letters,
            )
            yield SumTask(data, self.config.task)


__all__ = ["SumTaskset"]
