// Conversations from a file: this page's own export, or any JSON with a list of messages. Only what is known is taken,
// as text and numbers; steps that are not whole are left out.

const ROLES = ["system", "user", "assistant", "tool"];
const MOST_BYTES = 50_000_000;

export async function readConversations(file) {
  if (file.size > MOST_BYTES) throw new Error(`${file.name} has ${file.size} bytes; at most ${MOST_BYTES} can be imported.`);
  let content;
  try {
    content = JSON.parse(await file.text());
  } catch (error) {
    throw new Error(`${file.name} is no valid JSON: ${error.message}`);
  }
  const given = Array.isArray(content?.conversations) ? content.conversations : [Array.isArray(content) ? { messages: content } : content];
  const conversations = given.map(conversationOf).filter((each) => each.messages.length);
  if (!conversations.length) throw new Error(`${file.name} has no conversations: a list "messages" with "role" and "content" is needed.`);
  return conversations;
}

function conversationOf(given) {
  const messages = Array.isArray(given?.messages) ? given.messages : [];
  const created = Number.isNaN(Date.parse(given?.created)) ? new Date() : new Date(given.created);
  return { created: created.toISOString(), messages: messages.filter((message) => ROLES.includes(message?.role)).map(messageOf) };
}

function messageOf(given) {
  const message = { role: given.role, content: textOf(given.content) };
  for (const name of ["name", "tool_call_id", "finish", "error", "model", "reasoning_content"]) if (typeof given[name] === "string") message[name] = given[name];
  for (const name of ["seed", "seconds", "perSecond", "saved", "thoughtSeconds"]) if (Number.isFinite(given[name])) message[name] = given[name];
  if (Array.isArray(given.tool_calls)) message.tool_calls = given.tool_calls.map(callOf);
  if (Array.isArray(given.steps) && given.steps.every(isStep)) message.steps = given.steps;
  if (isObject(given.settings)) message.settings = Object.fromEntries(Object.entries(given.settings).filter(([, value]) => ["string", "number"].includes(typeof value)));
  if (given.role === "assistant") message.finish ??= "stop";
  return message;
}

// A text, or the texts among the parts of a message.
function textOf(content) {
  if (typeof content === "string") return content;
  return Array.isArray(content) ? content.map((part) => (typeof part?.text === "string" ? part.text : "")).join("\n") : "";
}

function callOf(given) {
  const call = isObject(given?.function) ? given.function : {};
  const written = typeof call.arguments === "string" ? call.arguments : JSON.stringify(call.arguments ?? {});
  return { id: String(given?.id ?? ""), type: "function", function: { name: String(call.name ?? ""), arguments: written } };
}

function isStep(step) {
  const { tokens, draft, accepted, reasons } = step ?? {};
  if (![tokens, accepted, reasons, draft?.tokens, draft?.parents, draft?.scores, draft?.origins].every(Array.isArray)) return false;
  const size = draft.tokens.length;
  return (
    [draft.parents, draft.scores, draft.origins].every((list) => list.length === size) &&
    tokens.every((token) => typeof token?.text === "string" && typeof token.origin === "string") &&
    [...draft.tokens, ...draft.origins, ...reasons].every((text) => typeof text === "string") &&
    draft.scores.every(Number.isFinite) &&
    draft.parents.every((parent, node) => Number.isInteger(parent) && parent >= -1 && parent < node) &&
    accepted.every((node) => Number.isInteger(node) && node >= 0 && node < size)
  );
}

const isObject = (value) => typeof value === "object" && value !== null;
