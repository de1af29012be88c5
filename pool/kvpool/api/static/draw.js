// What is drawn from an answer. Text only ever goes into the page as text.
"use strict";

const $ = (id) => document.getElementById(id);
const DASH = "–";

function make(tag, text, attributes = {}, ...children) {
  const element = document.createElement(tag);
  if (text !== null && text !== undefined) element.textContent = text;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const percent = (rate) => (rate === null || rate === undefined ? DASH : `${rate.toFixed(1)} %`);
const number = (n) => n.toLocaleString("en");
const compact = (n) => (n < 10000 ? number(n) : Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 2 }).format(n));
const seconds = (s) => (s === null ? DASH : s < 0.001 ? `${(s * 1e6).toFixed(0)} µs` : s < 1 ? `${(s * 1e3).toPrecision(3)} ms` : `${s.toPrecision(3)} s`);

const duration = (s) => (s === null ? DASH : s < 100 ? `${s.toPrecision(2)} s` : s < 7200 ? `${Math.round(s / 60)} min` : `${compact(Math.round(s / 3600))} h`);

function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let i = 0;
  while (n >= 1024 && i < units.length - 1) { n /= 1024; i++; }
  return `${i ? n.toFixed(1) : n} ${units[i]}`;
}

function ago(s) {
  return s < 2 ? "just now" : s < 120 ? `${Math.round(s)} s ago` : s < 7200 ? `${Math.round(s / 60)} min ago` : `${Math.round(s / 3600)} h ago`;
}

function drawPool(pool, interval) {
  $("rate").textContent = percent(pool.hitRate);
  $("rate-note").textContent = pool.lookups
    ? `${number(pool.hits)} of ${number(pool.lookups)} blocks${interval && interval.hitRate !== null ? `; ${percent(interval.hitRate)} just now` : ""}`
    : "nothing was looked up yet";
  $("tokens").textContent = pool.saved ? compact(pool.saved.tokens) : DASH;
  $("tokens-note").textContent = !pool.saved ? "not known to this source"
    : pool.saved.exact ? "loaded, not computed" : "about: some engines report nothing";
  const prefill = pool.saved?.prefillSeconds ?? null;
  $("prefill").textContent = duration(prefill);
  $("prefill-note").textContent = prefill !== null ? `measured for ${percent(pool.saved.prefillCoverage)} of the hits`
    : pool.saved?.prefillNote ? "no engine has measured its prefill yet" : pool.hits ? "not known to this source" : "no hit yet";
  const rate = interval && interval.seconds > 0 ? interval.lookups / interval.seconds : null;
  $("lookups").textContent = rate === null ? compact(pool.lookups) : `${compact(Math.round(rate))}/s`;
  $("lookups-note").textContent = rate === null ? "blocks in all" : `${compact(pool.lookups)} blocks in all`;
  $("used").textContent = pool.capacityBytes ? `${Math.round(100 * pool.usedBytes / pool.capacityBytes)} %` : DASH;
  $("used-note").textContent = pool.capacityBytes ? `${bytes(pool.usedBytes)} of ${bytes(pool.capacityBytes)}` : "no tier here";
  $("nodes-ready").textContent = `${pool.nodes.ready} / ${pool.nodes.desired}`;
  $("nodes-note").textContent = pool.nodes.outOfDate ? `${pool.nodes.outOfDate} out of date` : pool.paused ? "paused" : "up to date";
  drawTiers(pool);
  const said = pool.problems.concat(pool.conditions.filter((c) => c.type === "Ready" && c.status !== "True" && c.message).map((c) => c.message));
  list("problems", [...new Set(said)].map((text) => make("li", text)));
}

function list(id, items) {
  $(id).replaceChildren(...items);
  $(id).hidden = items.length === 0;
}

function drawTiers(pool) {
  const items = [], tiers = pool.tiers;
  let falling = pool.lookups;
  const fall = (text) => items.push(make("li", text, { class: "fall" }));
  if (tiers.length) fall(`↓ ${number(falling)} blocks looked up`);
  tiers.forEach((tier, i) => {
    falling = Math.max(0, falling - tier.hits);
    const meter = make("meter", `${bytes(tier.usedBytes)} of ${bytes(tier.capacityBytes)}`,
      { min: 0, max: Math.max(1, tier.capacityBytes), value: tier.usedBytes, "aria-label": `${tier.name}: in use` });
    const head = make("div", null, { class: "row" }, make("b", `${tier.name} (${tier.medium}${tier.shared ? ", shared" : ""})`),
      make("span", `${bytes(tier.usedBytes)} of ${bytes(tier.capacityBytes)}`));
    const foot = make("div", null, { class: "row note" },
      make("span", `served ${number(tier.hits)} blocks${pool.hits ? `, ${percent(100 * Math.min(1, tier.hits / pool.hits))} of all hits` : ""}`),
      make("span", `${number(tier.blocks)} blocks; ${number(tier.evictions)} evicted`));
    items.push(make("li", null, {}, head, meter, foot));
    fall(i < tiers.length - 1 ? `↓ ${number(falling)} not here: the next tier is asked` : `↓ ${number(falling)} in no tier: computed by the engine`);
  });
  if (!items.length) items.push(make("li", "No tier is open here.", { class: "note" }));
  $("tiers").replaceChildren(...items);
}

