"""The command line: `cli.py` has the click commands, and each subcommand has a file of its own."""
