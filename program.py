"""What the programs share around the loop: options, the clock, the terminal, and how they end."""

import argparse
import contextlib
import functools
import json
import os
import shutil
import signal
import statistics
import sys
import time
from dataclasses import dataclass
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

    def check(self):
        """Raises ValueError for what can be seen to be wrong before any work is done."""
        if self.gamma is not None and self.gamma < 1:
            raise ValueError(f"gamma must be at least 1, not {self.gamma}")
        if self.max_new < 0:
            raise ValueError(f"max-new must be at least 0, not {self.max_new}")
        check_seed(self.seed)
        check_settings(self.temperature, self.top_k, self.top_p)

    def warp(self):
        return functools.partial(warp, temperature=self.temperature, top_k=self.top_k,
                                 top_p=self.top_p)


def decoding_parser(description, drafters):
    """A parser with the options of Settings and of the pair."""
    parser, default = argparse.ArgumentParser(description=description), Settings()
    parser.add_argument("prompt", nargs="?", help="text to continue (default: held-out text)")
    parser.add_argument("--max-new", type=int, default=default.max_new, metavar="N",
                        help="tokens to write (default %(default)s)")
    parser.add_argument("--gamma", type=int, metavar="N",
                        help="tokens drafted in a round (default: what suits the pair)")
    parser.add_argument("--temperature", type=float, default=default.temperature, metavar="T",
                        help="0 is greedy (default %(default)s)")
    parser.add_argument("--top-k", type=int, metavar="K", help="keep the K likeliest tokens")
    parser.add_argument("--top-p", type=float, default=default.top_p, metavar="P",
                        help="keep the fewest likeliest tokens that add up to P")
    parser.add_argument("--drafter", choices=drafters, default=default.drafter,
                        help="a small model, or the text so far")
    parser.add_argument("--verify", choices=VERIFY, default=default.verify,
                        help="token by token, or the run as a block")
    add_pair_options(parser)
    return parser


def add_pair_options(parser):
    """The options of every program that decodes."""
    parser.add_argument("--seed", type=int, default=Settings.seed)
    parser.add_argument("--checkpoint", metavar="DIR",
                        help="a pair of train_tiny.py (default: checkpoints/tiny)")
    parser.add_argument("--device", help="cpu or cuda (default: cuda where there is one)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float64"),
                        help="of both models (default: what the processor is made for)")
    parser.add_argument("--threads", type=int, metavar="N", help="of the CPU (default: at most 2)")
    parser.add_argument("--json", metavar="FILE", help="write the figures to FILE too")


def prepared(options):
    """(pair, settings) of a command line, after all that can be checked before the work is."""
    settings = Settings(**{name: getattr(options, name) for name in vars(Settings())})
    settings.check()
    pair = trained_pair(options)
    settings.gamma = settings.gamma or pair.gamma
    return pair, settings


def trained_pair(options):
    """The pair asked for. Where the default one is not there yet, it is trained and kept."""
    check_names(options)
    if options.json:
        check_writable(options.json)
    threads, device = pick_threads(options.threads), pick_device(options.device)
    dtype = getattr(torch, options.dtype) if options.dtype else None
    if not options.checkpoint and not pair_path(CHECKPOINTS / "tiny").exists():
        import train_tiny
        print("no trained pair yet: training one, at most 5 minutes, once")
        train_tiny.train_and_keep(train_tiny.PRESETS["tiny"], train_tiny.standard_library(), device,
                                  CHECKPOINTS / "tiny")
    torch.set_num_threads(threads)  # training takes all
    pair = load_pair(options.checkpoint or CHECKPOINTS / "tiny", device, dtype)
    for note in pair.notes:
        print(f"note: {visible(note)}")
    return pair


def prompt_of(pair, options):
    """The prompt asked for, and its tokens."""
    prompt = pair.prompts[0] if options.prompt is None else options.prompt
    return prompt, pair.encoding.encode_ordinary(prompt) or [pair.encoding.eot_token]


def check_names(options):
    """Raises ValueError for an empty name: a shell variable that is not set asks for no default."""
    for option, value in vars(options).items():
        if option != "prompt" and (value == "" or isinstance(value, list) and "" in value):
            raise ValueError(f"--{option.replace('_', '-')} is empty: give a name, or leave it out")


def check_writable(path):
    """Raises OSError where a file could not be written. What is there is left as it is."""
    file = Path(path).resolve()  # a link may point to a file that is not there yet
    new = not file.exists()
    try:
        file.open("a").close()
    except OSError as error:
        raise OSError(f"cannot write {path}: {error.strerror}") from None
    if new:
        file.unlink()


def as_values(rounds):
    """Rounds as plain values, for a JSON file."""
    return [{"drafts": one.drafts, "accepted": one.accepted, "new": one.new,
             "writers": one.writers, "cache": [one.cache_before, one.cache_fed, one.cache_kept]}
            for one in rounds]


