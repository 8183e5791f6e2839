"""The tools tell what is on record, and never an answer."""

from __future__ import annotations

import asyncio
import re
from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buckeye.envs.base import Reply
from buckeye.errors import UsageError
from buckeye.workers.opening import load_environment
from dakota1890.arguments import checked_arguments
from dakota1890.corpus import load_corpus
from dakota1890.families import FAMILIES
from dakota1890.orthography import bare, canonical
from dakota1890.tasks import DEPTHS, TaskOptions, TrainTasks, eval_tasks
from dakota1890.tool_environment import DakotaToolEnvironment
from dakota1890.tools import TOOLS, DakotaTools

ARGUMENT = {
    "lookup_dakota": "form",
    "lookup_english": "word",
    "show_rule": "topic",
    "paradigm": "lemma",
}


def make_environment(max_calls=4, families=None, **arguments):
    given = {"hints": "rule", "invented": False, "invented_fraction": 0.5, "seed": 0, "num_train": 2_000}
    checked = checked_arguments(
        **{"families": families, "depths": None, "num_eval": None, "shaping": True, **given, **arguments}
    )
    return DakotaToolEnvironment(checked, max_calls=max_calls)


@pytest.fixture(scope="module")
def environment():
    return make_environment()


@lru_cache(maxsize=1)
def items():
    held_out = eval_tasks(tuple(FAMILIES), DEPTHS, True)
    return [*held_out[::5], *TrainTasks(TaskOptions(), 300)]


def in_dakota(data):
    return data["answer"] not in ("meaning", "number", "JSON")


@lru_cache(maxsize=1)
def secrets():
    """Every held-out answer in Dakota, but for bare words of the dictionary that train tasks say (saŋpa)."""
    train = [item.data for item in TrainTasks(TaskOptions(), 3_000)]
    said = [
        form
        for data in train
        for form in (*data["prompt_forms"], *(data["accept"] if in_dakota(data) else ()))
    ]
    words = {word for form in said for word in form.split()}
    entries = {canonical(e.form) for e in load_corpus().entries if e.pos not in ("v. form", "prep. form")}
    held_out = [item.data for item in eval_tasks(tuple(FAMILIES), DEPTHS, True)]
    answers = {tuple(form.split()) for data in held_out if in_dakota(data) for form in data["accept"]}
    return answers - {(word,) for word in words & entries}


def words_of(text):
    return re.findall(r"[^\W\d_']+(?:'[^\W\d_]+)*'?", canonical(text.replace("-", " ").replace('"', " ")))


def told(text, phrases):
    """The phrases of `phrases` that `text` says, read word by word."""
    words = words_of(text)
    lengths = {len(phrase) for phrase in phrases}
    spoken = {tuple(words[i : i + n]) for n in lengths for i in range(len(words) - n + 1)}
    return spoken & phrases


@lru_cache(maxsize=1)
def hard_queries():
    """Lemmas, held-out answers, what is in glosses and rules, pieces of all of them."""
    corpus = load_corpus()
    forms = [" ".join(phrase) for phrase in sorted(secrets())]
    lemmas = [word.lemma for word in (*corpus.verbs, *corpus.nouns, *corpus.kin)]
    glosses = sorted({word for entry in corpus.entries for word in entry.gloss.split()})
    rules = [*corpus.rules, *(rule.category for rule in corpus.rules.values())]
    entries = [entry.form for entry in corpus.entries]
    return [
        *forms,
        *map(bare, forms),
        *lemmas,
        *map(bare, lemmas),
        *glosses,
        *rules,
        *entries,
        ".*",
        "[a-z]+",
        "(",
    ]


queries = st.one_of(
    st.deferred(lambda: st.sampled_from(hard_queries())),
    st.deferred(
        lambda: st.sampled_from(hard_queries()).flatmap(
            lambda q: st.integers(1, max(1, len(q))).map(lambda n: q[:n])
        )
    ),
    st.text(max_size=90),
)


