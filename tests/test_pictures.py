"""The pictures as data: what they show is what they were given, and they need nothing else."""

import functools
import itertools
import re
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from docs import pictures
from program import Settings
from rigs import ended, is_one_clear_line, micro_pair, tables
from sampling import residual
from specdec import decode_plain, decode_speculative

DOCS = Path(pictures.__file__).parent
SVG = "{http://www.w3.org/2000/svg}"
WRITERS = ("target", "draft", "correction", "bonus")
UGLY = ["<&>", "\n    ", "\x1b[2J", "]]>", '"', "{x}", "\ufffe", "日本", " a", "x\ny", "long" * 9]


@pytest.fixture(scope="module")
def drawn():
    """The pictures of a trained pair, on a clock that ticks once each time that it is read."""
    return pictures.draw(micro_pair(), itertools.count().__next__)


def tokens(root):
    """(writer, element) of each token of a race that appears, in order."""
    groups = root.iter(SVG + "g")
    return [(g.get("class"), g) for g in groups if g.find(SVG + "animate") is not None]


def said(root):
    return " ".join("".join(element.itertext()) for element in root.iter(SVG + "text"))


def race(plain, speculative):
    return ET.fromstring(pictures.race_svg([plain, speculative], "<cpu> & more"))


def place(p, q, drafted, correction):
    """A round whose first draft was rejected, as a picture of that place."""
    one = SimpleNamespace(accepted=0, p=p[None], q=q[None], drafts=[drafted], new=[correction])
    return ET.fromstring(pictures.position_svg([0], one, UGLY))


def bars(root):
    """For each row of a position: {class of a bar: (its place x, its width)}."""
    groups = [g for g in root.iter(SVG + "g") if "scale(" in g.get("transform", "")]
    return [{rect.get("class"): (float(rect.get("x", 0)), float(rect.get("width"))) for rect in g}
            for g in groups]


# ---------------------------------------------------------------- all pictures

@pytest.mark.parametrize("name", ["race", "round", "position"])
def test_a_picture_needs_nothing_from_elsewhere(drawn, name):
    """Well-formed, with a title and a description; no element and no address loads anything."""
    root = ET.fromstring(drawn[name])
    assert root.tag == SVG + "svg"
    for tag in ("title", "desc"):
        assert root.find(SVG + tag).text.strip()
    used = {element.tag.removeprefix(SVG) for element in root.iter()}
    assert used <= {"svg", "title", "desc", "style", "g", "rect", "text", "animate"}
    attributes = {key for element in root.iter() for key in element.attrib}
    assert not [key for key in attributes if "href" in key or key.startswith("on")]
    assert not re.search(r"url\(|@import|@font-face", drawn[name])
    assert drawn[name].count("http") == 1  # the name of the format


@pytest.mark.parametrize("name", ["race", "round", "position"])
def test_every_kind_of_mark_has_a_colour_in_both_schemes(drawn, name):
    """A rectangle takes its colour from its class or from that of a group around it."""
    root = ET.fromstring(drawn[name])
    light, dark = root.find(SVG + "style").text.split("@media (prefers-color-scheme: dark)")
    dark = dark.split("@media")[0]
    coloured = [set(re.findall(r"[.](\w+)(?=[^{}]*\{[^}]*fill: #)", css)) for css in (light, dark)]
    assert coloured[0] == coloured[1] >= {*WRITERS, "paper"}
    assert all(re.search(r"(?m)^\s*text \{[^}]*fill: #", css) for css in (light, dark))
    parents = {child: parent for parent in root.iter() for child in parent}
    for rect in root.iter(SVG + "rect"):
        classes = {rect.get("class"), parents[rect].get("class")}
        assert classes & coloured[0], ET.tostring(rect)


def test_no_letter_is_smaller_than_13_units():
    sizes = re.findall(r"font(?:-size)?: (\d+)px", (DOCS / "templates" / "style.css").read_text())
    assert sizes and min(map(int, sizes)) >= 13


# ---------------------------------------------------------------- the race

