"use strict";
(() => {
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const charts = read("charts");
  const dark = read("dark");
  const night = matchMedia("(prefers-color-scheme: dark)");
  const settings = { displayModeBar: false, responsive: true };

  const themed = (value, colours) => {
    if (typeof value === "string") return colours[value] ?? value;
    if (Array.isArray(value)) return value.map((one) => themed(one, colours));
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([key, one]) => [key, themed(one, colours)]));
  };

  const draw = (colours, widthOf) =>
    Promise.all(
      Object.entries(charts).map(([id, chart]) => {
        const { data, layout } = themed(chart, colours);
        if (widthOf) layout.width = widthOf(id);
        return Plotly.react(id, data, layout, settings);
      }),
    );

  // The browser lays a page out for paper only after it has asked: so the widths are those of A4.
  const onPaper = (id) => (document.getElementById(id).closest(".pair:not(.one)") ? 318 : 640);

  const sort = (button) => {
    const head = button.closest("th");
    const column = [...head.parentElement.children].indexOf(head);
    const body = head.closest("table").tBodies[0];
    const up = head.getAttribute("aria-sort") !== "ascending";
    for (const other of head.parentElement.children) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const key = (row) => row.children[column].dataset.value;
    const missing = (value) => value === "nan";
    const compare = (a, b) => {
      const [x, y] = [key(a), key(b)];
      if (missing(x) || missing(y)) return missing(x) - missing(y);
      const numeric = !Number.isNaN(Number(x)) && !Number.isNaN(Number(y));
      return (up ? 1 : -1) * (numeric ? Number(x) - Number(y) : x.localeCompare(y));
    };
    body.append(...[...body.rows].sort(compare));
  };
  for (const button of document.querySelectorAll("table.sortable button")) {
    button.addEventListener("click", () => sort(button));
  }

  const redraw = () => draw(night.matches ? dark : {});
  night.addEventListener("change", redraw);
  addEventListener("beforeprint", () => draw({}, onPaper));
  addEventListener("afterprint", () => redraw().then(() => Object.keys(charts).forEach((id) => Plotly.Plots.resize(id))));
  redraw().then(() => document.documentElement.setAttribute("data-drawn", Object.keys(charts).length));
})();
