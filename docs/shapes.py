"""Targets of several shapes, trained for the same time: python -m docs.shapes

Each has a draft of its own. "usual" is speculative over plain decoding of one target, "honest"
over the fastest plain decoding of any of these targets that is at most .02 bits a byte worse.
"""

from dataclasses import replace

import torch

from bench import GAMMAS, measure
from pair import CHECKPOINTS, load_pair, pair_path, pick_device, pick_threads
from program import Settings, edges, stopwatch
from train_tiny import PRESETS, standard_library, train_and_keep

SHAPES = [(16, 192), (4, 384), (2, 512), (2, 384), (4, 256), (2, 256)]  # layers, width
MINUTES = 5  # for a target with its draft


def trained(layers, width, device):
    """The pair of a shape: a new one, unless one is in checkpoints/shapes from an earlier run."""
    place = CHECKPOINTS / "shapes" / f"{layers}x{width}-{MINUTES}min"
    if not pair_path(place).exists():
        preset = replace(PRESETS["tiny"], target=dict(n_layer=layers, n_embd=width)).scaled(MINUTES)
        preset.limits["target"].steps = float("inf")  # only time ends it
        train_and_keep(preset, standard_library(), device, place)
    return load_pair(place, device)


def fastest(pair, settings, now):
    """The figures of the gamma that writes fastest, and how good the target is."""
    prompts = [pair.encoding.encode_ordinary(prompt)[:16] for prompt in pair.prompts[:2]]
    rows = [measure(pair, prompts, replace(settings, gamma=gamma), now) for gamma in GAMMAS]
    best = max(rows, key=lambda row: row["speculative_tokens_per_s"])
    return {**best, **vars(pair.target.config), "bits_per_byte": pair.bits_per_byte["target"]}


def judge(rows, margin=0.02):
    """Adds both speedups to the rows of all shapes, in one way of decoding."""
    for row in rows:
        row["usual"] = row["speculative_tokens_per_s"] / row["plain_tokens_per_s"]
        plain = [rival["plain_tokens_per_s"] for rival in rows
                 if rival["bits_per_byte"] <= row["bits_per_byte"] + margin]
        row["honest"] = row["speculative_tokens_per_s"] / max(plain)


def main():
    with edges():
        device = pick_device()
        pairs = [trained(*shape, device) for shape in SHAPES]
        torch.set_num_threads(pick_threads())  # training takes all
        print(f"on {device}, {torch.get_num_threads()} threads")
        for verify, temperature in (("token", 1.0), ("block", 1.0), ("token", 0.0)):
            settings = Settings(128, temperature=temperature, verify=verify)
            rows = [fastest(pair, settings, stopwatch(device)) for pair in pairs]
            judge(rows)
            print(f"\n{verify} rule, temperature {temperature:g}")
            for row in rows:
                print("{n_layer:2} x {n_embd}: {bits_per_byte:.3f} bits/byte, plain "
                      "{plain_tokens_per_s:.0f} tokens/s, usual {usual:.2f}, honest {honest:.2f} "
                      "at gamma {gamma}".format(**row))


if __name__ == "__main__":
    main()
