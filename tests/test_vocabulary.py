"""vocabulary.py: learned from a text; from text to tokens and back, whatever the text is."""

import re
from collections import Counter
from itertools import product

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import vocabulary
from micro import micro_pair
from vocabulary import (END_OF_TEXT, PIECES, encode, learn_merges, make_encoding, speller,
                        train_tokenizer)

BYTES = [bytes([b]) for b in range(256)]
SCRIPTS = "हिन्दी कहानी กำลัง été x² a‿b"
# Any text but halves of a surrogate pair; of few letters, so that pairs occur again.
TEXTS = st.one_of(st.text(st.characters(exclude_categories=["Cs"]), max_size=20), st.sampled_from(
    ["abc ", "aéè", "कि", "日本", "🙂🙃", "a\n ", "_a1-", "e\u0301"]).flatmap(st.text))


# ---------------------------------------------------------------- learned from a text

@given(st.lists(TEXTS, min_size=1, max_size=4), st.integers(1, 4), st.integers(257, 320))
@example([SCRIPTS], 300, 400)
@example(["🙂" * 40 + "a" * 70 + " " * 70 + "\n" + " " * 70 + "_" * 70 + "!" * 70], 2, 320)
def test_text_is_encoded_into_the_tokens_that_training_counted(parts, repeats, size):
    """Both engines cut it alike, and merge alike."""
    text = "".join(parts) * repeats
    pieces = re.findall(PIECES, text)
    tokens, words = learn_merges(Counter(pieces), size)
    encoding = make_encoding(tokens)
    encoded = [encoding.decode_single_token_bytes(i) for i in encoding.encode_ordinary(text)]
    assert encoded == [token for piece in pieces for token in words[piece]]
    assert b"".join(encoded) == text.encode()
    assert not text or train_tokenizer([text], size).name == encoding.name


def test_each_new_token_is_the_most_frequent_pair_of_neighbours():
    """Counted anew each time; of equally frequent pairs the last in order. None that comes once."""
    pieces = {"abab": 2, "abc": 1, "cdcd": 1}
    assert learn_merges(pieces, 300)[0] == [*BYTES, b"ab", b"cd", b"abab"]
    assert learn_merges(pieces, 259)[0] == [*BYTES, b"ab", b"cd"]


def test_no_piece_is_longer_than_33_characters():
    """With the space or the line break before it; a digit is a piece of its own."""
    for one, most in zip("aé日! _7\n", (33, 33, 33, 33, 33, 32, 1, 2)):
        assert max(map(len, re.findall(PIECES, f"\n{one * 100} {one * 100}"))) == most, one


def test_a_long_text_is_learned_from_its_5000_commonest_pieces(monkeypatch):
    """So it takes no longer. Here are 6562 words, of which the last comes twice."""
    text, learned = " ".join(map("".join, product("abcdefghi", repeat=4))) + " zz zz", []
    monkeypatch.setattr(vocabulary, "learn_merges",
                        lambda pieces, size: learned.append(pieces) or learn_merges(pieces, size))
    encoding = train_tokenizer([text], 260)
    assert len(learned[0]) == 5000 and " zz" in learned[0] and encoding.n_vocab == 260


@pytest.mark.parametrize("documents, size, n_vocab", [
    (["aaab"], 300, 258), ([""], 300, 257), ([], 300, 257), (["aaab"], 256, 257)])
def test_a_text_with_few_repetitions_gives_a_smaller_vocabulary(documents, size, n_vocab):
    """256 bytes, "aa" where it occurs twice, and the end of text, which has the last id."""
    encoding = train_tokenizer(documents, size)
    assert (encoding.n_vocab, encoding.eot_token) == (n_vocab, n_vocab - 1)


# ---------------------------------------------------------------- to tokens and back

@given(st.lists(st.one_of(st.text(max_size=8), st.sampled_from([
    END_OF_TEXT, "<|", "|>", "\r\n", "\n    ", "\0", "\u2028", "e\u0301", "٣", "日本語", "👩‍👩‍👧"])),
    max_size=8).map("".join))
def test_any_text_comes_back_from_its_tokens_at_once_and_one_by_one(written):
    encoding = micro_pair().encoding
    ids, spell = encode([written], encoding).tolist(), speller(encoding)
    assert ids.pop() == encoding.eot_token and encoding.eot_token not in ids
    assert "".join(re.findall(PIECES, written)) == written == encoding.decode(ids)
    assert "".join(map(spell, ids)) + spell(encoding.eot_token, final=True) == written


def test_a_character_is_spelled_when_it_is_whole_and_half_of_one_is_told():
    """A token a byte. Each text has a speller: half a character of one is not in the next."""
    encoding = make_encoding(BYTES)
    spell, other = speller(encoding), speller(encoding)
    assert [spell(b) for b in "é🙂".encode()] == ["", "é", "", "", "", "🙂"]
    assert spell("é".encode()[0]) == "" and other(ord("a")) == "a"
    assert spell(encoding.eot_token, final=True) == "\N{REPLACEMENT CHARACTER}"
