"""What the grading is made of: words for what is wrong, a limit in time, the exact law of an
answer, a model that tells what it read. Failures are raised: python -O takes assertions out."""

import _thread
import contextlib
import functools
import inspect
import itertools
import random
import signal
import threading
import time
import traceback
import zlib
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from exact import EXACT, every_outcome
from model import Config
from rigs import DEVICE


# ---------------------------------------------------------------- words

class Failure(AssertionError):
    """What an answer does not meet, in a sentence."""


def require(condition, sentence):
    if not condition:
        raise Failure(sentence)


def same(name, came, right, causes=None):
    """Failure unless two values are equal. causes: {what may have come: its usual cause}."""
    cause = (causes or {}).get(str(came))
    require(came == right, f"{name} is {came}; right is {right}" + (f": {cause}" if cause else ""))


def same_law(name, came, right, mistakes=None):
    """The same of rows of probabilities. mistakes: {usual cause: the row that it gives}."""
    if not close(came, right):
        causes = [words for words, gives in (mistakes or {}).items() if close(came, gives)]
        if numbers(came) == numbers(right):
            causes = ["they differ by less than is shown (was a part computed in float32, or is "
                      "something added to a sum?)"]
        raise Failure(f"{name} {numbers(came)}; right is {numbers(right)}"
                      + "".join(f": {words}" for words in causes[:1]))


def close(a, b):
    a, b = (torch.as_tensor(x, dtype=torch.float64, device=DEVICE) for x in (a, b))
    return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=EXACT, equal_nan=True)


def numbers(row):
    """(.2, .5, .3) -> "[.2 .5 .3]"."""
    texts = (f"{x:.4f}".rstrip("0").rstrip(".").replace("0.", ".", 1) for x in map(float, row))
    return "[" + " ".join(texts) + "]"


