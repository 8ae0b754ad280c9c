// The page of `averaging dashboard`. It only reads. Texts from peers go into text nodes and attributes, never into HTML.
// Order: helpers, what the server has sent, tables, plots, the graph, the detail dialog, the connection.

const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const OUTCOMES = { averaged: "averaged", partial: "averaged, members lost", drifted: "averaged, but differs", failed: "failed", no_group: "no group", cancelled: "cancelled" };
const PHASES = { looking: 0.28, checking: 0.55, preparing: 0.55, allreduce: 1, adopting: 0.7 };
const LANES = { direct: "direct", sealed: "direct, encrypted", grpc: "gRPC" };
const PALETTE = ["#3f7fe0", "#d9731a", "#17947a", "#c2417c", "#8a63d2", "#8f7a12", "#4b97b8", "#c9504a"];
const MAX_ROUNDS = 2000, PAGE_OF_ROUNDS = 12, MAX_SPAN = 3600, SILENCE = 15000;

function make(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

function draw(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

function fill(element, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "onclick") element.addEventListener("click", value);
    else if (value !== undefined && value !== false) element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function bytes(count) {
  if (count < 1024) return `${Math.round(count)} B`;
  for (const unit of ["KiB", "MiB"]) {
    count /= 1024;
    if (count < 1024) return `${count.toFixed(count < 10 ? 1 : 0)} ${unit}`;
  }
  return `${(count / 1024).toFixed(1)} GiB`;
}

function seconds(value) {
  if (value < 0.1) return `${Math.round(1000 * value)} ms`;
  if (value < 120) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  return value < 7200 ? `${Math.round(value / 60)} min` : `${(value / 3600).toFixed(1)} h`;
}

const figure = (value) => (value === null ? "?" : value >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(3))));
const percent = (value) => `${(100 * value).toFixed(value < 0.1 ? 1 : 0)} %`;
const clock = (time) => new Date(1000 * time).toLocaleTimeString("en-GB");
const words = (code) => (code === "allreduce" ? "all-reduce" : code.replaceAll("_", " "));
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const counted = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;

// What the server has sent.

const state = { run: null, peers: [], others: [], points: [], rounds: new Map(), graph: null };
const view = { key: "endpoint", ascending: true, listed: PAGE_OF_ROUNDS, detail: null };

function take(update) {
  if (update.full) {
    state.points = [];
    state.rounds.clear();
    state.graph = null;
  }
  state.peers = update.peers.map(shownPeer);
  state.run = shownRun(update, state.peers);
  state.others = othersOf(update);
  state.points.push(...update.points);
  const oldest = update.run.time - MAX_SPAN;
  while (state.points.length && state.points[0][0] < oldest) state.points.shift();
  for (const round of update.rounds) {
    state.rounds.delete(round.id); // so that the last one of the map is the newest
    state.rounds.set(round.id, round);
  }
  for (const id of [...state.rounds.keys()].slice(0, Math.max(0, state.rounds.size - MAX_ROUNDS))) state.rounds.delete(id);
  if (update.graph) state.graph = update.graph;
  show();
}

// The server sends what `averaging top --json` prints. These are the names and texts under which the page shows it.

function shownPeer(peer) {
  const training = peer.training ?? {}, isClient = peer.endpoint.startsWith("client:"); // nobody calls it: no fault
  const names = peer.waits_for.slice(0, 4).join(", ") + (peer.waits_for.length > 4 ? " and others" : "");
  return { ...peer, error: isClient ? "" : peer.error, doing: isClient ? "accepts no calls" : peer.doing,
    late: peer.answers && training.missed ? `late by ${counted(training.missed, "round")}` : "", strategy: training.strategy ?? "",
    terms: training.terms ?? "", grace: training.grace ?? null, global_step: training.global_step ?? null, local_step: training.local_step ?? null,
    rate: training.steps_per_second ?? null, samples: training.samples_per_second ?? null, lane: peer.lanes.join(" and "), waits_for: names,
    bytes_in: peer.bytes_received_per_second, bytes_out: peer.bytes_sent_per_second, waiting: peer.waiting_share,
    version: peer.state_version, rounds: peer.outcomes, drops: peer.dropped };
}

function shownRun(update, peers) {
  const sum = (key) => peers.reduce((total, peer) => total + (peer.answers ? peer[key] ?? 0 : 0), 0);
  const reasons = peers.filter((peer) => peer.error).slice(0, 4).map((peer) => `${peer.endpoint}: ${peer.error}`).join("; ");
  const nobody = reasons && !peers.some((peer) => peer.answers) ? `No peer of the run answers. ${reasons}` : "";
  return { id: update.run_id, time: update.time, problem: nobody || update.notes.map((note) => `${note}.`).join(" "),
    rounds_per_minute: update.rounds_per_minute, waiting: update.waiting_share, terms: update.terms.join("; "),
    phases: update.phase_seconds, drops: update.dropped, bytes_in: sum("bytes_in"), bytes_out: sum("bytes_out") };
}

function othersOf(update) {
  const reader = (kind) => (each) => ({ kind, name: each.name, version: each.version,
    text: `${progress(each)} of ${each.peer}${each.status ? `; ${each.status}` : ""}` });
  return [...update.followers.map(reader("follower")), ...update.explorers.map(reader("explorer"))];
}

function progress({ version, newest }) {
  if (version === null || newest === null) return "waits for the first version";
  return version >= newest ? "has the newest version" : `${newest - version} behind version ${newest}`;
}

function show() {
  if (!state.run) return;
  showRun();
  showPeers();
  showOthers();
  showRounds();
  showGraph();
  plots();
}

