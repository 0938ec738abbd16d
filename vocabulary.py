"""The vocabulary: learned from a text, and the way from text to tokens and back."""

import codecs
import hashlib
import re
from collections import Counter

import tiktoken
import torch

END_OF_TEXT = "<|endoftext|>"

# Where a text is cut before pairs are merged: words and signs with the space before them, a line
# break with the indentation after it, single digits and other characters. Only ASCII is told apart,
# so that Python's re and tiktoken's engine agree on every character. No piece is longer than 33
# characters: merging takes time that grows with the square of that.
PIECES = "|".join([" ?[A-Za-z\u0080-\U0010ffff]{1,32}", "[0-9]", r" ?[!-/:-@\[-^`{-~]{1,32}",
                   "_{1,32}", "\n {0,32}", "[\x00-\x20\x7f]"])


# ---------------------------------------------------------------- learned from a text

def train_tokenizer(documents, vocab_size):
    """The vocabulary of a text: so many tokens at most, the end of text as the last."""
    pieces = Counter(piece for text in documents for piece in re.findall(PIECES, text))
    commonest = dict(pieces.most_common(5000))  # enough, and a long text takes no longer
    return make_encoding(learn_merges(commonest, vocab_size)[0])


def learn_merges(pieces, vocab_size):
    """Byte-pair encoding: the vocabulary starts as the 256 bytes, and the most frequent pair of
    neighbours becomes a token, again and again. It stops early where no pair occurs twice.

    pieces: {piece: how often it occurs}. Returns the tokens (bytes) and {piece: its tokens}.
    """
    tokens = [bytes([b]) for b in range(256)]
    words = {piece: [bytes([b]) for b in piece.encode()] for piece in pieces}
    while len(tokens) < vocab_size - 1:
        pairs = Counter()
        for piece, word in words.items():
            for pair in zip(word, word[1:]):
                pairs[pair] += pieces[piece]
        if max(pairs.values(), default=0) < 2:
            break
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        # No other pair spells it: at each stage the same bytes are cut alike wherever they stand.
        tokens.append(b"".join(best))
        words = {piece: merge(word, best) for piece, word in words.items()}
    return tokens, words


def merge(word, pair):
    """The word with each occurrence of the pair, from the left, made one token."""
    merged = []
    for token in word:
        if merged and (merged[-1], token) == pair:
            merged[-1] += token
        else:
            merged.append(token)
    return merged


# ---------------------------------------------------------------- to tokens and back

def make_encoding(tokens):
    """The tiktoken encoding of these tokens (bytes, in the order of their ids) and the end of text.
    Its name is a fingerprint: vocabularies of one size need not be the same."""
    fingerprint = hashlib.sha256(repr(tokens).encode()).hexdigest()[:16]
    ranks = {token: rank for rank, token in enumerate(tokens)}
    return tiktoken.Encoding(name=fingerprint, pat_str=PIECES, mergeable_ranks=ranks,
                             special_tokens={END_OF_TEXT: len(tokens)})


def speller(encoding):
    """spell(token, final=False) -> its text. Where a token ends inside of a character, that comes
    with the token that completes it."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def spell(token, final=False):
        ends = token == encoding.eot_token
        return decoder.decode(b"" if ends else encoding.decode_single_token_bytes(token), final)

    return spell


def encode(documents, encoding):
    """All documents in one row of token ids, an end of text after each. What looks like a special
    token in the text is encoded as the plain characters that it is."""
    ids = []
    for text in documents:
        ids += encoding.encode_ordinary(text) + [encoding.eot_token]
    return torch.tensor(ids)
