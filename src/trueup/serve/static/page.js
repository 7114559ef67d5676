import { ask, paired, posted, query } from "/static/ask.js";
import { draw, newest } from "/static/charts.js";
import { showLabelShift } from "/static/label_shift.js";

const $ = (id) => document.getElementById(id);
const percent = (share, digits = 1) => `${(100 * share).toFixed(digits)}\u00a0%`;
const joined = (text) => text.replace(/ %/g, "\u00a0%"); // a number and its sign stay on one line
const signed = (number) => `${number < 0 ? "−" : "+"}${Math.abs(number).toFixed(4)}`;
const count = (number, what) => `${number.toLocaleString("en")} ${what}`;
const now = { data: null, test: null, job: null, result: null, shift: null, run: 0 };
let limits;

function complain(error) {
  $("message").textContent = error.message;
  $("message").hidden = false;
  if (!$("result").hidden) $("message").scrollIntoView({ block: "center" });
}

// With two files, the one with "test" in its name is the test file.
function parcels(files) {
  const pairs = paired(files);
  if (pairs.length > 2) throw new Error(`Choose one or two files; these are ${pairs.length}.`);
  return pairs.sort((a, b) => /test/i.test(a.name) - /test/i.test(b.name));
}

async function send({ name, body }, labelled = true) {
  if (limits && body.size > limits.upload_bytes)
    throw new Error(`${name} is too large: at most ${Math.round(limits.upload_bytes / 2 ** 20)} MB are accepted.`);
  const written = (id) => $(id).value.trim();
  const fields = new URLSearchParams({ name, probs: $("probs").checked, logits: written("logits") || "logits", labels: written("labels") || "labels", labelled });
  if (labelled) {
    for (const column of written("groups").split(",")) if (column.trim()) fields.append("group", column.trim());
    if (written("clusters")) fields.append("clusters", written("clusters"));
  }
  return ask(`/api/upload?${fields}`, { method: "POST", headers: { "Content-Type": "application/octet-stream" }, body });
}

async function begin(bring) {
  const run = ++now.run;
  $("message").hidden = true;
  $("start").setAttribute("aria-busy", "true");
  $("example").disabled = true;
  try {
    forget();
    const [data, test] = await bring();
    if (run !== now.run) return;
    Object.assign(now, { data, test: test ?? null, job: null, result: null, shift: null });
    await show(run);
  } catch (error) {
    if (run === now.run) complain(error);
  } finally {
    $("start").removeAttribute("aria-busy");
    $("example").disabled = false;
    $("file").value = "";
  }
}

function forget() {
  if (now.job) ask(`/api/jobs/${now.job}`, { method: "DELETE" }).catch(() => {});
  if (now.shift) ask(`/api/label-shifts/${now.shift}`, { method: "DELETE" }).catch(() => {});
  for (const kept of [now.data, now.test]) if (kept) ask(`/api/data/${kept.id}`, { method: "DELETE" }).catch(() => {});
  Object.assign(now, { data: null, test: null, job: null, result: null, shift: null });
  history.replaceState(null, "", location.pathname);
}

// The address contains the ids of the result, so that a reload or a bookmark shows it while the server keeps it.
function remember() {
  const ids = { data: now.data.id, ...(now.test && { test: now.test.id }), job: now.job, ...(now.shift && { shift: now.shift }) };
  history.replaceState(null, "", query(location.pathname, ids));
  $("link").href = location.href;
}

async function recall() {
  const ids = new URLSearchParams(location.search);
  if (!ids.get("data") || !ids.get("job")) return;
  const run = ++now.run;
  try {
    const [data, test] = await Promise.all([ids.get("data"), ids.get("test")].map((id) => (id ? ask(`/api/data/${encodeURIComponent(id)}`) : null)));
    const job = await ask(`/api/jobs/${encodeURIComponent(ids.get("job"))}`);
    Object.assign(now, { data, test, job: job.id, result: null, shift: ids.get("shift") });
    await show(run, job);
  } catch (error) {
    history.replaceState(null, "", location.pathname);
    if (run === now.run) complain(new Error(`The server has deleted this result: upload the file again. (${error.message})`));
  }
}

