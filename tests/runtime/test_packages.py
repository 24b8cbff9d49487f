import pytest

from greedynas import GreedyNASError
from greedynas.runtime.packages import require_packages


def test_installed_packages_are_accepted():
    require_packages("this", {})
    require_packages("this", {"json": "json", "os.path": "os"})


@pytest.mark.parametrize(
    ("packages", "message"),
    [
        (
            {"json": "json", "no_such": "no-such>=1"},
            "this needs no_such, which is not installed: pip install no-such>=1",
        ),
        (
            {"no_such": "no-such", "json.nothing.there": "no-such", "nor_this": "nor-this"},
            "this needs no_such, json.nothing.there, nor_this, which are not installed: pip install no-such nor-this",
        ),
    ],
)
def test_missing_packages_are_one_line_with_a_command(packages, message):
    with pytest.raises(GreedyNASError) as error:
        require_packages("this", packages)
    assert str(error.value) == message
