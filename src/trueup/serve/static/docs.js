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
    cells.forEach((text, index) => {
      const cell = index ? make("td", text) : Object.assign(make("th", text), { scope: "row" });
      row.append(cell);
    });
  }
  return made;
}

function fields(schema, all) {
  const properties = all[named(schema.$ref)]?.properties ?? {};
  return Object.entries(properties).map(([name, field]) => [name, kind(field), field.description ?? "", field.default === undefined ? "" : `default ${JSON.stringify(field.default)}`]);
}

function verb(path, method, about, all) {
  const made = make("details");
  const summary = make("summary");
  summary.append(make("span", method, "verb"), make("code", path), make("span", (about.description ?? about.summary).replace(/`/g, "")));
  made.append(summary);
  const inputs = (about.parameters ?? []).map(({ name, schema, description, required }) =>
    [name, kind(schema), description ?? schema.description ?? "", required ? "required" : `default ${JSON.stringify(schema.default ?? null)}`]);
  const body = about.requestBody?.content["application/json"]?.schema;
  if (body) inputs.push(...fields(body, all));
  if (inputs.length) made.append(make("p", "Input", "quiet"), table(`Input of ${path}`, inputs));
  const [status, answer] = Object.entries(about.responses).find(([code]) => code.startsWith("2"));
  const schema = Object.values(answer.content ?? {})[0]?.schema;
  const outputs = fields(schema?.items ?? schema ?? {}, all);
  made.append(make("p", `Answer ${status}${schema ? `, ${schema.format === "binary" ? Object.keys(answer.content)[0] : kind(schema)}` : ""}`, "quiet"));
  if (outputs.length) made.append(table(`Answer of ${path}`, outputs));
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
