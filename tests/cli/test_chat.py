"""`buckeye chat`: ways to end a conversation."""

from contextlib import asynccontextmanager

import pytest

from buckeye.cli import model


class Parrot:
    def __init__(self):
        self.asked = []

    async def context_length(self):
        return 64

    async def complete(self, body):
        assert body["max_tokens"] == 64
        self.asked.append(body["messages"][-1]["content"])
        return {"choices": [{"message": {"content": "yes"}}]}


@pytest.mark.parametrize("leave", ["/exit", " /quit ", "", EOFError])
def test_chat_ends_at_an_exit_command(monkeypatch, capsys, leave):
    parrot, lines = Parrot(), iter(["/etc/passwd is what?", leave])

    @asynccontextmanager
    async def served(*_, **__):
        yield parrot

    def typed(prompt):
        assert prompt == ""  # stdin is not a terminal
        line = next(lines)
        if line is EOFError:
            raise EOFError
        return line

    monkeypatch.setattr(model, "_fetch_chat_model", lambda name: name)
    monkeypatch.setattr(model, "model_server", served)
    monkeypatch.setattr("builtins.input", typed)
    model.chat("a model")
    assert parrot.asked == ["/etc/passwd is what?"]
    out = capsys.readouterr()
    assert out.out == "yes\n"
    assert "/exit" in out.err
