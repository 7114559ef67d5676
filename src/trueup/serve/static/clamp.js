// Neural Clamping of a network on the server: starts the fit, follows it, and shows δ, T, both diagrams and the table.
import { ask, posted } from "/static/ask.js";
import { draw } from "/static/charts.js";

const $ = (id) => document.getElementById(id);
const joined = (text) => text.replace(/ %/g, "\u00a0%");
let current = null;

function paint(id, rows, colour) {
  const canvas = $(id);
  [canvas.width, canvas.height] = [rows[0].length, rows.length];
  const pixels = new ImageData(canvas.width, canvas.height);
  rows.flat().forEach((value, index) => pixels.data.set([...colour(value).map(Math.round), 255], 4 * index));
  canvas.getContext("2d").putImageData(pixels, 0, 0);
}

function showPictures({ delta, image }) {
  $("clamp-pictures").hidden = !delta;
  if (!delta) return;
  const largest = Math.max(...delta.flat().map(Math.abs));
  const grey = (value) => Array(3).fill(255 * Math.max(0, Math.min(1, value)));
  // Blue raises a pixel and orange lowers it; white leaves it.
  const sign = (value) => {
    const share = largest ? Math.abs(value) / largest : 0;
    return (value < 0 ? [213, 94, 0] : [0, 114, 178]).map((level) => 255 + share * (level - 255));
  };
  paint("clamp-image", image, grey);
  paint("clamp-delta", delta, sign);
  paint("clamp-sum", image.map((row, i) => row.map((value, k) => value + delta[i][k])), grey);
  $("clamp-range").textContent = largest ? `shift δ, up to ${largest.toPrecision(2)}` : "shift δ = 0";
}

function show(result) {
  showPictures(result);
  $("clamp-words").textContent = joined(`T = ${result.temperature.toFixed(2)}, ‖δ‖ = ${result.delta_norm.toFixed(2)}. ${[result.verdict, ...result.warnings].join(" ")}`);
  for (const [id, curve] of [["clamp-before", result.before], ["clamp-after", result.after]])
    draw($(id), curve.chart, `Reliability diagram, ${curve.method}: ECE ${curve.ece.toFixed(4)}`);
  $("clamp-table").tBodies[0].replaceChildren(...Object.entries(result.scores.methods).map(([name, { metrics }]) => {
    const row = document.createElement("tr");
    const head = Object.assign(document.createElement("th"), { scope: "row", textContent: name });
    row.append(head);
    for (const [metric, digits] of [["accuracy", 3], ["nll", 3], ["ece", 4]]) {
      const { value, low, high } = metrics[metric];
      const cell = row.insertCell();
      cell.textContent = value.toFixed(digits);
      if (low !== null) cell.title = `95 % interval ${low.toFixed(digits)} to ${high.toFixed(digits)}`;
    }
    return row;
  }));
}

function forget() {
  if (current) ask(`/api/clamps/${current}`, { method: "DELETE" }).catch(() => {});
  current = null;
}

async function follow(id) {
  while (id === current) {
    const job = await ask(`/api/clamps/${id}`);
    if (id !== current) return;
    $("clamp-state").textContent = job.state === "waiting" ? "Waiting for other fits…" : `${job.progress}…`;
    if (job.state === "done") {
      $("clamp-result").hidden = false; // before drawing: a hidden chart has no width
      show(job.result);
      $("clamp").dataset.drawn = id;
      return;
    }
    if (job.state === "failed" || job.state === "stopped") throw new Error(job.error ?? "The fit was stopped.");
    await new Promise((resume) => setTimeout(resume, 250));
  }
}

async function start() {
  forget();
  $("clamp-result").hidden = true;
  $("clamp-fitting").hidden = false;
  $("clamp-fitting").querySelector("progress").hidden = $("clamp-stop").hidden = false;
  $("clamp-state").textContent = "";
  const wish = { network: $("clamp-network").value, camera: $("clamp-camera").value || null, recipe: $("clamp-recipe").value };
  try {
    const { id } = await ask("/api/clamps", posted(wish));
    current = id;
    await follow(id);
    if (id === current) $("clamp-fitting").hidden = true;
  } catch (error) {
    $("clamp-state").textContent = error.message;
    $("clamp-fitting").querySelector("progress").hidden = $("clamp-stop").hidden = true;
  }
}

$("clamp").addEventListener("submit", (event) => { event.preventDefault(); start(); });
$("clamp-stop").addEventListener("click", () => { forget(); $("clamp-fitting").hidden = true; });
ask("/api/limits").then(({ served_network: name }) => {
  if (!name) return;
  $("clamp-network").append(new Option(name, "served"));
  $("clamp-networks").hidden = false;
}, () => {});
