"""Each check of `checks`, against the package as it is."""

from collections.abc import Callable

import pytest

from tests.rewards import checks

ALL = [value for name, value in vars(checks).items() if name.startswith("check_")]


@pytest.mark.parametrize("check", ALL, ids=lambda check: check.__name__)
def test_holds(check: Callable[[], None]) -> None:
    check()
