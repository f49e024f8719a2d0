// The picture of the peers: prefill servers on the left, decode servers on the right, a line from
// each rank to each rank that it may write to. A table below has the same in words.

import { drawn, element, fillTable, find, say } from "./draw.js";
import { fit, plural, short } from "./words.js";

const GAP = 14; // between two peers
const TITLE = 20; // above each box
const LINE = 16;
const STRIP = 26; // where the ranks of a box stand, at its inner edge
const RANKS_HEIGHT_MAX = 160;
const CHARACTER = 6.7, BOLD_CHARACTER = 7.6; // about the width of one, at 12px

let drawnKey = "";

export function showPeers(state) {
  const peers = [...state.peers].sort((a, b) => nameOf(a).localeCompare(nameOf(b)));
  const width = Math.max(240, find("picture").clientWidth);
  const key = JSON.stringify([width, state.layout, state.engine_type, peers]);
  if (key === drawnKey) return;
  drawnKey = key;
  find("picture").replaceChildren(picture(state, peers, width));
  showTroubles(state, peers);
  showTable(peers);
}

export function health(peer) {
  // A peer that is dialled again after it was lost or refused has a detail.
  if (peer.state !== "connected") return peer.state.endsWith("ing") && !peer.detail ? "warn" : "bad";
  return peer.is_self_test_failing || !["", "closed"].includes(peer.breaker) ? "warn" : "good";
}

const nameOf = peer => peer.name || peer.address || peer.incarnation;

// A link to the peer's page, if its address is known. This browser may not reach it.
function pageOf(peer) {
  if (!peer.http_address) return nameOf(peer);
  const anchor = element("a", "", nameOf(peer));
  anchor.href = `//${peer.http_address}/`;
  anchor.rel = "noreferrer";
  return anchor;
}

const isRetried = peer => peer.state.endsWith("ing") && peer.detail !== "";

function condition(peer) {
  const words = [isRetried(peer) ? "not connected" : peer.state];
  if (!["", "closed"].includes(peer.breaker)) words.push(`left alone (breaker ${peer.breaker})`);
  if (peer.is_self_test_failing) words.push("its self-test fails");
  return words.join(", ");
}

// ---- the picture --------------------------------------------------------------------------------

function picture(state, peers, width) {
  const isPrefill = state.role === "prefill";
  const boxWidth = Math.min(230, Math.floor(width * 0.37));
  const own = { title: width < 420 ? "this server" : `this ${isPrefill ? "prefill" : "decode"} server`, isOwn: true,
    ...state.layout };
  const others = peers.map(peer => ({ ...peer,
    title: (isPrefill ? "decode " : "") + nameOf(peer) }));
  for (const box of [own, ...others]) {
    box.isLeft = Boolean(box.isOwn) === isPrefill;
    box.x = box.isLeft ? 1 : width - boxWidth - 1;
    box.width = boxWidth;
    box.height = heightOf(box);
  }
  let y = 0;
  for (const box of others) {
    box.y = y + TITLE;
    y = box.y + box.height + GAP;
  }
  const height = Math.max(y, TITLE + own.height + GAP);
  own.y = TITLE + (height - GAP - TITLE - own.height) / 2;
  const parts = [];
  for (const box of others) parts.push(...link(box, own, isPrefill));
  for (const box of [...others, own]) parts.push(...boxOf(box));
  if (!others.length) parts.push(...alone(state, own, width));
  return drawn("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img",
    "aria-label": inWords(state, peers) }, ...parts);
}

const rankCount = box => box.tp_size * box.pp_size;
const rankStep = box => Math.min(18, RANKS_HEIGHT_MAX / Math.max(1, rankCount(box)));
const roomOf = box => Math.floor((box.width - STRIP - 16) / CHARACTER);
const heightOf = box => Math.max(linesOf(box).length * LINE, rankCount(box) * rankStep(box)) + 16;

// The middle of a rank's outer edge; of the box, while its ranks are not known.
function anchor(box, rank) {
  const x = box.isLeft ? box.x + box.width : box.x;
  const middle = box.y + box.height / 2;
  if (rank === null) return [x, middle];
  return [x, middle + (rank - (rankCount(box) - 1) / 2) * rankStep(box)];
}

// Lines of a box: [text, class]. A peer's layout is not known before its first connection.
function linesOf(box) {
  const room = roomOf(box), isNarrow = room < 14;
  const lines = [];
  if (!box.isOwn && health(box) !== "good") {
    const word = isRetried(box) ? "offline" : box.state;
    lines.push([box.state === "connected" ? "in trouble" : word, health(box)]);
  }
  if (rankCount(box) > 0) {
    lines.push([`TP ${box.tp_size}${isNarrow ? " " : " · "}PP ${box.pp_size}`, ""],
      [isNarrow ? `page ${box.page_size}` : `${box.page_size} tokens per page`, "quiet"]);
  }
  if (box.isOwn) return lines;
  const link = [[...new Set(box.transports)].join(", "),
    box.gb_per_s === null ? "" : `${short(box.gb_per_s)} GB/s`].filter(words => words);
  lines.push(...(isNarrow ? link : [link.join(" · ")]).map(words => [words, "quiet"]));
  if (box.in_flight_count > 0) lines.push([`${box.in_flight_count} moving`, "name"]);
  return lines.filter(([words]) => words).map(([words, kind]) => [fit(words, room), kind]);
}