// Options other than the defaults.
function wishes() {
  const methods = [...$("method-choices").querySelectorAll("input:checked")].map((box) => box.value);
  const n_folds = Number($("folds").value);
  return { ...(methods.length && { methods }), ...(n_folds && { n_folds }) };
}

async function listWishes() {
  if ($("method-choices").children.length) return;
  const methods = (await ask("/api/methods")).filter(({ name }) => name !== "identity");
  $("method-choices").replaceChildren(...methods.map(({ name, title, summary, default: usual }) => {
    const label = document.createElement("label");
    label.className = "check";
    label.title = summary;
    const box = document.createElement("input");
    box.type = "checkbox";
    box.value = name;
    label.append(box, ` ${title}${usual ? " (default)" : ""}`);
    return label;
  }));
}

async function show(run, kept = null) {
  const { data, test } = now;
  const shown = test ?? data;
  const tested = test?.rows ?? data.test_rows;
  $("source").textContent = [test ? `${data.name} and ${test.name}` : data.name, count(data.rows, tested ? "calibration rows" : "rows"),
    tested ? count(tested, "test rows") : "", count(data.n_classes, "classes"), data.clusters ? `correlated by ${data.clusters}` : "", ...data.notes].filter(Boolean).join(" · ");
  $("how").textContent = tested ? "Fitted on the calibration rows, scored on the test rows."
    : "Cross-fitted: each row is scored by a calibrator that has not seen it.";
  $("verdict").textContent = "Measuring…";
  for (const id of ["compare", "where", "promise", "shift", "shift-result", "take", "legend", "best"]) $(id).hidden = true;
  $("shift-state").textContent = "";
  $("temperature").value = 0;
  $("result").hidden = false;
  $("result").scrollIntoView();
  $("verdict").focus({ preventScroll: true });
  turn();
  const evaluated = ask(`/api/data/${shown.id}/evaluate`);
  const job = kept ?? await ask(`/api/data/${data.id}/fit`, posted({ test: test?.id ?? null, ...wishes() }));
  now.job = job.id;
  listMethods(job);
  $("fitting").hidden = false;
  remember();
  evaluated.then((answer) => { if (run === now.run && !now.result) $("verdict").textContent = joined(answer.verdict); }, complain);
  await follow(run);
}

async function follow(run) {
  for (;;) {
    const job = await ask(`/api/jobs/${now.job}`);
    if (run !== now.run) return;
    listMethods(job);
    const waiting = job.state === "waiting" ? "Waiting for other fits…" : `Fitting ${job.titles[job.fitting] ?? "…"} (${job.done + 1} of ${job.methods.length})`;
    $("progress").max = job.methods.length;
    $("progress").value = job.done;
    $("progress-text").textContent = waiting;
    if (job.state === "done") return finish(job);
    if (job.state === "failed" || job.state === "stopped") {
      $("fitting").hidden = true;
      throw new Error(job.error ?? "The fit was stopped.");
    }
    await new Promise((resume) => setTimeout(resume, 250));
  }
}

function finish(job) {
  const result = (now.result = job.result);
  $("fitting").hidden = true;
  $("verdict").textContent = joined(result.verdict);
  const methods = Object.keys(result.scores.methods);
  for (const select of [$("first"), $("second")])
    select.replaceChildren(...methods.map((name) => new Option(result.titles[name], name)));
  $("first").value = "raw";
  $("second").value = result.chosen === "raw" ? methods[1] ?? "raw" : result.chosen;
  $("report").href = `/api/jobs/${job.id}/report`;
  $("calibrator").href = `/api/jobs/${job.id}/calibrator`;
  $("calibrator").textContent = result.chosen === "raw" ? "Download the identity calibrator" : "Download the calibrator";
  for (const id of ["take", "legend"]) $(id).hidden = false;
  $("compare").hidden = methods.length < 2;
  if (methods.length > 1) compare();
  bestTemperature();
  promises();
  if (now.data.groups.length) where().catch(complain);
  $("shift").hidden = false;
  if (now.shift) followShift();
}

