"""The teacher's scores: hand-computed advantages, retries, deadlines and refusals, on a made server."""

import asyncio
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import numpy as np
import pytest

from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.config.teacher import TeacherConfig
from buckeye.errors import InferenceError, UsageError
from buckeye.orchestrator import teacher as teacher_module
from buckeye.orchestrator.batch import advantages_of, make_batch
from buckeye.orchestrator.teacher import Teacher, distillation_advantages

from .made_rollouts import group, rollout

TOKENS = [1, 2, 3]


@contextmanager
def serving(answers=(), logprob=-0.25, name="big"):
    """Yield the URL of a teacher that gives every token one log-prob, and the list of its requests.

    `answers` are the statuses of its first replies on /v1/completions; 0 closes the connection.
    """
    statuses, requests = iter(answers), []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            """Print nothing."""

        def do_GET(self):
            self._reply({"data": [{"id": name, "owned_by": "vllm"}]})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/tokenize":
                self._reply({"tokens": TOKENS})
                return
            requests.append(body)
            status = next(statuses, 200)
            if status == 0:
                self.close_connection = True
                return
            entries = [{str(token): {"logprob": logprob}} for token in body["prompt"][1:]]
            choices = [{"prompt_logprobs": [None, *entries]}]
            self._reply({"choices": choices} if status == 200 else {"error": {"message": "no"}}, status)

        def _reply(self, value, status=200):
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", requests
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def renderer(tokens=TOKENS):
    return SimpleNamespace(tokenizer=SimpleNamespace(encode=lambda text, add_special_tokens: tokens))


def scored(url, groups, *, timeout=20.0, known=TOKENS):
    """Return the result of `Teacher.score` after `Teacher.start`."""

    async def run():
        config = TeacherConfig(model="big", base_url=url, timeout=timeout)
        async with Teacher(config) as teacher:
            await teacher.start(renderer(known))
            return await teacher.score(3, groups)

    return asyncio.run(run())


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr(teacher_module, "_PAUSES", (0.05,))


def test_the_advantage_is_the_log_ratio_of_teacher_and_sampler():
    got = distillation_advantages(np.float32([-1.0, -2.0, -0.5]), np.float32([-0.25, -2.0, -90.0]))
    assert got.tolist() == [0.75, 0.0, -20.0]


def test_scores_are_of_the_sampled_tokens_only():
    """The sampler gave each token -0.5, the teacher -0.25: A = 0.25, and KL(policy || teacher) = -0.25."""
    played = group(rollout(1.0, turns=(2, 1)), rollout(None), rollout(0.0, turns=(1,)))
    with serving() as (url, requests):
        advantages, metrics = scored(url, [played])
    first, _, second = played.rollouts
    assert advantages[id(first.segments[0])].tolist() == [0.0, 0.25, 0.25, 0.0, 0.25]
    assert advantages[id(second.segments[0])].tolist() == [0.0, 0.25]
    assert metrics["teacher/kl"] == pytest.approx(-0.25)
    assert metrics["teacher/retries"] == 0
    assert sorted(len(request["prompt"]) for request in requests) == [2, 5]
    assert {(r["model"], r["max_tokens"], r["prompt_logprobs"]) for r in requests} == {("big", 1, 0)}


def test_a_teacher_may_be_named_by_a_relative_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "big").mkdir()
    with serving(name=str(tmp_path / "big")) as (url, requests):
        scored(url, [group(rollout(1.0, turns=(1,)))])
    assert {request["model"] for request in requests} == {str(tmp_path / "big")}


@pytest.mark.parametrize(("reward_weight", "expected"), [(0.0, [0.5, 0.5]), (2.0, [1.5, 1.5])])
def test_a_batch_adds_the_weighted_terms(reward_weight, expected):
    """With weight 2: 2 * 0.25 from the teacher, and 2 * 0.5 from the reward if it counts."""
    played = group(rollout(1.0, turns=(2,)), rollout(0.0, turns=(1,)))
    settings = {"model": "big", "base_url": "http://x", "weight": 2.0, "reward_weight": reward_weight}
    config = OrchestratorConfig(teacher=settings)
    teacher = {
        id(r.segments[0]): np.full(len(r.segments[0].token_ids), 0.25, np.float32) for r in played.scored
    }
    batch = make_batch(1, [played], advantages_of([played], config), config, state={}, teacher=teacher)
    assert batch.samples[0].advantages.tolist() == [0.0, *expected]
    assert batch.samples[0].advantages.dtype == np.float32


def test_failed_requests_are_repeated_and_counted():
    with serving(answers=(500, 0, 503)) as (url, requests):
        _, metrics = scored(url, [group(rollout(1.0))])
    assert metrics["teacher/retries"] == 3
    assert len(requests) == 4


def test_a_teacher_that_does_not_recover_ends_the_run_in_time():
    with serving(answers=[500] * 10_000) as (url, _), pytest.raises(InferenceError) as raised:
        scored(url, [group(rollout(1.0))], timeout=4.0)
    assert "did not answer (" in str(raised.value)
    assert raised.value.code == "BK-INFERENCE"


def test_the_time_limit_is_not_repeated_for_waiting_requests(monkeypatch):
    monkeypatch.setattr(teacher_module, "_MAX_REQUESTS", 1)
    played = group(*(rollout(1.0, turns=(tokens,)) for tokens in (1, 2, 3)))
    with serving(answers=[500] * 10_000) as (url, requests), pytest.raises(InferenceError):
        scored(url, [played], timeout=1.0)
    assert 4 not in {len(request["prompt"]) for request in requests}


def test_a_refused_request_is_not_repeated():
    with serving(answers=[400] * 9) as (url, requests), pytest.raises(InferenceError) as raised:
        scored(url, [group(rollout(1.0))])
    assert raised.value.code == "BK-INFERENCE-REQUEST"
    assert len(requests) == 1


def test_a_teacher_of_another_tokenizer_is_refused():
    with serving() as (url, _), pytest.raises(UsageError) as raised:
        scored(url, [], known=[1, 2, 4])
    assert raised.value.code == "BK-CONFIG-CONFLICT"
