"""The steps of the ladder as a student would write them, in place of the stubs of ladder.py."""

import torch

from specdec import Round, check_room


def residual(p, q):
    left = (p - q).clamp(min=0)
    total = left.sum(-1, keepdim=True)
    return torch.where(total > 0, left / total, p)


def verify_token(p, q, drafted, choose):
    n = 0
    for i, x in enumerate(drafted):
        accept = (p[i, x] / q[i, x]).clamp(max=1)
        if choose(torch.stack([1 - accept, accept])) == 0:
            break
        n += 1
    if n < len(drafted):
        token = choose(residual(p[n], q[n]))
    else:
        token = choose(p[n])
    return torch.tensor(n, device=p.device), token


def feed(tokens, length, drafts):
    new = tokens[length:]
    ids = new + drafts
    first = len(new) - 1  # the row of the text's last token
    rows = list(range(first, first + len(drafts) + 1))
    return ids, rows


def commit(tokens, cache, drafts, n, token, eos):
    new = []
    for x in drafts[:n] + [token]:
        new.append(x)
        if x == eos:
            break
    tokens += new
    cache.length = len(tokens) - 1
    return new


class DraftModel:
    def __init__(self, model, warp):
        self.model, self.warp, self.cache = model, warp, model.new_cache()

    @torch.inference_mode()
    def __call__(self, tokens, gamma, choose):
        device, vocab_size = self.model.device, self.model.config.vocab_size
        drafted = torch.empty(0, dtype=torch.long, device=device)
        q = torch.empty(0, vocab_size, device=device)
        self.cache.length = min(self.cache.length, len(tokens) - 1)
        ids = torch.tensor([tokens[self.cache.length:]], device=device)
        room = self.model.config.context + 1 - len(tokens)
        for i in range(min(gamma, room)):
            row = self.warp(self.model(ids, self.cache)[0, -1])
            x = choose(row)
            drafted, q = torch.cat([drafted, x.view(1)]), torch.cat([q, row[None]])
            ids = x.view(1, 1)
        return drafted, q


def one_round(target, cache, propose, tokens, *, gamma, warp, choose, verify, eos):
    before = cache.length
    drafted, q = propose(tokens, gamma, choose)
    drafts = drafted.tolist()
    ids, rows = feed(tokens, before, drafts)
    logits = target(torch.tensor([ids], device=target.device), cache)
    p = warp(logits[0, rows])
    after = cache.length
    n, token = verify(p, q, drafted, choose)
    new = commit(tokens, cache, drafts, n.item(), token.item(), eos)
    return Round(drafts, min(n.item(), len(new)), new, (before, after, cache.length), p, q)


@torch.inference_mode()
def speculative(target, propose, tokens, max_new, *, gamma, warp, choose, verify, eos=None):
    check_room(target, tokens, max_new)
    tokens, cache = list(tokens), target.new_cache()
    end = len(tokens) + max_new
    while len(tokens) < end:
        asked = min(gamma, end - len(tokens) - 1)
        one = one_round(target, cache, propose, tokens, gamma=asked, warp=warp, choose=choose,
                        verify=verify, eos=eos)
        yield one
        if one.new[-1] == eos:
            break
