"""Time against theory: the formulas by exact calculation, and each figure by a false clock.

The false clock stands still but for what the models are made to take. So every figure is known in
advance, and equal means equal up to rounding: nothing here is timed.
"""

import copy
import itertools
import json
import math
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import bench
import specdec
from bench import (GAMMAS, SURVIVAL, about, against_theory, bottleneck, expected_passes,
                   expected_speedup, expected_tokens, laps, measure, print_rows, round_costs,
                   speedup_svg, text_ratios, typical)
from model import GPT, Config
from pair import Pair, save_pair
from program import Settings, race, rates, tally
from rigs import (CASES, DEVICE, PROMPT, ended, histories, identity_rig, is_one_clear_line,
                  micro_pair, random_gpt, saying, text)
from sampling import VERIFY, Verdict, verify_block, verify_token, warp
from specdec import DRAFTERS, DraftModel

ROUNDING = 1e-9


def close(wanted):
    return pytest.approx(wanted, rel=ROUNDING)


# ---------------------------------------------------------------- theory

@given(st.integers(0, 1000), st.integers(1, 50))
def test_equation_1_is_the_sum_of_chances_to_stand(thousandths, gamma):
    alpha = thousandths / 1000
    assert expected_tokens(alpha, gamma) == close(np.power(alpha, np.arange(gamma + 1)).sum())


def test_a_draft_that_is_always_accepted_brings_one_more():
    assert [expected_tokens(1, gamma) for gamma in (1, 4, 16)] == [2, 5, 17]
    assert expected_tokens(0, 4) == 1


@given(st.integers(0, 900), st.integers(1, 8))
def test_equation_1_is_the_rate_of_equally_hard_tokens(thousandths, gamma):
    """In the long run: over the end of a text, where a round is shorter, it is not."""
    alpha, n = thousandths / 1000, 60 * (gamma + 1)
    passes, twice = (expected_passes([[alpha] * gamma] * length, SURVIVAL["token"])
                     for length in (n, 2 * n))
    assert n / (twice - passes) == pytest.approx(expected_tokens(alpha, gamma), rel=1e-6)


@pytest.mark.parametrize("alpha, c, gamma, speedup", [
    (0.8, 0.02, 11, 3.82), (0.8, 0.1, 6, 2.47), (0.9, 0.02, 19, 6.37), (0.9, 0.1, 10, 3.43),
    (0.6, 0.1, 3, 1.67)])
def test_the_best_gamma_is_that_of_theorem_3_8(alpha, c, gamma, speedup):
    speedups = [expected_speedup(expected_tokens(alpha, g), g, c, 1) for g in range(1, 41)]
    assert 1 + int(np.argmax(speedups)) == gamma
    assert round(max(speedups), 2) == speedup


@pytest.mark.parametrize("v, speedup", [(1, 2), (1.5, 1.5), (2.5, 1)])
def test_a_dearer_pass_over_many_rows_lowers_the_speedup(v, speedup):
    """3 tokens from 5 drafts of .1 and a wide pass."""
    assert expected_speedup(3, 5, 0.1, v) == close(speedup)


ASKED_AGAIN = ["T=0", "T=1", "all three", *(name for name in CASES if name.endswith("endless"))]


@pytest.mark.parametrize("rule", SURVIVAL)
@pytest.mark.parametrize("name", ASKED_AGAIN)
def test_expected_passes_are_the_mean_over_all_ways(name, rule):
    """Over all ways that the real loop has to write a text, for every text that it can write."""
    case, ways = CASES[name], defaultdict(list)  # text -> (probability, passes) of each way
    for history, weight in histories(name, VERIFY[rule]).items():
        ways[text(history)].append((weight, len(history)))
    for tokens, found in ways.items():
        mean = sum(weight * passes for weight, passes in found) / sum(weight for weight, _ in found)
        ratios = text_ratios(case.models[0], case.make_drafter(), list(PROMPT), list(tokens),
                             case.gamma, case.warp)
        assert abs(expected_passes(ratios, SURVIVAL[rule]) - mean) < 1e-12