def test_both_ways_of_the_race_write_as_many_tokens(drawn):
    """80 each: the texts of the loop, in the colours of their writers."""
    pair, settings = micro_pair(), Settings(80, micro_pair().gamma)
    prompt = pair.encoding.encode_ordinary(pair.prompts[0])
    rounds = list(decode_speculative(pair, prompt, settings))
    writers = ["target"] * 80 + [writer for one in rounds for writer in one.writers]
    assert len(list(decode_plain(pair, prompt, settings))) == 80 and len(writers) == 160
    assert [writer for writer, _ in tokens(ET.fromstring(drawn["race"]))] == writers


def test_tokens_appear_at_the_times_given():
    """One slowing for both ways, said in the picture; all are there before it starts again."""
    plain = [("a", "target", 0.25 * (i + 1)) for i in range(8)]
    speculative = [(" b", "draft", 0.3), ("c", "bonus", 0.3), *[("\n  d", "correction", 0.8)] * 6]
    root = race(plain, speculative)
    for (words, writer, second), (kind, g) in zip(plain + speculative, tokens(root), strict=True):
        animate = g.find(SVG + "animate")
        start, at = map(float, animate.get("keyTimes").split(";"))
        period = float(animate.get("dur").removesuffix("s"))
        assert (kind, start, animate.get("values")) == (writer, 0, "0;1")
        assert at * period == pytest.approx(5 * second, abs=1e-3) and at < 0.8
        assert g.find(SVG + "text").text == ("⏎" if words[0] == "\n" else words)
    assert period == pytest.approx(5 * 2 + 4)
    assert "5 times slower" in said(root) and "4 tokens/s" in said(root)
    assert "10 tokens/s" in said(root) and "<cpu> & more" in said(root)


def test_the_clock_of_the_race_times_each_step(drawn):
    """A clock that ticks once a reading: a step takes as many ticks as it reads the clock, and so
    plain decoding takes as long for each token, and the tokens of a round come together."""
    pair, settings = micro_pair(), Settings(12, 3)
    now = itertools.count().__next__
    ways = [functools.partial(way, pair, [1, 2], settings)
            for way in (decode_plain, decode_speculative)]
    (ids, at), (rounds, done) = pictures.timed(ways, now)
    assert at == [at[0] * (i + 1) for i in range(12)] and len(ids) == 12
    assert done == [done[0] * (i + 1) for i in range(len(rounds))]
    appear = {}
    for writer, g in tokens(ET.fromstring(drawn["race"]))[80:]:
        appear.setdefault(g.find(SVG + "animate").get("keyTimes"), []).append(writer)
    assert all(set(together[:-1]) <= {"draft"} for together in appear.values())
    assert all(together[-1] != "draft" for together in appear.values())


def test_the_race_shows_medians_of_its_runs():
    """The third of six runs is interrupted for 99 seconds."""
    seconds = [1.0] * 18  # each run looks at the clock before its two steps and after each
    seconds[7] = 100.0
    ((_, at),) = pictures.timed([lambda: [5, 6]], itertools.accumulate(seconds).__next__)
    assert at == [1, 2]


def test_a_slow_step_of_each_run_counts_in_the_race():
    """Each run has one step of 11 seconds and two of 1, so that it is done after 13, although the
    step in each place is quick in most runs."""
    seconds = []
    for slow in (0, 0, 1, 2, 0, 1):
        seconds += [1.0] + [11.0 if i == slow else 1.0 for i in range(3)]
    ((_, at),) = pictures.timed([lambda: [5, 6, 7]], itertools.accumulate(seconds).__next__)
    assert at[-1] == 13


def test_half_a_character_is_not_called_the_end_of_text(monkeypatch):
    seen = []
    monkeypatch.setattr(pictures, "example", lambda *_: ([0], None))
    monkeypatch.setattr(pictures, "round_svg", lambda text, one, words: seen.append(words))
    monkeypatch.setattr(pictures, "position_svg", lambda *_: "")
    pictures.draw(micro_pair(), itertools.count().__next__)
    (words,) = seen
    assert len(words) == micro_pair().encoding.n_vocab
    assert words[0xC3] == "\N{REPLACEMENT CHARACTER}" and words[-1] == "end of text"


