"""Train a target and a draft: corpus, vocabulary, target, draft, distillation.

    python train_tiny.py                            the default pair, at most 5 minutes on two cores
    python train_tiny.py --preset base              a larger pair, about 15 minutes
    python train_tiny.py --data shakespeare.txt     the same on a text of your own

The default corpus is on every machine already: the source of Python's standard library.
"""

import argparse
import functools
import math
import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F

from model import GPT, Config
from pair import CHECKPOINTS, Pair, fast_dtype, pair_path, pick_device, save_pair
from program import Progress, check_names, check_writable, edges, visible
from sampling import check_seed
from vocabulary import bytes_per_token, encode, train_tokenizer


@dataclass
class Limit:
    """How long a stage of training goes on: until one of the two is used up."""
    steps: int
    minutes: float


@dataclass
class Preset:
    vocab_size: int
    target: dict  # shapes, as in model.Config
    draft: dict
    train_target: Limit
    train_draft: Limit
    ask_target: Limit  # for the soft labels of distillation
    distill_draft: Limit
    gamma: int  # the default of specdec.py: close to the best of bench.py at temperature 1
    batch: int = 16  # windows a step
    window: int = 128  # tokens a window; attention by distance carries over to longer texts

    def scaled(self, minutes):
        """The same preset with its limits made shorter or longer: `minutes` in all."""
        names = ("train_target", "train_draft", "ask_target", "distill_draft")
        limits = {name: getattr(self, name) for name in names}
        part = minutes / sum(limit.minutes for limit in limits.values())
        return replace(self, **{name: Limit(math.ceil(limit.steps * part), limit.minutes * part)
                                for name, limit in limits.items()})


PRESETS = {
    "tiny": Preset(512, dict(n_layer=4, n_embd=256), dict(n_layer=1, n_embd=128),
                   Limit(800, 2.5), Limit(400, 0.2), Limit(560, 0.5), Limit(2200, 1.45), gamma=3),
    "base": Preset(512, dict(n_layer=6, n_head=8, n_embd=640), dict(n_layer=1, n_embd=256),
                   Limit(320, 8.5), Limit(300, 0.4), Limit(300, 2.6), Limit(1800, 5.5), gamma=6,
                   batch=32),
}


# ---------------------------------------------------------------- corpus

def standard_library():
    """The top-level modules beside os.py, sorted by name: about 4.7 MB of Python."""
    return sorted(Path(os.__file__).parent.glob("*.py"))


