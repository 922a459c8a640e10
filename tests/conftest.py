"""What holds for every test: settings of a gateway in somebody's shell are not the tests'."""

from __future__ import annotations

import os

from router.config import Settings


def pytest_configure() -> None:
    for name in Settings.model_fields:
        os.environ.pop(f"KVROUTE_{name.upper()}", None)