anything = given(
    item=st.deferred(lambda: st.sampled_from(items())),
    name=st.sampled_from(list(ARGUMENT)),
    query=queries,
    page=st.none() | st.integers(-5, 10**30) | st.integers(1, 12),
)


@settings(max_examples=200)
@anything
def test_no_output_tells_an_answer(item, name, query, page):
    check_output(item, name, query, page)


@pytest.mark.slow
@settings(max_examples=3_000)
@anything
def test_no_output_at_all_tells_an_answer(item, name, query, page):
    check_output(item, name, query, page)


def check_output(item, name, query, page):
    arguments = {ARGUMENT[name]: query} | ({"page": page} if page is not None and name != "paradigm" else {})
    output = DakotaTools(item.data).call(name, arguments)
    own = {tuple(form.split()) for form in item.data["accept"]}
    assert not told(output, secrets() | own), (name, query)
    assert len(output) < 4_000
    assert output == DakotaTools(item.data).call(name, arguments)


def test_no_entry_rule_or_paradigm_tells_an_answer():
    """Not by chance: every lemma, every page, every rule."""
    corpus = load_corpus()
    data = items()[0].data
    tools = DakotaTools(data)
    outputs = [
        tools.call("paradigm", {"lemma": w.lemma}) for w in (*corpus.verbs, *corpus.nouns, *corpus.kin)
    ]
    outputs += [tools.call("lookup_dakota", {"form": entry.form}) for entry in corpus.entries]
    outputs += [tools.call("show_rule", {"topic": rule}) for rule in corpus.rules]
    outputs += [tools.call("lookup_english", {"word": "to", "page": page}) for page in range(1, 30)]
    for output in outputs:
        assert not told(output, secrets()), output


def test_the_test_would_notice():
    assert told('"kaška" (v.a.): he is manoŋ-kta', {("kaška",), ("manoŋ", "kta"), ("ši",)}) == {
        ("kaška",),
        ("manoŋ", "kta"),
    }
    assert len(secrets()) > 500


def test_a_guess_cannot_be_checked_by_looking_it_up(environment):
    """The task's own answer is found no more than a word that does not exist."""
    tasks = [t for t in environment.tasks("eval") if t.data["family"] == "dictionary" and in_dakota(t.data)][
        :40
    ]
    glosses = {canonical(entry.form): entry.gloss for entry in load_corpus().entries}
    for task in tasks:
        tools = DakotaTools(task.data)
        for form in task.data["accept"]:
            for spelling in (form, bare(form)):
                found = tools.call("lookup_dakota", {"form": spelling})
                assert f": {glosses.get(form)}" not in found.splitlines()[0], task.messages


def call(name, query, data=None, **more):
    data = data or {"family": "conjugate", "accept": (), "answer": "form", "prompt_forms": ()}
    return DakotaTools(data).call(name, {ARGUMENT[name]: query, **more})


def test_words_are_found_without_their_marks():
    assert '"manoŋ" (v.a.): to steal' in call("lookup_dakota", "manon").splitlines()
    assert call("lookup_dakota", "MANOŊ") == call("lookup_dakota", "manon")
    assert call("lookup_dakota", "no such word") == "Nothing was found."


def test_results_come_in_pages():
    first, second = (call("lookup_english", "to", page=page).splitlines() for page in (1, 2))
    assert len(first) == len(second) == 9
    assert not {line for line in set(first) & set(second) if not line.startswith('"[withheld]')}
    assert re.fullmatch(r"\(page 1 of \d+\)", first[-1])
    assert re.fullmatch(r"There are \d+ pages\.", call("lookup_english", "to", page=10**9))


