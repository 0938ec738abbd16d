"""The answers to the ten exercises, in place of the stubs of exercises.py."""

from dataclasses import replace

import torch

from model import GPT
from programs.bench import expected_speedup, expected_tokens
from sampling import residual, verify_token, warp
from train_tiny import total_variation


# ---------------------------------------------------------------- 1. sample and match

def verify_match(p, q, drafted, choose):
    own = choose(p)  # (k+1,)
    n = (own[:-1] == drafted).cumprod(0).sum()
    return n, own[n]


# ---------------------------------------------------------------- 2. top-p on one side only

def one_sided_top_p(p, q, top_p):
    drawn = warp(q.log(), top_p=top_p)  # (V,)
    accept = (p / q).clamp(max=1)  # (V,)
    rejected = (drawn * (1 - accept)).sum()
    law = drawn * accept + rejected * residual(p, q)
    gain = law - p
    return law, gain.abs().sum().item() / 2, set((gain > 1e-9).nonzero()[:, 0].tolist())


# ---------------------------------------------------------------- 3. from measurements to gamma

def fit(rows):
    alpha = sum(row["accepted"] for row in rows) / sum(row["tested"] for row in rows)
    drafts = torch.tensor([row["drafted"] / row["passes"] for row in rows], dtype=torch.float64)
    costs = [row["tokens_per_pass"] / row["speedup"] for row in rows]
    known = torch.stack([drafts, torch.ones_like(drafts)], -1)  # (rows, 2)
    costs = torch.tensor(costs, dtype=torch.float64)[:, None]
    c, v = torch.linalg.lstsq(known, costs).solution[:, 0].tolist()
    speedups = [1.0]  # of gamma 0, plain decoding
    for gamma in range(1, 21):
        speedups.append(expected_speedup(expected_tokens(alpha, gamma), gamma, c, v))
    return alpha, c, v, speedups.index(max(speedups))


# ---------------------------------------------------------------- 4. a draft length that adapts

def adaptive(propose):
    before, had, wanted = None, 0, 1

    def adapting(tokens, gamma, choose):
        nonlocal before, had, wanted
        if before is not None:
            all_stood = len(tokens) - before == had + 1  # the target adds one of its own
            wanted = had + 1 if all_stood else max(1, had - 1)
        drafted, q = propose(tokens, min(wanted, gamma), choose)
        before, had = len(tokens), len(drafted)
        return drafted, q

    return adapting


# ---------------------------------------------------------------- 5. an n-gram drafter

def ngram(vocab_size, device, smoothing=0.1):
    def propose(tokens, gamma, choose):
        counts = torch.full((vocab_size, vocab_size), smoothing, dtype=torch.float64)
        for a, b in zip(tokens, tokens[1:]):
            counts[a, b] += 1
        table = (counts / counts.sum(-1, keepdim=True)).to(device)  # (V, V)
        drafted, q = torch.tensor(tokens[-1:], device=device), table[:0]
        for _ in range(gamma):
            q = torch.cat([q, table[drafted[-1:]]])
            drafted = torch.cat([drafted, choose(q[-1:])])
        return drafted[1:], q

    return propose


# ---------------------------------------------------------------- 6. shared noise

def shared_noise(propose, noise):
    length = 0  # of the text, as propose was last told

    def propose_on_noise(tokens, gamma, choose):
        nonlocal length
        length = len(tokens)
        rows = iter(noise[length:])
        return propose(tokens, gamma, lambda probs: (probs / next(rows)).argmax(-1))

    def verify_on_noise(p, q, drafted, choose):
        own = (p / noise[length:length + len(p)]).argmax(-1)  # (k+1,)
        n = (own[:-1] == drafted).cumprod(0).sum()
        return n, own[n]

    return propose_on_noise, verify_on_noise


# ---------------------------------------------------------------- 7. two drafts for one position

def verify_two(p, q, drafted, choose):
    left = p[0]  # what is still to cover
    for which in (1, 2):
        x = drafted[which - 1]
        accept = (left[x] / q[x]).clamp(max=1)
        if choose(torch.stack([1 - accept, accept])) == 1:
            return which, choose(p[which]).item()
        left = residual(left, q)
    return 0, choose(left).item()


# ---------------------------------------------------------------- 8. early exit

def early_exit(target, n_layer, windows):
    config = replace(target.config, n_layer=n_layer)
    draft = GPT(config).to(target.device, target.embed.weight.dtype)
    draft.embed, draft.norm, draft.blocks = target.embed, target.norm, target.blocks[:n_layer]
    draft.unembed.load_state_dict(target.unembed.state_dict())
    weights = [draft.unembed.weight]
    optimizer = torch.optim.Adam(weights, lr=0.01)
    with torch.no_grad():
        p = target(windows[:, :-1]).softmax(-1)  # (B, T, V)
    for _ in range(100):
        optimizer.zero_grad()
        total_variation(draft, windows, p).backward(inputs=weights)
        optimizer.step()
    return draft


# ---------------------------------------------------------------- 9. what to distil for

def distill(p, contexts, loss):
    W = p.new_zeros(contexts.shape[1], p.shape[1], requires_grad=True)  # (D, V)
    optimizer = torch.optim.Adam([W], lr=0.05)
    for _ in range(300):
        q = (contexts @ W).softmax(-1)  # (N, V)
        losses = {"forward KL": (-torch.special.entr(p) - p * q.log()).sum(-1),
                  "reverse KL": (q * (q / p).log()).sum(-1),
                  "total variation": 1 - torch.minimum(p, q).sum(-1)}
        optimizer.zero_grad()
        losses[loss].mean().backward()
        optimizer.step()
    return (contexts @ W).softmax(-1).detach()


# ---------------------------------------------------------------- 10. a batch of texts

@torch.inference_mode()
def speculative_batch(target, proposes, texts, max_new, gamma, warp, choose):
    whole, ends = [list(text) for text in texts], [len(text) + max_new for text in texts]
    while open_texts := [i for i, text in enumerate(whole) if len(text) < ends[i]]:
        drafts = []
        for i in open_texts:
            left = ends[i] - len(whole[i])
            drafts.append(proposes[i](whole[i], min(gamma, left - 1), choose))
        rows = [whole[i] + drafted.tolist() for i, (drafted, _) in zip(open_texts, drafts)]
        width = max(map(len, rows))
        ids = torch.tensor([ids + [0] * (width - len(ids)) for ids in rows], device=target.device)
        p = warp(target(ids))  # (B, width, V)
        for i, p_of_text, ids, (drafted, q) in zip(open_texts, p, rows, drafts):
            judges = p_of_text[len(whole[i]) - 1:len(ids)]  # (k+1, V)
            n, token = verify_token(judges, q, drafted, choose)
            whole[i] += drafted[:n].tolist() + [token.item()]
    return [text[len(given):] for text, given in zip(whole, texts)]
