"""The pictures as data: what they show is what they were given, to scale, and they stand alone."""

import json
import re
import shutil
import xml.etree.ElementTree as ET
from itertools import accumulate

import pytest

from micro import ended
from programs import pictures

SVG = "{http://www.w3.org/2000/svg}"
UGLY = ["<&>", "⏎····", "\\x1b[2J", "]]>", '"', "{x}", "日本", "·a", "long" * 9, "·"]


def some_data():
    """Values such as a trace gives, of 15 rounds of four drafts: 0, 1, 2, 3, 4, 0 ... stand."""
    row = [{"id": i, "name": UGLY[i], "mark": {2: "rejected", 4: "correction"}.get(i, ""),
            "p": 0.05 + 0.02 * i, "q": 0.2 - 0.03 * i, "both": min(0.05 + 0.02 * i, 0.2 - 0.03 * i)}
           for i in range(6)]
    row.append({"id": None, "name": "all others", "mark": "", "p": 0.4, "q": 0.25, "both": 0.2})
    rounds = []
    for i in range(15):
        new = [{"name": UGLY[(i + j) % 10], "writer": "draft"} for j in range(i % 5 + 1)]
        new[-1]["writer"] = "bonus" if i % 5 == 4 else "correction"
        rounds.append({"drafts": [[j, UGLY[j], 0.25, 0.5] for j in range(4)], "new": new,
                       "seconds": [0.003, 0.010 + 0.001 * (i % 4)], "rows": [row] * 5})
    return {"pair": "target 8x384, draft 1x256", "machine": "<cpu> & more", "rounds": rounds,
            "settings": {"gamma": 4}, "plain": [0.006 + 0.001 * (i % 3) for i in range(50)]}


def drawn():
    data, before = some_data(), "".join(UGLY)[-43:]
    return {"timeline": pictures.timeline_svg(data), "race": pictures.race_svg(data),
            "position": pictures.position_svg(data, data["rounds"][2]["rows"][2], before)}


def said(root):
    return " ".join("".join(element.itertext()) for element in root.iter(SVG + "text"))


def parts(root, y):
    """(x, end, class, words) of the parts of a lane at this height."""
    found = []
    for part in root.iter(SVG + "svg"):
        if part.get("y") == str(y):
            x, width = float(part.get("x")), float(part.get("width"))
            found.append((x, x + width, part.find(SVG + "rect").get("class"), said(part)))
    return found


# ---------------------------------------------------------------- all pictures

@pytest.mark.parametrize("name", drawn())
def test_a_picture_stands_alone(name):
    """Well-formed, titled, without scripts; it loads nothing. What looks like markup stays text."""
    root = ET.fromstring(drawn()[name])
    assert root.tag == SVG + "svg" and root.find(SVG + "title").text.strip()
    assert {element.tag.removeprefix(SVG) for element in root.iter()} <= {
        "svg", "title", "style", "pattern", "g", "rect", "path", "line", "circle", "polyline",
        "text", "tspan", "animate"}
    assert drawn()[name].count("http") == 1  # the name of the format
    assert not re.search(r"href|url\((?!#hatch)|@import|@font-face", drawn()[name])
    assert "<cpu>" in said(root) and (name == "timeline" or "<&>" in said(root))


# ---------------------------------------------------------------- time, to scale

def test_lanes_are_to_scale():
    """From the end of the prompt's pass on. Draft steps share the seconds of the drafts, the pass
    has the rest of the round, and no gap is between them. 7 plain steps of .007: 50 ms."""
    data = some_data()
    root, x = ET.fromstring(pictures.timeline_svg(data)), 380 / 0.05
    assert "The first 50 milliseconds after the prompt" in said(root)
    plain = [10 + x * end for end in accumulate(data["plain"][1:], initial=0)]
    shown = parts(root, 76)
    assert [part[0] for part in shown] == pytest.approx(plain[:len(shown)], abs=0.011)
    assert shown[-1][1] == pytest.approx(10 + x * 0.05, abs=0.02), "the last is cut where it ends"
    edges, start = [], 10
    for one in data["rounds"][1:]:
        drafting, whole = one["seconds"]
        edges += [start + x * drafting * i / 4 for i in range(5)]
        start += x * whole
    shown = parts(root, 150)
    assert [part[0] for part in shown] == pytest.approx(edges[:len(shown)], abs=0.011)
    assert [kind for *_, kind, _ in shown[:10]] == (["q"] * 4 + ["p"]) * 2
    for before, after in zip(shown, shown[1:]):
        assert before[1] == pytest.approx(after[0], abs=0.021), "a gap between two parts"


