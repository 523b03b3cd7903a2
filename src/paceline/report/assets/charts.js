// Draws every figure of the page: lines, points, bars and blocks over time, as SVG of the page's colours.
// LOOKS (dash, marker, hatch of each colour) is written before it by page.py.
const ROW = 27, MANY = 40, NARROW = 460, GAP = 28;
const CORNERS = {square: [45, 135, 225, 315], diamond: [0, 90, 180, 270], "triangle-up": [90, 210, 330],
  "triangle-down": [30, 150, 270], pentagon: [90, 162, 234, 306, 18]};
const HATCHES = {"/": "M-1,1l2,-2M0,6l6,-6M5,7l2,-2", "\\": "M-1,5l2,2M0,0l6,6M5,-1l2,2", "x": "M0,6l6,-6M0,0l6,6",
  "-": "M0,3h6", "|": "M3,0v6", "+": "M0,3h6M3,0v6", ".": "M2,3h1.5"};
const SECONDS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400];

function made(tag, text, name) {
  const one = document.createElement(tag);
  if (text !== undefined && text !== null) one.textContent = text;
  if (name) one.className = name;
  return one;
}
function shape(tag, attributes, text) {
  const one = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== undefined) one.setAttribute(name, value);
  if (text !== undefined) one.textContent = text;
  return one;
}
function look(place) {   // the colours begin again one dash later: a tenth series is not like the first
  const index = place % LOOKS.length, [dash, marker, hatch] = LOOKS[(index + Math.floor(place / LOOKS.length)) % LOOKS.length];
  return {colour: `var(--c${index})`, dash, marker, hatch};
}
const lookOf = each => each.shape === "guide" ? {colour: "var(--guide)", dash: "4 4", marker: "", hatch: ""} : look(each.look);
function clock(seconds) {
  const s = Math.round(seconds), h = Math.floor(s / 3600), two = n => String(n).padStart(2, "0");
  return h ? `${h}:${two(Math.floor(s / 60) % 60)}:${two(s % 60)}` : `${Math.floor(s / 60)}:${two(s % 60)}`;
}
function number(value, axis, exact = false) {
  if (axis.format === "percent") return `${Number((value * 100).toFixed(exact ? 2 : 1))}%`;
  if (axis.format === "clock") return clock(value);
  if (exact) return Number(value.toPrecision(5)).toLocaleString("en", {maximumSignificantDigits: 5});
  if (value && Math.abs(value) < 0.001) return value.toExponential(0);
  if (Math.abs(value) >= 1e7) return Number(value.toPrecision(3)).toExponential().replace("e+", "e");
  return Number(value.toPrecision(6)).toLocaleString("en", {maximumFractionDigits: Math.abs(value) < 1000 ? 10 : 0});
}
const short = (words, most = 44) => words.length <= most ? words : `${words.slice(0, Math.max(1, most - 1))}…`;

