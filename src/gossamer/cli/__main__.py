"""`python -m gossamer.cli`: the command line where the script is not on the path."""

from gossamer.cli import main

if __name__ == "__main__":
    main()
