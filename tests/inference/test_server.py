"""A real server process, over HTTP."""

import asyncio
import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch

from buckeye.base.process import RunIdentity
from buckeye.base.request_gate import AccessRules
from buckeye.inference.server.app import create_app
from buckeye.inference.server.service import Service
from buckeye.transport.weights import publish_weights
from tests.waiting import wait_for

from .conftest import MAX_LEN, VOCAB, make_engine, near

IDS = list(range(40, 60))
USER = {"role": "user", "content": "fox"}
FIND = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}


def post(http, route, **body):
    response = http.post(route, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def generate(http, ids=IDS, **params):
    params = {"max_tokens": 12, "logprobs": 0, "seed": 3, "ignore_eos": True} | params
    return post(http, "/inference/v1/generate", token_ids=ids, sampling_params=params)["choices"]


def metric(http, name):
    lines = http.get("/metrics").text.splitlines()
    return float(next(line.split()[-1] for line in lines if line.startswith(name)))


def publish(model, root, step):
    def fill(directory):
        shutil.copy(model.directory / "config.json", directory)
        shutil.copy(model.directory / "model.safetensors", directory)

    return publish_weights(root, step, fill, identity=RunIdentity(run_id="t", attempt=1), dtype="float32")


def test_generate_returns_tokens_logprobs_and_versions(http, chat_model):
    choices = generate(http, n=2)
    assert [c["index"] for c in choices] == [0, 1]
    for choice in choices:
        content = choice["logprobs"]["content"]
        assert [e["token_id"] for e in content] == choice["token_ids"]
        assert [e["token"] for e in content] == [f"token_id:{token}" for token in choice["token_ids"]]
        expected = chat_model.logprobs(IDS, choice["token_ids"])
        assert torch.tensor([e["logprob"] for e in content]) == near(expected)
        assert choice["finish_reason"] == "length"
        assert choice["weight_versions"] == [{"version": "0", "start": 0, "end": 12}]
    again = generate(http, seed=4)  # choice i of a request is seeded with seed + i
    assert again[0]["token_ids"] == choices[1]["token_ids"]


def test_list_of_prompts_gets_consecutive_seeds(http):
    prompts = [IDS, IDS[:5], IDS]
    answer = post(
        http,
        "/v1/completions",
        prompt=prompts,
        max_tokens=12,
        seed=3,
        logprobs=0,
        ignore_eos=True,
        return_token_ids=True,
        return_weight_versions=True,
    )
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2]
    for i, choice in enumerate(answer["choices"]):
        alone = generate(http, prompts[i], seed=3 + i)[0]
        assert choice["token_ids"] == alone["token_ids"]
        assert choice["prompt_token_ids"] == prompts[i]
        assert len(choice["logprobs"]["token_logprobs"]) == len(choice["logprobs"]["tokens"]) == 12
        assert choice["weight_versions"] == alone["weight_versions"]
    assert answer["usage"] == {"prompt_tokens": 45, "completion_tokens": 36, "total_tokens": 81}


def test_log_probs_of_prompts_have_the_form_of_vllm(http, chat_model):
    body = {"prompt": [IDS, IDS[:1]], "max_tokens": 1, "prompt_logprobs": 0}
    first, second = post(http, "/v1/completions", **body)["choices"]
    none, *entries = first["prompt_logprobs"]
    assert none is None
    assert [list(entry) for entry in entries] == [[str(token)] for token in IDS[1:]]
    values = [entry[str(token)]["logprob"] for entry, token in zip(entries, IDS[1:], strict=True)]
    assert torch.tensor(values) == near(chat_model.logprobs(IDS[:1], IDS[1:]))
    assert second["prompt_logprobs"] == [None]
    assert "prompt_logprobs" not in post(http, "/v1/completions", prompt=IDS, max_tokens=1)["choices"][0]
    for wrong in ({"prompt_logprobs": 1}, {"prompt_logprobs": 0, "stream": True}):
        assert http.post("/v1/completions", json={**body, **wrong}).status_code == 400


def test_greedy_chat_has_the_text_of_its_tokens(http, chat_model, tokenizer):
    answer = post(
        http,
        "/v1/chat/completions",
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "the "}, {"type": "text", "text": "dog"}]}
        ],
        temperature=0,
        max_tokens=15,
        ignore_eos=True,
        logprobs=True,
        return_token_ids=True,
    )
    prompt = "<|im_start|>user\nthe dog<|im_end|>\n<|im_start|>assistant\n"
    assert answer["prompt_token_ids"] == tokenizer.encode(prompt)
    choice = answer["choices"][0]
    expected = chat_model.reference.generate(
        torch.tensor([answer["prompt_token_ids"]]), max_new_tokens=15, do_sample=False, pad_token_id=0
    )
    assert choice["token_ids"] == expected[0, len(answer["prompt_token_ids"]) :].tolist()
    assert choice["message"] == {
        "role": "assistant",
        "content": tokenizer.decode(choice["token_ids"], skip_special_tokens=True),
    }
    assert len(choice["logprobs"]["content"]) == 15
    assert answer["usage"]["completion_tokens"] == 15


