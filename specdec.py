"""Speculative decoding: the loop, the drafters, and the command line.

    python specdec.py                     decode a text both ways and compare (trains a pair first if there is none)
    python specdec.py --trace             the same, one round at a time
    python specdec.py --bench             where the time goes, and what theory predicts

Decoding one token takes one pass of the target model, and a pass takes about as long for a few rows as
for one. So a small draft model writes gamma tokens, the target judges all of them in one pass, and a
rejection rule keeps the longest run that it can while the text still follows the target's distribution.

Reading order: sampling.py (the rule), model.py (the cache), then here from the top. The letters p, q, x,
gamma, alpha, c and v are explained at the top of sampling.py.
"""

import argparse
import bisect
import codecs
import functools
import json
import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from model import KVCache
from sampling import VERIFY, chooser, expected_speedup, expected_tokens, verify_token, warp
from train_tiny import (CHECKPOINTS, PRESETS, fail, load_pair, pair_path, pick_device, read_documents, save_pair,
                        standard_library, train_pair)


# ---------------------------------------------------------------- plain decoding, the baseline

@torch.inference_mode()
def plain(target, tokens, max_new, warp, choose, eos=None):
    """Autoregressive decoding with a cache: one target pass, one token. Yields max_new ids, or ends at eos.

    tokens: ids of the prompt, at least one. warp: logits -> probabilities. choose: see sampling.chooser.
    """
    tokens, cache = list(tokens), KVCache(target)
    check_room(target, tokens, max_new)
    for _ in range(max_new):
        p = next_distributions(target, cache, tokens, warp)  # (1, V)
        (token,) = read(choose(p), p)
        tokens.append(token)
        yield token
        if token == eos:
            return


def next_distributions(model, cache, tokens, warp, drafted=None):
    """Feed a model what its cache lacks of the text and the drafts; the distribution after each of them.

    Returns (γ+1, V): the first row follows the last token of the text, row i follows draft i.
    """
    feed = torch.tensor(tokens[cache.length:], device=model.embed.device)
    if drafted is not None:
        feed = torch.cat([feed, drafted])
    rows = 1 if drafted is None else len(drafted) + 1
    return warp(model(feed[None], cache, rows)[0])


def read(ids, *distributions):
    """The one transfer from device to host a round: ids as Python ints. ValueError if a distribution has NaN."""
    nan = sum(probs.sum() for probs in distributions).isnan()
    *ids, nan = torch.cat([ids.view(-1), nan.view(1)]).tolist()
    if nan:
        raise ValueError("a model's logits are NaN")
    return ids


def check_room(target, tokens, max_new):
    """Raises ValueError unless a prompt is there and the target's context holds it and the new tokens."""
    if not tokens:
        raise ValueError("the prompt is empty: start from the end-of-text token")
    fed = len(tokens) + max_new - 1  # the last new token is never fed
    if fed > target.config.context:
        raise ValueError(f"{len(tokens)} prompt tokens and {max_new} new ones do not fit the context of "
                         f"{target.config.context}: shorten the prompt, or ask for {target.config.context + 1 - len(tokens)} at most")


# ---------------------------------------------------------------- speculative decoding

@dataclass
class Round:
    """What one pass of the target brought. Text, streaming, trace and bench are all made from these."""
    drafted: list  # ids that the drafter proposed
    accepted: int  # how many of them joined the text
    new: list  # all ids that joined it: the accepted ones and the target's own, unless the text ends before that
    p: torch.Tensor  # (γ+1, V)
    q: torch.Tensor  # (γ, V)
    cache: tuple  # tokens in the target's cache before the pass, after it, and after the rollback

    @property
    def writers(self):
        """Who wrote each token of `new`: "draft", then "correction" after a rejection or "bonus" without one."""
        own = "correction" if self.accepted < len(self.drafted) else "bonus"
        return ["draft"] * self.accepted + [own] * (len(self.new) - self.accepted)

    @property
    def tested(self):
        """Drafts up to the first rejection, that one included. accepted / tested estimates alpha."""
        return self.accepted + self.writers.count("correction")


