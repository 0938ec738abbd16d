"""vocabulary.py: learned from a text; from text to tokens and back, whatever the text is."""

import re
from collections import Counter

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import vocabulary
from rigs import micro_pair, times
from vocabulary import (END_OF_TEXT, PIECES, encode, learn_merges, make_encoding,
                        speller, train_tokenizer)

BYTES = [bytes([b]) for b in range(256)]


# ---------------------------------------------------------------- learned from a text

def counted_pieces(text):
    return Counter(re.findall(PIECES, text))


SCRIPTS = "हिन्दी कहानी กำลัง été x² a‿b"
CHARACTERS = st.characters(exclude_categories=["Cs"])  # all but halves of a pair, which are no text
FEW_LETTERS = st.sampled_from(["ab", "abc ", "aé", "éè", "कि", "日本", "🙂🙃", "a\n ", "_a1-",
                               "e\u0301"])
TEXTS = st.one_of(st.text(CHARACTERS, max_size=20), FEW_LETTERS.flatmap(lambda few: st.text(few)))


@pytest.mark.parametrize("one, most", [("a", 33), ("é", 33), ("日", 33), ("!", 33), ("_", 32),
                                       (" ", 33), ("7", 1), ("\n", 2)])
def test_no_piece_is_longer_than_33_characters(one, most):
    """With the space or the line break before it; a digit is a piece of its own."""
    assert max(map(len, re.findall(PIECES, f"\n{one * 100} {one * 100}"))) == most


@times(10)
@given(st.lists(TEXTS, min_size=1, max_size=4), st.integers(1, 4), st.integers(257, 320))
@example([SCRIPTS], 300, 400)
@example(["e\u0301", "x²", "a‿b"], 3, 300)
@example(["🙂" * 40 + "a" * 70 + " " * 70 + "\n" + " " * 70 + "_" * 70 + "!" * 70], 2, 320)
def test_text_is_encoded_into_the_tokens_that_training_counted(parts, repeats, size):
    """Both engines cut it alike, and merge alike. A piece of 33 characters is 129 bytes at most."""
    text = "".join(parts) * repeats
    pieces = re.findall(PIECES, text)
    tokens, words = learn_merges(Counter(pieces), size)
    encoding = make_encoding(tokens)
    encoded = [encoding.decode_single_token_bytes(i) for i in encoding.encode_ordinary(text)]
    assert encoded == [token for piece in pieces for token in words[piece]]
    assert b"".join(encoded) == text.encode()
    if text:
        assert train_tokenizer([text], size).name == encoding.name


def merges_counted_anew(pieces, size):
    """Byte-pair encoding as it is told: before each merge, count all pairs in all the text."""
    words = [[bytes([b]) for b in piece.encode()] for piece in pieces.elements()]
    tokens = [bytes([b]) for b in range(256)]
    while len(tokens) < size - 1:
        pairs = Counter(pair for word in words for pair in zip(word, word[1:]))
        pair = max(pairs, key=lambda pair: (pairs[pair], pair), default=None)
        if pairs[pair] < 2:
            break
        tokens.append(b"".join(pair))
        for word in words:
            i = 0
            while i < len(word) - 1:
                if (word[i], word[i + 1]) == pair:
                    word[i:i + 2] = [tokens[-1]]
                i += 1
    return tokens


@times(3)
@given(TEXTS, st.integers(1, 3), st.integers(257, 300))
@example("abababab aaaa baaab", 2, 300)
def test_each_new_token_is_the_most_frequent_pair(text, repeats, size):
    pieces = counted_pieces(text * repeats)
    assert learn_merges(pieces, size)[0] == merges_counted_anew(pieces, size)


def test_a_long_line_is_learned_from_a_bounded_number_of_pieces(monkeypatch):
    """One megabyte without a space, each piece another one: the slowest text to learn from."""
    letters = torch.randint(4, (1_000_000,), generator=torch.Generator().manual_seed(0))
    line = "".join("ACGT"[i] for i in letters.tolist())
    learned = []
    learn = learn_merges
    monkeypatch.setattr(vocabulary, "learn_merges",
                        lambda *given: learned.append(given) or learn(*given))
    encoding = train_tokenizer([line], 262)
    ((pieces, _),) = learned
    assert len(counted_pieces(line)) > 30_000 and len(pieces) <= 5000
    assert max(map(len, pieces)) <= 33
    assert encoding.n_vocab == 262 and encoding.decode(encoding.encode_ordinary(line)) == line