def test_a_token_that_the_wide_pass_rules_out_counts_as_one_that_it_hardly_allows():
    """Its p is 0 there where two tokens were nearly tied, and q may be 0, too, or not."""
    certain = partial(warp, temperature=0)
    ratios = text_ratios(saying(1), DraftModel(saying(2, 3), certain), [1], [3, 3, 1], 1, certain)
    assert ratios == [[0], [close(1e30)], []]


def test_no_ratio_makes_up_for_a_token_never_drafted():
    """A q / p of 0 ends the run, also between infinite ones: nothing is NaN."""
    assert SURVIVAL["block"]([math.inf, 0.0, math.inf]) == [1, 1, 0, 0]


# ---------------------------------------------------------------- a false clock

A_PASS, A_ROW, A_DRAFT, CACHED = 1.0, 0.125, 0.0625, 0.001
A_RULE = {"token": 0.03125, "block": 0.25, "never": 0.5}
STEP = A_PASS + A_ROW  # a pass of the target over one row


class Clock:
    """Stands still, but for what is added to it, and for `tick` at each look."""

    def __init__(self, tick=0.0):
        self.seconds, self.tick = 0.0, tick

    def __call__(self):
        self.seconds += self.tick
        return self.seconds


class OnTheClock:
    """A model whose passes take time: so much each, for each row, for each token in the cache."""

    def __init__(self, model, clock, a_pass, a_row=0.0, cached=0.0):
        self.model, self.clock, self.fed = model, clock, []
        self.a_pass, self.a_row, self.cached = a_pass, a_row, cached

    def __getattr__(self, name):
        return getattr(self.model, name)

    def __call__(self, ids, cache=None, rows=None):
        self.fed.append(ids.shape[1])
        held = cache.length if cache else 0
        self.clock.seconds += self.a_pass + self.a_row * ids.shape[1] + self.cached * held
        return self.model(ids, cache, rows)


class SlowAtFirst(OnTheClock):
    """As machines are: the first pass over each number of rows takes long."""

    def __call__(self, ids, cache=None, rows=None):
        if ids.shape[1] not in self.fed:
            self.clock.seconds += 1000
        return super().__call__(ids, cache, rows)


def a_target():
    return random_gpt(9, 2, context=64, spread=0.4)


def a_draft():
    return random_gpt(9, 1, 1, context=64, spread=0.4)


def rig(monkeypatch, target=None, draft=None, kind=OnTheClock):
    """(pair, clock): the target, the draft and the rules take the times above."""
    clock = Clock()
    target = kind(target or a_target(), clock, A_PASS, A_ROW)
    draft = kind(draft or a_draft(), clock, A_DRAFT)

    def slow(rule, seconds):
        def verify(*arguments):
            clock.seconds += seconds
            return rule(*arguments)

        return verify

    for name, rule in (("token", verify_token), ("block", verify_block), ("never", never)):
        monkeypatch.setitem(VERIFY, name, slow(rule, A_RULE[name]))
    encoding = SimpleNamespace(n_vocab=9, eot_token=0)
    return Pair(target, draft, encoding, {}, [], None, 4), clock


def never(p, q, drafted, choose):
    """A rule of one's own: no draft stands."""
    return Verdict(torch.zeros((), dtype=torch.long, device=p.device), choose(p[0]))


PROMPTS = [[1, 2, 3, 4, 5], [3, 1]]


def decoded(settings):
    """The rounds that the measured ones must be, decoded once more, without a clock."""
    pair = Pair(a_target(), a_draft(), SimpleNamespace(n_vocab=9, eot_token=0), {}, [], None, 4)
    each = [replace(settings, seed=settings.seed ^ i) for i in range(len(PROMPTS))]
    return [list(specdec.decode_speculative(pair, *one)) for one in zip(PROMPTS, each)]


def seconds_of(text, verify):
    """What rounds take: drafts, the rule, and the rows of a pass, in the first with the prompt."""
    rows = [one.cache_fed - one.cache_before for one in text]
    return sum(A_DRAFT * len(one.drafts) + A_RULE[verify] + A_PASS + A_ROW * fed
               for one, fed in zip(text, rows))


def plain_seconds(tokens, new):
    return A_PASS + A_ROW * len(tokens) + (new - 1) * STEP


# ---------------------------------------------------------------- c and v

def measured(pair, prompts, settings, clock, gammas):
    """The figures of several gammas."""
    return [measure(pair, prompts, replace(settings, gamma=gamma), clock) for gamma in gammas]


