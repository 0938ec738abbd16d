"""Train a target and a draft: corpus, vocabulary, target, draft, distillation.

    python train_tiny.py                            the default pair, at most 5 minutes on two cores
    python train_tiny.py --preset base              a larger pair, at most 30 minutes
    python train_tiny.py --data shakespeare.txt     the same on a text of your own

The default corpus is on every machine already: the source of Python's standard library.
"""

import argparse
import math
import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F

from model import GPT, Config
from pair import CHECKPOINTS, Pair, fast_dtype, pair_path, pick_device, save_pair
from program import check_options, edges, progress, visible
from sampling import check_seed
from vocabulary import encode, train_tokenizer


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
    limits: dict  # {stage of train_pair: Limit}
    gamma: int  # the default of specdec.py: close to the best of bench.py at temperature 1
    batch: int = 32  # windows a step
    window: int = 128  # tokens a window; attention by distance carries over to longer texts

    def scaled(self, minutes):
        """The same preset with its limits made shorter or longer: `minutes` in all."""
        if not 1e-9 < minutes < 1e9:
            raise ValueError(f"minutes must be more than 0, and of a usual size, not {minutes}")
        part = minutes / sum(limit.minutes for limit in self.limits.values())
        limits = {stage: Limit(math.ceil(limit.steps * part), limit.minutes * part)
                  for stage, limit in self.limits.items()}
        # Soft labels stay in memory, 2 bytes for each token of the vocabulary at each place: 0.8 GB
        # for tiny and 1.7 GB for base. There are never more than the preset says.
        limits["labels"].steps = min(limits["labels"].steps, self.limits["labels"].steps)
        return replace(self, limits=limits)


PRESETS = {
    "tiny": Preset(512, dict(n_layer=4, n_embd=256), dict(n_layer=1, n_embd=128),
                   dict(target=Limit(560, 2.9), draft=Limit(200, 0.2),
                        labels=Limit(200, 0.45), distilling=Limit(1100, 1.25)), gamma=2),
    "base": Preset(512, dict(n_layer=6, n_head=8, n_embd=512), dict(n_layer=2, n_embd=128),
                   dict(target=Limit(1000, 20), draft=Limit(400, 0.6),
                        labels=Limit(400, 3), distilling=Limit(4000, 6)), gamma=6),
}


# ---------------------------------------------------------------- corpus

def standard_library():
    """The top-level modules beside os.py, sorted by name: about 4.7 MB of Python."""
    return sorted(Path(os.__file__).parent.glob("*.py"))


