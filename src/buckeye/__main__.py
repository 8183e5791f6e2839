"""`python -m buckeye` is the `buckeye` command; the processes of a run are started so."""

from buckeye.cli.main import main

if __name__ == "__main__":
    main()
