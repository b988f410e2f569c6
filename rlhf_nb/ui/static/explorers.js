// Explorers without a kernel: Python drew a picture for every state; this puts controls beside it and shows the one they name.
(() => {
  const made = (tag, set = {}, ...inside) => {
    const one = Object.assign(document.createElement(tag), set);
    one.append(...inside);
    return one;
  };
  let count = 0;

  const unpacked = async text => {
    const bytes = Uint8Array.from(atob(text.trim()), letter => letter.charCodeAt(0));
    const plain = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return JSON.parse(await new Response(plain).text());
  };

  // Each control returns its element and a function that sets it to one of its texts.
  const kinds = {
    range(dial, move) {
      const name = `explorer-${++count}`;
      const input = made("input", { type: "range", id: name, min: 0, max: dial.texts.length - 1, step: 1 });
      const value = made("span", { className: "value", ariaHidden: "true" });
      input.oninput = () => move(Number(input.value));
      const set = at => {
        input.value = at;
        value.textContent = input.ariaValueText = dial.texts[at];
      };
      return [made("div", { className: "control" }, made("label", { htmlFor: name, textContent: dial.label }), value, input), set];
    },
    choice(dial, move) {
      const name = `explorer-${++count}`;
      const inputs = dial.texts.map((text, at) => made("input", { type: "radio", name, onchange: () => move(at) }));
      const labels = inputs.map((input, at) => made("label", { className: "choice" }, input, dial.texts[at]));
      const box = made("fieldset", { className: "control" }, made("legend", { textContent: dial.label }),
        made("div", { className: "buttons" }, ...labels));
      return [box, at => { inputs[at].checked = true; }];
    },
    check(dial, move) {
      const input = made("input", { type: "checkbox", onchange: () => move(Number(input.checked)) });
      return [made("label", { className: "check" }, input, dial.label), at => { input.checked = at === 1; }];
    },
  };

  const start = async root => {
    const { dials, presets, parts, views } = await unpacked(root.querySelector(".states").textContent);
    const [box, view] = [".controls", ".view"].map(name => root.querySelector(name));
    const first = dials.map(dial => dial.start);
    const said = made("p", { className: "said", role: "status" });
    let state = first, timer;

    // What the picture says in words: its name, or its first paragraph.
    const told = () => {
      const drawing = view.querySelector("[aria-label], img[alt]");
      return (drawing?.getAttribute("aria-label") || drawing?.alt || view.querySelector("p")?.textContent || "").slice(0, 400);
    };
    const show = (next, speak = true) => {
      state = next;
      const at = dials.reduce((sum, dial, i) => sum * dial.texts.length + state[i], 0);
      view.innerHTML = views[at].map(i => parts[i]).join("");
      root.dataset.state = state.join(" ");
      controls.forEach(([, set], i) => set(state[i]));
      buttons.forEach((button, i) => { button.ariaPressed = String(presets[i].at.join() === state.join()); });
      clearTimeout(timer);  // a held key is not read out at every step
      if (speak) timer = setTimeout(() => { said.textContent = told(); }, 400);
    };
    const controls = dials.map((dial, i) => kinds[dial.kind](dial, at => show(state.with(i, at))));
    const buttons = presets.map(preset => made("button", { type: "button", textContent: preset.name, onclick: () => show(preset.at) }));
    const reset = made("button", { type: "button", textContent: "Reset", onclick: () => show(first) });
    const group = made("div", { className: "buttons", role: "group", ariaLabel: "Presets" }, ...buttons, reset);
    box.replaceChildren(group, ...controls.map(([element]) => element), said);
    show(first, false);
  };

  for (const root of document.querySelectorAll(".rlhf-explorer"))
    start(root).catch(error => { root.querySelector(".note").textContent = `The controls need a newer browser (${error.message}). The notebook has them too.`; });
})();
