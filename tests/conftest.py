"""Imports from tests/ work, few skips are allowed in CI, injected faults are counted."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator

import faultcount
import pytest
import skips

SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGUSR1") if hasattr(signal, name)]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts its background jobs so, and the processes of the tests would never hear Ctrl-C.
    with contextlib.suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGINT, signal.default_int_handler)

if "PYTEST_XDIST_WORKER" in os.environ:
    # Before anything imports torch, and for the processes that a test starts as well: the OpenMP
    # threads of several workers on the same cores wait for each other most of the time.
    os.environ["OMP_NUM_THREADS"] = "1"


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Where everything is installed, a test that was skipped is a promise that was not checked."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if not os.environ.get("CI") or not reporter:
        return
    reasons = {
        report.longrepr[2].removeprefix("Skipped: ") for report in reporter.stats.get("skipped", [])
    }
    for reason in sorted(reasons - skips.TOLERATED):
        reporter.write_line(f"counts as failed where CI is set: skipped, {reason}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(autouse=True)
def _process_wide_settings_come_back() -> Iterator[None]:
    """A run flushes denormals, a command that ends leaves signals alone: not for the next test."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    torch = sys.modules.get("torch")
    if torch:
        torch.set_flush_denormal(False)


@pytest.fixture
def faults(record_property) -> Iterator[faultcount.Faults]:
    """Counts the faults that a test injects; see ``faultcount``."""
    counted = faultcount.Faults()
    yield counted
    record_property(faultcount.KEY, counted.record())


def pytest_terminal_summary(terminalreporter, config) -> None:
    """Every kind of fault where only faults were asked for, else their sum."""
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    lines = faultcount.table(r for r in reports if getattr(r, "when", "") == "teardown")
    alone = all(map(faultcount.asks_for_faults, config.args))
    for line in lines if alone else [*lines[:1], *lines[-1:]]:
        terminalreporter.write_line(line)
