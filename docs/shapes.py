"""Targets of several shapes, trained for the same time: what the usual speedup hides.

    python docs/shapes.py [--minutes M] [--keep DIR] [--json FILE]

Each has a draft distilled for it, and all decode in turn. "usual" is speculative over plain
decoding of the same target. "honest" is over the fastest plain decoding of any of these shapes that
is at most .02 bits a byte worse: what one could have used instead.
"""

import argparse
import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from statistics import harmonic_mean

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import program
from bench import measure
from pair import CHECKPOINTS, load_pair, pair_path, pick_device, pick_threads
from train_tiny import PRESETS, standard_library, train_and_keep

SHAPES = [(16, 192), (8, 256), (4, 384), (4, 256), (2, 256)]  # layers, width
WAYS = {"T=1 token rule": ("token", 1.0), "T=1 block rule": ("block", 1.0), "T=0": ("token", 0.0)}


def trained(layers, width, minutes, directory, device):
    """The pair of a shape. It is kept, and not trained again where it is there already."""
    place = Path(directory) / f"{layers}x{width}-{minutes:g}min"
    if not pair_path(place).exists():
        print(f"\n{layers} x {width}", flush=True)
        preset = replace(PRESETS["tiny"], target=dict(n_layer=layers, n_embd=width)).scaled(minutes)
        limit = replace(preset.train_target, steps=10 ** 9)  # only time ends it, as a note tells
        train_and_keep(replace(preset, train_target=limit), standard_library(), device, place)
    return load_pair(place, device)


def decoded(pairs, now, count=2, max_new=128):
    """For each pair {way: what `measure` gives of each prompt}. All take turns at a prompt."""
    runs = [{way: [] for way in WAYS} for _ in pairs]
    for i in range(count):
        for pair, ways in zip(pairs, runs):
            tokens = pair.encoding.encode_ordinary(pair.prompts[i])[:16]
            for way, (verify, temperature) in WAYS.items():
                settings = program.Settings(max_new, temperature=temperature, verify=verify, seed=i)
                ways[way].append(measure(pair, [tokens], settings, now))
    return runs


def fastest(of_prompts):
    """The best gamma over all prompts. Texts are as long: their mean rate is the harmonic one."""
    def rate(rows, way):
        return harmonic_mean([row[way + "_tokens_per_s"] for row in rows])

    best = max(zip(*of_prompts), key=lambda rows: rate(rows, "speculative"))
    return {"gamma": best[0]["gamma"], **{way: rate(best, way) for way in ("plain", "speculative")}}


def facts(pair, runs):
    """The figures of a shape. runs: one of `decoded`."""
    config = pair.target.config
    ways = {way: fastest(of_prompts) for way, of_prompts in runs.items()}
    return {"shape": f"{config.n_layer} x {config.n_embd}", "ways": ways,
            "parameters": sum(w.numel() for w in pair.target.parameters()),
            "bits_per_byte": pair.bits_per_byte["target"],
            "steps": int(re.search(r"after (\d+) of", pair.notes[0])[1]),
            "plain": harmonic_mean([way["plain"] for way in ways.values()])}


def judge(shapes, margin=0.02):
    """Adds both speedups to each way. shapes: see facts."""
    for shape in shapes:
        rivals = [other for other in shapes
                  if other["bits_per_byte"] <= shape["bits_per_byte"] + margin]
        for name, way in shape["ways"].items():
            way["usual"] = way["speculative"] / way["plain"]
            best = max(rival["ways"][name]["plain"] for rival in rivals)
            way["honest"] = way["speculative"] / best


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Shapes of targets at equal training time.")
    parser.add_argument("--minutes", type=float, default=5.0, help="for each pair (default 5)")
    parser.add_argument("--keep", metavar="DIR", default=CHECKPOINTS / "shapes",
                        help="where the pairs are (default: checkpoints/shapes)")
    parser.add_argument("--json", metavar="FILE", help="write the figures to FILE too")
    options = parser.parse_args(arguments)
    with program.edges():
        program.check_names(options)
        if not 0 < options.minutes < math.inf:
            raise ValueError(f"minutes must be more than 0, not {options.minutes}")
        if options.json:
            program.check_writable(options.json)
        torch.set_num_threads(pick_threads())
        device = pick_device()
        pairs = [trained(*shape, options.minutes, options.keep, device) for shape in SHAPES]
        shapes = list(map(facts, pairs, decoded(pairs, program.stopwatch(device))))
        judge(shapes)
        print(f"\non {pairs[0].machine()}\nshape   parameters bits/byte steps plain")
        for shape in shapes:
            print("{shape:8}{parameters:10,}{bits_per_byte:10.3f}{steps:6}{plain:6.0f}"
                  .format(**shape))
            for name, way in shape["ways"].items():
                print("    {:14}  {speculative:5.0f} tokens/s at gamma {gamma:2}, "
                      "usual {usual:.2f}, honest {honest:.2f}".format(name, **way))
        if options.json:
            program.write_json(options.json, {"minutes": options.minutes, "shapes": shapes})


if __name__ == "__main__":
    main()
