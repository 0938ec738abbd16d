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
import html
import json
import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from model import KVCache
from sampling import SURVIVAL, VERIFY, block_keep, chooser, expected_passes, expected_tokens, verify_token, warp
from train_tiny import (CHECKPOINTS, PRESETS, check_seed, check_vocabulary, fail, load_pair, pair_path, pick_device,
                        read_documents, standard_library, train_and_keep)


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
        (token,) = read([choose(p)], p.sum())
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


def read(ids, total):
    """The one transfer from device to host a round: tensors of ids as Python ints. ValueError if the total of the
    distributions is NaN, since then one of them has NaN in it."""
    *ids, nan = torch.cat([part.view(-1) for part in (*ids, total.isnan())]).tolist()
    if nan:
        raise ValueError("a model's logits are NaN")
    return ids


def check_room(target, tokens, max_new):
    """Raises ValueError unless a prompt is there and the target's context holds it and the new tokens."""
    if not tokens:
        raise ValueError("the prompt is empty: start from the end-of-text token")
    fed = len(tokens) + max_new - 1  # the last new token is never fed
    if fed > target.config.context:
        context = target.config.context
        most = f", or ask for {context + 1 - len(tokens)} at most" if len(tokens) <= context else ""
        raise ValueError(f"{len(tokens)} prompt tokens and {max_new} new ones do not fit the context of {context}: "
                         f"shorten the prompt{most}")


# ---------------------------------------------------------------- speculative decoding

@dataclass
class Round:
    """What one pass of the target brought. Text, streaming, trace and bench are all made from these."""
    drafted: list  # ids that the drafter proposed, also those after an end of text
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
        """Drafts up to the first rejection, that one included. By the token rule accepted / tested estimates alpha."""
        return self.accepted + self.writers.count("correction")


@torch.inference_mode()
def speculative(target, propose, tokens, max_new, gamma, warp, choose, verify=verify_token, eos=None):
    """Text with the law of `plain`, in fewer target passes. Yields a Round a pass (L, Algorithm 1).

    propose: see draft_model and prompt_lookup. verify: see sampling. The others are as in `plain`.
    """
    tokens, cache = list(tokens), KVCache(target)
    check_room(target, tokens, max_new)
    if hasattr(propose, "config"):
        check_vocabulary(target.config, propose.config, "draft")
    end = len(tokens) + max_new
    while len(tokens) < end:
        # 1. Draft. The round adds one token of the target's own, so draft one fewer than are left.
        drafted, q = propose(tokens, min(gamma, end - len(tokens) - 1), choose)  # (γ,), (γ, V)

        # 2. One target pass over the last token of the text and all drafts.
        before = cache.length
        p = next_distributions(target, cache, tokens, warp, drafted)  # (γ+1, V)

        # 3. Accept a run of drafts, and draw the token after it from what is left of p.
        n, token = verify(p, q, drafted, choose)
        n, token, *drafts = read([n, token, drafted], p.sum() + q.sum())

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
    It may draft fewer than gamma, here where its own context ends. propose.config, where a drafter has it, lets
    the loop refuse a draft of another vocabulary.
    """
    config, cache = draft.config, KVCache(draft)

    def propose(tokens, gamma, choose):
        gamma = max(0, min(gamma, config.context + 1 - len(tokens)))
        cache.length = min(cache.length, len(tokens) - 1)  # forget drafts that were rejected
        feed = torch.tensor(tokens[cache.length:], device=draft.embed.device)
        drafted = [feed[:0]]
        q = [cache.keys_values.new_empty(0, config.vocab_size)]  # float32 or wider, as warp returns
        for _ in range(gamma):
            q.append(warp(draft(feed[None], cache, rows=1)[0]))  # (1, V)
            feed = choose(q[-1])  # (1,)
            drafted.append(feed)
        return torch.cat(drafted), torch.cat(q)

    propose.config = config
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


# ---------------------------------------------------------------- a run, put together from names

def seeded(device, seed):
    """A `choose` with a random stream of its own."""
    return chooser(torch.Generator(device).manual_seed(seed))


DRAFTERS = {
    "model": lambda pair, warp: draft_model(pair.draft, warp),
    "lookup": lambda pair, warp: prompt_lookup(pair.target.config.vocab_size, pair.target.embed.device),
}


def decode_plain(pair, tokens, max_new, warp, seed, eos=None):
    return plain(pair.target, tokens, max_new, warp, seeded(pair.target.embed.device, seed), eos)


def decode_speculative(pair, tokens, max_new, gamma, warp, seed, drafter="model", verify="token", eos=None):
    propose = DRAFTERS[drafter](pair, warp)
    choose = seeded(pair.target.embed.device, seed)
    return speculative(pair.target, propose, tokens, max_new, gamma, warp, choose, VERIFY[verify], eos)


# ---------------------------------------------------------------- generate: one text, both ways

COLOURS = {"draft": "32", "correction": "31", "bonus": "34"}  # green, red, blue


def coloured(text, mark):
    """The text in the colour of its writer or verdict on a terminal, as it is elsewhere or where NO_COLOR is set."""
    writer = {"accepted": "draft", "rejected": "correction"}.get(mark, mark)
    if writer not in COLOURS or not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return text
    return f"\x1b[{COLOURS[writer]}m{text}\x1b[0m"


def speller(encoding):
    """spell(token, final=False) -> its text. A token may end inside a character, which then comes with the next."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def spell(token, final=False):
        return decoder.decode(b"" if token == encoding.eot_token else encoding.decode_single_token_bytes(token), final)

    return spell


