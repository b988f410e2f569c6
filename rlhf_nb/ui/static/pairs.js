const order = {"worst mistakes first": p => p.margin, "closest calls first": p => Math.abs(p.margin),
  "surest first": p => -p.margin, "as given": p => p.number};
const keep = {all: p => true, mistakes: p => !(p.margin > 0), right: p => p.margin > 0};
Object.assign(at, {sort: data.sort, only: data.only, signal: data.signal, find: data.find});
const chosen = () => data.pairs.filter(p => keep[at.only](p)
  && (`Pair ${p.number}\n${p.asked}\n${p.text}`).toLowerCase().includes(at.find.toLowerCase()))
  .sort((a, b) => order[at.sort](a) - order[at.sort](b));
const strip = (name, tokens, numbers, most, box) => {
  make("h3", name, box);
  const list = make("ol", undefined, box, {className: "strip"});
  tokens.forEach((token, t) => {
    const item = make("li", undefined, list);
    make("bdi", token, item);
    make("b", minus(numbers[t]), item).style.background = tint(number(numbers[t]), most); }); };
const show = () => {
  const found = chosen(), pair = found[at.place = Math.max(0, Math.min(at.place, found.length - 1))];
  choices("signals", data.signals, i => data.signals[i] === at.signal, i => { at.signal = data.signals[i]; });
  for (const [id, of, name] of [["sorts", order, "sort"], ["filters", keep, "only"]])
    choices(id, Object.keys(of), i => Object.keys(of)[i] === at[name],
      i => { at[name] = Object.keys(of)[i]; at.place = 0; });
  $("where").textContent = `${found.length ? at.place + 1 : 0} of ${found.length}`;
  $("facts").textContent = pair ? pair.facts : "No pair is left.";
  $("asked").textContent = pair ? pair.asked : "";
  $("strip").replaceChildren();
  if (!pair) return;
  const rows = pair.rows.map(row => row[at.signal].split(" "));
  const most = largest(rows.flat());
  rows.forEach((row, i) => strip(["Chosen", "Rejected"][i], pair.tokens[i], row, most, $("strip")));
  make("p", `${at.signal}: full colour at ${most.toPrecision(3)}`, $("strip")); };
const step = by => { const n = chosen().length; if (n) at.place = (at.place + by + n) % n; show(); };
$("previous").onclick = () => step(-1);
$("next").onclick = () => step(1);
$("find").value = at.find;
$("find").oninput = e => { at.find = e.target.value; at.place = 0; show(); };
show();
$("plain").remove();
$("app").hidden = false;
