"""What all programs begin and end with: options, the pair, a clear line for an error, a file."""

import argparse
import contextlib
import json
import os
import runpy
import sys
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

import torch

from pair import CHECKPOINTS, load_pair, pick_device
from sampling import check_settings, warp
from specdec import check_room
from train_tiny import Recipe, read_documents, standard_library, train_pair
from variants import DRAFTERS, RULES


@dataclass
class Settings:
    """How a text is decoded."""
    max_new: int = 200
    gamma: int = 4
    temperature: float = 1.0
    top_k: int = None
    top_p: float = 1.0
    seed: int = 0
    drafter: str = "model"
    verify: str = "token"

    def __post_init__(self):
        if self.gamma < 1:
            raise ValueError(f"gamma must be at least 1, not {self.gamma}")
        if self.max_new < 1:
            raise ValueError(f"max-new must be at least 1, not {self.max_new}")
        check_settings(self.temperature, self.top_k, self.top_p)

    def warp(self):
        return partial(warp, temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)


def parser_of(description, arguments, prompt=True):
    """A parser with the options of every program that decodes; with a prompt where there is one
    text to write. A file named by --use is run before the rest is parsed: it may add choices."""
    use = argparse.ArgumentParser(add_help=False)
    use.add_argument("--use", metavar="FILE", help="a file of yours that adds a rule or a drafter")
    parser = argparse.ArgumentParser(description=description, parents=[use])
    with clear_errors(parser):
        if file := use.parse_known_args(arguments)[0].use:
            runpy.run_path(file)
    parser.set_defaults(prompt=None, html=None, checkpoint=CHECKPOINTS / "tiny", **vars(Settings()))
    add = parser.add_argument
    if prompt:
        add("prompt", nargs="?", help="text to continue (default: held-out text)")
        add("--max-new", type=int, metavar="N", help="tokens to write (default %(default)s)")
    add("--gamma", type=int, metavar="N", help="drafts a round (default 4; of the bench, nine)")
    add("--temperature", type=float, metavar="T", help="0 is greedy (default 1)")
    add("--top-k", type=int, metavar="K", help="keep the K likeliest tokens")
    add("--top-p", type=float, metavar="P", help="keep the fewest likeliest that add up to P")
    add("--drafter", choices=DRAFTERS, help="a small model, or the text so far")
    add("--verify", choices=RULES, help="token by token, or the run as a block")
    add("--seed", type=int, metavar="N", help="of all draws (default %(default)s)")
    add("--checkpoint", metavar="DIR", help="a pair of train_tiny.py (default: checkpoints/tiny)")
    add("--device", help="cpu or cuda (default: cuda where there is one)")
    add("--dtype", choices=("float32", "bfloat16", "float64"), help="default: what is fast here")
    # Threads wait for one another: where another program keeps a core busy, two are much slower.
    add("--threads", type=int, metavar="N", default=os.environ.get("OMP_NUM_THREADS") or 1,
        help="of the CPU (default: OMP_NUM_THREADS, or 1)")
    add("--json", metavar="FILE", help="write the figures to FILE too")
    return parser


def prepared(options):
    """(pair, settings, tokens of the prompt) of a command line. Where the default pair is not there
    yet, it is trained and kept."""
    settings = Settings(**{field.name: getattr(options, field.name) for field in fields(Settings)})
    device, default = pick_device(options.device), CHECKPOINTS / "tiny"
    if options.threads < 1:
        raise ValueError(f"threads must be at least 1, not {options.threads}")
    for file in filter(None, (options.json, options.html)):
        open(file, "ab").close()  # an error now, and not after the work
    if options.checkpoint == default and not (default / "pair.pt").exists():
        print("no trained pair yet: training one, at most 5 minutes, once")
        train_pair(Recipe(), read_documents(standard_library()), device, default)
    torch.set_num_threads(options.threads)  # after the training, which takes all cores
    pair = load_pair(options.checkpoint, device, options.dtype and getattr(torch, options.dtype))
    prompt = pair.prompts[0] if options.prompt is None else options.prompt
    tokens = pair.encoding.encode_ordinary(prompt) or [pair.encoding.eot_token]
    check_room(pair.target, tokens, settings.max_new)
    return pair, settings, tokens


def about(pair):
    """In words: the shapes and held-out losses of the models, and how they run."""
    device, threads = pair.target.device, torch.get_num_threads()
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    models = []
    for name, model in (("target", pair.target), ("draft", pair.draft)):
        shape, dtype = model.config, str(model.embed.weight.dtype).removeprefix("torch.")
        models.append(f"{name} {shape.n_layer}x{shape.n_embd}, {pair.bits_per_byte[name]:.2f}")
        machine += f", {name} in {dtype}"
    return {"pair": "; ".join(models) + " bits/byte",
            "machine": f"{machine}, {threads} thread{'s' * (threads > 1)}"}


@contextlib.contextmanager
def clear_errors(parser):
    """Around the work of a program. Bad input and what the system refuses, ValueError or OSError,
    become one line and exit code 2. (`python -X dev` shows the traceback.)"""
    if hasattr(sys.stdout, "reconfigure"):  # a notebook's output has none
        sys.stdout.reconfigure(errors="replace")  # a pipe may not be able to say every character
    try:
        yield
    except (ValueError, OSError) as error:
        if sys.flags.dev_mode:
            raise
        parser.exit(2, f"{parser.prog}: {printable(str(error))}\n")
    except KeyboardInterrupt:
        parser.exit(130, "\ninterrupted\n")


def write_json(path, figures):
    """Figures, and the plain values of rounds among them, into a file where one is asked for."""
    def plain_values(round_):
        return {name: getattr(round_, name) for name in "drafts accepted new writers cache".split()}

    if path is not None:
        text = json.dumps(figures, indent=1, default=plain_values)
        Path(path).write_text(text, encoding="utf-8")


def printable(text):
    """Text in which no character commands a terminal, for a model can write any byte: those that do
    not print become escapes."""
    keep = "\n\t\u200c\u200d"  # the last two join emoji, and Indic letters
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode()
                   for c in text)


def train(arguments):
    """The command line of train_tiny.py."""
    parser = argparse.ArgumentParser(description="Train a target and a draft model for specdec.py.")
    parser.set_defaults(**vars(Recipe()))
    add = parser.add_argument
    add("--data", nargs="+", metavar="FILE", help="UTF-8 text (default: Python's standard library)")
    add("--target", metavar="LxC", help="layers x width (default %(default)s)")
    add("--draft", metavar="LxC", help="layers x width (default %(default)s)")
    add("--minutes", type=float, metavar="M", help="of training in all (default %(default)s)")
    add("--out", default=CHECKPOINTS / "tiny", metavar="DIR", help="default: checkpoints/tiny")
    add("--device", help="cpu or cuda (default: cuda where there is one)")
    add("--seed", type=int, default=0, metavar="N")
    options = parser.parse_args(arguments)
    with clear_errors(parser):
        recipe = Recipe(**{field.name: getattr(options, field.name) for field in fields(Recipe)})
        if not 0 < recipe.minutes < 1e9:
            raise ValueError(f"minutes must be a number above 0, not {recipe.minutes}")
        documents = read_documents(options.data or standard_library())
        train_pair(recipe, documents, pick_device(options.device), options.out, options.seed)