function boxOf(box) {
  const { x, y, width, height, isLeft } = box;
  const lines = linesOf(box);
  const top = y + height / 2 - (lines.length - 1) * LINE / 2 + 4;
  const parts = [
    ...titleOf(box),
    drawn("rect", { class: box.isOwn ? "box own" : "box", x, y, width, height, rx: 8 }),
    ...lines.map(([words, kind], index) =>
      text(isLeft ? x + 10 : x + STRIP + 10, top + index * LINE, words, kind)),
  ];
  const step = rankStep(box);
  for (let rank = 0; rank < rankCount(box); rank++) {
    const [edge, middle] = anchor(box, rank);
    const cell = drawn("rect", { class: "rank", x: isLeft ? edge - STRIP + 3 : edge + 3,
      y: middle - step / 2 + 1, width: STRIP - 6, height: Math.max(1, step - 2), rx: 3 });
    parts.push(titled(cell, `rank ${rank}: stage ${Math.floor(rank / box.tp_size)}, ` +
      `tensor parallel rank ${rank % box.tp_size}`));
    if (step >= 14) {
      parts.push(text(isLeft ? edge - STRIP / 2 : edge + STRIP / 2, middle + 4, String(rank),
        "quiet", "middle"));
    }
  }
  return parts;
}

// Above its box, at the outer edge; peers with a dot of their health.
function titleOf(box) {
  const { x, y, width, isLeft } = box;
  const side = isLeft ? 1 : -1, edge = isLeft ? x : x + width;
  const room = Math.floor((width + (box.isOwn ? 0 : 30)) / BOLD_CHARACTER);
  const words = text(edge + (box.isOwn ? 0 : 14 * side), y - 6, fit(box.title, room), "name",
    isLeft ? "start" : "end");
  if (box.isOwn) return [words];
  const dot = drawn("circle", { class: `dot ${health(box)}`, cx: edge + 5 * side, cy: y - 10, r: 4 });
  return [titled(dot, condition(box)), titled(words, box.title)];
}

function link(peer, own, isPrefill) {
  const kind = health(peer);
  const isMoving = kind === "good" && peer.in_flight_count > 0;
  const pairs = peer.rank_pairs.length && rankCount(peer) ? peer.rank_pairs : [[null, null]];
  return pairs.map(([prefillRank, decodeRank]) => {
    const [peerRank, ownRank] = isPrefill ? [decodeRank, prefillRank] : [prefillRank, decodeRank];
    const [x1, y1] = anchor(peer, peerRank), [x2, y2] = anchor(own, ownRank);
    // Bytes go from left to right, and so do the dashes.
    const [left, right] = x1 < x2 ? [[x1, y1], [x2, y2]] : [[x2, y2], [x1, y1]];
    const bend = (left[0] + right[0]) / 2;
    return drawn("path", { class: `link ${isMoving ? "moving" : kind}`,
      d: `M${left} C${bend},${left[1]} ${bend},${right[1]} ${right}` });
  });
}

function alone(state, own, width) {
  const words = state.engine_type === "unified" ? ["computes prompts", "itself"]
    : state.role === "prefill" ? ["no decode server", "has come yet"] : ["no prefill server"];
  const x = own.isLeft ? width - 8 : 8;
  return words.map((line, index) =>
    text(x, own.y + own.height / 2 + 4 + index * 16, line, "quiet", own.isLeft ? "end" : "start"));
}

function text(x, y, content, className = "", anchorAt = "start") {
  return drawn("text", { x, y, class: className, "text-anchor": anchorAt }, content);
}

function titled(node, words) {
  node.append(drawn("title", {}, words));
  return node;
}

// ---- in words -----------------------------------------------------------------------------------

function inWords(state, peers) {
  const here = `this ${state.role} server with ${plural(rankCount(state.layout), "rank")}`;
  const there = peers.map(peer => `${nameOf(peer)} ${condition(peer)}, ` +
    `${plural(rankCount(peer), "rank")}, ${peer.in_flight_count} transfers under way`);
  return [here, ...there].join("; ");
}

function showTroubles(state, peers) {
  const troubled = peers.filter(peer => health(peer) !== "good");
  find("troubles").replaceChildren(...troubled.map(peer => {
    const item = element("li", health(peer));
    say(item, `${nameOf(peer)}: ${condition(peer)}` +
      (peer.detail ? `: ${peer.detail}` : ""));
    return item;
  }));
}

function showTable(peers) {
  fillTable(find("links"),
    [["peer"], ["state"], ["transports"], ["layout"], ["under way", true], ["GB/s", true],
      ["transfer"], ["verified"]],
    peers.map(peer => [[pageOf(peer)], [condition(peer)],
      [[...new Set(peer.transports)].join(", ")],
      [rankCount(peer) ? `TP ${peer.tp_size} PP ${peer.pp_size}, page ${peer.page_size}` : ""],
      [String(peer.in_flight_count), true],
      [peer.gb_per_s === null ? "" : short(peer.gb_per_s), true],
      [peer.transfer_mode.join("; ")], [peer.verify]]),
    "none");
}