def test_the_timeline_says_what_the_run_did():
    """In 50 ms 7 plain steps end, and rounds of 11, 12, 13 and 10 ms, which bring 2 to 5 tokens.
    The sentence is of all rounds but the first."""
    data = some_data()
    root = ET.fromstring(pictures.timeline_svg(data))
    assert [words for *_, words in parts(root, 76)] == ["1"] * 7 + [""]
    assert [words for *_, words in parts(root, 150) if words] == ["2", "3", "4", "5"]
    assert "7 tokens" in said(root) and f"{2 + 3 + 4 + 5} tokens" in said(root)
    brought, cost = sum(len(one["new"]) for one in data["rounds"][1:]) / 14, 0.0115 / 0.007
    assert f"{cost:.2f} plain steps" in said(root) and f"{brought:.2f} tokens" in said(root)
    assert f"{brought / cost:.2f} times as fast" in said(root)


def test_a_race_is_to_scale_and_both_ways_write_the_same():
    """Each token appears at its time, as many times slower as is said, with its part of a bar: as
    long as the step was, or an even part of the round. No two tokens overlap."""
    data = some_data()
    root, rounds = ET.fromstring(pictures.race_svg(data)), data["rounds"]
    groups = [g for g in root.iter(SVG + "g") if g.find(SVG + "svg") is not None]
    count = sum(len(one["new"]) for one in rounds)
    ways = {"plain": [(took, 1) for took in data["plain"][:count]],
            "speculative": [(one["seconds"][1], len(one["new"])) for one in rounds]}
    last = max(sum(took for took, _ in way) for way in ways.values())
    slower, words = int(re.search(r"shown (\d+) times", said(root))[1]), [said(g) for g in groups]
    assert words[:count] == words[count:] and len(groups) == 2 * count
    for way in ways.values():
        end = 0
        for took, new in way:
            end += took
            for i in range(new):
                g, right = groups.pop(0), 10 + 500 * (end - took * (new - 1 - i) / new) / last
                animate, bar = g.find(SVG + "animate"), g.find(SVG + "svg")
                second = float(animate.get("keyTimes")[2:]) * float(animate.get("dur")[:-1])
                assert second == pytest.approx(slower * end, abs=0.01)
                x, width = float(bar.get("x")), float(bar.get("width"))
                assert x + width == pytest.approx(right, abs=0.02)
        assert f"{1000 * end:.0f} ms" in said(root)


# ---------------------------------------------------------------- one place, all gammas

def test_bars_are_probabilities_and_split_p_and_q():
    """Solid is what both have in common, hatched what p has above, the frame is q: on one scale."""
    row = some_data()["rounds"][2]["rows"][2]
    root = ET.fromstring(pictures.position_svg(some_data(), row, "before"))
    places = [place for place in root.iter(SVG + "svg") if place.get("x") == "120"]
    for item, (hatched, solid), frame in zip(row, places[::2], places[1::2]):
        widths = [float(one.get("width")) for one in (hatched, solid, frame)]
        assert widths == pytest.approx([1600 * item[key] for key in ("p", "both", "q")], abs=0.01)
    both = sum(item["both"] for item in row)
    assert f"accepted, {both:.2f}" in said(root) and f"corrections, {1 - both:.2f}" in said(root)


# ---------------------------------------------------------------- the program

def test_the_program_draws_all_from_one_pair(kept, tmp_path, monkeypatch, capsys):
    """The page of the law holds what was measured, and p and q of the place that is drawn."""
    shutil.copy(pictures.DOCS / "law.html", tmp_path)
    monkeypatch.setattr(pictures, "DOCS", tmp_path)
    monkeypatch.setattr(pictures, "measure", lambda *_: {"alpha": 0.5})
    asked = ["def", *kept, "--gamma", 4, "--dtype", "float64"]
    assert ended(pictures, asked, capsys) == (0, "", "")
    names = {path.name for path in tmp_path.iterdir()} - {"kept"}
    assert names == {*(f"{name}.svg" for name in drawn()), "law.html"}
    page = (tmp_path / "law.html").read_text(encoding="utf-8")
    values = json.loads(re.search(r'id="data">(.*?)</script>', page)[1])
    sums = [sum(item[key] for item in values["items"]) for key in ("p", "q", "both")]
    assert values["measured"] == {"alpha": 0.5} and sums[:2] == pytest.approx([1, 1], abs=0.01)
    assert f"accepted, {sums[2]:.2f}" in said(ET.parse(tmp_path / "position.svg").getroot())
