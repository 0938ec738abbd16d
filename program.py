"""What the programs share around the loop: options, the clock, the terminal, and how they end."""

import argparse
import contextlib
import json
import os
import signal
import statistics
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from pair import CHECKPOINTS, load_pair, pair_path, pick_device, pick_threads
from sampling import VERIFY, check_seed, check_settings, warp
from vocabulary import speller


# ---------------------------------------------------------------- options

@dataclass
class Settings:
    """How a text is decoded: the options of specdec.py and trace.py."""
    max_new: int = 200
    gamma: int = None  # None: the one that suits the pair
    temperature: float = 1.0
    top_k: int = None
    top_p: float = 1.0
    seed: int = 0
    drafter: str = "model"
    verify: str = "token"

    def __post_init__(self):
        """Raises ValueError for what can be seen to be wrong before any work is done."""
        if self.gamma is not None and self.gamma < 1:
            raise ValueError(f"gamma must be at least 1, not {self.gamma}")
        if self.max_new < 0:
            raise ValueError(f"max-new must be at least 0, not {self.max_new}")
        check_settings(self.temperature, self.top_k, self.top_p)

    def warp(self):
        return partial(warp, temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)


def decoding_parser(description, drafters=()):
    """A parser with the options of every program that decodes. Where there are drafters to choose
    from, it has also those of one text. (They are given: specdec.py imports this file.)"""
    parser = argparse.ArgumentParser(description=description)
    parser.set_defaults(**vars(Settings()))
    add = parser.add_argument
    if drafters:
        add("prompt", nargs="?", help="text to continue (default: held-out text)")
        add("--max-new", type=int, metavar="N", help="tokens to write (default %(default)s)")
        add("--gamma", type=int, metavar="N", help="drafts a round (default: what suits the pair)")
        add("--temperature", type=float, metavar="T", help="0 is greedy (default %(default)s)")
        add("--top-k", type=int, metavar="K", help="keep the K likeliest tokens")
        add("--top-p", type=float, metavar="P", help="keep the fewest likeliest that add up to P")
        add("--drafter", choices=drafters, help="a small model, or the text so far")
        add("--verify", choices=VERIFY, help="token by token, or the run as a block")
    add("--seed", type=int, metavar="N", help="of all draws (default %(default)s)")
    add("--checkpoint", metavar="DIR", help="a pair of train_tiny.py (default: checkpoints/tiny)")
    add("--device", help="cpu or cuda (default: cuda where there is one)")
    add("--dtype", choices=("float32", "bfloat16", "float64"), help="default: what is fast here")
    add("--threads", type=int, metavar="N", help="of the CPU (default: at most 2)")
    add("--json", metavar="FILE", help="write the figures to FILE too")
    return parser


def prepared(options):
    """(pair, settings, tokens of the prompt) of a command line, checked before any work is done."""
    settings = Settings(**{name: getattr(options, name) for name in vars(Settings())})
    pair = trained_pair(options)
    settings.gamma = settings.gamma or pair.gamma
    prompt = pair.prompts[0] if options.prompt is None else options.prompt
    return pair, settings, pair.encoding.encode_ordinary(prompt) or [pair.encoding.eot_token]


def trained_pair(options):
    """The pair asked for. Where the default one is not there yet, it is trained and kept."""
    check_seed(options.seed)
    check_options(options)
    threads, device = pick_threads(options.threads), pick_device(options.device)
    dtype = getattr(torch, options.dtype) if options.dtype else None
    default = CHECKPOINTS / "tiny"
    if not options.checkpoint and not pair_path(default).exists():
        from train_tiny import PRESETS, standard_library, train_and_keep
        print("no trained pair yet: training one, at most 5 minutes, once")
        train_and_keep(PRESETS["tiny"], standard_library(), device, default)
    torch.set_num_threads(threads)  # training takes all
    pair = load_pair(options.checkpoint or default, device, dtype)
    for note in pair.notes:
        print(f"note: {visible(note)}")
    return pair


def check_options(options):
    """Raises ValueError for an empty name: a shell variable that is not set asks for no default.
    OSError for a file of results that cannot be written; one that is not there yet is made."""
    for option, value in vars(options).items():
        if option != "prompt" and (value == "" or isinstance(value, list) and "" in value):
            raise ValueError(f"--{option} is empty: give a name, or leave it out")
        if option in ("json", "html", "svg") and value:
            open(value, "ab").close()  # what is there stays


def write_json(path, figures):
    """Figures, and the plain values of rounds among them, into a file where one is asked for."""
    def plain_values(one):
        return {"drafts": one.drafts, "accepted": one.accepted, "new": one.new,
                "writers": one.writers, "cache": [one.cache_before, one.cache_fed, one.cache_kept]}

    if path:
        text = json.dumps(figures, indent=1, default=plain_values)
        Path(path).write_text(text, encoding="utf-8")


# ---------------------------------------------------------------- the clock

def stopwatch(device):
    """A clock: now() is the time in seconds, once the device has done all that it was given."""
    def now():
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    return now


