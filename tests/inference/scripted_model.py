"""Tiny model trained to give one fixed reply to each of a few prompts when decoded greedily."""

from pathlib import Path

import torch

from buckeye.inference.render import ChatRenderer

from .chat_families import save_family

FIND = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "Look a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}
_ARGUMENTS = {
    "json": ' {"word": "dog"}}',
    "named": '{"word": "dog"}',
    "python": "word='dog')]",
    "xml": "\n<parameter=word>\ndog\n</parameter>\n</function>",
}
_ODD = {
    "json": '{"arguments":{"word":"dog"},  "name":"find"}',
    "named": 'find[CALL_ID]123456789[ARGS] {"word":"dog"}',
    "python": '[ find( word = "dog", )]',
    "xml": "<function=find><parameter=word>dog</parameter></function>",
}


def call_of(renderer, *, odd=False):
    """Return the text of a call of FIND as the template of a model writes it, or with other spaces."""
    call_format = renderer.template.call_format
    form, opened, close = call_format.form, call_format.open, call_format.close
    if odd:
        return _ODD[form] if opened in ("", "<function=") else opened + _ODD[form] + close
    text = call_format.start("find") + _ARGUMENTS[form]
    if call_format.lead.removeprefix(opened).lstrip().startswith("[") and form == "json":
        text += "]"
    line_break = "\n" if call_format.lead.startswith(f"{opened}\n") else ""
    return text if opened in ("", "<function=") else text + line_break + close


CALL = '<tool_call>\n{"name": "find", "arguments": {"word": "dog"}}\n</tool_call>'
NO_THOUGHT = "<think>\n\n</think>\n\n"
"""Empty reasoning block, which Qwen3 always writes. vLLM takes a reply without it for reasoning."""
ASK_HELLO = [{"role": "user", "content": "Hello?"}]
ASK_DOG = [{"role": "user", "content": "Find the dog."}]
ASK_BOTH = [{"role": "user", "content": "Find it twice."}]
ASK_HARD = [{"role": "user", "content": "Think: 2 + 2?"}]
FOUND_DOG = [
    *ASK_DOG,
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "call00000",
                "type": "function",
                "function": {"name": "find", "arguments": '{"word": "dog"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call00000", "content": "An animal."},
]
ANIMAL, THOUGHT = "It is an animal.", "Two and two."
SCRIPT = [
    (ASK_HELLO, (), f"{NO_THOUGHT}Hello, fox!"),
    (ASK_DOG, (FIND,), f"{NO_THOUGHT}{CALL}"),
    (ASK_DOG, (), f"{NO_THOUGHT}Which dog?"),
    (ASK_BOTH, (FIND,), f"{NO_THOUGHT}I look.\n{CALL}\n{CALL}"),
    (FOUND_DOG, (FIND,), f"{NO_THOUGHT}{ANIMAL}"),
    (ASK_HARD, (), f"<think>\n{THOUGHT}\n</think>\n\nFour."),
]
COMPLETION = ("the quick", " brown fox")
CONTEXT = 1024

_STEPS = 300
_ENOUGH = 0.004


def save_scripted_model(directory: Path) -> Path:
    """Train a model with the tokenizer of the Qwen3 family, in seconds, and save it."""
    import transformers as hf

    save_family("qwen3", directory)
    renderer = ChatRenderer(directory)
    end = renderer.template.end_of_turn[1]
    samples = [
        (renderer.render(messages, tools).ids, [*renderer.encode(reply), end])
        for messages, tools, reply in SCRIPT
    ]
    samples.append((renderer.encode(COMPLETION[0]), [*renderer.encode(COMPLETION[1]), end]))
    config = hf.Qwen3Config(
        vocab_size=len(renderer.tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
    )
    torch.manual_seed(0)
    model = hf.Qwen3ForCausalLM(config)
    _teach(model, samples)
    model.save_pretrained(directory)
    return directory


def _teach(model, samples) -> None:
    width = max(len(prompt) + len(reply) for prompt, reply in samples)
    ids = torch.zeros(len(samples), width, dtype=torch.long)
    labels = torch.full_like(ids, -100)
    for row, (prompt, reply) in enumerate(samples):
        ids[row, : len(prompt) + len(reply)] = torch.tensor([*prompt, *reply])
        labels[row, len(prompt) : len(prompt) + len(reply)] = torch.tensor(reply)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    for _ in range(_STEPS):
        loss = model(ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss.item() < _ENOUGH:
            return
    raise AssertionError(f"the scripted model was not taught in {_STEPS} steps: loss {loss.item():.4f}")
