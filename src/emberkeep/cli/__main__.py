"""`python -m emberkeep.cli`, for where the script is not on the path."""

from emberkeep.cli import main

main()
