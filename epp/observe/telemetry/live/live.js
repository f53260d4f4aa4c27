// The live page: asks `live` for the state every few seconds and shows it. Text gets onto the page through textContent alone,
// so nothing that a client sent can become markup. No other host is asked.
"use strict";
const SVG = "http://www.w3.org/2000/svg";
const MOST_ROWS = 100;
const PARTS = ["backlog", "prefill", "stall", "lora", "failing"];
const byId = (id) => document.getElementById(id);

function filled(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children.filter((child) => child !== null));
  return made;
}

const el = (tag, attributes, ...children) => filled(document.createElement(tag), attributes, children);
const shape = (tag, attributes, ...children) => filled(document.createElementNS(SVG, tag), attributes, children);

const percent = (value) => (value === null || value === undefined ? "–" : `${Math.round(100 * value)} %`);
const whole = (value) => Math.round(value).toLocaleString("en");
const clock = (unix) => new Date(1000 * unix).toLocaleTimeString("en-GB");
const seconds = (value) => (value >= 10 ? `${whole(value)} s` : value >= 1 ? `${value.toFixed(1)} s` : `${Math.round(1000 * value)} ms`);

function bars(width, ...shares) {
  const height = shares.length > 1 ? 10 : 8;
  return shape("svg", { class: "bar", width, height, "aria-hidden": "true" }, shape("rect", { class: "track", width: "100%", height, rx: 2 }),
    ...shares.map((share, n) => shape("rect", { class: n === shares.length - 1 ? "fill" : "fill2", width: `${100 * Math.min(1, share || 0)}%`,
      y: (n * height) / shares.length, height: height / shares.length, rx: 2 })));
}

function meter(label, share, second = null) {
  if (share === null && second === null) return el("span", { class: "soft" }, "–");
  return el("span", { class: "meter" }, second === null ? bars(80, share) : bars(80, share, second), label);
}

function spark(values) {
  if (values.length < 2) return el("span", { class: "soft" }, "–");
  const top = Math.max(...values);
  const points = values.map((v, n) => `${((100 * n) / (values.length - 1)).toFixed(1)},${(18 - (16 * v) / Math.max(top, 0.1)).toFixed(1)}`).join(" ");
  const label = `backlog of the last minutes, at most ${seconds(top)}`;
  return shape("svg", { class: "spark", width: 100, height: 20, role: "img", "aria-label": label }, shape("polyline", { points }));
}

let state = null;
let paused = false;

