"""model.py: a forward pass with a cache is a forward pass without one."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from model import GPT, Config, attention_bias
from rigs import DEVICE, random_gpt

TEXT = [3, 1, 4, 1, 5, 0, 2, 6]


def ids_of(tokens):
    return torch.tensor([tokens], device=DEVICE)


# ---------------------------------------------------------------- the forward pass

def logits_by_hand(model, tokens):
    """The forward pass written out, a token and a head at a time. Logits (T, V)."""
    x = [model.embed.weight[token] for token in tokens]  # of each token (C,)
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
    model = random_gpt(vocab_size=9, n_layer=2)
    with torch.inference_mode():
        assert (model(ids_of(TEXT))[0] - logits_by_hand(model, TEXT)).abs().max() < 1e-10


def test_every_parameter_has_a_part_in_the_logits():
    model = random_gpt(vocab_size=9, n_layer=2)
    model(ids_of(TEXT)).square().sum().backward()
    unused = [name for name, weight in model.named_parameters()
              if weight.grad is None or not weight.grad.any()]
    assert not unused, f"nothing depends on {unused}"


def test_a_token_sees_all_before_it_and_nothing_after_it():
    model = random_gpt(vocab_size=9, n_layer=2)
    with torch.inference_mode():
        before = model(ids_of(TEXT))[0]
        for j in range(len(TEXT)):
            changed = TEXT[:j] + [(TEXT[j] + 1) % 9] + TEXT[j + 1:]
            moved = (model(ids_of(changed))[0] - before).abs().amax(-1) > 0
            assert moved.tolist() == [i >= j for i in range(len(TEXT))], f"token {j} was changed"


def test_a_model_left_in_train_mode_says_the_same():
    model = random_gpt(vocab_size=9, n_layer=2)
    with torch.inference_mode():
        assert torch.equal(model.train()(ids_of(TEXT)), model.eval()(ids_of(TEXT)))
        assert torch.equal(model.train()(ids_of(TEXT)), model(ids_of(TEXT)))


def test_mask_and_positions_go_on_from_what_the_cache_holds():
    """Two queries over five keys, all zero, each take the mean of the values 0 ... 4 that they see:
    1.5 and 2. They are 5 and 6 tokens from the first of a text of 7."""
    model, ids, seen = random_gpt(), ids_of([0, 1, 2, 0, 1, 2, 0]), []
    model.blocks[0].register_forward_pre_hook(lambda _, given: seen.append(given[1].flatten(0, -3)))
    cache = model.new_cache()
    for start, end, positions in ((0, 5, [0, 1, 2, 3, 4]), (5, 7, [5, 6]), (3, 5, [3, 4])):
        cache.length = start
        model(ids[:, start:end], cache)
        assert (seen[-1][0, :, 0] / model.bias[0, 1, 0]).round(decimals=9).tolist() == positions
    values = torch.arange(5.0, dtype=torch.float64, device=DEVICE).view(1, 1, 5, 1)
    zeros = torch.zeros_like(values)
    y = F.scaled_dot_product_attention(zeros[:, :, :2], zeros, values,
                                       attn_mask=seen[-1][:1].isfinite())  # without distances
    assert y.flatten().tolist() == pytest.approx([1.5, 2.0], abs=1e-12)


def test_the_bias_is_minus_a_slope_times_the_distance():
    """With two heads the slopes are 2^-4 and 2^-8 (Press et al. 2022)."""
    bias = attention_bias(2, 4)
    for head, slope in enumerate((2 ** -4, 2 ** -8)):
        for i in range(4):
            right = [-slope * (i - j) if j <= i else -float("inf") for j in range(4)]
            assert bias[head, i].tolist() == right


@pytest.mark.parametrize("dtype, exact", [
    (torch.bfloat16, 256), (torch.float32, 511), (torch.float64, 511)], ids=str)
def test_distances_stay_apart_in_every_dtype(dtype, exact):
    """bfloat16 has 8 bits: it is exact up to a distance of 256, right to 1 part in 256 beyond."""
    model = GPT(Config(3, context=512, n_head=2, n_embd=8)).to(DEVICE, dtype)
    distances = torch.arange(512, dtype=torch.float64, device=DEVICE)
    found = model.bias[0, -1].flip(0).double() / -(2 ** -4)  # the last token looks back
    assert torch.equal(found[:exact + 1], distances[:exact + 1])
    assert ((found - distances).abs() <= distances / 256).all() and (found.diff() >= 0).all()


# ---------------------------------------------------------------- the cache

@pytest.mark.parametrize("chunks", ((7, 1), (1, 7), (5, 3), (3, 3, 2)), ids=str)
def test_a_text_in_chunks_gives_the_logits_of_one_forward(chunks):
    model = random_gpt(vocab_size=9, n_layer=2)
    cache = model.new_cache()
    with torch.inference_mode():
        parts = torch.cat([model(part, cache) for part in ids_of(TEXT).split(chunks, 1)], 1)
        assert (parts - model(ids_of(TEXT))).abs().max() < 1e-10
    assert cache.length == 8


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
