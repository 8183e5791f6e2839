"""The complete algorithm in one file, for reading: no processes, no server, no asynchrony.

    python examples/rl_loop.py MODEL_DIR [--steps 20] [--env dakota1890]

Each step: take some tasks, sample a group of answers to each, reward them, compare every answer with its
group, and make the better ones more likely. `rl` does this with engines, batches and a trainer in parallel.
"""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from buckeye.envs.base import Environment, Reply, Task
from buckeye.workers.loading import load_environment


@dataclass
class Answer:
    """One sampled answer: its tokens, the log-probs they were sampled with, and its reward."""

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: torch.Tensor  # f32[tokens]
    reward: float


def sample(model, tokenizer, prompt_ids, count, max_tokens):  # noqa: ANN001, ANN201
    """Sample `count` answers to one prompt: (token ids, log-probs) of each, cut after the end-of-turn
    token."""
    prompt = torch.tensor([prompt_ids] * count)
    with torch.no_grad():
        out = model.generate(
            prompt,
            do_sample=True,
            temperature=1.0,
            top_k=0,  # truncated sampling would bias the importance ratios below
            max_new_tokens=max_tokens,
            pad_token_id=tokenizer.pad_token_id,
            return_dict_in_generate=True,
            output_logits=True,
        )
    logprobs = torch.stack(out.logits, dim=1).float().log_softmax(-1)  # [count, tokens, vocabulary]
    sampled = out.sequences[:, len(prompt_ids) :]
    chosen = logprobs.gather(-1, sampled[..., None])[..., 0]
    for ids, lps in zip(sampled.tolist(), chosen, strict=True):
        end = ids.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in ids else len(ids)
        yield ids[:end], lps[:end]


def grade(environment: Environment, task: Task, text: str) -> float:
    """Run the task with a policy that replies `text`. An error of the environment raises, and is not a 0."""

    class FixedPolicy:
        async def chat(self, messages, *, tools=()):  # noqa: ANN001, ANN202
            return Reply(text=text, finish_reason="stop", message={"role": "assistant", "content": text})

    outcome = asyncio.run(environment.rollout(task, FixedPolicy()))
    if outcome.reward is None:
        raise RuntimeError(outcome.error)
    return outcome.reward


def sample_group(model, tokenizer, environment, task: Task, size: int, max_tokens: int) -> list[Answer]:  # noqa: ANN001
    """Sample and reward a group of answers to one task."""
    prompt_ids = tokenizer.apply_chat_template(
        [dict(m) for m in task.messages], add_generation_prompt=True, return_dict=False
    )
    return [
        Answer(
            prompt_ids,
            ids,
            logprobs,
            grade(environment, task, tokenizer.decode(ids, skip_special_tokens=True)),
        )
        for ids, logprobs in sample(model, tokenizer, prompt_ids, size, max_tokens)
    ]


def policy_logprobs(model, answer: Answer) -> torch.Tensor:  # noqa: ANN001
    """Return the log-probs of the answer's tokens under the current weights, differentiable."""
    ids = torch.tensor([[*answer.prompt_ids, *answer.token_ids]])
    logits = model(ids).logits[0, len(answer.prompt_ids) - 1 : -1].float()
    return logits.log_softmax(-1).gather(-1, ids[0, len(answer.prompt_ids) :, None])[:, 0]


def train_step(model, optimizer, groups: list[list[Answer]]) -> float:  # noqa: ANN001
    """Run one optimizer step on -ratio * advantage, averaged over the batch's tokens; return the loss."""
    total = sum(len(answer.token_ids) for group in groups for answer in group)
    loss = 0.0
    for group in groups:
        mean = sum(answer.reward for answer in group) / len(group)
        for answer in group:
            advantage = answer.reward - mean
            if advantage == 0.0:
                continue  # equal to the mean of its group
            ratio = (policy_logprobs(model, answer) - answer.logprobs).exp()
            keep = (ratio > 0.125) & (ratio < 8.0)  # leave out tokens with a large change
            part = -(ratio * keep * advantage).sum() / total
            part.backward()
            loss += part.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--env", default="dakota1890")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--groups", type=int, default=8, help="tasks per step")
    parser.add_argument("--group-size", type=int, default=8, help="answers per task")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--save", help="write the trained model here")
    args = parser.parse_args()

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    model.get_input_embeddings().padding_idx = None  # the token may also end a turn, and must train
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    environment = load_environment(args.env)
    tasks = environment.tasks("train")

    for step in range(args.steps):
        batch = [tasks[(step * args.groups + i) % len(tasks)] for i in range(args.groups)]
        groups = [
            sample_group(model, tokenizer, environment, task, args.group_size, args.max_tokens)
            for task in batch
        ]
        rewards = [answer.reward for group in groups for answer in group]
        loss = train_step(model, optimizer, groups)
        print(f"step {step} | reward {sum(rewards) / len(rewards):.4f} | loss {loss:.4f}", flush=True)
    if args.save:
        model.save_pretrained(args.save)
        tokenizer.save_pretrained(args.save)


if __name__ == "__main__":
    main()
