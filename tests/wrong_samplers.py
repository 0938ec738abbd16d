"""The wall: mistakes that people make in speculative decoding, each a wrong part in the place of a
right one.

All of them write plausible text, many of them write the right text at temperature 0, and most have
been seen in public code. `decode` is the real thing with an opening for each mistake; WALL, at the
end, is the list to read.
"""

import functools
from dataclasses import dataclass

import torch

from model import GPT
from rigs import random_gpt
from sampling import (Verdict, p_over_q, residual, residual_after, seeded, verify_block,
                      verify_token, warp)
from specdec import DraftModel, speculative

VOCAB, EOS = 4, 0  # an end of text with id 0, since code may take 0 for "none"
SETTINGS = dict(temperature=1.3, top_p=0.85)
# A target and a draft that agree at times, and write varied text.
TARGET, DRAFT = dict(n_layer=2, seed=65), dict(n_layer=1, seed=41)


@functools.cache
def wall_gpt(n_layer, seed, forward=GPT.forward):
    model = random_gpt(VOCAB, n_layer, seed, context=32)
    model.forward = functools.partial(forward, model)
    return model


def decode(choose, prompt, max_new, gamma, settings, verify=verify_token, drafter=DraftModel,
           loop=speculative, target_forward=GPT.forward, draft_forward=GPT.forward,
           target_ignores=None, draft_ignores=None):
    """The rounds of speculative decoding, right in every part that is not given."""
    def warp_without(ignored):
        used = {name: value for name, value in settings.items() if name != ignored}
        return functools.partial(warp, **used)

    target = wall_gpt(**TARGET, forward=target_forward)
    draft = wall_gpt(**DRAFT, forward=draft_forward)
    propose = drafter(draft, warp_without(draft_ignores))
    return list(loop(target, propose, prompt, max_new, gamma, warp_without(target_ignores), choose,
                     verify, eos=EOS))


# ---------------------------------------------------------------- wrong rules

def token_rule(accept=lambda p, q: (p / q).clamp(max=1), count=lambda coins: coins.cumprod(0).sum(),
               correction=residual, bonus=lambda p, q: p[-1]):
    """verify_token in four parts, each of which a mistake may replace.

    accept: p(x), q(x) -> P(x is accepted). count: coins -> n. correction: a row of p and its row of
    q -> what to draw from. bonus: all rows -> what to draw from.
    """
    def verify(p, q, drafted, choose):
        x = drafted[:, None]
        a = accept(p[:-1].gather(-1, x), q.gather(-1, x))[:, 0]  # (γ,)
        n = count(choose(torch.stack([1 - a, a], -1)))
        return Verdict(n, choose(correction(p[n], q[n]) if n < len(q) else bonus(p, q)))

    return verify


def normed(weights):
    return weights / weights.sum(-1, keepdim=True)


def no_bonus(p, q, drafted, choose):
    verdict = verify_token(p, q, drafted, choose)
    if verdict.n == len(drafted) > 0:
        return Verdict(verdict.n - 1, drafted[-1])
    return verdict


def accept_the_favourite(p, q, drafted, choose):
    n = (p[:-1].argmax(-1) == drafted).cumprod(0).sum()
    return Verdict(n, choose(p[n]))


def accept_what_the_target_would_say(p, q, drafted, choose):
    for n in range(len(p)):
        token = choose(p[n])
        if n == len(drafted) or token != drafted[n]:
            return Verdict(torch.tensor(n, device=p.device), token)


def one_uniform_for_all_coins(p, q, drafted, choose):
    accept = p_over_q(p[:-1], q, drafted).clamp(max=1)
    edges = torch.cat([accept.new_tensor([0, 1]), accept]).sort().values
    i = choose(edges.diff())  # u lies between edges i and i+1, and the coins ask no more
    n = (accept > edges[i]).cumprod(0).sum()
    return Verdict(n, choose(residual_after(n, p, q)))


