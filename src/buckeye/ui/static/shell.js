"use strict";
// The frame: where the page is (all of it in the address), the bar of steps, the keyboard, and what is new.

const TABS = {
  overview: ["Overview", overviewPage], rollouts: ["Rollouts", rolloutsPage], timeline: ["Timeline", timelinePage], logs: ["Logs and events", logsPage], settings: ["Settings", settingsPage],
};
const KEYS = [["[ and ]", "the step before, and after"], ["/", "search"], ["1 – 5", "the tabs"], ["Esc", "one up"], ["?", "this list"]];

let route = { run: null, tab: "runs", query: {} };
let page = null, live = null, statusNow = null;
const top_ = document.getElementById("top"), main = document.getElementById("main");

function parse() {
  const [path, words] = location.hash.replace(/^#/, "").split("?");
  const parts = path.split("/").filter(Boolean).map(decodeURIComponent);
  const query = Object.fromEntries(new URLSearchParams(words || ""));
  if (parts[0] === "run" && parts[1]) return { run: parts[1], tab: TABS[parts[2]] ? parts[2] : "overview", query };
  return { run: null, tab: parts[0] || "runs", query };
}

function link(run, tab, query) {
  return address(`#/run/${encodeURIComponent(run)}/${tab}`, query);
}

function here(query) {
  return route.run ? link(route.run, route.tab, query) : address(`#/${route.tab === "runs" ? "" : route.tab}`, query);
}

// Choose a step everywhere; what was chosen in another one is left.
function chooseStep(step) { go({ step, group: null, number: null, view: null, other: null }); }

// Go to the same page with something else chosen; null takes it away.
function go(changes) { location.hash = here({ ...route.query, ...changes }); }

// The same, without a step in the history and without drawing anew.
function change(changes) {
  const query = Object.fromEntries(Object.entries({ ...route.query, ...changes }).filter(([, value]) => value !== null && value !== ""));
  route = { ...route, query };
  history.replaceState(null, "", here(query));
}

async function currentStatus(run) {
  statusNow = await about(run, "status");
  showTop();
  return statusNow;
}

// The bar of steps: the reward of each, and which one is chosen.
const stepBar = { place: null, steps: [], rewards: [] };

function makeStepBar() {
  const canvas = h("canvas", { height: 30 });
  const told = h("span", { className: "told" });
  const bar = h("div", { className: "steps", tabIndex: 0, role: "slider", "aria-label": "Step" }, canvas);
  const pick = (event) => {
    const box = canvas.getBoundingClientRect(), at = Math.floor(((event.clientX - box.left) / box.width) * stepBar.steps.length);
    return Math.max(0, Math.min(stepBar.steps.length - 1, at));
  };
  bar.addEventListener("click", (event) => { if (stepBar.steps.length) chooseStep(stepBar.steps[pick(event)]); });
  bar.addEventListener("mousemove", (event) => { if (stepBar.steps.length) tellStep(pick(event)); });
  bar.addEventListener("mouseleave", () => tellStep(chosen()));
  bar.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageDown: -10, PageUp: 10, Home: -1e9, End: 1e9 }[event.key];
    if (by) { event.preventDefault(); moveStep(by); }
  });
  new ResizeObserver(() => paintSteps()).observe(bar);
  stepBar.place = h("div", { className: "stepline" }, bar, told, h("button", { className: "quiet all", onclick: () => chooseStep(null), title: "choose no step" }, "all steps"));
  Object.assign(stepBar, { bar, canvas, told });
}

function chosen() {
  return route.query.step === undefined ? -1 : stepBar.steps.indexOf(Number(route.query.step));
}

function tellStep(at) {
  const known = at >= 0 && at < stepBar.steps.length;
  stepBar.told.textContent = known ? `step ${stepBar.steps[at]} · reward ${number(stepBar.rewards[at])}` : stepBar.steps.length === 1 ? "1 step" : `${stepBar.steps.length} steps`;
}

function moveStep(by) {
  if (!stepBar.steps.length) return;
  const at = chosen(), from = at < 0 ? (by > 0 ? -1 : stepBar.steps.length) : at;
  chooseStep(stepBar.steps[Math.max(0, Math.min(stepBar.steps.length - 1, from + by))]);
}