function plots() {
  if (!state.run) return;
  showTimeline();
  showBytes();
  showRates();
}

// The figures of the run.

function showRun() {
  const { run, peers } = state;
  const answering = peers.filter((peer) => !peer.error);
  const silent = peers.length - answering.length;
  setText($("run-id"), run.id || "no peer has answered yet");
  document.title = `${silent ? `(${silent} silent) ` : ""}${run.id || "averaging"} · ${counted(answering.length, "peer")}`;
  $("problem").hidden = !run.problem;
  setText($("problem"), run.problem);
  const steps = answering.map((peer) => peer.global_step ?? peer.local_step).filter((step) => step !== null);
  const named = answering.some((peer) => peer.global_step !== null) ? "Global step" : "Local step";
  const [first, last] = [Math.min(...steps), Math.max(...steps)];
  const [rate, samples] = ["rate", "samples"].map((key) => answering.reduce((sum, peer) => sum + (peer[key] ?? 0), 0));
  const phases = Object.entries(run.phases).sort((a, b) => b[1] - a[1]);
  const time = phases.reduce((sum, phase) => sum + phase[1], 0);
  const drops = Object.entries(run.drops).sort((a, b) => b[1] - a[1]);
  const dropped = drops.reduce((sum, drop) => sum + drop[1], 0);
  tiles([
    ["Peers", silent ? `${answering.length} of ${peers.length}` : `${peers.length}`,
      silent ? `${counted(silent, "peer")} ${silent === 1 ? "does" : "do"} not answer` : "all answer", silent > 0],
    ["Rounds per minute", run.rounds_per_minute === null ? "–" : figure(run.rounds_per_minute), [lastRound(), run.terms].filter(Boolean).join("; ")],
    [named, steps.length ? figure(last) : "–", steps.length && first !== last ? `the last peer is at ${figure(first)}` : ""],
    samples ? ["Samples per second", figure(samples), `all peers; ${figure(rate)} steps`] : ["Steps per second", rate ? figure(rate) : "–", "all peers"],
    ["Bytes per second", bytes(run.bytes_out), `sent; ${bytes(run.bytes_in)} received`],
    ["A round takes", time ? seconds(time) : "–", phases.slice(0, 3).map(([phase, took]) => `${words(phase)} ${seconds(took)}`).join(", ")],
    ["Time spent waiting", run.waiting === null ? "–" : percent(run.waiting), "for other peers", run.waiting > 0.3],
    ["Members lost", figure(dropped), drops.map(([code, count]) => `${words(code)} ${count}`).join(", "), dropped > 0],
  ]);
}

function lastRound() {
  const last = newest();
  return last ? `last one ${ago(ended(last))}` : "no round yet";
}

const ended = (round) => round.started + round.seconds;
const ago = (time) => {
  const passed = Math.max(0, state.run.time - time);
  return `${passed < 120 ? `${Math.round(passed)} s` : seconds(passed)} ago`;
};
const newest = () => ordered()[0];
const ordered = () => [...state.rounds.values()].sort((a, b) => b.started - a.started);

function tiles(entries) {
  const list = $("summary");
  entries.forEach(([name, value, note, bad], index) => {
    const tile = list.children[index] ?? list.appendChild(
      make("div", {}, make("dt"), make("dd"), make("dd", { class: "note" })));
    tile.className = bad ? "bad" : "";
    [name, value, note].forEach((text, place) => setText(tile.children[place], text));
  });
}

// The table of peers. Rows are kept and changed, so that focus and selection stay.

const COLUMNS = [
  { key: "endpoint", label: "Peer", text: peerCell },
  { key: "doing", label: "Doing", wide: true, text: doingCell },
  { key: "strategy", label: "Strategy", wide: true, text: (peer, cell) => twoLines(cell, peer.strategy, peer.software) },
  { key: "global_step", label: "Global step", number: true, text: (peer) => peer.global_step === null ? "" : figure(peer.global_step) },
  { key: "local_step", label: "Local step", number: true, text: (peer) => peer.local_step === null ? "" : figure(peer.local_step) },
  { key: "rate", label: "Speed", number: true, text: speedCell },
  { key: "last", label: "Last round", wide: true, sort: (peer) => peer.last ? peer.last.ended : null, text: lastCell },
  { key: "lane", label: "Lane", text: (peer) => LANES[peer.lane] ?? peer.lane },
  { key: "bytes_out", label: "Sent", number: true, text: (peer) => peer.bytes_out === null ? "" : `${bytes(peer.bytes_out)}/s` },
  { key: "bytes_in", label: "Received", number: true, text: (peer) => peer.bytes_in === null ? "" : `${bytes(peer.bytes_in)}/s` },
  { key: "waiting", label: "Waiting", number: true, text: (peer) => peer.waiting === null ? "" : percent(peer.waiting) },
  { key: "version", label: "State", number: true, text: (peer) => peer.version === null ? "" : String(peer.version) },
];

function peerCell(peer, cell) {
  if (!cell.firstChild) cell.append(make("button", { type: "button", class: "link", onclick: () => showPeer(peer.endpoint) }), make("small"));
  setText(cell.children[0], peer.endpoint);
  setText(cell.children[1], peer.role);
}

function speedCell(peer, cell) {
  return twoLines(cell, peer.rate === null ? "" : `${figure(peer.rate)} steps/s`, peer.samples === null ? "" : `${figure(peer.samples)} samples/s`);
}

