"use strict";
// The page of a run while it trains, and the same page frozen: what `data` holds, or what the watcher sends.
const $ = id => document.getElementById(id);
const runs = new Map();   // key -> {parts, sections, box, ...}
const PADDING = 46;       // of a section
// Drawings are as wide as the place they get, so that their letters keep their size on a phone.
function room(run, parts) {
  const all = Math.max(260, run.box.clientWidth - (innerWidth <= 600 ? 26 : PADDING));
  const columns = Math.max(1, Math.min(parts, Math.floor((all + GAP) / (NARROW + GAP))));
  return (all - (columns - 1) * GAP) / columns;
}
const fill = (box, ...children) => box.replaceChildren(...children.filter(Boolean));

function table(run, data) {
  const box = made("div", null, "table"), one = made("table"), head = made("tr"), body = made("tbody");
  one.id = `table-${run.prefix}${data.key}`;
  if (!data.folded) one.append(made("caption", data.title));
  data.columns.forEach((name, at) => { const th = made("th", name, data.numeric[at] ? "n" : ""); th.scope = "col"; head.append(th); });
  one.append(made("thead")); one.tHead.append(head);
  data.rows.forEach((row, place) => {
    const line = made("tr", null, place === data.strong ? "strong" : "");
    row.forEach((cell, at) => line.append(made("td", cell, data.numeric[at] ? "n" : cell.length > 40 ? "long" : "")));
    body.append(line);
  });
  one.append(body); box.append(one);
  if (!data.folded) return box;
  const details = made("details");
  details.open = run.opened.has(data.key);
  details.addEventListener("toggle", () => run.opened[details.open ? "add" : "delete"](data.key));
  details.append(made("summary", data.title), box);
  return details;
}
function section(run, key, data) {
  const box = run.sections.get(key) ?? made("section");
  run.sections.set(key, box);
  box.id = run.prefix + key;
  const content = [made("h2", data.title), ...data.text.map(words => made("p", words))];
  let group = null;
  for (const {figure: drawn, table: listed} of data.blocks) {
    if (listed) { group = null; if (listed.rows.length) content.push(table(run, listed)); continue; }
    if (!group) content.push(group = made("div", null, "figures"));
    group.drawn = [...group.drawn ?? [], drawn];
  }
  for (const each of content) {
    const halves = each.drawn?.filter(f => !f.horizontal).length ?? 0;
    each.drawn?.forEach((drawn, at) => each.append(figure(drawn, run.prefix + drawn.key, room(run, drawn.horizontal || (halves % 2 && at === each.drawn.length - 1) ? 1 : 2))));
  }
  fill(box, ...content);
}
function place(key) {
  let run = runs.get(key);
  if (run) return run;
  const box = made("div", null, "run");
  run = {parts: {}, sections: new Map(), opened: new Set(), box, prefix: key ? `${key}-` : ""};
  for (const name of ["head", "controls", "body", "foot"]) { run[name] = made("div", null, name); box.append(run[name]); }
  runs.set(key, run);
  const next = [...runs.keys()].filter(k => k > key).sort((a, b) => a - b)[0];
  $("runs").insertBefore(box, next === undefined ? null : runs.get(next).box);
  document.body.classList.toggle("several", runs.size > 1);
  return run;
}
function head(run, data, key) {
  const name = made("h2", data.title), content = [name];
  if (data.state) name.append(made("span", data.state, `badge ${data.state}`));
  content.push(made("p", data.subtitle, "subtitle"));
  if (data.problems.length) { const box = made("div", null, "problems"); box.append(...data.problems.map(text => made("p", text))); content.push(box); }
  if (data.updates) {
    const bar = made("div", null, "meter"), full = made("i"), [done, all] = data.updates;
    full.style.width = `${all ? 100 * done / all : 0}%`;
    bar.append(full);
    for (const [attribute, value] of [["role", "progressbar"], ["aria-valuenow", done], ["aria-valuemax", all], ["aria-label", "updates"]]) bar.setAttribute(attribute, value);
    content.push(bar);
  }
  if (data.tiles.length) {
    const tiles = made("div", null, "tiles");
    for (const [value, what] of data.tiles) { const tile = made("div", null, "tile"); tile.append(made("b", value), made("span", what)); tiles.append(tile); }
    content.push(tiles);
  }
  fill(run.head, ...content);
  fill(run.foot, data.footer && made("footer", data.footer));
  run.box.dataset.state = data.state;
  document.title = [...runs.values()].map(r => r.parts.head?.title).join(", ");
  if (data.controls) controls(key, run, data.controls); else fill(run.controls);
}
// Sections in the order that the head gives; those that it names no more go.
function arrange(run) {
  const order = run.parts.head?.sections ?? [], known = order.filter(key => run.sections.has(key));
  for (const key of [...run.sections.keys()]) if (!order.includes(key)) { run.sections.delete(key); delete run.parts[key]; }
  const boxes = known.map(key => run.sections.get(key));
  if (boxes.length !== run.body.children.length || boxes.some((box, at) => run.body.children[at] !== box)) fill(run.body, ...boxes);
  const links = runs.size > 1 ? [] : known.map(key => { const link = made("a", run.parts[key].title); link.href = `#${run.prefix}${key}`; return link; });
  const words = links.map(link => link.textContent).join();
  if ($("links").dataset.words !== words) { fill($("links"), ...links); $("links").dataset.words = words; }
}
function take(parts) {
  const touched = new Set();
  for (const [path, data] of Object.entries(parts)) {
    const [key, name] = path.split("/"), run = place(Number(key));
    run.parts[name] = data;
    touched.add(run);
    if (name === "head") head(run, data, key); else section(run, name, data);
  }
  touched.forEach(arrange);
}
let width = innerWidth;
addEventListener("resize", () => requestAnimationFrame(() => {
  if (width === innerWidth) return;   // a phone's address bar is no new width
  width = innerWidth;
  for (const run of runs.values()) for (const key of run.sections.keys()) section(run, key, run.parts[key]);
}));

