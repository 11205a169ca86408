"""How servers are asked, and what their streams say, by dialect."""
