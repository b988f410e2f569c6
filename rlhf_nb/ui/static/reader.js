// Episodes of a run, to read: the live widget, the saved file and the site draw with this one file.
import { whatIf } from "./arithmetic.js";

// ---- Numbers and nodes ----

export const shown = x => {  // two decimals; what is exact is told on hover
  if (x === null || x === undefined || Number.isNaN(x)) return "–";
  if (x === 0) return "0";
  if (!Number.isFinite(x)) return x > 0 ? "+∞" : "−∞";
  const size = Math.abs(x), whole = { maximumFractionDigits: 0 };
  const text = size < 0.005 ? "≈0" : size < 1000 ? x.toFixed(2) : size < 1e6 ? x.toLocaleString("en-US", whole) : x.toExponential(1);
  return (x > 0 && text !== "≈0" ? "+" : "") + text.replaceAll("-", "−");
};
const percent = share => share && Math.abs(share) < 0.0005 ? "≈0" : (100 * share).toFixed(share && share < 0.1 ? 1 : 0);
const plain = (x, unit) => unit === "%" ? `${percent(x)} %` : `${shown(x).replace("+", "")} ${unit}`.trim();
export const exact = x =>
  x === null || x === undefined ? "none" : String(Number.isFinite(x) ? Number(x.toPrecision(7)) : x).replaceAll("-", "−");
const exactly = (x, unit) => unit === "%" ? `${exact(100 * x)} %` : `${exact(x)} ${unit}`.trim();

const make = (tag, { parent, text, ...more } = {}) => {
  const node = Object.assign(document.createElement(tag), more);
  if (text !== undefined) node.textContent = text;
  if (parent) parent.append(node);
  return node;
};
const counted = (row, pack) => `${row.written} ${row.written === 1 ? pack.unit.slice(0, -1) : pack.unit}`;
const several = (n, what) => `${n} ${what}${n === 1 ? "" : "s"}`;
const ending = row => row.reason ? [several(row.turns, "turn"), row.reason, row.won].filter(Boolean).join(", ") : row.stopped === null ? "" : row.stopped ? "stopped by itself" : "cut off";
const whole = (pack, key, x) => key in pack.columns && Number.isInteger(x) ? `${x}` : shown(x);
const number = x => make("span", { text: shown(x), title: exact(x) });
const placeBubble = (bubble, token) => {  // below it, or above where the window ends
  bubble.hidden = false;
  const box = token.getBoundingClientRect(), base = bubble.offsetParent.getBoundingClientRect();
  const left = Math.max(0, Math.min(box.left - base.left, base.width - bubble.offsetWidth));
  const below = box.bottom + bubble.offsetHeight + 8 <= innerHeight;
  const top = below ? box.bottom + 4 : box.top - bubble.offsetHeight - 4;
  Object.assign(bubble.style, { left: `${left}px`, top: `${top - base.top}px` });
};
const spaced = (parent, ...facts) => parent.append(...facts.filter(Boolean).flatMap((fact, i) => i ? [" · ", fact].flat() : fact));

// ---- Colours: one scale for an update, so that answers can be compared and one outlier bleaches none ----

const FULL = 0.99, SAMPLE = 2 ** 14;  // full colour at this quantile; of more numbers than that, every so many
const ONE_WAY = { logprobs: -1, ref_logprobs: -1, engine_logprobs: -1, values: 1, returns: 1, entropy: 1 };  // -1: low is deep
const scaleOf = (lists, way) => {
  const all = lists.flat(), step = Math.ceil(all.length / SAMPLE) || 1;
  const some = all.filter((x, i) => i % step === 0 && Number.isFinite(x) && (way || x)), kept = Float64Array.from(some, x => way ? x : Math.abs(x)).sort();
  const at = share => kept.length ? kept[Math.min(kept.length - 1, Math.floor(share * kept.length))] : 0;
  return { way, kept, low: way ? at(1 - FULL) : -at(FULL), high: at(FULL) };
};
const scaleFor = (pack, key) => pack.scales[key] ??= scaleOf(pack.rows.map(row => row.signals[key] ?? []), ONE_WAY[key]);
const depth = (x, { way, low, high, kept, ranked }) => {  // 0: no colour, 1: full
  if (Number.isNaN(x) || x === null || !(high > low)) return 0;
  const share = ranked ? kept.findLastIndex(one => one <= (way ? x : Math.abs(x))) / kept.length : way ? (x - low) / (high - low) : Math.abs(x) / high;
  return Math.min(1, Math.max(0, way < 0 ? 1 - share : share));
};
const beyond = (x, { way, low, high, ranked }) => !ranked && high > low && (way < 0 ? x < low : way ? x > high : Math.abs(x) > high);
const tint = (x, scale, ground = "transparent") => `color-mix(in srgb, var(--${scale.way ? "deep" : x > 0 ? "up" : "down"}) ${Math.round(depth(x, scale) && 8 + 92 * depth(x, scale))}%, ${ground})`;
const MEANING = {
  kl: "log-prob of the policy minus that of the reference, nats", advantages: "how much better than expected, whitened over the update", rewards: "the score where it is paid, less the price of KL at each token",
  values: "what the value model expects still to come", returns: "the target of the value model", logprobs: "of the policy that wrote the answer, nats", ref_logprobs: "of the reference for the same token, nats",
  entropy: "of the distribution that drew the token, nats", "ratio - 1": "probability after the update over that before, minus 1",
};

// ---- An update, out of its bytes ----

const floats = (bytes, count, Kind) => {  // first bytes first, then second bytes, …
  const planes = new Uint8Array(bytes), joined = new Uint8Array(count * 4);
  for (let i = 0; i < count; i++) for (let b = 0; b < 4; b++) joined[4 * i + b] = planes[b * count + i];
  return new Kind(joined.buffer);
};
export const unpack = async bytes => {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const whole = await new Response(stream).arrayBuffer();
  const start = 4 + new DataView(whole).getUint32(0, true);
  const pack = JSON.parse(new TextDecoder().decode(new Uint8Array(whole, 4, start - 4)));
  let at = start;
  const arrays = {};
  for (const [name, count] of pack.arrays) {
    arrays[name] = floats(whole.slice(at, at += 4 * count), count, name === "widths" ? Uint32Array : Float32Array);
  }
  return opened(pack, arrays);
};

const opened = (pack, arrays) => {
  const groups = new Map();
  let token = 0;
  const rows = pack.lengths.map((length, i) => {
    const cut = name => arrays[name] && Array.from(arrays[name].subarray(token, token + length));
    const text = pack.answers[i], stored = {};
    let at = 0;
    const pieces = cut("widths").map(width => text.slice(at, at += width));
    for (const [name] of pack.arrays) if (name !== "widths") stored[name] = cut(name);
    token += length;
    const played = pack.turn_marks && { turns: pack.columns.turns[i], reason: pack.columns.stop_reason[i], written: stored.masked.filter(x => !x).length,
      won: ["lost", "won"][pack.columns["info/won"]?.[i]] };
    return {
      i, id: pack.episodes[i], marks: pack.turn_marks?.[i] ?? [], length, pieces, stored, text, prompt: pack.prompts[pack.asked[i]], written: length, ...played,
      stopped: pack.stopped?.[i] ?? null, badForm: pack.bad_form?.[i] ?? null,
      score: pack.scores?.[i] ?? null, raw: pack.raw_scores?.[i] ?? null, unpenalized: pack.unpenalized?.[i] ?? null,
    };
  });
  for (const row of rows) row.group = groups.get(row.prompt) ?? groups.set(row.prompt, rows.filter(one => one.prompt === row.prompt)).get(row.prompt);
  for (const group of groups.values()) if (group.length > 1 && group.every(row => row.score !== null)) {
    const [mean, spread] = moments(group.map(row => row.score));
    for (const row of group) Object.assign(row, { mean, spread });
  }
  return computed({ ...pack, rows, groups: [...groups.values()].filter(group => group.length > 1) });
};
// Scores that are all equal: an estimator that compares the answers of a group learns nothing from them.
const equal = group => group.length > 1 && group.every(row => row.score !== null && row.score === group[0].score);
const moments = numbers => {
  const mean = numbers.reduce((a, b) => a + b, 0) / numbers.length;
  return [mean, Math.sqrt(numbers.reduce((a, x) => a + (x - mean) ** 2, 0) / (numbers.length - 1))];
};

// Signals by the settings of the run, or by others.
const ORDER = ["ratio - 1", ..."kl advantages rewards values returns logprobs ref_logprobs engine_logprobs".split(" "), "sampler - trainer", "entropy", "clipped"];
const given = pack => pack.rows.map(row => ({
  length: row.length, stopped: row.stopped, unpenalized: row.unpenalized, earned: row.stored.earned, kl: row.stored.kl,
  logprobs: row.stored.logprobs, refLogprobs: row.stored.ref_logprobs, values: row.stored.values,
}));
const clips = (now, old, advantage, low, high) => {
  const ratio = Math.exp(now - old), near = Math.min(Math.max(ratio, 1 - low), 1 + high);
  return -advantage * near > -advantage * ratio ? Math.sign(ratio - 1) : 0;
};
export const signalsOf = (row, made, { cliprange = 0.2, cliprange_high } = {}) => {
  const all = { ...row.stored };
  if (made) Object.assign(all, { kl: made.kl, rewards: made.rewards, advantages: made.advantages, returns: made.returns });
  if (all.engine_logprobs && all.logprobs) all["sampler - trainer"] = all.engine_logprobs.map((x, t) => x - all.logprobs[t]);
  if (all.now) all["ratio - 1"] = all.now.map((x, t) => Math.expm1(x - all.logprobs[t]));
  if (all.now && all.advantages)
    all.clipped = all.now.map((x, t) => clips(x, all.logprobs[t], all.advantages[t], cliprange, cliprange_high ?? cliprange));
  return Object.fromEntries(ORDER.filter(name => all[name]).map(name => [name, all[name]]));
};
const computed = (pack, recipe = pack.recipe) => {
  const made = recipe && whatIf(given(pack), recipe);
  pack.scales = {};
  pack.rows.forEach((row, i) => {
    row.signals = signalsOf(row, made?.[i], recipe ?? pack.clip);
    const own = row.reason ? x => x.filter((_, t) => !row.stored.masked[t]) : x => x.slice(0, row.length);  // what the policy wrote
    const kl = row.signals.kl ? own(row.signals.kl).reduce((a, b) => a + b, 0) : null;
    row.kl = Number.isNaN(kl) ? null : kl;
    row.entropy = row.length && row.signals.entropy ? moments(own(row.signals.entropy))[0] : null;
  });
  return pack;
};

