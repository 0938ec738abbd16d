"""variants.py: the block rule by its formulas and its worked example, and prompt lookup."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st

from exact import EXACT, law
from rigs import DEVICE, accepted, forbidden, one_round, random_gpt, tables, times
from sampling import verify_token, warp
from variants import DRAFTERS, prompt_lookup, verify_block


# ---------------------------------------------------------------- exact values

@pytest.mark.parametrize("p, q, gamma, token, block", [
    # The example of Sun et al. 2024 (arXiv 2403.10444).
    ([1, 2], [2, 1], 1, 2 / 3, 2 / 3), ([1, 2], [2, 1], 2, 10 / 9, 11 / 9),
    ([1, 2], [2, 1], 3, 38 / 27, 5 / 3),
    # Σ min(p, q) = .7 = alpha: alpha + ... + alpha^gamma (Leviathan et al. 2023, Equation 1).
    ([6, 3, 1], [3, 5, 2], 1, 0.7, 0.7), ([6, 3, 1], [3, 5, 2], 2, 0.7 + 0.49, None),
    ([6, 3, 1], [3, 5, 2], 3, 0.7 + 0.49 + 0.343, None)])
def test_accepted_drafts_of_worked_examples(p, q, gamma, token, block):
    """p and q are the same in every context."""
    p, q = tables(p).repeat(gamma + 1, 1), tables(q).repeat(gamma, 1)
    assert abs(accepted(law(one_round(verify_token, p, q))) - token) < EXACT
    assert block is None or abs(accepted(law(one_round(verify_block, p, q))) - block) < EXACT


# ---------------------------------------------------------------- the block rule by its formulas

def reference_block(p, q, drafted):
    """(coins, keep): h_1 ... h_γ and keep_0 ... keep_γ of Sun et al. 2024, one scalar at a time."""
    gamma, keep, coins = len(q), [1.0], []
    for i in range(gamma):
        keep.append(min(1.0, keep[i] * (p[i, drafted[i]] / q[i, drafted[i]])))
    for i in range(1, gamma):
        Z = np.maximum(keep[i] * p[i] - q[i], 0).sum()
        coins.append(Z / (Z + (1 - keep[i])) if Z > 0 else 0.0)
    return np.array([*coins, keep[gamma]]), keep


@times(2)
@given(st.integers(0, 2 ** 32), st.integers(2, 6), st.integers(1, 6))
def test_the_block_rule_tosses_the_coins_of_the_paper(seed, vocab, gamma):
    """And takes the last that comes up. A quarter of the probabilities are 0."""
    random = np.random.default_rng(seed)
    p, q = (random.exponential(size=(n, vocab)) * (random.random((n, vocab)) < 0.75) + 1e-9
            * np.eye(vocab)[random.integers(vocab, size=n)] for n in (gamma + 1, gamma))
    p, q = p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)
    drafted = [int(np.searchsorted(one.cumsum(), one.sum() * random.random())) for one in q]
    coins, keep = reference_block(p, q, drafted)
    tossed = [int(h == 1 or h > 0 and random.random() < 0.5) for h in coins]
    n = max((i + 1 for i, coin in enumerate(tossed) if coin), default=0)
    left = p[n] if n == gamma else np.maximum(keep[n] * p[n] - q[n], 0)
    seen = []

    def choose(probs):
        seen.append(probs)
        return torch.tensor(tossed, device=DEVICE) if len(seen) == 1 else probs.argmax(-1)

    tensors = [torch.tensor(part, device=DEVICE) for part in (p, q, np.array(drafted))]
    assert verify_block(*tensors, choose)[0] == n
    np.testing.assert_allclose(seen[0].cpu(), np.stack([1 - coins, coins], -1), atol=1e-14)
    if left.sum() > 1e-9:  # below that, rounding decides what is left
        np.testing.assert_allclose(seen[1].ravel().cpu(), left / left.sum(), atol=1e-6)


def test_a_coin_of_the_block_rule_has_a_law_where_rounding_alone_is_missing():
    """keep_1 = 1, and of keep_1 p - q one step of rounding is left."""
    p, q = tables([1, 1], [1, 3], [1, 1]), tables([1, 1], [1, 3])
    p[1, 0] += 2 ** -54

    def choose(probs):
        assert (probs.sum(-1) == 1).all() and (probs >= 0).all(), f"drawn from {probs.tolist()}"
        return probs.argmax(-1)

    verify_block(p, q, torch.tensor([0, 0], device=DEVICE), choose)


# ---------------------------------------------------------------- prompt lookup

def naive_continuation(tokens):
    """Of all ends of at most 8 tokens, at all earlier places, the longest, and the latest."""
    places = [(size, start) for size in range(1, 9) for start in range(len(tokens) - size)
              if tokens[start:start + size] == tokens[len(tokens) - size:]]
    return tokens[sum(max(places)):] if places else []


EIGHT = [0, 1, 1, 0, 1, 0, 0, 2]


@times(5)
@given(st.lists(st.integers(0, 3), max_size=30), st.integers(0, 5))
@example([1] * 20, 4)
@example([*EIGHT, 2, 3, *EIGHT[1:], 3, *EIGHT], 4)
def test_lookup_continues_the_latest_occurrence_of_the_longest_suffix(tokens, gamma):
    """And is certain of each token that it drafts."""
    before = list(tokens)
    drafted, q = prompt_lookup(4, DEVICE)(tokens, gamma, forbidden)
    assert drafted.tolist() == naive_continuation(tokens)[:gamma] and tokens == before
    assert torch.equal(q, F.one_hot(drafted, 4).float())


@pytest.mark.parametrize("tokens, eos, drafts", [
    ([5, 1, 2, 3, 5], None, [1, 2, 3, 5]), ([5, 1, 2, 3, 5], 2, [1, 2]),
    ([5, 2, 1, 3, 5], 2, [2]), ([5, 1, 0, 3, 5], 0, [1, 0]),
    ([5, 1, 0, 3, 5], None, [1, 0, 3, 5]), ([1, 2, 3], 3, [])], ids=str)
def test_lookup_drafts_nothing_behind_an_end_of_text(tokens, eos, drafts):
    """That of the pair that it was made for."""
    pair = SimpleNamespace(target=random_gpt(9), encoding=SimpleNamespace(eot_token=eos))
    for gamma in range(6):
        drafted, q = DRAFTERS["lookup"](pair, warp)(tokens, gamma, forbidden)
        assert drafted.tolist() == drafts[:gamma] and q.shape == (len(drafted), 9)