function paintSteps() {
  const { canvas, steps, rewards, bar } = stepBar;
  if (!bar || !bar.clientWidth) return;
  const scale = devicePixelRatio || 1, wide = bar.clientWidth, tall = 30, at = chosen();
  canvas.width = wide * scale;
  canvas.height = tall * scale;
  const ctx = canvas.getContext("2d");
  ctx.scale(scale, scale);
  const known = rewards.filter((v) => v !== null), low = Math.min(0, ...known), high = Math.max(...known, low + 1e-9);
  const each = wide / Math.max(1, steps.length), gap = each > 4 ? 1 : 0;
  const plain = colour("bar"), accent = colour("accent");
  steps.forEach((step, i) => {
    const share = rewards[i] === null ? 0 : (rewards[i] - low) / (high - low), height = Math.max(2, share * (tall - 4));
    ctx.fillStyle = i === at ? accent : plain;
    ctx.fillRect(i * each, tall - height, Math.max(each - gap, i === at ? 2 : 0.5), height);
  });
  if (at >= 0) { ctx.fillStyle = accent; ctx.fillRect(at * each, 0, Math.max(each - gap, 2), 2); }
  bar.setAttribute("aria-valuemin", String(steps[0] || 0));
  bar.setAttribute("aria-valuemax", String(steps[steps.length - 1] || 0));
  bar.setAttribute("aria-valuenow", String(at < 0 ? steps[steps.length - 1] || 0 : steps[at]));
  bar.setAttribute("aria-valuetext", at < 0 ? "no step is chosen" : `step ${steps[at]}, reward ${number(rewards[at])}`);
  stepBar.place.querySelector(".all").hidden = at < 0;
  tellStep(at);
}

async function readSteps(run) {
  const told = await about(run, "overview");
  const last = told.reward.findLastIndex((reward) => reward !== null), count = last < 0 ? told.steps.length : last + 1;
  stepBar.steps = told.steps.slice(0, count); // after the last batch the weights are only evaluated
  stepBar.rewards = told.reward.slice(0, count);
  paintSteps();
}

function showTop() {
  const run = route.run;
  const held = EMBEDDED ? h("span", { className: "badge", title: `the texts of ${EMBEDDED.export.groups} of ${EMBEDDED.export.of} groups are in this file` }, `exported ${moment(EMBEDDED.export.exported)}`) : null;
  const theme = h("button", { className: "quiet", title: "light or dark", "aria-label": "Light or dark", onclick: turnTheme }, "◐");
  const help = h("button", { className: "quiet", title: "keys", "aria-label": "Keys", onclick: showKeys }, "?");
  const name = run ? [h("span", { className: "sep" }, "/"), h("span", { className: "runname" }, ...visible(run)), statusNow && statusNow.name === run ? badge(statusNow.state) : null] : null;
  const kept = { step: route.query.step };
  const tabs = run ? h("nav", { "aria-label": "Run" }, Object.entries(TABS).map(([tab, [title]]) => h("a", { href: link(run, tab, kept), "aria-current": tab === route.tab ? "page" : null }, title))) : null;
  top_.replaceChildren(h("div", { className: "topline" }, h("a", { href: "#/", className: "mark" }, "Buckeye"), name, h("span", { className: "grow" }), held, theme, help), tabs || "", run ? stepBar.place : "");
  if (run) paintSteps();
}

function turnTheme() {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches, root = document.documentElement;
  root.dataset.theme = (root.dataset.theme || (dark ? "dark" : "light")) === "dark" ? "light" : "dark";
  if (!EMBEDDED) localStorage.setItem("theme", root.dataset.theme);
  repaint();
}

function repaint() {
  for (const one of drawn) one.redraw();
  paintSteps();
}

function showKeys() {
  const dialog = h("dialog", { onclose: () => dialog.remove(), onclick: (event) => event.target === dialog && dialog.close(), "aria-label": "Keys" }, h("h2", {}, "Keys"),
    h("dl", {}, KEYS.map(([keys, what]) => [h("dt", {}, h("kbd", {}, keys)), h("dd", {}, what)])), h("form", { method: "dialog" }, h("button", { autofocus: true }, "Close")));
  document.body.append(dialog);
  dialog.showModal();
}