@torch.inference_mode()
def speculative(target, propose, tokens, max_new, gamma, warp, choose, verify=verify_token, eos=None):
    """Text with the law of `plain`, in fewer target passes. Yields a Round a pass (L, Algorithm 1).

    propose: see draft_model and prompt_lookup. verify: see sampling. The others are as in `plain`.
    """
    tokens, cache = list(tokens), KVCache(target)
    check_room(target, tokens, max_new)
    end = len(tokens) + max_new
    while len(tokens) < end:
        # 1. Draft. The round adds one token of the target's own, so draft one fewer than are left.
        drafted, q = propose(tokens, min(gamma, end - len(tokens) - 1), choose)  # (γ,), (γ, V)

        # 2. One target pass over the last token of the text and all drafts.
        before = cache.length
        p = next_distributions(target, cache, tokens, warp, drafted)  # (γ+1, V)

        # 3. Accept a run of drafts, and draw the token after it from what is left of p.
        n, token = verify(p, q, drafted, choose)
        n, token, *drafts = read(torch.cat([n.view(1), token.view(1), drafted]), p, q)

        # 4. Commit, up to an end of text.
        new = drafts[:n] + [token]
        if eos in new:
            new = new[:new.index(eos) + 1]
        tokens += new

        # 5. Roll the cache back to what is still true of the text. Its last token has not been fed yet.
        fed = cache.length
        cache.length = min(fed, len(tokens) - 1)
        yield Round(drafts, min(n, len(new)), new, p, q, (before, fed, cache.length))
        if new[-1] == eos:
            return


# ---------------------------------------------------------------- drafters

def draft_model(draft, warp):
    """A drafter that decodes with a small model. Make one for each text: it keeps that text's cache.

    propose(tokens, gamma, choose) -> drafted (γ,) and q (γ, V), the distribution that each was drawn from.
    It may draft fewer than gamma, here where its own context ends.
    """
    config, cache = draft.config, KVCache(draft)

    def propose(tokens, gamma, choose):
        gamma = max(0, min(gamma, config.context + 1 - len(tokens)))
        cache.length = min(cache.length, len(tokens) - 1)  # forget drafts that were rejected
        feed = torch.tensor(tokens[cache.length:], device=draft.embed.device)
        drafted = feed.new_empty(gamma)
        q = cache.keys_values.new_empty(gamma, config.vocab_size)
        for i in range(gamma):
            q[i] = warp(draft(feed[None], cache, rows=1)[0, 0])
            feed = drafted[i:i + 1] = choose(q[i:i + 1])
        return drafted, q

    return propose


def prompt_lookup(vocab_size, device):
    """A drafter without a model: what followed the same words earlier in the text. Its q is one-hot,
    since nothing was drawn: it would have proposed the same token with certainty."""
    def propose(tokens, gamma, choose):
        drafted = torch.tensor(continuation(tokens)[:gamma], dtype=torch.long, device=device)
        q = torch.zeros(len(drafted), vocab_size, device=device).scatter_(1, drafted[:, None], 1)
        return drafted, q

    return propose


def continuation(tokens):
    """What follows the latest earlier occurrence of the longest suffix that has one; [] if none has."""
    text = "".join(map(chr, tokens))  # a string, because searching in one runs in C

    def earlier(n):
        """Where the last n tokens occur before, or -1. It may overlap with the suffix itself."""
        return text.rfind(text[-n:], 0, len(text) - 1)

    # If n tokens occurred before, so did fewer: bisect for the most.
    n = bisect.bisect_left(range(1, len(tokens)), True, key=lambda n: earlier(n) < 0)
    return tokens[earlier(n) + n:] if n else []


# ---------------------------------------------------------------- running and timing

def seeded(device, seed):
    """A `choose` with a random stream of its own."""
    return chooser(torch.Generator(device).manual_seed(seed))


def make_drafter(name, pair, warp):
    if name == "model":
        return draft_model(pair.draft, warp)
    return prompt_lookup(pair.target.config.vocab_size, pair.target.embed.device)


def decode_plain(pair, tokens, max_new, warp, seed, eos=None):
    return plain(pair.target, tokens, max_new, warp, seeded(pair.target.embed.device, seed), eos)


def decode_speculative(pair, tokens, max_new, gamma, warp, seed, drafter="model", verify="token", eos=None):
    propose = make_drafter(drafter, pair, warp)
    choose = seeded(pair.target.embed.device, seed)
    return speculative(pair.target, propose, tokens, max_new, gamma, warp, choose, VERIFY[verify], eos)


