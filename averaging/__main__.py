"""`python -m averaging`, for where the script `averaging` is not on the path."""

from averaging.cli import main

if __name__ == "__main__":
    main(prog_name="python -m averaging")