function drawExplanation(explained) {
  $("headline").textContent = explained.headline;
  $("advice").textContent = explained.advice ? `Next step: ${explained.advice}` : "";
  $("advice").hidden = !explained.advice;
  $("misses-empty").hidden = explained.misses.length > 0;
  const rows = (reasons, what) => reasons.map((r) => make("li", null, {},
    make("div", null, { class: "row" }, make("b", r.reason), make("span", `${number(r.count)} blocks, ${(100 * r.share).toFixed(1)} % of ${what}`)),
    make("meter", `${(100 * r.share).toFixed(1)} %`, { min: 0, max: 1, value: r.share, "aria-label": `${r.reason}: share of ${what}` }),
    make("p", `${r.meaning[0].toUpperCase()}${r.meaning.slice(1)}.`), ...(r.advice ? [make("p", r.advice, { class: "do" })] : [])));
  $("misses").replaceChildren(...rows(explained.misses, "lookups"), ...rows(explained.declined, "stores (declined)"));
  list("differences", explained.namespaces.map((d) => make("li",
    `${d.namespace} cannot use the ${number(d.nearestBlocks)} blocks of ${d.nearest}: ` +
    d.differences.map((f) => `${f.field} is ${f.here}, there ${f.there} (${f.advice})`).join("; "))));
}

function drawNodes(page) {
  const named = page.items.map((node) => node.nodeName || node.name);
  $("nodes").replaceChildren(...page.items.map((node, i) => {
    const state = node.stale ? ["no news", "bad"] : !node.ready ? ["not ready", "bad"] : node.state !== "Active" ? [node.state, "warn"] : ["ready", "good"];
    return make("tr", null, {}, make("th", named.indexOf(named[i]) === named.lastIndexOf(named[i]) ? named[i] : `${named[i]} (host ${node.host})`, { scope: "row" }),
      make("td", null, {}, make("span", state[0], { class: "state", "data-is": state[1] })),
      make("td", percent(node.hitRate), { class: "n" }), make("td", number(node.lookups), { class: "n" }),
      make("td", ago(node.age_s)), make("td", node.message || node.problems.join("; ") || "–", { class: "text" }));
  }));
  if (!page.items.length) $("nodes").append(make("tr", null, {}, make("td", "No node runs this pool yet.", { colspan: 6 })));
  $("nodes-more").hidden = page.total <= page.items.length;
  $("nodes-more").textContent = `${page.items.length} of ${page.total} nodes are shown; the API has all.`;
}

function drawModels(answer) {
  const empty = !answer.known ? "This source cannot see into the regions; 'kvpool explain' on a node can." : answer.items.length ? "" : "Nothing was stored yet.";
  $("models-empty").hidden = !empty;
  $("models-empty").textContent = empty;
  $("models-table").hidden = answer.items.length === 0;
  $("models").replaceChildren(...answer.items.map((n) => make("tr", null, {},
    make("th", n.digest, { scope: "row" }), make("td", `${n.model || DASH}${n.tenant ? " (a tenant's)" : ""}`, { class: "text" }), make("td", n.description.dtype || DASH),
    make("td", n.blockTokens === null ? DASH : number(n.blockTokens), { class: "n" }), make("td", number(n.blocks), { class: "n" }), make("td", bytes(n.bytes), { class: "n" }),
    make("td", percent(n.hitRate), { class: "n" }), make("td", n.lookups === null ? DASH : number(n.lookups), { class: "n" }),
    make("td", n.savedTokens === null ? DASH : compact(n.savedTokens), { class: "n" }), make("td", duration(n.savedPrefillSeconds), { class: "n" }))));
}

const ENGINES_SHOWN = 50;

function drawEngines(answer) {
  const all = answer.engines, shown = all.slice(0, ENGINES_SHOWN);
  $("engines-empty").hidden = all.length > 0;
  $("engines-empty").textContent = "No engine has this pool open, or did so within the last hour.";
  $("engines-table").hidden = all.length === 0;
  $("engines").replaceChildren(...shown.map((e) => {
    const worst = Object.entries(e.misses ?? {}).sort((a, b) => b[1] - a[1])[0];
    return make("tr", null, {}, make("th", e.engine, { scope: "row" }), make("td", e.node || DASH),
      make("td", null, {}, make("span", e.live ? "running" : "ended", { class: "state", "data-is": e.live ? "good" : "warn" })),
      make("td", percent(e.hitRate), { class: "n" }), make("td", e.lookups === null ? DASH : number(e.lookups), { class: "n" }),
      make("td", e.lookups === null ? "reports nothing: it cannot write to the pool's folder" : worst ? `${worst[0]} ${number(worst[1])}` : DASH, { class: "text" }),
      make("td", e.namespaces.join(" ") || DASH, { class: "text" }));
  }));
  $("engines-more").hidden = answer.enginesTotal <= shown.length;
  $("engines-more").textContent = `${shown.length} of ${answer.enginesTotal} engines are shown; the API has all.`;
}

