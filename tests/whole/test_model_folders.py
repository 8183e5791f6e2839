"""Broken and unusual model folders: each gives one clear error before a process starts, or works."""

import json
import os
import re
import shutil
import sys
from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.command import run_here
from tests.general_models import tiny_model
from tests.run.conftest import ENVIRONMENT
from transformers import AutoTokenizer, __version__

from buckeye.inference.engine.architecture import read_spec
from buckeye.inference.engine.weights import Checkpoint, DecoderWeights
from buckeye.inference.render import ChatRenderer
from buckeye.trainer.model.policy import load_policy
from buckeye.trainer.model.tiny import TinySize, make_tiny_model

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
EMBED = "model.embed_tokens.weight"
NOBODY = 65534
CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


def edit(folder, name, **changes):
    """Change keys of a JSON file. The value ... removes the key."""
    content = json.loads((folder / name).read_text()) | changes
    (folder / name).write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


def change(folder, function):
    """Replace the tensors of a model by what `function` returns for them."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    save_file(function(tensors), folder / WEIGHTS, metadata={"format": "pt"})


def without(text):
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if text not in name}


def with_value(name, value):
    def changed(tensors):
        tensors[name].view(-1)[5] = value
        return tensors

    return changed


def split(folder, *, drop=False, swap=False):
    """Store the weights in two files. `drop`: without the second file. `swap`: with a wrong index."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(tensors)
    parts = {"model-1.safetensors": names[:9], "model-2.safetensors": names[9:]}
    for file, part in parts.items():
        if not (drop and file == "model-2.safetensors"):
            save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
    places = {name: file for file, part in parts.items() for name in part}
    if swap:
        places[names[0]] = "model-2.safetensors"
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def keep_old_file(folder):
    """Store other weights in several files than in one file. transformers and vLLM read different ones."""
    old = load_file(folder / WEIGHTS)
    split(folder)
    save_file({name: 2 * tensor for name, tensor in old.items()}, folder / WEIGHTS)


def repeat_tensor(folder):
    """Store a tensor in two files, with other values. transformers and the index read different ones."""
    split(folder)
    repeated = load_file(folder / "model-1.safetensors")["model.layers.0.mlp.down_proj.weight"]
    tensors = load_file(folder / "model-2.safetensors") | {
        "model.layers.0.mlp.down_proj.weight": 2 * repeated
    }
    (folder / "model-2.safetensors").unlink()
    save_file(tensors, folder / "model-2.safetensors", metadata={"format": "pt"})


def overlap(folder):
    """Let two tensors have the same bytes of the file."""
    data = (folder / WEIGHTS).read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    up, gate = (header[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("up", "gate"))
    up["data_offsets"] = gate["data_offsets"]
    text = json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + data[start:])


def half_4bit(folder):
    """Store the state of a weight in 4 bits next to the weight in 32 bits."""
    state = "model.layers.0.mlp.up_proj.weight.quant_state.bitsandbytes__nf4"
    change(folder, lambda tensors: tensors | {state: torch.zeros(4, dtype=torch.uint8)})
    edit(folder, "config.json", quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})


def other_family(family, function=dict, **changes):
    """Return a function that stores a model of another family; `function` changes its tensors."""

    def store(folder):
        (folder / WEIGHTS).unlink()
        tiny_model(family, vocab_size=320, max_position_embeddings=512, **changes).save_pretrained(folder)
        change(folder, function)

    return store


def vocabulary(**changes):
    """Return a function that changes keys of the vocabulary in tokenizer.json."""

    def edit_vocabulary(folder):
        content = json.loads((folder / "tokenizer.json").read_text())
        content["model"] |= changes
        write(folder, "tokenizer.json", json.dumps(content))

    return edit_vocabulary


def no_default_template(folder):
    (folder / "chat_template.jinja").unlink()
    edit(folder, "tokenizer_config.json", chat_template=[{"name": "rag", "template": "{{ messages }}"}])


