"""Compares the packages of this environment with known vulnerabilities, by pip-audit.

    python tests/support/audit.py PIP_AUDIT [--ignore-vuln ID]...

PIP_AUDIT: the program, in an environment of its own. Exit code 0: no vulnerability is known. 1: some are, one
line each. 2: packages could not be audited, because the service that knows them did not answer: pip-audit
itself ends with 0 if it skips every package.
"""

import json
import subprocess
import sys
import sysconfig
from collections.abc import Sequence


def audited(pip_audit: str, options: Sequence[str]) -> tuple[int, list[str]]:
    """The exit code, and the lines to print."""
    command = [pip_audit, "--progress-spinner", "off", "--format", "json"]
    command += ["--path", sysconfig.get_path("purelib"), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        packages = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError, TypeError):
        reason = (done.stderr.strip() or "it printed nothing").splitlines()[-1]
        return 2, [f"nothing was audited, because pip-audit could not ask its service: {reason[:200]}"]
    # semidice itself is installed from this folder
    skipped = [each for each in packages if "skip_reason" in each and each["name"] != "semidice"]
    checked = [each for each in packages if "skip_reason" not in each]
    if skipped or not checked:
        first = f"; the first: {skipped[0]['skip_reason'][:120]}" if skipped else ""
        known = f"{len(checked)} of {len(checked) + len(skipped)} packages were audited"
        return 2, [f"{known}: the service does not know the others{first}"]
    lines = [
        f"{each['name']} {each['version']}: {found['id']}, "
        f"fixed in {', '.join(found['fix_versions']) or 'no version'}"
        for each in checked
        for found in each["vulns"]
    ]
    if lines:
        return 1, [*lines, "raise the lower bound in pyproject.toml and the version in constraints.txt"]
    return 0, [f"{len(checked)} packages, no known vulnerability"]


if __name__ == "__main__":
    code, lines = audited(sys.argv[1], sys.argv[2:])
    print("\n".join(lines), file=sys.stderr if code else sys.stdout)
    sys.exit(code)
