"""A GPT and its key-value cache. Nothing here knows about speculation.

One forward serves training, reading the prompt, one-token decoding and the verification pass over
γ+1 rows: the only difference is how many tokens are fed and how many the cache already holds.
Shapes: B texts of T tokens, C the width, nh heads of size hs = C / nh, V the vocabulary's size.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class Config:
    vocab_size: int
    context: int = 512  # the most tokens that one text can hold
    n_layer: int = 1
    n_head: int = 4
    n_embd: int = 128  # C, a multiple of n_head
    tokenizer: str = ""  # fingerprint: two vocabularies of one size need not be the same


class KVCache:
    """Keys and values of the first `length` tokens of one text.

    Rolling back is setting `length` lower: what lies beyond is never read, and the next tokens
    overwrite it.
    """

    def __init__(self, config, like):
        # Keys and values of each layer: (2, 1, nh, context, hs).
        shape = (2, 1, config.n_head, config.context, config.n_embd // config.n_head)
        self.layers = [like.new_empty(shape) for _ in range(config.n_layer)]
        self.length = 0  # GPT.forward raises it, and nobody else

    def __repr__(self):
        return f"KVCache({self.length} of {self.layers[0].shape[-2]} tokens)"


def check_vocabulary(target, other, name):
    """Raises ValueError unless two configs, the target's and another, speak of the same tokens."""
    if (target.vocab_size, target.tokenizer) != (other.vocab_size, other.tokenizer):
        raise ValueError(f"the vocabularies differ: {target.vocab_size} tokens in the target, "
                         f"{other.vocab_size} in the {name}, and not the same ones")


def attention_bias(n_head, context):
    """What is added to the attention scores, (nh, context, context): causality and position.

    Row i is the token that looks, column j the token looked at. j > i is the future: -inf. The past
    is -slope * (i - j), with a slope for each head, from short sight to long (Press et al. 2022,
    ALiBi, arXiv 2108.12409). Only distances count: a text may be longer than those trained on.
    """
    distance = torch.arange(context)[:, None] - torch.arange(context)  # (context, context)
    slopes = 2.0 ** (-8 * torch.arange(1, n_head + 1) / n_head)  # (nh,)
    bias = -slopes[:, None, None] * distance  # (nh, context, context)
    return bias.masked_fill(distance < 0, -math.inf)


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each added to the residual stream x."""

    def __init__(self, config, generator):
        super().__init__()
        self.n_head = config.n_head
        C, a = config.n_embd, config.n_embd ** -0.5
        self.qkv = nn.Parameter(torch.empty(3 * C, C).uniform_(-a, a, generator=generator))
        self.attn_out = nn.Parameter(torch.zeros(C, C))  # 0: each block starts as the identity
        self.mlp_in = nn.Parameter(torch.empty(4 * C, C).uniform_(-a, a, generator=generator))
        self.mlp_out = nn.Parameter(torch.zeros(C, 4 * C))

    def forward(self, x, bias, past=None, start=0):
        """x (B, T, C) -> (B, T, C). past (2, 1, nh, context, hs): keys and values of the text."""
        B, T, C = x.shape
        qkv = F.linear(F.layer_norm(x, [C]), self.qkv)  # (B, T, 3C)
        qkv = qkv.view(B, T, 3, self.n_head, -1).permute(2, 0, 3, 1, 4)  # (3, B, nh, T, hs)
        queries, keys, values = qkv.unbind(0)
        if past is not None:
            past[:, :, :, start:start + T] = qkv[1:]
            keys, values = past[:, :, :, :start + T].unbind(0)  # (1, nh, start+T, hs)
        y = F.scaled_dot_product_attention(queries, keys, values, attn_mask=bias)  # (B, nh, T, hs)
        x = x + F.linear(y.transpose(1, 2).flatten(2), self.attn_out)  # (B, T, C)
        hidden = F.relu(F.linear(F.layer_norm(x, [C]), self.mlp_in)).square()  # (B, T, 4C)
        return x + F.linear(hidden, self.mlp_out)


class GPT(nn.Module):
    """Token ids in, logits of the next token out."""

    def __init__(self, config, seed=0):
        super().__init__()
        self.config, generator = config, torch.Generator().manual_seed(seed)
        shape = config.vocab_size, config.n_embd
        self.embed = nn.Parameter(torch.randn(shape, generator=generator))
        self.blocks = nn.ModuleList(Block(config, generator) for _ in range(config.n_layer))
        self.unembed = nn.Parameter(torch.zeros(shape))  # 0: the first prediction is uniform
        bias = attention_bias(config.n_head, config.context)
        self.register_buffer("bias", bias, persistent=False)  # (nh, context, context)

    @property
    def device(self):
        return self.embed.device

    def new_cache(self):
        return KVCache(self.config, self.embed)

    def forward(self, ids, cache=None, rows=None):
        """ids (B, T) -> logits (B, T, V), or of the last `rows` tokens alone.

        With a cache, B is 1 and ids are the tokens at positions cache.length and on: they are fed
        after what the cache holds, and added to it. ValueError where they run off the context.
        """
        start = cache.length if cache is not None else 0
        end = start + ids.shape[1]
        if end > self.config.context:
            raise ValueError(f"{end} tokens do not fit the context of {self.config.context}")
        x = F.embedding(ids, self.embed)  # (B, T, C)
        bias = self.bias[:, start:end, :end]  # (nh, T, end)
        if cache is not None or bias.is_cuda:
            # PyTorch takes another attention kernel for a mask of four dimensions: on a CPU it is
            # 20% faster for one text, and 10% slower for the many windows of a training step.
            bias = bias[None]  # (1, nh, T, end)
        for i, block in enumerate(self.blocks):
            x = block(x, bias, cache.layers[i] if cache is not None else None, start)
        if cache is not None:
            cache.length = end
        if rows is not None:
            x = x[:, -rows:]  # (B, rows, C)
        return F.linear(F.layer_norm(x, [self.config.n_embd]), self.unembed)  # (B, T or rows, V)