function doingCell(peer, cell) {
  if (peer.error) return twoLines(cell, `✗ does not answer: ${peer.error}`, peer.last ? `last round ${ago(peer.last.ended)}` : "");
  const more = [peer.late && `${peer.late}, joins a later one`, peer.waits_for && `waits for ${peer.waits_for}`].filter(Boolean);
  return twoLines(cell, peer.doing, more.join("; "));
}

function twoLines(cell, first, second) {
  if (!cell.firstChild) cell.append(make("span", {}, make("span"), make("small")));
  setText(cell.firstChild.children[0], first);
  setText(cell.firstChild.children[1], second);
  cell.classList.toggle("blank", !first && !second);
}

function lastCell(peer, cell) {
  if (!cell.firstChild) cell.append(make("span", { class: "last" }, make("span", { class: "tag" }), make("span")));
  const [tag, when] = cell.firstChild.childNodes;
  cell.firstChild.hidden = !peer.last;
  cell.classList.toggle("blank", !peer.last);
  if (!peer.last) return;
  tag.className = `tag ${peer.last.outcome}`;
  setText(tag, OUTCOMES[peer.last.outcome] ?? words(peer.last.outcome));
  setText(when, ago(peer.last.ended));
}

function preparePeers() {
  for (const column of COLUMNS) {
    const button = make("button", { type: "button", onclick: () => sortBy(column.key) }, column.label);
    $("peer-head").append(make("th", { scope: "col", class: column.number && "number", "data-key": column.key }, button));
    for (const [ascending, arrow] of [[true, "↑"], [false, "↓"]]) {
      $("sort").append(make("option", { value: `${column.key} ${ascending}` }, `${column.label} ${arrow}`));
    }
  }
}

function sortBy(key, ascending = key === view.key ? !view.ascending : true) {
  view.key = key;
  view.ascending = ascending;
  showPeers();
}

function compare(first, second) {
  const column = COLUMNS.find((each) => each.key === view.key);
  const [a, b] = [first, second].map((peer) => (column.sort ?? ((each) => each[column.key]))(peer));
  if (a === b) return first.endpoint.localeCompare(second.endpoint, "en", { numeric: true });
  if (a === null || b === null) return a === null ? 1 : -1; // what is not known stands last
  const order = typeof a === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
  return view.ascending ? order : -order;
}

const rows = new Map();

function showPeers() {
  for (const head of $("peer-head").children) {
    if (head.dataset.key === view.key) head.setAttribute("aria-sort", view.ascending ? "ascending" : "descending");
    else head.removeAttribute("aria-sort");
  }
  $("sort").value = `${view.key} ${view.ascending}`;
  const sought = $("filter").value.trim().toLowerCase();
  const shown = state.peers.filter((peer) => !sought || searchable(peer).includes(sought)).sort(compare);
  for (const [endpoint, row] of rows) {
    if (shown.some((peer) => peer.endpoint === endpoint)) continue;
    row.remove();
    rows.delete(endpoint);
  }
  const body = $("peer-rows");
  shown.forEach((peer, place) => {
    const row = rows.get(peer.endpoint) ?? newRow(peer);
    showRow(row, peer);
    if (body.children[place] !== row) body.insertBefore(row, body.children[place] ?? null);
  });
  setText($("shown"), sought ? `${shown.length} of ${counted(state.peers.length, "peer")}` : "");
}

const searchable = (peer) => [peer.endpoint, peer.role, peer.doing, peer.error, peer.strategy, peer.lane, peer.waits_for, peer.software,
  peer.last ? OUTCOMES[peer.last.outcome] : ""].join(" ").toLowerCase();

function newRow(peer) {
  const cells = COLUMNS.map((column) => make("td",
    { class: [column.number && "number", column.wide && "wide"].filter(Boolean).join(" "), "data-label": column.label }));
  const row = make("tr", {}, ...cells);
  rows.set(peer.endpoint, row);
  return row;
}

function showRow(row, peer) {
  row.classList.toggle("down", Boolean(peer.error));
  COLUMNS.forEach((column, place) => {
    const cell = row.children[place];
    const text = column.text(peer, cell);
    if (text !== undefined) {
      setText(cell, text);
      cell.classList.toggle("blank", !text);
    }
    if (column.key === "doing") {
      cell.classList.toggle("fault", Boolean(peer.error));
      cell.colSpan = peer.error ? COLUMNS.length - 1 : 1;
    } else if (place) cell.hidden = Boolean(peer.error);
    if (column.key === "lane") cell.className = peer.lane in LANES ? peer.lane : peer.lane ? "" : "blank";
  });
}

function showOthers() {
  $("others").hidden = !state.others.length;
  if (!state.others.length) return;
  const head = ["What", "Name", "Version", "State"].map((name) => make("th", { scope: "col" }, name));
  const lines = state.others.map((other) => make("tr", {}, make("td", {}, other.kind), make("td", {}, other.name),
    make("td", {}, other.version ?? ""), make("td", {}, other.text)));
  $("others-table").replaceChildren(make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...lines));
}

// The list of rounds.

function showRounds() {
  const rounds = ordered().filter((round) => !$("faults").checked || round.fault);
  const shown = rounds.slice(0, view.listed);
  const list = $("round-list");
  const kept = new Map([...list.children].map((item) => [item.dataset.id, item]));
  const items = shown.map((round) => {
    const item = kept.get(round.id) ?? make("li", { "data-id": round.id }, make("time"), make("span"),
      make("button", { type: "button", class: "link", onclick: () => showDetail(round.id) }));
    const kind = kindOf(round);
    setText(item.children[0], clock(round.started));
    item.children[1].className = kind;
    setText(item.children[1], kind === "partial" ? "members lost" : OUTCOMES[kind] ?? kind);
    setText(item.children[2], round.text);
    return item;
  });
  if (!items.length) items.push(make("li", {}, $("faults").checked ? "No round with a fault." : "No round yet."));
  if (items.length !== list.children.length || items.some((item, place) => list.children[place] !== item)) {
    const focused = document.activeElement;
    list.replaceChildren(...items);
    if (list.contains(focused)) focused.focus({ preventScroll: true });
  }
  $("more").hidden = rounds.length <= view.listed;
}

