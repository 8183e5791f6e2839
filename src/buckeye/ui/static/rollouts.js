"use strict";
// What was played: all groups in a table -> the answers of one, side by side -> a conversation, or its tokens.

const known = { key: null, groups: null };

async function groupsOf(run) {
  const stamp = statusNow && statusNow.stamp ? `${run} ${statusNow.stamp.rollouts} ${statusNow.stamp.evals}` : run;
  if (known.key !== stamp) Object.assign(known, { key: stamp, groups: await about(run, "groups") });
  return known.groups;
}

// A colour for a reward, in ten shades from the lowest of the run to the highest.
function shade(value, low, high) {
  if (value === null || value === undefined) return "none";
  return `r${Math.max(0, Math.min(9, Math.floor(((value - low) / (high - low || 1)) * 9.999)))}`;
}

const OUTCOMES = {
  "": ["any outcome", () => true],
  spread: ["rewards differ", (g, i) => g.low[i] !== null && g.low[i] < g.high[i]],
  none: ["all the lowest", (g, i, low) => g.high[i] !== null && g.high[i] <= low],
  all: ["all the highest", (g, i, low, high) => g.low[i] !== null && g.low[i] >= high],
  truncated: ["some cut off", (g, i) => g.truncated[i] > 0],
  errored: ["some errored", (g, i) => g.errored[i] > 0],
  dropped: ["dropped", (g, i) => g.dropped[i] !== null],
};
const SORTS = { step: "step", group: "group", task: "task", reward: "reward", rollouts: "rollouts", tokens: "tokens", seconds: "seconds" };
const MOST_ROWS = 200;

async function rolloutsPage(main, run) {
  if (!statusNow) await currentStatus(run);
  if (route.query.number !== undefined && route.query.other) return diffPage(main, run);
  if (route.query.number !== undefined) return conversationPage(main, run);
  if (route.query.group !== undefined) return groupPage(main, run);
  return groupsPage(main, run);
}

