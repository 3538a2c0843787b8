// Requests to the server. Addresses are relative, so that the page works below a proxy's prefix.

// The server did not answer, or answered with an error. `status` is 0 when nothing came.
export class Refusal extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

export async function fetchJson(path, signal) {
  const response = await fetch(path, { signal, cache: "no-store" });
  if (!response.ok) throw await refusalOf(response);
  return response.json();
}

// Lists of chunks of one answer, each list what a single read brought. Throws Refusal, or AbortError when stopped.
export async function* answerChunks(body, key, signal) {
  const headers = { "Content-Type": "application/json" };
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch("v1/chat/completions", { method: "POST", headers, body: JSON.stringify(body), signal });
  } catch (error) {
    throw signal.aborted ? error : new Refusal("The server cannot be reached.");
  }
  if (!response.ok) throw await refusalOf(response);
  let ended = false;
  try {
    for await (const events of eventLists(response.body)) {
      const chunks = [];
      let failure = null;
      for (const data of events) {
        if (data === "[DONE]") {
          ended = true;
          continue;
        }
        const chunk = JSON.parse(data);
        if (chunk.error) failure = new Refusal(chunk.error.message, chunk.error.code);
        else chunks.push(chunk);
      }
      yield chunks;
      if (failure) throw failure;
    }
  } catch (error) {
    if (error instanceof Refusal || signal.aborted) throw error;
    throw new Refusal("The connection broke before the answer was complete.");
  }
  if (!ended) throw new Refusal("The connection ended before the answer was complete.");
}

async function* eventLists(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const events = (rest + value).split(/\r?\n\r?\n/);
    rest = events.pop();
    yield events.map(dataOf).filter((data) => data !== "");
  }
}

// The payload of one server-sent event; comments and other fields have none.
function dataOf(event) {
  const lines = event.split(/\r?\n/).filter((line) => line.startsWith("data:"));
  return lines.map((line) => line.slice(5).replace(/^ /, "")).join("\n");
}

async function refusalOf(response) {
  let message = `The server answered with status ${response.status}.`;
  try {
    const { error } = await response.json();
    message = typeof error === "string" ? error : error.message;
  } catch {
    // not JSON: a proxy's page, say; the status is all there is to tell
  }
  if (response.status === 401) message = "The server asks for an API key: type it under Settings.";
  const wait = response.headers.get("Retry-After");
  if (wait) message += ` Try again in ${wait} s.`;
  return new Refusal(message, response.status);
}
