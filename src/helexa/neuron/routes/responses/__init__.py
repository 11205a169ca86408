"""Routes of OpenAI's Responses API (`/v1/responses`): create, read and delete responses, and compact conversations."""
