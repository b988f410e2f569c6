"""Judges, intervals, the frontier, form and alarms: against brute force, against simulation, and
against a real HTTP server that misbehaves."""

from __future__ import annotations

import gzip
import json
import math
import random
import re
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import combinations, product

import numpy as np
import pandas as pd
import pytest
import torch

from rlhf_nb.evaluate import bootstrap_interval, outcomes, paired_interval, win_rate_interval
from rlhf_nb.frontier import best_of_n_kl, best_of_n_reward, frontier, response_kl
from rlhf_nb.judging import GoldPairJudge, RewardModelJudge, judge_completions, judge_pairs
from rlhf_nb.tldr import gold_judge
from rlhf_nb.training.alarms import alarms_of, hacking_alarms
from rlhf_nb.training.completions import Completions
from rlhf_nb.training.endpoint_judge import EndpointJudge, parse_verdict
from rlhf_nb.ui.plots import plot_frontier
from rlhf_nb.world import win_rate, write_summary

# ---- Intervals ----


def wilson(wins, ties, losses):
    n = wins + ties + losses
    rate, share = (wins + ties / 2) / n, 1 + 1.96**2 / n
    middle, half = rate + 1.96**2 / (2 * n), 1.96 * math.sqrt(rate * (1 - rate) / n + 0.9604 / n**2)
    return (middle - half) / share, (middle + half) / share


# catches: a score interval that is not Wilson's without ties, sides exchanged, a variance that
# forgets the ties; an interval without the rate, of no width, or that ties make wider
def test_the_interval_is_wilsons_and_ties_narrow_it():
    few = [counts for counts in product((0, 1, 7), (0, 1, 30), (0, 1, 7)) if sum(counts)]
    for wins, ties, losses in (*few, (8, 0, 2), (40, 0, 0), (33, 0, 67), (500, 0, 500)):
        low, high = win_rate_interval(wins, ties, losses)
        narrow, (least, most) = high - low, wilson(wins, ties, losses)
        assert 0 <= low <= (wins + ties / 2) / (wins + ties + losses) <= high <= 1
        assert narrow <= most - least + 1e-9 and narrow > 0.04
        assert ties or (low, high) == pytest.approx((least, most), abs=1e-9)
        turned = win_rate_interval(losses, ties, wins)
        assert (low, high) == pytest.approx((1 - turned[1], 1 - turned[0]), abs=1e-9)
    for bad in ((0, 0, 0), (-1, 2, 3)):
        with pytest.raises(ValueError, match="at least one judging"):
            win_rate_interval(*bad)


# catches: an interval that is too narrow, or too wide by its ties (Wilson's is at 0.99 with half of
# them tied)
@pytest.mark.parametrize("n", [100, 400])
@pytest.mark.parametrize(
    "win, tie",
    [(0.5, 0), (0.33, 0), (0.8, 0), (0.25, 0.5), (0.3, 0.1), (0.65, 0.3), (0.1, 0.8), (0.05, 0.3)],
)
def test_the_interval_covers_the_truth(n, win, tie):
    truth, seen = win + tie / 2, {}
    counts = np.random.default_rng(n).multinomial(n, (win, tie, 1 - win - tie), size=4000)
    for row in map(tuple, counts.tolist()):
        seen[row] = seen.get(row, 0) + 1
    held = sum(
        times
        for row, times in seen.items()
        if (ends := win_rate_interval(*row))[0] <= truth <= ends[1]
    )
    assert 0.93 <= held / 4000 <= 0.97


# catches: sides exchanged, a tie that counts 1 or 0, lists that do not pair up
def test_outcomes():
    assert outcomes([3, 3, 3], [2, 3, 4]) == [1.0, 0.5, 0.0]
    assert sum(outcomes([1, 2, 2], [2, 2, 1])) / 3 == win_rate([1, 2, 2], [2, 2, 1])
    for bad in (([], []), ([1.0], [1.0, 2.0])):
        with pytest.raises(ValueError, match="one of each"):
            outcomes(*bad)


# catches: a number other than the one worked out by hand, sides exchanged, an interval of no width
# or beyond what a difference can be
def test_the_paired_interval_by_hand():
    # ten posts: better on six, worse on two, equal on two, and the two posts that are added
    ours, theirs = [1] * 6 + [0] * 2 + [0.5] * 2, [0] * 6 + [1] * 2 + [0.5] * 2
    spread = 1.96 * math.sqrt((10 / 12 - (4 / 12) ** 2) / 12)
    assert spread == pytest.approx(0.4808, abs=1e-4)
    assert paired_interval(ours, theirs) == pytest.approx((1 / 3 - spread, 1 / 3 + spread))
    assert paired_interval(theirs, ours) == pytest.approx((-1 / 3 - spread, -1 / 3 + spread))
    # half points: d = 1/2 on two of two posts; the mean is 1/4, the mean square 2.5 / 4
    half = 1.96 * math.sqrt((2.5 / 4 - 1 / 16) / 4)
    assert paired_interval([1, 0.5], [0.5, 0]) == pytest.approx((0.25 - half, 0.25 + half))
    low, high = paired_interval([1.0] * 40, [1.0] * 40)
    assert -0.1 < low < 0 < high < 0.1
    assert paired_interval([1.0], [0.0])[1] == 1.0
    for bad in (([], []), ([1.0], [1.0, 0.0])):
        with pytest.raises(ValueError, match="one of each"):
            paired_interval(*bad)