const kindOf = (round) => (round.outcome === "averaged" && round.dropped ? "partial" : round.outcome);

// Plots: canvases, which are drawn anew. What is under the pointer comes from `targets`.

const targets = new Map();

function surface(id, height, label) {
  const canvas = $(id);
  canvas.style.height = `${height}px`;
  const width = canvas.clientWidth, scale = window.devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  canvas.setAttribute("aria-label", label);
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = "11.5px system-ui, sans-serif";
  pen.textBaseline = "middle";
  targets.set(canvas, []);
  return { canvas, pen, width, height };
}

function timeAxis({ pen, height }, left, right, now, span) {
  const step = [10, 30, 60, 300, 600, 1800].find((each) => ((right - left) * each) / span > 70) ?? 3600;
  pen.lineWidth = 1;
  for (let time = Math.ceil((now - span) / step) * step; time <= now; time += step) {
    const x = Math.round(right - ((now - time) / span) * (right - left)) + 0.5;
    pen.strokeStyle = colour("line");
    line(pen, x, 0, x, height - 18);
    pen.fillStyle = colour("muted");
    pen.textAlign = x > right - 22 ? "right" : x < left + 22 ? "left" : "center";
    pen.fillText(step < 60 ? clock(time) : clock(time).slice(0, 5), x > right - 22 ? right : x, height - 8);
  }
}

function line(pen, ...places) {
  pen.beginPath();
  for (let place = 0; place < places.length; place += 2) pen.lineTo(places[place], places[place + 1]);
  pen.stroke();
}

function showTimeline() {
  const span = Number($("span").value), now = state.run.time;
  const names = state.peers.map((peer) => peer.endpoint);
  const recent = [...state.rounds.values()].filter((round) => ended(round) > now - span);
  const others = new Set(recent.flatMap((round) => round.receipts.map((receipt) => receipt.peer)).filter((name) => !names.includes(name)));
  const lanes = [...names, ...others].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
  const narrow = $("timeline").clientWidth < 620;
  const bar = lanes.length > 20 ? 8 : 14;
  const row = narrow ? bar + 18 : bar + (lanes.length > 20 ? 4 : 8);
  const failures = recent.filter((round) => round.fault).length;
  const paper = surface("timeline", Math.max(1, lanes.length) * row + 24,
    `Timeline of ${counted(recent.length, "round")} of ${counted(lanes.length, "peer")}, ${failures} with a fault`);
  const { pen, width, canvas } = paper;
  const left = narrow ? 0 : 172, x = (time) => left + Math.max(0, 1 - (now - time) / span) * (width - left);
  timeAxis(paper, left, width, now, span);
  const down = new Set(state.peers.filter((peer) => peer.error).map((peer) => peer.endpoint));
  const tops = new Map(lanes.map((name, place) => [name, place * row + (narrow ? 17 : 4)]));
  for (const [name, top] of tops) {
    pen.fillStyle = colour("line");
    pen.globalAlpha = 0.45;
    pen.fillRect(left, top, width - left, bar);
    pen.globalAlpha = 1;
    pen.textAlign = "left";
    pen.fillStyle = colour(down.has(name) ? "failed" : "text");
    pen.fillText(cut(pen, (down.has(name) ? "✗ " : "") + name, (narrow ? width : left) - 10), 0, narrow ? top - 8 : top + bar / 2);
  }
  const colours = Object.fromEntries(Object.keys(OUTCOMES).map((name) => [name, colour(name)]));
  for (const round of recent) for (const receipt of round.receipts) {
    const top = tops.get(receipt.peer), kind = receipt.outcome === "averaged" && receipt.dropped ? "partial" : receipt.outcome;
    const begin = x(receipt.started), end = Math.max(begin + 2, x(receipt.started + receipt.seconds));
    pen.fillStyle = colours[kind] ?? colours.failed;
    let from = receipt.started;
    for (const [phase, took] of receipt.phases) {
      pen.globalAlpha = PHASES[phase] ?? 0.8;
      pen.fillRect(x(from), top, Math.max(0.75, x(from + took) - x(from)), bar);
      from += took;
    }
    pen.globalAlpha = PHASES.looking;
    if (from < receipt.started + receipt.seconds - 0.01 || !receipt.phases.length) pen.fillRect(x(from), top, end - x(from), bar);
    pen.globalAlpha = 1;
    pen.fillRect(begin, top, 1, bar);
    if (kind !== "averaged") pen.fillRect(begin, top + bar - 3, end - begin, 3); // not by colour alone
    targets.get(canvas).push({ left: begin - 2, right: end + 2, top, bottom: top + bar, id: round.id,
      text: `${receipt.peer}\n${clock(receipt.started)}, round ${receipt.round}: ${OUTCOMES[kind] ?? kind} in ${seconds(receipt.seconds)}\n` +
        receipt.phases.map(([phase, took]) => `${words(phase)} ${seconds(took)}`).join(", ") });
  }
}

function cut(pen, text, width) {
  if (pen.measureText(text).width <= width) return text;
  while (text.length > 4 && pen.measureText(`${text}…`).width > width) text = text.slice(0, -1);
  return `${text}…`;
}

