"The ladder of checks: what fails, what is skipped because of it, and what that says."

from __future__ import annotations

import json

from rlhf_nb.diagnose.checks import Finding, Rung, climb


def rung(name: str, passed: bool, *needs: str) -> Rung:
    return Rung(name, lambda subject: Finding(passed, f"{name} of {subject}"), "1", "look", needs)


# catches: a rung that is measured although what it needs failed; a skipped one that counts as passed
def test_a_rung_that_needs_a_failed_one_is_skipped_and_so_is_what_needs_that():
    ladder = [rung("a", False), rung("b", True, "a"), rung("c", True, "b"), rung("d", True)]
    found = climb(ladder, "it")
    assert [check.skipped for check in found.checks] == [False, True, True, False]
    assert [check.passed for check in found.checks] == [False, False, False, True]
    assert not found.passed
    assert found.checks[1].measured == "skipped: it needs a"
    assert found.checks[3].measured == "d of it"


def test_all_rungs_passed():
    found = climb([rung("a", True), rung("b", True, "a")], "it")
    assert found.passed and not any(check.skipped for check in found.checks)
    assert json.loads(json.dumps(found.as_json()))["checks"][1]["name"] == "b"
