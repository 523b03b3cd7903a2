"use strict";
const $ = id => document.getElementById(id);
const runs = new Map();   // key -> {parts, box, drawn}
// Nine colours that can be told apart; a tenth is a paler first.
const colour = place => place < 9 ? `var(--c${place})` : `color-mix(in srgb, var(--c${place % 9}) 40%, var(--card))`;
const PADDING = 38, GAP = 22, NARROW = 380;   // of a section, between charts, and what a chart needs
// Drawings are as wide as the place they get, so that their letters keep their size on a phone.
function room(run, parts = 1) {
  const all = Math.max(280, run.box.clientWidth - (innerWidth <= 600 ? 26 : PADDING));
  const columns = Math.max(1, Math.min(parts, Math.floor((all + GAP) / (NARROW + GAP))));
  return (all - (columns - 1) * GAP) / columns;
}

function made(tag, text, name) {
  const one = document.createElement(tag);
  if (text !== undefined && text !== null) one.textContent = text;
  if (name) one.className = name;
  return one;
}
function shape(tag, attributes, text) {
  const one = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) one.setAttribute(name, value);
  if (text !== undefined) one.textContent = text;
  return one;
}
const short = value => value === null || value === undefined ? "–"
  : value >= 1000 ? Math.round(value).toLocaleString("en") : value >= 100 ? value.toFixed(0)
  : value >= 10 ? value.toFixed(1) : Number(value.toPrecision(3)).toString();
function clock(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const s = Math.round(seconds), h = Math.floor(s / 3600), m = Math.floor(s / 60) % 60;
  const two = n => String(n).padStart(2, "0");
  return h ? `${h}:${two(m)}:${two(s % 60)}` : `${m}:${two(s % 60)}`;
}
const percent = part => part === null || part === undefined ? "–" : `${(100 * part).toFixed(part < 0.1 ? 1 : 0)}%`;

