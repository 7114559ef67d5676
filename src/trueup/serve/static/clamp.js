// A small model of Neural Clamping: digits of 5 × 7 pixels in a frame, a camera with glare, a linear network.
const FONT = ["0E11131519110E", "040C040404040E", "0E11010204081F", "1F02040201110E", "02060A121F0202", "1F101E0101110E", "0608101E11110E", "1F010204080808", "0E11110E11110E", "0E11110F01020C"];
const WIDTH = 7, HEIGHT = 9, NOISE = 0.5, GAIN = 1.6, GLARE = 4, ROWS = 600, BINS = 15;
const NAMES = "0123456789";

const glyphs = FONT.map((code) => {
  const pixels = new Float64Array(WIDTH * HEIGHT);
  for (let row = 0; row < 7; row++) {
    const bits = parseInt(code.slice(2 * row, 2 * row + 2), 16);
    for (let column = 0; column < 5; column++) if (bits & (16 >> column)) pixels[(row + 1) * WIDTH + column + 1] = 1;
  }
  return pixels;
});
const glare = Float64Array.from({ length: WIDTH * HEIGHT }, (_, i) => GLARE * ((i % WIDTH) / (WIDTH - 1)) ** 2 * (0.45 + 0.55 * Math.floor(i / WIDTH) / (HEIGHT - 1)));
const energy = glyphs.map((glyph) => glyph.reduce((sum, pixel) => sum + pixel * pixel, 0));

// The same numbers on every visit.
let state = 20170806;
function random() {
  state = (state + 0x6d2b79f5) | 0;
  let mixed = Math.imul(state ^ (state >>> 15), 1 | state);
  mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed;
  return ((mixed ^ (mixed >>> 14)) >>> 0) / 4294967296;
}
const normal = () => Math.sqrt(-2 * Math.log(1 - random())) * Math.cos(2 * Math.PI * random());

// The network's logits are linear in the pixels, so the logits of the glare are simply added.
const read = (image) => glyphs.map((glyph) => (GAIN * glyph.reduce((sum, pixel, i) => sum + pixel * image[i], 0)) / NOISE ** 2);
const rows = Array.from({ length: ROWS }, (_, row) => {
  const label = row % 10;
  const image = Float64Array.from(glyphs[label], (pixel) => pixel + NOISE * normal());
  return { label, image, logits: read(image).map((z, k) => z - (GAIN * energy[k]) / (2 * NOISE ** 2)) };
});
const push = read(glare);

function softmax(logits) {
  const top = Math.max(...logits);
  const powers = logits.map((z) => Math.exp(z - top));
  const total = powers.reduce((sum, power) => sum + power, 0);
  return powers.map((power) => power / total);
}
const says = (row, temperature, delta) => softmax(row.logits.map((z, k) => (z + (1 - delta) * push[k]) / temperature));

function measure(temperature, delta) {
  const bins = Array.from({ length: BINS }, () => ({ confidence: 0, hits: 0 }));
  let confidence = 0, hits = 0, loss = 0;
  for (const row of rows) {
    const p = says(row, temperature, delta);
    const top = Math.max(...p);
    const hit = p.indexOf(top) === row.label ? 1 : 0;
    const bin = bins[Math.max(0, Math.min(BINS - 1, Math.ceil(top * BINS) - 1))];
    bin.confidence += top;
    bin.hits += hit;
    confidence += top / ROWS;
    hits += hit / ROWS;
    loss -= Math.log(Math.max(p[row.label], 1e-300)) / ROWS;
  }
  return { confidence, accuracy: hits, loss, ece: bins.reduce((sum, bin) => sum + Math.abs(bin.confidence - bin.hits) / ROWS, 0) };
}

// Least log-loss over temperatures, by golden section on ln T.
function best(delta) {
  const ratio = (Math.sqrt(5) - 1) / 2;
  let low = 0, high = 2.2;
  for (let step = 0; step < 14; step++) {
    const left = high - ratio * (high - low), right = low + ratio * (high - low);
    if (measure(Math.exp(left), delta).loss < measure(Math.exp(right), delta).loss) high = right;
    else low = left;
  }
  return (low + high) / 2;
}