@pytest.mark.parametrize("verify", ["token", "block"])
def test_the_costs_of_a_round_are_what_its_parts_take(verify, monkeypatch):
    pair, clock = rig(monkeypatch)
    for gamma in (1, 2, 5):
        settings = Settings(40, gamma=gamma, verify=verify)
        draft, wide_pass = round_costs(pair, PROMPTS[0], settings, clock)
        assert draft == close(A_DRAFT)
        assert wide_pass == close(A_PASS + A_ROW * (gamma + 1) + A_RULE[verify])


@pytest.mark.parametrize("verify", ["token", "block"])
def test_measured_rows_have_c_and_v_of_their_own_gamma(verify, monkeypatch):
    pair, clock = rig(monkeypatch)
    for row in measured(pair, PROMPTS, Settings(40, verify=verify), clock, (1, 3, 6)):
        assert row["c"] == close(A_DRAFT / STEP)
        assert row["v"] == close((A_PASS + A_ROW * (row["gamma"] + 1) + A_RULE[verify]) / STEP)


@pytest.mark.parametrize("new, rows", [(2, 5 + 1), (4, 2)])
def test_steps_that_read_the_prompt_do_not_count(new, rows, monkeypatch):
    """Where every draft is accepted, two new tokens at gamma 1 are one round: there is no other. Of
    four new tokens the second round counts, which feeds a draft and the bonus before it."""
    pair, clock = rig(monkeypatch, *identity_rig(vocab_size=9, context=64))
    _, wide_pass = round_costs(pair, PROMPTS[0], Settings(new, gamma=1), clock)
    assert wide_pass == close(A_PASS + A_ROW * rows + A_RULE["token"])


def test_the_time_of_a_draft_is_that_of_one_where_a_round_has_fewer_than_gamma(monkeypatch):
    """Lookup often has, and a drafter of one's own may."""
    def fewer(pair, warp):
        draft = DraftModel(pair.draft, warp)
        return lambda tokens, gamma, choose: draft(tokens, min(gamma, 2), choose)

    pair, clock = rig(monkeypatch)
    monkeypatch.setitem(DRAFTERS, "fewer", fewer)
    settings = Settings(40, gamma=5, drafter="fewer")
    assert round_costs(pair, PROMPTS[0], settings, clock)[0] == close(A_DRAFT)


def test_the_typical_time_is_a_median_without_the_first():
    assert typical([9.0]) == 9 and typical([9.0, 1.0]) == 1 and typical([9.0, 1.0, 3.0]) == 2
    assert typical([0.0, 5.0, 1.0, 100.0]) == 5


def test_laps_are_the_times_before_each_thing_given():
    clock = Clock()

    def steps():
        for seconds in (3.0, 1.0, 2.0):
            clock.seconds += seconds
            yield seconds

    assert laps(steps(), clock) == ([3, 1, 2], [3, 1, 2])


# ---------------------------------------------------------------- the speedup

@pytest.mark.parametrize("verify, temperature", [
    ("token", 1.0), ("block", 1.0), ("token", 0.0), ("never", 1.0)])
def test_speedups_are_seconds_of_both_ways(verify, temperature, monkeypatch):
    """Plain decoding reads the prompt once and then feeds one token a pass. A text goes on past an
    end of text to its full length, both ways. Each round is counted as it was."""
    settings, new = Settings(30, temperature=temperature, verify=verify, seed=3), 30
    pair, clock = rig(monkeypatch)
    pair.encoding.eot_token = text(decoded(replace(settings, gamma=1))[0])[5]
    rows = measured(pair, PROMPTS, settings, clock, (1, 3, 6))
    plain = sum(plain_seconds(tokens, new) for tokens in PROMPTS)
    assert [row["gamma"] for row in rows] == [1, 3, 6]
    for row in rows:
        texts = decoded(replace(settings, gamma=row["gamma"]))
        assert pair.encoding.eot_token in text(texts[0])[:-1]
        taken = sum(seconds_of(rounds, verify) for rounds in texts)
        assert row["plain_tokens_per_s"] == close(2 * new / plain)
        assert row["speculative_tokens_per_s"] == close(2 * new / taken)
        assert row["speedup"] == row["speedup_min"] == row["speedup_max"] == close(plain / taken)
        assert row["plain_new_tokens"] == row["new_tokens"] == 2 * new
        assert {**row, **tally([one for rounds in texts for one in rounds])} == row
        rejected = sum(one.writers.count("correction") for rounds in texts for one in rounds)
        assert row["alpha"] == row["accepted"] / (row["accepted"] + rejected)
        assert (row["drafter"], row["verify"], row["temperature"]) == ("model", verify, temperature)


