"""The MCP server: `setup` starts a game, `move` moves the tiles, `evaluate` grades the game.

A process holds one game, so every session needs a separate process.
"""

from __future__ import annotations

from typing import Annotated, Any

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import CallToolResult, TextContent
from pydantic import Field

from text_2048.board import DIRECTIONS, Game
from text_2048.grading import EVALUATORS, grade

server = MCPServer("text-2048")
_game: list[Game] = []

Arguments = Annotated[
    dict[str, Any] | None, Field(description="The other arguments, if they are not given next to the name.")
]


@server.tool()
def setup(
    name: Annotated[str, Field(description="What to set up: board.")] = "board",
    seed: Annotated[int, Field(description="The same seed gives the same game.")] = 0,
    board_size: Annotated[int, Field(ge=2, le=8, description="Cells on each side.")] = 4,
    arguments: Arguments = None,
) -> CallToolResult:
    """Begin a game."""
    if name != "board":
        raise ToolError(f"cannot set up {name!r}; known: board")
    values = _merge_arguments(arguments, seed=seed, board_size=board_size)
    if not 2 <= values["board_size"] <= 8:
        raise ToolError("board_size must be from 2 to 8")
    _game[:] = [Game(int(values["seed"]), int(values["board_size"]))]
    return _board_result(_game[0])


@server.tool()
def move(direction: Annotated[str, Field(description="up, down, left or right.")]) -> CallToolResult:
    """Move all tiles in a direction. Equal tiles that meet become one of twice the number."""
    game = _current_game()
    if direction not in DIRECTIONS:
        raise ToolError(f"unknown direction {direction!r}; directions: {', '.join(DIRECTIONS)}")
    if game.is_over:
        raise ToolError("the game is over: no direction moves a tile")
    if not game.move(direction):
        raise ToolError(f"no tile can move {direction}. These directions can: {', '.join(game.legal_moves)}")
    return _board_result(game)


@server.tool()
def evaluate(
    name: Annotated[str, Field(description="max_number, efficiency or target.")] = "max_number",
    target: Annotated[int, Field(ge=8, description="The tile to reach.")] = 2048,
    min_ratio: Annotated[float, Field(gt=0, description="Merged sum a move for a full reward.")] = 10.0,
    arguments: Arguments = None,
) -> CallToolResult:
    """Grade the game from 0 to 1."""
    game = _current_game()
    if name not in EVALUATORS:
        raise ToolError(f"unknown evaluator {name!r}; known: {', '.join(EVALUATORS)}")
    values = _merge_arguments(arguments, target=target, min_ratio=min_ratio)
    reward = grade(game, name, target=int(values["target"]), min_ratio=float(values["min_ratio"]))
    data = {"reward": reward, "highest": game.highest, "moves": game.moves, "score": game.score}
    text = f"reward {reward:.4f}: highest tile {game.highest} after {game.moves} moves"
    return CallToolResult(content=[TextContent(text=text)], structured_content=data)


def _current_game() -> Game:
    if not _game:
        raise ToolError("no game has begun: call setup first")
    return _game[0]


def _merge_arguments(arguments: dict[str, Any] | None, **flat: Any) -> dict[str, Any]:
    """Return the flat arguments, replaced by those in an object. Raises ToolError for an unknown name."""
    nested = arguments or {}
    for name in nested:
        if name not in flat:
            raise ToolError(f"unknown argument {name!r}; known: {', '.join(flat)}")
    return flat | nested


def _board_result(game: Game) -> CallToolResult:
    text = str(game)
    if game.is_over:
        text += "\nGame over."
    data = {"done": game.is_over, "highest": game.highest, "moves": game.moves, "score": game.score}
    return CallToolResult(content=[TextContent(text=text)], structured_content=data)