// The groups, before and after calibration.
async function where() {
  const job = now.job;
  const answer = await ask(`/api/jobs/${job}/groups`);
  if (job !== now.job) return;
  $("where-text").textContent = joined(answer.text);
  $("where").hidden = false;
  const figures = answer.panels.map(({ title, summary, head, rows }) => {
    const figure = document.createElement("figure");
    const heading = document.createElement("h3");
    const chart = document.createElement("div");
    const words = document.createElement("figcaption");
    heading.textContent = title;
    chart.className = "chart";
    chart.setAttribute("role", "img");
    words.textContent = joined(summary);
    figure.className = "panel figure groups";
    figure.append(heading, chart, words, numbersTable(title, head, rows));
    return figure;
  });
  $("where-panels").replaceChildren(...figures);
  answer.panels.forEach(({ title, summary, chart }, index) => {
    draw(figures[index].querySelector(".chart"), chart, `${title}. ${summary}`);
  });
  $("where").dataset.drawn = String(answer.panels.length);
}

function numbersTable(title, head, rows) {
  const details = document.createElement("details");
  const summary = document.createElement("summary");
  const scroll = document.createElement("div");
  const table = document.createElement("table");
  summary.textContent = "The numbers";
  summary.setAttribute("aria-label", `The numbers: ${title}`);
  scroll.className = "scroll";
  const line = (cells, tag) => {
    const row = document.createElement("tr");
    row.append(...cells.map((text, index) => {
      const cell = document.createElement(tag === "th" || !index ? "th" : "td");
      cell.scope = tag === "th" ? "col" : "row";
      cell.textContent = joined(text);
      return cell;
    }));
    return row;
  };
  table.createTHead().append(line(head, "th"));
  table.createTBody().append(...rows.map((cells) => line(cells, "td")));
  scroll.append(table);
  details.append(summary, scroll);
  return details;
}

// Rows without labels: their class frequencies.
async function bringNew(files) {
  const run = now.run;
  $("message").hidden = true;
  $("shift-result").hidden = true;
  $("shift-state").textContent = "Reading…";
  try {
    const [parcel] = paired(files);
    const { id } = await send(parcel, false);
    const begun = await ask(`/api/data/${now.data.id}/label-shift`, posted({ new: id }));
    // The estimate keeps what it needs.
    ask(`/api/data/${id}`, { method: "DELETE" }).catch(() => {});
    if (run !== now.run) return;
    if (now.shift) ask(`/api/label-shifts/${now.shift}`, { method: "DELETE" }).catch(() => {});
    now.shift = begun.id;
    remember();
    await followShift();
  } catch (error) {
    $("shift-state").textContent = error.message;
  }
}

async function followShift() {
  const shift = now.shift;
  try {
    for (;;) {
      const answer = await ask(`/api/label-shifts/${encodeURIComponent(shift)}`);
      if (shift !== now.shift) return;
      if (answer.state === "done") return showLabelShift(answer);
      if (answer.state === "failed" || answer.state === "stopped") throw new Error(answer.error ?? "The estimate was stopped.");
      $("shift-state").textContent = answer.state === "waiting" ? "Waiting for other fits…" : `Estimating the class frequencies of ${answer.new.name}…`;
      await new Promise((resume) => setTimeout(resume, 250));
    }
  } catch (error) {
    if (shift === now.shift) $("shift-state").textContent = error.message;
  }
}

