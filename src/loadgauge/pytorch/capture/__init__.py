"""Any module as a list of operations: its training step run once on the simulated device, with sizes that stay symbols."""
