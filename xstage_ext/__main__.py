"""`python -m xstage_ext` is the `xstage` command."""

from .cli import main

main()
