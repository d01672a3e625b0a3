"""A small web shop: an order clears the cart, earns points and is shipped; each by a consumer of its own."""
