"""What is kept: two models and their vocabulary. Saved, loaded, checked, and put on a device."""

import os
from dataclasses import dataclass, field
from pathlib import Path

import tiktoken
import torch

from model import GPT, Config, check_vocabulary
from vocabulary import make_encoding

CHECKPOINTS = Path(__file__).resolve().parent / "checkpoints"


@dataclass(eq=False)  # a pair equals itself alone, and so can be a key of a cache
class Pair:
    target: GPT
    draft: GPT
    encoding: tiktoken.Encoding
    bits_per_byte: dict  # held-out, of "target" and "draft"
    prompts: list  # held-out text, to continue
    corpus: torch.Tensor  # (N,) the tokens that both were trained on
    gamma: int  # the drafts a round that suit this pair
    notes: list = field(default_factory=list)  # what to say of it whenever it is used

    def machine(self):
        """Where and how it runs, in words."""
        device = self.target.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        return (f"{name}, target in {dtype_name(self.target)}, draft in {dtype_name(self.draft)}, "
                f"{torch.get_num_threads()} threads")


def dtype_name(model):
    return str(model.embed.dtype).removeprefix("torch.")


# ---------------------------------------------------------------- the file

def pair_path(directory):
    return Path(directory) / "pair.pt"


def save_pair(pair, directory):
    """Write the pair to directory/pair.pt, whole or not at all: tensors and plain values alone.
    Raises OSError where it cannot be written."""
    path = pair_path(directory)
    path.parent.mkdir(parents=True, exist_ok=True)
    tokens = [pair.encoding.decode_single_token_bytes(i) for i in range(pair.encoding.eot_token)]
    # latin-1: a character for each byte, for a plain file holds no bytes.
    whole = {**vars(pair), "tokens": [token.decode("latin-1") for token in tokens]}
    del whole["encoding"]
    for name, model in (("target", pair.target), ("draft", pair.draft)):
        whole[name] = {"config": vars(model.config), "weights": dict(model.state_dict())}
    partial = path.with_suffix(".part")
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
    path, device = pair_path(directory), torch.device(device)
    if not path.exists():
        raise FileNotFoundError(f"no trained pair in {directory}: make one with train_tiny.py "
                                "(--preset tiny or base, --out DIR)")
    try:
        whole = torch.load(path, map_location="cpu", weights_only=True)
        encoding = make_encoding([token.encode("latin-1") for token in whole.pop("tokens")])
        target, draft = (load_model(**whole.pop(name)) for name in ("target", "draft"))
        pair = Pair(target, draft, encoding, **whole)
    except OSError:
        raise  # it cannot be read: to train again would not help
    except Exception as error:
        raise ValueError(f"cannot read a whole pair from {path} ({type(error).__name__}): "
                         "train it again") from error
    check_vocabulary(target.config, draft.config, "draft")
    check_vocabulary(target.config, Config(encoding.n_vocab, tokenizer=encoding.name), "tokenizer")
    for model in (target, draft):
        # On a CPU bfloat16 pays from a width of 384 on: each product has a larger overhead with it.
        small = device.type == "cpu" and model.config.n_embd < 384
        model.to(device, dtype or (torch.float32 if small else fast_dtype(device)))
    return pair


def load_model(config, weights):
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


def pick_threads(asked=None):
    """CPU threads: two at most. A pass of a small model gains a little from the second, and nothing
    from more; where another program is busy, threads that wait for one another cost much."""
    if asked is not None and not 1 <= asked <= 1024:  # OpenMP crashes with very many
        raise ValueError(f"threads must be from 1 to 1024, not {asked}")
    return asked or min(2, os.cpu_count() or 1)
