"""The terminal monitor. It reads a running engine and imports no torch; its screens are not built yet."""
