"""Job files of other tools, read, written and converted. A file is data: nothing in it is imported, expanded or run."""
