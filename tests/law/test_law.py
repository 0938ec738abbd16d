"""The theorem of the technique, checked on the code as it is: the text follows the target's own
distribution.

The real loop runs with real models and their caches, once for every way that its draws can fall
(exact.py). The law of its text is set against the target alone, computed from forward passes
without a cache. In float64 the two agree to about 1e-15, so 1e-12 is equality. A fault on the
draft's side leaves the law right and only costs speed, so the mean number of target passes is set
against a calculation of its own as well, and what each model reads is looked at.
"""

import functools
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from exact import EXACT, check_law, expectation, law, marginal
from rigs import (DEVICE, EOS, PROMPT, WARPS, WAYS, Bigram, Foreign, Scripted, Spy, Told,
                  autoregressive_law, check_text_law, decode, from_texts, greedy, histories,
                  identity_rig, one_round, our_rules, random_gpt, reference_passes, rules, saying,
                  seeded, tables, text)
from sampling import verify_token, warp
from specdec import DraftModel, algorithm_1, plain, speculative
from variants import verify_block
from wrong_samplers import (HoleAfterFullAcceptance, NeverRolledBack, PositionsRestart,
                            RolledBackTooFar)

with_a_model = pytest.mark.parametrize("name", [name for name, way in WAYS.items() if way.drafting])
A_TEXT = f"after the prompt {PROMPT} the text {{}}"


def mean_passes(name, verify):
    return sum(weight * len(history) for history, weight in histories(name, verify).items())


# ---------------------------------------------------------------- the law of the text

@rules
@pytest.mark.parametrize("name", WAYS)
def test_the_text_has_the_law_of_the_target(name, verify):
    way = WAYS[name]
    right = autoregressive_law(way.target, PROMPT, way.new, way.warp, way.eos)
    check_law(marginal(histories(name, verify), text), right, A_TEXT)


@pytest.mark.parametrize("name", WARPS)
def test_plain_decoding_has_the_law_of_the_target(name):
    way = WAYS[name]
    found = law(lambda choose: tuple(plain(way.target, PROMPT, way.new, warp=way.warp,
                                           choose=choose, eos=way.eos)))
    assert PROMPT == [0, 1, 1, 0, 1], f"{PROMPT} is left of the prompt"
    check_law(found, autoregressive_law(way.target, PROMPT, way.new, way.warp, way.eos), A_TEXT)


@our_rules
def test_the_end_of_text_was_met_at_every_place(verify):
    """As either draft, either correction, as the bonus: so the laws above hold at each of them."""
    last = [history[-1] for history in histories("bigrams", verify)]
    met = {(one.writers[-1], len(one.new)) for one in last if one.new[-1] == EOS}
    places = {("draft", 1), ("draft", 2), ("correction", 1), ("correction", 2), ("bonus", 3)}
    assert places <= met, f"no text ended with {places - met}: (its writer, its place in a round)"


@with_a_model
def test_the_loop_is_algorithm_1_round_by_round(name):
    """The joint law of all rounds of a text, accepted drafts and tokens of each: caches, rows and
    tensors of the loop change nothing. Algorithm 1 knows no end of text, so it is cut here."""
    way = WAYS[name]
    p, q = (lambda tokens, lists=from_texts(*side): tables(lists(tuple(tokens)))[0]
            for side in ((way.target, way.warp), way.drafting))

    def program(choose):
        tokens, rounds, end = list(PROMPT), [], len(PROMPT) + way.new
        while len(tokens) < end and tokens[-1] != way.eos:
            gamma = min(way.gamma, end - len(tokens) - 1)
            new = algorithm_1(p, q, tokens, gamma, choose)
            kept = new[:new.index(way.eos) + 1] if way.eos in new else new
            own = "correction" if len(new) <= gamma else "bonus"
            rounds.append(Told(tuple(kept), (("draft",) * (len(new) - 1) + (own,))[:len(kept)]))
            tokens += kept
        return tuple(rounds)

    check_law(histories(name, verify_token), law(program), "the rounds {}")


# ---------------------------------------------------------------- a round by hand

@our_rules
def test_a_draft_is_accepted_or_corrected_or_followed_by_a_bonus(verify):
    """p - q is [.3, .2, -.5]: a rejected draft can only be token 2."""
    p, q = tables([5, 4, 1], [1, 2, 7]), tables([2, 2, 6])
    found = law(one_round(verify, p, q))
    stands = marginal(found, lambda result: (result[0][0], result[1]))  # (draft, 0 or 1)
    check_law({x: stands.get((x, 1), 0) / q[0, x].item() for x in range(3)}, {0: 1, 1: 1, 2: 1 / 6},
              "to be accepted with min(1, p(x)/q(x)): draft {}")
    for n, right, what in ((0, (0.6, 0.4, 0), "after a rejection, norm(max(0, p - q)): token {}"),
                           (1, (0.1, 0.2, 0.7), "after full acceptance, the last row: token {}")):
        after = {result: 2 * weight for result, weight in found.items() if result[1] == n}
        check_law(marginal(after, lambda result: result[2]), dict(enumerate(right)), what)


