"""The omission guard."""

import pytest

from credit import omission_guard
from tests.credit.checks_credit import (
    check_guard,
)


@pytest.mark.parametrize(
    ("check", "function"),
    [
        (check_guard, omission_guard),
    ],
    ids=lambda part: getattr(part, "__name__", None),
)
def test_checks(check, function):
    check(function)
