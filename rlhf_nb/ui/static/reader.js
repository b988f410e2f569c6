const strip = (episode, box) => {
  const numbers = row(episode, at.signal), most = largest(numbers);
  const list = make("ol", undefined, box, {className: "strip"});
  make("p", at.signal ? `${at.signal}: full colour at ${most.toPrecision(3)}` : "", box);
  episode.tokens.forEach((token, t) => {
    const item = make("li", undefined, list);
    make("bdi", token, item);
    make("b", minus(numbers[t] ?? ""), item).style.background = tint(number(numbers[t] ?? ""), most); }); };
const table = (episode, box) => {
  const made = make("table", undefined, box), head = make("tr", undefined, make("thead", undefined, made));
  make("td", "", head);
  episode.tokens.forEach(token => make("bdi", token, make("th", undefined, head, {scope: "col"})));
  const body = make("tbody", undefined, made);
  for (const name of Object.keys(episode.rows)) {
    const numbers = row(episode, name), most = largest(numbers), line = make("tr", undefined, body);
    make("th", name, line, {scope: "row"});
    numbers.forEach(x => { make("td", minus(x), line).style.background = tint(number(x), most); }); } };
const show = () => {
  const found = listed(), episode = found[at.place = Math.max(0, Math.min(at.place, found.length - 1))];
  const names = episode ? Object.keys(episode.rows) : [], open = $("all").open;
  if (episode && !names.includes(at.signal)) at.signal = names[0] || "";
  choices("shelves", data.shelves.map(s => s.name), i => i === at.shelf, i => { at.shelf = i; });
  choices("signals", names.map((name, i) => `${i + 1} ${name}`), i => names[i] === at.signal,
    i => { at.signal = names[i]; });
  const columns = Object.keys(episode ? episode.columns : {});
  const arrow = at.down ? "\u2193" : "\u2191";
  choices("sorts", columns.map(c => c === at.sort ? `${c} ${arrow}` : c), i => columns[i] === at.sort,
    i => { at.down = at.sort === columns[i] && !at.down; at.sort = columns[i]; at.place = 0; });
  $("where").textContent = `${found.length ? at.place + 1 : 0} of ${found.length}`;
  Object.assign($("place"), {max: Math.max(1, found.length), value: at.place + 1});
  $("facts").textContent = episode ? episode.facts : "No episode is left.";
  $("asked").textContent = episode ? episode.asked : "";
  $("strip").replaceChildren(); $("table").replaceChildren();
  if (episode) { strip(episode, $("strip")); if (open) table(episode, $("table")); } };

const step = by => { const n = listed().length; if (n) at.place = (at.place + by + n) % n; show(); };
const turn = by => { const n = data.shelves.length; at.shelf = (at.shelf + by + n) % n; show(); };
$("previous").onclick = () => step(-1);
$("next").onclick = () => step(1);
$("place").oninput = e => { at.place = e.target.value - 1; show(); };
$("find").oninput = e => { at.find = e.target.value; at.place = 0; show(); };
$("cut").onchange = e => { at.cut = e.target.checked; at.place = 0; show(); };
$("all").ontoggle = show;
document.addEventListener("keydown", e => {
  if (e.ctrlKey || e.metaKey || e.altKey) return;
  const typing = e.target.tagName === "INPUT" && e.target.type !== "checkbox";
  const scrolls = e.target.classList.contains("wide");
  if (typing || (scrolls && e.key.startsWith("Arrow"))) return;
  const keys = {ArrowRight: [step, 1], n: [step, 1], ArrowLeft: [step, -1], p: [step, -1],
    ".": [turn, 1], ",": [turn, -1]};
  if (keys[e.key]) { keys[e.key][0](keys[e.key][1]); e.preventDefault(); }
  if (/^[1-9]$/.test(e.key) && $("signals").children[e.key - 1]) $("signals").children[e.key - 1].click(); });
data.jumps.forEach(jump => press(make("li", undefined, $("jumps")), jump.name, false, () => {
  Object.assign(at, {shelf: jump.shelf, place: jump.place, sort: "", find: "", cut: false});
  $("find").value = ""; $("cut").checked = false; show(); $("facts").scrollIntoView(); }));
if (data.jumps.length) $("suspects").hidden = false;
$("shelfbox").hidden = data.shelves.length < 2;
show();
$("plain").remove();
$("app").hidden = false;
