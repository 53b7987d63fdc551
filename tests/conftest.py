"""Puts tests/ on the import path (``helpers``, ``reference``), and allows no skips in CI."""

import os

import pytest


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Where everything is installed, a test that was skipped is a promise that was not checked."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("CI") and reporter and reporter.stats.get("skipped"):
        reporter.write_line("skipped tests count as failed where CI is set", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
