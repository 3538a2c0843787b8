// One answer on the page: thinking, text and tool calls as they stream in. All text goes in as text, never as HTML.

export function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

// Paragraphs and fenced code blocks, appended piece by piece, so that only the last one is laid out again. The start of a
// line waits while it may become a fence.
class Prose {
  constructor(root) {
    this.root = root;
    this.held = "";
    this.fence = null; // the backticks that opened the code block we are in
    this.lineStart = true;
    this.text = null;
  }

  append(piece) {
    const lines = (this.held + piece).split(/(?<=\n)/);
    this.held = "";
    for (const line of lines) {
      if (this.lineStart && !line.endsWith("\n") && /^ {0,3}`{0,2}$|^ {0,3}```/.test(line)) {
        this.held = line; // may become a fence
        return;
      }
      this.line(line);
    }
  }

  finish() {
    if (this.held) this.line(this.held);
    this.held = "";
  }

  line(line) {
    const fresh = this.lineStart;
    const mark = fresh ? line.match(/^ {0,3}(```+)\s*([\w+#.-]*)\s*$/) : null;
    this.lineStart = line.endsWith("\n");
    if (mark && this.fence === null) {
      this.fence = mark[1];
      const code = element("code");
      this.root.append(element("pre", { tabIndex: 0, ariaLabel: mark[2] ? `Code, ${mark[2]}` : "Code" }, code));
      this.text = code.appendChild(new Text());
    } else if (mark && mark[1].startsWith(this.fence) && !mark[2]) {
      this.fence = null;
      this.text = null;
    } else if (this.fence === null && this.lineStart && !line.trim() && fresh) {
      this.text = null; // a blank line ends a paragraph
    } else {
      this.text ??= this.root.appendChild(element("p")).appendChild(new Text());
      this.text.appendData(line);
    }
  }
}

export class Answer {
  constructor() {
    this.content = "";
    this.reasoning = "";
    this.calls = []; // { id, name, arguments, view }
    this.failed = false;
    this.started = performance.now();
    this.first = null;
    this.usage = null;
    this.reason = null;
    this.thought = new Text();
    this.summary = element("summary", {}, "Thinking");
    this.thinking = element("details", { className: "thinking", hidden: true }, this.summary,
      element("div", {}, this.thought));
    this.body = element("div", { className: "prose" });
    this.prose = new Prose(this.body);
    this.tools = element("div", { className: "calls", hidden: true });
    this.error = element("p", { className: "error", role: "alert", hidden: true });
    this.figures = element("span", { className: "figures quiet" });
    this.actions = element("div", { className: "actions" }, this.figures);
    this.root = element("article", { className: "answer", ariaLabel: "Answer", ariaBusy: "true" },
      this.thinking, this.body, this.tools, this.error, this.actions);
  }

  feed(chunk) {
    if (chunk.usage) this.usage = chunk.usage;
    for (const choice of chunk.choices) {
      const { reasoning, content, tool_calls: calls } = choice.delta;
      if (this.first === null && (reasoning || content || calls)) this.first = performance.now();
      if (reasoning) this.think(reasoning);
      if (content) this.say(content);
      for (const call of calls ?? []) this.call(call);
      if (choice.finish_reason) this.reason = choice.finish_reason;
    }
  }

  think(text) {
    this.thinking.hidden = false;
    this.reasoning += text;
    this.thought.appendData(text);
  }

  say(text) {
    this.settle();
    this.content += text;
    this.prose.append(text);
  }

  call(delta) {
    this.settle();
    let call = this.calls[delta.index];
    if (!call) {
      call = { id: delta.id, name: "", arguments: "", view: new Text(), title: new Text() };
      this.calls[delta.index] = call;
      this.tools.hidden = false;
      call.card = element("section", { className: "call" },
        element("h3", {}, "Calls ", element("code", {}, call.title)),
        element("pre", { tabIndex: 0, ariaLabel: "Arguments" }, element("code", {}, call.view)));
      this.tools.append(call.card);
    }
    if (delta.function.name) {
      call.name += delta.function.name;
      call.title.data = call.name;
    }
    if (delta.function.arguments) {
      call.arguments += delta.function.arguments;
      call.view.data = indented(call.arguments) ?? call.arguments; // as it comes, until it is complete
    }
  }

  // Thinking is over: its line says how long it took.
  settle() {
    if (this.thinking.hidden || this.settled) return;
    this.settled = true;
    this.summary.textContent = `Thought for ${((performance.now() - this.started) / 1000).toFixed(1)} s`;
  }

  finish(note) {
    this.prose.finish();
    this.settle();
    this.root.ariaBusy = "false";
    const parts = [];
    if (note) parts.push(note);
    if (this.reason === "length") parts.push("cut off: the token limit is reached");
    if (this.usage) parts.push(...figuresOf(this.usage, this.first - this.started, performance.now() - this.first));
    this.figures.textContent = parts.join(" · ");
  }

  fail(message) {
    this.failed = true;
    this.error.textContent = message;
    this.error.hidden = false;
    this.finish("");
  }

  get empty() {
    return !this.content && !this.reasoning && !this.calls.length;
  }

  // Calls that came to their end; one that was cut off can have no result.
  get whole() {
    return this.calls.filter((call) => indented(call.arguments) !== null);
  }

  // As the API takes it back; thinking goes along, so that the next question finds this one's prefix in the cache.
  message() {
    const message = { role: "assistant", content: this.content || null };
    if (this.reasoning) message.reasoning = this.reasoning;
    if (this.whole.length) {
      message.tool_calls = this.whole.map(({ id, name, arguments: text }) => (
        { id, type: "function", function: { name, arguments: text } }));
    } else {
      message.content ??= "";
    }
    return message;
  }
}

function figuresOf(usage, firstMs, restMs) {
  const parts = [`${usage.completion_tokens} tokens`];
  if (usage.completion_tokens > 1 && restMs > 0) {
    parts.push(`${((usage.completion_tokens - 1) / restMs * 1000).toFixed(1)} per second`);
  }
  if (firstMs > 0) parts.push(`first after ${(firstMs / 1000).toFixed(2)} s`);
  const cached = usage.prompt_tokens_details?.cached_tokens;
  parts.push(`prompt ${usage.prompt_tokens}${cached ? `, ${cached} from cache` : ""}`);
  return parts;
}

function indented(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return null;
  }
}
