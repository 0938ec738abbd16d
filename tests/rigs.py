"""What the tests are made of: models with random weights or with a script, a pair trained in a second, and the
law that a target alone would write."""

import contextlib
import functools
import io
import math
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import specdec
from model import GPT, Config
from sampling import VERIFY
from train_tiny import PRESETS, train_pair

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
rules = pytest.mark.parametrize("verify", VERIFY.values(), ids=VERIFY.keys())


def seeded(seed=0):
    return specdec.seeded(DEVICE, seed)


def forbidden(*_, **__):
    raise AssertionError("this must not be called")


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
    """Quacks like a GPT in float64, but what comes after i+1 tokens of a text is row i of a table of
    probabilities, whatever the tokens are. The last row holds for all that follow."""

    def __init__(self, table, context=64):
        self.embed = torch.tensor(table, dtype=torch.float64, device=DEVICE).log()  # (rows, V) logits
        self.config = Config(self.embed.shape[1], context=context, n_head=1, n_embd=1)

    def __call__(self, ids, cache=None, rows=None):
        start = cache.length if cache else 0
        end = start + ids.shape[1]
        if end > self.config.context:
            raise ValueError(f"{end} tokens do not fit the context of {self.config.context}")
        if cache:
            cache.length = end
        positions = torch.arange(end - min(rows or end - start, end - start), end, device=ids.device)
        return self.embed[positions.clamp(max=len(self.embed) - 1)][None]  # (1, rows, V)


def saying(*tokens, vocab=10):
    """A Scripted model that is certain of these tokens, one after another; the last one again and again."""
    return Scripted([[float(i == token) for i in range(vocab)] for token in tokens])


# ---------------------------------------------------------------- the law of a target

@torch.inference_mode()
def autoregressive_law(target, prompt, max_new, warp, eos=None):
    """{new tokens: probability} of the target by itself, from forward passes without a cache: the reference."""
    texts, ended = {(): 1.0}, {}
    for _ in range(max_new):
        longer = {}
        for text, weight in texts.items():
            ids = torch.tensor([[*prompt, *text]], device=DEVICE)
            for token, probability in enumerate(warp(target(ids)[0, -1]).tolist()):
                if probability > 0:
                    home = ended if token == eos else longer
                    home[(*text, token)] = weight * probability
        texts = longer
    return texts | ended


# ---------------------------------------------------------------- a trained pair, and the command line

SOURCE = Path(textwrap.__file__).read_text(encoding="utf-8")  # one module of the standard library, 20,000 characters

# The default preset made so small that it trains in a second. It ends after its steps, whatever time they take, so
# that it can be repeated.
TINY = PRESETS["tiny"]
MICRO = replace(TINY, vocab_size=300, batch=4, window=16,
                target=dict(n_layer=2, n_head=2, n_embd=16), draft=dict(n_layer=1, n_head=2, n_embd=8),
                steps=(40,) * len(TINY.steps), minutes=(math.inf,) * len(TINY.minutes))


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
