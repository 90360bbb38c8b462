
// The page: which chat is open, and the one answer that may be under way.

const SAVE_MS = 1000; // while an answer grows

let chat = newChat();
let running = null; // { controller, view }
let isPinned = true; // the view follows the end of the answer
let hasNoWords = false; // the server refused probabilities
let lastTop = 0; // where it was scrolled to

const settings = new Settings({ change: drawWelcome });
const sidebar = new Sidebar({ open: (id) => openChat(loadChat(id)), create: () => openChat(newChat()), removed: afterRemoval });
const conversation = new Conversation(byId("messages"), {
  edit: editMessage, retry: retryAnswer, results: sendResults, go: goOn, code: showRequest, words: (answer, text) => words.toggle(answer, text),
  unmark: () => words.clear(),
});
const words = new Words(byId("messages"));
const requestDialog = new RequestDialog();
const attachments = new Attachments({ change: () => drawComposer(), problem: note });
const watch = new Watch(drawBanner);
const strip = new KvStrip(() => drawBlocks());

// ---- chats

function openChat(found) {
  running?.controller.abort();
  running = null;
  words.clear();
  chat = found ?? newChat();
  history.replaceState(null, "", chat.messages.length ? `#${chat.id}` : location.pathname + location.search);
  conversation.open(chat.messages);
  sidebar.draw(chat.id);
  sidebar.toggle(false);
  isPinned = true;
  drawTitle();
  drawWelcome();
  drawComposer();
  drawBlocks();
  follow();
  focusInput();
}

/** id: null after all chats were removed. */
function afterRemoval(id) {
  if (id === null || id === chat.id) openChat(newChat());
  else sidebar.draw();
}

function save() {
  chat.updated = Date.now();
  chat.title ||= titleOf(chat.messages.find(({ role }) => role === "user")?.content ?? "");
  drawTitle();
  const isKept = saveChat(chat);
  note(isKept ? "" : "This browser keeps no more chats: export and delete some.");
  if (location.hash !== `#${chat.id}`) history.replaceState(null, "", `#${chat.id}`);
}

// ---- turns

function send(text, files = []) {
  if (running || !(text.trim() || files.length)) return;
  chat.messages.push({ id: newId(), role: "user", content: text, ...(files.length && { files }) });
  byId("input").value = "";
  grow(byId("input"));
  answer();
}

/** Replace a message of the user's, and what came after it. */
function editMessage(id, text) {
  stop();
  const place = chat.messages.findIndex((message) => message.id === id);
  const { files } = chat.messages[place];
  chat.messages.length = place;
  if (!chat.messages.length) chat.title = "";
  send(text, files);
}

function retryAnswer(id) {
  stop();
  chat.messages.length = chat.messages.findIndex((message) => message.id === id);
  answer();
}

/** Have more of the last answer. */
function goOn(id) {
  stop();
  const last = chat.messages.at(-1);
  if (last?.id === id) answer(last);
}

/** Show the request that an answer is of. */
function showRequest(id) {
  const place = chat.messages.findIndex((message) => message.id === id);
  try {
    requestDialog.open(bodyToShow(settings.values, chat.messages.slice(0, place)));
  } catch (error) {
    note(error.message); // the tools are not JSON
  }
}

function sendResults(texts) {
  const { calls } = chat.messages.at(-1);
  calls.forEach(({ id }, i) => chat.messages.push({ id: newId(), role: "tool", callId: id, content: texts[i] }));
  answer();
}

function stop() {
  running?.controller.abort();
  running = null;
}

