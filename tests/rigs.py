"""What the tests are made of: models with random weights or with a script, the law that a target
alone would write, the cases of the exact law, and a pair trained in a second."""

import contextlib
import functools
import io
import math
import textwrap
from collections import namedtuple
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import settings

import sampling
from exact import law
from model import GPT, Config
from sampling import VERIFY, verify_block, warp
from specdec import DraftModel, prompt_lookup, speculative
from train_tiny import PRESETS, Limit, train_pair

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
rules = pytest.mark.parametrize("verify", VERIFY.values(), ids=VERIFY.keys())
greedy = functools.partial(warp, temperature=0)


def seeded(seed=0):
    return sampling.seeded(DEVICE, seed)


def forbidden(*_, **__):
    raise AssertionError("this must not be called")


def times(factor):
    """For a property whose example is cheap: so many times the examples of the profile."""
    return settings(max_examples=factor * settings().max_examples)


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
        self.device = DEVICE
        self.config = Config(self.logits.shape[1], context=context)

    def new_cache(self):
        return SimpleNamespace(length=0)

    def __call__(self, ids, cache=None, rows=None):
        start = cache.length if cache else 0
        end = start + ids.shape[1]
        if end > self.config.context:
            raise ValueError(f"{end} tokens do not fit the context of {self.config.context}")
        if cache:
            cache.length = end
        positions = torch.arange(end - (rows or end - start), end, device=ids.device)
        return self.logits[positions.clamp(max=len(self.logits) - 1)][None]  # (1, rows, V)


def saying(*tokens, vocab=10):
    """A Scripted model that is certain of these tokens, one by one; the last again and again."""
    return Scripted([[float(i == token) for i in range(vocab)] for token in tokens])


class PastTuples:
    """The cache of a model of another make: keys and values of each layer, that grow."""

    def __init__(self, layers, width):
        empty = torch.zeros(0, width, dtype=torch.float64, device=DEVICE)
        self.past = ((empty, empty),) * layers

    @property
    def length(self):
        return len(self.past[0][0])

    @length.setter
    def length(self, length):
        assert length <= self.length, "the loop never sets it higher"
        self.past = tuple((keys[:length], values[:length]) for keys, values in self.past)


class Foreign:
    """A model of another make, with no class of ours: learned positions, and a cache of tuples."""

    def __init__(self, vocab_size=3, layers=2, seed=0, context=16, width=6):
        generator = torch.Generator().manual_seed(seed)

        def random(*shape):
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE) * 0.7

        self.config = SimpleNamespace(vocab_size=vocab_size, context=context, tokenizer="")
        self.device, self.width = DEVICE, width
        self.tokens, self.positions = random(vocab_size, width), random(context, width)
        self.layers = [[random(width, width) for _ in range(4)] for _ in range(layers)]
        self.head = random(width, vocab_size)

    def new_cache(self):
        return PastTuples(len(self.layers), self.width)

    def __call__(self, ids, cache=None, rows=None):
        cache = cache or self.new_cache()
        start, end = cache.length, cache.length + ids.shape[1]
        x = self.tokens[ids[0]] + self.positions[start:end]  # (T, C)
        future = torch.ones(end - start, end, device=DEVICE).triu(start + 1) == 1
        grown = []
        for (to_q, to_k, to_v, out), (keys, values) in zip(self.layers, cache.past):
            keys, values = torch.cat([keys, x @ to_k]), torch.cat([values, x @ to_v])
            seen = (x @ to_q @ keys.T).masked_fill(future, -math.inf).softmax(-1)  # (T, end)
            x = x + seen @ values @ out
            grown.append((keys, values))
        cache.past = tuple(grown)
        return (x @ self.head)[None, -(rows or len(x)):]


# ---------------------------------------------------------------- the law of a target

@torch.inference_mode()
def autoregressive_law(target, prompt, max_new, warp, eos=None):
    """{new tokens: probability} of the target by itself, from forward passes without a cache: the
    reference."""
    texts, ended = {(): 1.0}, {}
    for _ in range(max_new):
        longer = {}
        for tokens, weight in texts.items():
            ids = torch.tensor([[*prompt, *tokens]], device=DEVICE)
            for token, probability in enumerate(warp(target(ids)[0, -1]).tolist()):
                if probability > 0:
                    home = ended if token == eos else longer
                    home[(*tokens, token)] = weight * probability
        texts = longer
    return texts | ended


def without_cache(model, warp, prompt=()):
    """text -> the list of probabilities of the next token, from a forward pass over all of it."""
    @functools.cache
    def probabilities(tokens):
        with torch.inference_mode():
            return warp(model(torch.tensor([[*prompt, *tokens]], device=DEVICE))[0, -1]).tolist()

    return probabilities


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
        verdict = verify(p, q, drafted, choose)
        return tuple(drafted.tolist()), int(verdict.n), int(verdict.token)

    return program


