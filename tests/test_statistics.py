"""What enumeration cannot see: the real torch.Generator, float32 and bfloat16, and the device.

The bound. Of N independent draws from p over K outcomes let p̂ be the frequencies. The total
variation distance of p̂ and p is the largest p̂(A) - p(A) over the 2^K sets A of outcomes. For one
A, Hoeffding gives P(p̂(A) - p(A) > t) <= exp(-2Nt²), so P(TV > t) <= 2^K exp(-2Nt²). Set equal to δ
and solved for t:

    t = sqrt((K ln 2 + ln(1/δ)) / (2N))

By Azuma the same holds where draw i follows a distribution of its own that depends on the draws
before it, with the mean of those distributions in place of p. δ is 1e-9 for each comparison: a
thousand runs of all of them, a few dozen comparisons each, raise a false alarm with probability
below 1e-4.
"""

import math

import numpy as np
import pytest
import torch

from rigs import DEVICE, Scripted, decode, our_rules, random_gpt, seeded, text
from sampling import warp
from specdec import DraftModel

DELTA = 1e-9


def bound(outcomes, draws):
    return math.sqrt((outcomes * math.log(2) + math.log(1 / DELTA)) / (2 * draws))


def frequencies(ids, shape):
    """How often each outcome occurs: ids (N, len(shape)) -> a tensor of the shape given."""
    index = np.ravel_multi_index(ids.cpu().numpy().T, shape)
    return torch.from_numpy(np.bincount(index, minlength=math.prod(shape)) / len(ids)).view(shape)


def check_drawn(ids, right):
    """ids (N, number of axes of `right`) are as frequent as these probabilities say."""
    found, limit = frequencies(ids, right.shape), bound(right.numel(), len(ids))
    off = (found - right.double().cpu()).abs().sum().item() / 2
    assert off < limit, f"total variation {off:.4g} of {len(ids)} draws, {limit:.4g} is the bound"


# ---------------------------------------------------------------- the draw

P = [0.5, 0.2, 0.0, 0.1, 0.15, 0.05]


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
def test_choose_draws_tokens_as_often_as_probabilities_say(dtype):
    p = torch.tensor(P, dtype=dtype, device=DEVICE)
    check_drawn(seeded()(p.expand(1_000_000, 6))[:, None], p)


def test_rows_and_calls_of_a_draw_are_independent():
    p, choose = torch.tensor(P, device=DEVICE), seeded()
    rows = choose(p.expand(200_000, 2, 6))  # neighbours within one call
    calls = torch.stack([choose(p.expand(200_000, 6)) for _ in range(2)], -1)  # two calls
    small = torch.stack([choose(p[None]) for _ in range(40_000)]).view(-1, 2)  # calls of one row
    for pairs in (rows, calls, small):
        check_drawn(pairs, p[:, None] * p)


def test_a_token_of_probability_zero_is_never_drawn():
    p = torch.zeros(10_000, 512, device=DEVICE)
    p[:, 100], p[:, 511] = 1e-30, 1e-30  # the two that are possible, and hardly so
    assert set(seeded()(p).tolist()) == {100, 511}


# ---------------------------------------------------------------- the loop

def written(target, draft, max_new, gamma, verify):
    return decode(target, DraftModel(draft, warp), [0], max_new, gamma, verify)


@our_rules
def test_tokens_are_independent_where_the_target_makes_them_so(verify):
    """A target that says the same at every position: nothing may link a token to one before it,
    whether they are of one round or of two."""
    p, N = torch.tensor([0.5, 0.3, 0.2]), 12_000
    target, draft = Scripted([p.tolist()], N + 1), Scripted([[0.3, 0.3, 0.4]], N + 1)
    ids = torch.tensor(text(written(target, draft, N, 4, verify)))
    for lag in (1, 2, 3, 5):  # every token in one pair
        pairs = ids[:N - N % (2 * lag)].view(-1, 2, lag).transpose(1, 2).reshape(-1, 2)
        check_drawn(pairs, p[:, None] * p)


@our_rules
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_long_texts_agree_with_the_distributions_of_their_rounds(dtype, verify):
    """Token i follows the p of its own context: frequencies against the mean of these (Azuma)."""
    target, draft = random_gpt(6, 2, 1, 512, dtype), random_gpt(6, 1, 2, 512, dtype)
    rounds = written(target, draft, 500, 3, verify)
    p, ids = torch.cat([one.p[:len(one.new)] for one in rounds]).cpu(), torch.tensor(text(rounds))
    assert p.dtype == torch.float32 and p.shape == (500, 6)
    check_drawn(ids[:, None], p.mean(0))
    with torch.inference_mode():
        fresh = warp(target(torch.tensor([[0, *ids.tolist()]], device=DEVICE))[0, :-1]).cpu()
    # bfloat16 has 8 bits.
    assert (p - fresh).abs().max() < (1e-4 if dtype == torch.float32 else 0.1)