def stream(prompt, rounds, encoding):
    """Print the prompt, then each round as it comes, each token coloured by who wrote it. Returns the rounds."""
    print(prompt, end="", flush=True)
    spell, done = speller(encoding), []
    for one in rounds:
        for token, writer in zip(one.new, one.writers):
            print(coloured(without_controls(spell(token)), writer), end="")
        sys.stdout.flush()
        done.append(one)
    print(spell(encoding.eot_token, final=True))
    return done


def without_controls(text):
    """A model can write any byte, also those that command a terminal."""
    return "".join(c if c in "\n\t" or c.isprintable() or c > "\x9f" else "\ufffd" for c in text)


def prompt_and_rounds(pair, options, warp):
    """(prompt, its tokens, the rounds that continue it), as the command line asks."""
    prompt = pair.prompts[0] if options.prompt is None else options.prompt
    tokens = pair.encoding.encode_ordinary(prompt) or [pair.encoding.eot_token]
    check_room(pair.target, tokens, options.max_new)
    return prompt, tokens, decode_speculative(pair, tokens, options.max_new, options.gamma, warp, options.seed,
                                              options.drafter, options.verify, pair.encoding.eot_token)


def generate(pair, options, warp):
    """Stream one text, then time both ways of decoding it and print the comparison. Returns the figures."""
    prompt, tokens, rounds = prompt_and_rounds(pair, options, warp)
    writers = [writer for one in stream(prompt, rounds, pair.encoding) for writer in one.writers]
    if options.max_new == 0:
        return {}
    # Timed to the full length, past an end of text, so that both ways do the same work.
    (row,) = measure(pair, [tokens], options.max_new, [options.gamma], warp, options.seed, options.drafter,
                     options.verify)
    line = "{:12}{:>10}{:>13}{:>16}{:>14}{:>18}".format
    print("\n" + line("", "tokens/s", "new tokens", "target passes", "tokens/pass", "accepted/tested"))
    print(line("plain", f"{row['plain_tokens_per_s']:.0f}", options.max_new, options.max_new, "1.00", ""))
    print(line("speculative", f"{row['speculative_tokens_per_s']:.0f}", row["new_tokens"], row["passes"],
               f"{row['tokens_per_pass']:.2f}", f"{row['accepted']}/{row['tested']}"))
    print(f"speedup {row['speedup']:.2f}x ({row['speedup_min']:.2f} to {row['speedup_max']:.2f} in 3 runs); theory "
          f"predicts {row['predicted']:.2f}x: {row['expected']:.2f} tokens/pass at c {row['c']:.3f}, v {row['v']:.2f}")
    print(f"on {device_name(pair)}, {dtype_name(pair.target)}, {torch.get_num_threads()} threads")
    if len(writers) < options.max_new:
        print(f"the text ended after {len(writers)} tokens; both ways were timed to the full length")
    print("written by: " + ", ".join(coloured(f"{writer} {writers.count(writer)}", writer) for writer in COLOURS))
    return {"temperature": options.temperature, **row}


# ---------------------------------------------------------------- timing

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


def measure(pair, prompts, max_new, gammas, warp, seed, drafter="model", verify="token", repeats=3):
    """Decode each prompt plainly and at each gamma, in turn, `repeats` times over; a dict of figures a gamma.

    A machine is faster at some times than at others, so what is compared is run side by side. Speedups are ratios
    within one repeat: their median, least and greatest. Counts are those of one repeat.
    """
    device = pair.target.embed.device
    seconds = {gamma: [0.0] * repeats for gamma in (0, *gammas)}  # 0 is plain decoding
    written = {gamma: [[]] * len(prompts) for gamma in seconds}  # for each prompt its ids or, with gamma, its rounds
    costs = {gamma: [] for gamma in gammas}

    def decode(i, gamma, new):
        if gamma == 0:
            return list(decode_plain(pair, prompts[i], new, warp, seed + i))
        return list(decode_speculative(pair, prompts[i], new, gamma, warp, seed + i, drafter, verify))

    for gamma in seconds:
        decode(0, gamma, min(gamma + 8, max_new))  # the first run of each shape is slow: not timed
    for repeat in range(repeats):
        for i, prompt in enumerate(prompts):
            for gamma in seconds:
                written[gamma][i], taken = clock(device, lambda: decode(i, gamma, max_new))
                seconds[gamma][repeat] += taken
                if gamma > 0:
                    costs[gamma].append(step_costs(pair, prompt, written[gamma][i], warp, drafter, verify))
    plain_new = sum(map(len, written[0]))
    return [{"drafter": drafter, "verify": verify, "gamma": gamma, "plain_new_tokens": plain_new,
             **prediction(pair, prompts, written[gamma], costs[gamma], gamma, warp, drafter, verify),
             **rates(plain_new, seconds[0], seconds[gamma])} for gamma in gammas]