async function show() {
  const before = route;
  route = parse();
  const same = page && before.run === route.run && before.tab === route.tab;
  if (same && page.step && page.keeps(before.query, route.query)) {
    showTop();
    page.step();
    return;
  }
  closeCharts();
  page = null;
  if (before.run !== route.run || !live) { statusNow = null; stepBar.steps = []; listen(); }
  showTop();
  main.setAttribute("aria-busy", "true");
  const mine = (show.turn = (show.turn || 0) + 1);
  const place = h("div");
  try {
    if (route.run && !stepBar.steps.length) readSteps(route.run).catch(() => {});
    if (route.run && !statusNow) currentStatus(route.run).catch(() => {});
    const made = route.run ? await TABS[route.tab][1](place, route.run) : await (SINGLE[route.tab] || runsPage)(place);
    if (mine !== show.turn) return;
    page = { keeps: (a, b) => same_but_step(a, b), ...made };
    main.replaceChildren(place);
  } catch (error) {
    if (mine === show.turn) main.replaceChildren(trouble(error));
  }
  main.removeAttribute("aria-busy");
  if (route.run) document.title = `${route.run} · ${TABS[route.tab][0]} · Buckeye`;
}

const SINGLE = { runs: runsPage, compare: comparePage };

function same_but_step(a, b) {
  const without = ({ step, ...rest }) => JSON.stringify(rest);
  return without(a) === without(b);
}

function trouble(error) {
  if (!(error instanceof Refused)) return h("section", { className: "page" }, h("p", { className: "note bad", role: "alert" }, ...visible(String(error.message))));
  const given = h("input", { type: "password", autocomplete: "off", id: "key" });
  return h("section", { className: "page" }, h("form", { className: "keyform", onsubmit: (event) => { event.preventDefault(); localStorage.setItem("key", given.value); takeKey(); live = null; show(); } },
    h("label", { htmlFor: "key" }, "The key that `buckeye ui` has printed"), given, h("button", {}, "Open")));
}

// What is new, as server-sent events.
async function listen() {
  if (EMBEDDED) return;
  if (live) live.abort();
  const mine = (live = new AbortController()), run = route.run;
  let seen = null, wait = 1000;
  while (!mine.signal.aborted) {
    try {
      const answer = await ask("live", { run }, { stream: true, signal: mine.signal });
      document.body.classList.remove("lost");
      wait = 1000;
      for await (const [event, data] of events(answer.body)) {
        if (mine.signal.aborted) return;
        if (event !== "changed") continue;
        const changed = new Set(Object.keys(data || {}).filter((name) => seen && data[name] !== seen[name]));
        seen = data;
        if (changed.size) await refresh(run, changed);
      }
    } catch (error) {
      if (mine.signal.aborted || error instanceof Refused) return;
    }
    document.body.classList.add("lost");
    await new Promise((done) => setTimeout(done, wait));
    wait = Math.min(wait * 2, 15000);
  }
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const whole = text.split("\n\n");
    text = whole.pop();
    for (const part of whole) {
      const event = /^event: (.*)$/m.exec(part), data = /^data: (.*)$/m.exec(part);
      if (event && data) yield [event[1], JSON.parse(data[1])];
    }
  }
}

async function refresh(run, changed) {
  if (run !== route.run) return;
  try {
    if (changed.has("metrics")) await readSteps(run);
    if (page && page.update) await page.update(changed);
    else await currentStatus(run);
  } catch (error) { toast(error.message); }
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
  const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName);
  if (event.key === "Escape" && typing) { event.target.blur(); return; }
  if (typing || document.querySelector("dialog[open]")) return;
  const tab = route.run && Object.keys(TABS)[Number(event.key) - 1];
  if (event.key === "[" || event.key === "]") moveStep(event.key === "[" ? -1 : 1);
  else if (event.key === "/") { const find = main.querySelector("input[type=search]"); if (find) { event.preventDefault(); find.focus(); } }
  else if (event.key === "?") showKeys();
  else if (tab) location.hash = link(route.run, tab, { step: route.query.step });
  else if (event.key === "Escape" && page && page.up) page.up();
});

takeKey();
if (!EMBEDDED && localStorage.getItem("theme")) document.documentElement.dataset.theme = localStorage.getItem("theme");
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
makeStepBar();
addEventListener("hashchange", show);
show();
