"""The comparison of shapes: by figures worked out by hand, and by a program run on small pairs."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest

import bench
from rigs import MICRO, SOURCE, ended, forbidden
from train_tiny import Limit

spec = importlib.util.spec_from_file_location(
    "shapes", Path(bench.__file__).parent / "docs" / "shapes.py")
shapes = importlib.util.module_from_spec(spec)
spec.loader.exec_module(shapes)


def a_shape(bits_per_byte, plain, speculative):
    return {"bits_per_byte": bits_per_byte, "plain": plain,
            "ways": {"T=0": {"plain": plain, "speculative": speculative}}}


def test_a_shape_is_held_against_the_fastest_plain_one_as_good():
    """One of 1.87 bits a byte is held against those of at most 1.89, one of 1.86 is not."""
    given = [a_shape(1.98, 180.0, 540.0), a_shape(1.87, 300.0, 720.0), a_shape(1.86, 400.0, 800.0),
             a_shape(1.89, 500.0, 500.0)]
    shapes.judge(given)
    ways = [one["ways"]["T=0"] for one in given]
    assert [way["usual"] for way in ways] == [3, 2.4, 2, 1]
    assert [way["honest"] for way in ways] == [540 / 500, 720 / 500, 2, 1]


def test_the_best_gamma_is_the_fastest_over_all_prompts():
    """Gamma 2 takes 1/10 + 1/10 of a second a token, gamma 4 takes 1/5 + 1/40."""
    def row(gamma, speculative):
        return {"gamma": gamma, "plain_tokens_per_s": 4.0, "speculative_tokens_per_s": speculative}

    found = shapes.fastest([[row(2, 10.0), row(4, 5.0)], [row(2, 10.0), row(4, 40.0)]])
    assert found == {"gamma": 2, "plain": 4, "speculative": 10}


@pytest.fixture
def small(monkeypatch):
    """Two shapes that train in a second, and decode a few tokens."""
    quick = replace(MICRO, train_target=Limit(40, 1), train_draft=Limit(5, 1),
                    ask_target=Limit(5, 1), distill_draft=Limit(5, 1))
    monkeypatch.setitem(shapes.PRESETS, "tiny", quick)
    monkeypatch.setattr(shapes, "SHAPES", [(1, 8), (2, 16)])
    decoded = shapes.decoded
    monkeypatch.setattr(shapes, "decoded", lambda pairs, now: decoded(pairs, now, 1, max_new=4))


def test_shapes_are_trained_once_and_all_decoded(small, tmp_path, monkeypatch, capsys):
    source, file = tmp_path / "source.py", tmp_path / "shapes.json"
    source.write_text(SOURCE, encoding="utf-8")
    monkeypatch.setattr(shapes, "standard_library", lambda: [source])
    arguments = ["--minutes", 0.02, "--keep", tmp_path / "kept", "--json", file]
    code, out, err = ended(shapes, arguments, capsys)
    assert (code, err) == (0, "") and out.count("kept in") == 2
    figures = json.loads(file.read_text(encoding="utf-8"))
    assert figures["minutes"] == 0.02
    assert [shape["shape"] for shape in figures["shapes"]] == ["1 x 8", "2 x 16"]
    for shape in figures["shapes"]:
        assert shape["steps"] > 0 and set(shape["ways"]) == set(shapes.WAYS)
        for way in shape["ways"].values():
            assert way["usual"] == way["speculative"] / way["plain"] and way["honest"] > 0
    monkeypatch.setattr(shapes, "train_and_keep", forbidden)
    assert ended(shapes, arguments, capsys)[0] == 0


@pytest.mark.parametrize("arguments", [
    ["--keep", ""], ["--json", ""], ["--json", "no/place/a.json"], ["--minutes", "0"],
    ["--minutes", "nan"]], ids=" ".join)
def test_what_cannot_work_is_refused_before_training(arguments, monkeypatch, capsys):
    monkeypatch.setattr(shapes, "train_and_keep", forbidden)
    code, out, err = ended(shapes, arguments, capsys)
    assert (code, out, err.count("\n")) == (2, "", 1)