def read_documents(paths):
    """Each file as one document. ValueError for a file that is missing, empty or not UTF-8."""
    documents = []
    for path in paths:
        try:
            documents.append(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"cannot read {path}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ValueError(f"{path} is not UTF-8 text") from None
        if not documents[-1]:
            raise ValueError(f"{path} is empty: give a file with text in it")
    return documents


def split_documents(documents):
    """(training part, held-out part): the last tenth of the characters is never trained on."""
    left = sum(map(len, documents)) * 9 // 10
    train, held_out = [], []
    for text in documents:
        train.append(text[:left])
        held_out.append(text[left:])
        left = max(0, left - len(text))
    return [t for t in train if t], [t for t in held_out if t]


# ---------------------------------------------------------------- data

def count_windows(data, window, name="text"):
    """How many windows of `window` tokens, each with a next token, the data holds: at least one."""
    if len(data) <= window:
        raise ValueError(f"the {name} is too short: {len(data)} tokens, and {window + 1} are the "
                         "least; give more text")
    return len(data) - window


def draw_windows(data, batch, window, generator):
    """(batch, window + 1) token ids, cut from the data at random places."""
    starts = torch.randint(count_windows(data, window), (batch, 1), generator=generator)
    return data[starts + torch.arange(window + 1)]


# ---------------------------------------------------------------- training

def cross_entropy(model, windows):
    """Mean negative log-likelihood of the next token, in nats."""
    logits = model(windows[:, :-1]).float()  # (B, T, V)
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def total_variation(draft, windows, p):
    """Mean over contexts of 1 - Σ min(p, q): one minus the acceptance rate (Leviathan et al. 2023,
    Corollary 3.6). p (B, T, V): the target's distribution after each token of the windows."""
    q = draft(windows[:, :-1]).float().softmax(-1)  # (B, T, V)
    return 1 - torch.minimum(p.float(), q).sum(-1).mean()


def fit(label, model, draw, loss_of, limit, seed):
    """Minimise loss_of(model, *draw(generator)). Returns the number of steps done.

    Muon for the matrices inside the blocks, AdamW for the two embeddings. After a short warm-up the
    learning rate stays at its peak for a third of the way, then falls to 0 on a straight line.
    """
    device = model.embed.device
    generator = torch.Generator().manual_seed(seed)
    matrices = [weight for block in model.blocks for weight in block.parameters()]
    muon = torch.optim.Muon(matrices, lr=0.02, weight_decay=0.01)
    embeddings = [model.embed, model.unembed]
    adam = torch.optim.AdamW(embeddings, lr=0.01, betas=(0.9, 0.95), weight_decay=0)
    peaks = [(group, group["lr"]) for group in (*muon.param_groups, *adam.param_groups)]
    progress = Progress(label, limit)
    for done in progress.steps():
        for group, peak in peaks:
            group["lr"] = peak * min(1, done / 0.02 + 0.1, (1 - done) / 0.67)
        batch = [part.to(device) for part in draw(generator)]
        with reduced_precision(device):
            loss = loss_of(model, *batch)
        loss.backward()
        for optimizer in (muon, adam):
            optimizer.step()
            optimizer.zero_grad()
        progress.add(batch[0][:, 1:].numel(), loss.item())
    return progress.taken


@torch.no_grad()
def soft_labels(target, draw, limit, seed):
    """Windows of text with the target's p after each of their tokens, for the draft to imitate.

    Returns a list of batches: (B, window + 1) ids and (B, window, V) probabilities in float16. To
    ask the target is most of the work: it is done once, and the draft reads the answers many times.
    """
    generator = torch.Generator().manual_seed(seed)
    progress, batches = Progress("soft labels", limit), []
    for _ in progress.steps():
        (windows,) = draw(generator)
        with reduced_precision(target.device):
            p = target(windows[:, :-1].to(target.device)).float().softmax(-1)  # (B, T, V)
        batches.append((windows, p.half().cpu()))
        progress.add(windows[:, 1:].numel(), torch.special.entr(p).sum(-1).mean().item())
    return batches


def reduced_precision(device):
    """Matrix products in bfloat16 where the hardware does them; the weights stay float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=fast_dtype(device) == torch.bfloat16)


@torch.no_grad()
def bits_per_byte(model, data, sizes, window, most=256):
    """Loss in bits per byte of text, comparable between vocabularies: the mean over at most `most`
    windows, evenly spread over the data. sizes: see bytes_per_token."""
    count, nats, length = count_windows(data, window), 0, 0
    for start in range(0, count, math.ceil(count / most)):
        tokens = data[start:start + window + 1]
        with reduced_precision(model.device):
            nats += window * cross_entropy(model, tokens[None].to(model.device)).item()
        length += sizes[tokens[1:]].sum().item()
    return nats / math.log(2) / length


# ---------------------------------------------------------------- the pair

def train_pair(preset, documents, device, seed=0):
    """Corpus in, pair out."""
    train_part, held_out_part = split_documents(documents)
    encoding = train_tokenizer(train_part, preset.vocab_size)
    data, held_out = encode(train_part, encoding), encode(held_out_part, encoding)
    print(f"corpus: {len(documents)} documents, {len(data):,} tokens to train on, "
          f"{len(held_out):,} held out; vocabulary: {encoding.n_vocab} tokens", flush=True)
    if encoding.n_vocab < preset.vocab_size:
        print(f"no more pairs of tokens repeat: the vocabulary stops at {encoding.n_vocab} "
              f"of {preset.vocab_size}")
    count_windows(data, preset.window)
    count_windows(held_out, preset.window, "held-out tenth of the text")

    def model(shape):
        config = Config(encoding.n_vocab, tokenizer=encoding.name, **shape)
        return GPT(config, seed).to(device)

    def windows_of_text(generator):
        return (draw_windows(data, preset.batch, preset.window, generator),)

    def labelled_windows(generator):
        return labels[torch.randint(len(labels), (), generator=generator)]

    held_out_bits = functools.partial(bits_per_byte, data=held_out, window=preset.window,
                                      sizes=bytes_per_token(encoding))
    target, draft, bits = model(preset.target), model(preset.draft), {}
    # Each stage draws windows of its own: the labels are not only on what the target has just read.
    taken = fit("target", target, windows_of_text, cross_entropy, preset.train_target, seed)
    bits["target"] = held_out_bits(target)
    fit("draft", draft, windows_of_text, cross_entropy, preset.train_draft, seed + 1)
    bits["draft before distillation"] = held_out_bits(draft)
    labels = soft_labels(target, windows_of_text, preset.ask_target, seed + 2)
    fit("distilling", draft, labelled_windows, total_variation, preset.distill_draft, seed + 3)
    bits["draft"] = held_out_bits(draft)
    print("held-out bits per byte: "
          + ", ".join(f"{name} {value:.3f}" for name, value in bits.items()))
    prompts, notes = excerpts("".join(held_out_part)), notes_on(preset, taken)
    return Pair(target, draft, encoding, bits, prompts, data, preset.gamma, notes)


def notes_on(preset, taken):
    """What to say of a pair whose target was trained clearly less than was meant."""
    if taken >= 0.9 * preset.train_target.steps:
        return []
    return [f"a time limit ended the training of the target after {taken} of "
            f"{preset.train_target.steps} steps; a target that knows less is easier to imitate, "
            "so the speedup is larger than it should be"]


def excerpts(text, count=8, length=200):
    """`count` pieces of a text to continue, evenly spread, from a line break where there is one."""
    starts = [len(text) * i // count for i in range(count)]
    starts = [text.find("\n", start, start + length) + 1 or start for start in starts]
    return [text[start:start + length] for start in starts if start < len(text)] or [text]


def train_and_keep(preset, paths, device, directory, seed=0):
    """Train a pair and save it. What can be known to fail is refused before the training."""
    check_seed(seed)
    documents, path = read_documents(paths), pair_path(directory)
    path.parent.mkdir(parents=True, exist_ok=True)
    check_writable(path)
    check_room_for(preset, path)
    try:
        keep(train_pair(preset, documents, device, seed), directory)
    except KeyboardInterrupt:
        earlier = "the earlier pair there is whole" if path.exists() else "there is no pair yet"
        raise KeyboardInterrupt(f"interrupted: nothing was written to {directory}; "
                                f"{earlier}") from None


def keep(pair, directory):
    """Save a pair, in a temporary directory where its own cannot take it any more."""
    try:
        path = save_pair(pair, directory)
    except OSError as error:
        rescued = save_pair(pair, tempfile.mkdtemp())
        raise OSError(f"{error}; the pair is kept in {rescued.parent} instead") from error
    print(f"kept in {visible(str(path))}")


def check_room_for(preset, path):
    """Raises OSError where a file as large as all weights cannot be written beside the pair's."""
    weights = sum(w.numel() for shape in (preset.target, preset.draft)
                  for w in GPT(Config(preset.vocab_size, **shape)).parameters())
    trial = path.with_suffix(".part")
    try:
        trial.write_bytes(bytes(4 * weights))
    except OSError as error:
        raise OSError(f"cannot write {path}: {error.strerror}") from None
    finally:
        trial.unlink(missing_ok=True)


# ---------------------------------------------------------------- command line

def main(arguments=None):
    parser = argparse.ArgumentParser(description="Train a target and a draft model for specdec.py.")
    parser.add_argument("--data", nargs="+", metavar="FILE",
                        help="UTF-8 text (default: Python's standard library)")
    parser.add_argument("--preset", choices=PRESETS, default="tiny")
    parser.add_argument("--minutes", type=float, metavar="M",
                        help="train for M minutes at most, in place of the preset's own time")
    parser.add_argument("--out", metavar="DIR",
                        help="where the pair is kept (default: checkpoints/PRESET)")
    parser.add_argument("--device", help="cpu or cuda (default: cuda where there is one)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    with edges():
        check_names(options)
        preset = PRESETS[options.preset]
        if options.minutes is not None:
            if not 0 < options.minutes < math.inf:
                raise ValueError(f"minutes must be more than 0, not {options.minutes}")
            preset = preset.scaled(options.minutes)
        train_and_keep(preset, options.data or standard_library(), pick_device(options.device),
                       options.out or CHECKPOINTS / options.preset, options.seed)


if __name__ == "__main__":
    main()