// ---- Tokens as parts of a text ----

// Tokens that share a character are one box: the text stands at the first of them, the others have none.
const boxesOf = pieces => pieces.reduce((boxes, text, t) => {
  const last = boxes.at(-1);
  if (!text && last && /[^\x00-\x7f]$/.test(last.text)) last.to = t + 1;
  else boxes.push({ from: t, to: t + 1, text });
  return boxes;
}, []);
const within = box => Array.from({ length: box.to - box.from }, (_, k) => box.from + k);
const named = (text, blank = !text.trim()) => (blank ? text.replaceAll(" ", "␣") : text).replaceAll("\n", "↵").replaceAll("\t", "⇥") || "∅";
const codeLines = text => {  // which lines are of code, or of a table
  let fence = false;
  return text.split("\n").map(line => {
    const mark = /^\s*(```|~~~)/.test(line), code = fence || mark || /^(\s*\|| {4}|\t)/.test(line);
    fence = fence !== mark;
    return code;
  });
};

// ---- Facts of the mini world, wherever its judge knows them ----

export const claimsOf = (row, slots) => {  // per token: covered, invented or nothing
  const truth = row.prompt.facts, marks = row.pieces.map(() => ""), told = new Set(), invented = [];
  if (!truth) return null;
  const ends = [];
  row.pieces.reduce((at, piece, t) => ends[t] = at + piece.length, 0);
  for (const word of row.text.matchAll(/[\p{L}\p{N}_]+/gu)) {
    const slot = Object.hasOwn(slots, word[0]) && slots[word[0]];
    if (!slot) continue;
    const right = truth[slot] === word[0];
    if (right) told.add(slot); else invented.push(word[0]);
    ends.forEach((end, t) => {
      const from = end - row.pieces[t].length;
      if (from < word.index + word[0].length && end > word.index) marks[t] = right ? "covered" : "invented";
    });
  }
  return { marks, told, invented, missing: Object.keys(truth).filter(slot => !told.has(slot)).map(slot => `${slot}: ${truth[slot]}`) };
};
const drawClaims = (parent, claim, badForm) => {
  const words = [["covered", `✓ covers ${claim.told.size} of ${claim.told.size + claim.missing.length} facts`]];
  if (claim.invented.length) words.push(["invented", `✗ invents ${claim.invented.join(", ")}`]);
  if (claim.missing.length) words.push(["missing", `leaves out ${claim.missing.join(", ")}`]);
  if (badForm) words.push(["invented", "✗ bad form: not a sentence pattern of the references"]);
  words.forEach(([kind, text]) => { make("mark", { parent, text, className: kind }); parent.append(" "); });
};

// Which words of one answer another one has not, by their longest common subsequence.
export const changed = (ours, theirs) => {
  const best = Array.from({ length: ours.length + 1 }, () => new Uint16Array(theirs.length + 1));
  for (let i = ours.length - 1; i >= 0; i--) for (let j = theirs.length - 1; j >= 0; j--)
    best[i][j] = ours[i] === theirs[j] ? best[i + 1][j + 1] + 1 : Math.max(best[i + 1][j], best[i][j + 1]);
  const marks = ours.map(() => true);
  for (let i = 0, j = 0; i < ours.length && j < theirs.length;) {
    if (ours[i] === theirs[j]) { marks[i++] = false; j++; }
    else if (best[i + 1][j] >= best[i][j + 1]) i++; else j++;
  }
  return marks;
};

// ---- The page ----

const WORDS = [
  ["raw score", "what the reward model or function returned"],
  ["score", "what PPO is paid at the end: the raw score, scaled and clipped where the run does so, less the penalty for a missing stop token"],
  ["KL", "KL to the reference: log-prob of the policy less that of the reference, added up over the tokens. An estimate from one sample, so it may be below 0"],
  ["answer", "what the model wrote; an episode is a prompt with its answer"],
  ["advantages", "whitened over all episodes of the update: mean 0, standard deviation 1"],
  ["■ and ✂", "stopped by itself, and cut off at the longest length; of several turns: ended by the world, and any other end"],
];
const SETTINGS = [
  ["kl_coef", 0, 0.5, 0.01], ["gamma", 0, 1, 0.01], ["lam", 0, 1, 0.01], ["missing_eos_penalty", 0, 5, 0.1],
  ["cliprange", 0, 1, 0.01],
];
const LABELS = { kl_coef: "KL coefficient", gamma: "γ (gamma)", lam: "λ (lam)", missing_eos_penalty: "missing EOS penalty", cliprange: "clip range" };
const PANELS = { table: "All signals", what: "What if", same: "Same prompt", plot: "Plot", note: "Note", keys: "Keys" };
const LETTERS = { t: "table", w: "what", g: "same", s: "plot", m: "note", "?": "keys" };
const SPECIAL = /^\s*(<[^<>\s]+>|\[[A-Z_]+\])\s*$/;  // <eos>, </s>, <|endoftext|>, [SEP]
const SIGHT = 14;  // lines of list and table that are drawn before the first picture, of the list after the chosen one
const SHOWN_BY = [  // what is said of an update: the list that shows it
  [/answers that reached their stop/, { only: "cut off" }], [/turns that reached|answers grew|length/, { sort: "tokens", down: true }], [/KL/, { sort: "KL", down: true }],
  [/entropy/, { sort: "entropy" }], [/./, { sort: "score", down: true }],
];
const UNFILTERED = { find: "", only: "all" };  // so that an episode that is gone to is in the list
const LISTING = ["sort", "down", "find", "only", "above"];
// What is in sight first, so that a key is answered at once; the others when the picture stands.
const inSight = (box, all, sight, draw, then = () => {}) => {
  const rest = [...all], lines = count => rest.splice(0, count).map(draw);
  box.replaceChildren(...lines(sight));
  const drawRest = () => { if (box.rest === rest) { box.append(...lines(rest.length)); then(); } };
  box.rest = rest;
  requestAnimationFrame(() => setTimeout(drawRest, 30));
  return drawRest;
};
// Notes on episodes: of this page, and where the browser lets it, of the next time that it is opened.
const NOTES = {};
const remembered = (shelf, notes) => {
  try {
    if (notes) localStorage.setItem(shelf, JSON.stringify(notes));
    return JSON.parse(localStorage.getItem(shelf));
  } catch { return null; }  // a browser that stores nothing for a file: the page says so
};
let made = 0;  // views on this page, so that each has ids of its own

export const reader = (root, source) => {
  const name = `reader${++made}-`;
  const jump = one => ({ update: one.update, row: one.row ?? -1, ...UNFILTERED, sort: "episode", down: false, ...one.row === null && SHOWN_BY.find(([words]) => words.test(one.sentence))[1] });
  const nameOf = key => source.names?.[key] ?? key;
  const odd = source.suspects ?? [], first = odd.find(one => one.row !== null) ?? odd[0];
  const at = {
    update: source.start ?? source.updates.length - 1, row: 0, signal: source.signal, sort: "episode", down: false,
    find: "", only: "all", above: 0, recipe: null, panel: "", seen: "after", plain: false, ranked: false, beneath: [],
    ...first && jump(first), ...source.place,
  };
  let pack = null, list = [], turn = 0, opening = source.place?.signal !== "", drawRest = () => {};
  const narrow = () => (root.clientWidth || innerWidth) < 46 * 16;  // then all is below one another
  const varied = key => { const { low, high } = scaleFor(pack, key); return high > low; };
  root.classList.add("rlhf", "reader");
  const pressed = root.querySelector(".bar > button:focus")?.textContent;  // which had this page drawn anew
  root.replaceChildren();
  const part = (tag, parent, className, more) => make(tag, { parent, className, ...more });
  const button = (parent, text, act, more) => part("button", parent, "", { type: "button", text, onclick: act, ...more });
  const labelled = (parent, text, tag, more) => {
    const label = make("label", { parent, text: text + " " });
    return make(tag, { parent: label, ...more });
  };
  const options = (select, names, now) => {
    select.replaceChildren(...names.map(text => make("option", { text, value: text })));
    select.value = names.includes(now) ? now : names[0];
  };

  // What stays: a bar, curves, the list at the left, the answer at the right, and below it what one opens.
  const menu = (parent, title, more) => {
    const fold = part("details", parent, "menu");
    make("summary", { parent: fold, text: title, ...more });
    return make("div", { parent: fold });
  };
  const keyed = (parent, text, key, act, more) => {  // a button that shows its key
    const one = button(parent, text, act, more);
    make("kbd", { parent: one, text: key, ariaHidden: true });
    return one;
  };
  const bar = part("div", root, "bar", { role: "group", ariaLabel: "Update" });
  const run = part("details", root, "run", {});
  const brief = (source.curves ?? []).slice(0, 3).map(({ name, unit, lines: [{ points }] }) => `${name} ${plain(points[0][1], unit === "%" ? "%" : "")} → ${plain(points.at(-1)[1], unit)}`);
  make("summary", { parent: run, text: `Curves of the run: ${brief.join(", ")}` });
  const curves = part("div", run, "curves", { tabIndex: 0, role: "region", ariaLabel: "Curves of the run" });
  const columns = part("div", root, "columns");
  const side = part("details", columns, "side", { open: true });
  make("summary", { parent: side, text: "Episodes" });
  const page = part("div", columns, "page");
  const facts = part("p", page, "facts", { id: name + "facts" });
  facts.setAttribute("aria-live", "polite");
  const head = part("div", page, "head");
  const signals = labelled(head, "Signal", "select", { className: "signals", onchange: e => go({ signal: e.target.value }) });
  const legend = part("p", head, "legend");
  const tools = menu(head, "More");
  const asked = part("details", page, "asked", { open: true });
  const cut = make("summary", { parent: asked, text: "Prompt" });
  const prompt = part("div", asked, "prompt", { tabIndex: 0, role: "region", ariaLabel: "Prompt" });
  const data = menu(head, "Columns", { title: "what came with the prompt" }).parentNode;
  const turns = part("div", page, "turns", { role: "group", ariaLabel: "Turns" });
  const body = part("div", page, "body");
  const text = part("div", body, "text", { role: "group", ariaLabel: "Answer, token by token" });
  const claims = part("p", page, "claims");
  const dock = part("div", page, "dock");
  const panel = part("section", dock, "panel", { hidden: true, tabIndex: 0, ariaLabel: "Panel" });
  const tabs = part("div", dock, "bar", { role: "group", ariaLabel: "Panels" });
  const read = make("details", { className: "read" });
  make("summary", { parent: read, text: "How this file was read" });
  const notes = part("ul", read);
  const bubble = part("output", root, "bubble", { hidden: true });
  const closeMenus = besides => root.querySelectorAll(".menu[open]").forEach(one => { if (!one.contains(besides)) one.open = false; });
  root.addEventListener("pointerdown", e => closeMenus(e.target));

  const update = labelled(bar, "Update", "select", { onchange: e => go({ update: Number(e.target.value), row: 0 }) });
  source.updates.forEach((one, i) => { if (!one.run) make("option", { parent: update, text: one.name, value: i }); });
  button(bar, "◀", () => turnBy(-1), { ariaLabel: "update before", title: "update before (,)" });
  button(bar, "▶", () => turnBy(1), { ariaLabel: "next update", title: "next update (.)" });
  const alarms = odd.filter(one => one.row === null).length, strange = odd.length - alarms;
  const verdict = [source.calm ? "No alarm in the curves" : alarms && several(alarms, "alarm"), strange && several(strange, "unusual episode")].filter(Boolean).join(" · ");
  if (odd.length) drawSuspects(menu(bar, verdict));
  else if (verdict) part("span", bar, "count", { text: verdict });
  for (const name of source.actions ?? []) button(bar, name, () => source.act(name).catch(fail));
  const told = part("span", bar, "count", { role: "status" });
  let saying = 0;
  const announce = said => {  // a change is read aloud, a beginning is not
    bar.hidden = source.updates.length < 2 && !source.actions?.length && !odd.length && !said;
    clearTimeout(saying);
    saying = setTimeout(() => told.textContent = said, 100);
  };
  announce(source.said ?? "");
  if (pressed) ([...bar.querySelectorAll("button")].find(one => one.textContent === pressed) ?? update).focus();

  const finder = part("div", side, "finder");
  const find = labelled(finder, "Find", "input", { type: "search", placeholder: "Search; Enter: next update",
    oninput: e => relist({ find: e.target.value }), onkeydown: e => { if (e.key === "Enter") seek(); } });
  const sort = labelled(finder, "Sort by", "select", { onchange: e => relist({ sort: e.target.value }) });
  const down = button(finder, "", () => relist({ down: !at.down }));
  const only = labelled(finder, "Only", "select", { onchange: e => relist({ only: e.target.value }) });
  const above = labelled(finder, "above", "input", { type: "number", step: 0.5,
    oninput: e => relist({ above: Number(e.target.value) || 0 }) });
  const count = part("p", side, "count", { role: "status" });
  const rows = part("ol", side, "rows", { tabIndex: 0, role: "listbox", ariaLabel: "Episodes" });

  const tool = Object.entries(LETTERS).map(([letter, key]) => [key, keyed(tabs, PANELS[key], letter, () => toggle(key))]);
  const largest = keyed(tools, "Largest of the update", "L", () => toLargest(), { title: "the token of the whole update that holds most of this signal" });
  const keep = () => go({ beneath: at.beneath.includes(at.signal) ? at.beneath.filter(key => key !== at.signal) : [...at.beneath, at.signal].filter(Boolean) });
  const kept = keyed(tools, "Keep this signal under the text", "b", keep, { title: "to compare it with another" });
  const evenly = keyed(tools, "Colour by rank", "e", () => go({ ranked: !at.ranked }), { title: "a few large numbers then leave colour for the others" });
  const plainly = keyed(tools, "Plain text", "x", () => go({ plain: !at.plain }));
  const exporting = button(tools, "Save the notes (JSONL)", () => saveNotes());
  function drawSuspects(box) {
    box.parentNode.classList.add("suspects");
    const jumps = part("ul", box);
    for (const one of odd) button(make("li", { parent: jumps }), one.sentence, () => { closeMenus(); goTo(one); });
    if (first.row !== null) make("p", { parent: box, className: "legend", text: "The page opens at the first unusual episode: of those paid clearly more than their update, one that is far out. sd: standard deviations within updates, from the mean of the episode's own."
      + (odd.some(one => one.sentence.includes("repetition")) ? " Repetition: share of runs of three tokens that came before in the answer." : "") });
  }

  // ---- The list ----

  const FIELDS = { episode: "id", score: "score", "raw score": "raw", KL: "kl", entropy: "entropy", "group mean": "mean", "group spread": "spread" };
  const value = (row, key) => key === pack.unit ? row.written : Object.hasOwn(FIELDS, key) ? row[FIELDS[key]]
    : Object.hasOwn(pack.columns, key) ? pack.columns[key][row.i] : null;
  const sorts = () => [...new Set([...Object.keys(FIELDS), pack.unit, ...Object.keys(pack.columns)])]
    .filter(key => pack.rows.some(row => typeof value(row, key) === "number"));
  const RULES = {
    all: () => true, "cut off": row => row.stopped === false && !row.reason, "bad form": row => row.badForm,
    "invents a fact": row => known(row)?.invented.length,
    "score above": row => row.score !== null && row.score > at.above,
    "KL above": row => row.kl !== null && row.kl > at.above,
    "groups of equal scores": row => equal(row.group),
  };
  const REASONS = ["terminated", "truncated", "max_turns", "context"];  // why an episode of several turns ended
  for (const why of REASONS) RULES[why] = row => row.reason === why;
  for (const how of ["won", "lost"]) RULES[how] = row => row.won === how;
  const searched = row => [row.prompt.text, row.text, ...Object.values(pack.columns).map(column => column[row.i])]
    .join("\n").toLowerCase();
  const listed = () => {
    const words = at.find.toLowerCase();
    const kept = pack.rows.filter(row => (Object.hasOwn(RULES, at.only) ? RULES[at.only] : RULES.all)(row)
      && (!words || searched(row).includes(words)));
    const key = row => value(row, at.sort) ?? Infinity * (at.down ? -1 : 1);
    return at.sort === "episode" && !at.down ? kept : kept.sort((a, b) => ((key(a) - key(b)) || 0) * (at.down ? -1 : 1));
  };
  const drawList = () => {
    options(sort, sorts(), at.sort);
    at.sort = sort.value;  // another update may have other columns
    list = listed();
    const alike = pack.groups.filter(equal).length, there = rule => ["all", at.only].includes(rule) || pack.rows.some(/above/.test(rule) ? row => row[FIELDS[rule.split(" ")[0]]] !== null : RULES[rule]);
    options(only, Object.keys(RULES).filter(there), at.only);
    above.parentNode.hidden = !at.only.includes("above");
    if (document.activeElement !== above) above.value = at.above;
    if (find.value !== at.find) find.value = at.find;
    down.textContent = at.down ? "↓" : "↑";
    down.ariaLabel = at.down ? "descending" : "ascending";
    const all = pack.of === pack.rows.length ? pack.of : `the ${pack.rows.length} of ${pack.of} that are kept here`, same = pack.rows.length > 1 && pack.groups[0]?.length === pack.rows.length;
    count.textContent = !list.length ? "No episode matches." : list.length === all && same ? `${all} episodes` : `${list.length} of ${all}`;
    if (list.length && pack.groups.length) count.textContent += same ? ", all with the same prompt" : `; ${several(pack.groups.length, "group")} of one prompt, ${alike || "none"} with equal scores (=)`;
    const scale = pack.scales.score ??= scaleOf([pack.rows.map(row => row.score)]);
    drawRest = inSight(rows, list, list.findIndex(row => row.id === at.row) + SIGHT, row => lineOf(row, scale), () => requestAnimationFrame(inView));
  };
  const preview = row => row.marks.length ? row.pieces.map((piece, t) => row.marks.some(one => one.at === t) ? ` ${piece}` : piece).join("") : row.text;
  const lineOf = (row, scale) => {
    const line = make("li", { role: "option", id: `${name}row${row.id}`, onclick: () => go({ row: row.id }) });
    line.dataset.id = row.id;
    const score = make("b", { parent: line, text: pack.scores ? shown(row.score) : "", title: `score ${exact(row.score)}` });
    score.style.backgroundColor = tint(row.score, scale);
    const key = ["episode", "score", pack.unit].includes(at.sort) ? "KL" : at.sort, x = value(row, key);
    const told = key.startsWith("group ") ? `group ${shown(row.mean)} ± ${plain(row.spread, "")}` : `${key} ${whole(pack, key, x)}`;
    make("span", { parent: line, text: (x ?? null) === null ? "" : told, title: `${key} ${exact(x)}` });
    make("span", { parent: line, text: `${noted(row) ? "✎ " : ""}${equal(row.group) ? "= " : ""}${row.written} ${row.won ?? (row.stopped === null ? "" : (row.reason ? row.reason === "terminated" : row.stopped) ? "■" : "✂")}`.trim(),
      title: [counted(row, pack), ending(row), noted(row)?.note].filter(Boolean).join(", ") });
    make("bdi", { parent: line, text: preview(row).replaceAll("\n", " ").trim() || "(nothing)" });
    return line;
  };
  const markList = () => {
    rows.querySelector("[aria-selected=true]")?.removeAttribute("aria-selected");
    rows.removeAttribute("aria-activedescendant");
    const chosen = `[data-id="${Number(at.row)}"]`;
    if (!rows.querySelector(chosen)) drawRest();
    const here = rows.querySelector(chosen);
    if (!here) return;
    here.setAttribute("aria-selected", "true");
    rows.setAttribute("aria-activedescendant", here.id);
    inView();
  };
  const inView = () => {  // scrolls the list, never the page
    const here = rows.querySelector("[aria-selected=true]")?.getBoundingClientRect(), all = rows.getBoundingClientRect();
    rows.scrollTop += here ? Math.min(0, here.top - all.top) + Math.max(0, here.bottom - all.bottom) : 0;
  };

  // ---- The text ----

  const current = () => list.find(row => row.id === at.row);
  const answered = (row, t) => Boolean(row.reason && row.stored.masked[t]);  // what the world wrote has no signals
  const say = (token, row, its) => {
    point(token, its);
    bubble.replaceChildren();
    within(its).forEach((t, k, all) => {
      const about = make("div", { parent: bubble });
      make("bdi", { parent: about, text: named(its.text) });
      const line = Object.entries(row.signals).filter(([key, x]) => key !== "clipped" || x[t]).map(([key, x]) => key === "clipped"
        ? `clipped ${x[t] > 0 ? "above" : "below"}` : `${nameOf(key)}${key === at.signal && differing ? ", difference" : ""} ${key === at.signal ? exact(x[t]) : shown(x[t])}`
          + (key.endsWith("logprobs") ? ` (${percent(Math.exp(x[t]))} %)` : ""));
      about.append(`${all.length > 1 ? ` (part ${k + 1} of ${all.length})` : ""} token ${t + 1}: ${answered(row, t) ? "not written by the policy" : line.join(" · ")}`);
    });
    placeBubble(bubble, token);
  };
  const hush = () => { bubble.hidden = true; };
  let pointer = [NaN, NaN];
  root.addEventListener("mousemove", e => { pointer = [e.clientX, e.clientY]; });
  const stands = e => e?.clientX === pointer[0] && e?.clientY === pointer[1];  // the page moved, under a pointer that did not
  const running = (box, row, numbers, scale, marks, other, boxes = boxesOf(row.pieces), strips = []) => {
    const code = codeLines(row.text);
    let line = null, lines = 0, block = null, world = null;
    const begin = () => {
      if (!code[lines]) block = null;
      else block ??= part("div", box, "code", { tabIndex: 0, role: "region", ariaLabel: "Code or table" });
      line = make("div", { parent: block ?? world ?? box, className: "line", dir: block ? "ltr" : "auto" });
    };
    for (const its of boxes) (its.text.match(/[^\n]*\n|[^\n]+/g) ?? [""]).forEach((piece, more) => {
      for (const one of more ? [] : row.marks ?? []) if (one.at >= its.from && one.at < its.to) {  // a turn begins, or what answers it
        line = block = null;
        make("div", { parent: box, className: "turn", text: one.text });
        world = one.world ? make("div", { parent: box, className: "world" }) : null;
      }
      if (!line) begin();
      const words = piece.replace("\n", ""), lead = words.trim() ? words.match(/^ */)[0] : "";
      line.append(lead);
      const token = make("span", { parent: line, text: words.slice(lead.length), className: more ? "token more" : "token" });
      if (!piece) token.classList.add("empty");
      else if (!piece.trim() && words) token.classList.add("blank");
      if (row.stopped && its.to === row.length && SPECIAL.test(piece)) token.classList.add("end");
      if (row.stored.masked?.[its.from]) token.classList.add("masked");
      if (marks?.[its.from]) token.classList.add(marks[its.from]);
      if (other && within(its).some(t => other[t])) token.classList.add("changed");
      if (numbers) {
        const colours = within(its).map(t => tint(numbers[t], scale)), width = 100 / colours.length;
        if (colours.length < 2) token.style.backgroundColor = colours[0];
        else token.style.backgroundImage = `linear-gradient(90deg, ${colours.map((one, k) => `${one} ${k * width}% ${(k + 1) * width}%`)})`;
        if (!scale.way && within(its).some(t => numbers[t] < 0)) token.classList.add("below");
        if (within(its).some(t => beyond(numbers[t], scale))) token.classList.add("beyond");
        if (at.signal === "ratio - 1" && within(its).some(t => row.signals.clipped?.[t])) token.classList.add("clipped");
        token.dataset.number = within(its).map(t => shown(numbers[t])).join(" ");
      }
      // A strip is a shadow, so that letters stay joined. Of tokens that share a box it shows the one that holds most.
      if (strips.length) token.style.setProperty("--beneath", strips.map(([x, ruler], k) => {
        const most = within(its).map(t => x[t]).reduce((a, b) => depth(b, ruler) > depth(a, ruler) ? b : a);
        return `0 ${7 * k + 2}px var(--paper), 0 ${7 * k + 7}px ${tint(most, ruler, "var(--paper)")}`;
      }).join());
      token.onmouseenter = e => { if (!stands(e)) say(token, row, its); };
      token.onmouseleave = e => { if (!stands(e)) hush(); };
      if (words === piece) return;
      make("i", { parent: token, text: "\n" });
      [line, lines] = [null, lines + 1];
    });
    if (!row.pieces.length) make("em", { parent: box, text: "(nothing)" });
  };
  const tokensOf = () => [...text.querySelectorAll(".token:not(.more)")];
  const known = row => row && claimsOf(row, source.slots ?? {});
  const judged = (box, answer, asked) => {  // words with a mark where they claim a fact
    const pieces = answer.split(/([\p{L}\p{N}_]+)/u);
    const claim = claimsOf({ prompt: asked, pieces, text: answer }, source.slots ?? {});
    pieces.forEach((piece, t) => {
      const kind = claim?.marks[t];
      if (kind) make("mark", { parent: box, text: piece + (kind === "covered" ? "✓" : "✗"), className: kind, title: kind });
      else box.append(piece);
    });
  };
  const drawPrompt = (row, claim) => {
    prompt.replaceChildren();
    prompt.style.setProperty("--lines", pack.lines ??= Math.min(5, Math.max(...pack.prompts.map(one => linesOf(one, Math.min(90, page.clientWidth / 8 || 90))))));  // one height for an update
    const truth = row.prompt.facts;
    for (const [role, said] of row.prompt.turns ?? []) {
      const turn = make("p", { parent: prompt, className: "turn" });
      make("b", { parent: turn, text: role });
      make("bdi", { parent: turn, text: said });
    }
    const place = row.prompt.turns ? make("details", { parent: prompt }) : prompt;
    if (row.prompt.turns) make("summary", { parent: place, text: pack.notes.length ? "As one text" : "As the model reads it" });
    for (const word of row.prompt.text.replace(/\n\s*\n/g, "\n").split(/([\p{L}\p{N}_]+)/u)) {
      const slot = truth && Object.hasOwn(source.slots ?? {}, word) && source.slots[word];
      if (slot && truth[slot] === word) {
        const told = claim.told.has(slot);
        make("mark", { parent: place, text: word, className: told ? "covered" : "missing",
          title: `${slot}: ${told ? "covered" : "missing"} in the answer` });
      } else place.append(word);
    }
    const more = Object.entries(pack.columns).filter(([key, column]) => typeof column[row.i] !== "number" && key !== "stop_reason");
    data.hidden = !more.length;
    data.lastChild.replaceChildren();
    for (const [key, column] of more) make("bdi", { parent: make("p", { parent: data.lastChild, text: `${key}: ` }), text: String(column[row.i] ?? "–") });
  };
  const tellCut = () => {  // of a prompt that is longer than its place: the last question is in sight, and it is said
    prompt.scrollTop = [...prompt.querySelectorAll(".turn")].at(-1)?.offsetTop ?? 0;
    cut.textContent = prompt.scrollHeight > prompt.clientHeight + 2 && asked.open ? "Prompt (scroll: not all of it is in sight)" : "Prompt";
  };
  const linesOf = (one, wide) => (one.turns?.map(([, said]) => `\n${said}`).join("\n") ?? one.text.replace(/\n\s*\n/g, "\n")).split("\n").reduce((sum, line) => sum + Math.ceil((line.length || 1) / wide), one.turns ? 1 : 0);
  // What has the focus is often drawn anew; with the focus lost, a widget would hear no key.
  const focused = () => root.getRootNode().activeElement ?? null;
  const toList = () => (side.open ? rows : side.firstChild).focus({ preventScroll: true });
  const toToken = place => {
    const tokens = tokensOf(), next = tokens[Math.max(0, Math.min(place, tokens.length - 1))];
    tokens.forEach(token => { token.tabIndex = token === next ? 0 : -1; });
    next?.focus();
    return Boolean(next);
  };
  const tokenAt = () => tokensOf().indexOf(focused());
  const draw = () => {
    const had = focused(), place = tokenAt(), inside = root.contains(had), table = inside && had.classList.contains("wide");
    drawEpisode();
    const has = focused(), next = table && panel.querySelector(".wide");
    if (!inside || root.contains(has) && has.getClientRects().length) return;
    if (next) next.focus({ preventScroll: true });
    else if (place < 0 || !toToken(place)) toList();
  };
  const drawEpisode = () => {
    hush();
    markList();
    const row = current();
    text.replaceChildren();
    [asked, head, body, dock].forEach(one => { one.hidden = !row; });
    turns.hidden = true;
    claims.textContent = "";
    panel.hidden = true;
    if (!row) { facts.textContent = "No episode matches: Escape shows all of them."; return; }
    const names = Object.keys(row.signals).filter(key => key !== "clipped"), claim = known(row);
    if (at.signal && !names.includes(at.signal)) at.signal = names[0] ?? "";
    facts.replaceChildren();
    spaced(facts, [make("b", { text: `${pack.update === null ? "E" : `Update ${pack.update}, e`}pisode ${row.id} of ${pack.of}` })],
      row.score !== null && ["score ", number(row.score)],
      row.raw !== null && row.raw !== row.score && ["raw score ", number(row.raw)],
      row.kl !== null && ["KL ", number(row.kl), " nats"], counted(row, pack), ending(row),
      ...Object.entries(pack.columns).filter(([key, column]) => key !== "turns" && !(row.won && key === "info/won") && typeof column[row.i] === "number")
        .map(([key, column]) => [`${key} `, make("span", { text: whole(pack, key, column[row.i]), title: exact(column[row.i]) })]));
    if (row.group.length > 1) drawGroup(row);
    drawPrompt(row, claim);
    if (signals.dataset.names !== names.join()) {
      signals.dataset.names = names.join();
      signals.replaceChildren(make("option", { text: "no signal", value: "" }), ...names.map((key, i) => make("option", { text: `${i + 1} ${nameOf(key)}`, value: key })));
    }
    if (opening && at.signal && !varied(at.signal)) at.signal = names.find(varied) ?? at.signal;
    opening = false;
    signals.value = at.signal;
    signals.title = MEANING[at.signal] ?? "";
    const after = tried()?.[row.i] && signalsOf(row, tried()[row.i], { ...basis(), ...at.recipe });
    differing = Boolean(after) && at.seen === "difference";
    const told = !after || at.seen === "before" ? row : { ...row, signals: differing ? { ...row.signals } : after };
    if (differing) told.signals[at.signal] = after[at.signal]?.map((x, t) => x - row.signals[at.signal][t]);
    const numbers = told.signals[at.signal], scale = { ...scaleFor(pack, at.signal), ranked: at.ranked }, boxes = boxesOf(row.pieces);
    const strips = at.plain ? [] : at.beneath.filter(key => names.includes(key));
    running(text, told, numbers, scale, claim?.marks, null, boxes, strips.map(key => [row.signals[key], scaleFor(pack, key)]));
    text.style.setProperty("--strips", strips.length);
    kept.hidden = largest.hidden = !numbers;  // without a signal they would do nothing
    kept.setAttribute("aria-pressed", at.beneath.includes(at.signal));
    text.classList.toggle("plain", at.plain);
    plainly.setAttribute("aria-pressed", at.plain);
    evenly.setAttribute("aria-pressed", at.ranked);
    exporting.hidden = !Object.keys(notesOf).length;
    depths = boxes.map(its => row.stored.masked?.[its.from] ? 0 : Math.max(...within(its).map(t => depth(numbers?.[t] ?? NaN, scale))));
    requestAnimationFrame(tellCut);  // with the frame's own layout: a key is answered first
    tokensOf().forEach((token, t) => {
      token.tabIndex = t ? -1 : 0;
      token.onfocus = token.onmouseenter;
      token.onblur = hush;
    });
    drawLegend(names, strips);
    drawTurns(row);
    if (claim) drawClaims(claims, claim, row.badForm);
    for (const [key, one] of tool) one.setAttribute("aria-pressed", at.panel === key);
    drawPanel(row, names);
  };
  const drawGroup = row => {
    const box = make("span", { parent: facts, className: "group" });
    box.append(` · one of ${row.group.length} answers to its prompt`, ...equal(row.group) ? [", scores all equal: comparing them teaches nothing"]
      : "mean" in row ? [", scores ", number(row.mean), ` ± ${plain(row.spread, "")}`] : [], " ");
    for (const [text, by, said] of [["◀", -1, "answer before, same prompt ([)"], ["▶", 1, "next answer, same prompt (])"]])
      button(box, text, () => alongGroup(by), { ariaLabel: said, title: said });
  };
  // Of several turns: the value before each, and in which one most was lost: reward + next value - value is lowest there.
  let turnNow = -1, starts = [];
  const drawTurns = row => {
    starts = row.marks.filter(one => !one.world).map(one => one.at);
    turns.hidden = starts.length < 2 || !row.signals.values || !row.signals.rewards;
    turns.replaceChildren();
    if (turns.hidden) return;
    const scale = scaleFor(pack, "values"), own = (key, k) => row.signals[key].slice(starts[k], starts[k + 1]).filter((_, t) => !row.stored.masked[starts[k] + t]);
    const before = starts.map((_, k) => own("values", k)[0]), paid = starts.map((_, k) => own("rewards", k).reduce((a, b) => a + b, 0));
    const known = starts.length - (["terminated", "max_turns"].includes(row.reason) ? 0 : 1);  // what comes after a truncated end is not
    const gains = before.slice(0, known).map((v, k) => paid[k] + (before[k + 1] ?? 0) - v), [most, next] = [...gains.keys()].sort((a, b) => gains[a] - gains[b]);
    before.forEach((v, k) => {
      const one = button(turns, "", () => toTurn(k), { ariaLabel: `turn ${k + 1}`, title: `turn ${k + 1}: value before the turn ${exact(v)}, rewards ${exact(paid[k])}` });
      make("i", { parent: one }).style.height = `${10 + 90 * depth(v, scale)}%`;
      make(k === most && gains[k] < 0 ? "b" : "span", { parent: one, text: k + 1 });
    });
    const also = gains[next] < 0.8 * gains[most] ? `, and turn ${next + 1} nearly as much (${shown(gains[next])})` : "";
    part("span", turns, "legend", { title: "reward + next value − value", text: !(gains[most] < 0.1 * (scale.low - scale.high)) ? "Value before each turn: it fell much in none"
      : `Value before each turn: it fell most in turn ${most + 1}, ${shown(before[most])} → ${shown((before[most + 1] ?? 0) + paid[most])}${also}` });
  };
  const toTurn = k => {
    if (turns.hidden) return;
    turnNow = Math.max(0, Math.min(k, starts.length - 1));
    toToken(boxesOf(current().pieces).findIndex(its => its.to > starts[turnNow]));
  };
  const alongGroup = by => {
    const row = current();
    if (row?.group.length > 1) go({ row: beside(row.group, row, by).id, ...UNFILTERED });
  };
  const drawLegend = (names, strips) => {
    const scaled = (key, more) => {
      const { way, low, high } = scaleFor(pack, key), kind = way > 0 ? "rising" : way < 0 ? "falling" : "";
      return [more, number(low), " ", make("span", { className: `scale ${kind}`, text: way ? "" : "0" }), " ", number(high)];
    };
    legend.textContent = names.length && !at.signal ? "No signal: choose one." : "";
    if (strips.length) spaced(make("div", { parent: legend, text: "Beneath, from the top: " }), ...strips.map(key => scaled(key, `${nameOf(key)} `)));
    if (!at.signal) return;
    const rows = (pack.rows.some(row => row.signals.clipped) && at.signal === "ratio - 1" ? " A line above: clipped." : "")
      + (current().stored.masked?.includes(1) && !current().marks.length ? " Grey: masked." : "");
    const past = pack.rows.length && current().signals[at.signal].some(x => beyond(x, { ...scaleFor(pack, at.signal), ranked: at.ranked })) ? " Bold: beyond it." : "";
    legend.prepend(...scaled(at.signal, tried() ? `${WAYS[at.seen]}: ` : ""), at.ranked ? ` by rank.${rows}` : `${(past || rows) && "."}${past}${rows}`);
    legend.title = at.ranked ? "" : `${100 * FULL} % of this update is paler than full colour`;
  };

  let depths = [], differing = false;
  const resized = new ResizeObserver(() => inView());
  [text, rows].forEach(one => resized.observe(one));
  const toLarge = () => {
    const from = tokenAt() + 1, order = [...depths.keys()].map(i => (from + i) % depths.length);
    const next = order.find(i => depths[i] >= 1) ?? order.reduce((a, b) => depths[b] > depths[a] ? b : a, 0);
    toToken(next);
  };
  const toLargest = async (rows = pack.rows, signed = false) => {
    const { way } = scaleFor(pack, at.signal), size = x => way ? way * x : signed ? x : Math.abs(x);
    let most = { x: -Infinity };
    for (const row of rows) row.signals[at.signal]?.forEach((one, t) => { if (t < row.length && !row.stored.masked?.[t] && size(one) > most.x) most = { x: size(one), row, t }; });
    if (!most.row) return;
    if (most.row !== current()) await go({ row: most.row.id, ...UNFILTERED });
    toToken(boxesOf(most.row.pieces).findIndex(its => its.to > most.t));
  };
  const toCostly = () => current() && toLargest([current()], true);  // of this answer, the most above zero
  const goTo = async one => {
    const costly = one.sentence.includes(", most on “");
    await go({ ...jump(one), ...costly && { signal: "kl" } });
    if (costly) toCostly();
  };
  const point = (token, its) => {  // the same token in text and table
    const lines = [...panel.querySelectorAll("tbody tr")], wide = panel.querySelector(".wide");
    root.querySelectorAll(".here").forEach(one => one.classList.remove("here"));
    if (!lines[its.to - 1] || !text.contains(token)) return;
    for (const t of within(its)) lines[t].classList.add("here");
    token.classList.add("here");
    const top = lines[its.from].offsetTop - wide.firstChild.tHead.offsetHeight;
    if (top < wide.scrollTop || top + 40 > wide.scrollTop + wide.clientHeight) wide.scrollTop = top - wide.clientHeight / 3;
  };

  // ---- What one opens below the answer ----

  const drawPanel = (row, names) => {
    panel.hidden = !at.panel;
    if (at.panel === "what" && panel.dataset.kind === "what" && refit(row)) return;
    panel.replaceChildren();
    panel.dataset.kind = at.panel;
    if (!at.panel) { unfolded = ""; return; }
    ({ table: drawTable, what: drawWhat, same: drawSame, plot: drawPlot, note: drawNote, keys: drawKeys })[at.panel](row, names);
    if (unfolded !== at.panel && narrow()) panel.scrollIntoView({ block: "nearest" });
    unfolded = at.panel;
  };
  const drawTable = (row, names) => {
    const wide = part("div", panel, "wide", { tabIndex: 0, role: "region", ariaLabel: "All signals" });
    const table = make("table", { parent: wide }), head = make("tr", { parent: make("thead", { parent: table }) });
    const corner = make("th", { parent: head, text: "token", scope: "col" });
    for (const key of names) make("th", { parent: head, text: nameOf(key), title: key, scope: "col" });
    const scales = names.map(key => scaleFor(pack, key)), lineOf = ([its, i, t, part]) => {
      const line = make("tr", { onclick: () => toToken(i), onmouseenter: () => point(tokensOf()[i], its) });
      make("bdi", { parent: make("th", { parent: line, text: `${t + 1} `, scope: "row" }), text: part ? "·" : named(its.text.trim() || its.text) });
      names.forEach((key, k) => {
        const x = answered(row, t) ? null : row.signals[key][t];
        make("td", { parent: line, text: shown(x), title: exact(x), className: beyond(x, scales[k]) ? "beyond" : "" }).style.backgroundColor = tint(x, scales[k]);
      });
      return line;
    };
    const lines = boxesOf(row.pieces).flatMap((its, i) => within(its).map((t, part) => [its, i, t, part]));
    inSight(make("tbody", { parent: table }), lines, SIGHT, lineOf, () => {
      focused()?.onfocus?.();
      if (wide.scrollHeight > wide.clientHeight + 2) corner.textContent = `token (${lines.length}, scroll)`;
    });
  };
  const drawKeys = row => {
    const listed = [...KEYS.filter(([keys]) => keys === "j k" ? row.marks?.length : keys !== "[ ]" || row.group.length > 1).map(([, key, does]) => [key, does]), ...Object.entries(LETTERS).map(([key, its]) => [key, `opens and closes ${PANELS[its]}`])];
    for (const [title, told] of [["Keys", listed], ["Words", WORDS]]) {
      make("h2", { parent: panel, text: title });
      const kept = make("dl", { parent: panel });
      for (const [key, does] of told) { make("dt", { parent: kept, text: key }); make("dd", { parent: kept, text: does }); }
    }
  };
  const WAYS = { before: "as stored", after: "hypothetical", difference: "hypothetical minus stored" };
  const tried = () => at.panel === "what" && basis() && at.recipe ? attempt() : null;  // while other settings are chosen
  const attempt = () => {
    const key = JSON.stringify(at.recipe);
    if (pack.tried?.key !== key) pack.tried = { key, all: whatIf(given(pack), { ...basis(), ...at.recipe }) };
    return pack.tried.all;
  };
  const plotted = { x: "", y: "" };  // what the plot is of
  const drawPlot = row => {
    const names = sorts().filter(key => key !== "episode"), box = part("div", panel, "settings");
    const svg = (tag, parent, more) => {
      const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
      for (const [key, x] of Object.entries(more)) node.setAttribute(key, x);
      return parent.appendChild(node);
    };
    const choices = [["x", "Along", names, pack.unit], ["y", "Up", names, "score"]];
    for (const [axis, text, all, usual] of choices) {
      const select = labelled(box, text, "select", { onchange: e => { plotted[axis] = e.target.value; draw(); } });
      options(select, all, plotted[axis] || usual);
      plotted[axis] = select.value;
    }
    const { x, y } = plotted, many = pack.rows.filter(one => Number.isFinite(value(one, x)) && Number.isFinite(value(one, y)));
    const ends = numbers => [Math.min(...numbers), Math.max(...numbers)], [left, right] = ends(many.map(one => value(one, x)));
    const [low, high] = ends(many.map(one => value(one, y)));
    const across = v => 50 + 530 * (v - left) / (right - left || 1), up = v => 210 - 190 * (v - low) / (high - low || 1);
    const picture = svg("svg", panel, { viewBox: "0 0 600 250", class: "plot", role: "img", "aria-label": `${y} against ${x} of ${many.length} episodes` });
    svg("path", picture, { d: "M50 20V210H580", class: "axis" });
    const label = (at, text, more) => { svg("text", picture, { x: at[0], y: at[1], ...more }).textContent = text; };
    if (many.length) for (const [at, v, anchor] of [[[50, 228], left, "start"], [[580, 228], right, "end"], [[46, 24], high, "end"], [[46, 212], low, "end"]])
      label(at, Number.isInteger(v) ? v : plain(v, ""), { "text-anchor": anchor });
    label([315, 244], x, { "text-anchor": "middle" });
    label([50, 12], y, {});
    for (const one of [...many.filter(one => one !== row), ...many.filter(one => one === row)]) {
      const point = svg("circle", picture, { cx: across(value(one, x)), cy: up(value(one, y)), r: one === row ? 6 : 4, class: one === row ? "mine" : "point" });
      svg("title", point, {}).textContent = `episode ${one.id}: ${x} ${shown(value(one, x))}, ${y} ${shown(value(one, y))}`;
      point.onclick = () => go({ row: one.id, ...UNFILTERED });
    }
  };
  // A note is kept with what it is on, so that all of them are a file without opening an update again.
  const shelf = `rlhf-notes ${location.pathname} ${source.title}`, notesOf = NOTES[shelf] ??= remembered(shelf) ?? {};
  const noted = row => notesOf[`${source.updates[at.update].name} ${row.id}`];
  const saveNotes = () => {
    const lines = Object.values(notesOf).map(one => JSON.stringify(one) + "\n"), href = URL.createObjectURL(new Blob(lines, { type: "application/jsonl" }));
    make("a", { href, download: "notes.jsonl" }).click();
    setTimeout(() => URL.revokeObjectURL(href), 1e3);
  };
  const drawNote = row => {
    const key = `${source.updates[at.update].name} ${row.id}`, said = make("p", { className: "legend", role: "status" });
    const box = labelled(panel, "Note on this episode", "textarea", { rows: 4, value: noted(row)?.note ?? "" });
    box.oninput = () => {
      const record = { update: pack.update, episode: row.id, prompt: row.prompt.text, answer: row.text, score: row.score, note: box.value };
      if (box.value.trim()) notesOf[key] = record; else delete notesOf[key];
      const kept = remembered(shelf, notesOf);
      said.textContent = kept ? "Kept in this browser." : "Kept while this page is open: this browser stores nothing for it. Save the notes before you close it.";
      exporting.hidden = !Object.keys(notesOf).length;
      rows.querySelector(`[data-id="${row.id}"]`)?.replaceWith(lineOf(row, pack.scales.score));
      markList();
    };
    panel.append(said);
    if (unfolded !== "note") box.focus();
  };
  let answer = null, unfolded = "", refit = () => false;  // refit: the controls of the what-if, to what is asked now
  const basis = () => pack.recipe ?? pack.asks;  // asks: the file does not say, so the reader chooses
  const controls = row => SETTINGS.filter(([key]) => key in basis() && (key !== "cliprange" || row.stored.now));
  const drawWhat = row => {
    refit = () => false;
    if (!basis()) {
      make("p", { parent: panel, text: `${pack.told}${pack.turn_marks ? "" : " So nothing can be computed with other settings."}` });
      return;
    }
    const box = part("div", panel, "settings"), chosen = controls(row);
    const puts = chosen.map(([key, low, high, by]) => {
      const label = make("label", { parent: box, text: LABELS[key] + " " });
      const input = make("input", { parent: label, type: "range", min: low, step: by });
      input.dataset.setting = key;
      const told = make("output", { parent: label });
      input.oninput = () => retry({ [key]: Number(input.value) });
      return recipe => {
        input.max = high === 1 ? 1 : Math.max(high, 2 * basis()[key]);
        input.value = recipe[key];
        told.textContent = exact(recipe[key]);
      };
    });
    const kind = labelled(box, "KL estimator", "select", { onchange: () => retry({ kl_estimator: kind.value }) });
    button(box, "as it was", () => { go({ recipe: null }); });
    const group = part("span", box, "", { role: "group", ariaLabel: "Numbers behind the text" });
    const ways = Object.keys(WAYS).map(key => button(group, key, () => go({ seen: key })));
    answer = part("div", panel, "answer");
    refit = row => {
      if (!basis() || controls(row).join() !== chosen.join()) return false;  // other controls are needed
      const recipe = { ...basis(), ...at.recipe };
      puts.forEach(put => put(recipe));
      const full = pack.asks || pack.recipe.kl_estimator === "full";
      ways.forEach(one => one.setAttribute("aria-pressed", one.textContent === at.seen));
      options(kind, ["k1", "k2", "k3", "abs", ...(full ? ["full"] : [])], recipe.kl_estimator);
      tell(row);
      return true;
    };
    refit(row);
  };
  const retry = changes => {
    const recipe = { ...basis(), ...at.recipe, ...changes };
    const other = Object.fromEntries(Object.entries(recipe).filter(([key, x]) => x !== basis()[key]));
    go({ recipe: Object.keys(other).length ? other : null });
  };
  const tell = row => {
    const recipe = { ...basis(), ...at.recipe }, said = x => typeof x === "number" ? exact(x) : x;
    const kind = pack.asks ? [...controls(row).map(([key]) => key), "kl_estimator"].map(key =>
      `${LABELS[key] ?? "KL estimator"} ${said(recipe[key])}`)
      : Object.entries(at.recipe ?? {}).filter(([key, x]) => x !== pack.recipe[key]).map(([key, x]) =>
        `${LABELS[key] ?? "KL estimator"} ${said(pack.recipe[key])} → ${x}`);
    answer.replaceChildren();
    if (pack.asks) make("p", { parent: answer, text: pack.told });
    else if (!kind.length) {
      make("p", { parent: answer, text: `Nothing is changed. ${pack.told}` });
      return;
    }
    const all = attempt(), made = all[row.i], before = row.signals;
    const after = signalsOf(row, made, recipe);
    const fits = pack.rows.every((one, i) => ["rewards", "advantages", "returns"].every(key =>
      one.signals[key].every((x, t) => Math.abs(x - all[i][key][t]) < 1e-4)));
    const sum = x => x.reduce((a, b) => a + b, 0);
    const turned = before.advantages.filter((x, t) => t < row.length && x * after.advantages[t] < 0).length;
    make("p", { parent: answer }).append(pack.asks ? "Chosen by you: " : "", `${kind.join("; ")}. `, !pack.asks ? ""
      : `With it, the stored numbers ${fits ? "come out" : "do not come out"}. `, "Score ", number(row.score), " → ", number(made.score),
      "; all rewards together ", number(sum(before.rewards)), " → ", number(sum(after.rewards)),
      `; ${turned} of ${row.length} tokens have an advantage of the other sign.`, "missing_eos_penalty" in (at.recipe ?? {}) && row.stopped
        ? " This episode stopped by itself: the penalty reaches it only through the whitening." : "");
    make("p", { parent: answer, text: "Advantages are whitened over all episodes of the update. What the policy would have "
      + "written with these settings is not known." });
  };
  const drawSame = async row => {
    const wait = make("p", { parent: panel, text: "Opening the other updates …", role: "status" });
    const box = part("div", panel, "cards"), mine = ++turn;
    const legend = make("p", { parent: panel, className: "legend", text: "Dotted: not in the answer above." });
    const here = pack.rows.filter(one => one.prompt.text === row.prompt.text).map(one => [at.update, one]);
    const { found, completed } = await source.again(at.update, row.id), others = [];
    for (const [i, id] of found) {
      if (i === at.update) continue;
      const other = await source.load(i), one = other.rows.find(one => one.id === id);
      if (one) others.push([i, one, other]);
    }
    if (mine !== turn || at.panel !== "same") return;
    wait.remove();
    const scores = here.map(([, one]) => one.score).filter(Number.isFinite), best = Math.max(...scores), worst = Math.min(...scores);
    for (const [i, one, its] of here.length + others.length > 1 ? [...here, ...others] : []) {
      const card = part("article", box, one === row ? "card this" : "card"), head = make("h2", { parent: card });
      const where = source.updates[i];
      button(head, `${where.run ? where.runName + ", " : ""}update ${where.name}, episode ${one.id}`,
        () => go({ update: i, row: one.id, ...UNFILTERED }), { disabled: one === row || Boolean(where.run) });
      const rank = !its && here.length > 1 && best > worst ? one.score === best ? " · best" : one.score === worst ? " · worst" : "" : "";
      spaced(make("p", { parent: card, className: "facts" }), one.score !== null && ["score ", number(one.score), rank],
        one.kl !== null && ["KL ", number(one.kl)], counted(one, its ?? pack));
      running(part("p", card, "text small"), one, one.signals[at.signal], scaleFor(pack, at.signal), known(one)?.marks,
        one === row ? null : changed(one.pieces.map(x => x.trim()), row.pieces.map(x => x.trim())));
    }
    if (completed.length) {
      make("h2", { parent: panel, text: "Completions of this prompt" });
      for (const one of completed) {
        const line = make("p", { parent: panel, text: `${one.table}: ` });
        judged(make("bdi", { parent: line }), one.answer || "(nothing)", row.prompt);
        if (one.score) line.append(` · score ${one.score}`);
      }
    }
    legend.hidden = here.length + others.length < 2;
    if (legend.hidden) make("p", { parent: panel, text: "No other saved answer has this prompt." });
  };

  // ---- Curves ----

  // Python has drawn them (ui/chart.py): a corner of a line for each point, a ring for each line. What moves is here.
  const metrics = source.curves ?? [], theirs = source.updates.find(one => one.run)?.runName;
  const two = theirs !== undefined || metrics.some(curve => curve.lines.length > 1);
  const drawCurve = curve => {
    const figure = make("figure", { parent: curves });
    const svg = document.importNode(new DOMParser().parseFromString(curve.svg, "image/svg+xml").documentElement, true);
    figure.append(svg);
    const caption = make("figcaption", { parent: figure, className: two ? "two" : "" });
    const lines = curve.lines, rings = svg.querySelectorAll("[class^=ring]");
    const corners = [...svg.querySelectorAll("polyline")].map(line => [...line.points]);
    const nearest = (numbers, x) => numbers.reduce((a, b, i) => Math.abs(b - x) < Math.abs(numbers[a] - x) ? i : a, 0);
    const put = u => {
      const here = source.updates[at.update].update, precise = [];
      caption.replaceChildren();
      make("b", { parent: caption, text: curve.name });
      lines.forEach((line, i) => {
        const which = nearest(line.points.map(point => point[0]), u), [when, v] = line.points[which];
        rings[i].setAttribute("cx", corners[i][which].x);
        rings[i].setAttribute("cy", corners[i][which].y);
        const where = when === here ? "" : when < 0 ? " before the first update" : ` at update ${when}`;
        const said = make("span", { parent: caption, className: two ? `said${line.which}` : "" });
        if (two) make("bdi", { parent: said, text: line.run });
        said.append(` ${plain(v, curve.unit)}${where}`);
        const [from, to] = [line.points[0][1], line.points.at(-1)[1]].map(x => plain(x, curve.unit === "%" ? "%" : ""));
        if (line.points.length > 1) make("small", { parent: caption, text: `${from} → ${to}` });
        precise.push(`${two ? `${line.run} ` : ""}${exactly(v, curve.unit)}${where}`);
      });
      caption.title = `${curve.about}: ${precise.join(" · ")}`;
    };
    const pointed = e => {
      const box = svg.getBoundingClientRect(), x = (e.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
      return lines[0].points[nearest(corners[0].map(corner => corner.x), x)][0];
    };
    const steps = [...source.updates.entries()].filter(([, one]) => !one.run);
    svg.onmousemove = e => put(pointed(e));
    svg.onmouseleave = () => put(source.updates[at.update].update);
    svg.onclick = e => go({ update: steps[nearest(steps.map(([, one]) => one.update), pointed(e))][0] });
    return put;
  };
  const rings = metrics.map(drawCurve);
  run.hidden = !rings.length;

  // ---- Moving ----

  const fail = error => {
    facts.textContent = `This could not be read: ${error.message}`;
  };
  const address = () => `#${new URLSearchParams({ update: source.updates[at.update].name, episode: at.row, signal: at.signal })}`;
  let lost = "", visits = 0;
  const visit = async () => {  // where the address leads; what it names and the file has not is said, and not taken
    const asked = new URLSearchParams(location.hash.slice(1)), place = {}, mine = ++visits;
    const name = asked.get("update"), episode = asked.get("episode"), digits = /^\d{1,9}$/;
    const index = name === null ? at.update : source.updates.findIndex(one => !one.run && one.name === name);
    let absent = "";
    if (asked.has("signal")) [place.signal, opening] = [asked.get("signal"), false];
    if (index < 0) absent = `${digits.test(name) ? `Update ${name}` : "The update of this address"} is not in this file.`;
    else if (name !== null || episode !== null) {
      const there = await source.load(index).catch(() => null);
      if (mine !== visits) return;
      Object.assign(place, { update: index, ...UNFILTERED });
      if (digits.test(episode) && there?.rows.some(row => row.id === Number(episode))) place.row = Number(episode);
      else if (episode !== null && there) {
        if (index !== at.update) place.row = -1;
        const what = digits.test(episode) ? `Episode ${episode}` : "The episode of this address";
        absent = `${what} is not in update ${source.updates[index].name} of this file.`;
      }
    }
    await go(place);
    if (asked.has("token") && mine === visits) toCostly();
    if (absent && mine === visits) announce(lost = absent);
  };
  let latest = 0;
  let lent = null;  // the signal in whose place the what-if shows advantages, until one is chosen
  const go = async changes => {
    const moved = changes.update !== undefined && changes.update !== at.update || !pack, relisted = LISTING.some(key => key in changes && changes[key] !== at[key]);
    Object.assign(at, changes);
    if ("signal" in changes) lent = null;
    if (lost) announce(lost = "");
    if (moved) {
      const mine = ++latest;
      const next = await source.load(at.update).catch(fail);
      if (!next || mine !== latest) return;
      pack = next;
      if (pack.notes.length) page.append(read); else read.remove();
      notes.replaceChildren(...pack.notes.map(text => make("li", { text })));
      turn++;
      turnNow = -1;
      update.value = at.update;
    }
    if (moved || relisted) drawList();
    if (list.length && !list.some(row => row.id === at.row)) at.row = list[0].id;
    for (const put of rings) put(source.updates[at.update].update);
    draw();
    if (source.address) setTimeout(() => { if (root.getClientRects().length && location.hash !== address()) history.replaceState("read", "", address()); });
    if (moved) source.ahead?.(at.update);
    source.moved?.({ ...at });
  };
  const unfold = key => {
    const lends = key === "what" && basis() && !["rewards", "advantages", "returns"].includes(at.signal);
    const before = lends ? at.signal : null, signal = lends ? "advantages" : lent ?? at.signal;
    go({ panel: key, signal });
    lent = before;
  };
  const toggle = key => unfold(at.panel === key ? "" : key);
  const relist = changes => go("sort" in changes || "down" in changes ? { ...changes, row: -1 } : changes);
  const beside = (all, here, by) => all[(all.indexOf(here) + by + all.length) % all.length];
  const stepBy = by => { if (list.length) go({ row: beside(list, current(), by).id }); };
  const seek = async () => {  // the next update that has the text
    const words = at.find.toLowerCase(), mine = [...source.updates.keys()].filter(i => !source.updates[i].run);
    for (let i = 1; i < mine.length && words; i++) {
      const k = mine[(mine.indexOf(at.update) + i) % mine.length];
      if ((await source.load(k)).rows.some(row => [row.prompt.text, row.text].join("\n").toLowerCase().includes(words))) return go({ update: k, row: -1 });
    }
    announce(list.length ? "In no other update." : "In no update.");
    if (!list.length) count.textContent = "No episode of any update matches.";
  };
  const turnBy = by => go({ update: beside([...source.updates.keys()].filter(i => !source.updates[i].run), at.update, by) });
  const KEYS = [  // keys; how they are listed; what they do, and how
    ["n ArrowDown ArrowRight", "n, ↓ or →", "the next episode", () => stepBy(1)],
    ["p ArrowUp ArrowLeft", "p, ↑ or ←", "the episode before", () => stepBy(-1)],
    [". ,", ". and ,", "the next update, the one before", key => turnBy(key === "." ? 1 : -1)],
    ["", "1, 2, …", "the signal behind the text; once more: none"],
    ["", "← →", "from token to token, once one of them has the focus"],
    ["l", "l", "the next token in full colour; where none is, the one with most", () => toLarge()],
    ["L", "L", "the token of the whole update that is farthest from 0 in this signal", () => toLargest()],
    ["j k", "j and k", "the next turn, the one before", key => toTurn(turnNow + (key === "j" ? 1 : -1))],
    ["[ ]", "[ and ]", "the answer before and after it to the same prompt", key => alongGroup(key === "[" ? -1 : 1)],
    ["/", "/", "find in prompts and answers; Enter: in the next update that has it", () => { side.open = true; find.focus(); }],
    ["b", "b", "keeps this signal under the text, or no longer", keep],
    ["e", "e", "colour by rank", () => go({ ranked: !at.ranked })],
    ["x", "x", "plain text", () => go({ plain: !at.plain })],
    ["d", "d", "of what if: before, after, difference", () => at.panel === "what" && go({ seen: { before: "after", after: "difference", difference: "before" }[at.seen] })],
    ...source.reported ? [["", "r", "Result or Rollouts"]] : [],
    ["", "Escape", "closes what is open"],
  ];
  const acts = Object.fromEntries([...KEYS.flatMap(([keys, , , act]) => keys.split(" ").filter(Boolean).map(key => [key, act])), ...Object.keys(LETTERS).map(key => [key, () => toggle(LETTERS[key])])]);
  root.addEventListener("change", e => { if (e.target.tagName === "SELECT" && !e.target.matches(":focus-visible")) toList(); });  // chosen with the mouse
  root.addEventListener("keydown", e => {
    const on = e.target, moves = on.tagName === "SELECT" || on.type === "range", typing = !moves && /^(INPUT|TEXTAREA)$/.test(on.tagName);
    if (e.ctrlKey || e.metaKey || e.altKey || e.defaultPrevented) return;
    const digit = /^[1-9]$/.test(e.key) && signals.options[e.key]?.value;
    if (e.key === "Escape") {
      if (typing || moves) toList();
      closeMenus();
      if (at.panel) unfold(""); else if (!list.length) go(UNFILTERED);
      if (!typing && !moves && root.contains(on)) tool[0][1].focus({ preventScroll: true });
    } else if (typing || moves && /^(Arrow|\d)/.test(e.key) || (on.classList.contains("wide") || on === prompt || on === curves) && e.key.startsWith("Arrow")) return;
    else if (on.classList.contains("token") && /^Arrow(Left|Right)$/.test(e.key)) toToken(tokenAt() + (e.key === "ArrowLeft" ? -1 : 1));
    else if (Object.hasOwn(acts, e.key)) acts[e.key](e.key);
    else if (digit) go({ signal: at.signal === digit ? "" : digit });
    else return;
    e.preventDefault();
    e.stopPropagation();
  });
  if (source.address) {
    document.addEventListener("keydown", e => {  // a key that is answered is not typed into the field that it opens
      if (root.getClientRects().length && e.target === document.body && !root.dispatchEvent(new KeyboardEvent("keydown", e))) e.preventDefault();
    });
    addEventListener("hashchange", () => { if (location.hash !== address()) visit(); });
  }
  if (narrow()) side.open = false;
  const ready = source.address ? visit() : go({});
  return { go, ready, at };
};

// ---- Where the bytes come from ----

const once = load => {
  const kept = new Map();
  return i => kept.get(i) ?? kept.set(i, load(i)).get(i);
};
const bytesOf = text => {
  const read = atob(text), bytes = new Uint8Array(read.length);
  for (let i = 0; i < read.length; i++) bytes[i] = read.charCodeAt(i);
  return bytes;
};

// A saved file: everything is in it, and is opened when it is looked at.
export const fromFile = data => {
  const load = once(i => unpack(bytesOf(data.updates[i].packed)));
  const again = async (i, id) => {
    const prompt = (await load(i)).rows.find(row => row.id === id)?.prompt.text, found = [];
    for (let k = 0; k < data.updates.length; k++) {
      const one = (await load(k)).rows.find(row => row.prompt.text === prompt);
      if (one) found.push([k, one.id]);
    }
    return { found, completed: Object.hasOwn(data.completed, prompt) ? data.completed[prompt] : [] };
  };
  const ahead = i => setTimeout(() => [i - 1, i + 1].filter(k => data.updates[k]).forEach(load), 20);
  return { ...data, load, again, ahead };
};

// A live notebook: the kernel sends an update when it is asked for.
const fromKernel = model => {
  const waiting = new Map();
  let sent = 0;
  model.on("msg:custom", (message, buffers) => {
    const wanted = waiting.get(message.answers);
    waiting.delete(message.answers);
    if (message.error) wanted?.[1](new Error(message.error));
    else wanted?.[0](buffers.length ? new Uint8Array(buffers[0].buffer ?? buffers[0]) : message.value);
  });
  const ask = what => new Promise((yes, no) => { waiting.set(++sent, [yes, no]); model.send({ ...what, number: sent }); });
  return {
    ...model.get("head"),
    load: once(async i => unpack(await ask({ load: i }))),
    again: (i, id) => ask({ again: [i, id] }),
    act: name => ask({ act: name }),
    place: model.get("place"),
    moved: place => { model.set("place", place); model.save_changes(); },
  };
};
export default {
  render({ model, el }) {
    el.dataset.lmSuppressShortcuts = "true";  // else JupyterLab takes the keys
    let view = null;
    const start = () => { view = reader(el, fromKernel(model)); };
    model.on("change:head", start);
    model.on("change:place", () => {
      const place = model.get("place");
      if (Object.keys(place).some(key => JSON.stringify(place[key]) !== JSON.stringify(view.at[key]))) view.go(place);
    });
    start();
  },
};

const kept = document.getElementById("rlhf-reader-data");
if (kept) {
  const root = document.getElementById("app"), report = document.querySelector(".report");
  const show = () => {  // the result of a run, or its rollouts
    const reads = !report || /=|^#rollouts$/.test(location.hash);
    document.body.dataset.view = reads ? "rollouts" : "result";
    document.querySelectorAll(".views a").forEach((one, i) => one.setAttribute("aria-current", i === Number(reads) ? "page" : "false"));
  };
  addEventListener("hashchange", show);
  document.addEventListener("keydown", e => {
    const result = document.body.dataset.view === "result";  // there `?` opens the list of keys in the other view
    if (!report || !(e.key === "r" || e.key === "?" && result) || !e.isTrusted || e.ctrlKey || e.metaKey || e.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(e.target.tagName)) return;
    location.hash = result ? "rollouts" : "";
    show();  // at once, before a place is written
  });
  show();
  reader(root, { ...fromFile(JSON.parse(kept.textContent)), address: true, reported: Boolean(report) }).ready.then(() => {
    document.getElementById("plain")?.remove();
    root.hidden = false;
  });
}