def test_what_is_slow_at_first_is_not_timed(monkeypatch):
    """The runs for c and v come first and warm up: speedups are those of a warm machine."""
    settings = Settings(40, verify="block")
    warm, cold = [], []
    for rows, kind in ((warm, OnTheClock), (cold, SlowAtFirst)):
        pair, clock = rig(monkeypatch, kind=kind)
        rows += measured(pair, PROMPTS, settings, clock, (1, 2, 4))
    for row, other in zip(warm, cold, strict=True):
        assert {key: close(figure) if isinstance(figure, float) else figure
                for key, figure in row.items()} == other


def test_what_is_compared_runs_in_turn():
    ran, clock = [], Clock()

    def way(name, seconds):
        def run():
            ran.append(name)
            clock.seconds += seconds * len(ran)
            yield name

        return run

    given, seconds = race([way("a", 1), way("b", 2)], clock)
    assert ran == ["a", "b"] * 3 and given == [["a"], ["b"]]
    assert seconds == [[1, 3, 5], [4, 8, 12]]


def test_rates_are_medians_of_what_ran_side_by_side():
    assert rates(10, [1.0, 2.0, 9.0], [1.0, 4.0, 2.0]) == {
        "plain_tokens_per_s": 5, "speculative_tokens_per_s": 5,
        "speedup": 1, "speedup_min": 0.5, "speedup_max": 4.5, "runs": 3}


def test_predicted_and_measured_speedup_are_one_where_nothing_is_chance(monkeypatch):
    """Every draft is accepted, and each round is the same: a prompt of one token, gamma 1."""
    pair, clock = rig(monkeypatch, *identity_rig(vocab_size=9, context=64))
    pair.draft.a_row = 0.0
    (row,) = measured(pair, [[1]], Settings(2), clock, (1,))
    assert row["tokens_per_pass"] == 2 == close(row["expected"])
    assert row["predicted"] == close(row["speedup"]) == close(2 / (row["v"] + row["c"]))


def test_a_prediction_charges_a_clipped_round_as_it_was(monkeypatch):
    """2 passes for 7 tokens, with 5 drafts: 2.5 a round and not 4."""
    pair, clock = rig(monkeypatch, *identity_rig(vocab_size=9, n_layer=2, context=64))
    (row,) = measured(pair, [[1]], Settings(7), clock, (4,))
    assert (row["drafted"], row["passes"]) == (5, 2)
    assert row["expected"] == close(7 / 2) == row["tokens_per_pass"]
    assert row["predicted"] == close(7 / 2 / (row["v"] + row["c"] * 2.5))
    assert row["eq1"] == close((5 + 2) / 2)


@pytest.mark.parametrize("drafter", ["model", "lookup"])
def test_greedy_passes_are_as_many_as_expected(drafter, monkeypatch):
    pair, clock = rig(monkeypatch)
    settings = Settings(40, temperature=0.0, drafter=drafter)
    for row in measured(pair, PROMPTS, settings, clock, (1, 4)):
        assert row["expected"] == close(row["tokens_per_pass"])


def mine(pair, warp):
    """A drafter of one's own, with a coin of its own: how many drafts."""
    propose, half = DraftModel(pair.draft, warp), torch.tensor([0.5, 0.5], device=DEVICE)
    return lambda tokens, gamma, choose: propose(tokens, min(gamma, choose(half).item()), choose)


@pytest.mark.parametrize("part", [{"verify": "never"}, {"drafter": "mine"}], ids=str)
def test_what_theory_does_not_know_is_measured_alone(part, monkeypatch, capsys):
    monkeypatch.setitem(DRAFTERS, "mine", mine)
    pair, clock = rig(monkeypatch)
    rows = measured(pair, PROMPTS, Settings(20, **part), clock, (1, 4))
    assert all(row["expected"] is None and row["predicted"] is None for row in rows)
    assert all(row["speedup"] > 0 and row["new_tokens"] == 40 for row in rows)
    print_rows(rows)
    out = capsys.readouterr().out
    assert "by theory" not in out and " - " in out


