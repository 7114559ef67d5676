import { drawChart } from "/static/chart.js";

const drawn = new Map();
const watch = new ResizeObserver((entries) => { for (const { target } of entries) redraw(target); });

function redraw(element) {
  const { chart, width } = drawn.get(element);
  if (!element.clientWidth || element.clientWidth === width) return;
  drawn.get(element).width = element.clientWidth;
  element.style.height = ""; // the style sheet sets the height, unless the chart has rows
  drawChart(element, chart, { height: chart.y.rows ? undefined : element.clientHeight, legend: false });
}

// Draws a chart of the server, marks on axes, and describes it in words.
export function draw(element, chart, words) {
  if (!drawn.has(element)) watch.observe(element);
  drawn.set(element, { chart });
  element.setAttribute("aria-label", words);
  redraw(element);
}

// Calls `ask` with the newest argument only: while one request is running, later ones replace each other.
export function newest(ask) {
  let nextArgument, busy = false;
  return async function (...wish) {
    nextArgument = wish;
    if (busy) return;
    busy = true;
    try {
      while (nextArgument) {
        const now = nextArgument;
        nextArgument = undefined;
        await ask(...now);
      }
    } finally {
      busy = false;
    }
  };
}
