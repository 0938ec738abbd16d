"""vocabulary.py: from text to tokens and back, whatever the text is."""

import re

from hypothesis import given
from hypothesis import strategies as st

from rigs import micro_pair, times
from vocabulary import END_OF_TEXT, PIECES, make_encoding, speller

BYTES = [bytes([b]) for b in range(256)]


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
TEXTS = st.lists(st.one_of(st.sampled_from(SNIPPETS), st.text(max_size=8)), max_size=8).map("".join)


@times(3)
@given(TEXTS)
def test_any_text_comes_back_from_its_tokens(written):
    encoding = micro_pair().encoding
    ids = encoding.encode_ordinary(written)
    assert encoding.decode(ids) == written and encoding.eot_token not in ids
    assert "".join(re.findall(PIECES, written)) == written


@times(3)
@given(TEXTS)
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
