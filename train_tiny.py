"""Train a target and a draft: corpus, tokenizer, target, draft, distillation, checkpoint.

    python train_tiny.py                            the default pair, at most 5 minutes on two CPU cores
    python train_tiny.py --preset base              a larger pair, half an hour of CPU or a GPU
    python train_tiny.py --data shakespeare.txt     the same on a text of your own

The default corpus is on every machine already: the source of Python's standard library.
"""

import argparse
import functools
import hashlib
import math
import os
import re
import sys
import time
import timeit
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path

import tiktoken
import torch
import torch.nn.functional as F

from model import Config, GPT

END_OF_TEXT = "<|endoftext|>"
CHECKPOINTS = Path(__file__).resolve().parent / "checkpoints"


@dataclass
class Preset:
    vocab_size: int
    target: dict  # shapes, as in model.Config
    draft: dict
    steps: tuple  # of training the target, training the draft, the target's opinions, distilling the draft
    minutes: tuple  # the most that each of the four may take: a slower machine does fewer steps
    batch: int = 16  # windows a step
    window: int = 128  # tokens a window; attention by distance carries over to longer texts


# A deep target and a shallow draft: depth costs time a pass, so that c, a draft step over a target step, is small.
PRESETS = {
    "tiny": Preset(512, dict(n_layer=16, n_embd=192), dict(n_layer=1, n_embd=128),
                   (400, 300, 280, 1500), (3.2, 0.2, 0.6, 0.7)),
    "base": Preset(512, dict(n_layer=48, n_embd=256), dict(n_layer=2, n_embd=128),
                   (560, 300, 700, 9000), (17.2, 0.4, 4.7, 7.0)),
}


# ---------------------------------------------------------------- corpus

def standard_library():
    """The top-level modules beside os.py, sorted by name: about 4.7 MB of Python."""
    return sorted(Path(os.__file__).parent.glob("*.py"))


def read_documents(paths):
    """Each file as one document. Raises ValueError for a file that is missing, empty or not UTF-8."""
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


# ---------------------------------------------------------------- tokenizer

# Words and signs with the space before them, a line break with the indentation after it, and single
# characters of what is left. The alternatives cover every character, so that no text is lost.
PIECES = r" ?[^\W\d_]+|\d| ?[^\w\s]+|_+|\n *|\s"


def train_tokenizer(documents, vocab_size):
    """Byte-pair encoding: the vocabulary starts as the 256 bytes, and the most frequent pair of
    neighbours becomes a token, again and again. The last id is the end of text. A short text stops
    early, when no pair occurs twice. Raises ValueError for no text or no room for the bytes.
    """
    if vocab_size < 257:
        raise ValueError(f"a vocabulary needs 256 bytes and the end of text: at least 257, not {vocab_size}")
    pieces = Counter(piece for text in documents for piece in re.findall(PIECES, text))
    if not pieces:
        raise ValueError("no text to train a tokenizer on")
    # Each different piece once, as a list of tokens, with how often it occurs.
    words = [[bytes([b]) for b in piece.encode()] for piece in pieces]
    counts = list(pieces.values())
    ranks = {bytes([b]): b for b in range(256)}
    pairs, places = Counter(), defaultdict(set)  # pair -> its count, and the words that it may be in
    for i, word in enumerate(words):
        for pair in zip(word, word[1:]):
            pairs[pair] += counts[i]
            places[pair].add(i)
    while len(ranks) < vocab_size - 1 and pairs:
        pair = max(pairs, key=lambda pair: (pairs[pair], pair))
        if pairs[pair] < 2:
            break
        ranks.setdefault(pair[0] + pair[1], len(ranks))  # two pairs can spell one token
        for i in places.pop(pair):
            for old in zip(words[i], words[i][1:]):
                pairs[old] -= counts[i]
            words[i] = merge(words[i], pair)
            for new in zip(words[i], words[i][1:]):
                pairs[new] += counts[i]
                places[new].add(i)
    return make_encoding(list(ranks))


def merge(word, pair):
    """The word with each occurrence of the pair, from the left, made one token."""
    merged = []
    for token in word:
        if merged and (merged[-1], token) == pair:
            merged[-1] += token
        else:
            merged.append(token)
    return merged


def make_encoding(tokens):
    """The tiktoken encoding of these tokens (bytes, in the order of their ids), with the end of text last."""
    fingerprint = hashlib.sha256(repr(tokens).encode()).hexdigest()[:16]
    return tiktoken.Encoding(
        name=fingerprint,
        pat_str=PIECES,
        mergeable_ranks={token: rank for rank, token in enumerate(tokens)},
        special_tokens={END_OF_TEXT: len(tokens)},
    )


