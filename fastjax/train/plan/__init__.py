"""Memory planning: what the backward pass keeps, so that a run fits its GPU and recomputes as little as it must."""