async function groupsPage(main, run) {
  let groups = await groupsOf(run), found = [], texts = null, shown = MOST_ROWS;
  const rows = h("tbody"), count = h("span", { className: "muted", role: "status" }), more = h("button", { onclick: () => { shown *= 5; fill(); } }, "Show more");
  const field = (name, element) => {
    element.value = route.query[name] || "";
    element.addEventListener(element.tagName === "SELECT" ? "change" : "input", later(60, () => { change({ [name]: element.value }); shown = MOST_ROWS; filter(); }));
    return element;
  };
  const envs = [...new Set(groups.env)];
  const task = field("task", h("input", { type: "search", placeholder: "task", "aria-label": "Part of the task's id" }));
  const split = field("split", h("select", { "aria-label": "Split" }, [["", "train and eval"], ["train", "train"], ["eval", "eval"]].map(([value, word]) => h("option", { value }, word))));
  const env = envs.length > 1 ? field("env", h("select", { "aria-label": "Environment" }, ["", ...envs].map((value) => h("option", { value }, value || "any environment")))) : null;
  const outcome = field("outcome", h("select", { "aria-label": "Outcome" }, Object.entries(OUTCOMES).map(([value, [word]]) => h("option", { value }, word))));
  const least = field("min", h("input", { type: "number", step: "any", placeholder: "reward ≥", "aria-label": "Lowest mean reward", className: "short" }));
  const most = field("max", h("input", { type: "number", step: "any", placeholder: "reward ≤", "aria-label": "Highest mean reward", className: "short" }));
  const said = h("input", { type: "search", placeholder: "text in the chosen step", "aria-label": "Text that was said in the chosen step", value: route.query.said || "", onchange: () => { change({ said: said.value }); look(); } });

  async function look() {
    texts = null;
    if (route.query.said && route.query.step !== undefined) {
      try {
        const told = await about(run, "search", { step: route.query.step, text: route.query.said, split: route.query.split || "train" });
        texts = new Set(told.found.map((one) => `${one.env} ${one.group}`));
        if (!told.all) toast("Too much text: only a part of this step was searched");
      } catch (error) { toast(error.message); }
    } else if (route.query.said) toast("Choose a step to search in its texts");
    filter();
  }

  function filter() {
    const q = route.query, word = (q.task || "").toLowerCase(), step = q.step === undefined ? null : Number(q.step), fits = (OUTCOMES[q.outcome] || OUTCOMES[""])[1];
    const low = lowest(groups), high = highest(groups);
    found = [];
    for (let i = 0; i < groups.step.length; i += 1) {
      if (step !== null && groups.step[i] !== step) continue;
      if (q.split && groups.split[i] !== q.split) continue;
      if (q.env && groups.env[i] !== q.env) continue;
      if (word && !groups.task[i].toLowerCase().includes(word)) continue;
      if (q.min && !(groups.reward[i] !== null && groups.reward[i] >= Number(q.min))) continue;
      if (q.max && !(groups.reward[i] !== null && groups.reward[i] <= Number(q.max))) continue;
      if (texts && !texts.has(`${groups.env[i]} ${groups.group[i]}`)) continue;
      if (fits(groups, i, low, high)) found.push(i);
    }
    const [by, down] = [(q.sort || "").replace("-", ""), (q.sort || "").startsWith("-")], column = SORTS[by] && groups[SORTS[by]];
    if (column) found.sort((a, b) => { const x = column[a], y = column[b]; return (x === y ? 0 : x === null ? 1 : y === null ? -1 : x < y ? -1 : 1) * (down ? -1 : 1); });
    fill();
  }

  function fill() {
    const low = lowest(groups), high = highest(groups);
    rows.replaceChildren(...found.slice(0, shown).map((i) => {
      const query = { step: groups.step[i], group: groups.group[i], split: groups.split[i] === "train" ? null : "eval", env: envs.length > 1 || groups.split[i] === "eval" ? groups.env[i] : null };
      return h("tr", {},
        h("td", { className: "num" }, String(groups.step[i])),
        h("td", {}, h("a", { href: link(run, "rollouts", query), "aria-label": `group ${groups.group[i]} of step ${groups.step[i]}` }, String(groups.group[i])), groups.split[i] === "eval" ? h("span", { className: "badge" }, "eval") : null),
        h("td", { className: "path" }, ...visible(clip(groups.task[i], 80))),
        envs.length > 1 ? h("td", {}, ...visible(groups.env[i])) : null,
        h("td", { className: "num" }, number(groups.reward[i])),
        h("td", {}, strip(groups.rewards[i], groups.rollouts[i], low, high)),
        h("td", { className: "num" }, String(groups.rollouts[i])),
        h("td", { className: "num" }, number(groups.tokens[i])),
        h("td", { className: "num" }, number(groups.seconds[i])),
        h("td", { className: "small" }, groups.truncated[i] ? h("span", { className: "badge warn" }, `${groups.truncated[i]} cut off`) : null, groups.errored[i] ? h("span", { className: "badge bad" }, `${groups.errored[i]} errored`) : null, groups.dropped[i] ? h("span", { className: "badge" }, ...visible(groups.dropped[i])) : null));
    }));
    more.hidden = found.length <= shown;
    count.textContent = `${found.length.toLocaleString("en")} of ${groups.step.length.toLocaleString("en")} groups${groups.unreadable ? `; ${groups.unreadable} lines cannot be read` : ""}${groups.left_out ? `; ${groups.left_out} older ones are not listed` : ""}`;
    head.replaceChildren(h("tr", {}, header("step", "num"), header("group"), header("task"), envs.length > 1 ? h("th", { scope: "col" }, "environment") : null, header("reward", "num"), h("th", { scope: "col" }, "each"), header("rollouts", "num"), header("tokens", "num"), header("seconds", "num"), h("th", { scope: "col" }, "noticed")));
  }

  function header(name, className) {
    const sort = route.query.sort || "", up = sort === name, down = sort === `-${name}`;
    return h("th", { scope: "col", className, "aria-sort": up ? "ascending" : down ? "descending" : null },
      h("button", { className: "sort", onclick: () => { change({ sort: up ? `-${name}` : down ? null : name }); filter(); head.querySelector(`[data-by=${name}]`).focus(); }, "data-by": name }, `${name}${up ? " ↑" : down ? " ↓" : ""}`));
  }

  const head = h("thead");
  main.replaceChildren(h("section", { className: "page" }, h("h1", { className: "hidden" }, `${run}: rollouts`),
    h("div", { className: "bar" }, task, split, env, outcome, least, most, said, count), h("div", { className: "scroll" }, h("table", { className: "groups" }, head, rows)), more));
  if (route.query.said) look(); else filter();
  return {
    step: look,
    async update(changed) {
      if (!changed.has("rollouts") && !changed.has("evals")) return;
      await currentStatus(run);
      groups = await groupsOf(run);
      filter();
    },
  };
}