function evenTicks(low, high, count, axis) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = axis.format === "clock" && SECONDS.find(n => n >= rough) || [1, 2, 2.5, 5, 10].find(n => n * power >= rough * 0.999) * power;
  const found = [];
  for (let at = Math.floor(low / step + 1e-9); at <= Math.ceil(high / step - 1e-9); at++) found.push(Number((at * step).toPrecision(12)));
  return found;
}
function powerTicks(low, high) {
  const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high)), found = [];
  for (let power = first; power <= last; power++) for (const n of last - first > 3 ? [1] : [1, 2, 5]) found.push(n * 10 ** power);
  const from = found.findLastIndex(t => t <= low), to = found.findIndex(t => t >= high);
  return found.slice(Math.max(0, from), to < 0 ? undefined : to + 1);
}
// From values to pixels; `wide` ends at whole ticks, `range` is what was zoomed into.
function scale(axis, values, start, end, count, wide, range) {
  const log = axis.kind === "log";
  values = values.filter(v => Number.isFinite(v) && (!log || v > 0));
  if (!values.length) values = log ? [1] : [0, 1];
  let low = axis.minimum ?? Math.min(...values), high = axis.maximum ?? Math.max(...values), ticks = axis.ticks ?? [];
  if (high <= low) high = low + (log ? low : Math.abs(low) * 0.1 || 1);
  if (range) [low, high] = range;
  if (ticks.length && !range) {
    const room = (Math.max(...ticks) - Math.min(...ticks)) * 0.05 || 0.5;
    [low, high] = log ? [low / 1.1, high * 1.1] : [Math.min(low, ...ticks) - room, Math.max(high, ...ticks) + room];
  } else if (!ticks.length) {
    ticks = log ? powerTicks(low, high) : evenTicks(low, high, count, axis);
    if (wide && !range) { low = ticks[0]; high = ticks.at(-1); }
  }
  const flat = v => log ? Math.log10(Math.max(v, 1e-300)) : v, a = flat(low), b = flat(high);
  const to = v => start + (flat(v) - a) / (b - a) * (end - start);
  to.back = pixel => { const v = a + (pixel - start) / (end - start) * (b - a); return log ? 10 ** v : v; };
  const slack = (high - low) * 1e-9;
  to.ticks = ticks.filter(t => t >= low - slack && t <= high + slack);
  to.base = log ? low : Math.max(0, low);
  return to;
}
function marker(kind, x, y, colour, name) {
  const r = 3.8;
  if (kind === "circle" || !kind) return shape("circle", {cx: x.toFixed(1), cy: y.toFixed(1), r: 3.5, fill: colour, class: name});
  if (kind === "x" || kind === "cross") {
    const d = kind === "x" ? r * 0.8 : r, path = kind === "x" ? `M${x - d},${y - d}l${2 * d},${2 * d}m0,${-2 * d}l${-2 * d},${2 * d}` : `M${x - d},${y}h${2 * d}m${-d},${-d}v${2 * d}`;
    return shape("path", {d: path, stroke: colour, "stroke-width": 2, fill: "none", class: name});
  }
  const points = CORNERS[kind].map(a => `${(x + r * 1.15 * Math.cos(a * Math.PI / 180)).toFixed(1)},${(y - r * 1.15 * Math.sin(a * Math.PI / 180)).toFixed(1)}`);
  return shape("polygon", {points: points.join(" "), fill: colour, class: name});
}
function hatches() {
  const defs = shape("defs", {});
  for (const [name, d] of Object.entries(HATCHES)) {
    const pattern = shape("pattern", {id: `hatch-${name.charCodeAt(0)}`, width: 6, height: 6, patternUnits: "userSpaceOnUse"});
    pattern.append(shape("path", {d, stroke: "var(--card)", "stroke-width": 1, "stroke-opacity": 0.6, fill: "none"}));
    defs.append(pattern);
  }
  return defs;
}
function block(svg, box, seen, tip) {
  const [x, y, width, height] = box, at = {x: x.toFixed(1), y: y.toFixed(1), width: Math.max(0, width).toFixed(1), height: height.toFixed(1)};
  const rect = shape("rect", {...at, fill: seen.colour, class: "block", stroke: width > 3 ? "var(--card)" : undefined, "stroke-width": 0.5});
  rect.tip = tip;
  svg.append(rect);
  if (seen.hatch && width > 4) svg.append(shape("rect", {...at, fill: `url(#hatch-${seen.hatch.charCodeAt(0)})`, "pointer-events": "none"}));
}
function legend(data, state, redraw) {
  const box = made("div", null, "key");
  if (data.series.length > 1) data.series.forEach((each, at) => {
    const one = made("button"), seen = lookOf(each), svg = shape("svg", {width: 24, height: 12, "aria-hidden": "true"});
    if (each.shape === "bar") block(svg, [2, 0, 18, 12], seen);
    else {
      if (each.shape !== "points") svg.append(shape("line", {x1: 0, x2: 24, y1: 6, y2: 6, stroke: seen.colour, "stroke-width": 2, "stroke-dasharray": seen.dash}));
      if (each.shape !== "guide") svg.append(marker(seen.marker, 12, 6, seen.colour));
    }
    one.type = "button"; one.title = "Hide or show";
    one.setAttribute("aria-pressed", !state.hidden.has(each.name));
    one.append(svg, short(each.name));
    one.addEventListener("click", () => { state.hidden[state.hidden.has(each.name) ? "delete" : "add"](each.name); redraw(); });
    box.append(one);
  });
  return box;
}

