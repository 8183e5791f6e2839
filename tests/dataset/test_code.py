"""The reward `code`: tests that pass and fail, and code that does harm."""

import asyncio
import uuid

import pytest

from buckeye.dataset import built_in
from buckeye.dataset.functions import Completion
from tests.dataset.test_built_in import environment_of
from tests.mcp.environment.leaks import processes_with

ADD = "def add(a, b):\n    return a + b\n"
TESTS = ["assert add(1, 2) == 3", "assert add(0, 0) == 0"]
PROGRAM = [{"input": "3\n", "output": "6\n"}, {"input": "4\n", "output": "8"}]


def score(code, tests=TESTS, seconds=None, **row):
    from tests.dataset.conftest import grade

    (outcome,) = grade(environment_of("code", {"tests": tests, **row}), f"```python\n{code}\n```")
    assert outcome.error is None
    return outcome.reward, outcome.explanations["code"]


@pytest.mark.parametrize(
    ("code", "tests", "reward"),
    [
        (ADD, TESTS, 1.0),
        (ADD, "\n".join(TESTS), 1.0),
        (ADD, '["assert add(1, 2) == 3", "assert add(1, 1) == 3"]', 0.5),
        (ADD.replace("+", "-"), TESTS, 0.5),
        ("def add(a, b) return", TESTS, 0.0),
        ("print(2 * int(input()))", PROGRAM, 1.0),
        ("print(6)", PROGRAM, 0.5),
        ("print(2 * int(input()))", {"inputs": ["3"], "outputs": ["6"]}, 1.0),
        ("import sys\nprint(2 * int(input()))\nsys.exit()", PROGRAM, 1.0),
        ("import warnings\nwarnings.warn('old')\nx = '\\d'\nprint(2 * int(input()))", PROGRAM, 1.0),
        ("import sys\nfor line in sys.stdin:\n    print(2 * int(line))", PROGRAM, 1.0),
        (
            "from __future__ import annotations\nfrom dataclasses import dataclass\n"
            "@dataclass\nclass Sum:\n    a: int\ndef add(a, b):\n    return Sum(a + b).a\n",
            TESTS,
            1.0,
        ),
    ],
)
def test_the_reward_is_the_share_of_passed_tests(code, tests, reward):
    assert score(code, tests)[0] == reward


def test_a_test_that_defines_check_is_called_with_the_entry_point():
    test = "def check(candidate):\n    assert candidate(1, 2) == 3\n"
    assert score(ADD, test, entry_point="add")[0] == 1.0
    assert score(ADD.replace("+", "-"), test, entry_point="add")[0] == 0.0
    assert score(ADD.replace("+", "-"), test + "\ncheck(add)\n")[0] == 0.0


HARMFUL = {
    "endless": ("while True:\n    pass", "timeout"),
    "sleeps": ("import time\ntime.sleep(60)", "timeout"),
    "exit": ("import sys\nsys.exit(0)", "SystemExit"),
    "os exit": ("import os\nos._exit(0)", "ended the process"),
    "quit": ("quit()", ""),
    "killed": ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "ended the process"),
    "kills its group": ("import os, signal\nos.killpg(0, signal.SIGKILL)", "ended the process"),
    "memory": ("x = bytearray(16 * 2**30)", "MemoryError"),
    "recursion": ("def f():\n    f()\nf()", "RecursionError"),
    "network": ("import socket\nsocket.create_connection(('1.1.1.1', 53), 3)", ""),
    "huge output": ("while True:\n    print('x' * 10**6)", ""),
    "closed output": ("import sys\nsys.stdout.close()\nraise ValueError('no')", ""),
    "no files of the user": ("open('/etc/hostname-of-nobody')", "FileNotFoundError"),
}


@pytest.mark.parametrize("case", HARMFUL)
def test_harmful_code_fails_its_tests_and_nothing_else(monkeypatch, case):
    monkeypatch.setattr(built_in, "_TEST_SECONDS", 2.0)
    code, reason = HARMFUL[case]
    reward, explanation = score(ADD + code, TESTS[:1])
    assert reward == 0.0
    assert reason in explanation


def test_processes_that_the_code_leaves_are_killed_and_cannot_replace_the_result(monkeypatch):
    monkeypatch.setattr(built_in, "_TEST_SECONDS", 2.0)
    mark = str(uuid.uuid4())
    code = f"""
import os, subprocess, sys
writer = '''
import glob, json, time
# {mark}
while True:
    for name in glob.glob("/tmp/**/result.json", recursive=True) + ["../result.json"]:
        try:
            open(name, "w").write(json.dumps({{"passed": 1, "failures": [], "key": ""}}))
        except OSError:
            pass
'''
for _ in range(4):
    subprocess.Popen([sys.executable, "-c", writer], start_new_session=True)
os._exit(0)
"""
    assert score(code, TESTS[:1])[0] == 0.0
    assert processes_with(mark) == []


def test_code_that_forks_keeps_no_test_waiting(monkeypatch):
    monkeypatch.setattr(built_in, "_TEST_SECONDS", 2.0)
    code = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(30)\nos._exit(0)"
    assert score(code)[0] == 0.0


SPIES = {
    "standard input": "import sys\nprint(sys.stdin.read())",
    "files": "from glob import glob\nfor name in [*glob('../*'), *glob('../*/*'), *glob('../../*/input')]:\n"
    "    try:\n        print(open(name).read())\n    except (OSError, ValueError):\n        print(name)",
    "memory": "import gc\nprint([x for x in gc.get_objects() if isinstance(x, (dict, list))])",
    "frames": "import sys\nf = sys._getframe()\nwhile f:\n    print(f.f_locals)\n    f = f.f_back",
    "parent": "import os\nfor n in range(10):\n    try:\n"
    "        print(open(f'/proc/{os.getppid()}/fd/{n}').read())\n"
    "    except (OSError, ValueError):\n        print(n)",
}


@pytest.mark.parametrize("case", SPIES)
def test_code_cannot_read_expected_outputs(case):
    secret = str(uuid.uuid4())
    _, explanation = score(SPIES[case], [{"input": "", "output": f"{secret} end"}])
    found = explanation.partition(", found ")[2]
    assert found
    assert secret not in found


def test_several_event_loops_may_score():
    environment = environment_of("code", {"tests": TESTS})
    (task,) = environment.tasks("train")
    completions = [Completion(text=ADD, message={})]

    async def run():
        return await asyncio.gather(*(environment._grade(task, completions) for _ in range(4)))

    for _ in range(2):
        assert [outcome.reward for (outcome,) in asyncio.run(run())] == [1.0] * 4


def test_tests_do_not_see_files_of_earlier_tests():
    tests = ["open('left', 'x').close()", "open('left', 'x').close()"]
    assert score(ADD, tests)[0] == 1.0