def test_equation_1_speaks_of_the_token_rule_alone(monkeypatch):
    pair, clock = rig(monkeypatch)
    for rule in VERIFY:
        (row,) = measured(pair, PROMPTS, Settings(20, verify=rule), clock, (4,))
        assert (row["eq1"] is not None) == (rule == "token")


def test_what_is_expected_of_two_texts_is_that_of_each():
    """The draft model's cache of one text is not that of the next."""
    pair, settings = micro_pair(), Settings(12, gamma=2)
    prompts = [[72, 105, 32], [101, 102, 103, 104]]
    runs = [list(specdec.decode_speculative(pair, prompt, settings)) for prompt in prompts]
    passes = 0
    for prompt, run in zip(prompts, runs):
        fresh = DraftModel(pair.draft, settings.warp())
        ratios = text_ratios(pair.target, fresh, prompt, list(text(run)), 2, settings.warp())
        passes += expected_passes(ratios, SURVIVAL["token"])
    assert against_theory(pair, prompts, settings, runs, 0.1, 1)["expected"] == close(24 / passes)


def test_each_prompt_has_a_seed_of_its_own(monkeypatch):
    """Also where the seed is the last that there is."""
    seeds = []
    pair, clock = rig(monkeypatch)

    def decode_plain(pair, tokens, settings):
        seeds.append(settings.seed)
        return specdec.decode_plain(pair, tokens, settings)

    monkeypatch.setattr(bench, "decode_plain", decode_plain)
    clock.tick = 1.0
    for seed in (0, 5, 2 ** 63 - 1):
        seeds.clear()
        measured(pair, [[1], [1], [1]], Settings(2, seed=seed), clock, (1,))
        assert len(set(seeds)) == 3 and seed in seeds and all(0 <= one < 2 ** 63 for one in seeds)


def test_c_and_v_are_medians_over_prompts_each_with_its_own_step(monkeypatch):
    pair, clock = rig(monkeypatch)
    steps = {1: 1.0, 2: 2.0, 3: 4.0}  # of a prompt of so many tokens
    costs = {1: (0.1, 1.5), 2: (0.4, 2.0), 3: (4.0, 8.0)}

    def decode_plain(pair, tokens, settings):
        for token in range(settings.max_new):
            clock.seconds += steps[len(tokens)]
            yield token

    monkeypatch.setattr(bench, "decode_plain", decode_plain)
    monkeypatch.setattr(bench, "round_costs", lambda pair, tokens, *_: costs[len(tokens)])
    (row,) = measured(pair, [[1], [1, 2], [1, 2, 3]], Settings(4), clock, (2,))
    assert (row["c"], row["v"]) == (close(0.2), close(1.5))


