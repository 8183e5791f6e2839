"""LoRA adapters made by peft, on both engines: log-probs agree with those that peft computes."""

import asyncio
import copy
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from buckeye.base.process import RunIdentity
from buckeye.errors import InferenceError
from buckeye.inference.client import SamplingParams
from buckeye.transport.weights import Canary, publish_weights, read_weights_manifest

from .conftest import HANG, LocalServer, Server, TinyModel, build_model, client_of, near, weight_versions

pytestmark = pytest.mark.anyio

KEY = "a key for tests"
EVERY_MATRIX = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PROMPT = list(range(40, 60))
PARAMS = SamplingParams(max_tokens=12, seed=3)


def adapt(base, *, seed, **settings):
    """Return a peft model with a random adapter, large enough to change the log-probs."""
    from peft import LoraConfig, get_peft_model

    settings = {"r": 4, "lora_alpha": 8, "target_modules": EVERY_MATRIX} | settings
    model = get_peft_model(copy.deepcopy(base), LoraConfig(task_type="CAUSAL_LM", **settings))
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, 0.0, 0.3)
        elif parameter.requires_grad:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model.eval()


def canary_of(model, prompt=(5, 6, 7)):
    tokens, logprobs = [], []
    for _ in range(3):
        with torch.no_grad():
            best = model(torch.tensor([[*prompt, *tokens]])).logits[0, -1].log_softmax(-1).max(-1)
        tokens.append(int(best.indices))
        logprobs.append(float(best.values))
    return Canary(dtype="float32", prompt_ids=list(prompt), token_ids=tokens, logprobs=logprobs)


def publish(model, root, step):
    return publish_weights(
        root,
        step,
        model.save_pretrained,
        identity=RunIdentity(run_id="t", attempt=1),
        dtype="float32",
        canary=canary_of(model),
        adapter=True,
    )


async def update(client, path, step):
    manifest = read_weights_manifest(path)
    await client.update_weights(path, step, manifest.checksum, canary=manifest.canary, adapter=True)


