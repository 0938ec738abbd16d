"""Train a target and a draft: corpus, vocabulary, target, draft, distillation.

    python train_tiny.py                                     the default pair, in five minutes
    python train_tiny.py --data shakespeare.txt              the same on a text of your own
    python train_tiny.py --target 8x512 --draft 2x128 --minutes 30 --out checkpoints/larger

The default corpus is on every machine already: the source of Python's standard library.
"""

import math
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from model import GPT, Config
from pair import Pair, fast_dtype, save_pair
from vocabulary import encode, train_tokenizer


@dataclass
class Recipe:
    """What is trained, and for how long."""
    target: str = "8x384"  # layers x width
    draft: str = "1x192"
    minutes: float = 4.5  # of all stages; the corpus and its vocabulary take some seconds more
    vocab_size: int = 512
    batch: int = 32  # windows a step
    window: int = 128  # tokens a window; attention by distance carries over to longer texts
    steps: float = math.inf  # the most steps of a stage, for a training that can be repeated


SHARES = {"target": 0.68, "draft": 0.04, "soft labels": 0.07, "distilling": 0.21}  # of the minutes
MOST_LABELS = 200  # batches: they stay in memory, 4 MB each for a vocabulary of 512


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


def prepare(documents, recipe):
    """The vocabulary of a corpus, the tokens to train on, the held-out tokens, and prompts."""
    train_part, held_out_part = split_documents(documents)
    encoding = train_tokenizer(train_part, recipe.vocab_size)
    data, held_out = encode(train_part, encoding), encode(held_out_part, encoding)
    print(f"corpus: {len(documents)} documents, {len(data):,} tokens to train on, "
          f"{len(held_out):,} held out; vocabulary: {encoding.n_vocab} tokens", flush=True)
    for name, part in (("text", data), ("held-out tenth of the text", held_out)):
        if len(part) <= recipe.window:
            raise ValueError(f"the {name} is too short: {len(part)} tokens, and "
                             f"{recipe.window + 1} are the least; give more text")
    return encoding, data, held_out, excerpts("".join(held_out_part))


# ---------------------------------------------------------------- models

def shape(words):
    """"8x384" -> the part of a Config that it stands for. ValueError for what is no shape."""
    layers, _, width = words.partition("x")
    if not (layers.isdecimal() and width.isdecimal() and int(layers) and int(width)):
        raise ValueError(f"a shape is LAYERSxWIDTH, like 8x384, and not {words!r}")
    if int(width) % 32:
        raise ValueError(f"the width of {words} must be a multiple of 32, the size of a head")
    return {"n_layer": int(layers), "n_embd": int(width), "n_head": int(width) // 32}


def new_model(config, seed):
    """Random weights, fixed by the seed. The global random state stays as it is."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GPT(config)


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


def progress(label, recipe, losses, most=math.inf):
    """Yields before each step of a stage how far it is, from 0 to 1, until its steps or its time
    are used up. It takes a step at least. losses: the caller adds one a step; a mean is shown."""
    seconds, steps = 60 * recipe.minutes * SHARES[label], min(recipe.steps, most)
    began = printed = time.perf_counter()
    done = 0
    while done < 1:
        yield done
        now = time.perf_counter()
        done = min(1, max(len(losses) / steps, (now - began) / seconds))
        if done == 1 or now > printed + 10:
            printed = now
            print(f"{label:<11} {100 * done:3.0f}%, step {len(losses)}, "
                  f"loss {statistics.mean(losses[-20:]):.3f}", flush=True)


def fit(label, model, draw, loss_of, recipe, seed):
    """Minimise loss_of(model, *draw(generator)), for the time of this stage.

    Muon for the matrices inside the blocks, AdamW for the rest. After a short warm-up the learning
    rate stays at its peak for a third of the way, then falls to 0 on a straight line.
    """
    generator = torch.Generator().manual_seed(seed)
    matrices = [w for w in model.blocks.parameters() if w.dim() == 2]
    others = [w for w in model.parameters() if all(w is not matrix for matrix in matrices)]
    muon = torch.optim.Muon(matrices, weight_decay=0.01)
    adam = torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0)
    losses = []
    for done in progress(label, recipe, losses):
        batch = [part.to(model.device) for part in draw(generator)]
        loss = loss_of(model, *batch)
        loss.backward()
        rate = min(1, done / 0.02 + 0.1, (1 - done) / 0.67)  # of the peak
        for optimizer, peak in ((muon, 0.02), (adam, 0.01)):
            optimizer.param_groups[0]["lr"] = peak * rate
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())


@torch.no_grad()
def soft_labels(target, draw, recipe, seed):
    """A list of batches for the draft to imitate: windows (B, T+1), and the target's p after each
    of their tokens but the last (B, T, V). To ask the target is most of the work: it is done once,
    and the draft reads the answers many times."""
    generator = torch.Generator().manual_seed(seed)
    batches, entropies = [], []  # these are shown in place of losses
    for _ in progress("soft labels", recipe, entropies, MOST_LABELS):
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

def train_pair(recipe, documents, device, directory=None, seed=0):
    """Corpus in, pair out. Saved in a directory, if one is given: that this works is tried before
    the training, under another name. OSError where it does not."""
    shapes = {"target": shape(recipe.target), "draft": shape(recipe.draft)}
    encoding, data, held_out, prompts = prepare(documents, recipe)
    target, draft = (new_model(Config(encoding.n_vocab, **of_model), seed).to(device)
                     for of_model in shapes.values())
    pair = Pair(target, draft, encoding, prompts, {}, recipe.minutes)
    if directory is not None:
        save_pair(pair, directory, "trial.pt").unlink(missing_ok=True)
    train_models(pair, data, recipe, seed)
    for name, model in (("target", target), ("draft", draft)):
        pair.bits_per_byte[name] = bits_per_byte(model, held_out, encoding, recipe.window)
    print("held-out bits/byte: target {target:.3f}, draft {draft:.3f}".format(**pair.bits_per_byte))
    if directory is not None:
        print(f"kept in {save_pair(pair, directory)}")
    return pair


def train_models(pair, data, recipe, seed):
    """Target, then draft, then the draft once more to imitate the target."""
    def windows(generator):  # a batch of one part; those with labels have two
        return (draw_windows(data, recipe.batch, recipe.window, generator),)

    # Each stage draws windows of its own: the labels are not only on what the target has just read.
    fit("target", pair.target, windows, cross_entropy, recipe, seed)
    fit("draft", pair.draft, windows, cross_entropy, recipe, seed + 1)
    labels = soft_labels(pair.target, windows, recipe, seed + 2)

    def labelled(generator):
        return labels[torch.randint(len(labels), (), generator=generator).item()]

    fit("distilling", pair.draft, labelled, total_variation, recipe, seed + 3)


def main(arguments=None):
    from programs import options  # not above: the training needs none of the programs
    options.train(arguments)


if __name__ == "__main__":
    main()