function chart(id, series, format, base = 1) {
  const span = Number($("span").value), now = state.run.time;
  const recent = series.map((each) => ({ ...each, points: each.points.filter((point) => point[0] > now - span) }));
  const most = Math.max(0, ...recent.flatMap((each) => each.points.map((point) => point[1] ?? 0)));
  const latest = recent.slice(0, 8).map((each) => `${each.name} ${format(each.points.at(-1)?.[1] ?? 0)}`).join(", ");
  const paper = surface(id, 170, `Curves of the last ${seconds(span)}; now ${latest || "nothing"}`);
  const { pen, width, height, canvas } = paper, left = 66, bottom = height - 22;
  const top = ceiling(most, base), y = (value) => bottom - (value / top) * (bottom - 8), x = (time) => width - ((now - time) / span) * (width - left);
  timeAxis(paper, left, width, now, span);
  for (const part of [0, 0.5, 1]) {
    pen.strokeStyle = colour("line");
    line(pen, left, Math.round(y(top * part)) + 0.5, width, Math.round(y(top * part)) + 0.5);
    pen.fillStyle = colour("muted");
    pen.textAlign = "right";
    pen.fillText(format(top * part), left - 7, y(top * part));
  }
  for (const each of recent) {
    pen.strokeStyle = each.colour;
    pen.lineWidth = 1.6;
    pen.setLineDash(each.dash ?? []);
    pen.beginPath();
    let before = null;
    for (const [time, value] of each.points) {
      if (value !== null && value !== undefined) {
        if (before !== null && time - before < 15) pen.lineTo(x(time), y(value));
        else pen.moveTo(x(time), y(value));
        before = time;
      } else before = null;
    }
    pen.stroke();
    pen.setLineDash([]);
  }
  const times = [...new Set(recent.flatMap((each) => each.points.map((point) => point[0])))].sort((a, b) => a - b);
  times.forEach((time, place) => {
    const near = [(times[place - 1] ?? time - 4), (times[place + 1] ?? time + 4)].map((other) => (x(other) + x(time)) / 2);
    const values = recent.map((each) => [each.name, each.points.find((point) => point[0] === time)?.[1]]).filter((entry) => entry[1] !== null && entry[1] !== undefined);
    const first = values.sort((a, b) => b[1] - a[1]).slice(0, 10).map(([name, value]) => `${name}: ${format(value)}`);
    if (values.length > 10) first.push(`and ${values.length - 10} more`);
    targets.get(canvas).push({ left: near[0], right: near[1], top: 0, bottom: height, text: [clock(time), ...first].join("\n") });
  });
}

function ceiling(value, base) {
  if (!value) return base;
  if (base > 1) {
    const unit = base ** Math.max(0, Math.floor(Math.log(value) / Math.log(base)));
    return unit * ceiling(value / unit, 1);
  }
  const size = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 6, 8, 10].map((each) => each * size).find((each) => each >= value) ?? 10 * size;
}

function showBytes() {
  const series = [
    { name: "sent", colour: colour("out"), points: state.points.map((point) => [point[0], point[2]]) },
    { name: "received", colour: colour("in"), dash: [5, 3], points: state.points.map((point) => [point[0], point[1]]) },
  ];
  legend($("bytes-legend"), series);
  chart("bytes", series, (value) => `${bytes(value)}/s`, 1024);
}

function showRates() {
  const names = [...new Set(state.points.flatMap((point) => Object.keys(point[3])))].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
  const series = names.map((name, place) => ({ name, colour: PALETTE[place % PALETTE.length], dash: place < PALETTE.length ? [] : [4, 2],
    points: state.points.map((point) => [point[0], point[3][name]]) }));
  legend($("rate-legend"), series.length > 8 ? [] : series);
  chart("rate", series, figure);
}

function legend(list, entries) {
  const key = entries.map((entry) => entry.name + entry.colour).join();
  if (list.dataset.key === key) return;
  list.dataset.key = key;
  list.replaceChildren(...entries.map((entry) => make("li", {}, draw("svg", { viewBox: "0 0 11 11", "aria-hidden": "true" },
    entry.dash?.length
      ? draw("path", { d: "M0 5.5H11", stroke: entry.colour, "stroke-width": 2.5, "stroke-dasharray": "4 2.5", fill: "none" })
      : draw("rect", { width: 11, height: 11, rx: 2, fill: entry.colour, "fill-opacity": entry.opacity ?? 1 })), entry.name)));
}

function showLegends() {
  const outcomes = Object.entries(OUTCOMES).map(([name, text]) => ({ name: text, colour: colour(name) }));
  const phases = [["looking", "looking for a group"], ["preparing", "checking and preparing"], ["allreduce", "all-reduce"], ["adopting", "adopting"]];
  legend($("timeline-legend"), [...outcomes, ...phases.map(([name, text]) => ({ name: text, colour: colour("text"), opacity: PHASES[name] * 0.8 }))]);
  legend($("graph-legend"), Object.entries(LANES).map(([name, text]) => ({ name: text, colour: colour(name), dash: name === "grpc" ? [1] : [] }))
    .concat({ name: "lane not known", colour: colour("none") }));
}

function target(event) {
  const box = event.currentTarget.getBoundingClientRect();
  const [x, y] = [event.clientX - box.left, event.clientY - box.top];
  return targets.get(event.currentTarget)?.findLast((each) => x >= each.left && x <= each.right && y >= each.top && y <= each.bottom);
}

