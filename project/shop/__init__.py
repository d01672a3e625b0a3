"""A small web shop: an order clears the cart, earns points and is shipped. Each of these has its own consumer group."""