/** Let the model answer what the chat holds, or go on with `begun`, its last message. Each end of it, good or bad, is drawn and kept. */
async function answer(begun = null) {
  const [asked, messages] = [chat, [...chat.messages]];
  const made = begun ?? newAnswer();
  if (begun) {
    messages[messages.length - 1] = { ...begun };
    reopen(begun);
  } else chat.messages.push(made);
  words.clear();
  const view = conversation.draw(chat.messages);
  const turn = { controller: new AbortController(), view };
  running = turn;
  view.isLive = true;
  view.draw(false);
  isPinned = true;
  drawWelcome();
  drawComposer();
  follow();
  save();
  sidebar.draw(chat.id);
  try {
    await stream(made, messages, view, turn.controller.signal);
  } catch (error) {
    if (error.name === "AbortError") made.finish = "stopped";
    else made.error = sentenceOf(error);
    if (error.kind === "lost") watch.untilReady();
  }
  if (running === turn) running = null;
  view.draw(true);
  view.drawBlocks(strip.pool, false);
  if (asked === chat) {
    save();
    conversation.drawResultForm();
    sidebar.draw(chat.id);
    drawComposer();
    follow();
  } else if (loadChat(asked.id)) saveChat(asked); // it was left while it ran
  if (made.finish === "stopped") say("Stopped");
}

async function stream(made, messages, view, signal) {
  const body = asRequest(settings.values, messages);
  const reply = await askWhenReady(body, view, signal);
  made.ignored = (reply.headers.get("x-quire-ignored") ?? "").split(",").map((name) => name.trim()).filter(Boolean);
  let savedAt = performance.now();
  let frame = 0;
  try {
    for await (const chunk of chunksOf(reply)) {
      take(made, chunk, performance.now() - reply.askedAt);
      frame ||= requestAnimationFrame(() => {
        frame = 0;
        view.draw(false);
        view.drawBlocks(strip.pool, true);
        follow();
      });
      if (performance.now() - savedAt > SAVE_MS && loadChat(chat.id)) {
        saveChat(chat);
        savedAt = performance.now();
      }
    }
  } finally {
    cancelAnimationFrame(frame);
  }
}

/** Ask, through a key that is missing and a server that still starts. */
async function askWhenReady(body, view, signal) {
  for (;;) {
    const askedAt = performance.now();
    try {
      if (hasNoWords) for (const name of ["logprobs", "top_logprobs"]) delete body[name];
      return Object.assign(await ask("v1/chat/completions", { body, signal }), { askedAt });
    } catch (error) {
      if (body.logprobs && error.param?.endsWith("logprobs")) {
        hasNoWords = true; // this server gives none: ask without
        continue;
      }
      if (error.kind === "key") {
        if (!(await keyGiven())) throw error;
      } else if (error.kind === "starting") {
        view.wait("Waiting for the server", null);
        await untilReady(signal);
        view.wait("", null);
      } else throw error;
    }
  }
}

async function untilReady(signal) {
  await Promise.race([watch.untilReady(), new Promise((_, reject) => {
    signal.addEventListener("abort", () => reject(signal.reason), { once: true });
  })]);
}

function sentenceOf({ kind, message, code, retryAfterS }) {
  const end = /[.!?]$/.test(message) ? "" : ".";
  if (code === "context_length_exceeded") return `${message}${end} Begin a new chat, or shorten this one.`;
  if (kind === "refused" && retryAfterS) return `${message}${end} It asks to wait ${retryAfterS} s.`;
  return message + end;
}

// ---- the server

/** Ask for a key once, whoever needs it. */
let asking = null;
function keyGiven() {
  asking ??= askForKey(Boolean(sessionStorage.getItem(KEY_NAME))).then((isGiven) => {
    asking = null;
    if (isGiven) connect();
    return isGiven;
  });
  return asking;
}

/** Read what the page shows of the server, once it is ready. */
async function connect() {
  try {
    await settings.loadModels();
    strip.again();
  } catch (error) {
    if (error.kind === "key") keyGiven();
    else if (error.kind === "lost") watch.untilReady().then(connect);
    else note(sentenceOf(error));
  }
}

function drawBanner({ isReady, text, done }) {
  byId("banner").hidden = isReady;
  const [label, meter] = byId("banner").children;
  setText(label, done === null ? `${text} …` : `${text} … ${Math.round(100 * done)} %`);
  if (done === null) meter.removeAttribute("value");
  else meter.value = done;
  if (!isReady) return;
  if (!settings.model?.max_model_len) connect(); // the context is known only now
}

// ---- drawing

