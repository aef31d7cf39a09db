"""What a step will cost before it runs: link costs, the replay of an order of sending, the bounds of all orders."""
