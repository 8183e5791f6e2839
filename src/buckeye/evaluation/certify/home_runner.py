"""Score recorded replies with the library of an environment, without Buckeye.

This program runs in the interpreter of the environment. Its argument is a file with `{"runner", "name",
"args", "path", "sessions": [{"messages", "data", "replies"}]}`. It prints a list with the reward of each
session, or null if the library gives no reward for its replies. Replies are assistant messages.
The folders in `path` have modules of the environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import importlib
import importlib.util
import inspect
import json
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
import uuid
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

Json = dict[str, Any]
_GRADES = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}
_START_SECONDS = 60.0


def texts(session: Json) -> list[str]:
    """Return the texts of the replies of a session."""
    return [reply.get("content") or "" for reply in session["replies"]]


def reasoning_gym(name: str, args: Json, sessions: Sequence[Json]) -> list[float | None]:
    """Return the scores of `score_answer` for the extracted answers."""
    library, utils = importlib.import_module("reasoning_gym"), importlib.import_module("reasoning_gym.utils")
    seed, size = args.pop("seed", 0), args.pop("size", 2000)
    splits = {
        "train": (seed, size),
        "eval": (args.pop("eval_seed", seed + 1_000_003), 10 * args.pop("eval_size", 100)),
    }
    args.pop("system_prompt", None)
    args = {key: tuple(value) if isinstance(value, list) else value for key, value in args.items()}
    datasets = {
        split: library.create_dataset(name, seed=first, size=count, **args)
        for split, (first, count) in splits.items()
    }
    rewards: list[float | None] = []
    for session in sessions:
        dataset = datasets[session["data"]["split"]]
        answer = utils.extract_answer(texts(session)[0])
        entry = dataset[session["data"]["index"]]
        rewards.append(float(dataset.score_answer(answer=answer, entry=entry)))
    return rewards


def textarena(name: str, args: Json, sessions: Sequence[Json]) -> list[float | None]:
    """Return the rewards of games of one player, limited to the range from 0 to 1."""
    library = importlib.import_module("textarena")
    own = ("num_tasks", "num_eval", "seed", "seat", "opponent", "system_prompt")
    settings = {key: value for key, value in args.items() if key not in own}
    rewards: list[float | None] = []
    for session in sessions:
        random.seed(session["data"]["seed"])
        game = library.make(env_id=name, **settings)
        game.reset(num_players=1, seed=session["data"]["seed"])
        done = False
        for reply in texts(session):
            game.get_observation()
            done, _ = game.step(action=reply)
        rewards.append(min(1.0, max(0.0, float(game.close()[0][0]))) if done else None)
    return rewards


def verifiers_v0(name: str, args: Json, sessions: Sequence[Json]) -> list[float | None]:
    """Return the rewards of `generate`, with a client that returns the recorded replies."""
    environment = importlib.import_module("verifiers").load_environment(name, **args)
    clients = importlib.import_module("verifiers.clients")
    types = importlib.import_module("openai.types.chat")

    class RecordedClient(clients.OpenAIChatCompletionsClient):  # type: ignore[name-defined, misc]
        def __init__(self, replies: Sequence[Json]) -> None:
            super().__init__(importlib.import_module("openai").AsyncOpenAI(api_key="none"))
            self._replies = iter(replies)

        async def get_native_response(self, *_: Any, **__: Any) -> Any:
            choice = {"index": 0, "finish_reason": "stop", "message": next(self._replies)}
            values = {
                "id": "0",
                "object": "chat.completion",
                "created": 0,
                "model": name,
                "choices": [choice],
            }
            return types.ChatCompletion.model_validate(values)

    async def reward(session: Json) -> float | None:
        data = session["data"]
        dataset = environment.get_dataset() if data["split"] == "train" else environment.get_eval_dataset()
        client = RecordedClient(session["replies"])
        made = await environment.generate(
            [dataset[data["row"]]], client, name, {}, independent_scoring=True, on_progress=[]
        )
        output = made["outputs"][0]
        return None if output.get("error") else output["reward"]

    async def rewards() -> list[float | None]:
        return [await reward(session) for session in sessions]

    return asyncio.run(rewards())


def verifiers_v1(name: str, args: Json, sessions: Sequence[Json]) -> list[float | None]:
    """Return the rewards of `run_slot` with the harness `null`, for a server that replays the replies."""
    vf = importlib.import_module("verifiers.v1")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    own = ("harness", "runtime", "agent", "eval", "limit", "seat", "opponent")
    settings = {key: value for key, value in args.items() if key not in own}
    places = asyncio.Semaphore(8)

    async def reward(environment: Any, session: Json) -> float | None:
        task_type = type(environment.taskset).task_type()
        data = task_type.data_type().model_validate(session["data"]["task"])
        (slot,) = environment.slots(task_type(data, environment.config.taskset.task))
        async with places:
            with replayed(session["replies"]) as url:
                client = vf.EvalClientConfig(base_url=f"{url}/v1", api_key_var="OPENAI_API_KEY")
                episode = await environment.run_slot(slot, vf.ModelContext(model="replay", client=client))
        (trace,) = episode.traces
        return None if trace.errors else float(trace.reward)

    async def rewards() -> list[float | None]:
        agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
        config = vf.resolve_env_config({"taskset": {"id": name, **settings}, "agent": agent})
        environment = vf.load_environment(config)
        async with environment.serving():
            return await asyncio.gather(*(reward(environment, session) for session in sessions))

    os.environ["OPENAI_API_KEY"] = "none"
    return asyncio.run(rewards())


def gymnasium(name: str, args: Json, sessions: Sequence[Json]) -> list[float | None]:
    """Return the sums of the rewards of `step`. A reply without an action costs 1."""
    library = importlib.import_module("gymnasium")
    module, _, name = name.rpartition(":")
    if module:
        importlib.import_module(module)
    own = ("num_tasks", "num_eval", "seed", "actions", "max_steps", "invalid_reward", "system_prompt")
    limit, settings = args.get("max_steps"), {key: value for key, value in args.items() if key not in own}
    rewards: list[float | None] = []
    for session in sessions:
        env = library.make(name, **settings, **({} if limit is None else {"max_episode_steps": limit}))
        env.reset(seed=session["data"]["seed"])
        total = 0.0
        for reply in texts(session):
            action = gymnasium_action(reply, session["messages"][0]["content"], env.action_space)
            total += float(args.get("invalid_reward", -1.0) if action is None else env.step(action)[1])
        rewards.append(total)
    return rewards


def gymnasium_action(reply: str, prompt: str, space: Any) -> Any:
    """Return the last action of a prompt that a reply names; the whole reply if the prompt lists none."""
    shown = re.findall(r"^End every reply with one of these actions: (.+)\.$", prompt, re.MULTILINE)
    if not shown:
        return reply
    names = shown[-1].casefold().split(", ")
    anyone = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    found = re.findall(rf"(?<!\w)(?:{anyone})(?!\w)", reply.casefold())
    return names.index(found[-1]) + int(space.start) if found else None


def skyrl_gym(name: str, args: Json, sessions: Sequence[Json]) -> list[float | None]:
    """Return the sums of the rewards of `step`."""
    library, config = importlib.import_module("skyrl_gym"), importlib.import_module("omegaconf").OmegaConf
    rewards: list[float | None] = []
    for session in sessions:
        env = library.make(name, env_config=config.create(args.get("env_config", {})), extras=session["data"])
        env.init(session["messages"])
        rewards.append(sum(float(env.step(reply)["reward"]) for reply in texts(session)))
        env.close()
    return rewards


def inspect_ai(name: str, args: Json, sessions: Sequence[Json]) -> list[float | None]:
    """Return the values of the chosen score of `inspect_ai.eval`, with a model that returns the replies."""
    inspect, model = importlib.import_module("inspect_ai"), importlib.import_module("inspect_ai.model")
    parse = importlib.import_module("inspect_ai.model._call_tools").parse_tool_call
    sample_state = importlib.import_module("inspect_ai.solver._task_state").sample_state
    rewards: list[float | None] = [None] * len(sessions)
    if "grader" in args:  # another reply of that model may be another grade
        return rewards
    settings = {key: value for key, value in args.items() if key not in ("eval", "limit", "score")}

    def reply(given: Any, tools: Any, *_: Any) -> Any:
        said = sessions[sample_state().sample_id]["replies"]
        message = said[min(sum(m.role == "assistant" for m in given), len(said) - 1)]
        calls = [
            parse(call["id"], call["function"]["name"], call["function"]["arguments"], tools)
            for call in message.get("tool_calls") or ()
        ]
        own = model.ChatMessageAssistant(content=message.get("content") or "", tool_calls=calls or None)
        choices = [model.ChatCompletionChoice(message=own)]
        return model.ModelOutput(model="replay", choices=choices, usage=model.ModelUsage())

    replayer = model.get_model("mockllm/model", custom_outputs=reply, memoize=False)
    for split in {session["data"]["split"] for session in sessions}:
        given = settings | (args["eval"] if split == "eval" else {})
        (task,) = importlib.import_module("inspect_ai._eval.loader").load_tasks([name], given)
        samples = []
        for number, session in enumerate(sessions):
            if session["data"]["split"] == split:
                samples.append(copy.deepcopy(task.dataset[session["data"]["index"]]))
                samples[-1].id = number
        task.dataset = importlib.import_module("inspect_ai.dataset").MemoryDataset(samples)
        with tempfile.TemporaryDirectory() as logs, contextlib.redirect_stdout(sys.stderr):
            (log,) = inspect.eval(task, model=replayer, log_dir=logs, display="none", epochs=1)
            for sample in log.samples:  # read from the log when they are used
                value = None if sample.error else inspect_score(sample.scores or {}, args.get("score"))
                rewards[sample.id] = None if value is None else float(_GRADES.get(value, value))
    return rewards


def inspect_score(scores: Mapping[str, Any], name: str | None) -> Any:
    """Return the value of the score `name`, or of the first. A score of several values has `NAME.KEY`."""
    values: Json = {}
    for scorer, score in scores.items():
        parts = score.value if isinstance(score.value, dict) else {"": score.value}
        values |= {f"{scorer}.{key}" if key else scorer: value for key, value in parts.items()}
    return values.get(name or next(iter(values), ""))


def openenv(name: str, args: Json, sessions: Sequence[Json]) -> list[float | None]:
    """Return the sums of the rewards that OpenEnv's client receives from the server of `MODULE:APP`."""
    client_type = importlib.import_module("openenv.core.generic_client").GenericEnvClient
    words = ["-m", "uvicorn", name, "--log-level=error", "--port=%d"]
    with server_of(words, args.get("folder")) as url:
        with urllib.request.urlopen(f"{url}/schema", timeout=60.0) as response:  # noqa: S310  a server that this program started
            schema = json.load(response)["action"]
        required = schema.get("required") or [None]
        is_text = len(required) == 1 and schema["properties"][required[0]].get("type") == "string"

        async def reward(session: Json) -> float | None:
            total = 0.0
            async with client_type(base_url=url) as client:
                await client.reset(seed=session["data"]["seed"], **args.get("reset", {}))
                for reply in texts(session):
                    with contextlib.suppress(ValueError, RuntimeError):  # not an action
                        action = {required[0]: reply} if is_text else json.loads(reply)
                        total += float((await client.step(action)).reward or 0.0)
            return total

        async def rewards() -> list[float | None]:
            return [await reward(session) for session in sessions]

        return asyncio.run(rewards())