def test_coins_after_the_first_rejection_do_not_count():
    """Three drafts, each of which is accepted with probability 1/2."""
    found = law(one_round(verify_token, tables(*[[1, 1]] * 4), tables(*[[1, 0]] * 3)))
    check_law(marginal(found, lambda result: result[1]), {0: 0.5, 1: 0.25, 2: 0.125, 3: 0.125},
              "where coins after the first rejection do not count, just {} of 3 drafts")


@our_rules
@pytest.mark.parametrize("rejected", (0, 1, 2, 3))
def test_row_i_of_p_judges_draft_i_and_the_last_is_for_the_bonus(rejected, verify):
    said = [1, 2, 3, 4]
    drafts = [0 if i == rejected else said[i] for i in range(3)]
    p, q = (F.one_hot(torch.tensor(ids, device=DEVICE), 5).double() for ids in (said, drafts))
    check_law(law(one_round(verify, p, q)), {(tuple(drafts), rejected, said[rejected]): 1},
              f"where the rows of p are certain of {said}: (drafts, how many stand, token) = {{}}")


# ---------------------------------------------------------------- what is read

@torch.inference_mode()
def check_rows(name, rows, model, tokens, first):
    """Row i is what follows the first `first` + i of these tokens."""
    right = warp(model(torch.tensor([tokens], device=DEVICE))[0])
    for i, row in enumerate(rows, first):
        places = (1 + ((right - row).abs().amax(-1) < 1e-10).nonzero()).flatten().tolist()
        assert i in places, (f"row {i - first} of {name} is what follows the first "
                             f"{places or 'NONE'} of the tokens {tokens}, and {i} is right")


@rules
def test_a_pass_of_the_target_reads_the_last_token_and_the_drafts(verify):
    """The first reads the prompt as well."""
    written, drafts, passes = [1, 2, 3], [], []
    draft = DraftModel(random_gpt(9, 1, 1, context=64), warp)

    def propose(tokens, gamma, choose):
        assert tokens == written, f"the drafter was given {tokens}, and the text is {written}"
        drafted, q = draft(tokens, gamma, choose)
        drafts[:] = drafted.tolist()
        return drafted, q

    def watch(held, ids):
        passes.append(held)
        known = len(written) - 1 if len(passes) > 1 else 0
        assert held == known, (f"in pass {len(passes)} the target's cache holds {held} tokens, and "
                               f"the text before its last token has {known}")
        right = written[known:] + drafts
        assert ids == right, (f"pass {len(passes)} of the target reads {ids}, and {right} is right:"
                              f" what its cache lacks of the text, then the drafts")

    target = Spy(random_gpt(9, 2, context=64), watch)
    for one in speculative(target, propose, [1, 2, 3], 30, gamma=4, warp=warp, choose=seeded(),
                           verify=verify):
        check_rows("p", one.p, target.model, written + one.drafts, len(written))
        written += one.new


def test_the_draft_reads_what_its_cache_lacks_and_its_own_drafts():
    """After full acceptance that is two tokens: the last draft was never read."""
    now, draw = SimpleNamespace(tokens=[1, 2, 3], drafts=[], known=0, stood="no"), seeded()

    def choose(q):
        token = draw(q)
        now.drafts.append(token.item())
        return token

    def watch(held, ids):
        right = (now.tokens + now.drafts)[now.known:]
        assert (held, ids) == (now.known, right), (
            f"after {now.stood} of 3 drafts stood, the draft's cache holds {held} tokens and it "
            f"reads {ids}; right are {now.known} tokens and {right}")
        now.known += len(ids)

    model = Spy(random_gpt(9, context=64), watch)
    propose = DraftModel(model, warp)
    for stood in (3, 0, 2, 3, 3, 1):
        now.drafts = []
        _, q = propose(now.tokens, 3, choose)
        check_rows("q", q, model.model, now.tokens + now.drafts, len(now.tokens))
        own = (now.drafts[stood] + 1) % 9 if stood < 3 else 5  # the target's
        now.stood, now.known = stood, len(now.tokens) + min(stood, 2)
        now.tokens = now.tokens + now.drafts[:stood] + [own]


# ---------------------------------------------------------------- where a text ends

