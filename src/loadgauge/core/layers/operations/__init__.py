"""Operations, tensors and weights, and the builder that lists them."""