def test_all_ways_decode_128_tokens_and_the_model_six_prompts(monkeypatch, capsys):
    """Of at most 16 tokens each. Lookup, which is fast to settle, has two."""
    seen = []

    def measure(pair, prompts, settings, now):
        seen.append((settings.drafter, len(prompts), max(map(len, prompts)), settings.max_new))
        return some_row(settings.gamma, drafter=settings.drafter)

    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr(bench, "bottleneck", lambda *_: {})
    pair = micro_pair()
    bench.bench(replace(pair, prompts=["def " * 9] * 8), 0, Clock())
    new = min(128, pair.target.config.context // 2)
    assert set(seen) == {("model", 6, 16, new), ("lookup", 2, 16, new)}
    assert len(seen) == len(GAMMAS) * (len(VERIFY) + len(DRAFTERS) * 2 - 1)


# ---------------------------------------------------------------- the bottleneck

def test_passes_take_what_their_rows_and_caches_make_them(capsys):
    """A second passes at each look at the clock, so that the sum of the array takes one second."""
    clock = Clock(tick=1.0)
    model = random_gpt(9, context=64, dtype=torch.float32)
    target = OnTheClock(model, clock, A_PASS, A_ROW, CACHED)
    figures = bottleneck(target, clock)
    assert figures["pass_ms"] == {rows: close(1000 * (1 + A_PASS + A_ROW * rows + CACHED * 16))
                                  for rows in (1, 2, 4, 8, 16)}
    assert figures["pass_ms_by_length"] == {cached: close(1000 * (1 + STEP + CACHED * cached))
                                            for cached in (0, 16, 32, 48)}
    assert figures["memory_gb_per_s"] == close(4 * 2 ** 27 / 1e9)  # four bytes a number
    ratio = (1 + A_PASS + A_ROW * 16 + CACHED * 16) / (1 + STEP + CACHED * 16)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.split()[-2:] == [f"{ratio:.2f}", "█" * round(10 * ratio)]


def test_the_first_sum_which_warms_up_is_not_timed(capsys):
    clock, late = Clock(tick=1.0), iter([0.0])  # all looks but the first are 1000 s late
    figures = bottleneck(random_gpt(9, context=64), lambda: clock() + next(late, 1000.0))
    assert figures["memory_gb_per_s"] == close(4 * 2 ** 27 / 1e9)


@pytest.mark.parametrize("dtype, size", [(torch.float32, 4), (torch.bfloat16, 2)], ids=str)
def test_the_weights_read_are_counted_in_bytes(dtype, size, capsys):
    """All but the embedding, of which a pass reads a row a token."""
    model = GPT(Config(500, context=32, n_layer=2, n_embd=64)).to(DEVICE, dtype)
    bottleneck(OnTheClock(model, clock := Clock(tick=1.0), A_PASS), clock)
    moved = size * (2 * (7 + 5) * 64 * 64 + 500 * 64) / 1e6
    out = capsys.readouterr().out
    assert f"reads {moved:.1f} MB" in out and f"{1000 * moved / (4 * 2 ** 27 / 1e6):.2f} ms" in out


def test_both_number_formats_are_told(capsys):
    pair = copy.deepcopy(micro_pair())
    pair.target.double()
    figures = about(pair)
    assert [figures[name]["dtype"] for name in ("target", "draft")] == ["float64", "float32"]


# ---------------------------------------------------------------- the table

def some_row(gamma, **figures):
    return {"drafter": "model", "verify": "token", "temperature": 1.0, "gamma": gamma,
            "plain_new_tokens": 768, "new_tokens": 768, "passes": 99, "drafted": 396, "tested": 300,
            "accepted": 270, "tokens_per_pass": 16.25, "alpha": 0.987, "expected": 16.75,
            "eq1": 16.5, "c": 0.012, "v": 1.23, "predicted": 2.0, "plain_tokens_per_s": 12345.0,
            "speculative_tokens_per_s": 23456.0, "speedup": 1.5, "speedup_min": 1.25,
            "speedup_max": 12.75, "runs": 3, **figures}


SWEEP = [some_row(2, speedup=1.75, plain_tokens_per_s=11111.0),
         some_row(4, speedup=2.5, predicted=2.25),
         some_row(8, speedup=2.25, predicted=2.75, speedup_max=14.0),
         some_row(16, speedup=2.0, tokens_per_pass=17.0, speculative_tokens_per_s=30000.0)]


def test_the_best_gamma_is_that_of_the_greatest_speedup(capsys):
    print_rows(SWEEP)
    *_, last = capsys.readouterr().out.splitlines()
    assert last == "best gamma: 4 (2.50x); by theory 8 (2.75x)"


def test_a_table_shows_each_figure_in_80_columns(capsys):
    print_rows(SWEEP)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[1].endswith(": 768 new tokens, plain 11111 to 12345 tokens/s")
    assert lines[-2].split() == ["16", "17.00", "16.75", "16.50", "0.987", "0.012", "1.23", "30000",
                                 "2.00", "2.00", "(1.25-12.75)"]
    print_rows([some_row(4, eq1=None)])
    assert capsys.readouterr().out.splitlines()[-2].split()[:4] == ["4", "16.25", "16.75", "-"]


# ---------------------------------------------------------------- the picture

SVG = "{http://www.w3.org/2000/svg}"
CURVES = [*SWEEP, *(some_row(gamma, verify="<mine>", predicted=None, speedup=3.0, speedup_min=2.0)
                    for gamma in GAMMAS),
          *(some_row(gamma, drafter="lookup", temperature=0.0, speedup=1.0) for gamma in (2, 4))]


def picture():
    """(the curves by their names, the scale of x, the scale of y), read off the axes."""
    root = ElementTree.fromstring(speedup_svg(CURVES))
    words = {element.text: element for element in root.findall(SVG + "text")}
    x = {gamma: float(words[str(gamma)].get("x")) for gamma in GAMMAS}
    levels = [float(line.get("y1")) for line in root.findall(SVG + "line")]
    return {curve.find(SVG + "text").text: curve for curve in root.findall(SVG + "g")}, x, levels


def test_dots_and_lines_of_the_picture_are_the_figures():
    curves, x, levels = picture()
    assert list(curves) == ["model, <mine> rule, T=1", "model, token rule, T=1",
                            "lookup, token rule, T=0"]  # as their last dots are, from the top

    def y(speedup):
        return levels[0] + (levels[-1] - levels[0]) * speedup / (len(levels) - 1)

    curve = curves["model, token rule, T=1"]
    points = [map(float, point.split(","))
              for point in curve.find(SVG + "polyline").get("points").split()]
    dots, spreads = curve.findall(SVG + "circle"), curve.findall(SVG + "line")
    for row, (at, height), dot, spread in zip(SWEEP, points, dots, spreads, strict=True):
        seen = [at, height, *(float(dot.get(key)) for key in ("cx", "cy")),
                *(float(spread.get(key)) for key in ("x1", "y1", "x2", "y2"))]
        here = x[row["gamma"]]
        assert seen == pytest.approx([here, y(row["predicted"]), here, y(row["speedup"]), here,
                                      y(row["speedup_min"]), here, y(row["speedup_max"])], abs=0.2)


def test_the_axes_go_up_and_to_the_right_as_far_for_each_doubling():
    _, x, levels = picture()
    assert all(upper < lower for lower, upper in itertools.pairwise(levels))
    doublings = [x[2 * gamma] - x[gamma] for gamma in (1, 2, 4, 8)]
    assert doublings == [pytest.approx(70)] * 4  # wide enough for dots of one row each


def test_the_picture_draws_no_line_that_theory_does_not():
    curves, _, _ = picture()
    mine = curves["model, <mine> rule, T=1"]
    assert mine.find(SVG + "polyline").get("points") == ""
    assert len(mine.findall(SVG + "circle")) == len(GAMMAS)


def test_the_axis_goes_up_to_all_that_is_drawn():
    """And no higher than the next whole number."""
    for speedup_max, predicted, levels in ((6.2, 2.0, 7), (2.0, 6.2, 7), (2.0, None, 2)):
        row = some_row(1, speedup_max=speedup_max, predicted=predicted)
        words = [one.text for one in ElementTree.fromstring(speedup_svg([row])).iter(SVG + "text")]
        assert f"{levels}x" in words and f"{levels + 1}x" not in words


def test_names_in_the_picture_do_not_overlap_and_all_is_inside():
    svg = speedup_svg([some_row(gamma, verify=f"rule {i}") for i in range(12) for gamma in GAMMAS])
    root = ElementTree.fromstring(svg)
    left, top, width, height = map(float, root.get("viewBox").split())
    heights = [float(element.get("y")) for element in root.findall(f"{SVG}g/{SVG}text")]
    assert all(b - a >= 15 for a, b in itertools.pairwise(heights))
    assert top + 15 < heights[0] and heights[-1] < top + height
    for element in root.iter():
        for key in ("x", "cx", "x1", "x2"):
            assert left <= float(element.get(key, 0)) < left + width


def test_the_picture_needs_nothing_from_elsewhere_and_knows_the_dark():
    svg = speedup_svg(CURVES)
    assert "prefers-color-scheme: dark" in svg
    assert not any(word in svg.replace("http://www.w3.org/2000/svg", "")
                   for word in ("http", "url(", "href", "@import", "<script"))


# ---------------------------------------------------------------- the command line

@pytest.fixture
def kept(tmp_path):
    """The arguments that name a small pair with a short context: a quick bench."""
    pair = replace(micro_pair(), prompts=micro_pair().prompts[:1])
    models = [GPT(replace(model.config, context=32)) for model in (pair.target, pair.draft)]
    for model, trained in zip(models, (pair.target, pair.draft)):
        model.load_state_dict(trained.state_dict())
    save_pair(replace(pair, target=models[0], draft=models[1]), tmp_path / "kept")
    return ["--checkpoint", tmp_path / "kept", "--device", DEVICE.type]


def test_each_option_reaches_what_it_names(kept, tmp_path, monkeypatch, capsys):
    seen = {}

    def instead(pair, seed, now):
        seen.update(dtype=pair.target.embed.dtype, draft=pair.draft.embed.dtype, seed=seed,
                    threads=torch.get_num_threads(), context=pair.target.config.context,
                    device=pair.target.device.type)
        return {"rows": CURVES}

    monkeypatch.setattr(bench, "bench", instead)
    for dtype, count, seed in (("float64", 1, 5), ("bfloat16", 2, 0)):
        arguments = [*kept, "--dtype", dtype, "--threads", count, "--seed", seed,
                     "--json", tmp_path / "a.json", "--svg", tmp_path / "a.svg"]
        assert ended(bench, arguments, capsys)[::2] == (0, "")
        dtype = getattr(torch, dtype)
        assert seen == dict(dtype=dtype, draft=dtype, seed=seed, threads=count, context=32,
                            device=DEVICE.type)
        assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))["rows"] == CURVES
        assert (tmp_path / "a.svg").read_text(encoding="utf-8") == speedup_svg(CURVES)