def write_json(path, figures):
    Path(path).write_text(json.dumps(figures, indent=1), encoding="utf-8")


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
    others, so what is compared runs side by side. ways: functions that start a generator.

    Returns what each way gave, and for each way a list of its seconds in each repeat.
    """
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
            "speedup": statistics.median(speedups),
            "speedup_min": min(speedups), "speedup_max": max(speedups)}


def tally(rounds):
    """Sums over rounds. Committed tokens count, and a clipped round counts as it was."""
    new_tokens, accepted = sum(len(r.new) for r in rounds), sum(r.accepted for r in rounds)
    tested = sum(r.tested for r in rounds)
    return {"new_tokens": new_tokens, "passes": len(rounds),
            "drafted": sum(len(r.drafts) for r in rounds), "tested": tested, "accepted": accepted,
            "tokens_per_pass": new_tokens / len(rounds), "alpha": accepted / max(1, tested)}


class Progress:
    """Counts the steps of a stage, ends it, and prints a line now and then."""

    def __init__(self, label, limit):
        self.label, self.limit, self.taken, self.tokens, self.loss = label, limit, 0, 0, None
        self.began = self.printed = time.perf_counter()

    def steps(self):
        """Yields, before each step, the part of the way behind us: of the steps or of the time,
        whichever is further."""
        while (done := self.done()) < 1:
            yield done
            self.taken += 1
            if time.perf_counter() > self.printed + 10 or self.done() >= 1:
                self.print_line()

    def done(self):
        elapsed = time.perf_counter() - self.began
        if self.taken == 0:
            return 0  # every stage takes a step, however little time it has
        return max(self.taken / self.limit.steps, elapsed / (60 * self.limit.minutes))

    def add(self, tokens, loss):
        self.tokens += tokens
        self.loss = loss if self.loss is None else 0.95 * self.loss + 0.05 * loss  # a smooth one

    def print_line(self):
        self.printed, done = time.perf_counter(), min(1, self.done())
        elapsed = self.printed - self.began
        print(f"{self.label:<11} step {self.taken}/{self.limit.steps}, loss {self.loss:.3f}, "
              f"{self.tokens / elapsed:,.0f} tokens/s, {elapsed / done - elapsed:.0f} s left",
              flush=True)


# ---------------------------------------------------------------- how a program ends

BAD_INPUT, INTERRUPTED, READER_GONE = 2, 130, 141  # exit codes; the last two are a shell's own


@contextlib.contextmanager
def edges():
    """Around the work of a program: whatever ends it early becomes one line and an exit code.

    Bad input and what the system refuses: ValueError or OSError, code 2. Ctrl-C: 130. A reader that
    has gone (`| head`): 141, and nothing is said. `python -X dev` shows the traceback of an error.
    """
    if sys.stdout is None:  # closed by the caller: there is nobody to write to
        sys.stdout = open(os.devnull, "w")
    if hasattr(sys.stdout, "reconfigure"):  # a notebook's output has none
        sys.stdout.reconfigure(errors="replace")  # a pipe may not be able to say every character
    before = signal.getsignal(signal.SIGINT)
    try:
        signal.signal(signal.SIGINT, interrupt_once)
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        leave(READER_GONE, "", sys.stdout)
    except (ValueError, OSError) as error:
        if sys.flags.dev_mode:
            raise
        leave(BAD_INPUT, f"{Path(sys.argv[0]).name}: {visible(str(error))}", sys.stderr)
    except KeyboardInterrupt as interrupt:
        leave(INTERRUPTED, "\n" + visible(str(interrupt) or "interrupted"), sys.stdout)
    finally:
        if signal.getsignal(signal.SIGINT) is interrupt_once:
            signal.signal(signal.SIGINT, before)  # a notebook goes on


def leave(code, line, stream):
    """Say one more line, and exit."""
    try:
        print(line, file=stream, flush=True)
        sys.stdout.flush()
    except OSError:
        # Python flushes once more at its end: to nowhere, or it would complain then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def interrupt_once(number, frame):
    """The answer to Ctrl-C. A second one would meet the program while it ends: it is ignored."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


# ---------------------------------------------------------------- text

def visible(text, keep=""):
    """Text in which no character commands a terminal: those that do not print become escapes.

    A model can write any byte. A line break becomes a sign, unless it is in `keep`.
    """
    def shown(c):
        if c.isprintable() or c in keep:
            return c
        return "⏎" if c == "\n" else c.encode("unicode_escape").decode()

    return "".join(map(shown, text))


def visible_text(text):
    """The same for a text of many lines. The joiners inside of emoji and of Indic words stay."""
    return visible(text, keep="\n\t\u200c\u200d")


COLOURS = {"draft": "32", "correction": "31", "bonus": "34"}  # green, red, blue: who wrote a token


def coloured(text, writer):
    """Text in its writer's colour on a terminal that has colours, and as it is elsewhere."""
    if writer not in COLOURS or not is_terminal() or os.environ.get("NO_COLOR"):
        return text
    return f"\x1b[{COLOURS[writer]}m{text}\x1b[0m"


def stream(prompt, rounds, encoding):
    """Print the prompt, then each round as it comes, each token in the colour of its writer."""
    print(visible_text(prompt), end="", flush=True)
    spell, done = speller(encoding), []
    for one in rounds:
        for token, writer in zip(one.new, one.writers):
            print(coloured(visible_text(spell(token)), writer), end="")
        print(end="", flush=True)
        done.append(one)
    print(spell(encoding.eot_token, final=True))
    return done


def is_terminal():
    """Is the output a terminal that takes commands, such as those for colours?"""
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def columns():
    """The width of the terminal in characters; 80 where the output is none."""
    return shutil.get_terminal_size().columns