def encode(documents, encoding):
    """All documents in one row of token ids, an end of text after each. What looks like a special
    token in the text is encoded as the plain characters that it is."""
    ids = []
    for text in documents:
        ids += encoding.encode_ordinary(text) + [encoding.eot_token]
    return torch.tensor(ids)


def bytes_per_token(encoding):
    """(V,) length of each token in bytes, 0 for the end of text."""
    ordinary = range(encoding.n_vocab - 1)
    return torch.tensor([len(encoding.decode_single_token_bytes(i)) for i in ordinary] + [0])


# ---------------------------------------------------------------- data

def count_windows(data, window, name="text"):
    """How many windows of `window` tokens, each with a next token, the data holds. ValueError for none."""
    if len(data) <= window:
        raise ValueError(f"the {name} is too short: {len(data)} tokens, and {window + 1} are the least; give more text")
    return len(data) - window


def draw_windows(data, batch, window, generator):
    """(batch, window + 1) token ids, cut from the data at random places."""
    starts = torch.randint(count_windows(data, window), (batch, 1), generator=generator)
    return data[starts + torch.arange(window + 1)]


# ---------------------------------------------------------------- training

def cross_entropy(model, windows):
    """Mean negative log-likelihood of the next token, in nats."""
    logits = model(windows[:, :-1]).float()
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def total_variation(draft, windows, p):
    """Mean over contexts of 1 - Σ min(p, q): one minus the acceptance rate (L, Corollary 3.6)."""
    q = draft(windows[:, :-1]).float().softmax(-1)
    return 1 - torch.minimum(p.float(), q).sum(-1).mean()


def fit(label, model, draw, loss_of, steps, seconds, seed):
    """Minimise loss_of(model, *draw(generator)) for `steps` steps, or until `seconds` have passed if that is sooner.

    Muon for the matrices inside the blocks, AdamW for the two embeddings. The learning rate stays at
    its peak for a third of the way, after a short warm-up, then falls to 0 on a straight line, whichever
    end comes first.
    """
    device = model.embed.device
    generator = torch.Generator().manual_seed(seed)
    muon = torch.optim.Muon([w for block in model.blocks for w in block.parameters()], lr=0.02, weight_decay=0.01)
    adam = torch.optim.AdamW([model.embed, model.unembed], lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)
    peaks = [(group, group["lr"]) for optimizer in (muon, adam) for group in optimizer.param_groups]
    progress = Progress(label, steps, seconds)
    while (done := progress.done()) < 1:
        for group, peak in peaks:
            group["lr"] = peak * min(1, done / 0.02 + 0.1, (1 - done) / 0.67)
        batch = [part.to(device) for part in draw(generator)]
        with reduced_precision(device):
            loss = loss_of(model, *batch)
        loss.backward()
        for optimizer in (muon, adam):
            optimizer.step()
            optimizer.zero_grad()
        progress.step(batch[0][:, 1:].numel(), loss.item())


@torch.no_grad()
def opinions(target, draw, steps, seconds, seed):
    """Windows of text with the target's p after each of their tokens, for the draft to imitate.

    Returns a list of batches: (B, window + 1) ids and (B, window, V) probabilities in float16. Asking the target
    is the dear part of distillation, so it is done once and the draft goes over the answers many times.
    """
    device = target.embed.device
    generator = torch.Generator().manual_seed(seed)
    progress, answers = Progress("target's opinions", steps, seconds), []
    while progress.done() < 1:
        (windows,) = draw(generator)
        with reduced_precision(device):
            answers.append((windows, target(windows[:, :-1].to(device)).float().softmax(-1).half().cpu()))
        progress.step(windows[:, 1:].numel())
    return answers


def reduced_precision(device):
    """Matrix products in bfloat16 where the hardware is faster with it; the weights stay float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=bfloat16_pays(device))


@functools.cache
def bfloat16_pays(device):
    """Does a product of a few rows take less time in bfloat16 than in float32? On a GPU where it has the
    units for it; on a CPU it is measured, in a few milliseconds, since only some multiply bfloat16 natively."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    best = {}
    for dtype in (torch.float32, torch.bfloat16):
        x, weight = torch.ones(8, 1024, dtype=dtype), torch.ones(1024, 1024, dtype=dtype)
        best[dtype] = min(timeit.repeat(lambda: weight @ x.T, number=3, repeat=10))
    return best[torch.bfloat16] < 0.9 * best[torch.float32]


