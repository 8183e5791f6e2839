"""Entry point of `python -m buckeye`, which is the `buckeye` command and starts the processes of a run."""

from buckeye.base.process import die_with_parent

if __name__ == "__main__":
    die_with_parent()  # before slow imports: the launcher may be killed meanwhile

    from buckeye.cli.main import main

    main()
