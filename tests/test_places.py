"""Links from the report into the saved page of rollouts: they lead to what they name, or are not
there."""

import re
from html import unescape
from urllib.parse import parse_qs, urlsplit

import pandas as pd
import pytest
from test_viewer import write_run

from rlhf_nb.rollout import Rollout
from rlhf_nb.ui.reader import NO_PAGE, episode_link, page_link, prompt_link, saved_page
from rlhf_nb.ui.report import report
from rlhf_nb.ui.verdict import posts_section
from rlhf_nb.ui.viewer import browse


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "my run")


def places(markup):
    "What the links of some markup ask the page for."
    links = [urlsplit(unescape(x)) for x in re.findall(r'href="(rollouts\.html[^"]*)"', markup)]
    return [{k: x[0] for k, x in parse_qs(link.fragment).items()} for link in links]


# catches: a link to an update or an episode that the page has not, an index that is off by one
def test_links_lead_to_episodes_of_the_page(run):
    assert places(report(run).read_text()) == []
    browse(run).save_html(run / "rollouts.html", updates=[0, 4], episodes=2)
    kept = saved_page(run)
    assert {name: list(x)[:2] for name, x in kept.episodes.items()} == {"0": [0, 1], "4": [0, 1]}
    asked = [x["update"] for x in places(report(run).read_text()) if "update" in x]
    assert asked == ["0", "4"]  # update 2 was kept, and is not in the page
    assert episode_link(kept, 2, 0) == "" and episode_link(kept, 4, 77) == ""
    browse(run).save_html(run / "rollouts.html")
    assert {"update": "2"} in places(report(run).read_text())


def test_a_post_among_the_rollouts_links_to_it(run):
    browse(run).save_html(run / "rollouts.html")
    page, last = saved_page(run), run / "ppo" / "rollouts" / "update-00003.safetensors"
    prompt = Rollout.load(last).prompts[2]
    assert places(prompt_link(page, prompt)) == [dict(update="3", episode="2")]
    assert prompt_link(page, "another") == "" and prompt_link(NO_PAGE, prompt) == ""
    row = dict(reference="r", text_sft="s", text_ppo="p", score_sft=0.0, score_ppo=0.0)
    frame = pd.DataFrame([row | dict(query=q, gold_sft=0.0, gold_ppo=1.0) for q in (prompt, "x")])
    shown = posts_section(frame, page=page)
    assert places(shown) == [dict(update="3", episode="2")] and "of other posts" not in shown
    shown = posts_section(frame[1:].reset_index(drop=True), page=page)
    assert places(shown) == [{}] and "of other posts" in shown


def test_another_file_of_that_name_is_no_page(run):
    (run / "rollouts.html").write_text("<p>mine</p>")
    assert saved_page(run) == NO_PAGE and page_link(NO_PAGE, "x") == ""
    assert not [x for x in places(report(run).read_text()) if x]


# catches: a prompt or a name that ends the attribute or becomes markup
def test_hostile_names_stay_in_the_address(run):
    link = page_link(saved_page(run), "x")
    assert link == ""
    browse(run).save_html(run / "rollouts.html")
    link = page_link(saved_page(run), "<b>\u202e", update='"><script>')
    assert "<script" not in link and "<b>" not in link and "\u202e" not in link
    assert places(link) == [dict(update='"><script>')]
