"""`buckeye demo`, without its training."""

import pytest

from buckeye.setup.demo import main


@pytest.mark.parametrize(
    ("is_there", "told"),
    [
        (True, "buckeye ui {run}, which serves it at http://127.0.0.1:8420/"),
        (False, "The page of the run needs buckeye-ui, which is not installed. Install it: "),
    ],
)
def test_the_demonstration_ends_with_how_to_look_at_its_run(tmp_path, monkeypatch, is_there, told):
    monkeypatch.setattr(main, "run_stages", lambda paths, *, seed: None)
    monkeypatch.setattr(main, "results", lambda paths, *, seconds: "a table")
    monkeypatch.setattr(main, "is_there", lambda name: is_there)
    shown = []
    main.run_demo(tmp_path, seed=0, show=shown.append)
    assert shown[0] == "\na table\n"
    assert shown[-1].startswith("look at it:    " + told.format(run=tmp_path / "rl"))
