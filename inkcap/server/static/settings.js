// The settings form: what it adds to a request. An empty field adds nothing, so the server's default holds.

import { element } from "./answer.js";
import { Refusal } from "./stream.js";

const byId = (id) => document.getElementById(id);
const form = byId("settings");

// Show what the server told about itself.
export function describe(info) {
  byId("key-row").hidden = !info.key;
  byId("version").textContent = `inkcap ${info.version}`;
  byId("effort").options[0].textContent = `default · ${info.default_effort}`;
  const facts = [info.models[0]];
  if (info.max_length) facts.push(`${info.max_length.toLocaleString("en")} tokens`, info.device);
  byId("model").textContent = facts.join(" · ");
  byId("model-row").hidden = info.models.length < 2;
  byId("name").replaceChildren(...info.models.map((name) => element("option", { textContent: name })));
  for (const input of form.querySelectorAll("input[type=number]")) {
    if (info.defaults[input.name] != null) input.placeholder = String(info.defaults[input.name]);
  }
}

export const key = () => byId("key").value;

export function askForKey() {
  byId("key-row").hidden = false;
  byId("key").focus();
}

// False when a field holds what cannot be; the reader is told at that field.
export function valid() {
  if (form.checkValidity()) return true;
  if (form.querySelector("#more :invalid")) byId("more").open = true;
  form.reportValidity();
  return false;
}

// The fields of a request besides its messages. Throws Refusal when the tools are no JSON list.
export function parameters() {
  const found = {};
  if (byId("name").value) found.model = byId("name").value; // none before the server told its names
  for (const { name, value, type } of form.elements) {
    if (name && value !== "") found[name] = type === "number" ? Number(value) : value;
  }
  const tools = byId("tools").value.trim();
  if (tools) found.tools = parsedTools(tools);
  return found;
}

export function systemMessages() {
  const content = byId("system").value.trim();
  return content ? [{ role: "system", content }] : [];
}

function parsedTools(text) {
  try {
    const tools = JSON.parse(text);
    if (Array.isArray(tools)) return tools;
  } catch {
    // said below, for everything that is no list
  }
  byId("more").open = true;
  throw new Refusal("The tools under Settings are not a JSON list.");
}