def agent(name: str, args: Json, sessions: Sequence[Json]) -> list[float | None]:
    """Return the rewards of the program or function, for a model server that replays the replies."""
    rewards: list[float | None] = []
    cwd = os.path.expanduser(args.get("cwd") or os.getcwd())
    sys.path.insert(0, cwd)
    play, grade = (function_of(args[key]) if key in args else None for key in ("callable", "reward"))
    loop = asyncio.new_event_loop()  # one for all sessions: functions may share connections
    for session in sessions:
        value: Any
        with replayed(session["replies"]) as url:
            if play is not None:
                value = play(session, {"base_url": f"{url}/v1", "root_url": url, "api_key": "none"})
                value = loop.run_until_complete(value) if inspect.iscoroutine(value) else value
            else:
                value = result_of_program(args, cwd, session, url)
        if grade is not None and value is not None:
            value = grade(session, value)
            value = loop.run_until_complete(value) if inspect.iscoroutine(value) else value
        reward = value["reward"] if isinstance(value, dict) else value
        rewards.append(None if reward is None else float(reward))
    loop.close()
    return rewards


def function_of(reference: str) -> Any:
    """Return the function `module:function` or `file.py:function`."""
    module, _, function = reference.rpartition(":")
    return getattr(importlib.import_module(module.removesuffix(".py")), function)


