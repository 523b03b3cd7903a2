"""`python -m paceline`: the same as the command `paceline`."""

from paceline.cli import main

main()
