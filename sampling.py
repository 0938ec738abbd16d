"""Probability, and nothing else: no model, no cache, no device.

Notation, the same in every file of this project:

    p        the target model's distribution of the next token
    q        the draft model's distribution of the next token
    x        a drafted token, drawn from q
    y        a token of the text
    gamma    how many tokens are drafted in a round (γ)
    alpha    acceptance rate: the mean of Σ min(p, q) over contexts (α)
    c        time of one draft step / time of one target step
    v        time of a target pass over γ+1 rows / time of one over 1 row
    V        size of the vocabulary

These are the letters of Leviathan, Kalman and Matias 2023 (arXiv 2211.17192), cited as "L" below.
Chen et al. 2023 (arXiv 2302.01318) found the same algorithm and use p and q the other way round.
(Inside model.py q, k and v are the queries, keys and values of attention.)
"""

import itertools
import math

import torch
import torch.nn.functional as F


# ---------------------------------------------------------------- from logits to a distribution

def warp(logits, temperature=1.0, top_k=None, top_p=1.0):
    """The distribution that is sampled from: softmax after temperature, then top-k, then top-p.

    logits (..., V) in any float type -> probabilities (..., V) in float32 or wider. Both models go
    through the same warp, and its output is both what is drawn from and what is scored: "lossless"
    is meant with respect to the warped p (L, section 2.2). Temperature 0 is a one-hot argmax, so
    greedy decoding needs no code of its own anywhere. Equal logits rank in the order of their ids.
    NaN logits give NaN probabilities; the loop reports them. Raises ValueError for bad settings.
    """
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature must be 0 or a positive number, not {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top-k must be at least 1, not {top_k}")
    if not 0 < top_p <= 1:
        raise ValueError(f"top-p must be above 0 and at most 1, not {top_p}")

    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature == 0:
        best = z.argmax(-1, keepdim=True)
        one = z.gather(-1, best) * 0 + 1  # 1, or NaN where the logits hold one
        return torch.zeros_like(z).scatter_(-1, best, one)
    if temperature != 1:
        # The largest logit becomes 0 and stays 0 at any temperature, however small: no inf - inf.
        z = (z - z.amax(-1, keepdim=True)) / min(max(temperature, 1e-30), 1e30)
    if top_k is None and top_p == 1:
        return z.softmax(-1)

    ranked, order = z.sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        ranked[..., top_k:] = -math.inf
    probs = ranked.softmax(-1)
    before = F.pad(probs.cumsum(-1)[..., :-1], (1, 0))  # probability of everything ranked higher
    probs = probs.where(before < max(top_p, 1e-30), 0) if top_p < 1 else probs
    return torch.zeros_like(z).scatter_(-1, order, probs / probs.sum(-1, keepdim=True))


# ---------------------------------------------------------------- drawing

def chooser(generator):
    """The draw, `choose(probs)`: the only source of randomness while decoding.

    probs (..., V) on the generator's device -> token ids (...), each drawn from its row. A coin that
    comes up 1 with probability a is a draw from (1-a, a). The tests replace `choose` by something
    that replays every outcome, and so compute the exact law of the code that calls it.
    """
    def choose(probs):
        # Race of exponential clocks: clock i rings at time E_i / p_i and rings first with
        # probability p_i / Σp. A token of probability 0 never rings.
        clocks = torch.empty_like(probs).exponential_(generator=generator)
        return (probs / clocks).argmax(-1)

    return choose


# ---------------------------------------------------------------- accept or correct

def residual(p, q, keep=1.0):
    """norm(max(0, keep·p - q)): the target's probability that q leaves uncovered.

    p, q (V,) -> (V,). keep: 1, or a tensor of shape (1,); see next_token. Where the two are equal up to rounding
    nothing is left; then it is p. (L, section 2.3 and appendix A.1.)
    """
    left = (keep * p - q).clamp(min=0)
    total = left.sum()
    return torch.where(total > 0, left / total, p)


def next_token(p, q, keep, n, choose):
    """The token after n accepted drafts: a correction after a rejection, else the bonus.

    keep: of the block rule P(at least n drafts stand | the first n drafts); in the token rule it cancels, so 1.
    One line serves both cases, since q of the bonus position is a row of zeros and leaves all of p uncovered.
    """
    q = F.pad(q, (0, 0, 0, 1))  # (γ+1, V)
    row = n.view(1)  # a one-element index, not p[n]: that would read n back from the device
    return choose(residual(p.index_select(0, row)[0], q.index_select(0, row)[0], keep))


def p_over_q(p, q, drafted):
    """p(x) / q(x) for each drafted token: (γ+1, V), (γ, V), (γ,) -> (γ,). Infinite where q(x) is 1e-45, say."""
    x = drafted[:, None]
    return (p[:-1].gather(-1, x) / q.gather(-1, x))[:, 0]


def verify_token(p, q, drafted, choose):
    """The token rule: test the drafts one by one, stop at the first that fails (L, Algorithm 1).

    p (γ+1, V), row i judges draft i and the last row is the bonus; q (γ, V), what each draft was
    really drawn from; drafted (γ,). Returns n, how many drafts stand, and the token after them, both
    tensors of shape () on the device of p.
    """
    accept = p_over_q(p, q, drafted).clamp(max=1)
    coins = choose(torch.stack([1 - accept, accept], -1))  # (γ,) of 0 and 1
    n = coins.cumprod(0).sum()  # coins after the first 0 do not count
    return n, next_token(p, q, 1.0, n, choose)


def block_keep(p, q, drafted):
    """keep[i] = P(at least i drafts stand | the first i drafts), of the block rule: -> (γ+1,)."""
    keep = [torch.ones_like(p[0, 0])]
    for ratio in p_over_q(p, q, drafted).clamp(max=1e30):  # finite, since 0 · inf is NaN
        keep.append((keep[-1] * ratio).clamp(max=1))
    return torch.stack(keep)


def verify_block(p, q, drafted, choose):
    """The block rule: one decision for the whole run (Sun et al. 2024, arXiv 2403.10444, Algorithm 2).

    Same signature and law as verify_token. It accepts at least as many drafts on average, since a
    token that p likes more than q does makes up for one before it that p likes less.
    """
    keep = block_keep(p, q, drafted)
    # Z_i: the target's probability at position i+1 that draft i+1 could not cover, for 0 < i < γ.
    Z = (keep[1:-1, None] * p[1:-1] - q[1:]).clamp(min=0).sum(-1)  # (γ-1,)
    h = torch.where(Z > 0, Z / (Z + (1 - keep[1:-1])), 0)
    h = torch.cat([h, keep[1:][-1:]])  # (γ,) the run of all γ stands with probability keep[γ]
    coins = choose(torch.stack([1 - h, h], -1))
    # The LARGEST i whose coin comes up, 0 if none does.
    lengths = torch.arange(len(keep), device=p.device)
    n = (F.pad(coins, (1, 0)) * lengths).amax()
    return n, next_token(p, q, keep.index_select(0, n.view(1)), n, choose)


VERIFY = {"token": verify_token, "block": verify_block}


# ---------------------------------------------------------------- what theory predicts

def expected_tokens(alpha, gamma):
    """Tokens per target pass: (1 - α^(γ+1)) / (1 - α), if acceptances are i.i.d. (L, equation 1)."""
    return gamma + 1 if alpha == 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)