function addEvent(event) {
  $("events-empty").hidden = true;
  const where = [event.node, event.tier].filter(Boolean).join(", ");
  const item = make("li", null, {}, make("div", null, { class: "row" },
    make("span", event.reason, { class: "state", "data-is": event.type === "Normal" ? "good" : "warn" }),
    make("span", `${event.at.replace("T", " ").replace("Z", " UTC")}${event.count > 1 ? `, ${event.count} times` : ""}`, { class: "note" })),
    make("p", `${where ? `${where}: ` : ""}${event.message}`));
  $("events").prepend(item);
  while ($("events").children.length > 30) $("events").lastChild.remove();
}

// --- charts ------------------------------------------------------------------------------------------------

const charts = {};

function colour(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

function axis(values, size) {
  return { stroke: colour("--soft"), gap: 4, grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line") }, font: "12px system-ui", size, values };
}

const two = (n) => String(n).padStart(2, "0");

function clock(_, ticks, __, ___, step) {
  return ticks.map((t) => {
    const d = new Date(t * 1000), day = `${d.getFullYear()}-${two(d.getMonth() + 1)}-${two(d.getDate())}`;
    return step >= 86400 ? day.slice(5) : `${two(d.getHours())}:${two(d.getMinutes())}${step < 60 ? `:${two(d.getSeconds())}` : ""}`;
  });
}

function plot(id, height, series, values, scale, data, time) {
  const box = $(id);
  charts[id]?.destroy();
  charts[id] = new uPlot({
    width: box.clientWidth, height, cursor: { points: { size: 7 } }, series: [{ value: (_, t) => (t === null ? DASH : new Date(t * 1000).toLocaleString("sv")) }, ...series],
    scales: { x: { time: true, range: time }, y: scale }, axes: [{ ...axis(clock, 30), space: 70 }, axis(values, 62)],
  }, data, box);
}

function drawHistory(answer) {
  const points = answer.points, step = answer.stepSeconds;
  const at = [], rate = [], lookups = [], hits = [], evicted = [];
  let before = null;
  for (const p of points) {
    const t = Date.parse(p.at) / 1000;
    if (before !== null && t - before > step * 1.5) { at.push(before + step); for (const s of [rate, lookups, hits, evicted]) s.push(null); }
    at.push(t); rate.push(p.hitRate); lookups.push(p.lookups / step); hits.push(p.hits / step); evicted.push(p.evictions / step);
    before = t;
  }
  const known = points.filter((p) => p.hitRate !== null);
  const all = known.reduce((sum, p) => [sum[0] + p.hits, sum[1] + p.lookups], [0, 0]);
  const rates = known.map((p) => Math.min(100, 100 * p.hits / p.lookups)); // rounded as the mean is, which then lies between them
  $("chart-text").textContent = known.length
    ? `${percent(Math.min(100, 100 * all[0] / all[1]))} in this time; lowest ${percent(Math.min(...rates))}, highest ${percent(Math.max(...rates))}; ${number(points.length)} intervals of ${step} s.${answer.notice ? ` ${answer.notice}` : ""}`
    : answer.notice || `Intervals of ${step} s.`;
  const empty = points.length === 0 ? "Nothing is recorded yet: the first point comes within 20 seconds." : known.length === 0 ? "Nobody looked anything up in this time." : "";
  $("chart-empty").hidden = !empty;
  $("chart-empty").textContent = empty;
  for (const id of ["chart", "flow-chart", "flow-title"]) $(id).hidden = points.length === 0;
  if (points.length) {
    const now = Date.now() / 1000, end = Math.max(now, at[at.length - 1] + step), time = [Math.max(end - answer.windowSeconds, Math.min(at[0], end - 300)), end];
    const few = points.length < 40;
    plot("chart", 260, [{ label: "hit rate", stroke: colour("--main"), fill: colour("--fill"), width: 2, points: { show: few }, value: (_, v) => percent(v) }],
      (_, ticks) => ticks.map((v) => `${v} %`), { range: [0, 100] }, [at, rate], time);
    const each = (_, v) => (v === null ? DASH : `${v.toFixed(1)}/s`);
    plot("flow-chart", 150, [
      { label: "looked up", stroke: colour("--soft"), width: 1.5, points: { show: few }, value: each },
      { label: "served", stroke: colour("--main"), width: 1.5, points: { show: few }, value: each },
      { label: "evicted", stroke: colour("--evict"), width: 1.5, dash: [6, 4], points: { show: few }, value: each },
    ], (_, ticks) => ticks.map((v) => `${v}/s`), { range: (_, low, high) => [0, Math.max(1, high)] }, [at, lookups, hits, evicted], time);
  }
  $("history").replaceChildren(...points.slice(-200).reverse().map((p) => make("tr", null, {},
    make("th", p.at.replace("T", " ").replace("Z", ""), { scope: "row" }), ...[percent(p.hitRate), number(p.lookups), number(p.hits), number(p.evictions), seconds(p.loadP99Seconds)].map((t) => make("td", t, { class: "n" })))));
}
