"""REQUIRE=all: nothing is left out in silence. A pytest plugin that tests/conftest.py names.

* A test that would be skipped fails, so that a server that cannot be had is noticed.
* Tests marked `external` run only with EXTERNAL=1; how many were left out is said at the end.
"""

import os
from collections.abc import Generator

import pytest

LEFT_OUT = pytest.StashKey[list[str]]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take the `external` tests out, unless they are asked for."""
    external = [] if os.environ.get("EXTERNAL") else [item for item in items if item.get_closest_marker("external")]
    config.stash[LEFT_OUT] = [item.nodeid for item in external]
    config.hook.pytest_deselected(items=external)
    items[:] = [item for item in items if item not in external]


def refuse_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Turn a skip into a failure under REQUIRE=all; an expected failure is no skip."""
    if report.skipped and not hasattr(report, "wasxfail") and os.environ.get("GREL_REQUIRE") == "all":
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid} was skipped, and REQUIRE=all allows none: {report.longrepr}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """One test."""
    report = yield
    refuse_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A whole module."""
    report = yield
    refuse_skip(report)
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Name what was left out and how much of it there is."""
    if left_out := config.stash.get(LEFT_OUT, []):
        terminalreporter.section("left out")
        terminalreporter.line(f"{len(left_out)} tests marked 'external' (EXTERNAL=1 runs them):")
        for name in left_out:
            terminalreporter.line(f"  {name}")
