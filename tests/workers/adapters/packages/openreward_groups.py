"""Environment of openreward that compares replies: the longest of a group scores 1, each note a tenth."""

from openreward.environments import Environment, GroupScore, Split, TextBlock, ToolOutput, terminal, tool
from pydantic import BaseModel


class Text(BaseModel):
    text: str


class Longest(Environment):
    @classmethod
    def list_splits(cls):
        return [Split(name="train", type="train")]

    @classmethod
    def list_tasks(cls, split):
        return [{"word": word} for word in ("sea", "moon")]

    async def get_prompt(self):
        return [TextBlock(text=f"Write about the {self.task_spec['word']}.")]

    @tool
    async def note(self, given: Text) -> ToolOutput:
        """Note something."""
        return ToolOutput(blocks=[TextBlock(text=f"noted {given.text}")], reward=0.25)

    @terminal
    @tool
    async def end(self, given: Text) -> ToolOutput:
        """End with a text."""
        right = self.task_spec["word"] in given.text
        return ToolOutput(blocks=[TextBlock(text="")], reward=float(right), finished=True)

    async def score_group(self, candidates):
        texts, notes = zip(*(self.read(candidate) for candidate in candidates), strict=True)
        if "unclear" in texts:
            raise ValueError("the judge has no verdict")
        longest = max(map(len, texts))
        scores = [(len(text) == longest) + count / 10 for text, count in zip(texts, notes, strict=True)]
        return [GroupScore(reward=scores[0]), *scores[1:]]

    @staticmethod
    def read(candidate):
        """Return the last text, and the number of notes whose result is right."""
        blocks = [(message.role, block) for message in candidate.messages for block in message.blocks]
        calls = {block.id: block.input["text"] for _, block in blocks if block.type == "tool_call"}
        results = [(role, block) for role, block in blocks if block.type == "tool_result"]
        noted = [
            role == "user" and block.blocks[0].text == f"noted {calls[block.tool_call_id]}"
            for role, block in results
        ]
        return candidate.messages[-1].blocks[-1].text, sum(noted)
