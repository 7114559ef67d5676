// The class frequencies of rows without labels.
const $ = (id) => document.getElementById(id);
const percent = (share) => `${(100 * share).toFixed(1)}\u00a0%`;
const MOST = 20;

export function showLabelShift({ id, new: rows, text, prior, performance }) {
  const { accuracy } = performance.metrics;
  const range = (one) => `${percent(one.value)} (with 95\u00a0% confidence, labels would show ${percent(one.low)} to ${percent(one.high)})`;
  const corrected = performance.corrected ? ` After correction for the new frequencies it is ${range(performance.corrected.accuracy)}.` : "";
  const expected = `The expected accuracy of the model as deployed on these ${rows.rows.toLocaleString("en")} rows is ${range(accuracy)}.${corrected} This assumes that the model is calibrated; a change in the appearance of the classes shows only with labels.`;
  $("shift-text").replaceChildren(...[text[0], expected, ...text.slice(1), ...rows.notes].map((sentence) => {
    const paragraph = document.createElement("p");
    paragraph.textContent = sentence.replace(/ %/g, "\u00a0%");
    return paragraph;
  }));
  const changes = prior.prior.map((now, k) => [Math.abs(now - prior.old[k]), k]).sort((a, b) => b[0] - a[0] || a[1] - b[1]);
  const shown = changes.slice(0, MOST).map(([, k]) => k).sort((a, b) => a - b);
  const largest = Math.max(...shown.map((k) => prior.high[k]));
  $("frequencies").tBodies[0].replaceChildren(...shown.map((k) => {
    const row = document.createElement("tr");
    const head = document.createElement("th");
    head.scope = "row";
    head.textContent = k;
    row.append(head);
    for (const words of [percent(prior.old[k]), percent(prior.prior[k]), `${percent(prior.low[k])} – ${percent(prior.high[k])}`]) row.insertCell().textContent = words;
    const bar = document.createElement("span");
    bar.className = "bar";
    bar.style.width = `${(100 * prior.prior[k]) / largest}%`;
    const cell = row.insertCell();
    cell.className = "less bars";
    cell.append(bar);
    return row;
  }));
  $("shift-note").textContent = shown.length < prior.prior.length ? `The ${shown.length} of ${prior.prior.length.toLocaleString("en")} classes with the largest changes.` : "";
  $("shift-calibrator").href = `/api/label-shifts/${id}/calibrator`;
  $("shift-state").textContent = rows.name;
  $("shift-result").hidden = false;
  $("shift").dataset.drawn = id;
}
