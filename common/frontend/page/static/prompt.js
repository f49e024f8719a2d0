// The prompt box: tokens as they come, then the timeline of the request.

import { Failure, ask, askForKey } from "./ask.js";
import { cachedInWords } from "./cached.js";
import { find, say, waterfall } from "./draw.js";
import { bytes, plural, seconds, short } from "./words.js";

const REDRAW_MS = 200;
// The timeline of a stopped request is there once the scheduler has ended the request.
const TIMELINE_TRIES = 10, TIMELINE_WAIT_MS = 150;

let running = null; // the AbortController of the request under way
let canChat = null;

export function setUpPrompt() {
  const form = find("form"), prompt = find("prompt");
  form.addEventListener("submit", event => {
    event.preventDefault();
    if (running === null) generate();
  });
  prompt.addEventListener("keydown", event => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
  document.addEventListener("keydown", event => {
    if (event.key === "Escape" && !document.querySelector("dialog[open]")) running?.abort();
  });
  find("stop").addEventListener("click", () => running?.abort());
}

export function showPrompt(state) {
  find("try").hidden = state.role === "prefill";
  find("elsewhere").hidden = state.role !== "prefill";
  if (canChat !== null) return;
  canChat = state.has_chat_template;
  find("chat-label").hidden = !canChat;
  find("chat").checked = canChat;
}

async function generate() {
  const run = { rid: newName(), began: performance.now(), first: 0, text: "", tokens: 0 };
  running = new AbortController();
  setBusy(true);
  find("answer").textContent = find("own-facts").textContent = "";
  const redraw = setInterval(() => drawRunning(run), REDRAW_MS);
  let end = "";
  try {
    await stream(run, running.signal);
  } catch (error) {
    end = inWords(error, run);
    if (error.status === 401) askForKey(generate, true);
  }
  clearInterval(redraw);
  running = null;
  setBusy(false);
  drawRunning(run, end);
  if (end === "" || run.first || end.startsWith("Stopped")) await showTimeline(run);
}

function inWords(error, run) {
  const after = run.tokens ? ` after ${plural(run.tokens, "token")}` : "";
  if (error.name === "AbortError") return `Stopped${after}.`;
  if (error instanceof Failure) return `Refused${after}: ${error.message}`;
  return `The connection was lost${after}.`;
}

// The page's own name for the request, so that a request that was stopped early can be found as well.
function newName() {
  const random = crypto.getRandomValues(new Uint8Array(8));
  return `page-${[...random].map(byte => byte.toString(16).padStart(2, "0")).join("")}`;
}

async function stream(run, signal) {
  const prompt = find("prompt").value;
  const isChat = canChat && find("chat").checked;
  const body = {
    rid: run.rid,
    max_tokens: Number(find("count").value) || 1,
    temperature: Number(find("temperature").value) || 0,
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
    ...(isChat ? { messages: [{ role: "user", content: prompt }] } : { prompt }),
  };
  const response = await ask(isChat ? "/v1/chat/completions" : "/v1/completions", {
    method: "POST", signal, body: JSON.stringify(body),
    headers: { "Content-Type": "application/json" },
  });
  for await (const event of eventsOf(response)) {
    if (event.error) throw new Failure(event.error.message);
    run.tokens = event.usage?.completion_tokens ?? run.tokens;
    for (const choice of event.choices) take(run, choice.text ?? choice.delta?.content ?? "");
  }
}

function take(run, piece) {
  if (run.tokens > 0) run.first ||= performance.now();
  if (!piece) return;
  run.text += piece;
  const answer = find("answer");
  const isAtEnd = answer.scrollHeight - answer.scrollTop - answer.clientHeight < 30;
  answer.append(piece);
  if (isAtEnd) answer.scrollTop = answer.scrollHeight;
}

async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    const lines = (rest + part.value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

// ---- what is shown ------------------------------------------------------------------------------

function setBusy(isBusy) {
  const [next, last] = isBusy ? ["stop", "go"] : ["go", "stop"];
  const hadFocus = document.activeElement === find(last);
  find(next).disabled = false;
  if (hadFocus) find(next).focus(); // a button that is switched off would lose it
  find(last).disabled = true;
  // Read out once it is whole, not token by token.
  find("answer").setAttribute("aria-busy", String(isBusy));
}

// While it runs, as this page sees it.
function drawRunning(run, end = "") {
  const now = performance.now();
  const waited_s = ((run.first || now) - run.began) / 1e3;
  const spans = [{ name: "waiting", start_s: 0, duration_s: waited_s }];
  let figures = "";
  if (run.first) {
    const decoded_s = (now - run.first) / 1e3;
    spans.push({ name: "decode", start_s: waited_s, duration_s: decoded_s });
    figures = `${plural(run.tokens, "token")}, the first after ${seconds(waited_s)}`;
    if (run.tokens > 1 && decoded_s > 0) {
      figures += `, then ${short((run.tokens - 1) / decoded_s)} a second`;
    }
  }
  const isFailed = end !== "" && !end.startsWith("Stopped");
  say(find("figures"), [end, figures].filter(words => words).join(" "), isFailed ? "bad" : "muted");
  find("own").replaceChildren(...(isFailed && !run.first ? [] : [waterfall(spans)]));
}

// When it has ended, as the servers measured it.
async function showTimeline(run) {
  for (let attempt = 0; attempt < TIMELINE_TRIES && running === null; attempt++) {
    try {
      const response = await ask(`/requests/${encodeURIComponent(run.rid)}/timeline`);
      const timeline = await response.json();
      if (running === null) drawTimeline(timeline);
      return;
    } catch (error) {
      if (error.status !== 404) return;
      await new Promise(resolve => setTimeout(resolve, TIMELINE_WAIT_MS));
    }
  }
}

function drawTimeline(timeline) {
  find("own").replaceChildren(waterfall(timeline.spans));
  const facts = [], moved = timeline.transfer;
  if (moved.bytes > 0) {
    const exposed = moved.exposed_bytes ? `${bytes(moved.exposed_bytes)} of it after` : "all of it before";
    facts.push(`${bytes(moved.bytes)} transferred by ${timeline.peer}, ${exposed} the prompt ` +
      `was computed; ${seconds(moved.wire_s)} on the wire.`);
  }
  if (timeline.completion_tokens > 0) facts.push(`The prompt: ${cachedInWords(timeline, true)}.`);
  say(find("own-facts"), facts.join(" "));
}
