"""The pictures of the README: a post with two answers, which the site's first page shows too, an
answer of a real model before and after, and badges; and the badge on pages that open in Colab.

    python docs/post.py data runs/mini_tldr  docs/post.json, from a whole run of `rlhf-nb demo`
    python docs/post.py pictures             the drawings in docs/static and nbs

The post is chosen by a rule: the first test post on which PPO gained as many gold points over SFT
as on the median one. So is the real model's request, by the gain in sentiment.
"""

from __future__ import annotations

import argparse
import configparser
import json
import re
from html import escape
from pathlib import Path

HERE = Path(__file__).resolve().parent
DATA, STATIC = HERE / "post.json", HERE / "static"
REAL = HERE.parent / "benchmarks" / "results" / "real_model.json"
THEME = HERE.parent / "rlhf_nb" / "ui" / "static" / "theme.css"
CHAR, LINE, LEFT, COLUMNS = 8.4, 26, 108, 84  # pixels, and letters a line, of the picture
DRAWN = '<text x="{x:.1f}" y="{y}" textLength="{width:.1f}"{style}>{text}</text>'
GROUND = '<rect class="{kind}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="20" rx="4"/>'


def write_data(run: Path) -> None:
    "The post, its reference and both models' summaries, from the run's tables of completions."
    from rlhf_nb.ui.verdict import completions_of_run

    frame = completions_of_run(run)
    gain = frame["gold_ppo"] - frame["gold_sft"]
    row = frame.loc[gain[gain == gain.sort_values().iloc[len(gain) // 2]].index[0]]
    kept = {name: row[name].strip() for name in ("query", "reference", "text_sft", "text_ppo")}
    text = json.dumps(kept | dict(posts=len(frame)), indent=1, ensure_ascii=False)
    DATA.write_text(text + "\n", encoding="utf-8")


def colours() -> str:
    "The colours of the theme, for a picture: light, and dark where the system is."
    found = re.findall(r"(--[\w-]+): light-dark\((#\w+), (#\w+)\)", THEME.read_text("utf-8"))
    light, dark = ("".join(f"{name}:{pair[i]};" for name, *pair in found) for i in (0, 1))
    return f"svg{{{light}}}@media(prefers-color-scheme:dark){{svg{{{dark}}}}}"


def drawn_line(words: list[tuple[str, str]], y: int) -> str:
    "Words with their kinds, from left to right."
    parts, x = [], float(LEFT)
    for word, kind in words:
        width = len(word) * CHAR
        if kind in ("covered", "invented", "missing"):
            parts.append(GROUND.format(kind=kind, x=x - 3, y=y - 15, width=width + 6))
        style = ' class="fact"' if kind == "fact" else ""
        parts.append(DRAWN.format(x=x, y=y, width=width, style=style, text=escape(word)))
        x += width + CHAR
    return "".join(parts)


def broken(words: list[tuple[str, str]]) -> list[list[tuple[str, str]]]:
    "Words in lines that fit."
    lines: list[list[tuple[str, str]]] = [[]]
    for word in words:
        if sum(len(other) + 1 for other, _ in lines[-1]) + len(word[0]) > COLUMNS:
            lines.append([])
        lines[-1].append(word)
    return lines


def lines_of(text: str, facts: dict[str, str], judged: bool) -> list[list[tuple[str, str]]]:
    """Lines of words with what each is: in a post a fact; in a summary covered or invented, and
    below it what is missing."""
    from rlhf_nb.ui.facts import claims_of

    found: list[tuple[str, str]] = []
    claims = claims_of(text, facts)
    for word in text.split():
        bare = re.sub(r"\W", "", word)
        if not judged:
            found.append((word, "fact" if bare in facts.values() else ""))
        elif bare in claims["covered"] + claims["invented"]:
            true = bare in claims["covered"]
            found.append((word + ("✓" if true else "✗"), "covered" if true else "invented"))
        else:
            found.append((word, ""))
    missing = [(f"{slot}: {facts[slot]}", "missing") for slot in claims["missing"]]
    return broken(found) + (broken([("missing:", ""), *missing]) if judged and missing else [])


def drawn_picture(title: str, parts: list[tuple[str, list[list[tuple[str, str]]]]]) -> str:
    "Texts below one another, each with who wrote it and its lines of words."
    y, body = 36, []
    for who, lines in parts:
        body.append(f'<text x="20" y="{y}" class="who">{who}</text>')
        for line in lines:
            body.append(drawn_line(line, y))
            y += LINE
        y += 14
    return (HERE / "templates" / "post.svg").read_text("utf-8").format(
        width=int(LEFT + (COLUMNS + 2) * CHAR), height=y - 14, colours=colours(),
        title=escape(title), body="\n".join(body),
    )  # fmt: skip


def post_picture() -> str:
    "The post above both summaries; what the gold judge counts in them is marked."
    from rlhf_nb.ui.facts import facts_told

    kept = json.loads(DATA.read_text("utf-8"))
    facts = facts_told(kept["query"])
    assert facts, "the post of post.json is not of the mini world"
    post = kept["query"].split("POST: ")[1].split("\n")[0]
    texts = {"A post": post, "SFT": kept["text_sft"], "PPO": kept["text_ppo"]}
    title = f"A post, and its summaries by SFT ({kept['text_sft']}) and PPO ({kept['text_ppo']})"
    parts = [(who, lines_of(text, facts, who != "A post")) for who, text in texts.items()]
    return drawn_picture(title, parts)


def median_request() -> tuple[str, list[tuple[str, float]]]:
    "A held-out request, and the real model's answer before and after, each with its score."
    from rlhf_nb.real import everyday_requests

    kept = json.loads(REAL.read_text("utf-8"))
    looks = [kept["before"], kept["runs"]["rule, kl_coef 0.05, seed 0"]["after"]]
    before, after = (look["scores"] for look in looks)
    gains = [b - a for a, b in zip(before, after)]
    i = gains.index(sorted(gains)[len(gains) // 2])
    request = everyday_requests()["test"]["prompt"][i][0]["content"]
    return request, [(look["texts"][i], look["scores"][i]) for look in looks]


def answers_picture() -> str:
    "That request above both answers, each with its score."
    request, answers = median_request()
    before, after = (f"{text.strip()} … ({score:+.2f})" for text, score in answers)
    texts = {"A request": request, "Before": before, "After PPO": after}
    title = f"A request, and a real model's answer before ({before}) and after PPO ({after})"
    parts = [(who, broken([(word, "") for word in text.split()])) for who, text in texts.items()]
    return drawn_picture(title, parts)


def badge(name: str, value: str) -> str:
    "A badge, drawn here: no picture is fetched from anywhere."
    left, right = (len(text) * 6.6 + 16 for text in (name, value))
    return (HERE / "templates" / "badge.svg").read_text("utf-8").format(
        name=escape(name), value=escape(value), left=left, right=right, width=left + right,
        first=left / 2, second=left + right / 2, name_width=left - 16, value_width=right - 16,
    )  # fmt: skip


def pictures() -> dict[Path, str]:
    "Each picture's path and text."
    ini = configparser.ConfigParser()
    ini.read(HERE.parent / "settings.ini", encoding="utf-8")
    settings = ini["DEFAULT"]
    badges = dict(
        python=("Python", f"{settings['min_python']} or newer"),
        licence=("licence", {"apache2": "Apache 2.0"}[settings["license"]]),
        version=("version", settings["version"]),
    )
    found = {STATIC / f"badge-{name}.svg": badge(*texts) for name, texts in badges.items()}
    colab = HERE.parent / "nbs" / "colab.svg"  # in reach of pages where nbs/ is all that is served
    drawn = {STATIC / "post.svg": post_picture(), STATIC / "real-answer.svg": answers_picture()}
    return found | drawn | {colab: badge("Colab", "run this page")}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    jobs = parser.add_subparsers(dest="job", required=True)
    jobs.add_parser("data", help="write post.json").add_argument("run", type=Path)
    jobs.add_parser("pictures", help="write the pictures")
    args = parser.parse_args()
    if args.job == "data":
        write_data(args.run)
    else:
        for path, text in pictures().items():
            path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