def synchronize(device):
    """Wait until the device has done all that it was given: without this a clock times the giving."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def clock(device, work):
    """(what work() gave, seconds)"""
    synchronize(device)
    began = time.perf_counter()
    result = work()
    synchronize(device)
    return result, time.perf_counter() - began


def tally(rounds):
    """Sums over rounds. Committed tokens count, and a clipped round counts as it was."""
    return {
        "new_tokens": sum(len(r.new) for r in rounds),
        "passes": len(rounds),
        "drafted": sum(len(r.drafted) for r in rounds),
        "tested": sum(r.tested for r in rounds),
        "accepted": sum(r.accepted for r in rounds),
    }


@torch.inference_mode()
def step_costs(pair, tokens, gamma, warp, drafter="model", verify="token", repeats=25):
    """(c, v): a draft step and a verification pass, each over a plain step, medians of interleaved runs.

    All that a step needs is in it: the forward pass, the warp, the draw, the read.
    """
    target, device = pair.target, pair.target.embed.device
    choose, propose, cache = seeded(device, 0), make_drafter(drafter, pair, warp), KVCache(target)
    vocab = target.config.vocab_size
    drafted = torch.zeros(gamma, dtype=torch.long, device=device)  # any drafts will do for the clock
    q = torch.full((gamma, vocab), 1 / vocab, device=device)

    def plain_step():
        cache.length = min(cache.length, len(tokens) - 1)
        p = next_distributions(target, cache, tokens, warp)
        read(choose(p), p)

    def verification():
        cache.length = len(tokens) - 1
        p = next_distributions(target, cache, tokens, warp, drafted)
        n, token = VERIFY[verify](p, q, drafted, choose)
        read(torch.cat([n.view(1), token.view(1), drafted]), p, q)

    works = (plain_step, lambda: propose(tokens, gamma, choose), verification)
    times = [[clock(device, work)[1] for work in works] for _ in range(repeats + 3)]
    one, draft, many = map(statistics.median, zip(*times[3:]))  # the first runs warm up
    return draft / gamma / one, many / one


def measure(pair, prompts, max_new, gammas, warp, seed, drafter="model", verify="token", eos=None, repeats=3):
    """Decode the prompts plainly and at each gamma, in turn, `repeats` times over; a dict of figures a gamma.

    Speedups are ratios within one repeat: their median, least and greatest. Counts are those of one repeat.
    """
    device = pair.target.embed.device
    jobs = list(enumerate(prompts, seed))  # another seed for each prompt

    def plainly():
        return [list(decode_plain(pair, tokens, max_new, warp, s, eos)) for s, tokens in jobs]

    def speculatively(gamma):
        return [one for s, tokens in jobs
                for one in decode_speculative(pair, tokens, max_new, gamma, warp, s, drafter, verify, eos)]

    plain_rates, rates, counts = [], {gamma: [] for gamma in gammas}, {}
    for _ in range(repeats):
        texts, seconds = clock(device, plainly)
        plain_rates.append(sum(map(len, texts)) / seconds)
        for gamma in gammas:
            rounds, seconds = clock(device, lambda: speculatively(gamma))
            counts[gamma] = tally(rounds)
            rates[gamma].append(counts[gamma]["new_tokens"] / seconds)

    rows = []
    for gamma in gammas:
        speedups = [mine / theirs for mine, theirs in zip(rates[gamma], plain_rates)]
        rows.append({
            "drafter": drafter, "verify": verify, "temperature": warp.keywords["temperature"], "gamma": gamma,
            **counts[gamma],
            "tokens_per_pass": counts[gamma]["new_tokens"] / counts[gamma]["passes"],
            "plain_tokens_per_s": statistics.median(plain_rates),
            "speculative_tokens_per_s": statistics.median(rates[gamma]),
            "speedup": statistics.median(speedups), "speedup_min": min(speedups), "speedup_max": max(speedups),
            **prediction(pair, prompts[0], counts[gamma], gamma, warp, drafter, verify),
        })
    return rows


def prediction(pair, tokens, counts, gamma, warp, drafter, verify):
    """What theory makes of the measured alpha, c and v."""
    alpha = counts["accepted"] / max(1, counts["tested"])
    c, v = step_costs(pair, tokens, gamma, warp, drafter, verify)
    drafts = counts["drafted"] / counts["passes"]  # gamma, less what was clipped at the end of a text
    return {"alpha": alpha, "c": c, "v": v, "predicted": expected_speedup(alpha, drafts, c, v)}


# ---------------------------------------------------------------- generate: one text, both ways

COLOURS = {"draft": "32", "correction": "31", "bonus": "34"}  # green, red, blue


def coloured(text, writer):
    """The text in its writer's colour on a terminal, as it is elsewhere or where NO_COLOR is set."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return text
    return f"\x1b[{COLOURS[writer]}m{text}\x1b[0m"


def stream(prompt, rounds, encoding):
    """Print the prompt, then each round as it comes, coloured by who wrote what. Returns the rounds."""
    print(prompt, end="", flush=True)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a token may end inside a character
    done = []
    for one in rounds:
        for token, writer in zip(one.new, one.writers):
            if token != encoding.eot_token:
                print(coloured(decoder.decode(encoding.decode_single_token_bytes(token)), writer), end="")
        sys.stdout.flush()
        done.append(one)
    print(decoder.decode(b"", final=True))
    return done