def row_too_late(p, q, drafted, choose):
    return verify_token(torch.cat([p[1:], p[-1:]]), q, drafted, choose)


def block_stops_at_a_failure(p, q, drafted, choose):
    def no_coin_counts_after_a_failure(probs):
        drawn = choose(probs)
        if drawn.dim() == 1:  # the coins; coin 0 decides nothing
            drawn[1:] = drawn[1:].cumprod(0)
        return drawn

    return verify_block(p, q, drafted, no_coin_counts_after_a_failure)


def block_corrects_without_keep(p, q, drafted, choose):
    n = verify_block(p, q, drafted, choose).n
    return Verdict(n, choose(residual_after(n, p, q)))


# ---------------------------------------------------------------- wrong drafters

def draws(pick):
    """A drafter whose tokens are pick(q, choose), while it says that they were drawn from q."""
    def drafter(draft, warp):
        propose = DraftModel(draft, warp)
        return lambda tokens, gamma, choose: propose(tokens, gamma, lambda q: pick(q, choose))

    return drafter


# ---------------------------------------------------------------- wrong caches

def never_rolled_back(model, ids, cache, rows):
    """The loop sets `length` back, but the cache goes on growing from where it was."""
    start, cache.length = cache.length, getattr(cache, "grown", 0)
    logits = GPT.forward(model, ids, cache, rows)
    cache.grown, cache.length = cache.length, start + ids.shape[1]
    return logits


def rolled_back_too_far(model, ids, cache, rows):
    """New keys overwrite those of the last token before them, which is not fed again."""
    start, cache.length = cache.length, max(0, cache.length - 1)
    logits = GPT.forward(model, ids, cache, rows)
    cache.length = start + ids.shape[1]
    return logits


def hole_after_full_acceptance(model, ids, cache, rows):
    """The draft never fed itself the last token it drafted; only the bonus after it is fed now."""
    if cache.length > 0:
        start, cache.length = cache.length, cache.length + ids.shape[1] - 1
        ids = ids[:, -1:]
        for keys_and_values in cache.layers:
            keys_and_values[..., start:cache.length, :] = 0
    return GPT.forward(model, ids, cache, rows)


def positions_restart(model, ids, cache, rows):
    """The first token fed has position 0, whatever the cache holds."""
    right = model.bias
    model.bias = right.roll(cache.length, dims=1)  # row start + i is now row i
    logits = GPT.forward(model, ids, cache, rows)
    model.bias = right
    return logits


# ---------------------------------------------------------------- wrong loops

def stops_after_the_round(*args, eos):
    for one in speculative(*args):
        yield one
        if eos in one.new:
            return


def zero_is_none(*args, eos):
    return speculative(*args, eos=eos or None)


def one_token_short(target, propose, tokens, max_new, *args, eos):
    return speculative(target, propose, tokens, max_new - 1, *args, eos=eos)


def forgets_its_own_token(target, propose, tokens, max_new, *args, eos):
    """Drafts min(gamma, left), where the loop asks for min(gamma, left - 1)."""
    written = 0
    for one in speculative(target, propose, tokens, max_new + 1, *args, eos=eos):
        yield one
        written += len(one.new)
        if written >= max_new:
            return


def writes_to_the_prompt(target, propose, tokens, *args, eos):
    for one in speculative(target, propose, tokens, *args, eos=eos):
        tokens += one.new
        yield one


# ---------------------------------------------------------------- wrong generators

def reseeded(device, seed):
    return lambda probs: seeded(device, seed)(probs)


def one_uniform(device, seed):
    u = torch.rand((), generator=torch.Generator(device).manual_seed(seed), device=device)
    return lambda probs: (probs.cumsum(-1) < u).sum(-1)


def uniform_noise(device, seed):
    generator = torch.Generator(device).manual_seed(seed)

    def choose(probs):
        noise = torch.rand(probs.shape, generator=generator, device=probs.device)
        return (probs.log() + noise).argmax(-1)

    return choose


