"""Prompts of different kinds for the demo model, written for these tests."""

from __future__ import annotations

PROMPTS = [
    "Explain in a few sentences why the sky is blue.",
    "Write a Python function that reverses a linked list.",
    "A farmer has 17 sheep and buys 5 more each week for 3 weeks. How many sheep does he have then?",
    "Translate into French: The library closes at six on Saturdays.",
    "List the planets of the solar system in order, one per line.",
    "Give me a JSON object with the keys name, age and city for an invented person.",
    "Write a short poem about the sea in winter.",
    "Summarise the plot of Romeo and Juliet in three sentences.",
    "What is 12 * 13? Show your steps.",
    "Write a polite email that asks a colleague to review a document by Friday.",
    "Describe how photosynthesis works to a ten-year-old.",
    'Complete the code:\n\ndef is_prime(n):\n    """Return True if n is prime."""\n',
    "Repeat the word 'apple' twenty times, separated by commas.",
    "What are the differences between TCP and UDP?",
    "Write a SQL query that lists the five customers with the highest total of orders.",
    "Who wrote 'Pride and Prejudice', and when was it published?",
    "Give three arguments for and three against working from home.",
    "Continue the sequence and explain it: 2, 6, 12, 20, 30, ...",
    "Write a haiku about debugging.",
    "Erkläre kurz, was ein Regenbogen ist.",
    "Convert 68 degrees Fahrenheit to Celsius.",
    "Make a Markdown table of four fruits with their colour and taste.",
    "If all bloops are razzies and all razzies are lazzies, are all bloops lazzies? Explain.",
    "Tell me a story that begins with: The door had never been there before.",
    "Name five uses of a paperclip besides holding paper.",
    "Write an HTML page with a heading and an unordered list of three items.",
]
