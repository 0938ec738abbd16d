"""One thread for the grading, and at its end the ladder: which steps stand."""

import torch

torch.set_num_threads(1)  # tiny tensors gain nothing from two


def pytest_terminal_summary(terminalreporter):
    """What is wrong with a step that does not stand is above, under FAILURES."""
    words = {"passed": "stands", "skipped": "not written yet", "failed": "DOES NOT STAND"}
    steps = {one.nodeid.partition("[")[2][:-1]: words[outcome] for outcome in words
             for one in terminalreporter.stats.get(outcome, []) if "test_ladder" in one.nodeid}
    written = sum(says != words["skipped"] for step, says in steps.items()
                  if "together" not in step)
    if steps and all("exercises" in name for name in terminalreporter.config.args):
        terminalreporter.section("the ladder")
        for step, says in sorted(steps.items()):
            if "together" in step and says == words["passed"]:
                says += f", with {written} of the steps yours"
            terminalreporter.write_line(f"{step:<16} {says}")
