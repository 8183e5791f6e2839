"""vLLM as the engine. The slow tests run a real vLLM on the CPU, in a separate environment."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from packaging.version import Version
from safetensors.torch import load_file, save_file

from buckeye.base.request_gate import AccessRules
from buckeye.base.storage import sha256_file
from buckeye.config.inference import InferenceConfig
from buckeye.errors import InferenceError, UsageError
from buckeye.inference.client import SamplingParams
from buckeye.inference.vllm.interpreter import PYTHON_VARIABLE, VllmInstallation, find_vllm, require_vllm
from buckeye.inference.vllm.server import (
    PLUGIN,
    check_extra,
    vllm_command,
    vllm_environment,
)
from buckeye.transport.weights import combined_checksum, read_weights_manifest

from .conftest import Server, client_of, cut_short, near, weight_versions
from .test_server import publish

pytestmark = pytest.mark.anyio

KEY = "a key for tests"
RULES = AccessRules(host="127.0.0.1", key=KEY)


PYTHON = Path("/opt/vllm/bin/python")


@pytest.fixture
def fake_vllm(tmp_path):
    """The fields of an installation that the command line needs."""
    return VllmInstallation(
        python=PYTHON,
        version=Version("0.32.0"),
        distribution="vllm",
    )


def command(fake_vllm, *, cpu=True, **settings):
    settings["model"] = {"max_model_len": 512, **settings.get("model", {})}
    return vllm_command(
        InferenceConfig(**{"backend": "vllm"} | settings), fake_vllm, Path("/models/m"), cpu=cpu
    )


def value_of(words, flag):
    return words[words.index(flag) + 1]


GPU, LONG, KV = {"cpu": False}, {"model": {"max_model_len": 9000}}, "--kv-cache-memory-bytes"


@pytest.mark.parametrize(
    ("settings", "flag", "value"),
    [
        ({}, "-m", "buckeye_vllm_server"),
        ({}, "--logprobs-mode", "processed_logprobs"),
        ({}, "--generation-config", "vllm"),
        ({}, "--enable-scale-out", ...),
        ({}, "--middleware", "buckeye_vllm_arrays.Arrays"),
        ({}, "--weight-transfer-config", '{"backend": "buckeye_fs"}'),
        ({"model": {"name": "org/m"}}, "--served-model-name", "org/m"),
        ({"server": {"port": 8123}}, "--port", "8123"),
        ({}, "--dtype", "float32"),
        (GPU, "--dtype", "auto"),
        (GPU, "--enforce-eager", None),
        ({"vllm": {"max_num_batched_tokens": 8192}}, "--max-num-batched-tokens", "8192"),
        ({"vllm": {"enable_lora": False}}, "--no-enable-lora", ...),
        ({"vllm": {"hf_overrides": {"a": 1}}}, "--hf-overrides", '{"a": 1}'),
        ({}, "--enable-prefix-caching", None),
        (LONG, "--no-enable-chunked-prefill", ...),
        (LONG, "--max-num-batched-tokens", "9000"),  # a prompt is prefilled in one step
        (GPU, "--no-enable-chunked-prefill", None),
        ({"kv_cache_gb": 2.5}, KV, "2500000000"),
        ({**GPU, "kv_cache_gb": 2.5}, KV, "2500000000"),
        ({}, KV, "1000000000"),  # otherwise vLLM takes most of the RAM
        (GPU, KV, None),  # `gpu_memory_utilization` sets it
    ],
    ids=range(22),
)
def test_command_has_the_settings_as_flags(fake_vllm, settings, flag, value):
    words = command(fake_vllm, **settings)
    assert words[0] == "/opt/vllm/bin/python"
    assert (flag in words) is (value is not None)
    if isinstance(value, str):
        assert value_of(words, flag) == value


def test_the_gate_sees_requests_first(fake_vllm):
    """vLLM adds middleware from the inside to the outside."""
    words = command(fake_vllm)
    assert words[words.index("--middleware") + 2] == "buckeye_vllm_gate.Gate"


def test_adapter_of_experts_is_refused_on_a_cpu(fake_vllm, tmp_path):
    """vLLM would start, and end at the first request."""
    (tmp_path / "config.json").write_text(json.dumps({"num_experts": 8, "max_position_embeddings": 64}))
    config = InferenceConfig(max_lora_rank=4)
    with pytest.raises(UsageError) as refused:
        vllm_command(config, fake_vllm, tmp_path, cpu=True)
    assert refused.value.code == "BK-MODEL-UNSUPPORTED"
    assert "--enable-lora" in vllm_command(config, fake_vllm, tmp_path, cpu=False)


def test_cpu_command_batches_the_longest_prompt(fake_vllm, tmp_path):
    described = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "max_position_embeddings": 8192}
    (tmp_path / "config.json").write_text(json.dumps(described))
    words = vllm_command(InferenceConfig(), fake_vllm, tmp_path, cpu=True)
    assert value_of(words, "--max-num-batched-tokens") == "8192"


def test_command_enables_lora_for_the_adapter_rank(fake_vllm):
    """vLLM supports only some ranks; without adapters its layers stay unchanged."""
    words = command(fake_vllm, **GPU, max_lora_rank=20)
    assert "--enable-lora" in words
    assert value_of(words, "--max-lora-rank") == "32"
    assert "--enable-lora" not in command(fake_vllm)
    with pytest.raises(UsageError, match=r"inference\.max_lora_rank is 600.* 512") as caught:
        command(fake_vllm, **GPU, max_lora_rank=600)
    assert caught.value.code == "BK-CONFIG-VALUE"
    allowed = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
    environments = [
        vllm_environment(InferenceConfig(max_lora_rank=rank), RULES, python=PYTHON, cpu=True, threads=1)
        for rank in (4, None)
    ]
    assert [environment.get(allowed) for environment in environments] == ["1", None]


@pytest.mark.parametrize(
    "name", ["logprobs_mode", "port", "max_lora_rank", "hf_token", "uds", "logits_processors"]
)
def test_reserved_vllm_keys_are_refused(name, refusal):
    with refusal(UsageError):
        check_extra({name: "x"})


def test_the_key_is_in_the_environment_and_not_in_the_command(fake_vllm):
    config = InferenceConfig()
    environment = vllm_environment(config, RULES, python=PYTHON, cpu=True, threads=2)
    assert environment["VLLM_API_KEY"] == KEY
    assert environment["OMP_NUM_THREADS"] == "2"
    assert str(PLUGIN) in environment["PYTHONPATH"].split(os.pathsep)
    assert not any(KEY in word for word in command(fake_vllm))


def test_a_model_on_two_nodes_is_started_by_ray_in_the_python_of_vllm(fake_vllm, refusal):
    words = command(fake_vllm, cpu=False, parallel={"tp": 8, "pp": 2})
    assert value_of(words, "--tensor-parallel-size") == "8"
    assert value_of(words, "--pipeline-parallel-size") == "2"
    assert value_of(words, "--distributed-executor-backend") == "ray"
    assert "--distributed-executor-backend" not in command(fake_vllm, cpu=False, parallel={"tp": 8})
    config = InferenceConfig(backend="vllm", parallel={"tp": 8, "pp": 2})
    environment = vllm_environment(config, RULES, python=PYTHON, cpu=False, threads=1)
    job = json.loads(environment["RAY_JOB_CONFIG_JSON_ENV_VAR"])["runtime_env"]
    assert job["py_executable"] == str(PYTHON)
    assert str(PLUGIN) in job["env_vars"]["PYTHONPATH"]
    with refusal(UsageError):
        check_extra({"pipeline_parallel_size": 2})


def test_missing_vllm_is_refused_with_the_install_command(monkeypatch, tmp_path, refusal):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(PYTHON_VARIABLE, raising=False)
    if find_vllm() is not None:
        pytest.skip("vLLM is installed in the environment of the tests")
    with refusal(UsageError):
        require_vllm()
    with pytest.raises(UsageError, match="has no vLLM"):
        find_vllm(Path(sys.executable))


@pytest.fixture
def modules_of_user(tmp_path, monkeypatch):
    """Working directory with files that Python would import in place of its modules."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "random.py").write_text("raise SystemExit(3)")
    (folder / "json.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(folder)


def test_vllm_is_found_next_to_files_named_like_modules_of_python(tmp_path, modules_of_user):
    installed = tmp_path / "installed"
    (installed / "vllm").mkdir(parents=True)
    (installed / "vllm/__init__.py").touch()
    (installed / "vllm-0.32.1.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.1\n"
    (installed / "vllm-0.32.1.dist-info/METADATA").write_text(metadata)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={installed} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    assert find_vllm(python).version == Version("0.32.1")


def test_server_of_vllm_does_not_import_files_of_the_working_directory(modules_of_user):
    environment = vllm_environment(InferenceConfig(), RULES, python=PYTHON, cpu=True, threads=1)
    assert (
        subprocess.run([sys.executable, "-c", "import random"], env=environment, check=False).returncode == 0
    )


def gate(headers, path):
    """Return the status of the middleware; 200 means that the request passed."""
    sys.path.insert(0, str(PLUGIN))
    try:
        from buckeye_vllm_gate import Gate
    finally:
        sys.path.remove(str(PLUGIN))
    sent = []

    async def behind(scope, receive, send):
        await send({"status": 200})

    async def send(message):
        sent.append(message)

    headers = [*([] if any(name == b"host" for name, _ in headers) else [(b"host", b"localhost")]), *headers]
    asyncio.run(Gate(behind)({"type": "http", "path": path, "headers": headers}, None, send))
    return sent[0]["status"]


def test_gate_requires_the_key_on_every_route(monkeypatch):
    environment = vllm_environment(InferenceConfig(), RULES, python=PYTHON, cpu=True, threads=1)
    for name in ("VLLM_API_KEY", "BUCKEYE_VLLM_RULES"):
        monkeypatch.setenv(name, environment[name])
    right = [(b"authorization", f"Bearer {KEY}".encode())]
    for path in ("/pause", "/update_weights", "/collective_rpc", "/v1/models", "/metrics", "/"):
        assert gate([], path) == gate([(b"authorization", b"Bearer no")], path) == 401
        assert gate(right, path) == 200
        assert gate([*right, (b"host", b"evil.example")], path) == 403
        assert gate([*right, (b"origin", b"http://localhost:3000")], path) == 403
        assert gate([*right, (b"content-length", b"2"), (b"content-type", b"text/plain")], path) == 415
    assert gate([], "/health") == 200


@pytest.fixture(scope="module")
def tied(make_model):
    """Models with a tied head, which a CPU build of vLLM may fail to reload; heads of 32, vLLM's minimum."""
    return make_model("qwen3-wide", seed=11), make_model("qwen3-wide", seed=12)


@pytest.fixture(scope="module")
def vllm_server(vllm_python, tied, tmp_path_factory):
    folder, settings = tmp_path_factory.mktemp("vllm"), {"backend": "vllm", "vllm_python": str(vllm_python)}
    with Server(tied[0].directory, folder, max_num_seqs=16, **settings) as running:
        yield running


@pytest.mark.slow
class TestRealVllm:
    """Tests that run in order: the first requests use the server's initial weights."""

    async def test_a_first_small_request_and_its_logprobs(self, vllm_server, tied):
        async with client_of(vllm_server, tied[0]) as client:
            wave = await client.generate_batch(
                [[5, 6, 7], list(range(40, 60)), [5, 6, 7]], SamplingParams(max_tokens=12, seed=3)
            )
            versions = await weight_versions(client)
        assert versions == [0]
        for prompt, generation in zip([[5, 6, 7], list(range(40, 60)), [5, 6, 7]], wave, strict=True):
            expected = tied[0].logprobs(prompt, generation.token_ids)
            assert torch.tensor(generation.logprobs) == near(expected)
            assert generation.versions == [0] * 12
        assert wave[0].token_ids != wave[2].token_ids  # same prompt, different seed

    async def test_temperature_is_in_the_logprobs(self, vllm_server, tied):
        params = SamplingParams(max_tokens=12, seed=4, temperature=0.5)
        async with client_of(vllm_server, tied[0]) as client:
            generation = await client.generate([9, 8, 7], params)
        logits = tied[0].next_logprobs([9, 8, 7], generation.token_ids)
        scaled = (logits / 0.5).log_softmax(-1)
        expected = scaled.gather(1, torch.tensor(generation.token_ids)[:, None])[:, 0]
        assert torch.tensor(generation.logprobs) == near(expected)

    async def test_a_later_turn_sends_only_its_new_tokens(self, vllm_server, tied):
        prompt, params = [40 + i % 200 for i in range(70)], SamplingParams(max_tokens=6, seed=4)
        async with client_of(vllm_server, tied[0]) as client:
            session = client.session()
            first = await session.generate(prompt, params)
            whole = [*prompt, *first.token_ids, 8, 9]
            second = await session.generate(whole, params)
            assert client.replicas[0].keeps_prompts
        expected = tied[0].logprobs(whole, second.token_ids)
        assert torch.tensor(second.logprobs) == near(expected)

    async def test_aborted_session_returns_partial_results(self, vllm_server, tied):
        async with client_of(vllm_server, tied[0]) as client:
            generation = await cut_short(client, [5, 6, 7], 150)
        expected = tied[0].logprobs([5, 6, 7], generation.token_ids)
        assert torch.tensor(generation.logprobs) == near(expected)
        assert len(generation.versions) == len(generation.token_ids)

    async def test_an_update_in_flight_replaces_every_weight(self, vllm_server, tied, tmp_path):
        """No key of the old weights is reused, the tied head is new, and tokens carry both versions."""
        old, new = tied
        path = publish(new, tmp_path, 7)
        checksum = read_weights_manifest(path).checksum
        # Longer than a block of the cache: a part of the prompt would match keys of the old weights.
        prompt, params = [40 + i % 200 for i in range(132)], SamplingParams(max_tokens=24, seed=1)
        other = list(range(60, 100))
        async with client_of(vllm_server, old) as client:
            before = await client.generate(prompt, params)
            replies = await replies_during(client, other, client.update_weights(path, 7, checksum))
            after = await client.generate(prompt, params)
            versions = await weight_versions(client)
        assert versions == [7]
        assert torch.tensor(before.logprobs) == near(old.logprobs(prompt, before.token_ids))
        assert torch.tensor(after.logprobs) == near(new.logprobs(prompt, after.token_ids))
        assert set(after.versions) == {7}
        (spanning, *_) = [reply for reply in replies if sorted(set(reply.versions)) == [0, 7]]
        changed = spanning.versions.index(7)
        own = new.logprobs(other, spanning.token_ids)[changed:]
        assert torch.tensor(spanning.logprobs[changed:]) == near(own)

    async def test_an_update_can_keep_the_keys_of_running_requests(self, vllm_server, tied, tmp_path):
        """Their log-probs then differ from those of the new weights. New requests reuse no old keys."""
        old, new = tied
        path, prompt = publish(old, tmp_path, 8), [40 + i % 200 for i in range(132)]
        async with client_of(vllm_server, old, keep_kv_cache=True) as client:
            await client.generate(prompt, SamplingParams(max_tokens=24))
            checksum = read_weights_manifest(path).checksum
            replies = await replies_during(client, prompt[:40], client.update_weights(path, 8, checksum))
            metrics = client.metrics()
            after = await client.generate(prompt, SamplingParams(max_tokens=24))
            path = publish(new, tmp_path, 7)
            await client.update_weights(path, 7, read_weights_manifest(path).checksum)
        assert torch.tensor(after.logprobs) == near(old.logprobs(prompt, after.token_ids))
        assert (metrics["inference/requeued"], metrics["inference/0/failures"]) == (0, 0)
        (spanning, *_) = [reply for reply in replies if set(reply.versions) == {7, 8}]
        changed = spanning.versions.index(8)
        own = old.logprobs(prompt[:40], spanning.token_ids)[changed:]
        assert torch.tensor(spanning.logprobs[changed:]) != near(own)

    @pytest.mark.parametrize(
        ("spoil", "message"),
        [
            (lambda tensors: None, "digest differs"),
            (lambda tensors: tensors.pop("model.layers.0.mlp.down_proj.weight"), "shape \\(missing\\)"),
            (lambda tensors: tensors.update(new=torch.zeros(2)), "model: \\(missing\\)"),
            (lambda tensors: tensors.update({"model.norm.weight": torch.zeros(3)}), "shape \\[3\\]"),
        ],
    )
    async def test_a_damaged_directory_is_refused_and_serving_goes_on(
        self, vllm_server, tied, tmp_path, spoil, message
    ):
        """No weight is replaced, and the engine keeps serving."""
        path = publish(tied[0], tmp_path, 8)
        (weights,) = path.glob("*.safetensors")
        tensors = load_file(weights)
        if spoil(tensors) is None and message == "digest differs":
            content = bytearray(weights.read_bytes())
            content[-3] ^= 1
            weights.write_bytes(content)
        else:
            save_file(tensors, weights)
            sign_again(path)
        async with client_of(vllm_server, tied[0]) as client:
            with pytest.raises(InferenceError, match=message):
                await client.update_weights(path, 8, read_weights_manifest(path).checksum)
            generation, versions = (
                await client.generate([5, 6, 7], SamplingParams(max_tokens=4)),
                await weight_versions(client),
            )
        assert versions == [7]
        expected = tied[1].logprobs([5, 6, 7], generation.token_ids)
        assert torch.tensor(generation.logprobs) == near(expected)

    async def test_an_update_whose_client_has_died_is_finished_first(self, vllm_server, tied, tmp_path):
        """vLLM's engine would exit if another update was started before."""
        path = publish(tied[0], tmp_path, 9)
        with vllm_server.http() as dead:
            dead.post("/pause", params={"mode": "keep", "clear_cache": "true"}).raise_for_status()
            dead.post("/init_weight_transfer_engine", json={"init_info": {}}).raise_for_status()
            dead.post("/start_weight_update").raise_for_status()
        async with client_of(vllm_server, tied[0]) as client:
            await client.update_weights(path, 9, read_weights_manifest(path).checksum)
            generation = await client.generate([5, 6, 7], SamplingParams(max_tokens=4))
        assert set(generation.versions) == {9}
        expected = tied[0].logprobs([5, 6, 7], generation.token_ids)
        assert torch.tensor(generation.logprobs) == near(expected)

    def test_no_process_outlives_a_killed_server(self, vllm_server):
        family = psutil.Process(vllm_server.process.pid).children(recursive=True)
        assert len(family) >= 2
        os.kill(vllm_server.process.pid, signal.SIGKILL)
        vllm_server.process.wait()
        wait_until_gone(family)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.0, 0.3, 3.0])
