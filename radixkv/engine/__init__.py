"""The engine: requests, their scheduling, and the loop schedule -> run -> commit."""
