"""Run the command `trueup` as `python -m trueup.cli`."""

from trueup.cli import main

if __name__ == "__main__":
    main()