function lowest(groups) { return groups.low.reduce((low, v) => (v !== null && v < low ? v : low), 0); }
function highest(groups) { return groups.high.reduce((high, v) => (v !== null && v > high ? v : high), 0); }

function strip(rewards, count, low, high) {
  const values = rewards ? rewards.split(",").map(Number).sort((a, b) => a - b) : [];
  while (values.length < count) values.push(null);
  return h("span", { className: "strip", title: values.map(number).join("  ") }, values.slice(0, 64).map((value) => h("i", { className: shade(value, low, high) })));
}

function place(run, told) {
  const q = route.query, first = told[0] || {};
  const one = (word, query) => h("a", { href: link(run, "rollouts", query) }, word);
  const of = { step: q.step, group: q.group, split: q.split, env: q.env };
  return h("nav", { className: "crumbs", "aria-label": "Where this is" }, one("all groups", {}), " / ", one(q.split === "eval" ? `evaluation of version ${q.step}` : `step ${q.step}`, { step: q.step, split: q.split }), " / ",
    q.number === undefined ? h("b", {}, `group ${q.group}`) : one(`group ${q.group}`, of), q.number === undefined ? null : [" / ", h("b", {}, `rollout ${q.number}`)],
    first.task ? h("span", { className: "muted" }, " · ", ...visible(clip(first.task, 80)), " · ", ...visible(first.env || "")) : null,
    first.dropped ? h("span", { className: "badge warn" }, "dropped: ", ...visible(first.dropped)) : null);
}

function asked() {
  const { step, group, number: rollout, split, env } = route.query;
  return { step, group, number: rollout, split, env };
}

async function groupPage(main, run) {
  const { number: ignored, ...of } = asked();
  const told = await about(run, "group", of);
  const order = [...told.rollouts].sort((a, b) => (b.reward === null ? -1e9 : b.reward) - (a.reward === null ? -1e9 : a.reward));
  const rewards = order.map((one) => one.reward).filter((v) => v !== null), low = Math.min(0, ...rewards), high = Math.max(...rewards, low);
  const counts = new Map();
  for (const one of order) counts.set(one.text, (counts.get(one.text) || 0) + 1);
  main.replaceChildren(h("section", { className: "page" }, place(run, told.rollouts), h("h1", { className: "hidden" }, `Group ${of.group}`),
    told.prompt.length ? h("details", { className: "prompt", open: told.prompt.reduce((sum, one) => sum + one.text.length, 0) < 1500 }, h("summary", {}, "what was asked"), told.prompt.map(message)) : null,
    h("div", { className: "answers" }, order.map((one) => h("article", { className: "answer" },
      h("header", {}, h("i", { className: `dot ${shade(one.reward, low, high)}` }), h("a", { href: link(run, "rollouts", { ...of, number: one.number }) }, `rollout ${one.number}`), h("span", { className: "grow" }), h("b", { className: "num" }, one.reward === null ? "no reward" : number(one.reward))),
      h("p", { className: "muted small" }, one.advantage === null ? "not trained on" : `advantage ${signed(one.advantage)}`, ` · ${one.completion_tokens} tokens · ${duration(one.seconds)} · ended by `, ...visible(one.stop_reason || "?"),
        one.truncated ? h("span", { className: "badge warn" }, "cut off") : null, one.retried ? h("span", { className: "badge" }, "played again") : null, counts.get(one.text) > 1 ? h("span", { className: "badge" }, `same words × ${counts.get(one.text)}`) : null),
      components(one), one.error ? h("p", { className: "note bad" }, ...visible(one.error)) : null,
      h("div", { className: "said", tabIndex: 0, role: "region", "aria-label": `what rollout ${one.number} said` }, one.text_unavailable ? h("p", { className: "muted" }, "Its text was deleted, or cannot be read.") : one.messages.map(message)))))));
  return { up: () => { location.hash = link(run, "rollouts", { step: of.step, split: of.split }); } };
}

function signed(value) {
  return value === null || value === undefined ? "–" : `${value > 0 ? "+" : value < 0 ? "−" : ""}${number(Math.abs(value))}`;
}

function components(one) {
  const names = Object.keys(one.components), why = one.explanations || {};
  if (!names.length && !Object.keys(why).length) return null;
  return h("dl", { className: "components" }, [...new Set([...names, ...Object.keys(why)])].map((name) => [
    h("dt", {}, ...visible(name)), h("dd", {}, h("b", {}, name in one.components ? number(one.components[name]) : ""), " ", why[name] ? h("span", { className: "muted" }, ...visible(String(why[name]))) : null)]));
}

