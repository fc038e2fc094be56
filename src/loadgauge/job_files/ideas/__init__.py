"""Job files of other tools, read and written. A file is data: nothing in it is imported, expanded or run."""
