"""Set up for all tests: where the modules are, how hard Hypothesis searches, one thread, and the
order of the run, from the idea to the edges."""

import gc
import os
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE), str(HERE / "law")]

# No deadlines: the first call into torch is slow, and a machine may be busy. "suite" draws the same
# examples each time; "long" draws fresh ones, many more: HYPOTHESIS_PROFILE=long python -m pytest
settings.register_profile("suite", max_examples=60, derandomize=True, deadline=None, database=None)
settings.register_profile("long", max_examples=2000, deadline=None,
                          suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "suite"))

torch.set_num_threads(1)  # tiny tensors gain nothing from two
gc.freeze()  # what is imported stays: the collector need not look at it again and again

ORDER = ("law properties wall sampling model specdec variants statistics vocabulary pair "
         "train_tiny options decode bench trace pictures exercises readme house").split()


def pytest_collection_modifyitems(items):
    def place(item):
        name = item.path.stem.removeprefix("test_")
        return ORDER.index(name) if name in ORDER else len(ORDER)

    items.sort(key=place)  # stable: a file keeps its order, and other files come last


@pytest.fixture(autouse=True)
def one_thread():
    """The programs set a number of threads of their own: what they set ends with the test."""
    yield
    torch.set_num_threads(1)


@pytest.fixture
def kept(tmp_path):
    """The options that name a small trained pair."""
    from micro import micro_pair
    from pair import save_pair
    from rigs import DEVICE
    save_pair(micro_pair(), tmp_path / "kept")
    return ["--checkpoint", tmp_path / "kept", "--device", DEVICE.type, "--dtype", "float32"]
