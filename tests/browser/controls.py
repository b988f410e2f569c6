"""The widgets of a page, found by looking at it, and a hand for each of their controls: one on the
keyboard, one on the mouse.

A control is alive where the rest of its widget changes when it is worked. It may be deaf in a
given state (a clip range while nothing is clipped): so it is tried over several positions, and
then again and again with its neighbours moved, before it counts as dead.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from lab import Notebook
from playwright.sync_api import ElementHandle

ATTEMPTS = 10  # states of the neighbours in which a control may come alive
LINGER = 300  # milliseconds that a view may take once the kernel is done

# What all scripts share. `own`: the box of a control with its label and readout, which its own
# movement changes; nothing for a button, whose text may answer.
SHARED = """
const WORKED = '.noUi-handle, select, input, textarea, button, summary, [role=button]';
const shown = e => e.getClientRects().length > 0 && e.checkVisibility({visibilityProperty: true});  // not in a closed fold
const kind = e => e.matches('.noUi-handle') ? 'slider' : e.matches('select') ? 'menu' : e.matches('summary') ? 'fold'
  : e.matches('.widget-toggle-buttons button') ? 'choice' : e.matches('input[type=checkbox]') ? 'check' : e.matches('input[type=range]') ? 'range'
  : e.matches('textarea, input:not([type=button]):not([type=submit])') ? 'text' : 'button';
const own = e => kind(e) === 'button' || kind(e) === 'fold' ? null
  : e.closest('.widget-toggle-buttons, .widget-inline-hbox, .jupyter-widgets:not(.widget-container):not(.widget-html)') || e;
const controls = root => [...root.querySelectorAll(WORKED)].filter(e => shown(e) && !e.disabled);
const plain = e => (e?.innerText || '').replace(/[\\s\u200b]+/g, ' ').trim();  // ipywidgets fills an empty label with a space of no width
const label = e => plain((own(e) || e).querySelector?.(':scope > .widget-label, :scope > label'));
const told = e => ['button', 'fold'].includes(kind(e)) ? plain(e)
  : label(e) || [...(e.labels || [])].map(plain).join(' ').trim() || (kind(e) === 'check' && own(e) !== e ? plain(own(e)) : '');
const said = e => { const t = told(e) || e.getAttribute('aria-label') || e.title || plain({innerText: e.placeholder}) || ''; return kind(e) === 'choice' ? t + ': ' + plain(e) : t; };
const state = e => ({slider: () => e.getAttribute('aria-valuetext') + '', menu: () => [...e.selectedOptions].map(o => o.index).join(), fold: () => e.parentElement.open + '',
  choice: () => e.classList.contains('mod-active') + '', check: () => e.checked + '', range: () => e.value, text: () => e.value})[kind(e)]?.() ?? null;