@rules
@pytest.mark.parametrize("gamma", (1, 4, 8))
@pytest.mark.parametrize("max_new", (0, 1, 2, 3, 6))
def test_exactly_as_many_tokens_come_as_were_asked_for(max_new, gamma, verify):
    target, draft = identity_rig(vocab_size=9, n_layer=2)
    prompt = [3, 1, 4, 1, 5]
    right = tuple(plain(target, prompt, max_new, warp=greedy, choose=seeded()))
    found = text(decode(target, DraftModel(draft, greedy), prompt, max_new, gamma, verify, greedy))
    assert len(found) == len(right) == max_new, (
        f"{max_new} tokens were asked for; plain gave {len(right)}, speculative {len(found)}")
    assert found == right, f"greedy text is {right}, and with drafts it is {found}"


@rules
@pytest.mark.parametrize("target, draft, gamma", [
    ((0, 9, 9, 9, 9), (0, 9, 9, 9, 9), 4), ((7, 0, 9, 9, 9), (7, 0, 9, 9, 9), 4),
    ((7, 7, 7, 0, 9), (7, 7, 7, 0, 9), 4), ((7, 0, 9, 9, 9), (7, 0, 8, 8, 8), 4),
    ((7, 0, 9, 9, 9), (7, 9, 9, 9, 9), 4), ((7, 0, 9, 9, 9), (7, 9, 9, 9, 9), 1)],
    ids=["first draft", "second", "last", "before a rejection", "correction", "bonus"])
def test_nothing_follows_an_end_of_text(target, draft, gamma, verify):
    right = target[:target.index(EOS) + 1]
    found = (tuple(plain(saying(*target), [1], 9, warp=warp, choose=seeded(), eos=EOS)), text(
        decode(saying(*target), DraftModel(saying(*draft), warp), [1], 9, gamma, verify, eos=EOS)))
    assert found == (right, right), f"plain and speculative wrote {found}; {right} ends with {EOS}"


# ---------------------------------------------------------------- the number of target passes

@our_rules
@with_a_model
def test_expected_passes_are_what_p_and_q_make_them(name, verify):
    way = WAYS[name]
    p, q = from_texts(way.target, way.warp, PROMPT), from_texts(*way.drafting, PROMPT)
    right = reference_passes(p, q, way.vocab, way.new, way.gamma, verify, way.eos)
    found = mean_passes(name, verify)
    assert abs(found - right) < EXACT, (f"{found:.6f} passes on average, and {right:.6f} are right:"
                                        " do the drafts follow the text, and stand as they may?")


def test_the_block_rule_needs_fewer_passes_than_the_token_rule():
    assert mean_passes("bigrams", verify_block) < mean_passes("bigrams", verify_token) - 1e-3


@our_rules
def test_a_draft_equal_to_the_target_is_never_rejected(verify):
    """4 new tokens: 2 drafts and the bonus, then one token more."""
    found = mean_passes("target itself, endless", verify)
    assert abs(found - 2) < EXACT, f"{found:.6f} passes on average, and 2 are right"


def test_expected_rejections_are_the_sum_of_total_variations():
    """Yin et al. 2024 (arXiv 2411.00841): E[rejections in T tokens] = sum over t of E TV(p_t, q_t).

    gamma is T, so that only a rejection ends a round before T tokens, and each of them is tested.
    The one after them is the target's own in any case.
    """
    T, target, draft = 3, WAYS["T=1"].target, WAYS["T=1"].draft
    p, q = from_texts(target, warp, PROMPT), from_texts(draft, warp, PROMPT)

    def rejections(choose):
        rounds = decode(target, DraftModel(draft, warp), PROMPT, T + 1, T, choose=choose)
        return sum(one.accepted < len(one.drafts) for one in rounds)

    right = sum(weight * sum(abs(a - b) for a, b in zip(p(tokens), q(tokens))) / 2
                for t in range(T)
                for tokens, weight in autoregressive_law(target, PROMPT, t, warp).items())
    found = expectation(rejections)
    assert abs(found - right) < EXACT, f"{found:.6f} rejections on average; right is {right:.6f}"


# ---------------------------------------------------------------- a model of another make

@our_rules
@pytest.mark.parametrize("sides", ["target", "draft", "both"])
def test_a_model_of_another_make_decodes_losslessly(sides, verify):
    """It has no class of ours, only what the loop asks of a model: law and passes are right."""
    ours, eos = WAYS["T=1"], None if sides == "both" else EOS
    target = ours.target if sides == "draft" else Foreign(2, seed=1)
    draft = ours.draft if sides == "target" else Foreign(2, seed=2)
    passes = check_text_law(target, lambda: DraftModel(draft, warp), PROMPT, 4, 2, verify, eos=eos)
    p, q = from_texts(target, warp, PROMPT), from_texts(draft, warp, PROMPT)
    right = reference_passes(p, q, 2, 4, 2, verify, eos)
    assert abs(passes - right) < EXACT, f"{passes:.6f} passes on average, {right:.6f} are right"
    found = law(lambda choose: tuple(plain(target, PROMPT, 4, warp=warp, choose=choose, eos=eos)))
    check_law(found, autoregressive_law(target, PROMPT, 4, warp, eos), A_TEXT)


