"""Checks of one model: engine, trainer, adapters and exports against transformers and PEFT, in float32."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from buckeye.config.trainer import LoRAConfig
from buckeye.inference.engine.adapters import AdaptedCheckpoint
from buckeye.inference.engine.decoder import Chunk, Decoder
from buckeye.inference.engine.general_spec import target_problem
from buckeye.inference.engine.weights import Checkpoint
from buckeye.trainer.data.packing import pack_micro_batch
from buckeye.trainer.model.adapter_files import merge_adapter, save_adapter
from buckeye.trainer.model.lora import add_adapter
from buckeye.trainer.model.policy import load_policy
from buckeye.trainer.output.hf_directory import save_model
from tests.general_models import VOCAB

from .conftest import finish, make_engine, sample

CPU, LENGTH, TOLERANCE = torch.device("cpu"), 24, 1e-4
IDS = torch.arange(9)[None]
PROMPTS = [tuple((7 * i + 3 * n) % VOCAB for i in range(n)) for n in (9, 1, 14, 5, 9)]
LENGTHS = (12, 20, 3, 8, 15)


@dataclass
class Saved:
    """Model in a directory, and the model of transformers with its weights."""

    directory: Path
    reference: torch.nn.Module

    def logits(self, ids):
        with torch.inference_mode():
            return self.reference(ids[None], use_cache=False).logits[0]

    @property
    def linear_names(self) -> list[str]:
        """Last parts of the names of the linear layers that an adapter may change."""
        head = self.reference.get_output_embeddings()
        modules = self.reference.named_modules()
        linear = [name for name, m in modules if isinstance(m, torch.nn.Linear) and m is not head]
        names = {name.rpartition(".")[2] for name in linear} - {"router"}
        if target_problem(self.directory, names):  # peft would adapt experts
            names -= {"gate_proj", "up_proj", "down_proj"}
        return sorted(names)


def close(found, expected, *, atol=TOLERANCE) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


def reload(directory):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


# --- engine ---


def next_logits(decoder: Decoder, ids, *cuts: int):
    """Return the logits after `ids`. Prefill them in parts that end at `cuts`, each in another slot."""
    start, slot = 0, 0
    for cut in (*cuts, len(ids) - 1):
        if start:
            decoder.cache.copy(slot, slot + 1, start)
            slot += 1
        if cut > start:
            decoder.prefill([Chunk(slot, ids[start:cut], start)])
        start = cut
    decoder.cache.copy(slot, 0, start)
    return decoder.decode(ids[-1:], torch.tensor([len(ids) - 1]), len(ids))[0].clone()


def check_engine(model: Saved, other: Saved) -> None:
    """Compare logits after prefills and steps, greedy text, and logits after a load of other weights."""
    ids = torch.randint(0, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(0))
    expected = model.logits(ids)
    engine = make_engine(model.directory, max_len=48, spare=4)
    decoder = engine.decoder
    with torch.inference_mode():
        for position in range(LENGTH):
            token, place = ids[position : position + 1], torch.tensor([position])
            close(decoder.decode(token, place, position + 1)[0], expected[position])
        for cuts in ((), (7,), (3, 12)):
            close(next_logits(decoder, ids, *cuts), expected[-1])
    _compare_greedy(engine, model, ids)
    decoder.weights.load(Checkpoint(other.directory))
    fresh = make_engine(other.directory, max_len=48).decoder
    with torch.inference_mode():
        assert torch.equal(next_logits(decoder, ids), next_logits(fresh, ids))
    _compare_batch(model)


def _compare_greedy(engine, model: Saved, ids) -> None:
    """Compare greedy text of two prompts. The second prompt continues the first conversation."""
    prompt = tuple(ids[:6].tolist())
    for _ in range(2):
        finish(engine, one := sample(prompt, max_tokens=10, top_k=1))
        _compare_choices(model, prompt, one)
        prompt = (*prompt, *one.token_ids, 5)


def _compare_batch(model: Saved) -> None:
    """Compare greedy text and log-probs of a batch. There are fewer slots than sequences."""
    engine = make_engine(model.directory, slots=3, max_len=40, spare=1)
    sequences = [sample(p, max_tokens=n, temperature=0) for p, n in zip(PROMPTS, LENGTHS, strict=True)]
    finish(engine, *sequences)
    for prompt, sequence in zip(PROMPTS, sequences, strict=True):
        _compare_choices(model, prompt, sequence)


def _compare_choices(model: Saved, prompt, sequence) -> None:
    text = torch.tensor([*prompt, *sequence.token_ids])
    scores = model.logits(text)[len(prompt) - 1 : -1]
    chosen = scores.gather(1, text[len(prompt) :, None])[:, 0]
    assert (scores.amax(-1) - chosen).max() <= 2 * TOLERANCE


# --- trainer ---


def draw_samples():
    """Return samples with a shared prefix, and others, and their masks."""
    rng = np.random.default_rng(0)
    samples = [rng.integers(0, VOCAB, n).astype(np.int32) for n in (17, 9, 12, 12)]
    samples[3][:8] = samples[2][:8]
    return samples, [np.arange(len(ids)) >= len(ids) // 2 for ids in samples]


def trained_values(policy):
    """Return the log-probs and entropies of the trained tokens."""
    row = pack_micro_batch(*draw_samples(), CPU)
    return policy(row, torch.full((len(row.targets),), 0.7))


def expected_values(plain):
    """Return the log-probs and entropies that a model of transformers or PEFT computes."""
    logprobs, entropies = [], []
    for ids, mask in zip(*draw_samples(), strict=True):
        tokens = torch.from_numpy(ids).long()
        log_p = (plain(input_ids=tokens[None], use_cache=False).logits[0] / 0.7).log_softmax(-1)
        at = torch.from_numpy(np.flatnonzero(mask))
        logprobs.append(log_p[at - 1, tokens[at]])
        entropies.append(-(log_p.exp() * log_p).sum(-1)[at - 1])
    return torch.cat(logprobs), torch.cat(entropies)


def compare_training(policy, plain, *, prefix: str = "") -> None:
    """Compare log-probs, entropies and their gradients; `prefix` is that of names of PEFT."""
    plain.zero_grad()
    found, expected = trained_values(policy), expected_values(plain)
    for values, wanted in zip(found, expected, strict=True):
        close(values, wanted)
    sum(values.sum() for values in found).backward()
    sum(values.sum() for values in expected).backward()
    gradients = {name.removeprefix(prefix): p.grad for name, p in plain.named_parameters()}
    for name, parameter in policy.trainable.items():
        wanted = gradients[name]
        if wanted is None:
            assert parameter.grad is None or not parameter.grad.any(), name
        else:
            close(parameter.grad, wanted, atol=1e-3 * max([1.0, *wanted.abs().flatten().tolist()]))


def compare_engine(decoder, policy) -> None:
    """Compare log-probs of the engine with those of the trainer."""
    ids = draw_samples()[0][0]
    row = pack_micro_batch([ids], [np.arange(len(ids)) > 0], CPU)
    with torch.no_grad():
        logprobs, _ = policy(row, torch.ones(len(row.targets)))
    close(torch.tensor(decoder.prompt_logprobs(ids.tolist())), logprobs)


def check_trainer(model: Saved) -> None:
    policy = load_policy(str(model.directory), CPU, compute_dtype="float32")
    compare_training(policy, model.reference)
    compare_engine(make_engine(model.directory).decoder, policy)


def check_export(model: Saved, folder: Path) -> None:
    policy = load_policy(str(model.directory), CPU, compute_dtype="float32")
    save_model(policy.model, {}, folder / "out", dtype=torch.float32)
    again = reload(folder / "out")
    assert again.config.tie_word_embeddings == model.reference.config.tie_word_embeddings
    close(again(IDS).logits, model.reference(IDS).logits)
    compare_engine(make_engine(folder / "out").decoder, policy)


# --- adapters ---


def check_adapter(model: Saved, folder: Path, *, quantization=None) -> None:
    """Compare an adapter of all linear layers with PEFT, trainer with engine, and its exports."""
    settings = {"compute_dtype": "float32", "frozen": True, "quantization": quantization}
    policy = load_policy(str(model.directory), CPU, **settings)
    # with a larger scale, float32 would round gradients by more than they may differ
    lora = LoRAConfig(rank=2, alpha=2, target_modules=model.linear_names)
    add_adapter(policy.model, lora, base=str(model.directory), frozen_dtype=torch.float32)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in policy.trainable.values():
            parameter.copy_(0.2 * torch.randn_like(parameter))
    adapter = folder / "adapter"
    save_adapter(policy.model, {}, adapter, tensors=policy.trainable)
    engine = make_engine(model.directory, quantization=quantization)
    checkpoint = AdaptedCheckpoint(model.directory, adapter)
    engine.decoder.weights.check(checkpoint)
    engine.decoder.weights.load(engine.decoder.weights.prepare(checkpoint))
    compare_engine(engine.decoder, policy)
    peft = PeftModel.from_pretrained(reload(model.directory), str(adapter), is_trainable=True).eval()
    if quantization is None:
        compare_training(policy, peft, prefix="base_model.model.")
    merge_adapter(str(model.directory), adapter, folder / "merged")
    close(reload(folder / "merged")(IDS).logits, peft(IDS).logits)
