"""Wrong answers to the ten: lines of answers.py, what a student may write there, and words of the
failure."""

LAW = "does not have the target's law"
NOT_PLAIN = "plain decoding on the same noise writes"
PROBABILITY = "the (n, token)"
TRAINED = "where 300 steps of Adam"
TRAINED_HEAD = "with its own head 1 - alpha is"
PROPOSE = "    def propose(tokens, gamma, choose):\n"
COUNTS = "counts = torch.full((vocab_size, vocab_size), smoothing, dtype=torch.float64)\n"
STAND = "none, candidate 1 and candidate 2 stand with the probabilities"
FROM_1 = ("return which, choose(p[which]).item()\n        left = residual(left, q)\n"
          "    return 0,")
LINE = "least sum of squares"
LENGTH = ("len(tokens) - before == had + 1  # the target adds one of its own\n"
          "            wanted = had + 1 if all_stood else max(1, had - 1)\n"
          "        drafted, q = propose(tokens, min(wanted, gamma), choose)\n"
          "        before, had = len(tokens)")
WRITES = "it writes into its argument"

WRONG = {  # exercise: [(old lines, new lines, words of the failure)]
    "verify_match": [
        (".cumprod(0).sum()\n    return n, own[n]", ".sum()\n    return n, own[n]", PROBABILITY),
        ("return n, own[n]", "return n, choose(p[n])", PROBABILITY),  # a draft has two chances
        ("return n, own[n]", "return n, choose(residual(p[n], q[n] if len(q) > n else p[n] * 0))",
         PROBABILITY),
        ("return n, own[n]", "return n, own[-1]", PROBABILITY),
        ("== drafted)", "== choose(q))", PROBABILITY),
        ("choose(p)", "p.argmax(-1)", PROBABILITY),
        ("own = choose(p)", "return verify_token(p, q, drafted, choose)\n    own = choose(p)",
         PROBABILITY),  # lossless, but another rule
        ("return n, own[n]", "return n[None], own[n][None]", "right is a tensor of shape ()"),
        ("return n, own[n]", "return n.item(), own[n].item()", "n is 2 (int); right is a tensor"),
        ("return n, own[n]", "return own[n]", "right is (n, token)"),
        ("choose(p)", "torch.multinomial(p, 1)[:, 0]", "draw with choose"),
        ("return n, own[n]", "return n, own[int(n[None][:len(drafted)])]", "it crashes"),
        ("return n, own[n]", "return n.clamp(max=3), own[n]", PROBABILITY),
        ("return n, own[n]", "drafted.zero_()\n    return n, own[n]", WRITES),
    ],
    "one_sided_top_p": [
        ("(p / q).clamp", "(p / drawn).clamp", "the first token"),
        ("residual(p, q)", "residual(p, drawn)", "the first token"),
        ("rejected * residual(p, q)", "rejected * p", "the first token"),
        ("residual(p, q)", "(p - q).clamp(min=0)", "the first token"),
        ("(drawn * (1 - accept))", "(q * (1 - accept))", "the first token"),
        ("warp(q.log(), top_p=top_p)", "q.where(warp(q.log(), top_p=top_p) > 0, 0)",
         "the first token"),
        (".sum().item() / 2", ".sum().item()", "total variation distance"),
        ("gain > 1e-9", "gain > 0", "the set of those that gain"),
        ("(gain > 1e-9)", "(drawn > 0)", "the set of those that gain"),
        ("return law, ", "return ", "right is (law, distance, gainers)"),
        (".sum().item() / 2", ".sum() / 2", "no float"),
        ("residual(p, q)", "(left := (p - q).clamp(min=0)) / left.sum()",
         "the law of the first token is [nan nan nan]"),
    ],
    "fit": [
        ('sum(row["accepted"] for row in rows) / sum(row["tested"] for row in rows)',
         'sum(row["alpha"] for row in rows) / len(rows)', "alpha is"),
        ('sum(row["accepted"] for row in rows) / sum(row["tested"] for row in rows)',
         'rows[0]["alpha"]', "alpha is"),
        ('sum(row["tested"]', 'sum(row["drafted"]', "alpha is"),
        ('[row["tokens_per_pass"] / row["speedup"]',
         '[expected_tokens(alpha, row["gamma"]) / row["speedup"]', LINE),
        ("    drafts = torch", "    rows = [rows[0], rows[-1]]\n    drafts = torch", LINE),
        ('row["drafted"] / row["passes"]', 'row["gamma"]', LINE),
        ("    speedups = [1.0]", "    v = 1.0\n    speedups = [1.0]", LINE),
        ("    speedups = [1.0]", "    c = max(c, 0.0)\n    speedups = [1.0]", LINE),
        ("    speedups = [1.0]", "    v = max(v, 1.0)\n    speedups = [1.0]", LINE),
        ("gamma, c, v))", "gamma, c, 1.0))", "gamma is 7; right is 10"),
        ("range(1, 21)", "range(1, 20)", "gamma is 19; right is 20"),
        ("expected_tokens(alpha, gamma)", "(1 - alpha ** (gamma + 1)) / (1 - alpha)",
         "it crashes: ZeroDivisionError"),
        ("gamma, c, v))", "gamma, c, max(v, 1.0)))", "gamma is 0; right is 1"),
        ("gamma, c, v))", "gamma, max(c, 0.0), v))", "gamma is 0; right is 20"),
        ("    speedups = [1.0]  # of gamma 0, plain decoding\n    for gamma in range(1, 21)",
         "    speedups = []\n    for gamma in range(21)", "gamma is 0; right is 1"),
        ("speedups = [1.0]", "speedups = [0.0]", "right is 0"),
        ("speedups.index(max(speedups))", "speedups.index(max(speedups)) + 1", "gamma is 6"),
    ],
    "adaptive": [
        ("had = len(tokens), len(drafted)", "had = len(tokens), min(wanted, gamma)",
         "of the 1 drafts before 1 stood: the number of drafts asked for is 3; right is 2"),
        ("    before, had, wanted = None, 0, 1\n\n    def adapting(tokens, gamma, choose):\n"
         "        nonlocal", "    global before, had, wanted\n"
         "    before, had, wanted = None, 0, 1\n    def adapting(tokens, gamma, choose):\n"
         "        global", "two texts at once"),
        ("had + 1 if all_stood", "wanted + 1 if all_stood", "of the 1 drafts before 1 stood"),
        ("        before, had = len(tokens), len(drafted)\n", "        if len(drafted):\n"
         "            before, had = len(tokens), len(drafted)\n", "of the 0 drafts before 0 stood"),
        ("        before, had = ", "        if len(q) > 1 and q[-1, drafted[-1]] < 0.5:\n"
         "            drafted, q = drafted[:-1], q[:-1]\n        before, had = ", "biases the law"),
        ("max(1, had - 1)", "max(0, had - 1)", "of the 1 drafts before 0 stood"),
        ("== had + 1  #", "== had  #", "round 2 of a text"),
        (LENGTH, LENGTH.replace("- before", "- len(before)").replace("= len(tokens)", "= tokens"),
         "round 2 of a text"),  # the loop's own list, which grows
        ("max(1, had - 1)", "1", "of the 3 drafts before 1 stood"),
        ("max(1, had - 1)", "max(1, len(tokens) - before - 1)", "of the 3 drafts before 1 stood"),
        ("None, 0, 1\n", "None, 0, 100\n", "round 1 of a text"),
        ("propose(tokens, min(wanted, gamma), choose)", "propose(tokens, wanted, choose)",
         "asked for is 5; right is 4"),
        ("propose(tokens, min(wanted, gamma), choose)",
         "(x[:min(wanted, gamma)] for x in propose(tokens, gamma, choose))", "round 1 of a text"),
        ("        before, had = len(tokens), len(drafted)",
         "        keep = (q.gather(-1, drafted[:, None])[:, 0] > 0.5).cumprod(0).sum()\n"
         "        drafted, q = drafted[:keep], q[:keep]\n"
         "        before, had = len(tokens), len(drafted)", "biases the law"),
    ],
    "ngram": [
        (PROPOSE + "        " + COUNTS, "    " + COUNTS + PROPOSE, "the row of q is"),
        ("choose(q[-1:])])", "choose(q[-1:])])\n            counts[drafted[-2], drafted[-1]] += 1\n"
         "            table = counts / counts.sum(-1, keepdim=True)", "the row of q is"),
        ("zip(tokens, tokens[1:])", "zip(tokens[-3:], tokens[-2:])", "the row of q is"),
        ("counts[a, b] += 1", "counts[b, a] += 1", "the row of q is"),
        ("counts[a, b] += 1", "counts[a, b] = 1 + smoothing", "the row of q is"),
        ("(vocab_size, vocab_size), smoothing", "(vocab_size, vocab_size), 0.1", "the row of q is"),
        ("choose(q[-1:])", "q[-1:].argmax(-1)", "not what they were drawn from"),
        ("        return drafted[1:], q",
         "        return drafted[1:], torch.eye(vocab_size, dtype=q.dtype)[drafted[1:]]",
         "not one-hot"),
        ("table[drafted[-1:]]", "table[drafted[:1]]", "the row of q is"),
        ("drafted[1:], q\n", "drafted[1:], q.float()\n", "in torch.float64"),
        ("drafted[1:], q\n", "drafted, q\n", "right is a tensor of shape (0,)"),
        ("drafted = torch.cat([drafted, choose(q[-1:])])", "tokens.append(choose(q[-1]).item())\n"
         "            drafted = torch.cat([drafted, torch.tensor(tokens[-1:])])",
         "the caller's list of tokens is"),
        ("        return drafted[1:], q", "        return torch.stack(list(drafted[1:])), q",
         "non-empty TensorList"),
        ("choose(q[-1:])", "torch.multinomial(q[-1:], 1)[0]", "draw with choose"),
    ],
    "shared_noise": [
        ("rows = iter(noise[length:])", "rows = iter(noise[length - 1:])", "is for position 3"),
        ("rows = iter(noise[length:])", "rows = iter(noise)", "is for position 3"),
        ("noise[length:length + len(p)]", "noise[length - 1:length - 1 + len(p)]", NOT_PLAIN),
        ("noise[length:length + len(p)]", "noise[length]", NOT_PLAIN),
        ("length = len(tokens)\n", "length = length + gamma + 1 if length else len(tokens)\n",
         "is for position 14"),
        ("lambda probs: (probs / next(rows)).argmax(-1)", "choose", "the loop's own choose"),
        ("        n = (own[:-1] == drafted).cumprod(0).sum()\n        return n, own[n]",
         "        return verify_token(p, q, drafted, choose)", "the loop's own choose"),
        ("noise[length:length + len(p)]", "noise[length:length + 5]", "must match the size"),
        ("        return propose(tokens, gamma, lambda",
         "        while not len(propose(tokens, 1, lambda probs: probs.argmax(-1))[0]):\n"
         "            pass\n        return propose(tokens, gamma, lambda",
         "was called again for the text"),
        ("        rows = iter(noise[length:])\n", "        rows = iter(noise[length:])\n"
         "        while length > 5:\n            pass\n", "shared_noise took more than"),
        (", verify_on_noise", "", "right is (propose, verify)"),
    ],
    "verify_two": [
        ("left = residual(left, q)", "left = (p[0] - q).clamp(min=0)", "that does not sum to 1"),
        ("left = residual(left, q)", "pass", STAND),
        ("return 0, choose(left)", "return 0, choose(residual(p[0], q))", LAW),
        ("return 0, choose(left)", "return 0, choose(p[0])", LAW),
        ("return 0, choose(left)", "return 0, choose(residual(p[0], 2 * q))", LAW),
        ("(1, 2):", "(1,):", STAND),
        ("left = residual(left, q)", "left.copy_(residual(left, q))", WRITES),
        (".item()", "", "right are two ints"),
        ("choose(p[which])", "choose(p[1])", LAW),
        ("choose(p[which])", "choose(p[which - 1])", LAW),
        ("    left = p[0]", "    drafted = drafted[(p[0] / q)[drafted].argsort(descending=True)]\n"
         "    left = p[0]", STAND),
        ("        left = residual(left, q)\n", "        left = residual(left, q)\n"
         "        y = drafted[1]\n        if which == 1 and left[y] >= q[y]:\n"
         "            return 2, choose(p[2]).item()\n        if which == 1:\n            break\n",
         STAND),  # no coin
        ("    left = p[0]", "    token = choose(p[0])\n    for which in (1, 2):\n"
         "        if token == drafted[which - 1]:\n"
         "            return which, choose(p[which]).item()\n"
         "    return 0, token.item()\n    left = p[0]", STAND),  # one draw for both
        (FROM_1, FROM_1.replace("which,", "which - 1,").replace("return 0", "return 2"),
         "the two are counted from 1, and 0 is for none"),
        (FROM_1, FROM_1.replace("which,", "which - 1,").replace("return 0", "return -1"),
         "which is -1; right is 1 or 2"),
    ],
    "early_exit": [
        ("p = target(windows[:, :-1])", "p = target(windows[:, 1:])", TRAINED_HEAD),
        ("lr=0.01", "lr=1e-4", TRAINED_HEAD),
        ("    draft.unembed.load_state_dict(target.unembed.state_dict())\n", "", TRAINED_HEAD),
        ("    return draft", "    draft.config = target.config\n    return draft",
         "config of the draft, which a cache is made by"),
        ("    return draft", "    target.config.n_layer = n_layer\n    return draft",
         "config of the target is"),
        ("    return draft", "    target.requires_grad_(False)\n    return draft", "left frozen"),
        ("    return draft", "    target.requires_grad_()\n    return draft", "were frozen and"),
        ("backward(inputs=weights)", "backward()", "a gradient is left"),
        ("target.blocks[:n_layer]", "__import__('copy').deepcopy(target.blocks[:n_layer])",
         "the same object, not a copy"),
        ("target.blocks[:n_layer]", "target.blocks[-n_layer:]", "the same object, not a copy"),
        ("[draft.unembed.weight]", "[w for w in draft.parameters() if w.requires_grad]",
         "have moved"),
        ("    draft.unembed.load_state_dict(target.unembed.state_dict())",
         "    draft.unembed = target.unembed", "head must be its own"),
        ("target.embed, target.norm", "target.embed, draft.norm", "norm must be the target's"),
        ("range(100)", "range(3)", TRAINED_HEAD),
    ],
    "distill": [
        ("range(300)", "range(100)", TRAINED),
        ("range(300)", "range(299)", TRAINED),
        ("lr=0.05", "lr=0.01", TRAINED),
        ("optimizer = ", "W.data[0, 0] += 1\n    optimizer = ", TRAINED),
        ("optim.Adam", "optim.SGD", "than the one trained"),
        ("-torch.special.entr(p) - p * q.log()", "q * (q / p).log()", "than the one trained"),
        ("-torch.special.entr(p) - p * q.log()", "p * (p / q).log()", "such a token adds 0"),
        ("        q = (contexts @ W)", "        q = (contexts @ W).masked_fill(p == 0, -1e9)",
         "such a token adds 0"),
        ("1 - torch.minimum(p, q).sum(-1)", "((p - q) ** 2).sum(-1)",
         "trained for total variation reaches"),
        ("losses[loss]", 'losses["forward KL"]', "trained for reverse KL has more of it"),
        (".softmax(-1).detach()", ".softmax(-1)", "must be detached"),
        ("return (contexts @ W).softmax(-1)", "return (contexts @ W)", "rows that sum to 1"),
        ("return (contexts @ W).softmax(-1)", "return q", TRAINED),  # of the W before the last step
    ],
    "speculative_batch": [
        ("warp(target(ids))", "target(ids).softmax(-1)", "two texts in a batch"),
        ("min(gamma, left - 1)", "gamma", "3 drafts were asked for"),
        ("whole[i] += drafted[:n].tolist() + [token.item()]",
         "drafts[open_texts.index(i)] = drafted[:n].tolist() + [token.item()]\n"
         "        for i, new in zip(open_texts, drafts):\n"
         "            whole[i] += new[:min(map(len, drafts))]", "each text keeping all"),
        ("p = warp(target(ids))", "p = warp(torch.cat([target(row[None]) for row in ids]))",
         "one a round for all"),
        ("ids + [0] * (width - len(ids)) for", "[0] * (width - len(ids)) + ids for",
         "new tokens of three texts"),
        ("p = warp(target(ids))", "again = [*range(len(ids)), *[0] * (len(texts) - len(ids))]\n"
         "        p = warp(target(ids[again]))[:len(ids)]", "takes no part any more"),
        ("ids + [0] *", "ids + [-1] *", "not all of which are ids of the vocabulary"),
        ("p_of_text[len(whole[i]) - 1:len(ids)]", "p_of_text[-len(drafted) - 1:]",
         "new tokens of three texts"),
        ("p_of_text[len(whole[i]) - 1:len(ids)]", "p_of_text[len(whole[i]):len(ids) + 1]",
         "it crashes"),
        ("    while open_texts := [i for i, text in enumerate(whole) if len(text) < ends[i]]:",
         "    while all(len(text) < end for text, end in zip(whole, ends)):\n"
         "        open_texts = range(len(whole))", "new tokens of three texts"),
        ("if len(text) < ends[i]]:", "if any(len(t) < e for t, e in zip(whole, ends))]:",
         "was drafted for once more"),
        ("n, token = verify_token(judges, q, drafted, choose)",
         "n = (judges[:-1].argmax(-1) == drafted).cumprod(0).sum()\n"
         "            token = choose(judges[n])", "two texts in a batch"),
        ("[list(text) for text in texts], [len", "texts, [len", "have been changed"),
        ("text[len(given):] for", "text for", "new tokens of three texts"),
        ("text[len(given):] for", "text[-max_new:] for", "with max_new 0"),
        ("proposes[i](whole[i]", "proposes[open_texts.index(i)](whole[i]", "for another text"),
        ("        for i, p_of_text, ids, (drafted, q) in zip(open_texts, p, rows, drafts):\n",
         "        for i, p_of_text, ids, (drafted, q) in zip(open_texts, p, rows, drafts):\n"
         "            if not len(drafted):\n                continue\n",
         "was called again for the text"),
    ],
}
