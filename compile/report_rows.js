// From the recorded graphs to the rows of two columns. No page here: data in, data out.
"use strict";

const CONTEXT = 1; // unchanged rows that stay beside a change
const FOLD = 4; // shorter runs of unchanged rows are shown
const [OPERATOR, ARGS, SHAPE, MODULE, SOURCE] = [1, 2, 3, 4, 5]; // of a node in the data

// Each step has two columns of items {key, main, side, right, facts} and links [before, after].
function nodeItem(graphs, index) {
  const node = graphs.nodes[index];
  const source = graphs.sources[node[SOURCE]];
  return {
    key: node[0], main: node[OPERATOR], side: node[0], right: node[SHAPE], same: index,
    facts: [
      ["node", node[0]], ["operator", node[OPERATOR]], ["arguments", node[ARGS]],
      ["shape", node[SHAPE]], ["module", node[MODULE]],
      ["source", source ? source[0] + (source[1] ? ` in ${source[1]}` : "") : ""],
      ["code", source ? source[2] : ""],
    ],
  };
}

function sourceItems(graphs, nodes) {
  const lines = new Map(); // a line that several modules run is one item for each
  nodes.forEach((index, at) => {
    const node = graphs.nodes[index], key = `${node[SOURCE]} ${node[MODULE]}`;
    if (node[SOURCE] >= 0) lines.set(key, [...(lines.get(key) || []), at]);
  });
  const items = [], links = [];
  for (const [key, made] of lines) {
    const node = graphs.nodes[nodes[made[0]]];
    const [where, name, code] = graphs.sources[node[SOURCE]];
    made.forEach((at) => links.push([items.length, at]));
    items.push({
      key: `source ${key}`, main: code || where, side: "", right: where.replace(/^.*:/, ":"), same: -1,
      facts: [["source", where], ["function", name], ["module", node[MODULE]], ["code", code]],
    });
  }
  return [items, links];
}

function stepsOf(graphs, kind) {
  const item = (index) => nodeItem(graphs, index);
  const steps = [];
  let nodes = [];
  for (const step of kind.steps) {
    const now = step.nodes || nodes;
    if (!steps.length) {
      const [items, links] = sourceItems(graphs, now);
      steps.push({ name: "export", before: items, after: now.map(item), links,
                   titles: ["transformers source", "exported graph"] });
    } else {
      steps.push({ name: step.name, before: nodes.map(item), after: now.map(item),
                   links: step.links || [], titles: [`before ${step.name}`, `after ${step.name}`] });
    }
    nodes = now;
  }
  for (const lowered of kind.lowered) {
    const items = lowered.items.map(([name, what], at) => ({
      key: `lowered ${at}`, main: what, side: name, right: "", same: -1,
      facts: [["name", name], ["kind", what]],
    }));
    steps.push({ name: lowered.title, before: nodes.map(item), after: items,
                 links: lowered.links, titles: ["final graph", lowered.title] });
  }
  steps.forEach((step) => (step.rows = align(step)));
  return steps;
}

// Rows of two columns that are no diff: a thing stands beside the first of those it became.
function beside(step) {
  const first = step.before.map(() => -1);
  for (const [from, to] of step.links) {
    if (first[from] < 0 || to < first[from]) first[from] = to;
  }
  const rows = [];
  let next = 0;
  first.forEach((to, at) => {
    for (; next < to; next++) rows.push([-1, next]);
    rows.push([at, next === to ? next++ : -1]);
  });
  for (; next < step.after.length; next++) rows.push([-1, next]);
  return rows;
}

// Rows of (before, after): nodes that stayed stand side by side, as in a diff.
function align(step) {
  const old = new Map(step.before.map((item, at) => [item.key, at]));
  const later = new Map(step.after.map((item, at) => [item.key, at]));
  const rows = [];
  let gone = [], came = [], next = 0;
  const flush = () => {
    const count = Math.max(gone.length, came.length);
    const middle = (list) => (count - list.length) >> 1; // the shorter beside the longer's middle
    for (let at = 0; at < count; at++) {
      const a = gone[at - middle(gone)], b = came[at - middle(came)];
      rows.push([a === undefined ? -1 : a, b === undefined ? -1 : b]);
    }
    gone = [];
    came = [];
  };
  const used = new Set();
  step.before.forEach((item, at) => {
    const to = later.get(item.key);
    if (to === undefined || to < next) { gone.push(at); return; }
    for (; next < to; next++) came.push(next);
    flush();
    rows.push([at, to]);
    used.add(at);
    next = to + 1;
  });
  for (; next < step.after.length; next++) came.push(next);
  flush();
  const state = (item, other, index) =>
    !other.has(item.key) ? "new" : index.same < 0 || item.same === index.same ? "kept" : "changed";
  step.before.forEach((item) => {
    const twin = step.after[later.get(item.key)];
    item.state = twin === undefined ? "gone" : state(item, later, twin);
  });
  step.after.forEach((item) => {
    const twin = step.before[old.get(item.key)];
    item.state = twin === undefined ? "came" : state(item, old, twin);
  });
  // Source lines and the backend's things are not a diff: nothing is gone.
  if (step.before.some((item) => item.same < 0) || step.after.some((item) => item.same < 0)) {
    [...step.before, ...step.after].forEach((item) => (item.state = "kept"));
    Object.assign(step, { whole: true, minus: 0, plus: 0, changed: 0 });
    return beside(step);
  }
  step.minus = step.before.filter((item) => item.state === "gone").length;
  step.plus = step.after.filter((item) => item.state === "came").length;
  step.changed = step.after.filter((item) => item.state === "changed").length;
  return rows;
}

// Folds runs of unchanged rows; gives [before, after] or a number of folded rows.
function folded(step) {
  if (step.whole) return step.rows;
  const still = (row) => row[0] >= 0 && row[1] >= 0 && step.after[row[1]].state === "kept";
  const out = [];
  for (let at = 0; at < step.rows.length; ) {
    let end = at;
    while (end < step.rows.length && still(step.rows[end])) end++;
    const head = at ? CONTEXT : 0, tail = end < step.rows.length ? CONTEXT : 0;
    if (end - at - head - tail >= FOLD) {
      out.push(...step.rows.slice(at, at + head), end - at - head - tail,
        ...step.rows.slice(end - tail, end));
    } else out.push(...step.rows.slice(at, end));
    at = end;
    if (at < step.rows.length) out.push(step.rows[at++]);
  }
  return out;
}
