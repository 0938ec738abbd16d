"""The theorem of the technique, checked on the code as it is: the text follows the target's own distribution.

The real loop runs with real models and their caches, once for every way that its draws can fall (exact.py).
The law of its text is set against the target alone, computed from forward passes without a cache. In float64
the two agree to about 1e-15, so 1e-12 is equality. A fault on the draft's side leaves the law right and
only costs speed, so the mean number of target passes is set against a calculation of its own as well.
"""

import functools
from collections import defaultdict
from dataclasses import dataclass, field

import pytest
import torch

from exact import distance, expectation, law
from rigs import DEVICE, autoregressive_law, random_gpt
from sampling import SURVIVAL, VERIFY, expected_passes, expected_tokens, verify_block, verify_token, warp
from specdec import draft_model, plain, prompt_lookup, speculative, text_ratios
from train_tiny import Pair

gpt = functools.cache(random_gpt)
PROMPT = [0, 1, 1, 0, 1]


# ---------------------------------------------------------------- what is decoded

@dataclass
class Case:
    """One way to decode. After a round that keeps both drafts, five new tokens leave one that drafts again."""
    settings: dict = field(default_factory=dict)
    drafter: str = "draft model"
    vocab: int = 3
    gamma: int = 2
    new: int = 5
    eos: int = None

    @property
    def warp(self):
        return functools.partial(warp, **self.settings)

    @property
    def models(self):
        """The target, of two layers, and the draft, of one."""
        return gpt(self.vocab, n_layer=2, seed=1), gpt(self.vocab, n_layer=1, seed=2)


# Drafters that draw from a model: which model, and with which warp.
MODELS = {
    "draft model": lambda target, draft, warp: (draft, warp),
    "target itself": lambda target, draft, warp: (target, warp),
    "one-hot": lambda target, draft, warp: (draft, functools.partial(warp, temperature=0)),
}


def make_drafter(name, target, draft, warp):
    vocab = target.config.vocab_size
    if name in MODELS:
        return draft_model(*MODELS[name](target, draft, warp))
    if name == "prompt lookup":
        return prompt_lookup(vocab, DEVICE)
    if name == "short context":  # drafts fewer than gamma, then nothing, as the text grows past it
        return draft_model(gpt(vocab, context=len(PROMPT) + 2, seed=2), warp)
    propose = draft_model(draft, warp)  # "moody": 0, 1 or 2 drafts
    return lambda tokens, gamma, choose: propose(tokens, min(gamma, len(tokens) % 3), choose)


def decode(case, rule):
    """The program under test: choose -> the list of its rounds."""
    target, draft = case.models

    def program(choose):
        propose = make_drafter(case.drafter, target, draft, case.warp)
        return list(speculative(target, propose, PROMPT, case.new, case.gamma, case.warp, choose,
                                VERIFY[rule], case.eos))

    return program


def reference(case):
    return autoregressive_law(case.models[0], PROMPT, case.new, case.warp, case.eos)


WARPS = {
    "T=0": Case(dict(temperature=0)),
    "T=.5": Case(dict(temperature=0.5), vocab=2),
    "T=1": Case(vocab=2),
    "T=1.7": Case(dict(temperature=1.7), vocab=2),
    "top-k": Case(dict(top_k=2)),
    "top-p": Case(dict(top_p=0.8)),
    "all three": Case(dict(temperature=1.7, top_k=2, top_p=0.9)),
    "three drafts": Case(dict(temperature=1.7, top_k=2), gamma=3, eos=0),
}
DRAFTERS = {
    f"{drafter}, {'end of text' if eos == 0 else 'endless'}": Case(dict(temperature=1.5, top_k=2), drafter, eos=eos)
    for drafter in [*MODELS, "prompt lookup", "short context", "moody"] for eos in (None, 0)
}
CASES = WARPS | DRAFTERS
both_rules = pytest.mark.parametrize("rule", VERIFY)


@functools.cache
def histories(name, rule):
    """{the new tokens and their writers, round by round: probability}, enumerated once for all the tests below."""
    program = decode(CASES[name], rule)
    return law(lambda choose: tuple((tuple(r.new), tuple(r.writers)) for r in program(choose)))


def marginal(name, rule, what):
    """{what(history): probability}"""
    total = defaultdict(float)
    for history, weight in histories(name, rule).items():
        total[what(history)] += weight
    return total


