"""The teeth of this suite: every mistake of the wall is caught, the right code passes every check.

Greedy equality and the marginal of the first token are what people write. The wall says of each
mistake whether these two see it. The exact law of the whole text sees all that makes the text
wrong, except what is hidden in the generator that it replaces. What costs speed alone shows in the
expected number of target passes.
"""

import functools
import math
from collections import Counter, defaultdict

import pytest

from exact import EXACT, distance, every_outcome
from rigs import DEVICE, autoregressive_law, greedy, reference_passes, text, without_cache
from sampling import seeded, verify_token, warp
from wrong_samplers import (DRAFT, EOS, FIRST, GREEDY, LAW, PASSES, PROPERTY, RIGHT, SETTINGS,
                            STATISTICS, TARGET, VOCAB, WALL, decode, wall_gpt)

PROMPT, WARP = [1, 2, 1], functools.partial(warp, **SETTINGS)
# gamma and new tokens: rounds of more than one draft; rounds after a full acceptance.
RIGS = [(2, 3), (1, 4)]
SAMPLERS = {mistake.name: (mistake.parts, mistake.seeded) for mistake in WALL}
SAMPLERS |= {name: (parts, seeded) for name, parts in RIGHT.items()}


@functools.cache
def target_law(new):
    return autoregressive_law(wall_gpt(**TARGET), PROMPT, new, WARP, EOS)


@functools.cache
def greedy_text(prompt):
    (tokens,) = autoregressive_law(wall_gpt(**TARGET), prompt, 12, greedy, EOS)
    return tokens


def outcomes(name, rig):
    """[(probability, text, target passes, the prompt afterwards)], one for every way that the draws
    can fall."""
    parts = SAMPLERS[name][0]
    first = next(other for other, (its_parts, _) in SAMPLERS.items() if its_parts == parts)
    return enumerated(first, rig)  # once for all that have the same parts


@functools.cache
def enumerated(name, rig):
    (gamma, new), (parts, _) = rig, SAMPLERS[name]

    def program(choose):
        prompt = list(PROMPT)
        rounds = decode(choose, prompt, new, gamma, SETTINGS, **parts)
        return text(rounds), len(rounds), prompt

    return [(weight, *result) for weight, result in every_outcome(program)]


def law_of_first(length, name, rig):
    """{the first `length` tokens, or all of them: probability}"""
    total = defaultdict(float)
    for weight, tokens, _, _ in outcomes(name, rig):
        total[tokens[:length]] += weight
    return total


# ---------------------------------------------------------------- the checks: True if all is well

def greedy_equality(name):
    """At temperature 0 the text is the target's argmax text, after each of three prompts."""
    parts, make_choose = SAMPLERS[name]

    def equal(prompt, gamma):
        choose = make_choose(DEVICE, 0)
        rounds = decode(choose, list(prompt), 12, gamma, dict(temperature=0), **parts)
        return text(rounds) == greedy_text(prompt)

    return all(equal(prompt, gamma) for prompt in [(1,), (2, 1), (1, 1, 2)] for gamma, _ in RIGS)


def first_token_marginal(name):
    return all(distance(law_of_first(1, name, rig), target_law(1)) < EXACT for rig in RIGS)


def exact_joint_law(name):
    return all(distance(law_of_first(None, name, rig), target_law(rig[1])) < EXACT for rig in RIGS)


def properties(name):
    """As many tokens as asked, or fewer that end with an end of text; none after one; the prompt is
    left alone."""
    def hold(tokens, prompt, new):
        whole = len(tokens) == new or len(tokens) < new and tokens[-1] == EOS
        return whole and EOS not in tokens[:-1] and prompt == PROMPT

    return all(hold(tokens, prompt, rig[1])
               for rig in RIGS for _, tokens, _, prompt in outcomes(name, rig))


def expected_target_passes(name):
    """Against the calculation for the same rule, see rigs.reference_passes."""
    verify = SAMPLERS[name][0].get("verify", verify_token)
    p, q = (without_cache(wall_gpt(**shape), WARP, PROMPT) for shape in (TARGET, DRAFT))

    def difference(rig):
        mean = sum(weight * passes for weight, _, passes, _ in outcomes(name, rig))
        return abs(mean - reference_passes(p, q, VOCAB, rig[1], rig[0], verify, EOS))

    return all(difference(rig) < EXACT for rig in RIGS)


def statistics(name):
    """The texts of N real generators, one text each, with a false alarm once in 1/delta runs.

    Hoeffding: the frequency of one set of texts exceeds its probability by t or more with
    probability at most exp(-2Nt²). Over all 2^K sets of the K texts the largest excess is
    TV(p̂, p), so it stays below sqrt((K ln 2 + ln(1/delta)) / 2N) with probability 1 - delta.
    """
    N, delta, (gamma, new), (parts, make_choose) = 400, 1e-9, RIGS[0], SAMPLERS[name]
    seen = Counter()
    for seed in range(N):
        choose = make_choose(DEVICE, seed)
        seen[text(decode(choose, list(PROMPT), new, gamma, SETTINGS, **parts))] += 1
    law = target_law(new)
    bound = math.sqrt((len(law) * math.log(2) + math.log(1 / delta)) / (2 * N))
    return sum(max(0, count / N - law.get(tokens, 0)) for tokens, count in seen.items()) < bound


CHECKS = {GREEDY: greedy_equality, FIRST: first_token_marginal, LAW: exact_joint_law,
          PROPERTY: properties, PASSES: expected_target_passes, STATISTICS: statistics}
every_mistake = pytest.mark.parametrize("mistake", WALL, ids=lambda mistake: mistake.name)


@every_mistake
def test_the_check_that_the_wall_names_catches_the_mistake(mistake):
    assert not CHECKS[mistake.caught_by](mistake.name)


@every_mistake
def test_the_checks_that_miss_the_mistake_are_those_listed(mistake):
    """So the wall shows what each kind of test is worth."""
    missed = tuple(check for check in (GREEDY, FIRST, LAW) if CHECKS[check](mistake.name))
    assert missed == mistake.missed_by


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", RIGHT)
def test_the_right_code_passes_every_check(name, check):
    assert CHECKS[check](name)