def accepted(round_law):
    """The mean number of accepted drafts, from the law of one_round."""
    return sum(weight * n for (_, n, _), weight in round_law.items())


# ---------------------------------------------------------------- the cases of the exact law

gpt = functools.cache(random_gpt)
PROMPT = (0, 1, 1, 0, 1)


@dataclass
class Case:
    """One way to decode. After a round that keeps both drafts, five new tokens leave one round that
    drafts again; four are enough for two rounds that draft where a draft was rejected."""
    settings: dict = field(default_factory=dict)
    drafter: str = "draft model"
    vocab: int = 3
    gamma: int = 2
    new: int = 5
    eos: int = None

    @property
    def warp(self):
        return functools.partial(warp, **self.settings)

    @property
    def models(self):
        """The target, of two layers, and the draft, of one."""
        return gpt(self.vocab, n_layer=2, seed=1), gpt(self.vocab, n_layer=1, seed=2)

    @property
    def drafting(self):
        """(model, warp) that the drafter draws from; None for one that does not draft to gamma."""
        target, draft = self.models
        sharp = functools.partial(self.warp, temperature=0)
        return {"draft model": (draft, self.warp), "target itself": (target, self.warp),
                "one-hot": (draft, sharp)}.get(self.drafter)

    def make_drafter(self):
        if self.drafting:
            return DraftModel(*self.drafting)
        if self.drafter == "prompt lookup":
            return prompt_lookup(self.vocab, DEVICE, self.eos)
        if self.drafter == "short context":  # fewer than gamma, and none in the end
            return DraftModel(gpt(self.vocab, context=len(PROMPT) + 2, seed=2), self.warp)
        propose = DraftModel(self.models[1], self.warp)  # "moody": 0, 1 or 2 drafts
        return lambda tokens, gamma, choose: propose(tokens, min(gamma, len(tokens) % 3), choose)

    def rounds(self, choose, verify):
        return speculative(self.models[0], self.make_drafter(), PROMPT, self.new, self.gamma,
                           self.warp, choose, verify, self.eos)


WARPS = {
    "T=0": Case(dict(temperature=0)),
    "T=.5": Case(dict(temperature=0.5), vocab=2, new=4),
    "T=1": Case(vocab=2),
    "T=1.7": Case(dict(temperature=1.7), vocab=2, new=4),
    "top-k": Case(dict(top_k=2), new=4),
    "top-p": Case(dict(top_p=0.8), new=4),
    "all three": Case(dict(temperature=1.7, top_k=2, top_p=0.9), new=4),
    "three drafts": Case(dict(temperature=1.7, top_k=2), gamma=3, new=4, eos=0),
}
DRAFTED = {
    f"{drafter}, {'end of text' if eos == 0 else 'endless'}":
        Case(dict(temperature=1.5, top_k=2), drafter, eos=eos,
             new=4 if drafter == "target itself" else 5)
    for drafter in ("draft model", "target itself", "one-hot", "prompt lookup", "short context",
                    "moody")
    for eos in (None, 0)
}
CASES = WARPS | DRAFTED
Told = namedtuple("Told", "new writers")  # of a Round, what a law can be made of


@functools.cache
def histories(name, verify):
    """{the rounds of a text: probability} of a case, enumerated once for all the tests that ask."""
    def program(choose):
        return tuple(Told(tuple(one.new), tuple(one.writers))
                     for one in CASES[name].rounds(choose, verify))

    return law(program)


# ---------------------------------------------------------------- a trained pair, the command line

SOURCE = Path(textwrap.__file__).read_text(encoding="utf-8")  # a module of the standard library

# The default preset made so small that it trains in a second. It ends after its steps, whatever
# time they take, so that it can be repeated.
FEW = Limit(40, math.inf)
MICRO = replace(PRESETS["tiny"], vocab_size=300, batch=4, window=16, gamma=3,
                target=dict(n_layer=2, n_head=2, n_embd=16),
                draft=dict(n_layer=1, n_head=2, n_embd=8),
                limits=dict(target=FEW, draft=FEW, labels=FEW, distilling=FEW))


def quiet_pair(preset, documents, seed=0):
    """Trained on the CPU, where sums have one order."""
    with contextlib.redirect_stdout(io.StringIO()):
        return train_pair(preset, documents, torch.device("cpu"), seed)


@functools.cache
def micro_pair():
    """The trained pair that tests share. Not to be written to."""
    return quiet_pair(MICRO, [SOURCE])


def ended(program, arguments, capsys):
    """(exit code, stdout, stderr) of a command line."""
    capsys.readouterr()
    try:
        program.main([str(argument) for argument in arguments])
        code = 0
    except SystemExit as end:
        code = end.code
    return (code, *capsys.readouterr())


def is_one_clear_line(result, *words):
    """Exit code 2, one line on stderr that has these words in it, nothing on stdout."""
    code, out, err = result
    assert (code, out, err.count("\n")) == (2, "", 1), result
    assert all(word in err for word in words), err
    return True
