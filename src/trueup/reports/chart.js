// Draws the charts that trueup.reports.plot describes, marks on axes, as SVG. The report and the web app share it.
const NS = "http://www.w3.org/2000/svg";
const DASHES = { dash: "6 4", dot: "2 3" };
const NARROW = 480; // below this width in pixels, names of rows are above the rows
const pen = document.createElement("canvas").getContext("2d");

function add(parent, tag, attributes, text) {
  const made = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== undefined) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

const finite = (value) => value !== null && Number.isFinite(value);
const short = (name, most) => (name.length <= most ? name : `${name.slice(0, most / 2)}…${name.slice(1 - most / 2)}`);
const each = (value, index) => (Array.isArray(value) ? value[index] : value);

// Formats ticks with the digits that tell two of them apart.
function tickLabel(value, step, percent) {
  const digits = Math.max(0, -Math.floor(Math.log10((percent ? 100 : 1) * step) + 1e-9));
  const text = (percent ? 100 * value : value).toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  return text.replace("-", "−") + (percent ? "\u00a0%" : "");
}

function roundTicks([low, high], axis, most) {
  if (axis.log) {
    const powers = [];
    for (let k = Math.floor(Math.log10(low)); k <= Math.ceil(Math.log10(high)); k++) powers.push(10 ** k);
    const inside = (ticks) => ticks.filter((tick) => tick >= low * (1 - 1e-9) && tick <= high * (1 + 1e-9));
    const fine = inside(powers.flatMap((power) => [power, 2 * power, 5 * power]));
    return (fine.length > most ? inside(powers) : fine).map((tick) => [tick, axis.percent ? `${+(100 * tick).toPrecision(3)}\u00a0%` : String(+tick.toPrecision(3))]);
  }
  const raw = (high - low) / most, power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= raw * (1 - 1e-9));
  const first = Math.ceil(low / step - 1e-9), count = Math.floor(high / step + 1e-9) - first + 1;
  return Array.from({ length: count }, (_, k) => [(first + k) * step, tickLabel((first + k) * step || 0, step, axis.percent)]);
}

// The ends of bars, one after another if they are stacked.
function barEnds(plot) {
  const tops = new Map();
  return new Map(plot.marks.filter(({ kind }) => kind === "bars").map((mark) => [mark, mark.at.map((at, k) => {
    const base = plot.stacked ? tops.get(at) ?? 0 : each(mark.base ?? 0, k);
    if (plot.stacked) tops.set(at, base + mark.size[k]);
    return [base, base + mark.size[k]];
  })]));
}

function extent(plot, name, ends) {
  const axis = plot[name], values = [];
  if (axis.rows) return [axis.rows.length - 0.35, -0.65];
  for (const mark of plot.marks) {
    if (mark.kind === "rule") { if ((name === "y") === Boolean(mark.horizontal)) values.push(mark.at); }
    else if (mark.kind === "text") { if (name === "y") values.push(mark.y); }
    else if (mark.kind === "bars" && (name === "x") === Boolean(mark.horizontal)) values.push(...ends.get(mark).flat());
    else if (mark.kind === "bars") mark.at.forEach((at, k) => values.push(at - each(mark.width, k) / 2, at + each(mark.width, k) / 2));
    else if (mark.kind === "area") values.push(...(name === "x" ? mark.x : [...mark.low, ...mark.high]));
    else values.push(...mark[name], ...(name === "x" && mark.interval ? mark.interval.flat() : []));
  }
  const known = values.filter((value) => finite(value) && (!axis.log || value > 0));
  let [low, high] = known.length ? [Math.min(...known), Math.max(...known)] : [0, 1];
  if (axis.log) return axis.range ?? [low, high];
  if (low === high) [low, high] = [low - 0.5 * (Math.abs(low) || 1), high + 0.5 * (Math.abs(high) || 1)];
  const margin = 0.05 * (high - low);
  return [axis.range?.[0] ?? low - margin, axis.range?.[1] ?? high + margin];
}

function scale([from, to], [start, end], log) {
  const at = log ? Math.log : (value) => value;
  return (value) => (finite(value) ? start + ((at(value) - at(from)) / (at(to) - at(from))) * (end - start) : NaN);
}

function symbol(kind, r) {
  if (kind.startsWith("square")) return `M${-r},${-r}h${2 * r}v${2 * r}h${-2 * r}z`;
  if (kind.startsWith("diamond")) return `M0,${-1.3 * r}L${1.3 * r},0L0,${1.3 * r}L${-1.3 * r},0z`;
  if (kind.startsWith("triangle")) return `M${-1.2 * r},${r}h${2.4 * r}L0,${-1.2 * r}z`;
  return `M${-r},0a${r},${r} 0 1 0 ${2 * r},0a${r},${r} 0 1 0 ${-2 * r},0z`;
}

