"""Models for the tests: real ones with random weights, and the law that a target alone would write."""

import torch

from model import GPT, Config

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def random_gpt(vocab_size=3, n_layer=1, seed=0, context=16, dtype=torch.float64, spread=0.7):
    """A real GPT with random weights, every one of them in use, in float64 for exact work."""
    model = GPT(Config(vocab_size, context=context, n_layer=n_layer, n_head=2, n_embd=8))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, spread, generator=generator)
    return model.to(DEVICE, dtype)


@torch.inference_mode()
def autoregressive_law(target, prompt, max_new, warp, eos=None):
    """{new tokens: probability} of the target by itself, from forward passes without a cache: the reference."""
    texts, ended = {(): 1.0}, {}
    for _ in range(max_new):
        longer = {}
        for text, weight in texts.items():
            ids = torch.tensor([[*prompt, *text]], device=DEVICE)
            for token, probability in enumerate(warp(target(ids)[0, -1]).tolist()):
                if probability > 0:
                    home = ended if token == eos else longer
                    home[(*text, token)] = weight * probability
        texts = longer
    return texts | ended
