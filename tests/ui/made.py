"""Directory of a synthetic run, with the files of its processes.

It includes a rollout that attacks any viewer that does not show it as plain text.
"""

import json
import socket

import numpy as np

from buckeye.base.process import RunIdentity
from buckeye.run_files.record import RunRecord, write_record
from buckeye.transport.batches import Batch, Sample, TrainedBatch, archive_trained_batch

STARTED = 1_700_000_000.0
HOSTILE = (
    "<script>window.harmed = 1</script><img src=x onerror='window.harmed = 1'> \x1b[31mred\x1b[0m "
    "\u202ereversed\u202c {{7*7}} ${7*7} </script><!-- \x00 javascript:alert(1)"
)
PROMPT = [{"role": "system", "content": "Count."}, {"role": "user", "content": "How many?"}]


def make_run(path, *, steps=4, state="finished", tokens=True, long=0):
    """Make a run with two groups of four rollouts per step.

    One rollout is hostile, and the last one has called a tool. `long` sets the length of a reply in
    characters.
    """
    for folder in ("rollouts", "configs", "evals/step_0", "logs/attempt_1"):
        (path / folder).mkdir(parents=True)
    attempts = [{"attempt": 1, "started": STARTED, "resumed_step": None}]
    identity = {"run_id": "aaaa1111", "attempt": 1, "attempts": attempts}
    (path / "run.json").write_text(json.dumps(identity))
    settings = {"trainer": {"optim": {"lr": 1e-3}}, "orchestrator": {"batch_size": 8}}
    (path / "configs" / "rl.json").write_text(json.dumps(settings))
    write_record(path, _record(path, steps, state))
    with (path / "metrics.jsonl").open("w") as metrics, (path / "events.jsonl").open("w") as events:
        for step in range(steps):
            _write_step(path, step, metrics, events, tokens=tokens, long=long)
    figures = {"mean_reward": 0.25, "exact": 0.25, "ci95": [0.1, 0.5], "n": 4, "errored": 0, "seconds": 2.0}
    (path / "evals" / "step_0" / "sums.json").write_text(json.dumps(figures))
    line = {"task_id": "eval-0", "rollout": 0, "reward": 0.25, "messages": [*PROMPT, _said("3")], "turns": 1}
    (path / "evals" / "step_0" / "sums.jsonl").write_text(json.dumps(line) + "\n")
    log = f"2023-11-14 22:13:21,000 [rl] INFO {HOSTILE}\n"
    (path / "logs" / "run.log").write_bytes(log.encode())
    (path / "logs" / "attempt_1" / "trainer.stdout").write_bytes(b"22:13:22    INFO Step 0 \xff\xfe\n")
    return path


def _record(path, steps, state):
    return RunRecord(
        run_id="aaaa1111",
        attempt=1,
        state=state,
        host=socket.gethostname(),
        launcher=None,
        arguments=("@", "run.toml"),
        working_directory=str(path.parent),
        max_steps=steps,
        max_async_level=1,
        start_step=0,
        stop_seconds=60.0,
        started=STARTED,
        ended=STARTED + 100.0 if state == "finished" else None,
        reason="out of memory" if state == "failed" else None,
    )


def _said(text, **more):
    return {"role": "assistant", "content": text, **more}


def rollout(step, number, *, long=0):
    """Return a record of `rollouts/`: rewards are 0 to 3/4, and the group is twice the step, or one more."""
    group, place = 2 * step + number // 4, number % 4
    called = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    said = {
        0: [_said(f"{step} is few")],
        1: [_said(HOSTILE if not long else "x" * long)],
        2: [_said("3", reasoning_content="one and two are three")],
        3: [
            _said("", tool_calls=[called]),
            {"role": "tool", "content": "3", "tool_call_id": "c"},
            _said("It is 3."),
        ],
    }[place]
    return {
        "group": group,
        "env": "sums",
        "task_id": f"train-{group % 3}",
        "reward": place / 4,
        "shaped_reward": place / 4,
        "advantages": [place / 4 - 0.375],
        "components": {"exact": place / 4, "brevity": 1.0},
        "explanations": {"exact": f"{place} of 4"},
        "stop_reason": "done",
        "truncated": place == 0,
        "seconds": 1.5,
        "ended": STARTED + 10.0 * step + 2.0 + place,
        "turns": 1,
        "completion_tokens": 3,
        "oldest_version": step,
        "text": ["How many?" + str(said[-1]["content"])[:200]],
        "messages": [*PROMPT, *said],
    }


def _write_step(path, step, metrics, events, *, tokens, long):
    lines = [json.dumps(rollout(step, number, long=long)) for number in range(8)]
    (path / "rollouts" / f"step_{step}.jsonl").write_text("\n".join(lines) + "\n")
    at = STARTED + 10.0 * step
    for process, values in (
        ("orchestrator", {"reward/mean": 0.1 * step, "batch/solve_none": 0.5, "time/wait_for_rollouts": 2.0}),
        (
            "trainer",
            {"loss": 0.5, "entropy": 1.0, "time/wait": 2.0, "time/compute": 3.0, "time/publish": 1.0},
        ),
    ):
        record = {"time": at + 5.0, "attempt": 1, "process": process, "step": step, **values}
        metrics.write(json.dumps(record) + "\n")
    events.write(json.dumps({"time": at, "event": "weights", "attempt": 1, "step": step}) + "\n")
    if tokens:
        _keep(path, step)


def _keep(path, step):
    """Keep two prompt tokens and three sampled tokens of each rollout."""
    mask = np.array([False, False, True, True, True])
    samples = tuple(
        Sample(
            token_ids=np.array([72, 105, 65 + number, 66, 67], np.int32),
            loss_mask=mask,
            logprobs=np.where(mask, np.float32(-0.5), np.float32(0)),
            versions=np.where(mask, np.int32(step), np.int32(-1)),
            advantages=np.where(mask, np.float32(number % 4 / 4 - 0.375), np.float32(0)),
            temperature=1.0,
        )
        for number in range(8)
    )
    trained = TrainedBatch(
        samples=np.arange(8, dtype=np.int32),
        logprobs=np.full(24, -0.75, np.float32),
        record={"values": {}},
    )
    batch = Batch(step=step, samples=samples, orchestrator_state={})
    archive_trained_batch(
        path / "batches",
        path / "trained",
        batch,
        trained,
        identity=RunIdentity(run_id="aaaa1111", attempt=1),
    )
