import { ask, paired, posted, query } from "/static/ask.js";
import { draw } from "/static/charts.js";

const POLL = 2000, BUSY = 400; // milliseconds
const [MUTED, BLUE, VERMILION] = ["muted", "blue", "vermilion"].map((name) => `var(--chart-${name})`);

const $ = (id) => document.getElementById(id);
const whole = (number) => number.toLocaleString("en");
const percent = (share) => (share === null ? "–" : `${(100 * share).toFixed(1)}\u00a0%`);
const fixed = (number) => (number === null ? "–" : number.toFixed(4));
const put = (element, text) => { if (element.textContent !== text) element.textContent = text; }; // a screen reader announces changes only
const now = { list: [], shown: null, busy: false };

// Formats the evidence, which may be 10⁻⁹ or 10³⁰⁰, briefly.
function wealth(number) {
  if (number >= 1e6) return "over a million";
  if (number >= 0.01 && number < 1e5) return number >= 100 ? whole(Math.round(number)) : String(Number(number.toPrecision(2)));
  const power = Math.floor(Math.log10(number));
  return `${(number / 10 ** power).toFixed(1)} · ${tenTo(power)}`;
}
const tenTo = (power) => `10${[...String(power)].map((digit) => (digit === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[digit])).join("")}`;

function ago(seconds) {
  if (seconds < 5) return "just now";
  for (const [length, what] of [[86400, "day"], [3600, "hour"], [60, "minute"], [1, "second"]])
    if (seconds >= length) return `${Math.floor(seconds / length)} ${what}${seconds >= 2 * length ? "s" : ""} ago`;
  return "just now";
}

function complain(error, id = "message") {
  put($(id), error.message);
  $(id).hidden = false;
}
const address = (id, verb = "") => `/api/monitors/${encodeURIComponent(id)}${verb}`;
const idInAddress = () => decodeURIComponent(location.hash.slice(1));
const state = ({ status }) => (status.alarm ? "alarm" : status.rows ? "no alarm" : "waiting");

// The list keeps its elements, so that a focus stays where it is.
const items = new Map();
function item(id) {
  const entry = document.createElement("li");
  const link = Object.assign(document.createElement("a"), { href: `#${encodeURIComponent(id)}` });
  for (const name of ["called", "chip", "count"]) link.append(Object.assign(document.createElement("span"), { className: name }));
  entry.append(link);
  return entry;
}

function list(monitors) {
  now.list = monitors;
  for (const [id, entry] of items) if (!monitors.some((one) => one.id === id)) { entry.remove(); items.delete(id); }
  monitors.forEach((one, index) => {
    if (!items.has(one.id)) items.set(one.id, item(one.id));
    const entry = items.get(one.id);
    const [called, chip, count] = entry.firstChild.children;
    put(called, one.name);
    put(chip, state(one));
    chip.className = `chip ${state(one).replace(" ", "-")}`;
    put(count, `${whole(one.status.rows)} rows`);
    if (one.id === now.shown) entry.firstChild.setAttribute("aria-current", "true");
    else entry.firstChild.removeAttribute("aria-current");
    if ($("list").children[index] !== entry) $("list").insertBefore(entry, $("list").children[index] ?? null);
  });
  $("empty").hidden = monitors.length > 0;
  $("watch").hidden = !monitors.length;
}

// One monitor.
function sentence({ status, settings }) {
  if (status.alarm) return `Alarm at row ${whole(status.alarm.row)}. ${status.alarm.reason}`;
  if (!status.rows) return "Waiting for the first rows.";
  return `No alarm. The evidence against calibration is ${wealth(status.evidence)}; the alarm is raised at ${wealth(1 / (1 - settings.level))}.`;
}

function expected({ rows, accuracy, answered, error }, event) {
  const span = ({ value, low, high }) => `${percent(value)} (${percent(low)} to ${percent(high)})`;
  const errors = answered ? ` Of the ${whole(answered)} answered rows, ${span(error)} are expected to be wrong.` : "";
  return `Estimate without labels: of ${whole(rows)} rows, ${span(accuracy)} ${event ? "will be the event" : "will be right"}.${errors} This assumes that the model is still calibrated.`;
}

