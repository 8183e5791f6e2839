"use strict";
// Elements, numbers, texts, and questions to the server. Text is only ever set as text.

function h(tag, given, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(given || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element && !["list", "role"].includes(name) && !name.includes("-")) element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(9).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

function svg(tag, given, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(given)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// Numbers, three digits of them.
function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e15 || (size > 0 && size < 1e-4)) return value.toExponential(1).replace("e+", "e");
  for (const [unit, sign] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (size >= unit) return `${digits(value / (unit === 1e4 ? 1e3 : unit))} ${sign}`;
  }
  return digits(value);
}

function digits(value) {
  return String(Number(value.toPrecision(Math.abs(value) >= 1000 ? 4 : 3)));
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 100) return `${digits(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 100) return `${minutes} min`;
  if (minutes < 48 * 60) return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  return `${Math.round(minutes / 1440)} days`;
}

function moment(seconds) {
  if (!seconds) return "–";
  const at = new Date(seconds * 1000), two = (n) => String(n).padStart(2, "0");
  return `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ${two(at.getHours())}:${two(at.getMinutes())}`;
}

// A text with code between backquotes.
function prose(text) {
  return text.split("`").flatMap((part, index) => (index % 2 ? h("code", {}, ...visible(part)) : visible(part)));
}

// What cannot be seen in a text, and could reorder or hide it, as \u{...}.
const UNSEEN = /[\p{C}\u2028\u2029]/u;

function visible(text) {
  if (!UNSEEN.test(text.replace(/[\n\t]/g, ""))) return [text];
  const parts = [];
  let plain = "";
  for (const sign of text) {
    if (sign === "\n" || sign === "\t" || !UNSEEN.test(sign)) { plain += sign; continue; }
    if (plain) parts.push(plain);
    plain = "";
    const code = sign.codePointAt(0).toString(16);
    parts.push(h("span", { className: "unseen", title: "a character that cannot be seen" },
      code.length <= 2 ? `\\x${code.padStart(2, "0")}` : `\\u${code.padStart(4, "0")}`));
  }
  return plain ? [...parts, plain] : parts;
}

function clip(text, most) {
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}

// Questions. An exported page holds the answers itself.
const EMBEDDED = document.getElementById("answers") ? JSON.parse(document.getElementById("answers").textContent) : null;
let key = null;

function takeKey() {
  if (EMBEDDED) return;
  const given = /^#key=(.+)$/.exec(location.hash);
  if (given) {
    localStorage.setItem("key", given[1]);
    history.replaceState(null, "", location.pathname + "#/");
  }
  key = localStorage.getItem("key");
}

class Refused extends Error {}

function address(path, given) {
  const chosen = Object.entries(given || {}).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const words = new URLSearchParams(chosen.sort(([a], [b]) => (a < b ? -1 : 1))).toString();
  return words ? `${path}?${words}` : path;
}

async function ask(path, given, options) {
  const at = address(path, given);
  if (EMBEDDED) return embedded(at, path, given);
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  if (options && options.body) headers["Content-Type"] = "application/json";
  const answer = await fetch(`api/${at}`, { ...options, headers });
  if (answer.ok) return options && options.stream ? answer : answer.json();
  let why = answer.statusText;
  try { why = (await answer.json()).error; } catch { /* it was no JSON */ }
  throw new (answer.status === 401 ? Refused : Error)(why || `The server answered ${answer.status}.`);
}

function embedded(at, path, given) {
  const { split, env, ...rest } = given || {};
  const exact = /\/(group|rollout|tokens)$/.test(path) && split !== "eval" ? address(path, rest) : at;
  if (exact in EMBEDDED) return EMBEDDED[exact];
  if (/\/(timeline|logs)$/.test(path)) return EMBEDDED[path];
  if (path.endsWith("/metrics")) {
    const all = EMBEDDED[path], looked = new RegExp(given.pattern, "i");
    const series = all.series.filter((one) => looked.test(one.name));
    return { ...all, found: series.length, series: series.slice(0, 80) };
  }
  throw new Error("This file does not hold that; the run itself does.");
}

function about(run, question, given) {
  return ask(`runs/${encodeURIComponent(run)}/${question}`, given);
}

function toast(text) {
  const place = document.getElementById("toast");
  place.textContent = text;
  clearTimeout(toast.timer);
  toast.timer = setTimeout(() => { place.textContent = ""; }, 5000);
}

function copyButton(text) {
  return h("button", {
    className: "quiet", title: "copy", "aria-label": `Copy: ${text}`,
    onclick: async () => { try { await navigator.clipboard.writeText(text); toast("Copied"); } catch { toast("The browser lets nothing be copied here"); } },
  }, "copy");
}

function later(wait, work) {
  let timer = 0;
  return (...given) => { clearTimeout(timer); timer = setTimeout(() => work(...given), wait); };
}
