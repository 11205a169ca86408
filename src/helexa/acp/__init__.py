"""`helexa-acp`: a coding agent for editors with the Agent Client Protocol (ACP), on any model endpoint."""
