
// Schemas of the document as words, links and tables.

const LIMITS = {
  minimum: "≥", exclusiveMinimum: ">", maximum: "≤", exclusiveMaximum: "<", minLength: "characters ≥",
  maxLength: "characters ≤", minItems: "items ≥", maxItems: "items ≤", maxProperties: "entries ≤",
};

/** Make an element; text goes in as text, never as markup. */
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== undefined && value !== false) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function nameOf(reference) {
  return reference.split("/").pop();
}

/** Describe a schema as text and links, null left out: every optional field takes it. */
function typeOf(schema) {
  if (schema.$ref) return [element("a", { href: `#${nameOf(schema.$ref)}` }, nameOf(schema.$ref))];
  const kinds = schema.anyOf ?? schema.oneOf;
  if (kinds) {
    const types = kinds.filter((one) => one.type !== "null").map(typeOf).filter((type, i, all) => i === all.findIndex((other) => wordsOf(other) === wordsOf(type)));
    return types.length ? types.flatMap((type, i) => (i ? [" or ", ...type] : type)) : ["null"];
  }
  if (schema.enum || "const" in schema) return [(schema.enum ?? [schema.const]).map((one) => JSON.stringify(one)).join(", ")];
  if (schema.type === "array") return ["list of ", ...typeOf(schema.items ?? {})];
  return [schema.type ?? "any JSON"];
}

function wordsOf(type) {
  return type.map((part) => part.textContent ?? part).join("");
}

/** The bounds of a field, those of its alternatives too. */
function limitsOf(schema) {
  const own = Object.entries(LIMITS).filter(([key]) => Math.abs(schema[key]) < 2 ** 53).map(([key, sign]) => `${sign} ${schema[key].toLocaleString("en-US")}`);
  return [...own, ...(schema.anyOf ?? schema.oneOf ?? []).filter((one) => !one.$ref).flatMap(limitsOf)];
}

function fieldTable(schema) {
  const required = new Set(schema.required ?? []);
  const fields = Object.entries(schema.properties ?? {}).sort(([a], [b]) => required.has(b) - required.has(a));
  const rows = fields.map(([name, field]) => {
    const limits = [...new Set(limitsOf(field))];
    return element("tr", {},
      element("td", {}, element("code", {}, name), ...(required.has(name) ? [element("span", { class: "must" }, "required")] : [])),
      element("td", {}, ...typeOf(field), ...(limits.length ? [element("span", { class: "limits" }, limits.join(", "))] : [])),
      element("td", {}, field.description ?? ""));
  });
  const head = element("tr", {}, ...["Field", "Type", "Meaning"].map((label) => element("th", { scope: "col" }, label)));
  return element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows));
}

/** Every schema that a schema refers to, itself left out. */
function referredTo(schema, schemas, found = new Set()) {
  const text = JSON.stringify(schema);
  for (const [, name] of text.matchAll(/"#\/components\/schemas\/([^"]+)"/g)) {
    if (found.has(name) || !schemas[name]) continue;
    found.add(name);
    referredTo(schemas[name], schemas, found);
  }
  return found;
}