def relink(folder, name, target):
    (folder / name).unlink()
    (folder / name).symlink_to(target)


def pickled(folder):
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


def more_tokens(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"<far{number}>" for number in range(99)])
    tokenizer.save_pretrained(folder)


def plain_tokens(folder):
    """Store a tokenizer with more tokens of plain text than the embedding has rows."""
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"] |= {f"w{number}": 320 + number for number in range(9)}
    (folder / "tokenizer.json").write_text(json.dumps(content))


def far_token_in_prompts(folder):
    more_tokens(folder)
    template = folder / "chat_template.jinja"
    template.write_text("<far98>" + template.read_text())


def change_dtype(folder, dtype):
    content = (folder / WEIGHTS).read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header[EMBED]["dtype"] = dtype
    new = json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(len(new).to_bytes(8, "little") + new + content[end:])


def no_tokenizer(folder):
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / file).unlink()


def no_eos(folder):
    edit(folder, "config.json", eos_token_id=None)
    edit(folder, "tokenizer_config.json", eos_token=...)
    (folder / "generation_config.json").unlink()


def unreadable(folder, name):
    (folder / name).chmod(0)


def write(folder, name, text):
    (folder / name).write_text(text)


def config(**changes):
    return lambda folder: edit(folder, "config.json", **changes)


def generation(text):
    return lambda folder: write(folder, "generation_config.json", text)


def template(text):
    return lambda folder: write(folder, "chat_template.jinja", text)


