"""The MCP server. A process holds one game, so every session has a separate process."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Annotated, Any

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import Field

HIGHEST = 1000


@dataclass
class Game:
    """A number from 1 to 1000, and the guesses."""

    number: int
    guesses: int = 0
    found: bool = False

    def guess(self, number: int) -> str:
        """Return the text that the model reads."""
        self.guesses += 1
        if number == self.number:
            self.found = True
            return "found"
        return "higher" if number < self.number else "lower"

    def reward(self, within: int) -> float:
        """Return 1 if the number was found in `within` guesses, else 0."""
        return float(self.found and self.guesses <= within)


server = MCPServer("my-env")
_game: list[Game] = []


@server.tool()
def setup(seed: Annotated[int, Field(description="The same seed gives the same number.")] = 0) -> str:
    """Begin a game. Called by the task, never by the model."""
    _game[:] = [Game(random.Random(seed).randint(1, HIGHEST))]
    return f"I have a number from 1 to {HIGHEST} in mind."


@server.tool()
def guess(number: Annotated[int, Field(description=f"From 1 to {HIGHEST}.")]) -> str:
    """Say a number; the answer is higher, lower or found."""
    return _current().guess(number)


@server.tool()
def evaluate(
    within: Annotated[int, Field(ge=1, description="Guesses that are enough.")] = 10,
) -> dict[str, Any]:
    """Grade the game. Called by the task, never by the model."""
    game = _current()
    return {"reward": game.reward(within), "done": game.found, "info": {"guesses": game.guesses}}


def _current() -> Game:
    if not _game:
        raise ToolError("no game has begun: call setup first")
    return _game[0]


if __name__ == "__main__":
    server.run()
