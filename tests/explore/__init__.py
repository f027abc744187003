"""The explorer draws configurations of real trainings that nobody listed, and saves, loads and judges them."""
