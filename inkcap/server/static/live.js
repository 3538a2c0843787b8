// The engine at work: asks the server once a second while the page is visible, and shows rates of what it counts.

import { element } from "./answer.js";
import { fetchJson } from "./stream.js";

const EVERY_MS = 1000;
const SECONDS = 60;
const STATES = { ready: "ready", loading: "loading the model", draining: "shutting down", dead: "engine stopped",
  unreachable: "unreachable" };
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const byId = (id) => document.getElementById(id);
const percent = (share) => `${(share * 100).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;

export class Live {
  // `onChange` is called, and awaited, when the server answers in another state than before.
  constructor(onChange) {
    this.onChange = onChange;
    this.samples = [];
    this.rates = [];
    this.bars = new Map();
    this.state = null;
    document.addEventListener("visibilitychange", () => { if (!document.hidden) this.again(0); });
    this.again(0);
  }

  again(delay) {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.look(), delay);
  }

  async look() {
    if (document.hidden) return;
    try {
      const now = await fetchJson("page/live", AbortSignal.timeout(5000));
      if (now.state !== this.state) await this.onChange();
      this.show(now.state);
      if (now.stats) this.take({ time: now.time, ...now.stats });
    } catch {
      this.show("unreachable"); // whatever it was, the header says that no answer came; the next look may get one
    }
    this.again(EVERY_MS);
  }

  show(state) {
    if (state === this.state) return;
    this.state = state;
    byId("state").textContent = STATES[state] ?? state;
    byId("state").dataset.state = state;
  }

  take(now) {
    const before = this.samples.at(-1);
    if (before && (now.time <= before.time || now.generated_tokens < before.generated_tokens)) {
      this.samples = []; // another server process answers: it counts from zero
      this.rates = [];
    }
    const last = this.samples.at(-1);
    this.samples.push(now);
    this.samples.splice(0, this.samples.length - SECONDS - 1);
    const seconds = last ? now.time - last.time : 1;
    const rate = last ? (now.generated_tokens - last.generated_tokens) / seconds : 0;
    this.rates.push(rate);
    this.rates.splice(0, this.rates.length - SECONDS);
    byId("generating").textContent = whole.format(rate);
    byId("prompts").textContent = whole.format(last ? (now.prompt_tokens - last.prompt_tokens) / seconds : 0);
    byId("running").textContent = whole.format(now.running);
    byId("waiting").textContent = whole.format(now.waiting);
    byId("hits").textContent = this.share("prefix_hits", "prefix_queries");
    byId("acceptance-row").hidden = !now.draft_tokens;
    byId("acceptance").textContent = this.share("accepted_tokens", "draft_tokens");
    this.draw();
    for (const [group, use] of Object.entries(now.group_usage)) this.bar(group, use);
  }

  // Part of the last minute, or since the start when the last minute had none.
  share(part, total) {
    const [first, last] = [this.samples[0], this.samples.at(-1)];
    if (!last[total]) return "–";
    const recent = last[total] - first[total];
    return percent(recent > 0 ? (last[part] - first[part]) / recent : last[part] / last[total]);
  }

  draw() {
    const most = Math.max(1, ...this.rates);
    const left = SECONDS - this.rates.length;
    const points = this.rates.map((rate, i) => `${left + i + 0.5},${(19 - (rate / most) * 18).toFixed(2)}`);
    byId("spark").firstElementChild.setAttribute("points", points.join(" "));
  }

  bar(group, use) {
    if (!this.bars.has(group)) {
      const fill = element("span", { className: "fill" });
      const meter = element("span", { className: "meter", role: "meter", ariaLabel: `Cache group ${group}`,
        ariaValueMin: "0", ariaValueMax: "100" }, fill);
      const figure = element("span", { className: "figure" });
      byId("cache").append(element("div", { className: "bar" }, element("span", {}, group), meter, figure));
      this.bars.set(group, { fill, meter, figure });
    }
    const { fill, meter, figure } = this.bars.get(group);
    fill.style.transform = `scaleX(${Math.min(1, use)})`;
    meter.ariaValueNow = String(Math.round(use * 100));
    figure.textContent = percent(use);
  }
}