function tiles(found, rows) {
  const ready = rows.filter((row) => row.state === "ready").length;
  const sum = (name) => rows.reduce((total, row) => total + (row[name] || 0), 0);
  const shown = [
    ["endpoints ready", `${ready} / ${rows.length}`],
    ["requests/s, last minute", found.recent.per_s.toFixed(1)],
    ["errors, last minute", whole(found.recent.errors)],
    ["TTFT p50, sampled", found.recent.ttft_p50_s === null ? "–" : seconds(found.recent.ttft_p50_s)],
    ["TTFT p90, sampled", found.recent.ttft_p90_s === null ? "–" : seconds(found.recent.ttft_p90_s)],
    ["requests in the servers", whole(sum("load"))],
    ["mean backlog", seconds(rows.length ? sum("backlog_s") / rows.length : 0)],
    ["waiting in the queue", whole(found.queue.reduce((all, q) => all + Object.values(q.priorities).reduce((a, b) => a + b, 0), 0))],
    ["predicted hit rate, 5 min", percent(found.explain.requests ? found.explain.hit_ratio : null)],
    ["table entries", whole(found.table_entries)],
  ];
  byId("tiles").replaceChildren(...shown.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
  byId("problems").hidden = !found.problems.length;
  byId("problems").replaceChildren(...found.problems.map((problem) => el("li", {}, problem)));
  byId("summary").textContent = `policy ${found.policy}, rule ${found.rule}, ${new Date().toLocaleTimeString("en-GB")}`;
}

function endpoints(rows) {
  const asked = byId("filter").value.toLowerCase();
  const order = byId("order").value;
  const kept = rows.filter((row) => row.name.toLowerCase().includes(asked));
  const low = order === "actual";
  kept.sort((a, b) => (order === "name" ? a.name.localeCompare(b.name, "en", { numeric: true })
    : low ? (a.actual ?? 2) - (b.actual ?? 2) : (b[order] || 0) - (a[order] || 0) || a.name.localeCompare(b.name, "en", { numeric: true })));
  byId("shown").textContent = kept.length > MOST_ROWS ? `the first ${MOST_ROWS} of ${kept.length}` : `${kept.length} shown`;
  byId("t-endpoints").tBodies[0].replaceChildren(...kept.slice(0, MOST_ROWS).map((row) => el("tr", {},
    el("th", { scope: "row" }, row.name),
    el("td", {}, el("span", { class: row.state === "ready" ? "good" : "bad" }, row.state === "ready" ? "ready" : "ejected"),
      row.why ? el("div", { class: "why" }, row.why) : null),
    el("td", { class: "n" }, row.waiting ? `${row.load} (${row.waiting} wait)` : `${row.load}`),
    el("td", { class: "n" }, seconds(row.backlog_s)),
    el("td", {}, spark(row.spark)),
    el("td", {}, meter(percent(row.kv), row.kv)),
    el("td", {}, meter(percent(row.mirror), row.mirror)),
    el("td", {}, meter(`${percent(row.predicted)}, ${percent(row.actual)}`, row.predicted, row.actual)))));
}

function explain(account) {
  byId("explain-sum").textContent = account.requests ? `${whole(account.requests)} requests, ${whole(account.prompt_tokens)} prompt tokens in the last minutes`
    + (account.prompt_tokens ? `; ${percent(1 - account.hit_ratio)} of them had to be computed.` : ".") : "No requests in the last minutes.";
  const causes = (account.causes || []).filter((cause) => cause.share_of_missed >= 0.005);
  byId("explain").replaceChildren(...causes.map((cause) => el("div", { class: "cause" },
    el("div", { class: "title" }, el("b", {}, cause.title), el("span", {}, percent(cause.share_of_missed))),
    bars("100%", cause.share_of_missed),
    cause.servers.length ? el("p", { class: "soft" }, cause.servers.slice(0, 3).map((s) => `${s.name}${s.full === null ? "" : ` (${percent(s.full)} full)`}`).join(", ")) : null,
    el("p", { class: "soft" }, cause.advice))));
}

function queue(found) {
  const rows = found.queue.map((q) => el("div", {}, el("p", {}, `${q.model || "every model"}: the oldest waits ${seconds(q.oldest_s)}`),
    el("p", {}, Object.entries(q.priorities).map(([priority, count]) => `priority ${priority}: ${whole(count)}`).join(", ") || "nobody waits"),
    q.tenants.length ? el("ul", {}, ...q.tenants.map((t) => el("li", {}, `${t.tenant || "(no tenant)"}, priority ${t.priority}: `
      + `${whole(t.requests)} requests, ${whole(t.tokens)} tokens`))) : null));
  byId("queue").replaceChildren(...(rows.length ? rows : [el("p", { class: "soft" }, "Flow control is off: no request waits here.")]));
}

function dryRun(found) {
  const tried = found.dry_run;
  if (!tried) { byId("dry").replaceChildren(el("p", { class: "soft" }, "No policy is tried. Set spec.mode: DryRun in one to see here what it would do.")); return; }
  const moved = found.requests.filter((request) => request.dry_run && !request.dry_run.agrees);
  byId("dry").replaceChildren(
    el("p", {}, el("b", {}, tried.policy), ` (${tried.rule}) agrees with ${whole(tried.agreed)} of ${whole(tried.picks)} picks, ${percent(tried.picks ? tried.agreed / tried.picks : null)}`),
    meter("", tried.picks ? tried.agreed / tried.picks : 0),
    el("p", {}, wouldChange(tried)),
    el("p", {}, moved.length ? `Of the requests below it would have sent ${moved.length} elsewhere:` : "It would have sent none of the requests below elsewhere."),
    el("ul", {}, ...moved.slice(0, 5).map((request) => el("li", {}, `${request.request_id.slice(0, 12)}: ${request.served_by || request.chosen} → ${request.dry_run.chosen || "(refuse)"}`
      + (request.dry_run.chosen ? `, ${change(request.dry_run.more_cached_tokens, whole, "cached tokens")}, ${change(request.dry_run.more_s, seconds, "", ["later", "sooner"])}` : "")))));
}

function change(value, show, what, words = ["more", "fewer"]) {
  const size = show(Math.abs(value));
  return `${size} ${value < 0 ? words[1] : words[0]}${what ? ` ${what}` : ""}`;
}

function wouldChange(tried) {
  const counted = tried.picks - tried.refused;
  if (!counted || !tried.prompt_tokens) return "What it would have changed is not known yet.";
  return `It would have found ${percent((tried.cached_tokens + tried.more_cached_tokens) / tried.prompt_tokens)} of the prompt tokens cached in place of ${percent(tried.cached_tokens / tried.prompt_tokens)}, `
    + `and the first token would have come ${change(tried.more_s / counted, seconds, "", ["later", "sooner"])} on average`
    + (tried.refused ? `; it would have refused ${whole(tried.refused)} requests. ` : ". ")
    + "Each pick is compared by itself, on the caches as they are now: epp replay tells what follows from many.";
}

function candidates(decision) {
  const top = Math.max(...decision.candidates.map((c) => c.score_s), 1e-9);
  const rows = decision.candidates.map((c, n) => {
    const svg = shape("svg", { viewBox: "0 0 100 6", preserveAspectRatio: "none", role: "img" }, shape("rect", { class: "track", width: 100, height: 6 }));
    let x = 0;
    PARTS.forEach((part, p) => { const width = (100 * (c.parts_s[part] || 0)) / top; svg.append(shape("rect", { class: `p${p}`, x, width, height: 6 })); x += width; });
    svg.setAttribute("aria-label", PARTS.filter((part) => c.parts_s[part] > 0).map((part) => `${part} ${seconds(c.parts_s[part])}`).join(", ") || "no score");
    const name = n === 0 ? el("b", {}, c.name, " ✓") : el("span", {}, c.name);
    return el("div", { class: "cand" }, name, el("span", { class: "n" }, c.excluded ? `out: ${c.excluded}` : seconds(c.score_s)), svg,
      el("span", { class: "soft" }, `${whole(c.matched_tokens)} tokens cached; ${whole(c.backlog_tokens)} to compute before it, ${c.in_flight} in flight`));
  });
  const legend = el("p", { class: "legend" }, ...PARTS.map((part, p) => el("span", {}, shape("svg", { viewBox: "0 0 8 8" }, shape("rect", { class: `p${p}`, width: 8, height: 8 })), ` ${part.replace("_", " ")}`)));
  return [legend, ...rows];
}

async function decisionOf(id) {
  const answer = await fetch(`decisions/${encodeURIComponent(id)}`);
  return answer.json();
}

async function open(details, request) {
  const box = details.querySelector(".parts");
  box.textContent = "Loading.";
  try {
    const decision = await decisionOf(request.request_id);
    if (decision.candidates?.length) box.replaceChildren(...candidates(decision));
    else box.textContent = decision.message || decision.error || "Nobody was scored for this request.";
  } catch { box.textContent = "The picker does not answer."; }
}

function requests(found) {
  const list = byId("requests");
  const had = new Map([...list.children].map((item) => [item.dataset.key, item]));
  const groups = new Map();
  for (const request of found.requests) {
    const key = JSON.stringify([request.model || request.kind, request.served_by || request.chosen, request.outcome, request.status, request.reason]);
    groups.set(key, [...(groups.get(key) || []), request]);
  }
  list.replaceChildren(...[...groups].map(([key, [request, ...others]]) => {
    const item = had.get(key) || el("li", {}, el("details", {}, el("summary", {}), el("div", { class: "parts" }), el("p", { class: "again soft" })));
    if (!item.dataset.key) { item.dataset.key = key; item.firstChild.addEventListener("toggle", () => { if (item.firstChild.open) open(item.firstChild, request); }); }
    const failed = request.status >= 400 || request.outcome === "failed" || request.outcome === "refused";
    const hit = request.prompt_tokens ? `${whole(request.matched_tokens)} of ${whole(request.prompt_tokens)} cached` : "";
    const what = request.chosen ? `${request.model || request.kind} → ${request.served_by || request.chosen}` : request.request_id;
    item.querySelector("summary").replaceChildren(
      el("span", { class: "soft" }, clock(request.at_unix_s)),
      el("span", { title: request.request_id }, others.length ? `${what} (${1 + others.length} requests)` : what),
      el("span", { class: failed ? "bad" : "" }, request.outcome || "in flight", request.status ? ` ${request.status}` : ""),
      el("span", {}, request.reason), el("span", {}, hit), el("span", { class: "n" }, request.ttft_s ? seconds(request.ttft_s) : ""));
    item.querySelector(".again").replaceChildren("Each alone: ", ...[request, ...others].flatMap((each) => [
      el("a", { href: `#${encodeURIComponent(each.request_id)}` }, clock(each.at_unix_s)), " "]));
    return item;
  }));
  if (!found.requests.length) list.append(el("li", { class: "soft" }, "No requests yet."));
}

function fact([name, value]) {
  if (name === "at_unix_s") return ["at", clock(value)];
  if (name.endsWith("_s")) return [name.slice(0, -2), seconds(value)];
  return [name, typeof value === "number" ? whole(value) : value];
}

async function one() {
  const id = decodeURIComponent(location.hash.slice(1));
  const isElement = byId(id) !== null;
  byId("one").hidden = !id || isElement;
  if (!id || isElement) return;
  const decision = await decisionOf(id);
  const facts = Object.entries(decision).filter(([, value]) => value !== null && value !== "" && typeof value !== "object");
  byId("facts").replaceChildren(...facts.map(fact).flatMap(([name, value]) => [el("dt", {}, name.replaceAll("_", " ")), el("dd", {}, `${value}`)]));
  byId("one-parts").replaceChildren(...(decision.candidates?.length ? candidates(decision) : []));
}

function show() {
  tiles(state, state.endpoints); endpoints(state.endpoints); explain(state.explain); queue(state); dryRun(state); requests(state);
}

async function look() {
  if (!paused && !document.hidden) {
    let old = false;
    try {
      const answer = await fetch("live");
      if (!answer.ok) throw new Error(answer.statusText);
      state = await answer.json();
      show();
    } catch { old = true; }
    document.body.classList.toggle("stale", old);
    byId("stale").hidden = !old;
  }
  setTimeout(look, 1000 * (state ? state.refresh_s : 2));
}

byId("filter").addEventListener("input", () => state && endpoints(state.endpoints));
byId("order").addEventListener("change", () => state && endpoints(state.endpoints));
byId("pause").addEventListener("click", () => { paused = !paused; byId("pause").textContent = paused ? "Go on" : "Pause"; byId("pause").setAttribute("aria-pressed", `${paused}`); });
document.addEventListener("visibilitychange", () => { if (!document.hidden && state) show(); });
window.addEventListener("hashchange", one);
one();
look();