class Progress:
    """A line with loss, tokens a second and time left: rewritten in place on a terminal, now and then elsewhere."""

    def __init__(self, label, steps, seconds):
        self.label, self.steps, self.seconds = label, steps, seconds
        self.began = self.shown = time.perf_counter()
        self.taken = self.tokens = 0
        self.loss = None

    def done(self):
        """The part of the way behind us, in steps or in time, whichever is further."""
        return max(self.taken / self.steps, (time.perf_counter() - self.began) / self.seconds)

    def step(self, tokens, loss=None):
        self.taken += 1
        self.tokens += tokens
        if loss is not None:
            self.loss = loss if self.loss is None else 0.95 * self.loss + 0.05 * loss
        terminal, now, done = sys.stdout.isatty(), time.perf_counter(), self.done()
        if now - self.shown < (0.5 if terminal else 15) and done < 1:
            return
        self.shown, elapsed = now, now - self.began
        minutes, seconds = divmod(round(max(0, elapsed / done - elapsed)), 60)
        loss = f"  loss {self.loss:.3f}" if self.loss is not None else ""
        line = (f"{self.label:<18} step {self.taken}/{self.steps}{loss}  {self.tokens / elapsed:,.0f} tokens/s  "
                f"{minutes}:{seconds:02} left")
        print(f"\r{line:<78}" if terminal else line, end="\n" if done >= 1 or not terminal else "", flush=True)
        if done >= 1 and self.taken < self.steps:
            print(f"stopped by the time limit after {self.taken} of {self.steps} steps: the pair will be poorer for it")


@torch.no_grad()
def bits_per_byte(model, data, sizes, window, most=256):
    """Loss in bits per byte of text, comparable between vocabularies: the mean over windows that are evenly spread
    over the data, `most` of them at most. sizes: see bytes_per_token. ValueError for data of less than one window."""
    device, count = model.embed.device, count_windows(data, window)
    nats = length = 0
    for start in range(0, count, math.ceil(count / most)):
        tokens = data[start:start + window + 1]
        with reduced_precision(device):
            nats += window * cross_entropy(model, tokens[None].to(device)).item()
        length += sizes[tokens[1:]].sum().item()
    return nats / math.log(2) / length


# ---------------------------------------------------------------- the pair, and its checkpoint

@dataclass
class Pair:
    target: GPT
    draft: GPT
    encoding: tiktoken.Encoding
    bits_per_byte: dict  # held-out, of "target", "draft" and "draft before distillation"
    prompts: list  # held-out text, to continue


def train_pair(preset, documents, device, seed=0):
    """Corpus in, pair out."""
    train_part, held_out_part = split_documents(documents)
    encoding = train_tokenizer(train_part, preset.vocab_size)
    data, held_out = encode(train_part, encoding), encode(held_out_part, encoding)
    print(f"corpus: {len(documents)} documents, {len(data):,} tokens to train on, {len(held_out):,} held out; "
          f"vocabulary: {encoding.n_vocab} tokens", flush=True)
    if encoding.n_vocab < preset.vocab_size:
        print(f"no more pairs of tokens repeat: the vocabulary stops at {encoding.n_vocab} of {preset.vocab_size}")
    count_windows(data, preset.window)
    count_windows(held_out, preset.window, "held-out tenth of the text")

    def model(shape):
        return GPT(Config(encoding.n_vocab, tokenizer=encoding.name, **shape), seed).to(device)

    def windows_of_text(generator):
        return (draw_windows(data, preset.batch, preset.window, generator),)

    def opinions_of_target(generator):
        return answers[torch.randint(len(answers), (), generator=generator)]

    bits_per_byte_of = functools.partial(bits_per_byte, data=held_out, sizes=bytes_per_token(encoding),
                                         window=preset.window)
    # Each stage draws windows of its own: the opinions are not only on what the target has just learned.
    limits = [(steps, 60 * minutes, seed + stage)
              for stage, (steps, minutes) in enumerate(zip(preset.steps, preset.minutes))]
    target, draft, bits = model(preset.target), model(preset.draft), {}
    fit("target", target, windows_of_text, cross_entropy, *limits[0])
    bits["target"] = bits_per_byte_of(target)
    fit("draft", draft, windows_of_text, cross_entropy, *limits[1])
    bits["draft before distillation"] = bits_per_byte_of(draft)
    answers = opinions(target, windows_of_text, *limits[2])
    fit("draft, distilling", draft, opinions_of_target, total_variation, *limits[3])
    bits["draft"] = bits_per_byte_of(draft)
    print("held-out bits per byte: " + ", ".join(f"{name} {value:.3f}" for name, value in bits.items()))
    return Pair(target, draft, encoding, bits, excerpts("".join(held_out_part)))


