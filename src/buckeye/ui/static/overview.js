"use strict";
// What is wrong first, then the figures that matter, then all the others behind a search.

function findingsBlock(run, told) {
  if (told.missing) return h("p", { className: "note" }, ...visible(told.missing));
  const chain = h("ol", { className: "chain", "aria-label": "links of learning" }, told.links.map((one) =>
    h("li", { className: one.state, title: (one.state === "broken" ? one.findings : one.measured).join("; ") }, one.name, " ", h("span", { className: "small" }, one.state))));
  const said = told.cause ? [] : [h("p", { className: "note" }, ...visible(`No broken link: ${told.links.slice(-1).flatMap((one) => one.measured).join("; ")}`))];
  return [chain, ...said, ...told.findings.map((one) => h("article", { className: `finding ${one.confidence}` },
    h("h2", {}, h("span", { className: "badge" }, one.confidence), " ", ...visible(one.seen)),
    h("dl", {},
      h("dt", {}, "because"), h("dd", {}, ...prose(one.cause)),
      h("dt", {}, "do"), h("dd", {}, ...prose(one.advice)),
      one.evidence.length ? [h("dt", {}, "seen"), h("dd", {}, one.evidence.map((seen) => evidence(run, seen.fact, seen.command)))]
        : [h("dt", {}, "see"), h("dd", {}, evidence(run, "", one.command))]),
    h("p", { className: "muted small" }, `${one.name} · ${one.since === one.until ? `step ${one.since}` : `steps ${one.since} to ${one.until}`}`)))];
}

// A fact with the place where the page shows it, if there is one, else the command.
function evidence(run, fact, command) {
  const step = /--step (\d+)/.exec(command), group = /--group (\d+)/.exec(command), log = / logs /.test(command), happened = / --events/.test(command), metrics = /^grep -E '"(\(.+\))"' /.exec(command);
  let href = null;
  if (/ rollouts /.test(command) && step) href = link(run, "rollouts", { step: step[1], group: group && group[1] });
  else if (log || happened) href = link(run, "logs", { show: happened ? "events" : null });
  else if (metrics) href = link(run, "overview", { find: `${metrics[1]}$` });
  const place = happened ? "its events" : log ? "its logs" : step ? `the rollouts of step ${step[1]}${group ? `, group ${group[1]}` : ""}` : "";
  const shown = fact || place;
  return h("div", { className: "evidence" }, href ? h("a", { href }, ...visible(shown)) : fact ? h("span", {}, ...visible(fact)) : null,
    " ", h("code", {}, ...visible(command)), copyButton(command));
}

function tiles(status, overview) {
  const one = (name, value, more) => h("div", { className: "tile" }, h("span", {}, name), h("b", {}, value), more ? h("small", {}, more) : null);
  const evals = overview.evaluations, last = evals[evals.length - 1];
  const rose = status.reward_change;
  const end = status.ended || (status.going_on ? status.now : status.seen), took = end - status.started;
  return h("div", { className: "tiles" },
    one("step", status.max_steps ? `${status.step} / ${status.max_steps}` : String(status.step), status.attempt > 1 ? `attempt ${status.attempt}` : null),
    one("reward", number(status.reward), rose === null || rose === undefined ? null : `${rose >= 0 ? "+" : "−"}${number(Math.abs(rose))} in 10 steps`),
    last ? one("evaluation", number(last.mean_reward), `after ${last.step} steps, ${last.env}`) : null,
    status.going_on ? one("time left", duration(status.seconds_left), `${duration(took)} so far`) : one("took", end ? duration(took) : "–", null),
    status.tokens_per_second ? one("tokens/s", number(status.tokens_per_second), null) : null,
    status.restarts ? one("restarts", String(status.restarts), null) : null);
}

function waitsBlock(status) {
  const lines = (status.waits || []).map((line) => h("li", {}, ...visible(line)));
  return lines.length ? h("ul", { className: "waits" }, lines) : null;
}

