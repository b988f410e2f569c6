"""The rollout on the site's first page: that it is whole, and can still be opened."""

import json
import sys
from pathlib import Path

import numpy as np
from packs import unpacked
from PIL import Image, ImageStat
from test_viewer import read_page

from rlhf_nb.ui.what_if import page_recipe
from rlhf_nb.update import Objective

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs"))

from hero import DATA, PICTURES, write_page


# catches: data of an older form, an update of which episodes are missing, a what-if that cannot be
# computed, facts that are not coloured
def test_the_rollout_of_the_first_page(tmp_path):
    _, data = read_page(write_page(tmp_path / "hero.html"))
    assert [one["name"] for one in data["updates"]] == ["0", "7", "23"]
    for one in data["updates"]:
        header, rows = unpacked(one["packed"])
        assert len(header["episodes"]) == header["of"] == 256
        assert {*header["recipe"]} == {*page_recipe(Objective())}
        assert {"unpenalized", "asks", "clip", "answers"} <= {*header} and "widths" in rows
        assert all("facts" in prompt for prompt in header["prompts"])
        assert all(np.isfinite(row).all() for name in ("logprobs", "values") for row in rows[name])
    assert all(curve["svg"].startswith("<svg") for curve in data["curves"])
    assert {"raw score", "KL", "gold wins"} <= {curve["name"] for curve in data["curves"]}


def test_the_pictures_are_small():
    assert sum(path.stat().st_size for path in PICTURES.values()) < 2_000_000
    assert DATA.stat().st_size < 300_000
    assert json.loads(DATA.read_text())["head"]["title"] == "One run of rlhf-nb demo"
    assert all(path.read_bytes()[:6] == b"GIF89a" for path in PICTURES.values())


# catches: the same picture twice, or the dark one on a light page
def test_one_picture_is_light_and_one_is_dark():
    shade = {}
    for scheme, path in PICTURES.items():
        with Image.open(path) as picture:
            shade[scheme] = ImageStat.Stat(picture.convert("L")).mean[0]
    assert shade["light"] > 200 and shade["dark"] < 60, shade
