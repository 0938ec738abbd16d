"""A rule and a drafter of your own. Change them, and every program uses them:

    python specdec.py --use examples/mine.py --verify mine --drafter mine
    python -m programs.trace --use examples/mine.py --drafter mine
    python -m programs.bench --use examples/mine.py --drafter mine --gamma 4
    python -m pytest tests/law -p examples.mine -k mine          is it still lossless?
"""

import torch
import torch.nn.functional as F

from variants import DRAFTERS, RULES


def verify_mine(p, q, drafted, choose):
    """(k+1, V), (k, V), (k,) -> n and token, (). Here no draft stands: lossless, and slow."""
    n = torch.zeros((), dtype=torch.long, device=p.device)
    return n, choose(p[0])


def drafter_mine(pair, warp):
    """Makes the drafter of one text. This one says the last token again, gamma times."""
    def propose(tokens, gamma, choose):  # tokens: a list, all ids so far
        drafted = torch.tensor(tokens[-1:] * gamma, dtype=torch.long, device=pair.target.device)
        q = F.one_hot(drafted, pair.target.config.vocab_size).float()  # nothing was drawn
        return drafted, q  # (k,), (k, V), with k from 0 to gamma

    return propose


RULES["mine"] = verify_mine
DRAFTERS["mine"] = drafter_mine
