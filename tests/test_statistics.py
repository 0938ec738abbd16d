"""What enumeration cannot see: the real torch.Generator, float32 and bfloat16, the device, and what
is left untouched.

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

import copy
import math
import random

import numpy as np
import pytest
import torch

from model import GPT, Config
from rigs import (DEVICE, MICRO, SOURCE, Scripted, autoregressive_law, quiet_pair, random_gpt,
                  rules, seeded, text)
from sampling import VERIFY, warp
from specdec import DraftModel, plain, prompt_lookup, speculative

DELTA = 1e-9


def bound(outcomes, draws):
    return math.sqrt((outcomes * math.log(2) + math.log(1 / DELTA)) / (2 * draws))


def total_variation(a, b):
    """Of two tensors of probabilities of one shape."""
    return (a.double().cpu() - b.double().cpu()).abs().sum().item() / 2


def frequencies(ids, shape):
    """How often each outcome occurs: ids (N, len(shape)) -> a tensor of the shape given."""
    index = np.ravel_multi_index(ids.cpu().numpy().T, shape)
    return torch.from_numpy(np.bincount(index, minlength=math.prod(shape)) / len(ids)).view(shape)


# ---------------------------------------------------------------- the draw

P = [0.5, 0.2, 0.0, 0.1, 0.15, 0.05]


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
def test_choose_draws_tokens_as_often_as_probabilities_say(dtype):
    p = torch.tensor(P, dtype=dtype, device=DEVICE)
    ids = seeded()(p.expand(1_000_000, 6))
    assert total_variation(frequencies(ids[:, None], (6,)), p) < bound(6, 1_000_000)


def test_rows_and_calls_of_a_draw_are_independent():
    p, choose = torch.tensor(P, device=DEVICE), seeded()
    square = p[:, None] * p
    rows = choose(p.expand(200_000, 2, 6))  # neighbours within one call
    calls = torch.stack([choose(p.expand(200_000, 6)) for _ in range(2)], -1)  # two calls
    small = torch.stack([choose(p[None]) for _ in range(40_000)]).view(-1, 2)  # calls of one row
    for pairs in (rows, calls, small):
        assert total_variation(frequencies(pairs, (6, 6)), square) < bound(36, len(pairs))


def test_a_token_of_probability_zero_is_never_drawn():
    p = torch.zeros(10_000, 512, device=DEVICE)
    p[:, 100], p[:, 511] = 1e-30, 1e-30  # the two that are possible, and hardly so
    ids = seeded()(p)
    assert set(ids.tolist()) == {100, 511}


# ---------------------------------------------------------------- the loop

@rules
def test_short_texts_in_float32_follow_the_law_of_the_target(verify):
    """Two tokens: a draft and its bonus or, after a rejection, a correction and a second round."""
    target = random_gpt(n_layer=2, seed=1, dtype=torch.float32)
    draft = random_gpt(seed=2, dtype=torch.float32)
    choose, N, shape = seeded(), 3500, (3, 3)

    def two_tokens():
        return text(speculative(target, DraftModel(draft, warp), [0], 2, 4, warp, choose, verify))

    def table(model):
        law = autoregressive_law(model, [0], 2, warp)
        return torch.tensor([p for _, p in sorted(law.items())]).view(shape)

    limit = bound(9, N)
    # The draft's own texts would be told apart.
    assert total_variation(table(draft), table(target)) > 2 * limit
    written = frequencies(torch.tensor([two_tokens() for _ in range(N)]), shape)
    assert total_variation(written, table(target)) < limit


@rules
def test_tokens_are_independent_where_the_target_makes_them_so(verify):
    """A target that says the same at every position: nothing may link a token to one before it,
    whether they are of one round or of two."""
    p, N = [0.5, 0.3, 0.2], 12_000
    target, draft = Scripted([p], context=N + 1), Scripted([[0.3, 0.3, 0.4]], context=N + 1)
    rounds = speculative(target, DraftModel(draft, warp), [0], N, 4, warp, seeded(), verify)
    p, ids = torch.tensor(p), torch.tensor(text(rounds))
    for lag in (1, 2, 3, 5):  # every token in one pair
        pairs = ids[:N - N % (2 * lag)].view(-1, 2, lag).transpose(1, 2).reshape(-1, 2)
        assert total_variation(frequencies(pairs, (3, 3)), p[:, None] * p) < bound(9, len(pairs))


@rules
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_long_texts_agree_with_the_distributions_of_their_rounds(dtype, verify):
    """Token i follows the p of its own context: frequencies against the mean of these (Azuma)."""
    target, draft = random_gpt(6, 2, 1, 512, dtype), random_gpt(6, 1, 2, 512, dtype)
    rounds = list(speculative(target, DraftModel(draft, warp), [0], 500, 3, warp, seeded(), verify))
    p, ids = torch.cat([one.p[:len(one.new)] for one in rounds]).cpu(), torch.tensor(text(rounds))
    assert p.dtype == torch.float32 and p.shape == (500, 6)
    assert total_variation(frequencies(ids[:, None], (6,)), p.mean(0)) < bound(6, 500)
    with torch.inference_mode():
        fresh = warp(target(torch.tensor([[0, *ids.tolist()]], device=DEVICE))[0, :-1]).cpu()
    # bfloat16 has 8 bits.
    assert (p - fresh).abs().max() < (1e-4 if dtype == torch.float32 else 0.1)


# ---------------------------------------------------------------- seeds, and what must stay

def decoded(seed, drafter="model", verify=VERIFY["token"], tokens=(0, 1)):
    target, draft = random_gpt(9, 2, 1, 64), random_gpt(9, 1, 2, 64)
    propose = DraftModel(draft, warp) if drafter == "model" else prompt_lookup(9, DEVICE)
    return text(speculative(target, propose, tokens, 30, 3, warp, seeded(seed), verify))


def test_a_seed_fixes_the_text_and_zero_is_a_seed():
    texts = [decoded(seed) for seed in range(10)]
    torch.manual_seed(123)  # what others do with the global generator has no part in it
    assert texts == [decoded(seed) for seed in range(10)]
    assert len(set(texts)) == 10


def global_states():
    numpys = torch.tensor(np.random.get_state()[1].astype(np.int64))
    states = [torch.get_rng_state(), numpys, random.getstate()]
    return states + (torch.cuda.get_rng_state_all() if DEVICE.type == "cuda" else [])


@pytest.mark.parametrize("work", [
    lambda: GPT(Config(20, context=8, n_embd=8, n_head=2), seed=0),
    lambda: decoded(0), lambda: decoded(0, "lookup"), lambda: decoded(0, verify=VERIFY["block"]),
    lambda: list(plain(random_gpt(), [0], 9, warp, seeded())),
    lambda: quiet_pair(MICRO, [SOURCE]),
], ids=("a new model", "speculative", "lookup", "block", "plain", "training"))
def test_no_global_random_state_changes(work):
    before = global_states()
    work()
    after = global_states()
    assert all(torch.equal(a, b) if torch.is_tensor(a) else a == b for a, b in zip(before, after))


@rules
def test_no_input_is_written_to(verify):
    generator = torch.Generator(DEVICE).manual_seed(0)
    p, q = (torch.rand(n, 4, generator=generator, device=DEVICE).softmax(-1) for n in (4, 3))
    drafted, tokens = torch.tensor([0, 1, 2], device=DEVICE), [0, 1, 0, 1]
    inputs = (p, q, drafted, tokens)
    copies = copy.deepcopy(inputs)
    verify(p, q, drafted, seeded())
    seeded()(p)
    for setting in (dict(), dict(temperature=0), dict(temperature=2.0, top_k=2, top_p=0.5)):
        warp(p, **setting)
    decoded(0, "model", verify, tokens)
    decoded(0, "lookup", verify, tokens)
    assert all(torch.equal(a, b) if torch.is_tensor(a) else a == b for a, b in zip(inputs, copies))


def test_a_model_is_as_it_was_after_decoding():
    model = random_gpt()
    before = copy.deepcopy(model.state_dict())
    list(plain(model, [0], 9, warp, seeded()))
    assert all(torch.equal(weight, before[name]) and model.get_parameter(name).grad is None
               for name, weight in model.state_dict().items())
