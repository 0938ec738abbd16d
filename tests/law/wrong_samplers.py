"""The wall: mistakes that people make in speculative decoding, each a wrong part in the place of a
right one.

All of them write plausible text, many of them write the right text at temperature 0, and most have
been seen in public code. `decode` is the real thing with an opening for each mistake; WALL, at the
end, is the list to read.
"""

import functools
from types import SimpleNamespace

import torch

from rigs import EOS, Foreign, text
from sampling import residual, seeded, verify_token, warp
from specdec import DraftModel, speculative
from variants import verify_block

VOCAB, SETTINGS = 4, dict(temperature=1.3, top_p=0.85)
# A target and a draft that agree at times, and write varied text.
TARGET, DRAFT = 7413, 515  # seeds


@functools.cache
def wall_model(seed, make=Foreign):
    return make(VOCAB, seed, context=64)


def decode(choose, prompt, max_new, gamma, settings, verify=verify_token, drafter=DraftModel,
           loop=speculative, target=Foreign, draft=Foreign, target_warp={}, draft_warp={}):
    """The rounds of speculative decoding, right in every part that is not given."""
    p_warp, q_warp = (functools.partial(warp, **settings | off)
                      for off in (target_warp, draft_warp))
    return list(loop(wall_model(TARGET, target), drafter(wall_model(DRAFT, draft), q_warp), prompt,
                     max_new, gamma=gamma, warp=p_warp, choose=choose, verify=verify, eos=EOS))


# ---------------------------------------------------------------- wrong rules

def token_rule(accept=lambda p, q: (p / q).clamp(max=1), count=lambda coins: coins.cumprod(0).sum(),
               correction=residual, bonus=lambda p, q: p[-1]):
    """verify_token in four parts, each of which a mistake may replace.

    accept: p(x), q(x) -> P(x is accepted). count: coins -> n. correction: a row of p and its row of
    q -> what to draw from. bonus: all rows -> what to draw from.
    """
    def verify(p, q, drafted, choose):
        x = drafted[:, None]
        a = accept(p[:-1].gather(-1, x), q.gather(-1, x))[:, 0]  # (k,)
        n = count(choose(torch.stack([1 - a, a], -1)))
        return n, choose(correction(p[n], q[n]) if n < len(q) else bonus(p, q))

    return verify


def normed(weights):
    return weights / weights.sum(-1, keepdim=True)


def no_bonus(p, q, drafted, choose):
    n, token = verify_token(p, q, drafted, choose)
    return (n - 1, drafted[-1]) if n == len(drafted) > 0 else (n, token)


def accept_the_favourite(p, q, drafted, choose):
    n = (p[:-1].argmax(-1) == drafted).cumprod(0).sum()
    return n, choose(p[n])


def accept_what_the_target_would_say(p, q, drafted, choose):
    for n in range(len(p)):
        token = choose(p[n])
        if n == len(drafted) or token != drafted[n]:
            return torch.tensor(n, device=p.device), token


def one_uniform_for_all_coins(p, q, drafted, choose):
    x = drafted[:, None]
    accept = (p[:-1].gather(-1, x) / q.gather(-1, x))[:, 0].clamp(max=1)  # (k,)
    edges = torch.cat([accept.new_tensor([0, 1]), accept]).sort().values
    i = choose(edges.diff())  # u lies between edges i and i+1, and the coins ask no more
    n = (accept > edges[i]).cumprod(0).sum()
    return n, choose(residual(p[n], q[n]) if n < len(q) else p[n])


def block_corrects_without_keep(p, q, drafted, choose):
    n, _ = verify_block(p, q, drafted, choose)
    return n, choose(residual(p[n], q[n]) if n < len(q) else p[n])


# ---------------------------------------------------------------- wrong drafters

def draws(pick):
    """A drafter whose tokens are pick(q, choose), while it says that they were drawn from q."""
    def drafter(draft, warp):
        propose = DraftModel(draft, warp)
        return lambda tokens, gamma, choose: propose(tokens, gamma, lambda q: pick(q, choose))
    return drafter


