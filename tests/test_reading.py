"""From a file to a corpus: every text that can be learned from is, the others are answered."""

import dataclasses
import hashlib
import io
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt import corpus
from gpt.corpus import default_text
from gpt.errors import UsageError
from gpt.text import decoding
from gpt.text.reading import read_corpus

ROOT = Path(__file__).parents[1]
PLENTY = "the quick brown fox jumps over the lazy dog\n" * 20


@pytest.fixture
def write(tmp_path):
    def write(content: str | bytes) -> str:
        path = tmp_path / "text.txt"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(path)

    return write


def refusal(path: str, **options) -> str:
    with pytest.raises(UsageError) as caught:
        read_corpus(path, **({"context_length": 8} | options))
    assert caught.value.exit_code == 2
    return str(caught.value)


def text_of(corpus) -> str:
    return corpus.tokenizer.decode(corpus.train) + corpus.tokenizer.decode(corpus.val)


@settings(deadline=None)
@given(st.text(min_size=2).filter(lambda t: len(set(t)) > 1), st.integers(1, 7), st.booleans())
def test_what_is_read_is_the_text(text, chunk_bytes, keep_newlines):
    text = "x" + text * 6
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "CHUNK_BYTES", chunk_bytes)
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        corpus = read_corpus("-", context_length=1, val_fraction=0.4, keep_newlines=keep_newlines)
    expected = text if keep_newlines else text.replace("\r\n", "\n").replace("\r", "\n")
    assert text_of(corpus) == expected
    assert corpus.n_chars == len(expected)
    assert corpus.tokenizer.vocabulary == "".join(sorted(set(expected)))
    assert corpus.source.sha256 == hashlib.sha256(text.encode()).hexdigest()


def test_a_corpus_says_where_it_comes_from(write):
    path = write(PLENTY)
    corpus = read_corpus(path, context_length=8)
    digest = hashlib.sha256(PLENTY.encode()).hexdigest()
    assert dataclasses.astuple(corpus.source) == (path, len(PLENTY), digest)
    assert corpus.notices == ()
    assert corpus.train.dtype == corpus.val.dtype == np.uint8


def test_validation_is_the_last_part(write):
    corpus = read_corpus(write(PLENTY), context_length=8, val_fraction=0.25)
    assert corpus.tokenizer.decode(corpus.val) == PLENTY[-220:]
    assert text_of(corpus) == PLENTY


def test_validation_off_is_said(write):
    corpus = read_corpus(write("abcabcabc"), context_length=8, val_fraction=0)
    assert len(corpus.train) == 9
    assert corpus.val.shape == (0,)
    assert corpus.notices == ("validation is off (--val_fraction 0)",)


def test_entropies_are_of_the_whole_text(write):
    corpus = read_corpus(write("ab" * 90 + "cd" * 10), context_length=8)
    p = np.array([90, 90, 10, 10]) / 200
    assert corpus.unigram_entropy == pytest.approx(-(p * np.log(p)).sum())
    # after a, c and d comes one character; b ends the run of ab once
    b = np.array([89, 1]) / 90
    assert corpus.bigram_entropy == pytest.approx(90 / 199 * -(b * np.log(b)).sum())


@pytest.mark.parametrize("content", [b"", b"\xef\xbb\xbf"])
def test_an_empty_file_is_refused(write, content):
    path = write(content)
    message = refusal(path)
    assert f"'{path}' is empty ({len(content)} bytes, 0 characters)" in message
    assert "at least 9" in message
    assert "pass a text file" in message


def test_one_distinct_character_is_nothing_to_learn(write):
    message = refusal(write("a" * 1234))
    assert "one distinct character only, 1,234 times U+0061" in message
    assert "pass a text with at least two" in message


def test_a_text_too_short_for_validation_is_refused_with_the_numbers(write):
    path = write("abcdefghij" * 4)
    message = refusal(path, context_length=32)
    assert f"'{path}' is too short: its validation part has 4 characters of 40" in message
    assert "--val_fraction 0.1" in message
    assert "needs 33, one more than --context_length 32" in message
    assert "--context_length 3 or less" in message
    assert "--val_fraction 0 to train without validation" in message
    assert read_corpus(path, context_length=32, val_fraction=0).n_chars == 40


