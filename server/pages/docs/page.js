
// The page: the document's endpoints in groups, their contents at the side, schemas at the end.

// The first that fits a path.
const GROUPS = [
  ["Generate", /^\/v1\/(chat|completions|responses|messages)(?!.*(render|count))/], ["Tokens and embeddings", /token|render|embeddings/],
  ["Models and requests", /^\/v1\/(models|requests)/], ["The server", /./],
];
const METHODS = ["post", "get", "delete"];
const trials = [];

function byId(id) {
  return document.getElementById(id);
}

function groupOf(path) {
  return GROUPS.find(([, pattern]) => pattern.test(path))[0];
}

/** One endpoint: what it is for, its fields, an example that can be sent, what it answers. */
function endpointNode({ method, path, about, id }, document_) {
  const { schemas } = document_.components;
  const content = about.requestBody?.content["application/json"];
  const body = content && schemas[nameOf(content.schema.$ref)];
  const names = (about.parameters ?? []).filter(({ in: place }) => place === "path").map(({ name }) => name);
  const trial = new Trial(method, path, content ? content.example ?? {} : undefined, names);
  trials.push(trial);
  const answers = Object.entries(about.responses ?? {}).map(([status, response]) => answerRow(status, response));
  return element("section", { class: "endpoint", id, "aria-labelledby": `${id}-title` },
    element("h2", { id: `${id}-title` }, element("span", { class: `verb ${method}` }, method.toUpperCase()), element("a", { href: `#${id}`, class: "path" }, path)),
    element("p", {}, about.summary ?? ""), trial.node,
    ...(body ? [element("details", { class: "fields", open: "" }, element("summary", {}, `Fields of the body (${Object.keys(body.properties ?? {}).length})`), fieldTable(body))] : []),
    element("details", { class: "fields" }, element("summary", {}, "Answers"), element("table", {},
      element("thead", {}, element("tr", {}, ...["Status", "Body", "When"].map((label) => element("th", { scope: "col" }, label)))),
      element("tbody", {}, ...answers))));
}

function answerRow(status, { description, content }) {
  const bodies = Object.entries(content ?? {}).flatMap(([type, { schema }]) =>
    [element("div", {}, ...(schema?.$ref || schema?.type === "array" ? typeOf(schema) : [type]))]);
  return element("tr", {}, element("td", {}, element("code", {}, status)), element("td", {}, ...bodies), element("td", {}, description ?? ""));
}

function schemaNode(name, schema) {
  return element("section", { class: "schema", id: name }, element("h2", {}, element("a", { href: `#${name}` }, name)),
    ...(schema.description ? [element("p", { class: "dim" }, schema.description)] : []),
    schema.properties ? fieldTable(schema) : element("p", {}, ...typeOf(schema)));
}

function render(document_) {
  const operations = Object.entries(document_.paths).flatMap(([path, methods]) => METHODS.filter((method) => methods[method])
    .map((method) => ({ method, path, about: methods[method], id: `${method}${path.replace(/[^\w]+/g, "-").replace(/-$/, "")}` })));
  const { schemas } = document_.components;
  const bodies = new Set(operations.map(({ about }) => about.requestBody?.content["application/json"]?.schema.$ref).filter(Boolean).map(nameOf));
  const used = referredTo(document_.paths, schemas);
  const types = Object.keys(schemas).filter((name) => used.has(name) && !bodies.has(name)).sort((a, b) => a.startsWith("Answer.") - b.startsWith("Answer."));
  const nodes = [];
  const lists = [];
  for (const [group] of GROUPS) {
    const members = operations.filter(({ path }) => groupOf(path) === group);
    if (!members.length) continue;
    lists.push(listNode(group, members.map((one) => [one.id, [element("span", { class: `verb ${one.method}` }, one.method.toUpperCase()), one.path],
      `${one.path} ${one.about.summary} ${Object.keys(schemas[nameOf(one.about.requestBody?.content["application/json"].schema.$ref ?? "")]?.properties ?? {}).join(" ")}`])));
    nodes.push(...members.map((one) => endpointNode(one, document_)));
  }
  lists.push(listNode("Schemas", types.map((name) => [name, [name], `${name} ${Object.keys(schemas[name].properties ?? {}).join(" ")}`])));
  nodes.push(...types.map((name) => schemaNode(name, schemas[name])));
  byId("list").replaceChildren(...lists);
  byId("operations").replaceChildren(...nodes);
  byId("operations").removeAttribute("aria-busy");
  byId("version").textContent = document_.info.version;
  if (location.hash) byId(decodeURIComponent(location.hash.slice(1)))?.scrollIntoView();
}

function listNode(title, entries) {
  return element("section", {}, element("h2", {}, title), element("ul", {}, ...entries.map(([id, label, words]) =>
    element("li", { "data-words": words.toLowerCase() }, element("a", { href: `#${id}` }, ...label)))));
}

/** Leave in the contents what has all the words. */
function search() {
  const words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  for (const item of byId("list").querySelectorAll("li")) item.hidden = !words.every((word) => item.dataset.words.includes(word));
  for (const section of byId("list").children) section.hidden = !section.querySelector("li:not([hidden])");
}

async function load() {
  const key = sessionStorage.getItem(KEY_NAME);
  const reply = await fetch("openapi.json", { headers: key ? { authorization: `Bearer ${key}` } : {}, cache: "no-store" });
  if (reply.status === 401) {
    byId("key-note").textContent = key ? "The server does not know this key." : "This server needs one, for this page as well.";
    byId("operations").textContent = "Give an API key above to see the endpoints.";
    return byId("key").focus();
  }
  if (!reply.ok) throw new Error(`the server answers ${reply.status}`);
  byId("key-note").textContent = "It stays in this tab.";
  render(await reply.json());
  search();  // who was quicker than the document has typed already
}

function start() {
  document.documentElement.dataset.theme = localStorage.getItem("quire.theme") ?? "auto";
  byId("base").textContent = `${baseUrl()}v1`;
  byId("root").textContent = baseUrl().replace(/\/$/, "");
  byId("key").value = sessionStorage.getItem(KEY_NAME) ?? "";
  byId("contents").open = matchMedia("(min-width: 52rem)").matches;
  byId("search").addEventListener("input", search);
  byId("list").addEventListener("click", (event) => {
    if (event.target.closest("a") && matchMedia("(max-width: 52rem)").matches) byId("contents").open = false;
  });
  byId("key").addEventListener("change", () => {
    if (byId("key").value.trim()) sessionStorage.setItem(KEY_NAME, byId("key").value.trim());
    else sessionStorage.removeItem(KEY_NAME);
    if (trials.length) for (const trial of trials) trial.draw();
    else load().catch(fail);
  });
  load().catch(fail);
}

function fail(error) {
  byId("operations").textContent = `openapi.json cannot be shown: ${error.message}`;
}

start();