BROKEN = {
    "missing shard": ("BK-MODEL-DAMAGED", lambda m: split(m, drop=True)),
    "two sets of weights": ("BK-MODEL-DAMAGED", keep_old_file),
    "integers in the file": (
        "BK-MODEL-DAMAGED",
        lambda m: change(m, lambda t: {n: v.char() for n, v in t.items()}),
    ),
    "no dtype in the file": ("BK-MODEL-DAMAGED", lambda m: change_dtype(m, [])),
    "missing tensors": ("BK-MODEL-DAMAGED", lambda m: change(m, without("layers.1.mlp"))),
    "missing layer": ("BK-MODEL-DAMAGED", config(num_hidden_layers=3, layer_types=...)),
    "layers and their kinds differ": ("BK-MODEL-DAMAGED", config(num_hidden_layers=1)),
    "unknown rope type": (
        "BK-MODEL-UNSUPPORTED",
        config(rope_parameters={"rope_type": "spiral", "rope_theta": 1e4}),
    ),
    "template raises": ("BK-TEMPLATE", template("{{ raise_exception('only for experts') }}")),
    "template is not valid": ("BK-TEMPLATE", template("{% for %}")),
    "no template": ("BK-TEMPLATE", lambda m: (m / "chat_template.jinja").unlink()),
    "no tokenizer": ("BK-TOKENIZER", no_tokenizer),
    "tokenizer is a pointer": (
        "BK-TOKENIZER",
        lambda m: write(m, "tokenizer.json", "version https://git-lfs"),
    ),
    "larger vocabulary of the tokenizer": ("BK-TOKENIZER", plain_tokens),
    "prompts need a token without embedding": ("BK-TOKENIZER", far_token_in_prompts),
    "wrong vocabulary size": ("BK-MODEL-DAMAGED", config(vocab_size=300)),
    "truncated weights": (
        "BK-MODEL-DAMAGED",
        lambda m: (m / WEIGHTS).write_bytes((m / WEIGHTS).read_bytes()[:-100]),
    ),
    "weights are a pointer": ("BK-MODEL-DAMAGED", lambda m: write(m, WEIGHTS, "version https://git-lfs")),
    "index of a missing file": (
        "BK-MODEL-DAMAGED",
        lambda m: write(m, INDEX, json.dumps({"weight_map": {EMBED: "other.safetensors"}})),
    ),
    "index of a missing tensor": (
        "BK-MODEL-DAMAGED",
        lambda m: write(m, INDEX, json.dumps({"weight_map": {"lost": WEIGHTS}})),
    ),
    "config is not JSON": ("BK-MODEL-DAMAGED", lambda m: write(m, "config.json", "model_type: qwen3")),
    "no model type": ("BK-MODEL-DAMAGED", config(model_type=...)),
    "contradictory heads": ("BK-MODEL-DAMAGED", config(num_attention_heads=3, num_key_value_heads=2)),
    "other head size": ("BK-MODEL-DAMAGED", config(head_dim=32)),
    "unknown dtype": ("BK-MODEL-DAMAGED", config(dtype="float99")),
    "NaN": (
        "BK-MODEL-DAMAGED",
        lambda m: change(m, with_value("model.layers.0.mlp.up_proj.weight", torch.nan)),
    ),
    "infinity": ("BK-MODEL-DAMAGED", lambda m: change(m, with_value("model.norm.weight", torch.inf))),
    "empty file of generation settings": ("BK-MODEL-DAMAGED", generation("")),
    "list of generation settings": ("BK-MODEL-DAMAGED", generation("[]")),
    "end of text is text": ("BK-MODEL-DAMAGED", generation('{"eos_token_id": "<|im_end|>"}')),
    "pickles": ("BK-MODEL-DAMAGED", pickled),
    "loop of links": ("BK-MODEL-DAMAGED", lambda m: relink(m, WEIGHTS, WEIGHTS)),
    "link to nothing": ("BK-MODEL-DAMAGED", lambda m: relink(m, WEIGHTS, "nothing")),
    "loop of links to the config": ("BK-MODEL-DAMAGED", lambda m: relink(m, "config.json", "config.json")),
    "another head although it is tied": (
        "BK-MODEL-DAMAGED",
        lambda m: change(m, lambda t: t | {"lm_head.weight": torch.zeros_like(t[EMBED])}),
    ),
    "no head although it is not tied": ("BK-MODEL-DAMAGED", config(tie_word_embeddings=False)),
    "unsupported quantization": (
        "BK-MODEL-UNSUPPORTED",
        config(quantization_config={"quant_method": "gptq", "bits": 4}),
    ),
    "encoder": ("BK-MODEL-UNSUPPORTED", config(architectures=["BertModel"], model_type="bert")),
    "tensor in two files": ("BK-MODEL-DAMAGED", repeat_tensor),
    "overlapping tensors": ("BK-MODEL-DAMAGED", overlap),
    "bytes after the tensors": (
        "BK-MODEL-DAMAGED",
        lambda m: (m / WEIGHTS).write_bytes((m / WEIGHTS).read_bytes() + b"more"),
    ),
    "float64 beyond float32": (
        "BK-MODEL-DAMAGED",
        lambda m: change(m, lambda t: {n: v.double() * 1e200 for n, v in t.items()}),
    ),
    "8-bit floats without a scale": (
        "BK-MODEL-DAMAGED",
        lambda m: change(m, lambda t: {n: v.to(torch.float8_e4m3fn) for n, v in t.items()}),
    ),
    "half of 4 bits": ("BK-MODEL-DAMAGED", half_4bit),
    "unknown quantization": ("BK-MODEL-UNSUPPORTED", config(quantization_config={"quant_method": "magic"})),
    "empty quantization": ("BK-MODEL-DAMAGED", config(quantization_config={})),
    "not a number": ("BK-MODEL-DAMAGED", config(rms_norm_eps=float("nan"))),
    "padding outside of the vocabulary": ("BK-MODEL-DAMAGED", config(pad_token_id=320)),
    "end of text is true": ("BK-MODEL-DAMAGED", generation('{"eos_token_id": true}')),
    "weights of a similar architecture": (
        "BK-MODEL-DAMAGED",
        config(architectures=["LlamaForCausalLM"], model_type="llama"),
    ),
    "weights of another architecture": ("BK-MODEL-DAMAGED", config(model_type="gpt_neox")),
    "general model without a bias": (
        "BK-MODEL-DAMAGED",
        other_family("gpt_neox", without("layers.1.mlp.dense_h_to_4h.bias")),
    ),
    "general model with another shape": (
        "BK-MODEL-DAMAGED",
        other_family("gpt_neox", lambda t: t | {"gpt_neox.layers.1.mlp.dense_h_to_4h.bias": torch.ones(47)}),
    ),
    "missing expert": ("BK-MODEL-DAMAGED", other_family("mixtral", without("experts.3.w1"))),
    "remote code": (
        "BK-MODEL-UNSUPPORTED",
        config(
            model_type="own", architectures=["OwnForCausalLM"], auto_map={"AutoModelForCausalLM": "own.M"}
        ),
    ),
    "unknown kind of tokenizer": ("BK-TOKENIZER", vocabulary(type="Magic")),
    "merges of unknown tokens": ("BK-TOKENIZER", vocabulary(merges=[["no", "where"]])),
    "no default template": ("BK-TEMPLATE", no_default_template),
    "template is not text": (
        "BK-TEMPLATE",
        lambda m: (m / "chat_template.jinja").write_bytes(b"\xff\xfe{{ messages }}"),
    ),
    "unreadable weights": ("BK-FILE-PERMISSION", lambda m: unreadable(m, WEIGHTS)),
    "unreadable folder": ("BK-FILE-PERMISSION", lambda m: m.chmod(0)),
}
"""Code of the error and the change of a model's folder."""
SERVED = ("unknown rope type", "template raises", "template is not valid", "no template", "encoder")
SERVED += ("unsupported quantization", "missing tensors", "missing layer", "wrong vocabulary size")
SERVED += (
    "no tokenizer",
    "other head size",
    "another head although it is tied",
    "no head although it is not tied",
    "unknown quantization",
    "padding outside of the vocabulary",
    "weights of a similar architecture",
    "weights of another architecture",
    "general model without a bias",
    "general model with another shape",
    "missing expert",
    "remote code",
    "no default template",
    "template is not text",
)
"""Folders that vLLM may serve, or that the embedded engine refuses itself."""
USABLE = {
    "unchanged": lambda m: None,
    "two files": split,
    "index with a wrong file of a tensor": lambda m: split(m, swap=True),
    "float16 in the file": lambda m: change(m, lambda t: {n: v.half() for n, v in t.items()}),
    "angles in the file": lambda m: change(
        m, lambda t: t | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(32)}
    ),
    "padded embedding": lambda m: (
        change(m, lambda t: t | {EMBED: torch.cat([t[EMBED], t[EMBED]])}),
        edit(m, "config.json", vocab_size=640),
    ),
    "unused token without embedding": more_tokens,
    "no generation settings": generation("{}"),
    "contradictory generation settings": generation('{"do_sample": false, "temperature": 0.6, "top_p": 0.9}'),
    "no padding token": lambda m: edit(m, "tokenizer_config.json", pad_token=...),
    "padding ends the text": lambda m: edit(m, "tokenizer_config.json", pad_token="<|im_end|>"),
    "several ends of text": generation('{"eos_token_id": [0, 2, 5]}'),
    "end of text outside of the vocabulary": generation('{"eos_token_id": [2, 5000]}'),
    "no end of text": no_eos,
    "no more positions than `seq_len`": config(max_position_embeddings=64),
}