function message(one) {
  return h("div", { className: `message ${["assistant", "tool", "system", "user"].includes(one.role) ? one.role : ""}` }, h("span", { className: "role" }, ...visible(one.role)),
    one.reasoning ? h("details", { className: "reasoning" }, h("summary", {}, `thought, ${one.reasoning.length.toLocaleString("en")} characters`), h("div", { className: "text" }, ...visible(one.reasoning))) : null,
    one.text ? h("div", { className: "text" }, ...visible(one.text)) : null,
    one.calls.map((call) => h("div", { className: "call" }, h("b", {}, ...visible(call.name || "unreadable call")), h("code", {}, ...visible(call.arguments)))));
}

async function conversationPage(main, run) {
  const of = asked();
  const [one, groups] = await Promise.all([about(run, "rollout", of), groupsOf(run).catch(() => null)]);
  const asTokens = route.query.view === "tokens";
  const body = h("div", { className: "conversation" });
  const view = (name, word) => h("a", { href: here({ ...route.query, view: name || null, overlay: null }), "aria-current": (route.query.view || "") === name ? "true" : null }, word);
  main.replaceChildren(h("section", { className: "page" }, place(run, [one]), h("h1", { className: "hidden" }, `Rollout ${of.number} of group ${of.group}`),
    h("div", { className: "two" }, h("aside", {}, facts(one), components(one), elsewhere(run, one, groups)), h("div", {}, h("div", { className: "switch", role: "group", "aria-label": "Shown as" }, view("", "conversation"), of.split === "eval" ? null : view("tokens", "tokens")), body))));
  if (asTokens) await tokensView(body, run, of);
  else body.replaceChildren(...(one.text_unavailable ? [h("p", { className: "note" }, "Its text was deleted, or cannot be read; the figures stay.")] : one.messages.map(message)),
    ...(one.messages_left_out ? [h("p", { className: "note" }, `${one.messages_left_out} more messages are left out.`)] : []), ...(one.error ? [h("p", { className: "note bad" }, ...visible(one.error))] : []), ...(one.trace.length ? [h("pre", { className: "note" }, ...visible(one.trace.join("\n")))] : []));
  return { up: () => { location.hash = link(run, "rollouts", { ...of, number: null }); } };
}

function facts(one) {
  const rows = [["reward", one.reward === null ? "none" : number(one.reward)], one.shaped_reward !== null && one.shaped_reward !== one.reward ? ["trained with", number(one.shaped_reward)] : null,
    ["advantage", one.advantage === null ? "not trained on" : signed(one.advantage)], ["ended by", `${one.stop_reason || "–"}${one.truncated ? ", cut off" : ""}${one.cut ? ", ended early" : ""}`], ["tokens", String(one.completion_tokens)],
    ["turns", String(one.turns)], ["took", duration(one.seconds)], one.sampling_seconds === null ? null : ["of it sampling", duration(one.sampling_seconds)], ["policy version", one.oldest_version === null ? "–" : String(one.oldest_version)],
    one.turn_rewards && one.turn_rewards.length ? ["of turns", one.turn_rewards.map(number).join(", ")] : null, one.advantages && one.advantages.length > 1 ? ["advantages", one.advantages.map(signed).join(", ")] : null];
  return h("dl", { className: "facts" }, rows.filter(Boolean).map(([name, value]) => [h("dt", {}, name), h("dd", {}, ...visible(value))]));
}

// The same task in other steps, with the way to see both answers.
function elsewhere(run, one, groups) {
  if (!groups) return null;
  const at = [];
  for (let i = 0; i < groups.step.length && at.length < 400; i += 1) {
    if (groups.task[i] === one.task && groups.env[i] === one.env && groups.split[i] === (route.query.split || "train") && String(groups.step[i]) !== route.query.step) at.push(i);
  }
  if (!at.length) return null;
  return h("details", { className: "elsewhere" }, h("summary", {}, `the same task in ${at.length} other ${at.length === 1 ? "group" : "groups"}`),
    h("ul", {}, at.slice(0, 40).map((i) => h("li", {}, h("a", { href: link(run, "rollouts", { step: groups.step[i], group: groups.group[i], split: route.query.split, env: route.query.env }) }, `step ${groups.step[i]}`), ` ${number(groups.reward[i])} `,
      h("a", { href: link(run, "rollouts", { ...asked(), other: `${groups.step[i]}.${groups.group[i]}` }) }, "differences")))));
}
