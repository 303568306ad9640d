// The server's API: the load, and chat completions as a stream of chunks.

// Kept for this tab only.
const KEY = "foredraft.key";
const SALT = "foredraft.salt";

export const apiKey = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (key) => sessionStorage.setItem(KEY, key),
};

// Requests of equal salts share caches. Nobody else can name a salt of this length.
export const newSalt = () => crypto.getRandomValues(new Uint32Array(4)).join("-");

// One for all turns of this tab's conversations: each finds what the turns before have left in the caches.
function ownSalt() {
  if (!sessionStorage.getItem(SALT)) sessionStorage.setItem(SALT, newSalt());
  return sessionStorage.getItem(SALT);
}

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export async function stats() {
  return (await call("/v1/stats")).json();
}

const STREAMED = { stream: true, stream_options: { include_usage: true }, speculation_trace: true };

// The chunks of a streamed chat completion, until the answer is complete.
export async function* chatChunks(body, signal) {
  const response = await call("/v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ cache_salt: ownSalt(), ...body, ...STREAMED }),
    signal,
  });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(500, chunk.error.message);
    yield chunk;
  }
  throw new ApiError(502, "The stream ended before the answer was complete.");
}

async function call(path, options = {}) {
  const headers = { ...options.headers };
  if (apiKey.get()) headers["x-api-key"] = apiKey.get();
  const response = await fetch(path, { ...options, headers });
  if (response.ok) return response;
  let message = `The server answered with status ${response.status}.`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // not the API's shape: a proxy's error page
  }
  throw new ApiError(response.status, message);
}

// The data of server-sent events. Comments keep the connection open and are skipped.
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const data = block.split("\n").filter((line) => line.startsWith("data: "));
      if (data.length) yield data.map((line) => line.slice(6)).join("\n");
    }
  }
}
