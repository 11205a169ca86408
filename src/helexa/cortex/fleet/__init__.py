"""The nodes: what is known of them, and how it is learnt."""