// The table: the results of each method so far.
function listMethods(job) {
  const result = job.result;
  const names = result ? Object.keys(result.scores.methods).concat(Object.keys(result.failures)) : ["raw", ...job.methods];
  const largest = result && Math.max(...Object.values(result.scores.methods).map((answer) => answer.metrics.ece.value));
  $("methods").tBodies[0].replaceChildren(...names.map((name) => {
    const row = document.createElement("tr");
    const head = document.createElement("th");
    head.scope = "row";
    head.textContent = (result?.titles ?? job.titles)[name];
    row.append(head);
    if (result?.scores.methods[name]) filled(row, head, name, result, largest, job.id);
    else if (result) writeNote(row, result.failures[name], "failed");
    else {
      const index = job.methods.indexOf(name);
      const done = index < job.done;
      const running = name === job.fitting;
      writeNote(row, index < 0 ? "" : done ? "✓ fitted" : running ? "fitting…" : "waiting", running ? "now" : "");
    }
    return row;
  }));
}

function writeNote(row, text, kind) {
  const cell = row.insertCell();
  cell.colSpan = 8;
  cell.className = "why";
  const words = document.createElement("span");
  words.className = "state";
  words.textContent = text;
  cell.append(words);
  if (kind) row.className = kind;
}

function filled(row, head, name, result, largest, job) {
  const { metrics, change } = result.scores.methods[name];
  if (name === result.chosen) {
    row.className = "chosen";
    const tag = document.createElement("span");
    tag.className = "tag";
    tag.textContent = "chosen";
    head.append(tag);
  }
  for (const words of result.warnings[name] ?? []) {
    const note = document.createElement("span");
    note.className = "warned";
    note.textContent = words;
    head.append(note);
  }
  const cell = (text, className = "") => {
    const made = row.insertCell();
    made.className = className;
    made.append(text);
    return made;
  };
  // A screen reader needs a title in words in addition to colour and shape.
  const dot = (metric, better) => {
    const moved = change[metric];
    const made = document.createElement("span");
    const clear = moved && moved.low !== null && (moved.low > 0 || moved.high < 0);
    const good = clear && Math.sign(moved.value) === better;
    made.className = `dot ${clear ? (good ? "" : "worse") : "none"}`;
    if (clear) {
      made.title = `${good ? "better" : "worse"} than the raw network by ${Math.abs(moved.value).toFixed(4)}, 95 % interval of the change ${signed(moved.low)} to ${signed(moved.high)}`;
      made.setAttribute("role", "img");
      made.setAttribute("aria-label", made.title);
    }
    return made;
  };
  const bar = document.createElement("span");
  bar.className = "bar";
  bar.style.width = `${(100 * metrics.ece.value) / largest}%`;
  cell(bar, "less bars");
  cell(metrics.ece.value.toFixed(4)).append(dot("ece", -1));
  cell(`${metrics.ece.low.toFixed(4)} – ${metrics.ece.high.toFixed(4)}`, "less interval");
  cell(metrics.nll.value.toFixed(4)).append(dot("nll", -1));
  cell(metrics.brier.value.toFixed(4), "less").append(dot("brier", -1));
  cell(percent(metrics.accuracy.value)).append(dot("accuracy", 1));
  cell(result.seconds[name] === undefined ? "" : result.seconds[name].toFixed(2), "less");
  const link = document.createElement("a");
  link.href = query(`/api/jobs/${job}/calibrator`, { method: name });
  link.download = "";
  link.textContent = "save";
  link.setAttribute("aria-label", `Save the calibrator of ${result.titles[name]}`);
  cell(name === "raw" ? "" : link);
}

// The sliders.
const temperature = () => Math.exp(Number($("temperature").value));
const redraw = newest(async (id, temperature, bins) => {
  try {
    const answer = await ask(query(`/api/data/${id}/curve`, { temperature: temperature.toFixed(4), bins }));
    if (id !== (now.test ?? now.data)?.id) return;
    nameOutcome(answer.event);
    $("n-confidence").textContent = percent(answer.confidence);
    $("n-accuracy").textContent = percent(answer.accuracy);
    $("n-ece").textContent = answer.ece.toFixed(4);
    $("n-nll").textContent = answer.nll.toFixed(4);
    draw($("diagram"), answer.chart, `Reliability diagram at temperature ${temperature.toFixed(2)} with ${bins} bins: ${outcomes(answer)}`);
    $("diagram").dataset.drawn = `${temperature.toFixed(2)}/${bins}`;
  } catch (error) {
    complain(error);
  }
});

