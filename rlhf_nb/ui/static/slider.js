export default { render({ model, el }) {
  const [name, input, shown] = ["label", "input", "span"].map(tag => document.createElement(tag));
  const written = at => {
    const [, digits, kind] = /^\.(\d+)(f|g)$/.exec(model.get("readout_format")) || [];
    return kind === "f" ? (+at).toFixed(digits) : kind === "g" ? String(+(+at).toPrecision(digits)) : String(at);
  };
  const write = at => { shown.textContent = written(at); input.setAttribute("aria-valuetext", written(at)); };
  const draw = () => {
    name.textContent = model.get("description");
    for (const one of ["disabled", "min", "max", "step", "value"]) input[one] = model.get(one);
    write(model.get("value"));
  };
  const send = () => { model.set("value", Number(input.value)); model.save_changes(); };
  el.classList.add("widget-inline-hbox", "widget-slider");
  name.className = "widget-label";
  shown.className = "widget-readout";
  name.style.width = model.get("style").get("description_width") || "";  // ipywidgets may have looked too early
  input.type = "range";
  input.id = name.htmlFor = `slider-${crypto.getRandomValues(new Uint32Array(2)).join("")}`;  // one a view
  input.dataset.lmSuppressShortcuts = "true";  // else JupyterLab takes the arrow keys
  input.style.cssText = "flex: 1 1 auto; min-width: 4em; align-self: center; accent-color: var(--jp-brand-color1)";
  input.oninput = () => { write(input.value); if (model.get("continuous_update")) send(); };
  input.onchange = send;
  for (const one of ["value", "min", "max", "step", "description", "disabled"]) model.on(`change:${one}`, draw);
  el.append(name, input, shown);
  draw();
} };
