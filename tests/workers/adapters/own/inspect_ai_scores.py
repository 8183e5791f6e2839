"""Scores of replies by Inspect's own runner: `python inspect_ai_scores.py TASK < JOB`.

JOB is a JSON list with the assistant messages of each sample. The output has the values of the scores, and
the number of messages, of each sample.
"""

import contextlib
import json
import sys
import tempfile

from inspect_ai import eval as evaluate
from inspect_ai._eval.loader import load_tasks
from inspect_ai.dataset import MemoryDataset
from inspect_ai.model import ChatCompletionChoice, ChatMessageAssistant, ModelOutput, ModelUsage, get_model
from inspect_ai.model._call_tools import parse_tool_call
from inspect_ai.solver._task_state import sample_state


def run(name, folder):
    said = json.load(sys.stdin)
    (task,) = load_tasks([name], {})
    samples = list(task.dataset)[: len(said)]
    for number, sample in enumerate(samples):
        sample.id = number

    def reply(given, tools, choice, config):
        message = said[sample_state().sample_id][sum(m.role == "assistant" for m in given)]
        calls = [
            parse_tool_call(call["id"], call["function"]["name"], call["function"]["arguments"], tools)
            for call in message.get("tool_calls", ())
        ]
        own = ChatMessageAssistant(content=message["content"] or "", tool_calls=calls or None)
        return ModelOutput(model="m", choices=[ChatCompletionChoice(message=own)], usage=ModelUsage())

    task.dataset = MemoryDataset(samples)
    model = get_model("mockllm/model", custom_outputs=reply, memoize=False)
    with contextlib.redirect_stdout(sys.stderr):
        (log,) = evaluate(task, model=model, log_dir=folder, display="none", epochs=1)
    assert log.status == "success", log.error
    done = sorted(log.samples, key=lambda sample: sample.id)
    assert not any(sample.error for sample in done)
    return [
        {
            "values": {score: part.value for score, part in sample.scores.items()},
            "messages": len(sample.messages),
        }
        for sample in done
    ]


with tempfile.TemporaryDirectory() as logs:
    print(json.dumps(run(sys.argv[1], logs)))
