"""The exact law of a program that draws: what every proof here is made with.

All randomness of decoding goes through `choose`. Run the program once for every way that its draws
can fall, weigh each run by the probability of its draws, and the sum over runs is the exact law of
whatever the program returns. The program is the real one, with its caches and its end-of-text
handling; nothing is sampled. In float64 the sums are right to about 1e-15, so a bound of 1e-12 is
safe and means equality.
"""

import math
from collections import defaultdict

import torch

EXACT = 1e-12  # float64: sums of a few hundred products


def every_outcome(program):
    """Yields (probability, program(choose)) for every way the draws of one run can fall.

    A run replays a script, the numbers of the outcomes to take, and takes the first possible
    outcome wherever the script has ended; the last draw that has an outcome left is then moved on.
    """
    script = []
    while True:
        weight, taken = [], []  # the factors of this run's probability; (outcome, outcomes) a draw

        def choose(probs):
            ids = []
            for row in probs.reshape(-1, probs.shape[-1]).tolist():  # rows are drawn independently
                assert abs(sum(row) - 1) < 1e-3, f"drawn from {row}, which do not sum to 1"
                possible = [i for i, probability in enumerate(row) if probability > 0]
                outcome = script[len(taken)] if len(taken) < len(script) else 0
                assert outcome < len(possible), "the same draws again, and other probabilities came"
                taken.append((outcome, len(possible)))
                weight.append(row[possible[outcome]])
                ids.append(possible[outcome])
            return torch.tensor(ids, dtype=torch.long, device=probs.device).view(probs.shape[:-1])

        result = program(choose)
        yield math.prod(weight), result
        while taken and taken[-1][0] + 1 == taken[-1][1]:
            taken.pop()
        if not taken:
            return
        script = [outcome for outcome, _ in taken[:-1]] + [taken[-1][0] + 1]


def law(program):
    """{result: probability} over every outcome. Results must be hashable. The probabilities must
    sum to 1: a draw from weights that do not is a fault that a random generator would hide by
    normalising them."""
    total = defaultdict(float)
    for weight, result in every_outcome(program):
        total[result] += weight
    assert abs(sum(total.values()) - 1) < EXACT, f"the outcomes weigh {sum(total.values())}, not 1"
    return dict(total)


def expectation(program):
    """The exact mean of a program that returns a number."""
    return sum(weight * result for weight, result in every_outcome(program))


def marginal(joint, what):
    """{what(result): probability}, from a law of results."""
    total = defaultdict(float)
    for result, weight in joint.items():
        total[what(result)] += weight
    return dict(total)


def distance(a, b):
    """The largest difference between two laws, over all results that either has."""
    return max(abs(a.get(result, 0) - b.get(result, 0)) for result in a.keys() | b.keys())


def check_law(found, right, what="the text {}", bound=EXACT):
    """Two laws are the same, or a sentence says where they are furthest apart. what: words for a
    result, which takes the place of {}."""
    def gap(result):
        return abs(found.get(result, 0) - right.get(result, 0))

    worst = max(sorted(found.keys() | right.keys()), key=gap)
    assert gap(worst) < bound, (f"{what.format(worst)} has probability {found.get(worst, 0):.6g}, "
                                f"and {right.get(worst, 0):.6g} is right")