def test_a_part_of_exactly_the_window_is_one_character_short(write):
    path = write("ab" * 40)  # 80 characters, 8 of them validation
    assert "validation part has 8 characters" in refusal(path, context_length=8)
    assert len(read_corpus(path, context_length=7).val) == 8


def test_a_training_part_too_short_is_refused_too(write):
    message = refusal(write("ab" * 10), context_length=8, val_fraction=0.6)
    assert "its training part has 8 characters of 20" in message
    assert "--val_fraction 0.45 or so" in message


@pytest.mark.parametrize("n_chars", [1, 2, 5, 17, 18, 19, 66, 67, 69, 100, 334, 2001])
@pytest.mark.parametrize("val_fraction", [0.0, 0.003, 0.1, 0.5, 0.97])
@pytest.mark.parametrize("context_length", [1, 8, 33])
def test_every_remedy_works(write, n_chars, val_fraction, context_length):
    path = write(("ab" * n_chars)[: n_chars + 1])
    options = {"context_length": context_length, "val_fraction": val_fraction}
    try:
        corpus = read_corpus(path, **options)
    except UsageError as error:
        for flag, value in re.findall(r"[:;] --(\w+) ([\d.]+)", str(error)):
            kind = int if flag == "context_length" else float
            read_corpus(path, **(options | {flag: kind(value)}))
    else:
        assert len(corpus.train) > context_length
        assert len(corpus.val) > context_length or val_fraction == 0


def test_a_byte_order_mark_changes_nothing_but_a_notice(write):
    plain = read_corpus(write(PLENTY), context_length=8)
    marked = read_corpus(write(b"\xef\xbb\xbf" + PLENTY.encode()), context_length=8)
    assert marked.tokenizer.vocabulary == plain.tokenizer.vocabulary
    np.testing.assert_array_equal(marked.train, plain.train)
    assert marked.notices == ("dropped the byte-order mark at the start",)


def test_nul_characters_are_learned_and_asked_about(write):
    corpus = read_corpus(write(b"a\0b" * 500), context_length=8)
    assert corpus.tokenizer.vocabulary == "\0ab"
    (notice,) = corpus.notices
    assert "500 of 1,500 characters are control characters (mostly U+0000)" in notice
    assert notice.endswith("is this a text file?")


def test_a_single_nul_is_asked_about(write):
    (notice,) = read_corpus(write(PLENTY * 10 + "\0"), context_length=8).notices
    assert "1 of 8,801 characters are control characters (mostly U+0000)" in notice


def test_utf16_without_a_mark_is_recognised(write):
    (notice,) = read_corpus(write(PLENTY.encode("utf-16-le")), context_length=8).notices
    assert "--encoding utf-16-le" in notice


def test_a_stray_control_character_needs_no_notice(write):
    text = PLENTY * 10 + "\x1b" + "\t\f" * 50
    assert read_corpus(write(text), context_length=8).notices == ()


def test_control_characters_of_a_wrong_encoding_are_asked_about(write):
    content = ("it’s " * 99).encode("cp1252")
    (notice,) = read_corpus(write(content), context_length=8, encoding="latin-1").notices
    assert "99 of 495 characters are control characters (mostly U+0092)" in notice


@pytest.mark.parametrize("alphabet", ["é + ASCII", "Привет мир", "汉字很多个", "😀😁a"])
def test_every_script_is_read_in_code_points(write, alphabet):
    text = alphabet * 1000
    corpus = read_corpus(write(text), context_length=8)
    assert text_of(corpus) == text
    assert corpus.n_chars == len(text)


def test_a_hundred_thousand_characters_work_and_are_asked_about(write):
    text = "".join(map(chr, range(0x10000, 0x10000 + 100_000)))
    corpus = read_corpus(write(text), context_length=8)
    assert corpus.train.dtype == np.uint32
    assert corpus.unigram_entropy == pytest.approx(math.log(100_000))
    assert corpus.notices == ("100,000 different characters are very many: is --encoding right?",)


def test_halves_of_characters_are_refused(write):
    message = refusal(write(b"abc \\ud800 " * 9), encoding="raw_unicode_escape")
    assert "lone surrogates such as U+D800" in message
    assert "--encoding" in message


