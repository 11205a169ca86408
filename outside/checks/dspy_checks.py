"""Checks of DSPy: predictions with its two adapters, which ask the model for fields as marked text or as JSON."""

import dspy
from checking import MODEL, URL, check, run

lm = dspy.LM(
    f"openai/{MODEL}", api_base=f"{URL}/v1", api_key="any", max_tokens=300, temperature=0, cache=False, num_retries=0
)
dspy.configure(lm=lm)


class Capital(dspy.Signature):
    """Name the capital of the country."""

    country: str = dspy.InputField()
    capital: str = dspy.OutputField()


@check
def plain():
    assert lm("Say hello.")


@check
def prediction_in_json():
    with dspy.context(adapter=dspy.JSONAdapter()):
        assert dspy.Predict(Capital)(country="France").capital


@check
def prediction_by_a_chat_adapter():
    assert dspy.Predict(Capital)(country="France").capital


run()
