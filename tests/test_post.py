"""The post and the badges of the README: that they say what the run and the package say."""

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pandas as pd

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs"))

import post


# catches: a version, a licence or a colour that was changed without `python docs/post.py pictures`
def test_the_pictures_are_fresh():
    for path, text in post.pictures().items():
        assert path.read_text("utf-8") == text, f"{path.name}: run `python docs/post.py pictures`"
        assert "http" not in text.replace('xmlns="http://www.w3.org/2000/svg"', "")
        ElementTree.fromstring(text)


# catches: a post picked because it flatters
def test_the_post_is_the_first_with_the_median_gain(tmp_path, monkeypatch):
    gains = [5, 0, 2, 2, -3]  # in order -3 0 2 2 5: the median is 2, and post 2 is the first
    for who in ("sft", "ppo"):
        (tmp_path / "completions").mkdir(exist_ok=True)
        rows = [
            {"query": f"post {i}", "model response": f"{who} {i}", "score": 0.0,
             "gold": gain if who == "ppo" else 0, "reference": "r"}
            for i, gain in enumerate(gains)
        ]  # fmt: skip
        pd.DataFrame(rows).to_csv(tmp_path / "completions" / f"{who}.csv", index=False)
    monkeypatch.setattr(post, "DATA", tmp_path / "post.json")
    post.write_data(tmp_path)
    kept = json.loads((tmp_path / "post.json").read_text())
    assert kept == dict(query="post 2", reference="r", text_sft="sft 2", text_ppo="ppo 2", posts=5)


# catches: marks that say otherwise than the judge: every fact of the post is covered or missing
def test_what_the_picture_marks():
    from rlhf_nb.ui.facts import facts_told

    kept = json.loads(post.DATA.read_text("utf-8"))
    facts = facts_told(kept["query"])
    for who in ("text_sft", "text_ppo"):
        words = [w for line in post.lines_of(kept[who], facts, True) for w in line]
        covered = {word for word, kind in words if kind == "covered"}
        missing = {word for word, kind in words if kind == "missing"}
        assert len(covered) + len(missing) == len(facts) and covered
        assert not [word for word, kind in words if kind == "invented"]
