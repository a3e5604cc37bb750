"""Prints the lowest version that pyproject.toml allows of each package, as pip constraints.

`make test-lowest` installs these and runs the tests that use the packages, so that a lower bound that is too
low fails. The tools of the extra `dev` are left out: users do not have them.
"""

import re
import sys
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
EXTRAS = ("train", "monai")


def lowest_versions(text: str) -> dict[str, str]:
    """The lower bound of every dependency in the text of a pyproject.toml, by name.

    >>> lowest_versions('project = {dependencies = ["torch>=2.6"], optional-dependencies = {}}')
    {'torch': '2.6'}
    """
    project = tomllib.loads(text)["project"]
    optional = project["optional-dependencies"]
    requirements = [*project["dependencies"], *(line for extra in EXTRAS for line in optional.get(extra, ()))]
    lowest = {}
    for requirement in requirements:
        match = re.fullmatch(r"([A-Za-z0-9._-]+)>=([0-9][0-9.]*)", requirement)
        if match is None:
            raise ValueError(f"{requirement!r} in pyproject.toml must be NAME>=VERSION")
        name, version = match.groups()
        if lowest.setdefault(name, version) != version:
            raise ValueError(f"{name} has two lower bounds in pyproject.toml: {lowest[name]} and {version}")
    return lowest


if __name__ == "__main__":
    versions = lowest_versions(PYPROJECT.read_text(encoding="utf-8"))
    sys.stdout.writelines(f"{name}=={version}\n" for name, version in versions.items())