def test_a_token_after_a_line_break_starts_behind_the_indentation():
    """As a text of signs of one width does: 11 units each, lines 32 apart."""
    words = ["ab", "\n    ", "c", "\n", "d"]
    writing = [(word, "draft", 1.0 + i) for i, word in enumerate(words)]
    rects = [g.find(SVG + "rect") for _, g in tokens(race(writing, writing))][:5]
    x, y = ([float(rect.get(key)) - float(rects[0].get(key)) for rect in rects] for key in "xy")
    assert x == [0, 2 * 11, 4 * 11, 5 * 11, 0]
    assert y == [0, 0, 32, 32, 64]


def test_a_token_of_the_race_is_as_wide_as_what_is_shown_of_it():
    """Of a line break with its indentation that is one sign, of a control character an escape."""
    writing = [(words, "draft", 1.0 + i) for i, words in enumerate(UGLY) if words]
    for _, g in tokens(race(writing, writing)):
        shown = g.find(SVG + "text").text
        assert float(g.find(SVG + "rect").get("width")) == 11 * len(shown) - 1


def test_the_end_of_a_text_is_cut_before_signs_become_entities():
    assert pictures.tail([0] * 60, ["<"]) == "…" + "&lt;" * 50


def test_the_text_before_a_place_ends_with_the_accepted_drafts():
    words = ["if ", "x", "y", "z"]
    p = q = torch.full((3, 4), 0.25)
    one = SimpleNamespace(accepted=2, p=p, q=q, drafts=[1, 1, 3], new=[1, 1, 2])
    picture = pictures.position_svg([0], one, words)
    assert [element.text for element in ET.fromstring(picture).iter(SVG + "text")
            if (element.text or "").startswith("…")] == ["…if xx"]


def test_no_two_tokens_of_the_race_overlap():
    """Also where a line is full, where one is broken, and where a token is wider than most."""
    texts = [*UGLY, "\n" + " " * 32] * 8
    writing = [(words, "draft", 1.0 + i) for i, words in enumerate(texts)]
    root, end = race(writing, writing), {}
    placed = [g.find(SVG + "rect") for _, g in tokens(root)]
    for panel in (placed[:len(texts)], placed[len(texts):]):
        end = {}
        for rect in panel:
            y, x, width = rect.get("y"), float(rect.get("x")), float(rect.get("width"))
            assert x >= end.get(y, 0) and (x + width <= 710)
            end[y] = x + width


# ---------------------------------------------------------------- a round, and one place in it

def an_example():
    """The example that is drawn."""
    pair = micro_pair()
    return pictures.example(pair, pair.encoding.encode_ordinary(pair.prompts[0]))


def test_the_round_shown_does_not_start_its_text(monkeypatch):
    """A first round feeds the prompt too, and the picture would be wrong: the pass of the target
    reads five tokens there, behind some in its cache."""
    shown = dict(drafts=[1, 2, 3, 4], tested=3, accepted=2, new=[1, 2, 5])
    rounds = [SimpleNamespace(cache_before=held, **shown) for held in (0, 8)]
    monkeypatch.setattr(pictures, "decode_speculative", lambda *_: rounds)
    assert pictures.example(None, [7, 7]) == ([7, 7, 1, 2, 5], rounds[1])


def test_every_text_that_is_tried_starts_from_the_prompt(monkeypatch):
    """And the prompt, which the caller goes on to use, is as it was."""
    unfit = SimpleNamespace(cache_before=8, drafts=[1], tested=1, accepted=1, new=[1, 2])
    fit = SimpleNamespace(cache_before=9, drafts=[1, 2, 3, 4], tested=3, accepted=2, new=[1, 2, 5])
    starts, prompt, texts = [], [7, 7], iter([[unfit], [unfit, fit]])

    def decode(pair, tokens, settings):
        starts.append(list(tokens))
        return next(texts)

    monkeypatch.setattr(pictures, "decode_speculative", decode)
    assert pictures.example(None, prompt) == ([7, 7, 1, 2], fit)
    assert starts == [[7, 7], [7, 7]] and prompt == [7, 7]


