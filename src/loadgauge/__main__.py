"""`python -m loadgauge`: the command line."""

from loadgauge.core.command_line.main import main

if __name__ == "__main__":
    main()
