"""Probability, and nothing else: no model and no cache.

The letters, here and everywhere:

    p        the target model's distribution of the next token
    q        the draft model's distribution of the next token
    x        a drafted token, drawn from q
    gamma    how many drafts are asked for in a round (γ)
    k        how many drafts came: gamma, or fewer
    n        how many of them stand
    alpha    acceptance rate: the mean of Σ min(p, q) over contexts (α)
    c        time of a draft step / time of a plain step
    v        time of a round without its drafts / time of a plain step
    V        size of the vocabulary

p, q, x, γ, α and c are those of Leviathan, Kalman and Matias 2023 (arXiv 2211.17192). Chen et al.
2023 (arXiv 2302.01318) found the same algorithm and swap p and q.
"""

import math

import torch


# ---------------------------------------------------------------- from logits to a distribution

def warp(logits, temperature=1.0, top_k=None, top_p=1.0):
    """The distribution that is sampled from: softmax after temperature, then top-k, then top-p.

    logits (..., V) in any float type -> probabilities (..., V) in float32 or wider. Both models go
    through the same warp, and its output is both what is drawn from and what is scored: "lossless"
    means with respect to the warped p (Leviathan et al., section 2.2). Temperature 0 is a one-hot
    argmax, so greedy decoding needs no code of its own. Settings: see check_settings.
    """
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature == 0:
        one_hot = torch.zeros_like(z).scatter_(-1, z.argmax(-1, keepdim=True), 1)
        return one_hot.masked_fill(z.isnan().any(-1, keepdim=True), math.nan)
    if temperature != 1:
        # The largest logit becomes 0, which stays 0 at any temperature. A float32 below 1e-30 may
        # count as 0, which cannot be divided by.
        z = (z - z.amax(-1, keepdim=True)) / max(temperature, 1e-30)
    if top_k is None and top_p == 1:
        return z.softmax(-1)
    ranked, order = z.sort(dim=-1, descending=True, stable=True)  # of equal logits the first leads
    probs = ranked[..., :top_k].softmax(-1)
    likelier = probs.cumsum(-1) - probs  # probability of all tokens that rank higher
    probs = probs.where(likelier < top_p, 0) if top_p < 1 else probs
    probs = probs / probs.sum(-1, keepdim=True)
    return torch.zeros_like(z).scatter_(-1, order[..., :top_k], probs)


def check_settings(temperature, top_k, top_p):
    """ValueError for a setting out of range."""
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature must be 0 or a positive number, not {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top-k must be at least 1, not {top_k}")
    if not 0 < top_p <= 1:
        raise ValueError(f"top-p must be above 0 and at most 1, not {top_p}")


# ---------------------------------------------------------------- drawing

def seeded(device, seed):
    """The draw, `choose(probs)`: the only source of randomness while decoding, fixed by the seed.

    probs (..., V) on the device -> token ids (...), each drawn from its row. A coin that comes up 1
    with probability a is a draw from (1-a, a). The tests replace `choose` by one that replays every
    outcome, and so compute the exact law of the code that calls it.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def choose(probs):
        # What torch.multinomial does, without its wait for the device at each draw: a race of
        # exponential clocks. Clock i rings at time E_i / p_i, and is the first, the one with the
        # largest p_i / E_i, with probability p_i / Σp.
        clocks = torch.empty_like(probs).exponential_(generator=generator)
        return (probs / clocks).argmax(-1)

    return choose


# ---------------------------------------------------------------- accept or correct

def verify_token(p, q, drafted, choose):
    """The token rule (Leviathan et al., Algorithm 1). Returns (n, token), two tensors of shape ():
    how many drafts stand, and the token after them.

    p (k+1, V): row i judges draft i, and the last row is for the bonus. q (k, V): what each draft
    was really drawn from. drafted (k,). A rule writes to none of them.
    """
    x = drafted[:, None]  # (k, 1)
    ratio = (p[:-1].gather(-1, x) / q.gather(-1, x))[:, 0]  # (k,) p(x) / q(x)
    # Behind a draft with p = 0 the rows may be NaN. Its own coin is 0, so they never count.
    accept = ratio.clamp(max=1).nan_to_num(0)
    coins = choose(torch.stack([1 - accept, accept], -1))  # (k,) of 0 and 1
    n = coins.cumprod(0).sum()  # coins after the first 0 do not count

    # Behind the last draft nothing was drafted: a q of zeros leaves all of p, for the bonus.
    q_and_zeros = torch.cat([q, torch.zeros_like(p[-1:])])  # (k+1, V)
    row = n[None]  # p[n] would read n from the device, and wait for it
    return n, choose(residual(p[row], q_and_zeros[row]))[0]


def residual(p, q):
    """norm(max(0, p - q)), (..., V): what q leaves of p, made to sum to 1 (Leviathan et al., 2.3).
    Where the two are equal up to rounding nothing is left; then it is p."""
    left = (p - q).clamp(min=0)
    left = torch.where(left.sum(-1, keepdim=True) > 0, left, p)
    return left / left.sum(-1, keepdim=True)