function preparePlots() {
  for (const canvas of document.querySelectorAll("canvas")) {
    canvas.addEventListener("pointermove", (event) => {
      const found = target(event);
      canvas.classList.toggle("over", Boolean(found?.id));
      tip(found?.text, event.clientX, event.clientY);
    });
    canvas.addEventListener("pointerleave", () => tip());
    canvas.addEventListener("click", (event) => {
      const found = target(event);
      if (found?.id) showDetail(found.id);
    });
  }
  new ResizeObserver(() => {
    drawnGraph = "";
    plots();
    showGraph();
  }).observe($("timeline-plot"));
}

function tip(text, x = 0, y = 0) {
  const box = $("tip");
  box.hidden = !text;
  if (!text) return;
  setText(box, text);
  const { width, height } = box.getBoundingClientRect();
  box.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - width - 6))}px`;
  box.style.top = `${y + 18 + height > innerHeight ? y - height - 10 : y + 18}px`;
}

// The graph of one round: an arrow leads from a member to the reducer of some of its elements.

let drawnGraph = "";

function showGraph() {
  if (!state.graph || drawnGraph === state.graph.key) return;
  drawnGraph = state.graph.key;
  setText($("graph-round"), `${state.graph.name}. The level in a circle is the share of all elements that the member averages; an arrow leads to ` +
    `the member that averages, and is as thick as the bytes.${state.graph.nodes.length > 16 ? " Choose a member to see its arrows." : ""}`);
  const focused = document.activeElement?.dataset?.node;
  $("graph").replaceChildren(graphOf(state.graph));
  if (focused) $("graph").querySelector(`[data-node="${CSS.escape(focused)}"]`)?.focus();
  $("graph-details").hidden = false;
  $("graph-table").replaceChildren(...graphTable(state.graph));
}

function graphOf(graph) {
  const count = graph.nodes.length, radius = count > 24 ? 7 : count > 12 ? 13 : 22;
  const narrow = $("graph").clientWidth < 430, [width, height, ring] = narrow ? [340, 320, 112] : [540, 430, 165], [cx, cy] = [width / 2, height / 2];
  const places = graph.nodes.map((_, place) => {
    const angle = (2 * Math.PI * place) / count - Math.PI / 2;
    return count === 1 ? [cx, cy] : [cx + ring * Math.cos(angle), cy + ring * Math.sin(angle), angle];
  });
  const most = Math.max(1, ...graph.edges.map((edge) => edge[2]));
  const title = `${graph.name}: ${graph.nodes.filter((node) => node.share > 0).map((node) => `${node.endpoint} averages ${percent(node.share)}`).slice(0, 12).join(", ")}`;
  const paths = graph.edges.filter((edge) => edge[2] > 0).map((edge) => arrow(edge, places, radius, most, graph));
  const nodes = graph.nodes.map((node, place) => nodeOf(node, place, places[place], radius, count, paths, width));
  const picture = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": title }, draw("defs", {}, ...Object.keys({ ...LANES, none: "" }).map((lane) =>
    draw("marker", { id: `to-${lane}`, viewBox: "0 0 8 8", refX: 6, refY: 4, markerWidth: 9, markerHeight: 9, markerUnits: "userSpaceOnUse", orient: "auto" },
      draw("path", { d: "M0 0.5L7 4L0 7.5z", fill: colour(lane), stroke: "none", style: undefined })))),
  ...paths.map((path) => path.element), ...nodes);
  for (const shape of picture.querySelectorAll("marker path")) shape.style.cssText = `fill:${shape.getAttribute("fill")};stroke:none`;
  if (count > 16) focusOn(paths, null, true);
  return picture;
}

function arrow([from, to, count, lane, reason], places, radius, most, graph) {
  const [[x1, y1], [x2, y2]] = [places[from], places[to]];
  const length = Math.hypot(x2 - x1, y2 - y1) || 1, [ux, uy] = [(x2 - x1) / length, (y2 - y1) / length];
  const bend = 0.1 * length, gap = radius + 3;
  const middle = [(x1 + x2) / 2 - uy * bend, (y1 + y2) / 2 + ux * bend];
  const towards = (x, y, distance) => {
    const far = Math.hypot(middle[0] - x, middle[1] - y) || 1;
    return `${(x + ((middle[0] - x) / far) * distance).toFixed(1)} ${(y + ((middle[1] - y) / far) * distance).toFixed(1)}`;
  };
  const kind = lane in LANES ? lane : "none";
  const element = draw("path", { class: kind, d: `M${towards(x1, y1, gap)}Q${middle[0].toFixed(1)} ${middle[1].toFixed(1)} ${towards(x2, y2, gap)}`,
    "stroke-width": (0.8 + 3.4 * (count / most)).toFixed(1), "marker-end": `url(#to-${kind})` });
  element.append(draw("title", {}, `${graph.nodes[from].endpoint} → ${graph.nodes[to].endpoint}: ${bytes(count)}, ${LANES[lane] ?? "lane unknown"}${reason ? ` (${reason})` : ""}`));
  return { element, from, to };
}