def text(history):
    return tuple(token for new, _ in history for token in new)


def mean_passes(name, rule):
    return sum(weight * passes for passes, weight in marginal(name, rule, len).items())


# ---------------------------------------------------------------- the law of the text

@both_rules
@pytest.mark.parametrize("name", CASES)
def test_output_law_is_the_targets_law(name, rule):
    assert distance(marginal(name, rule, text), reference(CASES[name])) < 1e-12


@pytest.mark.parametrize("name", WARPS)
def test_plain_decoding_has_the_targets_law(name):
    case = CASES[name]

    def program(choose):
        return tuple(plain(case.models[0], PROMPT, case.new, case.warp, choose, case.eos))

    assert distance(law(program), reference(case)) < 1e-12


@both_rules
def test_the_end_of_text_was_met_at_every_place_of_a_round(rule):
    """As either draft, as either correction, as the bonus: so the laws above hold at each of them."""
    def place_of_the_end(history):
        new, writers = history[-1]
        return (writers[-1], len(new)) if new[-1] == 0 else None

    met = marginal("draft model, end of text", rule, place_of_the_end)
    assert {("draft", 1), ("draft", 2), ("correction", 1), ("correction", 2), ("bonus", 3)} <= met.keys()


# ---------------------------------------------------------------- the number of target passes

def reference_passes(p, q, vocab, max_new, gamma, rule, eos=None):
    """The exact mean number of target passes, by recursion over texts: nothing of the code under test is in it.

    p(text), q(text): lists of probabilities. Think of mass: `drawn` is the mass of rounds that drafted the end
    of the text so far, `standing` what the rule keeps of it. The target sends standing·p(y) on to token y. As
    a draft, the token rule lets standing·min(p, q) of that stand, and the block rule all that the
    draft can cover, min(standing·p, drawn·q). What is missing comes as the target's own token, and ends the round.
    """
    @functools.cache
    def passes(text, left):
        """Passes yet to come when a round ends with this text and so many tokens are left."""
        if left == 0 or text[-1:] == (eos,):
            return 0
        return 1 + within(text, left, min(gamma, left - 1), 1.0, 1.0)

    def within(text, left, drafts, standing, drawn):
        """The mean of the passes after this one, over all that goes on from this text with so many drafts to come."""
        if text[-1:] == (eos,):
            return 0
        mean = 0
        for y in range(vocab):
            sent, stands = standing * p(text)[y], 0
            if drafts:
                covered = drawn * q(text)[y]
                stands = min(sent, covered) if rule == "block" else standing * min(p(text)[y], q(text)[y])
                mean += within((*text, y), left - 1, drafts - 1, stands, covered)
            mean += (sent - stands) * passes((*text, y), left - 1)
        return mean

    return passes((), max_new)


def without_cache(model, warp, prompt=PROMPT):
    """text -> the list of probabilities of the token after it, from a forward pass over all of it."""
    @functools.cache
    def probabilities(text):
        with torch.inference_mode():
            return warp(model(torch.tensor([[*prompt, *text]], device=DEVICE))[0, -1]).tolist()

    return probabilities


@both_rules
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.drafter in MODELS])
def test_expected_passes_are_what_p_and_q_make_them(name, rule):
    case = CASES[name]
    p = without_cache(case.models[0], case.warp)
    q = without_cache(*MODELS[case.drafter](*case.models, case.warp))
    wanted = reference_passes(p, q, case.vocab, case.new, case.gamma, rule, case.eos)
    assert abs(mean_passes(name, rule) - wanted) < 1e-12


@pytest.mark.parametrize("name", ["T=.5", "T=1", "T=1.7", "top-k", "top-p", "three drafts"])
def test_block_rule_needs_fewer_passes_than_the_token_rule(name):
    assert mean_passes(name, "block") < mean_passes(name, "token") - 1e-3


PREDICTED = {name: "lookup" if case.drafter == "prompt lookup" else "model" for name, case in CASES.items()
             if case.eos is None and case.drafter in ("draft model", "target itself", "prompt lookup", "short context")}