function drawWelcome() {
  const isEmpty = !chat.messages.length;
  document.body.classList.toggle("is-empty", isEmpty);
  byId("welcome").hidden = !isEmpty;
  if (isEmpty && settings.model) welcome(settings.model, send);
}

function drawTitle() {
  document.title = chat.title ? `${chat.title} · Quire` : "Quire";
  setText(byId("title"), chat.title || "New chat");
}

function drawComposer() {
  const isRunning = running !== null;
  strip.setBusy(isRunning);
  const button = byId("send");
  if (button.dataset.icon !== String(isRunning)) {
    button.dataset.icon = String(isRunning);
    button.replaceChildren(icon(isRunning ? "stop" : "send"));
    button.setAttribute("aria-label", isRunning ? "Stop" : "Send");
    button.title = isRunning ? "Stop (Esc)" : "Send (Enter)";
  }
  button.classList.toggle("stop", isRunning);
  button.disabled = !isRunning && !byId("input").value.trim() && !attachments.files.length;
}

/** The last answer's blocks in the cache. */
function drawBlocks() {
  const view = conversation.views.get(chat.messages.at(-1)?.id);
  view?.drawBlocks(strip.pool, running?.view === view);
}

/** On a touch screen a focus would bring the keyboard up. */
function focusInput() {
  if (matchMedia("(hover: hover)").matches) byId("input").focus();
}

function note(text) {
  setText(byId("note"), text);
}

/** Keep the end in sight, unless the reader has gone up. */
function follow() {
  const pane = byId("scroll");
  if (isPinned) pane.scrollTop = pane.scrollHeight;
  byId("down").hidden = isPinned || pane.scrollHeight - pane.scrollTop - pane.clientHeight < 160;
}

// ---- the reader's hands

function sendTyped() {
  if (running || !(byId("input").value.trim() || attachments.files.length)) return;
  send(byId("input").value, attachments.take());
}

onEnter(byId("input"), sendTyped);
byId("input").addEventListener("input", drawComposer);
byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) stop();
  else sendTyped();
  focusInput();
});
byId("scroll").addEventListener("scroll", () => {
  const pane = byId("scroll");
  const below = pane.scrollHeight - pane.scrollTop - pane.clientHeight;
  // A wheel moves smoothly, a few pixels a frame: the first of them already lets go.
  if (pane.scrollTop < lastTop && below > 1) isPinned = false;
  else if (below < 40) isPinned = true;
  lastTop = pane.scrollTop;
  follow();
}, { passive: true });
new ResizeObserver(follow).observe(byId("scroll")); // it shrinks while the box for the message grows
byId("down").addEventListener("click", () => {
  isPinned = true;
  follow();
});
addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
  if (document.body.classList.contains("side-open")) sidebar.toggle(false);
  else if (words.node || words.shown) conversation.unmark();
  else if (running) stop();
});
byId("help").addEventListener("click", () => byId("shortcuts").showModal());
byId("shortcuts").addEventListener("click", (event) => event.target === byId("shortcuts") && byId("shortcuts").close());
bindShortcuts({
  edit: () => !running && conversation.editLast(),
  write: () => byId("input").focus(),
  search: () => sidebar.search(),
  create: () => openChat(newChat()),
  copy: () => {
    const last = chat.messages.findLast(({ role, content }) => role === "assistant" && content);
    return last ? void copyText(last.content).then((isCopied) => say(isCopied ? "Copied" : "The browser did not allow copying.")) : false;
  },
  settings: () => settings.open(),
  help: () => byId("shortcuts").showModal(),
});
afterLibrary = () => {
  conversation.redraw();
  requestDialog.draw();
  follow();
};
addEventListener("hashchange", () => {
  const id = location.hash.slice(1);
  if (id && id !== chat.id) openChat(loadChat(id));
});
addEventListener("pagehide", () => {
  if (chat.messages.length && loadChat(chat.id)) saveChat(chat);
});

openChat(loadChat(location.hash.slice(1)));
connect();
readiness().then((state) => state.isReady || watch.untilReady());
