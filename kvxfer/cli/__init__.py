"""The command line: argument parsing only; it calls the rooms."""