@pytest.mark.parametrize("option, value", [
    ("seed", -1), ("seed", 2 ** 63), ("svg", ""), ("json", ""), ("svg", "no/such/place.svg"),
    ("json", "no/such/place.json")])
def test_what_cannot_work_is_refused_before_the_work(option, value, kept, monkeypatch, capsys):
    monkeypatch.setattr(bench, "bench", None)
    word = value if isinstance(value, str) and value else option
    assert is_one_clear_line(ended(bench, [*kept, f"--{option}", value], capsys), word)


def test_every_rule_drafter_and_gamma_is_measured(kept, tmp_path, monkeypatch, capsys):
    """Those of one's own too. Its figures are consistent, and those of the pair."""
    monkeypatch.setitem(VERIFY, "never", never)
    monkeypatch.setitem(DRAFTERS, "mine", mine)
    file = tmp_path / "figures.json"
    options = ["--dtype", "float64", "--threads", 1, "--seed", 7, "--json", file]
    code, out, err = ended(bench, [*kept, *options], capsys)
    figures = json.loads(file.read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert (code, err) == (0, "") and max(map(len, out.splitlines())) <= 80

    gammas = defaultdict(list)
    for row in figures["rows"]:
        gammas[row["drafter"], row["verify"], row["temperature"]].append(row["gamma"])
        assert row["seed"] == 7
        assert row["new_tokens"] == row["plain_new_tokens"] == 16 == row["accepted"] + row["passes"]
        assert row["accepted"] <= row["tested"] <= row["drafted"] <= row["gamma"] * row["passes"]
        assert row["speedup_min"] <= row["speedup"] <= row["speedup_max"]
        if (row["drafter"], row["temperature"]) == ("model", 0):
            assert row["expected"] == close(row["tokens_per_pass"])
    assert set(gammas) == {
        ("model", "token", 1), ("model", "block", 1), ("model", "never", 1), ("lookup", "token", 1),
        ("mine", "token", 1), ("model", "token", 0), ("lookup", "token", 0), ("mine", "token", 0)}
    assert all(listed == list(GAMMAS) for listed in gammas.values())

    pair = micro_pair()
    for name, model in (("target", pair.target), ("draft", pair.draft)):
        assert figures[name] == {
            "parameters": sum(w.numel() for w in model.parameters()), "dtype": "float64",
            "layers": model.config.n_layer, "width": model.config.n_embd,
            "bits_per_byte": pair.bits_per_byte[name]}
    assert [figures[key] for key in ("device", "dtype", "threads")] == [DEVICE.type, "float64", 1]
    assert f"on {figures['machine']}\n" in out and "target in float64" in figures["machine"]
    (four,) = [row for row in figures["rows"] if row["gamma"] == 4 and row["temperature"] == 1
               and (row["drafter"], row["verify"]) == ("model", "token")]
    assert {key: figures[key] for key in ("alpha", "c", "v")}.items() <= four.items()
