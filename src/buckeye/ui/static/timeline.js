"use strict";
// What went on when: lanes of spans on a canvas, which the wheel and the keys zoom.

const SPAN = { wait: "idle", wait_for_rollouts: "idle", wait_for_weights: "idle2", compute: "series1", publish: "series4", checkpoint: "series6", evaluate: "series2", evaluation: "series2", write_batch: "series4", other: "bar", version: "series3", rollout: "series3", dropped: "series2", failed: "series5" };
const MARK = { restart: "bad", failure: "bad", stall: "bad", disk_full: "bad", checkpoint: "series6", finish: "good" };
const LANE = 26;

async function timelinePage(main, run) {
  let told = await about(run, "timeline", { step: route.query.step });
  const canvas = h("canvas", { tabIndex: 0, role: "img" }), info = h("output", { className: "tokeninfo" });
  const list = h("details", {}, h("summary", {}, "what is seen, as a list")), keys = h("div", { className: "legend" });
  const hint = "Wheel or + and − zoom, arrows or dragging move; a click chooses a step, whose rollouts are then seen one by one.";
  let from = 0, to = 1, boxes = [];

  function bounds() {
    const times = told.lanes.flatMap((lane) => lane.spans.flatMap((s) => [s[0], s[1]])).concat(told.marks.map((m) => m.time)).filter((t) => typeof t === "number" && t < 1e11);
    return times.length ? [Math.min(...reduced(times, Math.min)), Math.max(...reduced(times, Math.max))] : [0, 1];
  }

  function frame() {
    const [first, last] = bounds(), step = route.query.step === undefined ? null : Number(route.query.step);
    [from, to] = [Number(route.query.from) || first, Number(route.query.to) || last];
    if (step !== null && !route.query.from) {
      const of = told.lanes.filter((lane) => !lane.name.startsWith("engine")).flatMap((lane) => lane.spans.filter((s) => s[3] === step));
      if (of.length) { [from, to] = [Math.min(...of.map((s) => s[0])), Math.max(...of.map((s) => s[1]))]; const room = (to - from) * 0.15; from -= room; to += room; }
    }
    if (to <= from) to = from + 1;
  }

  function draw() {
    const wide = canvas.parentElement.clientWidth, gutter = Math.min(130, wide / 4), lanes = rowsOf(told.lanes), tall = lanes.length * LANE + 42, scale = devicePixelRatio || 1;
    canvas.width = wide * scale;
    canvas.height = tall * scale;
    canvas.style.height = `${tall}px`;
    const ctx = canvas.getContext("2d");
    ctx.scale(scale, scale);
    ctx.font = `11px ${colour("font")}`;
    ctx.textBaseline = "middle";
    const x = (t) => gutter + ((t - from) / (to - from)) * (wide - gutter);
    boxes = [];
    ticks(from, to).forEach((t) => { ctx.fillStyle = colour("grid"); ctx.fillRect(x(t), 18, 1, tall - 18); ctx.fillStyle = colour("muted"); ctx.fillText(ago(t - bounds()[0]), Math.min(x(t) + 3, wide - 40), 9); });
    lanes.forEach((lane, row) => {
      const y = 22 + row * LANE;
      ctx.fillStyle = colour("muted");
      if (lane.name) ctx.fillText(clip(lane.name, Math.floor(gutter / 6.4)), 0, y + LANE / 2);
      let edge = -1;
      for (const span of lane.spans) {
        const a = Math.max(gutter, x(span[0])), b = Math.min(wide, x(span[1]));
        if (b < gutter || a > wide || (b <= edge && b - a < 0.4)) continue;
        edge = Math.max(edge, b);
        ctx.fillStyle = colour(SPAN[span[2]] || "bar");
        ctx.globalAlpha = route.query.step !== undefined && String(span[3]) !== route.query.step && span[2] !== "version" ? 0.45 : 1;
        ctx.fillRect(a, y + 3, Math.max(b - a - 0.5, 0.7), LANE - 7);
        ctx.globalAlpha = 1;
        boxes.push([a, b, y, span, lane.name]);
        const word = span[4].startsWith("version") ? span[4].replace("version ", "v") : "";
        if (word && b - a > 22) { ctx.fillStyle = colour("paper"); ctx.fillText(word, a + 4, y + LANE / 2); }
      }
    });
    const y = 22 + lanes.length * LANE;
    ctx.fillStyle = colour("muted");
    ctx.fillText("events", 0, y + 8);
    for (const mark of told.marks) {
      if (typeof mark.time !== "number" || mark.time < from || mark.time > to) continue;
      ctx.fillStyle = colour(MARK[mark.event] || "muted");
      ctx.fillRect(x(mark.time) - 1, MARK[mark.event] === "bad" ? 18 : y + 2, 2, MARK[mark.event] === "bad" ? y : 12);
      boxes.push([x(mark.time) - 3, x(mark.time) + 3, y, [mark.time, mark.time, mark.event, mark.step, [mark.process, mark.cause].filter(Boolean).join(" ")], "event"]);
    }
    const kinds = [...new Set(told.lanes.flatMap((lane) => lane.spans.map((s) => s[2])))];
    keys.replaceChildren(...kinds.map((kind) => h("span", { className: "key" }, h("i", { className: `block k-${SPAN[kind] || "bar"}` }), kind.replaceAll("_", " "))));
    canvas.setAttribute("aria-label", `Timeline of ${told.lanes.length} lanes over ${duration(to - from)}. ${hint} The list below says the same.`);
    if (list.open) fillList();
  }

  function fillList() {
    const seen = told.lanes.flatMap((lane) => lane.spans.filter((s) => s[1] >= from && s[0] <= to).map((s) => [lane.name, ...s])).slice(0, 300);
    list.replaceChildren(list.firstChild, h("table", {}, h("tbody", {}, seen.map(([lane, a, b, kind, step, more]) => h("tr", {}, h("td", {}, ...visible(lane)), h("td", {}, kind.replaceAll("_", " ")), h("td", {}, `step ${step}`), h("td", {}, clock(a)), h("td", { className: "num" }, duration(b - a)), h("td", {}, ...visible(more)))))));
  }

  function zoom(factor, at) {
    const middle = at === undefined ? (from + to) / 2 : at;
    [from, to] = [middle - (middle - from) * factor, middle + (to - middle) * factor];
    moved();
  }
  function shift(share) { const by = (to - from) * share; from += by; to += by; moved(); }
  function moved() { change({ from: from.toFixed(2), to: to.toFixed(2) }); draw(); }
  const timeAt = (event) => { const box = canvas.getBoundingClientRect(), gutter = Math.min(130, box.width / 4); return from + ((event.clientX - box.left - gutter) / (box.width - gutter)) * (to - from); };
  const under = (event) => { const box = canvas.getBoundingClientRect(), px = event.clientX - box.left, py = event.clientY - box.top; return boxes.findLast(([a, b, y]) => px >= a - 1 && px <= b + 1 && py >= y && py <= y + LANE); };

  let held = null, went = 0;
  canvas.addEventListener("wheel", (event) => { event.preventDefault(); zoom(event.deltaY > 0 ? 1.25 : 0.8, timeAt(event)); }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => { held = event.clientX; went = 0; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointermove", (event) => {
    if (held !== null) { const by = held - event.clientX; went += Math.abs(by); held = event.clientX; if (went > 4) shift(by / canvas.clientWidth); return; }
    const found = under(event);
    info.replaceChildren(...(found ? [h("b", {}, `${found[4] || ""} ${found[3][2].replaceAll("_", " ")}`), ` · ${found[3][3] === null || found[3][3] === undefined ? "" : `step ${found[3][3]} · `}${duration(found[3][1] - found[3][0])} from ${clock(found[3][0])} `, ...visible(found[3][4])] : [hint]));
  });
  canvas.addEventListener("pointerup", (event) => { held = null; if (went <= 4) { const found = under(event); if (found && found[3][3] !== null && found[3][3] !== undefined) go({ step: found[3][3], from: null, to: null }); } });
  canvas.addEventListener("keydown", (event) => {
    const act = { "+": () => zoom(0.7), "=": () => zoom(0.7), "-": () => zoom(1.4), ArrowLeft: () => shift(-0.2), ArrowRight: () => shift(0.2), 0: () => { change({ from: null, to: null }); frame(); draw(); } }[event.key];
    if (act) { event.preventDefault(); event.stopPropagation(); act(); }
  });
  list.addEventListener("toggle", () => list.open && fillList());
  info.textContent = hint;
  const holder = h("div", { className: "timeline" }, canvas);
  main.replaceChildren(h("section", { className: "page" }, h("h1", { className: "hidden" }, `${run}: timeline`),
    h("div", { className: "bar" }, h("button", { onclick: () => { change({ from: null, to: null, step: null }); go({}); show(); } }, "whole run"), keys), holder, info, h("p", { className: "muted small" }, "How long each part of a step took is recorded; within a step the parts are drawn in their usual order."), list));
  const size = new ResizeObserver(() => draw());
  frame();
  size.observe(holder);
  drawn.add(Object.assign(holder, { redraw: draw, mark: () => {}, close: () => { size.disconnect(); drawn.delete(holder); } }));
  return {
    async update(changed) { if (changed.has("metrics") || changed.has("events")) { told = await about(run, "timeline", { step: route.query.step }); if (!route.query.from) frame(); draw(); } currentStatus(run); },
    async step() { change({ from: null, to: null }); told = await about(run, "timeline", { step: route.query.step }); frame(); draw(); },
  };
}

