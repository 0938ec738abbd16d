"""The teeth of these tests: each mistake of the wall is caught, the right code passes each check.

Greedy equality and the marginal of the first token are what people write. The wall says of each
mistake whether these two see it. The exact law of the whole text sees all that makes the text
wrong, except what is hidden in the generator that it replaces. What costs speed alone shows in the
expected number of target passes.
"""

import functools
import math
from collections import Counter

import pytest

from exact import EXACT, distance, every_outcome, marginal
from rigs import DEVICE, EOS, autoregressive_law, from_texts, greedy, reference_passes, text
from sampling import verify_token, warp
from wrong_samplers import (ALL, DRAFT, FIRST, GREEDY, LAW, PASSES, PROPERTY, RIGHT, SETTINGS,
                            STATISTICS, TARGET, VOCAB, WALL, decode, wall_model)

PROMPT, WARP = (1, 2, 1), functools.partial(warp, **SETTINGS)
# gamma and new tokens: rounds of more than one draft; rounds after a full acceptance.
RIGS = [(2, 3), (1, 4)]


@functools.cache
def target_law(new, warp=WARP, prompt=PROMPT):
    return autoregressive_law(wall_model(TARGET), prompt, new, warp, EOS)


@functools.cache
def outcomes(name, rig):
    """{(text, target passes, the prompt afterwards): probability}, over all ways that the draws can
    fall. They do not sum to 1 where a mistake draws from weights that do not."""
    (gamma, new), total = rig, Counter()
    (sampler,) = [one for one in WALL + RIGHT if one.name == name]

    def program(choose):
        prompt = list(PROMPT)
        rounds = decode(choose, prompt, new, gamma, SETTINGS, **sampler.parts)
        return text(rounds), len(rounds), tuple(prompt)

    for weight, result in every_outcome(program):
        total[result] += weight
    return total


# ---------------------------------------------------------------- the checks: True if all is well

def greedy_equality(sampler, rig):
    """At temperature 0 the text is the target's argmax text, after each of three prompts."""
    def equal(prompt):
        rounds = decode(sampler.seeded(DEVICE, 0), list(prompt), 12, rig[0], dict(temperature=0),
                        **sampler.parts)
        return {text(rounds)} == target_law(12, greedy, prompt).keys()

    return all(map(equal, [(1,), (2, 1), (1, 1, 2)]))


def exact_law(sampler, rig, length=None):
    """Of the first `length` tokens, or of all."""
    found = marginal(outcomes(sampler.name, rig), lambda result: result[0][:length])
    return distance(found, marginal(target_law(rig[1]), lambda tokens: tokens[:length])) < EXACT


def properties(sampler, rig):
    """As many tokens as asked, or fewer that end with an end of text; none after one; the prompt is
    left alone."""
    return all((len(tokens) == rig[1] or len(tokens) < rig[1] and tokens[-1] == EOS)
               and EOS not in tokens[:-1] and prompt == PROMPT
               for tokens, _, prompt in outcomes(sampler.name, rig))


def expected_target_passes(sampler, rig):
    """Against the calculation for the same rule, see rigs.reference_passes."""
    verify, (gamma, new) = sampler.parts.get("verify", verify_token), rig
    p, q = (from_texts(wall_model(seed), WARP, PROMPT) for seed in (TARGET, DRAFT))
    found = outcomes(sampler.name, rig).items()
    return abs(sum(weight * passes for (_, passes, _), weight in found)
               - reference_passes(p, q, VOCAB, new, gamma, verify, EOS)) < EXACT


def statistics(sampler, rig):
    """The texts of N real generators, one each, with a false alarm once in 1/delta runs: the bound
    of test_statistics.py. TV is the sum of what is seen more often than it should be."""
    if rig is not RIGS[0]:
        return True  # one is enough for what it costs
    N, delta, (gamma, new) = 400, 1e-9, rig
    seen, law = Counter(), target_law(new)
    for seed in range(N):
        choose = sampler.seeded(DEVICE, seed)
        seen[text(decode(choose, list(PROMPT), new, gamma, SETTINGS, **sampler.parts))] += 1
    bound = math.sqrt((len(law) * math.log(2) + math.log(1 / delta)) / (2 * N))
    return sum(max(0, count / N - law.get(tokens, 0)) for tokens, count in seen.items()) < bound


CHECKS = {GREEDY: greedy_equality, FIRST: functools.partial(exact_law, length=1), LAW: exact_law,
          PROPERTY: properties, PASSES: expected_target_passes, STATISTICS: statistics}


def misses(check, sampler):
    """Is all well, as far as the check can see?"""
    try:
        return all(CHECKS[check](sampler, rig) for rig in RIGS)
    except AssertionError:  # a draw from weights that do not sum to 1
        return False


# ---------------------------------------------------------------- the wall stands

@pytest.mark.parametrize("mistake", WALL, ids=lambda mistake: mistake.name)
def test_a_mistake_is_caught_and_missed_by_the_checks_that_the_wall_names(mistake):
    """So the wall shows what each kind of test is worth."""
    assert not misses(mistake.caught_by, mistake), f"{mistake.caught_by} let it pass"
    missed = tuple(check for check in ALL if misses(check, mistake))
    assert missed == mistake.missed_by, f"it was missed by {missed}, the wall says by others"


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("sampler", RIGHT, ids=lambda sampler: sampler.name)
def test_the_right_code_passes_every_check(sampler, check):
    assert misses(check, sampler), f"{sampler.name}, without any mistake, fails {check}"
