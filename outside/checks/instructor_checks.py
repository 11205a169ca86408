"""Checks of instructor: structured responses, requested by a JSON Schema and by a tool."""

import instructor
from checking import MODEL, check, run
from openai import OpenAI
from pydantic import BaseModel


class User(BaseModel):
    name: str
    age: int


QUESTION = [{"role": "user", "content": "Jason is 25 years old."}]


def _ask(mode: instructor.Mode) -> None:
    client = instructor.from_openai(OpenAI(max_retries=0), mode=mode)
    user = client.chat.completions.create(
        model=MODEL, response_model=User, messages=QUESTION, max_retries=1, max_tokens=200, temperature=0
    )
    assert isinstance(user, User)


@check
def forced_tool():
    _ask(instructor.Mode.TOOLS)


@check
def schema():
    _ask(instructor.Mode.JSON_SCHEMA)


@check
def json_object():
    _ask(instructor.Mode.JSON)


@check
def streamed():
    client = instructor.from_openai(OpenAI(max_retries=0), mode=instructor.Mode.TOOLS)
    partial = client.create_partial(
        model=MODEL, response_model=User, messages=QUESTION, max_retries=1, max_tokens=200, temperature=0
    )
    *_, last = list(partial)
    assert last.name and last.age is not None


run()
