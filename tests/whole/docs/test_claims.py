"""Claims of the pages are true, and a false one is found."""

import pytest
from tests.places import ROOT
from tests.whole.docs.claims import claims, claims_of_page

FALSE = """
Type `buckeye rl fly`, or `rl --dry-run --nothing 3`. The flag `--no-such-flag`, the setting
`trainer.optim.speed`, `trainer.ckpt.keep` (4), `--budget` seconds (61), `BK-NO-SUCH-CODE`, `BUCKEYE_NO_SUCH`,
`src/buckeye/nothing.py`,
[a page](nothing.md), [a heading](evaluate.md#nothing).

| test | `no_such_finding` |

```bash
buckeye eval --nothing
```
"""


def test_false_claims_are_found():
    page = ROOT / "docs" / "how-to" / "diagnose.md"
    found = list(claims_of_page(page, FALSE))
    assert {claim.text for claim in found if claim.holds()} == {"trainer.ckpt.keep", "--budget"}
    assert {claim.kind for claim in found} == {
        "command",
        "flag",
        "setting",
        "default",
        "code",
        "variable",
        "file",
        "link",
        "finding",
    }


@pytest.mark.slow
def test_every_claim_is_true():
    every = list(claims())
    assert len(every) > 1_100
    assert [str(claim) for claim in every if not claim.holds()] == []
