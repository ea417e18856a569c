"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const steps = data.steps;
const view = document.getElementById("step");
const slider = document.getElementById("slider");
const boxes = [...document.querySelectorAll(".box")];
let current = 0;

function element(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function short(value) {
  if (typeof value === "string") return value.replace("inf", "∞").replace("nan", "NaN");
  if (Number.isInteger(value)) return String(value).replaceAll("-", "−");
  const size = Math.abs(value);
  const text = size >= 1000 || size < 0.001 ? value.toExponential(1) : value.toFixed(size < 0.1 ? 4 : 3);
  return text.replaceAll("-", "−");
}

// Colours: white is 0, one hue for each sign, its strength the share of the largest entry.
function style(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).split(",").map(Number);
}
function mix(value, largest, palette) {
  if (typeof value === "string" || !largest) return palette.zero;
  const share = Math.min(Math.abs(value) / largest, 1) * 0.85;
  const hue = value < 0 ? palette.minus : palette.plus;
  return palette.zero.map((z, i) => Math.round(z + (hue[i] - z) * share));
}
function palette() {
  return { zero: style("--zero"), plus: style("--plus"), minus: style("--minus") };
}
function ink(rgb) {
  return 0.299 * rgb[0] + 0.587 * rgb[1] + 0.114 * rgb[2] > 140 ? "#14181d" : "#ffffff";
}

// An array as slices of rows and columns: one table for each sentence and head.
function slices(array) {
  const shape = array.shown, numbers = data.numbers[array.numbers];
  const columns = shape.length ? shape[shape.length - 1] : 1;
  const rows = shape.length > 1 ? shape[shape.length - 2] : 1;
  const found = [];
  for (let start = 0; start < numbers.length; start += rows * columns) {
    const index = start / (rows * columns || 1);
    let title = "";
    if (shape.length === 4) {
      title = shape[0] > 1 ? `sentence ${Math.floor(index / shape[1])}, head ${index % shape[1]}` : `head ${index}`;
    } else if (shape.length === 3 && shape[0] > 1) title = `sentence ${index}`;
    const body = [];
    for (let r = 0; r < rows; r++) body.push(numbers.slice(start + r * columns, start + (r + 1) * columns));
    found.push({ title, body });
  }
  return found;
}
function largestOf(array) {
  return Math.max(0, ...data.numbers[array.numbers].filter((v) => typeof v === "number").map(Math.abs));
}

function heatMap(array) {
  const figure = element("figure", { "data-name": array.name });
  const shape = array.shape.length ? array.shape.join(" × ") : "a number";
  const save = element("button", { title: "save this as a picture" }, "picture");
  save.addEventListener("click", () => picture(array));
  figure.append(element("figcaption", {}, element("code", {}, array.name),
    element("span", {}, shape + (array.cut ? " (the first part is shown)" : "")), save));
  const colours = palette(), largest = largestOf(array);
  const scroll = element("div", { class: "scroll" });
  for (const { title, body } of slices(array)) {
    const table = element("table");
    if (title) table.append(element("caption", {}, title));
    if (array.columns.length > 1) {
      const head = element("tr", {}, element("th"));
      for (const label of array.columns) head.append(element("th", { scope: "col" }, label));
      table.append(element("thead", {}, head));
    }
    const rows = element("tbody");
    body.forEach((numbers, r) => {
      const row = element("tr", {}, element("th", { scope: "row" }, array.rows[r] || ""));
      for (const value of numbers) {
        const rgb = mix(value, largest, colours);
        row.append(element("td", { title: String(value), "data-value": String(value),
          style: `background:rgb(${rgb});color:${ink(rgb)}` }, short(value)));
      }
      rows.append(row);
    });
    table.append(rows);
    scroll.append(table);
  }
  figure.append(scroll);
  return figure;
}

// The heat map drawn on a canvas, four times as fine as a screen shows it: for slides.
function draw(array) {
  const parts = slices(array), colours = palette(), largest = largestOf(array);
  const cellWidth = 64, cellHeight = 26, left = 70, gap = 18, scale = 2;
  const columns = Math.max(1, parts[0] ? parts[0].body[0].length : 1), rows = parts[0] ? parts[0].body.length : 0;
  const height = parts.length * ((rows + 1) * cellHeight + gap) + 40;
  const canvas = element("canvas", { width: (left + columns * cellWidth + 10) * scale, height: height * scale });
  const pen = canvas.getContext("2d");
  const root = getComputedStyle(document.documentElement);
  pen.scale(scale, scale);
  pen.fillStyle = root.getPropertyValue("--ground");
  pen.fillRect(0, 0, canvas.width, canvas.height);
  pen.textBaseline = "middle";
  pen.fillStyle = root.getPropertyValue("--ink");
  pen.font = "bold 16px system-ui, sans-serif";
  pen.fillText(`${array.name}  (${array.shape.join(" × ")}${array.cut ? ", the first part" : ""})`, 8, 16);
  pen.font = "13px system-ui, sans-serif";
  let top = 32;
  for (const { title, body } of parts) {
    pen.fillStyle = root.getPropertyValue("--soft");
    pen.textAlign = "left";
    pen.fillText(title, 8, top + cellHeight / 2);
    pen.textAlign = "right";
    if (array.columns.length > 1) array.columns.forEach((label, c) =>
      pen.fillText(label, left + (c + 1) * cellWidth - 8, top + cellHeight / 2, cellWidth - 8));
    body.forEach((numbers, r) => {
      const y = top + (r + 1) * cellHeight;
      pen.fillStyle = root.getPropertyValue("--soft");
      pen.fillText(array.rows[r] || "", left - 8, y + cellHeight / 2, left - 12);
      numbers.forEach((value, c) => {
        const rgb = mix(value, largest, colours);
        pen.fillStyle = `rgb(${rgb})`;
        pen.fillRect(left + c * cellWidth, y, cellWidth - 1, cellHeight - 1);
        pen.fillStyle = ink(rgb);
        pen.fillText(short(value), left + (c + 1) * cellWidth - 8, y + cellHeight / 2);
      });
    });
    top += (rows + 1) * cellHeight + gap;
  }
  return canvas;
}
function picture(array) {
  const step = steps[current];
  const link = element("a", { href: draw(array).toDataURL("image/png"),
    download: `${step.layer || "model"}.${step.method}.${array.name}.png` });
  link.click();
}