def rates(new_tokens, plain_seconds, seconds):
    """Tokens a second and speedups, from the seconds that each repeat took, both ways for as many new tokens."""
    speedups = [theirs / mine for theirs, mine in zip(plain_seconds, seconds)]
    return {"plain_tokens_per_s": new_tokens / statistics.median(plain_seconds),
            "speculative_tokens_per_s": new_tokens / statistics.median(seconds),
            "speedup": statistics.median(speedups), "speedup_min": min(speedups), "speedup_max": max(speedups)}


@torch.inference_mode()
def step_costs(pair, prompt, rounds, warp, drafter="model", verify="token"):
    """(c, v): a draft step and a verification pass, each over a plain step: medians over four rounds in the middle
    of a text, done once more, and as many plain steps there.

    All that a step needs is in it: the forward pass, the warp, the draw, the read. Plain steps follow one another
    and so do rounds, as in decoding: what a step finds in the processor's caches is what the one before it left.
    """
    target, device, middle = pair.target, pair.target.embed.device, len(rounds) // 2
    choose, propose, cache = seeded(device, 0), DRAFTERS[drafter](pair, warp), KVCache(target)
    ids = prompt + [token for one in rounds for token in one.new]
    start = len(prompt) + sum(len(one.new) for one in rounds[:middle])

    def plain_step(tokens):
        p = next_distributions(target, cache, tokens, warp)
        read([choose(p)], p.sum())

    def verification(tokens, drafted, q):
        p = next_distributions(target, cache, tokens, warp, drafted)
        n, token = VERIFY[verify](p, q, drafted, choose)
        read([n, token, drafted], p.sum() + q.sum())

    plain_step(ids[:start])  # the first of each reads all the text before it: not timed
    propose(ids[:start], 1, choose)
    plain_times, draft_times, wide_times = [], [], []
    for n in range(start, min(start + 4, len(ids))):  # the last token of a text is never fed
        cache.length = n - 1
        plain_times.append(clock(device, lambda: plain_step(ids[:n]))[1])
    for one in rounds[middle:middle + 4]:
        tokens, cache.length = ids[:start], start - 1
        (drafted, q), seconds = clock(device, lambda: propose(tokens, len(one.drafted), choose))
        draft_times.append(seconds / max(1, len(drafted)))
        wide_times.append(clock(device, lambda: verification(tokens, drafted, q))[1])
        start += len(one.new)
    one_step, draft_step, wide_pass = map(statistics.median, (plain_times, draft_times, wide_times))
    return draft_step / one_step, wide_pass / one_step


# ---------------------------------------------------------------- theory

def prediction(pair, prompts, written, costs, gamma, warp, drafter, verify):
    """The counts, and what theory makes of acceptance, c and v. written: for each prompt its rounds.

    "expected" is tokens per pass from the acceptance of each token (for a rule or drafter that is not known here,
    the measured number); "predicted" is the speedup that they are worth at the measured c and v. "eq1" is tokens per
    pass by equation 1 with alpha = accepted/tested, as if acceptances were i.i.d. and the rule the token rule.
    """
    rounds = [one for text in written for one in text]
    counts = tally(rounds)
    passes = counts["passes"]
    if verify in SURVIVAL and drafter in ("model", "lookup"):
        texts = [prompt + [token for one in text for token in one.new] for prompt, text in zip(prompts, written)]
        passes = sum(expected_passes(text_ratios(pair, ids, len(prompt), gamma, warp, drafter), SURVIVAL[verify])
                     for prompt, ids in zip(prompts, texts))
    expected = counts["new_tokens"] / passes
    alpha = counts["accepted"] / max(1, counts["tested"])
    c, v = map(statistics.median, zip(*costs))
    return {**counts, "tokens_per_pass": counts["new_tokens"] / counts["passes"], "expected": expected,
            "eq1": statistics.mean(expected_tokens(alpha, len(one.drafted)) for one in rounds),
            "alpha": alpha, "c": c, "v": v, "predicted": expected / (v + c * counts["drafted"] / counts["passes"])}