def excerpts(text, count=8, length=200):
    """`count` pieces of the text to continue, evenly spread, each cut at a line break where there is one."""
    starts = [len(text) * i // count for i in range(count)]
    starts = [text.find("\n", start, start + length) + 1 or start for start in starts]
    return [text[start:start + length] for start in starts if start < len(text)] or [text]


def pair_path(directory):
    return Path(directory) / "pair.pt"


def save_pair(pair, directory):
    """Write the pair to directory/pair.pt, whole or not at all: plain values and tensors only."""
    path = pair_path(directory)
    path.parent.mkdir(parents=True, exist_ok=True)
    models = {name: {"config": asdict(model.config), "weights": {k: w.cpu() for k, w in model.state_dict().items()}}
              for name, model in (("target", pair.target), ("draft", pair.draft))}
    tokens = [pair.encoding.decode_single_token_bytes(i).decode("latin-1") for i in range(pair.encoding.n_vocab - 1)]
    whole = {**models, "tokens": tokens, "bits_per_byte": pair.bits_per_byte, "prompts": pair.prompts}
    partial = path.with_suffix(".part")
    try:
        torch.save(whole, partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def load_pair(directory, device="cpu", dtype=None):
    """Read what save_pair wrote. dtype None is the fastest for each model: bfloat16 where it pays, but
    float32 for a draft on a CPU, whose small products are faster so. Raises FileNotFoundError where there
    is no pair and ValueError for a file that is not a whole pair or mixes vocabularies."""
    path, device = pair_path(directory), torch.device(device)
    if not path.exists():
        raise FileNotFoundError(f"no trained pair in {directory}: "
                                f"train one with python train_tiny.py --out {directory}")
    try:
        whole = torch.load(path, map_location="cpu", weights_only=True)
        encoding = make_encoding([token.encode("latin-1") for token in whole["tokens"]])
        models = []
        for name in ("target", "draft"):
            model = GPT(Config(**whole[name]["config"]))
            model.load_state_dict(whole[name]["weights"])
            models.append(model)
        target, draft = models
        pair = Pair(target, draft, encoding, whole["bits_per_byte"], whole["prompts"])
    except Exception as error:
        raise ValueError(f"{path} is not a whole pair of this program ({type(error).__name__}): "
                         "train it again") from error
    check_vocabulary(target.config, draft.config, "draft")
    check_vocabulary(target.config, Config(encoding.n_vocab, tokenizer=encoding.name), "tokenizer")
    fast = torch.bfloat16 if bfloat16_pays(device) else torch.float32
    target.to(device, dtype or fast)
    draft.to(device, dtype or (torch.float32 if device.type == "cpu" else fast))
    return pair


def check_vocabulary(target, other, name):
    """Raises ValueError unless two configs, the target's and that of what is named, speak of the same tokens."""
    if target.vocab_size != other.vocab_size:
        raise ValueError(f"the vocabularies differ: {target.vocab_size} tokens in the target, "
                         f"{other.vocab_size} in the {name}")
    if target.tokenizer != other.tokenizer:
        raise ValueError(f"the vocabularies differ: target and {name} have as many tokens, but not the same")


# ---------------------------------------------------------------- command line

def main(arguments=None):
    parser = argparse.ArgumentParser(description="Train a target and a draft model for specdec.py.")
    parser.add_argument("--data", nargs="+", metavar="FILE", help="UTF-8 text (default: Python's standard library)")
    parser.add_argument("--preset", choices=PRESETS, default="tiny")
    parser.add_argument("--out", metavar="DIR", help="where the pair is kept (default: checkpoints/PRESET)")
    parser.add_argument("--device", help="cpu or cuda (default: cuda where there is one)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    try:
        train_and_keep(PRESETS[options.preset], read_documents(options.data or standard_library()),
                       pick_device(options.device), options.out or CHECKPOINTS / options.preset, options.seed)
    except (ValueError, OSError) as error:
        sys.exit(fail(error))


def train_and_keep(preset, documents, device, directory, seed=0):
    """Train a pair and save it. A Ctrl-C on the way says what is left and ends the program."""
    check_seed(seed)
    Path(directory).mkdir(parents=True, exist_ok=True)  # where nothing can be kept, training would be lost
    try:
        print(f"kept in {save_pair(train_pair(preset, documents, device, seed), directory)}")
    except KeyboardInterrupt:
        earlier = "the earlier pair there is whole" if pair_path(directory).exists() else "there is no pair yet"
        print(f"\ninterrupted: nothing was written to {directory}; {earlier}")
        sys.exit(130)


def check_seed(seed):
    if not 0 <= seed < 2 ** 63:
        raise ValueError(f"seed must be from 0 to 2^63 - 1, not {seed}")


def pick_device(name=None):
    """The torch device. CUDA is not asked about at all where the name is cpu."""
    if name == "cpu":
        return torch.device("cpu")
    if name not in (None, "cuda"):
        raise ValueError(f"unknown device {name!r}: use cpu or cuda")
    if torch.cuda.is_available():
        return torch.device("cuda")
    if name == "cuda":
        raise ValueError("there is no CUDA device here: use --device cpu")
    return torch.device("cpu")


def fail(error):
    """One line on what is wrong; the exit code for bad input."""
    print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