def test_a_paradigm_tells_class_place_and_train_cells_only():
    head, *cells = call("paradigm", "manoŋ").splitlines()
    assert head == 'Dakota verb "manoŋ" (to steal), class I, marker after "ma".'
    assert [cell.partition(":")[0] for cell in cells] == ["I", "thou", "we two", "we", "you all", "they"]
    assert "I: mawanoŋ" in cells
    assert "we: [withheld]" in cells  # a held-out cell


def test_the_answer_of_a_train_task_is_withheld_from_it():
    data = {"family": "conjugate", "accept": ("mawanoŋ",), "answer": "form", "prompt_forms": ("manoŋ",)}
    assert "I: [withheld]" in call("paradigm", "manoŋ", data)


def test_what_a_form_means_is_not_told_to_who_is_asked_for_it():
    asked = {
        "family": "dictionary",
        "accept": ("to steal", "steal"),
        "answer": "meaning",
        "prompt_forms": ("manoŋ",),
    }
    assert call("lookup_dakota", "manoŋ", asked) == call("paradigm", "manoŋ", asked) == "Nothing was found."
    assert "steal" not in call("lookup_english", "steal", asked).replace("[withheld]", "")


def test_a_rule_is_found_by_id_category_or_word():
    assert call("show_rule", "poss-03").startswith("POSS-03 (possession): The final a")
    assert "POSS-03" in call("show_rule", "possession", page=1) + call("show_rule", "possession", page=2)
    assert "Topics: adjectives, articles" in call("show_rule", "no such topic")


def test_the_schemas_name_what_the_tools_take():
    for tool in TOOLS:
        function = tool["function"]
        assert function["parameters"]["required"] == [ARGUMENT[function["name"]]]


# The environment


def test_tools_are_an_argument_of_the_environment():
    environment = load_environment("dakota1890", tools=True, max_calls=3, families=["conjugate"])
    assert "Limit: 3 tool calls" in environment.tasks("eval")[0].messages[0]["content"]
    with pytest.raises(UsageError, match="max_calls"):
        load_environment("dakota1890", tools=True, max_calls=0)


def test_prompts_leave_to_the_tools_what_they_tell(environment):
    task = next(
        t
        for t in environment.tasks("train")
        if t.data["lemma_ids"] == ("manoŋ",) and t.data["family"] == "conjugate"
    )
    system, question = task.messages
    assert "Limit: 4 tool calls" in system["content"]
    assert question["content"].startswith('Dakota verb "manoŋ". Form: ')
    assert "Rule:" not in question["content"]


def test_invented_words_are_in_no_record_and_keep_their_description():
    environment = make_environment(invented=True, invented_fraction=1.0, families=["conjugate"])
    task = next(t for t in environment.tasks("train") if t.data["invented"])
    assert "class" in task.messages[1]["content"]


def test_tasks_and_splits_are_those_without_tools(environment):
    held_out = eval_tasks(tuple(FAMILIES), DEPTHS, True)
    assert sorted(t.id for t in environment.tasks("eval")) == sorted(item.id for item in held_out)
    with pytest.raises(KeyError, match="it has train, eval"):
        environment.tasks("tset")
    for tasks in environment.curriculum().values():
        assert tasks[0].messages[0]["role"] == "system"


class Scripted:
    """Calls tools as told, then answers from what it has read."""

    def __init__(self, calls, answer):
        self.calls = list(calls)
        self.answer = answer

    async def chat(self, messages, *, tools=()):
        assert [tool["function"]["name"] for tool in tools] == list(ARGUMENT)
        if self.calls:
            name, arguments = self.calls.pop(0)
            call = {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}
            message = {"role": "assistant", "content": "", "tool_calls": [call]}
        else:
            message = {"role": "assistant", "content": self.answer(messages)}
        return Reply(text=message["content"], finish_reason="stop", message=message)


def play(environment, task, calls, answer):
    return asyncio.run(environment.rollout(task, Scripted(calls, answer)))


