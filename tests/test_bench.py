"""programs/bench.py: the formulas by calculation, and each figure by a clock that stands still but
for what the models and rules are made to take."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from micro import DEVICE, Clock, ended, micro_pair
from pair import Pair, save_pair
from programs import bench
from programs.bench import expected_speedup, expected_tokens, measure, table, typical
from programs.options import Settings, about
from rigs import Spy, identity_rig, random_gpt
from specdec import DraftModel
from variants import DRAFTERS, RULES


def close(wanted):
    return pytest.approx(wanted, rel=1e-9)


@given(st.integers(0, 1000), st.integers(1, 50))
def test_equation_1_is_the_sum_of_chances_to_stand(thousandths, gamma):
    alpha = thousandths / 1000
    assert expected_tokens(alpha, gamma) == close(np.power(alpha, np.arange(gamma + 1)).sum())


@pytest.mark.parametrize("alpha, c, gamma, speedup", [
    (0.8, 0.02, 11, 3.82), (0.8, 0.1, 6, 2.47), (0.9, 0.02, 19, 6.37), (0.9, 0.1, 10, 3.43),
    (0.6, 0.1, 3, 1.67)])
def test_the_best_gamma_is_that_of_theorem_3_8(alpha, c, gamma, speedup):
    speedups = [expected_speedup(expected_tokens(alpha, g), g, c, 1) for g in range(1, 41)]
    assert (1 + int(np.argmax(speedups)), round(max(speedups), 2)) == (gamma, speedup)


# ---------------------------------------------------------------- what a pass and a step cost

A_PASS, A_ROW, A_DRAFT, A_RULE = 1.0, 0.125, 0.0625, {"token": 0.03125, "block": 0.25}
STEP = A_PASS + A_ROW  # a pass of the target over one row


def rig(monkeypatch, target=None, draft=None):
    """(pair, clock): the target, the draft and the rules take the times above."""
    def slow(rule, seconds):
        return lambda *given: clock.add(seconds) or rule(*given)

    clock = Clock()
    for name, seconds in A_RULE.items():
        monkeypatch.setitem(RULES, name, slow(RULES[name], seconds))
    target = Spy(target or random_gpt(9, 2, context=64, spread=0.4),
                 lambda held, ids: clock.add(A_PASS + A_ROW * len(ids)))
    draft = Spy(draft or random_gpt(9, 1, 1, context=64, spread=0.4),
                lambda held, ids: clock.add(A_DRAFT))
    return Pair(target, draft, SimpleNamespace(eot_token=0), [], {}), clock


@pytest.mark.parametrize("verify", ["token", "block"])
def test_a_row_has_c_v_and_predictions_of_its_own_gamma(verify, monkeypatch):
    pair, clock = rig(monkeypatch)
    for gamma in (1, 3, 6):
        row = measure(pair, [[1, 2, 3], [3, 1]], Settings(40, gamma=gamma, verify=verify), clock)
        assert row["c"] == close(A_DRAFT / STEP) and row["new_tokens"] == 80
        assert row["v"] == close((A_PASS + A_ROW * (gamma + 1) + A_RULE[verify]) / STEP)
        drafts = row["drafted"] / row["passes"]
        assert row["predicted"] == close(row["tokens_per_pass"] / (row["v"] + row["c"] * drafts))
        eq1 = expected_tokens(row["acceptance"], drafts) if verify == "token" else None
        assert row["eq1"] == eq1 and row["alpha"] == (eq1 and row["acceptance"])


@pytest.mark.parametrize("new, gamma, passes, drafted", [(2, 1, 1, 1), (7, 4, 2, 5)])
def test_a_prediction_charges_a_clipped_round_as_it_was(new, gamma, passes, drafted, monkeypatch):
    """Every draft is accepted. Where there is one round, the prediction is the speedup."""
    pair, clock = rig(monkeypatch, *identity_rig(vocab_size=9, context=64))
    row = measure(pair, [[1]], Settings(new, gamma=gamma), clock)
    assert (row["passes"], row["drafted"], row["accepted"]) == (passes, drafted, drafted)
    assert row["eq1"] == close(new / passes)
    assert row["predicted"] == close(new / (row["v"] * passes + row["c"] * drafted))
    assert passes > 1 or row["predicted"] == close(row["speedup"])


def test_c_and_v_are_medians_over_prompts_and_of_one_draft_where_a_round_has_fewer(monkeypatch):
    """Here as many drafts come as the prompt has tokens."""
    def fewer(pair, warp):
        draft, prompts = DraftModel(pair.draft, warp), []
        return lambda tokens, gamma, choose: prompts.append(len(tokens)) or draft(
            tokens, min(gamma, prompts[0]), choose)

    pair, clock = rig(monkeypatch)
    monkeypatch.setitem(DRAFTERS, "fewer", fewer)
    settings = Settings(30, gamma=4, drafter="fewer")
    row = measure(pair, [[1], [1, 2, 3], [1, 2]], settings, clock)
    assert row["c"] == close(A_DRAFT / STEP)
    assert row["v"] == close((A_PASS + A_ROW * (2 + 1) + A_RULE["token"]) / STEP)
    assert typical([9.0, 1.0, 3.0]) == 2 and typical([9.0]) == 9  # the median but of the first


# ---------------------------------------------------------------- the table

ROW = {"gamma": 16, "tokens_per_pass": 16.25, "eq1": 16.5, "acceptance": 0.987, "c": 0.012,
       "v": 1.23, "plain_tokens_per_s": 12345.0, "speculative_tokens_per_s": 23456.0,
       "predicted": 12.0, "speedup": 11.5, "speedup_min": 11.25, "speedup_max": 12.75}
SHOWN = "16 16.25 {} 0.987 0.012 1.23 12345 23456 12.00 11.50 (11.25-12.75)"


def test_a_row_shows_each_figure(monkeypatch, capsys):
    rows = iter([ROW, ROW | {"eq1": None}])
    monkeypatch.setattr(bench, "measure", lambda *_: next(rows))
    table(micro_pair(), Settings(), (16, 16), None)
    first, second, best = capsys.readouterr().out.splitlines()[-3:]
    assert first.split() == SHOWN.format("16.50").split()
    assert second.split() == SHOWN.format("-").split() and best == "best gamma: 16 (11.50x)"


@pytest.mark.parametrize("asked, gammas, settings", [
    ("", (1, 2), dict(seed=0, top_k=None, drafter="model", verify="token", temperature=1)),
    ("--use MINE --drafter mine", (1, 2), dict(drafter="mine")),
    ("--use MINE --verify mine --gamma 3", (3,), dict(verify="mine", eq1=None)),
    ("--drafter lookup --verify block --gamma 3", (3,), dict(drafter="lookup", verify="block")),
    ("--temperature 0.5 --gamma 3 --top-k 5 --top-p 0.9 --seed 7", (3,),
     dict(top_k=5, top_p=0.9, seed=7, temperature=0.5))])
def test_screen_and_file_show_the_same_figures_of_what_is_asked_for(
        asked, gammas, settings, tmp_path, monkeypatch, capsys):
    """128 tokens are decoded after each of four prompts of 16 tokens, with one's own drafters too;
    here after one prompt an eighth of the tokens, to be quick."""
    seen, real, file, pair = [], bench.measure, tmp_path / "figures.json", micro_pair()
    monkeypatch.setattr(bench, "GAMMAS", (1, 2))
    monkeypatch.setattr(bench, "measure", lambda pair, prompts, settings, now: seen.append(
        prompts) or real(pair, prompts[:1], replace(settings, max_new=settings.max_new // 8), now))
    for names in (RULES, DRAFTERS):
        monkeypatch.setitem(names, "mine", None)  # so that it is gone after the test
    save_pair(pair, tmp_path)
    mine = Path(bench.__file__).parent.parent / "examples/mine.py"
    arguments = [mine if word == "MINE" else word for word in asked.split()] + [
        "--checkpoint", tmp_path, "--device", DEVICE.type, "--dtype", "float64", "--json", file]
    code, out, err = ended(bench, arguments, capsys)
    figures = json.loads(file.read_text(encoding="utf-8"), parse_constant=pytest.fail)
    rows = figures.pop("rows")
    assert (code, err) == (0, "") and [row["gamma"] for row in rows] == [*gammas]
    assert seen == [[pair.encoding.encode_ordinary(prompt)[:16] for prompt in pair.prompts[:4]]
                    for row in rows]
    lines = [line.split() for line in out.splitlines()]
    for row in rows:
        assert settings.items() <= row.items() and row["new_tokens"] == 16
        eq1 = "-" if row["eq1"] is None else f"{row['eq1']:.2f}"
        assert bench.ROW.format(**row | {"eq1": eq1}).split() in lines
    best = max(rows, key=lambda row: row["speedup"])
    assert out.endswith(f"best gamma: {best['gamma']} ({best['speedup']:.2f}x)\n")
    assert "target in float64" in figures["machine"] and figures["pair"] == about(pair)["pair"]
    assert figures["pair"] in out and figures["machine"] in out