# catches: an interval that misses the true difference too often, posts that are taken for
# independent of each other in the two models (much too wide), ties that are forgotten
@pytest.mark.parametrize("n", [40, 400])
@pytest.mark.parametrize("lead, tie", [(0.0, 0.0), (0.1, 0.0), (0.1, 0.4), (0.3, 0.2)])
def test_the_paired_interval_covers_the_truth(n, lead, tie):
    draw, held, widths, apart = np.random.default_rng(n), 0, [], []
    for _ in range(2000):
        easy = draw.choice([0.1, 0.6], size=n)  # a hard post is hard for both
        scores = [
            np.where(draw.random(n) < tie, 0.5, draw.random(n) < chance)
            for chance in (easy + lead, easy)
        ]
        low, high = paired_interval(*(x.tolist() for x in scores))
        held += int(low <= lead * (1 - tie) <= high)
        widths.append(high - low)
        apart.append(2 * 1.96 * math.sqrt(sum(x.var() for x in scores) / n))
    assert 0.93 <= held / 2000 <= 0.98
    assert n == 40 or np.mean(widths) < np.mean(apart)


# catches: judgings of one prompt counted as so many prompts (coverage 0.74 here), prompts resampled
# without their judgings
def test_repeated_prompts_are_covered_too():
    draw, held, groups = np.random.default_rng(3), 0, [i for i in range(100) for _ in range(4)]
    for trial in range(300):
        chances = draw.choice([0.9, 0.2], size=100).repeat(4)
        scores = draw.random(400) < chances
        low, high = bootstrap_interval(scores.astype(float), groups, draws=400, seed=trial)
        held += low <= 0.55 <= high
    assert 0.92 <= held / 300 <= 0.98


# catches: groups read as sorted or adjacent, a seed that plays no part, an interval of no width
def test_bootstrap_edges():
    scores, groups = [1.0, 0.0, 0.5, 1.0], ["a", "b", "a", "b"]
    order = [3, 0, 2, 1]
    assert bootstrap_interval(scores, groups) == bootstrap_interval(
        [scores[i] for i in [0, 2, 1, 3]], ["a", "a", "b", "b"]
    )
    assert bootstrap_interval([scores[i] for i in order], [groups[i] for i in order]) != (0.0, 1.0)
    assert bootstrap_interval([1.0] * 6, list("aabbcc")) == win_rate_interval(3, 0, 0)
    assert bootstrap_interval([0.5] * 6, list("aabbcc")) == win_rate_interval(0, 3, 0)
    assert bootstrap_interval([1.0, 0.0], ["a", "a"]) == (0.0, 1.0)
    with pytest.raises(ValueError, match="2 scores and 1 groups"):
        bootstrap_interval([1, 0], ["a"])


# ---- judge_pairs ----


def first_of_longer(prompts, pairs):
    return [0.5 if len(a) == len(b) else float(len(b) > len(a)) for a, b in pairs]


@pytest.fixture(scope="module")
def stored(world):
    "Stored completions of every quality, with ends that were not reached."
    rng, posts = random.Random(1), world["test"]
    facts = [json.loads(text) for text in posts["facts"]]
    texts = [
        write_summary(f, rng, rng.sample(["when", "why", "feeling", "question"], rng.randrange(5)))
        for f in facts
    ]
    stopped = [rng.random() < 0.7 for _ in texts]
    return posts, facts, Completions(list(posts["prompt"]), texts, stopped, [9] * len(texts))


# catches: a rate of theirs, ties lost or counted whole, a stop forgotten or turned round with its
# pair, order that leaks into the rate; the interval of either report that forgets the ties
@pytest.mark.parametrize("both", [True, False])
def test_gold_agrees_with_a_direct_computation(stored, both):
    posts, facts, mine = stored
    ours = [gold_judge(t, f, s).gold for t, f, s in zip(mine.texts, facts, mine.stopped)]
    theirs = [gold_judge(t, f).gold for t, f in zip(posts["completion"], facts)]
    ends = [(s, True) for s in mine.stopped]
    found = judge_pairs(
        GoldPairJudge(),
        posts["prompt"],
        mine.texts,
        posts["completion"],
        dict(facts=posts["facts"]),
        ends,
        both_orders=both,
    )
    direct, _ = judge_completions(mine, posts, 0.0)
    assert found.win_rate == win_rate(ours, theirs)
    assert found.scores == outcomes(ours, theirs) and (found.invalid, found.n) == (0, len(posts))
    counts = [found.scores.count(x) for x in (1, 0.5, 0)]
    assert [found.wins, found.ties, found.losses] == counts and all(counts)
    ends_of = win_rate_interval(*counts)
    for report in (found, direct):
        assert (report.win_rate, report.low, report.high) == (found.win_rate, *ends_of)
    assert found.flipped == (0 if both else None)
    assert judge_pairs(
        GoldPairJudge(),
        posts["prompt"],
        posts["completion"],
        mine.texts,
        dict(facts=posts["facts"]),
        [e[::-1] for e in ends],
    ).win_rate == pytest.approx(1 - found.win_rate)
    last = str(found).split("\n")[-1]
    ends_in_words = f"(95% interval {100 * found.low:.1f} to {100 * found.high:.1f})"
    assert last == f"Model win rate: {found.win_rate:.2%} {ends_in_words}"
    assert last in re.sub("<[^>]*>", "\n", found._repr_html_())