const $ = (id) => document.getElementById(id);
const percent = (share) => `${Math.round(100 * share)} %`;
const SVG = "http://www.w3.org/2000/svg";
const make = (parent, tag, fields) => {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(fields)) made.setAttribute(name, value);
  parent.append(made);
  return made;
};
const grid = (id) => Array.from({ length: WIDTH * HEIGHT }, (_, i) => make($(id), "rect", { x: i % WIDTH, y: Math.floor(i / WIDTH), width: 1.02, height: 1.02 }));
const seen = grid("toy-seen"), shift = grid("toy-shift"), sum = grid("toy-sum");
const bars = glyphs.map((_, k) => make($("toy-bars"), "rect", { x: 2 + 11 * k, width: 8, y: 50, height: 0 }));
const names = glyphs.map((_, k) => Object.assign(make($("toy-bars"), "text", { x: 6 + 11 * k, y: 59 }), { textContent: NAMES[k] }));
make($("toy-bars"), "line", { x1: 0, x2: 112, y1: 50.5, y2: 50.5, stroke: "currentColor", "stroke-width": 0.3, opacity: 0.5 });

const grey = (value) => { const level = Math.round(255 * Math.max(0, Math.min(1, (value + 0.35) / 1.9))); return `rgb(${level},${level},${level})`; };
const blue = (value) => `rgb(${[255 - 255 * value, 255 - 141 * value, 255 - 77 * value].map((level) => Math.round(level)).join()})`;

let digit = 7;
function show() {
  const temperature = Math.exp(Number($("toy-temperature").value)), delta = Number($("toy-delta").value);
  const row = rows[digit];
  row.image.forEach((pixel, i) => {
    seen[i].setAttribute("fill", grey(pixel + glare[i]));
    shift[i].setAttribute("fill", blue(Math.min(1, (delta * glare[i]) / (1.5 * GLARE))));
    sum[i].setAttribute("fill", grey(pixel + (1 - delta) * glare[i]));
  });
  const p = says(row, temperature, delta);
  const answer = p.indexOf(Math.max(...p));
  p.forEach((share, k) => {
    bars[k].setAttribute("y", 50 - 46 * share);
    bars[k].setAttribute("height", 46 * share);
    bars[k].setAttribute("class", k !== answer ? "" : k === row.label ? "right" : "wrong");
    names[k].setAttribute("class", k === answer ? "on" : "");
  });
  $("toy-bars").setAttribute("aria-label", `It predicts ${NAMES[answer]} with ${percent(p[answer])} confidence; the digit is a ${NAMES[row.label]}`);
  const { confidence, accuracy, ece } = measure(temperature, delta);
  for (const [id, share] of [["toy-says", confidence], ["toy-right", accuracy]]) {
    $(id).style.width = `${100 * share}%`;
    $(`${id}-out`).textContent = percent(share);
  }
  $("toy-temperature-out").textContent = temperature.toFixed(2);
  $("toy-delta-out").textContent = delta === 0 ? "none" : percent(delta);
  $("toy-temperature").setAttribute("aria-valuetext", temperature.toFixed(2));
  $("toy-delta").setAttribute("aria-valuetext", percent(delta));
  const verdict = ece < 0.08 ? "calibrated" : confidence > accuracy ? "overconfident" : "underconfident";
  const repaired = accuracy > 0.85 ? "with high accuracy" : "with low accuracy";
  const words = { calibrated: `Calibrated, ${repaired}.`, overconfident: `Overconfident, ${repaired}.`, underconfident: `Underconfident, ${repaired}.` };
  $("toy-words").textContent = `Over ${ROWS} digits: ${words[verdict]} ECE ${ece.toFixed(3)}. This digit is a ${NAMES[row.label]}; the network predicts ${NAMES[answer]} with ${percent(p[answer])} confidence.`;
}

const presets = {
  raw: () => [0, 0],
  temperature: () => [best(0), 0],
  clamped: () => [best(1), 1],
};
for (const button of document.querySelectorAll("[data-toy]"))
  button.addEventListener("click", () => {
    if (button.dataset.toy === "next") digit = (digit + 7) % ROWS;
    else {
      [$("toy-temperature").value, $("toy-delta").value] = presets[button.dataset.toy]();
      press(button.dataset.toy);
    }
    show();
  });
for (const id of ["toy-temperature", "toy-delta"]) $(id).addEventListener("input", () => { press(null); show(); });
press("raw");
show();

function press(which) {
  for (const name of Object.keys(presets)) document.querySelector(`[data-toy="${name}"]`).setAttribute("aria-pressed", name === which);
}