@torch.inference_mode()
def text_ratios(pair, tokens, start, gamma, warp, drafter="model"):
    """For a round that starts at each place of a text: q(y) / p(y) of the next tokens y, at most gamma, had they been
    drafted. tokens: the prompt, of `start` tokens, and the text. A list of lists: see sampling.expected_passes."""
    ids = torch.tensor(tokens, device=pair.target.embed.device)

    def probability(model):
        """Of each token of the text, given those before it, as far as the context goes: one pass over all of it."""
        fed = ids[:-1][:model.config.context]
        return warp(model(fed[None])[0, start - 1:]).gather(-1, ids[start:len(fed) + 1, None])[:, 0]

    p = probability(pair.target).clamp(min=1e-30)
    if drafter == "model":
        q = probability(pair.draft)
        q_over_p = (q / p[:len(q)]).tolist()
        return [q_over_p[t:t + gamma] for t in range(len(p))]
    places, p = [], p.tolist()  # lookup: q is 1 where what it drafts is what came, and else 0
    for t in range(start, len(tokens)):
        drafts = zip(continuation(tokens[:t])[:gamma], tokens[t:], p[t - start:])
        places.append([(x == y) / p_of_y for x, y, p_of_y in drafts])
    return places


# ---------------------------------------------------------------- bench: where the time goes

def bench(pair, options, warp_at):
    """Print the tables and return every figure. warp_at(temperature) is a warp."""
    half = pair.target.config.context // 2
    # Short prompts: reading them costs both ways the same, and it is decoding that is compared.
    prompts = [pair.encoding.encode_ordinary(prompt)[:min(16, half)] for prompt in pair.prompts[:6]]
    figures = {"device": device_name(pair), "dtype": dtype_name(pair.target), "threads": torch.get_num_threads()}
    print("{device}, {dtype}, {threads} threads".format(**figures))
    for name, model in (("target", pair.target), ("draft", pair.draft)):
        figures[name] = {"parameters": sum(w.numel() for w in model.parameters()), "dtype": dtype_name(model),
                         "layers": model.config.n_layer, "width": model.config.n_embd,
                         "bits_per_byte": pair.bits_per_byte[name]}
        print(name + ": {parameters:,} parameters in {dtype}, {layers} layers of width {width}, "
              "{bits_per_byte:.3f} bits per byte held out".format(**figures[name]))
    figures |= bottleneck(pair.target)

    figures["rows"] = []
    for drafter, verify, temperature in (("model", "token", 1.0), ("model", "block", 1.0), ("model", "token", 0.0),
                                         ("lookup", "token", 1.0), ("lookup", "token", 0.0)):
        some = prompts if drafter == "model" else prompts[:2]
        rows = measure(pair, some, min(128, half), range(1, 9), warp_at(temperature), options.seed, drafter, verify)
        rows = [{"temperature": temperature, **row} for row in rows]
        print_rows(rows)
        figures["rows"] += rows
    print("\nWhere q is one-hot, at temperature 0 and for lookup, the block rule is the token rule.")

    figures |= {name: figures["rows"][3][name] for name in ("alpha", "c", "v")}
    print("draft model, token rule, temperature 1, gamma 4: alpha {alpha:.3f}, c {c:.3f}, v {v:.3f}".format(**figures))
    return figures


def device_name(pair):
    device = pair.target.embed.device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def dtype_name(model):
    return str(model.embed.dtype).removeprefix("torch.")


