"""What an engine holds on its cards: weights, cache, the profile's peak, graphs; and what stays behind when it sleeps."""
