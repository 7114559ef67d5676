// The API's description, /openapi.json, as a page.
const make = (tag, text = "", className = "") => Object.assign(document.createElement(tag), { textContent: text, className });
const named = (reference) => reference?.split("/").pop();

function kind(schema = {}) {
  if (schema.$ref) return named(schema.$ref);
  if (schema.anyOf) return schema.anyOf.map(kind).join(" or ");
  if (schema.type === "array") return `list of ${kind(schema.items)}`;
  return schema.type ?? "anything";
}

function table(caption, rows) {
  const made = make("table");
  made.append(Object.assign(document.createElement("caption"), { textContent: caption, className: "hidden" }));
  for (const cells of rows) {
    const row = made.insertRow();
    cells.forEach((text, place) => {
      const cell = place ? make("td", text) : Object.assign(make("th", text), { scope: "row" });
      row.append(cell);
    });
  }
  return made;
}

function fields(schema, all) {
  const properties = all[named(schema.$ref)]?.properties ?? {};
  return Object.entries(properties).map(([name, found]) => [name, kind(found), found.description ?? "", found.default === undefined ? "" : `default ${JSON.stringify(found.default)}`]);
}

function verb(path, method, about, all) {
  const made = make("details");
  const summary = make("summary");
  summary.append(make("span", method, "verb"), make("code", path), make("span", (about.description ?? about.summary).replace(/`/g, "")));
  made.append(summary);
  const asked = (about.parameters ?? []).map(({ name, schema, description, required }) =>
    [name, kind(schema), description ?? schema.description ?? "", required ? "required" : `default ${JSON.stringify(schema.default ?? null)}`]);
  const body = about.requestBody?.content["application/json"]?.schema;
  if (body) asked.push(...fields(body, all));
  if (asked.length) made.append(make("p", "It takes", "quiet"), table(`What ${path} takes`, asked));
  const [status, answer] = Object.entries(about.responses).find(([code]) => code.startsWith("2"));
  const schema = Object.values(answer.content ?? {})[0]?.schema;
  const given = fields(schema?.items ?? schema ?? {}, all);
  made.append(make("p", `It answers ${status}${schema ? `, ${schema.format === "binary" ? Object.keys(answer.content)[0] : kind(schema)}` : ""}`, "quiet"));
  if (given.length) made.append(table(`What ${path} answers`, given));
  return made;
}

const description = await (await fetch("/openapi.json")).json();
const sections = new Map();
for (const [path, methods] of Object.entries(description.paths))
  for (const [method, about] of Object.entries(methods)) {
    const tag = about.tags?.[0] ?? "more";
    if (!sections.has(tag)) sections.set(tag, []);
    sections.get(tag).push(verb(path, method, about, description.components.schemas));
  }
for (const [tag, verbs] of sections) document.getElementById("verbs").append(make("h2", tag), ...verbs);
