"""Servers that receive new weights by broadcast."""

import asyncio
import logging
import threading
from contextlib import asynccontextmanager

import pytest
import torch
from safetensors.torch import load_file

from buckeye.base.process import RunIdentity
from buckeye.inference.client import InferenceClient, SamplingParams
from buckeye.trainer.output.broadcast import Broadcaster
from buckeye.trainer.output.stored_weights import read_stored_weights
from buckeye.transport import broadcast_group
from buckeye.transport.weights import make_manifest, publish_weights, read_weights_manifest
from buckeye.transport.weights_offer import find_offer
from tests.waiting import HANG

from .conftest import KEY_OF_SERVERS, PROMPT, LocalServer, Server, near, weight_versions

pytestmark = pytest.mark.anyio
FACTS = {"identity": RunIdentity(run_id="t", attempt=1), "dtype": "float32"}


class Trainer:
    """Weights of a model in memory, which a trainer broadcasts or publishes."""

    def __init__(self, model, run):
        tensors = load_file(model.directory / "model.safetensors")
        self.run = run
        self.stored = read_stored_weights(model.directory, tensors, str, pinned=False)
        for name, tensor in tensors.items():
            self.stored.tensors[name].copy_(tensor)
        self.sender = Broadcaster(run, "broadcast", has_adapter=False)

    def offer(self, version):
        manifest = make_manifest(version, self.stored.digests(), **FACTS)
        self.sender.offer(manifest, self.stored)
        return find_offer(self.run, identity=FACTS["identity"])

    def publish(self, version):
        return publish_weights(self.run / "weights", version, self.stored.write, **FACTS)

    async def broadcast(self, client, version):
        """Update the servers by broadcast, without files, as the orchestrator does."""
        offer = self.offer(version)
        broadcast = client.accept_offer(self.run, offer)
        assert broadcast is not None
        path = self.run / "weights" / f"step_{version}"
        await client.update_weights(path, version, offer.manifest.checksum, broadcast=broadcast)
        await asyncio.to_thread(self.sender.finish)


@asynccontextmanager
async def client_of_all(servers, model):
    async with InferenceClient(
        [server.url for server in servers], api_key=KEY_OF_SERVERS, timeout=HANG, model=str(model.directory)
    ) as client:
        await client.wait_ready(HANG)
        yield client


@pytest.fixture
def trainer(make_model, tmp_path):
    return Trainer(make_model("qwen3", seed=3), tmp_path)


@pytest.fixture
def servers(chat_model, tmp_path):
    with (
        LocalServer(chat_model.directory, tmp_path / "a", max_num_seqs=4) as a,
        LocalServer(chat_model.directory, tmp_path / "b", max_num_seqs=4) as b,
    ):
        yield a, b


async def all_logprobs(client):
    sampling = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
    return [(await replica.generate_fields(PROMPT, sampling)).logprobs for replica in client.replicas]


@pytest.fixture(params=["shared memory", "broadcast"])
def route(request, trainer, monkeypatch):
    """Way of the weights. Without shared memory, buffers are smaller than the tensors."""
    assert set(trainer.stored.shared) == set(trainer.stored.files)
    if request.param == "broadcast":
        trainer.stored.shared.clear()
        monkeypatch.setattr(broadcast_group, "_BUFFER_BYTES", 1000)
    else:
        monkeypatch.delattr(broadcast_group.BroadcastGroup, "transfer")
    return request.param


@pytest.mark.usefixtures("route")
async def test_broadcast_weights_equal_those_of_files(servers, chat_model, trainer, make_model):
    async with client_of_all(servers, chat_model) as client:
        before = await all_logprobs(client)
        await trainer.broadcast(client, 1)
        received = await all_logprobs(client)
        path = Trainer(make_model("qwen3", seed=4), trainer.run).publish(2)
        await client.update_weights(path, 2, read_weights_manifest(path).checksum)
        other = await all_logprobs(client)
        path = trainer.publish(3)
        await client.update_weights(path, 3, read_weights_manifest(path).checksum)
        read = await all_logprobs(client)
    assert received == read
    assert received[0] == received[1]
    assert received[0] not in (before[0], other[0])