@torch.inference_mode()
def bottleneck(target):
    """Time of a target pass against the rows it carries, and against the tokens in the cache before it."""
    config, device, cache = target.config, target.embed.device, KVCache(target)
    cache.keys_values.zero_()
    weights = [w for w in target.parameters() if w is not target.embed]  # of that, a pass reads a row a token
    moved = sum(w.numel() * w.element_size() for w in weights)

    def one_pass(rows, cached):
        cache.length = cached
        target(torch.zeros(1, rows, dtype=torch.long, device=device), cache)

    def pass_ms(shapes):
        """The median time of each (rows, cached), taken in turn: they share what the machine does meanwhile."""
        times = [[clock(device, lambda: one_pass(*shape))[1] for shape in shapes] for _ in range(65)]
        return [1000 * statistics.median(column) for column in zip(*times[5:])]  # the first ones warm up

    quarter = max(1, config.context // 4)
    counts = [rows for rows in (1, 2, 4, 8, 16) if rows <= quarter]
    by_rows = dict(zip(counts, pass_ms([(rows, quarter) for rows in counts])))
    fastest = memory_rate(device)
    print(f"\nOne target pass with {quarter} tokens cached. It reads {moved / 1e6:.1f} MB of weights, however many "
          f"rows it carries.\nThe sum of a large array reads memory at {fastest:.1f} GB/s here.")
    for rows, ms in by_rows.items():
        print(f"{rows:4} rows {ms:8.2f} ms {moved / ms / 1e6:8.1f} GB/s   {bar(ms / by_rows[1])} {ms / by_rows[1]:.2f}")
    lengths = [0, quarter, 2 * quarter, 3 * quarter, config.context - 1]
    by_length = dict(zip(lengths, pass_ms([(1, cached) for cached in lengths])))
    size = cache.keys_values.numel() * cache.keys_values.element_size()
    print(f"\nOne row against the tokens in the cache, which takes {size / 1e6:.1f} MB whatever it holds:")
    for cached, ms in by_length.items():
        print(f"{cached:4} cached {ms:6.2f} ms   {bar(ms / by_rows[1])}")
    return {"memory_gb_per_s": fastest, "pass_ms": by_rows, "pass_ms_by_length": by_length}


def memory_rate(device):
    """GB/s at which the device reads an array of half a gigabyte, larger than most caches."""
    array = torch.ones(2 ** 27, device=device)
    seconds = statistics.median(clock(device, array.sum)[1] for _ in range(7))
    return array.numel() * array.element_size() / seconds / 1e9


def bar(ratio):
    return "█" * round(10 * ratio)


def print_rows(rows):
    """A table of one drafter, rule and temperature, with the best gamma by measurement and by theory."""
    first = rows[0]
    print(f"\ndrafter {first['drafter']}, verify {first['verify']}, temperature {first['temperature']:g}, "
          f"{first['new_tokens']} new tokens, plain {first['plain_tokens_per_s']:.0f} tokens/s")
    print("       tokens per pass            accepted                                    speedup")
    print("gamma  measured  expected  Eq. 1   /tested      c     v  tokens/s  predicted  measured (least to most)")
    for row in rows:
        eq1 = f"{row['eq1']:.2f}" if row["verify"] == "token" else "-"  # equation 1 is of the token rule
        print(f"{row['gamma']:5}{row['tokens_per_pass']:10.2f}{row['expected']:10.2f}{eq1:>7}"
              f"{row['alpha']:10.3f}{row['c']:7.3f}{row['v']:6.2f}"
              f"{row['speculative_tokens_per_s']:10.0f}{row['predicted']:11.2f}"
              f"{row['speedup']:10.2f} ({row['speedup_min']:.2f} to {row['speedup_max']:.2f})  {bar(row['speedup'])}")
    best, foretold = (max(rows, key=lambda row: row[key]) for key in ("speedup", "predicted"))
    print(f"best gamma: {best['gamma']} measured ({best['speedup']:.2f}x), "
          f"{foretold['gamma']} by theory ({foretold['predicted']:.2f}x)")


# ---------------------------------------------------------------- trace: one round at a time

def visible(text):
    """Text on one line, with a sign for each line break and an escape for what does not print."""
    return "".join(c if c.isprintable() else "⏎" if c == "\n" else c.encode("unicode_escape").decode() for c in text)


def shown(token, encoding):
    """A token in a table: spaces as dots, and half a character as \\xNN."""
    return visible(encoding.decode_single_token_bytes(token).decode("utf-8", "backslashreplace")).replace(" ", "·")


def explain(one, verify, encoding):
    """How a round was decided, as two tables {title: cells}: the drafts, and the token after them.

    All randomness passes through choose. So the rule, run once more with a choose that knows how the coins
    fell, tells what it asked for: the probabilities of the coins, then the distribution of the next token.
    """
    drafted = torch.tensor(one.drafted, dtype=torch.long, device=one.p.device)
    rows, asked = torch.arange(len(drafted), device=one.p.device), []
    drafts = {"draft": [shown(x, encoding) for x in one.drafted],
              "q(x)": one.q[rows, drafted].tolist(), "p(x)": one.p[rows, drafted].tolist()}
    if verify not in SURVIVAL:  # a rule of one's own: its coins are not known
        return drafts | {"verdict": ["accepted" if i < one.accepted else "rejected" for i in range(len(drafted))]}, {}

    def choose(probs):
        asked.append(probs)
        return (rows < one.accepted).long()

    VERIFY[verify](one.p, one.q, drafted, choose)
    coins, *_, next_distribution = asked
    chances, keep = {"min(1, p/q)": coins[:, 1].tolist()}, 1
    if verify == "block":
        keeps = block_keep(one.p, one.q, drafted).tolist()
        chances, keep = {"keep_i": keeps[1:], "h_i": coins[:, 1].tolist()}, keeps[one.accepted]
    fates = [fate(one, i, verify) for i in range(len(drafted))]
    drafts |= {**chances, "coin": [coin for coin, _ in fates], "verdict": [verdict for _, verdict in fates]}
    return drafts, candidates(one, next_distribution, keep, encoding)


def fate(one, i, verify):
    """How the coin of draft i fell, "-" where that changed nothing, and what became of the draft."""
    if i < one.accepted:
        # The block rule goes by the last coin that came up, whatever came before it.
        decides = verify == "token" or i == one.accepted - 1 < len(one.new) - 1
        return "1" if decides else "-", "accepted"
    if one.accepted == len(one.new):
        return "-", "after the end"
    if verify == "token" and i > one.accepted:
        return "-", "not tested"
    return "0", "rejected"


def candidates(one, next_distribution, keep, encoding, most=4):
    """The likeliest tokens that the correction or bonus was drawn from, and the drawn one, as a table."""
    n, token, writer = one.accepted, one.new[-1], one.writers[-1]
    if writer == "draft":
        return {}  # a draft ended the text
    top = next_distribution.topk(min(most, len(next_distribution))).indices.tolist()
    ids = [i for i in top if i == token or next_distribution[i] > 5e-4] + [token] * (token not in top)
    table = {"next": [shown(i, encoding) for i in ids], "p": one.p[n, ids].tolist()}
    if writer == "correction":
        left = f"norm(max(0, {'' if keep == 1 else f'{keep:.3f} '}p - q))"
        table |= {"q": one.q[n, ids].tolist(), left: next_distribution[ids].tolist()}
    return table | {"drawn": [writer if i == token else "" for i in ids]}


def score(rounds):
    """The figures of these rounds, each by its name."""
    counts = tally(rounds)
    return {"tokens": counts["new_tokens"], "target passes": counts["passes"],
            "tokens a pass": f"{counts['new_tokens'] / max(1, counts['passes']):.2f}",
            "accepted/tested": f"{counts['accepted']}/{counts['tested']}"}


def sentences(rounds):
    """The last of these rounds, the cache in it, and the score so far."""
    one = rounds[-1]
    end = "which ends the text" if one.writers[-1] == "draft" else f"then a {one.writers[-1]}"
    return (f"round {len(rounds)}: {len(one.drafted)} drafted, {one.accepted} accepted, {end}",
            "target's cache: {} tokens before the pass, {} after it, {} after the rollback".format(*one.cache),
            "so far: " + ", ".join(f"{value} {name}" for name, value in score(rounds).items()))


def trace(pair, options, warp):
    """Tell every round on the screen, or write them to a page. Returns the counts."""
    prompt, _, rounds = prompt_and_rounds(pair, options, warp)
    rounds = list(rounds)
    if options.trace is True:
        for told in trace_text(prompt, rounds, pair.encoding, options.verify):
            print(told)
    else:
        names = ("drafter", "verify", "gamma", "temperature", "top_k", "top_p", "seed")
        page = trace_html(prompt, rounds, pair.encoding, {name: getattr(options, name) for name in names})
        Path(options.trace).write_text(page, encoding="utf-8", errors="replace")
        print(f"wrote {options.trace}: open it in a browser")
    return tally(rounds)


def trace_text(prompt, rounds, encoding, verify):
    """Yields each round as text: the context, the drafts and their coins, the token after them, the score."""
    text, spell, done = prompt, speller(encoding), []
    for one in rounds:
        done.append(one)
        summary, *rest = sentences(done)
        context = "…" * (len(text) > 60) + visible(text[-60:])
        tables = [line for table in explain(one, verify, encoding) for line in text_table(table)]
        yield "\n    ".join([summary, context, *tables, *rest]) + "\n"
        text += "".join(map(spell, one.new))


def text_table(table):
    """Lines of text, coloured by their last cells. The last number of a line is what was drawn from: it gets a bar."""
    if not any(table.values()):
        return []  # no drafts in this round, or no token after them
    columns = [[title, *(cell if isinstance(cell, str) else f"{cell:.3f}" for cell in cells)]
               for title, cells in table.items()]
    drawn_from = max(i for i, cells in enumerate(table.values()) if isinstance(cells[0], float))
    columns[drawn_from][1:] = [f"{x} {'█' * round(20 * float(x))}" for x in columns[drawn_from][1:]]
    widths = [max(map(len, column)) for column in columns]
    head, *rows = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in zip(*columns)]
    return [head] + [coloured(row, mark) for row, mark in zip(rows, columns[-1][1:])]


