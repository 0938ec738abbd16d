"""Set up for all tests: where the modules are, how hard Hypothesis searches, and one thread."""

import gc
import os
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# No deadlines: the first call into torch is slow, and a machine may be busy. "suite" draws the same
# examples each time; "long" draws fresh ones, many more: HYPOTHESIS_PROFILE=long python -m pytest
settings.register_profile("suite", max_examples=60, derandomize=True, deadline=None, database=None)
settings.register_profile("long", max_examples=2000, deadline=None,
                          suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "suite"))

import train_tiny
from pair import save_pair
from rigs import DEVICE, MICRO, micro_pair

torch.set_num_threads(1)  # tiny tensors gain nothing from two
gc.freeze()  # what is imported stays: the collector need not look at it again and again


@pytest.fixture(autouse=True)
def one_thread():
    """The programs set a number of threads of their own: what they set ends with the test."""
    yield
    torch.set_num_threads(1)


@pytest.fixture
def micro_preset(monkeypatch):
    """The command line trains the micro pair by default."""
    monkeypatch.setitem(train_tiny.PRESETS, "tiny", MICRO)


@pytest.fixture
def kept(tmp_path):
    """The options that name a small trained pair."""
    save_pair(micro_pair(), tmp_path / "kept")
    return ["--checkpoint", tmp_path / "kept", "--device", DEVICE.type, "--dtype", "float32"]
