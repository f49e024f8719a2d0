// What of a prompt was cached, where, and who computed the rest. Knows nothing of the page.

import { bar } from "./draw.js";
import { count, plural } from "./words.js";

// Both servers count from the prompt's beginning. A prefill server computes what itself lacks, also
// where a decode server has it.
export function cachedInWords(request, isDecode) {
  const { prefill, decode } = request.cached_tokens_details;
  const all = request.prompt_tokens;
  const isAsked = isDecode && request.peer !== "";
  const own = isDecode ? decode : prefill;
  const rest = all - (isAsked ? prefill : own);
  if (!isAsked) {
    return own > 0 ? `${count(own)} of ${plural(all, "prompt token")} cached here, ${count(rest)} computed here`
      : `${plural(all, "prompt token")} computed here`;
  }
  if (prefill === 0 && decode === 0) return `${plural(all, "prompt token")} computed by the prefill server`;
  return `of ${plural(all, "prompt token")} ${count(decode)} cached here and not sent, ` +
    `${count(prefill)} cached on the prefill server, ${count(rest)} computed there`;
}

// One bar of a prompt: cached here, then what only the other server had cached, then computed.
export function cachedBar(request, isDecode) {
  const { prefill, decode } = request.cached_tokens_details;
  const [here, there] = isDecode ? [decode, Math.max(0, prefill - decode)] : [prefill, 0];
  const rest = request.prompt_tokens - here - there;
  const parts = [["cached", here, `${count(here)} cached here`],
    ["transfer", there, `${count(there)} cached on the prefill server alone`],
    ["prefill", rest, `${count(rest)} cached nowhere`]];
  const said = parts.filter(([, tokens]) => tokens > 0).map(([, , name]) => name).join(", ");
  return bar(parts, request.prompt_tokens, `prompt tokens: ${said}`);
}
