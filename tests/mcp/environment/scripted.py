"""Policy that gives scripted replies and records the messages that it read."""

from buckeye.envs.base import Reply


class Scripted:
    """Policy that replies with texts, messages with `tool_calls`, or ("length", text) for a cut-off reply."""

    def __init__(self, *replies):
        self._replies = list(replies)
        self.seen = []
        self.tools = ()

    async def chat(self, messages, *, tools=()):
        self.seen = list(messages)
        self.tools = tools
        reply = self._replies.pop(0)
        finish = "stop"
        if isinstance(reply, tuple):
            finish, reply = reply
        message = reply if isinstance(reply, dict) else {"role": "assistant", "content": reply}
        return Reply(text=message.get("content") or "", finish_reason=finish, message=message)

    @property
    def last_read(self):
        """Newest message that the policy received."""
        return self.seen[-1]["content"]


def native(name, arguments, call_id="call-1"):
    """Return an assistant message with one native tool call."""
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}
