// The page: brings its parts together. Tabs, theme, keyboard, conversations, and the server's load.

import { apiKey, stats } from "./api.js";
import { Chat } from "./chat.js";
import { Compare } from "./compare.js";
import { byId, download, element } from "./dom.js";
import { readConversations } from "./import.js";
import { SettingsDialog, inForce } from "./settings.js";
import { Conversations, loadSettings, saveSettings, titleOf } from "./store.js";
import { Strip } from "./strip.js";
import { hideTooltip } from "./tokens.js";
import { TreeView } from "./tree.js";

const VIEWS = ["chat", "compare", "tree"];
const THEMES = ["system", "light", "dark"];
const POLL_MS = 1000;
const NOTICE_MS = 20_000;
const SHORTCUTS = {
  Enter: "send the message, or start the race; on phones: new line",
  "Shift+Enter": "new line",
  Escape: "stop the answer or the race; close a dialog",
  "Alt+1, Alt+2, Alt+3": "chat, compare, tree",
  "Alt+N": "new conversation",
  "Alt+T": "tints on or off",
  "Alt+D": "theme: system, light, dark",
  "Alt+S": "settings",
  "/": "go to the message box",
  "← →": "in an answer with tints: walk through its tokens; Enter opens the tree",
  "+, −, 0": "in the tree: zoom, and fit it; the arrow keys move it",
  "?": "this list",
};

const settings = loadSettings();
const conversations = new Conversations();
const strip = new Strip();
const tree = new TreeView();
const dialog = new SettingsDialog(settings, () => {
  applyTheme();
  showInForce();
});
let server = null; // what it says of itself, once it is known

const tell = {
  onProgress(answer) {
    strip.showAnswer(answer);
    if (!byId("tree").hidden || answer.finish) tree.show(answer.steps);
    if (answer.steps.length === 1) showProblem(null);
  },
  onChange: drawConversations,
  onOpen(steps, step, place) {
    show("tree");
    tree.show(steps, step, place);
  },
  onRemoved: showNotice,
  onError: showProblem,
};
const chat = new Chat(conversations, settings, tell);
const compare = new Compare(settings, tell);

function show(view) {
  hideTooltip();
  for (const each of VIEWS) {
    byId(each).hidden = each !== view;
    const tab = byId(`tab-${each}`);
    tab.setAttribute("aria-selected", String(each === view));
    tab.tabIndex = each === view ? 0 : -1;
  }
  if (view === "tree") tree.fit();
}

for (const [place, view] of VIEWS.entries()) {
  const tab = byId(`tab-${view}`);
  tab.addEventListener("click", () => show(view));
  tab.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!move) return;
    const next = VIEWS[(place + move + VIEWS.length) % VIEWS.length];
    show(next);
    byId(`tab-${next}`).focus();
  });
}

function applyTints() {
  document.body.classList.toggle("tinted", settings.tints);
  byId("tints").setAttribute("aria-pressed", String(settings.tints));
  byId("legend").hidden = !settings.tints;
  hideTooltip();
}

function applyTheme() {
  if (settings.theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = settings.theme;
  byId("theme-name").textContent = settings.theme;
}

function toggleTints() {
  settings.tints = !settings.tints;
  saveSettings(settings);
  applyTints();
}

function nextTheme() {
  settings.theme = THEMES[(THEMES.indexOf(settings.theme) + 1) % THEMES.length];
  saveSettings(settings);
  applyTheme();
}

function drawConversations() {
  const items = conversations.all.map((each) => {
    const isCurrent = each === conversations.current;
    const open = element("button", { type: "button", class: "quiet name", title: titleOf(each), "aria-current": isCurrent && "true", onclick: () => openConversation(each) }, titleOf(each));
    const remove = element("button", { type: "button", class: "quiet remove", "aria-label": `Delete ${titleOf(each)}`, onclick: () => removeConversation(each) }, "×");
    return element("li", { class: isCurrent ? "current" : "" }, open, remove);
  });
  byId("conversation-list").replaceChildren(...items);
}

function changeConversation(change) {
  if (chat.isBusy) chat.stop();
  change();
  chat.draw();
  drawConversations();
  tree.show(chat.lastSteps);
  show("chat");
  openSidebar(false);
  byId("prompt").focus();
}

const openConversation = (each) => changeConversation(() => conversations.open(each));
const removeConversation = (each) =>
  changeConversation(() => {
    const undo = conversations.remove(each);
    showNotice(`“${titleOf(each)}”`, () => changeConversation(undo));
  });
const newConversation = () => changeConversation(() => conversations.create());

// Shows what other tabs did to a conversation, or to any.
function followTabs(key) {
  const { current } = conversations;
  const { messages } = current;
  if (!conversations.follow(key, chat.isAtWork ? current : null)) return;
  drawConversations();
  if (current === conversations.current && messages === current.messages) return;
  if (current !== conversations.current) chat.stop(); // it was deleted
  chat.draw();
  tree.show(chat.lastSteps);
}

function openSidebar(isOpen) {
  byId("conversations").classList.toggle("open", isOpen);
  byId("toggle-conversations").setAttribute("aria-expanded", String(isOpen));
}

function showProblem(error) {
  byId("problem").hidden = !error;
  byId("problem-text").textContent = error?.message ?? "";
  byId("key-form").hidden = error?.status !== 401;
}

// Until the next one, or a moment later.
let noticeTimer = 0;

function showNotice(what, undo) {
  byId("notice").hidden = false;
  byId("notice-text").textContent = `Deleted ${what}.`;
  byId("undo").onclick = () => {
    byId("notice").hidden = true;
    undo();
  };
  clearTimeout(noticeTimer);
  noticeTimer = setTimeout(() => (byId("notice").hidden = true), NOTICE_MS);
}

async function importConversations(file) {
  try {
    const taken = await readConversations(file);
    changeConversation(() => conversations.take(taken));
    showProblem(null);
  } catch (error) {
    showProblem(error);
  }
}

function showInForce() {
  byId("effective").textContent = `${server ? `${server.model} · ` : ""}${inForce(settings, server)}`;
}

byId("key-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  apiKey.set(byId("api-key").value);
  showProblem(null);
  await poll();
});