function nodeOf(node, place, [x, y, angle = 0], radius, count, paths, width) {
  const text = `${node.endpoint} averages ${percent(node.share)} of the elements; weight ${figure(node.weight)}${node.weight_unit && ` ${node.weight_unit}`}${node.mode === "node" ? "" : `; ${node.mode}`}`;
  const level = radius * 2 * Math.min(1, node.share), clip = `level-${place}`;
  const group = draw("g", { tabindex: 0, role: "img", "aria-label": text, "data-node": node.endpoint },
    draw("title", {}, text), draw("clipPath", { id: clip }, draw("circle", { cx: x, cy: y, r: radius })),
    draw("circle", { class: node.share > 0 ? "node" : "node idle", cx: x, cy: y, r: radius }),
    draw("rect", { class: "fill", x: x - radius, y: y + radius - level, width: 2 * radius, height: level, "clip-path": `url(#${clip})` }));
  if (count <= 12) {
    const below = Math.sin(angle) > -0.2;
    const [name, port] = short(node.endpoint);
    const anchor = Math.abs(Math.cos(angle)) < 0.3 || count === 1 ? "middle" : Math.cos(angle) > 0 ? "end" : "start";
    const at = anchor === "middle" ? x : anchor === "end" ? Math.min(width - 4, x + 95) : Math.max(4, x - 95);
    group.append(draw("text", { x, y: y + 4, "text-anchor": "middle", class: "share" }, percent(node.share)),
      draw("text", { x: at, y: below ? y + radius + 16 : y - radius - 8, "text-anchor": anchor }, name + port));
  }
  const here = () => focusOn(paths, place, count > 16), away = () => focusOn(paths, null, count > 16);
  for (const [event, handler] of [["pointerenter", here], ["focus", here], ["pointerleave", away], ["blur", away]]) group.addEventListener(event, handler);
  group.addEventListener("click", () => showPeer(node.endpoint));
  group.addEventListener("keydown", (event) => event.key === "Enter" && showPeer(node.endpoint));
  return group;
}

function focusOn(paths, place, crowded) {
  for (const { element, from, to } of paths) element.classList.toggle("faint", place === null ? crowded : from !== place && to !== place);
}

function short(endpoint) {
  const port = endpoint.match(/:\d+$/)?.[0] ?? "";
  const name = endpoint.slice(0, endpoint.length - port.length);
  return [name.length > 20 ? `${name.slice(0, 9)}…${name.slice(-9)}` : name, port];
}

function graphTable(graph) {
  const head = ["Member", "Averages", "Sends to", "Bytes", "Lane"].map((name) => make("th", { scope: "col", class: name === "Bytes" && "number" }, name));
  const lines = graph.edges.slice(0, 300).map(([from, to, count, lane, reason]) => make("tr", {}, make("td", {}, graph.nodes[from].endpoint),
    make("td", {}, percent(graph.nodes[from].share)), make("td", {}, graph.nodes[to].endpoint), make("td", { class: "number" }, bytes(count)),
    make("td", {}, LANES[lane] ?? lane, reason ? make("small", {}, reason) : null)));
  return [make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...lines)];
}

// The dialog with the receipts of a round, or with one peer.

async function showDetail(id) {
  view.detail = id;
  openDetail("Receipts", make("p", {}, "Loading …"));
  try {
    const reply = await fetch(`rounds/${encodeURIComponent(id)}`, { cache: "no-store" });
    const found = await reply.json();
    if (view.detail !== id) return;
    if (!reply.ok) throw new Error(found.error);
    openDetail(`Receipts of ${found.name}`, make("p", { class: "words" }, found.text),
      found.missing.length ? make("p", { class: "words" }, `No receipt is known of ${found.missing.join(", ")}.`) : "", ...found.receipts.flatMap(receiptOf));
  } catch (error) {
    if (view.detail === id) openDetail("Receipts", make("p", { class: "notice" }, `No receipts: ${error.message || error}`));
  }
}

function receiptOf(receipt) {
  const phases = Object.entries(receipt.phases);
  const facts = [["outcome", OUTCOMES[receipt.outcome] ?? receipt.outcome], ["in words", receipt.words]];
  facts.push(["began", clock(receipt.started)], ["took", seconds(receipt.seconds)]);
  if (phases.length) facts.push(["phases", phases.map(([name, took]) => `${words(name)} ${seconds(took)}`).join(", ")]);
  if (receipt.role) facts.push(["role", receipt.role]);
  facts.push(["bytes", `${bytes(receipt.bytes_sent)} sent, ${bytes(receipt.bytes_received)} received`]);
  if (receipt.topic) facts.push(["averaged", receipt.topic]);
  if (receipt.digest) facts.push(["averages", `digest ${receipt.digest}`]);
  if (receipt.state) facts.push(["state", `digest ${receipt.state}, version ${receipt.state_version}`]);
  const list = make("dl", { class: "facts" }, ...facts.flatMap(([name, text]) => [make("dt", {}, name), make("dd", {}, text)]));
  const head = ["Member", "Role", "Weight", "Averages", "Sent to it", "Received", "Lane"].map((name) => make("th", { scope: "col" }, name));
  const lines = receipt.accounts.map((account) => make("tr", {},
    make("td", {}, account.endpoint, account.endpoint === receipt.endpoint ? make("small", {}, "this peer") : null), make("td", {}, account.role),
    make("td", {}, `${figure(account.weight)} ${account.weight_unit}`, receipt.late[account.endpoint] ? make("small", {}, receipt.late[account.endpoint]) : null), make("td", {}, percent(account.share)),
    make("td", {}, bytes(account.bytes_sent)),
    make("td", {}, bytes(account.bytes_received)), make("td", {}, LANES[account.lane] ?? account.lane, account.lane_reason ? make("small", {}, account.lane_reason) : null)));
  const table = lines.length ? [make("div", { class: "scroll" }, make("table", {}, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...lines)))] : [];
  return [make("h3", {}, receipt.endpoint), phaseBar(receipt, phases), list, ...table];
}

function phaseBar(receipt, phases) {
  const whole = phases.reduce((sum, phase) => sum + phase[1], 0) || 1;
  let from = 0;
  const parts = phases.map(([name, took]) => {
    const part = draw("rect", { x: (1000 * from) / whole, width: (1000 * took) / whole, height: 14, fill: colour(kindOf({ ...receipt, dropped: receipt.dropped.length })), "fill-opacity": PHASES[name] ?? 0.8 },
      draw("title", {}, `${words(name)} ${seconds(took)}`));
    from += took;
    return part;
  });
  return make("div", { class: "phases", "aria-hidden": "true" }, draw("svg", { viewBox: "0 0 1000 14", preserveAspectRatio: "none" }, ...parts));
}

