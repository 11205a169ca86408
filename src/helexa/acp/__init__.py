"""`helexa-acp`: a coding agent for editors that speak the Agent Client Protocol, on any model endpoint."""
