// Files that go with a question: images and audio, as far as the server takes them. Chosen, pasted or dropped.

import { element } from "./answer.js";

const byId = (id) => document.getElementById(id);
const list = byId("attached");
let kinds = []; // "image", "audio"
let files = []; // { kind, name, url }, the url holds the data

const kindOf = (file) => kinds.find((kind) => file.type.startsWith(`${kind}/`));

// Offer what the server takes; with nothing, the page shows no sign of it.
export function offer(media) {
  kinds = media;
  byId("attach").hidden = !kinds.length;
  byId("files").accept = kinds.map((kind) => `${kind}/*`).join(",");
}

export function listen(target) {
  byId("attach").addEventListener("click", () => byId("files").click());
  byId("files").addEventListener("change", (event) => {
    add(event.target.files);
    event.target.value = "";
  });
  target.addEventListener("dragover", (event) => {
    if (kinds.length && event.dataTransfer.types.includes("Files")) event.preventDefault();
  });
  target.addEventListener("drop", (event) => {
    if (!kinds.length || !event.dataTransfer.files.length) return;
    event.preventDefault();
    add(event.dataTransfer.files);
  });
  target.addEventListener("paste", (event) => add(event.clipboardData.files));
}

async function add(chosen) {
  for (const file of [...chosen].filter(kindOf)) {
    files.push({ kind: kindOf(file), name: file.name, url: await dataUrl(file) });
  }
  show();
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

function show() {
  list.hidden = !files.length;
  list.replaceChildren(...files.map((file) => {
    const remove = element("button", { type: "button", textContent: "Remove", ariaLabel: `Remove ${file.name}` });
    remove.addEventListener("click", () => {
      files = files.filter((other) => other !== file);
      show();
      byId("question").focus();
    });
    return element("li", {}, file.name, " ", remove);
  }));
}

// The content of a message with this text and the files, which are taken; and how to show them.
export function take(text) {
  const taken = files;
  files = [];
  show();
  const parts = taken.map(({ kind, url }) => (kind === "image"
    ? { type: "image_url", image_url: { url } }
    : { type: "input_audio", input_audio: { data: url.split(",")[1], format: url.match(/^data:audio\/(\w+)/)[1] } }));
  const views = taken.map(({ kind, name, url }) => (kind === "image"
    ? element("img", { src: url, alt: name })
    : element("audio", { src: url, controls: true, ariaLabel: name })));
  return { content: parts.length ? [...parts, { type: "text", text }] : text, views };
}
