// The numbers of now: tiles, pages, queues, counters, percentiles.

import { bar, element, fillKey, fillTable, find, say, spark } from "./draw.js";
import { COUNTERS, PAGE_STATES, QUEUES, STAGES, bytes, count, duration, percent, plural, seconds }
  from "./words.js";

const HISTORY = 120; // samples in a spark line, one a second
const TIMES = { ttft: "time to first token", inter_token: "between tokens" };

const history = { tokens: [], moved: [] };
let before = null; // the state shown last, for rates

export function showNumbers(state) {
  remember(state);
  showTiles(state);
  showPages(state);
  showQueues(state);
  showTimes(state);
}

function remember(state) {
  const isNext = before !== null && state.clock_s > before.clock_s
    && state.handed_over_nbytes >= before.handed_over_nbytes;
  const moved = isNext ? (state.handed_over_nbytes - before.handed_over_nbytes)
    / (state.clock_s - before.clock_s) : 0;
  for (const [name, value] of [["tokens", state.tokens_per_s], ["moved", moved]]) {
    history[name].push(value);
    if (history[name].length > HISTORY) history[name].shift();
  }
  before = state;
}

// ---- tiles --------------------------------------------------------------------------------------

function showTiles(state) {
  const at = name => state.percentiles.find(one => one.name === name);
  const timed = (label, name) => {
    const found = at(name);
    return tile(label, found ? seconds(found.p50_s) : "–",
      found ? `median; 99 % within ${seconds(found.p99_s)}` : "no request yet");
  };
  const moving = state.peers.reduce((sum, peer) => sum + peer.in_flight_count, 0);
  const moved = history.moved.at(-1);
  const wire = tile("Transferred", `${bytes(moved)}/s`, `${plural(moving, "transfer")} under way`,
    history.moved, "Bytes transferred per second, over the last two minutes");
  const q = state.queues;
  const tiles = state.role === "prefill" ? [
    wire, timed("Prefill", "prefill"), timed("Transfer", "transfer"),
    tile("Prefix hits", percent(state.hit_rate), "of the latest prompts' tokens"),
    tile("Prompts", count((q.running ?? 0) + (q.waiting ?? 0)),
      `${count(q.running ?? 0)} running, ${count(q.waiting ?? 0)} waiting`),
  ] : [
    tile("Output", `${count(state.tokens_per_s)} tokens/s`, `${plural(q.running ?? 0, "request")} running`,
      history.tokens, "Tokens per second, over the last two minutes"),
    wire, timed("First token", "ttft"), timed("Between tokens", "inter_token"),
    tile("Prefix hits", percent(state.hit_rate), "of the latest prompts' tokens"),
    tile("Requests", count(state.open_request_count),
      `${count(q.running ?? 0)} running, ${count(q.waiting ?? 0)} waiting`),
  ];
  find("tiles").replaceChildren(...tiles);
}

function tile(label, value, below, values = null, words = "") {
  const [number, ...unit] = value.split(" ");
  const made = element("div", "tile", element("span", "", label),
    element("b", "", number, " ", element("small", "", unit.join(" "))),
    element("span", "", below));
  if (values !== null) made.append(spark(values, words));
  return made;
}

// ---- pages and queues ---------------------------------------------------------------------------

fillKey(find("page-key"), PAGE_STATES);

function showPages(state) {
  find("pages").replaceChildren(...(state.page_groups.length
    ? state.page_groups.map(group)
    : [element("p", "muted", "not known yet")]));
  say(find("prefix-cache"), prefixCache(state.prefix_cache));
}

function prefixCache(cache) {
  if (cache === null) return "";
  if (cache.reason) return `No prefix is kept: ${cache.reason}.`;
  const kept = `Prefix cache: ${plural(cache.token_count, "token")}`;
  if (cache.checkpoint_max === 0) return `${kept}.`;
  return `${kept}, ${count(cache.checkpoint_count)} of ${plural(cache.checkpoint_max, "checkpoint")}.`;
}

function group(pages) {
  const counted = Object.entries(PAGE_STATES).map(([key, name]) => `${count(pages[key])} ${name}`);
  const parts = ["used", "quarantined", "cached"].map(key =>
    [key, pages[key], `${pages[key]} ${PAGE_STATES[key]}`]);
  return element("div", "group",
    element("p", "", element("b", "", pages.name),
      element("span", "muted", `${plural(pages.total, "page")} of ${bytes(pages.page_nbytes)}`)),
    bar(parts, pages.total, `${pages.name}: ${counted.join(", ")}`),
    element("p", "muted", counted.join(" · ")));
}

function showQueues(state) {
  // Both names of one queue are on /metrics; here it is shown once.
  const { prealloc, ...queues } = state.queues;
  fillCounts(find("queues"), Object.entries(queues), QUEUES, "not known yet");
  // What never happened is left out, so that what did is seen.
  const happened = Object.keys(COUNTERS).map(name => [name, state.counters[name] ?? 0])
    .filter(([name, value]) => name === "finished" || value > 0);
  fillCounts(find("counters"), happened, COUNTERS, "nothing");
}

function fillCounts(list, entries, names, empty) {
  list.replaceChildren(...(entries.length ? entries.map(([name, value]) =>
    element("div", "", element("dt", "", names[name] ?? name.replaceAll("_", " ")),
      element("dd", "", count(value)))) : [element("div", "", element("dt", "", empty))]));
}

// ---- times --------------------------------------------------------------------------------------

function showTimes(state) {
  fillTable(find("times"), [[""], ["median", true], ["90 %", true], ["99 %", true], ["of", true]],
    state.percentiles.map(one => [[TIMES[one.name] ?? STAGES[one.name]],
      [seconds(one.p50_s), true], [seconds(one.p90_s), true], [seconds(one.p99_s), true],
      [count(one.count), true]]),
    "no request has ended yet");
}

export function showBuild(state) {
  const worker = Object.values(state.worker).join(", ");
  say(find("build"), `Baton ${state.version}, up ${duration(state.uptime_s)}` +
    (worker ? `; ${worker}` : ""));
}
