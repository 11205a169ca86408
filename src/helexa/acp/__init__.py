"""`helexa-acp`: a coding agent for editors.

It uses the Agent Client Protocol (ACP) and any LLM endpoint.
"""