function show(one) {
  const { status, settings } = one;
  $("one").hidden = false;
  put($("name"), one.name);
  const age = one.updated === null ? "" : `last rows ${ago(Date.now() / 1000 - one.updated)}`;
  put($("source"), [`${whole(status.rows)} rows`, `${whole(settings.n_classes)} classes`, settings.classwise ? "each class tested" : "", age].filter(Boolean).join(" · "));
  put($("says"), sentence(one));
  $("says").className = `says ${state(one).replace(" ", "-")}`;
  put($("n-evidence"), wealth(status.evidence));
  put($("n-ece"), fixed(status.recent_ece));
  for (const word of document.querySelectorAll(".w-says")) put(word, status.event ? "predicted" : "confidence");
  for (const word of document.querySelectorAll(".w-right")) put(word, status.event ? "observed" : "accuracy");
  put($("n-confidence"), percent(status.recent_confidence));
  put($("n-accuracy"), percent(status.recent_accuracy));
  const { promise, unlabelled } = status;
  $("promise").hidden = !promise?.answered;
  $("promise").className = `says ${promise?.broken ? "alarm" : "no-alarm"}`;
  put($("promise"), promise?.answered ? promise.text : "");
  $("awaiting").hidden = !unlabelled;
  put($("awaiting"), unlabelled ? expected(unlabelled, status.event) : "");
  put($("span"), `Recent means the last ${whole(settings.window)} rows. A calibrated network ever raises the alarm with probability at most ${Number((100 * (1 - settings.level)).toPrecision(3))}\u00a0%. After a restart of the server the charts begin again; the evidence continues.`);
  put($("kept"), one.problem ? `The checkpoint could not be written: ${one.problem}.` : one.saved_rows === null ? "It exists in memory until the server stops: trueup serve --monitors FOLDER keeps it." : "It survives a restart of the server.");
  $("kept").classList.toggle("warned", one.problem !== null);
  $("checkpoint").href = address(one.id, "/file");
  snippets(one);
  if (one.replaying && !now.busy) progress(one.replaying);
  else if (!now.busy) $("replaying").hidden = true;
  $("charts").hidden = one.history.rows.length < 2;
  if (!$("charts").hidden) picture(one);
}

function snippets({ id, settings }) {
  const url = `${location.origin}${address(id)}`;
  const row = Array.from({ length: settings.n_classes }, (_, k) => (k ? 0.5 : 2).toFixed(1)).join(", ");
  put($("python"), `import os
import httpx

MONITOR = "${url}"
HEADERS = {"Authorization": f"Bearer {os.environ.get('TRUEUP_TOKEN', 'none')}"}

def send(logits, labels):  # as soon as the labels are known
    rows = {"logits": logits.tolist(), "labels": labels.tolist()}
    answer = httpx.post(f"{MONITOR}/update", json=rows, headers=HEADERS)
    return answer.raise_for_status().json()["status"]["alarm"]`);
  const one = settings.n_classes > 12 ? "" : `curl -H "$token" --json '{"logits": [[${row}]], "labels": [0]}' "$monitor/update"\n`;
  put($("curl"), `monitor=${url}\ntoken="Authorization: Bearer $TRUEUP_TOKEN"\n${one}curl -H "$token" --data-binary @log.npz "$monitor/replay?name=log.npz"`);
}

// The parts of a chart, as chart.js draws them.
const line = (x, y, color, words, more = {}) => ({ kind: "line", x, y, color, markers: x.length < 3, hover: x.map((row, k) => words(whole(row), y[k])), ...more });
const rule = (at, dash, more = {}) => ({ kind: "rule", at, dash, color: VERMILION, ...more });