def test_looking_up_and_composing_solves_a_held_out_task(environment):
    """The paradigm gives the place of the marker; the rule gives the marker."""
    task = next(
        t
        for t in environment.tasks("eval")
        if t.data["family"] == "conjugate" and t.data["cells"] == ("2sg|I, inside",)
    )
    (lemma,) = task.data["lemma_ids"]

    def compose(messages):
        described = messages[-1]["content"]
        before = re.search(r'marker after "([^"]+)"', described)[1]
        assert not told(described, {(task.data["accept"][0],)})
        return f"<answer>{before}ya{lemma.removeprefix(before)}</answer>"

    outcome = play(environment, task, [("paradigm", f'{{"lemma": "{lemma}"}}')], compose)
    assert outcome.reward == 1.0
    assert outcome.stop_reason == "answered"
    assert {k: outcome.components[k] for k in ("n_turns", "tool_calls", "tool_errors", "exact")} == {
        "n_turns": 2.0,
        "tool_calls": 1.0,
        "tool_errors": 0.0,
        "exact": 1.0,
    }


def test_calls_cost_nothing_and_errors_are_counted(environment):
    task = environment.tasks("eval")[0]
    right = f"<answer>{task.data['accept'][0]}</answer>"
    calls = [
        ("lookup_dakot", "{}"),
        ("paradigm", "not JSON"),
        ("lookup_english", '{"word": "to", "page": 2}'),
    ]
    outcome = play(environment, task, calls, lambda messages: right)
    assert outcome.reward == 1.0
    assert (outcome.components["tool_calls"], outcome.components["tool_errors"]) == (3.0, 2.0)


def test_one_that_only_calls_is_stopped_and_earns_nothing():
    environment = make_environment(max_calls=2)
    outcome = play(environment, environment.tasks("eval")[0], [("show_rule", '{"topic": "verb"}')] * 9, None)
    assert (outcome.reward, outcome.stop_reason) == (0.0, "turn_limit")
    assert outcome.components["n_turns"] == 4.0


@pytest.mark.slow
def test_a_rollout_against_a_real_engine_ends_with_a_reason(tmp_path, environment):
    """A model of random weights writes garbage: graded as such, every token recorded, no exception."""
    pytest.importorskip("torch")
    from buckeye.inference.client import InferenceClient, SamplingParams
    from buckeye.inference.render import ChatRenderer
    from buckeye.launch.serve import served_model
    from buckeye.orchestrator.environments import NamedEnvironment
    from buckeye.orchestrator.player import RolloutPlayer
    from buckeye.trainer.model.tiny import TinySize, make_tiny_model

    tasks = list(environment.tasks("eval")[:6])
    texts = [message["content"] for task in tasks for message in task.messages] * 4
    texts += [str(TOOLS), '<tool_call>\n{"name": "paradigm", "arguments": {"lemma": "ti"}}\n</tool_call>']
    size = TinySize(vocab_size=512, layers=1, hidden=64, max_length=4_096)
    make_tiny_model(tmp_path / "model", texts=texts, size=size, seed=0)

    async def run():
        async with served_model(tmp_path / "model") as server:
            client = InferenceClient(
                [server.base_url], api_key=server.api_key, timeout=60, model=server.model
            )
            async with client:
                player = RolloutPlayer(
                    sampler=client,
                    renderer=ChatRenderer(tmp_path / "model"),
                    params=SamplingParams(max_tokens=64),
                    seq_len=4_096,
                    seed=0,
                    timeout=60,
                    retries=0,
                )
                named = NamedEnvironment(name="dakota1890", environment=environment)
                return await asyncio.gather(*(player.start(named, task, i) for i, task in enumerate(tasks)))

    for rollout in asyncio.run(run()):
        assert rollout.outcome.error is None
        assert rollout.outcome.stop_reason in ("answered", "format", "truncated", "turn_limit")
        assert rollout.reward == 0.0
        assert rollout.completion_tokens == sum(sum(s.loss_mask) for s in rollout.segments) > 0
