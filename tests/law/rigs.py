"""What the tests are made of: models with random weights or with a script, the law that a target
alone would write, and the ways to decode of which the exact law is computed."""

import functools
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from hypothesis import settings

import sampling
from exact import check_law, law, marginal
from model import GPT, Config
from sampling import verify_token, warp
from specdec import DraftModel, speculative
from variants import DRAFTERS, RULES, verify_block

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# With what a file adds to the tables of variants.py that is given by -p.
rules = pytest.mark.parametrize("verify", RULES.values(), ids=RULES.keys())
our_rules = pytest.mark.parametrize("verify", [verify_token, verify_block], ids=["token", "block"])
greedy = functools.partial(warp, temperature=0)


def seeded(seed=0):
    return sampling.seeded(DEVICE, seed)


def forbidden(*_, **__):
    raise AssertionError("this must not be called")


def times(factor):
    """For a property whose example is cheap: so many times the examples of the profile."""
    return settings(max_examples=max(1, int(factor * settings().max_examples)))


def decode(target, propose, tokens, max_new, gamma, verify=verify_token, warp=warp, choose=None,
           eos=None):
    """The rounds of a text."""
    prompt = list(tokens)
    rounds = list(speculative(target, propose, prompt, max_new, gamma=gamma, warp=warp,
                              choose=choose or seeded(), verify=verify, eos=eos))
    assert prompt == list(tokens), f"the prompt was {list(tokens)}, and {prompt} is left of it"
    return rounds


def text(rounds):
    """The new tokens of a text, of rounds of the loop or as `histories` tells them."""
    return tuple(token for one in rounds for token in one.new)


# ---------------------------------------------------------------- models

def random_gpt(vocab_size=3, n_layer=1, seed=0, context=16, dtype=torch.float64, spread=0.7):
    """A real GPT with random weights, every one of them in use, in float64 for exact work."""
    model = GPT(Config(vocab_size, context=context, n_layer=n_layer, n_head=2, n_embd=8))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, spread, generator=generator)
    return model.to(DEVICE, dtype)


def identity_rig(**shape):
    """(target, draft): two models with the same weights."""
    return random_gpt(**shape), random_gpt(**shape)


class Scripted:
    """A model that says what comes after i+1 tokens by row i of a table of probabilities, whatever
    the tokens are. The last row holds for all that follow."""

    def __init__(self, table, context=64):
        self.logits = torch.tensor(table, dtype=torch.float64, device=DEVICE).log()  # (rows, V)
        self.device, self.config = DEVICE, Config(self.logits.shape[1], context=context)

    def new_cache(self):
        return SimpleNamespace(length=0)

    def row(self, ids, start):
        return [min(start + i, len(self.logits) - 1) for i in range(len(ids))]

    def __call__(self, ids, cache=None):
        start = cache.length if cache else 0
        if cache:
            cache.length += ids.shape[1]
        return self.logits[self.row(ids[0], start)][None]  # (1, T, V)


class Bigram(Scripted):
    """What comes after token x is row x of the table."""

    def row(self, ids, start):
        return ids


def saying(*tokens, vocab=10):
    """A Scripted model that is certain of these tokens, one by one; the last again and again."""
    return Scripted([[float(i == token) for i in range(vocab)] for token in tokens])


class Foreign:
    """A model of another make, with no class of ours: no attention, and a cache that grows. A token
    sees those before it, and less of them the longer ago they were."""

    def __init__(self, vocab_size=3, seed=0, context=16, width=6):
        generator = torch.Generator().manual_seed(seed)
        self.tokens, self.positions, self.mix, self.head = (
            torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE) for shape in (
                (vocab_size, width), (context, width), (width, width), (width, vocab_size)))
        self.config = SimpleNamespace(vocab_size=vocab_size, context=context)
        self.device = DEVICE

    def new_cache(self):
        return SimpleNamespace(length=0, past=self.tokens[:0])

    def kept(self, cache):
        """How many tokens of those that were read are still in the text."""
        return cache.length

    def seen(self, ages):
        """How much a token sees of one that came so many tokens before it."""
        return torch.where(ages < 0, 0, 0.7 ** ages)

    def __call__(self, ids, cache=None):
        cache = cache or self.new_cache()
        cache.past, cache.length = cache.past[:self.kept(cache)], cache.length + ids.shape[1]
        end = len(cache.past) + ids.shape[1]
        new = self.tokens[ids[0]] + self.positions[len(cache.past):end]  # (T, C)
        cache.past = torch.cat([cache.past, new])  # (end, C)
        when = torch.arange(end, dtype=torch.float64, device=DEVICE)
        ages = when[-ids.shape[1]:, None] - when  # (T, end)
        return (self.seen(ages) @ cache.past @ self.mix).tanh()[None] @ self.head  # (1, T, V)