function point(parent, mark, x, y, size) {
  const hollow = (mark.marker ?? "").endsWith("-open"), down = (mark.marker ?? "").startsWith("triangle-down");
  const look = hollow ? { fill: "var(--chart-paper)", stroke: mark.color, "stroke-width": 2 } : { fill: mark.color, stroke: "var(--chart-paper)", "stroke-width": 1 };
  add(parent, "path", { d: symbol(mark.marker ?? "circle", size / 2), transform: `translate(${x},${y})${down ? " rotate(180)" : ""}`, ...look });
}

function path(points) {
  let pieces = "", open = false;
  for (const [x, y] of points) {
    const known = finite(x) && finite(y);
    if (known) pieces += `${open ? "L" : "M"}${x.toFixed(1)},${y.toFixed(1)}`;
    open = known;
  }
  return pieces;
}

function legendOf(plots) {
  const list = document.createElement("ul");
  list.className = "chart-legend";
  for (const mark of plots.flatMap(({ marks }) => marks)) {
    if (!mark.name || mark.listed === false) continue;
    const item = document.createElement("li");
    const icon = add(item, "svg", { width: 20, height: 12, viewBox: "-10 -6 20 12" });
    if (mark.kind === "dots") point(icon, mark, 0, 0, 9);
    else if (mark.kind === "line" || mark.kind === "rule") add(icon, "path", { d: "M-9,0H9", stroke: mark.color, "stroke-width": mark.width ?? 1.4, "stroke-dasharray": DASHES[mark.dash] });
    else add(icon, "rect", { x: -7, y: -5, width: 14, height: 10, fill: mark.color, opacity: mark.kind === "area" && !mark.color.includes("band") ? 0.2 : 1 });
    item.append(mark.name);
    list.append(item);
  }
  return list.children.length ? [list] : [];
}

// Draws the marks of one panel; returns the places with a text to show.
function drawMarks(svg, plot, { x, y, box, ends, clip }) {
  const under = add(svg, "g", { "clip-path": `url(#${clip})` }), spots = [];
  const [left, right, top, bottom] = box;
  const inside = (a, b) => finite(a) && finite(b) && a > left - 2 && a < right + 2 && b > top - 2 && b < bottom + 2;
  for (const mark of plot.marks) {
    const ink = { stroke: mark.color, "stroke-dasharray": DASHES[mark.dash], fill: "none" };
    const spot = (k, a, b, reach = [a, a, b, b]) => { if (mark.hover?.[k] && inside(a, b)) spots.push({ x: a, y: b, reach, text: mark.hover[k] }); };
    if (mark.kind === "rule") {
      const at = (mark.horizontal ? y : x)(mark.at);
      add(under, "path", { d: mark.horizontal ? `M${left},${at}H${right}` : `M${at},${top}V${bottom}`, ...ink, "stroke-width": 1.2 });
    } else if (mark.kind === "text") {
      const end = mark.x > 0.5, at = end ? right - 4 : left + 4;
      if (finite(y(mark.y))) add(svg, "text", { x: at, y: y(mark.y) + 4, "text-anchor": end ? "end" : "start", style: `fill:${mark.color}`, class: "small" }, mark.text);
    } else if (mark.kind === "bars") {
      ends.get(mark).forEach(([from, to], k) => {
        const half = each(mark.width, k) / 2, [across, along] = mark.horizontal ? [y, x] : [x, y];
        const [a, b] = [across(mark.at[k] - half), across(mark.at[k] + half)].sort((p, q) => p - q);
        const [c, d] = [along(from), along(to)].sort((p, q) => p - q);
        if (![a, b, c, d].every(finite)) return;
        const [x0, x1, y0, y1] = mark.horizontal ? [c, d, a, b] : [a, b, c, d];
        add(under, "rect", { x: x0, y: y0, width: x1 - x0, height: y1 - y0, fill: mark.color });
        if (mark.labels?.[k]) add(svg, "text", { x: (x0 + x1) / 2, y: y0 - 3, "text-anchor": "middle", class: "tiny" }, mark.labels[k]);
        spot(k, Math.min(Math.max((x0 + x1) / 2, left), right), Math.max(y0, top), [x0, x1, y0, y1]);
      });
    } else if (mark.kind === "area") {
      const edge = (side) => mark.x.map((value, k) => [x(value), y(side[k])]);
      const d = path([...edge(mark.low), ...edge(mark.high).reverse()]);
      add(under, "path", { d: `${d}z`, fill: mark.color, opacity: mark.color.includes("band") ? 1 : 0.15 });
    } else if (mark.kind === "line") {
      const points = mark.x.map((value, k) => [x(value), y(mark.y[k])]);
      const corners = mark.steps ? points.flatMap(([a, b], k) => (k ? [[a, points[k - 1][1]], [a, b]] : [[a, b]])) : points;
      add(under, "path", { d: path(corners), ...ink, "stroke-width": mark.width ?? 2, "stroke-linejoin": "round" });
      points.forEach(([a, b], k) => {
        if (mark.markers && inside(a, b)) point(svg, mark, a, b, 7);
        spot(k, a, b);
      });
    } else {
      mark.x.forEach((value, k) => {
        const [a, b] = [x(value), y(mark.y[k])], [low, high] = (mark.interval ?? []).map((side) => x(side[k]));
        if (finite(low) && finite(high)) add(under, "path", { d: `M${low},${b}H${high}`, ...ink, "stroke-width": 1.6 });
        if (inside(a, b)) point(svg, mark, a, b, each(mark.size ?? 9, k));
        spot(k, a, b);
      });
    }
  }
  return spots;
}

