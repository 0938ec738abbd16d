"""programs/bench.py: the formulas by calculation, and each figure by a clock that stands still but
for what the models and rules are made to take."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from micro import DEVICE, Clock, ended, micro_pair
from pair import Pair, save_pair
from programs import bench
from programs.bench import expected_tokens, measure, typical
from programs.options import Settings, about
from rigs import Spy, random_gpt
from specdec import DraftModel
from variants import DRAFTERS, RULES


def close(wanted):
    return pytest.approx(wanted, rel=1e-9)


@given(st.integers(0, 1000), st.integers(1, 50))
@example(1000, 4)
def test_equation_1_is_the_sum_of_chances_to_stand(thousandths, gamma):
    alpha = thousandths / 1000
    assert expected_tokens(alpha, gamma) == close(np.power(alpha, np.arange(gamma + 1)).sum())


# ---------------------------------------------------------------- what a pass and a step cost

A_PASS, A_ROW, A_DRAFT, A_RULE = 1.0, 0.125, 0.0625, {"token": 0.03125, "block": 0.25}
STEP = A_PASS + A_ROW  # a pass of the target over one row


def rig(monkeypatch):
    """(pair, clock): the target, the draft and the rules take the times above."""
    def slow(rule, seconds):
        return lambda *given: clock.add(seconds) or rule(*given)

    clock = Clock()
    for name, seconds in A_RULE.items():
        monkeypatch.setitem(RULES, name, slow(RULES[name], seconds))
    target = Spy(random_gpt(9, 2, context=64, spread=0.4),
                 lambda held, ids: clock.add(A_PASS + A_ROW * len(ids)))
    draft = Spy(random_gpt(9, 1, 1, context=64, spread=0.4), lambda held, ids: clock.add(A_DRAFT))
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

SHOWN = ("{gamma} {tokens_per_pass:.2f} {eq1} {acceptance:.3f} {c:.3f} {v:.2f} "
         "{plain_tokens_per_s:.0f} {speculative_tokens_per_s:.0f} {predicted:.2f} {speedup:.2f} "
         "({speedup_min:.2f}-{speedup_max:.2f})")


@pytest.mark.parametrize("asked, gammas, settings", [
    ("", (1, 2), dict(seed=0, top_k=None, drafter="model", verify="token", temperature=1)),
    ("--use MINE --drafter mine --verify mine --gamma 3", (3,),
     dict(drafter="mine", verify="mine", eq1=None)),
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
        assert SHOWN.format(**row | {"eq1": eq1}).split() in lines
    best = max(rows, key=lambda row: row["speedup"])
    assert out.endswith(f"best gamma: {best['gamma']} ({best['speedup']:.2f}x)\n")
    assert "target in float64" in figures["machine"] and figures["pair"] == about(pair)["pair"]
    assert figures["pair"] in out and figures["machine"] in out


def test_the_best_gamma_is_the_fastest_one_that_was_measured_whatever_was_predicted(
        monkeypatch, capsys):
    columns = ("tokens_per_pass", "acceptance", "c", "v", "plain_tokens_per_s",
               "speculative_tokens_per_s", "speedup_min", "speedup_max")
    rows = {gamma: {**dict.fromkeys(columns, 1.0), "gamma": gamma, "eq1": None,
                    "speedup": speedup, "predicted": predicted}
            for gamma, speedup, predicted in ((1, 1.5, 3.0), (2, 2.5, 2.0), (3, 2.0, 4.0))}
    monkeypatch.setattr(bench, "measure", lambda pair, prompts, settings, now: rows[settings.gamma])
    bench.table(SimpleNamespace(prompts=[]), Settings(8), rows, None)
    assert capsys.readouterr().out.endswith("best gamma: 2 (2.50x)\n")
