// The walk through the lowering: one layer, one pass, the graph before it and after it.
// Reads the JSON in #graphs; the tables of the page are there without this.
"use strict";
(() => {
  const graphs = JSON.parse(document.getElementById("graphs").textContent);
  if (!graphs.kinds || !graphs.kinds.length) return;
  const ROW = 26; // pixels: --row of report.css
  const $ = (id) => document.getElementById(id);

  function element(tag, properties, ...children) {
    const made = document.createElement(tag);
    for (const [key, value] of Object.entries(properties || {})) {
      if (key in made) made[key] = value;
      else made.setAttribute(key, value);
    }
    made.append(...children);
    return made;
  }

  const kinds = graphs.kinds.map((kind) => ({
    ...kind, made: null,
    get all() { return (this.made = this.made || stepsOf(graphs, this)); },
  }));
  const shown = { kind: 0, step: 0, unfold: false, picked: null };
  const titleOf = (kind) =>
    !kind.layers ? "Outside the layers" : `Layer${kind.count > 1 ? "s" : ""} ${kind.layers.replaceAll("-", "–")}`;

  function tab(text, small, selected, choose) {
    const made = element("button", {
      type: "button", role: "tab", tabIndex: selected ? 0 : -1, "aria-selected": String(selected),
      "aria-controls": "columns", onclick: choose,
    });
    made.append(...text, element("small", {}, small));
    return made;
  }

  function showKinds() {
    $("kinds").replaceChildren(...kinds.map((kind, at) => {
      const small = kind.count > 1 ? `${kind.count} alike` : "";
      return tab([titleOf(kind)], small, at === shown.kind, () => go(at, shown.step, "kinds"));
    }));
  }

  function showSteps() {
    const steps = kinds[shown.kind].all;
    const most = Math.max(...steps.map((step) => Math.max(step.before.length, step.after.length)), 1);
    $("steps").replaceChildren(...steps.map((step, at) => {
      const bar = element("span", { className: "bar" });
      bar.style.height = `${Math.max(2, Math.round((44 * step.after.length) / most))}px`;
      const name = element("span", { className: "name" });
      step.name.split(/(?<=_)/).forEach((part) => name.append(part, element("wbr")));
      const column = element("span", { className: "column", title: `${step.after.length} nodes` },
        element("span", { className: "count" }, String(step.after.length)), bar);
      const small = step.whole ? "" : step.minus || step.plus ? `−${step.minus} +${step.plus}` : "=";
      const made = tab([column, name], small, at === shown.step, () => go(shown.kind, at, "steps"));
      if (!step.whole && !step.minus && !step.plus && !step.changed) made.classList.add("idle");
      return made;
    }));
    const on = $("steps").children[shown.step], strip = $("steps");
    strip.scrollLeft = on.offsetLeft - (strip.clientWidth - on.clientWidth) / 2;
  }

  const MARKS = { gone: "−", came: "+", changed: "~", kept: " " };
  const WORDS = { gone: "gone", came: "new", changed: "changed", kept: "" };

  function rowButton(item, side, at) {
    const made = element("button", { type: "button", className: `row ${item.state}${item.right.startsWith(":") ? " source" : ""}`, tabIndex: -1 });
    made.dataset.side = side;
    made.dataset.at = at;
    const mark = element("span", { className: "mark", "aria-hidden": "true" }, MARKS[item.state]);
    const main = element("span", { className: "main" });
    const prefix = item.main.startsWith("aten.") ? "aten." : "";
    if (prefix) main.append(element("span", { className: "prefix" }, prefix));
    main.append(item.main.slice(prefix.length));
    if (WORDS[item.state]) main.append(element("span", { className: "hide" }, `, ${WORDS[item.state]}`));
    made.append(mark, main, element("span", { className: "side" }, item.side),
      element("span", { className: "right" }, item.right));
    made.title = item.facts.filter(([, v]) => v).map(([k, v]) => `${k}: ${v}`).join("\n");
    return made;
  }

  function showColumns() {
    const step = kinds[shown.kind].all[shown.step];
    const rows = shown.unfold ? step.rows : folded(step);
    const y = { before: new Map(), after: new Map() };
    const lists = { before: [], after: [] };
    rows.forEach((row, line) => {
      if (typeof row === "number") {
        const text = `${row} unchanged`;
        lists.before.push(element("li", {}, element("button", {
          type: "button", className: "fold", tabIndex: -1, onclick: unfold }, `⋯ ${text}`)));
        lists.after.push(element("li", { className: "folded", "aria-hidden": "true" }, "⋯"));
        return;
      }
      ["before", "after"].forEach((side, which) => {
        const at = row[which];
        if (at < 0) return lists[side].push(element("li", { className: "gap", "aria-hidden": "true" }));
        y[side].set(at, line * ROW + ROW / 2);
        lists[side].push(element("li", {}, rowButton(step[side][at], side, at)));
      });
    });
    $("before").replaceChildren(...lists.before);
    $("after").replaceChildren(...lists.after);
    $("before-title").textContent = `${step.titles[0]} (${step.before.length})`;
    $("after-title").textContent = `${step.titles[1]} (${step.after.length})`;
    const first = [".row.gone, .row.came", ".row.changed", ".row", ".fold"]
      .map((kind) => $("columns").querySelector(kind)).find(Boolean);
    if (first) first.tabIndex = 0; // one stop for Tab; arrows move inside
    drawLines(step, y, rows.length * ROW);
    const calm = step.whole
      ? `${step.before.length} to ${step.after.length}`
      : step.minus || step.plus || step.changed
        ? `${step.minus} nodes gone, ${step.plus} new, ${step.changed} read something else`
        : "changes nothing here";
    $("what").textContent = `${titleOf(kinds[shown.kind])}, ${step.name}: ${calm}`;
    $("unfold").setAttribute("aria-pressed", String(shown.unfold));
    $("detail").classList.remove("chosen");
    shown.picked = null;
    if (first && first.matches(".row")) light(first.dataset.side, Number(first.dataset.at));
    else showDetail();
  }

  function drawLines(step, y, height) {
    const svg = $("lines"), width = 100;
    svg.setAttribute("viewBox", `0 0 ${width} ${Math.max(height, 1)}`);
    svg.style.height = `${height}px`;
    const line = (from, to, kind) => {
      const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
      path.setAttribute("d", `M0 ${from}C${width * 0.5} ${from} ${width * 0.5} ${to} ${width} ${to}`);
      path.setAttribute("class", kind);
      return path;
    };
    const lines = [];
    if (!step.whole) {
      const later = new Map(step.after.map((item, at) => [item.key, at]));
      step.before.forEach((item, at) => {
        const to = later.get(item.key);
        if (to === undefined || !y.before.has(at) || !y.after.has(to)) return;
        lines.push([line(y.before.get(at), y.after.get(to), "stay"), at, to]);
      });
    }
    for (const [from, to] of step.links) {
      if (typeof to !== "number" || !y.before.has(from) || !y.after.has(to)) continue;
      lines.push([line(y.before.get(from), y.after.get(to), "link"), from, to]);
    }
    for (const [path, from, to] of lines) {
      path.dataset.before = from;
      path.dataset.after = to;
    }
    svg.replaceChildren(...lines.map(([path]) => path));
  }

  // The node under the pointer or the focus, and what it became or came from.
  function light(side, at) {
    const step = kinds[shown.kind].all[shown.step];
    const other = side === "before" ? "after" : "before";
    const near = new Set();
    for (const [from, to] of step.links) {
      if (side === "before" && from === at) near.add(to);
      if (side === "after" && to === at) near.add(from);
    }
    const twin = step[other].findIndex((item) => item.key === step[side][at].key);
    if (twin >= 0) near.add(twin);
    for (const row of $("columns").querySelectorAll(".row")) {
      const mine = row.dataset.side === side && Number(row.dataset.at) === at;
      row.classList.toggle("lit", mine || (row.dataset.side === other && near.has(Number(row.dataset.at))));
    }
    for (const path of $("lines").children) path.classList.toggle("lit", Number(path.dataset[side]) === at);
    shown.picked = [side, at];
    showDetail();
  }

  function showDetail() {
    const step = kinds[shown.kind].all[shown.step];
    if (!shown.picked) {
      const empty = element("p", {}, "Point at a node, or walk with the arrow keys, to see what it is, where it comes from and what it became.");
      return $("detail").replaceChildren(empty);
    }
    const [side, at] = shown.picked;
    const facts = [...step[side][at].facts];
    const other = side === "before" ? "after" : "before";
    const ends = step.links.filter((link) => link[side === "before" ? 0 : 1] === at)
      .map((link) => link[side === "before" ? 1 : 0])
      .map((end) => (typeof end === "number" ? step[other][end].side || step[other][end].main : end));
    if (ends.length) facts.push([side === "before" ? "became" : "made from", ends.join(", ")]);
    const list = element("dl");
    for (const [name, value] of facts) {
      if (!value) continue;
      const data = element("dd", {}, name === "code" || name === "arguments" ? element("code", {}, value) : value);
      list.append(element("dt", {}, name), data);
    }
    $("detail").replaceChildren(list);
  }

  // ------------------------------------------------------------------ walking
  function go(kind, step, focus) {
    const same = kind === shown.kind;
    const name = kinds[shown.kind].all[shown.step].name;
    shown.kind = Math.min(Math.max(kind, 0), kinds.length - 1);
    const steps = kinds[shown.kind].all;
    const found = steps.findIndex((one) => one.name === name);
    shown.step = Math.min(Math.max(same ? step : found < 0 ? 0 : found, 0), steps.length - 1);
    show();
    if (focus) $(focus).querySelector('[aria-selected="true"]').focus({ preventScroll: focus !== "kinds" });
    const layer = kinds[shown.kind].layers.split(/[-,]/)[0] || "outside";
    history.replaceState(null, "", `#layer=${layer}&pass=${encodeURIComponent(steps[shown.step].name)}`);
  }

  function unfold() {
    shown.unfold = !shown.unfold;
    showColumns();
  }

  function show() {
    showKinds();
    showSteps();
    showColumns();
  }

  function fromHash() {
    const asked = new URLSearchParams(location.hash.slice(1));
    const layer = asked.get("layer"), pass = asked.get("pass");
    if (layer !== null) {
      const inside = (kind) => kind.layers.split(", ").some((run) => {
        const [first, last] = run.split("-").map(Number);
        return run && Number(layer) >= first && Number(layer) <= (last === undefined ? first : last);
      });
      const found = kinds.findIndex((kind) => (layer === "outside" ? !kind.layers : inside(kind)));
      if (found >= 0) shown.kind = found;
    }
    if (pass !== null) {
      const found = kinds[shown.kind].all.findIndex((step) => step.name === pass);
      if (found >= 0) shown.step = found;
    }
    return layer !== null || pass !== null;
  }

  const MOVES = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  for (const id of ["kinds", "steps"]) {
    $(id).addEventListener("keydown", (event) => {
      const move = MOVES[event.key];
      const ends = { Home: 0, End: 1e9 }[event.key];
      if (!move && ends === undefined) return;
      event.preventDefault();
      if (move) go(shown.kind + move[0], shown.step + move[1], id);
      else if (id === "kinds") go(ends, shown.step, id);
      else go(shown.kind, ends, id);
    });
  }
  $("columns").addEventListener("keydown", (event) => {
    const here = event.target.closest("button");
    if (!(event.key in MOVES) || !here) return;
    event.preventDefault();
    const list = [...here.closest("ol").children], line = list.indexOf(here.closest("li"));
    const [down, right] = MOVES[event.key];
    const button = (li) => li && li.querySelector("button");
    let to = null;
    if (down) {
      for (let at = line + down; at >= 0 && at < list.length && !to; at += down) to = button(list[at]);
    } else {
      const other = [...$(right > 0 ? "after" : "before").children].map(button);
      const lit = other.find((one) => one && one.classList.contains("lit"));
      to = lit || other[line] || other.slice(0, line).reverse().find(Boolean) || other.find(Boolean);
    }
    if (!to) return;
    here.tabIndex = -1;
    to.tabIndex = 0;
    to.focus();
  });
  const point = (event) => {
    const row = event.target.closest(".row");
    if (!row) return;
    $("detail").classList.add("chosen"); // on a phone it then stays in view
    light(row.dataset.side, Number(row.dataset.at));
  };
  ["pointerover", "focusin", "click"].forEach((kind) => $("columns").addEventListener(kind, point));
  $("unfold").onclick = unfold;
  $("previous").onclick = () => go(shown.kind, shown.step - 1);
  $("next").onclick = () => go(shown.kind, shown.step + 1);
  window.addEventListener("hashchange", () => fromHash() && show());

  $("walk").hidden = false;
  $("walk-tables").open = false;
  shown.kind = Math.max(0, kinds.reduce((best, kind, at) => (kind.count > kinds[best].count ? at : best), 0));
  const steps = kinds[shown.kind].all;
  shown.step = Math.max(0, steps.findIndex((step) => step.name === "rms_norm"));
  fromHash();
  show();
  window.addEventListener("beforeprint", () => ($("walk-tables").open = true));
})();
