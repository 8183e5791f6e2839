"""`python -m buckeye` is the `buckeye` command; the processes of a run are started so."""

from buckeye.base.process import die_with_parent

if __name__ == "__main__":
    die_with_parent()  # before what takes seconds to import: a launcher may be killed meanwhile

    from buckeye.cli.main import main

    main()