"""


def script(function: str) -> str:
    "A function of JavaScript that knows what is shared."
    return f"(...given) => {{ {SHARED} return ({function})(...given); }}"


OUTPUTS = script("""() => [...document.querySelectorAll('.jp-Cell-outputArea .jp-OutputArea-output')]
  .filter(e => !e.parentElement.closest('.jp-OutputArea-output') && (e.querySelector('.jupyter-widgets') || controls(e).length))""")
STILL = script("""() => [...document.querySelectorAll('.jp-Cell-outputArea .jp-OutputArea-output.jp-RenderedHTML')]
  .filter(e => !controls(e).length && plain(e))""")
LIST = script("""root => { const seen = {}; return controls(root).map(e => { const about = kind(e) + ' ' + JSON.stringify(said(e));
  seen[about] = (seen[about] || 0) + 1;
  return {kind: kind(e), key: about + (seen[about] > 1 ? ' no. ' + seen[about] : ''), group: label(e), state: state(e), told: told(e)}; }); }""")
HEARD = script("root => controls(root).map(e => [e.computedRole, e.computedName])")
PICK = script("(root, i) => controls(root)[i]")
FOCUSED = script("""root => { const e = document.activeElement;
  return [root.contains(e), controls(root).indexOf(e)]; }""")
SENTINEL = (
    "root => { const s = document.createElement('span'); s.tabIndex = 0; s.className = "
    "'above-the-widget'; root.prepend(s); s.focus(); }"
)
# What sticks out of the widget on the right, where nothing scrolls but, perhaps, the widget as a
# whole. Nothing that stands in a part that sticks out already.
CUT = script("""root => { const edge = Math.min(root.getBoundingClientRect().right, document.documentElement.clientWidth) + 1;
  const scrolls = e => e !== root && (['auto', 'scroll'].includes(getComputedStyle(e).overflowX) && !e.matches('.jupyter-widgets, .lm-Widget') || scrolls(e.parentElement));
  const out = [...root.querySelectorAll('*')].filter(e => { const box = e.getBoundingClientRect(); return shown(e) && box.width > 1 && box.height > 1 && box.right > edge && !scrolls(e.parentElement); });
  return out.filter(e => !out.includes(e.parentElement)).map(e => `${e.tagName} ${e.getAttribute('class') || ''} ${plain(e).slice(0, 60)}`); }""")
# Names that end in three dots.
DOTS = script(
    """root => [...root.querySelectorAll('.widget-label, button')].filter(e => shown(e) && e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).textOverflow === 'ellipsis').map(plain)"""
)
# All that a person could see of the widget, but for the control itself and for who has the focus.
SIGN = script("""(root, i) => {
  const skip = own(controls(root)[i]), out = [];
  const walk = n => {
    if (n === skip) return;
    if (n.nodeType === 3) { out.push(n.data); return; }
    if (n.nodeType !== 1) return;
    out.push('<', n.tagName);
    for (const a of n.attributes) {
      if (/^(id|tabindex|for|data-|aria-activedescendant)/.test(a.name)) continue;
      out.push(a.name, a.name === 'class' ? a.value.split(/\\s+/).filter(c => !/focus|hover|noUi-(active|state)|lm-mod-|jp-mod-/.test(c)).sort().join(' ') : a.value);
    }
    if ('value' in n) out.push(n.value + ''); if ('checked' in n) out.push(n.checked + '');
    if (n.tagName === 'CANVAS') out.push(n.toDataURL());
    n.childNodes.forEach(walk); out.push('>');
  };
  walk(root);
  let a = 0xdeadbeef, b = 0x41c6ce57; const text = out.join('\\u0001');
  for (let k = 0; k < text.length; k++) { const c = text.charCodeAt(k); a = Math.imul(a ^ c, 2654435761); b = Math.imul(b ^ c, 1597334677); }
  return text.length + ':' + (a >>> 0) + ':' + (b >>> 0);
}""")


@dataclass
class Widget:
    "One output that has something to work, or a widget, in it."

    notebook: Notebook
    root: ElementHandle
    number: int
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    # ---- What is there ----

    def controls(self) -> list[dict]:
        "kind, key (what a reader of a failure sees) and state of each control, in reading order."
        return self.root.evaluate(LIST)

    def at(self, key: str) -> int:
        "Where a control is now: a new drawing has new elements. LookupError where it is gone."
        for i, one in enumerate(self.controls()):
            if one["key"] == key:
                return i
        raise LookupError(f"{key} is gone from the page.")

    def element(self, key: str) -> ElementHandle:
        return self.root.evaluate_handle(PICK, self.at(key)).as_element()

    def look(self, key: str) -> tuple[str, str | None]:
        "The rest of the widget, and the state of the control itself."
        i = self.at(key)
        return self.root.evaluate(SIGN, i), self.controls()[i]["state"]

    # ---- Working it ----

    def answers(self, key: str, move: Callable[[ElementHandle], None]) -> tuple[bool, bool]:
        "Do one thing. Did the rest of the widget change, and did the control itself?"
        view, state = self.look(key)
        move(self.element(key))
        for waited in range(0, LINGER, 100):
            self.notebook.settle()
            try:
                view_now, state_now = self.look(key)
            except LookupError:
                return True, True  # it took itself off the page: an answer
            if view_now != view:
                return True, state_now != state
            self.notebook.page.wait_for_timeout(100 if waited else 20)
        return False, state_now != state

    def works(self, key: str, kind: str, way: str) -> str:
        """Nothing if it works in one of several states; else what was tried in vain. What was
        written into a field is taken out again: it may have left nothing to look at."""
        before, moved, start = self.look(key)[1], False, self.states()
        for attempt in range(ATTEMPTS):
            if attempt and not self.disturb(key, attempt):
                break
            for move in self.moves(key, kind, way):
                view, own = self.answers(key, move)
                moved |= own
                if view and (own or kind in ("button", "text")):  # a field may empty itself
                    if kind == "text" and before is not None:
                        self.write(before, way)(self.element(key))
                        self.notebook.settle()
                    return ""
        what = "it moves, and nothing else changes" if moved else "nothing happens"
        return f"{key} by {way}: {what}, in {attempt + 1} states: {start} ... {self.states()}"

    def states(self) -> str:
        return " ".join(f"{c['key']}={c['state']}" for c in self.controls() if c["state"])

    def disturb(self, key: str, turn: int) -> bool:
        "Move a neighbour by the keyboard, in turn, a group of choices as one. False without any."
        mine, groups = next((c["group"] for c in self.controls() if c["key"] == key), ""), {}
        for c in self.controls():
            if c["key"] == key or c["kind"] not in ("slider", "range", "check", "choice", "menu"):
                continue
            if c["kind"] != "choice":
                groups[c["key"]] = [c]
            elif c["group"] != mine:
                groups.setdefault(("group", c["group"]), []).append(c)
        if not groups:
            return False
        one = self.rng.choice(list(groups.values())[turn % len(groups)])
        moves = list(self.moves(one["key"], one["kind"], "keyboard"))
        # Enter leaves a box as it is.
        self.rng.choice(moves[:1] if one["kind"] == "check" else moves)(self.element(one["key"]))
        self.notebook.settle()
        return True

    def moves(self, key: str, kind: str, way: str) -> Iterator[Callable[[ElementHandle], None]]:
        "What a hand can do with a control of this kind."
        page = self.notebook.page

        def press(*keys: str) -> Callable[[ElementHandle], None]:
            def act(e: ElementHandle) -> None:
                e.scroll_into_view_if_needed()
                e.focus()
                for one in keys:
                    page.keyboard.press(one)

            return act

        click = lambda e: e.click()
        if kind == "text":
            return (self.write(text, way) for text in ["1", "2", "0", "a", *self.words()])
        if kind == "choice":
            return iter([self.away_first(key, press("Space") if way == "keyboard" else click, way)])
        if way == "mouse":
            if kind == "slider":
                return map(self.drag, (0.9, 0.1, 0.5, 0.99, 0.01))
            if kind == "range":
                return (lambda e, x=x: self.tap(e, x) for x in (0.9, 0.1, 0.5))
            # The list of a native menu is drawn by the system, out of the reach of a headless
            # mouse: the choice alone can be made.
            if kind == "menu":
                return (
                    lambda e, k=k: e.select_option(index=k)
                    for k in range(len(self.element(key).query_selector_all("option")))
                )
            return iter([click, click])
        if kind in ("slider", "range"):
            return map(press, ("ArrowRight", "ArrowLeft", "End", "Home", "PageUp"))
        if kind == "menu":
            return map(press, ("ArrowDown", "ArrowDown", "ArrowUp", "Home", "End"))
        return iter([press("Space"), press("Enter")])

    def write(self, text: str, way: str) -> Callable[[ElementHandle], None]:
        "Put a text into a field, in place of what is in it."
        keyboard = self.notebook.page.keyboard

        def act(e: ElementHandle) -> None:
            e.focus() if way == "keyboard" else e.click()
            keyboard.press("Control+A")
            keyboard.press("Delete")
            keyboard.type(text)
            keyboard.press("Enter")
            e.evaluate("e => e.blur()") if e.evaluate("e => e.isConnected") else None

        return act

    def words(self) -> list[str]:
        "Two words that stand in the widget: what one might look for in it."
        found = sorted(set(self.root.inner_text().split()), key=len)
        return found[-1:] + found[len(found) // 2 :][:1]

    def away_first(
        self, key: str, act: Callable[[ElementHandle], None], way: str
    ) -> Callable[[ElementHandle], None]:
        "A choice that is on already cannot be chosen: choose a neighbour before."
        me = self.controls()[self.at(key)]
        others = [
            c["key"]
            for c in self.controls()
            if c["kind"] == "choice" and c["group"] == me["group"] and c["key"] != key
        ]
        if me["state"] == "true" and others:
            act(self.element(self.rng.choice(others)))
            self.notebook.settle()
        return act

    def drag(self, to: float) -> Callable[[ElementHandle], None]:
        "Take a slider's handle and let go of it at this share of its track."

        def act(handle: ElementHandle) -> None:
            handle.scroll_into_view_if_needed()
            mouse, grip = self.notebook.page.mouse, handle.bounding_box()
            track = (
                handle.evaluate_handle("e => e.closest('.noUi-base')").as_element().bounding_box()
            )
            mouse.move(grip["x"] + grip["width"] / 2, grip["y"] + grip["height"] / 2)
            mouse.down()
            mouse.move(track["x"] + to * track["width"], grip["y"] + grip["height"] / 2, steps=4)
            mouse.up()

        return act

    @staticmethod
    def tap(element: ElementHandle, at: float) -> None:
        box = element.bounding_box()
        element.click(position=dict(x=at * box["width"], y=box["height"] / 2))

    # ---- Access ----

    def beyond_tab(self) -> list[str]:
        "Controls that the Tab key does not come to, from just above the widget to just below it."
        page, wanted, reached = self.notebook.page, self.controls(), set()
        self.root.evaluate(SENTINEL)
        for _ in range(len(wanted) * 3 + 20):
            page.keyboard.press("Tab")
            inside, i = self.root.evaluate(FOCUSED)
            if not inside:
                break
            if i >= 0:
                reached.add(i)
        self.root.evaluate("root => root.querySelector('.above-the-widget').remove()")
        return [
            f"{c['key']}: not reached by Tab." for i, c in enumerate(wanted) if i not in reached
        ]

    # ---- All of it ----

    def dead(self) -> list[str]:
        "Each control by keyboard, then by mouse: those that change nothing, and what was tried."
        found = []
        for way in ("keyboard", "mouse"):
            for one in self.controls():
                try:
                    told = self.works(one["key"], one["kind"], way)
                except LookupError:
                    continue  # another one took it away meanwhile, as a button may
                if told:
                    found.append(told)
        return found


def nameless(found: list[Widget]) -> list[str]:
    "Controls without a name for those who listen, or a description for those who look."
    told = []
    heard = [each for one in found for each in zip(one.controls(), one.root.evaluate(HEARD))]
    for c, (role, name) in heard:
        # the glyph of an icon font is no name
        if not any(ord(x) > 32 and not 0xE000 <= ord(x) <= 0xF8FF for x in name):
            told.append(f"{c['key']}: no accessible name (role {role}).")
        if not c["told"]:
            told.append(f"{c['key']}: no visible description.")
    return told


def misfits(found: list[Widget], width: int) -> list[str]:
    "What is cut off on the right, or ends in three dots."
    return [
        f"widget {one.number}, {width} px wide: {what}: {each}"
        for one in found
        for what, look in (("cut off on the right", CUT), ("three dots at the end of", DOTS))
        for each in one.root.evaluate(look)
    ]


def photograph(found: list[Widget], width: int, name: str) -> list[str]:
    """Each widget as a file, {} in its name for the widget's number; its misfits. The window grows
    until all of it is in there: a part that is scrolled away is not in a picture."""
    if not found:
        return []
    notebook = found[0].notebook
    notebook.widen(width, 1000)
    tall = max(round(one.root.bounding_box()["height"]) + 250 for one in found)
    notebook.widen(width, min(8000, max(1000, tall)))
    told = misfits(found, width)
    for one in found:
        one.root.screenshot(path=name.format(one.number))
    notebook.widen(1280, 1000)
    return told


# Lab clips what is scrolled away, at every level of the page, and axe-core takes that for hidden:
# all is let out of its boxes while it looks.
AXE = """async () => { const include = [...document.querySelectorAll('[data-asked]')], boxes = new Map();
  if (!include.length) return [];
  for (const one of include) for (let e = one.parentElement; e && !boxes.has(e); e = e.parentElement) boxes.set(e, e.style.cssText);
  for (const e of boxes.keys()) for (const [name, value] of [['overflow', 'visible'], ['contain', 'none']]) e.style.setProperty(name, value, 'important');
  const found = await axe.run({include}, {resultTypes: ['violations', 'incomplete'], iframes: false});
  for (const [e, style] of boxes) e.style.cssText = style;
  const unseen = found.incomplete.filter(v => v.id === 'color-contrast')  // ink of the colour of its ground: axe-core leaves it to us whether that is meant
    .map(v => ({...v, nodes: v.nodes.filter(n => n.any.some(c => c.data?.messageKey === 'equalRatio'))}));
  return [...found.violations, ...unseen].filter(v => ['serious', 'critical'].includes(v.impact))
    .flatMap(v => v.nodes.map(n => [v.id, n.target.join(' '), n.html.slice(0, 200), n.failureSummary])); }"""


def violations(found: list[Widget]) -> list[str]:
    """What axe-core calls serious or critical inside the widgets. Its script is in the page
    already, and reads the whole page for each question: so one is asked."""
    for one in found:
        one.root.evaluate("e => { e.dataset.asked = ''; }")
    told = found[0].notebook.page.evaluate(AXE) if found else []
    for one in found:
        one.root.evaluate("e => e.removeAttribute('data-asked')")
    return [
        f"{rule} {'.noUi-handle' if 'noUi-handle' in markup else where}: {markup} "
        f"{' '.join(why.split())}"
        for rule, where, markup, why in told
    ]


def widgets(notebook: Notebook) -> list[Widget]:
    "Every widget that the page shows, found by looking: outputs with controls in them."
    roots = notebook.page.evaluate_handle(OUTPUTS).get_properties().values()
    return [Widget(notebook, root.as_element(), i) for i, root in enumerate(roots, 1)]


def still(notebook: Notebook) -> list[Widget]:
    "The other markup that cells have displayed: tables and strips, with nothing in them to work."
    return [
        Widget(notebook, root.as_element(), 1000 + i)
        for i, root in enumerate(notebook.page.evaluate_handle(STILL).get_properties().values())
    ]
