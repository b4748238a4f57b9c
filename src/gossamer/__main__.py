"""`python -m gossamer`, which torchrun starts in each process."""

from gossamer.cli import main

if __name__ == "__main__":
    main()