def reference(model, prompt, generation):
    return TinyModel(None, model).logprobs(prompt, generation.token_ids)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Base model with heads of 32, the smallest size that vLLM supports."""
    model, directory = build_model("qwen3-wide", seed=11), tmp_path_factory.mktemp("base")
    model.save_pretrained(directory)
    return TinyModel(directory, model)


@pytest.fixture(
    scope="module",
    params=["torch", pytest.param("vllm", marks=[pytest.mark.slow])],
)
def server(request, base, tmp_path_factory):
    settings = {"backend": request.param}
    if request.param == "vllm":
        settings |= {"vllm_python": str(request.getfixturevalue("vllm_python")), "max_lora_rank": 4}
    kind, folder = LocalServer if request.param == "torch" else Server, tmp_path_factory.mktemp(request.param)
    with kind(base.directory, folder, key=KEY, max_num_seqs=16, **settings) as running:
        yield running


async def test_adapters_are_replaced_during_sampling(server, base, tmp_path):
    """Each adapter applies to the base, not to the previous one, and no earlier cached key is reused."""
    first, second = (adapt(base.reference, seed=seed) for seed in (1, 2))
    paths = [publish(model, tmp_path, step) for step, model in enumerate((first, second), 7)]
    prompt = [40 + i % 200 for i in range(60)]  # longer than a block of the cache
    async with client_of(server, base) as client:
        await client.generate(prompt, PARAMS)  # fills the cache
        await update(client, paths[0], 7)
        with_first = await client.generate(prompt, PARAMS)
        await update(client, paths[1], 8)
        with_second = await client.generate(prompt, PARAMS)
        running, newest = await reply_across_update(client, (first, second), tmp_path)
    for generation, model in ((with_first, first), (with_second, second)):
        expected = reference(model, prompt, generation)
        assert torch.tensor(generation.logprobs) == near(expected)
    assert set(with_first.versions) == {7}
    assert set(with_second.versions) == {8}
    changed = running.versions.index(max(running.versions))
    expected = reference(newest, PROMPT, running)[changed:]
    assert torch.tensor(running.logprobs[changed:]) == near(expected)


async def reply_across_update(client, models, tmp_path):
    """Return the first reply that an update met while it was sampled, and the model of that update."""
    for step in range(9, 29):
        path = publish(models[step % 2], tmp_path, step)
        running = asyncio.create_task(client.generate(PROMPT, SamplingParams(max_tokens=110, seed=2)))
        await asyncio.sleep(0.01 * (step - 8))
        await update(client, path, step)
        reply = await running
        if sorted(set(reply.versions)) == [step - 1, step]:
            return reply, models[step % 2]
    raise AssertionError("no update arrived while a reply was sampled")


async def test_adapter_that_differs_from_its_canary_is_refused(server, base, tmp_path):
    model = adapt(base.reference, seed=3)
    path = publish(model, tmp_path, 9)
    wrong = canary_of(adapt(base.reference, seed=4))
    async with client_of(server, base) as client:
        with pytest.raises(InferenceError) as caught:
            await client.update_weights(
                path, 9, read_weights_manifest(path).checksum, canary=wrong, adapter=True
            )
    assert caught.value.code == "BK-WEIGHTS-UPDATE"


@pytest.mark.parametrize("spoil", ["bytes", "modules"])
async def test_damaged_adapter_is_refused_and_serving_continues(server, base, tmp_path, spoil):
    good = adapt(base.reference, seed=5)
    paths = [publish(good, tmp_path, 10), publish(adapt(base.reference, seed=6), tmp_path, 11)]
    weights = paths[1] / "adapter_model.safetensors"
    if spoil == "bytes":
        content = bytearray(weights.read_bytes())
        content[-3] ^= 1
        weights.write_bytes(content)
    else:
        unknown = {name.replace("q_proj", "r_proj"): t for name, t in load_file(weights).items()}
        shutil.rmtree(paths[1])

        def fill(directory):
            shutil.copy(paths[0] / "adapter_config.json", directory)
            save_file(unknown, directory / "adapter_model.safetensors")

        identity = RunIdentity(run_id="t", attempt=1)
        publish_weights(tmp_path, 11, fill, identity=identity, dtype="float32", adapter=True)
    async with client_of(server, base) as client:
        await update(client, paths[0], 10)
        with pytest.raises(InferenceError, match="digest differs" if spoil == "bytes" else "r_proj"):
            await update(client, paths[1], 11)
        generation, versions = await client.generate(PROMPT, PARAMS), await weight_versions(client)
    assert versions == [10]
    assert torch.tensor(generation.logprobs) == near(reference(good, PROMPT, generation))


@pytest.fixture(scope="module")
def embedded(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("embedded")
    with LocalServer(base.directory, folder, key=KEY) as running, running.http() as http:
        yield http


def sampled(http, model=None):
    params = {"max_tokens": 8, "temperature": 0.0, "logprobs": 0}
    body = {"token_ids": PROMPT, "sampling_params": params} | ({"model": model} if model else {})
    (choice,) = http.post("/inference/v1/generate", json=body).json()["choices"]
    return choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]]


@pytest.mark.e2e
def test_a_server_is_started_with_an_adapter(base, tmp_path):
    """The adapter directory replaces the model directory; `adapter_config.json` names the base."""
    mine, model = tmp_path / "mine", adapt(base.reference, seed=9)
    model.save_pretrained(mine)
    content = json.loads((mine / "adapter_config.json").read_text())
    named = content | {"base_model_name_or_path": str(base.directory)}
    (mine / "adapter_config.json").write_text(json.dumps(named))
    with Server(mine, tmp_path / "run", key=KEY, max_num_seqs=4) as running, running.http() as http:
        listed = [one["id"] for one in http.get("/v1/models").json()["data"]]
        assert listed[:2] == [str(base.directory), str(mine)]
        tokens, logprobs = sampled(http, str(mine))
    assert torch.tensor(logprobs) == near(TinyModel(None, model).logprobs(PROMPT, tokens))
    refused = Server(mine, tmp_path / "vllm", backend="vllm")
    assert refused.process.wait(HANG) == 2
    assert str(mine) in refused.log.read_text()


def test_adapter_without_manifest_is_loaded_and_unloaded(embedded, base, tmp_path):
    """The adapter has no manifest, and scales and targets modules in all ways that peft supports."""
    model = adapt(
        base.reference,
        seed=7,
        target_modules=["q_proj", "down_proj"],
        rank_pattern={"down_proj": 2},
        alpha_pattern={"layers.1.self_attn.q_proj": 3},
        use_rslora=True,
    )
    model.save_pretrained(tmp_path / "mine")
    at_first = sampled(embedded)
    body = {"lora_name": "mine", "lora_path": str(tmp_path / "mine")}
    assert embedded.post("/v1/load_lora_adapter", json=body).status_code == 200
    assert [one["id"] for one in embedded.get("/v1/models").json()["data"]] == [str(base.directory), "mine"]
    tokens, logprobs = sampled(embedded, "mine")
    expected = TinyModel(None, model).logprobs(PROMPT, tokens)
    assert torch.tensor(logprobs) == near(expected)
    again = embedded.post("/v1/load_lora_adapter", json=body)
    assert (again.status_code, "load_inplace" in again.text) == (400, True)
    other = embedded.post("/v1/load_lora_adapter", json=body | {"lora_name": "other"})
    assert (other.status_code, "one at a time" in other.text) == (400, True)
    assert embedded.post("/v1/unload_lora_adapter", json={"lora_name": "other"}).status_code == 404
    assert embedded.post("/v1/unload_lora_adapter", json={"lora_name": "mine"}).status_code == 200
    assert sampled(embedded) == at_first
    gone = {"model": "mine", "token_ids": PROMPT, "sampling_params": {"max_tokens": 1}}
    assert embedded.post("/inference/v1/generate", json=gone).status_code == 404


def test_adapters_that_cannot_be_merged_are_refused(embedded, base, tmp_path):
    adapt(base.reference, seed=8).save_pretrained(tmp_path / "good")

    def refused(name, **changes):
        directory = tmp_path / name
        shutil.copytree(tmp_path / "good", directory)
        path = directory / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
        answer = embedded.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": str(directory)})
        assert answer.status_code == 400
        return answer.json()["error"]["message"]

    assert "use_dora = True" in refused("dora", use_dora=True)
    assert "init_lora_weights = 'pissa'" in refused("pissa", init_lora_weights="pissa")
    for route, body in (
        ("load", {"lora_name": "a", "lora_path": str(tmp_path)}),
        ("load", {"lora_name": str(base.directory), "lora_path": str(tmp_path / "good")}),
        ("unload", {"lora_name": "a"}),
    ):
        answer = embedded.post(f"/v1/{route}_lora_adapter", json=body)
        assert answer.status_code in (400, 404)
    adapt(base.reference, seed=9, modules_to_save=["lm_head"]).save_pretrained(tmp_path / "head")
    body = {"lora_name": "a", "lora_path": str(tmp_path / "head")}
    answer = embedded.post("/v1/load_lora_adapter", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "BK-ADAPTER")
