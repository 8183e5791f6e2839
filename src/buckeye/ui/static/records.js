"use strict";
// Logs and events of a run, and its settings.

async function logsPage(main, run) {
  const q = route.query;
  const asEvents = q.show === "events";
  const tab = (name, word) => h("a", { href: here({ ...q, show: name || null, process: null, text: null }), "aria-current": (q.show || "") === name ? "true" : null }, word);
  const bar = h("div", { className: "bar" }, h("div", { className: "switch", role: "group", "aria-label": "Shown" }, tab("", "logs"), tab("events", "events")));
  const body = h("div");
  main.replaceChildren(h("section", { className: "page" }, h("h1", { className: "hidden" }, `${run}: logs`), bar, body));
  const draw = asEvents ? () => drawEvents(body, bar, run) : () => drawLogs(body, bar, run);
  await draw();
  return { update: (changed) => (changed.has("events") || changed.has("metrics") ? draw() : currentStatus(run)) };
}

async function drawLogs(body, bar, run) {
  const { attempt, process, text } = route.query;
  const told = await about(run, "logs", { attempt, process, text });
  if (told.missing) { body.replaceChildren(h("p", { className: "note" }, ...visible(told.missing))); return; }
  if (!bar.querySelector("select")) {
    const choice = (name, label, values, word) => h("select", { "aria-label": label, onchange: (event) => { change({ [name]: event.target.value }); drawLogs(body, bar, run); } }, [["", word], ...values.map((v) => [v, name === "attempt" ? `attempt ${v}` : v])].map(([value, shown]) => h("option", { value, selected: String(value) === (route.query[name] || "") }, shown)));
    const find = h("input", { type: "search", placeholder: "text", "aria-label": "Text in a line", value: text || "", oninput: later(200, () => { change({ text: find.value }); drawLogs(body, bar, run); }) });
    bar.append(choice("process", "Process", told.processes, "all processes"), choice("attempt", "Attempt", told.attempts, "newest attempt"), find, h("span", { className: "muted", role: "status" }));
  }
  bar.querySelector("[role=status]").textContent = told.found > told.lines.length ? `the last ${told.lines.length} of ${told.found} lines` : `${told.found} lines`;
  const atEnd = innerHeight + scrollY > document.body.scrollHeight - 40;
  body.replaceChildren(h("div", { className: "log", role: "log", tabIndex: 0, "aria-label": "Lines" }, told.lines.map((one) => h("div", { className: / ERROR /.test(one.text) ? "bad" : / WARNING /.test(one.text) ? "warn" : "" }, h("span", { className: "who" }, ...visible(one.process)), h("span", { title: moment(one.time) }, ...visible(one.text))))));
  if (atEnd && route.query.follow) scrollTo(0, document.body.scrollHeight);
}

async function drawEvents(body, bar, run) {
  const told = await about(run, "events");
  body.replaceChildren(told.left_out ? h("p", { className: "note" }, `${told.left_out} earlier ones are left out.`) : "", h("div", { className: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, ["time", "attempt", "event", "details"].map((word) => h("th", { scope: "col" }, word)))),
    h("tbody", {}, [...told.events].reverse().slice(0, 3000).map(({ time, attempt, event, ...details }) => h("tr", {}, h("td", { className: "nowrap muted" }, clock(time)), h("td", { className: "num" }, String(attempt ?? "")), h("td", {}, h("b", {}, ...visible(String(event)))),
      h("td", { className: "path" }, Object.entries(details).filter(([, value]) => value !== null).map(([name, value]) => [h("span", { className: "muted" }, ...visible(name), " "), ...visible(typeof value === "string" ? value : JSON.stringify(value)), "  "]))))))));
}

function clock(seconds) {
  return typeof seconds === "number" && seconds < 1e11 ? `${moment(seconds)}:${String(Math.floor(seconds) % 60).padStart(2, "0")}` : "–";
}

// Settings as names and values, as `trainer.optim.lr`.
function flat(value, name = "") {
  if (value === null || typeof value !== "object" || (Array.isArray(value) && value.every((one) => one === null || typeof one !== "object"))) return [[name, JSON.stringify(value)]];
  return Object.entries(value).flatMap(([key, inner]) => flat(inner, name ? `${name}.${key}` : key));
}

async function settingsPage(main, run) {
  const told = await about(run, "settings"), all = flat(told.settings);
  const rows = h("tbody"), find = h("input", { type: "search", placeholder: "name or value", "aria-label": "Filter settings", value: route.query.find || "", oninput: () => { change({ find: find.value }); fill(); } });
  function fill() {
    const word = find.value.toLowerCase();
    rows.replaceChildren(...all.filter((row) => row.join(" ").toLowerCase().includes(word)).slice(0, 2000).map(([name, value]) => h("tr", {}, h("td", {}, h("code", {}, ...visible(name))), h("td", { className: "path" }, h("code", {}, ...visible(value))))));
  }
  fill();
  const status = await currentStatus(run);
  const changes = told.changes.map((one) => h("p", { className: "path" }, `from step ${one.step}: `, h("code", {}, ...visible(`${one.key}: ${JSON.stringify(one.old)} → ${JSON.stringify(one.new)}`))));
  main.replaceChildren(h("section", { className: "page" }, h("h1", { className: "hidden" }, `${run}: settings`), h("p", { className: "muted path" }, ...visible(status.directory), status.host ? ` on ${status.host}` : ""), ...changes,
    h("div", { className: "bar" }, find, h("span", { className: "muted" }, all.length > 1 ? `${all.length} settings` : "no settings are recorded")), h("div", { className: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "setting"), h("th", { scope: "col" }, "value"))), rows))));
}