def kind(value):
    """What a value is, in words."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)} in {value.dtype}"
    return f"{value!r:.40} ({type(value).__name__})"


def parts(result, *names):
    """The parts of what an answer returns."""
    require(isinstance(result, (tuple, list)) and len(result) == len(names),
            f"it returns {kind(result)}; right is ({', '.join(names)})")
    return result


def is_tensor(name, value, shape, dtype):
    require(isinstance(value, torch.Tensor) and tuple(value.shape) == shape
            and value.dtype == dtype, f"{name} is {kind(value)}; right is a tensor of shape "
            f"{shape} in {dtype}" + ": torch.tensor(n, device=p.device) makes one" * (name == "n"))


def on_copies(answer, *arguments):
    """What an answer gives for copies of its arguments. Failure where it writes into one."""
    copies = [one.clone() if isinstance(one, torch.Tensor) else one for one in arguments]
    result = answer(*copies)
    for number, (copy, one) in enumerate(zip(copies, arguments), 1):
        require(copy is one or torch.equal(copy, one), f"it writes into its argument {number}")
    return result


@contextlib.contextmanager
def case(words):
    """Around a part of a check: these words stand before what fails in it."""
    try:
        yield
    except Exception as error:
        raise Failure(f"{words}: {told(error)}") from error


def told(error):
    """An exception in one line; of a crash with the line of the answer that it came from."""
    if isinstance(error, Failure):
        return str(error)
    return f"it crashes: {type(error).__name__}: {str(error).strip()}{where(error)}"


def where(error):
    lines = [frame for frame in traceback.extract_tb(error.__traceback__)
             if Path(frame.filename).name in ("ladder.py", "exercises.py")]
    return f" (line {lines[-1].lineno}: {lines[-1].line})" if lines else ""


# ---------------------------------------------------------------- an answer, graded

def is_written(answer):
    """Whether the `raise NotImplementedError` of a stub is gone. answer: a function, or a class
    with a __call__, or None where the name is not there."""
    function = inspect.unwrap(answer.__call__ if inspect.isclass(answer) else answer)
    names = getattr(getattr(function, "__code__", None), "co_names", ())
    return answer is not None and "NotImplementedError" not in names


def ready(answer):
    """The answer. ValueError, which the programs tell in one line, where it is not written."""
    if not is_written(answer):
        raise ValueError(f"{answer.__name__} is not written yet")
    return answer


def graded(name, check, answer, seconds=60):
    """None where the answer is right, and a sentence where it is not."""
    try:
        with limit(seconds, name):
            check(answer)
    except Exception as error:
        return told(error)


@contextlib.contextmanager
def limit(seconds, name):
    """Failure after so many seconds of the processor. (Not of the clock: another program may keep
    the machine busy, and a debugger waits for its user.)"""
    began, done, late = time.process_time(), threading.Event(), threading.Event()

    def watch():
        while not done.wait(0.05):
            if time.process_time() - began > seconds:
                late.set()
                return _thread.interrupt_main()  # as Ctrl-C does, on every system

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    except KeyboardInterrupt as error:
        if not late.is_set():
            raise
        raise Failure(f"{name} took more than {seconds} seconds of computing, many times what a "
                      f"right answer takes: does its loop end?{where(error)}") from None
    finally:
        done.set()
        signal.signal(signal.SIGINT, handler)


# ---------------------------------------------------------------- the exact law of an answer

def outcomes(program, most=2000):
    """every_outcome of a program that may be wrong. It fails where a right one would have ended,
    where it draws from what is no distribution, and where it draws without `choose`."""
    def program_that_ends(choose):
        draws = itertools.count(1)

        def watched(probs):
            check_probs(probs)
            require(next(draws) <= 200, "more than 200 draws in one run: does its loop end?")
            return choose(probs)

        return program(watched)

    before = random_states()
    for number, outcome in enumerate(every_outcome(program_that_ends), 1):
        require(random_states() == before, "a number was drawn from the random state of torch, "
                "numpy or Python (torch.multinomial, torch.rand, ...): draw with choose, coins too")
        require(number <= most, f"more than {most} ways that the draws can fall, and a right "
                "answer has fewer: it draws what is not needed, as drafts past the end of the text")
        yield outcome


def random_states():
    of_torch = torch.cuda.get_rng_state() if DEVICE.type == "cuda" else torch.get_rng_state()
    return of_torch.numpy().tobytes(), np.random.get_state()[2], random.getstate()


def check_probs(probs):
    require(isinstance(probs, torch.Tensor) and probs.dim() > 0 and probs.dtype == torch.float64,
            f"choose was given {kind(probs)}; it takes a tensor of probabilities (..., V) in "
            "float64, as p and q are (a coin: torch.stack([1 - a, a]))")
    for row in probs.reshape(-1, probs.shape[-1]).tolist():
        given = f"choose was given {numbers(row)}: "
        require(sum(row) == sum(row), given + "was something divided by 0?")
        require(min(row) >= 0, given + "one is below 0. Is min(1, p / q), or max(0, p - q), cut "
                "off at its bound?")
        off = abs(sum(row) - 1)
        require(off < 1e-9 or off > 1e-6, given + "a part of that was computed in float32")
        require(off < 1e-9, given + "that does not sum to 1. It must be divided by its sum, as a "
                "residual is")


def law(program, most=2000):
    """{result: probability} over every outcome."""
    total = defaultdict(float)
    for weight, result in outcomes(program, most):
        total[result] += weight
    return total


def check_law(came, right, what):
    """Failure at the result whose probability is farthest off. what: the words before it."""
    off = {result: abs(came.get(result, 0) - right.get(result, 0)) for result in came | right}
    worst = max(off, key=off.get)
    require(off[worst] < EXACT, f"{what} {worst} has the probability {came.get(worst, 0):.6f}; "
            f"right is {right.get(worst, 0):.6f}")


def check_drafts(draft, right):
    """Each draft is drawn from its row of q. draft(choose) -> (drafted, q). right(drafts so far):
    the row of the next."""
    for weight, (drafted, q) in outcomes(draft):
        drafts, drawn = drafted.tolist(), 1.0
        for i, row in enumerate(q):
            should, ids = right(drafts[:i]), torch.arange(q.shape[1], device=DEVICE)
            drawn *= should[drafts[i]].item()
            same_law(f"after the drafts {drafts[:i]} the row of q is", row, should, {
                "q has to be what the draft was drawn from, not one-hot": ids == drafts[i],
                "that is the row after the token before": right(drafts[:max(0, i - 1)])})
        require(abs(weight - drawn) < 1e-9, f"the drafts {drafts} come with probability "
                f"{weight:.4f}, and by q with {drawn:.4f}: q is not what they were drawn from"
                + ", they are the likeliest tokens" * (weight == 1))


# ---------------------------------------------------------------- drafters and models that tell

def watched(propose, text, new):
    """A drafter for `new` tokens after the text, that is to be used as the loop uses it."""
    known = []

    def watching(tokens, gamma, choose):
        left = len(text) + new - len(tokens)
        require(tokens[:len(text)] == text,
                f"the drafter of the text {text} was called for another text, {tokens}")
        require(left > 0, "a text that is complete was drafted for once more")
        require(gamma < left, f"{gamma} drafts were asked for with {left} tokens to go; right is "
                f"{left - 1}: a round adds a token of the target's own")
        require(len(tokens) not in known, f"the drafter was called again for the text {tokens}: a "
                "round adds a token of the target's own, also where the drafter gives none")
        known.append(len(tokens))
        return propose(tokens, gamma, choose)

    return watching


class Reader:
    """A model whose logits are random numbers, fixed by the whole text that it has read. `passes`
    are the passes so far: (ids that the cache held, ids that were read), without a cache those of
    each text."""

    def __init__(self, seed, vocab_size=2, context=16):
        self.config, self.device = Config(vocab_size, context=context), DEVICE
        self.seed, self.passes = seed, []

    def new_cache(self):
        return SimpleNamespace(ids=[], length=0)  # behind `length` are ids too, as in memory

    def __call__(self, ids, cache=None):
        """ids (1, T); without a cache (B, T). Logits (B, T, V)."""
        require(isinstance(ids, torch.Tensor) and ids.dim() == 2 and ids.shape[1] > 0,
                f"a model reads ids of shape (1, T), and was given {kind(ids)} (T is 0 where a "
                "cache was not rolled back)")
        require(0 <= ids.min() and ids.max() < self.config.vocab_size,
                f"a model was given {ids.tolist()}, not all of which are ids of the vocabulary")
        cache = cache or self.new_cache()
        held, end = cache.ids[:cache.length], cache.length + ids.shape[1]
        if end > self.config.context:
            raise ValueError(f"{end} tokens do not fit the context of {self.config.context}")
        cache.ids[cache.length:end], cache.length = ids[0].tolist(), end
        self.passes.append((held, *ids.tolist()))
        return torch.stack([torch.stack([self.after(held + read[:i + 1]) for i in range(len(read))])
                            for read in ids.tolist()])

    def after(self, text):
        """Logits of the token after a text, (V,)."""
        return random_row(self.config.vocab_size, zlib.crc32(repr((self.seed, text)).encode()))


def table(*rows):
    return torch.tensor(rows, dtype=torch.float64, device=DEVICE)


def random_table(*shape, seed=0):
    """Normal numbers, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE)


@functools.cache
def random_row(size, seed):
    return random_table(size, seed=seed)
