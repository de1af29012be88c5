// Which pool is shown, where its numbers come from, and what the page says when they do not come.
"use strict";

const SLOW_MS = 10000; // what changes slowly is asked for this often
const LATE_MS = 25000; // a stream that says nothing for so long is broken: the API says something every 10 s
const AGAIN_MS = 3000;
const FRESH_MS = 1500;

const page = { pools: [], key: null, window: "1h", heard: 0, explained: 0, age: 0, stale: false, stream: null, token: sessionStorage.getItem("kvpool-token"), seen: new Set() };

class Refused extends Error {
  constructor(status, detail) { super(detail); this.status = status; }
}

async function ask(path, options = {}) {
  const headers = page.token ? { Authorization: `Bearer ${page.token}` } : {};
  const answer = await fetch(path, { ...options, headers, cache: "no-store", signal: options.signal ?? AbortSignal.timeout(LATE_MS) });
  if (!answer.ok) {
    const problem = await answer.json().catch(() => ({}));
    throw new Refused(answer.status, problem.detail || answer.statusText);
  }
  return answer;
}

const json = async (path) => (await ask(path)).json();

function live(state, text) {
  if ($("live").textContent !== text) $("live").textContent = text;
  $("live").dataset.state = state;
}

function banner(text, kind = "error") {
  $("banner").hidden = !text;
  $("banner").dataset.kind = kind;
  if ($("banner").textContent !== text) $("banner").textContent = text;
}

function failed(error) {
  if (error.name === "AbortError") return;
  if (error instanceof Refused && error.status === 401) {
    $("access").hidden = false;
    $("main").hidden = $("none").hidden = true;
    banner(page.token ? error.message : "");
    live("away", "Token needed");
    return;
  }
  live("away", "Not connected");
  banner(`${error instanceof Refused ? error.message : "The API does not answer"}. What is shown is the last that was known; asking again.`);
}

