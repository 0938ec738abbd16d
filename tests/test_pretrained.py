"""examples/pretrained.py without its packages: a made-up model stands in for those it is for."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch

from exact import EXACT
from examples.pretrained import WEIGHTS, Pretrained, main
from rigs import DEVICE
from test_law import check_model


class Past:
    """What a cache of transformers has. It keeps what one layer of attention has read."""

    def __init__(self, x):
        self.x = x  # (1, T, C)

    def get_seq_length(self):
        return self.x.shape[1]

    def crop(self, size):
        assert size < 0, f"crop({size}): it takes the number of tokens that leave as a negative one"
        self.x = self.x[:, :size]


class Causal:
    """A model of one layer, with the arguments, results and attributes of one of transformers."""

    def __init__(self, seed=0):
        self.config = SimpleNamespace(vocab_size=2, max_position_embeddings=16)
        self.device, generator = DEVICE, torch.Generator().manual_seed(seed)
        self.tokens, self.positions, self.look, self.head = (
            torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE) / 2
            for shape in ((2, 6), (16, 6), (6, 6), (6, 2)))

    def eval(self):
        return self

    def __call__(self, input_ids, past_key_values=None, use_cache=True):
        start = past_key_values.get_seq_length() if past_key_values else 0
        end = start + input_ids.shape[1]
        x = self.tokens[input_ids] + self.positions[start:end]  # (1, T, C)
        past = past_key_values or Past(x[:, :0])
        past.x = torch.cat([past.x, x], 1)  # (1, end, C)
        future = torch.ones(end - start, end, device=DEVICE).triu(start + 1) == 1
        scores = (x @ self.look @ past.x.mT).masked_fill(future, float("-inf"))  # (1, T, end)
        return SimpleNamespace(logits=scores.softmax(-1) @ past.x @ self.head, past_key_values=past)


def test_the_adapter_keeps_what_the_loops_ask_of_a_model():
    model = Pretrained(Causal())
    assert model.config.context == 16, "it does not say how many tokens it can read"
    check_model(model, bound=EXACT)


@pytest.mark.parametrize("gone, named", [("gguf", "gguf"), (None, WEIGHTS)])
def test_a_missing_package_or_file_is_one_line_and_exit_code_2(gone, named, monkeypatch, capsys):
    spec = SimpleNamespace(origin="nowhere/__init__.py")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == gone else spec)
    with pytest.raises(SystemExit) as ended:
        main([])
    said = capsys.readouterr().err
    assert ended.value.code == 2, f"the exit code is {ended.value.code}, and 2 is right"
    assert named in said and said.count("\n") == 1, f"not one line that names {named}: {said!r}"
