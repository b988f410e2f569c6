// Pairs of answers under a reward model. It is joined behind the reader's module, whose functions it uses.
const pairsPage = data => {
  const $ = id => document.getElementById(id), at = { ...data.look, place: 0 };
  const order = { "worst mistakes first": p => p.margin, "closest calls first": p => Math.abs(p.margin),
    "surest first": p => -p.margin, "as given": p => p.number };
  const keep = { all: p => true, mistakes: p => !(p.margin > 0), right: p => p.margin > 0 };
  const number = text => ({ inf: Infinity, "-inf": -Infinity })[text] ?? Number(text);
  const numbers = (pair, which) => data.signals.map(name => pair.rows[which][name].split(" ").map(number));

  const chosen = () => {  // a margin that is no number is null, and comes last
    const words = at.find.toLowerCase(), last = p => p.margin === null, key = order[at.sort];
    return data.pairs.filter(p => keep[at.only](p) && `Pair ${p.number}\n${p.asked}\n${p.text}`.toLowerCase().includes(words))
      .sort((a, b) => last(a) - last(b) || key(a) - key(b));
  };

  // ---- The exact numbers of a token, on hover and on focus ----

  const bubble = $("bubble");
  const tell = (token, text) => { bubble.textContent = text; placeBubble(bubble, token); };
  const hush = () => { bubble.hidden = true; };
  const walk = e => {  // from token to token
    const to = { ArrowLeft: "previousElementSibling", ArrowRight: "nextElementSibling" }[e.key], next = to && e.target[to];
    if (!next) return;
    e.target.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
    e.preventDefault();
  };

  // ---- A pair ----

  const answer = (pair, which, most, parent) => {
    const name = ["Chosen", "Rejected"][which], pieces = pair.tokens[which], rows = numbers(pair, which);
    const claims = claimsOf({ prompt: { facts: pair.told }, pieces, text: pieces.join("") }, data.slots);
    make("h2", { parent, text: name });
    const line = make("p", { parent, className: "tinted text", role: "group", ariaLabel: `${name}, token by token`, onkeydown: walk });
    pieces.forEach((piece, t) => {
      const word = piece.trimStart() || piece || "·";
      line.append(piece && piece.slice(0, piece.length - word.length));
      const x = rows[data.signals.indexOf(at.signal)][t], share = Math.min(1, Math.abs(x) / most);
      const step = most > 0 && Number.isFinite(x) ? Math.round(8 * share) : 0;
      const tint = step ? `${x > 0 ? "up" : "down"} tint-${step}` : "";
      const told = () => tell(token, `${piece.trim() || named(piece)}  ${data.signals.map((signal, k) => `${signal} ${exact(rows[k][t])}`).join(" · ")}`);
      const token = make("span", { parent: line, text: word, className: ["token", tint, claims?.marks[t]].filter(Boolean).join(" "), tabIndex: t ? -1 : 0,
        onmouseenter: told, onmouseleave: hush, onfocus: told, onblur: hush });
    });
    if (claims) drawClaims(make("p", { parent, className: "claims" }), claims);
    const fold = make("details", { parent });
    make("summary", { parent: fold, text: `${name}: all numbers` });
    const table = make("table", { parent: fold });
    const head = make("tr", { parent: make("thead", { parent: table }) }), body = make("tbody", { parent: table });
    for (const text of ["token", ...data.signals]) make("th", { parent: head, text, scope: "col" });
    pieces.forEach((piece, t) => {
      const row = make("tr", { parent: body });
      make("bdi", { parent: make("th", { parent: row, scope: "row" }), text: piece.trim() || "␣" });
      for (const one of rows) make("td", { parent: row, text: shown(one[t]), title: exact(one[t]) });
    });
  };
  const prompt = pair => {  // its facts in bold, where it tells them
    const known = new Set(Object.values(pair.told ?? {}));
    $("asked").replaceChildren(...pair.asked.split(/([\p{L}\p{N}_]+)/u).map(text => known.has(text) ? make("strong", { text }) : text));
  };
  const show = () => {
    const found = chosen(), pair = found[at.place = Math.max(0, Math.min(at.place, found.length - 1))];
    $("where").textContent = `${found.length ? at.place + 1 : 0} of ${found.length}`;
    $("facts").textContent = pair ? pair.facts : "No pair is left.";
    for (const part of [$("asked").closest("details"), $("scale")]) part.hidden = !pair;
    $("answers").replaceChildren();
    hush();
    if (!pair) return;
    prompt(pair);
    const most = Math.max(0, ...[0, 1].flatMap(which => numbers(pair, which)[data.signals.indexOf(at.signal)]).filter(Number.isFinite).map(Math.abs));
    $("scale").textContent = data.scale.replace("{signal}", at.signal).replace("{most}", most.toFixed(2));
    for (const which of [0, 1]) answer(pair, which, most, $("answers"));
  };

  // ---- Controls ----

  const step = by => {
    const count = chosen().length;
    if (count) at.place = (at.place + by + count) % count;
    show();
  };
  const go = change => { Object.assign(at, change); show(); };
  $("previous").onclick = () => step(-1);
  $("next").onclick = () => step(1);
  for (const [id, names] of [["signal", data.signals], ["sort", Object.keys(order)], ["only", Object.keys(keep)]]) {
    $(id).append(...names.map(text => make("option", { text, value: text })));
    $(id).value = at[id];
    $(id).onchange = e => go({ [id]: e.target.value, ...(id === "signal" ? {} : { place: 0 }) });
  }
  $("find").value = at.find;
  $("find").oninput = e => go({ find: e.target.value, place: 0 });
  show();
  $("plain").remove();
  $("app").hidden = false;
};
pairsPage(JSON.parse(document.getElementById("data").textContent));
