"""model.py: a forward pass with a cache is a forward pass without one."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from model import attention_bias
from rigs import DEVICE, random_gpt


def ids_of(tokens):
    return torch.tensor([tokens], device=DEVICE)


# ---------------------------------------------------------------- the forward pass

def logits_by_hand(model, tokens):
    """The forward pass written out, a token and a head at a time. Logits (T, V)."""
    own, for_next = model.embed.weight.chunk(2, dim=-1)  # (V, C) each
    x = [own[token] + (for_next[tokens[i - 1]] if i else 0) for i, token in enumerate(tokens)]
    for block in model.blocks:
        parts = [block.qkv(block.norm_1(one)).view(3, block.n_head, -1) for one in x]  # (3, nh, hs)
        for i in range(len(x)):
            heads = []
            for head in range(block.n_head):
                query = parts[i][0, head]
                scores = [query @ parts[j][1, head] / len(query) ** 0.5 + model.bias[head, i, j]
                          for j in range(i + 1)]
                weights = torch.stack(scores).softmax(0)
                heads.append(sum(weights[j] * parts[j][2, head] for j in range(i + 1)))
            x[i] = x[i] + block.attn_out(torch.cat(heads))
        x = [one + block.mlp_out(F.relu(block.mlp_in(block.norm_2(one))) ** 2) for one in x]
    return torch.stack([model.unembed(model.norm(one)) for one in x])


def test_the_forward_pass_is_the_one_written_out_by_hand():
    """Whether the model was left in train mode or not."""
    model, text = random_gpt(vocab_size=9, n_layer=2), [3, 1, 4, 1, 5, 0, 2, 6]
    with torch.inference_mode():
        by_hand = logits_by_hand(model, text)
        for training in (True, False):
            assert (model.train(training)(ids_of(text))[0] - by_hand).abs().max() < 1e-10


def test_gradients_are_those_of_the_pass_written_out_by_hand():
    """So every weight learns, also what a token leaves for the next one."""
    model, text = random_gpt(vocab_size=9, n_layer=2), [3, 1, 4, 1, 5, 0, 2, 6]
    gradients = [torch.autograd.grad(logits.square().sum(), list(model.parameters()))
                 for logits in (model(ids_of(text))[0], logits_by_hand(model, text))]
    for came, by_hand in zip(*gradients):
        assert torch.allclose(came, by_hand, rtol=1e-8, atol=1e-8) and by_hand.any()


def test_the_bias_is_minus_a_slope_times_the_distance():
    """With two heads the slopes are 2^-4 and 2^-8 (Press et al. 2022). No distance is rounded."""
    bias = attention_bias(2, 300)
    for head, slope in enumerate((2 ** -4, 2 ** -8)):
        for i in range(300):
            right = [-slope * (i - j) if j <= i else -float("inf") for j in range(300)]
            assert bias[head, i].tolist() == right


# ---------------------------------------------------------------- the cache

@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32, torch.float64), ids=str)
@torch.inference_mode()
def test_a_cache_is_in_the_number_format_and_on_the_device_of_its_model(dtype):
    model = random_gpt(dtype=dtype)
    cache = model.new_cache()
    assert model(ids_of([1, 2]), cache).dtype == dtype
    for part in (*cache.keys, *cache.values, cache.shifted):
        assert (part.dtype, part.device) == (dtype, model.device)


MODEL = random_gpt(vocab_size=5, n_layer=2, context=20)


class FeedAndRollBack(RuleBasedStateMachine):
    """Any order of feeding and rolling back: what the cache gives is what a fresh forward gives."""

    def __init__(self):
        super().__init__()
        self.cache, self.text = MODEL.new_cache(), []

    @rule(new=st.lists(st.integers(0, 4), min_size=1, max_size=7))
    @torch.inference_mode()
    def feed(self, new):
        if len(self.text) + len(new) > MODEL.config.context:
            with pytest.raises(ValueError, match="tokens do not fit the context of 20"):
                MODEL(ids_of(new), self.cache)
        else:
            self.text += new
            fresh = MODEL(ids_of(self.text))[0, -len(new):]
            assert (MODEL(ids_of(new), self.cache)[0] - fresh).abs().max() < 1e-10
        assert self.cache.length == len(self.text)

    @rule(part=st.floats(0, 1))
    def roll_back(self, part):
        self.cache.length = int(part * len(self.text))
        del self.text[self.cache.length:]


TestTheCacheEqualsAFreshForward = FeedAndRollBack.TestCase
TestTheCacheEqualsAFreshForward.settings = settings(stateful_step_count=20)