def result_of_program(args: Json, cwd: str, session: Json, url: str) -> Any:
    """Return the result of the program for the model server at `url`; None if the program fails."""
    with tempfile.TemporaryDirectory() as folder:
        task, result = Path(folder, "task.json"), Path(folder, "result.json")
        task.write_text(json.dumps({key: session[key] for key in ("messages", "data")}))
        variables = {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "none", "BUCKEYE_MODEL": "replay"}
        variables |= {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": "none"}
        variables |= {"BUCKEYE_TASK": str(task), "BUCKEYE_RESULT": str(result)}
        environ = os.environ | args.get("env", {}) | variables
        done = subprocess.run(  # noqa: S603  the program of the environment
            args["command"], env=environ, cwd=cwd, capture_output=True, text=True, check=False
        )
        if done.returncode:
            return None
        text = result.read_text() if result.exists() else (done.stdout.splitlines() or ["null"])[-1]
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    return {"result": found, "stdout": done.stdout} if "reward" in args else found


def bfcl_eval(name: str, args: Json, sessions: Sequence[Json]) -> list[float | None]:
    """Return the verdicts of the leaderboard's runner for what its OpenAI handler receives."""
    runner, data = (
        importlib.import_module(f"bfcl_eval.{part}") for part in ("eval_checker.eval_runner", "utils")
    )
    enums, model = importlib.import_module("bfcl_eval.constants.enums"), "openbmb/MiniCPM-SALA-FC"
    language = {"simple_java": "JAVA", "simple_javascript": "JAVASCRIPT"}.get(name, "PYTHON")
    entries = data.load_dataset_entry(name, include_language_specific_hint=False)
    prompts, is_relevance = data.load_dataset_entry(name), data.is_relevance_or_irrelevance(name)
    answers = [] if is_relevance else data.load_ground_truth_entry(name)
    rewards: list[float | None] = []
    for session in sessions:
        entry = entries[session["data"]["index"]]
        with replayed(session["replies"]) as url:
            os.environ |= {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "none"}
            handler = runner.get_handler(model)
            prompt = copy.deepcopy(prompts[session["data"]["index"]])
            result, _ = handler.inference(prompt, False, True)
        if is_relevance:
            checked = runner._evaluate_single_relevance_entry(
                handler, entry["id"], result, entry, model, name
            )
        else:
            checked = runner._evaluate_single_ast_entry(
                handler,
                entry["id"],
                result,
                answers[session["data"]["index"]]["ground_truth"],
                entry,
                model,
                name,
                enums.Language[language],
                enums.ReturnFormat[language],
            )
        rewards.append(float(checked["valid"]))
    return rewards


def ors_sdk(name: str, args: Json, sessions: Sequence[Json]) -> list[float | None]:
    """Return the sums of the rewards that the client of `ors` receives from the server of `MODULE:CLASS`."""
    client, errors = importlib.import_module("ors.client"), importlib.import_module("ors.client._types")
    kind = name.partition(":")[2]
    with served_class("ors", name, args) as url, client.ORS(base_url=url) as connection:
        environment = connection.environment(kind.lower())
        return sums_of_calls(environment, sessions, errors.ToolCallError)


def openreward(name: str, args: Json, sessions: Sequence[Json]) -> list[float | None]:
    """Return the sums of the rewards that the client of `openreward` receives from `MODULE:CLASS`."""
    os.environ |= {"OPENREWARD_DISABLE_UPDATE_CHECK": "1"}
    library, errors = importlib.import_module("openreward"), importlib.import_module("openreward.api.errors")
    kind = name.partition(":")[2]
    with served_class("openreward.environments", name, args) as url:
        environment = library.OpenReward().environments.get(name=kind.lower(), base_url=url)
        return sums_of_calls(environment, sessions, errors.ToolCallError)


def served_class(package: str, name: str, args: Json) -> contextlib.AbstractContextManager[str]:
    """Run the server of `MODULE:CLASS`, and return its URL."""
    module, _, kind = name.partition(":")
    program = f"from {package} import Server; from {module} import {kind}; Server([{kind}]).run(port=%d)"
    return server_of(["-c", program], args.get("folder"))


def sums_of_calls(environment: Any, sessions: Sequence[Json], error: type[Exception]) -> list[float | None]:
    """Return for each session the rewards of its calls, and that of a last text if a tool grades it.

    None: scores of groups, which this program does not compute, are added to them.
    """
    splits = {session["data"]["split"] for session in sessions}
    tasks = {split: environment.list_tasks(split=split) for split in splits}
    rewards: list[float | None] = []
    for session in sessions:
        total, data = 0.0, session["data"]
        with environment.session(task=tasks[data["split"]][data["index"]]) as opened:
            for reply in session["replies"]:
                for call in reply.get("tool_calls") or ():
                    with contextlib.suppress(ValueError, error):  # not a call of a tool
                        arguments = json.loads(call["function"]["arguments"])
                        total += float(opened.call_tool(call["function"]["name"], arguments).reward or 0.0)
                if not reply.get("tool_calls") and getattr(opened, "is_assistant_message_final", bool)():
                    total += float(opened.call_terminal_tool(reply.get("content") or "").reward or 0.0)
            has_scores_of_groups = getattr(opened, "supports_score_group", bool)()
        rewards.append(None if has_scores_of_groups else total)
    return rewards


def hud(name: str, args: Json, sessions: Sequence[Json]) -> list[float | None]:
    """Return the rewards of HUD's agent on a server that replays the replies, without HUD's platform."""
    os.environ |= {"HUD_TELEMETRY_ENABLED": "false"}
    sys.path.insert(0, os.path.expanduser(args.get("folder") or "."))
    run, library = importlib.import_module("hud.eval.run"), importlib.import_module("hud.eval")
    agents = importlib.import_module("hud.agents")
    source = importlib.util.find_spec(name).origin  # type: ignore[union-attr]
    files = {"train": args.get("tasks", source), "eval": args.get("eval_tasks", source)}
    rows = {split: list(library.Taskset.from_file(file)) for split, file in files.items()}

    async def reward(session: Json) -> float | None:
        with replayed(session["replies"]) as url:
            agent = agents.OpenAIChatAgent(
                agents.types.OpenAIChatConfig(
                    base_url=f"{url}/v1", api_key="none", max_steps=len(session["replies"])
                )
            )
            task = rows[session["data"]["split"]][session["data"]["index"]]
            done = await run.rollout(task, agent, runtime=library.SubprocessRuntime(source))
        return None if done.trace.is_error or done.grade.is_error else float(done.reward)

    async def rewards() -> list[float | None]:
        return [await reward(session) for session in sessions]

    return asyncio.run(rewards())


@contextlib.contextmanager
def replayed(replies: Sequence[Json]) -> Iterator[str]:
    """Serve chat completions and responses with the replies in turn, the last one repeatedly.

    Yield the root URL.
    """
    remaining = list(reversed(replies))

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            message = remaining.pop() if len(remaining) > 1 else remaining[0]
            finish = "tool_calls" if message.get("tool_calls") else "stop"
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            choice: Json = {"index": 0, "finish_reason": finish}
            answer = {"id": "0", "object": "chat.completion", "created": 0, "model": "replay", "usage": usage}
            if self.path.endswith("/responses"):
                body = json.dumps(_response(message)).encode()
            elif request.get("stream"):
                calls = [{"index": n, **call} for n, call in enumerate(message.get("tool_calls") or ())]
                choice["delta"] = {**message, **({"tool_calls": calls} if calls else {})}
                answer |= {"object": "chat.completion.chunk", "choices": [choice]}
                body = b"data: %s\n\ndata: [DONE]\n\n" % json.dumps(answer).encode()
            else:
                choice["message"] = message
                body = json.dumps({**answer, "choices": [choice]}).encode()
            self.send_response(200)
            kind = "text/event-stream" if request.get("stream") else "application/json"
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()


def _response(message: Json) -> Json:
    """Return a reply as a response of OpenAI's API."""
    text: Json = {"type": "output_text", "text": message.get("content") or "", "annotations": []}
    output: list[Json] = [{"type": "message", "role": "assistant", "content": [text]}] if text["text"] else []
    calls = message.get("tool_calls") or ()
    output += [{"type": "function_call", "call_id": call["id"], **call["function"]} for call in calls]
    output = [{"id": uuid.uuid4().hex, "status": "completed", **item} for item in output]
    details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
    usage = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2, **details}
    given = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
    answer = {"id": uuid.uuid4().hex, "object": "response", "status": "completed", "created_at": 0}
    return {**answer, **given, "model": "replay", "output": output, "usage": usage}