function picture({ history, settings, status, id }) {
  if (id !== now.shown) return;
  const { rows } = history;
  const span = [rows[0], rows.at(-1)];
  const alarms = status.alarm && status.alarm.row >= rows[0] ? [rule(status.alarm.row, "dot")] : [];
  const plot = (marks, y) => ({ marks: [...marks, ...alarms], x: { title: "rows", range: span }, y });
  const limit = 1 / (1 - settings.level);
  // The axis ends above the alarm threshold, so that smaller values stay visible.
  const [lowest, highest] = [Math.min(...history.evidence, 1), Math.max(...history.evidence, limit)].map(Math.log10);
  const top = Math.min(highest, 2 * Math.log10(limit) + 2) + 0.5, bottom = Math.max(lowest, -12) - 0.5;
  const step = Math.max(1, Math.ceil((top - bottom) / 5)), first = Math.ceil(bottom / step);
  const powers = Array.from({ length: Math.floor(top / step) - first + 1 }, (_, index) => step * (first + index));
  const shown = history.evidence.map((value) => Math.min(Math.max(value, 1e-12), 10 ** (top + 1)));
  const evidence = plot([
    { ...line(rows, shown, BLUE, (row) => row), hover: rows.map((row, k) => `row ${whole(row)}\nevidence ${wealth(history.evidence[k])}`) },
    rule(limit, "dash", { horizontal: true }),
    { kind: "text", x: 0, y: limit * 10 ** ((top - bottom) / 20), text: `alarm at ${wealth(limit)}`, color: MUTED },
  ], { log: true, range: [10 ** bottom, 10 ** top], ticks: powers.map((power) => 10 ** power), tick_labels: powers.map((power) => (power === 0 ? "1" : power === 1 ? "10" : tenTo(power))) });
  const most = (columns) => Math.max(...columns.flat().filter((value) => value !== null));
  const ece = plot([line(rows, history.ece, BLUE, (row, value) => `row ${row}\nECE ${fixed(value)}`)], { range: [0, Math.max(1.15 * most([history.ece]), 0.01)] });
  const rates = plot([
    line(rows, history.confidence, VERMILION, (row, value) => `row ${row}\n${status.event ? "predicted" : "confidence"} ${percent(value)}`, { dash: "dash" }),
    line(rows, history.accuracy, BLUE, (row, value) => `row ${row}\n${status.event ? "observed" : "accuracy"} ${percent(value)}`),
  ], { percent: true });
  const words = `from row ${whole(rows[0])} to row ${whole(rows.at(-1))}`;
  draw($("evidence"), evidence, `Evidence against calibration ${words}, on a logarithmic axis: now ${wealth(status.evidence)}, the alarm is at ${wealth(limit)}${status.alarm ? `, reached at row ${whole(status.alarm.row)}` : ""}`);
  draw($("ece"), ece, `Calibration error of recent rows ${words}: now ${fixed(status.recent_ece)}`);
  draw($("rates"), rates, `${status.event ? "Predicted and observed frequency" : "Confidence and accuracy"} of recent rows ${words}: now ${percent(status.recent_confidence)} and ${percent(status.recent_accuracy)}`);
  $("charts").dataset.drawn = `${id}/${rows.at(-1)}`;
}

// Polls every two seconds while the page is visible.
let timer, lost = false;
async function look() {
  clearTimeout(timer);
  try {
    const monitors = await ask("/api/monitors");
    const requested = idInAddress();
    now.shown = [requested, now.shown].find((wish) => monitors.some(({ id }) => id === wish)) ?? monitors[0]?.id ?? null;
    list(monitors);
    if (now.shown === null) $("one").hidden = true;
    else {
      const one = await ask(address(now.shown));
      if (one.id === now.shown) show(one);
    }
    if (lost) $("message").hidden = true;
    lost = false;
  } catch (error) {
    lost = true;
    complain(error);
  }
  clearTimeout(timer);
  if (document.visibilityState === "visible") timer = setTimeout(look, POLL);
}
document.addEventListener("visibilitychange", () => { if (document.visibilityState === "visible") look(); });
addEventListener("hashchange", async () => {
  $("message").hidden = true;
  await look();
  if (idInAddress() === now.shown) $("name").focus({ preventScroll: innerWidth > 800 }); // other fragments are anchors on the page
});

async function go(id) {
  if (idInAddress() === id) return look();
  location.hash = encodeURIComponent(id);
}

// Creating a monitor.
function open() {
  $("make").reset();
  $("making-message").hidden = true;
  $("making").showModal();
}

function filled() {
  const number = (id) => ($(id).value === "" ? null : Number($(id).value));
  const fields = Object.fromEntries(["n_classes", "level", "window", "half_life", "block"].map((name) => [name, number(`new-${name}`)]));
  const each = $("new-classwise").value;
  const promise = Object.fromEntries(["threshold", "max_risk"].map((name) => [name, number(`new-${name}`)]).filter(([, value]) => value !== null));
  return { name: $("new-name").value, ...fields, classwise: each === "" ? null : each === "true", promise: Object.keys(promise).length ? promise : null };
}

$("make").addEventListener("submit", async (event) => {
  event.preventDefault();
  $("make-it").disabled = true;
  try {
    const [file] = $("restore").files;
    const name = $("new-name").value;
    const made = file ? await ask(query("/api/monitors/restore", { name }), { method: "POST", headers: { "Content-Type": "application/octet-stream" }, body: file })
      : await ask("/api/monitors", posted(filled()));
    $("making").close();
    await go(made.id);
  } catch (error) {
    complain(error, "making-message");
  } finally {
    $("make-it").disabled = false;
  }
});
// A checkpoint contains its number of classes.
$("restore").addEventListener("change", () => {
  const restoring = $("restore").files.length > 0;
  $("new-n_classes").required = !restoring;
  $("new-n_classes").disabled = restoring;
});
$("make").addEventListener("reset", () => Object.assign($("new-n_classes"), { required: true, disabled: false }));
$("cancel").addEventListener("click", () => $("making").close());
for (const button of document.querySelectorAll("[data-do=new]")) button.addEventListener("click", open);

