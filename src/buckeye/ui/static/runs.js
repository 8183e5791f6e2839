"use strict";
// All runs.

function badge(state) {
  const kind = { running: "good", starting: "good", finished: "", stopped: "", stopping: "warn", paused: "warn", failed: "bad", dead: "bad" }[state];
  return h("span", { className: `badge ${kind || ""}` }, state === "running" ? h("i", { className: "pulse" }) : null, state);
}

function progress(one) {
  if (!one.max_steps) return `${one.step}`;
  const bar = h("progress", { max: one.max_steps, value: one.step, "aria-label": `step ${one.step} of ${one.max_steps}` });
  return [bar, ` ${one.step}/${one.max_steps}`];
}

async function runsPage(main) {
  const { runs, only } = await ask("runs");
  if (only) { location.replace(link(only, "overview")); return; }
  const chosen_ = new Set(), side = h("button", { disabled: true, onclick: () => { location.hash = address("#/compare", { runs: [...chosen_].join(",") }); } }, "Side by side");
  const find = h("input", { type: "search", placeholder: "name or folder", "aria-label": "Filter runs", oninput: () => fill() });
  const rows = h("tbody");
  function fill() {
    const word = find.value.toLowerCase();
    const found = runs.filter((one) => `${one.name} ${one.directory}`.toLowerCase().includes(word));
    rows.replaceChildren(...found.map((one) => h("tr", {},
      h("td", {}, h("input", { type: "checkbox", "aria-label": `Compare ${one.name}`, checked: chosen_.has(one.name), onchange: (event) => { chosen_[event.target.checked ? "add" : "delete"](one.name); side.disabled = chosen_.size < 2; } })),
      h("td", {}, h("a", { href: `#/run/${encodeURIComponent(one.name)}/overview` }, ...visible(one.name)), h("div", { className: "muted small path" }, ...visible(one.directory))),
      h("td", {}, badge(one.state)),
      h("td", { className: "nowrap" }, progress(one)),
      h("td", { className: "num" }, number(one.reward)),
      h("td", {}, spark(one.curve)),
      h("td", { className: "nowrap muted" }, moment(one.started)))));
  }
  fill();
  main.replaceChildren(h("section", { className: "page" },
    h("div", { className: "bar" }, h("h1", {}, "Runs"), h("span", { className: "muted" }, String(runs.length)), find, runs.length > 1 ? side : null),
    h("div", { className: "scroll" }, h("table", { className: "runs" },
      h("thead", {}, h("tr", {}, ["choose", "run", "state", "steps", "reward", "", "started"].map((word, at) => h("th", { scope: "col", className: at === 4 ? "num" : "" }, word !== "choose" && word ? word : h("span", { className: "hidden" }, word || "reward so far"))))),
      rows))));
  document.title = "Buckeye: runs";
}