const tip = document.createElement("div");
tip.className = "chart-tip";
tip.hidden = true;
const hideTip = () => { tip.hidden = true; };
addEventListener("scroll", hideTip, { passive: true });

function showTips(svg, spots) {
  const far = ({ reach: [x0, x1, y0, y1] }, x, y) => Math.hypot(Math.max(x0 - x, 0, x - x1), Math.max(y0 - y, 0, y - y1));
  const show = ({ clientX, clientY }) => {
    const box = svg.getBoundingClientRect(), [x, y] = [clientX - box.left, clientY - box.top];
    let nearest, least = 36;
    for (const spot of spots) {
      const distance = far(spot, x, y);
      if (distance < least || (distance === least && nearest && Math.hypot(spot.x - x, spot.y - y) < Math.hypot(nearest.x - x, nearest.y - y))) [nearest, least] = [spot, distance];
    }
    tip.hidden = !nearest;
    if (!nearest) return;
    tip.textContent = nearest.text;
    document.body.append(tip);
    const start = box.left + nearest.x, above = box.top + nearest.y - tip.offsetHeight - 10;
    tip.style.left = `${Math.max(6, Math.min(start - tip.offsetWidth / 2, document.documentElement.clientWidth - tip.offsetWidth - 6))}px`;
    tip.style.top = `${above > 4 ? above : box.top + nearest.y + 14}px`;
  };
  svg.addEventListener("pointermove", show);
  svg.addEventListener("pointerdown", show);
  svg.addEventListener("pointerleave", hideTip);
}

let clips = 0;