ADAPTER, OF_ADAPTER = "adapter_model.safetensors", "adapter_config.json"
_Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_"


def replaced(function):
    """Return a function that replaces the tensors of an adapter."""

    def change_adapter(folder):
        tensors = load_file(folder / ADAPTER)
        (folder / ADAPTER).unlink()
        save_file(function(tensors), folder / ADAPTER)

    return change_adapter


BROKEN_ADAPTERS = {
    "no weights": lambda a: (a / ADAPTER).unlink(),
    "truncated weights": lambda a: (a / ADAPTER).write_bytes((a / ADAPTER).read_bytes()[:-50]),
    "weights are a pointer": lambda a: write(a, ADAPTER, "version https://git-lfs"),
    "settings are not JSON": lambda a: write(a, OF_ADAPTER, "r: 4"),
    "no base": lambda a: edit(a, OF_ADAPTER, base_model_name_or_path=...),
    "other rank": lambda a: edit(a, OF_ADAPTER, r=7),
    "other shape": replaced(lambda t: t | {f"{_Q}A.weight": torch.ones(4, 99)}),
    "NaN": replaced(lambda t: {name: tensor * torch.nan for name, tensor in t.items()}),
    "integers": replaced(lambda t: {name: tensor.char() for name, tensor in t.items()}),
    "half of a pair": replaced(lambda t: {f"{_Q}A.weight": t[f"{_Q}A.weight"]}),
    "routed experts": lambda a: edit(a, OF_ADAPTER, target_parameters=["gate_up_proj"]),
    "layer of a deeper model": replaced(lambda t: {n.replace(".0.", ".7."): v for n, v in t.items()}),
    "rank of 0": replaced(lambda t: {n: v[:0] if "_A" in n else v[:, :0].clone() for n, v in t.items()}),
    "no scale": lambda a: edit(a, OF_ADAPTER, lora_alpha=...),
    "scale is text": lambda a: edit(a, OF_ADAPTER, lora_alpha="much"),
    "no matrices": replaced(lambda t: {"x": torch.ones(1)}),
    "unknown module": replaced(lambda t: {n.replace("q_proj", "w_proj"): v for n, v in t.items()}),
}