function ticks(low, high, count, steps = [1, 2, 5, 10]) {
  const rough = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = steps.map(n => n * power).find(n => n >= rough);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step / 1e6; at += step) found.push(Number(at.toPrecision(6)));
  return found;
}
// One chart: lines over seconds or epochs, from zero or from the lowest value.
function chart(run, title, across, lines, options = {}) {
  const width = room(run, 2), height = 190, left = 46, bottom = 166, top = 8, right = width - 10;
  const box = made("figure");
  box.append(made("h3", title));
  lines = lines.filter(line => line.points.length);
  if (!lines.length) { box.append(made("p", "nothing yet", "subtitle")); return box; }
  if (lines.length > 1) box.append(legend(lines.map(line => [line.name, colour(line.look)])));
  const all = lines.flatMap(line => line.points), xs = all.map(p => p[0]), ys = all.map(p => p[1]);
  let x0 = options.x0 ?? Math.min(...xs), x1 = Math.max(...xs), y0 = options.zero ? 0 : Math.min(...ys), y1 = Math.max(...ys);
  if (x1 <= x0) x1 = x0 + 1;
  if (y1 <= y0) y1 = y0 + (Math.abs(y0) || 1) * 0.1;
  const x = v => left + (v - x0) / (x1 - x0) * (right - left), y = v => bottom - (v - y0) / (y1 - y0) * (bottom - top);
  const svg = shape("svg", {viewBox: `0 0 ${width} ${height + 12}`, role: "img", "aria-label": `${title}: newest ${lines.map(l => `${l.name} ${short(l.points.at(-1)[1])}`).join(", ")}`});
  for (const at of ticks(y0, y1, 4, [1, 2, 2.5, 5, 10])) {
    svg.append(shape("line", {x1: left, x2: right, y1: y(at), y2: y(at), stroke: "var(--grid)"}));
    svg.append(shape("text", {x: left - 6, y: y(at) + 4, "text-anchor": "end"}, options.percent ? percent(at) : short(at)));
  }
  for (const at of ticks(x0, x1, 5)) {
    if (options.whole && at % 1) continue;
    svg.append(shape("text", {x: x(at), y: bottom + 15, "text-anchor": "middle"}, options.whole ? at : clock(at)));
  }
  svg.append(shape("text", {x: (left + right) / 2, y: height + 9, "text-anchor": "middle"}, across));
  for (const line of lines) {
    const points = line.points.map(p => `${x(p[0]).toFixed(1)},${y(p[1]).toFixed(1)}`);
    svg.append(shape("polyline", {points: points.join(" "), fill: "none", stroke: colour(line.look), "stroke-width": 2, "stroke-linejoin": "round", ...(line.dash ? {"stroke-dasharray": line.dash} : {})}));
    const [cx, cy] = points.at(-1).split(",");
    const dot = shape("circle", {cx, cy, r: 3.5, fill: colour(line.look)});
    dot.append(shape("title", {}, `${line.name}: ${line.points.at(-1)[1]}`));
    svg.append(dot);
  }
  box.append(svg);
  return box;
}
function legend(entries) {
  const box = made("div", null, "key");
  for (const [name, fill] of entries) {
    const one = made("span"), mark = made("i");
    mark.style.background = fill;
    one.append(mark, name);
    box.append(one);
  }
  return box;
}
// Rows of blocks over seconds: legs of hosts.
function band(run, rows, end, mark = clock) {
  const width = room(run), right = width - 18, row = 26;
  const left = Math.min(120, 20 + 7 * Math.max(...rows.map(r => r.name.length)));
  const height = rows.length * row + 24;
  const svg = shape("svg", {viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "legs over time"});
  const x = v => left + Math.max(0, Math.min(v, end)) / (end || 1) * (right - left);
  rows.forEach((each, place) => {
    const top = place * row + 3;
    svg.append(shape("text", {x: left - 8, y: top + 14, "text-anchor": "end"}, each.name));
    svg.append(shape("line", {x1: left, x2: right, y1: top + 20, y2: top + 20, stroke: "var(--grid)"}));
    for (const block of each.blocks) {
      const rect = shape("rect", {class: "leg", x: x(block.from), y: top, height: 20, width: Math.max(1.5, x(block.to) - x(block.from)), fill: block.fill, rx: 2, opacity: block.open ? 0.55 : 1});
      rect.append(shape("title", {}, block.title));
      svg.append(rect);
    }
    if (each.gone !== null && each.gone !== undefined)
      svg.append(shape("text", {class: "gone-mark", x: x(each.gone) + 4, y: top + 14, fill: "var(--warn)"}, "✕ gone"));
  });
  for (const at of ticks(0, end, width > 600 ? 7 : 4)) svg.append(shape("text", {x: x(at), y: height - 6, "text-anchor": "middle"}, mark(at)));
  const box = made("div", null, "band");
  box.append(svg);
  return box;
}
function table(columns, rows, caption) {
  const box = made("div", null, "table"), one = made("table"), head = made("tr");
  if (caption) one.append(made("caption", caption));
  for (const [name, kind] of columns) { const th = made("th", name, kind); th.scope = "col"; head.append(th); }
  one.append(made("thead")); one.tHead.append(head);
  const body = made("tbody");
  for (const row of rows) {
    const line = made("tr", null, row.name);
    row.cells.forEach((cell, at) => line.append(made("td", cell, columns[at][1])));
    body.append(line);
  }
  one.append(body); box.append(one);
  return box;
}
function fill(box, ...children) { box.replaceChildren(...children); }