def read_documents(paths):
    """Each file as one document. ValueError for one that is not UTF-8."""
    documents = []
    for path in paths:
        try:
            documents.append(Path(path).read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            raise ValueError(f"{path} is not UTF-8 text") from None
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


def excerpts(text, count=8, length=200):
    """`count` pieces of a text to continue, evenly spread, from a line break where there is one."""
    starts = [len(text) * i // count for i in range(count)]
    # find gives -1, so that 0 is left, where there is none.
    starts = [text.find("\n", start, start + length) + 1 or start for start in starts]
    return [text[start:start + length] for start in starts if start < len(text)] or [text]


def prepare(documents, preset):
    """The vocabulary of a corpus, the tokens to train on, the held-out tokens, and prompts."""
    train_part, held_out_part = split_documents(documents)
    encoding = train_tokenizer(train_part, preset.vocab_size)
    data, held_out = encode(train_part, encoding), encode(held_out_part, encoding)
    print(f"corpus: {len(documents)} documents, {len(data):,} tokens to train on, "
          f"{len(held_out):,} held out; vocabulary: {encoding.n_vocab} tokens", flush=True)
    for name, part in (("text", data), ("held-out tenth of the text", held_out)):
        if len(part) <= preset.window:
            raise ValueError(f"the {name} is too short: {len(part)} tokens, and "
                             f"{preset.window + 1} are the least; give more text")
    return encoding, data, held_out, excerpts("".join(held_out_part))


# ---------------------------------------------------------------- training

def draw_windows(data, batch, window, generator):
    """(batch, window + 1) token ids, cut from the data at random places."""
    starts = torch.randint(len(data) - window, (batch, 1), generator=generator)
    return data[starts + torch.arange(window + 1)]


def next_logits(model, windows):
    """Logits (B, T, V) of each token of the windows (B, T+1) but the first. Matrix products are in
    bfloat16 where the hardware does them; the weights stay float32."""
    fast = fast_dtype(model.device) == torch.bfloat16
    with torch.autocast(model.device.type, torch.bfloat16, enabled=fast):
        return model(windows[:, :-1]).float()


def cross_entropy(model, windows):
    """Mean negative log-likelihood of the next token, in nats."""
    return F.cross_entropy(next_logits(model, windows).flatten(0, 1), windows[:, 1:].flatten())


def total_variation(draft, windows, p):
    """Mean over contexts of 1 - Σ min(p, q): one minus the acceptance rate (Leviathan et al. 2023,
    Corollary 3.6). p (B, T, V): the target's distribution after each token of the windows."""
    q = next_logits(draft, windows).softmax(-1)  # (B, T, V)
    return 1 - torch.minimum(p.float(), q).sum(-1).mean()


def fit(label, model, draw, loss_of, limit, seed):
    """Minimise loss_of(model, *draw(generator)). Returns the number of steps done.

    Muon for the matrices inside the blocks, AdamW for the two embeddings. After a short warm-up the
    learning rate stays at its peak for a third of the way, then falls to 0 on a straight line.
    """
    generator = torch.Generator().manual_seed(seed)
    muon = torch.optim.Muon(model.blocks.parameters(), weight_decay=0.01)
    adam = torch.optim.AdamW([model.embed, model.unembed], betas=(0.9, 0.95), weight_decay=0)
    losses = []
    for done in progress(label, limit, losses):
        batch = [part.to(model.device) for part in draw(generator)]
        loss = loss_of(model, *batch)
        loss.backward()
        rate = min(1, done / 0.02 + 0.1, (1 - done) / 0.67)  # of the peak
        for optimizer, peak in ((muon, 0.02), (adam, 0.01)):
            optimizer.param_groups[0]["lr"] = peak * rate
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return len(losses)


@torch.no_grad()
def soft_labels(target, draw, limit, seed):
    """A list of batches for the draft to imitate: windows (B, T+1), and the target's p after each
    of their tokens but the last (B, T, V). To ask the target is most of the work: it is done once,
    and the draft reads the answers many times."""
    generator = torch.Generator().manual_seed(seed)
    batches, entropies = [], []  # these are shown in place of losses
    for _ in progress("soft labels", limit, entropies):
        (windows,) = draw(generator)
        p = next_logits(target, windows.to(target.device)).softmax(-1)  # (B, T, V)
        batches.append((windows, p.half().cpu()))
        entropies.append(torch.special.entr(p).sum(-1).mean().item())
    return batches


@torch.no_grad()
def bits_per_byte(model, data, encoding, window, most=256):
    """Loss in bits per byte of text, comparable between vocabularies: the mean over at most `most`
    windows, evenly spread over the data."""
    windows = data.unfold(0, window + 1, math.ceil((len(data) - window) / most))  # (N, window + 1)
    nats = windows[:, 1:].numel() * cross_entropy(model, windows.to(model.device)).item()
    ids = [i for i in windows[:, 1:].flatten().tolist() if i != encoding.eot_token]
    return nats / math.log(2) / len(encoding.decode_bytes(ids))


# ---------------------------------------------------------------- the pair

def train_pair(preset, documents, device, seed=0):
    """Corpus in, pair out."""
    encoding, data, held_out, prompts = prepare(documents, preset)
    configs = (Config(encoding.n_vocab, tokenizer=encoding.name, **shape)
               for shape in (preset.target, preset.draft))
    target, draft = (GPT(config, seed).to(device) for config in configs)

    def windows(generator):  # a batch of one part; those with labels have two
        return (draw_windows(data, preset.batch, preset.window, generator),)

    # Each stage draws windows of its own: the labels are not only on what the target has just read.
    limits = preset.limits
    taken = fit("target", target, windows, cross_entropy, limits["target"], seed)
    fit("draft", draft, windows, cross_entropy, limits["draft"], seed + 1)
    labels = soft_labels(target, windows, limits["labels"], seed + 2)

    def labelled(generator):
        return labels[torch.randint(len(labels), (), generator=generator).item()]

    fit("distilling", draft, labelled, total_variation, limits["distilling"], seed + 3)
    bits = {name: bits_per_byte(model, held_out, encoding, preset.window)
            for name, model in (("target", target), ("draft", draft))}
    print("held-out bits per byte: target {target:.3f}, draft {draft:.3f}".format(**bits))
    notes = notes_on(taken, limits["target"].steps)
    return Pair(target, draft, encoding, bits, prompts, data, preset.gamma, notes)


def notes_on(taken, meant):
    """What to say of a pair whose target was trained for clearly fewer steps than was meant.
    `meant` is infinite where only time was to end the training."""
    if meant == math.inf or taken >= 0.9 * meant:
        return []
    return [f"a time limit ended the training of the target after {taken} of {meant} steps; a "
            "target that knows less is easier to imitate, so the speedup is too large"]


def train_and_keep(preset, paths, device, directory, seed=0):
    """Train a pair and save it. A place that is no directory, or has no room, is refused before the
    training. A pair that cannot be saved all the same is kept in a temporary directory."""
    check_seed(seed)
    documents, path = read_documents(paths), pair_path(directory)
    check_room_for(preset, documents, path)
    pair = train_pair(preset, documents, device, seed)
    try:
        save_pair(pair, directory)
    except OSError as error:  # the disk has filled up meanwhile
        path = save_pair(pair, tempfile.mkdtemp())
        raise OSError(f"{error}; the pair is kept in {path.parent} instead") from error
    print(f"kept in {visible(str(path))}")


def check_room_for(preset, documents, path):
    """Makes the pair's directory. OSError unless a file as large as the pair can be fits into it:
    all weights, and the corpus, at most a token of 8 bytes for each byte of text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    models = [GPT(Config(preset.vocab_size, **shape)) for shape in (preset.target, preset.draft)]
    size = 4 * sum(w.numel() for model in models for w in model.parameters())  # bytes
    size += 8 * sum(len(text.encode()) for text in documents)
    try:
        with tempfile.TemporaryFile(dir=path.parent) as trial:
            trial.write(bytes(size))
    except OSError as error:
        raise OSError(f"cannot write {path}: {error.strerror}") from None


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
        check_options(options)
        preset = PRESETS[options.preset]
        if options.minutes is not None:
            preset = preset.scaled(options.minutes)
        train_and_keep(preset, options.data or standard_library(), pick_device(options.device),
                       options.out or CHECKPOINTS / options.preset, options.seed)


if __name__ == "__main__":
    main()