async function loadPools() {
  const pools = [];
  let next = null;
  do {
    const answer = await json(`v1/pools?limit=500${next ? `&continue=${encodeURIComponent(next)}` : ""}`);
    pools.push(...answer.items.map((p) => `${p.namespace}/${p.name}`));
    next = answer.next;
  } while (next);
  $("access").hidden = true;
  banner("");
  $("none").hidden = pools.length > 0;
  $("main").hidden = pools.length === 0;
  if (pools.join() !== page.pools.join()) {
    page.pools = pools;
    $("pool").replaceChildren(...pools.map((key) => make("option", key.replace(/^local\//, ""), { value: key })));
    $("pool").disabled = pools.length === 0;
  }
  if (!pools.length) { page.key = null; page.stream?.abort(); live("live", "Connected"); return; }
  const wanted = decodeURIComponent(location.hash.slice(1));
  const key = pools.includes(wanted) ? wanted : pools.includes(page.key) ? page.key : pools[0];
  $("pool").value = key;
  if (key !== page.key) show(key);
}

const base = () => `v1/pools/${page.key}`;

function show(key) {
  page.key = key;
  page.seen.clear();
  $("events").replaceChildren();
  $("events-empty").hidden = false;
  $("main").setAttribute("aria-busy", "true");
  document.title = `${key.replace(/^local\//, "")} · kvpool`;
  live("loading", "Loading");
  follow(key);
  loadSlow();
}

// The sentence is to say what the large number says.
async function loadExplanation() {
  const key = page.key;
  page.explained = Date.now();
  const explained = await json(`${base()}/explain`).catch(() => null);
  if (explained && key === page.key) drawExplanation(explained);
}

async function loadSlow() {
  const key = page.key;
  if (!key) return;
  const [explained, nodes, models, misses, history] = await Promise.all([
    json(`${base()}/explain`), json(`${base()}/nodes`), json(`${base()}/namespaces`), json(`${base()}/misses`),
    json(`${base()}/history?window=${page.window}&step=${{ "15m": "10s", "1h": "10s", "24h": "15m", "7d": "1h" }[page.window]}`),
  ]).catch((error) => { failed(error); return []; });
  if (!explained || key !== page.key) return;
  drawExplanation(explained);
  drawNodes(nodes);
  drawModels(models);
  drawEngines(misses);
  drawHistory(history);
  $("main").setAttribute("aria-busy", "false");
}

// An EventSource cannot send a token: the stream is read by hand.
async function follow(key) {
  page.stream?.abort();
  const stream = (page.stream = new AbortController());
  while (page.key === key && !stream.signal.aborted) {
    try {
      const answer = await ask(`v1/pools/${key}/events`, { signal: stream.signal });
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        const { value, done } = await reader.read();
        if (done) break;
        page.heard = Date.now();
        const pieces = (rest + value).split("\n\n");
        rest = pieces.pop();
        for (const piece of pieces) told(piece);
      }
    } catch (error) {
      if (stream.signal.aborted) return;
      failed(error);
    }
    await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
  }
}

function told(piece) {
  const kind = /^event: (.*)$/m.exec(piece)?.[1], data = /^data: (.*)$/m.exec(piece)?.[1];
  if (!kind || !data) return;
  const body = JSON.parse(data);
  if (kind === "status") {
    banner("");
    page.age = body.pool.age_s;
    page.stale = body.pool.stale;
    page.at = Date.now();
    drawPool(body.pool, body.interval);
    if (Date.now() - page.explained > FRESH_MS) loadExplanation();
    state();
  } else if (kind === "event" && !page.seen.has(data)) {
    page.seen.add(data);
    addEvent(body);
  } else if (kind === "condition") {
    addEvent({ type: body.to === (body.type === "Degraded" ? "False" : "True") ? "Normal" : "Warning", reason: `${body.type}: ${body.to}`, message: body.message || body.reason, at: body.at, count: 1 });
    loadSlow();
  } else if (kind === "gone") {
    page.key = null;
    loadPools().catch(failed);
  }
}

function state() {
  if (!page.key || !page.at) return;
  if (Date.now() - page.heard > LATE_MS) { page.stream?.abort(); follow(page.key); live("away", "Reconnecting"); return; }
  if ($("live").dataset.state === "away" && !$("banner").hidden) return;
  const age = page.age;
  if (page.stale) {
    live("stale", `Stale: ${ago(age)}`);
    banner("The numbers are old: the daemons report nothing new. What is shown is the last that was known.", "stale");
  } else live("live", "Live");
}

$("pool").addEventListener("change", () => { location.hash = encodeURIComponent($("pool").value); show($("pool").value); });
for (const input of document.getElementsByName("window")) input.addEventListener("change", () => { page.window = input.value; loadSlow(); });
$("access").addEventListener("submit", (event) => {
  event.preventDefault();
  page.token = $("token").value.trim();
  sessionStorage.setItem("kvpool-token", page.token);
  $("token").value = "";
  start();
});
window.addEventListener("resize", () => { for (const [id, chart] of Object.entries(charts)) chart.setSize({ width: $(id).clientWidth, height: chart.height }); });
systemDark.addEventListener("change", loadSlow); // charts are drawn in the theme's colours
$("theme").value = theme();
$("theme").addEventListener("change", () => { chooseTheme($("theme").value); loadSlow(); });

async function start() {
  try {
    const health = await fetch("healthz").then((answer) => answer.json());
    $("source").textContent = health.source === "local" ? "on this machine" : "in this cluster";
    $("token-local").hidden = health.source !== "local";
    $("token-cluster").hidden = health.source === "local";
    await loadPools();
  } catch (error) { failed(error); }
}

setInterval(() => { if (!document.hidden && $("access").hidden) { loadPools().catch(failed); loadSlow(); } }, SLOW_MS);
setInterval(state, 1000);
start();