def save_adapter(project):
    """Save an adapter of the model in the folder `model`."""
    folder = project / "adapter"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    rows, columns = load_file(project / "tiny" / WEIGHTS)["model.layers.0.self_attn.q_proj.weight"].shape
    matrices = {f"{_Q}A.weight": torch.ones(4, columns), f"{_Q}B.weight": torch.ones(rows, 4)}
    save_file(matrices, folder / ADAPTER)
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 16}
    settings |= {"target_modules": ["q_proj"], "base_model_name_or_path": str(project / "model")}
    write(folder, OF_ADAPTER, json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    root = tmp_path_factory.mktemp("folders")
    size = TinySize(vocab_size=320, layers=2, hidden=64, max_length=512)
    make_tiny_model(root / "tiny", texts=["a b c say 1 2 3 4"] * 20, size=size, seed=1)
    (root / "letters.py").write_text(ENVIRONMENT)
    (root / "chats.jsonl").write_text(f"{json.dumps(CHAT)}\n" * 8)
    for folder in (root, *root.parents[:5]):
        folder.chmod(0o755)
    return root


@pytest.fixture
def folder(project):
    copy = project / "model"
    shutil.copytree(project / "tiny", copy)
    yield copy
    copy.chmod(0o755)
    shutil.rmtree(copy)


class Started(BaseException):
    """A process would start now."""


@contextmanager
def unprivileged():
    """Run the block as another user, because root can read every file."""
    if os.geteuid():
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def call(project, *words):
    """Run a command up to the point where it would start a process, or import torch."""
    variables = {
        name: value for name, value in os.environ.items() if not name.startswith(("PRIME_", "BUCKEYE_"))
    }
    started = mock.Mock(side_effect=Started)
    with (
        mock.patch("buckeye.launch.rl.run_rl", started),
        mock.patch("buckeye.trainer.sft.run_sft", started),
        mock.patch("buckeye.inference.server.server.run_inference", started),
    ):
        return run_here(*words, cwd=project, env={**variables, "HF_HUB_OFFLINE": "1"})


def commands():
    run = ("rl", "--model.name", "model", "--trainer", "{}", "--orchestrator.env.0.id", "letters.py")
    run += ("--seq-len", 64, "--inference", "{}", "--trainer.model.device", "cpu", "--output-dir", "out")
    chats = ("--data.path", "chats.jsonl", "--output-dir", "out", "--seq-len", 64)
    return {
        "dry run": (*run, "--dry-run"),
        "rl": run,
        "sft": ("sft", "--model.name", "model", *chats),
        "serve": ("serve", "--model.name", "model"),
    }


@pytest.mark.parametrize("case", BROKEN)
def test_broken_folders_are_refused_before_a_process_starts(project, folder, case, wording):
    code, damage = BROKEN[case]
    damage(folder)
    texts = {}
    for name, words in commands().items():
        try:
            with unprivileged() if "unreadable" in case else nullcontext():
                done = call(project, *words)
        except Started:
            assert name == "serve", name
            assert case in SERVED
            continue
        errors = [line for line in done.stderr.splitlines() if not line.startswith("warning: ")]
        assert done.returncode in (1, 2), done.stderr
        assert f"more: buckeye explain {code}" in done.stderr, done.stderr
        assert sum(line.startswith("error: ") for line in errors) == 1, done.stderr
        assert re.search(r"hint: | -> ", done.stderr), done.stderr
        assert "model" in done.stderr
        texts[name] = "\n".join(errors)
    assert ("serve" in texts) is (case not in SERVED)
    assert texts["rl"].replace(__version__, "VERSION") == wording
    assert not (project / "out").exists()


def words_of_adapter(name):
    return tuple("adapter" if word == "model" else word for word in commands()[name])


@pytest.mark.parametrize("case", ["unchanged", *BROKEN_ADAPTERS])
def test_broken_adapters_are_refused_before_a_process_starts(project, folder, case):
    damage = BROKEN_ADAPTERS.get(case)
    adapter = save_adapter(project)
    if damage is not None:
        damage(adapter)
    for name in ("rl", "sft", "serve"):
        try:
            done = call(project, *words_of_adapter(name))
        except Started:
            assert damage is None, name
            shutil.rmtree(project / "out", ignore_errors=True)
            continue
        assert damage is not None, done.stderr
        assert re.search(r"explain (BK-ADAPTER|BK-PREFLIGHT)", done.stderr), done.stderr
        assert sum(line.startswith("error: ") for line in done.stderr.splitlines()) == 1
        assert "adapter" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("way", ["vllm", "adapter"])
@pytest.mark.parametrize("case", BROKEN)
def test_broken_folders_are_refused_with_vllm_and_as_base_of_an_adapter(project, folder, case, way):
    code, damage = BROKEN[case]
    save_adapter(project)
    damage(folder)
    served = ("--inference.backend", "vllm", "--inference.vllm-python", sys.executable)
    words = (*commands()["rl"], *served) if way == "vllm" else words_of_adapter("rl")
    with unprivileged() if "unreadable" in case else nullcontext():
        done = call(project, *words)
    # with vLLM, checks of vLLM and of the model may fail together
    assert re.search(f"explain ({code}|BK-PREFLIGHT{'|BK-VLLM.*' if way == 'vllm' else ''})", done.stderr)
    assert "model" in done.stderr


@pytest.mark.parametrize("case", USABLE)
def test_unusual_folders_work(project, folder, case):
    USABLE[case](folder)
    for words in commands().values():
        try:
            done = call(project, *words)
            assert (done.returncode, "--dry-run" in words) == (0, True), done.stderr
        except Started:
            shutil.rmtree(project / "out", ignore_errors=True)
    cpu = torch.device("cpu")
    spec, checkpoint = read_spec(folder), Checkpoint(folder)
    weights = DecoderWeights(spec, dtype=torch.float32, device=cpu)
    weights.check(checkpoint)
    weights.load(checkpoint)
    policy = load_policy(str(folder), cpu)
    torch.testing.assert_close(weights.current.embed, policy.model.get_input_embeddings().weight.detach())
    assert ChatRenderer(folder).render(CHAT["messages"][:1]).ids
