"""Environment of the Open Reward Standard: find a number, with hints that cost a tenth."""

from ors import Environment, Split, TextBlock, ToolOutput, tool
from pydantic import BaseModel


class Number(BaseModel):
    number: int


class Guess(Environment):
    @classmethod
    def list_splits(cls):
        return [Split(name="held out", type="test"), Split(name="games", type="train")]

    @classmethod
    def list_tasks(cls, split):
        return [{"number": number} for number in (range(1, 9) if split == "games" else (9, 10))]

    async def setup(self):
        self.hints = 0
        if self.task_spec["number"] == 10:
            raise OSError("no game 10")

    def get_prompt(self):
        return [TextBlock(text="Find the number from 1 to 9.")]

    @tool
    def hint(self) -> ToolOutput:
        """Say if the number is even."""
        self.hints += 1
        text = "even" if self.task_spec["number"] % 2 == 0 else "odd"
        return ToolOutput(blocks=[TextBlock(text=text)], reward=-0.1)

    @tool
    async def guess(self, given: Number) -> ToolOutput:
        """End with this number."""
        right = given.number == self.task_spec["number"]
        text = "right" if right else "wrong"
        return ToolOutput(blocks=[TextBlock(text=text)], reward=float(right), finished=True)
