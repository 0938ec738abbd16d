"""One thread for the grading, and at its end the ladder: which steps stand."""

import torch

torch.set_num_threads(1)  # tiny tensors gain nothing from two


def pytest_terminal_summary(terminalreporter):
    """What is wrong with a step that does not stand is above, under FAILURES."""
    words = {"passed": "stands", "skipped": "not written yet", "failed": "DOES NOT STAND"}
    steps = {one.nodeid.partition("[")[2][:-1]: words[outcome] for outcome in words
             for one in terminalreporter.stats.get(outcome, []) if "test_ladder" in one.nodeid}
    written = sum(words != "not written yet" for words in steps.values()) - 1
    if steps and all("exercises" in name for name in terminalreporter.config.args):
        terminalreporter.section("the ladder")
        for step, words in sorted(steps.items()):
            together = f", with {written} of the steps yours" if "together" in step else ""
            terminalreporter.write_line(f"{step:<16} {words}{together * (words == 'stands')}")
