"""The micro pair, trained in a second, and what a command line gives."""

import contextlib
import functools
import io
import textwrap
from dataclasses import dataclass
from pathlib import Path

import torch

from train_tiny import Recipe, train_pair

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SOURCE = Path(textwrap.__file__).read_text(encoding="utf-8")  # a module of the standard library


@dataclass
class Micro(Recipe):
    """The recipe made so small that it trains in a second. It ends after its steps, whatever time
    they take, so that it can be repeated."""
    target: str = "2x32"
    draft: str = "1x32"
    minutes: float = 1e6
    vocab_size: int = 300
    batch: int = 4
    window: int = 16
    steps: float = 40


MICRO = Micro()


def quiet_pair(recipe, documents, seed=0):
    """Trained on the CPU, where sums have one order."""
    with contextlib.redirect_stdout(io.StringIO()):
        return train_pair(recipe, documents, torch.device("cpu"), seed=seed)


@functools.cache
def micro_pair():
    """The trained pair that tests share. Not to be written to."""
    return quiet_pair(MICRO, [SOURCE])


# ---------------------------------------------------------------- a command line

def ended(program, arguments, capsys):
    """(exit code, stdout, stderr) of a program, called with these arguments."""
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


class Clock:
    """Time that passes only where something is made to take it."""
    seconds = 0.0

    def __call__(self):
        return self.seconds

    def add(self, seconds):
        self.seconds += seconds