def trace_html(prompt, rounds, encoding, settings):
    """The same as one page that needs nothing else: the text by who wrote what, and each round behind its tokens.

    settings: {name: value} for the heading, among them "verify".
    """
    rounds, spell = list(rounds), speller(encoding)
    writers = [writer for one in rounds for writer in one.writers]
    tokens = [token for one in rounds for token in one.new]
    pieces = iter([spell(token, final=i == len(tokens)) for i, token in enumerate(tokens, 1)])
    text = ""
    for number, one in enumerate(rounds, 1):
        spans = "".join(html_token(piece, writer) for writer, piece in zip(one.writers, pieces))
        tables = "".join(map(html_table, explain(one, settings["verify"], encoding)))
        summary, *rest = map(html.escape, sentences(rounds[:number]))
        text += (f'<span class="round"><a href="#{number}">{spans}</a><section id="{number}"><nav>'
                 f'<a href="#{max(1, number - 1)}">←</a><a href="#{min(len(rounds), number + 1)}">→</a><b>{summary}</b>'
                 f'<a class="close" href="#0">×</a></nav>{tables}<p>{"<p>".join(rest)}</section></span>')
    legend = [f'<span><span class="{writer}">{writer}</span> {writers.count(writer)}</span>' for writer in COLOURS]
    figures = [f"<span><b>{value}</b> {name}</span>" for name, value in score(rounds).items()]
    asked = ", ".join(f"{name} {value}" for name, value in settings.items() if value is not None)
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>Speculative decoding, round by round</title>
<style>{STYLE}</style>
<header><h1>Speculative decoding, round by round</h1>
<p class="figures">{" ".join(figures)}
<p>{html.escape(asked)}
<p class="figures">{" ".join(legend)}
<p>Choose a token to open its round. The keys ← and → go from round to round.</header>
<main><i>{html.escape(prompt)}</i>{text}</main>
<script>{SCRIPT}</script></html>
"""


def html_token(text, writer):
    return f'<span class="{writer}{" line-break" * (chr(10) in text)}">{html.escape(text)}</span>'


def html_table(table):
    """A row takes the shade of its last cell; a number has a bar behind it."""
    def cell(value):
        if isinstance(value, str):
            return f"<td>{html.escape(value)}</td>"
        return f'<td class="number" style="--x:{value:.3f}">{value:.3f}</td>'

    head = "".join(f"<th>{html.escape(title)}</th>" for title in table)
    rows = "".join(f'<tr class="{row[-1]}">{"".join(map(cell, row))}</tr>' for row in zip(*table.values()))
    return f"<table><tr>{head}</tr>{rows}</table>" if rows else ""


# Green, orange and blue that colour-blind readers can tell apart, and three kinds of underline. A round is
# open while its number is the fragment of the address: at the side of a wide screen, at the foot of a narrow one.
STYLE = """
:root { color-scheme: light dark; --draft: 0 158 115; --correction: 213 94 0; --bonus: 0 114 178; --c: 128 128 128;
  font: clamp(16px, 12px + .5vw, 26px)/1.6 system-ui, sans-serif; }