# ---------------------------------------------------------------- the wall

# The checks of test_wrong_samplers.py. The first two are the ones that people write.
GREEDY, FIRST, LAW = "greedy equality", "first-token marginal", "exact joint law"
PROPERTY, PASSES, STATISTICS = "property", "expected passes", "statistics"


@dataclass
class Mistake:
    name: str
    wrong: str  # what it gets wrong
    caught_by: str
    missed_by: tuple  # those of GREEDY, FIRST and LAW that do not see it; the other ones do
    seeded: callable
    parts: dict  # for `decode`


def mistake(name, wrong, caught, missed=(), seeded=seeded, **parts):
    return Mistake(name, wrong, caught, missed, seeded, parts)


WALL = [
    # The token rule: accept a draft x with min(1, p(x)/q(x)).
    mistake("accept with q/p", "The ratio is upside down.",
            LAW, (), verify=token_rule(accept=lambda p, q: (q / p).clamp(max=1))),
    mistake("accept with p", "The coin is u <= p(x): the division by q(x) is missing.",
            LAW, (GREEDY,), verify=token_rule(accept=lambda p, q: p)),
    mistake("accept if p > q", "A threshold in the place of a coin.",
            LAW, (GREEDY,), verify=token_rule(accept=lambda p, q: (p > q) * 1.0)),
    mistake("accept the favourite", "A draft stands if it is the target's argmax.",
            LAW, (GREEDY,), verify=accept_the_favourite),
    mistake("accept what the target would say", "Draw from p and compare: Σ pq < Σ min(p, q).",
            PASSES, (GREEDY, FIRST, LAW), verify=accept_what_the_target_would_say),
    mistake("count past the rejection", "Coins after the first failure are counted.",
            LAW, (GREEDY,), verify=token_rule(count=lambda coins: coins.sum())),
    mistake("one uniform for all coins", "The coins of a round are not independent.",
            LAW, (GREEDY, FIRST), verify=one_uniform_for_all_coins),
    mistake("rows off by one", "Row i+1 of p judges draft i.",
            LAW, (), verify=row_too_late),

    # The token after them: norm(max(0, p - q)) after a rejection, p after full acceptance.
    mistake("correction from p", "What q has covered already is drawn once more.",
            LAW, (GREEDY,), verify=token_rule(correction=lambda p, q: p)),
    mistake("correction from q - p", "The residual has the wrong sign.",
            LAW, (), verify=token_rule(correction=lambda p, q: residual(q, p))),
    mistake("correction from |p - q|", "What q has too much of is no part of the residual.",
            LAW, (), verify=token_rule(correction=lambda p, q: normed((p - q).abs()))),
    mistake("correction not normalised", "The weights do not sum to 1; some samplers mend that.",
            LAW, (GREEDY,), verify=token_rule(correction=lambda p, q: (p - q).clamp(min=0))),
    mistake("correction softmaxed", "The residual holds probabilities, not logits.",
            LAW, (), verify=token_rule(correction=lambda p, q: (p - q).clamp(min=0).softmax(-1))),
    mistake("correction warped again", "p and q have been through the warp already.",
            LAW, (GREEDY, FIRST),
            verify=token_rule(correction=lambda p, q: warp(residual(p, q).log(), **SETTINGS))),
    mistake("bonus by argmax", "After full acceptance the favourite is taken, not drawn.",
            LAW, (GREEDY, FIRST),
            verify=token_rule(bonus=lambda p, q: warp(p[-1].log(), temperature=0))),
    mistake("bonus from the draft", "After full acceptance the token comes from q.",
            LAW, (FIRST,), verify=token_rule(bonus=lambda p, q: q[-1] if len(q) else p[-1])),
    mistake("no bonus", "After full acceptance the last row of p is thrown away.",
            PASSES, (GREEDY, FIRST, LAW), verify=no_bonus),

    # The block rule: the LARGEST i whose coin comes up, and the residual of keep·p.
    mistake("block: stop at a failure", "The first failure ends the run, as in the token rule.",
            LAW, (GREEDY,), verify=block_stops_at_a_failure),
    mistake("block: correction without keep", "The residual is the token rule's.",
            LAW, (GREEDY, FIRST), verify=block_corrects_without_keep),

    # The drafter: q is what each token was drawn from, and p and q go through the same warp.
    mistake("greedy draft, soft q", "The draft takes its favourite, and is scored as if drawn.",
            LAW, (GREEDY,), drafter=draws(lambda q, choose: q.argmax(-1))),
    mistake("sharp draft, soft q", "The draft is drawn at half the temperature of its score.",
            LAW, (GREEDY,), drafter=draws(lambda q, choose: choose(normed(q * q)))),
    mistake("filter on the draft only", "The text follows an unfiltered p.",
            LAW, (GREEDY,), target_ignores="top_p"),
    mistake("temperature on the draft only", "The text follows p at temperature 1.",
            LAW, (), target_ignores="temperature"),
    mistake("filter on the target only", "The draft proposes tokens that the target has ruled out.",
            PASSES, (GREEDY, FIRST, LAW), draft_ignores="top_p"),
    mistake("temperature on the target only", "The draft is surer than the target.",
            PASSES, (GREEDY, FIRST, LAW), draft_ignores="temperature"),

    # The caches: a cache holds the keys of a prefix of the text, at their positions.
    mistake("target: never rolled back", "Rejected drafts stay in the cache.",
            LAW, (FIRST,), target_forward=never_rolled_back),
    mistake("target: rolled back too far", "The cache is off by one token.",
            LAW, (FIRST,), target_forward=rolled_back_too_far),
    mistake("target: positions restart", "The first token fed sees no cache, as with is_causal.",
            LAW, (FIRST,), target_forward=positions_restart),
    mistake("draft: never rolled back", "The draft reads its own rejected tokens.",
            PASSES, (GREEDY, FIRST, LAW), draft_forward=never_rolled_back),
    mistake("draft: hole after full acceptance", "The draft has not read its own last token.",
            PASSES, (GREEDY, FIRST, LAW), draft_forward=hole_after_full_acceptance),
    mistake("draft: positions restart", "The same mistake as in the target, seen in the speed.",
            PASSES, (GREEDY, FIRST, LAW), draft_forward=positions_restart),

    # The loop: max_new tokens, or up to the first end of text.
    mistake("end of text after the round", "The round that holds an end of text is kept whole.",
            PROPERTY, (GREEDY, FIRST), loop=stops_after_the_round),
    mistake("end of text 0 is none", "Token id 0 is false in Python.",
            PROPERTY, (GREEDY, FIRST), loop=zero_is_none),
    mistake("one token over", "A round drafts as many tokens as are left, and adds its own.",
            PROPERTY, (FIRST,), loop=forgets_its_own_token),
    mistake("last token lost", "One token fewer than asked.",
            PROPERTY, (FIRST,), loop=one_token_short),
    mistake("prompt written to", "The caller's list grows with the text.",
            PROPERTY, (GREEDY, FIRST, LAW), loop=writes_to_the_prompt),

    # The generator: what no law can see, since it takes the place of the generator.
    mistake("reseeded", "Each draw starts the generator again.",
            STATISTICS, (GREEDY, FIRST, LAW), seeded=reseeded),
    mistake("one uniform", "One random number for all draws of a text.",
            STATISTICS, (GREEDY, FIRST, LAW), seeded=one_uniform),
    mistake("uniform noise", "argmax(log p + noise) draws from p if the noise is Gumbel's.",
            STATISTICS, (GREEDY, FIRST, LAW), seeded=uniform_noise),
]

RIGHT = {
    "token rule": {},
    "token rule in parts": dict(verify=token_rule()),
    "block rule": dict(verify=verify_block),
    "drafter in parts": dict(drafter=draws(lambda q, choose: choose(q))),
}
