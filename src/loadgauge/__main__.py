"""`python -m loadgauge`: the command line."""

from loadgauge.cli.main import main

if __name__ == "__main__":
    main()
