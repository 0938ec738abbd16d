"""The theorem of the technique, checked on the code as it is: the text follows the target's own
distribution.

The real loop runs with real models and their caches, once for every way that its draws can fall
(exact.py). The law of its text is set against the target alone, computed from forward passes
without a cache. In float64 the two agree to about 1e-15, so 1e-12 is equality. A fault on the
draft's side leaves the law right and only costs speed, so the mean number of target passes is set
against a calculation of its own as well.
"""

import math

import pytest
import torch

from exact import EXACT, distance, expectation, law, marginal
from rigs import (CASES, DEVICE, PROMPT, WARPS, Foreign, Told, accepted, autoregressive_law, gpt,
                  histories, one_round, reference_passes, rules, tables, text, without_cache)
from sampling import verify_block, verify_token, warp
from specdec import DraftModel, algorithm_1, plain, speculative

with_a_model = pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if case.drafting])


def mean_passes(name, verify):
    return sum(weight * len(history) for history, weight in histories(name, verify).items())


# ---------------------------------------------------------------- the law of the text

@rules
@pytest.mark.parametrize("name", CASES)
def test_output_law_is_the_targets_law(name, verify):
    case = CASES[name]
    reference = autoregressive_law(case.models[0], PROMPT, case.new, case.warp, case.eos)
    assert distance(marginal(histories(name, verify), text), reference) < EXACT


@pytest.mark.parametrize("name", WARPS)
def test_plain_decoding_has_the_targets_law(name):
    case = CASES[name]

    def program(choose):
        return tuple(plain(case.models[0], PROMPT, case.new, case.warp, choose, case.eos))

    reference = autoregressive_law(case.models[0], PROMPT, case.new, case.warp, case.eos)
    assert distance(law(program), reference) < EXACT


@rules
def test_the_end_of_text_was_met_at_every_place(verify):
    """As either draft, either correction, as the bonus: so the laws above hold at each of them."""
    def place_of_the_end(history):
        new, writers = history[-1]
        return (writers[-1], len(new)) if new[-1] == 0 else None

    places = {("draft", 1), ("draft", 2), ("correction", 1), ("correction", 2), ("bonus", 3)}
    found = histories("draft model, end of text", verify)
    assert places <= marginal(found, place_of_the_end).keys()


# ---------------------------------------------------------------- the algorithm, plainest form

def from_texts(model, warp):
    """text -> distribution (V,) of the token after it, from a forward pass over all of it."""
    lists = without_cache(model, warp)
    return lambda tokens: torch.tensor(lists(tuple(tokens)), dtype=torch.float64, device=DEVICE)


@with_a_model
def test_the_loop_is_algorithm_1_round_by_round(name):
    """The joint law of all rounds of a text, accepted drafts and tokens of each: caches, rows and
    tensors of the loop change nothing. Algorithm 1 knows no end of text, so it is cut here."""
    case = CASES[name]
    p, q = from_texts(case.models[0], case.warp), from_texts(*case.drafting)

    def program(choose):
        tokens, rounds = list(PROMPT), []
        while (left := len(PROMPT) + case.new - len(tokens)) > 0:
            gamma = min(case.gamma, left - 1)
            new = algorithm_1(p, q, tokens, gamma, choose)
            kept = new[:new.index(case.eos) + 1] if case.eos in new else new
            own = "correction" if len(new) <= gamma else "bonus"
            rounds.append(Told(tuple(kept), (("draft",) * (len(new) - 1) + (own,))[:len(kept)]))
            tokens += kept
            if kept[-1] == case.eos:
                break
        return tuple(rounds)

    assert distance(law(program), histories(name, verify_token)) < EXACT


# ---------------------------------------------------------------- the number of target passes

@rules
@with_a_model
def test_expected_passes_are_what_p_and_q_make_them(name, verify):
    case = CASES[name]
    p, q = without_cache(case.models[0], case.warp, PROMPT), without_cache(*case.drafting, PROMPT)
    wanted = reference_passes(p, q, case.vocab, case.new, case.gamma, verify, case.eos)
    assert abs(mean_passes(name, verify) - wanted) < EXACT


@pytest.mark.parametrize("name", ["T=.5", "T=1", "T=1.7", "top-k", "top-p", "three drafts"])
def test_block_rule_needs_fewer_passes_than_the_token_rule(name):
    assert mean_passes(name, verify_block) < mean_passes(name, verify_token) - 1e-3


@rules
def test_a_draft_equal_to_the_target_is_never_rejected(verify):
    """4 new tokens: 2 drafts and the bonus, then one token more."""
    assert abs(mean_passes("target itself, endless", verify) - 2) < EXACT


