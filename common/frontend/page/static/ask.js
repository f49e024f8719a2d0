// Requests to this server: with the key of this tab, and failures in words.

import { find } from "./draw.js";

const STORE = "baton-api-key"; // in sessionStorage: of this tab, gone when it is closed

export class Failure extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status; // 0: there was no answer
  }
}

const shownKey = () => sessionStorage.getItem(STORE) ?? "";
export const hasKey = () => shownKey() !== "";

// The response to a request that went well. Throws Failure, or AbortError if the signal was raised.
export async function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (hasKey()) headers.Authorization = `Bearer ${shownKey()}`;
  let response;
  try {
    response = await fetch(path, { cache: "no-store", ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    const isLate = error.name === "TimeoutError";
    throw new Failure(isLate ? "the server takes too long to answer" : "the server is not there");
  }
  if (!response.ok) throw new Failure(await reason(response), response.status);
  return response;
}

async function reason(response) {
  try {
    const body = JSON.parse(await response.text());
    return body.error.message;
  } catch {
    return `the server answered with status ${response.status}`;
  }
}

let isPutOff = false; // after "Not now" the page asks only on request

// Asks the user for a key; `retry` runs once there is one to try.
export function askForKey(retry, isWanted = false) {
  const dialog = find("key-dialog");
  if (dialog.open || (isPutOff && !isWanted)) return;
  find("key-problem").textContent = hasKey() ? "The key that you gave is not valid here." : "";
  find("key").value = "";
  find("key-form").onsubmit = () => {
    sessionStorage.setItem(STORE, find("key").value.trim());
    isPutOff = false;
    retry();
  };
  find("key-later").onclick = dialog.oncancel = () => {
    isPutOff = true;
    dialog.close();
  };
  dialog.showModal();
}

export function forgetKey() {
  sessionStorage.removeItem(STORE);
}
