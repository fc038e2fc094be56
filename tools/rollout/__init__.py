"""Published steps of reinforcement learning, and the page that scores their prediction (`make rollout`)."""
