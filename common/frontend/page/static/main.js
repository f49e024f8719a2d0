// The page: asks for the server's state once a second and shows it, and reports a missing answer.

import { ask, askForKey, forgetKey, hasKey } from "./ask.js";
import { element, find, say } from "./draw.js";
import { health, showPeers } from "./peers.js";
import { showBuild, showNumbers } from "./pools.js";
import { setUpPrompt, showPrompt } from "./prompt.js";
import { showRequests } from "./requests.js";
import { duration, plural } from "./words.js";

const POLL_MS = 1000, SELDOM_MS = 15000, ANSWER_MS = 4000;
const ROLES = { prefill: "prefill server", decode: "decode server", unified: "server" };

let latest = null; // the state shown
let heardAt = performance.now();
let timer = 0;

async function poll() {
  clearTimeout(timer);
  let isRefused = false;
  try {
    const response = await ask("/state", { signal: AbortSignal.timeout(ANSWER_MS) });
    latest = await response.json();
    heardAt = performance.now();
    show(latest);
    showGone("");
  } catch (error) {
    isRefused = error.status === 401;
    if (isRefused) {
      askForKey(poll);
      say(find("ready"), "an API key is needed", "pill warn");
      find("give").hidden = false;
    } else {
      showGone(error.message);
    }
  }
  clearTimeout(timer); // two may have been under way
  timer = setTimeout(poll, document.hidden || isRefused ? SELDOM_MS : POLL_MS);
}

function show(state) {
  say(find("title"), state.served_model_name);
  say(find("about"), `Baton ${ROLES[state.engine_type]}`);
  document.title = `${state.served_model_name}: Baton ${ROLES[state.engine_type]}`;
  const reason = state.not_ready_reason || (state.is_fresh ? "" : "the scheduler is slow to answer");
  const missing = state.peers.filter(peer => health(peer) !== "good").length;
  const word = missing ? `ready, ${missing} of ${plural(state.peers.length, "peer")} in trouble` : "ready";
  say(find("ready"), reason || word, reason ? "pill bad" : missing ? "pill warn" : "pill good");
  find("forget").hidden = !hasKey();
  find("give").hidden = true;
  showPrompt(state);
  showNumbers(state);
  showPeers(state);
  showRequests(state);
  showBuild(state);
}

// Old numbers stay, marked as old.
function showGone(problem) {
  find("gone").hidden = problem === "";
  document.body.classList.toggle("is-old", problem !== "");
  if (problem === "") return;
  const ago = duration((performance.now() - heardAt) / 1e3);
  say(find("ready"), "no answer", "pill bad");
  say(find("gone"), `No answer: ${problem}. ` +
    (latest === null ? `Asked for ${ago}.` : `What you see is ${ago} old.`));
}

// ---- what is asked for by hand ------------------------------------------------------------------

async function read(path) {
  find("reader-title").textContent = path;
  try {
    find("reader-text").textContent = JSON.stringify(await (await ask(path)).json(), null, 2);
  } catch (error) {
    find("reader-text").textContent = error.message;
  }
  find("reader").showModal();
}

async function saveTrace() {
  try {
    const url = URL.createObjectURL(await (await ask("/trace")).blob());
    const anchor = element("a");
    anchor.href = url;
    anchor.download = `baton-${latest?.engine_type ?? "server"}-trace.json`;
    anchor.click();
    URL.revokeObjectURL(url);
  } catch (error) {
    find("reader-title").textContent = "/trace";
    find("reader-text").textContent = error.message;
    find("reader").showModal();
  }
}

for (const button of document.querySelectorAll("[data-show]")) {
  button.addEventListener("click", () => read(button.dataset.show));
}
find("give").addEventListener("click", () => askForKey(poll, true));
find("save-trace").addEventListener("click", saveTrace);
find("forget").addEventListener("click", () => { forgetKey(); poll(); });
document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });
window.addEventListener("resize", () => { if (latest !== null) showPeers(latest); });

setUpPrompt();
poll();