def test_the_round_shown_accepts_two_drafts_and_rejects_one(drawn):
    """The numbers in the picture are those of the loop's round."""
    text, one = an_example()
    assert (len(one.drafts), one.accepted, one.tested) == (4, 2, 3) and one.cache_before
    assert one.cache_fed == len(text) + 4 and one.cache_kept == len(text) + 2
    words = said(ET.fromstring(drawn["round"]))
    numbers = [one.q[i, x] for i, x in enumerate(one.drafts)]
    numbers += [one.p[i, x] for i, x in enumerate(one.drafts)]
    numbers += [*one.verdict.columns["chance"][:3]]
    assert all(f" {number:.2g} " in words for number in numbers)
    assert f"from {one.cache_fed} tokens to {one.cache_kept}" in words


def test_bars_are_probabilities_and_split_p_and_q():
    """Overlap and overhang of p make p, overlap and overhang of q make q, for each token and for
    all others together; all of it sums to 1, and each overhang starts where the overlap ends."""
    p, q = tables([5., 1, 3, 0, 2, 1, 1, 1, 1, 1, 4], [1., 5, 3, 2, 0, 1, 1, 2, 1, 1, 1]).float()
    rows = bars(place(p, q, 3, 4))
    order = torch.maximum(p, q).argsort(descending=True).tolist()
    shown = [i for i in order if i in order[:6] or i in (3, 4)]
    assert len(rows) == len(shown) + 1
    others = [i for i in range(11) if i not in shown]
    for row, ids in zip(rows, [[i] for i in shown] + [others]):
        overlap, above, below = (row[kind][1] for kind in ("draft", "correction", "rejected"))
        assert overlap == pytest.approx(torch.minimum(p, q)[ids].sum().item(), abs=2e-6)
        assert overlap + above == pytest.approx(p[ids].sum().item(), abs=2e-6)
        assert overlap + below == pytest.approx(q[ids].sum().item(), abs=2e-6)
        assert row["correction"][0] == row["rejected"][0] == overlap
    for of_one in (("draft", "correction"), ("draft", "rejected")):
        assert sum(row[kind][1] for row in rows for kind in of_one) == pytest.approx(1, abs=1e-5)


def test_the_place_shown_is_that_of_the_rejection(drawn):
    """p is above q where the correction was drawn, and below where the draft was rejected."""
    _, one = an_example()
    p, q, x, y = one.p[2], one.q[2], one.drafts[2], one.new[2]
    assert p[x] < q[x] and residual(p, q)[y] > 0
    rows = bars(ET.fromstring(drawn["position"]))
    overlap = torch.minimum(p, q).sum().item()
    assert sum(row["draft"][1] for row in rows) == pytest.approx(overlap, abs=1e-4)
    assert {"draft, rejected", "correction"} <= {
        element.text for element in ET.fromstring(drawn["position"]).iter(SVG + "text")}


def test_no_text_of_a_model_breaks_a_picture():
    """Signs of XML, control characters, braces: shown as they are or as escapes."""
    writing = [(words, "draft", 1.0 + i) for i, words in enumerate(UGLY)]
    shown = [g.find(SVG + "text").text or "" for _, g in tokens(race(writing, writing))]
    assert shown[:len(UGLY)] == shown[len(UGLY):]
    assert {"<&>", "⏎", "\\x1b[2J", "]]>", '"', "\\ufffe", "{x}"} <= set(shown)
    p, q = tables([2.] * 10 + [0], [1.] * 10 + [10])
    names = said(place(p, q, 10, 4)).split()
    assert {"<&>", "⏎␣␣␣␣", "\\x1b[2J", "]]>", '"'} <= {*names}, names


# ---------------------------------------------------------------- the program

@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """The pictures are written here."""
    shutil.copytree(DOCS / "templates", tmp_path / "templates")
    monkeypatch.setattr(pictures, "DOCS", tmp_path)
    return tmp_path


def test_the_program_writes_three_pictures(elsewhere, kept, capsys):
    assert ended(pictures, kept[1:2], capsys) == (0, "", "")
    assert {path.name for path in elsewhere.glob("*.svg")} == {"race.svg", "round.svg",
                                                               "position.svg"}
    for path in elsewhere.glob("*.svg"):
        ET.parse(path)


def test_a_missing_pair_is_one_clear_line(elsewhere, capsys):
    missing = ended(pictures, [elsewhere / "no"], capsys)
    assert is_one_clear_line(missing, "no trained pair")
    assert not list(elsewhere.glob("*.svg"))
