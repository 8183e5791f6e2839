"""Taskset of verifiers v1 with a tool that all its tasks share."""

import verifiers.v1 as vf


class CalcToolset(vf.Toolset[vf.SharedToolsetConfig]):
    TOOL_PREFIX = "calc"

    @vf.tool
    def multiply(self, a: int, b: int) -> int:
        """Multiply two numbers."""
        return a * b


class TimesData(vf.TaskData):
    answer: str


class TimesTask(vf.Task[TimesData]):
    @vf.reward
    async def exact(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)


class TimesConfig(vf.TasksetConfig):
    tools: vf.SharedToolsetConfig = vf.SharedToolsetConfig()


class TimesTaskset(vf.Taskset[TimesTask, TimesConfig]):
    INFINITE = True

    @classmethod
    def toolsets(cls, config):
        return [CalcToolset(config.tools)]

    def load(self):
        n = 0
        while True:
            n += 1
            yield TimesTask(TimesData(prompt=f"{n} times 7?", answer=str(n * 7)), self.config.task)


__all__ = ["TimesTaskset"]

if __name__ == "__main__":
    CalcToolset.run()