def race(ways, now, repeats=3):
    """Run each way of decoding `repeats` times, in turn: a machine is faster at some times than at
    others. ways: functions; what one returns is gone through to its end. Returns what each way gave
    last, and for each way a list of its seconds in each repeat."""
    given, seconds = [[] for _ in ways], [[] for _ in ways]
    for _ in range(repeats):
        for i, way in enumerate(ways):
            began = now()
            given[i] = list(way())
            seconds[i].append(now() - began)
    return given, seconds


def rates(new_tokens, plain_seconds, seconds):
    """Tokens a second and speedups, from the seconds of each repeat for as many tokens."""
    speedups = [theirs / mine for theirs, mine in zip(plain_seconds, seconds)]
    return {"plain_tokens_per_s": new_tokens / statistics.median(plain_seconds),
            "speculative_tokens_per_s": new_tokens / statistics.median(seconds),
            "speedup": statistics.median(speedups), "speedup_min": min(speedups),
            "speedup_max": max(speedups), "runs": len(speedups)}


def tally(rounds):
    """Sums over rounds. Only tokens that joined the text count; the last round may be shorter.
    "alpha" is accepted/tested: an estimate of alpha with the token rule alone."""
    new_tokens, accepted = sum(len(r.new) for r in rounds), sum(r.accepted for r in rounds)
    tested = sum(r.tested for r in rounds)
    return {"new_tokens": new_tokens, "passes": len(rounds),
            "drafted": sum(len(r.drafts) for r in rounds), "tested": tested, "accepted": accepted,
            "tokens_per_pass": new_tokens / max(1, len(rounds)), "alpha": accepted / max(1, tested)}


def progress(label, limit, losses):
    """Yields before each step of a stage how far it is, from 0 to 1, until its steps or its time
    are used up. It takes a step at least. losses: the caller adds one a step; a mean is shown."""
    began = printed = time.perf_counter()
    done = 0
    while done < 1:
        yield done
        now, taken = time.perf_counter(), len(losses)
        elapsed = now - began
        done = min(1, max(taken / limit.steps, elapsed / (60 * limit.minutes)))
        if done == 1 or now > printed + 10:
            printed = now
            print(f"{label:<11} step {taken}/{limit.steps}, "
                  f"loss {statistics.mean(losses[-20:]):.3f}, "
                  f"{elapsed / done - elapsed:.0f} s left", flush=True)


# ---------------------------------------------------------------- how a program ends

@contextlib.contextmanager
def edges():
    """Around the work of a program: whatever ends it early becomes one line and an exit code.

    Bad input and what the system refuses: ValueError or OSError, code 2. Ctrl-C: 130. A reader that
    has gone (`| head`): 141, and nothing is said. `python -X dev` shows the traceback of an error.
    """
    sys.stdout = sys.stdout or open(os.devnull, "w")  # None: closed by the caller
    if hasattr(sys.stdout, "reconfigure"):  # a notebook's output has none
        sys.stdout.reconfigure(errors="replace")  # a pipe may not be able to say every character
    before = signal.signal(signal.SIGINT, interrupt_once)
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        leave(141)
    except (ValueError, OSError) as error:
        if sys.flags.dev_mode:
            raise
        with contextlib.suppress(OSError):  # there may be nobody to read it
            print(f"{Path(sys.argv[0]).name}: {visible(str(error))}", file=sys.stderr)
        leave(2)
    except KeyboardInterrupt:
        leave(130, "\ninterrupted\n")
    finally:
        if signal.getsignal(signal.SIGINT) is interrupt_once or hasattr(sys, "ps1"):
            signal.signal(signal.SIGINT, before)  # a notebook and a Python prompt go on


def leave(code, line=""):
    """Exit, with a last line on the output if anybody reads it."""
    try:
        print(line, end="", flush=True)
    except OSError:  # Python flushes once more at its end: to nowhere, or it would complain then
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def interrupt_once(number, frame):
    """The answer to Ctrl-C. A second one would meet the program while it ends: it is ignored."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


# ---------------------------------------------------------------- text

def visible(text, lines=False):
    """Text in which no character commands a terminal, for a model can write any byte: those that do
    not print become escapes. Line breaks stay if there may be more lines, else they are signs."""
    keep = "\n\t\u200c\u200d" if lines else ""  # the last two join emoji, and Indic letters
    if not lines:
        text = text.replace("\n", "⏎")
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode()
                   for c in text)


COLOURS = {"draft": "32", "correction": "31", "bonus": "34"}  # green, red, blue: who wrote a token


def coloured(text, writer):
    """Text in its writer's colour on a terminal that has colours, and as it is elsewhere."""
    dumb = os.environ.get("TERM") == "dumb" or os.environ.get("NO_COLOR")
    if dumb or not sys.stdout.isatty() or writer not in COLOURS:
        return text
    return f"\x1b[{COLOURS[writer]}m{text}\x1b[0m"


def stream(tokens, rounds, encoding):
    """Print the prompt, then each round as it comes, each token in the colour of its writer."""
    spell, done = speller(encoding), []
    print(visible("".join(map(spell, tokens)), lines=True), end="", flush=True)
    for one in rounds:
        for token, writer in zip(one.new, one.writers):
            print(coloured(visible(spell(token), lines=True), writer), end="", flush=True)
        done.append(one)
    print(spell(encoding.eot_token, final=True))
    return done
