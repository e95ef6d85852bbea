"""A pytest fixture `no_sync`: a test that takes it fails where its body waits for the GPU.

Put this into a conftest.py at the root of the tests:

    pytest_plugins = ["syncfree_ext.syncs.pytest_plugin"]

    def test_step(no_sync):
        loss = train_step()                # fails here if this waits, with the line
        with no_sync.allow("the log reads it"):
            print(loss.item())

Only the body of the test is watched, not its other fixtures. Without a CUDA device nothing waits and nothing fails.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager
from typing import Any

import pytest

from .detector import Checked, allow_sync
from .detector import no_sync as watch


class NoSync:
    """The fixture's value."""

    def __init__(self) -> None:
        self.checked = Checked()

    def allow(self, reason: str) -> AbstractContextManager[None]:
        """A block in which the host may wait."""
        return allow_sync(reason)


@pytest.fixture
def no_sync() -> NoSync:
    """Makes a wait for the GPU in the test's body an error."""
    return NoSync()


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
    """Watches the body. A fixture could not: pytest replaces the warnings' state between setup and call."""
    value = pyfuncitem.funcargs.get("no_sync")
    if not isinstance(value, NoSync):
        return (yield)
    with watch("error") as value.checked:
        return (yield)
