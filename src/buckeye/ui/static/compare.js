"use strict";
// Runs side by side, and two answers to the same task word by word.

async function comparePage(main) {
  const names = (route.query.runs || "").split(",").filter(Boolean);
  const told = await Promise.all(names.map(async (name) => ({ name, overview: await about(name, "overview"), settings: new Map(flat((await about(name, "settings")).settings)) })));
  const steps = [...new Set(told.flatMap((one) => one.overview.steps))].sort((a, b) => a - b);
  const over = (one, values) => { const at = new Map(one.overview.steps.map((step, i) => [step, values[i]])); return steps.map((step) => (at.has(step) ? at.get(step) : null)); };
  const charts = [{ title: "Reward of the batch", unit: "", series: told.map((one) => ({ label: one.name, values: over(one, one.overview.reward) })) }];
  const evaluated = [...new Set(told.flatMap((one) => one.overview.evaluations.map((e) => e.step)))].sort((a, b) => a - b);
  if (evaluated.length) charts.push({ title: "Evaluation", unit: "mean reward", steps: evaluated, series: told.map((one) => ({ label: one.name, values: evaluated.map((step) => { const e = one.overview.evaluations.find((x) => x.step === step); return e ? e.mean_reward : null; }) })) });
  const titles = [...new Set(told.flatMap((one) => one.overview.sections.flatMap((s) => s.charts.map((c) => c.title))))];
  for (const title of titles) {
    const series = told.flatMap((one) => { const found = one.overview.sections.flatMap((s) => s.charts).find((c) => c.title === title); return found ? [{ label: one.name, values: over(one, found.series[0].values), what: found.series[0].label, unit: found.unit }] : []; });
    charts.push({ title, unit: [series[0].what.toLowerCase() === title.toLowerCase() ? "" : series[0].what, series[0].unit].filter(Boolean).join(", "), series });
  }
  const keys = [...new Set(told.flatMap((one) => [...one.settings.keys()]))].sort(), differing = keys.filter((key) => new Set(told.map((one) => one.settings.get(key))).size > 1).sort((a, b) => a.length - b.length)
    .filter((key, at, all) => !all.slice(0, at).some((before) => before.split(".").pop() === key.split(".").pop() && told.every((one) => one.settings.get(before) === one.settings.get(key)))).sort();
  main.replaceChildren(h("section", { className: "page" }, h("h1", {}, "Side by side"),
    h("p", { className: "muted" }, told.map((one, at) => [at ? " · " : "", h("a", { href: link(one.name, "overview", {}) }, ...visible(one.name))]), told.length === 2 ? [" · which is better, with its interval: ", h("code", {}, `buckeye rl compare ${told.map((one) => one.name).join(" ")}`)] : null),
    h("h2", {}, `${differing.length} settings differ`), h("div", { className: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "setting"), told.map((one) => h("th", { scope: "col" }, ...visible(one.name))))), h("tbody", {}, differing.map((key) => h("tr", {}, h("td", {}, h("code", {}, ...visible(key))), told.map((one) => h("td", { className: "path" }, h("code", {}, ...visible(one.settings.get(key) ?? "–"))))))))),
    h("h2", {}, "Figures"), h("div", { className: "charts" }, charts.map((one) => chart({ steps, ...one })))));
  document.title = "Side by side · Buckeye";
}

// Two answers to the same task: what only the first has, and what only the second.
async function diffPage(main, run) {
  const of = asked(), [step, group] = route.query.other.split(".");
  const [one, told] = await Promise.all([about(run, "rollout", of), about(run, "group", { step, group, split: of.split, env: of.env })]);
  const said = (messages) => messages.filter((m) => m.role !== "system" && m.role !== "user").map((m) => [m.reasoning, m.text, ...m.calls.map((c) => `${c.name} ${c.arguments}`)].filter(Boolean).join("\n")).join("\n\n");
  const pick = h("select", { "aria-label": "The other answer", onchange: () => { change({ with: pick.value }); draw(); } }, told.rollouts.map((r) => h("option", { value: String(r.number), selected: String(r.number) === (route.query.with || of.number) }, `rollout ${r.number}, reward ${number(r.reward)}`)));
  const body = h("div", { className: "diff text" });
  function draw() {
    const other = told.rollouts.find((r) => String(r.number) === pick.value) || told.rollouts[0];
    const early = Number(step) < Number(of.step), parts = early ? differences(said(other.messages), said(one.messages)) : differences(said(one.messages), said(other.messages));
    body.replaceChildren(...parts.map(([kind, text]) => (kind === "both" ? h("span", {}, ...visible(text)) : h(kind === "first" ? "del" : "ins", {}, ...visible(text)))));
  }
  main.replaceChildren(h("section", { className: "page" }, place(run, [one]), h("h1", {}, `Step ${Math.min(of.step, step)} and step ${Math.max(of.step, step)}`), h("div", { className: "bar" }, `rollout ${of.number} of step ${of.step}, reward ${number(one.reward)}, and in step ${step} `, pick, h("span", { className: "muted" }, h("del", {}, "only the earlier"), " ", h("ins", {}, "only the later"))), body));
  draw();
  return { up: () => { location.hash = link(run, "rollouts", of); } };
}

const MOST_WORDS = 1500;

function differences(first, second) {
  const a = first.split(/(\s+)/).slice(0, MOST_WORDS), b = second.split(/(\s+)/).slice(0, MOST_WORDS), wide = b.length + 1;
  const same = new Uint16Array((a.length + 1) * wide);
  for (let i = a.length - 1; i >= 0; i -= 1) for (let j = b.length - 1; j >= 0; j -= 1) same[i * wide + j] = a[i] === b[j] ? same[(i + 1) * wide + j + 1] + 1 : Math.max(same[(i + 1) * wide + j], same[i * wide + j + 1]);
  const found = [], put = (kind, text) => { const last = found[found.length - 1]; if (last && last[0] === kind) last[1] += text; else found.push([kind, text]); };
  let i = 0, j = 0;
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) { put("both", a[i]); i += 1; j += 1; } else if (j >= b.length || (i < a.length && same[(i + 1) * wide + j] >= same[i * wide + j + 1])) { put("first", a[i]); i += 1; } else { put("second", b[j]); j += 1; }
  }
  return found;
}
