"""Shared state of rollouts is found in any storage; noise is not mistaken for it."""

import asyncio
import json
import logging
import random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.mcp.environment.http_server import mcp_by_http
from tests.mcp.gym import mapping
from tests.mcp.workdir.test_folder import config, task

from buckeye.errors import UsageError
from buckeye.mcp.environment import McpEnvironment
from buckeye.mcp.isolation.compare import ProbeRollout, find_leaks, find_suspicious_outputs
from buckeye.orchestrator.environments import NamedEnvironment, check_environments

SMALL = {"add": mapping("add", "text"), "notes": mapping("notes")}


def environment(one, actions=SMALL, **fields):
    return McpEnvironment(config(actions, **fields), {"train": [one]})


def http_notes(*, apart):
    """Run a server over HTTP whose sessions share one list of notes, or have separate lists if `apart`."""
    notes = {}
    schema = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
    empty = {"type": "object", "properties": {}}
    tools = [
        {"name": name, "inputSchema": schema if name == "add" else empty}
        for name in ("add", "notes", "evaluate")
    ]

    def call(session, params):
        mine = notes.setdefault(session if apart else "all", [])
        if params["name"] == "add":
            mine.append(params["arguments"]["text"])
        texts = {"add": "added", "notes": "\n".join(mine), "evaluate": json.dumps({"reward": len(mine)})}
        return texts[params["name"]]

    return mcp_by_http(tools, call)


@pytest.mark.parametrize("apart", [True, False])
def test_isolation_check_finds_a_global_of_an_http_server(apart):
    with http_notes(apart=apart) as (url, _):
        found = asyncio.run(environment(task(mcp_config={"notes": {"url": url}})).isolation(60))
    assert (found.tasks, found.rollouts, bool(found.shared)) == (1, 7, not apart)


def test_isolation_check_refuses_a_shared_file_unless_allowed(tmp_path):
    one = task(str(tmp_path / "notes.txt"))
    with pytest.raises(UsageError) as caught:
        asyncio.run(environment(one).check_isolation())
    assert caught.value.code == "BK-ENV-SHARED-STATE"
    allowed = asyncio.run(environment(one, shared_state=True).check_isolation())
    assert "shared_state" in allowed


