"""Options of the command line: from the fields of `Job` to flags, their types, completion and the project's own defaults."""
