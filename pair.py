"""What is kept: two models and their vocabulary. Saved, loaded, checked, and put on a device."""

import os
from dataclasses import dataclass
from pathlib import Path

import tiktoken
import torch

from model import GPT, Config
from vocabulary import make_encoding

CHECKPOINTS = Path(__file__).resolve().parent / "checkpoints"


@dataclass(eq=False)
class Pair:
    target: GPT
    draft: GPT
    encoding: tiktoken.Encoding
    prompts: list  # held-out text, to continue
    bits_per_byte: dict  # held-out loss of "target" and "draft"
    minutes: float = 0  # of training


# ---------------------------------------------------------------- the file

def save_pair(pair, directory, name="pair.pt"):
    """Write the pair to directory/pair.pt, whole or not at all: tensors and plain values alone.
    Raises OSError where it cannot be written."""
    path = Path(directory) / name
    tokens = [pair.encoding.decode_single_token_bytes(i) for i in range(pair.encoding.eot_token)]
    # latin-1: a character for each byte, for a plain file holds no bytes.
    whole = {**vars(pair), "encoding": [token.decode("latin-1") for token in tokens]}
    for kind, model in (("target", pair.target), ("draft", pair.draft)):
        whole[kind] = {"config": vars(model.config), "weights": dict(model.state_dict()),
                       "vocabulary": pair.encoding.name}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.part")  # each process writes a file of its own
    try:
        torch.save(whole, partial)
        os.replace(partial, path)
    except RuntimeError as error:  # what torch raises where a disk is full
        raise OSError(f"cannot write {path}: {error}") from error
    finally:
        partial.unlink(missing_ok=True)
    return path


def load_pair(directory, device="cpu", dtype=None):
    """Read what save_pair wrote. dtype None: bfloat16 where it pays, float32 elsewhere. Raises
    FileNotFoundError where there is no pair, ValueError for a file that is not a whole one."""
    path, device = Path(directory) / "pair.pt", torch.device(device)
    if not path.exists():
        raise FileNotFoundError(f"no trained pair in {directory}: make one with train_tiny.py "
                                f"--out {directory}")
    try:
        whole = torch.load(path, map_location="cpu", weights_only=True)
        encoding = make_encoding([token.encode("latin-1") for token in whole.pop("encoding")])
        saved = {name: whole.pop(name) for name in ("target", "draft")}
        target, draft = (load_model(**of_model) for of_model in saved.values())
        pair = Pair(target, draft, encoding, **whole)
    except OSError:
        raise  # it cannot be read: to train again would not help
    except Exception as error:  # torch raises anything for a file that is cut short
        raise ValueError(f"cannot read a whole pair from {path} ({type(error).__name__}): "
                         "train it again") from error
    for name, model in (("target", target), ("draft", draft)):
        vocabulary = model.config.vocab_size, saved[name]["vocabulary"]
        if vocabulary != (encoding.n_vocab, encoding.name):
            raise ValueError(f"{path}: the {name}'s vocabulary is another one than the tokenizer's")
        # On a CPU bfloat16 pays from a width of 384 on: each product has a larger overhead with it.
        small = device.type == "cpu" and model.config.n_embd < 384
        model.to(device, dtype or (torch.float32 if small else fast_dtype(device)))
    return pair


def load_model(config, weights, vocabulary):
    model = GPT(Config(**config))
    model.load_state_dict(weights)
    return model


# ---------------------------------------------------------------- device and number format

def pick_device(name=None):
    """The torch device. CUDA is not asked about at all where the name is cpu."""
    found = ["cuda", "cpu"] if name != "cpu" and torch.cuda.is_available() else ["cpu"]
    if name not in (None, *found):
        raise ValueError(f"there is no device {name!r} here: use {' or '.join(found)}")
    return torch.device(name or found[0])


def fast_dtype(device):
    """bfloat16 where the processor says that it multiplies it by itself, else float32."""
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        features = torch.cpu.get_capabilities()
        native = features.get("avx512_bf16") or features.get("amx_bf16")
    return torch.bfloat16 if native else torch.float32