def events(http, route, **body):
    with http.stream("POST", route, json=body | {"stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize("with_ids", [True, False])
def test_a_stream_adds_up_to_the_whole(http, with_ids):
    body = {
        "messages": [{"role": "user", "content": "fox"}],
        "seed": 5,
        "n": 2,
        "max_tokens": 20,
        "ignore_eos": True,
        "logprobs": True,
        "return_token_ids": with_ids,
    }
    whole = post(http, "/v1/chat/completions", **body)
    parts = events(http, "/v1/chat/completions", **body, stream_options={"include_usage": True})
    assert parts[-1]["usage"] == whole["usage"]
    for index, choice in enumerate(whole["choices"]):
        mine = [p["choices"][0] for p in parts if p["choices"] and p["choices"][0]["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant"
        assert "".join(c["delta"].get("content", "") for c in mine) == choice["message"]["content"]
        assert [t for c in mine for t in c.get("token_ids", [])] == choice.get("token_ids", [])
        logprobs = [e for c in mine if c["logprobs"] for e in c["logprobs"]["content"]]
        assert logprobs == choice["logprobs"]["content"]
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["length"]


def test_token_ids_are_streamed(http):
    """The parts join to the whole; only the last part of a sequence has its finish reason."""
    sampling = {"max_tokens": 120, "n": 2, "logprobs": 2, "seed": 3, "ignore_eos": True}  # several parts
    body = {"token_ids": IDS, "sampling_params": sampling}
    whole = post(http, "/inference/v1/generate", **body)["choices"]
    *parts, last = events(http, "/inference/v1/generate", **body, stream_options={"include_usage": True})
    assert last["usage"] == {"prompt_tokens": 20, "completion_tokens": 240, "total_tokens": 260}
    assert len({part["request_id"] for part in parts}) == 1
    assert len(parts) > 4
    for choice in whole:
        mine = [p["choices"][0] for p in parts if p["choices"][0]["index"] == choice["index"]]
        assert [token for part in mine for token in part["token_ids"]] == choice["token_ids"]
        told = [entry for part in mine for entry in part["logprobs"]["content"]]
        assert told == choice["logprobs"]["content"]
        assert [part["finish_reason"] for part in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1]["finish_reason"] == "length"
        assert mine[-1]["weight_versions"] == choice["weight_versions"]


@pytest.mark.parametrize(
    ("sampling", "scale", "drawable"), [({}, 1.0, VOCAB), ({"temperature": 0.5, "top_k": 2}, 0.5, 2)]
)
def test_most_likely_tokens_are_returned(http, chat_model, sampling, scale, drawable):
    """Log-probs are those of the distribution sampled from; excluded tokens have OpenAI's -9999."""
    (choice,) = generate(http, logprobs=3, **sampling)
    distributions = chat_model.next_logprobs(IDS, choice["token_ids"]) / scale
    for entry, distribution in zip(choice["logprobs"]["content"], distributions, strict=True):
        kept = distribution.topk(drawable)
        expected = (kept.values - kept.values.logsumexp(-1))[:3].tolist()
        expected += [-9999.0] * (3 - len(expected))
        told = entry["top_logprobs"]
        assert [one["logprob"] for one in told] == near(expected)
        assert [one["token_id"] for one in told][:drawable] == kept.indices[:3].tolist()
        own = [one["logprob"] for one in told if one["token_id"] == entry["token_id"]]
        assert own == [] or own == [pytest.approx(entry["logprob"], abs=1e-6)]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_text_and_tokens(http, stream):
    body = {"prompt": IDS, "seed": 8, "max_tokens": 60, "ignore_eos": True, "return_token_ids": True}
    free = post(http, "/v1/completions", **body)["choices"][0]["text"]
    stop = free[10:13]
    expected = free[: free.index(stop)]
    if stream:
        parts = [e["choices"][0] for e in events(http, "/v1/completions", **body, stop=stop)]
        text = "".join(p["text"] for p in parts)
        tokens = [t for p in parts for t in p["token_ids"]]
        reason = parts[-1]["finish_reason"]
    else:
        choice = post(http, "/v1/completions", **body, stop=[stop])["choices"][0]
        text, tokens, reason = choice["text"], choice["token_ids"], choice["finish_reason"]
    assert text == expected
    assert reason == "stop"
    assert len(tokens) < 60
    wait_for(lambda: metric(http, "vllm:num_requests_running") == 0)


def test_a_stop_token_is_a_token_but_not_text(http, tokenizer):
    body = {"prompt": IDS, "seed": 8, "max_tokens": 20, "return_token_ids": True, "ignore_eos": True}
    free = post(http, "/v1/completions", **body)["choices"][0]
    stop = free["token_ids"][9]
    choice = post(http, "/v1/completions", **body, stop_token_ids=[stop])["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["token_ids"][-1] == stop
    assert choice["text"] == tokenizer.decode(choice["token_ids"][:-1], skip_special_tokens=True)


@pytest.mark.parametrize(
    ("route", "body", "status", "message"),
    [
        ("/v1/completions", {"prompt": []}, 400, "empty"),
        ("/v1/completions", {"prompt": [1, "a"]}, 400, "prompt"),
        ("/v1/completions", {"prompt": [[1], []]}, 400, "no tokens"),
        ("/v1/completions", {"prompt": [VOCAB]}, 400, f"vocabulary of {VOCAB}"),
        ("/tokenize", {"prompt": "x", "messages": [USER]}, 400, "either"),
        ("/detokenize", {"tokens": [VOCAB]}, 400, "vocabulary"),
        ("/v1/completions", {"prompt": [1], "temperature": 0.001}, 400, "temperature"),
        ("/v1/completions", {"prompt": [1], "min_tokens": 5, "max_tokens": 2}, 400, "min_tokens"),
        ("/v1/completions", {"prompt": [1], "max_tokens": 10**12}, 400, f"is {MAX_LEN}"),
        ("/v1/completions", {"prompt": [1], "max_tokens": MAX_LEN + 1}, 400, "max_tokens"),
        ("/v1/chat/completions", {"messages": [USER], "max_completion_tokens": 10**30}, 400, "max_tokens"),
        ("/v1/completions", {"prompt": [1], "top_k": 10**30}, 400, "top_k"),
        ("/v1/completions", {"prompt": [1], "min_tokens": 10**30}, 400, "min_tokens"),
        ("/v1/completions", {"prompt": [1], "stop_token_ids": [10**30]}, 400, "stop_token_ids"),
        ("/v1/completions", {"prompt": [1], "stop_token_ids": [VOCAB]}, 400, "stop_token_ids"),
        ("/v1/completions", {"prompt": [1], "logprobs": 21}, 400, "logprobs"),
        ("/v1/completions", {"prompt": [[1]] * 20, "n": 1024}, 400, "sequences"),
        ("/v1/completions", {"prompt": [1], "model": "gpt-4"}, 404, "gpt-4"),
        ("/v1/chat/completions", {"messages": [USER | {"content": [{"type": "image"}]}]}, 400, "[0].type"),
        ("/pause?mode=later", {}, 400, "mode"),
        ("/update_weights", {"update_info": {"path": "/nowhere"}}, 400, "is not in"),
        ("/finish_weight_update", {"weight_version": "3"}, 400, "update_weights"),
        ("/v1/nothing", {}, 404, "Not Found"),
        ("/health", {}, 405, "Not Allowed"),
    ],
)
def test_impossible_requests_are_refused_with_a_reason(http, route, body, status, message):
    response = http.post(route, json=body)
    assert response.status_code == status
    error = response.json()["error"]
    assert message in error["message"]
    assert error["code"] == ("BK-INFERENCE-REQUEST" if status == 400 else status)


@pytest.mark.parametrize(
    ("route", "body", "message"),
    [
        ("/v1/completions", {"prompt": [1] * MAX_LEN}, f"context is {MAX_LEN}"),
        ("/v1/completions", {"prompt": "x" * 2_000_000}, "2000000 characters"),
        ("/v1/chat/completions", {"messages": [USER | {"content": "x" * 2_000_000}]}, "characters"),
    ],
)
def test_prompt_longer_than_the_context_is_refused(http, route, body, message):
    response = http.post(route, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "BK-PROMPT-TOO-LONG")
    assert message in error["message"]


def test_a_request_id_is_refused_while_another_stream_starts_with_it(qwen3):
    service = Service(
        make_engine(qwen3.directory),
        model_name="m",
        directory=qwen3.directory,
        weights_dir=qwen3.directory,
        renderer=None,
        seed=0,
    )
    rules = AccessRules(host="127.0.0.1", key=None)
    fields = {"token_ids": IDS, "sampling_params": {}, "request_id": "a", "stream": True}
    app, body = create_app(service, rules), json.dumps(fields).encode()
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/inference/v1/generate",
        "headers": headers,
        "query_string": b"",
    }
    statuses = []

    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message):
        statuses.append(message.get("status"))
        await asyncio.Event().wait()  # a client that reads nothing

    async def open_two():
        streams = [asyncio.create_task(app(scope, receive, send)) for _ in range(2)]
        while len(statuses) < 2:
            await asyncio.sleep(0)
        for stream in streams:
            stream.cancel()

    asyncio.run(open_two())
    assert statuses == [200, 400]


def test_disconnected_client_frees_its_slot(http, server):
    before = metric(http, 'vllm:request_success_total{finished_reason="abort"}')
    http.post("/pause?mode=keep")  # so that no request finishes by itself
    with pytest.raises(httpx.ReadTimeout):
        http.post(
            "/inference/v1/generate",
            json={"token_ids": IDS, "sampling_params": {"max_tokens": 99}},
            timeout=0.3,
        )
    with http.stream("POST", "/v1/completions", json={"prompt": IDS, "stream": True}):
        wait_for(lambda: metric(http, "vllm:num_requests_waiting") >= 1)
    wait_for(lambda: metric(http, 'vllm:request_success_total{finished_reason="abort"}') == before + 2)
    http.post("/resume")
    assert metric(http, "vllm:num_requests_running") == 0


def test_pause_resume_and_abort_requests(http, server):
    with ThreadPoolExecutor() as pool, server.http() as other:
        post(http, "/pause?mode=keep")
        assert http.get("/is_paused").json() == {"is_paused": True}
        answers = [
            pool.submit(
                other.post,
                "/inference/v1/generate",
                json={"token_ids": IDS, "sampling_params": {}, "request_id": f"r{i}"},
            )
            for i in range(2)
        ]
        wait_for(lambda: metric(http, "vllm:num_requests_waiting") == 2)
        assert post(http, "/abort_requests", request_ids=["r0", "none"]) == {"aborted": ["r0"]}
        aborted = answers[0].result().json()
        assert aborted["choices"][0]["finish_reason"] == "abort"
        assert not answers[1].done()
        post(http, "/resume")
        assert answers[1].result().json()["choices"][0]["finish_reason"] in ("length", "stop")
    assert http.get("/is_paused").json() == {"is_paused": False}


def test_bad_weights_are_refused_and_change_nothing(http, chat_model, make_model, tmp_path):
    torn = publish(chat_model, tmp_path, 1)
    with (torn / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x01")
    foreign = publish(make_model("llama"), tmp_path, 2)
    before = http.get("/weight_info").json()
    for path, message in ((torn, "digest differs"), (foreign, "architecture differs")):
        post(http, "/start_weight_update")
        response = http.post("/update_weights", json={"update_info": {"path": str(path)}})
        assert response.status_code == 400
        assert message in response.json()["error"]["message"]
        assert http.post("/finish_weight_update", json={}).status_code == 400
    assert http.get("/weight_info").json() == before
    assert len(generate(http)[0]["token_ids"]) == 12


def test_weight_version_can_be_set(http):
    sampled = generate(http)[0]["token_ids"]
    try:
        assert post(http, "/update_weight_version", new_version="41") == {
            "success": True,
            "new_version": "41",
        }
        assert http.get("/weight_info").json()["weight_version"] == "41"
        choice = generate(http)[0]
        assert choice["weight_versions"] == [{"version": "41", "start": 0, "end": 12}]
        assert choice["token_ids"] == sampled
        refused = http.post("/update_weight_version", json={"new_version": "new"})
        assert (refused.status_code, "new_version" in refused.text) == (400, True)
    finally:
        post(http, "/update_weight_version", new_version=0)


def test_tools_are_hidden_with_tool_choice_none(http):
    messages = [{"role": "user", "content": "fox"}]
    bare = post(http, "/tokenize", messages=messages)["tokens"]
    assert len(post(http, "/tokenize", messages=messages, tools=[FIND])["tokens"]) > len(bare)
    body = {"messages": messages, "tools": [FIND], "tool_choice": "none", "max_tokens": 1}
    answer = post(http, "/v1/chat/completions", **body, return_token_ids=True)
    assert answer["prompt_token_ids"] == bare


def test_models_and_metrics(http, chat_model):
    listed = http.get("/v1/models").json()["data"]
    names = (str(chat_model.directory), chat_model.directory.name)
    assert [(m["id"], m["max_model_len"]) for m in listed] == [(name, MAX_LEN) for name in names]
    assert http.get(f"/v1/models/{chat_model.directory}").json() == listed[0]
    assert http.get("/v1/models/other").status_code == 404
    before = metric(http, "vllm:generation_tokens_total")
    generate(http)
    assert metric(http, "vllm:generation_tokens_total") == before + 12
    assert metric(http, "vllm:kv_cache_usage_perc") == 0