class Spy:
    """A model that tells watch(tokens in its cache, ids) before it reads them."""

    def __init__(self, model, watch):
        self.model, self.watch = model, watch
        self.config, self.device, self.new_cache = model.config, model.device, model.new_cache

    def __call__(self, ids, cache=None):
        self.watch(cache.length, ids[0].tolist())
        return self.model(ids, cache)


# ---------------------------------------------------------------- the law of a target

def from_texts(model, warp, prompt=()):
    """text -> the list of probabilities of the next token, from a pass over all of it, without a
    cache: the reference."""
    @functools.cache
    @torch.inference_mode()
    def probabilities(tokens):
        return warp(model(torch.tensor([[*prompt, *tokens]], device=DEVICE))[0, -1]).tolist()

    return probabilities


def autoregressive_law(target, prompt, max_new, warp, eos=None):
    """{new tokens: probability} of the target by itself."""
    p, texts, ended = from_texts(target, warp, prompt), {(): 1.0}, {}
    for _ in range(max_new):
        longer = {}
        for tokens, weight in texts.items():
            for token, probability in enumerate(p(tokens)):
                if probability > 0:
                    home = ended if token == eos else longer
                    home[(*tokens, token)] = weight * probability
        texts = longer
    return texts | ended


def reference_passes(p, q, vocab, max_new, gamma, verify, eos=None):
    """The exact mean number of target passes, by recursion over texts: nothing of the loop is here.

    p(text), q(text): lists of probabilities. Think of mass: `drawn` is the mass of rounds that
    drafted the end of the text so far, `standing` what the rule keeps of it. The target sends
    standing·p(y) on to token y. As a draft, the token rule lets standing·min(p, q) of that stand,
    and the block rule all that the draft can cover, min(standing·p, drawn·q). What is missing comes
    as the target's own token, and ends the round.
    """
    @functools.cache
    def passes(tokens, left):
        """Passes yet to come when a round ends with this text and so many tokens are left."""
        if left == 0 or tokens[-1:] == (eos,):
            return 0
        return 1 + within(tokens, left, min(gamma, left - 1), 1.0, 1.0)

    def within(tokens, left, drafts, standing, drawn):
        """The mean of the passes after this one, over all that goes on from this text with so many
        drafts to come."""
        if tokens[-1:] == (eos,):
            return 0
        mean = 0
        for y in range(vocab):
            sent, stands = standing * p(tokens)[y], 0
            if drafts:
                covered, overlap = drawn * q(tokens)[y], standing * min(p(tokens)[y], q(tokens)[y])
                stands = min(sent, covered) if verify is verify_block else overlap
                mean += within((*tokens, y), left - 1, drafts - 1, stands, covered)
            mean += (sent - stands) * passes((*tokens, y), left - 1)
        return mean

    return passes((), max_new)


# ---------------------------------------------------------------- one round over tables

def tables(*rows):
    """Rows of weights as rows of probabilities, in float64."""
    weights = torch.tensor(rows, dtype=torch.float64, device=DEVICE)
    return weights / weights.sum(-1, keepdim=True)


def one_round(verify, p, q):
    """A round as a program: choose -> (the drafts, how many stand, the token after them)."""
    def program(choose):
        drafted = choose(q)
        n, token = verify(p, q, drafted, choose)
        return tuple(drafted.tolist()), int(n), int(token)

    return program


def accepted(round_law):
    """The mean number of accepted drafts, from the law of one_round."""
    return sum(weight * n for (_, n, _), weight in round_law.items())


# ---------------------------------------------------------------- the cases of the exact law