async function poll() {
  try {
    const now = await stats();
    strip.showLoad(now);
    if (server) return;
    server = now;
    chat.model = now.model;
    byId("model").textContent = now.model;
    dialog.showServer(now);
    showInForce();
  } catch (error) {
    if (error.status === 401) {
      server = null;
      if (byId("problem").hidden) showProblem(error);
    } // else the server is away: the next request tells
  }
}

function onKey(event) {
  const inText = event.target.closest("input, textarea, select") !== null;
  if (document.querySelector("dialog[open]")) return;
  const withAlt = {
    Digit1: () => show("chat"),
    Digit2: () => show("compare"),
    Digit3: () => show("tree"),
    KeyN: newConversation,
    KeyT: toggleTints,
    KeyD: nextTheme,
    KeyS: () => dialog.open(),
  };
  const plain = {
    "/": () => {
      show("chat");
      byId("prompt").focus();
    },
    "?": () => byId("shortcuts").showModal(),
  };
  let action = null;
  if (event.key === "Escape") action = stopAll;
  else if (event.altKey && !event.ctrlKey && !event.metaKey) action = withAlt[event.code];
  else if (!inText && !event.ctrlKey && !event.metaKey) action = plain[event.key];
  if (!action) return;
  event.preventDefault();
  action();
}

function stopAll() {
  hideTooltip();
  openSidebar(false);
  chat.stop();
  compare.stop();
}

function exportConversations(which) {
  download(`foredraft-${new Date().toISOString().slice(0, 10)}.json`, conversations.exported(which));
}

document.addEventListener("keydown", onKey);
addEventListener("storage", (event) => followTabs(event.key));
addEventListener("pageshow", (event) => event.persisted && followTabs(null)); // it was asleep, and heard nothing
byId("tints").addEventListener("click", toggleTints);
byId("theme").addEventListener("click", nextTheme);
byId("open-shortcuts").addEventListener("click", () => byId("shortcuts").showModal());
byId("new-conversation").addEventListener("click", newConversation);
byId("export-one").addEventListener("click", () => exportConversations([conversations.current]));
byId("export-all").addEventListener("click", () => exportConversations(conversations.all));
byId("import").addEventListener("click", () => byId("import-file").click());
byId("import-file").addEventListener("change", async ({ target }) => {
  const [file] = target.files;
  if (file) await importConversations(file);
  target.value = ""; // so that the same file can be chosen again
});
byId("toggle-conversations").addEventListener("click", () => openSidebar(!byId("conversations").classList.contains("open")));
byId("shortcut-list").append(
  ...Object.entries(SHORTCUTS).flatMap(([keys, does]) => [
    element("dt", {}, ...keys.split(", ").flatMap((key, place) => [place ? " " : "", element("kbd", {}, key)])),
    element("dd", {}, does),
  ]),
);

applyTints();
applyTheme();
showInForce();
drawConversations();
tree.show(chat.lastSteps);
poll();
setInterval(() => document.visibilityState === "visible" && byId("key-form").hidden && poll(), POLL_MS); // without a key it would be refused
