// Plotly is large: it is fetched once, before the first diagram or when the page is idle.
let loading;
export function plotly() {
  loading ??= new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = "/static/plotly.js";
    script.onload = () => resolve(window.Plotly);
    script.onerror = () => { loading = undefined; reject(new Error("the drawing library could not be loaded")); };
    document.head.append(script);
  });
  return loading;
}

const CONFIG = { displayModeBar: false, responsive: true };
const drawn = new Map();
const night = matchMedia("(prefers-color-scheme: dark)");
let dark;

// Maps the colours of the server's charts to those of a dark page.
async function repainted(value) {
  if (!night.matches) return value;
  dark ??= await (await fetch("/static/dark.json")).json();
  const repaint = (part) => {
    if (typeof part === "string") return dark[part] ?? part;
    if (Array.isArray(part)) return part.map(repaint);
    if (part && typeof part === "object") return Object.fromEntries(Object.entries(part).map(([key, inside]) => [key, repaint(inside)]));
    return part;
  };
  return repaint(value);
}

async function react(element, chart) {
  const [library, { data, layout }] = await Promise.all([plotly(), repainted(chart)]);
  if (drawn.get(element) !== chart) return;
  const { height, width, ...rest } = layout; // the page sets the size
  await library.react(element, data, { ...rest, autosize: true, showlegend: false, margin: { ...rest.margin, t: 12 } }, CONFIG);
}

export async function draw(element, chart, words) {
  drawn.set(element, chart);
  element.setAttribute("aria-label", words);
  await react(element, chart);
}

night.addEventListener("change", () => {
  for (const [element, chart] of drawn) react(element, chart);
});

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