@pytest.mark.e2e
def test_run_checks_isolation_before_training(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    shared = NamedEnvironment(name="notes", environment=environment(task(str(tmp_path / "notes.txt"))))
    apart = NamedEnvironment(name="own", environment=environment(task()))
    asyncio.run(check_environments([apart]))
    assert "own: " in caplog.text
    with pytest.raises(UsageError) as caught:
        asyncio.run(check_environments([apart, shared]))
    assert caught.value.code == "BK-ENV-SHARED-STATE"


@pytest.mark.e2e
def test_isolation_check_finds_shared_state_without_free_arguments(tmp_path):
    """No argument is free, and the results differ anyway in a clock and a random number."""
    mappings = {"add": {"_tool": "add", "text": "x"}, "notes": {"_tool": "notes"}}
    one = task(str(tmp_path / "notes.txt"), "clock")
    found = asyncio.run(environment(one, mappings).isolation(120))
    assert found.rollouts == 15
    assert any("alone" in text for text in found.shared)


def test_isolation_check_passes_a_server_with_a_clock():
    found = asyncio.run(environment(task("notes.txt", "clock")).isolation(300))
    assert (found.tasks, found.rollouts, list(found.shared)) == (1, 7, [])


def test_isolation_is_unknown_if_no_rollout_works():
    found = asyncio.run(environment(task(mcp_config={"notes": {"command": "no-such"}})).isolation(60))
    assert (found.tasks, list(found.shared)) == (0, [])
    assert "TaskError" in str(found)
    found = asyncio.run(environment(task()).isolation(0.001))
    assert "0.001 s" in str(found)


def plays(texts, processes=None):
    """Return results of two rollouts alone, of four concurrent ones, and of the others alone."""
    processes = processes or [(0, 0)] * len(texts)
    made = [
        ProbeRollout(outputs=[("look()", text)], mark=f"word{place:08x}", processes=given)
        for place, (text, given) in enumerate(zip(texts, processes, strict=True))
    ]
    return made[:2], made[2:6], made[6:]


@st.composite
def given_out(draw):
    """Draw the process ids of 15 rollouts in a fresh container; the concurrent ones share theirs."""
    last = draw(st.integers(2, 300 - 15 * 6))
    ranges = []
    for place in range(15):
        if not 2 < place < 6:  # the concurrent ones began with the third
            first, last = last, last + draw(st.integers(1, 6))
        ranges.append((first, last))
    return ranges


TEXTS = st.lists(
    st.one_of(
        st.integers(0, 300).map(str),
        st.floats(0, 300).map(lambda value: f"{value:.2f}"),
        st.sampled_from(["width 97 px", "0.97", "97%", "v1.97.2", "[97]", "port-97", "x97", "1,097", "-97"]),
    ),
    max_size=6,
).map(" ".join)


@given(given_out(), TEXTS)
def test_constant_numbers_equal_to_process_ids_are_not_state(processes, text):
    """Ids are small in a fresh container, so a number such as 0.97 may match process 97."""
    assert find_suspicious_outputs(*plays([text] * 15, processes)) == []


@given(
    given_out(),
    TEXTS,
    st.sampled_from(["by {}", "[{}]", "server-{}.log", "pid={}", "process {} of {}"]),
    st.data(),
)
def test_process_ids_are_not_state(processes, text, form, data):
    own = [data.draw(st.integers(low + 1, high)) for low, high in processes]
    texts = [f"{text} {form.replace('{}', str(pid))} {text}" for pid in own]
    assert find_suspicious_outputs(*plays(texts, processes)) == []


@given(given_out(), st.integers(2, 300), st.integers(1, 3))
def test_counter_is_found_among_process_ids(processes, start, step):
    counted = [start + step * place for place in range(15)]
    assume(not all(low <= value <= high for value, (low, high) in zip(counted, processes, strict=True)))
    texts = [f"server [{high}]: visit {value}" for value, (_, high) in zip(counted, processes, strict=True)]
    assert find_suspicious_outputs(*plays(texts, processes)) != []


@pytest.mark.parametrize("form", ["{} by pid 41", "{} (process id: 41)", "{} at /proc/41/fd"])
def test_state_is_found_despite_the_process_id_of_another_process(form):
    """The id of another process, such as a gateway, is in the range of no rollout or of one."""
    processes = [(30 + 5 * place, 35 + 5 * place) for place in range(15)]
    assert find_suspicious_outputs(*plays([form.format("made")] * 15, processes)) == []
    texts = [form.format("made"), *[form.format("is there already")] * 14]
    assert find_suspicious_outputs(*plays(texts, processes)) != []


@pytest.mark.parametrize(
    "texts",
    [
        [f"visit {n}" for n in range(1, 16)],
        [f"at 17955{n:05d} with 0.{n % 7}: row {5 * n}" for n in range(15)],
        ["a"] + ["a a"] * 1 + ["a " * n for n in (3, 5, 4, 6)] + ["a " * n for n in range(7, 16)],
        ["made"] + ["is there already"] * 14,
        ["free"] * 2 + ["free", "taken", "taken", "free"] + ["free"] * 9,
        ["empty"] * 2 + ["empty", "full", "full", "full"] + ["full"] * 9,
        [f"{n * 7919 % 100:02d} is open" for n in (1, 2)] + ["17 is shut"] * 4 + ["35 is open"] * 9,
    ],
)
def test_find_suspicious_outputs_finds_state(texts):
    before, parallel, after = plays(texts)
    assert find_suspicious_outputs(before, parallel, after)
    assert find_suspicious_outputs(before, parallel, after[:1])  # suspicious enough to run the others


@pytest.mark.parametrize(
    "make",
    [
        lambda dice, n: f"you rolled {dice.randint(1, 6)}",
        lambda dice, n: f"session {dice.getrandbits(64):016x} at 2026-11-24 18:{n:02d}:07.123",
        lambda dice, n: f"{1764000000 + n}",
        lambda dice, n: f"took {0.01 * n:.2f} s",
        lambda dice, n: " ".join(["word"] * dice.randint(1, 9)),
        lambda dice, n: "always",
    ],
)
def test_find_suspicious_outputs_ignores_noise(make):
    accused = 0
    for seed in range(200):
        dice = random.Random(seed)
        accused += bool(find_suspicious_outputs(*plays([make(dice, n) for n in range(15)])))
    assert accused <= 1


def test_find_leaks_ignores_the_own_word():
    one = ProbeRollout(outputs=[("notes()", "word1")], mark="word1")
    assert find_leaks([one, ProbeRollout(outputs=[("notes()", "word2")], mark="word2")]) == []
    assert find_leaks([one, ProbeRollout(outputs=[("notes()", "it is word1!")], mark="word2")]) != []