@pytest.mark.usefixtures("route")
async def test_damaged_broadcast_is_replaced_by_files(servers, chat_model, trainer, caplog):
    async with client_of_all(servers, chat_model) as client:
        await trainer.broadcast(client, 1)
        expected = await all_logprobs(client)
        path = trainer.publish(2)
        offer = trainer.offer(2)
        next(iter(trainer.stored.files.values()))[-1] ^= 1  # after the digest was computed
        broadcast = client.accept_offer(trainer.run, offer)
        with caplog.at_level(logging.WARNING):
            await client.update_weights(path, 2, offer.manifest.checksum, broadcast=broadcast)
        assert await weight_versions(client) == [2, 2]
        assert await all_logprobs(client) == expected
    assert [record.name for record in caplog.records] == ["buckeye.inference.client.weight_update"]


async def test_engine_keeps_its_weights_when_shared_memory_changes(servers, chat_model, trainer):
    """The trainer rounds the next version into the memory that the engines have read."""
    async with client_of_all(servers, chat_model) as client:
        await trainer.broadcast(client, 1)
        expected = await all_logprobs(client)
        for file in trainer.stored.files.values():
            file[-1000:] = 0
        assert await all_logprobs(client) == expected


async def test_unreadable_shared_memory_is_replaced_by_files(servers, chat_model, trainer, caplog):
    """An engine in another container has other process ids."""
    async with client_of_all(servers, chat_model) as client:
        trainer.stored.shared = dict.fromkeys(trainer.stored.shared, "/proc/self/fd/0")
        path, offer = trainer.publish(1), trainer.offer(1)
        broadcast = client.accept_offer(trainer.run, offer)
        with caplog.at_level(logging.WARNING):
            await client.update_weights(path, 1, offer.manifest.checksum, broadcast=broadcast)
        assert await weight_versions(client) == [1, 1]
    assert [record.name for record in caplog.records] == ["buckeye.inference.client.weight_update"]


async def test_engine_that_does_not_join_lets_the_others_load_files(
    servers, chat_model, trainer, caplog, monkeypatch
):
    monkeypatch.setattr(broadcast_group, "_JOIN_SECONDS", 0.5)
    async with client_of_all(servers, chat_model) as client:
        offer = trainer.offer(1)
        broadcast = client.accept_offer(trainer.run, offer)
        del broadcast.ranks[client.replicas[1]]
        written = threading.Timer(1.0, trainer.publish, (1,))
        written.start()
        await client.update_weights(
            trainer.run / "weights" / "step_1", 1, offer.manifest.checksum, broadcast=broadcast
        )
        written.join()
        assert await weight_versions(client) == [1, 1]
    assert sum("broadcast failed" in record.message for record in caplog.records) == 1


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
async def test_vllm_receives_broadcasts(vllm_python, make_model, tmp_path, tp, caplog):
    """The log-probs are those of the new model, also with a tied head, and after a failed broadcast."""
    old, *new = (make_model("qwen3-wide", seed=seed) for seed in (11, 12, 13))
    settings = {"backend": "vllm", "vllm_python": str(vllm_python), "parallel": {"tp": tp}}
    with Server(old.directory, tmp_path / "server", max_num_seqs=4, **settings) as server:
        async with client_of_all([server], old) as client:
            for version, model in enumerate(new, 1):
                await Trainer(model, tmp_path).broadcast(client, version)
                generation = await client.generate(PROMPT, SamplingParams(max_tokens=12))
                assert set(generation.versions) == {version}
                expected = model.logprobs(PROMPT, generation.token_ids)
                assert torch.tensor(generation.logprobs) == near(expected)
            assert not caplog.records
            trainer = Trainer(old, tmp_path)
            offer = trainer.offer(3)
            next(iter(trainer.stored.files.values()))[-1] ^= 1
            broadcast = client.accept_offer(tmp_path, offer)
            path = Trainer(old, tmp_path / "files").publish(3)
            await client.update_weights(path, 3, offer.manifest.checksum, broadcast=broadcast)
            generation = await client.generate(PROMPT, SamplingParams(max_tokens=12))
    assert torch.tensor(generation.logprobs) == near(old.logprobs(PROMPT, generation.token_ids))
    assert sum("broadcast failed" in record.message for record in caplog.records) == 1
