"""Documents: command lines, shell scripts, programs and nested files, parsed and never run."""