@both_rules
@pytest.mark.parametrize("name", PREDICTED)
def test_passes_predicted_for_a_text_are_the_mean_over_all_ways_to_write_it(name, rule):
    case = CASES[name]
    target, draft = case.models
    if case.drafter == "target itself":
        draft = target
    if case.drafter == "short context":
        draft = gpt(case.vocab, context=len(PROMPT) + 2, seed=2)
    ways = defaultdict(list)  # text -> (probability, passes) of each way
    for history, weight in histories(name, rule).items():
        ways[text(history)].append((weight, len(history)))
    for tokens, found in ways.items():
        mean = sum(weight * passes for weight, passes in found) / sum(weight for weight, _ in found)
        q_over_p = text_ratios(Pair(target, draft, None, {}, []), [*PROMPT, *tokens], len(PROMPT), case.gamma,
                               case.warp, PREDICTED[name])
        assert abs(expected_passes(q_over_p, SURVIVAL[rule]) - mean) < 1e-12


@both_rules
def test_a_draft_equal_to_the_target_is_never_rejected(rule):
    """5 new tokens: 2 drafts and the bonus, then 1 draft and the bonus."""
    assert abs(mean_passes("target itself, endless", rule) - 2) < 1e-12


def test_expected_rejections_are_the_sum_of_total_variations():
    """Yin et al. 2024 (arXiv 2411.00841): E[rejections in T tokens] = sum over t of E TV(p_t, q_t).

    gamma is T, so that only a rejection ends a round before T tokens, and each of them is tested. The
    one after them is the target's own in any case.
    """
    T, (target, draft) = 3, CASES["T=1"].models
    p, q = without_cache(target, warp), without_cache(draft, warp)

    def rejections(choose):
        rounds = speculative(target, draft_model(draft, warp), PROMPT, T + 1, T, warp, choose)
        return sum(r.writers.count("correction") for r in rounds)

    wanted = sum(weight * sum(abs(a - b) for a, b in zip(p(tokens), q(tokens))) / 2
                 for t in range(T) for tokens, weight in autoregressive_law(target, PROMPT, t, warp).items())
    assert abs(expectation(rejections) - wanted) < 1e-12


# ---------------------------------------------------------------- exact values, from tables of p and q

def tables(*rows):
    rows = torch.tensor(rows, dtype=torch.float64, device=DEVICE)
    return rows / rows.sum(-1, keepdim=True)


def one_round(verify, p, q):
    """A round over tables: the drafts, how many stand, and the token after them."""
    def program(choose):
        drafted = choose(q)
        n, token = verify(p, q, drafted, choose)
        return tuple(drafted.tolist()), int(n), int(token)

    return program


def accepted(verify, p, q):
    program = one_round(verify, p, q)
    return expectation(lambda choose: program(choose)[1])


@pytest.mark.parametrize("gamma, token, block", [(1, 2 / 3, 2 / 3), (2, 10 / 9, 11 / 9), (3, 38 / 27, 5 / 3)])
def test_accepted_drafts_of_the_worked_example(gamma, token, block):
    """p = (1/3, 2/3) and q = (2/3, 1/3) in every context (Sun et al. 2024, arXiv 2403.10444)."""
    p, q = tables([1, 2]).repeat(gamma + 1, 1), tables([2, 1]).repeat(gamma, 1)
    assert abs(accepted(verify_token, p, q) - token) < 1e-12
    assert abs(accepted(verify_block, p, q) - block) < 1e-12


@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_tokens_per_pass_are_equation_1_where_contexts_do_not_matter(gamma):
    """Σ min(p, q) = .7 = alpha (L, equation 1)."""
    p, q = tables([6, 3, 1]).repeat(gamma + 1, 1), tables([3, 5, 2]).repeat(gamma, 1)
    assert abs(accepted(verify_token, p, q) + 1 - expected_tokens(0.7, gamma)) < 1e-12


def test_with_one_draft_the_block_rule_is_the_token_rule():
    p, q = tables([6, 3, 1], [1, 1, 8]), tables([3, 5, 2])
    assert distance(law(one_round(verify_token, p, q)), law(one_round(verify_block, p, q))) < 1e-12


def test_with_a_one_hot_q_the_block_rule_is_the_token_rule():
    p = tables([6, 3, 1], [1, 1, 8], [2, 3, 5], [4, 3, 3])
    q = tables([1, 0, 0], [0, 0, 1], [0, 1, 0])
    assert distance(law(one_round(verify_token, p, q)), law(one_round(verify_block, p, q))) < 1e-12
