"use strict";
// A rollout as the tokens that were sampled and trained on, colored by what is recorded of each.

const OVERLAYS = {
  advantage: ["advantage", (s, i) => s.advantage[i], "signed"],
  difference: ["trainer − sampler", (s, i) => (s.trainer_logprob[i] === null || s.sampler_logprob[i] === null ? null : s.trainer_logprob[i] - s.sampler_logprob[i]), "signed"],
  surprise: ["surprise", (s, i) => (s.sampler_logprob[i] === null ? null : -s.sampler_logprob[i]), "rising"],
  mask: ["in the loss", (s, i) => (s.trained[i] ? 1 : s.reason[i] === "context" ? null : 0), "yes"],
  version: ["version", (s, i) => s.version[i], "kind"],
};
const MOST_DRAWN = 6000;

async function tokensView(place, run, of) {
  let told;
  try { told = await about(run, "tokens", of); } catch (error) {
    place.replaceChildren(h("p", { className: "note" }, ...visible(error.message)));
    return;
  }
  const info = h("output", { className: "tokeninfo" }, "Point at a token to see its record; the arrow keys select the next one.");
  const chosen = OVERLAYS[route.query.overlay] ? route.query.overlay : "advantage";
  const pick = h("select", { "aria-label": "Coloured by", onchange: () => { change({ overlay: pick.value }); draw(); } }, Object.entries(OVERLAYS).map(([name, [word]]) => h("option", { value: name, selected: name === chosen }, word)));
  const scale = h("span", { className: "muted small" }), body = h("div");

  function draw() {
    const [, value, kind] = OVERLAYS[pick.value];
    const all = told.samples.flatMap((s) => s.ids.map((_, i) => value(s, i))).filter((v) => v !== null);
    const most = Math.max(1e-9, ...all.map(Math.abs)), kinds = [...new Set(all)].sort((a, b) => a - b);
    const tint = (v) => {
      if (v === null) return "context";
      if (kind === "signed") return v === 0 ? "d0" : `${v > 0 ? "p" : "n"}${Math.max(1, Math.ceil((Math.abs(v) / most) * 5))}`;
      if (kind === "rising") return `h${Math.min(5, Math.floor((v / most) * 5.999))}`;
      return kind === "yes" ? (v ? "p3" : "n2") : `v${kinds.indexOf(v) % 6}`;
    };
    scale.textContent = !all.length ? "nothing of it is recorded" : kinds.length === 1 && kind !== "yes" ? `all are ${number(kinds[0])}` : kind === "signed" ? `from −${number(most)} to +${number(most)}` : kind === "rising" ? `from 0 to ${number(most)} nats` : kind === "yes" ? "blue is trained on, red was sampled and left out, grey is context" : `versions ${kinds.join(", ")}`;
    body.replaceChildren(...told.samples.map((s) => h("div", { className: "tokens", role: "listbox", "aria-label": `Tokens of sample ${s.segment}` }, s.ids.slice(0, MOST_DRAWN).map((id, i) => {
      const text = s.texts ? s.texts[i] : `${id} `;
      return h("span", { className: `token ${tint(value(s, i))}`, role: "option", "aria-selected": "false", tabIndex: i ? -1 : 0, "aria-label": text.trim() ? null : `token ${id}`, "data-at": String(i) }, ...shownToken(text));
    }), s.ids.length > MOST_DRAWN ? h("p", { className: "note" }, `${s.ids.length - MOST_DRAWN} more tokens are not drawn.`) : null)));
    [...body.children].forEach((listed, n) => {
      const tell = (event) => { const token = event.target.closest("[data-at]"); if (token) say(told.samples[n], Number(token.dataset.at)); };
      listed.addEventListener("mouseover", tell);
      listed.addEventListener("focusin", tell);
      listed.addEventListener("click", (event) => { const token = event.target.closest("[data-at]"); if (token) move(listed, token); });
      listed.addEventListener("keydown", (event) => {
        const token = event.target.closest("[data-at]"), by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -1e9, End: 1e9 }[event.key];
        if (!token || !by) return;
        event.preventDefault();
        const tokens = listed.querySelectorAll("[data-at]");
        move(listed, tokens[Math.max(0, Math.min(tokens.length - 1, Number(token.dataset.at) + by))]);
      });
    });
  }

  function move(listed, token) {
    for (const before of listed.querySelectorAll("[aria-selected=true]")) { before.setAttribute("aria-selected", "false"); before.tabIndex = -1; }
    token.setAttribute("aria-selected", "true");
    token.tabIndex = 0;
    token.focus();
  }

  function say(s, i) {
    const gap = OVERLAYS.difference[1](s, i);
    info.replaceChildren(h("b", {}, ...visible(JSON.stringify(s.texts ? s.texts[i] : ""))), ` id ${s.ids[i]} · place ${i}`, s.reason[i] === "context" ? " · context: not sampled, or masked" : [
      ` · turn ${s.turn[i]} · version ${s.version[i]} · advantage ${signed(s.advantage[i])} · log-prob ${number(s.sampler_logprob[i])} sampled, ${number(s.trainer_logprob[i])} trained${gap === null ? "" : `, ${signed(gap)}`}`,
      s.trained[i] ? "" : ` · not in the loss: ${s.reason[i].replace("_", " ")}`]);
  }

  place.replaceChildren(h("div", { className: "bar" }, h("label", {}, "colored by ", pick), scale), told.missing ? h("p", { className: "note" }, ...visible(told.missing)) : "", body, info, told.left_out ? h("p", { className: "note" }, `${told.left_out} tokens are left out.`) : "");
  draw();
}

function shownToken(text) {
  return text.split(/(\n)/).flatMap((part) => (part === "\n" ? [h("span", { className: "newline" }, "↵"), "\n"] : part ? visible(part) : []));
}