function rewardCharts(run, overview, intervals, choose) {
  const at = new Map((intervals ? intervals.steps : []).map((step, i) => [step, i]));
  const edge = (name) => overview.steps.map((step) => (at.has(step) ? intervals[name][at.get(step)] : null));
  const found = [];
  if (overview.reward.some((v) => v !== null)) {
    found.push({ title: "Reward of the batch", unit: "mean over groups, 95 % interval", steps: overview.steps, height: 200,
      series: [{ label: "reward", values: overview.reward, band: intervals ? [edge("low"), edge("high")] : null }] });
  }
  const evals = overview.evaluations, steps = [...new Set(evals.map((one) => one.step))].sort((a, b) => a - b);
  if (steps.length) {
    const envs = [...new Set(evals.map((one) => one.env))], of = (env, pick) => steps.map((step) => {
      const one = evals.find((e) => e.step === step && e.env === env);
      return one ? pick(one) : null;
    });
    const series = [];
    for (const env of envs) {
      const more = envs.length > 1 ? `${env}: ` : "";
      series.push({ label: `${more}mean reward`, values: of(env, (e) => e.mean_reward) });
      series.push({ label: `${more}passed`, values: of(env, (e) => e.exact), band: [of(env, (e) => (e.ci95 ? e.ci95[0] : null)), of(env, (e) => (e.ci95 ? e.ci95[1] : null))] });
    }
    found.push({ title: "Evaluation", unit: "95 % interval of what passed", steps, height: 200, series });
  }
  return found;
}

async function overviewPage(main, run) {
  const choose = chooseStep;
  const [status, first] = await Promise.all([currentStatus(run), about(run, "overview")]);
  let overview = first, intervals = null;
  const head = h("div"), findings = h("div", { className: "findings", role: "status" }, h("p", { className: "note" }, "Looking for what is wrong …"));
  const charts = h("div");
  const found = h("div", { className: "charts" });
  const find = h("input", { type: "search", id: "find", placeholder: "regular expression, as grad|lr", "aria-label": "Search all metrics", value: route.query.find || "",
    oninput: later(150, () => { change({ find: find.value || null }); search(); }) });
  const count = h("span", { className: "muted" });
  let places = [];

  function sections() {
    return [{ title: "Reward", className: "wide", charts: rewardCharts(run, overview, intervals, choose) },
      ...overview.sections.map((section) => ({ title: section.title, className: "", charts: section.charts.map((one) => ({ ...one, steps: overview.steps })) }))];
  }

  function draw() {
    const wanted = sections(), titles = wanted.flatMap((section) => section.charts.map((one) => one.title)).join("\n");
    if (draw.titles === titles) {
      wanted.flatMap((section) => section.charts).forEach((one, at) => places[at].set(one));
      return;
    }
    draw.titles = titles;
    places.forEach((one) => one.close());
    places = [];
    charts.replaceChildren(...wanted.filter((section) => section.charts.length).map((section) => h("section", {}, h("h2", {}, section.title),
      h("div", { className: `charts ${section.className}` }, section.charts.map((one) => { const place = chart(one, choose); places.push(place); return place; })))));
    if (!places.length) charts.replaceChildren(h("p", { className: "note" }, "No step is recorded yet."));
  }

  function tell(now) {
    head.replaceChildren(tiles(now, overview), waitsBlock(now) || "", now.reason && now.state !== "finished" ? h("p", { className: "note bad" }, ...visible(clip(now.reason, 600))) : "");
  }

  async function look() {
    try { findings.replaceChildren(...[findingsBlock(run, await about(run, "findings"))].flat()); } catch (error) { findings.replaceChildren(h("p", { className: "note bad" }, error.message)); }
  }

  async function measure() {
    try { intervals = await about(run, "intervals"); draw(); } catch (error) { toast(error.message); }
  }

  async function search() {
    for (const one of [...found.children]) one.close();
    found.replaceChildren();
    count.textContent = `${overview.names.length} names`;
    if (!find.value) return;
    try {
      const told = await about(run, "metrics", { pattern: find.value });
      count.textContent = told.found > told.series.length ? `${told.series.length} of ${told.found} are shown` : `${told.found} found`;
      found.replaceChildren(...told.series.map((one) => chart({ title: one.name, unit: "", steps: told.steps, series: [{ label: "", values: one.values }] }, choose)));
    } catch (error) { count.textContent = error.message; }
  }

  main.replaceChildren(h("section", { className: "page" }, h("h1", { className: "hidden" }, `${run}: overview`), head, findings, charts,
    h("section", {}, h("div", { className: "bar" }, h("h2", {}, "All metrics"), find, count), found)));
  tell(status);
  draw();
  measure();
  Promise.all([search(), look()]).then(() => route.query.find && main.isConnected && find.scrollIntoView());
  return {
    async update(changed) {
      const now = await currentStatus(run);
      if (changed.has("metrics") || changed.has("evals")) {
        overview = await about(run, "overview");
        draw();
        look();
      }
      if (changed.has("rollouts")) measure();
      tell(now);
    },
    step() { for (const one of drawn) one.mark(); },
  };
}