// For two classes the diagram shows class 1: its predicted probability and its frequency.
function nameOutcome(event) {
  $("t-confidence").textContent = event ? "predicts class 1 in" : "confidence";
  $("t-accuracy").textContent = event ? "class 1 happens in" : "accuracy";
  $("key-outcome").textContent = event ? "how often class 1 happens" : "accuracy";
  $("key-over").textContent = event ? "predicted too high" : "overconfident";
  $("key-under").textContent = event ? "predicted too low" : "underconfident";
}

function outcomes({ event, confidence, accuracy, ece }) {
  const means = event ? `predicts class 1 in ${percent(confidence)}, it happens in ${percent(accuracy)}` : `confidence ${percent(confidence)}, accuracy ${percent(accuracy)}`;
  return `${means}, ECE ${ece.toFixed(4)}`;
}

function turn() {
  const bins = Number($("bins").value);
  $("temperature-out").textContent = temperature().toFixed(2);
  $("temperature").setAttribute("aria-valuetext", temperature().toFixed(2));
  $("bins-out").textContent = bins;
  const shown = now.test ?? now.data;
  if (shown) redraw(shown.id, temperature(), bins);
}

function setTemperature(value) {
  $("temperature").value = Math.log(value);
  turn();
}

// Temperature scaling takes a row of logits (1, 0, …) to (1/T, 0, …), which reveals its temperature.
async function bestTemperature() {
  if (!now.result?.scores.methods.temperature) return;
  const row = Array.from({ length: now.data.n_classes }, (_, k) => (k ? 0 : 1));
  const { logits: [after] } = await ask(`/api/jobs/${now.job}/apply`, posted({ method: "temperature", logits: [row] }));
  const best = 1 / (after[0] - after[1]);
  $("best").onclick = () => setTemperature(best);
  $("best").textContent = `Best, ${best.toFixed(2)}`;
  $("best").hidden = false;
}

const compare = newest(async () => {
  const [first, second] = [$("first").value, $("second").value];
  if (first === second) {
    $("difference").textContent = "Choose two different methods.";
    return;
  }
  try {
    const answer = await ask(query(`/api/jobs/${now.job}/compare`, { first, second, bins: $("bins").value }));
    const words = (curve) => `Reliability diagram of ${now.result.titles[curve.method]}: ${outcomes(curve)}`;
    draw($("chart-first"), answer.first.chart, words(answer.first));
    draw($("chart-second"), answer.second.chart, words(answer.second));
    const { ece, nll } = answer.scores.methods[second].change;
    const describeChange = (name, moved) => {
      const clear = moved.low > 0 || moved.high < 0;
      const how = clear ? (moved.value < 0 ? "is lower" : "is higher") : "does not clearly differ";
      return `${name} ${how}${clear ? ` by ${Math.abs(moved.value).toFixed(4)}` : ""} (change ${signed(moved.low)} to ${signed(moved.high)} with 95\u00a0% confidence)`;
    };
    $("difference").textContent = `With ${now.result.titles[second]} instead of ${now.result.titles[first]}, the ${describeChange("ECE", ece)}, and the ${describeChange("NLL", nll)}.`;
    $("compare").dataset.drawn = `${first}/${second}`;
  } catch (error) {
    complain(error);
  }
});

