"""Published runs, from tables in their sources' words to the rows of `Job` fields that loadgauge comes with."""
