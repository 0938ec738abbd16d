"""One thread for the grading, and behind it the ladder: which steps stand."""

import torch

torch.set_num_threads(1)  # tiny tensors gain nothing from two


def pytest_terminal_summary(terminalreporter):
    """The sentences of what fails are above, under FAILURES."""
    told = {"passed": "stands", "skipped": "not written yet", "failed": "DOES NOT STAND"}
    rows = [(report.nodeid.split("[")[1][:-1], words) for outcome, words in told.items()
            for report in terminalreporter.stats.get(outcome, []) if "test_ladder" in report.nodeid]
    if rows:
        terminalreporter.section("the ladder")
    for step, words in sorted(rows):
        terminalreporter.write_line(f"{step:<16} {words}")
