"""`buckeye demo`, without its training."""

from buckeye.setup.demo import main


def test_the_demonstration_ends_with_how_to_look_at_its_run(tmp_path, monkeypatch):
    monkeypatch.setattr(main, "run_stages", lambda paths, *, seed: None)
    monkeypatch.setattr(main, "results", lambda paths, *, seconds: "a table")
    shown = []
    main.run_demo(tmp_path, seed=0, show=shown.append)
    assert shown[0] == "\na table\n"
    run = tmp_path / "rl"
    assert shown[-1] == f"look at it:    buckeye ui {run}, which serves it at http://127.0.0.1:8420/"
