// The server's own OpenAPI file as a page: what each path takes, and a command that tries it.

const SAMPLES = {messages: [{role: "user", content: "Hello"}], input: "Hello", prompt: "Hello", max_tokens: 64, tokens: [13225]};

function element(name, text, ...children) {
  const made = document.createElement(name);
  if (text) made.textContent = text;
  made.append(...children);
  return made;
}

/** The schema that a reference names. */
function resolve(file, schema) {
  return schema?.$ref ? schema.$ref.slice(2).split("/").reduce((part, key) => part[key], file) : schema ?? {};
}

/** A schema's type in a few words. */
function typeOf(file, schema) {
  if (schema.$ref) return schema.$ref.split("/").pop();
  const choices = schema.anyOf ?? schema.oneOf;
  if (choices) return choices.map((one) => typeOf(file, one)).join(" | ");
  if (schema.enum) return schema.enum.map((one) => JSON.stringify(one)).join(" | ");
  if (schema.type === "array") return `list of ${typeOf(file, schema.items ?? {})}`;
  return schema.type ?? "any";
}

function table(heads, rows) {
  const head = element("tr", "", ...heads.map((text) => element("th", text)));
  const lines = rows.map((row) => element("tr", "", ...row.map((cell, i) => element("td", "", element(i ? "span" : "code", cell)))));
  return element("table", "", element("thead", "", head), element("tbody", "", ...lines));
}

function fieldsOf(file, schema) {
  const needed = new Set(schema.required ?? []);
  return Object.entries(schema.properties ?? {}).map(([name, field]) => {
    const fallback = needed.has(name) ? "required" : field.default === undefined ? "" : `default ${JSON.stringify(field.default)}`;
    return [name, typeOf(file, field), fallback];
  });
}

/** A command for a shell that calls one operation. */
function curl(base, method, path, schema) {
  const words = ["curl"];
  if (method !== "get") words.push("-X", method.toUpperCase());
  words.push(new URL(path.replace(/^\//, ""), base).href);
  if (schema) {
    const fields = schema.properties ?? {};
    const asked = ["messages", "input", "prompt", "tokens"].find((name) => name in fields);  // one is enough
    const wanted = Object.keys(fields).filter((name) => name === asked || ["model", "max_tokens"].includes(name));
    const body = Object.fromEntries(wanted.map((name) => [name, SAMPLES[name]]));
    words.push("-H", "'Content-Type: application/json'", "-d", `'${JSON.stringify(body)}'`);
  }
  return words.join(" ");
}

function operation(file, path, method, described) {
  const title = element("summary", "", element("code", `${method.toUpperCase()} ${path}`), ` ${described.description ?? ""}`);
  const made = element("details", "", title);
  const parameters = (described.parameters ?? []).map((one) => [
    one.name, typeOf(file, one.schema ?? {}), one.required ? "required" : one.in,
  ]);
  if (parameters.length) made.append(table(["parameter", "type", ""], parameters));
  const content = described.requestBody?.content?.["application/json"];
  const schema = content ? resolve(file, content.schema) : null;
  if (schema) made.append(table(["field", "type", ""], fieldsOf(file, schema)));
  made.append(element("pre", "", element("code", curl(document.baseURI, method, path, schema))));
  return made;
}

async function show() {
  const place = document.getElementById("paths");
  try {
    SAMPLES.model = (await (await fetch("page/info")).json()).models[0];
    const reply = await fetch("openapi.json");
    if (!reply.ok) throw new Error(`the server answered ${reply.status}`);
    const file = await reply.json();
    for (const [path, methods] of Object.entries(file.paths)) {
      for (const [method, described] of Object.entries(methods)) place.append(operation(file, path, method, described));
    }
  } catch (error) {
    place.append(element("p", `openapi.json cannot be read: ${error.message}`));
  }
  place.removeAttribute("aria-busy");
}

show();