@media (prefers-color-scheme: dark) { :root { --draft: 30 190 145; --correction: 255 140 60; --bonus: 90 175 245; } }
body, h1 { margin: 0; }
h1 { font-size: 1.1rem; }
p { margin: .3rem 0; }
header, main { padding: .6rem 1rem; }
.figures > span { display: inline-block; margin-right: 1.2em; }
.figures b { font-size: 1.4rem; }
main, td:first-child { font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
main { white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.9; }
main > i { font-style: normal; opacity: .7; }
.draft, .accepted { --c: var(--draft); }
.correction, .rejected { --c: var(--correction); }
.bonus { --c: var(--bonus); }
.round span, .figures span span { background: rgb(var(--c) / .2); padding: .15em 0; border-right: 1px solid Canvas; }
span.draft { border-bottom: 2px solid rgb(var(--c)); }
span.correction { border-bottom: 5px double rgb(var(--c)); }
span.bonus { border-bottom: 3px dotted rgb(var(--c)); }
.line-break::before { content: "⏎"; opacity: .5; }
a { color: inherit; text-decoration: none; }
.round > a { border-left: 2px solid rgb(var(--c)); padding: .15em 0; scroll-margin: 4rem 0 65vh; }
.round > a:hover, .round:has(:target) > a { outline: 3px solid; }
section { display: none; position: fixed; z-index: 1; inset: auto 0 0; max-height: 62vh; overflow: auto; padding: .4rem 1rem;
  box-sizing: border-box; border-top: 3px solid; background: Canvas; font: .9rem/1.5 system-ui, sans-serif;
  white-space: normal; overflow-wrap: normal; }
section:target { display: block; }
body:has(:target) main { padding-bottom: 65vh; }
nav { display: flex; align-items: center; gap: .6em; }
nav a { padding: 0 .6em; font-size: 1.4em; border: 1px solid rgb(var(--c)); border-radius: .3em; }
nav b { flex: 1; }
table { border-collapse: collapse; margin: .6rem 0; width: 100%; }
th, td { padding: .1em .3em; text-align: left; }
th { font-size: .85em; }
td:first-child { overflow-wrap: anywhere; min-width: 3em; }
td + td { white-space: nowrap; }
td:last-child { color: rgb(var(--c)); font-weight: bold; }
.number { background: linear-gradient(rgb(var(--c) / .3) 0 0) no-repeat 0 / calc(var(--x) * 100%); }
@media (min-width: 60rem) {
  header, main { margin-right: 45vw; }
  section { inset: 0 0 0 auto; width: 45vw; max-height: none; border: 0; border-left: 3px solid; font-size: 1rem; }
  body:has(:target) main { padding-bottom: .6rem; }
  .round > a { scroll-margin: 4rem 0; }
  .close { display: none; }
  :root:not(:has(:target)) main > i + .round section { display: block; }
}
"""

SCRIPT = """
const show = () => document.getElementById(location.hash.slice(1))?.previousSibling.scrollIntoView({block: "nearest"});
onload = onhashchange = show;
onkeydown = event => {
  const step = {ArrowLeft: -1, ArrowRight: 1}[event.key], to = (+location.hash.slice(1) || 1) + step;
  if (step && !event.altKey && document.getElementById(to)) { location.replace("#" + to); event.preventDefault(); }
};
"""


# ---------------------------------------------------------------- command line

def main(arguments=None):
    if hasattr(sys.stdout, "reconfigure"):  # a notebook's output has none
        sys.stdout.reconfigure(errors="replace")  # a pipe may not be able to say every character
    options = parse(arguments)
    try:
        check(options)
        pair = trained_pair(options, pick_device(options.device))

        def warp_at(temperature):
            return functools.partial(warp, temperature=temperature, top_k=options.top_k, top_p=options.top_p)

        if options.bench:
            figures = bench(pair, options, warp_at)
        else:
            figures = (trace if options.trace else generate)(pair, options, warp_at(options.temperature))
        if options.json:
            Path(options.json).write_text(json.dumps(figures, indent=1), encoding="utf-8")
    except (ValueError, OSError) as error:
        if sys.flags.dev_mode:  # python -X dev: the traceback, for those who change the code
            raise
        sys.exit(fail(error))
    except KeyboardInterrupt:
        print("\ninterrupted")
        sys.exit(130)


def parse(arguments):
    parser = argparse.ArgumentParser(description="Speculative decoding with a tiny pair of models.")
    parser.add_argument("prompt", nargs="?", help="text to continue (default: a piece of held-out text)")
    parser.add_argument("--max-new", type=int, default=200, metavar="N", help="tokens to write (default 200)")
    parser.add_argument("--gamma", type=int, default=4, help="tokens drafted in a round (default 4)")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="T", help="0 is greedy (default 1)")
    parser.add_argument("--top-k", type=int, metavar="K", help="keep the K likeliest tokens (default: all)")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P",
                        help="keep the fewest likeliest tokens that add up to P (default 1: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--drafter", choices=tuple(DRAFTERS), default="model",
                        help="a small model, or the text so far")
    parser.add_argument("--verify", choices=tuple(VERIFY), default="token",
                        help="token by token, or the run as a block")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--trace", nargs="?", const=True, metavar="FILE.html",
                      help="tell every round, on the screen or as a page; write the prompt before it")
    mode.add_argument("--bench", action="store_true",
                      help="where the time goes, at settings of its own: gamma 1 to 8, temperature 0 and 1 (minutes)")
    parser.add_argument("--json", metavar="FILE", help="write the figures to FILE too")
    parser.add_argument("--checkpoint", metavar="DIR",
                        help="a pair trained by train_tiny.py (default: checkpoints/tiny)")
    parser.add_argument("--device", help="cpu or cuda (default: cuda where there is one)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float64"),
                        help="of both models (default: the fastest)")
    return parser.parse_args(arguments)


def check(options):
    """Raises ValueError for what can be seen to be wrong before any work is done."""
    if options.gamma < 1:
        raise ValueError(f"gamma must be at least 1, not {options.gamma}")
    if options.max_new < 0:
        raise ValueError(f"max-new must be at least 0, not {options.max_new}")
    check_seed(options.seed)
    if isinstance(options.trace, str) and not options.trace.endswith(".html"):
        raise ValueError(f"--trace writes to a file that ends in .html, not {options.trace!r}: "
                         "a prompt goes before --trace")
    for path in (options.json, options.trace):
        if isinstance(path, str) and not Path(path).parent.is_dir():
            raise ValueError(f"cannot write {path}: there is no directory {Path(path).parent}")
    warp(torch.zeros(1), options.temperature, options.top_k, options.top_p)


def trained_pair(options, device):
    """The pair asked for. Where the default one is not there yet, train it and keep it."""
    dtype = getattr(torch, options.dtype) if options.dtype else None
    directory = options.checkpoint or CHECKPOINTS / "tiny"
    if options.checkpoint is None and not pair_path(directory).exists():
        print("no trained pair yet: training one, at most 5 minutes, once")
        train_and_keep(PRESETS["tiny"], read_documents(standard_library()), device, directory)
    return load_pair(directory, device, dtype)


if __name__ == "__main__":
    main()
