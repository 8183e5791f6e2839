"use strict";
// Charts: uPlot with a legend of its own that says the values at the cursor, and a line at the chosen step.

const drawn = new Set();

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

// Short labels, unless these are equal for different ticks.
function tickLabels(ticks) {
  const labels = ticks.map(number);
  return new Set(labels).size === labels.length ? labels : ticks.map(String);
}

function axisWidth(u, labels) {
  return Math.max(46, 10 + 7 * Math.max(...(labels ?? [""]).map((label) => label.length)));
}

// `given`: title, unit, steps, series [{label, values, band: [low, high]}]. `place.set(given)` changes it.
function chart(given, choose) {
  const legend = h("div", { className: "legend" });
  const plotted = h("div", { className: "plot", role: "img" });
  const place = h("figure", { className: "chart" },
    h("figcaption", {}, h("b", {}, given.title), given.unit ? h("span", { className: "unit" }, given.unit) : null),
    legend, plotted);
  let plot = null, shown = given, values = [];

  function columns() {
    const found = [shown.steps];
    for (const one of shown.series) {
      found.push(one.values);
      if (one.band) found.push(...one.band);
    }
    return found;
  }

  function draw() {
    if (plot) plot.destroy();
    legend.replaceChildren();
    values = [];
    const series = [{}], bands = [];
    shown.series.forEach((one, at) => {
      const stroke = colour(`series${(at % 8) + 1}`);
      const value = h("span", { className: "value" });
      values.push({ place: value, column: series.length });
      legend.append(h("span", { className: "key" }, h("i", { className: `swatch s${(at % 8) + 1}` }), one.label, " ", value));
      const few = one.values.filter((v) => v !== null).length < 40;
      series.push({ stroke, width: 1.5, spanGaps: true, points: { show: few, size: 4, fill: stroke } });
      if (one.band) {
        bands.push({ series: [series.length + 1, series.length], fill: `${stroke}22` });
        const edge = { stroke: "transparent", width: 0, points: { show: false }, spanGaps: true };
        series.push({ ...edge }, { ...edge });
      }
    });
    const axis = { stroke: colour("muted"), font: `11px ${colour("font") || "sans-serif"}`, grid: { stroke: colour("grid"), width: 1 }, ticks: { show: false } };
    plot = new uPlot({
      width: Math.max(120, plotted.clientWidth || 300), height: shown.height || 132, padding: [6, 14, 0, 0],
      legend: { show: false }, scales: { x: { time: false }, y: { range: reach } }, series, bands,
      axes: [{ ...axis, size: 22, space: 60, values: (u, ticks) => ticks.map((t) => (Number.isInteger(t) ? String(t) : "")) },
        { ...axis, size: axisWidth, space: 28, values: (u, ticks) => tickLabels(ticks) }],
      cursor: { sync: { key: "steps", setSeries: false }, drag: { x: true, y: false }, points: { size: 5 }, focus: { prox: -1 } },
      hooks: { setCursor: [told], draw: [mark] },
    }, columns(), plotted);
    let pressed = 0;
    plot.over.addEventListener("mousedown", (event) => { pressed = event.clientX; });
    plot.over.addEventListener("click", (event) => {
      if (choose && Math.abs(event.clientX - pressed) < 4 && plot.cursor.idx !== null) choose(shown.steps[plot.cursor.idx]);
    });
    told(plot);
  }

  function reach(u, low, high) {
    if (low === null || (low === 0 && high === 0)) return [0, 1];
    const room = (high - low || Math.abs(high) || 1) * 0.06;
    const from = low >= 0 && low < (high - low) * 0.6 ? 0 : low - room;
    return [from, high + room];
  }

  function told(u) {
    const at = u.cursor.idx, data = u.data;
    for (const { place: value, column } of values) {
      const looked = at !== null && at !== undefined && u.cursor.left >= 0, picked = shown.steps.indexOf(Number(route.query.step));
      let row = looked ? at : route.query.step !== undefined && picked >= 0 ? picked : data[0].length - 1;
      while (row > 0 && data[column][row] === null) row -= 1;
      value.textContent = number(data[column][row]);
    }
    plotted.setAttribute("aria-label", `${shown.title} over ${data[0].length} steps: ${shown.series.map((one, i) => `${one.label} ${values[i].place.textContent}`).join(", ")}`);
  }

  function mark(u) {
    const step = Number(route.query.step);
    if (route.query.step === undefined || Number.isNaN(step) || step < u.scales.x.min || step > u.scales.x.max) return;
    const x = Math.round(u.valToPos(step, "x", true));
    u.ctx.save();
    u.ctx.strokeStyle = colour("accent");
    u.ctx.lineWidth = devicePixelRatio;
    u.ctx.beginPath();
    u.ctx.moveTo(x, u.bbox.top);
    u.ctx.lineTo(x, u.bbox.top + u.bbox.height);
    u.ctx.stroke();
    u.ctx.restore();
  }

  const size = new ResizeObserver(() => {
    if (!plot) { if (plotted.clientWidth) draw(); } else if (Math.abs(plot.width - plotted.clientWidth) > 1) plot.setSize({ width: plotted.clientWidth, height: plot.height });
  });
  size.observe(plotted);
  place.set = (changed) => {
    const same = plot && changed.series.length === shown.series.length && changed.series.every((one, i) => one.label === shown.series[i].label && !one.band === !shown.series[i].band);
    shown = changed;
    if (same) { plot.setData(columns()); told(plot); } else if (plot) draw();
  };
  place.redraw = () => plot && draw();
  place.mark = () => { if (plot) { plot.redraw(false); told(plot); } };
  place.close = () => { size.disconnect(); if (plot) plot.destroy(); drawn.delete(place); };
  drawn.add(place);
  return place;
}

function closeCharts() {
  for (const one of [...drawn]) one.close();
}

// A small curve for a list.
function spark(values) {
  const known = values.filter((v) => v !== null);
  if (known.length < 2) return h("span", { className: "spark" });
  const low = Math.min(...known), high = Math.max(...known), wide = 96, tall = 22;
  const at = (v, i) => `${((i / (known.length - 1)) * (wide - 2) + 1).toFixed(1)},${(tall - 2 - ((v - low) / (high - low || 1)) * (tall - 4)).toFixed(1)}`;
  return svg("svg", { class: "spark", viewBox: `0 0 ${wide} ${tall}`, "aria-hidden": "true" },
    svg("polyline", { points: known.map(at).join(" ") }));
}
