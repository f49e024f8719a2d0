// Numbers and names as people read them. Knows nothing of the page.

export const STAGES = {
  reserve: "wait for pages",
  no_prefill_server: "wait for a prefill server",
  queue: "queue",
  prefill: "prefill",
  transfer: "transfer",
  first_token: "first token",
  decode: "decode",
  unanswered: "no answer",
  waiting: "until the first token",
};

export const PAGE_STATES = {
  used: "in use",
  cached: "prefix cache",
  quarantined: "in quarantine",
  free: "free",
};

export const QUEUES = {
  waiting: "waiting",
  prealloc: "wait for pages",
  transfer: "receive their cache",
  running: "running",
  retracted: "gave pages back",
  draining: "given up, draining",
  bootstrap: "wait for their half",
  inflight: "send their cache",
  reservations: "reservations",
  returning: "caches on their way back",
};

export const COUNTERS = {
  finished: "finished",
  failed: "failed",
  aborted: "aborted",
  retried: "transfers retried",
  retracted: "retracted",
  transfer_failed: "transfers failed",
  bootstrap_failed: "halves never met",
  no_prefill_server: "without a prefill server",
  waited_for_equal: "waited for an equal beginning",
  local_prefills: "short rests computed here",
  transfer_tokens_spared: "tokens not sent again",
  prefix_evicted_tokens: "cached tokens evicted",
  checkpoints_made: "checkpoints made",
  checkpoints_used: "checkpoints used",
  checkpoints_evicted: "checkpoints evicted",
  host_saved_tokens: "tokens saved to host memory",
  host_loaded_tokens: "tokens loaded from host memory",
  host_failed_loads: "loads from host memory that failed",
  spec_proposed_tokens: "tokens proposed",
  spec_accepted_tokens: "proposed tokens accepted",
  verified: "caches verified",
  mismatched: "caches that differed",
  self_tests_failed: "self-tests failed",
  peers_lost: "peers lost",
  refused_peers: "peers refused",
  starved: "starved by quarantine",
};

export function seconds(s) {
  if (s >= 100) return `${s.toFixed(0)} s`;
  if (s >= 1) return `${s.toFixed(2)} s`;
  const ms = s * 1e3;
  return ms >= 100 ? `${ms.toFixed(0)} ms` : ms >= 1 ? `${ms.toFixed(1)} ms` : `${ms.toFixed(2)} ms`;
}

export function bytes(n) {
  for (const [size, unit] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
    if (n >= size) return `${short(n / size)} ${unit}`;
  }
  return `${Math.round(n)} B`;
}

export function count(n) {
  return n >= 1e6 ? `${short(n / 1e6)} M` : n >= 1e4 ? `${short(n / 1e3)} k` : String(Math.round(n));
}

export function short(n) {
  return n >= 100 ? n.toFixed(0) : n >= 10 ? n.toFixed(1) : n.toFixed(2);
}

export function percent(share) {
  return `${(100 * share).toFixed(0)} %`;
}

export function duration(s) {
  if (s < 60) return `${Math.floor(s)} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor(s / 60) % 60} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor(s / 3600) % 24} h`;
}

export function plural(n, one, many = `${one}s`) {
  return `${count(n)} ${n === 1 ? one : many}`;
}

// The middle goes: addresses differ at their ends.
export function fit(text, length) {
  if (text.length <= length) return text;
  const tail = Math.max(1, Math.ceil((length - 1) * 0.6));
  return `${text.slice(0, Math.max(1, length - 1 - tail))}…${text.slice(-tail)}`;
}