def test_a_given_vocabulary_is_used_and_a_subset_is_said(write):
    vocabulary = "".join(sorted(set(PLENTY))) + "éœ"
    corpus = read_corpus(write(PLENTY), context_length=8, vocabulary=vocabulary)
    assert corpus.tokenizer.vocabulary == vocabulary
    assert text_of(corpus) == PLENTY
    assert corpus.notices == (
        f"the text uses {len(vocabulary) - 2} of the {len(vocabulary)} characters of the "
        "vocabulary",
    )


def test_the_same_vocabulary_needs_no_notice(write):
    vocabulary = "".join(sorted(set(PLENTY)))
    assert read_corpus(write(PLENTY), context_length=8, vocabulary=vocabulary).notices == ()


def test_characters_outside_a_given_vocabulary_are_named(write):
    path = write(PLENTY + "ZÜ")
    message = refusal(path, vocabulary="".join(sorted(set(PLENTY))))
    assert f"'{path}' has 2 characters outside the vocabulary of the checkpoint (28)" in message
    assert "'Z' U+005A (near: 'z'" in message
    assert "'Ü' U+00DC (near: 'u'" in message
    assert "start a new run" in message


def test_a_path_with_blanks_and_accents_is_read(tmp_path):
    path = tmp_path / "out dir é" / "my text.txt"
    path.parent.mkdir()
    path.write_text(PLENTY, encoding="utf-8")
    assert read_corpus(str(path), context_length=8).n_chars == len(PLENTY)


def test_the_default_text_is_what_the_recipe_prepares(monkeypatch, tmp_path):
    recipe = tmp_path / "prepare.py"
    recipe.write_text(
        "class CannotPrepareError(Exception): pass\ndef prepare(): return 'there.txt'\n",
        encoding="utf-8",
    )
    monkeypatch.setattr(corpus, "_RECIPE", recipe)
    assert default_text() == "there.txt"


def test_a_default_text_that_cannot_be_prepared_is_a_usage_error(monkeypatch, tmp_path):
    recipe = tmp_path / "prepare.py"
    recipe.write_text(
        "class CannotPrepareError(Exception): pass\n"
        "def prepare(): raise CannotPrepareError('no network; python train.py my.txt')\n",
        encoding="utf-8",
    )
    monkeypatch.setattr(corpus, "_RECIPE", recipe)
    with pytest.raises(UsageError, match=r"no network; python train\.py my\.txt"):
        default_text()
    recipe.unlink()
    with pytest.raises(UsageError) as caught:
        default_text()
    assert str(recipe) in str(caught.value)
    assert "is missing" in str(caught.value)
    assert "python train.py my.txt" in str(caught.value)


def run_program(program: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_locale_does_not_matter(write):
    path = write("é中😀\n" * 99)
    program = (
        "from gpt.text.reading import read_corpus\n"
        f"corpus = read_corpus({path!r}, context_length=8)\n"
        "print(ascii(corpus.tokenizer.vocabulary), corpus.source.sha256)"
    )
    plain_c = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    output = run_program(program, **plain_c)
    assert output.startswith("'\\n\\xe9\\u4e2d\\U0001f600' ")
    assert output == run_program(program, PYTHONUTF8="1")


@pytest.mark.slow
def test_reading_does_not_wait_for_torch(write):
    program = (
        "import sys\n"
        "from gpt.text.reading import read_corpus\n"
        f"read_corpus({write(PLENTY)!r}, context_length=8)\n"
        "print('torch' in sys.modules)"
    )
    assert run_program(program) == "False\n"


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read in /proc")
@pytest.mark.parametrize(("tail", "times_size"), [("", 1), ("".join(map(chr, range(300, 600))), 3)])
def test_memory_stays_near_the_size_of_the_file(tmp_path, tail, times_size):
    """The bound of the docstring: so many bytes a character and 150 MB."""
    path = tmp_path / "large.txt"
    size = 120_000_000
    path.write_bytes(b"ab\n" * (size // 3) + tail.encode())
    program = (
        "import re\n"
        "from gpt.text.reading import read_corpus\n"
        f"corpus = read_corpus({str(path)!r}, context_length=8)\n"
        "status = open('/proc/self/status', encoding='utf-8').read()\n"
        "print(corpus.n_chars, re.search(r'VmHWM:\\s+(\\d+) kB', status)[1])"
    )
    n_chars, peak_kilobytes = map(int, run_program(program).split())
    assert n_chars == size + len(tail)
    assert peak_kilobytes * 1024 < times_size * size + 150e6
