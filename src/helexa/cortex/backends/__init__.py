"""Third-party backends: converts their completions to OpenAI's format.

helexa's own nodes answer in OpenAI's format. Third-party backends differ in many ways: how a stream ends, where an
error is, how the deltas of tool calls belong together, and how token counts are named. The gateway converts the answers
of backends once, before it forwards, translates or charges them. The rest of the gateway reads only well-formed
answers.
"""