// Draws a chart in an element. Options: a `width` and a `height` in pixels, and whether to show a `legend`.
export function drawChart(element, plot, { width = element.clientWidth, height, legend = plot.legend !== false } = {}) {
  pen.font = `12px ${getComputedStyle(element).fontFamily}`;
  const measure = (text) => pen.measureText(text).width;
  const panels = plot.below ? [plot, { ...plot.below, x: plot.x }] : [plot];
  const { rows, notes = [], bold = [] } = plot.y;
  const noted = (name, k) => (notes[k] ? `${name} (${notes[k]})` : name);
  const above = rows && (plot.y.names_above || width < NARROW);
  const size = rows ? (above ? 76 + 42 * Math.max(rows.length, 1) : 84 + 24 * Math.max(rows.length, 3)) : plot.height ?? 300;
  const names = legend ? legendOf(panels) : [];
  const svg = document.createElementNS(NS, "svg");
  element.replaceChildren(...names, svg);
  element.style.height = "auto";
  const full = Math.max((height ?? size) - (names[0]?.offsetHeight ?? 0) * (height ? 1 : 0), 120);
  svg.setAttribute("width", width);
  svg.setAttribute("height", full);
  const gap = 18, top = 12, bottom = full - (plot.x.title ? 46 : 28);
  const tall = (bottom - top - gap * (panels.length - 1)) / panels.length;
  const boxes = panels.map((_, k) => [top + k * (tall + gap), top + k * (tall + gap) + tall]);
  const prepared = panels.map((panel, k) => {
    const ends = barEnds(panel), spans = { x: extent(panel, "x", ends), y: extent(panel, "y", ends) };
    if (above) spans.y = [rows.length - 0.35, -0.85];
    const given = panel.y.ticks?.map((tick, i) => [tick, panel.y.tick_labels?.[i] ?? tickLabel(tick, 0.1, panel.y.percent)]);
    const ticks = rows ? rows.map((name, i) => [i, noted(short(name, 24), i)]) : given ?? roundTicks(spans.y, panel.y, Math.max(2, Math.min(7, Math.floor(tall / 42))));
    return { panel, ends, spans, ticks, y: scale(spans.y, [...boxes[k]].reverse(), panel.y.log), box: boxes[k] };
  });
  const left = above ? 8 : Math.ceil(Math.max(...prepared.flatMap(({ ticks }) => ticks.map(([, text]) => measure(text))), 0)) + (plot.y.title ? 30 : 12);
  const span = prepared[0].spans.x;
  let right = width - 16;
  const given = plot.x.ticks?.map((tick, k) => [tick, plot.x.tick_labels?.[k] ?? roundTicks([tick, tick * 1.01], { ...plot.x, log: true }, 1)[0]?.[1] ?? tickLabel(tick, 0.1, plot.x.percent)]);
  const ticksX = given ?? roundTicks(span, plot.x, Math.max(2, Math.min(7, Math.floor((right - left) / 64))));
  if (ticksX.length) right = Math.min(right, width - measure(ticksX.at(-1)[1]) / 2 - 2);
  const x = scale(span, [left, right], plot.x.log), spots = [];
  for (const { panel, ends, ticks, y, box } of prepared) {
    if (!rows) for (const [tick, text] of ticks) {
      const at = y(tick);
      if (!(at > box[0] - 1 && at < box[1] + 1)) continue;
      add(svg, "path", { d: `M${left},${at}H${right}`, class: "grid" });
      add(svg, "text", { x: left - 8, y: at + 4, "text-anchor": "end" }, text);
    }
    if (panel.y.title) add(svg, "text", { transform: `translate(11,${(box[0] + box[1]) / 2}) rotate(-90)`, "text-anchor": "middle" }, panel.y.title);
    if (rows) for (const [tick] of ticksX) add(svg, "path", { d: `M${x(tick)},${box[0]}V${box[1]}`, class: "grid" });
    add(svg, "path", { d: `M${left},${box[1]}H${right}`, class: "grid" });
    const clip = `clip-${++clips}`;
    add(add(svg, "clipPath", { id: clip }), "rect", { x: left, y: box[0], width: Math.max(right - left, 0), height: box[1] - box[0] });
    const drawn = drawMarks(svg, panel, { x, y, ends, clip, box: [left, right, ...box] });
    spots.push(...drawn);
    if (rows) rows.forEach((name, k) => {
      const look = { class: `row${bold.includes(k) ? " bold" : ""}` };
      if (above) add(svg, "text", { x: left, y: y(k) - 11, ...look }, noted(short(name, 2 * Math.floor(width / 17)), k));
      else add(svg, "text", { x: left - 8, y: y(k) + 4, "text-anchor": "end", ...look }, noted(short(name, 24), k));
    });
    if (panel.empty) add(svg, "text", { x: (left + right) / 2, y: (box[0] + box[1]) / 2, "text-anchor": "middle" }, panel.empty);
  }
  let last = -Infinity;
  for (const [tick, text] of ticksX) {
    const at = x(tick), half = measure(text) / 2;
    if (!(at > left - 1 && at < right + 1) || at - half < last + 8) continue;
    add(svg, "text", { x: at, y: bottom + 17, "text-anchor": "middle" }, text);
    last = at + half;
  }
  if (plot.x.title) add(svg, "text", { x: (left + right) / 2, y: bottom + 38, "text-anchor": "middle" }, plot.x.title);
  showTips(svg, spots);
  return svg;
}

// Adds the slider of a chart after its element; it moves the last mark along the points of the first. Its sentence
// replaces the words of a page below the chart.
function addSlider(element, plot, redraw) {
  const { title, labels, texts, active } = plot.slider;
  const box = document.createElement("label"), input = document.createElement("input");
  const value = document.createElement("strong"), words = document.getElementById(`${element.id}-words`);
  const text = words ?? document.createElement("output");
  box.className = "chart-slider";
  Object.assign(input, { type: "range", min: 0, max: labels.length - 1, value: active });
  const move = () => {
    const k = Number(input.value), [line] = plot.marks, mark = plot.marks.at(-1);
    Object.assign(mark, { x: [line.x[k]], y: [line.y[k]] });
    value.textContent = labels[k];
    input.setAttribute("aria-valuetext", labels[k]);
    text.textContent = texts[k];
    redraw();
  };
  input.addEventListener("input", move);
  box.append(title, input, value, ...(words ? [] : [text]));
  element.after(box);
  move();
}

// Draws a chart and draws it again whenever its width changes. Returns a function that draws it at a given width.
export function showChart(element, plot) {
  let drawn = 0;
  const redraw = (width = element.clientWidth) => { drawn = width; drawChart(element, plot, { width }); };
  if (plot.slider) addSlider(element, plot, redraw);
  else redraw();
  new ResizeObserver(() => { if (element.clientWidth && element.clientWidth !== drawn) redraw(); }).observe(element);
  return redraw;
}