// Everything about one figure that the drawing of its parts needs.
function layout(data, state, width) {
  const lying = Boolean(data.horizontal), series = data.series.filter(each => !state.hidden.has(each.name));
  const bars = series.filter(each => each.shape === "bar"), lines = series.filter(each => each.shape !== "bar");
  const isCategory = data.x.kind === "category";
  const categories = data.order ?? (isCategory ? [...new Set(data.series.flatMap(each => each.x.map(String)))] : []);
  const places = bars.flatMap(each => each.x), based = bars.some(each => each.base);
  const lanes = data.stacked || based || new Set(places).size === places.length ? 1 : bars.length;
  const place = v => isCategory ? categories.indexOf(String(v)) : v;
  // What the axis of values must hold: sums of stacks, ends of blocks and whiskers.
  const tops = new Map(), values = bars.length && data.y.kind !== "log" ? [0] : [];
  const seen = v => !state.range || lying || isCategory || (v >= state.range[0] && v <= state.range[1]);
  for (const each of series) each.x.forEach((x, at) => {
    const y = each.y[at];
    if (y === null || !seen(x)) return;
    if (data.stacked && each.shape === "bar") tops.set(x, (tops.get(x) ?? 0) + y);
    else values.push(y + (each.base?.[at] ?? 0));
    for (const end of [each.low?.[at], each.high?.[at]]) if (end !== null && end !== undefined) values.push(end);
  });
  values.push(...tops.values());
  const letters = Math.max(4, ...categories.map(c => c.length)), most = Math.max(8, Math.min(44, Math.floor(width * 0.36 / 6.7)));
  const left = lying ? Math.min(letters, most) * 6.7 + 16 : 52, right = width - 18, top = lying || !data.y.title ? 8 : 24;
  const slot = (right - left) / Math.max(1, categories.length), turned = !lying && isCategory && letters * 6.7 > slot;
  const inner = lying ? Math.max(1, categories.length) * ROW * (lanes > 1 ? 0.5 + lanes * 0.4 : 1) : 190, bottom = top + inner;
  const foot = (turned ? Math.min(130, Math.min(letters, 30) * 4) : 20) + ((lying ? data.y.title : data.x.title) ? 20 : 4);
  const across = Math.max(3, Math.min(7, Math.floor((right - left) / 85)));
  const value = lying ? scale(data.y, values, left, right, across, true, state.range) : scale(data.y, values, bottom, top, 4, true);
  const where = isCategory ? v => (lying ? top : left) + (v + 0.5) * (lying ? inner : right - left) / Math.max(1, categories.length)
    : scale(data.x, series.flatMap(each => each.x), left, right, across, false, state.range);
  const unit = isCategory ? (lying ? inner : right - left) / Math.max(1, categories.length) : (right - left) / Math.max(4, new Set(places).size * 1.5);
  return {data, state, lying, series, bars, lines, categories, lanes, place, left, right, top, bottom, inner, foot, value, where, unit, most, turned, isCategory, width,
    point: (x, y) => lying ? [value(y), where(place(x))] : [where(place(x)), value(y)],
    sideways: lying ? value : isCategory ? null : where};
}
function axes(svg, l) {
  const grid = at => l.lying ? {x1: at, x2: at, y1: l.top, y2: l.bottom} : {x1: l.left, x2: l.right, y1: at, y2: at};
  const words = (x, y, anchor, text, more = {}) => svg.append(shape("text", {x: x.toFixed(1), y: y.toFixed(1), "text-anchor": anchor, ...more}, text));
  for (const tick of l.value.ticks) {
    const at = l.value(tick), text = number(tick, l.data.y);
    svg.append(shape("line", {...grid(at.toFixed(1)), stroke: "var(--grid)"}));
    if (l.lying) words(at, l.bottom + 15, "middle", text); else words(l.left - 7, at + 4, "end", text);
  }
  l.categories.forEach((name, index) => {
    const at = l.where(index), ink = {class: "ink"};
    if (l.lying) words(l.left - 8, at + 4, "end", short(name, l.most), ink);
    else if (l.turned) words(at + 4, l.bottom + 13, "end", short(name, 30), {...ink, transform: `rotate(-35 ${at + 4} ${l.bottom + 13})`});
    else words(at, l.bottom + 15, "middle", name, ink);
  });
  if (!l.isCategory) for (const tick of l.where.ticks) {
    svg.append(shape("line", {x1: l.where(tick), x2: l.where(tick), y1: l.bottom, y2: l.bottom + 4, stroke: "var(--soft)"}));
    words(l.where(tick), l.bottom + 16, "middle", number(tick, l.data.x));
  }
  svg.append(shape("line", l.lying ? {x1: l.left, x2: l.left, y1: l.top, y2: l.bottom, stroke: "var(--soft)"} : {x1: l.left, x2: l.right, y1: l.bottom, y2: l.bottom, stroke: "var(--soft)"}));
  words((l.left + l.right) / 2, l.bottom + l.foot - 2, "middle", l.lying ? l.data.y.title : l.data.x.title);
  if (!l.lying && l.data.y.title) words(4, 12, "start", l.data.y.title);
}
function whisker(svg, l, each, at, shift) {
  const low = each.low?.[at], high = each.high?.[at];
  if (low === undefined || low === null || high === undefined || high === null) return;
  const [x0, y0] = l.point(each.x[at], low), [x1, y1] = l.point(each.x[at], high), c = 3;
  const d = l.lying ? `M${x0},${y0 + shift}H${x1}m0,${-c}v${2 * c}M${x0},${y0 + shift - c}v${2 * c}` : `M${x0 + shift},${y0}V${y1}m${-c},0h${2 * c}M${x0 + shift - c},${y0}h${2 * c}`;
  svg.append(shape("path", {d, stroke: "var(--ink)", "stroke-width": 1.25, fill: "none"}));
}
function drawBars(svg, l) {
  const thick = 0.74 * l.unit / l.lanes, stacks = new Map(), base = l.value.base;
  l.bars.forEach((each, lane) => {
    const seen = lookOf(each), shift = l.lanes > 1 ? (lane - (l.lanes - 1) / 2) * thick : 0;
    each.x.forEach((x, at) => {
      const y = each.y[at];
      if (y === null) return;
      let from = each.base?.[at] ?? base, to = each.base ? from + y : y;
      if (l.data.stacked) { from = stacks.get(x) ?? 0; to = from + y; stacks.set(x, to); }
      const a = l.value(from), b = l.value(to), middle = l.where(l.place(x)) + shift;
      const long = Math.max(Math.abs(b - a), each.base && y > 0 ? 1 : 0);
      const amount = each.base ? `${number(y, l.data.y, true)} from ${number(from, l.data.y, true)} (${l.data.y.title.split(" ")[0]})` : `${number(y, l.data.y, true)}`;
      const tip = [String(x), `${each.name}: ${amount}`, each.labels?.[at] ?? ""];
      block(svg, l.lying ? [Math.min(a, b), middle - thick / 2, long, thick] : [middle - thick / 2, Math.min(a, b), thick, long], seen, tip);
      whisker(svg, l, each, at, shift);
    });
  });
}
function drawLines(svg, l) {
  const alone = l.data.series.length === 1;   // one line needs no dash to be told apart
  for (const each of l.lines) {
    const seen = {...lookOf(each), ...(alone ? {dash: undefined} : {})}, pieces = [[]];
    each.x.forEach((x, at) => { if (each.y[at] === null) pieces.push([]); else pieces.at(-1).push(l.point(x, each.y[at])); });
    for (const piece of pieces) {
      if (each.shape !== "points" && piece.length > 1)
        svg.append(shape("polyline", {points: piece.map(p => p.map(v => v.toFixed(1)).join(",")).join(" "), fill: "none", stroke: seen.colour, "stroke-width": each.shape === "guide" ? 1.5 : 2, "stroke-linejoin": "round", "stroke-dasharray": seen.dash}));
      if (each.shape === "guide") continue;
      const every = piece.length > MANY && each.shape !== "points" ? (alone ? piece.length : Math.ceil(piece.length / 12)) : 1;
      piece.forEach((p, at) => { if ((piece.length - 1 - at) % every === 0) svg.append(marker(seen.marker, ...p, seen.colour, "mark")); });
    }
    each.x.forEach((x, at) => { if (each.y[at] !== null) whisker(svg, l, each, at, 0); });
  }
}

