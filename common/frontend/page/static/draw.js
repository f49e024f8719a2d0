// Elements, and the few figures that several parts of the page draw.

import { STAGES, seconds } from "./words.js";

export const find = id => document.getElementById(id);

export function element(tag, className = "", ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

export function drawn(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// Leaves a text alone that has not changed: it may be selected, or be read out.
export function say(node, text, className) {
  if (node.textContent !== text) node.textContent = text;
  if (className !== undefined && node.className !== className) node.className = className;
}

// parts: [class, value, what it is called]. What they leave of the total stays empty.
export function bar(parts, total, label) {
  const pieces = parts.filter(([, value]) => value > 0).map(([className, value, name]) => {
    const piece = element("i", className);
    piece.style.width = `${total > 0 ? 100 * value / total : 0}%`;
    piece.title = name;
    return piece;
  });
  const made = element("div", "bar", ...pieces);
  made.setAttribute("role", "img");
  made.setAttribute("aria-label", label);
  return made;
}

export function fillKey(node, names) {
  node.replaceChildren(...Object.entries(names).map(([className, name]) =>
    element("span", "", element("i", className), name)));
}

// rows: [text or node, is a number].
export function fillTable(table, heads, rows, empty) {
  const cell = (tag, [content, isNumber]) => element(tag, isNumber ? "number" : "", content);
  const head = element("tr", "", ...heads.map(content => {
    const made = cell("th", content);
    made.scope = "col";
    return made;
  }));
  const body = rows.map(row => element("tr", "", ...row.map(content => cell("td", content))));
  table.replaceChildren(...(rows.length
    ? [element("thead", "", head), element("tbody", "", ...body)]
    : [element("caption", "muted", empty)]));
}

// One row per stage, each bar where its time lies.
export function waterfall(spans) {
  const total = Math.max(1e-9, ...spans.map(span => span.start_s + span.duration_s));
  const made = element("div", "waterfall");
  for (const span of spans) {
    const piece = element("i", span.name);
    piece.style.marginLeft = `${100 * span.start_s / total}%`;
    piece.style.width = `${100 * span.duration_s / total}%`;
    made.append(element("span", "", STAGES[span.name] ?? span.name), element("div", "", piece),
      element("span", "number", seconds(span.duration_s)));
  }
  return made;
}

// values: of the last minutes, oldest first.
export function spark(values, label) {
  const top = Math.max(1e-9, ...values);
  const step = 100 / Math.max(1, values.length - 1);
  const points = values.map((v, i) => `${(i * step).toFixed(1)},${(23 - 21 * v / top).toFixed(1)}`);
  return drawn("svg", { class: "spark", viewBox: "0 0 100 24", preserveAspectRatio: "none",
    role: "img", "aria-label": label }, drawn("polyline", { points: points.join(" ") }));
}
