"""The figures of an estimate, each from its own records, so that nothing is computed twice. A module here registers its own."""
