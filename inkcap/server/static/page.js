// The page: a conversation kept in memory, one answer at a time, and the keys that drive it.

import { Answer, element } from "./answer.js";
import * as attach from "./attach.js";
import { Live } from "./live.js";
import * as settings from "./settings.js";
import { answerChunks, fetchJson, Refusal } from "./stream.js";

const byId = (id) => document.getElementById(id);
const log = byId("log");
const question = byId("question");
let messages = []; // of the conversation, as the API takes them; system messages are added when asking
let views = []; // the element of each message
let last = null; // the newest answer
let running = null; // AbortController of the answer that streams
let asked = ""; // the last question, for the ↑ key

// The log follows its end until the reader scrolls up, and again once they are back there.
let follows = true;
let position = 0;
log.addEventListener("scroll", () => {
  if (log.scrollHeight - log.scrollTop - log.clientHeight < 40) follows = true;
  else if (log.scrollTop < position) follows = false; // being away is not enough: text may have come since
  position = log.scrollTop;
}, { passive: true });
let queued = false;
function follow() {
  if (queued) return;
  queued = true;
  requestAnimationFrame(() => {
    queued = false;
    if (follows) log.scrollTop = log.scrollHeight;
  });
}

function add(message, view) {
  messages.push(message);
  views.push(view);
}

function showQuestion(text, media) {
  byId("empty").hidden = true;
  const view = element("article", { className: "question", ariaLabel: "You" }, ...media);
  if (text) view.append(element("p", { textContent: text }));
  log.append(view);
  return view;
}

async function ask() {
  const answer = new Answer();
  last?.actions.querySelector(".retry")?.remove();
  last = answer;
  running = new AbortController();
  show(true);
  log.append(answer.root);
  follows = true;
  follow();
  say("Answering.");
  try {
    const body = { ...settings.parameters(), messages: [...settings.systemMessages(), ...messages], stream: true,
      stream_options: { include_usage: true } };
    for await (const chunks of answerChunks(body, settings.key(), running.signal)) {
      for (const chunk of chunks) answer.feed(chunk);
      follow();
    }
    answer.finish("");
    say(answer.content || "The model calls a tool.");
  } catch (error) {
    if (error.name === "AbortError") {
      answer.finish("stopped");
      say("Stopped.");
    } else if (error instanceof Refusal) {
      answer.fail(error.message);
      if (error.status === 401) settings.askForKey();
    } else {
      answer.fail("The page failed on this answer; the browser's console has the reason.");
      console.error(error);
    }
  } finally {
    running = null;
    show(false);
    close(answer);
    follow();
  }
}

// The answer is over: keep it, and offer what can be done with it.
function close(answer) {
  if (!answer.empty) add(answer.message(), answer.root);
  if (answer.whole.length) offerResults(answer);
  if (answer.content) {
    answer.actions.append(button("Copy", "", () => navigator.clipboard.writeText(answer.content)));
  }
  answer.actions.append(button("Retry", "retry", () => retry(answer)));
  if (document.activeElement === document.body) question.focus();
}

function button(text, className, action) {
  const made = element("button", { type: "button", textContent: text, className });
  made.addEventListener("click", action);
  return made;
}

// Ask the same again: everything from the answer on is dropped.
function retry(answer) {
  if (running) return;
  const at = views.indexOf(answer.root);
  if (at >= 0) {
    messages.length = at;
    views.length = at;
  }
  answer.root.remove();
  ask();
  question.focus();
}

// A field for the result of each call; they go back together.
function offerResults(answer) {
  const fields = answer.whole.map((call) => {
    const field = element("textarea", { rows: 2, ariaLabel: `Result of ${call.name}`,
      placeholder: `Result of ${call.name}` });
    call.card.append(field);
    return field;
  });
  const send = button("Send results", "primary", () => {
    if (running || last !== answer) return;
    answer.whole.forEach((call, i) => {
      add({ role: "tool", tool_call_id: call.id, name: call.name, content: fields[i].value }, answer.root);
      fields[i].readOnly = true;
    });
    send.remove();
    ask();
  });
  answer.tools.append(send);
}

function show(answering) {
  // hiding the focused button would drop the focus to the start of the page
  const focused = [byId("send"), byId("stop")].includes(document.activeElement);
  byId("send").hidden = answering;
  byId("stop").hidden = !answering;
  if (focused) question.focus();
}

// For those who listen; what is long is on the page to be read.
function say(text) {
  byId("spoken").textContent = text.slice(0, 1000);
}

function submit() {
  const text = question.value.trim();
  if (running || !settings.valid()) return;
  const { content, views: media } = attach.take(text);
  if (!content.length) return;
  if (last?.empty) last.root.remove(); // it failed before it said anything
  asked = text;
  question.value = "";
  add({ role: "user", content }, showQuestion(text, media));
  ask();
}

function reset() {
  running?.abort();
  messages = [];
  views = [];
  last = null;
  for (const view of log.querySelectorAll("article")) view.remove();
  byId("empty").hidden = false;
  question.focus();
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
byId("settings").addEventListener("submit", (event) => event.preventDefault());
byId("stop").addEventListener("click", () => running?.abort());
byId("new").addEventListener("click", reset);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running) {
    event.preventDefault();
    running.abort();
  }
});
question.addEventListener("keydown", (event) => {
  if (event.isComposing) return;
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    submit();
  } else if (event.key === "ArrowUp" && question.value === "" && asked) {
    event.preventDefault();
    question.value = asked;
  }
});
attach.listen(document.querySelector("main"));
new Live(async () => {
  const info = await fetchJson("page/info");
  settings.describe(info);
  attach.offer(info.media);
});