# ---------------------------------------------------------------- wrong caches

class NeverRolledBack(Foreign):
    """The loop sets `length` back, but the cache goes on growing from where it was."""
    def kept(self, cache):
        return len(cache.past)


class RolledBackTooFar(Foreign):
    """New keys overwrite those of the last token before them, which is not fed again."""
    def kept(self, cache):
        return min(len(cache.past), max(0, cache.length - 1))


class HoleAfterFullAcceptance(Foreign):
    """The draft never fed itself the last token it drafted; only the bonus after it is fed now."""
    def kept(self, cache):
        return min(len(cache.past), cache.length)

    def __call__(self, ids, cache=None):
        cache = cache or self.new_cache()
        end = cache.length + ids.shape[1]
        logits = super().__call__(ids[:, -1:] if cache.length else ids, cache)
        cache.length = end
        return logits


class PositionsRestart(Foreign):
    """The first token fed sees no more than the first of the text, whatever the cache holds."""
    def seen(self, ages):
        return super().seen(ages - ages[0, 0])


# ---------------------------------------------------------------- wrong loops

def stops_after_the_round(*args, eos, **rest):
    for one in speculative(*args, **rest):
        yield one
        if eos in one.new:
            return


def forgets_its_own_token(target, propose, tokens, max_new, **rest):
    """Drafts min(gamma, left), where the loop asks for min(gamma, left - 1)."""
    rounds = []
    for one in speculative(target, propose, tokens, max_new + 1, **rest):
        if len(text(rounds)) < max_new:
            rounds.append(one)
    return rounds


def writes_to_the_prompt(target, propose, tokens, *args, **rest):
    for one in speculative(target, propose, tokens, *args, **rest):
        tokens += one.new
        yield one


# ---------------------------------------------------------------- wrong generators

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

# The checks of test_wall.py. The first two are the ones that people write.
GREEDY, FIRST, LAW = "greedy equality", "first-token marginal", "exact joint law"
PROPERTY, PASSES, STATISTICS = "property", "expected passes", "statistics"
ALL = (GREEDY, FIRST, LAW)


def mistake(name, caught_by, missed_by=(), seeded=seeded, **parts):
    """missed_by: those of GREEDY, FIRST and LAW that do not see it; the other ones do."""
    return SimpleNamespace(**locals())