// Guarantees: the server sends all of them, and the slider selects one.
let promised;
async function promises() {
  const job = now.job;
  try {
    const answer = await ask(`/api/jobs/${job}/promise`);
    if (job !== now.job) return;
    promised = answer;
    const possible = answer.allowed.findIndex((share, index) => share >= 0.02 && answer.threshold[index] !== null);
    $("allowed").max = answer.allowed.length - 1;
    $("allowed").value = possible < 0 ? answer.allowed.length - 1 : possible;
    $("promise-note").textContent = answer.note;
    $("promise").hidden = false;
    allow();
    sets();
  } catch (error) {
    if (job === now.job) complain(error);
  }
}

function allow() {
  const index = Number($("allowed").value);
  const share = percent(promised.allowed[index]);
  $("allowed-out").textContent = share;
  $("allowed").setAttribute("aria-valuetext", share);
  $("promise-text").textContent = joined(promised.text[index]);
  const [line, mark] = promised.chart.marks;
  const chart = { ...promised.chart, marks: [line, { ...mark, x: [promised.allowed[index]], y: [promised.coverage[index]] }] };
  draw($("promise-chart"), chart, `Share of rows answered against the errors allowed. ${promised.text[index]}`);
}

const sets = newest(async () => {
  const coverage = Number($("coverage").value) / 100;
  $("coverage-out").textContent = percent(coverage, 0);
  $("coverage").setAttribute("aria-valuetext", percent(coverage, 0));
  const job = now.job;
  try {
    const answer = await ask(query(`/api/jobs/${job}/sets`, { coverage }));
    if (job !== now.job) return;
    const { coverage: held, size, empty } = answer.scores;
    $("sets-text").textContent = `${answer.note ? `${answer.note} ` : ""}Sets of ${size.toFixed(2)} classes on average; they contain the true class in ${percent(held.value)} of ${held.rows.toLocaleString("en")} rows (95\u00a0% interval ${percent(held.low)} to ${percent(held.high)})${empty > 0 ? `; ${percent(empty)} are empty` : ""}.`;
    $("sets-text").dataset.drawn = String(coverage);
  } catch (error) {
    if (job === now.job) complain(error);
  }
});

$("allowed").addEventListener("input", () => { if (promised) allow(); });
$("coverage").addEventListener("input", () => sets());
$("example").addEventListener("click", () => begin(async () => [await ask("/api/example", { method: "POST" })]));
$("file").addEventListener("change", () => {
  const files = [...$("file").files];
  if (files.length) begin(async () => Promise.all(parcels(files).map((parcel) => send(parcel))));
});
$("new-file").addEventListener("change", () => {
  const files = [...$("new-file").files];
  $("new-file").value = "";
  if (files.length && now.data) bringNew(files);
});
$("start").addEventListener("submit", (event) => event.preventDefault());
$("stop").addEventListener("click", () => {
  if (now.job) ask(`/api/jobs/${now.job}`, { method: "DELETE" }).catch(() => {});
  now.run++;
  now.job = null;
  $("fitting").hidden = true;
});
for (const kind of ["dragenter", "dragover"]) $("drop").addEventListener(kind, () => $("drop").classList.add("over"));
for (const kind of ["dragleave", "drop"]) $("drop").addEventListener(kind, () => $("drop").classList.remove("over"));
// A file dropped outside the field would otherwise replace the page.
for (const kind of ["dragover", "drop"])
  document.addEventListener(kind, (event) => { if (event.target !== $("file")) event.preventDefault(); });
for (const id of ["temperature", "bins"]) $(id).addEventListener("input", turn);
$("bins").addEventListener("change", () => { if (now.result) compare(); });
$("reset").addEventListener("click", () => setTemperature(1));
for (const id of ["first", "second"]) $(id).addEventListener("change", () => compare());

$("choices").addEventListener("toggle", () => listWishes().catch(complain), { once: true });
recall();

ask("/api/limits").then((answer) => {
  limits = answer;
  const minutes = Math.round(answer.seconds / 60);
  $("kept").textContent = minutes === 1 ? "a minute after its last use" : `${minutes} minutes after its last use`;
}, () => {});
// Everything else loads after the first view of the page.
requestAnimationFrame(() => setTimeout(() => import("/static/clamp.js")));