const examples = document.querySelectorAll("[data-do=example]");
for (const button of examples)
  button.addEventListener("click", async () => {
    $("message").hidden = true;
    for (const each of examples) each.disabled = true;
    try {
      const made = await ask("/api/monitors/example", { method: "POST" });
      await go(made.id);
    } catch (error) {
      complain(error);
    } finally {
      for (const each of examples) each.disabled = false;
    }
  });

// Replaying. Only XMLHttpRequest reports the progress of an upload.
function progress({ done, total }, words = `Replaying ${whole(done)} of ${whole(total)} rows`) {
  $("replaying").hidden = false;
  $("progress").max = Math.max(total, 1);
  $("progress").value = done;
  put($("progress-text"), words);
}

function sent(path, { name, body }) {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open("POST", path);
    request.setRequestHeader("Content-Type", "application/octet-stream");
    request.responseType = "json";
    request.upload.addEventListener("progress", ({ loaded, total }) => progress({ done: loaded, total }, `Sending ${name}: ${Math.floor((100 * loaded) / Math.max(total, 1))}\u00a0%`));
    request.addEventListener("load", () => (request.status < 300 ? resolve(request.response) : reject(new Error(request.response?.error ?? `The server answered ${request.status}.`))));
    request.addEventListener("error", () => reject(new Error("The server cannot be reached.")));
    request.send(body);
  });
}

async function replay(files) {
  const id = now.shown;
  $("message").hidden = true;
  $("file").disabled = now.busy = true;
  const follow = setInterval(async () => {
    const one = await ask(address(id)).catch(() => null);
    if (now.busy && one?.replaying) progress(one.replaying);
  }, BUSY);
  try {
    const fields = { ...($("probs").value && { probs: $("probs").value }), logits: $("logits").value.trim() || "logits", labels: $("labels").value.trim() || "labels" };
    const parcels = paired(files).sort((a, b) => a.name.localeCompare(b.name, "en", { numeric: true }));
    const { upload_bytes: most } = await ask("/api/limits");
    const large = parcels.find(({ body }) => body.size > most);
    if (large) throw new Error(`${large.name} is too large: at most ${Math.round(most / 2 ** 20)} MB are accepted.`);
    for (const parcel of parcels) {
      progress({ done: 0, total: 1 }, `Sending ${parcel.name}`);
      const { notes } = await sent(query(address(id, "/replay"), { name: parcel.name, ...fields }), parcel);
      if (notes.length) complain(new Error(`${parcel.name}: ${notes.join("; ")}`));
    }
  } catch (error) {
    complain(error);
    $("message").scrollIntoView({ block: "center" });
  } finally {
    clearInterval(follow);
    $("file").disabled = now.busy = false;
    $("file").value = "";
    $("replaying").hidden = true;
  }
  await look();
}
$("file").addEventListener("change", () => { if ($("file").files.length) replay([...$("file").files]); });
for (const kind of ["dragenter", "dragover"]) $("drop").addEventListener(kind, () => $("drop").classList.add("over"));
for (const kind of ["dragleave", "drop"]) $("drop").addEventListener(kind, () => $("drop").classList.remove("over"));
// A file dropped outside the field would otherwise replace the page.
for (const kind of ["dragover", "drop"])
  document.addEventListener(kind, (event) => { if (event.target !== $("file") && event.target !== $("restore")) event.preventDefault(); });

// Download and delete.
for (const button of document.querySelectorAll("[data-copy]"))
  button.addEventListener("click", async () => {
    const text = $(button.dataset.copy);
    try {
      await navigator.clipboard.writeText(text.textContent);
      put($("copied"), "");
      put($("copied"), "Copied.");
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    } catch {
      getSelection().selectAllChildren(text); // browsers let a page copy only on this machine or over https
    }
  });
$("delete").addEventListener("click", async () => {
  const one = now.list.find(({ id }) => id === now.shown);
  if (!one || !confirm(`Delete the monitor ${one.name} and its history?`)) return;
  try {
    await ask(address(one.id), { method: "DELETE" });
    history.replaceState(null, "", location.pathname);
    await look();
    ($("empty").hidden ? $("h-list") : $("main")).focus?.();
  } catch (error) {
    complain(error);
  }
});

look();
