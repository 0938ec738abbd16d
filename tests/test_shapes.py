"""The comparison of shapes: by figures worked out by hand, and by a program run on small pairs."""

import re
from dataclasses import replace

import pytest

from docs import shapes
from pair import load_pair
from program import Settings
from rigs import MICRO, SOURCE, forbidden, micro_pair
from train_tiny import Limit


def test_a_shape_is_held_against_the_fastest_plain_one_as_good():
    """One of 1.87 bits a byte is held against those of at most 1.89, one of 1.86 is not."""
    rows = [dict(bits_per_byte=bits, plain_tokens_per_s=plain, speculative_tokens_per_s=speculative)
            for bits, plain, speculative in ((1.98, 180.0, 540.0), (1.87, 300.0, 720.0),
                                             (1.86, 400.0, 800.0), (1.89, 500.0, 500.0))]
    shapes.judge(rows)
    assert [row["usual"] for row in rows] == [3, 2.4, 2, 1]
    assert [row["honest"] for row in rows] == [540 / 500, 720 / 500, 2, 1]


def test_the_gamma_shown_is_the_one_that_writes_fastest(monkeypatch):
    """Not the one with the largest speedup: plain decoding may be slow beside it."""
    def measured(pair, prompts, settings, now):
        assert len(prompts) == 2 and max(map(len, prompts)) <= 16
        rate, speedup = {2: (9.0, 1.5), 4: (10.0, 1.2), 8: (7.0, 1.1)}[settings.gamma]
        return dict(gamma=settings.gamma, speculative_tokens_per_s=rate, speedup=speedup)

    monkeypatch.setattr(shapes, "measure", measured)
    monkeypatch.setattr(shapes, "GAMMAS", (2, 4, 8))
    found = shapes.fastest(micro_pair(), Settings(), None)
    assert (found["gamma"], found["speedup"], found["n_layer"]) == (4, 1.2, 2)
    assert found["bits_per_byte"] == micro_pair().bits_per_byte["target"]


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Two shapes that train in a second, and decode a few tokens: the ways that are asked for."""
    quick = replace(MICRO, limits=dict(target=Limit(40, 1), draft=Limit(5, 1), labels=Limit(5, 1),
                                       distilling=Limit(5, 1)))
    source, measure = tmp_path / "source.py", shapes.measure
    source.write_text(SOURCE, encoding="utf-8")
    monkeypatch.setitem(shapes.PRESETS, "tiny", quick)
    monkeypatch.setattr(shapes, "SHAPES", [(1, 8), (2, 16)])
    monkeypatch.setattr(shapes, "MINUTES", 0.02)
    monkeypatch.setattr(shapes, "CHECKPOINTS", tmp_path)
    monkeypatch.setattr(shapes, "standard_library", lambda: [source])
    asked = []

    def measured(pair, prompts, settings, now):
        asked.append((settings.verify, settings.temperature))
        return measure(pair, prompts[:1], replace(settings, max_new=4), now)

    monkeypatch.setattr(shapes, "measure", measured)
    monkeypatch.setattr(shapes, "GAMMAS", (2,))
    return asked


def test_shapes_are_trained_once_and_all_decoded(small, monkeypatch, capsys, tmp_path):
    """In three ways each, in the order in which they are listed. No pair is noted as cut short."""
    shapes.main()
    assert capsys.readouterr().out.count("kept in") == 2
    assert [load_pair(path.parent).notes for path in tmp_path.rglob("pair.pt")] == [[], []]
    monkeypatch.setattr(shapes, "train_and_keep", forbidden)
    shapes.main()
    out = capsys.readouterr().out
    assert small[-6:] == [("token", 1)] * 2 + [("block", 1)] * 2 + [("token", 0)] * 2
    assert re.findall("(.*) rule, temperature (.)", out) == [
        ("token", "1"), ("block", "1"), ("token", "0")]
    assert re.findall(r"(?m)^ ?(\d+) x (\d+): .* honest \d", out) == [("1", "8"), ("2", "16")] * 3


def test_only_time_ends_the_training_of_a_target(small, monkeypatch):
    presets = []
    monkeypatch.setattr(shapes, "train_and_keep", lambda preset, *_: presets.append(preset))
    monkeypatch.setattr(shapes, "load_pair", lambda *_: None)
    shapes.trained(1, 8, "cpu")
    (preset,) = presets
    assert preset.target == dict(n_layer=1, n_embd=8)
    assert preset.limits["target"].steps > 10 ** 6 > 100 > preset.limits["draft"].steps
