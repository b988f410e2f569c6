"use strict";
const $ = id => document.getElementById(id), data = JSON.parse($("data").textContent);
const at = {shelf: data.start, place: 0, signal: data.signal, sort: "", down: false, find: "", cut: false};
const make = (tag, text, parent, more) => {
  const node = Object.assign(document.createElement(tag), more || {});
  if (text !== undefined) node.textContent = text;
  if (parent) parent.append(node);
  return node; };
const number = text => text === "+inf" ? Infinity : text === "-inf" ? -Infinity : parseFloat(text);
const minus = text => text.replaceAll("-", "\u2212");
const tint = (v, most) => {
  if (!(most > 0) || Number.isNaN(v)) return "#ffffff";
  const share = Math.min(Math.abs(v) / most, 1), end = v > 0 ? [244, 162, 89] : [122, 176, 232];
  return `rgb(${end.map(e => Math.round(255 + share * (e - 255))).join()})`; };
const row = (episode, name) => (episode.rows[name] || "").split(" ").filter(Boolean);
const largest = numbers => Math.max(0, ...numbers.map(number).map(Math.abs).filter(Number.isFinite));
const listed = () => {
  const words = at.find.toLowerCase(), key = e => e.columns[at.sort] ?? -Infinity;
  const kept = data.shelves[at.shelf].episodes.filter(e =>
    (e.asked + "\n" + e.text).toLowerCase().includes(words) && !(at.cut && e.columns.stopped));
  if (at.sort) kept.sort((a, b) => (at.down ? -1 : 1) * (key(a) - key(b)));
  return kept; };
const press = (box, name, on, act) => {
  const made = make("button", name, box, {type: "button", onclick: act});
  made.setAttribute("aria-pressed", on);
  return made; };
const choices = (id, names, is, act) => {
  const had = $(id).contains(document.activeElement) ? [...$(id).children].indexOf(document.activeElement) : -1;
  $(id).replaceChildren();
  names.forEach((name, i) => press($(id), name, is(i), () => { act(i); show(); }));
  if (had >= 0 && $(id).children[had]) $(id).children[had].focus(); };
