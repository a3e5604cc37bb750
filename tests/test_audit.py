"""`make audit` fails unless every package was compared with known vulnerabilities."""

import json
import sys

import pytest
from audit import audited

SAFE = {"name": "numpy", "version": "2.0", "vulns": []}
BAD = {"name": "pillow", "version": "10.0", "vulns": [{"id": "CVE-1", "fix_versions": ["10.2"]}]}
UNKNOWN = {"name": "torch", "skip_reason": "Dependency not found and could not be audited: torch (2.6)"}
OWN = {"name": "semidice", "skip_reason": "Dependency not found and could not be audited: semidice (0.1)"}


@pytest.mark.parametrize(
    ("packages", "code", "line"),
    [
        ([SAFE, OWN], 0, "1 packages, no known vulnerability"),
        ([SAFE, BAD], 1, "pillow 10.0: CVE-1, fixed in 10.2"),
        ([SAFE, UNKNOWN], 2, "1 of 2 packages were audited: the service does not know the others; the first"),
        ([OWN], 2, "0 of 0 packages were audited"),
        (
            None,
            2,
            "nothing was audited, because pip-audit could not ask its service: ConnectionError: no",
        ),
    ],
    ids=["safe", "vulnerable", "one is skipped", "none is left", "the service is not reached"],
)
def test_an_audit_that_did_not_happen_fails(packages, code, line, tmp_path):
    program = tmp_path / "pip-audit"
    if packages is None:
        body = "raise SystemExit('Traceback\\nConnectionError: no name')"
    else:
        # pip-audit ends with 0 although it skipped every package
        body = f"print({json.dumps({'dependencies': packages})!r})"
    program.write_text(f"#!{sys.executable}\n{body}\n")
    program.chmod(0o755)
    found, lines = audited(str(program), [])
    assert found == code
    assert lines[0].startswith(line)
