"""A GPT and its key-value cache. Nothing here knows about speculation.

One forward serves training, reading the prompt, one-token decoding and the verification pass over
γ+1 rows: the only difference is how many tokens are fed and how many the cache already holds.
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

    Rolling back is setting `length`: what lies beyond is never read, and the next tokens overwrite it.
    """

    def __init__(self, model):
        config, weight = model.config, model.embed
        shape = (config.n_layer, 2, 1, config.n_head, config.context, config.n_embd // config.n_head)
        self.keys_values = torch.empty(shape, dtype=attention_dtype(weight.dtype), device=weight.device)
        self.length = 0


def attention_dtype(dtype):
    """While decoding, keys, values and attention are float32 at least: few bytes, and on a CPU faster so."""
    return torch.promote_types(dtype, torch.float32)


def attention_bias(n_head, context):
    """What is added to the attention scores: causality and position in one table (n_head, context, context).

    Row i is the token that looks, column j the token looked at. j > i is the future: -inf. The past is
    -slope * (i - j), with a slope for each head, from short sight to long (Press et al. 2022, ALiBi,
    arXiv 2108.12409). Only distances count, so a text may run on past the length trained on.
    """
    distance = torch.arange(context)[:, None] - torch.arange(context)  # (context, context)
    slopes = 2.0 ** (-8 * torch.arange(1, n_head + 1) / n_head)
    bias = -slopes[:, None, None] * distance
    return bias.masked_fill(distance < 0, -math.inf)


def linear(x, weight):
    """x @ weight.T for x (..., in) and weight (out, in), -> (..., out), by a road that suits a few rows.

    A pass over a few rows should take what one row takes, since the weights are read once either way. With a
    large matrix in float32 the CPU library takes longer for 2 to 8 rows than for one, but not for the transposed
    product; and even one row is faster there, as two equal columns.
    """
    rows = x.numel() // x.shape[-1]
    if x.dtype != torch.float32 or x.is_cuda or rows > 8 or weight.numel() <= 2 ** 16:
        return F.linear(x, weight)
    columns = x.reshape(rows, -1).repeat(2 if rows == 1 else 1, 1).T  # (in, rows)
    return (weight @ columns).T[:rows].reshape(*x.shape[:-1], -1)


def norm(x):
    return F.layer_norm(x, x.shape[-1:])


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each added to the residual stream x."""

    def __init__(self, config):
        super().__init__()
        C = config.n_embd
        self.n_head = config.n_head
        self.qkv = nn.Parameter(torch.empty(3 * C, C))
        self.attn_out = nn.Parameter(torch.empty(C, C))
        self.mlp_in = nn.Parameter(torch.empty(4 * C, C))
        self.mlp_out = nn.Parameter(torch.empty(C, 4 * C))

    def forward(self, x, bias, keys_values, start):
        B, T, C = x.shape
        qkv = linear(norm(x), self.qkv).to(bias.dtype)
        qkv = qkv.view(B, T, 3, self.n_head, C // self.n_head).permute(2, 0, 3, 1, 4)  # (3, B, nh, T, hs)
        q, k, v = qkv.unbind(0)
        if keys_values is not None:
            keys_values[:, :, :, start:start + T] = qkv[1:]
            k, v = keys_values[:, :, :, :start + T].unbind(0)  # (1, nh, start+T, hs)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)  # (B, nh, T, hs)
        y = y.transpose(1, 2).reshape(B, T, C).to(x.dtype)
        x = x + linear(y, self.attn_out)
        return x + linear(F.relu(linear(norm(x), self.mlp_in)).square(), self.mlp_out)


class GPT(nn.Module):
    """Token ids in, logits of the next token out."""

    def __init__(self, config, seed=0):
        super().__init__()
        self.config = config
        self.embed = nn.Parameter(torch.empty(config.vocab_size, config.n_embd))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.unembed = nn.Parameter(torch.empty(config.vocab_size, config.n_embd))
        self.register_buffer("bias", attention_bias(config.n_head, config.context), persistent=False)
        self.initialise(torch.Generator().manual_seed(seed))

    def _apply(self, move, recurse=True):
        """What .to(device, dtype) calls. Narrow weights need no narrow positions: bfloat16 takes 257 for 256."""
        super()._apply(move, recurse)
        bias = attention_bias(self.config.n_head, self.config.context)
        self.bias = bias.to(self.embed.device, attention_dtype(self.embed.dtype))
        return self

    @torch.no_grad()
    def initialise(self, generator):
        """Each block starts as the identity and the first prediction is uniform: both learn faster."""
        nn.init.normal_(self.embed, generator=generator)
        nn.init.zeros_(self.unembed)
        for block in self.blocks:
            for weight in (block.qkv, block.mlp_in):
                nn.init.uniform_(weight, -1, 1, generator=generator).mul_(self.config.n_embd ** -0.5)
            for weight in (block.attn_out, block.mlp_out):
                nn.init.zeros_(weight)

    def forward(self, ids, cache=None, rows=None):
        """ids (B, T) -> logits (B, T, V) in the dtype of the weights, or of the last `rows` tokens alone.

        With a cache, B is 1 and ids are the tokens at positions cache.length and on: they are fed
        after what the cache holds, and added to it. Raises ValueError where they run off the context.
        """
        start = cache.length if cache else 0
        end = start + ids.shape[1]
        if end > self.config.context:
            raise ValueError(f"{end} tokens do not fit the context of {self.config.context}")
        x = F.embedding(ids, self.embed)  # (B, T, C)
        bias = self.bias[None, :, start:end, :end]  # (1, nh, T, end)
        for i, block in enumerate(self.blocks):
            x = block(x, bias, cache.keys_values[i] if cache else None, start)
        if cache:
            cache.length = end
        if rows is not None:
            x = x[:, -rows:]
        return linear(norm(x), self.unembed)