function reduced(values, best) {
  const found = [];
  for (let i = 0; i < values.length; i += 10000) found.push(best(...values.slice(i, i + 10000)));
  return found;
}

// Rollouts overlap, so a lane of them becomes several rows.
function rowsOf(lanes) {
  return lanes.flatMap((lane) => {
    if (!lane.name.startsWith("rollouts")) return [lane];
    const rows = [];
    for (const span of lane.spans) {
      const row = rows.find((one) => one.spans[one.spans.length - 1][1] <= span[0] + 1e-3);
      if (row) row.spans.push(span); else if (rows.length < 40) rows.push({ name: rows.length ? "" : lane.name, spans: [span] });
    }
    return rows;
  });
}

function ticks(from, to) {
  const raw = (to - from) / 8, unit = [0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 43200, 86400, 604800].find((u) => u >= raw) || raw, found = [];
  for (let t = Math.ceil(from / unit) * unit; t < to && found.length < 40; t += unit) found.push(t);
  return found;
}

function ago(seconds) {
  const s = Math.round(seconds * 10) / 10;
  if (Math.abs(s) < 120) return `${digits(s)} s`;
  const two = (value) => String(Math.floor(value)).padStart(2, "0"), minutes = Math.floor(s / 60);
  return minutes < 120 ? `${minutes}:${two(s % 60)}${s % 1 ? (s % 1).toFixed(1).slice(1) : ""}` : `${Math.floor(minutes / 60)} h ${two(minutes % 60)}`;
}
