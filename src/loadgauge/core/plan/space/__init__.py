"""The candidates of a search: values of each axis, constraints, how layers are split over stages; and the table of a sweep."""
