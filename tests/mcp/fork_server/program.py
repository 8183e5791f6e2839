"""Program for tests that reads and writes lines of JSON and reports its own state."""

import gc
import io
import json
import os
import random
import select
import signal
import sys

import widgets

COUNTS = {"asked": 0}
RANDOM = random.random()


def memory_has(backwards):
    """Return True if a text is anywhere in this process's writable memory.

    The text is passed reversed, and is never assembled, so that the search does not find itself.
    """
    begins = backwards[:-9:-1].encode()
    whole = [ord(letter) for letter in reversed(backwards)]
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb") as memory:
        for line in maps:
            where, rights = line.split()[:2]
            if rights.startswith("rw"):
                begin, end = (int(edge, 16) for edge in where.split("-"))
                memory.seek(begin)
                data = memory.read(end - begin)
                at = -1
                while (at := data.find(begins, at + 1)) >= 0:
                    if all(data[at + i : at + i + 1] == b"%c" % code for i, code in enumerate(whole)):
                        return True
    return False


def answer(question):
    COUNTS["asked"] += 1
    if question == "wrap":  # as servers of the MCP SDK 1.x do
        for stream in (sys.stdin, sys.stdout):
            io.TextIOWrapper(stream.buffer, encoding="utf-8").detach()
        return "wrapped"
    if question == "collect":
        polls = [select.epoll() for _ in range(8)]
        gc.collect()
        return [os.readlink(f"/proc/self/fd/{poll.fileno()}") for poll in polls]
    if question == "end":
        print("last words", file=sys.stderr, flush=True)
        sys.exit(3)
    if question.startswith("find "):
        return memory_has(question[5:])
    return {
        "environment": dict(os.environ),
        "cwd": os.getcwd(),
        "arguments": sys.argv[1:],
        "name": __name__,
        "asked": COUNTS["asked"],
        "imports": widgets.IMPORTED_BY,
        "pid": os.getpid(),
        "session": os.getsid(0),
        "files": sorted(os.listdir("/proc/self/fd")),
        "random": RANDOM,
        "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "child": signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL,
    }


def main():
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
