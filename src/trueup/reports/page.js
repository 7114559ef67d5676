// Sorts tables, and draws the charts with chart.js, which is in the same element.
{
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

  const charts = JSON.parse(document.getElementById("charts").textContent);
  const redraws = Object.entries(charts).map(([id, plot]) => {
    const element = document.getElementById(id);
    return [element, showChart(element, plot)];
  });
  // A browser lays a page out for paper only after it has asked, so the widths are those of A4.
  const onPaper = (element) => (element.closest(".pair:not(.one)") ? 318 : 640);
  addEventListener("beforeprint", () => { for (const [element, redraw] of redraws) redraw(onPaper(element)); });
  addEventListener("afterprint", () => { for (const [, redraw] of redraws) redraw(); });
  document.documentElement.setAttribute("data-drawn", redraws.length);
}
