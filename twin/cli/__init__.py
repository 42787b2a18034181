"""Options, streams, files and exit codes of the command line."""
