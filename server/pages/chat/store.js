
// What the browser keeps: chats and settings in localStorage, on this machine alone. One entry per chat, so that two tabs
// do not overwrite each other's. Several servers behind one proxy have entries of their own.

const PREFIX = `quire:${location.pathname.replace(/\/$/, "")}:`;
const CHAT = `${PREFIX}chat:`;
const THEME_NAME = "quire.theme"; // shared with the page of the KV cache
const DEFAULTS = {
  model: "", system: "", temperature: "", top_p: "", top_k: "", min_p: "", max_tokens: "", seed: "", reasoning_effort: "",
  tools: "", words: "", theme: "auto",
};

function readJson(key) {
  try {
    return JSON.parse(localStorage.getItem(key));
  } catch {
    return null;
  }
}

/** Return whether it could be kept: browsers give a site some 5 MB, and none in some private windows. */
function keep(key, value) {
  try {
    localStorage.setItem(key, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

function isChat(value) {
  return typeof value?.id === "string" && Array.isArray(value.messages) && typeof value.updated === "number";
}

function loadChat(id) {
  const found = readJson(CHAT + id);
  return isChat(found) ? found : null;
}

/** All chats, the newest first. */
function loadChats() {
  const keys = Array.from({ length: localStorage.length }, (_, i) => localStorage.key(i));
  const found = keys.filter((key) => key.startsWith(CHAT)).map(readJson).filter(isChat);
  return found.sort((a, b) => b.updated - a.updated);
}

function saveChat(chat) {
  return keep(CHAT + chat.id, chat);
}

function removeChat(id) {
  localStorage.removeItem(CHAT + id);
}

function newChat() {
  return { id: newId(), title: "", updated: Date.now(), messages: [] };
}

function titleOf(text) {
  const line = text.trim().split("\n")[0].replace(/\s+/g, " ");
  return line.length > 60 ? `${line.slice(0, 59)}…` : line;
}

function loadSettings() {
  const found = { ...readJson(`${PREFIX}settings`), theme: localStorage.getItem(THEME_NAME) ?? "auto" };
  return Object.fromEntries(Object.entries(DEFAULTS).map(([name, value]) => [name, typeof found[name] === "string" ? found[name] : value]));
}

function saveSettings({ theme, ...settings }) {
  localStorage.setItem(THEME_NAME, theme);
  return keep(`${PREFIX}settings`, settings);
}

/** The messages as the API takes them. Turns that failed without a word were never said. */
function asHistory(messages) {
  const said = [];
  for (const message of messages) {
    if (message.role === "assistant" && message.error && !message.content && !message.reasoning && !message.calls.length) {
      if (said.at(-1)?.role === "user") said.pop();
      continue;
    }
    said.push(asSent(message));
  }
  return said;
}

function asSent({ role, content, files, reasoning, calls, callId }) {
  if (role === "tool") return { role, tool_call_id: callId, content };
  if (role === "user") return { role, content: withFiles({ content, files }) };
  const sent = { role, content };
  if (reasoning) sent.reasoning_content = reasoning;
  if (calls.length) {
    sent.tool_calls = calls.map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } }));
  }
  return sent;
}

/** The body of a request. Settings that are empty are left to the model. */
function asRequest(settings, messages) {
  const body = { messages: asHistory(messages), stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
  if (settings.model) body.model = settings.model;
  if (settings.system.trim()) body.messages.unshift({ role: "system", content: settings.system });
  for (const name of ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"]) {
    if (settings[name] !== "") body[name] = Number(settings[name]);
  }
  if (settings.reasoning_effort) body.reasoning_effort = settings.reasoning_effort;
  const tools = parseTools(settings.tools);
  if (tools.length) body.tools = tools;
  if (!settings.words) Object.assign(body, { logprobs: true, top_logprobs: NUM_TOPS });
  if (messages.at(-1)?.role === "assistant") body.continue_final_message = true;
  return body;
}

/** Read what was typed as tools: a list, one tool, {"tools": [...]}, or bare functions. Throws a sentence. */
function parseTools(text) {
  if (!text.trim()) return [];
  let found;
  try {
    found = JSON.parse(text);
  } catch (error) {
    throw new Error(`The tools are not JSON: ${error.message}`);
  }
  const list = Array.isArray(found) ? found : Array.isArray(found?.tools) ? found.tools : [found];
  return list.map((tool, i) => {
    const wrapped = tool?.function ? tool : { type: "function", function: tool };
    if (typeof wrapped.function?.name !== "string") throw new Error(`Tool ${i + 1} has no function.name.`);
    return wrapped;
  });
}