def generate(pair, prompt, options, warp):
    """Stream one text, then time both ways of decoding it and print the comparison. Returns the figures."""
    eos = pair.encoding.eot_token
    tokens = pair.encoding.encode_ordinary(prompt) or [eos]
    how = dict(drafter=options.drafter, verify=options.verify, eos=eos)
    stream(prompt, decode_speculative(pair, tokens, options.max_new, options.gamma, warp, options.seed, **how), pair.encoding)
    if options.max_new == 0:
        return {}
    (row,) = measure(pair, [tokens], options.max_new, [options.gamma], warp, options.seed, **how)
    print()
    print(f"                 tokens/s   target passes   tokens/pass   accepted/tested")
    print(f"plain          {row['plain_tokens_per_s']:10.0f}{'one a token':>16}{1:14.2f}")
    print(f"speculative    {row['speculative_tokens_per_s']:10.0f}{row['passes']:16}{row['tokens_per_pass']:14.2f}"
          f"{row['accepted']:>12}/{row['tested']} = {row['alpha']:.2f}")
    print(f"speedup {row['speedup']:.2f}x ({row['speedup_min']:.2f} to {row['speedup_max']:.2f} in 3 runs); theory predicts "
          f"{row['predicted']:.2f}x from alpha {row['alpha']:.2f}, c {row['c']:.3f}, v {row['v']:.2f} at gamma {row['gamma']}")
    return row


# ---------------------------------------------------------------- command line

def main(arguments=None):
    options = parse(arguments)
    try:
        check(options)
        device = pick_device(options.device)
        pair = trained_pair(options, device)
        warp_as_asked = functools.partial(warp, temperature=options.temperature, top_k=options.top_k, top_p=options.top_p)
        prompt = pair.prompts[0] if options.prompt is None else options.prompt
        figures = generate(pair, prompt, options, warp_as_asked)
        if options.json:
            Path(options.json).write_text(json.dumps(figures, indent=1), encoding="utf-8")
    except (ValueError, FileNotFoundError) as error:
        sys.exit(fail(error))
    except KeyboardInterrupt:
        print("\ninterrupted")
        sys.exit(130)


def parse(arguments):
    parser = argparse.ArgumentParser(description="Speculative decoding with a tiny pair of models.")
    parser.add_argument("prompt", nargs="?", help="text to continue (default: a piece of held-out text)")
    parser.add_argument("--max-new", type=int, default=200, metavar="N", help="tokens to write (default 200)")
    parser.add_argument("--gamma", type=int, default=4, help="tokens drafted in a round (default 4)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 is greedy (default 1)")
    parser.add_argument("--top-k", type=int, metavar="K", help="keep the K likeliest tokens (default: all)")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="keep the likeliest tokens that add up to P (default 1)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--drafter", choices=("model", "lookup"), default="model", help="a small model, or the text so far")
    parser.add_argument("--verify", choices=tuple(VERIFY), default="token", help="token by token, or the run as a block")
    parser.add_argument("--json", metavar="FILE", help="write the figures to FILE too")
    parser.add_argument("--checkpoint", metavar="DIR", help="a pair trained by train_tiny.py (default: checkpoints/tiny)")
    parser.add_argument("--device", help="cpu or cuda (default: cuda where there is one)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float64"), help="of both models (default: the fastest)")
    return parser.parse_args(arguments)


def check(options):
    """Raises ValueError for what can be seen to be wrong before any work is done."""
    if options.gamma < 1:
        raise ValueError(f"gamma must be at least 1, not {options.gamma}")
    if options.max_new < 0:
        raise ValueError(f"max-new must be at least 0, not {options.max_new}")
    warp(torch.zeros(1), options.temperature, options.top_k, options.top_p)


def trained_pair(options, device):
    """The pair asked for. Where the default one is not there yet, train it and keep it."""
    dtype = getattr(torch, options.dtype) if options.dtype else None
    directory = options.checkpoint or CHECKPOINTS / "tiny"
    if options.checkpoint is None and not pair_path(directory).exists():
        print("no trained pair yet: training one, at most 5 minutes, once")
        pair = train_pair(PRESETS["tiny"], read_documents(standard_library()), device)
        print(f"kept in {save_pair(pair, directory)}\n")
    return load_pair(directory, device, dtype)


if __name__ == "__main__":
    main()
