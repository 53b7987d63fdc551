"""benchmarks/presets.py on a small text: a row that agrees with the preset, and its origin."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from gpt.config import RunConfig
from gpt.config_files import read_toml
from gpt.model.count import parameter_count

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_a_preset_gets_a_row(tmp_path):
    text, out = tmp_path / "my text.txt", tmp_path / "results.md"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 60, encoding="utf-8")
    words = [ROOT / "benchmarks" / "presets.py", "tiny", "--text", text, "--seeds", 2]
    ended = subprocess.run(
        [sys.executable, *map(str, words), "--out", str(out)],
        cwd=tmp_path, capture_output=True, encoding="utf-8",
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    report = out.read_text(encoding="utf-8")
    assert ended.stdout.strip() == report.strip()
    config = RunConfig().with_changes(read_toml([ROOT / "configs" / "tiny.toml"]))
    sizes = f"{sum(parameter_count(config.model, 28).values()):,} | {config.training.steps}"
    number = r"(\d[\d.]*) \((\d[\d.]*) to (\d[\d.]*)\)"
    row = re.search(rf"^\| `tiny` \| {re.escape(sizes)} \| {number} \| {number} \|$", report, re.M)
    assert row, report
    mean, least, greatest = map(float, row.groups()[:3])
    assert 0 < least <= mean <= greatest < 3
    for word in (text.name, "cores", "Python 3", "torch 2", "commit "):
        assert word in report.splitlines()[-1]