WALL = [
    # The token rule: accept a draft x with min(1, p(x)/q(x)).
    mistake("accept with q/p, upside down", LAW,
            verify=token_rule(accept=lambda p, q: (q / p).clamp(max=1))),
    mistake("accept with p, not divided by q", LAW, (GREEDY,),
            verify=token_rule(accept=lambda p, q: p)),
    mistake("accept if p > q, without a coin", LAW, (GREEDY,),
            verify=token_rule(accept=lambda p, q: (p > q) * 1.0)),
    mistake("accept the target's favourite", LAW, (GREEDY,), verify=accept_the_favourite),
    mistake("accept what is drawn from p as well: Σ pq < Σ min(p, q)", PASSES, ALL,
            verify=accept_what_the_target_would_say),
    mistake("count past the rejection", LAW, (GREEDY,),
            verify=token_rule(count=lambda coins: coins.sum())),
    mistake("one uniform for all coins", LAW, (GREEDY, FIRST), verify=one_uniform_for_all_coins),
    mistake("rows off by one", LAW,
            verify=lambda p, *rest: verify_token(torch.cat([p[1:], p[-1:]]), *rest)),

    # The token after them: norm(max(0, p - q)) after a rejection, p after full acceptance.
    mistake("correction from p", LAW, (GREEDY,), verify=token_rule(correction=lambda p, q: p)),
    mistake("correction from q - p", LAW,
            verify=token_rule(correction=lambda p, q: residual(q, p))),
    mistake("correction from |p - q|", LAW,
            verify=token_rule(correction=lambda p, q: normed((p - q).abs()))),
    mistake("correction not normalised", LAW, (GREEDY,),
            verify=token_rule(correction=lambda p, q: (p - q).clamp(min=0))),
    mistake("correction softmaxed, as if it were logits", LAW,
            verify=token_rule(correction=lambda p, q: (p - q).clamp(min=0).softmax(-1))),
    mistake("correction warped again", LAW, (GREEDY,),
            verify=token_rule(correction=lambda p, q: warp(residual(p, q).log(), **SETTINGS))),
    mistake("bonus by argmax", LAW, (GREEDY, FIRST),
            verify=token_rule(bonus=lambda p, q: warp(p[-1].log(), temperature=0))),
    mistake("bonus from the draft", LAW, (FIRST,),
            verify=token_rule(bonus=lambda p, q: q[-1] if len(q) else p[-1])),
    mistake("no bonus", PASSES, ALL, verify=no_bonus),

    # The block rule: the LARGEST i whose coin comes up, and the residual of keep·p.
    mistake("block: stop at a failure", LAW, (GREEDY,),  # a token is one: alone, it stays itself
            verify=lambda *args: verify_block(*args[:3], lambda p: args[3](p).cumprod(0))),
    mistake("block: the correction of the token rule", LAW, (GREEDY, FIRST),
            verify=block_corrects_without_keep),

    # The drafter: q is what each token was drawn from, and p and q go through the same warp.
    mistake("greedy draft, soft q", LAW, (GREEDY,), drafter=draws(lambda q, choose: q.argmax(-1))),
    mistake("sharp draft, soft q", LAW, (GREEDY,),
            drafter=draws(lambda q, choose: choose(normed(q * q)))),
    mistake("filter on the draft only", LAW, (GREEDY,), target_warp={"top_p": 1}),
    mistake("temperature on the draft only", LAW, target_warp={"temperature": 1}),
    mistake("filter on the target only", PASSES, ALL, draft_warp={"top_p": 1}),
    mistake("temperature on the target only", PASSES, ALL, draft_warp={"temperature": 1}),

    # The caches: a cache holds the keys of a prefix of the text, at their positions.
    mistake("target: never rolled back", LAW, (FIRST,), target=NeverRolledBack),
    mistake("target: rolled back too far", LAW, (FIRST,), target=RolledBackTooFar),
    mistake("target: positions restart", LAW, (FIRST,), target=PositionsRestart),
    mistake("draft: never rolled back", PASSES, ALL, draft=NeverRolledBack),
    mistake("draft: hole after full acceptance", PASSES, ALL, draft=HoleAfterFullAcceptance),
    mistake("draft: positions restart", PASSES, ALL, draft=PositionsRestart),

    # The loop: max_new tokens, or up to the first end of text.
    mistake("end of text after the round", PROPERTY, (GREEDY, FIRST), loop=stops_after_the_round),
    mistake("end of text 0 is none", PROPERTY, (GREEDY, FIRST),
            loop=lambda *args, eos, **rest: speculative(*args, **rest, eos=eos or None)),
    mistake("one token over", PROPERTY, (FIRST,), loop=forgets_its_own_token),
    mistake("last token lost", PROPERTY, (FIRST,),
            loop=lambda *args, **rest: speculative(*args[:-1], args[-1] - 1, **rest)),
    mistake("prompt written to", PROPERTY, ALL, loop=writes_to_the_prompt),

    # The generator: what no law can see, since it takes the place of the generator.
    mistake("reseeded at each draw", STATISTICS, ALL, lambda *of: lambda p: seeded(*of)(p)),
    mistake("one uniform for all draws of a text", STATISTICS, ALL, one_uniform),
    mistake("argmax(log p + noise) of uniform noise", STATISTICS, ALL, uniform_noise),
]

RIGHT = [
    mistake("token rule", None),
    mistake("token rule in parts", None, verify=token_rule()),
    mistake("block rule", None, verify=verify_block),
    mistake("drafter in parts", None, drafter=draws(lambda q, choose: choose(q))),
]