// --- looking closer: numbers under the pointer, zooming by dragging, saving ---------------
const tip = made("div", null, "tip");
tip.hidden = true;
let last = null;   // what the pointer was over, so that a figure drawn anew says its new numbers
function say(event, rows) {
  tip.replaceChildren(...rows.filter(Boolean).map((text, at) => made(at ? "div" : "b", text)));
  tip.hidden = !rows.length;
  if (tip.hidden) return;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - box.width - 6))}px`;
  tip.style.top = `${event.clientY + 18 + box.height > innerHeight ? event.clientY - box.height - 10 : event.clientY + 18}px`;
}
function nearest(l, x, y) {
  const found = [];
  let best = null;
  for (const each of l.lines) each.x.forEach((at, index) => {
    if (each.y[index] === null) return;
    const [px, py] = l.point(at, each.y[index]), far = l.lying ? Math.hypot(px - x, py - y) : Math.abs(px - x);
    if (px >= l.left - 1 && px <= l.right + 1 && (!best || far < best.far)) best = {far, at, px};
  });
  if (!best || (l.lying && best.far > 12)) return null;
  for (const each of l.lines) {
    let near = -1;
    each.x.forEach((at, index) => { if (each.y[index] !== null && (near < 0 || Math.abs(l.point(at, 0)[0] - best.px) < Math.abs(l.point(each.x[near], 0)[0] - best.px))) near = index; });
    if (l.lying) near = each.x.findIndex((at, index) => l.point(at, each.y[index])[0] === best.px);
    if (near >= 0) found.push(`${each.name}: ${number(each.y[near], l.data.y, true)}${each.labels?.[near] ? `, ${each.labels[near]}` : ""}`);
  }
  return {px: best.px, rows: [l.isCategory ? String(best.at) : `${l.data.x.title} ${number(best.at, l.data.x, true)}`, ...found]};
}
function pointing(svg, l, key, redraw) {
  const cursor = shape("line", {y1: l.top, y2: l.bottom, stroke: "var(--soft)", "stroke-dasharray": "2 3", visibility: "hidden"});
  const chosen = shape("rect", {y: l.top, height: l.bottom - l.top, fill: "var(--accent)", opacity: 0.15, visibility: "hidden", "pointer-events": "none"});
  svg.append(cursor, chosen);
  let from = null;
  const spot = event => { const box = svg.getBoundingClientRect(), k = l.width / box.width; return [(event.clientX - box.left) * k, (event.clientY - box.top) * k]; };
  const inside = x => Math.max(l.left, Math.min(l.right, x));
  const over = event => {
    last = {key, clientX: event.clientX, clientY: event.clientY};
    const [x, y] = spot(event);
    if (from !== null) {
      chosen.setAttribute("x", Math.min(from, inside(x))); chosen.setAttribute("width", Math.abs(inside(x) - from));
      chosen.setAttribute("visibility", "visible");
    }
    const near = !event.target?.tip && l.lines.length ? nearest(l, x, y) : null;
    cursor.setAttribute("visibility", near && !l.lying ? "visible" : "hidden");
    if (near) { cursor.setAttribute("x1", near.px); cursor.setAttribute("x2", near.px); }
    say(event, event.target?.tip ?? near?.rows ?? []);
  };
  svg.addEventListener("pointermove", over);
  svg.addEventListener("pointerleave", () => { last = null; say({}, []); cursor.setAttribute("visibility", "hidden"); });
  if (l.sideways) {
    svg.addEventListener("pointerdown", event => { if (event.button) return; from = inside(spot(event)[0]); svg.setPointerCapture(event.pointerId); event.preventDefault(); });
    svg.addEventListener("pointerup", event => {
      const [a, b] = [from, inside(spot(event)[0])].sort((p, q) => p - q);
      if (from !== null && b - a > 8) { l.state.range = [l.sideways.back(a), l.sideways.back(b)]; from = null; redraw(); return; }
      from = null; chosen.setAttribute("visibility", "hidden");
    });
    svg.addEventListener("pointercancel", () => { from = null; chosen.setAttribute("visibility", "hidden"); });
    svg.addEventListener("dblclick", () => { if (l.state.range) { l.state.range = null; redraw(); } });
  }
  if (last?.key === key && !tip.hidden) requestAnimationFrame(() => {
    if (last?.key === key) over({...last, target: document.elementFromPoint(last.clientX, last.clientY)});
  });
}
function save(svg, l) {   // a file of its own: with title and legend, colours and patterns as they are on the page now
  const copy = svg.cloneNode(true), root = getComputedStyle(document.documentElement);
  const words = (x, y, text, more) => copy.append(shape("text", {x, y, class: "ink", ...more}, text));
  let x = 4, y = -8;
  for (const each of l.data.series.length > 1 ? l.series : []) {
    const seen = lookOf(each), wide = 50 + 6.9 * short(each.name).length;
    if (x > 4 && x + wide > l.width) { x = 4; y -= 18; }
    if (each.shape === "bar") block(copy, [x, y - 10, 18, 12], seen);
    else copy.append(shape("line", {x1: x, x2: x + 24, y1: y - 4, y2: y - 4, stroke: seen.colour, "stroke-width": 2, "stroke-dasharray": seen.dash}));
    if (each.shape === "line" || each.shape === "points") copy.append(marker(seen.marker, x + 12, y - 4, seen.colour));
    words(x + 30, y, short(each.name));
    x += wide;
  }
  words(4, y - 22, l.data.title, {"font-weight": 600, style: "font-size:15px"});
  const [, , wide, high] = svg.getAttribute("viewBox").split(" ").map(Number), top = y - 42;
  copy.setAttribute("viewBox", `0 ${top} ${wide} ${high - top}`);
  copy.append(hatches(), shape("style", {}, `text{font:12px ${root.getPropertyValue("--font")};fill:var(--soft)} .ink{fill:var(--ink)}`));
  copy.setAttribute("style", `background:${root.getPropertyValue("--card")}`);
  const text = new XMLSerializer().serializeToString(copy).replace(/var\((--\w+)\)/g, (_, name) => root.getPropertyValue(name).trim());
  const link = made("a");
  link.href = URL.createObjectURL(new Blob([text], {type: "image/svg+xml"}));
  link.download = `${l.data.key}.svg`;
  link.click();
  URL.revokeObjectURL(link.href);
}
const states = new Map();
// One figure, drawn for a width; it draws itself anew where it stands when it is zoomed.
function figure(data, key, width) {
  const state = states.get(key) ?? states.set(key, {hidden: new Set(), range: null}).get(key), box = made("figure");
  box.id = `figure-${key}`;
  if (data.horizontal) box.className = "wide";
  const redraw = () => box.replaceWith(figure(data, key, width));
  const l = layout(data, state, width), height = l.bottom + l.foot + 4, tools = made("div", null, "tools");
  const tool = (text, title, act) => { const one = made("button", text); one.type = "button"; one.title = title; one.addEventListener("click", act); tools.append(one); };
  const newest = data.series.map(each => `${each.name} ${each.shape === "bar" || !each.y.length || each.y.at(-1) === null ? "" : number(each.y.at(-1), data.y, true)}`);
  const svg = shape("svg", {viewBox: `0 0 ${width.toFixed(1)} ${height.toFixed(1)}`, role: "img", "aria-label": `${data.title}: ${newest.slice(0, 8).join(", ")}`});
  const clip = shape("clipPath", {id: `clip-${key}`}), marks = shape("g", state.range ? {"clip-path": `url(#clip-${key})`} : {});
  clip.append(shape("rect", {x: l.left, y: 0, width: l.right - l.left, height}));
  svg.append(clip);
  svg.append(shape("rect", {x: l.left, y: l.top, width: Math.max(0, l.right - l.left), height: l.inner, fill: "transparent"}));
  axes(svg, l); drawBars(marks, l); drawLines(marks, l);
  svg.append(marks);
  pointing(svg, l, key, redraw);
  if (state.range) tool("whole", "Show all of it again (double click)", () => { state.range = null; redraw(); });
  tool("SVG", "Save this figure as SVG", () => save(svg, l));
  box.append(made("h3", data.title), tools, legend(data, state, redraw), svg);
  if (data.caption) box.append(made("figcaption", data.caption));
  return box;
}