// --- what a training is asked for; only while there is one that takes it ------------------
function controls(key, run, data) {
  if (!run.form) makeControls(key, run);
  if (run.form.parentNode !== run.controls) fill(run.controls, run.form);
  const takes = new Set(data.takes);
  run.form.hidden = !takes.size;
  for (const each of run.form.querySelectorAll("[data-wish]")) each.hidden = !takes.has(each.dataset.wish);
  for (const [input, value] of [[run.epochs, data.epochs], [run.accuracy, data.accuracy ?? ""]])
    if (document.activeElement !== input && !input.dataset.touched) input.value = value;
  run.saved.textContent = data.checkpoint === null ? "no checkpoint yet" : `newest checkpoint: update ${data.checkpoint}`;
}
function makeControls(key, run) {
  const form = made("form", null, "asking");
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
  run.epochs = e; run.accuracy = a; run.form = form;
  run.saved = made("span", "", "subtitle"); run.said = made("p", "", "said"); run.said.setAttribute("role", "status");
  form.append(button("Checkpoint now", "checkpoint"), button("Save and stop", "stop"), epochs, accuracy,
    button("Change", "settings", () => {
      const found = {}, now = run.parts.head.controls, wanted = a.value === "" ? null : Number(a.value);
      if (Number(e.value) !== now.epochs) found["train.epochs"] = Number(e.value);
      if (wanted !== (now.accuracy ?? null)) found["train.until.accuracy"] = wanted;
      delete e.dataset.touched; delete a.dataset.touched;
      return found;
    }), run.saved, run.said);
  form.addEventListener("submit", event => event.preventDefault());
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
          document.documentElement.dataset.ready = "yes";
        }
      }
    } catch (error) { if (!(error instanceof TypeError || /^answered|network|JSON/.test(error.message))) console.error(error); }
    $("state").textContent = "the watcher is not there: trying again …"; $("state").className = "bad";
    await new Promise(done => setTimeout(done, wait));
    wait = Math.min(2 * wait, 5000);
  }
}
$("patterns").append(hatches());
document.body.append(tip);
if ($("data")) {
  $("state").textContent = "";
  take(JSON.parse($("data").textContent));
  document.documentElement.dataset.ready = "yes";
} else listen();
