"""`Job`: a training job as it is asked for; its fields are flags, controls of the page and columns of a sweep."""
