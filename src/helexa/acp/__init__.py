"""`helexa-acp`: a coding agent for editors.

The agent communicates with the editor over the Agent Client Protocol (ACP), and can use any LLM endpoint.
"""