def test_expected_rejections_are_the_sum_of_total_variations():
    """Yin et al. 2024 (arXiv 2411.00841): E[rejections in T tokens] = sum over t of E TV(p_t, q_t).

    gamma is T, so that only a rejection ends a round before T tokens, and each of them is tested.
    The one after them is the target's own in any case.
    """
    T, (target, draft) = 3, CASES["T=1"].models
    p, q = without_cache(target, warp, PROMPT), without_cache(draft, warp, PROMPT)

    def rejections(choose):
        rounds = speculative(target, DraftModel(draft, warp), PROMPT, T + 1, T, warp, choose)
        return sum(one.writers.count("correction") for one in rounds)

    wanted = sum(weight * sum(abs(a - b) for a, b in zip(p(tokens), q(tokens))) / 2
                 for t in range(T)
                 for tokens, weight in autoregressive_law(target, PROMPT, t, warp).items())
    assert abs(expectation(rejections) - wanted) < EXACT


# ---------------------------------------------------------------- a model of another make

@rules
@pytest.mark.parametrize("sides", ["target", "draft", "both"])
def test_a_model_of_another_make_decodes_losslessly(sides, verify):
    """It has no class of ours, only what the loop asks of a model: law and passes are right."""
    target = gpt(2, n_layer=2, seed=1) if sides == "draft" else Foreign(2, layers=2, seed=1)
    draft = gpt(2, n_layer=1, seed=2) if sides == "target" else Foreign(2, layers=1, seed=2)
    eos, new, gamma = (None if sides == "both" else 0), 4, 2

    def program(choose):
        rounds = list(speculative(target, DraftModel(draft, warp), PROMPT, new, gamma, warp, choose,
                                  verify, eos))
        return text(rounds), len(rounds)

    found = law(program)
    reference = autoregressive_law(target, PROMPT, new, warp, eos)
    assert distance(marginal(found, lambda result: result[0]), reference) < EXACT
    p, q = without_cache(target, warp, PROMPT), without_cache(draft, warp, PROMPT)
    wanted = reference_passes(p, q, 2, new, gamma, verify, eos)
    assert abs(sum(weight * passes for (_, passes), weight in found.items()) - wanted) < EXACT


def test_a_model_of_another_make_decodes_plainly():
    target = Foreign(seed=3)
    found = law(lambda choose: tuple(plain(target, PROMPT, 3, warp, choose, eos=0)))
    assert distance(found, autoregressive_law(target, PROMPT, 3, warp, eos=0)) < EXACT


# ---------------------------------------------------------------- exact values, from tables

@pytest.mark.parametrize("gamma, token, block",
                         [(1, 2 / 3, 2 / 3), (2, 10 / 9, 11 / 9), (3, 38 / 27, 5 / 3)])
def test_accepted_drafts_of_the_worked_example(gamma, token, block):
    """p = (1/3, 2/3) and q = (2/3, 1/3) in every context (Sun et al. 2024, arXiv 2403.10444)."""
    p, q = tables([1, 2]).repeat(gamma + 1, 1), tables([2, 1]).repeat(gamma, 1)
    assert abs(accepted(law(one_round(verify_token, p, q))) - token) < EXACT
    assert abs(accepted(law(one_round(verify_block, p, q))) - block) < EXACT


@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_tokens_per_pass_are_those_of_equation_1(gamma):
    """Where contexts do not matter. Σ min(p, q) = .7 = alpha: 1 + alpha + ... + alpha^gamma tokens
    (Leviathan et al. 2023, Equation 1)."""
    p, q = tables([6, 3, 1]).repeat(gamma + 1, 1), tables([3, 5, 2]).repeat(gamma, 1)
    wanted = math.fsum(0.7 ** i for i in range(gamma + 1))
    assert abs(accepted(law(one_round(verify_token, p, q))) + 1 - wanted) < EXACT


def test_for_one_draft_both_rules_are_the_same():
    p, q = tables([6, 3, 1], [1, 1, 8]), tables([3, 5, 2])
    assert distance(law(one_round(verify_token, p, q)), law(one_round(verify_block, p, q))) < EXACT


def test_for_a_one_hot_q_both_rules_are_the_same():
    p = tables([6, 3, 1], [1, 1, 8], [2, 3, 5], [4, 3, 3])
    q = tables([1, 0, 0], [0, 0, 1], [0, 1, 0])
    assert distance(law(one_round(verify_token, p, q)), law(one_round(verify_block, p, q))) < EXACT
