"""Set up for all tests: where the modules are, and how hard Hypothesis searches."""

import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train_tiny
from rigs import MICRO

# No deadlines: the first call into torch is slow, and a machine may be busy. "suite" draws the same
# examples each time; "long" draws fresh ones, many more: HYPOTHESIS_PROFILE=long python -m pytest
settings.register_profile("suite", max_examples=60, derandomize=True, deadline=None, database=None)
settings.register_profile("long", max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "suite"))


@pytest.fixture
def micro_preset(monkeypatch):
    """The command line trains the micro pair by default."""
    monkeypatch.setitem(train_tiny.PRESETS, "tiny", MICRO)