# catches: a first answer that wins by its place; a change of mind that counts as anything but a
# tie; invalid verdicts taken for ties
def test_the_order_and_what_is_no_verdict():
    prompts, ours, theirs = list("abcdef"), ["o"] * 6, ["t"] * 6
    said = {
        ("a", "o"): 0,
        ("a", "t"): 1,  # ours both times
        ("b", "o"): 0,
        ("b", "t"): 0,  # whatever stands first: a tie
        ("c", "o"): 0.5,
        ("c", "t"): 1,  # a tie, then ours: a tie
        ("d", "o"): 1,
        ("d", "t"): 0,  # theirs both times
        ("e", "o"): None,
        ("e", "t"): 1,  # no verdict once: none
        ("f", "o"): 0.5,
        ("f", "t"): 0.5,
    }
    calls = []

    def judge(asked, pairs):
        calls.append(list(zip(asked, pairs)))
        return [said[p, a] for p, (a, b) in zip(asked, pairs)]

    found = judge_pairs(judge, prompts, ours, theirs)
    assert found.scores == [1.0, 0.5, 0.5, 0.0, None, 0.5]
    assert (found.wins, found.ties, found.losses, found.invalid, found.n) == (1, 3, 1, 1, 5)
    assert found.win_rate == 0.5
    assert found.flipped == 2 / 5 and found.first == 4 / 8 and found.judge == "judge"
    assert len(calls) == 1 and len(calls[0]) == 12 and len(set(calls[0])) == 12
    assert "invalid 1" in str(found) and "40.0%" in str(found)


# catches: "one order" that is always the same order, a seed that plays no part
def test_one_order_is_by_chance():
    shown = []

    def judge(prompts, pairs):
        shown.append([a == "o" for a, b in pairs])
        return [0.0] * len(pairs)

    rows = [*map(str, range(400))], ["o"] * 400, ["t"] * 400
    once = judge_pairs(judge, *rows, both_orders=False)
    judge_pairs(judge, *rows, both_orders=False, seed=1)
    assert 150 < sum(shown[0]) < 250 and once.wins == sum(shown[0]) and shown[0] != shown[1]
    assert once.first == 1.0 and once.flipped is None


