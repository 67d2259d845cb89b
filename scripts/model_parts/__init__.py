"""The parts of `make models`: small random models, their trial in a real engine, the page that says how it went."""
