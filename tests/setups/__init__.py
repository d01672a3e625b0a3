"""One small shop, played in each of the set-ups that a Django project may have."""