def expected_speedup(alpha, gamma, c, v):
    """Tokens per pass over the cost of a round in plain steps, v + γc (L, Theorem 3.8, where v is 1)."""
    return expected_tokens(alpha, gamma) / (v + gamma * c)


def survival_token(q_over_p):
    """P(at least i drafts of a round stood | the text), i = 0, 1, ..., from q(y) / p(y) of the text's tokens y.

    A token y is drafted and stands with probability min(p(y), q(y)), and it comes with p(y): once it is there,
    it came as a draft with probability min(1, q(y) / p(y)).
    """
    return list(itertools.accumulate(q_over_p, lambda stand, ratio: stand * min(1, ratio), initial=1.0))


def survival_block(q_over_p):
    """The same for the block rule, where it holds of whole runs: the least of 1 and all products of q / p so far."""
    products = itertools.accumulate(q_over_p, lambda product, ratio: min(product * ratio, 1e30), initial=1.0)
    return list(itertools.accumulate(products, min))  # 1e30: finite, since inf · 0 is NaN


SURVIVAL = {"token": survival_token, "block": survival_block}


def expected_passes(q_over_p, survival=survival_token):
    """The mean number of target passes of a text, given the text. Nothing is taken to be i.i.d.

    q_over_p[t]: of the drafts proposed where t tokens are written, q(y) / p(y) of the tokens y that came there.
    The text ran to its full length: it was not cut by an end of text. A round that starts at t and keeps i drafts
    is followed by one that starts at t+i+1.
    """
    total = len(q_over_p)
    passes = [0.0] * (total + 1)  # from t on
    for t in reversed(range(total)):
        stand = survival(q_over_p[t][:total - t - 1]) + [0.0]
        passes[t] = 1 + sum((stand[i] - stand[i + 1]) * passes[t + i + 1] for i in range(len(stand) - 1))
    return passes[0]
