"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  const data = JSON.parse(byId("data").textContent);
  const rollouts = JSON.parse(byId("rollout-data").textContent);
  const SVG = "http://www.w3.org/2000/svg";

  // Text from a run only ever becomes a text node or an attribute value, never markup.
  function node(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name === "style") element.style.cssText = value;
      else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
    }
    element.append(...children);
    return element;
  }
  function shape(tag, attributes = {}, text) {
    const element = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    if (text !== undefined) element.textContent = text;
    return element;
  }

  function format(value, unit) {
    if (value === null || value === undefined) return "–";
    if (unit === "%") return Number((100 * value).toPrecision(3)) + " %";
    const size = Math.abs(value);
    let text;
    if (size >= 1e6) text = Number((value / 1e6).toPrecision(3)) + "M";
    else if (size >= 1e4) text = Number((value / 1e3).toPrecision(3)) + "k";
    else if (size !== 0 && size < 1e-3) text = value.toExponential(1);
    else text = String(Number(value.toPrecision(3)));
    return unit === "s" ? text + " s" : text;
  }

  // ------------------------------------------------------------------------------------------------------- charts

  function ticks(low, high, count) {
    const span = high - low || 1;
    const rough = span / count;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => span / s <= count) || 10 * power;
    const result = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) result.push(Number((i * step).toPrecision(12)));
    return result;
  }

  // As many decimals as tell neighbouring ticks apart.
  function formatTick(value, all, unit) {
    const scale = unit === "%" ? 100 : 1;
    const gap = all.length > 1 ? (all[1] - all[0]) * scale : 0;
    if (gap >= 1000 || gap < 1e-4) return format(value, unit === "%" ? "%" : "");
    const decimals = [0, 1, 2, 3, 4, 5].find((d) => Math.abs(gap - Number(gap.toFixed(d))) < gap * 1e-6) ?? 5;
    return (value * scale).toFixed(decimals) + (unit === "%" ? " %" : "");
  }

  // An exponential mean, corrected for its start from nothing.
  function smooth(values, weight) {
    let mean = 0, mass = 0;
    return values.map((value) => {
      mean = weight * mean + (1 - weight) * value;
      mass = weight * mass + (1 - weight);
      return mean / mass;
    });
  }

  function domain(series, smoothed) {
    let low = Infinity, high = -Infinity;
    series.forEach(({ values }, i) => {
      // One spike must not flatten a long curve: the outermost 1 % may leave the chart.
      const sorted = [...values].sort((a, b) => a - b);
      const cut = values.length > 50 ? Math.floor(values.length / 100) : 0;
      low = Math.min(low, sorted[cut], ...smoothed[i]);
      high = Math.max(high, sorted[sorted.length - 1 - cut], ...smoothed[i]);
    });
    // Equal but for rounding: no axis can tell such values apart.
    if (high - low <= 1e-9 * Math.max(Math.abs(low), Math.abs(high))) {
      const pad = Math.abs(low) * 0.1;
      return low === 0 ? [0, 1] : [low - pad, high + pad];
    }
    const pad = 0.06 * (high - low);
    return [low >= 0 && low - pad < 0 ? 0 : low - pad, high + pad];
  }

  const tooltip = byId("tooltip");
  let clipCount = 0;

  function makeChart(spec, height) {
    const series = spec.series.map(([name, axis, values], index) => ({
      name, values, steps: data.charts.axes[axis], color: `var(--c${index % 8})`, heldOut: name.startsWith("eval/"),
    }));
    const card = node("div", { class: "chart", "data-chart": spec.title });
    card.append(node("h3", {}, spec.title));
    if (spec.main) card.append(node("div", { class: "note" }, spec.note));
    const svg = shape("svg", { height, role: "img", "aria-label": `${spec.title}: ${series.map((s) => s.name).join(", ")}` });
    const legend = node("div", { class: "legend" });
    for (const one of series) {
      legend.append(node("span", {}, node("i", { style: `background:${one.color}` }), one.name, node("b", {}, format(one.values[one.values.length - 1], spec.unit))));
    }
    card.append(svg);
    if (spec.main) card.append(legend);
    const steps = [...new Set(series.flatMap((s) => s.steps))].sort((a, b) => a - b);
    const clip = `clip-${clipCount++}`;
    let geometry = null;

    function draw(weight) {
      const width = svg.clientWidth || card.clientWidth - 28;
      if (width <= 0) return;
      const left = 52, right = 10, top = 8, bottom = 22;
      const smoothed = series.map((s) => (s.heldOut || weight === 0 ? s.values : smooth(s.values, weight)));
      const [low, high] = domain(series, smoothed);
      const first = steps[0], last = steps[steps.length - 1];
      const x = (step) => (first === last ? (left + width - right) / 2 : left + ((step - first) / (last - first)) * (width - left - right));
      const y = (value) => top + ((high - value) / (high - low)) * (height - top - bottom);
      geometry = { x, y, smoothed, width };
      svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
      const clipPath = shape("clipPath", { id: clip });
      clipPath.append(shape("rect", { x: left - 3, y: top - 3, width: width - left - right + 6, height: height - top - bottom + 6 }));
      svg.replaceChildren(clipPath);
      const rows = ticks(low, high, height < 150 ? 3 : 5);
      for (const tick of rows) {
        svg.append(shape("line", { class: "grid", x1: left, x2: width - right, y1: y(tick), y2: y(tick) }));
        svg.append(shape("text", { x: left - 6, y: y(tick) + 4, "text-anchor": "end" }, formatTick(tick, rows, spec.unit)));
      }
      for (const tick of ticks(first, last, Math.max(2, Math.floor(width / 60))).filter(Number.isInteger)) {
        svg.append(shape("text", { x: x(tick), y: height - 6, "text-anchor": "middle" }, String(tick)));
      }
      const plot = shape("g", { "clip-path": `url(#${clip})` });
      const path = (s, values) => values.map((v, i) => `${i ? "L" : "M"}${x(s.steps[i]).toFixed(1)} ${y(v).toFixed(1)}`).join("");
      series.forEach((s, i) => {
        if (weight > 0 && !s.heldOut) plot.append(shape("path", { class: "raw", d: path(s, s.values), stroke: s.color }));
        plot.append(shape("path", { class: "curve", d: path(s, smoothed[i]), stroke: s.color, "data-series": s.name }));
        if (s.values.length <= (s.heldOut ? 80 : 1)) {
          s.values.forEach((v, k) => plot.append(shape("circle", { cx: x(s.steps[k]), cy: y(v), r: 2.8, fill: s.color })));
        }
      });
      svg.append(plot, shape("g", { class: "hover" }));
    }

    function hover(event) {
      if (!geometry) return;
      const box = svg.getBoundingClientRect();
      const at = ((event.clientX - box.left) / box.width) * geometry.width;
      const step = steps.reduce((best, s) => (Math.abs(geometry.x(s) - at) < Math.abs(geometry.x(best) - at) ? s : best));
      const group = svg.querySelector(".hover");
      const position = geometry.x(step);
      group.replaceChildren(shape("line", { class: "cursor", x1: position, x2: position, y1: 8, y2: height - 22 }));
      const lines = [];
      series.forEach((s, i) => {
        const index = s.steps.indexOf(step);
        if (index < 0) return;
        group.append(shape("circle", { cx: position, cy: geometry.y(geometry.smoothed[i][index]), r: 3.4, fill: s.color }));
        lines.push(node("div", {}, node("span", {}, node("i", { style: `background:${s.color};margin-right:6px;vertical-align:middle` }), s.name), node("b", {}, format(s.values[index], spec.unit))));
      });
      tooltip.replaceChildren(node("div", {}, node("strong", {}, `step ${step}`)), ...lines);
      tooltip.hidden = false;
      const flip = event.clientX + 24 + tooltip.offsetWidth > innerWidth;
      tooltip.style.left = `${flip ? event.clientX - tooltip.offsetWidth - 14 : event.clientX + 14}px`;
      tooltip.style.top = `${Math.min(event.clientY + 14, innerHeight - tooltip.offsetHeight - 8)}px`;
    }
    svg.addEventListener("pointermove", hover);
    svg.addEventListener("pointerleave", () => { tooltip.hidden = true; svg.querySelector(".hover")?.replaceChildren(); });
    return { card, draw };
  }

  const slider = byId("smoothing");
  const main = data.charts.charts.filter((c) => c.main).map((c) => makeChart(c, 200));
  const others = data.charts.charts.filter((c) => !c.main).map((c) => makeChart(c, 130));
  const longest = Math.max(0, ...data.charts.axes.map((axis) => axis.length));
  slider.value = longest > 50 ? 0.6 : 0;
  byId("charts").append(...main.map((c) => c.card));
  byId("more-charts").append(...others.map((c) => c.card));
  byId("more-metrics").hidden = others.length === 0;
  if (main.length + others.length === 0) byId("charts").append(node("p", { class: "empty" }, "No metrics yet."));

  function drawCharts() {
    const weight = Number(slider.value);
    byId("smoothing-value").textContent = weight ? weight.toFixed(2) : "off";
    main.forEach((c) => c.draw(weight));
    if (byId("more-metrics").open) others.forEach((c) => c.draw(weight));
  }
  slider.addEventListener("input", drawCharts);
  byId("more-metrics").addEventListener("toggle", drawCharts);
  let pending = 0;
  addEventListener("resize", () => { cancelAnimationFrame(pending); pending = requestAnimationFrame(drawCharts); });

  // ----------------------------------------------------------------------------------------------------- rollouts

  const groups = rollouts.groups;
  // Training on demonstrations has no rollouts to show.
  byId("rollouts-section").hidden = byId("rollouts-link").hidden = rollouts.total === 0 && data.trainer !== "rl";
  const finite = (value) => typeof value === "number";
  const rewards = groups.flatMap((g) => g.samples.map((s) => s.reward)).filter(finite);
  const lowest = rewards.length ? Math.min(...rewards) : 0;
  const highest = rewards.length ? Math.max(...rewards) : 1;
  for (const group of groups) {
    const values = group.samples.map((s) => s.reward).filter(finite);
    group.mean = values.length ? values.reduce((a, b) => a + b, 0) / values.length : null;
    group.mixed = new Set(values).size > 1;
    group.haystack = [group.prompt, ...group.samples.map((s) => s.completion)].join("\n").toLowerCase();
  }
  function rewardColor(value) {
    if (!finite(value)) return "var(--muted)";
    const share = highest > lowest ? (value - lowest) / (highest - lowest) : value > 0 ? 1 : 0;
    return `color-mix(in oklab, var(--bad), var(--good) ${Math.round(100 * share)}%)`;
  }
  // Chat templates wrap a question in markers that only crowd a one-line preview.
  const preview = (prompt) => prompt.replace(/<\|[^|<>]*\|>(system|user|assistant)?/g, " ").replace(/\s+/g, " ").trim().slice(0, 200);

  const filters = Object.fromEntries(["step", "split", "min", "max", "order", "text", "mixed"].map((name) => [name, byId(`f-${name}`)]));
  const PAGE = 60;
  let limit = PAGE, selected = null, shaded = false;

  function fillSelect(select, values, all) {
    select.append(node("option", { value: "" }, all), ...values.map((value) => node("option", { value }, String(value))));
  }
  fillSelect(filters.step, [...new Set(groups.map((g) => g.step))].sort((a, b) => a - b), "all");
  fillSelect(filters.split, [...new Set(groups.map((g) => g.split))].sort(), "all");

  function matching() {
    const text = filters.text.value.trim().toLowerCase();
    const low = filters.min.value === "" ? -Infinity : Number(filters.min.value);
    const high = filters.max.value === "" ? Infinity : Number(filters.max.value);
    const bounded = low > -Infinity || high < Infinity;
    const found = groups.filter((g) =>
      (filters.step.value === "" || g.step === Number(filters.step.value)) &&
      (filters.split.value === "" || g.split === filters.split.value) &&
      (!filters.mixed.checked || g.mixed) &&
      (!bounded || g.samples.some((s) => finite(s.reward) && s.reward >= low && s.reward <= high)) &&
      (text === "" || g.haystack.includes(text)));
    const mean = (g) => g.mean ?? 0;
    const orders = { old: (a, b) => a.step - b.step, new: (a, b) => b.step - a.step, low: (a, b) => mean(a) - mean(b), high: (a, b) => mean(b) - mean(a) };
    return found.sort(orders[filters.order.value]);
  }

  function showList() {
    const found = matching();
    const list = byId("group-list");
    list.replaceChildren();
    for (const group of found.slice(0, limit)) {
      const button = node("button", { type: "button", class: "group", "aria-current": group === selected ? "true" : "false" },
        node("div", { class: "line" }, node("span", {}, `step ${group.step} · ${group.split}`), node("span", {}, group.mean === null ? "no reward" : `mean ${format(group.mean)}`)),
        node("div", { class: "snippet" }, preview(group.prompt) || "(no prompt)"),
        node("div", { class: "dots" }, ...group.samples.map((s) => node("i", { style: `background:${rewardColor(s.reward)}`, title: `reward ${format(s.reward)}` }))));
      button.addEventListener("click", () => {
        select(group);
        list.querySelectorAll(".group").forEach((other) => other.setAttribute("aria-current", String(other === button)));
      });
      list.append(button);
    }
    if (found.length === 0) list.append(node("p", { class: "empty" }, groups.length ? "Nothing matches." : "No trajectories recorded."));
    byId("more-groups").hidden = found.length <= limit;
    const part = rollouts.shown < rollouts.total ? `a sample of ${rollouts.shown} of ${rollouts.total} trajectories` : `all ${rollouts.total} trajectories`;
    byId("rollout-count").textContent = `${found.length} of ${groups.length} prompts, ${part}`;
    if (!found.includes(selected)) select(found[0] || null);
    const current = found.indexOf(selected);
    list.children[current]?.setAttribute("aria-current", "true");
  }

  function tokens(sample) {
    const box = node("div", { class: "text" });
    let trained = 0;
    sample.t.forEach((id, i) => {
      const text = (rollouts.vocabulary[id] ?? `⟨${id}⟩`).replace(/\n/g, "⏎\n");
      if (!sample.m[i]) { box.append(node("span", { class: "tok given", title: "not sampled" }, text)); return; }
      const hundredths = sample.p[trained++];
      if (!finite(hundredths)) { box.append(text); return; }
      const logprob = hundredths / 100;
      const alpha = Math.min(0.75, (-logprob / 4) * 0.75).toFixed(2);
      box.append(node("span", { class: "tok", style: `background:rgb(240 140 0 / ${alpha})`, title: `log-prob ${logprob.toFixed(2)}, p = ${Math.exp(logprob).toPrecision(3)}` }, text));
    });
    if (sample.tokens > sample.t.length) box.append(node("span", { class: "muted" }, `\n[${sample.tokens - sample.t.length} more tokens]`));
    return box;
  }

  function showSample(sample, index) {
    const meta = node("div", { class: "meta" },
      node("span", { class: "reward", style: `background:${rewardColor(sample.reward)}` }, finite(sample.reward) ? format(sample.reward) : "no reward"),
      node("span", {}, `sample ${index + 1}`));
    const facts = [];
    if (sample.outcome && sample.outcome !== "accepted") facts.push(sample.reason ? `${sample.outcome}: ${sample.reason}` : sample.outcome);
    if (sample.stop) facts.push(`stop: ${sample.stop}`);
    if (finite(sample.tokens)) facts.push(`${sample.tokens} tokens`);
    if (sample.turns > 1) facts.push(`${sample.turns} turns`);
    if (sample.versions) facts.push(sample.versions[0] === sample.versions[1] ? `version ${sample.versions[0]}` : `versions ${sample.versions[0]}–${sample.versions[1]}`);
    for (const [name, value] of Object.entries(sample.rewards || {})) facts.push(`${name} ${format(value)}`);
    meta.append(...facts.map((fact) => node("span", {}, fact)));
    const body = shaded && sample.t ? tokens(sample) : node("div", { class: "text" }, sample.completion || "(empty)");
    const box = node("div", { class: "sample" }, meta, body);
    if (sample.error) box.append(node("p", { class: "banner" }, sample.error));
    return box;
  }

  function select(group) {
    selected = group;
    const detail = byId("group-detail");
    detail.hidden = group === null;
    if (group === null) return;
    const toggle = node("input", { type: "checkbox", id: "shade" });
    toggle.checked = shaded;
    toggle.addEventListener("change", () => { shaded = toggle.checked; select(selected); });
    const head = node("div", { class: "head" }, node("h3", {}, `Step ${group.step} · ${group.split}`));
    if (group.samples.some((s) => s.t && s.p.length)) {
      const control = node("label", { class: "control" }, toggle, "token log-probs");
      if (shaded) control.append(node("span", { class: "scale" }, "certain", node("i"), "unlikely"));
      head.append(control);
    }
    detail.replaceChildren(head, node("div", { class: "caption" }, "Prompt"), node("div", { class: "text" }, group.prompt || "(none)"), ...group.samples.map(showSample));
  }

  for (const control of Object.values(filters)) control.addEventListener("input", () => { limit = PAGE; showList(); });
  byId("more-groups").addEventListener("click", () => { limit += PAGE; showList(); });

  // --------------------------------------------------------------------------------------- configuration and theme

  function table(rows, caption) {
    const element = node("table");
    if (caption) element.append(node("caption", {}, caption));
    for (const [key, value] of rows) element.append(node("tr", {}, node("td", {}, key), node("td", {}, value)));
    return element;
  }
  function showConfig() {
    const wanted = byId("config-filter").value.trim().toLowerCase();
    const sections = new Map();
    for (const [key, value] of data.config) {
      if (wanted && !key.toLowerCase().includes(wanted)) continue;
      const dot = key.indexOf(".");
      const section = dot < 0 ? "run" : key.slice(0, dot);
      if (!sections.has(section)) sections.set(section, []);
      sections.get(section).push([dot < 0 ? key : key.slice(dot + 1), value]);
    }
    byId("config").replaceChildren(...[...sections].map(([section, rows]) => table(rows, section)));
    if (!sections.size) byId("config").append(node("p", { class: "empty" }, "Nothing matches."));
  }
  byId("config-filter").addEventListener("input", showConfig);
  byId("environment").replaceChildren(...table(data.environment).childNodes);

  byId("theme").addEventListener("click", () => {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });

  showConfig();
  showList();
  drawCharts();
  document.documentElement.dataset.ready = "true";
})();