@contextlib.contextmanager
def server_of(words: Sequence[str], folder: str | None) -> Iterator[str]:
    """Run a server in Python, whose last word has `%d` for the port, and yield its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, *words[:-1], words[-1] % port]
    cwd = folder and os.path.expanduser(folder)
    process = subprocess.Popen(command, cwd=cwd, stdout=sys.stderr)  # noqa: S603  the environment's server
    deadline = time.monotonic() + _START_SECONDS
    try:
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5.0).close()
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


RUNNERS = {
    "reasoning-gym": reasoning_gym,
    "textarena": textarena,
    "verifiers-v0": verifiers_v0,
    "verifiers-v1": verifiers_v1,
    "gymnasium": gymnasium,
    "skyrl-gym": skyrl_gym,
    "inspect-ai": inspect_ai,
    "openenv": openenv,
    "agent": agent,
    "bfcl-eval": bfcl_eval,
    "ors-sdk": ors_sdk,
    "openreward": openreward,
    "hud": hud,
}

if __name__ == "__main__":
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    sys.path[:0] = request["path"]
    programs = os.path.dirname(sys.executable)  # programs installed with the environment come first
    os.environ["PATH"] = os.pathsep.join([programs, os.environ.get("PATH", os.defpath)])
    result = RUNNERS[request["runner"]](request["name"], request["args"], request["sessions"])
    print(f"\n{json.dumps(result)}", flush=True)
    os.dup2(2, 1)  # the result stays the last line, also if the library prints at its end