function place(key) {
  let run = runs.get(key);
  if (run) return run;
  const box = made("div", null, "run");
  run = {parts: {}, box};
  for (const name of ["head", "progress", "controls", "curves", "legs", "hosts", "ledger", "notes"]) {
    run[name] = made(name === "head" || name === "progress" ? "div" : "section", null, name);
    run[name].hidden = name !== "head";
    box.append(run[name]);
  }
  runs.set(key, run);
  const next = [...runs.keys()].filter(k => k > key).sort((a, b) => a - b)[0];
  $("runs").insertBefore(box, next === undefined ? null : runs.get(next).box);
  document.body.classList.toggle("several", runs.size > 1);
  controls(key, run);
  return run;
}
const draw = {
  head(run, head) {
    const name = made("h2", head.name);
    name.append(made("span", head.state, `badge ${head.state}`));
    fill(run.head, name, made("p", `${head.model} on ${head.data}, batch ${head.batch}`, "subtitle"));
    run.box.dataset.state = head.state;
    const takes = new Set(head.takes);
    run.controls.hidden = !takes.size;
    for (const button of run.controls.querySelectorAll("[data-wish]")) button.hidden = !takes.has(button.dataset.wish);
    if (document.activeElement !== run.epochs && !run.epochs.dataset.touched) run.epochs.value = head.epochs;
    if (document.activeElement !== run.accuracy && !run.accuracy.dataset.touched) run.accuracy.value = head.until.accuracy ?? "";
    run.saved.textContent = head.checkpoint === null ? "no checkpoint yet" : `newest checkpoint: update ${head.checkpoint}`;
    document.title = [...runs.values()].map(r => r.parts.head?.name).join(", ");
  },
  progress(run, p) {
    run.progress.hidden = false;
    const bar = made("div", null, "meter"), full = made("i");
    full.style.width = `${p.updates ? 100 * p.update / p.updates : 0}%`;
    bar.append(full);
    bar.setAttribute("role", "progressbar");
    bar.setAttribute("aria-valuenow", p.update); bar.setAttribute("aria-valuemax", p.updates ?? 0);
    bar.setAttribute("aria-label", "updates");
    const tiles = made("div", null, "tiles"), unit = run.parts.head?.unit ?? "images";
    const epochs = run.parts.head?.epochs;
    for (const [value, what] of [
      [`${p.update.toLocaleString("en")}${p.updates ? ` / ${p.updates.toLocaleString("en")}` : ""}`, "updates"],
      [`${Math.min(p.epoch + 1, epochs ?? p.epoch + 1)} / ${epochs ?? "?"}`, "epoch"],
      [short(p.speed), `${unit}/s${p.predicted_speed ? `, ${short(p.predicted_speed)} predicted` : ""}`],
      [p.loss === null ? "–" : p.loss.toPrecision(3), "loss"],
      [clock(p.seconds), "so far"],
      [clock(p.left), `left${p.predicted_seconds ? `; ${clock(p.predicted_seconds)} predicted for all updates` : ""}`],
    ]) { const tile = made("div", null, "tile"); tile.append(made("b", value), made("span", what)); tiles.append(tile); }
    fill(run.progress, bar, tiles);
  },
  curves(run, c) {
    run.curves.hidden = false;
    const box = made("div", null, "charts");
    box.append(
      chart(run, "Loss of the newest update", "minutes and seconds", [{name: "loss", points: c.loss, look: 0}], {x0: 0, zero: true}),
      chart(run, "Speed", "minutes and seconds", [{name: "samples/s", points: c.speed, look: 2}], {x0: 0, zero: true}));
    if (c.train_loss.length) box.append(
      chart(run, "Loss by epoch", "epoch", [{name: "training", points: c.train_loss, look: 0}, {name: "test", points: c.test_loss, look: 1, dash: "7 4"}], {whole: true, zero: true}));
    if (c.test_accuracy.length) box.append(
      chart(run, "Accuracy by epoch", "epoch", [{name: "training", points: c.train_accuracy, look: 0}, {name: "test", points: c.test_accuracy, look: 1, dash: "7 4"}], {whole: true, percent: true}));
    fill(run.curves, box);
  },
  legs(run, legs) {
    const names = [...new Set(legs.made.map(leg => leg.name))], hosts = run.parts.hosts ?? [];
    const fixed = !legs.made.length && !legs.now;   // one plan from the start: who was there when
    run.legs.hidden = fixed && hosts.length < 2;
    if (run.legs.hidden) return;
    const now = Math.max(run.parts.progress?.seconds ?? 0, ...legs.made.map(leg => leg.from + leg.seconds));
    const rows = new Map();
    const row = host => rows.get(host) ?? rows.set(host, {name: host, blocks: []}).get(host);
    const one = hosts.length < 2;
    for (const host of hosts) row(one ? "training" : host.name);
    for (const leg of legs.made) for (const host of one ? ["training"] : leg.hosts)
      row(host).blocks.push({from: leg.from, to: leg.from + leg.seconds, fill: colour(names.indexOf(leg.name)),
        title: `${leg.name}: ${leg.updates} updates, ${leg.role}${leg.why ? `, ${leg.why}` : ""}${leg.ended ? `; ended: ${leg.ended}` : ""}`});
    if (fixed) for (const host of hosts) row(host.name).blocks.push({from: host.from, to: host.state === "there" ? now : host.to, fill: colour(0), title: `${host.name} trained`});
    const entries = names.map((name, at) => [name, colour(at)]);
    if (legs.now) {
      const name = legs.now.text.replace(/^\w+ with /, ""), known = names.findIndex(n => name === n || name.startsWith(`${n}:`));
      const from = Math.max(legs.now.from, ...legs.made.map(leg => leg.from + leg.seconds));
      const there = hosts.filter(h => h.state === "there").map(h => h.name), words = name.split(":")[0].split(/[\s,]+/);
      const named = there.filter(host => words.includes(host));
      for (const host of one ? ["training"] : named.length ? named : there)
        row(host).blocks.push({from, to: now, open: true, fill: known < 0 ? "var(--soft)" : colour(known), title: `under way: ${legs.now.text}`});
    }
    for (const host of hosts) if (host.state === "gone") {
      const each = row(one ? "training" : host.name);
      each.gone = host.to;
      each.blocks = each.blocks.filter(b => b.from < host.to).map(b => ({...b, to: Math.min(b.to, host.to)}));
    }
    const box = [made("h3", fixed ? "Who was there when" : "Legs: which way trained when"), legend(entries), band(run, [...rows.values()], now)];
    if (legs.now) box.push(made("p", `Now: ${legs.now.text}`, "subtitle"));
    if (fixed) { fill(run.legs, box[0], box[2]); return; }
    const details = made("details");
    details.open = run.legs.querySelector("details")?.open ?? false;
    details.append(made("summary", "What was tried, and why it was kept"), table(
      [["way", ""], ["", ""], ["updates", "n"], ["samples/s", "n"], ["why", "long"]],
      legs.made.map(leg => ({cells: [leg.name, leg.role, leg.updates, short(leg.speed), leg.ended || leg.why]}))));
    fill(run.legs, ...box, details);
  },
  hosts(run, hosts) {
    run.hosts.hidden = !hosts.length;
    fill(run.hosts, made("h3", "Hosts"), table(
      [["host", ""], ["cores busy", "n"], ["machine busy", "n"], ["memory MB", "n"], ["MB/s out", "n"], ["MB/s in", "n"], ["waited", "n"], ["made others wait", "n"]],
      hosts.map(h => ({name: h.state, cells: [h.name, ...(h.state === "there"
        ? [h.cpu.toFixed(2), percent(h.busy), short(h.memory), h.sent.toFixed(2), h.received.toFixed(2)] : ["", "", "", "", ""]),
        percent(h.waiting), hosts.length > 1 ? percent(h.made_wait) : "–"]}))),
      chart(run, "Busy cores of each host, last minute and a half", "minutes and seconds", hosts.map((h, at) => ({name: h.name, points: h.curve, look: at, dash: ["", "7 4", "2 3", "9 3 2 3"][at % 4]})), {zero: true}));
    if (run.parts.legs) draw.legs(run, run.parts.legs);
  },
  ledger(run, ledger) {
    run.ledger.hidden = !ledger.ranks.length;
    if (run.ledger.hidden) return;
    const used = ledger.order.filter(name => ledger.ranks.some(rank => rank.parts[name]));
    const rows = ledger.ranks.map(rank => {
      let at = 0;
      return {name: rank.name, blocks: used.map(name => {
        const from = at; at += rank.parts[name] ?? 0;
        return {from: from * 100, to: at * 100, fill: colour(ledger.order.indexOf(name)), title: `${name}: ${percent(rank.parts[name] ?? 0)} of ${clock(rank.wall)}`};
      })};
    });
    const svg = band(run, rows, 100, at => `${at}%`);
    svg.firstChild.setAttribute("aria-label", "where the time went");
    fill(run.ledger, made("h3", "Where the time went so far"), legend(used.map(name => [name, colour(ledger.order.indexOf(name))])), svg,
      ...ledger.slow.map(text => made("p", text)));
  },
  notes(run, notes) {
    run.notes.hidden = !notes.length;
    if (notes.length) fill(run.notes, made("h3", "What happened on the way"),
      table([["at", "n"], ["rank", "n"], ["note", "long"]], notes.slice().reverse().map(n => ({cells: [clock(n.at), n.rank, n.text]}))));
  },
};
function controls(key, run) {
  const box = made("form", null), row = made("div", null, "controls");
  const button = (text, wish, settings) => {
    const one = made("button", text);
    one.type = "button"; one.dataset.wish = wish;
    one.addEventListener("click", () => {
      if (wish === "stop" && !confirm("Save and stop this training?")) return;
      send(key, run, wish, settings?.() ?? {});
    });
    return one;
  };
  const field = (text, attributes) => {
    const label = made("label", `${text} `), input = made("input");
    Object.assign(input, {type: "number", ...attributes});
    input.addEventListener("input", () => { input.dataset.touched = "yes"; });
    label.dataset.wish = "settings"; label.append(input);
    return [label, input];
  };
  const [epochs, e] = field("epochs", {min: 1, step: 1}), [accuracy, a] = field("stop at accuracy", {min: 0, max: 1, step: "any", placeholder: "none"});
  run.epochs = e; run.accuracy = a;
  run.saved = made("span", "", "subtitle"); run.said = made("p", "", "said"); run.said.setAttribute("role", "status");
  row.append(button("Checkpoint now", "checkpoint"), button("Save and stop", "stop"), epochs, accuracy,
    button("Change", "settings", () => {
      const found = {};
      if (Number(e.value) !== run.parts.head.epochs) found["train.epochs"] = Number(e.value);
      const wanted = a.value === "" ? null : Number(a.value);
      if (wanted !== (run.parts.head.until.accuracy ?? null)) found["train.until.accuracy"] = wanted;
      delete e.dataset.touched; delete a.dataset.touched;
      return found;
    }), run.saved, run.said);
  box.addEventListener("submit", event => event.preventDefault());
  box.append(row); run.controls.append(box);
}
function headers(more) {
  const token = sessionStorage.getItem("token");
  return token ? {...more, authorization: `Bearer ${token}`} : more;
}
async function send(key, run, wish, settings) {
  run.said.textContent = "asking …";
  try {
    const answer = await fetch(`/api/runs/${key}/${wish}`, {method: "POST", headers: headers({"content-type": "application/json"}), body: JSON.stringify(settings)});
    const data = await answer.json();
    run.said.textContent = answer.ok ? {checkpoint: "asked: it saves after the next updates", stop: "asked: it saves and stops", settings: "asked: it saves, and goes on so"}[wish] : data.error;
  } catch (error) { run.said.textContent = `not asked: ${error.message}`; }
}
function take(message) {
  const {part, data} = message, [key, name] = part.split("/"), run = place(Number(key));
  run.parts[name] = data;
  draw[name]?.(run, data);
}
addEventListener("resize", () => {
  for (const run of runs.values()) for (const [name, data] of Object.entries(run.parts)) draw[name]?.(run, data);
});
async function listen() {
  let wait = 500;
  for (;;) {
    try {
      const answer = await fetch("/api/events", {headers: headers({}), cache: "no-store"});
      $("secret").hidden = answer.status !== 401;
      if (answer.status === 401) {
        $("state").textContent = "a token is needed";
        await new Promise(done => { $("secret").querySelector("form").onsubmit = event => { event.preventDefault(); sessionStorage.setItem("token", $("token").value.trim()); done(); }; });
        continue;
      }
      if (!answer.ok) throw new Error(`answered ${answer.status}`);
      $("state").textContent = "live"; $("state").className = "";
      wait = 500;
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let text = "";
      for (;;) {
        const {value, done} = await reader.read();
        if (done) break;
        text += value;
        let end;
        while ((end = text.indexOf("\n\n")) >= 0) {
          const lines = text.slice(0, end).split("\n").filter(line => line.startsWith("data: "));
          text = text.slice(end + 2);
          if (lines.length) take(JSON.parse(lines.map(line => line.slice(6)).join("\n")));
        }
        document.documentElement.dataset.ready = "yes";
      }
    } catch (error) { /* the connection is made anew below */ }
    $("state").textContent = "the watcher is not there: trying again …"; $("state").className = "bad";
    await new Promise(done => setTimeout(done, wait));
    wait = Math.min(2 * wait, 5000);
  }
}
listen();