gpt = functools.cache(random_gpt)
PROMPT, EOS = [0, 1, 1, 0, 1], 0  # an end of text with id 0, since code may take 0 for "none"


def moody(pair, warp):
    """Gives 0, 1 or 2 drafts, whatever it is asked for."""
    propose = DraftModel(pair.draft, warp)
    return lambda tokens, gamma, choose: propose(tokens, min(gamma, len(tokens) % 3), choose)


MAKERS = DRAFTERS | {
    "target itself": lambda pair, warp: DraftModel(pair.target, warp),
    "one-hot": lambda pair, warp: DraftModel(pair.draft, functools.partial(warp, temperature=0)),
    "short context": lambda pair, warp: DraftModel(  # fewer than gamma, and none in the end
        gpt(pair.draft.config.vocab_size, context=len(PROMPT) + 2, seed=139), warp),
    "moody": moody,
}


def way(drafter="model", vocab=3, gamma=2, new=5, eos=None, models=None, **setting):
    """One way to decode. After a round that keeps both drafts, five new tokens leave one round that
    drafts again; four are enough for two rounds that draft where a draft was rejected."""
    warped, sharp = (functools.partial(warp, **setting | more) for more in ({}, {"temperature": 0}))
    # Seeds of models that go by the text, and are sure of nothing.
    target, draft = models or (gpt(vocab, n_layer=2, seed=131), gpt(vocab, n_layer=1, seed=139))
    return SimpleNamespace(
        drafter=drafter, vocab=vocab, gamma=gamma, new=new, eos=eos, warp=warped,
        target=target, draft=draft, encoding=SimpleNamespace(eot_token=EOS),
        # (model, warp) that the drafts are drawn from; None where they are fewer, or not drawn.
        drafting={"model": (draft, warped), "target itself": (target, warped),
                  "one-hot": (draft, sharp)}.get(drafter))


WARPS = {
    "T=0": way(temperature=0),
    "T=.5": way(temperature=0.5, vocab=2, new=4),
    "T=1": way(vocab=2),
    "T=1.7": way(temperature=1.7, vocab=2, new=4),
    "top-k": way(top_k=2, new=4),
    "top-p": way(top_p=0.8, new=4),
    "all three": way(temperature=1.7, top_k=2, top_p=0.9, new=4),
    "three drafts": way(temperature=1.7, top_k=2, gamma=3, new=4, eos=EOS),
    "bigrams": way(models=(Bigram([[3, 4, 2], [4, 3, 2], [2, 3, 4]]),
                           Bigram([[4, 2, 3], [2, 4, 3], [1, 1, 1]])), new=4, eos=EOS),
}
DRAFTED = {f"{drafter}, {'endless' if eos is None else 'end of text'}":
           way(drafter, temperature=1.5, top_k=2, eos=eos, new=4 if "itself" in drafter else 5)
           for drafter in MAKERS for eos in (None, EOS)}
WAYS = WARPS | DRAFTED


class Told(NamedTuple):
    """Of a Round, what a law can be made of."""
    new: tuple
    writers: tuple

    def __repr__(self):
        return " ".join(f"{writer} {token}" for token, writer in zip(*self))


@functools.cache
def histories(name, verify):
    """{the rounds of a text: probability} of a way, enumerated once for all the tests that ask."""
    def program(choose):
        way = WAYS[name]
        rounds = decode(way.target, MAKERS[way.drafter](way, way.warp), PROMPT, way.new, way.gamma,
                        verify, way.warp, choose, way.eos)
        return tuple(Told(tuple(one.new), tuple(one.writers)) for one in rounds)

    return law(program)


def check_text_law(target, make_drafter, prompt, new, gamma, verify, warp=warp, eos=None):
    """The text of the loop has the law of the target. Returns the mean number of passes."""
    def program(choose):
        rounds = decode(target, make_drafter(), prompt, new, gamma, verify, warp, choose, eos)
        return text(rounds), len(rounds)

    found = law(program)
    check_law(marginal(found, lambda result: result[0]),
              autoregressive_law(target, prompt, new, warp, eos), f"after {prompt} the text {{}}")
    return sum(weight * passes for (_, passes), weight in found.items())