@torch.inference_mode()
def check_model(model, bound=1e-3):
    """Does a model keep the contract that specdec.py states? A text of 12 tokens is read in parts.
    Each row of logits has to be that of a pass over all up to it, with a new cache."""
    ids = 5 * torch.arange(12, device=model.device)[None] % model.config.vocab_size  # (1, 12)
    right = torch.stack([model(ids[:, :i + 1], model.new_cache())[0, -1] for i in range(12)])
    cache = model.new_cache()
    for start, end, which in ((0, 8, "the first 8 tokens"), (8, 11, "3 tokens after 8"),
                              (5, 6, "a token after the length was set from 11 to 5"),
                              (6, 12, "6 tokens after these 6")):
        cache.length = min(cache.length, start)
        wrong = (model(ids[:, start:end], cache)[0] - right[start:end]).abs().amax(-1)  # (T,)
        assert cache.length == end, f"after {which} its length is {cache.length}, and not {end}"
        assert (wrong < bound).all(), (f"the logits of {which} differ by {wrong.tolist()} from "
                                       "those of a pass over the text up to each of them")


@pytest.mark.parametrize("model", [Foreign(9), random_gpt(9, 2)], ids=["another make", "ours"])
def test_a_right_model_passes_the_check_of_models(model):
    check_model(model, EXACT)


@pytest.mark.parametrize("wrong, said", [
    (NeverRolledBack, "of a token after the length was set from 11 to 5"),
    (RolledBackTooFar, "of 3 tokens after 8"), (PositionsRestart, "of 3 tokens after 8"),
    (HoleAfterFullAcceptance, "of 3 tokens after 8")])
def test_a_faulty_model_fails_the_check_of_models(wrong, said):
    with pytest.raises(AssertionError, match=said):
        check_model(wrong(9))


# ---------------------------------------------------------------- at the edges of the contract

some_warps = pytest.mark.parametrize(
    "setting", [{}, {"top_k": 2}, {"top_p": 0.9}, {"temperature": 0}], ids=str)


@rules
@some_warps
def test_behind_a_forbidden_draft_nothing_is_an_error(setting, verify):
    """The target forbids token 2, and behind it all its logits are -inf: no law at all. Plain
    decoding never gets there, and the draft often proposes it."""
    target, draft = Bigram([[5, 5, 0], [3, 7, 0], [0, 0, 0]]), Scripted([[0.3, 0.3, 0.4]])
    check_text_law(target, lambda: DraftModel(draft, warp), [0], 3, 2, verify,
                   functools.partial(warp, **setting))


@rules
@some_warps
@pytest.mark.parametrize("after", (0, 1, 3))
@pytest.mark.parametrize("side", ("target", "draft"))
def test_nan_where_a_token_is_drawn_from_is_an_error_never_a_token(side, after, setting, verify):
    good, bad = [[0.6, 0.3, 0.1]], [[0.6, 0.3, 0.1]] * after + [[0.6, math.nan, 0.1]]
    target, draft = (Scripted(bad if side == name else good) for name in ("target", "draft"))
    way = dict(warp=functools.partial(warp, **setting), choose=seeded())
    written, rounds = [], speculative(target, DraftModel(draft, way["warp"]), [0], 9, gamma=2,
                                      verify=verify, **way)
    with pytest.raises(ValueError):
        for one in rounds:
            written += one.new
    assert len(written) <= after, f"{written} was written, and token {after} is drawn from NaN"
    if side == "target":
        with pytest.raises(ValueError):
            list(plain(target, [0], 9, **way))


@rules
@pytest.mark.parametrize("drafts, q", [
    (5, [[0.1] * 10] * 5), (3, [[0.0] * 10] * 3), (3, [[math.log(0.1)] * 10] * 3),
    (3, [[0.1] * 10] * 2), (3, [[0.125] * 8] * 3)],
    ids=["five for three", "q of zeros", "q of logarithms", "a row too few", "8 tokens of 10"])
def test_a_drafter_that_breaks_its_contract_is_refused(drafts, q, verify):
    def propose(tokens, gamma, choose):
        return torch.ones(drafts, dtype=torch.long, device=DEVICE), torch.tensor(q, device=DEVICE)

    with pytest.raises(ValueError):
        decode(saying(1), propose, [1], 4, 3, verify)  # one round


@rules
def test_a_drafter_may_leave_gradients_on(verify):
    logits = torch.zeros(3, dtype=torch.float64, device=DEVICE, requires_grad=True)

    @torch.inference_mode(False)
    @torch.enable_grad()
    def propose(tokens, gamma, choose):
        q = logits.softmax(-1).expand(gamma, 3)
        return choose(q), q

    check_text_law(Scripted([[0.5, 0.3, 0.2]]), lambda: propose, [0], 3, 2, verify)
