"""What was measured, as answers to questions: the same numbers for the pages, the API, the reports and the exports."""
