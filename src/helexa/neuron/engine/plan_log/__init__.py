"""Records plans and replays them."""