def test_a_vocabulary_is_learned_from_the_commonest_pieces():
    rare = "".join(f" {chr(0x4e00 + i)}" for i in range(6000))
    encoding = train_tokenizer([rare + " word" * 10_000], 270)
    assert len(encoding.encode_ordinary(" word")) == 1
    assert encoding.decode(encoding.encode_ordinary(rare)) == rare


def test_a_text_with_few_repetitions_gives_a_smaller_vocabulary():
    assert train_tokenizer(["aaab"], 300).n_vocab == 258  # 256 bytes, "aa", the end of text


@pytest.mark.parametrize("documents, size", [([""], 300), ([], 300), (["aaab"], 256)])
def test_where_nothing_can_be_learned_a_token_is_a_byte(documents, size):
    assert train_tokenizer(documents, size).n_vocab == 257


# ---------------------------------------------------------------- to tokens and back

@pytest.mark.parametrize("typed", (END_OF_TEXT, f"a{END_OF_TEXT}b", END_OF_TEXT * 2, "<|endoftext",
                                   "<|fim_prefix|>"))
def test_a_marker_typed_in_a_text_is_plain_text(typed):
    encoding = micro_pair().encoding
    ids = encoding.encode_ordinary(typed)
    assert encoding.eot_token not in ids and encoding.decode(ids) == typed
    assert encode([typed, typed], encoding).tolist() == [*ids, encoding.eot_token] * 2


def test_an_encodings_name_tells_vocabularies_of_one_size_apart():
    first, again, other, swapped = (make_encoding([*BYTES, *more]).name for more in (
        [b"ab", b"cd"], [b"ab", b"cd"], [b"ab", b"ce"], [b"cd", b"ab"]))
    assert first == again and len({first, other, swapped}) == 3


def test_the_end_of_text_is_the_last_id():
    encoding = make_encoding([*BYTES, b"ab"])
    assert (encoding.eot_token, encoding.n_vocab) == (257, 258)
    assert encoding.encode_ordinary("ab" + END_OF_TEXT)[0] == 256


# Text that looks special, line ends, and scripts that the training text does not hold.
SNIPPETS = [END_OF_TEXT, "<|", "endoftext", "|>", "<|fim_prefix|>", "\r\n", "\n    ", "  ", "\t",
            "\0", "__x__", "\u2028", "\x1c", "é", "e\u0301", "²", "٣", "日本語", "русский", "عربى",
            "हिन्दी", "🙂", "👩‍👩‍👧"]
MIXED = st.lists(st.one_of(st.sampled_from(SNIPPETS), st.text(max_size=8)), max_size=8).map("".join)


@times(3)
@given(MIXED)
def test_any_text_comes_back_from_its_tokens(written):
    encoding = micro_pair().encoding
    ids = encoding.encode_ordinary(written)
    assert encoding.decode(ids) == written and encoding.eot_token not in ids
    assert "".join(re.findall(PIECES, written)) == written


@times(3)
@given(MIXED)
def test_tokens_are_spelled_one_by_one_as_all_at_once(written):
    encoding = micro_pair().encoding
    ids, spell = encoding.encode_ordinary(written), speller(encoding)
    assert "".join(map(spell, ids)) + spell(encoding.eot_token, final=True) == written


def test_a_character_is_spelled_when_it_is_whole():
    encoding = make_encoding(BYTES)  # a token a byte
    spell = speller(encoding)
    assert [spell(b) for b in "é🙂".encode()] == ["", "é", "", "", "", "🙂"]
    spell("é".encode()[0])
    assert spell(encoding.eot_token, final=True) == "\N{REPLACEMENT CHARACTER}"


def test_half_a_character_of_one_text_is_not_in_the_next():
    encoding = make_encoding(BYTES)
    first, second = speller(encoding), speller(encoding)
    assert first(0xc3) == "" and second(ord("a")) == "a" and first(0xa9) == "é"