// The call that this one undoes, or that undoes it.
function counterpart(index) {
  return steps[index].pair;
}

function arraysOf(step) {
  const other = step.backward ? counterpart(current) : -1;
  const values = new Map((other < 0 ? [] : steps[other].arrays).map((a) => [a.name, a]));
  const groups = [["in", step.backward ? "the gradient that comes in" : "what comes in"],
    ["value", "what is computed"], ["grad", "gradients of the parameters, added to .grad"]];
  const found = [];
  for (const [role, title] of groups) {
    const box = element("div", { class: "arrays" });
    for (const array of step.arrays) {
      if (array.role !== role) continue;
      if (step.backward && step.arrays.some((a) => a.name === "d" + array.name)) continue; // beside it
      const value = values.get(array.name.slice(1));
      if (step.backward && array.name.startsWith("d") && value) {
        box.append(element("div", { class: "pair" }, heatMap(value), heatMap(array)));
      } else box.append(heatMap(array));
    }
    if (box.children.length) found.push(element("h3", {}, title), box);
  }
  return found;
}

function sourceOf(step) {
  const found = [];
  for (const source of data.sources[step.source]) {
    if (!source.lines.length) continue;
    const pre = element("pre");
    for (const [number, text] of source.lines) {
      pre.append(element("span", { class: "n" }, String(number)));
      const at = text.search(/(^|\s)#/);
      if (at < 0) pre.append(text + "\n");
      else pre.append(text.slice(0, at), element("span", { class: "c" }, text.slice(at)), "\n");
    }
    found.push(element("h3", {}, `the lines that computed it: ${source.file}`), pre);
  }
  return found;
}

function show(index) {
  current = Math.max(0, Math.min(steps.length - 1, index));
  const step = steps[current];
  const direction = step.backward ? "backward" : "forward";
  const title = element("h2", {}, element("span", { class: `direction ${direction}` },
    step.backward ? "← backward" : "forward →"), ` ${step.layer || "the model"} `);
  const detail = element("p", { class: "lead" }, `${step.cls}.${step.method}`);
  view.replaceChildren(title, detail);
  const formulas = data.formulas[step.formulas];
  if (formulas) {
    const both = element("div", { class: "formulas" });
    for (const [title, index] of [["forward", 0], ["backward", 1]]) {
      const formula = element("div", { class: index === Number(step.backward) ? "formula" : "formula other" });
      formula.innerHTML = formulas[index];
      both.append(element("div", {}, element("h3", {}, title), formula));
    }
    view.append(both);
  }
  view.append(...arraysOf(step), ...sourceOf(step));
  slider.value = current;
  document.getElementById("count").textContent = `${current + 1} / ${steps.length}`;
  light(step);
  history.replaceState(null, "", `#${current + 1}`);
}

// The box whose part the step belongs to: the longest name that the step's begins with.
function belongs(step, name) {
  return step.layer === name || step.layer.startsWith(name + ".");
}
function light(step) {
  let best = null;
  let longest = 0;
  for (const box of boxes) {
    box.classList.remove("on", "backward");
    for (const name of box.dataset.layer.split(" ")) {
      if (belongs(step, name) && name.length > longest) { best = box; longest = name.length; }
    }
  }
  if (best) {
    best.classList.add("on");
    if (step.backward) best.classList.add("backward");
  }
}
function choose(box) {
  const name = box.dataset.layer.split(" ")[0], wanted = steps[current].backward;
  let index = steps.findIndex((s) => belongs(s, name) && s.backward === wanted);
  if (index < 0) index = steps.findIndex((s) => belongs(s, name));
  if (index >= 0) show(index);
}
function turn() {
  const index = counterpart(current);
  if (index >= 0) show(index);
}

slider.max = steps.length - 1;
slider.addEventListener("input", () => show(Number(slider.value)));
document.getElementById("first").addEventListener("click", () => show(0));
document.getElementById("back").addEventListener("click", () => show(current - 1));
document.getElementById("next").addEventListener("click", () => show(current + 1));
document.getElementById("other").addEventListener("click", turn);
for (const box of boxes) {
  box.addEventListener("click", () => choose(box));
  box.addEventListener("keydown", (event) => {
    if (event.key === "Enter" || event.key === " ") { event.preventDefault(); choose(box); }
  });
}
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.altKey || event.metaKey) return;
  const moves = { ArrowRight: current + 1, ArrowLeft: current - 1, Home: 0, End: steps.length - 1 };
  if (event.key in moves) { event.preventDefault(); show(moves[event.key]); }
  else if (event.key === "b") turn();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => show(current));
show((Number(location.hash.slice(1)) || 1) - 1);
