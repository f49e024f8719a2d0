// The latest requests, a bar each on one scale; opened, every stage where its time lies.

import { cachedBar, cachedInWords } from "./cached.js";
import { element, fillKey, find, bar, say, waterfall } from "./draw.js";
import { STAGES, bytes, count, fit, percent, plural, seconds, short } from "./words.js";

const SHOWN = ["reserve", "queue", "prefill", "transfer", "first_token", "decode"];
fillKey(find("stage-key"), Object.fromEntries(SHOWN.map(name => [name, STAGES[name]])));

const rows = new Map(); // by request: its row, so that an opened one stays open
let shown = [], latest = null;

find("scale").addEventListener("change", drawBars);
find("failed-only").addEventListener("change", () => { if (latest !== null) showRequests(latest); });

export function showRequests(state) {
  latest = state;
  const isFailedOnly = find("failed-only").checked;
  shown = (isFailedOnly ? state.failures : state.requests).map(request => ({ ...request, key: `${request.id} ${request.started_at}` }));
  const keys = new Set(shown.map(request => request.key));
  let isChanged = find("requests").childElementCount !== Math.max(1, shown.length);
  for (const key of rows.keys()) if (!keys.has(key)) isChanged = rows.delete(key);
  for (const request of shown) {
    if (rows.has(request.key)) continue;
    rows.set(request.key, rowOf(request));
    isChanged = true;
  }
  if (!isChanged) return;
  const nodes = shown.map(request => rows.get(request.key));
  if (nodes.length) arrange(find("requests"), nodes);
  else find("requests").replaceChildren(element("p", "muted", isFailedOnly ? "None." : "None yet."));
  drawBars();
}

// Moves no node that stays where it is: a moved one would lose the focus.
function arrange(parent, nodes) {
  for (const child of [...parent.children]) if (!nodes.includes(child)) child.remove();
  nodes.forEach((node, index) => {
    if (parent.children[index] !== node) parent.insertBefore(node, parent.children[index] ?? null);
  });
}

function rowOf(request) {
  const isWell = request.status === "ok";
  const rest = request.completion_tokens - 1;
  const ended = new Date((request.started_at + request.e2e_s) * 1e3);
  const figures = [ended.toLocaleTimeString(),
    `${count(request.prompt_tokens)} in, ${count(request.completion_tokens)} out`];
  if (request.completion_tokens > 0) figures.push(`first token ${seconds(request.ttft_s)}`);
  if (rest > 0 && request.decode_s > 0) figures.push(`${short(rest / request.decode_s)} tokens/s`);
  if (request.cached_tokens) figures.push(`${percent(request.cached_tokens / request.prompt_tokens)} cached`);
  if (request.peer) figures.push(`with ${fit(request.peer, 28)}`);
  if (request.rid) figures.push(fit(request.rid, 20));
  const words = element("span", "", ...figures.map(figure => element("span", "", figure)));
  if (!isWell) words.append(element("span", "bad", request.status.replaceAll("_", " ")));
  const summary = element("summary", "", words, element("div", "place"));
  const isDecode = latest.role === "decode";
  const made = element("details", "request", summary, waterfall(request.spans));
  if (request.cached_tokens) made.append(cachedBar(request, isDecode));
  made.append(factsOf(request, isDecode));
  return made;
}

function factsOf(request, isDecode) {
  const facts = [request.rid && `request ${request.rid}`, request.peer && `with ${request.peer}`];
  if (request.bytes > 0) {
    const speed = request.wire_s > 0 ? ` at ${short(request.bytes / request.wire_s / 1e9)} GB/s` : "";
    facts.push(`${bytes(request.bytes)} transferred${speed}`);
  }
  if (request.completion_tokens > 0) facts.push(cachedInWords(request, isDecode));
  if (request.retractions) facts.push(`retracted ${plural(request.retractions, "time")}`);
  if (request.message) facts.push(request.message);
  const made = element("p", "facts muted");
  say(made, facts.filter(fact => fact).join(" · "));
  return made;
}

function drawBars() {
  const isWhole = find("scale").querySelector("input:checked").value === "whole";
  const spansOf = request => request.spans.filter(span => isWhole || span.name !== "decode");
  const lengthOf = request => spansOf(request).reduce((sum, span) => sum + span.duration_s, 0);
  const longest = Math.max(0, ...shown.map(lengthOf));
  for (const request of shown) {
    const parts = spansOf(request).map(span =>
      [span.name, span.duration_s, `${STAGES[span.name] ?? span.name} ${seconds(span.duration_s)}`]);
    const place = rows.get(request.key).querySelector(".place");
    place.replaceChildren(bar(parts, longest, parts.map(([, , words]) => words).join(", ")));
  }
}