function showPeer(endpoint) {
  const peer = state.peers.find((each) => each.endpoint === endpoint);
  view.detail = null;
  const facts = !peer ? [] : [["Role", peer.role], ["Doing", peer.error ? `does not answer: ${peer.error}` : peer.doing], ["Waits for", peer.waits_for],
    ["Late", peer.late && `${peer.late}; it joins a later one`], ["Strategy", peer.strategy], ["Rounds begin", peer.terms],
    ["Grace period", peer.grace === null ? "" : seconds(peer.grace)], ["Weight", peer.weight], ["Software", peer.software], ["Last round", peer.last?.text ?? "none yet"],
    ["Speed", [[peer.rate, "steps/s"], [peer.samples, "samples/s"]].filter((each) => each[0] !== null).map(([value, unit]) => `${figure(value)} ${unit}`).join(", ")],
    ...COLUMNS.slice(3).filter((column) => !["last", "rate"].includes(column.key)).map((column) => [column.label, column.text(peer)])];
  for (const [name, counts] of [["Rounds", peer?.rounds], ["Members lost", peer?.drops]]) {
    const text = Object.entries(counts ?? {}).map(([code, count]) => `${words(code)} ${count}`).join(", ");
    if (text) facts.push([name, text]);
  }
  const list = make("dl", { class: "facts" }, ...facts.filter((fact) => fact[1]).flatMap(([name, text]) => [make("dt", {}, name), make("dd", {}, text)]));
  const rounds = ordered().filter((round) => round.receipts.some((receipt) => receipt.peer === endpoint)).slice(0, 20);
  const lines = rounds.map((round) => make("li", {}, `${clock(round.started)} `, make("button", { type: "button", class: "link", onclick: () => showDetail(round.id) }, round.text)));
  openDetail(endpoint, list, make("h3", {}, "Its last rounds"), lines.length ? make("ul", { class: "plain" }, ...lines) : make("p", {}, "No receipt of it is known."));
}

function openDetail(title, ...content) {
  setText($("detail-title"), title);
  $("detail-body").replaceChildren(...content);
  if (!$("detail").open) $("detail").showModal();
  $("detail").scrollTop = 0;
}

// The connection to the dashboard's server. A lost one is shown, and tried again.

const link = { source: null, attempts: 0, timer: 0, silence: 0 };

function connect() {
  clearTimeout(link.timer);
  link.source?.close();
  report("waiting", link.attempts ? "connecting again" : "connecting to the dashboard");
  const source = new EventSource("events");
  link.source = source;
  watchSilence();
  source.addEventListener("update", (event) => {
    link.attempts = 0;
    watchSilence();
    report("live", "live");
    take(JSON.parse(event.data));
  });
  source.addEventListener("refused", (event) => lost(JSON.parse(event.data).reason));
  source.addEventListener("error", () => lost("the connection to the dashboard is lost"));
}

function watchSilence() {
  clearTimeout(link.silence);
  link.silence = setTimeout(() => lost("the dashboard has sent nothing for 15 s"), SILENCE);
}

function lost(why) {
  link.source?.close();
  clearTimeout(link.silence);
  clearTimeout(link.timer);
  const pause = Math.min(10, 2 ** link.attempts);
  link.attempts += 1;
  const again = Date.now() + 1000 * pause;
  const tick = () => {
    const left = Math.ceil((again - Date.now()) / 1000);
    if (left <= 0) return connect();
    report("lost", why, `; next attempt in ${left} s`); // a screen reader need not count along
    link.timer = setTimeout(tick, 1000);
  };
  tick();
}

function report(kind, text, more = "") {
  $("connection").className = `connection ${kind}`;
  document.body.classList.toggle("stale", kind === "lost");
  $("retry").hidden = kind !== "lost";
  setText($("connection-text"), text);
  setText($("connection-more"), more);
}

// The page itself.

function theme(choice) {
  if (choice) document.documentElement.dataset.theme = choice;
  else delete document.documentElement.dataset.theme;
  $("theme").value = choice;
  for (const list of document.querySelectorAll(".legend")) list.dataset.key = "";
  drawnGraph = "";
  showLegends();
  show();
}

function stored() {
  try {
    return localStorage.getItem("theme") ?? "";
  } catch {
    return ""; // the browser keeps nothing for this page
  }
}

$("theme").addEventListener("change", (event) => {
  try {
    localStorage.setItem("theme", event.target.value);
  } catch { /* it holds until the page is closed */ }
  theme(event.target.value);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => theme($("theme").value));
$("filter").addEventListener("input", showPeers);
$("sort").addEventListener("change", (event) => {
  const [key, ascending] = event.target.value.split(" ");
  sortBy(key, ascending === "true");
});
$("span").addEventListener("change", plots);
$("faults").addEventListener("change", showRounds);
$("more").addEventListener("click", () => {
  view.listed += 4 * PAGE_OF_ROUNDS;
  showRounds();
});
$("retry").addEventListener("click", () => {
  link.attempts = 0;
  connect();
});
$("close").addEventListener("click", () => $("detail").close());
$("detail").addEventListener("close", () => { view.detail = null; });
$("detail").addEventListener("click", (event) => event.target === $("detail") && $("detail").close());
preparePeers();
preparePlots();
theme(stored());
connect();