def test_no_process_outlives_a_server_killed_while_it_starts(vllm_python, tied, tmp_path, seconds):
    """Otherwise the server's engine waits for it for minutes.

    Kill it some time after the engine process starts.
    """
    starting = Server(tied[0].directory, tmp_path, backend="vllm", vllm_python=str(vllm_python))
    deadline = time.monotonic() + 240
    while len(family := psutil.Process(starting.process.pid).children(recursive=True)) < 2 or not any(
        "spawn_main" in line for line in map(command_line, family)
    ):
        assert time.monotonic() < deadline, starting.log.read_text()
        time.sleep(0.02)
    time.sleep(seconds)
    family = psutil.Process(starting.process.pid).children(recursive=True)
    starting.process.kill()
    starting.process.wait()
    wait_until_gone(family)


async def replies_during(client, prompt, update):
    """Sample before and until an update of the weights ends, and return all replies. None is lost."""
    running, updating = [], None
    while updating is None or not updating.done():
        running.append(asyncio.create_task(client.generate(prompt, SamplingParams(max_tokens=120))))
        await asyncio.sleep(0.02)
        if len(running) == 10:
            updating = asyncio.create_task(update)
    await updating
    replies = [await reply for reply in running]
    assert all(reply.finish_reason == "stop" or len(reply.token_ids) == 120 for reply in replies)
    return replies


def wait_until_gone(family):
    deadline = time.monotonic() + 20
    while left := [p for p in family if (line := command_line(p)) and "resource_tracker" not in line]:
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def command_line(process):
    """Return the command line of a process, empty if it has ended."""
    try:
        ended = not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
        return "" if ended else " ".join(process.cmdline())
    except psutil.Error:
        return ""


def sign_again(directory):
    """Rewrite the manifest for the current files of the directory."""
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest["files"] = {name: sha256_file(directory / name) for name in manifest["files"]}
    manifest["checksum"] = combined_checksum(manifest["files"])
    (directory / "manifest.json").write_text(json.dumps(manifest))