# catches: a prompt that comes four times taken for four prompts
def test_prompts_that_come_back_are_one():
    ours = ["long answer" if i < 20 else "" for i in range(40)]
    plain = judge_pairs(first_of_longer, [str(i) for i in range(40)], ours, ["short"] * 40)
    again = judge_pairs(first_of_longer, [str(i // 4) for i in range(40)], ours, ["short"] * 40)
    assert plain.win_rate == again.win_rate
    assert again.high - again.low > 1.4 * (plain.high - plain.low)
    assert "bootstrap" in again.method and "Tango" in plain.method


# catches: judgings lost by zip, verdicts of another kind let through, silence where nothing could
# be judged
@pytest.mark.parametrize(
    "judge, ours, columns, said",
    [
        (first_of_longer, ["a"], None, "ours"),
        (first_of_longer, ["a", "b"], dict(facts=["x"]), "facts"),
        (lambda p, q: [0.0], ["a", "b"], None, "returned 1 verdicts for 4"),
        (lambda p, q: [2] * len(q), ["a", "b"], None, "returned 2"),
        (lambda p, q: ["1"] * len(q), ["a", "b"], None, "returned '1'"),
        (lambda p, q: [None] * len(q), ["a", "b"], None, "no usable verdict on any of 2"),
        (lambda p, q: [math.nan] * len(q), ["a", "b"], None, "returned nan"),
        (GoldPairJudge(), ["a", "b"], None, "facts"),
    ],
)
def test_bad_judgings_are_refused(judge, ours, columns, said):
    with pytest.raises(ValueError, match=said):
        judge_pairs(judge, ["p", "q"], ours, ["a", "b"], columns)
    with pytest.raises(ValueError, match="0 prompts"):
        judge_pairs(judge, [], [], [])


# catches: the lower score wins, a stop token that is always added, NaN that counts as a tie
def test_reward_model_judge(world, tokenizer, tiny):
    from rlhf_nb.models import scorer_from
    from rlhf_nb.scoring import score_texts

    model, posts = scorer_from(tiny(0)), world["test"].select(range(12))
    a, b = list(posts["completion"]), [" my dog"] * 12
    first, second = (
        score_texts(model, tokenizer, posts["prompt"], texts).tolist() for texts in (a, b)
    )
    assert RewardModelJudge(model, tokenizer)(posts["prompt"], list(zip(a, b))) == [
        float(y > x) for x, y in zip(first, second)
    ]
    assert first != second
    cut = score_texts(model, tokenizer, posts["prompt"], a, stopped=[False] * 12).tolist()
    assert RewardModelJudge(model, tokenizer)(
        posts["prompt"], list(zip(a, a)), stopped=[(False, True)] * 12
    ) == [float(y > x) for x, y in zip(cut, first)]
    with torch.no_grad():
        next(model.parameters()).fill_(math.nan)
    assert RewardModelJudge(model, tokenizer)(posts["prompt"], list(zip(a, b))) == [None] * 12


# ---- An endpoint that misbehaves ----


class Server:
    """A chat endpoint on loopback. `play(number of the request, chat)` gives status, body and
    headers, or None: say nothing for a while. Where it gives bytes, they are sent as they are, one
    at a time."""

    def __init__(self, play, port):
        self.requests, self.payloads, self.keys = 0, [], []
        self.lock, self.stopped = threading.Lock(), threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer.lock:
                    outer.requests += 1
                    number = outer.requests
                    outer.payloads.append(payload)
                    outer.keys.append(self.headers.get("Authorization"))
                played = play(number, payload["messages"])
                if played is None:
                    return outer.stopped.wait(3)
                if isinstance(played, bytes):
                    return drip(self.wfile, played)
                status, body, headers = played
                self.send_response(status)
                for name, value in {"Content-Length": len(body), **headers}.items():
                    self.send_header(name, str(value))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args):
                pass

        class Http(ThreadingHTTPServer):
            request_queue_size = 64  # with 5, eight that knock at once wait a second

        self.http = Http(("127.0.0.1", port), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        self.thread = threading.Thread(
            target=self.http.serve_forever, kwargs=dict(poll_interval=0.01), daemon=True
        )
        self.thread.start()

    def close(self):
        self.stopped.set()
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


def reply(text, tokens=(100, 2), status=200, **headers):
    found = {"choices": [{"message": {"role": "assistant", "content": text}}]}
    if tokens:
        found["usage"] = dict(prompt_tokens=tokens[0], completion_tokens=tokens[1])
    return status, json.dumps(found).encode(), headers


def drip(file, sent):
    with suppress(OSError):  # the other side may have had enough
        for byte in sent:
            file.write(bytes([byte]))
            time.sleep(0.04)


def by_length(number, chat):
    first, second = re.findall(r"<(?:first|second)>\n(.*?)\n</", chat[1]["content"], re.S)
    return reply("1" if len(first) > len(second) else "2" if len(second) > len(first) else "0")


@pytest.fixture
def serve(monkeypatch):
    proxies = "http_proxy HTTP_PROXY all_proxy ALL_PROXY"
    for name in f"OPENAI_API_KEY OPENAI_BASE_URL {proxies}".split():
        monkeypatch.delenv(name, raising=False)
    made = []

    def start(play=by_length, port=0):
        made.append(Server(play, port))
        return made[-1]

    yield start
    for server in made:
        if not server.stopped.is_set():
            server.close()


PROMPTS = [f"prompt {i}" for i in range(12)]
OURS = ["x" * (i % 5 + 1) for i in range(12)]
THEIRS = ["y" * 3 for _ in range(12)]


def judge_of(server, **options):
    return EndpointJudge("tiny-judge", server.url, **dict(backoff=0.01, timeout=5.0) | options)


# catches: sides exchanged in the chat, a temperature left out, a key that is not sent, tokens
# counted for one order only, equal answers paid for
def test_endpoint_judges(serve):
    server = serve()
    judge = judge_of(server, api_key="sk-secret", prices=(2.0, 10.0))
    ours = [*OURS[:-1], "yyy"]
    found = judge_pairs(judge, PROMPTS, ours, THEIRS)
    assert found.scores == judge_pairs(first_of_longer, PROMPTS, ours, THEIRS).scores
    assert found.flipped == 0
    assert server.requests == 22
    assert set(server.keys) == {"Bearer sk-secret"}
    assert found.judge == "tiny-judge"
    assert all(
        p["temperature"] == 0 and p["model"] == "tiny-judge" and p["max_tokens"] == 16
        for p in server.payloads
    )
    assert all("prompt " in p["messages"][1]["content"] for p in server.payloads)
    assert (
        "22 judgings asked for in 22 replies, 0 from the cache, 2 of equal answers; 2,200 tokens "
        "in, 44 out; cost 0.0048" in found.usage
    )
    assert "cost" not in judge_of(server).usage()


# catches: a cache that is not read, keyed by too little (model, instructions, order, address),
# written at the end only, or that holds the key
def test_cache(serve, tmp_path):
    server, path = serve(), tmp_path / "deep" / "cache.jsonl"
    first = judge_pairs(judge_of(server, api_key="sk-secret", cache=path), PROMPTS, OURS, THEIRS)
    assert server.requests == 24 and len(path.read_text().splitlines()) == 24
    again = judge_pairs(judge_of(server, api_key="another", cache=str(path)), PROMPTS, OURS, THEIRS)
    assert server.requests == 24
    assert again.scores == first.scores
    assert "24 from the cache" in again.usage
    assert "0 tokens in" in again.usage
    assert "sk-secret" not in path.read_text()
    assert "sk-secret" not in repr(judge_of(server, api_key="sk-secret"))
    for other in (dict(instructions="Which?"), dict(options={"max_tokens": 5})):
        before = server.requests
        judge_pairs(judge_of(server, cache=path, **other), PROMPTS[:2], OURS[:2], THEIRS[:2])
        assert server.requests == before + 4
    elsewhere, before = serve(), server.requests
    judge_pairs(judge_of(elsewhere, cache=path), PROMPTS[:1], OURS[:1], THEIRS[:1])
    EndpointJudge("other", server.url, cache=path)(PROMPTS[:1], [(OURS[0], THEIRS[0])])
    assert elsewhere.requests == 2 and server.requests == before + 1
    judge = judge_of(server)  # without a file: kept in memory
    for _ in range(2):
        judge(PROMPTS[:3], list(zip(OURS, THEIRS))[:3])
    assert server.requests == before + 4


# catches: judgings that reach the file when the run is over
def test_each_judging_is_kept_at_once(serve, tmp_path):
    path, seen = tmp_path / "cache.jsonl", []

    def play(number, chat):
        seen.append(len(path.read_text().splitlines()) if path.exists() else 0)
        return by_length(number, chat)

    judge_of(serve(play), cache=path, concurrency=1)(PROMPTS, list(zip(OURS, ["z" * 9] * 12)))
    assert seen == list(range(12))


# catches: a last line cut short by a kill that breaks the next run, or that swallows the line after
# it
def test_a_damaged_cache_loses_one_line(serve, tmp_path):
    server, path = serve(), tmp_path / "cache.jsonl"
    judge_pairs(judge_of(server, cache=path), PROMPTS, OURS, THEIRS)
    text = path.read_text()
    odd = ['{"key": [1], "verdict": 1}', '{"key": "k", "verdict": true}', "[" * 10**5, "[1]"]
    path.write_text("\n".join(["not json", *odd, text[: text.rindex("verdict")]]))
    found = judge_pairs(judge_of(server, cache=path), PROMPTS, OURS, THEIRS)
    assert server.requests == 25 and "6 damaged lines" in found.usage
    judge_pairs(judge_of(server, cache=path), PROMPTS, OURS, THEIRS)
    assert server.requests == 25


# catches: an error that may pass taken for the end, a Retry-After that is not heard, a back-off
# that does not grow
@pytest.mark.parametrize(
    "fault",
    [
        (500, b"oops", {}),
        (503, b"", {}),
        (429, b"slow down", {}),
        (408, b"", {}),
        *((200, body, {}) for body in (b"<html>", b'{"error": "busy"}', b'{"choices": []}', b"[]")),
        (200, b'{"choices": [{"message": "1"}]}', {}),
        (200, b"[" * 10**5, {}),
        (429, b"", {"Retry-After": "\xb2"}),
        None,
    ],
    ids=lambda fault: str(fault)[:40],
)
def test_what_may_pass_is_tried_again(serve, fault):
    server = serve(lambda number, chat: fault if number <= 2 else reply("2"))
    judge = judge_of(server, timeout=0.3, concurrency=1)
    assert judge(["p"], [("a", "b")]) == [1.0] and server.requests == 3
    assert "1 judgings asked for in 1 replies" in judge.usage()


def test_it_waits_as_long_as_it_is_told(serve):
    busy = reply("1", status=429, **{"Retry-After": 1})
    server = serve(lambda number, chat: busy if number == 1 else reply("2"))
    start = time.monotonic()
    assert judge_of(server)(["p"], [("a", "b")]) == [1.0] and time.monotonic() - start > 0.95
    server = serve(lambda number, chat: (500, b"", {}))
    start = time.monotonic()
    with pytest.raises(ConnectionError, match="tried 4 times"):
        judge_of(server, attempts=4, backoff=0.1)(["p"], [("a", "b")])
    assert server.requests == 4 and 0.1 * 7 * 0.7 < time.monotonic() - start < 2


PLAIN = reply("1")[1]
HEAD = f"HTTP/1.1 200 OK\r\nContent-Length: {len(PLAIN)}\r\n".encode()


# catches: a limit on each wait and none on all of them (of the body, of headers), a body that is
# read or unpacked whole before it is measured
@pytest.mark.parametrize(
    "played, why",
    [
        (HEAD + b"\r\n" + PLAIN, "within 0.4 seconds"),
        ((200, PLAIN + b" " * 2**23, {}), "longer than 4,194,304 bytes"),
        (
            (200, gzip.compress(PLAIN), {"Content-Encoding": "gzip"}),
            "compressed by gzip, and should be plain",
        ),
    ],
    ids=["drips", "long", "packed"],
)
def test_a_reply_has_an_end(serve, played, why):
    server = serve(lambda number, chat: played)
    with pytest.raises(ConnectionError, match=f"{why}, tried 2 times"):
        judge_of(server, timeout=0.4, attempts=2)(["p"], [("a", "b")])
    assert server.requests == 2


# catches: a count that no float holds, that is negative or a truth value in the bill
@pytest.mark.parametrize("count", [10**400, -5, True], ids=["huge", "negative", "truth"])
def test_counts_that_cannot_be(serve, count):
    judge = judge_of(serve(lambda number, chat: reply("1", (count, 2))), prices=(1.0, 1.0))
    judge(["p"], [("a", "b")])
    assert "0 tokens in, 2 out (and 1 replies without a count)" in judge.usage()


# catches: half a pair of UTF-16 in an answer or a reply that cannot be sent again
def test_broken_text_is_sent(serve):
    server = serve(lambda number, chat: reply("\ud800" if len(chat) == 2 else "2"))
    assert judge_of(server)(["p"], [("a", "b\udc00")]) == [1.0]


# catches: trying again what cannot pass, a key shown in an error, a redirect that takes the key
# along
@pytest.mark.parametrize(
    "status, headers",
    [*product((400, 401, 404), [{}]), *product((302, 307), [{"Location": "/elsewhere"}])],
)
def test_what_will_not_pass_ends_at_once(serve, status, headers):
    server = serve(lambda number, chat: (status, b"\x1b[2Jno: the key sk-secret is wrong", headers))
    with pytest.raises(ConnectionError) as caught:
        judge_of(server, api_key="sk-secret", concurrency=1)(PROMPTS, [*zip(OURS, ["z" * 9] * 12)])
    said = str(caught.value)
    assert server.requests == 1
    assert f"HTTP {status}: \\x1b[2Jno" in said and "\x1b" not in said
    assert server.url in said
    assert "12 of 12 judgings are missing" in said
    import traceback

    assert "sk-secret" not in "".join(traceback.format_exception(caught.value)).replace(
        'api_key="sk-secret"', ""
    )


# catches: a reply that is no verdict taken for a tie, asked again in the same words for ever, not
# paid for in the bill, asked again by the next run
def test_malformed_answers_are_invalid(serve, tmp_path):
    texts = ["The first one.", "", None, ["1"], "12", "1 or 2", "-1", "3", "ONE", "2 is better"]
    index = lambda chat: int(re.search(r"prompt (\d+)", chat[1]["content"])[1])
    replies = [*map(reply, texts), reply("1"), reply("2")]
    server = serve(lambda number, chat: replies[index(chat)])
    judge = judge_of(server, cache=tmp_path / "c.jsonl", tries=3)
    found = judge_pairs(judge, PROMPTS, OURS, THEIRS)
    assert found.invalid == 10 and found.n == 2 and "invalid 10" in str(found)
    assert found.scores[:10] == [None] * 10 and None not in found.scores[10:]
    assert server.requests == 4 + 20 * 3 and "6,400 tokens in" in found.usage
    assert "24 judgings asked for in 64 replies" in found.usage
    for i in range(10):
        chats = [p["messages"] for p in server.payloads if index(p["messages"]) == i]
        assert sorted(map(len, chats)) == [2, 2, 4, 4, 6, 6]
        assert max(chats, key=len)[3]["role"] == "user"
    again = judge_pairs(judge_of(server, cache=tmp_path / "c.jsonl"), PROMPTS, OURS, THEIRS)
    assert server.requests == 64 and again.scores == found.scores


# catches: a verdict on the second asking that is lost; tokens that are not told counted as told
def test_malformed_once(serve):
    replies = {2: reply("well...", None), 4: reply(" **2**.", (50, 1))}
    judge = judge_of(serve(lambda number, chat: replies[len(chat)]))
    assert judge(["p"], [("a", "b")]) == [1.0]
    assert "1 judgings asked for in 2 replies" in judge.usage()
    assert "50 tokens in, 1 out (and 1 replies without a count)" in judge.usage()


# catches: judgings that are kept in memory until the end, a run that pays twice, an error without
# the address, the count or the way out
def test_a_server_that_dies_halfway(serve, tmp_path):
    dying = lambda number, chat: by_length(number, chat) if number <= 10 else (500, b"dying", {})
    server, path = serve(dying), tmp_path / "c.jsonl"
    with pytest.raises(ConnectionError) as caught:
        judge_pairs(judge_of(server, cache=path, attempts=2, concurrency=3), PROMPTS, OURS, THEIRS)
    said = str(caught.value)
    assert server.url in said
    assert "14 of 24 judgings are missing" in said
    assert str(path) in said
    assert "dying" in said
    assert "base_url" in said
    assert len(path.read_text().splitlines()) == 10
    port = server.http.server_port
    server.close()
    with pytest.raises(ConnectionError, match="14 of 14 judgings are missing"):
        judge_pairs(judge_of(server, cache=path, attempts=2), PROMPTS, OURS, THEIRS)
    alive = serve(port=port)  # the address is part of what is asked: it must come up where it was
    found = judge_pairs(judge_of(alive, cache=path), PROMPTS, OURS, THEIRS)
    assert alive.requests == 14 and "10 from the cache" in found.usage
    assert found.scores == judge_pairs(first_of_longer, PROMPTS, OURS, THEIRS).scores


# catches: eight workers that are one, or eighty
def test_concurrency(serve):
    running, most, lock = 0, 0, threading.Lock()

    def slow(number, chat):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.05)
        with lock:
            running -= 1
        return reply("1")

    server = serve(slow)
    judge_of(server, concurrency=4)(PROMPTS, list(zip(OURS, ["z" * 9] * 12)))
    assert 2 <= most <= 4


# catches: a key from nowhere, a key that the HTTP client would print, an address that is none
def test_settings(serve, monkeypatch):
    with pytest.raises(ValueError, match="OPENAI_API_KEY"):
        EndpointJudge("m")
    server = serve()
    monkeypatch.setenv("OPENAI_BASE_URL", server.url + "/")
    monkeypatch.setenv("OPENAI_API_KEY", " sk-env\n")
    assert EndpointJudge("m")(["p"], [("a", "bb")]) == [1.0] and server.keys == ["Bearer sk-env"]
    assert EndpointJudge("m", api_key="mine").api_key == "mine"
    for url in "127.0.0.1:80/v1 ftp://x/v1 http://user:pass@host/v1 http://host/v1?key=3".split():
        with pytest.raises(ValueError, match="base_url") as caught:
            EndpointJudge("m", url)
        assert "pass" not in str(caught.value)
    with pytest.raises(ValueError, match="line break") as caught:
        EndpointJudge("m", api_key="sk-a\nsk-b")
    assert "sk-a" not in str(caught.value)
    with pytest.raises(ValueError, match="concurrency 0"):
        EndpointJudge("m", concurrency=0)


def test_parse_verdict():
    verdicts = {"1": 0.0, "2": 1.0, "0": 0.5, "`2`": 1.0, "[1]\n": 0.0, "1.": 0.0, "10": None}
    assert {text: parse_verdict(text) for text in verdicts} == verdicts


# ---- Best of n and the frontier ----


# catches: drawing with putting back, weights shifted by one, ties given to one of them, `of` in the
# wrong order
@pytest.mark.parametrize("n", [1, 2, 3, 5, 6])
def test_best_of_n_by_brute_force(n):
    rng = np.random.default_rng(n)
    scores, gold = rng.integers(0, 4, size=(3, 6)).astype(float), rng.normal(size=(3, 6))
    assert best_of_n_reward(scores, n) == pytest.approx(
        np.mean([[max(some) for some in combinations(row, n)] for row in scores])
    )

    def pick(row, other, some):
        best = [i for i in some if row[i] == max(row[j] for j in some)]
        return np.mean([other[i] for i in best])

    want = np.mean(
        [
            [pick(row, other, some) for some in combinations(range(6), n)]
            for row, other in zip(scores, gold)
        ]
    )
    assert best_of_n_reward(torch.tensor(scores), n, of=gold.tolist()) == pytest.approx(want)


# catches: an overflow with thousands of samples
def test_best_of_n_of_many():
    assert 0 < best_of_n_reward(np.random.default_rng(0).random((1, 4000)), 1000) <= 1
    for bad, n in (([[1.0, 2.0]], 3), ([[1.0, 2.0]], 0), ([1.0, 2.0], 1), ([[1.0, math.nan]], 1)):
        with pytest.raises(ValueError, match="expected"):
            best_of_n_reward(bad, n)


# catches: a logarithm to another base, the second term forgotten
def test_best_of_n_kl():
    for n in (1, 2, 7):  # KL of the largest of n uniform numbers: the density is n u^(n-1)
        density = n * ((np.arange(200_000) + 0.5) / 200_000) ** (n - 1)
        assert best_of_n_kl(n) == pytest.approx(
            (density * np.log(np.maximum(density, 1e-300))).mean(), abs=1e-4
        )
    with pytest.raises(ValueError):
        best_of_n_kl(0)


# catches: KL per token, KL the other way round, another temperature, padding that counts, a model
# left in another mode, a moved random state
def test_response_kl(world, tokenizer, tiny):
    from rlhf_nb.fast_logprobs import response_logprobs
    from rlhf_nb.kl import estimate_kl
    from rlhf_nb.masks import left_pad
    from rlhf_nb.rollout import sample
    from rlhf_nb.sampling import Sampling

    policy, ref, prompts = tiny(0), tiny(1), list(world["test"]["prompt"]) * 8
    with torch.no_grad():
        # sure of itself where the reference is not: the two directions differ
        policy.get_output_embeddings().weight.mul_(8)
    policy.train()
    ref.eval()
    state = torch.get_rng_state()
    kl = response_kl(policy, ref, tokenizer, prompts, response_length=6, batch_size=100)
    assert policy.training
    assert not ref.training
    assert torch.equal(state, torch.get_rng_state())
    assert kl.shape == (len(prompts),)
    assert (kl >= 0).all()
    assert torch.equal(
        kl, response_kl(policy, ref, tokenizer, prompts, response_length=6, batch_size=100)
    )
    assert response_kl(policy, policy, tokenizer, prompts[:5], response_length=6).abs().max() < 1e-4
    policy.eval()
    ids, mask = left_pad(
        tokenizer(prompts, add_special_tokens=False)["input_ids"], tokenizer.pad_token_id
    )
    drawn = sample(
        policy,
        ids,
        mask,
        Sampling(6, tokenizer.pad_token_id, [tokenizer.eos_token_id]),
        torch.Generator().manual_seed(9),
    )
    with torch.no_grad():
        ours, theirs = (
            response_logprobs(m, ids, mask, drawn.response_ids, drawn.mask).logprobs
            for m in (policy, ref)
        )
    plain = estimate_kl(ours, theirs, "k1").masked_fill(~drawn.mask, 0).sum(1)
    error = math.hypot(plain.std() / len(plain) ** 0.5, kl.std() / len(kl) ** 0.5)
    assert abs(plain.mean() - kl.mean()) < 4 * error and kl.std() < plain.std()
    with pytest.raises(ValueError, match="0 prompts"):
        response_kl(policy, ref, tokenizer, [])


# catches: a frontier by update instead of by KL, one that keeps what is beaten or loses what is
# not, gaps that end it
def test_frontier():
    rows = pd.DataFrame(
        dict(
            update=[1, 2, 3, 4, 5, 6, 7],
            kl=[0.0, 5.0, 2.0, 5.0, 9.0, 7.0, 8.0],
            win_rate=[0.4, 0.6, 0.5, 0.7, 0.69, math.nan, 0.7],
            gold=[1, 2, 9, 3, 4, 5, 6],
        )
    )
    found = frontier(rows)
    assert found["update"].tolist() == [1, 3, 4, 2, 7, 5]
    assert found["on_frontier"].tolist() == [True] * 3 + [False] * 3
    assert frontier(rows, by="gold").query("on_frontier")["update"].tolist() == [1, 3]
    assert frontier(rows.drop(columns="win_rate")).query("on_frontier")["update"].tolist() == [1, 3]
    with pytest.raises(ValueError, match="kl"):
        frontier(rows.drop(columns="kl"))
    with pytest.raises(ValueError, match="win_rate"):
        frontier(rows[["kl", "update"]])


# catches: a panel without its line, best-of-n left out, a column that is not there taken for an
# error
def test_plot_frontier():
    rows = pd.DataFrame(
        dict(update=[1, 2, 3], kl=[0.0, 1.0, 3.0], reward=[0.0, 1.0, 2.0], gold=[1.0, 3.0, 2.0])
    )
    best = pd.DataFrame(dict(n=[1, 2], kl=[0.0, 0.19], reward=[0.0, 0.4], gold=[1.0, 1.4]))
    figure = plot_frontier(rows, best)
    assert [axis.get_title() for axis in figure.axes] == ["Learned reward", "Gold points"]
    lines = [[line.get_ydata().tolist() for line in axis.get_lines()] for axis in figure.axes]
    assert lines == [[[0, 1, 2], [0, 0.4]], [[1, 3, 2], [1, 1.4]]]
    assert [[text.get_text() for text in axis.texts] for axis in figure.axes] == [
        ["update 3", "n 2"],
        ["update 2", "n 2"],
    ]
    with pytest.raises(ValueError, match="kl"):
        plot_frontier(rows[["gold"]])


# ---- Form and alarms ----


def series(seed=0, n=30, **ends):
    "A run whose score rises; every other curve goes from its start to an end, with noise."
    rng, t = np.random.default_rng(seed), np.linspace(0, 1, n)
    curves = dict(
        score=(0.0, 2.0, 0.3),
        length=(20.0, 26.0, 1.0),
        repetition=(0.01, 0.02, 0.01),
        kl=(0.0, 4.0, 0.2),
        stopped=(0.97, 0.99, 0.01),
        entropy=(1.0, 0.5, 0.05),
    )
    run = pd.DataFrame(dict(update=np.arange(1, n + 1)))
    for name, (a, b, noise) in curves.items():
        run[name] = a + (ends.get(name, b) - a) * t + noise * rng.normal(size=n)
    return run


# catches: alarms in health: a threshold too near, noise taken for a trend
def test_a_healthy_run_raises_none():
    assert [hacking_alarms(series(seed)) for seed in range(100)] == [[]] * 100


# catches: a curve that is not watched or watched the wrong way round, an alarm of another kind
# along with it, one that is far too late
@pytest.mark.parametrize(
    "kind, end",
    [("length", 60.0), ("repetition", 0.4), ("kl", 40.0), ("stopped", 0.2), ("entropy", 0.02)],
)
def test_a_hacked_run_raises_its_alarm(kind, end):
    for seed in range(12):
        alarms = hacking_alarms(series(seed, **{kind: end}))
        assert [alarm.kind for alarm in alarms] == [kind]
        assert 6 <= alarms[0].update <= 29
        assert f"Update {alarms[0].update}:" in str(alarms[0])
        # the score fell: something else is wrong
        assert hacking_alarms(series(seed, score=-2.0, **{kind: end})) == []


# catches: an alarm because games got shorter, or because turns of one token hold an answer now; none
# where turns no longer stop
def test_stops_of_turns_are_a_share_of_them():
    shorter = {"val/num_eos_tokens": np.linspace(90, 9, 30)}
    for end, tokens, kinds in ((0.2, 5.0, ["stopped"]), (0.2, 1.0, []), (0.99, 5.0, [])):
        turns = series(3, stopped=end).rename(columns=dict(stopped="turns/stopped"))
        found = hacking_alarms(turns.assign(**shorter, **{"turns/tokens": tokens}))
        assert [x.kind for x in found if re.search(r"share of turns .*\d\.$", str(x))] == kinds


# catches: the trainer's names not known, log entries without a score that break the window, a
# threshold that plays no part, an order by name
def test_alarms_read_the_log_of_the_trainer():
    frame = series(3, length=60.0, kl=40.0)
    log = frame.rename(
        columns=dict(
            update="step",
            score="objective/raw_scores",
            length="tokens/response_length",
            kl="objective/kl",
            entropy="policy/entropy_avg",
            stopped="val/num_eos_tokens",
        )
    ).drop(columns="repetition")
    log["val/num_eos_tokens"] *= 256
    evals = pd.DataFrame(dict(step=[10, 20], eval_score=[1.0, 2.0]))
    log = pd.concat([log, evals]).sort_values("step", ignore_index=True)
    found = hacking_alarms(log)
    assert found == hacking_alarms(frame.drop(columns="repetition"))
    assert [a.kind for a in found] == ["kl", "length"]
    assert [a.update + 1 for a in alarms_of(log.to_dict("records"))] == [a.update for a in found]
    assert [a.kind for a in hacking_alarms(log, kl_most=1e3)] == ["length"]
    assert [a.kind for a in hacking_alarms(log, length_ratio=9)] == ["kl"]
    assert hacking_alarms(log, sure=1e9) == [] and hacking_alarms(frame[:5]) == []
    with pytest.raises(ValueError, match="objective/raw_scores"):
        hacking_alarms(frame.drop(columns="score"))
    with pytest.raises(ValueError, match="entropy"):
        hacking_alarms(frame[["update", "score"]])
